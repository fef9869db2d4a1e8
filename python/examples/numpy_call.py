"""Attention of numpy arrays, its plan, and a check against the formula.

    python numpy_call.py
"""

import numpy as np

import abacist

rng = np.random.default_rng(1)
b, s, h_q, h_k, d = 2, 300, 8, 2, 64
q = rng.standard_normal((b, s, h_q, d), dtype=np.float32)
k, v = (rng.standard_normal((b, s, h_k, d), dtype=np.float32) for _ in range(2))

# Each query sees itself and the 128 keys before it.
o, lse = abacist.attention(q, k, v, causal=True, window=(128, None), return_lse=True)
print(abacist.plan(q, k, v, causal=True, window=(128, None)))

keys = np.repeat(k.astype(np.float64), h_q // h_k, axis=2)
values = np.repeat(v.astype(np.float64), h_q // h_k, axis=2)
scores = np.einsum("bihd,bjhd->bhij", q, keys) / np.sqrt(d)
i, j = np.arange(s)[:, None], np.arange(s)
scores = np.where((j <= i) & (j >= i - 128), scores, -np.inf)
weights = np.exp(scores)
expected = np.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdims=True), values)
error = np.abs(o - expected).max()
print(f"largest difference from the formula in float64: {error:.1e}")
assert error < 1e-5 and np.abs(lse - np.log(weights.sum(-1))).max() < 1e-5
