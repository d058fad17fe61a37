"""Fused masked attention, dropout + residual + LayerNorm, LSTM, GRU and RNN for PyTorch."""

from __future__ import annotations

from trifuse import _dynamo, _transformers, nn
from trifuse._version import __version__
from trifuse.attention_mode import attention
from trifuse.backends import backend
from trifuse.explain import explain
from trifuse.fuse import FuseReport, fuse
from trifuse.ops._checks import ArgumentError
from trifuse.ops._op import decompositions
from trifuse.ops.attention import scaled_dot_product_attention, varlen_attention
from trifuse.ops.dropout_add_layer_norm import dropout_add_layer_norm
from trifuse.ops.gru import gru, gru_cell
from trifuse.ops.lstm import lstm, lstm_cell
from trifuse.ops.rnn import rnn, rnn_cell

__all__ = [
    "ArgumentError",
    "FuseReport",
    "__version__",
    "attention",
    "backend",
    "decompositions",
    "dropout_add_layer_norm",
    "explain",
    "fuse",
    "gru",
    "gru_cell",
    "lstm",
    "lstm_cell",
    "nn",
    "rnn",
    "rnn_cell",
    "scaled_dot_product_attention",
    "varlen_attention",
]

_dynamo.register_when_imported()
_transformers.register_when_imported()
