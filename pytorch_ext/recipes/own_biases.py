"""Attentions that make a bias of relative positions in each layer, as UMT5's do.

Such a bias has as many rows and columns as there are tokens. Of packed tokens it needs those of the
longest sequences alone. So the statement that makes it becomes a call, in a subclass that has
nothing else of its own.
"""

from __future__ import annotations

import ast
import inspect
import types
from typing import Any

from torch import Tensor, nn

from trifuse.nn import packing
from trifuse.nn.packing import CrossSequences, PackedSequences
from trifuse.recipes import code, sublayers
from trifuse.recipes.arguments import BIAS, MASK

_STATEMENT = code.normal(
    """
if not self.has_relative_attention_bias:
    position_bias = torch.zeros(
        (1, self.n_heads, seq_length, key_length),
        device=query_states.device,
        dtype=query_states.dtype,
    )
else:
    position_bias = self.compute_bias(
        seq_length, key_length, device=query_states.device, past_seen_tokens=past_seen_tokens
    )
"""
)
_COMPUTE_BIAS = code.normal(
    """
if device is None:
    device = self.relative_attention_bias.weight.device
context_position = (
    torch.arange(query_length, dtype=torch.long, device=device)[:, None] + past_seen_tokens
)
memory_position = torch.arange(key_length, dtype=torch.long, device=device)[None, :]
relative_position = memory_position - context_position
relative_position_bucket = self._relative_position_bucket(relative_position)
values = self.relative_attention_bias(relative_position_bucket)
values = values.permute([2, 0, 1]).unsqueeze(0)
return values
"""
)
_LENGTHS = "seq_length, key_length, query_states, past_seen_tokens"  # variables of the statement


class OwnBias(nn.Module):
    """The first base of every such attention; the second is its source."""

    def _trifuse_bias(
        self, mask: Any, length: int, key_length: int, like: Tensor, past: int
    ) -> Tensor | None:
        """Return the bias, (1, H, queries, keys); None if packed tokens have none."""
        attention: Any = self
        if isinstance(mask, (PackedSequences, CrossSequences)):
            if not attention.has_relative_attention_bias:
                return None
            queries, keys = packing.sides(mask)
            length, key_length = queries.max_seqlen, keys.max_seqlen
        elif not attention.has_relative_attention_bias:
            return like.new_zeros(1, attention.n_heads, length, key_length)
        bias: Tensor = attention.compute_bias(
            length, key_length, device=like.device, past_seen_tokens=past
        )
        return bias


def makes_its_own(module: nn.Module) -> bool:
    """Whether a module of transformers is an attention that makes its bias itself."""
    cls: Any = sublayers.original(type(module))
    if cls not in _recognised:
        _recognised[cls] = sublayers.is_of_transformers(cls) and _has_the_code(cls)
    return _recognised[cls]


_recognised: dict[type, bool] = {}


def _has_the_code(cls: Any) -> bool:
    compute = getattr(cls, "compute_bias", None)
    bucket = getattr(cls, "_relative_position_bucket", None)
    if not isinstance(compute, types.FunctionType) or code.body(compute) != _COMPUTE_BIAS:
        return False
    if not isinstance(bucket, types.FunctionType):
        return False
    # A bucket may depend on the difference of two positions, and on nothing else.
    return len(inspect.signature(bucket).parameters) == 2 and _rewritten(cls) is not None


def is_the_statement(statement: ast.stmt) -> bool:
    """Whether a statement makes the bias."""
    return isinstance(statement, ast.If) and ast.unparse(statement) == _STATEMENT


def _rewritten(cls: Any) -> ast.FunctionDef | None:
    """Return the code of a class's ``forward`` with a call in place of the statement, or None."""
    tree = code.parse(cls.forward)
    places = [] if tree is None else [at for at, s in enumerate(tree.body) if is_the_statement(s)]
    if tree is None or len(places) != 1:
        return None
    (call,) = ast.parse(f"{BIAS} = self._trifuse_bias({MASK}, {_LENGTHS})").body
    for node in ast.walk(call):
        ast.copy_location(node, tree.body[places[0]])
    tree.body[places[0]] = call
    return tree


def own_bias_class(source: Any) -> type[nn.Module]:
    """Return the subclass of an attention's class that makes the bias of packed tokens."""
    if source not in _classes:
        tree = _rewritten(source)
        made = None if tree is None else code.compile_like(tree, source.forward)
        if made is None:
            return source
        origin = sublayers.origin_of(source, (own_bias_class, (source,)))
        _classes[source] = sublayers.subclass(OwnBias, origin, {"forward": made})
    return _classes[source]


_classes: dict[type[nn.Module], type[nn.Module]] = {}
