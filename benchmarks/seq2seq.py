"""Teaching recurrent encoder-decoders to read dates and to copy, eager and fused.

Prints and draws losses, accuracy, and what the attention attends to.

The source is a date in one of many formats, such as "Tuesday, the third of March, 1998"; the target
is 1998-03-03. Held-out days do not occur in training, in any format. An answer is right if every
character is. To make the answer unique, dates of three numbers put the month before the day if
separated by slashes and after it if separated by dots; years of two digits are those of POSIX, 1969
to 2068.

Copying shows what attention is for. The source is a string of random digits, and so is the target.
Without attention, all of them must pass through one state of fixed size: that of an RNN, a GRU and
an LSTM, each beside a model with attention.

Bahdanau's models use GRUs, as published, and all others use LSTMs unless their names say otherwise.
For each task and attention a model is trained eager and fused, without dropout, from the same seed
and on the same batches. A third is trained eager in float64: the distance of the eager losses from
its losses shows the effect of rounding. Fused models of further seeds show how far accuracy varies.

Speed is measured on a training step: forward, loss and backward, without the optimizer.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import trifuse
from trifuse.benchmarks import command_line, machine, pictures, report
from trifuse.benchmarks.cases import select
from trifuse.benchmarks.terminal import console, learnt_share, print_table, progress_bars
from trifuse.benchmarks.text import BOS, EOS, PAD, SYMBOLS, Pairs
from trifuse.benchmarks.transformer import (
    Batch,
    Case,
    Curves,
    Task,
    Trained,
    curves_table,
    empty_table,
    speed_table,
    time_steps,
    tokens,
    train,
)
from trifuse.models.decoding import Decoded, beam_search, greedy_search
from trifuse.models.seq2seq import Seq2Seq, Seq2SeqConfig
from trifuse.models.transformer import token_loss

BEAMS = 4

# Dates ------------------------------------------------------------------------------------------

# Not from strftime, whose words depend on the machine's locale.
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
ROMAN = ("I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX", "X", "XI", "XII")
ORDINALS = (
    *("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth"),
    *("tenth", "eleventh", "twelfth", "thirteenth", "fourteenth", "fifteenth", "sixteenth"),
    *("seventeenth", "eighteenth", "nineteenth", "twentieth", "twenty-first", "twenty-second"),
    *("twenty-third", "twenty-fourth", "twenty-fifth", "twenty-sixth", "twenty-seventh"),
    *("twenty-eighth", "twenty-ninth", "thirtieth", "thirty-first"),
)
FORMATS = (
    "{day} {month} {year}",
    "{month} {day}, {year}",
    "{nth} of {month} {year}",
    "{month} {nth}, {year}",
    "the {ordinal} of {month} {year}",
    "{weekday}, the {ordinal} of {month}, {year}",
    "{weekday}, {month} {nth}, {year}",
    "{weekday:.3} {day} {month:.3} {year}",
    "{weekday:.3}, {day:02} {month:.3} {short:02}",
    "{day:02}-{month:.3}-{year}",
    "{month:.3} {day} '{short:02}",
    "{month} the {ordinal} '{short:02}",
    "{year}, {month} {day}",
    "in {month} {year}, on the {nth}",
    "on {weekday}, {day} {month:.3}. {year}",
    "{day}. {roman}. {year}",
    "{day:02}.{number:02}.{year}",
    "{day}.{number}.{short:02}",
    "{number:02}/{day:02}/{year}",
    "{number}/{day}/{short:02}",
    "{year}/{number}/{day}",
    "{year}{number:02}{day:02}",
)
SOURCE_CHARACTERS = string.ascii_letters + string.digits + " ',-./"
TARGET_CHARACTERS = string.digits + "-"
LONGEST = 24  # digits to copy


def write(day: datetime.date, form: str) -> str:
    """A date in one of :data:`FORMATS`."""
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(day.day % 10 if day.day // 10 != 1 else 0, "th")
    return form.format(
        day=day.day,
        nth=f"{day.day}{suffix}",
        ordinal=ORDINALS[day.day - 1],
        weekday=WEEKDAYS[day.weekday()],
        month=MONTHS[day.month - 1],
        number=day.month,
        roman=ROMAN[day.month - 1],
        year=day.year,
        short=day.year % 100,
    )


@functools.cache
def days() -> tuple[list[datetime.date], list[datetime.date]]:
    """A century's days: nine tenths for training, and a random tenth, always the same, held out."""
    first, last = (datetime.date(year, 1, 1).toordinal() for year in (1969, 2069))
    order = torch.randperm(last - first, generator=torch.Generator().manual_seed(0)).tolist()
    drawn = [datetime.date.fromordinal(first + place) for place in order]
    return drawn[len(drawn) // 10 :], drawn[: len(drawn) // 10]


def draw(among: Sequence[datetime.date], batch_size: int, generator: torch.Generator) -> Pairs:
    """Random days in random formats, with their answers."""
    which, form = (
        torch.randint(count, (batch_size,), generator=generator).tolist()
        for count in (len(among), len(FORMATS))
    )
    chosen = [among[place] for place in which]
    written = [write(day, FORMATS[place]) for day, place in zip(chosen, form, strict=True)]
    source, source_mask = _pad([_encode(text, SOURCE_CHARACTERS) for text in written])
    target, target_mask = _pad(
        [[BOS, *_encode(day.isoformat(), TARGET_CHARACTERS)] for day in chosen]
    )
    return Pairs(source, source_mask, target, target_mask)


def _encode(text: str, characters: str) -> list[int]:
    return [*(SYMBOLS + characters.index(character) for character in text), EOS]


def _decode(sequence: Sequence[int], characters: str) -> str:
    """The text up to EOS; tokens that are not characters, which a model may give, show as "?"."""
    text = sequence[: sequence.index(EOS)] if EOS in sequence else sequence
    return "".join(characters[each - SYMBOLS] if each >= SYMBOLS else "?" for each in text)


def _pad(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    padded = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True, PAD)
    return padded, padded != PAD


# Copying ----------------------------------------------------------------------------------------


def draw_copies(batch_size: int, generator: torch.Generator) -> Pairs:
    """Strings of 1 to :data:`LONGEST` random digits, and the same as their answers."""
    lengths = torch.randint(1, LONGEST + 1, (batch_size,), generator=generator).tolist()
    texts = [
        "".join(map(str, torch.randint(10, (length,), generator=generator).tolist()))
        for length in lengths
    ]
    source, source_mask = _pad([_encode(text, SOURCE_CHARACTERS) for text in texts])
    target, target_mask = _pad([[BOS, *_encode(text, TARGET_CHARACTERS)] for text in texts])
    return Pairs(source, source_mask, target, target_mask)


# Training ---------------------------------------------------------------------------------------


def config(attention: str, **sizes: Any) -> Seq2SeqConfig:
    """The attentions are those of :class:`Seq2SeqConfig`, additive in both orders.

    "bahdanau" is the additive one in the paper's order and, unless ``sizes`` has a cell, of GRUs.
    """
    orders = {"additive": "luong", "bahdanau": "bahdanau"}
    default = {
        "source_vocab_size": SYMBOLS + len(SOURCE_CHARACTERS),
        "target_vocab_size": SYMBOLS + len(TARGET_CHARACTERS),
        "embedding_dim": 64,
        "hidden_size": 128,
        "num_layers": 1,
        "dropout": 0.0,
        "bidirectional": True,
        "cell": "gru" if attention == "bahdanau" else "lstm",
    }
    return Seq2SeqConfig(
        **(default | sizes),
        attention="additive" if attention == "bahdanau" else attention,
        attention_order=orders.get(attention),
    )


def task(attention: str, held_out: int = 1000, **sizes: Any) -> Task:
    training, validation = days()
    generator = torch.Generator().manual_seed(1 << 20)
    return Task(
        attention.replace("_", " "),
        lambda dropout: Seq2Seq(config(attention, dropout=dropout, **sizes)),
        lambda generator: draw(training, 64, generator),
        [draw(validation, held_out, generator)],
        loss,
        learning_rate=5e-3,
    )


def copying(cell: str, attention: str, held_out: int = 1000, **sizes: Any) -> Task:
    return Task(
        f"{COPYING}{cell.upper()}, {attention}",
        lambda dropout: Seq2Seq(config(attention, cell=cell, dropout=dropout, **sizes)),
        lambda generator: draw_copies(64, generator),
        [draw_copies(held_out, torch.Generator().manual_seed(1 << 20))],
        loss,
        learning_rate=5e-3,
    )


COPYING = "copying, "


def few_held_out(task: Task) -> Task:
    """The task with at most 64 held-out pairs."""
    (held_out,) = task.held_out
    return replace(task, held_out=[tuple(x[:64] for x in held_out)])


def tasks() -> list[Task]:
    attentions = ("additive", "bahdanau", "multiplicative", "dot", "scaled_dot", "none")
    dates = [task(name) for name in attentions]
    attending = {"rnn": "multiplicative", "gru": "bahdanau", "lstm": "multiplicative"}
    copies = [copying(cell, name) for cell, other in attending.items() for name in ("none", other)]
    return dates + copies


def loss(model: nn.Module, batch: Batch) -> Tensor:
    source, source_mask, target, target_mask = batch
    logits = model(source, target[:, :-1], source_mask)
    return token_loss(logits, target[:, 1:], target_mask[:, 1:])


@dataclass(frozen=True)
class Answers:
    """One trained model's answers to the held-out dates."""

    greedy: Tensor  # int64 (N, T), T tokens in the longest right answer
    beam: Tensor  # int64 (N, T), the best of each search

    @staticmethod
    def of(model: Seq2Seq, batch: Batch) -> Answers:
        source, source_mask, target, _ = batch
        ends = {"bos_id": BOS, "eos_id": EOS, "max_length": target.shape[1] - 1}
        greedy: Decoded = greedy_search(model, source, source_mask, **ends)
        best: Decoded = beam_search(model, source, source_mask, beam_width=BEAMS, **ends)
        return Answers(greedy.tokens, best.tokens[:, 0])


def each_right(answers: Tensor, batch: Batch) -> Tensor:
    """Marks the answers that are right in every character, bool (N,)."""
    target, mask = batch[2][:, 1:], batch[3][:, 1:]
    return (answers == target.where(mask, target.new_tensor(EOS))).all(1)


def right(answers: Tensor, batch: Batch) -> float:
    """The fraction of answers that are right in every character."""
    return each_right(answers, batch).double().mean().item()


def right_by_length(answers: Tensor, batch: Batch) -> dict[str, float]:
    """The fraction of answers that are right, for each fourth of the lengths that are copied."""
    correct, lengths = each_right(answers, batch).double(), batch[1].sum(1) - 1
    fourths = range(0, LONGEST, LONGEST // 4)
    return {
        f"{first + 1} to {first + LONGEST // 4}": correct[
            (lengths > first) & (lengths <= first + LONGEST // 4)
        ]
        .mean()
        .item()
        for first in fourths
    }


@dataclass(frozen=True)
class Learnt:
    """One task, trained eager and fused from one seed, and fused from others."""

    curves: Curves
    held_out: Batch
    eager: Answers
    fused: Answers
    others: Sequence[Answers] = ()  # of the fused models of other seeds

    @property
    def seeds(self) -> list[Answers]:
        """The answers of the fused models of all seeds."""
        return [self.fused, *self.others]

    @property
    def copies(self) -> bool:
        """Whether the task is copying."""
        return self.curves.task.startswith(COPYING)

    @property
    def attends(self) -> bool:
        """Whether the model has attention."""
        model = self.curves.fused.model
        assert isinstance(model, Seq2Seq)
        return model.attention is not None

    @property
    def same(self) -> float:
        """The fraction of greedy answers that eager and fused agree on, right or wrong."""
        return (self.eager.greedy == self.fused.greedy).all(1).double().mean().item()

    def record(self) -> dict[str, Any]:
        accuracy = {
            name: {search: right(getattr(answers, search), self.held_out) for search in SEARCHES}
            for name, answers in (("eager", self.eager), ("fused", self.fused))
        }
        by_seed = {
            search: [right(getattr(answers, search), self.held_out) for answers in self.seeds]
            for search in SEARCHES
        }
        record = self.curves.record() | {
            "accuracy": accuracy,
            "fused_accuracy_by_seed": by_seed,
            "same_answers": self.same,
        }
        if self.copies:
            record["accuracy_by_length"] = {
                "eager": right_by_length(self.eager.greedy, self.held_out),
                "fused": right_by_length(self.fused.greedy, self.held_out),
            }
        return record


SEARCHES = ("greedy", "beam")


def learn(task: Task, steps: int, seeds: int, device: str, progress: Progress) -> Learnt:
    bar = progress.add_task(task.name, total=(2 + seeds) * steps)

    def run(**how: Any) -> Trained:
        return train(task, steps, device=device, advance=lambda: progress.advance(bar), **how)

    curves = Curves(
        task.name, run(fused=False), run(fused=True), run(fused=False, dtype=torch.float64)
    )
    held_out = tuple(x.to(device) for x in task.held_out[0])
    others = [run(fused=True, seed=seed) for seed in range(1, seeds)]
    answers = []
    for trained in (curves.eager, curves.fused, *others):
        assert isinstance(trained.model, Seq2Seq)
        answers.append(Answers.of(trained.model, held_out))
    return Learnt(curves, held_out, answers[0], answers[1], answers[2:])


# Speed ------------------------------------------------------------------------------------------


def random_batch(config: Seq2SeqConfig, batch_size: int, length: int) -> Batch:
    """Random tokens; sources and targets are from a quarter of ``length`` to all of it long."""
    generator = torch.Generator().manual_seed(0)
    source, target = (
        torch.randint(SYMBOLS, size, (batch_size, length), generator=generator)
        for size in (config.source_vocab_size, config.target_vocab_size)
    )
    lengths = torch.linspace(length / 4, length, batch_size).round()[:, None]
    mask = torch.arange(length) < lengths
    return source, mask, target, mask.flip(0)


def case(name: str, config: Seq2SeqConfig, batch_size: int, length: int) -> Case:
    """The training step of a model of the given sizes."""
    return Case(
        name,
        lambda: Seq2Seq(config),
        lambda: random_batch(config, batch_size, length),
        loss,
        peers=("eager",),
        dropout=config.dropout,
        operations=operations,
    )


def cases() -> list[Case]:
    sizes = {"embedding_dim": 512, "hidden_size": 512, "num_layers": 2, "dropout": 0.2}
    return [
        case("dates, training step", config("additive"), 64, 28),
        case("H 512, additive", config("additive", **sizes), 32, 32),
        case("H 512, Bahdanau, GRU", config("bahdanau", **sizes), 32, 32),
        case("H 512, multiplicative", config("multiplicative", **sizes), 32, 32),
        case("H 512, multiplicative, GRU", config("multiplicative", cell="gru", **sizes), 32, 32),
    ]


def operations(model: nn.Module, batch: Batch) -> float:
    """Operations of a step's products: for each weight and token 2 forward and 4 backward."""
    into_encoder, into_decoder = tokens(batch)
    per_source = ("encoder.weight", "attention.key")
    per_target = ("decoder.weight", "attention.query", "combine", "readout", "output")
    return 6 * sum(
        parameter.numel() * (into_encoder if name.startswith(per_source) else into_decoder)
        for name, parameter in model.named_parameters()
        if name.startswith((*per_source, *per_target))
    )


# Display ----------------------------------------------------------------------------------------


def accuracy_table(results: Sequence[Learnt], early: bool = False) -> Table:
    count = len(results[0].held_out[0])
    table = empty_table(
        f"{count} held-out answers right in every character; eager: one seed; fused: "
        f"{len(results[0].seeds)} seeds, mean ± standard deviation",
        (
            *("eager, greedy", f"eager, {BEAMS} beams"),
            *("fused, greedy", f"fused, {BEAMS} beams", "same answers"),
        ),
    )
    for result in results:
        shares = (
            learnt_share(share_of(answers, search, result), early)
            for answers in (result.eager, result.seeds)
            for search in SEARCHES
        )
        table.add_row(result.curves.task, *shares, f"{result.same:.1%}")
    return table


def share_of(
    answers: Answers | Sequence[Answers], search: str, result: Learnt
) -> float | list[float]:
    """The share of right answers, of one model or of several."""
    if isinstance(answers, Answers):
        return right(getattr(answers, search), result.held_out)
    return [right(getattr(each, search), result.held_out) for each in answers]


def length_table(results: Sequence[Learnt], early: bool = False) -> Table:
    """The share of strings of each length that greedy search copies right."""
    columns = right_by_length(results[0].fused.greedy, results[0].held_out)
    title = "strings copied right, by the number of digits; fused, mean ± standard deviation"
    table = empty_table(title, tuple(columns))
    for result in results:
        by_seed = [right_by_length(each.greedy, result.held_out) for each in result.seeds]
        shares = ([seed[column] for seed in by_seed] for column in columns)
        table.add_row(result.curves.task, *(learnt_share(each, early) for each in shares))
    return table


def examples(result: Learnt, count: int) -> list[int]:
    """Held-out rows to show: the longest source, and others evenly down to the shortest."""
    order = result.held_out[1].sum(1).argsort(descending=True, stable=True)
    places = torch.linspace(0, len(order) - 1, count).round().long()
    return order[places].tolist()


def plot(path: Path, results: Sequence[Learnt], caption: str) -> None:
    """Draw the attention weights of three answers' characters, a row for each attention."""
    from matplotlib.figure import Figure

    shown = examples(results[0], 3)
    figure = Figure(figsize=(12.5, 0.5 + 2.3 * len(results)), layout="constrained")
    figure.suptitle("attention while reading dates", x=0.01, ha="left", fontweight="bold")
    pictures.add_caption(figure, caption)
    widths = [int(results[0].held_out[1][row].sum()) for row in shown]
    grid = figure.subplots(len(results), len(shown), squeeze=False, width_ratios=widths)
    for line, result in zip(grid, results, strict=True):
        for axes, row in zip(line, shown, strict=True):
            written, read, weights = attention(result, row)
            axes.imshow(weights.numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto")
            axes.set_xticks(range(len(written)), written, fontsize=8)
            axes.set_yticks(range(len(read)), read, fontsize=8)
            axes.tick_params(length=0)
        line[0].set_ylabel(result.curves.task, fontsize=9)
    pictures.save(figure, path)


@torch.no_grad()
def attention(result: Learnt, row: int) -> tuple[str, str, Tensor]:
    """A held-out date as written, as read by the fused model, and (read, written) weights.

    "¶" stands for the tokens that end both.
    """
    model = result.curves.fused.model
    assert isinstance(model, Seq2Seq)
    source = result.held_out[0][row][result.held_out[1][row]]
    answer = result.fused.greedy[row]
    read = _decode(answer.tolist(), TARGET_CHARACTERS)
    target = torch.cat((answer.new_tensor([BOS]), answer[: len(read)]))
    weights = model.align(source[None], target[None])[0].cpu()
    return _decode(source.tolist(), SOURCE_CHARACTERS) + "¶", read + "¶", weights


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = command_line.parser("seq2seq", __doc__)
    command_line.add_count(parser, "--steps", 500, "of training")
    command_line.add_count(parser, "--seeds", 3, "of the fused models", least=2)
    options = command_line.parse(parser, argv, Path("docs/seq2seq.png"))
    if options.quick:
        options.steps, options.seeds = min(options.steps, 5), 2
    return options


def main(argv: Sequence[str]) -> int:
    """Train, time and show."""
    options = parse(argv)
    device = options.device
    torch.set_num_threads(options.threads)
    named: list[Task | Case] = [*tasks(), *cases()]
    chosen = select(named, lambda item: item.name, options.cases)
    if options.quick:
        chosen = [few_held_out(item) if isinstance(item, Task) else item for item in chosen]
    facts = machine.facts(device)
    caption = machine.describe(facts)
    console.print(caption, soft_wrap=True, markup=False)

    learnt, times = [], []
    with trifuse.backend(options.backend), progress_bars() as progress:
        for item in chosen:
            if isinstance(item, Case):
                times.append(time_steps(item, device, *((0.6, 2) if options.quick else (8.0, 5))))
            else:
                learnt.append(learn(item, options.steps, options.seeds, device, progress))

    if learnt:
        print_table(curves_table([result.curves for result in learnt]))
        print_table(accuracy_table(learnt, options.quick))
        if copied := [result for result in learnt if result.copies]:
            print_table(length_table(copied, options.quick))
        shown = [result for result in learnt if result.attends and not result.copies]
        if shown and options.plot is not None:
            with trifuse.backend(options.backend):
                plot(options.plot, shown, caption.partition("\n")[0])
            console.print(f"wrote {options.plot}", markup=False)
    if times:
        print_table(speed_table(times))
    if options.json is not None:
        content = {
            "machine": facts,
            "learnt": [result.record() for result in learnt],
            "times": [result.record() for result in times],
        }
        report.write_json(options.json, content)
    return 0
