"""The arguments by which transformers' models pass a mask, a memory or a bias to their layers."""

from __future__ import annotations

import inspect
from typing import NamedTuple

from torch import nn

from trifuse.recipes import sublayers

# Arguments that are None wherever tokens are packed: :mod:`trifuse.recipes.passes` sees to it.
ABSENT = frozenset({
    "cache", "cross_attn_layer_head_mask", "encoder_attention_mask",
    "encoder_decoder_position_bias", "encoder_hidden_states", "head_mask", "key_value_states",
    "layer_head_mask", "past_key_value", "past_key_values", "position_bias", "query_states",
})  # fmt: skip
# Arguments that are false there: the caller wants nothing but the result.
WISHES = frozenset({"output_attentions", "output_hidden_states"})
CACHES = ("cache", "past_key_value", "past_key_values")
MASK = "attention_mask"  # the argument in whose place packed sequences come
MEMORY, MEMORY_MASK = "encoder_hidden_states", "encoder_attention_mask"  # of a decoder's layers
BIAS, MEMORY_BIAS = "position_bias", "encoder_decoder_position_bias"  # (B or 1, H, L, L or S)
ROTARY = "sinusoidal_pos"  # (B or 1, H or 1, L, E): what queries and keys are turned by

# Of DeBERTa: the bucket of each pair of positions, (1, L, L), and the embeddings of the buckets.
RELATIVE, RELATIVE_EMBEDDINGS = "relative_pos", "rel_embeddings"

PLACES = "cache_position"  # (L,): the places in the padded sequences, for a cache
LANGUAGES = "lang_ids"  # (B,): the number of each sequence's language


class Arguments(NamedTuple):
    """The names of the arguments of a class's ``forward``."""

    positional: list[str]
    named: set[str]  # positional ones too


_arguments: dict[type, Arguments] = {}


def of(module: nn.Module) -> Arguments:
    """Return the names of the arguments that a module takes."""
    cls = sublayers.original(type(module))
    if cls not in _arguments:
        parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        _arguments[cls] = Arguments(
            [parameter.name for parameter in parameters if parameter.kind in positional],
            {parameter.name for parameter in parameters},
        )
    return _arguments[cls]
