"""Caches of keys and values for flash_attn_with_kvcache: appending, rotating, attention over pages.

The C API's abacist_append, abacist_rotate and plans, for torch tensors on the CPU, without gradients.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import typing

import torch

from .. import _abi, _torch
from ._names import renamed

PLAN_OPTIONS = struct.Struct("<Qiiii")  # struct_size, backend, threads, batch_invariant, reserved
RUN_OPTIONS = struct.Struct("<QQQQQQ")  # struct_size, workspace, its bytes, stream, progress, context
STYLE = struct.Struct("<ii")  # abacist_rotary's last fields
ALIGNMENT = 256  # of workspaces
INTERLEAVED, HALF_SPLIT = 0, 1
# What the C API's arguments are called in flash_attn_with_kvcache.
ROTARY_NAMES = {"cos": "rotary_cos", "sin": "rotary_sin", "rotary.cos": "rotary_cos",
                "rotary.sin": "rotary_sin"}  # fmt: skip
CACHE_NAMES = {"k": "k_cache", "v": "v_cache", "key_lengths": "cache_seqlens"}

_library = _abi.library
_library.abacist_append.argtypes = [ctypes.c_char_p] * 2
_library.abacist_rotate.argtypes = [ctypes.c_char_p] * 4
_library.abacist_plan_run.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]
_library.abacist_plan_device_status.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
for _name in ("append", "rotate", "plan_run", "plan_device_status"):
    getattr(_library, "abacist_" + _name).restype = ctypes.c_int32


class Rotary(typing.NamedTuple):
    """Rotary position embedding: float32 tables ``[positions, d_rot / 2]`` and the style."""

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool

    def packed(self) -> bytes:
        tables = _operand("rotary_cos", self.cos) + _operand("rotary_sin", self.sin)
        size = 8 + len(tables) + STYLE.size
        style = INTERLEAVED if self.interleaved else HALF_SPLIT
        return struct.pack("<Q", size) + tables + STYLE.pack(style, 0)


class Operands(typing.NamedTuple):
    """Those of attention over a cache; k and v are pools of pages with a block_table."""

    q: torch.Tensor  # [b, s_q, h_q, d], varlen [total_q, h_q, d]
    k: torch.Tensor  # [b, s_k, h_k, d] or [pages, page_size, h_k, d]
    v: torch.Tensor
    key_lengths: torch.Tensor | None
    block_table: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None


def _operand(name: str, x: torch.Tensor, types: dict | None = None) -> bytes:
    if isinstance(x, torch.Tensor) and not x.is_cpu:
        raise NotImplementedError(f"{name}: is on {x.device}; caches are served on the CPU only")
    code = _torch._check(name, x, types or _torch.FLOATS)
    return _abi.tensor(x.data_ptr(), code, x.shape, x.stride())


def _check(status: int, names: dict[str, str]) -> None:
    if status:
        raise renamed(_abi.error(status), names)


def integers(name: str, x: typing.Any, shape: tuple[int, ...]) -> torch.Tensor:
    """A contiguous int32 tensor of that shape."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: is a {type(x).__name__}, must be a torch tensor")
    if x.dtype is not torch.int32:
        raise TypeError(f"{name}: has type {x.dtype}, must be torch.int32")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: has shape {tuple(x.shape)}, must be {shape}")
    return x.contiguous()


def rotary_of(cos, sin, interleaved: bool, k) -> Rotary | None:
    """flash-attn's three arguments; its tables have the type of q, ours float32."""
    if cos is None and sin is None:
        return None
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin), ("k", k)):
        if x is None:
            raise ValueError(f"{name}: is missing, rotary_cos, rotary_sin and k must be given together")
        _torch._check(name, x, _torch.FLOATS)
    return Rotary(cos.float(), sin.float(), bool(interleaved))


def append(k, v, k_cache, v_cache, lengths, block_table=None, rotary: Rotary | None = None) -> None:
    """Writes k, rotated, and v behind the `lengths` keys of each sequence. All or nothing."""
    table = _abi.ABSENT if block_table is None else _operand("block_table", block_table, _torch.I32_ONLY)
    tensors = [_operand(name, x) for name, x in
               (("k", k), ("v", v), ("k_cache", k_cache), ("v_cache", v_cache))]  # fmt: skip
    tensors += [_operand("lengths", lengths, _torch.I32_ONLY), table]
    packed = struct.pack("<Q", 8 + 6 * _abi.TENSOR.size) + b"".join(tensors)
    status = _library.abacist_append(packed, None if rotary is None else rotary.packed())
    _check(status, {"lengths": "cache_seqlens", **ROTARY_NAMES})


def rotate(x: torch.Tensor, positions: torch.Tensor, rotary: Rotary, same: bool) -> torch.Tensor:
    """x ``[b, s, h, d]`` rotated: row r of sequence n for position ``positions[n] + r``, or, with
    `same`, all of its rows for ``positions[n]``."""
    rows = x.reshape(x.shape[0], 1, -1, x.shape[3]) if same else x
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    status = _library.abacist_rotate(
        _operand("q", rows), _operand("cache_seqlens", positions, _torch.I32_ONLY), rotary.packed(),
        _operand("q", out))  # fmt: skip
    _check(status, {"x": "q", "positions": "cache_seqlens", **ROTARY_NAMES})
    return out.reshape(x.shape)


class Attention:
    """A planned forward pass: checked on entry, so that nothing is written before it can run."""

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
        inputs = _operand("q", q) + _operand("k", x.k) + _operand("v", x.v) + _operand("o", self.o)
        self._tensors = _abi.HEAD + inputs + lse + _abi.NO_GRADIENTS + _abi.extras(extras)
        self._options = options
        self._plan_options = PLAN_OPTIONS.pack(PLAN_OPTIONS.size, 0, 0, unsplit, 0)
        self._handle = ctypes.c_void_p()

    @contextlib.contextmanager
    def planned(self) -> typing.Iterator[None]:
        """The plan lives as long as this does."""
        status = _library.abacist_plan_create(
            0, self._tensors, self._options, self._plan_options, ctypes.byref(self._handle)
        )
        _check(status, self._names)
        try:
            yield
        finally:
            _library.abacist_plan_destroy(self._handle)

    def run(self) -> None:
        """Fills `o` and `lse`; page ids outside the pool, if a query sees them, are an error."""
        info = _abi.PlanInfo(struct_size=ctypes.sizeof(_abi.PlanInfo))
        _check(_library.abacist_plan_get_info(self._handle, ctypes.byref(info)), {})
        memory = torch.empty(info.workspace_bytes + ALIGNMENT, dtype=torch.uint8)
        start = -(-memory.data_ptr() // ALIGNMENT) * ALIGNMENT
        run = RUN_OPTIONS.pack(RUN_OPTIONS.size, start, info.workspace_bytes, 0, 0, 0)
        _check(_library.abacist_plan_run(self._handle, self._tensors, run), self._names)
        _check(_library.abacist_plan_device_status(self._handle, run), self._names)


def _options(causal, window, scale, softcap, max_s_q=0, dropout_p=0.0) -> bytes:
    seed = _torch.random_seed() if dropout_p else 0
    return _abi.options(causal, window, scale, softcap, "bottom-right", max_s_q, 0, dropout_p, seed)


def _pages(k_cache, block_table, cache_batch_idx, b: int) -> torch.Tensor | None:
    """The block table. Rows of a dense cache are pages, too: each sequence has one."""
    if block_table is not None:
        if cache_batch_idx is not None:
            raise ValueError("cache_batch_idx: is given beside block_table, must be None")
        if not isinstance(block_table, torch.Tensor) or block_table.dim() != 2:
            raise ValueError("block_table: must be an int32 tensor [b, max_pages]")
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


def _lengths(cache_seqlens, b: int, room: int, needed: bool) -> torch.Tensor | None:
    if cache_seqlens is None:
        return torch.full((b,), room, dtype=torch.int32) if needed else None
    if isinstance(cache_seqlens, int):
        if not 0 <= cache_seqlens <= room:
            raise ValueError(f"cache_seqlens: is {cache_seqlens}, must be in [0, {room}]")
        return torch.full((b,), cache_seqlens, dtype=torch.int32)
    return integers("cache_seqlens", cache_seqlens, (b,))


def _check_ranks(**tensors: typing.Any) -> None:
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: is a {type(x).__name__}, must be a torch tensor")
        if x.dim() != 4:
            raise ValueError(f"{name}: has {x.dim()} axes, must be 4")


@torch.no_grad()
def decode(
    q, k_cache, v_cache, k, v, rotary, cache_seqlens, cache_batch_idx, block_table, alibi_slopes,
    unsplit, with_lse, *, causal, window, scale, softcap,
) -> tuple:  # fmt: skip
    """flash_attn_with_kvcache: o and lse (None without `with_lse`)."""
    if (k is None) != (v is None):
        raise ValueError(f"{'k' if k is None else 'v'}: is missing, k and v must be given together")
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens: is missing, must be given with k and v")
    new = {}
    if k is not None:
        new = {"k": k, "v": v}
        _check_distinct(cache_batch_idx)
    _check_ranks(q=q, k_cache=k_cache, v_cache=v_cache, **new)
    b = q.shape[0]
    table = _pages(k_cache, block_table, cache_batch_idx, b)
    if table is None:  # a larger cache: the sequences have its first rows
        k_cache, v_cache = k_cache[:b], v_cache[:b]
    room = k_cache.shape[1] * (1 if table is None else table.shape[1])
    lengths = _lengths(cache_seqlens, b, room, table is not None)
    after = lengths if k is None else lengths + k.shape[1]
    options = _options(causal, window, scale, softcap)
    if rotary is not None:
        q = rotate(q, lengths, rotary, same=not causal and window is None)
    operands = Operands(q, k_cache, v_cache, after, table, alibi_slopes=alibi_slopes)
    work = Attention(operands, options, unsplit, with_lse, CACHE_NAMES)
    with work.planned():
        if k is not None:
            append(k, v, k_cache, v_cache, lengths, table, rotary)
        work.run()
    return work.o, work.lse


def varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, alibi_slopes,
    with_lse, *, causal, window, scale, softcap, dropout_p,
) -> tuple:  # fmt: skip
    """flash_attn_varlen_func over pages: o and lse."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise NotImplementedError("block_table: gradients through pages are not computed, use no_grad()")
    b = len(cu_seqlens_q) - 1
    starts = integers("cu_seqlens_q", cu_seqlens_q, (b + 1,))
    lengths = integers("cu_seqlens_k", cu_seqlens_k, (b + 1,)).diff()
    table = _pages(k, block_table, None, b)
    options = _options(causal, window, scale, softcap, max_seqlen_q, dropout_p)
    operands = Operands(q, k, v, lengths, table, starts, alibi_slopes)
    work = Attention(operands, options, False, with_lse, {"key_lengths": "cu_seqlens_k"})
    with work.planned():
        work.run()
    return work.o, work.lse
