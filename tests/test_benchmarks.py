"""The benchmarks measure what they say: fair turns, true counts, and peers given the same work."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

import trifuse
from trifuse.benchmarks import attention, measure
from trifuse.benchmarks.__main__ import benchmarks, main
from trifuse.reference.attention import _weights as reference_weights

ALL_CASES = [case for cases in attention.CASES.values() for case in cases]


# The clock --------------------------------------------------------------------------------------


class Clock:
    """A clock that only the timed functions move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.calls: list[str] = []
        monkeypatch.setattr(measure.time, "perf_counter", lambda: self.now)

    def function(self, name: str, seconds: Callable[[], float]) -> Callable[[], None]:
        def call() -> None:
            self.calls.append(name)
            self.now += seconds()

        return call


def test_turns_alternate_and_rotate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    functions = {name: clock.function(name, lambda: 0.1) for name in "abc"}
    timings = measure.alternate(functions, seconds=0.0, min_rounds=4)
    rounds = "".join(clock.calls[-12:])
    assert rounds == "abcbcacababc"
    assert {len(timing.seconds) for timing in timings.values()} == {4}


def test_rounds_go_on_until_the_time_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    function = clock.function("a", lambda: 0.25)
    timings = measure.alternate({"a": function}, seconds=3.0, min_rounds=2)
    assert timings["a"].seconds == (0.25,) * 12


def test_short_calls_are_repeated_within_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    timings = measure.alternate(
        {"short": clock.function("short", lambda: 1e-5), "long": clock.function("long", lambda: 1)},
        seconds=0.0,
        min_rounds=1,
    )
    assert clock.calls.count("short") >= 100
    assert timings["short"].median == pytest.approx(1e-5)
    assert timings["long"].median == pytest.approx(1)


def test_ratio_is_taken_within_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that slows down by half on the way changes the medians, not the ratio."""
    clock = Clock(monkeypatch)
    timings = measure.alternate(
        {
            "ours": clock.function("ours", lambda: 1 + clock.now / 100),
            "slow": clock.function("slow", lambda: 9 * (1 + clock.now / 100)),
            "fast": clock.function("fast", lambda: 3 * (1 + clock.now / 100)),
        },
        seconds=0.0,
        min_rounds=9,
    )
    ours = timings.pop("ours")
    assert max(ours.seconds) > 2 * min(ours.seconds)
    result = _result(ours, timings, at_least=2.5)
    assert result.fastest_peer == "fast"
    assert result.ratio == pytest.approx(3, rel=0.1)
    assert result.met
    assert not dataclasses.replace(result, at_least=3.5).met


def test_percentiles_are_numpys() -> None:
    values = [5.0, 1.0, 4.0, 2.0]
    for percent in (0, 10, 50, 77, 100):
        expected = torch.tensor(values, dtype=torch.float64).quantile(percent / 100).item()
        assert measure.percentile(values, percent) == pytest.approx(expected)


def _result(
    ours: measure.Timing,
    peers: dict[str, measure.Timing],
    at_least: float | None = None,
    at_most_over: float | None = None,
) -> measure.Result:
    ceiling = measure.Rate(1e12, "test")
    return measure.Result(
        "case", "forward", "(1,)", ours, peers, {}, 1e11, ceiling, "FLOP", at_least, at_most_over
    )


def test_fractions_and_overheads() -> None:
    result = _result(
        measure.Timing((0.2, 0.2, 0.5)), {"peer": measure.Timing((0.1, 0.2, 0.2))}, None, 0.05
    )
    assert result.achieved == pytest.approx(1e11 / 0.2)
    assert result.fraction == pytest.approx(0.5)
    assert result.over == pytest.approx(0.1)
    assert not result.met


# Memory and rates -------------------------------------------------------------------------------


def _prepare_scratch(mebibytes: int) -> Callable[[], Sequence[Tensor]]:
    """A computation with that much scratch and a result of 32 MiB."""

    def compute() -> Sequence[Tensor]:
        scratch = torch.ones(mebibytes << 18)
        result = torch.ones(32 << 18)
        del scratch
        return (result,)

    return compute


@pytest.mark.parametrize("mebibytes", [0, 96])
def test_peak_memory_counts_scratch_and_not_results(mebibytes: int) -> None:
    peak = measure.peak_extra_memory(_prepare_scratch, mebibytes) / 2**20
    assert mebibytes - 4 <= peak <= mebibytes + 8


def test_matrix_rate_is_not_below_what_torch_reaches() -> None:
    """A ceiling that torch goes through would flatter us."""
    a, b = torch.randn(2, 768, 768)
    mm = {"mm": lambda: torch.mm(a, b)}
    reached = 2 * 768**3 / measure.alternate(mm, seconds=0.3)["mm"].median
    assert measure.matrix_rate(torch.float32).value > 0.8 * reached


# Attention --------------------------------------------------------------------------------------


def _small(case: attention.Case) -> attention.Case:
    B, H, _, _ = case.shape
    return dataclasses.replace(case, shape=(min(B, 3), min(H, 2), 24, 16))


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.name)
def test_flops_are_those_of_the_pairs_that_take_part(case: attention.Case) -> None:
    case = _small(case)
    B, H, L, E = case.shape
    given = attention.inputs(case, "cpu")
    if case.masking == "boolean mask":  # scattered: counts in full
        pairs = B * H * L * L
    else:
        keep = reference_weights(
            given.query.detach(), given.key.detach(), None, given.key_lengths, None, 1.0,
            -1, 0 if case.masking == "causal" else -1, False, 0.0, 0,
        ).keep  # fmt: skip
        pairs = int(keep.sum())
    products = 7 if case.backward else 2  # forward QKᵀ, PV; backward QKᵀ, dO Vᵀ, dQ, dK, dV
    assert attention.flops(case, given.lengths) == pairs * products * 2 * E


@pytest.mark.parametrize(
    "case",
    [case for case in ALL_CASES if "dropout" not in case.masking],
    ids=lambda case: case.name,
)
def test_peers_are_given_the_same_work(case: attention.Case) -> None:
    case = dataclasses.replace(_small(case), dtype=torch.float32)
    given = attention.inputs(case, "cpu")
    ours, sdpa = attention.ours(case, given)(), attention.theirs("sdpa", case, given)()
    assert len(ours) == len(sdpa) == (1 + 3 + (case.masking == "float mask")) ** case.backward
    for mine, other in zip(ours, sdpa, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "masking", ["no mask", "key lengths", "causal", "boolean mask", "float mask"]
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_given_the_same_work(masking: attention.Masking) -> None:
    case = attention.Case(masking, (2, 3, 24, 16), torch.float32, False, ("flex",))
    given = attention.inputs(case, "cpu")
    flex = attention._flex_attention(case, given, compiled=False)
    (ours,) = attention.ours(case, given)()
    torch.testing.assert_close(
        ours, flex(given.query, given.key, given.value), rtol=1e-4, atol=1e-5
    )


def test_a_peer_that_refuses_is_named() -> None:
    """torch has no cuDNN kernel for CPU tensors: the row says so and goes on."""
    case = attention.Case("no mask", (1, 1, 8, 8), torch.float32, False, ("cudnn", "math"))
    result = attention.run(case, "cpu", seconds=0.0)
    assert set(result.peers) == {"math"}
    assert set(result.refused) == {"cudnn"}


def test_a_peer_that_differs_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = attention.ours
    monkeypatch.setattr(attention, "ours", lambda *args: lambda: [-x for x in ours(*args)()])
    case = attention.Case("no mask", (1, 1, 8, 8), torch.float32, False, ("sdpa",))
    with pytest.raises(AssertionError, match="differ from sdpa"):
        attention.run(case, "cpu", seconds=0.0)


def test_table_json_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = (
        attention.Case(
            "key lengths", (3, 2, 24, 16), torch.float32, True, ("sdpa",), at_least=999.0
        ),
        attention.Case("causal", (3, 2, 24, 16), torch.float32, False, ("sdpa",), at_least=0.0),
        attention.Case("no mask", (1, 2, 8, 16), torch.float32, False, ("sdpa",), None, 1e-2),
    )
    monkeypatch.setitem(attention.CASES, "cpu", cases)
    figures, picture = tmp_path / "a" / "figures.json", tmp_path / "b" / "picture.png"
    wanted = [f"{case.masking}*24,16)" for case in cases[:2]] + ["*(1,2,8,16)"]
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    arguments = ["--quick", "--device", "cpu", "--json", str(figures), "--plot", str(picture)]
    assert attention.main([*arguments, "--cases", *wanted]) == 0

    printed = capsys.readouterr().out
    for words in ("key lengths", "forward + backward", "≤ +10000 µs", "999×", "GFLOP/s"):
        assert words in printed
    content = json.loads(figures.read_text())
    assert content["machine"]["torch"] == torch.__version__
    assert content["machine"]["copies"]["value"] > 1e8
    assert [row["met"] for row in content["times"]] == [False, True, True]
    for row in content["times"]:
        assert row["ours"]["p10"] <= row["ours"]["median"] <= row["ours"]["p90"]
        assert row["ratio_p10"] <= row["ratio"] <= row["ratio_p90"]
        assert row["fraction_of_ceiling"] == pytest.approx(row["achieved"] / row["ceiling"])
    assert content["memory"] == []
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_memory_case_runs_in_a_process_of_its_own() -> None:
    """At a size where the scores, 2048 × 2048 × 2 heads of floats, would show."""
    case = dataclasses.replace(attention.MEMORY_CASE, shape=(1, 2, 2048, 64))
    result = attention.run_memory(case, "cpu", "auto")
    scores = 2 * 2048 * 2048 * 4
    assert 0 <= result.peers["sdpa"] < scores
    assert (
        result.ours < scores
        or trifuse.explain(
            trifuse.scaled_dot_product_attention, *torch.empty(3, 1, 2, 8, 64)
        ).backend
        == "eager"
    )


def test_unknown_case_lists_those_there_are() -> None:
    with pytest.raises(SystemExit, match=r"nothing is named 'bogus'(.|\n)*causal, forward, fp32"):
        attention.main(["--cases", "bogus", "--device", "cpu"])


# The command ------------------------------------------------------------------------------------


def test_every_benchmark_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    names = benchmarks()
    assert {"attention", "demo"} <= set(names)
    assert not {"measure", "__main__"} & set(names)
    for name, line in names.items():
        assert line.endswith(".")
        assert f"  {name} " in printed
        assert line in printed


def test_unknown_benchmark_fails_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bogus"]) == 2
    assert "attention" in capsys.readouterr().out


def test_missing_requirement_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError("No module named 'rich'", name="rich")

    monkeypatch.setattr(importlib, "import_module", fail)
    assert main(["attention"]) == 1
    assert "rich is not installed" in capsys.readouterr().out
