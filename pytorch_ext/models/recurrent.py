"""Recurrent language models in plain ``torch.nn``: the eager baseline for RNN, GRU and LSTM.

Mikolov, Karafiát, Burget, Černocký and Khudanpur, "Recurrent Neural Network Based Language Model"
(2010); Zaremba, Sutskever and Vinyals, "Recurrent Neural Network Regularization" (2014). Dropout is
variational (Gal and Ghahramani, "A Theoretically Grounded Application of Dropout in Recurrent
Neural Networks", 2016): a row's mask is the same at every step. Embedding and output may share
their weight (Press and Wolf, "Using the Output Embedding to Improve Language Models", 2017; Inan,
Khosravi and Socher, "Tying Word Vectors and Word Classifiers", 2017).

The recurrent layers are torch's own, which :func:`trifuse.fuse` supports. Only torch is imported
here.

In the shapes below B is the batch, L the length of a text and V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

__all__ = [
    "RecurrentLanguageModel",
    "RecurrentLanguageModelConfig",
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

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Logits for the token that follows each position, and the state after the last one.

        Padding at the end does not change the logits of real positions, but the state is that after
        the padding. In training each call draws new dropout masks.

        Args:
            tokens: integers (B, L).
            state: from the call that read the text before, to go on from there; None at a text's
                begin. See :func:`detach_state`.

        Returns:
            (B, L, V), and the state.

        Raises:
            ValueError: ``state`` has another number of layers.
        """
        if state is not None and len(state) != len(self.layers):
            raise ValueError(f"state: expected {len(self.layers)} layers; got {len(state)}")
        x = self.dropout(self.embedding(tokens))
        new: State = []
        for number, layer in enumerate(self.layers):
            x, last = layer(x, None if state is None else state[number])
            new.append(last)
            x = self.dropout(x)
        return self.output(x), new


def detach_state(state: State) -> State:
    """Cut the graph behind a state: backpropagation through time then ends at this point."""
    return [
        tuple(part.detach() for part in layer) if isinstance(layer, tuple) else layer.detach()
        for layer in state
    ]
