"""torch.library operators, for torch.compile: eager calls go the shorter way of _torch.py."""

from __future__ import annotations

import typing

import torch

from . import _abi, _problem, _torch

EXTRAS = ("alibi_slopes", "cu_seqlens_q", "cu_seqlens_k", "key_lengths", "visible")
_REST = (
    ", ".join(f"Tensor? {name}" for name in EXTRAS)
    + ", bool causal, SymInt[]? window, float? scale, float softcap, str align, SymInt max_s_q,"
    " SymInt max_s_k, float dropout_p, int seed, bool heads_first, str? backend"
)


def _call(bias, sinks, rest: tuple) -> _problem.Call:
    """The call that the operator's arguments stand for. Windows: -1 is no bound; the seed is signed."""
    named = dict(zip(EXTRAS, rest), bias=bias, sinks=sinks)
    (causal, window, scale, softcap, align, max_s_q, max_s_k, dropout_p, seed, heads_first,
     backend) = rest[len(EXTRAS) :]  # fmt: skip
    if window is not None:
        window = tuple(None if bound == -1 else bound for bound in window)
    options = _abi.options(
        causal, window, scale, softcap, align, max_s_q, max_s_k, dropout_p, seed % 2**64
    )
    extras = {name: x for name, x in named.items() if x is not None}
    varlen = "cu_seqlens_q" in extras
    return _problem.Call(
        options, _abi.plan_options(backend), heads_first, varlen, 3 if varlen else 4, extras
    )


@torch.library.custom_op(
    "abacist::attention", mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sinks, {_REST}) -> (Tensor, Tensor)",
)  # fmt: skip
def forward(q, k, v, bias, sinks, *rest):
    return _torch._forward(q, k, v, _call(bias, sinks, rest), True)


@forward.register_fake
def _(q, k, v, bias, sinks, *rest):
    shape = tuple(q.shape)
    if not rest[-2]:
        shape = _problem.swap(shape)
    lse = q.new_empty(shape[:-1], dtype=_torch._lse_type(q))
    return q.new_empty((*q.shape[:-1], v.shape[-1])), lse


@torch.library.custom_op(
    "abacist::attention_backward", mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor d_o, Tensor d_lse,"
    f" bool need_bias, bool need_sinks, Tensor? bias, Tensor? sinks, {_REST})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)  # fmt: skip
def backward(q, k, v, o, lse, d_o, d_lse, need_bias, need_sinks, bias, sinks, *rest):
    wanted = ("bias",) * need_bias + ("sinks",) * need_sinks
    call = _call(bias, sinks, rest)
    dq, dk, dv, more = _torch._backward(call, (q, k, v, o, lse), d_o, d_lse, wanted)
    d_bias = more["d_bias"].to(bias.dtype) if need_bias else q.new_empty(0)
    return dq, dk, dv, d_bias, more["d_sinks"] if need_sinks else q.new_empty(0)


@backward.register_fake
def _(q, k, v, o, lse, d_o, d_lse, need_bias, need_sinks, bias, sinks, *rest):
    like = (q, k, v, bias if need_bias else q.new_empty(0), sinks if need_sinks else q.new_empty(0))
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in like)


def _setup(ctx, inputs, output):
    q, k, v, bias, sinks, *rest = inputs
    count = len(EXTRAS)
    ctx.save_for_backward(q, k, v, *output, bias, sinks, *rest[:count])
    ctx.numbers = rest[count:]


def _gradients(ctx, d_o, d_lse):
    q, k, v, o, lse, bias, sinks, *extras = ctx.saved_tensors
    need = ctx.needs_input_grad[3:5]
    dq, dk, dv, d_bias, d_sinks = torch.ops.abacist.attention_backward(
        q, k, v, o, lse, d_o, d_lse, *need, bias, sinks, *extras, *ctx.numbers
    )
    rest = (None,) * (len(extras) + len(ctx.numbers))
    return (dq, dk, dv, d_bias if need[0] else None, d_sinks if need[1] else None, *rest)


forward.register_autograd(_gradients, setup_context=_setup)


def check_tensors(**named: typing.Any) -> None:
    for name, x in named.items():
        if x is None:
            continue
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: is a {type(x).__name__}, must be a torch tensor as q is")
        _torch.check_strided(name, x)
        if x.is_nested:
            raise _torch.nested(name)


def check_options(
    causal, window, scale, softcap, align="bottom-right", max_s_q=0, max_s_k=0, dropout_p=0.0,
    backend=None,
) -> None:  # fmt: skip
    """As in eager mode; torch.compile has its own way with what is wrong, which names the argument of
    the operator. Symbolic sizes are right: what they stand for is checked when the operator runs."""
    if torch.compiler.is_dynamo_compiling():
        return

    def sizes(values) -> typing.Any:
        return tuple(0 if isinstance(x, torch.SymInt) else x for x in values)

    if isinstance(window, (tuple, list)):
        window = sizes(window)
    most = [_abi.integer(name, x, _abi.UNBOUNDED) for name, x in
            zip(("max_s_q", "max_s_k"), sizes((max_s_q, max_s_k)))]  # fmt: skip
    _abi.options(causal, window, scale, softcap, align, *most, _abi.real("dropout_p", dropout_p), 0)
    _abi.plan_options(backend)


def _drawn_seed() -> int:
    """As in eager mode, where nothing is recorded: there it would be a constant."""
    if not (torch.compiler.is_compiling() or torch.jit.is_tracing()):
        try:
            return _torch.random_seed()
        except RuntimeError:  # of tracers and fake tensors: a number that they do not know
            pass
    raise NotImplementedError(
        "seed: must be given for dropout under torch.compile (abacist.attention takes one)"
    )


def attention(q, k, v, return_lse: bool, heads_first: bool, **given: typing.Any) -> typing.Any:
    """What attention() is while torch.compile traces it."""
    check_tensors(q=q, k=k, v=v, bias=given["bias"], mask=given["mask"], sinks=given["sinks"],
                  **{name: given[name] for name in EXTRAS[:-1]})  # fmt: skip
    _abi.flag("deterministic", given["deterministic"])
    if torch.is_grad_enabled():
        _torch.refuse_slopes_gradient(given["alibi_slopes"])
    varlen = _problem.check_seqlens(*(given[name] for name in (
        "cu_seqlens_q", "cu_seqlens_k", "max_s_q", "max_s_k")))  # fmt: skip
    check_options(
        given["causal"], given["window"], given["scale"], given["softcap"], given["align"],
        given["max_s_q"] if varlen else 0, given["max_s_k"] if varlen else 0, given["dropout_p"],
        given["backend"],
    )  # fmt: skip
    window, seed = given["window"], given["seed"]
    if seed is None:
        seed = _drawn_seed() if given["dropout_p"] else 0
    elif not torch.compiler.is_dynamo_compiling():
        seed = _abi.integer("seed", seed, 2**64 - 1)
    if window is not None:
        if any(bound is not None and bound < 0 for bound in window):
            raise ValueError(f"window: is {window}, bounds must be at least 0, or None for unbounded")
        window = [-1 if bound is None else bound for bound in window]
    o, lse = torch.ops.abacist.attention(
        q, k, v, given["bias"], given["sinks"], given["alibi_slopes"], given["cu_seqlens_q"],
        given["cu_seqlens_k"], given["key_lengths"], given["mask"], given["causal"], window,
        given["scale"], float(given["softcap"]), given["align"],
        given["max_s_q"] if varlen else 0, given["max_s_k"] if varlen else 0,
        float(given["dropout_p"]), seed - 2**64 if seed >= 2**63 else seed, heads_first,
        given["backend"],
    )  # fmt: skip
    return (o, lse) if return_lse else o
