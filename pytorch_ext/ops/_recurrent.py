"""Shared code of lstm and gru: argument checks, calls without options, parts of the operators.

Both ops take the input, the first states (h and c, or h alone), the parameters of every direction
in one list, integer tensors (the lengths, and lstm's seed), options, and what to save. They return
the output, the last states, and results that only the backward reads: the gates, and for lstm the
cells and the marks of clipped elements.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trifuse import backends
from trifuse.ops import _autograd, _checks, _modes, _operator
from trifuse.ops._checks import fail
from trifuse.ops._operator import SAVE_ALL, SAVE_STATES, Operator
from trifuse.reference import philox


class Call(NamedTuple):
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


class FastPath(NamedTuple):
    """The C++ op for calls without options or lengths, such as ``lstm_plain``.

    It checks its arguments itself.
    """

    op: Callable[..., Any]
    options: dict[int, tuple[Any, ...]]  # the default ones, by number of parameters


OPERATORS: dict[str, Operator] = {}
FAST_PATHS: dict[str, FastPath] = {}

# The backend of the fast paths, and the requested backends under which they may serve.
_FAST_BACKEND = "cpp"
_FAST_REQUESTS = ("auto", _FAST_BACKEND)

# The batch dimension of each tensor: see ``Operator.axes``.
AXES = {
    **dict.fromkeys(("input", "h0", "c0", "output", "h_n", "c_n"), 1),
    **dict.fromkeys(("gates", "cells", "clipped", "below"), 2),
    "lengths": 0,
}


# Arguments --------------------------------------------------------------------------------------


def sequence(input: Any, batch_first: bool) -> tuple[Tensor, tuple[int, ...]]:
    """Returns a (T, B, I) view of the input, and the caller's batch shape: (B,) or ()."""
    input = floating(input)
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
    input = floating(input)
    if input.dim() not in (1, 2):
        raise fail("input", "shape (B, I) or (I,)", tuple(input.shape))
    batch = tuple(input.shape[:-1])
    return (input if batch else input.unsqueeze(0)).unsqueeze(0), batch


def floating(input: Any) -> Tensor:
    input = autocast(_checks.tensor("input", input))
    if input.dtype not in _checks.FLOATING:
        raise TypeError(f"input: expected float32, bfloat16, float16 or float64; got {input.dtype}")
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
    """Checks weight_ih; returns it and the hidden size that its shape implies."""
    features = input.shape[2]
    if features == 0:
        raise fail("input", "at least one feature", "none")
    value = matrix("weight_ih", value, input, None, features)
    rows = value.shape[0]
    H = rows // gates
    if rows % gates != 0 or H == 0:
        raise fail("weight_ih", f"shape ({gates}·H, {features}) with H ≥ 1", tuple(value.shape))
    return value, H


def check_directions(parameters: Sequence[Any], reverse: Sequence[bool]) -> None:
    if len(parameters) not in (1, 2):
        raise fail("parameters", "those of one or two directions", len(parameters))
    if len(reverse) != len(parameters):
        raise fail("reverse", f"{len(parameters)} flags, one per direction", len(reverse))


def same_shape(argument: str, first: Tensor | None, second: Tensor | None) -> None:
    """Checks that parameters of two directions or layers have the same shape."""
    shapes = [None if t is None else tuple(t.shape) for t in (first, second)]
    if shapes[0] != shapes[1]:
        raise fail(argument, f"shape {shapes[0]}, as the first direction's", shapes[1])


def vector(argument: str, value: Any, input: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """Checks a bias or another vector; None stays None."""
    if value is None:
        return None
    value = _checks.matching(argument, value, "input", input)
    if value.shape != shape:
        raise fail(argument, f"shape {shape}", tuple(value.shape))
    return value


def state(
    argument: str, value: Any, input: Tensor, batch: tuple[int, ...], columns: int,
    dtypes: tuple[torch.dtype, ...],
) -> Tensor | None:  # fmt: skip
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


def cell_preparation(check: Callable[..., Call], parameters: type[Any]) -> Callable[..., Call]:
    """Returns the function that checks the arguments of a cell.

    Args:
        check: checks an operator's call: (input, batch, states, parameters of directions) -> call.
        parameters: the named tuple of one direction's parameters.
    """

    def prepare(
        input: Tensor,
        hx: Any,
        weight_ih: Tensor,
        weight_hh: Tensor,
        bias_ih: Tensor | None,
        bias_hh: Tensor | None,
    ) -> Call:
        input, batch = one_step(input)
        return check(input, batch, hx, [parameters(weight_ih, weight_hh, bias_ih, bias_hh)])

    return prepare


def row_lengths(lengths: Any, input: Tensor) -> Tensor | None:
    if lengths is None:
        return None
    lengths = _checks.integers("lengths", lengths, "(B,)", input.shape[1], input, "input")
    return lengths.to(torch.int64)


def check_lengths(tensors: Any, options: Any) -> None:
    """Checks the values of ``lengths``; runs inside the ops.

    On a CPU it raises. Elsewhere reading them would wait for the device, so the device asserts.
    """
    lengths, T = tensors.lengths, tensors.input.shape[0]
    if lengths is None:
        return
    ok = ((lengths >= 0) & (lengths <= T)).all()
    if ok.device.type != "cpu":
        torch._assert_async(ok, f"lengths: expected lengths in [0, {T}]")
    elif not ok:
        raise fail("lengths", f"lengths in [0, {T}]", lengths.tolist())


# Calls ------------------------------------------------------------------------------------------


def run(call: Call) -> tuple[Tensor, ...]:
    """Runs a call; returns the output and the last states."""
    operator = OPERATORS[call.operator]
    seed = philox.draw_seed(call.input) if call.is_stochastic else None
    integers = (call.lengths, seed)[: len(operator.tensors._fields) - operator.differentiable]
    tensors = (call.input, *call.states, list(call.parameters), *integers)
    save = SAVE_STATES if call.recompute else SAVE_ALL
    return operator(call.choice.backend, tensors, call.options, save)


def run_fast(
    name: str,
    slow_path: Callable[..., tuple[Tensor, ...]],
    input: Any,
    states: tuple[Any, ...],
    parameters: tuple[Any, ...],
    one_step: bool = False,
) -> tuple[Tensor, ...]:
    """Runs a layer without options or lengths, or a step of it, by a dedicated C++ op if possible.

    Checking arguments in Python takes as long as a step of a few hundred units, so the op checks
    them. If it refuses them, ``slow_path`` runs, which reports what is wrong.

    Args:
        slow_path: computes the same from (input, *states, *parameters), with all checks.
        one_step: the input is one step, (B, I) or (I,); h is the output, and h_n is missing.
    """
    fast_path = FAST_PATHS.get(name)
    tensors = (input, *states, *parameters)
    if (
        fast_path is None
        or _modes.transform_active()
        or not _TENSOR_TYPES.issuperset(map(type, tensors))
        or not getattr(input, "is_cpu", False)
        or (input.dim() < 3) is not one_step
        or backends._requested not in _FAST_REQUESTS
        or torch.is_autocast_enabled("cpu")
        or torch._C._len_torch_dispatch_stack() > 0
    ):
        return slow_path(*tensors)
    try:
        if _modes.requires_grad(*tensors):
            return _autograd.apply(_FastPath, name, slow_path, *tensors)
        results: tuple[Tensor, ...] = fast_path.op(input, *states, parameters, False)
        return results
    except NotImplementedError:
        return slow_path(*tensors)


_TENSOR_TYPES = {Tensor, torch.nn.Parameter, type(None)}


class _FastPath(torch.autograd.Function):
    """A call by the fast path with its backward, for use where no transform is active."""

    @staticmethod
    def forward(
        ctx: Any, name: str, slow_path: Callable[..., tuple[Tensor, ...]], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        operator = OPERATORS[name]
        returned, first = operator.returned, first_parameter(operator.tensors)
        results = FAST_PATHS[name].op(*tensors[:first], tensors[first:], True)
        ctx.name, ctx.slow_path = name, slow_path
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(results[0], *results[returned:], *tensors)
        return results[:returned]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        operator = OPERATORS[ctx.name]
        first, count = first_parameter(operator.tensors), len(operator.saved)
        output, *saved = ctx.saved_tensors[:count]
        tensors = ctx.saved_tensors[count:]
        needs_grad = ctx.needs_input_grad[2:]
        if all(g is None for g in grads):
            return (None,) * len(ctx.needs_input_grad)
        if (
            torch.is_grad_enabled()
            or _modes.transform_active()
            or any(g is not None and _modes.is_batched(g) for g in grads)
        ):
            return None, None, *_gradients(ctx.slow_path, tensors, grads, needs_grad)
        grad_output = torch.zeros_like(output) if grads[0] is None else grads[0]
        integers = len(operator.tensors._fields) - operator.differentiable
        results = operator.backward[_FAST_BACKEND](
            grad_output, *grads[1:], *tensors[:first], tensors[first:], *(None,) * integers,
            output, *saved, *FAST_PATHS[ctx.name].options[len(tensors) - first], needs_grad,
        )  # fmt: skip
        gradients = (g if n else None for g, n in zip(results, needs_grad, strict=True))
        return None, None, *gradients


def _gradients(
    function: Callable[..., tuple[Tensor, ...]],
    tensors: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    needs_grad: Sequence[bool],
) -> list[Tensor | None]:
    """Returns gradients of a function's results, which can be differentiated in turn."""
    # The backend switch is global and may have changed since the forward, a fast path.
    as_then = backends._requested in _FAST_REQUESTS
    backend = contextlib.nullcontext() if as_then else backends.backend(_FAST_BACKEND)
    with torch.enable_grad(), _modes.without_autocast(), backend:
        # Views, because one tensor may be computed from another: its gradient excludes that path.
        views = [None if t is None else t.view_as(t) for t in tensors]
        pairs = [(r, g) for r, g in zip(function(*views), grads, strict=True) if g is not None]
        results, upstream = zip(*pairs, strict=True)
        targets = [v for v, n in zip(views, needs_grad, strict=True) if v is not None and n]
        found = iter(
            torch.autograd.grad(results, targets, upstream, create_graph=True, allow_unused=True)
        )
    return [next(found) if needed else None for needed in needs_grad]


# The operators ----------------------------------------------------------------------------------


def first_parameter(tensors: Any) -> int:
    """Returns the number of tensors before the parameters: the input and the states."""
    index: int = tensors._fields.index("parameters")
    return index


def differentiable(tensors: Any) -> list[Any]:
    """Returns the input, the states and each of the parameters, in one list."""
    return [*tensors[: first_parameter(tensors)], *tensors.parameters]


def grad_fake(call: _operator.BackwardCall) -> list[Tensor]:
    """Returns uninitialised gradients; an unwanted one has shape (0,) and the input's dtype."""
    pairs = zip(differentiable(call.tensors), differentiable(call.wanted), strict=True)
    return [
        t.new_empty(t.shape) if wanted and t is not None else call.tensors.input.new_empty(0)
        for t, wanted in pairs
    ]


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
