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
def round_to(values, dtype: tl.constexpr):
    """To nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        # The interpreter would cut bits off.
        bits = values.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        values = tl.where(values == values, rounded.to(tl.float32, bitcast=True), values)
    return values.to(dtype)
