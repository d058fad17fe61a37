"""DeBERTa-v2's attention, recognised by its code, on padded and on packed tokens.

Its scores are products of queries and keys, plus two terms: products of queries with the embeddings
of distances, and of keys with embeddings of distances. Each term is a table with a row for every
query or key and a column for every embedding. The operator reads the number for a pair's distance
from the table, so no term is computed for all pairs.

The attention's own method computes these terms for all pairs. It is called if this module does not
recognise its code, or the distances that it gets.
"""

from __future__ import annotations

import inspect
import types
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

from trifuse.nn import packing
from trifuse.nn.dropout import DROPOUTS
from trifuse.nn.packing import PackedSequences
from trifuse.ops.attention import scaled_dot_product_attention
from trifuse.recipes import code, sublayers
from trifuse.recipes.written_out import WrittenOut, has_served

_FORWARD = code.normal("""
if query_states is None:
    query_states = hidden_states
query_layer = self.transpose_for_scores(self.query_proj(query_states), self.num_attention_heads)
key_layer = self.transpose_for_scores(self.key_proj(hidden_states), self.num_attention_heads)
value_layer = self.transpose_for_scores(self.value_proj(hidden_states), self.num_attention_heads)
rel_att = None
scale_factor = 1
if 'c2p' in self.pos_att_type:
    scale_factor += 1
if 'p2c' in self.pos_att_type:
    scale_factor += 1
scale = scaled_size_sqrt(query_layer, scale_factor)
attention_scores = torch.bmm(
    query_layer, key_layer.transpose(-1, -2) / scale.to(dtype=query_layer.dtype)
)
if self.relative_attention:
    rel_embeddings = self.pos_dropout(rel_embeddings)
    rel_att = self.disentangled_attention_bias(
        query_layer, key_layer, relative_pos, rel_embeddings, scale_factor
    )
if rel_att is not None:
    attention_scores = attention_scores + rel_att
attention_scores = attention_scores.view(
    -1, self.num_attention_heads, attention_scores.size(-2), attention_scores.size(-1)
)
attention_mask = attention_mask.bool()
attention_scores = attention_scores.masked_fill(
    ~attention_mask, torch.finfo(query_layer.dtype).min
)
attention_probs = nn.functional.softmax(attention_scores, dim=-1)
attention_probs = self.dropout(attention_probs)
context_layer = torch.bmm(
    attention_probs.view(-1, attention_probs.size(-2), attention_probs.size(-1)), value_layer
)
context_layer = context_layer.view(
    -1, self.num_attention_heads, context_layer.size(-2), context_layer.size(-1)
).permute(0, 2, 1, 3).contiguous()
new_context_layer_shape = context_layer.size()[:-2] + (-1,)
context_layer = context_layer.view(new_context_layer_shape)
if not output_attentions:
    return (context_layer, None)
return (context_layer, attention_probs)
""")

_TRANSPOSE = code.normal("""
new_x_shape = x.size()[:-1] + (attention_heads, -1)
x = x.view(new_x_shape)
return x.permute(0, 2, 1, 3).contiguous().view(-1, x.size(1), x.size(-1))
""")


class DisentangledAttention(WrittenOut):
    """Mixin for fused classes of such attentions, before the original class in their bases."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | PackedSequences,
        output_attentions: bool = False,
        query_states: Tensor | None = None,
        relative_pos: Tensor | None = None,
        rel_embeddings: Tensor | None = None,
    ) -> Any:
        """Same signature as the original class's forward. Also takes packed tokens, (1, T, D)."""
        attention: Any = self
        mask: Any = attention_mask
        packed = isinstance(mask, PackedSequences)
        longest = mask.max_seqlen if packed else hidden_states.shape[1]
        compiling = torch.compiler.is_compiling()  # it can't trace code that reads code
        index = None if compiling else _index(attention, relative_pos, longest)
        if not packed and (
            index is None
            or output_attentions
            or not _is_plain(attention, mask, query_states, hidden_states)
        ):
            return super().forward(
                hidden_states,
                attention_mask,
                output_attentions,
                query_states=query_states,
                relative_pos=relative_pos,
                rel_embeddings=rel_embeddings,
            )
        heads = attention.num_attention_heads
        queries = hidden_states if packed or query_states is None else query_states
        rows = [
            attention.query_proj(queries),
            attention.key_proj(hidden_states),
            attention.value_proj(hidden_states),
        ]
        query, key, value = (_of_heads(x, heads) for x in rows)
        terms = 1 + sum(kind in attention.pos_att_type for kind in ("c2p", "p2c"))
        scale = 1 / float(_divisor(self)(query, terms))
        options: dict[str, Any] = {}
        if attention.relative_attention:
            embeddings = attention.pos_dropout(rel_embeddings)
            if index is not None:
                read = embeddings[index.first : index.last]
                options = _tables(attention, query, key, read, scale)
                options = {**options, "relative_index": index.columns} if options else {}
            else:
                padded = (_with_padding(x, mask, heads) for x in rows[:2])
                make = attention.disentangled_attention_bias
                bias = make(*padded, relative_pos, embeddings, terms)
                if isinstance(bias, Tensor):
                    options["attn_mask"] = bias.unflatten(0, (-1, heads))
        options["dropout_p"] = attention.dropout.p if attention.dropout.training else 0.0
        options["scale"] = scale
        if packed:
            out = packing.attend(query, key, value, mask, **options)
        else:
            least = torch.finfo(query.dtype).min  # as there: a row without keys attends to all
            bias = query.new_zeros(mask.shape).masked_fill_(~mask.bool(), least)
            out = scaled_dot_product_attention(query, key, value, bias, **options)
        has_served(self)
        return out.transpose(1, 2).flatten(2), None


def _of_heads(rows: Tensor, heads: int) -> Tensor:
    """Return (..., L, H · E) as (..., H, L, E)."""
    return rows.unflatten(-1, (heads, -1)).transpose(-2, -3)


def _is_plain(attention: Any, mask: Any, query_states: Any, hidden_states: Tensor) -> bool:
    """Whether padded tokens may be computed as in this module, and no hook observes them."""
    if why_not(attention) is not None or attention.dropout._forward_hooks:
        return False
    same = query_states is None or query_states.shape == hidden_states.shape
    return same and isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1] == 1


class _Index(NamedTuple):
    """Which embedding each distance among L tokens has.

    Pairs read embeddings [first, last), which begin and end at multiples of 16. L tokens have only
    2 L - 1 distances, and other embeddings are not projected.
    """

    columns: Tensor  # (2 L - 1,), a relative_index: places in [first, last)
    first: int
    last: int


def _index(attention: Any, relative_pos: Any, L: int) -> _Index | None:
    """Return the embeddings of the distances among L tokens.

    None if the two terms of a pair may have different embeddings, or if they are unknown.
    """
    if not attention.relative_attention or not _has_known_terms(attention):
        return None
    if not isinstance(relative_pos, Tensor) or isinstance(relative_pos, FakeTensor):
        return None
    if torch.jit.is_tracing():
        return None
    if relative_pos.dim() not in (2, 3) or relative_pos.shape[:-2].numel() != 1:
        return None
    pairs = relative_pos.reshape(relative_pos.shape[-2:])[:L, :L]
    if pairs.shape != (L, L):
        return None
    version = None if relative_pos.is_inference() else relative_pos._version
    known = _last_index.get(relative_pos)
    if known is None or known[:3] != (version, L, attention.pos_ebd_size):
        # The first row has the distances to later keys, and the first column has the others.
        distances = torch.cat((pairs[:, 0].flip(0), pairs[0, 1:]))
        places = torch.arange(L, device=pairs.device)
        is_of_distances = distances[places - places[:, None] + (L - 1)] == pairs
        found = None
        if (distances + distances.flip(0) == 0).all() and is_of_distances.all():
            span = attention.pos_ebd_size
            columns = (distances.long() + span).clamp(0, 2 * span - 1)
            first = int(columns.min()) // 16 * 16
            last = min((int(columns.max()) // 16 + 1) * 16, 2 * span)
            found = _Index(columns - first, first, last)
        known = (version, L, attention.pos_ebd_size, found)
        _last_index[relative_pos] = known
    index: _Index | None = known[3]
    return index


# The last index by the buckets of all pairs, which a model makes once for all of its layers.
_last_index: Any = WeakTensorKeyDictionary()


def _tables(
    attention: Any, query: Tensor, key: Tensor, embeddings: Tensor, scale: float
) -> dict[str, Tensor]:
    """Return the two terms as the arguments ``query_bias`` and ``key_bias``.

    Args:
        query, key: (B, H, L, E).
        embeddings: those that pairs read, (n, H · E).
    """
    if attention.share_att_key:
        as_key, as_query = attention.key_proj, attention.query_proj
    else:
        as_key = getattr(attention, "pos_key_proj", None)
        as_query = getattr(attention, "pos_query_proj", None)
    tables, heads = {}, attention.num_attention_heads
    for kind, name, rows, project in (
        ("c2p", "query_bias", query, as_key),
        ("p2c", "key_bias", key, as_query),
    ):
        if kind in attention.pos_att_type:
            tables[name] = (rows * scale) @ _of_heads(project(embeddings), heads).mT
    return tables


def _divisor(attention: nn.Module) -> Any:
    """Return the function whose result the code of an attention divides its scores by."""
    forward: Any = sublayers.original(type(attention)).forward
    return inspect.unwrap(forward).__globals__["scaled_size_sqrt"]


def _with_padding(rows: Tensor, packed: PackedSequences, heads: int) -> Tensor:
    """Return rows of packed tokens, (1, T, H · E), as (N · H, longest, E), padded with 0."""
    sequences, places = packing.places(packed)
    shape = packed.cu_seqlens.shape[0] - 1, packed.max_seqlen, rows.shape[-1]
    where = packed._replace(indices=sequences * packed.max_seqlen + places)
    padded = packing.scatter(rows, where, torch.Size(shape))
    return padded.unflatten(-1, (heads, -1)).transpose(1, 2).flatten(0, 1)


def is_disentangled(module: Any) -> bool:
    """Whether the code of an attention's class is DeBERTa-v2's."""
    cls: Any = sublayers.original(type(module))
    functions = tuple(getattr(cls, name, None) for name in _CODE)
    if functions not in _recognised:
        _recognised[functions] = all(
            isinstance(function, types.FunctionType) and code.body(function) == wanted
            for function, wanted in zip(functions, _CODE.values(), strict=True)
        )
    return _recognised[functions]


# The method that is skipped for packed tokens.
SKIPPED = "transpose_for_scores"
_CODE = {"forward": _FORWARD, SKIPPED: _TRANSPOSE}
METHODS = tuple(_CODE)

_TERMS = code.normal("""
if relative_pos is None:
    relative_pos = build_relative_position(
        query_layer,
        key_layer,
        bucket_size=self.position_buckets,
        max_position=self.max_relative_positions,
    )
if relative_pos.dim() == 2:
    relative_pos = relative_pos.unsqueeze(0).unsqueeze(0)
elif relative_pos.dim() == 3:
    relative_pos = relative_pos.unsqueeze(1)
elif relative_pos.dim() != 4:
    raise ValueError(f"Relative position ids must be of dim 2 or 3 or 4. {relative_pos.dim()}")
att_span = self.pos_ebd_size
relative_pos = relative_pos.to(device=query_layer.device, dtype=torch.long)
rel_embeddings = rel_embeddings[0 : att_span * 2, :].unsqueeze(0)
if self.share_att_key:
    pos_query_layer = self.transpose_for_scores(
        self.query_proj(rel_embeddings), self.num_attention_heads
    ).repeat(query_layer.size(0) // self.num_attention_heads, 1, 1)
    pos_key_layer = self.transpose_for_scores(
        self.key_proj(rel_embeddings), self.num_attention_heads
    ).repeat(query_layer.size(0) // self.num_attention_heads, 1, 1)
else:
    if "c2p" in self.pos_att_type:
        pos_key_layer = self.transpose_for_scores(
            self.pos_key_proj(rel_embeddings), self.num_attention_heads
        ).repeat(query_layer.size(0) // self.num_attention_heads, 1, 1)
    if "p2c" in self.pos_att_type:
        pos_query_layer = self.transpose_for_scores(
            self.pos_query_proj(rel_embeddings), self.num_attention_heads
        ).repeat(query_layer.size(0) // self.num_attention_heads, 1, 1)
score = 0
if "c2p" in self.pos_att_type:
    scale = scaled_size_sqrt(pos_key_layer, scale_factor)
    c2p_att = torch.bmm(query_layer, pos_key_layer.transpose(-1, -2))
    c2p_pos = torch.clamp(relative_pos + att_span, 0, att_span * 2 - 1)
    c2p_att = torch.gather(
        c2p_att,
        dim=-1,
        index=c2p_pos.squeeze(0).expand(
            [query_layer.size(0), query_layer.size(1), relative_pos.size(-1)]
        ),
    )
    score += c2p_att / scale.to(dtype=c2p_att.dtype)
if "p2c" in self.pos_att_type:
    scale = scaled_size_sqrt(pos_query_layer, scale_factor)
    r_pos = build_rpos(
        query_layer,
        key_layer,
        relative_pos,
        self.max_relative_positions,
        self.position_buckets,
    )
    p2c_pos = torch.clamp(-r_pos + att_span, 0, att_span * 2 - 1)
    p2c_att = torch.bmm(key_layer, pos_query_layer.transpose(-1, -2))
    p2c_att = torch.gather(
        p2c_att,
        dim=-1,
        index=p2c_pos.squeeze(0).expand(
            [query_layer.size(0), key_layer.size(-2), key_layer.size(-2)]
        ),
    ).transpose(-1, -2)
    score += p2c_att / scale.to(dtype=p2c_att.dtype)
return score
""")


def _has_known_terms(attention: Any) -> bool:
    """Whether the code that computes the two terms is DeBERTa-v2's."""
    name = "disentangled_attention_bias"
    function = getattr(sublayers.original(type(attention)), name, None)
    if not isinstance(function, types.FunctionType) or name in vars(attention):
        return False
    if function not in _known_terms:
        _known_terms[function] = code.body(function) == _TERMS
    return _known_terms[function]


_known_terms: dict[Any, bool] = {}

# Keyed by the functions that were read, because those of a class may be replaced.
_recognised: dict[tuple[Any, ...], bool] = {}


def why_not(attention: Any) -> str | None:
    """Return why a :class:`DisentangledAttention` can't take packed tokens at present, or None."""
    if SKIPPED in vars(attention):
        return f"has a {SKIPPED} of its own, which packed tokens don't go through"
    if not is_disentangled(attention):
        return "has other code than when it was fused"
    kind = type(attention.dropout)
    if kind not in DROPOUTS:
        name = f"{kind.__module__}.{kind.__qualname__}"
        return f"has a {name} for its weights, which packed tokens don't go through"
    return None


def disentangled_class(source: Any) -> type[nn.Module]:
    """Return the subclass of an attention's class that takes packed tokens too."""
    if source not in _classes:
        origin = sublayers.origin_of(source, (disentangled_class, (source,)))
        _classes[source] = sublayers.subclass(DisentangledAttention, origin, {})
    return _classes[source]


_classes: dict[type, type[nn.Module]] = {}
