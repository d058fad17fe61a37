"""Modules that make a bias of relative positions. The bias becomes a table by distance.

T5's first layer makes a bias for all layers, UMT5's layers make one each, and MPNet's encoder makes
one. Each is a matrix with as many rows and columns as there are tokens. They get a subclass whose
bias is a :class:`trifuse.written_out.DistanceBias`, which attention takes as ``relative_bias``. So
no matrix is made, and the gradient of the table flows to the model's own embedding of buckets.

Falcon's model puts ALiBi into the mask of its layers, one matrix for each head. It gets a subclass
that keeps the two apart (:class:`trifuse.written_out.MaskedKeyBias`).

In UMT5, the statement that makes the bias becomes a call, which for packed tokens makes the bias of
the longest sequence.
"""

from __future__ import annotations

import ast
import inspect
import types
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trifuse.nn import packing
from trifuse.nn.packing import CrossSequences, PackedSequences
from trifuse.ops import _modes
from trifuse.recipes import code, sublayers
from trifuse.recipes.arguments import BIAS, MASK
from trifuse.written_out import DistanceBias, MaskedKeyBias, PackedTerm

# The statement with which an attention makes its bias, with placeholders for names that differ.
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
# The statements of transformers 4.57, which add the mask to the bias.
_STATEMENTS_WITH_MASK = """
if not self.has_relative_attention_bias:
    position_bias = torch.zeros(
        (1, self.n_heads, seq_length, key_length), device=scores.device, dtype=scores.dtype
    ){checkpointed}
else:
    position_bias = self.compute_bias(
        real_seq_length, key_length, device=scores.device, cache_position=cache_position
    )
    position_bias = position_bias[:, :, -seq_length:, :]
if {mask} is not None:
    causal_mask = {mask}[:, :, :, : key_states.shape[-2]]
    position_bias = position_bias + causal_mask
"""
_OWN = code.normal(_STATEMENT.format(length="seq_length", checkpointed=""))
_SHARED = code.normal(_STATEMENT.format(length="input_shape[1]", checkpointed=_CHECKPOINTED))
_OWN_WITH_MASK = code.normal(_STATEMENTS_WITH_MASK.format(mask=MASK, checkpointed=""))
_SHARED_WITH_MASK = code.normal(
    _STATEMENTS_WITH_MASK.format(mask="mask", checkpointed=_CHECKPOINTED)
)
_SUM = (
    "self._trifuse_bias_with_mask("
    "{mask}, seq_length, real_seq_length, key_length, scores, cache_position)"
)
# Each with the call that replaces it.
_CALLS = {
    _OWN: f"self._trifuse_bias({MASK}, seq_length, key_length, query_states, past_seen_tokens)",
    _SHARED: "self._trifuse_bias(mask, input_shape[1], key_length, query_states, past_seen_tokens)",
    _OWN_WITH_MASK: _SUM.format(mask=MASK),
    _SHARED_WITH_MASK: _SUM.format(mask="mask"),
}
_COMPUTE_BIAS = """
if device is None:
    device = self.relative_attention_bias.weight.device
{context}
memory_position = torch.arange(key_length, dtype=torch.long, device=device)[None, :]
relative_position = memory_position - context_position
relative_position_bucket = self._relative_position_bucket(relative_position{options})
values = self.relative_attention_bias(relative_position_bucket)
values = values.permute([2, 0, 1]).unsqueeze(0)
return values
"""
_BY_NUMBER = """
context_position = (
    torch.arange(query_length, dtype=torch.long, device=device)[:, None] + past_seen_tokens
)
"""
_BY_POSITIONS = """
if cache_position is None:
    context_position = torch.arange(query_length, dtype=torch.long, device=device)[:, None]
else:
    context_position = cache_position[:, None]{moved}
"""
_BUCKETS = """,
    bidirectional={bidirectional},
    num_buckets=self.relative_attention_num_buckets,
    max_distance=self.relative_attention_max_distance,
"""
_OPTIONS_OF_BUCKETS = (
    "",
    _BUCKETS.format(bidirectional="(not self.is_decoder)"),
    _BUCKETS.format(bidirectional="False"),
)


def _computed(*contexts: str) -> set[str]:
    return {
        code.normal(_COMPUTE_BIAS.format(context=context, options=options))
        for context in contexts
        for options in _OPTIONS_OF_BUCKETS
    }


_COMPUTED = _computed(_BY_NUMBER)
_COMPUTED_AT_POSITIONS = _computed(
    _BY_POSITIONS.format(moved=""), _BY_POSITIONS.format(moved=".to(device)")
)
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


# The statement with which a model puts ALiBi into its mask, and the call that replaces it.
_IN_MASK = code.normal("""
causal_mask = torch.masked_fill(
    alibi / math.sqrt(self.config.hidden_size // self.num_heads), causal_mask < -1, min_dtype
)
""")
_CALLS[_IN_MASK] = (
    "self._trifuse_mask("
    "alibi / math.sqrt(self.config.hidden_size // self.num_heads), causal_mask, min_dtype)"
)


class DistanceBiased(nn.Module):
    """Mixin for fused classes of modules that make a table, before the original class."""


class EncoderBias(DistanceBiased):
    """An encoder that makes a bias for its layers, like MPNet's."""

    def compute_position_bias(
        self, x: Tensor, position_ids: Tensor | None = None, num_buckets: int = 32
    ) -> Tensor:
        """Same signature as the original class's method."""
        encoder: Any = self
        if position_ids is not None or _is_traced():
            matrix: Tensor = super().compute_position_bias(x, position_ids, num_buckets)  # type: ignore[misc]
            return matrix
        B, L = x.shape[:2]
        distances = torch.arange(1 - L, L, device=x.device)
        buckets = encoder.relative_position_bucket(distances, num_buckets=num_buckets)
        return DistanceBias.of(encoder.relative_attention_bias(buckets).T, L, L, B)


class _Biased(DistanceBiased):
    """An attention that makes its bias itself."""

    def compute_bias(
        self, query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0
    ) -> Tensor:
        """Same signature as the original class's method."""
        source: Any = super()
        if _needs_matrix(self):
            matrix: Tensor = source.compute_bias(
                query_length, key_length, device=device, past_seen_tokens=past_seen_tokens
            )
            return matrix
        # The biases of the last query, for more keys than there are, include those of all queries.
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
        """Return the bias, (1, H, queries, keys); None for packed tokens without a bias."""
        attention: Any = self
        if isinstance(mask, (PackedSequences, CrossSequences)):
            if not attention.has_relative_attention_bias:
                return None
            queries, keys = packing.sides(mask)
            length, key_length = queries.max_seqlen, keys.max_seqlen
        elif not attention.has_relative_attention_bias:
            return _no_bias(self, (1, attention.n_heads, length, key_length), like)
        return self.compute_bias(length, key_length, device=like.device, past_seen_tokens=past)


class _BiasedWithMask(DistanceBiased):
    """An attention of transformers 4.57 that makes its bias itself, and adds its mask to it."""

    def compute_bias(
        self,
        query_length: int,
        key_length: int,
        device: Any = None,
        cache_position: Tensor | None = None,
    ) -> Tensor:
        """Same signature as the original class's method."""
        source: Any = super()
        if _needs_matrix(self) or not _follow_each_other(cache_position):
            matrix: Tensor = source.compute_bias(
                query_length, key_length, device=device, cache_position=cache_position
            )
            return matrix
        if cache_position is None:
            module: Any = self
            own = module.relative_attention_bias.weight.device if device is None else device
            cache_position = torch.arange(query_length, device=own)
        rows = cache_position.shape[0]
        row = source.compute_bias(
            1, rows + key_length - 1, device=device, cache_position=cache_position[-1:]
        )
        return DistanceBias.of(row[0, :, 0], rows, key_length)

    def _trifuse_bias_with_mask(
        self,
        mask: Any,
        length: int,
        whole_length: Any,
        key_length: int,
        like: Tensor,
        positions: Tensor | None,
    ) -> Tensor:
        """Return the sum of the bias and the mask, (1 or B, H, queries, keys)."""
        attention: Any = self
        has_bias = attention.has_relative_attention_bias
        if isinstance(mask, PackedTerm):
            if not has_bias:
                return mask
            queries, keys = packing.sides(mask.packed)
            bias = self.compute_bias(queries.max_seqlen, keys.max_seqlen, device=like.device)
            return PackedTerm.of(mask.packed, bias, like.dtype, like.device)
        if has_bias:
            bias = self.compute_bias(whole_length, key_length, like.device, positions)
            if bias.shape[2] != length:
                bias = bias[:, :, -length:, :]
        else:
            bias = _no_bias(self, (1, attention.n_heads, length, key_length), like)
        if mask is None:
            return bias
        mask = mask[:, :, :, :key_length]
        if isinstance(bias, DistanceBias) and type(mask) is Tensor and not mask.requires_grad:
            return bias.with_mask(mask)
        return bias + mask


def no_bias(attention: Any, x: Tensor, key: Tensor) -> Tensor:
    """Return the bias of an attention that has none, from x, (B, Lq, ...), to (B, H, Lk, ...)."""
    return _no_bias(attention, (1, attention.n_heads, x.size(1), key.size(2)), x)


def is_zero(bias: Any) -> bool:
    """Whether a bias is known to be 0 for all pairs."""
    if not isinstance(bias, DistanceBias) or not bias.is_usable:
        return False
    return bias.table is None and bias.mask is None


def _no_bias(attention: Any, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return a bias of 0 for all pairs."""
    if not _needs_matrix(attention):
        return DistanceBias.zero(shape, like)
    checkpointed = getattr(attention, "gradient_checkpointing", False) and attention.training
    return torch.zeros(shape, dtype=like.dtype, device=like.device, requires_grad=checkpointed)


def _follow_each_other(positions: Tensor | None) -> bool:
    """Whether each position is known to be one more than the previous one."""
    if positions is None:
        return True
    return _modes.is_readable(positions) and bool((positions.diff() == 1).all())


class SharedBias(DistanceBiased):
    """An attention that makes a bias for all layers, like that of T5's first layer."""


class OwnBias(DistanceBiased):
    """An attention that makes a bias in each layer, like UMT5's."""


class _SharedBias(SharedBias, _Biased): ...


class _OwnBias(OwnBias, _Biased): ...


class _SharedBiasWithMask(SharedBias, _BiasedWithMask): ...


class _OwnBiasWithMask(OwnBias, _BiasedWithMask): ...


# Keyed by the statements that make the bias.
_BASES: dict[str, type[DistanceBiased]] = {
    _OWN: _OwnBias,
    _SHARED: _SharedBias,
    _OWN_WITH_MASK: _OwnBiasWithMask,
    _SHARED_WITH_MASK: _SharedBiasWithMask,
}


class InMask(DistanceBiased):
    """A model that puts biases of the keys into the mask of its layers, like Falcon."""

    def _trifuse_mask(self, by_key: Tensor, mask: Tensor, least: float) -> Tensor:
        """Return the mask with the biases, (B, H, queries, keys)."""
        if _needs_matrix(self) or torch.compiler.is_compiling():
            return torch.masked_fill(by_key, mask < -1, least)
        return MaskedKeyBias.of(by_key, mask, least)


def _needs_matrix(attention: nn.Module) -> bool:
    """Whether the bias must be a tensor of numbers.

    Reentrant checkpoints take it as an input of a custom autograd function.
    """
    checkpointed = getattr(attention, "gradient_checkpointing", False) and attention.training
    return bool(checkpointed) or _is_traced()


def _is_traced() -> bool:
    return _modes.transform_active() or torch.jit.is_tracing()


def makes_its_own(module: nn.Module) -> bool:
    """Whether a module of transformers makes a bias of distances, for itself or for its layers."""
    return _base_of(sublayers.original(type(module))) is not None


# Each key holds the methods that were read, since those of a class may be replaced.
_recognised: dict[tuple[Any, ...], type[DistanceBiased] | None] = {}
_READ = (
    "forward",
    "compute_bias",
    "compute_position_bias",
    "_relative_position_bucket",
    "relative_position_bucket",
)


def _key(cls: Any) -> tuple[Any, ...]:
    return cls, *(getattr(cls, name, None) for name in _READ)


def _base_of(cls: Any) -> type[DistanceBiased] | None:
    """Return the base for a class of modules; None if its code is unknown."""
    key = _key(cls)
    if key not in _recognised:
        known = sublayers.is_of_transformers(cls)
        _recognised[key] = _read(cls) if known else None
    return _recognised[key]


def _read(cls: Any) -> type[DistanceBiased] | None:
    compute = getattr(cls, "compute_position_bias", None)
    if isinstance(compute, types.FunctionType) and code.body(compute) in _OF_ENCODERS:
        return EncoderBias if _has_buckets(cls, "relative_position_bucket") else None
    if {"masked_fill", "use_alibi"} <= code.names_used(cls):
        found = _statements_of(code.parse(cls.forward))
        return InMask if found is not None and found.text == _IN_MASK else None
    compute = getattr(cls, "compute_bias", None)
    body = code.body(compute) if isinstance(compute, types.FunctionType) else None
    if body is None or not _has_buckets(cls, "_relative_position_bucket"):
        return None
    found = _statements_of(code.parse(cls.forward))
    base = None if found is None else _BASES.get(found.text)
    if base is None:
        return None
    known = _COMPUTED_AT_POSITIONS if issubclass(base, _BiasedWithMask) else _COMPUTED
    return base if body in known else None


_OPTIONS = {"bidirectional", "num_buckets", "max_distance"}


def _has_buckets(cls: Any, name: str) -> bool:
    """Whether a class has a function that depends only on a distance and on constants."""
    static = inspect.getattr_static(cls, name, None)
    bucket = getattr(static, "__func__", static)
    if not isinstance(bucket, types.FunctionType):
        return False
    names = list(inspect.signature(bucket).parameters)
    names = names if isinstance(static, staticmethod) else names[1:]
    return len(names) > 0 and set(names[1:]) <= _OPTIONS


class Made(NamedTuple):
    """Statements that make a bias of the layer's own."""

    statements: int  # how many there are
    with_mask: bool  # whether they add the mask to it


def made_at(body: list[ast.stmt], at: int) -> Made | None:
    """Return the statements, from a place on, that make a bias of the layer's own, or None."""
    for count, text in ((1, _OWN), (2, _OWN_WITH_MASK)):
        if _text(body[at : at + count]) == text:
            return Made(count, text == _OWN_WITH_MASK)
    return None


def _text(statements: list[ast.stmt]) -> str:
    return ast.unparse(ast.Module(body=statements, type_ignores=[]))


class _Found(NamedTuple):
    """The statements that make a bias."""

    block: list[ast.stmt]  # the block that holds them
    at: int
    how_many: int
    text: str


def _statements_of(tree: ast.FunctionDef | None) -> _Found | None:
    """Return the only statements of a function that make a bias, or None."""
    found = []
    for node in [] if tree is None else ast.walk(tree):
        held = getattr(node, "body", None)
        body: list[ast.stmt] = held if isinstance(held, list) else []
        for at in range(len(body)):
            for count in (1, 2)[: len(body) - at]:
                if (text := _text(body[at : at + count])) in _CALLS:
                    found.append(_Found(body, at, count, text))
    return found[0] if len(found) == 1 else None


def own_bias_class(source: Any) -> type[nn.Module]:
    """Return the subclass of a module's class that makes a table of its biases."""
    key = _key(source)
    if key not in _classes:
        base = _base_of(sublayers.original(source))
        members: dict[str, Any] = {}
        if base is None:
            return source
        if base is not EncoderBias:
            forward = _rewritten(source)
            if forward is None:
                return source
            members["forward"] = forward
        origin = sublayers.origin_of(source, (own_bias_class, (source,)))
        _classes[key] = sublayers.subclass(base, origin, members)
    return _classes[key]


_classes: dict[tuple[Any, ...], type[nn.Module]] = {}


def _rewritten(cls: Any) -> types.FunctionType | None:
    """Return a class's ``forward`` with a call in place of the statement, or None."""
    tree = code.parse(cls.forward)
    found = _statements_of(tree)
    if tree is None or found is None:
        return None
    block, at, count, text = found
    first = block[at]
    target = ast.unparse(first.targets[0]) if isinstance(first, ast.Assign) else BIAS
    (call,) = ast.parse(f"{target} = {_CALLS[text]}").body
    for node in ast.walk(call):
        ast.copy_location(node, first)
    block[at : at + count] = [call]
    return code.compile_like(tree, cls.forward)
