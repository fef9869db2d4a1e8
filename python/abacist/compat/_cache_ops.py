"""flash_attn_with_kvcache as torch.library operators, for torch.compile: eager calls go straight to
_kvcache.py. Whether the caches are written is part of an operator's schema, so there are two."""

from __future__ import annotations

import typing

import torch

from . import _kvcache
from ._names import ERRORS, renamed

_WHERE = (
    "Tensor? cache_seqlens, SymInt? length, Tensor? cache_batch_idx, Tensor? block_table,"
    " Tensor? alibi_slopes, bool unsplit, bool causal, SymInt[]? window, float? scale, float softcap"
)


def _run(q, k_cache, v_cache, k, v, cos, sin, interleaved, rest: tuple) -> tuple:
    """decode(); `length` is cache_seqlens where that is a number, -1 in a window no bound."""
    from .flash_attn import NAMES

    lengths, length, rows, table, slopes, unsplit, causal, window, scale, softcap = rest
    if window is not None:
        window = tuple(None if bound == -1 else bound for bound in window)
    try:
        rotary = _kvcache.rotary_of(cos, sin, interleaved, k)
        return _kvcache.decode(
            q, k_cache, v_cache, k, v, rotary, lengths if length is None else length, rows, table,
            slopes, unsplit, True, causal=causal, window=window, scale=scale, softcap=softcap,
        )  # fmt: skip
    except ERRORS as error:
        raise renamed(error, NAMES) from None


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
    if (k is None) != (v is None):
        raise ValueError(f"{'k' if k is None else 'v'}: is missing, k and v must be given together")
    if k is None and not (cos is None and sin is None):
        raise ValueError("k: is missing, rotary_cos, rotary_sin and k must be given together")
    if k is not None and k_cache is v_cache:  # each is written as a copy: nobody else would notice
        raise ValueError("k_cache: overlaps v_cache; outputs must not share memory")
    if window is not None:
        window = [-1 if bound is None else bound for bound in window]
    number = isinstance(cache_seqlens, (int, torch.SymInt))
    where = (
        None if number else cache_seqlens, cache_seqlens if number else None, cache_batch_idx,
        block_table, alibi_slopes, unsplit, causal, window, scale, float(softcap),
    )  # fmt: skip
    q, k_cache, v_cache = q.detach(), k_cache.detach(), v_cache.detach()  # no gradients, as in eager
    ops: typing.Any = torch.ops.abacist
    if k is None:
        o, lse = ops.read_cache(q, k_cache, v_cache, *where)
    else:
        o, lse = ops.append_to_cache(q, k_cache, v_cache, k.detach(), v.detach(), cos, sin, interleaved, *where)
    return o, lse if with_lse else None
