"""What lstm and gru share: sequences as arguments, autograd, batching rules.

Both ops take the input, the first states (h and c, or h alone), the parameters of every direction
in one list, integer tensors (the lengths, and lstm's seed), options, and what to save. They return
the output, the last states, and what only the backward reads: gates, and lstm's cells and what
it clipped. A backward
takes gradients of output and states, all of those tensors, the options, and which gradients are
wanted; it returns those for input, states and parameters in one list.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trifuse import backends
from trifuse.ops import _checks, _registration
from trifuse.ops._checks import fail


class Call(NamedTuple):
    """A call as the forward op takes it, but for a seed and what to save."""

    operator: str
    input: Tensor  # (T, B, I)
    states: tuple[Tensor | None, ...]  # each (D, B, ...)
    parameters: tuple[Tensor | None, ...]
    lengths: Tensor | None
    options: tuple[Any, ...]
    choice: backends.Choice
    recompute: bool = False
    draws: bool = False  # whether something is drawn at random


class Operator(NamedTuple):
    """What differs between the two."""

    states: int  # h and c, or h
    integers: int  # lengths and seed, or lengths
    kept: int  # gates, cells and what was clipped, or gates
    save: type  # of the argument that says what to keep: int, or bool where it is all or nothing
    formula: Callable[..., list[Tensor | None]]  # the backward, to be differentiated in turn
    forward: dict[str, Callable[..., Any]]  # by backend
    backward: dict[str, Callable[..., Any]]
    plain: Callable[..., Any] | None  # the C++ op that looks at its arguments itself
    no_options: dict[int, tuple[Any, ...]]  # of a plain call, by the number of parameters


OPERATORS: dict[str, Operator] = {}

# What a forward keeps for its backward.
SAVE_NOTHING, SAVE_STATES, SAVE_ALL = range(3)


# Arguments --------------------------------------------------------------------------------------


def sequence(input: Any, batch_first: bool) -> tuple[Tensor, tuple[int, ...]]:
    """(T, B, I), a view, and the shape of the batch as the caller has it: (B,) or ()."""
    input = floating(input)
    if input.dim() == 2:
        return input.unsqueeze(1), ()
    if input.dim() != 3:
        order = "(B, T, I)" if batch_first else "(T, B, I)"
        raise fail("input", f"shape {order} or (T, I)", tuple(input.shape))
    input = input.transpose(0, 1) if batch_first else input
    return input, (input.shape[1],)


def one_step(input: Any) -> tuple[Tensor, tuple[int, ...]]:
    """As :func:`sequence`, of what a cell is given."""
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
    """What autocast does to the input, h and the weights. c and vectors stay as they are."""
    if not isinstance(t, Tensor):
        return t
    dtype = _registration.autocast_dtype(t)
    return t if dtype is None or t.dtype not in _AUTOCAST else t.to(dtype)


_AUTOCAST = (torch.float32, torch.bfloat16, torch.float16)


def matrix(argument: str, value: Any, input: Tensor, rows: int | None, columns: int) -> Tensor:
    """A weight; without a number of rows any that are there."""
    value = autocast(_checks.tensor(argument, value))
    if value.dtype != input.dtype:
        raise TypeError(f"{argument}: expected {input.dtype}, as input; got {value.dtype}")
    _checks.same_device(argument, value, "input", input)
    if value.dim() != 2 or value.shape[1] != columns or rows not in (None, value.shape[0]):
        shape = f"({'rows' if rows is None else rows}, {columns})"
        raise fail(argument, f"shape {shape}", tuple(value.shape))
    return value


def weight_ih(value: Any, input: Tensor, gates: int) -> tuple[Tensor, int]:
    """With the hidden size that it tells."""
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
    """Of two directions' parameters."""
    shapes = [None if t is None else tuple(t.shape) for t in (first, second)]
    if shapes[0] != shapes[1]:
        raise fail(argument, f"shape {shapes[0]}, as the first direction's", shapes[1])


def vector(argument: str, value: Any, input: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """A bias or the like, which may be missing."""
    if value is None:
        return None
    value = _checks.beside(argument, value, "input", input)
    if value.shape != shape:
        raise fail(argument, f"shape {shape}", tuple(value.shape))
    return value


def state(
    argument: str, value: Any, input: Tensor, batch: tuple[int, ...], columns: int,
    dtypes: tuple[torch.dtype, ...],
) -> Tensor | None:  # fmt: skip
    """(D, B, columns), a view of the caller's (*batch, columns), which may be missing."""
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


def row_lengths(lengths: Any, input: Tensor) -> Tensor | None:
    if lengths is None:
        return None
    lengths = _checks.integers("lengths", lengths, "(B,)", input.shape[1], input, "input")
    return lengths.to(torch.int64)


def check_lengths(lengths: Tensor | None, T: int) -> None:
    """What only the values tell; run inside the ops.

    On a CPU it raises. Elsewhere reading them would wait for the device, so the device asserts.
    """
    if lengths is None:
        return
    ok = ((lengths >= 0) & (lengths <= T)).all()
    if ok.device.type != "cpu":
        torch._assert_async(ok, f"lengths: expected lengths in [0, {T}]")
    elif not ok:
        raise fail("lengths", f"lengths in [0, {T}]", lengths.tolist())


# Autograd ---------------------------------------------------------------------------------------


def run(call: Call) -> tuple[Tensor, ...]:
    """Output and last states."""
    operator, backend = OPERATORS[call.operator], call.choice.backend
    tensors = _registration.for_dynamo(call.input, *call.states, *call.parameters)
    seed = None
    if call.draws:
        limits = torch.iinfo(torch.int64)
        seed = torch.randint(limits.min, limits.max, (1,), device=call.input.device)
    results = 1 + operator.states
    if _differentiating() or (
        torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    ):
        save = SAVE_STATES if call.recompute else SAVE_ALL
        save = save if torch.is_grad_enabled() else SAVE_NOTHING
        return _registration.apply(
            _Recurrence, call.operator, backend, call.options, save, call.lengths, seed, *tensors
        )[:results]
    integers = (call.lengths, seed)[: operator.integers]
    return operator.forward[backend](
        call.input,
        *call.states,
        call.parameters,
        *integers,
        *call.options,
        operator.save(SAVE_NOTHING),
    )[:results]


def plainly(
    name: str,
    long_way: Callable[..., tuple[Tensor, ...]],
    input: Any,
    states: tuple[Any, ...],
    parameters: tuple[Any, ...],
    one_step: bool = False,
) -> tuple[Tensor, ...]:
    """A layer without options or lengths, or a step of one, by the C++ op for just that if it can.

    A step of a few hundred units takes no longer than looking at its arguments in Python does. The
    op refuses those that don't fit each other: then the long way says what is wrong.

    Args:
        long_way: computes the same of the same tensors, in one list.
        one_step: of an input (B, I) or (I,); its h is the output, and no h_n is returned.
    """
    operator = OPERATORS[name]
    tensors = (input, *states, *parameters)
    if (
        operator.plain is None
        or _registration.differentiating()
        or not _PLAIN.issuperset(map(type, tensors))
        or not getattr(input, "is_cpu", False)
        or (input.dim() < 3) is not one_step
        or backends._requested not in ("auto", "cpp")
        or torch.is_autocast_enabled("cpu")
        or torch._C._len_torch_dispatch_stack() > 0
    ):
        return long_way(*tensors)
    try:
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
            return _registration.apply(_Plain, name, long_way, *tensors)
        return operator.plain(input, *states, parameters, False)
    except NotImplementedError:
        return long_way(*tensors)


_PLAIN = {Tensor, torch.nn.Parameter, type(None)}


class _Plain(torch.autograd.Function):
    """A plain call with its backward, neither of which any transform follows."""

    @staticmethod
    def forward(
        ctx: Any, name: str, long_way: Callable[..., tuple[Tensor, ...]], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        operator = OPERATORS[name]
        lead = 1 + operator.states
        assert operator.plain is not None
        results = operator.plain(*tensors[:lead], tensors[lead:], True)
        ctx.name, ctx.long_way = name, long_way
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(results[0], *results[lead:], *tensors)
        return results[:lead]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        operator = OPERATORS[ctx.name]
        lead, kept = 1 + operator.states, 1 + operator.kept
        output, *kept_tensors = ctx.saved_tensors[:kept]
        tensors = ctx.saved_tensors[kept:]
        wanted = ctx.needs_input_grad[2:]
        if all(g is None for g in grads):
            return (None,) * len(ctx.needs_input_grad)
        if torch.is_grad_enabled() or _registration.differentiating():
            return None, None, *_gradients(ctx.long_way, tensors, grads, wanted)
        first = torch.zeros_like(output) if grads[0] is None else grads[0]
        results = operator.backward["cpp"](
            first, *grads[1:], *tensors[:lead], tensors[lead:], *(None,) * operator.integers,
            output, *kept_tensors, *operator.no_options[len(tensors) - lead], wanted,
        )  # fmt: skip
        needed = (g if w else None for g, w in zip(results, wanted, strict=True))
        return None, None, *needed


def _gradients(
    function: Callable[..., tuple[Tensor, ...]],
    tensors: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Of a function's results, which can be differentiated in turn."""
    # What is switched on by now is not what was around the forward. The switch is the process's.
    as_then = backends._requested in ("auto", "cpp")
    backend = contextlib.nullcontext() if as_then else backends.backend("cpp")
    with torch.enable_grad(), _registration.without_autocast(), backend:
        # Views, or the gradient of one tensor would have a part by way of another.
        views = [None if t is None else t.view_as(t) for t in tensors]
        pairs = [(r, g) for r, g in zip(function(*views), grads, strict=True) if g is not None]
        results, upstream = zip(*pairs, strict=True)
        targets = [v for v, w in zip(views, wanted, strict=True) if v is not None and w]
        found = iter(
            torch.autograd.grad(results, targets, upstream, create_graph=True, allow_unused=True)
        )
    return [next(found) if w else None for w in wanted]


def _differentiating() -> bool:
    # Where nothing needs a gradient Dynamo would trace the Function's forward itself, and fails at
    # its variable arguments.
    return not torch.compiler.is_compiling() and _registration.differentiating()


class _Recurrence(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        name: str, backend: str, options: tuple[Any, ...], save: int, lengths: Tensor | None,
        seed: Tensor | None, *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        operator = OPERATORS[name]
        lead = 1 + operator.states
        integers = (lengths, seed)[: operator.integers]
        return operator.forward[backend](
            *tensors[:lead], list(tensors[lead:]), *integers, *options, operator.save(save)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.name, ctx.backend, ctx.options, _, *tensors = inputs
        lead = 1 + OPERATORS[ctx.name].states
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[lead:])
        ctx.save_for_backward(output[0], *output[lead:], *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        operator = OPERATORS[ctx.name]
        lead, saved = 1 + operator.states, ctx.saved_tensors
        grads = grads[:lead]
        if all(g is None for g in grads):
            return (None,) * len(ctx.needs_input_grad)
        output, *kept = saved[: 1 + operator.kept]
        if grads[0] is None:
            grads = (torch.zeros_like(output), *grads[1:])
        wanted = tuple(ctx.needs_input_grad[6:])
        args = (
            ctx.name, ctx.backend, ctx.options, wanted, *saved[1 + operator.kept :][:2],
            *grads, output.detach(), *kept, *saved[3 + operator.kept :],
        )  # fmt: skip
        if torch.is_grad_enabled() or _registration.forward_mode():
            results = _RecurrenceBackward.apply(*args)
        else:
            results = _call_backward(*args)
        needed = (g if n else None for g, n in zip(results, wanted, strict=True))
        return (*(None,) * 6, *needed)


def _call_backward(
    name: str, backend: str, options: tuple[Any, ...], wanted: tuple[bool, ...], *tensors: Any
) -> list[Tensor]:
    operator = OPERATORS[name]
    arguments = _backward_arguments(operator, tensors)
    return operator.backward[backend](*arguments, *options, list(wanted))


def _backward_arguments(operator: Operator, tensors: Sequence[Any]) -> tuple[Any, ...]:
    """From the order of :class:`_RecurrenceBackward`, where parameters come last, to the ops'."""
    rest = iter(tensors)
    lead = 1 + operator.states
    integers, upstream, kept, inputs = (
        tuple(itertools.islice(rest, count)) for count in (2, lead, 1 + operator.kept, lead)
    )
    return (*upstream, *inputs, list(rest), *integers[: operator.integers], *kept)


class _RecurrenceBackward(torch.autograd.Function):
    """The backward as a function of its own, so that it can be differentiated in turn.

    What the forward kept is a function of the other inputs; the reference formula computes it
    again, so its derivative is whole without theirs.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return tuple(_call_backward(*args))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.name, _, ctx.options, ctx.wanted, *tensors = inputs
        operator = OPERATORS[ctx.name]
        before = 2 + 1 + operator.states
        kept = 1 + operator.kept
        tensors[before : before + kept] = [None] * kept
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        operator, saved = OPERATORS[ctx.name], ctx.saved_tensors

        def formula(*tensors: Tensor | None) -> list[Tensor | None]:
            arguments = _backward_arguments(operator, tensors)
            return operator.formula(*arguments, *ctx.options, ctx.wanted)

        needed = zip(saved, ctx.needs_input_grad[4:], strict=True)
        variables = [i for i, (t, need) in enumerate(needed) if need and t is not None]
        found = _registration.second_derivatives(formula, saved, variables, grads, ctx.wanted)
        return (*(None,) * 4, *found)


# vmap -------------------------------------------------------------------------------------------


def forward_vmap(name: str, op: Any, info: Any, in_dims: Any, *args: Any) -> Any:
    """Samples that share their parameters are rows of one batch."""
    operator, N = OPERATORS[name], info.batch_size
    lead = 1 + operator.states
    if _samples_differ(operator, in_dims, args, lead):
        return _registration.one_by_one(op, info, in_dims, args)
    axes = dict.fromkeys(range(lead), 1) | {lead + 1: 0}
    results = op(*_fold(args, in_dims, axes, N))
    return _unfold(results, [*(1,) * lead, *(2,) * operator.kept], N)


def backward_vmap(name: str, op: Any, info: Any, in_dims: Any, *args: Any) -> Any:
    operator, N = OPERATORS[name], info.batch_size
    lead = 1 + operator.states
    kept = 2 * lead + 1 + operator.integers
    after = kept + 1 + operator.kept

    def sample(*each: Any) -> Any:
        # Of what a forward kept, a kernel finds each sample as the forward laid it out.
        return op(*each[:kept], *(t.contiguous() for t in each[kept:after]), *each[after:])

    # A sample's gradients of parameters are sums over its own rows.
    if _samples_differ(operator, in_dims, args, 2 * lead) or any(args[-1][lead:]):
        results, dims = _registration.one_by_one(sample, info, in_dims, args)
        return list(results), list(dims)
    axes = dict.fromkeys(range(2 * lead), 1) | {2 * lead + 1: 0, kept: 1}
    axes |= dict.fromkeys(range(kept + 1, after), 2)
    results, dims = _unfold(sample(*_fold(args, in_dims, axes, N)), [1] * len(args[-1]), N)
    return list(results), list(dims)


def _samples_differ(operator: Operator, in_dims: Any, args: Any, parameters: int) -> bool:
    """Samples with parameters of their own can't share a call, nor with a seed: it counts rows."""
    dims = in_dims[parameters]
    seeded = operator.integers == 2 and args[parameters + 2] is not None
    return seeded or (dims is not None and any(dim is not None for dim in dims))


def _fold(args: Any, in_dims: Any, axes: dict[int, int], N: int) -> list[Any]:
    """The samples as more rows, the batch being at the given dimension of each tensor."""
    folded = list(args)
    for i, axis in axes.items():
        t, dim = args[i], in_dims[i]
        if t is None:
            continue
        t = t.expand(N, *t.shape) if dim is None else t.movedim(dim, 0)
        folded[i] = t.movedim(0, axis).flatten(axis, axis + 1) if t.dim() > axis + 1 else t[0]
    return folded


def _unfold(results: Any, axes: list[int], N: int) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    pairs = [
        (r.unflatten(axis, (N, r.shape[axis] // N)), axis)
        if r.dim() > axis
        else (r.expand(N, 0), 0)
        for r, axis in zip(results, axes, strict=True)
    ]
    tensors, dims = zip(*pairs, strict=True)
    return tensors, dims


# Results ----------------------------------------------------------------------------------------


def empty_gradients(inputs: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor]:
    """A backward's results: where none is wanted, of shape (0,) and in the dtype of the input."""
    assert inputs[0] is not None
    return [
        t.new_empty(t.shape) if w and t is not None else inputs[0].new_empty(0)
        for t, w in zip(inputs, wanted, strict=True)
    ]


def copied_forward(results: Sequence[Tensor], to: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """An op's results may be none of its arguments, which a formula can return."""
    return tuple(t.copy_(r) if t.dim() == r.dim() else t for r, t in zip(results, to, strict=True))


def copied(grads: list[Tensor | None], to: list[Tensor]) -> list[Tensor]:
    """Likewise; nor each other, as two biases' gradients are."""
    return [t if g is None else t.copy_(g) for g, t in zip(grads, to, strict=True)]
