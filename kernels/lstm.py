"""The LSTM over a whole sequence, one layer in one or two directions, forward and backward, in
Triton: the launchers.

The formulas are at the head of ``pytorch_ext/reference/lstm.py``. The head of
``kernels/recurrent.py`` describes how they are divided among launches and programs. With a
projection, a step has two products and two kernels, and is always launched step by step.

- ``lstm_arguments.py``: the kernels' arguments
- ``lstm_cell.py``: pieces of a step that forward and backward share
- ``lstm_forward.py``, ``lstm_backward.py``: the kernels
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from trifuse.kernels import dropout_add_layer_norm as layer_norm
from trifuse.kernels.arguments import check_shape
from trifuse.kernels.launch import Config
from trifuse.kernels.lstm_arguments import Gradients, Inputs, Past, Saved, Shares, State, Variant
from trifuse.kernels.lstm_backward import (
    lstm_backward_projection_kernel,
    lstm_backward_sequence_kernel,
    lstm_backward_step_kernel,
    lstm_hidden_kernel,
)
from trifuse.kernels.lstm_forward import (
    lstm_dropout_kernel,
    lstm_forward_projection_kernel,
    lstm_forward_sequence_kernel,
    lstm_forward_step_kernel,
)
from trifuse.kernels.recurrent import (
    PreparedLaunch,
    Sequences,
    as_results,
    fits_one_launch,
    sequence_config,
    stack,
    step_config,
)
from trifuse.reference import philox
from trifuse.reference.lstm import Parameters, by_direction, clipped_columns, masked, of_h0

_SAVE_ALL = 2  # in the op's argument ``save``: see pytorch_ext/ops/_operator.py


def lstm_forward(
    input: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    parameters: Sequence[Tensor | None],
    lengths: Tensor | None,
    seed: Tensor | None,
    *options: Any,
) -> tuple[Tensor, ...]:
    """Implements the op ``lstm_forward``.

    float64 is for checking the formulas. It is slow, and does not support layer norm.
    """
    *call_options, save = options
    with torch.cuda.device_of(input):
        call = _LstmCall(input, parameters, lengths, seed, *call_options)
        variant, inputs, sequences, T, B = call.variant, call.inputs, call.sequences, call.T, call.B
        h = sequences.zeros_or_copy(h0, variant.R, sequences.dtype)
        h_dropped = None if inputs.dropout is None else (h * inputs.dropout).to(sequences.dtype)
        state = State(h, h_dropped, sequences.zeros_or_copy(c0, variant.H, sequences.acc_dtype))
        out = h.new_empty(T, B, variant.D * variant.R)
        gates = h.new_empty((variant.D, T, B, variant.G * variant.H) if save == _SAVE_ALL else (0,))
        cells = state.c.new_empty((variant.D, T, B, variant.H) if save else (0,))
        save_clipped = save and variant.clip_columns > 0
        clipped = out.new_empty(
            (variant.D, T, B, variant.clip_columns) if save_clipped else (0,), dtype=torch.bool
        )
        saved = Saved(
            gates if save == _SAVE_ALL else None,
            cells if save else None,
            clipped if save_clipped else None,
        )
        products_ih = call.normalised_ih(sequences.products_ih(input.flatten(0, 1)))
        if call.one_launch:
            sequence = call.prepare(lstm_forward_sequence_kernel, variant.H)
            sequence(sequences.weight_hh, products_ih, state, out, saved, inputs, T, B)
        else:
            _forward_steps(call, products_ih, state, out, saved)
    return out, state.h, state.c, gates, cells, clipped


def _forward_steps(
    call: _LstmCall, products_ih: Tensor, state: State, out: Tensor, saved: Saved
) -> None:
    """Launches the forward step by step."""
    variant, inputs, T, B = call.variant, call.inputs, call.T, call.B
    h_dropped = state.h if state.h_dropped is None else state.h_dropped
    weight_hh = call.sequences.weight_hh.mT
    products_hh = h_dropped.new_empty(variant.D, B, variant.G * variant.H)
    cell = call.prepare(lstm_forward_step_kernel, variant.H)
    if call.weight_hr is None:
        for step in range(T):
            torch.bmm(h_dropped, weight_hh, out=products_hh)
            cell(step, products_hh, products_ih, state, out, None, saved, inputs, T, B)
        return
    weight_hr = call.weight_hr.mT
    m, projected = h_dropped.new_empty(variant.D, B, variant.H), torch.empty_like(h_dropped)
    projection = call.prepare(lstm_forward_projection_kernel, variant.R)
    for step in range(T):
        torch.bmm(h_dropped, weight_hh, out=products_hh)
        cell(step, products_hh, products_ih, state, out, m, saved, inputs, T, B)
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
    *call_options, needs_grad = options
    recompute = gates.dim() == 1
    _check_backward(
        grad_output,
        grad_h_n,
        grad_c_n,
        input,
        h0,
        c0,
        parameters,
        lengths,
        output,
        None if recompute else gates,
        cells,
        *call_options[:2],
    )
    with torch.cuda.device_of(input):
        call = _LstmCall(input, parameters, lengths, seed, *call_options, recompute=recompute)
        variant, sequences = call.variant, call.sequences
        x = masked(input, sequences.valid).flatten(0, 1)
        h_dropped = sequences.previous_h(output, h0)
        if call.inputs.dropout is not None:
            h_dropped = (h_dropped * call.inputs.dropout[:, None]).to(sequences.dtype)
        grads = Gradients(
            sequences.zeros_or_copy(grad_h_n, variant.R, sequences.acc_dtype),
            sequences.zeros_or_copy(grad_c_n, variant.H, sequences.acc_dtype),
            *_products(call, x, h_dropped),
        )
        past = Past(
            Saved(None if recompute else gates, cells, clipped if clipped.numel() else None),
            sequences.zeros_or_copy(c0, variant.H, sequences.acc_dtype),
        )
        shares = call.shares()
        if call.one_launch:
            sequence = call.prepare(lstm_backward_sequence_kernel, variant.H)
            sequence(
                sequences.weight_hh,
                grad_output.contiguous(),
                past,
                grads,
                shares,
                call.inputs,
                call.T,
                call.B,
            )
            projection = None
        else:
            projection = _backward_steps(call, grad_output.contiguous(), past, grads, shares)
        input_grads = _gradients(call, x, h_dropped, grads, shares, projection, needs_grad)
    like = of_h0(input, h0, grad_h_n)
    return as_results(input_grads, (input, like, c0, *parameters), input)


def _check_backward(
    grad_output: Tensor,
    grad_h_n: Tensor | None,
    grad_c_n: Tensor | None,
    input: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    parameters: Sequence[Tensor | None],
    lengths: Tensor | None,
    output: Tensor,
    gates: Tensor | None,
    cells: Tensor,
    reverse: Sequence[bool],
    coupled: bool,
) -> None:
    """Raises ValueError unless the tensors of a backward still fit one call."""
    (T, B, features), D, G = input.shape, len(reverse), 3 if coupled else 4
    R, H = output.shape[-1] // D, cells.shape[-1]
    all_gates = (G * H,)
    shapes: tuple[tuple[int, ...], ...] = (
        (G * H, features),
        (G * H, R),
        all_gates,
        all_gates,
        (R, H),
        (G - 1, H),
        all_gates,
        all_gates,
        (H,),
        (H,),
    )
    for direction in by_direction(Parameters, parameters):
        for name, t, shape in zip(Parameters._fields, direction, shapes, strict=True):
            check_shape(name, t, shape)
    check_shape("h0", h0, (D, B, R))
    check_shape("c0", c0, (D, B, H))
    check_shape("lengths", lengths, (B,))
    check_shape("output", output, (T, B, D * R))
    check_shape("grad_output", grad_output, output.shape)
    check_shape("grad_h_n", grad_h_n, (D, B, R))
    check_shape("grad_c_n", grad_c_n, (D, B, H))
    check_shape("cells", cells, (D, T, B, H))
    check_shape("gates", gates, (D, T, B, G * H))


def _products(call: _LstmCall, x: Tensor, h_dropped: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns ``Gradients.gates`` and ``Gradients.products_hh``, which hold the products of the
    forward that the steps read, if any."""
    variant, sequences = call.variant, call.sequences
    shape = (call.T, call.B, variant.D, variant.G * variant.H)
    if variant.recompute:
        gates = call.normalised_ih(sequences.products_ih(x))
    else:
        gates = x.new_empty(shape)
    products_hh = None if call.inputs.norm_hh is None else x.new_empty(shape)
    for d in range(variant.D):
        h, weight = h_dropped[d].flatten(0, 1), sequences.weight_hh[d].mT
        if products_hh is not None:
            torch.mm(h, weight, out=sequences.tokens(products_hh, d))
        elif variant.recompute:
            sequences.tokens(gates, d).addmm_(h, weight)
    return gates, products_hh


def _backward_steps(
    call: _LstmCall, grad_out: Tensor, past: Past, grads: Gradients, shares: Shares
) -> tuple[Tensor, Tensor] | None:
    """Launches the backward step by step. With a projection, returns the gradient of W_hr m
    (D, T, B, R) and m (D, T, B, H)."""
    variant, inputs, T, B = call.variant, call.inputs, call.T, call.B
    weight_hh, weight_hr = call.sequences.weight_hh, call.weight_hr
    dh_recurrent = grad_out.new_zeros(variant.D, B, variant.R)
    grad_products_hh = grad_out.new_empty(variant.D, B, variant.G * variant.H)
    cell = call.prepare(lstm_backward_step_kernel, variant.H)
    if weight_hr is None:
        for step in reversed(range(T)):
            cell(step, dh_recurrent, grad_out, past, grads, grad_products_hh, shares, inputs, T, B)
            torch.bmm(grad_products_hh, weight_hh, out=dh_recurrent)
        call.add_recurrent_gradient(grads, dh_recurrent)
        return None
    m = grad_out.new_empty(variant.D, T, B, variant.H)
    call.prepare(lstm_hidden_kernel, variant.H, steps=T)(m, past, grads, inputs, T, B)
    grad_projected_steps = grad_out.new_empty(variant.D, T, B, variant.R)
    grad_projected = torch.empty_like(dh_recurrent)
    dm = grad_out.new_empty(variant.D, B, variant.H)
    projection = call.prepare(lstm_backward_projection_kernel, variant.R)
    for step in reversed(range(T)):
        projection(
            step,
            dh_recurrent,
            grad_out,
            past,
            grads,
            grad_projected,
            grad_projected_steps,
            inputs,
            T,
            B,
        )
        torch.bmm(grad_projected, weight_hr, out=dm)
        cell(step, dm, grad_out, past, grads, grad_products_hh, shares, inputs, T, B)
        torch.bmm(grad_products_hh, weight_hh, out=dh_recurrent)
    call.add_recurrent_gradient(grads, dh_recurrent)
    return grad_projected_steps, m


def _gradients(
    call: _LstmCall,
    x: Tensor,
    h_dropped: Tensor,
    grads: Gradients,
    shares: Shares,
    projection: tuple[Tensor, Tensor] | None,
    needs_grad: Sequence[bool],
) -> list[Tensor | None]:
    """Returns the gradients of the tensors, not yet in their dtypes; None if not needed."""
    sequences, grad_products_ih = call.sequences, grads.gates
    grad_norm_ih: Sequence[Tensor | None] = [None] * call.variant.D
    if call.norms[0] is not None:
        grad_products_ih, grad_norm_ih = _normalised_ih_backward(
            call, grads.gates, sequences.products_ih(x)
        )
    grad_products_hh = grads.gates if grads.products_hh is None else grads.products_hh
    needs_input, needs_h0, needs_c0, *needs_parameters = needs_grad
    results: list[Tensor | None] = [
        grad_products_ih.flatten(2).flatten(0, 1) @ sequences.weight_ih if needs_input else None,
        grads.h if needs_h0 else None,
        grads.c if needs_c0 else None,
    ]
    for d, needs in enumerate(by_direction(Parameters, needs_parameters)):
        own: dict[str, Tensor | None] = dict.fromkeys(Parameters._fields)
        if needs.weight_ih:
            own["weight_ih"] = sequences.tokens(grad_products_ih, d).mT @ x
        if needs.weight_hh:
            dv = sequences.tokens(grad_products_hh, d)
            own["weight_hh"] = dv.mT @ h_dropped[d].flatten(0, 1)
        for name in ("bias_ih", "bias_hh"):
            if getattr(needs, name):
                own[name] = sequences.tokens(grads.gates, d).sum(0, dtype=sequences.acc_dtype)
        if needs.weight_hr and projection is not None:
            dq, m = (t[d].flatten(0, 1) for t in projection)
            own["weight_hr"] = dq.mT @ m
        if needs.weight_peephole and shares.peephole is not None:
            own["weight_peephole"] = _add_up(shares.peephole[d])
        if needs.norm_ih_weight:
            own["norm_ih_weight"] = grad_norm_ih[d]
        if needs.norm_hh_weight and shares.norm_hh is not None:
            own["norm_hh_weight"] = _add_up(shares.norm_hh[d])
        for i, name in enumerate(("norm_cell_weight", "norm_cell_bias")):
            if getattr(needs, name) and shares.norm_cell is not None:
                own[name] = _add_up(shares.norm_cell[d, :, i])
        results += own.values()
    return results


def _add_up(shares: Tensor) -> Tensor:
    """Sums over row blocks, the first dimension, and over runs of steps, the second to last."""
    return shares[..., 1, :].sum(0) + shares[..., 0, :].sum(0)


def _normalised_ih_backward(
    call: _LstmCall, grad: Tensor, products_ih: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Returns the gradients of W_ih x (T, B, D, G·H) and of the gains: see ``normalised_ih``."""
    grad_products_ih, grad_gains = [], []
    for d, gain in enumerate(call.norms):
        x, eps, vectors = products_ih[:, :, d], call.variant.eps, (gain, None, None, None)
        *_, mean, rstd = layer_norm.dropout_add_layer_norm_forward(
            x, None, *vectors, 0.0, eps, False, False, x.dtype
        )
        grad_x, _, grad_gain, *_ = layer_norm.dropout_add_layer_norm_backward(
            grad[:, :, d],
            None,
            x,
            None,
            *vectors,
            mean,
            rstd,
            0.0,
            eps,
            False,
            False,
            x.dtype,
            (True, False, True, False, False),
        )
        grad_products_ih.append(grad_x)
        grad_gains.append(grad_gain)
    return torch.stack(grad_products_ih, 2), grad_gains


class _LstmCall:
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
        directions = by_direction(Parameters, parameters)
        self.sequences = sequences = Sequences(
            input,
            [p.weight_ih for p in directions],
            [p.weight_hh for p in directions],
            lengths,
            reverse,
        )
        self.T, self.B = sequences.T, sequences.B
        self.weight_hr = stack([p.weight_hr for p in directions], sequences.dtype)  # (D, R, H)
        self.norms = [p.norm_ih_weight for p in directions]
        G = 3 if coupled else 4
        H, R = sequences.weight_hh.shape[1] // G, sequences.weight_hh.shape[2]
        self.variant = Variant(
            H=H,
            R=R,
            D=sequences.D,
            G=G,
            reverse=sequences.reverse,
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
            placed=seed is not None and philox.is_placed(seed),
        )
        self.inputs = Inputs(
            lengths=sequences.lengths,
            seed=seed if training and max(zoneout_h, zoneout_c) > 0 else None,
            dropout=None,
            bias=_bias(sequences, directions, forget_bias),
            peephole=stack([p.weight_peephole for p in directions], sequences.acc_dtype),
            norm_hh=stack([p.norm_hh_weight for p in directions], sequences.acc_dtype),
            norm_cell_weight=stack([p.norm_cell_weight for p in directions], sequences.acc_dtype),
            norm_cell_bias=stack([p.norm_cell_bias for p in directions], sequences.acc_dtype),
        )
        fits = fits_one_launch(input.device, sequences.dtype, H, gates=4)
        self.one_launch = fits and self.weight_hr is None
        if training and recurrent_dropout > 0:
            dropout = sequences.zeros_or_copy(None, R, sequences.acc_dtype)
            scale = philox.keep_scale(recurrent_dropout)
            fill = self.prepare(lstm_dropout_kernel, R)
            fill(dropout, seed, self.B, philox.threshold(recurrent_dropout), scale)
            self.inputs = self.inputs._replace(dropout=dropout)

    def normalised_ih(self, products_ih: Tensor) -> Tensor:
        """Returns W_ih x (T, B, D, G·H) after layer norm, if there is any."""
        if self.norms[0] is None:
            return products_ih
        eps, dtype = self.variant.eps, products_ih.dtype
        results = [
            layer_norm.dropout_add_layer_norm_forward(
                products_ih[:, :, d], None, gain, None, None, None, 0.0, eps, False, False, dtype
            )[0]
            for d, gain in enumerate(self.norms)
        ]
        return torch.stack(results, 2)

    def shares(self) -> Shares:
        """Returns zeros for the shares of the backward's programs."""
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

    def add_recurrent_gradient(self, grads: Gradients, dh_recurrent: Tensor) -> None:
        """Completes the gradient of h0 with the part through the product of the first step."""
        dropout = self.inputs.dropout
        grads.h.add_(dh_recurrent if dropout is None else dh_recurrent * dropout)

    def prepare(self, kernel: Any, columns: int, steps: int = 1) -> PreparedLaunch:
        """Returns the launch of a kernel over ``columns`` units."""
        config = self._config(columns)
        grid = self.sequences.grid(config, columns, steps)
        return PreparedLaunch(kernel, grid, config, self.variant)

    def _config(self, columns: int) -> Config:
        """Returns the configuration of a kernel over ``columns`` units."""
        if self.one_launch:
            return sequence_config(self.variant.H)
        return step_config(self.B, columns, whole_rows=self.inputs.norm_hh is not None)


def _bias(sequences: Sequences, directions: list[Parameters], forget_bias: float) -> Tensor | None:
    """Returns the sum of both biases and the forget bias (0 with coupled gates), (D, G·H)."""
    vectors = [[v for v in (p.bias_ih, p.bias_hh) if v is not None] for p in directions]
    if not vectors[0] and forget_bias == 0:
        return None
    D, rows, _ = sequences.weight_hh.shape
    bias = sequences.weight_hh.new_zeros((D, rows), dtype=sequences.acc_dtype)
    for total, summands in zip(bias, vectors, strict=True):
        for summand in summands:
            total += summand
    bias[:, rows // 4 : rows // 2] += forget_bias
    return bias
