"""This module recognises, by their code, RMSNorm and LayerNorm as other libraries write them."""

from __future__ import annotations

import types
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trifuse.nn.dropout_add_layer_norm import LAYER_NORMS, LayerNorm, normed_before
from trifuse.nn.linear import is_intercepted
from trifuse.ops.dropout_add_layer_norm import dropout_add_layer_norm
from trifuse.recipes import code

_ROOT = "_norm"  # the method that some classes have for the quotient
METHODS = ("forward", _ROOT)  # the methods by which a class is recognised


class _Form(NamedTuple):
    """The way in which a class writes a norm."""

    forward: str
    root: str | None = None  # the statements of the method ``_ROOT``, if there is one
    eps: str | float = "variance_epsilon"  # the attribute, or its value
    from_one: bool = False  # whether the parameter is the weight minus 1
    widens: bool = True  # whether a parameter in a wider dtype than the input's widens the result
    centered: bool = False  # whether it is LayerNorm, which subtracts the mean
    parameters: tuple[str, ...] = ("weight",)
    switch: str | None = None  # the attribute that says whether a module has them
    casts: bool = False  # whether autocast changes the dtype of the result


# Nemotron's LayerNorm of 1 + weight, in transformers 5 and 4.57.
_FROM_ONE = (
    """
device_type = input.device.type
args = _cast_if_autocast_enabled(
    device_type, input, self.normalized_shape, self.weight + 1.0, self.bias, self.eps
)
with maybe_autocast(device_type=input.device.type, enabled=False):
    return F.layer_norm(*args)
""",
    """
device_type = input.device.type if input.device.type != "mps" else "cpu"
args = _cast_if_autocast_enabled(
    device_type, input, self.normalized_shape, self.weight + 1, self.bias, self.eps
)
with torch.autocast(device_type=input.device.type, enabled=False):
    return F.layer_norm(*args)
""",
)
_QUOTIENT = "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)"
# If the weight has the dtype of the input, all of these compute the same as the operator.
_FORMS = (
    _Form("""
input_dtype = hidden_states.dtype
hidden_states = hidden_states.to(torch.float32)
variance = hidden_states.pow(2).mean(-1, keepdim=True)
hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
return self.weight * hidden_states.to(input_dtype)
"""),
    _Form("""
input_dtype = hidden_states.dtype
hidden_states = hidden_states.to(torch.float32)
variance = hidden_states.pow(2).mean(-1, keepdim=True)
hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
return (self.weight * hidden_states).to(input_dtype)
"""),
    _Form("""
input_dtype = hidden_states.dtype
hidden_states = hidden_states.to(torch.float32)
variance = hidden_states.pow(2).mean(-1, keepdim=True)
hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
return (self.weight.to(torch.float32) * hidden_states).to(input_dtype)
"""),
    _Form("""
variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
if self.weight.dtype in [torch.float16, torch.bfloat16]:
    hidden_states = hidden_states.to(self.weight.dtype)
return self.weight * hidden_states
"""),
    _Form(
        """
tensor = tensor / torch.sqrt(torch.mean(torch.square(tensor), axis=-1, keepdim=True) + self.eps)
tensor = tensor * self.weight
return tensor
""",
        eps="eps",
    ),
    _Form(
        """
output = self._norm(x.float())
output = output * (1.0 + self.weight.float())
return output.type_as(x)
""",
        root=_QUOTIENT,
        eps="eps",
        from_one=True,
        widens=False,
    ),
    _Form("return self._norm(x.float()).type_as(x)", root=_QUOTIENT, eps="eps", parameters=()),
    _Form(
        """
normed_output = self._norm(hidden_states.float())
if self.with_scale:
    normed_output = normed_output * self.weight.float()
return normed_output.type_as(hidden_states)
""",
        root="""
mean_squared = hidden_states.pow(2).mean(-1, keepdim=True) + self.eps
return hidden_states * torch.pow(mean_squared, -0.5)
""",
        eps="eps",
        widens=False,
        switch="with_scale",
    ),
    _Form(
        """
input_dtype = hidden_states.dtype
hidden_states = hidden_states.to(torch.float32)
mean = hidden_states.mean(-1, keepdim=True)
variance = (hidden_states - mean).pow(2).mean(-1, keepdim=True)
hidden_states = (hidden_states - mean) * torch.rsqrt(variance + self.variance_epsilon)
hidden_states = self.weight.to(torch.float32) * hidden_states
return hidden_states.to(input_dtype)
""",
        centered=True,
    ),
    _Form(
        """
orig_dtype = hidden_states.dtype
return F.layer_norm(
    hidden_states.to(dtype=torch.float32), self.normalized_shape, None, None, eps=1e-05
).to(orig_dtype)
""",
        eps=1e-5,
        centered=True,
        parameters=(),
    ),
    *(
        _Form(
            forward,
            eps="eps",
            from_one=True,
            centered=True,
            parameters=("weight", "bias"),
            casts=True,
        )
        for forward in _FROM_ONE
    ),
)
_KNOWN = {
    (code.normal(form.forward), None if form.root is None else code.normal(form.root)): form
    for form in _FORMS
}


def form_of(cls: type[nn.Module]) -> _Form | None:
    """Return the form of a norm that the code of a class has, or None."""
    forward, root = functions = tuple(getattr(cls, name, None) for name in METHODS)
    if functions not in _recognised:
        key = _body(forward), _body(root)
        _recognised[functions] = _KNOWN.get(key)  # type: ignore[arg-type]
    return _recognised[functions]


# Keyed by the functions that were read, because those of a class may be replaced.
_recognised: dict[tuple[Any, ...], _Form | None] = {}


def has_known_form(cls: type[nn.Module]) -> bool:
    """Whether the code of a class is one of the forms of a norm."""
    return form_of(cls) is not None


def _body(function: Any) -> str | None:
    return code.body(function) if isinstance(function, types.FunctionType) else None


class FusedNorm(nn.Module):
    """The first base of each norm of these forms on trifuse's operator; the second is its source.

    A class of this kind holds the form of its source as ``_trifuse_form``.
    """

    weight: Tensor
    normalized_shape: tuple[int, ...]
    _trifuse_form: _Form

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The norm over the last dimension."""
        if (before := normed_before(hidden_states, self)) is not None:
            return before
        if (arguments := _arguments(self, hidden_states)) is None:
            out: Tensor = super().forward(hidden_states)
            return out
        return dropout_add_layer_norm(hidden_states, None, **arguments)


def _arguments(norm: FusedNorm, x: Tensor) -> dict[str, Any] | None:
    """Return the operator's arguments for a norm of x; None if torch must compute it."""
    form = norm._trifuse_form
    if x.dtype not in _SERVED or (form.casts and _is_autocast_on(x)):
        return None
    given: dict[str, Any] = {name: getattr(norm, name) for name in _parameter_names(norm)}
    if not given and tuple(getattr(norm, "normalized_shape", x.shape[-1:])) != x.shape[-1:]:
        return None
    for name, parameter in given.items():
        if parameter is None and name == "bias":
            continue
        if parameter is None or parameter.dim() != 1:
            return None
        if form.widens and parameter.dtype != x.dtype:
            return None
    if form.from_one:
        given["weight"] = 1.0 + given["weight"].float()
    eps = form.eps if isinstance(form.eps, float) else getattr(norm, form.eps)
    return given | {"eps": eps, "rms_norm": not form.centered}


def _parameter_names(norm: FusedNorm) -> tuple[str, ...]:
    form = norm._trifuse_form
    return form.parameters if form.switch is None or getattr(norm, form.switch) else ()


def _is_autocast_on(x: Tensor) -> bool:
    return torch.is_autocast_enabled() or torch.is_autocast_enabled(x.device.type)


def parameters(norm: nn.Module, x: Tensor) -> dict[str, Any] | None:
    """Return the operator's arguments for a norm of x; None if the module must be called."""
    if is_intercepted(norm):
        return None
    if isinstance(norm, LAYER_NORMS) and type(norm) in LAYER_NORMS:
        if len(norm.normalized_shape) != 1 or not x.is_floating_point():
            return None
        return {"weight": norm.weight, "bias": norm.bias, "eps": norm.eps}
    return _arguments(norm, x) if isinstance(norm, FusedNorm) else None


def takes_before(norm: Any) -> bool:
    """Whether a module returns the norm that was kept for it, if there is one."""
    return type(norm) is LayerNorm or isinstance(norm, FusedNorm)


def has_no_parameters(norm: nn.Module) -> bool:
    """Whether a fused norm has no weight and no bias, by its form."""
    return isinstance(norm, FusedNorm) and not _parameter_names(norm)


def is_known(norm: nn.Module) -> bool:
    """Whether the operator can serve a norm, whether or not it is fused already."""
    if isinstance(norm, LAYER_NORMS) and type(norm) in LAYER_NORMS:
        return len(norm.normalized_shape) == 1
    return isinstance(norm, FusedNorm) or has_known_form(type(norm))


_SERVED = (torch.float32, torch.bfloat16, torch.float16)
