"""Layers of transformers whose code is known, which run as one op in inference.

transformers copies Llama's decoder layer, with small changes, into many families: Mistral, Qwen2,
Qwen3 with its norms of heads, OLMo 2 with those of all heads at once, Phi-3 with joint projections,
Cohere with both sublayers side by side, Granite, which multiplies their results by a number.
ModernBERT's encoder layer has the same parts. The layers of GPT-2 and OPT, DistilBERT and ALBERT,
CLIP, SigLIP and ViT, wav2vec2, BART, mBART and Whisper, which many models have, rotate nothing. A
decoder's layer attends to an encoder's states inside the op if a cache holds their keys and values.
A layer is recognised if the statements of its ``forward``, of those of its attention and its
network, and of the function that rotates queries and keys, are those of one of these families, in
any known version.

RemBERT's layer, MegatronBERT's and ESM's have the network in a method. DINOv2's and BEiT's multiply
the results of their sublayers by vectors. BLOOM and MPT give their layers ALiBi
(:mod:`trifuse.recipes.known_alibi`).

MPNet's layers, and those of T5's encoder, share a bias of relative positions, which the op takes
as a table (:mod:`trifuse.recipes.own_biases`). While a model decodes, the op appends to the cache
in place (:mod:`trifuse.recipes.caches`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
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
    known_alibi,
    known_attentions,
    known_code,
    known_names,
    known_statements,
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
    alibi: Any = None,
    **kwargs: Any,
) -> Any:
    """Return a layer's result; None if it must call its parts."""
    if torch.is_grad_enabled() and x.requires_grad:
        return None
    names = _names(layer)
    if names is None:
        return None
    kwargs = {name: value for name, value in kwargs.items() if name not in names.unused}
    if not arguments.are_plain((), kwargs):
        return None
    # The names of the cache in the versions of transformers, and in their families.
    given = [each for each in (cache, past_key_values, layer_past) if each is not None]
    if len(given) > 1:
        return None
    cache = given[0] if given else None
    attention = _submodule(layer, names.attention)
    form = known_attentions.attention_of(_source(attention))
    if form is None:
        return None
    if (position_embeddings is not None) != names.rotates:
        return None
    rotates = names.rotates if form.rotates is None else form.rotates(attention)
    rotary = _rotary(names, attention, form, x, position_embeddings) if rotates else None
    if (rotary is None) == rotates:
        return None
    if cache is not None and not names.takes_cache:
        return None
    network = _network(layer, names)
    if names.in_chunks and (network is None or names.chunk in vars(network)):
        return None
    if names.alibi == "mpt":
        alibi, position_bias = position_bias, None
    if position_bias is not None and not names.takes_bias:
        return None
    if (alibi is None) == (names.alibi is not None):
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
    scores = call.scores(mask, alibi, is_causal, alone=cache is None and to_memory is None)
    if scores is None:
        return None
    out = encoder_layer.run(
        layer,
        x,
        scores.mask,
        _describe,
        scores.band.is_causal,
        reserve=None if cache is None else functools.partial(call.reserve, scores.band),
        rotary=rotary,
        window=scores.band.window,
        relative_bias=scores.relative_bias,
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

    def scores(self, mask: Any, alibi: Any, is_causal: bool | None, alone: bool) -> _Scores | None:
        """Return which scores the attention computes; None if the op can't.

        Args:
            mask, alibi, is_causal: as the layer got them.
            alone: whether the layer got neither a cache nor a memory.
        """
        attention, names, x = self.attention, self.names, self.x
        if names.alibi is not None:
            assert self.form.scale is not None
            place = None if self.cache is None else self._find_place()
            if place is None and self.cache is not None:
                return None
            keys = x.size(1) if place is None else place.seen
            heads, _ = _heads(attention, names, self.form)
            scale = getattr(attention, self.form.scale)
            terms = known_alibi.terms(names.alibi, x, keys, heads, scale, mask, alibi)
            if terms is None:
                return None
            return _Scores(terms.mask, _Band(terms.mask), terms.make_table)
        band: _Band | None
        seen: Tensor | PackedSequences | None
        if isinstance(mask, PackedSequences):
            if not alone:
                return None
            causal = _is_causal(attention, is_causal) if mask.causal is None else mask.causal
            seen, band, longest = mask, _Band(None, causal), mask.max_seqlen
        else:
            band, longest = _band(attention, mask, x.size(1), is_causal), x.size(1)
            if band is None:
                return None
            seen = band.mask
        make_table = functools.partial(self.make_table, longest) if names.takes_bias else None
        return _Scores(seen, band, make_table)

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
    if names.memory is None or attention is None:
        return None
    found = caches.memory(cache, attention.layer_idx)
    band = _band(attention, mask, x.size(1), is_causal if names.memory.takes_options else None)
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


def _rotary(
    names: known_names.Names,
    attention: Any,
    form: known_attentions.Attention,
    x: Tensor,
    embeddings: Any,
) -> Rotary | None:
    """The rotation that a layer gets; None if it doesn't fit the heads, as the parts need it."""
    rotation = _rotation(attention)
    if rotation is None or not (isinstance(embeddings, tuple) and len(embeddings) == 2):
        return None
    features = getattr(attention, form.head_dim)  # of a head, that the rotation gets
    if form.rotary_dim is not None and getattr(attention, form.rotary_dim) is not None:
        features = getattr(attention, form.rotary_dim)
    for each in embeddings:
        if not isinstance(each, Tensor) or each.dim() != (2 if names.rotates_last else 3):
            return None
        if each.dtype != x.dtype and not rotation.keeps_dtype:
            return None
        if not names.rotates_last and each.size(1) != x.size(1):
            return None
        rest = features - each.size(-1) * (1 if rotation.repeated else 2)
        if rest < 0 or (rest and not rotation.partial):
            return None
    if names.rotates_last:
        embeddings = tuple([each[None] for each in embeddings])
    if rotation.per_pair and rotation.repeated:
        embeddings = tuple([each[..., : each.size(-1) // 2] for each in embeddings])
    return Rotary(*(reversed(embeddings) if rotation.sine_first else embeddings))


def _rotation(attention: nn.Module) -> rotary_functions.Rotation | None:
    """Return the rotation of an attention's queries and keys; None if its function isn't known."""
    scope = rotary_functions.scope_of(_source(attention).forward)
    return rotary_functions.rotation_of(scope.get(_ROTATING[0]))


class _Band(NamedTuple):
    """A mask of transformers as the op takes it."""

    mask: Tensor | None
    is_causal: bool = False
    window: int = -1  # no bound
    lower_right: bool = False  # whether the last query is aligned with the last key


class _Scores(NamedTuple):
    """The scores that an attention computes, as :func:`encoder_layer.run` takes them."""

    mask: Tensor | PackedSequences | None
    band: _Band
    relative_bias: Callable[[], Tensor | None] | None


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


_Memory = encoder_layer.MemoryParts | None


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
    attention, network = _submodule(layer, names.attention), _network(layer, names)
    if attention is None or network is None:
        return None
    form = known_attentions.attention_of(_source(attention))
    found = known_code.with_network(_source(network), names)
    if form is None or found is None or found not in form.of:
        return None
    for name, text in form.methods:
        own = name in vars(attention)
        if own or known_statements.of_class(_source(attention), name) != text:
            return None
    for path in found.holders:
        holder = _submodule(layer, path)
        if holder is None or not known_code.is_holder(_source(holder), found, path):
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


_Places = list[tuple[Any, str]]  # as encoder_layer.Parts.attributes


class _Described(NamedTuple):
    """The description of one side of a layer."""

    fields: dict[str, Any]  # of encoder_layer.Parts
    attributes: _Places  # that it depends on


def _describe(layer: nn.Module) -> encoder_layer.Parts | str:
    """Return what a layer of a known form consists of, or why the op can't compute it."""
    known = _classify(layer)
    if known is None:
        return "the code of a part of it isn't known"
    memory = _memory_parts(layer, known)
    fields: dict[str, Any] = {}
    attributes: _Places = []
    for describe in (
        _describe_required,
        _describe_attention,
        _describe_memory,
        _describe_network,
        _describe_sums,
        _describe_norms,
    ):
        described = describe(layer, known, memory)
        if isinstance(described, str):
            return described
        fields |= described.fields
        attributes += described.attributes
    return encoder_layer.Parts(**fields, attributes=tuple(attributes))


def _describe_required(layer: nn.Module, known: _Known, memory: _Memory) -> _Described | str:
    """The attributes that must have certain values, or that must be missing."""
    names = known.names
    if names.adapter is not None and getattr(layer, names.adapter) is not None:
        return "it has an adapter"
    required = [(*_attribute(layer, path), value) for path, value in names.required]
    for owner, name, value in required:
        if getattr(owner, name) != value:
            return f"its {name} isn't {value}"
    places = [(owner, name) for owner, name, _ in required]
    return _Described({}, _own((layer, names.adapter or ""), *places))


def _describe_attention(layer: nn.Module, known: _Known, memory: _Memory) -> _Described | str:
    names, form, attention, _ = known
    if form.dispatches and attention.config._attn_implementation != NAME:
        chosen = attention.config._attn_implementation
        return f'its attention runs by attn_implementation="{chosen}"'
    rotation = _rotation(attention) if names.rotates else None
    if names.rotates and not _has(rotation, names, form):
        return "the op lacks the rotation of its queries and keys"
    scale = None if form.scale is None else getattr(attention, form.scale)
    if form.scales_queries and scale is None:
        scale = getattr(attention, form.head_dim) ** -0.5
    if form.scales_queries and not (isinstance(scale, float) and math.frexp(scale)[0] == 0.5):
        return "its queries are scaled before they are multiplied by keys, by no power of two"
    projections = tuple(attention._modules.get(name) for name in names.projections)
    output = _submodule(layer if names.outer_output else attention, names.output)
    if not _are_ours(*projections, output):
        return encoder_layer.OTHER_LINEARS
    heads, key_heads = _heads(attention, names, form)
    scope = rotary_functions.scope_of(_source(attention).forward)  # holds the rotation
    attributes = [
        *_own(*((attention, name) for name in _numbers(form))),
        *_own((attention, form.key_heads or ""), (attention, form.softcap or "")),
        *((scope, name) for name in _ROTATING if names.rotates and name in scope),
        *((owner, name) for owner in (attention, type(attention)) for name, _ in form.methods),
    ]
    if form.dispatches:
        config = attention.config
        attributes += _own((attention, "config"), (config, "_attn_implementation_internal"))
    fields = {
        "projections": projections,
        "output": output,
        "num_heads": heads,
        "num_key_heads": key_heads,
        "scale": scale,
        "softcap": None if form.softcap is None else getattr(attention, form.softcap),
        "by_head": names.by_head,
        "rotary_in_float32": rotation is not None and rotation.in_float32,
        "rotary_interleaved": rotation is not None and rotation.interleaved,
        "rotary_per_pair": rotation is not None and rotation.per_pair,
    }
    return _Described(fields, attributes)


def _describe_memory(layer: nn.Module, known: _Known, memory: _Memory) -> _Described | str:
    """The attention to a memory; a layer without one is described, too."""
    names = known.names.memory
    attention = None if names is None else _submodule(layer, names.attention)
    if names is None or attention is None:
        return _Described({}, [])
    if not _are_ours(*map(attention._modules.get, (names.query, names.output))):
        return encoder_layer.OTHER_LINEARS
    places = [] if memory is None else [(attention, name) for name in _numbers(known.form)]
    return _Described({"memory": memory}, _own(*places))


def _describe_network(layer: nn.Module, known: _Known, memory: _Memory) -> _Described | str:
    from trifuse.recipes import activations  # needs transformers

    names, network = known.names, known.network
    chunking = sublayers.chunking_of(_source(layer), _source(network))
    if chunking is None:
        return "the code of the function that calls its network isn't known"
    if names.in_chunks and network.chunk_size_feed_forward:
        return "its network runs on one part of the tokens after another"
    up, down = (_submodule(network, name) for name in (names.up, names.down))
    factor = None if names.factor is None else network._modules.get(names.factor)
    if not _are_ours(up, down, *([] if names.factor is None else [factor])):
        return encoder_layer.OTHER_LINEARS
    place = _function(layer, names)
    function = _submodule(network, names.activation) if place is None else place[0].get(place[1])
    activation = None if function is None else sublayers.name_of(function)
    if activation is None:
        return "no product of ours has its activation"
    attributes = [
        *_own((network, "chunk_size_feed_forward")),
        *([] if place is None else [place]),
        *activations.depends_on(function),
        *chunking,
        *((type(network), name) for name in (names.chunk,) if names.in_chunks),
    ]
    fields = {"up": up, "down": down, "factor": factor, "activation": activation}
    return _Described(fields, attributes)


def _describe_sums(layer: nn.Module, known: _Known, memory: _Memory) -> _Described | str:
    """Describe how the sublayers' results are changed, and in which order they are added."""
    names = known.names
    if names.drop_path is not None and not _only_drops(_submodule(layer, names.drop_path)):
        return "the code of the module that drops its samples isn't known"
    parts = known.attention, known.network
    scopes = [rotary_functions.scope_of(_source(each).forward) for each in parts]
    if names.adds is not None and not all(
        known_code.only_adds(each.get(names.adds)) for each in scopes
    ):
        return "the code of the function that adds its results isn't known"
    factors = [_attribute(layer, path) for path in names.factors]
    if any(not _is_vector_or_one(*each) for each in factors):
        return "its results are multiplied by something else than a vector that is a parameter"
    paths = [*names.dropouts]
    if memory is not None and names.memory is not None and names.memory.dropout:
        paths.append(names.memory.dropout)
    dropouts = [_submodule(layer, path) for path in paths]
    parallel = _option(layer, names.parallel)
    numbers = ((owner, name) for owner, name in factors if name not in owner._parameters)
    attributes = [
        *_own((layer, names.result_scale or ""), _place(layer, names.parallel), *numbers),
        *((each, names.adds) for each in scopes if names.adds is not None),
    ]
    fields = {
        "dropouts": tuple(each for each in dropouts if type(each) is not nn.Identity),
        "factors": tuple(each if each[1] in each[0]._parameters else None for each in factors),
        "parallel": parallel,
        "residual_first": parallel and names.residual_first,
        "result_scale": 1.0 if names.result_scale is None else getattr(layer, names.result_scale),
    }
    return _Described(fields, attributes)


def _describe_norms(layer: nn.Module, known: _Known, memory: _Memory) -> _Described | str:
    names, form, attention, _ = known
    norm_first = _option(layer, names.norm_first)
    first, second = (_submodule(layer, name) for name in names.norms)
    has_head_norms = form.head_norms_if is None or getattr(attention, form.head_norms_if)
    head_norms = tuple(attention._modules.get(name) for name in form.head_norms if has_head_norms)
    result_norms = tuple(_submodule(layer, name) for name in names.result_norms)
    present = [*head_norms, *result_norms]
    present += [] if memory is None else [memory.norm]
    if _option(layer, names.parallel) and names.norm_if_serial:
        second = None
    elif names.norms[1]:
        present.append(second)
    if type(first) is nn.Identity and norm_first:  # as in ModernBERT's first layer
        first = None
    elif names.norms[0]:
        present.append(first)
    kind = _norms(present)
    if kind is None:
        return "its norms aren't all LayerNorms, or RMSNorms of one form"
    fields = {
        "norms": (first, second),
        "norm_first": norm_first,
        "own_eps": kind.own_eps,
        "centered": kind.centered,
        "norms_from_one": kind.from_one,
        "head_norms": head_norms,
        "heads_normed_together": form.heads_normed_together,
        "result_norms": result_norms,
    }
    places = (attention, form.head_norms_if or ""), _place(layer, names.norm_first)
    return _Described(fields, _own(*places))


def _own(*places: tuple[Any, str]) -> _Places:
    """The places that hold an attribute of the object itself."""
    return [(owner, name) for owner, name in places if name in vars(owner)]


def _option(layer: nn.Module, option: str | bool) -> bool:
    """The value of an option, which may be the name of a layer's attribute."""
    return bool(getattr(layer, option)) if isinstance(option, str) else option


def _place(layer: nn.Module, option: str | bool) -> tuple[nn.Module, str]:
    """Where the value of an option is; the name is "" if it is no attribute."""
    return layer, option if isinstance(option, str) else ""


def _are_ours(*linears: Any) -> bool:
    """Whether modules are linear layers on our product."""
    return all(each is not None and (is_frozen(each) or is_plain(each)) for each in linears)


def _memory_parts(layer: nn.Module, known: _Known) -> _Memory:
    """The modules of a layer that attend to a memory; None if it has none, or the op has no such.

    The op attends to tokens and memory with the same heads and the same scale.
    """
    if known.names.memory is None or not known_code.takes_memory(_source(layer)):
        return None
    names, own = known.names.memory, known.attention
    attention, norm = _submodule(layer, names.attention), _submodule(layer, names.norm)
    if attention is None or norm is None:
        return None
    query, output = map(attention._modules.get, (names.query, names.output))
    if query is None or output is None:
        return None
    form = known_attentions.attention_of(_source(attention), memory=True)
    if form is None or known.names not in form.of or attention.config is not own.config:
        return None
    if (form.scale, form.scales_queries) != (known.form.scale, known.form.scales_queries):
        return None
    if any(getattr(attention, name) != getattr(own, name) for name in _numbers(form)):
        return None
    heads, _ = _heads(own, known.names, known.form)
    if encoder_layer.out_features(query) != heads * getattr(own, known.form.head_dim):
        return None
    return encoder_layer.MemoryParts(query, output, norm)


def _numbers(form: known_attentions.Attention) -> tuple[str, ...]:
    """The attributes of an attention with numbers that the op gets."""
    return (form.head_dim,) if form.scale is None else (form.head_dim, form.scale)


def _has(
    rotation: rotary_functions.Rotation | None,
    names: known_names.Names,
    form: known_attentions.Attention,
) -> bool:
    """Whether the op has the rotation that an attention of this form calls."""
    if rotation is None or rotation.last != names.rotates_last:
        return False
    wanted = (form.rotated_at_once, form.head_dimension)
    return (rotation.tensors, rotation.unsqueeze_dim) == wanted


# The functions that rotate, the first by the others.
_ROTATING = ("apply_rotary_pos_emb", "rotate_half", "rotate_every_two", "_apply_rotary_emb")


def _submodule(layer: nn.Module, path: str) -> Any:
    """The module at a path; None if there is none, for example because a function replaced it."""
    found: nn.Module | None = layer
    for name in path.split("."):
        found = None if found is None else found._modules.get(name)
    return found


def _attribute(layer: nn.Module, path: str) -> tuple[Any, str]:
    """The module that has the attribute at a path, and the attribute's name."""
    holder, _, name = path.rpartition(".")
    return _submodule(layer, holder) if holder else layer, name


def _only_drops(module: nn.Module | None) -> bool:
    """Whether a module drops whole samples in training, and does nothing in evaluation."""
    if module is None:
        return False
    return type(module) is nn.Identity or known_code.drops_samples(_source(module))


def _function(layer: nn.Module, names: known_names.Names) -> tuple[dict[str, Any], str] | None:
    """The scope that holds a layer's activation, if that is a function, and its name there."""
    module = None if names.activates is None else _submodule(layer, names.activates)
    if module is None:
        return None
    return rotary_functions.scope_of(_source(module).forward), names.activation


def _is_vector_or_one(owner: nn.Module, name: str) -> bool:
    """Whether a factor is a parameter with one dimension, or the number 1."""
    factor = getattr(owner, name)
    if isinstance(factor, Tensor):
        return name in owner._parameters and factor.dim() == 1
    return bool(factor == 1)


class _Norms(NamedTuple):
    """The properties that all norms of a layer share."""

    own_eps: str | None  # as in encoder_layer.Parts
    from_one: bool = False  # whether 1 is added to their weights
    centered: bool = False  # whether they subtract the mean, as LayerNorms do


def _norms(each: list[Any]) -> _Norms | None:
    """Return what norms share; None if they are of several kinds, or of one that the op lacks."""
    if all(type(norm) in LAYER_NORMS for norm in each):
        return _Norms(None)
    if not all(isinstance(norm, norms.FusedNorm) for norm in each):
        return None
    forms = {norm._trifuse_form for norm in each}
    if any(form.switch or form.parameters != ("weight",) for form in forms):
        return None
    kinds = {(form.eps, form.from_one, form.centered) for form in forms}
    eps, from_one, centered = kinds.pop()
    return None if kinds or not isinstance(eps, str) else _Norms(eps, from_one, centered)


def one_op_class(source: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of a layer's class that can run as one op."""
    if source not in _classes:
        origin = sublayers.origin_of(source, (one_op_class, (source,)))
        names = known_code.layer_of(sublayers.original(source))
        _classes[source] = sublayers.subclass(OneKnownOp, origin, {"_trifuse_names": names})
    return _classes[source]


_classes: dict[type[nn.Module], type[nn.Module]] = {}
