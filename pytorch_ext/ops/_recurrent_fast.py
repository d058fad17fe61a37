"""The fast path of lstm, gru and rnn, for a layer without options or lengths, or one step of it.

Checking arguments in Python takes as long as a step of a few hundred units. So a plain call goes to
C++ at once (csrc/fast_path/recurrent_call.h), where a dedicated op, such as ``lstm_plain``, checks
its arguments itself. With gradients the call is one node of autograd in C++. Any other call takes
the slow path: the checks in ``ops/lstm.py``, ``gru.py`` or ``rnn.py``, which report what is wrong,
and then the operator. A gru's ``linear_before_reset`` and an rnn's activation are the only options
that the fast path takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from trifuse.ops import _fast_path
from trifuse.ops._recurrent import CheckedRecurrent
from trifuse.ops._recurrent import run as run_call
from trifuse.reference.gru import Parameters
from trifuse.reference.lstm import by_direction


def run(
    name: str,
    slow_path: Callable[..., tuple[Tensor, ...]],
    input: Any,
    states: tuple[Any, ...],
    parameters: tuple[Any, ...],
    one_step: bool = False,
    option: bool = False,
) -> tuple[Tensor, ...]:
    """Runs a layer without options or lengths, or a step of it, by the fast path if possible.

    Args:
        name: the operator's name.
        slow_path: computes the same from (input, *states, *parameters), with all checks.
        states: h0; of an lstm also c0.
        one_step: the input is one step, (B, I) or (I,); h is the output, and h_n is missing.
        option: ``linear_before_reset`` of a gru; whether the activation of an rnn is ReLU.

    Returns:
        The output, h_n and, of an lstm, c_n.
    """
    fast = _fast_path.extension()
    if fast is not None:
        h0, c0 = states if len(states) == 2 else (*states, None)
        results: tuple[Tensor, ...] | None = fast.recurrent(
            name, input, h0, c0, parameters, option, one_step
        )
        if results is not None:
            return results
    return slow_path(input, *states, *parameters)


def run_layer(
    name: str,
    check: Callable[..., CheckedRecurrent],
    input: Tensor,
    h0: Tensor | None,
    parameters: Sequence[Parameters],
    lengths: Tensor | None,
    reverse: Sequence[bool],
    option: bool,
) -> tuple[Tensor, Tensor]:
    """Runs one layer, in D directions, of an operator whose only state is h.

    Args:
        check: checks the call: (input, batch, h0, parameters, lengths, reverse) -> call.
        option: as :func:`run` takes it.

    Returns:
        Output (T, B, D·H), h_n (D, B, H).
    """

    def slow_path(input: Tensor, h0: Any, *flat: Any) -> tuple[Tensor, ...]:
        given = by_direction(Parameters, flat)
        batch = (len(given), input.shape[1])
        return run_call(check(input, batch, h0, given, lengths, reverse))

    flat = tuple(t for p in parameters for t in p)
    if lengths is None and tuple(reverse) == (False, True)[: len(parameters)]:
        output, h_n, *_ = run(name, slow_path, input, (h0,), flat, option=option)
    else:
        output, h_n = slow_path(input, h0, *flat)
    return output, h_n
