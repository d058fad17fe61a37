"""A computation with scratch memory, for a process that imports nothing else from the tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def prepare(mebibytes: int) -> Callable[[], Sequence[Tensor]]:
    """Returns a computation with ``mebibytes`` of scratch and a result of 32 MiB."""

    def compute() -> Sequence[Tensor]:
        scratch = torch.ones(mebibytes << 18)
        result = torch.ones(32 << 18)
        del scratch
        return (result,)

    return compute
