"""Tensors as plain data: values, special values, and memory layouts."""

from __future__ import annotations

import dataclasses
import math
import mmap
import re

import torch
from torch import Tensor

from .draws import Draws

NAN, INF = math.nan, math.inf


@dataclasses.dataclass(frozen=True)
class Layout:
    """A memory layout. Gaps between elements hold NaN, or 127 in integers, or True in booleans."""

    order: tuple[int, ...] | None = None  # dimensions, the outermost first
    gaps: tuple[int, ...] | None = None  # n per dimension: every n-th element is the tensor's
    offset: int = 0
    repeated: tuple[int, ...] = ()  # dimensions of stride 0, which repeat the first entry
    far: int | None = None  # a dimension whose last entry is 2³¹ elements from the first

    def of(self, values: Tensor) -> Tensor:
        if self == Layout():
            return values.contiguous()
        sizes, strides = list(values.shape), [0] * values.dim()
        for dim in self.repeated:
            values = values.narrow(dim, 0, min(1, sizes[dim]))
        elements = 1
        for dim in reversed(self.order or range(values.dim())):
            if dim == self.far:
                continue
            gap = self.gaps[dim] if self.gaps else 1
            strides[dim] = 0 if dim in self.repeated else elements * gap
            elements *= max(1, values.shape[dim]) * (1 if dim in self.repeated else gap)
        between = (
            True if values.dtype == torch.bool else 127 if not values.is_floating_point() else NAN
        )
        if self.far is None:
            memory = torch.full((self.offset + elements,), between, dtype=values.dtype)
        else:
            steps = sizes[self.far] - 1
            # A multiple of 16, as other strides may be too, beside the least possible one.
            strides[self.far] = (2**31 // steps + elements) // 16 * 16 + 16
            memory = _untouched(self.offset + steps * strides[self.far] + elements, values.dtype)
            near = (sizes[self.far], self.offset + elements)
            memory.as_strided(near, (strides[self.far], 1)).fill_(between)
        memory.as_strided(values.shape, strides, self.offset).copy_(values)
        return memory.as_strided(sizes, strides, self.offset)


def _untouched(count: int, dtype: torch.dtype) -> Tensor:
    """Returns memory of which only those pages exist that are written to."""
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named from Python 3.13 on
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize, flags=flags), dtype=dtype)


@dataclasses.dataclass(frozen=True)
class Values:
    """The values of a tensor: normal numbers from a seed, or ``numbers``."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    seed: int = 0
    scale: float = 1.0
    mean: float = 0.0
    numbers: tuple[int, ...] | None = None
    left_out: float = 0.0  # share of a mask that is False, or -inf
    planted: tuple[tuple[int, float], ...] = ()  # (index in the flattened tensor, value)
    layout: Layout = Layout()

    def plain(self) -> Tensor:
        """Returns the values in a contiguous tensor."""
        dtype = getattr(torch, self.dtype)
        if self.numbers is not None:
            return torch.tensor(self.numbers, dtype=dtype).view(self.shape)
        _generator.manual_seed(self.seed)
        if dtype == torch.bool:
            return torch.rand(self.shape, generator=_generator) >= self.left_out
        x = torch.randn(self.shape, generator=_generator, dtype=torch.float64)
        if self.scale != 1 or self.mean != 0:
            x = x.mul_(self.scale).add_(self.mean)
        x = x.to(dtype)
        if self.left_out:
            x[torch.rand(self.shape, generator=_generator) < self.left_out] = -INF
        for place, value in self.planted:
            x.view(-1)[place] = value
        return x

    def build(self) -> Tensor:
        return self.layout.of(self.plain())

    def __repr__(self) -> str:
        return short_repr(self)


_generator = torch.Generator()


def short_repr(record: object) -> str:
    """Returns a dataclass's repr without fields at their defaults; the first is positional."""
    parts = []
    for i, field in enumerate(dataclasses.fields(record)):  # type: ignore[arg-type]
        value = getattr(record, field.name)
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if default is dataclasses.MISSING or value != default:
            # Names an Enum's member, so that the text is valid Python.
            text = re.sub(r"<(\w+\.\w+): [^>]*>", r"\1", repr(value))
            parts.append(text if i == 0 else f"{field.name}={text}")
    return f"{type(record).__name__}({', '.join(parts)})"


Layout.__repr__ = short_repr  # type: ignore[assignment,method-assign]


def draw_layout(d: Draws, shape: tuple[int, ...], repeat: bool = True) -> Layout:
    """Draws a layout. At least half of them are contiguous."""
    if not d.flag(50) or not shape:
        return Layout()
    order = gaps = None
    if len(shape) > 1 and d.flag(50):
        rest = list(range(len(shape)))
        order = tuple(rest.pop(d.integer(0, len(rest) - 1)) for _ in shape)
    if d.flag(40):
        gaps = tuple(d.choice((1, 1, 2, 3)) for _ in shape)
    repeated: tuple[int, ...] = ()
    if repeat and d.flag(20):
        repeated = tuple(dim for dim in range(len(shape)) if d.flag(50))
    offset, far = d.integer(0, 3), None
    apart = [dim for dim, n in enumerate(shape) if n > 1 and dim not in repeated]
    if apart and 0 not in shape and d.flag(4):
        far = d.choice(apart)
    return Layout(order, gaps, offset, repeated, far)


def code(name: str, x: Tensor) -> str:
    """Returns Python code that makes the same tensor in the same layout."""
    numbers = x.detach().flatten().tolist() if x.is_contiguous() else None
    dtype = f"dtype={x.dtype}"
    if numbers is not None:
        return f"{name} = torch.tensor({numbers}, {dtype}).view({tuple(x.shape)})"
    extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    extent = 0 if x.numel() == 0 else extent + x.storage_offset()
    memory = x.detach().as_strided((extent,), (1,), 0).tolist()
    place = f"{tuple(x.shape)}, {x.stride()}, {x.storage_offset()}"
    return f"{name} = torch.tensor({memory}, {dtype}).as_strided({place})"
