"""``torch.nn.Linear`` on the faster of two products."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _global  # hooks on all modules

from trifuse.ops import linear as ops
from trifuse.ops.linear import Activation, PackedWeight

# Beside the modules instead of in them: what is kept here is neither copied nor saved with them.
_packed: WeakKeyDictionary[nn.Module, dict[str, PackedWeight]] = WeakKeyDictionary()


class Linear(nn.Linear):
    """``torch.nn.Linear`` on our own product where that is faster (CPU).

    The constructor, the parameters and their initialisation are torch's own. Where nothing needs a
    gradient, the weight is packed for the product once and kept so beside the parameter, in as much
    memory again, until the parameter's bits change; see :class:`trifuse.ops.linear.PackedWeight`.
    """

    def forward(self, input: Tensor) -> Tensor:
        """x Wᵀ + b, from (..., in_features) to (..., out_features)."""
        return project(self, "weight", input, self.weight, self.bias)


def project(owner: nn.Module, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weightᵀ + bias; ``name`` says which of its owner's weights is multiplied by."""
    return ops.linear(x, weight, bias, packed=_packed_weight(owner, name))


def linear_activation(module: nn.Linear, x: Tensor, activation: Activation) -> Tensor:
    """The activation of what ``module`` makes of ``x``, in one product without gradients.

    A subclass, or a module that is watched by hooks, is called as it is.
    """
    if type(module) is Linear and not is_watched(module):
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


def is_watched(module: nn.Module) -> bool:
    """Whether a call of the module runs something besides its class's ``forward``."""
    return bool(
        _global._global_forward_hooks
        or _global._global_forward_pre_hooks
        or _global._global_backward_hooks
        or _global._global_backward_pre_hooks
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in vars(module)
    )
