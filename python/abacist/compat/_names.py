"""Errors under the names that the caller's arguments have."""

from __future__ import annotations

import sys
import typing

ERRORS = (TypeError, ValueError, NotImplementedError)


def renamed(error: Exception, names: dict[str, str]) -> Exception:
    """The error "argument: what it was" with the argument's name in the other library."""
    argument, colon, rest = str(error).partition(": ")
    if not colon or argument not in names:
        return error
    return type(error)(f"{names[argument]}: {rest}")


def cast_later(x: object) -> bool:
    """Whether autocast gives this tensor its type."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor) or x.is_meta:  # autocast knows no meta device
        return False
    return bool(torch.is_autocast_enabled(x.device.type))


def _dtype(x: typing.Any) -> object:
    try:  # the torch.compile of PyTorch 2.4 traces no getattr() with a default
        return x.dtype
    except AttributeError:
        return None


def check_types(**tensors: object) -> None:
    """The others are of the first one's type."""
    names = iter(tensors)
    first = next(names)
    wanted = _dtype(tensors[first])
    for name in names:
        found = _dtype(tensors[name])
        if None not in (wanted, found) and found != wanted and not cast_later(tensors[first]):
            raise TypeError(f"{name}: has type {found}, must be that of {first}, {wanted}")
