"""Functions of flash-attn 2 on Abacist: axes ``[b, s, h, d]``, causal bottom-right, -1 for no bound.

Signatures are those of flash-attn 2.7 and 2.8. Unlike the original: float32 is served, too, head
dimensions need not be multiples of 8, pages may have any size, results are deterministic whatever
`deterministic` says, lse of a row that sees no key is -inf (there +inf), and with `alibi_slopes` and
`causal` lse is that of the documented bias (there each row's is shifted by slope * (i + shift)).
"""

from __future__ import annotations

import numbers
import typing

from .. import _abi
from . import _call
from ._names import ERRORS, renamed

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
    """Attention of q over k and v, dense.

    Parameters
    ----------
    q : torch.Tensor, numpy.ndarray or jax.Array
        ``[b, s_q, h_q, d]``.
    k, v : as q
        ``[b, s_k, h_k, d]``; ``h_k`` divides ``h_q``.
    dropout_p : float, default 0
        Probability of dropping a weight, outside of training, too.
    softmax_scale : float, optional
        Factor of q k; default ``1 / sqrt(d)``.
    causal : bool, default False
        Query i sees key j only if ``j <= i + s_k - s_q``.
    window_size : (left, right), default (-1, -1)
        Query i sees keys ``i + s_k - s_q - left`` to ``i + s_k - s_q + right``; -1 is no bound.
    softcap : float, default 0
        Scores become ``softcap * tanh(score / softcap)``; 0 for none.
    alibi_slopes : as q, optional
        float32 ``[h_q]`` or ``[b, h_q]``: adds ``-slope * |i + s_k - s_q - j|`` to a score.
    deterministic : bool, default False
        Results are deterministic either way.
    return_attn_probs : bool, default False
        Return (o, lse, None), lse float32 ``[b, h_q, s_q]``: the probabilities are never written, and
        asking for them with dropout is refused.

    Returns
    -------
    as q
        ``[b, s_q, h_q, d]``; a row that sees no key is 0.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        Each names the argument, what it was and what it must be.

    References
    ----------
    .. [1] T. Dao, https://github.com/Dao-AILab/flash-attention, version 2.

    Examples
    --------
    >>> import numpy as np
    >>> from abacist.compat import flash_attn
    >>> q = k = v = np.ones((1, 4, 2, 8), np.float32)
    >>> flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(2, -1)).shape
    (1, 4, 2, 8)
    """
    return _call.run(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
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
    """`flash_attn_func` with k and v side by side.

    Parameters
    ----------
    q : torch.Tensor, numpy.ndarray or jax.Array
        ``[b, s_q, h_q, d]``.
    kv : as q
        ``[b, s_k, 2, h_k, d]``.
    The others
        As the parameters of `flash_attn_func`.

    Returns
    -------
    As `flash_attn_func`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `flash_attn_func`.

    Examples
    --------
    >>> import numpy as np
    >>> from abacist.compat import flash_attn
    >>> q, kv = np.ones((1, 4, 2, 8), np.float32), np.ones((1, 4, 2, 2, 8), np.float32)
    >>> flash_attn.flash_attn_kvpacked_func(q, kv).shape
    (1, 4, 2, 8)
    """
    return _call.run(q, *_call.unpack("kv", kv, 2), dropout_p, softmax_scale, causal, window_size, softcap,
                     alibi_slopes, deterministic, return_attn_probs, _call.KV_NAMES)  # fmt: skip


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
    """`flash_attn_func` with q, k and v side by side.

    Parameters
    ----------
    qkv : torch.Tensor, numpy.ndarray or jax.Array
        ``[b, s, 3, h, d]``.
    The others
        As the parameters of `flash_attn_func`.

    Returns
    -------
    As `flash_attn_func`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `flash_attn_func`.

    Examples
    --------
    >>> import numpy as np
    >>> from abacist.compat import flash_attn
    >>> flash_attn.flash_attn_qkvpacked_func(np.ones((1, 4, 3, 2, 8), np.float32)).shape
    (1, 4, 2, 8)
    """
    return _call.run(*_call.unpack("qkv", qkv, 3), dropout_p, softmax_scale, causal, window_size, softcap,
                     alibi_slopes, deterministic, return_attn_probs, _call.QKV_NAMES)  # fmt: skip


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
    """Attention of sequences that lie one after another.

    Parameters
    ----------
    q : torch.Tensor, numpy.ndarray or jax.Array
        ``[total_q, h_q, d]``.
    k, v : as q
        ``[total_k, h_k, d]``, or with a `block_table` ``[pages, page_size, h_k, d]``.
    cu_seqlens_q, cu_seqlens_k : as q
        int32 ``[b + 1]``: sequence n has rows ``cu_seqlens[n]`` to ``cu_seqlens[n + 1]``.
    max_seqlen_q, max_seqlen_k : int
        Bounds of the lengths.
    block_table : torch.Tensor, optional
        int32 ``[b, max_pages]``: k and v are pages, and `cu_seqlens_k` gives the lengths. On the CPU,
        without gradients, as in the original.
    The others
        As the parameters of `flash_attn_func`.

    Returns
    -------
    as q
        ``[total_q, h_q, d]``, or (o, lse, None) with lse ``[h_q, total_q]``.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `flash_attn_func`.

    Examples
    --------
    >>> import numpy as np
    >>> from abacist.compat import flash_attn
    >>> q, ends = np.ones((7, 2, 8), np.float32), np.array([0, 3, 7], np.int32)
    >>> flash_attn.flash_attn_varlen_func(q, q, q, ends, ends, 4, 4, causal=True).shape
    (7, 2, 8)
    """
    if block_table is None:
        return _call.run(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                         deterministic, return_attn_probs,
                         **_call.lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))  # fmt: skip
    _call.check_flags(deterministic, return_attn_probs, dropout_p)
    ways = _call.ways(q, k, v)
    try:
        result = ways.varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table,
            alibi_slopes, return_attn_probs, causal=causal, window=_call.window(window_size),
            scale=softmax_scale, softcap=softcap, dropout_p=dropout_p,
        )  # fmt: skip
    except ERRORS as error:
        raise renamed(error, _call.NAMES) from None
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
    """`flash_attn_varlen_func` with k and v side by side.

    Parameters
    ----------
    q : torch.Tensor, numpy.ndarray or jax.Array
        ``[total_q, h_q, d]``.
    kv : as q
        ``[total_k, 2, h_k, d]``.
    cu_seqlens_q, cu_seqlens_k : as q
        int32 ``[b + 1]``: sequence n has rows ``cu_seqlens[n]`` to ``cu_seqlens[n + 1]``.
    max_seqlen_q, max_seqlen_k : int
        Bounds of the lengths.
    The others
        As the parameters of `flash_attn_func`.

    Returns
    -------
    as q
        ``[total_q, h_q, d]``, or (o, lse, None) with lse ``[h_q, total_q]``.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `flash_attn_func`.

    Examples
    --------
    >>> import numpy as np
    >>> from abacist.compat import flash_attn
    >>> q, kv = np.ones((7, 2, 8), np.float32), np.ones((7, 2, 2, 8), np.float32)
    >>> ends = np.array([0, 3, 7], np.int32)
    >>> flash_attn.flash_attn_varlen_kvpacked_func(q, kv, ends, ends, 4, 4).shape
    (7, 2, 8)
    """
    return _call.run(q, *_call.unpack("kv", kv, 2, True), dropout_p, softmax_scale, causal, window_size,
                     softcap, alibi_slopes, deterministic, return_attn_probs, _call.KV_NAMES,
                     **_call.lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))  # fmt: skip


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
    """`flash_attn_varlen_func` with q, k and v side by side.

    Parameters
    ----------
    qkv : torch.Tensor, numpy.ndarray or jax.Array
        ``[total, 3, h, d]``.
    cu_seqlens : as qkv
        int32 ``[b + 1]``: sequence n has rows ``cu_seqlens[n]`` to ``cu_seqlens[n + 1]``.
    max_seqlen : int
        Bound of the lengths.
    The others
        As the parameters of `flash_attn_func`.

    Returns
    -------
    As `flash_attn_varlen_func`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `flash_attn_func`.

    Examples
    --------
    >>> import numpy as np
    >>> from abacist.compat import flash_attn
    >>> qkv, ends = np.ones((7, 3, 2, 8), np.float32), np.array([0, 3, 7], np.int32)
    >>> flash_attn.flash_attn_varlen_qkvpacked_func(qkv, ends, 4).shape
    (7, 2, 8)
    """
    return _call.run(*_call.unpack("qkv", qkv, 3, True), dropout_p, softmax_scale, causal, window_size,
                     softcap, alibi_slopes, deterministic, return_attn_probs, _call.VARLEN_QKV_NAMES,
                     **_call.lengths(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen))  # fmt: skip


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

    Examples
    --------
    >>> import torch
    >>> from abacist.compat import flash_attn
    >>> cache, new = torch.zeros(2, 1, 9, 2, 8), torch.ones(1, 1, 2, 8)
    >>> flash_attn.flash_attn_with_kvcache(new, *cache, new, new, cache_seqlens=4, causal=True).shape
    torch.Size([1, 1, 2, 8])
    >>> bool(cache[0, 0, 4].all())
    True
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
    score = {"causal": causal, "window": _call.window(window_size), "scale": softmax_scale, "softcap": softcap}
    ways = _call.ways(q, k_cache, v_cache)
    try:
        o, lse = ways.decode(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, rotary_interleaved,
                             *rest, **score)  # fmt: skip
    except ERRORS as error:
        raise renamed(error, _call.NAMES) from None
    return (o, lse) if return_softmax_lse else o
