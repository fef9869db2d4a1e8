"""Arguments, exit codes, and the commands beside `attend`."""

import json
import subprocess
import unittest

import numpy as np

import tool
from tool import random_qkv

FILES = ("--q", "q.npy", "--k", "k.npy", "--v", "v.npy")


class Arguments(tool.ToolTest):
    def test_usage_errors(self):
        for arguments in ([], ["what"], ["attend", "--what"], ["attend", "a", "b"], ["bench", "--seconds", "x"],
                          ["attend", "--random", "--threads", "-1"], ["attend", "-s", "5", "--discard"],
                          ["attend", "--random", "--backend", "gpu"], ["attend", "--random", "x.safetensors"],
                          ["attend", "--layout", "sbhd", "--discard"], ["info", "more"]):
            with self.subTest(arguments=arguments):
                self.refuse(*arguments)

    def test_an_unknown_command_is_named(self):
        self.refuse("foo", mentions='no command "foo"; there are attend, verify, bench, explain, info')

    def test_bad_values(self):
        for options, mentions in ((["--window", "3"], "--window"), (["--window", "-1,2"], "--window"),
                                  (["--window", "1,2,3"], "--window"), (["--window", "a,b"], "--window"),
                                  (["--softcap", "-1"], "softcap"), (["--softcap", "nan"], "softcap"),
                                  (["--scale", "nan"], "scale"), (["--type", "f8"], "f8"),
                                  (["--h-q", "3", "--h-k", "2"], "h_k is 2"), (["--d-qk", "0"], "q"),
                                  (["--b", "-5"], "--b"), (["-s", "99999999999999999"], "--s-q"),
                                  (["-s", "1000000000000", "--d-qk", "1000000000000"], "too large"),
                                  (["-s", "1000000000000"], "out of memory")):
            with self.subTest(options=options):
                self.refuse("attend", "--random", *options, mentions=mentions)

    def test_shapes_that_do_not_fit(self):
        q, k, v = random_qkv(1)
        for changes, mentions in (({"k": k[:, :, :, :5]}, "k: shape"), ({"v": v[:, :3]}, "v: shape"),
                                  ({"k": k[0]}, "rank 4"), ({"q": q[0, 0, 0]}, "rank 2, 3 or 4"),
                                  ({"q": q[None]}, "rank 2, 3 or 4"), ({"q": q[:, :, :3]}, "must divide"),
                                  ({"k": k.astype(np.float16)}, "--convert f32")):
            with self.subTest(mentions=mentions):
                self.save(**({"q": q, "k": k, "v": v} | changes))
                self.refuse("attend", *FILES, "-o", "o.npy", mentions=mentions)
        np.save(self.folder / "slopes.npy", np.zeros(3, np.float32))
        self.save(q=q, k=k, v=v)
        self.refuse("attend", *FILES, "-o", "o.npy", "--alibi", "slopes.npy", mentions="alibi_slopes")
        self.refuse("attend", "q.npy", "-o", "o.npy", mentions="one tensor")
        self.refuse("attend", "x.safetensors:q", "-o", "o.npy", mentions="one tensor")
        np.save(self.folder / "slopes.npy", np.zeros((2, 2, 4), np.float32))
        self.refuse("attend", *FILES, "-o", "o.npy", "--alibi", "slopes.npy", mentions="--alibi")

    def test_help_and_version(self):
        for arguments in (["--help"], ["attend", "--help"], ["--version"], ["--help-all"]):
            self.assertTrue(self.succeed(*arguments))


class Commands(tool.ToolTest):
    def test_info(self):
        self.assertRegex(self.succeed("info"), r"(?m)^CPU targets +\w+")

    def test_explain_needs_no_memory(self):
        text = self.succeed("explain", "-s", "1000000000", "--type", "bf16", "--causal")
        self.assertIn("bf16[1, 1000000000, 1, 64]", text)
        text = self.succeed("explain", "--pass", "backward", "--backend", "reference", "--window", "3,inf")
        self.assertIn("window of 3 keys to the left and all keys to the right,", text)
        text = self.succeed("explain", "--causal", "--window", "1,5")
        self.assertIn("causal, window of 1 key to the left, bottom-right", text)

    def test_explain_of_files(self):
        q, k, v = random_qkv(2)
        self.save(q=q, k=k, v=v)
        self.assertIn("k f32[2, 9, 2, 16]", self.succeed("explain", *FILES))

    def test_verify(self):
        sizes = ("-s", "70", "--s-k", "90", "--h-q", "4", "--h-k", "2", "--d-v", "24", "--causal")
        for options in (["--type", "bf16"], ["--type", "f16", "--softcap", "2"], ["--alibi", "auto"],
                        ["--rows", "5"], ["--window", "5,0", "--align", "top-left"]):
            with self.subTest(options=options):
                text = self.succeed("verify", *sizes, *options)
                for name in ("O", "LSE", "dQ") + (() if "--rows" in options else ("dK", "dV")):
                    self.assertRegex(text, rf"(?m)^{name} +[\d,]+  \[.* 0\.\d+  ok$")
        q, k, v = random_qkv(3)
        self.save(q=q, k=k, v=v)
        self.assertIn("All within", self.succeed("verify", *FILES, "--pass", "forward"))
        self.refuse("verify", *sizes, "--alibi", "auto", "--rows", "5", mentions="--alibi")

    def test_verify_of_values_that_are_not_finite(self):
        q, k, v = random_qkv(4)
        q[1, 3, 2, 5] = np.nan
        self.save(q=q, k=k, v=v)
        self.succeed("verify", *FILES, "--pass", "forward")  # the contract: NaN in, NaN out
        # Scores beyond float32, which the oracle computes and the contract does not promise.
        self.save(q=np.full_like(q, 1e20), k=np.full_like(k, 1e20), v=v)
        done = self.run_tool("verify", *FILES, "--pass", "forward")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertRegex(done.stdout, r"(?m)^LSE .* BAD$")

    def test_bench(self):
        text = self.succeed("bench", "--json", "-s", "64,128", "-d", "32", "--bursts", "2", "--seconds",
                            "0.01", "--pass", "forward,backward", "--heads", "2")
        cells = [json.loads(line) for line in text.splitlines()]
        self.assertEqual(len(cells), 8)
        self.assertTrue(all(cell["median_seconds"] >= cell["best_seconds"] > 0 for cell in cells))
        self.refuse("bench", "--pass", "sideways", mentions="pass")
        self.refuse("bench", "--type", "f8", mentions='"f8", must be f32, bf16, f16, or f64 (for --backend reference)')
        refused = self.refuse("bench", "--type", "f64", mentions="reference: runs only when asked for")
        self.assertNotIn("::", refused)  # a user of the tool knows no C++ names

    def test_bench_serve(self):
        problem = {"pass": "bwd", "dtype": "f32", "b": 1, "s_q": 65, "s_k": 65, "h_q": 2, "h_k": 1,
                   "d_qk": 32, "d_v": 32, "causal": True, "threads": 1, "min_seconds": 0.02}
        lines = [json.dumps(problem), "nonsense", "[1]", json.dumps(problem | {"b": -1}), "",
                 json.dumps(problem | {"pass": "fwd", "h_k": 3}), json.dumps({"drop": True}),
                 json.dumps(problem | {"dtype": "bf16"})]
        answers = [json.loads(line) for line in
                   self.succeed("bench", "--serve", input="\n".join(lines)).splitlines()]
        self.assertEqual(len(answers), 7)
        self.assertGreater(answers[0]["seconds_per_run"] * answers[0]["runs"], 0.019)
        self.assertEqual(answers[0]["flops"], 65 * 66 // 2 * 2 * 32 * 10)
        for answer in answers[1:5]:
            self.assertEqual(list(answer), ["error"])
        self.assertEqual(answers[5], {"dropped": 1})
        self.assertGreater(answers[6]["runs"], 0)

    def test_serve_answers_line_by_line(self):
        with subprocess.Popen([tool.PROGRAM, "bench", "--serve"], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True) as process:
            for _ in range(2):
                process.stdin.write("{}\n")
                process.stdin.flush()
                self.assertIn("error", json.loads(process.stdout.readline()))
            process.stdin.close()
            self.assertEqual(process.wait(60), 0)


if __name__ == "__main__":
    unittest.main()
