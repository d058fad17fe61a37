"""Layers of transformers whose code is known, which run as one op in inference.

transformers copies Llama's decoder layer, with small changes, into many families: Mistral, Qwen2,
Qwen3 with its norms of heads. ModernBERT's encoder layer has the same parts. GPT-2's layer,
DistilBERT's, and those of CLIP, SigLIP and ViT, which many models have, rotate nothing. A layer is
recognised if the statements of its ``forward``, of those of its attention and its network, and of
the function that rotates queries and keys, are those of one of these families, in any known
version.

MPNet's layers, and those of T5's encoder, share a bias of relative positions, which the op takes
as a table (:mod:`trifuse.recipes.own_biases`). While a model decodes, the op appends to the cache
in place (:mod:`trifuse.recipes.caches`).
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trifuse._transformers import NAME
from trifuse.nn import encoder_layer
from trifuse.nn.dropout_add_layer_norm import LAYER_NORMS
from trifuse.nn.linear import is_frozen, is_plain
from trifuse.nn.packing import PackedSequences
from trifuse.ops.encoder_layer import Cache, Rotary
from trifuse.recipes import (
    arguments,
    caches,
    known_code,
    norms,
    own_biases,
    rotary_functions,
    sublayers,
)
from trifuse.written_out import DistanceBias
from trifuse.written_out.parts import fitting


class OneKnownOp(nn.Module):
    """Mixin for fused classes of such layers, before the original class in their bases.

    Caches of unknown classes, and arguments that the models don't pass to their layers, run as in
    transformers.
    """

    # None if a process that unpickles the layer has other code.
    _trifuse_names: known_code.Names | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Same signature as the original class's forward."""
        if not torch.compiler.is_compiling():
            given = arguments.by_name(self, args, kwargs) or {}
            x = given.pop(arguments.HIDDEN_STATES, None)
            if isinstance(x, Tensor):
                out = _run(self, x, given.pop(arguments.MASK, None), **given)
                if out is not None:
                    return out
        forward: Any = super().forward
        return forward(*args, **kwargs)


def _run(
    layer: Any,
    x: Tensor,
    mask: Any,
    /,
    position_embeddings: Any = None,
    cache: Any = None,
    past_key_values: Any = None,
    is_causal: bool | None = None,
    position_bias: Any = None,
    **kwargs: Any,
) -> Any:
    """Return a layer's result; None if it must call its parts."""
    if torch.is_grad_enabled() and x.requires_grad:
        return None
    if not arguments.are_plain((), kwargs):
        return None
    if cache is not None and past_key_values is not None:
        return None
    cache = past_key_values if cache is None else cache
    names = layer._trifuse_names
    attention = None if names is None else _submodule(layer, names.attention)
    if attention is None:
        return None
    rotary = _rotary(attention, position_embeddings) if names.rotates else None
    if (rotary is None) == names.rotates or (position_embeddings is not None) != names.rotates:
        return None
    if cache is not None and not names.takes_cache:
        return None
    network = _network(layer, names)
    if names.in_chunks and (network is None or "ff_chunk" in vars(network)):
        return None
    if position_bias is not None and not names.takes_bias:
        return None
    bias: DistanceBias | None = None

    def make_table() -> Tensor | None:
        nonlocal bias
        longest = mask.max_seqlen if isinstance(mask, PackedSequences) else x.size(1)
        bias = _bias(attention, position_bias, longest)
        table = None if bias is None else fitting(bias.table, x.dtype)
        return None if table is None else table[None]

    relative_bias = make_table if names.takes_bias else None
    if isinstance(mask, PackedSequences):
        if cache is not None:
            return None
        causal = _is_causal(attention, is_causal) if mask.causal is None else mask.causal
        out = encoder_layer.run(
            layer, x, mask, _describe, causal, rotary=rotary, relative_bias=relative_bias
        )
        return _result(names, out, bias)
    band = _band(attention, mask, x.size(1), is_causal)
    if band is None:
        return None
    place: caches.Place | None = None

    def reserve() -> Cache | None:
        nonlocal place
        head_dim = attention.head_dim
        *others, last = [attention._modules[name] for name in names.projections]
        heads = encoder_layer.out_features(last) // head_dim
        if not others:  # one projection to queries, keys and values
            heads //= 3
        place = caches.find(cache, attention.layer_idx, x, heads, head_dim)
        if place is None or not _sees_as_parts(place, x.size(1), band):
            return None
        return place.reserve(x, heads, head_dim)

    out = encoder_layer.run(
        layer,
        x,
        band.mask,
        _describe,
        band.is_causal,
        reserve=None if cache is None else reserve,
        rotary=rotary,
        window=band.window,
        relative_bias=relative_bias,
    )
    if out is not None and place is not None:
        place.advance(x.size(1))
    return _result(names, out, bias)


def _result(names: known_code.Names, out: Tensor | None, bias: Tensor | None) -> Any:
    """Return what a layer with this output returns; None if there is no output."""
    if out is None or names.returns is None:
        return out
    results = {arguments.HIDDEN_STATES: out, arguments.BIAS: bias, None: None}
    return tuple(results[name] for name in names.returns)


def _bias(attention: Any, given: Any, longest: int) -> DistanceBias | None:
    """The bias that a layer gets or, if it is the first one, makes, as a table by distance.

    Args:
        attention: the layer's attention.
        given: the bias that the layer gets.
        longest: the number of tokens, or of the longest packed sequence.

    Returns:
        The bias; None if it isn't such a table.
    """
    if given is None and isinstance(attention, own_biases.SharedBias):
        own: Any = attention
        if own.has_relative_attention_bias:
            given = own.compute_bias(longest, longest)
    if not isinstance(given, DistanceBias) or not given.is_usable or given.table is None:
        return None
    return given if given.mask is None and given.shape[2:] == (longest, longest) else None


def _rotary(attention: Any, embeddings: Any) -> Rotary | None:
    """The rotation that a layer gets; None if it isn't one of whole heads, which the parts need."""
    if not (isinstance(embeddings, tuple) and len(embeddings) == 2):
        return None
    for each in embeddings:
        if not isinstance(each, Tensor) or each.shape[-1:] != (attention.head_dim,):
            return None
    return Rotary(*embeddings)


class _Band(NamedTuple):
    """A mask of transformers as the op takes it."""

    mask: Tensor | None
    is_causal: bool = False
    window: int = -1  # no bound
    lower_right: bool = False  # whether the last query is aligned with the last key


def _band(attention: nn.Module, mask: Any, queries: int, is_causal: bool | None) -> _Band | None:
    from trifuse import huggingface

    if mask is None:
        return _Band(None, queries > 1 and _is_causal(attention, is_causal))
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return None
    if mask.dtype == torch.bool:
        form = known_code.attention_of(_source(attention))
        if form is not None and not form.dispatches:
            return None  # it would add 0 and 1 to the scores
    read = huggingface.read_mask(mask)
    causal = read.is_causal is not False  # else it is the lower right variant
    return _Band(read.attn_mask, causal, -1 if read.window is None else read.window, causal)


def _is_causal(attention: nn.Module, is_causal: bool | None) -> bool:
    """Whether an attention is causal without a mask. A layer may pass ``is_causal`` on to it."""
    from trifuse import huggingface

    form = known_code.attention_of(_source(attention))
    if form is not None and not form.dispatches:
        return False
    if is_causal is not None:
        is_causal = is_causal if form is not None and form.takes_options else None
    return huggingface.is_causal_unmasked(attention, is_causal)


def _sees_as_parts(place: caches.Place, L: int, band: _Band) -> bool:
    """Whether L queries of the op attend to the same keys in a cache as they do in the parts."""
    # With a cache, the op aligns the last query with the last key. The parts do so if a mask is
    # marked as causal; otherwise they align the first query with the first key.
    if band.mask is None and band.is_causal:
        return place.past == 0
    masked = 0 if band.mask is None else band.mask.size(3)
    if max(place.past + L, masked) != place.seen:
        return False
    bounded = band.is_causal or band.window >= 0
    return not bounded or band.lower_right or place.seen == L


# Recognition --------------------------------------------------------------------------------------


class _Known(NamedTuple):
    """A layer whose code, including that of its attention and network, has a known form."""

    names: known_code.Names
    form: known_code.Attention
    attention: Any
    network: Any


def _classify(layer: nn.Module) -> _Known | None:
    names = known_code.layer_of(_source(layer))
    if names is None:
        return None
    for path in names.holders:
        holder = _submodule(layer, path)
        if holder is None or not known_code.is_holder(_source(holder), names, path):
            return None
    attention, network = _submodule(layer, names.attention), _network(layer, names)
    if attention is None or network is None:
        return None
    form = known_code.attention_of(_source(attention))
    found = known_code.with_network(_source(network), names) if names.network else names
    if form is None or found is None or found not in form.of:
        return None
    return _Known(found, form, attention, network)


def _network(layer: nn.Module, names: known_code.Names) -> Any:
    """The module with the products of a layer's feed-forward network, or None."""
    return _submodule(layer, names.network) if names.network else layer


def is_known(layer: nn.Module) -> bool:
    """Whether the code of a layer, of its attention and of its network is of a known form."""
    return _classify(layer) is not None


def _source(module: nn.Module) -> Any:
    """The class of transformers of a module, or the one from which recipes made its class."""
    return sublayers.original(type(module))


def why_not(layer: nn.Module) -> str | None:
    """Return why a layer of a known form can't run as one op; None if it can."""
    return encoder_layer.why_not(layer, _describe)


def _describe(layer: nn.Module) -> encoder_layer.Parts | str:
    """Return what a layer of a known form consists of, or why the op can't compute it."""
    known = _classify(layer)
    if known is None:
        return "the code of a part of it isn't known"
    names, form, attention, network = known
    if form.dispatches and attention.config._attn_implementation != NAME:
        chosen = attention.config._attn_implementation
        return f'its attention runs by attn_implementation="{chosen}"'
    scope = inspect.unwrap(_source(attention).forward).__globals__  # holds the rotation
    rotation = rotary_functions.rotation_of(scope.get("apply_rotary_pos_emb"))
    if names.rotates and (rotation is None or rotation not in _ROTATIONS):
        return "it doesn't rotate the two halves of each head"
    if names.in_chunks and network.chunk_size_feed_forward:
        return "its network runs on one part of the tokens after another"
    projections = tuple(attention._modules.get(name) for name in names.projections)
    up, down = (_submodule(network, name) for name in (names.up, names.down))
    factor = None if names.factor is None else network._modules.get(names.factor)
    output = attention._modules.get(names.output)
    linears = [*projections, output, up, down]
    if names.factor is not None:
        linears.append(factor)
    if not all(each is not None and (is_frozen(each) or is_plain(each)) for each in linears):
        return encoder_layer.OTHER_LINEARS
    function = _submodule(network, names.activation)
    activation = None if function is None else sublayers.name_of(function)
    if activation is None:
        return "no product of ours has its activation"
    first, second = (_submodule(layer, name) for name in names.norms)
    head_norms = tuple(attention._modules.get(name) for name in form.head_norms)
    normalised = [second, *head_norms]
    if type(first) is nn.Identity and names.norm_first:  # as in ModernBERT's first layer
        first = None
    else:
        normalised.append(first)
    eps = _rms_eps(normalised)
    if eps is None:
        return "its norms aren't all LayerNorms, or RMSNorms of one form"
    head_dim = getattr(attention, form.head_dim)
    counts = [encoder_layer.out_features(each) // head_dim for each in projections]
    heads, key_heads = counts[:2] if len(counts) == 3 else (counts[0] // 3, counts[0] // 3)
    owned = [
        (attention, form.head_dim),
        (attention, form.scale or ""),
        (network, "chunk_size_feed_forward"),
    ]
    if form.dispatches:
        owned += (attention, "config"), (attention.config, "_attn_implementation_internal")
    dropouts = [_submodule(layer, path) for path in names.dropouts]
    return encoder_layer.Parts(
        projections,
        output,
        up,
        down,
        (first, second),
        tuple(each for each in dropouts if type(each) is not nn.Identity),
        heads,
        None if form.scale is None else getattr(attention, form.scale),
        activation,
        norm_first=names.norm_first,
        attributes=(
            *((owner, name) for owner, name in owned if name in vars(owner)),
            *((scope, name) for name in _ROTATING if names.rotates),
            *((type(network), name) for name in ("ff_chunk",) if names.in_chunks),
        ),
        factor=factor,
        num_key_heads=key_heads,
        rms_eps=eps or None,
        head_norms=head_norms,
        rotary_in_float32=rotation is not None and rotation.in_float32,
    )


_ROTATING = ("apply_rotary_pos_emb", "rotate_half")  # the functions that rotate


def _submodule(layer: nn.Module, path: str) -> Any:
    """The module at a path; None if there is none, for example because a function replaced it."""
    found: nn.Module | None = layer
    for name in path.split("."):
        found = None if found is None else found._modules.get(name)
    return found


def _rms_eps(each: list[Any]) -> str | None:
    """The attribute with the epsilon of RMSNorms; "" for LayerNorms; None for any others."""
    if all(type(norm) in LAYER_NORMS for norm in each):
        return ""
    if not all(isinstance(norm, norms.FusedNorm) for norm in each):
        return None
    forms = {norm._trifuse_form for norm in each}
    plain = not any(
        form.from_one or form.centered or form.switch or form.parameters != ("weight",)
        for form in forms
    )
    names = {form.eps for form in forms if isinstance(form.eps, str)}
    return names.pop() if len(names) == 1 and plain else None


def one_op_class(source: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of a layer's class that can run as one op."""
    if source not in _classes:
        origin = sublayers.origin_of(source, (one_op_class, (source,)))
        names = known_code.layer_of(sublayers.original(source))
        _classes[source] = sublayers.subclass(OneKnownOp, origin, {"_trifuse_names": names})
    return _classes[source]


_classes: dict[type[nn.Module], type[nn.Module]] = {}


# The op computes these rotations: they turn whole heads, in the dtype of queries and keys or in
# float32.
_ROTATIONS = (
    rotary_functions.Rotation(),
    rotary_functions.Rotation(in_float32=True, keeps_dtype=True),
)
