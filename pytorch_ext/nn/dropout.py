"""``torch.nn.Dropout`` by trifuse's generator."""

from __future__ import annotations

from torch import Tensor, nn

from trifuse.ops.dropout import dropout


class Dropout(nn.Dropout):
    """``torch.nn.Dropout`` that, on a CPU, draws its random numbers in vectors and on every core.

    The constructor is torch's own. On other devices, where ``inplace`` is set, and where everything
    is dropped, it is torch's dropout.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Drop elements while training; see :func:`trifuse.ops.dropout.dropout`."""
        return super().forward(input) if self.inplace else drop(input, self.p, self.training)


def drop(input: Tensor, p: float, training: bool) -> Tensor:
    """By trifuse's generator where that serves: on a CPU, and for less than everything."""
    if input.device.type == "cpu" and input.is_floating_point() and p < 1:
        return dropout(input, p, training)
    return nn.functional.dropout(input, p, training)
