"""Small random models of transformers give the logits and gradients of their eager attention."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from abacist.compat.transformers import register  # noqa: E402

SIZES = dict(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, head_dim=8, pad_token_id=0)  # fmt: skip


def llama(implementation):
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, attn_implementation=implementation))  # fmt: skip


def gemma(implementation):
    # Softcap, and a sliding window in every other layer.
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(
        **SIZES, sliding_window=4, attn_logit_softcapping=5.0, attn_implementation=implementation))  # fmt: skip


@pytest.fixture(params=[llama, gemma])
def models(request):
    register()
    torch.manual_seed(1)
    eager = request.param("eager")
    ours = request.param("abacist")
    ours.load_state_dict(eager.state_dict())
    return eager.eval(), ours.eval()


def test_logits_and_gradients(models):
    tokens, results = torch.randint(1, 50, (2, 11)), []
    for model in models:
        logits = model(tokens).logits
        logits.square().mean().backward()
        results.append((logits, *(p.grad for p in model.parameters())))
    for x, y in zip(*results):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_a_padded_batch(models):
    tokens, mask = torch.randint(1, 50, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    with torch.no_grad():
        x, y = (model(tokens, attention_mask=mask).logits for model in models)
    torch.testing.assert_close(x[0, 4:], y[0, 4:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(x[1], y[1], rtol=1e-4, atol=1e-5)


def test_greedy_decoding(models):
    tokens = torch.randint(1, 50, (1, 5))
    x, y = (m.generate(tokens, max_new_tokens=20, min_new_tokens=20, do_sample=False) for m in models)
    assert torch.equal(x, y)


def test_it_is_ours_that_runs_and_weights_are_refused(models):
    with pytest.raises(NotImplementedError, match="output_attentions"):
        models[1].model.layers[0].self_attn(
            torch.randn(1, 3, 32), position_embeddings=(torch.ones(1, 3, 8), torch.zeros(1, 3, 8)),
            attention_mask=None, output_attentions=True)  # fmt: skip
