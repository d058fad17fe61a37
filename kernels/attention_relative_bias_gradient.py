"""The gradient of attention's relative bias: dS, summed along its diagonals.

The number of a distance is added to the scores of one diagonal, so its gradient is the sum over
that diagonal. A *band* is the blocks of M queries by N keys at the same offset of the first key
from the first query. Here M = 2 N, and equal numbers are one band::

                        keys
                ┌───┬───┬───┬───┬───┐
                │ 2 │ 3 │ 4 │ 5 │ 6 │
     queries    │   │   │   │   │   │
                ├───┼───┼───┼───┼───┤
                │ 0 │ 1 │ 2 │ 3 │ 4 │
                │   │   │   │   │   │
                └───┴───┴───┴───┴───┘

A program adds up the blocks of a band, element by element, and also over heads and sequences if
they share the bias. The result is one M × N tile for each band, which takes M times the memory of
the bias, not that of an (Lq, Lk) matrix. ``sums_by_offset`` sums the tiles along their diagonals.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trifuse.kernels.arithmetic import end_run
from trifuse.kernels.attention_arguments import Sizes
from trifuse.kernels.attention_mask_gradient import RUN, add_grad_scores
from trifuse.kernels.attention_tiles import load_head
from trifuse.reference.attention import sum_diagonals


@triton.jit(do_not_specialize=("terms_per_share", *Sizes._fields))
def attention_backward_relative_bias_kernel(
    inputs,
    grad_out,  # (B, H, Lq, Ev)
    vectors,  # RowVectors
    tiles,  # (shares, B, H, bands, M, N), B and H full or 1, contiguous
    terms_per_share,
    B,
    H,
    group,
    Lq,
    Lk,
    total_q,
    total_k,
    left,
    right,
    scale,
    scale_log2,
    threshold,
    keep_scale,
    shape: tl.constexpr,  # MaskShape: whether batch and heads are full
    SEVERAL_RUNS: tl.constexpr,  # a share has more terms than a run
    variant: tl.constexpr,
    block: tl.constexpr,
):
    """The sums of the blocks of each band.

    A program owns a band and a share of its terms. It reads q, dO, k and v of one sequence, head
    and block of queries after another, computes dS again, and writes one M × N tile of sums. Shares
    are added up afterwards.

    Floor: 2 · pairs · (E + Ev) operations of the matrix unit.
    """
    sizes = Sizes(
        B, H, group, Lq, Lk, total_q, total_k, left, right, scale, scale_log2, threshold, keep_scale
    )
    row_blocks = tl.cdiv(sizes.Lq, block.M)
    below = (row_blocks - 1) * (block.M // block.N)  # bands that begin below the first row
    bands = below + tl.cdiv(sizes.Lk, block.N)
    # The program's number counts bands fastest, then heads, sequences, and shares last.
    index = tl.program_id(0)
    band = index % bands
    index = index // bands
    own_head = 0
    if shape.heads:
        own_head = index % sizes.H
        index = index // sizes.H
    own_batch = 0
    if shape.batch:
        own_batch = index % sizes.B
        index = index // sizes.B
    # The terms of the sum: blocks of queries fastest, then heads, then sequences.
    terms = row_blocks
    if not shape.heads:
        terms *= sizes.H
    if not shape.batch:
        terms *= sizes.B

    run = tl.full((block.M, block.N), 0.0, tl.float32)
    total = tl.full((block.M, block.N), 0.0, tl.float32)
    begin = index * terms_per_share
    for term in range(begin, tl.minimum(begin + terms_per_share, terms)):
        first = term % row_blocks * block.M
        rest = term // row_blocks
        h = own_head
        if not shape.heads:
            h = rest % sizes.H
            rest = rest // sizes.H
        b = own_batch
        if not shape.batch:
            b = rest
        head = load_head(inputs, sizes, b, h, variant)
        first_column = first + (band - below) * block.N
        if first_column >= 0:
            run = add_grad_scores(run, first, first_column, head, grad_out, vectors, variant, block)
        if SEVERAL_RUNS:
            if (term - begin) % RUN == RUN - 1:
                run, total = end_run(run, total)
    if SEVERAL_RUNS:
        run += total

    plane = tl.cast(index, tl.int64)
    if shape.batch:
        plane = plane * sizes.B + own_batch
    if shape.heads:
        plane = plane * sizes.H + own_head
    rows = tl.arange(0, block.M)[:, None]
    columns = tl.arange(0, block.N)[None, :]
    offsets = (plane * bands + band) * (block.M * block.N) + (rows * block.N + columns)
    tl.store(tiles + offsets, run)


def sums_by_offset(tiles: Tensor) -> Tensor:
    """Sums tiles (B, H, bands, M, N) along their diagonals, which continue in the next bands.

    Returns:
        (B, H, ·), the sums for each offset of a key from a query, from the lowest on: that of the
        first band's last row and first column.
    """
    M, N = tiles.shape[-2:]
    diagonals = torch.nn.functional.pad(sum_diagonals(tiles), (0, 1))  # M + N for each band
    steps = M // N
    parts = diagonals.unflatten(-1, (steps + 1, N)).unbind(-2)
    # A band's offsets begin N after those of the band before it.
    shifted = [
        torch.nn.functional.pad(part, (0, 0, step, steps - step)) for step, part in enumerate(parts)
    ]
    return sum(shifted[1:], shifted[0]).flatten(-2)
