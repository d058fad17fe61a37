"""dropout_add_layer_norm under torch's transforms: autograd, torch.func, vmap, compile, export."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_cases import assert_equal, normal
from torch import Tensor, nn
from torch_checks import (
    assert_same_results,
    check_checkpoint,
    check_compile,
    check_fakes,
    check_forward_mode,
    check_one_graph,
    check_vmap,
    check_vmap_randomness,
    seeded,
)

import trifuse
from trifuse import backends

OP = trifuse.dropout_add_layer_norm
NAMES = ("x", "residual", "weight", "bias", "x_bias")
SHAPE, N = (2, 3, 5), 5
SHAPES = (SHAPE, SHAPE, (N,), (N,), (N,))


@pytest.fixture(params=["eager", "cpp", "triton"])
def served(request: pytest.FixtureRequest) -> Iterator[str]:
    """As ``backend``, and by Triton in its interpreter, which has no kernels for float64."""
    call = backends.Call("dropout_add_layer_norm", "cpu", torch.float32)
    why_not = backends._WHY_NOT[request.param](call)
    if why_not is not None:
        pytest.skip(why_not)
    with trifuse.backend(request.param):
        yield request.param


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [normal(*s, seed=i, dtype=dtype).requires_grad_() for i, s in enumerate(SHAPES)]


def normalise(
    x: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    x_bias: Tensor | None = None,
    **options: Any,
) -> Any:
    """Calls the operator, with all tensors by position."""
    return OP(x, residual, weight, bias, x_bias=x_bias, **{"eps": 0.01} | options)


def formula(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    x_bias: Tensor,
    prenorm: bool = False,
    rms_norm: bool = False,
) -> Any:
    """Computes the operator in elementary operations, without dropout. The second derivatives of
    torch's own operator are wrong under vmap."""
    total = residual + (x + x_bias)
    centred = total if rms_norm else total - total.mean(-1, keepdim=True)
    out = centred * (centred.square().mean(-1, keepdim=True) + 0.01).rsqrt() * weight + bias
    return (out, total) if prenorm else out


def only(*names: str, **options: Any) -> tuple[Callable[..., Any], list[Tensor]]:
    """Returns a call with only these tensors, and the tensors."""
    tensors = dict(zip(NAMES, inputs(), strict=True))

    def call(*args: Tensor) -> Any:
        return normalise(**dict(zip(names, args, strict=True)), **options)

    return call, [tensors[name] for name in names]


def shaped(*shapes: tuple[int, ...], **options: Any) -> tuple[Callable[..., Any], list[Tensor]]:
    args = [normal(*s, seed=i, dtype=torch.float64).requires_grad_() for i, s in enumerate(shapes)]
    return functools.partial(normalise, **options), args


DROPOUT = {"dropout_p": 0.4, "training": True}
DIFFERENTIABLE: dict[str, Callable[[], tuple[Callable[..., Any], list[Tensor]]]] = {
    "all": lambda: only(*NAMES),
    "prenorm": lambda: only(*NAMES, prenorm=True),
    "rms_norm": lambda: only(*NAMES, rms_norm=True),
    "rms_norm, prenorm": lambda: only(*NAMES, rms_norm=True, prenorm=True),
    "dropout": lambda: only(*NAMES, **DROPOUT),
    "dropout, prenorm": lambda: only(*NAMES, **DROPOUT, prenorm=True),
    "dropout, rms_norm": lambda: only(*NAMES, **DROPOUT, rms_norm=True),
    "x": lambda: only("x"),
    "x, prenorm": lambda: only("x", prenorm=True),
    "x, dropout": lambda: only("x", **DROPOUT, prenorm=True),
    "x and x_bias": lambda: only("x", "x_bias"),
    "no weight": lambda: only("x", "residual", "bias", "x_bias"),
    "no bias": lambda: only("x", "residual", "weight", prenorm=True),
    "one row": lambda: shaped((N,), (N,), (N,), (N,), (N,)),
    "one column": lambda: shaped((3, 1), (3, 1), (1,), (1,), (1,), prenorm=True),
    "broadcast": lambda: shaped((2, 3, N), (3, 1), prenorm=True),
}


@pytest.mark.parametrize("what", DIFFERENTIABLE)
def test_gradcheck(backend, what):
    call, args = DIFFERENTIABLE[what]()
    torch.autograd.gradcheck(seeded(call), args, check_batched_grad=True)


@pytest.mark.parametrize("what", DIFFERENTIABLE)
def test_gradgradcheck(backend, what):
    call, args = DIFFERENTIABLE[what]()
    torch.manual_seed(0)
    torch.autograd.gradgradcheck(
        seeded(call), args, gen_non_contig_grad_outputs=True, fast_mode=True
    )


def combine(results: Any) -> Tensor:
    """Returns a number that depends on every result, and on none linearly."""
    results = results if isinstance(results, tuple) else (results,)
    return sum((i + t).sin().sum() for i, t in enumerate(results))


@pytest.mark.parametrize("rms_norm", [False, True])
@pytest.mark.parametrize("prenorm", [False, True])
def test_double_backward_is_torch_s(backend, prenorm, rms_norm):
    """A gradient penalty, as in training; also if the first grad leaves out inputs."""

    def penalty(function: Callable[..., Any], count: int) -> tuple[Tensor, ...]:
        args = inputs()
        loss = combine(function(*args, prenorm=prenorm, rms_norm=rms_norm))
        first = torch.autograd.grad(loss, args[:count], create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), args, allow_unused=True)

    for count in (1, 2, 5):
        for actual, expected in zip(
            penalty(normalise, count), penalty(formula, count), strict=True
        ):
            expected = torch.zeros_like(actual) if expected is None else expected
            torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_double_backward_in_other_dtypes(served, dtype):
    """Through the sum in float32, where there is one; each gradient in its input's dtype."""
    for options in ({}, {"prenorm": True}, {"prenorm": True, "residual_in_fp32": True}):
        args = inputs(dtype)
        first = torch.autograd.grad(
            combine(normalise(*args, **options)).double(), args, create_graph=True
        )
        second = torch.autograd.grad(sum(g.double().square().sum() for g in first), args)
        exact = [t.detach().double().requires_grad_() for t in args]
        wanted = torch.autograd.grad(
            combine(formula(*exact, prenorm="prenorm" in options)), exact, create_graph=True
        )
        wanted = torch.autograd.grad(sum(g.square().sum() for g in wanted), exact)
        for grad, want, t in zip(second, wanted, args, strict=True):
            assert grad.dtype == t.dtype
            tolerance = (1e-4 if dtype == torch.float32 else 0.1) * want.abs().max().item()
            torch.testing.assert_close(grad.double(), want, rtol=0, atol=tolerance)


def test_third_derivatives(backend):
    def third(function: Callable[..., Any]) -> Tensor:
        args = inputs()
        g = combine(function(*args, prenorm=True))
        for _ in range(3):
            (g,) = torch.autograd.grad(g.sum(), args[0], create_graph=True)
        return g

    torch.testing.assert_close(third(normalise), third(formula))


def test_backward_keeps_its_backend(backend):
    """The forward's backend runs the backward, even if another one is selected by then."""
    out = normalise(*inputs())
    other = "eager" if backend == "cpp" else "auto"
    with trifuse.backend(other), torch.profiler.profile() as profile:
        out.sum().backward()
    ran = {event.key for event in profile.key_averages() if event.key.startswith("trifuse::")}
    assert ran == {"trifuse::dropout_add_layer_norm_backward"}


def test_checkpointing_drops_the_same_elements_again(backend):
    check_checkpoint(lambda *args: normalise(*args, **DROPOUT).sin(), inputs())


@pytest.mark.parametrize("prenorm", [False, True])
def test_inputs_changed_in_place_are_noticed(backend, prenorm):
    """With prenorm the sum is saved, so the sum may not change and x may."""
    args = inputs()
    x = args[0].clone()
    results = normalise(x, *args[1:], prenorm=prenorm)
    if prenorm:
        x.mul_(2)
        torch.autograd.grad(results[0].sum(), args, retain_graph=True, allow_unused=True)
        results[1].mul_(2)
    else:
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (results[0] if prenorm else results).sum().backward()


# torch.func -------------------------------------------------------------------------------------


@pytest.mark.parametrize("prenorm", [False, True])
def test_func_derivatives(backend, prenorm):
    args = [t.detach() for t in inputs()]
    every = tuple(range(5))
    for transform in (
        lambda f: torch.func.grad(lambda *a: combine(f(*a)), argnums=every),
        lambda f: torch.func.jacrev(f, argnums=every),
        lambda f: torch.func.jacrev(torch.func.jacrev(f, argnums=2), argnums=0),
    ):
        actual, expected = (
            transform(functools.partial(f, prenorm=prenorm))(*args) for f in (normalise, formula)
        )
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("what", DIFFERENTIABLE)
@pytest.mark.covering(1)
def test_forward_mode(backend, what):
    call, args = DIFFERENTIABLE[what]()
    check_forward_mode(seeded(call), args, draws="dropout" in what)


# vmap -------------------------------------------------------------------------------------------

SAMPLES = 3


def batched(t: Tensor, dim: int | None, seed: int) -> Tensor:
    """Returns SAMPLES different tensors like ``t``, stacked at ``dim``; ``t`` if that is None."""
    if dim is None:
        return t.detach()
    shape = list(t.shape)
    shape.insert(dim if dim >= 0 else t.dim(), SAMPLES)
    return normal(*shape, seed=seed, dtype=t.dtype)


@pytest.mark.parametrize(
    "in_dims",
    [
        (0, 0, None, None, None),
        (1, 3, None, None, None),
        (0, None, None, None, None),
        (None, -1, None, None, None),
        (0, 0, 1, 0, -1),
        (None, None, 0, None, None),
        (None, 0, None, None, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("prenorm", [False, True])
def test_vmap(served, in_dims, prenorm):
    """Results and every gradient, with each argument batched or shared."""
    arrange = [
        batched(t, d, 20 + i) for i, (t, d) in enumerate(zip(inputs(), in_dims, strict=True))
    ]
    args = [t.float() if served == "triton" else t for t in arrange]

    def call(*a: Tensor) -> tuple[Tensor, ...]:
        results = normalise(*a, prenorm=prenorm)
        return results if prenorm else (results,)

    def gradients(*a: Tensor) -> tuple[Tensor, ...]:
        return torch.func.grad(lambda *b: combine(call(*b)), argnums=tuple(range(5)))(*a)

    for function in (call, gradients):
        check_vmap(function, in_dims, args)


def test_vmap_twice(backend):
    x, residual = normal(4, SAMPLES, *SHAPE), normal(SAMPLES, *SHAPE, seed=1)
    weight = normal(4, N, seed=2)
    inner = torch.vmap(normalise, in_dims=(0, 0, None))
    actual = torch.vmap(inner, in_dims=(0, None, 0))(x, residual, weight)
    for i in range(4):
        for n in range(SAMPLES):
            expected = normalise(x[i, n], residual[n], weight[i])
            torch.testing.assert_close(actual[i, n], expected)


def test_per_sample_gradients_of_a_model(backend):
    """The purpose of vmap(grad): one gradient of the weights per sample."""
    torch.manual_seed(0)
    linear = nn.Linear(N, N).double()
    weights = dict(linear.named_parameters()) | dict(zip(("w", "b"), inputs()[2:4], strict=True))
    samples = normal(4, 3, N, seed=30, dtype=torch.float64)

    def loss(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
        projected = F.linear(sample, parameters["weight"])
        vectors = (parameters["w"], parameters["b"], parameters["bias"])
        return normalise(projected, sample, *vectors).square().sum()

    actual = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, samples)
    for n, sample in enumerate(samples):
        expected = torch.func.grad(loss)(weights, sample)
        torch.testing.assert_close({k: g[n] for k, g in actual.items()}, expected)


def test_vmap_randomness(served):
    """Dropout draws as torch's random functions do: one seed for all samples, or one for each."""
    samples = torch.ones(SAMPLES, 4, 16)

    def drop(x: Tensor) -> Tensor:
        return OP(x, dropout_p=0.5, training=True, prenorm=True)[1]

    different = check_vmap_randomness(drop, samples)
    assert set(different.unique().tolist()) == {0.0, 2.0}
    # A backward drops what its forward dropped.
    torch.manual_seed(3)
    grads = torch.vmap(torch.func.grad(lambda x: drop(x).sum()), randomness="different")(samples)
    assert_equal(grads, different)


# The operators themselves -----------------------------------------------------------------------


def op_arguments() -> dict[str, tuple[Any, ...]]:
    """Returns arguments of the forward op by name: tensors, then options."""
    x, residual, weight, bias, x_bias = (t.detach().float() for t in inputs())
    seed = torch.tensor([99])
    apart, x_row = x.transpose(0, 1).contiguous().transpose(0, 1), x[:1].expand(SHAPE)
    vectors = (weight, bias, x_bias)
    narrow = [t.bfloat16() for t in (x, weight, bias, x_bias)]
    f32, bf16 = torch.float32, torch.bfloat16
    return {
        "all": (x, residual, weight, bias, x_bias, None, 0.0, 1e-5, False, False, f32),
        "x": (x, None, None, None, None, None, 0.0, 1e-5, False, False, f32),
        "x, prenorm": (x, None, None, None, None, None, 0.0, 1e-5, False, True, f32),
        "dropout": (x, residual, weight, bias, x_bias, seed, 0.5, 1e-5, False, False, f32),
        "prenorm": (x, residual, weight, bias, x_bias, seed, 0.5, 1e-5, True, True, f32),
        "transposed": (apart, x_row, weight, None, None, None, 0.0, 1e-5, False, True, f32),
        "one row": (x[0, 0], residual[0, 0], weight, bias, None, None, 0.0, 1e-5, False, True, f32),
        "16 bits": (*narrow[:1], narrow[0], *narrow[1:], None, 0.0, 1e-5, False, False, bf16),
        "16 bits beside 32": (narrow[0], residual, *vectors, seed, 0.5, 1e-5, False, False, f32),
        "16 bits, prenorm": (narrow[0], narrow[0], *vectors, None, 0.0, 1e-5, False, True, f32),
    }


def backward_arguments(args: tuple[Any, ...], results: list[Tensor]) -> Iterator[tuple[Any, ...]]:
    """Yields arguments of the backward op, for all gradients of the call and for some of them."""
    out, total, mean, rstd = results
    prenorm = args[9]
    tensors = (total, None, *args[2:6]) if prenorm else args[:6]
    every = [True, args[1] is not None, *(t is not None for t in args[2:5])]
    for wanted in (every, [False, *every[1:]], [True, False, False, False, False]):
        upstream = (torch.ones_like(out), torch.ones_like(total) if prenorm else None)
        yield (*upstream, *tensors, mean, rstd, *args[6:11], wanted)


@pytest.mark.parametrize("what", op_arguments())
@pytest.mark.covering(1)
def test_opcheck(served, what):
    args = op_arguments()[what]
    forward = getattr(torch.ops.trifuse.dropout_add_layer_norm_forward, served)
    backward = getattr(torch.ops.trifuse.dropout_add_layer_norm_backward, served)
    torch.library.opcheck(forward, args)
    for more in backward_arguments(args, forward(*args)):
        torch.library.opcheck(backward, more)


@pytest.mark.parametrize("what", op_arguments())
@pytest.mark.parametrize("mode", ["fake", "meta"])
def test_fakes_have_the_real_shapes_dtypes_and_strides(served, what, mode):
    """Inductor lays out memory by the strides of the fakes."""
    args = op_arguments()[what]
    check_fakes(run_both(served, args), functools.partial(run_both, served), args, mode)


def run_both(name: str, args: Any) -> list[Tensor]:
    results = list(getattr(torch.ops.trifuse.dropout_add_layer_norm_forward, name)(*args))
    for more in backward_arguments(args, results[:4]):
        results += getattr(torch.ops.trifuse.dropout_add_layer_norm_backward, name)(*more)
    return results


# Tracing ----------------------------------------------------------------------------------------

TRACED: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": DROPOUT,
    "prenorm": {"prenorm": True, "rms_norm": True},
    "prenorm, dropout": {"prenorm": True, **DROPOUT},
}


def model(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, x_bias: Tensor, **options: Any
) -> Tensor:
    """The operator between other operations to compile."""
    results = normalise(x.sin(), residual * 2, weight, bias, x_bias, **options)
    return sum(t.cos() for t in results) if options.get("prenorm") else results.cos()


def model_inputs(batch: int = 2, length: int = 3, width: int = N) -> list[Tensor]:
    shapes = ((batch, length, width),) * 2 + ((width,),) * 3
    return [normal(*s, seed=i).requires_grad_() for i, s in enumerate(shapes)]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("what", TRACED)
@pytest.mark.covering(1)
def test_compile(served, what):
    function = functools.partial(model, **TRACED[what])
    check_compile(function, model_inputs)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.covering(0)
def test_compile_dynamic_shapes(backend):
    """One graph serves every batch, length and width."""
    function = functools.partial(model, prenorm=True, **DROPOUT)
    sizes = ((3, 5, 7), (8, 9, 11), (5, 10, 130))
    check_one_graph(function, (model_inputs(*each) for each in sizes))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a compiler")
@pytest.mark.covering(0)
def test_compile_with_inductor(backend):
    """Forward and backward through generated code, which relies on the fakes' strides."""
    function = functools.partial(model, prenorm=True, **DROPOUT)
    compiled = torch.compile(function, fullgraph=True, options={"fallback_random": True})
    assert_same_results(compiled, function, model_inputs())


class Module(nn.Module):
    def forward(self, *args: Tensor) -> Tensor:
        return model(*args, prenorm=True)


@pytest.mark.parametrize("strict", [False, True])
def test_export(served, strict):
    """With a dynamic batch and length. The exported program calls the op by name."""
    batch, length = (torch.export.Dim(name, min=2, max=64) for name in ("batch", "length"))
    free: Any = ({0: batch, 1: length}, {0: batch, 1: length}, None, None, None)
    args = tuple(t.detach() for t in model_inputs())
    program = torch.export.export(Module(), args, dynamic_shapes=(free,), strict=strict)
    ops = {str(node.target) for node in program.graph.nodes}
    assert f"trifuse.dropout_add_layer_norm_forward.{served}" in ops
    for example in (args, [t.detach() for t in model_inputs(5, 8)]):
        torch.testing.assert_close(program.module()(*example), Module()(*example))


# Autocast ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_follows_the_input(served, dtype):
    """As with torch's layer_norm on a CPU: float32 inputs stay float32, 16-bit inputs 16-bit."""
    wide = inputs(torch.float32)
    narrow = [wide[0].detach().to(dtype).requires_grad_(), *wide[1:]]
    for args in (wide, narrow):
        expected = normalise(*args, prenorm=True)
        grads = torch.autograd.grad([t.float().sin().sum() for t in expected], args)
        with torch.autocast("cpu", dtype=dtype):
            actual = normalise(*args, prenorm=True)
            out = F.layer_norm(args[0], (N,), args[2].to(args[0].dtype), args[3].to(args[0].dtype))
            assert actual[0].dtype == args[0].dtype == out.dtype
            inside = torch.autograd.grad(
                [t.float().sin().sum() for t in actual], args, retain_graph=True
            )
        outside = torch.autograd.grad([t.float().sin().sum() for t in actual], args)
        for a, e in zip((*actual, *inside, *outside), (*expected, *grads, *grads), strict=True):
            assert_equal(a, e)


def test_autocast_does_not_reach_second_derivatives(backend):
    """The formula for them computes in float32, inside autocast and outside."""

    def penalty(x: Tensor) -> Tensor:
        return torch.func.grad(lambda t: combine(normalise(t, prenorm=True)))(x).square().sum()

    x = inputs(torch.float32)[0].detach()
    expected = torch.func.grad(penalty)(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = torch.func.grad(penalty)(x)
    assert_equal(actual, expected)


@pytest.mark.skipif(backends._C is None, reason="the C++ extension is not built")
def test_meta_tensors_are_served_by_the_formula():
    meta = [t.detach().to("meta").requires_grad_() for t in inputs()]
    out, total = normalise(*meta, prenorm=True)
    assert out.device.type == total.device.type == "meta"
    assert out.shape == total.shape == SHAPE
    grads = torch.autograd.grad(out.sum(), meta)
    assert [g.shape for g in grads] == [t.shape for t in meta]
