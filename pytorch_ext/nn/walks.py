"""Walks over the modules of a stack, whose results are kept as long as they are valid.

Before a stack gets packed tokens, each call checks that no module in it is an obstacle
(:func:`trifuse.nn.packing.find_obstacle`). This walk takes longer than the layers of a small model.
So after a walk without an obstacle, the facts that its result depends on are kept, and later calls
only compare them with the stack's present state. These facts are the classes of the modules, their
names and places, the attributes that were read, and the functions of classes whose code was
followed. Hooks, and other things that may come and go, are checked in each call.

The kept facts refer to no module, so they keep none alive.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from trifuse.nn.linear import has_global_hooks, why_intercepted


class _Absent:
    """The trait of an attribute that must not be set on the instance."""


ABSENT = _Absent()


class Grounds:
    """Collects the facts that a walk's result depends on, besides the modules' classes and places.

    Args:
        read: returns the trait of a module's attribute: the value of a constant, the class of
            another value, or anything else that can be compared by ``==``. The module's class is
            known to be unchanged. Default: no attribute is read.
    """

    def __init__(self, read: Callable[[nn.Module, str], Any] | None = None) -> None:
        self.read = read
        self.traits: dict[nn.Module, dict[str, Any]] = {}  # by attribute
        self.functions: dict[tuple[type, str], Any] = {}  # by class and name; None: it has none
        self.conditions: dict[nn.Module, Callable[[nn.Module], bool]] = {}

    def note_functions(self, cls: type, *names: str) -> None:
        """Note that the result is valid only while a class has its present functions."""
        for name in names:
            self.functions[cls, name] = getattr(cls, name, None)


class _Entry(NamedTuple):
    """A place for a module, in the order of the walk."""

    cls: type | None  # NoneType if there is no module; None: the module is at an earlier place too
    place: int  # the place of the same module before it; -1 if this is its first place
    names: tuple[str, ...]  # of its children
    order: tuple[str, ...]  # the same names, from the last one in the walk to the first
    watched: bool  # whether a hook in it would be an obstacle
    constants: tuple[tuple[str, Any], ...]  # attributes, and their traits that aren't classes
    kinds: tuple[tuple[str, type], ...]  # attributes, and their traits that are classes
    condition: Callable[[nn.Module], bool] | None  # what must be true of it


class _Walk(NamedTuple):
    """A walk that found no obstacle, and the facts that its result depends on."""

    entries: tuple[_Entry, ...]
    functions: tuple[tuple[type, str, Any], ...]
    read: Callable[[nn.Module, str], Any] | None
    harmless: str | None


_kept: WeakKeyDictionary[nn.Module, dict[Hashable, _Walk]] = WeakKeyDictionary()


def holds(stack: nn.Module, key: Hashable) -> bool:
    """Returns whether a walk was kept under this key and would still find no obstacle."""
    walks = _kept.get(stack)
    walk = None if walks is None else walks.get(key)
    return walk is not None and _is_as_before(stack, walk)


def keep(
    stack: nn.Module,
    key: Hashable,
    grounds: Grounds,
    inside: Collection[str] | None = None,
    harmless: str | None = None,
) -> None:
    """Keeps a walk that has just found no obstacle, unless a module stores its children elsewhere.

    Args:
        stack: the module whose modules were walked over.
        key: identifies the question that the walk answered.
        grounds: what the answer depends on.
        inside: the names of the stack's children that were examined. The classes and places of all
            others, and the stack's own class, are kept too. Default: all of them and the stack were
            examined.
        harmless: the name of a Python package whose hooks don't count.
    """
    entries = _entries(stack, grounds, inside)
    if entries is not None:
        functions = tuple((cls, name, value) for (cls, name), value in grounds.functions.items())
        walk = _Walk(tuple(entries), functions, grounds.read, harmless)
        _kept.setdefault(stack, {})[key] = walk


def lacks(stack: nn.Module, kind: type[nn.Module]) -> bool:
    """Returns whether no module of a stack is of a kind."""
    key = "lacks", kind
    if holds(stack, key):
        return True
    if any(isinstance(module, kind) for module in stack.modules()):
        return False
    keep(stack, key, Grounds(), inside=())
    return True


def _entries(
    stack: nn.Module, grounds: Grounds, inside: Collection[str] | None
) -> list[_Entry] | None:
    entries: list[_Entry] = []
    numbers: dict[nn.Module, int] = {}
    pending: list[tuple[nn.Module | None, bool]] = [(stack, inside is None)]
    while pending:
        module, watched = pending.pop()
        if module is None:
            entries.append(_Entry(type(None), -1, (), (), False, (), (), None))
            continue
        if module in numbers:
            entries.append(_Entry(None, numbers[module], (), (), False, (), (), None))
            continue
        numbers[module] = len(numbers)
        children = vars(module).get("_modules")
        if not isinstance(children, dict):
            return None  # a module of TorchScript
        order = tuple(reversed(children))
        if module is stack and inside is not None:
            # A module at several places is watched if one of these places is inside.
            order = tuple(sorted(order, key=lambda name: name in inside))
            pending += ((children[name], name in inside) for name in order)
        else:
            pending += ((children[name], watched) for name in order)
        # A child is identified by its class.
        read = grounds.traits.get(module, {}).items()
        traits = [(name, trait) for name, trait in read if name not in children]
        constants = tuple(each for each in traits if not isinstance(each[1], type))
        kinds = tuple(each for each in traits if isinstance(each[1], type))
        condition = grounds.conditions.get(module)
        entries.append(
            _Entry(type(module), -1, tuple(children), order, watched, constants, kinds, condition)
        )
    return entries


def _is_as_before(stack: nn.Module, walk: _Walk) -> bool:
    if has_global_hooks():
        return False
    for owner, name, value in walk.functions:
        if getattr(owner, name, None) is not value:
            return False
    pending: list[Any] = [stack]
    seen: list[nn.Module] = []
    for cls, place, names, order, watched, constants, kinds, condition in walk.entries:
        if not pending:
            return False
        module = pending.pop()
        kind: type = type(module)
        if kind is not cls:
            if cls is None and module is seen[place]:
                continue
            return False
        if module is None:
            continue
        seen.append(module)
        own = module.__dict__
        if (
            watched
            and (
                own["_forward_hooks"]
                or own["_forward_pre_hooks"]
                or own["_backward_hooks"]
                or own["_backward_pre_hooks"]
                or "forward" in own
            )
            and why_intercepted(module, walk.harmless) is not None
        ):
            return False
        children = own["_modules"]
        if children or names:
            if tuple(children) != names:
                return False
            pending += [children[name] for name in order]
        # Most attributes are the instance's own, and the same objects as before.
        for name, trait in constants:
            if own.get(name, ABSENT) is not trait and not _has(module, name, trait, walk):
                return False
        for name, trait in kinds:
            if type(own.get(name, ABSENT)) is not trait and not _has(module, name, trait, walk):
                return False
        if condition is not None and not condition(module):
            return False
    return not pending and len(set(map(id, seen))) == len(seen)


def _has(module: nn.Module, name: str, trait: Any, walk: _Walk) -> bool:
    """Returns whether an attribute still has a trait."""
    return walk.read is not None and bool(walk.read(module, name) == trait)
