"""Pretraining language models on text without labels, then classifying with few labelled texts.

The text is the docstrings of the standard library, in words. A Transformer and an LSTM of about as
many parameters learn to predict the next word. Each then gets a linear layer over the hidden state
of a passage's last token, and learns which package a passage comes from, out of a few labelled
passages for each (GPT: Radford et al., 2018; Dai and Le, 2015). The same classifier is trained from
scratch, from the pretrained weights, and from these with the language model's loss beside its own.

A seed decides the weights, the batches, the dropout and which passages are labelled. The learning
rate of each row is the one with the best mean accuracy on validation passages. There are more of
these than labelled passages, so all rows are somewhat better than with a rate chosen from the
labelled passages alone. The figures are for test passages. Paragraphs of one docstring are all in
the same part, and the pretraining reads the training part. For comparison, logistic regression
reads which words occur in the same labelled passages.

Accuracies are those of fused models with dropout. Eager and fused are compared without it: from one
seed and on the same batches, the largest difference of their losses at any step, beside eager's
from float64, which shows the effect of rounding. Rates are those of a training step of the language
model: forward, loss and backward; only real tokens count.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import sysconfig
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor, nn

import trifuse
from trifuse.benchmarks import command_line, machine, pictures, report, text
from trifuse.benchmarks.cases import select
from trifuse.benchmarks.language_model import count_parameters
from trifuse.benchmarks.pretraining import TOPICS as CLASSES
from trifuse.benchmarks.pretraining import (
    WEIGHT_DECAYS,
    Accuracy,
    accuracy,
    classify,
    learn_curves,
)
from trifuse.benchmarks.terminal import console, print_table, progress_bars
from trifuse.benchmarks.transformer import (
    DROPOUT,
    Batch,
    Curves,
    Task,
    curves_table,
    empty_table,
    token_rates,
    train,
)
from trifuse.models.classification import (
    LanguageModelForSequenceClassification,
    classification_loss,
)
from trifuse.models.recurrent import RecurrentLanguageModel, RecurrentLanguageModelConfig
from trifuse.models.transformer import LanguageModel, LanguageModelConfig, token_loss

PAD, UNKNOWN, BEGIN, END, WORDS = range(5)  # the ids of words start at WORDS
VOCABULARY = 3000
LENGTH = 50  # tokens of a passage, BEGIN and END included
LEAST = 12  # words of a passage
LABELLED = 16  # passages of each class
BATCH_SIZE = 24
LEARNING_RATES = (5e-4, 2e-3, 8e-3)  # of the classifiers
LM_WEIGHT = 0.5  # GPT's
CURVE_STEPS = 60  # of training without dropout
TOO_SHORT = "--quick is too short to learn, so it shows no accuracies."

# Data -------------------------------------------------------------------------------------------


class Passage(NamedTuple):
    """A passage in tokens; ``label`` is the class of its package, or None for all others."""

    tokens: Tensor  # int64 (length,), from BEGIN to END
    label: int | None


class Split(NamedTuple):
    """About seven, one and two tenths of the docstrings, drawn at random."""

    train: list[Passage]
    validation: list[Passage]
    test: list[Passage]
    packages: list[str]  # the names of the classes


def docstrings(root: Path) -> dict[str, list[list[str]]]:
    """The paragraphs of each docstring below a folder, by the package or module on its first level.

    Tests, installed packages and files that don't parse are left out. Each paragraph is taken once.
    """
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    found: dict[str, list[list[str]]] = {}
    seen: set[str] = set()
    for parts, groups in text.modules(root, left_out):
        for paragraphs in groups:
            unique = dict.fromkeys(map(str.strip, paragraphs))
            if fresh := [each for each in unique if each not in seen]:
                seen.update(fresh)
                found.setdefault(parts[0], []).append(fresh)
    return found


def read(root: Path | None = None) -> Split:
    """The standard library's docstrings in tokens; the vocabulary is their commonest words.

    The classes are the packages with the most passages.
    """
    by_package = {
        name: list(filter(None, map(split_words, groups)))
        for name, groups in docstrings(root or Path(sysconfig.get_path("stdlib"))).items()
    }
    counts = Counter(
        word
        for groups in by_package.values()
        for passages in groups
        for words in passages
        for word in words
    )
    ids = {word: WORDS + n for n, (word, _) in enumerate(counts.most_common(VOCABULARY - WORDS))}
    largest = sorted(by_package, key=lambda name: -sum(map(len, by_package[name])))[:CLASSES]
    split = Split([], [], [], largest)
    shuffle = random.Random(0).shuffle
    for name, groups in by_package.items():
        label = largest.index(name) if name in largest else None
        shuffle(groups)
        ends = round(0.7 * len(groups)), round(0.8 * len(groups))
        parts = groups[: ends[0]], groups[slice(*ends)], groups[ends[1] :]
        for into, part in zip(split[:3], parts, strict=True):
            into.extend(Passage(encode(words, ids), label) for each in part for words in each)
    return split


def split_words(texts: Sequence[str]) -> list[list[str]]:
    """The words of the texts that have enough of them."""
    words = (re.findall(r"[^\W\d_]+|\d+|[^\w\s]", text.lower()) for text in texts)
    return [each for each in words if len(each) >= LEAST]


def encode(words: Sequence[str], ids: dict[str, int]) -> Tensor:
    inner = [ids.get(word, UNKNOWN) for word in words[: LENGTH - 2]]
    return torch.tensor([BEGIN, *inner, END])


def join(passages: Sequence[Passage]) -> Tensor:
    """The passages' tokens, (B, L), padded with PAD."""
    return nn.utils.rnn.pad_sequence([each.tokens for each in passages], batch_first=True)


def drawn(passages: Sequence[Passage], count: int, generator: torch.Generator) -> list[Passage]:
    places = torch.randint(len(passages), (count,), generator=generator)
    return [passages[place] for place in places.tolist()]


def labelled(passages: Sequence[Passage]) -> Batch:
    """The passages with a class: tokens (N, L) and labels (N,)."""
    known = [each for each in passages if each.label is not None]
    return join(known), torch.tensor([each.label for each in known])


def few(passages: Sequence[Passage], seed: int) -> list[Passage]:
    """LABELLED passages of each class."""
    shuffled = list(passages)
    random.Random(seed).shuffle(shuffled)
    return [
        passage
        for label in range(CLASSES)
        for passage in [each for each in shuffled if each.label == label][:LABELLED]
    ]


# Models -----------------------------------------------------------------------------------------


def transformer(dropout: float) -> LanguageModel:
    # The initial weights are larger than GPT's, whose 0.02 is for 768 features.
    return LanguageModel(
        LanguageModelConfig(
            VOCABULARY, 96, 4, 2, 384, dropout, max_length=LENGTH, initializer_range=96**-0.5
        )
    )


def lstm(dropout: float) -> RecurrentLanguageModel:
    return RecurrentLanguageModel(
        RecurrentLanguageModelConfig(VOCABULARY, 112, 112, 2, "lstm", dropout)
    )


LanguageModels = LanguageModel | RecurrentLanguageModel
# With learning rates that suit the pretraining.
MODELS: dict[str, tuple[Callable[[float], LanguageModels], float]] = {
    "Transformer": (transformer, 3e-3),
    "LSTM": (lstm, 5e-3),
}
STARTS = ("from scratch", "pretrained", "pretrained, both losses")


def text_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean loss of a passage's tokens after the first, in nats."""
    (tokens,) = batch
    given, real = tokens[:, :-1], tokens != PAD
    logits = model(given, real[:, :-1]) if isinstance(model, LanguageModel) else model(given)[0]
    return token_loss(logits, tokens[:, 1:], real[:, 1:])


def pretraining(name: str, split: Split) -> Task:
    make, learning_rate = MODELS[name]
    held_out = [(join(split.validation[n : n + 64]),) for n in range(0, len(split.validation), 64)]
    return Task(
        f"{name}: pretraining",
        make,
        lambda generator: (join(drawn(split.train, BATCH_SIZE, generator)),),
        held_out,
        text_loss,
        learning_rate,
    )


def tuning(
    name: str,
    split: Split,
    seed: int,
    pretrained: nn.Module | None,
    learning_rate: float,
    lm_weight: float = 0.0,
) -> Task:
    """The task of classifying, from a pretrained language model or from scratch."""
    known = few(split.train, seed)

    def make(dropout: float) -> nn.Module:
        language_model = MODELS[name][0](dropout)
        if pretrained is not None:
            language_model.load_state_dict(pretrained.state_dict())
        return LanguageModelForSequenceClassification(language_model, CLASSES, dropout)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        tokens, labels = batch
        assert isinstance(model, LanguageModelForSequenceClassification)
        return classification_loss(model, tokens, labels, tokens != PAD, lm_weight)

    return Task(
        f"{name}: classifying",
        make,
        lambda generator: labelled(drawn(known, BATCH_SIZE, generator)),
        [labelled(known)],
        loss,
        learning_rate,
    )


# Learning ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A model's accuracies from one start, one for each seed."""

    model: str
    start: str
    learning_rate: float  # 0 where it has none
    accuracies: list[Accuracy]

    def record(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "start": self.start,
            "learning_rate": self.learning_rate,
            "validation": [each.validation for each in self.accuracies],
            "test": [each.test for each in self.accuracies],
        }


def best(rows: Sequence[Row]) -> Row:
    """The row with the best mean accuracy on validation passages."""
    return max(rows, key=lambda row: statistics.mean(each.validation for each in row.accuracies))


@dataclass(frozen=True)
class Learnt:
    """One kind of model: its rows, and eager beside fused."""

    name: str
    parameters: int  # of the language model
    losses: list[float]  # of pretraining on the validation passages, one for each seed
    rows: list[Row]
    curves: list[Curves]
    rates: dict[str, float]  # real tokens per second, eager and fused

    def record(self) -> dict[str, Any]:
        return {
            "model": self.name,
            "parameters": self.parameters,
            "pretraining_loss": self.losses,
            "curves": [curves.record() for curves in self.curves],
            "tokens_per_second": self.rates,
        }


def learn(
    name: str, split: Split, options: argparse.Namespace, advance: Callable[[], object]
) -> Learnt:
    device, seeds = options.device, range(options.seeds)
    pretrained = [
        train(
            pretraining(name, split),
            options.steps,
            device=device,
            fused=True,
            seed=seed,
            dropout=DROPOUT,
            advance=advance,
        )
        for seed in seeds
    ]

    def tune(start: str, rate: float, seed: int) -> Accuracy:
        begin = None if start == STARTS[0] else pretrained[seed].model
        weight = LM_WEIGHT if start == STARTS[2] else 0.0
        task = tuning(name, split, seed, begin, rate, weight)
        how: dict[str, Any] = {"device": device, "fused": True, "seed": seed, "dropout": DROPOUT}
        tuned = train(task, options.tuning_steps, advance=advance, **how)
        return Accuracy(*(accuracy_of(tuned.model, part, device) for part in split[1:3]))

    rows = [
        best(
            [
                Row(name, start, rate, [tune(start, rate, seed) for seed in seeds])
                for rate in options.learning_rates
            ]
        )
        for start in STARTS
    ]
    tasks = (
        pretraining(name, split),
        tuning(name, split, 0, pretrained[0].model, LEARNING_RATES[0], LM_WEIGHT),
    )
    return Learnt(
        name,
        count_parameters(pretrained[0].model),
        [each.held_out for each in pretrained],
        rows,
        [learn_curves(task, curve_steps(options), device, advance) for task in tasks],
        token_rates(tasks[0], real_tokens, device, 0.3 if options.quick else 6.0),
    )


def curve_steps(options: argparse.Namespace) -> int:
    return min(CURVE_STEPS, options.steps)


def real_tokens(batch: Batch) -> int:
    """The tokens that a batch gives to the language model, without padding."""
    return int((batch[0][:, :-1] != PAD).sum())


@torch.no_grad()
def accuracy_of(model: nn.Module, passages: Sequence[Passage], device: str) -> float:
    tokens, labels = labelled(passages)
    logits = [model(part, part != PAD).cpu() for part in tokens.to(device).split(128)]
    return accuracy(torch.cat(logits), labels)


def count_words(split: Split, seeds: int) -> Row:
    """Logistic regression on which words occur."""
    known = [few(split.train, seed) for seed in range(seeds)]

    def occurring(passages: Sequence[Passage]) -> Tensor:
        tokens, _ = labelled(passages)
        return torch.zeros(len(tokens), VOCABULARY).scatter_(1, tokens, 1.0)

    held_out = [occurring(part) for part in split[1:3]]
    labels = [labelled(part)[1] for part in split[1:3]]

    def fit(seed: int, decay: float) -> Accuracy:
        x = occurring(known[seed])
        varies = x.std(0) > 0
        logits = classify(
            x[:, varies], labelled(known[seed])[1], [each[:, varies] for each in held_out], decay
        )
        return Accuracy(*map(accuracy, logits, labels))

    return best(
        [
            Row("logistic regression", "which words occur", 0.0, [fit(n, d) for n in range(seeds)])
            for d in WEIGHT_DECAYS
        ]
    )


# Display ----------------------------------------------------------------------------------------


def spread(row: Row) -> str:
    shares = [each.test for each in row.accuracies]
    return f"{statistics.mean(shares):.1%} ± {statistics.stdev(shares):.1%}"


def accuracy_table(rows: Sequence[Row], commonest: float, title: str, hidden: bool) -> Table:
    table = empty_table(title, ("start", "learning rate", "accuracy"))
    for row in rows:
        rate = f"{row.learning_rate:g}" if row.learning_rate else "–"
        table.add_row(row.model, row.start, "–" if hidden else rate, "–" if hidden else spread(row))
    table.add_row("the commonest package", "", "–", f"{commonest:.1%}")
    return table


def speed_table(learnt: Sequence[Learnt]) -> Table:
    numbers = ("parameters", "validation loss", "tokens/s eager", "fused", "ratio")
    table = empty_table("language models: a training step, eager and fused", numbers)
    for each in learnt:
        eager, fused = each.rates["eager"], each.rates["fused"]
        loss = f"{statistics.mean(each.losses):.3f} ± {statistics.stdev(each.losses):.3f}"
        figures = (f"{each.parameters:,}", loss, f"{eager:,.0f}", f"{fused:,.0f}")
        table.add_row(each.name, *figures, f"{fused / eager:.2f}×")
    return table


def plot(path: Path, rows: Sequence[Row], title: str, caption: str, hidden: bool) -> None:
    """Draw the accuracies, with a line over two standard deviations."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 1.2 + 0.34 * len(rows)), layout="constrained")
    pictures.add_caption(figure, caption)
    axes = figure.subplots()
    shown = textwrap.fill(TOO_SHORT if hidden else title, 90)
    figure.suptitle(shown, x=0.01, ha="left", fontsize=9)
    if not hidden:
        shares = [[100 * each.test for each in row.accuracies] for row in rows]
        colors = ["#d1603d" if row.start.startswith("pretrained") else "#b8bec7" for row in rows]
        names = [f"{row.model}, {row.start}" for row in rows]
        pictures.draw_means(axes, names, shares, "{:.1f}%", colors)
        axes.set_xlim(0, 100)
        axes.invert_yaxis()
    pictures.leave_bars(axes)
    pictures.save(figure, path)


# The command ------------------------------------------------------------------------------------


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = command_line.parser("finetuning", __doc__)
    command_line.add_count(parser, "--steps", 1000, "of pretraining")
    command_line.add_count(parser, "--tuning-steps", 150, "of each classifier")
    command_line.add_count(parser, "--seeds", 3, least=2)
    options = parser.parse_args(argv)
    options.learning_rates = LEARNING_RATES
    if options.quick:
        options.steps, options.tuning_steps = min(options.steps, 4), min(options.tuning_steps, 2)
        options.seeds, options.learning_rates = 2, LEARNING_RATES[:1]
    return options


def main(argv: Sequence[str]) -> int:
    """Pretrain, classify, time and show."""
    options = parse(argv)
    torch.set_num_threads(options.threads)
    chosen = select(list(MODELS), str, options.cases)
    facts = machine.facts(options.device)
    caption = machine.describe(facts)
    console.print(caption, soft_wrap=True, markup=False)
    split = read()
    if options.quick:  # a fraction of the held-out passages too
        split = split._replace(validation=split.validation[::8], test=split.test[::8])
    console.print("packages:", ", ".join(split.packages), markup=False, highlight=False)
    tuned = len(STARTS) * len(options.learning_rates) * options.tuning_steps
    total = options.seeds * (options.steps + tuned) + 6 * curve_steps(options)
    with trifuse.backend(options.backend), progress_bars() as progress:
        learnt = []
        for name in chosen:
            bar = progress.add_task(name, total=total)
            advance = lambda bar=bar: progress.advance(bar)  # noqa: E731
            learnt.append(learn(name, split, options, advance))
    rows = [*(row for each in learnt for row in each.rows), count_words(split, options.seeds)]
    labels = labelled(split.test)[1]
    commonest = labels.bincount().max().item() / len(labels)
    print_table(speed_table(learnt))
    print_table(curves_table([each for model in learnt for each in model.curves]))
    title = (
        f"packages of {len(labels)} test passages classified correctly, one of {CLASSES}, from "
        f"{LABELLED} labelled passages of each; {options.seeds} seeds: mean ± standard deviation"
    )
    print_table(accuracy_table(rows, commonest, title, options.quick))
    if options.quick:
        console.print(TOO_SHORT)
    if options.plot is not None:
        plot(options.plot, rows, title, caption.partition("\n")[0], options.quick)
        console.print(f"wrote {options.plot}", markup=False)
    if options.json is not None:
        content = {
            "machine": facts,
            "quick": options.quick,
            "packages": split.packages,
            "learnt": [each.record() for each in learnt],
            "accuracy": [] if options.quick else [row.record() for row in rows],
            "commonest": commonest,
        }
        report.write_json(options.json, content)
    return 0
