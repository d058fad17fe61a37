"""Inputs for tests of bfloat16 products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def numbers(*shape: int) -> Tensor:
    """Returns numbers of many magnitudes, some of them subnormal."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-20, 20, shape).float())
    return torch.where(torch.rand(shape) < 0.02, 1e-39 * x, x).bfloat16()


MASKINGS = ("none", "lengths", "boolean mask", "dropout")


def masked(masking: str, value: Tensor) -> dict[str, Any]:
    """Returns attention's options for a masking of MASKINGS, for 2 sequences of values.

    A boolean mask comes with a NaN, which is written to the last sequence's first value. One of two
    tiles may then need the products of many queries.
    """
    Lk = value.size(2)
    if masking == "lengths":
        return {"key_lengths": torch.randint(Lk + 1, (2,))}
    if masking == "dropout":
        return {"dropout_p": 0.5}
    if masking == "boolean mask":
        value[-1, 0, 0, 0] = torch.nan
        return {"attn_mask": torch.rand(2, 1, 1, Lk) < 0.7}
    return {}
