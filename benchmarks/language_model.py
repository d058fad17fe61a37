"""Language models of five kinds learn the same text, eager and fused.

An RNN, a GRU, an LSTM, a gated convolutional network and a Transformer of about as many parameters
learn the bytes of the standard library's language reference, without dropout. Two tables and two
panels of the picture show the held-out perplexity of a byte: after equally many tokens, and after
as many steps of the fused model as fit into the same time. A step's time is the median over its
training for equal tokens: batch, forward, backward and optimizer.

With the same seed and the same batches, eager and fused train alike; the largest difference of
their losses at any step is printed, and that of eager's from a model trained in float64, which is
the effect of rounding. Perplexities are means over seeds, of fused models, with their standard
deviation. Rates are those of a training step: forward, loss and backward. The learning rates are
not tuned: each kind has the one set in this file.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import trifuse
from trifuse.benchmarks import command_line, machine, pictures, report, text
from trifuse.benchmarks.cases import select
from trifuse.benchmarks.terminal import console, print_table, progress_bars
from trifuse.benchmarks.transformer import (
    Batch,
    Curves,
    Task,
    empty_table,
    language,
    token_rates,
    tokens,
    train,
    windows_loss,
)
from trifuse.models.convolutional import (
    ConvolutionalLanguageModel,
    ConvolutionalLanguageModelConfig,
)
from trifuse.models.recurrent import RecurrentLanguageModel, RecurrentLanguageModelConfig

BATCH_SIZE, LENGTH = 12, 96

# Models -----------------------------------------------------------------------------------------


def _recurrent(cell: str, size: int, dropout: float) -> nn.Module:
    return RecurrentLanguageModel(
        RecurrentLanguageModelConfig(text.BYTES, size, size, 2, cell, dropout)
    )


def _convolutional(dropout: float) -> nn.Module:
    return ConvolutionalLanguageModel(
        ConvolutionalLanguageModelConfig(text.BYTES, 128, 16, 4, bottleneck=32, dropout=dropout)
    )


# Sizes of about 440,000 parameters, and learning rates. One rate for each kind, not tuned.
MODELS: dict[str, tuple[Callable[[float], nn.Module], float]] = {
    "RNN": (functools.partial(_recurrent, "rnn", 304), 1e-3),
    "GRU": (functools.partial(_recurrent, "gru", 184), 5e-3),
    "LSTM": (functools.partial(_recurrent, "lstm", 160), 5e-3),
    "convolutional": (_convolutional, 3e-3),
}


def tasks() -> list[Task]:
    transformer = replace(language(BATCH_SIZE, LENGTH), name="Transformer")
    others = [
        replace(transformer, name=name, make=make, loss=stateless_loss, learning_rate=rate)
        for name, (make, rate) in MODELS.items()
    ]
    return [*others, transformer]


def stateless_loss(model: nn.Module, batch: Batch) -> Tensor:
    """As :func:`windows_loss`, without the state that recurrent models return too."""

    def logits(tokens: Tensor) -> Tensor:
        out = model(tokens)
        return out[0] if isinstance(out, tuple) else out

    return windows_loss(logits, batch)


# Learning ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Learnt:
    """One model's training; losses are means per byte in nats, one for each seed."""

    curves: Curves
    parameters: int
    rates: dict[str, float]  # tokens per second, eager and fused
    equal_tokens: list[float]
    step_seconds: float  # of the fused training, the median over all steps and seeds
    steps_in_time: int  # that the fused model makes in the time given to all
    equal_time: list[float]

    def record(self) -> dict[str, Any]:
        return {
            **self.curves.record(),
            "parameters": self.parameters,
            "tokens_per_second": self.rates,
            "equal_tokens": self.equal_tokens,
            "step_seconds": self.step_seconds,
            "steps_in_time": self.steps_in_time,
            "equal_time": self.equal_time,
        }


def learn(
    task: Task, steps: int, seconds: float, seeds: int, device: str, progress: Progress
) -> Learnt:
    bar = progress.add_task(task.name, total=steps * (2 + seeds))

    def run(**how: Any) -> Any:
        return train(task, steps, device=device, advance=lambda: progress.advance(bar), **how)

    fused = [run(fused=True, seed=seed) for seed in range(seeds)]
    # The median, because other work may keep the machine busy for a while.
    step_seconds = statistics.median(taken for each in fused for taken in each.step_seconds)
    curves = Curves(task.name, run(fused=False), fused[0], run(fused=False, dtype=torch.float64))
    in_time = max(1, round(seconds / step_seconds))
    progress.update(bar, total=steps * (2 + seeds) + in_time * seeds)
    equal_time = [
        train(
            task,
            in_time,
            device=device,
            fused=True,
            seed=seed,
            advance=lambda: progress.advance(bar),
        ).held_out
        for seed in range(seeds)
    ]
    return Learnt(
        curves,
        count_parameters(fused[0].model),
        token_rates(task, lambda batch: sum(tokens(batch)), device, min(seconds / 4, 4.0)),
        [trained.held_out for trained in fused],
        step_seconds,
        in_time,
        equal_time,
    )


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# Display ----------------------------------------------------------------------------------------


def perplexity(losses: Sequence[float]) -> str:
    """The mean over seeds, and the standard deviation."""
    values = [math.exp(loss) for loss in losses]
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def tokens_table(learnt: Sequence[Learnt], steps: int) -> Table:
    table = empty_table(
        f"after {steps * BATCH_SIZE * LENGTH:,} tokens",
        (
            "parameters",
            "perplexity",
            "tokens/s eager",
            "fused",
            "ratio",
            "fused − eager",
            "eager − float64",
        ),
    )
    for result in learnt:
        eager, fused = result.rates["eager"], result.rates["fused"]
        table.add_row(
            result.curves.task,
            f"{result.parameters:,}",
            perplexity(result.equal_tokens),
            f"{eager:,.0f}",
            f"{fused:,.0f}",
            f"{fused / eager:.2f}×",
            f"{result.curves.furthest('fused', 'eager'):.1e}",
            f"{result.curves.furthest('eager', 'exact'):.1e}",
        )
    return table


def time_table(learnt: Sequence[Learnt], seconds: float) -> Table:
    table = empty_table(
        f"after {seconds:.0f} s of training, fused",
        ("parameters", "perplexity", "tokens/s", "tokens"),
    )
    for result in learnt:
        table.add_row(
            result.curves.task,
            f"{result.parameters:,}",
            perplexity(result.equal_time),
            f"{result.rates['fused']:,.0f}",
            f"{result.steps_in_time * BATCH_SIZE * LENGTH:,}",
        )
    return table


def plot(path: Path, learnt: Sequence[Learnt], titles: Sequence[str], caption: str) -> None:
    """Draw the held-out perplexities, with a line over two standard deviations."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.9 + 0.36 * len(learnt)), layout="constrained")
    figure.suptitle(
        "held-out perplexity of a byte (lower is better)", x=0.01, ha="left", fontweight="bold"
    )
    pictures.add_caption(figure, caption)
    names = [result.curves.task for result in learnt]
    means: list[float] = []
    panels = figure.subplots(1, 2, sharex=True)
    for axes, title, field in zip(panels, titles, ("equal_tokens", "equal_time"), strict=True):
        values = [[math.exp(loss) for loss in getattr(result, field)] for result in learnt]
        means += pictures.draw_means(axes, names, values, "{:.2f}")
        axes.set_title(title, fontsize=9, loc="left")
        axes.invert_yaxis()
        pictures.leave_bars(axes)
    panels[0].set_xlim(0, 1.25 * max(means))
    pictures.save(figure, path)


# The command ------------------------------------------------------------------------------------


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = command_line.parser("language_model", __doc__)
    command_line.add_count(parser, "--steps", 600, "of training, for equal tokens")
    command_line.add_count(parser, "--seconds", 30, "of training, for equal time")
    command_line.add_count(parser, "--seeds", 3, least=2)
    options = command_line.parse(parser, argv, Path("docs/language_model.png"))
    if options.quick:
        options.steps, options.seconds = min(options.steps, 5), min(options.seconds, 1)
        options.seeds = 2
    return options


def main(argv: Sequence[str]) -> int:
    """Train, time and show."""
    options = parse(argv)
    torch.set_num_threads(options.threads)
    chosen = select(tasks(), lambda task: task.name, options.cases)
    if options.quick:  # a fraction of the held-out text too
        chosen = [replace(task, held_out=task.held_out[:1]) for task in chosen]
    facts = machine.facts(options.device)
    caption = machine.describe(facts)
    console.print(caption, soft_wrap=True, markup=False)
    with trifuse.backend(options.backend), progress_bars() as progress:
        learnt = [
            learn(task, options.steps, options.seconds, options.seeds, options.device, progress)
            for task in chosen
        ]
    tables = [tokens_table(learnt, options.steps), time_table(learnt, options.seconds)]
    for table in tables:
        print_table(table)
    if options.quick:
        console.print("--quick is too short to learn: these perplexities compare nothing.")
    if options.plot is not None:
        titles = [str(table.title) for table in tables]
        plot(options.plot, learnt, titles, caption.partition("\n")[0])
        console.print(f"wrote {options.plot}", markup=False)
    if options.json is not None:
        content = {"machine": facts, "learnt": [result.record() for result in learnt]}
        report.write_json(options.json, content)
    return 0
