"""A pass of a batch through the layers of a stack, packed or not.

The calls of the layers go through :class:`Pass`. It passes them packed tokens instead of padded
ones, :class:`PackedSequences` instead of a mask, and a bias for the longest sequence.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trifuse.nn import packing, walks
from trifuse.nn.packing import CrossSequences, Obstacle, PackedSequences
from trifuse.recipes import arguments, boundaries, code, layers, sublayers
from trifuse.recipes.arguments import (
    ABSENT,
    BIAS,
    CACHES,
    CAUSAL_MASK,
    LANGUAGES,
    MASK,
    MEMORY,
    MEMORY_BIAS,
    MEMORY_MASK,
    PLACES,
    RELATIVE,
    RELATIVE_EMBEDDINGS,
    ROTARY,
    SHARED,
    WINDOW_MASK,
    WISHES,
)
from trifuse.recipes.disentangled import DisentangledAttention
from trifuse.recipes.own_biases import OwnBias
from trifuse.written_out import DistanceBias


class _Unpackable(Exception):  # noqa: N818 - an answer, not an error
    """Why a layer can't get packed tokens."""


_OTHER_MASK = "its mask isn't that of padding alone"
_HOLES = "its layers make a bias that reaches over padding inside a sequence"
_CACHED = "its layers get a cache, which use_cache=False would spare them"


class _Side(NamedTuple):
    """The packed tokens of a batch: those of the stack, or those of a decoder's memory."""

    packed: PackedSequences
    shape: torch.Size  # (B, L, features), with the padding


class Pass:
    """One pass of a batch through the layers of a stack, packed or not.

    Args:
        stack: the stack, a module.
        recorded: whether the stack itself records the hidden states of each layer.
        weighed: whose weights it records, "attention" or "experts"; or "".
    """

    def __init__(self, stack: Any, recorded: bool, weighed: str) -> None:
        self.stack = stack
        self.recorded = recorded
        self.weighed = weighed
        self.begun = False
        self.ended = False  # the first call has run all layers
        self.of_numbers = False  # whether attention takes a mask's numbers as true and false
        self.tokens: _Side | None = None  # None: not packed
        self.memory: _Side | None = None  # of a decoder
        self.seen: list[tuple[Any, Any]] = []  # the arguments packed so far, and the results
        self.returned: tuple[Any, ...] = ()  # the packed results of the last layer
        self.made: dict[str, Tensor] = {}  # biases that the layers would have made, by argument
        self.mask = MASK  # the name of the layers' mask
        self.causal_mask: Any = None  # another mask that a layer gets beside that of padding

    def call(self, layer: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call a layer; the first call packs the batch if that is possible.

        If the layers can run in one call, the first one does so, and the others return its result.
        """
        if self.ended:
            return hidden_states
        first, self.begun = not self.begun, True
        takes = arguments.of(layer)
        names = takes.positional[1 : len(args) + 1]
        given = dict(zip(names, args, strict=False)) | kwargs
        self.mask, self.causal_mask = takes.mask, given.get(CAUSAL_MASK)
        if first and torch.compiler.is_compiling():
            if any(isinstance(value, Tensor) for value in (*args, kwargs.get(self.mask))):
                packing.warn_padded(self.stack, "torch.compile can't read its mask")
        elif first and (why := self._begin(hidden_states, given)) is not None:
            packing.warn_padded(self.stack, why)
        if self.tokens is None:
            return self._run(layer, first, hidden_states, *args, **kwargs)
        try:
            if len(names) < len(args):
                raise _Unpackable("its layers take unnamed arguments")
            packed = {name: self._argument(name, value, layer) for name, value in given.items()}
            packed |= self._missing(layer, given)
        except _Unpackable as why:
            packing.warn_padded(self.stack, str(why))
            if not first:
                hidden_states = self.end(hidden_states)
                args = tuple(map(self._unpacked, args))
                kwargs = {name: self._unpacked(value) for name, value in kwargs.items()}
            self.tokens = None
            return layer(hidden_states, *args, **kwargs)
        if first:
            hidden_states = self.pack(hidden_states)
        return self._run(
            layer, first, hidden_states, *(packed.pop(name) for name in names), **packed
        )

    def _run(
        self, layer: nn.Module, first: bool, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        one_by_one = self.recorded or bool(self.weighed) or torch.compiler.is_compiling()
        # run_all and run_post_norm take the mask second. Some layers take another argument there.
        # Dynamo can't trace ``not args``.
        alike = len(args) == 0 or arguments.of(layer).positional[1:2] == [self.mask]
        if first and alike and not one_by_one:
            given = self.stack, hidden_states, *args
            out = layers.run_post_norm(*given, **kwargs)
            if out is None and layers.is_berts_encoder(self.stack):
                out = layers.run_all(*given, **kwargs)
            if out is not None:
                self.ended = True
                return out
        out = layer(hidden_states, *args, **kwargs)
        if self.tokens is not None:
            self.returned = out if isinstance(out, tuple) else ()
        return out

    def end(self, hidden_states: Tensor) -> Tensor:
        """Return the result of the last layer, unpacked."""
        if self.tokens is None:
            return hidden_states
        shape = torch.Size((*self.tokens.shape[:2], hidden_states.shape[-1]))
        return boundaries.unpack(self.stack, hidden_states, self.tokens.packed, shape)

    def pack(self, hidden_states: Tensor) -> Tensor:
        """Return hidden states, (B, L, features), as the next layer gets them."""
        if self.tokens is None:
            return hidden_states
        return packing.gather(hidden_states, self.tokens.packed)

    def cut(self, returned: tuple[Any, ...], at: int) -> tuple[Any, ...]:
        """Return what a method returned that may leave tokens out, for the layers that follow.

        The hidden states, at a place of the tuple, are packed again if they have all tokens.
        Otherwise the layers that follow compute padding.
        """
        states = returned[at]
        if self.tokens is not None and states.shape[:2] != self.tokens.shape[:2]:
            self.tokens = None
        return (*returned[:at], self.pack(states), *returned[at + 1 :])

    def _unpacked(self, value: Any) -> Any:
        """Return an argument of a layer, unpacked if the previous layer returned it."""
        returned = any(value is each for each in self.returned)
        return self.end(value) if returned and isinstance(value, Tensor) else value

    def _begin(self, hidden_states: Tensor, given: dict[str, Any]) -> Obstacle | str | None:
        """Pack the batch unless that would gain nothing; return why it can't be packed, or None."""
        memory = given.get(MEMORY)
        masks = [given.get(name) for name in (self.mask, MEMORY_MASK)[: 1 + (memory is not None)]]
        tensors = [mask for mask in masks if isinstance(mask, Tensor)]
        if not tensors or any(isinstance(mask, PackedSequences) for mask in masks):
            return None  # no padding, or the model has packed the batch itself
        if hidden_states.shape[1] == 1:
            return None  # a step of decoding
        caches = [given[name] for name in CACHES if given.get(name) is not None]
        if (why := self.stack.why_padded(memory is not None, bool(caches))) is not None:
            if caches and memory is not None and self.stack.why_padded(True) is None:
                return _CACHED
            return why
        # Only now: the cache of a state-space model has no length.
        is_empty = _is_empty if memory is None else _are_empty
        if not all(map(is_empty, caches)):
            return _CACHED
        for tensor in tensors:
            if (why := packing.why_unreadable(tensor)) is not None:
                return why
        if self.weighed:
            return f"the weights of its {self.weighed} are requested"
        if hidden_states.dim() != 3:
            return "its hidden states aren't those of a batch of sequences"
        # Only layers of this kind get such an argument, so other stacks needn't be searched.
        self.of_numbers = RELATIVE in given and self._has(DisentangledAttention)
        sides = []
        shapes = [x.shape for x in (hidden_states, memory) if x is not None]
        for shape, mask in zip(shapes, masks, strict=True):
            seen = _seen(self._read(mask), shape)
            if seen is None:
                return _OTHER_MASK
            sides.append(_Side(packing.find(seen.keep.to(hidden_states.device)), shape))
        if self._has(OwnBias) and not all(packing.are_in_one_piece(side.packed) for side in sides):
            return _HOLES
        counts = [side.packed.indices.shape[0] for side in sides]
        if 0 not in counts and counts != [side.shape[:2].numel() for side in sides]:
            self.tokens, self.memory, *_ = [*sides, None]
        return None

    # Arguments ----------------------------------------------------------------------------------

    def _argument(self, name: str, value: Any, layer: nn.Module) -> Any:
        """Return a layer's argument for packed tokens."""
        assert self.tokens is not None
        if name in (self.mask, WINDOW_MASK):
            return self._mask(value)
        if name == CAUSAL_MASK:
            return None  # packed sequences hold it
        if self.memory is not None:
            if name == MEMORY:
                return self._once(value, lambda: self._gathered(name, value, self.memory))
            if name == MEMORY_MASK:
                assert self.memory is not None
                seen = _seen(value, self.memory.shape)
                return CrossSequences(self.tokens.packed, _check(seen, self.memory))
            if name == MEMORY_BIAS:
                return self._bias(name, value, layer)
        if name == BIAS:
            return self._bias(name, value, layer)
        if name == RELATIVE and isinstance(value, Tensor):
            return self._once(value, lambda: self._relative(value))
        if name == RELATIVE_EMBEDDINGS:
            return value
        if value is None or value is False:
            return value
        if name in CACHES:
            return self._once(value, lambda: self._prefilled(value))
        if name == SHARED:
            return self._once(value, lambda: self._shared(value))
        if type(value) is list and all(item is None for item in value):
            return value
        if name in ABSENT or name in WISHES:
            raise _Unpackable(f"its layers get {name}")
        if isinstance(value, (bool, int, float, str)):
            return value
        if name == PLACES and value.shape == self.tokens.shape[1:2]:
            return value
        if isinstance(value, Tensor) and value.dim() == 0:
            return value  # a number, such as the count of a batch's tokens that a Trainer passes
        if type(value) in (tuple, list):
            return type(value)(self._argument(name, item, layer) for item in value)
        if not isinstance(value, Tensor):
            raise _Unpackable(f"its layers get {name}")
        if any(value is each for each in self.returned):
            return value
        return self._once(value, lambda: self._gathered(name, value, self.tokens))

    def _missing(self, layer: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that a layer takes but doesn't get: biases, which it would make
        itself, and a mask of the memory if all of the memory is real, as for Whisper in
        transformers 4.57.
        """
        needed = [self.mask, *(() if self.memory is None else (MEMORY,))]
        if any(name not in given for name in needed):
            raise _Unpackable("not all of its layers get a mask")
        names = [BIAS] if self.memory is None else [BIAS, MEMORY_BIAS, MEMORY_MASK]
        takes = arguments.of(layer).positional
        return {
            name: self._argument(name, None, layer)
            for name in names
            if name in takes and name not in given
        }

    def _once(self, value: Any, pack: Callable[[], Any]) -> Any:
        """Return the packed form of an argument; layers that share the argument share this form."""
        for known, packed in self.seen:
            if known is value:
                return packed
        packed = pack()
        self.seen.append((value, packed))
        return packed

    def _gathered(self, name: str, value: Any, side: _Side | None) -> Tensor:
        assert side is not None
        B, L = side.shape[:2]
        if name == LANGUAGES and value.shape == (B,):
            sequences, _ = packing.places(side.packed)
            return value[sequences.to(value.device)][None]
        if name == ROTARY and value.dim() == 4:
            apart = packing.gather(self._whole(value.transpose(1, 2), B, L, name), side.packed)
            return apart.transpose(1, 2)
        ids = value.dim() == 2 and not value.is_floating_point()
        if name == ROTARY or not (ids or value.dim() == 3):
            raise _Unpackable(f"its layers get {name} of another shape than the tokens")
        return packing.gather(self._whole(value, B, L, name), side.packed)

    @staticmethod
    def _whole(value: Tensor, B: int, L: int, name: str) -> Tensor:
        """Return (B or 1, L, ...) as (B, L, ...)."""
        if value.shape[0] not in (1, B) or value.shape[1] != L:
            raise _Unpackable(f"its layers get {name} of another shape than the tokens")
        return value.expand(B, *value.shape[1:])

    def _prefilled(self, cache: Any) -> Any:
        assert self.tokens is not None
        if self.memory is None and _is_empty(cache):
            return PrefilledCache(cache, self.tokens)
        if self.memory is not None and _are_empty(cache):
            return _prefilled_pair()(cache, self.tokens, self.memory)
        raise _Unpackable(_CACHED)

    def _shared(self, shared: Any) -> SharedStates:
        assert self.tokens is not None
        if len(shared) > 0:
            raise _Unpackable("its layers get keys and values of another model")
        return SharedStates(shared, self.tokens)

    def _mask(self, mask: Any) -> PackedSequences:
        assert self.tokens is not None
        if mask is None and self.memory is not None and self.causal_mask is None:
            seen = _seen(None, self.tokens.shape)
            return _check(seen, self.tokens)._replace(causal=None)
        if not isinstance(mask, Tensor):
            raise _Unpackable("not all of its layers get a mask")
        packed: PackedSequences = self._once(mask, lambda: self._where(self._read(mask)))
        if self.causal_mask is None:
            return packed
        if not self._once(self.causal_mask, self._is_causal_mask):
            raise _Unpackable(_OTHER_MASK)
        return packed._replace(causal=True)

    def _where(self, mask: Tensor) -> PackedSequences:
        """Return from a mask where the tokens are and what they attend to."""
        assert self.tokens is not None
        shape = self.tokens.shape
        seen = _seen(mask, shape)
        packed = _check(seen, self.tokens)
        assert seen is not None
        return packed._replace(window=_window(seen), causal=seen.causal)

    def _is_causal_mask(self) -> bool:
        """Whether the mask that a layer gets beside that of padding is just a causal mask."""
        assert self.tokens is not None
        shape, mask = self.tokens.shape, self.causal_mask
        return mask.dim() == 4 and _is_causal(mask.expand(shape[0], -1, -1, -1), shape)

    def _read(self, mask: Any) -> Any:
        """Return a mask in a form that :func:`_padding` takes; DeBERTa's masks hold numbers."""
        return mask.bool() if self.of_numbers and isinstance(mask, Tensor) else mask

    def _has(self, kind: type[nn.Module]) -> bool:
        return not walks.lacks(self.stack, kind)

    def _relative(self, buckets: Tensor) -> Tensor:
        """Return the buckets of the pairs of positions of the longest sequence."""
        assert self.tokens is not None
        L, longest = self.tokens.shape[1], self.tokens.packed.max_seqlen
        if buckets.shape != (1, L, L) or not buckets[:, 1:, 1:].equal(buckets[:, :-1, :-1]):
            raise _Unpackable(f"its layers get {RELATIVE} that aren't those of distances")
        if not packing.are_in_one_piece(self.tokens.packed):
            raise _Unpackable(_HOLES)
        return buckets[:, :longest, :longest]

    def _bias(self, name: str, bias: Any, layer: nn.Module) -> Tensor:
        """Return the bias added to the scores: (1 or B, H, longest queries, longest keys)."""
        queries, keys = self.tokens, self.tokens if name == BIAS else self.memory
        assert queries is not None
        assert keys is not None
        if bias is None:
            made = _made_by_layer(layer, queries.shape[1]) if name == BIAS else None
            self.made[name] = _no_bias(layer) if made is None else _cut(made, queries, keys)
            return self.made[name]
        if not isinstance(bias, Tensor):
            raise _Unpackable(f"its layers get {name}")
        as_made = name in self.made and bias.shape == self.made[name].shape
        if as_made or any(bias is each for each in self.returned):
            return bias  # the previous layer returned it
        packed: Tensor = self._once(bias, lambda: _cut(bias, queries, keys))
        return packed


# Caches -----------------------------------------------------------------------------------------


class PrefilledCache:
    """An empty cache of transformers while the layers of a decoder compute a padded prompt.

    For later steps, it gets the keys and values in their places in the padded batch, with 0 in the
    padding. The layers attend to the packed ones.
    """

    def __init__(self, cache: Any, side: _Side) -> None:
        self._cache = cache
        self._side = side

    def update(
        self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep a layer's keys and values, (1, H, T, E); return those that it attends to."""
        padded = _padded(keys, self._side), _padded(values, self._side)
        self._cache.update(*padded, *args, **kwargs)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of earlier tokens."""
        return 0


@functools.cache
def _prefilled_pair() -> Any:
    """Return the class of a pair of :class:`PrefilledCache`, which layers recognise as a pair."""
    from transformers import EncoderDecoderCache

    class PrefilledPair(EncoderDecoderCache):
        """The two empty caches of a decoder while its layers compute a padded text."""

        def __init__(self, pair: Any, tokens: _Side, memory: _Side) -> None:
            self.self_attention_cache = PrefilledCache(pair.self_attention_cache, tokens)
            self.cross_attention_cache = PrefilledCache(pair.cross_attention_cache, memory)
            self.is_updated = pair.is_updated

    return PrefilledPair


class SharedStates(dict[Any, Any]):
    """The keys and values of packed tokens that layers share with later ones.

    The dictionary of the padded batch gets them in their places, with 0 in the padding.
    """

    def __init__(self, shared: Any, side: _Side) -> None:
        super().__init__()
        self._shared = shared
        self._side = side

    def __setitem__(self, kind: Any, states: tuple[Tensor, ...]) -> None:
        self._shared[kind] = tuple(_padded(each, self._side) for each in states)
        super().__setitem__(kind, states)


def _padded(packed: Tensor, side: _Side) -> Tensor:
    """Return heads of packed tokens, (1, H, T, E), in their places, (B, H, L, E)."""
    _, H, T, E = packed.shape
    B, L = side.shape[:2]
    tokens = packed.transpose(1, 2).reshape(1, T, H * E)
    padded = packing.scatter(tokens, side.packed, torch.Size((B, L, H * E)))
    return padded.view(B, L, H, E).transpose(1, 2)


def _is_empty(cache: Any) -> bool:
    """Whether an argument is a cache of transformers that holds nothing yet."""
    from transformers import Cache, EncoderDecoderCache

    if not isinstance(cache, Cache) or isinstance(cache, EncoderDecoderCache):
        return False
    length = cache.get_seq_length()
    return isinstance(length, int) and length == 0


def _are_empty(pair: Any) -> bool:
    """Whether an argument is a pair of caches of transformers that hold nothing yet."""
    from transformers import EncoderDecoderCache

    if type(pair) is not EncoderDecoderCache or any(pair.is_updated.values()):
        return False
    return _is_empty(pair.self_attention_cache) and _is_empty(pair.cross_attention_cache)


# Masks ------------------------------------------------------------------------------------------


class _Seen(NamedTuple):
    """The content of a mask: which tokens of a padded batch attend to each other."""

    keep: Tensor  # bool (B, L): the real tokens
    causal: bool = False
    reach: int | None = None  # how far each attends; None: to all of its sequence


def _seen(mask: Any, shape: torch.Size) -> _Seen | None:
    """Return what tokens attend to according to a mask; None if the mask has another form.

    Args:
        mask: (B, 1, any, L) with equal rows, or (B, 1, L, L) with causal ones or with a window;
            boolean, or floating with 0 for real tokens and the least number for others. Boolean
            rows of padding may be False. Or uint8 or int8, causal or with a window: see
            :mod:`trifuse.huggingface`. Or None, if all are real.
        shape: (B, L, features).
    """
    B, L = shape[:2]
    if mask is None:
        return _Seen(torch.ones(B, L, dtype=torch.bool))
    if mask.dtype in (torch.uint8, torch.int8):
        if mask.shape[1::2] == (1, L) and mask.shape[0] in (1, B):
            reach = mask.shape[2] - 2 if mask.shape[2] > 1 else None
            keep = mask[:, 0, 0].bool().expand(B, L)
            return _Seen(keep, mask.dtype == torch.uint8, reach)
        return None
    if mask.dim() != 4 or (*mask.shape[:2], mask.shape[3]) != (B, 1, L) or not mask.shape[2]:
        return None
    row = mask[:, :, -1:]  # of the last token, which attends to all others
    if mask.dtype == torch.bool and mask.shape[2] == L:
        real = mask.diagonal(dim1=2, dim2=3)
        if mask.equal(real[..., None] & real[..., None, :]):
            return _Seen(real[:, 0])
    if mask.dtype == torch.bool:
        keep = row[:, 0, 0]
    else:
        if not mask.is_floating_point():
            return None
        keep = (row == 0)[:, 0, 0]
        if not ((row == 0) | (row <= torch.finfo(mask.dtype).min)).all():
            return None
    if mask.shape[2] == 1 or (mask == row).all():
        return _Seen(keep)
    return _Seen(keep, causal=True) if _is_causal(mask, shape) else _within_reach(mask, shape)


def _is_causal(mask: Tensor, shape: torch.Size) -> bool:
    """Whether, by a mask of all pairs, each token attends to the real ones up to its own place.

    Args:
        mask: (B, 1, L, L), boolean or floating. Masks of other shapes aren't causal.
        shape: (B, L, features).
    """
    B, L = shape[:2]
    if mask.shape != (B, 1, L, L) or L == 1:
        return False
    if mask.dtype == torch.bool:
        sees, unseen = mask[:, 0], ~mask[:, 0]
    elif mask.is_floating_point():
        sees, unseen = mask[:, 0] == 0, mask[:, 0] <= torch.finfo(mask.dtype).min
    else:
        return False
    wanted = torch.ones_like(sees).tril_() & sees[:, -1:]
    return bool(((sees == wanted) & (unseen != wanted)).all())


def _within_reach(mask: Tensor, shape: torch.Size) -> _Seen | None:
    """Return what tokens attend to, from a mask of all pairs with a window (ModernBERT in 4.57).

    Args:
        mask: (B, 1, L, L), boolean or floating. Masks of other shapes have no window.
        shape: (B, L, features).
    """
    B, L = shape[:2]
    if mask.shape != (B, 1, L, L):
        return None
    sees = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0
    if mask.is_floating_point() and not (sees | (mask[:, 0] <= torch.finfo(mask.dtype).min)).all():
        return None
    places = torch.arange(L, device=mask.device)
    distances = (places[:, None] - places).abs()
    reach = distances.masked_fill(~sees.any(0), 0).max()
    keep = sees.diagonal(dim1=1, dim2=2)
    if not sees.equal(keep[:, None] & (distances <= reach)):
        return None
    return _Seen(keep, reach=int(reach))


def _check(seen: _Seen | None, side: _Side) -> PackedSequences:
    """Return where the tokens are, if the mask agrees."""
    if seen is None:
        raise _Unpackable(_OTHER_MASK)
    indices = side.packed.indices
    if not seen.keep.flatten().nonzero().squeeze(-1).to(indices.device).equal(indices):
        raise _Unpackable("its masks differ in their padding")
    return side.packed


def _window(seen: _Seen) -> int | None:
    """Return how far each token attends; None if it attends to all of its sequence.

    Raises:
        _Unpackable: there is padding inside a sequence. When packed, the tokens around it would be
            nearer to each other.
    """
    keep, _, reach = seen
    if reach is None:
        return None
    positions = torch.arange(keep.shape[1], device=keep.device).expand_as(keep)
    first = positions.masked_fill(~keep, keep.shape[1]).amin(-1)
    last = positions.masked_fill(~keep, -1).amax(-1)
    if (last - first).max() <= reach:
        return None
    if (last - first >= keep.sum(-1)).any():
        raise _Unpackable("its window reaches over padding inside a sequence")
    return reach


# Biases -----------------------------------------------------------------------------------------


def _cut(bias: Tensor, queries: _Side, keys: _Side) -> Tensor:
    """Return the part of a bias, (1 or B, H, L, S), for real tokens.

    Its rows and columns are those of the real tokens of each sequence, in order. Values beyond the
    end of a shorter sequence are arbitrary.
    """
    B = queries.shape[0]
    if bias.dim() != 4 or bias.shape[0] not in (1, B):
        raise _Unpackable("its layers get a bias of another shape than the scores")
    if bias.shape[2:] != (queries.shape[1], keys.shape[1]):
        raise _Unpackable("its layers get a bias of another shape than the scores")
    rows, columns = _positions(queries), _positions(keys)
    if isinstance(bias, DistanceBias):
        moved = queries is keys and packing.are_in_one_piece(queries.packed)
        if bias.is_usable and bias.mask is None and (moved or rows is columns is None):
            return bias.cut(queries.packed.max_seqlen, keys.packed.max_seqlen)
        bias = bias.compute()
    if rows is columns is None:
        return bias[:, :, : queries.packed.max_seqlen, : keys.packed.max_seqlen]
    rows, columns = (
        torch.arange(side.packed.max_seqlen, device=bias.device).expand(B, -1) if at is None else at
        for at, side in ((rows, queries), (columns, keys))
    )
    sequences = torch.arange(B, device=bias.device)[:, None, None]
    bias = bias.expand(B, -1, -1, -1).permute(0, 2, 3, 1)
    return bias[sequences, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)


def _positions(side: _Side) -> Tensor | None:
    """Return where in its padded sequence each real token is, (B, longest), and 0 beyond the end.

    None if all padding is at the end of the sequences.
    """
    indices, longest = side.packed.indices, side.packed.max_seqlen
    B, L = side.shape[:2]
    sequences, places = packing.places(side.packed)
    if (places == indices % L).all():
        return None
    positions = indices.new_zeros(B, longest)
    positions[sequences, places] = indices % L
    return positions


def _made_by_layer(layer: nn.Module, L: int) -> Tensor | None:
    """Return the bias of L tokens that a layer makes if it gets none; None if it makes none."""
    made = None
    for module in layer.modules():
        cls: type = sublayers.original(type(module))
        if not sublayers.is_of_transformers(cls):
            continue
        statement = _without_bias(getattr(cls, "forward", None))
        if statement is None:
            continue
        if statement != _without_bias(_t5_attention().forward):
            raise _Unpackable("its layers make their biases in a way of their own")
        attention: Any = module
        if attention.has_relative_attention_bias:
            if made is not None:
                raise _Unpackable("its layers make several biases")
            if any(packing.unsharded(type(part)) is not type(part) for part in layer.modules()):
                # Its weight exists only while the layer runs.
                raise _Unpackable("a layer that is sharded makes their biases")
            made = attention.compute_bias(L, L)
    return made


def _no_bias(layer: nn.Module) -> Tensor:
    return next(layer.parameters()).new_zeros(1, 1, 1, 1)


def _t5_attention() -> type[nn.Module]:
    from transformers.models.t5.modeling_t5 import T5Attention

    return T5Attention


@functools.cache
def _without_bias(forward: Any) -> str | None:
    """Return the code that an attention runs if it gets no bias; None if it has no such case."""
    if (tree := code.parse(forward)) is None:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == f"{BIAS} is None":
            return ast.unparse(node)
    return None
