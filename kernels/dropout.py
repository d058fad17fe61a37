"""Dropout in Triton, with the random generator that all operators of trifuse share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trifuse.kernels.launch import Block, Config, launch
from trifuse.kernels.philox import dropout_keep, keep_groups, placed_units
from trifuse.reference import philox

LONG_ROW = tl.constexpr(philox.LONG_ROW)
CONFIG = Config(Block(8, 512), num_warps=4)  # a thread loads 16 bytes of float32


@triton.jit(do_not_specialize=["threshold", "scale"])
def dropout_kernel(
    x,  # (count,)
    out,  # (count,)
    seed,  # int64
    count,
    threshold,
    scale,  # float32
    PLACED: tl.constexpr,  # a place follows the seed: its numbers are multiples of 8
    block: tl.constexpr,
):
    """out = D x, with elements numbered as in ``philox.dropout_keep_flat``.

    A program owns block.rows runs of block.columns neighbours, and reads and writes them once.

    Floor: the bytes of x and out.
    """
    # Triton 3.6 does not treat a field of a constant tuple as a constant where it needs one.
    ROWS: tl.constexpr = block.rows
    COLUMNS: tl.constexpr = block.columns
    first = tl.program_id(0).to(tl.int64) * (ROWS * COLUMNS)
    long_row = (first // LONG_ROW).to(tl.int32)
    key = tl.load(seed)
    for row in tl.static_range(ROWS):
        start = first + row * COLUMNS
        columns = tl.arange(0, COLUMNS)
        inside = start + columns < count
        value = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
        if PLACED:
            eights = placed_units(seed, start + 8 * tl.arange(0, COLUMNS // 8)[None, :])
            rows = (eights // LONG_ROW).to(tl.int32)
            groups = (eights % LONG_ROW // 8).to(tl.int32)
            kept = keep_groups(key, 0, rows, groups, threshold, 1, COLUMNS)
        else:
            column = (start % LONG_ROW).to(tl.int32)
            kept = dropout_keep(key, 0, long_row, column, threshold, None, 1, COLUMNS)
        value = tl.where(tl.reshape(kept, (COLUMNS,)), value * scale, 0.0)
        tl.store(out + start + columns, value.to(out.dtype.element_ty), mask=inside)


def dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """Implements the op ``dropout``."""
    x = x.contiguous()
    out = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), CONFIG.block.rows * CONFIG.block.columns),)
    if x.numel():
        with torch.cuda.device_of(x):
            launch(
                dropout_kernel,
                grid,
                CONFIG,
                x,
                out,
                seed,
                x.numel(),
                philox.threshold(p),
                philox.keep_scale(p),
                philox.is_placed(seed),
            )
    return out
