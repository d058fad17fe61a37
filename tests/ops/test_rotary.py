"""Rotary embeddings: torch's own bits, gradients, and the calls that the kernel leaves alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck
from torch_checks import check_forward_mode

import trifuse
from trifuse.backends import _C
from trifuse.ops.rotary import rotate

pytestmark = pytest.mark.skipif(_C is None, reason="no C++ extension")

OP = torch.ops.trifuse.rotate
NARROW = torch.bfloat16
# dtypes of x and of cos and sin, and whether only the result is rounded
DTYPES = [
    (torch.float32, torch.float32, False),
    (torch.float64, torch.float64, False),
    (NARROW, NARROW, False),
    (NARROW, NARROW, True),
    (NARROW, torch.float32, True),
]


def turned(x: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def written_out(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    dim: int,
    in_float32: bool = False,
    interleaved: bool = False,
    per_pair: bool = False,
) -> Tensor:
    """The rotation in torch's operations."""
    if per_pair and interleaved:
        cos, sin = (each.repeat_interleave(2, -1) for each in (cos, sin))
    elif per_pair:
        cos, sin = (torch.cat((each, each), -1) for each in (cos, sin))
    cos, sin = cos.unsqueeze(dim), sin.unsqueeze(dim)
    R = cos.shape[-1]
    first = x[..., :R].float() if in_float32 else x[..., :R]
    out = (first * cos + turned(first, interleaved) * sin).to(x.dtype)
    return torch.cat((out, x[..., R:]), -1)


def op(x: Tensor, cos: Tensor, sin: Tensor, dim: int = 1, *options: bool) -> Tensor:
    return OP(x, cos, sin, dim, *(options or (False,) * 4))


def positions(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    # The two halves of real cosines are equal; these aren't.
    return torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)


def arranged(x: Tensor, order: str) -> Tensor:
    """Returns heads (B, H, L, E) in another order in memory."""
    if order == "tokens first":  # as from a projection
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if order == "part of a row":  # as from a projection to queries, keys and values at once
        return torch.stack((x, x.neg()), 3)[..., 0, :]
    if order == "features apart":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    return x


@pytest.mark.parametrize("order", ["heads first", "tokens first", "part of a row"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("per_pair", [False, True])
@pytest.mark.parametrize(("dtype", "of_positions", "in_float32"), DTYPES)
def test_bits(cpp_kernel, dtype, of_positions, in_float32, interleaved, per_pair, order):
    torch.manual_seed(0)
    pairs = {"interleaved": interleaved, "per_pair": per_pair}
    for E, R, batch in ((64, 64, 3), (2, 2, 1), (70, 70, 3), (80, 20, 1)):
        x = arranged(torch.randn(3, 5, 7, E).to(dtype), order).requires_grad_()
        cos, sin = positions(batch, 7, R // 2 if per_pair else R, dtype=of_positions)
        out = rotate(x, cos, sin, in_float32=in_float32, **pairs)
        expected = written_out(x, cos, sin, 1, in_float32, **pairs)
        assert out is not None
        assert torch.equal(out, expected)
        assert out.dtype == dtype
        grad = torch.randn_like(out)
        (actual,) = torch.autograd.grad(out, x, grad)
        assert torch.equal(actual, OP(grad, cos, sin, 1, in_float32, *pairs.values(), True))
        (wanted,) = torch.autograd.grad(expected, x, grad)
        if not (in_float32 and dtype == NARROW):  # where torch rounds x's two gradients first
            assert torch.equal(actual, wanted)
        else:
            exact = x.detach().double().requires_grad_()
            wide = written_out(exact, cos.double(), sin.double(), 1, **pairs)
            (exact_grad,) = torch.autograd.grad(wide, exact, grad.double())
            errors = [(each.double() - exact_grad).abs().max() for each in (actual, wanted)]
            assert errors[0] <= errors[1]


def test_the_order_in_memory_is_kept():
    cos, sin = positions(1, 7, 8)
    for order in ("heads first", "tokens first"):
        x = arranged(torch.randn(2, 3, 7, 8), order)
        assert rotate(x, cos, sin).stride() == x.stride()


@given(st.data())
def test_any_shape(data):
    leading = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    E = 2 * data.draw(st.integers(1, 40))
    R = 2 * data.draw(st.integers(1, E // 2))
    dim = data.draw(st.integers(0, len(leading) - 1))
    shape = [size if data.draw(st.booleans()) else 1 for size in leading]
    del shape[dim]
    torch.manual_seed(0)
    order = data.draw(st.permutations(range(len(leading))))
    x = torch.randn([leading[d] for d in order] + [E])
    x = x.permute([order.index(d) for d in range(len(leading))] + [len(leading)])
    if data.draw(st.booleans()):
        x = x[..., ::2].repeat_interleave(2, -1).transpose(0, -1).contiguous().transpose(0, -1)
    if data.draw(st.booleans()):
        x = x[:1].expand_as(x)
    cos, sin = positions(*shape, R)
    if data.draw(st.booleans()):
        dim -= len(leading) + 1
    out = rotate(x, cos, sin, dim)
    assert out is not None
    assert torch.equal(out, written_out(x, cos, sin, dim))


def test_overlapping_windows():
    """Every stride is 1, so that the order in memory could be either."""
    for length, features in ((3, 6), (7, 2)):
        x = torch.randn(20).unfold(0, features, 1)[:length].expand(2, length, features)
        cos, sin = positions(length, features)
        out = rotate(x, cos, sin, 0)
        assert torch.equal(out, written_out(x, cos, sin, 0))
        options = (0, False, False, False, False)
        opcheck(OP, (x, cos, sin, *options), test_utils=("test_faketensor",))


def test_threads_and_batches():
    x = torch.randn(2, 16, 100, 64)
    cos, sin = positions(2, 100, 64)
    results, before = [], torch.get_num_threads()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(rotate(x, cos, sin))
    torch.set_num_threads(before)
    assert all(torch.equal(results[0], each) for each in results)
    assert torch.equal(rotate(x[1:], cos[1:], sin[1:]), results[0][1:])


@pytest.mark.parametrize("value", [float("nan"), float("-nan"), float("inf"), 3.4e38, 1e-40])
def test_special_values(value):
    for dtype in (torch.float32, NARROW):
        x = torch.randn(1, 2, 3, 64).to(dtype)
        x[0, 1, 2, 5] = value
        cos, sin = positions(1, 3, 64, dtype=dtype)
        out, expected = rotate(x, cos, sin), written_out(x, cos, sin, 1)
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(out.nan_to_num(), expected.nan_to_num())
    # A NaN whose payload is all ones must not overflow when it is rounded.
    x = torch.full((1, 1, 1, 2), 0x7FFF, dtype=torch.int16).view(NARROW)
    assert rotate(x, *positions(1, 1, 2, dtype=NARROW)).isnan().all()


def test_derivatives():
    x = torch.randn(2, 3, 4, 6, dtype=torch.float64, requires_grad=True)
    cos, sin = positions(2, 4, 4, dtype=torch.float64)
    function = lambda x: rotate(x, cos, sin)  # noqa: E731
    torch.autograd.gradcheck(function, x)
    torch.autograd.gradgradcheck(function, x)
    cos.requires_grad_()
    sin.requires_grad_()
    torch.autograd.gradcheck(op, (x, cos, sin))
    torch.autograd.gradgradcheck(op, (x, cos, sin))
    check_forward_mode(op, [x, cos, sin], True)
    for options in ((True, False), (True, True), (False, True)):
        some = [
            each[..., : 2 if options[1] else 4].detach().requires_grad_() for each in (cos, sin)
        ]
        for transposed in (False, True):
            call = lambda *each: op(*each, 1, False, *options, transposed)  # noqa: B023, E731
            torch.autograd.gradcheck(call, (x, *some))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("order", ["heads first", "tokens first", "features apart"])
def test_op(order, transposed):
    for shape in ((2, 3, 4, 6), (1, 3, 4, 6), (2, 3, 1, 6)):
        x = arranged(torch.randn(shape), order).requires_grad_()
        options = (1, False, transposed, False, transposed)
        opcheck(OP, (x, *positions(shape[0], shape[2], 4), *options))


def test_transforms():
    x = torch.randn(5, 2, 3, 4, 6)
    cos, sin = positions(2, 4, 6)
    out = torch.vmap(lambda x: op(x, cos, sin))(x)
    assert torch.equal(out, torch.stack([rotate(each, cos, sin) for each in x]))
    for dim in (1, -3):
        many, _ = positions(5, 2, 4, 4)
        out = torch.vmap(lambda c, dim=dim: op(x[0], c, sin[..., :4], dim))(many)
        assert torch.equal(out, torch.stack([rotate(x[0], c, sin[..., :4], dim) for c in many]))
    compiled = torch.compile(lambda x: op(x, cos, sin), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x[0]), rotate(x[0], cos, sin))
    assert (
        torch.vmap(lambda x: torch.zeros(()) if rotate(x, cos, sin) is None else x)(x).eq(0).all()
    )


def left_alone() -> dict[str, tuple[Any, ...]]:
    x, (cos, sin) = torch.randn(2, 3, 4, 6), positions(2, 4, 6)
    nested = torch.nested.nested_tensor([x, x], layout=torch.jagged)
    return {
        "float16": (x.half(), cos.half(), sin.half()),
        "wide positions beside float32": (x, cos.double(), sin.double()),
        "two dtypes": (x.bfloat16(), cos.bfloat16(), sin),
        "odd": (x, cos[..., :5], sin[..., :5]),
        "more cosines than features": (x[..., :4], cos, sin),
        "other tokens": (x, cos[:, :3], sin[:, :3]),
        "five dimensions": (x[None], cos, sin),
        "meta": (x.to("meta"), cos.to("meta"), sin.to("meta")),
        "nested": (nested, cos, sin),
        "the features' dimension": (x, cos, sin, 3),
        "too far": (x, cos, sin, 4),
        "a number": (x, 1.0, sin),
    }


def test_positions_of_two_shapes_and_of_no_tokens():
    x, (cos, sin) = torch.randn(2, 3, 4, 6), positions(2, 4, 6)
    assert torch.equal(rotate(x, cos, sin[:1]), written_out(x, cos, sin[:1], 1))
    assert rotate(x[:0], cos[:0], sin[:0]).shape == (0, 3, 4, 6)


def test_learnt_positions_have_gradients():
    x = torch.randn(2, 3, 4, 6, requires_grad=True)
    inputs = x, *(each.requires_grad_() for each in positions(2, 4, 6))
    out, expected = rotate(*inputs), written_out(*inputs, 1)
    grad = torch.randn_like(out)
    for a, e in zip(
        torch.autograd.grad(out, inputs, grad),
        torch.autograd.grad(expected, inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(a, e)


def test_backends():
    x, (cos, sin) = torch.randn(2, 3, 4, 6), positions(2, 4, 6)
    with trifuse.backend("eager"):
        assert rotate(x, cos, sin) is None
    with trifuse.backend("cpp"):
        assert rotate(x, cos, sin) is not None


@pytest.mark.parametrize("case", left_alone())
def test_other_calls_are_left_alone(case):
    assert rotate(*left_alone()[case]) is None


def test_errors():
    x, (cos, sin) = torch.randn(2, 3, 4, 6), positions(2, 4, 6)
    rest = (1, False, False, False, False)
    with pytest.raises(TypeError, match=r"x: expected float32, bfloat16 or float64; got Half"):
        OP(x.half(), cos, sin, *rest)
    with pytest.raises(TypeError, match=r"cos: expected .*Float; got .*Double"):
        OP(x, cos.double(), sin, *rest)
    with pytest.raises(TypeError, match=r"sin: expected the type of cos"):
        OP(x.bfloat16(), cos, sin.bfloat16(), *rest)
    with pytest.raises(ValueError, match=r"x: expected 1 to 4 dimensions; got shape \[1, 2, 3"):
        OP(x[None], cos, sin, *rest)
    with pytest.raises(ValueError, match=r"cos: expected an even number of features, up to the 6"):
        OP(x, cos[..., :5], sin[..., :5], *rest)
    for dim in (1, -4, 3, 7):
        with pytest.raises(ValueError, match=r"cos: expected a shape that broadcasts"):
            op(x, cos[:, :3] if dim == 1 else cos, sin, dim)
