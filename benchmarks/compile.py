"""``torch.compile`` with trifuse's backend against torch's own, on models written without trifuse.

Counts the attentions and norms of each model's graph that become trifuse's, checks that both
backends compute the same, and times them in turns. If they differ by more than rounding, ours must
be as exact as torch's, judged by the distance of both from the model in float64. Dropout is off.
The first call, which compiles, is not timed; it takes minutes for all models. Models of timm,
torchvision and x-transformers take part where these libraries are installed.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor, nn

from trifuse.benchmarks import command_line, passes, timing
from trifuse.benchmarks.agreement import check_accuracy, check_agreement
from trifuse.benchmarks.cases import run_selected
from trifuse.benchmarks.compile_models import MODELS, Sizes, missing
from trifuse.benchmarks.terminal import console, print_table
from trifuse.benchmarks.timing import Timing
from trifuse.compiler import rewrite


class Case(NamedTuple):
    model: str
    step: str  # "forward" or "forward + backward"
    sizes: Sizes = Sizes()

    @property
    def name(self) -> str:
        return f"{self.model}, {self.step}"


CASES = tuple(Case(model, step) for model in MODELS for step in ("forward", "forward + backward"))


class Outcome(NamedTuple):
    case: Case
    replaced: dict[str, int]  # by the name of a pattern
    left: dict[str, int]
    timings: dict[str, Timing]  # "trifuse", "inductor" and "eager"

    def ratio(self, peer: str) -> float:
        return self.timings[peer].median / self.timings["trifuse"].median

    def record(self) -> dict[str, Any]:
        seconds = {name: timed.median for name, timed in self.timings.items()}
        return {
            "case": self.case.name,
            "replaced": self.replaced,
            "left": self.left,
            "seconds": seconds,
            "ratio": self.ratio("inductor"),
        }


def run(case: Case, seconds: float) -> Outcome:
    """Compile a model by both backends, compare them and time them.

    Raises:
        AssertionError: they don't compute the same.
    """
    torch.manual_seed(0)
    model, x = MODELS[case.model](case.sizes)

    def step(
        function: Callable[[Tensor], Tensor], model: nn.Module = model, x: Tensor = x
    ) -> Callable[[], Sequence[Tensor]]:
        if case.step == "forward":
            return passes.forward(lambda: function(x))
        return passes.forward_backward(lambda: function(x), list(model.parameters()))

    torch._dynamo.reset()
    with torch.set_grad_enabled(case.step != "forward"):
        counts = _count(model, x)
    calls = {name: step(torch.compile(model, backend=name)) for name in ("trifuse", "inductor")}
    calls["eager"] = step(model)
    names = ["output", *(name for name, _ in model.named_parameters())]

    def compared(results: Sequence[Tensor]) -> list[Tensor]:
        # The gradient of a key's bias is 0 except for rounding.
        return [t for t, of in zip(results, names, strict=False) if not of.endswith("bias")]

    results = {name: compared(call()) for name, call in calls.items()}
    try:
        check_agreement("inductor", results["trifuse"], results["inductor"])
    except AssertionError:  # one of the two may be far from exact
        wide, given = copy.deepcopy(model).double(), x.double() if x.is_floating_point() else x
        exact = compared(step(wide, wide, given)())
        check_accuracy("inductor", results["trifuse"], results["inductor"], exact)
    return Outcome(case, *counts, timing.alternate(calls, seconds=seconds))


def _count(model: nn.Module, x: Tensor) -> tuple[dict[str, int], dict[str, int]]:
    """Count the parts of the model's graph that become trifuse's, and those that stay torch's."""
    replaced = dict.fromkeys(("attention", "norm"), 0)
    left = dict(replaced)

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
        report = rewrite(graph)
        for name in replaced:
            replaced[name] += report.replaced[name]
            left[name] += sum(each[0] == name for each in report.left)
        return graph

    torch.compile(model, backend=backend)(x)
    return replaced, left


def table(outcomes: Sequence[Outcome]) -> Table:
    titles = ("attention", "norms", "eager", "inductor", "trifuse", "against inductor")
    out = Table("model", *titles, title='torch.compile: backend="trifuse" against "inductor"')
    for column in out.columns[1:]:
        column.justify = "right"
    for outcome in outcomes:
        served = [
            f"{outcome.replaced[name]} of {outcome.replaced[name] + outcome.left[name]}"
            for name in ("attention", "norm")
        ]
        medians = [outcome.timings[name].median for name in ("eager", "inductor", "trifuse")]
        times = [f"{median * 1e3:.1f} ms" for median in medians]
        out.add_row(outcome.case.name, *served, *times, f"{outcome.ratio('inductor'):.2f}×")
    return out


def main(argv: Sequence[str]) -> int:
    """Run the cases and print the table."""
    parser = command_line.parser("compile", __doc__, devices=("cpu",), plots=False)
    options = parser.parse_args(argv)
    call = functools.partial(run, seconds=1.0 if options.quick else 6.0)
    reasons = {case.model: missing(case.model) for case in CASES}
    for reason in dict.fromkeys(filter(None, reasons.values())):
        console.print(reason, markup=False)
    cases = [case for case in CASES if reasons[case.model] is None]
    _, outcomes, failed = run_selected(options, cases, lambda case: case.name, call)
    if outcomes:
        print_table(table(outcomes))
    return bool(failed)
