"""The code of the attentions of such layers: see :mod:`trifuse.recipes.known_code`."""

from __future__ import annotations

import itertools
import textwrap
from typing import Any, NamedTuple

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


class Attention(NamedTuple):
    """The properties of an attention that the statements of its ``forward`` show."""

    of: tuple[Names, ...]  # the families that have it
    head_norms: tuple[str, ...] = ()
    scale: str | None = "scaling"  # the attribute with the scale; None: it is 1 / √head_dim
    scales_queries: bool = False  # whether queries, not their products with keys, are scaled
    head_dim: str = "head_dim"  # the attribute with the number of features of a head
    # The attribute with the number of key heads of a joint projection. None: that of query heads.
    key_heads: str | None = None
    softcap: str | None = None  # the attribute with the bound of scores
    takes_options: bool = True  # whether further arguments of the layer reach the operator
    dispatches: bool = True  # whether it runs by ``attn_implementation``, and isn't written out


def attention_of(cls: Any, memory: bool = False) -> Attention | None:
    """The properties of an attention whose class has a known ``forward``; None for others.

    Args:
        cls: the class.
        memory: whether it attends to another sequence, whose keys and values a cache holds.
    """
    attentions = _ATTENTIONS_TO_MEMORY if memory else _ATTENTIONS
    return attentions.get(known_statements.of_class(cls, memory=memory))


# The end of most attentions. The order of the options doesn't matter.
_ATTENDS = """
{{interface}}
attn_output, attn_weights = attention_interface(
    self, query_states, key_states, value_states, {mask}, {options} **kwargs
)
attn_output = attn_output.reshape({shape}, -1).contiguous()
attn_output = {output}
return {results}
"""


def _attends(
    options: str,
    output: str,
    mask: str = "attention_mask",
    shape: str = "*input_shape",
    results: str = "attn_output, attn_weights",
) -> str:
    """Return the statements from the choice of the operator on, with a placeholder for it.

    Args:
        options: the arguments with names, each with a comma after it.
        output: what is computed from the result's features.
        mask: the argument with the mask.
        shape: the sizes before those features.
        results: what the attention returns.
    """
    parts = {"options": options, "mask": mask, "shape": shape, "results": results}
    return _ATTENDS.format(output=output, **parts)


_ROTATED = """
cos, sin = position_embeddings
query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
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
query_states, key_states, value_states = self.c_attn(hidden_states).split(self.split_size, dim=2)
shape_kv = (*key_states.shape[:-1], -1, self.head_dim)
key_states = key_states.view(shape_kv).transpose(1, 2)
value_states = value_states.view(shape_kv).transpose(1, 2)
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
        found[normal(statements)] = Attention((LLAMAS,), head_norms)
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
    clip, vit = Attention((CLIPS,), scale="scale"), Attention((VITS,))
    siglip = clip._replace(takes_options=False)
    distilbert = Attention((DISTILBERTS,), head_dim="attention_head_size")
    albert = Attention((ALBERTS,), head_dim="attention_head_size")
    plural = "queries keys values"
    states, layers = (f"query_{end} key_{end} value_{end}" for end in ("states", "layer"))
    alberts = "attention_dropout.p", "*", _ALBERTS_NORM
    gpt2 = _GPT2S_ATTENTION.format(cache=_OWN_CACHE, update=_OWN_UPDATE, interface=_BY_METHOD)
    mpnet = Attention(
        (MPNETS,),
        scale=None,
        head_dim="attention_head_size",
        takes_options=False,
        dispatches=False,
    )
    opt = _OPTS_ATTENTION.format(
        update=_OWN_UPDATE.replace("curr_cache", "cache"), interface=_BY_METHOD
    )
    return found | {
        **_barts_attentions(),
        **_t5s_attention(),
        normal(opt): Attention((OPTS,), scales_queries=True),
        normal(gpt2): Attention((GPT2S,)),
        normal(_MPNETS_ATTENTION): mpnet,
        _plain_attention(CLIPS, clip, plural, _ONE_AFTER_ANOTHER, "dropout"): clip,
        _plain_attention(CLIPS, siglip, plural, _AT_ONCE, "dropout"): siglip,
        _plain_attention(VITS, vit, states, _AT_ONCE, "attention_dropout"): vit,
        _plain_attention(ALBERTS, albert, layers, _AT_ONCE, *alberts): albert,
        _plain_attention(DISTILBERTS, distilbert, layers, _AT_ONCE, "dropout.p", "*"): distilbert,
    }


_ATTENTIONS = _known_attentions()
_ATTENTIONS_TO_MEMORY = _barts_attentions(memory=True) | _t5s_attention(memory=True)
