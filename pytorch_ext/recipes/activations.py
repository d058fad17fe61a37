"""The activations of transformers that trifuse's product can apply."""

from __future__ import annotations

import functools

from torch import nn
from transformers import activations
from transformers.activations import GELUActivation, GELUTanh

from trifuse.ops.activations import Activation


def activation_name(activation: nn.Module) -> Activation | None:
    """The activation that a module of transformers computes, or None if our product lacks it."""
    if type(activation) is GELUActivation and activation.act is nn.functional.gelu:
        return "gelu"
    if type(activation) is GELUTanh and isinstance(activation.act, functools.partial):
        return "gelu_tanh"
    return _WRITTEN_OUT.get(type(activation))


# Classes whose code is one of the product's activations, by name: some versions lack some of them.
_NAMES: dict[str, Activation] = {
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "AccurateGELUActivation": "gelu_tanh",
    "QuickGELUActivation": "quick_gelu",
    "SiLUActivation": "silu",
}
_WRITTEN_OUT = {
    getattr(activations, name): meaning
    for name, meaning in _NAMES.items()
    if hasattr(activations, name)
}
