"""Softcap and ALiBi: the Hopper kernels beside PyTorch's FlexAttention (compiled), and without either.

    python3 h200_scores.py --library libabacist_sm90.so [--json out] [--seconds 60]

16,384 tokens, hidden dimension 2,048, bf16; the protocol of h200_forward.py. Printed: TFLOP/s (causal
counts half), the spread of a contender against itself, and the SM clock. "plain" is abacist without
modified scores, "large" abacist with scores of deviation 20, of which one in eight is beyond softcap's
polynomial.
The largest difference from FlexAttention's outputs is printed.
"""

import argparse
import time

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from h200_forward import Clock, Kernel, add_speed, measure, write_results

TOKENS, HIDDEN, CAP = 16384, 2048, 50.0
ABOUT = (
    "Softcap (cap 50) and ALiBi, one H200: TFLOP/s, causal counts half, median of {rounds} bursts of "
    "{burst:g} ms in random order; *_spread: (max - min) / median, *_mhz: SM clock. plain: abacist without modified scores; "
    "large: softcap with scores of deviation 20; flex: FlexAttention of this PyTorch, compiled. difference: "
    "largest |o - o of FlexAttention|."
)


def cells():
    """What modifies the scores, d, causal, s."""
    for d, causal, s in ((128, True, 4096), (256, True, 4096), (64, True, 4096), (128, False, 16384),
                         (128, True, 1024), (256, True, 1024), (96, True, 4096), (192, True, 4096)):
        for what in ("softcap", "alibi"):
            yield what, d, causal, s


def flex_call(what, causal, s, slopes, compiled):
    def softcap(score, b, h, i, j):
        return CAP * torch.tanh(score / CAP)

    def alibi(score, b, h, i, j):
        return score + slopes[h] * (j - i)

    mask = None
    if causal:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, s, s, device="cuda")
    change = softcap if what == "softcap" else alibi
    return lambda q, k, v: compiled(*(t.transpose(1, 2) for t in (q, k, v)), score_mod=change,
                                    block_mask=mask).transpose(1, 2)


def run_cell(library, what, d, causal, s, args, clock):
    b, heads, scale = TOKENS // s, HIDDEN // d, d**-0.5
    q, k, v = (torch.randn(b, s, heads, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    large_q = q * 20
    slopes = 2.0 ** (-8 * torch.arange(1, heads + 1, device="cuda") / heads)
    outputs, calls = {}, {}

    def add(name, queries, **score):
        kernel, o = Kernel(library), torch.empty_like(q)
        lse = torch.empty(b * s * heads, device="cuda")
        calls[name] = lambda: kernel(queries, k, v, o, lse, scale, causal, **score)
        outputs[name] = o

    score = {"softcap": CAP} if what == "softcap" else {"slopes": slopes}
    add("abacist", q, **score)
    add("plain", q)
    if what == "softcap":
        add("large", large_q, **score)
    # As FlexAttention is told it, the bias of keys after a query is positive: full masks differ.
    if what == "softcap" or causal:
        flex = flex_call(what, causal, s, slopes, torch.compile(flex_attention, dynamic=False))
        outputs["flex"] = flex(q, k, v)
        calls["flex"] = lambda: flex(q, k, v)
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    row = {"score": what, "d": d, "causal": causal, "s": s, "b": b, "heads": heads, "difference": None}
    if "flex" in outputs:
        row["difference"] = (outputs["abacist"].float() - outputs["flex"].float()).abs().max().item()
    flops = 4 * b * heads * s * s * d * (0.5 if causal else 1)
    text = f"{what:<8} d {d:<3} {'causal' if causal else 'full':<6} s {s:<5}"
    for name, runs in measure(calls, args.burst_ms, args.rounds, clock).items():
        text += add_speed(row, name, runs, flops)
    print(text, "| diff", row["difference"], flush=True)
    return row


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", required=True)
    parser.add_argument("--seconds", type=float, default=1e9, help="no new cell after this long")
    parser.add_argument("--burst-ms", type=float, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--commit", help="for --json, where there is no git")
    parser.add_argument("--json")
    args = parser.parse_args()
    started, rows, clock = time.time(), [], Clock()
    torch.manual_seed(0)
    for cell in cells():
        if time.time() - started > args.seconds:
            print("left out:", cell)
            continue
        torch._dynamo.reset()  # it compiles a function eight times, then runs it uncompiled
        rows.append(run_cell(args.library, *cell, args, clock))
        if args.json:
            write_results(args.json, ABOUT.format(rounds=args.rounds, burst=args.burst_ms), rows, args.commit)


if __name__ == "__main__":
    main()
