"""Exact attention that never writes the score matrix, for numpy, torch and JAX arrays.

Three conventions meet in attention libraries, and mixing them up gives plausible, wrong results:

===========================  ============  ==================  =============================
function                     axes          causal, s_q != s_k  window
===========================  ============  ==================  =============================
abacist.attention            [b, s, h, d]  bottom-right        (left, right), None: no bound
abacist.compat.sdpa (torch)  [b, h, s, d]  top-left            none
abacist.compat.flash_attn    [b, s, h, d]  bottom-right        (left, right), -1: no bound
===========================  ============  ==================  =============================

Bottom-right: the last query stands at the last key, as in decoding with a cache. Top-left: query 0
stands at key 0. In `compat.sdpa`, too, a row that sees no key is 0, where torch may give NaN.
"""

from __future__ import annotations

from . import _abi, compat
from ._attention import Plan, attention, plan
from ._picture import Picture, show

__all__ = [
    "Picture", "Plan", "attention", "compat", "cpu_targets", "has_backend", "plan", "show",
]  # fmt: skip
__version__: str = _abi.library.abacist_version().decode()


def has_backend(backend: str) -> bool:
    """Whether the library was built with a backend.

    Parameters
    ----------
    backend : {"cpu", "reference", "cuda"}

    Returns
    -------
    bool
        For "cuda": of the build, whatever GPU there is.

    Raises
    ------
    ValueError
        `backend` is none of them.

    Examples
    --------
    >>> import abacist
    >>> abacist.has_backend("cpu")
    True
    """
    if backend not in ("cpu", "reference", "cuda"):
        raise ValueError(f'backend: is {backend!r}, must be "cpu", "reference" or "cuda"')
    return bool(_abi.library.abacist_has_backend(_abi.BACKENDS[backend]))


def cpu_targets() -> tuple[str, ...]:
    """Instruction sets that the library was built for and this processor has.

    Returns
    -------
    tuple of str
        Best first, of "avx512", "avx2", "neon" and "portable", which runs anywhere. The environment
        variable ABACIST_CPU_TARGET forces one, for tests.

    Examples
    --------
    >>> import abacist
    >>> abacist.cpu_targets()[-1]
    'portable'
    """
    return tuple(_abi.library.abacist_cpu_targets().decode().split(","))
