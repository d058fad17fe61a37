"""ALiBi, attention with linear biases, as a table of biases by distance.

Press, Smith and Lewis, "Train Short, Test Long: Attention with Linear Biases Enables Input Length
Extrapolation" (2022). A head with slope m adds -m |d| to the score of a pair at distance d. The
kernels need no code for it, because they take the table. The gradient of the slopes follows from
the table's gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trifuse.ops import _sharding
from trifuse.ops._modes import requires_grad
from trifuse.reference.results import accumulation_dtype

# The gradients of this many distances are summed first, and then the sums. With so few terms,
# neither the threads nor the other heads change the order of a sum.
_RUN = 1024


def alibi_bias(slopes: Tensor, length: int, zero: int | Tensor) -> Tensor:
    """Returns the biases (B, H, length) of slopes (B, H), float32, or float64 for float64.

    Args:
        zero: the place of distance 0 in the table; a tensor (B,) has each sequence's.
    """
    B, H = slopes.shape
    wide = slopes.to(accumulation_dtype(slopes.dtype))
    distance = torch.arange(length, device=slopes.device)
    distributed = _sharding.placements(slopes) is not None
    if distributed:
        distance = _sharding.replicated(distance, slopes)
    distance = distance - (zero[:, None, None] if isinstance(zero, Tensor) else zero)
    if requires_grad(slopes) and not distributed and not torch.compiler.is_compiling():
        # torch would sum a single head's gradient over all distances at once, and split that sum
        # between threads.
        runs = (length + _RUN - 1) // _RUN
        each_run = wide[..., None].expand(B, H, runs)
        each = each_run[..., None].expand(B, H, runs, _RUN).reshape(B, H, runs * _RUN)
        wide = each[..., :length]
    else:
        wide = wide[..., None]
    return wide * -distance.abs().to(wide.dtype)
