"""``torch.nn``'s Transformer encoder without its inference fast path, which would bypass trifuse.

torch's ``TransformerEncoder`` and ``TransformerEncoderLayer`` turn boolean masks into floats and,
in evaluation, hand their parameters to one native kernel (through a NestedTensor where there is
padding). The classes here call their modules and keep masks boolean, in training and evaluation
alike, and leave padding out by :mod:`trifuse.nn.packing`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trifuse.nn import attention, packing
from trifuse.nn.attention import MultiheadAttention
from trifuse.nn.packing import PackedSequences


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
        src_key_padding_mask: Tensor | PackedSequences | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Attend and feed forward; as ``torch.nn.TransformerEncoderLayer.forward``.

        Args:
            src: (L, B, d_model), or (B, L, d_model) with ``batch_first``, or (L, d_model).
            src_mask: as ``attn_mask`` of :meth:`MultiheadAttention.forward`.
            src_key_padding_mask: as ``key_padding_mask`` there.
            is_causal: as there.
        """
        masks: tuple[Any, ...] = (src_mask, src_key_padding_mask, is_causal)
        if self.norm_first:
            src = src + self._sa_block(self.norm1(src), *masks)
            return src + self._ff_block(self.norm2(src))
        src = self.norm1(src + self._sa_block(src, *masks))
        return self.norm2(src + self._ff_block(src))


class TransformerEncoder(nn.TransformerEncoder):
    """``torch.nn.TransformerEncoder`` that computes on real tokens only.

    Where ``src_key_padding_mask`` is boolean and ``mask`` None or causal, the layers see the real
    tokens of the batch packed into one row, and give 0 at the padded positions (before ``norm``),
    as torch's fast path does; in other cases the padded positions hold what the layers make of
    them. Whether ``mask`` is causal is detected as in torch where ``is_causal`` is None, which
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
        packed = None
        if src_key_padding_mask is not None and (mask is None or is_causal):
            packed = self._pack(src, src_key_padding_mask)
        if packed is None:
            for layer in self.layers:
                src = layer(
                    src,
                    src_mask=mask,
                    is_causal=is_causal,
                    src_key_padding_mask=src_key_padding_mask,
                )
        else:
            batch_first = self.layers[0].self_attn.batch_first
            padded = src if batch_first else src.transpose(0, 1)
            tokens = packing.gather(padded, packed)
            for layer in self.layers:
                tokens = layer(tokens, is_causal=is_causal, src_key_padding_mask=packed)
            src = packing.scatter(tokens, packed, padded.shape)
            src = src if batch_first else src.transpose(0, 1)
        return src if self.norm is None else self.norm(src)

    def _pack(self, src: Tensor, src_key_padding_mask: Tensor) -> PackedSequences | None:
        if src.dim() != 3 or src_key_padding_mask.dtype != torch.bool:
            return None
        for layer in self.layers:
            if layer.self_attn.bias_k is not None or layer.self_attn.add_zero_attn:
                return None  # keys appended to every sequence
        return packing.pack(self, ~src_key_padding_mask, attention.__name__, __name__)


def _is_causal_mask(mask: Tensor) -> bool:
    """Whether an (L, L) mask, in torch.nn's convention, leaves out just the keys that follow."""
    if mask.dim() != 2 or mask.shape[0] != mask.shape[1] or torch.compiler.is_compiling():
        return False
    future = torch.ones_like(mask, dtype=torch.bool).triu(1)
    if mask.dtype == torch.bool:
        return torch.equal(mask, future)
    return torch.equal(mask, torch.zeros_like(mask).masked_fill_(future, float("-inf")))
