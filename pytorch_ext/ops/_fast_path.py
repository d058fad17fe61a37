"""Decides which calls may skip the checks in Python, because C++ checks the same.

Checks in Python take as long as a small call's computation. So the functions of csrc/fast_path/
check their arguments themselves. They serve calls that are plain and valid, and return None for any
other call. Then the operator's own checks run, and report what is wrong or convert what the
function does not take.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from trifuse import backends
from trifuse.ops import _draws

# The requested backends under which the fast paths may serve on a CPU.
_REQUESTS = ("auto", "cpp")


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
        or not (backends._requested in _REQUESTS if call is None else _cuda_serves(call))
    ):
        return None
    return backends._C


def _cuda_serves(call: backends.Call) -> bool:
    """Returns whether the CUDA kernels would serve a call."""
    if backends._requested == "auto":
        return backends.choose(call).backend == "cuda"
    return backends._requested == "cuda" and backends._WHY_NOT["cuda"](call) is None
