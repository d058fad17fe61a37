"""The GRU whose reset gate precedes the recurrent product, forward and backward, in Triton.

The formulas, those without ``linear_before_reset``, are at the head of
``pytorch_ext/reference/gru.py``. The head of ``kernels/recurrent.py`` describes how they are
divided among launches. A step has two consecutive products: first r and z from h, then n from r h.
In the backward they are first the gradient of r h from that of n, then that of h from those of r
and z.

W_ih x and the products with W_hh have the same gradient: r, z, n, in the order of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from trifuse.kernels import without_cells
from trifuse.kernels.arithmetic import dot, round_to
from trifuse.kernels.recurrent import (
    load,
    load_previous_h,
    load_product,
    load_state,
    load_weights,
    longest_row,
    make_step,
    make_tile,
    next_h,
    saved_offsets,
    sigmoid,
    store,
    store_product,
    store_state,
    tanh,
    token_offsets,
    zero_steps,
)
from trifuse.reference.lstm import masked

# Parts of a step ---------------------------------------------------------------------------------


@triton.jit
def _preactivation(v, products_ih, inputs, tile, at, number: tl.constexpr, variant: tl.constexpr):
    """Returns W_ih x + v + bias of gate ``number``; v is the product with W_hh."""
    H: tl.constexpr = variant.H
    inside = at.active & (tile.column < H)
    offsets = token_offsets(tile, at.t, variant.D, 3 * H) + number * H
    a = load(products_ih + offsets, inside, v.dtype) + v
    if inputs.bias is not None:
        pointers = inputs.bias + (tile.d * 3 + number) * H + tile.column
        a += load(pointers, tile.column < H, v.dtype)
    return a


@triton.jit
def _reset(v_r, h, products_ih, gates, inputs, tile, at, variant: tl.constexpr):
    """Returns r h, in the dtype of h; 0 in rows that are not active. v_r is W_hr h.

    Writes r, if the gates are saved.
    """
    H: tl.constexpr = variant.H
    inside = at.active & (tile.column < H)
    r = sigmoid(_preactivation(v_r, products_ih, inputs, tile, at, 0, variant))
    if gates is not None:
        store(gates + saved_offsets(tile, at.t, 3 * H), r, inside)
    # An infinite h would make columns past H NaN, and the next product would spread this NaN.
    return round_to(tl.where(inside, r * h.to(r.dtype), 0.0), h.dtype)


@triton.jit
def _cell_forward(v_z, v_n, h, products_ih, out, gates, inputs, tile, at, variant: tl.constexpr):
    """Returns the next h, in its dtype. v_z is W_hz h, v_n is W_hn (r h).

    Writes the output and, if the gates are saved, z and n.
    """
    H: tl.constexpr = variant.H
    inside = at.active & (tile.column < H)
    z = sigmoid(_preactivation(v_z, products_ih, inputs, tile, at, 1, variant))
    n = tanh(_preactivation(v_n, products_ih, inputs, tile, at, 2, variant))
    if gates is not None:
        saved = gates + saved_offsets(tile, at.t, 3 * H)
        store(saved + H, z, inside)
        store(saved + 2 * H, n, inside)
    new = (1.0 - z) * n + z * h.to(z.dtype)
    return next_h(new, h, out, tile, at, variant.D, H)


@triton.jit
def _cell_backward(dh, dh_recurrent, h, grad_out, gates, grads, tile, at, variant: tl.constexpr):
    """Returns the gradients of z and n, and the gradient of h_{t-1} without its parts through the
    gates. Writes the former. h is h_{t-1}.

    ``dh_recurrent`` is the part through r and z of the next step; it is 0 for a row without that
    step. In a row that is not active, dh is kept and the gradients of the gates are 0.
    """
    H: tl.constexpr = variant.H
    dtype: tl.constexpr = dh.dtype
    inside = at.active & (tile.column < H)
    saved = gates + saved_offsets(tile, at.t, 3 * H)
    z = load(saved + H, inside, dtype)
    n = load(saved + 2 * H, inside, dtype)
    total = dh + dh_recurrent
    total += load(grad_out + token_offsets(tile, at.t, variant.D, H), inside, dtype)
    dn = tl.where(inside, total * (1.0 - z) * (1.0 - n * n), 0.0)
    dz = tl.where(inside, total * (h - n) * z * (1.0 - z), 0.0)
    written = tile.exists & (tile.column < H)
    grads += token_offsets(tile, at.t, variant.D, 3 * H)
    store(grads + H, dz, written)
    store(grads + 2 * H, dn, written)
    return dz, dn, tl.where(at.active, total * z, dh)


@triton.jit
def _reset_backward(dv, h, gates, grads, tile, at, variant: tl.constexpr):
    """Returns the gradient of r, and the gradient of h_{t-1} through r h. Writes the former. dv is
    the gradient of r h, and h is h_{t-1}. Both results are 0 in rows that are not active."""
    H: tl.constexpr = variant.H
    inside = at.active & (tile.column < H)
    r = load(gates + saved_offsets(tile, at.t, 3 * H), inside, dv.dtype)
    dr = tl.where(inside, dv * h * r * (1.0 - r), 0.0)
    written = tile.exists & (tile.column < H)
    store(grads + token_offsets(tile, at.t, variant.D, 3 * H), dr, written)
    return dr, tl.where(inside, dv * r, 0.0)


# Forward -----------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["step", "T", "B"])
def gru_reset_step_kernel(
    step,
    products_rz,  # (D, B, 2, H): W_hh h of r and z
    products_ih,  # (T, B, D, 3, H): W_ih x
    state,  # (D, B, H): h
    reset_state,  # (D, B, H): r h
    gates,  # (D, T, B, 3, H) or None
    inputs,
    T,
    B,
    variant: tl.constexpr,
    block: tl.constexpr,
):
    """The first part of a step, between its products.

    A program owns block.rows rows and block.columns units of one direction. It reads W_ih x and
    W_hh h of r, and h; it writes r h, and r if the gates are saved.

    Floor: per unit 3 numbers read, one written and one saved, in the dtype of the input; bound by
    the time from launch to launch.
    """
    H: tl.constexpr = variant.H
    tile = make_tile(tl.program_id(0), inputs.lengths, T, B, block)
    at = make_step(tile, step, variant.reverse)
    h = load_state(state, tile, H)
    v_r = load_product(products_rz, 0, tile, 2, H)
    reset_h = _reset(v_r, h, products_ih, gates, inputs, tile, at, variant)
    store_state(reset_state, reset_h, tile, H)


@triton.jit(do_not_specialize=["step", "T", "B"])
def gru_reset_first_forward_step_kernel(
    step,
    products_rz,  # (D, B, 2, H): W_hh h of r and z
    products_n,  # (D, B, H): W_hn (r h)
    products_ih,  # (T, B, D, 3, H): W_ih x
    state,  # (D, B, H): h
    out,  # (T, B, D, H)
    gates,  # (D, T, B, 3, H) or None
    inputs,
    T,
    B,
    variant: tl.constexpr,
    block: tl.constexpr,
):
    """The last part of a step, after its products.

    A program owns a tile as in the first part. It reads, for z and n, W_ih x and the products with
    W_hh, and it reads h; it writes h, the output, and z and n if the gates are saved.

    Floor: per unit 5 numbers read, 2 written and 2 saved, in the dtype of the input; bound by the
    time from launch to launch.
    """
    H: tl.constexpr = variant.H
    tile = make_tile(tl.program_id(0), inputs.lengths, T, B, block)
    at = make_step(tile, step, variant.reverse)
    h = load_state(state, tile, H)
    v_z = load_product(products_rz, 1, tile, 2, H)
    v_n = load_product(products_n, 0, tile, 1, H)
    h = _cell_forward(v_z, v_n, h, products_ih, out, gates, inputs, tile, at, variant)
    store_state(state, h, tile, H)


@triton.jit(do_not_specialize=["T", "B"])
def gru_reset_first_forward_sequence_kernel(
    weight_hh,  # (D, 3, H, H)
    products_ih,  # (T, B, D, 3, H): W_ih x
    state,  # (D, B, H): the initial h, replaced by the final h
    out,  # (T, B, D, H)
    gates,  # (D, T, B, 3, H) or None
    inputs,
    T,
    B,
    variant: tl.constexpr,
    block: tl.constexpr,
):
    """All steps. A program owns block.rows whole rows of one direction.

    It reads the weights once and keeps them in shared memory; h and r h stay in registers. Until
    its longest row ends, it reads W_ih x of each step and writes the output and the gates if they
    are saved; after that it only writes zeros.

    Floor: per step and program, 3 · block.columns² · block.rows multiplications on one
    multiprocessor's matrix unit, and the latency of two such products.
    """
    H: tl.constexpr = variant.H
    tile = make_tile(tl.program_id(0), inputs.lengths, T, B, block)
    h = load_state(state, tile, H)
    w_r = load_weights(weight_hh, 0, tile, H, 3, block)
    w_z = load_weights(weight_hh, 1, tile, H, 3, block)
    w_n = load_weights(weight_hh, 2, tile, H, 3, block)
    longest = longest_row(tile)
    for step in tl.range(0, longest, num_stages=1):
        at = make_step(tile, step, variant.reverse)
        zeros = tl.full((block.rows, block.columns), 0.0, tl.float32)
        v_r = dot(h, tl.trans(w_r), zeros)
        v_z = dot(h, tl.trans(w_z), zeros)
        reset_h = _reset(v_r, h, products_ih, gates, inputs, tile, at, variant)
        v_n = dot(reset_h, tl.trans(w_n), zeros)
        h = _cell_forward(v_z, v_n, h, products_ih, out, gates, inputs, tile, at, variant)
    zero_steps(out, longest, tile, 1, H, variant, block)
    store_state(state, h, tile, H)


# Backward ----------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["step", "T", "B"])
def gru_reset_first_backward_step_kernel(
    step,
    dh_recurrent,  # (D, B, H): the gradient of h through r and z of the next step
    grad_out,  # (T, B, D, H)
    gates,  # (D, T, B, 3, H)
    h0,  # (D, B, H)
    out,  # (T, B, D, H)
    grad_state,  # (D, B, H), in the accumulation dtype: the rest of the gradient of h
    grads,  # (T, B, D, 3, H): of r, z and n
    grad_n,  # (D, B, H): that of n, of this step only
    inputs,
    T,
    B,
    variant: tl.constexpr,
    block: tl.constexpr,
):
    """The first part of a step of the backward, between its products.

    A program owns block.rows rows and block.columns units of one direction. It reads z, n, h before
    the step and the gradients of h; it writes the gradients of z and n (n twice) and of h.

    Floor: per unit 5 numbers read and 3 written in the dtype of the input, and one of 4 bytes read
    and written; bound by the time from launch to launch.
    """
    H: tl.constexpr = variant.H
    tile = make_tile(tl.program_id(0), inputs.lengths, T, B, block)
    at = make_step(tile, step, variant.reverse)
    dh = load_state(grad_state, tile, H)
    recurrent = load_state(dh_recurrent, tile, H).to(dh.dtype)
    h = load_previous_h(h0, out, dh.dtype, tile, at, variant.D, H)
    _, dn, dh = _cell_backward(dh, recurrent, h, grad_out, gates, grads, tile, at, variant)
    store_state(grad_state, dh, tile, H)
    store_state(grad_n, dn, tile, H)


@triton.jit(do_not_specialize=["step", "T", "B"])
def gru_reset_backward_step_kernel(
    step,
    grad_reset,  # (D, B, H): of r h
    gates,  # (D, T, B, 3, H)
    h0,  # (D, B, H)
    out,  # (T, B, D, H)
    grad_state,  # (D, B, H), in the accumulation dtype: of h
    grads,  # (T, B, D, 3, H): of r, z and n
    grad_rz,  # (D, B, 2, H): those of r and z, of this step only
    inputs,
    T,
    B,
    variant: tl.constexpr,
    block: tl.constexpr,
):
    """The last part of a step of the backward, before the product of the previous step.

    A program owns a tile as in the first part. It reads r, h before the step, and the gradients of
    r h, h and z; it writes the gradients of r (twice), of z again, and of h.

    Floor: per unit 4 numbers read and 3 written in the dtype of the input, and one of 4 bytes read
    and written; bound by the time from launch to launch.
    """
    H: tl.constexpr = variant.H
    tile = make_tile(tl.program_id(0), inputs.lengths, T, B, block)
    at = make_step(tile, step, variant.reverse)
    dh = load_state(grad_state, tile, H)
    dv = load_state(grad_reset, tile, H).to(dh.dtype)
    h = load_previous_h(h0, out, dh.dtype, tile, at, variant.D, H)
    dr, dh_reset = _reset_backward(dv, h, gates, grads, tile, at, variant)
    store_state(grad_state, dh + dh_reset, tile, H)
    inside = tile.exists & (tile.column < H)
    dz = load(grads + token_offsets(tile, at.t, variant.D, 3 * H) + H, inside, dh.dtype)
    store_product(grad_rz, 0, dr, tile, 2, H)
    store_product(grad_rz, 1, dz, tile, 2, H)


@triton.jit(do_not_specialize=["T", "B"])
def gru_reset_first_backward_sequence_kernel(
    weight_hh,  # (D, 3, H, H)
    grad_out,  # (T, B, D, H)
    gates,  # (D, T, B, 3, H)
    h0,  # (D, B, H)
    out,  # (T, B, D, H)
    grad_state,  # (D, B, H) float32: the gradient of h_n, and then of h0
    grads,  # (T, B, D, 3, H): of r, z and n
    inputs,
    T,
    B,
    variant: tl.constexpr,
    block: tl.constexpr,
):
    """All steps, backwards, on the tiles of the forward; the gradient of h stays in registers.

    Floor: two products per step, as in the forward, and reading the gates.
    """
    H: tl.constexpr = variant.H
    input_dtype: tl.constexpr = weight_hh.dtype.element_ty
    tile = make_tile(tl.program_id(0), inputs.lengths, T, B, block)
    dh = load_state(grad_state, tile, H)
    longest = longest_row(tile)
    zero_steps(grads, longest, tile, 3, H, variant, block)
    w_r = load_weights(weight_hh, 0, tile, H, 3, block)
    w_z = load_weights(weight_hh, 1, tile, H, 3, block)
    w_n = load_weights(weight_hh, 2, tile, H, 3, block)
    zeros = tl.full((block.rows, block.columns), 0.0, tl.float32)
    dh_recurrent = zeros
    for back in tl.range(0, longest, num_stages=1):
        at = make_step(tile, longest - 1 - back, variant.reverse)
        h = load_previous_h(h0, out, dh.dtype, tile, at, variant.D, H)
        dz, dn, dh = _cell_backward(dh, dh_recurrent, h, grad_out, gates, grads, tile, at, variant)
        dv = dot(round_to(dn, input_dtype), w_n, zeros)
        dr, dh_reset = _reset_backward(dv, h, gates, grads, tile, at, variant)
        dh += dh_reset
        dh_recurrent = dot(round_to(dr, input_dtype), w_r, zeros)
        dh_recurrent = dot(round_to(dz, input_dtype), w_z, dh_recurrent)
    store_state(grad_state, dh + dh_recurrent, tile, H)


# Launches ----------------------------------------------------------------------------------------


class ResetFirstCall(without_cells.CallWithoutCells):
    gates = 3
    forward_kernel = gru_reset_first_forward_sequence_kernel
    backward_kernel = gru_reset_first_backward_sequence_kernel

    def weights(self) -> tuple[Tensor, Tensor]:
        """Returns W_hh of r and z, (D, 2·H, H), and W_hn, (D, H, H)."""
        weight_hh = self.sequences.weight_hh
        return weight_hh[:, : 2 * self.H], weight_hh[:, 2 * self.H :]

    def forward_steps(
        self, products_ih: Tensor, state: Tensor, out: Tensor, *gates: Tensor | None
    ) -> None:
        inputs, T, B = self.inputs, self.T, self.B
        reset_state = torch.empty_like(state)
        products_rz, products_n = state.new_empty(self.D, B, 2 * self.H), torch.empty_like(state)
        weight_rz, weight_n = (w.mT for w in self.weights())
        reset = self.prepare(gru_reset_step_kernel)
        cell = self.prepare(gru_reset_first_forward_step_kernel)
        for step in range(T):
            torch.bmm(state, weight_rz, out=products_rz)
            reset(step, products_rz, products_ih, state, reset_state, *gates, inputs, T, B)
            torch.bmm(reset_state, weight_n, out=products_n)
            cell(step, products_rz, products_n, products_ih, state, out, *gates, inputs, T, B)

    def backward_steps(self, dh_recurrent: Tensor, grad_output: Tensor, *tensors: Tensor) -> None:
        inputs, T, B = self.inputs, self.T, self.B
        grad_rz = dh_recurrent.new_empty(self.D, B, 2 * self.H)
        grad_n, grad_reset = torch.empty_like(dh_recurrent), torch.empty_like(dh_recurrent)
        weight_rz, weight_n = self.weights()
        cell = self.prepare(gru_reset_first_backward_step_kernel)
        reset = self.prepare(gru_reset_backward_step_kernel)
        for step in reversed(range(T)):
            cell(step, dh_recurrent, grad_output, *tensors, grad_n, inputs, T, B)
            torch.bmm(grad_n, weight_n, out=grad_reset)
            reset(step, grad_reset, *tensors, grad_rz, inputs, T, B)
            torch.bmm(grad_rz, weight_rz, out=dh_recurrent)

    def gradients(
        self,
        input: Tensor,
        h_previous: Tensor,
        gates: Tensor,
        grads: Tensor,
        grad_state: Tensor,
        needs_grad: Sequence[bool],
    ) -> list[Tensor | None]:
        """As :meth:`gradients_of_sums`; grads is of r, z and n."""
        sequences, H = self.sequences, self.H

        def weight_hh(d: int, da: Tensor) -> Tensor:
            r = masked(gates[d, :, :, :H], sequences.valid)
            h, reset_h = h_previous[d].flatten(0, 1), (r * h_previous[d]).flatten(0, 1)
            return torch.cat([da[:, : 2 * H].mT @ h, da[:, 2 * H :].mT @ reset_h])

        return self.gradients_of_sums(input, grads, grad_state, needs_grad, weight_hh)
