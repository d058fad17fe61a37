"""Linear layers on our matrix product: the numerics rule, packed weights, autograd, the choice."""

from __future__ import annotations

import copy
import functools
import io
import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from numerics import LAYOUTS, Accuracy, lay_out, rounding_error
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import trifuse
from trifuse import backends
from trifuse.backends import _C
from trifuse.nn.linear import Linear, linear_activation
from trifuse.ops import _linear_choice
from trifuse.ops import linear as ops
from trifuse.ops._linear_choice import Choice, Gain, choose, is_available
from trifuse.ops._linear_weights import PackedWeight
from trifuse.ops.activations import ACTIVATIONS, activate

pytestmark = pytest.mark.skipif(not is_available(torch.float32), reason="no C++ extension")

DTYPES = [torch.float32, torch.bfloat16]
# Features around the lengths at which sums are split, and odd numbers.
FEATURES = (1, 3, 64, 127, 128, 129, 257, 639, 768, 961, 1536, 3072)


@pytest.fixture(autouse=True)
def _ours(monkeypatch) -> None:
    """Makes our product serve every call that it can, fast or not."""
    monkeypatch.setenv("TRIFUSE_LINEAR", "cpp")
    monkeypatch.setattr(_linear_choice, "_made", {})
    monkeypatch.setattr(ops, "ROWS_WORTH_PACKING", 1)
    monkeypatch.setattr(ops, "ROWS_WORTH_CHECKING", 1)
    monkeypatch.setattr(ops, "_CONVERTED_ROWS_WORTH_CHECKING", 1)


@contextmanager
def products() -> Iterator[list[str]]:
    """Yields a list of our ops called within: linear, pack_linear, linear_packed."""
    names: list[str] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield names
    for event in profile.events():
        namespace, _, name = event.name.partition("::")
        if namespace == "trifuse":
            names.append(name)


def layer(
    inputs: int, outputs: int, dtype: torch.dtype = torch.float32, bias: bool = True
) -> Linear:
    torch.manual_seed(0)
    return Linear(inputs, outputs, bias=bias).to(dtype)


def infer(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Runs the module three times: weight unpacked, packed in the call, packed before."""
    with torch.no_grad():
        return [module(x) for _ in range(3)]


# Numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_obey_the_numerics_rule(dtype, activation):
    accuracy = Accuracy("linear")
    generator = torch.Generator().manual_seed(0)
    for K in FEATURES:
        for M, N in ((5, 33), (64, 96)):
            x = torch.randn(M, K, generator=generator).to(dtype)
            module = layer(K, N, dtype)

            def formula(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
                out = F.linear(x, weight, bias)
                return out if activation is None else ACTIVATIONS[activation](out)

            wide = [t.detach().double() for t in (x, *module.parameters())]
            expected, eager = formula(*wide), formula(x, *module.parameters()).detach()
            rounding = (wide[0].square() @ wide[1].square().t() + wide[2].square()).sqrt()
            rounding = rounding * rounding_error(torch.float32)
            rounding = rounding + expected.abs() * rounding_error(dtype)
            with torch.no_grad():
                for _ in range(2):  # unpacked, packed
                    out = (
                        module(x)
                        if activation is None
                        else linear_activation(module, x, activation)
                    )
                    assert out.dtype == dtype
                    accuracy.record("out", out, expected, eager, rounding)
    accuracy.conclude()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_obey_the_numerics_rule(dtype):
    """All three gradients, which sum over different dimensions."""
    accuracy = Accuracy("linear")
    for M, K, N in ((7, 512, 33), (512, 65, 100), (1100, 96, 64), (70, 40, 1536), (65, 768, 512)):
        module = layer(K, N, dtype)
        x = torch.randn(M, K).to(dtype).requires_grad_()
        grad_out = torch.randn(M, N).to(dtype)

        def gradients(
            weight: Tensor, bias: Tensor, x: Tensor = x, grad_out: Tensor = grad_out
        ) -> tuple[Tensor, ...]:
            x = x.to(weight.dtype)
            out = F.linear(x, weight, bias)
            return torch.autograd.grad(out, (x, weight, bias), grad_out.to(weight.dtype))

        mine = torch.autograd.grad(module(x), (x, *module.parameters()), grad_out)
        eager = gradients(*module.parameters())
        exact = gradients(*(p.double() for p in module.parameters()))
        terms = (
            grad_out.double().square() @ module.weight.double().square(),
            grad_out.double().square().t() @ x.double().square(),
            grad_out.double().square().sum(0),
        )
        for name, *values, squares in zip(
            ("x", "weight", "bias"), mine, exact, eager, terms, strict=True
        ):
            rounding = squares.detach().sqrt() * rounding_error(dtype)
            accuracy.record(name, *values, rounding)
    accuracy.conclude()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_through_an_activation(dtype, activation):
    """An activation fused or applied after: the same output, first and second gradients."""
    module, x = layer(96, 40, dtype), torch.randn(130, 96).to(dtype).requires_grad_()
    inputs, results = (x, *module.parameters()), []
    for out in (linear_activation(module, x, activation), activate(module(x), activation)):
        grads = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        results.append([out, *grads, *torch.autograd.grad(grads[0].square().sum(), inputs)])
    for mine, wanted in zip(*results, strict=True):
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others_or_on_threads(dtype):
    module, x = layer(512, 96, dtype), torch.randn(300, 512).to(dtype)
    whole = infer(module, x)[-1]
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for rows in (1, 2, 7, 64, 255):
                for out in infer(module, x[:rows]):
                    assert torch.equal(out, whole[:rows])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("outputs", [160, 161])  # only rows of whole cache lines are streamed
def test_results_that_several_threads_stream(cpp_kernel, outputs, gated, dtype):
    """Several threads stream a result of 64 KiB after an activation. One thread streams none, and
    gets the same bits."""
    x, bias = torch.randn(250, 130).to(dtype), torch.randn(outputs).to(dtype)
    packed, up = (
        torch.ops.trifuse.pack_linear(torch.randn(outputs, 130).to(dtype)) for _ in range(2)
    )
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            gate = (up, bias) if gated else (None, None)
            results.append(torch.ops.trifuse.linear_packed(x, packed, outputs, bias, "silu", *gate))
    finally:
        torch.set_num_threads(threads)
    assert results[1].nbytes > 1 << 16
    assert torch.equal(*results)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (0,), (2, 0), (2, 1, 3)])
def test_shapes(shape, bias):
    module = layer(6, 4, bias=bias)
    x = torch.randn(*shape, 6, requires_grad=True)
    wanted = F.linear(x, module.weight, module.bias)
    for out in (module(x), *infer(module, x)):
        assert out.shape == (*shape, 4)
        assert out.is_contiguous()
        torch.testing.assert_close(out, wanted)
    mine, theirs = (torch.autograd.grad(out.sum(), x)[0] for out in (module(x), wanted))
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_ops_without_terms_write_their_result(cpp_kernel, activation, dtype):
    """A sum without terms is 0; the layers leave such calls to torch, traced programs don't."""
    for M, N in ((3, 5), (130, 65), (1, 64)):
        x, weight, bias = (torch.randn(*s).to(dtype) for s in ((M, 0), (N, 0), (N,)))
        act = {None: lambda t: t, "relu": F.relu, "gelu": F.gelu}[activation]
        packed = torch.ops.trifuse.pack_linear(weight)
        for given in (None, bias):
            sums = torch.zeros(M, N, dtype=dtype) if given is None else bias.expand(M, N)
            for out in (
                torch.ops.trifuse.linear(x, weight, given, activation),
                torch.ops.trifuse.linear_packed(x, packed, N, given, activation),
            ):
                torch.testing.assert_close(out, act(sums))


@pytest.mark.parametrize(("inputs", "outputs"), [(0, 4), (4, 0), (0, 0)])
def test_no_features(inputs, outputs):
    module = layer(4, 4)
    module.weight = nn.Parameter(torch.randn(outputs, inputs))
    module.bias = nn.Parameter(torch.randn(outputs))
    x = torch.randn(3, inputs, requires_grad=True)
    for out in (module(x), *infer(module, x)):
        assert torch.equal(out, F.linear(x, module.weight, module.bias))


@pytest.mark.parametrize("shape", [(), (1,), (3, 64), (3, 1)])
def test_biases_that_are_broadcast(shape):
    x, weight, bias = torch.randn(3, 48), torch.randn(64, 48), torch.randn(shape)
    with torch.no_grad():
        assert torch.equal(ops.linear(x, weight, bias), F.linear(x, weight, bias))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("features", [32, 512])  # one block and four
def test_layouts(layout, features):
    module = layer(features, 24)
    x = lay_out(torch.randn(3, 5, features), layout).requires_grad_()
    wanted = F.linear(x, module.weight, module.bias)
    for out in (module(x), *infer(module, x)):
        torch.testing.assert_close(out, wanted)
    grad = lay_out(torch.randn(3, 5, 24), layout)
    inputs = (x, *module.parameters())
    mine = torch.autograd.grad(module(x), inputs, grad)
    for got, want in zip(mine, torch.autograd.grad(wanted, inputs, grad), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["columns", "gaps", "slice"])
def test_weights_in_other_layouts(layout):
    """A weight stored by columns is kept packed, other views are not; all give the same results."""
    whole = torch.randn(48, 1024)
    weight = {
        "columns": torch.randn(64, 24).t(),
        "gaps": whole[:24, :128:2],
        "slice": whole[:24, 3:67],
    }[layout]
    x, packed = torch.randn(7, 64), PackedWeight()
    for _ in range(3):
        torch.testing.assert_close(ops.linear(x, weight, packed=packed), F.linear(x, weight))
    assert packed.is_kept == (layout == "columns")


def test_nan_stays_where_it_is():
    module, x = layer(8, 8), torch.randn(4, 8)
    x[1, 2] = torch.nan
    for out in infer(module, x):
        assert out.isnan().any(-1).tolist() == [False, True, False, False]
    for activation in ACTIVATIONS:
        with torch.no_grad():
            out = linear_activation(module, x, activation)
        assert out.isnan().any(-1).tolist() == [False, True, False, False]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("product", ["cpp", "torch"])
def test_nan_between_rows_stays_there(product, dtype, monkeypatch):
    """Torch's own product of bfloat16 spreads it on AMX."""
    monkeypatch.setenv("TRIFUSE_LINEAR", product)
    x = torch.full((64, 35), math.nan, dtype=dtype)[:, :33].copy_(torch.randn(64, 33))
    weight = torch.randn(8, 33, dtype=dtype)
    torch.testing.assert_close(ops.linear(x, weight), ops.linear(x.contiguous(), weight))


def test_activations_far_out(cpp_kernel):
    """Intermediates overflow or vanish, or torch gives 0, as in GELU's lower tail."""
    values = torch.tensor([0.0, -0.0, 1e-30, 5.0, -5.0, 12.0, -12.0, 80.0, -80.0, 1e20, -1e20])
    for activation, function in ACTIVATIONS.items():
        out = torch.ops.trifuse.linear(torch.zeros(1, 1), torch.zeros(11, 1), values, activation)
        wide = values.double()
        exact = wide / 2 * torch.special.erfc(-wide / math.sqrt(2))
        expected = (exact if activation == "gelu" else function(wide)).float()
        torch.testing.assert_close(out[0], expected, rtol=2e-5, atol=0)
    expected = "activation: expected relu, gelu, gelu_tanh, quick_gelu or silu; got tanh"
    with pytest.raises(ValueError, match=expected):
        torch.ops.trifuse.linear(torch.zeros(1, 1), torch.zeros(11, 1), values, "tanh")


# Packed weights ---------------------------------------------------------------------------------


def test_packed_from_the_second_call_on():
    module, x = layer(512, 8), torch.randn(4, 512)
    packs = []
    with products() as names:
        for _ in range(3):
            infer(module, x)
            packs.append(trifuse.nn.linear._packed[module]["weight"]._kept.packed)
    assert names.count("pack_linear") == 2
    assert names.count("linear_packed") == 9
    assert packs[0] is packs[1] is packs[2] is not None


def test_packed_weights_are_not_compared_with_none(monkeypatch):
    """``None in tensors`` calls each one's ``==``, which takes microseconds to fail."""

    def compared(*args):
        raise AssertionError("a tensor was compared")

    module, x = layer(512, 8), torch.randn(20, 512)
    monkeypatch.setattr(Tensor, "__eq__", compared)
    infer(module, x)


@pytest.mark.parametrize("shape", [(16, 32), (8, 64), (64, 8)])
def test_packed_for_the_same_bits_in_another_shape(shape):
    module = layer(16, 32, bias=False)
    infer(module, torch.randn(70, 16))
    assert trifuse.nn.linear._packed[module]["weight"].is_kept
    module.weight.data = module.weight.data.view(shape)
    x = torch.randn(70, shape[1])
    for out in infer(module, x):
        torch.testing.assert_close(out, F.linear(x, module.weight))


def test_packed_for_another_instruction_set():
    module, x = layer(64, 8, torch.bfloat16), torch.randn(4, 64).bfloat16()
    wanted = infer(module, x)[-1]
    before = _C.set_cpu_capability("DEFAULT")
    try:
        for out in infer(module, x):
            torch.testing.assert_close(out, wanted)
    finally:
        _C.set_cpu_capability(before)
    with pytest.raises(ValueError, match="packed: not a weight of 9 by 64"):
        torch.ops.trifuse.linear_packed(x, torch.empty(8, dtype=torch.uint8), 9, None)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.weight.mul_(1.5),
        lambda m: m.weight.data.mul_(1.5),
        lambda m: m.weight.detach().numpy().__imul__(1.5),
        lambda m: m.weight[3].neg_(),
        lambda m: m.weight.data.__setitem__((2, 5), m.weight[2, 5].nextafter(torch.tensor(9.0))),
        lambda m: m.weight.data.copy_(m.weight.data.flip(0)),
        lambda m: m.weight.data.copy_(m.weight.data.flip(1)),
        lambda m: m.weight.data.copy_(m.weight.data.roll(1, 1)),
        lambda m: setattr(m.weight, "data", torch.randn_like(m.weight)),
        lambda m: setattr(m, "weight", nn.Parameter(torch.randn_like(m.weight))),
        lambda m: m.load_state_dict(layer(16, 8).state_dict()),
        lambda m: nn.init.normal_(m.weight),
        lambda m: m.bias.add_(1.0),
        lambda m: m.bias.data.add_(1.0),
    ],
)
def test_a_changed_weight_is_never_stale(change):
    module, x = layer(16, 8), torch.randn(5, 16)
    module.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        infer(module, x)
        with torch.no_grad():
            change(module)
        wanted = F.linear(x.double(), module.weight.double(), module.bias.double())
        for out in infer(module, x):
            torch.testing.assert_close(out.double(), wanted, rtol=1e-6, atol=1e-6)
        # Bitwise equal to a new module's output, so that the smallest change shows too.
        fresh = copy.deepcopy(module)
        assert torch.equal(module(x).detach(), infer(fresh, x)[0])
        assert torch.equal(infer(module, x)[2], infer(fresh, x)[0])


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_training_and_evaluation_by_turns(optimizer):
    module, x = layer(16, 8), torch.randn(5, 16)
    steps = optimizer(module.parameters(), lr=0.1)
    for _ in range(3):
        infer(module, x)
        assert trifuse.nn.linear._packed[module]["weight"].is_kept
        module(x).square().sum().backward()
        assert not trifuse.nn.linear._packed[module]["weight"].is_kept  # its memory is freed
        steps.step()
        steps.zero_grad()
        for out in infer(module, x):
            torch.testing.assert_close(out, F.linear(x, module.weight, module.bias))


def test_an_address_used_again():
    """A new weight may have the address of an old one."""
    module, x = layer(64, 64), torch.randn(5, 64)
    for seed in range(20):
        torch.manual_seed(seed)
        with torch.no_grad():
            module.weight.data = torch.randn(64, 64)
        for out in infer(module, x):
            torch.testing.assert_close(out, F.linear(x, module.weight, module.bias))


def test_tied_weights():
    a, b = layer(16, 8), layer(16, 8)
    b.weight = a.weight
    x = torch.randn(5, 16)
    for module in (a, b):
        infer(module, x)
    with torch.no_grad():
        a.weight.mul_(2)
        for module in (a, b):
            torch.testing.assert_close(module(x), F.linear(x, a.weight, module.bias))


@pytest.mark.parametrize("case", ["self", "key is value", "all differ", "separate weights"])
def test_projections_of_attention_are_packed(case):
    torch.manual_seed(0)
    sizes = {"kdim": 12} if case == "separate weights" else {}
    module = nn.MultiheadAttention(16, 4, batch_first=True, **sizes).eval()
    query, value = torch.randn(3, 5, 16), torch.randn(3, 7, 16)
    key = torch.randn(3, 7, 12) if case == "separate weights" else torch.randn(3, 7, 16)
    inputs = {"self": (query,) * 3, "key is value": (query, value, value)}
    inputs = inputs.get(case, (query, key, value))
    with torch.no_grad():
        wanted = module(*inputs, need_weights=False)[0]
        trifuse.fuse(module)
        with products() as names:
            for _ in range(3):
                torch.testing.assert_close(module(*inputs, need_weights=False)[0], wanted)
    parts = {"self": 2, "key is value": 3}.get(case, 4)
    assert names.count("pack_linear") == 2 * parts
    assert names.count("linear_packed") == 3 * parts
    assert all(part.is_kept for part in trifuse.nn.linear._packed[module].values())


def test_copies_and_files_hold_no_packed_weight():
    module, x = layer(16, 8), torch.randn(5, 16)
    wanted = infer(module, x)[-1]
    keys = set(vars(module))
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for twin in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        assert set(vars(twin)) == keys == set(vars(nn.Linear(2, 2)))
        assert twin not in trifuse.nn.linear._packed
        torch.testing.assert_close(infer(twin, x)[-1], wanted)


def test_few_rows_are_multiplied_by_the_weight_as_it_is(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(_linear_choice, "_made", {torch.float32: Choice("test", True, True)})
    for rows, packs, packed, unpacked in ((63, 0, 0, 3), (511, 0, 0, 3), (512, 2, 3, 0)):
        module, x = layer(16, 8), torch.randn(rows, 16)
        with products() as names:
            out, *later = infer(module, x)
        for again in later:
            assert torch.equal(again, out)
        assert names.count("pack_linear") == packs
        assert names.count("linear_packed") == packed
        assert names.count("linear_unpacked") == unpacked
        assert module in trifuse.nn.linear._packed
        with products() as names:
            module(torch.randn(rows, 16)).sum().backward()
        assert names.count("linear") == (2 if rows >= 64 else 0)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_serves_any_number_of_rows(strict, monkeypatch):
    """From 64 rows on, training would take our product."""
    monkeypatch.undo()
    monkeypatch.setattr(_linear_choice, "_made", {torch.float32: Choice("test", True, True)})

    class Layer(nn.Linear):
        def forward(self, x):
            return ops.linear(x, self.weight, self.bias)

    module, batch = Layer(8, 4), torch.export.Dim("batch", min=2, max=64)
    for rows in (3, 100):
        program = torch.export.export(
            module, (torch.randn(3, rows, 8),), dynamic_shapes=({0: batch},), strict=strict
        )
        x = torch.randn(40, rows, 8)
        torch.testing.assert_close(program.module()(x), F.linear(x, module.weight, module.bias))


def test_autocast_leaves_few_rows_to_torch(monkeypatch):
    """It keeps the converted weight between calls."""
    monkeypatch.undo()
    monkeypatch.setattr(_linear_choice, "_made", {torch.bfloat16: Choice("test", True, True)})
    module, x = layer(16, 8), torch.randn(3, 16)
    with products() as names, torch.autocast("cpu", torch.bfloat16):
        out = infer(module, x)[-1]
        assert torch.equal(out, F.linear(x, module.weight, module.bias))
    assert not names


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.float64], ids=str)
def test_an_unpacked_weight_gives_the_bits_of_a_packed_one(cpp_kernel, dtype):
    """Whether x and the weight are stored by rows or by columns."""
    linear, unpacked = torch.ops.trifuse.linear, torch.ops.trifuse.linear_unpacked
    for M, N, K in (
        (1, 1, 1), (1, 16, 128), (2, 17, 129), (3, 15, 7), (4, 64, 256), (5, 100, 31), (7, 33, 300),
        (6, 70, 200), (8, 16, 768), (9, 130, 257), (12, 192, 384), (15, 48, 64), (17, 5, 2),
        (1, 700, 130), (3, 4, 0), (0, 4, 3), (16, 64, 129), (63, 65, 300), (64, 130, 31),
        (130, 257, 260), (600, 300, 129),
    ):  # fmt: skip
        x, bias = torch.randn(M, K).to(dtype), torch.randn(N).to(dtype)
        whole = torch.randn(N, K + 3).to(dtype)
        for weight in (whole[:, :K], whole[:, :K].contiguous(), whole.t().contiguous().t()[:, :K]):
            for given, activation in ((bias, None), (None, "relu"), (bias, "gelu")):
                wanted = linear(x, weight, given, activation)
                packed = torch.ops.trifuse.pack_linear(weight)
                by_packed = torch.ops.trifuse.linear_packed(x, packed, N, given, activation)
                assert torch.equal(by_packed, wanted)
                assert torch.equal(unpacked(x, weight, given, activation), wanted)
                for product in (linear, unpacked):
                    by_columns = product(x.t().contiguous().t(), weight, given, activation)
                    assert torch.equal(by_columns, wanted)


def test_unpacked_weights_are_checked(cpp_kernel):
    unpacked, x = torch.ops.trifuse.linear_unpacked, torch.randn(2, 8)
    for weight, bias, message in (
        (torch.randn(4, 9), None, "weight: expected shape"),
        (torch.randn(8), None, "weight: expected shape"),
        (torch.randn(4, 8).double(), None, "weight: expected"),
        (torch.randn(4, 8), torch.randn(5), "bias: expected shape"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            unpacked(x, weight, bias)


def test_a_nan_in_an_unpacked_weight_stays_in_its_column(cpp_kernel):
    weight = torch.randn(20, 40)
    weight[18, 3] = torch.nan
    out = torch.ops.trifuse.linear_unpacked(torch.randn(3, 40), weight, None)
    assert out.isnan().any(0).nonzero().flatten().tolist() == [18]


# Autograd and the rest of torch -----------------------------------------------------------------


def test_gradients_come_from_the_product():
    module = layer(8, 4)
    x = torch.randn(3, 8, requires_grad=True)
    with products() as names:
        module(x).sum().backward()
    assert names == ["linear", "bias_gradient", "linear", "linear"]


def compared(run) -> None:
    """Checks that ``run(module, x)`` gives the same for torch's linear layer and ours."""
    x = torch.randn(3, 5, 16)
    ours = layer(16, 8)
    theirs = copy.deepcopy(ours)
    theirs.__class__ = nn.Linear
    mine, wanted = run(ours, x), run(theirs, x)
    for got, want in zip(mine, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_double_backward():
    def run(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        inputs = (x.requires_grad_(), *module.parameters())
        first = torch.autograd.grad(module(x).pow(3).sum(), inputs, create_graph=True)
        second = torch.autograd.grad(
            sum(g.square().sum() for g in first), inputs, create_graph=True
        )
        third = torch.autograd.grad(sum(g.sum() for g in second), inputs)
        return tuple(g / g.abs().max() for g in (*first, *second, *third))

    compared(run)


def test_gradcheck_in_float64_is_torch():
    module = layer(5, 4, torch.float64)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    inputs = (x, *module.parameters())
    run = functools.partial(ops.linear, activation="gelu_tanh")
    assert torch.autograd.gradcheck(run, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.parametrize("frozen", ["weight", "bias", "x"])
def test_parts_that_need_no_gradient(frozen):
    def run(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        inputs = {"x": x, **dict(module.named_parameters())}
        inputs.pop(frozen).requires_grad_(False)
        inputs = [value.requires_grad_() for value in inputs.values()]
        return torch.autograd.grad(module(x).square().sum(), inputs)

    compared(run)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile(backend):
    def run(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        choose(torch.float32)
        compiled = torch.compile(module, fullgraph=True, backend=backend)
        inputs = (x.requires_grad_(), *module.parameters())
        out = compiled(x)
        grads = torch.autograd.grad(out.square().sum(), inputs)
        with torch.no_grad():
            return (out, *grads, compiled(x), compiled(x[:1]))

    torch._dynamo.reset()
    compared(run)


def test_opcheck():
    x = torch.randn(5, 16, requires_grad=True)
    ops = torch.ops.trifuse
    for weight, bias in ((torch.randn(8, 16), torch.randn(8)), (torch.randn(16, 8).t(), None)):
        args = (x.detach(), weight, bias)
        gated = (*args, "silu", torch.randn(8, 16), bias)
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(ops.linear.default, args, test_utils=checks)
        torch.library.opcheck(ops.linear_unpacked.default, gated, test_utils=checks)


@pytest.mark.parametrize("training", [False, True])
def test_autocast(training):
    def run(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(training):
            outs = [module(x) for _ in range(3)]
        assert {out.dtype for out in outs} == {torch.bfloat16}
        if training:
            outs += torch.autograd.grad(outs[0].sum(), list(module.parameters()))
            assert outs[-1].dtype == torch.float32
        return tuple(out.float() for out in outs)

    x = torch.randn(3, 5, 16)
    ours = layer(16, 8)
    theirs = copy.deepcopy(ours)
    theirs.__class__ = nn.Linear
    for got, want in zip(run(ours, x), run(theirs, x), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_transforms():
    def run(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        parameters = dict(module.named_parameters())

        def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(module, parameters, (x,)).square().sum()

        mapped = torch.vmap(module)(x)
        per_sample = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
        tangent = torch.func.jvp(lambda x: module(x), (x,), (torch.ones_like(x),))[1]
        return (mapped, *per_sample.values(), tangent)

    compared(run)


def test_checkpoint_and_hooks():
    calls = []

    def run(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        seen: list[str] = []
        calls.append(seen)
        hooks = [
            module.register_forward_hook(lambda *_: seen.append("forward")),
            module.register_full_backward_hook(lambda *_: seen.append("backward")),
        ]
        out = checkpoint(module, x.requires_grad_(), use_reentrant=False)
        grads = torch.autograd.grad(out.sum(), list(module.parameters()))
        for hook in hooks:
            hook.remove()
        return (out, *grads)

    compared(run)
    assert calls[0] == calls[1] != []


def test_tracing_and_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    module, x = layer(16, 8), torch.randn(5, 16)
    with torch.no_grad():
        with pytest.warns((DeprecationWarning, FutureWarning), match="trace"):
            traced = torch.jit.trace(module, x)
        torch.testing.assert_close(traced(x), module(x))
    with FakeTensorMode() as mode:
        tensors = [mode.from_tensor(t) for t in (x, *module.parameters())]
        assert ops.linear(*tensors, packed=PackedWeight()).shape == (5, 8)


def test_wrong_arguments_raise_what_torch_raises():
    module = layer(16, 8)
    for x in (torch.randn(3, 15), torch.randn(3, 16).double(), torch.tensor(1.0)):
        with pytest.raises(RuntimeError) as theirs:
            F.linear(x, module.weight, module.bias)
        with pytest.raises(RuntimeError) as ours:
            module(x)
        assert str(ours.value) == str(theirs.value)


def test_linear_activation_calls_what_is_watched():
    x, seen = torch.randn(3, 16), []
    for module in (layer(16, 8), nn.Linear(16, 8)):
        module.register_forward_hook(lambda module, *_: seen.append(type(module)))
        with torch.no_grad():
            torch.testing.assert_close(linear_activation(module, x, "gelu"), F.gelu(module(x)))
    assert seen == [Linear, Linear, nn.Linear, nn.Linear]


# Choice of a backend ----------------------------------------------------------------------------


@pytest.mark.skipif(backends.cpu_capability() in (None, "DEFAULT"), reason="no product here")
def test_a_table_of_cpus_chooses(monkeypatch):
    monkeypatch.delenv("TRIFUSE_LINEAR")
    monkeypatch.setattr(backends, "cpu_maker", lambda: "Acme")
    capability = _linear_choice._capability(torch.float32)
    machine = f"float32 on CPUs of Acme with {capability}"
    module, x = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4)), torch.randn(64, 16)
    for gain, inference, training in (
        (Gain(2.1, 1.6), True, True),
        (Gain(1.3, 0.9), True, False),
        (Gain(0.9, 1.6), False, True),
        (Gain(1.0, 0.5), False, False),
        (None, True, False),
    ):
        table = {} if gain is None else {(torch.float32, capability, "Acme"): gain}
        monkeypatch.setattr(_linear_choice, "_GAINS", table)
        monkeypatch.setattr(_linear_choice, "_made", {})
        report = trifuse.fuse(module)
        faster = inference or training
        assert [s.path for s in report.swapped] == (["0", "1"] if faster else [])
        product = "cpp" if inference else "torch"
        if inference != training:
            one, other = ("inference", "training") if inference else ("training", "inference")
            product = f"cpp in {one}, torch in {other}"
        why = f"not measured: {machine}"
        if gain is not None:
            speeds = f"{gain.inference}× torch's speed in inference, {gain.training}× in training"
            why = f"{speeds}; {machine}"
        assert report.linear == {torch.float32: f"{product}; {why}"}
        assert report.linear[torch.float32] in str(report)

        with products() as names, torch.no_grad():
            module(x)
        assert ("linear_packed" in names) == inference
        with products() as names:
            module(x).sum().backward()
        assert ("linear" in names) == training
        report.revert()


def test_portable_code_does_not_replace_torchs(monkeypatch):
    monkeypatch.delenv("TRIFUSE_LINEAR")
    monkeypatch.setattr(backends, "cpu_capability", lambda: "DEFAULT")
    monkeypatch.setattr(_linear_choice, "_made", {})
    assert not choose(torch.float32).faster


def test_every_cpu_of_the_table_exists():
    makers, capabilities = {"AMD", "Intel"}, {"AVX2", "AVX512", "AVX512_BF16", "AMX_BF16"}
    for dtype, capability, maker in _linear_choice._GAINS:
        assert maker in makers
        assert capability in capabilities
        assert dtype == torch.bfloat16 or not capability.endswith("BF16")
    assert backends.cpu_maker() in (*makers, "other", None)


def test_asked_for_by_name(monkeypatch):
    assert choose(torch.float32).faster
    monkeypatch.setattr(_linear_choice, "_made", {})
    monkeypatch.setenv("TRIFUSE_LINEAR", "torch")
    assert not choose(torch.float32).faster
    monkeypatch.setattr(_linear_choice, "_made", {})
    monkeypatch.setenv("TRIFUSE_LINEAR", "mkl")
    with pytest.raises(ValueError, match="TRIFUSE_LINEAR: expected auto, cpp or torch"):
        trifuse.fuse(nn.Linear(2, 2))


def test_without_the_extension(monkeypatch):
    monkeypatch.setattr(trifuse.backends, "_C", None)
    choice = choose(torch.float32)
    assert not choice.faster
    assert "no product of ours for torch.float32" in choice.reason
    module, x = layer(16, 8), torch.randn(3, 16)
    assert torch.equal(module(x), F.linear(x, module.weight, module.bias))


def test_swapped_and_back():
    module = nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 4, dtype=torch.float64))
    kept = {name: value.data_ptr() for name, value in module.state_dict().items()}
    x = torch.randn(3, 16)
    wanted = module[0](x)
    report = trifuse.fuse(module)
    assert [(s.path, s.after) for s in report.swapped] == [("0", "trifuse.nn.Linear")]
    assert "(1 layer)" in str(report)
    torch.testing.assert_close(module[0](x), wanted)
    assert {name: value.data_ptr() for name, value in module.state_dict().items()} == kept
    report.revert()
    assert type(module[0]) is nn.Linear
    assert torch.equal(module[0](x), wanted)


class Own(nn.Linear):
    pass


def test_subclasses_are_left():
    report = trifuse.fuse(nn.Sequential(Own(4, 4), nn.MultiheadAttention(4, 2)))
    assert [(left.path, left.reason) for left in report.left] == [("0", "a subclass of Linear")]
