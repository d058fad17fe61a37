"""Families of transformers' models: fused, against transformers itself and ``torch.compile``.

The models have their base sizes and random weights, but only ``--layers`` layers. All layers of a
model do the same work, so a few show their speed in a fraction of the time. ``--layers base`` uses
as many as each model has at its base size. Inference is a forward without gradients; a training
step is forward and backward, with the dropout that the model has. The optimizer, which is the same
for all, is left out, and so are the gradients of embeddings, whose share would be too large beside
few layers.

transformers' own model uses torch's attention where it can. Ours is the same model after
``trifuse.fuse(model, unpad=True)``. On the smaller of two batches results and gradients are
compared before they are timed, and torch's compiler takes part; ours must not be slower. If they
differ by more than rounding explains, ours must be as exact as transformers', judged by the
distance of both from transformers in float64.

Rates count the operations of products that real tokens need, in the backward twice as many as in
the forward.

A run may be done in parts: the file of ``--json`` keeps the figures of other runs, and the tables
and the picture show all of the chosen cases that it holds. ``--resume`` leaves out what it holds,
and ``--show`` runs nothing.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor, nn

import trifuse
from trifuse.benchmarks import (
    ceilings,
    command_line,
    families,
    machine,
    pictures,
    report,
    timing,
)
from trifuse.benchmarks.agreement import check_accuracy, check_agreement
from trifuse.benchmarks.cases import run_all, select
from trifuse.benchmarks.ceilings import Rate
from trifuse.benchmarks.comparison import Result
from trifuse.benchmarks.families import FAMILIES, Family
from trifuse.benchmarks.terminal import console, print_table
from trifuse.benchmarks.timing import Timing

LAYERS = 3  # of ModernBERT's, one attends to the whole text and two to a window
OURS, THEIRS, COMPILED = "fused", "transformers", "torch.compile"
INFERENCE, TRAINING = "inference", "training step"
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class Case(NamedTuple):
    family: Family
    dtype: torch.dtype
    batch: int
    step: str  # INFERENCE or TRAINING
    layers: int = LAYERS

    @property
    def name(self) -> str:
        return f"{self.model}, {self.step}, {_NAMES[self.dtype]}, batch {self.batch}"

    @property
    def model(self) -> str:
        return f"{self.family.name}, layers: {self.layers}"

    @property
    def is_smaller(self) -> bool:
        """Whether this is the smaller batch of its family."""
        return self.batch == min(self.family.batches)

    def with_layers(self, layers: int | None) -> Case:
        """Return the case with ``layers`` layers; None: with as many as the base model has."""
        if layers is None or not self.family.layers:
            layers = self.family.depth
        return self._replace(layers=layers)


class Outcome(NamedTuple):
    case: Case
    result: Result
    torchs_share: float  # of the ceiling, which chose the bar
    facts: Mapping[str, Any]  # the machine, when the case ran

    def record(self) -> dict[str, Any]:
        """Return the entry for the JSON file, which :meth:`from_record` reads back."""
        timings = {OURS: self.result.ours, **self.result.peers}
        return {
            "name": self.case.name,
            "family": self.case.family.name,
            "layers": self.case.layers,
            "dtype": _NAMES[self.case.dtype],
            "batch": self.case.batch,
            **self.result.record(),
            "seconds": {name: list(timing.seconds) for name, timing in timings.items()},
            "torchs_share": self.torchs_share,
            "machine": dict(self.facts),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Outcome:
        """Return the outcome that an entry of the JSON file records."""
        (family,) = (each for each in FAMILIES if each.name == record["family"])
        (dtype,) = (dtype for dtype, name in _NAMES.items() if name == record["dtype"])
        case = Case(family, dtype, record["batch"], record["step"], record["layers"])
        peers = {name: Timing(tuple(each)) for name, each in record["seconds"].items()}
        same = ("case", "step", "shape", "refused", "work")
        targets = ("at_least", "at_least_fraction", "at_least_against")
        result = Result(
            ours=peers.pop(OURS),
            peers=peers,
            ceiling=Rate(record["ceiling"], record["ceiling_source"]),
            against=(THEIRS,),
            **{name: record[name] for name in (*same, *targets)},
        )
        return cls(case, result, record["torchs_share"], record["machine"])


CASES = tuple(
    Case(family, dtype, batch, step)
    for family in FAMILIES
    for dtype in _NAMES
    for batch in family.batches
    for step in (INFERENCE, TRAINING)
)


# Targets ------------------------------------------------------------------------------------------


class Bar(NamedTuple):
    """Targets for transformers' time over ours, and for our fraction of the ceiling."""

    inference: float
    training: float
    fraction: float | None = None  # in inference


# By the kind of a family; the second is for machines on which torch's own product is slow.
BARS = {
    "padded": (Bar(2.2, 3.0), Bar(3.5, 4.0)),
    "padded, long": (Bar(3.0, 3.0), Bar(4.0, 4.0)),
    "decoders, ViT": (Bar(1.15, 1.0, 0.8), Bar(1.4, 1.0, 0.8)),
    "others": (Bar(1.0, 1.0), Bar(1.0, 1.0)),
}
SLOW = 0.6  # of the ceiling


def kind(family: Family) -> str:
    """Return the kind of a family among BARS."""
    if family.is_padded:
        return "padded" if family.length < 1024 else "padded, long"
    return "decoders, ViT" if family.reads == "windows" or family.model == "ViT" else "others"


@functools.cache
def torchs_share(dtype: torch.dtype) -> float:
    """Return the rate of torch's product at the size of a feed-forward network, of the ceiling."""
    x, weight = (torch.randn(size, 768, dtype=dtype) for size in (1024, 3072))
    product = {"linear": functools.partial(nn.functional.linear, x, weight)}
    fastest = min(timing.alternate(product, seconds=0.2)["linear"].seconds)
    return 2 * 1024 * 768 * 3072 / fastest / ceilings.matrix_rate(dtype).value


# Models -------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """A model twice, with the same weights."""

    theirs: Any
    ours: Any


@functools.lru_cache(maxsize=1)  # for the cases of one model, which follow each other
def load(family: Family, dtype: torch.dtype, layers: int) -> Pair:
    theirs = families.build(family, layers).to(dtype)
    ours = copy.deepcopy(theirs)
    trifuse.fuse(ours, unpad=True)
    return Pair(theirs, ours)


Step = Callable[[], Sequence[Tensor]]


def _forward(model: Any, inputs: dict[str, Any]) -> Step:
    def call() -> Sequence[Tensor]:
        with torch.no_grad():
            return (model(**inputs).last_hidden_state,)

    return call


def _forward_backward(model: Any, of: nn.Module, inputs: dict[str, Any], upstream: Tensor) -> Step:
    """Return a step of a model; ``of`` holds its parameters, of which the gradients are taken."""
    tables = [each.weight for each in of.modules() if isinstance(each, nn.Embedding)]
    parameters = [
        parameter
        for parameter in of.parameters()
        if parameter.requires_grad and not any(parameter is table for table in tables)
    ]

    def call() -> Sequence[Tensor]:
        out = model(**inputs).last_hidden_state
        grads = torch.autograd.grad(out, parameters, upstream, allow_unused=True)
        # One vector: a key bias's gradient is 0 except for rounding.
        return out.detach(), *(grad for grad in grads if grad is not None)

    return call


def run(case: Case, facts: Mapping[str, Any], seconds: float, min_rounds: int) -> Outcome:
    """Compare a case's models and time them in turns; ``facts`` are the machine's.

    Raises:
        AssertionError: ours doesn't compute what transformers' does.
    """
    family, dtype = case.family, case.dtype
    pair = load(family, dtype, case.layers)
    batch = families.draw(family, pair.theirs, case.batch)
    models: dict[str, tuple[Any, nn.Module]] = {
        OURS: (pair.ours, pair.ours),
        THEIRS: (pair.theirs, pair.theirs),
    }
    steps = _steps(case, models, batch)
    if case.is_smaller:
        for model in pair:
            model.eval()
        ours, theirs = (_compared(steps[name](), batch.keep) for name in (OURS, THEIRS))
        try:
            check_agreement(THEIRS, ours, theirs)
        except AssertionError:  # one of the two may be far from exact
            check_accuracy(THEIRS, ours, theirs, _exact(case, pair.theirs, batch))
        torch.compiler.reset()
        models[COMPILED] = torch.compile(pair.theirs), pair.theirs
        steps = _steps(case, models, batch)
    for model in pair:
        model.train(case.step == TRAINING)
    timings = timing.alternate(steps, seconds=seconds, min_rounds=min_rounds)
    share = torchs_share(dtype)
    bar = BARS[kind(family)][share < SLOW]
    inference = case.step == INFERENCE
    result = Result(
        case=case.model,
        step=case.step,
        shape=f"{_NAMES[dtype]}, {batch.shape}",
        ours=timings.pop(OURS),
        peers=timings,
        refused={},
        work=families.operations(family, case.layers, batch.lengths) * (1 if inference else 3),
        ceiling=ceilings.matrix_rate(dtype),
        at_least=bar.inference if inference else bar.training,
        at_least_fraction=bar.fraction if inference else None,
        against=(THEIRS,),
        at_least_against={COMPILED: 1.0},
    )
    return Outcome(case, result, share, facts)


def _steps(
    case: Case, models: dict[str, tuple[Any, nn.Module]], batch: families.Batch
) -> dict[str, Step]:
    if case.step == INFERENCE:
        return {name: _forward(model, batch.inputs) for name, (model, _) in models.items()}
    (like,) = _forward(models[THEIRS][0], batch.inputs)()
    upstream = torch.randn(like.shape, generator=torch.Generator().manual_seed(1))
    upstream = upstream.to(case.dtype).to(like)
    if batch.keep is not None:
        upstream[~batch.keep] = 0  # padding has no part in a loss
    return {
        name: _forward_backward(model, of, batch.inputs, upstream)
        for name, (model, of) in models.items()
    }


def _exact(case: Case, model: Any, batch: families.Batch) -> list[Tensor]:
    """Return what transformers computes in float64, as :func:`_compared`."""
    wide = copy.deepcopy(model).double()
    inputs = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in batch.inputs.items()
    }
    (step,) = _steps(case, {THEIRS: (wide, wide)}, batch._replace(inputs=inputs)).values()
    return _compared(step(), batch.keep)


def _compared(results: Sequence[Tensor], keep: Tensor | None) -> list[Tensor]:
    """Return the results at real tokens, and all gradients as one vector.

    By itself, the gradient of a key's bias is 0 except for rounding.
    """
    out, *grads = results
    compared = [out if keep is None else out[keep]]
    if grads:
        compared.append(torch.cat([grad.flatten() for grad in grads]))
    return compared


# Tables and picture -------------------------------------------------------------------------------


class Group(NamedTuple):
    """The results of some families in one kind of step."""

    families: str
    step: str
    results: list[Result]

    def mean(self, peer: str) -> float | None:
        """Return the geometric mean of a peer's time over ours."""
        ratios = ratios_against(peer, self.results)
        return statistics.geometric_mean(ratios) if ratios else None


def ratios_against(peer: str, results: Sequence[Result]) -> list[float]:
    """Return a peer's time over ours, for each result that has the peer."""
    return [result.peer_ratios[peer] for result in results if peer in result.peers]


def groups(outcomes: Sequence[Outcome]) -> list[Group]:
    found: dict[tuple[str, str], list[Result]] = {}
    for case, result, *_ in outcomes:
        found.setdefault((kind(case.family), case.step), []).append(result)
    return [Group(*key, each) for key, each in found.items()]


def summary(outcomes: Sequence[Outcome]) -> Table:
    """The means of each group: the ratios, the lowest of them, and the fraction of the ceiling."""
    titles = ("number", "against transformers", "lowest", "against torch.compile", "lowest")
    out = Table("models", "step", *titles, "of ceiling", title="geometric means")
    for column in out.columns[2:]:
        column.justify = "right"
    for group in groups(outcomes):
        cells = []
        for peer in (THEIRS, COMPILED):
            mean = group.mean(peer)
            lowest = min(ratios_against(peer, group.results), default=None)
            cells += ["–" if value is None else f"{value:.2f}×" for value in (mean, lowest)]
        fraction = statistics.geometric_mean([result.fraction for result in group.results])
        out.add_row(group.families, group.step, str(len(group.results)), *cells, f"{fraction:.0%}")
    return out


def plot(path: Path, caption: str, outcomes: Sequence[Outcome]) -> None:
    """Draw each family's speed beside transformers: a panel for inference, one for training."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(each.case.family.name for each in reversed(outcomes)))
    steps = list(dict.fromkeys(each.case.step for each in outcomes))
    height = 1.4 + 0.5 * len(names)
    figure, panels = pyplot.subplots(
        1, len(steps), figsize=(9, height), sharey=True, squeeze=False, layout="constrained"
    )
    colors = dict(zip(_NAMES, ("#3b7dd8", "#d1603d"), strict=True))
    for axes, step in zip(panels[0], steps, strict=True):
        for offset, (dtype, color) in zip((0.19, -0.19), colors.items(), strict=True):
            means = {}
            for name in names:
                ratios = [
                    result.ratio
                    for case, result, *_ in outcomes
                    if (case.family.name, case.step, case.dtype) == (name, step, dtype)
                ]
                if ratios:
                    means[name] = statistics.geometric_mean(ratios)
            places = [names.index(name) + offset for name in means]
            bars = axes.barh(places, means.values(), height=0.36, color=color, label=_NAMES[dtype])
            axes.bar_label(bars, [f"{mean:.1f}×" for mean in means.values()], padding=3, fontsize=7)
        axes.axvline(1, color="#888888", linewidth=1)
        axes.set_title(step, fontsize=9)
        axes.set_yticks(range(len(names)), names)
        axes.margins(x=0.12)
        pictures.leave_bars(axes)
    panels[0][0].legend(frameon=False, fontsize=8)
    figure.suptitle("times as fast as transformers, geometric means over two batches", fontsize=9)
    pictures.add_caption(figure, caption)
    pictures.save(figure, path)
    pyplot.close(figure)


# Figures ------------------------------------------------------------------------------------------


class Figures(NamedTuple):
    """The contents of a JSON file, by the name of each case."""

    times: dict[str, dict[str, Any]]  # records of outcomes
    failed: dict[str, str]  # errors

    @classmethod
    def read(cls, path: Path | None) -> Figures:
        """Read a file; without one there are no figures.

        Raises:
            SystemExit: the file holds something else.
        """
        if path is None or not path.exists():
            return cls({}, {})
        try:
            content = json.loads(path.read_text())
            times = {record["name"]: record for record in content["times"]}
            return cls(times, dict(content["failed"]))
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"--json: {path} holds no figures of this command") from error

    def write(self, path: Path | None) -> None:
        if path is not None:
            content = {"times": list(self.times.values()), "failed": self.failed}
            report.write_json(path, content, quietly=True)

    def outcomes(self, cases: Sequence[Case]) -> list[Outcome]:
        """Return the outcomes of those of the cases that have one."""
        return [Outcome.from_record(self.times[c.name]) for c in cases if c.name in self.times]


def run_into(figures: Figures, cases: Sequence[Case], options: argparse.Namespace) -> None:
    """Run cases; their figures replace older ones and are written after each."""
    facts = machine.facts()
    timed = functools.partial(
        run,
        facts=facts,
        seconds=0.3 if options.quick else 2.0,
        min_rounds=1 if options.quick else 3,
    )

    def keep(outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            figures.times[outcome.case.name] = outcome.record()
            figures.failed.pop(outcome.case.name, None)
        figures.write(options.json)

    with trifuse.backend(options.backend):
        _, failed = run_all(cases, lambda case: case.name, timed, keep)
    load.cache_clear()
    for name in failed:
        figures.times.pop(name, None)
    figures.failed.update(failed)
    figures.write(options.json)


def machines(outcomes: Sequence[Outcome]) -> str:
    """Describe each machine that outcomes come from, with the rates of its last run."""
    same = ("cpu", "threads", "cpu_capability", "torch", "trifuse")
    found = {tuple(each.facts[name] for name in same): each.facts for each in outcomes}
    return "\n".join(map(machine.describe, found.values()))


PICTURE = Path("docs/models.png")


def main(argv: Sequence[str]) -> int:
    """Run the cases, print the tables and draw the picture."""
    parser = command_line.parser("models", __doc__, devices=("cpu",))
    text = "of each model; base: as many as it has at its base size"
    command_line.add_count(parser, "--layers", LAYERS, text, words={"base": None})
    parser.add_argument("--resume", action="store_true", help="only cases that --json lacks")
    parser.add_argument("--show", action="store_true", help="run nothing, show what --json holds")
    options = command_line.parse(parser, argv, PICTURE)
    if (options.resume or options.show) and options.json is None:
        parser.error("--resume and --show read the file of --json")
    if options.cases and options.plot == PICTURE:
        options.plot = None  # the picture shows all families
    torch.set_num_threads(options.threads)
    cases = [case.with_layers(options.layers) for case in CASES]
    cases = select(cases, lambda case: case.name, options.cases)
    figures = Figures.read(options.json)
    waiting = [case for case in cases if not (options.resume and case.name in figures.times)]
    if waiting and not options.show:
        run_into(figures, waiting, options)
    if outcomes := figures.outcomes(cases):
        caption = machines(outcomes)
        console.print(caption, soft_wrap=True, markup=False)
        print_table(report.table("models", [outcome.result for outcome in outcomes]))
        print_table(summary(outcomes))
        if options.plot is not None:
            plot(options.plot, caption, outcomes)
            console.print(f"wrote {options.plot}", markup=False)
    return any(case.name in figures.failed for case in cases)
