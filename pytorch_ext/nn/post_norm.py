"""Encoder layers in training, run in one call (:mod:`trifuse.ops.post_norm_layers`).

On a GPU, Python and autograd take longer to call the parts of a layer of moderate size than the GPU
takes to compute them. So consecutive layers that consist of known parts
(:class:`trifuse.nn.encoder_layer.Parts`) run in one call, which is also faster in inference. As in
that module, each call checks first that the layers still consist of these modules, and that no hook
or compiler observes them. Otherwise the layers are called one by one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from trifuse.nn.dropout import DROPOUTS
from trifuse.nn.dropout_add_layer_norm import LAYER_NORMS
from trifuse.nn.encoder_layer import Parts
from trifuse.nn.linear import Linear
from trifuse.nn.packing import PackedSequences
from trifuse.nn.plans import (
    Checks,
    checks,
    forwards_of,
    joined,
    kept_outside,
    may_run,
    modules_in,
    plan_of,
    present_values,
)
from trifuse.ops.post_norm_layers import post_norm_layers

# On a CPU the products of trifuse.ops.linear are faster, and Python's share of the time is smaller.
DEVICES = {"cuda"}


class _Plan(NamedTuple):
    """The arguments that a call passes to the op, and what each call must check first."""

    checks: Checks  # including the layers
    layers: tuple[tuple[Any, ...], ...]  # as the op takes them
    # Attributes of modules, including "training", and the probability of a dropout while that is
    # true. They are in the order in which the op takes the probabilities.
    dropouts: tuple[tuple[dict[str, Any], float], ...]
    head_dim: int
    needs_mask: bool


_plans: WeakKeyDictionary[nn.ModuleList, _Plan] = kept_outside()

# Layers for which no plan could be made, with the classes of the modules in them. Other changes may
# be missed; the layers are then still called one by one.
_refused: WeakKeyDictionary[nn.ModuleList, tuple[type, ...]] = WeakKeyDictionary()


def run_all(
    layers: nn.ModuleList,
    x: Tensor,
    mask: Tensor | PackedSequences | None,
    describe: Callable[[Any], Parts | str | None],
) -> Tensor | None:
    """Computes the output of consecutive layers, (B, L, features), in one call.

    Args:
        layers: the layers.
        x: (B, L, features).
        mask: None; 4-dimensional as ``attn_mask`` of :func:`trifuse.scaled_dot_product_attention`;
            or packed sequences.
        describe: returns a layer's parts; None, or a reason, if the op can't compute it. Called
            for a new layer and after a change.

    Returns:
        The output of the last layer; None if the layers must be called one by one.
    """
    plan = _usable_plan(layers, x.device, describe)
    if plan is None or (plan.needs_mask and mask is None):
        return None
    attn_mask, cu_seqlens, longest = None, None, 0
    if isinstance(mask, PackedSequences):
        if mask.window is not None or mask.causal is not False:
            return None
        cu_seqlens, longest = mask.cu_seqlens, mask.max_seqlen
    else:
        attn_mask = mask
    dropout_p = tuple([p if owner["training"] else 0.0 for owner, p in plan.dropouts])
    return post_norm_layers(
        x, attn_mask, cu_seqlens, longest, plan.layers, dropout_p, plan.head_dim
    )


def may_run_all(
    layers: nn.ModuleList, device: torch.device, describe: Callable[[Any], Parts | str | None]
) -> bool:
    """Whether :func:`run_all` serves plain calls on a device.

    If so, the layers can get packed tokens, because neither a hook nor other code would get them.
    """
    return _usable_plan(layers, device, describe) is not None


def _usable_plan(
    layers: nn.ModuleList, device: torch.device, describe: Callable[[Any], Parts | str | None]
) -> _Plan | None:
    if device.type not in DEVICES or not may_run():
        return None
    refused = _refused.get(layers)
    if refused is not None and refused == _classes(layers):
        return None
    plan = plan_of(layers, _plans, functools.partial(_make, layers, describe), trained=True)
    if any(layer.__dict__.get("gradient_checkpointing") for layer in layers._modules.values()):
        return None
    return plan


def _classes(layers: nn.ModuleList) -> tuple[type, ...]:
    return tuple(map(type, layers.modules()))


def _make(layers: nn.ModuleList, describe: Callable[[Any], Parts | str | None]) -> _Plan | None:
    plan = _plan(layers, describe)
    if plan is None:
        _refused[layers] = _classes(layers)
    else:
        _refused.pop(layers, None)
    return plan


def _plan(layers: nn.ModuleList, describe: Callable[[Any], Parts | str | None]) -> _Plan | None:
    made = [_make_layer(layer, describe(layer)) for layer in layers]
    plans = [plan for plan in made if plan is not None]
    if not plans or len(plans) < len(made) or len({plan.head_dim for plan in plans}) > 1:
        return None
    return _Plan(
        joined(layers, plans),
        tuple(layer for plan in plans for layer in plan.layers),
        tuple(dropout for plan in plans for dropout in plan.dropouts),
        plans[0].head_dim,
        any(plan.needs_mask for plan in plans),
    )


def _make_layer(layer: nn.Module, parts: Parts | str | None) -> _Plan | None:
    """Returns the plan of one layer, or None if the op can't compute it."""
    forwards = forwards_of(layer)
    if (
        not isinstance(parts, Parts)
        or forwards is None
        or parts.attention_dropout is None
        or len(parts.projections) != 3
        or len(parts.dropouts) != 2
        or parts.activation is None
        or parts.norm_first
        or parts.factor is not None
        or parts.own_eps is not None
        or parts.head_norms
        or parts.num_key_heads not in (None, parts.num_heads)
        or not (parts.scale is None or isinstance(parts.scale, (int, float)))
    ):
        return None
    linears: list[Any] = [*parts.projections, parts.output, parts.up, parts.down]
    norms: list[Any] = [*parts.norms]
    attending, dropped, name = parts.attention_dropout
    dropouts = [(dropped, name), *((module, "p") for module in parts.dropouts)]
    if (
        not all(type(module) in (nn.Linear, Linear) for module in linears)
        or not all(type(norm) in LAYER_NORMS and len(norm.normalized_shape) == 1 for norm in norms)
        or not all(type(module) in DROPOUTS for module in parts.dropouts)
        or any(getattr(module, "inplace", False) for module, _ in dropouts)
        or not all(isinstance(getattr(*each), float) for each in dropouts)
        or not all(isinstance(norm.eps, float) for norm in norms)
    ):
        return None
    # A dropout with p = 1 gives 0 even for infinite x; the operator supports only p < 1.
    if any(getattr(*each) >= 1 for each in dropouts):
        return None
    head_dim = linears[0].out_features // parts.num_heads
    tensors = [
        *((module._parameters, "weight") for module in linears),
        *((module._parameters, "bias") for module in linears),
        *((norm._parameters, name) for norm in norms for name in ("weight", "bias")),
    ]
    if any(name not in parameters for parameters, name in tensors):
        return None  # computed from other parameters, as by pruning, or held elsewhere, as by FSDP
    attributes = [*dropouts, *((norm, "eps") for norm in norms), *parts.attributes]
    owned = [(o if isinstance(o, (dict, type)) else vars(o), name) for o, name in attributes]
    return _Plan(
        checks(modules_in(layer), (*present_values([*tensors, *owned]), *forwards)),
        (
            (
                tuple(parameters[name] for parameters, name in tensors),
                parts.num_heads,
                1 / math.sqrt(head_dim) if parts.scale is None else float(parts.scale),
                parts.activation,
                *(norm.eps for norm in norms),
            ),
        ),
        tuple(
            (vars(module), getattr(*each))
            for module, each in zip((attending, *parts.dropouts), dropouts, strict=True)
        ),
        head_dim,
        parts.needs_mask,
    )
