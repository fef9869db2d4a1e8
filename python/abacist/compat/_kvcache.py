"""Caches of keys and values for flash_attn_with_kvcache: appending, rotating, attention over pages.

The C API's abacist_append, abacist_rotate and abacist_forward for torch tensors on the CPU, without
gradients.
"""

from __future__ import annotations

import ctypes
import struct
import typing

import torch

from .. import _abi, _torch
from ._names import check_types, renamed

PLAN_OPTIONS = struct.Struct("<Qiiii")  # struct_size, backend, threads, batch_invariant, reserved
UNSPLIT = {unsplit: PLAN_OPTIONS.pack(PLAN_OPTIONS.size, 0, 0, unsplit, 0) for unsplit in (False, True)}
STYLE = struct.Struct("<ii")  # abacist_rotary's last fields
ROTARY_HEAD = struct.pack("<Q", 8 + 2 * _abi.TENSOR.size + STYLE.size)
APPEND_HEAD = struct.pack("<Q", 8 + 6 * _abi.TENSOR.size)
INTERLEAVED, HALF_SPLIT = 0, 1
# What the C API's arguments are called in flash_attn_with_kvcache.
ROTARY_NAMES = {"cos": "rotary_cos", "sin": "rotary_sin", "rotary.cos": "rotary_cos",
                "rotary.sin": "rotary_sin"}  # fmt: skip
APPEND_NAMES = {"lengths": "cache_seqlens", **ROTARY_NAMES}
ROTATE_NAMES = {"x": "q", "positions": "cache_seqlens", **ROTARY_NAMES}
PAGES_NAMES = {"key_lengths": "cu_seqlens_k", "k_cache": "k", "v_cache": "v"}
CACHE_NAMES = {"k": "k_cache", "v": "v_cache", "key_lengths": "cache_seqlens"}

_library = _abi.library
_library.abacist_append.argtypes = [ctypes.c_char_p] * 2
_library.abacist_rotate.argtypes = [ctypes.c_char_p] * 4
_library.abacist_append.restype = _library.abacist_rotate.restype = ctypes.c_int32


class Rotary(typing.NamedTuple):
    """abacist_rotary, and the tables that it points to."""

    packed: bytes
    tables: tuple[torch.Tensor, torch.Tensor]


class Operands(typing.NamedTuple):
    """Those of attention over a cache; k and v are pools of pages with a block_table."""

    q: torch.Tensor  # [b, s_q, h_q, d], varlen [total_q, h_q, d]
    k: torch.Tensor  # [b, s_k, h_k, d] or [pages, page_size, h_k, d]
    v: torch.Tensor
    key_lengths: torch.Tensor | None
    block_table: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None


def _operand(name: str, x: torch.Tensor, types: dict = _torch.FLOATS) -> bytes:
    # The quick way first, as in _torch.py.
    code = types.get(x.dtype) if isinstance(x, torch.Tensor) else None
    if code is None or not x.is_cpu or x.layout is not torch.strided or x.is_neg() or x.dim() > _abi.MAX_RANK:
        if isinstance(x, torch.Tensor) and not x.is_cpu:
            raise NotImplementedError(f"{name}: is on {x.device}; caches are served on the CPU only")
        code = _torch._check(name, x, types)
    address, shape, stride = _torch.place_of(name, x)
    return _abi.tensor(address, code, shape, stride)


def _check(status: int, names: dict[str, str]) -> None:
    if status:
        raise renamed(_abi.error(status), names)


def integers(name: str, x: typing.Any, shape: tuple[int, ...]) -> torch.Tensor:
    """A contiguous int32 tensor of that shape."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: is a {type(x).__name__}, must be a torch tensor")
    if x.dtype is not torch.int32:
        raise TypeError(f"{name}: has type {x.dtype}, must be torch.int32")
    if not x.is_cpu or x.layout is not torch.strided or x.is_nested:
        _operand(name, x, _torch.I32_ONLY)  # refuses it
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: has shape {tuple(x.shape)}, must be {shape}")
    return x.contiguous()


def _rotary_of(cos, sin, interleaved: bool, k) -> Rotary | None:
    """abacist_rotary of flash-attn's three arguments, whose tables may have the type of q."""
    if cos is None and sin is None:
        return None
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin), ("k", k)):
        if x is None:
            raise ValueError(f"{name}: is missing, rotary_cos, rotary_sin and k must be given together")
    tables = []
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        packed = _operand(name, x)
        if x.dtype is not torch.float32:
            x = x.float()
            packed = _operand(name, x)
        tables.append((x, packed))
    style = STYLE.pack(INTERLEAVED if interleaved else HALF_SPLIT, 0)
    return Rotary(ROTARY_HEAD + tables[0][1] + tables[1][1] + style, (tables[0][0], tables[1][0]))


def append(k, v, caches: bytes, lengths: bytes, table: bytes, rotary: Rotary | None) -> None:
    """Writes k, rotated, and v behind the `lengths` keys of each sequence. All or nothing."""
    packed = APPEND_HEAD + _operand("k", k) + _operand("v", v) + caches + lengths + table
    _check(_library.abacist_append(packed, rotary and rotary.packed), APPEND_NAMES)


def rotate(x: torch.Tensor, lengths: bytes, rotary: Rotary, same: bool) -> torch.Tensor:
    """x ``[b, s, h, d]`` rotated: row r of sequence n for position ``lengths[n] + r``, or, with
    `same`, all of its rows for ``lengths[n]``."""
    rows = x.reshape(x.shape[0], 1, -1, x.shape[3]) if same else x
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    status = _library.abacist_rotate(_operand("q", rows), lengths, rotary.packed, _operand("q", out))
    _check(status, ROTATE_NAMES)
    return out.reshape(x.shape)


class Attention:
    """A forward pass over a cache."""

    def __init__(self, x: Operands, options: bytes, unsplit: bool, with_lse: bool, names: dict) -> None:
        q, self._names = x.q, names
        self.o = q.new_empty((*q.shape[:-1], x.v.shape[-1]))
        self.lse, lse = None, _abi.ABSENT
        if with_lse:
            shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
            self.lse = q.new_empty(shape, dtype=torch.float32)
            lse = _operand("lse", self.lse)
        if x.cu_seqlens_q is not None:  # rows past the last sequence belong to none
            self.o.zero_()
            if with_lse:
                self.lse.fill_(-torch.inf)
        extras = {}
        for name in ("key_lengths", "block_table", "cu_seqlens_q", "alibi_slopes"):
            tensor = getattr(x, name)
            if tensor is not None:
                types = _torch.F32_ONLY if name == "alibi_slopes" else _torch.I32_ONLY
                extras[name] = _operand(name, tensor, types)
        shown = (names.get(name, name) for name in ("k_cache", "v_cache"))
        self.caches = b"".join(map(_operand, shown, (x.k, x.v)))
        self.table = extras.get("block_table", _abi.ABSENT)
        inputs = _operand("q", q) + self.caches + _operand("o", self.o)
        tensors = _abi.HEAD + inputs + lse + _abi.NO_GRADIENTS + _abi.extras(extras)
        self._arguments = tensors, options, UNSPLIT[unsplit]

    def check(self) -> None:
        """Everything that needs no data, by planning: what comes next may be written."""
        handle = ctypes.c_void_p()
        status = _abi.library.abacist_plan_create(0, *self._arguments, ctypes.byref(handle))
        _check(status, self._names)
        _abi.library.abacist_plan_destroy(handle)

    def run(self) -> None:
        """Fills `o` and `lse`; page ids outside the pool, if a query sees them, are an error."""
        _check(_abi.forward(*self._arguments, None), self._names)


def _options(causal, window, scale, softcap, max_s_q=0, dropout_p=0.0) -> bytes:
    seed = _torch.random_seed() if dropout_p else 0
    return _abi.options(causal, window, scale, softcap, "bottom-right", max_s_q, 0, dropout_p, seed)


def _pages(k_cache, block_table, cache_batch_idx, b: int) -> torch.Tensor | None:
    """The block table. Rows of a dense cache are pages, too: each sequence has one."""
    if block_table is not None:
        if cache_batch_idx is not None:
            raise ValueError("cache_batch_idx: is given beside block_table, must be None")
        if isinstance(block_table, torch.Tensor) and block_table.dim() != 2:
            raise ValueError(f"block_table: has {block_table.dim()} axes, must be [b, max_pages]")
        if not isinstance(block_table, torch.Tensor):
            raise TypeError(f"block_table: is a {type(block_table).__name__}, must be a torch tensor")
        return integers("block_table", block_table, (b, block_table.shape[1]))
    if cache_batch_idx is None:
        return None
    rows = integers("cache_batch_idx", cache_batch_idx, (b,))
    if b and not 0 <= int(rows.min()) <= int(rows.max()) < k_cache.shape[0]:
        raise ValueError(
            f"cache_batch_idx: is {rows.tolist()}, must be in [0, {k_cache.shape[0]}) of k_cache"
        )
    return rows[:, None]


def _check_distinct(cache_batch_idx) -> None:
    if cache_batch_idx is not None and len(cache_batch_idx.unique()) != len(cache_batch_idx):
        raise ValueError(
            f"cache_batch_idx: is {cache_batch_idx.tolist()}, must be distinct when k and v are appended"
        )


def _numbers(b: int, value: int) -> torch.Tensor:
    return torch.full((b,), value, dtype=torch.int32, device="cpu")  # whatever the default device is


def _lengths(cache_seqlens, b: int, room: int, needed: bool) -> torch.Tensor | None:
    if cache_seqlens is None:
        return _numbers(b, room) if needed else None
    if isinstance(cache_seqlens, int) and not isinstance(cache_seqlens, bool):
        if not 0 <= cache_seqlens <= room:
            raise ValueError(f"cache_seqlens: is {_abi.shown(cache_seqlens)}, must be in [0, {room}]")
        return _numbers(b, cache_seqlens)
    if not isinstance(cache_seqlens, torch.Tensor):
        raise TypeError(
            f"cache_seqlens: is {_abi.shown(cache_seqlens)}, must be an integer or a torch tensor"
        )
    return integers("cache_seqlens", cache_seqlens, (b,))


def check_ranks(rank: int = 4, **tensors: typing.Any) -> None:
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: is a {type(x).__name__}, must be a torch tensor")
        if x.dim() != rank:
            raise ValueError(f"{name}: has {x.dim()} axes, must be {rank}")
        if x.is_nested:
            _operand(name, x)  # refuses it


def decode(
    q, k_cache, v_cache, k, v, cos, sin, interleaved, cache_seqlens, cache_batch_idx, block_table,
    alibi_slopes, unsplit, with_lse, *, causal, window, scale, softcap,
) -> tuple:  # fmt: skip
    """flash_attn_with_kvcache: o and lse (None without `with_lse`), neither with a gradient."""
    rotary = _rotary_of(cos, sin, interleaved, k)
    if (k is None) != (v is None):
        raise ValueError(f"{'k' if k is None else 'v'}: is missing, k and v must be given together")
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens: is missing, must be given with k and v")
    new = {}
    if k is not None:
        new = {"k": k, "v": v}
    check_ranks(q=q, k_cache=k_cache, v_cache=v_cache, **new)
    check_types(q=q, k_cache=k_cache, v_cache=v_cache, **new)
    b = q.shape[0]
    table = _pages(k_cache, block_table, cache_batch_idx, b)
    if k is not None:
        _check_distinct(cache_batch_idx)
    if table is None and k_cache.shape[0] > b:  # the sequences have its first rows
        k_cache, v_cache = k_cache[:b], v_cache[:b]
    room = k_cache.shape[1] * (1 if table is None else table.shape[1])
    lengths = _lengths(cache_seqlens, b, room, table is not None)
    after = lengths if k is None else lengths + k.shape[1]
    options = _options(causal, window, scale, softcap)
    before = b"" if k is None else _operand("cache_seqlens", lengths, _torch.I32_ONLY)
    if rotary is not None:
        q = rotate(q, before, rotary, same=not causal and window is None)
    operands = Operands(q, k_cache, v_cache, after, table, alibi_slopes=alibi_slopes)
    work = Attention(operands, options, unsplit, with_lse, CACHE_NAMES)
    if k is not None:
        work.check()
        append(k, v, work.caches, before, work.table, rotary)
    work.run()
    return work.o, work.lse


def refuse_gradients(q, k, v) -> None:
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise NotImplementedError("block_table: gradients through pages are not computed, use no_grad()")


def varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, alibi_slopes,
    with_lse, *, causal, window, scale, softcap, dropout_p,
) -> tuple:  # fmt: skip
    """flash_attn_varlen_func over pages: o and lse."""
    check_ranks(3, q=q)
    check_ranks(k=k, v=v)
    refuse_gradients(q, k, v)
    check_types(q=q, k=k, v=v)
    check_ranks(1, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    b = len(cu_seqlens_q) - 1
    starts = integers("cu_seqlens_q", cu_seqlens_q, (b + 1,))
    lengths = integers("cu_seqlens_k", cu_seqlens_k, (b + 1,)).diff()
    table = _pages(k, block_table, None, b)
    longest = _abi.integer("max_s_q", max_seqlen_q, _abi.UNBOUNDED)
    _abi.integer("max_s_k", max_seqlen_k, _abi.UNBOUNDED)  # the pages' own bound is used
    options = _options(causal, window, scale, softcap, longest, _abi.real("dropout_p", dropout_p))
    operands = Operands(q, k, v, lengths, table, starts, alibi_slopes)
    work = Attention(operands, options, False, with_lse, PAGES_NAMES)
    work.run()
    return work.o, work.lse
