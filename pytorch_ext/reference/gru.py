r"""The GRU, forward and backward, as mathematics.

Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder" (2014), arXiv 1406.1078.
The form of ``torch.nn.GRU`` multiplies by the reset gate after the recurrent product; the published
form, equation 8, before it. ONNX's ``linear_before_reset`` selects the form: 1 is torch's, 0 the
published one. For one row and a step t below its length, with h = h_{t-1} and σ the logistic
function:

    r    = σ(W_ir x_t + b_ir + W_hr h + b_hr)
    z    = σ(W_iz x_t + b_iz + W_hz h + b_hz)
    k    = W_hn h + b_hn
    n    = tanh(W_in x_t + b_in + r ⊙ k)                    with linear_before_reset
    n    = tanh(W_in x_t + b_in + W_hn (r ⊙ h) + b_hn)      without
    h_t  = (1 - z) ⊙ n + z ⊙ h,         y_t = h_t

and, for the gradient dh of h_t:

    dn   = dh ⊙ (1 - z) ⊙ (1 - n²)
    dz   = dh ⊙ (h - n) ⊙ z ⊙ (1 - z)

with linear_before_reset:

    dr   = dn ⊙ k ⊙ r ⊙ (1 - r)
    dk   = dn ⊙ r
    dh'  = dh ⊙ z + W_hrᵀ dr + W_hzᵀ dz + W_hnᵀ dk     for h_{t-1}

and without, where dv is the gradient of r ⊙ h:

    dv   = W_hnᵀ dn
    dr   = dv ⊙ h ⊙ r ⊙ (1 - r)
    dh'  = dh ⊙ z + dv ⊙ r + W_hrᵀ dr + W_hzᵀ dz       for h_{t-1}

h is rounded to the dtype of the input at every step; everything else is float32, or float64 for
float64. Every backend is tested against this file in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trifuse.reference.lstm import (
    added_up,
    by_direction,
    in_step_order,
    masked,
    side_by_side,
    stack_steps,
    sum_of_outer_products,
    sum_over_steps,
    valid_steps,
)
from trifuse.reference.results import accumulation_dtype


class Parameters(NamedTuple):
    """One direction's parameters. H is the hidden size, I the input size, and G the number of
    gates: 3 in a GRU (r, z, n), 1 in an RNN."""

    weight_ih: Tensor  # (G·H, I)
    weight_hh: Tensor  # (G·H, H)
    bias_ih: Tensor | None = None  # (G·H,)
    bias_hh: Tensor | None = None  # (G·H,)


SLOTS = len(Parameters._fields)


class Options(NamedTuple):
    reverse: Sequence[bool]  # by direction: whether rows are read from the last step
    linear_before_reset: bool = True  # the product with W_hn precedes the reset gate


class Results(NamedTuple):
    output: Tensor  # (T, B, D·H), D the number of directions
    h_n: Tensor  # (D, B, H)
    # (D, T, B, G·H), of the formula: r, z, n and k; without linear_before_reset r, z and n
    gates: Tensor


def saved_per_unit(linear_before_reset: bool) -> int:
    """Returns how many gates per unit the forward saves: the G of ``Results.gates``."""
    return 4 if linear_before_reset else 3


def gru(
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
        Output and h_n in the dtype of the input, the gates in float32, or float64 for float64. Past
        a row's length its output is 0 and h stays as it is.
    """
    results = []
    for direction in directions(input, h0, parameters, lengths, options.reverse):
        p, h = direction.p, direction.h0
        from_input = direction.from_input()
        hs, gates = [], []
        cell = _cell if options.linear_before_reset else _cell_with_reset_first
        for s in range(input.shape[0]):
            r, z, n, *k = cell(from_input[s], h, p)
            new_h = ((1 - z) * n + z * h).to(input.dtype).to(h.dtype)
            h = new_h if direction.valid is None else torch.where(direction.valid[s], new_h, h)
            hs.append(h)
            gates.append(torch.cat([r, z, n, *k], -1))
        count = saved_per_unit(options.linear_before_reset)
        shapes = (h.shape, (h.shape[0], count * h.shape[1]))
        y, gates_t = (
            in_step_order(stack_steps(steps, shape, h), lengths, direction.reverse)
            for steps, shape in zip((hs, gates), shapes, strict=True)
        )
        results.append((masked(y, direction.valid), h, gates_t))
    ys, h_n, gates_n = zip(*results, strict=True)
    return Results(
        torch.cat(ys, -1).to(input.dtype), torch.stack(h_n).to(input.dtype), torch.stack(gates_n)
    )


def gru_backward(
    grad_output: Tensor,
    grad_h_n: Tensor | None,
    input: Tensor,
    h0: Tensor | None,
    parameters: Sequence[Tensor | None],
    lengths: Tensor | None,
    output: Tensor | None,
    gates: Tensor | None,
    *,
    options: Options,
    needs_grad: Sequence[bool],
) -> list[Tensor | None]:
    """Computes gradients for input, h0 and each of the parameters.

    Args:
        grad_output: (T, B, D·H).
        grad_h_n: (D, B, H) or None for zeros.
        output, gates: the forward's results. If None, they are computed again, so that this
            function can itself be differentiated. Every backend uses it for its double backward.
        needs_grad: which gradients are needed, in the order above.
        others: as in :func:`gru`.

    Returns:
        Gradients, each with the shape and dtype of its tensor; None where not needed.
    """
    if output is None or gates is None:
        output, _, gates = gru(input, h0, parameters, lengths, options=options)

    one_direction = _backward if options.linear_before_reset else _backward_with_reset_first

    def backward(d: int, direction: Direction, dy: Tensor, dh: Tensor, y: Tensor) -> Gradients:
        cell = direction.steps(gates[d]).chunk(saved_per_unit(options.linear_before_reset), -1)
        return one_direction(direction, dy, dh, y, *cell)

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


# Directions, in a GRU and in an RNN --------------------------------------------------------------

# Functions that compute the gradients of one direction, by the names of arguments and parameters.
Gradients = dict[str, Callable[[], Tensor]]


class Direction(NamedTuple):
    """One direction's arguments, in the order of its steps, in the accumulation dtype."""

    p: Parameters
    x: Tensor  # (T, B, I)
    h0: Tensor  # (B, H)
    lengths: Tensor | None
    reverse: bool
    valid: Tensor | None  # bool (T, B, 1): whether a row has that step

    def steps(self, t: Tensor) -> Tensor:
        """Puts (T, B, ...) in step order, with 0 past each row's length."""
        return in_step_order(masked(t, self.valid), self.lengths, self.reverse).to(self.x.dtype)

    def from_input(self) -> Tensor:
        """Returns W_ih x + b_ih of all steps."""
        a = self.x @ self.p.weight_ih.mT
        return a if self.p.bias_ih is None else a + self.p.bias_ih

    def previous_h(self, y: Tensor) -> Tensor:
        """Returns h before each step; 0 past a row's length, where it affects nothing.

        Args:
            y: (T, B, H), the output, in step order.
        """
        return masked(torch.cat([self.h0[None], y])[: len(self.x)], self.valid)


def directions(
    input: Tensor,
    h0: Tensor | None,
    parameters: Sequence[Tensor | None],
    lengths: Tensor | None,
    reverse: Sequence[bool],
) -> Iterator[Direction]:
    """Yields the directions of a call."""
    (T, B, _), wide = input.shape, accumulation_dtype(input.dtype)
    valid = valid_steps(T, lengths)
    wide_parameters = [None if t is None else t.to(wide) for t in parameters]
    for d, p in enumerate(by_direction(Parameters, wide_parameters)):
        x = in_step_order(masked(input, valid), lengths, reverse[d]).to(wide)
        H = p.weight_hh.shape[1]
        first = input.new_zeros(B, H, dtype=wide) if h0 is None else h0[d].to(wide)
        yield Direction(p, x, first, lengths, reverse[d], valid)


def gradients(
    backward: Callable[[int, Direction, Tensor, Tensor, Tensor], Gradients],
    grad_output: Tensor,
    grad_h_n: Tensor | None,
    input: Tensor,
    h0: Tensor | None,
    parameters: Sequence[Tensor | None],
    lengths: Tensor | None,
    reverse: Sequence[bool],
    *,
    output: Tensor,
    needs_grad: Sequence[bool],
) -> list[Tensor | None]:
    """Computes the gradients that are needed, direction by direction.

    Args:
        backward: (d, direction, dy, dh, y) -> the gradients of direction d; dy, dh and y as in
            :func:`_backward`.
        others: as in :func:`gru_backward`.

    Returns:
        As :func:`gru_backward`.
    """
    wants_input, wants_h0, *of_parameters = needs_grad
    wants = by_direction(Parameters, of_parameters)
    results: list[dict[str, Tensor | None]] = []
    for d, direction in enumerate(directions(input, h0, parameters, lengths, reverse)):
        H = direction.h0.shape[-1]
        own = slice(d * H, (d + 1) * H)
        needs = {"input": wants_input, "h0": wants_h0, **wants[d]._asdict()}
        dh = torch.zeros_like(direction.h0) if grad_h_n is None else grad_h_n[d]
        functions = backward(
            d,
            direction,
            direction.steps(grad_output[..., own]),
            dh.to(direction.h0.dtype),
            direction.steps(output[..., own]),
        )
        results.append(
            {name: functions[name]() if needed else None for name, needed in needs.items()}
        )
    grads = [added_up(results, "input"), side_by_side(results, "h0")]
    grads += [result[name] for result in results for name in Parameters._fields]
    return [
        None if grad is None or t is None else grad.to(t.dtype)
        for grad, t in zip(grads, [input, h0, *parameters], strict=True)
    ]


# The GRU's cell ----------------------------------------------------------------------------------


def _backward(
    direction: Direction,
    dy: Tensor,
    dh: Tensor,
    y: Tensor,
    r: Tensor,
    z: Tensor,
    n: Tensor,
    k: Tensor,
) -> Gradients:
    """Returns the gradients of one direction, with ``linear_before_reset``.

    Args:
        dy: (T, B, H), the gradient of the output, in step order; dh: (B, H), that of h_n.
        y: (T, B, H), the forward's output, in step order.
        r, z, n, k: those of the forward, in step order.
    """
    p = direction.p
    h = direction.previous_h(y)
    n_by_h, z_by_h, old_h = _derivatives(direction, h, z, n)
    r_by_n = k * r * (1 - r)

    das, dahs = [], []
    for s in reversed(range(len(h))):
        dh = dh + dy[s]
        dn, dz = dh * n_by_h[s], dh * z_by_h[s]
        dr = dn * r_by_n[s]
        dah = torch.cat([dr, dz, dn * r[s]], -1)
        dh = dh * old_h[s] + dah @ p.weight_hh
        das.append(torch.cat([dr, dz, dn], -1))
        dahs.append(dah)
    shape = (h.shape[1], 3 * h.shape[2])
    da, dah = (stack_steps(steps[::-1], shape, h) for steps in (das, dahs))
    return {
        **_gradients(direction, da, dh),
        "weight_hh": lambda: sum_of_outer_products(dah, h),
        "bias_hh": lambda: sum_over_steps(dah),
    }


def _backward_with_reset_first(
    direction: Direction, dy: Tensor, dh: Tensor, y: Tensor, r: Tensor, z: Tensor, n: Tensor
) -> Gradients:
    """Returns the gradients of one direction, without ``linear_before_reset``.

    The arguments are those of :func:`_backward`.
    """
    h = direction.previous_h(y)
    n_by_h, z_by_h, old_h = _derivatives(direction, h, z, n)
    r_by_v = h * r * (1 - r)
    H = h.shape[2]
    w_rz, w_n = direction.p.weight_hh.split([2 * H, H])

    das = []
    for s in reversed(range(len(h))):
        dh = dh + dy[s]
        dn, dz = dh * n_by_h[s], dh * z_by_h[s]
        dv = dn @ w_n
        drz = torch.cat([dv * r_by_v[s], dz], -1)
        dh = dh * old_h[s] + dv * r[s] + drz @ w_rz
        das.append(torch.cat([drz, dn], -1))
    da = stack_steps(das[::-1], (h.shape[1], 3 * H), h)
    drz, dn = da.split([2 * H, H], -1)
    return {
        **_gradients(direction, da, dh),
        "weight_hh": lambda: torch.cat(
            [sum_of_outer_products(drz, h), sum_of_outer_products(dn, r * h)]
        ),
        "bias_hh": lambda: sum_over_steps(da),
    }


def _derivatives(
    direction: Direction, h: Tensor, z: Tensor, n: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns, for each step, the derivatives of h_t with respect to the sums of n and z, and with
    respect to h = h_{t-1} without the path through the gates. A row that has ended keeps its h."""
    n_by_h = masked((1 - z) * (1 - n.square()), direction.valid)
    z_by_h = masked((h - n) * z * (1 - z), direction.valid)
    return n_by_h, z_by_h, z if direction.valid is None else torch.where(direction.valid, z, 1)


def _gradients(direction: Direction, da: Tensor, dh: Tensor) -> Gradients:
    """Returns the gradients that follow from those of W_ih x + b_ih and of h0."""
    return {
        "input": lambda: in_step_order(
            da @ direction.p.weight_ih, direction.lengths, direction.reverse
        ),
        "h0": lambda: dh,
        "weight_ih": lambda: sum_of_outer_products(da, direction.x),
        "bias_ih": lambda: sum_over_steps(da),
    }


def _cell(from_input: Tensor, h: Tensor, p: Parameters) -> tuple[Tensor, ...]:
    """Returns r, z, n and k, each (B, H), with ``linear_before_reset``."""
    a_r, a_z, a_n = from_input.chunk(3, -1)
    hidden = h @ p.weight_hh.mT
    h_r, h_z, k = (hidden if p.bias_hh is None else hidden + p.bias_hh).chunk(3, -1)
    r, z = torch.sigmoid(a_r + h_r), torch.sigmoid(a_z + h_z)
    return r, z, torch.tanh(a_n + r * k), k


def _cell_with_reset_first(from_input: Tensor, h: Tensor, p: Parameters) -> tuple[Tensor, ...]:
    """Returns r, z and n, each (B, H), without ``linear_before_reset``."""
    w_r, w_z, w_n = p.weight_hh.chunk(3)
    a_r, a_z, a_n = (from_input if p.bias_hh is None else from_input + p.bias_hh).chunk(3, -1)
    r, z = torch.sigmoid(a_r + h @ w_r.mT), torch.sigmoid(a_z + h @ w_z.mT)
    return r, z, torch.tanh(a_n + (r * h) @ w_n.mT)
