"""``trifuse.gru`` and ``rnn``, their layers, cells and modules."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trifuse.ops.gru import Parameters

from . import recurrent
from .call import Call, Tensors, draw_modes
from .draws import Draws
from .lstm import module_of
from .recurrent import Makers, Steps, count_of_states, product
from .rounding import Rounding, sigmoid, tanh
from .tensors import Values

NAMES = Parameters._fields


def draw(d: Draws, kernel: str, dtype: str, operator: str = "gru") -> Call:
    entry_point = d.choice(("function", "layer", "cell", "module"))
    T, B, I, H = recurrent.sizes(d)  # noqa: E741
    gates = {"gru": 3, "rnn": 1}[operator]
    makers = Makers(d, dtype)
    options: dict[str, Any] = {}
    directions = d.integer(1, 2) if entry_point in ("layer", "module") else 1
    layers = d.integer(1, 2) if entry_point == "module" else 1
    batch_first = entry_point in ("function", "module") and d.flag(30)
    alone = entry_point in ("function", "cell") and d.flag(10)
    B = 1 if alone else B
    steps = {"cell": ()}.get(entry_point, (T,))
    rows = () if alone else (B,)
    makers.make("input", *(rows + steps if batch_first and not alone else steps + rows), I)
    lead = {"layer": (directions,), "module": (layers * directions,)}.get(entry_point, ())
    state = "hx" if entry_point in ("function", "cell") else "h0"
    if d.flag(60):
        makers.make(state, *lead, *rows, H)
    biased = d.flag(70)
    for layer in range(layers):
        features = I if layer == 0 else directions * H
        for reverse in range(directions):
            suffix = f"_l{layer}" * (entry_point == "module") + "_reverse" * reverse
            makers.make(f"weight_ih{suffix}", gates * H, features, scale=1 / math.sqrt(features))
            makers.make(f"weight_hh{suffix}", gates * H, H, scale=1 / math.sqrt(H))
            for name in ("bias_ih", "bias_hh"):
                if biased and entry_point == "module":
                    makers.make(f"{name}{suffix}", gates * H)
                elif biased:
                    makers.vector(f"{name}{suffix}", gates * H)
    if entry_point != "cell" and d.flag(45):
        makers.lengths(T, B)
    if batch_first:
        options["batch_first"] = True
    if entry_point == "module":
        options |= {"hidden_size": H, "num_layers": layers, "bias": biased}
        options |= {"bidirectional": directions == 2}
    elif entry_point == "layer":
        options["reverse"] = tuple(d.flag(50) for _ in range(directions))
    elif entry_point == "function" and d.flag(40):
        options["reverse"] = True
    if operator == "rnn" and d.flag(50):
        options["nonlinearity"] = d.choice(("relu", "tanh"))
    elif operator == "gru" and d.flag(60):
        options["linear_before_reset"] = d.flag(25)
    shape = makers.tensors["input"].shape[:-1]
    results = {"h_n": Values((*lead, *rows, H), dtype)}
    if entry_point != "cell":
        results = {"output": Values((*shape, directions * H), dtype), **results}
    # Nothing bounds the states of ReLU.
    overflow = dtype == "float16" and options.get("nonlinearity") == "relu"
    call = Call(operator, kernel, dtype, makers.tensors, options, entry_point, overflow=overflow)
    call = draw_modes(d, call, [n for n in makers.tensors if n != "lengths"], results)
    call = recurrent.with_specials(d, call)
    return dataclasses.replace(call, seed=d.integer(0, 255))


def arguments(call: Call, tensors: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    given = dict(tensors)
    if call.entry_point == "module":
        x, h0, lengths = (given.pop(name, None) for name in ("input", "h0", "lengths"))
        module = module_of(
            call.operator.upper(), x.shape[-1], call.dtype, tuple(call.options.items())
        )
        given = {"module": module, "parameter_and_buffer_dicts": given, "args": (x, h0)}
        given |= {} if lengths is None else {"kwargs": {"lengths": lengths}}
        return "torch.func.functional_call", given
    if call.entry_point == "layer":
        parameters = [
            Parameters(*(given.pop(f"{name}{suffix}", None) for name in NAMES))
            for suffix in ("", "_reverse")[: len(call.options["reverse"])]
        ]
        given = {"h0": None, "lengths": None, **given, "parameters": parameters}
        return f"trifuse.ops.{call.operator}.layer", {**given, **call.options}
    name = call.operator + "_cell" * (call.entry_point == "cell")
    return f"trifuse.{name}", {"hx": None, **given, **call.options}


def outputs(call: Call, result: Any) -> Tensors:
    if call.entry_point == "cell":
        return {"h_n": result}
    return {"output": result[0], "h_n": result[1]}


def formula(call: Call, tensors: Tensors, r: Rounding) -> Tensors:
    x, options = tensors["input"], call.options
    h0 = tensors.get("hx", tensors.get("h0"))
    replicas = len(x)
    alone = x.dim() == (2 if call.entry_point == "cell" else 3)
    if call.entry_point == "cell":
        x = x[:, None]
    x = x[:, :, None] if alone else x
    flipped = options.get("batch_first", False) and not alone
    x = x.transpose(1, 2) if flipped else x
    B = x.shape[2]
    h0 = None if h0 is None else h0.reshape(replicas, count_of_states(call), B, h0.shape[-1])
    layers, reverse = [""], options.get("reverse", (False,))
    if call.entry_point == "module":
        layers = [f"_l{k}" for k in range(options["num_layers"])]
        reverse = (False, True)[: 1 + options["bidirectional"]]
    reverse = (reverse,) if isinstance(reverse, bool) else reverse
    hs = []
    for layer in layers:
        ys = []
        for suffix, backwards in zip(("", "_reverse"), reverse, strict=False):
            h = None if h0 is None else h0[:, len(hs)]
            y, h = _direction(call, x, h, tensors, layer + suffix, backwards, r)
            ys.append(y)
            hs.append(h)
        x = torch.cat(ys, -1)
    h_n = torch.stack(hs, 1) if call.entry_point in ("layer", "module") else hs[0]
    h_n = h_n[:, 0] if alone else h_n
    if call.entry_point == "cell":
        return {"h_n": h_n}
    output = x[:, :, 0] if alone else x
    return {"output": output.transpose(1, 2) if flipped else output, "h_n": h_n}


def _direction(
    call: Call,
    x: Tensor,
    h: Tensor | None,
    tensors: Tensors,
    suffix: str,
    reverse: bool,
    r: Rounding,
) -> tuple[Tensor, Tensor]:
    weight_ih, weight_hh, *biases = (tensors.get(f"{name}{suffix}") for name in NAMES)
    replicas, T, B, _ = x.shape
    h = x.new_zeros(replicas, B, weight_hh.shape[2]) if h is None else h
    steps = Steps(call, T, B, tensors, reverse)
    ys = []
    for step in range(steps.count):
        rows, position = steps.at(step)
        old = h[:, rows]
        from_x = _linear(x[:, position, rows], weight_ih, biases[0], r)
        if call.options.get("linear_before_reset", True):
            new = _cell(call, from_x, _linear(old, weight_hh, biases[1], r), old, r)
        else:
            new = _cell_with_reset_first(from_x, old, weight_hh, biases[1], r)
        h = h.index_copy(1, rows, new)
        ys.append((rows, position, new))
    return recurrent.gathered(ys, h, T), h


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, r: Rounding) -> Tensor:
    a = product(x, weight, r)
    return a if bias is None else r(a + bias[:, None])


def _cell(call: Call, from_x: Tensor, from_h: Tensor, old: Tensor, r: Rounding) -> Tensor:
    if call.operator == "rnn":
        a = r(from_x + from_h)
        return a.relu() if call.options.get("nonlinearity") == "relu" else tanh(a, r)
    (r_x, z_x, n_x), (r_h, z_h, n_h) = from_x.chunk(3, -1), from_h.chunk(3, -1)
    reset, update = (sigmoid(r(a + b), r) for a, b in ((r_x, r_h), (z_x, z_h)))
    candidate = tanh(r(n_x + r(reset * n_h)), r)
    return _updated(update, candidate, old, r)


def _cell_with_reset_first(
    from_x: Tensor, old: Tensor, weight_hh: Tensor, bias_hh: Tensor | None, r: Rounding
) -> Tensor:
    H = old.shape[-1]
    first, last = slice(2 * H), slice(2 * H, None)
    gate_bias, candidate_bias = (
        None if bias_hh is None else bias_hh[:, own] for own in (first, last)
    )
    gates = r(from_x[..., first] + _linear(old, weight_hh[:, first], gate_bias, r))
    reset, update = sigmoid(gates, r).chunk(2, -1)
    heard = _linear(r(reset * old), weight_hh[:, last], candidate_bias, r)
    return _updated(update, tanh(r(from_x[..., last] + heard), r), old, r)


def _updated(update: Tensor, candidate: Tensor, old: Tensor, r: Rounding) -> Tensor:
    return r(r(r(1 - update) * candidate) + r(update * old))


poison = recurrent.poison


def first(call: Call, tensors: Tensors) -> tuple[Tensors, Mapping[str, Any]] | None:
    if "hx" not in tensors:
        return recurrent.first(call, tensors, ("h",))
    alone = recurrent.first(call, {**tensors, "h0": tensors["hx"]}, ("h",))
    if alone is None:
        return None
    given, places = alone
    given["hx"] = given.pop("h0")
    places["grad_hx"] = places.pop("grad_h0")
    return given, places
