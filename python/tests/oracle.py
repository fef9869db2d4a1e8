"""Attention in float64 by its formula, with a mask of its own, for small problems."""

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


def attention(q, k, v, *, causal=False, window=None, scale=None, softcap=0.0, slopes=None,
              bias=None, mask=None, sinks=None, top_left=False):  # fmt: skip
    """o [b, s_q, h_q, d_v] and lse [b, h_q, s_q] of dense [b, s, h, d] operands."""
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
        s = s + bias
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
    return np.einsum("bhij,bjhd->bihd", p, v), lse
