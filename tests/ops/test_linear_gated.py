"""Gated linear layers as one product: numerics, equal bits, both layouts, what is saved."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from numerics import Accuracy, rounding_error
from torch import Tensor, nn

import trifuse
from trifuse.nn.linear import FrozenLinear, Linear, freeze, gated_halves, gated_linear
from trifuse.ops import _linear_choice
from trifuse.ops import linear as ops
from trifuse.ops._linear_choice import is_available
from trifuse.ops.activations import ACTIVATIONS

pytestmark = pytest.mark.skipif(not is_available(torch.float32), reason="no C++ extension")

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _ours(monkeypatch) -> None:
    """Makes our product serve every call that it can, fast or not."""
    monkeypatch.setenv("TRIFUSE_LINEAR", "cpp")
    monkeypatch.setattr(_linear_choice, "_made", {})
    monkeypatch.setattr(ops, "ROWS_WORTH_PACKING", 64)
    monkeypatch.setattr(ops, "ROWS_WORTH_CHECKING", 64)
    monkeypatch.setattr(ops, "_CONVERTED_ROWS_WORTH_CHECKING", 16)


@pytest.fixture
def served(monkeypatch) -> list[int]:
    """Counts the rows of calls that one product serves."""
    rows: list[int] = []
    fast = ops._fast_path.extension()

    def counted(real):
        def call(*args):
            out = real(*args)
            if args[-2 if real is fast.linear_packed else -4] is not None and out is not None:
                rows.append(out.numel() // out.shape[-1])
            return out

        return call

    def infer(x, weights, *rest):
        out = real_infer(x, weights, *rest)
        if len(weights) == 2 and out is not None:
            rows.append(out.numel() // out.shape[-1])
        return out

    class Fast:
        linear = staticmethod(counted(fast.linear))
        linear_packed = staticmethod(counted(fast.linear_packed))
        activate = staticmethod(fast.activate)

    real_infer = ops._infer
    monkeypatch.setattr(ops, "_infer", infer)
    monkeypatch.setattr(ops._fast_path, "extension", lambda: Fast)
    return rows


class Two(nn.Module):
    """A gate and its other factor, each a layer of its own."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.gate, self.up = (Linear(inputs, outputs, bias=bias) for _ in range(2))

    def forward(self, x: Tensor, activation: ops.Activation = "silu") -> Tensor:
        return gated_linear(self.gate, self.up, x, activation)

    def apart(self, x: Tensor, activation: ops.Activation = "silu") -> Tensor:
        g, u = (F.linear(x, each.weight, each.bias) for each in (self.gate, self.up))
        return ACTIVATIONS[activation](g) * u


class Halves(nn.Module):
    """A gate and its other factor, halves of one layer."""

    def __init__(self, inputs: int, outputs: int, first: int = 0, bias: bool = True) -> None:
        super().__init__()
        self.both, self.first = Linear(inputs, 2 * outputs, bias=bias), first

    def forward(self, x: Tensor, activation: ops.Activation = "silu") -> Tensor:
        return gated_halves(self.both, x, activation, self.first)

    def apart(self, x: Tensor, activation: ops.Activation = "silu") -> Tensor:
        halves = F.linear(x, self.both.weight, self.both.bias).chunk(2, -1)
        return ACTIVATIONS[activation](halves[self.first]) * halves[1 - self.first]


LAYERS = {
    "two": Two,
    "halves": Halves,
    "halves, gate last": lambda *args, **options: Halves(*args, first=1, **options),
    "no bias": lambda *args: Two(*args, bias=False),
}


@pytest.fixture(params=LAYERS)
def make(request):
    def build(inputs: int, outputs: int, dtype: torch.dtype = torch.float32) -> nn.Module:
        torch.manual_seed(0)
        return LAYERS[request.param](inputs, outputs).to(dtype)

    return build


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_obey_the_numerics_rule(make, dtype, activation, served):
    accuracy = Accuracy("gated linear")
    for K in (1, 3, 64, 127, 257, 768, 1536):
        for M, N in ((5, 33), (20, 64), (70, 96)):
            module, x = make(K, N, dtype), torch.randn(M, K).to(dtype)
            wide = copy.deepcopy(module).double()
            eager = module.apart(x, activation).detach()
            expected = wide.apart(x.double(), activation).detach()
            g, u = _factors(wide, x.double())
            a = ACTIVATIONS[activation](g)
            # Two factors with errors of float32 are multiplied, then the result is rounded.
            sums = rounding_error(torch.float32) * (u.abs() + a.abs())
            rounding = sums + expected.abs() * rounding_error(dtype)
            with torch.no_grad():
                for _ in range(2):  # unpacked or packed in the call, packed before
                    out = module(x, activation)
                    assert out.dtype == dtype
                    accuracy.record("out", out, expected, eager, rounding)
    accuracy.conclude()
    assert len(served) == 2 * 7 * 3


def _factors(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        if isinstance(module, Two):
            return tuple(F.linear(x, m.weight, m.bias) for m in (module.gate, module.up))
        halves = F.linear(x, module.both.weight, module.both.bias).chunk(2, -1)
        return halves[module.first], halves[1 - module.first]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_every_instruction_set_and_dtype(cpp_kernel, activation, dtype):
    """The ops, of several tasks and panels: odd sizes, no terms, few and many rows."""
    for M, N, K in ((1, 65, 130), (7, 130, 257), (130, 200, 33), (3, 5, 0)):
        x, weight, up = (torch.randn(*s) for s in ((M, K), (N, K), (N, K)))
        x, weight, up = (t.to(dtype) for t in (x / max(1, K) ** 0.5, weight, up))
        bias, up_bias = torch.randn(N).to(dtype), torch.randn(N).to(dtype)
        g, u = F.linear(x.double(), weight.double(), bias.double()), x.double() @ up.double().t()
        act = (lambda t: t) if activation is None else ACTIVATIONS[activation]
        expected = (act(g) * (u + up_bias.double())).to(dtype)
        packed = [torch.ops.trifuse.pack_linear(w) for w in (weight, up)]
        first, second = packed
        outs = [torch.ops.trifuse.linear_packed(x, first, N, bias, activation, second, up_bias)]
        outs.append(torch.ops.trifuse.linear_unpacked(x, weight, bias, activation, up, up_bias))
        tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float64: 1e-12}
        close = tolerance.get(dtype, 2e-5)
        for out in outs:
            torch.testing.assert_close(out, expected, rtol=close, atol=close)
        assert torch.equal(*outs)
        without = torch.ops.trifuse.linear_packed(x, first, N, None, activation, second)
        expected = (act(x.double() @ weight.double().t()) * u).to(dtype)
        torch.testing.assert_close(without, expected, rtol=close, atol=close)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others_or_on_threads(make, dtype, served):
    module, x = make(512, 160, dtype), torch.randn(300, 512).to(dtype)
    with torch.no_grad():
        whole = module(x)
        threads = torch.get_num_threads()
        try:
            for count in (1, 2):
                torch.set_num_threads(count)
                for rows in (1, 2, 7, 16, 64, 255):
                    for _ in range(3):
                        assert torch.equal(module(x[:rows]), whole[:rows])
        finally:
            torch.set_num_threads(threads)
    assert len(served) == 1 + 2 * 6 * 3


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients(make, activation, served):
    """First and second gradients are those of the parts."""
    module, x = make(96, 40), torch.randn(130, 96).requires_grad_()
    inputs, results = (x, *module.parameters()), []
    for out in (module(x, activation), module.apart(x, activation)):
        grads = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        results.append([out, *grads, *torch.autograd.grad(grads[0].square().sum(), inputs)])
    for mine, wanted in zip(*results, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4)
    assert not served


def test_no_more_is_saved_than_by_torch(make):
    module, x = make(96, 64), torch.randn(130, 96).requires_grad_()

    def saved(call) -> int:
        kept: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            storage = t.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return t

        held = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (held.append(t), pack(t))[1], id):
            call(x)
        return sum(kept.values())

    assert saved(module) <= saved(module.apart)


@pytest.mark.parametrize("rows", [3, 20, 70])
def test_few_rows_of_weights_stored_by_columns(make, served, rows):
    """One product of few rows reads rows of the weights, so that the parts serve these."""
    module, x = make(16, 8), torch.randn(rows, 16)
    for each in module.modules():
        if isinstance(each, Linear):
            each.weight.data = each.weight.data.t().contiguous().t()
    for _ in range(3):
        with torch.no_grad():
            torch.testing.assert_close(module(x), module.apart(x))
    assert served == ([rows] * 3 if rows == 70 else [])


def test_training_and_evaluation_by_turns(make, served):
    module, x = make(16, 8), torch.randn(70, 16)
    optimizer = torch.optim.SGD(module.parameters(), 1e-3)
    for turn in range(1, 4):
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(module(x), module.apart(x))
        kept = [
            each for m in module.modules() for each in trifuse.nn.linear._packed.get(m, {}).values()
        ]
        assert sum(each.is_kept for each in kept) == 2
        module(x).square().sum().backward()
        assert not any(each.is_kept for each in kept)  # their memory is freed
        optimizer.step()
        optimizer.zero_grad()
        assert len(served) == 3 * turn


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.mul_(1.5),
        lambda w: w.data.mul_(1.5),
        lambda w: w[-1].neg_(),
        lambda w: w.data.copy_(w.data.flip(0)),
    ],
)
def test_a_changed_weight_is_never_stale(make, change):
    module, x = make(16, 8), torch.randn(20, 16)
    with torch.no_grad():
        for _ in range(2):
            for parameter in module.parameters():
                if parameter.dim() == 2:
                    for _ in range(3):
                        module(x)
                    change(parameter)
                    torch.testing.assert_close(module(x), module.apart(x))


# Where the parts are computed instead -----------------------------------------------------------


def test_hooks_and_subclasses_are_called(make, served):
    x, seen = torch.randn(20, 16), []
    for part in ("hooked", "derived"):
        module = make(16, 8)
        for each in list(module.children())[-1:]:
            if part == "hooked":
                each.register_forward_hook(lambda *args: seen.append(1))
            else:
                each.__class__ = type("Derived", (Linear,), {"forward": _noted(seen)})
        with torch.no_grad():
            torch.testing.assert_close(module(x), module.apart(x))
    assert seen == [1, 1]
    assert not served


def _noted(seen: list[int]):
    def forward(self, x):
        seen.append(1)
        return Linear.forward(self, x)

    return forward


def test_functions_of_torch(make):
    """vmap, forward-mode derivatives, torch.compile and autocast."""
    module, x = make(16, 64), torch.randn(20, 16)
    with torch.no_grad():
        wanted = module.apart(x)
        torch.testing.assert_close(torch.func.vmap(module)(x[:, None])[:, 0], wanted)
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), wanted)
        with torch.autocast("cpu", torch.bfloat16):
            out = module(x)
            torch.testing.assert_close(out, module.apart(x), rtol=3e-2, atol=3e-2)
    assert out.dtype == torch.bfloat16
    mine, theirs = (torch.func.jvp(f, (x,), (x,))[1] for f in (module, module.apart))
    torch.testing.assert_close(mine, theirs)


def test_nan_stays_where_it_is(make):
    module, x = make(8, 8), torch.randn(4, 8)
    x[1, 2] = torch.nan
    with torch.no_grad():
        for activation in ACTIVATIONS:
            assert module(x, activation).isnan().any(-1).tolist() == [False, True, False, False]


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (0,), (2, 0), (2, 1, 3)])
def test_shapes(make, shape):
    module, x = make(6, 4), torch.randn(*shape, 6)
    with torch.no_grad():
        out = module(x)
        assert out.shape == (*shape, 4)
        torch.testing.assert_close(out, module.apart(x))


def test_features_that_differ():
    """The narrower factor broadcasts, or raises, as in torch."""
    torch.manual_seed(0)
    module, x = Two(6, 4), torch.randn(3, 6)
    module.up = Linear(6, 1)
    with torch.no_grad():
        torch.testing.assert_close(module(x), module.apart(x))
    module.up = Linear(6, 3)
    with torch.no_grad(), pytest.raises(RuntimeError):
        module(x)


def test_arguments_of_the_ops():
    x, weight, bias = torch.randn(2, 4), torch.randn(3, 4), torch.randn(3)
    packed = torch.ops.trifuse.pack_linear(weight)
    call = torch.ops.trifuse.linear_packed
    with pytest.raises(ValueError, match="up_bias: expected none without up"):
        call(x, packed, 3, None, None, None, bias)
    with pytest.raises(ValueError, match="packed: not a weight of 3 by 4"):
        call(x, packed, 3, None, None, packed[:-4])
    call = torch.ops.trifuse.linear_unpacked
    with pytest.raises(ValueError, match="up_bias: expected none without up"):
        call(x, weight, None, None, None, bias)
    with pytest.raises(ValueError, match="up: expected shape"):
        call(x, weight, None, None, weight[:2])
    with pytest.raises(ValueError, match="weight: expected shape"):
        call(x, weight, None, None, weight[:, :3])
    with pytest.raises(ValueError, match="up_bias: expected shape"):
        call(x, weight, None, None, weight, bias[:2])


# Frozen -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [64, 40])
def test_frozen(make, features, dtype, served):
    """The same bits; halves that share a panel of the packed weight are computed one by one."""
    module = make(96, features, dtype).eval()
    x = torch.randn(70, 96).to(dtype)
    with torch.no_grad():
        wanted = module(x)
        served.clear()
        freeze([each for each in module.modules() if isinstance(each, Linear)])
        assert all(isinstance(each, FrozenLinear) for each in module.children())
        shares = features % 64 > 0 and isinstance(module, Halves)
        for rows in (70, 17, 1):
            out = module(x[:rows])
            if shares:
                close = 2e-2 if dtype == torch.bfloat16 else 1e-5
                torch.testing.assert_close(out, wanted[:rows], rtol=close, atol=close)
            else:
                assert torch.equal(out, wanted[:rows])
        assert served == ([] if shares else [70, 17, 1])
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        for twin in (copy.deepcopy(module), torch.load(file, weights_only=False)):
            assert torch.equal(twin(x), module(x))
    # With gradients the parts are computed.
    served.clear()
    x.requires_grad_()
    torch.testing.assert_close(module(x).float(), wanted.float(), rtol=2e-2, atol=2e-2)
    assert torch.autograd.grad(module(x).sum(), x)[0].isfinite().all()
    assert not served


def test_frozen_and_compiled(make):
    module, x = make(96, 64).eval(), torch.randn(70, 96)
    with torch.no_grad():
        wanted = module(x)
        freeze([each for each in module.modules() if isinstance(each, Linear)])
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            torch.testing.assert_close(compiled(x), wanted)
            module(x)
