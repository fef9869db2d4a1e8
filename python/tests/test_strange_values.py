"""Each argument of each function in turn is something strange: there is a result, or an error that names
an argument of that function."""

import inspect
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

import abacist
from abacist.compat import flash_attn, sdpa


class Ambiguous:
    def __bool__(self):
        raise RuntimeError("neither true nor false")


STRANGE = {
    "None": None, "list": [1.0], "text": "x", "dictionary": {}, "object": object(), "ambiguous": Ambiguous(),
    "2**70": 2**70, "10**400": 10**400, "10**5000": 10**5000, "-1": -1, "0": 0, "1": 1, "True": True, "0.5": 0.5, "nan": float("nan"),
    "inf": float("inf"), "1j": 1j, "fraction": Fraction(1, 3), "decimal": Decimal(1), "()": (), "(1, 2)": (1, 2),
    "(-5, -5)": (-5, -5), "(1.0, 2.0)": (1.0, 2.0), "(2**70, 0)": (2**70, 0), "(nan, 0)": (float("nan"), 0),
    "(1, 2, 3)": (1, 2, 3), "f32": np.float32(0.5), "i64": np.int64(3), "b": np.bool_(True),
    "0 axes": np.array(0.5), "1 element": np.ones(1), "ends": np.array([0, 4], np.int32),
    "falling": np.array([4, 0], np.int32), "objects": np.array([None]), "texts": np.array(["a"]),
    "5 axes": np.ones((1, 1, 1, 1, 1), np.float32), "empty": np.ones(0, np.float32),
    "2 x 2 x 2 x 2": np.ones((2, 2, 2, 2), np.float32), "fields": np.zeros((1, 4, 2, 8), [("a", "f4")]),
    "complex": np.ones((1, 4, 2, 8), np.complex64), "dates": np.zeros(2, "M8[s]"),
    "between": np.frombuffer(bytes(257), np.uint8)[1:].view(np.float32).reshape(1, 4, 2, 8),
}  # fmt: skip


def strange_tensors():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    plain = {name: torch.from_numpy(x) for name, x in STRANGE.items()
             if isinstance(x, np.ndarray) and x.dtype.kind in "fiuc" and name != "between"}  # fmt: skip
    dense = torch.ones(1, 4, 2, 8)
    return plain | {
        "meta": dense.to("meta"), "sparse": torch.eye(4).to_sparse(), "negative": torch._neg_view(dense),
        "nested": torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)]),
        "quantized": torch.quantize_per_tensor(dense, 0.1, 0, torch.quint8),
        "f8": dense.to(torch.float8_e4m3fn), "truth": torch.tensor(True), "number": torch.tensor(3),
    }  # fmt: skip


X, WIDE, ENDS = np.ones((1, 4, 2, 8), np.float32), np.ones((1, 9, 2, 8), np.float32), STRANGE["ends"]
FLAT, COS = X[0], np.ones((9, 4), np.float32)
OPERANDS = {"q": X, "k": X, "v": X}
VARLEN = {"q": FLAT, "k": FLAT, "v": FLAT, "cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS}
FULL = OPERANDS | {
    "window": (3, None), "softcap": 2.0, "alibi_slopes": np.ones(2, np.float32), "sinks": np.ones(2, np.float32),
    "bias": np.ones((1, 2, 4, 4), np.float32), "mask": np.ones((4, 4), bool), "dropout_p": 0.25, "seed": 3,
    "key_lengths": np.array([4], np.int32),
}  # fmt: skip
LENGTHS = {"max_s_q": 4, "max_s_k": 4}
THEIRS = {"max_seqlen_q": 4, "max_seqlen_k": 4}
PAGES = {"k": np.ones((3, 4, 2, 8), np.float32), "v": np.ones((3, 4, 2, 8), np.float32)}
TABLE = {"block_table": np.array([[1, 2]], np.int32)}
CACHE = {"q": X, "k_cache": WIDE, "v_cache": WIDE.copy()}
f = flash_attn
CALLS = {
    "attention": (abacist.attention, OPERANDS), "attention, all": (abacist.attention, FULL),
    "attention, varlen": (abacist.attention, VARLEN | LENGTHS), "plan": (abacist.plan, FULL),
    "flash_attn_func": (f.flash_attn_func, OPERANDS),
    "kvpacked": (f.flash_attn_kvpacked_func, {"q": X, "kv": np.ones((1, 4, 2, 2, 8), np.float32)}),
    "qkvpacked": (f.flash_attn_qkvpacked_func, {"qkv": np.ones((1, 4, 3, 2, 8), np.float32)}),
    "varlen": (f.flash_attn_varlen_func, VARLEN | THEIRS),
    "varlen kvpacked": (f.flash_attn_varlen_kvpacked_func,
                        {"q": FLAT, "kv": np.ones((4, 2, 2, 8), np.float32), "cu_seqlens_q": ENDS,
                         "cu_seqlens_k": ENDS, **THEIRS}),
    "varlen qkvpacked": (f.flash_attn_varlen_qkvpacked_func,
                         {"qkv": np.ones((4, 3, 2, 8), np.float32), "cu_seqlens": ENDS, "max_seqlen": 4}),
}  # fmt: skip
TORCH_CALLS = CALLS | {
    "varlen pages": (f.flash_attn_varlen_func, VARLEN | THEIRS | PAGES | TABLE),
    "cache": (f.flash_attn_with_kvcache, CACHE | {
        "k": X, "v": X, "rotary_cos": COS, "rotary_sin": COS, "cache_seqlens": np.array([2], np.int32)}),
    "cache, rows": (f.flash_attn_with_kvcache, CACHE | {"cache_batch_idx": np.array([0], np.int32)}),
    "cache, pages": (f.flash_attn_with_kvcache, {"q": X, "k_cache": PAGES["k"], "v_cache": PAGES["v"],
                                                "cache_seqlens": 5, **TABLE}),
    "sdpa": (sdpa, {"query": X, "key": X, "value": X}),
}  # fmt: skip
PAIRS = [("numpy", name) for name in CALLS]
PAIRS += [(kind, name) for kind in ("torch", "watched") for name in TORCH_CALLS]


def watched(function):
    """The function where a call is an operator of torch (test_tracers.py)."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            return operator(*args, **(kwargs or {}))

    def run(**arguments):
        with Seen():
            return function(**arguments)

    return run


@pytest.mark.filterwarnings("ignore:.*(nested|quantize)")
@pytest.mark.parametrize("kind, name", PAIRS)
def test_an_error_names_an_argument(kind, name):
    function, given = (CALLS if kind == "numpy" else TORCH_CALLS)[name]
    parameters, values, refused, wrong = inspect.signature(function).parameters, dict(STRANGE), 0, []
    names = set(parameters)
    if kind == "watched":
        pytest.importorskip("torch", reason="torch is not installed")
        function = watched(function)
        names.add("seed")  # of dropout, which has to be given there
    if kind != "numpy":
        values |= {"tensor " + key: x for key, x in strange_tensors().items()}
        torch = pytest.importorskip("torch", reason="torch is not installed")
        given = {key: torch.from_numpy(x.copy()) if isinstance(x, np.ndarray) else x for key, x in given.items()}
    function(**given)
    for argument in parameters:
        for what, value in values.items():
            try:
                function(**given | {argument: value})
            except (TypeError, ValueError, NotImplementedError) as error:
                refused += 1
                named = re.match(r"([a-z_]+(?:, [a-z_]+)*): ", str(error))
                if not named or not set(named[1].split(", ")) <= names:
                    wrong.append(f"{argument} = {what}: {error}")
            except Exception as error:
                wrong.append(f"{argument} = {what}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)
    assert refused > len(parameters) * len(values) / 2


@pytest.mark.parametrize("function", [abacist.attention, abacist.plan])
def test_equal_values_of_other_types_are_refused_all_the_same(function):
    """Settings are cached by value, and 1 == 1.0 == True."""
    function(**OPERANDS, window=(1, 1), softcap=1, causal=True)
    for wrong in ({"window": (1.0, 1)}, {"window": (1, True)}, {"softcap": True}, {"causal": 1.0}):
        with pytest.raises(TypeError, match=f"^{next(iter(wrong))}: "):
            function(**OPERANDS, **{"window": (1, 1), "softcap": 1, "causal": True} | wrong)


@pytest.mark.parametrize("change, text", [
    ({"causal": [True]}, "causal: is [True], must be True or False"),
    ({"scale": np.ones(1)}, "scale: is array([1.]), must be a number"),
    ({"scale": 10**400}, "scale: is a int, must be a number that float64 holds"),
    ({"window": np.arange(2)}, "window: is array([0, 1]), must be (left, right) or None"),
    ({"layout": ["bshd"]}, "layout: is ['bshd'], must be \"bshd\" or \"bhsd\""),
    ({"align": {}}, "align: is {}, must be \"bottom-right\" or \"top-left\""),
    ({"dropout_p": np.ones((4, 4))}, "dropout_p: is a ndarray, must be a number"),
    ({"seed": np.ones(2)}, "seed: is array([1., 1.]), must be an integer"),
    ({"return_lse": "no"}, "return_lse: is 'no', must be True or False"),
    ({"bias": np.ones((4, 4), np.float16)}, "bias: has type float16, must be float32 as q is"),
])  # fmt: skip
def test_messages(change, text):
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(text)}$"):
        abacist.attention(**OPERANDS | change)


def test_a_length_over_its_bound_names_the_bound():
    with pytest.raises(ValueError, match="^cu_seqlens_k: .* a length over max_s_k = 3$"):
        abacist.attention(**VARLEN, max_s_q=4, max_s_k=3)
