"""trifuse::linear, trifuse::linear_packed and the operators that pack weights, with their rules.

csrc/cpu/linear.cpp implements them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trifuse.ops import _autograd, _modes, _op, _sharding
from trifuse.ops._linear_choice import is_available
from trifuse.ops.activations import ACTIVATIONS, Activation, activate

# Where both are sharded, x is gathered and not the weight, as in torch's layer.
SHARDED_FIRST = "weight"


def torch_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation | None = None
) -> Tensor:
    """``torch.nn.functional.linear``, optionally followed by an activation."""
    if type(x) is Tensor and x.dtype == torch.bfloat16 and x.is_cpu and not x.is_contiguous():
        # On AMX, torch 2.13 multiplies the memory between such rows by 0, so a NaN there would
        # spread.
        x = x.contiguous()
    out = F.linear(x, weight, bias)
    return out if activation is None else activate(out, activation)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, relu: bool = False) -> Tensor:
    """Returns x weightᵀ + bias of x (..., K) and weight (N, K), followed by ReLU if ``relu``."""
    activation = "relu" if relu else None
    if _modes.requires_grad(x, weight, bias) and not _modes.transform_active():
        return _autograd.apply(_Linear, x, weight, bias, activation)
    return _of_rows(torch.ops.trifuse.linear, x, weight, bias, activation)


def _of_rows(op: Any, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """Calls an op, which takes rows (M, K), with x (..., K)."""
    return _of_shape(op(_rows(x), weight, *rest), x)


def _of_shape(rows: Tensor, like: Tensor) -> Tensor:
    """Returns rows (M, N) in the shape of ``like`` (..., K) with N features."""
    return rows if like.dim() == 2 else rows.view(*like.shape[:-1], rows.shape[1])


def _rows(x: Tensor) -> Tensor:
    """Returns x (..., K) as rows (M, K)."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


class _Linear(torch.autograd.Function):
    """A product whose gradients are two more such products."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
    ) -> Tensor:
        rows = _rows(x)
        out = _autograd.call_below_autograd(
            torch.ops.trifuse.linear, rows, weight, bias, activation
        )
        if x.dim() != 2:  # not a view for autograd, so that the caller may change it in place
            out = torch.ops.aten._unsafe_view(out, (*x.shape[:-1], weight.shape[0]))
        if not torch._C._is_alias_of(rows, x):  # type: ignore[attr-defined]
            x = rows  # a copy, beside which x may change
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        ctx.transposed = weight.stride(0) == 1 and not weight.is_contiguous()
        # x and the weight are each needed for the other's gradient. The fast path saves the same
        # tensors, so that a checkpoint may record one path and replay the other.
        ctx.save_for_backward(
            x if needs_weight else None,
            weight if needs_x else None,
            out if activation == "relu" else None,
        )
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, out = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_rows, grad_bias = _bias_gradient(
            _rows(grad_out), None if out is None else _rows(out), needs_bias
        )
        return (
            _of_shape(product(grad_rows, weight.t()), grad_out) if needs_x else None,
            weight_gradient(grad_rows, _rows(x), ctx.transposed) if needs_weight else None,
            grad_bias,
            None,
        )


def _bias_gradient(grad: Tensor, out: Tensor | None, needed: bool) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of a linear layer's result and of its bias.

    Args:
        grad: (M, N), the gradient of ``out``, or of the layer's result.
        out: (M, N), what ReLU returned for the layer's result; None if no ReLU follows.
        needed: whether the bias needs a gradient.
    """
    if (out is None and not needed) or not _by_kernel(grad, out):
        if out is not None:
            grad = torch.ops.aten.threshold_backward(grad, out, 0)
        return grad, grad.sum(0) if needed else None
    grad_y, grad_bias = torch.ops.trifuse.bias_gradient(grad, out)
    return grad if out is None else grad_y, grad_bias if needed else None


def _by_kernel(grad: Tensor, out: Tensor | None) -> bool:
    """Returns whether a kernel without a derivative may compute a backward."""
    # First, because Dynamo can't trace the others.
    if _modes.is_watched() or torch.is_grad_enabled() or torch.jit.is_tracing():
        return False
    if _modes.is_batched(grad) or not is_available(grad.dtype) or grad.numel() == 0:
        return False
    # Hooks may have kept ReLU's result in another form.
    return all(
        type(t) is Tensor and t.is_cpu and t.layout == torch.strided and t.dtype == grad.dtype
        for t in ((grad,) if out is None else (grad, out))
    )


def weight_gradient(grad_out: Tensor, x: Tensor, transposed: bool) -> Tensor:
    """Returns the gradient of a weight in the weight's layout, so that it needs no copy."""
    if transposed:
        return product(x.t(), grad_out.t()).t()
    return product(grad_out.t(), x.t())


def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation | None = None
) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _derivative(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation | None = None
) -> Tensor:
    if x.dim() != 2:  # the op takes rows, the Function any number of dimensions
        raise ValueError(f"x: expected 2 dimensions; got shape {tuple(x.shape)}")
    if _modes.forward_mode() or activation not in (None, "relu"):
        return torch_linear(x, weight, bias, activation)
    return _autograd.apply(_Linear, x, weight, bias, activation)


def _vmap(
    info: Any,
    in_dims: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation | None = None,
) -> Any:
    """The batching rule: torch's product, which supports batched weights."""
    x_dim, weight_dim, bias_dim, *_ = in_dims
    x, weight = (
        t if dim is None else t.movedim(dim, 0) for t, dim in ((x, x_dim), (weight, weight_dim))
    )
    out = x @ weight.mT
    if bias is not None:
        out = out + (bias if bias_dim is None else bias.movedim(bias_dim, 0).unsqueeze(-2))
    if out.dim() == 2:  # nothing is batched
        out = out.expand(info.batch_size, *out.shape)
    return out if activation is None else ACTIVATIONS[activation](out), 0


# A kernel that a backward calls where nothing differentiates or transforms it.
_op.library.define("bias_gradient(Tensor grad, Tensor? out) -> (Tensor, Tensor)")

_SIGNATURE = "(Tensor x, Tensor weight, Tensor? bias, str? activation=None) -> Tensor"
_op.library.define(f"linear{_SIGNATURE}")
torch.library.register_fake("trifuse::linear", _fake, lib=_op.library)
_op.register_derivative("linear", _SIGNATURE, _derivative)
_op.register_batching("linear", _vmap)
_op.register_decomposition(torch.ops.trifuse.linear.default, torch_linear, _fake)
_op.register_flops(
    torch.ops.trifuse.linear, lambda x, weight, *rest: 2 * x.shape[0] * weight.numel()
)
# For programs that were moved to a device without trifuse's product.
_op.implement("linear")(torch_linear)
_sharding.register_single(torch.ops.trifuse.linear.default, _sharding.linear, first=SHARDED_FIRST)

# The product with a packed weight, and the checksums that show whether the weight is unchanged. A
# trace holds the product only if the weight is frozen, because any other weight may change after
# the trace.
_op.library.define("pack_linear(Tensor weight) -> Tensor")
_op.library.define("pack_linears(Tensor[] weights) -> Tensor[]")
_op.library.define(
    "unpack_linear(Tensor packed, int out_features, int in_features, ScalarType dtype, "
    "str? instruction_set=None) -> Tensor"
)
_op.library.define(
    "linear_unpacked(Tensor x, Tensor weight, Tensor? bias, str? activation=None, "
    "Tensor? up=None, Tensor? up_bias=None) -> Tensor"
)
_op.library.define("checksum(Tensor weight) -> Tensor")
torch.library.register_fake(
    "trifuse::linear_unpacked",
    lambda x, weight, *rest: x.new_empty(x.shape[0], weight.shape[0]),
    lib=_op.library,
)
torch.library.register_fake(
    "trifuse::unpack_linear",
    lambda packed, out_features, in_features, dtype, *rest: packed.new_empty(
        out_features, in_features, dtype=dtype
    ),
    lib=_op.library,
)


def _packed_fake(x: Tensor, packed: Tensor, out_features: int, *rest: Any) -> Tensor:
    return x.new_empty(x.shape[0], out_features)


def _packed_formula(
    x: Tensor,
    packed: Tensor,
    out_features: int,
    bias: Tensor | None,
    activation: Activation | None = None,
    up: Tensor | None = None,
    up_bias: Tensor | None = None,
) -> Tensor:
    """linear_packed in plain torch, except for the weights, which only the extension can unpack."""
    unpack, sizes = torch.ops.trifuse.unpack_linear, (out_features, x.shape[1], x.dtype)
    out = torch_linear(x, unpack(packed, *sizes), bias, activation)
    return out if up is None else out * F.linear(x, unpack(up, *sizes), up_bias)


def _packed_flops(
    x: Tensor,
    packed: Tensor,
    out_features: int,
    bias: Tensor | None,
    activation: Activation | None = None,
    up: Tensor | None = None,
    up_bias: Tensor | None = None,
) -> int:
    return 2 * x.numel() * out_features * (1 if up is None else 2)


def _packed_vmap(info: Any, in_dims: Any, x: Tensor, *rest: Any) -> Any:
    """The batching rule: one product of all rows if no weight or bias is batched; else a loop."""
    x_dim, *dims = in_dims
    product = torch.ops.trifuse.linear_packed
    if x_dim is not None and all(dim is None for dim in dims):
        x = x.movedim(x_dim, 0)
        return product(x.flatten(0, 1), *rest).unflatten(0, x.shape[:2]), 0
    args = list(zip((x, *rest), in_dims, strict=True))
    outs = [
        product(*(arg if dim is None else arg.select(dim, i) for arg, dim in args))
        for i in range(info.batch_size)
    ]
    return torch.stack(outs), 0


_PACKED_SIGNATURE = (
    "(Tensor x, Tensor packed, int out_features, Tensor? bias, str? activation=None, "
    "Tensor? up=None, Tensor? up_bias=None) -> Tensor"
)
_op.library.define(f"linear_packed{_PACKED_SIGNATURE}")
torch.library.register_fake("trifuse::linear_packed", _packed_fake, lib=_op.library)
_op.register_derivative("linear_packed", _PACKED_SIGNATURE, _packed_formula)
_op.register_batching("linear_packed", _packed_vmap)
_op.register_decomposition(torch.ops.trifuse.linear_packed.default, _packed_formula, _packed_fake)
_op.register_flops(torch.ops.trifuse.linear_packed, _packed_flops)
