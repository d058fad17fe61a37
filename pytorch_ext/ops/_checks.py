"""The argument checks that operators make before a kernel runs."""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGER = (torch.int32, torch.int64)
MAX_DISTANCE = 1 << 60  # in tokens


class ArgumentError(ValueError, RuntimeError):
    """An invalid argument. The message names it, what was expected and what was passed.

    It is a ``ValueError`` and also a ``RuntimeError``, which torch raises for the same mistakes, so
    code written for torch's own function keeps working.
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


def floating(argument: str, value: Tensor) -> None:
    if value.dtype not in FLOATING:
        expected = "float32, bfloat16, float16 or float64"
        raise TypeError(f"{argument}: expected {expected}; got {value.dtype}")


def same_device(argument: str, value: Tensor, name: str, other: Tensor) -> None:
    if value.device != other.device:
        raise fail(argument, f"a tensor on {other.device}, as {name}", value.device)


def number(argument: str, value: Any) -> float:
    """Returns a Python number as a float.

    Refuses a tensor, which would lose its gradient, and a bool, which is a misplaced flag.
    """
    real = isinstance(value, (int, float, torch.SymInt, torch.SymFloat, numbers.Real))
    if not real or isinstance(value, bool):
        raise TypeError(f"{argument}: expected a number; got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise fail(argument, "a number that a float can hold", f"{type(value).__name__}") from None


def whole_number(value: Any) -> int | None:
    """Returns an int ≥ 0, at most ``MAX_DISTANCE``, or None if the value isn't an int ≥ 0.

    ``MAX_DISTANCE`` exceeds the distance between any two tokens, and leaves room for kernels to add
    positions to it in 64 bits.
    """
    value = _as_integer(value)
    if value is not None and torch.compiler.is_compiling():
        # The number may be one that a tensor holds, known when the graph runs.
        from torch.fx.experimental.symbolic_shapes import guard_or_false

        if guard_or_false(value < 0):
            return None
        torch._check(value >= 0)
        return MAX_DISTANCE if guard_or_false(value > MAX_DISTANCE) else value
    return None if value is None or value < 0 else min(value, MAX_DISTANCE)


def offset(argument: str, value: Any) -> int:
    """Returns an int, at most 2 · ``MAX_DISTANCE`` from 0.

    Beyond that, any bound below ``MAX_DISTANCE`` around the offset position is far from all tokens.
    """
    checked = _as_integer(value)
    if checked is None:
        raise TypeError(f"{argument}: expected an int or a Tensor; got {type(value).__name__}")
    return max(-2 * MAX_DISTANCE, min(checked, 2 * MAX_DISTANCE))


def within_distance(value: int) -> int:
    """Returns the nearest number that is at most ``MAX_DISTANCE`` from 0."""
    return max(-MAX_DISTANCE, min(value, MAX_DISTANCE))


def _as_integer(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt, numbers.Integral)):
        return None
    return value if isinstance(value, torch.SymInt) else int(value)  # type: ignore[return-value]


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


def matching(argument: str, value: Any, name: str, like: Tensor) -> Tensor:
    """Checks for a tensor on ``like``'s device, in its dtype or, if that has 16 bits, float32."""
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
    """Checks for a 1-D integer tensor on ``like``'s device; ``shape`` appears in messages."""
    value = tensor(argument, value)
    if value.dtype not in INTEGER:
        raise TypeError(f"{argument}: expected int32 or int64; got {value.dtype}")
    if value.dim() != 1 or (count is not None and value.shape[0] != count):
        raise fail(argument, f"shape {shape}", tuple(value.shape))
    same_device(argument, value, name, like)
    return value
