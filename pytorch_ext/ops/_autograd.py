"""The ``torch.autograd.Function`` of an operator, and how Functions of trifuse are called.

Each Function takes ``constants``, the arguments that are not tensors, as its first argument, so
that ``needs_input_grad`` and the gradients have one entry for it and one for each tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from trifuse.ops import _sharding
from trifuse.ops._modes import without_autocast

if TYPE_CHECKING:
    from trifuse.ops._operator import Operator


class Forward(torch.autograd.Function):
    """A forward op with its backward op."""

    @staticmethod
    def forward(
        ctx: Any, constants: tuple[Operator, str, Sequence[Any], int], *flat: Tensor | None
    ) -> tuple[Tensor, ...]:
        operator, backend, options, save = constants
        tensors: Any = operator.unflatten(flat)
        last = (save,) if operator.saves else ()
        results: tuple[Tensor, ...] = call_below_autograd(
            operator.forward[backend], *tensors, *options, *last
        )
        first, *others = results
        ctx.operator, ctx.backend, ctx.options = operator, backend, options
        ctx.shape, ctx.dtype = first.shape, first.dtype
        ctx.shares_gradient = False
        if operator.shares_gradient is not None or operator.keep is not None:
            given, chosen = operator.tensors(*tensors), operator.options(*options)
            if operator.shares_gradient is not None:
                ctx.shares_gradient = operator.shares_gradient(given, chosen)
            if operator.keep is not None:
                kept = operator.keep(given, operator.results(*results), chosen)
                flat = tuple(operator.flatten(kept))
        ctx.set_materialize_grads(False)
        if len(results) > operator.returned:
            # A result that was not requested has shape (0,).
            absent = (t for t in others if t.shape == (0,) != first.shape)
            ctx.mark_non_differentiable(*results[operator.returned :], *absent)
        saved = [results[i] for i in operator.saved_places]
        if operator.output_may_change:
            saved[0], ctx.version = kept_output(first), first._version
        ctx.save_for_backward(*saved, *flat)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        operator: Operator = ctx.operator
        grads = grads[: operator.returned]
        if all(g is None for g in grads):
            return (None,) * len(ctx.needs_input_grad)
        first, *others = grads
        if first is None:
            other = next(g for g in others if g is not None)
            first = other.new_zeros(ctx.shape, dtype=ctx.dtype)
        tensors = ctx.saved_tensors  # read once, because a checkpoint provides them only once
        saved, flat = tensors[: len(operator.saved)], tensors[len(operator.saved) :]
        if operator.output_may_change and has_changed(saved[0], ctx.version):
            saved = (operator.first_result(ctx.backend, flat, ctx.options), *saved[1:])
        _, *needs_input_grad = ctx.needs_input_grad
        count = operator.count_differentiable(flat)
        needs_grad, never = needs_input_grad[:count], needs_input_grad[count:]
        computed = needs_grad
        if ctx.shares_gradient:
            needs_one, needs_two, *rest = needs_grad
            computed = [needs_one or needs_two, False, *rest]
        found = operator.backward[ctx.backend](
            first, *others, *operator.unflatten(flat), *saved, *ctx.options, computed
        )
        if ctx.shares_gradient:
            shared, _, *rest = found
            found = (shared, shared, *rest)
        results = [g if n else None for g, n in zip(found, needs_grad, strict=True)]
        return (None, *results, *(None for _ in never))


def kept_output(output: Tensor) -> Tensor:
    """Returns a tensor to save in place of an output that a caller may change before the backward.

    It shares the output's memory. torch raises if a saved tensor was changed; here the backward
    asks :func:`has_changed`, and then computes the output again.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        # The hooks, such as those of a checkpoint, save another tensor in its place. torch does not
        # raise there. A tensor that they detach from this one has its count of changes.
        return output.detach()
    kept = output.data  # does not count changes of the output
    kept.counted = output.detach()  # type: ignore[attr-defined]
    return kept


def has_changed(kept: Tensor, version: int) -> bool:
    """Returns whether an output may have changed since it had this version.

    Args:
        kept: what became of the result of :func:`kept_output`.
    """
    return bool(getattr(kept, "counted", kept)._version != version)


class Backward(torch.autograd.Function):
    """A backward op, differentiated through its formula.

    The saved results are functions of the other inputs. The formula recomputes them, so that the
    derivatives are complete without gradients for the saved results.
    """

    @staticmethod
    def forward(
        ctx: Any,
        constants: tuple[Operator, str, Sequence[Any], Sequence[bool]],
        *flat: Tensor | None,
    ) -> tuple[Tensor, ...]:
        operator, backend, options, needs_grad = constants
        count = len(flat) - len(operator.saved)
        inputs, saved = flat[:count], flat[count:]
        grads, tensors = inputs[: operator.returned], inputs[operator.returned :]
        ctx.operator, ctx.options, ctx.needs_grad = operator, options, needs_grad
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        return tuple(
            call_below_autograd(
                operator.backward[backend],
                *grads,
                *operator.unflatten(tensors),
                *saved,
                *options,
                list(needs_grad),
            )
        )

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        operator: Operator = ctx.operator
        given = ctx.saved_tensors
        _, *needs_grad = ctx.needs_input_grad
        used = [w and u is not None for w, u in zip(ctx.needs_grad, upstream, strict=True)]
        found: list[Tensor | None] = [None] * len(needs_grad)
        if not any(used):
            return (None, *found)
        if any(t is not None and _sharding.placements(t) is not None for t in given):
            raise NotImplementedError(
                f"{operator.name}: no second derivatives of DTensors, whose formula makes tensors "
                "that are none; take them of each process's part (DTensor.to_local)"
            )
        places = [i for i, (_, need) in enumerate(zip(given, needs_grad, strict=False)) if need]

        def gradients(*values: Tensor) -> tuple[Tensor, ...]:
            inputs = list(given)
            for i, value in zip(places, values, strict=True):
                inputs[i] = value
            grads, flat = inputs[: operator.returned], inputs[operator.returned :]
            call = operator.backward_call(
                grads, operator.unflatten(flat), None, ctx.options, ctx.needs_grad
            )
            results = operator.grad_formula(call)
            return tuple(g for g, u in zip(results, used, strict=True) if g is not None and u)

        with without_autocast():
            # vjp returns two values here; the third in its annotation exists only with has_aux.
            _, vjp = torch.func.vjp(gradients, *(given[i] for i in places))  # type: ignore[misc]
            derivatives = vjp(tuple(g for g, u in zip(upstream, used, strict=True) if u))
        for i, derivative in zip(places, derivatives, strict=True):
            found[i] = derivative
        return (None, *found)


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Calls ``function.apply`` at the level of differentiation that is being dispatched.

    torch's own ``apply`` looks up the arguments' defaults in every call, which takes longer than
    kernels on small tensors, and applies the transforms of ``torch.func`` to the call. Here the
    dispatcher applies them to the op instead. Tensors of classes that override torch's functions
    override this one.
    """
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if has_torch_function(tensors):
        return handle_torch_function(apply, tensors, function, *args)
    if torch._C._are_functorch_transforms_active():
        from torch._functorch.autograd_function import enable_single_level_autograd_function

        with enable_single_level_autograd_function():
            return _single_level(function).apply(*args)
    base: Any = super(torch.autograd.Function, function)
    return base.apply(*torch._functorch.utils.unwrap_dead_wrappers(args))


@functools.cache
def _single_level(function: type[torch.autograd.Function]) -> Any:
    """Returns a Function with the same forward and backward, to which torch applies no transforms.

    Since torch 2.15, every subclass of ``torch.autograd.Function`` applies them itself.
    """
    methods = {name: staticmethod(getattr(function, name)) for name in ("forward", "backward")}
    return type(function.__name__, (torch.autograd.function._SingleLevelFunction,), methods)


def call_below_autograd(op: Any, *args: Any) -> Any:
    """Calls an op from within the Function that differentiates it.

    The Function has disabled gradients, also for outer transforms, which need them.
    """
    if not torch._C._are_functorch_transforms_active():
        return op(*args)
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        return op(*args)
