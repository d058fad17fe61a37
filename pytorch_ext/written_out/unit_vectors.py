"""Cosine attention, as SwinV2's, divides queries and keys by their lengths, by ``F.normalize``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trifuse import backends
from trifuse.ops import _modes
from trifuse.ops.dropout_add_layer_norm import dropout_add_layer_norm
from trifuse.written_out.parts import is_plain

_EPS = 1e-12  # torch's default
# float16 rounds this eps to 0, so that a vector of zeros gives NaN there.
_DTYPES = {torch.float32, torch.bfloat16}
# With fewer features, and without gradients, torch takes about as long.
_FEATURES_WORTH_SERVING = 32


def normalize(
    input: Any, p: Any = 2.0, dim: Any = 1, eps: Any = _EPS, out: Any = None
) -> Tensor | None:
    """Return ``F.normalize`` of rows, by the kernels of RMSNorm; None for any other call.

    It serves calls on a CPU that need a gradient. The kernels take one pass over memory in each
    direction, where torch takes several. With E features and the weight 1 / sqrt(E), the norm is
    x / sqrt(sum(x²) + eps²), where torch has x / max(sqrt(sum(x²)), eps). The difference exceeds
    rounding only for vectors shorter than 1e4 · eps.

    Args:
        input, p, dim, eps, out: as ``F.normalize`` takes them.
    """
    if not is_plain(input) or out is not None or torch.jit.is_tracing():
        return None
    if type(p) not in (int, float) or p != 2 or type(eps) is not float or eps != _EPS:
        return None
    if type(dim) is not int or dim not in (-1, input.dim() - 1):
        return None
    if _modes.transform_active() or not _modes.requires_grad(input) or not _are_rows(input):
        return None
    if not input.is_cpu or input.dtype not in _DTYPES:
        return None
    call = backends.Call("dropout_add_layer_norm", "cpu", input.dtype)
    if not backends.has_kernel(call) or backends.choose(call).backend != "cpp":
        return None
    E = input.shape[-1]
    # The kernels read and write the rows in the order in which they lie in memory.
    order = sorted(range(input.dim() - 1), key=input.stride, reverse=True)
    weight = torch.full((E,), E**-0.5, dtype=torch.float32, device=input.device)
    normalized = dropout_add_layer_norm(
        input.permute(*order, -1), None, weight, rms_norm=True, eps=_EPS * _EPS / E
    )
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return normalized.permute(*inverse, -1)


def _are_rows(x: Tensor) -> bool:
    """Whether the features of x are neighbours, and no two rows share memory."""
    if x.dim() < 2 or x.numel() == 0 or x.shape[-1] < _FEATURES_WORTH_SERVING or x.stride(-1) != 1:
        return False
    return all(size == 1 or stride for size, stride in zip(x.shape, x.stride(), strict=True))
