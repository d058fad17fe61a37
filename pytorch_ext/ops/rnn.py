"""The Elman RNN: argument checks, choice of backend, registration."""

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
from trifuse.reference import rnn as reference
from trifuse.reference.lstm import by_direction
from trifuse.reference.rnn import Options, Parameters


def rnn(
    input: Tensor,
    hx: Tensor | None,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
    *,
    nonlinearity: str = "tanh",
    lengths: Tensor | None = None,
    batch_first: bool = False,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """One layer of an Elman RNN in one direction, over whole sequences.

    Elman, "Finding Structure in Time" (1990), in the form of ``torch.nn.RNN``;
    :mod:`trifuse.reference.rnn` has the equations.

    Args:
        input: (T, B, I), or with ``batch_first`` (B, T, I), or (T, I); float32, bfloat16, float16
            or float64, of any strides.
        hx: (B, H), or (H,), in the dtype of the input; None for zeros.
        weight_ih: (H, I), in the dtype of the input.
        weight_hh: (H, H), likewise.
        bias_ih, bias_hh: (H,), in the dtype of the input, or float32 with a 16-bit input.
        nonlinearity: "tanh" or "relu".
        lengths: int32 or int64 (B,), the number of steps in each row, from 0 to T. Past it the
            output is 0, h stays as it is, and the input reaches neither results nor gradients.
        reverse: read each row from its last step to its first. Outputs keep their inputs' places.

    Returns:
        The output, (T, B, H) or in the layout of ``input``, and h_n, shaped as ``hx``, in the dtype
        of the input.

    Raises:
        TypeError: an argument of the wrong type, or a dtype that doesn't fit the others.
        ValueError: a shape, device, range or name that doesn't fit (``trifuse.ArgumentError``).
        RuntimeError: the backend asked for by name can't serve the call.

    Example:
        >>> T, B, I, H = 7, 3, 16, 32
        >>> output, h_n = rnn(torch.randn(T, B, I), None, torch.randn(H, I), torch.randn(H, H))
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
        nonlinearity=nonlinearity,
    )
    return _recurrent.run_sequence(call, input, batch_first)


def rnn_cell(
    input: Tensor,
    hx: Tensor | None,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
    *,
    nonlinearity: str = "tanh",
) -> Tensor:
    """One step of an Elman RNN, with the arguments of ``torch.rnn_tanh_cell`` and
    ``torch.rnn_relu_cell``.

    Args:
        input: (B, I) or (I,).
        hx: (B, H) or (H,), or None for zeros.
        weight_ih, weight_hh, bias_ih, bias_hh, nonlinearity: as in :func:`rnn`.

    Returns:
        h, shaped as ``hx``.

    Raises:
        As :func:`rnn`.
    """
    relu = is_relu(nonlinearity)
    parameters = Parameters(weight_ih, weight_hh, bias_ih, bias_hh)
    h, *_ = _recurrent_fast.run(
        "rnn", _STEPS[relu], input, (hx,), parameters, one_step=True, option=relu
    )
    return h


def _step(nonlinearity: str, input: Tensor, hx: Any, *parameters: Any) -> tuple[Any, ...]:
    torch_cell = torch.rnn_relu_cell if nonlinearity == "relu" else torch.rnn_tanh_cell
    prepare = functools.partial(_prepare_cell, nonlinearity=nonlinearity)
    return _recurrent.run_step(prepare, torch_cell, input, hx, *parameters)


# By whether the activation is relu.
_STEPS = {False: functools.partial(_step, "tanh"), True: functools.partial(_step, "relu")}


def layer(
    input: Tensor,
    h0: Tensor | None,
    parameters: Sequence[Parameters],
    lengths: Tensor | None = None,
    *,
    reverse: Sequence[bool] = (False,),
    nonlinearity: str = "tanh",
) -> tuple[Tensor, Tensor]:
    """Runs one layer in D directions in one call; a backend can run directions side by side.

    Args:
        input: (T, B, I).
        h0: (D, B, H) or None.
        parameters: a :class:`Parameters` for each direction.
        lengths, nonlinearity: as in :func:`rnn`.
        reverse: a flag for each direction.

    Returns:
        Output (T, B, D·H), h_n (D, B, H).

    Raises:
        As :func:`rnn`.
    """
    option = is_relu(nonlinearity)
    check = functools.partial(_check, nonlinearity=nonlinearity)
    return _recurrent_fast.run_layer("rnn", check, input, h0, parameters, lengths, reverse, option)


# Arguments --------------------------------------------------------------------------------------


def is_relu(nonlinearity: Any) -> bool:
    """Checks the activation's name; returns whether it is relu.

    Raises:
        ValueError: it is neither "tanh" nor "relu".
    """
    if nonlinearity not in ("tanh", "relu"):
        raise _checks.fail("nonlinearity", "'tanh' or 'relu'", repr(nonlinearity))
    return bool(nonlinearity == "relu")


def _check(*call: Any, nonlinearity: str) -> _recurrent.CheckedRecurrent:
    options = functools.partial(Options, relu=is_relu(nonlinearity))
    return _recurrent.check_without_cells("rnn", 1, options, *call)


_prepare = functools.partial(_recurrent.prepare_sequence, _check)
_prepare_cell = functools.partial(_recurrent.prepare_cell, _check)


# The operator -----------------------------------------------------------------------------------


def _fake(tensors: _recurrent.Tensors, options: Options, save: int) -> reference.Results:
    input, p = tensors.input, by_direction(Parameters, tensors.parameters)[0]
    (T, B, _), H, D = input.shape, p.weight_hh.shape[1], len(options.reverse)
    return reference.Results(input.new_empty(T, B, D * H), input.new_empty(D, B, H))


def _formula(tensors: _recurrent.Tensors, options: Options) -> reference.Results:
    return reference.rnn(*tensors, options=options)


def _grad_formula(call: _operator.BackwardCall) -> list[Tensor | None]:
    return reference.rnn_backward(
        call.grads.output,
        call.grads.h_n,
        **call.tensors._asdict(),
        output=call.saved.output,
        options=call.options,
        needs_grad=_recurrent.differentiable(call.needs_grad),
    )


_recurrent.declare(
    "rnn",
    Parameters,
    _recurrent.Tensors,
    options=Options,
    results=reference.Results,
    saved=("output",),
    fake=_fake,
    formula=_formula,
    grad_formula=_grad_formula,
)

_op.library.define(
    "rnn_plain.cpp(Tensor input, Tensor? h0, Tensor?[] parameters, bool relu) -> (Tensor, Tensor)"
)

_explained.explains(rnn, _prepare, _lstm_notes.launch_notes)
_explained.explains(rnn_cell, _prepare_cell, _lstm_notes.launch_notes)
