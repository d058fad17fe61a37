"""How an operator meets torch's dispatcher.

Each operator has two opaque ops, ``<operator>_forward`` and ``<operator>_backward``, with one
overload per backend: ``torch.ops.trifuse.attention_forward.cpp``. Opaque, because a traced backward
made of differentiable pieces over saved outputs gives silently wrong second derivatives; one
overload each, because a profile then shows which backend ran. The C++ extension registers its own
implementations; vmap rules are the same for all backends, and fakes unless told otherwise.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from trifuse.backends import ORDER

library = torch.library.Library("trifuse", "DEF")


def define(
    operator: str,
    signature: str,
    fake: Callable[..., Any],
    vmap: Callable[..., Any],
    fakes: Mapping[str, Callable[..., Any]] | None = None,
    backends: Sequence[str] = ORDER,
) -> None:
    """Declare an op for every backend, or for some.

    Args:
        operator: its name, such as "attention_forward".
        signature: arguments and returns in torch's schema language, without the name.
        fake: shapes, dtypes and strides of the results.
        vmap: its batching rule, as :func:`torch.library.register_vmap` takes it, with the overload
            to call as an extra first argument.
        fakes: of the backends that leave something else to their backward than the others do.
        backends: those that have it.
    """
    for backend in backends:
        name = f"trifuse::{operator}.{backend}"
        library.define(f"{operator}.{backend}{signature}")
        torch.library.register_fake(name, (fakes or {}).get(backend, fake), lib=library)
        overload = getattr(getattr(torch.ops.trifuse, operator), backend)

        def rule(info: Any, in_dims: Any, *args: Any, _overload: Any = overload) -> Any:
            return vmap(_overload, info, in_dims, *args)

        torch.library.register_vmap(name, rule, lib=library)


def one_by_one(op: Any, info: Any, in_dims: Any, args: tuple[Any, ...]) -> Any:
    """A batching rule that calls the op for each sample: for calls that can't be made into one."""

    def sample(x: Any, dim: Any, i: int) -> Any:
        if isinstance(dim, (list, tuple)):  # beside a list stands a list of dimensions
            return [sample(*pair, i) for pair in zip(x, dim, strict=True)]
        return x.select(dim, i) if isinstance(dim, int) else x

    calls = (
        [sample(*pair, i) for pair in zip(args, in_dims, strict=True)]
        for i in range(info.batch_size)
    )
    results = zip(*(op(*call) for call in calls), strict=True)
    stacked = tuple(torch.stack(r) for r in results)
    return stacked, (0,) * len(stacked)


def implement(
    operator: str, backend: str, key: str = "CompositeExplicitAutograd"
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate the Python implementation of an op for one backend: eager and Triton."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def kernel(*args: Any) -> Any:
            with without_autocast():
                return function(*args)

        library.impl(f"{operator}.{backend}", kernel, key)
        return function

    return register


def implement_triton(operator: str, check: Callable[..., None] | None = None) -> None:
    """Both ops of an operator, by the launchers of their names in ``trifuse.kernels.<operator>``.

    Args:
        check: what looks at the values in the forward's arguments; the backward's are the same.
    """

    def register(op: str, check: Callable[..., None] | None) -> None:
        @implement(op, "triton")
        def launch(*args: Any) -> Any:
            if check is not None:
                check(*args)
            # Imported when it is called: Triton need not be there.
            return getattr(importlib.import_module(f"trifuse.kernels.{operator}"), op)(*args)

    register(f"{operator}_forward", check)
    register(f"{operator}_backward", None)


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply``, without asking in every call which arguments have defaults.

    That takes longer than the kernels of small tensors do.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    args = torch._functorch.utils.unwrap_dead_wrappers(args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def second_derivatives(
    formula: Callable[..., Sequence[Any]],
    saved: Sequence[Any],
    variables: Sequence[int],
    grads: Sequence[torch.Tensor],
    wanted: Sequence[bool],
) -> list[torch.Tensor | None]:
    """What the backward of a backward returns for the tensors that it saved.

    Args:
        formula: the backward in differentiable pieces, of those tensors.
        saved: the tensors, or None.
        variables: the places of those that need a gradient.
        grads: of the formula's results.
        wanted: which of the results count.
    """

    def results(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = list(saved)
        for i, value in zip(variables, values, strict=True):
            inputs[i] = value
        return tuple(r for r, w in zip(formula(*inputs), wanted, strict=True) if w)

    with without_autocast():
        # Of three results, the last comes only with has_aux.
        _, vjp = torch.func.vjp(results, *(saved[i] for i in variables))  # type: ignore[misc]
        derivatives = vjp(tuple(g for g, w in zip(grads, wanted, strict=True) if w))
    found: list[torch.Tensor | None] = [None] * len(saved)
    for i, derivative in zip(variables, derivatives, strict=True):
        found[i] = derivative
    return found


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """What autocast has tensors like x computed in; None where it is off."""
    device = "cpu" if x.is_cpu else x.device.type  # the name of a device takes a microsecond
    if _has_autocast(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


def _has_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device)


# See backends._capability. torch 2.11's Dynamo can't trace into it.
_has_autocast._dynamo_marked_constant = True  # type: ignore[attr-defined]


def without_autocast() -> AbstractContextManager[None]:
    """What an operator computes in is its own affair; autocast has had its say on the arguments."""
    return torch._C._DisableAutocast()


def differentiating() -> bool:
    """Whether some transform might follow the call, so that it must go through autograd.

    Calling an opaque op directly saves a few microseconds when nothing needs a gradient, but under
    functorch or forward-mode AD it would drop the derivative without a word.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_mode()
    )


def for_dynamo(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """What a Function is to be given: views of the tensors, where Dynamo would err about them.

    It refuses the same tensor twice, as in self-attention of x. And it takes what a function under
    ``torch.func.grad`` is given for tensors that need no gradient, though not their views; of a
    Function that nothing needs a gradient of it drops the backward, so the gradient would be zero.
    Nor does it ask a Function for its forward-mode derivative, which ours don't have. And it takes
    a Function that a backward calls for one that nothing needs a gradient of.
    """
    if not torch.compiler.is_compiling():
        return tensors
    if forward_mode():
        raise NotImplementedError("trifuse's operators have no forward-mode derivatives")
    if _gradient_transforms() > 1:
        raise NotImplementedError(
            "torch.compile loses gradients of gradients that torch.func takes inside; "
            "take them uncompiled"
        )
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    result: list[torch.Tensor | None] = []
    for i, t in enumerate(tensors):
        seen = t is not None and any(t is other for other in tensors[:i])
        result.append(t.view_as(t) if t is not None and (seen or transformed) else t)
    return tuple(result)


def _gradient_transforms() -> int:
    """How many ``torch.func.grad`` and the like are around the call."""
    grad = torch._C._functorch.TransformType.Grad
    return [each.key() for each in torch._C._functorch.get_interpreter_stack() or ()].count(grad)


# As torch.compiler.assume_constant_result does, which would import Dynamo with trifuse.
_gradient_transforms._dynamo_marked_constant = True  # type: ignore[attr-defined]


def forward_mode() -> bool:
    """Whether a tensor might carry a tangent, which an opaque op would drop."""
    return torch.autograd.forward_ad._current_level >= 0
