"""Broadcasts whose gradients are summed in a fixed order."""

from __future__ import annotations

from torch import Tensor

# The gradients of this many elements are summed first, and then the sums. With so few terms,
# neither the threads nor the other heads change the order of a sum.
_RUN = 1024


def expand_in_runs(t: Tensor, count: int) -> Tensor:
    """Expands a tensor (...) to (..., count), so that its gradient is summed in a fixed order.

    torch would sum the gradient of a plain broadcast over all ``count`` elements at once and, if
    ``t`` has only one element, split that sum between threads.
    """
    runs = (count + _RUN - 1) // _RUN
    each_run = t[..., None].expand(*t.shape, runs)
    each = each_run[..., None].expand(*t.shape, runs, _RUN).reshape(*t.shape, runs * _RUN)
    return each[..., :count]
