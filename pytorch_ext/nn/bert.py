"""Fused counterparts of :mod:`trifuse.models.bert`."""

from __future__ import annotations

import torch
from torch import Tensor

from trifuse.models import bert
from trifuse.nn import packing
from trifuse.nn.attention import SoftmaxAttention


class BertEncoder(bert.BertEncoder):
    """The stack of layers, which computes on real tokens only once its attention is fused.

    Where the mask is boolean (B, L), the layers see the real tokens of the batch packed into one
    row, and the padding comes back as 0.
    """

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> Tensor:
        """As :meth:`trifuse.models.bert.BertEncoder.forward`."""
        packed = None
        if (
            mask is not None
            and mask.dim() == 2
            and mask.dtype == torch.bool
            and not any(isinstance(module, bert.SoftmaxAttention) for module in self.modules())
        ):
            packed = packing.pack(self, mask, bert.__name__, __name__, SoftmaxAttention.__module__)
        if packed is None:
            return super().forward(hidden_states, mask)
        tokens = packing.gather(hidden_states, packed)
        for layer in self.layer:
            tokens = layer(tokens, packed)
        return packing.scatter(tokens, packed, hidden_states.shape)
