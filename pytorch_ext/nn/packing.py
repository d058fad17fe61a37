"""Padded batches without their padding.

Everything in an encoder but its attention treats each token by itself. So the real tokens of a
padded batch can go through the layers packed end to end, as one row without padding, and only the
attention has to know where each sequence begins (:func:`trifuse.varlen_attention`). Padding then
costs nothing anywhere. It is how Hugging Face's "padding-free" training and torch's NestedTensor
fast path work; here it serves training and inference alike.

A model packs its tokens once, before or after their embedding, and unpacks once after its last
layer. In between, a :class:`PackedSequences` stands where the padding mask would.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from trifuse.nn.dropout import Dropout
from trifuse.nn.linear import Linear, is_watched
from trifuse.ops.attention import varlen_attention


class PackedSequences(NamedTuple):
    """Where the T real tokens of a padded batch (B, L) lie."""

    indices: Tensor  # int64 (T,): their places among the B · L, in order
    cu_seqlens: Tensor  # int32 (B + 1,): where each sequence begins among the T, and T
    max_seqlen: int


class CrossSequences(NamedTuple):
    """Where the tokens of queries and of the keys that they attend to lie."""

    queries: PackedSequences
    keys: PackedSequences


# What torch offers that treats tokens one by one.
_TOKENWISE = (
    nn.Dropout,
    nn.Embedding,
    nn.GELU,
    nn.Identity,
    nn.LayerNorm,
    nn.Linear,
    nn.ModuleList,
    nn.ReLU,
    nn.SiLU,
    nn.Tanh,
    Dropout,
    Linear,
    NonDynamicallyQuantizableLinear,
)


def pack(encoder: nn.Module, keep: Tensor, *known: str) -> PackedSequences | None:
    """Find the real tokens, unless packing would gain nothing or could be noticed inside.

    Args:
        encoder: what the packed tokens will go through.
        keep: bool (B, L), True where a token is real. Its values are read, which waits for a GPU
            once, as torch's own fast path does.
        known: modules of Python whose classes treat tokens one by one, except for attention that
            takes :class:`PackedSequences`. The encoder may hold these and torch's simplest.

    Returns:
        None where there is no padding, or nothing else; where the values can't be read, under
        ``torch.compile``, ``torch.func`` and the like; where the encoder holds an unknown class, a
        ``forward`` that was replaced, or a hook, which would see the packed shape.
    """
    if not _readable(keep) or not _tokenwise(encoder, known):
        return None
    packed = _find(keep)
    return None if packed.indices.shape[0] in (0, keep.numel()) else packed


def pack_cross(
    decoder: nn.Module,
    queries: Tensor,
    keys: Tensor,
    keep_queries: Tensor | None,
    keep_keys: Tensor | None,
    *known: str,
) -> CrossSequences | None:
    """The same for a decoder: its own tokens, (B, L, ...), and those of its memory, (B, S, ...).

    Where one of them has no mask, all of its tokens are real.
    """
    masks = [
        torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if keep is None else keep
        for x, keep in ((queries, keep_queries), (keys, keep_keys))
    ]
    if not all(map(_readable, masks)) or not _tokenwise(decoder, known):
        return None
    packed = CrossSequences(*map(_find, masks))
    counts = [each.indices.shape[0] for each in packed]
    if 0 in counts or counts == [keep.numel() for keep in masks]:
        return None
    return packed


def _readable(keep: Tensor) -> bool:
    return not (
        type(keep) is not Tensor
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or (keep.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _tokenwise(stack: nn.Module, known: tuple[str, ...]) -> bool:
    return not any(
        is_watched(module) or not (type(module) in _TOKENWISE or type(module).__module__ in known)
        for module in stack.modules()
    )


def _find(keep: Tensor) -> PackedSequences:
    indices = keep.flatten().nonzero().squeeze(-1)
    lengths = keep.sum(-1, dtype=torch.int32)
    cu_seqlens = nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return PackedSequences(indices, cu_seqlens, longest)


def gather(padded: Tensor, packed: PackedSequences) -> Tensor:
    """The real tokens of (B, L) or (B, L, features) as a batch of one row, (1, T, ...)."""
    return padded.flatten(0, 1).index_select(0, packed.indices).unsqueeze(0)


def scatter(tokens: Tensor, packed: PackedSequences, shape: torch.Size) -> Tensor:
    """The inverse of :func:`gather`: (1, T, features) back to ``shape``, 0 in the padding."""
    padded = tokens.new_zeros((shape[0] * shape[1], shape[2]))
    return padded.index_copy_(0, packed.indices, tokens.squeeze(0)).view(shape)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedSequences | CrossSequences,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """:func:`trifuse.varlen_attention`, on (1, H, T, E) tensors and back to such."""
    queries, keys = packed if isinstance(packed, CrossSequences) else (packed, packed)
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    out = varlen_attention(
        query,
        key,
        value,
        queries.cu_seqlens,
        keys.cu_seqlens,
        max_seqlen_q=queries.max_seqlen,
        max_seqlen_k=keys.max_seqlen,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
    )
    return out.transpose(0, 1).unsqueeze(0)
