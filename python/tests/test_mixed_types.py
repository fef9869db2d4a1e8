"""Arguments of several kinds in one call: a TypeError or ValueError names the argument and what it is."""

import itertools

import numpy as np
import pytest

import abacist

SHAPE = 1, 4, 2, 8
EXTRAS = {  # shape and type of each
    "bias": (SHAPE[:1] + (2, 4, 4), "float32"),
    "mask": ((1, 2, 4, 4), "bool"),
    "sinks": ((2,), "float32"),
    "alibi_slopes": ((2,), "float32"),
    "key_lengths": ((1,), "int32"),
}
VARLEN = {"cu_seqlens_q": ((2,), "int32"), "cu_seqlens_k": ((2,), "int32")}


def maker(kind):
    """Of an array of ones; the test is skipped where the library is missing."""
    if kind == "numpy":
        return lambda shape, dtype: np.ones(shape, dtype)
    if kind == "torch":
        torch = pytest.importorskip("torch", reason="torch is not installed")
        return lambda shape, dtype: torch.ones(shape, dtype=getattr(torch, dtype))
    if kind == "jax":
        jnp = pytest.importorskip("jax.numpy", reason="jax is not installed")
        return lambda shape, dtype: jnp.ones(shape, dtype)
    return {
        "list": lambda shape, dtype: np.ones(shape, dtype).tolist(),
        "number": lambda shape, dtype: 1.0,
        "text": lambda shape, dtype: "ones",
        "masked array": lambda shape, dtype: np.ma.ones(shape, dtype),
        "object": lambda shape, dtype: object(),
    }[kind]


def arguments(make, varlen=False):
    shape = SHAPE[1:] if varlen else SHAPE
    given = {name: make(shape, "float32") for name in "qkv"}
    if varlen:
        given |= {name: make(*what) for name, what in VARLEN.items()} | {"max_s_q": 4, "max_s_k": 4}
    else:
        given |= {name: make(*what) for name, what in EXTRAS.items()}
    return given


KINDS = ("numpy", "torch", "jax")
OTHERS = ("list", "number", "text", "masked array", "object")
# JAX takes numpy arrays where it takes its own.
PAIRS = [(kind, other) for kind, other in itertools.product(KINDS, KINDS + OTHERS)
         if kind != other and (kind, other) != ("jax", "numpy")]  # fmt: skip


@pytest.mark.parametrize("function", [abacist.attention, abacist.plan])
@pytest.mark.parametrize("kind, other", PAIRS)
def test_one_argument_of_another_kind(kind, other, function):
    make, make_other = maker(kind), maker(other)
    for varlen in (False, True):
        good = arguments(make, varlen)
        for name, what in [("k", None), ("v", None), *(VARLEN if varlen else EXTRAS).items()]:
            shape, dtype = what or (np.shape(good["q"]), "float32")
            wrong = make_other(shape, dtype)
            with pytest.raises(TypeError, match=f"^{name}: is a {type(wrong).__name__}, must be a "):
                function(**{**good, name: wrong})


@pytest.mark.parametrize("function", [abacist.attention, abacist.plan])
@pytest.mark.parametrize("kind", [*OTHERS, "none"])
def test_a_q_that_is_no_array(kind, function):
    wrong = None if kind == "none" else maker(kind)(SHAPE, "float32")
    with pytest.raises(TypeError, match=f"^q: is a {type(wrong).__name__}, must be a numpy array"):
        function(wrong, *np.ones((2, *SHAPE), np.float32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["k", "v"])
def test_none_is_no_operand(kind, name):
    good = {n: maker(kind)(SHAPE, "float32") for n in "qkv"}
    with pytest.raises(TypeError, match=f"^{name}: is a NoneType, must be a "):
        abacist.attention(**{**good, name: None})


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_types_of_elements(kind, backend):
    """Operands of one type; the other arguments of theirs. Nothing is converted."""
    make, options = maker(kind), {"backend": backend}
    good, varlen = arguments(make), arguments(make, varlen=True)
    wrong_types = [(name, dtype) for name in "kv" for dtype in ("float16", "int32")]
    wrong_types += [("bias", "float16"), ("bias", "int32"), ("mask", "float32"), ("sinks", "float16"),
                    ("alibi_slopes", "float16"), ("key_lengths", "int16"), ("key_lengths", "float32")]  # fmt: skip
    for name, dtype in wrong_types:
        shape = SHAPE if name in "kv" else EXTRAS[name][0]
        for function in (abacist.attention, abacist.plan):
            with pytest.raises(TypeError, match=f"^{name}: has type .*{dtype}.*, must be "):
                function(**{**good, name: make(shape, dtype)}, **options)
    for name in VARLEN:
        with pytest.raises(TypeError, match=f"^{name}: has type .*int16.*, must be "):
            abacist.attention(**{**varlen, name: make((2,), "int16")}, **options)
