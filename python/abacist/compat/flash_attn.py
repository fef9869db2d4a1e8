"""Functions of flash-attn 2 on Abacist: axes ``[b, s, h, d]``, causal bottom-right, -1 for no bound.

Unlike the original: lse of a row that sees no key is -inf, not +inf; results are deterministic whatever
`deterministic` says; head dimensions need not be multiples of 8.
"""

from __future__ import annotations

import typing

from .._attention import attention

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


def _window(window_size: Window) -> tuple[int | None, int | None] | None:
    left, right = window_size
    if left < 0 and right < 0:
        return None
    return (None if left < 0 else left, None if right < 0 else right)


def _run(
    q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
    return_attn_probs, **rest,
) -> typing.Any:  # fmt: skip
    if return_attn_probs and dropout_p:
        raise NotImplementedError(
            "return_attn_probs: with dropout it asks for the probabilities, which are never written"
        )
    result = attention(
        q, k, v, dropout_p=dropout_p, scale=softmax_scale, causal=causal,
        window=_window(window_size), softcap=softcap, alibi_slopes=alibi_slopes,
        return_lse=return_attn_probs, **rest,
    )  # fmt: skip
    return (*result, None) if return_attn_probs else result


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
                return_attn_probs)  # fmt: skip


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
    return _run(q, kv[:, :, 0], kv[:, :, 1], dropout_p, softmax_scale, causal, window_size, softcap,
                alibi_slopes, return_attn_probs)  # fmt: skip


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
    return _run(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], dropout_p, softmax_scale, causal,
                window_size, softcap, alibi_slopes, return_attn_probs)  # fmt: skip


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

    `cu_seqlens_q` and `cu_seqlens_k` are int32 ``[b + 1]``. A `block_table` (paged k and v) is refused.
    """
    if block_table is not None:
        raise NotImplementedError("block_table: paged k and v are not supported, must be None")
    return _run(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                return_attn_probs,
                **_varlen(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))  # fmt: skip


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
    return _run(q, kv[:, 0], kv[:, 1], dropout_p, softmax_scale, causal, window_size, softcap,
                alibi_slopes, return_attn_probs,
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
    return _run(qkv[:, 0], qkv[:, 1], qkv[:, 2], dropout_p, softmax_scale, causal, window_size,
                softcap, alibi_slopes, return_attn_probs,
                **_varlen(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen))  # fmt: skip


def _append(cache: typing.Any, new: typing.Any, lengths: list[int]) -> None:
    for sequence, length in enumerate(lengths):
        cache[sequence, length : length + new.shape[1]] = new[sequence]


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
    """Attention over the first `cache_seqlens` rows of a cache, after appending k and v to it.

    ``k_cache, v_cache [b, s_cache, h_k, d]`` are torch tensors, written in place when
    ``k, v [b, s_new, h_k, d]`` are given. `cache_seqlens` is an integer or int32 ``[b]``, the lengths
    before appending. A cache that is too short is a ValueError, and nothing is written. Rotary
    embedding, `cache_batch_idx`, `cache_leftpad`, `block_table` and `num_splits` are refused. Returns o,
    or (o, lse). Without gradients, as the original.
    """
    import torch

    refused = {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "block_table": block_table,
               "cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad}  # fmt: skip
    for name, value in refused.items():
        if value is not None:
            raise NotImplementedError(f"{name}: is not supported, must be None")
    if num_splits not in (0, 1):
        raise NotImplementedError(f"num_splits: is {num_splits}; splits follow from the problem, must be 0")
    if (k is None) != (v is None):
        raise ValueError("k, v: must be given together")
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens: is missing, must be given with k and v")
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32)
    with torch.no_grad():
        if k is not None:
            lengths, room = cache_seqlens.tolist(), k_cache.shape[1]
            if len(lengths) != k.shape[0] or k.shape != k_cache.shape[:1] + k.shape[1:2] + k_cache.shape[2:]:
                raise ValueError(f"k: has shape {tuple(k.shape)}, does not fit k_cache {tuple(k_cache.shape)}")
            if v.shape != v_cache.shape[:1] + k.shape[1:2] + v_cache.shape[2:]:
                raise ValueError(f"v: has shape {tuple(v.shape)}, does not fit v_cache {tuple(v_cache.shape)}")
            if v_cache.shape[1] != room:
                raise ValueError(f"v_cache: has {v_cache.shape[1]} rows, must be {room}")
            if lengths and (min(lengths) < 0 or max(lengths) + k.shape[1] > room):
                raise ValueError(
                    f"cache_seqlens: is {lengths}, with {k.shape[1]} new rows must be in [0, {room}]"
                )
            _append(k_cache, k, lengths)
            _append(v_cache, v, lengths)
            cache_seqlens = cache_seqlens + k.shape[1]
        return attention(
            q, k_cache, v_cache, scale=softmax_scale, causal=causal, window=_window(window_size),
            softcap=softcap, alibi_slopes=alibi_slopes, key_lengths=cache_seqlens,
            return_lse=return_softmax_lse,
        )  # fmt: skip
