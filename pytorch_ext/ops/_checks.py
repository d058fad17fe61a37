"""What every operator asks of its arguments before a kernel runs."""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGER = (torch.int32, torch.int64)
FARTHEST = 1 << 60  # in tokens


class ArgumentError(ValueError, RuntimeError):
    """An argument that can't be served: the message names it, what was expected and what came.

    It is a ``ValueError``, and a ``RuntimeError`` too because that is what torch raises for the
    same mistake, so code written around torch's own function keeps working.
    """


def fail(argument: str, expected: str, got: object) -> ArgumentError:
    return ArgumentError(f"{argument}: expected {expected}; got {got}")


def tensor(argument: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{argument}: expected a Tensor; got {type(value).__name__}")
    if value.is_nested:
        raise fail(argument, "a dense tensor (use varlen_attention for packed ones)", "nested")
    if value.layout != torch.strided:
        raise fail(argument, "a dense tensor", value.layout)
    return value


def same_device(argument: str, value: Tensor, name: str, other: Tensor) -> None:
    if value.device != other.device:
        raise fail(argument, f"a tensor on {other.device}, as {name}", value.device)


def number(argument: str, value: Any) -> float:
    """A Python number. A tensor is refused: turned into one it would lose its gradient.

    So is a bool, which is a number to Python: it is a flag that has come to the wrong place.
    """
    real = isinstance(value, (int, float, torch.SymInt, torch.SymFloat, numbers.Real))
    if not real or isinstance(value, bool):
        raise TypeError(f"{argument}: expected a number; got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise fail(argument, "a number that a float can hold", f"{type(value).__name__}") from None


def whole_number(value: Any) -> int | None:
    """A Python number that is an int ≥ 0, or None where it isn't one.

    Beyond ``FARTHEST``, farther than any two tokens lie apart, it is that: ops take numbers of 64
    bits, and kernels add positions to them.
    """
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt, numbers.Integral)):
        return None
    if not isinstance(value, torch.SymInt):
        value = int(value)
    return min(value, FARTHEST) if value >= 0 else None


def flag(argument: str, value: Any) -> bool:
    if isinstance(value, (bool, torch.SymBool)):
        return value  # type: ignore[return-value]
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise TypeError(f"{argument}: expected True or False; got {type(value).__name__}")


def probability(argument: str, value: Any, *, below_one: bool = False) -> float:
    value = number(argument, value)
    if not 0.0 <= value <= 1.0 or (below_one and value == 1.0):
        raise fail(argument, f"a probability in [0, 1{')' if below_one else ']'}", value)
    return value


def epsilon(value: Any) -> float:
    value = number("eps", value)
    if not value >= 0:
        raise fail("eps", "a number ≥ 0", value)
    return value


def beside(argument: str, value: Any, name: str, like: Tensor) -> Tensor:
    """A tensor on the device and in the dtype of ``like``, or beside 16 bits in float32."""
    value = tensor(argument, value)
    if value.dtype != like.dtype and not (
        value.dtype == torch.float32 and like.dtype.itemsize == 2
    ):
        expected = f"{like.dtype}, as {name}"
        expected += ", or torch.float32" if like.dtype.itemsize == 2 else ""
        raise TypeError(f"{argument}: expected {expected}; got {value.dtype}")
    same_device(argument, value, name, like)
    return value


def integers(
    argument: str, value: Any, shape: str, count: int | None, like: Tensor, name: str = "query"
) -> Tensor:
    """A 1-D tensor of integers beside ``like``; ``shape`` says what its length means."""
    value = tensor(argument, value)
    if value.dtype not in INTEGER:
        raise TypeError(f"{argument}: expected int32 or int64; got {value.dtype}")
    if value.dim() != 1 or (count is not None and value.shape[0] != count):
        raise fail(argument, f"shape {shape}", tuple(value.shape))
    same_device(argument, value, name, like)
    return value
