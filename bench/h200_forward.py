"""Sustained forward speed of the Hopper kernel beside PyTorch's cuDNN and FlashAttention-2.

    python3 h200_forward.py --library libabacist_sm90.so [--library other.so ...] [--suite]
        [--json out]

--suite runs the cells of bench/results/h200-forward.json: the grid (d 64, 128, 256; full and causal;
512 to 16k), then f16, GQA, d 192/128, varlen, windows, rising and large logits. Without it the
options choose the cells.

One protocol for every contender: CUDA graph of several launches, replayed for a burst of at least
--burst-ms after a warm-up; bursts of all contenders in random order, --rounds times; random normal
data; the SM clock sampled during each burst. Printed: median TFLOP/s, spread of a contender against
itself ((max - min) / median), median clock. Causal counts half the FLOPs.
"""

import argparse
import ctypes
import dataclasses
import datetime
import json
import pathlib
import random
import statistics
import subprocess
import threading
import time

try:
    import torch
except ImportError as error:
    raise SystemExit(f"PyTorch is missing ({error})") from None
from torch.nn.attention import SDPBackend, sdpa_kernel


class Strides(ctypes.Structure):
    _fields_ = [("b", ctypes.c_int64), ("s", ctypes.c_int64), ("h", ctypes.c_int64)]


class Operands(ctypes.Structure):
    _fields_ = [(n, ctypes.c_void_p) for n in ("q", "k", "v", "o", "lse")] + [
        (n, Strides) for n in ("q_stride", "k_stride", "v_stride", "o_stride")
    ]


class Geometry(ctypes.Structure):
    _fields_ = (
        [("type", ctypes.c_int)]
        + [
            (n, ctypes.c_int64)
            for n in ("b", "s_q", "s_k", "h_q", "h_k", "d_qk", "d_v", "total_q", "total_k")
        ]
        + [(n, ctypes.c_void_p) for n in ("cu_seqlens_q", "cu_seqlens_k", "k_lengths")]
    )


class Mask(ctypes.Structure):
    _fields_ = [("left", ctypes.c_int64), ("right", ctypes.c_int64), ("top_left", ctypes.c_bool)]


class Score(ctypes.Structure):
    _fields_ = [
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("alibi_slopes", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
    ]


class Arguments(ctypes.Structure):
    _fields_ = [
        ("operands", Operands),
        ("geometry", Geometry),
        ("mask", Mask),
        ("score", Score),
        ("workspace", ctypes.c_void_p),
        ("disabled_fast_path", ctypes.c_int),
        ("no_short_shapes", ctypes.c_int),
        ("tile_order", ctypes.c_int),
        ("row_choice", ctypes.c_int),
        ("splits", ctypes.c_int),
    ]


UNBOUNDED = 2**63 - 1


class Kernel:
    """The C entry of one shared library."""

    def __init__(self, path):
        path, _, long_shapes = path.partition("+")  # library.so+1: no_short_shapes
        self.long_shapes = int(long_shapes or 0)
        path, _, order = path.partition("@")  # library.so@2: with tile_order 2
        self.order = int(order or 0)
        self.row_choice = 0  # 1: one head's, 2: packed heads', 3: 16 for a warp
        self.splits = 0  # 1: keys in one part, more: in so many
        self.library = ctypes.CDLL(path)
        self.library.abacist_sm90_arguments_bytes.restype = ctypes.c_ulong
        if self.library.abacist_sm90_arguments_bytes() != ctypes.sizeof(Arguments):
            raise RuntimeError(f"{path}: another layout of the arguments")
        self.library.abacist_sm90_workspace_bytes.restype = ctypes.c_ulong
        self.workspace = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")

    def __call__(self, q, k, v, o, lse, scale, causal, left=UNBOUNDED, cu=None, max_s=None,
                 softcap=0.0, slopes=None):
        """q [b, s, h, d] (or [1, total, h, d] with cu) and so on; writes o and lse."""
        strides = lambda t: Strides(t.stride(0), t.stride(1), t.stride(2))
        a = Arguments()
        a.operands = Operands(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            o.data_ptr(),
            lse.data_ptr(),
            strides(q),
            strides(k),
            strides(v),
            strides(o),
        )
        b, s_q, h_q, d_qk = q.shape
        s_k, h_k, d_v = k.shape[1], k.shape[2], v.shape[3]
        a.geometry = Geometry(
            0 if q.dtype == torch.bfloat16 else 1, b, s_q, s_k, h_q, h_k, d_qk, d_v
        )
        if cu is not None:
            a.geometry.b, a.geometry.s_q, a.geometry.s_k = cu.numel() - 1, max_s, max_s
            a.geometry.total_q, a.geometry.total_k = s_q, s_k
            a.geometry.cu_seqlens_q = a.geometry.cu_seqlens_k = cu.data_ptr()
        a.mask = Mask(left, 0 if causal else UNBOUNDED, False)
        a.score = Score(scale, softcap, None if slopes is None else slopes.data_ptr(), None)
        a.no_short_shapes = self.long_shapes
        a.tile_order, a.row_choice, a.splits = self.order, self.row_choice, self.splits
        needed = self.library.abacist_sm90_workspace_bytes(ctypes.byref(a))
        if needed > self.workspace.numel():
            self.workspace = torch.empty(needed, dtype=torch.uint8, device="cuda")
        a.workspace = self.workspace.data_ptr()
        reason = ctypes.c_char_p()
        code = self.library.abacist_sm90_forward(
            ctypes.byref(a),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            ctypes.byref(reason),
        )
        if code != 0:
            raise RuntimeError(f"refused ({code}): {reason.value.decode()}")


class Clock:
    """Samples the SM clock while a burst runs."""

    def __init__(self):
        import pynvml

        pynvml.nvmlInit()
        self.nvml, self.handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)

    def __enter__(self):
        self.samples, self.stop = [], False
        self.thread = threading.Thread(target=self.sample)
        self.thread.start()
        return self

    def sample(self):
        while not self.stop:
            self.samples.append(
                self.nvml.nvmlDeviceGetClockInfo(self.handle, self.nvml.NVML_CLOCK_SM)
            )
            time.sleep(0.02)

    def __exit__(self, *_):
        self.stop = True
        self.thread.join()

    def median(self):
        return statistics.median(self.samples[len(self.samples) // 3 :] or [0])


def graph_of(call, launches):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(launches):
            call()
    return graph


def time_graph(graph, replays):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


@dataclasses.dataclass
class Cell:
    """One problem: `lengths` of a varlen batch, or `tokens` in dense sequences of s."""

    d_qk: int
    d_v: int
    causal: bool
    s: int
    heads: int
    kv_heads: int
    dtype: str = "bfloat16"
    tokens: int = 16384
    left: int = UNBOUNDED
    lengths: tuple = ()
    logits: str = "normal"  # rising: 0.35 nats a key; large: scores with a deviation of 8
    grid: bool = False

    @property
    def b(self):
        return len(self.lengths) or max(1, self.tokens // self.s)

    def flops(self):
        def pairs(s):
            if self.left < s:
                return sum(min(i + 1, self.left + 1) for i in range(s))
            return s * s / 2 if self.causal else s * s

        lengths = self.lengths or (self.s,) * self.b
        counts = {s: lengths.count(s) for s in set(lengths)}
        return 2 * self.heads * (self.d_qk + self.d_v) * sum(n * pairs(s) for s, n in counts.items())

    def name(self):
        mask = "causal" if self.causal else "full"
        text = f"d {self.d_qk}/{self.d_v} {mask} s {self.s} h {self.heads}/{self.kv_heads}"
        text += f" left {self.left}" if self.left != UNBOUNDED else ""
        text += f" varlen b {self.b}" if self.lengths else ""
        return text + ("" if self.dtype == "bfloat16" else f" {self.dtype}") + (
            "" if self.logits == "normal" else f" {self.logits} logits")


def suite():
    for d in (128, 64, 256):
        for causal in (False, True):
            for s in (512, 1024, 2048, 4096, 8192, 16384):
                yield Cell(d, d, causal, s, 2048 // d, 2048 // d, grid=True)
    for causal in (False, True):
        yield Cell(128, 128, causal, 16384, 16, 16, logits="rising")
        yield Cell(64, 64, causal, 16384, 32, 32, logits="rising")
        yield Cell(128, 128, causal, 16384, 16, 16, logits="large")
        for s in (4096, 16384):
            yield Cell(128, 128, causal, s, 64, 8)
            yield Cell(192, 128, causal, s, 16, 16)
        for s in (2048, 16384):
            yield Cell(128, 128, causal, s, 16, 16, dtype="float16")
        yield Cell(64, 64, causal, 16384, 32, 32, dtype="float16")
        yield Cell(256, 256, causal, 16384, 8, 8, dtype="float16")
        mixed = tuple(round(64 + i * (3968 - 64) / 15) for i in range(16))
        yield Cell(128, 128, causal, max(mixed), 16, 16, lengths=mixed)
        yield Cell(128, 128, causal, 16, 16, 16, lengths=(16,) * 80000)
    for s in (16384, 32768):
        yield Cell(128, 128, True, s, 16, 16, left=1024, tokens=max(16384, s))


def contenders(kernels, names, cell, peers):
    """Name -> call, name -> output, for the contenders that serve the cell."""
    dtype = getattr(torch, cell.dtype)
    b, s = (1, sum(cell.lengths)) if cell.lengths else (cell.b, cell.s)
    make = lambda heads, d: torch.randn(b, s, heads, d, device="cuda", dtype=dtype)
    q, k, v = make(cell.heads, cell.d_qk), make(cell.kv_heads, cell.d_qk), make(cell.kv_heads, cell.d_v)
    if cell.logits == "large":
        q *= 8
    if cell.logits == "rising":
        direction = torch.sign(torch.randn(cell.d_qk, device="cuda"))
        along = 0.35 * torch.arange(s, device="cuda") * cell.d_qk**-0.5
        q = (direction * (1 + 0.1 * q.float())).to(dtype)
        k = (0.3 * k.float() + direction * along[None, :, None, None]).to(dtype)
    cu = max_s = None
    if cell.lengths:
        total = torch.tensor((0,) + cell.lengths).cumsum(0)
        cu, max_s = total.to(torch.int32).cuda(), max(cell.lengths)
    scale = cell.d_qk**-0.5
    calls, outputs = {}, {}
    for name, kernel in zip(names, kernels):
        o = torch.empty(b, s, cell.heads, cell.d_v, device="cuda", dtype=dtype)
        lse = torch.empty(b * s * cell.heads, device="cuda")
        calls[name] = lambda kernel=kernel, o=o, lse=lse: kernel(
            q, k, v, o, lse, scale, cell.causal, cell.left, cu, max_s)
        outputs[name] = o
    t = [x.transpose(1, 2) for x in (q, k, v)]

    def sdpa(backend):
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                *t, is_causal=cell.causal, enable_gqa=cell.heads != cell.kv_heads).transpose(1, 2)

    def flash2():  # what PyTorch's own backend runs, with what its front end does not offer
        window = {} if cell.left == UNBOUNDED else {"window_size_left": cell.left,
                                                    "window_size_right": 0}
        x = [y[0] for y in (q, k, v)] if cell.lengths else (q, k, v)
        o = torch.ops.aten._flash_attention_forward(
            *x, cu, cu, max_s or s, max_s or s, 0.0, cell.causal, False, scale=scale, **window)[0]
        return o[None] if cell.lengths else o

    plain = not cell.lengths and cell.left == UNBOUNDED
    wanted = {"cudnn": (lambda: sdpa(SDPBackend.CUDNN_ATTENTION)) if plain else None,
              "fa2": (lambda: sdpa(SDPBackend.FLASH_ATTENTION)) if plain else flash2}
    for name, call in wanted.items():
        if call and name in peers:
            try:
                outputs[name] = call()
                calls[name] = call
            except (RuntimeError, TypeError, ValueError) as error:
                print(f"  {name} declines {cell.name()}: {str(error).splitlines()[0][:100]}")
    return calls, outputs


def measure(calls, burst_ms, rounds, clock):
    """Name -> [(ms, MHz)] of its bursts."""
    graphs, replays = {}, {}
    for name, call in calls.items():
        probe = graph_of(call, 1)
        time_graph(probe, 3)
        one = time_graph(probe, 5) / 5
        launches = max(1, min(50, int(20 / one)))
        graphs[name] = (graph_of(call, launches), launches)
        replays[name] = max(1, int(burst_ms / (one * launches)) + 1)
    results = {name: [] for name in calls}
    for _ in range(rounds):
        order = list(calls)
        random.shuffle(order)
        for name in order:
            graph, launches = graphs[name]
            time_graph(graph, max(1, replays[name] // 4))
            with clock:
                ms = time_graph(graph, replays[name])
            results[name].append((ms / (launches * replays[name]), clock.median()))
    return results


def add_speed(row, name, runs, flops):
    """Speed, spread and clock of a contender's bursts, put into `row`; as text."""
    times = [ms for ms, _ in runs]
    middle = statistics.median(times)
    row[name] = round(flops / middle / 1e9, 1)
    row[name + "_spread"] = round((max(times) - min(times)) / middle, 3)
    row[name + "_mhz"] = statistics.median(mhz for _, mhz in runs)
    return f" | {name} {row[name]:6.1f} ±{100 * row[name + '_spread']:4.1f}% {row[name + '_mhz']:4.0f}"


def best_over_cudnn(cell, peers_file):
    mask = "causal" if cell.causal else "full"
    if cell.dtype != "bfloat16" or cell.logits != "normal" or cell.lengths or cell.left != UNBOUNDED:
        return None
    if cell.grid:
        return peers_file["grid"][f"{cell.d_qk} {mask}"][str(cell.s)]
    return peers_file["other"].get(
        f"{cell.d_qk}/{cell.d_v} {cell.heads}/{cell.kv_heads} {mask} {cell.s}")


def run_cell(cell, kernels, names, args, clock, peers_file):
    calls, outputs = contenders(kernels, names, cell, args.peers.split(","))
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    other = outputs.get("cudnn", outputs.get("fa2"))
    difference = None
    if other is not None:
        difference = max((outputs[n].float() - other.float()).abs().max().item() for n in names)
    row = {"pass": "forward", "dtype": cell.dtype, "d_qk": cell.d_qk, "d_v": cell.d_v,
           "heads": cell.heads, "kv_heads": cell.kv_heads, "causal": cell.causal, "s": cell.s,
           "b": cell.b, "grid": cell.grid}
    if cell.left != UNBOUNDED:
        row["window_left"] = cell.left
    if cell.lengths:
        row["varlen"] = True
    if cell.logits != "normal":
        row["logits"] = cell.logits
    row["cudnn"] = row["fa2"] = None
    text = f"{cell.name():<44}"
    burst_ms = args.burst_ms if cell.grid or not args.suite else args.other_burst_ms
    rounds = args.rounds if cell.grid or not args.suite else args.other_rounds
    for name, runs in measure(calls, burst_ms, rounds, clock).items():
        text += add_speed(row, name, runs, cell.flops())
    factor = best_over_cudnn(cell, peers_file)
    known = [x for x in (row["cudnn"] and row["cudnn"] * (factor or 1), row["fa2"]) if x]
    if known:
        row["best_over_cudnn"], row["best_peer"] = factor, round(max(known), 1)
        row["ratio"] = round(row[names[0]] / max(known), 3)
        text += f" | ratio {row['ratio']:.3f}"
    row["difference"] = difference
    print(text, "| diff", "none" if difference is None else f"{difference:.1e}", flush=True)
    return row


def chosen_cells(args):
    for d in args.dims.split(","):
        d_qk, d_v = (int(x) for x in (d.split("/") if "/" in d else (d, d)))
        for causal in (bool(int(x)) for x in args.causal.split(",")):
            for s in map(int, args.lengths.split(",")):
                heads = args.hidden // d_qk
                yield Cell(d_qk, d_v, causal, s, heads, max(1, heads // args.kv_group), args.dtype,
                           args.tokens, args.left, grid=d_qk == d_v and d_qk in (64, 128, 256) and
                           args.kv_group == 1 and args.tokens == 16384 and args.hidden == 2048)


def write_results(path, about, rows, commit=None):
    """Rows, after what they are and where they come from. `commit`: where there is no git."""
    import pynvml

    pynvml.nvmlInit()
    driver = pynvml.nvmlSystemGetDriverVersion()
    commit = commit or subprocess.run(["git", "rev-parse", "--short", "HEAD"], text=True,
                                      capture_output=True, check=False).stdout.strip()
    head = {
        "about": about,
        "date": datetime.date.today().isoformat(), "commit": commit,
        "gpu": torch.cuda.get_device_name(),
        "driver": driver if isinstance(driver, str) else driver.decode(),
        "torch": torch.__version__, "cuda": torch.version.cuda,
        "cudnn": str(torch.backends.cudnn.version()),
    }
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    text = json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n' + lines + "\n ]\n}\n"
    pathlib.Path(path).write_text(text, encoding="utf-8")


def about(args):
    return (
        f"Forward, one H200: bursts of {args.burst_ms:g} ms, {args.rounds} rounds in random order in "
        f"one run (cells with grid false: {args.other_burst_ms:g} ms, {args.other_rounds} rounds); "
        "TFLOP/s, causal counts half, windows the pairs they keep; *_mhz: SM clock, *_spread: (max - "
        "min) / median of a contender against itself. best_peer: the larger of fa2 and cudnn x "
        "best_over_cudnn (h200-peers.json; 1 where that has none). difference: largest |o - o of "
        "cuDNN (else FlashAttention-2)|."
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", action="append", required=True)
    parser.add_argument("--suite", action="store_true")
    parser.add_argument("--seconds", type=float, default=1e9, help="no new cell after this long")
    parser.add_argument("--dims", default="64,128,256", help="64, or 192/128 for d_qk/d_v")
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192,16384")
    parser.add_argument("--causal", default="0,1")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--kv-group", type=int, default=1, help="query heads per kv head")
    parser.add_argument("--left", type=int, default=UNBOUNDED, help="window to the left")
    parser.add_argument("--peers", default="cudnn,fa2")
    parser.add_argument("--peers-file", default=pathlib.Path(__file__).parent / "results" /
                        "h200-peers.json")
    parser.add_argument("--burst-ms", type=float, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--other-burst-ms", type=float, default=300,
                        help="--suite: of the cells that are not of the grid")
    parser.add_argument("--other-rounds", type=int, default=3)
    parser.add_argument("--commit", help="for --json, where there is no git")
    parser.add_argument("--json")
    args = parser.parse_args()
    started = time.time()
    names = [f"abacist{i or ''}" for i in range(len(args.library))]
    kernels, clock, rows = [Kernel(path) for path in args.library], Clock(), []
    peers_file = json.loads(pathlib.Path(args.peers_file).read_text(encoding="utf-8"))
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "cudnn",
          torch.backends.cudnn.version())
    for cell in suite() if args.suite else chosen_cells(args):
        if time.time() - started > args.seconds:
            print("left out:", cell.name())
            continue
        rows.append(run_cell(cell, kernels, names, args, clock, peers_file))
        torch.cuda.empty_cache()
        if args.json:
            write_results(args.json, about(args), rows, args.commit)


if __name__ == "__main__":
    main()
