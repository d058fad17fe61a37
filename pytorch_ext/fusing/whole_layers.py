"""Layers that run as one op in inference on a CPU, and the modules around them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from torch import nn as torch_nn

from trifuse import nn
from trifuse.fusing.report import FuseReport, Left, add
from trifuse.fusing.steps import CannotSwap, Change, retype
from trifuse.models import bert
from trifuse.nn.linear import is_frozen, is_plain
from trifuse.recipes import known_layers, layers, models
from trifuse.recipes.sublayers import FusedType


@dataclass
class Uncovering:
    """A module around layers that got its former class back, because padding is to be left out."""

    module: Any
    covered: Any  # the class that it had

    def undo(self) -> None:
        """Restore the class, if the module and its layers are as they were."""
        before = self.covered._trifuse_origin.source
        if type(self.module) is before and _target(self.module) is self.covered:
            self.module.__class__ = self.covered


def uncover(model: torch_nn.Module, report: FuseReport) -> dict[torch_nn.Module, type]:
    """Undo what :func:`swap_layers` did around layers, because leaving padding out replaces it.

    Returns:
        The modules, with the classes that they had.
    """
    covered: dict[torch_nn.Module, type] = {}
    for module in model.modules():
        cls: Any = type(module)
        if issubclass(cls, (layers.OneCall, models.Direct)) and isinstance(cls, FusedType):
            covered[module] = cls
            module.__class__ = cls._trifuse_origin.source
            report._steps.append(Uncovering(module, cls))
    return covered


def swap_layers(
    model: torch_nn.Module, report: FuseReport, covered: dict[torch_nn.Module, type]
) -> None:
    """Make layers on trifuse's product run as one op: see :mod:`trifuse.nn.encoder_layer`.

    An encoder of such layers runs them in one call, and a model around it skips what transformers
    wraps around its ``forward``. The layers of ``torch.nn`` do so by themselves.

    Args:
        model: the model.
        report: gets the changes.
        covered: what :func:`uncover` returned. What gets back the class that it had is no change.
    """
    if not any(is_plain(module) or is_frozen(module) for module in model.modules()):
        return
    inside_out = reversed(list(model.named_modules()))  # an encoder after its layers
    for path, module in inside_out:
        if known_layers.is_known(module) and (why := known_layers.why_not(module)) is not None:
            if report.frozen:
                report.left.append(Left(path, type(module).__name__, f"calls its parts: {why}"))
            continue
        if (change := _swap(module)) is None:
            continue
        if covered.get(module) is type(module):
            report._steps += change.steps
        else:
            add(report, path, change)


def _swap(module: torch_nn.Module) -> Change | None:
    target = _target(module)
    if target is None:
        return None
    with contextlib.suppress(CannotSwap):
        return retype(module, type(module), target)
    return None


def _target(module: torch_nn.Module) -> type[torch_nn.Module] | None:
    """Return the class with which a module runs whole layers; None if there is none, or it has it.

    An encoder must have such layers already, and a model such an encoder.
    """
    source = type(module)
    made = layers.OneOp, layers.OneCall, models.Direct, known_layers.OneKnownOp
    if issubclass(source, made) or hasattr(source, "why_padded"):
        return None  # a stack that leaves padding out calls its layers itself
    if source is bert.BertLayer:
        return nn.BertLayer
    if layers.is_berts(module) and layers.why_not(module) is None:
        return layers.one_op_class(source)
    if known_layers.is_known(module):
        return known_layers.one_op_class(source)
    if layers.is_berts_encoder(module):
        return layers.one_call_class(source)
    return models.direct_class(source) if models.is_berts(module) else None
