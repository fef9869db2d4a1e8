"""flash_attn_with_kvcache, and flash_attn_varlen_func over pages, as torch.library operators, for
torch.compile: eager calls go straight to _kvcache.py. Whether the caches are written is part of an
operator's schema, so there are two of the former."""

from __future__ import annotations

import typing

import torch

from .. import _abi, _ops
from . import _call, _kvcache
from ._names import ERRORS, renamed

_SCORE = "bool causal, SymInt[]? window, float? scale, float softcap"
_WHERE = (
    "Tensor? cache_seqlens, SymInt? length, Tensor? cache_batch_idx, Tensor? block_table,"
    f" Tensor? alibi_slopes, bool unsplit, {_SCORE}"
)


def _packed(window) -> list[int] | None:
    """A window as an operator's argument, where -1 is no bound."""
    return None if window is None else [-1 if bound is None else bound for bound in window]


def _unpacked(window) -> tuple[int | None, ...] | None:
    return None if window is None else tuple(None if bound == -1 else bound for bound in window)


def _run(q, k_cache, v_cache, k, v, cos, sin, interleaved, rest: tuple) -> tuple:
    """decode(); `length` is cache_seqlens where that is a number."""
    lengths, length, rows, table, slopes, unsplit, causal, window, scale, softcap = rest
    try:
        return _kvcache.decode(
            q, k_cache, v_cache, k, v, cos, sin, interleaved, lengths if length is None else length,
            rows, table, slopes, unsplit, True, causal=causal, window=_unpacked(window), scale=scale,
            softcap=softcap,
        )  # fmt: skip
    except ERRORS as error:
        raise renamed(error, _call.NAMES) from None


def _results(q, v_cache) -> tuple:
    shape = (q.shape[0], q.shape[2], q.shape[1])
    return q.new_empty((*q.shape[:-1], v_cache.shape[-1])), q.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op(
    "abacist::read_cache", mutates_args=(),
    schema=f"(Tensor q, Tensor k_cache, Tensor v_cache, {_WHERE}) -> (Tensor, Tensor)",
)  # fmt: skip
def read(q, k_cache, v_cache, *rest):
    return _run(q, k_cache, v_cache, None, None, None, None, True, rest)


@read.register_fake
def _(q, k_cache, v_cache, *rest):
    return _results(q, v_cache)


@torch.library.custom_op(
    "abacist::append_to_cache", mutates_args=("k_cache", "v_cache"),
    schema="(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor? rotary_cos,"
    f" Tensor? rotary_sin, bool interleaved, {_WHERE}) -> (Tensor, Tensor)",
)  # fmt: skip
def append(q, k_cache, v_cache, k, v, cos, sin, interleaved, *rest):
    return _run(q, k_cache, v_cache, k, v, cos, sin, interleaved, rest)


@append.register_fake
def _(q, k_cache, v_cache, k, v, cos, sin, interleaved, *rest):
    return _results(q, v_cache)


def decode(
    q, k_cache, v_cache, k, v, cos, sin, interleaved, cache_seqlens, cache_batch_idx, block_table,
    alibi_slopes, unsplit, with_lse, *, causal, window, scale, softcap,
) -> tuple:  # fmt: skip
    """What flash_attn_with_kvcache is while torch.compile traces it."""
    number = isinstance(cache_seqlens, (int, torch.SymInt)) and not isinstance(cache_seqlens, bool)
    _ops.check_tensors(
        q=q, k=k, v=v, rotary_cos=cos, rotary_sin=sin, cache_batch_idx=cache_batch_idx,
        block_table=block_table, alibi_slopes=alibi_slopes, cache_seqlens=None if number else cache_seqlens,
    )  # fmt: skip
    _kvcache.check_ranks(q=q, k_cache=k_cache, v_cache=v_cache)
    if type(cache_seqlens) is int and not 0 <= cache_seqlens < 2**31:
        raise ValueError(f"cache_seqlens: is {_abi.shown(cache_seqlens)}, must be in [0, 2^31)")
    _ops.check_options(causal, window, scale, softcap)
    if (k is None) != (v is None):
        raise ValueError(f"{'k' if k is None else 'v'}: is missing, k and v must be given together")
    if k is None and not (cos is None and sin is None):
        raise ValueError("k: is missing, rotary_cos, rotary_sin and k must be given together")
    if k is not None and k_cache is v_cache:  # each is written as a copy: nobody else would notice
        raise ValueError("k_cache: overlaps v_cache; outputs must not share memory")
    where = (
        None if number else cache_seqlens, cache_seqlens if number else None, cache_batch_idx,
        block_table, alibi_slopes, unsplit, causal, _packed(window), scale, float(softcap),
    )  # fmt: skip
    q, k_cache, v_cache = q.detach(), k_cache.detach(), v_cache.detach()  # no gradients, as in eager
    ops: typing.Any = torch.ops.abacist
    if k is None:
        o, lse = ops.read_cache(q, k_cache, v_cache, *where)
    else:
        o, lse = ops.append_to_cache(q, k_cache, v_cache, k.detach(), v.detach(), cos, sin, interleaved, *where)
    return o, lse if with_lse else None


@torch.library.custom_op(
    "abacist::read_pages", mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_s_q,"
    f" SymInt max_s_k, Tensor block_table, Tensor? alibi_slopes, {_SCORE}) -> (Tensor, Tensor)",
)  # fmt: skip
def read_pages(q, k, v, starts, ends, max_s_q, max_s_k, table, slopes, causal, window, scale, softcap):
    try:
        return _kvcache.varlen(
            q, k, v, starts, ends, max_s_q, max_s_k, table, slopes, True, causal=causal,
            window=_unpacked(window), scale=scale, softcap=softcap, dropout_p=0.0,
        )  # fmt: skip
    except ERRORS as error:
        raise renamed(error, _call.NAMES) from None


@read_pages.register_fake
def _(q, k, v, *rest):
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), lse


def varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, alibi_slopes,
    with_lse, *, causal, window, scale, softcap, dropout_p,
) -> tuple:  # fmt: skip
    """What flash_attn_varlen_func over pages is while torch.compile traces it."""
    _kvcache.check_ranks(3, q=q)
    _kvcache.check_ranks(k=k, v=v)
    _kvcache.check_ranks(1, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    _ops.check_tensors(block_table=block_table, alibi_slopes=alibi_slopes)
    _ops.check_options(causal, window, scale, softcap, "bottom-right", max_seqlen_q, max_seqlen_k, dropout_p)
    if dropout_p:
        raise NotImplementedError("dropout_p: must be 0 with a block_table under torch.compile")
    _kvcache.refuse_gradients(q, k, v)
    ops: typing.Any = torch.ops.abacist
    o, lse = ops.read_pages(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, alibi_slopes, causal,
        _packed(window), scale, float(softcap),
    )  # fmt: skip
    return o, lse if with_lse else None
