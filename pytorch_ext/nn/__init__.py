"""Modules with ``torch.nn``'s names, arguments and state_dict keys, on trifuse's operators."""

from __future__ import annotations

from trifuse.nn.attention import MultiheadAttention, SoftmaxAttention
from trifuse.nn.bert import BertEncoder
from trifuse.nn.transformer import TransformerEncoder, TransformerEncoderLayer

__all__ = [
    "BertEncoder",
    "MultiheadAttention",
    "SoftmaxAttention",
    "TransformerEncoder",
    "TransformerEncoderLayer",
]
