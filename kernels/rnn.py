"""The Elman RNN over a whole sequence, one layer in one or two directions, forward and backward, in
Triton.

The formulas are at the head of ``pytorch_ext/reference/rnn.py``. The head of
``kernels/recurrent.py`` describes how they are divided among launches.

W_ih x and W_hh h have the same gradient, and the only result of the forward that the backward needs
is the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trifuse.kernels.arithmetic import dot, round_to
from trifuse.kernels.recurrent import (
    as_results,
    load,
    load_product,
    load_state,
    load_weights,
    longest_row,
    make_step,
    make_tile,
    next_h,
    store,
    store_state,
    tanh,
    token_offsets,
    zero_steps,
)
from trifuse.kernels.without_cells import CallWithoutCells, check_backward


class Variant(NamedTuple):
    """Compile-time parameters of a kernel, besides which tensors are None."""

    H: int
    D: int  # directions
    reverse: int  # bit d: direction d reads rows from their ends
    relu: bool  # the activation: relu, not tanh


# Parts of a step ---------------------------------------------------------------------------------


@triton.jit
def _cell_forward(v, h, products_ih, out, inputs, tile, at, variant: tl.constexpr):
    """Returns the next h, in its dtype. v is W_hh h. Writes the output."""
    H: tl.constexpr = variant.H
    dtype: tl.constexpr = v.dtype
    inside = at.active & (tile.column < H)
    a = load(products_ih + token_offsets(tile, at.t, variant.D, H), inside, dtype) + v
    if inputs.bias is not None:
        a += load(inputs.bias + tile.d * H + tile.column, tile.column < H, dtype)
    if variant.relu:
        new = tl.where(a < 0.0, 0.0, a)  # a NaN stays
    else:
        new = tanh(a)
    return next_h(new, h, out, tile, at, variant.D, H)


@triton.jit
def _cell_backward(dh, dh_recurrent, grad_out, out, grads, tile, at, variant: tl.constexpr):
    """Returns the gradient of a, and the gradient of h_{t-1} without its part through W_hh. Writes
    the former.

    ``dh_recurrent`` is the part through W_hh from the next step; it is 0 for a row without that
    step. In a row that is not active, dh is kept and the gradient of a is 0.
    """
    H: tl.constexpr = variant.H
    dtype: tl.constexpr = dh.dtype
    inside = at.active & (tile.column < H)
    y = load(out + token_offsets(tile, at.t, variant.D, H), inside, dtype)
    total = dh + dh_recurrent
    total += load(grad_out + token_offsets(tile, at.t, variant.D, H), inside, dtype)
    if variant.relu:
        da = tl.where(y <= 0.0, 0.0, total)
    else:
        da = total * (1.0 - y * y)
    da = tl.where(inside, da, 0.0)
    written = tile.exists & (tile.column < H)
    store(grads + token_offsets(tile, at.t, variant.D, H), da, written)
    return da, tl.where(at.active, 0.0, dh)


# Forward -----------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["step", "T", "B"])
def rnn_forward_step_kernel(
    step,
    products_hh,  # (D, B, H): W_hh h
    products_ih,  # (T, B, D, H): W_ih x
    state,  # (D, B, H): h
    out,  # (T, B, D, H)
    inputs,
    T,
    B,
    variant: tl.constexpr,
    block: tl.constexpr,
):
    """One step, without its product.

    A program owns block.rows rows and block.columns units of one direction. It reads W_ih x, W_hh h
    and h; it writes h and the output.

    Floor: per unit 3 numbers read and 2 written, in the dtype of the input. Everything except W_ih
    x and the output stays in the L2 cache, so a step is bound by the time from launch to launch.
    """
    H: tl.constexpr = variant.H
    tile = make_tile(tl.program_id(0), inputs.lengths, T, B, block)
    at = make_step(tile, step, variant.reverse)
    h = load_state(state, tile, H)
    v = load_product(products_hh, 0, tile, 1, H)
    h = _cell_forward(v, h, products_ih, out, inputs, tile, at, variant)
    store_state(state, h, tile, H)


@triton.jit(do_not_specialize=["T", "B"])
def rnn_forward_sequence_kernel(
    weight_hh,  # (D, H, H)
    products_ih,  # (T, B, D, H): W_ih x
    state,  # (D, B, H): the initial h, replaced by the final h
    out,  # (T, B, D, H)
    inputs,
    T,
    B,
    variant: tl.constexpr,
    block: tl.constexpr,
):
    """All steps. A program owns block.rows whole rows of one direction.

    It reads the weights once and keeps them in shared memory; h stays in registers. Until its
    longest row ends, it reads W_ih x of each step and writes the output; after that it only writes
    zeros.

    Floor: per step and program, block.columns² · block.rows multiplications on one multiprocessor's
    matrix unit, and the latency of one such product.
    """
    H: tl.constexpr = variant.H
    tile = make_tile(tl.program_id(0), inputs.lengths, T, B, block)
    h = load_state(state, tile, H)
    w = load_weights(weight_hh, 0, tile, H, 1, block)
    longest = longest_row(tile)
    for step in tl.range(0, longest, num_stages=1):
        at = make_step(tile, step, variant.reverse)
        zeros = tl.full((block.rows, block.columns), 0.0, tl.float32)
        v = dot(h, tl.trans(w), zeros)
        h = _cell_forward(v, h, products_ih, out, inputs, tile, at, variant)
    zero_steps(out, longest, tile, 1, H, variant, block)
    store_state(state, h, tile, H)


# Backward ----------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["step", "T", "B"])
def rnn_backward_step_kernel(
    step,
    dh_recurrent,  # (D, B, H): the gradient of h through the product of the next step
    grad_out,  # (T, B, D, H)
    out,  # (T, B, D, H)
    grad_state,  # (D, B, H), in the accumulation dtype: the rest of the gradient of h
    grads,  # (T, B, D, H): of a
    grad_products_hh,  # (D, B, H): the same for this step only
    inputs,
    T,
    B,
    variant: tl.constexpr,
    block: tl.constexpr,
):
    """One step of the backward, without its product.

    A program owns block.rows rows and block.columns units of one direction. It reads their output
    and the gradients of h; it writes the gradients of a (twice) and of h.

    Floor: per unit 3 numbers read and 2 written in the dtype of the input, and one of 4 bytes read
    and written; bound by the time from launch to launch, as in the forward.
    """
    H: tl.constexpr = variant.H
    tile = make_tile(tl.program_id(0), inputs.lengths, T, B, block)
    at = make_step(tile, step, variant.reverse)
    dh = load_state(grad_state, tile, H)
    recurrent = load_state(dh_recurrent, tile, H).to(dh.dtype)
    da, dh = _cell_backward(dh, recurrent, grad_out, out, grads, tile, at, variant)
    store_state(grad_state, dh, tile, H)
    store_state(grad_products_hh, da, tile, H)


@triton.jit(do_not_specialize=["T", "B"])
def rnn_backward_sequence_kernel(
    weight_hh,  # (D, H, H)
    grad_out,  # (T, B, D, H)
    out,  # (T, B, D, H)
    grad_state,  # (D, B, H) float32: the gradient of h_n, and then of h0
    grads,  # (T, B, D, H): of a
    inputs,
    T,
    B,
    variant: tl.constexpr,
    block: tl.constexpr,
):
    """All steps, backwards, on the tiles of the forward; the gradient of h stays in registers.

    Floor: as in the forward, plus reading the output.
    """
    H: tl.constexpr = variant.H
    input_dtype: tl.constexpr = weight_hh.dtype.element_ty
    tile = make_tile(tl.program_id(0), inputs.lengths, T, B, block)
    dh = load_state(grad_state, tile, H)
    longest = longest_row(tile)
    zero_steps(grads, longest, tile, 1, H, variant, block)
    w = load_weights(weight_hh, 0, tile, H, 1, block)
    zeros = tl.full((block.rows, block.columns), 0.0, tl.float32)
    dh_recurrent = zeros
    for back in tl.range(0, longest, num_stages=1):
        at = make_step(tile, longest - 1 - back, variant.reverse)
        da, dh = _cell_backward(dh, dh_recurrent, grad_out, out, grads, tile, at, variant)
        dh_recurrent = dot(round_to(da, input_dtype), w, zeros)
    store_state(grad_state, dh + dh_recurrent, tile, H)


# Launchers ---------------------------------------------------------------------------------------


def rnn_forward(
    input: Tensor,
    h0: Tensor | None,
    parameters: Sequence[Tensor | None],
    lengths: Tensor | None,
    reverse: Sequence[bool],
    relu: bool,
) -> tuple[Tensor, Tensor]:
    """Implements the op ``rnn_forward``. float64 is for checking the formulas."""
    with torch.cuda.device_of(input):
        return _RnnCall(input, parameters, lengths, reverse, relu).forward(input, h0)


def rnn_backward(
    grad_output: Tensor,
    grad_h_n: Tensor | None,
    input: Tensor,
    h0: Tensor | None,
    parameters: Sequence[Tensor | None],
    lengths: Tensor | None,
    output: Tensor,
    reverse: Sequence[bool],
    relu: bool,
    needs_grad: Sequence[bool],
) -> list[Tensor]:
    """Implements the op ``rnn_backward``."""
    check_backward(
        grad_output, grad_h_n, input, h0, parameters, lengths, output, D=len(reverse), gates=1
    )
    with torch.cuda.device_of(input):
        call = _RnnCall(input, parameters, lengths, reverse, relu)
        grads, grad_state = call.backward(
            grad_output, grad_h_n, output.contiguous(), columns=call.H
        )
        h_previous = call.sequences.previous_h(output, h0)
        input_grads = call.gradients_of_sums(
            input, grads, grad_state, needs_grad, lambda d, da: da.mT @ h_previous[d].flatten(0, 1)
        )
    return as_results(input_grads, (input, h0, *parameters), input)


class _RnnCall(CallWithoutCells):
    gates = 1
    forward_kernel, forward_step_kernel = rnn_forward_sequence_kernel, rnn_forward_step_kernel
    backward_kernel, backward_step_kernel = rnn_backward_sequence_kernel, rnn_backward_step_kernel

    def __init__(
        self,
        input: Tensor,
        parameters: Sequence[Tensor | None],
        lengths: Tensor | None,
        reverse: Sequence[bool],
        relu: bool,
    ) -> None:
        super().__init__(input, parameters, lengths, reverse)
        self.variant = Variant(self.H, self.D, self.sequences.reverse, relu)
