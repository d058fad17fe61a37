"""The GRU: argument checks, choice of backend, registration."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trifuse.ops import (
    _checks,
    _explained,
    _lstm_notes,
    _op,
    _operator,
    _recurrent,
    _recurrent_fast,
)
from trifuse.reference import gru as reference
from trifuse.reference.gru import Options, Parameters
from trifuse.reference.lstm import by_direction


def gru(
    input: Tensor,
    hx: Tensor | None,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
    *,
    linear_before_reset: bool = True,
    lengths: Tensor | None = None,
    batch_first: bool = False,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """One layer of a GRU in one direction, over whole sequences.

    Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder" (2014), arXiv 1406.1078,
    in the form of ``torch.nn.GRU`` or as published; :mod:`trifuse.reference.gru` has the equations.

    Args:
        input: (T, B, I), or with ``batch_first`` (B, T, I), or (T, I); float32, bfloat16, float16
            or float64, of any strides.
        hx: (B, H), or (H,), in the dtype of the input; None for zeros.
        weight_ih: (3·H, I), in the dtype of the input: the gates r, z, n.
        weight_hh: (3·H, H), likewise.
        bias_ih, bias_hh: (3·H,), in the dtype of the input, or float32 with a 16-bit input.
        linear_before_reset: ONNX's attribute. True: the reset gate r multiplies the product
            W_hn h + b_hn, as in ``torch.nn.GRU``. False: it multiplies h before the product,
            W_hn (r ⊙ h) + b_hn, as published (equation 8) and by default in ONNX.
        lengths: int32 or int64 (B,), the number of steps in each row, from 0 to T. Past it the
            output is 0, h stays as it is, and the input reaches neither results nor gradients.
        reverse: read each row from its last step to its first. Outputs keep their inputs' places.

    Returns:
        The output, (T, B, H) or in the layout of ``input``, and h_n, shaped as ``hx``, in the dtype
        of the input.

    Raises:
        TypeError: an argument of the wrong type, or a dtype that doesn't fit the others.
        ValueError: a shape, device or range that doesn't fit (``trifuse.ArgumentError``).
        RuntimeError: the backend asked for by name can't serve the call.

    Example:
        >>> T, B, I, H = 7, 3, 16, 32
        >>> weight_ih, weight_hh = torch.randn(3 * H, I), torch.randn(3 * H, H)
        >>> output, h_n = gru(torch.randn(T, B, I), None, weight_ih, weight_hh)
        >>> output.shape, h_n.shape
        (torch.Size([7, 3, 32]), torch.Size([3, 32]))
    """
    call = _prepare(
        input,
        hx,
        weight_ih,
        weight_hh,
        bias_ih,
        bias_hh,
        lengths,
        batch_first,
        reverse,
        linear_before_reset=linear_before_reset,
    )
    return _recurrent.run_sequence(call, input, batch_first)


def gru_cell(
    input: Tensor,
    hx: Tensor | None,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
    *,
    linear_before_reset: bool = True,
) -> Tensor:
    """One step of a GRU, with the arguments of ``torch.gru_cell``.

    Args:
        input: (B, I) or (I,).
        hx: (B, H) or (H,), or None for zeros.
        weight_ih, weight_hh, bias_ih, bias_hh, linear_before_reset: as in :func:`gru`.

    Returns:
        h, shaped as ``hx``.

    Raises:
        As :func:`gru`.
    """
    flag = _checks.flag("linear_before_reset", linear_before_reset)
    parameters = Parameters(weight_ih, weight_hh, bias_ih, bias_hh)
    h, *_ = _recurrent_fast.run(
        "gru", _STEPS[flag], input, (hx,), parameters, one_step=True, option=flag
    )
    return h


def _step(linear_before_reset: bool, input: Tensor, hx: Any, *parameters: Any) -> tuple[Any, ...]:
    prepare = functools.partial(_prepare_cell, linear_before_reset=linear_before_reset)
    # Without units or features, torch's cell serves the call, and both forms have the same results.
    return _recurrent.run_step(prepare, torch.gru_cell, input, hx, *parameters)


_STEPS = {flag: functools.partial(_step, flag) for flag in (True, False)}


def layer(
    input: Tensor,
    h0: Tensor | None,
    parameters: Sequence[Parameters],
    lengths: Tensor | None = None,
    *,
    reverse: Sequence[bool] = (False,),
    linear_before_reset: bool = True,
) -> tuple[Tensor, Tensor]:
    """Runs one layer in D directions in one call; a backend can run directions side by side.

    Args:
        input: (T, B, I).
        h0: (D, B, H) or None.
        parameters: a :class:`Parameters` for each direction.
        lengths, linear_before_reset: as in :func:`gru`.
        reverse: a flag for each direction.

    Returns:
        Output (T, B, D·H), h_n (D, B, H).

    Raises:
        As :func:`gru`.
    """
    option = _checks.flag("linear_before_reset", linear_before_reset)
    check = functools.partial(_check, linear_before_reset=linear_before_reset)
    return _recurrent_fast.run_layer("gru", check, input, h0, parameters, lengths, reverse, option)


# Arguments --------------------------------------------------------------------------------------


def _check(*call: Any, linear_before_reset: bool) -> _recurrent.CheckedRecurrent:
    flag = _checks.flag("linear_before_reset", linear_before_reset)
    options = functools.partial(Options, linear_before_reset=flag)
    return _recurrent.check_without_cells("gru", 3, options, *call)


_prepare = functools.partial(_recurrent.prepare_sequence, _check)
_prepare_cell = functools.partial(_recurrent.prepare_cell, _check)


# The operator -----------------------------------------------------------------------------------


def _fake(tensors: _recurrent.Tensors, options: Options, save: int) -> reference.Results:
    input, p = tensors.input, by_direction(Parameters, tensors.parameters)[0]
    (T, B, _), H, D = input.shape, p.weight_hh.shape[1], len(options.reverse)
    count = reference.saved_per_unit(options.linear_before_reset)
    gates = (0,) if save == _operator.SAVE_NOTHING else (D, T, B, count * H)
    return reference.Results(
        input.new_empty(T, B, D * H), input.new_empty(D, B, H), input.new_empty(gates)
    )


def _formula(tensors: _recurrent.Tensors, options: Options) -> reference.Results:
    return reference.gru(*tensors, options=options)


def _grad_formula(call: _operator.BackwardCall) -> list[Tensor | None]:
    return reference.gru_backward(
        call.grads.output,
        call.grads.h_n,
        **call.tensors._asdict(),
        output=call.saved.output,
        gates=call.saved.gates,
        options=call.options,
        needs_grad=_recurrent.differentiable(call.needs_grad),
    )


_recurrent.declare(
    "gru",
    Parameters,
    _recurrent.Tensors,
    options=Options,
    results=reference.Results,
    saved=("output", "gates"),
    saves=True,
    fake=_fake,
    formula=_formula,
    grad_formula=_grad_formula,
)

_op.library.define(
    "gru_plain.cpp(Tensor input, Tensor? h0, Tensor?[] parameters, bool linear_before_reset, "
    "bool save) -> (Tensor, Tensor, Tensor)"
)

_explained.explains(gru, _prepare, _lstm_notes.launch_notes)
_explained.explains(gru_cell, _prepare_cell, _lstm_notes.launch_notes)
