"""Decides which calls may skip the checks in Python, because C++ checks the same.

Checks in Python take as long as a small call's computation. So the functions of csrc/fast_path/,
and the ops of plain recurrent layers, check their arguments themselves. They serve calls that are
plain and valid. For any other call they return None, or raise one of the errors below. Then the
operator's own checks run, and report what is wrong or convert what the function does not take.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from trifuse import backends
from trifuse.ops import _draws

# The backend of the fast paths on a CPU, and the requested backends under which they may serve.
BACKEND = "cpp"
REQUESTS = ("auto", BACKEND)


def extension(draws: float = 0.0, call: backends.Call | None = None) -> Any:
    """Returns the extension, ``trifuse._C``, if a fast path may serve a call, or else None.

    torch.compile traces the slow path; of this function it traces only the first condition.

    Args:
        draws: the probability of dropping elements. A fast path draws its seed itself.
        call: for a call on a GPU, the properties that decide its backend.
    """
    if (
        torch.compiler.is_compiling()
        or forward_ad._current_level >= 0
        or (_draws.active() and draws)
        or not (backends._requested in REQUESTS if call is None else _cuda_serves(call))
    ):
        return None
    return backends._C


def _cuda_serves(call: backends.Call) -> bool:
    """Returns whether the CUDA kernels would serve a call."""
    if backends._requested == "auto":
        return backends.choose(call).backend == "cuda"
    return backends._requested == "cuda" and backends._WHY_NOT["cuda"](call) is None


def serves(*tensors: Tensor | None) -> bool:
    """Returns whether a call on these tensors may go straight to an op of the C++ backend.

    It may not under a mode or a transform, with subclasses of Tensor, off the CPU, or if another
    backend was requested.
    """
    fast = extension()
    return fast is not None and bool(fast.plain_call(*tensors))
