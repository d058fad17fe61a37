"""Which backend a call would get, without running it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trifuse import backends
from trifuse.nn.lstm import LSTM
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
    recurrent weights onto the chip once, or goes step by step, and why; of a ``trifuse.nn.LSTM``
    also how many of its layers run side by side.

    Args:
        function: an operator of trifuse, such as ``trifuse.scaled_dot_product_attention``, or a
            ``trifuse.nn.LSTM``, of tensors.
        args, kwargs: as for the call itself; they are checked in the same way.

    Returns:
        A :class:`trifuse.backends.Choice`, which prints as a short report.

    Raises:
        TypeError: ``function`` is not an operator of trifuse.
        Whatever the call would raise for bad arguments.
    """
    if isinstance(function, LSTM):
        return _explain_lstm(function, *args, **kwargs)
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
        choice = choice._replace(notes=_ways(call))
    return choice


def _explain_lstm(
    module: LSTM, input: Tensor, hx: Any = None, *, lengths: Tensor | None = None
) -> backends.Choice:
    """Of the call of all layers or, where each has its own, of that of the first."""
    x, batch = _recurrent.sequence(input, module.batch_first)
    h0, c0 = (t if t is None or batch else t.unsqueeze(1) for t in lstm.pair(hx))
    why_not = module._why_not_stacked(x)
    D, options = len(module._reverse()), module._options()
    layers = [module._parameters_of(lstm.Parameters, k) for k in range(module.num_layers)]
    if why_not is None:
        first = [directions[0] for directions in layers]
        call = lstm._prepare_stack(x, h0, c0, first, lengths, **options)
    else:
        batch, own = (D, x.shape[1]), [None if t is None else t[:D] for t in (h0, c0)]
        call = lstm._check(x, batch, own, layers[0], lengths, module._reverse(), **options)
    if call.choice.backend != "cuda":
        return call.choice
    notes = _ways(call)
    if why_not is not None and module.num_layers > 1:
        notes = (f"layer after layer: {why_not}", *notes)
    return call.choice._replace(notes=notes)


def _ways(call: _recurrent.Call) -> tuple[str, ...]:
    """How the CUDA kernels of lstm go about a call, forward and backward."""
    return tuple(f"{step}: {_way(call, step == 'backward')}" for step in ("forward", "backward"))


def _way(call: _recurrent.Call, backward: bool) -> str:
    ops, options = torch.ops.trifuse, lstm.Options(*call.options)
    parameters, note = call.parameters, ""
    if call.operator == "lstm_stack":
        layers = len(options.reverse)
        at_once, why = ops.lstm_layers_at_once.cuda(
            call.input, parameters, options.coupled, backward
        )
        if at_once == layers:
            return f"{layers} layers side by side"
        if at_once > 1:
            return f"{at_once} of {layers} layers side by side: {why}"
        parameters, note = parameters[: lstm.SLOTS], f"layer after layer: {why}; each "
    why = ops.lstm_step_by_step.cuda(call.input, parameters, options.coupled, backward)
    return note + (f"step by step: {why}" if why else "one launch for the whole sequence")
