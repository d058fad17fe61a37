"""``torch.nn.Dropout`` with trifuse's generator."""

from __future__ import annotations

from torch import Tensor, nn

from trifuse.ops import _draws
from trifuse.ops.dropout import dropout


class Dropout(nn.Dropout):
    """``torch.nn.Dropout``. On a CPU it draws random numbers with vector instructions on all cores.

    The constructor is torch's own. On other devices, with ``inplace`` and at p = 1, it is torch's
    dropout.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Drops elements while training; see :func:`trifuse.ops.dropout.dropout`."""
        return super().forward(input) if self.inplace else drop(input, self.p, self.training)


DROPOUTS = (nn.Dropout, Dropout)  # the classes that drop elements and do nothing else


def drop(input: Tensor, p: float, training: bool, batch_dim: int | None = None) -> Tensor:
    """Drops with trifuse's generator on a CPU if p < 1, and otherwise with torch's.

    Under ``trifuse.distributed.part_of_batch`` it is trifuse's on any device.
    """
    ours = input.device.type == "cpu" or _draws.active()
    if ours and input.is_floating_point() and p < 1:
        return dropout(input, p, training, batch_dim=batch_dim)
    return nn.functional.dropout(input, p, training)
