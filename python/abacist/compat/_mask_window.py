"""The window that a boolean mask lies in, so that tiles outside of it are skipped and not only masked.

Causal masks of padded batches and sliding windows reach an attention implementation of transformers
as boolean masks. A mask of 2,048 x 2,048 that is causal takes 0.110 s as it is, 0.057 s with its window
beside it (9 heads of 64 over 3, one core of an EPYC). Looking for the window is one pass over the mask,
done once for all layers that get the same tensor.
"""

from __future__ import annotations

import typing
import weakref

import torch

from .._attention import is_watched

SMALLEST = 256  # keys; below, there are hardly any tiles to skip

# Of masks seen: a weak reference, the version of its data, and what was found.
_found: dict[tuple[int, int], tuple[weakref.ref, int, dict]] = {}


def _look(mask: torch.Tensor) -> dict[str, typing.Any]:
    """`window` and `align` of attention() that hide nothing which the mask shows."""
    b, h, s_q, s_k = mask.shape
    seen = mask[0, 0] if b == h == 1 else mask.flatten(0, 1).any(0)
    rows = seen.any(-1)
    if not rows.any():
        return {}
    i = torch.arange(s_q, device=mask.device)[rows]
    seen = seen[rows].view(torch.uint8)
    first, last = seen.argmax(-1), s_k - 1 - seen.flip(-1).argmax(-1)
    left, right = int((i - first).max()), int((last - i).max())
    if left >= 0 and right >= 0:
        return {"window": (left, right), "align": "top-left"}
    shift = s_k - s_q
    return {"window": (max(left + shift, 0), max(right - shift, 0)), "align": "bottom-right"}


def window_of(mask: torch.Tensor, s_k: int) -> dict[str, typing.Any]:
    """The same for the first `s_k` columns of a mask ``[b, h, s_q, s_k or more]``; {} if none helps."""
    s_q = mask.shape[2]
    if not mask.is_cpu:  # a look would wait for the device, whose kernels take no mask
        return {}
    if s_q == 1 or s_k < SMALLEST or mask.stride(2) == 0 or is_watched(torch, mask):
        return {}
    if mask.is_inference():  # has no version: a change in place would go unnoticed
        return _look(mask[..., :s_k])
    key = (id(mask), s_k)
    known = _found.get(key)
    if known is None or known[0]() is not mask or known[1] != mask._version:
        reference = weakref.ref(mask, lambda _: _found.pop(key, None))
        known = _found[key] = (reference, mask._version, _look(mask[..., :s_k]))
    return known[2]
