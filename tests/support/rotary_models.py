"""Models of Llama's kind with frozen layers, and their caches, for the tests of the op."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from model_sizes import GROUPED_QUERIES, SIZES
from packaging.version import Version
from torch import Tensor, nn

import trifuse
from trifuse.nn import encoder_layer

transformers = pytest.importorskip("transformers")

DTYPES = [torch.float32, torch.bfloat16]
GROUPED = SIZES | GROUPED_QUERIES | {"pad_token_id": 0}
LAYER_TYPES = ["sliding_attention", "full_attention"]
# The further options of each family's configuration, by its name.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True},
    "Mistral": {"sliding_window": 4},
    "Qwen2": {},
    "Qwen3": {"head_dim": 12},
    # Half of each head is rotated.
    "Phi3": {"intermediate_size": 64, "partial_rotary_factor": 0.5, "eos_token_id": 2},
    # Norms of all query heads at once, and of all key heads; norms of the sublayers' results only.
    "Olmo2": {"attention_bias": True},
    "Olmo3": {"sliding_window": 4, "layer_types": LAYER_TYPES},
    # The last layer rotates nothing.
    "Exaone4": {"sliding_window": 4, "layer_types": LAYER_TYPES, "head_dim": 12},
    "SmolLM3": {"no_rope_layers": [1, 0], "bos_token_id": 1, "eos_token_id": 2},
    "Cohere2": {"sliding_window": 4, "layer_types": LAYER_TYPES, "eos_token_id": 2},
    # Neighbouring features are rotated together.
    "Cohere": {"attention_bias": True, "eos_token_id": 2},
    "Glm": {"head_dim": 8, "intermediate_size": 64},
    "Glm4": {"head_dim": 8, "intermediate_size": 64},
    "Helium": {"head_dim": 8},
    "Ernie4_5": {"head_dim": 8, "use_bias": True},
}
# The code of these layers is known from transformers 5 on.
if Version(transformers.__version__) >= Version("5"):
    FAMILIES |= {
        "Gemma": {"head_dim": 12},
        # The first layer has a window, and caps its scores.
        "Gemma2": {"head_dim": 12, "sliding_window": 4, "attn_logit_softcapping": 2.0},
        "Gemma3Text": {"head_dim": 12, "sliding_window": 4, "layer_types": LAYER_TYPES},
        # A quarter of each head is rotated. Both sublayers get the same input, or they don't.
        "GPTNeoX": {"rotary_pct": 0.25, "use_parallel_residual": True},
        "GPTNeoX, serial": {"rotary_pct": 0.25, "use_parallel_residual": False},
        "Phi": {"partial_rotary_factor": 0.5},
        "Phi, norms of heads": {"partial_rotary_factor": 0.5, "qk_layernorm": True},
        "StableLm": {"use_qkv_bias": True},
        "StableLm, parallel": {"use_parallel_residual": True},
        "Granite": {"attention_multiplier": 0.3, "residual_multiplier": 0.22, "mlp_bias": True},
        "GPTJ": {"rotary_dim": 4, "max_position_embeddings": 200, "bos_token_id": 1},
    }
GENERATOR = torch.Generator()
CACHE = "past_key_values"  # the argument's name before it was "cache"


@contextmanager
def only_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder_layer, "run", lambda *args, **kwargs: None)
        yield


def family(name: str) -> str:
    """Returns the family of a name, which may have a variant after it."""
    return name.split(",")[0]


def config(name: str, **options: Any) -> Any:
    return getattr(transformers, f"{family(name)}Config")(**GROUPED | FAMILIES[name] | options)


def build(
    name: str,
    dtype: torch.dtype = torch.float32,
    fused: bool = True,
    freeze: bool = True,
    **options: Any,
) -> Any:
    """Returns a model without a head, whose output depends on all earlier tokens."""
    torch.manual_seed(0)
    model = getattr(transformers, f"{family(name)}Model")(config(name, **options)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3 if parameter.dim() == 2 else 1.0)
    model.to(dtype)
    if fused:
        trifuse.fuse(model, freeze=freeze)
    return model


def words(batch: int, length: int) -> Tensor:
    return torch.randint(3, 97, (batch, length), generator=GENERATOR.manual_seed(length))


def modern_bert(dtype: torch.dtype, **options: Any) -> Any:
    """Returns an encoder of 3 layers, the second with a window of 3 tokens on both sides."""
    torch.manual_seed(0)
    sizes = SIZES | {"num_hidden_layers": 3, "intermediate_size": 64, "pad_token_id": 0}
    sizes |= {"local_attention": 6, "global_attn_every_n_layers": 2, "attention_dropout": 0.1}
    tokens = {"bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
    made = transformers.ModernBertConfig(**sizes | tokens | options)
    model = transformers.ModernBertModel(made).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3 if parameter.dim() == 2 else 1.0)
    return model.to(dtype)


def keep(batch: int, length: int) -> Tensor:
    """Padding on the left, as for generation: none in the first row."""
    padded = torch.tensor([0, 2, 3])[:batch, None].clamp(max=length - 1)
    return (torch.arange(length) >= padded).long()


def call(model: Any, ids: Tensor, past: Any = None, mask: Tensor | None = None) -> Tensor:
    """Returns the hidden states of tokens, after those in a cache."""
    options = {"use_cache": False}
    if past is not None:
        names = inspect.signature(type(model).forward).parameters
        options = {"use_cache": True, "cache" if "cache" in names else CACHE: past}
    out: Tensor = model(ids, attention_mask=mask, **options).last_hidden_state
    return out


def kept(past: Any) -> list[Tensor]:
    return [t for layer in past.layers for t in (layer.keys, layer.values)]


def start(model: Any, length: int = 5, kind: str = "Dynamic") -> Any:
    past = empty(model, kind)
    call(model, words(1, length), past)
    return past


def empty(model: Any, kind: str) -> Any:
    options = {"max_cache_len": 20} if kind == "Static" else {}
    return getattr(transformers, f"{kind}Cache")(config=model.config, **options)


def wrapped(function: Any, watched: Any) -> Any:
    return functools.wraps(function)(watched)


def only_named(function: Any, watched: Any) -> Any:
    return watched


REPLACED = pytest.mark.parametrize("disguise", [only_named, wrapped])
