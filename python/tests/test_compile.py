"""torch.compile and the operators behind it. The compiled function must give the eager one's bits."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch._dynamo.utils  # noqa: E402

import abacist  # noqa: E402


def leaves(*shapes):
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


CASES = {
    "causal": dict(causal=True),
    "window": dict(window=(3, None), softcap=4.0, align="top-left"),
    "bhsd": dict(layout="bhsd", scale=0.2),
    "dropout": dict(dropout_p=0.3, seed=2**64 - 5),
}


@pytest.mark.parametrize("name", CASES)
def test_fullgraph_gives_the_same_bits(name):
    torch.manual_seed(1)
    inputs = leaves((2, 6, 6, 8), (2, 6, 6, 8), (2, 6, 6, 4))
    bias, sinks = leaves((6, 6, 6), (6,))

    def step(q, k, v, bias, sinks):
        o, lse = abacist.attention(q * 2, k, v, bias=bias, sinks=sinks, return_lse=True, **CASES[name])
        return o.square().sum() + lse.sum()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    everything = (*inputs, bias, sinks)
    results = []
    for function in (step, compiled):
        result = function(*everything)
        results.append((result, *torch.autograd.grad(result, everything)))
    for x, y in zip(*results):
        assert torch.equal(x, y)


def test_export_and_trace_keep_the_operator():
    q, other = torch.randn(1, 6, 2, 8), torch.randn(1, 6, 2, 8)

    class Module(torch.nn.Module):
        def forward(self, q):
            return abacist.attention(q, q, q, causal=True)

    expected = Module()(other)
    assert torch.equal(torch.export.export(Module(), (q,)).module()(other), expected)
    assert torch.equal(torch.jit.trace(Module(), q)(other), expected)


def test_fullgraph_varlen():
    q, k, v = (torch.randn(7, 2, 8) for _ in range(3))
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)

    def run(q, k, v, cu):
        return abacist.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_s_q=4, max_s_k=4)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.equal(run(q, k, v, cu), compiled(q, k, v, cu))


def test_fullgraph_with_dynamic_shapes_compiles_once():
    def run(q, k, v):
        o, lse = abacist.attention(q, k, v, causal=True, window=(q.shape[1] // 2, None), return_lse=True)
        return o * 2, lse

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for s_q, s_k in ((5, 7), (9, 9), (16, 33)):
        q, k, v = leaves((2, s_q, 4, 8), (2, s_k, 2, 8), (2, s_k, 2, 4))
        results = []
        for function in (run, compiled):
            o, lse = function(q, k, v)
            results.append((o, lse, *torch.autograd.grad(o.square().sum() + lse.sum(), (q, k, v))))
        for x, y in zip(*results):
            assert torch.equal(x, y)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_autocast_inside_of_a_graph():
    q, k, v = leaves((1, 5, 2, 8), (1, 5, 2, 8), (1, 5, 2, 8))

    def run(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return abacist.attention(q, k, v)

    torch._dynamo.reset()
    o = torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v)
    assert o.dtype is torch.bfloat16 and torch.equal(o, run(q, k, v))


@pytest.mark.parametrize("options, text", [
    (dict(dropout_p=0.5), "seed: must be given"), (dict(window=(-1, 2)), "window: is"),
    (dict(layout="sbhd"), "layout: is .{0,2}sbhd"), (dict(align="middle"), "align: is 'middle'"),
    (dict(alibi_slopes=torch.ones(2, requires_grad=True)), "alibi_slopes: requires a gradient")])  # fmt: skip
def test_refusals_name_the_argument(options, text):
    q = torch.randn(1, 5, 2, 8)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: abacist.attention(x, x, x, **options), backend="aot_eager", fullgraph=True)
    # PyTorch 2.4 says no more than that there was an exception.
    with pytest.raises(Exception, match=f"{text}|^Observed exception\n\nfrom user code"):
        compiled(q)


REST = {
    "plain": (None,) * 5 + (True, [2, -1], None, 0.0, "bottom-right", 0, 0, 0.0, 0, False, None),
    "bhsd": (torch.rand(4), None, None, torch.tensor([4], dtype=torch.int32), torch.ones(3, 5, dtype=torch.bool))
    + (False, None, 0.3, 2.0, "top-left", 0, 0, 0.25, -7, True, "cpu"),
}  # fmt: skip


@pytest.mark.parametrize("name", REST)
def test_opcheck(name):
    from abacist import _ops  # noqa: F401: registers the operators

    q, k, v, bias, sinks = leaves((1, 3, 4, 8), (1, 5, 2, 8), (1, 5, 2, 6), (1, 4, 1, 5), (4,))
    if name == "bhsd":
        q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v))
    torch.library.opcheck(torch.ops.abacist.attention, (q, k, v, bias, sinks, *REST[name]))
    with torch.no_grad():
        o, lse = torch.ops.abacist.attention(q, k, v, bias, sinks, *REST[name])
        torch.library.opcheck(
            torch.ops.abacist.attention_backward,
            (*(x.detach() for x in (q, k, v)), o, lse, torch.randn_like(o), torch.randn_like(lse), True, False,
             bias.detach(), sinks.detach(), *REST[name]))  # fmt: skip
