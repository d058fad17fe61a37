"""The fast path of lstm, gru and rnn, for a layer without options or lengths, or one step of it.

Checking arguments in Python takes as long as a step of a few hundred units. So a dedicated C++ op,
such as ``lstm_plain``, checks its arguments itself. If it refuses them, the slow path runs: the
checks in ``ops/lstm.py``, ``gru.py`` or ``rnn.py``, which report what is wrong, and then the
operator. A gru's ``linear_before_reset`` and an rnn's activation are the only options that a fast
path takes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trifuse import backends
from trifuse.ops import _autograd, _fast_path, _modes, _op
from trifuse.ops._recurrent import OPERATORS, CheckedRecurrent, first_parameter
from trifuse.ops._recurrent import run as run_call
from trifuse.reference.gru import Parameters
from trifuse.reference.lstm import by_direction


class FastPath(NamedTuple):
    """The C++ op of an operator's fast path."""

    op: Callable[..., Any]
    options: dict[int, tuple[Any, ...]]  # the default ones, by number of parameters
    saves: bool = True  # whether the op takes, as its last argument, whether to save


FAST_PATHS: dict[str, FastPath] = {}


def declare(
    name: str, schema: str, options: dict[int, tuple[Any, ...]], saves: bool = True
) -> None:
    """Declares the C++ op of an operator's fast path; without the extension nothing implements it.

    Args:
        schema: the op's schema, after its name.
        others: see :class:`FastPath`.
    """
    _op.library.define(f"{name}_plain.cpp{schema}")
    if backends._C is not None:
        op = getattr(torch.ops.trifuse, f"{name}_plain").cpp
        FAST_PATHS[name] = FastPath(op, options, saves)


def run(
    name: str,
    slow_path: Callable[..., tuple[Tensor, ...]],
    input: Any,
    states: tuple[Any, ...],
    parameters: tuple[Any, ...],
    one_step: bool = False,
    options: tuple[Any, ...] = (),
) -> tuple[Tensor, ...]:
    """Runs a layer without options or lengths, or a step of it, by the fast path if possible.

    Args:
        name: the operator's name.
        slow_path: computes the same from (input, *states, *parameters), with all checks.
        one_step: the input is one step, (B, I) or (I,); h is the output, and h_n is missing.
        options: the options that the op takes after the parameters: the last ones of the operator.
    """
    fast_path = FAST_PATHS.get(name)
    tensors = (input, *states, *parameters)
    if (
        fast_path is None
        or not _fast_path.serves(*tensors)
        or input is None
        or (input.dim() < 3) is not one_step
    ):
        return slow_path(*tensors)
    try:
        if _modes.requires_grad(*tensors):
            return _autograd.apply(_FastPath, (name, slow_path, options), *tensors)
        last = (*options, False) if fast_path.saves else options
        results: tuple[Tensor, ...] = fast_path.op(input, *states, parameters, *last)
        return results
    except NotImplementedError:
        return slow_path(*tensors)


def run_layer(
    name: str,
    check: Callable[..., CheckedRecurrent],
    input: Tensor,
    h0: Tensor | None,
    parameters: Sequence[Parameters],
    lengths: Tensor | None,
    reverse: Sequence[bool],
    options: tuple[Any, ...] = (),
) -> tuple[Tensor, Tensor]:
    """Runs one layer, in D directions, of an operator whose only state is h.

    Args:
        check: checks the call: (input, batch, h0, parameters, lengths, reverse) -> call.
        options: the fast path's last arguments.

    Returns:
        Output (T, B, D·H), h_n (D, B, H).
    """

    def slow_path(input: Tensor, h0: Any, *flat: Any) -> tuple[Tensor, ...]:
        given = by_direction(Parameters, flat)
        batch = (len(given), input.shape[1])
        return run_call(check(input, batch, h0, given, lengths, reverse))

    flat = tuple(t for p in parameters for t in p)
    if lengths is None and tuple(reverse) == (False, True)[: len(parameters)]:
        output, h_n, *_ = run(name, slow_path, input, (h0,), flat, options=options)
    else:
        output, h_n = slow_path(input, h0, *flat)
    return output, h_n


class _FastPath(torch.autograd.Function):
    """A call on the fast path with its backward, for use where no transform is active."""

    @staticmethod
    def forward(
        ctx: Any,
        constants: tuple[str, Callable[..., tuple[Tensor, ...]], tuple[Any, ...]],
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        name, slow_path, options = constants
        operator = OPERATORS[name]
        first = first_parameter(operator.tensors)
        others, parameters = tensors[:first], tensors[first:]
        fast_path = FAST_PATHS[name]
        last = (*options, True) if fast_path.saves else options
        results = fast_path.op(*others, parameters, *last)
        ctx.name, ctx.slow_path, ctx.options = name, slow_path, options
        ctx.set_materialize_grads(False)
        output, *saved = (results[i] for i in operator.saved_places)
        # The backward reads the h before each step, so of one step it needs only the first h, but
        # an rnn's also reads the h of the step.
        ctx.shape = output.shape
        ctx.reads_output = not saved or (output.dim() == 3 and len(output) > 1)
        ctx.version = output._version
        kept = _autograd.kept_output(output) if ctx.reads_output else None
        ctx.save_for_backward(kept, *saved, *tensors)
        return results[: operator.returned]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(g is None for g in grads):
            return (None,) * len(ctx.needs_input_grad)
        operator = OPERATORS[ctx.name]
        kept, count = ctx.saved_tensors, len(operator.saved)
        saved, tensors = kept[:count], kept[count:]
        _, *needs_grad = ctx.needs_input_grad
        if (
            torch.is_grad_enabled()
            or _modes.transform_active()
            or any(g is not None and _modes.is_batched(g) for g in grads)
        ):
            return None, *_gradients(ctx.slow_path, tensors, grads, needs_grad)
        grad_output, *grad_states = grads
        if grad_output is None:
            grad_output = tensors[0].new_zeros(ctx.shape)
        if not ctx.reads_output:
            grad_output = grad_output.contiguous()
            saved = (grad_output, *saved[1:])  # of the same shape; not read
        first = first_parameter(operator.tensors)
        others, parameters = tensors[:first], tensors[first:]
        if ctx.reads_output and _autograd.has_changed(saved[0], ctx.version):
            fast_path = FAST_PATHS[ctx.name]
            last = (*ctx.options, False) if fast_path.saves else ctx.options
            output, *_ = fast_path.op(*others, parameters, *last)
            saved = (output, *saved[1:])
        integers = [None] * (len(operator.tensors._fields) - operator.differentiable)
        results = operator.backward[_fast_path.BACKEND](
            grad_output,
            *grad_states,
            *others,
            parameters,
            *integers,
            *saved,
            *FAST_PATHS[ctx.name].options[len(parameters)],
            *ctx.options,
            needs_grad,
        )
        return None, *(g if n else None for g, n in zip(results, needs_grad, strict=True))


def _gradients(
    function: Callable[..., tuple[Tensor, ...]],
    tensors: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    needs_grad: Sequence[bool],
) -> list[Tensor | None]:
    """Returns gradients of a function's results, with a graph of their own in double backward."""
    create_graph = torch.is_grad_enabled()
    # The backend switch is global and may have changed since the forward, which took the fast path.
    as_then = backends._requested in _fast_path.REQUESTS
    backend = contextlib.nullcontext() if as_then else backends.backend(_fast_path.BACKEND)
    with torch.enable_grad(), _modes.without_autocast(), backend:
        # Views, because one tensor may be computed from another, and its gradient excludes that
        # path.
        views = [None if t is None else t.view_as(t) for t in tensors]
        pairs = [(r, g) for r, g in zip(function(*views), grads, strict=True) if g is not None]
        results, upstream = zip(*pairs, strict=True)
        targets = [v for v, n in zip(views, needs_grad, strict=True) if v is not None and n]
        found = iter(
            torch.autograd.grad(
                results, targets, upstream, create_graph=create_graph, allow_unused=True
            )
        )
    return [next(found) if needed else None for needed in needs_grad]
