"""trifuse.nn.LSTM, GRU, RNN and their cells against torch.nn's, and options that torch's lack."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from attention_cases import assert_equal, normal
from tested_kernels import KERNELS
from torch import Tensor, nn
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
)

import trifuse

T, B, I, H = 5, 4, 3, 6  # noqa: E741
LENGTHS = torch.tensor([3, 5, 1, 4])

KINDS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "LSTM": (nn.LSTM, trifuse.nn.LSTM, {}),
    "LSTM with a projection": (nn.LSTM, trifuse.nn.LSTM, {"proj_size": 2}),
    "GRU": (nn.GRU, trifuse.nn.GRU, {}),
    "RNN": (nn.RNN, trifuse.nn.RNN, {}),
    "RNN with relu": (nn.RNN, trifuse.nn.RNN, {"nonlinearity": "relu"}),
}


def pair(kind: str, **options: Any) -> tuple[Any, Any]:
    """Returns torch's module and ours, which has loaded its state_dict."""
    theirs, ours, more = KINDS[kind]
    torch.manual_seed(0)
    module = theirs(I, H, **more, **options).double()
    twin = ours(I, H, **more, **options).double()
    twin.load_state_dict(module.state_dict())
    return module, twin


def states(module: Any, batch: tuple[int, ...]) -> Any:
    D = module.num_layers * (2 if module.bidirectional else 1)
    h0 = normal(D, *batch, module.proj_size or H, seed=1, dtype=torch.float64)
    if not isinstance(module, nn.LSTM):
        return h0
    return h0, normal(D, *batch, H, seed=2, dtype=torch.float64)


def tensors(results: Any) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(results)
    return [t for t in leaves if isinstance(t, Tensor)]


def assert_agree(module: Any, twin: Any, input: Any, hx: Any) -> None:
    """Checks results and all gradients, in float64."""
    results = []
    for m in (module, twin):
        leaves = [t.detach().requires_grad_() for t in tensors(hx)]
        own = None if hx is None else (leaves[0] if len(leaves) == 1 else tuple(leaves))
        data = input.data.detach().requires_grad_()
        x = data
        if isinstance(input, PackedSequence):
            x = PackedSequence(data, *input[1:])
        result = tensors(m(x, own))
        floating = [t for t in result if t.is_floating_point()]
        upstream = [normal(*t.shape, seed=i, dtype=t.dtype) for i, t in enumerate(floating)]
        grads = torch.autograd.grad(floating, [data, *leaves, *m.parameters()], upstream)
        results.append([*result, *grads])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


OPTIONS = [
    dict(zip(("num_layers", "bias", "bidirectional"), values, strict=True))
    for values in itertools.product((1, 2), (True, False), (False, True))
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_torch(kind, options):
    """Every shape of input agrees, with and without initial states."""
    for batch_first in (False, True):
        module, twin = pair(kind, batch_first=batch_first, **options)
        x = normal(T, B, I, dtype=torch.float64)
        for hx in (None, states(module, (B,))):
            assert_agree(module, twin, x.transpose(0, 1) if batch_first else x, hx)
            for lengths in (LENGTHS, LENGTHS.sort(descending=True)[0]):
                in_order = lengths is not LENGTHS
                packed = pack_padded_sequence(x, lengths, enforce_sorted=in_order)
                assert_agree(module, twin, packed, hx)
        assert_agree(module, twin, x[:, 0], states(module, ()))


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_instead_of_packing(kind):
    """The same numbers without a PackedSequence; a row without steps works too."""
    module, twin = pair(kind, num_layers=2, bidirectional=True)
    x = normal(T, B, I, dtype=torch.float64)
    packed = module(pack_padded_sequence(x, LENGTHS, enforce_sorted=False))
    expected = [pad_packed_sequence(packed[0], total_length=T)[0], *tensors(packed[1])]
    for a, e in zip(tensors(twin(x, lengths=LENGTHS)), expected, strict=True):
        torch.testing.assert_close(a, e)
    twin.batch_first = True
    output, _ = twin(x.transpose(0, 1), lengths=LENGTHS)
    torch.testing.assert_close(output.transpose(0, 1), expected[0])
    output, _ = twin(x.transpose(0, 1), lengths=torch.zeros(B, dtype=torch.int64))
    assert output.eq(0).all()
    with pytest.raises(ValueError, match="lengths: expected None beside a PackedSequence"):
        twin(pack_padded_sequence(x, LENGTHS, enforce_sorted=False), lengths=LENGTHS)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("kind", "options"),
    [("LSTMCell", {}), ("GRUCell", {}), ("RNNCell", {}), ("RNNCell", {"nonlinearity": "relu"})],
    ids=str,
)
def test_cells(kind, options, bias):
    module = getattr(nn, kind)(I, H, bias, **options).double()
    twin = getattr(trifuse.nn, kind)(I, H, bias, **options).double()
    twin.load_state_dict(module.state_dict())
    h0, c0 = (normal(B, H, seed=i, dtype=torch.float64) for i in range(2))
    x = normal(B, I, dtype=torch.float64).requires_grad_()
    for hx in (None, (h0, c0)):
        for row in (slice(None), 1):
            own = hx if hx is None else tuple(t[row] for t in hx)
            own = own if kind == "LSTMCell" or own is None else own[0]
            results = [tensors(m(x[row], own)) for m in (module, twin)]
            for e, a in zip(*results, strict=True):
                torch.testing.assert_close(a, e)
            grads = [
                torch.autograd.grad(sum(t.sin().sum() for t in r), [x, *m.parameters()])
                for r, m in zip(results, (module, twin), strict=True)
            ]
            for e, a in zip(*grads, strict=True):
                torch.testing.assert_close(a, e)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cell_with_one_of_its_states(dtype):
    """A missing state is zeros; c is returned in the dtype of c0, or of h if c0 is missing."""
    cell, x = trifuse.nn.LSTMCell(I, H).to(dtype), normal(B, I, dtype=dtype)
    h0, zeros = normal(B, H, seed=1, dtype=dtype), torch.zeros(B, H, dtype=dtype)
    c0 = normal(B, H, seed=2)
    for hx, full in (((h0, None), (h0, zeros)), ((None, c0), (zeros, c0)), ((None,) * 2, None)):
        for a, e in zip(cell(x, hx), cell(x, full), strict=True):
            torch.testing.assert_close(a, e, rtol=0, atol=0)
    assert [t.dtype for t in cell(x, (None, c0))] == [dtype, torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_dtypes_of_results_are_torchs(kind, dtype):
    _, twin = pair(kind)
    twin.to(dtype)
    x = normal(T, B, I, dtype=dtype)
    assert {t.dtype for t in tensors(twin(x))} == {dtype}
    if kind == "LSTM":
        # A c0 in float32 is carried on without rounding.
        h0, c0 = torch.zeros(1, B, H, dtype=dtype), torch.zeros(1, B, H)
        whole, (h_n, c_n) = twin(x, (h0, c0))
        assert c_n.dtype == torch.float32
        first, hx = twin(x[:2], (h0, c0))
        second, (h, c) = twin(x[2:], hx)
        torch.testing.assert_close(torch.cat([first, second]), whole)
        torch.testing.assert_close((h, c), (h_n, c_n))
        cell = trifuse.nn.LSTMCell(I, H, dtype=dtype)
        assert {t.dtype for t in cell(x[0])} == {dtype}
        assert cell(x[0], (h0[0], c0[0]))[1].dtype == torch.float32


# Options that torch lacks -----------------------------------------------------------------------

MORE: dict[str, dict[str, Any]] = {
    "cell_clip": {"cell_clip": 0.3},
    "proj_clip": {"proj_clip": 0.05, "proj_size": 2},
    "forget_bias": {"forget_bias": 1.0},
    "coupled": {"coupled": True},
    "peephole": {"peephole": True},
    "coupled, peephole": {"coupled": True, "peephole": True},
    "layer_norm": {"layer_norm": True, "eps": 0.1},
    "zoneout": {"zoneout_h": 0.2, "zoneout_c": 0.3},
    "recurrent_dropout": {"recurrent_dropout": 0.5},
    "recompute": {"recompute": True},
}


WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr", "weight_peephole")
NORM = ("norm_ih_weight", "norm_hh_weight", "norm_cell_weight", "norm_cell_bias")
NUMBERS = ("cell_clip", "proj_clip", "forget_bias", "eps")
DRAWN = ("zoneout_h", "zoneout_c", "recurrent_dropout")


def by_layers(module: Any, x: Tensor) -> Tensor:
    """Computes the module's output by the public function, one layer and direction at a time."""
    names = (*WEIGHTS, *NORM)
    options = {
        n: getattr(module, n) for n in (*NUMBERS, *DRAWN, "coupled", "recompute", "training")
    }
    for k in range(module.num_layers):
        outputs = []
        for reverse, suffix in ((False, ""), (True, "_reverse")):
            p = {n: getattr(module, f"{n}_l{k}{suffix}", None) for n in names}
            outputs.append(trifuse.lstm(x, None, **p, reverse=reverse, **options)[0])
        x = torch.cat(outputs, -1)
    return x


@pytest.mark.parametrize("what", MORE)
def test_options(what):
    torch.manual_seed(0)
    module = trifuse.nn.LSTM(I, H, 2, bidirectional=True, **MORE[what]).double().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = normal(T, B, I, dtype=torch.float64)
    output = module(x)[0]
    torch.testing.assert_close(output, by_layers(module, x))
    grads = [
        torch.autograd.grad(y.sin().sum(), list(module.parameters()))
        for y in (module(x)[0], by_layers(module, x))
    ]
    for a, e in zip(*grads, strict=True):
        torch.testing.assert_close(a, e)
    name = next(iter(MORE[what]))
    if name in ("cell_clip", "proj_clip", "forget_bias", "coupled", "recompute"):
        assert f"{name}={MORE[what][name]}" in repr(module)
    again = trifuse.nn.LSTM(I, H, 2, bidirectional=True, **MORE[what]).double().eval()
    again.load_state_dict(module.state_dict())
    assert_equal(again(x)[0], output)
    assert_equal(pickle.loads(pickle.dumps(copy.deepcopy(module)))(x)[0], output)


@pytest.mark.parametrize("what", ["zoneout", "recurrent_dropout"])
def test_training_draws(what):
    module = trifuse.nn.LSTM(I, H, **MORE[what])
    x = normal(T, B, I)
    assert not torch.equal(module(x)[0], module(x)[0])
    torch.manual_seed(1)
    first = module(x)[0]
    torch.manual_seed(1)
    assert_equal(module(x)[0], first)
    module.eval()
    assert_equal(module(x)[0], module(x)[0])


@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "RNNCell", "LSTM", "GRU", "RNN"])
def test_results_of_one_step_may_be_changed_in_place(kind):
    """As h and c are where an episode ends; the first two in torch too."""
    torch.manual_seed(0)
    module = getattr(trifuse.nn, kind)(I, H).double()
    done = normal(4, B, 1, dtype=torch.float64).gt(0).double()
    found = []
    for in_place in (False, True):
        state: Any = None
        total = torch.zeros((), dtype=torch.float64)
        for t, x in enumerate(normal(4, B, I, dtype=torch.float64)):
            results = module(x, state) if "Cell" in kind else module(x[None], state)
            parts = tensors(results)
            total = total + (t + 1) * sum(part.sum() for part in parts)
            parts = [part.mul_(done[t]) if in_place else part * done[t] for part in parts]
            state = tuple(parts[-2:]) if "LSTM" in kind else parts[-1]
        found.append(torch.autograd.grad(total, list(module.parameters())))
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("hook", [None, lambda t: t, Tensor.detach, Tensor.clone])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_may_be_changed_in_place(kind, hook):
    """As torch's on a CPU may, but for an LSTM's. A hook on saved tensors may replace them."""
    twin, module = pair(kind, num_layers=2, bidirectional=True, batch_first=True)
    x = normal(B, T, I, dtype=torch.float64)
    (expected := twin(x)[0].clone())[:, 0] = 0
    with torch.autograd.graph.saved_tensors_hooks(hook, lambda t: t) if hook else nullcontext():
        (output := module(x)[0])[:, 0] = 0
        output.mul_(2).relu_()
    grads = [
        torch.autograd.grad(y.sum(), list(m.parameters()))
        for y, m in ((output, module), (expected.mul(2).relu(), twin))
    ]
    for a, e in zip(*grads, strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.covering(1)
@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("how", ["lengths", "autocast", "torch.func", "torch.compile", "twice"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_outputs_may_be_changed_in_place_everywhere(kind, how, backend, fresh_dynamo):
    _, module = pair(kind)
    x, lengths = normal(T, B, I, dtype=torch.float64), LENGTHS if how == "lengths" else None
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def loss(parameters, x, change=True):
        output, _ = torch.func.functional_call(module, parameters, (x,), {"lengths": lengths})
        return (output.mul_(2) if change else output * 2).sum()

    def gradients(change):
        leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
        called = loss
        if how == "torch.func":
            return list(torch.func.grad(loss)(leaves, x, change).values())
        if how == "torch.compile":
            called = torch.compile(loss, backend="aot_eager", fullgraph=True)
        with torch.autocast("cpu") if how == "autocast" else nullcontext():
            total = called(leaves, x.float() if how == "autocast" else x, change)
        grads = torch.autograd.grad(total, list(leaves.values()), create_graph=how == "twice")
        if how != "twice":
            return grads
        return torch.autograd.grad(sum(g.square().sum() for g in grads), list(leaves.values()))

    if how == "autocast":
        parameters = {name: p.float() for name, p in parameters.items()}
    with trifuse.backend(backend):
        for actual, expected in zip(gradients(True), gradients(False), strict=True):
            torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_a_checkpoint_computes_an_output_once_more_only_if_it_changed(lengths, changed):
    _, module = pair("GRU")
    x = normal(T, B, I, dtype=torch.float64)

    def run(x):
        output, _ = module(x, lengths=lengths)
        return (output.mul_(2) if changed else output * 2).sin()

    weight = module.weight_hh_l0
    (expected,) = torch.autograd.grad((module(x, lengths=lengths)[0] * 2).sin().sum(), weight)
    total = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False).sum()
    with torch.profiler.profile() as profile:
        (actual,) = torch.autograd.grad(total, weight)
    assert_equal(actual, expected)
    names = [event.name for event in profile.events()]
    calls = sum(names.count(f"trifuse::gru_{op}") for op in ("forward", "plain"))
    assert calls == 1 + changed


def test_extra_parameters_and_their_first_values():
    """The extra parameters are named like torch's own."""
    torch.manual_seed(0)
    module = trifuse.nn.LSTM(I, H, bidirectional=True, coupled=True, peephole=True, layer_norm=True)
    shapes = {n: tuple(p.shape) for n, p in module.named_parameters() if n.endswith("_l0_reverse")}
    assert shapes == {
        "weight_ih_l0_reverse": (3 * H, I),
        "weight_hh_l0_reverse": (3 * H, H),
        "bias_ih_l0_reverse": (3 * H,),
        "bias_hh_l0_reverse": (3 * H,),
        "weight_peephole_l0_reverse": (2, H),
        "norm_ih_weight_l0_reverse": (3 * H,),
        "norm_hh_weight_l0_reverse": (3 * H,),
        "norm_cell_weight_l0_reverse": (H,),
        "norm_cell_bias_l0_reverse": (H,),
    }
    assert module.norm_cell_weight_l0.eq(1).all()
    assert module.norm_cell_bias_l0.eq(0).all()
    assert module.weight_peephole_l0.ne(0).all()
    assert module.weight_ih_l0.abs().max() <= H**-0.5
    for parameter in module.parameters():  # none is a view of more gates
        assert parameter.untyped_storage().nbytes() == parameter.nbytes


def test_parameters_begin_as_torchs():
    for kind, (theirs, ours, options) in KINDS.items():
        made = []
        for cls in (theirs, ours):
            torch.manual_seed(0)
            made.append(cls(I, H, 2, bidirectional=True, **options).state_dict())
        assert list(made[0]) == list(made[1]), kind
        for a, e in zip(made[1].values(), made[0].values(), strict=True):
            assert_equal(a, e)


def test_dropout_between_layers():
    """Dropout applies to the output that a layer passes to the next, and nowhere else."""
    torch.manual_seed(0)
    module = trifuse.nn.LSTM(I, H, 3, dropout=0.5)
    x = normal(T, B, I)
    torch.manual_seed(1)
    output, _ = module(x)
    torch.manual_seed(1)
    expected = x
    for k in range(3):
        p = [getattr(module, f"{n}_l{k}") for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        expected = trifuse.nn.Dropout(0.5)(expected) if k else expected
        expected, _ = trifuse.lstm(expected, None, *p)
    assert_equal(output, expected)
    module.eval()
    assert_equal(module(x)[0], module(x)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_weight_drop(kind):
    """Plain, non-contiguous tensors may replace parameters, without a warning."""
    module, twin = pair(kind)
    raw = twin.weight_hh_l0.detach().T.contiguous().T.requires_grad_()
    del twin.weight_hh_l0
    x = normal(T, B, I, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twin.weight_hh_l0 = raw * 0.5
        output, _ = twin(x)
    (grad,) = torch.autograd.grad(output.sum(), raw)
    with torch.no_grad():
        module.weight_hh_l0.mul_(0.5)
    expected, _ = module(x)
    torch.testing.assert_close(output, expected)
    (wanted,) = torch.autograd.grad(expected.sum(), module.weight_hh_l0)
    torch.testing.assert_close(grad, 0.5 * wanted)


@pytest.mark.parametrize(
    ("hx", "message"),
    [
        ((torch.zeros(1, B, H), torch.zeros(2, B, H)), r"^h0: expected shape \(2, 4, 6\)"),
        ((torch.zeros(2, B, H), torch.zeros(2, 1, H)), r"^c0: expected shape \(2, 4, 6\)"),
    ],
)
def test_first_states_of_another_shape(hx, message):
    with pytest.raises(ValueError, match=message):
        trifuse.nn.LSTM(I, H, 2)(torch.ones(T, B, I), hx)


@pytest.mark.parametrize("kind", KINDS)
def test_input_of_another_width(kind):
    """An input or a state of another width raises torch's exception type."""
    _, module = pair(kind)
    wrong = torch.ones(T, B, I + 1)
    for x in (wrong, wrong[:, 0], pack_padded_sequence(wrong, torch.tensor([T] * B))):
        with pytest.raises(RuntimeError, match=rf"^input: expected {I} features .*; got {I + 1}$"):
            module(x)
    with pytest.raises(RuntimeError, match="hx: expected shape"):
        trifuse.nn.GRU(I, H)(torch.ones(T, B, I), torch.ones(1, B, H + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_of_numbers_are_refused(kind):
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    with pytest.raises(ValueError, match=r"^input: .* \(tokens, I\); got \(5,\)"):
        pair(kind)[1](packed)


# Tracing ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("kind", KINDS)
def test_compile(kind):
    """Compiles to one graph, unlike torch's own module; with lengths, and in inference."""
    _, module = pair(kind, num_layers=2, bidirectional=True, dropout=0.3)
    x = normal(T, B, I, dtype=torch.float64)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")

    def results(m: Any) -> list[Tensor]:
        torch.manual_seed(0)
        out = tensors(m(x, lengths=LENGTHS))
        total = sum(t.sin().sum() for t in out)
        return [*out, *torch.autograd.grad(total, list(module.parameters()))]

    for a, e in zip(results(compiled), results(module), strict=True):
        torch.testing.assert_close(a, e)
    module.eval()
    with torch.no_grad():
        torch.testing.assert_close(tensors(compiled(x)), tensors(module(x)))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "RNNCell"])
def test_compile_cells(kind):
    cell = getattr(trifuse.nn, kind)(I, H)
    compiled = torch.compile(cell, fullgraph=True, backend="aot_eager")
    x = normal(B, I)
    torch.testing.assert_close(tensors(compiled(x)), tensors(cell(x)))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", "LSTMCell", "GRUCell"])
def test_an_exported_formula_serves_every_batch(kind):
    """ONNX gets it, for example."""
    module = getattr(trifuse.nn, kind)(I, H)
    steps = () if kind.endswith("Cell") else (2,)
    batch = {len(steps): torch.export.Dim("batch", min=2, max=64)}
    program = torch.export.export(module, (normal(*steps, B, I),), dynamic_shapes=(batch,))
    lowered = program.run_decompositions(trifuse.decompositions())
    x = normal(*steps, B + 3, I)
    torch.testing.assert_close(tensors(lowered.module()(x)), tensors(module(x)))


def test_functional_call_and_double_backward():
    """A gradient penalty by torch.func over a module's parameters."""
    module, twin = pair("LSTM", num_layers=2)
    x = normal(T, B, I, dtype=torch.float64)

    def penalty(m: Any) -> dict[str, Tensor]:
        parameters = {n: p.detach() for n, p in m.named_parameters()}

        def loss(p: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(m, p, (x,))[0].sin().sum()

        def squares(p: dict[str, Tensor]) -> Tensor:
            return sum(g.square().sum() for g in torch.func.grad(loss)(p).values())

        return torch.func.grad(squares)(parameters)

    torch.testing.assert_close(penalty(twin), penalty(module))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_an_infinite_input_reaches_what_it_reaches_in_torch(kind, dtype, kernel):
    """Gates saturate, and relu spreads it. An odd number of units leaves a pair half empty."""
    theirs, ours, options = KINDS[kind]
    options = {**options, **({"proj_size": 21} if "proj_size" in options else {})}
    torch.manual_seed(0)
    module = ours(3, 41, **options).to(dtype)
    twin = theirs(3, 41, **options).double()
    twin.load_state_dict(module.state_dict())
    x = normal(6, 4, 3, seed=2, dtype=dtype)
    x[2, 1, 0] = torch.inf
    with kernel.serving():
        got = module(x)[0].double()
    wanted = twin(x.double())[0]
    assert torch.equal(got.isnan(), wanted.isnan())
    assert wanted.isnan().any() == (kind == "RNN with relu")
    close = 0.05 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got, wanted, rtol=close, atol=close, equal_nan=True)
