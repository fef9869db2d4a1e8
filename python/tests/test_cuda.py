"""CUDA tensors of torch against the float64 reference on the host: values, streams, refusals."""

import concurrent.futures

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


def run(case, dtype, device):
    """o and lse of a case of cases.py, on the host, and what float64 makes of it."""
    q, k, v = (torch.from_numpy(x).to(dtype).to(device) for x in case.arrays.values())
    if case.heads_first:
        q, k, v = (x.transpose(-2, -3).contiguous() for x in (q, k, v))
    options = {n: torch.from_numpy(x).to(device) if isinstance(x, np.ndarray) else x for n, x in case.options.items()}
    o, lse = abacist.attention(q, k, v, **options, layout=case.layout, return_lse=True)
    o = o.transpose(-2, -3) if case.heads_first else o
    o_expected, lse_expected = case.expected()
    close = {torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype] * (1 + np.abs(o_expected).max(initial=0))
    np.testing.assert_allclose(o.double().cpu(), o_expected, rtol=0, atol=close)
    np.testing.assert_allclose(lse.double().cpu(), lse_expected, rtol=1e-4, atol=1e-3)


def random_cases(dtype, **options):
    return cases.cases(round_to=lambda x: torch.from_numpy(x).to(dtype).double().numpy(), **options)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_random_calls_are_right_or_refused_with_the_reason(device, dtype, data):
    on_host = device == "cpu"
    dims = st.integers(1, 20) if on_host else st.sampled_from([8, 16, 64, 20])
    case = data.draw(random_cases(dtype, head_dims=dims))
    try:
        run(case, dtype, device)
    except NotImplementedError as reason:
        assert not on_host and "cuda: " in str(reason)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_calls_of_what_gpus_serve_are_right(device, dtype, data):
    dims = st.sampled_from([8, 16, 64, 96, 128, 192, 256])
    run(data.draw(random_cases(dtype, head_dims=dims, on_gpu=True)), dtype, device)


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
def test_keys_in_parts():
    """A decode step whose plan splits the keys: values, lengths of the moment, a graph, a side stream."""
    q, k, v = tensors(9, 2, 1, 6000, 8, 2, 128)
    rest = dict(key_lengths=torch.tensor([6000, 1], dtype=torch.int32, device="cuda"),
                sinks=torch.randn(8, device="cuda"))  # fmt: skip
    plan = abacist.plan(q, k, v, **rest, return_lse=True)
    assert plan.splits > 1 and plan.kernel.endswith(".packed.split") and plan.workspace_bytes > 256
    for lengths in ([6000, 1], [0, 5999], [130, 3000]):
        rest["key_lengths"].copy_(torch.tensor(lengths))
        check(abacist.attention(q, k, v, **rest, return_lse=True), q, k, v, **rest)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [abacist.attention(q, k, v, **rest) for _ in range(3)]
    rest["key_lengths"].copy_(torch.tensor([777, 6000]))
    graph.replay()
    expected = abacist.attention(q, k, v, **rest)
    assert all(torch.equal(o, expected) for o in captured)


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


@on_gpu
def test_views_are_read_where_they_lie():
    """Axes in any order, gaps between rows, one tensor for q, k and v; what TMA cannot walk is refused."""
    packed = torch.randn(2, 70, 3, 4, 64, dtype=torch.bfloat16, device="cuda")
    q, k, v = packed.unbind(2)
    check(abacist.attention(q, k, v, causal=True, return_lse=True), q, k, v, causal=True)
    expected = abacist.attention(*(x.contiguous() for x in (q, k, v)), causal=True)
    swapped = [x.transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(abacist.attention(*swapped, causal=True, layout="bhsd").transpose(1, 2), expected)
    one = k[:, :, :1].expand(-1, -1, 4, -1)  # a stride of 0
    assert torch.equal(abacist.attention(q, one, one), abacist.attention(q, k[:, :, :1], k[:, :, :1]))
    wide = torch.randn(2, 70, 4, 72, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(ValueError, match="q: .*16 bytes"):
        abacist.attention(wide[..., 4:68], k, v)
    with pytest.raises(NotImplementedError, match="q: strides"):
        abacist.attention(q.transpose(1, 3).contiguous().transpose(1, 3), k, v)


@on_gpu
def test_memory_beside_the_result_is_the_workspace():
    q, k, v = tensors(8, 1, 32768, 32768, 4, 4, 64)
    abacist.attention(q, k, v)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o, lse = abacist.attention(q, k, v, causal=True, return_lse=True)
    torch.cuda.synchronize()
    most = torch.cuda.max_memory_allocated() - before
    plan = abacist.plan(q, k, v, causal=True, return_lse=True)
    assert most <= o.nbytes + lse.nbytes + plan.workspace_bytes + 3 * 512


@on_gpu
def test_many_threads_each_on_its_stream():
    inputs = [tensors(20 + n, 2, 100 + 50 * n, 300, 8, 2, 64) for n in range(8)]
    expected = [abacist.attention(*x, causal=True) for x in inputs]
    torch.cuda.synchronize()

    def work(n):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            results = [abacist.attention(*inputs[n], causal=True) for _ in range(50)]
            stream.synchronize()
            return all(torch.equal(x, expected[n]) for x in results)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


@on_gpu
def test_backends_by_name():
    q, k, v = tensors(9, 1, 40, 50, 2, 2, 64)
    assert torch.equal(abacist.attention(q, k, v, backend="cuda"), abacist.attention(q, k, v))
    with pytest.raises(NotImplementedError, match="the tensors are on cuda:0"):
        abacist.attention(q, k, v, backend="cpu")
    with pytest.raises(NotImplementedError, match="cuda: the tensors are on the host"):
        abacist.attention(*(x.cpu() for x in (q, k, v)), backend="cuda")
    with pytest.raises(NotImplementedError, match="cuda: the tensors are on the host"):
        abacist.attention(*(x.float().cpu().numpy() for x in (q, k, v)), backend="cuda")


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")


@on_gpu
@two_gpus
def test_a_stream_of_a_gpu_that_is_not_current():
    """The side stream of cuda:1 orders the run, whose workspace lies there, while cuda:0 is current."""
    q, k, v = (x[0] for x in tensors(11, 1, 4000, 4000, 8, 8, 128))
    cu = torch.tensor([0, 1000, 4000], dtype=torch.int32, device="cuda")
    rest = dict(max_s_q=3000, max_s_k=3000, causal=True)
    expected = abacist.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, **rest)
    there = [x.to("cuda:1") for x in (q, k, v, cu)]
    torch.cuda.synchronize(1)
    with torch.cuda.stream(torch.cuda.Stream("cuda:1")):
        for _ in range(3):
            late = torch.zeros_like(there[0])
            torch.cuda._sleep(20_000_000)
            late.copy_(there[0])
            with torch.cuda.device(0):
                o = abacist.attention(late, *there[1:3], cu_seqlens_q=there[3], cu_seqlens_k=there[3], **rest)
                assert torch.cuda.current_device() == 0
            del late
            torch.empty_like(there[0]).fill_(float("nan"))
            copy = o.clone()
    torch.cuda.synchronize(1)
    assert copy.device == there[0].device and torch.equal(copy.to("cuda:0"), expected)


@on_gpu
@two_gpus
def test_the_device_of_the_tensors_not_the_current_one():
    q, k, v = tensors(10, 1, 40, 50, 2, 2, 64)
    expected = abacist.attention(q, k, v)
    there = [x.to("cuda:1") for x in (q, k, v)]
    o = abacist.attention(*there)
    assert o.device == there[0].device and torch.equal(o.to("cuda:0"), expected)
    with pytest.raises(ValueError, match="k: is on cuda:1, must be on cuda:0"):
        abacist.attention(q, there[1], v)
