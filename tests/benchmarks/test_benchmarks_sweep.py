"""``benchmarks sweep``: every kind of call, its figures, and calls timed again."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch

import trifuse
from trifuse.benchmarks import sweep, timing
from trifuse.benchmarks.sweep_calls import CALLS, Attention, Norm, Recurrent, SweptCall
from trifuse.benchmarks.timing import Timing

_MASKINGS = ("none", "key lengths", "causal", "window", "bias")
_SMALL = (
    *(Attention(2, 6, 6, 4, 2, 8, masking, 0.0) for masking in _MASKINGS),
    Attention(2, 1, 9, 2, 2, 8, "none", 0.0),
    *(Norm(3, 20, *flags, 0.0) for flags in itertools.product((False, True), repeat=2)),
    Recurrent("LSTM", 3, 2, 4, 6, True, 5),
    Recurrent("GRU", 3, 2, 4, 6, False),
    Recurrent("RNN", 3, 2, 4, 6, True),
)
_RANDOM = (Attention(2, 6, 6, 2, 2, 8, "none", 0.1), Norm(3, 20, False, True, 0.1))
SMALL = [
    *(
        SweptCall("small", call, dtype, kind)
        for call, dtype, kind in itertools.product(
            _SMALL, (torch.float32, torch.bfloat16), ("inference", "training")
        )
    ),
    *(SweptCall("small", call, torch.float32, "training") for call in _RANDOM),
]


@pytest.fixture
def one_round(monkeypatch):
    alternate = timing.alternate

    def alternate_once(calls, **options):
        return alternate(calls, seconds=0.0, min_rounds=1)

    monkeypatch.setattr(timing, "alternate", alternate_once)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)


@pytest.mark.parametrize(
    ("short", "table"),
    [
        (math.inf, "that take torch less than"),
        (0.0, "the lowest ratios of torch's time to ours"),
    ],
)
def test_every_kind_of_call_computes_what_torch_does(
    one_round, monkeypatch, tmp_path, capsys, short, table
):
    """Machines differ in which calls are short, so all are, or none."""
    monkeypatch.setattr(sweep, "CALLS", SMALL)
    monkeypatch.setattr(sweep, "SHORT", short)
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    assert sweep.main(["--json", str(figures), "--plot", str(picture)]) == 0
    assert table in capsys.readouterr().out
    assert picture.exists()
    rows = json.loads(figures.read_text())["times"]
    assert [row["call"] for row in rows] == [call.name for call in SMALL]


def test_one_operator_leaves_the_picture_of_all(one_round, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "CALLS", SMALL)
    assert sweep.main(["norm", "--cases", "*3 x 20, fp32, inference"]) == 0
    printed = capsys.readouterr().out
    assert "LayerNorm" in printed
    assert "LSTM" not in printed
    assert "wrote" not in printed


def test_a_call_that_differs_fails(one_round, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "CALLS", SMALL)
    monkeypatch.setattr(trifuse, "dropout_add_layer_norm", lambda x, *args, **options: x)
    assert sweep.main(["norm", "--cases", "*20, fp32, inference"]) == 1
    assert "differ from torch" in capsys.readouterr().out


def test_a_low_ratio_is_timed_three_times_more(monkeypatch):
    ours = iter([4.0, 1.0, 2.0, 0.5])

    def alternate(calls, seconds):
        return {"ours": Timing((next(ours),) * 3), "torch": Timing((2.0,) * 3)}

    monkeypatch.setattr(timing, "alternate", alternate)
    outcome = sweep.run(SMALL[0], seconds=0.0)
    assert outcome.ratio == 1.5  # the median of 0.5, 2, 1 and 4
    assert next(ours, None) is None


def test_calls_that_torch_once_won_stay():
    """They are where a kernel that gets slower shows first."""
    calls = {(each.call, each.kind) for each in CALLS if each.dtype == torch.float32}
    caches = [  # B, Lk, query heads, key heads, head_dim
        *((1, Lk, 12, 12, 64) for Lk in (64, 256, 1024)),
        (16, 64, 8, 8, 64),
        (1, 512, 32, 8, 128),
        (4, 2048, 32, 8, 128),
        (32, 128, 12, 12, 64),
    ]
    wanted = [(Attention(B, 1, *sizes, "none", 0.0), "inference") for B, *sizes in caches]
    inference = (1, 768), (16, 768), (128, 384), (128, 768)
    wanted += [
        (Norm(*size, False, residual, 0.0), "inference")
        for size, residual in itertools.product(inference, (False, True))
    ]
    training = *inference[1:], (1, 384), (512, 512), (4096, 256)
    wanted += [(Norm(*size, False, True, 0.0), "training") for size in training]
    wanted += [(Norm(1, N, False, True, 0.1), "training") for N in (384, 4096)]
    assert [call for call in wanted if call not in calls] == []

    lstms = {
        (call.T, call.B, call.hidden_size)
        for call, kind in calls
        if isinstance(call, Recurrent) and (call.module, kind) == ("LSTM", "training")
    }
    assert {(8, 256, 256), (100, 32, 128), (50, 64, 64)} <= lstms
    short = {
        call.Lq
        for call, _ in calls
        if isinstance(call, Attention) and (call.B, call.masking) == (1, "key lengths")
    }
    assert {8, 16} <= short


def test_calls_have_names_and_groups():
    names = [call.name for call in CALLS]
    assert len(set(names)) == len(names)
    groups = ["attention", "norms", "norms, training without dropout", "recurrent"]
    assert list(dict.fromkeys(call.group for call in CALLS)) == groups
