"""Fused modules under torch's quantization and reparametrizations: the same result or an error."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.ao import quantization
from torch.ao.quantization import quantize_fx
from torch.nn.utils import parametrizations, prune

import trifuse
from trifuse.ops import _linear_choice

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 16)
        self.lstm = nn.LSTM(16, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 16)
        self.linear = nn.Linear(16, 16)
        self.cell = nn.GRUCell(16, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.layer(self.lstm(self.embedding(ids))[0])
        return self.cell(self.linear(x).flatten(0, 1))


@pytest.fixture(autouse=True)
def our_product(monkeypatch) -> Iterator[None]:
    monkeypatch.setenv("TRIFUSE_LINEAR", "cpp")
    monkeypatch.setattr(_linear_choice, "_made", {})
    engine = torch.backends.quantized.engine
    engines = [name for name in torch.backends.quantized.supported_engines if name != "none"]
    if not engines:
        pytest.skip("torch was built without an engine for quantized products")
    torch.backends.quantized.engine = engines[-1]
    yield
    torch.backends.quantized.engine = engine


def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


def configuration() -> quantization.QConfig:
    return quantization.default_dynamic_qconfig


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ({nn.Linear}, "Linear"),
        ({nn.LSTM}, "LSTM"),
        ({nn.GRUCell}, "GRUCell"),
        ({nn.Linear, nn.LSTM}, "LSTM"),
        (None, "LSTM"),
        ({"linear": configuration()}, "Linear"),
    ],
)
def test_dynamic(spec, name, inplace):
    fused = model()
    report = trifuse.fuse(fused)
    if type(fused.linear) is nn.Linear and name == "Linear":
        pytest.skip("the extension is missing, and with it our product")
    before = [type(module) for module in fused.modules()]
    match = rf"expected torch\.nn\.{name}, .*; got trifuse\.nn\.{name}\. Quantize before"
    with pytest.raises(TypeError, match=match):
        quantization.quantize_dynamic(fused, spec, inplace=inplace)
    assert [type(module) for module in fused.modules()] == before
    report.revert()
    kinds = {type(module) for module in quantization.quantize_dynamic(model(), spec).modules()}
    if inplace:  # attributes set before the error would disturb a second call
        for module in fused.modules():
            vars(module).pop("qconfig", None)
    reverted = quantization.quantize_dynamic(fused, spec)
    assert {type(module) for module in reverted.modules()} == kinds


def test_what_is_not_fused_is_quantized_beside_it():
    fused = model()
    trifuse.fuse(fused)
    spec = {nn.Embedding: quantization.float_qparams_weight_only_qconfig}
    quantized = quantization.quantize_dynamic(fused, spec)
    assert type(quantized.embedding) is torch.ao.nn.quantized.Embedding
    assert type(quantized.lstm) is trifuse.nn.LSTM
    assert not hasattr(quantized.lstm, "qconfig")  # torch removes it in the end


@pytest.mark.parametrize("training", [False, True])
def test_static(training):
    fused = model().train(training)
    trifuse.fuse(fused)
    prepare = quantization.prepare_qat if training else quantization.prepare
    engine = torch.backends.quantized.engine
    get = quantization.get_default_qat_qconfig if training else quantization.get_default_qconfig
    fused.qconfig = get(engine)
    with pytest.raises(TypeError, match=r"Quantize before trifuse\.fuse"):
        prepare(fused)


@pytest.mark.parametrize("part", ["lstm", "layer", "linear", "cell"])
def test_traced(part):
    fused = nn.Sequential(getattr(model(), part))
    trifuse.fuse(fused)
    mapping = quantization.get_default_qconfig_mapping(torch.backends.quantized.engine)
    with pytest.raises((torch.fx.proxy.TraceError, TypeError), match=r"traced|expected a Tensor"):
        quantize_fx.prepare_fx(fused, mapping, (torch.randn(3, 2, 16),))


def test_prepared_modules_are_left():
    """``convert`` would not recognise a prepared module once it is fused."""
    prepared = model()
    prepared.linear.qconfig = quantization.get_default_qconfig(torch.backends.quantized.engine)
    quantization.prepare(prepared, inplace=True)
    report = trifuse.fuse(prepared)
    assert ("linear", "Linear", "it is prepared for quantization") in report.left
    prepared(torch.randint(0, 10, (3, 2)))
    converted = quantization.convert(prepared)
    assert type(converted.linear) is torch.ao.nn.quantized.Linear


def test_fused_after_quantization():
    quantized = quantization.quantize_dynamic(model(), {nn.Linear, nn.LSTM})
    ids = torch.randint(0, 10, (3, 2))
    wanted = quantized(ids)
    report = trifuse.fuse(quantized)
    assert "layer" in [swapped.path for swapped in report.swapped]
    torch.testing.assert_close(quantized(ids), wanted)


def weight_norm(module: nn.Module, name: str) -> None:
    nn.utils.weight_norm(module, name)


def spectral_norm(module: nn.Module, name: str) -> None:
    nn.utils.spectral_norm(module, name)


def pruned(module: nn.Module, name: str) -> None:
    prune.l1_unstructured(module, name, 0.5)


@pytest.mark.parametrize(
    "change",
    [
        weight_norm,
        spectral_norm,
        pruned,
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
    ],
)
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: nn.Linear(16, 16), "weight"),
        (lambda: nn.LSTM(16, 16), "weight_hh_l0"),
        (lambda: nn.GRU(16, 16), "weight_ih_l0"),
        (lambda: nn.RNN(16, 16), "weight_ih_l0"),
        (lambda: nn.MultiheadAttention(16, 2), "in_proj_weight"),
    ],
    ids=["linear", "lstm", "gru", "rnn", "attention"],
)
@pytest.mark.parametrize("order", ["fused first", "fused last", "frozen last"])
def test_reparametrized(make, name, change, order):
    torch.manual_seed(0)
    plain = make()
    x = torch.randn(80, 2, 16)
    inputs = (x, x, x) if isinstance(plain, nn.MultiheadAttention) else (x,)
    fused = copy.deepcopy(plain)
    if order == "fused first":
        trifuse.fuse(fused)
    for module in (plain, fused):
        torch.manual_seed(1)
        change(module, name)
        module.eval()
    if order != "fused first":
        report = trifuse.fuse(fused, freeze=order == "frozen last")
        assert not report.frozen
    with torch.no_grad():
        for _ in range(2):  # a hook makes the weight again in each call
            got, wanted = fused(*inputs), plain(*inputs)
            if isinstance(plain, nn.Linear):
                got, wanted = (got,), (wanted,)
            torch.testing.assert_close(got[0], wanted[0], rtol=1e-3, atol=1e-4)
