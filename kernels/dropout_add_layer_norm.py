"""Dropout, residual addition and LayerNorm, forward and backward, in Triton.

The formulas are at the head of ``pytorch_ext/reference/dropout_add_layer_norm.py``. All kernels are
bound by memory. Every element is read once and written once, 16 bytes at a time if rows begin at
multiples of 16 bytes. Enough loads must be in flight: about 40 KB per multiprocessor hide the
latency of an H100's memory. The forward has enough programs for that; the backward has few, so each
prefetches one tile.

- Rows that fit are held in registers between the passes of the two-pass variance, as corrected by
  Chan, Golub and LeVeque ("Algorithms for computing the sample variance", 1983). Wider rows are
  processed in chunks, whose means and variances are merged by the formula of the same paper. They
  are read twice, the second time from the L2 cache as far as it holds them.
- In the backward every program walks over many rows and sums the gradients of weight, bias and
  x_bias in float32 registers, in runs of tiles; a second kernel adds up the programs' sums. No
  chain of additions grows with the number of rows, and there are no atomics. The number of programs
  depends only on the shape, so results are reproducible bit for bit.
- One program sums a row, in an order that depends only on the width and the dtypes, so the number
  of rows does not change a bit of a row's results.
- The width is a compile-time constant, which fixes the alignment of rows and the part of a tile
  past their end. The number of rows is not.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trifuse.kernels.arguments import check_shape, seed_shape
from trifuse.kernels.arithmetic import round_to
from trifuse.kernels.launch import Block, Config, launch
from trifuse.kernels.philox import dropout_keep
from trifuse.reference import philox

# Kernel arguments --------------------------------------------------------------------------------


class Matrix(NamedTuple):
    """A (rows, N) matrix whose rows are contiguous."""

    data: Tensor
    stride: int  # from row to row, in units of Variant.vector elements


class Inputs(NamedTuple):
    """The tensors of the forward; None where the call has none."""

    x: Matrix  # the saved sum with Variant.x_is_sum
    residual: Matrix | None
    weight: Tensor | None  # (N,)
    bias: Tensor | None
    x_bias: Tensor | None


class Dropout(NamedTuple):
    """How dropout draws its elements, and the factor of those that it keeps."""

    seed: Tensor  # int64
    threshold: int  # random 16-bit values below it drop an element
    keep_scale: float


class Statistics(NamedTuple):
    """float32 (rows,): the two means over a row that its gradient needs."""

    g: Tensor  # of g = weight · grad_out
    gn: Tensor  # of g · n, where n is the normalised sum


class VectorGradients(NamedTuple):
    """Each (N,), or float32 (programs, N) for the programs' shares; None if not needed."""

    weight: Tensor | None
    bias: Tensor | None
    x_bias: Tensor | None


class Variant(NamedTuple):
    """Compile-time parameters of a kernel, besides which tensors are None."""

    N: int
    vector: int  # the largest power of 2, at most 8, that divides N; rows begin at multiples of it
    rms_norm: bool
    x_is_sum: bool
    placed: bool  # a place follows the seed


# Number of tiles that are summed as one chain, in registers. If all terms are equal, every addition
# of a chain rounds the same way; torch's own sums allow chains of about this length.
RUN = tl.constexpr(32)


class MatrixTile(NamedTuple):
    """A tile of ``Block`` within the matrix. The last tiles reach past the end of the matrix."""

    first_row: Any  # int64
    first_column: Any
    row: Any  # (block.rows, 1), int64
    column: Any  # (1, block.columns)
    inside: Any  # (block.rows, block.columns)


# Pieces ------------------------------------------------------------------------------------------


@triton.jit
def _tile(first_row, first_column, rows, N: tl.constexpr, block: tl.constexpr):
    """Returns the MatrixTile whose first element is (first_row, first_column)."""
    row = first_row + tl.arange(0, block.rows)[:, None]
    column = first_column + tl.arange(0, block.columns)[None, :]
    return MatrixTile(first_row, first_column, row, column, (row < rows) & (column < N))


@triton.jit
def _load(matrix, tile, vector: tl.constexpr):
    """Loads a tile as float32, 0 outside the matrix."""
    pointers = matrix.data + tile.row * (matrix.stride * vector) + tile.column
    return tl.load(pointers, mask=tile.inside, other=0.0).to(tl.float32)


@triton.jit
def _store(matrix, values, tile, vector: tl.constexpr):
    """Rounds a tile to the matrix's dtype and stores the part inside the matrix."""
    pointers = matrix.data + tile.row * (matrix.stride * vector) + tile.column
    tl.store(pointers, round_to(values, matrix.data.dtype.element_ty), mask=tile.inside)


@triton.jit
def _load_vector(vector, tile, N: tl.constexpr):
    """Loads float32 (1, block.columns), 0 from N on."""
    return tl.load(vector + tile.column, mask=tile.column < N, other=0.0).to(tl.float32)


@triton.jit
def _draw(dropout, tile, variant: tl.constexpr, block: tl.constexpr):
    """Returns which elements of the tile dropout keeps; None without dropout."""
    if dropout is None:
        keep = None
    else:
        seed = tl.load(dropout.seed)
        row = tl.cast(tile.first_row, tl.int32)
        keep = dropout_keep(
            seed,
            0,
            row,
            tile.first_column,
            dropout.threshold,
            dropout.seed if variant.placed else None,
            block.rows,
            block.columns,
        )
    return keep


@triton.jit
def _drop(values, keep, dropout):
    """Returns D · values. A dropped element is 0 whatever it was, NaN included."""
    if dropout is not None:
        values = tl.where(keep, values * dropout.keep_scale, 0.0)
    return values


@triton.jit
def _sum(inputs, dropout, keep, tile, variant: tl.constexpr):
    """Returns the sum s, 0 outside of the matrix."""
    total = _load(inputs.x, tile, variant.vector)
    if not variant.x_is_sum:
        if inputs.x_bias is not None:
            # The backward sums over all rows of a tile. In rows past the last, an infinite x_bias
            # would become NaN, even if it was dropped in every row that exists.
            x_bias = _load_vector(inputs.x_bias, tile, variant.N)
            total = tl.where(tile.inside, total + x_bias, 0.0)
        total = _drop(total, keep, dropout)
        if inputs.residual is not None:
            total += _load(inputs.residual, tile, variant.vector)
    return total


# Forward -----------------------------------------------------------------------------------------


@triton.jit
def _forward_sum(inputs, dropout, sums, tile, variant: tl.constexpr, block: tl.constexpr):
    """Returns the sum s, rounded to the dtype of ``sums`` if a caller gets it."""
    total = _sum(inputs, dropout, _draw(dropout, tile, variant, block), tile, variant)
    if sums is not None:
        total = round_to(total, sums.data.dtype.element_ty).to(tl.float32)
    return total


@triton.jit
def _moments(total, tile, count, variant: tl.constexpr):
    """Returns the mean of each row's ``count`` numbers, the rounding error to add to it, and the
    sum of squared deviations from the mean corrected by it."""
    if variant.rms_norm:
        squares = tl.sum(total * total, 1)
        mean = tl.zeros_like(squares)
        error = mean
    else:
        mean = tl.sum(total, 1) / count
        deviation = tl.where(tile.inside, total - mean[:, None], 0.0)
        error = tl.sum(deviation, 1) / count
        squares = tl.sum(deviation * deviation, 1) - count * error * error
        # For equal numbers this is 0, or below 0 if a GPU's division is inexact. NaN stays.
        squares = tl.where(squares < 0, 0.0, squares)
    return mean, error, squares


@triton.jit
def _write_normalised(out, sums, total, mean, rstd, inputs, tile, variant: tl.constexpr):
    """Writes the output's tile and, if it is returned, the sum's. mean and rstd: (block.rows,)."""
    result = (total - mean[:, None]) * rstd[:, None]
    if inputs.weight is not None:
        result *= _load_vector(inputs.weight, tile, variant.N)
    if inputs.bias is not None:
        result += _load_vector(inputs.bias, tile, variant.N)
    _store(out, result, tile, variant.vector)
    if sums is not None:
        _store(sums, total, tile, variant.vector)


@triton.jit(do_not_specialize=["rows"])
def dropout_add_layer_norm_forward_kernel(
    inputs,
    dropout,  # Dropout or None
    out,  # Matrix
    sums,  # Matrix or None
    means,  # (rows,)
    rstds,  # (rows,)
    rows,
    eps,
    variant: tl.constexpr,
    block: tl.constexpr,
):
    """A program owns block.rows whole rows. It reads x and the residual once (twice if rows are
    wider than block.columns), and writes the output, the sum, the mean and rstd.

    Floor: N · (bytes of x + residual + out + sum) + 8 bytes a row.
    """
    N: tl.constexpr = variant.N
    first_row = tl.program_id(0).to(tl.int64) * block.rows
    if block.columns >= N:
        tile = _tile(first_row, 0, rows, N, block)
        total = _forward_sum(inputs, dropout, sums, tile, variant, block)
        mean, error, squares = _moments(total, tile, N, variant)
        mean += error
        rstd = _rstd(squares, N, eps)
        _write_normalised(out, sums, total, mean, rstd, inputs, tile, variant)
    else:
        mean = tl.full((block.rows,), 0.0, tl.float32)
        error = tl.full((block.rows,), 0.0, tl.float32)
        squares = tl.full((block.rows,), 0.0, tl.float32)
        for column in range(0, N, block.columns):
            tile = _tile(first_row, column, rows, N, block)
            total = _forward_sum(inputs, dropout, sums, tile, variant, block)
            count = tl.minimum(N - column, block.columns)
            chunk_mean, chunk_error, chunk_squares = _moments(total, tile, count, variant)
            if column == 0:
                mean = chunk_mean  # its rounding error is added to ``error`` below
            delta = (chunk_mean - mean) + (chunk_error - error)
            fraction = count.to(tl.float32) / (column + count)
            error += delta * fraction
            squares += chunk_squares + delta * delta * (column * fraction)
        mean += error
        rstd = _rstd(squares, N, eps)
        for column in range(0, N, block.columns):
            tile = _tile(first_row, column, rows, N, block)
            total = _forward_sum(inputs, dropout, sums, tile, variant, block)
            _write_normalised(out, sums, total, mean, rstd, inputs, tile, variant)
    row = first_row + tl.arange(0, block.rows)
    tl.store(means + row, mean, mask=row < rows)
    tl.store(rstds + row, rstd, mask=row < rows)


@triton.jit
def _rstd(squares, N: tl.constexpr, eps):
    """Returns 1 / √(squares / N + eps) of each row, (block.rows,)."""
    # Computed once per row, so the exact division and square root are free.
    return tl.div_rn(1.0, tl.sqrt_rn(squares / N + eps))


# Backward ----------------------------------------------------------------------------------------


@triton.jit
def _normalised(total, means, rstds, tile, rows, variant: tl.constexpr):
    """Returns n and rstd (block.rows, 1), both 0 past the last row."""
    exists = tile.row < rows
    if not variant.rms_norm:
        total -= tl.load(means + tile.row, mask=exists, other=0.0)
    rstd = tl.load(rstds + tile.row, mask=exists, other=0.0)
    return total * rstd, rstd


@triton.jit
def _weighted(dy, inputs, tile, variant: tl.constexpr):
    """Returns g = weight · dy, a tile."""
    if inputs.weight is not None:
        dy *= _load_vector(inputs.weight, tile, variant.N)
    return dy


@triton.jit(do_not_specialize=["rows"])
def dropout_add_layer_norm_backward_statistics_kernel(
    grad_out,
    inputs,
    dropout,
    means,
    rstds,
    statistics,
    rows,
    variant: tl.constexpr,
    block: tl.constexpr,
):
    """Computes the means over rows wider than a tile of the backward, for all chunks of a row. A
    program owns block.rows rows, reads them once, and writes two numbers for each.

    Floor: N · (bytes of grad_out + x + residual) a row.
    """
    first_row = tl.program_id(0).to(tl.int64) * block.rows
    sum_g = tl.full((block.rows, block.columns), 0.0, tl.float32)
    sum_gn = tl.full((block.rows, block.columns), 0.0, tl.float32)
    for column in range(0, variant.N, block.columns):
        tile = _tile(first_row, column, rows, variant.N, block)
        total = _sum(inputs, dropout, _draw(dropout, tile, variant, block), tile, variant)
        n, _ = _normalised(total, means, rstds, tile, rows, variant)
        g = _weighted(_load(grad_out, tile, variant.vector), inputs, tile, variant)
        sum_g += g
        sum_gn += g * n
    row = first_row + tl.arange(0, block.rows)
    tl.store(statistics.g + row, tl.sum(sum_g, 1) / variant.N, mask=row < rows)
    tl.store(statistics.gn + row, tl.sum(sum_gn, 1) / variant.N, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def dropout_add_layer_norm_backward_kernel(
    grad_out,  # Matrix
    grad_sum,  # Matrix or None
    inputs,
    dropout,  # Dropout or None
    means,
    rstds,
    statistics,  # None if rows fit into a tile
    grad_x,  # Matrix or None
    grad_residual,  # Matrix or None
    shares,  # VectorGradients
    rows,
    variant: tl.constexpr,
    stages: tl.constexpr,  # 2 to prefetch the next tile
    block: tl.constexpr,
):
    """A program owns the columns of one tile, and every ``num_programs``-th tile of rows. It reads
    grad_out, x, the residual and grad_sum once, writes grad_x and grad_residual, and sums its share
    of the gradients of weight, bias and x_bias in registers over a run of tiles.

    Floor: N · (bytes of grad_out + x + residual + grad_sum + grad_x + grad_residual) + 8 bytes a
    row; 4 · N bytes a program for each of the shares, and twice that for each further run.
    """
    N: tl.constexpr = variant.N
    program = tl.program_id(0).to(tl.int64)
    first_column = tl.program_id(1) * block.columns
    begin = program * block.rows
    step = tl.num_programs(0) * block.rows
    # One long chain of additions loses too much precision by rounding, so each run of tiles has its
    # own sums. They are added up in the program's shares, in memory, because no registers are left
    # for them.
    for first_of_run in range(begin, rows, step * RUN):
        # One number for each element of a tile, because its rows are added up only at the end of a
        # run.
        dweight = tl.full((block.rows, block.columns), 0.0, tl.float32)
        dbias = tl.full((block.rows, block.columns), 0.0, tl.float32)
        dx_bias = tl.full((block.rows, block.columns), 0.0, tl.float32)
        end = tl.minimum(first_of_run + step * RUN, rows)
        for first_row in tl.range(first_of_run, end, step, num_stages=stages):
            tile = _tile(first_row, first_column, rows, N, block)
            keep = _draw(dropout, tile, variant, block)
            total = _sum(inputs, dropout, keep, tile, variant)
            n, rstd = _normalised(total, means, rstds, tile, rows, variant)
            dy = _load(grad_out, tile, variant.vector)
            g = _weighted(dy, inputs, tile, variant)
            if shares.weight is not None:
                dweight += dy * n
            if shares.bias is not None:
                dbias += dy
            if statistics is None:
                mean_g = (tl.sum(g, 1) / N)[:, None]
                mean_gn = (tl.sum(g * n, 1) / N)[:, None]
            else:
                mean_g = tl.load(statistics.g + tile.row, mask=tile.row < rows, other=0.0)
                mean_gn = tl.load(statistics.gn + tile.row, mask=tile.row < rows, other=0.0)
            if not variant.rms_norm:
                g -= mean_g
            grad = rstd * (g - n * mean_gn)
            if grad_sum is not None:
                grad += _load(grad_sum, tile, variant.vector)
            if grad_residual is not None:
                _store(grad_residual, grad, tile, variant.vector)
            grad = _drop(grad, keep, dropout)
            if grad_x is not None:
                _store(grad_x, grad, tile, variant.vector)
            if shares.x_bias is not None:
                dx_bias += grad
        later_run = first_of_run > begin
        _add_run(shares.weight, dweight, later_run, program, first_column, N, block)
        _add_run(shares.bias, dbias, later_run, program, first_column, N, block)
        _add_run(shares.x_bias, dx_bias, later_run, program, first_column, N, block)


@triton.jit
def _add_run(
    shares, values, later_run, program, first_column, N: tl.constexpr, block: tl.constexpr
):
    """Adds the sum over the rows of ``values`` to the program's share; the first run sets it."""
    if shares is not None:
        column = first_column + tl.arange(0, block.columns)
        pointers = shares + program * N + column
        total = tl.sum(values, 0)
        if later_run:
            total += tl.load(pointers, mask=column < N, other=0.0)
        tl.store(pointers, total, mask=column < N)


@triton.jit(do_not_specialize=["programs"])
def dropout_add_layer_norm_backward_sum_kernel(
    shares,  # VectorGradients, (programs, N)
    grads,  # VectorGradients, (N,)
    programs,
    N: tl.constexpr,
    block: tl.constexpr,
):
    """A program owns block.columns columns of one of the vectors. It adds up the shares in a fixed
    order, and writes the gradient.

    Floor: 4 · programs bytes per column, from the L2 cache.
    """
    vector = tl.program_id(1)
    if vector == 0:
        _add_up(shares.weight, grads.weight, programs, N, block)
    elif vector == 1:
        _add_up(shares.bias, grads.bias, programs, N, block)
    else:
        _add_up(shares.x_bias, grads.x_bias, programs, N, block)


@triton.jit
def _add_up(shares, grad, programs, N: tl.constexpr, block: tl.constexpr):
    """Writes block.columns elements of ``grad``: the sums of the programs' shares."""
    if grad is not None:
        column = tl.program_id(0) * block.columns + tl.arange(0, block.columns)
        total = tl.full((block.rows, block.columns), 0.0, tl.float32)
        for first in range(0, programs, block.rows):
            row = first + tl.arange(0, block.rows)[:, None]
            inside = (row < programs) & (column < N)[None, :]
            pointers = shares + row.to(tl.int64) * N + column[None, :]
            total += tl.load(pointers, mask=inside, other=0.0)
        result = round_to(tl.sum(total, 0), grad.dtype.element_ty)
        tl.store(grad + column, result, mask=column < N)


# Configurations ----------------------------------------------------------------------------------


# (elements of a tile, num_warps). Rows use the first tile that holds one row, and share it if
# several fit. The forward keeps one number per element in registers, so a thread has 16 to 32
# elements: 4 to 8 loads of 16 bytes from each float32 tensor. The backward keeps three sums and
# about three more numbers per element, so a thread has 8, or 16 for the widest rows. Rows wider
# than every tile are processed in chunks.
_FORWARD_TILES = ((2048, 4), (4096, 8), (8192, 16), (16384, 16))
_BACKWARD_TILES = ((1024, 4), (2048, 8), (4096, 16), (8192, 16))
_CHUNK = Config(Block(1, 4096), 16)
_SUM = Config(Block(256, 32), 8)

# Warps of the backward in all programs together: about what an H100 holds at a time with 128
# registers a thread, 16 on each of 132 multiprocessors. It is the same on every GPU, because sums
# depend on it. A program's shares, a row for each vector, are written and read once more, so a
# program gets at least about 4 tiles of rows. It gets at most 4 runs of tiles, because its runs are
# added up in a chain too. With more rows there are several such rounds of programs, of equal
# length.
_MAX_WARPS = 2048
_MIN_TILES = 4
_MAX_TILES = 4 * RUN.value

# Largest tile, in bytes read, that the backward prefetches into shared memory. Every GPU that can
# prefetch has at least 99 KiB of it. Larger tiles keep enough loads in flight without prefetching.
_MAX_PREFETCH = 64 * 1024


def tile_config(tiles: tuple[tuple[int, int], ...], N: int) -> Config:
    """Returns the configuration for rows of N elements. Rows wider than its tile need chunks."""
    columns = max(triton.next_power_of_2(N), 8)
    for elements, num_warps in tiles:
        if columns <= elements:
            return Config(Block(min(elements // columns, 128), columns), num_warps)
    return _CHUNK


# Launchers ---------------------------------------------------------------------------------------


def dropout_add_layer_norm_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    x_bias: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    eps: float,
    rms_norm: bool,
    prenorm: bool,
    sum_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Implements the op ``dropout_add_layer_norm_forward``."""
    tensors = (x, residual, weight, bias, x_bias, seed)
    with torch.cuda.device_of(x):
        call = _NormCall(*tensors, dropout_p, rms_norm, x_is_sum=False)
        out = x.new_empty(x.shape)
        total = x.new_empty(x.shape if prenorm else (0,), dtype=sum_dtype)
        mean, rstd = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
        config = tile_config(_FORWARD_TILES, call.variant.N)
        launch(
            dropout_add_layer_norm_forward_kernel,
            (triton.cdiv(call.rows, config.block.rows),),
            config,
            call.inputs,
            call.dropout,
            _as_matrix(out),
            _as_matrix(total if prenorm else None),
            mean,
            rstd,
            call.rows,
            eps,
            call.variant,
        )
    return out, total, mean, rstd


def dropout_add_layer_norm_backward(
    grad_out: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    x_bias: Tensor | None,
    seed: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dropout_p: float,
    eps: float,
    rms_norm: bool,
    prenorm: bool,
    sum_dtype: torch.dtype,
    needs_grad: tuple[bool, ...],
) -> tuple[Tensor, ...]:
    """Implements the op ``dropout_add_layer_norm_backward``."""
    tensors = (x, residual, weight, bias, x_bias, seed)
    _check_backward(grad_out, grad_sum, tensors, mean, rstd)
    with torch.cuda.device_of(x):
        call = _NormCall(*tensors, dropout_p, rms_norm, x_is_sum=prenorm)
        dy, ds = _as_matrix(grad_out), _as_matrix(grad_sum)
        mean, rstd = mean.contiguous(), rstd.contiguous()
        # A gradient has the dtype of its tensor, or that of the output if there is no such tensor.
        vectors = (grad_out if t is None else t for t in (weight, bias, x_bias))
        like = (grad_out, x if residual is None else residual, *vectors)
        results = tuple(
            t.new_empty(t.shape if want else (0,)) for t, want in zip(like, needs_grad, strict=True)
        )
        dx, dresidual, *of_vectors = (
            t if want else None for t, want in zip(results, needs_grad, strict=True)
        )
        grad_x, grad_residual = _as_matrix(dx), _as_matrix(dresidual)
        vector_grads = VectorGradients(*of_vectors)

        N = call.variant.N
        config = tile_config(_BACKWARD_TILES, N)
        tiles = triton.cdiv(call.rows, config.block.rows)
        chunks = triton.cdiv(N, config.block.columns)
        statistics = None
        if chunks > 1:
            statistics = _row_statistics(call, config, tiles, dy, mean, rstd)
        programs = _backward_programs(config, tiles, chunks)
        shares = VectorGradients(
            *(None if t is None else rstd.new_empty((programs, N)) for t in vector_grads)
        )
        stages = _stages(config, dy, ds, call.inputs.x, call.inputs.residual)
        launch(
            dropout_add_layer_norm_backward_kernel,
            (programs, chunks),
            config,
            dy,
            ds,
            call.inputs,
            call.dropout,
            mean,
            rstd,
            statistics,
            grad_x,
            grad_residual,
            shares,
            call.rows,
            call.variant,
            stages,
        )
        if any(t is not None for t in vector_grads):
            grid = (triton.cdiv(N, _SUM.block.columns), len(vector_grads))
            launch(
                dropout_add_layer_norm_backward_sum_kernel,
                grid,
                _SUM,
                shares,
                vector_grads,
                programs,
                N,
            )
    return results


def _row_statistics(
    call: _NormCall, config: Config, tiles: int, dy: Matrix | None, mean: Tensor, rstd: Tensor
) -> Statistics:
    """Computes the means over rows that are longer than the backward's tiles."""
    statistics = Statistics(torch.empty_like(rstd), torch.empty_like(rstd))
    launch(
        dropout_add_layer_norm_backward_statistics_kernel,
        (tiles,),
        config,
        dy,
        call.inputs,
        call.dropout,
        mean,
        rstd,
        statistics,
        call.rows,
        call.variant,
    )
    return statistics


_NAMES = ("x", "residual", "weight", "bias", "x_bias", "seed")


def _check_backward(
    grad_out: Tensor,
    grad_sum: Tensor | None,
    tensors: tuple[Tensor | None, ...],
    mean: Tensor,
    rstd: Tensor,
) -> None:
    """Raises ValueError unless the tensors of a backward still fit one call."""
    x, *_, seed = tensors
    assert x is not None
    N = x.shape[-1]
    shapes = (x.shape, x.shape, (N,), (N,), (N,), seed_shape(seed))
    for name, t, shape in zip(_NAMES, tensors, shapes, strict=True):
        check_shape(name, t, shape)
    for name, t in (("grad_out", grad_out), ("grad_sum", grad_sum)):
        check_shape(name, t, x.shape)
    for name, t in (("mean", mean), ("rstd", rstd)):
        check_shape(name, t, x.shape[:-1])


def _backward_programs(config: Config, tiles: int, chunks: int) -> int:
    """Returns the number of programs that share the tiles of one chunk of columns."""
    round_of_programs = triton.cdiv(_MAX_WARPS, config.num_warps * max(chunks, 1))
    rounds = triton.cdiv(tiles, round_of_programs * _MAX_TILES)
    return min(triton.cdiv(tiles, _MIN_TILES), rounds * round_of_programs)


def _stages(config: Config, *matrices: Matrix | None) -> int:
    """Returns 2 if a program of the backward prefetches the next tile of the matrices, else 1."""
    bytes_read = sum(t.data.element_size() for t in matrices if t is not None)
    bytes_read *= config.block.rows * config.block.columns
    return 2 if bytes_read <= _MAX_PREFETCH else 1


class _NormCall:
    """A call of the operator, converted to the kernels' arguments."""

    def __init__(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        x_bias: Tensor | None,
        seed: Tensor | None,
        dropout_p: float,
        rms_norm: bool,
        *,
        x_is_sum: bool,
    ) -> None:
        N = x.shape[-1]
        self.rows = math.prod(x.shape[:-1])
        placed = seed is not None and philox.is_placed(seed)
        self.variant = Variant(N, _vector(N), rms_norm, x_is_sum, placed)
        vectors = (None if t is None else _aligned(t.contiguous()) for t in (weight, bias, x_bias))
        matrix = _as_matrix(x)
        assert matrix is not None
        self.inputs = Inputs(matrix, _as_matrix(residual), *vectors)
        threshold = philox.threshold(dropout_p)
        self.dropout = None
        if seed is not None and threshold > 0:
            self.dropout = Dropout(seed, threshold, philox.keep_scale(dropout_p))


# A stride from which on rows are copied: 8 GiB from row to row in float32, so they are few. Kernels
# multiply in 32 bits, because a stride of 64 bits takes more registers than there are.
_FAR = 2**31


def _vector(N: int) -> int:
    """Returns ``Variant.vector``."""
    return math.gcd(8, N)


def _as_matrix(t: Tensor | None) -> Matrix | None:
    """Returns a tensor (..., N) as a Matrix.

    The tensor is copied only if its rows have no common stride, if a row isn't contiguous, if rows
    are less aligned than in a fresh tensor, or if they are so far apart that the kernels' product
    of stride and ``Variant.vector`` would overflow. The reason for the third case is that the order
    in which a row is summed depends on the alignment for which a kernel is compiled.
    """
    if t is None:
        return None
    rows, N = math.prod(t.shape[:-1]), t.shape[-1]
    vector = _vector(N)
    t = t.reshape(rows, N)
    unfit = t.stride(0) % vector or t.stride(0) >= _FAR
    if (t.stride(1) != 1 and N > 1) or (unfit and rows > 1):
        t = t.contiguous()
    t = _aligned(t)
    # The stride of a single row is arbitrary; with N there are fewer kinds of calls to compile for.
    return Matrix(t, (N if rows == 1 else t.stride(0)) // vector)


def _aligned(t: Tensor) -> Tensor:
    """Returns ``t``, copied if it does not begin at a multiple of 16 bytes as fresh tensors do."""
    return t.clone(memory_format=torch.contiguous_format) if t.data_ptr() % 16 else t
