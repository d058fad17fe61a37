"""Models of transformers at their base sizes with random weights, and the batches that they read.

Texts have the lengths of real ones, in words and punctuation marks: paragraphs of the language
reference, or its topics. Encoders and translators get padded batches of them, of which about the
fraction ``VALID`` are real tokens. Decoders read windows of a text. Images and sounds have one
size. None of these has padding.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pydoc_data import topics
from typing import Any, Literal, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from trifuse.benchmarks import demo, engines
from trifuse.benchmarks.text import count_tokens

VALID = 0.56
Reads = Literal["texts", "translations", "windows", "images", "sounds"]


@dataclass(frozen=True, eq=False)
class Family:
    """A model of transformers, and what it reads."""

    name: str
    model: str  # as transformers names its configuration, without "Config"
    layers: tuple[str, ...]  # the options for the number of layers; none: the whole model
    reads: Reads
    length: int = 128  # tokens of the longest text, or of a window
    batches: tuple[int, ...] = (8, 32)
    options: Mapping[str, Any] = field(default_factory=dict)  # of the configuration
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the model's class
    part: str = ""  # the module of the model that is run
    depth: int = 12  # layers at the base size; of a translator, in each half

    @property
    def is_padded(self) -> bool:
        return self.reads in ("texts", "translations")


_LAYERS = ("num_hidden_layers",)
_NO_POOLER = {"add_pooling_layer": False}
_DEBERTA = {
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
}
_BEIT = {"use_relative_position_bias": True}
_SWINV2 = {"image_size": 256, "window_size": 8}
_T5 = {"d_model": 768, "d_ff": 3072, "num_heads": 12}
_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
}
_WHISPER = {
    "d_model": 512,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 2048,
    "decoder_ffn_dim": 2048,
}
FAMILIES = (
    Family("BERT", "Bert", _LAYERS, "texts", arguments=_NO_POOLER),
    Family("RoBERTa", "Roberta", _LAYERS, "texts", arguments=_NO_POOLER),
    Family("DistilBERT", "DistilBert", ("n_layers",), "texts", depth=6),
    Family("MPNet", "MPNet", _LAYERS, "texts", arguments=_NO_POOLER),
    Family("DeBERTa-v3", "DebertaV2", _LAYERS, "texts", options=_DEBERTA),
    Family("ModernBERT", "ModernBert", _LAYERS, "texts", depth=22),
    Family("ModernBERT, long texts", "ModernBert", _LAYERS, "texts", 1024, (2, 8), depth=22),
    Family("T5", "T5", ("num_layers",), "translations", options=_T5),
    Family("GPT-2", "GPT2", ("n_layer",), "windows", 256),
    Family("Llama", "Llama", _LAYERS, "windows", 256, options=_LLAMA),
    Family("ViT", "ViT", _LAYERS, "images", arguments=_NO_POOLER),
    Family("BEiT", "Beit", _LAYERS, "images", options=_BEIT, arguments=_NO_POOLER),
    Family("Swin-T", "Swin", (), "images", arguments=_NO_POOLER),
    Family("SwinV2-T", "Swinv2", (), "images", options=_SWINV2, arguments=_NO_POOLER),
    Family(
        "Whisper's encoder",
        "Whisper",
        ("encoder_layers", "decoder_layers"),
        "sounds",
        1500,
        (2, 8),
        options=_WHISPER,
        part="encoder",
        depth=6,
    ),
)


def build(family: Family, layers: int, **options: Any) -> Any:
    """Return a model with random weights, in evaluation mode.

    Args:
        family: which.
        layers: how many layers it gets, if the family has an option for that.
        options: of its configuration, in addition to the family's own.
    """
    torch.manual_seed(0)
    chosen = {**family.options, **dict.fromkeys(family.layers, layers), **options}
    with engines.quiet_transformers():
        config = getattr(transformers, f"{family.model}Config")(**chosen)
        model = getattr(transformers, f"{family.model}Model")(config, **family.arguments)
    return model.get_submodule(family.part).eval()


# Batches ------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """The texts or images that a model reads."""

    inputs: dict[str, Any]
    lengths: tuple[int, ...]  # of the sequences, in tokens
    keep: Tensor | None  # (B, L), which tokens of the result are real; None: all of it
    shape: str  # in words


def draw(family: Family, model: Any, batch_size: int) -> Batch:
    """Return a batch for a model of a family; images and sounds have the dtype of its weights."""
    generator = torch.Generator().manual_seed(0)
    if not family.is_padded:
        inputs = _whole(family, model, batch_size, family.length, generator)
        size = " × ".join(map(str, next(iter(inputs.values())).shape))
        return Batch(inputs, (family.length,) * batch_size, None, size)
    lengths = text_lengths(batch_size, family.length)
    keep = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = _ids(model, keep.shape, generator).masked_fill(~keep, model.config.pad_token_id or 0)
    inputs = {"input_ids": ids, "attention_mask": keep.long()}
    if family.reads == "translations":
        inputs |= {"decoder_input_ids": ids, "decoder_attention_mask": keep.long()}
        inputs |= {"use_cache": False}
    shape = " × ".join(map(str, keep.shape))
    return Batch(inputs, tuple(lengths), keep, f"{shape}, {keep.double().mean().item():.0%} valid")


def text_lengths(batch_size: int, longest: int) -> list[int]:
    """Return lengths of real texts, so that about the fraction VALID of a batch is real tokens.

    Texts under a quarter of the length are left out, and longer ones are cut. The rest is shuffled
    into batches a few times; the batch closest to the fraction is chosen.
    """
    short = longest <= 256
    texts = [each.text for each in demo.passages()] if short else list(topics.topics.values())
    lengths = [min(count_tokens(text) + 2, longest) for text in texts]  # a token at either end
    lengths = [length for length in lengths if length >= longest / 4]
    draw, batches = random.Random(0), []
    for _ in range(16):
        draw.shuffle(lengths)
        starts = range(0, len(lengths) - batch_size + 1, batch_size)
        batches += [lengths[start : start + batch_size] for start in starts]
    full = [batch for batch in batches if max(batch) == longest]
    return min(full, key=lambda batch: abs(sum(batch) / (batch_size * longest) - VALID))


def _whole(
    family: Family, model: Any, batch_size: int, length: int, generator: torch.Generator
) -> dict[str, Any]:
    """Return inputs without padding."""
    config, like = model.config, next(model.parameters())
    if family.reads == "images":
        shape = (batch_size, 3, config.image_size, config.image_size)
        return {"pixel_values": torch.randn(shape, generator=generator).to(like)}
    if family.reads == "sounds":
        frames = 2 * config.max_source_positions
        bands = config.num_mel_bins
        sound = torch.randn(batch_size, bands, frames, generator=generator)
        return {"input_features": sound.to(like)}
    ids = _ids(model, torch.Size((batch_size, length)), generator)
    if family.reads == "translations":
        return {"input_ids": ids, "decoder_input_ids": ids, "use_cache": False}
    return {"input_ids": ids} | ({"use_cache": False} if family.reads == "windows" else {})


def _ids(model: Any, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Return token ids, none of which is that of padding."""
    special = [getattr(model.config, f"{name}_token_id", None) for name in ("pad", "eos", "bos")]
    ids = torch.randint(5, model.config.vocab_size - 5, shape, generator=generator)
    for token in special:
        if isinstance(token, int):
            ids = ids.masked_fill(ids == token, 5 + (token == 5))
    return ids


# Work ---------------------------------------------------------------------------------------------


@functools.cache
def operations(family: Family, layers: int, lengths: tuple[int, ...]) -> float:
    """Return the operations of the products in a forward over sequences without padding.

    A product of matrices counts 2 for each pair of numbers. Pairs of tokens count if they take part
    in attention. What a batch computes once for all sequences, as DeBERTa's projections of
    distances, counts once, and only for distances that the tokens have.
    """
    model = build(family, layers, attn_implementation="eager")
    once, in_sequences = 0.0, 0.0
    for length, count in Counter(lengths).items():
        one, two = (_operations(family, model, layers, n, length) for n in (1, 2))
        once = max(once, 2 * one - two)
        in_sequences += count * (two - one)
    return once + in_sequences


def _operations(family: Family, model: Any, layers: int, batch_size: int, length: int) -> float:
    inputs = _whole(family, model, batch_size, length, torch.Generator())
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**inputs)
    counts = counter.get_flop_counts()["Global"]
    # All batched products are those of attention.
    of_pairs = sum(counts.get(op, 0) for op in (torch.ops.aten.bmm, torch.ops.aten.baddbmm))
    needed = sum(counts.values()) - of_pairs * (1 - _share_of_pairs(family, model, length))
    # Each layer of DeBERTa projects embeddings of distances twice, and has two tables of them.
    width, unread = model.config.hidden_size, _unread_embeddings(model, length)
    return needed - layers * 2 * 2 * unread * width * (width + batch_size * length)


def _unread_embeddings(model: Any, length: int) -> int:
    """Return how many of DeBERTa's embeddings no distance of a sequence reads; 0 for others."""
    if not getattr(model.config, "relative_attention", False):
        return 0
    span = model.encoder.layer[0].attention.self.pos_ebd_size
    distances = model.encoder.get_rel_pos(torch.empty(1, length, 1))
    return 2 * span - int(torch.unique((distances + span).clamp(0, 2 * span - 1)).numel())


def _share_of_pairs(family: Family, model: Any, length: int) -> float:
    """Return which share of all pairs of tokens takes part in a model's attentions."""
    causal = (length + 1) / (2 * length)
    if family.reads == "windows":
        return causal
    if family.reads == "translations":  # one of three attentions is causal
        return (2 + causal) / 3
    kinds = getattr(model.config, "layer_types", None) or []
    if "sliding_attention" not in kinds:
        return 1.0
    reach = min(model.config.local_attention // 2, length - 1)
    near = sum(length - abs(offset) for offset in range(-reach, reach + 1))
    local = kinds.count("sliding_attention") / len(kinds)
    return 1 - local + local * near / length**2
