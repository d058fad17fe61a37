"""The code of layers that run as one op: see :mod:`trifuse.recipes.known_layers`.

Each form is written as transformers writes it, without comments and annotations. Keywords may be in
any order. A cache is called ``cache``, whatever its name, and dropout by a function of torch's is
left out: :func:`trifuse.recipes.known_statements.normal` removes such differences from both sides.
Forms of several families and versions that differ in a few places are made from one text.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

from trifuse.recipes import known_statements
from trifuse.recipes.known_names import (
    ALBERTS,
    BARTS,
    BEITS,
    BLOOMS,
    CLIPS,
    COHERES,
    DINOV2S,
    DINOV3S,
    DISTILBERTS,
    ESMS,
    GATED_DINOV2S,
    GATED_DINOV3S,
    GATED_T5_DECODERS,
    GATED_T5S,
    GEMMAS,
    GLM4S,
    GLMS,
    GPT2S,
    GPTJS,
    GRANITES,
    LLAMAS,
    MBARTS,
    MEGATRON_BERTS,
    MODERN_BERTS,
    MPNETS,
    MPTS,
    NEOXS,
    OLMO2S,
    OPTS,
    PHI3S,
    PHIS,
    PRE_NORM_ROBERTAS,
    REMBERTS,
    STABLE_LMS,
    STABLE_WAV2VEC2S,
    T5_DECODERS,
    T5S,
    VITS,
    WAV2VEC2S,
    XL_ROBERTAS,
    Names,
)
from trifuse.recipes.known_statements import normal


def layer_of(cls: Any) -> Names | None:
    """The names in a layer whose class has a known ``forward``; None for others.

    :func:`takes_memory` says whether the layer may also get a memory.
    """
    return _layers().get(known_statements.of_class(cls))


def takes_memory(cls: Any) -> bool:
    """Whether the code of a layer's class is known for calls with another sequence's states."""
    return known_statements.of_class(cls, memory=True) in _layers_with_memory()


def with_network(cls: Any, names: Names) -> Names | None:
    """The names in a layer whose network has a class; None if its code isn't known.

    Args:
        cls: the network's class; the layer's if the layer itself holds the network.
        names: those that :func:`layer_of` returned.
    """
    if not names.network and not names.in_chunks:
        return names
    methods = ("forward", names.chunk) if names.in_chunks else ("forward",)
    return _networks().get(known_statements.of_class(cls, *methods), {}).get(names)


def is_holder(cls: Any, names: Names, path: str) -> bool:
    """Whether a class has the known code of the module at ``path``, one of ``names.holders``."""
    return known_statements.of_class(cls) == _holders()[names, path]


def only_adds(function: Any) -> bool:
    """Whether a function has known code that adds its second argument to its first.

    It drops elements of the first in training.
    """
    return known_statements.of_function(function) == _DROPOUT_ADD


def drops_samples(cls: Any) -> bool:
    """Whether a module's class has known code that drops whole samples in training."""
    return known_statements.of_class(cls) == _DROP_PATH


# Llama's, Granite's, Gemma's, GLM-4's, OLMo 2's and CLIP's layers have this code.
_PRE_NORM_LAYER = """
residual = hidden_states
{norms[0]}
hidden_states, _ = self.{names.attention}(
    hidden_states=hidden_states,
    attention_mask=attention_mask,
    {more}
    **kwargs,
)
{results[0]}
hidden_states = residual + hidden_states{scaled}
residual = hidden_states
{norms[1]}
hidden_states = self.{names.network}(hidden_states)
{results[1]}
hidden_states = residual + hidden_states{scaled}
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
_COHERE2S_ARGUMENTS = """
    cache=cache, use_cache=use_cache, position_embeddings=position_embeddings,
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
{memory}
residual = hidden_states
hidden_states = self.ln_2(hidden_states)
feed_forward_hidden_states = self.mlp(hidden_states)
hidden_states = residual + feed_forward_hidden_states
return hidden_states
"""
_GPT2S_MEMORY_SUBLAYER = """
if not hasattr(self, "crossattention"):
    raise ValueError(
        f"If `encoder_hidden_states` are passed, {self} has to be instantiated with "
        "cross-attention layers by setting `config.add_cross_attention=True`"
    )
residual = hidden_states
hidden_states = self.ln_cross_attn(hidden_states)
cross_attn_output, _ = self.crossattention(
    hidden_states,
    cache=cache,
    attention_mask=attention_mask,
    encoder_hidden_states=encoder_hidden_states,
    encoder_attention_mask=encoder_attention_mask,
)
hidden_states = residual + cross_attn_output
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
_PHIS_LAYER = """
residual = hidden_states
hidden_states = self.input_layernorm(hidden_states)
attn_outputs, _ = self.self_attn(
    hidden_states=hidden_states,
    attention_mask=attention_mask,
    {more}
    **kwargs,
)
attn_outputs = self.resid_dropout(attn_outputs)
feed_forward_hidden_states = self.resid_dropout(self.mlp(hidden_states))
hidden_states = attn_outputs + feed_forward_hidden_states + residual
return hidden_states
"""
_STABLE_LMS_LAYER = """
residual = hidden_states
hidden_states = self.input_layernorm(hidden_states)
self_attn_output, _ = self.self_attn(
    hidden_states=hidden_states,
    attention_mask=attention_mask,
    {more}
)
if self.use_parallel_residual:
    mlp_output = self.mlp(hidden_states)
    mlp_output = self.dropout(mlp_output)
    hidden_states = residual + self_attn_output + mlp_output
else:
    residual = residual + self_attn_output
    mlp_output = self.mlp(self.post_attention_layernorm(residual))
    mlp_output = self.dropout(mlp_output)
    hidden_states = residual + mlp_output
return hidden_states
"""
_COHERES_LAYER = """
residual = hidden_states
hidden_states = self.input_layernorm(hidden_states)
hidden_states_attention, _ = self.self_attn(
    hidden_states=hidden_states,
    attention_mask=attention_mask,
    {more}
    **kwargs,
)
hidden_states_mlp = self.mlp(hidden_states)
hidden_states = residual + hidden_states_attention + hidden_states_mlp
return hidden_states
"""
_GPTJS_LAYER = f"""
residual = hidden_states
hidden_states = self.ln_1(hidden_states)
attn_output, _ = self.attn(
    hidden_states=hidden_states,
    attention_mask=attention_mask,
    {_LLAMAS_ARGUMENTS}
    **kwargs,
)
feed_forward_hidden_states = self.mlp(hidden_states)
return attn_output + feed_forward_hidden_states + residual
"""
# BERT's relatives, whose method `feed_forward_chunk` computes the network.
_BERTS_ATTENTION = """
self_attention_outputs = self.attention(
    hidden_states, attention_mask=attention_mask, cache=cache, output_attentions=output_attentions
)
attention_output = self_attention_outputs[0]
outputs = self_attention_outputs[1:]
"""
_ROBERTAS_ATTENTION = """
self_attention_output, _ = self.attention(hidden_states, attention_mask, cache=cache, **kwargs)
attention_output = self_attention_output
"""
_IN_CHUNKS = """
layer_output = apply_chunking_to_forward(
    self.feed_forward_chunk, self.chunk_size_feed_forward, self.seq_len_dim, attention_output
)
"""
_REMBERTS_LAYER = f"""
{_BERTS_ATTENTION}
{_IN_CHUNKS}
outputs = (layer_output,) + outputs
return outputs
"""
_MEGATRON_BERTS_LAYER = f"""
{_BERTS_ATTENTION}
{_IN_CHUNKS}
return (layer_output,) + outputs
"""
_PRE_NORM_ROBERTAS_LAYER = f"""
{_ROBERTAS_ATTENTION}
{_IN_CHUNKS}
return layer_output
"""

_BLOOMS_LAYER = """
layernorm_output = self.input_layernorm(hidden_states)
if self.apply_residual_connection_post_layernorm:
    residual = layernorm_output
else:
    residual = hidden_states
attention_output, attn_weights = self.self_attention(
    layernorm_output,
    residual,
    cache=cache,
    attention_mask=attention_mask,
    alibi=alibi,
    use_cache=use_cache,
    output_attentions=output_attentions,
)
layernorm_output = self.post_attention_layernorm(attention_output)
if self.apply_residual_connection_post_layernorm:
    residual = layernorm_output
else:
    residual = attention_output
output = self.mlp(layernorm_output, residual)
return output, attn_weights
"""
_MPTS_LAYER = """
layernorm_output = self.norm_1(hidden_states)
residual = hidden_states
attn_outputs, attn_weights = self.attn(
    layernorm_output, position_bias=position_bias, attention_mask=attention_mask, cache=cache
)
hidden_states = self.resid_attn_dropout(attn_outputs) + residual
layernorm_output = self.norm_2(hidden_states)
residual = hidden_states
output = self.ffn(layernorm_output, residual)
return output, attn_weights
"""
_ESMS_LAYER = """
attention_output = self.attention(
    hidden_states,
    attention_mask=attention_mask,
    position_embeddings=position_embeddings,
    **kwargs,
)
layer_output = self.feed_forward_chunk(attention_output)
return layer_output
"""
_DINOV2S_LAYER = """
residual = hidden_states
hidden_states = self.norm1(hidden_states)
hidden_states, _ = self.attention(hidden_states, attention_mask=attention_mask, {more} **kwargs)
hidden_states = self.layer_scale1(hidden_states)
hidden_states = self.drop_path(hidden_states) + residual
residual = hidden_states
hidden_states = self.norm2(hidden_states)
hidden_states = self.mlp(hidden_states)
hidden_states = self.layer_scale2(hidden_states)
hidden_states = self.drop_path(hidden_states) + residual
return hidden_states
"""
_BEITS_LAYER = """
if self.relative_position_bias is not None:
    height, width = resolution
    window_size = (height // self.patch_size, width // self.patch_size)
    relative_position_bias = self.relative_position_bias(
        window_size, interpolate_pos_encoding, dim_size=hidden_states.shape[1]
    )
    attention_mask = (
        relative_position_bias + attention_mask
        if attention_mask is not None
        else relative_position_bias
    )
residual = hidden_states
hidden_states = self.layernorm_before(hidden_states)
hidden_states, _ = self.attention(hidden_states, attention_mask=attention_mask, **kwargs)
hidden_states = self.dropout(hidden_states)
hidden_states = self.lambda_1 * hidden_states
hidden_states = self.drop_path(hidden_states) + residual
residual = hidden_states
hidden_states = self.layernorm_after(hidden_states)
hidden_states = self.mlp(hidden_states)
hidden_states = self.dropout(hidden_states)
hidden_states = self.lambda_2 * hidden_states
hidden_states = self.drop_path(hidden_states) + residual
return hidden_states
"""


def _pre_norm_layer(names: Names, more: str) -> str:
    """Return the statements of a layer like Llama's, whose attention gets further arguments."""
    norms, results = (
        [name and f"hidden_states = self.{name}(hidden_states)" for name in each]
        for each in (names.norms, names.result_norms or ("", ""))
    )
    scaled = "" if names.result_scale is None else f" * self.{names.result_scale}"
    parts = {"names": names, "more": more, "scaled": scaled}
    return normal(_PRE_NORM_LAYER.format(norms=norms, results=results, **parts))


def _llamas_layers() -> dict[str, Names]:
    found = {}
    for more in ("", "cache_position=cache_position,"):
        for names in (LLAMAS, GRANITES, GLM4S, OLMO2S):
            found[_pre_norm_layer(names, _LLAMAS_ARGUMENTS + more)] = names
        for layer, names in (
            (_PHI3S_LAYER, PHI3S),
            (_PHIS_LAYER, PHIS),
            (_STABLE_LMS_LAYER, STABLE_LMS),
            (_COHERES_LAYER, COHERES),
        ):
            found[normal(layer.format(more=_LLAMAS_ARGUMENTS + more))] = names
        found[normal(_COHERES_LAYER.format(more=_COHERE2S_ARGUMENTS + more))] = COHERES
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


@functools.cache
def _layers() -> dict[str, Names]:
    """The names in layers, by their code."""
    return {
        **_llamas_layers(),
        **_barts_layers(),
        normal(_MODERN_BERTS_LAYER): MODERN_BERTS,
        normal(_GPT2S_LAYER.format(memory="")): GPT2S,
        _pre_norm_layer(CLIPS, ""): CLIPS,
        normal(_VITS_LAYER): VITS,
        normal(_DISTILBERTS_LAYER): DISTILBERTS,
        normal(_ALBERTS_LAYER): ALBERTS,
        normal(_MPNETS_LAYER): MPNETS,
        normal(_T5S_LAYER.format(memory="")): T5S,
        normal(_OPTS_LAYER): OPTS,
        _pre_norm_layer(GEMMAS, _GEMMAS_ARGUMENTS): GEMMAS,
        normal(_NEOXS_LAYER): NEOXS,
        normal(_GPTJS_LAYER): GPTJS,
        normal(_WAV2VEC2S_LAYER): WAV2VEC2S,
        normal(_STABLE_WAV2VEC2S_LAYER): STABLE_WAV2VEC2S,
        normal(_REMBERTS_LAYER): REMBERTS,
        normal(_MEGATRON_BERTS_LAYER): MEGATRON_BERTS,
        normal(_PRE_NORM_ROBERTAS_LAYER): PRE_NORM_ROBERTAS,
        normal(_DINOV2S_LAYER.format(more="")): DINOV2S,
        normal(_DINOV2S_LAYER.format(more="position_embeddings=position_embeddings,")): DINOV3S,
        normal(_BEITS_LAYER): BEITS,
        normal(_ESMS_LAYER): ESMS,
        normal(_BLOOMS_LAYER): BLOOMS,
        normal(_MPTS_LAYER): MPTS,
    }


@functools.cache
def _layers_with_memory() -> set[str]:
    """The code of layers that may also get a memory."""
    return {
        normal(_T5S_LAYER.format(memory=_T5S_MEMORY_SUBLAYER), memory=True),
        normal(_GPT2S_LAYER.format(memory=_GPT2S_MEMORY_SUBLAYER), memory=True),
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
_BERTS_SELF_OUTPUT = """
outputs = (attention_output,) + self_outputs[1:]
return outputs
"""
_REMBERTS_ATTENTION = f"""
self_outputs = self.self(
    hidden_states,
    attention_mask=attention_mask,
    cache=cache,
    encoder_hidden_states=encoder_hidden_states,
    output_attentions=output_attentions,
)
attention_output = self.output(self_outputs[0], hidden_states)
{_BERTS_SELF_OUTPUT}
"""
_MEGATRON_BERTS_ATTENTION = f"""
ln_outputs = self.ln(hidden_states)
self_outputs = self.self(
    ln_outputs,
    attention_mask=attention_mask,
    cache=cache,
    encoder_hidden_states=encoder_hidden_states,
    output_attentions=output_attentions,
)
attention_output = self.output(self_outputs[0], hidden_states)
{_BERTS_SELF_OUTPUT}
"""
_PRE_NORM_ROBERTAS_ATTENTION = """
{normed} = self.{norm}(hidden_states)
attention_mask = attention_mask if not self.is_cross_attention else encoder_attention_mask
attention_output, attn_weights = self.self(
    {normed},
    attention_mask=attention_mask,
    cache=cache,
    encoder_hidden_states=encoder_hidden_states,
    **kwargs,
)
attention_output = self.output(attention_output, hidden_states)
return attention_output, attn_weights
"""
_DROPPED_SUM = """
hidden_states = self.dense(hidden_states)
hidden_states = self.dropout(hidden_states)
{end}
"""
_PRE_NORM_ROBERTAS_SUM = _DROPPED_SUM.format(
    end="hidden_states = hidden_states + input_tensor\nreturn hidden_states"
)
_XL_ROBERTAS_SUM = """
hidden_states = self.dense(hidden_states)
hidden_states = hidden_states + input_tensor
return hidden_states
"""
_ESMS_ATTENTION = """
hidden_states_ln = self.LayerNorm(hidden_states)
attn_output, _ = self.self(
    hidden_states_ln,
    attention_mask=attention_mask,
    encoder_hidden_states=encoder_hidden_states,
    encoder_attention_mask=encoder_attention_mask,
    position_embeddings=position_embeddings,
    **kwargs,
)
attn_output = self.output(attn_output, hidden_states)
return attn_output
"""
_ESMS_INTERMEDIATE = """
hidden_states = self.dense(hidden_states)
hidden_states = gelu(hidden_states)
return hidden_states
"""
_LAYER_SCALE = "return hidden_state * self.lambda1"


@functools.cache
def _holders() -> dict[tuple[Names, str], str]:
    """The code of modules, by the names in their layers and their paths."""
    holders = {
        (MPNETS, "attention"): normal(_MPNETS_ATTENTION_AND_NORM),
        (MPNETS, "intermediate"): normal(_MPNETS_INTERMEDIATE),
        (MPNETS, "output"): normal(_MPNETS_OUTPUT),
        (T5S, "layer.0"): normal(_T5S_SELF_ATTENTION),
        (T5S, "layer.1"): normal(_T5S_FEED_FORWARD),
        (T5_DECODERS, "layer.0"): normal(_T5S_SELF_ATTENTION),
        (T5_DECODERS, "layer.1"): normal(_T5S_MEMORY_ATTENTION),
        (T5_DECODERS, "layer.2"): normal(_T5S_FEED_FORWARD),
        (REMBERTS, "attention"): normal(_REMBERTS_ATTENTION),
        (REMBERTS, "attention.output"): normal(_MPNETS_OUTPUT),
        (REMBERTS, "intermediate"): normal(_MPNETS_INTERMEDIATE),
        (REMBERTS, "output"): normal(_MPNETS_OUTPUT),
        (MEGATRON_BERTS, "attention"): normal(_MEGATRON_BERTS_ATTENTION),
        (MEGATRON_BERTS, "attention.output"): normal(
            _DROPPED_SUM.format(end="return residual + hidden_states")
        ),
        (MEGATRON_BERTS, "intermediate"): normal(_MPNETS_INTERMEDIATE),
        (MEGATRON_BERTS, "output"): normal(
            _DROPPED_SUM.format(end="return input_tensor + hidden_states")
        ),
        (PRE_NORM_ROBERTAS, "attention"): normal(
            _PRE_NORM_ROBERTAS_ATTENTION.format(
                normed="hidden_states_pre_layer_norm", norm="LayerNorm"
            )
        ),
        (PRE_NORM_ROBERTAS, "attention.output"): normal(_PRE_NORM_ROBERTAS_SUM),
        (PRE_NORM_ROBERTAS, "intermediate"): normal(
            f"hidden_states = self.LayerNorm(hidden_states)\n{_MPNETS_INTERMEDIATE}"
        ),
        (PRE_NORM_ROBERTAS, "output"): normal(_PRE_NORM_ROBERTAS_SUM),
        (XL_ROBERTAS, "attention"): normal(
            _PRE_NORM_ROBERTAS_ATTENTION.format(normed="intermediate", norm="self_attn_layer_norm")
        ),
        (XL_ROBERTAS, "attention.output"): normal(_PRE_NORM_ROBERTAS_SUM),
        (XL_ROBERTAS, "intermediate"): normal(_MPNETS_INTERMEDIATE),
        (XL_ROBERTAS, "output"): normal(_XL_ROBERTAS_SUM),
        (ESMS, "attention"): normal(_ESMS_ATTENTION),
        (ESMS, "attention.output"): normal(_PRE_NORM_ROBERTAS_SUM),
        (ESMS, "intermediate"): normal(_ESMS_INTERMEDIATE),
        (ESMS, "output"): normal(_PRE_NORM_ROBERTAS_SUM),
    }
    for plain, gated in ((T5S, GATED_T5S), (T5_DECODERS, GATED_T5_DECODERS)):
        holders |= {(gated, path): holders[plain, path] for path in plain.holders}
    for names in (DINOV2S, GATED_DINOV2S, DINOV3S, GATED_DINOV3S):
        holders |= {(names, path): normal(_LAYER_SCALE) for path in names.holders}
    return holders


# The families whose networks have this code.
_LLAMAS_KIN = (LLAMAS, GRANITES, GEMMAS, STABLE_LMS, OLMO2S, COHERES)
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
_GPTJS_NETWORK = """
hidden_states = self.fc_in(hidden_states)
hidden_states = self.act(hidden_states)
hidden_states = self.fc_out(hidden_states)
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
_BERTS_NETWORK = """
intermediate_output = self.intermediate(attention_output)
layer_output = self.output(intermediate_output, attention_output)
return layer_output
"""
_MEGATRON_BERTS_NETWORK = """
ln_output = self.ln(attention_output)
intermediate_output = self.intermediate(ln_output)
layer_output = self.output(intermediate_output, attention_output)
return layer_output
"""
_BLOOMS_NETWORK = """
hidden_states = self.gelu_impl(self.dense_h_to_4h(hidden_states))
if self.pretraining_tp > 1 and self.slow_but_exact:
    intermediate_output = torch.zeros_like(residual)
    slices = self.dense_4h_to_h.weight.shape[-1] / self.pretraining_tp
    for i in range(self.pretraining_tp):
        intermediate_output = intermediate_output + F.linear(
            hidden_states[:, :, int(i * slices) : int((i + 1) * slices)],
            self.dense_4h_to_h.weight[:, int(i * slices) : int((i + 1) * slices)],
        )
else:
    intermediate_output = self.dense_4h_to_h(hidden_states)
output = dropout_add(intermediate_output, residual, self.hidden_dropout, self.training)
return output
"""
_MPTS_NETWORK = """
hidden_states = self.act(self.up_proj(hidden_states))
intermediate_output = self.down_proj(hidden_states)
output = F.dropout(intermediate_output, p=self.hidden_dropout, training=self.training)
output = output + residual
return output
"""
_ESMS_NETWORK = """
attention_output_ln = self.LayerNorm(attention_output)
intermediate_output = self.intermediate(attention_output_ln)
layer_output = self.output(intermediate_output, attention_output)
return layer_output
"""
_DINOV3S_NETWORK = "return self.down_proj(self.act_fn(self.up_proj(x)))"
_XL_ROBERTAS_NETWORK = """
intermediate_output = self.LayerNorm(attention_output)
intermediate_output = self.intermediate(intermediate_output)
layer_output = self.output(intermediate_output, attention_output)
return layer_output
"""


@functools.cache
def _networks() -> dict[str, dict[Names, Names]]:
    """By the code of a network, the names in the layers that have such a network.

    The keys are those that the layer's own code shows, and the values those that its network shows
    too: a layer with the code of DINOv2's has other names if its network is gated.
    """
    return {
        normal(_LLAMAS_NETWORK): {
            **{each: each for each in _LLAMAS_KIN},
            DINOV2S: GATED_DINOV2S,
            DINOV3S: GATED_DINOV3S,
        },
        normal(_DINOV3S_NETWORK): {DINOV3S: DINOV3S},
        normal(_NEOXS_NETWORK): {NEOXS: NEOXS},
        normal(_GPTJS_NETWORK): {GPTJS: GPTJS},
        normal(_MODERN_BERTS_NETWORK): {MODERN_BERTS: MODERN_BERTS},
        normal(_GPT2S_NETWORK): {GPT2S: GPT2S},
        normal(_CLIPS_NETWORK): {each: each for each in (CLIPS, VITS, PHIS, DINOV2S, BEITS)},
        normal(_DISTILBERTS_NETWORK): {DISTILBERTS: DISTILBERTS},
        normal(_ALBERTS_LAYER + _ALBERTS_NETWORK): {ALBERTS: ALBERTS},
        normal(_T5S_NETWORK): {each: each for each in (T5S, T5_DECODERS)},
        normal(_GATED_T5S_NETWORK): {T5S: GATED_T5S, T5_DECODERS: GATED_T5_DECODERS},
        normal(_WAV2VEC2S_NETWORK): {each: each for each in (WAV2VEC2S, STABLE_WAV2VEC2S)},
        normal(_PHI3S_NETWORK): {PHI3S: PHI3S, LLAMAS: GLMS, GLM4S: GLM4S},
        normal(_REMBERTS_LAYER + _BERTS_NETWORK): {REMBERTS: REMBERTS},
        normal(_MEGATRON_BERTS_LAYER + _MEGATRON_BERTS_NETWORK): {MEGATRON_BERTS: MEGATRON_BERTS},
        normal(_PRE_NORM_ROBERTAS_LAYER + _BERTS_NETWORK): {PRE_NORM_ROBERTAS: PRE_NORM_ROBERTAS},
        normal(_PRE_NORM_ROBERTAS_LAYER + _XL_ROBERTAS_NETWORK): {PRE_NORM_ROBERTAS: XL_ROBERTAS},
        normal(_ESMS_LAYER + _ESMS_NETWORK): {ESMS: ESMS},
        normal(_BLOOMS_NETWORK): {BLOOMS: BLOOMS},
        normal(_MPTS_NETWORK): {MPTS: MPTS},
    }


_DROP_PATH = normal("""
if self.drop_prob == 0.0 or not self.training:
    return hidden_states
keep_prob = 1 - self.drop_prob
shape = (hidden_states.shape[0],) + (1,) * (hidden_states.ndim - 1)
random_tensor = torch.rand(shape, dtype=hidden_states.dtype, device=hidden_states.device)
random_tensor = torch.floor(random_tensor + keep_prob)
return hidden_states.div(keep_prob) * random_tensor
""")
_DROPOUT_ADD = normal("""
out = F.dropout(x, p=prob, training=training)
out = residual + out
return out
""")
