"""Runs the command line tool, and the files that its tests feed it."""

import json
import os
import pathlib
import shutil
import struct
import subprocess
import tempfile
import unittest

import numpy as np

PROGRAM = os.environ.get("ABACIST_PROGRAM", "abacist")


class ToolTest(unittest.TestCase):
    """A test with a folder of its own."""

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="abacist-cli-"))
        self.addCleanup(shutil.rmtree, self.folder)

    def run_tool(self, *arguments, **options):
        command = [PROGRAM, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, cwd=self.folder, timeout=300,
                              errors="replace", check=False, **options)

    def succeed(self, *arguments, **options):
        done = self.run_tool(*arguments, **options)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def refuse(self, *arguments, mentions="", **options):
        """Exit code 2, one line on stderr, nothing on stdout, no file made or left."""
        before = self.contents()
        done = self.run_tool(*arguments, **options)
        self.assertEqual(done.returncode, 2, f"{arguments}: {done.stdout}{done.stderr}")
        self.assertRegex(done.stderr, r"\Aabacist: error: [^\n]+\n\Z")
        self.assertIn(mentions, done.stderr)
        self.assertEqual(done.stdout, "")
        self.assertEqual(self.contents(), before)
        return done.stderr

    def contents(self):
        return {path.name: path.read_bytes() for path in self.folder.iterdir() if path.is_file()}

    def write(self, name, data):
        (self.folder / name).write_bytes(data)
        return name

    def save(self, **arrays):
        """One .npy file for each array."""
        for name, array in arrays.items():
            np.save(self.folder / f"{name}.npy", array)

    def load(self, name):
        return np.load(self.folder / name)


def random_qkv(seed, s_q=7, s_k=9, h_q=4, h_k=2, d_qk=16, d_v=24, b=2, dtype=np.float32):
    """q, k, v as [b, s, h, d]."""
    random = np.random.default_rng(seed)
    shapes = (b, s_q, h_q, d_qk), (b, s_k, h_k, d_qk), (b, s_k, h_k, d_v)
    return [random.standard_normal(shape).astype(dtype) for shape in shapes]


def attention(q, k, v, visible=None, softcap=0.0, slopes=None, scale=None, bias=0.0, sinks=None, kept=1.0):
    """O and LSE in float64, straight from the formula; `visible`, `bias` and `kept`, which multiplies
    the probabilities, broadcast to [b, h_q, s_q, s_k], `sinks` are [h_q]."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    scores = np.einsum("bihd,bjhd->bhij", q, k) * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    if slopes is not None:
        i, j = np.indices(scores.shape[2:])
        distance = np.abs(i + scores.shape[3] - scores.shape[2] - j)
        scores = scores - np.asarray(slopes)[:, None, None] * distance
    scores = scores + bias
    if visible is not None:
        scores = np.where(visible, scores, -np.inf)
    if sinks is not None:  # a key without a value
        column = np.broadcast_to(np.asarray(sinks, np.float64)[:, None, None], (*scores.shape[:3], 1))
        scores = np.concatenate([scores, column], -1)
        v = np.concatenate([v, np.zeros_like(v[:, :1])], 1)
        kept = np.concatenate([np.broadcast_to(kept, (*scores.shape[:3], scores.shape[3] - 1)),
                               np.ones_like(column)], -1)
    with np.errstate(divide="ignore", invalid="ignore"):
        maximum = scores.max(-1, keepdims=True)
        weights = np.where(np.isinf(scores), 0.0, np.exp(scores - maximum))
        total = weights.sum(-1, keepdims=True)
        lse = np.where(total > 0, np.log(total) + maximum, -np.inf)[..., 0]
        weights = np.where(total > 0, weights / total, 0.0)
    return np.einsum("bhij,bjhd->bihd", weights * kept, v), lse


def band(s_q, s_k, left=None, right=None, shift=None):
    """[s_q, s_k], true where i + shift - left <= j <= i + shift + right."""
    i, j = np.indices((s_q, s_k))
    i = i + (s_k - s_q if shift is None else shift)
    visible = np.ones((s_q, s_k), bool)
    if left is not None:
        visible &= j >= i - left
    if right is not None:
        visible &= j <= i + right
    return visible


def npy(header, data=b"", version=(1, 0)):
    """A .npy file with any header text."""
    header = header if isinstance(header, bytes) else header.encode("latin1")
    length = struct.pack("<H" if version[0] == 1 else "<I", len(header))
    return b"\x93NUMPY" + bytes(version) + length + header + data


def safetensors(header, data=b"", length=None):
    """A .safetensors file with any header, a dictionary or text."""
    if isinstance(header, dict):
        header = json.dumps(header)
    header = header if isinstance(header, bytes) else header.encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def bf16_bytes(array):
    """Rounded to nearest even."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


DTYPES = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I32": "<i4", "I64": "<i8", "U8": "|u1", "BOOL": "|b1"}


def pack(padding=0, **arrays):
    """A .safetensors file of numpy arrays; (array, "BF16") stores one as bf16. `padding` blanks after
    the header shift the data."""
    header, data = {}, b""
    for name, array in arrays.items():
        if isinstance(array, tuple):
            array, kind = array
            raw = bf16_bytes(array)
        else:
            kind = next(k for k, v in DTYPES.items() if np.dtype(v) == array.dtype)
            raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": kind, "shape": list(array.shape),
                        "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return safetensors(json.dumps(header) + " " * padding, data)


def unpack(data):
    """Arrays of a .safetensors file; bf16 as float32."""
    length = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8:8 + length]), data[8 + length:]
    arrays = {}
    for name, entry in header.items():
        raw = body[slice(*entry["data_offsets"])]
        if entry["dtype"] == "BF16":
            array = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            array = np.frombuffer(raw, DTYPES[entry["dtype"]])
        arrays[name] = array.reshape(entry["shape"])
    return arrays
