"""torch.compile and the operators behind it. The compiled function must give the eager one's bits."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

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


def test_fullgraph_varlen():
    q, k, v = (torch.randn(7, 2, 8) for _ in range(3))
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)

    def run(q, k, v, cu):
        return abacist.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_s_q=4, max_s_k=4)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.equal(run(q, k, v, cu), compiled(q, k, v, cu))


def test_opcheck():
    q, k, v, bias, sinks = leaves((1, 5, 4, 8), (1, 6, 2, 8), (1, 6, 2, 4), (1, 4, 1, 6), (4,))
    options = (None,) * 5 + (True, [2, -1], None, 0.0, "bottom-right", 0, 0, 0.0, 0, False, None)
    torch.library.opcheck(torch.ops.abacist.attention, (q, k, v, bias, sinks, *options))
