r"""The Elman RNN, forward and backward, as mathematics.

Elman, "Finding Structure in Time" (1990), in the form of ``torch.nn.RNN``. For one row and a step t
below its length, with h = h_{t-1} and f either tanh or relu:

    h_t  = f(W_ih x_t + b_ih + W_hh h + b_hh),         y_t = h_t

and, for the gradient dh of h_t:

    da   = dh ⊙ (1 - h_t²)  for tanh;   da = dh where h_t > 0, else 0,  for relu
    dh'  = W_hhᵀ da         for h_{t-1}

So the backward needs only the output of the forward. h is rounded to the dtype of the input at
every step, and the derivative is that at the rounded h, as in torch; everything else is float32, or
float64 for float64. A NaN in h passes relu, and so does its gradient. Every backend is tested
against this file in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trifuse.reference.gru import SLOTS as SLOTS
from trifuse.reference.gru import Direction, Gradients, directions, gradients
from trifuse.reference.gru import Parameters as Parameters
from trifuse.reference.lstm import (
    in_step_order,
    masked,
    stack_steps,
    sum_of_outer_products,
    sum_over_steps,
)


class Options(NamedTuple):
    reverse: Sequence[bool]  # by direction: whether rows are read from the last step
    relu: bool = False  # the activation: relu, not tanh


class Results(NamedTuple):
    output: Tensor  # (T, B, D·H), D the number of directions
    h_n: Tensor  # (D, B, H)


def rnn(
    input: Tensor,
    h0: Tensor | None,
    parameters: Sequence[Tensor | None],
    lengths: Tensor | None,
    *,
    options: Options,
) -> Results:
    """Runs one layer in one direction or two.

    Args:
        input: (T, B, I).
        h0: (D, B, H) or None for zeros.
        parameters: the :class:`Parameters` of each direction, one after another.
        lengths: int64 (B,), the number of steps in each row; None: all T.

    Returns:
        Output and h_n in the dtype of the input. Past a row's length its output is 0 and h stays as
        it is.
    """
    results = []
    for direction in directions(input, h0, parameters, lengths, options.reverse):
        p, h = direction.p, direction.h0
        from_input = direction.from_input()
        hs = []
        for s in range(input.shape[0]):
            hidden = h @ p.weight_hh.mT
            a = from_input[s] + (hidden if p.bias_hh is None else hidden + p.bias_hh)
            new_h = (torch.relu(a) if options.relu else torch.tanh(a)).to(input.dtype).to(h.dtype)
            h = new_h if direction.valid is None else torch.where(direction.valid[s], new_h, h)
            hs.append(h)
        y = in_step_order(stack_steps(hs, h.shape, h), lengths, direction.reverse)
        results.append((masked(y, direction.valid), h))
    ys, h_n = zip(*results, strict=True)
    return Results(torch.cat(ys, -1).to(input.dtype), torch.stack(h_n).to(input.dtype))


def rnn_backward(
    grad_output: Tensor,
    grad_h_n: Tensor | None,
    input: Tensor,
    h0: Tensor | None,
    parameters: Sequence[Tensor | None],
    lengths: Tensor | None,
    output: Tensor | None,
    *,
    options: Options,
    needs_grad: Sequence[bool],
) -> list[Tensor | None]:
    """Computes gradients for input, h0 and each of the parameters.

    Args:
        grad_output: (T, B, D·H).
        grad_h_n: (D, B, H) or None for zeros.
        output: that of the forward. If None, it is computed again, so that this function can itself
            be differentiated. Every backend uses it for its double backward.
        needs_grad: which gradients are needed, in the order above.
        others: as in :func:`rnn`.

    Returns:
        Gradients, each with the shape and dtype of its tensor; None where not needed.
    """
    if output is None:
        output, _ = rnn(input, h0, parameters, lengths, options=options)

    def backward(d: int, direction: Direction, dy: Tensor, dh: Tensor, y: Tensor) -> Gradients:
        return _backward(direction, dy, dh, y, options.relu)

    return gradients(
        backward,
        grad_output,
        grad_h_n,
        input,
        h0,
        parameters,
        lengths,
        options.reverse,
        output=output,
        needs_grad=needs_grad,
    )


def _backward(direction: Direction, dy: Tensor, dh: Tensor, y: Tensor, relu: bool) -> Gradients:
    """Returns the gradients of one direction.

    Args:
        dy: (T, B, H), the gradient of the output, in step order; dh: (B, H), that of h_n.
        y: (T, B, H), the forward's output, in step order.
    """
    p, x, valid = direction.p, direction.x, direction.valid
    h = direction.previous_h(y)
    das = []
    for s in reversed(range(len(x))):
        dh = dh + dy[s]
        # A row that has ended keeps its h.
        own = None if valid is None else valid[s]
        da = torch.where(y[s] <= 0, 0, dh) if relu else dh * (1 - y[s].square())
        da = masked(da, own)
        through = da @ p.weight_hh
        dh = through if own is None else torch.where(own, through, dh)
        das.append(da)
    da = stack_steps(das[::-1], h.shape[1:], h)
    return {
        "input": lambda: in_step_order(da @ p.weight_ih, direction.lengths, direction.reverse),
        "h0": lambda: dh,
        "weight_ih": lambda: sum_of_outer_products(da, x),
        "weight_hh": lambda: sum_of_outer_products(da, h),
        "bias_ih": lambda: sum_over_steps(da),
        "bias_hh": lambda: sum_over_steps(da),
    }
