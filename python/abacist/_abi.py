"""The C API (include/abacist/abacist.h) for Python: the shared library by ctypes, its structs as bytes.

Structs are packed with `struct` and passed as bytes, which ctypes hands on without a copy: the cheapest
way to call that needs no compiler (docs/decisions/005-python-binding.md has the figures). ctypes
releases the GIL around every call.
"""

from __future__ import annotations

import contextlib
import ctypes
import numbers
import os
import pathlib
import struct
import typing
from collections.abc import Iterator, Sequence

# Order and layout are those of the header; a test compares them with tests/package/abi.txt.
OPERANDS = (
    "q", "k", "v", "o", "lse", "d_o", "d_lse", "dq", "dk", "dv",
    "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k", "sinks", "d_sinks", "key_lengths", "bias",
    "d_bias", "visible", "block_table",
)  # fmt: skip
TENSOR = struct.Struct("<Qiiii4q4q")  # data, dtype, rank, device_type, device_index, shape, stride
OPTIONS = struct.Struct("<Qiiiiqqddqqdq")
PLAN_OPTIONS = struct.Struct("<Qii")
RUN_OPTIONS = struct.Struct("<QQQQQQ")  # workspace, its bytes, stream, progress, its context

HOST, CUDA = (0, 0), 1
F32, BF16, F16, F64, I32, U8 = range(6)
BACKENDS = {None: 0, "cpu": 1, "reference": 2, "cuda": 3}
UNBOUNDED = 2**63 - 1
MAX_RANK = 4

ABSENT = bytes(TENSOR.size)
HEAD = struct.pack("<Q", 8 + TENSOR.size * len(OPERANDS))
NO_GRADIENTS = ABSENT * 5  # d_o, d_lse, dq, dk, dv
NO_EXTRAS = ABSENT * 10  # alibi_slopes and what follows it
EXTRAS = OPERANDS[10:]

# What the caller named an argument that the library calls otherwise.
ARGUMENTS = {
    "visible": "mask", "window_left": "window", "window_right": "window", "has_window": "window",
    "dropout_seed": "seed", "d_o": "gradient of o", "d_lse": "gradient of lse",
}  # fmt: skip
# The packer of an abacist_tensor of each rank; axes that it has not are 0.
PACK = tuple(
    struct.Struct(f"<Qiiii{rank}q{8 * (4 - rank)}x{rank}q{8 * (4 - rank)}x").pack for rank in range(5)
)


class PlanInfo(ctypes.Structure):
    """abacist_plan_info."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("kernel", ctypes.c_char_p),
        ("rows", ctypes.c_int32),
        ("keys", ctypes.c_int32),
        ("splits", ctypes.c_int64),
        ("work_items", ctypes.c_int64),
        ("threads", ctypes.c_int32),
        ("grid", ctypes.c_int32),
        ("workspace_bytes", ctypes.c_size_t),
        ("scratch_bytes_per_thread", ctypes.c_size_t),
        ("visible_pairs", ctypes.c_int64),
        ("flops", ctypes.c_int64),
        ("slow_memory_bytes", ctypes.c_int64),
        ("operand_bytes", ctypes.c_int64),
        ("standard_memory_bytes", ctypes.c_int64),
        ("visible_pairs_exact", ctypes.c_int32),
        ("flops_exact", ctypes.c_int32),
        ("slow_memory_bytes_exact", ctypes.c_int32),
        ("operand_bytes_exact", ctypes.c_int32),
        ("standard_memory_bytes_exact", ctypes.c_int32),
        ("deterministic", ctypes.c_int32),
        ("declined", ctypes.c_size_t),
    ]


def _load() -> ctypes.CDLL:
    path = os.environ.get("ABACIST_LIBRARY") or pathlib.Path(__file__).with_name("libabacist.so")
    library = ctypes.CDLL(os.fspath(path))
    bytes_, text, pointer = ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p
    signatures = {
        "abacist_forward": (ctypes.c_int32, [bytes_] * 4),
        "abacist_backward": (ctypes.c_int32, [bytes_] * 4),
        "abacist_validate": (ctypes.c_int32, [ctypes.c_int32, bytes_, bytes_]),
        "abacist_plan_create": (
            ctypes.c_int32,
            [ctypes.c_int32, bytes_, bytes_, bytes_, ctypes.POINTER(pointer)],
        ),
        "abacist_plan_run": (ctypes.c_int32, [pointer, bytes_, bytes_]),
        "abacist_plan_destroy": (None, [pointer]),
        "abacist_plan_get_info": (ctypes.c_int32, [pointer, ctypes.POINTER(PlanInfo)]),
        "abacist_plan_declined": (text, [pointer, ctypes.c_size_t]),
        "abacist_plan_explain": (
            ctypes.c_int32,
            [pointer, pointer, ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t)],
        ),
        "abacist_last_error_argument": (text, []),
        "abacist_last_error_message": (text, []),
        "abacist_has_backend": (ctypes.c_int32, [ctypes.c_int32]),
        "abacist_version": (text, []),
        "abacist_cpu_targets": (text, []),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


library = _load()
forward = library.abacist_forward
backward = library.abacist_backward


@contextlib.contextmanager
def planned(
    backward: bool, tensors: bytes, options: bytes, plan_options: bytes
) -> Iterator[tuple[ctypes.c_void_p, PlanInfo]]:
    """A plan of the library and what it says of itself, freed at the end."""
    plan = ctypes.c_void_p()
    check(library.abacist_plan_create(
        int(backward), tensors, options, plan_options, ctypes.byref(plan)
    ))  # fmt: skip
    try:
        info = PlanInfo(struct_size=ctypes.sizeof(PlanInfo))
        check(library.abacist_plan_get_info(plan, ctypes.byref(info)))
        yield plan, info
    finally:
        library.abacist_plan_destroy(plan)


def check(status: int) -> None:
    if status:
        raise error(status)


def error(status: int) -> Exception:
    """The exception for a status that is not ABACIST_OK; call it in the thread of the failed call."""
    argument = library.abacist_last_error_argument().decode()
    message = library.abacist_last_error_message().decode()
    if argument.startswith("cu_seqlens"):
        message = message.replace("max_lengths", "max_s" + argument[-2:])
    argument = ARGUMENTS.get(argument, argument)
    text = f"{argument}: {message}" if argument else message
    kinds = {1: ValueError, 2: NotImplementedError, 3: MemoryError}
    return kinds.get(status, RuntimeError)(text)


def tensor(
    pointer: int, dtype: int, shape: Sequence[int], stride: Sequence[int], device: tuple[int, int] = HOST
) -> bytes:
    """An abacist_tensor; strides in elements, the device as its type and index."""
    rank = len(shape)
    return PACK[rank](pointer, dtype, rank, *device, *shape, *stride)


def extras(named: dict[str, bytes]) -> bytes:
    """The operands from alibi_slopes on, of which `named` are present."""
    if not named:
        return NO_EXTRAS
    return b"".join([named.get(name, ABSENT) for name in EXTRAS])


def shown(value: object) -> str:
    """What a value is, for an error: itself if that is short."""
    try:
        text = repr(value)
    except Exception:  # an integer of too many digits is enough
        text = "\n"
    return text if len(text) <= 80 and "\n" not in text else f"a {type(value).__name__}"


# Arguments are cached by value (_attention.py), so what may change its value is none of them: an array
# or a tensor of one element is refused here.
def flag(name: str, value: object) -> bool:
    if isinstance(value, numbers.Integral) or type(value).__name__ in ("bool", "bool_"):
        if value in (True, False):
            return bool(value)
    raise TypeError(f"{name}: is {shown(value)}, must be True or False")


def integer(name: str, value: typing.Any, most: int) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        number: int = value.__index__()
    except (AttributeError, TypeError, RuntimeError):  # of meta tensors, too
        raise TypeError(f"{name}: is {shown(value)}, must be an integer") from None
    if not 0 <= number <= most:
        raise ValueError(f"{name}: is {shown(number)}, must be in [0, {most}]")
    return number


def real(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: is {shown(value)}, must be a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: is {shown(value)}, must be a number that float64 holds") from None


def _bound(side: str, value: object) -> int:
    if value is None:
        return UNBOUNDED
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"window: {side} is {shown(value)}, must be an integer or None (unbounded)")
    number = int(value)
    if not 0 <= number <= UNBOUNDED:
        raise ValueError(f"window: {side} is {shown(number)}, must be at least 0, or None for unbounded")
    return number


def options(
    causal: object,
    window: object,
    scale: object,
    softcap: object,
    align: object,
    max_s_q: int,
    max_s_k: int,
    dropout_p: object,
    seed: int,
) -> bytes:
    """abacist_options, from arguments of attention(); the three int are checked already."""
    if not isinstance(align, str) or align not in ("bottom-right", "top-left"):
        raise ValueError(f'align: is {shown(align)}, must be "bottom-right" or "top-left"')
    left = right = 0
    if window is not None:
        if not isinstance(window, tuple):
            raise TypeError(f"window: is {shown(window)}, must be (left, right) or None")
        if len(window) != 2:
            raise ValueError(f"window: has {len(window)} entries, must be (left, right)")
        left, right = _bound("left", window[0]), _bound("right", window[1])
    return OPTIONS.pack(
        OPTIONS.size,
        flag("causal", causal),
        align == "top-left",
        window is not None,
        scale is not None,
        left,
        right,
        0.0 if scale is None else real("scale", scale),
        real("softcap", softcap),
        max_s_q,
        max_s_k,
        real("dropout_p", dropout_p),
        seed - 2**64 if seed >= 2**63 else seed,
    )


def _plan_options(backend: int) -> bytes:
    return PLAN_OPTIONS.pack(PLAN_OPTIONS.size, backend, 0)


PLAN_BYTES = {name: _plan_options(number) for name, number in BACKENDS.items()}


def plan_options(backend: str | None) -> bytes:
    """abacist_plan_options that force a backend."""
    try:
        return PLAN_BYTES[backend]
    except (KeyError, TypeError):
        raise ValueError(
            f'backend: is {shown(backend)}, must be None, "cpu", "reference" or "cuda"'
        ) from None
