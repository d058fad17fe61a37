"""transformers' ``Conv1D`` on trifuse's product.

It is the linear layer of GPT-2 and related models, with a weight stored as (in_features,
out_features). The product packs the weight from that layout, or multiplies few rows by it directly.
No transposed copy is made.
"""

from __future__ import annotations

from torch import Tensor
from transformers import pytorch_utils

from trifuse.nn.linear import FROZEN, Frozen, OnProduct, project
from trifuse.nn.quantization import Unquantizable


class Conv1D(OnProduct, pytorch_utils.Conv1D):
    """transformers' ``Conv1D`` on trifuse's product where that is faster (CPU only).

    The parameters and their names are transformers' own.
    """

    qconfig = Unquantizable(pytorch_utils.Conv1D)
    transposed = True

    def forward(self, x: Tensor) -> Tensor:
        """x W + b, from (..., in_features) to (..., out_features)."""
        return project(self, "weight", x, self._product_weight(), self.bias)


class FrozenConv1D(Frozen, Conv1D):
    """A :class:`Conv1D` whose weight is kept only in its packed form."""


FROZEN[Conv1D] = FrozenConv1D
