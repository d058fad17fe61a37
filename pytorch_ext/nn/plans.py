"""Checks before a call of several modules that runs as one op.

Such a call skips the modules' own ``forward``. So several things are checked first. The modules and
their values must be those from which the arguments of the op were made. Their classes must still
have the same ``forward``. And no hook or compiler may observe them. The extension checks tuples of
the two kinds below (csrc/fast_path/plans.h).
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules import module as _global  # hooks on all modules

from trifuse.backends import _C

# The dictionary that holds a module, its name there, the module and its class.
PlannedModule = tuple[dict[str, Any], str, nn.Module, type]
# A dictionary, a key and its value; a class, an attribute and its value; a dictionary and a key
# that it must lack; or a dictionary and its size.
PlannedValue = tuple[dict[str, Any] | type, str, Any] | tuple[dict[Any, Any], str | int]


class Checks(NamedTuple):
    """A call that uses a plan first checks that these modules and values are still there."""

    modules: tuple[PlannedModule, ...]
    values: tuple[PlannedValue, ...]
    compiled: Any  # both, as the extension holds them; None without the extension


def checks(modules: tuple[PlannedModule, ...], values: tuple[PlannedValue, ...]) -> Checks:
    """Return the checks of these modules and values."""
    return Checks(modules, values, None if _C is None else _C.planned(modules, values))


def may_run() -> bool:
    """Whether the extension exists, and neither a global hook nor a compiler is active."""
    return not (_C is None or torch.compiler.is_compiling() or has_global_hooks())


def has_global_hooks() -> bool:
    """Whether torch runs hooks for all modules."""
    return bool(
        _global._global_forward_hooks
        or _global._global_forward_pre_hooks
        or _global._global_backward_hooks
        or _global._global_backward_pre_hooks
    )


def no_global_hooks() -> tuple[PlannedValue, ...]:
    """Return values that hold while torch runs no hooks for all modules."""
    return (
        (_global._global_forward_hooks, 0),
        (_global._global_forward_pre_hooks, 0),
        (_global._global_backward_hooks, 0),
        (_global._global_backward_pre_hooks, 0),
    )


def modules_in(module: nn.Module) -> tuple[PlannedModule, ...]:
    """Return the modules inside a module."""
    return tuple(
        (parent._modules, name, child, type(child))
        for parent in module.modules()
        for name, child in parent._modules.items()
        if child is not None
    )


def present_values(
    entries: Iterable[tuple[dict[str, Any] | type, str]],
) -> tuple[PlannedValue, ...]:
    """Return entries of dictionaries, or attributes of classes, with their present values.

    A dictionary may lack an entry.
    """
    return tuple([_present_value(owner, name) for owner, name in entries])


def _present_value(owner: dict[str, Any] | type, name: str) -> PlannedValue:
    if not isinstance(owner, dict):
        return owner, name, getattr(owner, name)
    return (owner, name, owner[name]) if name in owner else (owner, name)


def forwards_of(module: nn.Module) -> tuple[PlannedValue, ...] | None:
    """Return each ``forward`` that the classes of a module, and of those inside it, have.

    Returns:
        None if one was replaced, that is, if it comes from another package than its class or if
        another package has wrapped it.
    """
    classes = {base for each in module.modules() for base in type(each).__mro__} - {nn.Module}
    found: list[PlannedValue] = []
    for cls in classes:
        forward = vars(cls).get("forward")
        if forward is None:
            continue
        if not isinstance(forward, types.FunctionType) or not _may_have_made(cls, forward):
            return None
        found.append((cls, "forward", forward))
    return tuple(found)


def _may_have_made(cls: type, forward: types.FunctionType) -> bool:
    # functools.wraps does not change the globals of the outermost function. Recipes compile methods
    # with the globals of a base class.
    packages = {base.__module__.partition(".")[0] for base in cls.__mro__}
    return forward.__globals__.get("__name__", "").partition(".")[0] in packages


class Plan(Protocol):
    """A plan holds what was read from a module. Calls that skip the module's parts use it."""

    @property
    def checks(self) -> Checks: ...


def joined(layers: nn.ModuleList, plans: Sequence[Plan]) -> Checks:
    """Return the checks of the plans of listed layers, and of the layers themselves."""
    own: Any = layers._modules
    modules = [(own, name, layer, type(layer)) for name, layer in own.items()]
    modules += [entry for plan in plans for entry in plan.checks.modules]
    # Removing a layer gives the list another dictionary.
    values: list[PlannedValue] = [(vars(layers), "_modules", own), (own, len(own))]
    values += [entry for plan in plans for entry in plan.checks.values]
    return checks(tuple(modules), once(values))


def once(values: Iterable[PlannedValue]) -> tuple[PlannedValue, ...]:
    """Return values without repeating those of classes that several modules share."""
    values = tuple(values)
    of_classes = {entry for entry in values if isinstance(entry[0], type)}
    return (*(entry for entry in values if isinstance(entry[0], dict)), *of_classes)


AnyPlan = TypeVar("AnyPlan", bound=Plan)
Owner = TypeVar("Owner", bound=nn.Module)

_kept: list[WeakKeyDictionary[Any, Any]] = []


def kept_outside() -> WeakKeyDictionary[Any, Any]:
    """Return a dictionary for the plans of modules, outside of them.

    So plans are neither copied nor saved with the modules.
    """
    _kept.append(WeakKeyDictionary())
    return _kept[-1]


def forget() -> None:
    """Drop all plans, and what they hold of models that don't use them any more."""
    for plans in _kept:
        plans.clear()


def plan_of(
    owner: Owner,
    plans: WeakKeyDictionary[Owner, AnyPlan],
    make: Callable[[], AnyPlan | None],
    trained: bool = False,
) -> AnyPlan | None:
    """Return a module's plan, made anew if a module or a value has changed.

    Args:
        owner: the module.
        plans: the plans of all modules.
        make: returns a new plan; None if there can't be one.
        trained: whether the plan serves modules in training mode, and records gradients.

    Returns:
        None if there is no plan, or if one of its modules has hooks or must not be in training mode
        but is.
    """
    plan = plans.get(owner)
    idle = idle_recorder()
    if plan is not None and _C.values_as_planned(plan.checks.compiled):
        if _C.modules_as_planned(plan.checks.compiled, idle, trained):
            return plan
        if all(_is_there(*planned) for planned in plan.checks.modules):
            return None
    plans.pop(owner, None)
    plan = make()
    if plan is None:
        return None
    plans[owner] = plan
    return plan if _C.modules_as_planned(plan.checks.compiled, idle, trained) else None


def idle_recorder() -> dict[str, Any] | None:
    """Return the globals of the hooks with which transformers records outputs, while it doesn't.

    The first call that requests hidden states or attentions installs such hooks permanently.
    """
    module = sys.modules.get(RECORDER)
    active = getattr(module, "_active_collector", None)
    return None if active is None or active.get() else vars(module)


RECORDER = "transformers.utils.output_capturing"


def have_hooks(checks: Checks) -> bool:
    """Return whether modules have hooks that do nothing now.

    All else that the checks compare must hold.
    """
    return not _C.modules_as_planned(checks.compiled, None, False)


def _is_there(siblings: dict[str, Any], name: str, module: nn.Module, cls: type) -> bool:
    return siblings.get(name) is module and type(module) is cls
