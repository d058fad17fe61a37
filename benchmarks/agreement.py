"""Checks that a timed call computes the same as its peers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def check_agreement(peer: str, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Check that both computed the same thing. Precision is left to the tests.

    Raises:
        AssertionError: a result differs by more than rounding explains.
    """
    for a, b in zip(ours, theirs, strict=True):
        bound = {torch.float64: 1e-12, torch.float32: 1e-4}.get(a.dtype, 3e-2)
        difference, norm = (a.double() - b.double()).norm(), b.double().norm()
        if not difference <= bound * norm:
            raise AssertionError(f"we differ from {peer} by {difference:.2g}; it has {norm:.2g}")


def check_accuracy(
    peer: str, ours: Sequence[Tensor], theirs: Sequence[Tensor], exact: Sequence[Tensor]
) -> None:
    """Check that our error is at most twice the peer's, or at most two machine epsilons.

    For 16-bit computations so deep that rounding takes both results far from the exact ones.

    Raises:
        AssertionError: our error is larger.
    """
    for a, b, expected in zip(ours, theirs, exact, strict=True):
        off, theirs_off = (
            (x.double() - expected.double()).norm() / expected.double().norm() for x in (a, b)
        )
        if not off <= 2 * max(theirs_off, torch.finfo(a.dtype).eps):
            raise AssertionError(
                f"we are off by {off:.2g} of an exact result, {peer} by {theirs_off:.2g}"
            )
