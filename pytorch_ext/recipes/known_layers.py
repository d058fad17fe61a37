"""Layers of transformers whose code is known, which run as one op in inference.

transformers copies Llama's decoder layer, with small changes, into many families: Mistral, Qwen2,
Qwen3 with its norms of heads, Phi-3 with joint projections. ModernBERT's encoder layer has the same
parts. The layers of GPT-2 and OPT, DistilBERT and ALBERT, CLIP, SigLIP and ViT, wav2vec2, BART,
mBART and Whisper, which many models have, rotate nothing. A decoder's layer attends to an encoder's
states inside the op if a cache holds their keys and values. A layer is recognised if the statements
of its ``forward``, of those of its attention and its network, and of the function that rotates
queries and keys, are those of one of these families, in any known version.

MPNet's layers, and those of T5's encoder, share a bias of relative positions, which the op takes
as a table (:mod:`trifuse.recipes.own_biases`). While a model decodes, the op appends to the cache
in place (:mod:`trifuse.recipes.caches`).
"""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trifuse._transformers import NAME
from trifuse.nn import encoder_layer
from trifuse.nn.dropout_add_layer_norm import LAYER_NORMS
from trifuse.nn.linear import is_frozen, is_plain
from trifuse.nn.packing import PackedSequences
from trifuse.ops.encoder_layer import Cache, Memory, Rotary
from trifuse.recipes import (
    arguments,
    caches,
    known_attentions,
    known_code,
    known_names,
    norms,
    own_biases,
    rotary_functions,
    sublayers,
)
from trifuse.recipes.arguments import BIAS, HIDDEN_STATES, MEMORY_BIAS
from trifuse.written_out import DistanceBias
from trifuse.written_out.parts import fitting


class OneKnownOp(nn.Module):
    """Mixin for fused classes of such layers, before the original class in their bases.

    Caches of unknown classes, and arguments that the models don't pass to their layers, run as in
    transformers.
    """

    # None if a process that unpickles the layer has other code.
    _trifuse_names: known_names.Names | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Same signature as the original class's forward."""
        if not torch.compiler.is_compiling():
            given = arguments.by_name(self, args, kwargs) or {}
            x = given.pop(HIDDEN_STATES, None)
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
    layer_past: Any = None,
    is_causal: bool | None = None,
    position_bias: Any = None,
    encoder_hidden_states: Any = None,
    encoder_attention_mask: Any = None,
    encoder_decoder_position_bias: Any = None,
    **kwargs: Any,
) -> Any:
    """Return a layer's result; None if it must call its parts."""
    if torch.is_grad_enabled() and x.requires_grad:
        return None
    if not arguments.are_plain((), kwargs):
        return None
    # The names of the cache in the versions of transformers, and in their families.
    given = [each for each in (cache, past_key_values, layer_past) if each is not None]
    if len(given) > 1:
        return None
    cache = given[0] if given else None
    names = _names(layer)
    if names is None:
        return None
    attention = _submodule(layer, names.attention)
    form = known_attentions.attention_of(_source(attention))
    if form is None:
        return None
    head_dim = getattr(attention, form.head_dim)
    rotary = _rotary(names, head_dim, position_embeddings) if names.rotates else None
    if (rotary is None) == names.rotates or (position_embeddings is not None) != names.rotates:
        return None
    if cache is not None and not names.takes_cache:
        return None
    network = _network(layer, names)
    if names.in_chunks and (network is None or "ff_chunk" in vars(network)):
        return None
    if position_bias is not None and not names.takes_bias:
        return None
    to_memory: _ToMemory | None = None
    if encoder_hidden_states is not None:
        to_memory = _to_memory(layer, names, x, cache, encoder_attention_mask, is_causal)
        bias = encoder_decoder_position_bias
        if to_memory is None or not (bias is None or own_biases.is_zero(bias)):
            return None
    elif not (encoder_attention_mask is None and encoder_decoder_position_bias is None):
        return None
    if names.memory is not None:
        cache = caches.own(cache)
    call = _Call(attention, names, form, x, cache, position_bias)
    seen: Tensor | PackedSequences | None
    if isinstance(mask, PackedSequences):
        if cache is not None or to_memory is not None:
            return None
        causal = _is_causal(attention, is_causal) if mask.causal is None else mask.causal
        band, seen, longest = _Band(None, causal), mask, mask.max_seqlen
    else:
        found = _band(attention, mask, x.size(1), is_causal)
        if found is None:
            return None
        band, seen, longest = found, found.mask, x.size(1)
    out = encoder_layer.run(
        layer,
        x,
        seen,
        _describe,
        band.is_causal,
        reserve=None if cache is None else functools.partial(call.reserve, band),
        rotary=rotary,
        window=band.window,
        relative_bias=functools.partial(call.make_table, longest) if names.takes_bias else None,
        memory=None if to_memory is None else to_memory.memory,
    )
    if out is not None and call.place is not None:
        call.place.advance(x.size(1))
    memory_bias = encoder_decoder_position_bias
    if names.takes_bias and to_memory is not None and memory_bias is None:
        memory_bias = own_biases.no_bias(to_memory.attention, x, to_memory.memory.key)
    return _result(names, out, {BIAS: call.bias, MEMORY_BIAS: memory_bias})


class _Call:
    """A call of a layer, and what the op gets only if it serves everything else."""

    def __init__(
        self,
        attention: Any,
        names: known_names.Names,
        form: known_attentions.Attention,
        x: Tensor,
        cache: Any,
        position_bias: Any,
    ) -> None:
        self.attention, self.names, self.form = attention, names, form
        self.x, self.cache, self.position_bias = x, cache, position_bias
        self.place: caches.Place | None = None  # where the keys and values of x go
        self.bias: DistanceBias | None = None

    def _find_place(self) -> caches.Place | None:
        if self.place is None:
            _, heads = _heads(self.attention, self.names, self.form)
            head_dim = getattr(self.attention, self.form.head_dim)
            index = self.attention.layer_idx
            self.place = caches.find(self.cache, index, self.x, heads, head_dim)
        return self.place

    def reserve(self, band: _Band) -> Cache | None:
        """Return memory for the keys and values; None if the parts attend to other keys."""
        place = self._find_place()
        if place is None or not _sees_as_parts(place, self.x.size(1), band):
            return None
        return place.reserve(self.x)

    def make_table(self, longest: int) -> Tensor | None:
        """Return the bias of relative positions, (1, H, distances); None if it isn't a table.

        Args:
            longest: the number of tokens, or of the longest packed sequence.
        """
        keys, past = longest, 0
        if self.cache is not None:
            place = self._find_place()
            if place is None:
                return None
            keys, past = place.seen, place.past
        self.bias = _bias(self.attention, self.position_bias, longest, keys, past)
        table = None if self.bias is None else fitting(self.bias.table, self.x.dtype)
        return None if table is None else table[None]


def _result(names: known_names.Names, out: Tensor | None, biases: dict[str, Any]) -> Any:
    """Return what a layer with this output returns; None if there is no output."""
    if out is None or names.returns is None:
        return out
    results = {HIDDEN_STATES: out, **biases}
    return tuple(None if name is None else results[name] for name in names.returns)


class _ToMemory(NamedTuple):
    """The attention of a layer to a memory."""

    attention: Any
    memory: Memory


def _to_memory(
    layer: nn.Module,
    names: known_names.Names,
    x: Tensor,
    cache: Any,
    mask: Any,
    is_causal: bool | None,
) -> _ToMemory | None:
    """The attention of a layer to another sequence, whose keys and values a cache holds.

    Returns:
        None if the layer's parts must compute them, as in the first step, or if they read the mask
        in another way.
    """
    attention = None if names.memory is None else _submodule(layer, names.memory.attention)
    if attention is None:
        return None
    found = caches.memory(cache, attention.layer_idx)
    band = _band(attention, mask, x.size(1), is_causal)
    if found is None or band is None or band.is_causal or band.window >= 0:
        return None
    return _ToMemory(attention, Memory(*found, band.mask))


def _bias(attention: Any, given: Any, queries: int, keys: int, past: int) -> DistanceBias | None:
    """The bias that a layer gets or, if it is the first one, makes, as a table by distance.

    Args:
        attention: the layer's attention.
        given: the bias that the layer gets.
        queries, keys: the numbers of tokens, or those of the longest packed sequence.
        past: the number of tokens before the queries.

    Returns:
        The bias; None if it isn't such a table.
    """
    if given is None and isinstance(attention, own_biases.SharedBias):
        own: Any = attention
        if own.has_relative_attention_bias:
            given = own.compute_bias(queries, keys, past_seen_tokens=past)
    if not isinstance(given, DistanceBias) or not given.is_usable or given.table is None:
        return None
    return given if given.mask is None and given.shape[2:] == (queries, keys) else None


def _heads(
    attention: Any, names: known_names.Names, form: known_attentions.Attention
) -> tuple[int, int]:
    """The numbers of query heads and of key heads of an attention of a known form."""
    head_dim = getattr(attention, form.head_dim)
    first, *others = [
        encoder_layer.out_features(attention._modules[name]) // head_dim
        for name in names.projections
    ]
    if others:
        return first, others[0]
    if form.key_heads is None:
        return first // 3, first // 3
    key_heads = getattr(attention, form.key_heads)
    return first - 2 * key_heads, key_heads


def _rotary(names: known_names.Names, head_dim: int, embeddings: Any) -> Rotary | None:
    """The rotation that a layer gets; None if it doesn't fit the heads, as the parts need it."""
    if not (isinstance(embeddings, tuple) and len(embeddings) == 2):
        return None
    for each in embeddings:
        if not isinstance(each, Tensor) or not each.dim():
            return None
        rest = head_dim - each.size(-1)
        if rest < 0 or (rest and not names.rotates_partly):
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
        form = known_attentions.attention_of(_source(attention))
        if form is not None and not form.dispatches:
            return None  # it would add 0 and 1 to the scores
    read = huggingface.read_mask(mask)
    causal = read.is_causal is not False  # else it is the lower right variant
    return _Band(read.attn_mask, causal, -1 if read.window is None else read.window, causal)


def _is_causal(attention: nn.Module, is_causal: bool | None) -> bool:
    """Whether an attention is causal without a mask. A layer may pass ``is_causal`` on to it."""
    from trifuse import huggingface

    form = known_attentions.attention_of(_source(attention))
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

    names: known_names.Names
    form: known_attentions.Attention
    attention: Any
    network: Any


def _names(layer: Any) -> known_names.Names | None:
    """The names in a layer of a fused class."""
    names: known_names.Names | None = layer._trifuse_names
    return names if names is None else _of_instance(names, layer)


def _of_instance(names: known_names.Names, layer: Any) -> known_names.Names:
    return names if names.decoder is None or not layer.is_decoder else names.decoder


def _classify(layer: nn.Module) -> _Known | None:
    names = known_code.layer_of(_source(layer))
    names = None if names is None else _of_instance(names, layer)
    if names is None:
        return None
    for path in names.holders:
        holder = _submodule(layer, path)
        if holder is None or not known_code.is_holder(_source(holder), names, path):
            return None
    attention, network = _submodule(layer, names.attention), _network(layer, names)
    if attention is None or network is None:
        return None
    form = known_attentions.attention_of(_source(attention))
    found = known_code.with_network(_source(network), names)
    if form is None or found is None or found not in form.of:
        return None
    return _Known(found, form, attention, network)


def _network(layer: nn.Module, names: known_names.Names) -> Any:
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
    wanted = [each._replace(partial=names.rotates_partly) for each in _ROTATIONS]
    if names.rotates and rotation not in wanted:
        return "it doesn't rotate the two halves of each head"
    if names.in_chunks and network.chunk_size_feed_forward:
        return "its network runs on one part of the tokens after another"
    if names.adapter is not None and getattr(layer, names.adapter) is not None:
        return "it has an adapter"
    scale = None if form.scale is None else getattr(attention, form.scale)
    if form.scales_queries and not (isinstance(scale, float) and math.frexp(scale)[0] == 0.5):
        return "its queries are scaled before they are multiplied by keys, by no power of two"
    order = names.norm_first
    norm_first = getattr(layer, order) if isinstance(order, str) else order
    projections = tuple(attention._modules.get(name) for name in names.projections)
    up, down = (_submodule(network, name) for name in (names.up, names.down))
    factor = None if names.factor is None else network._modules.get(names.factor)
    output = attention._modules.get(names.output)
    linears = [*projections, output, up, down]
    if names.factor is not None:
        linears.append(factor)
    if names.memory is not None and (to_memory := _submodule(layer, names.memory.attention)):
        linears += map(to_memory._modules.get, (names.memory.query, names.memory.output))
    if not all(each is not None and (is_frozen(each) or is_plain(each)) for each in linears):
        return encoder_layer.OTHER_LINEARS
    memory = _memory_parts(layer, known)
    function = _submodule(network, names.activation)
    activation = None if function is None else sublayers.name_of(function)
    if activation is None:
        return "no product of ours has its activation"
    first, second = (_submodule(layer, name) for name in names.norms)
    head_norms = tuple(attention._modules.get(name) for name in form.head_norms)
    result_norms = tuple(_submodule(layer, name) for name in names.result_norms)
    normalised = [second, *head_norms, *result_norms]
    normalised += [] if memory is None else [memory.norm]
    if type(first) is nn.Identity and norm_first:  # as in ModernBERT's first layer
        first = None
    else:
        normalised.append(first)
    kind = _norms(normalised)
    if kind is None:
        return "its norms aren't all LayerNorms, or RMSNorms of one form"
    heads, key_heads = _heads(attention, names, form)
    owned = [
        *((attention, name) for name in _numbers(form)),
        (attention, form.key_heads or ""),
        (attention, form.softcap or ""),
        (layer, names.adapter or ""),
        (layer, names.parallel or ""),
        (layer, order if isinstance(order, str) else ""),
        (network, "chunk_size_feed_forward"),
    ]
    if memory is not None:
        assert names.memory is not None
        owned += ((_submodule(layer, names.memory.attention), name) for name in _numbers(form))
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
        scale,
        activation,
        norm_first=norm_first,
        attributes=(
            *((owner, name) for owner, name in owned if name in vars(owner)),
            *((scope, name) for name in _ROTATING if names.rotates),
            *((type(network), name) for name in ("ff_chunk",) if names.in_chunks),
        ),
        factor=factor,
        num_key_heads=key_heads,
        rms_eps=kind.rms_eps,
        norms_from_one=kind.from_one,
        result_norms=result_norms,
        softcap=None if form.softcap is None else getattr(attention, form.softcap),
        parallel=names.parallel is not None and getattr(layer, names.parallel),
        by_head=names.by_head,
        head_norms=head_norms,
        memory=memory,
        rotary_in_float32=rotation is not None and rotation.in_float32,
    )


def _memory_parts(layer: nn.Module, known: _Known) -> encoder_layer.MemoryParts | None:
    """The modules of a layer that attend to a memory; None if it has none, or the op has no such.

    The op attends to tokens and memory with the same heads and the same scale.
    """
    if known.names.memory is None or not known_code.takes_memory(_source(layer)):
        return None
    path, *of_linears, of_norm = known.names.memory
    attention, own, norm = _submodule(layer, path), known.attention, _submodule(layer, of_norm)
    if attention is None or norm is None:
        return None
    query, output = map(attention._modules.get, of_linears)
    if query is None or output is None:
        return None
    form = known_attentions.attention_of(_source(attention), memory=True)
    if form is None or known.names not in form.of or attention.config is not own.config:
        return None
    if (form.scale, form.scales_queries) != (known.form.scale, known.form.scales_queries):
        return None
    if any(getattr(attention, name) != getattr(own, name) for name in _numbers(form)):
        return None
    of_own = encoder_layer.out_features(own._modules[known.names.projections[0]])
    if encoder_layer.out_features(query) != of_own:
        return None
    return encoder_layer.MemoryParts(query, output, norm)


def _numbers(form: known_attentions.Attention) -> tuple[str, ...]:
    """The attributes of an attention with numbers that the op gets."""
    return (form.head_dim,) if form.scale is None else (form.head_dim, form.scale)


_ROTATING = ("apply_rotary_pos_emb", "rotate_half")  # the functions that rotate


def _submodule(layer: nn.Module, path: str) -> Any:
    """The module at a path; None if there is none, for example because a function replaced it."""
    found: nn.Module | None = layer
    for name in path.split("."):
        found = None if found is None else found._modules.get(name)
    return found


class _Norms(NamedTuple):
    """The properties that all norms of a layer share."""

    rms_eps: str | None  # the attribute with the epsilon of RMSNorms; None for LayerNorms
    from_one: bool = False  # whether 1 is added to their weights


def _norms(each: list[Any]) -> _Norms | None:
    """Return what norms share; None if they are of several kinds, or of one that the op lacks."""
    if all(type(norm) in LAYER_NORMS for norm in each):
        return _Norms(None)
    if not all(isinstance(norm, norms.FusedNorm) for norm in each):
        return None
    forms = {norm._trifuse_form for norm in each}
    if any(form.centered or form.switch or form.parameters != ("weight",) for form in forms):
        return None
    kinds = {(form.eps, form.from_one) for form in forms}
    eps, from_one = kinds.pop()
    return None if kinds or not isinstance(eps, str) else _Norms(eps, from_one)


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
