"""What Triton kernels compute alike on a GPU and in the interpreter."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, acc):
    """acc + a @ b, in float32 throughout where a and b are."""
    if INTERPRETED:
        # numpy has no bfloat16, and would multiply the bit patterns.
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def end_run(run, total):
    """Adds the sum of a run of terms to the total of the runs before it.

    Returns what the next run begins with, which is what the total could not take, and the total.

    A chain of n additions can be wrong by n/2 roundings of what it comes to, and is wrong by about
    a quarter of n where all its terms are equal. So a few terms at a time, a run, are added up by
    themselves. The two results add up to exactly what the arguments do (Knuth, "The Art of Computer
    Programming", 4.2.2), but for an infinity, which leaves nothing to the next run.
    """
    new = total + run
    added = new - total
    rest = (total - (new - added)) + (run - added)
    return tl.where(rest - rest == 0.0, rest, 0.0), new


@triton.jit
def round_to(values, dtype: tl.constexpr):
    """To nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        # The interpreter would cut bits off.
        bits = values.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        values = tl.where(values == values, rounded.to(tl.float32, bitcast=True), values)
    return values.to(dtype)
