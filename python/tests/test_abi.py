"""What _abi.py says of the C structs is what the C compiler said (tests/package/abi.txt)."""

import ctypes
import doctest
import inspect
import pathlib
import re

import pytest

import abacist
from abacist import _abi, compat

RECORD = pathlib.Path(__file__).parents[2] / "tests" / "package" / "abi.txt"


def fields(name):
    text = RECORD.read_text(encoding="utf-8")
    block = re.search(rf"^struct {name}: \d+ bytes\n((?:  .*\n)*)", text, re.M).group(1)
    return [(n, int(at)) for n, at in re.findall(r"(\w+)(?:\[\w+\])?: at (\d+),", block)]


def test_tensors():
    expected = [("struct_size", 0)]
    expected += [(name, 8 + 88 * n) for n, name in enumerate(_abi.OPERANDS)]
    assert fields("abacist_tensors")[: len(expected)] == expected
    assert _abi.TENSOR.size == 88 and fields("abacist_tensor")[-1] == ("stride", 56)


@pytest.mark.parametrize("name", ["abacist_options", "abacist_plan_options", "abacist_run_options"])
def test_options(name):
    layout = getattr(_abi, name.removeprefix("abacist_").upper())
    sizes = {"Q": 8, "q": 8, "d": 8, "i": 4}
    offsets = [sum(sizes[c] for c in layout.format[1:n]) for n in range(1, len(layout.format))]
    assert [at for _, at in fields(name)][: len(offsets)] == offsets


def test_plan_info():
    ours = [(name, getattr(_abi.PlanInfo, name).offset) for name, _ in _abi.PlanInfo._fields_]
    assert fields("abacist_plan_info")[: len(ours)] == ours
    assert ctypes.sizeof(_abi.PlanInfo) % 8 == 0


PUBLIC = [getattr(abacist, name) for name in abacist.__all__ if callable(getattr(abacist, name))]
THEIRS = {name: getattr(compat.flash_attn, name) for name in compat.flash_attn.__all__} | {"sdpa": compat.sdpa}


@pytest.mark.parametrize("item", [*PUBLIC, *THEIRS.values()], ids=lambda x: x.__name__)
def test_the_documentation_is_whole_and_its_examples_run(item):
    pytest.importorskip("numpy", reason="numpy is not installed")
    parameters = [] if inspect.isclass(item) else inspect.signature(item).parameters
    described = inspect.getdoc(item)
    if "the keywords of `attention`" in described:
        described += inspect.getdoc(abacist.attention)
    if "parameters of `flash_attn_func`" in described:
        described += inspect.getdoc(compat.flash_attn.flash_attn_func)
    if "import torch" in described:
        pytest.importorskip("torch", reason="torch is not installed")
    for name in parameters:
        assert re.search(rf"\b{name}\b", described), name
    if not inspect.isclass(item):
        assert {"Returns", "Examples"} <= set(described.splitlines())
    if item in THEIRS.values():
        assert {"Parameters", "Raises"} <= set(described.splitlines())
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder(exclude_empty=True).find(item, item.__name__, globs={}):
        assert runner.run(test).failed == 0, test.name
