"""The names of other libraries: torch's attention as the judge of sdpa, attention() of flash_attn."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

import abacist  # noqa: E402
from abacist.compat import flash_attn, sdpa  # noqa: E402


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
    options = {x: masks[y] if x == "attn_mask" else y for x, y in options.items()}
    o, expected = sdpa(q, k, v, **options), scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-5)
    d_o = torch.randn_like(o)
    for x, y in zip(*(torch.autograd.grad(r, (q, k, v), d_o) for r in (o, expected))):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_sdpa_grouped_heads():
    q, k, v = random(2, 4, 5, 8), random(2, 2, 6, 8), random(2, 2, 6, 8)
    torch.testing.assert_close(sdpa(q, k, v, enable_gqa=True),
                               scaled_dot_product_attention(q, k, v, enable_gqa=True))  # fmt: skip
    with pytest.raises(ValueError, match="key: has 2 heads"):
        sdpa(q, k, v)


def test_sdpa_refusals():
    q = random(1, 1, 2, 3, 4)
    with pytest.raises(NotImplementedError, match="query: has 5 axes"):
        sdpa(q, q, q)
    q = q[0]
    with pytest.raises(ValueError, match="attn_mask"):
        sdpa(q, q, q, attn_mask=random(3, 3), is_causal=True)


def test_flash_attn_packed_forms_agree():
    torch.manual_seed(2)
    qkv = random(2, 7, 3, 4, 8)
    q, k, v = qkv.unbind(2)
    options = dict(causal=True, window_size=(3, -1), softcap=5.0)
    expected = abacist.attention(q, k, v, causal=True, window=(3, None), softcap=5.0)
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, **options), expected)
    assert torch.equal(flash_attn.flash_attn_qkvpacked_func(qkv, **options), expected)
    assert torch.equal(flash_attn.flash_attn_kvpacked_func(q, qkv[:, :, 1:], **options), expected)
    o, lse, none = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)
    assert none is None and lse.shape == (2, 4, 7)


def test_flash_attn_varlen_forms_agree():
    torch.manual_seed(3)
    qkv, cu = random(9, 3, 2, 8), torch.tensor([0, 4, 9], dtype=torch.int32)
    q, k, v = qkv.unbind(1)
    expected = torch.cat([abacist.attention(q[None, a:b], k[None, a:b], v[None, a:b], causal=True)[0]
                          for a, b in ((0, 4), (4, 9))])  # fmt: skip
    results = (
        flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, 5, 5, causal=True),
        flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, 5, causal=True),
        flash_attn.flash_attn_varlen_kvpacked_func(q, qkv[:, 1:], cu, cu, 5, 5, causal=True),
    )
    for result in results:
        torch.testing.assert_close(result, expected)


def test_kvcache_appends_and_attends():
    torch.manual_seed(4)
    k_cache, v_cache = random(2, 10, 2, 8), random(2, 10, 2, 8)
    q, k, v = random(2, 3, 4, 8), random(2, 3, 2, 8), random(2, 3, 2, 8)
    before, lengths = k_cache.clone(), torch.tensor([2, 7], dtype=torch.int32)
    o = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)
    for n, length in enumerate((2, 7)):
        keys, values = torch.cat([before[n, :length], k[n]]), v_cache[n, : length + 3]
        assert torch.equal(k_cache[n, : length + 3], keys)
        assert torch.equal(k_cache[n, length + 3 :], before[n, length + 3 :])
        alone = abacist.attention(q[n : n + 1], keys[None], values[None], causal=True)
        torch.testing.assert_close(o[n : n + 1], alone)


def test_kvcache_that_is_full_is_not_written():
    k_cache, v_cache = torch.zeros(1, 4, 1, 8), torch.zeros(1, 4, 1, 8)
    new = torch.ones(1, 2, 1, 8)
    with pytest.raises(ValueError, match="cache_seqlens"):
        flash_attn.flash_attn_with_kvcache(new, k_cache, v_cache, new, new, cache_seqlens=3)
    assert (k_cache == 0).all() and (v_cache == 0).all()


@pytest.mark.parametrize("name, value", [
    ("rotary_cos", torch.ones(1)), ("block_table", torch.ones(1)), ("cache_batch_idx", torch.ones(1)),
    ("cache_leftpad", torch.ones(1)), ("num_splits", 4)])  # fmt: skip
def test_what_is_not_there_is_refused(name, value):
    x = torch.ones(1, 2, 1, 8)
    with pytest.raises(NotImplementedError, match=name):
        flash_attn.flash_attn_with_kvcache(x, x, x, **{name: value})


def test_probabilities_are_refused():
    x = torch.ones(1, 2, 1, 8)
    with pytest.raises(NotImplementedError, match="return_attn_probs"):
        flash_attn.flash_attn_func(x, x, x, dropout_p=0.1, return_attn_probs=True)
