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
from trifuse.nn.linear import FrozenLinear, packed_weight
from trifuse.nn.packing import PackedSequences
from trifuse.ops import encoder_layer as ops
from trifuse.ops import linear
from trifuse.ops.linear import Activation


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
    """What each call of a layer checks and reads."""

    modules: tuple[tuple[dict[str, Any], str, nn.Module, type], ...]  # see modules_as_planned
    parts: Parts
    linears: tuple[nn.Module, ...]
    biases: tuple[tuple[dict[str, Any], str], ...]  # where parameters are found now
    norms: tuple[tuple[dict[str, Any], str], ...]
    options: ops.Options  # those of the norms are read anew


# Kept outside the layers, so that plans are neither copied nor saved with them. A plan refers to
# the modules in a layer, but not to the layer, and so does not keep it alive.
_plans: WeakKeyDictionary[nn.Module, _Plan | None] = WeakKeyDictionary()


def run(
    layer: nn.Module,
    x: Tensor,
    mask: Tensor | PackedSequences | None,
    describe: Callable[[Any], Parts | None],
    is_causal: bool = False,
) -> Tensor | None:
    """Computes a layer's output, (B, L, features), as one op.

    Args:
        layer: the layer.
        x: (B, L, features).
        mask: None; 4-dimensional as ``attn_mask`` of :func:`trifuse.scaled_dot_product_attention`;
            or packed sequences.
        describe: returns a layer's parts; None if the op can't compute it. Called once.
        is_causal: whether a query attends to no key after itself.

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
        or (weights := _weights(plan, x.dtype)) is None
    ):
        return None
    window, cu_seqlens, longest = -1, None, 0
    if isinstance(mask, PackedSequences):
        cu_seqlens, longest = mask.cu_seqlens, mask.max_seqlen
        window = -1 if mask.window is None else mask.window
        mask = None
    norm1, norm2 = plan.parts.norms
    options = plan.options._replace(
        window_left=window,
        window_right=0 if is_causal else window,
        eps1=norm1.eps,
        eps2=norm2.eps,
    )
    return ops.encoder_layer(
        x,
        mask,
        cu_seqlens,
        longest,
        weights,
        tuple([parameters[name] for parameters, name in plan.biases]),
        tuple([parameters[name] for parameters, name in plan.norms]),
        options,
    )


_UNKNOWN: Any = object()


def _make(layer: nn.Module, parts: Parts | None) -> _Plan | None:
    if parts is None:
        return None
    joint = len(parts.projections) == 1
    frozen = (parts.up, parts.down) if joint else (*parts.projections, *parts[1:4])
    if not all(type(module) is FrozenLinear for module in frozen):
        return None
    if not all(type(n) is nn.LayerNorm and len(n.normalized_shape) == 1 for n in parts.norms):
        return None
    modules = tuple(
        (parent._modules, name, module, type(module))
        for parent in layer.modules()
        for name, module in parent._modules.items()
        if module is not None
    )
    linears: tuple[nn.Module, ...] = (*parts.projections, *parts[1:4])
    biases = tuple(
        (module._parameters, "in_proj_bias" if module is parts.projections[0] and joint else "bias")
        for module in linears
    )
    norms = tuple((norm._parameters, name) for norm in parts.norms for name in ("weight", "bias"))
    attention: Any = parts.projections[0]
    features = attention.embed_dim if joint else attention.out_features
    head_dim = features // parts.num_heads
    options = ops.Options(
        parts.num_heads,
        head_dim,
        parts.up.out_features,  # type: ignore[arg-type]
        1 / math.sqrt(head_dim) if parts.scale is None else parts.scale,
        -1,
        -1,
        parts.activation,
        parts.norm_first,
        False,
        0.0,
        0.0,
    )
    return _Plan(modules, parts, linears, biases, norms, options)


def _weights(plan: _Plan, dtype: torch.dtype) -> tuple[Tensor, ...] | None:
    """Returns the packed weights; None if one has another dtype, or is for other instructions."""
    capability = backends.cpu_capability()
    weights: list[Tensor] = []
    linears = plan.linears
    if len(linears) == 4:
        attention: Any = linears[0]
        for name, weight in (
            ("qkv", attention.in_proj_weight),
            ("out", attention.out_proj.weight),
        ):
            found = packed_weight(attention, name)
            packed = None if found is None else found.get(weight, dtype)
            if packed is None or weight.dtype != dtype:
                return None
            weights.append(packed)
        linears = linears[2:]
    for module in linears:
        frozen: linear.FrozenWeight = vars(module)["_frozen"]
        if frozen.capability != capability or frozen.dtype != dtype:
            return None
        weights.append(frozen.packed)
    return tuple(weights)
