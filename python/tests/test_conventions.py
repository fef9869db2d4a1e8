"""The table of conventions on the first page of docs/python.md, row by row, on numbers."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import abacist  # noqa: E402
from abacist.compat import flash_attn, sdpa  # noqa: E402
from abacist.compat.transformers import _forward  # noqa: E402

HEADS_FIRST = {"sdpa", "transformers"}


def call(name, q, k, v, training=False, **more):
    """A function of the table on operands [b, s, h, d]; o as [b, s, h, d]."""
    if name in HEADS_FIRST:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if name == "attention":
        return abacist.attention(q, k, v, **more)
    if name == "flash_attn":
        return flash_attn.flash_attn_func(q, k, v, **more)
    if name == "sdpa":
        return sdpa(q, k, v, **more).transpose(1, 2)
    return _forward(torch.nn.Module().train(training), q, k, v, **{"is_causal": False, **more})[0]


ALL = ["attention", "sdpa", "flash_attn", "transformers"]


def equal_scores(s_q, s_k, h=1):
    """Queries of 0, so that o is the mean of the visible v; v marks the keys by powers of 2."""
    v = (2.0 ** torch.arange(s_k))[None, :, None, None].expand(1, s_k, h, 1)
    return torch.zeros(1, s_q, h, 1), torch.zeros(1, s_k, h, 1), v


def rows(o):
    return o[0, :, 0, 0].tolist()


@pytest.mark.parametrize("name, option", [
    ("attention", "causal"), ("flash_attn", "causal"), ("sdpa", "is_causal"), ("transformers", "is_causal")])
def test_causal_alignment(name, option):  # fmt: skip
    x = equal_scores(2, 4)
    top_left, bottom_right = [1, 3 / 2], [7 / 3, 15 / 4]
    assert rows(call(name, *x, **{option: True})) == pytest.approx(
        bottom_right if name in ("attention", "flash_attn") else top_left)  # fmt: skip


def test_alignment_and_layout_of_attention():
    q, k, v = equal_scores(2, 4)
    o = abacist.attention(q, k, v, causal=True, align="top-left")
    assert rows(o) == pytest.approx([1, 3 / 2])
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    o = abacist.attention(*heads_first, causal=True, layout="bhsd")
    assert rows(o.transpose(1, 2)) == pytest.approx([7 / 3, 15 / 4])


def test_windows_include_both_ends():
    x = equal_scores(4, 4)
    middle, left = [(1 + 2) / 2, 7 / 3, 14 / 3, 12 / 2], [1, 3 / 2, 6 / 2, 12 / 2]
    assert rows(call("attention", *x, window=(1, 1))) == pytest.approx(middle)
    assert rows(call("flash_attn", *x, window_size=(1, 1))) == pytest.approx(middle)
    assert rows(call("attention", *x, window=(1, 0))) == pytest.approx(left)
    assert rows(call("flash_attn", *x, window_size=(1, 0))) == pytest.approx(left)
    unbounded = [15 / 4, 15 / 4, 14 / 3, 12 / 2]
    assert rows(call("attention", *x, window=(1, None))) == pytest.approx(unbounded)
    assert rows(call("flash_attn", *x, window_size=(1, -1))) == pytest.approx(unbounded)


def test_sliding_window_of_transformers_counts_the_query():
    masking = pytest.importorskip("transformers.masking_utils", reason="transformers is not installed")
    seen = masking.sdpa_mask(batch_size=1, q_length=4, kv_length=4, allow_is_causal_skip=False,
                             mask_function=masking.sliding_window_causal_mask_function(2))  # fmt: skip
    x = equal_scores(4, 4)
    expected = call("attention", *x, window=(1, 0))
    assert torch.equal(call("transformers", *x, attention_mask=seen), expected)


def test_masks():
    q, k, v = equal_scores(1, 2)
    for name, boolean, floats in (("attention", "mask", "bias"), ("sdpa", "attn_mask", "attn_mask"),
                                  ("transformers", "attention_mask", "attention_mask")):  # fmt: skip
        seen = torch.tensor([[[[False, True]]]])
        assert rows(call(name, q, k, v, **{boolean: seen})) == [2]  # true: takes part
        hides = torch.tensor([[[[-torch.inf, 0.0]]]])
        assert rows(call(name, q, k, v, **{floats: hides})) == [2]
        third = torch.tensor([[[[1.0, 2.0]]]]).log()  # not scaled: weights 1/3 and 2/3
        scale = {"transformers": "scaling"}.get(name, "scale")
        o = call(name, q, k, v, **{floats: third, scale: 7.0})
        assert rows(o) == pytest.approx([5 / 3])
    other = torch.nn.MultiheadAttention(2, 1)
    _, weights = other(*torch.ones(3, 2, 2), attn_mask=torch.tensor([[False, True], [False, False]]))
    assert weights[0].tolist() == [1, 0]  # there, true hides


@pytest.mark.parametrize("name", ALL)
def test_default_scale_and_softcap(name):
    torch.manual_seed(1)
    q, k, v = torch.randn(3, 1, 5, 2, 16).unbind(0)
    scale = "softmax_scale" if name == "flash_attn" else "scaling" if name == "transformers" else "scale"
    assert torch.equal(call(name, q, k, v), call(name, q, k, v, **{scale: 0.25}))
    if name == "sdpa":
        with pytest.raises(TypeError, match="softcap"):
            call(name, q, k, v, softcap=2.0)
        return
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 4
    expected = torch.einsum("bhij,bjhd->bihd", (2 * (scores / 2).tanh()).softmax(-1), v)
    torch.testing.assert_close(call(name, q, k, v, softcap=2.0), expected)
    assert torch.equal(call(name, q, k, v, softcap=0.0), call(name, q, k, v))


@pytest.mark.parametrize("name", ALL)
def test_dropout(name):
    x, option = equal_scores(4, 4), "dropout" if name == "transformers" else "dropout_p"
    dropped = call(name, *x, training=True, **{option: 1.0})
    assert rows(dropped) == [0] * 4
    evaluated = rows(call(name, *x, training=False, **{option: 1.0}))
    assert evaluated == ([15 / 4] * 4 if name == "transformers" else [0] * 4)


@pytest.mark.parametrize("name", ALL)
def test_fewer_heads_in_k_and_v(name):
    q, (_, k, v) = torch.zeros(1, 1, 4, 1), equal_scores(1, 3, 2)
    if name == "sdpa":
        with pytest.raises(ValueError, match="^key"):
            call(name, q, k, v)
        assert call(name, q, k, v, enable_gqa=True).shape == (1, 1, 4, 1)
    else:
        assert rows(call(name, q, k, v)) == pytest.approx([7 / 3])


def test_lse_and_rows_without_keys():
    x = equal_scores(3, 2)
    nothing = torch.zeros(1, 1, 3, 2, dtype=torch.bool)
    o, lse = abacist.attention(*x, causal=True, return_lse=True)
    ours = flash_attn.flash_attn_func(*x, causal=True, return_attn_probs=True)
    assert ours[2] is None and torch.equal(ours[0], o) and torch.equal(ours[1], lse)
    assert rows(o)[0] == 0 and lse.shape == (1, 1, 3) and lse.dtype is torch.float32
    assert lse[0, 0].tolist() == pytest.approx([-torch.inf, 0, 0.6931472])
    dropped = abacist.attention(*x, causal=True, return_lse=True, dropout_p=0.9, seed=1)[1]
    assert torch.equal(dropped, lse)
    assert rows(call("sdpa", *x, attn_mask=nothing)) == [0] * 3
    assert rows(call("transformers", *x, attention_mask=nothing)) == [0] * 3


@pytest.mark.parametrize("name, options", [
    ("sdpa", {"attn_mask": torch.ones(5, 5).tril().bool()}),
    ("flash_attn", {"causal": True, "window_size": (3, -1)})])  # fmt: skip
def test_one_graph_under_compile(name, options):
    q, k, v = torch.randn(3, 2, 5, 4, 8).unbind(0)
    compiled = torch.compile(lambda q, k, v: call(name, q, k, v, **options), fullgraph=True,
                             backend="aot_eager")  # fmt: skip
    assert torch.equal(compiled(q, k, v), call(name, q, k, v, **options))
