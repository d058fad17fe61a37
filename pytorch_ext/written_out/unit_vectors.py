"""Cosine attention, as SwinV2's, divides each query and key by its length, by ``F.normalize``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trifuse.ops import _modes
from trifuse.ops.dropout_add_layer_norm import dropout_add_layer_norm
from trifuse.written_out.parts import is_plain

# float16 rounds torch's eps to 0, so that a vector of zeros gives NaN there.
_DTYPES = {torch.float32, torch.bfloat16}


def normalize(
    input: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Tensor | None = None
) -> Tensor | None:
    """Return ``F.normalize`` of the last dimension, by the kernel of RMSNorm; None if it must run.

    torch takes four passes, and more in the backward. With E features and the weight 1 / sqrt(E),
    the norm is x / sqrt(sum(x²) + eps²), where torch has x / max(sqrt(sum(x²)), eps). The results
    differ by more than their rounding only in vectors shorter than 1e4 · eps.

    Args:
        input, p, dim, eps, out: as ``F.normalize`` takes them.
    """
    if not is_plain(input) or not input.is_cpu or input.dtype not in _DTYPES:
        return None
    if input.dim() < 2 or dim not in (-1, input.dim() - 1) or input.numel() == 0:
        return None
    if p != 2 or eps != _EPS or out is not None or _modes.transform_active():
        return None
    E = input.shape[-1]
    # The kernel reads and writes the rows in the order in which they lie in memory.
    order = sorted(range(input.dim() - 1), key=input.stride, reverse=True)
    rows = input.permute(*order, -1)
    weight = torch.full((E,), E**-0.5)
    normalized = dropout_add_layer_norm(rows, None, weight, rms_norm=True, eps=_EPS * _EPS / E)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return normalized.permute(*inverse, -1)


_EPS = 1e-12  # torch's default
