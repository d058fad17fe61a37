"""Encoder layers that run as one op (:mod:`trifuse.ops.encoder_layer`) if their weights are frozen.

A layer is described by its :class:`Parts`. Before each call it is checked that the layer still
consists of these modules, that none of them trains or has hooks, and that nothing watches the call.
Otherwise the layer calls its parts, as if it were not frozen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _global  # hooks on all modules

from trifuse import backends
from trifuse.nn.dropout_add_layer_norm import TORCHS
from trifuse.nn.linear import FrozenLinear, packed_weight
from trifuse.nn.packing import PackedSequences
from trifuse.ops import encoder_layer as ops
from trifuse.ops.encoder_layer import Cache
from trifuse.ops.linear import Activation, FrozenWeight


class Parts(NamedTuple):
    """The modules that an encoder layer consists of, whatever it calls them, and its options."""

    # Query, key and value, each a FrozenLinear; or one nn.MultiheadAttention for all three.
    projections: tuple[nn.Module, ...]
    output: nn.Module  # of the attention; with an nn.MultiheadAttention, its out_proj
    up: nn.Module  # the first product of the feed-forward network
    down: nn.Module
    norms: tuple[nn.LayerNorm, nn.LayerNorm]
    num_heads: int
    scale: float | None  # multiplies q·k; None: 1/√head_dim
    activation: Activation | None
    norm_first: bool = False


class _Plan(NamedTuple):
    """A plan names the modules and tensors that each call of a layer checks and reads."""

    modules: tuple[tuple[dict[str, Any], str, nn.Module, type], ...]  # see modules_as_planned
    attention: Any  # the nn.MultiheadAttention whose weights are packed, or None
    frozen: tuple[tuple[dict[str, Any], FrozenWeight], ...]  # of other layers, and where each is
    weights: tuple[Tensor, ...]  # of `frozen`
    dtype: torch.dtype
    capability: str | None  # the instruction set that they are packed for
    biases: tuple[tuple[dict[str, Any], str], ...]  # where parameters are found
    norms: tuple[tuple[dict[str, Any], str], ...]
    first_norm: nn.LayerNorm
    last_norm: nn.LayerNorm
    options: tuple[Any, ...]  # those of ops.Options before the windows


# Kept outside the layers, so that plans are neither copied nor saved with them. A plan refers to
# the modules in a layer, but not to the layer, and so does not keep it alive.
_plans: WeakKeyDictionary[nn.Module, _Plan | None] = WeakKeyDictionary()


def run(
    layer: nn.Module,
    x: Tensor,
    mask: Tensor | PackedSequences | None,
    describe: Callable[[Any], Parts | None],
    is_causal: bool = False,
    cache: Cache | None = None,
) -> Tensor | None:
    """Computes a layer's output, (B, L, features), as one op.

    Args:
        layer: the layer.
        x: (B, L, features).
        mask: None; 4-dimensional as ``attn_mask`` of :func:`trifuse.scaled_dot_product_attention`;
            or packed sequences.
        describe: returns a layer's parts; None if the op can't compute it. Called once.
        is_causal: whether a query attends to no key after itself.
        cache: as in :func:`trifuse.ops.encoder_layer.encoder_layer`.

    Returns:
        The output; None if the layer must call its parts.
    """
    if torch.compiler.is_compiling() or backends._C is None:
        return None
    plan = _plans.get(layer, _UNKNOWN)
    if plan is _UNKNOWN:
        plan = _plans[layer] = _make(layer, describe(layer))
    if (
        plan is None
        or _global._global_forward_hooks
        or _global._global_forward_pre_hooks
        or _global._global_backward_hooks
        or _global._global_backward_pre_hooks
        or not backends._C.modules_as_planned(plan.modules)
        or (weights := _weights(layer, plan)) is None
    ):
        return None
    window, cu_seqlens, longest = -1, None, 0
    if isinstance(mask, PackedSequences):
        cu_seqlens, longest = mask.cu_seqlens, mask.max_seqlen
        window = -1 if mask.window is None else mask.window
        mask = None
    right = 0 if is_causal else window
    return ops.encoder_layer(
        x,
        mask,
        cu_seqlens,
        longest,
        weights,
        tuple([parameters[name] for parameters, name in plan.biases]),
        tuple([parameters[name] for parameters, name in plan.norms]),
        (*plan.options, window, right, plan.first_norm.eps, plan.last_norm.eps),
        cache,
    )


_UNKNOWN: Any = object()


def _make(layer: nn.Module, parts: Parts | None) -> _Plan | None:
    if parts is None:
        return None
    attention: Any = parts.projections[0] if len(parts.projections) == 1 else None
    linears: list[Any] = [*parts.projections, parts.output, parts.up, parts.down]
    frozen = linears if attention is None else linears[2:]
    if not all(type(module) is FrozenLinear for module in frozen):
        return None
    if not all(type(n) in TORCHS and len(n.normalized_shape) == 1 for n in parts.norms):
        return None
    weights: list[FrozenWeight] = [module._frozen for module in frozen]
    dtypes = {weight.dtype for weight in weights}
    capabilities = {weight.capability for weight in weights}
    if attention is not None:
        dtypes |= {attention.in_proj_weight.dtype, attention.out_proj.weight.dtype}
    if len(dtypes) != 1 or len(capabilities) != 1:
        return None
    modules = tuple(
        (parent._modules, name, module, type(module))
        for parent in layer.modules()
        for name, module in parent._modules.items()
        if module is not None
    )
    biases = tuple(
        (module._parameters, "in_proj_bias" if module is attention else "bias")
        for module in linears
    )
    norms = tuple((norm._parameters, name) for norm in parts.norms for name in ("weight", "bias"))
    features = linears[0].out_features if attention is None else attention.embed_dim
    head_dim = features // parts.num_heads
    scale = 1 / math.sqrt(head_dim) if parts.scale is None else parts.scale
    sizes = (parts.num_heads, head_dim, parts.up.out_features)
    return _Plan(
        modules,
        attention,
        tuple((vars(module), module._frozen) for module in frozen),
        tuple(weight.packed for weight in weights),
        dtypes.pop(),
        capabilities.pop(),
        biases,
        norms,
        parts.norms[0],
        parts.norms[1],
        (*sizes, scale, parts.activation, parts.norm_first, False),
    )


def _weights(layer: nn.Module, plan: _Plan) -> tuple[Tensor, ...] | None:
    """Returns the packed weights; None if they don't serve, or not any more."""
    if plan.capability != backends.cpu_capability():
        return None
    for attributes, frozen in plan.frozen:
        if attributes["_frozen"] is not frozen:  # the model was reverted and frozen again
            del _plans[layer]
            return None
    if plan.attention is None:
        return plan.weights
    weights = list(plan.weights)
    for i, (name, weight) in enumerate(
        (("qkv", plan.attention.in_proj_weight), ("out", plan.attention.out_proj.weight))
    ):
        kept = packed_weight(plan.attention, name)
        packed = None if kept is None else kept.get(weight, plan.dtype)
        if packed is None:
            return None
        weights.insert(i, packed)
    return tuple(weights)
