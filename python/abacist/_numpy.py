"""attention() for numpy arrays."""

from __future__ import annotations

import functools
import typing

import numpy as np

from . import _abi, _problem

FLOATS = {"float32": _abi.F32, "bfloat16": _abi.BF16, "float16": _abi.F16, "float64": _abi.F64}
TYPES = {
    "q": FLOATS, "k": FLOATS, "v": FLOATS, "bias": FLOATS,
    "alibi_slopes": {"float32": _abi.F32}, "sinks": {"float32": _abi.F32},
    "cu_seqlens_q": {"int32": _abi.I32}, "cu_seqlens_k": {"int32": _abi.I32},
    "key_lengths": {"int32": _abi.I32}, "visible": {"bool": _abi.U8, "uint8": _abi.U8},
}  # fmt: skip
_codes: dict[tuple[str, np.dtype], int] = {}  # of types seen: a dtype takes long to say its name


def _code(name: str, dtype: np.dtype) -> int:
    code = _codes.get((name, dtype))
    if code is None:
        code = TYPES[name].get(dtype.name)
        if code is None or not dtype.isnative:
            wanted = " or ".join(TYPES[name])
            shown = _abi.ARGUMENTS.get(name, name)
            raise TypeError(f"{shown}: has type {dtype.str} ({dtype.name}), must be {wanted}")
        _codes[name, dtype] = code
    return code


@functools.lru_cache(maxsize=1024)
def _elements(strides: tuple[int, ...], size: int) -> tuple[int, ...] | None:
    """Strides in elements, from bytes; None if they are no multiples."""
    return None if any(x % size for x in strides) else tuple(x // size for x in strides)


def _described(name: str, array: typing.Any) -> tuple[int, int, tuple, tuple]:
    """Address, type, shape and strides in elements."""
    shown = _abi.ARGUMENTS.get(name, name)
    if not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{shown}: is a {type(array).__name__}, must be a numpy array as q is")
    code = _code(name, array.dtype)
    if array.ndim > _abi.MAX_RANK:
        raise ValueError(f"{shown}: has {array.ndim} axes, must have at most {_abi.MAX_RANK}")
    stride = _elements(array.strides, array.itemsize)
    if stride is None:
        size = array.itemsize
        raise ValueError(f"{shown}: has strides {array.strides}, must be multiples of {size} bytes")
    return array.__array_interface__["data"][0], code, array.shape, stride


def _operand(name: str, array: typing.Any, call: _problem.Call) -> bytes:
    pointer, code, shape, stride = _described(name, array)
    _problem.check_rank(name, shape, call)
    if call.heads_first:
        shape, stride = _problem.swap(shape), _problem.swap(stride)
    return _abi.tensor(pointer, code, shape, stride)


def _extras(call: _problem.Call) -> bytes:
    packed = {}
    for name, array in call.extras.items():
        pointer, code, shape, stride = _described(name, array)
        if name in ("bias", "visible"):
            shape, stride = _problem.padded(_abi.ARGUMENTS.get(name, name), shape, stride)
        packed[name] = _abi.tensor(pointer, code, shape, stride)
    return _abi.extras(packed)


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, call: _problem.Call, return_lse: bool
) -> typing.Any:
    inputs = _operand("q", q, call) + _operand("k", k, call) + _operand("v", v, call)
    o = np.empty((*q.shape[:-1], v.shape[-1]), q.dtype)
    packed_o = _operand("q", o, call)
    lse, packed_lse = None, _abi.ABSENT
    if return_lse:
        lse = np.empty(_problem.lse_shape(call, q.shape), np.float32)
        packed_lse = _abi.tensor(
            lse.__array_interface__["data"][0],
            _abi.F32,
            lse.shape,
            tuple(stride // 4 for stride in lse.strides),
        )
    # Rows of a varlen buffer past cu_seqlens_q[-1] belong to no sequence: the library leaves them.
    if call.varlen:
        o[...] = 0
        if lse is not None:
            lse[...] = -np.inf
    tensors = (
        _abi.HEAD + inputs + packed_o + packed_lse + _abi.NO_GRADIENTS + _extras(call)
    )
    status = _abi.forward(tensors, call.options, call.plan_options, None)
    if status:
        raise _abi.error(status)
    return (o, lse) if return_lse else o


def compiling() -> bool:
    return False


def random_seed() -> int:
    """From numpy's global generator, so that np.random.seed makes a run repeatable."""
    return int(np.random.randint(0, 2**63 - 1, dtype=np.int64))


def plan_operands(q: typing.Any, k: typing.Any, v: typing.Any, call: _problem.Call) -> tuple:
    """q, k and v as bytes, the shape and type code of q, d_v, and the extras."""
    inputs = tuple(_operand(*pair, call) for pair in (("q", q), ("k", k), ("v", v)))
    return inputs, q.shape, FLOATS[q.dtype.name], v.shape[-1], _extras(call)
