"""Whole models through the rewritten graphs: what is served, and that results are eager torch's."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from rewritten import Rewritten, check
from torch import nn


class CausalSelfAttention(nn.Module):
    def __init__(self, width, heads, length, dropout, flash):
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        self.heads, self.dropout, self.flash = heads, dropout, flash
        mask = torch.ones(length, length).tril().view(1, 1, length, length)
        self.register_buffer("mask", mask)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.qkv(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in (q, k, v))
        if self.flash:
            p = self.dropout if self.training else 0
            y = F.scaled_dot_product_attention(q, k, v, None, p, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
            y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.proj(y))


class GPT(nn.Module):
    """A language model in the manner of nanoGPT."""

    def __init__(self, dropout=0.0, flash=False, layers=2, width=32, length=16):
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "ln_1": nn.LayerNorm(width),
                    "attn": CausalSelfAttention(width, 4, length, dropout, flash),
                    "ln_2": nn.LayerNorm(width, bias=False),
                    "mlp": nn.Sequential(
                        nn.Linear(width, 4 * width),
                        nn.GELU(),
                        nn.Linear(4 * width, width),
                        nn.Dropout(dropout),
                    ),
                }
            )
            for _ in range(layers)
        )
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, 50, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, ids, targets):
        x = self.drop(self.tokens(ids) + self.places(torch.arange(ids.shape[1])))
        for block in self.blocks:
            x = x + block["attn"](block["ln_1"](x))
            x = x + block["mlp"](block["ln_2"](x))
        logits = self.head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def ids(*shape):
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("flash", [False, True])
def test_nanogpt_is_served(flash):
    torch.manual_seed(0)
    model = GPT(flash=flash)
    ours = check(model, ids(2, 16), ids(2, 16), replaced={"attention": 2, "norm": 5})
    assert not any(map(ours.calls, ("layer_norm", "softmax")))
    # The sums of the residual stream are computed by the norms; one is left, of the embeddings.
    assert ours.calls("add") + ours.calls("iadd") == 1


def test_nanogpt_with_dropout_trains():
    """The losses fall as eager torch's do: dropout draws other elements."""
    losses = {}
    for name in ("eager", "trifuse"):
        torch.manual_seed(0)
        model = GPT(dropout=0.1, layers=1)
        step = Rewritten(model, aot=True) if name == "trifuse" else model
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for _ in range(60):
            _, loss = step(ids(8, 16), ids(8, 16))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[name] = loss.item()
        if name == "trifuse":
            assert step.replaced == {"attention": 1, "norm": 3}
            assert not step.calls("softmax")
    assert losses["eager"] < 1.5
    assert abs(losses["trifuse"] / losses["eager"] - 1) < 0.15


@pytest.mark.parametrize("norm_first", [False, True])
def test_torch_encoder_is_served_in_training(norm_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, nn.LayerNorm(16), enable_nested_tensor=False)
    padding = torch.arange(6) >= torch.tensor([[6], [4]])
    check(
        model,
        torch.randn(2, 6, 16, requires_grad=True),
        src_key_padding_mask=padding,
        replaced={"attention": 2, "norm": 5},
    )


def test_torch_transformer_is_served():
    torch.manual_seed(0)
    model = nn.Transformer(16, 2, 1, 1, 32, 0.0, batch_first=True)
    # Without tgt_is_causal torch reads the mask, which breaks the graph.
    options = {"tgt_mask": model.generate_square_subsequent_mask(5), "tgt_is_causal": True}
    args = torch.randn(2, 6, 16), torch.randn(2, 5, 16)
    # An encoder layer, a decoder layer with two attentions, and two final norms.
    check(model, *args, **options, replaced={"attention": 3, "norm": 7}, aot=True)


HUGGING_FACE = {
    "bert": ({}, 5),
    "llama": ({"head_dim": 8}, 5),
    "qwen3": ({"head_dim": 8}, 9),
    "gemma2": ({"head_dim": 8}, 9),
    "gpt2": ({"n_embd": 32, "n_layer": 2, "n_head": 4}, 5),
    "bloom": ({}, 6),
    "cohere": ({}, 3),
    "olmo": ({}, 5),
}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_models_of_transformers_are_served(kind, implementation):
    if implementation == "sdpa" and kind in ("gemma2", "bloom"):
        pytest.skip("transformers refuses SDPA for it")
    from transformers import AutoConfig, AutoModel

    extra, norms = HUGGING_FACE[kind]
    config = AutoConfig.for_model(
        kind,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=100,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
        **extra,
    )
    torch.manual_seed(0)
    model = AutoModel.from_config(config, attn_implementation=implementation).eval()
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:] = 0
    replaced = {"attention": 2, "norm": norms}

    def last_hidden_state(module):
        def function(ids):
            return module(input_ids=ids, attention_mask=mask).last_hidden_state

        return function

    check(last_hidden_state(model), ids(2, 7), replaced=replaced, aot=kind == "llama")


VISION = {
    "vit_tiny_patch16_224": (12, 25),
    "swin_tiny_patch4_window7_224": (12, 29),
}


def vision_library(name):
    """Imports torchvision or timm; a torchvision built for another torch raises RuntimeError."""
    try:
        return pytest.importorskip(name, exc_type=ImportError)
    except RuntimeError as error:
        pytest.skip(f"{name} does not work here: {error}")


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", VISION)
def test_models_of_timm_are_served(name, fused):
    timm = vision_library("timm")
    timm.layers.set_fused_attn(fused)
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10).eval()
    attentions, norms = VISION[name]
    with torch.no_grad():
        image = torch.randn(1, 3, 224, 224)
        ours = Rewritten(model)
        torch.testing.assert_close(ours(image), model(image), rtol=1e-4, atol=1e-5)
    assert ours.replaced == {"attention": attentions, "norm": norms}


@pytest.mark.parametrize("version", ["V1", "V2"])
def test_swin_of_torchvision_is_served(version):
    """Written out, with a bias and shifted windows; V2 has cosine attention and later norms."""
    vision_library("torchvision")
    from torchvision.models import swin_transformer as swin

    torch.manual_seed(0)
    second = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
    options = second if version == "V2" else {}
    model = swin.SwinTransformer([4, 4], 24, [2, 2], [3, 6], [4, 4], num_classes=3, **options)
    image = torch.randn(2, 3, 64, 64)
    check(model.eval(), image, replaced={"attention": 4, "norm": 11})


def test_vit_of_torchvision_is_served():
    torchvision = vision_library("torchvision")
    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(32, 8, 2, 4, 32, 64)
    nn.init.normal_(model.heads.head.weight)  # zeros at first
    check(model.eval(), torch.randn(2, 3, 32, 32), replaced={"attention": 2, "norm": 5})
