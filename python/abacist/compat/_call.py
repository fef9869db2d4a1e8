"""What flash_attn.py's functions have in common: their arguments turned into those of attention()."""

from __future__ import annotations

import sys
import typing

from .. import _abi
from .._attention import attention, is_watched
from ._names import ERRORS, check_types, renamed

NAMES = {
    "scale": "softmax_scale", "window": "window_size", "max_s_q": "max_seqlen_q",
    "max_s_k": "max_seqlen_k", "max_lengths.s_q": "max_seqlen_q", "max_lengths.s_k": "max_seqlen_k",
}  # fmt: skip
# Those of a packed form, whose parts are views.
KV_NAMES = {**NAMES, "k": "kv", "v": "kv"}
QKV_NAMES = {**NAMES, "q": "qkv", "k": "qkv", "v": "qkv"}
VARLEN_QKV_NAMES = {
    **QKV_NAMES, "max_s_q": "max_seqlen", "max_s_k": "max_seqlen", "cu_seqlens_q": "cu_seqlens",
    "cu_seqlens_k": "cu_seqlens",
}  # fmt: skip


def window(window_size: tuple[int, int]) -> tuple[int | None, int | None] | None:
    try:
        left, right = window_size
        unbounded = bool(left < 0), bool(right < 0)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several elements
        raise TypeError(f"window_size: is {_abi.shown(window_size)}, must be (left, right)") from None
    if unbounded == (True, True):
        return None
    return (None if unbounded[0] else left, None if unbounded[1] else right)


def check_flags(deterministic: bool, return_attn_probs: bool, dropout_p: float) -> None:
    _abi.flag("deterministic", deterministic)
    if _abi.flag("return_attn_probs", return_attn_probs) and _abi.real("dropout_p", dropout_p):
        raise NotImplementedError(
            "return_attn_probs: with dropout it asks for the probabilities, which are never written"
        )


def run(
    q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
    return_attn_probs, names=NAMES, **rest,
) -> typing.Any:  # fmt: skip
    check_flags(deterministic, return_attn_probs, dropout_p)
    try:
        check_types(q=q, k=k, v=v)
        result = attention(
            q, k, v, dropout_p=dropout_p, scale=softmax_scale, causal=causal,
            window=window(window_size), softcap=softcap, alibi_slopes=alibi_slopes,
            return_lse=return_attn_probs, **rest,
        )  # fmt: skip
    except ERRORS as error:
        raise renamed(error, names) from None
    return (*result, None) if return_attn_probs else result


def ways(*tensors: typing.Any) -> typing.Any:
    """The module that serves calls over caches and pages: at once, or as operators."""
    torch = sys.modules.get("torch")
    if torch is None:
        raise TypeError(f"q: is a {type(tensors[0]).__name__}, must be a torch tensor")
    from . import _cache_ops, _kvcache

    return _cache_ops if is_watched(torch, *tensors) else _kvcache


def unpack(name: str, packed: typing.Any, count: int, varlen: bool = False) -> typing.Any:
    """The `count` tensors that lie side by side before the axis of heads."""
    try:
        shape = tuple(packed.shape)
    except (AttributeError, RuntimeError):  # RuntimeError: a nested tensor
        kind = type(packed).__name__
        raise TypeError(f"{name}: is a {kind} without a shape, must be a numpy array or a torch tensor") from None
    axis = 1 if varlen else 2
    if len(shape) != axis + 3 or shape[axis] != count:
        lead = "total" if varlen else "b, s"
        raise ValueError(f"{name}: has shape {shape}, must be [{lead}, {count}, h, d]")
    if hasattr(packed, "unbind"):  # torch: one gradient, not one of full size for each
        return packed.unbind(axis)
    return tuple(packed[(slice(None),) * axis + (n,)] for n in range(count))


def lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) -> dict[str, typing.Any]:
    return {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
            "max_s_q": max_seqlen_q, "max_s_k": max_seqlen_k}  # fmt: skip
