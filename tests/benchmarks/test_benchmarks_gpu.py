"""The GPU benchmarks at tiny sizes, without a GPU: the CPU stands in for "cuda"."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from trifuse import backends
from trifuse.benchmarks import (
    attention,
    bert,
    ceilings,
    dropout_add_layer_norm,
    gru,
    lstm,
    machine,
    report,
    timing,
)
from trifuse.benchmarks.cases import run_all
from trifuse.benchmarks.ceilings import Rate
from trifuse.benchmarks.comparison import Result
from trifuse.benchmarks.timing import Timing
from trifuse.models.bert import BertConfig


class _OnTheCpu(TorchFunctionMode):
    """Replaces the device "cuda" by "cpu" in every call."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        there = ("cuda", torch.device("cuda"))

        def here(value: Any) -> Any:
            return "cpu" if isinstance(value, (str, torch.device)) and value in there else value

        kwargs = {name: here(value) for name, value in (kwargs or {}).items()}
        return function(*map(here, args), **kwargs)


class _Generator(torch.Generator):
    def __new__(cls, device: str) -> _Generator:
        return super().__new__(cls, "cpu")


class _Event:
    """An event of a stream that finishes its work at once."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.time = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        return 1e3 * (end.time - self.time)


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fakes a GPU on the CPU: the CPU's kernels serve, whichever backend is selected."""
    for owner, name, value in (
        (torch.cuda, "Event", _Event),
        (torch.cuda, "synchronize", lambda: None),
        (torch.cuda, "get_device_name", lambda: "a GPU"),
        (torch.cuda, "get_device_capability", lambda: (9, 0)),
        (torch.version, "cuda", "13.0"),
        (torch.backends.cudnn, "version", lambda: 91000),
        (machine, "version_of", lambda distribution: "3.6.0"),
        (machine, "_driver", lambda: "1.2"),
        (torch, "Generator", _Generator),
        (torch, "compile", lambda function: function),
        (torch, "set_num_threads", lambda threads: None),
        (timing, "_CACHE", 1),
        (ceilings, "matrix_rate", lambda *args, **options: Rate(1e12, "none")),
        (ceilings, "copy_rate", lambda **options: Rate(1e12, "none")),
        (timing, "alternate", _briefly),
        (backends, "backend", lambda name: contextlib.nullcontext()),
    ):
        monkeypatch.setattr(owner, name, value)
    for name in ("cuda", "triton"):
        monkeypatch.setitem(backends._WHY_NOT, name, _why_not)
    backends._choose.cache_clear()
    yield
    backends._choose.cache_clear()


def _why_not(call: backends.Call) -> str | None:
    return None if call.device == "cuda" else "there are none"


@functools.wraps(timing.alternate)
def _briefly(functions: Any, alternate: Any = timing.alternate, **options: Any) -> Any:
    return alternate(functions, **options | {"seconds": 0.0, "min_rounds": 2})


def _small(case: Any) -> Any:
    if isinstance(case, attention.Case):
        key_heads = None if case.key_heads is None else 1
        return dataclasses.replace(case, shape=(3, 2, 24, 16), key_heads=key_heads)
    if isinstance(case, dropout_add_layer_norm.Case):
        return dataclasses.replace(case, shape=(64, case.shape[1] // 64))
    if isinstance(case, lstm.Case):
        projection = case.projection and 8
        return dataclasses.replace(case, shape=(5, 4, 8, 16), projection=projection)
    if isinstance(case, gru.Case):
        return dataclasses.replace(case, shape=(5, 4, 8, 16))
    config = BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48
    )
    return dataclasses.replace(case, config=config, batch_size=3, length=24)


@pytest.mark.parametrize("module", [attention, dropout_add_layer_norm, lstm, gru, bert])
def test_every_case(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = tuple(map(_small, module.CASES["cuda"]))
    monkeypatch.setitem(module.CASES, "cuda", cases)
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    arguments = ["--device", "cuda", "--json", str(figures), "--plot", str(picture)]
    wanted = [case.name for case in cases]
    with _OnTheCpu():
        status = module.main([*arguments, "--quick", "--cases", *wanted])

    content = json.loads(figures.read_text())
    assert content["failed"] == {}
    assert status == 0
    assert content["machine"]["gpu"] == "a GPU"
    assert len(content["times"]) == len(cases)
    for row in content["times"]:
        assert row["ours"]["rounds"] == 2
        masked = row["case"] in ("float mask", "boolean mask")
        also = ["by cuda" if masked else "by triton"]
        if module is attention and "fp32" not in row["shape"]:
            also.append("by cuda, as for 8.0")
        if row["case"] == "two layers":
            also.append("by cuda, layer after layer")
        assert list(row["also"]) == list(row["also_ratios"]) == also
        assert row["ratio"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "by triton: " in printed
    assert "a GPU, driver 1.2, torch " in printed
    assert " (CUDA 13.0, cuDNN 91000, Triton 3.6.0), trifuse " in printed
    if module is attention:
        assert "≤ 12 µs" in printed
        assert {row["at_most"] for row in content["times"]} == {None, 12e-6}


CACHES = [case for case in attention.CASES["cuda"] if case.decodes]


def test_the_cases_of_one_query_over_a_cache() -> None:
    assert [case.size for case in CACHES] == [
        "bf16 (1,32,65536,128), 1 query, 8 key heads",
        "bf16 (16,32,4096,128), 1 query, 8 key heads",
        "bf16 (1,32,4096,128), 1 query, 8 key heads",
    ]
    given = attention.inputs(dataclasses.replace(CACHES[0], shape=(2, 32, 24, 16)), "cpu")
    assert given.query.shape == given.grad_out.shape == (2, 32, 1, 16)
    assert given.key.shape == given.value.shape == (2, 8, 24, 16)
    assert given.lengths == [24, 24]
    assert attention.moved(given) == 2 * (2 * 2 * 32 * 16 + 2 * 2 * 8 * 24 * 16)


@pytest.mark.parametrize(("rate", "unit"), [(1e15, "B"), (1e6, "FLOP")])
def test_one_query_over_a_cache_counts_what_takes_longer(
    monkeypatch: pytest.MonkeyPatch, rate: float, unit: str
) -> None:
    monkeypatch.setattr(ceilings, "matrix_rate", lambda *_, **__: Rate(rate, "none"))
    case = _small(CACHES[-1])
    with _OnTheCpu():
        result = attention.run(case, "cuda", seconds=0.0)
    given = attention.inputs(case, "cpu")
    work = attention.moved(given) if unit == "B" else attention.flops(case, given.lengths)
    assert (result.unit, result.work) == (unit, work)
    assert (result.at_least, result.at_most) == (1.0, 12e-6)


@pytest.mark.parametrize(
    ("at_most", "at_least", "met"),
    [(2.5e-6, None, True), (1.5e-6, None, False), (2.5e-6, 2.0, True), (2.5e-6, 9.0, False)],
)
def test_a_limit_in_seconds_counts_beside_the_other_targets(
    at_most: float, at_least: float | None, met: bool
) -> None:
    ours, peer = Timing((1e-6, 2e-6, 8e-6)), Timing((4e-6, 4e-6, 32e-6))
    result = Result(
        case="case",
        step="forward",
        shape="(1,)",
        ours=ours,
        peers={"peer": peer},
        refused={},
        work=1.0,
        ceiling=Rate(1e12, "none"),
        at_least=at_least,
        at_most=at_most,
    )
    assert result.met == met
    record = result.record()
    assert (record["at_most"], record["met"]) == (at_most, met)
    ratio, least = (
        str(*column.cells).split("\n")
        for column in report.table("title", [result]).columns
        if column.header in ("ratio", "at least")
    )
    colour = "green" if at_most > 2e-6 else "bold red"
    assert ratio[1:] == [f"[{colour}]2.0 µs[/]"]
    assert least == [f"{at_least:g}×" if at_least else "–", f"[dim]≤ {1e6 * at_most:g} µs[/dim]"]


def test_flops_of_stacked_layers_are_those_of_each_layer() -> None:
    """Layers above the first read both directions of the layer below."""
    case = gru.Case("GRU", "", (5, 4, 8, 16), torch.float32, False, bidirectional=True)
    above = dataclasses.replace(case, shape=(5, 4, 32, 16))
    both = dataclasses.replace(case, layers=2)
    assert gru.flops(both) == gru.flops(case) + gru.flops(above)


@pytest.mark.parametrize("kind", ["GRU", "GRU, reset first", "RNN, relu"])
@pytest.mark.parametrize("ragged", [False, True])
def test_stacked_layers_compute_what_their_peer_does(kind: gru.Kind, ragged: bool) -> None:
    case = gru.Case(
        kind, "", (5, 4, 8, 16), torch.float32, True, ragged=ragged, bidirectional=True, layers=2
    )
    given = gru.inputs(case, "cpu")
    assert len(given.variables) == 1 + 2 * 2 * 4
    gru.checker(case, given)()


def _fail_at_one(case: int) -> int:
    if case == 1:
        raise RuntimeError("no")
    return case


def test_what_is_measured_outlives_what_fails() -> None:
    kept: list[list[int]] = []
    done, failed = run_all(range(3), str, _fail_at_one, lambda done: kept.append([*done]))
    assert done == [0, 2]
    assert failed == {"1": "RuntimeError: no"}
    assert kept == [[0], [0], [0, 2]]


def test_a_gpu_that_is_lost_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: _fail_at_one(1))
    with pytest.raises(SystemExit) as exit:
        run_all(range(3), str, _fail_at_one, lambda done: None)
    assert exit.value.code == 2


# The command that runs them all -------------------------------------------------------------------

PYTHON = """#!/bin/bash
case "$*" in
  *xdist*) echo -n 3; exit ;;
  *"import ninja, pybind11") exit 1 ;;
esac
echo "$*, for $TORCH_CUDA_ARCH_LIST"
case "$*" in
  *"-m pytest"*) eval "$PYTEST" ;;
  *lstm*triton*) ;;
  *lstm*) echo trouble; exit 3 ;;
  *--json*) echo {} >"${@: -3:1}"; echo >"${@: -1}" ;;
esac
"""
COMPUTE_SANITIZER = """#!/bin/bash
echo "without a cache: $PYTORCH_NO_CUDA_MEMORY_CACHING"
[[ "$*" != *racecheck*lstm ]]
"""
NVIDIA_SMI = """#!/bin/bash
[[ "$*" == *=compute_cap* ]] && echo 9.0 || echo a GPU
"""


def _run_script(out: Path, limit: int, *parts: str, pytest: str = "") -> tuple[int, dict[str, str]]:
    """Runs gpu.sh; returns its status and its steps' outcomes. ``pytest`` replaces the tests."""
    for name, text in (
        ("python", PYTHON),
        ("compute-sanitizer", COMPUTE_SANITIZER),
        ("nvidia-smi", NVIDIA_SMI),
    ):
        (out.parent / name).write_text(text)
        (out.parent / name).chmod(0o755)
    script = Path(__file__).parents[2] / "benchmarks/gpu.sh"
    environment = {
        "PATH": f"{out.parent}:/usr/bin:/bin",
        "PYTHON": f"{out.parent}/python",
        "PYTEST": pytest,
        "LIMIT": f"{limit}",
    }
    done = subprocess.run(["bash", script, out, *parts], env=environment, capture_output=True)
    steps = (out / "gpu.txt").read_text().splitlines()[1:]
    return done.returncode, {
        line.split()[0]: line.split(maxsplit=3)[-1] for line in steps if " s  " in line
    }


def test_the_script_goes_on_whatever_fails(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert _run_script(out, 60, "build", "sanitizer", "lstm", "gru", "bert") == (
        2,
        {
            "build": "ok",
            "what-there-is": "ok",
            "memcheck-attention": "ok",
            "memcheck-dropout_add_layer_norm": "ok",
            "memcheck-lstm": "ok",
            "memcheck-gru": "ok",
            "racecheck-attention": "ok",
            "racecheck-dropout_add_layer_norm": "ok",
            "racecheck-lstm": "FAILED (1)",
            "racecheck-gru": "ok",
            "synccheck-attention": "ok",
            "synccheck-dropout_add_layer_norm": "ok",
            "synccheck-lstm": "ok",
            "synccheck-gru": "ok",
            "lstm": "FAILED (3)",
            "lstm-triton": "ok",
            "gru": "ok",
            "bert": "ok",
        },
    )
    names = {"gru-gpu.json", "bert-gpu.json", "gpu-pictures.tar.gz", "gpu.log", "gpu.txt"}
    assert {path.name for path in out.iterdir()} == names
    assert "ninja pybind11>=3," in (out / "gpu.log").read_text()  # where they are missing
    assert "--editable .," in (out / "gpu.log").read_text()
    assert "for 9.0\n" in (out / "gpu.log").read_text()
    assert "without a cache: 1\n" in (out / "gpu.log").read_text()
    assert "trouble" in (out / "gpu.txt").read_text()


def test_the_script_ends_in_time(tmp_path: Path) -> None:
    out, endless = tmp_path / "out", 'trap "echo interrupted; exit 2" INT; sleep 60'
    status, states = _run_script(out, 3, "tests", "bert", pytest=endless)
    assert (status, states["tests"], states["bert"]) == (6, "FAILED (124)", "left out: no time")
    assert "interrupted" in (out / "gpu.log").read_text()


def test_the_script_leaves_out_kernels_that_hang(tmp_path: Path) -> None:
    hanging = '[[ "$*" != *"each_kernel and lstm" ]] || exit 137'
    status, states = _run_script(tmp_path / "out", 60, "tests", "lstm", pytest=hanging)
    assert status == 1
    assert states["kernels-lstm"] == "FAILED (137)"
    assert states["lstm-triton"] == "ok"
    assert "lstm" not in states
