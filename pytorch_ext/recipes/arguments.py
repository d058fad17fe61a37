"""The arguments with which transformers' models pass a mask, memory or bias to their layers."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from torch import nn

from trifuse.recipes import sublayers

# Arguments that are None wherever tokens are packed; :mod:`trifuse.recipes.passes` ensures it.
ABSENT = frozenset({
    "cache", "causal_attention_mask", "cross_attn_layer_head_mask", "encoder_attention_mask",
    "encoder_decoder_position_bias", "encoder_hidden_states", "head_mask", "key_value_states",
    "layer_head_mask", "layer_past", "past_key_value", "past_key_values", "position_bias",
    "query_states",
})  # fmt: skip
# Arguments that are false there, because the caller requests only the result.
WISHES = frozenset({"output_attentions", "output_hidden_states", "output_router_logits"})
CACHES = ("cache", "layer_past", "past_key_value", "past_key_values")
HIDDEN_STATES = "hidden_states"  # the first argument of layers, where it has this name
MASK = "attention_mask"  # packed sequences are passed as this argument
SHORT_MASK = "attn_mask"  # its name in DistilBERT of transformers 4.57
# Masks that some layers of transformers 4.57 get beside it: that of ModernBERT's windows, and the
# causal mask of CLIP's text model, which does not hold the padding.
WINDOW_MASK, CAUSAL_MASK = "sliding_window_mask", "causal_attention_mask"
MEMORY, MEMORY_MASK = "encoder_hidden_states", "encoder_attention_mask"  # of a decoder's layers
BIAS, MEMORY_BIAS = "position_bias", "encoder_decoder_position_bias"  # (B or 1, H, L, L or S)
ROTARY = "sinusoidal_pos"  # (B or 1, H or 1, L, E): the rotation of queries and keys

# DeBERTa's arguments: the bucket of each pair of positions, (1, L, L), and the buckets' embeddings.
RELATIVE, RELATIVE_EMBEDDINGS = "relative_pos", "rel_embeddings"

# Arguments of a model that change nothing in its layers, because they concern the code around the
# layers, or because the mask and the rotation already include them. Models pass them on to all
# layers.
OF_MODELS = frozenset({
    "cache_position", "inputs_embeds", "labels", "logits_to_keep", "num_items_in_batch",
    "output_hidden_states", "output_router_logits", "position_ids", "return_dict", "return_loss",
    "special_tokens_mask", "token_type_ids", "use_cache",
})  # fmt: skip

PLACES = "cache_position"  # (L,): the places in the padded sequences, for a cache
SHARED = "shared_kv_states"  # keys and values, by the kind of layer, that later layers read
POSITIONS = "position_ids"  # (B or 1, L): the position of each token
LANGUAGES = "lang_ids"  # (B,): the number of each sequence's language


def are_plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether further arguments of a layer, or of all layers, do not change what it computes."""
    for value in args:
        if value is not None:
            return False
    for name, value in kwargs.items():
        if value is None or name in OF_MODELS:
            continue
        # An option that is turned off. False for `is_causal` changes the attention, though.
        if value is not False or name == "is_causal":
            return False
    return True


class Arguments(NamedTuple):
    """The names of the arguments of a class's ``forward``."""

    positional: list[str]
    named: set[str]  # including positional ones
    takes_more: bool  # whether it takes arguments of any other name

    @property
    def mask(self) -> str:
        """The name of the mask."""
        return SHORT_MASK if SHORT_MASK in self.named and MASK not in self.named else MASK


def by_name(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """Return all arguments of a call by name; None if they don't fit the module's ``forward``.

    Classes with the same statements may have their arguments in another order.
    """
    given = dict(zip(of(module).positional, args, strict=False)) | kwargs
    return given if len(given) == len(args) + len(kwargs) else None


# Keyed by the method that was read, because the method of a class may be replaced.
_arguments: dict[Any, Arguments] = {}


def of(module: nn.Module) -> Arguments:
    """Return the names of the arguments that a module takes."""
    forward: Any = sublayers.original(type(module)).forward
    if forward not in _arguments:
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        _arguments[forward] = Arguments(
            [parameter.name for parameter in parameters if parameter.kind in positional],
            {parameter.name for parameter in parameters},
            any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters),
        )
    return _arguments[forward]
