"""attention() for torch tensors, with autograd. No symbol of libtorch is linked."""

from __future__ import annotations

import typing

import torch
from torch.autograd import forward_ad

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
PACK, HOST, STRIDED, CONTIGUOUS = _abi.PACK, _abi.HOST, torch.strided, torch.contiguous_format
CPU = torch.device("cpu")


def nested(name: str) -> TypeError:
    return TypeError(f"{name}: is a nested tensor, must be a plain one (cu_seqlens packs sequences)")


def check_strided(name: str, x: torch.Tensor) -> None:
    if x.layout is not torch.strided:
        raise TypeError(f"{name}: has layout {x.layout}, must be torch.strided")


def _no_memory(name: str, x: torch.Tensor) -> Exception:
    if x.is_nested:
        return nested(name)
    return NotImplementedError(
        f"{name}: has no memory of its own (vmap and other transforms are not supported)"
    )


def place_of(name: str, x: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Address, shape and strides."""
    try:
        address, shape, stride = x.data_ptr(), x.shape, x.stride()
    except RuntimeError as reason:
        raise _no_memory(name, x) from reason
    if not address:
        _check_memory(name, x)
    return address, shape, stride


def _check_memory(name: str, x: torch.Tensor) -> None:
    if x.numel() and not x.is_meta:  # of a transform, or a tensor around another
        raise _no_memory(name, x)


def _check(name: str, x: typing.Any, types: dict, device: torch.device | None = None) -> int:
    """The type code of a tensor that the library can read where it lies."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: is a {type(x).__name__}, must be a torch tensor as q is")
    code = types.get(x.dtype)
    if code is None:
        raise TypeError(f"{name}: has type {x.dtype}, must be {' or '.join(map(str, types))}")
    if x.device != (device or CPU):
        raise ValueError(f"{name}: is on {x.device}, must be on {device or CPU} as q is")
    check_strided(name, x)
    if x.is_neg():
        raise NotImplementedError(f"{name}: is a lazy negation, call resolve_neg() first")
    if x.dim() > _abi.MAX_RANK:
        raise ValueError(f"{name}: has {x.dim()} axes, must have at most {_abi.MAX_RANK}")
    return code


def _device(q: torch.Tensor) -> torch.device | None:
    """Where a call runs; None: on the host."""
    if q.is_cpu:
        return None
    if q.device.type not in ("cuda", "meta"):
        raise NotImplementedError(f"q: is on {q.device}, must be on the CPU or a CUDA device")
    return q.device


def _place(device: torch.device | None) -> tuple[int, int]:
    """Type and index of a device in the C API, for which meta tensors are the host's."""
    if device is None or device.type != "cuda":
        return _abi.HOST
    return (_abi.CUDA, device.index)


def _operand(
    name: str, x: torch.Tensor, rank: int, heads_first: bool, device: torch.device | None
) -> bytes:
    # These few attributes are most of what a small call costs: the quick way first.
    code, place = FLOATS.get(x.dtype), HOST
    if device is not None or code is None or not x.is_cpu or x.layout is not STRIDED or x.is_neg():
        code, place = _check(name, x, FLOATS, device), _place(device)
    try:  # place_of(), without a call
        address, shape, stride = x.data_ptr(), x.shape, x.stride()
    except RuntimeError as reason:
        raise _no_memory(name, x) from reason
    if not address:
        _check_memory(name, x)
    if len(shape) != rank:
        _problem.check_rank(name, shape, rank, heads_first)
    if heads_first:
        shape, stride = _problem.swap(shape), _problem.swap(stride)
    return PACK[rank](address, code, rank, *place, *shape, *stride)


def _new_output(q: torch.Tensor, v: torch.Tensor, call: _problem.Call) -> torch.Tensor:
    # Rows of a varlen buffer past cu_seqlens_q[-1] belong to no sequence: the library leaves them.
    d_v = v.size(-1)
    if call.varlen:
        return q.new_zeros((*q.shape[:-1], d_v))
    if d_v == q.size(-1):
        return torch.empty_like(q, memory_format=CONTIGUOUS)
    return q.new_empty((*q.shape[:-1], d_v))


def _plain(x: torch.Tensor, device: torch.device | None) -> bytes:
    place = HOST if device is None else _place(device)
    return _abi.tensor(x.data_ptr(), FLOATS[x.dtype], x.shape, x.stride(), place)


def _extras(
    extras: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor], device: torch.device | None
) -> bytes:
    if not extras:
        return _abi.NO_EXTRAS
    packed, place = {}, _place(device)
    for name, x in extras.items():
        shown = _abi.ARGUMENTS.get(name, name)
        code = _check(shown, x, TYPES[name], device)
        address, shape, stride = place_of(shown, x)
        if name in ("bias", "visible"):
            shape, stride = _problem.padded(shown, shape, stride)
        packed[name] = _abi.tensor(address, code, shape, stride, place)
    for name, x in gradients.items():
        shape, stride = x.shape, x.stride()
        if name == "d_bias":
            shape, stride = _problem.padded(name, shape, stride)
        packed[name] = _abi.tensor(x.data_ptr(), _abi.F32, shape, stride, place)
    return _abi.extras(packed)


def _inputs(q, k, v, call: _problem.Call, device: torch.device | None) -> bytes:
    rank, heads_first = call.rank, call.heads_first
    return (
        _operand("q", q, rank, heads_first, device)
        + _operand("k", k, rank, heads_first, device)
        + _operand("v", v, rank, heads_first, device)
    )


def _workspace(bytes_: int, device: torch.device) -> torch.Tensor:
    """Of torch's allocator, which aligns to 512 bytes, for the current stream of the device."""
    return torch.empty(bytes_, dtype=torch.uint8, device=device)


def _run_on_gpu(backward: bool, tensors: bytes, call: _problem.Call, device: torch.device) -> None:
    """Enqueues on the caller's stream.

    Everything that this package allocates there is allocated for that stream, so that what is freed
    here is used again behind the run: no record_stream is needed, and no wait.
    """
    stream = torch.cuda.current_stream(device)
    with _abi.planned(backward, tensors, call.options, call.plan_options) as (plan, info):
        workspace = _workspace(info.workspace_bytes, device)
        run = _abi.RUN_OPTIONS.pack(
            _abi.RUN_OPTIONS.size, workspace.data_ptr(), info.workspace_bytes, stream.cuda_stream, 0, 0
        )
        _abi.check(_abi.library.abacist_plan_run(plan, tensors, run))


def _run(backward: bool, tensors: bytes, call: _problem.Call, device: torch.device | None) -> None:
    if device is None:
        run = _abi.backward if backward else _abi.forward
        status = run(tensors, call.options, call.plan_options, None)
        if status:
            raise _abi.error(status)
    elif device.type == "meta":
        _abi.check(_abi.library.abacist_validate(int(backward), tensors, call.options))
    else:
        _run_on_gpu(backward, tensors, call, device)


def _lse_type(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype is torch.float64 else torch.float32


def _forward(q, k, v, call: _problem.Call, with_lse: bool) -> tuple:
    device = None if q.is_cpu else _device(q)
    inputs = _inputs(q, k, v, call, device)
    o = _new_output(q, v, call)
    packed_o = _operand("o", o, call.rank, True, device) if call.heads_first else _plain(o, device)
    lse, packed_lse = None, _abi.ABSENT
    if with_lse:
        lse = q.new_empty(_problem.lse_shape(call, q.shape), dtype=_lse_type(q))
        if call.varlen:
            lse.fill_(-torch.inf)
        packed_lse = _plain(lse, device)
    extras = _extras(call.extras, {}, device)
    if call.extras or k.dtype is not q.dtype or v.dtype is not q.dtype:
        _problem.check_types(q, k, v, call, torch.float32)
    tensors = b"".join((_abi.HEAD, inputs, packed_o, packed_lse, _abi.NO_GRADIENTS, extras))
    _run(False, tensors, call, device)
    return o, lse


def _backward(call: _problem.Call, saved: tuple, d_o, d_lse, wanted: tuple) -> tuple:
    """dq, dk, dv, and the gradients of the extras in `wanted`."""
    q, k, v, o, lse = saved
    device = _device(q)
    if d_o is None:
        d_o = torch.zeros_like(o)
    zeroed = torch.zeros_like if call.varlen else torch.empty_like
    grads = [zeroed(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    extra_grads = {
        "d_" + name: torch.zeros_like(call.extras[name], dtype=torch.float32,
                                      memory_format=torch.contiguous_format)
        for name in wanted
    }  # fmt: skip
    dense = (call.rank, call.heads_first, device)
    tensors = (
        _abi.HEAD
        + _inputs(q, k, v, call, device)
        + _operand("o", o, *dense)
        + _plain(lse, device)
        + _operand("gradient of o", d_o, *dense)
        + (_abi.ABSENT if d_lse is None else _plain(d_lse, device))
        + b"".join([_operand("gradient", x, *dense) for x in grads])
        + _extras(call.extras, extra_grads, device)
    )
    _run(True, tensors, call, device)
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
        if call.extras:
            ctx.save_for_backward(q, k, v, o, lse, *call.extras.values())
            ctx.call = call._replace(extras=tuple(call.extras))
        else:
            ctx.save_for_backward(q, k, v, o, lse)
            ctx.call = call
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, d_o, d_lse):
        if not torch.is_grad_enabled():
            return _gradients(ctx, d_o, d_lse)
        with torch.no_grad():  # create_graph
            found = _gradients(ctx, d_o, d_lse)
        present = [x for x in found if x is not None]
        # Functions of the inputs, not of d_o alone (as once_differentiable has it): else they would be
        # constants to whoever differentiates again, who would get a wrong result for an error.
        inputs = [x for x in (*ctx.saved_tensors, d_o, d_lse) if x is not None]
        kept = iter(_Once.apply(len(present), *present, *inputs) if present else ())
        return tuple(None if x is None else next(kept) for x in found)


class _Once(torch.autograd.Function):
    """The first `count` tensors as functions of all, whose derivatives are refused when asked for."""

    @staticmethod
    def forward(ctx, count, *tensors):
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError("q, k, v: gradients of gradients are not computed")


def _needs_grad(q, k, v, extras: dict[str, torch.Tensor]) -> bool:
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return True
    return bool(extras) and any(isinstance(x, torch.Tensor) and x.requires_grad for x in extras.values())


def _autocast(q, k, v) -> tuple:
    """As torch's own attention: float32 and the half types become autocast's type."""
    place = "cpu" if q.is_cpu else q.device.type
    if place == "meta" or not torch.is_autocast_enabled(place):
        return q, k, v
    kind = torch.get_autocast_dtype(place)
    return tuple(x.to(kind) if x.is_floating_point() and x.dtype is not torch.float64 else x
                 for x in (q, k, v))  # fmt: skip


def _refuse_tangents(inputs: dict[str, typing.Any]) -> None:
    for name, x in inputs.items():
        if isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(f"{name}: has a tangent, forward derivatives are not supported")


def refuse_slopes_gradient(slopes: typing.Any) -> None:
    if isinstance(slopes, torch.Tensor) and slopes.requires_grad:
        raise NotImplementedError("alibi_slopes: requires a gradient, which is not computed")


def _refuse_others(k: typing.Any, v: typing.Any) -> None:
    for name, x in (("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: is a {type(x).__name__}, must be a torch tensor as q is")


def attention(q, k, v, call: _problem.Call, return_lse: bool) -> typing.Any:
    if not (isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        _refuse_others(k, v)
    if not q.is_cpu or torch.is_autocast_enabled("cpu"):
        q, k, v = _autocast(q, k, v)
    if forward_ad._current_level >= 0:
        _refuse_tangents({"q": q, "k": k, "v": v, **call.extras})
    if torch.is_grad_enabled() and _needs_grad(q, k, v, call.extras):
        extras, bias, sinks = call.extras, None, None
        if extras:
            refuse_slopes_gradient(extras.get("alibi_slopes"))
            bias, sinks = extras.get("bias"), extras.get("sinks")
        try:
            o, lse = _Attention.apply(call, q, k, v, bias, sinks)
        except RuntimeError as reason:
            if "functorch transforms" not in str(reason):
                raise
            raise NotImplementedError(
                "q, k, v: are of a transform of torch.func, which is not supported"
            ) from reason
    else:
        o, lse = _forward(q, k, v, call, return_lse)
    return (o, lse) if return_lse else o


def compiled(q, k, v, return_lse: bool, layout: str, **given: typing.Any) -> typing.Any:
    """attention() while torch.compile traces it: one operator in the graph."""
    from . import _ops

    if not isinstance(layout, str) or layout not in ("bshd", "bhsd"):
        raise ValueError(f'layout: is {_abi.shown(layout)}, must be "bshd" or "bhsd"')
    _refuse_others(k, v)
    q, k, v = _autocast(q, k, v)
    return _ops.attention(q, k, v, return_lse, layout == "bhsd", **given)


@torch.compiler.disable
def uncompiled(q, k, v, return_lse: bool, layout: str, **given: typing.Any) -> typing.Any:
    """attention() on arrays that are no tensors, between the graphs of torch.compile."""
    from ._attention import attention

    return attention(q, k, v, return_lse=return_lse, layout=layout, **given)


def random_seed() -> int:
    """From torch's default generator, so that torch.manual_seed makes a run repeatable."""
    return int(torch.randint(0, 2**63 - 1, (), device="cpu"))


def plan_operands(q, k, v, call: _problem.Call) -> tuple:
    """q, k and v as bytes, the shape and type code of q, d_v, the extras, and the device."""
    _refuse_others(k, v)
    device = _device(q)
    inputs = tuple(
        _operand(name, x, call.rank, call.heads_first, device)
        for name, x in (("q", q), ("k", k), ("v", v))
    )
    extras = _extras(call.extras, {}, device)
    _problem.check_types(q, k, v, call, torch.float32)
    return inputs, tuple(q.shape), FLOATS[q.dtype], v.shape[-1], extras, _place(device)
