"""The LSTM's kernels of the forward: one step, its projection, a whole sequence, and the recurrent
dropout's multipliers."""

from __future__ import annotations

import triton
import triton.language as tl

from trifuse.kernels.arithmetic import dot, round_to
from trifuse.kernels.lstm_cell import (
    Gates,
    add_gates,
    cell_update,
    clip,
    clipped_h_pointers,
    draw_keep,
    load_gate_vectors,
    load_gate_weights,
    load_gates,
    multiply_gates,
    normalise_cell,
    normalise_gates,
    store_gates,
    zoneout,
)
from trifuse.kernels.recurrent import (
    INF,
    load,
    load_state,
    longest_row,
    make_step,
    make_tile,
    next_h,
    saved_offsets,
    state_offsets,
    store,
    store_state,
    tanh,
    token_offsets,
    zero_steps,
)

# Pieces ------------------------------------------------------------------------------------------


@triton.jit
def _cell_forward(x, v, c, saved, inputs, tile, at, variant: tl.constexpr, block: tl.constexpr):
    """Returns m and the next c from the gates' W_ih x (here x), their W_hh h (here v), and c."""
    dtype: tl.constexpr = c.dtype
    inside = at.active & (tile.column < variant.H)
    if inputs.norm_hh is not None:
        n, _rstd = normalise_gates(v, inside, variant)
        v = multiply_gates(n, load_gate_vectors(inputs.norm_hh, tile, variant, dtype))
    a = add_gates(x, v)
    if inputs.bias is not None:
        a = add_gates(a, load_gate_vectors(inputs.bias, tile, variant, dtype))
    gates, u = cell_update(a, c, inputs, tile, variant)
    c_new = clip(u, variant.cell_clip)
    if variant.cell_clip < INF and saved.clipped is not None:
        pointers = saved.clipped + saved_offsets(tile, at.t, variant.clip_columns)
        tl.store(pointers, tl.abs(u) > variant.cell_clip, inside)
    value, _n, _rstd = normalise_cell(c_new, inputs, tile, inside, variant)
    m = gates.o * tanh(value)
    c = tl.where(at.active, zoneout(c_new, c, inputs, tile, at, True, variant, block), c)
    if saved.gates is not None:
        pointers = saved.gates + saved_offsets(tile, at.t, variant.G * variant.H)
        store_gates(pointers, gates, inside, variant)
    if saved.cells is not None:
        store(saved.cells + saved_offsets(tile, at.t, variant.H), c, inside)
    return m, c


@triton.jit
def _load_products_ih(products_ih, tile, at, variant: tl.constexpr, dtype: tl.constexpr):
    """Loads W_ih x of a step, a tile for each gate; 0 in rows without the step."""
    pointers = products_ih + token_offsets(tile, at.t, variant.D, variant.G * variant.H)
    return load_gates(pointers, at.active & (tile.column < variant.H), variant, dtype)


@triton.jit
def _hidden_forward(h_new, h, out, inputs, tile, at, variant: tl.constexpr, block: tl.constexpr):
    """Returns the next h in its dtype, from h̃ and the last h; writes the output."""
    h_next = zoneout(h_new, h.to(h_new.dtype), inputs, tile, at, False, variant, block)
    return next_h(h_next, h, out, tile, at, variant.D, variant.R)


@triton.jit
def _drop(h, inputs, tile, variant: tl.constexpr):
    """Returns h after the recurrent dropout, the factor of W_hh."""
    if inputs.dropout is not None:
        dropout = load_state(inputs.dropout, tile, variant.R)
        h = round_to(h.to(dropout.dtype) * dropout, h.dtype)
    return h


@triton.jit
def _hidden_step(h_new, out, state, inputs, tile, at, variant: tl.constexpr, block: tl.constexpr):
    """As ``_hidden_forward``, with h in memory between steps."""
    h = load_state(state.h, tile, variant.R)
    h = _hidden_forward(h_new, h, out, inputs, tile, at, variant, block)
    store_state(state.h, h, tile, variant.R)
    if state.h_dropped is not None:
        store_state(state.h_dropped, _drop(h, inputs, tile, variant), tile, variant.R)


# Kernels -----------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["step", "T", "B"])
def lstm_forward_step_kernel(
    step,
    products_hh,  # (D, B, G, H): W_hh h
    products_ih,  # (T, B, D, G, H): W_ih x, after layer norm if there is any
    state,
    out,  # (T, B, D, R)
    m_out,  # (D, B, H): m, if a projection follows; else None
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
    once and written twice; h likewise. Everything except W_ih x and the saved results stays in the
    L2 cache, so a step is bound by the time from launch to launch.
    """
    tile = make_tile(tl.program_id(0), inputs.lengths, T, B, block)
    at = make_step(tile, step, variant.reverse)
    inside = tile.exists & (tile.column < variant.H)
    dtype: tl.constexpr = state.c.dtype.element_ty
    c = load_state(state.c, tile, variant.H)
    offsets = (tile.d * B + tile.row) * (variant.G * variant.H) + tile.column
    v = load_gates(products_hh + offsets, inside, variant, dtype)
    x = _load_products_ih(products_ih, tile, at, variant, dtype)
    m, c = _cell_forward(x, v, c, saved, inputs, tile, at, variant, block)
    store_state(state.c, c, tile, variant.H)
    if variant.projected:
        store_state(m_out, m, tile, variant.H)
    else:
        _hidden_step(m, out, state, inputs, tile, at, variant, block)


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
    inside = at.active & (tile.column < variant.R)
    q = load(projected + state_offsets(tile, variant.R), inside, dtype)
    if variant.proj_clip < INF and saved.clipped is not None:
        pointers = clipped_h_pointers(saved.clipped, tile, at, variant)
        tl.store(pointers, tl.abs(q) > variant.proj_clip, inside)
    _hidden_step(clip(q, variant.proj_clip), out, state, inputs, tile, at, variant, block)


@triton.jit(do_not_specialize=["T", "B"])
def lstm_forward_sequence_kernel(
    weight_hh,  # (D, G, H, H)
    products_ih,  # (T, B, D, G, H): W_ih x, after layer norm if there is any
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

    It reads the weights once and keeps them in shared memory; h and c stay in registers. Until its
    longest row ends, it reads W_ih x of each step and writes the output and the results for the
    backward; after that it only writes zeros.

    Floor: per step and program, G · block.columns² · block.rows multiplications on one
    multiprocessor's matrix unit, and the latency of one such product and, with layer norm, of the
    sum of a row.
    """
    tile = make_tile(tl.program_id(0), inputs.lengths, T, B, block)
    dtype: tl.constexpr = state.c.dtype.element_ty
    h = load_state(state.h, tile, variant.H)
    c = load_state(state.c, tile, variant.H)
    w = load_gate_weights(weight_hh, tile, variant, block)
    longest = longest_row(tile)
    for step in tl.range(0, longest, num_stages=1):
        at = make_step(tile, step, variant.reverse)
        # Loaded before the products, which hide its latency.
        x = _load_products_ih(products_ih, tile, at, variant, dtype)
        h_dropped = _drop(h, inputs, tile, variant)
        zeros = tl.full((block.rows, block.columns), 0.0, dtype)
        v_i = dot(h_dropped, tl.trans(w.i), zeros)
        v_g = dot(h_dropped, tl.trans(w.g), zeros)
        v_o = dot(h_dropped, tl.trans(w.o), zeros)
        v_f = v_i
        if not variant.coupled:
            v_f = dot(h_dropped, tl.trans(w.f), zeros)
        v = Gates(v_i, v_f, v_g, v_o)
        m, c = _cell_forward(x, v, c, saved, inputs, tile, at, variant, block)
        h = _hidden_forward(m, h, out, inputs, tile, at, variant, block)
    zero_steps(out, longest, tile, 1, variant.H, variant, block)
    store_state(state.h, h, tile, variant.H)
    store_state(state.c, c, tile, variant.H)


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
    keep = draw_keep(seed, tile.d, tile, threshold, variant, block)
    values = keep.to(multipliers.dtype.element_ty) * scale
    store_state(multipliers, values, tile, variant.R)
