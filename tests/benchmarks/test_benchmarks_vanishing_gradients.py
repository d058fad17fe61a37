"""The norms of Jacobians over time."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

pytest.importorskip("matplotlib")

from trifuse.benchmarks import vanishing_gradients

pytestmark = pytest.mark.usefixtures("ceilings_measured_once")


class Linear(nn.RNN):
    """h = W h, so that the Jacobian over t steps is Wᵗ."""

    def forward(self, x, h):
        h = h @ self.weight_hh_l0.T
        return h, h


def test_norms_are_those_of_the_jacobian():
    H, steps = 5, 6
    made = []

    def make(size: int) -> nn.Module:
        made.append(Linear(size, size))
        return made[-1]

    got = vanishing_gradients.jacobian_norms(make, H, steps, seed=0, batch=64, directions=64)
    weight = made[0].weight_hh_l0.detach()
    expected = [torch.linalg.matrix_power(weight, t).norm() / H**0.5 for t in range(steps + 1)]
    torch.testing.assert_close(got, torch.stack(expected).double(), rtol=0.05, atol=0)


@pytest.mark.parametrize("name", vanishing_gradients.LAYERS)
def test_eager_and_fused_agree(name):
    import trifuse

    results = []
    for backend in ("eager", "auto"):
        with trifuse.backend(backend):
            make = vanishing_gradients.LAYERS[name]
            results.append(vanishing_gradients.jacobian_norms(make, 8, 10, seed=1))
    torch.testing.assert_close(*results, rtol=1e-9, atol=0)
    assert results[0][0].item() == pytest.approx(1.0, rel=0.2)


def test_gates_carry_gradients_further(tmp_path, capsys):
    figures, picture = tmp_path / "norms.json", tmp_path / "norms.png"
    arguments = ["--hidden-size", "32", "--steps", "30", "--json", str(figures)]
    assert vanishing_gradients.main([*arguments, "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "RNN, tanh" in capsys.readouterr().out
    norms = {k: torch.tensor(v) for k, v in json.loads(figures.read_text())["norms"].items()}
    last = {name: values[:, 30] for name, values in norms.items()}
    # For each of the seeds, as docs/models.md says below the picture.
    for gated in ("GRU", "LSTM"):
        assert (last["RNN, tanh"] < last[gated]).all()
        assert (last["RNN, relu"] < last[gated]).all()
        assert (last[gated] < last["LSTM, forget bias 1"]).all()
    assert (last["LSTM, forget bias 1"] < 1).all()
    for normalised in ("LSTM, layer norm", "LSTM, layer norm, forget bias 1"):
        assert (last[normalised] > norms[normalised][:, 0]).all()


def test_a_quick_run_of_some_layers(tmp_path, capsys):
    figures = tmp_path / "norms.json"
    arguments = ["--quick", "--hidden-size", "8", "--cases", "GRU", "RNN*", "--json", str(figures)]
    assert vanishing_gradients.main(arguments) == 0
    norms = json.loads(figures.read_text())["norms"]
    assert list(norms) == ["RNN, tanh", "RNN, relu", "GRU"]
    assert {torch.tensor(values).shape for values in norms.values()} == {(2, 31)}
    assert ".png" not in capsys.readouterr().out  # docs/ keeps the picture of a full run


def test_one_seed_has_no_spread(capsys):
    with pytest.raises(SystemExit):
        vanishing_gradients.main(["--seeds", "1"])
    assert "--seeds: expected at least 2" in capsys.readouterr().err
