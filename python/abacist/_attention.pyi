# Types of what users call; _attention.py has the documentation. python/tests/test_types.py compares the two.
import dataclasses
from typing import Any, Literal, TypeVar, overload

# An array of numpy, torch or JAX: o is one of the kind that q is.
_Array = TypeVar("_Array")
Window = tuple[int | None, int | None]
_Layout = Literal["bshd", "bhsd"]
_Align = Literal["bottom-right", "top-left"]
_Backend = Literal["cpu", "reference", "cuda"]

@overload
def attention(
    q: _Array,
    k: _Array,
    v: _Array,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    bias: Any = None,
    mask: Any = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_s_q: int | None = None,
    max_s_k: int | None = None,
    key_lengths: Any = None,
    layout: _Layout = "bshd",
    align: _Align = "bottom-right",
    return_lse: Literal[False] = False,
    backend: _Backend | None = None,
    deterministic: bool = True,
) -> _Array: ...
@overload
def attention(
    q: _Array,
    k: _Array,
    v: _Array,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    bias: Any = None,
    mask: Any = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_s_q: int | None = None,
    max_s_k: int | None = None,
    key_lengths: Any = None,
    layout: _Layout = "bshd",
    align: _Align = "bottom-right",
    return_lse: Literal[True],
    backend: _Backend | None = None,
    deterministic: bool = True,
) -> tuple[_Array, Any]: ...
@overload
def attention(
    q: _Array,
    k: _Array,
    v: _Array,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    bias: Any = None,
    mask: Any = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_s_q: int | None = None,
    max_s_k: int | None = None,
    key_lengths: Any = None,
    layout: _Layout = "bshd",
    align: _Align = "bottom-right",
    return_lse: bool,
    backend: _Backend | None = None,
    deterministic: bool = True,
) -> _Array | tuple[_Array, Any]: ...

@dataclasses.dataclass(frozen=True)
class Plan:
    kernel: str
    rows: int
    keys: int
    splits: int
    threads: int
    workspace_bytes: int
    visible_pairs: int
    flops: int
    slow_memory_bytes: int
    operand_bytes: int
    standard_memory_bytes: int
    deterministic: bool
    declined: tuple[str, ...]
    text: str
    _request: tuple[bool, bytes, bytes, bytes] = dataclasses.field(repr=False, compare=False)
    _varlen: bool = dataclasses.field(repr=False)
    def _repr_pretty_(self, printer: Any, cycle: bool) -> None: ...

def plan(
    q: _Array,
    k: _Array,
    v: _Array,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    bias: Any = None,
    mask: Any = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_s_q: int | None = None,
    max_s_k: int | None = None,
    key_lengths: Any = None,
    layout: _Layout = "bshd",
    align: _Align = "bottom-right",
    return_lse: bool = False,
    backend: _Backend | None = None,
    deterministic: bool = True,
    backward: bool = False,
) -> Plan: ...
