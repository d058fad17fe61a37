"""LSTM cases for tests: arguments, results, and eager torch's results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import numerics
import pytest
import torch
import torch.nn.functional as F
from attention_cases import SEED, assert_equal, drawn_seed
from numerics import Accuracy, lay_out, rounding_error
from tested_kernels import KERNELS, Kernel
from torch import Tensor

import trifuse
from trifuse import backends
from trifuse.ops import lstm as ops
from trifuse.ops import lstm_stack
from trifuse.reference import lstm as reference
from trifuse.reference import philox
from trifuse.reference.lstm import Options, Parameters

STATES = ("input", "h0", "c0")


@dataclasses.dataclass(frozen=True, repr=False)
class Case:
    """Arguments of ``trifuse.ops.lstm.layer``, and its upstream gradients.

    With ``layers`` they are those of ``trifuse.ops.lstm_stack.stack``. Then D counts layers, and
    the output is (T, B, R).
    """

    input: Tensor  # (T, B, I)
    h0: Tensor | None  # (D, B, R)
    c0: Tensor | None  # (D, B, H)
    parameters: tuple[Parameters, ...]
    lengths: Tensor | None
    reverse: tuple[bool, ...]
    grad_output: Tensor  # (T, B, D·R)
    grad_h_n: Tensor  # (D, B, R)
    grad_c_n: Tensor  # (D, B, H), in the accumulation dtype
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    recompute: bool = False
    layers: bool = False

    @property
    def suffixes(self) -> tuple[str, ...]:
        if self.layers:
            return tuple(f"_l{k}" for k in range(len(self.parameters)))
        return ("", "_reverse")[: len(self.parameters)]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors with gradients, by name; names of the second direction end in _reverse."""
        named = {name: getattr(self, name) for name in STATES}
        for p, suffix in zip(self.parameters, self.suffixes, strict=True):
            named |= {f"{name}{suffix}": t for name, t in p._asdict().items()}
        return {name: t for name, t in named.items() if t is not None}

    def of(self, tensors: dict[str, Tensor]) -> list[Any]:
        """Returns input, states and parameters of this call, taken from ``tensors`` by name."""
        states = [tensors.get(name) for name in STATES]
        return [
            *states,
            [
                Parameters(*(tensors.get(f"{n}{suffix}") for n in Parameters._fields))
                for suffix in self.suffixes
            ],
        ]

    def with_tensors(self, tensors: dict[str, Tensor]) -> Case:
        input, h0, c0, parameters = self.of(tensors)
        return dataclasses.replace(self, input=input, h0=h0, c0=c0, parameters=tuple(parameters))

    @property
    def op_options(self) -> Options:
        """The options as the formula and the forward op take them."""
        return Options(self.reverse, **self.options)

    @property
    def seed(self) -> Tensor | None:
        o = self.op_options
        draws = o.training and max(o.zoneout_h, o.zoneout_c, o.recurrent_dropout) > 0
        return drawn_seed() if draws else None

    def __repr__(self) -> str:
        shapes = [f"{n}: {tuple(t.shape)} {t.stride()} {t.dtype}" for n, t in self.tensors.items()]
        lengths = None if self.lengths is None else self.lengths.tolist()
        return "\n".join([*shapes, f"{lengths=} {self.reverse=} {self.options}"])


# output, h_n, c_n and grad_<tensor>, if the call has them.
Results = dict[str, Tensor]


def run(case: Case, **options: Any) -> Results:
    """Runs the operator, forward and backward, on the current backend."""
    torch.manual_seed(SEED)

    def call(tensors: dict[str, Tensor]) -> Any:
        given = {"recompute": case.recompute, **case.options, **options}
        if case.layers:
            return lstm_stack.stack(*case.of(tensors), case.lengths, **given)
        return ops.layer(*case.of(tensors), case.lengths, reverse=case.reverse, **given)

    return differentiate(case, case.tensors, call)


def layer_after_layer(
    input: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    parameters: Sequence[Parameters],
    one: Callable[..., tuple[Tensor, Tensor, Tensor]],
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the results of ``stack``; ``one(input, h0, c0, parameters)`` runs one layer."""
    hs, cs = [], []
    for k, p in enumerate(parameters):
        input, h, c = one(input, _part(h0, k), _part(c0, k), p)
        hs.append(h)
        cs.append(c)
    return input, torch.cat(hs), torch.cat(cs)


def _part(states: Tensor | None, k: int) -> Tensor | None:
    return None if states is None else states[k : k + 1]


def specification(case: Case) -> Results:
    """Evaluates the reference formula in float64, differentiated by autograd."""

    def one(options: Options, input: Any, h0: Any, c0: Any, *parameters: Parameters) -> Any:
        flat = [t for p in parameters for t in p]
        return reference.lstm(input, h0, c0, flat, case.lengths, case.seed, options=options)[:3]

    def formula(tensors: dict[str, Tensor]) -> Any:
        input, h0, c0, parameters = case.of(tensors)
        if case.layers:
            layer = functools.partial(one, case.op_options._replace(reverse=(False,)))
            return layer_after_layer(input, h0, c0, parameters, layer)
        return one(case.op_options, input, h0, c0, *parameters)

    return differentiate(case, {n: t.double() for n, t in case.tensors.items()}, formula)


def eager_torch(case: Case) -> Results:
    """Evaluates the formula in plain torch, everything in the dtype of the input."""

    def formula(tensors: dict[str, Tensor]) -> Any:
        dtype = case.input.dtype
        tensors = {name: t.to(dtype) for name, t in tensors.items()}
        input, h0, c0, parameters = case.of(tensors)

        def one(d: int, input: Any, h0: Any, c0: Any, p: Parameters) -> Any:
            h, c = (None if t is None else t[0] for t in (h0, c0))
            y, h, c = _eager_direction(case, d, input, h, c, p)
            return y, h[None], c[None]

        if case.layers:
            return layer_after_layer(input, h0, c0, parameters, functools.partial(one, 0))
        results = [one(d, input, _part(h0, d), _part(c0, d), p) for d, p in enumerate(parameters)]
        ys, hs, cs = zip(*results, strict=True)
        return torch.cat(ys, -1), torch.cat(hs), torch.cat(cs)

    return differentiate(case, case.tensors, formula)


def _clip(t: Tensor, limit: float | None) -> Tensor:
    return t if limit is None else t.clamp(-limit, limit)


def _eager_direction(
    case: Case, d: int, input: Tensor, h: Tensor | None, c: Tensor | None, p: Parameters
) -> tuple[Tensor, Tensor, Tensor]:
    o, (T, B, _), R = case.op_options, input.shape, p.weight_hh.shape[1]
    H = R if p.weight_hr is None else p.weight_hr.shape[1]
    h = input.new_zeros(B, R) if h is None else h
    c = input.new_zeros(B, H) if c is None else c
    peepholes = iter([0, 0, 0] if p.weight_peephole is None else p.weight_peephole)
    p_i, p_f, p_o = next(peepholes), 0 if o.coupled else next(peepholes), next(peepholes)
    drawn = draws(case, d)
    steps: dict[int, Tensor] = {}
    for step in range(T):
        # In reverse, rows of different lengths are at different positions in the same step.
        position = torch.full((B,), step)
        lengths = torch.full((B,), T) if case.lengths is None else case.lengths
        if case.reverse[d]:
            position = torch.where(step < lengths, lengths - 1 - step, position)
        valid = (step < lengths)[:, None]
        rows = torch.arange(B)
        x = torch.where(valid, input[position, rows], 0)
        ax, ah = F.linear(x, p.weight_ih), F.linear(h * drawn.dropout.to(h.dtype), p.weight_hh)
        if p.norm_ih_weight is not None:
            ax = F.layer_norm(ax, ax.shape[1:], p.norm_ih_weight, None, o.eps)
            ah = F.layer_norm(ah, ah.shape[1:], p.norm_hh_weight, None, o.eps)
        a = ax + ah
        for bias in (p.bias_ih, p.bias_hh):
            a = a if bias is None else a + bias
        a_i, *a_f, a_g, a_o = a.chunk(3 if o.coupled else 4, 1)
        i = torch.sigmoid(a_i + p_i * c)
        f = 1 - i if o.coupled else torch.sigmoid(a_f[0] + p_f * c + o.forget_bias)
        new_c = _clip(f * c + i * torch.tanh(a_g), o.cell_clip)
        gate = torch.sigmoid(a_o + p_o * new_c)
        n = new_c
        if p.norm_cell_weight is not None:
            n = F.layer_norm(n, (H,), p.norm_cell_weight, p.norm_cell_bias, o.eps)
        new_h = gate * torch.tanh(n)
        if p.weight_hr is not None:
            new_h = _clip(F.linear(new_h, p.weight_hr), o.proj_clip)
        new_h = zoneout(new_h, h, drawn.keep_h, position, o.zoneout_h)
        new_c = zoneout(new_c, c, drawn.keep_c, position, o.zoneout_c)
        h, c = torch.where(valid, new_h, h), torch.where(valid, new_c, c)
        for b, (t, runs) in enumerate(zip(position.tolist(), valid[:, 0].tolist(), strict=True)):
            if runs:
                steps[t * B + b] = h[b]
    nothing = input.new_zeros(R)
    y = [steps.get(k, nothing) for k in range(T * B)]
    return torch.stack(y).view(T, B, R) if y else input.new_zeros(T, B, R), h, c


def zoneout(new: Tensor, old: Tensor, keep: Tensor | None, position: Tensor, p: float) -> Tensor:
    if keep is None:
        return p * old + (1 - p) * new if p else new
    return torch.where(keep[position, torch.arange(len(position))], new, old)


@dataclasses.dataclass
class Draws:
    dropout: Tensor  # float64 (B, R), the multiplier of h; or 1
    keep_h: Tensor | None  # bool (T, B, R), by position: where the new h is used
    keep_c: Tensor | None  # bool (T, B, H)


def draws(case: Case, d: int) -> Draws:
    """Returns a call's random draws for direction d, computed only from the public arguments."""
    o, (T, B, _), p = case.op_options, case.input.shape, case.parameters[d]
    R = p.weight_hh.shape[1]
    H = R if p.weight_hr is None else p.weight_hr.shape[1]

    def keep(kind: int, count: int, columns: int, probability: float) -> Tensor | None:
        if not o.training or probability == 0:
            return None
        planes = torch.tensor([(t * 3 + kind) * 2 + d for t in range(count)])
        return philox.dropout_keep(drawn_seed(), planes, B, columns, probability)

    kept = keep(0, 1, R, o.recurrent_dropout)
    dropout = torch.ones((), dtype=torch.float64)
    if kept is not None:
        dropout = kept[0].double() * philox.keep_scale(o.recurrent_dropout)
    return Draws(dropout, keep(1, T, R, o.zoneout_h), keep(2, T, H, o.zoneout_c))


def differentiate(
    case: Case, tensors: dict[str, Tensor], function: Callable[[dict[str, Tensor]], Any]
) -> Results:
    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    outputs = function(leaves)
    upstream = [
        g.to(o.dtype)
        for g, o in zip((case.grad_output, case.grad_h_n, case.grad_c_n), outputs, strict=True)
    ]
    # Without steps and states, the outputs depend on no input.
    pairs = [(o, g) for o, g in zip(outputs, upstream, strict=True) if o.requires_grad]
    grads: Sequence[Tensor | None] = [None] * len(leaves)
    if pairs:
        roots, gradients = zip(*pairs, strict=True)
        grads = torch.autograd.grad(roots, list(leaves.values()), gradients, allow_unused=True)
    results = dict(zip(("output", "h_n", "c_n"), (o.detach() for o in outputs), strict=True))
    return results | {
        f"grad_{name}": torch.zeros_like(t) if g is None else g
        for (name, t), g in zip(leaves.items(), grads, strict=True)
    }


# The numerics rule ------------------------------------------------------------------------------


def record_accuracy(accuracies: dict[Kernel, Accuracy], case: Case) -> None:
    """Runs a case on each kernel and holds each result to the numerics rule."""
    expected, eager = specification(case), eager_torch(case)
    rounding = one_rounding(case, expected)

    @functools.cache
    def errors_nearby() -> list[Results]:
        """Eager torch's errors at inputs that differ by a few roundings."""
        eps, generator = rounding_error(case.input.dtype), torch.Generator().manual_seed(1)
        cases = [perturbed(case, 4 * eps, generator) for _ in range(8)]
        pairs = [(eager_torch(c), specification(c)) for c in (in_dtypes_of(case, c) for c in cases)]
        return [{n: (e[n].double() - exact[n]).abs() for n in exact} for e, exact in pairs]

    for kernel, accuracy in accuracies.items():
        with kernel.serving():
            actual = run(case)
        assert actual.keys() == expected.keys()
        for name in actual:
            theirs = eager[name].to(actual[name].dtype)
            # All results of a sequence share the errors of its few states.
            sequences = case.input.shape[1]
            accuracy.record(
                name.removesuffix("_reverse"),  # one mean, as both are conditioned alike
                actual[name],
                expected[name],
                theirs,
                rounding[name],
                independent=sequences,
                elsewhere=lambda name=name: [errors[name] for errors in errors_nearby()],
            )


_UPSTREAM = ("grad_output", "grad_h_n", "grad_c_n")


def perturbed(case: Case, relative: float, generator: torch.Generator) -> Case:
    """Returns the case with every number multiplied by 1 + ``relative`` times a normal draw."""

    def near(t: Tensor) -> Tensor:
        noise = torch.randn(t.shape, generator=generator, dtype=torch.float64)
        return t.double() * (1 + relative * noise)

    moved = case.with_tensors({name: near(t) for name, t in case.tensors.items()})
    return dataclasses.replace(moved, **{n: near(getattr(case, n)) for n in _UPSTREAM})


def in_dtypes_of(like: Case, case: Case) -> Case:
    """Returns the case with its tensors in the dtypes of another case's."""
    tensors = {name: t.to(like.tensors[name].dtype) for name, t in case.tensors.items()}
    upstream = {n: getattr(case, n).to(getattr(like, n).dtype) for n in _UPSTREAM}
    return dataclasses.replace(case.with_tensors(tensors), **upstream)


def one_rounding(case: Case, exact: Results, count: int = 4) -> Results:
    """Returns how far each exact result moves when each input number is rounded once.

    The effect of roundings through time is measured, not derived: it is the root mean square over
    ``count`` draws of random roundings.
    """
    eps = rounding_error(case.input.dtype)
    generator = torch.Generator().manual_seed(0)
    squares = {name: torch.zeros_like(t) for name, t in exact.items()}
    for _ in range(count):
        for name, t in specification(perturbed(case, eps, generator)).items():
            # A result is rounded itself, and so are the terms of its sums.
            own = (eps * exact[name]).square()
            squares[name] += (t - exact[name]).square() / count + own / count
    return {name: square.sqrt() for name, square in squares.items()}


# Cases with given options -----------------------------------------------------------------------


def make(
    T: int = 5,
    B: int = 3,
    I: int = 4,  # noqa: E741
    H: int = 6,
    *,
    dtype: torch.dtype = torch.float32,
    projection: int | None = None,
    biases: bool = True,
    peephole: bool = False,
    norm: bool = False,
    norm_cell_bias: bool = True,
    lengths: Sequence[int] | None = None,
    reverse: tuple[bool, ...] = (False,),
    layers: int = 0,
    states: bool = True,
    vectors: torch.dtype | None = None,
    seed: int = 0,
    recompute: bool = False,
    **options: Any,
) -> Case:
    """Makes a case of standard normal numbers, with weights scaled so that gates do not saturate.

    With ``layers``, it is a stack of that many layers.
    """
    generator = torch.Generator().manual_seed(seed)
    gates = 3 if options.get("coupled") else 4
    D, R = layers or len(reverse), H if projection is None else projection
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape: int, scale: float = 1.0, as_type: torch.dtype = dtype) -> Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(as_type)

    def vector(*shape: int, mean: float = 0.0) -> Tensor:
        t = mean + 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
        return t.to(vectors or dtype)

    def direction(features: int) -> Parameters:
        return Parameters(
            normal(gates * H, features, scale=features**-0.5),
            normal(gates * H, R, scale=R**-0.5),
            vector(gates * H) if biases else None,
            vector(gates * H) if biases else None,
            normal(R, H, scale=2 * H**-0.5) if projection is not None else None,
            vector(gates - 1, H) if peephole else None,
            vector(gates * H, mean=1.0) if norm else None,
            vector(gates * H, mean=1.0) if norm else None,
            vector(H, mean=1.0) if norm else None,
            vector(H) if norm and norm_cell_bias else None,
        )

    return Case(
        normal(T, B, I),
        normal(D, B, R) if states else None,
        normal(D, B, H, as_type=wide) if states else None,
        tuple(direction(R if layers and d else I) for d in range(D)),
        None if lengths is None else torch.tensor(lengths, dtype=torch.int64),
        (False,) * layers or reverse,
        normal(T, B, R if layers else D * R),
        normal(D, B, R),
        normal(D, B, H, as_type=wide),
        options,
        recompute,
        layers > 0,
    )


DRAWN = {"zoneout_h": 0.3, "zoneout_c": 0.2, "recurrent_dropout": 0.4, "training": True}
CLIPS = {"cell_clip": 0.8, "proj_clip": 0.5}
EVERYTHING = {
    "projection": 3,
    "peephole": True,
    "norm": True,
    "lengths": (3, 5, 0),
    "forget_bias": 1.0,
    "reverse": (False, True),
    **CLIPS,
}

# Arguments of `make`: each option alone, and all compatible ones together.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without biases or states": {"biases": False, "states": False},
    "reverse": {"reverse": (True,)},
    "lengths": {"lengths": (3, 5, 0)},
    "lengths, reverse": {"lengths": (4, 1, 5), "reverse": (True,)},
    "projection": {"projection": 3},
    "a projection wider than c": {"projection": 8, "H": 5},
    "cell clip": {"cell_clip": 0.8},
    "both clips": {"projection": 3, **CLIPS},
    "forget bias": {"forget_bias": 1.0},
    "peephole": {"peephole": True},
    "coupled": {"coupled": True},
    "coupled, peephole": {"coupled": True, "peephole": True},
    "layer norm": {"norm": True},
    "layer norm, no bias of c": {"norm": True, "norm_cell_bias": False, "biases": False},
    "zoneout": {"zoneout_h": 0.3, "zoneout_c": 0.2, "training": True},
    "zoneout of h": {"zoneout_h": 0.3, "training": True, "projection": 3, "proj_clip": 0.5},
    "zoneout in evaluation": {"zoneout_h": 0.3, "zoneout_c": 0.2, "projection": 3, **CLIPS},
    "recurrent dropout": {"recurrent_dropout": 0.4, "training": True},
    "recurrent dropout in evaluation": {"recurrent_dropout": 0.4},
    "recompute": {"recompute": True},
    "recompute, layer norm": {"recompute": True, "norm": True, "lengths": (3, 5, 0)},
    "two directions": {"reverse": (False, True)},
    "two directions, lengths": {"reverse": (False, True), "lengths": (2, 0, 5)},
    "everything": {**EVERYTHING, **DRAWN},
    "everything, recompute": {**EVERYTHING, **DRAWN, "recompute": True},
    "everything, coupled": {**EVERYTHING, **DRAWN, "coupled": True, "forget_bias": 0.0},
    "everything in evaluation": {**EVERYTHING, **DRAWN, "training": False},
}


assert_near = functools.partial(numerics.assert_near, narrow=5e-2)


def assert_same_bits(actual: Results, expected: Results) -> None:
    assert actual.keys() == expected.keys()
    for name in actual:
        assert_equal(actual[name], expected[name], name)


def check_empty(case: Case, results: Results) -> None:
    """Checks a call without steps or rows: states pass unchanged, other gradients are 0."""
    assert results["output"].shape == case.grad_output.shape
    if case.input.shape[0] == 0:
        assert torch.equal(results["h_n"], case.h0)
        assert torch.equal(results["c_n"], case.c0)
        assert torch.equal(results["grad_h0"], case.grad_h_n)
        assert torch.equal(results["grad_c0"], case.grad_c_n)
    of_rows = {"output", "h_n", "c_n", "grad_input", "grad_h0", "grad_c0"}
    for name in results.keys() - of_rows:
        assert not results[name].any()


# Kernels ----------------------------------------------------------------------------------------


def serving(operator: str, kernels: Sequence[Kernel]) -> list[Kernel]:
    """Returns the kernels that serve an operator on this machine, in float32."""
    call = backends.Call(operator, "cpu", torch.float32)
    return [kernel for kernel in kernels if backends._WHY_NOT[kernel.backend](call) is None]


def kernel_fixture(operator: str, *more: Kernel) -> Any:
    """Returns a fixture that runs calls on each kernel in turn."""
    kernels = serving(operator, (*KERNELS, *more))

    @pytest.fixture(params=kernels, ids=lambda kernel: kernel.name)
    def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
        with request.param.serving():
            yield request.param

    return kernel


def backend_fixture(operator: str, *more: str) -> Any:
    """As :func:`kernel_fixture`, with one kernel per backend: the best for this machine."""
    names = ("eager", "cpp", *more)
    found = [kernel.backend for kernel in serving(operator, [Kernel(name) for name in names])]

    @pytest.fixture(params=found)
    def backend(request: pytest.FixtureRequest) -> Iterator[str]:
        with trifuse.backend(request.param):
            yield request.param

    return backend


# Random calls -----------------------------------------------------------------------------------

# The edges of vectors and of tiles.
_SIZES = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 64, 65)


def draw_case(random: Random, dtype: torch.dtype) -> Case:
    """Draws any call of the operator: sizes, layouts, dtypes, options, absent tensors."""

    def size() -> int:
        return random.choice(_SIZES) if random.random() < 0.5 else random.randint(1, 20)

    def chance(p: float) -> bool:
        return random.random() < p

    T, B, H = random.randint(1, 6), random.randint(1, 5), size()
    projection = size() if chance(0.4) else None
    coupled = chance(0.3)
    wider = torch.float32 if dtype.itemsize == 2 else dtype
    features = size()
    case = make(
        T,
        B,
        features,
        H,
        dtype=dtype,
        projection=projection,
        biases=chance(0.7),
        peephole=chance(0.4),
        # With few units, normalising nearly equal numbers would amplify their rounding. With one
        # feature, the normalised product does not depend on it, so its gradient would be only
        # rounding errors.
        norm=H >= 7 and features > 1 and chance(0.4),
        norm_cell_bias=chance(0.5),
        lengths=[random.randint(0, T) for _ in range(B)] if chance(0.5) else None,
        reverse=tuple(chance(0.5) for _ in range(random.choice((1, 1, 2)))),
        states=chance(0.7),
        vectors=random.choice((dtype, wider)),
        seed=random.getrandbits(30),
        recompute=chance(0.3),
        coupled=coupled,
        forget_bias=0.0 if coupled else random.choice((0.0, 1.0)),
        cell_clip=random.choice((None, None, 0.7)),
        proj_clip=random.choice((None, 0.6)) if projection is not None else None,
        zoneout_h=random.choice((0.0, 0.0, 0.3)),
        zoneout_c=random.choice((0.0, 0.0, 0.3)),
        recurrent_dropout=random.choice((0.0, 0.0, 0.4)),
        training=chance(0.5),
    )
    return laid_out(case, lambda: random.choice(("contiguous", "gaps", "offset", "swapped")))


# torch's products of few and of many rows may differ in the last bit. These products are exact.
def with_exact_products(case: Case) -> Case:
    def short(t: Tensor) -> Tensor:
        return (t * 16).round() / 16

    parameters = tuple(p._replace(weight_ih=short(p.weight_ih)) for p in case.parameters)
    return dataclasses.replace(case, input=short(case.input), parameters=parameters)


def laid_out(case: Case, layout: Callable[[], str]) -> Case:
    """Returns the case with each tensor in another memory layout; gaps hold NaN."""
    upstream: dict[str, Any] = {
        name: lay_out_any(getattr(case, name), layout())
        for name in ("grad_output", "grad_h_n", "grad_c_n")
    }
    laid = {name: lay_out_any(t, layout()) for name, t in case.tensors.items()}
    return dataclasses.replace(case.with_tensors(laid), **upstream)


def lay_out_any(t: Tensor, layout: str) -> Tensor:
    """As :func:`numerics.lay_out`.

    "swapped" stores the first two dimensions in reverse order, and "negated" the negative numbers.
    """
    if layout == "negated":
        return (-t)._neg_view()
    if layout == "swapped":
        return t if t.dim() < 2 else t.transpose(0, 1).contiguous().transpose(0, 1)
    return lay_out(t, layout)
