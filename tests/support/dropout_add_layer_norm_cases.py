"""dropout_add_layer_norm cases for tests: arguments, results, and eager torch's results."""

from __future__ import annotations

import dataclasses
import math
import mmap
from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from attention_cases import SEED, assert_equal, drawn_seed, normal
from hypothesis import strategies as st
from numerics import Accuracy, lay_out, rounding_error
from torch import Tensor

import trifuse
from trifuse.reference import dropout_add_layer_norm as reference
from trifuse.reference import philox

TENSORS = ("x", "residual", "weight", "bias", "x_bias")


@dataclasses.dataclass(frozen=True, repr=False)
class Case:
    """Arguments of a call in training, and its upstream gradients.

    With ``grad_sum``, the call has ``prenorm``.
    """

    x: Tensor  # (..., N)
    residual: Tensor | None  # broadcastable to (..., N)
    weight: Tensor | None  # (N,)
    bias: Tensor | None  # (N,)
    x_bias: Tensor | None  # (N,)
    grad_out: Tensor  # (..., N), in the dtype of x
    grad_sum: Tensor | None  # (..., N), in the dtype of the sum
    dropout_p: float = 0.0
    eps: float = 1e-5
    rms_norm: bool = False
    residual_in_fp32: bool = False

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return tuple(getattr(self, name) for name in TENSORS)

    @property
    def sum_dtype(self) -> torch.dtype:
        return sum_dtype(self.x, self.residual, self.residual_in_fp32)

    def __repr__(self) -> str:
        def show(value: Any) -> str:
            if not isinstance(value, Tensor):
                return str(value)
            return f"{tuple(value.shape)} strides {value.stride()} {value.dtype}"

        return "\n".join(f"{name}: {show(value)}" for name, value in vars(self).items())


# out, sum and grad_<argument>, if the call has them.
Results = dict[str, Tensor]


def run(case: Case) -> Results:
    """Runs the operator, forward and backward, on the current backend."""
    torch.manual_seed(SEED)

    def call(
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        x_bias: Tensor | None,
    ) -> Any:
        result = trifuse.dropout_add_layer_norm(
            x,
            residual,
            weight,
            bias,
            case.dropout_p,
            case.eps,
            training=True,
            prenorm=case.grad_sum is not None,
            x_bias=x_bias,
            rms_norm=case.rms_norm,
            residual_in_fp32=case.residual_in_fp32,
        )
        return result if isinstance(result, tuple) else (result, None)

    return _differentiate(case, case.tensors, call)


def specification(case: Case) -> Results:
    """Evaluates the reference formula in float64, differentiated by autograd."""
    seed = drawn_seed() if case.dropout_p > 0 else None

    def formula(x: Tensor, residual: Tensor | None, *vectors: Tensor | None) -> Any:
        residual = None if residual is None else residual.expand(x.shape)
        return reference.dropout_add_layer_norm(
            x,
            residual,
            *vectors,
            seed,
            case.dropout_p,
            case.eps,
            case.rms_norm,
            prenorm=False,
            sum_dtype=torch.float64,
        )[:2]

    return _differentiate(case, [t if t is None else t.double() for t in case.tensors], formula)


def eager_torch(case: Case) -> Results:
    """Evaluates the formula in plain torch, in the dtypes of its type promotion."""
    multiplier = dropout_multiplier(case)

    def formula(
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        x_bias: Tensor | None,
    ) -> Any:
        total = x if x_bias is None else x + x_bias
        if case.dropout_p > 0:
            total = total * multiplier.to(total.dtype)
        if residual is not None:
            total = residual + total
        if case.grad_sum is not None:
            total = total.to(case.sum_dtype)
        dtype = total.dtype
        for vector in (weight, bias):
            dtype = dtype if vector is None else torch.promote_types(dtype, vector.dtype)
        weight, bias = (v if v is None else v.to(dtype) for v in (weight, bias))
        N = x.shape[-1:]
        if case.rms_norm:
            out = F.rms_norm(total.to(dtype), N, weight, case.eps)
            out = out if bias is None else out + bias
        else:
            out = F.layer_norm(total.to(dtype), N, weight, bias, case.eps)
        return out.to(x.dtype), total

    return _differentiate(case, case.tensors, formula)


def dropout_multiplier(case: Case) -> Tensor:
    """Returns D of the formula, float64, (..., N), from the public arguments alone."""
    if case.dropout_p == 0:
        return torch.ones(case.x.shape, dtype=torch.float64)
    N = case.x.shape[-1]
    rows, plane = case.x.numel() // max(N, 1), torch.tensor(0)
    keep = philox.dropout_keep(drawn_seed(), plane, rows, N, case.dropout_p)
    return keep.view(case.x.shape).double() * philox.keep_scale(case.dropout_p)


def sum_dtype(x: Tensor, residual: Tensor | None, residual_in_fp32: bool) -> torch.dtype:
    if residual_in_fp32 and x.dtype != torch.float64:
        return torch.float32
    return x.dtype if residual is None else residual.dtype


def _differentiate(case: Case, tensors: Any, function: Any) -> Results:
    leaves = [t if t is None else t.detach().requires_grad_() for t in tensors]
    out, total = function(*leaves)
    outputs, upstream = [out], [case.grad_out.to(out.dtype)]
    results = {"out": out.detach()}
    if case.grad_sum is not None:
        outputs.append(total)
        upstream.append(case.grad_sum.to(total.dtype))
        results["sum"] = total.detach()
    inputs = {name: t for name, t in zip(TENSORS, leaves, strict=True) if t is not None}
    grads = torch.autograd.grad(outputs, list(inputs.values()), upstream)
    return results | {f"grad_{name}": g for name, g in zip(inputs, grads, strict=True)}


# The numerics rule ------------------------------------------------------------------------------


def record_accuracy(accuracies: dict[Any, Accuracy], case: Case) -> None:
    """Runs a case on each kernel and holds each result to the numerics rule."""
    expected, eager, rounding = specification(case), eager_torch(case), one_rounding(case)
    for kernel, accuracy in accuracies.items():
        with kernel.serving():
            actual = run(case)
        assert actual.keys() == expected.keys()
        for name in actual:
            accuracy.record(name, actual[name], expected[name], eager[name], rounding[name])


def one_rounding(case: Case) -> Results:
    """Returns the error of each result if every term of its formula were rounded once."""
    eps = rounding_error(case.x.dtype)
    zero = torch.zeros((), dtype=torch.float64)
    x, residual, _, bias, x_bias = (zero if t is None else t.double() for t in case.tensors)
    weight = torch.ones_like(zero) if case.weight is None else case.weight.double()
    D, dy = dropout_multiplier(case), case.grad_out.double()
    total = residual + D * (x + x_bias)
    mean = zero if case.rms_norm else total.mean(-1, keepdim=True)
    rstd = ((total - mean).square().mean(-1, keepdim=True) + case.eps).rsqrt()
    n, g = (total - mean) * rstd, weight * dy
    terms = total.square() + residual.square() + D.square() * (x.square() + x_bias.square())
    n_error = eps * (n.square() + rstd.square() * terms).sqrt()

    gn = (g * n).mean(-1, keepdim=True)
    g_mean = zero if case.rms_norm else g.mean(-1, keepdim=True)
    grad = rstd * (g - g_mean - n * gn)
    # An error of n enters the last term of its own column and, through the mean of g n, that of
    # every column.
    through_mean = n.square() * (g.square() * n_error.square()).mean(-1, keepdim=True)
    grad_error = rstd * ((eps * g).square() + (n_error * gn).square() + through_mean).sqrt()
    if case.grad_sum is not None:
        ds = case.grad_sum.double()
        grad, grad_error = grad + ds, (grad_error.square() + (eps * ds).square()).sqrt()

    def summed(error: Tensor, terms: Tensor, shape: torch.Size) -> Tensor:
        # Each partial sum is rounded too. With n terms of random sign, its mean square is n/2 times
        # that of a term.
        count = terms.numel() // max(math.prod(shape), 1)
        partial = rounding_error(torch.float32) ** 2 * (count / 2 if count > 1 else 0)
        return (error.square() + partial * terms.square()).sum_to_size(shape).sqrt()

    N = case.x.shape[-1:]
    return {
        "out": ((weight * n_error).square() + (eps * bias).square()).sqrt(),
        "sum": eps * terms.sqrt(),
        "grad_x": D * grad_error,
        "grad_residual": summed(
            grad_error, grad, case.x.shape if case.residual is None else case.residual.shape
        ),
        "grad_weight": summed((n_error.square() + (eps * n).square()).sqrt() * dy, n * dy, N),
        "grad_bias": summed(eps * dy, dy, N),
        "grad_x_bias": summed(D * grad_error, D * grad, N),
    }


# Cases with given options -----------------------------------------------------------------------


def make(*shape: int, dtype: torch.dtype = torch.float32, **changed: Any) -> Case:
    """Makes a case with every tensor, standard normal; ``changed`` replaces fields."""
    rows = [normal(*shape, seed=i, dtype=dtype) for i in range(4)]
    vectors = [normal(shape[-1], seed=i, dtype=dtype) for i in range(4, 7)]
    case = Case(rows[0], rows[1], *vectors, grad_out=rows[2], grad_sum=rows[3])
    return dataclasses.replace(case, **changed)


def lay_out_rows(t: Tensor, layout: str) -> Tensor:
    """As :func:`numerics.lay_out`, with two more layouts; gaps hold NaN.

    "slices" are the middle columns of wider rows; "reversed" stores the leading dimensions in the
    opposite order.
    """
    if layout == "slices":
        wide = t.new_full((*t.shape[:-1], t.shape[-1] + 3), float("nan"))
        return wide[..., 1:-2].copy_(t)
    if layout == "reversed":
        order = [*reversed(range(t.dim() - 1)), t.dim() - 1]
        return t.permute(order).contiguous().permute(order)
    return lay_out(t, layout)


def layouts(dims: int) -> tuple[str, ...]:
    """Returns the layouts that a tensor with ``dims`` dimensions can have."""
    names = ("contiguous", "gaps", "offset", "slices", "expanded", "reversed", "transposed")
    return names[: {1: 4, 2: 5}.get(dims, 7)]


def check_past_two_to_the_31(*shape: int) -> None:
    """Checks offsets of more than 32 bits, in views of memory that is mostly never touched.

    The first dimension of ``shape`` is 2; its entries lie 2³¹ elements apart.
    """
    far = torch.frombuffer(mmap.mmap(-1, 2 * (2**31 + 2**16)), dtype=torch.bfloat16)
    case = make(*shape, dtype=torch.bfloat16)
    views = {}
    for n, name in enumerate(("x", "residual", "grad_out", "grad_sum")):
        near = getattr(case, name)
        strides = (2**31, *near.stride()[1:])
        views[name] = far[n * near.numel() :].as_strided(shape, strides).copy_(near)
    assert_same_bits(run(dataclasses.replace(case, **views)), run(case))


def check_without_columns(forward: Callable[..., Any], rms_norm: bool) -> None:
    """Checks mean and rstd of rows without columns, by a backend's forward op."""
    nothing = torch.empty(3, 0)
    arguments = (nothing, None, None, None, None, None, 0.0, 1e-5, rms_norm, False, torch.float32)
    results, expected = forward(*arguments), reference.dropout_add_layer_norm(*arguments)
    for actual, of_reference in zip(results[2:], expected[2:], strict=True):
        torch.testing.assert_close(actual, of_reference, equal_nan=True)


def check_wanted(forward: Callable[..., Any], backward: Callable[..., Any], wanted: int) -> None:
    """Checks that a backend's backward op returns only the gradients whose bits are set."""
    case, seed = make(5, 12, dropout_p=0.3), drawn_seed()
    options = (case.dropout_p, case.eps, case.rms_norm)
    _, _, mean, rstd = forward(*case.tensors, seed, *options, False, torch.float32)

    def grads(wants: tuple[bool, ...]) -> Any:
        return backward(
            case.grad_out,
            None,
            *case.tensors,
            seed,
            mean,
            rstd,
            *options,
            False,
            torch.float32,
            wants,
        )

    wants = tuple(bool(wanted >> i & 1) for i in range(5))
    for some, every, want in zip(grads(wants), grads((True,) * 5), wants, strict=True):
        assert some.dtype == every.dtype
        assert torch.equal(some, every) if want else some.shape == (0,)


def assert_same_bits(actual: Results, expected: Results) -> None:
    assert actual.keys() == expected.keys()
    for name in actual:
        assert_equal(actual[name], expected[name], name)


# Random calls -----------------------------------------------------------------------------------

# The edges of vectors and of strips of 64, and widths that models have.
_WIDTHS = (1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 768, 1000)


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype) -> Case:
    """Draws any call; Hypothesis can vary and simplify it."""
    return draw_case(draw(st.randoms(use_true_random=False)), dtype)


def draw_case(random: Random, dtype: torch.dtype) -> Case:
    """Draws any call of the operator: sizes, layouts, dtypes, options, absent tensors."""
    N = random.choice(_WIDTHS) if random.random() < 0.5 else random.randint(1, 300)
    lead = [random.randint(1, 4) for _ in range(random.randint(0, 5))]
    if lead and random.random() < 0.3:
        lead[0] = random.choice((0, 1, 50))
    shape = (*lead, N)
    generator = torch.Generator().manual_seed(random.getrandbits(32))

    def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        t = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        return lay_out_rows(t, random.choice(layouts(len(shape))))

    def maybe(shape: tuple[int, ...]) -> Tensor | None:
        wider = torch.float32 if dtype.itemsize == 2 else dtype
        return tensor(shape, random.choice((dtype, wider))) if random.random() < 0.7 else None

    residual_shape = shape
    if random.random() < 0.2:  # fewer dimensions, or some of size 1
        residual_shape = (*(random.choice((1, size)) for size in lead), N)
        residual_shape = residual_shape[random.randint(0, len(lead)) :]
    case = Case(
        x=tensor(shape, dtype),
        residual=maybe(residual_shape),
        weight=maybe((N,)),
        bias=maybe((N,)),
        x_bias=maybe((N,)),
        grad_out=tensor(shape, dtype),
        grad_sum=None,
        dropout_p=random.choice((0.0, 0.1, 0.5, 0.9)),
        eps=random.choice((1e-5, 1e-6, 0.1)),
        rms_norm=random.random() < 0.3,
    )
    if random.random() < 0.5:
        case = dataclasses.replace(case, residual_in_fp32=random.random() < 0.3)
        case = dataclasses.replace(case, grad_sum=tensor(shape, case.sum_dtype))
    return case
