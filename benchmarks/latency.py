"""One sentence at a time: what each engine takes to read it, MiniLM-L6 with pretrained weights.

transformers' BertModel runs on torch's attention, fused, and fused with frozen weights; ONNX
Runtime and OpenVINO run the same weights where they are installed. Each runs in its own process,
and they take turns. The sentences are paragraphs of the language reference, cut to a number of
tokens.

The ceiling is the larger of two times: the bytes of the layers' weights at the copy rate, and the
operations at the matrix rate.

Ours have a target for the time of the fastest other engine over ours and, for longer sentences, one
for the fraction of the ceiling. Where that ratio would take more than 90% of the ceiling, 90% is
the target instead.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

import trifuse
from trifuse.benchmarks import ceilings, demo, engines, processes, report
from trifuse.benchmarks.agreement import check_agreement
from trifuse.benchmarks.terminal import progress_bars
from trifuse.models.bert import BertConfig

TOKENS = (3, 8, 28, 62, 122)
OURS = ("fused", "fused, frozen")
_CALLS = 25  # in one turn

# Targets for the time of the fastest other engine over ours, and for our fraction of the ceiling.
# Short sentences have only the first, because how much of the weights is in the caches varies.
SHORT = 8  # tokens
RATIO_SHORT, RATIO = 1.2, 1.05
FRACTION = {torch.float32: 0.85, torch.bfloat16: 0.78}
REACHABLE = 0.9  # of the ceiling


class Latency(NamedTuple):
    """The times of one engine for a sentence, in seconds.

    ``at_least``, for an engine of ours, is a target for the time of the fastest other one over
    this one's; ``at_least_fraction`` is a target for the fraction of the ceiling.
    """

    tokens: int
    engine: str
    seconds: list[float]
    ceiling: float
    at_least: float | None = None
    at_least_fraction: float | None = None

    def percentile(self, percent: int) -> float:
        return torch.tensor(self.seconds, dtype=torch.float64).quantile(percent / 100).item()

    @property
    def fraction(self) -> float:
        return self.ceiling / self.percentile(50)

    def record(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "engine": self.engine,
            "p50": self.percentile(50),
            "p99": self.percentile(99),
            "fraction of the ceiling": self.fraction,
            "at least": self.at_least,
            "at least, of the ceiling": self.at_least_fraction,
        }


def with_targets(rows: Sequence[Latency], dtype: torch.dtype) -> list[Latency]:
    """Give our rows their targets; all rows are for the same sentence."""
    short = rows[0].tokens <= SHORT
    ratio = RATIO_SHORT if short else RATIO
    fraction = None if short else FRACTION[dtype]
    targets: dict[str, Any] = {"at_least": ratio, "at_least_fraction": fraction}
    if rows[0].ceiling * ratio > REACHABLE * fastest_other(rows):
        targets = {"at_least_fraction": REACHABLE}
    return [one._replace(**targets) if one.engine in OURS else one for one in rows]


def fastest_other(rows: Sequence[Latency]) -> float:
    """The median seconds of the fastest engine that is not ours."""
    return min(one.percentile(50) for one in rows if one.engine not in OURS)


# A process of an engine -------------------------------------------------------------------------

_reader: engines.Reader


def _start(name: str, directory: Path, dtype: torch.dtype, threads: int) -> None:
    global _reader
    torch.set_num_threads(threads)
    _reader = _load(directory, dtype, name)


def _load(directory: Path, dtype: torch.dtype, name: str) -> engines.Reader:
    for engine in engines.ENGINES:
        if engine.name == name:
            return engines.load(directory, dtype, only=name)[name]
    import transformers

    with engines.quiet_transformers():
        model = transformers.BertModel.from_pretrained(
            directory, attn_implementation="sdpa", dtype=dtype, add_pooling_layer=False
        ).eval()
    if name in OURS:
        trifuse.fuse(model, freeze=name == "fused, frozen")
    return demo.reader(model)


@torch.inference_mode()
def _read(input_ids: Tensor) -> Tensor:
    return _reader(input_ids, torch.ones_like(input_ids, dtype=torch.bool)).clone()


@torch.inference_mode()
def _time(input_ids: Tensor, calls: int) -> list[float]:
    mask = torch.ones_like(input_ids, dtype=torch.bool)
    seconds = []
    for _ in range(calls + 3):
        start = time.perf_counter()
        _reader(input_ids, mask)
        seconds.append(time.perf_counter() - start)
    return seconds[3:]  # in the first calls, caches still hold data of the last engine


# The comparison ---------------------------------------------------------------------------------


def names(dtype: torch.dtype) -> tuple[str, ...]:
    """The engines that are compared, those first that are always there."""
    others = ("ONNX Runtime", "OpenVINO")
    served = [e.name for e in engines.ENGINES if e.name in others and e.serves(dtype)]
    return ("transformers, sdpa", *OURS, *served)


def sentence(directory: Path, tokens: int) -> Tensor:
    """Token ids (1, tokens) of a paragraph that is cut to this length."""
    tokenizer = demo.load_tokenizer(directory, tokens)
    for passage in demo.passages():
        ids = tokenizer.encode(passage.text).ids
        if len(ids) == tokens:
            return torch.tensor([ids])
    raise ValueError(f"tokens: no paragraph has {tokens}")


def compare(
    directory: Path,
    dtype: torch.dtype,
    threads: int,
    rounds: int,
    lengths: Sequence[int] = TOKENS,
) -> list[Latency]:
    """Time all engines in turns."""
    config = BertConfig.from_json(directory / "config.json")
    weight_bytes = engines.layer_weights(config) * dtype.itemsize
    copy, multiply = ceilings.copy_rate().value, ceilings.matrix_rate(dtype).value
    found = []
    running = processes.each_in_a_process(names(dtype), _start, directory, dtype, threads)
    with running as calls, progress_bars() as progress:
        task = progress.add_task(f"one sentence, {dtype}", total=len(lengths) * rounds)
        for tokens in lengths:
            ids = sentence(directory, tokens)
            expected, *others = (call(_read, ids) for call in calls.values())
            for name, actual in zip(list(calls)[1:], others, strict=True):
                check_agreement(name, [expected], [actual.to(dtype)])
            seconds: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(rounds):
                for name, call in calls.items():
                    seconds[name] += call(_time, ids, _CALLS)
                progress.advance(task)
            ceiling = max(weight_bytes / copy, engines.flops(config, [tokens]) / multiply)
            rows = [Latency(tokens, name, each, ceiling) for name, each in seconds.items()]
            found += with_targets(rows, dtype)
    return found


def table(found: Sequence[Latency], title: str, caption: str) -> Table:
    """Percentiles of each engine, and how the fastest other engine compares with each of ours.

    A target stands below the figure that it is for.
    """
    out = Table(title=title, caption=caption)
    for column in ("tokens", "engine", "p50", "p99", "of the ceiling", "fastest other / this"):
        out.add_column(column, justify="left" if column == "engine" else "right")
    for tokens in dict.fromkeys(one.tokens for one in found):
        rows = [one for one in found if one.tokens == tokens]
        best = fastest_other(rows)
        for one in rows:
            p50, p99 = one.percentile(50), one.percentile(99)
            times = f"{p50 * 1e3:.2f} ms", f"{p99 * 1e3:.2f} ms"
            fraction = report.with_target(one.fraction, one.at_least_fraction, "{:.0%}")
            against = ""
            if one.engine in OURS:
                against = report.with_target(best / p50, one.at_least, "{:.2f}×")
            out.add_row(str(tokens), one.engine, *times, fraction, against)
        out.add_section()
    return out
