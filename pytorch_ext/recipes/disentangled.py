"""DeBERTa-v2's attention on packed tokens, recognised by its code.

Its scores are those of queries and keys, and two terms more: of queries and the embeddings of
distances, and of keys and these. The two are a bias for each pair of tokens, which the attention's
own method makes of queries and keys with their padding. All else, the attention included, is
computed on packed tokens.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch
from torch import Tensor, nn

from trifuse.nn import packing
from trifuse.nn.dropout import DROPOUTS
from trifuse.nn.packing import PackedSequences
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
    """The first base of every such attention; the second is its source."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | PackedSequences,
        output_attentions: bool = False,
        query_states: Tensor | None = None,
        relative_pos: Tensor | None = None,
        rel_embeddings: Tensor | None = None,
    ) -> Any:
        """As the source's own. It also takes packed tokens, (1, T, D)."""
        if not isinstance(attention_mask, PackedSequences):
            return super().forward(
                hidden_states,
                attention_mask,
                output_attentions,
                query_states=query_states,
                relative_pos=relative_pos,
                rel_embeddings=rel_embeddings,
            )
        attention: Any = self
        heads = attention.num_attention_heads
        projections = attention.query_proj, attention.key_proj, attention.value_proj
        rows = [projection(hidden_states) for projection in projections]
        query, key, value = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in rows)
        terms = 1 + sum(kind in attention.pos_att_type for kind in ("c2p", "p2c"))
        bias = None
        if attention.relative_attention:
            padded = (_with_padding(x, attention_mask, heads) for x in rows[:2])
            embeddings = attention.pos_dropout(rel_embeddings)
            bias = attention.disentangled_attention_bias(*padded, relative_pos, embeddings, terms)
            bias = bias.unflatten(0, (-1, heads)) if isinstance(bias, Tensor) else None
        out = packing.attend(
            query,
            key,
            value,
            attention_mask,
            dropout_p=attention.dropout.p if attention.dropout.training else 0.0,
            scale=1 / float(_divisor(self)(query, terms)),
            attn_mask=bias,
        )
        has_served(self)
        return out.transpose(1, 2).flatten(2), None


def _divisor(attention: nn.Module) -> Any:
    """Return the function by whose result the code of an attention divides its scores."""
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


# The methods that packed tokens don't go through.
SKIPPED = "transpose_for_scores"
_CODE = {"forward": _FORWARD, SKIPPED: _TRANSPOSE}
METHODS = tuple(_CODE)

# By the functions that were read before: those of a class may be replaced.
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
