"""Linear layers of DTensors: each process multiplies its own parts as plain tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trifuse.ops import _autograd, _modes, _sharding
from trifuse.ops._linear_choice import ROWS_WORTH_PACKING, choose
from trifuse.ops._linear_product import SHARDED_FIRST, product, torch_linear, weight_gradient
from trifuse.ops.activations import ACTIVATIONS, Activation


def linear_of_parts(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation | None
) -> Tensor:
    """Computes a linear layer of DTensors; each process multiplies its own parts."""
    tensors = (x, weight) if bias is None else (x, weight, bias)
    ours = (
        all(_sharding.placements(t) is not None for t in tensors)
        and all(t.dtype == x.dtype and t.device.type == "cpu" for t in tensors)
        and weight.dim() == 2
        and x.dim() > 1
        and x.shape[-1] == weight.shape[1]
        and math.prod(x.shape[:-1]) >= ROWS_WORTH_PACKING
        and not (torch.compiler.is_compiling() or torch.jit.is_tracing() or _modes.is_watched())
        and not torch.is_autocast_enabled("cpu")
    )
    if not ours or not choose(x.dtype).training:
        return torch_linear(x, weight, bias, activation)
    # The bias is added to the sum of the partial products, because each of them would add it.
    sharded = _sharding.is_sharded
    partial = sharded(weight, 1) or sharded(x, x.dim() - 1)
    out = _autograd.apply(_LinearOfParts, x, weight, None if partial else bias)
    if partial and bias is not None:
        out = out + bias
    return out if activation is None else ACTIVATIONS[activation](out)


class _LinearOfParts(torch.autograd.Function):
    """A linear layer of DTensors. It multiplies this process's parts as plain tensors.

    An op on DTensors takes up to 0.1 ms of Python, and a layer and its gradients have ten of them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        from torch.distributed.tensor import Partial

        tensors = {"x": x, "weight": weight, "bias": bias}
        rule = _sharding.linear(tensors)
        layout = ctx.layout = _sharding.Layout("linear", rule, tensors, first=SHARDED_FIRST)
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.shapes = x.shape, weight.shape
        ctx.transposed = weight.stride(0) == 1 and not weight.is_contiguous()
        # x and the weight are each needed for the other's gradient.
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        part = layout.local("x", x)
        out = product(part, layout.local("weight", weight), layout.local("bias", bias))
        whole = _empty((*x.shape[:-1], weight.shape[0]))
        return layout.result("out", out, whole, Partial())

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        layout, (x_shape, weight_shape) = ctx.layout, ctx.shapes
        of_x = of_weight = of_bias = None
        if needs_weight:
            of_weight = _autograd.apply(
                _WeightGradientOfParts, grad_out, x, layout, weight_shape, ctx.transposed
            )
        if torch.is_grad_enabled():  # for second derivatives
            if needs_x:
                of_x = _autograd.apply(_LinearOfParts, grad_out, weight.t(), None)
            if needs_bias:
                of_bias = grad_out.sum(tuple(range(grad_out.dim() - 1)))
            return of_x, of_weight, of_bias
        grad = layout.local("out", grad_out)
        if needs_x:
            of_x = product(grad, layout.local("weight", weight).t())
            of_x = layout.gradient("x", of_x, _empty(x_shape))
        if needs_bias:
            of_bias = layout.gradient("bias", grad.flatten(0, -2).sum(0), _empty(weight_shape[:1]))
        return of_x, of_weight, of_bias


class _WeightGradientOfParts(torch.autograd.Function):
    """The gradient of the weight of :class:`_LinearOfParts`."""

    @staticmethod
    def forward(
        ctx: Any,
        grad_out: Tensor,
        x: Tensor,
        layout: _sharding.Layout,
        shape: Sequence[int],
        transposed: bool,
    ) -> Tensor:
        ctx.save_for_backward(grad_out, x)
        grad, rows = (
            layout.local(name, t).flatten(0, -2) for name, t in (("out", grad_out), ("x", x))
        )
        like = _empty(shape[::-1]).t() if transposed else _empty(shape)
        return layout.gradient("weight", weight_gradient(grad, rows, transposed), like)

    @staticmethod
    def backward(ctx: Any, of_weight: Tensor) -> tuple[Tensor | None, ...]:
        grad_out, x = ctx.saved_tensors
        needs_grad_out, needs_x, *_ = ctx.needs_input_grad
        return (
            _autograd.apply(_LinearOfParts, x, of_weight, None) if needs_grad_out else None,
            _autograd.apply(_LinearOfParts, grad_out, of_weight.t(), None) if needs_x else None,
            None,
            None,
            None,
        )


def _empty(shape: Sequence[int]) -> Tensor:
    """Returns a tensor on ``meta``, which only has sizes and strides."""
    return torch.empty(shape, device="meta")
