"""The comparison of language models: equal sizes, equal curves, true figures."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

pytest.importorskip("matplotlib")

from trifuse.benchmarks import language_model, text
from trifuse.benchmarks.terminal import progress_bars
from trifuse.benchmarks.transformer import Task, Trained

pytestmark = pytest.mark.usefixtures("ceilings_measured_once")


def test_models_have_about_as_many_parameters():
    counts = {
        task.name: language_model.count_parameters(task.make(0.0))
        for task in language_model.tasks()
    }
    assert max(counts.values()) / min(counts.values()) < 1.06


@pytest.mark.parametrize("task", language_model.tasks(), ids=lambda task: task.name)
def test_fresh_models_guess_evenly_and_held_out_is_everything(task):
    torch.manual_seed(0)
    model = task.make(0.0).eval()
    _, validation = text.reference()
    predicted = sum(len(windows) for (windows,) in task.held_out) * language_model.LENGTH
    assert 0 <= len(validation) - 1 - predicted < language_model.LENGTH
    with torch.no_grad():
        loss = task.loss(model, task.held_out[0]).item()
    assert loss == pytest.approx(math.log(256), abs=1.0)


def test_command_writes_what_it_measured(tmp_path, capsys):
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    arguments = ["--quick", "--steps", "4", "--cases", "GRU", "Transformer"]
    arguments += ["--json", str(figures), "--plot", str(picture)]
    assert language_model.main(arguments) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "after 4,608 tokens" in printed
    assert "too short to learn" in printed
    learnt = json.loads(figures.read_text())["learnt"]
    for row in learnt:  # parameters and rate are in both tables
        assert printed.count(f"{row['parameters']:,}") == 2
        assert printed.count(f"{row['tokens_per_second']['fused']:,.0f}") >= 2
    assert [row["task"] for row in learnt] == ["GRU", "Transformer"]
    for row in learnt:
        assert row["fused_from_eager"] < 1e-4
        assert len(row["equal_tokens"]) == len(row["equal_time"]) == 2
        assert row["equal_tokens"][0] == row["held_out"]["fused"]
        assert 0 < row["equal_tokens"][0] < math.log(256)
        assert row["tokens_per_second"]["fused"] > 0
        assert row["steps_in_time"] == max(1, round(1 / row["step_seconds"]))


def test_a_busy_moment_does_not_shorten_the_equal_time(monkeypatch):
    asked = []

    def train(task: Task, steps: int, *, fused: bool, seed: int = 0, **how: object) -> Trained:
        asked.append((fused, seed, steps))
        taken = [0.01] * (steps - 1) + [5.0]
        return Trained(nn.Linear(2, 2), [1.0] * steps, 1.0, taken)

    monkeypatch.setattr(language_model, "train", train)
    monkeypatch.setattr(language_model, "token_rates", lambda *given: {"eager": 1.0, "fused": 1.0})
    (task, *_) = language_model.tasks()
    with progress_bars() as progress:
        learnt = language_model.learn(task, 9, 2.0, 2, "cpu", progress)
    assert learnt.step_seconds == 0.01
    assert learnt.steps_in_time == 200
    assert asked[-2:] == [(True, 0, 200), (True, 1, 200)]


def test_one_seed_has_no_spread(capsys):
    with pytest.raises(SystemExit):
        language_model.main(["--seeds", "1"])
    assert "--seeds: expected at least 2" in capsys.readouterr().err
