"""One step of the LSTM's cell on a tile: pieces that the forward and the backward share.

The symbols are those of the formula at the head of ``pytorch_ext/reference/lstm.py``. Functions
take and return tiles of block.rows rows by block.columns units. The four gates of a unit are
together in one program, as ``Gates``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from trifuse.kernels.philox import dropout_keep
from trifuse.kernels.recurrent import (
    INF,
    load,
    load_weights,
    saved_offsets,
    sigmoid,
    store,
    tanh,
)

# Arithmetic --------------------------------------------------------------------------------------


@triton.jit
def clip(x, limit: tl.constexpr):
    """Returns x limited to [-limit, limit]."""
    if limit < INF:
        # NaN stays NaN.
        x = tl.where(x > limit, limit, tl.where(x < -limit, -limit, x))
    return x


@triton.jit
def normalise(x, inside, N: tl.constexpr, eps: tl.constexpr):
    """Returns rows of N elements with mean 0 and variance 1, and their rstd."""
    mean = tl.sum(tl.where(inside, x, 0.0), 1)[:, None] / N
    x = tl.where(inside, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1)[:, None] / N + eps)
    return x * rstd, rstd


@triton.jit
def normalise_backward(grad, n, rstd, N: tl.constexpr):
    """Returns the gradient of ``normalise``'s x, from ``grad``, the gradient of its result n.

    ``grad`` and n must be 0 outside a row's N elements.
    """
    mean = tl.sum(grad, 1)[:, None] / N
    mean_n = tl.sum(grad * n, 1)[:, None] / N
    return rstd * (grad - mean - n * mean_n)


# Gates -------------------------------------------------------------------------------------------


class Gates(NamedTuple):
    """A value for each of the four gates. With ``coupled``, f follows from i."""

    i: Any
    f: Any
    g: Any
    o: Any


@triton.jit
def load_gates(pointers, inside, variant: tl.constexpr, dtype: tl.constexpr):
    """Loads all gates. ``pointers`` point to the first."""
    i = load(pointers, inside, dtype)
    g = load(pointers + (variant.G - 2) * variant.H, inside, dtype)
    o = load(pointers + (variant.G - 1) * variant.H, inside, dtype)
    if variant.coupled:
        f = i
    else:
        f = load(pointers + variant.H, inside, dtype)
    return Gates(i, f, g, o)


@triton.jit
def store_gates(pointers, gates, inside, variant: tl.constexpr):
    """Stores all gates. ``pointers`` point to the first; f is left out if gates are coupled."""
    store(pointers, gates.i, inside)
    if not variant.coupled:
        store(pointers + variant.H, gates.f, inside)
    store(pointers + (variant.G - 2) * variant.H, gates.g, inside)
    store(pointers + (variant.G - 1) * variant.H, gates.o, inside)


@triton.jit
def add_gates(x, y):
    """Returns x + y, gate by gate."""
    return Gates(x.i + y.i, x.f + y.f, x.g + y.g, x.o + y.o)


@triton.jit
def multiply_gates(x, y):
    """Returns x · y, gate by gate."""
    return Gates(x.i * y.i, x.f * y.f, x.g * y.g, x.o * y.o)


@triton.jit
def where_gates(condition, x):
    """Returns the gates of x where the condition holds, 0 elsewhere."""
    return Gates(
        tl.where(condition, x.i, 0.0),
        tl.where(condition, x.f, 0.0),
        tl.where(condition, x.g, 0.0),
        tl.where(condition, x.o, 0.0),
    )


@triton.jit
def sum_gates(x, variant: tl.constexpr):
    """Returns the sum over all units of all gates, (block.rows, 1)."""
    total = x.i + x.g + x.o
    if not variant.coupled:
        total += x.f
    return tl.sum(total, 1)[:, None]


@triton.jit
def normalise_gates(x, inside, variant: tl.constexpr):
    """As ``normalise``, over all gates together; x is 0 outside."""
    N: tl.constexpr = variant.G * variant.H
    mean = sum_gates(x, variant) / N
    x = where_gates(inside, Gates(x.i - mean, x.f - mean, x.g - mean, x.o - mean))
    squares = sum_gates(multiply_gates(x, x), variant)
    rstd = 1.0 / tl.sqrt(squares / N + variant.eps)
    return Gates(x.i * rstd, x.f * rstd, x.g * rstd, x.o * rstd), rstd


@triton.jit
def normalise_gates_backward(grad, n, rstd, variant: tl.constexpr):
    """As ``normalise_backward``, over all gates together; ``grad`` and n are 0 outside."""
    N: tl.constexpr = variant.G * variant.H
    mean = sum_gates(grad, variant) / N
    mean_n = sum_gates(multiply_gates(grad, n), variant) / N
    return Gates(
        rstd * (grad.i - mean - n.i * mean_n),
        rstd * (grad.f - mean - n.f * mean_n),
        rstd * (grad.g - mean - n.g * mean_n),
        rstd * (grad.o - mean - n.o * mean_n),
    )


# Parts of a step ---------------------------------------------------------------------------------


@triton.jit
def load_vector(vectors, number, tile, N: tl.constexpr, dtype: tl.constexpr):
    """Loads (1, block.columns) of vector ``number``; vectors have N elements."""
    return load(vectors + number * N + tile.column, tile.column < N, dtype)


@triton.jit
def load_peephole(inputs, k: tl.constexpr, tile, variant: tl.constexpr, dtype: tl.constexpr):
    """Loads peephole k of i, f, o (of i, o with coupled gates), (1, block.columns)."""
    PEEPHOLES: tl.constexpr = variant.G - 1
    return load_vector(inputs.peephole, tile.d * PEEPHOLES + k, tile, variant.H, dtype)


@triton.jit
def load_gate_vectors(vectors, tile, variant: tl.constexpr, dtype: tl.constexpr):
    """Loads a vector for each gate, (1, block.columns), from (D, G, H)."""
    pointers = vectors + tile.d * (variant.G * variant.H) + tile.column
    return load_gates(pointers, tile.column < variant.H, variant, dtype)


@triton.jit
def draw_keep(
    seed, plane, tile, threshold: tl.constexpr, variant: tl.constexpr, block: tl.constexpr
):
    """Draws which elements of a tile dropout or zoneout keeps."""
    if variant.placed:
        place = seed
    else:
        place = None
    return dropout_keep(
        tl.load(seed),
        plane,
        tl.cast(tile.first_row, tl.int32),
        tile.first_column,
        tl.full((), threshold, tl.int32),
        place,
        block.rows,
        block.columns,
    )


@triton.jit
def zoneout_keep(inputs, tile, at, CELL: tl.constexpr, variant: tl.constexpr, block: tl.constexpr):
    """Draws where zoneout in training takes the new state. Rows may be at different positions."""
    plane = ((at.t * 3 + (2 if CELL else 1)) * 2 + tile.d).to(tl.int32)
    threshold: tl.constexpr = variant.threshold_c if CELL else variant.threshold_h
    return draw_keep(inputs.seed, plane, tile, threshold, variant, block)


@triton.jit
def zoneout(
    new, old, inputs, tile, at, CELL: tl.constexpr, variant: tl.constexpr, block: tl.constexpr
):
    """Applies zoneout to c (CELL) or h."""
    p: tl.constexpr = variant.zoneout_c if CELL else variant.zoneout_h
    if p > 0:
        if variant.training:
            new = tl.where(zoneout_keep(inputs, tile, at, CELL, variant, block), new, old)
        else:
            new = p * old + (1 - p) * new
    return new


@triton.jit
def zoneout_backward(
    grad, inputs, tile, at, CELL: tl.constexpr, variant: tl.constexpr, block: tl.constexpr
):
    """Returns the gradients of the new and of the old state."""
    p: tl.constexpr = variant.zoneout_c if CELL else variant.zoneout_h
    if p == 0:
        new = grad
        old = tl.zeros_like(grad)
    elif variant.training:
        keep = zoneout_keep(inputs, tile, at, CELL, variant, block)
        new = tl.where(keep, grad, 0.0)
        old = tl.where(keep, 0.0, grad)
    else:
        new = (1 - p) * grad
        old = p * grad
    return new, old


@triton.jit
def cell_update(a, c, inputs, tile, variant: tl.constexpr):
    """Returns the gates, and u, the cell before its clip, from the preactivations a."""
    dtype: tl.constexpr = c.dtype
    a_i = a.i
    a_f = a.f
    a_o = a.o
    if inputs.peephole is not None:
        a_i += load_peephole(inputs, 0, tile, variant, dtype) * c
        if not variant.coupled:
            a_f += load_peephole(inputs, 1, tile, variant, dtype) * c
    i = sigmoid(a_i)
    if variant.coupled:
        f = 1.0 - i
    else:
        f = sigmoid(a_f)
    g = tanh(a.g)
    u = f * c + i * g
    if inputs.peephole is not None:
        p_o = load_peephole(inputs, variant.G - 2, tile, variant, dtype)
        a_o += p_o * clip(u, variant.cell_clip)
    return Gates(i, f, g, sigmoid(a_o)), u


@triton.jit
def normalise_cell(c, inputs, tile, inside, variant: tl.constexpr):
    """Returns the argument of tanh, the normalised c, and its rstd."""
    if inputs.norm_cell_weight is None:
        value = c
        n = c
        rstd = c
    else:
        dtype: tl.constexpr = c.dtype
        n, rstd = normalise(c, inside, variant.H, variant.eps)
        value = n * load_vector(inputs.norm_cell_weight, tile.d, tile, variant.H, dtype)
        if inputs.norm_cell_bias is not None:
            value += load_vector(inputs.norm_cell_bias, tile.d, tile, variant.H, dtype)
    return value, n, rstd


@triton.jit
def clipped_h_pointers(clipped, tile, at, variant: tl.constexpr):
    """Returns pointers to the elements of ``clipped`` for h."""
    first: tl.constexpr = variant.clip_columns - variant.R
    return clipped + saved_offsets(tile, at.t, variant.clip_columns) + first


@triton.jit
def load_gate_weights(weight_hh, tile, variant: tl.constexpr, block: tl.constexpr):
    """Loads W_hh of each gate, for a program that owns all units."""
    w_i = load_weights(weight_hh, 0, tile, variant.H, variant.G, block)
    w_g = load_weights(weight_hh, variant.G - 2, tile, variant.H, variant.G, block)
    w_o = load_weights(weight_hh, variant.G - 1, tile, variant.H, variant.G, block)
    w_f = w_i
    if not variant.coupled:
        w_f = load_weights(weight_hh, 1, tile, variant.H, variant.G, block)
    return Gates(w_i, w_f, w_g, w_o)
