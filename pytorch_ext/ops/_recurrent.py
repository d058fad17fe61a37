"""Shared code of lstm, gru and rnn: argument checks, running checked calls, parts of the operators.

Their ops take the input, the first states (h and c, or h alone), the parameters of every direction
in one list, integer tensors (the lengths, and lstm's seed), options, and what to save. They return
the output, the last states, and results that only the backward reads: the gates, and for lstm the
cells and the marks of clipped elements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trifuse import backends
from trifuse.ops import _checks, _draws, _modes, _operator
from trifuse.ops._checks import fail
from trifuse.ops._operator import SAVE_ALL, SAVE_STATES, Operator
from trifuse.reference.gru import Parameters
from trifuse.reference.lstm import of_h0


class CheckedRecurrent(NamedTuple):
    """A checked call: the forward op's arguments, except the seed, and the chosen backend."""

    operator: str
    input: Tensor  # (T, B, I)
    states: tuple[Tensor | None, ...]  # each (D, B, ...)
    parameters: tuple[Tensor | None, ...]
    lengths: Tensor | None
    options: Any  # Operator.options
    choice: backends.Choice
    recompute: bool = False
    is_stochastic: bool = False  # whether it draws random numbers


OPERATORS: dict[str, Operator] = {}  # see declare

# The batch dimension of each tensor: see ``Operator.axes``.
AXES = {
    **dict.fromkeys(("input", "h0", "c0", "output", "h_n", "c_n"), 1),
    **dict.fromkeys(("gates", "cells", "clipped", "below"), 2),
    "lengths": 0,
}


# Arguments --------------------------------------------------------------------------------------


def sequence(input: Any, batch_first: bool) -> tuple[Tensor, tuple[int, ...]]:
    """Returns a (T, B, I) view of the input, and the caller's batch shape: (B,) or ()."""
    input = _checks.tensor("input", input)
    if input.dim() == 2:
        return input.unsqueeze(1), ()
    if input.dim() != 3:
        order = "(B, T, I)" if batch_first else "(T, B, I)"
        raise fail("input", f"shape {order} or (T, I)", tuple(input.shape))
    input = input.transpose(0, 1) if batch_first else input
    return input, (input.shape[1],)


def without_units(weight_ih: Any) -> bool:
    """Returns whether a cell has no units or no features; torch's own cells serve that case."""
    return isinstance(weight_ih, Tensor) and weight_ih.dim() == 2 and weight_ih.numel() == 0


def one_step(input: Any) -> tuple[Tensor, tuple[int, ...]]:
    """As :func:`sequence`, for a cell's input: (B, I) or (I,)."""
    input = _checks.tensor("input", input)
    if input.dim() not in (1, 2):
        raise fail("input", "shape (B, I) or (I,)", tuple(input.shape))
    batch = tuple(input.shape[:-1])
    return (input if batch else input.unsqueeze(0)).unsqueeze(0), batch


def floating(input: Tensor) -> Tensor:
    """Checks the dtype of the input after autocast."""
    input = autocast(input)
    _checks.floating("input", input)
    return input


def autocast(t: Any) -> Any:
    """Casts the input, h or a weight as autocast does. c and vectors are not cast."""
    if not isinstance(t, Tensor):
        return t
    dtype = _modes.autocast_dtype(t)
    return t if dtype is None or t.dtype not in _AUTOCAST else t.to(dtype)


_AUTOCAST = (torch.float32, torch.bfloat16, torch.float16)


def matrix(argument: str, value: Any, input: Tensor, rows: int | None, columns: int) -> Tensor:
    """Checks a weight after autocast. If ``rows`` is None, it may have any number of rows."""
    value = autocast(_checks.tensor(argument, value))
    if value.dtype != input.dtype:
        raise TypeError(f"{argument}: expected {input.dtype}, as input; got {value.dtype}")
    _checks.same_device(argument, value, "input", input)
    if value.dim() != 2 or value.shape[1] != columns or rows not in (None, value.shape[0]):
        shape = f"({'rows' if rows is None else rows}, {columns})"
        raise fail(argument, f"shape {shape}", tuple(value.shape))
    return value


def weight_ih(value: Any, input: Tensor, gates: int) -> tuple[Tensor, int]:
    """Checks weight_ih; returns it and the hidden size that its shape implies.

    Where the widths of the input and of weight_ih differ, the message names the input, as torch's
    does: a module's weights are seldom wrong.
    """
    features = input.shape[2]
    is_matrix = isinstance(value, Tensor) and value.dim() == 2
    columns = value.shape[1] if is_matrix else features
    value = matrix("weight_ih", value, input, None, columns)
    if columns != features:
        raise fail("input", f"{columns} features, as weight_ih", features)
    if features == 0:
        raise fail("input", "at least one feature", "none")
    rows = value.shape[0]
    H = rows // gates
    if rows % gates != 0 or H == 0:
        raise fail("weight_ih", f"shape ({gates}·H, {features}) with H ≥ 1", tuple(value.shape))
    return value, H


def directions(
    parameters: Sequence[Any], reverse: Sequence[bool], check: Callable[..., Any], *args: Any
) -> list[Any]:
    """Checks the parameters of one or two directions; ``check(p, *args)`` checks one of them."""
    if len(parameters) not in (1, 2):
        raise fail("parameters", "those of one or two directions", len(parameters))
    if len(reverse) != len(parameters):
        raise fail("reverse", f"{len(parameters)} flags, one per direction", len(reverse))
    checked = [check(p, *args) for p in parameters]
    for p in checked[1:]:
        same_shapes(checked[0], p)
    return checked


def same_shapes(first: Any, other: Any, *excepted: str) -> None:
    """Checks that parameters of two directions or layers have the same shapes."""
    for name, expected, got in zip(
        first._fields, map(_shape, first), map(_shape, other), strict=True
    ):
        if expected != got and name not in excepted:
            raise fail(name, f"shape {expected}, as the first direction's", got)


def _shape(t: Tensor | None) -> tuple[int, ...] | None:
    return None if t is None else tuple(t.shape)


def vector(argument: str, value: Any, input: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """Checks a bias or another vector; None stays None."""
    if value is None:
        return None
    value = _checks.matching(argument, value, "input", input)
    if value.shape != shape:
        raise fail(argument, f"shape {shape}", tuple(value.shape))
    return value


def state(
    argument: str,
    value: Any,
    input: Tensor,
    batch: tuple[int, ...],
    columns: int,
    dtypes: tuple[torch.dtype, ...],
) -> Tensor | None:
    """Checks a state (*batch, columns); returns a (D, B, columns) view. None stays None."""
    if value is None:
        return None
    value = _checks.tensor(argument, value)
    if value.dtype not in dtypes:
        expected = " or ".join(dict.fromkeys(str(dtype) for dtype in dtypes))
        raise TypeError(f"{argument}: expected {expected}; got {value.dtype}")
    _checks.same_device(argument, value, "input", input)
    if value.shape != (*batch, columns):
        raise fail(argument, f"shape {(*batch, columns)}", tuple(value.shape))
    for _ in range(2 - len(batch)):
        value = value.unsqueeze(0)
    return value


def prepare_sequence(
    check: Callable[..., CheckedRecurrent],
    input: Tensor,
    hx: Tensor | None,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    lengths: Tensor | None,
    batch_first: bool,
    reverse: bool,
    **options: Any,
) -> CheckedRecurrent:
    """Checks the arguments of a sequence in one direction, of an operator whose only state is h.

    Args:
        check: (input, batch, h0, parameters, lengths, reverse, **options) -> call.
    """
    input, batch = sequence(input, _checks.flag("batch_first", batch_first))
    parameters = [Parameters(weight_ih, weight_hh, bias_ih, bias_hh)]
    return check(input, batch, hx, parameters, lengths, [reverse], **options)


def prepare_cell(
    check: Callable[..., CheckedRecurrent],
    input: Tensor,
    hx: Tensor | None,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    **options: Any,
) -> CheckedRecurrent:
    """As :func:`prepare_sequence`, for one step."""
    input, batch = one_step(input)
    return check(input, batch, hx, [Parameters(weight_ih, weight_hh, bias_ih, bias_hh)], **options)


def check_without_cells(
    operator: str,
    gates: int,
    options: Callable[[Sequence[bool]], Any],
    input: Tensor,
    batch: tuple[int, ...],
    h0: Any,
    parameters: Sequence[Any],
    lengths: Tensor | None = None,
    reverse: Sequence[bool] = (False,),
) -> CheckedRecurrent:
    """Checks a call of an operator whose only state is h.

    Args:
        gates: the number of blocks of H rows in a weight.
        options: makes the operator's options from the flags ``reverse``.
        input: (T, B, I).
        batch: the shape of the caller's h0 before H.
    """
    input = floating(input)
    checked = directions(parameters, reverse, _check_parameters, input, gates)
    H = checked[0].weight_hh.shape[1]
    h0 = state("hx", autocast(h0), input, batch, H, (input.dtype,))
    return CheckedRecurrent(
        operator,
        input,
        (h0,),
        tuple(t for p in checked for t in p),
        row_lengths(lengths, input),
        options(tuple(_checks.flag("reverse", r) for r in reverse)),
        backends.choose(backends.Call(operator, input.device.type, input.dtype)),
    )


def _check_parameters(p: Parameters, input: Tensor, gates: int) -> Parameters:
    """Checks one direction's parameters; returns them with the weights after autocast."""
    w_ih, H = weight_ih(p.weight_ih, input, gates)
    w_hh = matrix("weight_hh", p.weight_hh, input, gates * H, H)
    biases = (
        vector(name, getattr(p, name), input, (gates * H,)) for name in ("bias_ih", "bias_hh")
    )
    return Parameters(w_ih, w_hh, *biases)


def row_lengths(lengths: Any, input: Tensor) -> Tensor | None:
    if lengths is None:
        return None
    lengths = _checks.integers("lengths", lengths, "(B,)", input.shape[1], input, "input")
    return lengths.to(torch.int64)


def check_lengths(tensors: Any, options: Any) -> None:
    """Checks the values of ``lengths``; runs inside the ops."""
    if tensors.lengths is not None:
        check_values(tensors.lengths, tensors.input.shape[0])


def check_values(lengths: Tensor, T: int) -> None:
    """Checks that lengths lie in [0, T].

    On a CPU it raises. Elsewhere reading them would wait for the device, so the device asserts.
    """
    ok = ((lengths >= 0) & (lengths <= T)).all()
    if ok.device.type != "cpu":
        torch._assert_async(ok, f"lengths: expected lengths in [0, {T}]")
    elif not ok:
        raise fail("lengths", f"lengths in [0, {T}]", lengths.tolist())


# Calls ------------------------------------------------------------------------------------------


def run(call: CheckedRecurrent) -> tuple[Tensor, ...]:
    """Runs a call; returns the output and the last states."""
    operator = OPERATORS[call.operator]
    seed = None
    if call.is_stochastic:
        seed = _draws.draw(call.input, _draws.place_of_batch(call.input.shape[1]))
    integers = (call.lengths, seed) if "seed" in operator.tensors._fields else (call.lengths,)
    parameters = list(call.parameters)
    if not torch.compiler.is_compiling():
        # torch resolves lazily negated tensors for a kernel, but not in lists of optional ones.
        parameters = [None if t is None else t.resolve_neg() for t in parameters]
    tensors = (call.input, *call.states, parameters, *integers)
    save = SAVE_STATES if call.recompute else SAVE_ALL
    return operator(call.choice.backend, tensors, call.options, save)


def run_sequence(call: CheckedRecurrent, input: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Runs a call in one direction of an operator whose only state is h.

    Returns:
        The output in the layout of the caller's ``input``, and h_n, (B, H) or (H,).
    """
    output, h_n = run(call)
    if input.dim() == 2:
        return output.squeeze(1), h_n[0, 0]
    return output.transpose(0, 1) if batch_first else output, h_n[0]


def run_step(
    prepare: Callable[..., CheckedRecurrent],
    torch_cell: Callable[..., Tensor],
    input: Tensor,
    hx: Any,
    *flat: Any,
) -> tuple[Any, ...]:
    """Runs one step of an operator whose only state is h.

    Args:
        prepare: checks the arguments of a cell.
        torch_cell: torch's own cell, which serves a cell without units or features.
        flat: the parameters.

    Returns:
        h as the output, and None in place of h_n.
    """
    p = Parameters(*flat)
    if without_units(p.weight_ih):
        zeros = input.new_zeros(*input.shape[:-1], p.weight_hh.shape[1])
        return torch_cell(input, zeros if hx is None else hx, *p), None
    _, h = run(prepare(input, hx, *p))
    return h.squeeze((0, 1) if input.dim() == 1 else (0,)), None


# The operators ----------------------------------------------------------------------------------


class Tensors(NamedTuple):
    """The tensors of an operator whose only state is h: see :func:`trifuse.reference.gru.gru`."""

    input: Tensor
    h0: Tensor | None
    parameters: Sequence[Tensor | None]  # the Parameters of each direction, one after another
    lengths: Tensor | None


def first_parameter(tensors: Any) -> int:
    """Returns the number of tensors before the parameters: the input and the states."""
    index: int = tensors._fields.index("parameters")
    return index


def differentiable(tensors: Any) -> list[Any]:
    """Returns the input, the states and each of the parameters, in one list."""
    return [*tensors[: first_parameter(tensors)], *tensors.parameters]


def grad_fake(call: _operator.BackwardCall) -> list[Tensor]:
    """Returns uninitialised gradients; an unwanted one has shape (0,) and the input's dtype."""
    pairs = zip(differentiable(call.tensors), differentiable(call.needs_grad), strict=True)
    grads = [
        t.new_empty(t.shape) if needed and t is not None else call.tensors.input.new_empty(0)
        for t, needed in pairs
    ]
    if "c0" in call.tensors._fields and call.needs_grad.h0:
        like = of_h0(call.tensors.input, call.tensors.h0, call.grads.h_n)
        grads[1] = grads[1] if like is None else grads[1].to(like.dtype)
    return grads


def flops(slots: Any, tensors: Any, options: Any) -> int:
    """Counts the operations of a forward op's matrix products over all T · B steps.

    Args:
        slots: the named tuple of one direction's parameters.
    """
    names = slots._fields * (len(tensors.parameters) // len(slots._fields))
    weights = sum(
        t.numel()
        for name, t in zip(names, tensors.parameters, strict=True)
        if t is not None and name in ("weight_ih", "weight_hh", "weight_hr")
    )
    T, B, _ = tensors.input.shape
    return 2 * T * B * weights


def declare(name: str, slots: Any, tensors: type[tuple[Any, ...]], **parts: Any) -> Operator:
    """Declares an operator from its own parts and those that all recurrent operators share.

    Args:
        slots: the named tuple of one direction's parameters.
        tensors, parts: see :class:`Operator`.
    """
    states = first_parameter(tensors) - 1
    OPERATORS[name] = Operator(
        name=name,
        tensors=tensors,
        returned=1 + states,
        differentiable=2 + states,  # the input, the states and the parameters
        axes=AXES,
        grad_fake=grad_fake,
        flops=functools.partial(flops, slots),
        check=check_lengths,
        output_may_change=True,
        **parts,
    )
    return OPERATORS[name]
