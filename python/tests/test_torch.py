"""attention() on torch tensors: values, gradients, refusals."""

import concurrent.futures
import types

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import numpy as np  # noqa: E402
import oracle  # noqa: E402

import abacist  # noqa: E402


def tensors(seed, b, s_q, s_k, h_q, h_k, d_qk, d_v, dtype=torch.float32, grad=False):
    torch.manual_seed(seed)
    shapes = (b, s_q, h_q, d_qk), (b, s_k, h_k, d_qk), (b, s_k, h_k, d_v)
    return [torch.randn(shape).to(dtype).requires_grad_(grad) for shape in shapes]


@pytest.mark.parametrize("dtype, tolerance", [
    (torch.float32, 2e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)])  # fmt: skip
@pytest.mark.parametrize("causal", [False, True])
def test_values(dtype, tolerance, causal):
    q, k, v = tensors(1, 2, 17, 40, 4, 2, 24, 16, dtype)
    o, lse = abacist.attention(q, k, v, causal=causal, return_lse=True)
    expected, lse_expected = oracle.attention(*(x.double().numpy() for x in (q, k, v)), causal=causal)
    assert o.dtype is dtype and o.is_contiguous() and lse.dtype is torch.float32
    np.testing.assert_allclose(o.double(), expected, rtol=0, atol=tolerance * (1 + np.abs(expected).max()))
    np.testing.assert_allclose(lse, lse_expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [
    dict(causal=True), dict(window=(2, 1), softcap=2.0), dict(scale=-0.3, align="top-left", causal=True),
    dict(dropout_p=0.3, seed=2**63 + 1), dict(mask=torch.ones(4, 5, dtype=torch.bool).tril()),
    dict(alibi_slopes=torch.tensor([1.0, 0.5, 0.25, 0.1]), key_lengths=torch.tensor([5, 2], dtype=torch.int32)),
    dict(sinks=torch.tensor([0.5, -1.0, 2.0, -torch.inf]))])  # fmt: skip
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_gradcheck_through_o_and_lse(options, layout):
    q, k, v = tensors(2, 2, 4, 5, 4, 2, 3, 2, torch.float64, grad=True)
    bias = torch.randn(1, 4, 1, 5, dtype=torch.float64, requires_grad=True)

    def run(q, k, v, bias):
        if layout == "bhsd":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return abacist.attention(
            q, k, v, bias=bias, **options, layout=layout, backend="reference", return_lse=True
        )

    # The gradient by a bias is float32.
    torch.autograd.gradcheck(run, (q, k, v, bias), atol=2e-5)


def test_gradcheck_varlen():
    q, k, v = (x[0].detach().requires_grad_() for x in tensors(2, 1, 7, 9, 4, 2, 3, 2, torch.float64))
    cu_q, cu_k = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 3, 3, 6], [0, 2, 6, 9]))

    def run(q, k, v):
        return abacist.attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_s_q=3, max_s_k=4,
                                 causal=True, backend="reference")  # fmt: skip

    torch.autograd.gradcheck(run, (q, k, v))


def test_gradients_of_the_cpu_backend_with_bias_and_sinks():
    q, k, v = tensors(3, 2, 9, 33, 4, 2, 8, 8, grad=True)
    bias = torch.randn(4, 1, 33, requires_grad=True)
    sinks = torch.randn(4, requires_grad=True)
    o, lse = abacist.attention(q, k, v, bias=bias, sinks=sinks, causal=True, return_lse=True)
    d_o, d_lse = torch.randn_like(o), torch.randn_like(lse)
    found = torch.autograd.grad((o, lse), (q, k, v, bias, sinks), (d_o, d_lse))

    q2, k2, v2, bias2, sinks2 = (x.detach().double().requires_grad_() for x in (q, k, v, bias, sinks))
    s = torch.einsum("bihd,bjhd->bhij", q2, k2.repeat_interleave(2, 2)) / 8**0.5 + bias2
    s = s.masked_fill(~torch.ones(9, 33, dtype=torch.bool).tril(24), -torch.inf)
    lse2 = torch.cat([s, sinks2[None, :, None, None].expand(2, 4, 9, 1)], -1).logsumexp(-1)
    o2 = torch.einsum("bhij,bjhd->bihd", (s - lse2[..., None]).exp(), v2.repeat_interleave(2, 2))
    expected = torch.autograd.grad((o2, lse2), (q2, k2, v2, bias2, sinks2), (d_o.double(), d_lse.double()))
    for name, x, y in zip(("q", "k", "v", "bias", "sinks"), found, expected):
        assert x.shape == y.shape
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-5, msg=lambda m: f"d{name}: {m}")


@pytest.mark.parametrize("through", ["o", "lse"])
def test_one_output_alone_and_an_expanded_gradient(through):
    q, k, v = tensors(4, 1, 6, 6, 2, 2, 4, 4, grad=True)
    results = dict(zip(("o", "lse"), abacist.attention(q, k, v, return_lse=True)))
    found = torch.autograd.grad(results[through].sum(), (q, k, v), allow_unused=False)
    q2, k2, v2 = (x.detach().double().requires_grad_() for x in (q, k, v))
    s = torch.einsum("bihd,bjhd->bhij", q2, k2) / 2
    expected = {"o": torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v2), "lse": s.logsumexp(-1)}
    for x, y in zip(found, torch.autograd.grad(expected[through].sum(), (q2, k2, v2), allow_unused=True)):
        y = torch.zeros_like(x) if y is None else y.float()
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_varlen_gradients_are_those_of_each_sequence_and_zero_behind():
    q, k, v = (x[0].detach().requires_grad_() for x in tensors(5, 1, 9, 9, 2, 2, 4, 4))
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)
    o = abacist.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_s_q=4, max_s_k=4, causal=True)
    found = torch.autograd.grad(o.square().sum(), (q, k, v))
    parts = [abacist.attention(q[None, a:b], k[None, a:b], v[None, a:b], causal=True)[0]
             for a, b in ((0, 3), (3, 7))]  # fmt: skip
    torch.testing.assert_close(o[:7], torch.cat(parts))
    assert (o[7:] == 0).all()
    for x, y in zip(found, torch.autograd.grad(torch.cat(parts).square().sum(), (q, k, v))):
        torch.testing.assert_close(x, y)


def test_nothing_is_copied():
    """512 GB of keys that lie in 32 bytes; a query sees ten of them."""
    q, k = tensors(6, 1, 1, 1, 8, 1, 8, 8)[:2]
    many = k.expand(1, 2**31, 8, 8)
    o = abacist.attention(q, many, many, key_lengths=torch.tensor([10], dtype=torch.int32))
    np.testing.assert_allclose(o, oracle.attention(q, many[:, :10], many[:, :10])[0], rtol=1e-5)


def test_layout_moves_no_data():
    q, k, v = tensors(6, 2, 7, 9, 4, 2, 8, 8)
    o = abacist.attention(q, k, v)
    swapped = abacist.attention(*(x.transpose(1, 2) for x in (q, k, v)), layout="bhsd")
    assert torch.equal(o, swapped.transpose(1, 2))


def test_a_change_in_place_is_noticed():
    q, k, v = tensors(7, 1, 4, 4, 1, 1, 4, 4, grad=True)
    mask = torch.ones(4, 4, dtype=torch.bool)
    o = abacist.attention(q, k, v, mask=mask)
    mask[0, 0] = False
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize("through", ["o", "lse", "square"])
@pytest.mark.parametrize("wanted", ["q", "k", "bias"])
def test_second_derivatives_are_refused(wanted, through):
    """A sum's gradient by o is a constant: those of q, k and v are functions all the same."""
    q, k, v = tensors(8, 1, 4, 4, 1, 1, 4, 4)
    bias = torch.randn(4, 4)
    x = {"q": q, "k": k, "bias": bias}[wanted].requires_grad_()
    o, lse = abacist.attention(q, k, v, bias=bias, return_lse=True)
    loss = {"o": o, "lse": lse, "square": o.square()}[through].sum()
    (once,) = torch.autograd.grad(loss, x, retain_graph=True)
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    assert torch.equal(dx, once)
    with pytest.raises(NotImplementedError, match="^q, k, v: gradients of gradients"):
        (dx.sum() + x.sum()).backward()
    with pytest.raises(NotImplementedError, match="^q, k, v: gradients of gradients"):
        torch.autograd.functional.hessian(lambda y: abacist.attention(y, k, v).sum(), q.detach())


def test_dropout_follows_torchs_seed():
    q, k, v = tensors(9, 1, 8, 32, 2, 2, 8, 8)
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(abacist.attention(q, k, v, dropout_p=0.3))
    assert torch.equal(*results)
    assert not torch.equal(results[0], abacist.attention(q, k, v, dropout_p=0.3))


def test_autocast():
    q, k, v = tensors(10, 1, 8, 8, 2, 2, 8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = abacist.attention(q, k, v)
    assert o.dtype is torch.bfloat16
    assert torch.equal(o, abacist.attention(*(x.bfloat16() for x in (q, k, v))))


def test_autocast_gives_gradients_of_the_callers_type():
    q, k, v = tensors(10, 1, 8, 8, 2, 2, 8, 8, grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, lse = abacist.attention(q, k, v, return_lse=True)
        assert o.dtype is torch.bfloat16 and lse.dtype is torch.float32
        d_q, d_k, d_v = torch.autograd.grad(o.float().square().sum(), (q, k, v))
    assert {d_q.dtype, d_k.dtype, d_v.dtype} == {torch.float32}
    x = q.detach().double()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert abacist.attention(x, x, x, backend="reference").dtype is torch.float64


def test_meta_tensors_give_shapes_gradients_and_errors():
    q, k, v = (x.to("meta").requires_grad_() for x in tensors(11, 2, 64, 32, 4, 2, 8, 16, torch.bfloat16))
    bias = torch.empty(4, 64, 32, device="meta", requires_grad=True)
    o, lse = abacist.attention(q, k, v, bias=bias, causal=True, return_lse=True)
    assert o.is_meta and o.shape == (2, 64, 4, 16) and o.dtype is torch.bfloat16
    assert lse.is_meta and lse.shape == (2, 4, 64) and lse.dtype is torch.float32
    grads = torch.autograd.grad(o.sum(), (q, k, v, bias))
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape, bias.shape]
    with pytest.raises(ValueError, match="v: "):
        abacist.attention(q, k, v[:, 1:])
    with pytest.raises(ValueError, match="bias: is on cpu, must be on meta"):
        abacist.attention(q, k, v, bias=torch.zeros(4, 64, 32))


def test_expanded_inputs_and_a_gradient_that_is_accumulated():
    q, k, v = tensors(14, 1, 6, 6, 2, 2, 4, 4, grad=True)
    o = abacist.attention(q.expand(3, 6, 2, 4), k.expand(3, 6, 2, 4), v.expand(3, 6, 2, 4), causal=True)
    o.sum().backward()
    expected = torch.autograd.grad(abacist.attention(q, k, v, causal=True).sum(), (q, k, v))
    for x, y in zip((q, k, v), expected):
        torch.testing.assert_close(x.grad, 3 * y)


def test_threads_may_train_at_once():
    cases = [tensors(n, 1, 1 + n, 30, 4, 2, 8, 8, grad=True) for n in range(40)]

    def step(case):
        return torch.autograd.grad(abacist.attention(*case, causal=True).square().sum(), case)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(step, cases))
    for case, found in zip(cases, together):
        for x, y in zip(found, step(case)):
            assert torch.equal(x, y)


def test_checkpointing_gives_the_same_gradients():
    from torch.utils.checkpoint import checkpoint

    q, k, v = tensors(15, 1, 6, 6, 2, 2, 4, 4, grad=True)
    grads = []
    for wrap in (lambda f, *x: f(*x), lambda f, *x: checkpoint(f, *x, use_reentrant=False)):
        torch.manual_seed(0)
        o = wrap(lambda *x: abacist.attention(*x, causal=True, dropout_p=0.2), q, k, v)
        grads.append(torch.autograd.grad(o.square().sum(), (q, k, v)))
    for x, y in zip(*grads):
        assert torch.equal(x, y)


def test_plan_takes_meta_tensors():
    q, k, v = (x.to("meta") for x in tensors(11, 1, 64, 64, 2, 2, 8, 8))
    assert abacist.plan(q, k, v, causal=True).visible_pairs == 2 * 64 * 65 // 2


@pytest.mark.parametrize("change, kind, text", [
    (dict(k=np.ones((1, 4, 2, 8), np.float32)), TypeError, "k: is a ndarray"),
    (dict(q=torch.ones(1, 4, 2, 8, device="meta")), ValueError, "k: is on cpu, must be on meta"),
    (dict(k=torch.ones(1, 4, 2, 8, device="meta")), ValueError, "k: is on meta, must be on cpu"),
    (dict(alibi_slopes=[1.0, 2.0]), TypeError, "alibi_slopes: is a list"),
    (dict(q=torch.ones(1, 4, 2, 8, dtype=torch.int32)), TypeError, "q: has type torch.int32"),
    (dict(v=torch.ones(1, 4, 2, 8).to_sparse()), TypeError, "v: has layout"),
    (dict(alibi_slopes=torch.ones(2, requires_grad=True)), NotImplementedError, "alibi_slopes: "),
    (dict(cu_seqlens_q=torch.tensor([0, 4])), ValueError, "cu_seqlens_k: is missing"),
    (dict(key_lengths=torch.tensor([4])), TypeError, "key_lengths: has type torch.int64"),
    # A tensor of one element could change after the call that packed the options.
    (dict(scale=torch.tensor(0.5)), TypeError, "scale: is tensor"),
    (dict(causal=torch.tensor(True)), TypeError, "causal: is tensor"),
    (dict(window=(torch.tensor(1), None)), TypeError, "window: left is tensor"),
])  # fmt: skip
def test_errors_name_the_argument(change, kind, text):
    arguments = dict(zip("qkv", tensors(12, 1, 4, 4, 2, 2, 8, 8)))
    with pytest.raises(kind, match=text):
        abacist.attention(**{**arguments, **change})


def test_transforms_are_refused():
    q, k, v = tensors(13, 2, 4, 4, 2, 2, 4, 4)
    text = "not supported"
    with pytest.raises(NotImplementedError, match=text):
        torch.vmap(lambda x: abacist.attention(x[None], k, v))(q)
    with pytest.raises(NotImplementedError, match=text):
        torch.func.grad(lambda x: abacist.attention(x, k, v).sum())(q)
    with pytest.raises(NotImplementedError, match=text):
        torch.func.jvp(lambda x: abacist.attention(x, k, v), (q,), (torch.ones_like(q),))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match=text):
        abacist.attention(torch.autograd.forward_ad.make_dual(q, q), k, v)


@pytest.mark.skipif(abacist.has_backend("cuda"), reason="this build has the CUDA backend")
def test_a_gpu_without_its_backend_is_refused(monkeypatch):
    from abacist import _torch

    q, k, v = (x.to("meta") for x in tensors(17, 1, 64, 64, 2, 2, 64, 64, torch.bfloat16))
    monkeypatch.setattr(_torch, "_place", lambda device: (1, 0))  # a plan looks at no memory
    with pytest.raises(NotImplementedError, match="no CUDA backend"):
        abacist.plan(q, k, v)


def test_the_way_of_gpus_on_the_host(monkeypatch):
    """All of it but the stream and torch's allocator, which GPUs have: test_cuda.py."""
    from abacist import _torch

    case = tensors(16, 2, 33, 65, 4, 2, 16, 16, torch.bfloat16)
    expected = abacist.attention(*case, causal=True, return_lse=True)
    taken = []

    def workspace(size, device):
        memory = torch.empty(size + 256, dtype=torch.uint8)
        taken.append(memory[-memory.data_ptr() % 256 :][:size])
        return taken[-1]

    monkeypatch.setattr(_torch, "_workspace", workspace)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(_torch, "_run", lambda *x: _torch._run_on_gpu(*x[:3], torch.device("cpu")))
    for x, y in zip(abacist.attention(*case, causal=True, return_lse=True), expected):
        assert torch.equal(x, y)
    assert [x.numel() for x in taken] == [abacist.plan(*case, causal=True, return_lse=True).workspace_bytes]
