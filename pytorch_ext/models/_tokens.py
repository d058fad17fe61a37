"""Batches of tokens: checks of their shapes and masks, and operations on their rows.

B is the batch, L its length, and D the features of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor


def check_tokens(name: str, tokens: Tensor) -> None:
    """Raise a ValueError unless tokens have two dimensions, rows and positions."""
    if tokens.dim() != 2:
        raise ValueError(f"{name}: expected (batch, length); got {tuple(tokens.shape)}")


def check_pair(source: Tensor, target: Tensor) -> None:
    """Raise a ValueError unless source and target are (B, S) and (B, T)."""
    check_tokens("source", source)
    check_tokens("target", target)
    rows, others = source.shape[0], target.shape[0]
    if rows != others:
        raise ValueError(f"target: expected {rows} rows, as source; got {others}")


def check_mask(name: str, mask: Tensor | None, tokens: Tensor) -> None:
    """Raise a ValueError if a mask is given that isn't boolean or hasn't its tokens' shape."""
    if mask is not None and (mask.dtype != torch.bool or mask.shape != tokens.shape):
        raise ValueError(
            f"{name}: expected torch.bool of shape {tuple(tokens.shape)}, as its tokens; "
            f"got {mask.dtype} of shape {tuple(mask.shape)}"
        )


def check_prompt(prompt: Tensor) -> None:
    """Raise a ValueError unless a prompt is (B, L) with L at least 1."""
    if prompt.dim() != 2 or prompt.shape[1] == 0:
        raise ValueError(f"prompt: expected (B, L) with L at least 1; got {tuple(prompt.shape)}")


def real_lengths(name: str, mask: Tensor, tokens: Tensor) -> Tensor:
    """The number of real tokens in each row, (B,).

    Raises:
        ValueError: the mask isn't boolean or hasn't its tokens' shape; a row has no real token, or
            one after padding. While compiling, the mask cannot be read, so the rows are not
            checked.
    """
    check_mask(name, mask, tokens)
    lengths = mask.sum(1)
    if torch.compiler.is_compiling():
        return lengths
    for wanted, wrong in (
        ("at least one real token in each row", lengths == 0),
        (
            "each row's real tokens before its padding",
            mask[:, 1:].logical_and(~mask[:, :-1]).any(1),
        ),
    ):
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise ValueError(f"{name}: expected {wanted}; not so in row {row}")
    return lengths


def at_last_token(features: Tensor, lengths: Tensor) -> Tensor:
    """The features (B, D) of the last real token of each row of (B, L, D)."""
    return features[torch.arange(len(features), device=features.device), lengths - 1]


def class_indices(targets: Tensor) -> Tensor:
    """Integers as int64, the only ones that ``F.cross_entropy`` takes; floats as they are.

    In uint8 its ``ignore_index``, −100, would wrap around to a class.
    """
    return targets if targets.is_floating_point() else targets.long()


def repeated_rows(rows: int, wanted: int, device: torch.device) -> Tensor:
    """The indices (wanted,) that repeat each of ``rows`` rows equally often.

    Raises:
        ValueError: ``wanted`` is not a multiple of ``rows``.
    """
    if rows == 0 or wanted % rows:
        raise ValueError(f"tokens: expected {rows} rows or a multiple; got {wanted}")
    return torch.arange(rows, device=device).repeat_interleave(wanted // rows)
