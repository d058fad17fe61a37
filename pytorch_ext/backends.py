"""Chooses the backend that serves a call.

One table serves every operator. An operator describes its call, gets back a backend's name, and
runs that backend's overload, such as ``torch.ops.trifuse.attention_forward.cpp``.

=======  ===================================  ========================================
backend  what it is                           tensors on
=======  ===================================  ========================================
cuda     CUDA C++ kernels, csrc/cuda          NVIDIA GPU
triton   Triton kernels, kernels/             GPU; CPU only under TRITON_INTERPRET=1
cpp      vectorised C++ kernels, csrc/cpu     CPU
eager    the formula in torch, reference/     anything
=======  ===================================  ========================================

``auto`` takes the first of these that can serve the call, except that Triton precedes CUDA where
CUDA's kernels have not measured faster: for operators not in ``CUDA_BEFORE_TRITON``, and for
attention with a mask, a bias by distance or tables (``relative_index``).
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

log = logging.getLogger("trifuse")

ORDER = ("cuda", "triton", "cpp", "eager")
FALLBACK = ORDER[-1]  # serves every call

_UP_TO_FLOAT32 = (torch.float32, torch.bfloat16, torch.float16)
_UP_TO_FLOAT64 = (*_UP_TO_FLOAT32, torch.float64)


class Limits(NamedTuple):
    """The calls that a backend's kernels can serve."""

    dtypes: tuple[torch.dtype, ...]
    head_dim: float = math.inf  # the largest


# The limits of each backend, for all operators but those of _LIMITS_OF_OPERATOR.
_LIMITS = {
    "cuda": Limits(_UP_TO_FLOAT64),
    "triton": Limits(_UP_TO_FLOAT32),
    "cpp": Limits(_UP_TO_FLOAT64),
    "eager": Limits(_UP_TO_FLOAT64),
}
_LIMITS_OF_OPERATOR = {
    # A tile of a GPU's attention kernels holds all of head_dim.
    ("cuda", "attention"): Limits(_UP_TO_FLOAT32, head_dim=256),
    ("triton", "attention"): Limits(_UP_TO_FLOAT32, head_dim=256),
}

# Operators whose CUDA kernels measure faster than their Triton kernels (docs/performance.md). For
# attention this holds only without a mask, a bias by distance or tables.
CUDA_BEFORE_TRITON = frozenset({"attention", "dropout_add_layer_norm", "lstm", "gru", "rnn"})

try:
    from trifuse import _C
except ImportError as error:
    _C = None  # type: ignore[assignment]
    _extension_error = str(error)


class Call(NamedTuple):
    """The properties of a call that decide its backend. Hashable, because decisions are cached."""

    operator: str
    device: str  # a torch device type
    dtype: torch.dtype
    head_dim: int = 0
    masked: bool = False  # attention with a mask, a relative bias or tables


class Choice(NamedTuple):
    """The backend for a call, why those before it were refused, and notes on how it runs."""

    backend: str
    refused: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        refused = (f"not {name}: {why}" for name, why in self.refused)
        return "\n  ".join([self.backend, *self.notes, *refused])


def build_info() -> dict[str, object]:
    """Returns what the extension was built with: CPU capabilities, compiler, and operators with
    CUDA kernels or why there are none. Without the extension, returns why it is missing."""
    try:
        from trifuse import _build_info
    except ImportError:
        reason, why_no_cuda = "", ""
    else:
        reason, why_no_cuda = _build_info.ERROR, _build_info.CUDA_ERROR
    if _C is None:
        return {"error": reason or _extension_error}
    return {**_C.build_info(), "cuda_error": why_no_cuda}


def cpu_capability() -> str | None:
    """Returns the instruction set that the C++ kernels use, or None without the extension."""
    return None if _C is None else str(_C.cpu_capability())


def cpu_maker() -> str | None:
    """Returns the CPU's maker, "AMD", "Intel" or "other"; None without the extension."""
    return None if _C is None else str(_C.cpu_maker())


def interpreting() -> bool:
    """Returns whether Triton's interpreter runs kernels on CPU tensors, one program at a time."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _limits(backend: str, call: Call) -> Limits:
    return _LIMITS_OF_OPERATOR.get((backend, call.operator), _LIMITS[backend])


def _why_not_dtype(backend: str, call: Call) -> str | None:
    return None if call.dtype in _limits(backend, call).dtypes else f"no kernel for {call.dtype}"


def _why_not_head_dim(backend: str, call: Call) -> str | None:
    largest = _limits(backend, call).head_dim
    return f"head_dim {call.head_dim} exceeds {largest}" if call.head_dim > largest else None


# Read once, at import, because torch.compile can't trace into the extension.
_CUDA_OPERATORS: tuple[str, ...] = () if _C is None else tuple(_C.build_info()["cuda"])


def _why_not_cuda(call: Call) -> str | None:
    if not _CUDA_OPERATORS:
        return "this build holds no CUDA kernels"
    if call.device != "cuda":
        return f"tensors are on {call.device}"
    if call.operator not in _CUDA_OPERATORS:
        return "no CUDA kernel for this operator"
    if (why := _why_not_dtype("cuda", call)) is not None:
        return why
    major, minor = _capability()
    if major < 8:
        return f"the GPU's compute capability is {major}.{minor}, and 8.0 is the least"
    return _why_not_head_dim("cuda", call)


def _capability() -> tuple[int, int]:
    """Returns the current GPU's compute capability; without a GPU, the lowest that kernels need."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (8, 0)


# torch.compiler.assume_constant_result sets this too, but would import Dynamo with trifuse.
_capability._dynamo_marked_constant = True  # type: ignore[attr-defined]


_HAS_TRITON = importlib.util.find_spec("triton") is not None


def _why_not_triton(call: Call) -> str | None:
    if not _HAS_TRITON:
        return "triton is not installed"
    if call.device != "cuda" and not (call.device == "cpu" and interpreting()):
        return f"tensors are on {call.device}"
    return _why_not_dtype("triton", call) or _why_not_head_dim("triton", call)


def _why_not_cpp(call: Call) -> str | None:
    if _C is None:
        return "the C++ extension is missing; `python -m trifuse` says why"
    if call.device != "cpu":
        return f"tensors are on {call.device}"
    return _why_not_dtype("cpp", call)


# By backend, a function that returns why it can't serve a call, or None if it can.
_WHY_NOT = {
    "cuda": _why_not_cuda,
    "triton": _why_not_triton,
    "cpp": _why_not_cpp,
    "eager": lambda call: None,
}


def _why_not_cuda_first(call: Call) -> str | None:
    before_triton = call.operator in CUDA_BEFORE_TRITON and not call.masked
    if before_triton or _why_not_triton(call) is not None or _WHY_NOT["cuda"](call) is not None:
        return None
    return "not measured to be faster than Triton" + " with a mask" * call.masked


def _why_not_interpreter(call: Call) -> str | None:
    if call.device == "cpu":  # the interpreter is for checking kernels
        return "on CPU tensors only when asked for by name, under TRITON_INTERPRET=1"
    return None


# By backend, a function that returns why ``auto`` passes it over whether or not it can serve a
# call, or None.
_WHY_NOT_BY_AUTO = {"cuda": _why_not_cuda_first, "triton": _why_not_interpreter}


def _checked(name: str, source: str) -> str:
    if name not in ("auto", *ORDER):
        raise ValueError(f"{source}: expected one of auto, {', '.join(ORDER)}; got {name!r}")
    return name


_requested = _checked(os.environ.get("TRIFUSE_BACKEND", "auto"), "TRIFUSE_BACKEND")


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Serves the calls inside the ``with`` block by one backend, or raises if it can't.

    Args:
        name: "auto", "cuda", "triton", "cpp" or "eager".

    The choice is made by the forward call and holds for its backward. It is global to the process,
    like torch's own backend switches. The environment variable ``TRIFUSE_BACKEND`` sets it for the
    whole run.

    Example:
        >>> import torch, trifuse
        >>> query = torch.randn(1, 2, 5, 64)
        >>> with trifuse.backend("eager"):
        ...     trifuse.scaled_dot_product_attention(query, query, query).shape
        torch.Size([1, 2, 5, 64])
    """
    global _requested
    previous, _requested = _requested, _checked(name, "backend")
    try:
        yield
    finally:
        _requested = previous


def choose(call: Call) -> Choice:
    """Returns the backend for a call.

    Raises:
        RuntimeError: the backend requested by name can't serve the call.
    """
    # Symbolic sizes can't be hashed, and is_compiling() is not true everywhere in every torch.
    if torch.compiler.is_compiling() or isinstance(call.head_dim, torch.SymInt):
        return _choose.__wrapped__(call, _requested)
    return _choose(call, _requested)


def has_kernel(call: Call) -> bool:
    """Returns whether a backend other than the fallback would serve a call."""
    names = ORDER if _requested == "auto" else (_requested,)
    return any(
        name != FALLBACK
        and _WHY_NOT[name](call) is None
        and (_requested != "auto" or _WHY_NOT_BY_AUTO.get(name, lambda call: None)(call) is None)
        for name in names
    )


@functools.cache
def fallback_backend(call: Call, backend: str) -> str:
    """Returns ``backend`` if it can serve a call traced elsewhere, else the choice of ``auto``."""
    return backend if _WHY_NOT[backend](call) is None else _choose(call, "auto").backend


@functools.cache
def _choose(call: Call, requested: str) -> Choice:
    if requested != "auto":
        why = _WHY_NOT[requested](call)
        if why is not None:
            raise RuntimeError(
                f"{call.operator}: backend {requested!r} can't serve this call: {why}"
            )
        return Choice(requested, ())
    refused = []
    for name in ORDER:
        why = _WHY_NOT_BY_AUTO[name](call) if name in _WHY_NOT_BY_AUTO else None
        why = why or _WHY_NOT[name](call)
        if why is None:
            break
        refused.append((name, why))
    if name == FALLBACK and call.device in ("cpu", "cuda") and not torch.compiler.is_compiling():
        reasons = "; ".join(f"{other}: {why}" for other, why in refused)
        properties = call.operator, call.device, call.dtype
        log.warning("%s (%s, %s) → %s, because %s", *properties, name, reasons)
    return Choice(name, tuple(refused))
