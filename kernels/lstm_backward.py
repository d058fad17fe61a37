"""The LSTM's kernels of the backward: one step, its projection, a whole sequence, and m of all
steps.

Steps run from the last to the first. At each step the gradient of h_t is the sum of three parts:
the gradient of y_t; ``dh_recurrent``, the part through the product W_hh h of the next step; and
``dh``, the part that zoneout passes on from the next step. A row past its length keeps ``dh``,
which is the gradient of h_n there.

Without saved gates (``recompute``) the preactivations are recomputed from W_ih x + W_hh h, which
torch has stored for all tokens in ``Gradients.gates``; each step overwrites its own with their
gradients. With layer normalisation, W_hh h is in ``Gradients.products_hh`` and used in the same
way.

Gradients of the peepholes and of the norms of W_hh h and c are sums over steps and rows. Each
program adds its share in memory at every step, in runs of steps; torch adds up the shares.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from trifuse.kernels.arithmetic import dot, end_run, round_to
from trifuse.kernels.lstm_cell import (
    Gates,
    add_gates,
    cell_update,
    clip,
    clipped_h_pointers,
    load_gate_vectors,
    load_gate_weights,
    load_gates,
    load_peephole,
    load_vector,
    multiply_gates,
    normalise_backward,
    normalise_cell,
    normalise_gates,
    normalise_gates_backward,
    store_gates,
    where_gates,
    zoneout_backward,
)
from trifuse.kernels.recurrent import (
    INF,
    load,
    load_state,
    longest_row,
    make_step,
    make_tile,
    saved_offsets,
    state_offsets,
    store,
    store_state,
    tanh,
    token_offsets,
    zero_steps,
)

# Number of steps whose vector gradients are summed as one chain.
RUN = tl.constexpr(32)

# Pieces ------------------------------------------------------------------------------------------


class ForwardStep(NamedTuple):
    """A step of the forward, loaded or recomputed for the backward."""

    gates: Gates
    c: Any  # c_{t-1}
    c_new: Any  # c̃
    n: Gates  # with layer norm: W_hh h normalised
    rstd: Any


@triton.jit
def _load_forward_step(past, grads, inputs, tile, at, variant: tl.constexpr):
    """Loads a step of the forward; recomputes values that were not saved."""
    saved = past.saved
    dtype: tl.constexpr = past.c0.dtype.element_ty
    inside = at.active & (tile.column < variant.H)
    c = load(past.c0 + state_offsets(tile, variant.H), inside & ~at.has_previous, dtype)
    pointers = saved.cells + saved_offsets(tile, at.previous_t, variant.H)
    c += load(pointers, inside & at.has_previous, dtype)
    gate_offsets = token_offsets(tile, at.t, variant.D, variant.G * variant.H)
    if variant.recompute:
        a = load_gates(grads.gates + gate_offsets, inside, variant, dtype)
        n = a
    else:
        pointers = saved.gates + saved_offsets(tile, at.t, variant.G * variant.H)
        gates = load_gates(pointers, inside, variant, dtype)
        if variant.coupled:
            gates = Gates(gates.i, 1.0 - gates.i, gates.g, gates.o)
        u = gates.f * c + gates.i * gates.g
        n = gates
    rstd = c
    if inputs.norm_hh is not None:
        v = load_gates(grads.products_hh + gate_offsets, inside, variant, dtype)
        n, rstd = normalise_gates(v, inside, variant)
    if variant.recompute:
        if inputs.norm_hh is not None:
            weight = load_gate_vectors(inputs.norm_hh, tile, variant, dtype)
            a = add_gates(a, multiply_gates(n, weight))
        if inputs.bias is not None:
            a = add_gates(a, load_gate_vectors(inputs.bias, tile, variant, dtype))
        gates, u = cell_update(a, c, inputs, tile, variant)
    if variant.zoneout_c > 0:
        c_new = clip(u, variant.cell_clip)
    else:
        c_new = load(saved.cells + saved_offsets(tile, at.t, variant.H), inside, dtype)
    return ForwardStep(gates, c, c_new, n, rstd)


@triton.jit
def _accumulate(shares, number, values, tile, at, H: tl.constexpr, block: tl.constexpr):
    """Adds the sum of ``values`` over the active rows to vector ``number`` of ``shares``."""
    column = tile.first_column + tl.arange(0, block.columns)
    pointers = shares + number * (2 * H) + column
    run = tl.load(pointers, column < H, other=0.0) + tl.sum(tl.where(at.active, values, 0.0), 0)
    if at.number % RUN == 0:
        run, total = end_run(run, tl.load(pointers + H, column < H, other=0.0))
        tl.store(pointers + H, total, column < H)
    tl.store(pointers, run, column < H)


@triton.jit
def _accumulate_gates(shares, number, values, tile, at, variant: tl.constexpr, block: tl.constexpr):
    """Adds a step's values of all gates to vectors ``number`` and on of the shares."""
    _accumulate(shares, number, values.i, tile, at, variant.H, block)
    if not variant.coupled:
        _accumulate(shares, number + 1, values.f, tile, at, variant.H, block)
    _accumulate(shares, number + variant.G - 2, values.g, tile, at, variant.H, block)
    _accumulate(shares, number + variant.G - 1, values.o, tile, at, variant.H, block)


@triton.jit
def _norm_cell_backward(
    du, n, rstd, shares, slot, inputs, tile, at, variant: tl.constexpr, block: tl.constexpr
):
    """Returns the gradient of the cell before its layer norm; adds to the norm's shares."""
    _accumulate(shares.norm_cell, slot * 2, du * n, tile, at, variant.H, block)
    _accumulate(shares.norm_cell, slot * 2 + 1, du, tile, at, variant.H, block)
    du *= load_vector(inputs.norm_cell_weight, tile.d, tile, variant.H, du.dtype)
    return normalise_backward(du, n, rstd, variant.H)


@triton.jit
def _norm_hh_backward(
    da, forward, shares, slot, inputs, tile, at, variant: tl.constexpr, block: tl.constexpr
):
    """Returns the gradient of W_hh h before its layer norm; adds to the gain's shares."""
    da_n = multiply_gates(da, forward.n)
    _accumulate_gates(shares.norm_hh, slot * variant.G, da_n, tile, at, variant, block)
    dn = multiply_gates(da, load_gate_vectors(inputs.norm_hh, tile, variant, da.i.dtype))
    return normalise_gates_backward(dn, forward.n, forward.rstd, variant)


@triton.jit
def _peephole_backward(
    da, dc, forward, shares, slot, inputs, tile, at, variant: tl.constexpr, block: tl.constexpr
):
    """Adds the part through the peepholes of i and f to dc, the gradient of c_{t-1}; adds to the
    shares of all peepholes."""
    dtype: tl.constexpr = dc.dtype
    PEEPHOLES: tl.constexpr = variant.G - 1
    c = forward.c
    number = slot * PEEPHOLES
    dc += da.i * load_peephole(inputs, 0, tile, variant, dtype)
    _accumulate(shares.peephole, number, da.i * c, tile, at, variant.H, block)
    if not variant.coupled:
        dc += da.f * load_peephole(inputs, 1, tile, variant, dtype)
        _accumulate(shares.peephole, number + 1, da.f * c, tile, at, variant.H, block)
    number += PEEPHOLES - 1
    _accumulate(shares.peephole, number, da.o * forward.c_new, tile, at, variant.H, block)
    return dc


@triton.jit
def _cell_backward(
    dm, dc, past, grads, shares, inputs, tile, at, variant: tl.constexpr, block: tl.constexpr
):
    """Returns the gradients of W_hh h and of c_{t-1}; writes the gradients of the preactivations.

    In rows that are not active, dm and the gradients of the gates are 0, and dc stays the same.
    """
    dtype: tl.constexpr = dc.dtype
    inside = at.active & (tile.column < variant.H)
    forward = _load_forward_step(past, grads, inputs, tile, at, variant)
    i = forward.gates.i
    f = forward.gates.f
    g = forward.gates.g
    o = forward.gates.o
    c = forward.c
    slot = tile.d * tl.num_programs(0) + tile.block_row  # index of the row block in shares
    value, n, rstd = normalise_cell(forward.c_new, inputs, tile, inside, variant)
    y = tanh(value)
    du = dm * o * (1.0 - y * y)
    if inputs.norm_cell_weight is not None:
        du = _norm_cell_backward(du, n, rstd, shares, slot, inputs, tile, at, variant, block)
    da_o = dm * y * o * (1.0 - o)
    dc_new, dc_previous = zoneout_backward(dc, inputs, tile, at, True, variant, block)
    du += dc_new
    if inputs.peephole is not None:
        du += da_o * load_peephole(inputs, variant.G - 2, tile, variant, dtype)
    if variant.cell_clip < INF:
        pointers = past.saved.clipped + saved_offsets(tile, at.t, variant.clip_columns)
        du = tl.where(tl.load(pointers, inside, other=1), 0.0, du)
    da_g = du * i * (1.0 - g * g)
    if variant.coupled:
        da_i = du * (g - c) * i * (1.0 - i)
        da_f = da_i
    else:
        da_i = du * g * i * (1.0 - i)
        da_f = du * c * f * (1.0 - f)
    dc_previous += du * f
    da = where_gates(inside, Gates(da_i, da_f, da_g, da_o))
    if inputs.peephole is not None:
        dc_previous = _peephole_backward(
            da, dc_previous, forward, shares, slot, inputs, tile, at, variant, block
        )
    written = tile.exists & (tile.column < variant.H)
    gate_offsets = token_offsets(tile, at.t, variant.D, variant.G * variant.H)
    store_gates(grads.gates + gate_offsets, da, written, variant)
    dv = da
    if inputs.norm_hh is not None:
        dv = _norm_hh_backward(da, forward, shares, slot, inputs, tile, at, variant, block)
        dv = where_gates(inside, dv)
        store_gates(grads.products_hh + gate_offsets, dv, written, variant)
    return dv, tl.where(at.active, dc_previous, dc)


@triton.jit
def _hidden_backward(
    dh, dh_recurrent, grad_out, inputs, tile, at, variant: tl.constexpr, block: tl.constexpr
):
    """Returns the gradient of the new h, and that of h_{t-1} without its part through W_hh.

    ``dh_recurrent`` is the part through W_hh from the next step: 0 for a row without that step. In
    a row that is not active, dh is kept.
    """
    inside = at.active & (tile.column < variant.R)
    if inputs.dropout is not None:
        dh_recurrent *= tl.load(inputs.dropout + state_offsets(tile, variant.R), inside, other=0.0)
    total = dh + dh_recurrent
    total += load(grad_out + token_offsets(tile, at.t, variant.D, variant.R), inside, dh.dtype)
    dh_new, dh_previous = zoneout_backward(total, inputs, tile, at, False, variant, block)
    return tl.where(at.active, dh_new, 0.0), tl.where(at.active, dh_previous, dh)


@triton.jit
def _hidden_backward_step(
    dh_recurrent, grad_out, grads, inputs, tile, at, variant: tl.constexpr, block: tl.constexpr
):
    """As ``_hidden_backward``, with dh in memory between steps."""
    dh = load_state(grads.h, tile, variant.R)
    recurrent = load_state(dh_recurrent, tile, variant.R).to(dh.dtype)
    dh_new, dh = _hidden_backward(dh, recurrent, grad_out, inputs, tile, at, variant, block)
    store_state(grads.h, dh, tile, variant.R)
    return dh_new


# Kernels -----------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["step", "T", "B"])
def lstm_backward_projection_kernel(
    step,
    dh_recurrent,  # (D, B, R): the gradient of h through the product of the next step
    grad_out,  # (T, B, D, R)
    past,
    grads,
    grad_projected,  # (D, B, R): the gradient of W_hr m
    grad_projected_steps,  # (D, T, B, R): the same for all steps
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
    dq = _hidden_backward_step(dh_recurrent, grad_out, grads, inputs, tile, at, variant, block)
    inside = at.active & (tile.column < variant.R)
    if variant.proj_clip < INF:
        pointers = clipped_h_pointers(past.saved.clipped, tile, at, variant)
        dq = tl.where(tl.load(pointers, inside, other=1), 0.0, dq)
    store_state(grad_projected, dq, tile, variant.R)
    written = tile.exists & (tile.column < variant.R)
    store(grad_projected_steps + saved_offsets(tile, at.t, variant.R), dq, written)


@triton.jit(do_not_specialize=["step", "T", "B"])
def lstm_backward_step_kernel(
    step,
    grad_hidden,  # (D, B, H): the gradient of m with a projection, otherwise dh_recurrent
    grad_out,  # (T, B, D, R)
    past,
    grads,
    grad_products_hh,  # (D, B, G, H): the gradient of W_hh h
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
    if variant.projected:
        dm = load(grad_hidden + state_offsets(tile, variant.H), inside & at.active, dtype)
    else:
        dm = _hidden_backward_step(grad_hidden, grad_out, grads, inputs, tile, at, variant, block)
    dc = load_state(grads.c, tile, variant.H)
    dv, dc = _cell_backward(dm, dc, past, grads, shares, inputs, tile, at, variant, block)
    store_state(grads.c, dc, tile, variant.H)
    offsets = (tile.d * B + tile.row) * (variant.G * variant.H) + tile.column
    store_gates(grad_products_hh + offsets, dv, inside, variant)


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
    input_dtype: tl.constexpr = weight_hh.dtype.element_ty
    dh = load_state(grads.h, tile, variant.H)
    dc = load_state(grads.c, tile, variant.H)
    longest = longest_row(tile)
    zero_steps(grads.gates, longest, tile, variant.G, variant.H, variant, block)
    if inputs.norm_hh is not None:
        zero_steps(grads.products_hh, longest, tile, variant.G, variant.H, variant, block)
    w = load_gate_weights(weight_hh, tile, variant, block)
    zeros = tl.full((block.rows, block.columns), 0.0, dc.dtype)
    dh_recurrent = zeros
    for back in tl.range(0, longest, num_stages=1):
        step = longest - 1 - back
        at = make_step(tile, step, variant.reverse)
        dm, dh = _hidden_backward(dh, dh_recurrent, grad_out, inputs, tile, at, variant, block)
        dv, dc = _cell_backward(dm, dc, past, grads, shares, inputs, tile, at, variant, block)
        dh_recurrent = dot(round_to(dv.i, input_dtype), w.i, zeros)
        if not variant.coupled:
            dh_recurrent = dot(round_to(dv.f, input_dtype), w.f, dh_recurrent)
        dh_recurrent = dot(round_to(dv.g, input_dtype), w.g, dh_recurrent)
        dh_recurrent = dot(round_to(dv.o, input_dtype), w.o, dh_recurrent)
        # The thread that reads a share may differ from the one that wrote it in the previous step.
        tl.debug_barrier()
    if inputs.dropout is not None:
        dh_recurrent *= load_state(inputs.dropout, tile, variant.H)
    store_state(grads.h, dh + dh_recurrent, tile, variant.H)
    store_state(grads.c, dc, tile, variant.H)


@triton.jit(do_not_specialize=["T", "B"])
def lstm_hidden_kernel(
    m_steps,  # (D, T, B, H): m of all steps
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
    inside = at.active & (tile.column < variant.H)
    forward = _load_forward_step(past, grads, inputs, tile, at, variant)
    value, _n, _rstd = normalise_cell(forward.c_new, inputs, tile, inside, variant)
    m = tl.where(at.active, forward.gates.o * tanh(value), 0.0)
    written = tile.exists & (tile.column < variant.H)
    store(m_steps + saved_offsets(tile, at.t, variant.H), m, written)
