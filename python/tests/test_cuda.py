"""CUDA tensors of torch against the float64 reference on the host: values, streams, refusals."""

import cases
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed")

import abacist  # noqa: E402

there = torch.cuda.is_available() and abacist.has_backend("cuda")
on_gpu = pytest.mark.skipif(not there, reason="no CUDA device here, or libabacist built without ABACIST_CUDA")


def tensors(seed, b, s_q, s_k, h_q, h_k, d, dtype=torch.bfloat16):
    torch.manual_seed(seed)
    shapes = (b, s_q, h_q, d), (b, s_k, h_k, d), (b, s_k, h_k, d)
    return [torch.randn(shape, dtype=dtype, device="cuda") for shape in shapes]


def check(found, q, k, v, **options):
    on_host = {n: x.cpu() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    o, lse = abacist.attention(*(x.double().cpu() for x in (q, k, v)), **on_host, backend="reference",
                               return_lse=True)  # fmt: skip
    assert found[0].device == q.device and found[0].dtype is q.dtype
    close = {torch.bfloat16: 2e-2, torch.float16: 2e-3}[q.dtype] * (1 + float(o.abs().max()))
    torch.testing.assert_close(found[0].cpu().double(), o, rtol=0, atol=close)
    torch.testing.assert_close(found[1].cpu().double(), lse, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_random_calls_are_right_or_refused_with_the_reason(device, name, data):
    dtype = getattr(torch, name)
    case = data.draw(cases.cases(
        round_to=lambda x: torch.from_numpy(x).to(dtype).double().numpy(),
        head_dims=st.sampled_from([8, 16, 64]) if device == "cuda" else st.integers(1, 20)))  # fmt: skip
    q, k, v = (torch.from_numpy(x).to(dtype).to(device) for x in case.arrays.values())
    if case.heads_first:
        q, k, v = (x.transpose(-2, -3).contiguous() for x in (q, k, v))
    options = {n: torch.from_numpy(x).to(device) if isinstance(x, np.ndarray) else x for n, x in case.options.items()}
    try:
        o, lse = abacist.attention(q, k, v, **options, layout=case.layout, return_lse=True)
    except NotImplementedError as reason:
        assert device == "cuda" and str(reason)
        return
    o = o.transpose(-2, -3) if case.heads_first else o
    o_expected, lse_expected = case.expected()
    close = {"bfloat16": 2e-2, "float16": 2e-3}[name] * (1 + np.abs(o_expected).max(initial=0))
    np.testing.assert_allclose(o.double().cpu(), o_expected, rtol=0, atol=close)
    np.testing.assert_allclose(lse.double().cpu(), lse_expected, rtol=1e-4, atol=1e-3)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [
    {}, dict(causal=True), dict(window=(100, 20), softcap=8.0), dict(scale=0.05, align="top-left", causal=True)])  # fmt: skip
def test_values(dtype, options):
    q, k, v = tensors(1, 2, 300, 500, 8, 2, 128, dtype)
    check(abacist.attention(q, k, v, **options, return_lse=True), q, k, v, **options)
    assert abacist.plan(q, k, v, **options).kernel.startswith("cuda")


@on_gpu
def test_varlen_alibi_sinks_and_key_lengths():
    q, k, v = (x[0] for x in tensors(2, 1, 300, 300, 4, 4, 64))
    cu = torch.tensor([0, 100, 100, 290], dtype=torch.int32, device="cuda")
    rest = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_s_q=190, max_s_k=190, causal=True,
                alibi_slopes=torch.rand(4, device="cuda"), sinks=torch.randn(4, device="cuda"))  # fmt: skip
    check(abacist.attention(q, k, v, **rest, return_lse=True), q, k, v, **rest)
    q, k, v = tensors(3, 2, 16, 400, 4, 4, 64)
    rest = dict(key_lengths=torch.tensor([400, 17], dtype=torch.int32, device="cuda"))
    check(abacist.attention(q, k, v, **rest, return_lse=True), q, k, v, **rest)


@on_gpu
def test_the_callers_stream_orders_it():
    """Work on a side stream, before and behind, is seen in order; memory freed there is used again there."""
    q, k, v = tensors(4, 4, 2000, 2000, 16, 16, 128)
    expected = abacist.attention(q, k, v, causal=True)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(20):
            late = torch.zeros_like(q)
            torch.cuda._sleep(2_000_000)
            late.copy_(q)
            o = abacist.attention(late, k, v, causal=True)
            del late
            torch.empty_like(q).fill_(float("nan"))
            copy = o.clone()
    side.synchronize()
    assert torch.equal(copy, expected)


@on_gpu
def test_under_capture_of_a_graph():
    q, k, v = tensors(5, 2, 256, 256, 8, 8, 128)
    abacist.attention(q, k, v, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = abacist.attention(q, k, v, causal=True)
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert torch.equal(o, abacist.attention(q, k, v, causal=True))


@on_gpu
def test_autocast_and_compile():
    q, k, v = (x.float() for x in tensors(6, 1, 128, 128, 4, 4, 64))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        o = abacist.attention(q, k, v, causal=True)
    assert o.dtype is torch.bfloat16
    half = [x.bfloat16() for x in (q, k, v)]
    compiled = torch.compile(lambda *x: abacist.attention(*x, causal=True), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*half), o)


@on_gpu
def test_refusals_give_the_reason():
    q, k, v = tensors(7, 1, 64, 64, 2, 2, 64)
    with pytest.raises(NotImplementedError, match="."):  # float32 is not computed there
        abacist.attention(q.float(), k.float(), v.float())
    with pytest.raises(ValueError, match="k: is on cpu, must be on cuda"):
        abacist.attention(q, k.cpu(), v)
    o = abacist.attention(*(x.requires_grad_() for x in (q, k, v)))
    with pytest.raises(NotImplementedError, match="."):
        o.sum().backward()
