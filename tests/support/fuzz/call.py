"""A call as plain data: how it runs, its expected results, and a program that repeats it."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from tested_kernels import CPU_CAPABILITIES, Kernel
from torch import Tensor

from .draws import Draws
from .rounding import AT_ONCE, LIMIT, MANY_REPLICAS, REPLICAS, SUSPECT, Rounding, units_off
from .tensors import Values, code, draw_layout, short_repr

Tensors = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Call:
    """One call: its arguments, the gradients it takes, and what is checked."""

    operator: str
    kernel: str
    dtype: str
    tensors: dict[str, Values]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    entry_point: str = ""  # how it is called, such as "cell" or "varlen"; each operator has its own
    wanted: tuple[str, ...] = ()  # tensors whose gradients are computed
    upstream: dict[str, Values] = dataclasses.field(default_factory=dict)  # gradients of results
    second: bool = False  # also second derivatives
    samples: dict[str, int] = dataclasses.field(default_factory=dict)  # vmap: dimension by tensor
    poison: float | None = None  # value of elements that must not be read
    overflow: bool = False  # numbers may exceed the range of the dtype
    same_bits: bool = False  # compare bits with two threads, and with the first sequence alone
    seed: int = 0  # seeds torch's generator

    __repr__ = short_repr

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def check(self) -> None:
        """Raises Failure if the call raises or a result is wrong."""
        check(self)

    def build(self) -> Tensors:
        tensors = {name: values.build() for name, values in self.tensors.items()}
        if self.poison is not None:
            operator(self).poison(self, tensors, self.poison)
        return tensors


class Operator(Protocol):
    """The interface of each module that is named after an operator."""

    def draw(self, d: Draws, kernel: str, dtype: str) -> Call: ...

    def arguments(self, call: Call, tensors: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Returns the function's full name and its arguments."""

    def outputs(self, call: Call, result: Any) -> Tensors: ...

    def formula(self, call: Call, tensors: Tensors, r: Rounding) -> Tensors:
        """Returns the results. Floating-point tensors are float64, (1 + replicas, ...)."""

    def poison(self, call: Call, tensors: Tensors, value: float) -> None:
        """Overwrites elements that take no part."""

    def first(self, call: Call, tensors: Tensors) -> tuple[Tensors, Mapping[str, Any]] | None:
        """Returns a batch's first sequence, and where its results are in the batch's results."""


class Failure(AssertionError):  # noqa: N818 - of a call, not of the program
    """A call raised, or a result is wrong.

    Attributes:
        kind: what went wrong; a shrunk call fails with the same kind.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


def operator(call: Call) -> Operator:
    module: Any = importlib.import_module(f".{call.operator}", __package__)
    return module


# Actual results ---------------------------------------------------------------------------------


def serving(call: Call) -> contextlib.AbstractContextManager[None]:
    return Kernel(*call.kernel.split()).serving()


def function(call: Call) -> Callable[[Mapping[str, Any]], Tensors]:
    """Returns the public function as a function of tensors by name."""
    op = operator(call)

    def one(tensors: Mapping[str, Any]) -> Tensors:
        path, arguments = op.arguments(call, tensors)
        return op.outputs(call, find(path)(**arguments))

    return one


def find(path: str) -> Any:
    module, *names = path.split(".")
    return functools.reduce(getattr, names, importlib.import_module(module))


def run(call: Call, tensors: Tensors, upstream: Tensors) -> Tensors:
    """Runs the kernel. Returns results, gradients and second derivatives by name."""
    one = function(call)

    def whole(given: Tensors) -> Tensors:
        # torch.manual_seed would also record a call stack for every kind of accelerator, and keep
        # it.
        torch.default_generator.manual_seed(call.seed)
        if not call.samples:
            return one(given)
        dims = {name: call.samples.get(name) for name in given}
        return torch.vmap(one, in_dims=(dims,))(given)

    with serving(call):
        return differentiate(call, tensors, upstream, whole)


def specification(
    call: Call,
    tensors: Tensors,
    upstream: Tensors,
    replicas: int,
    to_nearest: bool = False,
    part: int = 0,
) -> Tensors:
    """Evaluates the formula. Returns what :func:`run` returns, for every replica."""
    if replicas > AT_ONCE:  # in parts, to limit the memory of long sequences
        counts = [min(AT_ONCE, replicas - n) for n in range(0, replicas, AT_ONCE)]
        first, *others = (
            specification(call, tensors, upstream, count, to_nearest, number)
            for number, count in enumerate(counts)
        )
        return {n: torch.cat([t, *(other[n][1:] for other in others)]) for n, t in first.items()}
    op = operator(call)
    r = Rounding(call.torch_dtype, replicas, call.overflow, to_nearest, part)

    def whole(given: Tensors) -> Tensors:
        if not call.samples:
            return op.formula(call, given, r)
        count = next(tensors[name].shape[dim] for name, dim in call.samples.items())
        each = []
        for n in range(count):
            sample = dict(given)
            for name, dim in call.samples.items():
                t = given[name]
                sample[name] = t.select(dim + t.is_floating_point(), n)
            each.append(op.formula(call, sample, r))
        return {name: torch.stack([results[name] for results in each], 1) for name in each[0]}

    def with_zeros(given: Tensors) -> Tensors:
        """Adds zeros for absent upstream gradients, as kernels do: 0 times NaN is NaN."""
        results = whole(given)
        for name, result in results.items():
            upstream_of.setdefault(name, torch.zeros_like(result))
        return results

    upstream_of = {n: r.of(t) for n, t in upstream.items()}
    floating = {n: r.of(t) if t.is_floating_point() else t for n, t in tensors.items()}
    return differentiate(call, floating, upstream_of, with_zeros)


def differentiate(
    call: Call, tensors: Tensors, upstream: Tensors, whole: Callable[[Tensors], Tensors]
) -> Tensors:
    leaves = {name: tensors[name].detach().requires_grad_() for name in call.wanted}
    with torch.set_grad_enabled(bool(leaves)):
        outputs = whole({**tensors, **leaves})
    results = {name: t.detach() for name, t in outputs.items()}
    given = list(call.upstream)
    if call.second:
        upstream |= {name: upstream[name].detach().requires_grad_() for name in given}
    pairs = [
        (outputs[name], grad) for name, grad in upstream.items() if outputs[name].requires_grad
    ]
    grads = _gradients(pairs, leaves, call.second)
    results |= {f"grad_{name}": grad.detach() for name, grad in grads.items()}
    if call.second:
        pairs = [(g, _weights(g, call, name)) for name, g in grads.items() if g.requires_grad]
        variables = leaves | {f"grad_{name}": upstream[name] for name in given}
        seconds = _gradients(pairs, variables, False)
        results |= {f"second_{name}": t for name, t in seconds.items()}
    return results


def _gradients(pairs: list[tuple[Tensor, Tensor]], leaves: Tensors, create_graph: bool) -> Tensors:
    found: Sequence[Tensor | None] = [None] * len(leaves)
    if pairs and leaves:
        roots, upstream = zip(*pairs, strict=True)
        found = torch.autograd.grad(
            roots, list(leaves.values()), upstream, create_graph=create_graph, allow_unused=True
        )
    return {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), found, strict=True)
    }


def _weights(grad: Tensor, call: Call, name: str) -> Tensor:
    """Returns the upstream gradient with which ``grad`` is differentiated again."""
    values = call.tensors[name]
    count = math.prod(values.shape)
    return torch.cos(torch.arange(count).double()).to(grad.dtype).view(values.shape).expand_as(grad)


# Expected results -------------------------------------------------------------------------------


def check(call: Call) -> None:
    """Runs a call on its kernel and compares the results with the formula."""
    tensors = call.build()
    upstream = {name: values.build() for name, values in call.upstream.items()}
    try:
        actual = run(call, tensors, upstream)
    except Exception as error:
        raise Failure(f"{call.operator} raised {type(error).__name__}", str(error)) from error
    suspects = units(call, actual, tensors, upstream, REPLICAS)
    if any(not worst <= SUSPECT for worst in suspects.values()):
        for name, worst in units(call, actual, tensors, upstream, MANY_REPLICAS).items():
            # Second derivatives use a formula in torch, which rounds more often than ours here.
            limit = (4 if name.startswith("second_") else 1) * LIMIT * _correlation(call)
            if not worst <= limit and not errs_as_torch(call, name, actual, tensors, upstream):
                exact = specification(call, tensors, upstream, 0)[name][0]
                raise Failure(
                    f"{call.operator}, {name}",
                    f"{worst:.3g} roundings off\ngave     {_show(actual[name])}\n"
                    f"expected {_show(exact)}",
                )
    if call.same_bits:
        check_bits(call, tensors, upstream, actual)


def _correlation(call: Call) -> float:
    """Returns how much larger than a random sum's the error of a sum of equal terms can be.

    Partial sums of n equal terms round the same way, so the error is that of n roundings, not √n.
    """
    values = [*call.tensors.values(), *call.upstream.values()]
    return max([1, *(v.shape[dim] for v in values for dim in v.layout.repeated)]) ** 0.5


def errs_as_torch(
    call: Call, name: str, actual: Tensors, tensors: Tensors, upstream: Tensors
) -> bool:
    """Returns whether a result's largest error is at most twice that of the formula in its dtype.

    That is the numerics rule. It decides cases in which an error grows by orders of magnitude, such
    as a layer norm of equal numbers at each step, because random errors then say little.
    """
    # In float64 nothing is left to round, so random errors stand for rounding.
    if call.torch_dtype == torch.float64:
        exact, *rounded = specification(call, tensors, dict(upstream), MANY_REPLICAS)[name]
        theirs = torch.stack([(t - exact).abs().max() for t in rounded]).median()
    else:
        # A sum of a few terms can be exact by luck, so the upstream gradients are also scaled.
        exact, found = specification(call, tensors, dict(upstream), 0)[name][0], []
        for factor in (1.0, 1.1, 1.3, 1.4, 1.6, 1.7, 1.9):
            scaled = {n: (factor * t).to(t.dtype) for n, t in upstream.items()}
            one, rounded_one = specification(call, tensors, scaled, 1, to_nearest=True)[name]
            found.append((rounded_one - one).abs().max() / factor)
        theirs = max(found)
    ours = (actual[name].double() - exact).abs().max()
    return bool(theirs.isfinite() and ours <= 2 * theirs)


def units(
    call: Call, actual: Tensors, tensors: Tensors, upstream: Tensors, replicas: int
) -> dict[str, float]:
    """Returns the largest error of each result, in units."""
    expected = specification(call, tensors, upstream, replicas)
    if actual.keys() != expected.keys():
        raise Failure(f"{call.operator}, results", f"gave {[*actual]}, expected {[*expected]}")
    worst = {}
    for name, result in actual.items():
        if result.shape != expected[name].shape[1:]:
            shapes = f"gave {tuple(result.shape)}, expected {tuple(expected[name].shape[1:])}"
            raise Failure(f"{call.operator}, shape of {name}", shapes)
        if result.numel():
            worst[name] = units_off(result, expected[name], call.torch_dtype).max().item()
    return worst


def _show(x: Tensor) -> str:
    return str(x.detach().flatten().tolist() if x.numel() <= 64 else x).replace("\n", "\n         ")


def check_bits(call: Call, tensors: Tensors, upstream: Tensors, actual: Tensors) -> None:
    """Checks that neither the number of threads nor the rest of the batch changes a bit."""
    torch.set_num_threads(2)
    try:
        threads = run(call, tensors, upstream)
    finally:
        torch.set_num_threads(1)
    _compare_bits(call, "two threads", threads, actual)
    alone = operator(call).first(call, tensors)
    if alone is not None:
        given, places = alone
        grads = {name: grad[places[name]] for name, grad in upstream.items()}
        first = run(call, given, grads)
        batch = {name: actual[name][place] for name, place in places.items() if name in actual}
        _compare_bits(call, "alone", {name: first[name] for name in batch}, batch)


def _compare_bits(call: Call, how: str, these: Tensors, those: Tensors) -> None:
    for name, this in these.items():
        if not torch.equal(this.nan_to_num(nan=123.0), those[name].nan_to_num(nan=123.0)):
            raise Failure(
                f"{call.operator}, bits of {name}, {how}",
                f"gave {_show(this)}\nnot  {_show(those[name])}",
            )


# Printed as Python ------------------------------------------------------------------------------


def program(call: Call) -> str:
    """Returns a Python program that makes the call, without its gradients."""
    tensors = call.build()
    names = {id(t): name for name, t in tensors.items()}
    path, arguments = operator(call).arguments(call, tensors)
    backend, *capability = call.kernel.split()

    def text(value: Any) -> str:
        if id(value) in names:
            return names[id(value)]
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {text(v)}" for k, v in value.items()) + "}"
        if isinstance(value, (tuple, list)):
            inside = ", ".join(map(text, value))
            if hasattr(value, "_fields"):
                return f"{type(value).__module__}.{type(value).__name__}({inside})"
            return f"[{inside}]" if isinstance(value, list) else f"({inside},)"
        if hasattr(value, "made_by"):
            return value.made_by
        if isinstance(value, enum.Enum):
            return f"{type(value).__module__}.{type(value).__name__}.{value.name}"
        return repr(value)

    lines = [
        "import torch, trifuse",
        "import torch.nn.attention.bias",
        "nan = float('nan'); inf = float('inf')",
    ]
    for name, t in tensors.items():
        if t.numel() <= 200 and call.tensors[name].layout.far is None:
            lines.append(code(name, t))
        else:  # as its fuzz.tensors.Values
            lines.append(f"{name} = {call.tensors[name]!r}.build()")
    lines += [f"{name}.requires_grad_()" for name in call.wanted]
    if capability:
        lines.append(f"trifuse.backends._C.set_cpu_capability({capability[0]!r})")
    given = ", ".join(f"{name}={text(value)}" for name, value in arguments.items())
    lines.append(f"torch.manual_seed({call.seed})")
    made = f"{path}({given})"
    if call.samples:
        dims = ", ".join(str(call.samples.get(name)) for name in tensors)
        given = ", ".join(tensors)
        made = f"torch.vmap(lambda {given}: {made}, in_dims=({dims},))({given})"
    lines += [f"with trifuse.backend({backend!r}):", f"    result = {made}", "print(result)"]
    return "\n".join(lines)


# Draws shared by all operators ------------------------------------------------------------------


def draw_modes(
    d: Draws,
    call: Call,
    differentiable: list[str],
    results: dict[str, Values],
    second: bool = True,
) -> Call:
    """Draws which gradients are taken, whether second ones too, and whether bits are compared."""
    wanted: tuple[str, ...] = ()
    upstream: dict[str, Values] = {}
    if d.flag(85):
        some = d.flag(25)
        wanted = tuple(name for name in differentiable if not some or d.flag(50))
        absent = d.flag(20)
        upstream = {
            name: dataclasses.replace(
                values, seed=d.integer(0, 255), layout=draw_layout(d, values.shape)
            )
            for name, values in results.items()
            if not absent or d.flag(50)
        }
    narrow = call.dtype in ("bfloat16", "float16")
    backend = call.kernel.split()[0]
    second = second and bool(upstream) and not narrow and d.flag(6)
    return dataclasses.replace(
        call,
        wanted=wanted if upstream else (),
        upstream=upstream,
        second=second,
        same_bits=backend == "cpp" and not second and d.flag(8),
    )


def kernels(backend: str) -> tuple[str, ...]:
    """Returns the names of a backend's kernels: for C++, one per supported instruction set."""
    return tuple(f"cpp {name}" for name in CPU_CAPABILITIES) if backend == "cpp" else (backend,)
