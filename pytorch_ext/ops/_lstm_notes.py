"""Describes for ``trifuse.explain`` how the CUDA kernels run an LSTM, a GRU or an RNN."""

from __future__ import annotations

import torch

from trifuse.ops import _op, _recurrent
from trifuse.reference.lstm import SLOTS

# Returns how many layers of a stack the CUDA kernels run at once, and why not more.
_op.library.define(
    "lstm_layers_at_once.cuda(Tensor input, Tensor?[] parameters, bool coupled, bool backward) -> "
    "(int, str)"
)
# Returns why the CUDA kernels run a call step by step, or "" if they run it in one launch.
_op.library.define(
    "lstm_step_by_step.cuda(Tensor input, Tensor?[] parameters, bool coupled, bool backward) -> str"
)
_op.library.define(
    "gru_step_by_step.cuda(Tensor input, Tensor?[] parameters, bool linear_before_reset, "
    "bool backward) -> str"
)
_op.library.define(
    "rnn_step_by_step.cuda(Tensor input, Tensor?[] parameters, bool backward) -> str"
)


def launch_notes(call: _recurrent.CheckedRecurrent) -> tuple[str, ...]:
    """Describes how the CUDA kernels run a call, forward and backward; other backends: no notes."""
    if call.choice.backend != "cuda":
        return ()
    return tuple(
        f"{step}: {_launch_note(call, step == 'backward')}" for step in ("forward", "backward")
    )


def _launch_note(call: _recurrent.CheckedRecurrent, backward: bool) -> str:
    ops, options = torch.ops.trifuse, call.options
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
        parameters, note = parameters[:SLOTS], f"layer after layer: {why}; each "
    if call.operator == "rnn":
        why = ops.rnn_step_by_step.cuda(call.input, parameters, backward)
    elif call.operator == "gru":
        flag = options.linear_before_reset
        why = ops.gru_step_by_step.cuda(call.input, parameters, flag, backward)
    else:
        why = ops.lstm_step_by_step.cuda(call.input, parameters, options.coupled, backward)
    return note + (f"step by step: {why}" if why else "one launch for the whole sequence")
