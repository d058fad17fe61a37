"""The LSTM: argument checks, choice of backend, registration."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trifuse import backends
from trifuse.ops import (
    _checks,
    _explained,
    _lstm_notes,
    _op,
    _operator,
    _recurrent,
    _recurrent_fast,
)
from trifuse.ops._checks import fail
from trifuse.reference import lstm as reference
from trifuse.reference.lstm import Options, Parameters, by_direction
from trifuse.reference.results import accumulation_dtype


def lstm(
    input: Tensor,
    hx: tuple[Tensor | None, Tensor | None] | None,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
    weight_hr: Tensor | None = None,
    *,
    lengths: Tensor | None = None,
    batch_first: bool = False,
    reverse: bool = False,
    cell_clip: float | None = None,
    proj_clip: float | None = None,
    forget_bias: float = 0.0,
    coupled: bool = False,
    weight_peephole: Tensor | None = None,
    norm_ih_weight: Tensor | None = None,
    norm_hh_weight: Tensor | None = None,
    norm_cell_weight: Tensor | None = None,
    norm_cell_bias: Tensor | None = None,
    eps: float = 1e-5,
    zoneout_h: float = 0.0,
    zoneout_c: float = 0.0,
    recurrent_dropout: float = 0.0,
    training: bool = False,
    recompute: bool = False,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """One layer of an LSTM in one direction, over whole sequences.

    Hochreiter and Schmidhuber, "Long Short-Term Memory" (1997), in the form of ``torch.nn.LSTM``;
    :mod:`trifuse.reference.lstm` has the equations and the source of each option. All options
    combine. H is the hidden size, I the input size, R the size of h: H, or the projection size. G
    is the number of gates: 4, in the order i, f, g, o, or with ``coupled`` 3: i, g, o.

    Args:
        input: (T, B, I), or with ``batch_first`` (B, T, I), or (T, I); float32, bfloat16, float16
            or float64, of any strides.
        hx: (h0, c0), shaped (B, R) and (B, H), or (R,) and (H,); either or both None for zeros. h0
            is in the dtype of the input; c0 too, or in float32 with a 16-bit input.
        weight_ih: (G·H, I), in the dtype of the input, as are the other matrices.
        weight_hh: (G·H, R).
        bias_ih, bias_hh: (G·H,). All vectors are in the dtype of the input, or float32 with a
            16-bit input.
        weight_hr: (R, H), projects each step's h.
        lengths: int32 or int64 (B,), the number of steps in each row, from 0 to T. Past it the
            output is 0, states stay as they are, and the input reaches neither results nor
            gradients.
        reverse: read each row from its last step to its first. Outputs keep their inputs' places.
        cell_clip: clips c to ± cell_clip, before the output gate reads it.
        proj_clip: clips the projected h to ± proj_clip.
        forget_bias: added to the forget gate's sum. Must be 0 with ``coupled``.
        coupled: the forget gate is 1 - the input gate.
        weight_peephole: (3, H), from c to the gates i, f and o; with ``coupled`` (2, H), i and o.
        norm_ih_weight, norm_hh_weight: (G·H,), the gains of the layer normalisations of the two
            products. Give both and ``norm_cell_weight``, or none.
        norm_cell_weight, norm_cell_bias: (H,), the gain and bias of the layer normalisation of c on
            its way to h. The bias may be None.
        eps: added to the variance in the layer normalisations.
        zoneout_h, zoneout_c: in training, the probability that an element of a state keeps its old
            value; otherwise the weight of the old value in the new one.
        recurrent_dropout: in training, the probability of dropping an element of h on its way to
            the gates; one draw per row for all steps.
        training: whether to draw random numbers. They are drawn from torch's default generator for
            the device, with a resolution of 2⁻¹⁶; the same seed draws the same on every backend.
        recompute: keep only h and c for the backward, which recomputes the gates.

    Returns:
        The output, (T, B, R) or in the layout of ``input``, and (h_n, c_n), shaped as ``hx``. c_n
        is in float32, or float64 for float64, so that a sequence cut in two gives the same bits as
        a whole one if c_n is passed on. The rest is in the dtype of the input.

    Raises:
        TypeError: an argument of the wrong type, or a dtype that doesn't fit the others.
        ValueError: a shape, device, range or combination that doesn't fit
            (``trifuse.ArgumentError``).
        RuntimeError: the backend asked for by name can't serve the call.

    Example:
        >>> T, B, I, H = 7, 3, 16, 32
        >>> weight_ih, weight_hh = torch.randn(4 * H, I), torch.randn(4 * H, H)
        >>> output, (h_n, c_n) = lstm(
        ...     torch.randn(T, B, I), None, weight_ih, weight_hh, lengths=torch.tensor([7, 4, 0])
        ... )
        >>> output.shape, h_n.shape, c_n.shape
        (torch.Size([7, 3, 32]), torch.Size([3, 32]), torch.Size([3, 32]))
    """
    call = _prepare(
        input,
        hx,
        weight_ih,
        weight_hh,
        bias_ih,
        bias_hh,
        weight_hr,
        lengths,
        batch_first,
        reverse,
        cell_clip,
        proj_clip,
        forget_bias,
        coupled,
        weight_peephole,
        norm_ih_weight,
        norm_hh_weight,
        norm_cell_weight,
        norm_cell_bias,
        eps,
        zoneout_h,
        zoneout_c,
        recurrent_dropout,
        training,
        recompute,
    )
    output, h_n, c_n = _recurrent.run(call)
    if input.dim() == 2:
        return output.squeeze(1), (h_n[0, 0], c_n[0, 0])
    return output.transpose(0, 1) if batch_first else output, (h_n[0], c_n[0])


def lstm_cell(
    input: Tensor,
    hx: tuple[Tensor | None, Tensor | None] | None,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One step of an LSTM, with the arguments of ``torch.lstm_cell``.

    Args:
        input: (B, I) or (I,).
        hx: (h0, c0), each (B, H) or (H,), or None for zeros.
        weight_ih, weight_hh, bias_ih, bias_hh: as in :func:`lstm`.

    Returns:
        (h, c), shaped as ``hx``, c in float32, or float64 for float64.

    Raises:
        As :func:`lstm`.
    """
    parameters = Parameters(weight_ih, weight_hh, bias_ih, bias_hh)
    h, _, c = _recurrent_fast.run("lstm", _step, input, pair(hx), parameters, one_step=True)
    return h, c


def _step(input: Tensor, h0: Any, c0: Any, *parameters: Any) -> tuple[Any, ...]:
    """Returns h as the output, None in place of h_n, and c."""
    weight_ih, weight_hh, bias_ih, bias_hh, *_ = parameters
    if _recurrent.without_units(weight_ih):
        states = [t if t is None else t.to(input.dtype) for t in (h0, c0)]
        zeros = input.new_zeros(*input.shape[:-1], weight_hh.shape[1])
        given = [zeros if t is None else t for t in states]
        h, c = torch.lstm_cell(input, given, weight_ih, weight_hh, bias_ih, bias_hh)
        return h, None, c.to(accumulation_dtype(c.dtype))
    call = _prepare_cell(input, (h0, c0), weight_ih, weight_hh, bias_ih, bias_hh)
    _, h, c = _recurrent.run(call)
    one = (0, 1) if input.dim() == 1 else (0,)
    return h.squeeze(one), None, c.squeeze(one)


def layer(
    input: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    parameters: Sequence[Parameters],
    lengths: Tensor | None = None,
    *,
    reverse: Sequence[bool] = (False,),
    recompute: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs one layer in D directions in one call; a backend can run directions side by side.

    Args:
        input: (T, B, I).
        h0: (D, B, R) or None.
        c0: (D, B, H) or None.
        parameters: a :class:`Parameters` for each direction.
        lengths: as in :func:`lstm`.
        reverse: a flag for each direction.
        options: the arguments of :func:`lstm` that are numbers and flags, such as ``training``.

    Returns:
        Output (T, B, D·R), h_n (D, B, R), c_n (D, B, H).

    Raises:
        As :func:`lstm`.
    """

    def slow_path(input: Tensor, h0: Any, c0: Any, *flat: Any) -> tuple[Tensor, ...]:
        given = by_direction(Parameters, flat)
        call = prepare_layer(input, h0, c0, given, lengths, reverse, recompute, **options)
        return _recurrent.run(call)

    states, flat = (h0, c0), tuple(t for p in parameters for t in p)
    plain = (
        lengths is None
        and not recompute
        and tuple(reverse) == (False, True)[: len(parameters)]
        and all(options.get(name, none) == none for name, none in _NO_OPTIONS.items())
    )
    if plain:
        output, h_n, c_n = _recurrent_fast.run("lstm", slow_path, input, states, flat)
    else:
        output, h_n, c_n = slow_path(input, *states, *flat)
    return output, h_n, c_n


# The options without effect, as a plain call has them. A plain call would ignore an option that is
# missing here. ``eps`` and ``training`` may be missing: they change nothing without the others, or
# without norms, with which C++ declines the call.
_NO_OPTIONS = {
    "cell_clip": None,
    "proj_clip": None,
    "forget_bias": 0.0,
    "coupled": False,
    "zoneout_h": 0.0,
    "zoneout_c": 0.0,
    "recurrent_dropout": 0.0,
}


# Arguments --------------------------------------------------------------------------------------


def _prepare(
    input: Tensor,
    hx: tuple[Tensor | None, Tensor | None] | None,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    weight_hr: Tensor | None,
    lengths: Tensor | None,
    batch_first: bool,
    reverse: bool,
    cell_clip: float | None,
    proj_clip: float | None,
    forget_bias: float,
    coupled: bool,
    weight_peephole: Tensor | None,
    norm_ih_weight: Tensor | None,
    norm_hh_weight: Tensor | None,
    norm_cell_weight: Tensor | None,
    norm_cell_bias: Tensor | None,
    eps: float,
    zoneout_h: float,
    zoneout_c: float,
    recurrent_dropout: float,
    training: bool,
    recompute: bool,
) -> _recurrent.CheckedRecurrent:
    input, batch = _recurrent.sequence(input, _checks.flag("batch_first", batch_first))
    parameters = Parameters(
        weight_ih,
        weight_hh,
        bias_ih,
        bias_hh,
        weight_hr,
        weight_peephole,
        norm_ih_weight,
        norm_hh_weight,
        norm_cell_weight,
        norm_cell_bias,
    )
    return check_call(
        input,
        batch,
        hx,
        [parameters],
        lengths,
        [reverse],
        recompute,
        cell_clip=cell_clip,
        proj_clip=proj_clip,
        forget_bias=forget_bias,
        coupled=coupled,
        eps=eps,
        zoneout_h=zoneout_h,
        zoneout_c=zoneout_c,
        recurrent_dropout=recurrent_dropout,
        training=training,
    )


def prepare_layer(
    input: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    parameters: Sequence[Parameters],
    lengths: Tensor | None,
    reverse: Sequence[bool],
    recompute: bool,
    **options: Any,
) -> _recurrent.CheckedRecurrent:
    """Checks a call of :func:`layer`."""
    batch = (len(parameters), input.shape[1])
    return check_call(input, batch, (h0, c0), parameters, lengths, reverse, recompute, **options)


def check_call(
    input: Tensor,
    batch: tuple[int, ...],
    hx: Any,
    parameters: Sequence[Parameters],
    lengths: Tensor | None = None,
    reverse: Sequence[bool] = (False,),
    recompute: bool = False,
    *,
    operator: str = "lstm",
    check_all: Callable[..., list[Any]] = _recurrent.directions,
    coupled: bool = False,
    **numbers: Any,
) -> _recurrent.CheckedRecurrent:
    """Checks a call. ``input`` is (T, B, I); ``batch`` is the shape of the caller's h0 before R.

    ``check_all`` applies :func:`check_parameters` to those of each direction or layer. ``coupled``
    and ``numbers`` are passed to :func:`check_options`.
    """
    input = _recurrent.floating(input)
    coupled, recompute = _checks.flag("coupled", coupled), _checks.flag("recompute", recompute)
    checked = check_all(parameters, reverse, check_parameters, input, coupled)
    states = _states(hx, input, batch, checked[0])
    options = check_options(checked[0].weight_hr is not None, reverse, coupled=coupled, **numbers)
    is_stochastic = (
        options.training
        and max(options.zoneout_h, options.zoneout_c, options.recurrent_dropout) > 0
    )
    return _recurrent.CheckedRecurrent(
        operator,
        input,
        states,
        tuple(t for p in checked for t in p),
        _recurrent.row_lengths(lengths, input),
        options,
        choose(input),
        recompute,
        is_stochastic,
    )


def choose(input: Tensor) -> backends.Choice:
    return backends.choose(backends.Call("lstm", input.device.type, input.dtype))


def _prepare_cell(
    input: Tensor,
    hx: Any,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
) -> _recurrent.CheckedRecurrent:
    input, batch = _recurrent.one_step(input)
    return check_call(input, batch, hx, [Parameters(weight_ih, weight_hh, bias_ih, bias_hh)])


def check_options(
    projected: bool,
    reverse: Sequence[bool] = (False,),
    cell_clip: float | None = None,
    proj_clip: float | None = None,
    forget_bias: float = 0.0,
    coupled: bool = False,
    eps: float = 1e-5,
    zoneout_h: float = 0.0,
    zoneout_c: float = 0.0,
    recurrent_dropout: float = 0.0,
    training: bool = False,
) -> Options:
    """Checks the options that are numbers and flags.

    Args:
        projected: whether there is a weight_hr.
        others: as in :func:`lstm`.

    Raises:
        As :func:`lstm`.
    """
    coupled = _checks.flag("coupled", coupled)
    if proj_clip is not None and not projected:
        raise fail("proj_clip", "None without weight_hr", proj_clip)
    forget_bias = _checks.number("forget_bias", forget_bias)
    if not abs(forget_bias) < math.inf or (coupled and forget_bias != 0):
        expected = "0 with coupled" if coupled else "a finite number"
        raise fail("forget_bias", expected, forget_bias)
    return Options(
        tuple(_checks.flag("reverse", r) for r in reverse),
        coupled,
        forget_bias,
        _clip("cell_clip", cell_clip),
        _clip("proj_clip", proj_clip),
        _checks.epsilon(eps),
        _checks.probability("zoneout_h", zoneout_h, below_one=True),
        _checks.probability("zoneout_c", zoneout_c, below_one=True),
        _checks.probability("recurrent_dropout", recurrent_dropout, below_one=True),
        _checks.flag("training", training),
    )


def _states(
    hx: Any, input: Tensor, batch: tuple[int, ...], p: Parameters
) -> tuple[Tensor | None, Tensor | None]:
    h0, c0 = pair(hx)
    R = p.weight_hh.shape[1]
    H = R if p.weight_hr is None else p.weight_hr.shape[1]
    h0 = _recurrent.state("h0", _recurrent.autocast(h0), input, batch, R, (input.dtype,))
    wide = accumulation_dtype(input.dtype)
    return h0, _recurrent.state("c0", c0, input, batch, H, (input.dtype, wide))


def check_parameters(p: Parameters, input: Tensor, coupled: bool) -> Parameters:
    """Checks one direction's parameters; returns them with the weights after autocast."""
    gates = 3 if coupled else 4
    weight_ih, H = _recurrent.weight_ih(p.weight_ih, input, gates)
    R, weight_hr = H, None
    if p.weight_hr is not None:
        weight_hr = _recurrent.matrix("weight_hr", p.weight_hr, input, None, H)
        R = weight_hr.shape[0]
        if R == 0:
            raise fail("weight_hr", f"shape (R, {H}) with R ≥ 1", tuple(weight_hr.shape))
    weight_hh = _recurrent.matrix("weight_hh", p.weight_hh, input, gates * H, R)
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("bias_ih", (gates * H,)),
        ("bias_hh", (gates * H,)),
        ("weight_peephole", (gates - 1, H)),
        ("norm_ih_weight", (gates * H,)),
        ("norm_hh_weight", (gates * H,)),
        ("norm_cell_weight", (H,)),
        ("norm_cell_bias", (H,)),
    ]
    vectors = {
        name: _recurrent.vector(name, getattr(p, name), input, shape) for name, shape in shapes
    }
    gains = ("norm_ih_weight", "norm_hh_weight", "norm_cell_weight")
    given = [vectors[name] is not None for name in gains]
    if any(given) and not all(given):
        missing = gains[given.index(False)]
        raise fail(missing, f"a tensor, as {gains[given.index(True)]}", None)
    if vectors["norm_cell_bias"] is not None and not any(given):
        raise fail("norm_cell_bias", "None without norm_cell_weight", "a tensor")
    return Parameters(weight_ih, weight_hh, weight_hr=weight_hr, **vectors)


def pair(hx: Any) -> tuple[Any, Any]:
    """Returns (h0, c0), either of which may be None; both are None if ``hx`` is."""
    if hx is None:
        return None, None
    if not isinstance(hx, (tuple, list)) or len(hx) != 2:
        got = f"{len(hx)} of them" if isinstance(hx, (tuple, list)) else type(hx).__name__
        raise TypeError(f"hx: expected a pair (h0, c0); got {got}")
    return hx[0], hx[1]


def _clip(argument: str, value: float | None) -> float | None:
    if value is None:
        return None
    value = _checks.number(argument, value)
    if not value > 0:
        raise fail(argument, "a number > 0 or None", value)
    return value if value < math.inf else None


# The operator -----------------------------------------------------------------------------------


class Tensors(NamedTuple):
    """See :func:`trifuse.reference.lstm.lstm`."""

    input: Tensor
    h0: Tensor | None
    c0: Tensor | None
    parameters: Sequence[Tensor | None]
    lengths: Tensor | None
    seed: Tensor | None


def fake(tensors: Tensors, options: Options, save: int) -> reference.Results:
    input, p = tensors.input, by_direction(Parameters, tensors.parameters)[0]
    (T, B, _), D = input.shape, len(options.reverse)
    rows, R = p.weight_hh.shape
    H = rows // (3 if options.coupled else 4)
    wide = accumulation_dtype(input.dtype)
    gates = (D, T, B, rows) if save == _operator.SAVE_ALL else (0,)
    cells = (0,) if save == _operator.SAVE_NOTHING else (D, T, B, H)
    columns = reference.clipped_columns(H, R, options.cell_clip, options.proj_clip)
    clipped = (D, T, B, columns) if columns and save != _operator.SAVE_NOTHING else (0,)
    return reference.Results(
        output=input.new_empty(T, B, D * R),
        h_n=input.new_empty(D, B, R),
        c_n=input.new_empty(D, B, H, dtype=wide),
        gates=input.new_empty(gates),
        cells=input.new_empty(cells, dtype=wide),
        clipped=input.new_empty(clipped, dtype=torch.bool),  # c's units, then h's
    )


def _cpp_fake(tensors: Tensors, options: Options, save: int) -> reference.Results:
    """As :func:`fake`, but with layer normalisation both products are saved instead of the gates.

    The products have the accumulation dtype. Marks of clipped elements are bits, 16 to an int16.
    """
    results = fake(tensors, options, save)
    gates, clipped = results.gates, results.clipped
    p = by_direction(Parameters, tensors.parameters)[0]
    if p.norm_ih_weight is not None and gates.dim() > 1:
        gates = results.c_n.new_empty(*gates.shape[:-1], 2 * gates.shape[-1])
    if clipped.dim() > 1:
        H, R = (-(-t.shape[-1] // 16) for t in (results.c_n, results.h_n))
        columns = reference.clipped_columns(H, R, options.cell_clip, options.proj_clip)
        clipped = clipped.new_empty(*clipped.shape[:-1], columns)
    return results._replace(gates=gates, clipped=clipped.to(torch.int16))


def formula(tensors: Tensors, options: Options) -> reference.Results:
    return reference.lstm(*tensors, options=options)


def grad_formula(call: _operator.BackwardCall) -> list[Tensor | None]:
    grads, saved = call.grads, call.saved
    return reference.lstm_backward(
        grads.output,
        grads.h_n,
        grads.c_n,
        **call.tensors._asdict(),
        output=saved.output,
        gates=saved.gates,
        cells=saved.cells,
        clipped=saved.clipped,
        options=call.options,
        needs_grad=_recurrent.differentiable(call.needs_grad),
    )


OPERATOR = _recurrent.declare(
    "lstm",
    Parameters,
    Tensors,
    options=Options,
    results=reference.Results,
    saved=("output", "gates", "cells", "clipped"),
    saves=True,
    fake=fake,
    fakes={"cpp": _cpp_fake},
    formula=formula,
    grad_formula=grad_formula,
)

_op.library.define(
    "lstm_plain.cpp(Tensor input, Tensor? h0, Tensor? c0, Tensor?[] parameters, bool save) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)

_explained.explains(lstm, _prepare, _lstm_notes.launch_notes)
_explained.explains(lstm_cell, _prepare_cell, _lstm_notes.launch_notes)
