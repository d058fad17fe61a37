"""Padded batches without their padding.

Everything in an encoder except its attention treats each token by itself. So the real tokens of a
padded batch can go through the layers packed end to end, as one row without padding. Only the
attention needs the start of each sequence (:func:`trifuse.varlen_attention`). Padding then costs
nothing. Hugging Face's "padding-free" training and torch's NestedTensor fast path work this way
too; here it serves training and inference alike.

A model packs its tokens once, before or after their embedding, and unpacks once after its last
layer. In between, a :class:`PackedSequences` takes the place of the padding mask.

If a stack should pack but can't, it warns through the logger "trifuse", once for each cause. Each
call checks again, so that the stack packs as soon as the cause is gone. The class of such a stack
has a method ``why_padded()``, which returns, for reports, a cause that holds for every batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from trifuse.backends import log
from trifuse.nn import walks
from trifuse.nn.dropout import Dropout
from trifuse.nn.dropout_add_layer_norm import LayerNorm
from trifuse.nn.linear import FrozenLinear, Linear, why_intercepted
from trifuse.ops import _draws
from trifuse.ops.attention import packed_attention, varlen_attention


class PackedSequences(NamedTuple):
    """The positions of the T real tokens of a padded batch (B, L)."""

    indices: Tensor  # int64 (T,): their positions in the flattened batch, in order
    cu_seqlens: Tensor  # int64 (B + 1,): where each sequence begins among the T tokens, then T
    max_seqlen: int
    window: int | None = None  # how far a query attends to either side; None: no limit
    causal: bool | None = False  # None: the attending layer decides


class CrossSequences(NamedTuple):
    """The positions of the query tokens, and of the key tokens that they attend to."""

    queries: PackedSequences
    keys: PackedSequences


def sides(packed: PackedSequences | CrossSequences) -> tuple[PackedSequences, PackedSequences]:
    """Returns where the query tokens are, and where the key tokens are."""
    return packed if isinstance(packed, CrossSequences) else (packed, packed)


# Modules that treat tokens one by one.
_TOKENWISE = (
    nn.Dropout,
    nn.Embedding,
    nn.GELU,
    nn.Identity,
    nn.LayerNorm,
    nn.Linear,
    nn.ModuleDict,
    nn.ModuleList,
    nn.ParameterDict,
    nn.RMSNorm,
    nn.ReLU,
    nn.SiLU,
    nn.Tanh,
    Dropout,
    FrozenLinear,
    LayerNorm,
    Linear,
    NonDynamicallyQuantizableLinear,
)


def pack(encoder: nn.Module, keep: Tensor, *known: str) -> PackedSequences | None:
    """Finds the real tokens, unless packing would gain nothing or would be observable inside.

    Args:
        encoder: the module that the packed tokens will go through.
        keep: bool (B, L), True where a token is real. Its values are read, which waits for a GPU
            once, as in torch's own fast path.
        known: names of Python modules whose classes treat tokens one by one, except for attention
            that takes :class:`PackedSequences`. The encoder may hold these and ``_TOKENWISE``.

    Returns:
        The packed sequences. None if there is no padding or nothing but padding. None with a
        warning if the values can't be read, as under ``torch.compile`` or ``torch.func``, or if the
        encoder holds an unknown class, a replaced ``forward``, or a hook, which would get the
        packed shape.
    """
    if not _may_pack(encoder, known, keep):
        return None
    packed = find(keep)
    return None if packed.indices.shape[0] in (0, keep.numel()) else packed


def pack_cross(
    decoder: nn.Module,
    queries: Tensor,
    keys: Tensor,
    keep_queries: Tensor | None,
    keep_keys: Tensor | None,
    *known: str,
) -> CrossSequences | None:
    """As :func:`pack`, for a decoder's own tokens and those of its memory.

    Args:
        decoder, known: as ``encoder`` and ``known`` of :func:`pack`.
        queries: (B, L, ...), the decoder's own tokens.
        keys: (B, S, ...), those of its memory.
        keep_queries, keep_keys: their masks. Tokens without a mask are all real.
    """
    masks = [
        torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if keep is None else keep
        for x, keep in ((queries, keep_queries), (keys, keep_keys))
    ]
    if not _may_pack(decoder, known, *masks):
        return None
    packed = CrossSequences(*map(find, masks))
    counts = [each.indices.shape[0] for each in packed]
    if 0 in counts or counts == [keep.numel() for keep in masks]:
        return None
    return packed


def _may_pack(stack: nn.Module, known: tuple[str, ...], *masks: Tensor) -> bool:
    if torch.compiler.is_compiling():
        warn_padded(stack, "torch.compile can't read its mask")
        return False
    for keep in masks:
        if why := why_unreadable(keep):
            warn_padded(stack, why)
            return False
    obstacle = find_obstacle(stack, known)
    if obstacle is not None:
        warn_padded(stack, obstacle)
    return obstacle is None


def why_unreadable(keep: Tensor) -> str | None:
    """Returns why the values of a mask can't be read to pack its tokens, or None if they can."""
    if type(keep) is not Tensor:
        return f"its mask is a {type(keep).__name__}, not a plain Tensor"
    if torch.jit.is_tracing():
        return "a trace would hold the lengths of this batch"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "torch.func transforms the call"
    if _draws.active():
        return "trifuse.distributed.part_of_batch counts the rows of padding"
    if keep.is_cuda and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph would hold the lengths of this batch"
    return None


class Obstacle(NamedTuple):
    """A module that packed tokens can't go through, or in which the packing is observable."""

    path: str  # its name in the stack; "" is the stack itself
    module: nn.Module
    reason: str

    def __str__(self) -> str:
        return f"{self.path or 'it'} {self.reason}"


class Examiner(Protocol):
    """Examines modules of unknown classes."""

    grounds: walks.Grounds  # what its answers depend on besides the modules' classes and places

    def why_not(self, module: nn.Module) -> str | None:
        """Returns why a module must not get packed tokens; None if it may."""


def find_obstacle(
    stack: nn.Module,
    known: tuple[str, ...],
    inside: tuple[str, ...] | None = None,
    examiner: Callable[[], Examiner] | None = None,
    question: Hashable = None,
) -> Obstacle | None:
    """Returns the first module that must not get packed tokens.

    Args:
        stack: the module that holds the modules that the packed tokens will go through.
        known: as in :func:`pack`.
        inside: the names of the stack's children that they will go through. Default: all children.
        examiner: makes the examiner of modules of unknown classes. Default: none of them may get
            packed tokens.
        question: what the examiner's answers depend on besides the modules in the stack. Modules
            that aren't ``inside`` count by their classes and places.
    """
    key = "obstacle", known, inside, question
    if walks.holds(stack, key):
        return None
    examines = None if examiner is None else examiner()
    grounds = walks.Grounds() if examines is None else examines.grounds
    for path, module in _named_modules(stack, inside):
        cls = unsharded(type(module))
        if _is_adapted_linear(module):
            grounds.conditions[module] = _is_adapted_linear
        elif not (cls in _TOKENWISE or cls.__module__ in known):
            reason = why_unknown(cls) if examines is None else examines.why_not(module)
            if reason is not None:
                return Obstacle(path, module, reason)
        if why := why_intercepted(module, SHARDING):
            return Obstacle(path, module, f"has {why}")
    walks.keep(stack, key, grounds, inside, SHARDING)
    return None


def _named_modules(
    stack: nn.Module, inside: Collection[str] | None
) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules of a stack, or of some of its children, each once."""
    if inside is None:
        yield from stack.named_modules()
        return
    seen: set[nn.Module] = set()
    for name, child in stack._modules.items():
        if name in inside and child is not None:
            yield from child.named_modules(seen, name)


# Hooks of FSDP2 gather a module's parameters before its call, and leave its tensors as they are.
SHARDING = "torch.distributed.fsdp._fully_shard"


def unsharded(cls: type) -> type:
    """Returns the class from which FSDP2 has derived a module's class, or the class itself."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not issubclass(cls, fsdp.FSDPModule):
        return cls
    first, *others = cls.__bases__
    return others[0] if first is fsdp.FSDPModule and len(others) == 1 else cls


def _is_adapted_linear(module: nn.Module) -> bool:
    """Returns whether a module is a linear layer with peft's LoRA.

    Variants of LoRA may depend on the positions of tokens.
    """
    cls = type(module)
    if (cls.__module__, cls.__name__) != ("peft.tuners.lora.layer", "Linear"):
        return False
    return not getattr(module, "lora_variant", None)


def why_unknown(cls: type) -> str:
    """Returns why a class is an obstacle if nothing is known of it, worded to follow a name."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    return f"is a {name}, which isn't known to treat tokens one by one"


# The causes that each module has warned of.
_said: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


def warn_padded(stack: nn.Module, why: str | Obstacle) -> None:
    """Warns that a stack computes padding too, once for each cause.

    Nested stacks warn once of an obstacle that they share.
    """
    if not torch.compiler.is_compiling():  # torch.compile calls this only while tracing
        owner, key = (why.module, why.reason) if isinstance(why, Obstacle) else (stack, why)
        said = _said.setdefault(owner, set())
        if key in said:
            return
        said.add(key)
    _warn(type(stack).__name__, str(why))


def _warn(stack: str, why: str) -> None:
    log.warning("%s computes padding too, because %s", stack, why)


# torch.compiler.assume_constant_result sets this too, but would import Dynamo with trifuse.
_warn._dynamo_marked_constant = True  # type: ignore[attr-defined]


def find(keep: Tensor) -> PackedSequences:
    """Finds the real tokens of a padded batch, which ``keep``, bool (B, L), marks."""
    lengths = keep.sum(-1)
    # int64, as the kernels read it, so that no layer converts it.
    cu_seqlens = lengths.new_zeros(lengths.shape[0] + 1)
    torch.cumsum(lengths, 0, out=cu_seqlens[1:])
    if keep.is_cuda and keep.numel():
        # Both numbers in one copy, because each copy waits for the GPU, as `nonzero` would.
        total, longest = torch.stack((cu_seqlens[-1], lengths.max())).tolist()
        indices = torch.nonzero_static(keep.flatten(), size=total).squeeze(-1)
    else:
        indices = keep.flatten().nonzero().squeeze(-1)
        longest = int(lengths.max()) if lengths.numel() else 0
    return PackedSequences(indices, cu_seqlens, longest)


def places(packed: PackedSequences) -> tuple[Tensor, Tensor]:
    """Returns the sequence of each token, (T,), and its place among the tokens of that sequence."""
    starts = packed.cu_seqlens.long()
    sequences = torch.repeat_interleave(starts.diff())
    tokens = torch.arange(packed.indices.shape[0], device=sequences.device)
    return sequences, tokens - starts[sequences]


def are_in_one_piece(packed: PackedSequences) -> bool:
    """Returns whether there is no padding between the tokens of a sequence."""
    sequences, _ = places(packed)
    follows = (sequences.diff() != 0) | (packed.indices.diff() == 1)
    return bool(follows.all())


def gather(padded: Tensor, packed: PackedSequences) -> Tensor:
    """Gathers the real tokens of (B, L) or (B, L, features) into one row, (1, T, ...)."""
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
    softcap: float | None = None,
    sinks: Tensor | None = None,
    attn_mask: Tensor | None = None,
    relative_bias: Tensor | None = None,
    query_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    relative_index: Tensor | None = None,
) -> Tensor:
    """Applies :func:`trifuse.varlen_attention` to (1, H, T, E) tensors; returns (1, H, T, E).

    Query heads are divided evenly among the key heads. ``attn_mask`` is broadcastable to (B, H,
    longest queries, longest keys); ``relative_bias`` and ``relative_index`` are made for these
    lengths; ``query_bias`` and ``key_bias`` are (1, H, T, n).
    """
    queries, keys = sides(packed)
    options = (attn_mask, queries.window, softcap, sinks, relative_bias, relative_index)
    if all(option is None for option in options):
        plain_out = packed_attention(
            query,
            key,
            value,
            queries.cu_seqlens,
            keys.cu_seqlens,
            queries.max_seqlen,
            keys.max_seqlen,
            dropout_p,
            is_causal,
            scale,
        )
        if plain_out is not None:
            return plain_out
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    query_bias, key_bias = (
        None if x is None else x.squeeze(0).transpose(0, 1) for x in (query_bias, key_bias)
    )
    out = varlen_attention(
        query,
        key,
        value,
        queries.cu_seqlens,
        keys.cu_seqlens,
        max_seqlen_q=queries.max_seqlen,
        max_seqlen_k=keys.max_seqlen,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=key.shape[1] != query.shape[1],
        window=queries.window,
        softcap=softcap,
        sinks=sinks,
        relative_bias=relative_bias,
        query_bias=query_bias,
        key_bias=key_bias,
        relative_index=relative_index,
    )
    return out.transpose(0, 1).unsqueeze(0)


def dense_term(
    packed: PackedSequences | CrossSequences,
    bias: Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Returns a mask to add to the scores of all pairs of tokens, to attend as :func:`attend` does.

    Args:
        packed: where each sequence begins.
        bias: as the mask of :func:`attend`, floating. None: 0.
        dtype, device: of the result.

    Returns:
        (1, 1 or H, Tq, Tk): the bias, or -inf for pairs of tokens that don't attend to each other.
    """
    queries, keys = sides(packed)
    (sequence, row), (other, column) = places(queries), places(keys)
    takes_part = sequence[:, None] == other
    if queries.causal:
        takes_part &= column <= row[:, None]
    if queries.window is not None:
        takes_part &= (column - row[:, None]).abs() <= queries.window
    if bias is None:
        term = torch.zeros(1, 1, *takes_part.shape, dtype=dtype, device=device)
    else:
        sizes = queries.cu_seqlens.shape[0] - 1, -1, queries.max_seqlen, keys.max_seqlen
        pairs = bias.expand(sizes)[sequence[:, None], :, row[:, None], column]
        term = pairs.permute(2, 0, 1)[None].to(device, dtype)
    return term.masked_fill(~takes_part.to(device), -torch.inf)
