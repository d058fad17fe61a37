"""The code of layers that run as one op: see :mod:`trifuse.recipes.known_layers`.

Each form is written as transformers writes it, without comments and annotations. Forms of several
families and versions that differ in a few places are made from one text.
"""

from __future__ import annotations

import itertools
from typing import Any

from trifuse.recipes import known_statements
from trifuse.recipes.known_names import (
    ALBERTS,
    BARTS,
    CLIPS,
    DISTILBERTS,
    GATED_T5_DECODERS,
    GATED_T5S,
    GEMMAS,
    GPT2S,
    LLAMAS,
    MBARTS,
    MODERN_BERTS,
    MPNETS,
    NEOXS,
    OPTS,
    PHI3S,
    STABLE_WAV2VEC2S,
    T5_DECODERS,
    T5S,
    VITS,
    WAV2VEC2S,
    Names,
)
from trifuse.recipes.known_statements import normal


def layer_of(cls: Any) -> Names | None:
    """The names in a layer whose class has a known ``forward``; None for others.

    Whether the layer may also get a memory says :func:`takes_memory`.
    """
    return _LAYERS.get(known_statements.of_class(cls))


def takes_memory(cls: Any) -> bool:
    """Whether the code of a layer's class is known for calls with another sequence's states."""
    return known_statements.of_class(cls, memory=True) in _LAYERS_WITH_MEMORY


def with_network(cls: Any, names: Names) -> Names | None:
    """The names in a layer whose network has a class; None if its code isn't known.

    Args:
        cls: the network's class; the layer's if the layer itself holds the network.
        names: those that :func:`layer_of` returned.
    """
    if not names.network and not names.in_chunks:
        return names
    methods = ("forward", "ff_chunk") if names.in_chunks else ("forward",)
    return _NETWORKS.get(known_statements.of_class(cls, *methods), {}).get(names)


def is_holder(cls: Any, names: Names, path: str) -> bool:
    """Whether a class has the known code of the module at ``path``, one of ``names.holders``."""
    return known_statements.of_class(cls) == _HOLDERS[names, path]


# Llama's, Gemma's and CLIP's layers have this code.
_PRE_NORM_LAYER = """
residual = hidden_states
hidden_states = self.{names.norms[0]}(hidden_states)
hidden_states, _ = self.{names.attention}(
    hidden_states=hidden_states,
    attention_mask=attention_mask,
    {more}
    **kwargs,
)
{results[0]}
hidden_states = residual + hidden_states
residual = hidden_states
hidden_states = self.{names.norms[1]}(hidden_states)
hidden_states = self.{names.network}(hidden_states)
{results[1]}
hidden_states = residual + hidden_states
return hidden_states
"""
_LLAMAS_ARGUMENTS = """
    position_ids=position_ids,
    cache=cache,
    use_cache=use_cache,
    position_embeddings=position_embeddings,
"""
_GEMMAS_ARGUMENTS = """
    position_ids=position_ids, cache=cache, position_embeddings=position_embeddings,
"""
_MODERN_BERTS_LAYER = """
attn_output, _ = self.attn(
    self.attn_norm(hidden_states),
    position_embeddings=position_embeddings,
    attention_mask=attention_mask,
    **kwargs,
)
hidden_states = hidden_states + attn_output
hidden_states = hidden_states + self.mlp(self.mlp_norm(hidden_states))
return hidden_states
"""
_VITS_LAYER = """
residual = hidden_states
hidden_states = self.layernorm_before(hidden_states)
hidden_states, _ = self.attention(hidden_states, attention_mask, **kwargs)
hidden_states = self.dropout(hidden_states)
hidden_states = hidden_states + residual
residual = hidden_states
hidden_states = self.layernorm_after(hidden_states)
hidden_states = self.mlp(hidden_states)
hidden_states = self.dropout(hidden_states)
hidden_states = hidden_states + residual
return hidden_states
"""
_DISTILBERTS_LAYER = """
attention_output, _ = self.attention(hidden_states, attention_mask=attention_mask, **kwargs)
attention_output = self.sa_layer_norm(attention_output + hidden_states)
ffn_output = self.ffn(attention_output)
ffn_output = self.output_layer_norm(ffn_output + attention_output)
return ffn_output
"""
_GPT2S_LAYER = """
residual = hidden_states
hidden_states = self.ln_1(hidden_states)
attn_output, _ = self.attn(
    hidden_states, cache=cache, attention_mask=attention_mask, use_cache=use_cache, **kwargs
)
hidden_states = attn_output + residual
residual = hidden_states
hidden_states = self.ln_2(hidden_states)
feed_forward_hidden_states = self.mlp(hidden_states)
hidden_states = residual + feed_forward_hidden_states
return hidden_states
"""
_ALBERTS_LAYER = """
attention_output, _ = self.attention(hidden_states, attention_mask, **kwargs)
ffn_output = apply_chunking_to_forward(
    self.ff_chunk, self.chunk_size_feed_forward, self.seq_len_dim, attention_output
)
hidden_states = self.full_layer_layer_norm(ffn_output + attention_output)
return hidden_states
"""
_MPNETS_LAYER = """
self_attention_outputs = self.attention(
    hidden_states,
    attention_mask,
    position_bias=position_bias,
    output_attentions=output_attentions,
)
attention_output = self_attention_outputs[0]
outputs = self_attention_outputs[1:]
intermediate_output = self.intermediate(attention_output)
layer_output = self.output(intermediate_output, attention_output)
outputs = (layer_output,) + outputs
return outputs
"""
_T5S_LAYER = """
hidden_states, self_attn_position_bias, _ = self.layer[0](
    hidden_states,
    attention_mask=attention_mask,
    position_bias=position_bias,
    cache=cache,
    **kwargs,
)
cross_attn_position_bias = None
{memory}
hidden_states = self.layer[-1](hidden_states)
return hidden_states, self_attn_position_bias, cross_attn_position_bias
"""
# BART's layers, and those of its relatives, hold the two products of their network themselves.
_BARTS_LAYER = """
residual = hidden_states
hidden_states, _ = self.self_attn({states}, attention_mask=attention_mask, {more} **kwargs)
hidden_states = residual + hidden_states
hidden_states = self.self_attn_layer_norm(hidden_states)
{memory}
residual = hidden_states
{activated}
hidden_states = self.fc2(hidden_states)
hidden_states = residual + hidden_states
hidden_states = self.final_layer_norm(hidden_states)
return hidden_states
"""
_MBARTS_LAYER = """
residual = hidden_states
hidden_states = self.self_attn_layer_norm(hidden_states)
hidden_states, _ = self.self_attn({states}, attention_mask=attention_mask, {more} **kwargs)
hidden_states = residual + hidden_states
{memory}
residual = hidden_states
hidden_states = self.final_layer_norm(hidden_states)
{activated}
hidden_states = self.fc2(hidden_states)
hidden_states = residual + hidden_states
return hidden_states
"""
_T5S_MEMORY_SUBLAYER = """
do_cross_attention = self.is_decoder
if do_cross_attention:
    hidden_states, cross_attn_position_bias, _ = self.layer[1](
        hidden_states,
        key_value_states=encoder_hidden_states,
        attention_mask=encoder_attention_mask,
        position_bias=encoder_decoder_position_bias,
        cache=cache,
        **kwargs,
    )
"""
_MEMORY_ATTENTION = """
hidden_states, _ = self.encoder_attn(
    {states},
    key_value_states=encoder_hidden_states,
    attention_mask=encoder_attention_mask,
    cache=cache,
    **kwargs,
)
hidden_states = residual + hidden_states
"""
_BARTS_MEMORY_SUBLAYER = f"""
residual = hidden_states
{_MEMORY_ATTENTION}
hidden_states = self.encoder_attn_layer_norm(hidden_states)
"""
_MBARTS_MEMORY_SUBLAYER = f"""
residual = hidden_states
hidden_states = self.encoder_attn_layer_norm(hidden_states)
{_MEMORY_ATTENTION}
"""
_ACTIVATED = (
    "hidden_states = self.activation_fn(self.fc1(hidden_states))",
    "hidden_states = self.fc1(hidden_states)\nhidden_states = self.activation_fn(hidden_states)",
)
_OPTS_LAYER = """
residual = hidden_states
if self.do_layer_norm_before:
    hidden_states = self.self_attn_layer_norm(hidden_states)
hidden_states, _ = self.self_attn(
    hidden_states=hidden_states,
    cache=cache,
    position_ids=position_ids,
    attention_mask=attention_mask,
    **kwargs,
)
hidden_states = residual + hidden_states
if not self.do_layer_norm_before:
    hidden_states = self.self_attn_layer_norm(hidden_states)
hidden_states_shape = hidden_states.shape
hidden_states = hidden_states.reshape(-1, hidden_states.size(-1))
residual = hidden_states
if self.do_layer_norm_before:
    hidden_states = self.final_layer_norm(hidden_states)
hidden_states = self.fc1(hidden_states)
hidden_states = self.activation_fn(hidden_states)
hidden_states = self.fc2(hidden_states)
hidden_states = (residual + hidden_states).view(hidden_states_shape)
if not self.do_layer_norm_before:
    hidden_states = self.final_layer_norm(hidden_states)
return hidden_states
"""
_WAV2VEC2S_LAYER = """
attn_residual = hidden_states
hidden_states, _ = self.attention(hidden_states, attention_mask=attention_mask, **kwargs)
hidden_states = self.dropout(hidden_states)
hidden_states = attn_residual + hidden_states
hidden_states = self.layer_norm(hidden_states)
hidden_states = hidden_states + self.feed_forward(hidden_states)
hidden_states = self.final_layer_norm(hidden_states)
return hidden_states
"""
_STABLE_WAV2VEC2S_LAYER = """
attn_residual = hidden_states
hidden_states = self.layer_norm(hidden_states)
hidden_states, _ = self.attention(hidden_states, attention_mask=attention_mask, **kwargs)
hidden_states = self.dropout(hidden_states)
hidden_states = attn_residual + hidden_states
hidden_states = hidden_states + self.feed_forward(self.final_layer_norm(hidden_states))
if self.adapter_layer is not None:
    hidden_states = hidden_states + self.adapter_layer(hidden_states)
return hidden_states
"""
_PHI3S_LAYER = """
residual = hidden_states
hidden_states = self.input_layernorm(hidden_states)
hidden_states, self_attn_weights = self.self_attn(
    hidden_states=hidden_states,
    attention_mask=attention_mask,
    {more}
    **kwargs,
)
hidden_states = residual + self.resid_attn_dropout(hidden_states)
residual = hidden_states
hidden_states = self.post_attention_layernorm(hidden_states)
hidden_states = self.mlp(hidden_states)
hidden_states = residual + self.resid_mlp_dropout(hidden_states)
return hidden_states
"""


_NEOXS_LAYER = """
attn_output, _ = self.attention(
    self.input_layernorm(hidden_states),
    attention_mask=attention_mask,
    position_ids=position_ids,
    layer_past=layer_past,
    use_cache=use_cache,
    position_embeddings=position_embeddings,
    **kwargs,
)
attn_output = self.post_attention_dropout(attn_output)
if self.use_parallel_residual:
    mlp_output = self.mlp(self.post_attention_layernorm(hidden_states))
    mlp_output = self.post_mlp_dropout(mlp_output)
    hidden_states = mlp_output + attn_output + hidden_states
else:
    attn_output = attn_output + hidden_states
    mlp_output = self.mlp(self.post_attention_layernorm(attn_output))
    mlp_output = self.post_mlp_dropout(mlp_output)
    hidden_states = mlp_output + attn_output
return hidden_states
"""


def _pre_norm_layer(names: Names, more: str) -> str:
    """Return the statements of a layer like Llama's, whose attention gets further arguments."""
    results = [f"hidden_states = self.{norm}(hidden_states)" for norm in names.result_norms]
    return normal(_PRE_NORM_LAYER.format(names=names, more=more, results=results or ["", ""]))


def _llamas_layers() -> dict[str, Names]:
    found = {}
    for more in ("", "cache_position=cache_position,"):
        found[_pre_norm_layer(LLAMAS, _LLAMAS_ARGUMENTS + more)] = LLAMAS
        found[normal(_PHI3S_LAYER.format(more=_LLAMAS_ARGUMENTS + more))] = PHI3S
    return found


def _barts_layers(memory: bool = False) -> dict[str, Names]:
    """Return the layers of BART's kind, with those of decoders."""
    found = {}
    for (text, sublayer, names), states, more, activated in itertools.product(
        (
            (_BARTS_LAYER, _BARTS_MEMORY_SUBLAYER, BARTS),
            (_MBARTS_LAYER, _MBARTS_MEMORY_SUBLAYER, MBARTS),
        ),
        ("hidden_states", "hidden_states=hidden_states"),
        ("", "cache=cache,", "cache=cache, position_ids=position_ids,"),
        _ACTIVATED,
    ):
        parts = {"states": states, "more": more, "activated": activated}
        parts["memory"] = sublayer.format(states=states) if memory else ""
        found[normal(text.format(**parts), memory)] = names
    return found


_LAYERS = {
    **_llamas_layers(),
    **_barts_layers(),
    normal(_MODERN_BERTS_LAYER): MODERN_BERTS,
    normal(_GPT2S_LAYER): GPT2S,
    _pre_norm_layer(CLIPS, ""): CLIPS,
    normal(_VITS_LAYER): VITS,
    normal(_DISTILBERTS_LAYER): DISTILBERTS,
    normal(_ALBERTS_LAYER): ALBERTS,
    normal(_MPNETS_LAYER): MPNETS,
    normal(_T5S_LAYER.format(memory="")): T5S,
    normal(_OPTS_LAYER): OPTS,
    _pre_norm_layer(GEMMAS, _GEMMAS_ARGUMENTS): GEMMAS,
    normal(_NEOXS_LAYER): NEOXS,
    normal(_WAV2VEC2S_LAYER): WAV2VEC2S,
    normal(_STABLE_WAV2VEC2S_LAYER): STABLE_WAV2VEC2S,
}
_LAYERS_WITH_MEMORY = {
    normal(_T5S_LAYER.format(memory=_T5S_MEMORY_SUBLAYER), memory=True),
    *_barts_layers(memory=True),
}

# The code of modules between a layer and its attention, its norms and its network.
_MPNETS_ATTENTION_AND_NORM = """
self_outputs = self.attn(
    hidden_states, attention_mask, position_bias, output_attentions=output_attentions
)
attention_output = self.LayerNorm(self.dropout(self_outputs[0]) + hidden_states)
outputs = (attention_output,) + self_outputs[1:]
return outputs
"""
_MPNETS_INTERMEDIATE = """
hidden_states = self.dense(hidden_states)
hidden_states = self.intermediate_act_fn(hidden_states)
return hidden_states
"""
_MPNETS_OUTPUT = """
hidden_states = self.dense(hidden_states)
hidden_states = self.dropout(hidden_states)
hidden_states = self.LayerNorm(hidden_states + input_tensor)
return hidden_states
"""
_T5S_SELF_ATTENTION = """
normed_hidden_states = self.layer_norm(hidden_states)
attention_output, position_bias, attn_weights = self.SelfAttention(
    normed_hidden_states,
    mask=attention_mask,
    position_bias=position_bias,
    cache=cache,
    **kwargs,
)
attention_output = hidden_states + self.dropout(attention_output)
return attention_output, position_bias, attn_weights
"""
_T5S_MEMORY_ATTENTION = """
normed_hidden_states = self.layer_norm(hidden_states)
attention_output, position_bias, attn_weights = self.EncDecAttention(
    normed_hidden_states,
    mask=attention_mask,
    key_value_states=key_value_states,
    position_bias=position_bias,
    cache=cache,
    **kwargs,
)
layer_output = hidden_states + self.dropout(attention_output)
return layer_output, position_bias, attn_weights
"""
_T5S_FEED_FORWARD = """
forwarded_states = self.layer_norm(hidden_states)
forwarded_states = self.DenseReluDense(forwarded_states)
hidden_states = hidden_states + self.dropout(forwarded_states)
return hidden_states
"""
_HOLDERS = {
    (MPNETS, "attention"): normal(_MPNETS_ATTENTION_AND_NORM),
    (MPNETS, "intermediate"): normal(_MPNETS_INTERMEDIATE),
    (MPNETS, "output"): normal(_MPNETS_OUTPUT),
    (T5S, "layer.0"): normal(_T5S_SELF_ATTENTION),
    (T5S, "layer.1"): normal(_T5S_FEED_FORWARD),
    (T5_DECODERS, "layer.0"): normal(_T5S_SELF_ATTENTION),
    (T5_DECODERS, "layer.1"): normal(_T5S_MEMORY_ATTENTION),
    (T5_DECODERS, "layer.2"): normal(_T5S_FEED_FORWARD),
}

_LLAMAS_NETWORK = """
down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
return down_proj
"""
_MODERN_BERTS_NETWORK = """
input, gate = self.Wi(hidden_states).chunk(2, dim=-1)
return self.Wo(self.drop(self.act(input) * gate))
"""
_CLIPS_NETWORK = """
hidden_states = self.fc1(hidden_states)
hidden_states = self.activation_fn(hidden_states)
hidden_states = self.fc2(hidden_states)
return hidden_states
"""
_GPT2S_NETWORK = """
hidden_states = self.c_fc(hidden_states)
hidden_states = self.act(hidden_states)
hidden_states = self.c_proj(hidden_states)
hidden_states = self.dropout(hidden_states)
return hidden_states
"""
_DISTILBERTS_NETWORK = """
return apply_chunking_to_forward(
    self.ff_chunk, self.chunk_size_feed_forward, self.seq_len_dim, input
)
x = self.lin1(input)
x = self.activation(x)
x = self.lin2(x)
x = self.dropout(x)
return x
"""
_ALBERTS_NETWORK = """
ffn_output = self.ffn(attention_output)
ffn_output = self.activation(ffn_output)
ffn_output = self.ffn_output(ffn_output)
return ffn_output
"""
_T5S_OUTPUT = """
hidden_states = self.dropout(hidden_states)
if (
    isinstance(self.wo.weight, torch.Tensor)
    and hidden_states.dtype != self.wo.weight.dtype
    and self.wo.weight.dtype != torch.int8
):
    hidden_states = hidden_states.to(self.wo.weight.dtype)
hidden_states = self.wo(hidden_states)
return hidden_states
"""
_T5S_NETWORK = f"""
hidden_states = self.wi(hidden_states)
hidden_states = self.act(hidden_states)
{_T5S_OUTPUT}
"""
_GATED_T5S_NETWORK = f"""
hidden_gelu = self.act(self.wi_0(hidden_states))
hidden_linear = self.wi_1(hidden_states)
hidden_states = hidden_gelu * hidden_linear
{_T5S_OUTPUT}
"""
_WAV2VEC2S_NETWORK = """
hidden_states = self.intermediate_dense(hidden_states)
hidden_states = self.intermediate_act_fn(hidden_states)
hidden_states = self.intermediate_dropout(hidden_states)
hidden_states = self.output_dense(hidden_states)
hidden_states = self.output_dropout(hidden_states)
return hidden_states
"""
_PHI3S_NETWORK = """
up_states = self.gate_up_proj(hidden_states)
gate, up_states = up_states.chunk(2, dim=-1)
up_states = up_states * self.activation_fn(gate)
return self.down_proj(up_states)
"""
_NEOXS_NETWORK = """
hidden_states = self.dense_h_to_4h(hidden_states)
hidden_states = self.act(hidden_states)
hidden_states = self.dense_4h_to_h(hidden_states)
return hidden_states
"""
# By the code, the names of the layers that have it, before and after the network is known.
_NETWORKS = {
    normal(_LLAMAS_NETWORK): {each: each for each in (LLAMAS, GEMMAS)},
    normal(_NEOXS_NETWORK): {NEOXS: NEOXS},
    normal(_MODERN_BERTS_NETWORK): {MODERN_BERTS: MODERN_BERTS},
    normal(_GPT2S_NETWORK): {GPT2S: GPT2S},
    normal(_CLIPS_NETWORK): {CLIPS: CLIPS, VITS: VITS},
    normal(_DISTILBERTS_NETWORK): {DISTILBERTS: DISTILBERTS},
    normal(_ALBERTS_LAYER + _ALBERTS_NETWORK): {ALBERTS: ALBERTS},
    normal(_T5S_NETWORK): {each: each for each in (T5S, T5_DECODERS)},
    normal(_GATED_T5S_NETWORK): {T5S: GATED_T5S, T5_DECODERS: GATED_T5_DECODERS},
    normal(_WAV2VEC2S_NETWORK): {each: each for each in (WAV2VEC2S, STABLE_WAV2VEC2S)},
    normal(_PHI3S_NETWORK): {PHI3S: PHI3S},
}
