"""A Python function as an XLA custom call that gets the addresses of its operands.

The structs are those of XLA's FFI, version 0.3, as far as they are needed. Their rules stand in the header
that jaxlib carries (xla/ffi/api/c_api.h): minor versions append, a major one may rearrange, and a handler
that names its version, as ours does, is served or refused accordingly.
"""

from __future__ import annotations

import ctypes
import pathlib
import re
import typing

import jax
import jax.numpy as jnp
import numpy as np

VERSION = (0, 3)
TYPES = {
    1: np.dtype(np.bool_), 4: np.dtype(np.int32), 6: np.dtype(np.uint8), 10: np.dtype(np.float16),
    11: np.dtype(np.float32), 12: np.dtype(np.float64), 16: np.dtype(jnp.bfloat16),
}  # fmt: skip
METADATA, EXECUTE, INVALID_ARGUMENT = 1, 3, 3

_int, _pointer, _size = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
_START = [("struct_size", _size), ("extension", _pointer)]


class Operand(typing.NamedTuple):
    """Row-major memory."""

    address: int
    dtype: np.dtype
    shape: tuple[int, ...]


class _Version(ctypes.Structure):
    _fields_ = [*_START, ("major", _int), ("minor", _int)]


class _Metadata(ctypes.Structure):
    _fields_ = [("struct_size", _size), ("version", _Version), ("traits", ctypes.c_uint32)]


class _MetadataExtension(ctypes.Structure):
    _fields_ = [
        ("struct_size", _size), ("type", _int), ("next", _pointer), ("metadata", ctypes.POINTER(_Metadata)),
    ]  # fmt: skip


class _Error(ctypes.Structure):
    _fields_ = [*_START, ("message", ctypes.c_char_p), ("code", _int)]


_MakeError = ctypes.CFUNCTYPE(_pointer, ctypes.POINTER(_Error))


class _Api(ctypes.Structure):
    _fields_ = [*_START, ("version", _Version), ("internal", _pointer), ("make_error", _MakeError)]


class _Buffer(ctypes.Structure):
    _fields_ = [
        *_START, ("type", _int), ("data", _pointer), ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    ]  # fmt: skip


class _Buffers(ctypes.Structure):
    _fields_ = [
        *_START, ("count", ctypes.c_int64), ("types", _pointer),
        ("items", ctypes.POINTER(ctypes.POINTER(_Buffer))),
    ]  # fmt: skip


class _Text(ctypes.Structure):
    _fields_ = [("data", _pointer), ("length", _size)]


class _Attributes(ctypes.Structure):
    _fields_ = [
        *_START, ("count", ctypes.c_int64), ("types", _pointer), ("names", _pointer),
        ("items", ctypes.POINTER(ctypes.POINTER(_Text))),
    ]  # fmt: skip


class _Frame(ctypes.Structure):
    _fields_ = [
        *_START, ("api", ctypes.POINTER(_Api)), ("context", _pointer), ("stage", _int),
        ("arguments", _Buffers), ("results", _Buffers), ("attributes", _Attributes),
    ]  # fmt: skip


_Handler = ctypes.CFUNCTYPE(_pointer, ctypes.POINTER(_Frame))


def _operands(buffers: _Buffers) -> list[Operand]:
    found = []
    for n in range(buffers.count):
        buffer = buffers.items[n].contents
        shape = tuple(buffer.dims[: buffer.rank])
        found.append(Operand(buffer.data or 0, TYPES[buffer.type], shape))
    return found


def _answer(frame: _Frame) -> bool:
    """Whether XLA asked for the version."""
    if not frame.extension:
        return False
    extension = ctypes.cast(frame.extension, ctypes.POINTER(_MetadataExtension)).contents
    if extension.type != METADATA:
        return False
    metadata = extension.metadata.contents
    metadata.version.major, metadata.version.minor = VERSION
    metadata.traits = 0
    return True


def _make_handler(run: typing.Callable[[bytes, list[Operand], list[Operand]], None]) -> typing.Any:
    def handle(pointer: typing.Any) -> int | None:
        frame = pointer.contents
        try:
            if not _answer(frame) and frame.stage == EXECUTE:
                text = frame.attributes.items[0].contents
                run(ctypes.string_at(text.data, text.length), _operands(frame.arguments), _operands(frame.results))
            return None
        except BaseException as reason:  # none may reach C
            message = f"{type(reason).__name__}: {reason}".encode()
            error = _Error(ctypes.sizeof(_Error), None, message, INVALID_ARGUMENT)
            return frame.api.contents.make_error(ctypes.byref(error))

    return _Handler(handle)


def serves() -> bool:
    """Whether this jaxlib's FFI is of our major version and not older."""
    try:
        header = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text("utf-8")
    except (AttributeError, OSError):  # an older JAX
        return False
    numbers = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header))
    return int(numbers.get("MAJOR", -1)) == VERSION[0] and int(numbers.get("MINOR", -1)) >= VERSION[1]


_kept: list[typing.Any] = []  # handlers live as long as the process: XLA keeps their addresses


def register(name: str, run: typing.Callable[[bytes, list[Operand], list[Operand]], None]) -> None:
    """Makes `name` a custom call: run(text of its one attribute, operands, results)."""
    handler = _make_handler(run)
    capsule = ctypes.PYFUNCTYPE(ctypes.py_object, _pointer, ctypes.c_char_p, _pointer)(
        ("PyCapsule_New", ctypes.pythonapi)
    )
    _kept.append(handler)
    jax.ffi.register_ffi_target(name, capsule(ctypes.cast(handler, _pointer), None, None), platform="cpu")
