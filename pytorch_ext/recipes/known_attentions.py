"""The code of the attentions of such layers: see :mod:`trifuse.recipes.known_code`."""

from __future__ import annotations

import functools
import itertools
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

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


class Attention(NamedTuple):
    """The properties of an attention that the statements of its ``forward`` show."""

    of: tuple[Names, ...]  # the families that have it
    head_norms: tuple[str, ...] = ()
    head_norms_if: str | None = None  # the attribute that says whether it has them; None: it does
    heads_normed_together: bool = False  # whether these norms are over all heads of a token
    scale: str | None = "scaling"  # the attribute with the scale; None: it is 1 / √head_dim
    scales_queries: bool = False  # whether queries, not their products with keys, are scaled
    head_dim: str = "head_dim"  # the attribute with the number of features of a head
    # The attribute with the number of key heads of a joint projection. None: that of query heads.
    key_heads: str | None = None
    softcap: str | None = None  # the attribute with the bound of scores
    takes_options: bool = True  # whether further arguments of the layer reach the operator
    dispatches: bool = True  # whether it runs by ``attn_implementation``, and isn't written out
    # The attribute with the number of features of a head that it passes to the rotation. None: all.
    rotary_dim: str | None = None
    rotated_at_once: int = 2  # the number of tensors that it passes to the rotation
    # The dimension of heads in them, and of a rotation's cosines; None: the rotation's default.
    head_dimension: int | None = None
    rotates: Callable[[Any], bool] | None = None  # of the attention; None: as its layer's names say
    methods: tuple[tuple[str, str], ...] = ()  # further methods, and their statements


def attention_of(cls: Any, memory: bool = False) -> Attention | None:
    """The properties of an attention whose class has a known ``forward``; None for others.

    Args:
        cls: the class.
        memory: whether it attends to another sequence, whose keys and values a cache holds.
    """
    attentions = _attentions_to_memory() if memory else _known_attentions()
    return attentions.get(known_statements.of_class(cls, memory=memory))


# The end of most attentions. The order of the options doesn't matter.
_ATTENDS = """
{{interface}}
attn_output, attn_weights = attention_interface(
    self, {heads}, {mask}, {options} **kwargs
)
attn_output = attn_output.reshape({shape}, -1).contiguous()
{computed}
return {results}
"""


def _attends(
    options: str,
    *outputs: str,
    heads: str = "query_states, key_states, value_states",
    mask: str = "attention_mask",
    shape: str = "*input_shape",
    results: str = "attn_output, attn_weights",
) -> str:
    """Return the statements from the choice of the operator on, with a placeholder for it.

    Args:
        options: the arguments with names, each with a comma after it.
        outputs: what is computed from the result's features, one after another.
        heads: the arguments with queries, keys and values.
        mask: the argument with the mask.
        shape: the sizes before those features.
        results: what the attention returns.
    """
    computed = "\n".join(f"attn_output = {each}" for each in outputs)
    parts = {"heads": heads, "mask": mask, "shape": shape, "results": results}
    return _ATTENDS.format(options=options, computed=computed, **parts)


_ROTATED = """
cos, sin = position_embeddings
query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
if cache is not None:
    {update}
"""
# The rotation of the first features of heads, by a function that rotates all that it gets.
_PARTLY_ROTATED = """
cos, sin = position_embeddings
query_rot, query_pass = (
    query_states[..., : self.rotary_ndims],
    query_states[..., self.rotary_ndims :],
)
key_rot, key_pass = (
    key_states[..., : self.rotary_ndims],
    key_states[..., self.rotary_ndims :],
)
query_rot, key_rot = apply_rotary_pos_emb(query_rot, key_rot, cos, sin)
query_states = torch.cat((query_rot, query_pass), dim=-1)
key_states = torch.cat((key_rot, key_pass), dim=-1)
if cache is not None:
    {update}
"""
_DROPOUT = "dropout=0.0 if not self.training else self.attention_dropout,"
_OTHER_DROPOUT = "dropout=self.attention_dropout if self.training else 0.0,"
_INNER_DROPOUT = "dropout=0.0 if not self.training else self.dropout,"
_SCALE = "scaling=self.scaling,"
_LLAMAS_ATTENTION = f"""
input_shape = hidden_states.shape[:-1]
hidden_shape = (*input_shape, -1, self.head_dim)
query_states = {{query}}.transpose(1, 2)
key_states = {{key}}.transpose(1, 2)
value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
{{normed}}
{_ROTATED}
{_attends(_SCALE + "{options}", "self.o_proj(attn_output)")}
"""
_BY_METHOD = """
attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(
    self.config._attn_implementation, eager_attention_forward
)
"""
_BY_NAME = """
attention_interface = eager_attention_forward
if self.config._attn_implementation != "eager":
    attention_interface = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
"""
_UPDATE = "key_states, value_states = cache.update(key_states, value_states, self.layer_idx{more})"
_UPDATES = (
    _UPDATE.format(more=""),
    _UPDATE.format(more=", kwargs=kwargs"),
    'cache_kwargs = {"sin": sin, "cos": cos, "cache_position": cache_position}\n    '
    + _UPDATE.format(more=", cache_kwargs"),
)
# Where some layers rotate nothing.
_UPDATE_BY_PLACES = _UPDATES[2].replace('"sin": sin, "cos": cos, ', "")
_WINDOWS = (
    "",
    "sliding_window=self.sliding_window,",
    'sliding_window=getattr(self.config, "sliding_window", None),',
)
_HEADS = "self.{}_proj(hidden_states).view(hidden_shape)"
_GEMMAS_NORMS = """
query_states = self.q_norm(query_states)
key_states = self.k_norm(key_states)
"""
_NEOXS_ATTENTION = f"""
input_shape = hidden_states.shape[:-1]
hidden_shape = (*input_shape, -1, 3 * self.head_size)
qkv = self.query_key_value(hidden_states).view(hidden_shape).transpose(1, 2)
query_states, key_states, value_states = qkv.chunk(3, dim=-1)
{_ROTATED}
{_attends(_SCALE + _DROPOUT, "self.dense(attn_output)")}
"""
_MODERN_BERTS_OPTIONS = """
scaling=self.head_dim**-0.5,
sliding_window=self.sliding_window,
deterministic=self.deterministic_flash_attn,
"""
_MODERN_BERTS_ATTENTION = f"""
input_shape = hidden_states.shape[:-1]
qkv = self.Wqkv(hidden_states)
qkv = qkv.view(*input_shape, 3, -1, self.head_dim)
query_states, key_states, value_states = qkv.unbind(dim=-3)
query_states = query_states.transpose(1, 2)
key_states = key_states.transpose(1, 2)
value_states = value_states.transpose(1, 2)
cos, sin = position_embeddings
query_states, key_states = apply_rotary_pos_emb(
    query_states, key_states, cos, sin, unsqueeze_dim=1
)
{_attends(_OTHER_DROPOUT + _MODERN_BERTS_OPTIONS, "self.out_drop(self.Wo(attn_output))")}
"""
_PHI3S_ATTENTION = f"""
input_shape = hidden_states.shape[:-1]
hidden_shape = (*input_shape, -1, self.head_dim)
qkv = self.qkv_proj(hidden_states)
query_pos = self.config.num_attention_heads * self.head_dim
query_states = qkv[..., :query_pos]
key_states = qkv[..., query_pos : query_pos + self.num_key_value_heads * self.head_dim]
value_states = qkv[..., query_pos + self.num_key_value_heads * self.head_dim :]
query_states = query_states.view(hidden_shape).transpose(1, 2)
key_states = key_states.view(hidden_shape).transpose(1, 2)
value_states = value_states.view(hidden_shape).transpose(1, 2)
{_ROTATED}
{_attends(_SCALE + _DROPOUT + _WINDOWS[2], "self.o_proj(attn_output)")}
"""
_IF_NORMED = """
if self.qk_layernorm:
    query_states = self.q_layernorm(query_states)
    key_states = self.k_layernorm(key_states)
"""
_HEADS_AT_ONCE = """
query_states = self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)
key_states = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
"""
_PHIS_ATTENTION = f"""
input_shape = hidden_states.shape[:-1]
hidden_shape = (*input_shape, -1, self.head_dim)
{_HEADS_AT_ONCE}
{_IF_NORMED}
{_PARTLY_ROTATED}
{_attends(_SCALE + _DROPOUT, "self.dense(attn_output)")}
"""
_STABLE_LMS_ATTENTION = f"""
bsz, q_len, _ = hidden_states.size()
query_states = self.q_proj(hidden_states)
key_states = self.k_proj(hidden_states)
value_states = self.v_proj(hidden_states)
query_states = query_states.view(bsz, q_len, self.num_heads, self.head_dim).transpose(1, 2)
key_states = key_states.view(bsz, q_len, self.num_key_value_heads, self.head_dim).transpose(1, 2)
value_states = value_states.view(
    bsz, q_len, self.num_key_value_heads, self.head_dim
).transpose(1, 2)
{_IF_NORMED}
{_PARTLY_ROTATED}
{{interface}}
attn_output, attn_weights = attention_interface(
    self, query_states, key_states, value_states, attention_mask,
    {_SCALE + _DROPOUT} position_ids=position_ids, **kwargs
)
attn_output = attn_output.reshape(bsz, q_len, -1)
attn_output = self.o_proj(attn_output)
return attn_output, attn_weights
"""
_OLMO2S_ATTENTION = f"""
input_shape = hidden_states.shape[:-1]
hidden_shape = (*input_shape, -1, self.head_dim)
query_states = self.q_norm(self.q_proj(hidden_states))
key_states = self.k_norm(self.k_proj(hidden_states))
value_states = self.v_proj(hidden_states)
query_states = query_states.view(hidden_shape).transpose(1, 2)
key_states = key_states.view(hidden_shape).transpose(1, 2)
value_states = value_states.view(hidden_shape).transpose(1, 2)
{_ROTATED}
{_attends(_SCALE + _DROPOUT + "{options}", "self.o_proj(attn_output)")}
"""
_COHERES_ATTENTION = f"""
input_shape = hidden_states.shape[:-1]
hidden_shape = (*input_shape, -1, self.head_dim)
query_states = self.q_proj(hidden_states).view(hidden_shape)
key_states = self.k_proj(hidden_states).view(hidden_shape)
value_states = self.v_proj(hidden_states).view(hidden_shape)
if self.use_qk_norm:
    query_states = self.q_norm(query_states)
    key_states = self.k_norm(key_states)
query_states = query_states.transpose(1, 2)
key_states = key_states.transpose(1, 2)
value_states = value_states.transpose(1, 2)
{_ROTATED}
{_attends(_SCALE + _DROPOUT, "self.o_proj(attn_output)")}
"""
_GPTJS_ATTENTION = f"""
input_shape = hidden_states.shape[:-1]
hidden_shape = (*input_shape, -1, self.head_dim)
query = self.q_proj(hidden_states).view(hidden_shape)
key = self.k_proj(hidden_states).view(hidden_shape)
value = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
sin, cos = position_embeddings
if self.rotary_dim is not None:
    k_rot = key[:, :, :, : self.rotary_dim]
    k_pass = key[:, :, :, self.rotary_dim :]
    q_rot = query[:, :, :, : self.rotary_dim]
    q_pass = query[:, :, :, self.rotary_dim :]
    k_rot = apply_rotary_pos_emb(k_rot, sin, cos)
    q_rot = apply_rotary_pos_emb(q_rot, sin, cos)
    key = torch.cat([k_rot, k_pass], dim=-1)
    query = torch.cat([q_rot, q_pass], dim=-1)
else:
    key = apply_rotary_pos_emb(key, sin, cos)
    query = apply_rotary_pos_emb(query, sin, cos)
query = query.transpose(1, 2)
key = key.transpose(1, 2)
if cache is not None:
    {{update}}
{
    _attends(
        _SCALE + _DROPOUT,
        "self.out_proj(attn_output)",
        "self.resid_dropout(attn_output)",
        heads="query, key, value",
    )
}
"""
# Attentions of models in which some layers rotate nothing.
_SOMETIMES_ROTATED = f"""
input_shape = hidden_states.shape[:-1]
hidden_shape = (*input_shape, -1, self.head_dim)
{_HEADS_AT_ONCE}
{{rotated}}
if cache is not None:
    {{update}}
{_attends(_SCALE + _DROPOUT + "{options}", "self.o_proj(attn_output)")}
"""
_SMOLLM3S_ROTATION = """
if self.use_rope:
    cos, sin = position_embeddings
    query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
"""
_COHERE2S_ROTATION = """
cos, sin = position_embeddings
if self.sliding_window is not None:
    query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
"""
_EXAONE4S_ROTATION = f"""
{_GEMMAS_NORMS}
cos, sin = position_embeddings
if self.sliding_window is None or self.is_sliding:
    query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
"""
_EXAONE4S_WINDOW = "sliding_window=self.sliding_window if self.is_sliding else None,"
# The cache of a decoder's own tokens, perhaps one of a pair.
_OWN_CACHE = """
if cache is not None:
    if isinstance(cache, EncoderDecoderCache):
        is_updated = cache.is_updated.get(self.layer_idx)
        curr_cache = cache.self_attention_cache
    else:
        curr_cache = cache
"""
_MEMORY_CACHE = "is_updated = False" + _OWN_CACHE.replace("self_attention", "cross_attention")
_OWN_UPDATE = """
if cache is not None:
    key_states, value_states = curr_cache.update(
        key_states, value_states, self.layer_idx, kwargs=kwargs
    )
"""
# The keys and values of a decoder's own tokens, and those of a memory.
_OWN_KEYS = """
current_states = hidden_states
{keys}
{update}
"""
_MEMORY_KEYS = """
current_states = key_value_states
if {cached} and is_updated:
    key_states = {cache}.layers[self.layer_idx].keys
    value_states = {cache}.layers[self.layer_idx].values
else:
    {keys}
    {update}
"""
_MARKED = """
    if isinstance(cache, EncoderDecoderCache):
        cache.is_updated[self.layer_idx] = True
"""
_GPT2S_ATTENTION = """
{cache}
{keys}
shape_q = (*query_states.shape[:-1], -1, self.head_dim)
query_states = query_states.view(shape_q).transpose(1, 2)
{update}
using_eager = self.config._attn_implementation == "eager"
{interface}
if using_eager and self.reorder_and_upcast_attn:
    attn_output, attn_weights = self._upcast_and_reordered_attn(
        query_states, key_states, value_states, attention_mask
    )
else:
    attn_output, attn_weights = attention_interface(
        self,
        query_states,
        key_states,
        value_states,
        attention_mask,
        dropout=self.attn_dropout.p if self.training else 0.0,
        scaling=self.scaling,
        **kwargs,
    )
attn_output = attn_output.reshape(*attn_output.shape[:-2], -1).contiguous()
attn_output = self.c_proj(attn_output)
attn_output = self.resid_dropout(attn_output)
return attn_output, attn_weights
"""
_GPT2S_KEYS = """
shape_kv = (*key_states.shape[:-1], -1, self.head_dim)
key_states = key_states.view(shape_kv).transpose(1, 2)
value_states = value_states.view(shape_kv).transpose(1, 2)
"""
_GPT2S_OWN_KEYS = f"""
query_states, key_states, value_states = self.c_attn(hidden_states).split(self.split_size, dim=2)
{_GPT2S_KEYS}
"""
_GPT2S_MEMORY_KEYS = f"""
if not hasattr(self, "q_attn"):
    raise ValueError(
        "If class is used as cross attention, the weights `q_attn` have to be defined. "
        "Please make sure to instantiate class with `GPT2Attention(..., is_cross_attention=True)`."
    )
query_states = self.q_attn(hidden_states)
attention_mask = encoder_attention_mask
if cache is not None and is_updated:
    key_states = curr_cache.layers[self.layer_idx].keys
    value_states = curr_cache.layers[self.layer_idx].values
else:
    key_states, value_states = self.c_attn(encoder_hidden_states).split(self.split_size, dim=2)
    {textwrap.indent(_GPT2S_KEYS, "    ").strip()}
"""
_GPT2S_MEMORY_UPDATE = """
if cache is not None and not is_updated:
    key_states, value_states = curr_cache.update(
        key_states, value_states, self.layer_idx, kwargs=kwargs
    )
    cache.is_updated[self.layer_idx] = True
"""
_MPNETS_ATTENTION = """
input_shape = hidden_states.shape[:-1]
hidden_shape = (*input_shape, -1, self.attention_head_size)
q = self.q(hidden_states).view(hidden_shape).transpose(1, 2)
k = self.k(hidden_states).view(hidden_shape).transpose(1, 2)
v = self.v(hidden_states).view(hidden_shape).transpose(1, 2)
attention_scores = torch.matmul(q, k.transpose(-1, -2))
attention_scores = attention_scores / math.sqrt(self.attention_head_size)
if position_bias is not None:
    attention_scores += position_bias
if attention_mask is not None:
    attention_scores = attention_scores + attention_mask
attention_probs = nn.functional.softmax(attention_scores, dim=-1)
attention_probs = self.dropout(attention_probs)
c = torch.matmul(attention_probs, v)
c = c.permute(0, 2, 1, 3).contiguous()
new_c_shape = c.size()[:-2] + (self.all_head_size,)
c = c.view(*new_c_shape)
o = self.o(c)
outputs = (o, attention_probs) if output_attentions else (o,)
return outputs
"""
_T5S_ATTENTION = f"""
input_shape = hidden_states.shape[:-1]
hidden_shape = (*input_shape, -1, self.key_value_proj_dim)
past_seen_tokens = cache.get_seq_length(self.layer_idx) if cache is not None else 0
past_seen_tokens = (
    past_seen_tokens.clone() if isinstance(past_seen_tokens, torch.Tensor) else past_seen_tokens
)
query_states = self.q(hidden_states).view(hidden_shape).transpose(1, 2)
is_updated = False
if isinstance(cache, EncoderDecoderCache):
    is_updated = cache.is_updated.get(self.layer_idx)
    curr_cache = cache.{{cache}}_attention_cache
else:
    curr_cache = cache
{{keys}}
if position_bias is None:
    key_length = key_states.shape[-2]
    if not self.has_relative_attention_bias:
        position_bias = torch.zeros(
            (1, self.n_heads, input_shape[1], key_length),
            device=query_states.device,
            dtype=query_states.dtype,
        )
        if self.gradient_checkpointing and self.training:
            position_bias.requires_grad = True
    else:
        position_bias = self.compute_bias(
            input_shape[1],
            key_length,
            device=query_states.device,
            past_seen_tokens=past_seen_tokens,
        )
{
    _attends(
        _SCALE + _INNER_DROPOUT + "position_bias=position_bias,",
        "self.o(attn_output)",
        mask="mask",
        results="attn_output, position_bias, attn_weights",
    )
}
"""
# BART's attention has a cache in decoders, and may get another sequence. Others copy its code.
_BARTS_ATTENTION = f"""
input_shape = hidden_states.shape[:-1]
hidden_shape = (*input_shape, -1, self.head_dim)
query_states = {{query}}
{{cache}}
{{keys}}
{_attends(_INNER_DROPOUT + "{more}", "self.out_proj(attn_output)")}
"""
_T5S_KEYS = """
kv_shape = (*current_states.shape[:-1], -1, self.key_value_proj_dim)
key_states = self.k(current_states).view(kv_shape).transpose(1, 2)
value_states = self.v(current_states).view(kv_shape).transpose(1, 2)
"""
_QUERIES = "self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)"
_BARTS_KEYS = """
key_states = self.k_proj(current_states)
value_states = self.v_proj(current_states)
kv_shape = (*current_states.shape[:-1], -1, self.head_dim)
key_states = key_states.view(kv_shape).transpose(1, 2)
value_states = value_states.view(kv_shape).transpose(1, 2)
"""
_SPEECH_KEYS = """
kv_shape = {shape}
key_states = self.k_proj(current_states).view(kv_shape).transpose(1, 2){contiguous}
value_states = self.v_proj(current_states).view(kv_shape).transpose(1, 2){contiguous}
"""
_WITH_WEIGHTS = "scaling={scale}, output_attentions=output_attentions,"
_WHISPERS_QUERIES = (
    "(self.q_proj(hidden_states) * self.scaling).view(hidden_shape).transpose(1, 2).contiguous()"
)
_WHISPERS_CACHE = """
is_updated = False
if cache is not None and isinstance(cache, EncoderDecoderCache):
    is_updated = cache.is_updated.get(self.layer_idx)
    cache = cache.self_attention_cache
"""
_WHISPERS_MEMORY_CACHE = """
is_updated = False
if cache is not None and isinstance(cache, EncoderDecoderCache):
    is_updated = cache.is_updated.get(self.layer_idx)
    cache.is_updated[self.layer_idx] = True
    cache = cache.cross_attention_cache
"""
_OPTS_ATTENTION = f"""
bsz, tgt_len, _ = hidden_states.size()
query_states = self.q_proj(hidden_states) * self.scaling
query_states = query_states.view(bsz, -1, self.num_heads, self.head_dim).transpose(1, 2)
key_states = self.k_proj(hidden_states)
value_states = self.v_proj(hidden_states)
key_states = key_states.view(bsz, -1, self.num_heads, self.head_dim).transpose(1, 2)
value_states = value_states.view(bsz, -1, self.num_heads, self.head_dim).transpose(1, 2)
{{update}}
{_attends(_INNER_DROPOUT + "scaling=1.0,", "self.out_proj(attn_output)", shape="bsz, tgt_len")}
"""
# Without a rotation.
_PLAIN_ATTENTION = """
input_shape = hidden_states.shape[:-1]
hidden_shape = (*input_shape, -1, self.{head_dim})
{heads}
{interface}
attn_output, attn_weights = attention_interface(
    self,
    {query},
    {key},
    {value},
    attention_mask,
    dropout=0.0 if not self.training else self.{dropout},
    scaling=self.{scale},
    {more}
)
attn_output = attn_output.reshape(*input_shape, -1).contiguous()
attn_output = self.{output}(attn_output)
{after}
return attn_output, attn_weights
"""
_ALBERTS_NORM = """
attn_output = self.output_dropout(attn_output)
attn_output = self.LayerNorm(hidden_states + attn_output)
"""
_AT_ONCE = """
{query} = self.{q}(hidden_states).view({star}hidden_shape).transpose(1, 2)
{key} = self.{k}(hidden_states).view({star}hidden_shape).transpose(1, 2)
{value} = self.{v}(hidden_states).view({star}hidden_shape).transpose(1, 2)
"""
_ONE_AFTER_ANOTHER = """
{query} = self.{q}(hidden_states)
{key} = self.{k}(hidden_states)
{value} = self.{v}(hidden_states)
{query} = {query}.view(hidden_shape).transpose(1, 2)
{key} = {key}.view(hidden_shape).transpose(1, 2)
{value} = {value}.view(hidden_shape).transpose(1, 2)
"""

# The attentions of BERT's relatives, of which RemBERT's and MegatronBERT's are written out.
_REMBERTS_ATTENTION = f"""
input_shape = hidden_states.shape[:-1]
hidden_shape = (*input_shape, -1, self.attention_head_size)
{{query}}
is_updated = False
{_OWN_CACHE}
current_states = hidden_states
{{keys}}
{_OWN_UPDATE.replace("_states", "_layer")}
attention_scores = torch.matmul(query_layer, key_layer.transpose(-1, -2))
attention_scores = attention_scores / math.sqrt(self.attention_head_size)
if attention_mask is not None:
    attention_scores = attention_scores + attention_mask
attention_probs = nn.functional.softmax(attention_scores, dim=-1)
attention_probs = self.dropout(attention_probs)
context_layer = torch.matmul(attention_probs, value_layer)
context_layer = context_layer.permute(0, 2, 1, 3).contiguous()
new_context_layer_shape = context_layer.size()[:-2] + (self.all_head_size,)
context_layer = context_layer.view({{star}}new_context_layer_shape)
return context_layer, attention_probs
"""
_REMBERTS_QUERY = "query_layer = self.query(hidden_states).view(hidden_shape).transpose(1, 2)"
_REMBERTS_KEYS = """
kv_shape = (*current_states.shape[:-1], -1, self.attention_head_size)
key_layer = self.key(current_states).view(kv_shape).transpose(1, 2)
value_layer = self.value(current_states).view(kv_shape).transpose(1, 2)
"""
_MEGATRON_BERTS_QUERY = """
query_layer = self.query(hidden_states)
query_layer = query_layer.view(hidden_shape).transpose(1, 2)
"""
_MEGATRON_BERTS_KEYS = """
key_layer = self.key(current_states)
key_layer = key_layer.view(hidden_shape).transpose(1, 2)
value_layer = self.value(current_states)
value_layer = value_layer.view(hidden_shape).transpose(1, 2)
"""
_PRE_NORM_ROBERTAS_ATTENTION = f"""
input_shape = hidden_states.shape[:-1]
hidden_shape = (*input_shape, -1, self.attention_head_size)
query_layer = self.query(hidden_states).view(*hidden_shape).transpose(1, 2)
key_layer = self.key(hidden_states).view(*hidden_shape).transpose(1, 2)
value_layer = self.value(hidden_states).view(*hidden_shape).transpose(1, 2)
if cache is not None:
    current_cache = cache
    if isinstance(cache, EncoderDecoderCache):
        current_cache = cache.self_attention_cache
    key_layer, value_layer = current_cache.update(
        key_layer, value_layer, self.layer_idx, kwargs=kwargs
    )
{
    _attends(
        _SCALE + "dropout=0.0 if not self.training else self.dropout.p,",
        heads="query_layer, key_layer, value_layer",
    )
}
"""

_DINOV3S_ATTENTION = f"""
batch_size, patches, _ = hidden_states.size()
query_states = self.q_proj(hidden_states)
key_states = self.k_proj(hidden_states)
value_states = self.v_proj(hidden_states)
query_states = query_states.view(batch_size, patches, self.num_heads, self.head_dim).transpose(1, 2)
key_states = key_states.view(batch_size, patches, self.num_heads, self.head_dim).transpose(1, 2)
value_states = value_states.view(batch_size, patches, self.num_heads, self.head_dim).transpose(1, 2)
cos, sin = position_embeddings
query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
{_attends(_INNER_DROPOUT + _SCALE, "self.o_proj(attn_output)", shape="batch_size, patches")}
"""

_BLOOMS_ATTENTION = """
batch_size, q_length, _ = hidden_states.shape
fused_qkv = self.query_key_value(hidden_states)
query_layer, key_layer, value_layer = self._reshape(fused_qkv)
if cache is not None:
    key_layer, value_layer = cache.update(key_layer, value_layer, self.layer_idx{more})
query_layer = query_layer.reshape(batch_size * self.num_heads, -1, self.head_dim)
key_layer = key_layer.reshape(batch_size * self.num_heads, -1, self.head_dim).transpose(-1, -2)
value_layer = value_layer.reshape(batch_size * self.num_heads, -1, self.head_dim)
attention_scores = alibi.baddbmm(
    batch1=query_layer, batch2=key_layer, beta=self.beta, alpha=self.inv_norm_factor
)
attn_weights = attention_scores.view(batch_size, self.num_heads, q_length, -1)
if attention_mask is not None:
    attn_weights = attn_weights + attention_mask
attention_probs = F.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query_layer.dtype)
attention_probs = self.attention_dropout(attention_probs)
attention_probs_reshaped = attention_probs.view(batch_size * self.num_heads, q_length, -1)
context_layer = torch.bmm(attention_probs_reshaped, value_layer)
context_layer = self._merge_heads(context_layer)
if self.pretraining_tp > 1 and self.slow_but_exact:
    slices = self.hidden_size / self.pretraining_tp
    output_tensor = torch.zeros_like(context_layer)
    for i in range(self.pretraining_tp):
        output_tensor = output_tensor + F.linear(
            context_layer[:, :, int(i * slices) : int((i + 1) * slices)],
            self.dense.weight[:, int(i * slices) : int((i + 1) * slices)],
        )
else:
    output_tensor = self.dense(context_layer)
output_tensor = dropout_add(output_tensor, residual, self.hidden_dropout, self.training)
return output_tensor, attention_probs
"""
_BLOOMS_HEADS = """
batch_size, seq_length, three_times_hidden_size = fused_qkv.shape
fused_qkv = fused_qkv.view(batch_size, seq_length, self.num_heads, 3, self.head_dim)
query_layer = fused_qkv[..., 0, :].transpose(1, 2)
key_layer = fused_qkv[..., 1, :].transpose(1, 2)
value_layer = fused_qkv[..., 2, :].transpose(1, 2)
return query_layer, key_layer, value_layer
"""
_BLOOMS_MERGED = """
batch_size_and_num_heads, seq_length, _ = x.shape
batch_size = batch_size_and_num_heads // self.num_heads
x = x.view(batch_size, self.num_heads, seq_length, self.head_dim)
x = x.permute(0, 2, 1, 3)
return x.reshape(batch_size, seq_length, self.num_heads * self.head_dim)
"""
_MPTS_ATTENTION = """
batch_size, seq_length = hidden_states.shape[:2]
mixed_qkv = self.Wqkv(hidden_states)
if self.clip_qkv:
    mixed_qkv = mixed_qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
query_states, key_states, value_states = mixed_qkv.chunk(3, dim=2)
query_states = query_states.reshape(
    batch_size, seq_length, self.n_heads, self.head_dim
).transpose(1, 2)
key_states = key_states.reshape(
    batch_size, seq_length, self.n_heads, self.head_dim
).transpose(1, 2)
value_states = value_states.reshape(
    batch_size, seq_length, self.n_heads, self.head_dim
).transpose(1, 2)
if cache is not None:
    {update}
attention_scores = torch.matmul(query_states, key_states.transpose(-1, -2)) * self.softmax_scale
query_length = seq_length if cache is None else seq_length + cache.get_seq_length()
if position_bias is not None:
    if len(position_bias.shape) != 3:
        raise ValueError(
            f"Expecting position_bias shape to be 3 dimensions, got {{len(position_bias.shape)}}"
        )
    key_length = key_states.shape[-2]
    position_bias_query_index = max(0, position_bias.size(1) - query_length)
    position_bias_key_index = max(0, position_bias.size(2) - key_length)
    position_bias = position_bias[:, position_bias_query_index:, position_bias_key_index:]
    attention_scores = attention_scores + position_bias
if attention_mask is not None:
    attention_scores = attention_scores.masked_fill(
        attention_mask, torch.finfo(query_states.dtype).min
    )
attn_weights = nn.functional.softmax(attention_scores.float(), dim=-1).to(value_states.dtype)
context_states = torch.matmul(attn_weights, value_states)
context_states = context_states.permute(0, 2, 1, 3).contiguous().view(batch_size, seq_length, -1)
attn_output = self.out_proj(context_states)
return attn_output, attn_weights
"""
_ESMS_ATTENTION = f"""
input_shape = hidden_states.shape[:-1]
hidden_shape = (*input_shape, -1, self.attention_head_size)
query_layer = self.query(hidden_states).view(hidden_shape).transpose(1, 2)
current_states = hidden_states
attention_mask = attention_mask
key_layer = self.key(current_states).view(hidden_shape).transpose(1, 2)
value_layer = self.value(current_states).view(hidden_shape).transpose(1, 2)
query_layer = query_layer * self.attention_head_size**-0.5
if self.position_embedding_type == "rotary":
    cos, sin = position_embeddings
    query_layer, key_layer = apply_rotary_pos_emb(
        query_layer, key_layer, cos, sin, unsqueeze_dim=1
    )
{_attends(_SCALE + _INNER_DROPOUT, heads="query_layer, key_layer, value_layer")}
"""


def _berts_attentions() -> dict[str, Attention]:
    """Return the attentions of BERT's relatives."""
    rembert = _REMBERTS_ATTENTION.format(query=_REMBERTS_QUERY, keys=_REMBERTS_KEYS, star="*")
    megatron = _REMBERTS_ATTENTION.format(
        query=_MEGATRON_BERTS_QUERY, keys=_MEGATRON_BERTS_KEYS, star=""
    )
    roberta = _PRE_NORM_ROBERTAS_ATTENTION.format(interface=_BY_METHOD)
    written = Attention(
        (),
        scale=None,
        head_dim="attention_head_size",
        takes_options=False,
        dispatches=False,
    )
    robertas = (PRE_NORM_ROBERTAS, XL_ROBERTAS)
    return {
        normal(rembert): written._replace(of=(REMBERTS,)),
        normal(megatron): written._replace(of=(MEGATRON_BERTS,)),
        normal(roberta): Attention(robertas, head_dim="attention_head_size"),
        normal(_ESMS_ATTENTION.format(interface=_BY_METHOD)): Attention(
            (ESMS,), scale=None, scales_queries=True, head_dim="attention_head_size"
        ),
    }


def _alibi_attentions() -> dict[str, Attention]:
    """Return the attentions with ALiBi, which are written out."""
    written = Attention((), takes_options=False, dispatches=False)
    bloom = written._replace(
        of=(BLOOMS,),
        scale="inv_norm_factor",
        methods=(("_reshape", normal(_BLOOMS_HEADS)), ("_merge_heads", normal(_BLOOMS_MERGED))),
    )
    mpt = written._replace(of=(MPTS,), scale="softmax_scale")
    return {
        **{normal(_BLOOMS_ATTENTION.format(more=more)): bloom for more in ("", ", kwargs=kwargs")},
        **{normal(_MPTS_ATTENTION.format(update=update)): mpt for update in _UPDATES[:2]},
    }


def _plain_attention(
    names: Names,
    form: Attention,
    variables: str,
    heads: str,
    dropout: str,
    star: str = "",
    after: str = "",
) -> str:
    """The statements of an attention without a rotation.

    Args:
        names, form: of its family.
        variables: those for queries, keys and values.
        heads: the statements that compute them.
        dropout: the attribute with the probability.
        star: whether view() gets a shape's sizes, "*", or the shape, "".
        after: the statements after its output.
    """
    parts = dict(zip("qkv", names.projections, strict=True))
    parts |= dict(zip(("query", "key", "value"), variables.split(), strict=True))
    parts |= {"output": names.output, "head_dim": form.head_dim, "scale": str(form.scale)}
    parts |= {"dropout": dropout, "star": star, "after": after, "interface": _BY_METHOD}
    parts["more"] = "**kwargs," if form.takes_options else "is_causal=self.is_causal,"
    return normal(_PLAIN_ATTENTION.format(heads=heads.format(**parts), **parts))


def _keys(statements: str, memory: bool, of_whisper: bool = False) -> str:
    """Return the statements that compute keys and values, with a cache."""
    cache = "cache" if of_whisper else "curr_cache"
    update = _OWN_UPDATE.replace("curr_cache", cache)
    if not memory:
        return _OWN_KEYS.format(keys=statements, update=update)
    cached = "cache" if of_whisper else "cache is not None"
    return _MEMORY_KEYS.format(
        cached=cached,
        cache=cache,
        keys=textwrap.indent(statements, "    ").strip(),
        update=textwrap.indent(update if of_whisper else update + _MARKED, "    ").strip(),
    )


def _barts_attentions(memory: bool = False) -> dict[str, Attention]:
    """Return the attentions of BART's kind."""
    cache = _MEMORY_CACHE if memory else f"is_updated = False{_OWN_CACHE}"
    usual = {"query": _QUERIES, "cache": cache}
    usual |= {"interface": _BY_METHOD, "more": "scaling=self.scaling,"}
    shape = "(*current_states.shape[:-1], -1, self.head_dim)"
    speech = usual | {"more": _WITH_WEIGHTS.format(scale="self.scaling")}
    usual["keys"] = _keys(_BARTS_KEYS, memory)
    speech_keys = _SPEECH_KEYS.format(shape=shape, contiguous="")
    speech["keys"] = _keys(speech_keys, memory)
    alone = speech | {"cache": "", "keys": f"current_states = hidden_states\n{speech_keys}"}
    shape = "(input_shape[0], -1, self.num_heads, self.head_dim)"
    whisper = usual | {"more": _WITH_WEIGHTS.format(scale="1.0"), "query": _WHISPERS_QUERIES}
    whisper["cache"] = _WHISPERS_MEMORY_CACHE if memory else _WHISPERS_CACHE
    whisper_keys = _SPEECH_KEYS.format(shape=shape, contiguous=".contiguous()")
    whisper["keys"] = _keys(whisper_keys, memory, of_whisper=True)
    of_both = Attention((BARTS, MBARTS))
    forms = [
        (usual, of_both),
        (speech, of_both),
        (whisper, Attention((MBARTS,), scales_queries=True)),
    ]
    if not memory:
        forms.append((alone, Attention((WAV2VEC2S, STABLE_WAV2VEC2S))))
    return {normal(_BARTS_ATTENTION.format(**parts), memory): form for parts, form in forms}


def _t5s_attention(memory: bool = False) -> dict[str, Attention]:
    text = _T5S_ATTENTION.format(
        cache="cross" if memory else "self", keys=_keys(_T5S_KEYS, memory), interface=_BY_METHOD
    )
    decoders = T5_DECODERS, GATED_T5_DECODERS
    of = decoders if memory else (T5S, GATED_T5S, *decoders)
    return {normal(text, memory): Attention(of, head_dim="key_value_proj_dim")}


def _gpt2s_attention(memory: bool = False) -> dict[str, Attention]:
    parts = {"cache": _OWN_CACHE, "keys": _GPT2S_OWN_KEYS, "update": _OWN_UPDATE}
    if memory:
        parts["cache"] = _OWN_CACHE.replace("self_attention", "cross_attention")
        parts |= {"keys": _GPT2S_MEMORY_KEYS, "update": _GPT2S_MEMORY_UPDATE}
    text = _GPT2S_ATTENTION.format(interface=_BY_METHOD, **parts)
    return {normal(text, memory): Attention((GPT2S,))}


def _further_attentions() -> dict[str, Attention]:
    """Return the attentions of Phi, StableLM, OLMo 2, Cohere, and those that may not rotate."""
    norms = ("q_norm", "k_norm")
    layer_norms = ("q_layernorm", "k_layernorm")
    phi = Attention((PHIS,), layer_norms, head_norms_if="qk_layernorm", rotary_dim="rotary_ndims")
    olmo2 = Attention((OLMO2S,), norms, heads_normed_together=True)
    smollm3 = Attention((LLAMAS,), rotates=lambda attention: bool(attention.use_rope))
    cohere2 = Attention((COHERES,), rotates=lambda attention: attention.sliding_window is not None)
    exaone4 = Attention(
        (OLMO2S,),
        norms,
        rotates=lambda attention: attention.sliding_window is None or attention.is_sliding,
    )
    always = (
        (_PHIS_ATTENTION, "", phi),
        (_STABLE_LMS_ATTENTION, "", phi._replace(of=(STABLE_LMS,), takes_options=False)),
        (_OLMO2S_ATTENTION, "", olmo2),
        (_OLMO2S_ATTENTION, _WINDOWS[1], olmo2),
        (_COHERES_ATTENTION, "", Attention((COHERES,), norms, head_norms_if="use_qk_norm")),
    )
    sometimes = (
        (_SMOLLM3S_ROTATION, _WINDOWS[1], smollm3),
        (_COHERE2S_ROTATION, _WINDOWS[1], cohere2),
        (_EXAONE4S_ROTATION, _EXAONE4S_WINDOW, exaone4),
    )
    versions = [*((update, _BY_METHOD) for update in _UPDATES), (_UPDATES[2], _BY_NAME)]
    by_places = [(_UPDATE_BY_PLACES, interface) for interface in (_BY_METHOD, _BY_NAME)]
    found = {}
    for (text, options, form), (update, interface) in itertools.product(always, versions):
        statements = text.format(options=options, update=update, interface=interface)
        found[normal(statements)] = form
    for (rotated, options, form), (update, interface) in itertools.product(
        sometimes, versions + by_places
    ):
        statements = _SOMETIMES_ROTATED.format(
            rotated=rotated, options=options, update=update, interface=interface
        )
        found[normal(statements)] = form
    return found


@functools.cache
def _known_attentions() -> dict[str, Attention]:
    query, key = (_HEADS.format(name) for name in "qk")
    heads = {
        (): (query, key),
        ("q_norm", "k_norm"): (f"self.q_norm({query})", f"self.k_norm({key})"),
    }
    found = {}
    for (head_norms, (q, k)), update, interface, window in itertools.product(
        heads.items(), _UPDATES, (_BY_METHOD, _BY_NAME), _WINDOWS
    ):
        statements = _LLAMAS_ATTENTION.format(
            query=q,
            key=k,
            normed="",
            update=update,
            interface=interface,
            options=_DROPOUT + window,
        )
        of = (LLAMAS, GRANITES, GLMS, GLM4S)
        found[normal(statements)] = Attention(of, head_norms)
    gemma2 = Attention((GEMMAS,), softcap="attn_logit_softcapping")
    gemma3 = Attention((GEMMAS,), ("q_norm", "k_norm"))
    for (form, normed, softcap), update, interface in itertools.product(
        (
            (gemma2, "", "softcap=self.attn_logit_softcapping,"),
            (gemma3, _GEMMAS_NORMS, ""),
        ),
        _UPDATES,
        (_BY_METHOD, _BY_NAME),
    ):
        statements = _LLAMAS_ATTENTION.format(
            query=query,
            key=key,
            normed=normed,
            update=update,
            interface=interface,
            options=_OTHER_DROPOUT + _WINDOWS[1] + softcap,
        )
        found[normal(statements)] = form
    for update, interface in itertools.product(_UPDATES, (_BY_METHOD, _BY_NAME)):
        statements = _NEOXS_ATTENTION.format(update=update, interface=interface)
        found[normal(statements)] = Attention((NEOXS,), head_dim="head_size")
    for update, interface in itertools.product(_UPDATES, (_BY_METHOD, _BY_NAME)):
        statements = _PHI3S_ATTENTION.format(update=update, interface=interface)
        found[normal(statements)] = Attention((PHI3S,), key_heads="num_key_value_heads")
    for interface in (_BY_METHOD, _BY_NAME):
        statements = _MODERN_BERTS_ATTENTION.format(interface=interface)
        found[normal(statements)] = Attention((MODERN_BERTS,), scale=None)
    clip = Attention((CLIPS,), scale="scale")
    vit = Attention((VITS, DINOV2S, GATED_DINOV2S, BEITS))
    siglip = clip._replace(takes_options=False)
    distilbert = Attention((DISTILBERTS,), head_dim="attention_head_size")
    albert = Attention((ALBERTS,), head_dim="attention_head_size")
    plural = "queries keys values"
    states, layers = (f"query_{end} key_{end} value_{end}" for end in ("states", "layer"))
    alberts = "attention_dropout.p", "*", _ALBERTS_NORM
    mpnet = Attention(
        (MPNETS,),
        scale=None,
        head_dim="attention_head_size",
        takes_options=False,
        dispatches=False,
    )
    gptj = _GPTJS_ATTENTION.format(
        interface=_BY_METHOD,
        update="key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)",
    )
    of_gptj = Attention((GPTJS,), rotary_dim="rotary_dim", rotated_at_once=1, head_dimension=2)
    opt = _OPTS_ATTENTION.format(
        update=_OWN_UPDATE.replace("curr_cache", "cache"), interface=_BY_METHOD
    )
    return found | {
        **_barts_attentions(),
        **_t5s_attention(),
        **_further_attentions(),
        **_berts_attentions(),
        **_alibi_attentions(),
        normal(_DINOV3S_ATTENTION.format(interface=_BY_METHOD)): Attention(
            (DINOV3S, GATED_DINOV3S)
        ),
        normal(opt): Attention((OPTS,), scales_queries=True),
        **_gpt2s_attention(),
        normal(gptj): of_gptj,
        normal(_MPNETS_ATTENTION): mpnet,
        _plain_attention(CLIPS, clip, plural, _ONE_AFTER_ANOTHER, "dropout"): clip,
        _plain_attention(CLIPS, siglip, plural, _AT_ONCE, "dropout"): siglip,
        _plain_attention(VITS, vit, states, _AT_ONCE, "attention_dropout"): vit,
        _plain_attention(ALBERTS, albert, layers, _AT_ONCE, *alberts): albert,
        _plain_attention(DISTILBERTS, distilbert, layers, _AT_ONCE, "dropout.p", "*"): distilbert,
    }


@functools.cache
def _attentions_to_memory() -> dict[str, Attention]:
    of_gpt2 = _gpt2s_attention(memory=True)
    return _barts_attentions(memory=True) | _t5s_attention(memory=True) | of_gpt2
