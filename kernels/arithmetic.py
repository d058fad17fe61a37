"""Arithmetic that the Triton kernels share, on a GPU and in the interpreter."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, acc):
    """Returns acc + a @ b. Operands in float32 are multiplied in full float32."""
    if INTERPRETED:
        # numpy has no bfloat16, and would multiply the bit patterns.
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def end_run(run, total):
    """Adds the sum of a run of terms to the total of the earlier runs.

    Returns the rounding error of this addition, from which the next run starts, and the new total.

    A chain of n additions can be off by n/2 roundings of its result, and is off by about n/4 if all
    its terms are equal. So terms are summed in short runs first. The two results add up to exactly
    ``total + run`` (Knuth, "The Art of Computer Programming", 4.2.2), unless the total is not
    finite. In that case the next run starts from 0.
    """
    new = total + run
    added = new - total
    rest = (total - (new - added)) + (run - added)
    return tl.where(rest - rest == 0.0, rest, 0.0), new


@triton.jit
def round_to(values, dtype: tl.constexpr):
    """Rounds to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16 and values.dtype != dtype:
        # The interpreter would truncate instead.
        bits = values.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        values = tl.where(values == values, rounded.to(tl.float32, bitcast=True), values)
    return values.to(dtype)
