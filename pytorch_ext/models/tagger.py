"""A bidirectional LSTM that tags words, in plain ``torch.nn``: the eager baseline.

A word is represented by its embedding and by a convolution over its characters (Ma and Hovy,
"End-to-end Sequence Labeling via Bi-directional LSTM-CNNs-CRF", 2016). Vectors of a language model
may be concatenated anywhere between the layers: below the first, like ELMo's (Peters et al., "Deep
Contextualized Word Representations", 2018, section 3.3); above the first, as in TagLM (Peters,
Ammar, Bhagavatula and Power, "Semi-supervised Sequence Tagging with Bidirectional Language Models",
2017, section 3.3); above the last, which the first of these papers adds for some tasks.

The tagger returns a score for each word and tag. A softmax turns them into probabilities for each
word alone; a conditional random field (Huang, Xu and Yu, "Bidirectional LSTM-CRF Models for
Sequence Tagging", 2015) takes them as its emissions. Only torch is imported here.

In the shapes below B is the batch, T the length in words, C the characters of a word
(``max_characters_per_token``) and K the tags.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from trifuse.models.elmo import CharacterEncoder, ElmoConfig, word_mask

__all__ = ["Tagger", "TaggerConfig"]


@dataclass
class TaggerConfig:
    """The sizes and rates of a :class:`Tagger`.

    Attributes:
        vocab_size: how many words have an embedding, a shared one for unknown words included.
        num_tags: K.
        embedding_dim: features of a word's embedding.
        char_embedding_dim: features of a character's embedding.
        filters: pairs of a width in characters and a number of filters. A word's character features
            are their maxima.
        max_characters_per_token: C.
        hidden_size: features of each direction of a layer.
        num_layers: how many bidirectional layers.
        dropout: the dropout probability of each layer's input and of the output layer's.
        context_sizes: maps a number of layers to the features of the contextual vectors that join
            above that many layers. Those at 0 join the words, those at ``num_layers`` the output.
            None by default.

    Raises:
        ValueError: a size is below 1; a filter is wider than ``max_characters_per_token``;
            ``max_characters_per_token`` is below 3; or a place in ``context_sizes`` is not from 0
            to ``num_layers``.
    """

    vocab_size: int
    num_tags: int
    embedding_dim: int = 100
    char_embedding_dim: int = 30
    filters: Sequence[tuple[int, int]] = ((3, 30),)
    max_characters_per_token: int = 50
    hidden_size: int = 200
    num_layers: int = 2
    dropout: float = 0.5
    context_sizes: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_tags", "embedding_dim", "hidden_size", "num_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1; got {getattr(self, name)}")
        for place, size in self.context_sizes.items():
            if not 0 <= place <= self.num_layers:
                raise ValueError(
                    f"context_sizes: expected places from 0 to num_layers={self.num_layers}; "
                    f"got {place}"
                )
            if size < 1:
                raise ValueError(f"context_sizes: expected at least 1 feature; got {size}")
        self.characters()  # checks the filters

    def characters(self) -> ElmoConfig:
        """The sizes of the character encoder, which has neither highway layers nor a projection."""
        filters = sum(count for _, count in self.filters)
        return ElmoConfig(
            char_embedding_dim=self.char_embedding_dim,
            filters=self.filters,
            n_highway=0,
            max_characters_per_token=self.max_characters_per_token,
            activation="tanh",
            lstm_dim=filters,
            projection_dim=filters,
        )


class Tagger(nn.Module):
    """Maps words, their characters and contextual vectors to scores of tags.

    Each layer reads [→; ←], both directions of the layer below, and the contextual vectors that
    join there. Words' embeddings start uniform in ± √(3 / embedding_dim), as in Ma and Hovy; the
    layers start as torch's do.

    Args:
        config: the sizes.
    """

    def __init__(self, config: TaggerConfig) -> None:
        super().__init__()
        self.config = config
        characters = config.characters()
        self.embedding = nn.Embedding(config.vocab_size, config.embedding_dim)
        self.characters = CharacterEncoder(characters)
        read = config.embedding_dim + characters.projection_dim
        # One layer each, so that vectors can join between them.
        layers = []
        for place in range(config.num_layers):
            read += config.context_sizes.get(place, 0)
            layers.append(nn.LSTM(read, config.hidden_size, batch_first=True, bidirectional=True))
            read = 2 * config.hidden_size
        self.layers = nn.ModuleList(layers)
        self.dropout = nn.Dropout(config.dropout)
        read += config.context_sizes.get(config.num_layers, 0)
        self.output = nn.Linear(read, config.num_tags)
        bound = (3 / config.embedding_dim) ** 0.5
        nn.init.uniform_(self.embedding.weight, -bound, bound)

    def forward(
        self, word_ids: Tensor, char_ids: Tensor, contexts: Mapping[int, Tensor] | None = None
    ) -> Tensor:
        """Score the tags of every word.

        Args:
            word_ids: integers (B, T); not read past a sentence's end.
            char_ids: integers (B, T, C), 0 throughout a word past the end of its sentence; from
                :func:`trifuse.models.elmo.batch_to_char_ids`.
            contexts: for each place in ``context_sizes``, vectors (B, T, size); not read past a
                sentence's end. Default: none.

        Returns:
            (B, T, K), 0 past a sentence's end.

        Raises:
            ValueError: an argument has another shape; a word comes after the end of its sentence;
                or ``contexts`` has other places than ``context_sizes``.
        """
        mask = word_mask(char_ids, self.config.max_characters_per_token)
        if word_ids.shape != mask.shape:
            raise ValueError(f"word_ids: expected {tuple(mask.shape)}; got {tuple(word_ids.shape)}")
        contexts = self._check(contexts or {}, mask)
        if mask.numel() == 0:
            return self.output.weight.new_zeros(*mask.shape, self.config.num_tags)
        past = ~mask[..., None]
        lengths = mask.sum(1).clamp(min=1).cpu()  # torch packs no empty sentences
        x = torch.cat(
            (self.embedding(word_ids.masked_fill(~mask, 0)), self.characters(char_ids)), -1
        )
        for place in range(self.config.num_layers + 1):
            if place > 0:
                packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
                output, _ = self.layers[place - 1](packed)
                x, _ = pad_packed_sequence(output, batch_first=True, total_length=mask.shape[1])
            if place in contexts:
                x = torch.cat((x, contexts[place].to(x.dtype).masked_fill(past, 0)), -1)
            x = self.dropout(x)
        return self.output(x).masked_fill(past, 0)

    def _check(self, contexts: Mapping[int, Tensor], mask: Tensor) -> Mapping[int, Tensor]:
        sizes = self.config.context_sizes
        if contexts.keys() != sizes.keys():
            raise ValueError(
                f"contexts: expected vectors at the places {sorted(sizes)}; got {sorted(contexts)}"
            )
        for place, vectors in contexts.items():
            wanted = (*mask.shape, sizes[place])
            if vectors.shape != wanted:
                raise ValueError(
                    f"contexts[{place}]: expected {wanted}; got {tuple(vectors.shape)}"
                )
        return contexts
