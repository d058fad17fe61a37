"""The gradients of a model's parameters, in a form for comparing two models."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def weighted_gradients(model: nn.Module, out: Tensor) -> Tensor:
    """Return the gradients of all parameters in one vector, divided by the largest of them.

    Results are weighted by fixed random numbers, because the sum of a norm's squares has almost no
    gradient.
    """
    model.zero_grad()
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return grads / grads.abs().max()
