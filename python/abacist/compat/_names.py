"""Errors under the names that the caller's arguments have."""

from __future__ import annotations

ERRORS = (TypeError, ValueError, NotImplementedError)


def renamed(error: Exception, names: dict[str, str]) -> Exception:
    """The error "argument: what it was" with the argument's name in the other library."""
    argument, colon, rest = str(error).partition(": ")
    if not colon or argument not in names:
        return error
    return type(error)(f"{names[argument]}: {rest}")
