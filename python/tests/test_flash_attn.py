"""compat.flash_attn against a float64 formula: signatures, conventions, caches, refusals."""

import inspect
import itertools

import numpy as np
import oracle
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from abacist.compat import flash_attn  # noqa: E402

settings.register_profile("compat", deadline=None, max_examples=80, derandomize=True)
settings.load_profile("compat")
CLOSE = {"rtol": 1e-4, "atol": 2e-5}  # float32 against float64, outputs of order 1

SCORE = "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None"
TAIL = SCORE + ", deterministic=False, return_attn_probs=False"
SIGNATURES = {  # flash-attn 2.8.3
    "flash_attn_func": f"q, k, v, {TAIL}",
    "flash_attn_kvpacked_func": f"q, kv, {TAIL}",
    "flash_attn_qkvpacked_func": f"qkv, {TAIL}",
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
    f"{TAIL}, block_table=None",
    "flash_attn_varlen_kvpacked_func": "q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, "
    f"max_seqlen_k, {TAIL}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {TAIL}",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, "
    "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, "
    "alibi_slopes=None, num_splits=0, return_softmax_lse=False",
}


def random(*shape, grad=False):
    return torch.randn(shape, requires_grad=grad)


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def close(x, expected, **tolerance):
    np.testing.assert_allclose(x.detach().double().numpy(), expected, **(tolerance or CLOSE))


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_flash_attns(name):
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert ", ".join(shown) == SIGNATURES[name]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


@st.composite
def options(draw, batch, heads):
    """Arguments of a call, and the same for the formula."""
    causal = draw(st.booleans())
    sides = st.sampled_from([-1, 0, 2, 7, 1000])
    left, right = draw(st.one_of(st.just((-1, -1)), st.tuples(sides, sides)))
    softcap = draw(st.sampled_from([0.0, 0.0, 1.5]))
    scale = draw(st.sampled_from([None, 0.3, -0.2]))
    slopes = draw(st.sampled_from([None, (heads,), (batch, heads)]))
    slopes = None if slopes is None else torch.rand(slopes)
    ours = {"causal": causal, "window_size": (left, right), "softcap": softcap,
            "softmax_scale": scale, "alibi_slopes": slopes}  # fmt: skip
    theirs = {"causal": causal, "window": (None if left < 0 else left, None if right < 0 else right),
              "softcap": softcap, "scale": scale,
              "slopes": None if slopes is None else slopes.numpy()}  # fmt: skip
    return ours, theirs


def one(theirs, n):
    """The formula's arguments for sequence n alone."""
    slopes = theirs["slopes"]
    return {**theirs, "slopes": slopes[n] if slopes is not None and slopes.ndim == 2 else slopes}


SIZES = st.tuples(st.integers(1, 3), st.integers(0, 20), st.integers(0, 20), st.sampled_from([1, 2]),
                  st.sampled_from([1, 3]), st.sampled_from([1, 8, 20]))  # fmt: skip


@given(st.data(), SIZES, st.integers(0, 2**31))
def test_dense_is_the_formula(data, sizes, seed):
    torch.manual_seed(seed)
    b, s_q, s_k, h_k, group, d = sizes
    q, k, v = random(b, s_q, h_k * group, d), random(b, s_k, h_k, d), random(b, s_k, h_k, d)
    ours, theirs = data.draw(options(b, h_k * group))
    expected, expected_lse = oracle.attention(q, k, v, **theirs)
    o, lse, none = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **ours)
    assert none is None
    close(o, expected)
    close(lse, expected_lse)
    kv = torch.stack([k, v], 2)
    assert torch.equal(flash_attn.flash_attn_kvpacked_func(q, kv, **ours), o)
    if s_q == s_k and group == 1:
        qkv = torch.stack([q, k, v], 2)
        assert torch.equal(flash_attn.flash_attn_qkvpacked_func(qkv, **ours), o)


@pytest.mark.parametrize("s_q, s_k", [(5, 5), (3, 9), (9, 3)])
def test_every_kind_of_window(s_q, s_k):
    torch.manual_seed(4)
    q, k, v = random(1, s_q, 2, 8), random(1, s_k, 2, 8), random(1, s_k, 2, 8)
    for left, right, causal in itertools.product([-1, 0, 2, 1000], [-1, 0, 2, 1000], [False, True]):
        window = (None if left < 0 else left, None if right < 0 else right)
        expected, _ = oracle.attention(q, k, v, causal=causal, window=window)
        for o in (
            flash_attn.flash_attn_func(q, k, v, causal=causal, window_size=(left, right)),
            flash_attn.flash_attn_with_kvcache(q, k, v, causal=causal, window_size=(left, right)),
            flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], starts([s_q]), starts([s_k]), s_q, s_k,
                                              causal=causal, window_size=(left, right))[None],
        ):  # fmt: skip
            close(o, expected)


def starts(lengths):
    return int32([0, *np.cumsum(lengths)])


def paged(rows, page_size, generator):
    """Rows of sequences as pages in random order among others, and the block table."""
    counts = [-(-len(x) // page_size) for x in rows]
    pool = torch.full((sum(counts) + 2, page_size, *rows[0].shape[1:]), torch.nan)
    order = torch.randperm(len(pool), generator=generator)
    table = torch.full((len(rows), max(counts) + 1), -7, dtype=torch.int32)
    at = 0
    for n, x in enumerate(rows):
        for page in range(counts[n]):
            part = x[page * page_size : (page + 1) * page_size]
            pool[order[at], : len(part)] = part
            table[n, page] = order[at]
            at += 1
    return pool, table


@given(st.data(), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4),
       st.sampled_from([(1, 1), (2, 1), (1, 3)]), st.integers(0, 2**31))  # fmt: skip
def test_varlen_is_the_formula(data, lengths, heads, seed):
    torch.manual_seed(seed)
    (h_k, group), d = heads, 8
    ours, theirs = data.draw(options(len(lengths), h_k * group))
    lq, lk = zip(*lengths)
    q, k, v = random(sum(lq), h_k * group, d), random(sum(lk), h_k, d), random(sum(lk), h_k, d)
    parts = [x.split(list(n)) for x, n in ((q, lq), (k, lk), (v, lk))]
    expected = [oracle.attention(*(x[None] for x in xs), **one(theirs, n))
                for n, xs in enumerate(zip(*parts))]  # fmt: skip
    arguments = starts(lq), starts(lk), max(lq), max(lk)
    kinds = [
        flash_attn.flash_attn_varlen_func(q, k, v, *arguments, return_attn_probs=True, **ours),
        flash_attn.flash_attn_varlen_kvpacked_func(
            q, torch.stack([k, v], 1), *arguments, return_attn_probs=True, **ours),
    ]  # fmt: skip
    if lq == lk and group == 1:
        kinds.append(flash_attn.flash_attn_varlen_qkvpacked_func(
            torch.stack([q, k, v], 1), arguments[0], max(lq), return_attn_probs=True, **ours))  # fmt: skip
    pools = [paged(x, 4, torch.Generator().manual_seed(seed)) for x in parts[1:]]
    kinds.append(flash_attn.flash_attn_varlen_func(
        q, pools[0][0], pools[1][0], *arguments, return_attn_probs=True, block_table=pools[0][1],
        **ours))  # fmt: skip
    for o, lse, none in kinds:
        assert none is None
        close(o, np.concatenate([e[0][0] for e in expected]))
        close(lse, np.concatenate([e[1][0] for e in expected], 1))


def rotated(x, positions, cos, sin, interleaved):
    """x [s, h, d] in float64 for one position per row."""
    x, half = x.double().numpy().copy(), cos.shape[1]
    first = np.s_[..., 0 : 2 * half : 2] if interleaved else np.s_[..., :half]
    second = np.s_[..., 1 : 2 * half : 2] if interleaved else np.s_[..., half : 2 * half]
    c, s = (t.double().numpy()[positions][:, None] for t in (cos, sin))
    a, b = x[first].copy(), x[second].copy()
    x[first], x[second] = a * c - b * s, a * s + b * c
    return x


CACHES = st.fixed_dictionaries({
    "kind": st.sampled_from(["dense", "indexed", "paged"]), "s_new": st.sampled_from([None, 1, 3]),
    "s_q": st.sampled_from([1, 1, 3]), "number": st.booleans(), "num_splits": st.sampled_from([0, 1]),
    "rotary": st.sampled_from([None, True, False]), "page_size": st.sampled_from([1, 4, 16]),
    "lengths": st.lists(st.integers(0, 12), min_size=1, max_size=3), "group": st.sampled_from([1, 3]),
})  # fmt: skip


def make_cache(c, rows):
    """The cache of k (or v), and the arguments that say where its sequences are."""
    b, room = len(rows), 16
    full = [torch.cat([x, torch.full((room - len(x), *x.shape[1:]), torch.nan)]) for x in rows]
    if c["kind"] == "dense":
        return torch.stack(full), {}
    if c["kind"] == "indexed":
        where = torch.randperm(b + 2, generator=torch.Generator().manual_seed(b))[:b].int()
        cache = torch.full((b + 2, room, *rows[0].shape[1:]), torch.nan)
        cache[where.long()] = torch.stack(full)
        return cache, {"cache_batch_idx": where}
    pool, table = paged(full, c["page_size"], torch.Generator().manual_seed(b))
    return pool, {"block_table": table}


def sequence(c, cache, where, n):
    """The rows of sequence n in the cache."""
    if c["kind"] == "dense":
        return cache[n]
    if c["kind"] == "indexed":
        return cache[where["cache_batch_idx"][n]]
    table = where["block_table"][n]
    return cache[table[table >= 0].long()].flatten(0, 1)


@given(st.data(), CACHES, st.integers(0, 2**31))
def test_kvcache_is_the_formula(data, c, seed):
    torch.manual_seed(seed)
    lengths = [c["lengths"][0]] * len(c["lengths"]) if c["number"] else c["lengths"]
    b, h_k, d, s_new = len(lengths), 2, 16, c["s_new"]
    ours, theirs = data.draw(options(b, h_k * c["group"]))
    q = random(b, c["s_q"], h_k * c["group"], d)
    rows = [[random(n, h_k, d) for n in lengths] for _ in range(2)]
    (k_cache, where), (v_cache, _) = (make_cache(c, x) for x in rows)
    arguments = {"cache_seqlens": lengths[0] if c["number"] else int32(lengths), **where, **ours}
    rotary = c["rotary"] if s_new else None
    q_seen = [x.double().numpy() for x in q]
    if s_new:
        k, v = random(b, s_new, h_k, d), random(b, s_new, h_k, d)
        arguments |= {"k": k, "v": v}
        k_seen = [x.double().numpy() for x in k]
    if rotary is not None:
        angle = torch.rand(20, 4) * 6
        arguments |= {"rotary_cos": angle.cos(), "rotary_sin": angle.sin(), "rotary_interleaved": rotary}
        advance = ours["causal"] or ours["window_size"] != (-1, -1)
        turn = lambda x, at: rotated(x, at, angle.cos(), angle.sin(), rotary)  # noqa: E731
        q_seen = [turn(x, n + np.arange(len(x)) * advance) for n, x in zip(lengths, q)]
        k_seen = [turn(x, n + np.arange(len(x))) for n, x in zip(lengths, k)]
    before = k_cache.clone(), v_cache.clone()
    o, lse = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, num_splits=c["num_splits"], return_softmax_lse=True, **arguments)  # fmt: skip
    for n, length in enumerate(lengths):
        keys, values = (x[n].double().numpy() for x in rows)
        if s_new:
            keys, values = np.concatenate([keys, k_seen[n]]), np.concatenate([values, v[n].numpy()])
        expected = oracle.attention(q_seen[n][None], keys[None], values[None], **one(theirs, n))
        close(o[n], expected[0][0])
        close(lse[n], expected[1][0])
        for cache, old, written in ((k_cache, before[0], keys), (v_cache, before[1], values)):
            now, then = sequence(c, cache, where, n), sequence(c, old, where, n)
            close(now[: len(written)], written, rtol=1e-6, atol=1e-6)
            assert torch.equal(now[len(written) :].isnan(), then[len(written) :].isnan())
    if not s_new:
        for cache, old in zip((k_cache, v_cache), before):
            assert torch.equal(cache.nan_to_num(9), old.nan_to_num(9))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (9, 9)}])
def test_queries_are_rotated_for_one_position_unless_there_is_a_mask(options):
    torch.manual_seed(5)
    q, k, v, angle = random(1, 3, 2, 8), random(1, 3, 2, 8), random(1, 3, 2, 8), torch.rand(8, 4) * 6
    cos, sin = angle.cos(), angle.sin()
    caches = torch.zeros(2, 1, 8, 2, 8).unbind(0)
    o = flash_attn.flash_attn_with_kvcache(q, *caches, k, v, cos, sin, cache_seqlens=0, **options)
    places = np.arange(3) * bool(options)
    turned = rotated(q[0], places, cos, sin, True), rotated(k[0], np.arange(3), cos, sin, True)
    close(o, oracle.attention(*(x[None] for x in turned), v, causal="causal" in options)[0])


def test_caches_are_without_gradients():
    q, new = random(1, 2, 2, 8, grad=True), random(1, 2, 2, 8, grad=True)
    caches, angle = torch.zeros(2, 1, 8, 2, 8).unbind(0), torch.rand(8, 2)
    o, lse = flash_attn.flash_attn_with_kvcache(
        q, *caches, new, new, angle.cos(), angle.sin(), cache_seqlens=0, return_softmax_lse=True)  # fmt: skip
    assert not (o.requires_grad or lse.requires_grad or caches[0].requires_grad)


def test_the_whole_cache_is_the_default():
    torch.manual_seed(1)
    q, k, v = random(2, 1, 4, 8), random(2, 9, 2, 8), random(2, 9, 2, 8)
    expected = oracle.attention(q, k, v, causal=True)[0]
    close(flash_attn.flash_attn_with_kvcache(q, k, v, causal=True), expected)
    larger = (torch.cat([x, torch.full_like(x, torch.nan)]) for x in (k, v))
    close(flash_attn.flash_attn_with_kvcache(q, *larger, causal=True), expected)
    pages = {"block_table": int32([[0, 1, 2], [3, 4, 5]])}
    k, v = k.reshape(6, 3, 2, 8), v.reshape(6, 3, 2, 8)
    close(flash_attn.flash_attn_with_kvcache(q, k, v, causal=True, **pages), expected)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_half_types_and_their_rotary_tables(kind):
    torch.manual_seed(2)
    q, k, v = (random(2, 3, 2, 16).to(kind) for _ in range(3))
    caches = [torch.zeros(2, 8, 2, 16, dtype=kind) for _ in range(2)]
    angle = torch.rand(8, 8)
    cos, sin = angle.cos().to(kind), angle.sin().to(kind)
    o = flash_attn.flash_attn_with_kvcache(q, *caches, k, v, cos, sin, cache_seqlens=0, causal=True)
    turned = [np.stack([rotated(x[n], np.arange(3), cos, sin, True) for n in range(2)]) for x in (q, k)]
    assert o.dtype is kind
    close(o, oracle.attention(*turned, v.double(), causal=True)[0], rtol=0.02, atol=0.02)


def test_gradients_of_every_form():
    torch.manual_seed(3)
    qkv, d_o = random(2, 6, 3, 2, 8, grad=True), random(2, 6, 2, 8)
    q, k, v = (x.detach().requires_grad_() for x in qkv.unbind(2))
    score = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / 8**0.5
    score = score.masked_fill(torch.ones(6, 6).tril().logical_not(), -torch.inf)
    expected = torch.einsum("bhij,bjhd->bihd", score.softmax(-1), v.double())
    expected = torch.stack(torch.autograd.grad(expected, (q, k, v), d_o.double()), 2)
    kv, cu = qkv[:, :, 1:], int32([0, 6, 12])
    flat = qkv.flatten(0, 1)
    forms = [
        flash_attn.flash_attn_qkvpacked_func(qkv, causal=True),
        flash_attn.flash_attn_kvpacked_func(qkv[:, :, 0], kv, causal=True),
        flash_attn.flash_attn_func(*qkv.unbind(2), causal=True),
        flash_attn.flash_attn_varlen_qkvpacked_func(flat, cu, 6, causal=True),
        flash_attn.flash_attn_varlen_kvpacked_func(flat[:, 0], flat[:, 1:], cu, cu, 6, 6, causal=True),
        flash_attn.flash_attn_varlen_func(*flat.unbind(1), cu, cu, 6, 6, causal=True),
    ]
    for o in forms:
        close(torch.autograd.grad(o, qkv, d_o.reshape(o.shape))[0], expected.detach().numpy())


def test_dropout_keeps_the_mean_and_follows_the_seed():
    q, k, v = random(1, 64, 4, 8), random(1, 64, 4, 8), torch.ones(1, 64, 4, 8)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(flash_attn.flash_attn_func(q, k, v, 0.25))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    # Sums of 64 weights, each kept with probability 3/4 and raised by 4/3: 1 on average.
    assert abs(results[0].mean() - 1) < 0.02 and results[0].std() > 0.02


def cache_call(**changed):
    x = torch.ones(1, 2, 1, 8)
    arguments = {"q": x, "k_cache": torch.zeros(1, 4, 1, 8), "v_cache": torch.zeros(1, 4, 1, 8),
                 "k": x, "v": x, "cache_seqlens": 1, **changed}  # fmt: skip
    arguments = {name: value for name, value in arguments.items() if value is not None}
    flash_attn.flash_attn_with_kvcache(**arguments)


TABLE = {"block_table": int32([[0, 1]]), "k_cache": torch.zeros(2, 2, 1, 8),
         "v_cache": torch.zeros(2, 2, 1, 8)}  # fmt: skip
BAD_CACHE_CALLS = [
    (NotImplementedError, "cache_leftpad", {"cache_leftpad": int32([1])}),
    (NotImplementedError, "num_splits", {"num_splits": 4}),
    (ValueError, "v: is missing", {"v": None}),
    (ValueError, "k: is missing", {"k": None}),
    (ValueError, "cache_seqlens: is missing", {"cache_seqlens": None}),
    (ValueError, "cache_seqlens", {"cache_seqlens": 3}),  # the cache is full
    (ValueError, "cache_seqlens", {"cache_seqlens": int32([1, 1])}),
    (ValueError, "cache_seqlens", {"cache_seqlens": int32([-1])}),
    (TypeError, "cache_seqlens", {"cache_seqlens": torch.tensor([1])}),
    (TypeError, "cache_seqlens: is 'a'", {"cache_seqlens": "a"}),
    (TypeError, "k_cache: has type torch.float32", {"q": torch.ones(1, 2, 1, 8).half()}),
    (TypeError, "v: has type torch.float16", {"v": torch.ones(1, 2, 1, 8).half()}),
    (ValueError, "cache_batch_idx", {"cache_batch_idx": int32([1])}),
    (ValueError, "cache_batch_idx", {"cache_batch_idx": int32([0]), **TABLE}),
    (ValueError, "k_cache", {"k_cache": torch.zeros(1, 4, 1, 4)}),
    (ValueError, "k_cache", {"k_cache": torch.zeros(1, 4, 2, 8)}),
    (ValueError, "v_cache", {"v_cache": torch.zeros(1, 5, 1, 8)}),
    (ValueError, "k", {"k": torch.ones(1, 2, 1, 4), "v": torch.ones(1, 2, 1, 4)}),
    (ValueError, "q: has 3 axes", {"q": torch.ones(2, 1, 8)}),
    (TypeError, "window_size", {"window_size": 3}),
    (ValueError, "softcap", {"softcap": -1.0}),  # what attention alone refuses
    (ValueError, "k_cache", {"q": torch.ones(1, 2, 1, 4)}),
    (ValueError, "alibi_slopes", {"alibi_slopes": torch.ones(2)}),
    (NotImplementedError, "q: is on meta", {"q": torch.ones(1, 2, 1, 8, device="meta")}),
    (ValueError, "rotary_sin: is missing", {"rotary_cos": torch.ones(9, 2)}),
    (ValueError, "cache_seqlens.*rotary", {"rotary_cos": torch.ones(2, 2),
                                           "rotary_sin": torch.ones(2, 2)}),
    (ValueError, "rotary_cos", {"rotary_cos": torch.ones(9, 5), "rotary_sin": torch.ones(9, 5)}),
    (ValueError, "k: is missing", {"rotary_cos": torch.ones(9, 2), "rotary_sin": torch.ones(9, 2),
                                   "k": None, "v": None}),
    (ValueError, "block_table", {**TABLE, "block_table": int32([[0, 9]])}),
    (ValueError, "block_table", {**TABLE, "block_table": int32([[0, 1], [0, 1]])}),
]  # fmt: skip


@pytest.mark.parametrize("kind, message, changed", BAD_CACHE_CALLS)
def test_refusals_name_the_argument_and_write_nothing(kind, message, changed):
    caches = {name: torch.zeros_like(changed.get(name, torch.zeros(1, 4, 1, 8)))
              for name in ("k_cache", "v_cache")}  # fmt: skip
    with pytest.raises(kind, match=f"^{message}"):
        cache_call(**{**changed, **caches})
    assert all((cache == 0).all() for cache in caches.values())


def test_one_split_keeps_the_bits_of_a_sequence_in_any_batch():
    torch.manual_seed(7)
    q, k, v = random(4, 1, 2, 16), random(4, 5000, 1, 16), random(4, 5000, 1, 16)
    equal = []
    for splits in (0, 1):
        together = flash_attn.flash_attn_with_kvcache(q, k, v, num_splits=splits)
        alone = flash_attn.flash_attn_with_kvcache(q[:1], k[:1], v[:1], num_splits=splits)
        close(together, oracle.attention(q, k, v)[0])
        equal.append(torch.equal(together[:1], alone))
    assert equal == [False, True]  # without a promise the splits follow from the batch, too


def test_a_page_that_is_not_there_is_found():
    with pytest.raises(ValueError, match="^block_table"):
        cache_call(**{**TABLE, "block_table": int32([[5, 1]]), "k": None, "v": None, "cache_seqlens": 4})


def test_rows_of_the_cache_must_be_distinct_to_be_written():
    x, caches = torch.ones(2, 1, 1, 8), [torch.zeros(3, 4, 1, 8) for _ in range(2)]
    twice = {"cache_batch_idx": int32([1, 1]), "cache_seqlens": 1}
    flash_attn.flash_attn_with_kvcache(x, *caches, **twice)
    with pytest.raises(ValueError, match="^cache_batch_idx"):
        flash_attn.flash_attn_with_kvcache(x, *caches, x, x, **twice)


def test_other_refusals():
    x = torch.ones(1, 2, 1, 8, requires_grad=True)
    with pytest.raises(NotImplementedError, match="^return_attn_probs"):
        flash_attn.flash_attn_func(x, x, x, dropout_p=0.1, return_attn_probs=True)
    for other in ("k", "v"):
        with pytest.raises(TypeError, match=f"^{other}: has type torch.float16, must be that of q"):
            flash_attn.flash_attn_func(**{**dict.fromkeys("qkv", x), other: x.half()})
    with pytest.raises(ValueError, match="^qkv: has shape"):
        flash_attn.flash_attn_qkvpacked_func(x)
    with pytest.raises(TypeError, match="^softmax_scale"):
        flash_attn.flash_attn_func(x, x, x, softmax_scale="big")
    with pytest.raises(NotImplementedError, match="^block_table: gradients"):
        flash_attn.flash_attn_varlen_func(x[0], x, x, int32([0, 2]), int32([0, 2]), 2, 2,
                                          block_table=int32([[0]]))  # fmt: skip


def test_pages_that_have_left_the_window_may_be_gone():
    torch.manual_seed(6)
    q, k, v = random(1, 1, 2, 8), random(1, 20, 2, 8), random(1, 20, 2, 8)
    table = int32([[-1, 99, -1, 3, 4]])  # the last query sees keys 12 to 19, of pages of 4
    pools = [x.reshape(5, 4, 2, 8).clone() for x in (k, v)]
    for pool in pools:
        pool[:3] = torch.nan
    o = flash_attn.flash_attn_with_kvcache(q, *pools, block_table=table, cache_seqlens=20, window_size=(7, 0))
    close(o, oracle.attention(q, k, v, window=(7, 0))[0])
