#!/usr/bin/env python3
"""What a call from Python adds to the C library's own time: one query, one key, d 8, so that nothing
else is to be done. Prints the 10th percentile of microseconds. Needs the package and PyTorch."""

import time

import torch
from torch.nn.functional import scaled_dot_product_attention

import abacist
from abacist import _abi


def time_us(function, rounds=300, calls=20):
    taken = []
    for _ in range(rounds):
        start = time.perf_counter_ns()
        for _ in range(calls):
            function()
        taken.append((time.perf_counter_ns() - start) / calls / 1e3)
    return sorted(taken)[rounds // 10]


def packed(x):
    return _abi.tensor(x.data_ptr(), _abi.F32, x.shape, x.stride())


def main():
    q, k, v, o, d_o = (torch.randn(1, 1, 1, 8) for _ in range(5))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    numpys = [x.numpy() for x in (q, k, v)]
    options = _abi.options(True, None, None, 0.0, "bottom-right", 0, 0, 0.0, 0)
    operands = b"".join(packed(x) for x in (q, k, v, o))
    tensors = _abi.HEAD + operands + _abi.ABSENT * (len(_abi.OPERANDS) - 4)
    plan = _abi.plan_options(None)
    kept = abacist.attention(*leaves, causal=True)
    theirs = scaled_dot_product_attention(*leaves, is_causal=True)
    cases = {
        "the C call alone, arguments ready": lambda: _abi.forward(tensors, options, plan, None),
        "attention, torch, no gradients": lambda: abacist.attention(q, k, v, causal=True),
        "attention, torch, gradients": lambda: abacist.attention(*leaves, causal=True),
        "its backward, torch.autograd.grad": lambda: torch.autograd.grad(
            kept, leaves, d_o, retain_graph=True
        ),
        "attention, numpy": lambda: abacist.attention(*numpys, causal=True),
        "torch's own, no gradients": lambda: scaled_dot_product_attention(q, k, v, is_causal=True),
        "torch's own backward": lambda: torch.autograd.grad(theirs, leaves, d_o, retain_graph=True),
    }
    for name, function in cases.items():
        print(f"{name:<36} {time_us(function):6.1f} us")


if __name__ == "__main__":
    main()
