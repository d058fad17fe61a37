"""The passes of a call that a benchmark times."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def forward(function: Callable[[], Tensor]) -> Callable[[], Sequence[Tensor]]:
    """A forward without gradients, which returns the output."""

    def call() -> Sequence[Tensor]:
        with torch.no_grad():
            return (function(),)

    return call


def forward_backward(
    function: Callable[[], Tensor], variables: Sequence[Tensor]
) -> Callable[[], Sequence[Tensor]]:
    """A forward and a backward, which return the output and the variables' gradients.

    The variables are made to require gradients. The gradient of the output is the same for every
    function whose output has the same shape; all its values exist in every dtype.
    """
    for t in variables:
        t.requires_grad_()
    (like,) = forward(function)()
    torch.manual_seed(1)
    upstream = torch.randn(like.shape).bfloat16().to(like.dtype)

    def call() -> Sequence[Tensor]:
        y = function()
        return (y.detach(), *torch.autograd.grad(y, variables, upstream))

    return call
