"""The code of layers that run as one op: see :mod:`trifuse.recipes.known_layers`.

Each form is written as transformers writes it, without comments and annotations. Forms of several
families and versions that differ in a few places are made from one text.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
from typing import Any, NamedTuple

from trifuse.recipes import code, sublayers
from trifuse.recipes.arguments import BIAS, HIDDEN_STATES


class Names(NamedTuple):
    """The names, or paths, that a library gives to the modules of such a layer."""

    attention: str
    projections: tuple[str, ...]  # of the attention
    output: str
    network: str  # "": the layer itself holds the network's modules
    up: str  # of the network
    factor: str | None  # the linear layer whose result multiplies the activation
    down: str
    activation: str
    norms: tuple[str, str]
    dropouts: tuple[str, ...] = ()  # the paths of the dropouts
    rotates: bool = True  # whether queries and keys are rotated by their positions
    norm_first: bool = True
    in_chunks: bool = False  # whether the network may run on one part of the tokens after another
    takes_cache: bool = False  # whether the parts append to a cache, and don't ignore it
    holders: tuple[str, ...] = ()  # further modules whose ``forward`` must be known
    takes_bias: bool = False  # whether layers share a bias of relative positions
    # The names of what a layer returns as a tuple; None: only its output.
    returns: tuple[str | None, ...] | None = None


_LLAMAS = Names(
    "self_attn",
    ("q_proj", "k_proj", "v_proj"),
    "o_proj",
    "mlp",
    "gate_proj",
    "up_proj",
    "down_proj",
    "act_fn",
    ("input_layernorm", "post_attention_layernorm"),
    takes_cache=True,
)
_MODERN_BERTS = Names(
    "attn",
    ("Wqkv",),
    "Wo",
    "mlp",
    "Wi",
    "Wi",
    "Wo",
    "act",
    ("attn_norm", "mlp_norm"),
    ("attn.out_drop", "mlp.drop"),
)
_CLIPS = Names(
    "self_attn",
    ("q_proj", "k_proj", "v_proj"),
    "out_proj",
    "mlp",
    "fc1",
    None,
    "fc2",
    "activation_fn",
    ("layer_norm1", "layer_norm2"),
    rotates=False,
)
_GPT2S = Names(
    "attn",
    ("c_attn",),
    "c_proj",
    "mlp",
    "c_fc",
    None,
    "c_proj",
    "act",
    ("ln_1", "ln_2"),
    ("attn.resid_dropout", "mlp.dropout"),
    rotates=False,
    takes_cache=True,
)
_VITS = _CLIPS._replace(
    attention="attention",
    output="o_proj",
    norms=("layernorm_before", "layernorm_after"),
    dropouts=("dropout",),
)
_DISTILBERTS = Names(
    "attention",
    ("q_lin", "k_lin", "v_lin"),
    "out_lin",
    "ffn",
    "lin1",
    None,
    "lin2",
    "activation",
    ("sa_layer_norm", "output_layer_norm"),
    ("ffn.dropout",),
    rotates=False,
    norm_first=False,
    in_chunks=True,
)
_MPNETS = Names(
    "attention.attn",
    ("q", "k", "v"),
    "o",
    "",
    "intermediate.dense",
    None,
    "output.dense",
    "intermediate.intermediate_act_fn",
    ("attention.LayerNorm", "output.LayerNorm"),
    ("attention.attn.dropout", "attention.dropout", "output.dropout"),
    rotates=False,
    norm_first=False,
    holders=("attention", "intermediate", "output"),
    takes_bias=True,
    returns=(HIDDEN_STATES,),
)
_T5S = Names(
    "layer.0.SelfAttention",
    ("q", "k", "v"),
    "o",
    "layer.1.DenseReluDense",
    "wi",
    None,
    "wo",
    "act",
    ("layer.0.layer_norm", "layer.1.layer_norm"),
    ("layer.0.dropout", "layer.1.DenseReluDense.dropout", "layer.1.dropout"),
    rotates=False,
    holders=("layer.0", "layer.1"),
    takes_bias=True,
    returns=(HIDDEN_STATES, BIAS, None),
)
_GATED_T5S = _T5S._replace(up="wi_0", factor="wi_1")


class Attention(NamedTuple):
    """The properties of an attention that the statements of its ``forward`` show."""

    of: tuple[Names, ...]  # the families that have it
    head_norms: tuple[str, ...] = ()
    scale: str | None = "scaling"  # the attribute with the scale; None: it is 1 / √head_dim
    head_dim: str = "head_dim"  # the attribute with the number of features of a head
    takes_options: bool = True  # whether further arguments of the layer reach the operator
    dispatches: bool = True  # whether it runs by ``attn_implementation``, and isn't written out


def layer_of(cls: Any) -> Names | None:
    """The names in a layer whose class has a known ``forward``; None for others."""
    return _LAYERS.get(_statements_of(cls))


def attention_of(cls: Any) -> Attention | None:
    """The properties of an attention whose class has a known ``forward``; None for others."""
    return _ATTENTIONS.get(_statements_of(cls))


def with_network(cls: Any, names: Names) -> Names | None:
    """The names in a layer whose network has a class; None if its code isn't known.

    Args:
        cls: the network's class.
        names: those that :func:`layer_of` returned.
    """
    methods = ("forward", "ff_chunk") if names.in_chunks else ("forward",)
    return _NETWORKS.get(_statements_of(cls, *methods), {}).get(names)


def is_holder(cls: Any, names: Names, path: str) -> bool:
    """Whether a class has the known code of the module at ``path``, one of ``names.holders``."""
    return _statements_of(cls) == _HOLDERS[names, path]


def _statements_of(cls: Any, *methods: str) -> str:
    """The statements of methods of a class of transformers, by default ``forward``.

    Returns:
        "" for other classes, and if statements can't be read.
    """
    if not sublayers.is_of_transformers(cls):
        return ""
    found = [_statements(getattr(cls, name, None)) for name in methods or ("forward",)]
    return "\n".join(found) if all(found) else ""


class _Normal(ast.NodeTransformer):
    """Removes differences between versions of transformers that do not change the meaning."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name("cache", node.ctx) if node.id == "past_key_values" else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        for each in node.keywords:
            each.arg = "cache" if each.arg == "past_key_values" else each.arg
        node.keywords.sort(key=lambda each: (each.arg is None, each.arg))
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        return ast.Assign([node.target], node.value or ast.Constant(None))


class _WithoutMemory(ast.NodeTransformer):
    """Leaves what a function runs if its argument ``encoder_hidden_states`` is None."""

    def __init__(self) -> None:
        self.known: dict[str, bool] = {}  # variables with a constant value

    def visit_Module(self, node: ast.Module) -> ast.AST:
        body: list[ast.stmt] = []
        for each in node.body:
            statement = self.visit(each)
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
                target = statement.targets[0]
                if isinstance(target, ast.Name) and isinstance(statement.value.value, bool):
                    self.known[target.id] = statement.value.value
                    continue
            body += statement if isinstance(statement, list) else [statement]
        return ast.Module(body, [])

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if isinstance(node.ctx, ast.Store):
            self.known.pop(node.id, None)
        return ast.Constant(self.known[node.id]) if node.id in self.known else node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        text = ast.unparse(node).removeprefix("encoder_hidden_states is ")
        return ast.Constant(text == "None") if text in ("None", "not None") else node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        negates = isinstance(node.op, ast.Not) and isinstance(node.operand, ast.Constant)
        if not negates:
            return node
        return ast.Constant(not node.operand.value)  # type: ignore[attr-defined]

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        absorbing = isinstance(node.op, ast.Or)
        constants = [each.value for each in node.values if isinstance(each, ast.Constant)]
        others = [each for each in node.values if not isinstance(each, ast.Constant)]
        if absorbing in constants or not others:
            return ast.Constant(absorbing if absorbing in constants else not absorbing)
        return others[0] if len(others) == 1 else ast.BoolOp(node.op, others)

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        if not isinstance(node.test, ast.Constant):
            return node
        return node.body if node.test.value else node.orelse


def normal(statements: str) -> str:
    """Return statements in the form in which they are compared."""
    tree = _WithoutMemory().visit(_Normal().visit(ast.parse(statements)))
    return ast.unparse(ast.fix_missing_locations(tree))


@functools.cache
def _statements(function: Any) -> str:
    """The statements of a function in normal form; "" if they can't be read."""
    if not inspect.isfunction(function):
        return ""
    body = code.body(function)
    return "" if body is None else normal(body)


# Llama's and CLIP's.
_PRE_NORM_LAYER = """
residual = hidden_states
hidden_states = self.{names.norms[0]}(hidden_states)
hidden_states, _ = self.{names.attention}(
    hidden_states=hidden_states,
    attention_mask=attention_mask,
    {more}
    **kwargs,
)
hidden_states = residual + hidden_states
residual = hidden_states
hidden_states = self.{names.norms[1]}(hidden_states)
hidden_states = self.{names.network}(hidden_states)
hidden_states = residual + hidden_states
return hidden_states
"""
_LLAMAS_ARGUMENTS = """
    position_ids=position_ids,
    cache=cache,
    use_cache=use_cache,
    position_embeddings=position_embeddings,
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
_CLAMPED = """
if hidden_states.dtype == torch.float16:
    clamp_value = torch.where(
        torch.isinf(hidden_states).any(),
        torch.finfo(hidden_states.dtype).max - 1000,
        torch.finfo(hidden_states.dtype).max,
    )
    hidden_states = torch.clamp(hidden_states, min=-clamp_value, max=clamp_value)
"""
_T5S_LAYER = f"""
hidden_states, self_attn_position_bias, _ = self.layer[0](
    hidden_states,
    attention_mask=attention_mask,
    position_bias=position_bias,
    cache=cache,
    **kwargs,
)
{_CLAMPED}
cross_attn_position_bias = None
hidden_states = self.layer[-1](hidden_states)
{_CLAMPED}
return hidden_states, self_attn_position_bias, cross_attn_position_bias
"""
_LAYERS = {
    normal(_PRE_NORM_LAYER.format(names=_LLAMAS, more=_LLAMAS_ARGUMENTS + more)): _LLAMAS
    for more in ("", "cache_position=cache_position,")
} | {
    normal(_MODERN_BERTS_LAYER): _MODERN_BERTS,
    normal(_GPT2S_LAYER): _GPT2S,
    normal(_PRE_NORM_LAYER.format(names=_CLIPS, more="")): _CLIPS,
    normal(_VITS_LAYER): _VITS,
    normal(_DISTILBERTS_LAYER): _DISTILBERTS,
    normal(_MPNETS_LAYER): _MPNETS,
    normal(_T5S_LAYER): _T5S,
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
_T5S_FEED_FORWARD = """
forwarded_states = self.layer_norm(hidden_states)
forwarded_states = self.DenseReluDense(forwarded_states)
hidden_states = hidden_states + self.dropout(forwarded_states)
return hidden_states
"""
_HOLDERS = {
    (_MPNETS, "attention"): normal(_MPNETS_ATTENTION_AND_NORM),
    (_MPNETS, "intermediate"): normal(_MPNETS_INTERMEDIATE),
    (_MPNETS, "output"): normal(_MPNETS_OUTPUT),
    (_T5S, "layer.0"): normal(_T5S_SELF_ATTENTION),
    (_T5S, "layer.1"): normal(_T5S_FEED_FORWARD),
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
# By the code, the names of the layers that have it, before and after the network is known.
_NETWORKS = {
    normal(_LLAMAS_NETWORK): {_LLAMAS: _LLAMAS},
    normal(_MODERN_BERTS_NETWORK): {_MODERN_BERTS: _MODERN_BERTS},
    normal(_GPT2S_NETWORK): {_GPT2S: _GPT2S},
    normal(_CLIPS_NETWORK): {_CLIPS: _CLIPS, _VITS: _VITS},
    normal(_DISTILBERTS_NETWORK): {_DISTILBERTS: _DISTILBERTS},
    normal(_T5S_NETWORK): {_T5S: _T5S},
    normal(_GATED_T5S_NETWORK): {_T5S: _GATED_T5S},
}

_LLAMAS_ATTENTION = """
input_shape = hidden_states.shape[:-1]
hidden_shape = (*input_shape, -1, self.head_dim)
query_states = {query}.transpose(1, 2)
key_states = {key}.transpose(1, 2)
value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
cos, sin = position_embeddings
query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
if cache is not None:
    {update}
{interface}
attn_output, attn_weights = attention_interface(
    self,
    query_states,
    key_states,
    value_states,
    attention_mask,
    dropout=0.0 if not self.training else self.attention_dropout,
    scaling=self.scaling,
    {window}
    **kwargs,
)
attn_output = attn_output.reshape(*input_shape, -1).contiguous()
attn_output = self.o_proj(attn_output)
return attn_output, attn_weights
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
_MODERN_BERTS_ATTENTION = """
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
{interface}
attn_output, attn_weights = attention_interface(
    self,
    query_states,
    key_states,
    value_states,
    attention_mask,
    dropout=self.attention_dropout if self.training else 0.0,
    scaling=self.head_dim**-0.5,
    sliding_window=self.sliding_window,
    deterministic=self.deterministic_flash_attn,
    **kwargs,
)
attn_output = attn_output.reshape(*input_shape, -1).contiguous()
attn_output = self.out_drop(self.Wo(attn_output))
return attn_output, attn_weights
"""


_GPT2S_ATTENTION = """
if cache is not None:
    if isinstance(cache, EncoderDecoderCache):
        is_updated = cache.is_updated.get(self.layer_idx)
        curr_cache = cache.self_attention_cache
    else:
        curr_cache = cache
query_states, key_states, value_states = self.c_attn(hidden_states).split(self.split_size, dim=2)
shape_kv = (*key_states.shape[:-1], -1, self.head_dim)
key_states = key_states.view(shape_kv).transpose(1, 2)
value_states = value_states.view(shape_kv).transpose(1, 2)
shape_q = (*query_states.shape[:-1], -1, self.head_dim)
query_states = query_states.view(shape_q).transpose(1, 2)
if cache is not None:
    key_states, value_states = curr_cache.update(
        key_states, value_states, self.layer_idx, kwargs=kwargs
    )
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
_T5S_ATTENTION = """
input_shape = hidden_states.shape[:-1]
hidden_shape = (*input_shape, -1, self.key_value_proj_dim)
past_seen_tokens = cache.get_seq_length(self.layer_idx) if cache is not None else 0
past_seen_tokens = (
    past_seen_tokens.clone() if isinstance(past_seen_tokens, torch.Tensor) else past_seen_tokens
)
is_cross_attention = key_value_states is not None
query_states = self.q(hidden_states).view(hidden_shape).transpose(1, 2)
is_updated = False
if isinstance(cache, EncoderDecoderCache):
    is_updated = cache.is_updated.get(self.layer_idx)
    if is_cross_attention:
        curr_cache = cache.cross_attention_cache
    else:
        curr_cache = cache.self_attention_cache
else:
    curr_cache = cache
current_states = key_value_states if is_cross_attention else hidden_states
if is_cross_attention and cache is not None and is_updated:
    key_states = curr_cache.layers[self.layer_idx].keys
    value_states = curr_cache.layers[self.layer_idx].values
else:
    kv_shape = (*current_states.shape[:-1], -1, self.key_value_proj_dim)
    key_states = self.k(current_states).view(kv_shape).transpose(1, 2)
    value_states = self.v(current_states).view(kv_shape).transpose(1, 2)
    if cache is not None:
        key_states, value_states = curr_cache.update(
            key_states, value_states, self.layer_idx, kwargs=kwargs
        )
        if is_cross_attention and isinstance(cache, EncoderDecoderCache):
            cache.is_updated[self.layer_idx] = True
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
{interface}
attn_output, attn_weights = attention_interface(
    self,
    query_states,
    key_states,
    value_states,
    mask,
    dropout=0.0 if not self.training else self.dropout,
    scaling=self.scaling,
    position_bias=position_bias,
    **kwargs,
)
attn_output = attn_output.reshape(*input_shape, -1).contiguous()
attn_output = self.o(attn_output)
return attn_output, position_bias, attn_weights
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
return attn_output, attn_weights
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
    names: Names, form: Attention, variables: str, heads: str, dropout: str, star: str = ""
) -> str:
    """The statements of an attention without a rotation.

    Args:
        names, form: of its family.
        variables: those for queries, keys and values.
        heads: the statements that compute them.
        dropout: the attribute with the probability.
        star: whether view() gets a shape's sizes, "*", or the shape, "".
    """
    parts = dict(zip("qkv", names.projections, strict=True))
    parts |= dict(zip(("query", "key", "value"), variables.split(), strict=True))
    parts |= {"output": names.output, "head_dim": form.head_dim, "scale": str(form.scale)}
    parts |= {"dropout": dropout, "star": star, "interface": _BY_METHOD}
    parts["more"] = "**kwargs," if form.takes_options else "is_causal=self.is_causal,"
    return normal(_PLAIN_ATTENTION.format(heads=heads.format(**parts), **parts))


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
            query=q, key=k, update=update, interface=interface, window=window
        )
        found[normal(statements)] = Attention((_LLAMAS,), head_norms)
    for interface in (_BY_METHOD, _BY_NAME):
        statements = _MODERN_BERTS_ATTENTION.format(interface=interface)
        found[normal(statements)] = Attention((_MODERN_BERTS,), scale=None)
    clip, vit = Attention((_CLIPS,), scale="scale"), Attention((_VITS,))
    siglip = clip._replace(takes_options=False)
    distilbert = Attention((_DISTILBERTS,), head_dim="attention_head_size")
    plural = "queries keys values"
    states, layers = (f"query_{end} key_{end} value_{end}" for end in ("states", "layer"))
    gpt2 = normal(_GPT2S_ATTENTION.format(interface=_BY_METHOD))
    t5 = normal(_T5S_ATTENTION.format(interface=_BY_METHOD))
    mpnet = Attention(
        (_MPNETS,),
        scale=None,
        head_dim="attention_head_size",
        takes_options=False,
        dispatches=False,
    )
    return found | {
        gpt2: Attention((_GPT2S,)),
        t5: Attention((_T5S, _GATED_T5S), head_dim="key_value_proj_dim"),
        normal(_MPNETS_ATTENTION): mpnet,
        _plain_attention(_CLIPS, clip, plural, _ONE_AFTER_ANOTHER, "dropout"): clip,
        _plain_attention(_CLIPS, siglip, plural, _AT_ONCE, "dropout"): siglip,
        _plain_attention(_VITS, vit, states, _AT_ONCE, "attention_dropout"): vit,
        _plain_attention(_DISTILBERTS, distilbert, layers, _AT_ONCE, "dropout.p", "*"): distilbert,
    }


_ATTENTIONS = _known_attentions()
