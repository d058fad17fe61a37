"""``freeze=True``: weights are packed for good."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import nn as torch_nn

from trifuse import nn
from trifuse.fusing.report import FuseReport, Left
from trifuse.fusing.steps import Freezing
from trifuse.nn.linear import (
    ATTENTION_WEIGHTS,
    FROZEN_ATTENTION,
    HoldsFrozen,
    frozen_class,
    is_plain,
    refuse_loading,
    refuse_moving,
)
from trifuse.nn.linear import freeze as freeze_weights
from trifuse.ops import _linear_choice


def freeze_model(model: torch_nn.Module, report: FuseReport) -> None:
    """Freeze the weights that trifuse's product reads, except shared ones."""
    uses = Counter(
        _address(t)
        for module in model.modules()
        for t in (*module._parameters.values(), *module._buffers.values())
        if t is not None
    )
    chosen: list[torch_nn.Module] = []
    # Frozen with their attention, or not at all; the number of attentions that share one.
    outputs = Counter(
        module.out_proj for module in model.modules() if type(module) is nn.MultiheadAttention
    )
    for path, module in model.named_modules():
        if type(module) is nn.MultiheadAttention:
            if not _linear_choice.can_freeze(module.out_proj.weight.dtype):
                continue
            shared = outputs[module.out_proj] > 1
            why = "its out_proj is shared" if shared else _why_attention_not_frozen(module, uses)
        elif is_plain(module) and module not in outputs:
            why = _why_not_frozen(module, ["weight"], uses)
        else:
            continue
        if why is not None:
            report.left.append(Left(path, type(module).__name__, f"not frozen: {why}"))
            continue
        chosen.append(module)
        if type(module) is nn.MultiheadAttention:
            chosen.append(module.out_proj)
        report.frozen.append(path)
    report._steps += _guard(model, chosen)
    report._steps += map(Freezing, chosen, freeze_weights(chosen))


def _why_attention_not_frozen(
    attention: nn.MultiheadAttention, uses: Counter[int | None]
) -> str | None:
    output = attention.out_proj
    if not (is_plain(output) or type(output) in FROZEN_ATTENTION):
        return f"its out_proj is a {type(output).__name__}"
    if (why := _why_computed(attention, ATTENTION_WEIGHTS)) is not None:
        return why
    names = frozen_class(attention).weight_names(attention)
    if (why := _why_not_frozen(attention, names, uses)) is not None:
        return why
    why = _why_not_frozen(output, ["weight"], uses)
    return None if why is None else f"its out_proj can't be: {why}"


def _why_not_frozen(
    module: torch_nn.Module, names: Sequence[str], uses: Counter[int | None]
) -> str | None:
    """Return why weights stay as they are, or None; the names are those of the parameters."""
    if (why := _why_computed(module, names)) is not None:
        return why
    for name in names:
        weight: Any = module._parameters[name]
        if type(weight) is not torch_nn.Parameter:
            return f"its {name} is a {type(weight).__name__}"
        if weight.device.type != "cpu" or weight.layout != torch.strided or weight.numel() == 0:
            return "no product of ours serves it"
        if weight.dim() != 2:  # between calls under FullyShardedDataParallel(use_orig_params=True)
            return f"its {name} is no matrix"
        if not _linear_choice.can_freeze(weight.dtype):
            reason = _linear_choice.choose(weight.dtype).reason
            return f"torch's product serves it; {reason}"
        if uses[_address(weight)] > 1:
            return f"its {name} is shared"
    return None


def _why_computed(module: torch_nn.Module, names: Sequence[str]) -> str | None:
    """Return which weight is no parameter: torch's pruning, for example, makes it in each call."""
    computed = [name for name in names if name not in module._parameters]
    return f"its {computed[0]} is no parameter" if computed else None


def _address(t: Tensor) -> int | None:
    """Return where a tensor's memory begins; None if it has none of its own."""
    try:
        return t.untyped_storage().data_ptr()
    except (RuntimeError, ValueError):  # a DTensor, a sparse tensor, one that a lazy module makes
        return None


# Refusing a change before it begins ---------------------------------------------------------------

# torch's methods that change a whole model, part by part, and what refuses a change for all parts.
_REFUSALS = {"_apply": refuse_moving, "_load_from_state_dict": refuse_loading}


class _Guarded:
    """One of torch's methods on an instance, which first asks all frozen modules inside.

    A frozen module by itself refuses a change when torch gets to it, and then the modules before it
    have changed already. ``.to()`` calls ``_apply`` on each module before its own parameters
    change, and loading calls ``_load_from_state_dict`` on each before those inside. So these are
    the methods to replace, and a module of any class may hold frozen ones. The module is referred
    to weakly, so that it is freed without the garbage collector.
    """

    def __init__(self, module: torch_nn.Module, name: str) -> None:
        self._module, self._name = weakref.ref(module), name
        self.users = 0  # the calls of fuse that froze something inside and aren't reverted

    @property
    def module(self) -> torch_nn.Module:
        module = self._module()
        if module is None:
            raise RuntimeError(
                f"{self._name}: the frozen model is gone of which this is a shallow copy; "
                f"use copy.deepcopy"
            )
        return module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _REFUSALS[self._name](self.module, *args, **kwargs)
        return getattr(type(self.module), self._name)(self.module, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "name": self._name, "users": self.users}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._module, self._name = weakref.ref(state["module"]), state["name"]
        self.users = state["users"]


@dataclass
class _Guarding:
    """A module around frozen ones whose methods :func:`trifuse.fuse` has replaced."""

    module: torch_nn.Module

    def do(self) -> None:
        """Replace the methods, except one that the instance has already."""
        for name in _REFUSALS:
            method = vars(self.module).setdefault(name, _Guarded(self.module, name))
            if isinstance(method, _Guarded):
                method.users += 1

    def undo(self) -> None:
        """Give the module its own methods back, unless another call froze something inside."""
        for name in _REFUSALS:
            method = vars(self.module).get(name)
            if isinstance(method, _Guarded):
                method.users -= 1
                if not method.users:
                    del vars(self.module)[name]


def _guard(model: torch_nn.Module, frozen: Sequence[torch_nn.Module]) -> list[_Guarding]:
    """Guard the modules around those that are going to be frozen, or are frozen already."""
    inside = {*frozen, *(each for each in model.modules() if isinstance(each, HoldsFrozen))}
    steps = [
        _Guarding(module)
        for module in model.modules()
        if module not in inside and not inside.isdisjoint(module.modules())
    ]
    for step in steps:
        step.do()
    return steps
