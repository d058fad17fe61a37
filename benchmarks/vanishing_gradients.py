"""Measuring how much of a gradient reaches earlier steps of an RNN, a GRU and an LSTM.

Each layer, freshly initialised, reads sequences of standard normal vectors. The command prints and
draws the norm of the Jacobian of the last state with respect to the state t steps before, relative
to that at t = 0, √(states). Below 1 gradients vanish, above 1 they explode (Bengio, Simard and
Frasconi, "Learning Long-Term Dependencies with Gradient Descent is Difficult", 1994; Pascanu,
Mikolov and Bengio, "On the Difficulty of Training Recurrent Neural Networks", 2013). The state is
h, in an LSTM h and c together.

The norm is that of the mean over a batch in float64, estimated along random directions. Each figure
is the geometric mean over seeds, and the factor by which the seeds spread (one standard deviation).
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor, nn

import trifuse
from trifuse.benchmarks import command_line, machine, pictures, report
from trifuse.benchmarks.cases import select
from trifuse.benchmarks.terminal import console, print_table, progress_bars
from trifuse.benchmarks.transformer import empty_table

LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "RNN, tanh": lambda H: trifuse.nn.RNN(H, H),
    "RNN, relu": lambda H: trifuse.nn.RNN(H, H, nonlinearity="relu"),
    "GRU": lambda H: trifuse.nn.GRU(H, H),
    "LSTM": lambda H: trifuse.nn.LSTM(H, H),
    "LSTM, forget bias 1": lambda H: trifuse.nn.LSTM(H, H, forget_bias=1.0),
    "LSTM, layer norm": lambda H: trifuse.nn.LSTM(H, H, layer_norm=True),
    "LSTM, layer norm, forget bias 1": lambda H: trifuse.nn.LSTM(
        H, H, layer_norm=True, forget_bias=1.0
    ),
}
SHOWN = (1, 3, 10, 30, 100)  # steps back, of the table


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    arguments = parse(argv)
    torch.set_num_threads(arguments.threads)
    chosen = select(list(LAYERS), str, arguments.cases)
    norms: dict[str, Tensor] = {}
    with progress_bars() as progress, trifuse.backend(arguments.backend):
        task = progress.add_task("gradients", total=len(chosen) * arguments.seeds)
        for name in chosen:
            rows = []
            for seed in range(arguments.seeds):
                rows.append(
                    jacobian_norms(LAYERS[name], arguments.hidden_size, arguments.steps, seed)
                )
                progress.advance(task)
            norms[name] = torch.stack(rows)
    facts = machine.facts()
    caption = (
        f"hidden size {arguments.hidden_size}, {arguments.seeds} seeds; {machine.describe(facts)}"
    )
    print_table(norms_table(norms, arguments.steps))
    console.print(caption, style="dim", markup=False)
    if arguments.json is not None:
        record = {name: values.tolist() for name, values in norms.items()}
        report.write_json(arguments.json, {"machine": facts, "norms": record})
    if arguments.plot is not None:
        plot(norms, caption, arguments.plot)
        console.print(f"wrote {arguments.plot}", markup=False)
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = command_line.parser("vanishing_gradients", __doc__, devices=("cpu",))
    command_line.add_count(parser, "--hidden-size", 64)
    command_line.add_count(parser, "--steps", 100)
    command_line.add_count(parser, "--seeds", 3, least=2)
    options = command_line.parse(parser, argv, Path("docs/vanishing_gradients.png"))
    if options.quick:
        options.steps, options.seeds = min(options.steps, 30), 2
    return options


def jacobian_norms(
    make: Callable[[int], nn.Module],
    hidden_size: int,
    steps: int,
    seed: int,
    batch: int = 16,
    directions: int = 8,
) -> Tensor:
    """The relative norms (steps + 1,) of ∂ last state / ∂ the state 0, 1, … ``steps`` before."""
    torch.manual_seed(seed)
    layer = make(hidden_size).double()
    # One more step, because at the zeros before the first step a layer norm's Jacobian is 1 / √eps
    # times as large.
    x = torch.randn(steps + 1, batch, hidden_size, dtype=torch.float64)
    states: list[tuple[Tensor, ...]] = []
    parts = 2 if isinstance(layer, trifuse.nn.LSTM) else 1
    zeros = x.new_zeros(1, batch, hidden_size)
    state = tuple(zeros.clone().requires_grad_() for _ in range(parts))
    for x_t in x:
        _, last = layer(x_t[None], state if parts == 2 else state[0])
        state = tuple(last) if parts == 2 else (last,)
        states.append(state)
    # E|Jᵀ v|² over standard normal v is the square of J's Frobenius norm.
    flat = list(itertools.chain.from_iterable(states))
    squares = x.new_zeros(len(states))
    for _ in range(directions):
        seeds = [torch.randn_like(part) for part in state]
        grads = torch.autograd.grad(state, flat, seeds, retain_graph=True, allow_unused=True)
        for place, grad in enumerate(grads):
            if grad is not None:
                squares[place // parts] += grad.square().sum()
    return (squares.flip(0) / (directions * batch * parts * hidden_size)).sqrt()


def norms_table(norms: dict[str, Tensor], steps: int) -> Table:
    shown = [t for t in SHOWN if t <= steps]
    table = empty_table(
        "norm of ∂ last state / ∂ state t steps before", [f"t = {t}" for t in shown]
    )
    for name, values in norms.items():
        table.add_row(name, *(described(values[:, t]) for t in shown))
    return table


def described(values: Tensor) -> str:
    """The geometric mean and the factor of one standard deviation."""
    if (values == 0).any():
        return "0"
    logs = values.log()
    return f"{logs.mean().exp():.1e} ×/÷ {logs.std().exp():.1f}"


def plot(norms: dict[str, Tensor], caption: str, path: Path) -> None:
    """Draw the norms over the steps back, a line a layer, with the seeds' spread."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    figure.suptitle(
        "what reaches a state t steps before", x=0.01, ha="left", fontsize=11, fontweight="bold"
    )
    pictures.add_caption(figure, caption)
    for name, values in norms.items():
        logs = values.clamp_min(torch.finfo(torch.float64).tiny).log()
        mean, spread = logs.mean(0), logs.std(0)
        (line,) = axes.plot(mean.exp().tolist(), label=name, linewidth=1.6)
        band = ((mean - spread).exp().tolist(), (mean + spread).exp().tolist())
        axes.fill_between(range(len(mean)), *band, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.axhline(1.0, color="#999999", linewidth=0.8)
    axes.set_yscale("log")
    axes.set_ylim(bottom=max(axes.get_ylim()[0], 1e-20))
    axes.set_xlabel("steps back, t", fontsize=8)
    axes.set_ylabel("relative norm of the Jacobian", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7.5, frameon=False)
    pictures.save(figure, path)
