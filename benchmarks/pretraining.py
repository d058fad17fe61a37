"""Pretraining a small BERT eager and fused, then classifying passages with what it learnt.

The text is the docstrings of the standard library, in words: a module is a document. The model
predicts masked tokens and next passages (Devlin et al., 2018, 3.1). Then the package that a passage
comes from is learnt from few examples, by fine-tuning the whole model and by a linear classifier on
the frozen model's features, each from pretrained and from random weights.

Loss curves are compared step by step, so these models are trained without dropout: eager, fused,
and eager in float64, which shows the effect of rounding. The figures of what was learnt are those
of fused models trained longer with dropout, from several seeds. The learning rate of fine-tuning
and the weight decay of the linear classifier are chosen on validation passages; the figures are for
test passages.
"""

from __future__ import annotations

import argparse
import operator
import random
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

import trifuse
from trifuse.benchmarks import command_line, machine, report, text
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
VOCABULARY = 4000
LENGTH = 127  # tokens of a pair
PASSAGE = 50  # words of a passage, at least: paragraphs are joined until they have as many
BATCH = 32
TOPICS = 8  # the packages with the most passages are the classes
EXAMPLES = 32  # labelled passages of each class
LEARNING_RATES = (3e-4, 1e-3)  # of fine-tuning
WEIGHT_DECAYS = (1e-3, 1e-2, 1e-1)  # of the linear classifier

# Data -------------------------------------------------------------------------------------------


class Passage(NamedTuple):
    """A passage in tokens; ``label`` is its package's class, None for packages without one."""

    tokens: Tensor  # int64 (length,)
    module: str
    place: int  # among the module's passages
    label: int | None


class Split(NamedTuple):
    """The first seven tenths of every module's passages, the next tenth, and the last two."""

    train: list[Passage]
    validation: list[Passage]
    test: list[Passage]


def read() -> Split:
    """The docstrings, tokenised; the vocabulary is the commonest words of the training passages."""
    by_module = {name: _passages(paragraphs) for name, paragraphs in text.docstrings().items()}
    ends = {
        name: (-(-7 * len(texts) // 10), -(-8 * len(texts) // 10))
        for name, texts in by_module.items()
    }
    counts = Counter(
        word
        for name, texts in by_module.items()
        for words in texts[: ends[name][0]]
        for word in words
    )
    ids = {word: WORDS + n for n, (word, _) in enumerate(counts.most_common(VOCABULARY - WORDS))}
    packages = Counter[str]()
    for name, texts in by_module.items():
        package, dot, _ = name.partition(".")
        if dot:
            packages[package] += len(texts)
    labels = {package: n for n, (package, _) in enumerate(packages.most_common(TOPICS))}
    split = Split([], [], [])
    for name, texts in by_module.items():
        package, dot, _ = name.partition(".")
        passages = [
            Passage(
                torch.tensor([ids.get(word, UNKNOWN) for word in words]),
                name,
                place,
                labels.get(package) if dot else None,
            )
            for place, words in enumerate(texts)
        ]
        first, second = ends[name]
        split.train.extend(passages[:first])
        split.validation.extend(passages[first:second])
        split.test.extend(passages[second:])
    return split


def _passages(paragraphs: Sequence[str]) -> list[list[str]]:
    """Join paragraphs, in words, until each passage has at least ``PASSAGE`` of them."""
    passages: list[list[str]] = []
    for paragraph in paragraphs:
        words = re.findall(r"[a-z_]+|\d+|[^\w\s]", paragraph.lower())
        if passages and len(passages[-1]) < PASSAGE:
            passages[-1] += words
        elif words:
            passages.append(words)
    return passages


def pairs(passages: Sequence[Passage], batch_size: int, generator: torch.Generator) -> Batch:
    """Pairs of a passage and the next or a random one, with some of their tokens masked.

    Returns:
        ids int64 (B, L), mask bool (B, L), token types int64 (B, L), labels int64 (B, L), −100
        where no token is predicted, and int64 (B,), 0 where the second passage follows the first.
    """
    drawn = next_sentence_pairs(documents(passages), batch_size, generator)
    half = (LENGTH - 3) // 2
    inputs = join([[pair.first.tokens[:half], pair.second.tokens[:half]] for pair in drawn])
    hidden, labels = hide(inputs.input_ids, generator)
    return (
        hidden,
        *inputs[1:],
        labels,
        torch.tensor([pair.is_random for pair in drawn], dtype=torch.long),
    )


def documents(passages: Sequence[Passage]) -> list[list[Passage]]:
    """The passages of each module, which follow one another."""
    found: dict[str, list[Passage]] = {}
    for passage in passages:
        found.setdefault(passage.module, []).append(passage)
    return list(found.values())


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


def few(passages: Sequence[Passage]) -> list[Passage]:
    """``EXAMPLES`` passages of each class, or all if there are fewer."""
    shuffled = random.Random(0).sample(passages, len(passages))
    return [
        passage
        for label in range(TOPICS)
        for passage in [one for one in shuffled if one.label == label][:EXAMPLES]
    ]


# Tasks ------------------------------------------------------------------------------------------


def config(dropout: float) -> BertConfig:
    # The initial weights are larger than BERT's, whose 0.02 is for 768 features.
    return BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        initializer_range=128**-0.5,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
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
        lambda generator: pairs(split.train, BATCH, generator),
        [pairs(split.test, 64, generator) for _ in range(8)],
        pretraining_loss,
        learning_rate=1e-3,
        warmup_steps=400,
    )


def pretraining_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The sum of both losses, each a mean."""
    ids, mask, types, targets, is_other = batch
    prediction, relationship = model(ids, mask, types)
    chosen = targets != -100
    return F.cross_entropy(prediction[chosen], targets[chosen]) + F.cross_entropy(
        relationship, is_other
    )


def fine_tuning(split: Split, start: nn.Module | None, learning_rate: float) -> Task:
    """The task of classifying topics, from a pretrained encoder or, with None, random weights."""
    ids, mask, types, labels = labelled(few(split.train))

    def make(dropout: float) -> nn.Module:
        model = BertForSequenceClassification(config(dropout))
        if start is not None:
            assert isinstance(start, BertForPreTraining)
            model.bert.load_state_dict(start.bert.state_dict())
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


class Predictions(NamedTuple):
    """Fractions of held-out predictions that are correct."""

    next_passage: float
    masked_tokens: float
    commonest_token: float  # the fraction of masked tokens that are the commonest one


@torch.no_grad()
def predictions(task: Task, model: nn.Module, device: str) -> Predictions:
    right, relationships, tokens = [], [], []
    for batch in task.held_out:
        ids, mask, types, targets, is_other = (x.to(device) for x in batch)
        prediction, relationship = model(ids, mask, types)
        chosen = targets != -100
        right.append(prediction[chosen].argmax(-1) == targets[chosen])
        relationships.append(relationship.argmax(-1) == is_other)
        tokens.append(targets[chosen])
    every = torch.cat(tokens)
    next_passage, masked = (torch.cat(x).double().mean().item() for x in (relationships, right))
    return Predictions(next_passage, masked, every.bincount().max().item() / len(every))


class Accuracy(NamedTuple):
    """The fraction of passages whose topic is classified correctly."""

    validation: float
    test: float


@dataclass(frozen=True)
class TopicResults:
    """How well one model's weights classify topics, fine-tuned and frozen, on test passages."""

    fine_tuned: dict[float, Accuracy]  # by learning rate
    frozen: float


def learn_topics(
    split: Split,
    start: nn.Module | None,
    seed: int,
    steps: int,
    device: str,
    advance: Callable[[], object],
) -> TopicResults:
    """Fine-tunes a model, and fits a linear classifier to its features; None: random weights."""
    parts = [labelled(part) for part in (few(split.train), *split[1:])]

    @torch.no_grad()
    def accuracy_of(model: nn.Module, batch: Batch) -> float:
        return accuracy(model(*(x.to(device) for x in batch[:3])).cpu(), batch[3])

    def tune(learning_rate: float) -> Accuracy:
        task = fine_tuning(split, start, learning_rate)
        tuned = train(
            task, steps, device=device, fused=True, seed=seed, dropout=DROPOUT, advance=advance
        )
        return Accuracy(*(accuracy_of(tuned.model, batch) for batch in parts[1:]))

    fine_tuned = {rate: tune(rate) for rate in LEARNING_RATES}
    torch.manual_seed(seed)
    frozen = start if start is not None else BertForPreTraining(config(0.0)).eval().to(device)
    training, *held_out = (features(frozen, batch, device) for batch in parts)
    labels = [batch[3] for batch in parts]
    by_decay = [
        Accuracy(*map(accuracy, classify(training, labels[0], held_out, decay), labels[1:]))
        for decay in WEIGHT_DECAYS
    ]
    best = max(by_decay, key=operator.attrgetter("validation"))
    return TopicResults(fine_tuned, best.test)


def best_rate(results: Sequence[TopicResults]) -> float:
    """The learning rate with the best mean validation accuracy over all seeds."""
    return max(
        LEARNING_RATES,
        key=lambda rate: statistics.mean(r.fine_tuned[rate].validation for r in results),
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
    parser = command_line.parser("pretraining", __doc__, cases=False)
    command_line.add_count(parser, "--curve-steps", 100, "of the curves, without dropout")
    command_line.add_count(parser, "--steps", 2500, "of pretraining")
    command_line.add_count(parser, "--tuning-steps", 200, "of fine-tuning")
    command_line.add_count(parser, "--seeds", 3, "with dropout", least=2)
    options = parser.parse_args(argv)
    if options.quick:
        for name, most in (("curve_steps", 4), ("steps", 4), ("tuning_steps", 2), ("seeds", 2)):
            setattr(options, name, min(getattr(options, name), most))
    return options


class Results(NamedTuple):
    """The figures of the comparison."""

    pretrained: Curves
    tuned: Curves
    predicted: list[Predictions]  # by seed
    topics: dict[str, list[TopicResults]]  # by the weights that they start from, then by seed

    def record(self) -> dict[str, object]:
        """The results as JSON holds them."""
        return {
            "curves": [self.pretrained.record(), self.tuned.record()],
            "predictions": [seed._asdict() for seed in self.predicted],
            "topics": {
                name: {
                    "learning_rate": (rate := best_rate(results)),
                    "fine_tuned": [result.fine_tuned[rate].test for result in results],
                    "frozen": [result.frozen for result in results],
                }
                for name, results in self.topics.items()
            },
        }


def measure(split: Split, task: Task, options: argparse.Namespace) -> Results:
    """Pretrain and classify, with bars that show the progress."""
    device = options.device
    with trifuse.backend(options.backend), progress_bars() as progress:

        def bar(name: str, steps: int) -> Callable[[], object]:
            task = progress.add_task(name, total=steps)
            return lambda: progress.advance(task)

        steps = options.curve_steps
        pretrained = learn_curves(task, steps, device, bar("curves: pretraining", 3 * steps))
        tuned = learn_curves(
            fine_tuning(split, pretrained.eager.model, LEARNING_RATES[0]),
            steps,
            device,
            bar("curves: fine-tuning", 3 * steps),
        )
        seeds = range(options.seeds)
        advance = bar("pretraining", len(seeds) * options.steps)
        models = [
            train(
                task,
                options.steps,
                device=device,
                fused=True,
                seed=seed,
                dropout=DROPOUT,
                advance=advance,
            ).model
            for seed in seeds
        ]
        tuning = options.tuning_steps
        advance = bar("classifying", 2 * len(seeds) * len(LEARNING_RATES) * tuning)
        topics = {
            name: [
                learn_topics(split, start, seed, tuning, device, advance)
                for seed, start in zip(seeds, starts, strict=True)
            ]
            for name, starts in (("random", [None] * len(models)), ("pretrained", models))
        }
        predicted = [predictions(task, model, device) for model in models]
    return Results(pretrained, tuned, predicted, topics)


def main(argv: Sequence[str]) -> int:
    """Pretrain, classify and show."""
    options = parse(argv)
    torch.set_num_threads(options.threads)
    facts = machine.facts(options.device)
    caption = machine.describe(facts)
    console.print(caption, soft_wrap=True, markup=False)
    split = read()
    task = pretraining(split)
    if options.quick:  # a fraction of the held-out passages too
        task = replace(task, held_out=task.held_out[:1])
        split = split._replace(validation=split.validation[::8], test=split.test[::8])
    results = measure(split, task, options)
    curves = [results.pretrained, results.tuned]

    for curve in curves:
        print_table(curves_table([curve]))
    print_table(predictions_table(results.predicted, options.steps, options.quick))
    labels = labelled(split.test)[3]
    commonest = labels.bincount().max().item() / len(labels)
    print_table(topics_table(results.topics, commonest, len(labels), options.quick))
    if options.quick:
        console.print("--quick is too short to learn, so it shows no accuracies.")

    if options.plot is not None:
        plot(options.plot, curves, caption.partition("\n")[0])
        console.print(f"wrote {options.plot}", markup=False)
    if options.json is not None:
        content = {"machine": facts, "steps": options.steps, "commonest": commonest}
        report.write_json(options.json, {**content, **results.record()})
    return 0


def predictions_table(results: Sequence[Predictions], steps: int, early: bool) -> Table:
    table = empty_table(
        f"held-out predictions that are correct after {steps} steps with dropout {DROPOUT}, "
        f"{len(results)} seeds: mean ± standard deviation",
        ("next passage", "masked tokens", "always the commonest token"),
    )
    next_passage, masked_tokens, commonest = zip(*results, strict=True)
    table.add_row(
        "pretrained",
        learnt_share(next_passage, early),
        learnt_share(masked_tokens, early),
        f"{commonest[0]:.1%}",
    )
    return table


def topics_table(
    topics: Mapping[str, Sequence[TopicResults]], commonest: float, passages: int, early: bool
) -> Table:
    seeds = len(next(iter(topics.values())))
    table = empty_table(
        f"packages of {passages} test passages classified correctly, one of {TOPICS}, from "
        f"{EXAMPLES} examples of each; {seeds} seeds: mean ± standard deviation",
        ("fine-tuned", "frozen features", "the commonest package"),
    )
    for name, results in topics.items():
        rate = best_rate(results)
        table.add_row(
            f"{name} weights",
            learnt_share([result.fine_tuned[rate].test for result in results], early),
            learnt_share([result.frozen for result in results], early),
            f"{commonest:.1%}",
        )
    return table
