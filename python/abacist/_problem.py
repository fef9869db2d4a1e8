"""What numpy arrays and torch tensors have in common: the arguments of a call, its shapes and axes."""

from __future__ import annotations

import typing
from collections.abc import Sequence

from . import _abi


class Call(typing.NamedTuple):
    """One call of attention() but for q, k and v."""

    options: bytes
    plan_options: bytes
    heads_first: bool  # [b, h, s, d] or [h, total, d]
    varlen: bool
    rank: int  # of q, k and v
    extras: dict[str, typing.Any]  # arrays by their name in the C API


def swap(axes: Sequence[int]) -> tuple[int, ...]:
    """Shape or strides with the axes of heads and rows exchanged."""
    if len(axes) == 4:
        return (axes[0], axes[2], axes[1], axes[3])
    return (axes[1], axes[0], axes[2])


def lse_shape(call: Call, q_shape: Sequence[int]) -> tuple[int, ...]:
    """[b, h_q, s_q] or [h_q, total_q], whatever the layout of q."""
    if call.heads_first:
        return tuple(q_shape[:-1])
    if len(q_shape) == 4:
        return (q_shape[0], q_shape[2], q_shape[1])
    return (q_shape[1], q_shape[0])


def check_rank(name: str, shape: Sequence[int], rank: int, heads_first: bool) -> None:
    if len(shape) != rank:
        letters = ["h", "total" if rank == 3 else "s"][:: 1 if heads_first else -1]
        wanted = ", ".join([*(["b"] if rank == 4 else []), *letters, "d"])
        given = " (cu_seqlens_q is given)" if rank == 3 else ""
        raise ValueError(f"{name}: has {len(shape)} axes, must be [{wanted}]{given}")


def check_types(q: typing.Any, k: typing.Any, v: typing.Any, call: Call, f32: object) -> None:
    """q, k and v are of one type, a bias of that or of float32."""
    kind = q.dtype
    if k.dtype != kind or v.dtype != kind:
        name, x = ("k", k) if k.dtype != kind else ("v", v)
        raise TypeError(f"{name}: has type {x.dtype}, must be {kind} as q is")
    bias = call.extras.get("bias")
    if bias is not None and bias.dtype != kind and bias.dtype != f32:
        wanted = f"{kind}" if kind == f32 else f"{f32} or {kind}"
        raise TypeError(f"bias: has type {bias.dtype}, must be {wanted} as q is")


def check_seqlens(
    cu_seqlens_q: object, cu_seqlens_k: object, max_s_q: int | None, max_s_k: int | None
) -> bool:
    """Whether the call is varlen, after checking that its four arguments come together."""
    if cu_seqlens_q is None and cu_seqlens_k is None and max_s_q is None and max_s_k is None:
        return False
    # In one go: the torch.compile of PyTorch 2.4 traces no |= of dictionaries.
    given = {
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_s_q": max_s_q, "max_s_k": max_s_k,
    }  # fmt: skip
    missing = [name for name, value in given.items() if value is None]
    if missing:
        present = [name for name in given if name not in missing]
        raise ValueError(f"{missing[0]}: is missing, must be given with {present[0]}")
    return True


def padded(name: str, shape: Sequence[int], stride: Sequence[int]) -> tuple[tuple, tuple]:
    """Shape and strides of a bias or mask with leading axes of 1 up to rank 4."""
    missing = 4 - len(shape)
    if missing < 0 or len(shape) == 0:
        raise ValueError(f"{name}: has {len(shape)} axes, must be [b|1, h_q|1, s_q|1, s_k]")
    return (1,) * missing + tuple(shape), (0,) * missing + tuple(stride)


def contiguous(dtype: int, shape: Sequence[int], device: tuple[int, int]) -> bytes:
    """An abacist_tensor without data, for plans."""
    stride, size = [], 1
    for extent in reversed(shape):
        stride.append(size)
        size *= max(extent, 1)
    return _abi.tensor(0, dtype, shape, stride[::-1], device)
