"""``trifuse.ops.dropout``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from . import philox
from .attention import PROBABILITIES
from .call import Call, Tensors, draw_modes
from .draws import Draws
from .rounding import Rounding
from .tensors import INF, NAN, Values, draw_layout


def draw(d: Draws, kernel: str, dtype: str) -> Call:
    shape: tuple[int, ...] = ()
    for _ in range(d.integer(0, 4)):
        size = d.integer(1, 9) if d.flag(80) else d.choice((0, 16, 33, 64, 200))
        if math.prod(shape) * size <= 6_000:
            shape = (*shape, size)
    x = Values(shape, dtype, d.integer(0, 255), layout=draw_layout(d, shape))
    options: dict[str, Any] = {"p": d.choice(PROBABILITIES) if d.flag(90) else 0.0}
    if d.flag(5):
        options["training"] = False
    call = Call("dropout", kernel, dtype, {"x": x}, options)
    call = draw_modes(d, call, ["x"], {"out": Values(shape, dtype)})
    if d.flag(15) and not x.layout.repeated and options["p"] and "training" not in options:
        call = dataclasses.replace(call, poison=d.choice((NAN, INF)))
    return dataclasses.replace(call, seed=d.integer(0, 255))


def arguments(call: Call, tensors: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    return "trifuse.ops.dropout.dropout", {**tensors, **call.options}


def outputs(call: Call, result: Any) -> Tensors:
    return {"out": result}


def _kept(call: Call, count: int) -> torch.Tensor:
    p, training = call.options["p"], call.options.get("training", True)
    if p == 0 or not training:
        return torch.arange(count)
    places, zeros = np.arange(count), np.zeros(count, dtype=np.int64)
    return philox.keep(philox.drawn_seed(call.seed), p, zeros, zeros, places).nonzero()[:, 0]


def formula(call: Call, tensors: Tensors, r: Rounding) -> Tensors:
    x = tensors["x"]
    p, training = call.options["p"], call.options.get("training", True)
    kept = _kept(call, x[0].numel())
    rest = x.reshape(len(x), -1).index_select(1, kept)
    rest = r(rest * philox.scale(p)) if p and training else rest
    flat = x.new_zeros(len(x), x[0].numel()).index_copy(1, kept, rest)
    return {"out": flat.view(x.shape)}


def poison(call: Call, tensors: Tensors, value: float) -> None:
    x = tensors["x"]
    unused = torch.ones(x.numel(), dtype=torch.bool).index_fill(0, _kept(call, x.numel()), False)
    x.masked_fill_(unused.view(x.shape), value)


def first(call: Call, tensors: Tensors) -> tuple[Tensors, Mapping[str, Any]] | None:
    x = tensors["x"]
    if x.dim() == 0 or len(x) < 2:
        return None
    one = slice(0, 1)
    return {"x": x[one]}, {"out": one, "grad_x": one}
