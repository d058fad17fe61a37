"""Makes BERT's inputs from tokens, for its pre-training tasks: masked tokens and sentence pairs.

Devlin, Chang, Lee and Toutanova, "BERT: Pre-training of Deep Bidirectional Transformers for
Language Understanding" (2018), cited as DEVLIN. Random numbers come from a ``torch.Generator``, so
a seed decides them. Only torch is imported here.

In the shapes below B is the batch and L the length of its longest row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

__all__ = ["BertInputs", "SentencePair", "join_segments", "mask_tokens", "next_sentence_pairs"]

_Sentence = TypeVar("_Sentence")


class BertInputs(NamedTuple):
    """The first arguments of :meth:`trifuse.models.bert.BertModel.forward`, in its order."""

    input_ids: Tensor  # int64 (B, L)
    attention_mask: Tensor  # bool (B, L), True where a token is real
    token_type_ids: Tensor  # int64 (B, L), a segment's number


class SentencePair(NamedTuple, Generic[_Sentence]):
    """Two sentences, and whether the second was drawn at random (class 1) or follows (class 0)."""

    first: _Sentence
    second: _Sentence
    is_random: bool


def join_segments(
    rows: Sequence[Sequence[Tensor]], *, cls_id: int, sep_id: int, pad_id: int = 0
) -> BertInputs:
    """Join each row's segments as [CLS] one [SEP] two [SEP] … and pad the rows at their ends.

    DEVLIN, figure 2. A segment's token type is its number in the row. [CLS] belongs to the first
    segment, each [SEP] to the segment that it ends.

    Args:
        rows: for each row its segments, integers (length,) each.
        cls_id, sep_id, pad_id: the special tokens.

    Raises:
        ValueError: there are no rows, or a row has no segment.
    """
    if not rows or not all(rows):
        raise ValueError("rows: expected at least one row, and a segment in each")
    lengths = torch.tensor([1 + sum(len(segment) + 1 for segment in row) for row in rows])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.full(mask.shape, pad_id)
    types = torch.zeros(mask.shape, dtype=torch.long)
    for row, segments in enumerate(rows):
        ids[row, 0] = cls_id
        end = 1
        for number, segment in enumerate(segments):
            begin, end = end, end + len(segment) + 1
            ids[row, begin : end - 1] = segment
            ids[row, end - 1] = sep_id
            types[row, begin:end] = number
    return BertInputs(ids, mask, types)


def mask_tokens(
    input_ids: Tensor,
    *,
    mask_id: int,
    words: range,
    special_tokens_mask: Tensor | None = None,
    mlm_probability: float = 0.15,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw the tokens that a masked language model predicts, and hide most of them.

    DEVLIN 3.1, task 1: of the drawn tokens 80% become [MASK], 10% a random word, 10% stay.

    Args:
        input_ids: integers, of any shape.
        mask_id: the token [MASK].
        words: the ids of words, from which random ones are drawn.
        special_tokens_mask: bool, shaped as ``input_ids``, True where a token is never drawn.
            Default: True where it is not a word.
        mlm_probability: the probability that a token is drawn.
        generator: the random generator. Default: torch's own.

    Returns:
        The ids to read, and the labels: the drawn tokens, −100 (``F.cross_entropy``'s
        ``ignore_index``) elsewhere. Both are int64, shaped as ``input_ids``.

    Raises:
        ValueError: ``words`` is empty or has a step, or ``mlm_probability`` is not in [0, 1].
    """
    if not words or words.step != 1:
        raise ValueError(f"words: expected a range of step 1 that is not empty; got {words}")
    if not 0 <= mlm_probability <= 1:
        raise ValueError(f"mlm_probability: expected a number in [0, 1]; got {mlm_probability}")
    input_ids = input_ids.long()  # narrower integers may hold neither −100 nor every word
    if special_tokens_mask is None:
        special_tokens_mask = (input_ids < words.start) | (input_ids >= words.stop)
    shape, device = input_ids.shape, input_ids.device
    draws = torch.rand(shape, generator=generator, device=device)
    fate = torch.rand(shape, generator=generator, device=device)
    random = torch.randint(words.start, words.stop, shape, generator=generator, device=device)
    drawn = (draws < mlm_probability) & ~special_tokens_mask
    hidden = input_ids.masked_fill(drawn & (fate < 0.8), mask_id)
    hidden = random.where(drawn & (fate >= 0.8) & (fate < 0.9), hidden)
    return hidden, input_ids.masked_fill(~drawn, -100)


def next_sentence_pairs(
    documents: Sequence[Sequence[_Sentence]], count: int, generator: torch.Generator | None = None
) -> list[SentencePair[_Sentence]]:
    """Draw pairs of sentences, half of which follow one another.

    DEVLIN 3.1, task 2. The first sentence is any that another one follows. With probability ½ the
    second is the one that follows, otherwise any sentence of another document.

    Args:
        documents: each document's sentences in order, in any form.
        count: how many pairs.
        generator: the random generator. Default: torch's own.

    Raises:
        ValueError: no document has two sentences, or only one has any.
    """
    lengths = torch.tensor([len(document) for document in documents])
    if not (lengths > 1).any() or (lengths > 0).sum() < 2:
        raise ValueError(
            "documents: expected at least two with sentences, one of them with two or more; "
            f"got lengths {lengths.tolist()}"
        )
    begins = lengths.cumsum(0) - lengths  # a sentence's number counts those of earlier documents
    followed = [
        (number, place) for number, doc in enumerate(documents) for place in range(len(doc) - 1)
    ]
    chosen = torch.randint(len(followed), (count,), generator=generator)
    is_random = torch.rand(count, generator=generator) < 0.5
    # Uniform over the sentences of other documents; those of the same document are skipped.
    own = torch.tensor([followed[place][0] for place in chosen.tolist()], dtype=torch.long)
    uniform = torch.rand(count, generator=generator, dtype=torch.float64)
    others = (uniform * (lengths.sum() - lengths[own])).long()
    others = others + lengths[own] * (others >= begins[own])
    places = torch.searchsorted(begins + lengths, others, right=True)
    pairs = []
    for pick, random, other, document in zip(
        chosen.tolist(), is_random.tolist(), others.tolist(), places.tolist(), strict=True
    ):
        number, place = followed[pick]
        second = documents[number][place + 1]
        if random:
            second = documents[document][other - int(begins[document])]
        pairs.append(SentencePair(documents[number][place], second, random))
    return pairs
