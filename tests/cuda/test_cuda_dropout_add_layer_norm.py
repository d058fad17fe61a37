"""The CUDA kernels of dropout_add_layer_norm, under the model of CUDA on the host."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from random import Random

import placed_cases
import pytest
import torch
from attention_cases import drawn_seed, normal
from cuda_code import Code, compile_operator
from dropout_add_layer_norm_cases import (
    Case,
    assert_same_bits,
    cases,
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
from fault_cases import exchanged_data_raises, short_storage_raises
from host_build import Library, library_fixture
from hypothesis import given, settings
from numerics import Accuracy
from tested_kernels import Kernel

import trifuse

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CUDA = Kernel("cuda")


library = library_fixture("dropout_add_layer_norm")


@pytest.fixture(autouse=True)
def _cuda(library: Library) -> Iterator[None]:
    """Runs tests on the CUDA kernels, with threads in a random order."""
    with library.device(seed=1), CUDA.serving():
        yield


def check(library: Library, *calls: Case) -> Accuracy:
    accuracy = Accuracy(CUDA.name)
    for call in calls:
        with library.guarded_memory():
            record_accuracy({CUDA: accuracy}, call)
    return accuracy


# Numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_call(library, dtype):
    """Results and every gradient of calls drawn by Hypothesis."""

    @settings(max_examples=20)
    @given(cases(dtype))
    def call(case: Case) -> None:
        with library.guarded_memory():
            record_accuracy({CUDA: Accuracy(CUDA.name)}, case)

    call()


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_many_calls(library, dtype):
    random = Random(0)
    check(library, *(draw_case(random, dtype) for _ in range(40))).conclude()


# Both sides of every width where the kernel or its number of threads changes.
WIDTHS = (1, 7, 8, 256, 264, 512, 520, 1000, 1024, 1025, 1032, 2056, 4096, 4097, 4104, 8192, 8200)


@pytest.mark.parametrize("N", WIDTHS)
def test_widths(library, N):
    with_all = {"dropout_p": 0.1, "dtype": torch.bfloat16}
    check(library, make(5, N), make(3, N, **with_all), make(3, N, grad_sum=None, rms_norm=True))


USUAL = {"x_bias": None, "grad_sum": None}  # such calls have kernels of their own in 16 bits


@pytest.mark.parametrize("N", [8, 256, 264, 512, 520, 1024, 1032, 2048, 2056, 4096, 4104, 8192])
def test_usual_calls(library, N):
    rows = 9 if N < 2048 else 3  # a block has fewer teams for wider rows
    vectors = {"weight": normal(N, seed=4), "bias": normal(N, seed=5)}
    with library.device(multiprocessors=1, blocks_per_multiprocessor=1, seed=1):
        check(
            library,
            make(rows, N, dtype=torch.bfloat16, dropout_p=0.1, **USUAL),
            make(rows, N, dtype=torch.bfloat16, dropout_p=0.1, **USUAL, **vectors),
            make(rows, N, dtype=torch.float16, rms_norm=True, **USUAL),
            make(rows, N, dtype=torch.float16, **USUAL, **vectors),
        )


@pytest.mark.parametrize(("rows", "N"), [(550, 40), (300, 1000), (70, 4104)])
def test_usual_calls_of_many_rows(library, rows, N):
    """A block's 16, 8 or 1 teams have more rows than they add up as a run."""
    with library.device(multiprocessors=1, blocks_per_multiprocessor=1, seed=1):
        check(library, make(rows, N, dtype=torch.bfloat16, dropout_p=0.1, **USUAL))


@pytest.mark.parametrize("N", [65_536, 70_001])
@pytest.mark.covering(0)
def test_wide_rows(library, N):
    check(library, make(2, N, dtype=torch.bfloat16, dropout_p=0.1))


@pytest.mark.parametrize("N", [300, 8200, 9000])
def test_a_row_in_shared_memory_and_read_again_give_the_same_bits(library, N):
    for dtype in (torch.float64, torch.bfloat16):
        case = make(3, N, dtype=dtype, dropout_p=0.3)
        expected = run(case)
        with library.device(shared_memory=1 << 12), library.guarded_memory():
            forward = torch.ops.trifuse.dropout_add_layer_norm_forward.cuda(
                *case.tensors, drawn_seed(), 0.3, case.eps, False, True, case.sum_dtype
            )
        assert torch.equal(forward[0], expected["out"])
        assert torch.equal(forward[1], expected["sum"])


@pytest.mark.parametrize("N", [17, 768])
@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_far_from_zero(library, offset, N):
    x = normal(20, N) + offset
    check(library, make(20, N, x=x, residual=None, x_bias=None))
    arguments = (x, None, None, None, None, None, 0.0, 1e-12, False, False, torch.float32)
    _, _, mean, rstd = torch.ops.trifuse.dropout_add_layer_norm_forward.cuda(*arguments)
    exact = x.double()
    torch.testing.assert_close(mean.double(), exact.mean(-1), rtol=1.2e-7, atol=0)
    expected = exact.var(-1, correction=0).rsqrt()
    torch.testing.assert_close(rstd.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"residual": None},
        {"weight": None},
        {"bias": None, "x_bias": None},
        {"grad_sum": None, "dropout_p": 0.3},
        {"rms_norm": True, "weight": None, "bias": None},
        {"residual_in_fp32": True, "grad_sum": normal(4, 40)},
        {"residual": normal(4, 40, seed=1), "grad_sum": normal(4, 40), "dropout_p": 0.5},
        {"weight": normal(40, seed=4), "x_bias": normal(40, seed=6)},
        {"bias": normal(40, seed=5), "grad_sum": None, "residual": normal(4, 40, seed=1)},
    ],
    ids=lambda changes: " ".join(changes),
)
def test_options_and_mixed_dtypes(library, changes):
    check(library, make(4, 40, dtype=torch.bfloat16, **changes))
    check(library, make(4, 40, dtype=torch.float16, **changes))


@pytest.mark.parametrize("layout", layouts(4)[1:])
@pytest.mark.parametrize("N", [8, 13])
def test_layouts(library, layout, N):
    """Rows in any layout give the bits of contiguous rows."""
    case = make(3, 2, 4, N, dropout_p=0.2)
    rows = ("x", "residual", "grad_out", "grad_sum")
    odd = dataclasses.replace(case, **{r: lay_out_rows(getattr(case, r), layout) for r in rows})
    even = dataclasses.replace(odd, **{r: getattr(odd, r).contiguous() for r in rows})
    assert_same_bits(run(odd), run(even))


@pytest.mark.parametrize("N", [70, 72])
def test_elements_past_two_to_the_31(library, N):
    check_past_two_to_the_31(2, 3, N)


# Dropout -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("N", [1, 7, 24, 1001])
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9999])
def test_drops_what_the_reference_drops(library, N, dropout_p):
    case = make(
        9,
        N,
        x=torch.ones(9, N),
        residual=None,
        x_bias=None,
        dropout_p=dropout_p,
        grad_out=torch.zeros(9, N),
        grad_sum=torch.ones(9, N),
    )
    results = run(case)
    multiplier = dropout_multiplier(case).float()
    assert torch.equal(results["sum"], multiplier)
    assert torch.equal(results["grad_x"], multiplier)


def test_dropped_elements_are_0_whatever_they_were(library):
    case = make(40, 8, dropout_p=0.5, grad_sum=None)
    dropped = dropout_multiplier(case) == 0
    poisoned = torch.where(dropped, torch.nan, case.x)
    assert_same_bits(run(dataclasses.replace(case, x=poisoned)), run(case))


# The same bits -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "width_and_options",
    list(itertools.product([24, 300, 512, 1000, 2000, 9000], [{}, USUAL])),
    ids=str,
)
@pytest.mark.parametrize("seed", [2, 3, 4])
@pytest.mark.covering(1)
def test_bits_do_not_depend_on_the_order_of_threads(library, width_and_options, seed):
    N, options = width_and_options
    case = make(6, N, dtype=torch.bfloat16, dropout_p=0.1, **options)
    with library.device(multiprocessors=1):  # so a block has more than one row
        expected = run(case)
    with library.device(multiprocessors=1, seed=seed):
        assert_same_bits(run(case), expected)


@pytest.mark.parametrize("N", [20, 24, 600, 5000])
def test_a_row_does_not_depend_on_its_batch(library, N):
    case = make(13, N)
    one = dataclasses.replace(
        case,
        **{name: getattr(case, name)[4:5] for name in ("x", "residual", "grad_out", "grad_sum")},
    )
    many, alone = run(case), run(one)
    for name in ("out", "sum", "grad_x", "grad_residual"):
        assert torch.equal(many[name][4:5], alone[name])


def test_repeats_bit_for_bit(library):
    case = make(100, 48)
    assert_same_bits(run(case), run(case))


# Edges -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0), (0, 0)], ids=str)
def test_empty(library, shape):
    case = make(*shape, dropout_p=0.1)
    results = run(case)
    with trifuse.backend("eager"):
        assert_same_bits(results, run(case))


@pytest.mark.parametrize("rms_norm", [False, True])
def test_statistics_without_columns(library, rms_norm):
    check_without_columns(torch.ops.trifuse.dropout_add_layer_norm_forward.cuda, rms_norm)


@pytest.mark.parametrize("wanted", [0b00001, 0b00010, 0b00100, 0b01000, 0b10000, 0b01001])
def test_gradients_not_wanted_are_empty(library, wanted):
    ops = torch.ops.trifuse
    check_wanted(
        ops.dropout_add_layer_norm_forward.cuda, ops.dropout_add_layer_norm_backward.cuda, wanted
    )


def test_launches_name_the_kernel_and_the_sizes(library):
    case = make(3, 24)
    message = (
        r"dropout_add_layer_norm_forward \(rows 3, N 24, grid 1x1x1, block 128x1x1, "
        r"shared 16 bytes\): too much shared memory"
    )
    with library.device(shared_memory=8), pytest.raises(RuntimeError, match=message):
        run(case)


# Code for GPUs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("N", "dtype", "KiB"),
    [
        (256, torch.bfloat16, 25),
        (1024, torch.bfloat16, 25),
        (1001, torch.bfloat16, 49),
        (4096, torch.bfloat16, 97),
        (8192, torch.bfloat16, 97),
        (1001, torch.float64, 97),
    ],
)
def test_shared_memory_keeps_to_its_budget(library, N, dtype, KiB):
    """At most 99 KiB, which every GPU from sm_80 on has. Most of it holds sums of gradients."""
    with library.device(shared_memory=KiB << 10):
        run(make(3, N, dtype=dtype, dropout_p=0.1))


def test_shared_memory_of_usual_calls_keeps_to_its_budget(library):
    """At most 99 KiB. Most of it holds rows that are on their way."""
    for N in (256, 1024, 8192):
        with library.device(shared_memory=97 << 10):
            run(make(3, N, dtype=torch.bfloat16, dropout_p=0.1, **USUAL))


# Upper bounds for a kernel, except in float64: registers and stack bytes per thread. A
# multiprocessor holds 512 threads of 128 registers, 768 of 80, or 1024 of 64.
BUDGET = {
    "forward_kernel": (64, 8),
    "forward_wide_kernel": (80, 32),
    "backward_kernel": (128, 0),
    "backward_usual_kernel": (128, 0),
    "backward_statistics_kernel": (80, 0),
    "backward_sum_kernel": (64, 0),
}


@pytest.fixture(scope="module")
def code(request) -> list[Code]:
    return compile_operator("dropout_add_layer_norm", request.config)


def test_compiled_kernels_keep_to_their_budget(code):
    assert {c.kernel.partition("<")[0] for c in code} == set(BUDGET)
    for c in code:
        name, _, arguments = c.kernel.partition("<")
        if arguments.startswith("double"):
            continue
        registers, stack = BUDGET[name]
        assert c.registers <= registers, c[:4]
        assert c.stack <= stack, c[:4]


def test_rows_move_16_bytes_at_a_time(code, request):
    """Except the seed and its place (8 numbers), and the statistics of this row and the next."""
    checked = 0
    for c in code:
        name, _, arguments = c.kernel.partition("<")
        if (
            ", false" in arguments
            or arguments.startswith("double")
            or name == "backward_sum_kernel"
        ):
            continue
        wide = c.count(r"LDG(STS)?\.E\.(\w+\.)?128\S*")
        assert wide >= 4, c.kernel
        assert c.count(r"LDG(STS)?\.\S*") - wide <= 24, c.kernel
        if name != "backward_statistics_kernel":
            assert c.count(r"STG\.E\.128\S*") >= 2, c.kernel
        assert c.count(r"STG\.\S*") - c.count(r"STG\.E\.128\S*") <= 2, c.kernel
        checked += 1
    assert checked > 0
    if request.config.getoption("exhaustive"):
        usual, others = 6 * 4 + 5 * 2, 3 + 1 + 2 + 1  # instances per type
        architectures = {c.architecture for c in code}
        assert checked == len(architectures) * (2 * usual + 3 * others)


@pytest.mark.parametrize("columns", [40, 41, 1032])
def test_a_part_drops_what_the_whole_drops(library, columns):
    with library.guarded_memory():
        placed_cases.check_norm(columns)


@pytest.mark.parametrize("name", ["norm"])
def test_data_exchanged_between_forward_and_backward(name):
    exchanged_data_raises(name)


@pytest.mark.parametrize("name", ["norm"])
def test_storage_shorter_than_the_tensor(name):
    short_storage_raises(name, shrunk=True)
