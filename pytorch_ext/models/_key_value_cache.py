"""The keys and values that a Transformer keeps while it decodes.

N is the number of texts being written, H the heads and E the head dimension.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trifuse.models._tokens import repeated_rows


class Padding(NamedTuple):
    """The padding among the first S cached tokens."""

    mask: Tensor  # bool (N, S), True where a token is real
    counts: Tensor  # integers (N,), the padded tokens of each row
    least: int  # of these counts


class KeyValueCache:
    """The keys and values of the tokens decoded so far, (N, H, length, E) for each layer.

    Memory for further tokens is reserved, so that a step copies only its own. Where a gradient is
    recorded, each step copies all of them, because earlier steps need theirs unchanged.
    """

    def __init__(self) -> None:
        # Key and value of each layer, (N, H, reserved, E); the first _lengths[layer] are tokens.
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._lengths: list[int] = []
        self.padding: Padding | None = None

    @property
    def length(self) -> int:
        """Number of cached tokens in each row; valid once all layers have appended theirs."""
        return self._lengths[-1] if self._lengths else 0

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of further tokens, (N, H, n, E), and return all of them."""
        new = (key, value)
        if layer == len(self._layers):
            self._layers.append(new)
            self._lengths.append(key.shape[2])
            return new
        room = None if key.requires_grad or value.requires_grad else self.reserve(layer, key)
        if room is None:
            past, start = self._layers[layer], self._lengths[layer]
            both = [torch.cat((x[:, :, :start], y), 2) for x, y in zip(past, new, strict=True)]
            self._layers[layer] = both[0], both[1]
        else:
            *reserved, start = room
            for x, y in zip(reserved, new, strict=True):
                x[:, :, start : start + y.shape[2]] = y
        self.advance(layer, key.shape[2])
        return self._tokens(layer)

    def reserve(self, layer: int, new: Tensor) -> tuple[Tensor, Tensor, int] | None:
        """Reserve memory for the keys and values of further tokens.

        Args:
            layer: the index of the layer: at most that of the first layer without tokens.
            new: any tensor with the shape (N, H, n, E) and the dtype of the keys of n further
                tokens.

        Returns:
            The layer's keys and values, each (N, H, reserved, E), and the number of tokens in them.
            The caller writes those of the further tokens behind them and then calls
            :meth:`advance`. None if the memory must not be written to.
        """
        needed = new.shape[2]
        if layer == len(self._layers):
            self._layers.append((_with_room(new, 0, needed), _with_room(new, 0, needed)))
            self._lengths.append(0)
        past, start = self._layers[layer], self._lengths[layer]
        needed += start
        if any(x.requires_grad for x in past):
            return None
        # torch.compile can't trace is_inference(), and would compile a step in parts.
        if (
            not torch.compiler.is_compiling()
            and past[0].is_inference()
            and not torch.is_inference_mode_enabled()
        ):
            return None  # torch refuses to change it
        if past[0].shape[2] < needed:
            past = _with_room(past[0], start, needed), _with_room(past[1], start, needed)
            self._layers[layer] = past
        return *past, start

    def advance(self, layer: int, new: int) -> None:
        """Count further tokens of a layer, whose keys and values have been written."""
        self._lengths[layer] += new

    def _tokens(self, layer: int) -> tuple[Tensor, Tensor]:
        key, value = self._layers[layer]
        length = self._lengths[layer]
        return key[:, :, :length], value[:, :, :length]

    def reorder(self, rows: Tensor) -> None:
        """Keep the rows with these indices, in this order; a row may be taken more than once."""
        self._layers = [
            (key.index_select(0, rows), value.index_select(0, rows)) for key, value in self._layers
        ]
        if self.padding is not None:
            mask, counts, least = self.padding
            self.padding = Padding(mask.index_select(0, rows), counts.index_select(0, rows), least)

    def expand(self, rows: int) -> None:
        """Repeat each row, so that there are ``rows``, unless the cache is empty.

        Raises:
            ValueError: ``rows`` is not a multiple of the present number.
        """
        if not self._layers:
            return
        key, _ = self._layers[0]
        if rows != len(key):
            self.reorder(repeated_rows(len(key), rows, key.device))

    def leave_out(self, lengths: Tensor) -> None:
        """Mark what is cached after the first ``lengths`` (N,) tokens of each row as padding."""
        mask = torch.arange(self.length, device=lengths.device) < lengths[:, None]
        self.padding = Padding(mask, self.length - lengths, self.length - int(lengths.max()))

    def keys_taking_part(self, total: int) -> Tensor | None:
        """Which of ``total`` keys are real, bool (N, total); None if all are."""
        if self.padding is None:
            return None
        return F.pad(self.padding.mask, (0, total - self.padding.mask.shape[1]), value=True)


def _with_room(x: Tensor, length: int, needed: int) -> Tensor:
    """The first ``length`` tokens of (N, H, length or more, E), with room for half again as many.

    So the copies of a whole text add up to a few times its length. The room holds zeros, because a
    kernel must not read uninitialised memory.
    """
    N, H, _, E = x.shape
    larger = x.new_zeros(N, H, max(needed + needed // 2, 64), E)
    larger[:, :, :length] = x[:, :, :length]
    return larger


class PromptCache(KeyValueCache):
    """The cache that :meth:`LanguageModel.start` returns.

    Attributes:
        logits: (B, V), for the token after each prompt.
    """

    logits: Tensor

    def __init__(self, max_length: int) -> None:
        super().__init__()
        self._max_length = max_length

    @property
    def max_target_length(self) -> int:
        """The most tokens that may follow the longest text."""
        longest = self.length - (0 if self.padding is None else self.padding.least)
        return self._max_length - longest
