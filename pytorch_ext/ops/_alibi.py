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
from trifuse.ops._runs import expand_in_runs
from trifuse.reference.results import accumulation_dtype


def alibi_bias(slopes: Tensor, length: int, zero: int | Tensor) -> Tensor:
    """Returns the biases (B, H, length) of slopes (B, H), float32, or float64 for float64.

    Args:
        zero: the place of distance 0 in the table; a tensor (B,) has each sequence's.
    """
    wide = slopes.to(accumulation_dtype(slopes.dtype))
    distance = torch.arange(length, device=slopes.device)
    distributed = _sharding.placements(slopes) is not None
    if distributed:
        distance = _sharding.replicated(distance, slopes)
    distance = distance - (zero[:, None, None] if isinstance(zero, Tensor) else zero)
    if requires_grad(slopes) and not distributed and not torch.compiler.is_compiling():
        wide = expand_in_runs(wide, length)
    else:
        wide = wide[..., None]
    return wide * -distance.abs().to(wide.dtype)
