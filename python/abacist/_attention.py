"""attention() and plan(): the arguments, checked, and who runs them."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import sys
import typing

from . import _abi, _problem

Window = tuple[typing.Optional[int], typing.Optional[int]]
_arrays: dict[type, typing.Any] = {}
BOUNDS = frozenset((int, type(None)))


def _arrays_of(q: typing.Any) -> typing.Any:
    """The module that knows the kind of array that q is."""
    known = _arrays.get(type(q))
    if known is not None:
        return known
    # Who passes an array has imported its library: neither is imported for the other's sake.
    torch, numpy, jax = (sys.modules.get(name) for name in ("torch", "numpy", "jax"))
    if torch is not None and isinstance(q, torch.Tensor):
        from . import _ops  # noqa: F401: registers the operators
        from . import _torch as module
    elif numpy is not None and isinstance(q, numpy.ndarray):
        from . import _numpy as module
    elif jax is not None and isinstance(q, jax.Array):
        from . import _jax as module
    else:
        raise TypeError(
            f"q: is a {type(q).__name__}, must be a numpy array, a torch tensor or a JAX array"
        )
    _arrays[type(q)] = module
    return module


def is_watched(torch: typing.Any, *tensors: typing.Any) -> bool:
    """Whether a call has to be an operator of torch: somebody records what runs (torch.compile, export,
    jit.trace, make_fx, FakeTensorMode and other dispatch modes), or a tensor has its own dispatch. Also
    for other arrays if torch.compile is at work, which takes numpy's for tensors."""
    if not isinstance(tensors[0], torch.Tensor):
        return bool(torch.compiler.is_dynamo_compiling())
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack():
        return True
    plain = torch.Tensor
    for x in tensors:
        if type(x) is not plain and isinstance(x, plain):
            if torch._C._dispatch_keys(x).has(torch._C.DispatchKey.Python):
                return True
    return False


@functools.lru_cache(maxsize=256, typed=True)
def _settings(
    causal, window, scale, softcap, align, max_s_q, max_s_k, dropout_p, seed, layout, backend,
    deterministic, varlen,
) -> _problem.Call:  # fmt: skip
    """A call without arrays, from arguments of attention(), checked."""
    _abi.flag("deterministic", deterministic)
    if not isinstance(layout, str) or layout not in ("bshd", "bhsd"):
        raise ValueError(f'layout: is {_abi.shown(layout)}, must be "bshd" or "bhsd"')
    options = _abi.options(
        causal, window, scale, softcap, align, max_s_q, max_s_k, dropout_p, seed
    )
    heads_first = layout == "bhsd"
    return _problem.Call(
        options, _abi.plan_options(backend), heads_first, varlen, 3 if varlen else 4, {}
    )


def _call(
    arrays, causal, window, scale, softcap, alibi_slopes, bias, mask, sinks, dropout_p, seed,
    cu_seqlens_q, cu_seqlens_k, max_s_q, max_s_k, key_lengths, layout, align, backend, deterministic,
) -> _problem.Call:  # fmt: skip
    varlen = (
        cu_seqlens_q is not None or cu_seqlens_k is not None or max_s_q is not None
        or max_s_k is not None
    ) and _problem.check_seqlens(cu_seqlens_q, cu_seqlens_k, max_s_q, max_s_k)  # fmt: skip
    if type(window) is list:
        window = tuple(window)
    if type(dropout_p) is not float:
        dropout_p = _abi.real("dropout_p", dropout_p)
    if seed is not None:
        seed = _abi.integer("seed", seed, 2**64 - 1)
    else:
        seed = arrays.random_seed() if dropout_p else 0
    if varlen:
        max_s_q = _abi.integer("max_s_q", max_s_q, _abi.UNBOUNDED)
        max_s_k = _abi.integer("max_s_k", max_s_k, _abi.UNBOUNDED)
    else:
        max_s_q = max_s_k = 0
    given = (
        causal, window, scale, softcap, align, max_s_q, max_s_k, dropout_p, seed, layout, backend,
        deterministic, varlen,
    )  # fmt: skip
    # (1.0, None) is no window, but equal to one that may be in the cache.
    if window is None or (type(window) is tuple and BOUNDS.issuperset(map(type, window))):
        try:
            call = _settings(*given)
        except TypeError as reason:
            if "unhashable" not in str(reason):
                raise
            call = _settings.__wrapped__(*given)  # says which argument that is
    else:
        call = _settings.__wrapped__(*given)
    if not varlen and (
        alibi_slopes is None and bias is None and mask is None and sinks is None and key_lengths is None
    ):
        return call
    extras = {
        "alibi_slopes": alibi_slopes, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
        "sinks": sinks, "key_lengths": key_lengths, "bias": bias, "visible": mask,
    }  # fmt: skip
    return call._replace(extras={name: x for name, x in extras.items() if x is not None})


def attention(
    q: typing.Any,
    k: typing.Any,
    v: typing.Any,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: typing.Any = None,
    bias: typing.Any = None,
    mask: typing.Any = None,
    sinks: typing.Any = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    cu_seqlens_q: typing.Any = None,
    cu_seqlens_k: typing.Any = None,
    max_s_q: int | None = None,
    max_s_k: int | None = None,
    key_lengths: typing.Any = None,
    layout: str = "bshd",
    align: str = "bottom-right",
    return_lse: bool = False,
    backend: str | None = None,
    deterministic: bool = True,
) -> typing.Any:
    """Exact attention: ``o = softmax(scale * q k^T, over the visible keys) v``.

    The score matrix is never written. Arrays are read where they lie, with any strides. The GIL is
    released while it runs. For torch tensors and JAX arrays it is differentiable in q, k, v, bias and
    sinks, through o and through lse. CUDA tensors run on the current stream of their device.

    Parameters
    ----------
    q, k, v : numpy.ndarray, torch.Tensor or jax.Array
        ``[b, s_q, h_q, d_qk]``, ``[b, s_k, h_k, d_qk]`` and ``[b, s_k, h_k, d_v]``, of one type of
        float32, bfloat16 and float16 (``backend="reference"`` takes float64, too). ``h_k`` divides
        ``h_q``: query head h uses head ``h // (h_q // h_k)`` of k and v. With `cu_seqlens_q` they
        are ``[total, h, d]``. Numpy arrays of bfloat16 are those of the package ml_dtypes.
    causal : bool, default False
        Query i sees key j only if ``j <= i + shift``; see `align`.
    window : (left, right), optional
        Query i sees keys ``i + shift - left`` to ``i + shift + right``, both included; each an
        integer of at least 0, or None for unbounded. `causal` holds as well.
    scale : float, optional
        Factor of q k; default ``1 / sqrt(d_qk)``.
    softcap : float, default 0
        Scores become ``softcap * tanh(score / softcap)``; 0 for none.
    alibi_slopes : array, optional
        float32 ``[h_q]`` or ``[b, h_q]``: adds ``-slope * |i + shift - j|`` to a score.
    bias : array, optional
        ``[b|1, h_q|1, s_q|1, s_k]``, float32 or the type of q, added to the scores, not scaled;
        leading axes may be missing. -inf hides a key. These axes do not follow `layout`.
    mask : array, optional
        bool or uint8, shaped as `bias` can be: a query sees a key only where it is true.
    sinks : array, optional
        float32 ``[h_q]``: a logit per head whose exp joins the denominator.
    dropout_p : float, default 0
        Probability of dropping a weight; lse stays that without dropout.
    seed : int, optional
        Of the dropout, in ``[0, 2**64)``. By default one is drawn from the global generator of the
        arrays' library, so that ``torch.manual_seed`` or ``numpy.random.seed`` makes it repeatable;
        JAX, which has none, and ``torch.compile`` want it given.
    cu_seqlens_q, cu_seqlens_k : array, optional
        int32 ``[b + 1]``: sequence n has rows ``cu_seqlens[n]`` to ``cu_seqlens[n + 1]``. Rows of
        the buffer past the last are 0 in o, -inf in lse.
    max_s_q, max_s_k : int, optional
        Bounds of the lengths; required with, and only with, `cu_seqlens_q` and `cu_seqlens_k`.
    key_lengths : array, optional
        int32 ``[b]``: sequence n has so many of its s_k keys.
    layout : {"bshd", "bhsd"}, default "bshd"
        Order of the axes of q, k, v and o; with cu_seqlens ``[total, h, d]`` or ``[h, total, d]``.
    align : {"bottom-right", "top-left"}, default "bottom-right"
        ``shift`` is ``len_k - len_q`` (the last query stands at the last key) or 0.
    return_lse : bool, default False
        Return (o, lse).
    backend : {None, "cpu", "reference", "cuda"}, optional
        Force an implementation; an error if it cannot serve. The reference is float64 and O(N^2).
        By default the first that serves, see `plan`.
    deterministic : bool, default True
        Every backend is deterministic; False changes nothing.

    Returns
    -------
    o : array
        ``[b, s_q, h_q, d_v]`` in the layout and type of q. Rows that see no key are 0.
    lse : array, if `return_lse`
        float32 ``[b, h_q, s_q]``, varlen ``[h_q, total_q]``: natural logarithm of the denominator,
        -inf for rows that see no key (float64 for float64 arrays).

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        Each names the argument, what it was and what it must be. NotImplementedError: valid, but
        nothing here computes it.

    See Also
    --------
    plan : what would run, before anything runs.

    Notes
    -----
    The algorithm is FlashAttention-2's [1]_; what a result must be is written in docs/contract.md.

    References
    ----------
    .. [1] T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work
       Partitioning", 2023.

    Examples
    --------
    >>> import numpy as np, abacist
    >>> q = k = v = np.ones((1, 4, 2, 8), np.float32)
    >>> abacist.attention(q, k, v, causal=True).shape
    (1, 4, 2, 8)
    """
    if return_lse is not True and return_lse is not False:
        return_lse = _abi.flag("return_lse", return_lse)
    torch = sys.modules.get("torch")
    if torch is not None and is_watched(torch, q, k, v):
        # An operator goes into the graph. Before _arrays is looked at, whose state would be a guard.
        from . import _torch

        watched = _torch.compiled if isinstance(q, torch.Tensor) else _torch.uncompiled
        return watched(
            q, k, v, return_lse, layout, causal=causal, window=window, scale=scale,
            softcap=softcap, alibi_slopes=alibi_slopes, bias=bias, mask=mask, sinks=sinks,
            dropout_p=dropout_p, seed=seed, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            max_s_q=max_s_q, max_s_k=max_s_k, key_lengths=key_lengths, align=align,
            backend=backend, deterministic=deterministic,
        )  # fmt: skip
    arrays = _arrays_of(q)
    call = _call(
        arrays, causal, window, scale, softcap, alibi_slopes, bias, mask, sinks, dropout_p, seed,
        cu_seqlens_q, cu_seqlens_k, max_s_q, max_s_k, key_lengths, layout, align, backend,
        deterministic,
    )  # fmt: skip
    return arrays.attention(q, k, v, call, return_lse)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a call would do; see abacist_plan_info of the C API. ``print`` shows all of it."""

    kernel: str  #: e.g. "cpu.forward.avx512"
    rows: int  #: query rows of a tile
    keys: int  #: keys of a tile
    splits: int  #: parts that the keys of a row are cut into
    threads: int
    workspace_bytes: int
    visible_pairs: int  #: (query row, key) pairs that see each other, all heads
    flops: int
    slow_memory_bytes: int
    operand_bytes: int
    standard_memory_bytes: int  #: what attention that writes its scores would move
    deterministic: bool
    declined: tuple[str, ...]  #: "name: reason" of each implementation that was passed over
    text: str
    #: What abacist_plan_create was asked, for show().
    _request: tuple[bool, bytes, bytes, bytes] = dataclasses.field(repr=False, compare=False)
    _varlen: bool = dataclasses.field(repr=False)

    def __str__(self) -> str:
        return self.text

    def _repr_pretty_(self, printer: typing.Any, cycle: bool) -> None:
        printer.text(self.text)  # what a notebook shows


def _read_plan(request: tuple[bool, bytes, bytes, bytes], varlen: bool) -> Plan:
    library = _abi.library
    with _abi.planned(*request) as (handle, info):
        length = ctypes.c_size_t()
        library.abacist_plan_explain(handle, None, 0, ctypes.byref(length))
        text = ctypes.create_string_buffer(length.value + 1)
        _abi.check(library.abacist_plan_explain(handle, text, len(text), None))
        declined = tuple(
            library.abacist_plan_declined(handle, n).decode() for n in range(info.declined)
        )
        figures = {field.name: getattr(info, field.name, None) for field in dataclasses.fields(Plan)}
        figures |= {"kernel": info.kernel.decode(), "deterministic": bool(info.deterministic)}
    others = {"declined": declined, "text": text.value.decode(), "_request": request, "_varlen": varlen}
    return Plan(**(figures | others))


def plan(
    q: typing.Any,
    k: typing.Any,
    v: typing.Any,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: typing.Any = None,
    bias: typing.Any = None,
    mask: typing.Any = None,
    sinks: typing.Any = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    cu_seqlens_q: typing.Any = None,
    cu_seqlens_k: typing.Any = None,
    max_s_q: int | None = None,
    max_s_k: int | None = None,
    key_lengths: typing.Any = None,
    layout: str = "bshd",
    align: str = "bottom-right",
    return_lse: bool = False,
    backend: str | None = None,
    deterministic: bool = True,
    backward: bool = False,
) -> Plan:
    """What `attention` with these arguments would run, and why not another kernel. Nothing runs.

    Parameters
    ----------
    q, k, v, and the keywords of `attention`
        Only types, shapes and strides are looked at: torch's meta tensors serve.
    backward : bool, default False
        Plan the backward pass (gradients of q, k and v, of o's gradient) instead of the forward.

    Returns
    -------
    Plan
        Its fields are the figures, ``print(plan)`` shows them with the implementations that declined.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `attention`.

    Examples
    --------
    >>> import numpy as np, abacist
    >>> q = k = v = np.ones((1, 4096, 8, 64), np.float32)
    >>> abacist.plan(q, k, v, causal=True).visible_pairs
    67125248
    """
    return_lse, backward = _abi.flag("return_lse", return_lse), _abi.flag("backward", backward)
    arrays = _arrays_of(q)
    call = _call(
        arrays, causal, window, scale, softcap, alibi_slopes, bias, mask, sinks, dropout_p,
        0 if seed is None else seed, cu_seqlens_q, cu_seqlens_k, max_s_q, max_s_k, key_lengths,
        layout, align, backend, deterministic,
    )  # fmt: skip
    inputs, q_shape, code, d_v, extras, device = arrays.plan_operands(q, k, v, call)
    shape = _problem.swap(q_shape) if call.heads_first else q_shape
    o = _problem.contiguous(code, (*shape[:-1], d_v), device)
    lse_code = _abi.F64 if code == _abi.F64 else _abi.F32
    lse = _problem.contiguous(lse_code, _problem.lse_shape(call, q_shape), device)
    if backward:
        gradients = (o, _abi.ABSENT, *inputs)
        tensors = _abi.HEAD + b"".join([*inputs, o, lse, *gradients]) + extras
    else:
        outputs = o + (lse if return_lse else _abi.ABSENT)
        tensors = _abi.HEAD + b"".join(inputs) + outputs + _abi.NO_GRADIENTS + extras
    return _read_plan((backward, tensors, call.options, call.plan_options), call.varlen)
