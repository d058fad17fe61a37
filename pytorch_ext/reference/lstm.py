r"""The LSTM, forward and backward, as mathematics.

Hochreiter and Schmidhuber, "Long Short-Term Memory" (1997), with the forget gate of Gers et al.
(2000) and later extensions. For one row and a step t below its length, with h = h_{t-1},
c = c_{t-1}, σ the logistic function and ⊙ the elementwise product:

    a    = LN(W_ih x_t; γ_ih) + LN(W_hh (D ⊙ h); γ_hh) + b_ih + b_hh
    i    = σ(a_i + p_i ⊙ c)
    f    = σ(a_f + p_f ⊙ c + forget bias)
    g    = tanh(a_g)
    u    = f ⊙ c + i ⊙ g,               c̃ = clip(u)
    o    = σ(a_o + p_o ⊙ c̃)
    m    = o ⊙ tanh(LN(c̃; γ_c, β_c))
    q    = W_hr m,                      h̃ = clip(q)
    c_t  = zoneout(c̃, c)
    h_t  = zoneout(h̃, h),               y_t = h_t

Each extension is optional: LN, the layer normalisation of Ba, Kiros and Hinton (2016, equations 20
to 22), over all entries of a product with a gain only, or over a cell; the peepholes p of Gers and
Schmidhuber (2000); W_hr, the projection of Sak, Senior and Beaufays (2014); D, a dropout drawn once
for all steps (Gal and Ghahramani, 2016); and zoneout (Krueger et al., 2017), which in training
keeps the old value of randomly drawn elements, and otherwise takes the expectation. With
``coupled``, f = 1 - i (Greff et al., "LSTM: A Search Space Odyssey", 2017).

Gradients follow by the chain rule from the last step to the first; :func:`lstm_backward` writes it
out. Everything except the recurrence of the states is computed for all steps at once.

h is rounded to the dtype of the input at every step. c is not rounded: it is float32, or float64
for float64. Every backend is tested against this file in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from trifuse.reference import philox
from trifuse.reference.results import accumulation_dtype


class Parameters(NamedTuple):
    """One direction's parameters. H is the hidden size, I the input size, R the size of h.

    R is H or the projection size; G is 4 (gates i, f, g, o), or with ``coupled`` 3 (i, g, o).
    """

    weight_ih: Tensor  # (G·H, I)
    weight_hh: Tensor  # (G·H, R)
    bias_ih: Tensor | None = None  # (G·H,)
    bias_hh: Tensor | None = None  # (G·H,)
    weight_hr: Tensor | None = None  # (R, H)
    weight_peephole: Tensor | None = None  # (3, H): i, f, o; with coupled (2, H): i, o
    norm_ih_weight: Tensor | None = None  # (G·H,)
    norm_hh_weight: Tensor | None = None  # (G·H,)
    norm_cell_weight: Tensor | None = None  # (H,)
    norm_cell_bias: Tensor | None = None  # (H,)


SLOTS = len(Parameters._fields)

Slots = TypeVar("Slots", bound=tuple)


def by_direction(slots: type[Slots], flat: Sequence[Any]) -> list[Slots]:
    """Splits a flat list of the parameters of all directions, or of one item for each of them."""
    count = len(slots._fields)  # type: ignore[attr-defined]
    return [slots(*flat[i : i + count]) for i in range(0, len(flat), count)]


class Options(NamedTuple):
    """A call's options: numbers and flags, in the order of the op's schema."""

    reverse: Sequence[bool]  # by direction: whether rows are read from the last step
    coupled: bool = False
    forget_bias: float = 0.0
    cell_clip: float | None = None
    proj_clip: float | None = None
    eps: float = 1e-5
    zoneout_h: float = 0.0
    zoneout_c: float = 0.0
    recurrent_dropout: float = 0.0
    training: bool = False


class Results(NamedTuple):
    output: Tensor  # (T, B, D·R), D the number of directions
    h_n: Tensor  # (D, B, R)
    c_n: Tensor  # (D, B, H)
    gates: Tensor  # (D, T, B, G·H): a of the formula
    cells: Tensor  # (D, T, B, H): c_t
    clipped: Tensor  # bool (D, T, B, ...): H columns if c has a clip, then R if h has one


def clipped_columns(H: int, R: int, cell_clip: float | None, proj_clip: float | None) -> int:
    return (0 if cell_clip is None else H) + (0 if proj_clip is None else R)


def lstm(
    input: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    parameters: Sequence[Tensor | None],
    lengths: Tensor | None,
    seed: Tensor | None,
    *,
    options: Options,
) -> Results:
    """Runs one layer in one direction or two.

    Args:
        input: (T, B, I).
        h0: (D, B, R) or None for zeros.
        c0: (D, B, H) or None for zeros.
        parameters: the :class:`Parameters` of each direction, one after another.
        lengths: int64 (B,), the number of steps in each row; None: all T.
        seed: int64, keys the random draws; a place may follow it. None without any.

    Returns:
        Output and h_n in the dtype of the input, c_n, gates and cells in float32, or float64 for
        float64. Past a row's length its output is 0 and its states stay as they are.
    """
    directions = []
    for direction in _directions(input, h0, c0, parameters, lengths, seed, options):
        p, h, c = direction.p, direction.h0, direction.c0
        from_input = _from_input(direction.x, p, options.eps)
        hs, gates, cells, clipped = [], [], [], []
        for s in range(input.shape[0]):
            a = from_input[s] + _from_hidden(_times(h, direction.dropout), p, options.eps)
            cell = _cell(a, c, p, options)
            new_h = _clip(cell.q, options.proj_clip)
            h = _next(new_h, h, direction.keep_h, options.zoneout_h, direction.valid, s)
            h = h.to(input.dtype).to(h.dtype)
            c = _next(cell.c, c, direction.keep_c, options.zoneout_c, direction.valid, s)
            hs.append(h)
            gates.append(a)
            cells.append(c)
            clipped.append(_clipped(cell, options))
        columns = clipped_columns(c.shape[1], h.shape[1], options.cell_clip, options.proj_clip)
        shapes = (h.shape, from_input.shape[1:], c.shape, (h.shape[0], columns))
        y, a_t, c_t, clipped_t = (
            in_step_order(stack_steps(steps, shape, h), lengths, direction.reverse)
            for steps, shape in zip((hs, gates, cells, clipped), shapes, strict=True)
        )
        directions.append((masked(y, direction.valid), h, c, a_t, c_t, clipped_t))
    ys, h_n, c_n, a_n, c_ts, clipped_n = zip(*directions, strict=True)
    return Results(
        torch.cat(ys, -1).to(input.dtype),
        torch.stack(h_n).to(input.dtype),
        torch.stack(c_n),
        torch.stack(a_n),
        torch.stack(c_ts),
        torch.stack(clipped_n),
    )


def lstm_backward(
    grad_output: Tensor,
    grad_h_n: Tensor | None,
    grad_c_n: Tensor | None,
    input: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    parameters: Sequence[Tensor | None],
    lengths: Tensor | None,
    seed: Tensor | None,
    output: Tensor | None,
    gates: Tensor | None,
    cells: Tensor | None,
    clipped: Tensor | None,
    *,
    options: Options,
    needs_grad: Sequence[bool],
) -> list[Tensor | None]:
    """Computes gradients for input, h0, c0 and each of the parameters.

    Args:
        grad_output: (T, B, D·R).
        grad_h_n: (D, B, R) or None for zeros; see :func:`of_h0`.
        grad_c_n: (D, B, H) or None for zeros.
        output, cells, clipped: the forward's results. If None, they are computed again, so that
            this function can itself be differentiated. Every backend uses it for its double
            backward.
        gates: the forward's gates. If None or (0,), computed again from the input and the output.
        needs_grad: which gradients are needed, in the order above.
        others: as in :func:`lstm`.

    Returns:
        Gradients, each with the shape and dtype of its tensor; None where not needed. For h0, see
        :func:`of_h0`.
    """
    if output is None or cells is None or clipped is None:
        output, _, _, gates, cells, clipped = lstm(
            input, h0, c0, parameters, lengths, seed, options=options
        )
    wants_input, wants_h0, wants_c0, *of_parameters = needs_grad
    wants = by_direction(Parameters, of_parameters)
    results: list[dict[str, Tensor | None]] = []
    for d, direction in enumerate(_directions(input, h0, c0, parameters, lengths, seed, options)):
        R = direction.h0.shape[-1]
        own = slice(d * R, (d + 1) * R)
        needs = {"input": wants_input, "h0": wants_h0, "c0": wants_c0, **wants[d]._asdict()}
        gradients = _backward(
            direction,
            direction.steps(grad_output[..., own]),
            torch.zeros_like(direction.h0)
            if grad_h_n is None
            else grad_h_n[d].to(direction.h0.dtype),
            torch.zeros_like(direction.c0) if grad_c_n is None else grad_c_n[d],
            direction.steps(output[..., own]),
            None if gates is None or gates.dim() == 1 else direction.steps(gates[d]),
            direction.steps(cells[d]),
            direction.steps(clipped[d]) if clipped.dim() > 1 else None,
            options,
        )
        results.append(
            {name: gradients[name]() if needed else None for name, needed in needs.items()}
        )
    grads = [added_up(results, "input"), side_by_side(results, "h0"), side_by_side(results, "c0")]
    grads += [result[name] for result in results for name in Parameters._fields]
    return [
        None if grad is None or t is None else grad.to(t.dtype)
        for grad, t in zip(grads, [input, of_h0(input, h0, grad_h_n), c0, *parameters], strict=True)
    ]


def of_h0(input: Tensor, h0: Tensor | None, grad_h_n: Tensor | None) -> Tensor | None:
    """Returns a tensor with the dtype in which a backward returns the gradient of h0.

    A caller that cuts a sequence passes the gradient of h from the later call to the earlier one.
    With 16-bit tensors it may pass this gradient in float32, and then gets it in float32. So the
    gradient has the same bits as in an uncut sequence, where it is not rounded between steps
    either.
    """
    if h0 is None or grad_h_n is None or grad_h_n.dtype != accumulation_dtype(input.dtype):
        return h0
    return grad_h_n


# One direction ----------------------------------------------------------------------------------


class _Direction(NamedTuple):
    """One direction's arguments, in the order of its steps, in the accumulation dtype."""

    p: Parameters
    x: Tensor  # (T, B, I)
    h0: Tensor  # (B, R)
    c0: Tensor  # (B, H)
    lengths: Tensor | None
    reverse: bool
    valid: Tensor | None  # bool (T, B, 1): whether a row has that step
    dropout: Tensor | None  # (B, R): D
    keep_h: Tensor | None  # bool (T, B, R): where zoneout in training takes the new h
    keep_c: Tensor | None  # bool (T, B, H)

    def steps(self, t: Tensor) -> Tensor:
        """Puts (T, B, ...) in step order, with 0 past each row's length."""
        return in_step_order(masked(t, self.valid), self.lengths, self.reverse).to(self.x.dtype)


def _directions(
    input: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    parameters: Sequence[Tensor | None],
    lengths: Tensor | None,
    seed: Tensor | None,
    options: Options,
) -> Iterator[_Direction]:
    (T, B, _), wide = input.shape, accumulation_dtype(input.dtype)
    valid = valid_steps(T, lengths)
    wide_parameters = [None if t is None else t.to(wide) for t in parameters]
    for d, p in enumerate(by_direction(Parameters, wide_parameters)):
        reverse = options.reverse[d]
        R = p.weight_hh.shape[1]
        H = R if p.weight_hr is None else p.weight_hr.shape[1]

        def keep(kind: int, count: int, columns: int, p: float, d: int = d) -> Tensor | None:
            if not options.training or p == 0:
                return None
            assert seed is not None
            plane = (torch.arange(count, device=input.device) * 3 + kind) * 2 + d
            rows = philox.placed_units(seed, torch.arange(B, device=input.device))
            return philox.dropout_keep(seed, plane, rows, columns, p)

        dropout = keep(0, 1, R, options.recurrent_dropout)
        if dropout is not None:
            dropout = dropout[0].to(wide) * philox.keep_scale(options.recurrent_dropout)
        keep_h, keep_c = keep(1, T, R, options.zoneout_h), keep(2, T, H, options.zoneout_c)
        yield _Direction(
            p,
            in_step_order(masked(input, valid), lengths, reverse).to(wide),
            input.new_zeros(B, R, dtype=wide) if h0 is None else h0[d].to(wide),
            input.new_zeros(B, H, dtype=wide) if c0 is None else c0[d].to(wide),
            lengths,
            reverse,
            valid,
            dropout,
            None if keep_h is None else in_step_order(keep_h, lengths, reverse),
            None if keep_c is None else in_step_order(keep_c, lengths, reverse),
        )


def _backward(
    direction: _Direction,
    dy: Tensor,
    dh: Tensor,
    dc: Tensor,
    y: Tensor,
    a: Tensor | None,
    c_t: Tensor,
    clipped: Tensor | None,
    options: Options,
) -> dict[str, Callable[[], Tensor]]:
    """Returns functions that compute the gradients, by the names of arguments and parameters.

    Args:
        dy: (T, B, R), the gradient of the output, in step order; dh: (B, R), that of h_n;
            dc: (B, H), that of c_n.
        y: (T, B, R), a: (T, B, G·H) or None, c_t: (T, B, H), clipped: (T, B, ...) of 0 and 1, or
            None without clips: the forward's results, in step order.
    """
    p, x, eps = direction.p, direction.x, options.eps
    # States before each step. Past a row's length there is no step, and 0 is used, which affects
    # nothing.
    h, c = (
        masked(torch.cat([first[None], after])[: len(x)], direction.valid)
        for first, after in ((direction.h0, y), (direction.c0, c_t))
    )
    hd = _times(h, direction.dropout)
    if a is None:
        a = _from_input(x, p, eps) + _from_hidden(hd, p, eps)
    cell = _cell(a, c, p, options)
    norm_x = norm_h = norm_c = None
    if p.norm_ih_weight is not None and p.norm_hh_weight is not None:
        norm_x, norm_h = _normalise(x @ p.weight_ih.mT, eps), _normalise(hd @ p.weight_hh.mT, eps)
    if p.norm_cell_weight is not None:
        norm_c = _normalise(cell.c, eps)

    local = _derivatives(cell, direction, h, c, clipped, options)
    steps, dh, dc = _backward_steps(
        direction, dy, dh, dc, cell, norm_h, norm_c, local, options.coupled
    )
    da, dah, dq, dn = (
        stack_steps(made[::-1], like.shape[1:], like)
        for made, like in zip(steps, (a, a, h, c), strict=True)
    )
    dax = da
    if norm_x is not None and p.norm_ih_weight is not None:
        dax = _normalise_backward(da * p.norm_ih_weight, norm_x)
    of_i, *of_f, _, of_o = da.chunk(3 if options.coupled else 4, -1)  # with coupled, of_f is empty

    def peephole() -> Tensor:
        seen = [(of_i, c), *((gate, c) for gate in of_f), (of_o, cell.c)]
        return torch.stack([sum_over_steps(gate * state) for gate, state in seen])

    def gain(norm: _Normalised | None, by: Tensor) -> Tensor:
        assert norm is not None
        return sum_over_steps(norm.values * by)

    return {
        "input": lambda: in_step_order(dax @ p.weight_ih, direction.lengths, direction.reverse),
        "h0": lambda: dh,
        "c0": lambda: dc,
        "weight_ih": lambda: sum_of_outer_products(dax, x),
        "weight_hh": lambda: sum_of_outer_products(dah, hd),
        "bias_ih": lambda: sum_over_steps(da),
        "bias_hh": lambda: sum_over_steps(da),
        "weight_hr": lambda: sum_of_outer_products(dq, cell.m),
        "weight_peephole": peephole,
        "norm_ih_weight": lambda: gain(norm_x, da),
        "norm_hh_weight": lambda: gain(norm_h, da),
        "norm_cell_weight": lambda: gain(norm_c, dn),
        "norm_cell_bias": lambda: sum_over_steps(dn),
    }


class _StepGradients(NamedTuple):
    """The gradients that a backward pass computes in each step, the last step first."""

    da: list[Tensor]  # (B, G·H): a
    dah: list[Tensor]  # (B, G·H): W_hh h, before its norm
    dq: list[Tensor]  # (B, R): q
    dn: list[Tensor]  # (B, H): LN(c̃)


def _backward_steps(
    direction: _Direction,
    dy: Tensor,
    dh: Tensor,
    dc: Tensor,
    cell: _Cell,
    norm_h: _Normalised | None,
    norm_c: _Normalised | None,
    local: _Derivatives,
    coupled: bool,
) -> tuple[_StepGradients, Tensor, Tensor]:
    """Returns the gradients of each step, of h0 and of c0; dy, dh and dc as in ``_backward``."""
    p = direction.p
    p_i, p_f, p_o = _peepholes(p, coupled)
    made = _StepGradients([], [], [], [])
    for s in reversed(range(len(dy))):
        dh = dh + dy[s]
        dq = dh * local.new_h[s] * local.unclipped_q[s]
        dm = dq if p.weight_hr is None else dq @ p.weight_hr
        dn, da_o = dm * local.n_by_m[s], dm * local.o_by_m[s]
        du = dc * local.new_c[s] + da_o * p_o
        if norm_c is None or p.norm_cell_weight is None:
            du = du + dn
        else:
            du = du + _normalise_backward(dn * p.norm_cell_weight, norm_c.at(s))
        du = du * local.unclipped_u[s]
        da_i, da_f, da_g = du * local.i_by_u[s], du * local.f_by_u[s], du * local.g_by_u[s]
        dc = dc * (1 - local.new_c[s]) + du * cell.f[s] + da_i * p_i
        if coupled:
            da = torch.cat([da_i, da_g, da_o], -1)
        else:
            dc = dc + da_f * p_f
            da = torch.cat([da_i, da_f, da_g, da_o], -1)
        dah = da
        if norm_h is not None and p.norm_hh_weight is not None:
            dah = _normalise_backward(da * p.norm_hh_weight, norm_h.at(s))
        dh = dh * (1 - local.new_h[s]) + _times(dah @ p.weight_hh, direction.dropout)
        for steps, step in zip(made, (da, dah, dq, dn), strict=True):
            steps.append(step)
    return made, dh, dc


class _Derivatives(NamedTuple):
    """Derivatives within each step, (T, B, ...). ``y_by_x`` is that of y with respect to x.

    Derivatives of gates are with respect to their sums, those of states to their new values.
    """

    new_h: Tensor  # share of the new value in the state
    new_c: Tensor
    unclipped_u: Tensor  # 0 where the value was clipped, 1 elsewhere
    unclipped_q: Tensor
    n_by_m: Tensor
    o_by_m: Tensor
    i_by_u: Tensor
    f_by_u: Tensor
    g_by_u: Tensor


def _derivatives(
    cell: _Cell,
    direction: _Direction,
    h: Tensor,
    c: Tensor,
    clipped: Tensor | None,
    options: Options,
) -> _Derivatives:
    i, f, g, o, tanh = cell.i, cell.f, cell.g, cell.o, cell.tanh
    unclipped_u, unclipped_q = torch.ones_like(c), torch.ones_like(h)
    if clipped is not None and options.cell_clip is not None:
        unclipped_u = 1 - clipped[..., : c.shape[-1]]
    if clipped is not None and options.proj_clip is not None:
        unclipped_q = 1 - clipped[..., -h.shape[-1] :]
    return _Derivatives(
        new_h=_share(direction.keep_h, direction.valid, options.zoneout_h, h),
        new_c=_share(direction.keep_c, direction.valid, options.zoneout_c, c),
        unclipped_u=unclipped_u,
        unclipped_q=unclipped_q,
        n_by_m=o * (1 - tanh.square()),
        o_by_m=tanh * o * (1 - o),
        i_by_u=(g - c if options.coupled else g) * i * (1 - i),
        f_by_u=c * f * (1 - f),
        g_by_u=i * (1 - g.square()),
    )


# Step by step and in one call -------------------------------------------------------------------


class _Cell(NamedTuple):
    """The formula's variables, each (..., H), except q, (..., R)."""

    i: Tensor
    f: Tensor
    g: Tensor
    o: Tensor
    u: Tensor
    c: Tensor  # c̃
    tanh: Tensor  # tanh(LN(c̃))
    m: Tensor
    q: Tensor


def _cell(a: Tensor, c: Tensor, p: Parameters, options: Options) -> _Cell:
    p_i, p_f, p_o = _peepholes(p, options.coupled)
    if options.coupled:
        a_i, a_g, a_o = a.chunk(3, -1)
        i = torch.sigmoid(a_i + p_i * c)
        f = 1 - i
    else:
        a_i, a_f, a_g, a_o = a.chunk(4, -1)
        i = torch.sigmoid(a_i + p_i * c)
        f = torch.sigmoid(a_f + p_f * c + options.forget_bias)
    g = torch.tanh(a_g)
    u = f * c + i * g
    c = _clip(u, options.cell_clip)
    o = torch.sigmoid(a_o + p_o * c)
    normalised = c
    if p.norm_cell_weight is not None:
        normalised = _normalise(c, options.eps).values * p.norm_cell_weight
    if p.norm_cell_bias is not None:
        normalised = normalised + p.norm_cell_bias
    tanh = torch.tanh(normalised)
    m = o * tanh
    q = m if p.weight_hr is None else m @ p.weight_hr.mT
    return _Cell(i, f, g, o, u, c, tanh, m, q)


def _from_input(x: Tensor, p: Parameters, eps: float) -> Tensor:
    """Returns a without the contribution of h."""
    a = x @ p.weight_ih.mT
    if p.norm_ih_weight is not None:
        a = _normalise(a, eps).values * p.norm_ih_weight
    for bias in (p.bias_ih, p.bias_hh):
        a = a if bias is None else a + bias
    return a


def _from_hidden(hd: Tensor, p: Parameters, eps: float) -> Tensor:
    a = hd @ p.weight_hh.mT
    return a if p.norm_hh_weight is None else _normalise(a, eps).values * p.norm_hh_weight


def _peepholes(p: Parameters, coupled: bool) -> tuple[Any, Any, Any]:
    """Returns p_i, p_f and p_o, each (H,) or 0."""
    if p.weight_peephole is None:
        return 0, 0, 0
    p_i, *p_f, p_o = p.weight_peephole
    return p_i, 0 if coupled else p_f[0], p_o


def _clip(t: Tensor, limit: float | None) -> Tensor:
    """Clips to ±limit. A number at its limit has a gradient; torch.clamp's varies by version."""
    if limit is None:
        return t
    return torch.where(t > limit, limit, torch.where(t < -limit, -limit, t))


def _clipped(cell: _Cell, options: Options) -> Tensor:
    clips = ((cell.u, options.cell_clip), (cell.q, options.proj_clip))
    marks = [t.abs() > limit for t, limit in clips if limit is not None]
    return torch.cat(marks, -1) if marks else cell.u.new_empty(cell.u.shape[0], 0)


def _times(t: Tensor, multiplier: Tensor | None) -> Tensor:
    return t if multiplier is None else t * multiplier


def _next(
    new: Tensor, old: Tensor, keep: Tensor | None, p: float, valid: Tensor | None, s: int
) -> Tensor:
    """Returns the state after step s, with zoneout; a row that has ended keeps its state."""
    if keep is not None:
        new = torch.where(keep[s], new, old)
    elif p > 0:
        new = p * old + (1 - p) * new
    return new if valid is None else torch.where(valid[s], new, old)


def _share(keep: Tensor | None, valid: Tensor | None, p: float, like: Tensor) -> Tensor:
    """Returns (T, B, ...), the derivative of each step's state with respect to its new value."""
    share = torch.full_like(like, 1 - p) if keep is None else keep.to(like.dtype)
    return masked(share, valid)


class _Normalised(NamedTuple):
    values: Tensor  # mean 0, variance 1
    rstd: Tensor

    def at(self, s: int) -> _Normalised:
        return _Normalised(self.values[s], self.rstd[s])


def _normalise(t: Tensor, eps: float) -> _Normalised:
    centred = t - t.mean(-1, keepdim=True)
    rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    return _Normalised(centred * rstd, rstd)


def _normalise_backward(g: Tensor, norm: _Normalised) -> Tensor:
    n = norm.values
    return norm.rstd * (g - g.mean(-1, keepdim=True) - n * (g * n).mean(-1, keepdim=True))


# Sequences --------------------------------------------------------------------------------------


def valid_steps(T: int, lengths: Tensor | None) -> Tensor | None:
    """Returns bool (T, B, 1): whether a row has that step or position. None: all rows have it."""
    if lengths is None:
        return None
    return (torch.arange(T, device=lengths.device)[:, None] < lengths)[..., None]


def masked(t: Tensor, valid: Tensor | None) -> Tensor:
    return t if valid is None else t.masked_fill(~valid, 0)


def in_step_order(t: Tensor, lengths: Tensor | None, reverse: bool) -> Tensor:
    """Reorders (T, B, ...) from positions to steps, or back: it is its own inverse."""
    if not reverse:
        return t
    if lengths is None:
        return t.flip(0)
    step = torch.arange(t.shape[0], device=t.device)[:, None]
    position = torch.where(step < lengths, lengths - 1 - step, step)
    return t.gather(0, position[..., None].expand(t.shape))


def stack_steps(steps: Sequence[Tensor], shape: Sequence[int], like: Tensor) -> Tensor:
    """Stacks the steps; if there are none, returns an empty ``(0, *shape)``."""
    return torch.stack(list(steps)) if steps else like.new_empty(0, *shape)


def added_up(results: list[dict[str, Tensor | None]], name: str) -> Tensor | None:
    """Sums one gradient over the directions."""
    parts = [result[name] for result in results]
    total = parts[0]
    for part in parts[1:]:
        total = None if total is None or part is None else total + part
    return total


def side_by_side(results: list[dict[str, Tensor | None]], name: str) -> Tensor | None:
    """Stacks one gradient of all directions."""
    parts = [part for result in results if (part := result[name]) is not None]
    return torch.stack(parts) if parts else None


def sum_of_outer_products(left: Tensor, right: Tensor) -> Tensor:
    """Returns the sum over steps and rows of left ⊗ right."""
    return left.flatten(0, 1).mT @ right.flatten(0, 1)


def sum_over_steps(t: Tensor) -> Tensor:
    return t.sum((0, 1))
