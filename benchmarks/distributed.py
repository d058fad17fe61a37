"""Training by several processes: DDP, FSDP2, tensor and context parallelism.

Each process has one thread, and gloo connects them. A step is a forward and a backward of
transformers' BERT, or of causal attention alone on sequences of growing length, fused and with
torch's attention. Two processes take turns with one process on the whole batch. The waiting time of
a process is the time in which its main thread did not compute, because it waited for other
processes and their data. The time without waiting is compared with half of one process's time.

Bytes that a process sends and its peak memory are also measured for four processes, whose times on
two cores would mean nothing. The table also shows the least number of bytes that the method must
send, and the collectives of a step.
"""

from __future__ import annotations

import fnmatch
import functools
import gc
import multiprocessing
import os
import socket
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import BertConfig, BertModel

import trifuse
from trifuse.benchmarks import command_line, engines, machine, memory, report
from trifuse.benchmarks.terminal import console, print_table, progress_bars
from trifuse.benchmarks.timing import Timing
from trifuse.distributed import ring_attention, shard_sequence

TIMED, COUNTED = 2, (1, 2, 4)  # numbers of processes
AT_LEAST = 0.85  # of linear, without waiting
NAMES = ("ours", "torch")

# Cases ------------------------------------------------------------------------------------------

Step = Callable[[], Tensor]  # returns the loss of this process


class Case(NamedTuple):
    """A kind of parallelism on given sizes.

    ``make`` returns a step of this process: its part of a step of all processes in the mesh or,
    without a mesh, the step of one process on the whole batch. Its second argument selects ours.
    ``join`` makes the loss of one process from the sum of the processes' losses and their number.
    """

    name: str
    shape: str
    tokens: int  # of a step of all processes
    make: Callable[[DeviceMesh | None, bool], Step]
    join: Callable[[Tensor, int], Tensor]
    least: Callable[[int], float]  # bytes that each of so many processes sends in a step


class Model(NamedTuple):
    """A BERT and its batch."""

    layers: int
    heads: int
    width: int
    batch: int
    length: int

    def config(self) -> BertConfig:
        return BertConfig(
            vocab_size=1000,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=4 * self.width,
            max_position_embeddings=self.length,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation="sdpa",
        )

    def __str__(self) -> str:
        return f"{self.layers} layers of {self.width}, batch {self.batch}×{self.length}"


SMALL = Model(layers=4, heads=8, width=512, batch=8, length=128)
TINY = Model(layers=2, heads=4, width=64, batch=4, length=16)
HEADS, HEAD_DIM = 8, 64
LENGTHS = (1024, 2048, 4096)
TINY_LENGTHS = (64, 128)
METHODS = ("ring", "all_gather", "all_to_all")


def cases(quick: bool) -> list[Case]:
    """The cases; ``quick`` ones are tiny."""
    model = TINY if quick else SMALL
    tokens = model.batch * model.length
    with torch.device("meta"):
        weights = 4 * sum(p.numel() for p in _bert(model, False).parameters())
    activations = 4 * tokens * model.width
    found = [
        # An all-reduce sends each byte twice, except this process's share.
        Case(
            "DDP",
            str(model),
            tokens,
            functools.partial(_ddp, model),
            torch.div,
            lambda n: 2 * weights * _others(n),
        ),
        # Parameters are gathered for the forward and the backward; gradients are scattered.
        Case(
            "FSDP2",
            str(model),
            tokens,
            functools.partial(_fsdp, model),
            torch.div,
            lambda n: 3 * weights * _others(n),
        ),
        # Each layer sums two results over the processes, and two gradients.
        Case(
            "TP",
            str(model),
            tokens,
            functools.partial(_tensor_parallel, model),
            torch.div,
            lambda n: 4 * model.layers * 2 * activations * _others(n),
        ),
    ]
    lengths = TINY_LENGTHS if quick else LENGTHS
    for L in lengths:
        for method in METHODS if lengths[-1] == L else ("ring",):
            part = 4 * HEADS * L * HEAD_DIM  # bytes of the keys of a whole sequence
            least = {
                # Keys and values in the forward and the backward, and their gradients.
                "ring": lambda n, part=part: 6 * part * _others(n),
                "all_gather": lambda n, part=part: 6 * part * _others(n),
                # Queries, keys, values and the output, and their gradients.
                "all_to_all": lambda n, part=part: 8 * part / n * _others(n),
            }[method]
            shape = f"causal, {HEADS} heads of {HEAD_DIM}, length {L}"
            found.append(
                Case(
                    f"CP {method}",
                    shape,
                    L,
                    functools.partial(_context_parallel, L, method),
                    _sum,
                    least,
                )
            )
    return found


def _sum(total: Tensor, n: int) -> Tensor:
    return total


def _others(n: int) -> float:
    """The share of all bytes that is not a process's own."""
    return (n - 1) / n


def _bert(model: Model, ours: bool) -> Any:
    torch.manual_seed(0)
    with engines.quiet_transformers():
        bert = BertModel(model.config(), add_pooling_layer=False)
    if ours:
        trifuse.fuse(bert)
    return bert


def _step(bert: nn.Module, ids: Tensor) -> Step:
    def step() -> Tensor:
        bert.zero_grad()
        loss: Tensor = bert(ids)[0].square().mean()
        loss.backward()
        return loss.detach()

    return step


def _batch(model: Model) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(1000, (model.batch, model.length))


def _ddp(model: Model, mesh: DeviceMesh | None, ours: bool) -> Step:
    bert, ids = _bert(model, ours), _batch(model)
    if mesh is None:
        return _step(bert, ids)
    part = ids.chunk(mesh.size())[mesh.get_local_rank()]
    return _step(nn.parallel.DistributedDataParallel(bert), part)


def _fsdp(model: Model, mesh: DeviceMesh | None, ours: bool) -> Step:
    from torch.distributed.fsdp import fully_shard

    bert, ids = _bert(model, ours), _batch(model)
    if mesh is None:
        return _step(bert, ids)
    for layer in bert.encoder.layer:
        fully_shard(layer, mesh=mesh)
    fully_shard(bert, mesh=mesh)
    return _step(bert, ids.chunk(mesh.size())[mesh.get_local_rank()])


def _tensor_parallel(model: Model, mesh: DeviceMesh | None, ours: bool) -> Step:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    bert, ids = _bert(model, ours), _batch(model)
    if mesh is not None:
        for layer in bert.encoder.layer:
            plan: dict[str, Any] = {
                f"attention.self.{name}": ColwiseParallel() for name in ("query", "key", "value")
            }
            plan |= {"attention.output.dense": RowwiseParallel(), "output.dense": RowwiseParallel()}
            plan["intermediate.dense"] = ColwiseParallel()
            parallelize_module(layer, mesh, plan)
    return _step(bert, ids)


def _context_parallel(L: int, method: Any, mesh: DeviceMesh | None, ours: bool) -> Step:
    torch.manual_seed(1)
    tensors = [torch.randn(1, HEADS, L, HEAD_DIM) for _ in range(3)]
    if mesh is not None:
        tensors = [shard_sequence(t, mesh, 2, balanced=ours) for t in tensors]
    for t in tensors:
        t.requires_grad_()
    if mesh is None:
        attention: Any = F.scaled_dot_product_attention
        if ours:
            attention = trifuse.scaled_dot_product_attention
        call: Callable[..., Any] = functools.partial(attention, is_causal=True)
    elif ours:
        call = functools.partial(
            ring_attention, mesh=mesh, method=method, balanced=True, is_causal=True
        )
    else:
        call = functools.partial(_gathered_attention, mesh)

    def step() -> Tensor:
        loss: Tensor = call(*tensors).square().sum()
        torch.autograd.grad(loss, tensors)
        return loss.detach()

    return step


def _gathered_attention(mesh: DeviceMesh, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of this process's rows as torch has it for CPUs: all keys, and a mask."""
    gather = getattr(collectives, "all_gather_single_autograd", None)  # the name since torch 2.13
    gather = gather or collectives.all_gather_tensor_autograd
    key, value = (gather(t, 2, mesh.get_group()) for t in (key, value))
    rows, first = query.shape[2], mesh.get_local_rank() * query.shape[2]
    mask = torch.ones(rows, key.shape[2], dtype=torch.bool).tril(first)
    return F.scaled_dot_product_attention(query, key, value, mask)


# A process --------------------------------------------------------------------------------------


class Turn(NamedTuple):
    """A step of one process, in seconds."""

    wall: float
    computed: float  # by the main thread


def _join(rank: int, size: int, folder: Path) -> DeviceMesh:
    gc.freeze()  # collections leave out what the imports made, whose pages processes share
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    limit = timedelta(minutes=3)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    return init_device_mesh("cpu", (size,))


def _leave(steps: list[Step] | dict[str, Step]) -> None:
    """Frees the models, and only then their process group.

    DDP's reducer holds the interpreter's lock while it frees a group that it is the last to own. It
    waits for the group's threads, which wait for the lock if they hold a dispatch mode.
    """
    steps.clear()
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def _time(
    rank: int, size: int, folder: Path, quick: bool, index: int, rounds: int
) -> dict[str, list[Turn]]:
    """Times steps in turns; those of one process alone run in the first, and the others wait."""
    mesh, case = _join(rank, size, folder), cases(quick)[index]
    steps = {name: case.make(mesh, name == "ours") for name in NAMES}
    for name in NAMES:
        if rank == 0:
            steps[f"{name} alone"] = case.make(None, name == "ours")
        loss = steps[name]()
        dist.all_reduce(loss)
        if rank == 0:
            alone = steps[f"{name} alone"]()
            torch.testing.assert_close(case.join(loss, size), alone, rtol=1e-4, atol=0)
    names = [*NAMES, *(f"{name} alone" for name in NAMES)]
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    for r in range(-1, rounds):  # the first round warms up
        first = r % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            if name not in steps:
                continue
            wall, computed = time.perf_counter(), time.thread_time()
            steps[name]()
            turn = Turn(time.perf_counter() - wall, time.thread_time() - computed)
            if r >= 0:
                turns[name].append(turn)
    _leave(steps)
    return turns


class Collective(NamedTuple):
    """The calls of a collective in a step."""

    calls: int = 0
    bytes: int = 0  # of the tensors that it reads and writes


class Counts(NamedTuple):
    """The bytes that a process sends and holds in a step, and the collectives that it calls."""

    sent: int  # bytes
    peak: int  # bytes of the model and its steps
    collectives: Mapping[str, Collective]


def _count(rank: int, size: int, folder: Path, quick: bool, index: int, ours: bool) -> Counts:
    """Counts what a step sends, holds and calls."""
    mesh: DeviceMesh | None = _join(rank, size, folder)
    if size == 1:
        mesh = None
    # A small model first, so that what the first step loads and allocates once does not count.
    cases(True)[min(index, len(cases(True)) - 1)].make(mesh, ours)()
    steps: list[Step] = []

    def train() -> None:
        steps.append(cases(quick)[index].make(mesh, ours))
        steps[0]()
        steps[0]()

    peak = memory.peak_here(train)
    dist.barrier()
    before = sent_bytes()
    steps[0]()
    dist.barrier()
    sent = sent_bytes() - before
    with _Collectives() as called:
        steps[0]()
    _leave(steps)
    return Counts(sent, peak, called.found)


class _Collectives(TorchDispatchMode):
    """Counts the collectives that are called while it is active, by kind.

    A kind is a part of an op's name. Barriers, waiting and the receiving side are left out.
    """

    KINDS = ("reduce_scatter", "gather", "alltoall", "all_to_all", "reduce", "broadcast", "send")

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Collective] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            name = function._schema.name.split("::")[1]
            kind = next((kind for kind in self.KINDS if kind in name), None)
            if kind is not None:
                calls, read = self.found.get(kind, Collective())
                tensors = (t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))
                self.found[kind] = Collective(calls + 1, read + sum(t.nbytes for t in tensors))
        return function(*args, **(kwargs or {}))


def sent_bytes() -> int:
    """The bytes that the peers of this process's connections have received from it."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            connection = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:  # no socket, or closed meanwhile
            continue
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and (
                connection.type == socket.SOCK_STREAM
            ):
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("<Q", info, _BYTES_ACKED)[0]
    return total


_BYTES_ACKED = 120  # the offset of tcpi_bytes_acked in Linux's struct tcp_info


def _together(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Calls a function in ``size`` new processes; returns their results.

    They are forked from one process that has only imported this module, because the import takes
    long.
    """
    fork = multiprocessing.get_context("forkserver")
    fork.set_forkserver_preload([__name__])
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(size, fork) as pool:
        jobs = [pool.submit(function, r, size, Path(folder), *arguments) for r in range(size)]
        return [job.result() for job in jobs]


# The comparison ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The figures of a case in a number of processes; times only for two processes.

    Attributes:
        alone: times of one process on the whole batch, by name: "ours" and "torch".
        together: times of the slowest process.
        computed: the computing times of the process that computes longest.
        sent: bytes that a process sends in a step, the most of all processes.
        least: bytes that it must send.
        memory: peak bytes of the model and its steps, the most of all processes.
        collectives: those of a step of the first process, by name and kind.
    """

    case: str
    shape: str
    processes: int
    tokens: int
    sent: Mapping[str, int]
    least: float
    memory: Mapping[str, int]
    collectives: Mapping[str, Mapping[str, Collective]]
    alone: Mapping[str, Timing] | None = None
    together: Mapping[str, Timing] | None = None
    computed: Mapping[str, Timing] | None = None

    def tokens_per_second(self, name: str) -> float | None:
        times = self.together if self.processes > 1 else self.alone
        return None if times is None else self.tokens / times[name].median

    def of_linear(self, name: str) -> float | None:
        """One process's time over that of all processes together, without waiting."""
        if self.alone is None or self.computed is None:
            return None
        ratios = self.computed[name].ratios(self.alone[name])
        return statistics.median(ratios) / self.processes

    def waiting(self, name: str) -> float | None:
        """Seconds of a step in which the process that computes longest waited."""
        if self.together is None or self.computed is None:
            return None
        return self.together[name].over(self.computed[name])

    def added(self, name: str) -> float | None:
        """Seconds of a step that the same process computes beyond its share of one process's."""
        if self.alone is None or self.computed is None:
            return None
        pairs = zip(self.computed[name].seconds, self.alone[name].seconds, strict=True)
        return statistics.median(ours - whole / self.processes for ours, whole in pairs)

    @property
    def met(self) -> bool | None:
        share = self.of_linear("ours")
        return None if share is None else share >= AT_LEAST

    def record(self) -> dict[str, Any]:
        """The entry for the JSON file, in seconds and bytes."""
        per_name = {
            name: {
                "tokens_per_second": self.tokens_per_second(name),
                "of_linear": self.of_linear(name),
                "added": self.added(name),
                "waiting": self.waiting(name),
                "sent": self.sent[name],
                "memory": self.memory[name],
                "collectives": {
                    kind: each._asdict() for kind, each in self.collectives[name].items()
                },
            }
            for name in NAMES
        }
        return {
            "case": self.case,
            "shape": self.shape,
            "processes": self.processes,
            "tokens": self.tokens,
            "least_sent": self.least,
            "at_least_of_linear": AT_LEAST,
            "met": self.met,
            **per_name,
        }


def compare(index: int, quick: bool, rounds: int) -> list[Outcome]:
    """Measures a case in one, two and four processes."""
    case = cases(quick)[index]
    found = _together(TIMED, _time, quick, index, rounds)
    alone, together, computed = {}, {}, {}
    for name in NAMES:
        every = list(zip(*(turns[name] for turns in found), strict=True))
        alone[name] = Timing(tuple(turn.wall for turn in found[0][f"{name} alone"]))
        together[name] = Timing(tuple(max(t.wall for t in each) for each in every))
        computed[name] = Timing(tuple(max(t.computed for t in each) for each in every))
    outcomes = []
    for size in COUNTED:
        counts = {name: _together(size, _count, quick, index, name == "ours") for name in NAMES}
        outcomes.append(
            Outcome(
                case.name,
                case.shape,
                size,
                case.tokens,
                {name: max(c.sent for c in each) for name, each in counts.items()},
                case.least(size),
                {name: max(c.peak for c in each) for name, each in counts.items()},
                {name: each[0].collectives for name, each in counts.items()},
                alone if size <= TIMED else None,
                together if size == TIMED else None,
                computed if size == TIMED else None,
            )
        )
    return outcomes


def table(outcomes: Sequence[Outcome]) -> Table:
    """A row for each number of processes: ours, and torch's below."""
    out = Table(title="training by several processes of one thread each: ours / torch's")
    columns = ("case", "processes", "tokens/s", "of linear*", "at least", "added*", "waiting*")
    for column in (*columns, "MB sent", "least", "MiB held", "collectives*"):
        out.add_column(column, justify="left" if column == "case" else "right")
    for outcome in outcomes:
        out.add_row(
            f"{outcome.case}\n[dim]{outcome.shape}[/dim]",
            str(outcome.processes),
            _both(map(outcome.tokens_per_second, NAMES), "{:.0f}"),
            _both(map(outcome.of_linear, NAMES), "{:.0%}"),
            f"{AT_LEAST:.0%}" if outcome.met is not None else "–",
            _both(map(outcome.added, NAMES), "{:.3f} s"),
            _both(map(outcome.waiting, NAMES), "{:.3f} s"),
            _both((outcome.sent[name] / 1e6 for name in NAMES), "{:.1f}"),
            f"{outcome.least / 1e6:.1f}",
            _both((outcome.memory[name] / 2**20 for name in NAMES), "{:.0f}"),
            "\n".join(
                f"{kind}: {calls}, {total / 1e6:.1f} MB"
                for kind, (calls, total) in outcome.collectives["ours"].items()
            ),
        )
    out.caption = (
        "* of linear: one process's time, over twice the time that the slower of two computed; "
        "added: what the slower one computed beyond half of one process's time; "
        "waiting: what its main thread did not compute, which is left out; "
        "collectives: calls in a step of ours, and the MB of the tensors that they read and write"
    )
    return out


def _both(values: Iterable[float | None], form: str) -> str:
    return " / ".join("–" if value is None else form.format(value) for value in values)


def main(argv: Sequence[str]) -> int:
    parser = command_line.plain_parser("distributed", __doc__)
    parser.add_argument("--quick", action="store_true", help="tiny models, few rounds")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="only these; * matches anything")
    command_line.add_count(parser, "--rounds", 9)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    facts = machine.facts()
    console.print(machine.describe(facts), markup=False)
    rounds = min(options.rounds, 3) if options.quick else options.rounds
    every = cases(options.quick)
    chosen = [
        i
        for i, case in enumerate(every)
        if options.cases is None or any(fnmatch.fnmatch(case.name, c) for c in options.cases)
    ]
    if not chosen:
        parser.error(f"--cases: none of {', '.join(dict.fromkeys(c.name for c in every))}")
    outcomes: list[Outcome] = []
    with progress_bars() as progress:
        task = progress.add_task("cases", total=len(chosen))
        for index in chosen:
            outcomes += compare(index, options.quick, rounds)
            progress.advance(task)
    print_table(table(outcomes))
    report.save_times(options, facts, outcomes)
    return 0
