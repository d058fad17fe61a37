"""Which calls may skip the checks in Python, because a C++ op checks the same.

Checks in Python take as long as a small call's computation. A call that ``serves`` admits, with
plain options, goes to the C++ op at once. If the op refuses it, the operator's own checks run, and
report what is wrong or convert what the op does not take.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trifuse import backends
from trifuse.ops import _modes

# The backend of the fast paths, and the requested backends under which they may serve.
BACKEND = "cpp"
REQUESTS = ("auto", BACKEND)

# The op raises these about arguments that it does not take. Other errors, such as a lack of memory,
# are the call's own.
REFUSALS = (ValueError, TypeError, NotImplementedError)

_TENSOR_TYPES = (Tensor, torch.nn.Parameter)


def serves(first: Tensor, *others: Tensor | None) -> bool:
    """Returns whether a call on these tensors may go straight to an op of the C++ backend.

    It may not under anything that watches or transforms calls, with subclasses of Tensor, off the
    CPU, or if another backend was requested.
    """
    for t in others:
        if t is not None and not (type(t) in _TENSOR_TYPES and t.is_cpu):
            return False
    return (
        type(first) in _TENSOR_TYPES
        and first.is_cpu
        and not _modes.transform_active()
        and backends._C is not None
        and backends._requested in REQUESTS
        and not torch.is_autocast_enabled("cpu")
        and torch._C._len_torch_dispatch_stack() == 0
    )
