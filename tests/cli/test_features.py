"""Bias, boolean mask, sinks, dropout, key lengths and pages: `attend` against the formula in numpy,
`verify` against the oracle, and what is wrong with files and shapes."""

import unittest

import numpy as np

import tool
from tool import attention, band, pack, random_qkv

FILES = ("--q", "q.npy", "--k", "k.npy", "--v", "v.npy")
B, S_Q, S_K, H_Q, H_K = 2, 7, 9, 4, 2


def philox(counter, key):
    """Philox-4x32-10, from its paper; counter [..., 4], key of two words."""
    c = [counter[..., i].astype(np.uint64) for i in range(4)]
    k = [np.uint64(key & 0xFFFFFFFF), np.uint64(key >> 32)]
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(p1 >> np.uint64(32)) ^ c[1] ^ k[0], p1 & low, (p0 >> np.uint64(32)) ^ c[3] ^ k[1], p0 & low]
        k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
    return np.stack(c, -1)


def dropout(p, seed, shape):
    """What multiplies the probabilities [b, h, s_q, s_k]; lengths below 2^32."""
    b, h, s_q, s_k = shape
    n, head, i, quad = np.indices((b, h, s_q, (s_k + 3) // 4))
    counter = np.stack([i, quad, n * h + head, np.zeros_like(i)], -1)
    words = philox(counter, seed).reshape(b, h, s_q, -1)[..., :s_k]
    return np.where(words >= int(p * 2.0 ** 32), 1.0 / (1.0 - p), 0.0)


def pages_of(array, lengths, size, ids):
    """Pools and the block table of [b, s, h, d]; what no key lies in is NaN."""
    b, s = array.shape[:2]
    entries = -(-s // size)
    pool = np.full((b * entries + 1, size, *array.shape[2:]), np.nan, array.dtype)
    table = np.asarray(ids, np.int64).reshape(b, entries)
    for n in range(b):
        for j in range(lengths[n]):
            pool[table[n, j // size], j % size] = array[n, j]
    return pool, table


class Attend(tool.ToolTest):
    def setUp(self):
        super().setUp()
        self.q, self.k, self.v = random_qkv(40, S_Q, S_K, H_Q, H_K, b=B)
        self.save(q=self.q, k=self.k, v=self.v)
        self.random = np.random.default_rng(41)

    def check(self, *options, files=FILES, **formula):
        self.succeed("attend", *files, "-o", "o.npy", "--lse", "lse.npy", *options)
        o, lse = attention(self.q, self.k, self.v, **formula)
        np.testing.assert_allclose(self.load("o.npy"), o, atol=3e-6)
        np.testing.assert_allclose(self.load("lse.npy"), lse, atol=5e-6)

    def test_bias_of_every_shape(self):
        for shape in ((B, H_Q, S_Q, S_K), (1, 1, S_Q, S_K), (B, 1, 1, S_K), (1, H_Q, 1, S_K), (H_Q, S_Q, S_K),
                      (S_Q, S_K), (S_K,)):
            bias = self.random.standard_normal(shape).astype(np.float32)
            np.save(self.folder / "bias.npy", bias)
            self.check("--bias", "bias.npy", bias=bias)
            np.save(self.folder / "bias.npy", np.asfortranarray(bias.astype(np.float64)))
            self.check("--bias", "bias.npy", bias=bias)

    def test_bias_in_half_precision(self):
        bias = self.random.standard_normal((H_Q, S_Q, S_K)).astype(np.float16)
        np.save(self.folder / "bias.npy", bias)
        self.check("--bias", "bias.npy", bias=bias)

    def test_visible(self):
        for shape in ((B, H_Q, S_Q, S_K), (S_Q, S_K), (B, 1, 1, S_K)):
            visible = self.random.random(shape) < 0.5
            np.save(self.folder / "m.npy", visible)
            self.check("--visible", "m.npy", visible=visible)
            self.check("--visible", "m.npy", "--causal", visible=visible & band(S_Q, S_K, right=0))
            self.write("m.safetensors", pack(mask=visible, other=visible.astype(np.uint8) * 7))
            self.check("--visible", "m.safetensors:mask", visible=visible)
            self.check("--visible", "m.safetensors:other", visible=visible)

    def test_sinks(self):
        sinks = np.array([0.5, -np.inf, 3.0, -2.0], np.float32)
        np.save(self.folder / "sinks.npy", sinks)
        self.check("--sinks", "sinks.npy", sinks=sinks)
        np.save(self.folder / "sinks.npy", sinks.astype(np.float64))
        self.check("--sinks", "sinks.npy", "--window", "0,0", sinks=sinks, visible=band(S_Q, S_K, 0, 0))

    def test_dropout(self):
        shape = (B, H_Q, S_Q, S_K)
        for p, seed in ((0.25, 0), (0.75, 2 ** 63 + 12345)):
            kept = dropout(p, seed, shape)
            self.assertTrue(0 < (kept == 0).sum() < kept.size)
            self.check("--dropout", p, "--dropout-seed", seed, kept=kept)

    def test_key_lengths(self):
        lengths = [5, 0]
        visible = np.arange(S_K) < np.array(lengths)[:, None, None, None]
        self.check("--key-lengths", "5,0", visible=visible)
        for dtype in (np.int32, np.int64):
            np.save(self.folder / "lengths.npy", np.array(lengths, dtype))
            self.check("--key-lengths", "lengths.npy", visible=visible)
            self.write("x.safetensors", pack(key_lengths=np.array(lengths, dtype), other=self.q))
            self.check("--key-lengths", "x.safetensors", visible=visible)
        shifted = np.stack([np.pad(band(S_Q, n, right=0), ((0, 0), (0, S_K - n))) for n in lengths])[:, None]
        self.check("--key-lengths", "5,0", "--causal", visible=shifted)

    def test_pages(self):
        lengths = [8, 3]
        visible = np.arange(S_K) < np.array(lengths)[:, None, None, None]
        pool_k, table = pages_of(self.k, lengths, 4, [5, 2, 0, 1, 4, 3])
        pool_v, _ = pages_of(self.v, lengths, 4, [5, 2, 0, 1, 4, 3])
        table[0, 2], table[1, 1:] = -1, 99  # that no key lies in
        self.save(pool_k=pool_k, pool_v=pool_v, table=table)
        files = ("--q", "q.npy", "--k", "pool_k.npy", "--v", "pool_v.npy")
        paged = ("--block-table", "table.npy", "--key-lengths", "8,3")
        self.check(*paged, files=files, visible=visible)
        self.check("--page-size", "4", "--key-lengths", "8,3", visible=visible)
        self.check("--page-size", "1")
        table[1, 0] = 7
        self.save(table=table)
        self.refuse("attend", *files, *paged, "-o", "new.npy", mentions="block_table: has page ids outside")

    def test_varlen(self):
        cu_q, cu_k = [0, 3, 3, 7], [0, 4, 5, 9]
        q, k, v = (x[0] for x in random_qkv(42, 7, 9, H_Q, H_K, b=1))
        self.save(q=q, k=k, v=v, cu=np.array(cu_k))
        bias = self.random.standard_normal((3, 1, 4, 4)).astype(np.float32)
        np.save(self.folder / "bias.npy", bias)
        self.succeed("attend", *FILES, "--cu-seqlens-q", "0,3,3,7", "--cu-seqlens-k", "cu.npy", "--causal", "--bias",
                     "bias.npy", "-o", "o.npy", "--lse", "lse.npy")
        for n in range(3):
            rows, keys = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
            s_q, s_k = rows.stop - rows.start, keys.stop - keys.start
            o, lse = attention(q[None, rows], k[None, keys], v[None, keys], visible=band(s_q, s_k, right=0),
                               bias=bias[n, :, :s_q, :s_k])
            np.testing.assert_allclose(self.load("o.npy")[rows], o[0], atol=3e-6)
            np.testing.assert_allclose(self.load("lse.npy")[:, rows], lse[0], atol=5e-6)
        self.succeed("attend", *FILES, "--cu-seqlens-q", "0,3", "--cu-seqlens-k", "0,4", "-o", "o.npy", "--lse",
                     "lse.npy")
        self.assertTrue((self.load("o.npy")[3:] == 0).all() and (self.load("lse.npy")[:, 3:] == 0).all())

    def test_batch_invariant(self):
        self.check("--batch-invariant")
        whole = self.load("o.npy")
        self.save(q=self.q[1:], k=self.k[1:], v=self.v[1:])
        self.succeed("attend", *FILES, "-o", "one.npy", "--batch-invariant")
        self.assertEqual(self.load("one.npy").tobytes(), whole[1:].tobytes())

    def test_random_ones_depend_on_the_seed_alone(self):
        options = ("--bias", "random:bh", "--visible", "random", "--sinks", "random", "--key-lengths", "random")
        outputs = []
        for seed in (3, 3, 4):
            self.succeed("attend", "--random", "--seed", seed, "-s", "50", *options, "-o", "o.npy")
            outputs.append(self.load("o.npy").tobytes())
        self.assertEqual(outputs[0], outputs[1])
        self.assertNotEqual(outputs[0], outputs[2])


class Refusals(tool.ToolTest):
    def setUp(self):
        super().setUp()
        q, k, v = random_qkv(50, S_Q, S_K, H_Q, H_K, b=B)
        self.save(q=q, k=k, v=v)

    def test_files(self):
        for option, array, mentions in (
                ("--bias", np.zeros((1, 1, 1, S_Q, S_K), np.float32), "(--bias) is <f4[1, 1, 1, 7, 9], must be floats"),
                ("--bias", np.zeros((S_Q, S_K), np.int32), "(--bias) is <i4[7, 9]"),
                ("--bias", np.zeros((S_Q, S_K + 1), np.float32), "bias: shape"),
                ("--bias", np.zeros((3, S_Q, S_K), np.float32), "bias: shape"),
                ("--visible", np.zeros((S_Q, S_K), np.float32), "must be booleans or u8"),
                ("--visible", np.zeros((S_K, S_Q), bool), "visible: shape"),
                ("--sinks", np.zeros((1, H_Q), np.float32), "(--sinks)"),
                ("--sinks", np.zeros(3, np.float32), "sinks: "),
                ("--sinks", np.zeros(H_Q, bool), "(--sinks)"),
                ("--key-lengths", np.zeros(B, np.float32), "must be whole numbers [b]"),
                ("--key-lengths", np.zeros((B, 1), np.int32), "must be whole numbers [b]"),
                ("--key-lengths", np.zeros(3, np.int32), "key_lengths: "),
                ("--key-lengths", np.array([3, S_K + 1]), "key_lengths: "),
                ("--key-lengths", np.array([3, 2 ** 40]), "is no 32-bit integer")):
            with self.subTest(option=option, mentions=mentions):
                np.save(self.folder / "x.npy", array)
                self.refuse("attend", *FILES, "-o", "o.npy", option, "x.npy", mentions=mentions)
        for option in ("--bias", "--visible", "--sinks", "--key-lengths", "--block-table", "--alibi"):
            more = ("--key-lengths", "1,1") if option == "--block-table" else ()
            self.refuse("attend", *FILES, "-o", "o.npy", option, "none.npy", *more, mentions="none.npy")
            self.write("bad.npy", b"\x93NUMPY nonsense")
            self.refuse("attend", *FILES, "-o", "o.npy", option, "bad.npy", *more, mentions="bad.npy")
            self.refuse("attend", *FILES, "-o", "k.npy", option, "k.npy", *more)

    def test_values(self):
        for options, mentions in ((["--dropout", "1.5"], "dropout.p"), (["--dropout", "nan"], "dropout.p"),
                                  (["--dropout-seed", "-1"], "--dropout-seed"), (["--page-size", "0"], "--page-size"),
                                  (["--key-lengths", "5"], "key_lengths"), (["--key-lengths", "5,-1"], "key_lengths"),
                                  (["--key-lengths", "5,,1"], "--key-lengths"), (["--key-lengths", "5,x"], "random"),
                                  (["--key-lengths", "5,10", "--page-size", "4"], "K has 9 keys"),
                                  (["--bias", "random:x"], "random:AXES"), (["--visible", "random:"], None),
                                  (["--bias", "what"], ".npy"), (["--sinks", "auto"], ".npy")):
            with self.subTest(options=options):
                if mentions is None:
                    self.succeed("attend", *FILES, "--discard", *options)
                else:
                    self.refuse("attend", *FILES, "-o", "o.npy", *options, mentions=mentions)

    def test_varlen(self):
        cu = ("--cu-seqlens-q", "0,3,7")
        self.refuse("attend", *FILES, "-o", "o.npy", *cu, mentions="rank 3")
        for options, mentions in ((cu, "cu_seqlens_k"), (("--cu-seqlens-k", "0,3"), "needs --cu-seqlens-q"),
                                  ((*cu, "--cu-seqlens-k", "0,3"), "cu_seqlens"),
                                  ((*cu, "--cu-seqlens-k", "0,3,8"), "cu_seqlens_k"),
                                  ((*cu, "--cu-seqlens-k", "0,4,3"), "cu_seqlens_k"),
                                  ((*cu, "--cu-seqlens-k", "1,2,x"), "--cu-seqlens-k is"),
                                  ((*cu, "--cu-seqlens-k", "0,3,7", "--key-lengths", "1,1"), "key_lengths")):
            with self.subTest(options=options):
                self.refuse("attend", "--random", "-s", "7", "-o", "o.npy", *options, mentions=mentions)
        np.save(self.folder / "none.npy", np.zeros(0, np.int32))
        self.refuse("attend", "--random", "-s", "7", "-o", "o.npy", "--cu-seqlens-q", "none.npy", "--bias", "random",
                    mentions="b + 1")
        self.refuse("verify", "-s", "7", *cu, "--cu-seqlens-k", "0,3,7", "--rows", "2", mentions="--rows")

    def test_pages(self):
        np.save(self.folder / "table.npy", np.zeros((B, 1), np.int32))
        paged = ("--block-table", "table.npy")
        self.refuse("attend", *FILES, "-o", "o.npy", *paged, mentions="needs --key-lengths")
        self.refuse("attend", *FILES, "-o", "o.npy", *paged, "--key-lengths", "1,1", "--page-size", "2",
                    mentions="one or the other")
        np.save(self.folder / "table.npy", np.zeros((B + 1, 1), np.int32))
        self.refuse("attend", *FILES, "-o", "o.npy", *paged, "--key-lengths", "1,1", mentions="block_table")
        self.refuse("verify", "-s", "30", "--page-size", "4", mentions="--pass forward")
        self.refuse("bench", "--feature", "paged=4", "--pass", "backward", mentions="takes no pages")


class Verify(tool.ToolTest):
    SIZES = ("-s", "70", "--s-k", "90", "--b", "2", "--h-q", "4", "--h-k", "2", "--d-v", "24")

    def check(self, names, *options):
        text = self.succeed("verify", *self.SIZES, *options)
        for name in names:
            self.assertRegex(text, rf"(?m)^{name} +[\d,]+  \[.* 0\.\d+  ok$")
        self.assertEqual(text.count("  ok\n"), len(names), text)

    def test_both_passes(self):
        plain = ["O", "LSE", "dQ", "dK", "dV"]
        for names, options in ((["dBias"], ["--bias", "random:bhq", "--causal"]),
                               (["dBias"], ["--bias", "random", "--softcap", "3", "--type", "f16"]),
                               (["dSinks"], ["--sinks", "random", "--window", "5,0", "--align", "top-left"]),
                               ([], ["--visible", "random:bq", "--alibi", "auto"]),
                               ([], ["--dropout", "0.3", "--dropout-seed", "9", "--type", "bf16"]),
                               ([], ["--key-lengths", "17,0", "--causal"]),
                               (["dSinks", "dBias"], ["--bias", "random:h", "--sinks", "random", "--visible", "random",
                                                      "--dropout", "0.1", "--key-lengths", "random", "--causal"])):
            with self.subTest(options=options):
                self.check(plain + names, *options)

    def test_varlen(self):
        sizes = ("-s", "70", "--s-k", "90", "--h-q", "4", "--h-k", "2", "--cu-seqlens-q", "0,17,17,69",
                 "--cu-seqlens-k", "0,40,50,90")
        for names, options in (([], ["--causal", "--dropout", "0.2"]),
                               (["dSinks", "dBias"], ["--bias", "random:bq", "--sinks", "random", "--alibi", "auto"]),
                               (["dBias"], ["--visible", "random:h", "--bias", "random:", "--type", "bf16"])):
            with self.subTest(options=options):
                text = self.succeed("verify", *sizes, *options)
                self.assertEqual(text.count("  ok\n"), 5 + len(names), text)

    def test_nothing_at_all(self):
        for sizes in (["-s", "0", "--s-k", "5"], ["--b", "0"], ["-s", "3", "--s-k", "0"],
                      ["-s", "4", "--cu-seqlens-q", "0", "--cu-seqlens-k", "0"]):
            for options in (["--sinks", "random"], ["--bias", "random", "--visible", "random:bhq"]):
                self.succeed("verify", *sizes, *options)

    def test_forward_alone(self):
        for options in (["--page-size", "16"], ["--page-size", "7", "--key-lengths", "3,80", "--causal"],
                        ["--page-size", "1", "--bias", "random", "--sinks", "random", "--type", "bf16"]):
            with self.subTest(options=options):
                self.check(["O", "LSE"], "--pass", "forward", *options)

    def test_samples_of_rows(self):
        self.check(["O", "LSE", "dQ"], "--rows", "5", "--bias", "random", "--visible", "random:bh", "--sinks",
                   "random", "--window", "20,3")
        for options in (["--dropout", "0.5"], ["--key-lengths", "3,4"]):
            self.refuse("verify", *self.SIZES, "--rows", "5", *options, mentions="--rows")

    def test_a_sink_that_is_nan(self):
        np.save(self.folder / "sinks.npy", np.array([1.0, np.nan, 0.0, 2.0], np.float32))
        text = self.succeed("verify", *self.SIZES, "--pass", "forward", "--sinks", "sinks.npy")
        self.assertRegex(text, r"(?m)^LSE .*ok$")


class Others(tool.ToolTest):
    def test_explain(self):
        text = self.succeed("explain", "-s", "1000000", "--bias", "random", "--visible", "random:bhq", "--sinks",
                            "random", "--dropout", "0.1", "--key-lengths", "random", "--pass", "backward")
        self.assertIn("1000000", text)
        self.succeed("explain", "-s", "64", "--page-size", "16")
        self.refuse("explain", "--pass", "backward", "--page-size", "16", mentions="takes no pages")
        text = self.succeed("explain", "-s", "9", "--cu-seqlens-q", "0,4,9", "--cu-seqlens-k", "0,9,9", "--pass",
                            "backward")
        self.assertIn("q f32[9, 1, 64]", text)
        self.refuse("explain", "--sinks", "random", "--svg", "x.svg", mentions="a picture draws")

    def test_bench(self):
        features = "plain,bias,mask,sinks,alibi,lengths,softcap=30,dropout=0.1,window=16,paged=8"
        text = self.succeed("bench", "--json", "-s", "65", "-d", "32", "--mask", "causal", "--bursts", "1",
                            "--seconds", "0", "--feature", features)
        self.assertEqual(text.count('"feature"'), 10)
        for name in features.split(","):
            self.assertIn(f'"feature":"{name}"', text)
        for bad in ("what", "bias=1", "window", "window=-1", "softcap=x", "paged=0",
                    "paged=9223372036854775807", "paged=1073741825", "dropout=2"):
            self.refuse("bench", "-s", "65", "--feature", bad)

    def test_serve(self):
        problem = '"b": 1, "s_q": 1, "s_k": 64, "h_q": 2, "h_k": 1, "d_qk": 16, "d_v": 16, "min_seconds": 0'
        lines = ['{%s, "feature": "paged=16"}' % problem, '{%s, "feature": "nothing"}' % problem,
                 '{"copy": true, "threads": 1, "min_seconds": 0}']
        paged, nothing, copy = self.succeed("bench", "--serve", input="\n".join(lines)).splitlines()
        self.assertIn('"operand_bytes"', paged)
        self.assertIn('"error"', nothing)
        self.assertIn('"bytes_per_second"', copy)


if __name__ == "__main__":
    unittest.main()
