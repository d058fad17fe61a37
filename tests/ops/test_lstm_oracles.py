"""lstm, gru and rnn against torch's modules, ONNX Runtime and ONNX's node tests."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from attention_cases import normal
from lstm_cases import kernel_fixture
from onnx import TensorProto, helper
from onnx_cases import onnx_cases
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.testing._internal.common_modules import module_db

import trifuse
from trifuse.ops import gru as gru_ops
from trifuse.ops import lstm as lstm_ops
from trifuse.ops import rnn as rnn_ops

kernel = kernel_fixture("lstm")

# torch.nn ---------------------------------------------------------------------------------------


def parameters_of(module: nn.RNNBase) -> list[Any]:
    """Returns the parameters of a one-layer module as `layer` takes them."""
    suffixes = ("", "_reverse") if module.bidirectional else ("",)
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
    cls = lstm_ops.Parameters if isinstance(module, nn.LSTM) else gru_ops.Parameters
    return [
        cls(*(getattr(module, f"{n}_l0{s}", None) for n in names if n in cls._fields))
        for s in suffixes
    ]


def ours(module: nn.RNNBase, input: Tensor, hx: Any, lengths: Tensor | None = None) -> Any:
    """Runs our layer on the arguments of the module, (T, B, I), with padded sequences."""
    reverse = (False, True)[: 2 if module.bidirectional else 1]
    if isinstance(module, nn.GRU):
        return gru_ops.layer(input, hx, parameters_of(module), lengths, reverse=reverse)
    if isinstance(module, nn.RNN):
        options = {"reverse": reverse, "nonlinearity": module.nonlinearity}
        return rnn_ops.layer(input, hx, parameters_of(module), lengths, **options)
    h0, c0 = (None, None) if hx is None else hx
    output, *states = lstm_ops.layer(input, h0, c0, parameters_of(module), lengths, reverse=reverse)
    return output, tuple(states)


def flat(results: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(results) if isinstance(t, Tensor)]


def assert_module_agrees(
    module: nn.RNNBase, input: Tensor, hx: Any, lengths: Tensor | None
) -> None:
    """Results and every gradient, in float64, against torch's own."""
    leaves = [input.requires_grad_(), *flat(hx), *module.parameters()]
    for t in flat(hx):
        t.requires_grad_()
    if lengths is None:
        expected = module(input, hx)
    else:
        packed = pack_padded_sequence(input, lengths, enforce_sorted=False)
        output, states = module(packed, hx)
        expected = (pad_packed_sequence(output, total_length=len(input))[0], states)
    actual = ours(module, input, hx, lengths)
    upstream = [normal(*t.shape, seed=i, dtype=t.dtype) for i, t in enumerate(flat(expected))]
    for results in zip(flat(actual), flat(expected), strict=True):
        torch.testing.assert_close(*results)
    grads = (torch.autograd.grad(flat(r), leaves, upstream) for r in (actual, expected))
    for actual_grad, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(actual_grad, wanted)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["LSTM", "LSTM with a projection", "GRU", "tanh", "relu"])
def test_torchs_modules(kernel, kind, bias, bidirectional, ragged):
    """Includes PackedSequence, which allows no sequence of length 0."""
    torch.manual_seed(0)
    options = {"bias": bias, "bidirectional": bidirectional}
    if kind == "GRU":
        module: nn.RNNBase = nn.GRU(5, 7, **options)
    elif kind in ("tanh", "relu"):
        module = nn.RNN(5, 7, nonlinearity=kind, **options)
    else:
        module = nn.LSTM(5, 7, proj_size=3 if "projection" in kind else 0, **options)
    module.double()
    T, B, D = 6, 4, 2 if bidirectional else 1
    lengths = torch.tensor([4, 6, 1, 4]) if ragged else None
    R = getattr(module, "proj_size", 0) or 7
    h0 = normal(D, B, R, seed=1, dtype=torch.float64)
    hx = (h0, normal(D, B, 7, seed=2, dtype=torch.float64)) if "LSTM" in kind else h0
    for states in (hx, None):
        assert_module_agrees(module, normal(T, B, 5, dtype=torch.float64), states, lengths)


def samples() -> list[tuple[str, Any]]:
    """ModuleInfo's samples; they use no dropout between layers."""
    found = []
    for info in module_db:
        if issubclass(info.module_cls, (nn.RNNBase, nn.RNNCellBase)):
            inputs = info.module_inputs_func(info, "cpu", torch.float64, False, training=False)
            for i, sample in enumerate(inputs):
                found.append((f"{info.module_cls.__name__} {i}", (info.module_cls, sample)))
    return found


@pytest.mark.parametrize(
    ("cls", "sample"), [s[1] for s in samples()], ids=[s[0] for s in samples()]
)
def test_torchs_samples(cls, sample):
    """For modules of several layers, calls ours one after another."""
    torch.manual_seed(0)
    module = cls(*sample.constructor_input.args, **sample.constructor_input.kwargs).double()
    args = sample.forward_input.args
    expected = module(*args)
    if issubclass(cls, nn.RNNCellBase):
        cell = getattr(trifuse, {nn.LSTMCell: "lstm", nn.GRUCell: "gru"}.get(cls, "rnn") + "_cell")
        hx = args[1] if len(args) > 1 else None
        actual = cell(args[0], hx, *module.parameters(), **activation(module))
    else:
        actual = stacked(module, *args)
    for a, e in zip(flat(actual), flat(expected), strict=True):
        torch.testing.assert_close(a, e)


def activation(module: nn.Module) -> dict[str, str]:
    """Returns an RNN's option."""
    return {n: getattr(module, n) for n in ("nonlinearity",) if hasattr(module, n)}


def stacked(module: nn.RNNBase, input: Any, hx: Any = None) -> list[Tensor]:
    """Runs a module's layers by the public functions, one direction at a time."""
    packed = input if isinstance(input, PackedSequence) else None
    lengths, x = None, input
    if packed is not None:
        x, lengths = pad_packed_sequence(packed)
    elif input.dim() == 2:
        x = input.unsqueeze(1)
    elif module.batch_first:
        x = input.transpose(0, 1)
    states = [] if hx is None else list(hx if isinstance(hx, tuple) else (hx,))
    states = [t.unsqueeze(1) if t.dim() == 2 else t for t in states]
    lstm, last = isinstance(module, nn.LSTM), []
    for layer in range(module.num_layers):
        outputs = []
        for d, suffix in enumerate(("", "_reverse")[: 2 if module.bidirectional else 1]):
            k = layer * (2 if module.bidirectional else 1) + d
            p = {
                n: getattr(module, f"{n}_l{layer}{suffix}", None)
                for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
            }
            own = [t[k] for t in states] or None
            if lstm:
                y, (h, c) = trifuse.lstm(x, own, **p, lengths=lengths, reverse=d == 1)
                last.append((h, c))
            else:
                p.pop("weight_hr")
                function = trifuse.gru if isinstance(module, nn.GRU) else trifuse.rnn
                options = {"lengths": lengths, "reverse": d == 1, **activation(module)}
                y, h = function(x, own and own[0], **p, **options)
                last.append((h,))
            outputs.append(y)
        x = torch.cat(outputs, -1)
    result = [torch.stack(t) for t in zip(*last, strict=True)]
    if packed is not None:
        x = pack_padded_sequence(x, lengths, enforce_sorted=False).data
        return [x, *flat(packed)[1:], *result]
    if input.dim() == 2:
        return [x.squeeze(1), *(t.squeeze(1) for t in result)]
    return [x.transpose(0, 1) if module.batch_first else x, *result]


def test_all_of_torchs_samples_run():
    counted = {name.split()[0] for name, _ in samples()}
    assert counted == {f"{name}{cell}" for name in ("LSTM", "GRU", "RNN") for cell in ("", "Cell")}
    assert len(samples()) >= 30


# ONNX Runtime -----------------------------------------------------------------------------------


def to_onnx(t: Tensor, order: list[int]) -> np.ndarray:
    """Reorders the gates along dimension 0."""
    chunks = t.chunk(len(order), 0)
    return torch.cat([chunks[i] for i in order]).numpy()


# Ours are i, f, g, o and r, z, n; ONNX's are i, o, f, g and z, r, h.
IOFC, ZRH = [0, 3, 1, 2], [1, 0, 2]


def onnx_runtime(operator: str, attributes: dict[str, Any], **inputs: np.ndarray | None) -> Any:
    """Runs one node; ``inputs`` have the names of ONNX's specification."""
    states = {"LSTM": ("Y", "Y_h", "Y_c"), "GRU": ("Y", "Y_h"), "RNN": ("Y", "Y_h")}[operator]
    given = {k: v for k, v in inputs.items() if v is not None}
    names = [k if v is not None else "" for k, v in inputs.items()]
    types = {np.dtype("float32"): TensorProto.FLOAT, np.dtype("int32"): TensorProto.INT32}
    graph = helper.make_graph(
        [helper.make_node(operator, names, list(states), **attributes)],
        "node",
        [helper.make_tensor_value_info(k, types[v.dtype], v.shape) for k, v in given.items()],
        [helper.make_tensor_value_info(k, TensorProto.FLOAT, None) for k in states],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    return [torch.from_numpy(t) for t in session.run(None, given)]


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("peephole", [False, True])
def test_onnx_runtime_lstm(kernel, peephole, coupled, direction, ragged):
    """Peepholes, coupled gates, lengths (0 among them) and both directions."""
    T, B, I, H = 6, 4, 5, 8  # noqa: E741
    D = 2 if direction == "bidirectional" else 1
    W, R, b = (normal(D, 4 * H, *s, seed=i) * 0.5 for i, s in enumerate(((I,), (H,), (2,))))
    peepholes = normal(D, 3, H, seed=4) if peephole else None
    x, h0, c0 = normal(T, B, I, seed=5), normal(D, B, H, seed=6), normal(D, B, H, seed=7)
    lengths = torch.tensor([3, 6, 0, 1]) if ragged else None
    Y, Y_h, Y_c = onnx_runtime(
        "LSTM",
        {"hidden_size": H, "direction": direction, "input_forget": int(coupled)},
        X=x.numpy(),
        W=np.stack([to_onnx(w, IOFC) for w in W]),
        R=np.stack([to_onnx(w, IOFC) for w in R]),
        B=np.stack([np.concatenate([to_onnx(v, IOFC) for v in d.unbind(1)]) for d in b]),
        sequence_lens=None if lengths is None else lengths.int().numpy(),
        initial_h=h0.numpy(),
        initial_c=c0.numpy(),
        P=None
        if peepholes is None
        else np.stack([to_onnx(p.flatten(), [0, 2, 1]) for p in peepholes]),
    )

    def kept(t: Tensor) -> Tensor:
        """Drops f of the gates i, f, g, o if the LSTM is coupled."""
        i, _, g, o = t.chunk(4)
        return torch.cat([i, g, o]) if coupled else t

    which = [0, 2] if coupled else slice(None)
    parameters = [
        lstm_ops.Parameters(
            kept(W[d]),
            kept(R[d]),
            kept(b[d, :, 0]),
            kept(b[d, :, 1]),
            weight_peephole=None if peepholes is None else peepholes[d][which],
        )
        for d in range(D)
    ]
    reverse = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[direction]
    output, h_n, c_n = lstm_ops.layer(
        x, h0, c0, parameters, lengths, reverse=reverse, coupled=coupled
    )
    torch.testing.assert_close(output, Y.transpose(1, 2).flatten(2), rtol=1e-4, atol=1e-5)
    # For a row without steps ONNX Runtime returns zero states; ours keep their values.
    some = slice(None) if lengths is None else lengths > 0
    torch.testing.assert_close(h_n[:, some], Y_h[:, some], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(c_n[:, some], Y_c[:, some], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("linear_before_reset", [True, False])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_onnx_runtime_gru(direction, ragged, linear_before_reset):
    """The reset gate is applied after the product, as in torch, or before it."""
    T, B, I, H = 6, 4, 5, 8  # noqa: E741
    D = 2 if direction == "bidirectional" else 1
    W, R, b = (normal(D, 3 * H, *s, seed=i) * 0.5 for i, s in enumerate(((I,), (H,), (2,))))
    x, h0 = normal(T, B, I, seed=5), normal(D, B, H, seed=6)
    lengths = torch.tensor([3, 6, 2, 1]) if ragged else None
    Y, Y_h = onnx_runtime(
        "GRU",
        {
            "hidden_size": H,
            "direction": direction,
            "linear_before_reset": int(linear_before_reset),
        },
        X=x.numpy(),
        W=np.stack([to_onnx(w, ZRH) for w in W]),
        R=np.stack([to_onnx(w, ZRH) for w in R]),
        B=np.stack([np.concatenate([to_onnx(v, ZRH) for v in d.unbind(1)]) for d in b]),
        sequence_lens=None if lengths is None else lengths.int().numpy(),
        initial_h=h0.numpy(),
    )
    parameters = [gru_ops.Parameters(W[d], R[d], b[d, :, 0], b[d, :, 1]) for d in range(D)]
    reverse = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[direction]
    output, h_n = gru_ops.layer(
        x, h0, parameters, lengths, reverse=reverse, linear_before_reset=linear_before_reset
    )
    torch.testing.assert_close(output, Y.transpose(1, 2).flatten(2), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(h_n, Y_h, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("nonlinearity", ["Tanh", "Relu"])
def test_onnx_runtime_rnn(nonlinearity, direction, ragged):
    T, B, I, H = 6, 4, 5, 8  # noqa: E741
    D = 2 if direction == "bidirectional" else 1
    W, R, b = (normal(D, H, *s, seed=i) * 0.5 for i, s in enumerate(((I,), (H,), (2,))))
    x, h0 = normal(T, B, I, seed=5), normal(D, B, H, seed=6)
    lengths = torch.tensor([3, 6, 2, 1]) if ragged else None
    Y, Y_h = onnx_runtime(
        "RNN",
        {"hidden_size": H, "direction": direction, "activations": [nonlinearity] * D},
        X=x.numpy(),
        W=W.numpy(),
        R=R.numpy(),
        B=b.transpose(1, 2).flatten(1).numpy(),
        sequence_lens=None if lengths is None else lengths.int().numpy(),
        initial_h=h0.numpy(),
    )
    parameters = [rnn_ops.Parameters(W[d], R[d], b[d, :, 0], b[d, :, 1]) for d in range(D)]
    reverse = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[direction]
    options = {"reverse": reverse, "nonlinearity": nonlinearity.lower()}
    output, h_n = rnn_ops.layer(x, h0, parameters, lengths, **options)
    torch.testing.assert_close(output, Y.transpose(1, 2).flatten(2), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(h_n, Y_h, rtol=1e-4, atol=1e-5)


# ONNX's node tests ------------------------------------------------------------------------------


@functools.cache
def onnx_nodes() -> dict[str, Any]:
    """Maps the name of a test to its node's operator, attributes, inputs and outputs by name."""
    nodes = {}
    names = ("X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P")
    for case in onnx_cases("LSTM", "GRU", "RNN"):
        named = {n: t for n, t in zip(names, case.inputs, strict=False) if t is not None}
        outputs = zip(("Y", "Y_h", "Y_c"), case.outputs, strict=False)
        results = {n: t for n, t in outputs if t is not None}
        nodes[case.name] = (case.operator, case.attributes, named, results)
    return nodes


def from_onnx(t: Tensor, order: list[int]) -> Tensor:
    chunks = t.chunk(len(order), 0)
    return torch.cat([chunks[order.index(i)] for i in range(len(order))])


@pytest.mark.parametrize("name", sorted(onnx_nodes()))
def test_onnx_nodes(name):
    operator, attributes, inputs, outputs = onnx_nodes()[name]
    batch_first = attributes.get("layout", 0) == 1
    x = inputs["X"].transpose(0, 1) if batch_first else inputs["X"]
    order = {"LSTM": IOFC, "GRU": ZRH, "RNN": [0]}[operator]
    D, H = inputs["W"].shape[0], attributes["hidden_size"]

    def state(key: str) -> Tensor | None:
        t = inputs.get(key)
        return t.transpose(0, 1) if t is not None and batch_first else t

    parameters = []
    for d in range(D):
        biases = [None, None]
        if "B" in inputs:
            biases = [from_onnx(v, order) for v in inputs["B"][d].chunk(2)]
        weights = [from_onnx(inputs[key][d], order) for key in ("W", "R")]
        if operator == "LSTM":
            p = inputs["P"][d].view(3, H)[[0, 2, 1]] if "P" in inputs else None
            parameters.append(lstm_ops.Parameters(*weights, *biases, weight_peephole=p))
        else:  # the parameters of an rnn are of the same class
            parameters.append(gru_ops.Parameters(*weights, *biases))
    direction = attributes.get("direction", b"forward").decode()
    reverse = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[direction]
    lengths = inputs.get("sequence_lens")
    if operator == "LSTM":
        results = lstm_ops.layer(
            x, state("initial_h"), state("initial_c"), parameters, lengths, reverse=reverse
        )
    else:
        assert attributes.get("activations") in (None, [b"Tanh"])
        options: dict[str, Any] = {"reverse": reverse}
        if operator == "GRU":
            options["linear_before_reset"] = attributes.get("linear_before_reset", 0) == 1
        ops = gru_ops if operator == "GRU" else rnn_ops
        results = ops.layer(x, state("initial_h"), parameters, lengths, **options)
    output = results[0].unflatten(2, (D, H))  # (T, B, D, H)
    actual = {"Y": output.transpose(0, 1) if batch_first else output.transpose(1, 2)}
    for key, t in zip(("Y_h", "Y_c"), results[1:], strict=False):
        actual[key] = t.transpose(0, 1) if batch_first else t
    for key, expected in outputs.items():
        torch.testing.assert_close(actual[key], expected, rtol=1e-4, atol=1e-5)


def test_all_of_onnxs_nodes_run():
    counted = [n[0] for n in onnx_nodes().values()]
    assert counted.count("LSTM") >= 4
    assert counted.count("GRU") >= 6
    assert counted.count("RNN") >= 3
