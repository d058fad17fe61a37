"""``trifuse.lstm``, its layers, cells and modules."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import trifuse
from trifuse.ops.lstm import Parameters

from . import philox, recurrent
from .call import Call, Tensors, draw_modes
from .draws import Draws
from .recurrent import Makers, Steps, count_of_states, product
from .rounding import Rounding, sigmoid, tanh
from .tensors import Values

# The parameters of trifuse.lstm, in the order of trifuse.ops.lstm.Parameters.
NAMES = Parameters._fields
PROBABILITIES = (0.5, 0.1, 0.9, 2.5 / 65536)
DRAWING = ("zoneout_h", "zoneout_c", "recurrent_dropout")  # options that draw random numbers


# Calls ------------------------------------------------------------------------------------------


class _Layer(NamedTuple):
    """The sizes of a layer, and the options of its cells."""

    I: int  # noqa: E741
    H: int
    R: int
    gates: int
    projected: bool
    norm: bool
    optional: dict[str, bool]  # biases and peepholes


def draw(d: Draws, kernel: str, dtype: str) -> Call:
    entry_point = d.choice(("function", "function", "layer", "cell", "module"))
    if entry_point in ("cell", "module"):
        return _draw_plain(d, kernel, dtype, entry_point)
    T, B, I, H = recurrent.sizes(d)  # noqa: E741
    directions = d.integer(1, 2) if entry_point == "layer" else 1
    reverse = tuple(d.flag(50) for _ in range(directions))
    coupled = d.flag(25)
    gates, R = 3 if coupled else 4, d.integer(1, 9) if d.flag(30) else H
    projected = R != H or d.flag(5)
    makers = Makers(d, dtype)
    batch_first = entry_point == "function" and d.flag(25)
    one_row = entry_point == "function" and d.flag(8)
    spread = d.choice((1.0, 1.0, 4.0))
    if one_row:
        makers.make("input", T, I, scale=spread)
    else:
        makers.make("input", *((B, T) if batch_first else (T, B)), I, scale=spread)
    B = 1 if one_row else B
    rows = () if one_row else (B,)
    lead = (directions,) if entry_point == "layer" else ()
    narrow = dtype in ("bfloat16", "float16")
    if d.flag(60):
        makers.make("h0", *lead, *rows, R)
    if d.flag(60):
        makers.make("c0", *lead, *rows, H, dtype="float32" if narrow and d.flag(50) else dtype)
    optional = {
        name: d.flag(35) for name in ("bias_ih", "bias_hh", "weight_peephole", "norm_cell_bias")
    }
    layer = _Layer(I, H, R, gates, projected, d.flag(25), optional)
    for suffix in ("", "_reverse")[:directions]:
        _draw_parameters(makers, layer, suffix)
    if d.flag(45):
        makers.lengths(T, B)
    options: dict[str, Any] = {}
    if batch_first:
        options["batch_first"] = True
    if entry_point == "layer":
        options["reverse"] = reverse
    elif reverse[0]:
        options["reverse"] = True
    if coupled:
        options["coupled"] = True
    options |= _draw_options(d, layer)
    output = (T, I) if one_row else makers.tensors["input"].shape
    wide = "float64" if dtype == "float64" else "float32"
    results = {
        "output": Values((*output[:-1], directions * R), dtype),
        "h_n": Values((*lead, *rows, R), dtype),
        "c_n": Values((*lead, *rows, H), wide),
    }
    call = Call("lstm", kernel, dtype, makers.tensors, options, entry_point)
    differentiable = [n for n in makers.tensors if n != "lengths"]
    call = draw_modes(d, call, differentiable, results)
    call = recurrent.with_specials(d, call)
    return dataclasses.replace(call, seed=d.integer(0, 255))


def _draw_parameters(makers: Makers, layer: _Layer, suffix: str) -> None:
    """Draws the parameters of one direction."""
    I, H, R, G, *_ = layer  # noqa: E741
    # A layer norm of equal numbers turns rounding errors into results of any size.
    repeat = not layer.norm
    makers.make(f"weight_ih{suffix}", G * H, I, repeat=repeat, scale=1 / math.sqrt(I))
    makers.make(f"weight_hh{suffix}", G * H, R, repeat=repeat, scale=1 / math.sqrt(R))
    if layer.projected:
        makers.make(f"weight_hr{suffix}", R, H, scale=1 / math.sqrt(H))
    for name in ("bias_ih", "bias_hh"):
        if layer.optional[name]:
            makers.vector(f"{name}{suffix}", G * H)
    if layer.optional["weight_peephole"]:
        makers.vector(f"weight_peephole{suffix}", G - 1, H)
    if layer.norm:
        makers.vector(f"norm_ih_weight{suffix}", G * H, mean=1.0)
        makers.vector(f"norm_hh_weight{suffix}", G * H, mean=1.0)
        makers.vector(f"norm_cell_weight{suffix}", H, mean=1.0)
        if layer.optional["norm_cell_bias"]:
            makers.vector(f"norm_cell_bias{suffix}", H)


def _draw_options(d: Draws, layer: _Layer) -> dict[str, Any]:
    """Draws the options of the layer's cells."""
    options: dict[str, Any] = {}
    if layer.gates == 4 and d.flag(20):
        options["forget_bias"] = d.choice((1.0, -0.5))
    if d.flag(20):
        options["cell_clip"] = d.choice((0.5, 0.1, 1))
    if layer.projected and d.flag(30):
        options["proj_clip"] = d.choice((0.3, 0.05))
    if layer.norm and d.flag(30):
        options["eps"] = d.choice((1e-3, 0.1))
    if d.flag(40):
        options["training"] = True
    for name in DRAWING:
        if d.flag(20):
            options[name] = d.choice(PROBABILITIES)
    if d.flag(20):
        options["recompute"] = True
    return options


def _draw_plain(d: Draws, kernel: str, dtype: str, entry_point: str) -> Call:
    T, B, I, H = recurrent.sizes(d)  # noqa: E741
    makers = Makers(d, dtype)
    bias = d.flag(70)
    if entry_point == "cell":
        rows = () if d.flag(15) else (B,)
        makers.make("input", *rows, I)
        if d.flag(70):
            makers.make("h0", *rows, H)
            makers.make("c0", *rows, H)
        makers.make("weight_ih", 4 * H, I, scale=1 / math.sqrt(I))
        makers.make("weight_hh", 4 * H, H, scale=1 / math.sqrt(H))
        if bias:
            makers.make("bias_ih", 4 * H)
            makers.make("bias_hh", 4 * H)
        wide = "float64" if dtype == "float64" else "float32"
        results = {"h": Values((*rows, H), dtype), "c": Values((*rows, H), wide)}
        call = Call("lstm", kernel, dtype, makers.tensors, {}, entry_point)
        call = draw_modes(d, call, [*makers.tensors], results)
        return dataclasses.replace(call, seed=d.integer(0, 255))
    both, batch_first, coupled = d.flag(40), d.flag(40), d.flag(25)
    projection = d.integer(1, H - 1) if H > 1 and d.flag(30) else 0
    R, D = projection or H, 1 + both
    norm, peephole = d.flag(25), d.flag(25)
    optional = {"bias_ih": bias, "bias_hh": bias, "weight_peephole": peephole}
    layer = _Layer(
        I, H, R, 3 if coupled else 4, projection > 0, norm, {**optional, "norm_cell_bias": True}
    )
    options = _draw_options(d, layer)
    # Layers draw seeds of their own, and the formula knows only the first.
    draws = options.get("training") and not options.keys().isdisjoint(DRAWING)
    layers = 1 if draws else d.integer(1, 2)
    makers.make("input", *((B, T) if batch_first else (T, B)), I)
    if d.flag(60):
        makers.make("h0", layers * D, B, R)
        makers.make("c0", layers * D, B, H)
    if d.flag(30):
        makers.lengths(T, B)
    for k in range(layers):
        for suffix in (f"_l{k}", f"_l{k}_reverse")[:D]:
            _draw_parameters(makers, layer._replace(I=I if k == 0 else D * R), suffix)
    options |= {"hidden_size": H, "num_layers": layers, "proj_size": projection}
    options |= {"bias": bias, "batch_first": batch_first, "bidirectional": both}
    options |= {"coupled": coupled, "peephole": peephole, "layer_norm": norm}
    shape = makers.tensors["input"].shape
    results = {
        "output": Values((*shape[:-1], D * R), dtype),
        "h_n": Values((layers * D, B, R), dtype),
        "c_n": Values((layers * D, B, H), dtype),
    }
    call = Call("lstm", kernel, dtype, makers.tensors, options, entry_point)
    call = draw_modes(d, call, [n for n in makers.tensors if n != "lengths"], results)
    call = recurrent.with_specials(d, call)
    return dataclasses.replace(call, seed=d.integer(0, 255))


# Construction -----------------------------------------------------------------------------------


def arguments(call: Call, tensors: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    given = dict(tensors)
    states = given.pop("h0", None), given.pop("c0", None)
    if call.entry_point == "layer":
        parameters = [
            Parameters(*(given.pop(f"{name}{suffix}", None) for name in NAMES))
            for suffix in ("", "_reverse")[: len(call.options["reverse"])]
        ]
        rest = {"input": given["input"], "h0": states[0], "c0": states[1], "parameters": parameters}
        rest |= {"lengths": given.get("lengths")}
        return "trifuse.ops.lstm.layer", {**rest, **call.options}
    hx = None if states == (None, None) else states
    if call.entry_point == "module":
        x, lengths = given.pop("input"), given.pop("lengths", None)
        module = module_of("LSTM", x.shape[-1], call.dtype, tuple(call.options.items()))
        given = {"module": module, "parameter_and_buffer_dicts": given, "args": (x, hx)}
        given |= {} if lengths is None else {"kwargs": {"lengths": lengths}}
        return "torch.func.functional_call", given
    name = "lstm_cell" if call.entry_point == "cell" else "lstm"
    return f"trifuse.{name}", {"input": given.pop("input"), "hx": hx, **given, **call.options}


@functools.lru_cache(maxsize=256)
def module_of(name: str, features: int, dtype: str, options: tuple[Any, ...]) -> torch.nn.Module:
    given = {**dict(options), "dtype": getattr(torch, dtype)}
    training = given.pop("training", False)
    with torch.random.fork_rng(devices=[]):  # its initial weights draw from the call's generator
        module = getattr(trifuse.nn, name)(features, **given).train(training)
    text = ", ".join(f"{key}={value!r}" for key, value in given.items())
    module.made_by = f"trifuse.nn.{name}({features}, {text}).train({training})"
    return module


def outputs(call: Call, result: Any) -> Tensors:
    if call.entry_point == "cell":
        return {"h": result[0], "c": result[1]}
    if call.entry_point == "layer":
        return dict(zip(("output", "h_n", "c_n"), result, strict=True))
    return {"output": result[0], "h_n": result[1][0], "c_n": result[1][1]}


# Expected results -------------------------------------------------------------------------------


def formula(call: Call, tensors: Tensors, r: Rounding) -> Tensors:
    x, options = tensors["input"], call.options
    replicas = len(x)
    if call.entry_point == "cell":
        one_row = x.dim() == 2
        rows = x[:, None] if one_row else x
        states = [
            t if t is None or not one_row else t[:, None]
            for t in (tensors.get("h0"), tensors.get("c0"))
        ]
        _, h, c = _direction(call, rows[:, None], *states, tensors, "", False, 0, r)
        return {"h": h[:, 0], "c": c[:, 0]} if one_row else {"h": h, "c": c}
    one_row = x.dim() == 3
    x = x[:, :, None] if one_row else x
    x = x.transpose(1, 2) if options.get("batch_first") and not one_row else x
    h0, c0 = (
        None if t is None else t.reshape(replicas, count_of_states(call), x.shape[2], t.shape[-1])
        for t in (tensors.get("h0"), tensors.get("c0"))
    )
    if call.entry_point == "module":
        both = options["bidirectional"]
        layers = [(f"_l{k}", f"_l{k}_reverse")[: 1 + both] for k in range(options["num_layers"])]
        reverse = (False, True)[: 1 + both]
    else:
        reverse = options.get("reverse", False)
        reverse = reverse if call.entry_point == "layer" else (reverse,)
        layers = [("", "_reverse")[: len(reverse)]]
    hs, cs = [], []
    for suffixes in layers:
        ys = []
        for direction, (suffix, backwards) in enumerate(zip(suffixes, reverse, strict=True)):
            h, c = (None if t is None else t[:, len(hs)] for t in (h0, c0))
            y, h, c = _direction(call, x, h, c, tensors, suffix, backwards, direction, r)
            ys.append(y)
            hs.append(h)
            cs.append(c)
        x = torch.cat(ys, -1)
    output = x[:, :, 0] if one_row else x
    output = output.transpose(1, 2) if options.get("batch_first") and not one_row else output
    h_n, c_n = torch.stack(hs, 1), torch.stack(cs, 1)
    if call.entry_point == "function":
        h_n, c_n = h_n[:, 0], c_n[:, 0]
        h_n, c_n = (h_n[:, 0], c_n[:, 0]) if one_row else (h_n, c_n)
    return {"output": output, "h_n": h_n, "c_n": c_n}


def _direction(
    call: Call,
    x: Tensor,
    h: Tensor | None,
    c: Tensor | None,
    tensors: Tensors,
    suffix: str,
    reverse: bool,
    direction: int,
    r: Rounding,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs one direction step by step. A step computes only the rows that are long enough."""
    options = call.options
    p = {name: tensors.get(f"{name}{suffix}") for name in NAMES}
    replicas, T, B, _ = x.shape
    R = p["weight_hh"].shape[2]
    H = R if p["weight_hr"] is None else p["weight_hr"].shape[2]
    h = x.new_zeros(replicas, B, R) if h is None else h
    c = x.new_zeros(replicas, B, H) if c is None else c
    seed = philox.drawn_seed(call.seed)
    training = options.get("training", False)
    share_h, share_c = options.get("zoneout_h", 0.0), options.get("zoneout_c", 0.0)
    recurrent_dropout = options.get("recurrent_dropout", 0.0) if training else 0.0

    def drawn(
        kind: int, positions: Tensor, rows: Tensor, columns: int, probability: float
    ) -> Tensor:
        """Returns bool (rows, columns). Position, kind and direction number the plane."""
        plane = ((positions * 3 + kind) * 2 + direction)[:, None].expand(-1, columns)
        row, column = rows[:, None].expand(-1, columns), torch.arange(columns).expand(len(rows), -1)
        flat = (np.ascontiguousarray(t.numpy()).ravel() for t in (plane, row, column))
        return philox.keep(seed, probability, *flat).view(len(rows), columns)

    def after(new: Tensor, old: Tensor, kind: int, probability: float) -> Tensor:
        """Applies zoneout."""
        if not probability:
            return new
        if not training:
            return r(r(probability * old) + r((1 - probability) * new))
        return torch.where(drawn(kind, position, rows, new.shape[2], probability), new, old)

    everyone = torch.arange(B)
    mask = None
    if recurrent_dropout:
        kept = drawn(0, torch.zeros_like(everyone), everyone, R, recurrent_dropout)
        mask = kept.double() * philox.scale(recurrent_dropout)
    steps = Steps(call, T, B, tensors, reverse)
    ys = []
    for step in range(steps.count):
        rows, position = steps.at(step)
        h_old, c_old = h[:, rows], c[:, rows]
        heard = h_old if mask is None else r(h_old * mask[rows])
        new_h, new_c = _cell(call, x[:, position, rows], heard, c_old, p, r)
        new_h = r(after(new_h, h_old, 1, share_h))
        new_c = r(after(new_c, c_old, 2, share_c))
        h, c = h.index_copy(1, rows, new_h), c.index_copy(1, rows, new_c)
        ys.append((rows, position, new_h))
    return recurrent.gathered(ys, h, T), h, c


def _cell(
    call: Call, x: Tensor, h: Tensor, c: Tensor, p: dict[str, Tensor | None], r: Rounding
) -> tuple[Tensor, Tensor]:
    """Returns a step's h and c, before zoneout, with the parameters p."""
    options = call.options
    eps, coupled = options.get("eps", 1e-5), options.get("coupled", False)
    from_x = product(x, p["weight_ih"], r)
    from_h = product(h, p["weight_hh"], r)
    if p["norm_ih_weight"] is not None:
        from_x = _normal(call, from_x, p["norm_ih_weight"], None, eps, r)
        from_h = _normal(call, from_h, p["norm_hh_weight"], None, eps, r)
    a = r(from_x + from_h)
    for name in ("bias_ih", "bias_hh"):
        a = a if p[name] is None else r(a + p[name][:, None])
    a_i, *a_f, a_g, a_o = a.chunk(3 if coupled else 4, -1)
    if p["weight_peephole"] is not None:
        *first_peepholes, peephole_o = p["weight_peephole"].unbind(1)
        a_i = r(a_i + r(first_peepholes[0][:, None] * c))
        if not coupled:
            a_f = [r(a_f[0] + r(first_peepholes[1][:, None] * c))]
    i = sigmoid(a_i, r)
    forget_bias = options.get("forget_bias", 0.0)
    f = r(1 - i) if coupled else sigmoid(r(a_f[0] + forget_bias), r)
    new_c = _clipped(r(r(f * c) + r(i * tanh(a_g, r))), options.get("cell_clip"))
    if p["weight_peephole"] is not None:
        a_o = r(a_o + r(peephole_o[:, None] * new_c))
    shown = new_c
    if p["norm_cell_weight"] is not None:
        shown = _normal(call, new_c, p["norm_cell_weight"], p["norm_cell_bias"], eps, r)
    new_h = r(sigmoid(a_o, r) * tanh(shown, r))
    if p["weight_hr"] is not None:
        new_h = _clipped(product(new_h, p["weight_hr"], r), options.get("proj_clip"))
    return new_h, new_c


def _clipped(x: Tensor, limit: float | None) -> Tensor:
    return x if limit is None else x.clamp(-limit, limit)


def _normal(
    call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, r: Rounding
) -> Tensor:
    mean = r(x).mean(-1, keepdim=True)
    # See dropout_add_layer_norm.formula.
    deviation = r(x - r(mean if call.second else mean.detach()))
    rstd = r((r(r(deviation.square()).mean(-1, keepdim=True)) + eps).rsqrt())
    out = r(r(r(x - r(mean)) * r(rstd.expand_as(x))) * weight[:, None])
    return out if bias is None else r(out + bias[:, None])


poison = recurrent.poison


def first(call: Call, tensors: Tensors) -> tuple[Tensors, Mapping[str, Any]] | None:
    return recurrent.first(call, tensors, ("h", "c"))
