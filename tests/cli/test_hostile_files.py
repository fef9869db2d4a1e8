"""Files that are broken or meant to harm: an error in one line, exit code 2, nothing else."""

import json
import os
import random
import resource
import struct
import unittest

import numpy as np

import tool
from tool import npy, pack, random_qkv, safetensors

GOOD = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }\n"


def limited():
    """A file must not make the tool allocate much. (Sanitizers reserve terabytes of addresses.)"""
    if not os.environ.get("ABACIST_SANITIZED"):
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))


class Npy(tool.ToolTest):
    def refuse_npy(self, data, mentions=""):
        self.write("x.npy", data)
        message = self.refuse("attend", "--q", "x.npy", "--k", "x.npy", "--v", "x.npy", "-o", "o.npy",
                              mentions=mentions, preexec_fn=limited)
        self.assertIn("x.npy", message)

    def test_the_good_one_is_good(self):
        self.write("x.npy", npy(GOOD, np.zeros(6, "<f4").tobytes()))
        self.succeed("attend", "--q", "x.npy", "--k", "x.npy", "--v", "x.npy", "--discard")

    def test_cut_short(self):
        whole = npy(GOOD, np.zeros(6, "<f4").tobytes())
        for length in list(range(0, 12)) + [40, len(whole) - 25, len(whole) - 24, len(whole) - 1]:
            with self.subTest(length=length):
                self.refuse_npy(whole[:length])
        self.refuse_npy(whole + b"\0", "goes on after")

    def test_types(self):
        for descr, mentions in (("'>f4'", "big-endian"), ("'|O'", "objects"), ("'O'", "objects"),
                                ("'<i8'", "<i8"), ("'<c8'", "<c8"), ("'|V2'", "bf16"),
                                ("'|b1'", "|b1"), ("[('a', '<f4')]", "structured"),
                                ("'" + "A" * 5000 + "'", "..."), ("'\x1b[31m'", "?[31m"),
                                ("''", ""), ("4", ""), ("None", "")):
            with self.subTest(descr=descr[:20]):
                self.refuse_npy(npy(GOOD.replace("'<f4'", descr), bytes(24)), mentions)
        self.refuse_npy(npy(GOOD.replace("f4", "i4"), bytes(24)), "must be f16")

    def test_shapes(self):
        for shape, mentions in (("(-1, 3)", "malformed"), ("(2, 3", "malformed"),
                                ("(99999999999999999999, 1)", "malformed"), ("(2.0, 3)", "malformed"),
                                ("(0x2, 3)", "malformed"), ("2", "malformed"), ("(2L, 3)", "malformed"),
                                ("(4294967296, 4294967296)", "overflows"),
                                ("(9223372036854775807, 1)", "overflows"),
                                ("(9223372036854775807, 9223372036854775807, 0)", "overflows"),
                                ("(4611686018427387904, 4, 0)", "overflows"),
                                ("(1000000000000, 3)", "cut short"),
                                ("(" + "1," * 40 + ")", "32 axes"), ("()", "goes on after")):
            with self.subTest(shape=shape):
                self.refuse_npy(npy(GOOD.replace("(2, 3)", shape), bytes(24)), mentions)

    def test_headers(self):
        for header in ("", "{", "{}", "[]", GOOD + GOOD, GOOD.replace("False", "false"),
                       GOOD.replace("'descr'", "'what'"), GOOD.replace("'", "\0"),
                       GOOD.replace(", }", ", 'shape': (2, 3)}"), GOOD.replace(", }", ", 'x': 1}"),
                       "{'descr': '<f4', 'fortran_order': False}", "{" * 60000, "(" * 60000,
                       GOOD.replace("(2, 3)", "(__import__('os').system('touch hacked'),)"),
                       GOOD[:-3], GOOD.replace(":", "")):
            with self.subTest(header=header[:60]):
                self.refuse_npy(npy(header, bytes(24)))

    def test_header_lengths_and_versions(self):
        data = bytes(24)
        self.refuse_npy(npy(GOOD, data, (0, 0)), "version 0")
        self.refuse_npy(npy(GOOD, data, (4, 0)), "version 4")
        self.refuse_npy(b"\x93NUMPY\x02\0" + b"\xff" * 4 + data, "claims 4294967295")
        self.refuse_npy(b"\x93NUMPY\x01\0" + b"\xff\xff" + data, "claims 65535")
        self.refuse_npy(b"PK\x03\x04" + bytes(60), "not a .npy")
        for version in ((2, 0), (3, 0)):
            self.write("x.npy", npy(GOOD, data, version))
            self.succeed("attend", "--q", "x.npy", "--k", "x.npy", "--v", "x.npy", "--discard")

    def test_no_regular_file(self):
        os.mkfifo(self.folder / "pipe.npy")
        (self.folder / "dir.npy").mkdir()
        for name in ("pipe.npy", "dir.npy", "/dev/zero", "missing.npy", "x" * 5000 + ".npy"):
            self.refuse("attend", "--q", name, "--k", name, "--v", name, "--discard")


def entry(**changes):
    return {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | changes


class Safetensors(tool.ToolTest):
    def refuse_file(self, data, mentions=""):
        self.write("x.safetensors", data)
        message = self.refuse("attend", "x.safetensors", "-o", "o.npy", mentions=mentions,
                              preexec_fn=limited)
        self.assertIn("x.safetensors", message)

    def test_the_good_one_is_good(self):
        self.write("x.safetensors", safetensors({"__metadata__": {"a": "b"}, "x": entry()}, bytes(24)))
        self.succeed("attend", "x.safetensors", "--discard")

    def test_cut_short(self):
        q, k, v = random_qkv(1, b=1)
        whole = pack(q=q, k=k, v=v)
        for length in list(range(0, 20)) + [100, len(whole) // 2, len(whole) - 1]:
            with self.subTest(length=length):
                self.refuse_file(whole[:length])
        self.refuse_file(whole + b"\0", "its tensors cover")

    def test_header_length(self):
        for length in (25, 1 << 20, 100_000_001, 1 << 31, 1 << 63, (1 << 64) - 1, (1 << 64) - 8):
            with self.subTest(length=length):
                self.refuse_file(safetensors("{}", bytes(20), length), "claims")

    def test_bombs(self):
        for text in ("[" * 1_000_000, '{"a":' * 1_000_000, '{"a":[' + "[" * 1_000_000,
                     '{"q":{"shape":' + "[" * 1_000_000, '{"q":{"dtype":{"a":{"a":{"a":1}}}}}'):
            with self.subTest(text=text[:30]):
                self.refuse_file(safetensors(text))

    def test_text(self):
        good = json.dumps({"x": entry()})
        for text in ("", " ", "{", "null", " " + good, "\ufeff" + good, good + "\0" * 8, good + "x",
                     good.replace('"x"', '"x\\u0000"'), good.replace('"x"', '"\\u001b[31m"'),
                     good.replace('"x"', '"\\u009b31m"'), good.replace('"x"', "'x'"),
                     good.encode().replace(b'"x"', b'"\xff"'), good.encode().replace(b'"x"', b'"\xed\xa0\x80"'),
                     good[:-1] + "," + good[1:], good[:-1] + ',"__metadata__":{},"__metadata__":{}}',
                     good[:-1] + ',"__metadata__":{"a":1}}', good[:-1] + ',"__metadata__":"a"}',
                     good[:-1] + ',"__metadata__":{"a":{}}}', '{"x":5}', '{"x":null}', '{"x":[]}',
                     good.replace('"dtype"', '"dtype": "F32", "dtype"')):
            with self.subTest(text=text[:60]):
                self.refuse_file(safetensors(text, bytes(24)))

    def test_entries(self):
        for change, mentions in (({"dtype": "F99"}, "unknown dtype"), ({"dtype": 4}, "out of place"),
                                 ({"dtype": "F64"}, "span"), ({"dtype": ["F32"]}, "out of place"),
                                 ({"shape": [2, -3]}, "negative"), ({"shape": [2, 3.0]}, "not whole"),
                                 ({"shape": [1 << 32, 1 << 32]}, "overflows"),
                                 ({"shape": [(1 << 63) - 1, 8]}, "overflows"),
                                 ({"shape": [1 << 62, 1 << 62, 0]}, "overflows"),
                                 ({"shape": [1 << 64, 1]}, ""), ({"shape": [1] * 40}, "32 axes"),
                                 ({"shape": "2"}, "out of place"), ({"shape": [[2, 3]]}, "out of place"),
                                 ({"shape": {}}, "nests"), ({"shape": [True, 6]}, "boolean"),
                                 ({"shape": [None, 6]}, "null"), ({"data_offsets": [24, 0]}, "within"),
                                 ({"data_offsets": [0, 25]}, "within"), ({"data_offsets": [0]}, "within"),
                                 ({"data_offsets": []}, "within"),
                                 ({"data_offsets": [0, 24, 24]}, "within"),
                                 ({"data_offsets": [-24, 0]}, "negative"),
                                 ({"data_offsets": [0, (1 << 63) - 1]}, "within"),
                                 ({"data_offsets": [8, 24], "shape": [4]}, "holes"),
                                 ({"extra": 1}, "unknown field")):
            with self.subTest(change=str(change)):
                self.refuse_file(safetensors({"x": entry(**change)}, bytes(24)), mentions)
        for missing in ("dtype", "shape", "data_offsets"):
            incomplete = entry()
            del incomplete[missing]
            self.refuse_file(safetensors({"x": incomplete}, bytes(24)), "lacks")

    def test_overlaps_and_holes(self):
        for first, second in (([0, 24], [0, 24]), ([0, 24], [12, 36]), ([0, 24], [28, 52])):
            header = {"a": entry(data_offsets=first), "b": entry(data_offsets=second)}
            with self.subTest(first=first, second=second):
                self.refuse_file(safetensors(header, bytes(second[1])))

    def test_names_that_come_twice(self):
        one = json.dumps(entry())
        self.refuse_file(safetensors(f'{{"q":{one},"q":{one}}}', bytes(24)), "two tensors named 'q'")

    def test_other_types_may_lie_beside(self):
        data = {"q": entry(), "ids": entry(dtype="I64", shape=[3], data_offsets=[24, 48]),
                "none": entry(shape=[0, 5], data_offsets=[48, 48])}
        self.write("x.safetensors", safetensors(data, bytes(48)))
        x = "x.safetensors:q"
        self.succeed("attend", "--q", x, "--k", x, "--v", x, "--discard")
        self.refuse("attend", "--q", x, "--k", x, "--v", "x.safetensors:ids", "--discard", mentions="I64")


class Mutations(tool.ToolTest):
    """Valid files with a few bytes changed: read or refused, never a crash."""

    def test_changed_bytes(self):
        generator = random.Random(20260101)
        q, k, v = random_qkv(2, b=1)
        sources = {"x.npy": npy(GOOD, bytes(24)), "x.safetensors": pack(q=q, k=k, v=v)}
        # Under sanitizers a process takes a tenth of a second; reader_mutations does the work there.
        for round_number in range(20 if os.environ.get("ABACIST_SANITIZED") else 150):
            name, source = generator.choice(list(sources.items()))
            data = bytearray(source)
            for _ in range(generator.randint(1, 4)):
                kind = generator.randrange(3)
                at = generator.randrange(min(len(data), 200))
                if kind == 0:
                    data[at] = generator.randrange(256)
                elif kind == 1:
                    del data[at:at + generator.randint(1, 30)]
                else:
                    data[at:at] = generator.choice([b"9" * 20, b"[", b"{", b'"', b"\0" * 8, b",", b"-",
                                                    struct.pack("<Q", generator.getrandbits(64))])
            self.write(name, bytes(data))
            files = [name] if name.endswith("s") else ["--q", name, "--k", name, "--v", name]
            done = self.run_tool("attend", *files, "--discard", preexec_fn=limited)
            self.assertIn(done.returncode, (0, 2), f"round {round_number}: {done.stderr}")


if __name__ == "__main__":
    unittest.main()
