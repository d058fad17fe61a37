"""lstm under torch's transforms: autograd, torch.func, vmap, compile, export."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from attention_cases import SEED, assert_equal, normal
from lstm_cases import VARIANTS, Case, assert_same_bits, backend_fixture, make, run
from torch import Tensor
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
from trifuse.ops import lstm as ops
from trifuse.ops._operator import SAVE_ALL, SAVE_NOTHING, SAVE_STATES
from trifuse.reference.lstm import SLOTS, Parameters

backend = backend_fixture("lstm")
served = backend_fixture("lstm", "triton")

SMALL = {"T": 3, "B": 2, "I": 2, "H": 3}


def small(what: str, dtype: torch.dtype = torch.float64) -> Case:
    options = {**VARIANTS[what], **SMALL}
    if "projection" in options:
        options["projection"] = 2
    if "lengths" in options:
        options["lengths"] = (3, 1)
    return make(**options, dtype=dtype)


def call_of(case: Case) -> tuple[Callable[..., tuple[Tensor, ...]], list[Tensor]]:
    """Returns a call as a function of its tensors by position, and these tensors."""
    names = list(case.tensors)

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(SEED)  # equal draws, so that finite differences are derivatives
        return ops.layer(
            *case.of(dict(zip(names, tensors, strict=True))),
            case.lengths,
            reverse=case.reverse,
            recompute=case.recompute,
            **case.options,
        )

    return call, [t.detach().requires_grad_() for t in case.tensors.values()]


@pytest.mark.parametrize("what", VARIANTS)
def test_gradcheck(backend, what):
    call, args = call_of(small(what))
    # Slow mode checks every element of every derivative, fast mode random sums of the elements.
    slow = ("plain", "both clips", "peephole", "layer norm", "lengths, reverse")
    batched = what in ("plain", "both clips", "lengths, reverse")
    torch.autograd.gradcheck(call, args, fast_mode=what not in slow, check_batched_grad=batched)


@pytest.mark.parametrize("cell", ["lstm_cell", "gru_cell", "rnn_cell"])
def test_gradcheck_of_cells(backend, cell):
    B, features, H = 2, 2, 3
    gates = {"lstm_cell": 4, "gru_cell": 3, "rnn_cell": 1}[cell]
    states = [(B, H)] * (2 if cell == "lstm_cell" else 1)
    shapes = [
        (B, features),
        *states,
        (gates * H, features),
        (gates * H, H),
        (gates * H,),
        (gates * H,),
    ]
    args = [normal(*shape, seed=i).double().requires_grad_() for i, shape in enumerate(shapes)]

    def call(x: Tensor, *rest: Tensor) -> Any:
        state, parameters = rest[: len(states)], rest[len(states) :]
        state = state if cell == "lstm_cell" else state[0]
        return getattr(trifuse, cell)(x, state, *parameters)

    torch.autograd.gradcheck(call, args, check_batched_grad=True)


@pytest.mark.parametrize("what", [w for w in VARIANTS if not w.startswith("everything,")])
def test_gradgradcheck(what):
    """On the best backend only, as second derivatives come from the formula on all of them."""
    call, args = call_of(small(what))
    torch.autograd.gradgradcheck(
        call,
        args,
        gen_non_contig_grad_outputs=True,
        fast_mode=True,
        check_undefined_grad=what in ("plain", "everything"),
    )


def combine(results: tuple[Tensor, ...]) -> Tensor:
    """A number that depends on every result and on none linearly."""
    return sum((i + t).sin().sum() for i, t in enumerate(results))


def test_double_backward_is_torchs(backend):
    """A gradient penalty, compared with nn.LSTM's, which is twice differentiable in float64."""
    torch.manual_seed(0)
    module = torch.nn.LSTM(3, 4, proj_size=2).double()
    p = list(module.parameters())
    input = normal(5, 2, 3, dtype=torch.float64).requires_grad_()

    def penalty(output: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(output.sin().sum(), [input, *p], create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), [input, *p])

    torch.testing.assert_close(penalty(trifuse.lstm(input, None, *p)[0]), penalty(module(input)[0]))


def test_third_derivatives(backend):
    case = small("plain")
    call, args = call_of(case)

    def third(function: Callable[..., Any]) -> Tensor:
        g = combine(function(*args))
        for _ in range(3):
            (g,) = torch.autograd.grad(g.sum(), args[0], create_graph=True)
        return g

    def formula(input: Tensor, h0: Tensor, c0: Tensor, *p: Tensor) -> tuple[Tensor, ...]:
        h, c, ys = h0[0], c0[0], []
        for x in input:
            i, f, g, o = (x @ p[0].T + h @ p[1].T + p[2] + p[3]).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            ys.append(h)
        return torch.stack(ys), h[None], c[None]

    torch.testing.assert_close(third(call), third(formula))


def test_double_backward_in_other_dtypes(backend):
    """Each second derivative has its input's dtype and is near the one in float64."""
    for dtype in (torch.float32, torch.bfloat16):
        results = []
        case = small("everything", dtype)
        for tensors in (case.tensors, {n: t.double() for n, t in case.tensors.items()}):
            call, args = call_of(case.with_tensors(tensors))
            first = torch.autograd.grad(combine(call(*args)).double(), args, create_graph=True)
            penalty = sum(g.double().square().sum() for g in first)
            results.append(torch.autograd.grad(penalty, args))
        for grad, want, t in zip(*results, case.tensors.values(), strict=True):
            assert grad.dtype == t.dtype
            tolerance = (1e-3 if dtype == torch.float32 else 0.3) * want.abs().max().item()
            torch.testing.assert_close(grad.double(), want, rtol=0, atol=tolerance + 1e-6)


def test_backward_keeps_its_backend(backend):
    """The backward runs on the forward's backend, whatever is selected by then."""
    call, args = call_of(small("plain"))
    total = combine(call(*args))
    with trifuse.backend("cuda"):  # which can't serve calls here
        total.backward()
    assert all(t.grad is not None for t in args)


def test_checkpointing_draws_the_same_again(backend):
    case = small("everything")
    args = [t.detach().requires_grad_() for t in case.tensors.values()]
    names = list(case.tensors)

    def block(*tensors: Tensor) -> Tensor:
        return combine(
            ops.layer(
                *case.of(dict(zip(names, tensors, strict=True))),
                case.lengths,
                reverse=case.reverse,
                **case.options,
            )
        )

    check_checkpoint(block, args)


def test_tensors_changed_in_place_are_noticed(backend):
    for which in ("input", "weight_hh"):
        case = small("plain")
        leaves = {n: t.detach().requires_grad_() for n, t in case.tensors.items()}
        copies = {n: t.clone() for n, t in leaves.items()}
        output, *_ = ops.layer(*case.of(copies))
        copies[which].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


# Single steps -------------------------------------------------------------------------------------


def step(x: Tensor, h: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    """One step of the cell with these weights: of an LSTM if a c is given."""
    if rest[0].shape == h.shape:
        return trifuse.lstm_cell(x, (h, rest[0]), *rest[1:])
    cell = trifuse.gru_cell if len(rest[0]) == 3 * h.size(-1) else trifuse.rnn_cell
    return (cell(x, h, *rest),)


@pytest.fixture(params=["lstm", "gru", "rnn"])
def step_args(request: pytest.FixtureRequest) -> list[Tensor]:
    H, states, gates = 2, *{"lstm": (2, 4), "gru": (1, 3), "rnn": (1, 1)}[request.param]
    shapes = [(3, H)] * (1 + states) + [(gates * H, H)] * 2 + [(gates * H,)] * 2
    return [normal(*shape, dtype=torch.float64).requires_grad_() for shape in shapes]


@pytest.mark.covering(1)
def test_gradients_of_a_step(backend, step_args):
    torch.autograd.gradcheck(step, step_args)
    torch.autograd.gradgradcheck(step, step_args)


def test_a_steps_input_as_its_state(backend, step_args):
    """A tensor given as input and as state gets both parts of its first and second gradient."""
    x, _, *rest = step_args
    torch.autograd.gradcheck(lambda x: step(x, x, *rest), x)
    torch.autograd.gradgradcheck(lambda x: step(x, x, *rest), x)


def test_vmap_over_gradients_of_a_step(backend, step_args):
    """The step has run before vmap maps its backward."""
    for wanted in (step_args, step_args[:2]):
        for result in step(*step_args):

            def gradients(row: Tensor, result: Tensor = result, wanted: Any = wanted) -> Any:
                return torch.autograd.grad(result, wanted, row, retain_graph=True)

            basis = torch.eye(result.numel(), dtype=result.dtype).unflatten(1, result.shape)
            each = zip(*map(gradients, basis), strict=True)
            batched = torch.func.vmap(gradients)(basis)
            torch.testing.assert_close(batched, tuple(torch.stack(rows) for rows in each))
            assert not any(grad.requires_grad for grad in batched)  # nothing asked for a graph


def test_a_steps_second_derivatives_know_nothing_of_what_is_switched_on(step_args):
    def penalty() -> tuple[Tensor, ...]:
        first = torch.autograd.grad(combine(results), args, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), args)

    args = [t.detach().float().requires_grad_() for t in step_args]
    results = step(*args)
    expected = penalty()
    results = step(*args)
    with torch.autocast("cpu", torch.bfloat16), trifuse.backend("eager"):
        for a, e in zip(penalty(), expected, strict=True):
            assert_equal(a, e)


# Recomputation ----------------------------------------------------------------------------------


@pytest.mark.skipif(backends._C is None, reason="the C++ extension is not built")
@pytest.mark.parametrize("T", [5, 70], ids=["all steps at once", "some at a time"])
@pytest.mark.parametrize("what", ["plain", "both clips", "two directions, lengths", "layer norm"])
def test_gates_that_are_computed_again_have_the_same_bits(what, T):
    """In float32, where saved gates are not rounded."""
    with trifuse.backend("cpp"):
        case = make(T=T, **{**VARIANTS[what], "H": 19})
        assert_same_bits(run(dataclasses.replace(case, recompute=True)), run(case))


# Clips ------------------------------------------------------------------------------------------


def with_open_gates(case: Case, bias: Tensor, **changes: Tensor) -> Case:
    """Makes the gates depend on a bias alone: (G·H,) in the order i, f, g, o."""
    p = case.parameters[0]
    nothing = {name: torch.zeros_like(getattr(p, name)) for name in ("weight_ih", "weight_hh")}
    p = p._replace(**nothing, bias_ih=bias.to(case.input.dtype), **changes)
    return dataclasses.replace(case, parameters=(p,))


def gradients(function: Callable[..., tuple[Tensor, ...]], case: Case) -> dict[str, Tensor]:
    leaves = [t.detach().requires_grad_() for t in case.tensors.values()]
    upstream = (case.grad_output, case.grad_h_n, case.grad_c_n)
    grads = torch.autograd.grad(function(*leaves), leaves, upstream)
    return {f"grad_{name}": grad for name, grad in zip(case.tensors, grads, strict=True)}


def assert_about_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, grad in actual.items():
        torch.testing.assert_close(grad.float(), expected[name].float(), rtol=2e-2, atol=2e-2)


def around(bound: float, dtype: torch.dtype) -> Tensor:
    """Returns ± bound as the dtype rounds it, and the next number on either side."""
    near = torch.tensor(bound, dtype=dtype)
    up, down = (torch.nextafter(near, torch.tensor(to, dtype=dtype)) for to in (9.0, 0.0))
    return torch.stack([near, up, down, -near, -up, -down])


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"zoneout_c": 0.25}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_pass_where_c_is_at_its_clip(served, dtype, options):
    """The gates keep c in both steps, so u is c0 in the first and its clip in the second."""
    for bound in (0.5, 0.3):
        case = make(T=2, B=1, H=6, dtype=dtype, cell_clip=bound, biases=True, **options)
        bias = torch.tensor([-200.0, 100.0, 0.0, 0.0]).repeat_interleave(6)
        case = with_open_gates(case, bias, bias_hh=torch.zeros_like(case.parameters[0].bias_hh))
        c0 = around(bound, torch.float32)
        case = dataclasses.replace(case, c0=c0[None, None])
        actual = gradients(call_of(case)[0], case)
        assert_about_equal(actual, gradients(reference_of(case), case))
        if "zoneout_c" not in options:
            inside = c0.abs() <= torch.tensor(bound)
            assert torch.equal(actual["grad_c0"][0, 0] != 0, inside)


@pytest.mark.parametrize(
    "options", [{}, {"recompute": True}, {"zoneout_h": 0.25}, {"lengths": (2,)}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.covering
def test_gradients_pass_where_a_projection_is_at_its_clip(served, dtype, options):
    """m is 1 in its first unit and 0 in the others, so q is the first column of W_hr.

    Neither 0.2992 nor 0.3 is exact in 16 bits: the first rounds down, the second up.
    """
    for bound in (0.5, 0.2992, 0.3):
        case = make(T=2, B=1, H=8, dtype=dtype, projection=6, proj_clip=bound, **options)
        weight_hr = torch.zeros(6, 8, dtype=dtype)
        weight_hr[:, 0] = around(bound, dtype)
        bias = torch.tensor([-200.0, 100.0, 0.0, 100.0]).repeat_interleave(8)
        zeros = torch.zeros_like(case.parameters[0].bias_hh)
        case = with_open_gates(case, bias, bias_hh=zeros, weight_hr=weight_hr)
        c0 = torch.tensor([20.0, *(0.0,) * 7])
        case = dataclasses.replace(case, c0=c0[None, None])
        actual = gradients(call_of(case)[0], case)
        assert_about_equal(actual, gradients(reference_of(case), case))
        inside = weight_hr[:, 0].float().abs() <= torch.tensor(bound)
        assert torch.equal(actual["grad_weight_hr"][:, 0] != 0, inside)


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"norm": True}], ids=str)
def test_clips_are_those_of_the_forward_in_16_bits(served, options):
    """u is closer to its clip than 16-bit gates can resolve, and after zoneout c doesn't show
    whether u was clipped."""
    case = make(T=1, B=1, H=8, dtype=torch.bfloat16, cell_clip=0.5, zoneout_c=0.25, **options)
    zeros = torch.zeros_like(case.parameters[0].bias_hh)
    bias = torch.tensor([-200.0, 0.3, 0.0, 0.0]).repeat_interleave(8)
    case = with_open_gates(case, bias, bias_hh=zeros)
    over = torch.tensor([1e-3, -1e-3, 3e-4, -3e-4, 1e-4, -1e-4, 1e-2, -1e-2])
    forget = torch.sigmoid(bias[8].bfloat16().float())
    case = dataclasses.replace(
        case,
        c0=(0.5 * (1 + over) / forget)[None, None],
        grad_output=torch.zeros_like(case.grad_output),
        grad_h_n=torch.zeros_like(case.grad_h_n),
        grad_c_n=torch.ones_like(case.grad_c_n),
    )
    expected = 0.25 + 0.75 * forget * (over <= 0)
    actual = gradients(call_of(case)[0], case)["grad_c0"][0, 0]
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=0)


# torch.func -------------------------------------------------------------------------------------


def reference_of(case: Case) -> Callable[..., tuple[Tensor, ...]]:
    """The same call by autograd through the reference formula."""
    from trifuse.reference import lstm as reference

    names = list(case.tensors)

    def formula(*tensors: Tensor) -> tuple[Tensor, ...]:
        input, h0, c0, parameters = case.of(dict(zip(names, tensors, strict=True)))
        flat = [t for p in parameters for t in p]
        inputs = (input, h0, c0, flat, case.lengths, case.seed)
        return reference.lstm(*inputs, options=case.op_options)[:3]

    return formula


@pytest.mark.parametrize("what", ["plain", "both clips", "two directions, lengths"])
def test_func_derivatives(backend, what):
    case = small(what)
    call, args = call_of(case)
    args = [t.detach() for t in args]
    every = tuple(range(len(args)))
    for transform in (
        lambda f: torch.func.grad(lambda *a: combine(f(*a)), argnums=every),
        lambda f: torch.func.jacrev(lambda *a: f(*a)[0], argnums=every),
        lambda f: torch.func.jacrev(torch.func.grad(lambda *a: combine(f(*a)), argnums=4)),
    ):
        actual, expected = (transform(f)(*args) for f in (call, reference_of(case)))
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("what", ["plain", "everything", "coupled"])
@pytest.mark.covering(1)
def test_forward_mode(backend, what):
    call, args = call_of(small(what))
    check_forward_mode(seeded(call), args, draws=what == "everything")


# vmap -------------------------------------------------------------------------------------------

SAMPLES = 3


@pytest.mark.parametrize(
    "batched",
    [
        {"input": 0},
        {"input": 2, "h0": 1, "c0": -1},
        {"h0": 0},
        {"c0": 0},
        {"weight_hh": 0},
        {"input": 1, "weight_ih": 2, "bias_hh": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("what", ["plain", "lengths", "both clips"])
@pytest.mark.covering(1)
def test_vmap(backend, what, batched):
    """vmap of results and of every gradient, with each argument batched or shared."""
    assert_vmap_is_a_loop(small(what), batched)


@pytest.mark.parametrize("batched", [{"input": 0}, {"weight_hh": 0}], ids=str)
def test_vmap_by_triton(triton, batched):
    with triton.serving():
        assert_vmap_is_a_loop(small("lengths", torch.float32), batched)


def assert_vmap_is_a_loop(case: Case, batched: dict[str, int]) -> None:
    names = list(case.tensors)
    call, shared = call_of(case)
    in_dims = tuple(batched.get(n) for n in names)
    args = []
    for i, (t, dim) in enumerate(zip(shared, in_dims, strict=True)):
        if dim is not None:
            shape = list(t.shape)
            shape.insert(dim if dim >= 0 else t.dim(), SAMPLES)
            args.append(normal(*shape, seed=i, dtype=t.dtype))
        else:
            args.append(t.detach())

    def gradients(argnums: tuple[int, ...]) -> Callable[..., tuple[Tensor, ...]]:
        return torch.func.grad(lambda *a: combine(call(*a)), argnums=argnums)

    for function in (call, gradients((0, 1, 2)), gradients(tuple(range(len(names))))):
        check_vmap(function, in_dims, args)


def test_vmap_over_lengths(backend):
    case = small("plain")
    lengths = torch.tensor([[3, 1], [0, 2], [2, 2]])
    tensors = case.of(case.tensors)
    actual = torch.vmap(lambda n: ops.layer(*tensors, n))(lengths)
    expected = zip(*(ops.layer(*tensors, n) for n in lengths), strict=True)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, torch.stack(e))


def test_vmap_twice(backend):
    case = small("plain", torch.float32)
    call, args = call_of(case)
    args = [t.detach() for t in args]
    inputs, weights = normal(4, SAMPLES, *args[0].shape), normal(4, *args[4].shape, seed=1)
    inner = torch.vmap(lambda x, w: call(x, *args[1:4], w, *args[5:])[0], in_dims=(0, None))
    actual = torch.vmap(inner)(inputs, weights)
    for i in range(4):
        for n in range(SAMPLES):
            expected = call(inputs[i, n], *args[1:4], weights[i], *args[5:])[0]
            torch.testing.assert_close(actual[i, n], expected)


def test_vmap_randomness(backend):
    """Draws like torch's own random functions: from one seed for all samples, or one for each."""
    case = dataclasses.replace(make(**VARIANTS["zoneout"]), reverse=(False,))
    rest = case.of(case.tensors)[1:]

    def draw(x: Tensor) -> Tensor:
        return ops.layer(x, *rest, **case.options)[0]

    samples = case.input.expand(SAMPLES, *case.input.shape)
    check_vmap_randomness(draw, samples)


# The operators themselves -----------------------------------------------------------------------


def op_arguments(what: str, save: int, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Arguments of the forward op."""
    case = small(what, dtype)
    parameters = [t for p in case.parameters for t in p]
    options = case.op_options._replace(reverse=list(case.reverse))
    return (case.input, case.h0, case.c0, parameters, case.lengths, case.seed, *options, save)


def backward_arguments(args: tuple[Any, ...], results: Any) -> Iterator[tuple[Any, ...]]:
    """Yields arguments of the backward op, for all gradients and for some of them."""
    output, h_n, c_n, *kept = results
    every = [t is not None for t in (*args[:3], *args[3])]
    upstream = (torch.ones_like(output), torch.ones_like(h_n), torch.ones_like(c_n))
    for grads, wanted in (
        (upstream, every),
        ((upstream[0], None, None), [False, *every[1:4], *(False,) * (len(every) - 4)]),
    ):
        yield (*grads, *args[:6], output, *kept, *args[6:-1], wanted)


@pytest.mark.parametrize(
    ("what", "save"),
    [
        ("plain", SAVE_ALL),
        ("two directions, lengths", SAVE_ALL),
        ("without biases or states", SAVE_STATES),
        ("everything", SAVE_STATES),
        ("everything", SAVE_ALL),
    ],
)
@pytest.mark.covering(1)
def test_opcheck(backend, what, save):
    opcheck(backend, what, save)


@pytest.mark.parametrize("what", ["plain", "two directions, lengths"])
def test_opcheck_of_triton(triton, what):
    """Two variants only: the interpreter takes too long for all."""
    opcheck("triton", what, SAVE_ALL)


def opcheck(name: str, what: str, save: int) -> None:
    args = list(op_arguments(what, save))
    if args[4] is not None:
        args[4] = torch.full_like(args[4], SMALL["T"])  # beyond, gates and cells are uninitialised
    torch.library.opcheck(getattr(torch.ops.trifuse.lstm_forward, name), tuple(args))
    results = getattr(torch.ops.trifuse.lstm_forward, name)(*args)
    for more in backward_arguments(tuple(args), results):
        torch.library.opcheck(getattr(torch.ops.trifuse.lstm_backward, name), more)


@pytest.mark.parametrize("what", ["plain", "everything", "coupled"])
@pytest.mark.parametrize("save", [SAVE_NOTHING, SAVE_STATES, SAVE_ALL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["fake", "meta"])
def test_fakes_have_the_real_shapes_dtypes_and_strides(backend, what, save, dtype, mode):
    """Inductor lays out memory by the strides of the fakes."""
    args = op_arguments(what, save, dtype)
    # The formula in Python would read the values of lengths; a kernel's fake does not.
    pretends = "cuda" if (backend, mode) == ("eager", "meta") else backend
    check_fakes(run_both(backend, args), functools.partial(run_both, pretends), args, mode)


def run_both(name: str, args: Any) -> list[Tensor]:
    results = list(getattr(torch.ops.trifuse.lstm_forward, name)(*args))
    if args[-1] == SAVE_NOTHING:
        return results
    for more in backward_arguments(args, results[:6]):
        results += getattr(torch.ops.trifuse.lstm_backward, name)(*more)
    return results


# Tracing ----------------------------------------------------------------------------------------


def model(*args: Tensor, what: str = "plain") -> Tensor:
    """The operator between other operations to compile; both states are the same tensor."""
    x, states, *p = args
    output, (h_n, c_n) = trifuse.lstm(
        x.sin(), (states, states), *p, cell_clip=0.8, zoneout_h=0.3, training=True
    )
    return output.cos().sum() + h_n.cos().sum() * c_n.sin().sum()


def model_inputs(T: int = 3, B: int = 2, I: int = 4, H: int = 5) -> list[Tensor]:  # noqa: E741
    shapes = ((T, B, I), (B, H), (4 * H, I), (4 * H, H), (4 * H,), (4 * H,))
    return [normal(*s, seed=i).requires_grad_() for i, s in enumerate(shapes)]


@pytest.mark.usefixtures("fresh_dynamo")
def test_compile(served):
    check_compile(model, model_inputs)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compile_two_directions_with_lengths(backend):
    case = small("everything", torch.float32)
    _, args = call_of(case)
    names = list(case.tensors)

    def function(lengths: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return ops.layer(
            *case.of(dict(zip(names, tensors, strict=True))),
            lengths,
            reverse=case.reverse,
            **{**case.options, "training": False},
        )

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    actual, expected = (
        lambda *args, f=f: combine(f(case.lengths, *args)) for f in (compiled, function)
    )
    assert_same_results(actual, expected, args)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.covering(0)
def test_compile_dynamic_shapes(backend):
    """Length, batch and widths all vary."""
    sizes = ((3, 5, 7, 9), (8, 9, 11, 6), (5, 10, 13, 4))
    check_one_graph(model, (model_inputs(*each) for each in sizes))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a compiler")
@pytest.mark.covering(0)
def test_compile_with_inductor(backend):
    """Forward and backward through generated code, which relies on the fakes' strides."""
    compiled = torch.compile(model, fullgraph=True, options={"fallback_random": True})
    assert_same_results(compiled, model, model_inputs())


class Module(torch.nn.Module):
    def forward(self, *args: Tensor) -> Tensor:
        return trifuse.lstm(args[0], None, *args[1:])[0]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.covering(1)
def test_export(served, strict):
    """With dynamic batch and length; exported programs hold the op by name."""
    length, batch = (torch.export.Dim(name, min=2, max=64) for name in ("length", "batch"))
    args = tuple(t.detach() for t in (lambda x, _, *p: (x, *p))(*model_inputs(6, 5)))
    free: Any = ({0: length, 1: batch}, *(None,) * 4)
    with torch.no_grad():
        program = torch.export.export(Module(), args, dynamic_shapes=(free,), strict=strict)
    ran = {str(node.target) for node in program.graph.nodes}
    assert f"trifuse.lstm_forward.{served}" in ran
    for x in (args[0], normal(7, 3, 4)):
        torch.testing.assert_close(program.module()(x, *args[1:]), Module()(x, *args[1:]))


# Autocast ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(backend, dtype):
    """As with nn.LSTM, input, h and weights are cast; c and vectors are not."""
    case = small("everything", torch.float32)
    cast = {
        n: t.to(dtype) if n in ("input", "h0") or n.startswith(("weight_ih", "weight_h")) else t
        for n, t in case.tensors.items()
    }
    call, args = call_of(case)
    narrow = call_of(case.with_tensors(cast))
    expected = narrow[0](*narrow[1])
    with torch.autocast("cpu", dtype=dtype):
        actual = call(*args)
    assert actual[0].dtype == dtype
    assert actual[2].dtype == torch.float32
    for a, e in zip(actual, expected, strict=True):
        assert_equal(a, e)
    grads = torch.autograd.grad(combine([t.float() for t in actual]), args)
    wanted = torch.autograd.grad(combine([t.float() for t in expected]), narrow[1])
    for g, w, t in zip(grads, wanted, args, strict=True):
        assert g.dtype == t.dtype
        assert_equal(g, w.to(g.dtype))


def test_autocast_does_not_reach_second_derivatives(backend):
    """The formula behind second derivatives computes in float32 even in an autocast region."""
    call, args = call_of(small("plain"))
    x, rest = args[0].detach(), [t.detach() for t in args[1:]]

    def penalty(x: Tensor) -> Tensor:
        return torch.func.grad(lambda t: combine(call(t, *rest)))(x).square().sum()

    expected = torch.func.grad(penalty)(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = torch.func.grad(penalty)(x)
    assert_equal(actual, expected)


def test_meta_tensors_are_served_by_the_formula():
    case = small("plain", torch.float32)
    call, args = call_of(case)
    meta = [t.detach().to("meta").requires_grad_() for t in args]
    results = call(*meta)
    assert all(t.device.type == "meta" for t in results)
    grads = torch.autograd.grad(combine(results), meta)
    assert [g.shape for g in grads] == [t.shape for t in meta]


def cut_in_two(dtype: torch.dtype, wide: bool) -> list[Tensor]:
    """Returns the gradients of h0, c0 and the input in a sequence cut after its third step, and of
    the whole sequence.

    Args:
        wide: whether the gradient of h goes from part to part in float32.
    """
    torch.manual_seed(0)
    parameters = Parameters(*(torch.randn(20, n, dtype=dtype) for n in (3, 5)))
    x = torch.randn(7, 2, 3, dtype=dtype)
    h0, c0 = torch.randn(1, 2, 5, dtype=dtype), torch.randn(1, 2, 5)
    grad = torch.randn(7, 2, 5, dtype=dtype)

    def forward(x, h0, c0):
        call = ops.prepare_layer(x, h0, c0, [parameters], None, (False,), False)
        arguments = (call.input, *call.states, list(call.parameters), None, None, *call.options)
        op = ops.OPERATOR.forward[call.choice.backend]
        return call, ops.OPERATOR.results(*op(*arguments, SAVE_ALL))

    def backward(call, results, *grads):
        return ops.OPERATOR.backward[call.choice.backend](
            *grads,
            call.input,
            *call.states,
            list(call.parameters),
            None,
            None,
            *(getattr(results, name) for name in ops.OPERATOR.saved),
            *call.options,
            [True] * 3 + [False] * SLOTS,
        )[:3]

    whole = backward(*forward(x, h0, c0), grad, None, None)
    first = forward(x[:3], h0, c0)
    second = forward(x[3:], first[1].h_n, first[1].c_n)
    start = torch.zeros(1, 2, 5) if wide else None
    of_x, of_h, of_c = backward(*second, grad[3:], start, None)
    assert of_h.dtype == (torch.float32 if wide else dtype)
    of_first = backward(*first, grad[:3], of_h, of_c)
    cut = [torch.cat([of_first[0], of_x]), of_first[1].to(dtype), of_first[2]]
    return [*cut, *whole]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_cut_sequences_are_those_of_whole_ones(dtype, kernel):
    """If the gradient of h is passed on in float32, it is not rounded where a sequence is cut."""
    found = cut_in_two(dtype, wide=True)
    for cut, whole in zip(found[:3], found[3:], strict=True):
        if kernel.backend == "eager":  # torch's products of other sizes have other bits
            torch.testing.assert_close(cut, whole)
        else:
            assert torch.equal(cut, whole)
    rounded = cut_in_two(dtype, wide=False)
    assert not torch.equal(rounded[0], rounded[3])


def test_gradients_of_cut_sequences_in_triton(triton):
    found = cut_in_two(torch.bfloat16, wide=True)
    for cut, whole in zip(found[:3], found[3:], strict=True):
        torch.testing.assert_close(cut, whole)
