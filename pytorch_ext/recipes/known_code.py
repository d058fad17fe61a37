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


class Names(NamedTuple):
    """The names that a library gives to the modules of such a layer."""

    attention: str
    projections: tuple[str, ...]  # of the attention
    output: str
    network: str
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


class Attention(NamedTuple):
    """The properties of an attention that the statements of its ``forward`` show."""

    of: tuple[Names, ...]  # the families that have it
    head_norms: tuple[str, ...] = ()
    scale: str | None = "scaling"  # the attribute with the scale; None: it is 1 / √head_dim
    head_dim: str = "head_dim"  # the attribute with the number of features of a head
    takes_options: bool = True  # whether further arguments of the layer reach the operator


def layer_of(cls: Any) -> Names | None:
    """The names in a layer whose class has a known ``forward``; None for others."""
    return _LAYERS.get(_statements_of(cls))


def attention_of(cls: Any) -> Attention | None:
    """The properties of an attention whose class has a known ``forward``; None for others."""
    return _ATTENTIONS.get(_statements_of(cls))


def is_network(cls: Any, names: Names) -> bool:
    """Whether a class has the code of the networks in layers with these names."""
    methods = ("forward", "ff_chunk") if names.in_chunks else ("forward",)
    return names in _NETWORKS.get(_statements_of(cls, *methods), ())


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
_LAYERS = {
    normal(_PRE_NORM_LAYER.format(names=_LLAMAS, more=_LLAMAS_ARGUMENTS + more)): _LLAMAS
    for more in ("", "cache_position=cache_position,")
} | {
    normal(_MODERN_BERTS_LAYER): _MODERN_BERTS,
    normal(_GPT2S_LAYER): _GPT2S,
    normal(_PRE_NORM_LAYER.format(names=_CLIPS, more="")): _CLIPS,
    normal(_VITS_LAYER): _VITS,
    normal(_DISTILBERTS_LAYER): _DISTILBERTS,
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
_NETWORKS = {
    normal(_LLAMAS_NETWORK): (_LLAMAS,),
    normal(_MODERN_BERTS_NETWORK): (_MODERN_BERTS,),
    normal(_GPT2S_NETWORK): (_GPT2S,),
    normal(_CLIPS_NETWORK): (_CLIPS, _VITS),
    normal(_DISTILBERTS_NETWORK): (_DISTILBERTS,),
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
    return found | {
        gpt2: Attention((_GPT2S,)),
        _plain_attention(_CLIPS, clip, plural, _ONE_AFTER_ANOTHER, "dropout"): clip,
        _plain_attention(_CLIPS, siglip, plural, _AT_ONCE, "dropout"): siglip,
        _plain_attention(_VITS, vit, states, _AT_ONCE, "attention_dropout"): vit,
        _plain_attention(_DISTILBERTS, distilbert, layers, _AT_ONCE, "dropout.p", "*"): distilbert,
    }


_ATTENTIONS = _known_attentions()
