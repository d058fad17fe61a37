"""Models that ``torch.compile`` is timed with: none of their code names trifuse.

Each function takes :class:`Sizes` and returns a model without dropout, and its input.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trifuse.models.bert import BertConfig, BertModel


class Sizes(NamedTuple):
    """The sizes of all models: two layers of base width unless a test makes them smaller."""

    width: int = 768
    heads: int = 12
    layers: int = 2
    batch: int = 4
    length: int = 256


class Encoder(nn.Module):
    """torch's Transformer encoder as used in training, without its operator for inference."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            sizes.width, sizes.heads, 4 * sizes.width, 0.0, "gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, sizes.layers, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.encoder(x)
        return out


class Bert(nn.Module):
    """A BERT without embeddings, with its attention written out or by torch's function."""

    def __init__(self, sizes: Sizes, attention: str) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=1,
            hidden_size=sizes.width,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            intermediate_size=4 * sizes.width,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation=attention,
        )
        self.encoder = BertModel(config).encoder

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.encoder(x)
        return out


class EncoderDecoder(nn.Module):
    """torch's Transformer, which translates its input into its input."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.transformer = nn.Transformer(
            sizes.width, sizes.heads, sizes.layers, sizes.layers, 4 * sizes.width, 0.0,
            batch_first=True,
        )  # fmt: skip
        causal = self.transformer.generate_square_subsequent_mask(sizes.length)
        self.register_buffer("causal", causal)

    def forward(self, x: Tensor) -> Tensor:
        # Without tgt_is_causal torch reads the mask, which breaks the graph.
        out: Tensor = self.transformer(x, x, tgt_mask=self.causal, tgt_is_causal=True)
        return out


class GPT(nn.Module):
    """A causal decoder in the manner of GPT-2: LayerNorm, attention written out with a mask."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        E = sizes.width
        self.heads = sizes.heads
        self.layers: Any = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm_1": nn.LayerNorm(E),
                    "qkv": nn.Linear(E, 3 * E),
                    "out": nn.Linear(E, E),
                    "norm_2": nn.LayerNorm(E),
                    "up": nn.Linear(E, 4 * E),
                    "down": nn.Linear(4 * E, E),
                }
            )
            for _ in range(sizes.layers)
        )
        self.norm = nn.LayerNorm(E)
        self.register_buffer("mask", torch.ones(sizes.length, sizes.length).tril())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self._attention(layer, layer["norm_1"](x))
            x = x + layer["down"](nn.functional.gelu(layer["up"](layer["norm_2"](x))))
        out: Tensor = self.norm(x)
        return out

    def _attention(self, layer: Any, x: Tensor) -> Tensor:
        q, k, v = layer["qkv"](x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.shape[-1]))
        scores = scores.masked_fill(self.mask == 0, float("-inf"))
        out: Tensor = layer["out"]((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out


class Decoder(nn.Module):
    """A causal decoder in the manner of Llama: RMSNorm and attention written out, SiLU gates."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        E, inner = sizes.width, 8 * sizes.width // 3
        self.heads = sizes.heads
        self.layers: Any = nn.ModuleList(
            nn.ParameterDict(
                {
                    "norm_1": torch.ones(E),
                    "norm_2": torch.ones(E),
                    "qkv": torch.randn(3 * E, E) / E**0.5,
                    "out": torch.randn(E, E) / E**0.5,
                    "up": torch.randn(2 * inner, E) / E**0.5,
                    "down": torch.randn(E, inner) / E**0.5,
                }
            )
            for _ in range(sizes.layers)
        )
        self.norm = nn.Parameter(torch.ones(E))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self._attention(layer, _rms_norm(x, layer["norm_1"]))
            gate, up = (_rms_norm(x, layer["norm_2"]) @ layer["up"].T).chunk(2, -1)
            x = x + (nn.functional.silu(gate) * up) @ layer["down"].T
        return _rms_norm(x, self.norm)

    def _attention(self, layer: Any, x: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = (x @ layer["qkv"].T).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        later = x.new_ones(length, length).triu(1) > 0
        scores = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).masked_fill(later, float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ layer["out"].T


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


Model = Callable[[Sizes], tuple[nn.Module, Tensor]]


def _of(make: Callable[[Sizes], nn.Module]) -> Model:
    """Return a function that makes a model, and the embeddings of tokens as its input."""
    return lambda sizes: (make(sizes), torch.randn(sizes.batch, sizes.length, sizes.width))


def _images(sizes: Sizes, patch: int) -> tuple[int, Tensor]:
    """Return the images' width in pixels, and images of about ``sizes.length`` patches."""
    width = patch * round(math.sqrt(sizes.length))
    return width, torch.randn(sizes.batch, 3, width, width)


def _timm_vit(name: str, patch: int, sizes: Sizes) -> tuple[nn.Module, Tensor]:
    import timm

    width, images = _images(sizes, patch)
    model = timm.create_model(
        name, img_size=width, embed_dim=sizes.width, depth=sizes.layers, num_heads=sizes.heads
    )
    return model, images


# Swin Transformers have the smallest published width, and images of 8 windows or of 2.
_WINDOW = 7


def _windows(sizes: Sizes) -> tuple[int, Tensor]:
    width = 4 * _WINDOW * (8 if sizes.length >= 64 else 2)
    return width, torch.randn(sizes.batch, 3, width, width)


def _timm_swin(sizes: Sizes) -> tuple[nn.Module, Tensor]:
    import timm

    width, images = _windows(sizes)
    model = timm.create_model(
        "swin_tiny_patch4_window7_224",
        img_size=width,
        depths=(sizes.layers,) * 4,
        drop_path_rate=0.0,
        window_size=_WINDOW,
    )
    return model, images


def _torchvision_vit(sizes: Sizes) -> tuple[nn.Module, Tensor]:
    from torchvision.models import VisionTransformer

    width, images = _images(sizes, 16)
    model = VisionTransformer(width, 16, sizes.layers, sizes.heads, sizes.width, 4 * sizes.width)
    nn.init.normal_(model.heads.head.weight, std=0.02)  # zeros at first
    return model, images


def _torchvision_swin(sizes: Sizes) -> tuple[nn.Module, Tensor]:
    from torchvision.models import SwinTransformer

    _, images = _windows(sizes)
    depths = [sizes.layers] * 4
    window = [_WINDOW, _WINDOW]
    model = SwinTransformer([4, 4], 96, depths, [3, 6, 12, 24], window, stochastic_depth_prob=0.0)
    return model, images


def _x_transformers(sizes: Sizes) -> nn.Module:
    import x_transformers

    decoder: nn.Module = x_transformers.Decoder(
        dim=sizes.width,
        depth=sizes.layers,
        heads=sizes.heads,
        attn_dim_head=sizes.width // sizes.heads,
        attn_flash=True,
        rotary_pos_emb=True,
        ff_glu=True,
        ff_swish=True,
    )
    return decoder


MODELS: dict[str, Model] = {
    "nn.TransformerEncoder": _of(Encoder),
    "nn.Transformer": _of(EncoderDecoder),
    "BERT, written out": _of(functools.partial(Bert, attention="eager")),
    "BERT, SDPA": _of(functools.partial(Bert, attention="sdpa")),
    "GPT, written out": _of(GPT),
    "Llama, written out": _of(Decoder),
    "timm ViT": functools.partial(_timm_vit, "vit_base_patch16_224", 16),
    "timm DeiT 3": functools.partial(_timm_vit, "deit3_base_patch16_224", 16),
    "timm EVA-02": functools.partial(_timm_vit, "eva02_base_patch14_224", 14),
    "timm Swin": _timm_swin,
    "torchvision ViT": _torchvision_vit,
    "torchvision Swin": _torchvision_swin,
    "x-transformers": _of(_x_transformers),
}


def missing(model: str) -> str | None:
    """Return what to do about a model's library that does not work here; None if it does."""
    library = _LIBRARIES.get(model.split()[0])
    try:
        importlib.import_module(library or "torch")
    except ImportError:
        return f"{library} is not installed, so its models are left out; try: pip install {library}"
    except RuntimeError as error:  # a torchvision that was built for another torch
        return f"{library} does not work here, so its models are left out: {error}"
    return None


# Some models need a library. Their names begin with the key; the value is what to import.
_LIBRARIES = {"timm": "timm", "torchvision": "torchvision", "x-transformers": "x_transformers"}
