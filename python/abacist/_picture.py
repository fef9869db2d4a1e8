"""show(): a plan as a picture, drawn by libabacist_picture.so (the command line tool's code)."""

from __future__ import annotations

import base64
import ctypes
import functools
import html
import os
import pathlib

from . import _abi
from ._attention import Plan


@functools.lru_cache(maxsize=None)
def _drawer() -> ctypes._NamedFuncPointer:
    library = ctypes.CDLL(os.fspath(pathlib.Path(_abi.library._name).with_name("libabacist_picture.so")))
    draw = library.abacist_picture_svg
    draw.restype = ctypes.c_int
    draw.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t)]
    return draw


class Picture:
    """The picture of a plan: notebooks show it, `save` writes it to a file.

    Attributes
    ----------
    svg : str
        A self-contained SVG with colours for light and dark pages.
    """

    def __init__(self, svg: str, plan: Plan) -> None:
        self.svg = svg
        self._plan = plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the SVG to a file.

        Parameters
        ----------
        path : str or path
            Overwritten if it exists. OSError if it cannot be written.
        """
        pathlib.Path(path).write_text(self.svg, encoding="utf-8")

    def _repr_html_(self) -> str:
        # As an image, so that the style sheet of the SVG does not reach the rest of the notebook.
        data = base64.b64encode(self.svg.encode()).decode()
        return f'<img alt="{html.escape(str(self._plan))}" src="data:image/svg+xml;base64,{data}">'

    def __repr__(self) -> str:
        return f"<abacist.Picture of {self._plan.kernel}: save(path) writes it as SVG>"


def show(plan: Plan) -> Picture:
    """The tile picture of a plan: which tiles are skipped, masked or full, and what that saves.

    Parameters
    ----------
    plan : Plan
        Of `plan()`, dense: without `cu_seqlens_q`.

    Returns
    -------
    Picture
        Shown by a notebook as the last value of a cell, or by ``display(show(plan))``;
        ``show(plan).save("plan.svg")`` elsewhere.

    Raises
    ------
    TypeError
        `plan` is none.
    NotImplementedError
        The problem is varlen, or has too many tiles for a picture.

    Examples
    --------
    >>> import numpy as np, abacist
    >>> q = k = v = np.ones((1, 4096, 8, 64), np.float32)
    >>> abacist.show(abacist.plan(q, k, v, causal=True)).svg[:4]
    '<svg'
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan: is a {type(plan).__name__}, must be what abacist.plan() returns")
    if plan._varlen:
        raise NotImplementedError("plan: is varlen, pictures are of dense problems")
    draw, length = _drawer(), ctypes.c_size_t()
    with _abi.planned(*plan._request) as (handle, _):
        draw(handle, None, 0, ctypes.byref(length))
        text = ctypes.create_string_buffer(length.value + 1)
        failed = draw(handle, text, len(text), ctypes.byref(length))
    result = text.value.decode()
    if failed:
        raise NotImplementedError(f"plan: {result}")
    return Picture(result, plan)
