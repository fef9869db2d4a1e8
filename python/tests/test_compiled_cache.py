"""compat.flash_attn.flash_attn_with_kvcache under torch.compile: one operator, the bits of eager."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch._dynamo.utils  # noqa: E402

from abacist.compat.flash_attn import flash_attn_with_kvcache  # noqa: E402


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


ANGLE = torch.rand(16, 4) * 6
APPENDED = dict(k=torch.randn(2, 3, 2, 8), v=torch.randn(2, 3, 2, 8))
ROTATED = dict(**APPENDED, rotary_cos=ANGLE.cos(), rotary_sin=ANGLE.sin())
CASES = {  # and whether the caches are pages
    "all of the cache": ({}, False),
    "lengths": (dict(cache_seqlens=int32(5, 2), window_size=(4, -1)), False),
    "a number": (dict(cache_seqlens=7, softcap=2.0, num_splits=1), False),
    "append": (dict(cache_seqlens=int32(5, 2), causal=True, **APPENDED), False),
    "append behind a number": (dict(cache_seqlens=6, causal=True, **APPENDED), False),
    "rotary": (dict(cache_seqlens=int32(5, 2), causal=True, **ROTATED), False),
    "rotary, halves": (dict(cache_seqlens=int32(5, 2), rotary_interleaved=False, **ROTATED), False),
    "rows": (dict(cache_seqlens=int32(5, 2), cache_batch_idx=int32(2, 0), **APPENDED), False),
    "pages": (dict(cache_seqlens=int32(5, 2), block_table=int32(1, 3, 0, 2).reshape(2, 2), causal=True,
                   alibi_slopes=torch.rand(4), **ROTATED), True),
}  # fmt: skip


def caches(pages, seed=1):
    torch.manual_seed(seed)
    return torch.randn(2, *((5, 6) if pages else (3, 12)), 2, 8).unbind(0)


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_one_graph_and_the_same_bits(name, with_lse):
    options, pages = CASES[name]
    q = torch.randn(2, 3, 4, 8)

    def step(q, k_cache, v_cache):
        return flash_attn_with_kvcache(q * 2, k_cache, v_cache, return_softmax_lse=with_lse, **options)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    ours, theirs = caches(pages), caches(pages)
    found, expected = compiled(q, *ours), step(q, *theirs)
    for x, y in zip(found if with_lse else (found,), expected if with_lse else (expected,)):
        assert torch.equal(x, y)
    for x, y, before in zip(ours, theirs, caches(pages)):
        assert torch.equal(x, y) and torch.equal(x, before) == ("k" not in options)


def test_a_loop_that_writes_compiles_once():
    """The lengths are data; what is appended is seen by the next step."""
    k_cache, v_cache = caches(False)
    k_eager, v_eager = k_cache.clone(), v_cache.clone()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def step(q, k, v, k_cache, v_cache, lengths):
        o = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)
        return o + 1, lengths + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    lengths, lengths_eager = int32(3, 0, 1), int32(3, 0, 1)
    for _ in range(6):
        q, k, v = torch.randn(3, 1, 4, 8), torch.randn(3, 1, 2, 8), torch.randn(3, 1, 2, 8)
        found, lengths = compiled(q, k, v, k_cache, v_cache, lengths)
        expected, lengths_eager = step(q, k, v, k_eager, v_eager, lengths_eager)
        assert torch.equal(found, expected)
    assert torch.equal(k_cache, k_eager) and torch.equal(v_cache, v_eager)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_no_gradients():
    q, new = torch.randn(2, 3, 4, 8, requires_grad=True), torch.randn(2, 3, 2, 8, requires_grad=True)

    def step(q, new, k_cache, v_cache):
        return flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=2)

    torch._dynamo.reset()
    ours, theirs = caches(False), caches(False)
    o = torch.compile(step, fullgraph=True, backend="aot_eager")(q, new, *ours)
    assert not o.requires_grad and torch.equal(o, step(q, new, *theirs)) and torch.equal(ours[0], theirs[0])


@pytest.mark.parametrize("options, text", [
    (dict(cache_seqlens=int32(5, 2), **{**APPENDED, "v": None}), "v: is missing"),
    (dict(cache_seqlens=20), "cache_seqlens: is 20, must be in"),
    (dict(cache_leftpad=int32(0, 0)), "cache_leftpad: "),
    (dict(softmax_scale=float("nan")), "softmax_scale: "),
])  # fmt: skip
def test_refusals_name_the_argument(options, text):
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: flash_attn_with_kvcache(q, k, v, **options),
                             backend="aot_eager", fullgraph=True)  # fmt: skip
    if torch.__version__.startswith("2.4."):  # says no more than that there was an exception
        text += "|from user code"
    with pytest.raises(Exception, match=text):
        compiled(torch.randn(2, 3, 4, 8), *caches(False))


@pytest.mark.parametrize("name", ["lengths", "a number", "rotary", "pages"])
def test_opcheck(name):
    from abacist.compat import _cache_ops  # noqa: F401: registers the operators

    options, pages = CASES[name]
    given = options.get("cache_seqlens")
    lengths = (None, given) if isinstance(given, int) else (given, None)
    rest = (*lengths, None, options.get("block_table"), options.get("alibi_slopes"), False, True, [4, -1], None, 2.0)
    q, pools = torch.randn(2, 3, 4, 8), caches(pages)
    if "k" in options:
        new = (options["k"], options["v"], options["rotary_cos"], options["rotary_sin"], True)
        torch.library.opcheck(torch.ops.abacist.append_to_cache, (q, *pools, *new, *rest))
    else:
        torch.library.opcheck(torch.ops.abacist.read_cache, (q, *pools, *rest))


@pytest.mark.parametrize("compiled", [False, True])
def test_one_tensor_cannot_be_both_caches_that_are_appended_to(compiled):
    q, new, cache = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 2, 8), torch.randn(1, 4, 2, 8)
    before = cache.clone()

    def step(q, cache, new):
        return flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=2)

    step = torch.compile(step, backend="eager") if compiled else step
    with pytest.raises(ValueError, match="k_cache: overlaps v_cache"):
        step(q, cache, new)
    assert torch.equal(cache, before)
