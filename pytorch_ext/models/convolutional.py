"""A convolutional language model in plain ``torch.nn``.

Dauphin, Fan, Auli and Grangier, "Language Modeling with Gated Convolutional Networks" (2017), cited
as DAUPHIN. Only torch is imported here.

In the shapes below B is the batch, L the length of a text, D the features of a layer and V the
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ConvolutionalLanguageModel", "ConvolutionalLanguageModelConfig", "GatedBlock"]


@dataclass
class ConvolutionalLanguageModelConfig:
    """The sizes and rates of a :class:`ConvolutionalLanguageModel`.

    Attributes:
        vocab_size: V.
        hidden_size: D, of the embedding and of every block.
        num_blocks: how many blocks.
        kernel_size: how many positions a convolution reads: a token and those before it.
        bottleneck: features of a block's wide convolution, between two of width 1 (DAUPHIN 2); None
            for a single convolution.
        dropout: the dropout probability of the embeddings and of each block's result.
        tie_weights: the output projection's weight is the embedding's.

    Raises:
        ValueError: ``num_blocks``, ``kernel_size`` or ``bottleneck`` is below 1.
    """

    vocab_size: int = 10_000
    hidden_size: int = 512
    num_blocks: int = 8
    kernel_size: int = 4
    bottleneck: int | None = None
    dropout: float = 0.2
    tie_weights: bool = True

    def __post_init__(self) -> None:
        for name in ("num_blocks", "kernel_size", "bottleneck"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1; got {value}")


class GatedBlock(nn.Module):
    """x + dropout(GLU(x)), where GLU(x) = (x * W + b) ⊗ σ(x * V + c) (DAUPHIN, eq. 1).

    The convolutions are causal: a position reads itself and ``kernel_size`` − 1 positions before
    it, zeros before the first. One convolution computes both products.
    """

    def __init__(
        self, hidden_size: int, kernel_size: int, bottleneck: int | None = None, dropout: float = 0
    ) -> None:
        super().__init__()
        sizes = [(hidden_size, hidden_size, kernel_size)]
        if bottleneck is not None:
            sizes = [
                (hidden_size, bottleneck, 1),
                (bottleneck, bottleneck, kernel_size),
                (bottleneck, hidden_size, 1),
            ]
        self.paddings = [width - 1 for _, _, width in sizes]
        self.convolutions = nn.ModuleList(
            nn.Conv1d(size_in, 2 * size_out, width) for size_in, size_out, width in sizes
        )
        for parameter in self.convolutions.parameters():
            if parameter.dim() == 1:
                nn.init.zeros_(parameter)
            else:
                nn.init.kaiming_normal_(parameter, nonlinearity="linear")
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """From (B, D, L) to (B, D, L)."""
        y = x
        for convolution, padding in zip(self.convolutions, self.paddings, strict=True):
            y = F.glu(convolution(F.pad(y, (padding, 0))), 1)
        return x + self.dropout(y)


class ConvolutionalLanguageModel(nn.Module):
    """Embedding, gated blocks and a projection to the vocabulary.

    A prediction depends on the last ``num_blocks`` · (``kernel_size`` − 1) + 1 tokens.

    Args:
        config: the sizes.
    """

    def __init__(self, config: ConvolutionalLanguageModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.Sequential(
            *(
                GatedBlock(
                    config.hidden_size, config.kernel_size, config.bottleneck, config.dropout
                )
                for _ in range(config.num_blocks)
            )
        )
        self.output = nn.Linear(config.hidden_size, config.vocab_size)
        if config.tie_weights:
            self.output.weight = self.embedding.weight
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.output.weight, -0.1, 0.1)
        nn.init.zeros_(self.output.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, L, V) for the token that follows each position of tokens, integers (B, L).

        Padding at the end does not change the logits of real positions.
        """
        x = self.dropout(self.embedding(tokens))
        return self.output(self.blocks(x.mT).mT)
