"""ELMo in plain ``torch.nn``: the eager baseline, which reads and writes the published weights.

Peters, Neumann, Iyyer, Gardner, Clark, Lee and Zettlemoyer, "Deep Contextualized Word
Representations" (2018), cited as PETERS. A word is read by its characters (Kim, Jernite, Sontag and
Rush, "Character-Aware Neural Language Models", 2016; Józefowicz, Vinyals, Schuster, Shazeer and Wu,
"Exploring the Limits of Language Modeling", 2016, cited as JOZEFOWICZ) through highway layers
(Srivastava, Greff and Schmidhuber, "Highway Networks", 2015); projected LSTMs (Sak, Senior and
Beaufays, "Long Short-Term Memory Recurrent Neural Network Architectures for Large Scale Acoustic
Modeling", 2014) read the words in both directions as two language models (:class:`BiLM`), and a
task learns how to mix their layers (:class:`Elmo`). Details that the papers leave open follow the
code that wrote the published weights. Only torch is imported here (and h5py where a weight file is
read or written).

**State.** A model holds no state between calls: each call starts its sentences from zeros, and the
same input gives the same output. In the published code, batch row b of a call continues from where
row b of the previous call ended. For that behaviour, pass the same :class:`CarriedState` to every
call::

    state = CarriedState()
    for char_ids in batches:
        layers, mask = bilm(char_ids, state)
    state.reset()

The recurrence is a separate module, :class:`ProjectedLSTM`: one layer in one direction.
:func:`trifuse.fuse` swaps this module.

In the shapes below B is the batch, T the length in words, C the characters of a word
(``max_characters_per_token``), P the projection (``projection_dim``), L the LSTM layers and V the
vocabulary of the language models.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "BiLM",
    "BiLMForPreTraining",
    "BiLMLosses",
    "BiLMOutput",
    "CarriedState",
    "CharacterEncoder",
    "Elmo",
    "ElmoConfig",
    "ElmoOutput",
    "Highway",
    "LogUniformSampler",
    "ProjectedLSTM",
    "ScalarMix",
    "VocabularySoftmax",
    "batch_to_char_ids",
    "word_mask",
    "word_to_char_ids",
]

# Characters -------------------------------------------------------------------------------------

# A character's id is its byte + 1. Larger ids mark beginnings, ends and padding; 0 is not a
# character.
MASK = 0
BEGIN_SENTENCE, END_SENTENCE, BEGIN_WORD, END_WORD, PADDING = range(257, 262)
CHARACTERS = 262


def word_to_char_ids(word: str, max_characters: int = 50) -> list[int]:
    """The ids of a word's begin mark, its UTF-8 bytes and its end mark, then padding.

    Args:
        word: characters that UTF-8 can't encode (lone surrogates) are left out.
        max_characters: how many ids to return; bytes that don't fit are cut off, even in the middle
            of a character.

    Raises:
        ValueError: ``max_characters`` is below 3.
    """
    if max_characters < 3:
        raise ValueError(f"max_characters: expected at least 3; got {max_characters}")
    characters = word.encode(errors="ignore")[: max_characters - 2]
    return _frame([byte + 1 for byte in characters], max_characters)


def _frame(characters: list[int], max_characters: int) -> list[int]:
    ids = [BEGIN_WORD, *characters, END_WORD]
    return ids + [PADDING] * (max_characters - len(ids))


def batch_to_char_ids(
    sentences: Sequence[Sequence[str]],
    max_characters: int = 50,
    device: torch.device | str | None = None,
) -> Tensor:
    """Encode tokenised sentences as int64 (B, T, C), padded with 0 to T, the longest length.

    The marks of a sentence's begin and end are not included: the models add them.

    Args:
        sentences: words as the published models split them (Penn Treebank style, in their case).
        max_characters: C; a model's ``config.max_characters_per_token``.
        device: that of the result.

    Raises:
        ValueError: ``max_characters`` is below 3.
    """
    length = max(map(len, sentences), default=0)
    ids = torch.zeros(len(sentences), length, max_characters, dtype=torch.long)
    for row, sentence in zip(ids, sentences, strict=True):
        for place, word in enumerate(sentence):
            row[place] = torch.tensor(word_to_char_ids(word, max_characters))
    return ids.to(device)


def word_mask(char_ids: Tensor, max_characters: int = 50) -> Tensor:
    """Bool (B, T), True where a word is real: not all of its character ids are 0.

    Args:
        char_ids: integers (B, T, C), as from :func:`batch_to_char_ids`.
        max_characters: C.

    Raises:
        ValueError: ``char_ids`` has another shape, or a word comes after the end of its sentence.
    """
    if char_ids.dim() != 3 or char_ids.shape[-1] != max_characters:
        # Not padded or cut here, since the filters read the padding.
        raise ValueError(
            f"char_ids: expected (B, T, {max_characters}); got {tuple(char_ids.shape)}"
        )
    mask = (char_ids != MASK).any(-1)
    if (mask[:, 1:] & ~mask[:, :-1]).any():
        raise ValueError("char_ids: expected no word after one whose ids are all 0")
    return mask


# Sizes ------------------------------------------------------------------------------------------

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


@dataclass
class ElmoConfig:
    """The sizes and rates of a :class:`BiLM`; the defaults are the published model's.

    ``filters`` are pairs of a width in characters and a number of filters. ``lstm_dim`` is the size
    of the LSTMs' cells, ``projection_dim`` the size of their inputs and outputs; if the two are
    equal, there is no projection. ``cell_clip`` and ``proj_clip`` clip the cells and the
    projections to ± their value; None does not clip. ``dropout`` is applied to the LSTM layers'
    inputs in training.

    Raises:
        ValueError: ``n_characters`` isn't 262; ``activation`` is neither "relu" nor "tanh";
            ``max_characters_per_token`` is below 3; there are no filters, or one is wider than
            ``max_characters_per_token``; ``projection_dim`` exceeds ``lstm_dim``; a clip isn't
            above 0; or ``n_layers`` is below 1.
    """

    char_embedding_dim: int = 16
    filters: Sequence[tuple[int, int]] = (
        (1, 32),
        (2, 32),
        (3, 64),
        (4, 128),
        (5, 256),
        (6, 512),
        (7, 1024),
    )
    n_highway: int = 2
    n_characters: int = CHARACTERS
    max_characters_per_token: int = 50
    activation: str = "relu"
    lstm_dim: int = 4096
    projection_dim: int = 512
    n_layers: int = 2
    cell_clip: float | None = 3.0
    proj_clip: float | None = 3.0
    use_skip_connections: bool = True
    dropout: float = 0.1

    def __post_init__(self) -> None:
        self.filters = tuple((int(width), int(count)) for width, count in self.filters)
        widest = max((width for width, _ in self.filters), default=0)
        if self.n_characters != CHARACTERS:
            raise ValueError(
                f"n_characters: expected {CHARACTERS} (training options count one fewer, without "
                f"the mask); got {self.n_characters}"
            )
        if self.activation not in _ACTIVATIONS:
            known = " or ".join(f'"{name}"' for name in _ACTIVATIONS)
            raise ValueError(f"activation: expected {known}; got {self.activation!r}")
        if self.max_characters_per_token < 3:
            raise ValueError(
                f"max_characters_per_token: expected at least 3; got "
                f"{self.max_characters_per_token}"
            )
        if not 1 <= widest <= self.max_characters_per_token:
            raise ValueError(
                f"filters: expected some, of widths from 1 to max_characters_per_token="
                f"{self.max_characters_per_token}; got {self.filters}"
            )
        if self.projection_dim > self.lstm_dim:
            raise ValueError(
                f"projection_dim: expected at most lstm_dim={self.lstm_dim}; "
                f"got {self.projection_dim}"
            )
        _check_clip("cell_clip", self.cell_clip)
        _check_clip("proj_clip", self.proj_clip)
        if self.n_layers < 1:
            raise ValueError(f"n_layers: expected at least 1; got {self.n_layers}")

    @classmethod
    def from_json(cls, path: str | Path, **overrides: Any) -> ElmoConfig:
        """Read a published ``options.json``, ignoring fields that do not shape a model.

        Options of a training run contain dropout; published ones do not. Without it dropout is 0,
        since such a model is loaded for its features.

        Raises:
            ValueError: the file describes a model that this class does not implement.
        """
        stored = json.loads(Path(path).read_text(encoding="utf-8"))
        if "char_cnn" not in stored:
            raise ValueError(f"{path}: char_cnn: expected a model that reads words by characters")
        if not stored.get("bidirectional", True):
            raise ValueError(f"{path}: bidirectional: expected true; got false")
        lstm, cnn = stored["lstm"], stored["char_cnn"]
        fields: dict[str, Any] = {
            "char_embedding_dim": cnn["embedding"]["dim"],
            "filters": cnn["filters"],
            "n_highway": cnn.get("n_highway", 0),
            "n_characters": cnn["n_characters"],
            "max_characters_per_token": cnn["max_characters_per_token"],
            "activation": cnn["activation"],
            "lstm_dim": lstm["dim"],
            "projection_dim": lstm["projection_dim"],
            "n_layers": lstm.get("n_layers", 1),
            "cell_clip": lstm.get("cell_clip"),
            "proj_clip": lstm.get("proj_clip"),
            "use_skip_connections": lstm.get("use_skip_connections", False),
            "dropout": stored.get("dropout", 0.0),
        }
        return cls(**(fields | overrides))

    def to_json(self, path: str | Path) -> None:
        """Write the options that :meth:`from_json` reads."""
        options = {
            "lstm": {
                "dim": self.lstm_dim,
                "projection_dim": self.projection_dim,
                "n_layers": self.n_layers,
                "cell_clip": self.cell_clip,
                "proj_clip": self.proj_clip,
                "use_skip_connections": self.use_skip_connections,
            },
            "char_cnn": {
                "embedding": {"dim": self.char_embedding_dim},
                "filters": self.filters,
                "n_highway": self.n_highway,
                "n_characters": self.n_characters,
                "max_characters_per_token": self.max_characters_per_token,
                "activation": self.activation,
            },
            "dropout": self.dropout,
        }
        Path(path).write_text(json.dumps(options) + "\n", encoding="utf-8")


def _check_clip(name: str, clip: float | None) -> None:
    if clip is not None and not clip > 0:
        raise ValueError(f"{name}: expected None or a number above 0; got {clip}")


# Words from characters --------------------------------------------------------------------------


class Highway(nn.Module):
    """g · relu(W_t x + b_t) + (1 − g) · x, with g = σ(W_c x + b_c).

    Srivastava et al. (2015), eq. 3. The gate keeps its published name ``carry``, though it weighs
    the transformed part. Its bias starts at −2, so that a fresh layer mostly passes its input on.

    Args:
        size: features of input and output.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.carry = nn.Linear(size, size)
        self.transform = nn.Linear(size, size)
        for linear, bias in ((self.carry, -2.0), (self.transform, 0.0)):
            nn.init.normal_(linear.weight, std=size**-0.5)
            nn.init.constant_(linear.bias, bias)

    def forward(self, x: Tensor) -> Tensor:
        """From (..., size) to (..., size)."""
        gate = torch.sigmoid(self.carry(x))
        return gate * F.relu(self.transform(x)) + (1 - gate) * x


class CharacterEncoder(nn.Module):
    """Words from their characters: convolutions, their maxima, highway layers, a projection.

    Kim et al. (2016), section 2.2, with the sizes of JOZEFOWICZ, section 3.3. A filter covers whole
    windows only (VALID), including windows of padding, which has an embedding like any character.
    If the number of filters is ``projection_dim``, there is no projection.

    Args:
        config: the sizes.
    """

    def __init__(self, config: ElmoConfig) -> None:
        super().__init__()
        n_filters = sum(count for _, count in config.filters)
        self.embedding = nn.Embedding(
            config.n_characters, config.char_embedding_dim, padding_idx=MASK
        )
        self.convolutions = nn.ModuleList(
            nn.Conv1d(config.char_embedding_dim, count, width) for width, count in config.filters
        )
        self.activation = _ACTIVATIONS[config.activation]()
        self.highways = nn.ModuleList(Highway(n_filters) for _ in range(config.n_highway))
        self.projection = (
            None
            if n_filters == config.projection_dim
            else nn.Linear(n_filters, config.projection_dim)
        )
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        self.embedding.weight.uniform_(-1.0, 1.0)
        self.embedding.weight[MASK].zero_()
        convolution: Any
        for convolution in self.convolutions:
            if isinstance(self.activation, nn.Tanh):
                convolution.weight.normal_(std=convolution.weight[0].numel() ** -0.5)
            else:
                convolution.weight.uniform_(-0.05, 0.05)
            convolution.bias.zero_()
        if self.projection is not None:
            self.projection.weight.normal_(std=self.projection.in_features**-0.5)
            self.projection.bias.zero_()

    def forward(self, char_ids: Tensor) -> Tensor:
        """From integers (B, T, C) to (B, T, P)."""
        characters = self.embedding(char_ids.flatten(0, 1)).transpose(1, 2)
        maxima = [convolution(characters).max(-1).values for convolution in self.convolutions]
        words = self.activation(torch.cat(maxima, -1))
        for highway in self.highways:
            words = highway(words)
        if self.projection is not None:
            words = self.projection(words)
        return words.unflatten(0, char_ids.shape[:2])


# The recurrence ---------------------------------------------------------------------------------

LSTMState = tuple[Tensor, Tensor]  # h and c


class ProjectedLSTM(nn.Module):
    """One layer of an LSTM in one direction, with a projection and clips, over ragged sequences.

    At each step, with the gates in torch's order i, f, g, o::

        i, f, g, o = W_ih x + b + W_hh h
        c = clip(σ(f + forget_bias) · c + σ(i) · tanh(g), ± cell_clip)
        h = clip(W_hr (σ(o) · tanh(c)), ± proj_clip)

    Sak et al. (2014), section 2, without peepholes. c is kept in float32 or wider.

    Args:
        input_size: features of the input.
        hidden_size: features of the cell c.
        proj_size: features of the output h; 0 leaves out the projection, and h has ``hidden_size``.
        cell_clip: clips c to ± this value, unless None.
        proj_clip: clips the projected h to ± this value, unless None.
        forget_bias: added to the forget gate at every step; it is not in ``bias``.
        reverse: read each row's tokens from its last one to its first.

    Raises:
        ValueError: ``proj_clip`` without a projection, or a clip that isn't above 0.

    Attributes:
        weight_ih: (4 · hidden_size, input_size).
        weight_hh: (4 · hidden_size, output_size).
        bias: (4 · hidden_size,).
        weight_hr: (proj_size, hidden_size), or None without a projection.
        output_size: ``proj_size``, or ``hidden_size`` without a projection.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        proj_size: int = 0,
        *,
        cell_clip: float | None = None,
        proj_clip: float | None = None,
        forget_bias: float = 1.0,
        reverse: bool = False,
    ) -> None:
        super().__init__()
        _check_clip("cell_clip", cell_clip)
        _check_clip("proj_clip", proj_clip)
        if proj_clip is not None and proj_size == 0:
            raise ValueError(f"proj_clip: expected None without a projection; got {proj_clip}")
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.proj_size = proj_size
        self.output_size = proj_size or hidden_size
        self.cell_clip = cell_clip
        self.proj_clip = proj_clip
        self.forget_bias = forget_bias
        self.reverse = reverse
        self.weight_ih = nn.Parameter(torch.empty(4 * hidden_size, input_size))
        self.weight_hh = nn.Parameter(torch.empty(4 * hidden_size, self.output_size))
        self.bias = nn.Parameter(torch.empty(4 * hidden_size))
        self.weight_hr = nn.Parameter(torch.empty(proj_size, hidden_size)) if proj_size else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Glorot uniform, with W_ih and W_hh taken as one matrix, as in a step; biases 0."""
        fans = self.input_size + self.output_size + 4 * self.hidden_size
        for weight in (self.weight_ih, self.weight_hh):
            nn.init.uniform_(weight, -math.sqrt(6 / fans), math.sqrt(6 / fans))
        nn.init.zeros_(self.bias)
        if self.weight_hr is not None:
            nn.init.xavier_uniform_(self.weight_hr)

    def extra_repr(self) -> str:
        return (
            f"{self.input_size}, {self.hidden_size}, proj_size={self.proj_size}, "
            f"cell_clip={self.cell_clip}, proj_clip={self.proj_clip}, "
            f"forget_bias={self.forget_bias}, reverse={self.reverse}"
        )

    def forward(
        self, x: Tensor, lengths: Tensor | None = None, state: LSTMState | None = None
    ) -> tuple[Tensor, LSTMState]:
        """Run over whole sequences.

        Args:
            x: (B, T, input_size).
            lengths: integers (B,), the tokens of each row, from 0 to T. Default: all T. Elements
                past a row's length are not read and may have any value.
            state: the initial h (B, output_size) and c (B, hidden_size). Default: zeros.

        Returns:
            The outputs (B, T, output_size), 0 past a row's length, and the state (h, c) after each
            row's last step. A row without tokens keeps its initial state.

        Raises:
            ValueError: ``x``, ``lengths`` or ``state`` has another shape.
        """
        h, c = self._check(x, lengths, state)
        taking_part: Sequence[Tensor | None] = [None] * x.shape[1]
        if lengths is not None:
            mask = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
            x = x.masked_fill(~mask[..., None], 0)
            taking_part = mask[..., None].unbind(1)
        steps = list(
            zip(F.linear(x, self.weight_ih, self.bias).unbind(1), taking_part, strict=True)
        )
        outputs = []
        for gates, real in reversed(steps) if self.reverse else steps:
            new_h, new_c = self._step(gates, h, c)
            if real is None:
                h, c = new_h, new_c
                outputs.append(h)
            else:
                h, c = torch.where(real, new_h, h), torch.where(real, new_c, c)
                outputs.append(new_h.masked_fill(~real, 0))
        if not outputs:
            return x.new_zeros(len(x), 0, self.output_size), (h, c)
        return torch.stack(outputs[::-1] if self.reverse else outputs, 1), (h, c)

    def _step(self, gates: Tensor, h: Tensor, c: Tensor) -> LSTMState:
        i, f, g, o = (gates + F.linear(h, self.weight_hh)).chunk(4, -1)
        c = torch.sigmoid(f + self.forget_bias) * c + torch.sigmoid(i) * torch.tanh(g)
        if self.cell_clip is not None:
            c = c.clamp(-self.cell_clip, self.cell_clip)
        h = (torch.sigmoid(o) * torch.tanh(c)).to(h.dtype)
        if self.weight_hr is not None:
            h = F.linear(h, self.weight_hr)
            if self.proj_clip is not None:
                h = h.clamp(-self.proj_clip, self.proj_clip)
        return h, c

    def _check(self, x: Tensor, lengths: Tensor | None, state: LSTMState | None) -> LSTMState:
        """Check all shapes and return the initial state."""
        if x.dim() != 3 or x.shape[-1] != self.input_size:
            raise ValueError(f"x: expected (B, T, {self.input_size}); got {tuple(x.shape)}")
        B = len(x)
        if lengths is not None and lengths.shape != (B,):
            raise ValueError(f"lengths: expected shape ({B},); got {tuple(lengths.shape)}")
        wide = _wide(x)
        shapes = (B, self.output_size), (B, self.hidden_size)
        if state is None:
            return x.new_zeros(shapes[0]), x.new_zeros(shapes[1], dtype=wide)
        if (got := tuple(tuple(part.shape) for part in state)) != shapes:
            raise ValueError(f"state: expected shapes {shapes}; got {got}")
        h, c = state
        return h.to(x.dtype), c.to(wide)


class CarriedState:
    """The state that a :class:`BiLM`'s LSTMs carry from one call to the next, for each batch row.

    Row b of a call continues from where row b of the previous call ended. No gradient flows into an
    earlier call. A batch with fewer rows than an earlier one leaves the state of the remaining rows
    as it is; a batch with more rows starts the new ones at zero.
    """

    def __init__(self) -> None:
        self._layers: dict[tuple[str, int], LSTMState] = {}

    @property
    def rows(self) -> int:
        """Number of rows that have a state."""
        return max((len(h) for h, _ in self._layers.values()), default=0)

    def reset(self, rows: Tensor | None = None) -> None:
        """Set the state to zero: everywhere, or in the rows with these indices (integers (n,))."""
        if rows is None:
            self._layers.clear()
            return
        self._layers = {
            layer: (h.index_fill(0, rows, 0), c.index_fill(0, rows, 0))
            for layer, (h, c) in self._layers.items()
        }

    def read(self, layer: tuple[str, int], batch_size: int) -> LSTMState | None:
        """h and c of one layer's first ``batch_size`` rows; None if the layer has no state yet."""
        if layer not in self._layers:
            return None
        h, c = (F.pad(x, (0, 0, 0, max(0, batch_size - len(x)))) for x in self._layers[layer])
        return h[:batch_size], c[:batch_size]

    def write(self, layer: tuple[str, int], state: LSTMState) -> None:
        """Replace h and c of the first rows."""
        h, c = (x.detach() for x in state)
        if layer in self._layers:
            old_h, old_c = self._layers[layer]
            h, c = torch.cat((h, old_h[len(h) :])), torch.cat((c, old_c[len(c) :]))
        self._layers[layer] = h, c


# The two language models ------------------------------------------------------------------------


class BiLMOutput(NamedTuple):
    """The output of :class:`BiLM`."""

    layers: Tensor  # (L + 1, B, T, 2 · P); the words twice, then both directions of each layer
    mask: Tensor  # bool (B, T), True where a token is real


class _Read(NamedTuple):
    """Sentences with the tokens that mark their begins and ends."""

    words: Tensor  # (B, T + 2, P)
    forward: list[Tensor]  # (B, T + 2, P) of every layer
    backward: list[Tensor]
    mask: Tensor  # bool (B, T), without the marks


class BiLM(nn.Module):
    """Two language models over words read by their characters, one in each direction.

    PETERS 3.1 and 3.4. Each sentence is read between marks of its begin and its end, which the
    output leaves out. With ``use_skip_connections`` every layer above the first adds its input to
    its output; the sum does not enter its own recurrence. Dropout is applied to the input of every
    layer, so to the added input, too.

    Args:
        config: the sizes. Default: the published model's.
    """

    begin: Tensor  # int64 (C,)
    end: Tensor

    def __init__(self, config: ElmoConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or ElmoConfig()
        is_projected = config.projection_dim < config.lstm_dim
        self.characters = CharacterEncoder(config)
        self.forward_layers, self.backward_layers = (
            nn.ModuleList(
                ProjectedLSTM(
                    config.projection_dim,
                    config.lstm_dim,
                    config.projection_dim if is_projected else 0,
                    cell_clip=config.cell_clip,
                    proj_clip=config.proj_clip if is_projected else None,
                    reverse=reverse,
                )
                for _ in range(config.n_layers)
            )
            for reverse in (False, True)
        )
        self.dropout = nn.Dropout(config.dropout)
        for name, character in (("begin", BEGIN_SENTENCE), ("end", END_SENTENCE)):
            ids = torch.tensor(_frame([character], config.max_characters_per_token))
            self.register_buffer(name, ids, persistent=False)

    def forward(self, char_ids: Tensor, state: CarriedState | None = None) -> BiLMOutput:
        """Every layer's vectors of every word.

        Args:
            char_ids: integers (B, T, C), 0 throughout a word past the end of its sentence; from
                :func:`batch_to_char_ids`.
            state: the state to continue from, updated in place. Default: start from zeros and
                carry no state on.

        Returns:
            ``layers`` (L + 1, B, T, 2 · P), forward before backward, 0 past a sentence's end, and
            ``mask`` (B, T).

        Raises:
            ValueError: ``char_ids`` has another shape, or a word comes after the end of its
                sentence.
        """
        read = self._read(char_ids, state)
        layers = [(read.words, read.words), *zip(read.forward, read.backward, strict=True)]
        # A sentence's end mark follows its own last word, so it lies outside the mask.
        stacked = torch.stack([torch.cat(pair, -1)[:, 1:-1] for pair in layers])
        return BiLMOutput(stacked.masked_fill(~read.mask[..., None], 0), read.mask)

    def _read(self, char_ids: Tensor, state: CarriedState | None = None) -> _Read:
        """As :meth:`forward`, but with the marks, and with the directions separate."""
        mask = word_mask(char_ids, self.config.max_characters_per_token)
        lengths = mask.sum(1)
        rows = torch.arange(len(char_ids), device=char_ids.device)
        marked = F.pad(char_ids, (0, 0, 1, 1))
        marked[:, 0] = self.begin.to(char_ids)
        marked[rows, lengths + 1] = self.end.to(char_ids)
        words = self.characters(marked)
        forward, backward = (
            self._run(direction, layers, words, lengths + 2, state)
            for direction, layers in (
                ("forward", self.forward_layers),
                ("backward", self.backward_layers),
            )
        )
        return _Read(words, forward, backward, mask)

    def _run(
        self,
        direction: str,
        layers: nn.ModuleList,
        x: Tensor,
        lengths: Tensor,
        state: CarriedState | None,
    ) -> list[Tensor]:
        outputs = []
        for depth, lstm in enumerate(layers):
            place = (direction, depth)
            x = self.dropout(x)
            before = None if state is None else state.read(place, len(x))
            output, after = lstm(x, lengths, before)
            if state is not None:
                state.write(place, after)
            x = x + output if self.config.use_skip_connections and depth > 0 else output
            outputs.append(x)
        return outputs

    @classmethod
    def from_pretrained(cls, options: str | Path, weights: str | Path, **overrides: Any) -> BiLM:
        """Build from published files, in evaluation mode.

        Args:
            options: ``options.json``.
            weights: the HDF5 file.
            **overrides: fields of :class:`ElmoConfig` that replace the stored ones.

        Raises:
            ImportError: h5py is not installed.
            ValueError: the options describe another kind of model, or a weight is missing or has
                another shape.
        """
        h5py = _import_h5py()
        model = cls(ElmoConfig.from_json(options, **overrides))
        with h5py.File(weights, "r") as file, torch.no_grad():
            for name, blocks in model._datasets():
                shape = _shape(blocks)
                if name not in file:
                    raise ValueError(f"{weights}: expected a biLM's weights; it lacks {name}")
                if file[name].shape != shape:
                    raise ValueError(
                        f"{weights}: {name}: expected shape {shape}; got {file[name].shape}"
                    )
                stored = torch.from_numpy(file[name][()])
                for block in blocks:
                    block.values.copy_(stored[block.place])
        return model.eval()

    def save_pretrained(self, options: str | Path, weights: str | Path) -> None:
        """Write the files that :meth:`from_pretrained` reads, bit for bit.

        float64 weights are stored in float64, 16-bit weights in float32, which holds them exactly.

        Raises:
            ImportError: h5py is not installed.
        """
        h5py = _import_h5py()
        self.config.to_json(options)
        with h5py.File(weights, "w") as file:
            for name, blocks in self._datasets():
                array = torch.empty(_shape(blocks), dtype=_wide(blocks[0].values))
                for block in blocks:
                    array[block.place] = block.values.detach().to(array)
                file[name] = array.numpy()

    def _datasets(self) -> Iterator[tuple[str, list[_DatasetPart]]]:
        """Yield each dataset of a weight file: its name, and views of this model's parameters."""
        characters = self.characters
        convolution: Any
        lstm: Any
        yield "char_embed", [_whole(characters.embedding.weight[MASK + 1 :])]
        for n, convolution in enumerate(characters.convolutions):
            yield f"CNN/W_cnn_{n}", [_whole(convolution.weight.permute(2, 1, 0)[None])]
            yield f"CNN/b_cnn_{n}", [_whole(convolution.bias)]
        for n, highway in enumerate(characters.highways):
            for name in ("carry", "transform"):
                linear = getattr(highway, name)
                yield f"CNN_high_{n}/W_{name}", [_whole(linear.weight.T)]
                yield f"CNN_high_{n}/b_{name}", [_whole(linear.bias)]
        if characters.projection is not None:
            yield "CNN_proj/W_proj", [_whole(characters.projection.weight.T)]
            yield "CNN_proj/b_proj", [_whole(characters.projection.bias)]
        for direction, layers in enumerate((self.forward_layers, self.backward_layers)):
            for depth, lstm in enumerate(layers):
                cell = f"RNN_{direction}/RNN/MultiRNNCell/Cell{depth}/LSTMCell"
                inputs, hidden = lstm.input_size, lstm.hidden_size
                weight, bias = [], []
                for theirs, ours in enumerate(_TENSORFLOW_GATES):
                    rows = slice(ours * hidden, (ours + 1) * hidden)
                    columns = slice(theirs * hidden, (theirs + 1) * hidden)
                    bias.append(_DatasetPart((columns,), lstm.bias[rows]))
                    for part, place in (
                        (lstm.weight_ih, slice(inputs)),
                        (lstm.weight_hh, slice(inputs, inputs + lstm.output_size)),
                    ):
                        weight.append(_DatasetPart((place, columns), part[rows].T))
                yield f"{cell}/W_0", weight
                yield f"{cell}/B", bias
                if lstm.weight_hr is not None:
                    yield f"{cell}/W_P_0", [_whole(lstm.weight_hr.T)]


# TensorFlow orders the gates i, g, f, o (it calls g j). These are their places in torch's order.
_TENSORFLOW_GATES = (0, 2, 1, 3)


class _DatasetPart(NamedTuple):
    """A part of a dataset of a weight file, and the view of a parameter that it corresponds to."""

    place: tuple[slice, ...]
    values: Tensor


def _whole(values: Tensor) -> _DatasetPart:
    return _DatasetPart(tuple(map(slice, values.shape)), values)


def _shape(blocks: Sequence[_DatasetPart]) -> tuple[int, ...]:
    """The shape of the dataset that the blocks fill."""
    stops = ([part.stop for part in block.place] for block in blocks)
    return tuple(map(max, zip(*stops, strict=True)))


def _import_h5py() -> Any:
    try:
        import h5py
    except ImportError as error:
        raise ImportError("ELMo's weight files need h5py: pip install h5py") from error
    return h5py


# The mix ----------------------------------------------------------------------------------------


class ScalarMix(nn.Module):
    """γ · Σ_k softmax(w)_k · layer_k, with w and γ learnt: PETERS eq. 1.

    With ``layer_norm`` each layer is first normalised by the mean and the variance of all its
    unmasked elements in the whole batch: PETERS 3.2 recommend it for some tasks. A sentence's
    vectors then depend on the other sentences in its batch.

    Args:
        n_layers: how many layers are mixed.
        layer_norm: whether to normalise them.

    Attributes:
        weights: w (n_layers,), initially 0, so that a fresh mix is the mean.
        gamma: γ (), initially 1.
    """

    def __init__(self, n_layers: int, layer_norm: bool = False) -> None:
        super().__init__()
        self.layer_norm = layer_norm
        self.weights = nn.Parameter(torch.zeros(n_layers))
        self.gamma = nn.Parameter(torch.ones(()))

    def extra_repr(self) -> str:
        return f"{len(self.weights)}, layer_norm={self.layer_norm}"

    def forward(self, layers: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mix.

        Args:
            layers: (n_layers, B, T, D).
            mask: bool (B, T), True where a token is real. Default: everywhere.

        Returns:
            (B, T, D), 0 where masked.

        Raises:
            ValueError: ``layers`` or ``mask`` has another shape.
        """
        if layers.dim() != 4 or len(layers) != len(self.weights):
            raise ValueError(
                f"layers: expected ({len(self.weights)}, B, T, D); got {tuple(layers.shape)}"
            )
        if mask is not None:
            if mask.shape != layers.shape[1:3]:
                raise ValueError(
                    f"mask: expected {tuple(layers.shape[1:3])}; got {tuple(mask.shape)}"
                )
            layers = layers.masked_fill(~mask[..., None], 0)
        if self.layer_norm:
            layers = _normalise(layers, mask)
        mixed = self.gamma * torch.tensordot(self.weights.softmax(0), layers, 1)
        return mixed if mask is None else mixed.masked_fill(~mask[..., None], 0)


def _normalise(layers: Tensor, mask: Tensor | None) -> Tensor:
    """Normalise each layer (B, T, D), 0 where masked, by its mean and its standard deviation."""
    x = layers.to(_wide(layers))
    tokens = math.prod(x.shape[1:3]) if mask is None else mask.sum()
    count = x.shape[-1] * torch.as_tensor(tokens, device=x.device).clamp(min=1)
    centred = x - x.sum((1, 2, 3), keepdim=True) / count
    if mask is not None:
        centred = centred.masked_fill(~mask[..., None], 0)
    variance = centred.square().sum((1, 2, 3), keepdim=True) / count
    return (centred * (variance + 1e-12).rsqrt()).to(layers.dtype)


class ElmoOutput(NamedTuple):
    """The output of :class:`Elmo`."""

    representations: list[Tensor]  # (B, T, 2 · P) for each mix
    mask: Tensor  # bool (B, T), True where a token is real


class Elmo(nn.Module):
    """Contextual word vectors: mixes of a biLM's layers, learnt with the task that uses them.

    PETERS 3.2 and 3.3. ``bilm.requires_grad_(False)`` freezes the biLM, so that only the mixes are
    learnt.

    Args:
        bilm: the model whose layers are mixed.
        num_output_representations: how many mixes; a task may use one below its own recurrence and
            one above.
        layer_norm: see :class:`ScalarMix`.
        dropout: the dropout probability of the mixed vectors in training.
    """

    def __init__(
        self,
        bilm: BiLM,
        num_output_representations: int = 1,
        *,
        layer_norm: bool = False,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        self.bilm = bilm
        self.mixes = nn.ModuleList(
            ScalarMix(bilm.config.n_layers + 1, layer_norm)
            for _ in range(num_output_representations)
        )
        self.dropout = nn.Dropout(dropout)

    @classmethod
    def from_pretrained(cls, options: str | Path, weights: str | Path, **arguments: Any) -> Elmo:
        """Build over a published biLM, in evaluation mode.

        The files and the errors are those of :meth:`BiLM.from_pretrained`; ``arguments`` are passed
        to this class.
        """
        return cls(BiLM.from_pretrained(options, weights), **arguments).eval()

    def forward(self, char_ids: Tensor, state: CarriedState | None = None) -> ElmoOutput:
        """Read and mix. Arguments and errors are those of :meth:`BiLM.forward`."""
        layers, mask = self.bilm(char_ids, state)
        return ElmoOutput([self.dropout(mix(layers, mask)) for mix in self.mixes], mask)


# Training the language models -------------------------------------------------------------------


class LogUniformSampler:
    """Distinct words, drawn with P(k) = log((k + 2) / (k + 1)) / log(V + 1).

    This approximates Zipf's law for a vocabulary in order of falling frequency. As in TensorFlow's
    ``log_uniform_candidate_sampler``, words are drawn until ``num_sampled`` different ones have
    come up. A word's expected count is the probability that it occurs in that many draws.

    Args:
        vocab_size: V.
        num_sampled: how many to draw.

    Raises:
        ValueError: ``num_sampled`` isn't from 1 to ``vocab_size``.
    """

    def __init__(self, vocab_size: int, num_sampled: int) -> None:
        if not 1 <= num_sampled <= vocab_size:
            raise ValueError(f"num_sampled: expected from 1 to {vocab_size}; got {num_sampled}")
        self.vocab_size = vocab_size
        self.num_sampled = num_sampled

    def draw(self, generator: torch.Generator | None = None) -> tuple[Tensor, int]:
        """The words, int64 (num_sampled,) on the CPU, and how many draws they took."""
        drawn = torch.empty(0, dtype=torch.long)
        first = drawn  # the places at which a word came up for the first time, in order
        while len(first) < self.num_sampled:
            new = torch.rand(
                max(2 * self.num_sampled, len(drawn)), dtype=torch.float64, generator=generator
            )
            # Rounding can bring the power up to V + 1, which is past the last word.
            words = (new * math.log(self.vocab_size + 1)).exp().long().clamp(max=self.vocab_size)
            drawn = torch.cat((drawn, words - 1))
            by_word, places = drawn.sort(stable=True)
            is_first = torch.ones_like(by_word, dtype=torch.bool)
            is_first[1:] = by_word[1:] != by_word[:-1]
            first = places[is_first].sort().values
        first = first[: self.num_sampled]
        return drawn[first], int(first[-1]) + 1

    def expected_count(self, words: Tensor, draws: int) -> Tensor:
        """1 − (1 − P)^draws, float64 in the shape of ``words``."""
        k = words.double()
        chance = torch.log1p(1 / (k + 1)) / math.log(self.vocab_size + 1)
        return -torch.expm1(draws * torch.log1p(-chance))


class VocabularySoftmax(nn.Module):
    """The loss of predicting words by a softmax over the vocabulary, or over a sample of it.

    In training with ``num_sampled``, the softmax of a row is over its own word and ``num_sampled``
    others, drawn by :class:`LogUniformSampler` once for all rows. The logarithm of a word's
    expected count is subtracted from its logit, so that the model learns the logits of the full
    softmax (Jean, Cho, Memisevic and Bengio, "On Using Very Large Target Vocabulary for Neural
    Machine Translation", 2015, section 3; JOZEFOWICZ 3.1). A drawn word that is a row's own is
    ignored in that row. In evaluation the softmax is over all words.

    Args:
        in_features: D.
        vocab_size: V.
        num_sampled: how many words to draw. Default: full softmax in training, too.
    """

    def __init__(self, in_features: int, vocab_size: int, num_sampled: int | None = None) -> None:
        super().__init__()
        self.output = nn.Linear(in_features, vocab_size)
        nn.init.normal_(self.output.weight, std=in_features**-0.5)
        nn.init.zeros_(self.output.bias)
        self.sampler = None if num_sampled is None else LogUniformSampler(vocab_size, num_sampled)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The mean loss (), in nats, of predicting words, integers (N,), from (N, D)."""
        targets = targets.long()  # cross_entropy takes no other integers
        if self.training and self.sampler is not None:
            return self._sampled(self.sampler, hidden, targets)
        logits = self.output(hidden)
        return F.cross_entropy(logits.to(_wide(logits)), targets)

    def _sampled(self, sampler: LogUniformSampler, hidden: Tensor, targets: Tensor) -> Tensor:
        words, draws = sampler.draw()
        words = words.to(targets.device)
        weight, bias = self.output.weight, self.output.bias
        own = (hidden * weight[targets]).sum(-1) + bias[targets]
        others = F.linear(hidden, weight[words], bias[words])
        wide = _wide(others)
        own = own.to(wide) - sampler.expected_count(targets, draws).log().to(wide)
        others = others.to(wide) - sampler.expected_count(words, draws).log().to(wide)
        others = others.masked_fill(words == targets[:, None], -math.inf)
        logits = torch.cat((own[:, None], others), -1)
        return F.cross_entropy(logits, torch.zeros_like(targets))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class BiLMLosses(NamedTuple):
    """The output of :class:`BiLMForPreTraining`: means over all predictions, in nats, each ()."""

    loss: Tensor  # the mean of both
    forward: Tensor
    backward: Tensor

    @property
    def forward_perplexity(self) -> Tensor:
        return self.forward.exp()

    @property
    def backward_perplexity(self) -> Tensor:
        return self.backward.exp()


class BiLMForPreTraining(nn.Module):
    """A biLM that predicts words: the next word forwards, the previous word backwards.

    PETERS 3.1: one softmax serves both directions. Dropout is applied to its input, too. The
    published model read a stream of sentences, cut every 20 words; here a call reads whole
    sentences.

    Args:
        config: the sizes.
        vocab_size: V, including the marks of a sentence's begin and end.
        begin_id, end_id: the places of these marks in the vocabulary.
        num_sampled: see :class:`VocabularySoftmax`; the published model drew 8192 of 793471.
    """

    def __init__(
        self,
        config: ElmoConfig,
        vocab_size: int,
        begin_id: int,
        end_id: int,
        num_sampled: int | None = None,
    ) -> None:
        super().__init__()
        self.bilm = BiLM(config)
        self.begin_id = begin_id
        self.end_id = end_id
        self.softmax = VocabularySoftmax(config.projection_dim, vocab_size, num_sampled)

    def forward(
        self, char_ids: Tensor, token_ids: Tensor, state: CarriedState | None = None
    ) -> BiLMLosses:
        """The losses of predicting every word of every sentence.

        The forward model predicts a sentence's words from its begin mark on, and finally its end
        mark. The backward model goes in the opposite direction.

        Args:
            char_ids, state: as for :meth:`BiLM.forward`.
            token_ids: integers (B, T), each word's place in the vocabulary; not read past a
                sentence's end.

        Raises:
            ValueError: as for :meth:`BiLM.forward`, or ``token_ids`` has another shape.
        """
        if token_ids.shape != char_ids.shape[:2]:
            raise ValueError(
                f"token_ids: expected {tuple(char_ids.shape[:2])}; got {tuple(token_ids.shape)}"
            )
        read = self.bilm._read(char_ids, state)
        lengths = read.mask.sum(1, keepdim=True)
        words = F.pad(token_ids, (1, 1), value=self.begin_id)
        words = words.scatter(1, lengths + 1, self.end_id)
        pairs = torch.arange(words.shape[1] - 1, device=words.device) <= lengths
        both = [
            self.softmax(self.bilm.dropout(hidden[pairs]), targets[pairs])
            for hidden, targets in (
                (read.forward[-1][:, :-1], words[:, 1:]),
                (read.backward[-1][:, 1:], words[:, :-1]),
            )
        ]
        return BiLMLosses((both[0] + both[1]) / 2, *both)
