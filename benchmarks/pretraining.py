"""Pretraining a small BERT eager and fused, then classifying topics with both.

The text is passages of the standard library's language reference, in words. The model predicts
masked tokens and next passages (Devlin et al., 2018, 3.1). Then the help topic of a passage is
learnt twice, by fine-tuning the whole model and by a linear classifier on the frozen model's
features.

Loss curves are compared step by step, so these models are trained without dropout: eager, fused,
and eager in float64, which shows the effect of rounding. The accuracy of fine-tuning is that of
models fine-tuned with dropout, from several seeds. The learning rate of fine-tuning and the weight
decay of the linear classifier are chosen on validation passages; the figures are for test passages.
"""

from __future__ import annotations

import argparse
import operator
import random
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

import trifuse
from trifuse.benchmarks import command_line, demo, machine, report
from trifuse.benchmarks.terminal import console, learnt_share, print_table, progress_bars
from trifuse.benchmarks.transformer import (
    DROPOUT,
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
from trifuse.models.bert_inputs import (
    BertInputs,
    join_segments,
    mask_tokens,
    next_sentence_pairs,
)

PAD, UNKNOWN, CLS, SEP, MASK, WORDS = range(6)  # the ids of words start at WORDS
VOCABULARY = 2000
LENGTH = 64  # tokens of a pair
TOPICS = 8  # the topics with the most passages are the classes
LEARNING_RATES = (1e-3, 3e-3)  # of fine-tuning
WEIGHT_DECAYS = (1e-3, 1e-2, 1e-1)  # of the linear classifier
SEEDS = 3  # of fine-tuning

# Data -------------------------------------------------------------------------------------------


class Passage(NamedTuple):
    """A passage in tokens; ``label`` is the class of its topic, or None for all other topics."""

    tokens: Tensor  # int64 (length,)
    topic: str
    place: int  # among the topic's passages
    label: int | None


class Split(NamedTuple):
    """Seven, one and two tenths of the passages of every topic, drawn at random."""

    train: list[Passage]
    validation: list[Passage]
    test: list[Passage]


def read() -> Split:
    """The reference's prose, tokenised; the vocabulary is its commonest words."""
    by_topic: dict[str, list[list[str]]] = {}
    for passage in demo.passages():
        words = re.findall(r"\w+|[^\w\s]", passage.text.lower())
        by_topic.setdefault(passage.topic, []).append(words)
    counts = Counter(word for texts in by_topic.values() for words in texts for word in words)
    ids = {word: WORDS + n for n, (word, _) in enumerate(counts.most_common(VOCABULARY - WORDS))}
    largest = sorted(by_topic, key=lambda topic: len(by_topic[topic]), reverse=True)[:TOPICS]
    split = Split([], [], [])
    shuffle, in_order = random.Random(0).shuffle, operator.attrgetter("place")
    for topic, texts in by_topic.items():
        label = largest.index(topic) if topic in largest else None
        passages = [
            Passage(torch.tensor([ids.get(word, UNKNOWN) for word in words]), topic, place, label)
            for place, words in enumerate(texts)
        ]
        shuffle(passages)
        ends = round(0.7 * len(passages)), round(0.8 * len(passages))
        split.train.extend(sorted(passages[: ends[0]], key=in_order))
        split.validation.extend(passages[slice(*ends)])
        split.test.extend(sorted(passages[ends[1] :], key=in_order))
    return split


def pairs(passages: Sequence[Passage], batch_size: int, generator: torch.Generator) -> Batch:
    """Pairs of a passage and the next or a random one, with some of their tokens masked.

    Returns:
        ids int64 (B, L), mask bool (B, L), token types int64 (B, L), labels int64 (B, L), −100
        where no token is predicted, and int64 (B,), 0 where the second passage follows the first.
    """
    drawn = next_sentence_pairs(runs(passages), batch_size, generator)
    half = (LENGTH - 3) // 2
    inputs = join([[pair.first.tokens[:half], pair.second.tokens[:half]] for pair in drawn])
    hidden, labels = hide(inputs.input_ids, generator)
    return (
        hidden,
        *inputs[1:],
        labels,
        torch.tensor([pair.is_random for pair in drawn], dtype=torch.long),
    )


def runs(passages: Sequence[Passage]) -> list[list[Passage]]:
    """Cut passages, in order, into those that follow one another in a topic."""
    found: list[list[Passage]] = []
    for passage in passages:
        last = found[-1][-1] if found else None
        if last is None or (last.topic, last.place + 1) != (passage.topic, passage.place):
            found.append([])
        found[-1].append(passage)
    return found


def join(rows: Sequence[Sequence[Tensor]]) -> BertInputs:
    return join_segments(rows, cls_id=CLS, sep_id=SEP, pad_id=PAD)


def hide(ids: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Choose 15% of the words as labels, unknown words too, and hide them as BERT does."""
    special = torch.isin(ids, torch.tensor([PAD, CLS, SEP, MASK]))
    return mask_tokens(
        ids,
        mask_id=MASK,
        words=range(WORDS, VOCABULARY),
        special_tokens_mask=special,
        generator=generator,
    )


def labelled(passages: Sequence[Passage]) -> Batch:
    """The passages with a class: ids, mask and token types (N, L), and labels int64 (N,)."""
    known = [passage for passage in passages if passage.label is not None]
    ids, mask, types = join([[passage.tokens[: LENGTH - 2]] for passage in known])
    return ids, mask, types, torch.tensor([passage.label for passage in known])


# Tasks ------------------------------------------------------------------------------------------


def config(dropout: float) -> BertConfig:
    # The initial weights are larger than BERT's, whose 0.02 is for 768 features.
    return BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        initializer_range=64**-0.5,
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
        [pairs(split.test, 64, generator)],
        pretraining_loss,
    )


def pretraining_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The sum of both losses, each a mean."""
    ids, mask, types, targets, is_other = batch
    prediction, relationship = model(ids, mask, types)
    return F.cross_entropy(prediction.flatten(0, 1), targets.flatten()) + F.cross_entropy(
        relationship, is_other
    )


def fine_tuning(split: Split, pretrained: Trained, learning_rate: float) -> Task:
    """The task of classifying topics, starting from the pretrained encoder."""
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

    return Task("fine-tuning", make, draw, [labelled(split.test)], loss, learning_rate)


# Measuring --------------------------------------------------------------------------------------


def learn_curves(task: Task, steps: int, device: str, advance: Callable[[], object]) -> Curves:
    def run(**how: Any) -> Trained:
        return train(task, steps, device=device, advance=advance, **how)

    return Curves(
        task.name, run(fused=False), run(fused=True), run(fused=False, dtype=torch.float64)
    )


class Accuracy(NamedTuple):
    """The fraction of passages whose topic is classified correctly."""

    validation: float
    test: float


@dataclass(frozen=True)
class TopicResults:
    """How well one pretrained model classifies topics, fine-tuned and frozen."""

    fine_tuned: dict[float, list[Accuracy]]  # by learning rate, one for each seed
    frozen: float  # the accuracy on the test passages
    features: Tensor  # (N, hidden_size) of the test passages, from the frozen model


def learn_topics(
    split: Split,
    pretrained: Trained,
    steps: int,
    device: str,
    fused: bool,
    advance: Callable[[], object],
) -> TopicResults:
    parts = [labelled(part) for part in split]

    @torch.no_grad()
    def accuracy_of(model: nn.Module, batch: Batch) -> float:
        return accuracy(model(*(x.to(device) for x in batch[:3])).cpu(), batch[3])

    def tune(learning_rate: float, seed: int) -> Accuracy:
        task = fine_tuning(split, pretrained, learning_rate)
        tuned = train(
            task,
            steps,
            device=device,
            fused=fused,
            seed=seed,
            dropout=DROPOUT,
            advance=advance,
        )
        return Accuracy(*(accuracy_of(tuned.model, batch) for batch in parts[1:]))

    fine_tuned = {rate: [tune(rate, seed) for seed in range(SEEDS)] for rate in LEARNING_RATES}
    training, *held_out = (features(pretrained.model, batch, device) for batch in parts)
    labels = [batch[3] for batch in parts]
    frozen = [
        Accuracy(*map(accuracy, classify(training, labels[0], held_out, decay), labels[1:]))
        for decay in WEIGHT_DECAYS
    ]
    best = max(frozen, key=operator.attrgetter("validation"))
    return TopicResults(fine_tuned, best.test, held_out[1])


def best_rate(results: Sequence[TopicResults]) -> float:
    """The learning rate with the best mean validation accuracy over all models and seeds."""
    return max(
        LEARNING_RATES,
        key=lambda rate: statistics.mean(
            a.validation for result in results for a in result.fine_tuned[rate]
        ),
    )


@torch.no_grad()
def features(model: nn.Module, batch: Batch, device: str) -> Tensor:
    """The mean of the last hidden states of each passage's real tokens, (N, hidden_size)."""
    assert isinstance(model, BertForPreTraining)
    ids, mask, types = (x.to(device) for x in batch[:3])
    hidden = model.bert(ids, mask, types).last_hidden_state
    return (hidden.masked_fill(~mask[..., None], 0).sum(1) / mask.sum(1, keepdim=True)).cpu()


def classify(
    training: Tensor, labels: Tensor, held_out: Sequence[Tensor], decay: float
) -> list[Tensor]:
    """Logits of multinomial logistic regression, fitted by L-BFGS with weight decay."""
    mean, std = training.mean(0), training.std(0)
    training, *held_out = (((x - mean) / std).double() for x in (training, *held_out))
    weight = torch.zeros(training.shape[1], TOPICS, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(training @ weight, labels) + decay * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return [x @ weight.detach() for x in held_out]


def accuracy(logits: Tensor, labels: Tensor) -> float:
    return (logits.argmax(-1) == labels).double().mean().item()


# The command ------------------------------------------------------------------------------------


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = command_line.parser("pretraining", __doc__)
    command_line.add_count(parser, "--steps", 300, "of pretraining")
    command_line.add_count(parser, "--tuning-steps", 400, "of fine-tuning")
    options = parser.parse_args(argv)
    if options.quick:
        options.steps, options.tuning_steps = min(options.steps, 20), min(options.tuning_steps, 20)
    return options


def main(argv: Sequence[str]) -> int:
    """Pretrain, classify and show."""
    options = parse(argv)
    device = options.device
    torch.set_num_threads(options.threads)
    facts = machine.facts(device)
    caption = machine.describe(facts)
    console.print(caption, soft_wrap=True, markup=False)
    split = read()

    with trifuse.backend(options.backend), progress_bars() as progress:

        def bar(name: str, steps: int) -> Callable[[], object]:
            task = progress.add_task(name, total=steps)
            return lambda: progress.advance(task)

        tuning = options.tuning_steps
        pretrained = learn_curves(
            pretraining(split), options.steps, device, bar("pretraining", 3 * options.steps)
        )
        # All start from the eager model, so that the curves differ by fine-tuning alone.
        tuned = learn_curves(
            fine_tuning(split, pretrained.eager, LEARNING_RATES[0]),
            tuning,
            device,
            bar("fine-tuning", 3 * tuning),
        )
        advance = bar("with dropout", 2 * len(LEARNING_RATES) * SEEDS * tuning)
        results = {
            name: learn_topics(split, model, tuning, device, name == "fused", advance)
            for name, model in (("eager", pretrained.eager), ("fused", pretrained.fused))
        }

    for curves in (pretrained, tuned):
        print_table(curves_table([curves]))
    rate = best_rate(list(results.values()))
    labels = labelled(split.test)[3]
    commonest = labels.bincount().max().item() / len(labels)
    print_table(topics_table(results, rate, commonest, len(labels), options.quick))
    apart = (results["fused"].features - results["eager"].features).abs().max().item()
    console.print(f"largest difference of the frozen features: {apart:.1e}")

    if options.plot is not None:
        plot(options.plot, [pretrained, tuned], caption.partition("\n")[0])
        console.print(f"wrote {options.plot}", markup=False)
    if options.json is not None:
        content = {
            "machine": facts,
            "curves": [pretrained.record(), tuned.record()],
            "learning_rate": rate,
            "accuracy": {
                name: {
                    "fine_tuned": [a.test for a in result.fine_tuned[rate]],
                    "frozen": result.frozen,
                }
                for name, result in results.items()
            },
            "commonest": commonest,
            "features_apart": apart,
        }
        report.write_json(options.json, content)
    return 0


def topics_table(
    results: Mapping[str, TopicResults],
    rate: float,
    commonest: float,
    passages: int,
    early: bool,
) -> Table:
    table = empty_table(
        f"topics of {passages} test passages classified correctly, one of {TOPICS}; fine-tuned "
        f"with dropout {DROPOUT} and learning rate {rate:g}, {SEEDS} seeds: mean ± standard "
        "deviation",
        ("fine-tuned", "frozen features", "the commonest topic"),
    )
    for name, result in results.items():
        shares = [a.test for a in result.fine_tuned[rate]]
        table.add_row(
            name,
            learnt_share(shares, early),
            learnt_share(result.frozen, early),
            f"{commonest:.1%}",
        )
    return table
