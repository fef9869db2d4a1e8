"""attention() for JAX arrays on the CPU: in place, under jit as a custom call, with gradients."""

from __future__ import annotations

import ctypes
import functools
import json
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np

from . import _abi, _numpy, _problem, _xla

if jax.__version_info__ < (0, 5, 0):
    raise NotImplementedError(f"jax: is version {jax.__version__}, must be 0.5 or newer")

DIFFERENTIABLE = ("bias", "sinks")
ALIGNMENT = 64  # of memory that XLA takes as it is


def _check(name: str, x: typing.Any) -> None:
    shown = _abi.ARGUMENTS.get(name, name)
    if not isinstance(x, (jax.Array, np.ndarray)) or isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{shown}: is a {type(x).__name__}, must be a JAX array as q is")
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted():
        raise ValueError(f"{shown}: was deleted or donated, must have memory")
    if isinstance(x, jax.core.Tracer):
        platform = jax.default_backend()
    else:
        platform = "cpu" if isinstance(x, np.ndarray) else next(iter(x.devices())).platform
    if platform != "cpu":
        raise NotImplementedError(f"{shown}: is on {platform}, JAX arrays must be on the CPU")


def _empty(shape: tuple[int, ...], dtype: typing.Any) -> np.ndarray:
    """Memory that device_put does not copy."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _layout(name: str, x: typing.Any, rank: int = 0, heads_first: bool = False) -> bytes:
    """An abacist_tensor without its address: XLA's arrays are row-major."""
    shown = _abi.ARGUMENTS.get(name, name)
    if not all(isinstance(size, int) for size in x.shape):
        raise NotImplementedError(f"{shown}: has shape {x.shape}, sizes must be numbers")
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        raise TypeError(f"{shown}: has type {x.dtype}, must be one of numbers")
    return bytes(8) + _row_major(name, tuple(x.shape), np.dtype(x.dtype), rank, heads_first)


def _on_this_host(name: str, x: typing.Any) -> np.ndarray:
    try:
        return np.asarray(x)
    except TypeError as reason:  # keys of random numbers
        raise TypeError(f"{_abi.ARGUMENTS.get(name, name)}: has no numbers ({reason})") from None


def plan_operands(q: typing.Any, k: typing.Any, v: typing.Any, call: _problem.Call) -> tuple:
    """q, k and v as bytes, the shape and type code of q, d_v, the extras, and the device."""
    arrays = {"q": q, "k": k, "v": v}
    for name, x in (arrays | call.extras).items():
        _check(name, x)
    inputs = tuple(_layout(*pair, call.rank, call.heads_first) for pair in arrays.items())
    extras = _abi.extras({name: _layout(name, x) for name, x in call.extras.items()})
    _problem.check_types(q, k, v, call, _numpy.F32)
    return inputs, q.shape, _numpy.FLOATS[np.dtype(q.dtype).name], v.shape[-1], extras, _abi.HOST


def _outputs(call: _problem.Call, q: typing.Any, v: typing.Any) -> tuple:
    o = jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype)
    kind = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    return o, jax.ShapeDtypeStruct(_problem.lse_shape(call, q.shape), kind)


def _validate(q: typing.Any, k: typing.Any, v: typing.Any, call: _problem.Call) -> None:
    """Refuses while JAX traces what would be refused when it runs, but for data."""
    inputs, _, _, _, extras, _ = plan_operands(q, k, v, call)
    o, lse = _outputs(call, q, v)
    outputs = _layout("o", o, call.rank, call.heads_first) + _layout("lse", lse)
    tensors = _abi.HEAD + b"".join(inputs) + outputs + _abi.NO_GRADIENTS + extras
    with _abi.planned(False, tensors, call.options, call.plan_options):
        pass


class _Work(typing.NamedTuple):
    """What a call does; its extras are their names here."""

    call: _problem.Call
    backward: bool = False
    wanted: tuple[str, ...] = ()  # extras whose gradients are wanted
    has_d_lse: bool = False

    def encoded(self) -> str:
        call = self.call._replace(options=self.call.options.hex(), plan_options=self.call.plan_options.hex())
        return json.dumps([call, *self[1:]])


@functools.lru_cache(maxsize=256)
def _decoded(text: bytes) -> _Work:
    (options, plan_options, *rest, extras), backward, wanted, has_d_lse = json.loads(text)
    options, plan_options = bytes.fromhex(options), bytes.fromhex(plan_options)
    return _Work(_problem.Call(options, plan_options, *rest, tuple(extras)), backward, tuple(wanted), has_d_lse)


@functools.lru_cache(maxsize=1024)
def _row_major(name: str, shape: tuple, dtype: np.dtype, rank: int, heads_first: bool) -> bytes:
    """What follows the address in an abacist_tensor."""
    stride, strides = dtype.itemsize, []
    for extent in reversed(shape):
        strides.append(stride)
        stride *= max(extent, 1)
    return _numpy._layout(name, shape, tuple(strides[::-1]), dtype, rank, heads_first)


def _tensor(name: str, x: _xla.Operand, rank: int = 0, heads_first: bool = False) -> bytes:
    return x.address.to_bytes(8, "little") + _row_major(name, x.shape, x.dtype, rank, heads_first)


def _fill(x: _xla.Operand, value: float) -> None:
    size = math.prod(x.shape) * x.dtype.itemsize
    if value == 0:
        ctypes.memset(x.address, 0, size)
    else:
        ctypes.memmove(x.address, np.full(x.shape, value, x.dtype).tobytes(), size)


def _execute(work: _Work, inputs: list[_xla.Operand], results: list[_xla.Operand]) -> None:
    """Runs the work on memory. Rows of a varlen buffer that belong to no sequence are set here."""
    call = work.call
    dense = (call.rank, call.heads_first)
    head, extras = inputs[: 7 if work.backward else 3], inputs[7 if work.backward else 3 :]
    packed = {name: _tensor(name, x) for name, x in zip(call.extras, extras)}
    tensors = [_abi.HEAD, *(_tensor(*pair, *dense) for pair in zip(("q", "k", "v"), head))]
    if not work.backward:
        o, lse = results
        if call.varlen:
            _fill(o, 0)
            _fill(lse, -np.inf)
        tensors += [_tensor("o", o, *dense), _tensor("lse", lse), _abi.NO_GRADIENTS]
        run = _abi.forward
    else:
        o, lse, d_o, d_lse = head[3:]
        for x in results:
            _fill(x, 0)
        tensors += [_tensor("o", o, *dense), _tensor("lse", lse), _tensor("o", d_o, *dense)]
        tensors += [_tensor("lse", d_lse) if work.has_d_lse else _abi.ABSENT]
        tensors += [_tensor(*pair, *dense) for pair in zip(("q", "k", "v"), results)]
        packed |= {"d_" + name: _tensor("d_" + name, x) for name, x in zip(work.wanted, results[3:])}
        run = _abi.backward
    tensors.append(_abi.extras(packed))
    _abi.check(run(b"".join(tensors), call.options, call.plan_options, None))


def _on_host(work: _Work, shapes: tuple, *arrays: typing.Any) -> tuple:
    """The same as a callback, whose operands JAX has copied."""
    inputs = [np.ascontiguousarray(x) for x in arrays]
    results = [np.empty(x.shape, x.dtype) for x in shapes]
    described = [
        [_xla.Operand(x.__array_interface__["data"][0], x.dtype, x.shape) for x in group]
        for group in (inputs, results)
    ]
    _execute(work, *described)
    return tuple(results)


TARGET = "abacist_attention"
_in_place = _xla.serves()
if _in_place:
    _xla.register(TARGET, lambda text, inputs, results: _execute(_decoded(text), inputs, results))


def _call_out(work: _Work, shapes: tuple, arrays: tuple) -> typing.Any:
    """The work as an operation of JAX: a custom call, or a callback to Python with JAX's own means."""
    if _in_place:
        call = jax.ffi.ffi_call(TARGET, shapes, vmap_method="sequential")
        return call(*arrays, work=work.encoded())
    run = functools.partial(_on_host, work, shapes)
    return jax.pure_callback(run, shapes, *arrays, vmap_method="sequential")


# `call` is hashable here: its extras are their names, the arrays are an argument of their own.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _traced(call: _problem.Call, q, k, v, extras: tuple) -> tuple:
    return tuple(_call_out(_Work(call), _outputs(call, q, v), (q, k, v, *extras)))


def _traced_forward(call: _problem.Call, q, k, v, extras: tuple) -> tuple:
    for name, x in zip(call.extras, extras):
        if name == "alibi_slopes" and x.perturbed:
            raise NotImplementedError("alibi_slopes: requires a gradient, which is not computed")
    # Which gradients are wanted travels as the structure of a tree, for it is no array.
    wanted = {name: () for name, x in zip(call.extras, extras) if name in DIFFERENTIABLE and x.perturbed}
    q, k, v, *extras = (x.value for x in (q, k, v, *extras))
    o, lse = _traced(call, q, k, v, tuple(extras))
    return (o, lse), (q, k, v, o, lse, extras, wanted)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _gradients(call: _problem.Call, wanted: tuple, has_d_lse: bool, arrays: tuple) -> tuple:
    """dq, dk, dv, and the gradients of the extras in `wanted`."""
    given = dict(zip(call.extras, arrays[7:]))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[:3]]
    shapes += [jax.ShapeDtypeStruct(given[name].shape, jnp.float32) for name in wanted]
    return tuple(_call_out(_Work(call, True, wanted, has_d_lse), tuple(shapes), arrays))


@_gradients.defjvp
def _(*_: typing.Any) -> typing.NoReturn:
    raise NotImplementedError("q, k, v: gradients of gradients are not computed")


def _traced_backward(call: _problem.Call, saved: tuple, gradients: tuple) -> tuple:
    q, k, v, o, lse, extras, wanted = saved
    absent = [isinstance(x, jax.custom_derivatives.SymbolicZero) for x in gradients]
    d_o, d_lse = (jnp.zeros(x.shape, x.dtype) if none else x for x, none in zip(gradients, absent))
    names = tuple(wanted)
    dq, dk, dv, *rest = _gradients(call, names, not absent[1], (q, k, v, o, lse, d_o, d_lse, *extras))
    given = dict(zip(call.extras, extras))
    found = {name: x.astype(given[name].dtype) for name, x in zip(names, rest)}
    return dq, dk, dv, tuple(found.get(name) for name in call.extras)


_traced.defvjp(_traced_forward, _traced_backward, symbolic_zeros=True)


def attention(q, k, v, call: _problem.Call, return_lse: bool) -> typing.Any:
    arrays = (q, k, v, *call.extras.values())
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        _validate(q, k, v, call)
        names = call._replace(extras=tuple(call.extras))
        o, lse = _traced(names, q, k, v, tuple(call.extras.values()))
        return (o, lse) if return_lse else o
    names = ("q", "k", "v", *call.extras)
    for name, x in zip(names, arrays):
        _check(name, x)
    read = list(map(_on_this_host, names, arrays))
    held = call._replace(extras=dict(zip(call.extras, read[3:])))
    o, lse = _numpy.forward(*read[:3], held, return_lse, _empty)
    place = _place_of(q)
    o = jax.device_put(o, place)
    return (o, jax.device_put(lse, place)) if return_lse else o


def _place_of(q: jax.Array) -> typing.Any:
    """The device of q; None where that is the default one, or there are several."""
    devices = q.devices()
    return None if len(devices) > 1 or jax.devices()[0] in devices else next(iter(devices))


def random_seed() -> int:
    raise ValueError("seed: is missing, must be given for dropout: JAX has no global generator")
