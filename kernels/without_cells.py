"""Calls of the operators whose only state is h, GRU and RNN: their arguments, the order of their
launches, and gradients that follow from the kernels'.

The head of ``kernels/recurrent.py`` describes how the work is divided among launches. Each
kind of cell has a subclass of :class:`CallWithoutCells` with its kernels and the launches of a
step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trifuse.kernels.arguments import check_shape
from trifuse.kernels.recurrent import (
    PreparedLaunch,
    Sequences,
    fits_one_launch,
    sequence_config,
    stack,
    step_config,
)
from trifuse.reference.gru import Parameters
from trifuse.reference.lstm import by_direction, masked


class Inputs(NamedTuple):
    """Lengths and biases; None if the call has none."""

    lengths: Tensor | None  # (B,) int64
    # (D, H) in an RNN; in a GRU (D, 4, H), for n, r, z and k, or with the reset gate first (D, 3,
    # H), for r, z and n; float32, or float64 for float64
    bias: Tensor | None


class Variant(NamedTuple):
    """Compile-time parameters of a kernel, besides which tensors are None."""

    H: int
    D: int  # directions
    reverse: int  # bit d: direction d reads rows from their ends


class CallWithoutCells:
    """A call of gru or rnn, converted to the kernels' arguments."""

    gates: int  # the number of blocks of H rows in a weight
    variant: NamedTuple
    # The kernels of a whole sequence and of a step. Their arguments are those of the calls below.
    forward_kernel: Any
    backward_kernel: Any
    forward_step_kernel: Any
    backward_step_kernel: Any

    def __init__(
        self,
        input: Tensor,
        parameters: Sequence[Tensor | None],
        lengths: Tensor | None,
        reverse: Sequence[bool],
    ) -> None:
        self.directions = by_direction(Parameters, parameters)
        self.sequences = sequences = Sequences(
            input,
            [p.weight_ih for p in self.directions],
            [p.weight_hh for p in self.directions],
            lengths,
            reverse,
        )
        self.T, self.B, self.D = sequences.T, sequences.B, sequences.D
        self.H = sequences.weight_hh.shape[2]
        self.one_launch = fits_one_launch(input.device, sequences.dtype, self.H, self.gates)
        self.variant = Variant(self.H, self.D, sequences.reverse)
        self.inputs = Inputs(sequences.lengths, self.bias())

    def biases(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns bias_ih and bias_hh of all directions, (D, gates · H)."""
        acc_dtype = self.sequences.acc_dtype
        bias_ih = stack([p.bias_ih for p in self.directions], acc_dtype)
        return bias_ih, stack([p.bias_hh for p in self.directions], acc_dtype)

    def bias(self) -> Tensor | None:
        """Returns ``Inputs.bias``: here bias_ih + bias_hh of all directions, (D, gates · H)."""
        given = [bias for bias in self.biases() if bias is not None]
        return sum(given[1:], given[0]) if given else None

    def prepare(self, kernel: Any) -> PreparedLaunch:
        """Returns the launch of a kernel over all units."""
        config = sequence_config(self.H) if self.one_launch else step_config(self.B, self.H)
        return PreparedLaunch(kernel, self.sequences.grid(config, self.H), config, self.variant)

    def forward(
        self, input: Tensor, h0: Tensor | None, *gates: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Runs the forward; returns the output (T, B, D·H) and h_n (D, B, H).

        Args:
            gates: the other results that the kernels write: a GRU's gates, or None if they are not
                saved.
        """
        sequences, T, B = self.sequences, self.T, self.B
        state = sequences.zeros_or_copy(h0, self.H, sequences.dtype)
        out = state.new_empty(T, B, self.D * self.H)
        products_ih = sequences.products_ih(input.flatten(0, 1))
        if self.one_launch:
            sequence = self.prepare(self.forward_kernel)
            sequence(sequences.weight_hh, products_ih, state, out, *gates, self.inputs, T, B)
        else:
            self.forward_steps(products_ih, state, out, *gates)
        return out, state

    def forward_steps(
        self, products_ih: Tensor, state: Tensor, out: Tensor, *gates: Tensor | None
    ) -> None:
        """Launches the forward step by step. ``state`` is h0 and becomes h_n.

        A cell with one product per step has one kernel. Other cells override this method and the
        next.
        """
        products_hh = state.new_empty(self.D, self.B, self.gates * self.H)
        weight_hh = self.sequences.weight_hh.mT
        cell = self.prepare(self.forward_step_kernel)
        for step in range(self.T):
            torch.bmm(state, weight_hh, out=products_hh)
            cell(step, products_hh, products_ih, state, out, *gates, self.inputs, self.T, self.B)

    def backward(
        self, grad_output: Tensor, grad_h_n: Tensor | None, *past: Tensor, columns: int
    ) -> tuple[Tensor, Tensor]:
        """Returns the gradients that the kernels store for all steps, and that of h0 (D, B, H).

        Args:
            past: the results of the forward that the kernels read.
            columns: the size of the former gradients, (T, B, D, columns).
        """
        sequences, H, T, B = self.sequences, self.H, self.T, self.B
        grad_output = grad_output.contiguous()
        grad_state = sequences.zeros_or_copy(grad_h_n, H, sequences.acc_dtype)
        grads = sequences.weight_hh.new_empty(T, B, self.D, columns)
        if self.one_launch:
            sequence = self.prepare(self.backward_kernel)
            sequence(sequences.weight_hh, grad_output, *past, grad_state, grads, self.inputs, T, B)
            return grads, grad_state
        dh_recurrent = sequences.zeros_or_copy(None, H, sequences.dtype)
        self.backward_steps(dh_recurrent, grad_output, *past, grad_state, grads)
        return grads, grad_state.add_(dh_recurrent)

    def backward_steps(self, dh_recurrent: Tensor, grad_output: Tensor, *tensors: Tensor) -> None:
        """Launches the backward step by step.

        Args:
            dh_recurrent: (D, B, H), zeros; at the end the gradient of h0 through the products of
                the first step.
            tensors: past, grad_state and grads of :meth:`backward`.
        """
        inputs, T, B = self.inputs, self.T, self.B
        grad_products_hh = dh_recurrent.new_empty(self.D, B, self.gates * self.H)
        cell = self.prepare(self.backward_step_kernel)
        for step in reversed(range(T)):
            cell(step, dh_recurrent, grad_output, *tensors, grad_products_hh, inputs, T, B)
            torch.bmm(grad_products_hh, self.sequences.weight_hh, out=dh_recurrent)

    def gradients_of_sums(
        self,
        input: Tensor,
        grads: Tensor,
        grad_state: Tensor,
        needs_grad: Sequence[bool],
        weight_hh: Callable[[int, Tensor], Tensor],
    ) -> list[Tensor | None]:
        """Computes gradients if W_ih x and the products with W_hh have the same gradient.

        Args:
            grads: (T, B, D, gates · H), that gradient; grad_state: (D, B, H), that of h0.
            weight_hh: (d, da) -> the gradient of weight_hh; da is (T·B, gates · H), d's part of
                grads.

        Returns:
            Gradients of input, h0 and the parameters, not yet in their dtypes; None if not needed.
        """
        sequences = self.sequences
        grad_input = None
        needs_input, needs_h0, *needs_parameters = needs_grad
        if needs_input:  # both directions in one product
            grad_input = grads.flatten(2).flatten(0, 1) @ sequences.weight_ih
        results: list[Tensor | None] = [grad_input, grad_state if needs_h0 else None]
        x = masked(input, sequences.valid).flatten(0, 1)
        for d, needs in enumerate(by_direction(Parameters, needs_parameters)):
            da = sequences.tokens(grads, d)
            bias = da.sum(0, dtype=sequences.acc_dtype) if needs.bias_ih or needs.bias_hh else None
            results += [
                da.mT @ x if needs.weight_ih else None,
                weight_hh(d, da) if needs.weight_hh else None,
                bias if needs.bias_ih else None,
                bias.clone() if bias is not None and needs.bias_hh else None,
            ]
        return results


def check_backward(
    grad_output: Tensor,
    grad_h_n: Tensor | None,
    input: Tensor,
    h0: Tensor | None,
    parameters: Sequence[Tensor | None],
    lengths: Tensor | None,
    output: Tensor,
    *,
    D: int,
    gates: int,
) -> None:
    """Raises ValueError unless the tensors of a backward of gru or rnn still fit one call."""
    T, B, features = input.shape
    H = output.shape[-1] // D
    rows = gates * H
    shapes: tuple[tuple[int, ...], ...] = ((rows, features), (rows, H), (rows,), (rows,))
    for direction in by_direction(Parameters, parameters):
        for name, t, shape in zip(Parameters._fields, direction, shapes, strict=True):
            check_shape(name, t, shape)
    check_shape("hx", h0, (D, B, H))
    check_shape("lengths", lengths, (B,))
    check_shape("grad_h_n", grad_h_n, (D, B, H))
    for name, t in (("output", output), ("grad_output", grad_output)):
        check_shape(name, t, (T, B, D * H))
