"""Dropout by itself: the shared generator's bits on every backend, and its derivatives."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck
from torch_checks import check_forward_mode, seeded

import trifuse
from trifuse.ops.dropout import dropout
from trifuse.reference import philox

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
P = 0.3


def drawn_seed() -> torch.Tensor:
    limits = torch.iinfo(torch.int64)
    return torch.randint(limits.min, limits.max, (1,))


def expected(x: torch.Tensor, p: float = P) -> torch.Tensor:
    keep = philox.dropout_keep_flat(drawn_seed(), x.numel(), p).view(x.shape)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.where(keep, x.to(wide) * philox.keep_scale(p), 0).to(x.dtype)


@pytest.mark.parametrize(
    "shape", [(), (1,), (63,), (64,), (3, 50), (2, 3, 20_001), (0, 4)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits(dtype, shape, every_kernel):
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    torch.manual_seed(7)
    wanted = expected(x)
    for kernel in every_kernel:
        with kernel.serving():
            torch.manual_seed(7)
            out = dropout(x, P)
        assert torch.equal(out, wanted), kernel
        assert out.dtype == dtype
        assert out.is_contiguous()


def test_triton(triton):
    for dtype in (torch.float32, torch.float16):  # its interpreter doesn't round bfloat16
        x = torch.randn(3, 1500).to(dtype)
        torch.manual_seed(7)
        out = dropout(x, P)
        torch.manual_seed(7)
        assert torch.equal(out, expected(x))


def test_place_is_logical():
    x = torch.randn(6, 10)
    torch.manual_seed(3)
    whole = dropout(x, P)
    torch.manual_seed(3)
    assert torch.equal(dropout(x.t().contiguous().t(), P), whole)


def test_threads():
    x = torch.randn(300_000)
    results, before = [], torch.get_num_threads()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        torch.manual_seed(3)
        results.append(dropout(x, P))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_nothing_to_do():
    x = torch.randn(5)
    assert dropout(x, P, training=False) is x
    assert dropout(x, 0.0) is x


def test_what_is_dropped_is_zero_whatever_it_was():
    torch.manual_seed(0)
    out = dropout(torch.full((1000,), float("nan")), 0.5)
    assert set(out[~out.isnan()].tolist()) == {0.0}
    assert 400 < out.isnan().sum() < 600


@pytest.mark.parametrize("backend", ["eager", "cpp"])
def test_derivatives(backend):
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return dropout(x, P)

    with trifuse.backend(backend):
        torch.autograd.gradcheck(function, x)
        torch.autograd.gradgradcheck(function, x)
        opcheck(getattr(torch.ops.trifuse.dropout, backend), (x.detach(), drawn_seed(), P))


def test_transforms():
    x = torch.randn(3, 4, 5)
    same = torch.vmap(lambda x: dropout(x, P), randomness="same")(x)
    kept = same != 0
    assert torch.equal(kept[0], kept[1])
    different = torch.vmap(lambda x: dropout(x, P), randomness="different")(x) != 0
    assert not torch.equal(different[0], different[1])
    compiled = torch.compile(lambda x: dropout(x, P), fullgraph=True, backend="aot_eager")
    assert (compiled(x) == 0).any()
    check_forward_mode(seeded(lambda x: dropout(x, P)), [x.double().requires_grad_()], True)


def test_of_everything(backend):
    """Result and gradient are zeros, also where x is NaN, which torch would keep."""
    x = torch.full((3, 70_000), float("nan"), requires_grad=True)
    out = dropout(x, 1.0)
    assert out.eq(0).all()
    assert torch.autograd.grad(out.sum(), x)[0].eq(0).all()


def test_arguments():
    with pytest.raises(TypeError, match=r"x: expected a Tensor; got int"):
        dropout(1)
    with pytest.raises(TypeError, match=r"x: expected float32, .* got torch.int64"):
        dropout(torch.arange(3))
    with pytest.raises(TypeError, match=r"training: expected True or False; got str"):
        dropout(torch.randn(3), 0.5, "x")
    for p in (-0.1, 1.1):
        with pytest.raises(trifuse.ArgumentError, match=r"p: expected a probability in \[0, 1\]"):
            dropout(torch.randn(3), p)
