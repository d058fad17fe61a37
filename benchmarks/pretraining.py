"""Pretraining a small BERT eager and fused, and what both then know.

On passages of the standard library's language reference, in words: masked tokens and next passages
are predicted (Devlin et al., 2018, 3.1), without dropout, so that the loss curves can be compared
step by step. Then the help topic that a passage comes from is learnt twice, by fine-tuning the
whole model and by a linear classifier of the frozen model's features.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch import Tensor, nn

import trifuse
from trifuse.benchmarks import demo, measure
from trifuse.benchmarks.transformer import (
    Batch,
    Curves,
    Task,
    Trained,
    curves_table,
    empty_table,
    plot,
    train,
)
from trifuse.models.bert import BertConfig, BertForPreTraining, BertForSequenceClassification

PAD, UNKNOWN, CLS, SEP, MASK, WORDS = range(6)  # the words are the numbers from WORDS on
VOCABULARY = 2000
LENGTH = 64  # tokens of a pair
TOPICS = 8  # the topics with the most passages are told apart

# Data -------------------------------------------------------------------------------------------


class Passage(NamedTuple):
    """A passage in tokens, and its topic's place among those that are told apart, or None."""

    tokens: Tensor  # int64 (length,)
    topic: str
    label: int | None


class Split(NamedTuple):
    """Of every topic the first four fifths, and the rest, both in the text's order."""

    train: list[Passage]
    validation: list[Passage]


def read() -> Split:
    """The reference's prose, tokenised; the vocabulary is the commonest words of it."""
    by_topic: dict[str, list[list[str]]] = {}
    for passage in demo.passages():
        words = re.findall(r"\w+|[^\w\s]", passage.text.lower())
        by_topic.setdefault(passage.topic, []).append(words)
    counts = Counter(word for texts in by_topic.values() for words in texts for word in words)
    ids = {word: WORDS + n for n, (word, _) in enumerate(counts.most_common(VOCABULARY - WORDS))}
    largest = sorted(by_topic, key=lambda topic: len(by_topic[topic]), reverse=True)[:TOPICS]
    split = Split([], [])
    for topic, texts in by_topic.items():
        label = largest.index(topic) if topic in largest else None
        for place, words in enumerate(texts):
            tokens = torch.tensor([ids.get(word, UNKNOWN) for word in words])
            part = split.train if place < 0.8 * len(texts) else split.validation
            part.append(Passage(tokens, topic, label))
    return split


def pairs(passages: Sequence[Passage], batch_size: int, generator: torch.Generator) -> Batch:
    """Passages with the next one or another, some of their tokens masked.

    Returns:
        ids int64 (B, L), mask bool (B, L), token types int64 (B, L), targets int64 (B, L) that are
        −100 where nothing is asked, and int64 (B,), 0 where the second passage follows the first.
    """
    follow = [
        place
        for place in range(len(passages) - 1)
        if passages[place].topic == passages[place + 1].topic
    ]
    chosen = torch.randint(len(follow), (batch_size,), generator=generator)
    others = torch.randint(len(passages), (batch_size,), generator=generator)
    is_other = torch.rand(batch_size, generator=generator) < 0.5
    rows = []
    for number, other, swap in zip(
        chosen.tolist(), others.tolist(), is_other.tolist(), strict=True
    ):
        first = follow[number]
        second = other if swap else first + 1
        rows.append([passages[place].tokens[: (LENGTH - 3) // 2] for place in (first, second)])
    ids, mask, types = join(rows)
    masked, targets = hide(ids, generator)
    return masked, mask, types, targets, is_other.long()


def join(rows: Sequence[Sequence[Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """[CLS] one [SEP] other [SEP], padded: ids, mask and token types, all (B, L)."""
    sep = torch.tensor([SEP])
    ids = [
        torch.cat([torch.tensor([CLS]), *(x for part in row for x in (part, sep))]) for row in rows
    ]
    types = [
        torch.cat([torch.full((len(part) + 1 + (n == 0),), n) for n, part in enumerate(row)])
        for row in rows
    ]
    padded = nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=PAD)
    return padded, padded != PAD, nn.utils.rnn.pad_sequence(types, batch_first=True)


def hide(ids: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Ask for 15% of the words: 80% of them are masked, 10% another word, 10% as they were."""
    draws = torch.rand(ids.shape, generator=generator)
    fate = torch.rand(ids.shape, generator=generator)
    other = torch.randint(WORDS, VOCABULARY, ids.shape, generator=generator)
    asked = (draws < 0.15) & ((ids >= WORDS) | (ids == UNKNOWN))
    hidden = ids.masked_fill(asked & (fate < 0.8), MASK)
    hidden = other.where(asked & (fate >= 0.8) & (fate < 0.9), hidden)
    return hidden, ids.masked_fill(~asked, -100)


def labelled(passages: Sequence[Passage]) -> Batch:
    """All that are told apart: ids, mask and token types (N, L), and labels int64 (N,)."""
    known = [passage for passage in passages if passage.label is not None]
    ids, mask, types = join([[passage.tokens[: LENGTH - 2]] for passage in known])
    return ids, mask, types, torch.tensor([passage.label for passage in known])


# Tasks ------------------------------------------------------------------------------------------


def config(dropout: float) -> BertConfig:
    return BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        max_position_embeddings=LENGTH,
        num_labels=TOPICS,
    )


def pretraining(split: Split) -> Task:
    generator = torch.Generator().manual_seed(1 << 20)
    return Task(
        "pretraining",
        lambda dropout: BertForPreTraining(config(dropout)),
        lambda generator: pairs(split.train, 16, generator),
        [pairs(split.validation, 64, generator)],
        pretraining_loss,
    )


def pretraining_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The sum of both losses, each a mean."""
    ids, mask, types, targets, is_other = batch
    prediction, relationship = model(ids, mask, types)
    return F.cross_entropy(prediction.flatten(0, 1), targets.flatten()) + F.cross_entropy(
        relationship, is_other
    )


def fine_tuning(split: Split, pretrained: Trained) -> Task:
    """Classify, from the pretrained encoder on."""
    ids, mask, types, labels = labelled(split.train)

    def make(dropout: float) -> nn.Module:
        assert isinstance(pretrained.model, BertForPreTraining)
        model = BertForSequenceClassification(config(dropout))
        model.bert.load_state_dict(pretrained.model.bert.state_dict())
        return model

    def draw(generator: torch.Generator) -> Batch:
        rows = torch.randint(len(ids), (16,), generator=generator)
        return ids[rows], mask[rows], types[rows], labels[rows]

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(*batch[:3]), batch[3])

    return Task("fine-tuning", make, draw, [labelled(split.validation)], loss, learning_rate=1e-3)


# Measuring --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Knowledge:
    """Of one pretrained model: how many validation passages get their topic, out of all."""

    fine_tuned: float
    frozen: float
    features: Tensor  # (N, hidden_size), of the validation passages, from the frozen model


def know(split: Split, pretrained: Trained, steps: int, device: str, fused: bool) -> Knowledge:
    tuned = train(fine_tuning(split, pretrained), steps, device=device, fused=fused)
    validation = labelled(split.validation)
    with torch.no_grad():
        logits = tuned.model(*(x.to(device) for x in validation[:3])).cpu()
    train_set = labelled(split.train)
    known, asked = (features(pretrained.model, batch, device) for batch in (train_set, validation))
    return Knowledge(
        _accuracy(logits, validation[3]),
        _accuracy(_classify(known, train_set[3], asked), validation[3]),
        asked,
    )


@torch.no_grad()
def features(model: nn.Module, batch: Batch, device: str) -> Tensor:
    """The mean of the last hidden states of each passage's real tokens, (N, hidden_size)."""
    assert isinstance(model, BertForPreTraining)
    ids, mask, types = (x.to(device) for x in batch[:3])
    hidden = model.bert(ids, mask, types).last_hidden_state
    return (hidden.masked_fill(~mask[..., None], 0).sum(1) / mask.sum(1, keepdim=True)).cpu()


def _classify(known: Tensor, labels: Tensor, asked: Tensor) -> Tensor:
    """Logits of multinomial logistic regression, fitted by L-BFGS with a little weight decay."""
    mean, std = known.mean(0), known.std(0)
    known, asked = (((x - mean) / std).double() for x in (known, asked))
    weight = torch.zeros(known.shape[1], TOPICS, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(known @ weight, labels) + 1e-2 * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return asked @ weight.detach()


def _accuracy(logits: Tensor, labels: Tensor) -> float:
    return (logits.argmax(-1) == labels).double().mean().item()


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = measure.parser("pretraining", __doc__)
    parser.add_argument("--steps", type=int, default=300, help="of training; default: %(default)s")
    options = parser.parse_args(argv)
    if options.quick:
        options.steps = min(options.steps, 20)
    if options.steps < 1:
        parser.error("--steps: expected at least 1")
    return options


def main(argv: Sequence[str]) -> int:
    """Pretrain, classify and show."""
    options = parse(argv)
    device, console = options.device, measure.console
    torch.set_num_threads(options.threads)
    facts = measure.machine(device)
    caption = measure.describe(facts)
    console.print(caption, soft_wrap=True)
    split = read()
    task = pretraining(split)

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with (
        trifuse.backend(options.backend),
        Progress(*columns, console=console, transient=True) as progress,
    ):
        bar = progress.add_task("pretraining", total=3 * options.steps)

        def run(**how: Any) -> Trained:
            return train(
                task, options.steps, device=device, advance=lambda: progress.advance(bar), **how
            )

        curves = Curves(
            task.name, run(fused=False), run(fused=True), run(fused=False, dtype=torch.float64)
        )
        knowledge = {
            name: know(split, pretrained, options.steps, device, fused)
            for name, pretrained, fused in (
                ("eager", curves.eager, False),
                ("fused", curves.fused, True),
            )
        }

    console.print(curves_table([curves]))
    labels = labelled(split.validation)[3]
    chance = labels.bincount().max().item() / len(labels)
    table = empty_table(
        f"topics of {len(labels)} held-out passages told right ({TOPICS} topics)",
        ("fine-tuned", "frozen features", "the commonest"),
    )
    for name, known in knowledge.items():
        table.add_row(name, *(f"{x:.1%}" for x in (known.fine_tuned, known.frozen, chance)))
    console.print(table)
    apart = (knowledge["fused"].features - knowledge["eager"].features).abs().max().item()
    console.print(f"largest difference of the frozen features: {apart:.1e}")

    if options.plot is not None:
        plot(options.plot, [curves], caption)
        console.print(f"wrote {options.plot}")
    if options.json is not None:
        accuracies = {
            name: {"fine_tuned": known.fine_tuned, "frozen": known.frozen}
            for name, known in knowledge.items()
        }
        content = {
            "machine": facts,
            "curves": curves.record(),
            "accuracy": accuracies | {"the commonest": chance},
            "features_apart": apart,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        console.print(f"wrote {options.json}")
    return 0
