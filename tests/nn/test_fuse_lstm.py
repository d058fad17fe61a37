"""trifuse.fuse on recurrent layers: results and state unchanged, and revert."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import normal
from lstm_cases import backend_fixture
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import trifuse
from trifuse import backends
from trifuse.fusing.swaps import _why_cudnn

backend = backend_fixture("lstm")  # includes eager, which auto would not choose

T, B, I, H = 5, 4, 3, 6  # noqa: E741


class Tagger(nn.Module):
    """Recurrent layers of every kind, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(I, H, 2, bidirectional=True, dropout=0.2)
        self.projected = nn.LSTM(2 * H, H, proj_size=3, batch_first=True)
        self.gru = nn.GRU(3, H, bias=False)
        self.lstm_cell = nn.LSTMCell(H, H)
        self.gru_cell = nn.GRUCell(H, 2)
        self.rnn = nn.RNN(H, H, nonlinearity="relu", bidirectional=True)
        self.rnn_cell = nn.RNNCell(2 * H, H)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        x, _ = pad_packed_sequence(self.lstm(packed)[0])
        x, _ = self.projected(x.transpose(0, 1))
        x, _ = self.gru(x.transpose(0, 1))
        r = self.rnn_cell(self.rnn(x)[0][0])
        h, c = self.lstm_cell(x[-1], (r, r.sin()))
        h, c = self.lstm_cell(x[-2], (h, c))
        return self.gru_cell(h) + c.sum()


SWAPPED = {
    "lstm": (nn.LSTM, trifuse.nn.LSTM),
    "projected": (nn.LSTM, trifuse.nn.LSTM),
    "gru": (nn.GRU, trifuse.nn.GRU),
    "lstm_cell": (nn.LSTMCell, trifuse.nn.LSTMCell),
    "gru_cell": (nn.GRUCell, trifuse.nn.GRUCell),
    "rnn": (nn.RNN, trifuse.nn.RNN),
    "rnn_cell": (nn.RNNCell, trifuse.nn.RNNCell),
}


def tagger() -> Tagger:
    torch.manual_seed(0)
    return Tagger().double().eval()


def results(model: nn.Module) -> list[Tensor]:
    """The output, and the gradient of every parameter."""
    x, lengths = normal(T, B, I, dtype=torch.float64), torch.tensor([3, 5, 1, 4])
    output = model(x, lengths)
    return [output, *torch.autograd.grad(output.sin().sum(), list(model.parameters()))]


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        "modules": {name: id(module) for name, module in model.named_modules()},
        "parameters": {name: id(p) for name, p in model.named_parameters()},
        "state_dict": list(model.state_dict()),
    }


def test_every_kind(backend):
    model = tagger()
    kept, expected = snapshot(model), results(model)
    report = trifuse.fuse(model)
    assert {s.path: s.after for s in report.swapped} == {
        name: f"trifuse.nn.{after.__name__}" for name, (_, after) in SWAPPED.items()
    }
    assert report.left == []
    with torch.profiler.profile() as profile:
        actual = results(model)
    ran = {event.key for event in profile.key_averages()}
    assert {"trifuse::lstm_forward", "trifuse::gru_backward", "trifuse::rnn_backward"} <= ran
    theirs = ("lstm", "gru", "rnn_tanh", "rnn_relu")
    assert not {f"aten::{name}{cell}" for name in theirs for cell in ("", "_cell")} & ran
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)
    assert snapshot(model) == kept
    assert trifuse.fuse(model).swapped == []

    report.revert()
    assert {n: type(getattr(model, n)) for n in SWAPPED} == {n: s[0] for n, s in SWAPPED.items()}
    assert snapshot(model) == kept
    for a, e in zip(results(model), expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=0)


def test_fused_layers_are_moved_copied_and_loaded(backend):
    """Fused layers behave as any module; attributes that torch's lack come from the class."""
    model, other = tagger(), tagger()
    expected = results(model)
    trifuse.fuse(model)
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    trifuse.fuse(other)
    other.load_state_dict(model.state_dict())
    for a, e in zip(results(other), expected, strict=True):
        torch.testing.assert_close(a, e)
    model.float().double()
    assert "dropout=0.2" in repr(model.lstm)
    assert model.lstm.cell_clip is None


def test_dropout_between_layers_still_drops(backend):
    model = tagger().train()
    trifuse.fuse(model)
    x = normal(T, B, I, dtype=torch.float64)
    assert not torch.equal(model.lstm(x)[0], model.lstm(x)[0])


def test_what_is_left_alone(backend):
    class Mine(nn.LSTM):
        pass

    replaced = nn.GRU(I, H)
    replaced.forward = lambda *args: None
    normed = nn.utils.parametrizations.weight_norm(nn.LSTM(I, H), "weight_hh_l0")
    model = nn.ModuleDict({"mine": Mine(I, H), "normed": normed, "replaced": replaced})
    report = trifuse.fuse(model)
    assert report.swapped == []
    assert {left.path: left.reason for left in report.left} == {
        "mine": "a subclass of LSTM",
        "normed": "a parameter of it is parametrized; do that after fusing",
        "replaced": "its forward was replaced on the instance",
    }


def test_left_alone_where_no_kernel_serves(monkeypatch: pytest.MonkeyPatch):
    """The eager formula is slower than torch's own layers."""
    monkeypatch.setattr(backends, "_C", None)
    backends._choose.cache_clear()
    try:
        report = trifuse.fuse(nn.LSTM(I, H))
    finally:
        backends._choose.cache_clear()
    assert [left.reason for left in report.left] == ["no fused kernel serves it here"]
    assert trifuse.fuse(nn.LSTM(I, H, device="meta")).swapped == []


@pytest.mark.parametrize(
    ("make", "dtype", "why"),
    [
        (lambda: nn.LSTM(I, 1024), torch.bfloat16, None),
        (lambda: nn.GRU(I, 1024, 2, bidirectional=True), torch.float16, None),
        (lambda: nn.RNN(I, 1024), torch.bfloat16, None),
        (lambda: nn.LSTM(I, 1024), torch.float32, "only 16 bits have measured faster"),
        (lambda: nn.LSTM(I, 1023), torch.bfloat16, "fewer than 1024 units have not been measured"),
        (lambda: nn.LSTM(I, 1024, proj_size=2), torch.bfloat16, "projections have not measured"),
        (lambda: nn.LSTMCell(I, 1024), torch.bfloat16, "single steps have not measured faster"),
    ],
)
def test_on_a_gpu_layers_are_swapped_that_measured_faster(monkeypatch, make, dtype, why):
    module = make()
    operator = type(module).__name__.lower().removesuffix("cell")
    call = backends.Call(operator, "cuda", dtype)
    monkeypatch.setattr(backends, "_CUDA_OPERATORS", (operator,))
    monkeypatch.setattr(backends, "_choose", backends._choose.__wrapped__)
    found = _why_cudnn(module, call)
    assert found == why or (why is not None and found is not None and found.startswith(why))
    monkeypatch.setattr(backends, "_CUDA_OPERATORS", ())
    if why is None:
        assert _why_cudnn(module, call) == "only the CUDA kernels have measured faster"


def test_a_module_is_compiled_that_torch_would_not(backend):
    torch._dynamo.reset()
    model = nn.LSTM(I, H)
    x = normal(T, B, I)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    trifuse.fuse(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x)[0], model(x)[0])
