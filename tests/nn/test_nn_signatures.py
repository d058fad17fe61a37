"""Modules named like torch's have the same arguments in the same order, the same defaults, methods
and attributes, and can be saved, cast and shared in the same ways."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import warnings

import pytest
import torch
from torch import Tensor, nn

import trifuse.nn

TWINS = [name for name in trifuse.nn.__all__ if hasattr(nn, name)]


def arguments(function):
    return [(each.name, each.default) for each in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", TWINS)
def test_constructor(name):
    theirs = arguments(getattr(nn, name))
    if issubclass(getattr(nn, name), nn.RNNBase):  # torch's own signature is *args
        theirs = [each for each in arguments(nn.RNNBase) if each[0] not in ("mode", "proj_size")]
        if name == "RNN":  # its place in torch, by name or as the fourth
            theirs.insert(3, ("nonlinearity", "tanh"))
    ours = arguments(getattr(trifuse.nn, name))
    assert [each for each in ours if each[0] != "proj_size"][: len(theirs)] == theirs


@pytest.mark.parametrize("name", TWINS)
def test_forward(name):
    theirs = arguments(getattr(nn, name).forward)
    assert arguments(getattr(trifuse.nn, name).forward)[: len(theirs)] == theirs


LAYER = {"d_model": 8, "nhead": 2, "dim_feedforward": 8}
OPTIONS: dict[str, dict[str, int]] = {
    "MultiheadAttention": {"embed_dim": 8, "num_heads": 2},
    "TransformerEncoderLayer": LAYER,
    "TransformerDecoderLayer": LAYER,
    "Dropout": {},
    "LayerNorm": {"normalized_shape": 8},
    "Linear": {"in_features": 8, "out_features": 8},
}
RECURRENT = {"input_size": 8, "hidden_size": 8}
SIZES = {
    "MultiheadAttention": ("embed_dim", "kdim", "vdim"),
    "TransformerEncoderLayer": ("d_model", "dim_feedforward"),
    "TransformerDecoderLayer": ("d_model", "dim_feedforward"),
    "LayerNorm": ("normalized_shape",),
    "Linear": ("in_features", "out_features"),
    **dict.fromkeys(
        ("GRU", "RNN", "GRUCell", "LSTMCell", "RNNCell"), ("input_size", "hidden_size")
    ),
    "LSTM": ("input_size", "hidden_size", "proj_size"),
}


@pytest.mark.parametrize(
    ("name", "argument"), [(name, argument) for name, each in SIZES.items() for argument in each]
)
def test_sizes_beyond_64_bits(name, argument):
    """Also where a parameter has a multiple of the size, and wherever the argument stands."""
    init = getattr(trifuse.nn, name)
    sizes = OPTIONS.get(name, RECURRENT)
    for size in (2**61, 2**63, 2**80):
        with pytest.raises(ValueError, match=rf"^{argument}: expected .*size.*; got {size}"):
            init(**{**sizes, argument: size})
    if argument in sizes:
        with pytest.raises(ValueError, match=rf"^{argument}: expected .*size.*; got {2**63}"):
            init(*(2**63 if each == argument else value for each, value in sizes.items()))
    if argument == "normalized_shape":
        with pytest.raises(ValueError, match=rf"^{argument}: expected .*size.*; got {2**63}"):
            init([4, 2**63])


def make(name: str) -> nn.Module:
    """Returns torch's module."""
    torch.manual_seed(0)
    if name in ("TransformerEncoder", "TransformerDecoder"):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "enable_nested_tensor is True")
            return getattr(nn, name)(getattr(nn, f"{name}Layer")(**LAYER), 2).eval()
    return getattr(nn, name)(**OPTIONS.get(name, RECURRENT)).eval()


def fused(name: str) -> nn.Module:
    """Returns torch's module with our class, as trifuse.fuse makes it."""
    module = make(name)
    trifuse.fuse(module)
    module.__class__ = getattr(trifuse.nn, name)  # even if fuse found torch's faster
    return module


def run(module: nn.Module, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    inputs = {
        "MultiheadAttention": (x, x, x),
        "TransformerDecoder": (x, x),
        "TransformerDecoderLayer": (x, x),
        "LSTMCell": (x[0],),
        "GRUCell": (x[0],),
        "RNNCell": (x[0],),
    }
    with torch.no_grad():
        out = module(*inputs.get(name, (x,)))
    return out if isinstance(out, Tensor) else out[0]


@pytest.mark.parametrize("name", TWINS)
def test_attributes(name):
    theirs, ours = make(name), fused(name)
    assert set(dir(theirs)) <= set(dir(ours))
    assert repr(ours) == repr(theirs)
    for attribute, value in vars(theirs).items():
        if isinstance(value, (bool, int, float, str)):
            assert getattr(ours, attribute) == value, attribute


@pytest.mark.parametrize("name", TWINS)
def test_initialisation_again(name):
    theirs, ours = make(name), fused(name)
    for module in (theirs, ours):
        torch.manual_seed(3)
        for part in module.modules():
            for method in ("reset_parameters", "_reset_parameters"):
                if hasattr(part, method):
                    getattr(part, method)()
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


@pytest.mark.parametrize("name", TWINS)
def test_copied_and_saved(name):
    ours = fused(name)
    wanted = run(ours, name)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    twins = (
        copy.deepcopy(ours),
        pickle.loads(pickle.dumps(ours)),
        torch.load(file, weights_only=False),
        copy.deepcopy(ours).share_memory(),
        copy.deepcopy(ours).to("cpu"),
    )
    for twin in twins:
        assert type(twin) is type(ours)
        assert torch.equal(run(twin, name), wanted)


@pytest.mark.parametrize("name", TWINS)
def test_state_dict_both_ways(name):
    theirs, ours = make(name), fused(name)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    torch.testing.assert_close(run(ours, name), run(theirs, name))
    make(name).load_state_dict(ours.state_dict(), strict=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", TWINS)
def test_other_dtypes(name, dtype):
    ours, exact = fused(name).to(dtype), fused(name).double()
    got = run(ours, name, dtype)
    assert got.dtype == dtype
    accuracy = {} if dtype == torch.float64 else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(got.double(), run(exact, name, torch.float64), **accuracy)


def test_lstm_checks_as_torchs():
    theirs, ours = make("LSTM"), fused("LSTM")
    x, h = torch.randn(4, 3, 8), torch.zeros(1, 3, 8)
    for module in (theirs, ours):
        module.flatten_parameters()
        module.check_forward_args(x, (h, h), None)
        with pytest.raises(RuntimeError, match="Expected hidden"):
            module.check_forward_args(x, (h[:, :2], h), None)
    order = torch.tensor([2, 0, 1])
    got, wanted = (module.permute_hidden((h, h), order) for module in (ours, theirs))
    assert all(map(torch.equal, got, wanted))
    for method in ("get_expected_hidden_size", "get_expected_cell_size"):
        assert getattr(ours, method)(x, None) == getattr(theirs, method)(x, None)
    ours.weight_ih_l0 = nn.Parameter(torch.zeros(32, 8))
    assert ours.all_weights[0][0] is ours._flat_weights[0] is ours.weight_ih_l0
