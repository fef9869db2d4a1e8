"""attention() for torch tensors on the CPU, with autograd. No symbol of libtorch is linked."""

from __future__ import annotations

import typing

import torch

from . import _abi, _problem

if not hasattr(torch.library, "custom_op"):
    raise NotImplementedError(f"torch: is version {torch.__version__}, must be 2.4 or newer")

FLOATS = {
    torch.float32: _abi.F32,
    torch.bfloat16: _abi.BF16,
    torch.float16: _abi.F16,
    torch.float64: _abi.F64,
}
F32_ONLY = {torch.float32: _abi.F32}
I32_ONLY = {torch.int32: _abi.I32}
TYPES = {
    "alibi_slopes": F32_ONLY, "sinks": F32_ONLY, "cu_seqlens_q": I32_ONLY, "cu_seqlens_k": I32_ONLY,
    "key_lengths": I32_ONLY, "bias": FLOATS, "visible": {torch.bool: _abi.U8, torch.uint8: _abi.U8},
}  # fmt: skip
DIFFERENTIABLE = ("bias", "sinks")
PACK, STRIDED, CONTIGUOUS = _abi.PACK, torch.strided, torch.contiguous_format


def _no_memory(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name}: has no memory of its own (vmap and other transforms are not supported)"
    )


def _check(name: str, x: typing.Any, types: dict, meta: bool = False) -> int:
    """The type code of a tensor that the library can read where it lies."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: is a {type(x).__name__}, must be a torch tensor as q is")
    code = types.get(x.dtype)
    if code is None:
        raise TypeError(f"{name}: has type {x.dtype}, must be {' or '.join(map(str, types))}")
    if x.device.type != "cpu" and not (meta and x.device.type == "meta"):
        raise NotImplementedError(f"{name}: is on {x.device}, this package computes on the CPU")
    if x.layout is not torch.strided:
        raise TypeError(f"{name}: has layout {x.layout}, must be torch.strided")
    if x.is_neg():
        raise NotImplementedError(f"{name}: is a lazy negation, call resolve_neg() first")
    if x.dim() > _abi.MAX_RANK:
        raise ValueError(f"{name}: has {x.dim()} axes, must have at most {_abi.MAX_RANK}")
    return code


def _operand(name: str, x: torch.Tensor, call: _problem.Call) -> bytes:
    # These few attributes are most of what a small call costs: the quick way first.
    code = FLOATS.get(x.dtype)
    if code is None or not x.is_cpu or x.layout is not STRIDED or x.is_neg():
        code = _check(name, x, FLOATS)
    shape, stride, rank = x.shape, x.stride(), call.rank
    if len(shape) != rank:
        _problem.check_rank(name, shape, rank, call.heads_first)
    if call.heads_first:
        shape, stride = _problem.swap(shape), _problem.swap(stride)
    try:
        return PACK[rank](x.data_ptr(), code, rank, 0, 0, *shape, *stride)
    except RuntimeError as reason:
        raise _no_memory(name) from reason


def _new_output(q: torch.Tensor, v: torch.Tensor, call: _problem.Call) -> torch.Tensor:
    # Rows of a varlen buffer past cu_seqlens_q[-1] belong to no sequence: the library leaves them.
    d_v = v.size(-1)
    if call.varlen:
        return q.new_zeros((*q.shape[:-1], d_v))
    if d_v == q.size(-1):
        return torch.empty_like(q, memory_format=CONTIGUOUS)
    return q.new_empty((*q.shape[:-1], d_v))


def _plain(x: torch.Tensor) -> bytes:
    return _abi.tensor(x.data_ptr(), FLOATS[x.dtype], x.shape, x.stride())


def _extras(extras: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor], meta=False) -> bytes:
    if not extras:
        return _abi.NO_EXTRAS
    packed = {}
    for name, x in extras.items():
        shown = _abi.ARGUMENTS.get(name, name)
        code = _check(shown, x, TYPES[name], meta)
        shape, stride = x.shape, x.stride()
        if name in ("bias", "visible"):
            shape, stride = _problem.padded(shown, shape, stride)
        try:
            packed[name] = _abi.tensor(x.data_ptr(), code, shape, stride)
        except RuntimeError as reason:
            raise _no_memory(shown) from reason
    for name, x in gradients.items():
        shape, stride = x.shape, x.stride()
        if name == "d_bias":
            shape, stride = _problem.padded(name, shape, stride)
        packed[name] = _abi.tensor(x.data_ptr(), _abi.F32, shape, stride)
    return _abi.extras(packed)


def _inputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: _problem.Call) -> bytes:
    return _operand("q", q, call) + _operand("k", k, call) + _operand("v", v, call)


def _lse_type(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype is torch.float64 else torch.float32


def _forward(q, k, v, call: _problem.Call, with_lse: bool) -> tuple:
    inputs = _inputs(q, k, v, call)
    o = _new_output(q, v, call)
    packed_o = _operand("o", o, call) if call.heads_first else _plain(o)
    lse, packed_lse = None, _abi.ABSENT
    if with_lse:
        lse = q.new_empty(_problem.lse_shape(call, q.shape), dtype=_lse_type(q))
        if call.varlen:
            lse.fill_(-torch.inf)
        packed_lse = _plain(lse)
    extras = _extras(call.extras, {})
    tensors = b"".join((_abi.HEAD, inputs, packed_o, packed_lse, _abi.NO_GRADIENTS, extras))
    status = _abi.forward(tensors, call.options, call.plan_options, None)
    if status:
        raise _abi.error(status)
    return o, lse


def _backward(call: _problem.Call, saved: tuple, d_o, d_lse, wanted: tuple) -> tuple:
    """dq, dk, dv, and the gradients of the extras in `wanted`."""
    q, k, v, o, lse = saved
    if d_o is None:
        d_o = torch.zeros_like(o)
    zeroed = torch.zeros_like if call.varlen else torch.empty_like
    grads = [zeroed(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    extra_grads = {
        "d_" + name: torch.zeros_like(call.extras[name], dtype=torch.float32,
                                      memory_format=torch.contiguous_format)
        for name in wanted
    }  # fmt: skip
    tensors = (
        _abi.HEAD
        + _inputs(q, k, v, call)
        + _operand("o", o, call)
        + _plain(lse)
        + _operand("gradient of o", d_o, call)
        + (_abi.ABSENT if d_lse is None else _plain(d_lse))
        + b"".join([_operand("gradient", x, call) for x in grads])
        + _extras(call.extras, extra_grads)
    )
    status = _abi.backward(tensors, call.options, call.plan_options, None)
    if status:
        raise _abi.error(status)
    return (*grads, extra_grads)


def _gradients(ctx, d_o, d_lse) -> tuple:
    if d_o is None and d_lse is None:
        return (None,) * 6
    q, k, v, o, lse, *extras = ctx.saved_tensors
    call, wanted, found = ctx.call, (), [None, None]
    if extras:
        call = call._replace(extras=dict(zip(call.extras, extras)))
        needs = zip(DIFFERENTIABLE, ctx.needs_input_grad[4:])
        wanted = tuple(name for name, need in needs if need)
    dq, dk, dv, rest = _backward(call, (q, k, v, o, lse), d_o, d_lse, wanted)
    if rest:
        found = [rest.get("d_" + name) for name in DIFFERENTIABLE]
        if found[0] is not None:
            found[0] = found[0].to(call.extras["bias"].dtype)
    return (None, dq, dk, dv, *found)


class _Attention(torch.autograd.Function):
    """Inputs: the call, q, k, v, bias and sinks (those two are also among the call's extras)."""

    @staticmethod
    def forward(ctx, call, q, k, v, bias, sinks):
        o, lse = _forward(q, k, v, call, True)
        # All of them through save_for_backward, so that torch notices a change in place.
        ctx.save_for_backward(q, k, v, o, lse, *call.extras.values())
        ctx.call = call._replace(extras=tuple(call.extras)) if call.extras else call
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, d_o, d_lse):
        # With create_graph: gradients of gradients are refused when somebody asks for them.
        return (_once if torch.is_grad_enabled() else _gradients)(ctx, d_o, d_lse)


_once = torch.autograd.function.once_differentiable(_gradients)


def _needs_grad(q, k, v, extras: dict[str, torch.Tensor]) -> bool:
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return True
    return bool(extras) and any(isinstance(x, torch.Tensor) and x.requires_grad for x in extras.values())


def _autocast(q, k, v) -> tuple:
    """As torch's own attention: float32 and the half types become autocast's type."""
    kind = torch.get_autocast_dtype("cpu")
    return tuple(x.to(kind) if x.is_floating_point() and x.dtype is not torch.float64 else x
                 for x in (q, k, v))  # fmt: skip


def attention(q, k, v, call: _problem.Call, return_lse: bool) -> typing.Any:
    if not (isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        name, x = ("v", v) if isinstance(k, torch.Tensor) else ("k", k)
        raise TypeError(f"{name}: is a {type(x).__name__}, must be a torch tensor as q is")
    if torch.is_autocast_enabled("cpu"):
        q, k, v = _autocast(q, k, v)
    if torch.is_grad_enabled() and _needs_grad(q, k, v, call.extras):
        slopes = call.extras.get("alibi_slopes")
        if slopes is not None and slopes.requires_grad:
            raise NotImplementedError("alibi_slopes: requires a gradient, which is not computed")
        o, lse = _Attention.apply(
            call, q, k, v, call.extras.get("bias"), call.extras.get("sinks")
        )
    else:
        o, lse = _forward(q, k, v, call, return_lse)
    return (o, lse) if return_lse else o


compiling = torch.compiler.is_compiling


def compiled(q, k, v, return_lse: bool, layout: str, **given: typing.Any) -> typing.Any:
    """attention() while torch.compile traces it: one operator in the graph."""
    from . import _ops

    if layout not in ("bshd", "bhsd"):
        raise ValueError(f'layout: is {layout!r}, must be "bshd" or "bhsd"')
    if torch.is_autocast_enabled("cpu"):
        q, k, v = _autocast(q, k, v)
    return _ops.attention(q, k, v, return_lse, layout == "bhsd", **given)


def random_seed() -> int:
    """From torch's default generator, so that torch.manual_seed makes a run repeatable."""
    return int(torch.randint(0, 2**63 - 1, ()))


def _meta_operand(name: str, x: torch.Tensor, call: _problem.Call) -> bytes:
    code = _check(name, x, FLOATS, meta=True)
    _problem.check_rank(name, x.shape, call.rank, call.heads_first)
    shape, stride = x.shape, x.stride()
    if call.heads_first:
        shape, stride = _problem.swap(shape), _problem.swap(stride)
    return _abi.tensor(0, code, shape, stride)


def plan_operands(q, k, v, call: _problem.Call) -> tuple:
    """q, k and v as bytes, the shape and type code of q, d_v, and the extras. Meta tensors serve."""
    inputs = tuple(
        _meta_operand(name, x, call) for name, x in (("q", q), ("k", k), ("v", v))
    )
    extras = _extras(call.extras, {}, meta=True)
    return inputs, tuple(q.shape), FLOATS[q.dtype], v.shape[-1], extras
