"""Attention in float64 by its formula, with a mask and a dropout of its own, for small problems."""

import numpy as np


def visible_pairs(len_q, len_k, causal, window, top_left):
    i, j = np.arange(len_q)[:, None], np.arange(len_k)[None, :]
    place = i + (0 if top_left else len_k - len_q)
    seen = np.ones((len_q, len_k), bool)
    if causal:
        seen &= j <= place
    if window is not None:
        left, right = window
        if left is not None:
            seen &= j >= place - left
        if right is not None:
            seen &= j <= place + right
    return seen, np.abs(place - j)


def philox(counter, seed):
    """Philox-4x32-10 of four words of 32 bits, each an array of 64-bit integers."""
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    c0, c1, c2, c3 = (np.asarray(word, np.uint64) for word in counter)
    keys = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        k0, k1 = (np.uint64(key) for key in keys)
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (p1 >> half) ^ c1 ^ k0, p1 & low, (p0 >> half) ^ c3 ^ k1, p0 & low
        keys = [(keys[0] + 0x9E3779B9) % 2**32, (keys[1] + 0xBB67AE85) % 2**32]
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3))


def dropout_factors(p, seed, first, b, h_q, s_q, s_k):
    """0 where docs/contract.md drops a probability, else 1 / (1 - p): [b, h_q, s_q, s_k]. `first` is
    the number of the first sequence."""
    heads = (np.arange(b)[:, None] + first) * h_q + np.arange(h_q)
    j = np.arange(s_k)
    words = philox((np.arange(s_q)[:, None], j // 4, heads[:, :, None, None], 0), seed)
    kept = np.take_along_axis(words, np.broadcast_to(j % 4, (1, *words.shape[1:])), 0)[0] >= int(p * 2**32)
    return kept / (1 - p) if p < 1 else np.zeros(kept.shape)


def attention(q, k, v, *, causal=False, window=None, scale=None, softcap=0.0, slopes=None, bias=None,
              mask=None, sinks=None, top_left=False, dropout=None, sequence=0):  # fmt: skip
    """o [b, s_q, h_q, d_v] and lse [b, h_q, s_q] of dense [b, s, h, d] operands; `dropout` is
    (p, seed), `sequence` the number of the first sequence for it."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    scale = 1 / np.sqrt(q.shape[3]) if scale is None else scale
    s = np.einsum("bihd,bjhd->bhij", q, k) * scale
    if softcap:
        s = softcap * np.tanh(s / softcap)
    seen, distance = visible_pairs(q.shape[1], k.shape[1], causal, window, top_left)
    if slopes is not None:
        s = s - np.broadcast_to(slopes, s.shape[:2])[:, :, None, None] * distance
    if bias is not None:
        s = s + np.asarray(bias, np.float64)
    seen = np.broadcast_to(seen, s.shape)
    if mask is not None:
        seen = seen & np.asarray(mask, bool)
    s = np.where(seen, s, -np.inf)
    sink = np.full(s.shape[:3], -np.inf)
    if sinks is not None:
        sink[...] = np.asarray(sinks, np.float64)[None, :, None]
    top = np.maximum(s.max(-1, initial=-np.inf), sink)
    top = np.where(np.isneginf(top), 0, top)
    weights = np.exp(s - top[..., None])
    total = weights.sum(-1) + np.exp(sink - top)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + top
    p = weights / np.where(total == 0, 1, total)[..., None]
    if dropout is not None:
        p = p * dropout_factors(*dropout, sequence, *s.shape)
    return np.einsum("bhij,bjhd->bihd", p, v), lse
