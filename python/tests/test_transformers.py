"""Small random models of transformers give the results of their eager attention."""

import inspect

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import abacist.compat.transformers as compat  # noqa: E402
from abacist.compat import _mask_window  # noqa: E402

SIZES = dict(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, head_dim=8, pad_token_id=0,
             initializer_range=0.3)  # scores of order 1, so that masks and softcap tell  # fmt: skip
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def llama(**more):
    return transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES, **more)


def gemma(**more):
    """Softcap, and a sliding window in every other layer."""
    return transformers.Gemma2ForCausalLM, transformers.Gemma2Config(
        **SIZES, sliding_window=4, attn_logit_softcapping=1.0, **more)  # fmt: skip


def gpt_oss(**more):
    """Sinks, and a sliding window in every other layer."""
    return transformers.GptOssForCausalLM, transformers.GptOssConfig(
        **SIZES, sliding_window=4, num_local_experts=2, num_experts_per_tok=1, **more)  # fmt: skip


def mistral(**more):
    return transformers.MistralForCausalLM, transformers.MistralConfig(**SIZES, sliding_window=4, **more)


def pair(kind, **more):
    """One model with eager attention and one with ours, of the same weights."""
    compat.register()
    torch.manual_seed(1)
    models = []
    for implementation in ("eager", "abacist"):
        model, config = kind(attn_implementation=implementation, **more)
        models.append(model(config).eval())
    if kind is gpt_oss:
        for layer in models[0].model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    models[1].load_state_dict(models[0].state_dict())
    assert models[1].config._attn_implementation == "abacist"
    return models


@pytest.fixture(params=[llama, gemma, gpt_oss, mistral], scope="module")
def models(request):
    return pair(request.param)


@pytest.fixture(params=["masks alone", "masks and their windows"])
def windows(request, monkeypatch):
    if request.param != "masks alone":
        monkeypatch.setattr(_mask_window, "SMALLEST", 0)


def test_logits_and_gradients(models, windows):
    torch.manual_seed(2)
    tokens, results = torch.randint(1, 50, (2, 11)), []
    for model in models:
        model.zero_grad()
        logits = model(tokens).logits
        logits.square().mean().backward()
        results.append((logits, *(p.grad for p in model.parameters() if p.grad is not None)))
    assert len(results[0]) == len(results[1]) > 10
    for x, y in zip(*results):
        torch.testing.assert_close(x, y, **CLOSE)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch(models, side, windows):
    torch.manual_seed(3)
    tokens, mask = torch.randint(1, 50, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[0, slice(0, 4) if side == "left" else slice(5, 9)] = 0
    with torch.no_grad():
        x, y = (model(tokens, attention_mask=mask).logits for model in models)
    torch.testing.assert_close(x[mask.bool()], y[mask.bool()], **CLOSE)


@pytest.mark.parametrize("form", ["bool", "float", "infinite"])
def test_a_callers_own_4d_mask(form):
    eager, ours = pair(llama)
    torch.manual_seed(4)
    tokens, seen = torch.randint(1, 50, (2, 9)), (torch.rand(2, 1, 9, 9) < 0.6) | torch.eye(9).bool()
    floats = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    mask = {"bool": seen, "float": floats, "infinite": floats.masked_fill(~seen, -torch.inf)}[form]
    with torch.no_grad():
        x, y = eager(tokens, attention_mask=floats).logits, ours(tokens, attention_mask=mask).logits
        causal = ours(tokens).logits
    torch.testing.assert_close(x, y, **CLOSE)
    assert not torch.allclose(y, causal, atol=1e-3)


@pytest.mark.parametrize("padding", [0, 2])  # 0: no mask, though a static cache has more keys
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_decoding(models, cache, padding, windows):
    torch.manual_seed(5)
    tokens, mask = torch.randint(1, 50, (2, 5)), torch.ones(2, 5, dtype=torch.long)
    mask[0, :padding] = 0
    options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False,
               "attention_mask": mask, "cache_implementation": cache}  # fmt: skip
    x, y = (m.generate(tokens, disable_compile=True, **options) for m in models)
    assert torch.equal(x, y)


def test_a_prompt_in_pieces(models, windows):
    """Several queries behind a cache stand at its end (bottom-right), though s_q != s_k."""
    torch.manual_seed(6)
    tokens, results = torch.randint(1, 50, (1, 12)), []
    known = inspect.signature(models[0].forward).parameters
    name = "cache" if "cache" in known else "past_key_values"  # of older versions
    for model in models:
        cache, parts = {name: transformers.DynamicCache(config=model.config)}, []
        with torch.no_grad():
            for piece in tokens.split([5, 1, 6], 1):
                parts.append(model(piece, use_cache=True, **cache).logits)
        results.append(torch.cat(parts, 1))
    torch.testing.assert_close(*results, **CLOSE)


def test_the_whole_model_is_one_graph():
    _, ours = pair(llama)
    tokens, mask = torch.randint(1, 50, (2, 7)), torch.ones(2, 7, dtype=torch.long)
    mask[0, :2] = 0
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        x, y = (m(tokens, attention_mask=mask, use_cache=False).logits for m in (ours, compiled))
    assert torch.equal(x[mask.bool()], y[mask.bool()])


def test_dropout_in_training_only():
    eager, ours = pair(llama, attention_dropout=0.5)
    tokens = torch.randint(1, 50, (1, 11))
    with torch.no_grad():
        torch.testing.assert_close(eager(tokens).logits, ours(tokens).logits, **CLOSE)
        ours.train()
        results = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            results.append(ours(tokens).logits)
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


def test_an_encoder_with_padding():
    def bert(**more):
        return transformers.BertModel, transformers.BertConfig(
            vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, **more)  # fmt: skip

    eager, ours = pair(bert)
    tokens, mask = torch.randint(1, 50, (3, 9)), torch.ones(3, 9, dtype=torch.long)
    mask[0, 4:] = mask[1, :2] = 0
    with torch.no_grad():
        x, y = (m(tokens, attention_mask=mask).last_hidden_state for m in (eager, ours))
    torch.testing.assert_close(x[mask.bool()], y[mask.bool()], **CLOSE)


def vit(**more):
    return transformers.ViTModel, transformers.ViTConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=32,
        patch_size=8, **more)  # fmt: skip


def modernbert(**more):
    """Windows to both sides in all but every third layer."""
    return transformers.ModernBertModel, transformers.ModernBertConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        local_attention=6, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1,
        sep_token_id=2, **more)  # fmt: skip


def bart(**more):
    """Encoder, decoder, attention across."""
    return transformers.BartModel, transformers.BartConfig(
        vocab_size=50, d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48, encoder_layers=2,
        decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, **more)  # fmt: skip


def deepseek(**more):
    """Heads of q and k that are wider than those of v."""
    sizes = {**SIZES, "num_key_value_heads": 4}
    del sizes["head_dim"]
    return transformers.DeepseekV3ForCausalLM, transformers.DeepseekV3Config(
        **sizes, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=10,
        first_k_dense_replace=2, **more)  # fmt: skip


@pytest.mark.parametrize("kind", [vit, modernbert, bart, deepseek])
def test_other_kinds_of_models(kind, monkeypatch):
    models, calls, original = pair(kind), [], compat.attention
    monkeypatch.setattr(compat, "attention", lambda *x, **more: (calls.append(1), original(*x, **more))[1])
    torch.manual_seed(7)
    inputs = {"input_ids": torch.randint(3, 50, (2, 15)), "attention_mask": torch.ones(2, 15).long()}
    if kind is vit:
        inputs = {"pixel_values": torch.randn(2, 3, 32, 32)}
    elif kind is not deepseek:
        inputs["attention_mask"][1, 9:] = 0
    with torch.no_grad():
        x, y = (model(**inputs)[0] for model in models)
    seen = inputs["attention_mask"].bool() if kind is modernbert else ...
    torch.testing.assert_close(x[seen], y[seen], **CLOSE)
    assert len(calls) == {vit: 2, modernbert: 3, bart: 6, deepseek: 2}[kind]


def test_bfloat16(windows):
    """As far from float32 as eager attention in bfloat16 is."""
    models = pair(llama)
    torch.manual_seed(9)
    tokens, mask = torch.randint(1, 50, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    with torch.no_grad():
        exact = models[0](tokens, attention_mask=mask).logits[mask.bool()]
        x, y = (m.to(torch.bfloat16)(tokens, attention_mask=mask).logits[mask.bool()] for m in models)
    assert y.dtype is torch.bfloat16
    assert (y - exact).norm() < 1.5 * (x - exact).norm() < 0.05 * exact.norm()


def test_relative_positions_and_cross_attention():
    def t5(**more):
        return transformers.T5ForConditionalGeneration, transformers.T5Config(
            vocab_size=50, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
            decoder_start_token_id=0, **more)  # fmt: skip

    models, results = pair(t5), []
    tokens, mask = torch.randint(2, 50, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[0, 5:] = 0
    for model in models:
        logits = model(tokens, attention_mask=mask, labels=tokens[:, :7].contiguous()).logits
        logits.square().mean().backward()
        bias = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
        results.append((logits, bias.grad, *model.generate(tokens, max_new_tokens=8, do_sample=False)))
    for x, y in zip(*results):
        torch.testing.assert_close(x, y, **CLOSE)


def test_heads_are_not_repeated(monkeypatch):
    """Keys and values reach the library as the cache has them, in place."""
    q, kv, seen = torch.randn(1, 6, 3, 8), torch.randn(1, 2, 5, 8), []
    original = compat.attention
    monkeypatch.setattr(compat, "attention", lambda q, k, v, **more: (
        seen.append((k.shape, k.data_ptr(), v.data_ptr())), original(q, k, v, **more))[1])  # fmt: skip
    o, none = compat._forward(torch.nn.Module(), q, kv, kv, is_causal=False,
                              s_aux=torch.zeros(6, dtype=torch.bfloat16))  # fmt: skip
    repeated = kv.repeat_interleave(3, 1)
    p = torch.cat([q @ repeated.mT / 8**0.5, torch.zeros(1, 6, 3, 1)], -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(o, (p @ repeated).transpose(1, 2), **CLOSE)
    assert none is None and seen == [((1, 5, 2, 8), kv.data_ptr(), kv.data_ptr())]


def show(s_q, s_k, rule):
    """A mask [1, 1, s_q, s_k] of a rule of query and key."""
    return rule(torch.arange(s_q)[:, None], torch.arange(s_k))[None, None]


MASKS = [  # and the window that is looked for
    (show(9, 9, lambda i, j: j <= i), (8, 0), "top-left"),
    (show(9, 9, lambda i, j: (j <= i) & (j > i - 3)), (2, 0), "top-left"),
    (show(9, 9, lambda i, j: (j <= i) & (j > 3)), (4, 0), "top-left"),  # padding, rows that see nothing
    (show(4, 20, lambda i, j: j <= i), (3, 0), "top-left"),  # a static cache that is filled
    (show(4, 20, lambda i, j: j <= i + 16), (3, 16), "top-left"),  # behind a cache
    (show(4, 20, lambda i, j: (j <= i + 16) & (j > i + 13)), (2, 0), "bottom-right"),
    (show(9, 9, lambda i, j: (j >= i) & (j < i + 0)), None, None),
    (show(9, 9, lambda i, j: j <= i).repeat(2, 3, 1, 1), (8, 0), "top-left"),
]  # fmt: skip


@pytest.mark.parametrize("mask, window, align", MASKS)
def test_the_window_of_a_mask(monkeypatch, mask, window, align):
    monkeypatch.setattr(_mask_window, "SMALLEST", 0)
    found = _mask_window.window_of(mask, mask.shape[3])
    assert found == ({} if window is None else {"window": window, "align": align})
    torch.manual_seed(8)
    b, _, s_q, s_k = mask.shape
    q, k, v = torch.randn(b, 3, s_q, 8), torch.randn(b, 3, s_k, 8), torch.randn(b, 3, s_k, 8)
    expected = torch.nan_to_num(torch.where(mask, q @ k.mT / 8**0.5, -torch.inf).softmax(-1)) @ v
    o, _ = compat._forward(torch.nn.Module(), q, k, v, attention_mask=mask)
    torch.testing.assert_close(o.transpose(1, 2), expected, **CLOSE)


def test_the_window_is_looked_for_once_and_again_after_a_change(monkeypatch):
    looks, look = [], _mask_window._look
    monkeypatch.setattr(_mask_window, "_look", lambda mask: (looks.append(1), look(mask))[1])
    mask = show(4, 300, lambda i, j: j <= i)
    assert _mask_window.window_of(mask, 300) == _mask_window.window_of(mask, 300)
    assert len(looks) == 1
    mask[0, 0, 0, 5] = True
    assert _mask_window.window_of(mask, 300)["window"] == (3, 5) and len(looks) == 2
    assert _mask_window.window_of(mask, 260)["window"] == (3, 5) and len(looks) == 3
    assert _mask_window.window_of(mask, 255) == {} == _mask_window.window_of(mask[:, :, :1], 300)
    assert _mask_window.window_of(mask[:, :, :1].expand(-1, -1, 4, -1), 300) == {} and len(looks) == 3
    with torch.inference_mode():
        other = show(4, 300, lambda i, j: j <= i)
        assert _mask_window.window_of(other, 300)["window"] == (3, 0) and len(looks) == 4
        other[0, 0, 0, 5] = True
        assert _mask_window.window_of(other, 300)["window"] == (3, 5) and len(looks) == 5
    count = len(_mask_window._found)
    del mask
    assert len(_mask_window._found) == count - 2  # nothing is kept of masks that are gone


@pytest.mark.parametrize("form", ["none", "bool", "float", "bfloat16"])
def test_relative_positions_beside_masks(form):
    torch.manual_seed(10)
    q, k, v = torch.randn(3, 2, 4, 5, 8).unbind(0)
    bias, seen = torch.randn(1, 4, 5, 5), torch.rand(2, 1, 5, 5) < 0.7
    floats = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    mask = {"none": None, "bool": seen, "float": floats, "bfloat16": floats.bfloat16()}[form]
    added = bias + (floats if form != "none" else 0)
    p = torch.nan_to_num((q @ k.mT / 8**0.5 + added).softmax(-1))
    o, _ = compat._forward(torch.nn.Module(), q, k, v, attention_mask=mask, position_bias=bias,
                           is_causal=False)  # fmt: skip
    torch.testing.assert_close(o.transpose(1, 2), p @ v, **CLOSE)


@pytest.mark.parametrize("kind, message, changed", [
    (NotImplementedError, "output_attentions", {"output_attentions": True}),
    (NotImplementedError, "head_mask", {"head_mask": torch.ones(4)}),
    (NotImplementedError, "sinks", {"sinks": torch.ones(1, 4, 3, 1)}),
    (NotImplementedError, "block_indices", {"block_indices": torch.ones(1)}),
    (NotImplementedError, "attention_mask: is a str", {"attention_mask": "causal"}),
    (ValueError, r"attention_mask: has shape \(1, 3\)", {"attention_mask": torch.ones(1, 3).bool()}),
    (ValueError, "attention_mask: has shape", {"attention_mask": torch.ones(1, 1, 3, 2).bool()}),
    (TypeError, "attention_mask: has type torch.int64", {"attention_mask": torch.ones(1, 1, 3, 3).long()}),
    (ValueError, "attention_mask", {"attention_mask": torch.ones(1, 1, 2, 3).bool()}),
    (ValueError, "position_bias", {"position_bias": torch.ones(4, 3, 3)}),
    (ValueError, "s_aux", {"s_aux": torch.ones(3)}),
    (TypeError, "scaling", {"scaling": "big"}),
    (ValueError, "dropout", {"dropout": 1.5}),
])  # fmt: skip
def test_what_cannot_be_done_is_refused(kind, message, changed):
    x = torch.randn(1, 4, 3, 8)
    with pytest.raises(kind, match=f"^{message}"):
        compat._forward(torch.nn.Module(), x, x, x, **changed)
