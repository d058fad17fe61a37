"""Triton's dropout_add_layer_norm kernels: their numbers in the interpreter, their code for GPUs.

The interpreter takes milliseconds per program, so matrices are small, and tests of rows wider than
a tile make the tiles smaller.
"""

from __future__ import annotations

import dataclasses
import itertools
from random import Random
from typing import Any

import pytest
import torch
from attention_cases import normal
from budgets import check_budget, compile_calls, selected_calls
from dropout_add_layer_norm_cases import (
    Case,
    assert_same_bits,
    check_past_two_to_the_31,
    check_wanted,
    check_without_columns,
    draw_case,
    dropout_multiplier,
    lay_out_rows,
    layouts,
    make,
    record_accuracy,
    run,
)
from hypothesis import given
from hypothesis import strategies as st
from numerics import Accuracy

import trifuse
from trifuse.reference import philox

NAN, INF = float("nan"), float("inf")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def kernels(triton):
    """Returns the module under test. Triton also serves the operator."""
    from trifuse.kernels import dropout_add_layer_norm

    return dropout_add_layer_norm


@pytest.fixture
def chunked(kernels, monkeypatch):
    """Splits rows of more than 16 columns into chunks of 16."""
    monkeypatch.setattr(kernels, "_FORWARD_TILES", ((16, 4),))
    monkeypatch.setattr(kernels, "_BACKWARD_TILES", ((16, 4),))
    monkeypatch.setattr(kernels, "_CHUNK", kernels.Config(kernels.Block(128, 16), 4))
    return kernels


# Numbers ----------------------------------------------------------------------------------------


def draw_small(random: Random, dtype: torch.dtype) -> Case:
    while (case := draw_case(random, dtype)).x.numel() > 2000:
        pass
    return case


@given(random=st.randoms(use_true_random=False), dtype=st.sampled_from(DTYPES))
def test_any_call(triton, random, dtype):
    record_accuracy({triton: Accuracy(triton.name)}, draw_small(random, dtype))


@pytest.mark.parametrize("tiles", ["kernels", "chunked"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.covering(1)
def test_many_calls(request, triton, tiles, dtype):
    """The mean errors over calls drawn independently of each other."""
    request.getfixturevalue(tiles)
    accuracy, random = Accuracy(triton.name), Random(0)
    for _ in range(20):
        record_accuracy({triton: accuracy}, draw_small(random, dtype))
    accuracy.conclude()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N", [768, 1000, 4096])
@pytest.mark.covering(1)
def test_widths_that_models_have(triton, dtype, N):
    record_accuracy({triton: Accuracy(triton.name)}, make(5, N, dtype=dtype, dropout_p=0.1))


def test_rows_wider_than_the_widest_tile(triton, kernels, monkeypatch):
    monkeypatch.setattr(kernels, "_SUM", kernels.Config(kernels.Block(2, 8192), 4))
    record_accuracy({triton: Accuracy(triton.name)}, make(2, 70_001))


@pytest.mark.parametrize(("tiles", "N"), [("kernels", 1000), ("chunked", 200)])
@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_far_from_zero(request, triton, tiles, offset, N):
    """The variance of numbers that differ in their last digits only."""
    kernels = request.getfixturevalue(tiles)
    x = normal(20, N) + offset
    _, _, mean, rstd = kernels.dropout_add_layer_norm_forward(
        x, None, None, None, None, None, 0.0, 1e-12, False, False, torch.float32
    )
    torch.testing.assert_close(mean.double(), x.double().mean(-1), rtol=6e-8, atol=0)
    expected = x.double().var(-1, correction=0).rsqrt()
    torch.testing.assert_close(rstd.double(), expected, rtol=1e-6, atol=0)
    case = make(20, N, x=x, residual=None, x_bias=None)
    record_accuracy({triton: Accuracy(triton.name)}, case)


@pytest.mark.parametrize(("tiles", "N"), [("kernels", 1000), ("chunked", 200)])
@pytest.mark.parametrize("value", [1 / 3, -1e8 / 3])
def test_a_row_of_one_number(request, tiles, value, N):
    """Its variance is 0, or what rounding leaves of 0, but never negative."""
    kernels = request.getfixturevalue(tiles)
    x, bias = torch.full((3, N), value), normal(N)
    out, _, mean, rstd = kernels.dropout_add_layer_norm_forward(
        x, None, None, bias, None, None, 0.0, 1e-12, False, False, torch.float32
    )
    assert torch.equal(out, bias.expand(3, N))
    assert torch.equal(mean, x[:, 0])
    assert rstd.isfinite().all()


def test_shares_of_many_programs(triton, kernels, monkeypatch):
    """Several programs with several tiles of rows each; the last tile is partial."""
    monkeypatch.setattr(kernels, "_MAX_WARPS", 12)
    monkeypatch.setattr(kernels, "_SUM", kernels.Config(kernels.Block(2, 8), 4))
    record_accuracy({triton: Accuracy(triton.name)}, make(130 * 7, 8, dropout_p=0.3))


# Dropout ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tiles", "shape"),
    [
        ("kernels", (3, 5, 20)),
        ("kernels", (260, 8)),
        ("kernels", (2, 1000)),
        ("kernels", (7, 1)),
        ("chunked", (3, 5, 20)),
        ("chunked", (70, 33)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drops_the_elements_of_the_specification(request, tiles, shape, dtype):
    request.getfixturevalue(tiles)
    case = make(*shape, dtype=dtype, dropout_p=0.4, residual=None, x_bias=None)
    kept = dropout_multiplier(case) != 0
    assert 0 < kept.sum() < kept.numel()
    x = case.x.masked_fill(~kept, NAN)
    ones = torch.ones(shape)
    results = run(dataclasses.replace(case, x=x, grad_sum=ones, residual_in_fp32=True))
    scaled = case.x.float() * philox.keep_scale(0.4)
    assert torch.equal(results["sum"], torch.where(kept, scaled, 0))
    assert torch.equal(results["grad_x"] != 0, kept)


def test_what_is_dropped_does_not_exist(triton):
    clean = make(4, 50, dropout_p=0.5)
    spoilt = dataclasses.replace(clean, x=clean.x.clone())
    dropped = (dropout_multiplier(clean) == 0).nonzero()
    for i, (row, column) in enumerate(dropped.tolist()):
        spoilt.x[row, column] = (NAN, INF, -INF)[i % 3]
    assert_same_bits(run(spoilt), run(clean))
    case = dataclasses.replace(spoilt, grad_sum=None)
    assert_same_bits(run(case), run(dataclasses.replace(clean, grad_sum=None)))


@pytest.mark.parametrize("poison", [NAN, INF])
def test_a_bias_dropped_in_every_row_does_not_exist(triton, poison):
    """Three rows: a tile has more, and in those the bias is not dropped."""
    clean = make(3, 70, dropout_p=0.7)
    dropped = (dropout_multiplier(clean) == 0).all(0)
    assert 0 < dropped.sum() < 70
    assert clean.x_bias is not None
    spoilt = dataclasses.replace(clean, x_bias=clean.x_bias.masked_fill(dropped, poison))
    assert_same_bits(run(spoilt), run(clean))


# Rows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tiles", "rows", "N"), [("kernels", 150, 7), ("kernels", 5, 1000), ("chunked", 70, 40)]
)
def test_a_row_by_itself(request, tiles, rows, N):
    """The rows below a row change none of its bits."""
    request.getfixturevalue(tiles)
    fields = ("x", "residual", "grad_out", "grad_sum")
    batch = make(rows, N, dropout_p=0.2)
    alone = dataclasses.replace(batch, **{f: getattr(batch, f)[:1] for f in fields})
    of_rows = ("out", "sum", "grad_x", "grad_residual")
    one, many = run(alone), run(batch)
    assert_same_bits({f: one[f] for f in of_rows}, {f: many[f][:1] for f in of_rows})


def test_runs_repeat(triton):
    case = make(40, 100, dropout_p=0.2)
    assert_same_bits(run(case), run(case))


@pytest.mark.parametrize("layout", layouts(3)[1:])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_change_nothing(triton, layout, dtype):
    fields = ("x", "residual", "grad_out", "grad_sum")
    case = make(3, 4, 24, dtype=dtype, dropout_p=0.2)
    if layout == "expanded":
        repeated = {f: getattr(case, f)[:1].repeat(3, 1, 1) for f in fields}
        case = dataclasses.replace(case, **repeated)
    laid_out = {f: lay_out_rows(getattr(case, f), layout) for f in fields}
    assert_same_bits(run(dataclasses.replace(case, **laid_out)), run(case))


def test_rows_apart_are_not_copied(kernels):
    """Rows with gaps between them, and one row that is repeated, are read in place."""
    apart = torch.zeros(6, 2, 8)[:, 0]
    again = torch.zeros(8).expand(6, 8)
    first, second = kernels._as_matrix(apart), kernels._as_matrix(again)
    assert (first.data.shape, kernels._vector(8)) == ((6, 8), 8)
    assert (first.data.data_ptr(), first.stride) == (apart.data_ptr(), 2)
    assert (second.data.data_ptr(), second.stride) == (again.data_ptr(), 0)


@pytest.mark.parametrize("shape", [(2, 3, 72), (2, 72), (2, 70)], ids=str)
def test_elements_past_two_to_the_31(triton, shape):
    check_past_two_to_the_31(*shape)


def test_rows_are_aligned_as_those_of_a_fresh_tensor(kernels):
    """Otherwise the order of a row's sum could depend on where in a batch the row begins."""
    for odd in (lay_out_rows(torch.ones(6, 8), "offset"), torch.ones(6, 9)[:, :8]):
        rows = kernels._as_matrix(odd)
        assert (kernels._vector(8), rows.stride) == (8, 1)
        assert rows.data.data_ptr() % 16 == 0
        assert torch.equal(rows.data, odd)


def test_upstream_gradients_expanded_from_one_number(triton):
    """The upstream gradients of ``out.sum().backward()``: stride 0 in every dimension."""
    case = make(3, 10, grad_out=torch.ones(3, 10), grad_sum=torch.ones(3, 10))
    ones = torch.ones(()).expand(3, 10)
    assert_same_bits(run(dataclasses.replace(case, grad_out=ones, grad_sum=ones)), run(case))


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")  # 0 / 0
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0), (0, 0)], ids=str)
def test_empty(triton, shape):
    case = make(*shape, dropout_p=0.1)
    results = run(case)
    with trifuse.backend("eager"):
        assert_same_bits(results, run(case))


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")  # 0 / 0
def test_statistics_without_columns(kernels):
    for rms_norm in (False, True):
        check_without_columns(kernels.dropout_add_layer_norm_forward, rms_norm)


@pytest.mark.parametrize("wanted", [0b00001, 0b00010, 0b00100, 0b01000, 0b10000, 0b01001])
def test_gradients_not_wanted_are_empty(kernels, wanted):
    check_wanted(
        kernels.dropout_add_layer_norm_forward, kernels.dropout_add_layer_norm_backward, wanted
    )


# Code for GPUs ----------------------------------------------------------------------------------

# Upper bounds for the kernels of a call: registers and stack bytes per thread, KiB of shared memory
# per program. Stack is spills. With 128 registers per thread, 16 warps share a multiprocessor.
# A call is dtype, N, dropout_p, wide_residual and full: see compile_dropout_add_layer_norm.Call.
BUDGET: dict[tuple[Any, ...], dict[str, tuple[int, int, int]]] = {
    ("fp32", 768, 0.1): {
        "forward": (56, 0, 2), "backward": (112, 0, 18), "backward_sum": (80, 0, 1),
    },
    ("bf16", 1000): {"forward": (56, 0, 1), "backward": (112, 8, 9), "backward_sum": (80, 0, 1)},
    ("bf16", 4096, 0.1, True, True): {
        "forward": (64, 0, 8), "backward": (128, 0, 73), "backward_sum": (80, 0, 1),
    },
    ("fp32", 8192): {"forward": (64, 0, 1), "backward": (128, 24, 1), "backward_sum": (80, 0, 1)},
    ("fp32", 65536, 0.1): {
        "forward": (64, 0, 4), "backward_statistics": (104, 0, 4), "backward": (120, 0, 69),
        "backward_sum": (80, 0, 1),
    },
}  # fmt: skip
BATCHES = [(90, "fp32", 768, 0.1, False, False, rows) for rows in (1, 37, 4096)]


@pytest.fixture(scope="module")
def usages(request) -> dict[tuple[Any, ...], list[Any]]:
    """Returns, by call, the kernels of its forward and backward and the resources of each."""
    return compile_calls(
        "compile_dropout_add_layer_norm.py", selected_calls(request, BUDGET) + BATCHES
    )


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("call", BUDGET, ids=lambda call: " ".join(map(str, call)))
@pytest.mark.covering(1)
def test_compiled_kernels_keep_to_their_budget(usages, architecture, call):
    check_budget(usages[(architecture, *call)], BUDGET[call])


def test_matrices_move_16_bytes_at_a_time(usages):
    """Except the seed (8 bytes), row statistics (4 bytes) and gradients of vectors. The backward
    has its loads twice: it prefetches a tile before the loop."""
    most = {"forward": 2, "backward_statistics": 3, "backward": 10, "backward_sum": 0}
    for name, _, _, _, loads, stores, _ in itertools.chain(*usages.values()):
        assert loads["128"] > 0
        others = sum(loads.values()) - loads["128"]
        assert others <= most[name], (name, loads)
        if name in ("forward", "backward"):
            assert stores["128"] > 0
            assert sum(stores.values()) - stores["128"] <= 2, (name, stores)


def test_one_compilation_serves_every_batch(usages):
    one, *others = ([(name, code) for name, *_, code in usages[call]] for call in BATCHES)
    assert all(other == one for other in others)
