"""Batching rules for vmap: the samples become one call with a larger batch, or one call each.

A rule takes the op to call, ``info`` with the number of samples, the dimension of the samples in
each argument, and the arguments, as :func:`torch.library.register_vmap` passes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from trifuse.ops._modes import is_batched

if TYPE_CHECKING:
    from trifuse.ops._operator import Operator

# In ``Operator.axes``: all dimensions before the last are batch dimensions.
LEADING = -1


def fold_forward(operator: Operator, op: Any, info: Any, in_dims: Any, *args: Any) -> Any:
    """The rule of a forward op."""
    tensors, *others = operator.split_forward(args)
    dims, *_ = operator.split_forward(in_dims)
    arguments = _named(operator.tensors._fields, tensors, dims)
    if not _foldable(operator, arguments):
        return one_by_one(op, info, in_dims, args)
    N, B = info.batch_size, _batch(operator, arguments[0])
    folded = [_fold(operator, argument, N, B) for argument in arguments]
    results = op(*folded, *(each for part in others for each in part))
    return _unzip(
        _unfold(operator, name, r, N)
        for name, r in zip(operator.results._fields, results, strict=True)
    )


def fold_backward(operator: Operator, op: Any, info: Any, in_dims: Any, *args: Any) -> Any:
    """The rule of a backward op."""
    grads, tensors, saved, options, needs_grad = operator.split_backward(args)
    grad_dims, tensor_dims, saved_dims, *_ = operator.split_backward(in_dims)
    inputs = _named(operator.tensors._fields, tensors, tensor_dims)
    arguments = [
        *_named(operator.results._fields[: operator.returned], grads, grad_dims),
        *inputs,
        *_named(operator.saved, saved, saved_dims),
    ]
    flat = _flattened(inputs)

    def call(*each: Any) -> Any:
        # Kernels expect saved results in the layout in which the forward produced them.
        grads, tensors, saved, options, needs_grad = operator.split_backward(each)
        return op(*grads, *tensors, *(t.contiguous() for t in saved), *options, needs_grad)

    apart = any(w and t.name not in operator.axes for t, w in zip(flat, needs_grad, strict=False))
    if apart or not _foldable(operator, arguments):
        results, dims = one_by_one(call, info, in_dims, args)
        return operator.returns(results), operator.returns(dims)
    N, B = info.batch_size, _batch(operator, inputs[0])
    names = operator.tensors._fields if operator.list_index is None else ()
    is_wanted = dict(zip(names, needs_grad, strict=False))
    folded = [
        _fold(operator, argument, N, B, expand_shared=is_wanted.get(argument.name, False))
        for argument in arguments
    ]
    pairs = []
    for t, g, w in zip(flat, call(*folded, *options, needs_grad), needs_grad, strict=False):
        g, out_dim = _unfold(operator, t.name, g, N) if w else (g.expand(N, *g.shape), 0)
        if w and _batch(operator, t) != B:  # it was broadcast
            g = g.sum(operator.axes[t.name] + 1, keepdim=True)
        pairs.append((g, out_dim))
    results, dims = _unzip(pairs)
    return operator.returns(results), operator.returns(dims)


class _Argument(NamedTuple):
    """A tensor argument of an op, or a list of tensors."""

    name: str
    value: Any  # a tensor or None
    dim: Any  # the dimension of the samples, or None if all samples share the value


def _named(names: Sequence[str], values: Sequence[Any], dims: Sequence[Any]) -> list[_Argument]:
    return [_Argument(*each) for each in zip(names, values, dims, strict=True)]


def _flattened(arguments: list[_Argument]) -> list[_Argument]:
    """Returns the arguments with each list replaced by its tensors."""
    flat: list[_Argument] = []
    for name, value, dim in arguments:
        if isinstance(value, (list, tuple)):
            dims = dim or [None] * len(value)
            flat += [_Argument(name, *pair) for pair in zip(value, dims, strict=True)]
        else:
            flat.append(_Argument(name, value, dim))
    return flat


def _foldable(operator: Operator, arguments: Sequence[_Argument]) -> bool:
    for name, value, dim in arguments:
        if name in operator.unfoldable and value is not None:
            return False
        dims = dim if isinstance(dim, (list, tuple)) else [dim]
        if name not in operator.axes and any(d is not None for d in dims):
            return False
    return True


def _batch(operator: Operator, argument: _Argument) -> int:
    """Returns the size of one sample's batch."""
    name, t, dim = argument
    axis = operator.axes[name]
    if t is None or axis == LEADING:
        return 1
    sample: Sequence[int] = t.shape if dim is None else t.movedim(dim, 0).shape[1:]
    return sample[axis]


def _fold(
    operator: Operator, argument: _Argument, N: int, B: int, expand_shared: bool = False
) -> Any:
    """Folds N samples into one batch.

    A tensor that all samples share and that broadcasts over the batch stays as it is, unless
    ``expand_shared``.
    """
    name, t, dim = argument
    axis = operator.axes.get(name)
    if t is None or axis is None:
        return t
    if axis == LEADING:
        return t.expand(N, *t.shape) if dim is None else t.movedim(dim, 0)
    if t.dim() <= axis + (dim is not None):  # nothing was saved
        return t if dim is None else t.movedim(dim, 0)[0]
    size = _batch(operator, argument)
    if dim is None and size == 1 != B and not expand_shared:
        return t
    t = t.expand(N, *t.shape) if dim is None else t.movedim(dim, 0)
    if size != B:
        t = t.expand(*t.shape[: axis + 1], B, *t.shape[axis + 2 :])
    return t.movedim(0, axis).flatten(axis, axis + 1)


def _unfold(operator: Operator, name: str, t: Tensor, N: int) -> tuple[Tensor, int]:
    """Unfolds a result into its samples; returns it and the dimension of the samples."""
    axis = operator.axes[name]
    if axis == LEADING:
        return (t, 0) if t.shape[0] == N else (t.expand(N, *t.shape), 0)
    if t.dim() <= axis:  # nothing was saved
        return t.expand(N, *t.shape), 0
    return t.unflatten(axis, (N, t.shape[axis] // N)), axis


def _unzip(pairs: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    first, second = zip(*pairs, strict=True)
    return first, second


def one_by_one(op: Any, info: Any, in_dims: Any, args: tuple[Any, ...]) -> Any:
    """A rule that calls the op once per sample, for calls that can't be folded."""

    def sample(x: Any, dim: Any, i: int) -> Any:
        if isinstance(dim, (list, tuple)):  # a list of tensors has a list of dimensions
            return [sample(*pair, i) for pair in zip(x, dim, strict=True)]
        return x.select(dim, i) if isinstance(dim, int) else x

    calls = (
        [sample(*pair, i) for pair in zip(args, in_dims, strict=True)]
        for i in range(info.batch_size)
    )
    results = zip(*(op(*call) for call in calls), strict=True)
    stacked = tuple(torch.stack(r) for r in results)
    return stacked, (0,) * len(stacked)


# The older vmap ----------------------------------------------------------------------------------


class _Info(NamedTuple):
    """The part of torch.func.vmap's first argument that a rule reads."""

    batch_size: int


def older_vmap(rule: Callable[..., Any], *args: Any) -> Any:
    """Applies a rule to the batched tensors of ``torch._vmap_internals``."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    sizes: list[int] = []

    def unwrap(t: Any) -> Any:
        if isinstance(t, (list, tuple)):
            pairs = [unwrap(each) for each in t]
            return [value for value, _ in pairs], [dim for _, dim in pairs]
        if not isinstance(t, Tensor) or not is_batched(t):
            return t, None
        t = torch._remove_batch_dim(t, level, -1, 0)
        sizes.append(t.shape[0])
        return t, 0

    values, in_dims = unwrap(args)
    results, dims = rule(_Info(sizes[0]), tuple(in_dims), *values)
    if isinstance(results, Tensor):
        return torch._add_batch_dim(results, dims, level)
    wrapped = [torch._add_batch_dim(r, d, level) for r, d in zip(results, dims, strict=True)]
    return wrapped if isinstance(results, list) else tuple(wrapped)
