"""The GRU over a whole sequence, one layer in one or two directions, forward and backward, in
Triton.

The formulas are at the head of ``pytorch_ext/reference/gru.py``. The head of
``kernels/recurrent.py`` describes how they are divided among launches. These are the
kernels with ``linear_before_reset``; ``kernels/gru_reset_first.py`` has the others.

The gradients of W_ih x and of W_hh h differ only in one gate: n in the former, k in the latter. So
the backward stores the gradients of n, r, z, k side by side. The first three are the matrix for
W_ih, and the last three are the matrix for W_hh.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trifuse.kernels import gru_reset_first
from trifuse.kernels.arguments import check_shape
from trifuse.kernels.arithmetic import dot, round_to
from trifuse.kernels.recurrent import (
    as_results,
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
from trifuse.kernels.without_cells import CallWithoutCells, check_backward
from trifuse.reference.gru import Parameters, saved_per_unit
from trifuse.reference.lstm import by_direction, masked

# Kernel arguments --------------------------------------------------------------------------------


class Gates(NamedTuple):
    """A value for each of n, r, z and k, in their order in memory."""

    n: Any
    r: Any
    z: Any
    k: Any


# Parts of a step ---------------------------------------------------------------------------------


@triton.jit
def _load_gates(pointers, inside, H: tl.constexpr, dtype: tl.constexpr):
    """Loads all gates as ``dtype``, 0 outside. ``pointers`` point to the first, n."""
    return Gates(
        load(pointers, inside, dtype),
        load(pointers + H, inside, dtype),
        load(pointers + 2 * H, inside, dtype),
        load(pointers + 3 * H, inside, dtype),
    )


@triton.jit
def _store_gates(pointers, gates, inside, H: tl.constexpr):
    """Stores all gates, rounded to the dtype of ``pointers``, which point to n."""
    store(pointers, gates.n, inside)
    store(pointers + H, gates.r, inside)
    store(pointers + 2 * H, gates.z, inside)
    store(pointers + 3 * H, gates.k, inside)


@triton.jit
def _cell_forward(v, h, products_ih, out, gates, inputs, tile, at, variant: tl.constexpr):
    """Returns the next h, in its dtype. v is W_hh h; v.n is unused.

    Writes the output and, if they are saved, the gates.
    """
    H: tl.constexpr = variant.H
    dtype: tl.constexpr = v.k.dtype
    inside = at.active & (tile.column < H)
    products_ih += token_offsets(tile, at.t, variant.D, 3 * H)
    a_n = load(products_ih + 2 * H, inside, dtype)
    a_r = load(products_ih, inside, dtype) + v.r
    a_z = load(products_ih + H, inside, dtype) + v.z
    k = v.k
    if inputs.bias is not None:
        pointers = inputs.bias + tile.d * (4 * H) + tile.column
        bias = _load_gates(pointers, tile.column < H, H, dtype)
        a_n += bias.n
        a_r += bias.r
        a_z += bias.z
        k += bias.k
    r = sigmoid(a_r)
    z = sigmoid(a_z)
    n = tanh(a_n + r * k)
    # Stored before they are used, because in the other order Triton 3.6 generates invalid code.
    if gates is not None:
        _store_gates(gates + saved_offsets(tile, at.t, 4 * H), Gates(n, r, z, k), inside, H)
    new = (1.0 - z) * n + z * h.to(dtype)
    return next_h(new, h, out, tile, at, variant.D, H)


@triton.jit
def _cell_backward(
    dh, dh_recurrent, grad_out, gates, h0, out, grads, tile, at, variant: tl.constexpr
):
    """Returns the gradients of n, r, z and k, and the gradient of h_{t-1} without its part through
    W_hh. Writes the former.

    ``dh_recurrent`` is the part through W_hh from the next step; it is 0 for a row without that
    step. In a row that is not active, dh is kept and the gradients of the gates are 0.
    """
    H: tl.constexpr = variant.H
    dtype: tl.constexpr = dh.dtype
    inside = at.active & (tile.column < H)
    g = _load_gates(gates + saved_offsets(tile, at.t, 4 * H), inside, H, dtype)
    h = load_previous_h(h0, out, dtype, tile, at, variant.D, H)
    total = dh + dh_recurrent
    total += load(grad_out + token_offsets(tile, at.t, variant.D, H), inside, dtype)
    total = tl.where(at.active, total, 0.0)
    dn = total * (1.0 - g.z) * (1.0 - g.n * g.n)
    dz = total * (h - g.n) * g.z * (1.0 - g.z)
    dr = dn * g.k * g.r * (1.0 - g.r)
    d = Gates(dn, dr, dz, dn * g.r)
    written = tile.exists & (tile.column < H)
    _store_gates(grads + token_offsets(tile, at.t, variant.D, 4 * H), d, written, H)
    return d, tl.where(at.active, total * g.z, dh)


# Forward -----------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["step", "T", "B"])
def gru_forward_step_kernel(
    step,
    products_hh,  # (D, B, 3, H): W_hh h
    products_ih,  # (T, B, D, 3, H): W_ih x
    state,  # (D, B, H): h
    out,  # (T, B, D, H)
    gates,  # (D, T, B, 4, H) or None
    inputs,
    T,
    B,
    variant: tl.constexpr,
    block: tl.constexpr,
):
    """One step, without its product.

    A program owns block.rows rows and block.columns units of one direction. It reads W_ih x and
    W_hh h for each of their gates, and h; it writes h, the output, and the gates if they are saved.

    Floor: per unit 7 numbers read, 2 written and 4 saved, in the dtype of the input. Everything
    except W_ih x and the saved results stays in the L2 cache, so a step is bound by the time from
    launch to launch.
    """
    H: tl.constexpr = variant.H
    tile = make_tile(tl.program_id(0), inputs.lengths, T, B, block)
    at = make_step(tile, step, variant.reverse)
    h = load_state(state, tile, H)
    v_r = load_product(products_hh, 0, tile, 3, H)
    v_z = load_product(products_hh, 1, tile, 3, H)
    v_k = load_product(products_hh, 2, tile, 3, H)
    h = _cell_forward(
        Gates(v_k, v_r, v_z, v_k), h, products_ih, out, gates, inputs, tile, at, variant
    )
    store_state(state, h, tile, H)


@triton.jit(do_not_specialize=["T", "B"])
def gru_forward_sequence_kernel(
    weight_hh,  # (D, 3, H, H)
    products_ih,  # (T, B, D, 3, H): W_ih x
    state,  # (D, B, H): the initial h, replaced by the final h
    out,  # (T, B, D, H)
    gates,  # (D, T, B, 4, H) or None
    inputs,
    T,
    B,
    variant: tl.constexpr,
    block: tl.constexpr,
):
    """All steps. A program owns block.rows whole rows of one direction.

    It reads the weights once and keeps them in shared memory; h stays in registers. Until its
    longest row ends, it reads W_ih x of each step and writes the output and the gates if they are
    saved; after that it only writes zeros.

    Floor: per step and program, 3 · block.columns² · block.rows multiplications on one
    multiprocessor's matrix unit, and the latency of one such product.
    """
    H: tl.constexpr = variant.H
    tile = make_tile(tl.program_id(0), inputs.lengths, T, B, block)
    h = load_state(state, tile, H)
    w_r = load_weights(weight_hh, 0, tile, H, 3, block)
    w_z = load_weights(weight_hh, 1, tile, H, 3, block)
    w_k = load_weights(weight_hh, 2, tile, H, 3, block)
    longest = longest_row(tile)
    for step in tl.range(0, longest, num_stages=1):
        at = make_step(tile, step, variant.reverse)
        zeros = tl.full((block.rows, block.columns), 0.0, tl.float32)
        v_r = dot(h, tl.trans(w_r), zeros)
        v_z = dot(h, tl.trans(w_z), zeros)
        v_k = dot(h, tl.trans(w_k), zeros)
        h = _cell_forward(
            Gates(v_k, v_r, v_z, v_k), h, products_ih, out, gates, inputs, tile, at, variant
        )
    zero_steps(out, longest, tile, 1, H, variant, block)
    store_state(state, h, tile, H)


# Backward ----------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["step", "T", "B"])
def gru_backward_step_kernel(
    step,
    dh_recurrent,  # (D, B, H): the gradient of h through the product of the next step
    grad_out,  # (T, B, D, H)
    gates,  # (D, T, B, 4, H)
    h0,  # (D, B, H)
    out,  # (T, B, D, H)
    grad_state,  # (D, B, H), in the accumulation dtype: the rest of the gradient of h
    grads,  # (T, B, D, 4, H): of n, r, z and k
    grad_products_hh,  # (D, B, 3, H): the gradient of W_hh h
    inputs,
    T,
    B,
    variant: tl.constexpr,
    block: tl.constexpr,
):
    """One step of the backward, without its product.

    A program owns block.rows rows and block.columns units of one direction. It reads their gates, h
    before the step and the gradients of h; it writes the gradients of the gates (r, z and k twice)
    and of h.

    Floor: per unit 7 numbers read and 7 written in the dtype of the input, and one of 4 bytes read
    and written; bound by the time from launch to launch, as in the forward.
    """
    H: tl.constexpr = variant.H
    tile = make_tile(tl.program_id(0), inputs.lengths, T, B, block)
    at = make_step(tile, step, variant.reverse)
    dh = load_state(grad_state, tile, H)
    recurrent = load_state(dh_recurrent, tile, H).to(dh.dtype)
    d, dh = _cell_backward(dh, recurrent, grad_out, gates, h0, out, grads, tile, at, variant)
    store_state(grad_state, dh, tile, H)
    store_product(grad_products_hh, 0, d.r, tile, 3, H)
    store_product(grad_products_hh, 1, d.z, tile, 3, H)
    store_product(grad_products_hh, 2, d.k, tile, 3, H)


@triton.jit(do_not_specialize=["T", "B"])
def gru_backward_sequence_kernel(
    weight_hh,  # (D, 3, H, H)
    grad_out,  # (T, B, D, H)
    gates,  # (D, T, B, 4, H)
    h0,  # (D, B, H)
    out,  # (T, B, D, H)
    grad_state,  # (D, B, H) float32: the gradient of h_n, and then of h0
    grads,  # (T, B, D, 4, H): of n, r, z and k
    inputs,
    T,
    B,
    variant: tl.constexpr,
    block: tl.constexpr,
):
    """All steps, backwards. A program owns block.rows whole rows of one direction and keeps the
    weights as in the forward; dh stays in registers.

    Floor: as in the forward, plus reading the gates.
    """
    H: tl.constexpr = variant.H
    input_dtype: tl.constexpr = weight_hh.dtype.element_ty
    tile = make_tile(tl.program_id(0), inputs.lengths, T, B, block)
    dh = load_state(grad_state, tile, H)
    longest = longest_row(tile)
    zero_steps(grads, longest, tile, 4, H, variant, block)
    w_r = load_weights(weight_hh, 0, tile, H, 3, block)
    w_z = load_weights(weight_hh, 1, tile, H, 3, block)
    w_k = load_weights(weight_hh, 2, tile, H, 3, block)
    zeros = tl.full((block.rows, block.columns), 0.0, tl.float32)
    dh_recurrent = zeros
    for back in tl.range(0, longest, num_stages=1):
        at = make_step(tile, longest - 1 - back, variant.reverse)
        d, dh = _cell_backward(dh, dh_recurrent, grad_out, gates, h0, out, grads, tile, at, variant)
        dh_recurrent = dot(round_to(d.r, input_dtype), w_r, zeros)
        dh_recurrent = dot(round_to(d.z, input_dtype), w_z, dh_recurrent)
        dh_recurrent = dot(round_to(d.k, input_dtype), w_k, dh_recurrent)
    store_state(grad_state, dh + dh_recurrent, tile, H)


# Launchers ---------------------------------------------------------------------------------------


def gru_forward(
    input: Tensor,
    h0: Tensor | None,
    parameters: Sequence[Tensor | None],
    lengths: Tensor | None,
    reverse: Sequence[bool],
    linear_before_reset: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Implements the op ``gru_forward``. float64 is for checking the formulas."""
    with torch.cuda.device_of(input):
        call = _CALLS[linear_before_reset](input, parameters, lengths, reverse)
        columns = saved_per_unit(linear_before_reset) * call.H
        gates = input.new_empty((call.D, call.T, call.B, columns) if save else (0,))
        out, h_n = call.forward(input, h0, gates if save else None)
    return out, h_n, gates


def gru_backward(
    grad_output: Tensor,
    grad_h_n: Tensor | None,
    input: Tensor,
    h0: Tensor | None,
    parameters: Sequence[Tensor | None],
    lengths: Tensor | None,
    output: Tensor,
    gates: Tensor,
    reverse: Sequence[bool],
    linear_before_reset: bool,
    needs_grad: Sequence[bool],
) -> list[Tensor]:
    """Implements the op ``gru_backward``."""
    (T, B, _), D = input.shape, len(reverse)
    check_backward(grad_output, grad_h_n, input, h0, parameters, lengths, output, D=D, gates=3)
    # The number of gates with gradients equals the number of saved gates.
    columns = saved_per_unit(linear_before_reset) * (output.shape[-1] // D)
    check_shape("gates", gates, (D, T, B, columns))
    with torch.cuda.device_of(input):
        call = _CALLS[linear_before_reset](input, parameters, lengths, reverse)
        past = (gates, call.sequences.zeros_or_copy(h0, call.H, input.dtype), output.contiguous())
        grads, grad_state = call.backward(grad_output, grad_h_n, *past, columns=columns)
        h_previous = call.sequences.previous_h(output, h0)
        input_grads = call.gradients(input, h_previous, gates, grads, grad_state, needs_grad)
    return as_results(input_grads, (input, h0, *parameters), input)


class _GruCall(CallWithoutCells):
    gates = 3
    forward_kernel, forward_step_kernel = gru_forward_sequence_kernel, gru_forward_step_kernel
    backward_kernel, backward_step_kernel = gru_backward_sequence_kernel, gru_backward_step_kernel

    def bias(self) -> Tensor | None:
        """Returns the biases of n, r, z and k, (D, 4·H)."""
        (bias_ih, bias_hh), sequences, H = self.biases(), self.sequences, self.H
        if bias_ih is None and bias_hh is None:
            return None
        bias = sequences.weight_hh.new_zeros((sequences.D, 4 * H), dtype=sequences.acc_dtype)
        if bias_ih is not None:
            bias[:, :H] += bias_ih[:, 2 * H :]
            bias[:, H : 3 * H] += bias_ih[:, : 2 * H]
        if bias_hh is not None:
            bias[:, H:] += bias_hh
        return bias

    def gradients(
        self,
        input: Tensor,
        h_previous: Tensor,
        gates: Tensor,
        grads: Tensor,
        grad_state: Tensor,
        needs_grad: Sequence[bool],
    ) -> list[Tensor | None]:
        """As :meth:`gradients_of_sums`; grads is (T, B, D, 4·H), of n, r, z and k."""
        sequences, D, H = self.sequences, self.D, self.H
        x = masked(input, sequences.valid).flatten(0, 1)
        grad_products_ih, grad_products_hh = grads[..., : 3 * H], grads[..., H:]
        grad_input = None
        needs_input, needs_h0, *needs_parameters = needs_grad
        if needs_input:
            # n, r, z: the order of the gradients.
            weights = sequences.weight_ih.unflatten(0, (D, 3, H)).roll(1, 1).flatten(1, 2)
            grad_input = sequences.tokens(grad_products_ih, 0) @ weights[0]
            for d in range(1, D):
                grad_input.addmm_(sequences.tokens(grad_products_ih, d), weights[d])
        results: list[Tensor | None] = [grad_input, grad_state if needs_h0 else None]
        for d, needs in enumerate(by_direction(Parameters, needs_parameters)):
            da, dv = sequences.tokens(grad_products_ih, d), sequences.tokens(grad_products_hh, d)
            results += [
                _as_in_weights(da.mT @ x) if needs.weight_ih else None,
                dv.mT @ h_previous[d].flatten(0, 1) if needs.weight_hh else None,
                _as_in_weights(da.sum(0, dtype=sequences.acc_dtype)) if needs.bias_ih else None,
                dv.sum(0, dtype=sequences.acc_dtype) if needs.bias_hh else None,
            ]
        return results


def _as_in_weights(t: Tensor) -> Tensor:
    """Reorders gates from n, r, z to r, z, n."""
    return t.unflatten(0, (3, -1)).roll(-1, 0).flatten(0, 1)


# Keyed by linear_before_reset.
_CALLS: dict[bool, type[_GruCall | gru_reset_first.ResetFirstCall]] = {
    True: _GruCall,
    False: gru_reset_first.ResetFirstCall,
}
