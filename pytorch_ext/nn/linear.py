"""``torch.nn.Linear`` on the faster of trifuse's and torch's matrix products."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _global  # hooks on all modules

from trifuse.nn.quantization import Unquantizable
from trifuse.ops import linear as ops
from trifuse.ops.linear import Activation, PackedWeight

# Kept outside the modules, so that packed weights are neither copied nor saved with them.
_packed: WeakKeyDictionary[nn.Module, dict[str, PackedWeight]] = WeakKeyDictionary()


class Linear(nn.Linear):
    """``torch.nn.Linear`` on trifuse's product where that is faster (CPU only).

    The constructor, the parameters and their initialisation are torch's own. If nothing needs a
    gradient, a packed copy of the weight, of about the same size, is kept until the parameter's
    bits change; see :class:`trifuse.ops.linear.PackedWeight`.
    """

    qconfig = Unquantizable(nn.Linear)

    def forward(self, input: Tensor) -> Tensor:
        """x Wᵀ + b, from (..., in_features) to (..., out_features)."""
        return project(self, "weight", input, self.weight, self.bias)


def project(owner: nn.Module, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x weightᵀ + bias; ``name`` identifies the weight among its owner's weights."""
    return ops.linear(x, weight, bias, packed=_packed_weight(owner, name))


def linear_activation(module: nn.Linear, x: Tensor, activation: Activation) -> Tensor:
    """Returns activation(module(x)), fused as in :func:`trifuse.ops.linear.linear`.

    A module of another class than :class:`Linear`, or with hooks, is called as it is.
    """
    if type(module) is Linear and not is_intercepted(module):
        packed = _packed_weight(module, "weight")
        return ops.linear(x, module.weight, module.bias, activation=activation, packed=packed)
    return ops.ACTIVATIONS[activation](module(x))


def _packed_weight(owner: nn.Module, name: str) -> PackedWeight | None:
    if torch.compiler.is_compiling():
        return None
    packed = _packed.get(owner)
    if packed is None:
        packed = _packed[owner] = {}
    if name not in packed:
        packed[name] = PackedWeight()
    return packed[name]


def is_intercepted(module: nn.Module) -> bool:
    """Returns whether a call of the module runs anything besides its class's ``forward``."""
    return why_intercepted(module) is not None


def why_intercepted(module: nn.Module) -> str | None:
    """Returns what a call runs besides the class's ``forward``, worded to follow "has", or None."""
    if (
        _global._global_forward_hooks
        or _global._global_forward_pre_hooks
        or _global._global_backward_hooks
        or _global._global_backward_pre_hooks
    ):
        return "hooks that torch runs for all modules"
    if (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    ) and (why := _why_hooked(module)) is not None:
        return why
    if "forward" in vars(module):
        forward = vars(module)["forward"]
        # Libraries that replace a forward temporarily leave the class's own method there.
        own = getattr(forward, "__func__", None) is type(module).forward
        if not own or forward.__self__ is not module:
            return "a forward of its own"
    return None


def _why_hooked(module: nn.Module) -> str | None:
    for hooks in (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    ):
        for hook in hooks.values():
            recording = _recording(hook)
            if recording:
                return "a hook that records its output, as hidden states are asked for"
            if recording is None:
                return f"a hook ({getattr(hook, '__qualname__', type(hook).__qualname__)})"
    return None


def _recording(hook: Callable[..., Any]) -> bool | None:
    """Returns whether a hook of transformers is recording outputs now; None for any other hook.

    The first call that requests hidden states or attentions installs such hooks permanently.
    """
    module = getattr(hook, "__module__", None)
    if module != "transformers.utils.output_capturing":
        return None
    active = getattr(sys.modules[module], "_active_collector", None)
    return None if active is None else bool(active.get())
