"""Functions of flash-attn 2 on Abacist: axes ``[b, s, h, d]``, causal bottom-right, -1 for no bound.

Signatures are those of flash-attn 2.7 and 2.8. Unlike the original: float32 is served, too, head
dimensions need not be multiples of 8, pages may have any size, results are deterministic whatever
`deterministic` says, lse of a row that sees no key is -inf (there +inf), and with `alibi_slopes` and
`causal` lse is that of the documented bias (there each row's is shifted by slope * (i + shift)).
"""

from __future__ import annotations

import numbers
import sys
import typing

from .. import _abi
from .._attention import attention, is_watched
from ._names import ERRORS, check_types, renamed

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Window = tuple[int, int]
NAMES = {
    "scale": "softmax_scale", "window": "window_size", "max_s_q": "max_seqlen_q",
    "max_s_k": "max_seqlen_k", "max_lengths.s_q": "max_seqlen_q", "max_lengths.s_k": "max_seqlen_k",
}  # fmt: skip


# The names of a packed form, whose parts are views.
KV_NAMES = {**NAMES, "k": "kv", "v": "kv"}
QKV_NAMES = {**NAMES, "q": "qkv", "k": "qkv", "v": "qkv"}
VARLEN_QKV_NAMES = {
    **QKV_NAMES, "max_s_q": "max_seqlen", "max_s_k": "max_seqlen", "cu_seqlens_q": "cu_seqlens",
    "cu_seqlens_k": "cu_seqlens",
}  # fmt: skip


def _window(window_size: Window) -> tuple[int | None, int | None] | None:
    try:
        left, right = window_size
        unbounded = bool(left < 0), bool(right < 0)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several elements
        raise TypeError(f"window_size: is {_abi.shown(window_size)}, must be (left, right)") from None
    if unbounded == (True, True):
        return None
    return (None if unbounded[0] else left, None if unbounded[1] else right)


def _check_flags(deterministic: bool, return_attn_probs: bool, dropout_p: float) -> None:
    _abi.flag("deterministic", deterministic)
    if _abi.flag("return_attn_probs", return_attn_probs) and _abi.real("dropout_p", dropout_p):
        raise NotImplementedError(
            "return_attn_probs: with dropout it asks for the probabilities, which are never written"
        )


def _run(
    q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
    return_attn_probs, names=NAMES, **rest,
) -> typing.Any:  # fmt: skip
    _check_flags(deterministic, return_attn_probs, dropout_p)
    try:
        check_types(q=q, k=k, v=v)
        result = attention(
            q, k, v, dropout_p=dropout_p, scale=softmax_scale, causal=causal,
            window=_window(window_size), softcap=softcap, alibi_slopes=alibi_slopes,
            return_lse=return_attn_probs, **rest,
        )  # fmt: skip
    except ERRORS as error:
        raise renamed(error, names) from None
    return (*result, None) if return_attn_probs else result


def _ways(*tensors: typing.Any) -> typing.Any:
    """The module that serves calls over caches and pages: at once, or as operators."""
    torch = sys.modules.get("torch")
    if torch is None:
        raise TypeError(f"q: is a {type(tensors[0]).__name__}, must be a torch tensor")
    from . import _cache_ops, _kvcache

    return _cache_ops if is_watched(torch, *tensors) else _kvcache


def _unpack(name: str, packed: typing.Any, count: int, varlen: bool = False) -> typing.Any:
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


def flash_attn_func(
    q: typing.Any,
    k: typing.Any,
    v: typing.Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: typing.Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> typing.Any:
    """Attention of ``q [b, s_q, h_q, d]`` over ``k, v [b, s_k, h_k, d]``.

    Returns o, or (o, lse, None) with `return_attn_probs`, which is refused with dropout: the
    probabilities are never written.
    """
    return _run(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                deterministic, return_attn_probs)  # fmt: skip


def flash_attn_kvpacked_func(
    q: typing.Any,
    kv: typing.Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: typing.Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> typing.Any:
    """As `flash_attn_func` with ``kv [b, s_k, 2, h_k, d]``."""
    return _run(q, *_unpack("kv", kv, 2), dropout_p, softmax_scale, causal, window_size, softcap,
                alibi_slopes, deterministic, return_attn_probs, KV_NAMES)  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: typing.Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: typing.Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> typing.Any:
    """As `flash_attn_func` with ``qkv [b, s, 3, h, d]``."""
    return _run(*_unpack("qkv", qkv, 3), dropout_p, softmax_scale, causal, window_size, softcap,
                alibi_slopes, deterministic, return_attn_probs, QKV_NAMES)  # fmt: skip


def _varlen(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) -> dict[str, typing.Any]:
    return {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
            "max_s_q": max_seqlen_q, "max_s_k": max_seqlen_k}  # fmt: skip


def flash_attn_varlen_func(
    q: typing.Any,
    k: typing.Any,
    v: typing.Any,
    cu_seqlens_q: typing.Any,
    cu_seqlens_k: typing.Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: typing.Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: typing.Any = None,
) -> typing.Any:
    """Sequences one after another: ``q [total_q, h_q, d]``, ``k, v [total_k, h_k, d]``.

    `cu_seqlens_q` and `cu_seqlens_k` are int32 ``[b + 1]``. With a `block_table`, int32
    ``[b, max_pages]``, k and v are pages ``[pages, page_size, h_k, d]`` and `cu_seqlens_k` gives the
    lengths; that is without gradients, as in the original.
    """
    if block_table is None:
        return _run(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                    deterministic, return_attn_probs,
                    **_varlen(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))  # fmt: skip
    _check_flags(deterministic, return_attn_probs, dropout_p)
    ways = _ways(q, k, v)
    try:
        result = ways.varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table,
            alibi_slopes, return_attn_probs, causal=causal, window=_window(window_size),
            scale=softmax_scale, softcap=softcap, dropout_p=dropout_p,
        )  # fmt: skip
    except ERRORS as error:
        raise renamed(error, NAMES) from None
    return (*result, None) if return_attn_probs else result[0]


def flash_attn_varlen_kvpacked_func(
    q: typing.Any,
    kv: typing.Any,
    cu_seqlens_q: typing.Any,
    cu_seqlens_k: typing.Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: typing.Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> typing.Any:
    """As `flash_attn_varlen_func` with ``kv [total_k, 2, h_k, d]``."""
    return _run(q, *_unpack("kv", kv, 2, True), dropout_p, softmax_scale, causal, window_size,
                softcap, alibi_slopes, deterministic, return_attn_probs, KV_NAMES,
                **_varlen(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: typing.Any,
    cu_seqlens: typing.Any,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: typing.Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> typing.Any:
    """As `flash_attn_varlen_func` with ``qkv [total, 3, h, d]``."""
    return _run(*_unpack("qkv", qkv, 3, True), dropout_p, softmax_scale, causal, window_size,
                softcap, alibi_slopes, deterministic, return_attn_probs, VARLEN_QKV_NAMES,
                **_varlen(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen))  # fmt: skip


def flash_attn_with_kvcache(
    q: typing.Any,
    k_cache: typing.Any,
    v_cache: typing.Any,
    k: typing.Any = None,
    v: typing.Any = None,
    rotary_cos: typing.Any = None,
    rotary_sin: typing.Any = None,
    cache_seqlens: typing.Any = None,
    cache_batch_idx: typing.Any = None,
    cache_leftpad: typing.Any = None,
    block_table: typing.Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: typing.Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> typing.Any:
    """Attention over the first `cache_seqlens` keys of a cache, after appending k and v to it.

    Parameters
    ----------
    q : torch.Tensor
        ``[b, s_q, h_q, d]``.
    k_cache, v_cache : torch.Tensor
        ``[b_cache, s_cache, h_k, d]``, or with a `block_table` ``[pages, page_size, h_k, d]``.
        Written in place when `k` and `v` are given.
    k, v : torch.Tensor, optional
        ``[b, s_new, h_k, d]``, appended behind the `cache_seqlens` keys of each sequence.
    rotary_cos, rotary_sin : torch.Tensor, optional
        ``[positions, d_rot / 2]``, float32 or the type of q, given with k and v. k is rotated for
        positions cache_seqlens, cache_seqlens + 1, ..., and so is q if causal or with a window; else
        all rows of q are for position cache_seqlens.
    cache_seqlens : int or torch.Tensor, optional
        One number, or int32 ``[b]``: keys in the cache before appending; default all of it. The
        tensor is not raised.
    cache_batch_idx : torch.Tensor, optional
        int32 ``[b]``: the row of the cache that each sequence has, by default 0 to b - 1; not with a
        `block_table`.
    block_table : torch.Tensor, optional
        int32 ``[b, max_pages]``: key j of sequence n is row ``j % page_size`` of page
        ``block_table[n, j // page_size]``.
    softmax_scale, causal, window_size, softcap, alibi_slopes
        As in `flash_attn_func`.
    rotary_interleaved : bool, default True
        Pairs (2i, 2i + 1), else (i, i + d_rot / 2).
    num_splits : int, default 0
        1 keeps keys in one piece (and a sequence's bits independent of the batch); 0 leaves it to
        the library, whose splits follow from the shapes. More cannot be asked for.
    return_softmax_lse : bool, default False
        Return (o, lse), lse float32 ``[b, h_q, s_q]``.

    Returns
    -------
    torch.Tensor
        ``[b, s_q, h_q, d]``, without a gradient, as in the original.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        Each names the argument. Arguments are checked, and that the cache has room, before it is
        written; a page id outside the pool among the pages in use is found afterwards.
        NotImplementedError: `cache_leftpad`, `num_splits` above 1.
    """
    if cache_leftpad is not None:
        raise NotImplementedError(
            "cache_leftpad: keys that begin behind a cache's first row are not supported, must be None"
        )
    if isinstance(num_splits, bool) or not isinstance(num_splits, numbers.Integral):
        raise TypeError(f"num_splits: is {_abi.shown(num_splits)}, must be 0 or 1")
    _abi.flag("rotary_interleaved", rotary_interleaved)
    _abi.flag("return_softmax_lse", return_softmax_lse)
    if num_splits not in (0, 1):
        raise NotImplementedError(
            f"num_splits: is {_abi.shown(num_splits)}; splits follow from the shapes, must be 0, or 1 for none"
        )
    rest = (cache_seqlens, cache_batch_idx, block_table, alibi_slopes, bool(num_splits),
            return_softmax_lse)  # fmt: skip
    score = {"causal": causal, "window": _window(window_size), "scale": softmax_scale, "softcap": softcap}
    ways = _ways(q, k_cache, v_cache)
    try:
        o, lse = ways.decode(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, rotary_interleaved,
                             *rest, **score)  # fmt: skip
    except ERRORS as error:
        raise renamed(error, NAMES) from None
    return (o, lse) if return_softmax_lse else o
