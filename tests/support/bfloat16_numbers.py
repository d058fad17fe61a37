"""Numbers for tests of bfloat16 products."""

from __future__ import annotations

import torch
from torch import Tensor


def numbers(*shape: int) -> Tensor:
    """Returns numbers of many magnitudes, some of them subnormal."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-20, 20, shape).float())
    return torch.where(torch.rand(shape) < 0.02, 1e-39 * x, x).bfloat16()
