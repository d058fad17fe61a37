"""Dropout + residual + LayerNorm against what a user of torch would write instead.

The peers are the formula itself, eager and compiled, and for some forwards only
``torch.add(x, residual)``, which moves the same bytes and normalises nothing.

The operator computes little for each byte, so its ceiling is the rate at which this machine copies
memory. Only tensors that every implementation must read or write count: in the forward x, residual
and the output; in the backward x and residual again, and the gradients of the output, of x and of
the residual (without dropout the last two are one tensor). Weight, bias, mean and rstd are small.
On a GPU forward and backward are also timed separately, each with a target fraction of that rate.

A result in fresh memory costs a page fault every 4 KiB. torch returns freed results to the system
and takes fresh pages; trifuse keeps its memory. Below the table is the number of pages that a call
of each touched.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import trifuse
from trifuse import backends
from trifuse.benchmarks import ceilings, command_line, machine, report, timing
from trifuse.benchmarks.agreement import check_agreement
from trifuse.benchmarks.cases import run_all, select
from trifuse.benchmarks.comparison import Result
from trifuse.benchmarks.memory import page_faults
from trifuse.benchmarks.other_kernels import other_kernels
from trifuse.benchmarks.terminal import console

# Cases ------------------------------------------------------------------------------------------

Peer = Literal["eager", "torch.compile", "torch.add"]


@dataclass(frozen=True)
class Case:
    """One row.

    ``at_least`` is a target for the peer's time over ours, ``at_least_fraction`` for our fraction
    of the copy rate.
    """

    dropout_p: float
    shape: tuple[int, int]  # rows, N
    dtype: torch.dtype
    backward: bool
    peer: Peer
    at_least: float | None = None
    at_least_fraction: float | None = None
    forward: bool = True  # False times the backward alone, after a forward

    @property
    def dropout(self) -> str:
        return f"dropout {self.dropout_p}" if self.dropout_p else "no dropout"

    @property
    def name(self) -> str:
        return f"{self.dropout}, {self.step}, {self.size}, {self.peer}"

    @property
    def step(self) -> str:
        return " + ".join(["forward"] * self.forward + ["backward"] * self.backward)

    @property
    def size(self) -> str:
        dtype = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[self.dtype]
        return f"{dtype} ({','.join(map(str, self.shape))})"


_FP32, _BF16 = torch.float32, torch.bfloat16
_BERT, _LARGE = (4096, 768), (16384, 1024)

CASES: dict[str, tuple[Case, ...]] = {
    "cpu": (
        Case(0.1, _BERT, _FP32, False, "eager", at_least=12.0),
        Case(0.1, _BERT, _FP32, True, "eager", at_least=8.0, at_least_fraction=0.9),
        Case(0.1, _BERT, _FP32, False, "torch.compile", at_least=8.0),
        Case(0.1, _BERT, _FP32, True, "torch.compile", at_least=5.0, at_least_fraction=0.9),
        Case(0.0, _BERT, _FP32, False, "eager", at_least=1.5),
        Case(0.0, _BERT, _FP32, True, "eager", at_least=1.6),
        Case(0.0, _BERT, _FP32, False, "torch.compile"),
        Case(0.0, _BERT, _FP32, True, "torch.compile"),
        Case(0.0, _LARGE, _FP32, False, "torch.add", at_least=0.9),
        Case(0.0, _LARGE, _BF16, False, "torch.add", at_least=0.9),
    ),
    "cuda": (
        *(
            Case(0.1, (16384, N), _BF16, False, "torch.add", at_least_fraction=0.88)
            for N in (1024, 2048, 4096, 8192)
        ),
        *(
            Case(0.1, (16384, N), _BF16, True, "eager", at_least_fraction=0.75, forward=False)
            for N in (1024, 2048, 4096, 8192)
        ),
        Case(0.1, _LARGE, _BF16, True, "eager", at_least=4.0),
        Case(0.1, _LARGE, _BF16, True, "torch.compile", at_least=1.2),
        Case(0.1, (16384, 4096), _BF16, True, "eager", at_least=4.0),
        Case(0.1, (16384, 4096), _BF16, True, "torch.compile", at_least=1.2),
        Case(0.0, _LARGE, _BF16, False, "eager"),
        Case(0.0, _LARGE, _BF16, False, "torch.compile"),
        Case(0.0, _LARGE, _BF16, True, "eager"),
        Case(0.0, _LARGE, _BF16, True, "torch.compile"),
    ),
}


def moved(case: Case) -> float:
    """Bytes that any implementation reads and writes."""
    tensors = 3 * case.forward  # x and residual, the output
    if case.backward:
        tensors += 4  # the output's gradient, x and residual; the gradient of x
        tensors += case.dropout_p > 0  # the gradient of the residual
    return tensors * math.prod(case.shape) * case.dtype.itemsize


# Calls ------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    x: Tensor  # (rows, N)
    residual: Tensor  # (rows, N)
    weight: Tensor  # (N,)
    bias: Tensor  # (N,)
    grad_out: Tensor  # (rows, N)


def inputs(case: Case, device: str) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int, requires_grad: bool = case.backward) -> Tensor:
        values = torch.randn(shape, generator=generator, device=device)
        return values.to(case.dtype).requires_grad_(requires_grad)

    x, residual = (random(*case.shape) for _ in range(2))
    weight, bias = (random(case.shape[1]) for _ in range(2))
    return Inputs(x, residual, weight, bias, random(*case.shape, requires_grad=False))


def ours(case: Case, given: Inputs) -> Callable[[], Sequence[Tensor]]:
    """Return a step, which returns the output, and with ``case.backward`` the gradients."""
    operator: Callable[..., Tensor] = functools.partial(
        trifuse.dropout_add_layer_norm, dropout_p=case.dropout_p, training=True
    )
    return _step(operator, case, given)


def theirs(case: Case, given: Inputs) -> Callable[[], Sequence[Tensor]]:
    """As :func:`ours`, by the peer."""
    if case.peer == "torch.add":
        return _step(lambda x, residual, weight, bias: torch.add(x, residual), case, given)

    def formula(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if case.dropout_p:
            x = F.dropout(x, case.dropout_p)
        return F.layer_norm(residual + x, x.shape[-1:], weight, bias)

    if case.peer == "eager":
        return _step(formula, case, given)
    torch.compiler.reset()  # or dynamo treats a case as an earlier one with dynamic shapes
    return _step(torch.compile(formula), case, given)


def _step(
    function: Callable[..., Tensor], case: Case, given: Inputs
) -> Callable[[], Sequence[Tensor]]:
    *variables, grad_out = given
    if not case.backward:
        return lambda: (function(*variables),)
    if not case.forward:
        done = function(*variables)
        return lambda: torch.autograd.grad(done, variables, grad_out, retain_graph=True)

    def forward_backward() -> Sequence[Tensor]:
        out = function(*variables)
        return (out.detach(), *torch.autograd.grad(out, variables, grad_out))

    return forward_backward


# Measuring --------------------------------------------------------------------------------------


class Measured(NamedTuple):
    result: Result
    page_faults: dict[str, float]  # per call; empty on a GPU

    def record(self) -> dict[str, Any]:
        result = self.result
        return {"case": result.case, "step": result.step, "shape": result.shape, **self.page_faults}


def run(case: Case, device: str, seconds: float) -> Measured:
    given = inputs(case, device)
    functions = {"ours": ours(case, given), case.peer: theirs(case, given)}
    computed = check(case, given, functions[case.peer])
    also, refused = other_kernels(
        backends.Call("dropout_add_layer_norm", device, case.dtype),
        lambda: ours(case, given),
        lambda _: check_agreement("other kernels", _with_a_seed(case, given), computed),
    )
    functions |= also
    ceiling = ceilings.copy_rate(device=device)
    timings = timing.alternate(functions, device=device, seconds=seconds)
    faults = {}
    if device == "cpu":
        faults = {name: page_faults(function) for name, function in functions.items()}
    result = Result(
        case=case.dropout,
        step=case.step,
        shape=case.size,
        ours=timings.pop("ours"),
        also={name: timings.pop(name) for name in also},
        peers=timings,
        refused=refused,
        work=moved(case),
        ceiling=ceiling,
        unit="B",
        at_least=case.at_least,
        at_least_fraction=case.at_least_fraction,
    )
    return Measured(result, faults)


def _with_a_seed(case: Case, given: Inputs) -> Sequence[Tensor]:
    torch.manual_seed(0)
    return ours(case, given)()


def check(case: Case, given: Inputs, peer: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
    """Check ours against the specification, which drops the same elements for the same seed.

    A peer that computes the same is checked too, but only without dropout: it drops other elements.

    Returns:
        Our results.

    Raises:
        AssertionError: results disagree.
    """
    computed = _with_a_seed(case, given)
    with trifuse.backend("eager"):
        check_agreement("the specification", computed, _with_a_seed(case, given))
    if case.peer != "torch.add" and not case.dropout_p:
        check_agreement(case.peer, computed, peer())
    return computed


def note(measured: Sequence[Measured]) -> str:
    """The pages of fresh memory that each call touches, whose faults are part of its time."""
    lines = ["pages of fresh memory touched by a call (4 KiB, or 2 MiB where the system has such):"]
    for result, faults in measured:
        counts = ", ".join(f"{count:,.0f} {name}" for name, count in faults.items())
        lines.append(f"  {result.case}, {result.step}, {result.shape}: {counts}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Run the cases and print the table."""
    options = command_line.parser("dropout_add_layer_norm", __doc__).parse_args(argv)
    device = options.device
    torch.set_num_threads(options.threads)
    cases = select(CASES[device], lambda case: case.name, options.cases)
    facts = machine.facts(device)
    console.print(machine.describe(facts), soft_wrap=True, markup=False)
    seconds = 0.6 if options.quick else 4.0

    def more(measured: Sequence[Measured]) -> dict[str, Any]:
        return {"page_faults": [one.record() for one in measured]} if device == "cpu" else {}

    with trifuse.backend(options.backend):
        measured, failed = run_all(
            cases,
            lambda case: case.name,
            lambda case: run(case, device, seconds),
            lambda some: report.save(options, facts, [one.result for one in some], more=more(some)),
        )
    results = [one.result for one in measured]
    name = "dropout_add_layer_norm"
    report.write(
        name, options, facts, results, more=more(measured), failed=failed, fastest_only=True
    )
    if device == "cpu":
        console.print(note(measured), style="dim", highlight=False, soft_wrap=True)
    return bool(failed)
