"""Rotary position embeddings of queries or keys, on a CPU in one pass.

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021), equation 34.
Written out in torch, a rotation is seven operations, each of which reads and writes whole tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trifuse.ops import _autograd, _fast_path, _modes, _op


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int = 1,
    *,
    in_float32: bool = False,
    interleaved: bool = False,
    per_pair: bool = False,
) -> Tensor | None:
    """Rotates pairs of features: (x1, x2) becomes (x1 cos - x2 sin, x2 cos + x1 sin).

    Args:
        x: (..., features), up to 4 dimensions.
        cos, sin: (..., R), of the dtype of x, or float32 beside bfloat16. R is even and at most the
            number of features; features from R on are returned as they are.
        unsqueeze_dim: where cos and sin get a dimension of size 1, after which they broadcast to x.
        in_float32: rounds bfloat16 once. By default each product is rounded too, as it is if cos
            and sin are bfloat16 and torch computes this operation by operation.
        interleaved: whether features 2 i and 2 i + 1 are a pair, as in the paper; by default i and
            i + R/2 are.
        per_pair: whether cos and sin are (..., R/2), one number for each pair.

    Returns:
        The shape and dtype of x, and its order in memory, with gradients of x; None if the call is
        not plain, isn't valid, or is not on a CPU. Then the caller's own operations must serve it.
    """
    fast = _fast_path.extension()
    out: Tensor | None = None
    if fast is not None:
        out = fast.rotate(x, cos, sin, unsqueeze_dim, in_float32, interleaved, per_pair)
    return out


class _Rotate(torch.autograd.Function):
    """A rotation is linear in x: its derivative is the transposed one, to any order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, *options: Any) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.options = options
        out: Tensor = _autograd.call_below_autograd(torch.ops.trifuse.rotate, x, cos, sin, *options)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *options, transposed = ctx.options
        found = torch.ops.trifuse.rotate(grad, *ctx.saved_tensors, *options, not transposed)
        return found, *(None,) * (2 + len(ctx.options))


def _formula(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, *options: Any) -> Tensor:
    """The same in torch's operations, on any device and with all derivatives."""
    return _rotated(x, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim), *options)


def _rotated(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    in_float32: bool,
    interleaved: bool,
    per_pair: bool,
    transposed: bool,
) -> Tensor:
    """As the op, with cos and sin that broadcast to x."""

    def split(t: Tensor) -> tuple[Tensor, ...]:
        return (t[..., ::2], t[..., 1::2]) if interleaved else t.chunk(2, -1)

    R = 2 * cos.shape[-1] if per_pair else cos.shape[-1]
    turning = x[..., :R]
    if in_float32 and x.dtype == torch.bfloat16:
        turning = turning.float()
    (x1, x2), (c1, c2), (s1, s2) = (
        split(turning),
        (cos, cos) if per_pair else split(cos),
        (sin, sin) if per_pair else split(sin),
    )
    pair = (
        (x1 * c1 + x2 * s2, x2 * c2 - x1 * s1)
        if transposed
        else (x1 * c1 - x2 * s1, x2 * c2 + x1 * s2)
    )
    out = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((out.to(x.dtype), x[..., R:]), -1)


def _derivative(x: Tensor, cos: Tensor, sin: Tensor, *options: Any) -> Tensor:
    if _modes.forward_mode() or cos.requires_grad or sin.requires_grad:
        return _formula(x, cos, sin, *options)
    rotated: Tensor = _autograd.apply(_Rotate, x, cos, sin, *options)
    return rotated


def _fake(x: Tensor, *args: Any) -> Tensor:
    out = torch.empty_like(x)
    return out if x.shape[-1] <= 1 or out.stride(-1) == 1 else x.new_empty(x.shape)


def _vmap(
    info: Any,
    in_dims: Any,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int,
    *options: Any,
) -> Any:
    """The batching rule: the formula, with one more dimension in front."""
    x_dim, cos_dim, sin_dim, *_ = in_dims
    x = x.expand(info.batch_size, *x.shape) if x_dim is None else x.movedim(x_dim, 0)
    place = unsqueeze_dim if unsqueeze_dim < 0 else unsqueeze_dim + 1

    def aligned(t: Tensor, dim: int | None) -> Tensor:
        batched = (t[None] if dim is None else t.movedim(dim, 0)).unsqueeze(place)
        absent = (1,) * (x.dim() - batched.dim())
        return batched.reshape(len(batched), *absent, *batched.shape[1:])

    return _rotated(x, aligned(cos, cos_dim), aligned(sin, sin_dim), *options), 0


_SIGNATURE = (
    "(Tensor x, Tensor cos, Tensor sin, int unsqueeze_dim, bool in_float32, bool interleaved, "
    "bool per_pair, bool transposed) -> Tensor"
)
_op.library.define(f"rotate{_SIGNATURE}")
torch.library.register_fake("trifuse::rotate", _fake, lib=_op.library)
_op.register_derivative("rotate", _SIGNATURE, _derivative)
_op.register_batching("rotate", _vmap)
_op.register_decomposition(torch.ops.trifuse.rotate.default, _formula, _fake)
# For programs that were moved to a device without the kernel.
_op.implement("rotate")(_formula)
