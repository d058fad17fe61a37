"""``torch.nn.Dropout`` with trifuse's generator."""

from __future__ import annotations

from torch import Tensor, nn

from trifuse.ops.dropout import dropout


class Dropout(nn.Dropout):
    """``torch.nn.Dropout`` that, on a CPU, draws random numbers with vectors and on every core.

    The constructor is torch's own. On other devices, with ``inplace`` and at p = 1, it is torch's
    dropout.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Drops elements while training; see :func:`trifuse.ops.dropout.dropout`."""
        return super().forward(input) if self.inplace else drop(input, self.p, self.training)


def drop(input: Tensor, p: float, training: bool) -> Tensor:
    """Drops with trifuse's generator on a CPU if p < 1, and otherwise with torch's."""
    if input.device.type == "cpu" and input.is_floating_point() and p < 1:
        return dropout(input, p, training)
    return nn.functional.dropout(input, p, training)
