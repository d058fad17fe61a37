"""Microbenchmarks of models for pytest-benchmark, eager and fused: ``make bench``.

A training step (forward and backward) and inference of each model at a middling size, on batches
with padding. For ratios use the models' own commands, which time both in turns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trifuse
from trifuse.models.bert import BertConfig, BertForPreTraining
from trifuse.models.convolutional import (
    ConvolutionalLanguageModel,
    ConvolutionalLanguageModelConfig,
)
from trifuse.models.elmo import BiLM, Elmo, ElmoConfig
from trifuse.models.recurrent import RecurrentLanguageModel, RecurrentLanguageModelConfig
from trifuse.models.seq2seq import Seq2Seq, Seq2SeqConfig
from trifuse.models.transformer import (
    LanguageModel,
    LanguageModelConfig,
    Transformer,
    TransformerConfig,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY = 8000
B, T = 8, 64

Outputs = Callable[[], list[Tensor]]


def _tokens() -> Tensor:
    return torch.randint(3, VOCABULARY, (B, T), device=DEVICE)


def _mask() -> Tensor:
    """Returns which tokens are real: lengths from T / 8 to T."""
    lengths = torch.linspace(T / 8, T, B, device=DEVICE).round()
    return torch.arange(T, device=DEVICE) < lengths[:, None]


def _bert() -> tuple[nn.Module, Outputs]:
    sizes: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = BertForPreTraining(BertConfig(VOCABULARY, intermediate_size=1024, **sizes))
    tokens, mask = _tokens(), _mask()
    return model, lambda: list(model(tokens, attention_mask=mask))


def _transformer() -> tuple[nn.Module, Outputs]:
    model = Transformer(
        TransformerConfig(
            VOCABULARY,
            d_model=256,
            nhead=4,
            num_encoder_layers=3,
            num_decoder_layers=3,
            dim_feedforward=1024,
            max_length=T,
        )
    )
    source, target, mask = _tokens(), _tokens(), _mask()
    return model, lambda: [model(source, target, source_mask=mask)]


def _language_model() -> tuple[nn.Module, Outputs]:
    sizes: dict[str, Any] = {"d_model": 256, "nhead": 4, "num_layers": 4, "max_length": T}
    model = LanguageModel(LanguageModelConfig(VOCABULARY, **sizes))
    tokens = _tokens()
    return model, lambda: [model(tokens)]


def _recurrent(cell: str) -> tuple[nn.Module, Outputs]:
    model = RecurrentLanguageModel(
        RecurrentLanguageModelConfig(VOCABULARY, embedding_dim=256, hidden_size=512, cell=cell)
    )
    tokens = _tokens()
    return model, lambda: [model(tokens)[0]]


def _convolutional() -> tuple[nn.Module, Outputs]:
    model = ConvolutionalLanguageModel(
        ConvolutionalLanguageModelConfig(VOCABULARY, hidden_size=256, num_blocks=4)
    )
    tokens = _tokens()
    return model, lambda: [model(tokens)]


def _seq2seq() -> tuple[nn.Module, Outputs]:
    sizes: dict[str, Any] = {"embedding_dim": 256, "hidden_size": 256, "num_layers": 2}
    model = Seq2Seq(Seq2SeqConfig(VOCABULARY, VOCABULARY, cell="lstm", attention="dot", **sizes))
    source, target, mask = _tokens(), _tokens(), _mask()
    return model, lambda: [model(source, target, mask)]


def _elmo() -> tuple[nn.Module, Outputs]:
    config = ElmoConfig(
        char_embedding_dim=16,
        filters=((1, 32), (2, 32), (3, 64), (4, 128)),
        n_highway=1,
        lstm_dim=1024,
        projection_dim=128,
    )
    model = Elmo(BiLM(config), num_output_representations=1)
    characters = torch.randint(1, 200, (B, T, config.max_characters_per_token), device=DEVICE)
    characters[~_mask()] = 0
    return model, lambda: list(model(characters)[0])


MODELS: dict[str, Callable[[], tuple[nn.Module, Outputs]]] = {
    "BERT": _bert,
    "Transformer": _transformer,
    "language model": _language_model,
    "RNN language model": lambda: _recurrent("rnn"),
    "GRU language model": lambda: _recurrent("gru"),
    "LSTM language model": lambda: _recurrent("lstm"),
    "convolutional language model": _convolutional,
    "Seq2Seq": _seq2seq,
    "ELMo": _elmo,
}


@pytest.mark.parametrize("who", ["fused", "eager"])
@pytest.mark.parametrize("phase", ["training", "inference"])
@pytest.mark.parametrize("name", MODELS)
def test_model(timed: Callable[..., Any], name: str, phase: str, who: str) -> None:
    torch.manual_seed(0)
    model, outputs = MODELS[name]()
    model.to(DEVICE).train(phase == "training")
    if who == "fused":
        trifuse.fuse(model, unpad=True)

    def train() -> None:
        model.zero_grad(set_to_none=True)
        torch.stack([output.float().sum() for output in outputs()]).sum().backward()

    def infer() -> None:
        with torch.inference_mode():
            outputs()

    timed(f"{name}, {phase}", train if phase == "training" else infer)
