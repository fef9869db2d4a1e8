"""attention() for numpy arrays."""

from __future__ import annotations

import ctypes
import functools
import typing

import numpy as np

from . import _abi, _problem

F32 = np.dtype(np.float32)
FLOATS = {"float32": _abi.F32, "bfloat16": _abi.BF16, "float16": _abi.F16, "float64": _abi.F64}
TYPES = {
    "q": FLOATS, "k": FLOATS, "v": FLOATS, "o": FLOATS, "lse": FLOATS,
    "bias": FLOATS, "d_bias": FLOATS,
    "alibi_slopes": {"float32": _abi.F32}, "sinks": {"float32": _abi.F32}, "d_sinks": {"float32": _abi.F32},
    "cu_seqlens_q": {"int32": _abi.I32}, "cu_seqlens_k": {"int32": _abi.I32},
    "key_lengths": {"int32": _abi.I32}, "visible": {"bool": _abi.U8, "uint8": _abi.U8},
}  # fmt: skip


class _Interface(ctypes.Structure):
    """PyArrayInterface of numpy's array interface protocol, as far as it is needed."""

    _fields_ = [
        ("numbers", ctypes.c_int * 5),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("data", ctypes.c_void_p),
    ]


# __array_interface__ builds a dictionary with texts: half a microsecond more per array.
_interface = ctypes.PYFUNCTYPE(ctypes.POINTER(_Interface), ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _elements(name: str, strides: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Strides in elements, from bytes."""
    if any(stride % size for stride in strides):
        raise ValueError(f"{name}: has strides {strides}, must be multiples of {size} bytes")
    return tuple(stride // size for stride in strides)


@functools.lru_cache(maxsize=1024)
def _layout(
    name: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype, rank: int,
    heads_first: bool,
) -> bytes:  # fmt: skip
    """What follows the address in an abacist_tensor; rank 0: any, with padding for bias and mask."""
    shown = _abi.ARGUMENTS.get(name, name)
    code = TYPES[name].get(dtype.name)
    if code is None or not dtype.isnative:
        wanted = " or ".join(TYPES[name])
        raise TypeError(f"{shown}: has type {dtype.str} ({dtype.name}), must be {wanted}")
    if len(shape) > _abi.MAX_RANK:
        raise ValueError(f"{shown}: has {len(shape)} axes, must have at most {_abi.MAX_RANK}")
    stride = _elements(shown, strides, dtype.itemsize)
    if rank:
        _problem.check_rank(name, shape, rank, heads_first)
    if heads_first:
        shape, stride = _problem.swap(shape), _problem.swap(stride)
    if name in ("bias", "d_bias", "visible"):
        shape, stride = _problem.padded(shown, shape, stride)
    return _abi.tensor(0, code, shape, stride)[8:]


def _check(name: str, array: typing.Any) -> None:
    if not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray):
        shown = _abi.ARGUMENTS.get(name, name)
        raise TypeError(f"{shown}: is a {type(array).__name__}, must be a numpy array as q is")


def _operand(name: str, array: typing.Any, rank: int = 0, heads_first: bool = False) -> bytes:
    """An abacist_tensor."""
    if type(array) is not np.ndarray:
        _check(name, array)
    capsule = array.__array_struct__  # what the pointer points into lives as long as this
    address = _interface(capsule, None).contents.data or 0
    layout = _layout(name, array.shape, array.strides, array.dtype, rank, heads_first)
    return address.to_bytes(8, "little") + layout


def _extras(call: _problem.Call) -> bytes:
    if not call.extras:
        return _abi.NO_EXTRAS
    return _abi.extras(packed_extras(call))


def packed_extras(call: _problem.Call) -> dict[str, bytes]:
    return {name: _operand(name, array) for name, array in call.extras.items()}


def _inputs(q: typing.Any, k: typing.Any, v: typing.Any, call: _problem.Call) -> bytes:
    rank, heads_first = call.rank, call.heads_first
    return (
        _operand("q", q, rank, heads_first)
        + _operand("k", k, rank, heads_first)
        + _operand("v", v, rank, heads_first)
    )


def forward(
    q: typing.Any, k: typing.Any, v: typing.Any, call: _problem.Call, with_lse: bool,
    empty: typing.Callable[..., np.ndarray] = np.empty,
) -> tuple[np.ndarray, np.ndarray | None]:  # fmt: skip
    """o and lse (None without `with_lse`), in memory that `empty` gives."""
    inputs, extras = _inputs(q, k, v, call), _extras(call)
    if call.extras or k.dtype is not q.dtype or v.dtype is not q.dtype:
        _problem.check_types(q, k, v, call, F32)
    o, lse, packed_lse = empty((*q.shape[:-1], v.shape[-1]), q.dtype), None, _abi.ABSENT
    if with_lse:
        kind = np.float64 if q.dtype == np.float64 else np.float32
        lse = empty(_problem.lse_shape(call, q.shape), kind)
        packed_lse = _operand("lse", lse)
    # Rows of a varlen buffer past cu_seqlens_q[-1] belong to no sequence: the library leaves them.
    if call.varlen:
        o[...] = 0
        if lse is not None:
            lse[...] = -np.inf
    outputs = _operand("o", o, call.rank, call.heads_first) + packed_lse
    tensors = _abi.HEAD + inputs + outputs + _abi.NO_GRADIENTS + extras
    status = _abi.forward(tensors, call.options, call.plan_options, None)
    if status:
        raise _abi.error(status)
    return o, lse


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, call: _problem.Call, return_lse: bool
) -> typing.Any:
    o, lse = forward(q, k, v, call, return_lse)
    return (o, lse) if return_lse else o


def random_seed() -> int:
    """From numpy's global generator, so that np.random.seed makes a run repeatable."""
    return int(np.random.randint(0, 2**63 - 1, dtype=np.int64))


def plan_operands(q: typing.Any, k: typing.Any, v: typing.Any, call: _problem.Call) -> tuple:
    """q, k and v as bytes, the shape and type code of q, d_v, the extras, and the device."""
    inputs = tuple(
        _operand(*pair, call.rank, call.heads_first) for pair in (("q", q), ("k", k), ("v", v))
    )
    extras = _extras(call)
    _problem.check_types(q, k, v, call, F32)
    return inputs, q.shape, FLOATS[q.dtype.name], v.shape[-1], extras, _abi.HOST
