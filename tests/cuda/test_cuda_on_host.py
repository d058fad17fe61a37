"""The model of CUDA that kernels are tested under: what it computes, and what it catches."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any

import pytest
import torch
from host_build import MODEL, Library, build
from torch import Tensor

SEEDS = range(1, 11)


@pytest.fixture(scope="module")
def library() -> Library:
    return build("self_test", [MODEL / "self_test.cu"])


def call(library: Library, name: str, *arguments: Any) -> None:
    """Launches a kernel; tensors are passed as pointers to their memory."""
    function = getattr(library.functions, f"test_{name}")
    function.restype = ctypes.c_char_p
    message = function(
        *(ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in arguments)
    )
    if message is not None:
        raise RuntimeError(message.decode())


def nan(*shape: int) -> Tensor:
    return torch.full(shape, float("nan"))


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


# Errors that are caught --------------------------------------------------------------------------


def results(library: Library, name: str, barrier: bool, shape: tuple[int, ...]) -> list[bool]:
    """Returns whether the kernel is right in the default order of threads, and in random ones."""
    x = numbers(*shape)
    expected = {"reverse": x.flip(-1), "rotate_twice": x.roll(-2, -1)}[name]
    right = []
    for seed in (0, *SEEDS):
        out = nan(*shape)
        with library.device(seed=seed):
            call(library, name, x, out, barrier)
        right.append(torch.equal(out, expected))
    return right


@pytest.mark.parametrize(
    ("name", "shape"), [("reverse", (3, 64)), ("rotate_twice", (64,))], ids=["RAW", "WAR"]
)
def test_a_missing_barrier_shows(library, name, shape):
    assert all(results(library, name, True, shape))
    right = results(library, name, False, shape)
    assert not any(right[1:])


def test_a_missing_wait_for_a_copy_shows(library):
    x = numbers(256)
    out = nan(256)
    call(library, "copy_asynchronously", x, out, True)
    assert torch.equal(out[:128], x[:128].flip(0))
    halves = x[128:].view(32, 4).clone()
    halves[:, 2:] = 0  # 8 of 16 bytes were valid
    assert torch.equal(out[128:], halves.flatten())
    call(library, "copy_asynchronously", x, out, False)
    assert out[128:].isnan().all()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("diverge", r"16 have returned; 16 wait at __syncthreads of line \d+\.$"),
        ("diverge_by_place", r"divergent: some are at __syncthreads of line \d+, another at"),
    ],
)
def test_divergent_barriers_are_refused(library, name, message):
    for seed in (0, 1):
        with library.device(seed=seed), pytest.raises(RuntimeError, match=message):
            call(library, name)


def test_divergent_shuffles_are_refused(library):
    with pytest.raises(RuntimeError, match="16 have returned; 16 wait at __shfl_xor_sync"):
        call(library, "diverge_in_a_warp", nan(1))


@pytest.mark.parametrize("at", [64, 200, -1, -700])
def test_writing_past_shared_memory_is_noticed(library, at):
    message = rf"shared memory of 64 bytes, at offset {at}$"
    with pytest.raises(RuntimeError, match=message):
        call(library, "write_past_shared_memory", at)
    call(library, "write_past_shared_memory", 63)


def test_misaligned_accesses_are_refused(library):
    with pytest.raises(RuntimeError, match=r"16 bytes that isn't aligned"):
        call(library, "read_misaligned", numbers(64), nan(1))


def test_waiting_for_nobody_ends(library):
    with pytest.raises(RuntimeError, match="32 wait for a flag"):
        call(library, "wait_for_nobody", torch.zeros(1, dtype=torch.int32))


def test_launches_beyond_the_device_are_refused(library):
    message = r"diverge \(grid 1x1x1, block 32x1x1, shared 1048576 bytes\): too much shared memory"
    with pytest.raises(RuntimeError, match=message):
        call(library, "too_much_shared_memory")


def test_arrivals_that_nobody_waits_for_are_noticed(library):
    with pytest.raises(RuntimeError, match="ended with threads arrived at named barrier 3"):
        call(library, "arrive_for_nobody")


def test_copies_that_nobody_waits_for_are_noticed(library):
    with pytest.raises(RuntimeError, match="ended before a copy had come"):
        call(library, "copy_for_nobody", numbers(64, 64).half())


def test_registers_have_to_be_given_back_before_they_are_taken(library):
    call(library, "hand_registers_over", False)
    with pytest.raises(RuntimeError, match="setmaxnreg hands out more registers than were given"):
        call(library, "hand_registers_over", True)


@pytest.mark.parametrize(
    ("rows", "columns", "stride", "fits"),
    [(5, 64, 64, True), (5, 20, 24, True), (5, 24, 20, False), (0, 64, 64, False)],
)
def test_what_a_tensor_map_can_say(library, rows, columns, stride, fits):
    answer, x = torch.zeros(1, dtype=torch.bool), numbers(2, 2, 8, 64).half()
    if fits:
        call(library, "has_tensor_map", x, rows, columns, stride, answer)
    else:
        with pytest.raises(RuntimeError, match=r"cuTensorMapEncodeTiled .*: CUDA driver error 1"):
            call(library, "has_tensor_map", x, rows, columns, stride, answer)
    assert answer.item() == fits


def copy_boxes(library: Library, column: int, *waits: bool) -> bool:
    """Returns whether the copied tiles equal those in memory, with zeros past the ends."""
    x = numbers(2, 2, 21, 104).half()
    out = torch.full((2, 2, 2, 16, 64), float("nan"), dtype=torch.float16)
    call(library, "copy_boxes", x, out, 21, 100, 104, column, *waits)
    padded = torch.zeros(2, 2, 32, 128, dtype=torch.float16)
    padded[:, :, :21, :100] = x[..., :100]
    return torch.equal(out, padded.view(2, 2, 2, 16, 128)[..., column : column + 64])


@pytest.mark.parametrize("column", [0, 64])
@pytest.mark.parametrize("seed", [0, *SEEDS])
def test_tiles_copied_by_the_copy_engine(library, seed, column):
    with library.device(seed=seed):
        assert copy_boxes(library, column, True, True)
        for waits in ((False, True), (True, False)):
            with suppress(RuntimeError):  # it ends early, or too many threads arrive
                assert not copy_boxes(library, column, *waits)


FAULTS = {  # their numbers in self_test.cu, and messages
    "no begin": (1, "have changed since wgmma_begin, or weren't named to it"),
    "no wait": (2, None),
    "sum": (3, "registers of a sum were written while"),
    "factor": (4, "registers of a factor were written while"),
    "stride": (5, None),
    "leading": (6, None),
    "one warp": (7, "warps of a warpgroup took part in different products"),
}


def multiply_of_warpgroup(
    library: Library, dtype: torch.dtype, by_rows: bool, fault: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a product, the exact product, and a bound on their difference."""
    a, b = numbers(64, 64).to(dtype), numbers(64, 128).flip(0).to(dtype)
    stored = b.T.contiguous() if by_rows else b
    out = nan(64, 128)
    call(library, "multiply_of_warpgroup", a, stored, out, dtype == torch.bfloat16, by_rows, fault)
    a, b = a.double(), b.double()
    return out, a @ b, 2**-23 * 8 * (a.abs() @ b.abs())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by_rows", [True, False])
def test_products_of_warpgroups(library, dtype, by_rows):
    out, exact, bound = multiply_of_warpgroup(library, dtype, by_rows)
    assert ((out - exact).abs() <= bound).all()
    assert not torch.equal(out.double(), exact)


# By rows, no factor is in registers, and the leading offset has no meaning.
BY_ROWS = [(fault, True) for fault in FAULTS if fault not in ("factor", "leading")]


@pytest.mark.parametrize(("fault", "by_rows"), [*BY_ROWS, *((fault, False) for fault in FAULTS)])
def test_faults_of_products_of_warpgroups_show(library, fault, by_rows):
    number, message = FAULTS[fault]
    if message is not None:
        with pytest.raises(RuntimeError, match=message):
            multiply_of_warpgroup(library, torch.float16, by_rows, number)
        return
    out, exact, bound = multiply_of_warpgroup(library, torch.float16, by_rows, number)
    assert not ((out - exact).abs() <= bound).all()


# Results -----------------------------------------------------------------------------------------


def sum_of_blocks(library: Library, blocks: int, barrier: bool) -> Tensor:
    out = nan(3, blocks)
    arrivals = torch.zeros(1, dtype=torch.int32)
    call(library, "sum_of_blocks", arrivals, torch.zeros(1), out, blocks, barrier)
    return out


@pytest.mark.parametrize("seed", [0, *SEEDS])
def test_blocks_wait_for_one_another(library, seed):
    with library.device(seed=seed):
        out = sum_of_blocks(library, 8, True)
        assert torch.equal(out, torch.tensor([28.0, 56, 84])[:, None].expand(3, 8))
        assert not torch.equal(sum_of_blocks(library, 8, False), out)


def test_a_cooperative_grid_has_to_be_resident(library):
    with pytest.raises(RuntimeError, match="a cooperative grid that isn't resident at once"):
        sum_of_blocks(library, 9, True)
    with library.device(multiprocessors=5):
        sum_of_blocks(library, 9, True)


@pytest.mark.parametrize("seed", [0, *SEEDS])
def test_named_barriers(library, seed):
    out = nan(64)
    with library.device(seed=seed):
        call(library, "producers_and_consumers", out)
    assert torch.equal(out, torch.arange(63.0, -1, -1))


@pytest.mark.parametrize("seed", [0, *SEEDS])
def test_votes_of_some_warps(library, seed):
    x, out = torch.full((128,), -1.0), nan(128)
    x[100] = 1
    with library.device(seed=seed):
        call(library, "votes", x, out)
    assert torch.equal(out, torch.tensor([2.0, 3.0]).repeat_interleave(64))


@pytest.mark.parametrize("seed", [0, *SEEDS])
def test_warp_operations(library, seed):
    x, out = numbers(32).round(decimals=2), nan(32, 8)
    with library.device(seed=seed):
        call(library, "warp_operations", x, out)
    total, highest, fifth, above, below, positive, votes, segments = out.unbind(1)
    torch.testing.assert_close(total, x.sum().expand(32))
    assert (total == total[0]).all()
    assert (highest == x.max()).all()
    assert (fifth == x[5]).all()
    assert torch.equal(above, torch.cat([x[:1], x[:-1]]))
    shifted = x.view(4, 8).clone()
    shifted[:, :-1] = x.view(4, 8)[:, 1:]
    assert torch.equal(below, shifted.flatten())
    assert (positive == (x > 0).sum()).all()
    assert (votes == float((x > 2).any()) + 2 * float((x > -9).all())).all()
    torch.testing.assert_close(segments, x.view(4, 8).sum(1).repeat_interleave(8))


@pytest.mark.parametrize("seed", [0, *SEEDS])
def test_sum_over_a_block(library, seed):
    x, out = numbers(128), nan(128, 2)
    with library.device(seed=seed):
        call(library, "sum_over_block", x, out)
    assert (out == out[0]).all()
    torch.testing.assert_close(out[0], torch.stack([x.sum(), 2 * x.sum()]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
def test_matrix_products(library, dtype, transposed):
    a, b = numbers(16, 16).to(dtype), numbers(16, 8).flip(0).to(dtype)
    stored = b.contiguous() if transposed else b.T.contiguous()
    out = nan(16, 8)
    call(library, "multiply", a, stored, out, dtype == torch.bfloat16, transposed)
    exact = a.double() @ b.double()
    bound = 2**-23 * 2 * (a.double().abs() @ b.double().abs())
    assert ((out - exact).abs() <= bound).all()
    assert not torch.equal(out.double(), exact)


def test_tf32_products(library):
    a, b, out = numbers(16, 8), numbers(8, 8).flip(0), nan(16, 8)
    call(library, "multiply_tf32", a, b, out)

    def cut(x: Tensor) -> Tensor:
        return (x.view(torch.int32) & -0x2000).view(torch.float32).double()

    torch.testing.assert_close(out.double(), cut(a) @ cut(b), rtol=1e-5, atol=1e-6)


def test_conversions_and_special_functions(library):
    edges = [0.0, 1.0, 65504.0, 65519.9, 65520.0, 1e-7, 6e-8, 3e38, 1 + 2**-8, 1 + 3 * 2**-9]
    x = torch.cat([numbers(200).abs() * 10, torch.tensor(edges), torch.tensor([float("inf")])])
    out = nan(x.numel(), 8)
    call(library, "convert", x, out, x.numel())
    assert torch.equal(out[:, 0], x.bfloat16().float())
    assert torch.equal(out[:, 1], x.half().float())
    some = (x > 0) & (x < 60)
    x, of = x[some].double(), out[some].double()
    functions = (torch.exp2, torch.tanh, torch.rsqrt, torch.exp, torch.log, torch.reciprocal)
    ulps = (2, 4096, 2, 80, 3, 2)
    for column, (function, allowed) in enumerate(zip(functions, ulps, strict=True), 2):
        exact = function(x)
        error = (of[:, column] - exact).abs() / exact.abs().clamp_min(1e-30)
        assert (error <= (allowed + 1) * 2**-23).all(), function
        assert (error > 0).any()
