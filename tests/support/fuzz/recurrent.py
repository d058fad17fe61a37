"""Shared parts of the fuzzing of LSTM, GRU and RNN."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .call import Call, Tensors
from .draws import Draws
from .rounding import Rounding
from .tensors import INF, NAN, Values, draw_layout

UNITS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17)
MANY_UNITS = (24, 31, 32, 33, 64, 65, 100)


def sizes(d: Draws) -> tuple[int, int, int, int]:
    """Draws T, B, I and H."""
    T = d.choice((0, 20)) if d.flag(4) else d.integer(1, 5)
    B = d.choice((0, 17, 33)) if d.flag(6) else d.integer(1, 4)
    I, H = (d.choice(MANY_UNITS if d.flag(12) else UNITS) for _ in range(2))  # noqa: E741
    return T, B, I, H


class Makers:
    """Collects the tensors of a call as they are drawn."""

    def __init__(self, d: Draws, dtype: str) -> None:
        self.d, self.dtype = d, dtype
        self.tensors: dict[str, Values] = {}

    def make(
        self, name: str, *shape: int, dtype: str = "", repeat: bool = True, **rest: Any
    ) -> None:
        layout = draw_layout(self.d, shape, repeat)
        seed = self.d.integer(0, 255)
        self.tensors[name] = Values(shape, dtype or self.dtype, seed, layout=layout, **rest)

    def vector(self, name: str, *shape: int, mean: float = 0.0) -> None:
        """Makes a tensor that may be float32 if the call has a 16-bit dtype."""
        narrow = self.dtype in ("bfloat16", "float16")
        dtype = "float32" if narrow and self.d.flag(40) else self.dtype
        self.make(name, *shape, dtype=dtype, scale=0.5, mean=mean)

    def lengths(self, T: int, B: int) -> None:
        numbers = tuple(self.d.integer(0, T) for _ in range(B))
        layout = draw_layout(self.d, (B,), repeat=False)
        dtype = self.d.choice(("int32", "int64"))
        self.tensors["lengths"] = Values((B,), dtype, numbers=numbers, layout=layout)


def count_of_states(call: Call) -> int:
    """Returns the number of initial states: layers times directions."""
    if call.entry_point == "module":
        return call.options["num_layers"] * (1 + call.options["bidirectional"])
    return len(call.options["reverse"]) if call.entry_point == "layer" else 1


def with_specials(d: Draws, call: Call) -> Call:
    """Returns the call, sometimes with poison in the padding."""
    if "lengths" in call.tensors and d.flag(30):
        return dataclasses.replace(call, poison=d.choice((NAN, INF)))
    return call


class Steps:
    """The steps of one direction: the rows of each step, and their positions."""

    def __init__(self, call: Call, T: int, B: int, tensors: Tensors, reverse: bool) -> None:
        lengths = tensors["lengths"].tolist() if "lengths" in tensors else [T] * B
        self.reverse = reverse
        self.lengths = torch.tensor(lengths, dtype=torch.int64)
        self.count = max(lengths, default=0)

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Returns the rows that have the step, and the position of each in its sequence."""
        rows = (self.lengths > step).nonzero()[:, 0]
        position = self.lengths[rows] - 1 - step if self.reverse else torch.full_like(rows, step)
        return rows, position


def product(x: Tensor, weight: Tensor, r: Rounding) -> Tensor:
    """Returns x weightᵀ of each replica; both factors and the result have their own errors."""
    return r(torch.einsum("rbi,roi->rbo", r(x), r(weight)))


def poison(call: Call, tensors: Tensors, value: float) -> None:
    """Overwrites the padding of the input."""
    x = tensors["input"]
    if call.tensors["input"].layout.repeated:
        return
    if x.dim() == 2:
        x = x[:, None]
    elif call.options.get("batch_first"):
        x = x.transpose(0, 1)
    for b, length in enumerate(tensors["lengths"].tolist()):
        x[length:, b] = value


def first(call: Call, tensors: Tensors, states: tuple[str, ...]) -> Any:
    """Returns row 0 of a batch by itself, and where its results are in the batch's results."""
    x = tensors["input"]
    if call.entry_point in ("cell", "module") or x.dim() != 3:
        return None
    one = slice(0, 1)
    rows = one if call.options.get("batch_first") else (slice(None), one)
    if x[rows].numel() == x.numel():
        return None
    given: dict[str, Any] = dict(tensors, input=x[rows])
    places: dict[str, Any] = {"output": rows, "grad_input": rows}
    along = (slice(None), one) if call.entry_point == "layer" else one
    for name in states:
        places |= {f"{name}_n": along}
        if f"{name}0" in tensors:
            given[f"{name}0"] = tensors[f"{name}0"][along]
            places[f"grad_{name}0"] = along
    if "lengths" in tensors:
        given["lengths"] = tensors["lengths"][one]
    return given, places


def gathered(ys: list[tuple[Tensor, Tensor, Tensor]], like: Tensor, T: int) -> Tensor:
    """Puts the (rows, positions, outputs) of all steps into (1 + replicas, T, B, R) of zeros."""
    output = like.new_zeros(len(like), T, like.shape[1], like.shape[2])
    for rows, position, y in ys:
        output = output.index_put((torch.arange(len(like))[:, None], position, rows), y)
    return output


Arguments = tuple[str, dict[str, Any]]
Given = Mapping[str, Any]
