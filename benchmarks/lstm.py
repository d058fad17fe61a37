"""LSTM layers against nn.LSTM, and against the loop a user writes for what nn.LSTM does not have.

Each case is one layer or several over whole sequences. nn.LSTM gets ragged sequences as a
PackedSequence, packed outside the timed call. It has neither clips nor layer normalisation: as the
peer of a clipped cell it is timed without clips, and ours with them. The eager loop has everything;
its input is multiplied by W_ih in one product for all steps. A single step has nn.LSTMCell or
nn.LSTM as its peer.

Rates count the products that the valid steps need: 2 (4·H (I + R) + R·H) operations per token
forward (without a projection no R·H), and twice as many more backward. On a CPU the forward of one
sequence and a single step are bound by reading weights instead: each step reads W_hh, and a single
step also W_ih; its backward reads them again and writes gradients of the same size. The ceiling is
then the rate at which that many bytes are read repeatedly.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import trifuse
from trifuse import backends
from trifuse.benchmarks import ceilings, command_line, machine, report, timing
from trifuse.benchmarks.agreement import check_accuracy, check_agreement
from trifuse.benchmarks.cases import run_all, select
from trifuse.benchmarks.ceilings import Rate
from trifuse.benchmarks.comparison import Result
from trifuse.benchmarks.other_kernels import other_kernels
from trifuse.benchmarks.terminal import console
from trifuse.ops.lstm import Parameters, layer
from trifuse.ops.lstm_stack import stack, why_not_stacked

# Cases ------------------------------------------------------------------------------------------

Peer = Literal["nn.LSTM", "eager loop", "nn.LSTMCell"]


@dataclass(frozen=True)
class Case:
    """One row.

    ``at_least`` is a target for the peer's time over ours, ``at_least_fraction`` for our fraction
    of the ceiling.
    """

    what: str
    shape: tuple[int, int, int, int]  # T, B, input size I, H
    dtype: torch.dtype
    backward: bool
    peer: Peer
    at_least: float | None = None
    projection: int = 0
    clip: float | None = None  # of the cell and of the projection
    norm: bool = False
    ragged: bool = False  # lengths from 1 to T - 1, half of T on average
    bidirectional: bool = False
    layers: int = 1
    at_least_fraction: float | None = None

    @property
    def name(self) -> str:
        return f"{self.what}, {self.step}, {self.size}, {self.peer}"

    @property
    def step(self) -> str:
        return "forward + backward" if self.backward else "forward"

    @property
    def size(self) -> str:
        dtype = {_FP64: "fp64", _FP32: "fp32", _BF16: "bf16"}[self.dtype]
        T, B, features, H = self.shape
        projection = f", projection {self.projection}" if self.projection else ""
        return f"{dtype}, T {T}, B {B}, in {features}, cell {H}{projection}"

    @property
    def lengths(self) -> list[int]:
        T, B, _, _ = self.shape
        if not self.ragged:
            return [T] * B
        return torch.linspace(1, T - 1, B).round().int().tolist()

    @property
    def hidden(self) -> int:
        return self.projection or self.shape[3]


_FP64, _FP32, _BF16 = torch.float64, torch.float32, torch.bfloat16
_LSTM: Peer = "nn.LSTM"
_LOOP: Peer = "eager loop"
_CELL: Peer = "nn.LSTMCell"


def _elmo(
    B: int,
    dtype: torch.dtype,
    backward: bool,
    peer: Peer,
    at_least: float | None,
    at_least_fraction: float | None = None,
) -> Case:  # the published cell
    return Case(
        "ELMo's cell",
        (20, B, 512, 4096),
        dtype,
        backward,
        peer,
        at_least,
        projection=512,
        clip=3.0,
        at_least_fraction=at_least_fraction,
    )


CASES: dict[str, tuple[Case, ...]] = {
    "cpu": (
        _elmo(16, _FP32, True, _LSTM, 4.0),
        _elmo(16, _FP32, True, _LOOP, 6.0),
        _elmo(1, _FP32, True, _LSTM, 6.0),
        _elmo(1, _FP32, True, _LOOP, 10.0),
        _elmo(16, _BF16, False, _LSTM, 2.0, 0.85),
        Case(
            "projection",
            (64, 16, 512, 512),
            _FP32,
            True,
            _LSTM,
            3.0,
            projection=128,
            at_least_fraction=0.85,
        ),
        Case("ragged", (64, 16, 512, 512), _FP32, True, _LSTM, 3.0, ragged=True),
        Case(
            "two directions, ragged",
            (64, 8, 256, 256),
            _FP32,
            True,
            _LSTM,
            3.0,
            ragged=True,
            bidirectional=True,
        ),
        Case("dense", (64, 32, 512, 512), _FP32, True, _LSTM, 1.2, at_least_fraction=0.85),
        Case("dense", (64, 32, 512, 512), _BF16, True, _LSTM, 1.4),
        Case("dense", (64, 8, 1024, 1024), _BF16, True, _LSTM, 2.0),
        Case(
            "layer norm",
            (64, 16, 512, 512),
            _FP32,
            True,
            _LOOP,
            6.0,
            norm=True,
            at_least_fraction=0.85,
        ),
        Case("one sequence", (64, 1, 512, 512), _FP32, False, _LSTM, 1.0),
        Case("one step", (1, 1, 64, 64), _FP32, False, _CELL, 1.0),
        Case("one step", (1, 1, 512, 512), _FP32, False, _CELL, 1.0),
        Case("one step", (1, 1, 64, 64), _FP32, True, _CELL, 1.0),
        Case("one step", (1, 1, 512, 512), _FP32, True, _CELL, 1.0),
        Case("one step", (1, 1, 64, 64), _FP32, False, _LSTM, 1.0, projection=16),
        Case("one step", (1, 1, 256, 256), _FP32, True, _LSTM, 1.0, projection=64),
        Case("one step", (1, 1, 256, 256), _FP64, False, _LSTM, 1.0),
        Case("one step", (1, 1, 256, 256), _FP64, True, _LSTM, 1.0),
    ),
    "cuda": (
        Case(
            "two directions, two layers",
            (512, 16, 1024, 1024),
            _BF16,
            True,
            _LSTM,
            2.0,
            bidirectional=True,
            layers=2,
        ),
        Case("two layers", (512, 16, 1024, 1024), _BF16, True, _LSTM, layers=2),
        Case("ragged", (512, 32, 1024, 1024), _BF16, True, _LSTM, 3.0, ragged=True),
        _elmo(16, _BF16, True, _LSTM, 2.0),
        _elmo(16, _BF16, True, _LOOP, None),
        Case("dense", (512, 16, 1024, 1024), _BF16, False, _LSTM),
        Case("dense", (128, 16, 2048, 2048), _BF16, True, _LSTM),
        Case("layer norm", (64, 16, 512, 512), _BF16, True, _LOOP, norm=True),
    ),
}


def flops(case: Case) -> float:
    """Operations of the products that the valid steps need."""
    _, _, features, H = case.shape
    directions = 2 if case.bidirectional else 1
    inputs = features + (case.layers - 1) * directions * case.hidden  # of all layers
    token = 4 * H * (inputs + case.layers * case.hidden) + case.layers * case.projection * H
    return 2.0 * sum(case.lengths) * directions * token * (3 if case.backward else 1)


def weight_bytes(case: Case) -> int:
    """Bytes that every step reads: W_hh, the projection's weight and, for a single step, W_ih."""
    T, _, features, H = case.shape
    columns = case.hidden + (features if T == 1 else 0)
    return (4 * H * columns + case.projection * H) * case.dtype.itemsize


# Calls ------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    input: Tensor  # (T, B, I)
    lengths: Tensor | None  # (B,)
    module: nn.LSTM  # holds the weights that all compared functions use
    norms: tuple[Tensor, ...]  # a weight each for W_ih x, W_hh h and the cell, the cell's bias
    grad_output: Tensor  # (T, B, D·R)

    @property
    def variables(self) -> list[Tensor]:
        return [self.input, *self.module.parameters(), *self.norms]


def inputs(case: Case, device: str) -> Inputs:
    T, B, features, H = case.shape
    torch.manual_seed(0)
    module = nn.LSTM(
        features, H, case.layers, proj_size=case.projection, bidirectional=case.bidirectional
    )
    module = module.to(device, case.dtype).requires_grad_(case.backward)
    norms: tuple[Tensor, ...] = ()
    if case.norm:
        sizes, fills = (4 * H, 4 * H, H, H), (1.0, 1.0, 1.0, 0.0)
        norms = tuple(
            torch.full((size,), fill, dtype=case.dtype, device=device, requires_grad=case.backward)
            for size, fill in zip(sizes, fills, strict=True)
        )
    width = case.hidden * (2 if case.bidirectional else 1)
    lengths = torch.tensor(case.lengths, device=device) if case.ragged else None
    given: dict[str, Any] = {"dtype": case.dtype, "device": device}
    grad_output = torch.randn(T, B, width, **given)
    if lengths is not None:
        grad_output[torch.arange(T, device=device)[:, None] >= lengths] = 0
    x = torch.randn(T, B, features, requires_grad=case.backward, **given)
    return Inputs(x, lengths, module, norms, grad_output)


def _weights(module: nn.LSTM, of_layer: int = 0, reverse: bool = False) -> Any:
    """weight_ih, weight_hh, bias_ih, bias_hh, and weight_hr or None."""
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
    suffix = f"_l{of_layer}" + ("_reverse" if reverse else "")
    return tuple(getattr(module, name + suffix, None) for name in names)


def ours(case: Case, given: Inputs, together: bool = True) -> Callable[[], Sequence[Tensor]]:
    """Return a step, which returns the output, and with ``case.backward`` the gradients.

    With ``together``, stacked layers are a single call where that is possible.
    """
    if case.peer == "nn.LSTMCell":
        return _cell(trifuse.nn.LSTMCell, case, given)
    reverse = (False, True)[: 1 + case.bidirectional]
    norms = given.norms or (None,) * 4
    parameters = [
        [Parameters._make([*_weights(given.module, i, r), None, *norms]) for r in reverse]
        for i in range(case.layers)
    ]
    clips: dict[str, Any] = {}
    if case.clip is not None:
        clips = {"cell_clip": case.clip, "proj_clip": case.clip}

    together = together and case.layers > 1 and not case.bidirectional

    def output() -> Tensor:
        x = given.input
        if together and why_not_stacked(x) is None:
            forward = [of_layer[0] for of_layer in parameters]
            return stack(x, None, None, forward, given.lengths, **clips)[0]
        for of_layer in parameters:
            x, _, _ = layer(x, None, None, of_layer, given.lengths, reverse=reverse, **clips)
        return x

    return _step(output, given)


def theirs(case: Case, given: Inputs) -> Callable[[], Sequence[Tensor]]:
    """As :func:`ours`, by the peer."""
    if case.peer == "eager loop":
        return _step(functools.partial(_loop, case, given), given)
    if case.peer == "nn.LSTMCell":
        return _cell(nn.LSTMCell, case, given)
    if given.lengths is None:
        return _step(lambda: given.module(given.input)[0], given)
    T = case.shape[0]
    lengths = given.lengths.cpu()
    packed = pack_padded_sequence(given.input.detach(), lengths, enforce_sorted=False)
    data = packed.data.requires_grad_(case.backward)

    def output() -> Tensor:
        sequence = PackedSequence(
            data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices
        )
        return pad_packed_sequence(given.module(sequence)[0], total_length=T)[0]

    return _step(output, given, variables=[data, *given.module.parameters()])


def _cell(module: type[nn.LSTMCell], case: Case, given: Inputs) -> Callable[[], Sequence[Tensor]]:
    """One step of a cell from fixed states."""
    _, B, features, H = case.shape
    cell = module(features, H)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        setattr(cell, name, getattr(given.module, f"{name}_l0"))
    state = torch.ones(B, H)
    return _step(lambda: cell(given.input[0], (state, state))[0][None], given)


def _loop(case: Case, given: Inputs) -> Tensor:
    """One layer in one direction, step by step."""
    T, B, _, H = case.shape
    x, norms = given.input, given.norms
    weight_ih, weight_hh, bias_ih, bias_hh, weight_hr = _weights(given.module)
    from_input = F.linear(x, weight_ih)
    if norms:
        from_input = F.layer_norm(from_input, (4 * H,), norms[0])
    from_input = from_input + (bias_ih + bias_hh)
    h = x.new_zeros(B, case.hidden)
    c = x.new_zeros(B, H)
    outputs = []
    for t in range(T):
        from_hidden = F.linear(h, weight_hh)
        if norms:
            from_hidden = F.layer_norm(from_hidden, (4 * H,), norms[1])
        i, f, g, o = (from_input[t] + from_hidden).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        if case.clip is not None:
            c = c.clamp(-case.clip, case.clip)
        seen = F.layer_norm(c, (H,), norms[2], norms[3]) if norms else c
        h = o.sigmoid() * seen.tanh()
        if weight_hr is not None:
            h = F.linear(h, weight_hr)
            if case.clip is not None:
                h = h.clamp(-case.clip, case.clip)
        outputs.append(h)
    return torch.stack(outputs)


def _step(
    output: Callable[[], Tensor], given: Inputs, variables: Sequence[Tensor] | None = None
) -> Callable[[], Sequence[Tensor]]:
    wanted = given.variables if variables is None else variables
    return step(output, wanted, given.grad_output, given.input.requires_grad)


def step(
    output: Callable[[], Tensor], variables: Sequence[Tensor], grad_output: Tensor, backward: bool
) -> Callable[[], Sequence[Tensor]]:
    """Return a function of the output, and with ``backward`` of the gradients of ``variables``."""

    def forward() -> Sequence[Tensor]:
        with torch.no_grad():
            return (output(),)

    def forward_backward() -> Sequence[Tensor]:
        y = output()
        return (y.detach(), *torch.autograd.grad(y, variables, grad_output))

    return forward_backward if backward else forward


# Measuring --------------------------------------------------------------------------------------


def read_rate(size: int, *, seconds: float = 0.2) -> Rate:
    """Bytes/s of reading ``size`` bytes repeatedly, on every thread."""
    source = torch.ones(size // 4)
    times = timing.alternate({"sum": source.sum}, seconds=seconds)["sum"]
    return Rate(source.nbytes / min(times.seconds), f"Tensor.sum of {size / 2**20:.0f} MiB")


def checker(case: Case, given: Inputs) -> Callable[[], None]:
    """Return a function that checks ours, by the kernels in force, against the peer.

    Both run without clips if the peer has none. In 16 bits rounding errors add up over the steps,
    so both are compared with the formula in float64. The function raises AssertionError if ours is
    wrong.
    """
    if case.peer == "nn.LSTM":
        case = replace(case, clip=None)

    def compared(results: Sequence[Tensor]) -> Sequence[Tensor]:
        # The peer's gradient of a ragged input is packed, so it is left out.
        return (results[0], *results[2:]) if case.ragged and case.backward else results

    expected = compared(theirs(case, given)())
    exact: Sequence[Tensor] | None = None
    if case.dtype not in (_FP64, _FP32):
        with trifuse.backend("eager"):
            exact = compared(ours(case, _in_float64(given))())

    def check() -> None:
        results = compared(ours(case, given)())
        if exact is None:
            check_agreement(case.peer, results, expected)
        else:
            check_accuracy(case.peer, results, expected, exact)

    return check


def _in_float64(given: Inputs) -> Inputs:
    def wide(t: Tensor) -> Tensor:
        return t.detach().double().requires_grad_(t.requires_grad)

    return Inputs(
        wide(given.input),
        given.lengths,
        copy.deepcopy(given.module).double(),
        tuple(map(wide, given.norms)),
        given.grad_output.double(),
    )


def run(case: Case, device: str, seconds: float) -> Result:
    given = inputs(case, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # oneDNN does not serve projections
        check = checker(case, given)
        check()
        functions = {"ours": ours(case, given), case.peer: theirs(case, given)}
        apart = {("cuda", "layer after layer"): lambda: ours(case, given, together=False)}
        also, refused = other_kernels(
            backends.Call("lstm", device, case.dtype),
            lambda: ours(case, given),
            lambda _: check(),
            apart if case.layers > 1 and not case.bidirectional else None,
        )
        functions |= also
        T, B, _, _ = case.shape
        bound_by_memory = B == 1 and (T == 1 or not case.backward) and device == "cpu"
        if bound_by_memory:
            ceiling = read_rate(weight_bytes(case))
            work = float(weight_bytes(case) * T * (3 if case.backward else 1))
        else:
            ceiling, work = ceilings.matrix_rate(case.dtype, device=device), flops(case)
        timings = timing.alternate(functions, device=device, seconds=seconds)
    return Result(
        case=case.what,
        step=case.step,
        shape=case.size,
        ours=timings.pop("ours"),
        also={name: timings.pop(name) for name in also},
        peers=timings,
        refused=refused,
        work=work,
        ceiling=ceiling,
        unit="B" if bound_by_memory else "FLOP",
        at_least=case.at_least,
        at_least_fraction=case.at_least_fraction,
    )


class Named(Protocol):
    @property
    def name(self) -> str: ...


AnyCase = TypeVar("AnyCase", bound=Named)


def run_command(
    name: str,
    title: str,
    description: str | None,
    cases: Mapping[str, Sequence[AnyCase]],
    run: Callable[[AnyCase, str, float], Result],
    argv: Sequence[str],
) -> int:
    """Run a benchmark of layers: its cases for the device, then the table.

    Args:
        name: the command's.
        title: the table's.
        description: the module's docstring, for ``--help``.
        cases: by device; each has a ``name``.
        run: times one case on a device, for so many seconds.
        argv: the command's arguments.

    Returns:
        The exit status: 1 if a case failed.
    """
    options = command_line.parser(name, description).parse_args(argv)
    torch.set_num_threads(options.threads)
    device: str = options.device
    chosen = select(cases[device], lambda case: case.name, options.cases)
    facts = machine.facts(device)
    console.print(machine.describe(facts), soft_wrap=True, markup=False)
    seconds = 0.6 if options.quick else 4.0
    with trifuse.backend(options.backend):
        results, failed = run_all(
            chosen,
            lambda case: case.name,
            lambda case: run(case, device, seconds),
            lambda some: report.save(options, facts, some),
        )
    report.write(title, options, facts, results, failed=failed, fastest_only=True)
    return bool(failed)


def main(argv: Sequence[str]) -> int:
    """Run the cases and print the table."""
    return run_command("lstm", "lstm", __doc__, CASES, run, argv)
