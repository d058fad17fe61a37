"""The changes that ``trifuse.fuse`` makes to a model, each with what undoes it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import nn as torch_nn
from torch.nn.utils import parametrize

from trifuse.nn.linear import HoldsFrozen, thaw
from trifuse.nn.quantization import Unquantizable


class Undoable(Protocol):
    """A change of a model."""

    def undo(self) -> None:
        """Take it back, unless something else has changed the same since."""


class Absent(enum.Enum):
    ABSENT = enum.auto()  # the attribute wasn't there


@dataclass
class Step:
    """An attribute (or the class) that was changed, with its old and its new value."""

    owner: Any
    name: str
    before: Any
    after: Any

    def do(self) -> None:
        setattr(self.owner, self.name, self.after)

    def undo(self) -> None:
        """Restore the old value, unless the attribute has been changed again since."""
        now = getattr(self.owner, self.name, Absent.ABSENT)
        if not (now is self.after or (isinstance(now, str) and now == self.after)):
            return
        if self.before is Absent.ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)


@dataclass
class Freezing:
    """A linear layer, or an attention, whose weights :func:`trifuse.fuse` froze."""

    module: torch_nn.Module
    parameters: dict[str, torch_nn.Parameter]  # emptied while the module is frozen

    def undo(self) -> None:
        """Give the module its weights back."""
        if isinstance(self.module, HoldsFrozen):
            thaw(self.module, self.parameters)


class CannotSwap(Exception):  # noqa: N818 - an answer, not an error
    """Why a module is left alone."""


class Change(NamedTuple):
    before: str
    after: str
    steps: list[Step]


# Swaps a module in place and returns the change; None if the module is fused already.
Swap = Callable[[Any], "Change | None"]


def retype(
    module: torch_nn.Module, source: type[torch_nn.Module], target: type[torch_nn.Module]
) -> Change | None:
    """Change the class of a module from exactly ``source`` to ``target``."""
    if isinstance(module, target):
        return None
    if parametrize.is_parametrized(module):  # torch has given the module a class of its own
        raise CannotSwap("a parameter of it is parametrized; do that after fusing")
    if type(module) is not source:
        raise CannotSwap(f"a subclass of {source.__name__}")
    for name in ("forward", "_sa_block", "_mha_block", "_ff_block"):
        if name in vars(module):
            raise CannotSwap(f"its {name} was replaced on the instance")
    quantizable = not isinstance(getattr(target, "qconfig", None), Unquantizable)
    if not quantizable and getattr(module, "qconfig", None) is not None:
        raise CannotSwap("it is prepared for quantization")
    step = Step(module, "__class__", source, target)
    step.do()
    return Change(qualified(source), qualified(target), [step])


def qualified(cls: type) -> str:
    """Return a class's public import path, such as ``torch.nn.MultiheadAttention``."""
    package = "torch.nn" if cls.__module__.startswith("torch.nn.") else cls.__module__
    if package.startswith("trifuse.nn."):
        package = "trifuse.nn"
    return f"{package}.{cls.__name__}"
