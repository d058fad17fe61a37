"""Modules that make a bias of relative positions, which become tables of biases by distance.

T5's first layer makes a bias for all layers, UMT5's layers make one each, and MPNet's encoder makes
one, as a matrix with as many rows and columns as there are tokens. They get a subclass whose bias
is a :class:`trifuse.written_out.DistanceBias`, which attention takes as ``relative_bias``. So no
matrix is made, and the gradient of the table goes on to the model's own embedding of buckets.

Swin's module of biases gets a subclass whose bias is a :class:`trifuse.written_out.IndexedBias`,
which attention takes as ``relative_bias`` and ``relative_index``, beside the mask of shifted
windows.

Falcon's model puts ALiBi into the mask of its layers, one matrix for each head. It gets a subclass
that keeps the two apart (:class:`trifuse.written_out.MaskedKeyBias`).

In UMT5, the statement that makes the bias becomes a call, which makes that of the longest sequence
of packed tokens.
"""

from __future__ import annotations

import ast
import inspect
import types
from typing import Any

import torch
from torch import Tensor, nn

from trifuse.nn import packing
from trifuse.nn.packing import CrossSequences, PackedSequences
from trifuse.ops import _modes
from trifuse.recipes import code, sublayers
from trifuse.recipes.arguments import BIAS, MASK
from trifuse.written_out import DistanceBias, IndexedBias, MaskedKeyBias

# The statement of an attention that makes its bias, with the names that differ.
_STATEMENT = """
if not self.has_relative_attention_bias:
    position_bias = torch.zeros(
        (1, self.n_heads, {length}, key_length),
        device=query_states.device,
        dtype=query_states.dtype,
    ){checkpointed}
else:
    position_bias = self.compute_bias(
        {length}, key_length, device=query_states.device, past_seen_tokens=past_seen_tokens
    )
"""
_CHECKPOINTED = """
    if self.gradient_checkpointing and self.training:
        position_bias.requires_grad = True"""
_OWN = code.normal(_STATEMENT.format(length="seq_length", checkpointed=""))
_SHARED = code.normal(_STATEMENT.format(length="input_shape[1]", checkpointed=_CHECKPOINTED))
# Each with the call that takes its place.
_CALLS = {
    _OWN: f"self._trifuse_bias({MASK}, seq_length, key_length, query_states, past_seen_tokens)",
    _SHARED: "self._trifuse_bias(mask, input_shape[1], key_length, query_states, past_seen_tokens)",
}
_COMPUTE_BIAS = """
if device is None:
    device = self.relative_attention_bias.weight.device
context_position = (
    torch.arange(query_length, dtype=torch.long, device=device)[:, None] + past_seen_tokens
)
memory_position = torch.arange(key_length, dtype=torch.long, device=device)[None, :]
relative_position = memory_position - context_position
relative_position_bucket = self._relative_position_bucket(relative_position{options})
values = self.relative_attention_bias(relative_position_bucket)
values = values.permute([2, 0, 1]).unsqueeze(0)
return values
"""
_BUCKETS = """,
    bidirectional={bidirectional},
    num_buckets=self.relative_attention_num_buckets,
    max_distance=self.relative_attention_max_distance,
"""
_COMPUTED = {
    code.normal(_COMPUTE_BIAS.format(options=options))
    for options in (
        "",
        _BUCKETS.format(bidirectional="(not self.is_decoder)"),
        _BUCKETS.format(bidirectional="False"),
    )
}
_OF_AN_ENCODER = """
bsz, qlen, klen = x.size(0), x.size(1), x.size(1)
if position_ids is not None:
    context_position = position_ids[:, :, None]
    memory_position = position_ids[:, None, :]
else:
    context_position = torch.arange(qlen, dtype=torch.long{made})[:, None]
    memory_position = torch.arange(klen, dtype=torch.long{made})[None, :]
relative_position = memory_position - context_position
rp_bucket = self.relative_position_bucket(relative_position, num_buckets=num_buckets){moved}
values = self.relative_attention_bias(rp_bucket)
values = values.permute([2, 0, 1]).unsqueeze(0)
values = values.expand((bsz, -1, qlen, klen)).contiguous()
return values
"""
_OF_ENCODERS = {
    code.normal(_OF_AN_ENCODER.format(made=made, moved=moved))
    for made, moved in (
        (", device=x.device", ""),
        ("", "\nrp_bucket = rp_bucket.to(x.device)"),  # transformers 4.57
    )
}


# The statement of a model that puts ALiBi into its mask, and the call that takes its place.
_IN_MASK = code.normal("""
causal_mask = torch.masked_fill(
    alibi / math.sqrt(self.config.hidden_size // self.num_heads), causal_mask < -1, min_dtype
)
""")
_CALLS[_IN_MASK] = (
    "self._trifuse_mask("
    "alibi / math.sqrt(self.config.hidden_size // self.num_heads), causal_mask, min_dtype)"
)


_OF_WINDOWS = code.normal("""
relative_position_bias = self.relative_position_bias_table[self.relative_position_index]
relative_position_bias = relative_position_bias.view(self.window_area, self.window_area, -1)
return relative_position_bias.permute(2, 0, 1).contiguous().unsqueeze(0)
""")


class DistanceBiased(nn.Module):
    """The first base of every module that makes a table; the second is its source."""


class EncoderBias(DistanceBiased):
    """An encoder that makes a bias for its layers, as MPNet's."""

    def compute_position_bias(
        self, x: Tensor, position_ids: Tensor | None = None, num_buckets: int = 32
    ) -> Tensor:
        """As the source's own."""
        encoder: Any = self
        if position_ids is not None or _is_traced():
            matrix: Tensor = super().compute_position_bias(x, position_ids, num_buckets)  # type: ignore[misc]
            return matrix
        B, L = x.shape[:2]
        distances = torch.arange(1 - L, L, device=x.device)
        buckets = encoder.relative_position_bucket(distances, num_buckets=num_buckets)
        return DistanceBias.of(encoder.relative_attention_bias(buckets).T, L, L, B)


class WindowBias(DistanceBiased):
    """A module that makes the bias of a window's tokens, as Swin's."""

    def forward(self) -> Tensor:
        """As the source's own."""
        module: Any = self
        table, index = module.relative_position_bias_table, module.relative_position_index
        if type(table) is not nn.Parameter or _is_traced() or torch.compiler.is_compiling():
            matrix: Tensor = super().forward()
            return matrix
        return IndexedBias.of(table.T, index.view(module.window_area, module.window_area))


class _Biased(DistanceBiased):
    """An attention that makes its bias itself."""

    def compute_bias(
        self, query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0
    ) -> Tensor:
        """As the source's own."""
        source: Any = super()
        if _needs_matrix(self):
            matrix: Tensor = source.compute_bias(
                query_length, key_length, device=device, past_seen_tokens=past_seen_tokens
            )
            return matrix
        # The last query's biases for more keys than there are hold those of all queries.
        row = source.compute_bias(
            1,
            query_length + key_length - 1,
            device=device,
            past_seen_tokens=past_seen_tokens + query_length - 1,
        )
        return DistanceBias.of(row[0, :, 0], query_length, key_length)

    def _trifuse_bias(
        self, mask: Any, length: int, key_length: int, like: Tensor, past: Any
    ) -> Tensor | None:
        """Return the bias, (1, H, queries, keys); None if packed tokens have none."""
        attention: Any = self
        if isinstance(mask, (PackedSequences, CrossSequences)):
            if not attention.has_relative_attention_bias:
                return None
            queries, keys = packing.sides(mask)
            length, key_length = queries.max_seqlen, keys.max_seqlen
        elif not attention.has_relative_attention_bias:
            shape = 1, attention.n_heads, length, key_length
            if not _needs_matrix(self):
                return DistanceBias.zero(shape, like)
            checkpointed = getattr(self, "gradient_checkpointing", False) and self.training
            return like.new_zeros(shape, requires_grad=checkpointed)
        return self.compute_bias(length, key_length, device=like.device, past_seen_tokens=past)


class SharedBias(_Biased):
    """An attention that makes a bias for all layers, as that of T5's first layer."""


class OwnBias(_Biased):
    """An attention that makes a bias in each layer, as UMT5's."""


class InMask(DistanceBiased):
    """A model that puts biases of the keys into the mask of its layers, as Falcon."""

    def _trifuse_mask(self, by_key: Tensor, mask: Tensor, least: float) -> Tensor:
        """Return the mask with the biases, (B, H, queries, keys)."""
        if _needs_matrix(self) or torch.compiler.is_compiling():
            return torch.masked_fill(by_key, mask < -1, least)
        return MaskedKeyBias.of(by_key, mask, least)


def _needs_matrix(attention: nn.Module) -> bool:
    """Whether the bias must be a tensor of numbers.

    Reentrant checkpoints take it as an input of a function with a backward of its own.
    """
    checkpointed = getattr(attention, "gradient_checkpointing", False) and attention.training
    return bool(checkpointed) or _is_traced()


def _is_traced() -> bool:
    return _modes.transform_active() or torch.jit.is_tracing()


def makes_its_own(module: nn.Module) -> bool:
    """Whether a module of transformers makes a bias of distances, for itself or for layers."""
    return _base_of(sublayers.original(type(module))) is not None


_recognised: dict[type, type[DistanceBiased] | None] = {}


def _base_of(cls: Any) -> type[DistanceBiased] | None:
    """Return the base for a class of modules; None if its code isn't known."""
    if cls not in _recognised:
        known = sublayers.is_of_transformers(cls)
        _recognised[cls] = _read(cls) if known else None
    return _recognised[cls]


def _read(cls: Any) -> type[DistanceBiased] | None:
    compute = getattr(cls, "compute_position_bias", None)
    if isinstance(compute, types.FunctionType) and code.body(compute) in _OF_ENCODERS:
        return EncoderBias if _has_buckets(cls, "relative_position_bucket") else None
    forward = getattr(cls, "forward", None)
    if isinstance(forward, types.FunctionType) and code.body(forward) == _OF_WINDOWS:
        return WindowBias
    if {"masked_fill", "use_alibi"} <= code.names_used(cls):
        found = _statement_of(code.parse(cls.forward))
        return InMask if found is not None and ast.unparse(found[1]) == _IN_MASK else None
    compute = getattr(cls, "compute_bias", None)
    if not isinstance(compute, types.FunctionType) or code.body(compute) not in _COMPUTED:
        return None
    if not _has_buckets(cls, "_relative_position_bucket"):
        return None
    found = _statement_of(code.parse(cls.forward))
    if found is None:
        return None
    return OwnBias if ast.unparse(found[1]) == _OWN else SharedBias


_OPTIONS = {"bidirectional", "num_buckets", "max_distance"}


def _has_buckets(cls: Any, name: str) -> bool:
    """Whether a class has a function of the difference of two positions, and of constants."""
    static = inspect.getattr_static(cls, name, None)
    bucket = getattr(static, "__func__", static)
    if not isinstance(bucket, types.FunctionType):
        return False
    names = list(inspect.signature(bucket).parameters)
    names = names if isinstance(static, staticmethod) else names[1:]
    return len(names) > 0 and set(names[1:]) <= _OPTIONS


def is_the_statement(statement: ast.stmt) -> bool:
    """Whether a statement makes the bias of a layer of its own."""
    return isinstance(statement, ast.If) and ast.unparse(statement) == _OWN


def _statement_of(tree: ast.FunctionDef | None) -> tuple[list[ast.stmt], ast.stmt] | None:
    """Return the only statement that makes a bias, and the block that it is in; or None."""
    found = []
    for node in [] if tree is None else ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            found += [(body, each) for each in body if ast.unparse(each) in _CALLS]
    return found[0] if len(found) == 1 else None


def own_bias_class(source: Any) -> type[nn.Module]:
    """Return the subclass of a module's class that makes a table of its biases."""
    if source not in _classes:
        base = _base_of(sublayers.original(source))
        members: dict[str, Any] = {}
        if base is None:
            return source
        if base not in (EncoderBias, WindowBias):
            forward = _rewritten(source)
            if forward is None:
                return source
            members["forward"] = forward
        origin = sublayers.origin_of(source, (own_bias_class, (source,)))
        _classes[source] = sublayers.subclass(base, origin, members)
    return _classes[source]


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _rewritten(cls: Any) -> types.FunctionType | None:
    """Return a class's ``forward`` with a call in place of the statement, or None."""
    tree = code.parse(cls.forward)
    found = _statement_of(tree)
    if tree is None or found is None:
        return None
    block, statement = found
    target = ast.unparse(statement.targets[0]) if isinstance(statement, ast.Assign) else BIAS
    (call,) = ast.parse(f"{target} = {_CALLS[ast.unparse(statement)]}").body
    for node in ast.walk(call):
        ast.copy_location(node, statement)
    block[block.index(statement)] = call
    return code.compile_like(tree, cls.forward)
