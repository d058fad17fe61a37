"""Fused masked attention, dropout + residual + LayerNorm and LSTM cells for PyTorch."""

from __future__ import annotations

from trifuse._version import __version__
from trifuse.backends import backend
from trifuse.explain import explain
from trifuse.ops._checks import ArgumentError
from trifuse.ops.attention import scaled_dot_product_attention, varlen_attention

__all__ = [
    "ArgumentError",
    "__version__",
    "backend",
    "explain",
    "scaled_dot_product_attention",
    "varlen_attention",
]
