"""`abacist attend` against the formula in numpy: formats, layouts, masks, outputs."""

import os
import signal
import subprocess
import time
import unittest

import numpy as np

import tool
from tool import attention, band, pack, random_qkv, unpack

FILES = ("--q", "q.npy", "--k", "k.npy", "--v", "v.npy")


class Layouts(tool.ToolTest):
    def check(self, q, k, v, file_axes, *options, fortran=False):
        """Axes of [b, s, h, d] in the files, e.g. (1, 2, 3) for [s, h, d] with b = 1."""
        def to_file(array):
            array = array.transpose(file_axes + tuple(set(range(4)) - set(file_axes)))
            array = array.reshape(array.shape[:len(file_axes)])
            return np.asfortranarray(array) if fortran else np.ascontiguousarray(array)
        self.save(q=to_file(q), k=to_file(k), v=to_file(v))
        self.succeed("attend", *FILES, "-o", "o.npy", "--lse", "lse.npy", *options)
        o, lse = attention(q, k, v)
        np.testing.assert_allclose(self.load("o.npy"), to_file(o), rtol=0, atol=2e-6)
        np.testing.assert_allclose(self.load("lse.npy").reshape(lse.shape), lse, rtol=0, atol=2e-6)
        self.assertEqual(self.load("lse.npy").ndim, len(file_axes) - 1)

    def test_bshd(self):
        self.check(*random_qkv(1), (0, 1, 2, 3))

    def test_bhsd(self):
        self.check(*random_qkv(2), (0, 2, 1, 3), "--layout", "bhsd")

    def test_rank_3(self):
        self.check(*random_qkv(3, b=1), (1, 2, 3))

    def test_rank_3_heads_first(self):
        self.check(*random_qkv(4, b=1), (2, 1, 3), "--layout", "bhsd")

    def test_rank_2(self):
        self.check(*random_qkv(5, b=1, h_q=1, h_k=1), (1, 3))

    def test_fortran_order_is_read_as_strides(self):
        self.check(*random_qkv(6), (0, 1, 2, 3), fortran=True)
        self.check(*random_qkv(7), (0, 2, 1, 3), "--layout", "bhsd", fortran=True)
        self.assertNotIn("'fortran_order': True", (self.folder / "o.npy").read_text("latin1")[:128])

    def test_lengths_of_zero_and_one(self):
        self.check(*random_qkv(8, s_q=1, s_k=1), (0, 1, 2, 3))
        q, k, v = random_qkv(9, s_k=0)
        self.save(q=q, k=k, v=v)
        self.succeed("attend", *FILES, "-o", "o.npy", "--lse", "lse.npy")
        self.assertTrue((self.load("o.npy") == 0).all())
        self.assertTrue((self.load("lse.npy") == -np.inf).all())

    def test_the_same_file_for_all_three(self):
        q, _, _ = random_qkv(10, h_q=2, d_qk=16, d_v=16)
        self.save(x=q)
        self.succeed("attend", "--q", "x.npy", "--k", "x.npy", "--v", "x.npy", "-o", "o.npy")
        np.testing.assert_allclose(self.load("o.npy"), attention(q, q, q)[0], atol=2e-6)


class Types(tool.ToolTest):
    def test_f16_npy(self):
        q, k, v = random_qkv(11, dtype=np.float16)
        self.save(q=q, k=k, v=v)
        self.succeed("attend", *FILES, "-o", "o.npy")
        self.assertEqual(self.load("o.npy").dtype, np.float16)
        np.testing.assert_allclose(self.load("o.npy"), attention(q, k, v)[0], atol=4e-3)
        self.succeed("attend", *FILES, "-o", "o.npy", "--out-type", "f32")
        self.assertEqual(self.load("o.npy").dtype, np.float32)

    def test_f64_needs_a_word(self):
        q, k, v = random_qkv(12, dtype=np.float64)
        self.save(q=q, k=k, v=v)
        self.refuse("attend", *FILES, "-o", "o.npy", mentions="--convert f32")
        self.succeed("attend", *FILES, "-o", "o.npy", "--convert", "f32")
        np.testing.assert_allclose(self.load("o.npy"), attention(q, k, v)[0], atol=3e-6)
        self.succeed("attend", *FILES, "-o", "o.npy", "--backend", "reference")
        np.testing.assert_allclose(self.load("o.npy"), attention(q, k, v)[0], atol=1e-14)

    def test_bf16(self):
        q, k, v = random_qkv(13)
        self.write("x.safetensors", pack(q=(q, "BF16"), k=(k, "BF16"), v=(v, "BF16")))
        self.refuse("attend", "x.safetensors", "-o", "o.npy", mentions=".npy has no bf16")
        self.succeed("attend", "x.safetensors", "-o", "o.safetensors")
        q, k, v = unpack((self.folder / "x.safetensors").read_bytes()).values()
        o, lse = attention(q, k, v)
        out = unpack((self.folder / "o.safetensors").read_bytes())
        np.testing.assert_allclose(out["o"], o, atol=3e-2)
        np.testing.assert_allclose(out["lse"], lse, atol=2e-6)

    def test_unaligned_tensors(self):
        q, k, v = random_qkv(14)
        for padding in range(8):
            self.write("x.safetensors", pack(padding, q=q, k=k, v=v))
            self.succeed("attend", "x.safetensors", "-o", "o.npy")
            np.testing.assert_allclose(self.load("o.npy"), attention(q, k, v)[0], atol=2e-6)

    def test_names_in_a_file(self):
        q, k, v = random_qkv(15)
        self.write("x.safetensors", pack(**{"a:b": q, "key": k, "v": v, "other": q}))
        self.succeed("attend", "--q", "x.safetensors:a:b", "--k", "x.safetensors:key",
                     "--v", "x.safetensors", "-o", "o.safetensors:out")
        out = unpack((self.folder / "o.safetensors").read_bytes())
        np.testing.assert_allclose(out["out"], attention(q, k, v)[0], atol=2e-6)
        self.refuse("attend", "x.safetensors", "-o", "o.npy", mentions="no tensor 'q'")


class Masks(tool.ToolTest):
    def check(self, options, s_q=7, s_k=9, **formula):
        q, k, v = random_qkv(20, s_q, s_k)
        self.save(q=q, k=k, v=v)
        self.succeed("attend", *FILES, "-o", "o.npy", "--lse", "lse.npy", *options)
        o, lse = attention(q, k, v, **formula)
        np.testing.assert_allclose(self.load("o.npy"), o, atol=3e-6)
        np.testing.assert_allclose(self.load("lse.npy"), lse, atol=5e-6)

    def test_causal(self):
        self.check(["--causal"], visible=band(7, 9, right=0))
        self.check(["--causal"], 9, 7, visible=band(9, 7, right=0))

    def test_top_left(self):
        self.check(["--causal", "--align", "top-left"], visible=band(7, 9, right=0, shift=0))

    def test_window(self):
        self.check(["--window", "2,1"], visible=band(7, 9, 2, 1))
        self.check(["--window", "inf,1"], visible=band(7, 9, right=1))
        self.check(["--window", "3,inf", "--causal"], visible=band(7, 9, 3, 0))
        self.check(["--window", "9223372036854775806,0"], visible=band(7, 9, right=0))

    def test_score(self):
        self.check(["--scale", "-0.5"], scale=-0.5)
        self.check(["--softcap", "1.5"], softcap=1.5)

    def test_alibi(self):
        slopes = 2.0 ** (-8 * np.arange(1, 5) / 4)
        self.check(["--alibi", "auto"], slopes=slopes)
        np.save(self.folder / "slopes.npy", np.array([0.5, 0.0, -0.25, 1.0], np.float32))
        self.check(["--alibi", "slopes.npy"], slopes=[0.5, 0.0, -0.25, 1.0])
        np.save(self.folder / "slopes.npy", np.array([[0.5, 0.0, -0.25, 1.0]] * 2))  # [b, h_q], f64
        self.check(["--alibi", "slopes.npy"], slopes=[0.5, 0.0, -0.25, 1.0])


class Outputs(tool.ToolTest):
    def setUp(self):
        super().setUp()
        q, k, v = random_qkv(30)
        self.save(q=q, k=k, v=v)

    def test_an_input_is_not_overwritten(self):
        os.link(self.folder / "k.npy", self.folder / "hard.npy")
        os.symlink("v.npy", self.folder / "soft.npy")
        for name in ("q.npy", "./k.npy", "hard.npy", "soft.npy"):
            self.refuse("attend", *FILES, "-o", name, mentions="is an input")
            self.refuse("attend", *FILES, "-o", "o.npy", "--lse", name, mentions="is an input")
            for picture in ("--svg", "--html"):
                self.refuse("explain", *FILES, picture, name, mentions="is an input")

    def test_two_outputs_need_two_places(self):
        self.refuse("explain", *FILES, "--svg", "x", "--html", "./x", mentions="two outputs")
        self.refuse("attend", *FILES, "-o", "o.npy", "--lse", "./o.npy", mentions="two outputs")
        self.refuse("attend", *FILES, "-o", "o.safetensors:x", "--lse", "o.safetensors:x",
                    mentions="two outputs")

    def test_refused_targets(self):
        (self.folder / "dir.npy").mkdir()
        self.refuse("attend", *FILES, "-o", "dir.npy", mentions="no regular file")
        self.refuse("attend", *FILES, "-o", "nowhere/o.npy", mentions="cannot be written")
        self.refuse("attend", *FILES, "-o", "o.txt", mentions=".npy or .safetensors")
        self.refuse("attend", *FILES, mentions="--out is missing")
        self.refuse("attend", *FILES, "-o", "o.npy", "--discard", mentions="--discard")
        self.refuse("attend", *FILES, "--lse", "l.npy", "--discard", mentions="--discard")

    def test_closed_standard_streams(self):
        # Else an output file would be standard error, and take its text.
        command = ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", tool.PROGRAM, "attend", *FILES, "-o", "o.npy",
                   "--progress"]
        done = subprocess.run(command, cwd=self.folder, check=False)
        self.assertEqual(done.returncode, 2)  # the summary had nowhere to go
        self.assertEqual(self.load("o.npy").shape, (2, 7, 4, 24))

    def test_what_was_there_stays_on_failure_and_goes_on_success(self):
        self.write("o.npy", b"old")
        os.chmod(self.folder / "o.npy", 0o640)
        os.symlink("o.npy", self.folder / "link.npy")
        self.refuse("attend", *FILES, "-o", "o.npy", "--scale", "inf", mentions="scale")
        self.succeed("attend", *FILES, "-o", "link.npy")
        self.assertTrue((self.folder / "link.npy").is_symlink())
        self.assertEqual(self.load("o.npy").shape, (2, 7, 4, 24))
        self.assertEqual((self.folder / "o.npy").stat().st_mode & 0o777, 0o640)

    def test_nothing_is_left_after_a_signal(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            command = [tool.PROGRAM, "attend", "--random", "-s", "300000", "-o", "o.npy"]
            before = set(self.contents())
            with subprocess.Popen(command, cwd=self.folder, stderr=subprocess.PIPE) as process:
                for _ in range(600):
                    if set(os.listdir(self.folder)) != before:
                        break
                    time.sleep(0.1)
                self.assertNotEqual(set(os.listdir(self.folder)), before)
                process.send_signal(number)
                self.assertEqual(process.wait(60), -number)
            self.assertEqual(set(self.contents()), before)

    def test_an_input_cut_short_meanwhile(self):
        self.save(x=np.zeros((1, 64), np.float32))
        header = (self.folder / "x.npy").read_bytes()[:128].replace(b"(1, 64), }     ", b"(400000, 64), }")
        with open(self.folder / "x.npy", "wb") as file:
            file.write(header)
            file.truncate(128 + 400000 * 64 * 4)
        before = set(os.listdir(self.folder))
        command = [tool.PROGRAM, "attend", "--q", "x.npy", "--k", "x.npy", "--v", "x.npy", "-o", "o.npy"]
        with subprocess.Popen(command, cwd=self.folder, stderr=subprocess.PIPE, text=True) as process:
            for _ in range(600):
                if set(os.listdir(self.folder)) != before:
                    break
                time.sleep(0.1)
            os.truncate(self.folder / "x.npy", 4096)
            self.assertIn("cut short while", process.communicate(timeout=120)[1])
            self.assertEqual(process.returncode, 2)
        self.assertEqual(set(os.listdir(self.folder)), before)

    def test_full_disk(self):
        if not os.path.exists("/dev/full"):
            self.skipTest("no /dev/full")
        with open("/dev/full", "w", encoding="utf-8") as full:
            done = subprocess.run([tool.PROGRAM, "info"], stdout=full, stderr=subprocess.PIPE,
                                  check=False)
        self.assertEqual(done.returncode, 2)

    def test_summary_and_progress(self):
        text = self.succeed("attend", *FILES, "-o", "o.npy", "--causal")
        self.assertRegex(text, r"(?m)^memory .* at most, .* the score matrix would take 2\.0 kB in f32$")
        self.assertIn("o.npy: o f32[2, 7, 4, 24]", text)
        length = 8000 if os.environ.get("ABACIST_SANITIZED") else 25000
        done = self.run_tool("attend", "--random", "-s", length, "--progress")
        self.assertEqual(done.returncode, 0, done.stderr)
        for line in done.stderr.splitlines():
            self.assertRegex(line, r"^attend +\d+%  \d+ s(, about \d+ s left)?$")


if __name__ == "__main__":
    unittest.main()
