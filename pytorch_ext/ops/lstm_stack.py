"""Layers of an LSTM in one call, so that CUDA can run them side by side.

Each layer reads the one below. The op is that of lstm (ops/lstm.py), with layers in place of
directions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trifuse.ops import _operator, _recurrent, lstm
from trifuse.reference import lstm as reference
from trifuse.reference.lstm import SLOTS, Options, Parameters


def stack(
    input: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    parameters: Sequence[Parameters],
    lengths: Tensor | None = None,
    *,
    recompute: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs L layers in one call.

    Only for calls for which :func:`why_not_stacked` returns None.

    Args:
        input: (T, B, I).
        h0: (L, B, R) or None.
        c0: (L, B, H) or None.
        parameters: a :class:`Parameters` for each layer.
        lengths, recompute, options: as in :func:`trifuse.ops.lstm.layer`.

    Returns:
        Output of the last layer (T, B, R), h_n (L, B, R), c_n (L, B, H).

    Raises:
        As :func:`trifuse.lstm`.
    """
    call = prepare_stack(input, h0, c0, parameters, lengths, recompute, **options)
    output, h_n, c_n = _recurrent.run(call)
    return output, h_n, c_n


def why_not_stacked(
    input: Tensor,
    *,
    zoneout_h: float = 0.0,
    zoneout_c: float = 0.0,
    recurrent_dropout: float = 0.0,
    training: bool = False,
    **others: Any,
) -> str | None:
    """Returns why layers with these options must be called one by one, or None."""
    choice = lstm.choose(input)
    if choice.backend not in _OPERATOR.backends:
        return f"the {choice.backend} backend runs layers one by one"
    if training and max(zoneout_h, zoneout_c, recurrent_dropout) > 0:
        return "each layer draws random numbers from its own seed"
    return None


def prepare_stack(
    input: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    parameters: Sequence[Parameters],
    lengths: Tensor | None,
    recompute: bool,
    **options: Any,
) -> _recurrent.CheckedRecurrent:
    """Checks a call of :func:`stack`."""
    L, B = len(parameters), input.shape[1]
    return lstm.check_call(
        input,
        (L, B),
        (h0, c0),
        parameters,
        lengths,
        (False,) * L,
        recompute,
        operator="lstm_stack",
        check_all=_check_layers,
        **options,
    )


def _check_layers(
    parameters: Sequence[Parameters],
    reverse: Sequence[bool],
    check: Callable[..., Parameters],
    input: Tensor,
    coupled: bool,
) -> list[Parameters]:
    checked: list[Parameters] = []
    x = input
    for p in parameters:
        checked.append(check(p, x, coupled))
        _recurrent.same_shapes(checked[0], checked[-1], "weight_ih")
        # A placeholder for the layer's output, of which only the shape is checked.
        x = input.new_empty(1).expand(*input.shape[:2], p.weight_hh.shape[1])
    return checked


# The operator -----------------------------------------------------------------------------------


class _Results(NamedTuple):
    """The layers' results, stacked like those of directions, except the output."""

    output: Tensor  # (T, B, R), the last layer's
    h_n: Tensor
    c_n: Tensor
    gates: Tensor
    cells: Tensor
    clipped: Tensor
    below: Tensor  # (layers - 1, T, B, R): the outputs of the layers below the last


def _fake(tensors: lstm.Tensors, options: Options, save: int) -> _Results:
    layers = lstm.fake(tensors, options, save)
    (L, B, R), T = layers.h_n.shape, tensors.input.shape[0]
    below = (0,) if save == _operator.SAVE_NOTHING else (L - 1, T, B, R)
    output = layers.output.new_empty(T, B, R)
    return _Results(*layers._replace(output=output), below=output.new_empty(below))


def _layer(
    tensors: lstm.Tensors, options: Options, k: int, x: Tensor
) -> tuple[lstm.Tensors, Options]:
    """Returns the arguments of the k-th layer, whose input is ``x``."""
    layer = tensors._replace(
        input=x,
        h0=_of_layer(tensors.h0, k),
        c0=_of_layer(tensors.c0, k),
        parameters=_parameters_of_layer(tensors.parameters, k),
    )
    return layer, options._replace(reverse=(False,))


def _of_layer(t: Tensor | None, k: int) -> Tensor | None:
    return None if t is None else t[k : k + 1]


def _parameters_of_layer(parameters: Sequence[Any], k: int) -> Sequence[Any]:
    return parameters[k * SLOTS : (k + 1) * SLOTS]


def _formula(tensors: lstm.Tensors, options: Options) -> _Results:
    """Calls the reference layer by layer."""
    outputs: list[Tensor] = [tensors.input]
    layers = []
    for k in range(len(options.reverse)):
        layers.append(lstm.formula(*_layer(tensors, options, k, outputs[-1])))
        outputs.append(layers[-1].output)
    _, *others = (torch.cat(of_layers) for of_layers in zip(*layers, strict=True))
    last, below = outputs[-1], outputs[1:-1]
    return _Results._make((last, *others, reference.stack_steps(below, last.shape, last)))


def _grad_formula(call: _operator.BackwardCall) -> list[Tensor | None]:
    """Calls the reference layer by layer, from the last to the first."""
    layers, x = [], call.tensors.input
    for k in range(len(call.options.reverse)):
        layers.append(_layer(call.tensors, call.options, k, x))
        x = lstm.formula(*layers[-1]).output
    grad = call.grads.output
    of_h0: list[Any] = []
    of_c0: list[Any] = []
    of_parameters: list[Sequence[Any]] = []
    for k, (tensors, options) in reversed(list(enumerate(layers))):
        layer = _operator.BackwardCall(
            grads=call.grads._replace(
                output=grad,
                h_n=_of_layer(call.grads.h_n, k),
                c_n=_of_layer(call.grads.c_n, k),
            ),
            tensors=tensors,
            saved=_Results._make([None] * len(_Results._fields)),
            options=options,
            needs_grad=call.needs_grad._replace(
                input=k > 0 or call.needs_grad.input,
                parameters=_parameters_of_layer(call.needs_grad.parameters, k),
            ),
        )
        grad, grad_h0, grad_c0, *grads = lstm.grad_formula(layer)
        of_h0.insert(0, grad_h0)
        of_c0.insert(0, grad_c0)
        of_parameters.insert(0, grads)
    states = [None if grads[0] is None else torch.cat(grads) for grads in (of_h0, of_c0)]
    return [grad, *states, *(g for grads in of_parameters for g in grads)]


_OPERATOR = _recurrent.OPERATORS["lstm_stack"] = dataclasses.replace(
    lstm.OPERATOR,
    name="lstm_stack",
    results=_Results,
    saved=(*lstm.OPERATOR.saved, "below"),
    fake=_fake,
    fakes={},
    formula=_formula,
    grad_formula=_grad_formula,
    backends=("cuda",),  # only CUDA runs a stack's layers side by side
)
