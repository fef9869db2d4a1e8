"""A user's code, for the type checker (test_types.py): what it says of the results is what they are."""

import numpy as np
import numpy.typing as npt
from typing_extensions import assert_type

import abacist

Floats = npt.NDArray[np.float32]


def run(q: Floats, k: Floats, v: Floats, both: bool) -> Floats:
    assert_type(abacist.attention(q, k, v, causal=True, window=(3, None)), Floats)
    o, lse = abacist.attention(q, k, v, layout="bhsd", align="top-left", return_lse=True)
    assert_type(o, Floats)
    either = abacist.attention(q, k, v, return_lse=both)
    plan = abacist.plan(q, k, v, backend="reference", backward=True)
    assert_type(plan.flops, int)
    assert_type(abacist.show(plan).svg, str)
    assert_type(abacist.cpu_targets(), tuple[str, ...])
    return either[0] if isinstance(either, tuple) else either


def wrong(q: Floats) -> None:
    abacist.attention(q, q, q, causal="yes")  # type: ignore[call-overload]
    abacist.attention(q, q, q, layout="sbhd")  # type: ignore[call-overload]
    abacist.attention(q, q, q, window=3)  # type: ignore[call-overload]
    abacist.plan(q, q)  # type: ignore[call-arg]
