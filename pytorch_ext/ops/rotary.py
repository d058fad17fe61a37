"""Rotary position embeddings of queries or keys, on a CPU in one pass.

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021), equation 34, with
the pairs of features as in GPT-NeoX: feature i turns with feature i + R/2. Written out in torch, a
rotation is seven operations, each of which reads and writes whole tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trifuse.ops import _autograd, _fast_path, _modes, _op


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1, *, in_float32: bool = False
) -> Tensor | None:
    """Computes x cos + rotate_half(x) sin, with rotate_half([x1, x2]) = [-x2, x1].

    Args:
        x: (..., features), up to 4 dimensions.
        cos, sin: (..., R), of the dtype of x, or float32 beside bfloat16. R is even and at most the
            number of features; features from R on are returned as they are.
        unsqueeze_dim: where cos and sin get a dimension of size 1, after which they broadcast to x.
        in_float32: rounds bfloat16 once. By default each product is rounded too, as it is if cos
            and sin are bfloat16 and torch computes this operation by operation.

    Returns:
        The shape and dtype of x, and its order in memory, with gradients of x; None if the call is
        not plain, isn't valid, or is not on a CPU. Then the caller's own operations must serve it.
    """
    fast = _fast_path.extension()
    out: Tensor | None = None
    if fast is not None:
        out = fast.rotate(x, cos, sin, unsqueeze_dim, in_float32)
    return out


class _Rotate(torch.autograd.Function):
    """A rotation is linear in x: its derivative is the transposed one, to any order."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        unsqueeze_dim: int,
        in_float32: bool,
        transposed: bool,
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.options = unsqueeze_dim, in_float32, transposed
        return _autograd.call_below_autograd(
            torch.ops.trifuse.rotate, x, cos, sin, unsqueeze_dim, in_float32, transposed
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        unsqueeze_dim, in_float32, transposed = ctx.options
        return (
            torch.ops.trifuse.rotate(grad, cos, sin, unsqueeze_dim, in_float32, not transposed),
            *(None,) * 5,
        )


def _formula(
    x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, in_float32: bool, transposed: bool
) -> Tensor:
    """The same in torch's operations, on any device and with all derivatives."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _rotated(x, cos, sin, in_float32, transposed)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, in_float32: bool, transposed: bool) -> Tensor:
    R = cos.shape[-1]
    turning = x[..., :R]
    if in_float32 and x.dtype == torch.bfloat16:
        turning = turning.float()
    if transposed:
        first, second = (turning * sin).chunk(2, -1)
        turned = torch.cat((second, -first), -1)
    else:
        first, second = turning.chunk(2, -1)
        turned = torch.cat((-second, first), -1) * sin
    out = (turning * cos + turned).to(x.dtype)
    return out if x.shape[-1] == R else torch.cat((out, x[..., R:]), -1)


def _derivative(x: Tensor, cos: Tensor, sin: Tensor, *options: Any) -> Tensor:
    if _modes.forward_mode() or cos.requires_grad or sin.requires_grad:
        return _formula(x, cos, sin, *options)
    rotated: Tensor = _autograd.apply(_Rotate, x, cos, sin, *options)
    return rotated


def _fake(x: Tensor, *args: Any) -> Tensor:
    features_apart = x.shape[-1] > 1 and x.stride(-1) != 1
    return x.new_empty(x.shape) if features_apart else torch.empty_like(x)


def _vmap(
    info: Any,
    in_dims: Any,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int,
    in_float32: bool,
    transposed: bool,
) -> Any:
    """The batching rule: the formula, with one more dimension in front."""
    x_dim, *dims, _, _, _ = in_dims
    x = x.expand(info.batch_size, *x.shape) if x_dim is None else x.movedim(x_dim, 0)
    place = unsqueeze_dim if unsqueeze_dim < 0 else unsqueeze_dim + 1

    def aligned(t: Tensor, dim: int | None) -> Tensor:
        batched = (t[None] if dim is None else t.movedim(dim, 0)).unsqueeze(place)
        absent = (1,) * (x.dim() - batched.dim())
        return batched.reshape(len(batched), *absent, *batched.shape[1:])

    cos_dim, sin_dim = dims
    return _rotated(x, aligned(cos, cos_dim), aligned(sin, sin_dim), in_float32, transposed), 0


_SIGNATURE = (
    "(Tensor x, Tensor cos, Tensor sin, int unsqueeze_dim, bool in_float32, bool transposed) "
    "-> Tensor"
)
_op.library.define(f"rotate{_SIGNATURE}")
torch.library.register_fake("trifuse::rotate", _fake, lib=_op.library)
_op.register_derivative("rotate", _SIGNATURE, _derivative)
_op.register_batching("rotate", _vmap)
_op.register_decomposition(torch.ops.trifuse.rotate.default, _formula, _fake)
# For programs that were moved to a device without the kernel.
_op.implement("rotate")(_formula)
