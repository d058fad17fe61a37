"""Modules with ``torch.nn``'s names, arguments and state_dict keys, on trifuse's operators."""

from __future__ import annotations

from trifuse.nn.attention import MultiheadAttention, SoftmaxAttention
from trifuse.nn.bert import (
    BertEmbeddings,
    BertEncoder,
    BertIntermediate,
    BertLayer,
    BertModel,
    BertSelfOutput,
)
from trifuse.nn.dropout import Dropout
from trifuse.nn.dropout_add_layer_norm import DropoutAddLayerNorm, LayerNorm
from trifuse.nn.elmo import CharacterEncoder, Highway, ProjectedLSTM
from trifuse.nn.gru import GRU, GRUCell
from trifuse.nn.linear import FrozenLinear, Linear
from trifuse.nn.lstm import LSTM, LSTMCell
from trifuse.nn.rnn import RNN, RNNCell
from trifuse.nn.transformer import (
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)
from trifuse.nn.transformer_models import (
    AddNorm,
    Products,
    UnpaddedLanguageModel,
    UnpaddedTransformer,
)

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "AddNorm",
    "BertEmbeddings",
    "BertEncoder",
    "BertIntermediate",
    "BertLayer",
    "BertModel",
    "BertSelfOutput",
    "CharacterEncoder",
    "Dropout",
    "DropoutAddLayerNorm",
    "FrozenLinear",
    "GRUCell",
    "Highway",
    "LSTMCell",
    "LayerNorm",
    "Linear",
    "MultiheadAttention",
    "Products",
    "ProjectedLSTM",
    "RNNCell",
    "SoftmaxAttention",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "UnpaddedLanguageModel",
    "UnpaddedTransformer",
]
