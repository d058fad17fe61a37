"""The activations of transformers that trifuse's product can apply."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn
from transformers import activations
from transformers.activations import GELUActivation, GELUTanh

from trifuse.ops.activations import Activation
from trifuse.recipes import code


def activation_name(activation: Any) -> Activation | None:
    """The activation that a module or function of transformers computes.

    Args:
        activation: the module or function.

    Returns:
        None if our product lacks it.
    """
    if type(activation) is GELUActivation and activation.act is nn.functional.gelu:
        return "gelu"
    if type(activation) is GELUTanh and isinstance(activation.act, functools.partial):
        return "gelu_tanh"
    if (name := _WRITTEN_OUT.get(type(activation))) is not None:
        return name
    if torch.compiler.is_compiling():  # Dynamo can't read code, and Inductor fuses the operations
        return None
    if not isinstance(activation, nn.Module):
        return _FUNCTIONS.get(code.body_if_function(activation))
    return "gelu_tanh" if _is_blooms(type(activation)) else None


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

# Functions that models define themselves (ESM's, BLOOM's), by their statements.
_FUNCTIONS: dict[str | None, Activation] = {
    code.normal("return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))"): "gelu",
    code.normal(
        "return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))"
    ): "gelu_tanh",
}
_APPLIED, _COMPUTED = "GeLUFunction", "bloom_gelu_forward"
_APPLIES = code.normal("return GeLUFunction.apply(x)")
_COMPUTES = code.normal("ctx.save_for_backward(input)\nreturn bloom_gelu_forward(input)")


def _is_blooms(cls: Any) -> bool:
    """Whether a class computes GELU by tanh through an autograd Function, as BLOOM's does."""
    if _APPLIED not in getattr(getattr(cls.forward, "__code__", None), "co_names", ()):
        return False
    if code.body_if_function(cls.forward) != _APPLIES:
        return False
    scope = cls.forward.__globals__
    applied = getattr(scope.get(_APPLIED), "forward", None)
    if (
        applied is None
        or code.body_if_function(applied) != _COMPUTES
        or applied.__globals__ is not scope
    ):
        return False
    return _FUNCTIONS.get(code.body_if_function(scope.get(_COMPUTED))) == "gelu_tanh"


def depends_on(activation: Any) -> list[tuple[Any, str]]:
    """Return what an activation calls: pairs of a scope or class and a name in it."""
    if not isinstance(activation, nn.Module) or not _is_blooms(type(activation)):
        return []
    scope: dict[str, Any] = type(activation).forward.__globals__
    return [(scope, _APPLIED), (scope[_APPLIED], "forward"), (scope, _COMPUTED)]


def uses_any(method: Any) -> bool:
    """Whether a method may call such a function."""
    method = inspect.unwrap(method)
    values = map(method.__globals__.get, method.__code__.co_names)
    return any(inspect.isfunction(each) and activation_name(each) is not None for each in values)
