"""Training Transformers eager and fused: the same loss curves, in how much less time.

An encoder-decoder learns to reverse and to sort, a language model learns the bytes of the standard
library's language reference. Each is trained eager and fused, and shows what it learnt: sequences
decoded without a mistake, perplexity, the continuation of a prompt.

Without dropout, from the same seed and on the same batches, the two losses are compared step by
step. They may differ by rounding, which training amplifies, so a third model is trained in float64:
the distance of the eager curve from its curve shows the effect of rounding.

With dropout the two drop different elements, so the loss on held-out data is compared over seeds.

Speed is measured on a training step: forward, loss and backward, without the optimizer, which is
the same for all. Only real tokens of source and target count; padding doesn't.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import trifuse
from trifuse.benchmarks import ceilings, command_line, machine, pictures, report, text, timing
from trifuse.benchmarks.cases import select
from trifuse.benchmarks.ceilings import Rate
from trifuse.benchmarks.comparison import Result
from trifuse.benchmarks.terminal import console, learnt_share, print_table, progress_bars
from trifuse.models.bert import BertModel
from trifuse.models.transformer import (
    LanguageModel,
    LanguageModelConfig,
    Transformer,
    TransformerConfig,
    greedy_search,
    sample,
    token_loss,
    warmup_inverse_sqrt,
)

DROPOUT = 0.1
PROMPT = 'The "for" statement'

# Training ---------------------------------------------------------------------------------------

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Task:
    """A model, its training and held-out data, and its loss."""

    name: str
    make: Callable[[float], nn.Module]  # from the dropout probability
    draw: Callable[[torch.Generator], Batch]
    held_out: Sequence[Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    learning_rate: float = 2e-3  # at the end of the warm-up
    warmup_steps: int = 50


def puzzle(name: text.Puzzle) -> Task:
    # Not ReLU, because when rounding moves a unit across 0, its gradient switches on or off, and
    # the curves soon diverge, eager from float64 as much as fused from eager.
    config = TransformerConfig(
        text.SYMBOLS + 20, 64, 4, 2, 2, 256, activation="gelu", max_length=16
    )
    generator = torch.Generator().manual_seed(1 << 20)
    return Task(
        name,
        lambda dropout: Transformer(_with_dropout(config, dropout)),
        lambda generator: text.pairs(name, 48, generator),
        [text.pairs(name, 512, generator)],
        pairs_loss,
        # At twice this rate the reversal's loss jumps now and then, and rounding errors with it.
        learning_rate=1.5e-3,
    )


def language(batch_size: int = 12, length: int = 96) -> Task:
    # GPT-2's 0.02 is for a width of 768; at this width the model learns far more slowly with it.
    config = LanguageModelConfig(
        text.BYTES, 128, 4, 2, 512, max_length=length, initializer_range=128**-0.5
    )
    train, validation = text.reference()
    return Task(
        "language model",
        lambda dropout: LanguageModel(_with_dropout(config, dropout)),
        lambda generator: (text.windows(train, batch_size, length + 1, generator),),
        [(windows,) for windows in text.cover(validation, length + 1).split(4 * batch_size)],
        windows_loss,
        learning_rate=5e-3,
    )


def tasks() -> list[Task]:
    return [puzzle("reversal"), puzzle("sorting"), language()]


def _with_dropout(config: Any, dropout: float) -> Any:
    config = copy.copy(config)
    config.dropout = dropout
    return config


def pairs_loss(model: nn.Module, batch: Batch) -> Tensor:
    source, source_mask, target, target_mask = batch
    logits = model(source, target[:, :-1], source_mask, target_mask[:, :-1])
    return token_loss(logits, target[:, 1:], target_mask[:, 1:])


def windows_loss(model: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    (windows,) = batch
    return token_loss(model(windows[:, :-1]), windows[:, 1:])


# Training ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    model: nn.Module  # in evaluation mode
    losses: list[float]  # of every step, before its update
    held_out: float  # after the last step
    step_seconds: list[float]  # of every step: batch, forward, backward and optimizer


def fuse(model: nn.Module) -> None:
    """Fuse a model, and leave padding out if the model can do without it."""
    unpadded = (BertModel, LanguageModel, Transformer)
    trifuse.fuse(model, unpad=any(isinstance(module, unpadded) for module in model.modules()))


def train(
    task: Task,
    steps: int,
    *,
    device: str,
    fused: bool,
    seed: int = 0,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    advance: Callable[[], object] = lambda: None,
) -> Trained:
    """Train a fresh model; the seed decides its weights, its batches and its dropout."""
    torch.manual_seed(seed)
    model = task.make(dropout).to(device, dtype)
    if fused:
        fuse(model)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), task.learning_rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_inverse_sqrt(task.warmup_steps))
    losses, step_seconds = [], []
    for _ in range(steps):
        begin = time.perf_counter()
        loss = task.loss(model, _to(task.draw(generator), device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())  # on a GPU this waits for the step's end
        step_seconds.append(time.perf_counter() - begin)
        advance()
    model.eval()
    return Trained(model, losses, evaluate(task, model, device), step_seconds)


@torch.no_grad()
def evaluate(task: Task, model: nn.Module, device: str) -> float:
    """The mean loss over the held-out batches, weighted by their numbers of rows."""
    losses = [task.loss(model, _to(batch, device)).item() for batch in task.held_out]
    rows = [len(batch[0]) for batch in task.held_out]
    return math.fsum(map(math.prod, zip(losses, rows, strict=True))) / sum(rows)


@torch.no_grad()
def decoded_right(model: nn.Module, batch: Batch) -> float:
    """The fraction of sequences for which greedy search finds the whole answer."""
    assert isinstance(model, Transformer)
    source, source_mask, target, target_mask = batch
    answer = target[:, 1:].masked_fill(~target_mask[:, 1:], text.EOS)
    found = greedy_search(
        model,
        source,
        source_mask,
        bos_id=text.BOS,
        eos_id=text.EOS,
        max_length=answer.shape[1],
    )
    return (found.tokens == answer).all(1).double().mean().item()


def _to(batch: Batch, device: str) -> Batch:
    return tuple(x.to(device) for x in batch)


@dataclass(frozen=True)
class Curves:
    """The losses of one task trained three times without dropout."""

    task: str
    eager: Trained
    fused: Trained
    exact: Trained  # eager in float64

    def furthest(self, one: str, other: str) -> float:
        """The largest difference between two of the curves at any step."""
        pairs = zip(getattr(self, one).losses, getattr(self, other).losses, strict=True)
        return max(abs(a - b) for a, b in pairs)

    def record(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "losses": {name: getattr(self, name).losses for name in ("eager", "fused", "exact")},
            "held_out": {name: getattr(self, name).held_out for name in ("eager", "fused")},
            "fused_from_eager": self.furthest("fused", "eager"),
            "fused_from_exact": self.furthest("fused", "exact"),
            "eager_from_exact": self.furthest("eager", "exact"),
        }


@dataclass(frozen=True)
class Seeds:
    """Held-out losses after training with dropout, one for each seed."""

    task: str
    eager: list[float]
    fused: list[float]
    # The shares of held-out sequences that are decoded without a mistake, where the task has some.
    decoded: Mapping[str, list[float]] = field(default_factory=dict)

    @property
    def standard_errors(self) -> float:
        """The difference of the means, fused less eager, over its standard error (Welch's t)."""
        variances = (statistics.variance(losses) / len(losses) for losses in self._both)
        difference = statistics.mean(self.fused) - statistics.mean(self.eager)
        return difference / math.sqrt(sum(variances))

    @property
    def _both(self) -> tuple[list[float], list[float]]:
        return self.eager, self.fused

    def record(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "dropout": DROPOUT,
            "eager": self.eager,
            "fused": self.fused,
            "decoded": dict(self.decoded),
            "standard_errors": self.standard_errors,
        }


def learn(
    task: Task, steps: int, seeds: int, device: str, progress: Progress
) -> tuple[Curves, Seeds]:
    bar = progress.add_task(task.name, total=steps * (3 + 2 * seeds))

    def run(**how: Any) -> Trained:
        return train(task, steps, device=device, advance=lambda: progress.advance(bar), **how)

    curves = Curves(
        task.name,
        run(fused=False),
        run(fused=True),
        run(fused=False, dtype=torch.float64),
    )
    trained = {
        name: [run(fused=name == "fused", seed=seed, dropout=DROPOUT) for seed in range(seeds)]
        for name in ("eager", "fused")
    }
    decoded = {}
    if isinstance(curves.eager.model, Transformer):
        batch = _to(task.held_out[0], device)
        decoded = {
            name: [decoded_right(each.model, batch) for each in models]
            for name, models in trained.items()
        }
    eager, fused = ([each.held_out for each in models] for models in trained.values())
    return curves, Seeds(task.name, eager, fused, decoded)


# Speed ------------------------------------------------------------------------------------------


def tokens(batch: Batch) -> tuple[int, int]:
    """Real tokens that go into an encoder, if there is one, and into a decoder."""
    if len(batch) == 1:
        return 0, batch[0][:, :-1].numel()
    _, source_mask, _, target_mask = batch
    return int(source_mask.sum()), int(target_mask[:, :-1].sum())


def operations(model: nn.Module, batch: Batch) -> float:
    """Operations of a step in the layers: for each weight and token 2 forward and 4 backward."""
    counts = zip(("encoder.layers", "decoder.layers"), tokens(batch), strict=True)
    return 6 * sum(
        count * parameter.numel()
        for stack, count in counts
        for name, parameter in model.named_parameters()
        if name.startswith(stack)
    )


@dataclass(frozen=True)
class Case:
    """A model's training step.

    ``at_least`` is a target for eager's time over ours, ``at_least_fraction`` for our fraction of
    the ceiling.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    peers: tuple[str, ...] = ("eager", "compiled")
    at_least: float | None = None
    dropout: float = DROPOUT
    operations: Callable[[nn.Module, Batch], float] = operations
    at_least_fraction: float | None = None


def base_pair() -> nn.Module:
    """One encoder and one decoder layer of the paper's base model, over bytes."""
    return Transformer(
        TransformerConfig(text.BYTES, num_encoder_layers=1, num_decoder_layers=1, max_length=128)
    )


def base_batch(padded: bool, batch_size: int = 8, length: int = 128) -> Batch:
    """Sources and targets of ``length`` tokens; if ``padded``, of a quarter to three quarters."""
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(text.BYTES, (batch_size, length), generator=generator)
    target = torch.randint(text.BYTES, (batch_size, length + 1), generator=generator)
    lengths = torch.full((batch_size, 1), length)
    if padded:
        lengths = torch.linspace(length / 4, 3 * length / 4, batch_size).round().long()[:, None]
    places = torch.arange(length + 1)
    return source, places[:-1] < lengths, target, places <= lengths.flip(0)


def step_of(task: Task, at_least_fraction: float) -> Case:
    """A task's training step with dropout."""
    return Case(
        task.name,
        lambda: task.make(DROPOUT),
        lambda: task.draw(torch.Generator().manual_seed(0)),
        task.loss,
        at_least_fraction=at_least_fraction,
    )


CASES = (
    Case(
        "base layer pair",
        base_pair,
        lambda: base_batch(False),
        pairs_loss,
        at_least=1.8,
        at_least_fraction=0.8,
    ),
    Case(
        "base layer pair, half padding",
        base_pair,
        lambda: base_batch(True),
        pairs_loss,
        at_least_fraction=0.8,
    ),
    step_of(language(), 0.6),
    step_of(puzzle("reversal"), 0.35),
)


def time_steps(case: Case, device: str, seconds: float, min_rounds: int = 5) -> Result:
    eager, batch, timings = _time(case, device, seconds, min_rounds)
    count = sum(tokens(batch))
    rate = ceilings.matrix_rate(torch.float32, device=device)
    per_token = case.operations(eager, batch) / count
    return Result(
        case=case.name,
        step="forward + backward",
        shape=f"fp32, {count} tokens, dropout {case.dropout}",
        ours=timings.pop("ours"),
        peers=timings,
        refused={},
        work=count,
        ceiling=Rate(rate.value / per_token, rate.source),
        unit="token",
        at_least=case.at_least,
        at_least_fraction=case.at_least_fraction,
    )


def token_rates(
    task: Task, count: Callable[[Batch], int], device: str, seconds: float
) -> dict[str, float]:
    """Tokens per second in training steps without dropout, of the eager and the fused model.

    Args:
        task: the model and the loss; its first batch is the one that is timed.
        count: the tokens of a batch that count.
        device: where to run.
        seconds: the least time to go on for.
    """
    case = Case(
        task.name,
        lambda: task.make(0.0),
        lambda: task.draw(torch.Generator().manual_seed(0)),
        task.loss,
        peers=("eager",),
        dropout=0.0,
    )
    _, batch, timings = _time(case, device, seconds)
    names = {"eager": "eager", "fused": "ours"}
    return {name: count(batch) / timings[key].median for name, key in names.items()}


def _time(
    case: Case, device: str, seconds: float, min_rounds: int = 5
) -> tuple[nn.Module, Batch, dict[str, timing.Timing]]:
    """Time a case's training step; return the eager model, the batch and the times by name.

    Raises:
        AssertionError: the fused model's loss is not the eager model's.
    """
    torch.manual_seed(0)
    eager = case.make().to(device)
    batch = _to(case.batch(), device)
    models = {"ours": copy.deepcopy(eager), "eager": eager}
    fuse(models["ours"])
    with torch.no_grad():
        losses = [case.loss(model.eval(), batch).item() for model in models.values()]
    if not math.isclose(*losses, rel_tol=1e-5):
        raise AssertionError(f"{case.name}: fused loss {losses[0]}, eager {losses[1]}")
    if "compiled" in case.peers:
        torch.compiler.reset()
        models["compiled"] = copy.deepcopy(eager)
        models["compiled"].compile()

    def step(model: nn.Module) -> Callable[[], None]:
        def run() -> None:
            model.zero_grad()
            case.loss(model, batch).backward()

        return run

    functions = {name: step(model.train()) for name, model in models.items()}
    timings = timing.alternate(functions, device=device, seconds=seconds, min_rounds=min_rounds)
    return eager, batch, timings


# Display ----------------------------------------------------------------------------------------


def curves_table(results: Sequence[Curves]) -> Table:
    steps = len(results[0].fused.losses)
    table = empty_table(
        f"without dropout, {steps} steps from one seed: largest difference of the losses at a step",
        ("first loss", "last loss", "fused − eager", "fused − float64", "eager − float64"),
    )
    for result in results:
        differences = (
            result.furthest(*pair)
            for pair in (("fused", "eager"), ("fused", "exact"), ("eager", "exact"))
        )
        ends = (result.fused.losses[place] for place in (0, -1))
        table.add_row(
            result.task,
            *(f"{loss:.4f}" for loss in ends),
            *(f"{difference:.1e}" for difference in differences),
        )
    return table


def seeds_table(results: Sequence[Seeds], seeds: int, early: bool) -> Table:
    """``early``: the models were trained too briefly to learn; see :func:`learnt_share`."""
    table = empty_table(
        f"with dropout {DROPOUT}, {seeds} seeds: held-out loss, and sequences decoded without a "
        "mistake; mean ± standard deviation",
        ("loss, eager", "loss, fused", "apart", "decoded, eager", "decoded, fused"),
    )
    for result in results:
        means = (
            f"{statistics.mean(losses):.4f} ± {statistics.stdev(losses):.4f}"
            for losses in (result.eager, result.fused)
        )
        apart = f"{result.standard_errors:+.1f} standard errors"
        decoded = [learnt_share(shares, early) for shares in result.decoded.values()]
        table.add_row(result.task, *means, apart, *(decoded or "––"))
    return table


def speed_table(results: Sequence[Result]) -> Table:
    peers = list(dict.fromkeys(name for result in results for name in result.peers))
    table = empty_table(
        "training step: tokens per second; under a peer's, how many times as fast fused is",
        ("fused", *peers, "at least", "of ceiling"),
    )
    for result in results:
        rates = (
            f"{result.work / result.peers[peer].median:,.0f}\n[dim]{over(result, peer):.2f}×[/dim]"
            if peer in result.peers
            else "–"
            for peer in peers
        )
        wanted = "–" if result.at_least is None else f"{result.at_least:g}× eager"
        table.add_row(
            f"{result.case}\n[dim]{result.shape}[/dim]",
            f"{result.achieved:,.0f}",
            *rates,
            wanted,
            report.of_ceiling(result),
        )
    return table


def over(result: Result, peer: str) -> float:
    """A peer's time over ours: the median over the rounds."""
    pairs = zip(result.peers[peer].seconds, result.ours.seconds, strict=True)
    return statistics.median(theirs / ours for theirs, ours in pairs)


def empty_table(title: str, numbers: Sequence[str]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def continuation(model: LanguageModel, device: str) -> str:
    """A trained language model's continuation of :data:`PROMPT`."""
    prompt = text.encode(PROMPT).long()[None]
    generator = torch.Generator(device).manual_seed(0)
    new = model.config.max_length - prompt.shape[1]
    drawn = sample(model, prompt.to(device), new, temperature=0.7, top_k=20, generator=generator)
    return text.decode(drawn[0])


def plot(path: Path, results: Sequence[Curves], caption: str) -> None:
    """Draw the loss curves, and below them their distance from the float64 curve."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.4 * len(results) + 0.6, 5.2), layout="constrained")
    figure.suptitle("training without dropout, eager and fused", x=0.01, ha="left", weight="bold")
    pictures.add_caption(figure, caption, fontsize=7)
    rows = figure.subplots(2, len(results), squeeze=False, sharex="col")
    for column, result in enumerate(results):
        loss, difference = rows[:, column]
        loss.plot(result.eager.losses, color="#b8bec7", linewidth=4, label="eager")
        loss.plot(result.fused.losses, color="#d1603d", linewidth=1, label="fused")
        loss.set_title(result.task, fontsize=10, loc="left")
        loss.set_ylim(bottom=0)
        for other, color in (("eager", "#7f8894"), ("fused", "#d1603d")):
            losses = zip(getattr(result, other).losses, result.exact.losses, strict=True)
            label = f"|{other} − float64|"
            difference.semilogy(
                [abs(a - b) for a, b in losses], ".", markersize=2.5, color=color, label=label
            )
        difference.set_xlabel("step", fontsize=9)
        for axes in (loss, difference):
            axes.tick_params(labelsize=8)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(color="#eeeeee")
            axes.set_axisbelow(True)
    for axes, name in zip(rows[:, 0], ("loss, nats", "difference, nats"), strict=True):
        axes.set_ylabel(name, fontsize=9)
        axes.legend(frameon=False, fontsize=8, markerscale=3)
    pictures.save(figure, path)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = command_line.parser("transformer", __doc__)
    parser.add_argument("--only", choices=("training", "speed"), help="default: both")
    command_line.add_count(parser, "--steps", 300, "of training")
    command_line.add_count(parser, "--seeds", 5, "with dropout", least=2)
    options = command_line.parse(parser, argv, Path("docs/transformer.png"))
    if options.quick:
        options.steps, options.seeds = min(options.steps, 20), min(options.seeds, 2)
    return options


def main(argv: Sequence[str]) -> int:
    """Train, time and show."""
    options = parse(argv)
    device = options.device
    torch.set_num_threads(options.threads)
    named: list[Task | Case] = []
    if options.only != "speed":
        named += tasks()
    if options.only != "training":
        named += CASES
    chosen = select(named, _name, options.cases)
    trained = [item for item in chosen if isinstance(item, Task)]
    timed = [item for item in chosen if isinstance(item, Case)]
    facts = machine.facts(device)
    caption = machine.describe(facts)
    console.print(caption, soft_wrap=True, markup=False)

    learnt, times = [], []
    with trifuse.backend(options.backend), progress_bars() as progress:
        bar = progress.add_task("timing", total=len(timed), visible=bool(timed))
        for case in timed:
            times.append(time_steps(case, device, *((0.6, 2) if options.quick else (8.0, 5))))
            progress.advance(bar)
        for task in trained:
            learnt.append(learn(task, options.steps, options.seeds, device, progress))

    content: dict[str, Any] = {
        "machine": facts,
        "curves": [],
        "seeds": [],
        "learnt": {},
        "times": [result.record() for result in times],
    }
    if learnt:
        curves, seeds = map(list, zip(*learnt, strict=True))
        print_table(curves_table(curves))
        print_table(seeds_table(seeds, options.seeds, options.quick))
        content["curves"] = [result.record() for result in curves]
        content["seeds"] = [result.record() for result in seeds]
        with trifuse.backend(options.backend):
            for task, result in zip(trained, curves, strict=True):
                content["learnt"][task.name] = show_learnt(task, result, device, options.quick)
        if options.plot is not None:
            plot(options.plot, curves, caption.partition("\n")[0])
            console.print(f"wrote {options.plot}", markup=False)
    if times:
        print_table(speed_table(times))
    if options.json is not None:
        report.write_json(options.json, content)
    return 0


def _name(item: Task | Case) -> str:
    return item.name


def show_learnt(task: Task, result: Curves, device: str, early: bool) -> dict[str, float]:
    """Print what the models trained without dropout can do; return the figures of both.

    ``early``: they were trained too briefly to learn, so shares of right answers are not shown."""
    models = {"eager": result.eager.model, "fused": result.fused.model}
    if isinstance(result.fused.model, LanguageModel):
        figures = {name: math.exp(getattr(result, name).held_out) for name in models}
        shown = ", ".join(f"{value:.3f} {name}" for name, value in figures.items())
        console.print(
            f"{task.name}: held-out perplexity {shown}, a byte; written by the fused one:"
        )
        written = continuation(result.fused.model, device)
        console.print(f"[bold]{PROMPT}[/bold]", end="")
        console.print(written.removeprefix(PROMPT), markup=False, highlight=False)
    else:
        (batch,) = task.held_out
        figures = {name: decoded_right(model, _to(batch, device)) for name, model in models.items()}
        shown = ", ".join(f"{learnt_share(value, early)} {name}" for name, value in figures.items())
        console.print(f"{task.name}: held-out sequences decoded without a mistake: {shown}")
    return figures
