"""RMSNorm as other libraries write it, recognised by its code."""

from __future__ import annotations

import ast
import types
from typing import Any

import torch
from torch import Tensor, nn

from trifuse.nn.linear import is_intercepted
from trifuse.ops.dropout_add_layer_norm import dropout_add_layer_norm
from trifuse.recipes import code

# The statements of each form of RMSNorm. Where the weight has the dtype of the input, they all mean
# what the operator computes.
_FORMS = (
    """
input_dtype = hidden_states.dtype
hidden_states = hidden_states.to(torch.float32)
variance = hidden_states.pow(2).mean(-1, keepdim=True)
hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
return self.weight * hidden_states.to(input_dtype)
""",
    """
input_dtype = hidden_states.dtype
hidden_states = hidden_states.to(torch.float32)
variance = hidden_states.pow(2).mean(-1, keepdim=True)
hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
return (self.weight * hidden_states).to(input_dtype)
""",
    """
input_dtype = hidden_states.dtype
hidden_states = hidden_states.to(torch.float32)
variance = hidden_states.pow(2).mean(-1, keepdim=True)
hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
return (self.weight.to(torch.float32) * hidden_states).to(input_dtype)
""",
    """
variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
if self.weight.dtype in [torch.float16, torch.bfloat16]:
    hidden_states = hidden_states.to(self.weight.dtype)
return self.weight * hidden_states
""",
)
_KNOWN = {ast.unparse(ast.parse(form)) for form in _FORMS}


def is_rms_norm(cls: type[nn.Module]) -> bool:
    """Whether the ``forward`` of a class is one of the forms of RMSNorm."""
    if cls not in _recognised:
        forward = cls.forward
        _recognised[cls] = isinstance(forward, types.FunctionType) and code.body(forward) in _KNOWN
    return _recognised[cls]


_recognised: dict[type, bool] = {}  # of classes that were read before


class FusedRMSNorm(nn.Module):
    """The first base of every RMSNorm that runs on trifuse's operator; the second is its source."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """RMSNorm over the last dimension."""
        if not _fits(self.weight, hidden_states):
            out: Tensor = super().forward(hidden_states)
            return out
        return dropout_add_layer_norm(
            hidden_states, None, self.weight, eps=self.variance_epsilon, rms_norm=True
        )


def parameters(norm: nn.Module, x: Tensor) -> dict[str, Any] | None:
    """Return the operator's arguments for a norm of x; None if the module must be called."""
    if is_intercepted(norm):
        return None
    if type(norm) is nn.LayerNorm:
        if len(norm.normalized_shape) != 1 or not x.is_floating_point():
            return None
        return {"weight": norm.weight, "bias": norm.bias, "eps": norm.eps}
    if isinstance(norm, FusedRMSNorm) and _fits(norm.weight, x):
        return {"weight": norm.weight, "eps": norm.variance_epsilon, "rms_norm": True}
    return None


def is_known(norm: nn.Module) -> bool:
    """Whether the operator can serve a norm, fused by now or not yet."""
    if type(norm) is nn.LayerNorm:
        return len(norm.normalized_shape) == 1
    return isinstance(norm, FusedRMSNorm) or is_rms_norm(type(norm))


def _fits(weight: Tensor, x: Tensor) -> bool:
    """Whether the result has the dtype of x: weights of another dtype would widen it."""
    return weight.dtype == x.dtype and x.dtype in _SERVED and weight.dim() == 1


_SERVED = (torch.float32, torch.bfloat16, torch.float16)
