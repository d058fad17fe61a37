r"""Dropout, residual addition and LayerNorm, forward and backward, as mathematics.

The end of a Transformer's sublayer (Vaswani et al., "Attention Is All You Need", 2017, 5.4) and the
normalisation of Ba, Kiros and Hinton ("Layer Normalization", 2016, equation 4). For one row of N
features, with D the dropout multiplier (0 where an element is dropped, 1/(1-p) where it is kept):

    s_j    = r_j + D_j (x_j + c_j)                   the sum, of residual r and x with its bias c
    μ      = 1/N ∑_j s_j                             0 in RMSNorm
    σ⁻¹    = (1/N ∑_j (s_j - μ)² + ε)^(-1/2)         rstd
    n_j    = (s_j - μ) σ⁻¹
    y_j    = w_j n_j + b_j

and, for upstream gradients dy and ds:

    g_j    = w_j dy_j
    dr_j   = σ⁻¹ (g_j - 1/N ∑_k g_k - n_j 1/N ∑_k g_k n_k) + ds_j
    dx_j   = D_j dr_j

with dw = ∑ dy n, db = ∑ dy and dc = ∑ dx over rows. RMSNorm (Zhang and Sennrich, "Root Mean Square
Layer Normalization", 2019) has no μ and no 1/N ∑_k g_k.

Every backend is tested against this file in float64. 16-bit inputs are computed in float32 and
rounded at the end. The exception is a sum that is returned (pre-norm): it is rounded before it is
normalised, so that the backward needs only the returned sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trifuse.reference import philox
from trifuse.reference.results import accumulation_dtype


class Gradients(NamedTuple):
    """Gradients of the arguments of the same names; None for a vector that is None."""

    x: Tensor
    residual: Tensor
    weight: Tensor | None
    bias: Tensor | None
    x_bias: Tensor | None


def dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    x_bias: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    eps: float,
    rms_norm: bool,
    prenorm: bool,
    sum_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the normalised sum, the sum, and the mean and rstd of the sum's rows.

    Args:
        x: (..., N). The leading dimensions, flattened, number the rows.
        residual: (..., N) or None.
        weight, bias: (N,) or None.
        x_bias: (N,) or None.
        seed: int64, keys the dropout; a place may follow it (``philox.Place``). None: no dropout.
        dropout_p: the probability of dropping an element.
        eps: added to the variance.
        rms_norm: RMSNorm instead of LayerNorm.
        prenorm: whether the sum is returned, and so rounded before it is normalised.
        sum_dtype: the dtype of the returned sum.

    Returns:
        (..., N) in the dtype of x; (..., N) in ``sum_dtype``; two of (...) in float32, or float64
        for float64. The mean is 0 in RMSNorm.
    """
    total = _sum(x, residual, x_bias, seed, dropout_p)
    returned = total.to(sum_dtype)
    out, mean, rstd = _normalise(returned.to(total.dtype) if prenorm else total, eps, rms_norm)
    if weight is not None:
        out = out * weight.to(out.dtype)
    if bias is not None:
        out = out + bias.to(out.dtype)
    return out.to(x.dtype), returned, mean.squeeze(-1), rstd.squeeze(-1)


def dropout_add_layer_norm_backward(
    grad_out: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    x_bias: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    eps: float,
    rms_norm: bool,
    x_is_sum: bool,
) -> Gradients:
    """Computes gradients for x, residual, weight, bias and ``x_bias``.

    Everything is computed again from the inputs, so that this function can itself be
    differentiated. Every backend uses it for its double backward.

    Args:
        grad_out: (..., N).
        grad_sum: (..., N) or None.
        x_is_sum: whether x is the sum that the forward returned; ``residual`` is then not added.
        others: as in :func:`dropout_add_layer_norm`.
    """
    wide = accumulation_dtype(grad_out.dtype)
    total = x.to(wide) if x_is_sum else _sum(x, residual, x_bias, seed, dropout_p)
    normalised, _, rstd = _normalise(total, eps, rms_norm)
    dy = grad_out.to(wide)
    g = dy if weight is None else dy * weight.to(wide)
    centred = g if rms_norm else g - g.mean(-1, keepdim=True)
    grad = rstd * (centred - normalised * (g * normalised).mean(-1, keepdim=True))
    if grad_sum is not None:
        grad = grad + grad_sum.to(wide)
    grad_x = _drop(grad, seed, dropout_p)
    rows = tuple(range(x.dim() - 1))

    def over_rows(values: Tensor, like: Tensor | None) -> Tensor | None:
        return None if like is None else (values.sum(rows) if rows else values).to(like.dtype)

    return Gradients(
        grad_x.to(grad_out.dtype),
        grad.to(x.dtype if residual is None else residual.dtype),
        over_rows(dy * normalised, weight),
        over_rows(dy, bias),
        over_rows(grad_x, x_bias),
    )


def _sum(
    x: Tensor, residual: Tensor | None, x_bias: Tensor | None, seed: Tensor | None, dropout_p: float
) -> Tensor:
    wide = accumulation_dtype(x.dtype)
    total = x.to(wide)
    if x_bias is not None:
        total = total + x_bias.to(wide)
    total = _drop(total, seed, dropout_p)
    return total if residual is None else residual.to(wide) + total


def _normalise(total: Tensor, eps: float, rms_norm: bool) -> tuple[Tensor, Tensor, Tensor]:
    mean = total.mean(-1, keepdim=True)
    if rms_norm:
        mean = torch.zeros_like(mean)
    centred = total - mean
    rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    return centred * rstd, mean, rstd


def _drop(values: Tensor, seed: Tensor | None, dropout_p: float) -> Tensor:
    """Returns D · values; element j of row i draws at row i, column j of Philox's plane 0."""
    if seed is None:
        return values
    N = values.shape[-1]
    plane = torch.zeros((), dtype=torch.int64, device=values.device)
    rows = torch.arange(values.numel() // max(N, 1), device=values.device)
    keep = philox.dropout_keep(seed, plane, philox.placed_units(seed, rows), N, dropout_p)
    return torch.where(keep.view(values.shape), values * philox.keep_scale(dropout_p), 0.0)
