"""Sustained forward speed of the Hopper kernel beside PyTorch's cuDNN and FlashAttention-2.

    python3 h200_forward.py --library libabacist_sm90.so [--library other.so ...] [--json out]

One protocol for every contender: CUDA graph of several launches, replayed for a burst of at least
--burst-ms after a warm-up; bursts of all contenders in random order, --rounds times; random normal
data; the SM clock sampled during each burst. Printed: median TFLOP/s, spread of a contender against
itself ((max - min) / median), median clock. Causal counts half the FLOPs.
"""

import argparse
import ctypes
import json
import random
import statistics
import threading
import time

import torch
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
    ]


UNBOUNDED = 2**63 - 1


class Kernel:
    """The C entry of one shared library."""

    def __init__(self, path):
        path, _, long_shapes = path.partition("+")  # library.so+1: no_short_shapes
        self.long_shapes = int(long_shapes or 0)
        path, _, order = path.partition("@")  # library.so@2: with tile_order 2
        self.order = int(order or 0)
        self.library = ctypes.CDLL(path)
        self.library.abacist_sm90_arguments_bytes.restype = ctypes.c_ulong
        if self.library.abacist_sm90_arguments_bytes() != ctypes.sizeof(Arguments):
            raise RuntimeError(f"{path}: another layout of the arguments")
        self.workspace = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")

    def __call__(self, q, k, v, o, lse, scale, causal, left=UNBOUNDED, cu=None, max_s=None):
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
        a.score = Score(scale, 0.0, None, None)
        a.no_short_shapes = self.long_shapes
        a.workspace, a.tile_order = self.workspace.data_ptr(), self.order
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


def contenders(kernels, names, dtype, b, s, h_q, h_k, d_qk, d_v, causal, left, peers, scale_up=1.0):
    make = lambda heads, d: torch.randn(b, s, heads, d, device="cuda", dtype=dtype)
    q, k, v = make(h_q, d_qk) * scale_up, make(h_k, d_qk), make(h_k, d_v)
    scale = d_qk**-0.5
    calls, outputs = {}, {}
    for name, kernel in zip(names, kernels):
        o, lse = torch.empty(b, s, h_q, d_v, device="cuda", dtype=dtype), torch.empty(
            b, h_q, s, device="cuda"
        )
        calls[name] = lambda kernel=kernel, o=o, lse=lse: kernel(
            q, k, v, o, lse, scale, causal, left
        )
        outputs[name] = o
    t = [x.transpose(1, 2) for x in (q, k, v)]
    for name, backend in (
        ("cudnn", SDPBackend.CUDNN_ATTENTION),
        ("fa2", SDPBackend.FLASH_ATTENTION),
    ):
        if name not in peers or left != UNBOUNDED:
            continue

        def call(backend=backend):
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    *t, is_causal=causal, enable_gqa=h_q != h_k
                )

        try:
            outputs[name] = call().transpose(1, 2)
            calls[name] = call
        except RuntimeError:
            pass
    return calls, outputs


def measure(calls, burst_ms, rounds, clock):
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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", action="append", required=True)
    parser.add_argument("--dims", default="64,128,256", help="64, or 192/128 for d_qk/d_v")
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192,16384")
    parser.add_argument("--causal", default="0,1")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--kv-group", type=int, default=1, help="query heads per kv head")
    parser.add_argument("--left", type=int, default=UNBOUNDED, help="window to the left")
    parser.add_argument("--scale-up", type=float, default=1.0, help="multiplies q")
    parser.add_argument("--peers", default="cudnn,fa2")
    parser.add_argument("--burst-ms", type=float, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    args = parser.parse_args()
    names = [f"abacist{i or ''}" for i in range(len(args.library))]
    kernels, clock, rows = [Kernel(path) for path in args.library], Clock(), []
    print(
        torch.cuda.get_device_name(),
        "torch",
        torch.__version__,
        "cudnn",
        torch.backends.cudnn.version(),
    )
    for d in args.dims.split(","):
        d_qk, d_v = (int(x) for x in (d.split("/") if "/" in d else (d, d)))
        for causal in (bool(int(x)) for x in args.causal.split(",")):
            for s in map(int, args.lengths.split(",")):
                b, h_q = max(1, args.tokens // s), args.hidden // d_qk
                h_k = max(1, h_q // args.kv_group)
                calls, outputs = contenders(
                    kernels,
                    names,
                    getattr(torch, args.dtype),
                    b,
                    s,
                    h_q,
                    h_k,
                    d_qk,
                    d_v,
                    causal,
                    args.left,
                    args.peers.split(","),
                    args.scale_up,
                )
                for call in calls.values():
                    call()
                torch.cuda.synchronize()
                other = outputs.get("cudnn", outputs.get("fa2"))
                difference = (
                    max((outputs[n].float() - other.float()).abs().max().item() for n in names)
                    if other is not None
                    else float("nan")
                )
                pairs = s * s if not causal else s * (s + 1) // 2
                if args.left < s:
                    pairs = sum(min(i + 1, args.left + 1) for i in range(s))
                flops = 2 * b * h_q * pairs * (d_qk + d_v)
                if causal and args.left >= s:
                    flops = b * h_q * s * s * (d_qk + d_v)
                row = {
                    "pass": "forward",
                    "dtype": args.dtype,
                    "d_qk": d_qk,
                    "d_v": d_v,
                    "heads": h_q,
                    "kv_heads": h_k,
                    "causal": causal,
                    "s": s,
                    "b": b,
                    "difference": difference,
                }
                text = f"d {d:>7} {'causal' if causal else 'full  '} s {s:>6}"
                for name, runs in measure(calls, args.burst_ms, args.rounds, clock).items():
                    times = [ms for ms, _ in runs]
                    middle = statistics.median(times)
                    row[name] = round(flops / middle / 1e9, 1)
                    row[name + "_spread"] = round((max(times) - min(times)) / middle, 4)
                    row[name + "_mhz"] = statistics.median(mhz for _, mhz in runs)
                    spread, mhz = 100 * row[name + "_spread"], row[name + "_mhz"]
                    text += f" | {name} {row[name]:6.1f} ±{spread:4.1f}% {mhz:4.0f}"
                print(text, f"| diff {difference:.1e}", flush=True)
                rows.append(row)
                del calls, outputs
                torch.cuda.empty_cache()
    if args.json:
        with open(args.json, "w") as f:
            json.dump(
                {
                    "gpu": torch.cuda.get_device_name(),
                    "torch": torch.__version__,
                    "cudnn": torch.backends.cudnn.version(),
                    "rows": rows,
                },
                f,
                indent=1,
            )


if __name__ == "__main__":
    main()
