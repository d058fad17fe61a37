"""Every operator under torch's transforms, compiler, export and FLOP counter."""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from attention_cases import normal
from fault_cases import CASES, SHRUNK, calls_of_ops, flat, floating, in_process, shrink
from onnx_runs import run_as_onnx
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

import trifuse
from trifuse import backends
from trifuse.ops import _linear_choice
from trifuse.ops.dropout import dropout
from trifuse.ops.linear import linear

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

T, B, E = 2, 2, 3  # small: every element is a row of a jacobian


class Model(torch.nn.Module):
    """An operator with one parameter before it and one after it."""

    def __init__(self, call: Callable[[Any, Tensor], Tensor], **weights: Tensor) -> None:
        super().__init__()
        self.call = call
        self.before = torch.nn.Parameter(normal(E, seed=1))
        self.after = torch.nn.Parameter(normal(E, seed=2))
        for name, weight in weights.items():
            setattr(self, name, torch.nn.Parameter(weight))

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x * self.before) * self.after


GATES, BIAS, SQUARE = normal(4 * E, E), normal(E), normal(E, E)

# x is (T, B, E) and is passed more than once where an operator takes several tensors.
OPERATORS: dict[str, Model] = {
    "attention": Model(lambda self, x: trifuse.scaled_dot_product_attention(x, x, x)),
    "attention, causal and lengths": Model(
        lambda self, x: trifuse.scaled_dot_product_attention(
            x, x, x, is_causal=True, key_lengths=torch.tensor([2, 0])
        )
    ),
    "attention, window on a diagonal each": Model(
        lambda self, x: trifuse.scaled_dot_product_attention(
            x, x, x, window=1, diagonal=torch.tensor([1, -1])
        )
    ),
    "dropout_add_layer_norm": Model(
        lambda self, x: trifuse.dropout_add_layer_norm(x, x * 2, self.bias, self.bias), bias=BIAS
    ),
    "dropout_add_layer_norm, no weight": Model(
        lambda self, x: trifuse.dropout_add_layer_norm(x, x.sin())
    ),
    "dropout_add_layer_norm, prenorm": Model(
        lambda self, x: sum(trifuse.dropout_add_layer_norm(x, x, prenorm=True))
    ),
    "linear": Model(lambda self, x: linear(x, self.weight, self.bias), weight=SQUARE, bias=BIAS),
    "lstm": Model(lambda self, x: trifuse.lstm(x, (x[0], x[0]), self.w, self.w)[0], w=GATES),
    "lstm, options": Model(
        lambda self, x: trifuse.lstm(
            x, None, self.w, self.w, lengths=torch.tensor([2, 1]), cell_clip=0.3, reverse=True
        )[0],
        w=GATES,
    ),
    "lstm_cell": Model(lambda self, x: trifuse.lstm_cell(x[0], None, self.w, self.w)[0], w=GATES),
    "gru": Model(lambda self, x: trifuse.gru(x, x[0], self.w, self.w)[0], w=GATES[E:]),
    "gru, reset first": Model(
        lambda self, x: trifuse.gru(x, x[0], self.w, self.w, linear_before_reset=False)[0],
        w=GATES[E:],
    ),
    "gru_cell": Model(lambda self, x: trifuse.gru_cell(x[0], x[0], self.w, self.w), w=GATES[E:]),
    "rnn": Model(lambda self, x: trifuse.rnn(x, x[0], self.w, self.w)[0], w=GATES[:E]),
    "rnn_cell": Model(
        lambda self, x: trifuse.rnn_cell(x[0], x[0], self.w, self.w, nonlinearity="relu"),
        w=GATES[:E],
    ),
}
RANDOM: dict[str, Model] = {
    "dropout": Model(lambda self, x: dropout(x, 0.5, True)),
    "attention, dropout": Model(
        lambda self, x: trifuse.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    ),
    "dropout_add_layer_norm, dropout": Model(
        lambda self, x: trifuse.dropout_add_layer_norm(x, x, dropout_p=0.5, training=True)
    ),
}

operators = pytest.mark.parametrize("operator", OPERATORS)
every_operator = pytest.mark.parametrize("operator", [*OPERATORS, *RANDOM])


def model(operator: str, dtype: torch.dtype = torch.float64) -> Model:
    return copy.deepcopy({**OPERATORS, **RANDOM}[operator]).to(dtype)


def sample(dtype: torch.dtype = torch.float64) -> Tensor:
    return normal(T, B, E, seed=3).to(dtype)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def seeded(function: Callable[..., Any], *args: Any) -> Any:
    torch.manual_seed(0)
    return function(*args)


# torch.compile ----------------------------------------------------------------------------------


@every_operator
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.covering(1)
def test_compiled(backend, operator, requires_grad):
    """Models pass the same tensor more than once; with and without gradients."""
    call, x = model(operator).requires_grad_(requires_grad), sample().requires_grad_(requires_grad)
    results = []
    for function in (compiled(call), call):
        y = seeded(function, x)
        assert y.requires_grad == requires_grad
        results.append([y, *(torch.autograd.grad(y.sin().sum(), x) if requires_grad else ())])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


def gradient(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return torch.func.grad(lambda x: function(x).sin().sum())


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Any]]] = {
    "grad": gradient,
    "grad of grad": lambda f: gradient(lambda x: gradient(f)(x)),
    "vjp": lambda f: lambda x: torch.func.vjp(f, x)[1](f(x).cos())[0],
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x.cos(),)),
    "jvp of grad": lambda f: lambda x: torch.func.jvp(gradient(f), (x,), (x.cos(),)),
}


@every_operator
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.covering(1)
def test_transforms_inside_what_is_compiled(operator, transform):
    call = TRANSFORMS[transform](model(operator).requires_grad_(False))
    actual, expected = (seeded(function, sample()) for function in (compiled(call), call))
    torch.testing.assert_close(actual, expected)


@every_operator
def test_a_gradient_taken_inside_has_a_gradient_outside(operator):
    call = model(operator).requires_grad_(False)
    results = []
    for function in (compiled(gradient(call)), gradient(call)):
        x = sample().requires_grad_()
        results.append(torch.autograd.grad(seeded(function, x).square().sum(), x)[0])
    assert results[1].abs().max() > 0
    torch.testing.assert_close(*results)


# torch.func, and the older vmap -----------------------------------------------------------------


@every_operator
@pytest.mark.covering(1)
def test_torch_func(backend, operator):
    """Against autograd's jacobian and hessian, which run the kernels one call at a time."""
    call, x = model(operator).requires_grad_(False), sample()
    jacobian = seeded(torch.autograd.functional.jacobian, call, x)

    def squares(x: Tensor) -> Tensor:
        return call(x).square().sum()

    hessian = seeded(torch.autograd.functional.hessian, squares, x)
    same = {"randomness": "same"}
    for actual, expected in (
        (seeded(torch.func.jacrev(call), x), jacobian),
        (seeded(torch.func.jacfwd(call, **same), x), jacobian),
        (seeded(torch.func.jacrev(torch.func.jacrev(squares)), x), hessian),
        (seeded(torch.func.jacfwd(torch.func.jacrev(squares), **same), x), hessian),
        (seeded(torch.func.jacrev(torch.func.jacfwd(squares, **same)), x), hessian),
    ):
        torch.testing.assert_close(actual, expected)


@operators
@pytest.mark.covering(1)
def test_many_gradients_at_once(backend, operator):
    """``autograd.grad(is_grads_batched=True)``, in first and second derivatives."""
    call, x = model(operator), sample().requires_grad_()
    functional = torch.autograd.functional
    torch.testing.assert_close(
        functional.jacobian(call, x, vectorize=True), functional.jacobian(call, x)
    )

    def squares(x: Tensor) -> Tensor:
        return call(x).square().sum()

    expected = functional.hessian(squares, x)
    torch.testing.assert_close(functional.hessian(squares, x, vectorize=True), expected)
    forward = functional.hessian(squares, x, vectorize=True, outer_jacobian_strategy="forward-mode")
    torch.testing.assert_close(forward, expected)
    parameters = tuple(call.parameters())
    y = call(x)
    upstream = torch.stack([torch.randn_like(y) for _ in range(3)])
    together = torch.autograd.grad(y, (x, *parameters), upstream, is_grads_batched=True)
    for i, grad_y in enumerate(upstream):
        alone = torch.autograd.grad(call(x), (x, *parameters), grad_y)
        for many, one in zip(together, alone, strict=True):
            torch.testing.assert_close(many[i], one)


@every_operator
@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.covering(1)
def test_vmap_over_derivatives(backend, operator, order):
    call = model(operator).requires_grad_(False)
    for _ in range(order):
        call = gradient(call)
    samples = torch.stack([sample(), -sample(), sample().sin()])
    together = seeded(torch.func.vmap(call, randomness="same"), samples)
    for many, one in zip(together, samples, strict=True):
        torch.testing.assert_close(many, seeded(call, one))


def test_vmap_over_a_second_derivative_of_a_norm_without_a_weight():
    """In the plainest form: torch's functorch asserted inside when it was given no weight."""
    samples = torch.stack([sample(), -sample()])
    call = gradient(gradient(lambda x: trifuse.dropout_add_layer_norm(x, x.sin())))
    together = torch.func.vmap(call)(samples)
    for many, one in zip(together, samples, strict=True):
        torch.testing.assert_close(many, call(one))


# Exported programs ------------------------------------------------------------------------------


class Exported(NamedTuple):
    original: Model
    program: torch.export.ExportedProgram


def exported(operator: str, dtype: torch.dtype = torch.float64, strict: bool = False) -> Exported:
    original = model(operator, dtype)
    return Exported(original, torch.export.export(original, (sample(dtype),), strict=strict))


def ops_in(program: torch.export.ExportedProgram) -> set[str]:
    return {str(node.target) for node in program.graph.nodes if "trifuse" in str(node.target)}


@every_operator
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.covering(1)
def test_an_exported_program_can_be_trained(backend, operator, strict):
    original, program = exported(operator, strict=strict)
    module, grads = program.module(), []
    for each in (module, original):
        seeded(each, sample()).sin().sum().backward()
        grads.append({name: p.grad for name, p in each.named_parameters()})
    torch.testing.assert_close(*grads)


@every_operator
@pytest.mark.covering(1)
def test_decompositions_leave_no_op_of_ours(backend, operator):
    original, program = exported(operator)
    assert operator == "linear" or ops_in(program)
    lowered = program.run_decompositions(trifuse.decompositions())
    assert not ops_in(lowered)
    torch.testing.assert_close(seeded(lowered.module(), sample()), seeded(original, sample()))


@operators
def test_onnx(operator):
    original, x = model(operator, torch.float32), sample(torch.float32)
    (actual,) = run_as_onnx(original, x)
    torch.testing.assert_close(actual, original(x).detach())


# Calls whose ops have an overload for each backend.
SERVED = {name: SHRUNK[name] for name in SHRUNK} | {"dropout": shrink(CASES["dropout"])}


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("backend", backends.ORDER)
def test_an_op_of_another_backend_is_served(backend, name):
    """A program may have been exported on a GPU, or where the extension was built."""
    calls = calls_of_ops(SERVED[name])
    assert len(calls) == 2  # forward and backward
    for op, args in calls:
        other = getattr(op.overloadpacket, backend)
        computes = backend == "eager" or (backend == "triton" and backends.interpreting())
        if backend == "cuda":  # once a test in this process has loaded the host model
            computes = torch._C._dispatch_has_kernel_for_dispatch_key(other.name(), "CPU")
        with torch.no_grad():
            if not computes:
                actual, expected = flat(other(*args)), flat(op(*args))
                torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
            elif "backward" not in other.name():  # which takes what its own backend saved
                torch.testing.assert_close(flat(other(*args))[0], flat(op(*args))[0])


@pytest.mark.parametrize("name", SERVED)
def test_a_graph_with_gradients_can_run_by_another_backend(name):
    """Forward and backward run on the same backend, so that saved tensors fit."""
    op, args = calls_of_ops(SERVED[name])[0]
    results = []
    for backend in ("cuda", "cpp"):
        leaves: list[Tensor] = []

        def leaf(t: Tensor, leaves: list[Tensor] = leaves) -> Tensor:
            if not t.is_floating_point():
                return t
            leaves.append(t.detach().clone().requires_grad_())
            return leaves[-1]

        given = tree_map_only(Tensor, leaf, args)
        outputs = floating(getattr(op.overloadpacket, backend)(*given))
        total = torch.stack([o.sin().sum() for o in outputs]).sum()
        results.append([*outputs, *torch.autograd.grad(total, leaves)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


def check_compiled_where_ci_is_set() -> None:
    os.environ["CI"] = "1"
    torch._inductor.config.force_disable_caches = True
    torch._inductor.config.cpp.vec_isa_ok = True  # without trial programs of each instruction set
    q = torch.randn(2, 4, 16, 32, requires_grad=True)

    def call(q: Tensor) -> Tensor:
        q = trifuse.scaled_dot_product_attention(q, q, q, is_causal=True)
        return torch.nn.functional.silu(trifuse.dropout_add_layer_norm(q, q))

    outputs = torch.compile(call, fullgraph=True)(q), call(q)
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), q)[0] for y in outputs))


@pytest.mark.slow
def test_inductor_compiles_where_ci_is_set():
    """With CI set, Inductor refuses ops that have a decomposition not registered with it."""
    in_process(check_compiled_where_ci_is_set)


def check_loaded(package: str, expected: str) -> None:
    loaded = torch._inductor.aoti_load_package(package)
    x, y = torch.load(expected)
    torch.testing.assert_close(loaded(x), y)


@pytest.mark.slow
@pytest.mark.parametrize("operator", ["attention, causal and lengths", "lstm, options"])
@pytest.mark.covering(0)
def test_a_package_of_aotinductor_loads_in_another_process(operator, tmp_path):
    with torch.no_grad():
        original, program = exported(operator, torch.float32)
        package = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "model.pt2")
        )
        x = sample(torch.float32)
        torch.save((x, original(x)), expected := tmp_path / "sample.pt")
    in_process(check_loaded, str(package), str(expected))


# Operations -------------------------------------------------------------------------------------


def flops(call: Callable[[], Tensor]) -> tuple[int, int]:
    """Counts operations of a forward, and of a forward with its backward."""
    counts = []
    for backward in (False, True):
        with FlopCounterMode(display=False) as counter:
            y = call()
            if backward:
                y.sum().backward()
        counts.append(counter.get_total_flops())
    return counts[0], counts[1]


def test_operations_of_attention(backend):
    q, k, v = normal(2, 3, 5, 8), normal(2, 3, 7, 8), normal(2, 3, 7, 4)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    of_forward = 2 * 2 * 3 * 5 * 7 * (8 + 4)
    of_backward = 2 * 2 * 3 * 5 * 7 * (3 * 8 + 2 * 4)
    measured = flops(lambda: trifuse.scaled_dot_product_attention(q, k, v))
    assert measured == (of_forward, of_forward + of_backward)


@pytest.mark.skipif(not _linear_choice.can_freeze(torch.float32), reason="no C++ extension")
@pytest.mark.parametrize("freeze", [False, True])
def test_operations_of_linear_layers(freeze, monkeypatch):
    monkeypatch.setenv("TRIFUSE_LINEAR", "cpp")
    monkeypatch.setattr(_linear_choice, "_made", {})
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)).eval()
    report = trifuse.fuse(model, freeze=freeze)
    assert len(report.frozen) == 2 * freeze
    assert len(report.swapped) == 2
    x, products = normal(70, 5).requires_grad_(), 2 * 70 * (5 * 7 + 7 * 3)
    # The gradients of the inputs; unless the weights are frozen, theirs too.
    assert flops(lambda: model(x)) == (products, products * (2 if freeze else 3))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(x)
    assert counter.get_total_flops() == products


@pytest.mark.skipif(not _linear_choice.can_freeze(torch.float32), reason="no C++ extension")
def test_operations_of_the_packed_product():
    """In a graph of torch.compile, where a frozen layer is this op."""
    x, packed = normal(4, 5), torch.ops.trifuse.pack_linear(normal(7, 5))
    for gated in (0, 1):
        with FlopCounterMode(display=False) as counter:
            torch.ops.trifuse.linear_packed(x, packed, 7, None, "silu", *[packed] * gated)
        assert counter.get_total_flops() == 2 * 4 * 5 * 7 * (1 + gated)


def test_operations_of_packed_attention(backend):
    q, k, v = (normal(9, 3, 8).requires_grad_() for _ in range(3))
    cu_seqlens = torch.tensor([0, 2, 8])
    pairs = 3 * (2 * 2 + 6 * 6)
    measured = flops(lambda: trifuse.varlen_attention(q, k, v, cu_seqlens))
    assert measured == (2 * pairs * 16, 2 * pairs * (16 + 40))


def test_operations_of_packed_attention_without_values(backend):
    """The lengths are not known, so each query counts for as many keys as a sequence may have."""
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(normal(9, 3, 8).requires_grad_()) for _ in range(3))
        cu_seqlens = mode.from_tensor(torch.tensor([0, 2, 8]))
        measured = flops(lambda: trifuse.varlen_attention(q, k, v, cu_seqlens, None, 6, 6))
    assert measured == (2 * 3 * 9 * 6 * 16, 2 * 3 * 9 * 6 * (16 + 40))


def test_operations_of_an_lstm(backend):
    x = normal(T, B, 5).requires_grad_()
    w_ih, w_hh, w_hr = normal(4 * E, 5), normal(4 * E, 3), normal(3, E)
    steps = 2 * T * B * (4 * E * 5 + 4 * E * 3 + 3 * E)
    measured = flops(lambda: trifuse.lstm(x, None, w_ih, w_hh, weight_hr=w_hr)[0])
    assert measured == (steps, 3 * steps)


def test_operations_of_a_gru(backend):
    x, w_ih, w_hh = normal(T, B, 5).requires_grad_(), normal(3 * E, 5), normal(3 * E, E)
    steps = 2 * T * B * 3 * E * (5 + E)
    assert flops(lambda: trifuse.gru(x, None, w_ih, w_hh)[0]) == (steps, 3 * steps)


def test_operations_of_an_rnn(backend):
    x, w_ih, w_hh = normal(T, B, 5).requires_grad_(), normal(E, 5), normal(E, E)
    steps = 2 * T * B * E * (5 + E)
    assert flops(lambda: trifuse.rnn(x, None, w_ih, w_hh)[0]) == (steps, 3 * steps)


# The rest ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["_op", "_operator", "attention", "lstm"])
def test_reloading_says_what_to_do(module):
    with pytest.raises(ImportError, match=r"can't be reloaded: .* start Python anew"):
        importlib.reload(importlib.import_module(f"trifuse.ops.{module}"))


def test_a_resized_storage_is_noticed(backend):
    x = normal(1, 2, 3, 4).clone()
    x.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="storage"):
        trifuse.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("sizes", [(4, 0), (0, 3)])
@pytest.mark.parametrize("cell", ["LSTMCell", "GRUCell", "RNNCell"])
def test_cells_without_units_or_features(backend, cell, sizes):
    theirs = getattr(torch.nn, cell)(*sizes)
    ours = getattr(trifuse.nn, cell)(*sizes)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, sizes[0], requires_grad=True)
    for y, expected in zip(tree_leaves(ours(x)), tree_leaves(theirs(x)), strict=True):
        torch.testing.assert_close(y, expected)
        assert y.requires_grad == expected.requires_grad
