"""``torch.nn``'s Transformer encoder without its inference fast path, which would bypass trifuse.

torch's ``TransformerEncoder`` and ``TransformerEncoderLayer`` turn boolean masks into floats and,
in evaluation, hand their parameters to one native kernel (through a NestedTensor where there is
padding). The classes here do what those of torch do in training, always.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trifuse.nn.attention import MultiheadAttention


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """``torch.nn.TransformerEncoderLayer`` on :class:`trifuse.nn.MultiheadAttention`.

    The constructor, the parameters and their initialisation are torch's own.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        MultiheadAttention.adopt(self.self_attn)

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Attend and feed forward; as ``torch.nn.TransformerEncoderLayer.forward``."""
        masks = (src_mask, src_key_padding_mask, is_causal)
        if self.norm_first:
            src = src + self._sa_block(self.norm1(src), *masks)
            return src + self._ff_block(self.norm2(src))
        src = self.norm1(src + self._sa_block(src, *masks))
        return self.norm2(src + self._ff_block(src))


class TransformerEncoder(nn.TransformerEncoder):
    """``torch.nn.TransformerEncoder`` that leaves masks and padded tensors as they are.

    Outputs at padded positions are therefore what the layers make of them; torch's fast path gives
    0 there. Whether ``mask`` is causal is detected as in torch where ``is_causal`` is None, which
    reads it; while compiling it is not read and taken as it is.
    """

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """Pass ``src`` through the layers; as ``torch.nn.TransformerEncoder.forward``."""
        if is_causal is None:
            is_causal = mask is not None and _is_causal_mask(mask)
        for layer in self.layers:
            src = layer(
                src,
                src_mask=mask,
                is_causal=is_causal,
                src_key_padding_mask=src_key_padding_mask,
            )
        return src if self.norm is None else self.norm(src)


def _is_causal_mask(mask: Tensor) -> bool:
    """Whether an (L, L) mask, in torch.nn's convention, leaves out just the keys that follow."""
    if mask.dim() != 2 or mask.shape[0] != mask.shape[1] or torch.compiler.is_compiling():
        return False
    future = torch.ones_like(mask, dtype=torch.bool).triu(1)
    if mask.dtype == torch.bool:
        return torch.equal(mask, future)
    return torch.equal(mask, torch.zeros_like(mask).masked_fill_(future, float("-inf")))
