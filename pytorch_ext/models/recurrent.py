"""Recurrent language models in plain ``torch.nn``: the eager baseline for RNN, GRU and LSTM.

Mikolov, Karafiát, Burget, Černocký and Khudanpur, "Recurrent Neural Network Based Language Model"
(2010); Zaremba, Sutskever and Vinyals, "Recurrent Neural Network Regularization" (2014). Dropout of
the layers' inputs and outputs is variational (Gal and Ghahramani, "A Theoretically Grounded
Application of Dropout in Recurrent Neural Networks", 2016): a row's mask is the same at every step.
Their mask of the state that a layer passes to its own next step is left out, because torch's layers
have none. ``trifuse.nn.LSTM`` has ``recurrent_dropout``. Embedding and output may share their
weight (Press and Wolf, "Using the Output Embedding to Improve Language Models", 2017; Inan,
Khosravi and Socher, "Tying Word Vectors and Word Classifiers", 2017).

The recurrent layers are torch's own, which :func:`trifuse.fuse` supports. Only torch is imported
here.

In the shapes below B is the batch, L the length of a text, N the texts being written and V the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, overload

from torch import Tensor, nn

from trifuse.models._tokens import (
    at_last_token,
    check_mask,
    check_prompt,
    check_tokens,
    real_lengths,
    repeated_rows,
)

__all__ = [
    "DecodingState",
    "RecurrentLanguageModel",
    "RecurrentLanguageModelConfig",
    "RecurrentLanguageModelOutput",
    "State",
    "VariationalDropout",
    "detach_state",
]

# For each layer (1, B, hidden_size): h, or in an LSTM h and c.
State = list[Any]

_CELLS: dict[str, Callable[..., nn.RNNBase]] = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}


@dataclass
class RecurrentLanguageModelConfig:
    """The sizes and rates of a :class:`RecurrentLanguageModel`.

    Attributes:
        vocab_size: V.
        embedding_dim: features of the embedding, and with ``tie_weights`` of the last layer.
        hidden_size: features of every other layer.
        num_layers: how many recurrent layers.
        cell: "lstm", "gru", or "rnn" with tanh.
        dropout: the dropout probability of the embeddings, between layers, and of the output.
        tie_weights: the output projection's weight is the embedding's.

    Raises:
        ValueError: ``cell`` is none of these, or ``num_layers`` is below 1.
    """

    vocab_size: int = 10_000
    embedding_dim: int = 650
    hidden_size: int = 650
    num_layers: int = 2
    cell: str = "lstm"
    dropout: float = 0.5
    tie_weights: bool = True

    def __post_init__(self) -> None:
        if self.cell not in _CELLS:
            known = ", ".join(_CELLS)
            raise ValueError(f"cell: expected one of {known}; got {self.cell!r}")
        if self.num_layers < 1:
            raise ValueError(f"num_layers: expected at least 1; got {self.num_layers}")

    @property
    def output_size(self) -> int:
        """Features that the output projection reads."""
        return self.embedding_dim if self.tie_weights else self.hidden_size


class VariationalDropout(nn.Module):
    """Dropout of whole features of a row: (B, L, D) times a mask (B, 1, D)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.dropout.p == 0:
            return x
        return x * self.dropout(x.new_ones(x.shape[0], 1, x.shape[2]))


@dataclass
class DecodingState:
    """The state that :meth:`RecurrentLanguageModel.step` continues from."""

    layers: State
    logits: Tensor  # (B, V), for the token after each prompt
    max_target_length: int | None = None  # no limit for the searches

    def reorder(self, rows: Tensor) -> None:
        """Keep the texts with these indices, in this order; an index may repeat."""
        self.layers = _map(self.layers, lambda part: part.index_select(1, rows))


class RecurrentLanguageModelOutput(NamedTuple):
    """The output of :class:`RecurrentLanguageModel` with ``output_hidden_states``."""

    logits: Tensor  # (B, L, V)
    state: State
    # The embeddings, then each layer's result, each after dropout. The output projection reads the
    # last one.
    hidden_states: tuple[Tensor, ...]


class RecurrentLanguageModel(nn.Module):
    """Embedding, recurrent layers and a projection to the vocabulary.

    Embeddings and the output start uniform in ±0.1, as in Zaremba et al.; the layers start as
    torch's do.

    Args:
        config: the sizes.
    """

    def __init__(self, config: RecurrentLanguageModelConfig) -> None:
        super().__init__()
        self.config = config
        inputs = [config.embedding_dim] + [config.hidden_size] * (config.num_layers - 1)
        outputs = [*inputs[1:], config.output_size]
        self.embedding = nn.Embedding(config.vocab_size, config.embedding_dim)
        # One layer each: torch's dropout between layers draws anew at every step.
        self.layers = nn.ModuleList(
            _CELLS[config.cell](*sizes, batch_first=True)
            for sizes in zip(inputs, outputs, strict=True)
        )
        self.dropout = VariationalDropout(config.dropout)
        self.output = nn.Linear(config.output_size, config.vocab_size)
        if config.tie_weights:
            self.output.weight = self.embedding.weight
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.output.weight, -0.1, 0.1)
        nn.init.zeros_(self.output.bias)

    @property
    def max_target_length(self) -> int | None:
        return None  # no limit for the searches

    @overload
    def forward(
        self,
        tokens: Tensor,
        state: State | None = None,
        mask: Tensor | None = None,
        *,
        output_hidden_states: Literal[False] = False,
    ) -> tuple[Tensor, State]: ...

    @overload
    def forward(
        self,
        tokens: Tensor,
        state: State | None = None,
        mask: Tensor | None = None,
        *,
        output_hidden_states: bool,
    ) -> tuple[Tensor, State] | RecurrentLanguageModelOutput: ...

    def forward(
        self,
        tokens: Tensor,
        state: State | None = None,
        mask: Tensor | None = None,
        *,
        output_hidden_states: bool = False,
    ) -> tuple[Tensor, State] | RecurrentLanguageModelOutput:
        """Logits for the token that follows each position, and the state after the last one.

        Padding at the end does not change the logits of real positions. But without a mask, the
        returned state is the one after the padding. In training each call draws new dropout masks.

        Args:
            tokens: integers (B, L).
            state: from the call that read the preceding text; None at the beginning of a text. See
                :func:`detach_state`.
            mask: bool (B, L), True where a token is real; padding comes after a row's tokens. The
                state is then that after each row's last real token.
            output_hidden_states: return a :class:`RecurrentLanguageModelOutput`.

        Returns:
            (B, L, V), and the state.

        Raises:
            ValueError: the tokens have another shape, ``state`` has another number of layers, or
                the mask is not as above.
        """
        check_tokens("tokens", tokens)
        if state is not None and len(state) != len(self.layers):
            raise ValueError(f"state: expected {len(self.layers)} layers; got {len(state)}")
        lengths = None if mask is None else real_lengths("mask", mask, tokens)
        hidden, new = self._recur(tokens, state, lengths)
        logits = self.output(hidden[-1])
        if output_hidden_states:
            return RecurrentLanguageModelOutput(logits, new, tuple(hidden))
        return logits, new

    def features(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, L, output_size), which the output projection reads.

        Args:
            tokens: integers (B, L).
            mask: bool (B, L), True where a token is real. Padding at the end does not change real
                positions, so the mask is checked and not used.

        Raises:
            ValueError: the tokens have another shape, or the mask isn't boolean or hasn't the
                tokens' shape.
        """
        check_tokens("tokens", tokens)
        check_mask("mask", mask, tokens)
        return self._recur(tokens)[0][-1]

    def _recur(
        self, tokens: Tensor, state: State | None = None, lengths: Tensor | None = None
    ) -> tuple[list[Tensor], State]:
        """The hidden states, and the layers' states after the last of all or ``lengths`` tokens."""
        hidden = [self.dropout(self.embedding(tokens))]
        new: State = []
        for number, layer in enumerate(self.layers):
            begin = None if state is None else state[number]
            x, last = run_layer(layer, hidden[-1], begin, lengths)
            new.append(last)
            hidden.append(self.dropout(x))
        return hidden, new

    def start(self, prompt: Tensor, prompt_mask: Tensor | None = None) -> DecodingState:
        """Read texts that :meth:`step` continues.

        Args:
            prompt: integers (B, L), at least one in each row.
            prompt_mask: bool (B, L), True where a token is real; padding comes after a row's
                tokens.

        Raises:
            ValueError: there are no positions, or the mask is not as above.
        """
        check_prompt(prompt)
        lengths = None if prompt_mask is None else real_lengths("prompt_mask", prompt_mask, prompt)
        if lengths is not None and (lengths == prompt.shape[1]).all():
            lengths = None  # no padding, so no need to pay for packing
        hidden, state = self._recur(prompt, None, lengths)
        last = hidden[-1][:, -1] if lengths is None else at_last_token(hidden[-1], lengths)
        return DecodingState(state, self.output(last))

    def step(self, tokens: Tensor, state: DecodingState) -> Tensor:
        """Logits (N, n, V) after each of n further tokens.

        Args:
            tokens: integers (N, n). N is a multiple of the number of texts in ``state``; the rows
                that continue one text are adjacent.
            state: from :meth:`start`; it is updated to continue after the tokens.

        Raises:
            ValueError: the tokens have another shape, or N is not such a multiple.
        """
        check_tokens("tokens", tokens)
        first = state.layers[0]
        rows = (first[0] if isinstance(first, tuple) else first).shape[1]
        if len(tokens) != rows:
            state.reorder(repeated_rows(rows, len(tokens), tokens.device))
        hidden, state.layers = self._recur(tokens, state.layers)
        return self.output(hidden[-1])


def run_layer(
    layer: nn.Module, x: Tensor, state: Any = None, lengths: Tensor | None = None
) -> tuple[Tensor, Any]:
    """A recurrent layer's outputs, and its state after each row's last step.

    Args:
        layer: one of torch's, with ``batch_first``.
        x: (B, L, D).
        state: before the first step. Default: zeros.
        lengths: integers (B,), the steps of each row; the outputs after them are 0. A backward
            recurrence begins at a row's own last step. Default: L.
    """
    if lengths is None or x.shape[0] == 0:  # torch packs no empty batch
        return layer(x, state)
    packed = nn.utils.rnn.pack_padded_sequence(
        x, lengths.cpu(), batch_first=True, enforce_sorted=False
    )
    packed, last = layer(packed, state)
    x, _ = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True, total_length=x.shape[1])
    return x, last


def detach_state(state: State) -> State:
    """Cut the graph behind a state: backpropagation through time then ends at this point."""
    return _map(state, Tensor.detach)


def _map(state: State, function: Callable[[Tensor], Tensor]) -> State:
    return [
        tuple(function(part) for part in layer) if isinstance(layer, tuple) else function(layer)
        for layer in state
    ]
