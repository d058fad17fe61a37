"""Calls of gru and rnn for tests: inputs, specification, plain torch, the rule for accuracy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from lstm_cases import assert_same_bits as assert_same_bits  # for callers of any of the operators
from lstm_cases import lay_out_any
from numerics import Accuracy, rounding_error
from tested_kernels import Kernel
from torch import Tensor

import trifuse
from trifuse.ops import gru as gru_ops
from trifuse.ops import rnn as rnn_ops
from trifuse.reference import gru, rnn
from trifuse.reference.gru import Parameters


class Kind(NamedTuple):
    """An operator and its options."""

    operator: str
    gates: int  # blocks of H rows in a weight
    ops: Any
    formula: Callable[..., Any]
    options: Callable[..., Any]  # returns the formula's options for the flags ``reverse``
    keywords: dict[str, Any]  # the same options, as the public functions take them
    torchs: Callable[..., Tensor]  # torch's own cell, or the formula where torch has none

    def run(self, *args: Any, **rest: Any) -> Any:
        """Calls the public function, or another function of its module by ``name``."""
        function = getattr(trifuse, rest.pop("name", self.operator))
        return function(*args, **rest, **self.keywords)

    def layer(self, *args: Any, **rest: Any) -> Any:
        return self.ops.layer(*args, **rest, **self.keywords)


def _rnn(nonlinearity: str, torchs: Callable[..., Tensor]) -> Kind:
    def options(reverse: Sequence[bool]) -> rnn.Options:
        return rnn.Options(reverse, nonlinearity == "relu")

    return Kind("rnn", 1, rnn_ops, rnn.rnn, options, {"nonlinearity": nonlinearity}, torchs)


def reset_first_cell(
    x: Tensor,
    h: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    """Equations 5 to 8 of Cho et al. (2014), with biases, in plain torch."""
    H = w_hh.shape[1]
    r, z = torch.sigmoid(
        F.linear(x, w_ih[: 2 * H], None if b_ih is None else b_ih[: 2 * H])
        + F.linear(h, w_hh[: 2 * H], None if b_hh is None else b_hh[: 2 * H])
    ).chunk(2, -1)
    n = torch.tanh(
        F.linear(x, w_ih[2 * H :], None if b_ih is None else b_ih[2 * H :])
        + F.linear(r * h, w_hh[2 * H :], None if b_hh is None else b_hh[2 * H :])
    )
    return z * h + (1 - z) * n


_RESET_FIRST = {"linear_before_reset": False}

KINDS = {
    "gru": Kind("gru", 3, gru_ops, gru.gru, gru.Options, {}, torch.gru_cell),
    "reset first": Kind(
        "gru",
        3,
        gru_ops,
        gru.gru,
        functools.partial(gru.Options, **_RESET_FIRST),
        _RESET_FIRST,
        reset_first_cell,
    ),
    "tanh": _rnn("tanh", torch.rnn_tanh_cell),
    "relu": _rnn("relu", torch.rnn_relu_cell),
}


class Case:
    """A call: tensors by name, and upstream gradients."""

    def __init__(
        self,
        T: int = 5,
        B: int = 3,
        I: int = 4,  # noqa: E741
        H: int = 6,
        *,
        kind: str = "gru",
        dtype: torch.dtype = torch.float32,
        biases: bool = True,
        states: bool = True,
        lengths: Sequence[int] | None = None,
        reverse: tuple[bool, ...] = (False,),
        seed: int = 0,
    ) -> None:
        self.kind = KINDS[kind]
        generator, D, rows = torch.Generator().manual_seed(seed), len(reverse), self.kind.gates * H

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)

        self.tensors = {"input": normal(T, B, I)}
        if states:
            self.tensors["h0"] = normal(D, B, H)
        for suffix in ("", "_reverse")[:D]:
            self.tensors[f"weight_ih{suffix}"] = normal(rows, I, scale=I**-0.5)
            self.tensors[f"weight_hh{suffix}"] = normal(rows, H, scale=H**-0.5)
            if biases:
                self.tensors[f"bias_ih{suffix}"] = normal(rows)
                self.tensors[f"bias_hh{suffix}"] = normal(rows)
        self.reverse = reverse
        self.lengths = None if lengths is None else torch.tensor(lengths, dtype=torch.int64)
        self.upstream = [normal(T, B, D * H), normal(D, B, H)]

    def arguments(self, tensors: dict[str, Tensor]) -> tuple[Any, ...]:
        parameters = [
            Parameters(*(tensors.get(f"{n}{s}") for n in Parameters._fields))
            for s in ("", "_reverse")[: len(self.reverse)]
        ]
        return tensors["input"], tensors.get("h0"), parameters

    def replace(self, **others: Any) -> Case:
        """Returns the case with other attributes."""
        case = object.__new__(Case)
        vars(case).update(vars(self) | others)
        return case

    def rows(self, which: slice) -> Case:
        cut = {n: self.tensors[n][:, which] for n in ("input", "h0") if n in self.tensors}
        return self.replace(
            tensors=self.tensors | cut,
            upstream=[g[:, which] for g in self.upstream],
            lengths=None if self.lengths is None else self.lengths[which],
        )

    def steps(self, which: slice) -> Case:
        return self.replace(
            tensors=self.tensors | {"input": self.tensors["input"][which]},
            upstream=[self.upstream[0][which], self.upstream[1]],
        )


Results = dict[str, Tensor]


def differentiate(
    case: Case,
    tensors: dict[str, Tensor],
    function: Callable[[dict[str, Tensor]], Any],
    upstream: Sequence[Tensor] | None = None,
) -> Results:
    leaves = {n: t.detach().requires_grad_() for n, t in tensors.items()}
    output, h_n = function(leaves)
    pairs = [
        (t, g.to(t.dtype))
        for t, g in zip((output, h_n), upstream or case.upstream, strict=True)
        if t.requires_grad  # with T = 0 the formula's output depends on nothing
    ]
    grads: Sequence[Tensor | None] = [None] * len(leaves)
    if pairs:
        roots, gradients = zip(*pairs, strict=True)
        grads = torch.autograd.grad(roots, list(leaves.values()), gradients, allow_unused=True)
    results = {"output": output.detach(), "h_n": h_n.detach()}
    return results | {
        f"grad_{n}": torch.zeros_like(t) if g is None else g
        for (n, t), g in zip(leaves.items(), grads, strict=True)
    }


def run(case: Case) -> Results:
    """Runs the operator, forward and backward, on the selected backend."""

    def call(tensors: dict[str, Tensor]) -> Any:
        return case.kind.layer(*case.arguments(tensors), case.lengths, reverse=case.reverse)

    return differentiate(case, case.tensors, call)


def specification(case: Case, disturb: Callable[[Tensor], Tensor] = torch.Tensor.double) -> Results:
    """The reference formula in float64, differentiated by autograd."""

    def formula(tensors: dict[str, Tensor]) -> Any:
        input, h0, parameters = case.arguments(tensors)
        flat = [t for p in parameters for t in p]
        options = case.kind.options(case.reverse)
        return case.kind.formula(input, h0, flat, case.lengths, options=options)[:2]

    tensors = {n: disturb(t) for n, t in case.tensors.items()}
    return differentiate(case, tensors, formula, [disturb(g) for g in case.upstream])


def eager_torch(case: Case) -> Results:
    """The formula in plain torch, row by row, in the dtype of the input."""

    def cell(x: Tensor, h: Tensor, p: Parameters) -> Tensor:
        if case.kind.torchs is reset_first_cell:
            return reset_first_cell(x, h, *p)
        a, k = F.linear(x, p.weight_ih, p.bias_ih), F.linear(h, p.weight_hh, p.bias_hh)
        if case.kind.operator == "rnn":
            return torch.relu(a + k) if case.kind.options(()).relu else torch.tanh(a + k)
        (a_r, a_z, a_n), (k_r, k_z, k_n) = a.chunk(3), k.chunk(3)
        r, z = torch.sigmoid(a_r + k_r), torch.sigmoid(a_z + k_z)
        return (1 - z) * torch.tanh(a_n + r * k_n) + z * h

    def formula(tensors: dict[str, Tensor]) -> Any:
        input, h0, parameters = case.arguments(tensors)
        T, B, _ = input.shape
        outputs, last = [], []
        for d, (p, reverse) in enumerate(zip(parameters, case.reverse, strict=True)):
            H = p.weight_hh.shape[1]
            ys, hs = [], []
            for b in range(B):
                length = T if case.lengths is None else int(case.lengths[b])
                h = input.new_zeros(H) if h0 is None else h0[d, b]
                y = [input.new_zeros(H)] * T
                order = range(length)
                for t in reversed(order) if reverse else order:
                    y[t] = h = cell(input[t, b], h, p)
                ys.append(torch.stack(y))
                hs.append(h)
            outputs.append(torch.stack(ys, 1))
            last.append(torch.stack(hs))
        return torch.cat(outputs, -1), torch.stack(last)

    return differentiate(case, case.tensors, formula)


def record_accuracy(accuracies: dict[Kernel, Accuracy], case: Case) -> None:
    """Runs a case on each kernel and holds each result to the numerics rule."""
    generator = torch.Generator().manual_seed(0)
    eps = rounding_error(case.tensors["input"].dtype)

    def rounded(t: Tensor) -> Tensor:
        noise = torch.randn(t.shape, generator=generator, dtype=torch.float64)
        return t.double() * (1 + eps * noise)

    expected, eager = specification(case), eager_torch(case)
    near = [specification(case, rounded) for _ in range(4)]
    for kernel, accuracy in accuracies.items():
        with kernel.serving():
            actual = run(case)
        for name, exact in expected.items():
            moved = sum((n[name] - exact).square() for n in near) / len(near)
            one = (moved + (eps * exact).square()).sqrt()
            # All results of a sequence share the errors of its few states.
            sequences = expected["output"].shape[1]
            accuracy.record(name, actual[name], exact, eager[name], one, sequences)


def draw_case(random: Random, kind: str, dtype: torch.dtype) -> Case:
    def size() -> int:
        return random.choice((1, 2, 7, 8, 15, 16, 17, 31, 33, 64, 65))

    T, B = random.randint(1, 5), random.randint(1, 4)
    case = Case(
        T,
        B,
        size(),
        size(),
        kind=kind,
        dtype=dtype,
        biases=random.random() < 0.7,
        states=random.random() < 0.7,
        seed=random.getrandbits(30),
        lengths=[random.randint(0, T) for _ in range(B)] if random.random() < 0.5 else None,
        reverse=random.choice(((False,), (True,), (False, True))),
    )
    layouts = ("contiguous", "gaps", "offset", "swapped")
    case.tensors = {n: lay_out_any(t, random.choice(layouts)) for n, t in case.tensors.items()}
    return case


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without biases or states": {"biases": False, "states": False},
    "reverse": {"reverse": (True,)},
    "lengths": {"lengths": (3, 5, 0)},
    "lengths, reverse": {"lengths": (4, 1, 5), "reverse": (True,)},
    "two directions, lengths": {"reverse": (False, True), "lengths": (2, 0, 5)},
}
