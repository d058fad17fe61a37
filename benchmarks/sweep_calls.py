"""The calls of ``benchmarks sweep``: what layers of well-known models pass to each operator.

Sizes are those of the published models. Each row names a model and a layer's sizes, then the
batches that it is run with; ``CALLS`` has every row in every batch, dtype and pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch

Pass = Literal["inference", "training"]
Masking = Literal["none", "key lengths", "causal", "window", "bias"]
Module = Literal["LSTM", "GRU", "RNN"]
DTYPES = (torch.float32, torch.bfloat16)


class Attention(NamedTuple):
    """Masked attention. ``key_lengths``: half of the keys are padding, in the mean of a batch."""

    B: int
    Lq: int
    Lk: int
    H: int
    Hkv: int
    head_dim: int
    masking: Masking
    dropout_p: float  # in training

    @property
    def sizes(self) -> str:
        heads = f"H {self.H}" + (f"/{self.Hkv}" if self.Hkv != self.H else "")
        tokens = f"L {self.Lk}" if self.Lq == self.Lk else f"Lq {self.Lq} Lk {self.Lk}"
        return f"B {self.B} {heads} {tokens} d {self.head_dim}, {self.masking}"


class Norm(NamedTuple):
    """LayerNorm or RMSNorm of the sum of a residual and another tensor, or of one tensor."""

    rows: int
    N: int
    rms_norm: bool
    residual: bool
    dropout_p: float  # in training

    @property
    def sizes(self) -> str:
        kind = "RMSNorm" if self.rms_norm else "LayerNorm"
        added = ", residual" if self.residual else ""
        dropout = f", dropout {self.dropout_p:g}" if self.dropout_p else ""
        return f"{kind} {self.rows} x {self.N}{added}{dropout}"


class Recurrent(NamedTuple):
    """One layer of ``torch.nn``'s class of that name."""

    module: Module
    T: int
    B: int
    input_size: int
    hidden_size: int
    bidirectional: bool
    proj_size: int = 0

    @property
    def sizes(self) -> str:
        projected = f", proj_size {self.proj_size}" if self.proj_size else ""
        both = ", bidirectional" if self.bidirectional else ""
        return (
            f"{self.module} T {self.T} B {self.B} I {self.input_size} H {self.hidden_size}"
            f"{projected}{both}"
        )


class SweptCall(NamedTuple):
    model: str
    call: Attention | Norm | Recurrent
    dtype: torch.dtype
    kind: Pass

    @property
    def name(self) -> str:
        dtype = {torch.float32: "fp32", torch.bfloat16: "bf16"}[self.dtype]
        return f"{self.model}: {self.call.sizes}, {dtype}, {self.kind}"

    @property
    def group(self) -> str:
        """The name of the group of calls that share one mean."""
        if isinstance(self.call, Attention):
            return "attention"
        if isinstance(self.call, Recurrent):
            return "recurrent"
        plain = self.kind == "training" and not self.call.dropout_p
        return "norms, training without dropout" if plain else "norms"


# Attention: model, heads, key heads, head_dim, masking, dropout, then (B, Lq, Lk) in inference and
# in training.
_ENCODER = ((1, 8, 8), (1, 16, 16), (1, 128, 128), (8, 128, 128), (32, 64, 64))
_ENCODER_TRAINING = ((16, 128, 128), (32, 64, 64))
_IMAGES = ((1, 197, 197), (8, 197, 197))
_Tokens = tuple[tuple[int, int, int], ...]
_ATTENTION: tuple[tuple[str, int, int, int, Masking, float, _Tokens, _Tokens], ...] = (
    ("MiniLM-L6", 12, 12, 32, "key lengths", 0.1, _ENCODER, _ENCODER_TRAINING),
    ("BERT-base", 12, 12, 64, "key lengths", 0.1, (*_ENCODER, (4, 512, 512)), _ENCODER_TRAINING),
    ("BERT-large", 16, 16, 64, "key lengths", 0.1, ((1, 16, 16), (8, 128, 128)), ((4, 384, 384),)),
    ("ELECTRA-small", 4, 4, 64, "key lengths", 0.1,
     ((1, 16, 16), (32, 128, 128)), _ENCODER_TRAINING),
    ("ALBERT-xxlarge", 64, 64, 64, "key lengths", 0.0,
     ((1, 16, 16), (4, 128, 128)), ((2, 128, 128),)),
    ("ModernBERT-base", 12, 12, 64, "window", 0.0,
     ((1, 1024, 1024), (4, 512, 512)), ((2, 1024, 1024),)),
    ("T5-base encoder", 12, 12, 64, "bias", 0.1, ((1, 64, 64), (8, 128, 128)), ((8, 128, 128),)),
    ("Transformer-base", 8, 8, 64, "key lengths", 0.1,
     ((1, 24, 24), (32, 32, 32)), ((64, 32, 32),)),
    ("Transformer-base, cross", 8, 8, 64, "key lengths", 0.1,
     ((16, 1, 32), (64, 1, 32)), ((64, 30, 32),)),
    ("GPT-2", 12, 12, 64, "causal", 0.1,
     ((1, 128, 128), (1, 1024, 1024)), ((4, 256, 256), (1, 1024, 1024))),
    ("GPT-2, one token", 12, 12, 64, "none", 0.0,
     ((1, 1, 64), (1, 1, 256), (1, 1, 1024), (32, 1, 128)), ()),
    ("Transformer-base, one token", 8, 8, 64, "none", 0.0, ((16, 1, 64), (1, 1, 32)), ()),
    ("Llama-3-8B", 32, 8, 128, "causal", 0.0, ((1, 128, 128), (1, 512, 512)), ((1, 256, 256),)),
    ("Llama-3-8B, one token", 32, 8, 128, "none", 0.0,
     ((1, 1, 512), (1, 1, 4096), (4, 1, 2048)), ()),
    ("TinyLlama", 32, 4, 64, "causal", 0.0, ((1, 256, 256),), ((1, 512, 512),)),
    ("TinyLlama, one token", 32, 4, 64, "none", 0.0, ((1, 1, 256), (8, 1, 1024)), ()),
    ("BART-base, cross", 12, 12, 64, "key lengths", 0.1, ((4, 1, 256),), ((8, 64, 128),)),
    ("Qwen2-0.5B", 14, 2, 64, "causal", 0.0, ((1, 256, 256),), ((2, 256, 256),)),
    ("Qwen2-0.5B, one token", 14, 2, 64, "none", 0.0, ((1, 1, 512), (8, 1, 512)), ()),
    ("Gemma-2-2B", 8, 4, 256, "causal", 0.0, ((1, 256, 256),), ((1, 256, 256),)),
    ("ViT-B/16", 12, 12, 64, "none", 0.0, _IMAGES, ((8, 197, 197),)),
    ("DeiT-tiny", 3, 3, 64, "none", 0.0, _IMAGES, ((32, 197, 197),)),
    ("Swin-T, windows", 3, 3, 32, "bias", 0.0, ((64, 49, 49), (512, 49, 49)), ((64, 49, 49),)),
    ("CLIP ViT-L/14", 16, 16, 64, "none", 0.0, ((1, 257, 257), (4, 257, 257)), ()),
    ("CLIP text", 8, 8, 64, "causal", 0.0, ((1, 77, 77), (16, 77, 77)), ((16, 77, 77),)),
    ("Whisper-base", 8, 8, 64, "none", 0.0, ((1, 1500, 1500),), ()),
    ("Whisper-base, cross", 8, 8, 64, "none", 0.0, ((1, 1, 1500), (5, 1, 1500)), ()),
    ("wav2vec2-base", 12, 12, 64, "none", 0.1, ((1, 499, 499),), ((2, 249, 249),)),
)  # fmt: skip

# Norms: model, N, RMSNorm, residual, dropout, then rows in inference and in training.
_TEXT_ROWS, _TRAINING_ROWS = (1, 16, 128, 4096), (128, 2048)
_Rows = tuple[int, ...]
_NORMS: tuple[tuple[str, int, bool, bool, float, _Rows, _Rows], ...] = (
    ("MiniLM-L6", 384, False, True, 0.1, _TEXT_ROWS, (1, 16, *_TRAINING_ROWS)),
    ("MiniLM-L6, embeddings", 384, False, False, 0.0, (1, 128), ()),
    ("MiniLM-L6, no dropout", 384, False, True, 0.0, (), (1, 128)),
    ("BERT-base", 768, False, True, 0.1, _TEXT_ROWS, (16, *_TRAINING_ROWS)),
    ("BERT-base, no dropout", 768, False, True, 0.0, (), (16, 128, 2048)),
    ("BERT-large", 1024, False, True, 0.1, (16, 4096), _TRAINING_ROWS),
    ("Transformer-base", 512, False, True, 0.1, (16, 1024), _TRAINING_ROWS),
    ("Transformer-base, no dropout", 512, False, True, 0.0, (), (512,)),
    ("ELECTRA-small", 256, False, True, 0.1, (16, 4096), _TRAINING_ROWS),
    ("ELECTRA-small, no dropout", 256, False, True, 0.0, (), (4096,)),
    ("ALBERT-xxlarge", 4096, False, True, 0.0, (16, 512), (1, 256)),
    ("OPT-6.7B", 4096, False, True, 0.1, (1,), (1, 256)),
    ("TinyLlama", 2048, True, True, 0.0, (1, 256), (512,)),
    ("GPT-2", 768, False, False, 0.0, (1, 16, 128, 1024), (1024,)),
    ("ViT-B/16", 768, False, False, 0.0, (197, 1576), (1576,)),
    ("Swin-T", 96, False, False, 0.0, (3136, 25088), (25088,)),
    ("Whisper-base", 512, False, False, 0.0, (1, 1500), ()),
    ("Llama-3-8B", 4096, True, True, 0.0, (1, 16, 512), (1, 256)),
    ("Llama-3-8B, first norm", 4096, True, False, 0.0, (1, 512), (256,)),
    ("Qwen2-0.5B", 896, True, True, 0.0, (1, 256), (512,)),
    ("T5-base", 768, True, False, 0.0, (64, 1024), (1024,)),
)

# Recurrent layers: model, module, I, H, bidirectional, projection, then (T, B) in inference and in
# training.
_Steps = tuple[tuple[int, int], ...]
_RECURRENT: tuple[tuple[str, Module, int, int, bool, int, _Steps, _Steps], ...] = (
    ("ELMo", "LSTM", 512, 4096, True, 512, ((16, 1), (16, 8)), ((16, 8),)),
    ("AWD-LSTM", "LSTM", 400, 1150, False, 0, ((70, 1), (70, 16)), ((70, 16),)),
    ("Luong's encoder", "LSTM", 512, 512, True, 0, ((20, 1), (20, 32)), ((20, 32),)),
    ("Luong's decoder, one step", "LSTM", 512, 512, False, 0, ((1, 1), (1, 32)), ()),
    ("BiLSTM-CRF tagger", "LSTM", 100, 100, True, 0, ((25, 1), (25, 32)), ((25, 32),)),
    ("Character language model", "LSTM", 128, 128, False, 0, ((100, 1), (100, 32)), ((100, 32),)),
    ("Time series", "LSTM", 16, 64, False, 0, ((50, 1), (50, 64)), ((50, 64),)),
    ("Short texts", "LSTM", 256, 256, False, 0, ((8, 1), (8, 256)), ((8, 256),)),
    ("Silero-like VAD", "LSTM", 128, 128, False, 0, ((1, 1), (32, 1)), ()),
    ("Deep Speech 2", "GRU", 800, 800, True, 0, ((100, 1), (100, 8)), ((100, 8),)),
    ("Bahdanau's encoder", "GRU", 620, 1000, True, 0, ((20, 1), (20, 16)), ((20, 16),)),
    ("GRU4Rec", "GRU", 100, 100, False, 0, ((20, 1), (20, 64)), ((20, 64),)),
    ("Tacotron's CBHG", "GRU", 128, 128, True, 0, ((100, 1), (100, 16)), ((100, 16),)),
    ("Seq2seq for dates", "GRU", 64, 128, True, 0, ((29, 1), (29, 64)), ((29, 64),)),
    ("Elman's language model", "RNN", 200, 200, False, 0, ((20, 1), (20, 32)), ((20, 32),)),
    ("RNN of 512", "RNN", 512, 512, True, 0, ((50, 1), (50, 16)), ((50, 16),)),
)


_Row = tuple[str, Attention | Norm | Recurrent, Pass]


def _attention() -> Iterator[_Row]:
    for model, H, Hkv, head_dim, masking, p, inference, training in _ATTENTION:
        for B, Lq, Lk in inference:
            yield model, Attention(B, Lq, Lk, H, Hkv, head_dim, masking, 0.0), "inference"
        for B, Lq, Lk in training:
            yield model, Attention(B, Lq, Lk, H, Hkv, head_dim, masking, p), "training"


def _norms() -> Iterator[_Row]:
    for model, N, rms_norm, residual, p, inference, training in _NORMS:
        for rows in inference:
            yield model, Norm(rows, N, rms_norm, residual, 0.0), "inference"
        for rows in training:
            yield model, Norm(rows, N, rms_norm, residual, p), "training"


def _recurrent() -> Iterator[_Row]:
    for model, module, inputs, H, both, projection, inference, training in _RECURRENT:
        for T, B in inference:
            yield model, Recurrent(module, T, B, inputs, H, both, projection), "inference"
        for T, B in training:
            yield model, Recurrent(module, T, B, inputs, H, both, projection), "training"


CALLS = [
    SweptCall(model, call, dtype, kind)
    for (model, call, kind), dtype in itertools.product(
        itertools.chain(_attention(), _norms(), _recurrent()), DTYPES
    )
]
