"""Few queries against many keys (decoding, speculative decoding, chunked prefill) with grouped heads:
the Hopper kernel as planned, and with keys in one part, query heads packed into tiles and without,
beside PyTorch's backends.

    python3 h200_short_queries.py --library libabacist_sm90.so [--json out] [--seconds 60]

No mask, bf16. CUDA graphs that walk
through several sets of operands (more than the L2 holds), contenders in random order, median of
--rounds. Printed: microseconds a call, and for the plan's choice GB/s of K and V read once. Outputs
are compared with float32 on a few heads before anything is timed.

--sequences: instead, varlen batches of many short sequences, with the kernel for those and with
tiles, beside FlashAttention-2; GB/s of Q, K, V and O."""

import argparse
import random
import statistics
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from h200_forward import Kernel, graph_of, time_graph, write_results

L2_BYTES = 60 << 20
ABOUT = (
    "Few queries against many keys, one H200: microseconds a call, median of {rounds} rounds in random order; "
    "*_spread: (max - min) / median. abacist: as planned; unpacked, packed: forced, "
    "keys in one part; gb_per_s: K and V read once, as planned; max_error: |o - float32| of two groups of heads."
)
ABOUT_SEQUENCES = (
    "Varlen batches of many short sequences, one H200: microseconds a call, median of {rounds} rounds in random "
    "order. abacist: as planned; tiled, short: forced; gb_per_s: Q, K, V and O once, as planned."
)


def cells():
    """b, s_q, s_k, h_q, h_k, d; the most telling first."""
    for b, s_q, s_k in ((16, 1, 8192), (64, 1, 8192), (1, 1, 8192), (4, 1, 32768), (16, 1, 32768),
                        (64, 4, 8192), (16, 16, 8192), (16, 32, 8192), (16, 64, 8192),
                        (16, 100, 8192), (16, 128, 8192), (16, 129, 8192), (1, 64, 32768),
                        (1, 100, 32768), (1, 129, 32768), (1, 1, 131072), (8, 1, 131072),
                        (64, 1, 32768), (64, 2, 8192), (64, 8, 8192), (4, 300, 8192), (4, 500, 8192)):
        yield b, s_q, s_k, 64, 8, 128
    for h_q, h_k in ((32, 32), (32, 1), (48, 8), (40, 8), (28, 4), (71, 1)):
        yield 16, 1, 8192, h_q, h_k, 128
    for b, s_q, s_k in ((1, 1, 1024), (1, 1, 2048), (1, 1, 4096), (2, 1, 8192), (20, 1, 8192), (1, 16, 8192)):
        yield b, s_q, s_k, 64, 8, 128
    for s_q, s_k, h_q, h_k, d in ((1, 32768, 32, 1, 128), (1, 131072, 32, 1, 128), (1, 16384, 32, 32, 128),
                                  (1, 8192, 64, 8, 64), (1, 16384, 32, 32, 64), (64, 32768, 64, 8, 64),
                                  (1, 2048, 16, 2, 256), (1, 8192, 16, 2, 256), (64, 8192, 16, 2, 256)):
        yield 1, s_q, s_k, h_q, h_k, d


def worst_error(q, k, v, o):
    """Against float32 on the first and last sequence and kv head."""
    worst, group = 0.0, q.shape[2] // k.shape[2]
    for n, h in ((0, 0), (-1, k.shape[2] - 1)):
        heads = slice(h * group, (h + 1) * group)
        x, keys, values = (t.float() for t in (q[n, :, heads], k[n, :, h], v[n, :, h]))
        expected = torch.einsum("hij,jd->ihd", torch.softmax(
            torch.einsum("ihd,jd->hij", x, keys) * q.shape[-1]**-0.5, -1), values)
        worst = max(worst, (o[n, :, heads].float() - expected).abs().max().item())
    return worst


def contenders(library, sets, scale):
    calls = {}
    for name, choice in (("abacist", 0), ("unpacked", 1), ("packed", 2)):
        kernel = Kernel(library)
        kernel.row_choice, kernel.splits = choice, int(choice > 0)
        calls[name] = lambda kernel=kernel: [kernel(*x, scale, False) for x in sets]
    views = [[t.transpose(1, 2) for t in x[:3]] for x in sets]
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("fa2", SDPBackend.FLASH_ATTENTION)):
        def run(backend=backend):
            with sdpa_kernel(backend):
                for q, k, v in views:
                    torch.nn.functional.scaled_dot_product_attention(
                        q, k, v, enable_gqa=q.shape[1] != k.shape[1])
        try:
            run()
            calls[name] = run
        except RuntimeError as error:
            print(f"  {name} declines: {str(error).splitlines()[0][:100]}")
    return calls


def run_cell(library, cell, rounds):
    b, s_q, s_k, h_q, h_k, d = cell
    bytes_kv = 2 * b * s_k * h_k * d * 2
    make = lambda s, h: torch.randn(b, s, h, d, device="cuda", dtype=torch.bfloat16)
    sets = []
    for _ in range(max(1, min(8, 4 * L2_BYTES // bytes_kv))):
        q, k, v = make(s_q, h_q), make(s_k, h_k), make(s_k, h_k)
        lse = torch.empty(b * s_q * h_q, device="cuda")
        sets.append((q, k, v, torch.full_like(q, torch.nan), lse))
    calls = contenders(library, sets, d**-0.5)
    errors = {}
    for name in ("abacist", "unpacked", "packed"):
        for x in sets:
            x[3].fill_(torch.nan)
        calls[name]()
        errors[name] = worst_error(*sets[-1][:4])
        assert errors[name] < 0.02, (name, cell, errors[name])
    graphs = {name: graph_of(call, 1) for name, call in calls.items()}
    times = {name: [] for name in calls}
    replays = {}
    for name, graph in graphs.items():
        time_graph(graph, 2)
        replays[name] = max(2, int(20 / time_graph(graph, 1)))
    for _ in range(rounds):
        for name in random.sample(list(graphs), len(graphs)):
            times[name].append(time_graph(graphs[name], replays[name]) / replays[name] / len(sets))
    row = {"b": b, "s_q": s_q, "s_k": s_k, "heads": h_q, "kv_heads": h_k, "d": d,
           "max_error": errors["abacist"]}
    for name, runs in times.items():
        row[name + "_us"] = round(1000 * statistics.median(runs), 1)
        row[name + "_spread"] = round((max(runs) - min(runs)) / statistics.median(runs), 3)
    row["gb_per_s"] = round(bytes_kv / row["abacist_us"] / 1e3)
    text = " ".join(f"{name} {row[name + '_us']:9.1f}" for name in times)
    print(f"b {b:3} s_q {s_q:4} s_k {s_k:6} heads {h_q}/{h_k} d {d}: {text} | {row['gb_per_s']:5} GB/s "
          f"spread {row['abacist_spread']:.1%}", flush=True)
    return row


def run_sequences(library, s, tokens, h_q, h_k, d, causal, rounds):
    b, scale = tokens // s, d**-0.5
    make = lambda h: torch.randn(1, b * s, h, d, device="cuda", dtype=torch.bfloat16)
    q, k, v = make(h_q), make(h_k), make(h_k)
    cu = torch.arange(0, b * s + 1, s, device="cuda", dtype=torch.int32)
    lse = torch.empty(b * s * h_q, device="cuda")
    x = [y[0] for y in (q, k, v)]
    fa2 = lambda: torch.ops.aten._flash_attention_forward(
        *x, cu, cu, s, s, 0.0, causal, False, scale=scale)[0]
    calls, expected = {}, None
    if b < 65536:  # FlashAttention-2 has a sequence for each z of its grid
        calls["fa2"], expected = fa2, fa2()
    for name, choice in (("abacist", 0), ("tiled", 1), ("short", 3)):
        kernel, o = Kernel(library), torch.full_like(q, torch.nan)
        kernel.row_choice = choice
        calls[name] = lambda kernel=kernel, o=o: kernel(q, k, v, o, lse, scale, causal, cu=cu, max_s=s)
        calls[name]()
        expected = o[0].clone() if expected is None else expected
        difference = (o[0].float() - expected.float()).abs().max().item()
        assert difference < 0.04, (name, s, difference)
    graphs = {name: graph_of(call, 1) for name, call in calls.items()}
    times = {name: [] for name in calls}
    for graph in graphs.values():
        time_graph(graph, 2)
    for _ in range(rounds):
        for name in random.sample(list(graphs), len(graphs)):
            times[name].append(time_graph(graphs[name], 3) / 3)
    row = {"s": s, "b": b, "heads": h_q, "kv_heads": h_k, "d": d, "causal": causal}
    for name, runs in times.items():
        row[name + "_us"] = round(1000 * statistics.median(runs), 1)
    row["gb_per_s"] = round(4 * tokens * (h_q + h_k) * d / row["abacist_us"] / 1e3)
    text = " ".join(f"{name} {row[name + '_us']:9.1f}" for name in times)
    print(f"{b:6} sequences of {s:4} heads {h_q}/{h_k} d {d} causal {causal:d}: {text} | "
          f"{row['gb_per_s']:5} GB/s", flush=True)
    return row


def sequence_cells():
    """s, tokens, h_q, h_k, d, causal"""
    yield 16, 1280000, 16, 16, 128, True
    yield 16, 1280000, 16, 16, 128, False
    for s in (32, 48, 64, 96, 128):
        yield s, 320000, 16, 16, 128, True
    for s in (16, 64, 128):
        yield s, 320000, 32, 8, 128, True
        yield s, 320000, 32, 32, 64, True


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1e9, help="no new cell after this long")
    parser.add_argument("--sequences", action="store_true")
    parser.add_argument("--commit", help="for --json, where there is no git")
    parser.add_argument("--json")
    args = parser.parse_args()
    started, rows = time.time(), []
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for cell in sequence_cells() if args.sequences else cells():
        if time.time() - started > args.seconds:
            print("left out:", cell)
            continue
        rows.append(run_sequences(args.library, *cell, args.rounds) if args.sequences else
                    run_cell(args.library, cell, args.rounds))
        torch.cuda.empty_cache()
    if args.json:
        write_results(args.json, (ABOUT_SEQUENCES if args.sequences else ABOUT).format(rounds=args.rounds), rows, args.commit)


if __name__ == "__main__":
    main()
