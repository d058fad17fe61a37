"""Dropout with the generator that all of trifuse's operators share.

On many machines torch draws random numbers for a CPU in one thread, which makes dropout cost more
than the layer that it follows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from trifuse import backends
from trifuse.ops import (
    _autograd,
    _batching,
    _checks,
    _draws,
    _fast_path,
    _modes,
    _op,
    _sharding,
)
from trifuse.reference import philox
from trifuse.reference.philox import Place
from trifuse.reference.results import accumulation_dtype


def dropout(
    x: Tensor, p: float = 0.5, training: bool = True, *, batch_dim: int | None = None
) -> Tensor:
    """Zeroes elements with probability p and scales the others by 1/(1 - p).

    Srivastava et al., "Dropout" (2014); as ``torch.nn.functional.dropout``. No mask is stored: the
    backward draws it again.

    Args:
        x: any shape, float32, bfloat16, float16 or float64.
        p: in [0, 1], with a resolution of 2⁻¹⁶. Drawn from torch's default generator for the
            device; the same seed drops the same elements of the flattened x on every backend.
        training: if False, x is returned as it is.
        batch_dim: the batch dimension of x, 0 or 1, under
            :func:`trifuse.distributed.part_of_batch`. Default: the one set there.

    Returns:
        A contiguous tensor of the shape and dtype of x.

    Raises:
        TypeError: x is not a floating-point tensor.
        ValueError: p is not in [0, 1] (``trifuse.ArgumentError``).
        RuntimeError: the backend asked for by name can't serve the call.
    """
    if has_torch_function_unary(x):
        more = {} if batch_dim is None else {"batch_dim": batch_dim}
        result: Tensor = handle_torch_function(dropout, (x,), x, p, training, **more)
        return result
    if training is True and batch_dim is None and (fast := _fast_path.extension(p)) is not None:
        served: Tensor | None = fast.dropout(x, p)
        if served is not None:
            return served
    x = _checks.tensor("x", x)
    _checks.floating("x", x)
    p = _checks.probability("p", p)
    if not _checks.flag("training", training) or p == 0:
        return x
    place = _draws.place_of_elements(x.shape, batch_dim)
    backend, seed = _backend(x, place), _draws.draw(x, place)
    if _modes.requires_grad(x) and not _modes.transform_active():
        return _autograd.apply(_Dropout, backend, x, seed, p)
    return _OP.overloads[backend](x, seed, p)


def drop_by_seed(x: Tensor, seed: Tensor, place: Place, p: float) -> Tensor:
    """Drops elements of a part of a tensor with the seed of the whole. It has no derivative;
    applied to a gradient, it computes the derivative."""
    op = _OP.overloads[_backend(x, place)]
    found: Tensor = op(x, _draws.with_place(seed, place), p)
    return found


def _backend(x: Tensor, place: Place | None) -> str:
    """Chooses the backend of a call. Kernels draw for eight elements at once, so the formula serves
    a part of a tensor that splits such a group."""
    chosen = backends.choose(_call(x)).backend
    return chosen if _draws.is_aligned(place) else backends.FALLBACK


def _call(x: Tensor) -> backends.Call:
    return backends.Call("dropout", x.device.type, x.dtype)


class _Dropout(torch.autograd.Function):
    """Dropout with a fixed seed is linear in x, and so its own backward to any order."""

    @staticmethod
    def forward(ctx: Any, backend: str, x: Tensor, seed: Tensor, p: float) -> Tensor:
        ctx.backend, ctx.p, ctx.placements = backend, p, _sharding.placements(x)
        ctx.save_for_backward(seed)
        return _autograd.call_below_autograd(_OP.overloads[backend], x, seed, p)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (seed,) = ctx.saved_tensors
        grad = _sharding.placed(grad, ctx.placements)
        return None, _OP.overloads[ctx.backend](grad, seed, ctx.p), None, None


def _fake(x: Tensor, seed: Tensor, p: float) -> Tensor:
    return x.new_empty(x.shape)


def _formula(x: Tensor, seed: Tensor, p: float) -> Tensor:
    keep = philox.dropout_keep_flat(seed, x.numel(), p).view(x.shape)
    wide = accumulation_dtype(x.dtype)
    return torch.where(keep, x.to(wide) * philox.keep_scale(p), 0.0).to(x.dtype)


def _derivative(backend: str, x: Tensor, seed: Tensor, p: float) -> Tensor:
    if _modes.forward_mode():
        return _formula(x, seed, p)
    return _autograd.apply(_Dropout, backend, x, seed, p)


def _vmap(op: Any, info: Any, in_dims: Any, *args: Any) -> Any:
    # Elements are numbered within a sample, as if it were alone.
    (result,), (dim,) = _batching.one_by_one(lambda *each: (op(*each),), info, in_dims, args)
    return result, dim


_OP = _op.Op(
    "dropout",
    "(Tensor x, Tensor seed, float dropout_p) -> Tensor",
    fake=_fake,
    vmap=_vmap,
    derivative=_derivative,
    decomposition=lambda backend, *args: _formula(*args),
    describe=lambda x, *rest: _call(x),
)
for _overload in _OP.overloads.values():
    _sharding.register_single(_overload, _sharding.dropout, _sharding.elements)


@_op.implement("dropout", "eager")
def _eager(x: Tensor, seed: Tensor, p: float) -> Tensor:
    return x.new_empty(x.shape).copy_(_formula(x, seed, p))


_OP.implement_triton("dropout")
