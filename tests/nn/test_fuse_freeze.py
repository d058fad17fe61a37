"""``fuse(freeze=True)``: weights packed for good, and what a frozen model refuses."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_cases import assert_equal
from onnx_runs import run_as_onnx
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode

import trifuse
from trifuse.backends import _C
from trifuse.models.transformer import Transformer, TransformerConfig
from trifuse.nn.linear import FrozenLinear, linear_activation
from trifuse.ops import _linear_choice
from trifuse.ops._linear_choice import is_available
from trifuse.ops._linear_weights import FrozenWeight

pytestmark = pytest.mark.skipif(not is_available(torch.float32), reason="no C++ extension")

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _ours(monkeypatch) -> None:
    """Makes our product serve, fast or not."""
    monkeypatch.setenv("TRIFUSE_LINEAR", "cpp")
    monkeypatch.setattr(_linear_choice, "_made", {})


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(70, 130), nn.GELU(), nn.Linear(130, 5, bias=False)
    return nn.Sequential(*layers).to(dtype).eval()


def frozen(model: nn.Module) -> trifuse.FuseReport:
    return trifuse.fuse(model, freeze=True)


# Values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (64,), (65,), (3, 1), (64, 2), (129, 70), (5, 257)])
def test_unpacked_to_the_bit(cpp_kernel, dtype, shape):
    weight = torch.randn(shape if len(shape) == 2 else (shape[0], 7)).to(dtype)
    weight.view(-1)[:3] = torch.tensor([-0.0, torch.inf, torch.nan])
    packed = torch.ops.trifuse.pack_linear(weight)
    actual = torch.ops.trifuse.unpack_linear(packed, *weight.shape, dtype)
    assert_equal(actual, weight)
    with pytest.raises(ValueError, match="packed: not a weight of"):
        torch.ops.trifuse.unpack_linear(packed[1:], *weight.shape, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_reads_right_under_another_instruction_set(cpp_kernels, dtype):
    model = mlp(dtype)
    weights = [layer.weight.detach().clone() for layer in (model[0], model[2])]
    for packing in cpp_kernels:
        with packing.serving():
            report = frozen(model)
        for reading in cpp_kernels:
            with reading.serving():
                for layer, weight in zip((model[0], model[2]), weights, strict=True):
                    assert torch.equal(layer.weight, weight)
        report.revert()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_of_the_packed_product(dtype):
    """Also of a row by itself, which torch's product serves unless the weight is frozen."""
    model, x = mlp(dtype), torch.randn(100, 70, dtype=dtype)
    report = trifuse.fuse(model)
    with torch.no_grad():
        expected = [model(x) for _ in range(3)][-1]
    report.revert()
    report = frozen(model)
    assert report.frozen == ["0", "2"]
    assert "frozen: the weights of 2 modules" in str(report)
    assert [type(layer) for layer in model] == [FrozenLinear, nn.GELU, FrozenLinear]
    assert trifuse.explain(model).modules[0].runs == "cpp, its weight frozen"
    with torch.no_grad():
        for rows in (100, 63, 7, 2, 1):
            assert torch.equal(model(x[:rows]), expected[:rows])
        hidden = linear_activation(model[0], x, "gelu")
        torch.testing.assert_close(hidden, F.gelu(model[0](x)))


def test_the_packed_product_serves_every_number_of_rows():
    model = mlp()
    frozen(model)
    for rows in (1, 3, 200):
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.no_grad(), torch.profiler.profile(activities=activities) as profile:
            model(torch.randn(rows, 70))
        names = [e.name for e in profile.events() if e.name.startswith("trifuse::")]
        assert names == ["trifuse::linear_packed"] * 2


def test_gradients_pass_through():
    model, plain = mlp(), mlp()
    frozen(model)
    x = torch.randn(4, 70, requires_grad=True)
    grads = [torch.autograd.grad(m(x).square().sum(), (x, m[0].bias)) for m in (model, plain)]
    for actual, expected in zip(*grads, strict=True):
        torch.testing.assert_close(actual, expected)


def test_other_ways_to_call():
    model, plain = mlp(), mlp()
    frozen(model)
    x = torch.randn(2, 3, 70)
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(model)(x), plain(x))
        torch.testing.assert_close(torch.jit.trace(model, x)(x), plain(x))
        assert model(x[:0]).shape == (0, 3, 5)
        assert model(x[0, 0]).shape == (5,)
        with torch.autocast("cpu"):
            torch.testing.assert_close(model(x), plain(x))
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), plain(x))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(2, 69))


# In graphs --------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Frozen layers alone, one after another, in halves, called twice and read; and in a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mlp = mlp()
        self.twice = nn.Linear(5, 5)
        self.read = nn.Linear(5, 32)
        self.encoder = nn.TransformerEncoderLayer(32, 2, 48, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.twice(self.twice(self.mlp(x)))
        return self.encoder(torch.addmm(self.read.bias, hidden, self.read.weight.t())[None])


def layers() -> tuple[nn.Module, nn.Module, Tensor]:
    """Returns a frozen model, the same before, and its input."""
    model = Layers().eval()
    plain = copy.deepcopy(model)
    assert len(frozen(model).frozen) >= 6
    return model, plain, torch.randn(66, 70)


def assert_close(actual: object, expected: object) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gradients", [True, False])
def test_compiled_whole(gradients, fresh_dynamo):
    """Biases are parameters, and so may need a gradient, which makes a layer unpack its weight."""
    model, plain, x = layers()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.set_grad_enabled(gradients):
        assert_close(compiled(x), plain(x))
    if gradients:
        x.requires_grad_()
        grads = [torch.autograd.grad(each(x).square().sum(), x) for each in (compiled, plain)]
        assert_close(*grads)


def test_a_derivative_inside_what_is_compiled(fresh_dynamo):
    """The packed product has no tangent of its own: it must not pass for zero."""
    model, plain, x = mlp(), mlp(), torch.randn(3, 70)
    frozen(model)

    def tangent(model: nn.Module) -> object:
        return torch.func.jvp(model, (x,), (x.cos(),))

    def gradient(model: nn.Module) -> Tensor:
        return torch.func.grad(lambda x: model(x).square().sum())(x)

    with torch.no_grad():
        for transformed in (tangent, gradient):
            compiled = torch.compile(transformed, fullgraph=True, backend="aot_eager")
            torch.testing.assert_close(compiled(model), transformed(plain))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("gradients", [True, False])
def test_an_exported_program_holds_plain_weights(gradients, strict, fresh_dynamo):
    """Each once, so that the program runs where the packed form can't be read."""
    model, plain, x = layers()
    with torch.set_grad_enabled(gradients):
        program = torch.export.export(model, (x,), strict=strict)
    called = {str(node.target) for node in program.graph.nodes}
    assert not called & {"trifuse.linear_packed.default", "trifuse.unpack_linear.default"}
    shapes = [tuple(t.shape) for t in program.constants.values()]
    linears = [(5, 5), (5, 130), (32, 5), (32, 48), (48, 32), (130, 70)]
    assert sorted(shapes) == sorted([*linears, (96, 32), (32, 32)])
    lowered = program.run_decompositions(trifuse.decompositions())
    assert not any("trifuse" in str(node.target) for node in lowered.graph.nodes)
    for each in (program, lowered):
        assert_close(each.module()(x), plain(x))
    assert type(model.mlp[0]) is FrozenLinear


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_own_their_weights(strict, fresh_dynamo):
    """Changing one program's constants changes neither another program nor a later one."""
    model, plain, x = mlp(), mlp(), torch.randn(3, 70)
    frozen(model)
    with torch.inference_mode():
        first = torch.export.export(model, (x,), strict=strict)
    second = torch.export.export(model, (x,), strict=strict)
    for weight in first.constants.values():
        assert not weight.is_inference()
        weight.zero_()
    third = torch.export.export(model, (x,), strict=strict)
    for program in (second, third):
        assert_close(program.module()(x), plain(x))


def test_exported_to_onnx(fresh_dynamo):
    model, plain, x = layers()
    (actual,) = run_as_onnx(model, x)
    assert_close(actual, plain(x).detach())


@pytest.mark.parametrize("gated", [False, True])
def test_the_formula_of_the_packed_product(gated):
    """For graphs that hold it: those of torch.compile without gradients."""
    shapes = (3, 70), (130, 70), (130,)
    x, weight, bias = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    packed = torch.ops.trifuse.pack_linear(weight)
    args = (x, packed, 130, bias, "silu", *((packed, bias) if gated else ()))
    formula = trifuse.decompositions()[torch.ops.trifuse.linear_packed.default]
    torch.testing.assert_close(formula(*args), torch.ops.trifuse.linear_packed(*args))


class Products(TorchDispatchMode):
    """Counts the packed products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.trifuse.linear_packed.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("in_dims", [(0, None), (1, None), (None, 0), (0, 1)])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("older", [False, True])
def test_vmap_of_the_packed_product(gated, in_dims, older):
    """One product serves a batch of inputs, but not one of biases."""
    shapes = (4, 3, 70), (4, 130)
    x, bias = (
        torch.randn(shape[1:] if dim is None else shape).movedim(0, dim or 0)
        for shape, dim in zip(shapes, in_dims, strict=True)
    )
    packed = torch.ops.trifuse.pack_linear(torch.randn(130, 70))

    def product(x: Tensor, bias: Tensor) -> Tensor:
        up = (packed, bias) if gated else ()
        return torch.ops.trifuse.linear_packed(x, packed, 130, bias, "silu", *up)

    vmap = torch._vmap_internals._vmap if older else torch.func.vmap
    with Products() as products:
        out = vmap(product, in_dims)(x, bias)
    xs, biases = (
        t.expand(4, *t.shape) if dim is None else t.movedim(dim, 0)
        for t, dim in zip((x, bias), in_dims, strict=True)
    )
    torch.testing.assert_close(out, torch.stack([*map(product, xs, biases)]))
    assert products.count == (1 if in_dims[1] is None else 4)


# State ------------------------------------------------------------------------------------------


def test_state_reads_right():
    model, plain = mlp(), mlp()
    frozen(model)
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value)
        assert type(state[name]) is Tensor
    assert torch.equal(model[0].weight, plain[0].weight)
    assert [name for name, _ in model.named_parameters()] == ["0.bias"]
    mlp().load_state_dict(state)


def test_memory_is_that_of_one_model():
    model = nn.Sequential(nn.Linear(128, 128))
    parameter = model[0].weight
    frozen(model)
    assert parameter.untyped_storage().nbytes() == 0
    assert model[0]._frozen.packed.nbytes == 4 * 128 * 128


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda model: pickle.loads(pickle.dumps(model)),
        saved,
    ],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_copies_keep_the_values(copied):
    model, x = mlp(), torch.randn(3, 70)
    frozen(model)
    with torch.no_grad():
        assert torch.equal(copied(model)(x), model(x))


def test_a_report_copied_with_its_model_thaws_the_copy():
    model = mlp()
    report = frozen(model)
    twin, its_report = copy.deepcopy((model, report))
    its_report.revert()
    assert type(twin[0]) is nn.Linear
    assert type(model[0]) is FrozenLinear
    assert torch.equal(twin[0].weight, mlp()[0].weight)


def test_reverted():
    model, plain = mlp(), mlp()
    parameters = dict(model.named_parameters())
    report = frozen(model)
    assert trifuse.fuse(model, freeze=True).frozen == []
    report.revert()
    assert [type(layer) for layer in model] == [nn.Linear, nn.GELU, nn.Linear]
    assert list(dict(model.named_parameters())) == list(parameters)
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]
        assert torch.equal(parameter, plain.state_dict()[name])
    report.revert()


def test_another_instruction_set_unpacks():
    model, x = mlp(), torch.randn(3, 70)
    frozen(model)
    wanted = mlp()(x)
    before = _C.set_cpu_capability("DEFAULT")
    try:
        with torch.no_grad():
            torch.testing.assert_close(model(x), wanted)
    finally:
        _C.set_cpu_capability(before)


# Changes are refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.load_state_dict(mlp().state_dict()),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.double(),
        lambda m: m.to("meta"),
        lambda m: setattr(m[0], "weight", nn.Parameter(torch.zeros(130, 70))),
        lambda m: setattr(m[0], "weight", torch.zeros(130, 70)),
        lambda m: m[0].reset_parameters(),
        lambda m: m[0].weight.mul_(2),
        lambda m: m[0].weight.data.zero_(),
        lambda m: m[0].weight.detach().t().add_(1),
        lambda m: m[0].weight.__setitem__(0, 1.0),
        lambda m: m[0].weight.__imul__(2),
        lambda m: torch.neg(m[0].weight, out=m[0].weight),
        lambda m: setattr(m[0].weight, "data", torch.zeros(2)),
        lambda m: torch._foreach_mul_([m[0].weight], 2.0),
        lambda m: prune.l1_unstructured(m[0], "weight", 0.5),
        lambda m: nn.utils.weight_norm(m[0]),
        lambda m: nn.utils.spectral_norm(m[0]),
    ],
)
def test_changes_raise(change: Callable[[nn.Module], object]):
    model, x = mlp(), torch.randn(3, 70)
    frozen(model)
    with torch.no_grad():
        wanted = model(x)
        with pytest.raises(RuntimeError, match=r"frozen.*call revert\(\) first"):
            change(model)
        assert torch.equal(model(x), wanted)


def test_what_changes_nothing_is_allowed():
    model = mlp()
    frozen(model)
    model.to("cpu").float().train().requires_grad_(False).eval()
    weight = model[0].weight
    assert type(weight + 1) is Tensor
    assert torch.equal(torch.empty(130, 70).copy_(weight), weight)


def test_shared_weights_stay():
    model = mlp()
    model.append(nn.Linear(70, 130, bias=False))
    model[3].weight = model[0].weight
    report = frozen(model)
    assert report.frozen == ["2"]
    why = "not frozen: its weight is shared"
    assert [(left.path, left.reason) for left in report.left] == [("0", why), ("3", why)]


class Tagged(nn.Parameter):
    """A parameter of another library's class."""


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda weight: Tagged(weight.data), "its weight is a Tagged"),
        (
            lambda weight: nn.Parameter(weight.data.to_sparse_csr(), requires_grad=False),
            "no product of ours serves it",
        ),
    ],
    ids=["of another class", "sparse"],
)
def test_weights_of_other_kinds_stay(change, why):
    model, x = mlp(), torch.randn(3, 70)
    model[0].weight = change(model[0].weight)
    expected = model(x)
    report = frozen(model)
    assert report.frozen == ["2"]
    assert [(left.path, left.reason) for left in report.left] == [("0", f"not frozen: {why}")]
    torch.testing.assert_close(model(x), expected)


def test_flat_parts_of_weights_stay():
    """FullyShardedDataParallel(use_orig_params=True) keeps such parts between calls."""
    model = mlp()
    model[0].weight.data = model[0].weight.data.flatten()[:4550]
    report = frozen(model)
    assert report.frozen == ["2"]
    assert [left.reason for left in report.left] == ["not frozen: its weight is no matrix"]


def test_lazy_layers_stay():
    model = mlp().append(nn.LazyLinear(3))
    assert frozen(model).frozen == ["0", "2"]


def test_where_torch_serves(monkeypatch):
    monkeypatch.setenv("TRIFUSE_LINEAR", "torch")
    assert frozen(mlp()).frozen == []


# A change is refused before it begins -------------------------------------------------------------


def nested() -> nn.Sequential:
    """Modules that could change before torch gets to the frozen layers, on two levels."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64))
    return nn.Sequential(nn.LayerNorm(64), inner, nn.BatchNorm1d(64)).eval()


CHANGES: list[Callable[[nn.Module], object]] = [
    lambda m: m.to(torch.bfloat16),
    lambda m: m.double(),
    lambda m: m.to("meta"),
    lambda m: m.to_empty(device="meta"),
    lambda m: m.load_state_dict({name: t + 1 for name, t in m.state_dict().items()}),
    lambda m: m.load_state_dict({name: t + 1 for name, t in m.state_dict().items()}, assign=True),
]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_nothing_has_changed_after_a_refusal(change, inside):
    model = nested()
    frozen(model)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"frozen.*call revert\(\) first"):
        change(model[1] if inside else model)
    for name, value in model.state_dict().items():
        assert value.dtype == before[name].dtype
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("change", CHANGES)
def test_what_holds_no_frozen_layer_may_change(change):
    """Beside frozen layers, in place of them, and after revert()."""
    model = nested()
    frozen(model)
    change(model[0])
    model = nested()
    frozen(model)
    model[1][1] = nn.Linear(64, 64)
    change(model)
    model = nested()
    report = frozen(model)
    report.revert()
    change(model)
    plain = nested()
    for module, other in zip(model.modules(), plain.modules(), strict=True):
        assert vars(module).keys() == vars(other).keys()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_copies_refuse_for_themselves(copied):
    model = nested()
    report = frozen(model)
    twin, its_report = copied((model, report))
    with pytest.raises(RuntimeError, match=r"call revert\(\) first"):
        twin.double()
    its_report.revert()
    twin.double()
    assert {t.dtype for t in twin.parameters()} == {torch.float64}
    assert {t.dtype for t in model.parameters()} == {torch.float32}
    with pytest.raises(RuntimeError, match=r"call revert\(\) first"):
        model.double()


def test_a_frozen_model_is_freed_at_once():
    model = nested()
    frozen(model)
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("first", [0, 1])
def test_two_reports_in_any_order(first):
    """A module stays guarded while one of the calls that froze something inside isn't reverted."""
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)).eval()
    reports = [frozen(model)]
    model.append(nn.Linear(64, 64).eval())
    reports.append(frozen(model))
    assert [each.frozen for each in reports] == [["1"], ["2"]]
    reports[first].revert()
    with pytest.raises(RuntimeError, match=r"call revert\(\) first"):
        model.double()
    assert {t.dtype for t in model.parameters()} == {torch.float32}
    reports[1 - first].revert()
    assert not any("_apply" in vars(module) for module in model.modules())
    model.double()


# Attention ----------------------------------------------------------------------------------------

ATTENTIONS: list[dict[str, Any]] = [
    {"embed_dim": 64},  # its parts begin and end with panels of the packed form
    {"embed_dim": 48},
    {"embed_dim": 200},
    {"embed_dim": 48, "bias": False, "add_bias_kv": True},
    {"embed_dim": 64, "kdim": 32, "vdim": 24},
    {"embed_dim": 48, "kdim": 48, "vdim": 24, "bias": False},
]
OF_ATTENTIONS = pytest.mark.parametrize("options", ATTENTIONS)


def attention(options: dict[str, Any]) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(num_heads=4, batch_first=True, **options).eval()
    for name, parameter in module.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    return module


def inputs_of(module: nn.MultiheadAttention) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Returns inputs for self attention and cross attention, as far as the sizes allow."""
    query = torch.randn(2, 5, module.embed_dim)
    key, value = torch.randn(2, 7, module.kdim), torch.randn(2, 7, module.vdim)
    found = [(query, key, value)]
    if module.kdim == module.vdim:
        found += [(query, key, key), (query, query, query)]
    return found


@OF_ATTENTIONS
@pytest.mark.parametrize("dtype", DTYPES)
def test_frozen_attention(options, dtype):
    module = attention(options).to(dtype)
    plain = copy.deepcopy(module)
    trifuse.fuse(plain)
    report = frozen(module)
    assert report.frozen == [""]
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    for inputs in inputs_of(plain):
        given = [t.to(dtype) for t in inputs]
        if inputs[0] is inputs[1]:
            given = [given[0]] * 3
        elif inputs[1] is inputs[2]:
            given[2] = given[1]
        with torch.no_grad():
            for need_weights in (False, True):
                actual = module(*given, need_weights=need_weights)
                assert_equal(actual[0], plain(*given, need_weights=need_weights)[0])
                for each in copies:
                    assert_equal(each(*given, need_weights=need_weights)[0], actual[0])
        torch.testing.assert_close(module(*given)[0], plain(*given)[0])  # with gradients


@OF_ATTENTIONS
def test_the_state_of_frozen_attention(options):
    module = attention(options)
    plain, parameters = copy.deepcopy(module), dict(module.named_parameters())
    report = frozen(module)
    for each in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert list(each.state_dict()) == list(plain.state_dict())
        for name, value in plain.state_dict().items():
            assert torch.equal(each.state_dict()[name], value)
        for name in WEIGHTS_OF_ATTENTION:
            actual, value = getattr(each, name), getattr(plain, name)
            assert actual is value is None or torch.equal(actual, value)
        assert torch.equal(each.out_proj.weight, plain.out_proj.weight)
    assert not any(name.endswith("weight") for name, _ in module.named_parameters())
    report.revert()
    assert type(module) is nn.MultiheadAttention
    assert type(module.out_proj) is type(plain.out_proj)
    assert list(dict(module.named_parameters())) == list(parameters)
    for name, parameter in module.named_parameters():
        assert parameter is parameters[name]
        assert torch.equal(parameter, plain.state_dict()[name])


WEIGHTS_OF_ATTENTION = ["in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"]


@OF_ATTENTIONS
def test_the_memory_of_frozen_attention(options):
    """It holds the packed weights, to whole panels of 64 features, and nothing else."""
    module = attention(options)
    weights = [p for name, p in module.named_parameters() if name.endswith("weight")]
    panels = [(-(-len(weight) // 64) * 64, weight.shape[1]) for weight in weights]
    frozen(module)
    with torch.no_grad():
        for inputs in inputs_of(module):
            module(*inputs)
    assert sum(weight.untyped_storage().nbytes() for weight in weights) == 0
    assert module not in trifuse.nn.linear._packed
    parts = [*module._weights.values(), module.out_proj._frozen]
    assert [weight.packed.nbytes for weight in parts] == [4 * n * k for n, k in panels]
    memory = {part.weight.packed.untyped_storage().data_ptr() for part in module._parts.values()}
    assert memory == {parts[0].packed.untyped_storage().data_ptr()}


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        *CHANGES,
        lambda m: m.weight("in").mul_(2),
        lambda m: m.weight("in").data.mul_(2),
        lambda m: m.weight("in").chunk(3)[1].zero_(),
        lambda m: m.out_proj.weight.data.mul_(2),
        lambda m: m.out_proj.weight.zero_(),
        lambda m: setattr(m, m.name, nn.Parameter(torch.zeros(2, 2))),
        lambda m: setattr(m, m.name, torch.zeros(2, 2)),
        lambda m: setattr(m.out_proj, "weight", nn.Parameter(torch.zeros(2, 2))),
        lambda m: m._reset_parameters(),
        lambda m: prune.l1_unstructured(m, m.name, 0.5),
        lambda m: nn.utils.weight_norm(m, m.name),
        lambda m: nn.utils.spectral_norm(m.out_proj),
    ],
)
def test_changes_of_frozen_attention_raise(change, separate):
    module = attention(ATTENTIONS[4 if separate else 0])
    frozen(module)
    module.name = "q_proj_weight" if separate else "in_proj_weight"
    module.weight = lambda _: getattr(module, module.name)
    before = {name: t.clone() for name, t in module.state_dict().items()}
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"frozen.*call revert\(\) first"):
        change(module)
    for name, value in module.state_dict().items():
        assert value.dtype == before[name].dtype
        assert torch.equal(value, before[name])


def products(call: Callable[[], object]) -> list[str]:
    """Returns the calls of our ops that read or unpack weights."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.no_grad(), torch.profiler.profile(activities=activities) as profile:
        call()
    return [e.name for e in profile.events() if "linear" in e.name and "::" in e.name]


@OF_ATTENTIONS
def test_no_call_of_frozen_attention_unpacks(options):
    module = attention(options)
    frozen(module)
    for inputs in inputs_of(module):
        called = products(lambda inputs=inputs: module(*inputs))
        assert set(called) == {"trifuse::linear_packed"}
        assert len(called) == 1 + len({id(each) for each in inputs})


def test_no_layer_around_frozen_attention_unpacks():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    decoder = nn.TransformerDecoderLayer(64, 4, 128, batch_first=True).eval()
    stack = nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False).eval()
    plain, x = copy.deepcopy((stack, decoder)), torch.randn(2, 3, 64)
    assert len(frozen(stack).frozen) == 6
    assert frozen(decoder).frozen == ["self_attn", "multihead_attn", "linear1", "linear2"]
    with torch.no_grad():
        torch.testing.assert_close(stack(x), plain[0](x))
        torch.testing.assert_close(decoder(x, x.flip(0)), plain[1](x, x.flip(0)))
    assert "trifuse::unpack_linear" not in products(lambda: stack(x))
    assert set(products(lambda: decoder(x, x.flip(0)))) == {"trifuse::linear_packed"}


@pytest.mark.parametrize("network", ["relu", "gated-gelu"])
def test_code_that_compares_dtypes_with_a_weight_unpacks_nothing(network):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "d_model": 64, "num_layers": 1, "num_heads": 4, "d_kv": 16}
    config = transformers.T5Config(**sizes, d_ff=64, feed_forward_proj=network)
    model = transformers.T5Model(config).eval()
    plain = copy.deepcopy(model)
    frozen(model)
    source, target = torch.randint(1, 11, (2, 5)), torch.randint(1, 11, (2, 3))

    def call(model: nn.Module) -> Tensor:
        out: Tensor = model(input_ids=source, decoder_input_ids=target).last_hidden_state
        return out

    with torch.no_grad():
        assert_close(call(model), call(plain))
    assert "trifuse::unpack_linear" not in products(lambda: call(model))


def test_decoding_unpacks_nothing():
    torch.manual_seed(0)
    sizes = {"d_model": 64, "nhead": 4, "num_encoder_layers": 1, "num_decoder_layers": 1}
    config = TransformerConfig(vocab_size=11, dim_feedforward=64, max_length=16, **sizes)
    model = Transformer(config).eval()
    plain = copy.deepcopy(model)
    frozen(model)
    source, tokens = torch.randint(1, 11, (2, 5)), torch.randint(1, 11, (2, 3))

    def decode(model: Transformer) -> Tensor:
        state = model.start(source)
        return torch.cat([model.step(each, state) for each in tokens.split(1, dim=1)])

    with torch.no_grad():
        assert_close(decode(model), decode(plain))
    assert "trifuse::unpack_linear" not in products(lambda: decode(model))


@OF_ATTENTIONS
def test_frozen_attention_compiled_and_exported(options, fresh_dynamo):
    module = attention(options)
    plain = copy.deepcopy(module)
    frozen(module)
    for inputs in inputs_of(plain):
        expected = plain(*inputs)[0]
        for gradients in (False, True):
            compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
            with torch.set_grad_enabled(gradients):
                assert_close(compiled(*inputs)[0], expected)
    program = torch.export.export(module, inputs)
    assert not any("trifuse.linear_packed" in str(node.target) for node in program.graph.nodes)
    assert_close(program.module()(*inputs)[0], expected)


def test_gradients_pass_through_frozen_attention():
    module = attention(ATTENTIONS[1])
    plain = copy.deepcopy(module)
    frozen(module)
    for inputs in inputs_of(module):
        given = [inputs[0].requires_grad_(), *inputs[1:]]
        grads = [
            torch.autograd.grad(each(*given)[0].square().sum(), (given[0], each.in_proj_bias))
            for each in (module, plain)
        ]
        for actual, expected in zip(*grads, strict=True):
            assert_close(actual, expected)


@pytest.mark.parametrize(
    ("share", "why"),
    [
        (lambda m: setattr(m[1], "in_proj_weight", m[0].in_proj_weight), "its in_proj_weight"),
        (lambda m: setattr(m[1].out_proj, "weight", m[0].out_proj.weight), "its weight"),
    ],
)
def test_attention_with_a_shared_weight_stays(share, why):
    model = nn.ModuleList([attention({"embed_dim": 64}) for _ in range(2)])
    share(model)
    plain = copy.deepcopy(model)
    report = frozen(model)
    assert report.frozen == []
    assert [left.path for left in report.left] == ["0", "1"]
    assert all(f"{why} is shared" in left.reason for left in report.left)
    x = torch.randn(2, 5, 64)
    torch.testing.assert_close(model[1](x, x, x)[0], plain[1](x, x, x)[0])


def test_attention_with_another_output():
    """One that is frozen too, and one whose class isn't known."""
    x = torch.randn(2, 5, 64)
    for output in (nn.Linear(64, 64), nn.Identity()):
        module = attention({"embed_dim": 64})
        module.out_proj = output
        output.weight, output.bias = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.ones(64))
        plain = copy.deepcopy(module)
        assert frozen(module).frozen == ([""] if isinstance(output, nn.Linear) else [])
        with torch.no_grad():
            assert_close(module(x, x, x)[0], plain(x, x, x)[0])


def test_frozen_attention_with_another_output_later():
    module, x = attention({"embed_dim": 64}), torch.randn(2, 5, 64)
    plain = copy.deepcopy(module)
    frozen(module)
    module.out_proj = plain.out_proj = nn.Linear(64, 64)
    with torch.no_grad():
        assert_close(module(x, x, x)[0], plain(x, x, x)[0])


def test_frozen_attention_explained():
    module = attention({"embed_dim": 64, "bias": False})
    frozen(module)
    runs = {each.path: each.runs for each in trifuse.explain(module).modules}
    assert runs[""].startswith("attention by cpp")
    assert runs["out_proj"] == "cpp, its weight frozen"


def test_frozen_attention_under_another_instruction_set():
    module = attention({"embed_dim": 48})
    plain = copy.deepcopy(module)
    frozen(module)
    before = _C.set_cpu_capability("DEFAULT")
    try:
        with torch.no_grad():
            for inputs in inputs_of(module):
                assert_close(module(*inputs)[0], plain(*inputs)[0])
        assert torch.equal(module.in_proj_weight, plain.in_proj_weight)
    finally:
        _C.set_cpu_capability(before)


def test_attentions_that_share_their_output_projection():
    """They stay as they are, and so does the projection; a single one may be registered twice."""
    model = nn.ModuleDict({name: nn.MultiheadAttention(64, 4) for name in "ab"}).eval()
    model["b"].out_proj = model["a"].out_proj
    report = trifuse.fuse(model, freeze=True)
    assert report.frozen == []
    assert {left.reason for left in report.left} == {"not frozen: its out_proj is shared"}
    holder = nn.Module()
    holder.lin = nn.Linear(64, 64)
    holder.attention = nn.MultiheadAttention(64, 4)
    holder.attention.out_proj = holder.lin
    weight = holder.lin.weight.detach().clone()
    report = trifuse.fuse(holder.eval(), freeze=True)
    assert report.frozen == ["attention"]
    report.revert()
    assert torch.equal(holder.lin.weight, weight)


def test_a_part_frozen_before_is_guarded_by_the_whole():
    model = nn.Sequential(nn.LayerNorm(64), nn.Sequential(nn.Linear(64, 64))).eval()
    trifuse.fuse(model[1], freeze=True)
    report = trifuse.fuse(model, freeze=True)
    with pytest.raises(RuntimeError, match="revert"):
        model.half()
    assert model[0].weight.dtype == torch.float32
    report.revert()


def test_nothing_is_frozen_after_an_error(monkeypatch):
    """As when memory runs out for the second block of weights."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64).bfloat16(), nn.LayerNorm(64)).eval()
    values = [p.detach().clone() for p in model.parameters()]
    pack_all, blocks = FrozenWeight.pack_all, []

    def fail_the_second_time(weights):
        blocks.append(weights)
        if len(blocks) == 2:
            raise RuntimeError("out of memory")
        return pack_all(weights)

    monkeypatch.setattr(FrozenWeight, "pack_all", fail_the_second_time)
    with pytest.raises(RuntimeError, match="out of memory"):
        trifuse.fuse(model, freeze=True)
    assert [type(module) for module in model] == [nn.Linear, nn.Linear, nn.LayerNorm]
    assert all(map(torch.equal, model.parameters(), values))
    model.double()  # nothing refuses it
