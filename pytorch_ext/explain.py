"""Which backend a call would get, without running it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from trifuse import backends
from trifuse.ops import _recurrent, attention, dropout_add_layer_norm, gru, lstm

# Each operator's preparation takes the operator's own arguments, less those that only shape its
# results, and ends by choosing a backend.
_PREPARE: dict[Callable[..., Any], Callable[..., Any]] = {
    attention.scaled_dot_product_attention: attention._prepare,
    attention.varlen_attention: attention._prepare_varlen,
    dropout_add_layer_norm.dropout_add_layer_norm: dropout_add_layer_norm._prepare,
    lstm.lstm: lstm._prepare,
    lstm.lstm_cell: lstm._prepare_cell,
    gru.gru: gru._prepare,
    gru.gru_cell: gru._prepare_cell,
}


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> backends.Choice:
    """Which backend would serve ``function(*args, **kwargs)``, and why not the others.

    Of an LSTM by CUDA kernels also whether it is one launch for the whole sequence, which takes the
    recurrent weights onto the chip once, or goes step by step, and why.

    Args:
        function: an operator of trifuse, such as ``trifuse.scaled_dot_product_attention``.
        args, kwargs: as for the call itself; they are checked in the same way.

    Returns:
        A :class:`trifuse.backends.Choice`, which prints as a short report.

    Raises:
        TypeError: ``function`` is not an operator of trifuse.
        Whatever the call would raise for bad arguments.
    """
    prepare = _PREPARE.get(function)
    if prepare is None:
        names = ", ".join(f.__name__ for f in _PREPARE)
        raise TypeError(f"function: expected one of {names}; got {function!r}")
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    wanted = inspect.signature(prepare).parameters
    call = prepare(**{k: v for k, v in bound.arguments.items() if k in wanted})
    choice: backends.Choice = call.choice
    if choice.backend == "cuda" and function in (lstm.lstm, lstm.lstm_cell):
        choice = choice._replace(notes=_launches(call))
    return choice


def _launches(call: _recurrent.Call) -> tuple[str, ...]:
    coupled = lstm.Options(*call.options).coupled
    notes = []
    for direction, backward in (("forward", False), ("backward", True)):
        why = torch.ops.trifuse.lstm_step_by_step.cuda(
            call.input, call.parameters, coupled, backward
        )
        way = f"step by step: {why}" if why else "one launch for the whole sequence"
        notes.append(f"{direction}: {way}")
    return tuple(notes)
