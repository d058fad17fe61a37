"""Padded batches without their padding.

Everything in an encoder but its attention treats each token by itself. So the real tokens of a
padded batch can go through the layers packed end to end, as one row without padding, and only the
attention has to know where each sequence begins (:func:`trifuse.varlen_attention`). Padding then
costs nothing anywhere. It is how Hugging Face's "padding-free" training and torch's NestedTensor
fast path work; here it serves training and inference alike.

A model packs its tokens once, before or after their embedding, and unpacks once after its last
layer. In between, a :class:`PackedSequences` stands where the padding mask would.

A stack that is asked to and can't says so by the logger "trifuse", once for each cause. Each call
looks again, so that it packs as soon as the cause has gone. A class of such a stack has a method
``why_padded()``, which answers for reports what holds whatever the batch.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from trifuse.backends import log
from trifuse.nn.dropout import Dropout
from trifuse.nn.linear import Linear, why_watched
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
        None where there is no padding, or nothing else. None too, with a warning, where the values
        can't be read, under ``torch.compile``, ``torch.func`` and the like; where the encoder holds
        an unknown class, a ``forward`` that was replaced, or a hook, which would see the packed
        shape.
    """
    if not _may_pack(encoder, known, keep):
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
    if not _may_pack(decoder, known, *masks):
        return None
    packed = CrossSequences(*map(_find, masks))
    counts = [each.indices.shape[0] for each in packed]
    if 0 in counts or counts == [keep.numel() for keep in masks]:
        return None
    return packed


def _may_pack(stack: nn.Module, known: tuple[str, ...], *masks: Tensor) -> bool:
    if torch.compiler.is_compiling():
        say(stack, "torch.compile can't read its mask")
        return False
    for keep in masks:
        if why := _why_unreadable(keep):
            say(stack, why)
            return False
    obstacle = find_obstacle(stack, known)
    if obstacle is not None:
        say(stack, obstacle)
    return obstacle is None


def _why_unreadable(keep: Tensor) -> str | None:
    if type(keep) is not Tensor:
        return f"its mask is a {type(keep).__name__}, not a plain Tensor"
    if torch.jit.is_tracing():
        return "a trace would hold the lengths of this batch"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "torch.func transforms the call"
    if keep.is_cuda and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph would hold the lengths of this batch"
    return None


class Obstacle(NamedTuple):
    """A module that packed tokens can't go through, or that would notice."""

    path: str  # its name in the stack; "" is the stack itself
    module: nn.Module
    reason: str

    def __str__(self) -> str:
        return f"{self.path or 'it'} {self.reason}"


def find_obstacle(stack: nn.Module, known: tuple[str, ...]) -> Obstacle | None:
    """The first module of a stack that must not see packed tokens; ``known`` as in :func:`pack`."""
    for path, module in stack.named_modules():
        cls = type(module)
        if not (cls in _TOKENWISE or cls.__module__ in known):
            name = f"{cls.__module__}.{cls.__qualname__}"
            reason = f"is a {name}, which isn't known to treat tokens one by one"
            return Obstacle(path, module, reason)
        if why := why_watched(module):
            return Obstacle(path, module, f"has {why}")
    return None


# What was said of each module.
_said: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


def say(stack: nn.Module, why: str | Obstacle) -> None:
    """Warn that a stack computes padding too, once for each cause.

    Stacks inside one another warn once of an obstacle that is in the way of both.
    """
    if not torch.compiler.is_compiling():  # which calls this while it traces, and seldom
        owner, key = (why.module, why.reason) if isinstance(why, Obstacle) else (stack, why)
        said = _said.setdefault(owner, set())
        if key in said:
            return
        said.add(key)
    _warn(type(stack).__name__, str(why))


def _warn(stack: str, why: str) -> None:
    log.warning("%s computes padding too, because %s", stack, why)


# As torch.compiler.assume_constant_result does, which would import Dynamo.
_warn._dynamo_marked_constant = True  # type: ignore[attr-defined]


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
