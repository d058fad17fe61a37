"""The LSTM over a whole sequence, one layer in one or two directions, forward and backward, in
Triton.

The formulas are at the head of ``trifuse/reference/lstm.py``; how they are spread over launches is
at the head of ``trifuse/kernels/recurrent.py``. In addition:

- With a projection a step is two products and two kernels, always launched step by step.
- With layer normalisation a program owns whole rows, otherwise a tile of rows and units.
- Without saved gates (``recompute``) the backward first computes the preactivations of all tokens
  by two products, in the tensor of their gradients, where each step overwrites its own. With layer
  normalisation, W_hh h has a tensor of its own that is used in the same way.
- Gradients of the peepholes and of the norms of W_hh h and c are sums over steps and rows. Each
  program adds up its share in memory, step by step, in runs of steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trifuse.kernels import dropout_add_layer_norm as layer_norm
from trifuse.kernels.arguments import check_shape
from trifuse.kernels.arithmetic import dot, end_run, round_to
from trifuse.kernels.philox import dropout_keep
from trifuse.kernels.recurrent import (
    INF,
    Config,
    Launch,
    Sequences,
    fits_one_launch,
    load,
    load_weights,
    longest_row,
    make_step,
    make_tile,
    of_saved,
    of_state,
    of_token,
    sequence_config,
    sigmoid,
    stack,
    step_config,
    store,
    tanh,
)
from trifuse.reference import philox
from trifuse.reference.lstm import Parameters, by_direction, clipped_columns, masked

# Number of steps whose vector gradients are summed as one chain.
RUN = tl.constexpr(32)

# Kernel arguments --------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """Tensors that both passes read; None if the call has none. Vectors are in the accumulation
    dtype: float32, or float64 for float64."""

    lengths: Tensor | None  # (B,) int64
    seed: Tensor | None  # (1,) int64, for zoneout in training
    dropout: Tensor | None  # (D, B, R): the recurrent dropout's multipliers
    bias: Tensor | None  # (D, G, H): both biases and the forget bias
    peephole: Tensor | None  # (D, P, H)
    norm_hh: Tensor | None  # (D, G, H)
    norm_cell_weight: Tensor | None  # (D, H)
    norm_cell_bias: Tensor | None  # (D, H)


class State(NamedTuple):
    """The state that one step passes to the next."""

    h: Tensor  # (D, B, R)
    operand: Tensor | None  # (D, B, R): h after recurrent dropout, if there is any
    c: Tensor  # (D, B, H), in the accumulation dtype


class Saved(NamedTuple):
    """Results that the forward saves for the backward; None if not saved."""

    gates: Tensor | None  # (D, T, B, G, H): i, f, g, o; with coupled i, g, o
    cells: Tensor | None  # (D, T, B, H): c_t
    clipped: Tensor | None  # bool (D, T, B, ...): H columns if c has a clip, then R if h has one


class Gradients(NamedTuple):
    """Gradients that the backward carries from step to step (h, c) or writes for all tokens.

    The latter may first hold products of the forward, which each step reads and overwrites.
    """

    h: Tensor  # (D, B, R), in the accumulation dtype, without the part through W_hh
    c: Tensor  # (D, B, H), in the accumulation dtype
    gates: Tensor  # (T, B, D, G, H): of the preactivations; with recompute, first their products
    hidden: Tensor | None  # with layer norm, the same shape: of W_hh h; first W_hh h itself


class Past(NamedTuple):
    """Results of the forward that the backward reads."""

    saved: Saved
    c0: Tensor  # (D, B, H), in the accumulation dtype


class Shares(NamedTuple):
    """Gradients of vectors, per row block of the backward; None if the call has no such vector.

    The dimension of 2 holds two sums that are added at the end: that of the current run of steps,
    and that of all runs before it.
    """

    peephole: Tensor | None  # (D, row blocks, P, 2, H)
    norm_hh: Tensor | None  # (D, row blocks, G, 2, H)
    norm_cell: Tensor | None  # (D, row blocks, 2, 2, H): weight and bias


class Variant(NamedTuple):
    """Compile-time parameters of a kernel, besides which tensors are None."""

    H: int
    R: int  # size of h: H, or the size of the projection
    D: int  # directions
    G: int  # gates: 4, or 3 where coupled
    reverse: int  # bit d: direction d reads rows from their ends
    coupled: bool
    projected: bool
    training: bool
    recompute: bool  # in the backward: gates weren't saved
    cell_clip: float
    proj_clip: float
    eps: float
    clip_columns: int  # columns of Saved.clipped
    zoneout_h: float
    zoneout_c: float
    threshold_h: int  # zoneout_h as the threshold of random 16-bit values
    threshold_c: int


class Gates(NamedTuple):
    """A value for each of the four gates. With ``coupled``, f follows from i."""

    i: Any
    f: Any
    g: Any
    o: Any


# Arithmetic --------------------------------------------------------------------------------------


@triton.jit
def _clip(x, limit: tl.constexpr):
    if limit < INF:
        # NaN stays NaN.
        x = tl.where(x > limit, limit, tl.where(x < -limit, -limit, x))
    return x


@triton.jit
def _normalise(x, inside, N: tl.constexpr, eps: tl.constexpr):
    """Returns rows of N elements with mean 0 and variance 1, and their rstd."""
    mean = tl.sum(tl.where(inside, x, 0.0), 1)[:, None] / N
    x = tl.where(inside, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1)[:, None] / N + eps)
    return x * rstd, rstd


@triton.jit
def _normalise_backward(grad, n, rstd, N: tl.constexpr):
    """``grad`` and n must be 0 outside a row's N elements."""
    mean = tl.sum(grad, 1)[:, None] / N
    mean_n = tl.sum(grad * n, 1)[:, None] / N
    return rstd * (grad - mean - n * mean_n)


# Gates -------------------------------------------------------------------------------------------


@triton.jit
def _load_gates(pointers, inside, variant: tl.constexpr, dtype: tl.constexpr):
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
def _store_gates(pointers, gates, inside, variant: tl.constexpr):
    store(pointers, gates.i, inside)
    if not variant.coupled:
        store(pointers + variant.H, gates.f, inside)
    store(pointers + (variant.G - 2) * variant.H, gates.g, inside)
    store(pointers + (variant.G - 1) * variant.H, gates.o, inside)


@triton.jit
def _add_gates(x, y):
    return Gates(x.i + y.i, x.f + y.f, x.g + y.g, x.o + y.o)


@triton.jit
def _multiply_gates(x, y):
    return Gates(x.i * y.i, x.f * y.f, x.g * y.g, x.o * y.o)


@triton.jit
def _where_gates(condition, x):
    return Gates(
        tl.where(condition, x.i, 0.0),
        tl.where(condition, x.f, 0.0),
        tl.where(condition, x.g, 0.0),
        tl.where(condition, x.o, 0.0),
    )


@triton.jit
def _sum_gates(x, variant: tl.constexpr):
    """(block.rows, 1): the sum over all units of all gates."""
    total = x.i + x.g + x.o
    if not variant.coupled:
        total += x.f
    return tl.sum(total, 1)[:, None]


@triton.jit
def _normalise_gates(x, inside, variant: tl.constexpr):
    """As ``_normalise``, over all gates together; x is 0 outside."""
    N: tl.constexpr = variant.G * variant.H
    mean = _sum_gates(x, variant) / N
    x = _where_gates(inside, Gates(x.i - mean, x.f - mean, x.g - mean, x.o - mean))
    squares = _sum_gates(_multiply_gates(x, x), variant)
    rstd = 1.0 / tl.sqrt(squares / N + variant.eps)
    return Gates(x.i * rstd, x.f * rstd, x.g * rstd, x.o * rstd), rstd


@triton.jit
def _normalise_gates_backward(grad, n, rstd, variant: tl.constexpr):
    N: tl.constexpr = variant.G * variant.H
    mean = _sum_gates(grad, variant) / N
    mean_n = _sum_gates(_multiply_gates(grad, n), variant) / N
    return Gates(
        rstd * (grad.i - mean - n.i * mean_n),
        rstd * (grad.f - mean - n.f * mean_n),
        rstd * (grad.g - mean - n.g * mean_n),
        rstd * (grad.o - mean - n.o * mean_n),
    )


# Parts of a step ---------------------------------------------------------------------------------


@triton.jit
def _load_vector(vectors, number, tile, N: tl.constexpr, dtype: tl.constexpr):
    """Loads (1, block.columns) of vector ``number``; vectors have N elements."""
    return load(vectors + number * N + tile.column, tile.column < N, dtype)


@triton.jit
def _load_peephole(inputs, k: tl.constexpr, tile, variant: tl.constexpr, dtype: tl.constexpr):
    PEEPHOLES: tl.constexpr = variant.G - 1
    return _load_vector(inputs.peephole, tile.d * PEEPHOLES + k, tile, variant.H, dtype)


@triton.jit
def _load_of_gates(vectors, tile, variant: tl.constexpr, dtype: tl.constexpr):
    """Loads a vector for each gate, (1, block.columns), from (D, G, H)."""
    pointers = vectors + tile.d * (variant.G * variant.H) + tile.column
    return _load_gates(pointers, tile.column < variant.H, variant, dtype)


@triton.jit
def _draw(seed, plane, tile, threshold: tl.constexpr, block: tl.constexpr):
    return dropout_keep(
        seed, plane, tl.cast(tile.first_row, tl.int32), tile.first_column,
        tl.full((), threshold, tl.int32), block.rows, block.columns,
    )  # fmt: skip


@triton.jit
def _keep(inputs, tile, at, CELL: tl.constexpr, variant: tl.constexpr, block: tl.constexpr):
    """Where zoneout in training takes the new state. Rows may be at different positions."""
    plane = ((at.t * 3 + (2 if CELL else 1)) * 2 + tile.d).to(tl.int32)
    threshold: tl.constexpr = variant.threshold_c if CELL else variant.threshold_h
    return _draw(tl.load(inputs.seed), plane, tile, threshold, block)


@triton.jit
def _zoneout(
    new, old, inputs, tile, at, CELL: tl.constexpr, variant: tl.constexpr, block: tl.constexpr
):
    """Applies zoneout to c (CELL) or h."""
    p: tl.constexpr = variant.zoneout_c if CELL else variant.zoneout_h
    if p > 0:
        if variant.training:
            new = tl.where(_keep(inputs, tile, at, CELL, variant, block), new, old)
        else:
            new = p * old + (1 - p) * new
    return new


@triton.jit
def _zoneout_backward(
    grad, inputs, tile, at, CELL: tl.constexpr, variant: tl.constexpr, block: tl.constexpr
):
    """Returns the gradients of the new and of the old state."""
    p: tl.constexpr = variant.zoneout_c if CELL else variant.zoneout_h
    if p == 0:
        new = grad
        old = tl.zeros_like(grad)
    elif variant.training:
        keep = _keep(inputs, tile, at, CELL, variant, block)
        new = tl.where(keep, grad, 0.0)
        old = tl.where(keep, 0.0, grad)
    else:
        new = (1 - p) * grad
        old = p * grad
    return new, old


@triton.jit
def _cell(a, c, inputs, tile, variant: tl.constexpr):
    """Returns the gates, and u of the formula."""
    dtype: tl.constexpr = c.dtype
    a_i = a.i
    a_f = a.f
    a_o = a.o
    if inputs.peephole is not None:
        a_i += _load_peephole(inputs, 0, tile, variant, dtype) * c
        if not variant.coupled:
            a_f += _load_peephole(inputs, 1, tile, variant, dtype) * c
    i = sigmoid(a_i)
    if variant.coupled:
        f = 1.0 - i
    else:
        f = sigmoid(a_f)
    g = tanh(a.g)
    u = f * c + i * g
    if inputs.peephole is not None:
        p_o = _load_peephole(inputs, variant.G - 2, tile, variant, dtype)
        a_o += p_o * _clip(u, variant.cell_clip)
    return Gates(i, f, g, sigmoid(a_o)), u


@triton.jit
def _normalise_cell(c, inputs, tile, inside, variant: tl.constexpr):
    """Returns the argument of tanh, the normalised c, and its rstd."""
    if inputs.norm_cell_weight is None:
        value = c
        n = c
        rstd = c
    else:
        dtype: tl.constexpr = c.dtype
        n, rstd = _normalise(c, inside, variant.H, variant.eps)
        value = n * _load_vector(inputs.norm_cell_weight, tile.d, tile, variant.H, dtype)
        if inputs.norm_cell_bias is not None:
            value += _load_vector(inputs.norm_cell_bias, tile.d, tile, variant.H, dtype)
    return value, n, rstd


# Forward -----------------------------------------------------------------------------------------


@triton.jit
def _cell_forward(x, v, c, saved, inputs, tile, at, variant: tl.constexpr, block: tl.constexpr):
    """Returns m and the next c from the gates' W_ih x (here x), their W_hh h (here v), and c."""
    dtype: tl.constexpr = c.dtype
    inside = at.runs & (tile.column < variant.H)
    if inputs.norm_hh is not None:
        n, _rstd = _normalise_gates(v, inside, variant)
        v = _multiply_gates(n, _load_of_gates(inputs.norm_hh, tile, variant, dtype))
    a = _add_gates(x, v)
    if inputs.bias is not None:
        a = _add_gates(a, _load_of_gates(inputs.bias, tile, variant, dtype))
    gates, u = _cell(a, c, inputs, tile, variant)
    new = _clip(u, variant.cell_clip)
    if variant.cell_clip < INF and saved.clipped is not None:
        pointers = saved.clipped + of_saved(tile, at.t, variant.clip_columns)
        tl.store(pointers, tl.abs(u) > variant.cell_clip, inside)
    value, _n, _rstd = _normalise_cell(new, inputs, tile, inside, variant)
    m = gates.o * tanh(value)
    c = tl.where(at.runs, _zoneout(new, c, inputs, tile, at, True, variant, block), c)
    if saved.gates is not None:
        pointers = saved.gates + of_saved(tile, at.t, variant.G * variant.H)
        _store_gates(pointers, gates, inside, variant)
    if saved.cells is not None:
        store(saved.cells + of_saved(tile, at.t, variant.H), c, inside)
    return m, c


@triton.jit
def _from_input(products, tile, at, variant: tl.constexpr, dtype: tl.constexpr):
    pointers = products + of_token(tile, at.t, variant.D, variant.G * variant.H)
    return _load_gates(pointers, at.runs & (tile.column < variant.H), variant, dtype)


@triton.jit
def _hidden_forward(new, h, out, inputs, tile, at, variant: tl.constexpr, block: tl.constexpr):
    """Returns the next h in its dtype, from the new h and the last h; writes the output."""
    wide = _zoneout(new, h.to(new.dtype), inputs, tile, at, False, variant, block)
    h = tl.where(at.runs, round_to(wide, h.dtype), h)
    inside = tile.exists & (tile.column < variant.R)
    y = tl.where(at.runs, h, 0.0).to(h.dtype)
    tl.store(out + of_token(tile, at.t, variant.D, variant.R), y, inside)
    return h


@triton.jit
def _drop(h, inputs, tile, variant: tl.constexpr):
    """Returns h after the recurrent dropout, as W_hh multiplies it."""
    if inputs.dropout is not None:
        inside = tile.exists & (tile.column < variant.R)
        dropout = tl.load(inputs.dropout + of_state(tile, variant.R), inside, other=0.0)
        h = round_to(h.to(dropout.dtype) * dropout, h.dtype)
    return h


@triton.jit
def _hidden_step(new, out, state, inputs, tile, at, variant: tl.constexpr, block: tl.constexpr):
    offsets = of_state(tile, variant.R)
    inside = tile.exists & (tile.column < variant.R)
    h = tl.load(state.h + offsets, inside, other=0.0)
    h = _hidden_forward(new, h, out, inputs, tile, at, variant, block)
    tl.store(state.h + offsets, h, inside)
    if state.operand is not None:
        tl.store(state.operand + offsets, _drop(h, inputs, tile, variant), inside)


@triton.jit(do_not_specialize=["step", "T", "B"])
def lstm_forward_step_kernel(
    step,
    from_hidden,  # (D, B, G, H): W_hh h
    products,  # (T, B, D, G, H): W_ih x, after layer norm if there is any
    state,
    out,  # (T, B, D, R)
    hidden,  # (D, B, H): m, if a projection follows; else None
    saved,
    inputs,
    T,
    B,
    variant: tl.constexpr,
    block: tl.constexpr,
):
    """One step, without its products.

    A program owns block.rows rows and block.columns units of one direction (all units with layer
    norm). It reads W_ih x and W_hh h for each of their gates, and c and h; it writes c and h (or
    m), the output, and the gates and c that are saved.

    Floor: per unit 2 · G numbers read and G written in the dtype of the input; c, of 4 bytes, read
    once and written twice; h likewise. All but W_ih x and what is saved stays in the L2 cache, so a
    step is bound by the time from launch to launch.
    """
    tile = make_tile(tl.program_id(0), inputs.lengths, T, B, block)
    at = make_step(tile, step, variant.reverse)
    inside = tile.exists & (tile.column < variant.H)
    dtype: tl.constexpr = state.c.dtype.element_ty
    c_pointers = state.c + of_state(tile, variant.H)
    c = load(c_pointers, inside, dtype)
    offsets = (tile.d * B + tile.row) * (variant.G * variant.H) + tile.column
    v = _load_gates(from_hidden + offsets, inside, variant, dtype)
    x = _from_input(products, tile, at, variant, dtype)
    m, c = _cell_forward(x, v, c, saved, inputs, tile, at, variant, block)
    tl.store(c_pointers, c, inside)
    if variant.projected:
        store(hidden + of_state(tile, variant.H), m, inside)
    else:
        _hidden_step(m, out, state, inputs, tile, at, variant, block)


@triton.jit
def _of_clipped_h(clipped, tile, at, variant: tl.constexpr):
    """Pointers to the elements of ``clipped`` for h."""
    first: tl.constexpr = variant.clip_columns - variant.R
    return clipped + of_saved(tile, at.t, variant.clip_columns) + first


@triton.jit(do_not_specialize=["step", "T", "B"])
def lstm_forward_projection_kernel(
    step,
    projected,  # (D, B, R): W_hr m
    state,
    out,  # (T, B, D, R)
    saved,
    inputs,
    T,
    B,
    variant: tl.constexpr,
    block: tl.constexpr,
):
    """The rest of a step after the projection. A program owns block.rows rows and block.columns
    units of h.

    Floor: W_hr m and h read, h written twice; bound by the time from launch to launch, as above.
    """
    tile = make_tile(tl.program_id(0), inputs.lengths, T, B, block)
    at = make_step(tile, step, variant.reverse)
    dtype: tl.constexpr = state.c.dtype.element_ty
    inside = at.runs & (tile.column < variant.R)
    new = load(projected + of_state(tile, variant.R), inside, dtype)
    if variant.proj_clip < INF and saved.clipped is not None:
        pointers = _of_clipped_h(saved.clipped, tile, at, variant)
        tl.store(pointers, tl.abs(new) > variant.proj_clip, inside)
    new = _clip(new, variant.proj_clip)
    _hidden_step(new, out, state, inputs, tile, at, variant, block)


@triton.jit
def _load_weights(weight_hh, tile, variant: tl.constexpr, block: tl.constexpr):
    w_i = load_weights(weight_hh, 0, tile, variant.H, variant.G, block)
    w_g = load_weights(weight_hh, variant.G - 2, tile, variant.H, variant.G, block)
    w_o = load_weights(weight_hh, variant.G - 1, tile, variant.H, variant.G, block)
    w_f = w_i
    if not variant.coupled:
        w_f = load_weights(weight_hh, 1, tile, variant.H, variant.G, block)
    return Gates(w_i, w_f, w_g, w_o)


@triton.jit(do_not_specialize=["T", "B"])
def lstm_forward_sequence_kernel(
    weight_hh,  # (D, G, H, H)
    products,  # (T, B, D, G, H): W_ih x, after layer norm if there is any
    state,  # the initial state, replaced by the final state
    out,  # (T, B, D, H)
    saved,
    inputs,
    T,
    B,
    variant: tl.constexpr,
    block: tl.constexpr,
):
    """All steps. A program owns block.rows whole rows of one direction.

    It reads the weights once and keeps them in shared memory; h and c stay in registers. While one
    of its rows runs, it reads W_ih x of each step and writes the output and what the backward
    needs; after that it only writes zeros.

    Floor: per step and program, G · block.columns² · block.rows multiplications on one
    multiprocessor's matrix unit, and the latency of one such product and, with layer norm, of the
    sum of a row.
    """
    tile = make_tile(tl.program_id(0), inputs.lengths, T, B, block)
    dtype: tl.constexpr = state.c.dtype.element_ty
    inside = tile.exists & (tile.column < variant.H)
    offsets = of_state(tile, variant.H)
    h = tl.load(state.h + offsets, inside, other=0.0)
    c = load(state.c + offsets, inside, dtype)
    w = _load_weights(weight_hh, tile, variant, block)
    longest = longest_row(tile)
    for step in tl.range(0, longest, num_stages=1):
        at = make_step(tile, step, variant.reverse)
        # Loaded before the products, which hide its latency.
        x = _from_input(products, tile, at, variant, dtype)
        operand = _drop(h, inputs, tile, variant)
        zeros = tl.full((block.rows, block.columns), 0.0, dtype)
        v_i = dot(operand, tl.trans(w.i), zeros)
        v_g = dot(operand, tl.trans(w.g), zeros)
        v_o = dot(operand, tl.trans(w.o), zeros)
        v_f = v_i
        if not variant.coupled:
            v_f = dot(operand, tl.trans(w.f), zeros)
        v = Gates(v_i, v_f, v_g, v_o)
        m, c = _cell_forward(x, v, c, saved, inputs, tile, at, variant, block)
        h = _hidden_forward(m, h, out, inputs, tile, at, variant, block)
    nothing = tl.full((block.rows, block.columns), 0.0, h.dtype)
    for step in range(longest, T):
        at = make_step(tile, step, variant.reverse)
        tl.store(out + of_token(tile, at.t, variant.D, variant.R), nothing, inside)
    tl.store(state.h + offsets, h, inside)
    tl.store(state.c + offsets, c, inside)


@triton.jit(do_not_specialize=["B"])
def lstm_dropout_kernel(
    multipliers,  # (D, B, R)
    seed,
    B,
    threshold: tl.constexpr,
    scale: tl.constexpr,
    variant: tl.constexpr,
    block: tl.constexpr,
):
    """The recurrent dropout's multipliers, the same at every step. A program owns a tile of them.

    Floor: the bytes that it writes.
    """
    tile = make_tile(tl.program_id(0), None, 0, B, block)
    keep = _draw(tl.load(seed), tile.d, tile, threshold, block)
    values = keep.to(multipliers.dtype.element_ty) * scale
    inside = tile.exists & (tile.column < variant.R)
    tl.store(multipliers + of_state(tile, variant.R), values, inside)


# Backward ----------------------------------------------------------------------------------------


class Recalled(NamedTuple):
    """A step of the forward, loaded or recomputed for the backward."""

    gates: Gates
    c: Any  # c_{t-1}
    new: Any  # c̃
    n: Gates  # with layer norm: W_hh h normalised
    rstd: Any


@triton.jit
def _recall(past, grads, inputs, tile, at, variant: tl.constexpr):
    saved = past.saved
    dtype: tl.constexpr = past.c0.dtype.element_ty
    inside = at.runs & (tile.column < variant.H)
    c = load(past.c0 + of_state(tile, variant.H), inside & ~at.begun, dtype)
    pointers = saved.cells + of_saved(tile, at.before, variant.H)
    c += load(pointers, inside & at.begun, dtype)
    of_products = of_token(tile, at.t, variant.D, variant.G * variant.H)
    if variant.recompute:
        a = _load_gates(grads.gates + of_products, inside, variant, dtype)
        n = a
    else:
        pointers = saved.gates + of_saved(tile, at.t, variant.G * variant.H)
        gates = _load_gates(pointers, inside, variant, dtype)
        if variant.coupled:
            gates = Gates(gates.i, 1.0 - gates.i, gates.g, gates.o)
        u = gates.f * c + gates.i * gates.g
        n = gates
    rstd = c
    if inputs.norm_hh is not None:
        v = _load_gates(grads.hidden + of_products, inside, variant, dtype)
        n, rstd = _normalise_gates(v, inside, variant)
    if variant.recompute:
        if inputs.norm_hh is not None:
            weight = _load_of_gates(inputs.norm_hh, tile, variant, dtype)
            a = _add_gates(a, _multiply_gates(n, weight))
        if inputs.bias is not None:
            a = _add_gates(a, _load_of_gates(inputs.bias, tile, variant, dtype))
        gates, u = _cell(a, c, inputs, tile, variant)
    if variant.zoneout_c > 0:
        new = _clip(u, variant.cell_clip)
    else:
        new = load(saved.cells + of_saved(tile, at.t, variant.H), inside, dtype)
    return Recalled(gates, c, new, n, rstd)


@triton.jit
def _accumulate(shares, number, values, tile, at, H: tl.constexpr, block: tl.constexpr):
    """Adds the sum of ``values`` over the rows that run to vector ``number`` of ``shares``."""
    column = tile.first_column + tl.arange(0, block.columns)
    pointers = shares + number * (2 * H) + column
    run = tl.load(pointers, column < H, other=0.0) + tl.sum(tl.where(at.runs, values, 0.0), 0)
    if at.number % RUN == 0:
        run, total = end_run(run, tl.load(pointers + H, column < H, other=0.0))
        tl.store(pointers + H, total, column < H)
    tl.store(pointers, run, column < H)


@triton.jit
def _accumulate_gates(shares, number, values, tile, at, variant: tl.constexpr, block: tl.constexpr):
    _accumulate(shares, number, values.i, tile, at, variant.H, block)
    if not variant.coupled:
        _accumulate(shares, number + 1, values.f, tile, at, variant.H, block)
    _accumulate(shares, number + variant.G - 2, values.g, tile, at, variant.H, block)
    _accumulate(shares, number + variant.G - 1, values.o, tile, at, variant.H, block)


@triton.jit
def _cell_backward(
    dm, dc, past, grads, shares, inputs, tile, at, variant: tl.constexpr, block: tl.constexpr
):
    """Returns the gradients of W_hh h and of c_{t-1}; writes the gradients of the preactivations.

    In rows that don't run, dm and the gradients of the gates are 0, and dc stays the same.
    """
    dtype: tl.constexpr = dc.dtype
    inside = at.runs & (tile.column < variant.H)
    recalled = _recall(past, grads, inputs, tile, at, variant)
    i = recalled.gates.i
    f = recalled.gates.f
    g = recalled.gates.g
    o = recalled.gates.o
    c = recalled.c
    slot = tile.d * tl.num_programs(0) + tile.block_row
    value, n, rstd = _normalise_cell(recalled.new, inputs, tile, inside, variant)
    y = tanh(value)
    du = dm * o * (1.0 - y * y)
    if inputs.norm_cell_weight is not None:
        _accumulate(shares.norm_cell, slot * 2, du * n, tile, at, variant.H, block)
        _accumulate(shares.norm_cell, slot * 2 + 1, du, tile, at, variant.H, block)
        du *= _load_vector(inputs.norm_cell_weight, tile.d, tile, variant.H, dtype)
        du = _normalise_backward(du, n, rstd, variant.H)
    da_o = dm * y * o * (1.0 - o)
    dnew, dold = _zoneout_backward(dc, inputs, tile, at, True, variant, block)
    du += dnew
    if inputs.peephole is not None:
        du += da_o * _load_peephole(inputs, variant.G - 2, tile, variant, dtype)
    if variant.cell_clip < INF:
        pointers = past.saved.clipped + of_saved(tile, at.t, variant.clip_columns)
        du = tl.where(tl.load(pointers, inside, other=1), 0.0, du)
    da_g = du * i * (1.0 - g * g)
    if variant.coupled:
        da_i = du * (g - c) * i * (1.0 - i)
        da_f = da_i
    else:
        da_i = du * g * i * (1.0 - i)
        da_f = du * c * f * (1.0 - f)
    dold += du * f
    da = _where_gates(inside, Gates(da_i, da_f, da_g, da_o))
    if inputs.peephole is not None:
        PEEPHOLES: tl.constexpr = variant.G - 1
        peephole = slot * PEEPHOLES
        dold += da.i * _load_peephole(inputs, 0, tile, variant, dtype)
        _accumulate(shares.peephole, peephole, da.i * c, tile, at, variant.H, block)
        if not variant.coupled:
            dold += da.f * _load_peephole(inputs, 1, tile, variant, dtype)
            _accumulate(shares.peephole, peephole + 1, da.f * c, tile, at, variant.H, block)
        peephole += PEEPHOLES - 1
        _accumulate(shares.peephole, peephole, da.o * recalled.new, tile, at, variant.H, block)
    written = tile.exists & (tile.column < variant.H)
    of_products = of_token(tile, at.t, variant.D, variant.G * variant.H)
    _store_gates(grads.gates + of_products, da, written, variant)
    dv = da
    if inputs.norm_hh is not None:
        da_n = _multiply_gates(da, recalled.n)
        _accumulate_gates(shares.norm_hh, slot * variant.G, da_n, tile, at, variant, block)
        dn = _multiply_gates(da, _load_of_gates(inputs.norm_hh, tile, variant, dtype))
        dv = _normalise_gates_backward(dn, recalled.n, recalled.rstd, variant)
        dv = _where_gates(inside, dv)
        _store_gates(grads.hidden + of_products, dv, written, variant)
    return dv, tl.where(at.runs, dold, dc)


@triton.jit
def _hidden_backward(
    dh, through, grad_out, inputs, tile, at, variant: tl.constexpr, block: tl.constexpr
):
    """Returns the gradient of the new h, and that of h_{t-1} without its part through W_hh.

    ``through`` is the part through W_hh from the next step: 0 for a row without that step. In a row
    that doesn't run, dh is kept.
    """
    inside = at.runs & (tile.column < variant.R)
    if inputs.dropout is not None:
        through *= tl.load(inputs.dropout + of_state(tile, variant.R), inside, other=0.0)
    total = dh + through
    total += load(grad_out + of_token(tile, at.t, variant.D, variant.R), inside, dh.dtype)
    new, old = _zoneout_backward(total, inputs, tile, at, False, variant, block)
    return tl.where(at.runs, new, 0.0), tl.where(at.runs, old, dh)


@triton.jit
def _hidden_backward_step(
    through, grad_out, grads, inputs, tile, at, variant: tl.constexpr, block: tl.constexpr
):
    dtype: tl.constexpr = grads.h.dtype.element_ty
    offsets = of_state(tile, variant.R)
    inside = tile.exists & (tile.column < variant.R)
    dh = tl.load(grads.h + offsets, inside, other=0.0)
    through = load(through + offsets, inside, dtype)
    new, dh = _hidden_backward(dh, through, grad_out, inputs, tile, at, variant, block)
    tl.store(grads.h + offsets, dh, inside)
    return new


@triton.jit(do_not_specialize=["step", "T", "B"])
def lstm_backward_projection_kernel(
    step,
    through,  # (D, B, R): the gradient of h through the product of the next step
    grad_out,  # (T, B, D, R)
    past,
    grads,
    operand,  # (D, B, R): the gradient of W_hr m
    grad_projected,  # (D, T, B, R): the gradient of W_hr m for all steps
    inputs,
    T,
    B,
    variant: tl.constexpr,
    block: tl.constexpr,
):
    """Turns the gradient of h into that of W_hr m. A program owns block.rows rows and block.columns
    units of h.

    Floor: two tensors of the size of h read and two written in the dtype of the input, and one of 4
    bytes read and written; bound by the time from launch to launch, as in the forward.
    """
    tile = make_tile(tl.program_id(0), inputs.lengths, T, B, block)
    at = make_step(tile, step, variant.reverse)
    dq = _hidden_backward_step(through, grad_out, grads, inputs, tile, at, variant, block)
    inside = at.runs & (tile.column < variant.R)
    if variant.proj_clip < INF:
        pointers = _of_clipped_h(past.saved.clipped, tile, at, variant)
        dq = tl.where(tl.load(pointers, inside, other=1), 0.0, dq)
    written = tile.exists & (tile.column < variant.R)
    store(operand + of_state(tile, variant.R), dq, written)
    store(grad_projected + of_saved(tile, at.t, variant.R), dq, written)


@triton.jit(do_not_specialize=["step", "T", "B"])
def lstm_backward_step_kernel(
    step,
    through,  # (D, B, H): the gradient of m; without a projection as in the kernel above
    grad_out,  # (T, B, D, R)
    past,
    grads,
    operand,  # (D, B, G, H): the gradient of W_hh h
    shares,
    inputs,
    T,
    B,
    variant: tl.constexpr,
    block: tl.constexpr,
):
    """One step of the backward, without its products.

    A program owns block.rows rows and block.columns units of one direction (all units with layer
    norm). It reads their gates, c before and after the step, and the gradients of h (or m) and c;
    it writes the gradients of the preactivations, twice, and of c and h.

    Floor: per unit G + 2 numbers read and 2 · G written in the dtype of the input, four of 4 bytes
    read and two written; bound by the time from launch to launch, as in the forward.
    """
    tile = make_tile(tl.program_id(0), inputs.lengths, T, B, block)
    at = make_step(tile, step, variant.reverse)
    dtype: tl.constexpr = grads.c.dtype.element_ty
    inside = tile.exists & (tile.column < variant.H)
    offsets = of_state(tile, variant.H)
    if variant.projected:
        dm = load(through + offsets, inside & at.runs, dtype)
    else:
        dm = _hidden_backward_step(through, grad_out, grads, inputs, tile, at, variant, block)
    dc = tl.load(grads.c + offsets, inside, other=0.0)
    dv, dc = _cell_backward(dm, dc, past, grads, shares, inputs, tile, at, variant, block)
    tl.store(grads.c + offsets, dc, inside)
    offsets = (tile.d * B + tile.row) * (variant.G * variant.H) + tile.column
    _store_gates(operand + offsets, dv, inside, variant)


@triton.jit(do_not_specialize=["T", "B"])
def lstm_backward_sequence_kernel(
    weight_hh,  # (D, G, H, H)
    grad_out,  # (T, B, D, H)
    past,
    grads,
    shares,
    inputs,
    T,
    B,
    variant: tl.constexpr,
    block: tl.constexpr,
):
    """All steps, backwards. A program owns block.rows whole rows of one direction and keeps the
    weights as in the forward; the gradients of h and c stay in registers.

    Floor: as in the forward, plus reading the gates.
    """
    tile = make_tile(tl.program_id(0), inputs.lengths, T, B, block)
    dtype: tl.constexpr = grads.c.dtype.element_ty
    narrow: tl.constexpr = weight_hh.dtype.element_ty
    inside = tile.exists & (tile.column < variant.H)
    offsets = of_state(tile, variant.H)
    dh = tl.load(grads.h + offsets, inside, other=0.0)
    dc = tl.load(grads.c + offsets, inside, other=0.0)
    through = tl.full((block.rows, block.columns), 0.0, dtype)
    nothing = Gates(through, through, through, through)
    longest = longest_row(tile)
    for step in range(longest, T):
        at = make_step(tile, step, variant.reverse)
        of_products = of_token(tile, at.t, variant.D, variant.G * variant.H)
        _store_gates(grads.gates + of_products, nothing, inside, variant)
        if inputs.norm_hh is not None:
            _store_gates(grads.hidden + of_products, nothing, inside, variant)
    w = _load_weights(weight_hh, tile, variant, block)
    for back in tl.range(0, longest, num_stages=1):
        step = longest - 1 - back
        at = make_step(tile, step, variant.reverse)
        dm, dh = _hidden_backward(dh, through, grad_out, inputs, tile, at, variant, block)
        dv, dc = _cell_backward(dm, dc, past, grads, shares, inputs, tile, at, variant, block)
        through = dot(round_to(dv.i, narrow), w.i, tl.full((block.rows, block.columns), 0.0, dtype))
        if not variant.coupled:
            through = dot(round_to(dv.f, narrow), w.f, through)
        through = dot(round_to(dv.g, narrow), w.g, through)
        through = dot(round_to(dv.o, narrow), w.o, through)
        # The thread that reads a share may not be the one that wrote it in the step before.
        tl.debug_barrier()
    if inputs.dropout is not None:
        through *= tl.load(inputs.dropout + offsets, inside, other=0.0)
    tl.store(grads.h + offsets, dh + through, inside)
    tl.store(grads.c + offsets, dc, inside)


@triton.jit(do_not_specialize=["T", "B"])
def lstm_hidden_kernel(
    hidden,  # (D, T, B, H): m
    past,
    grads,
    inputs,
    T,
    B,
    variant: tl.constexpr,
    block: tl.constexpr,
):
    """Computes m of all steps, for the gradient of the projection. A program owns block.rows rows
    and block.columns units of one step (all units with layer norm).

    Floor with recompute: per unit G numbers read and one written in the dtype of the input, two of
    4 bytes read. With saved gates and without zoneout of c, only o and c are read.
    """
    blocks = tl.cdiv(B, block.rows)
    program = tl.program_id(0)
    tile = make_tile(program % blocks, inputs.lengths, T, B, block)
    step = program // blocks
    at = make_step(tile, step, variant.reverse)
    inside = at.runs & (tile.column < variant.H)
    recalled = _recall(past, grads, inputs, tile, at, variant)
    value, _n, _rstd = _normalise_cell(recalled.new, inputs, tile, inside, variant)
    m = tl.where(at.runs, recalled.gates.o * tanh(value), 0.0)
    written = tile.exists & (tile.column < variant.H)
    store(hidden + of_saved(tile, at.t, variant.H), m, written)


# Launchers ---------------------------------------------------------------------------------------


def lstm_forward(
    input: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    parameters: Sequence[Tensor | None],
    lengths: Tensor | None,
    seed: Tensor | None,
    *options: Any,
) -> tuple[Tensor, ...]:
    """Implements the op ``lstm_forward``. float64 is for checking the formulas: it is slow, and
    does not support layer norm."""
    *call_options, save = options
    with torch.cuda.device_of(input):
        call = _Call(input, parameters, lengths, seed, *call_options)
        variant, inputs, of, T, B = call.variant, call.inputs, call.sequences, call.T, call.B
        h = of.zeros_or_copy(h0, variant.R, of.dtype)
        dropped = None if inputs.dropout is None else (h * inputs.dropout).to(of.dtype)
        state = State(h, dropped, of.zeros_or_copy(c0, variant.H, of.wide))
        out = h.new_empty(T, B, variant.D * variant.R)
        gates = h.new_empty((variant.D, T, B, variant.G * variant.H) if save == 2 else (0,))
        cells = state.c.new_empty((variant.D, T, B, variant.H) if save else (0,))
        marks = save and variant.clip_columns > 0
        clipped = out.new_empty(
            (variant.D, T, B, variant.clip_columns) if marks else (0,), dtype=torch.bool
        )
        saved = Saved(
            gates if save == 2 else None, cells if save else None, clipped if marks else None
        )
        products = call.normalised(of.products(input.flatten(0, 1)))
        if call.one_launch:
            sequence = call.prepare(lstm_forward_sequence_kernel, variant.H)
            sequence(of.weight_hh, products, state, out, saved, inputs, T, B)
        else:
            _forward_steps(call, products, state, out, saved)
    return out, state.h, state.c, gates, cells, clipped


def _forward_steps(call: _Call, products: Tensor, state: State, out: Tensor, saved: Saved) -> None:
    variant, inputs, T, B = call.variant, call.inputs, call.T, call.B
    operand = state.h if state.operand is None else state.operand
    weight_hh = call.sequences.weight_hh.mT
    from_hidden = operand.new_empty(variant.D, B, variant.G * variant.H)
    cell = call.prepare(lstm_forward_step_kernel, variant.H)
    if call.weight_hr is None:
        for step in range(T):
            torch.bmm(operand, weight_hh, out=from_hidden)
            cell(step, from_hidden, products, state, out, None, saved, inputs, T, B)
        return
    weight_hr = call.weight_hr.mT
    m, projected = operand.new_empty(variant.D, B, variant.H), torch.empty_like(operand)
    projection = call.prepare(lstm_forward_projection_kernel, variant.R)
    for step in range(T):
        torch.bmm(operand, weight_hh, out=from_hidden)
        cell(step, from_hidden, products, state, out, m, saved, inputs, T, B)
        torch.bmm(m, weight_hr, out=projected)
        projection(step, projected, state, out, saved, inputs, T, B)


def lstm_backward(
    grad_output: Tensor,
    grad_h_n: Tensor | None,
    grad_c_n: Tensor | None,
    input: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    parameters: Sequence[Tensor | None],
    lengths: Tensor | None,
    seed: Tensor | None,
    output: Tensor,
    gates: Tensor,
    cells: Tensor,
    clipped: Tensor,
    *options: Any,
) -> list[Tensor]:
    """Implements the op ``lstm_backward``."""
    *call_options, wanted = options
    recompute = gates.dim() == 1
    H = cells.shape[-1]
    _check_backward(input, h0, c0, parameters, lengths, output, H, *call_options[:2])
    T, B, D = *input.shape[:2], len(call_options[0])
    check_shape("grad_output", grad_output, output.shape)
    check_shape("grad_h_n", grad_h_n, (D, B, output.shape[2] // D))
    check_shape("grad_c_n", grad_c_n, (D, B, H))
    check_shape("cells", cells, (D, T, B, H))
    if not recompute:
        check_shape("gates", gates, (D, T, B, (3 if call_options[1] else 4) * H))
    with torch.cuda.device_of(input):
        call = _Call(input, parameters, lengths, seed, *call_options, recompute=recompute)
        variant, of = call.variant, call.sequences
        x = masked(input, of.valid).flatten(0, 1)
        hd = of.before(output, h0)
        if call.inputs.dropout is not None:
            hd = (hd * call.inputs.dropout[:, None]).to(of.dtype)
        grads = Gradients(
            of.zeros_or_copy(grad_h_n, variant.R, of.wide),
            of.zeros_or_copy(grad_c_n, variant.H, of.wide),
            *_rebuilt(call, x, hd),
        )
        past = Past(
            Saved(None if recompute else gates, cells, clipped if clipped.numel() else None),
            of.zeros_or_copy(c0, variant.H, of.wide),
        )
        shares = call.shares()
        if call.one_launch:
            sequence = call.prepare(lstm_backward_sequence_kernel, variant.H)
            sequence(
                of.weight_hh, grad_output.contiguous(), past, grads, shares, call.inputs, call.T,
                call.B,
            )  # fmt: skip
            projection = None
        else:
            projection = _backward_steps(call, grad_output.contiguous(), past, grads, shares)
        found = _gradients(call, x, hd, grads, shares, projection, wanted)
    tensors = (input, h0, c0, *parameters)
    return [
        input.new_empty(0) if grad is None or t is None else grad.to(t.dtype).view(t.shape)
        for grad, t in zip(found, tensors, strict=True)
    ]


def _check_backward(
    input: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    parameters: Sequence[Tensor | None],
    lengths: Tensor | None,
    output: Tensor,
    H: int,
    reverse: Sequence[bool],
    coupled: bool,
) -> None:
    """Raises ValueError unless the tensors of a backward still fit one call."""
    (T, B, features), D, G = input.shape, len(reverse), 3 if coupled else 4
    R = output.shape[-1] // D
    gates = (G * H,)
    shapes: tuple[tuple[int, ...], ...] = (
        (G * H, features), (G * H, R), gates, gates, (R, H), (G - 1, H), gates, gates, (H,), (H,)
    )  # fmt: skip
    for way in by_direction(Parameters, parameters):
        for name, t, shape in zip(Parameters._fields, way, shapes, strict=True):
            check_shape(name, t, shape)
    check_shape("h0", h0, (D, B, R))
    check_shape("c0", c0, (D, B, H))
    check_shape("lengths", lengths, (B,))
    check_shape("output", output, (T, B, D * R))


def _rebuilt(call: _Call, x: Tensor, hd: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns ``gates`` and ``hidden`` of Gradients, with the products that the steps read."""
    variant, of = call.variant, call.sequences
    shape = (call.T, call.B, variant.D, variant.G * variant.H)
    gates = call.normalised(of.products(x)) if variant.recompute else x.new_empty(shape)
    hidden = None if call.inputs.norm_hh is None else x.new_empty(shape)
    for d in range(variant.D):
        h, weight = hd[d].flatten(0, 1), of.weight_hh[d].mT
        if hidden is not None:
            torch.mm(h, weight, out=of.tokens(hidden, d))
        elif variant.recompute:
            of.tokens(gates, d).addmm_(h, weight)
    return gates, hidden


def _backward_steps(
    call: _Call, grad_out: Tensor, past: Past, grads: Gradients, shares: Shares
) -> tuple[Tensor, Tensor] | None:
    """With a projection, returns the gradient of W_hr m (D, T, B, R) and m (D, T, B, H)."""
    variant, inputs, T, B = call.variant, call.inputs, call.T, call.B
    weight_hh, weight_hr = call.sequences.weight_hh, call.weight_hr
    through = grad_out.new_zeros(variant.D, B, variant.R)
    operand = grad_out.new_empty(variant.D, B, variant.G * variant.H)
    cell = call.prepare(lstm_backward_step_kernel, variant.H)
    if weight_hr is None:
        for step in reversed(range(T)):
            cell(step, through, grad_out, past, grads, operand, shares, inputs, T, B)
            torch.bmm(operand, weight_hh, out=through)
        call.add_through(grads, through)
        return None
    m = grad_out.new_empty(variant.D, T, B, variant.H)
    call.prepare(lstm_hidden_kernel, variant.H, steps=T)(m, past, grads, inputs, T, B)
    dqs = grad_out.new_empty(variant.D, T, B, variant.R)
    dq, dm = torch.empty_like(through), grad_out.new_empty(variant.D, B, variant.H)
    projection = call.prepare(lstm_backward_projection_kernel, variant.R)
    for step in reversed(range(T)):
        projection(step, through, grad_out, past, grads, dq, dqs, inputs, T, B)
        torch.bmm(dq, weight_hr, out=dm)
        cell(step, dm, grad_out, past, grads, operand, shares, inputs, T, B)
        torch.bmm(operand, weight_hh, out=through)
    call.add_through(grads, through)
    return dqs, m


def _gradients(
    call: _Call,
    x: Tensor,
    hd: Tensor,
    grads: Gradients,
    shares: Shares,
    projection: tuple[Tensor, Tensor] | None,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of input, h0, c0 and parameters, not yet in their dtypes; None if not wanted."""
    of, of_input = call.sequences, grads.gates
    of_norms: Sequence[Tensor | None] = [None] * call.variant.D
    if call.norms[0] is not None:
        of_input, of_norms = _normalised_backward(call, grads.gates, of.products(x))
    of_hidden = grads.gates if grads.hidden is None else grads.hidden
    results: list[Tensor | None] = [
        of_input.flatten(2).flatten(0, 1) @ of.weight_ih if wanted[0] else None,
        grads.h if wanted[1] else None,
        grads.c if wanted[2] else None,
    ]
    for d, wants in enumerate(by_direction(Parameters, wanted[3:])):
        found: dict[str, Tensor | None] = dict.fromkeys(Parameters._fields)
        if wants.weight_ih:
            found["weight_ih"] = of.tokens(of_input, d).mT @ x
        if wants.weight_hh:
            found["weight_hh"] = of.tokens(of_hidden, d).mT @ hd[d].flatten(0, 1)
        for name in ("bias_ih", "bias_hh"):
            if getattr(wants, name):
                found[name] = of.tokens(grads.gates, d).sum(0, dtype=of.wide)
        if wants.weight_hr and projection is not None:
            dq, m = (t[d].flatten(0, 1) for t in projection)
            found["weight_hr"] = dq.mT @ m
        if wants.weight_peephole and shares.peephole is not None:
            found["weight_peephole"] = _added_up(shares.peephole[d])
        if wants.norm_ih_weight:
            found["norm_ih_weight"] = of_norms[d]
        if wants.norm_hh_weight and shares.norm_hh is not None:
            found["norm_hh_weight"] = _added_up(shares.norm_hh[d])
        for i, name in enumerate(("norm_cell_weight", "norm_cell_bias")):
            if getattr(wants, name) and shares.norm_cell is not None:
                found[name] = _added_up(shares.norm_cell[d, :, i])
        results += found.values()
    return results


def _added_up(shares: Tensor) -> Tensor:
    """Sums over row blocks, the first dimension, and over runs of steps, the last but one."""
    return shares[..., 1, :].sum(0) + shares[..., 0, :].sum(0)


def _normalised_backward(
    call: _Call, grad: Tensor, products: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of ``_Call.normalised``: of ``products`` (T, B, D, G·H) and of the gains."""
    of_products, of_gains = [], []
    for d, gain in enumerate(call.norms):
        x, eps, vectors = products[:, :, d], call.variant.eps, (gain, None, None, None)
        *_, mean, rstd = layer_norm.dropout_add_layer_norm_forward(
            x, None, *vectors, 0.0, eps, False, False, x.dtype
        )
        found = layer_norm.dropout_add_layer_norm_backward(
            grad[:, :, d], None, x, None, *vectors, mean, rstd, 0.0, eps, False, False, x.dtype,
            (True, False, True, False, False),
        )  # fmt: skip
        of_products.append(found[0])
        of_gains.append(found[2])
    return torch.stack(of_products, 2), of_gains


class _Call:
    """A call of the operator, converted to the kernels' arguments."""

    def __init__(
        self,
        input: Tensor,
        parameters: Sequence[Tensor | None],
        lengths: Tensor | None,
        seed: Tensor | None,
        reverse: Sequence[bool],
        coupled: bool,
        forget_bias: float,
        cell_clip: float | None,
        proj_clip: float | None,
        eps: float,
        zoneout_h: float,
        zoneout_c: float,
        recurrent_dropout: float,
        training: bool,
        *,
        recompute: bool = False,
    ) -> None:
        given = by_direction(Parameters, parameters)
        self.sequences = of = Sequences(
            input, [p.weight_ih for p in given], [p.weight_hh for p in given], lengths, reverse
        )
        self.T, self.B = of.T, of.B
        self.weight_hr = stack([p.weight_hr for p in given], of.dtype)  # (D, R, H)
        self.norms = [p.norm_ih_weight for p in given]
        G = 3 if coupled else 4
        H, R = of.weight_hh.shape[1] // G, of.weight_hh.shape[2]
        self.variant = Variant(
            H=H,
            R=R,
            D=of.D,
            G=G,
            reverse=of.reverse,
            coupled=coupled,
            projected=self.weight_hr is not None,
            training=training,
            recompute=recompute,
            cell_clip=math.inf if cell_clip is None else cell_clip,
            proj_clip=math.inf if proj_clip is None else proj_clip,
            clip_columns=clipped_columns(H, R, cell_clip, proj_clip),
            eps=eps,
            zoneout_h=zoneout_h,
            zoneout_c=zoneout_c,
            threshold_h=philox.threshold(zoneout_h),
            threshold_c=philox.threshold(zoneout_c),
        )
        self.inputs = Inputs(
            lengths=of.lengths,
            seed=seed if training and max(zoneout_h, zoneout_c) > 0 else None,
            dropout=None,
            bias=_bias(of, given, forget_bias),
            peephole=stack([p.weight_peephole for p in given], of.wide),
            norm_hh=stack([p.norm_hh_weight for p in given], of.wide),
            norm_cell_weight=stack([p.norm_cell_weight for p in given], of.wide),
            norm_cell_bias=stack([p.norm_cell_bias for p in given], of.wide),
        )
        fits = fits_one_launch(input.device, of.dtype, H, gates=4)
        self.one_launch = fits and self.weight_hr is None
        if training and recurrent_dropout > 0:
            dropout = of.zeros_or_copy(None, R, of.wide)
            scale = philox.keep_scale(recurrent_dropout)
            fill = self.prepare(lstm_dropout_kernel, R)
            fill(dropout, seed, self.B, philox.threshold(recurrent_dropout), scale)
            self.inputs = self.inputs._replace(dropout=dropout)

    def normalised(self, products: Tensor) -> Tensor:
        """W_ih x (T, B, D, G·H) after layer norm, if there is any."""
        if self.norms[0] is None:
            return products
        eps, dtype = self.variant.eps, products.dtype
        results = [
            layer_norm.dropout_add_layer_norm_forward(
                products[:, :, d], None, gain, None, None, None, 0.0, eps, False, False, dtype
            )[0]
            for d, gain in enumerate(self.norms)
        ]
        return torch.stack(results, 2)

    def shares(self) -> Shares:
        variant, inputs = self.variant, self.inputs
        blocks = triton.cdiv(self.B, self._config(variant.H).block.rows)

        def zeros(like: Tensor | None, vectors: int) -> Tensor | None:
            if like is None:
                return None
            return like.new_zeros(variant.D, blocks, vectors, 2, variant.H)

        return Shares(
            zeros(inputs.peephole, variant.G - 1),
            zeros(inputs.norm_hh, variant.G),
            zeros(inputs.norm_cell_weight, 2),
        )

    def add_through(self, grads: Gradients, through: Tensor) -> None:
        """Completes the gradient of h0 with the part through the product of the first step."""
        dropout = self.inputs.dropout
        grads.h.add_(through if dropout is None else through * dropout)

    def prepare(self, kernel: Any, columns: int, steps: int = 1) -> Launch:
        """Returns the launch of a kernel over that many units."""
        config = self._config(columns)
        grid = self.sequences.grid(config, columns, steps)
        return Launch(kernel, grid, config, self.variant)

    def _config(self, columns: int) -> Config:
        if self.one_launch:
            return sequence_config(self.variant.H)
        return step_config(self.B, columns, whole_rows=self.inputs.norm_hh is not None)


def _bias(of: Sequences, given: list[Parameters], forget_bias: float) -> Tensor | None:
    """(D, G·H): the sum of both biases and the forget bias, which is 0 with coupled gates."""
    vectors = [[v for v in (p.bias_ih, p.bias_hh) if v is not None] for p in given]
    if not vectors[0] and forget_bias == 0:
        return None
    D, rows, _ = of.weight_hh.shape
    bias = of.weight_hh.new_zeros((D, rows), dtype=of.wide)
    for own, summands in zip(bias, vectors, strict=True):
        for summand in summands:
            own += summand
    bias[:, rows // 4 : rows // 2] += forget_bias
    return bias
