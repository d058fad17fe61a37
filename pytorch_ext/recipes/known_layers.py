"""Layers of transformers whose code is known, which run as one op in inference.

transformers copies Llama's decoder layer, with small changes, into many families: Mistral, Qwen2,
Qwen3 with its norms of heads. ModernBERT's encoder layer has the same parts. CLIP's and ViT's
encoder layers, which many models of images have too, and DistilBERT's rotate nothing. A layer is
recognised if the statements of its ``forward``, of those of its attention and its network, and of
the function that rotates queries and keys, are those of one of these families, in any known
version. While a model decodes, the op appends to the cache in place: see
:mod:`trifuse.recipes.caches`.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from trifuse._transformers import NAME
from trifuse.nn import encoder_layer
from trifuse.nn.dropout_add_layer_norm import LAYER_NORMS
from trifuse.nn.linear import is_frozen, is_plain
from trifuse.nn.packing import PackedSequences
from trifuse.ops.encoder_layer import Cache, Rotary
from trifuse.recipes import arguments, caches, code, norms, rotary_functions, sublayers


class OneKnownOp(nn.Module):
    """The first base of such layers; the second is a layer's source.

    Caches of unknown classes, and arguments that the models don't pass to their layers, run as in
    transformers.
    """

    _trifuse_names: _Names | None  # None if a process that unpickles the layer has other code

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """As the source's own."""
        if not args:
            out = _run(self, hidden_states, attention_mask, **kwargs)
            if out is not None:
                return out
        return super().forward(hidden_states, attention_mask, *args, **kwargs)


class OneCachedOp(nn.Module):
    """The same for GPT-2's layers, whose second argument is the cache."""

    _trifuse_names: _Names | None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the source's own."""
        given = dict(zip(_GPT2S_ARGUMENTS, args, strict=False)) | kwargs
        if len(given) == len(args) + len(kwargs):
            out = _run(self, hidden_states, given.pop("attention_mask", None), **given)
            if out is not None:
                return out
        return super().forward(hidden_states, *args, **kwargs)


_GPT2S_ARGUMENTS = (
    "cache",
    "attention_mask",
    "encoder_hidden_states",
    "encoder_attention_mask",
    "use_cache",
)


def _run(
    layer: Any,
    x: Tensor,
    mask: Any,
    position_embeddings: Any = None,
    cache: Any = None,
    past_key_values: Any = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Return a layer's output; None if it must call its parts."""
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and x.requires_grad):
        return None
    if not arguments.are_plain((), kwargs):
        return None
    if cache is not None and past_key_values is not None:
        return None
    cache = past_key_values if cache is None else cache
    names = layer._trifuse_names
    attention: Any = None if names is None else layer._modules.get(names.attention)
    if attention is None:
        return None
    rotary = _rotary(attention, position_embeddings) if names.rotates else None
    if (rotary is None) == names.rotates or (position_embeddings is not None) != names.rotates:
        return None
    if cache is not None and not names.takes_cache:
        return None
    if isinstance(mask, PackedSequences):
        if cache is not None:
            return None
        causal = _is_causal(attention, is_causal) if mask.causal is None else mask.causal
        return encoder_layer.run(layer, x, mask, _describe, causal, rotary=rotary)
    band = _band(attention, mask, x.size(1), is_causal)
    if band is None:
        return None
    if cache is None:
        return encoder_layer.run(
            layer, x, band.mask, _describe, band.is_causal, rotary=rotary, window=band.window
        )
    place: caches.Place | None = None

    def reserve() -> Cache | None:
        nonlocal place
        head_dim = attention.head_dim
        key = attention._modules[names.projections[-1]]
        heads = encoder_layer.out_features(key) // head_dim // (4 - len(names.projections))
        place = caches.find(cache, attention.layer_idx, x, heads, head_dim)
        if place is None or not _sees_as_parts(place, x.size(1), band):
            return None
        return place.reserve(x, heads, head_dim)

    out = encoder_layer.run(
        layer,
        x,
        band.mask,
        _describe,
        band.is_causal,
        reserve=reserve,
        rotary=rotary,
        window=band.window,
    )
    if out is not None and place is not None:
        place.advance(x.size(1))
    return out


def _rotary(attention: Any, embeddings: Any) -> Rotary | None:
    """The rotation that a layer gets; None if it isn't one of whole heads, which the parts need."""
    if not (isinstance(embeddings, tuple) and len(embeddings) == 2):
        return None
    for each in embeddings:
        if not isinstance(each, Tensor) or each.shape[-1:] != (attention.head_dim,):
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
    read = huggingface.read_mask(mask)
    causal = read.is_causal is not False  # else it is the lower right variant
    return _Band(read.attn_mask, causal, -1 if read.window is None else read.window, causal)


def _is_causal(attention: nn.Module, is_causal: bool | None) -> bool:
    """Whether an attention is causal without a mask. A layer may pass ``is_causal`` on to it."""
    from trifuse import huggingface

    if is_causal is not None:
        form = _ATTENTIONS.get(_statements_of(_source(attention)))
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


class _Names(NamedTuple):
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


_LLAMAS = _Names(
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
_MODERN_BERTS = _Names(
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


_CLIPS = _Names(
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
_GPT2S = _Names(
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
_DISTILBERTS = _Names(
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


class _Attention(NamedTuple):
    """The properties of an attention that the statements of its ``forward`` show."""

    of: tuple[_Names, ...]  # the families that have it
    head_norms: tuple[str, ...] = ()
    scale: str | None = "scaling"  # the attribute with the scale; None: it is 1 / √head_dim
    head_dim: str = "head_dim"  # the attribute with the number of features of a head
    takes_options: bool = True  # whether further arguments of the layer reach the operator


class _Known(NamedTuple):
    """A layer whose code, including that of its attention and network, has a known form."""

    names: _Names
    form: _Attention
    attention: Any
    network: Any


def _classify(layer: nn.Module) -> _Known | None:
    names = _LAYERS.get(_statements_of(_source(layer)))
    if names is None:
        return None
    attention, network = layer._modules.get(names.attention), layer._modules.get(names.network)
    if attention is None or network is None:
        return None
    form = _ATTENTIONS.get(_statements_of(_source(attention)))
    if form is None or names not in form.of:
        return None
    methods = ("forward", "ff_chunk") if names.in_chunks else ("forward",)
    if names not in _NETWORKS.get(_statements_of(_source(network), *methods), ()):
        return None
    return _Known(names, form, attention, network)


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
    if attention.config._attn_implementation != NAME:
        chosen = attention.config._attn_implementation
        return f'its attention runs by attn_implementation="{chosen}"'
    scope = inspect.unwrap(_source(attention).forward).__globals__  # holds the rotation
    rotation = rotary_functions.rotation_of(scope.get("apply_rotary_pos_emb"))
    if names.rotates and (rotation is None or rotation not in _ROTATIONS):
        return "it doesn't rotate the two halves of each head"
    if names.in_chunks and network.chunk_size_feed_forward:
        return "its network runs on one part of the tokens after another"
    projections = tuple(attention._modules.get(name) for name in names.projections)
    up, down = (network._modules.get(name) for name in (names.up, names.down))
    factor = None if names.factor is None else network._modules.get(names.factor)
    output = attention._modules.get(names.output)
    linears = [*projections, output, up, down]
    if names.factor is not None:
        linears.append(factor)
    if not all(each is not None and (is_frozen(each) or is_plain(each)) for each in linears):
        return encoder_layer.OTHER_LINEARS
    function = network._modules.get(names.activation)
    activation = None if function is None else sublayers.name_of(function)
    if activation is None:
        return "no product of ours has its activation"
    first, second = (cast(Any, layer._modules.get(name)) for name in names.norms)
    head_norms = tuple(attention._modules.get(name) for name in form.head_norms)
    normalised = [second, *head_norms]
    if type(first) is nn.Identity and names.norm_first:  # as in ModernBERT's first layer
        first = None
    else:
        normalised.append(first)
    eps = _rms_eps(normalised)
    if eps is None:
        return "its norms aren't all LayerNorms, or RMSNorms of one form"
    head_dim = getattr(attention, form.head_dim)
    counts = [encoder_layer.out_features(each) // head_dim for each in projections]
    heads, key_heads = counts[:2] if len(counts) == 3 else (counts[0] // 3, counts[0] // 3)
    owned = [
        (attention, "config"),
        (attention.config, "_attn_implementation_internal"),
        (attention, form.head_dim),
        (attention, form.scale),
        (network, "chunk_size_feed_forward"),
    ]
    dropouts = [_submodule(layer, path) for path in names.dropouts]
    return encoder_layer.Parts(
        projections,
        output,
        up,
        down,
        (first, second),
        tuple(each for each in dropouts if type(each) is not nn.Identity),
        heads,
        None if form.scale is None else getattr(attention, form.scale),
        activation,
        norm_first=names.norm_first,
        attributes=(
            *((owner, name) for owner, name in owned if name in vars(owner)),
            *((scope, name) for name in _ROTATING if names.rotates),
        ),
        factor=factor,
        num_key_heads=key_heads,
        rms_eps=eps or None,
        head_norms=head_norms,
        rotary_in_float32=rotation is not None and rotation.in_float32,
    )


_ROTATING = ("apply_rotary_pos_emb", "rotate_half")  # the functions that rotate


def _submodule(layer: nn.Module, path: str) -> Any:
    """The module at a path; None if there is none, for example because a function replaced it."""
    found: nn.Module | None = layer
    for name in path.split("."):
        found = None if found is None else found._modules.get(name)
    return found


def _rms_eps(each: list[Any]) -> str | None:
    """The attribute with the epsilon of RMSNorms; "" for LayerNorms; None for any others."""
    if all(type(norm) in LAYER_NORMS for norm in each):
        return ""
    if not all(isinstance(norm, norms.FusedNorm) for norm in each):
        return None
    forms = {norm._trifuse_form for norm in each}
    plain = not any(
        form.from_one or form.centered or form.switch or form.parameters != ("weight",)
        for form in forms
    )
    names = {form.eps for form in forms if isinstance(form.eps, str)}
    return names.pop() if len(names) == 1 and plain else None


def _statements_of(cls: Any, *methods: str) -> str:
    """The statements of methods of a class of transformers, by default ``forward``.

    Returns:
        "" for other classes, and if statements can't be read.
    """
    if not sublayers.is_of_transformers(cls):
        return ""
    found = [_statements(getattr(cls, name, None)) for name in methods or ("forward",)]
    return "\n".join(found) if all(found) else ""


def one_op_class(source: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of a layer's class that can run as one op."""
    if source not in _classes:
        origin = sublayers.origin_of(source, (one_op_class, (source,)))
        names = _LAYERS.get(_statements_of(sublayers.original(source)))
        first = OneCachedOp if names is _GPT2S else OneKnownOp
        _classes[source] = sublayers.subclass(first, origin, {"_trifuse_names": names})
    return _classes[source]


_classes: dict[type[nn.Module], type[nn.Module]] = {}


# The statements -----------------------------------------------------------------------------------


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
        return ast.Constant(not node.operand.value) if negates else node  # type: ignore[attr-defined]

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


def _normal(statements: str) -> str:
    tree = _WithoutMemory().visit(_Normal().visit(ast.parse(statements)))
    return ast.unparse(ast.fix_missing_locations(tree))


@functools.cache
def _statements(function: Any) -> str:
    """The statements of a function in normal form; "" if they can't be read."""
    if not inspect.isfunction(function):
        return ""
    body = code.body(function)
    return "" if body is None else _normal(body)


_LLAMAS_LAYER = """
residual = hidden_states
hidden_states = self.input_layernorm(hidden_states)
hidden_states, _ = self.self_attn(
    hidden_states=hidden_states,
    attention_mask=attention_mask,
    position_ids=position_ids,
    cache=cache,
    use_cache=use_cache,
    position_embeddings=position_embeddings,
    {more}
    **kwargs,
)
hidden_states = residual + hidden_states
residual = hidden_states
hidden_states = self.post_attention_layernorm(hidden_states)
hidden_states = self.mlp(hidden_states)
hidden_states = residual + hidden_states
return hidden_states
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
_CLIPS_LAYER = """
residual = hidden_states
hidden_states = self.layer_norm1(hidden_states)
hidden_states, _ = self.self_attn(
    hidden_states=hidden_states, attention_mask=attention_mask, **kwargs
)
hidden_states = residual + hidden_states
residual = hidden_states
hidden_states = self.layer_norm2(hidden_states)
hidden_states = self.mlp(hidden_states)
hidden_states = residual + hidden_states
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
    _normal(_LLAMAS_LAYER.format(more=more)): _LLAMAS
    for more in ("", "cache_position=cache_position,")
} | {
    _normal(_MODERN_BERTS_LAYER): _MODERN_BERTS,
    _normal(_GPT2S_LAYER): _GPT2S,
    _normal(_CLIPS_LAYER): _CLIPS,
    _normal(_VITS_LAYER): _VITS,
    _normal(_DISTILBERTS_LAYER): _DISTILBERTS,
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
    _normal(_LLAMAS_NETWORK): (_LLAMAS,),
    _normal(_MODERN_BERTS_NETWORK): (_MODERN_BERTS,),
    _normal(_GPT2S_NETWORK): (_GPT2S,),
    _normal(_CLIPS_NETWORK): (_CLIPS, _VITS),
    _normal(_DISTILBERTS_NETWORK): (_DISTILBERTS,),
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
    names: _Names,
    form: _Attention,
    variables: tuple[str, str, str],
    heads: str,
    dropout: str,
) -> str:
    q, k, v = names.projections
    query, key, value = variables
    star = "*" if names is _DISTILBERTS else ""
    found = {"q": q, "k": k, "v": v, "query": query, "key": key, "value": value, "star": star}
    found |= {"head_dim": form.head_dim, "scale": str(form.scale), "output": names.output}
    found |= {"dropout": dropout, "interface": _BY_METHOD}
    found["more"] = "**kwargs," if form.takes_options else "is_causal=self.is_causal,"
    return _normal(_PLAIN_ATTENTION.format(heads=heads.format(**found), **found))


def _known_attentions() -> dict[str, _Attention]:
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
        found[_normal(statements)] = _Attention((_LLAMAS,), head_norms)
    for interface in (_BY_METHOD, _BY_NAME):
        statements = _MODERN_BERTS_ATTENTION.format(interface=interface)
        found[_normal(statements)] = _Attention((_MODERN_BERTS,), scale=None)
    clip, vit = _Attention((_CLIPS,), scale="scale"), _Attention((_VITS,))
    siglip = clip._replace(takes_options=False)
    states, layers = (
        tuple(f"{name}_{end}" for name in ("query", "key", "value")) for end in ("states", "layer")
    )
    plural = ("queries", "keys", "values")
    distilbert = _Attention((_DISTILBERTS,), head_dim="attention_head_size")
    gpt2 = _normal(_GPT2S_ATTENTION.format(interface=_BY_METHOD))
    return found | {
        gpt2: _Attention((_GPT2S,)),
        _plain_attention(_CLIPS, clip, plural, _ONE_AFTER_ANOTHER, "dropout"): clip,
        _plain_attention(_CLIPS, siglip, plural, _AT_ONCE, "dropout"): siglip,
        _plain_attention(_VITS, vit, states, _AT_ONCE, "attention_dropout"): vit,
        _plain_attention(_DISTILBERTS, distilbert, layers, _AT_ONCE, "dropout.p"): distilbert,
    }


_ATTENTIONS = _known_attentions()

# The op computes these rotations: they turn whole heads, in the dtype of queries and keys or in
# float32.
_ROTATIONS = (
    rotary_functions.Rotation(),
    rotary_functions.Rotation(in_float32=True, keeps_dtype=True),
)
