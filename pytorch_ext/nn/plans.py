"""Checks before a call of several modules that runs as one op.

Such a call skips the modules' own ``forward``. So it is checked first that they are the modules,
and hold the values, that the arguments of the op were made from, and that nothing watches them.
The functions ``modules_as_planned`` and ``values_as_planned`` of csrc/fast_path.cpp check tuples of
the two kinds below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules import module as _global  # hooks on all modules

from trifuse.backends import _C

# The modules beside it, its name among them, the module and its class.
PlannedModule = tuple[dict[str, Any], str, nn.Module, type]
# A dictionary, a key, and the value that it has.
PlannedValue = tuple[dict[str, Any], str, Any]


def may_run() -> bool:
    """Whether the extension is there, and no hook of all modules and no compiler watches."""
    return not (
        _C is None
        or torch.compiler.is_compiling()
        or _global._global_forward_hooks
        or _global._global_forward_pre_hooks
        or _global._global_backward_hooks
        or _global._global_backward_pre_hooks
    )


def modules_in(module: nn.Module) -> tuple[PlannedModule, ...]:
    """Return the modules inside a module."""
    return tuple(
        (parent._modules, name, child, type(child))
        for parent in module.modules()
        for name, child in parent._modules.items()
        if child is not None
    )


def present_values(entries: Iterable[tuple[dict[str, Any], str]]) -> tuple[PlannedValue, ...]:
    """Return the entries of dictionaries with the values that they have now."""
    return tuple((values, name, values[name]) for values, name in entries)


class Plan(Protocol):
    """A plan holds what was read from a module, for calls that skip its parts."""

    @property
    def modules(self) -> tuple[PlannedModule, ...]: ...

    @property
    def values(self) -> tuple[PlannedValue, ...]: ...


AnyPlan = TypeVar("AnyPlan", bound=Plan)
Owner = TypeVar("Owner", bound=nn.Module)


def plan_of(
    owner: Owner, plans: WeakKeyDictionary[Owner, AnyPlan], make: Callable[[], AnyPlan | None]
) -> AnyPlan | None:
    """Return a module's plan, made anew if a module or a value has changed.

    Args:
        owner: the module.
        plans: the plans of all modules.
        make: returns a new plan; None if there can't be one.

    Returns:
        None if there is no plan, or if one of its modules trains or has hooks.
    """
    plan = plans.get(owner)
    if plan is not None and _C.values_as_planned(plan.values):
        if _C.modules_as_planned(plan.modules):
            return plan
        if all(_is_there(*planned) for planned in plan.modules):
            return None
    plans.pop(owner, None)
    plan = make()
    if plan is None:
        return None
    plans[owner] = plan
    return plan if _C.modules_as_planned(plan.modules) else None


def _is_there(siblings: dict[str, Any], name: str, module: nn.Module, cls: type) -> bool:
    return siblings.get(name) is module and type(module) is cls
