"""attention() for JAX arrays on the CPU: read in place, under jit by a callback, with gradients."""

from __future__ import annotations

import functools
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np

from . import _abi, _numpy, _problem

if jax.__version_info__ < (0, 4, 34):
    raise NotImplementedError(f"jax: is version {jax.__version__}, must be 0.4.34 or newer")

DIFFERENTIABLE = ("bias", "sinks")
ALIGNMENT = 64  # of memory that XLA takes as it is


def _check(name: str, x: typing.Any) -> None:
    shown = _abi.ARGUMENTS.get(name, name)
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise TypeError(f"{shown}: is a {type(x).__name__}, must be a JAX array as q is")
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
    dtype, stride, strides = np.dtype(x.dtype), np.dtype(x.dtype).itemsize, []
    for extent in reversed(x.shape):
        strides.append(stride)
        stride *= max(extent, 1)
    layout = _numpy._layout(name, tuple(x.shape), tuple(strides[::-1]), dtype, rank, heads_first)
    return bytes(8) + layout


def plan_operands(q: typing.Any, k: typing.Any, v: typing.Any, call: _problem.Call) -> tuple:
    """q, k and v as bytes, the shape and type code of q, d_v, the extras, and the device."""
    arrays = {"q": q, "k": k, "v": v}
    for name, x in (arrays | call.extras).items():
        _check(name, x)
    inputs = tuple(_layout(*pair, call.rank, call.heads_first) for pair in arrays.items())
    extras = _abi.extras({name: _layout(name, x) for name, x in call.extras.items()})
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


def _with_arrays(call: _problem.Call, extras: typing.Iterable[typing.Any]) -> _problem.Call:
    return call._replace(extras=dict(zip(call.extras, map(np.asarray, extras))))


def _run_forward(call: _problem.Call, q, k, v, *extras) -> tuple:
    q, k, v = map(np.asarray, (q, k, v))
    return _numpy.forward(q, k, v, _with_arrays(call, extras), True)


def _run_backward(call: _problem.Call, wanted: tuple, has_d_lse: bool, *arrays) -> tuple:
    q, k, v, o, lse, d_o, d_lse, *extras = map(np.asarray, arrays)
    call = _with_arrays(call, extras)
    gradients = [np.zeros(x.shape, x.dtype) for x in (q, k, v)]
    more = {name: np.zeros(call.extras[name].shape, np.float32) for name in wanted}
    dense = (call.rank, call.heads_first)
    packed = _numpy.packed_extras(call)
    packed |= {"d_" + name: _numpy._operand("d_" + name, x) for name, x in more.items()}
    tensors = b"".join([
        _abi.HEAD, _numpy._inputs(q, k, v, call), _numpy._operand("o", o, *dense),
        _numpy._operand("lse", lse), _numpy._operand("o", d_o, *dense),
        _numpy._operand("lse", d_lse) if has_d_lse else _abi.ABSENT,
        *(_numpy._operand(*pair, *dense) for pair in zip("qkv", gradients)), _abi.extras(packed),
    ])  # fmt: skip
    _abi.check(_abi.backward(tensors, call.options, call.plan_options, None))
    return (*gradients, *more.values())


# `call` is hashable here: its extras are their names, the arrays are an argument of their own.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _traced(call: _problem.Call, q, k, v, extras: tuple) -> tuple:
    return jax.pure_callback(
        functools.partial(_run_forward, call), _outputs(call, q, v), q, k, v, *extras,
        vmap_method="sequential",
    )  # fmt: skip


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
    run = functools.partial(_run_backward, call, wanted, has_d_lse)
    return jax.pure_callback(run, tuple(shapes), *arrays, vmap_method="sequential")


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
    for name, x in zip(("q", "k", "v", *call.extras), arrays):
        _check(name, x)
    held = _with_arrays(call, call.extras.values()) if call.extras else call
    o, lse = _numpy.forward(*map(np.asarray, arrays[:3]), held, return_lse, _empty)
    return tuple(map(jax.device_put, (o, lse))) if return_lse else jax.device_put(o)


def random_seed() -> int:
    raise ValueError("seed: is missing, must be given for dropout: JAX has no global generator")
