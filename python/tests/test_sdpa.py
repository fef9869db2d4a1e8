"""compat.sdpa against torch's own function and against a float64 formula."""

import inspect

import numpy as np
import oracle
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from abacist.compat import sdpa  # noqa: E402


def random(*shape, grad=False):
    return torch.randn(shape, requires_grad=grad)


@pytest.mark.parametrize("shape", [(2, 4, 9, 8), (4, 9, 8), (9, 8)])
@pytest.mark.parametrize("options", [
    {}, {"is_causal": True}, {"scale": 0.1}, {"attn_mask": "bool"}, {"attn_mask": "float"},
    {"attn_mask": "column"}])  # fmt: skip
def test_sdpa_is_torchs(shape, options):
    torch.manual_seed(1)
    masks = {"bool": torch.rand(9, 12) < 0.8, "float": random(9, 12), "column": random(9, 1)}
    q = random(*shape, grad=True)
    k, v = (random(*shape[:-2], 12, 8, grad=True) for _ in range(2))
    theirs, mask = options, masks.get(options.get("attn_mask"))
    if mask is not None:  # written out: the CPU kernel of torch 2.4 reads past a mask with a last axis of 1
        options, theirs = {"attn_mask": mask}, {"attn_mask": mask.expand(9, 12).contiguous()}
    o, expected = sdpa(q, k, v, **options), scaled_dot_product_attention(q, k, v, **theirs)
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-5)
    d_o = torch.randn_like(o)
    for x, y in zip(*(torch.autograd.grad(r, (q, k, v), d_o) for r in (o, expected))):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_sdpa_grouped_heads():
    q, k, v = random(2, 4, 5, 8), random(2, 2, 6, 8), random(2, 2, 6, 8)
    repeated = (x.repeat_interleave(2, 1) for x in (k, v))  # torch has enable_gqa from 2.5 on
    torch.testing.assert_close(sdpa(q, k, v, enable_gqa=True), scaled_dot_product_attention(q, *repeated))
    with pytest.raises(ValueError, match="key: has 2 heads"):
        sdpa(q, k, v)


def test_sdpa_refusals():
    q = random(1, 1, 2, 3, 4)
    with pytest.raises(NotImplementedError, match="query: has 5 axes"):
        sdpa(q, q, q)
    q = q[0]
    with pytest.raises(ValueError, match="attn_mask"):
        sdpa(q, q, q, attn_mask=random(3, 3), is_causal=True)


def test_signature_is_torchs():
    shown = [f"{p.name}={p.default}" for p in inspect.signature(sdpa).parameters.values()]
    empty = inspect.Parameter.empty
    assert shown == [f"{name}={empty}" for name in ("query", "key", "value")] + [
        "attn_mask=None", "dropout_p=0.0", "is_causal=False", "scale=None", "enable_gqa=False"]  # fmt: skip


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.integers(0, 2), st.integers(0, 20), st.integers(0, 20), st.sampled_from([1, 2]),
       st.sampled_from([1, 3]), st.sampled_from([(8, 8), (20, 5)]), st.sampled_from([None, 0.3, -0.2]),
       st.sampled_from([None, "causal", "bool", "float"]), st.tuples(*[st.booleans()] * 4),
       st.integers(0, 4), st.integers(0, 2**31))  # fmt: skip
def test_sdpa_is_the_formula(b, s_q, s_k, h_k, group, dims, scale, kind, ones, axes, seed):
    """Masks of every broadcastable shape, rows that see nothing, s_q and s_k apart, grouped heads."""
    torch.manual_seed(seed)
    h_q, (d_qk, d_v) = h_k * group, dims
    q, k, v = random(b, h_q, s_q, d_qk), random(b, h_k, s_k, d_qk), random(b, h_k, s_k, d_v)
    shape = [1 if one else n for one, n in zip(ones, (b, h_q, s_q, s_k))][4 - axes :]
    mask, bias = None, None
    if kind == "bool":
        mask = torch.rand(shape) < 0.7
    elif kind == "float":
        bias = random(*shape).masked_fill(torch.rand(shape) < 0.3, -torch.inf)
    given_mask = mask if bias is None else bias
    o = sdpa(q, k, v, attn_mask=given_mask, is_causal=kind == "causal", scale=scale, enable_gqa=group > 1)
    full = lambda x: None if x is None else x.expand(b, h_q, s_q, s_k).numpy()  # noqa: E731
    expected, _ = oracle.attention(*(x.transpose(1, 2) for x in (q, k, v)), scale=scale,
                                   causal=kind == "causal", top_left=True, mask=full(mask),
                                   bias=full(bias))  # fmt: skip
    np.testing.assert_allclose(o.transpose(1, 2), expected, rtol=1e-4, atol=2e-5)


def test_sdpa_dropout_follows_the_seed():
    q, v = random(1, 4, 64, 8), torch.ones(1, 4, 64, 8)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(sdpa(q, q, v, dropout_p=0.25))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    assert abs(results[0].mean() - 1) < 0.02 and results[0].std() > 0.02


def test_autocast_casts_operands_of_several_types():
    q, k, v = (random(1, 2, 5, 8) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        arguments = q, k.bfloat16(), v.half(), random(5, 5).half()
        o, expected = sdpa(*arguments), scaled_dot_product_attention(*arguments)
    assert o.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(o, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind, message, changed", [
    (TypeError, "attn_mask: has type torch.int64", {"attn_mask": torch.ones(3, 3).long()}),
    (ValueError, "attn_mask", {"attn_mask": torch.ones(3, 4).bool()}),
    (TypeError, "attn_mask", {"attn_mask": torch.ones(3, 3).half()}),
    (ValueError, "key", {"key": torch.ones(1, 2, 3, 5)}),
    (ValueError, "query, key, value: have", {"key": torch.ones(2, 3, 4)}),
    (TypeError, "value", {"value": torch.ones(1, 2, 3, 4).half()}),
    (TypeError, "query: is a int", {"query": 1}),
    (TypeError, "attn_mask: is a list", {"attn_mask": [1]}),
    (TypeError, "is_causal", {"is_causal": "yes"}),
    (ValueError, "dropout_p", {"dropout_p": 1.5}),
])  # fmt: skip
def test_sdpa_errors_name_torchs_arguments(kind, message, changed):
    x = torch.ones(1, 2, 3, 4)
    with pytest.raises(kind, match=f"^{message}"):
        sdpa(**{"query": x, "key": x, "value": x, **changed})
