"""Tagging names in Python code, with and without a language model's vectors.

A tagger says what each name in a function stands for: a parameter, a local variable, an imported
name and so on. It is a bidirectional LSTM of two layers over words and characters, with a softmax
for each word or a CRF (pytorch-crf) on top. It learns from a few functions of the standard library,
and is scored on functions of other files.

A bidirectional language model first learns from functions of yet other files, without their tags.
Then it is frozen, and the tagger reads its vectors: for "ELMo" a learnt mix of its layers, beside
the words (Peters et al., "Deep Contextualized Word Representations", 2018); for "TagLM" its top
layer, beside the output of the tagger's first layer (Peters et al., "Semi-supervised Sequence
Tagging with Bidirectional Language Models", 2017).

Accuracy counts only names, and F1 is the mean over the tags of names. Both are means over seeds,
of fused models trained with dropout, with their standard deviation; one language model serves all
seeds. Losses are compared step by step without dropout: fused, eager, and eager in float64, which
shows the effect of rounding. Rates are those of a training step: the language model's forward,
the tagger's forward, loss and backward.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torchcrf
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import trifuse
from trifuse.benchmarks import command_line, elmo, machine, pictures, report, source_code
from trifuse.benchmarks.cases import select
from trifuse.benchmarks.source_code import OTHER, TAGS, Function, Source
from trifuse.benchmarks.terminal import console, learnt_share, print_table, progress_bars
from trifuse.benchmarks.transformer import Batch, Curves, Task, empty_table, token_rates, train
from trifuse.models.elmo import BiLM, BiLMForPreTraining, Elmo, word_mask
from trifuse.models.tagger import Tagger, TaggerConfig
from trifuse.models.transformer import token_loss

TRAIN, TEST, UNLABELLED = 300, 1000, 6000  # functions
BATCH = 16
DROPOUT = 0.3
LEARNING_RATE = 4e-3

# The model --------------------------------------------------------------------------------------


class Variant(NamedTuple):
    """The vectors that a tagger reads besides words and characters, and whether a CRF is on top."""

    vectors: str | None  # "ELMo" or "TagLM"
    crf: bool

    @property
    def name(self) -> str:
        return f"{self.vectors or 'no vectors'}, {'CRF' if self.crf else 'softmax'}"


VARIANTS = [Variant(vectors, crf) for vectors in (None, "ELMo", "TagLM") for crf in (False, True)]


class TagModel(nn.Module):
    """A tagger with a frozen biLM beside it and a softmax or a CRF above it.

    Args:
        config: the tagger's sizes, except ``context_sizes``.
        variant: the vectors of the biLM that the tagger reads, and the layer above it.
        bilm: the language model, which this freezes. Unused without vectors.
    """

    def __init__(self, config: TaggerConfig, variant: Variant, bilm: BiLM) -> None:
        super().__init__()
        config = copy.copy(config)
        self.elmo = self.bilm = None
        if variant.vectors is not None:
            bilm.requires_grad_(False)
            self.place = 0 if variant.vectors == "ELMo" else 1
            config.context_sizes = {self.place: 2 * bilm.config.projection_dim}
        if variant.vectors == "ELMo":
            self.elmo = Elmo(bilm, 1, dropout=0.0)  # the tagger applies dropout to all it reads
        elif variant.vectors == "TagLM":
            self.bilm = bilm
        self.tagger = Tagger(config)
        self.crf = torchcrf.CRF(config.num_tags, batch_first=True) if variant.crf else None

    def scores(self, char_ids: Tensor, word_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Scores (B, T, K), and the mask of real words, bool (B, T)."""
        mask = word_mask(char_ids, self.tagger.config.max_characters_per_token)
        contexts = {}
        if self.elmo is not None:
            (contexts[self.place],) = self.elmo(char_ids).representations
        elif self.bilm is not None:
            contexts[self.place] = self.bilm(char_ids).layers[-1]
        return self.tagger(word_ids, char_ids, contexts), mask

    def loss(self, char_ids: Tensor, word_ids: Tensor, tags: Tensor) -> Tensor:
        """The mean loss a word, in nats."""
        scores, mask = self.scores(char_ids, word_ids)
        if self.crf is None:
            return token_loss(scores, tags, mask)
        return -self.crf(scores, tags, mask, reduction="token_mean")

    @torch.no_grad()
    def tag(self, char_ids: Tensor, word_ids: Tensor) -> list[list[int]]:
        """The best tag of every word, or with a CRF the best sequence of tags."""
        scores, mask = self.scores(char_ids, word_ids)
        if self.crf is not None:
            return self.crf.decode(scores, mask)
        best = scores.argmax(-1).tolist()
        return [row[:length] for row, length in zip(best, mask.sum(1).tolist(), strict=True)]


# Data -------------------------------------------------------------------------------------------


def corpus(functions: Sequence[Function]) -> elmo.Corpus:
    """The language model's text; every twentieth function is for validation."""
    rows = [elmo.Sentence(function.words, None) for function in functions]
    held_out = rows[19::20]
    del rows[19::20]
    return elmo.Corpus(rows, held_out, vocabulary(functions, elmo.VOCABULARY))


def vocabulary(functions: Sequence[Function], size: int) -> dict[str, int]:
    """The ids of the commonest words that occur twice or more, in order of falling frequency."""
    counts = Counter(word for function in functions for word in function.words)
    words = [word for word, count in counts.most_common(size - elmo.WORDS) if count > 1]
    return {word: elmo.WORDS + place for place, word in enumerate(words)}


def encode(functions: Sequence[Function], places: dict[str, int], characters: int) -> Batch:
    """Character ids (B, T, C), the words' places in the vocabulary and their tags (B, T)."""
    rows = [elmo.Sentence(function.words, None) for function in functions]
    tags = [torch.tensor(function.tags) for function in functions]
    return (
        *elmo.encode(rows, places, characters),
        nn.utils.rnn.pad_sequence(tags, batch_first=True),
    )


def tasks(source: Source, bilm: BiLM) -> list[Task]:
    """A task for each of the variants; the loss on test functions is not measured."""
    places = vocabulary(source.train, 1 << 20)
    characters = bilm.config.max_characters_per_token
    config = TaggerConfig(
        vocab_size=elmo.WORDS + len(places),
        num_tags=len(TAGS),
        embedding_dim=64,
        char_embedding_dim=16,
        filters=((3, 32),),
        max_characters_per_token=characters,
        hidden_size=96,
    )

    def make(variant: Variant, dropout: float) -> nn.Module:
        own = copy.copy(config)
        own.dropout = dropout
        return TagModel(own, variant, copy.deepcopy(bilm))

    def draw(generator: torch.Generator) -> Batch:
        rows = torch.randint(len(source.train), (BATCH,), generator=generator)
        return encode([source.train[row] for row in rows.tolist()], places, characters)

    held_out = [
        encode(source.test[start : start + 4 * BATCH], places, characters)
        for start in range(0, len(source.test), 4 * BATCH)
    ]
    return [
        Task(variant.name, functools.partial(make, variant), draw, held_out, loss, LEARNING_RATE)
        for variant in VARIANTS
    ]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    assert isinstance(model, TagModel)
    return model.loss(*batch)


# Scores -----------------------------------------------------------------------------------------


class Scores(NamedTuple):
    """How well names are tagged; other words do not count."""

    accuracy: float
    f1: float  # the mean over the tags of names that occur
    by_tag: list[float]  # F1, in the order of TAGS

    @classmethod
    def of(cls, found: Sequence[int], right: Sequence[int]) -> Scores:
        counts = torch.zeros(len(TAGS), len(TAGS), dtype=torch.float64)
        places = torch.tensor(right), torch.tensor(found)
        counts.index_put_(places, torch.ones((), dtype=torch.float64), accumulate=True)
        hits, occur = counts.diagonal(), counts.sum(1)
        by_tag = 2 * hits / (occur + counts.sum(0)).clamp(min=1)
        names = (occur > 0) & (torch.arange(len(TAGS)) != OTHER)
        accuracy = hits[names].sum() / occur[names].sum()
        return cls(accuracy.item(), by_tag[names].mean().item(), by_tag.tolist())


def score(model: nn.Module, task: Task, device: str) -> Scores:
    """The scores of a trained model on the test functions."""
    assert isinstance(model, TagModel)
    found: list[int] = []
    right: list[int] = []
    for char_ids, word_ids, tags in task.held_out:
        rows = model.tag(char_ids.to(device), word_ids.to(device))
        for row, given in zip(rows, tags.tolist(), strict=True):
            found += row
            right += given[: len(row)]
    return Scores.of(found, right)


def baselines(source: Source) -> dict[str, Scores]:
    """Always the commonest tag of names, and each word's commonest tag, in the train functions."""
    by_word: dict[str, Counter[int]] = {}
    for function in source.train:
        for word, tag in zip(function.words, function.tags, strict=True):
            by_word.setdefault(word, Counter())[tag] += 1
    names = sum(by_word.values(), Counter[int]())
    del names[OTHER]
    commonest = names.most_common(1)[0][0]
    words = [word for function in source.test for word in function.words]
    right = [tag for function in source.test for tag in function.tags]
    best = {word: counts.most_common(1)[0][0] for word, counts in by_word.items()}
    return {
        "the commonest tag": Scores.of([commonest] * len(right), right),
        "each word's commonest tag": Scores.of([best.get(x, commonest) for x in words], right),
    }


# Learning ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Learnt:
    """One variant's training."""

    scores: list[Scores]  # one for each seed
    curves: Curves
    rates: dict[str, float]  # words per second, eager and fused
    mix: list[float] | None  # the learnt weights of the language model's layers, of the first seed

    @property
    def name(self) -> str:
        return self.curves.task

    def record(self) -> dict[str, Any]:
        return {
            **self.curves.record(),
            "accuracy": [seed.accuracy for seed in self.scores],
            "f1": [seed.f1 for seed in self.scores],
            "f1_by_tag": [dict(zip(TAGS, seed.by_tag, strict=True)) for seed in self.scores],
            "words_per_second": self.rates,
            "mix": self.mix,
        }


def learn(task: Task, options: argparse.Namespace, seconds: float, progress: Progress) -> Learnt:
    steps, curve_steps, seeds = options.steps, options.curve_steps, options.seeds
    bar = progress.add_task(task.name, total=3 * curve_steps + seeds * steps)

    def run(steps: int, **how: Any) -> Any:
        # Loss on all test functions is not shown, and would take longer than a short training.
        return train(
            replace(task, held_out=task.held_out[:1]),
            steps,
            device=options.device,
            advance=lambda: progress.advance(bar),
            **how,
        )

    curves = Curves(
        task.name,
        run(curve_steps, fused=False),
        run(curve_steps, fused=True),
        run(curve_steps, fused=False, dtype=torch.float64),
    )
    models = [run(steps, fused=True, seed=seed, dropout=DROPOUT).model for seed in range(seeds)]
    vectors = models[0].elmo
    return Learnt(
        [score(model, task, options.device) for model in models],
        curves,
        token_rates(task, words, options.device, seconds),
        None if vectors is None else vectors.mixes[0].weights.softmax(0).tolist(),
    )


def words(batch: Batch) -> int:
    """The real words of a batch."""
    return int((batch[0] != 0).any(-1).sum())


def pretrain(
    text: elmo.Corpus, steps: int, device: str, advance: Callable[[], object]
) -> tuple[BiLM, dict[str, elmo.Perplexities]]:
    """A bidirectional language model, and its held-out perplexities before and after."""
    task = elmo.pretraining(text, elmo.small(), [])
    torch.manual_seed(0)  # as train does
    untrained = task.make(0.0).to(device).eval()
    model = train(task, steps, device=device, fused=True, advance=advance).model
    assert isinstance(model, BiLMForPreTraining)
    perplexities = {
        "untrained": elmo.held_out_perplexities(task, untrained, device),
        "trained": elmo.held_out_perplexities(task, model, device),
    }
    bilm = BiLM(model.bilm.config)  # unfused
    bilm.load_state_dict(model.bilm.state_dict())
    return bilm.eval(), perplexities


# Display ----------------------------------------------------------------------------------------


def results_table(
    learnt: Sequence[Learnt], guesses: dict[str, Scores], functions: int, seeds: int, early: bool
) -> Table:
    table = empty_table(
        f"names in {functions:,} other functions, {seeds} seeds, mean ± standard deviation",
        (
            "accuracy",
            "F1",
            "words/s eager",
            "fused",
            "ratio",
            "fused − eager",
            "eager − float64",
        ),
    )
    for name, scores in guesses.items():
        table.add_row(name, f"{scores.accuracy:.1%}", f"{scores.f1:.1%}", *"–––––")
    for result in learnt:
        eager, fused = result.rates["eager"], result.rates["fused"]
        table.add_row(
            result.name,
            learnt_share([seed.accuracy for seed in result.scores], early),
            learnt_share([seed.f1 for seed in result.scores], early),
            f"{eager:,.0f}",
            f"{fused:,.0f}",
            f"{fused / eager:.2f}×",
            f"{result.curves.furthest('fused', 'eager'):.1e}",
            f"{result.curves.furthest('eager', 'exact'):.1e}",
        )
    return table


def tags_table(learnt: Sequence[Learnt]) -> Table:
    table = empty_table("F1 of each tag in %, mean over seeds", TAGS[1:])
    for result in learnt:
        columns = list(zip(*(seed.by_tag for seed in result.scores), strict=True))[1:]
        table.add_row(result.name, *(f"{100 * statistics.mean(each):.1f}" for each in columns))
    return table


def plot(
    path: Path,
    learnt: Sequence[Learnt],
    guesses: dict[str, Scores],
    title: str,
    caption: str,
    early: bool,
) -> None:
    """Draw the scores, with a line over two standard deviations, and the rates.

    ``early``: the models were trained too briefly to learn, so only the rates are drawn.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 if early else 11, 1.5 + 0.36 * len(learnt)), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=9 if early else None)
    pictures.add_caption(figure, caption, wrap=True)
    *shares, rate = figure.subplots(1, 1 if early else 3, sharey=True, squeeze=False)[0]
    names = [result.name for result in learnt]
    places = range(len(names))
    reference = guesses["each word's commonest tag"]
    for axes, field, heading in zip(
        shares,
        ("accuracy", "f1"),
        ("accuracy of names, %", "F1, mean over tags, %"),
        strict=False,  # early, there are none
    ):
        values = [[100 * getattr(seed, field) for seed in result.scores] for result in learnt]
        pictures.draw_means(axes, places, values)
        axes.axvline(
            100 * getattr(reference, field),
            color="#555555",
            linewidth=1,
            linestyle=":",
            label="each word's commonest tag",
        )
        axes.set_title(heading, fontsize=9, loc="left")
        axes.set_xlim(0, 115)
    if shares:
        shares[0].legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(0, -0.1))
    colours = {"eager": "#b8bec7", "fused": "#d1603d"}
    for shift, (who, colour) in zip((-0.2, 0.2), colours.items(), strict=True):
        shifted = [place + shift for place in places]
        rates = [result.rates[who] for result in learnt]
        bars = rate.barh(shifted, rates, color=colour, height=0.38, label=who)
        rate.bar_label(bars, [f"{value:,.0f}" for value in rates], padding=3, fontsize=7)
    rate.set_title("training, words per second", fontsize=9, loc="left")
    rate.set_xlim(0, 1.25 * max(max(result.rates.values()) for result in learnt))
    rate.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(0, -0.1), ncols=2)
    rate.set_yticks(places, names)
    rate.invert_yaxis()  # the axis is shared
    for axes in (*shares, rate):
        pictures.leave_bars(axes)
    pictures.save(figure, path)


# The command ------------------------------------------------------------------------------------


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = command_line.parser("tagging", __doc__)
    command_line.add_count(parser, "--pretraining-steps", 600, "of the language model")
    command_line.add_count(parser, "--steps", 250, "of the tagger")
    command_line.add_count(parser, "--curve-steps", 30, "of the tagger without dropout")
    command_line.add_count(parser, "--seeds", 3, least=2)
    options = command_line.parse(parser, argv, Path("docs/tagging.png"))
    options.sizes = TRAIN, TEST, UNLABELLED, source_code.LONGEST
    if options.quick:
        for name, most in (("pretraining_steps", 3), ("steps", 3), ("curve_steps", 2)):
            setattr(options, name, min(getattr(options, name), most))
        options.sizes, options.seeds = (60, 40, 200, 32), 2
    return options


def main(argv: Sequence[str]) -> int:
    """Pretrain, train, time and show."""
    options = parse(argv)
    device = options.device
    torch.set_num_threads(options.threads)
    select(VARIANTS, lambda variant: variant.name, options.cases)  # raises before the training
    facts = machine.facts(device)
    caption = machine.describe(facts)
    console.print(caption, soft_wrap=True, markup=False)
    source = source_code.read(*options.sizes)
    with trifuse.backend(options.backend), progress_bars() as progress:
        bar = progress.add_task("language model", total=options.pretraining_steps)
        bilm, perplexities = pretrain(
            corpus(source.unlabelled),
            options.pretraining_steps,
            device,
            lambda: progress.advance(bar),
        )
        chosen = select(tasks(source, bilm), lambda task: task.name, options.cases)
        seconds = 0.3 if options.quick else 4.0
        learnt = [learn(task, options, seconds, progress) for task in chosen]
    guesses = baselines(source)
    for name, values in perplexities.items():
        console.print(
            f"language model, {name}: held-out perplexity a word {values.forward:,.1f} forwards, "
            f"{values.backward:,.1f} backwards"
        )
    print_table(results_table(learnt, guesses, len(source.test), options.seeds, options.quick))
    title = f"what a name stands for, learnt from {len(source.train)} functions"
    if not options.quick:
        print_table(tags_table(learnt))
        for result in learnt:
            if result.mix is not None:
                weights = " ".join(f"{weight:.2f}" for weight in result.mix)
                console.print(f"{result.name}: weights of the layers in the mix {weights}")
    if options.plot is not None:
        line = caption.partition("\n")[0]
        plot(options.plot, learnt, guesses, title, line, options.quick)
        console.print(f"wrote {options.plot}", markup=False)
    if options.json is not None:
        content = {
            "machine": facts,
            "quick": options.quick,
            "functions": {name: len(part) for name, part in source._asdict().items()},
            "perplexity": {name: values._asdict() for name, values in perplexities.items()},
            "guesses": {name: scores._asdict() for name, scores in guesses.items()},
            "learnt": [result.record() for result in learnt],
        }
        report.write_json(options.json, content)
    return 0
