"""Small configurations and models of transformers, for scan_transformers.py.

The defaults of a configuration class set the size of a model. :func:`configurations` makes smaller
configurations by the options' names. No rule fits every model, so it yields several, which differ
in what they shrink. The one that can be built and run is the right one.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import traceback
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import torch

LARGEST = 200_000_000  # parameters; larger models are not built

DEBUG = bool(os.environ.get("SCAN_DEBUG"))


def debug() -> None:
    """Prints the exception that is being handled, if SCAN_DEBUG is set."""
    if DEBUG:
        traceback.print_exc()


def line(error: BaseException) -> str:
    """Returns the error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"


HEADS, KV_HEADS, LAYERS = 4, 2, 2

_KV_HEADS = (
    r"(num_)?(key_value|kv)_heads|(n|num)(_attention)?_(kv|key_value)_heads?|n_head_kv"
    r"|num_global_key_value_heads|swa_num_key_value_heads|.*num_key_value_heads"
)
_ATTENTION_HEADS = (
    r"(.*_)?(n|num)_(attention_|self_attention_|cross_attention_)?heads?|.*attention_heads"
)
_HEAD_SIZES = r"(.*_)?head_dim|d_kv|d_head|kv_channels|attention_head_size|.*head_size|rotary_dim"
_INNER = (
    r"(.*_)?(intermediate|ffn|inner|mlp|ff|feed_forward)(_size|_dim|_hidden_size)?"
    r"|n_inner|d_ff|ffn_hidden_size|dim_feedforward|.*_ffn_dim|.*intermediate_size"
)
_WIDTHS = (
    r"(.*_)?(hidden_size|hidden_dim|d_model|n_embd|embed_dim|model_dim|embedding_size)"
    r"|dim|d_embed|width|projection_dim|.*_embed_dim|.*proj_dim|hidden_features"
)
_LAYERS = r"(.*_)?(num|n)_?(hidden_)?layers?|(.*_)?depth|num_blocks|.*_layers"

# The sizes that options of a configuration get, by the option's name.
_SIZES: tuple[tuple[str, int], ...] = (
    (_KV_HEADS, KV_HEADS),
    (_ATTENTION_HEADS, HEADS),
    (r"rotary_dim", 8),
    (_HEAD_SIZES, 16),
    (r"q_lora_rank|kv_lora_rank|o_lora_rank|.*lora_rank", 16),
    (_INNER, 96),
    (_WIDTHS, 64),
    (_LAYERS, LAYERS),
    (r"(.*_)?(num|n)_(local_|routed_)?experts|moe_num_experts", 4),
    (r"(num_experts_per_tok|moe_topk|moe_k|top_k|num_experts_per_token|topk_group|n_group)", 1),
    (r"num_expert_group|n_groups|mamba_n_?groups", 1),
    (r"num_queries", 4),
    (r"(.*_)?vocab_size(_per_layer_input)?", 120),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|seq_length", 128),
    (r"sliding_window|attention_window_size|local_attention|attention_chunk_size", 4),
    (r"image_embedding_size", 4),
    (r"(.*_)?image_size", 32),
    (r"(.*_)?patch_size", 8),
)
_SIZES_OF_LAYERS = ("layers?", "depth", "vocab", "image_size", "position", "n_ctx", "sliding")

# Options without a usable default, and the value that a small model gets.
_MISSING: dict[str, Any] = {
    "prediction_length": 4,
    "context_length": 12,
    "vocab_size": 120,
    "sliding_window": 4,
    "default_language": "en_XX",
    "vocabulary_map": {"<image>": 4} | {f"<|visual token {i:06d}|>": 5 + i for i in range(16)},
    "image_token_id": 4,
    "image_token_index": 4,
    "num_experts_per_tok": 1,
    "n_routed_experts": 4,
    "num_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 96,
    "attn_layer_indices": [LAYERS - 1],
}


def _size(name: str, value: int = 0) -> int | None:
    return next((size for pattern, size in _SIZES if re.fullmatch(pattern, name)), None)


def _fewer_layers(name: str, value: int = 0) -> int | None:
    few = any(re.search(pattern, name) for pattern in _SIZES_OF_LAYERS)
    return _size(name) if few else None


def _fewer_heads(
    options: dict[str, Any], whole: dict[str, Any]
) -> Callable[[str, int], int | None]:
    """Returns a rule that keeps the size of a head and scales other sizes with the number of heads.

    Rotary embeddings in sections and state-space heads need sizes that match each other, as the
    defaults do. Widths of one part of a model that equal the hidden size of another stay equal.

    Args:
        options: of the part of the configuration that is made smaller.
        whole: the options of the whole configuration.
    """
    factor = Fraction(HEADS, max(_heads(options), HEADS))
    hidden = {
        value: int(value * Fraction(HEADS, max(_heads(part), HEADS)))
        for part in _parts(whole)
        for name, value in part.items()
        if name in ("hidden_size", "d_model", "dim", "embed_dim") and isinstance(value, int)
    }
    own = {v for n, v in options.items() if n in ("hidden_size", "d_model", "dim", "embed_dim")}

    def size(name: str, value: int) -> int | None:
        if re.fullmatch(_HEAD_SIZES, name):
            return value
        if re.fullmatch(_KV_HEADS, name):
            return _size(name)
        if re.fullmatch(f"{_ATTENTION_HEADS}|{_INNER}|.*_heads|.*_d_ssm", name):
            return max(1, int(value * factor))
        if re.fullmatch(f"{_WIDTHS}|.*_dim", name):
            if value in hidden and value not in own:
                return hidden[value]
            return int(value * factor)
        if re.fullmatch(r"(.*_)?(image|patch)_size", name):
            return value
        return _size(name)

    return size


def _heads(options: dict[str, Any]) -> int:
    """Returns the number of attention heads, 1 if the options don't name it."""
    names = [n for n in options if re.fullmatch(_ATTENTION_HEADS, n) and "mamba" not in n]
    values = [options[n] for n in names if isinstance(options[n], int)]
    return values[0] if values else 1


def _is_part(name: str, value: Any) -> bool:
    """Whether an option is a nested configuration."""
    named = name.endswith("config") and name != "per_layer_config"
    return isinstance(value, dict) and (named or "model_type" in value)


def _parts(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the options of the nested configurations, then those of this one."""
    for name, value in options.items():
        if _is_part(name, value):
            yield from _parts(value)
    yield options


def _small(
    options: dict[str, Any],
    rule: Callable[[dict[str, Any]], Callable[[str, int], int | None]],
    consistent: bool,
) -> dict[str, Any]:
    """Returns a configuration's options with smaller sizes, also in nested configurations."""
    small: dict[str, Any] = {}
    wanted = rule(options)
    layers = options.get("num_hidden_layers")
    lists = ("layer_types", "mlp_layer_types", *(("layers_block_type",) if consistent else ()))
    kinds = next((options[name] for name in lists if options.get(name)), None)
    keep: list[int] = [0, -1]  # items kept of a list with one item per layer
    if isinstance(kinds, (list, tuple)) and len(set(kinds)) > 1:
        keep = sorted(kinds.index(kind) for kind in set(kinds))
    for name, value in options.items():
        if _is_part(name, value):
            small[name] = _small(value, rule, consistent)
        elif name in ("out_features", "out_indices", "stage_names"):
            continue  # they name layers
        elif isinstance(value, (list, tuple)) and len(value) == layers:
            small[name] = [value[i] for i in keep]
        elif name == "attention_types" and wanted("num_layers", 24):  # GPT-Neo: kinds, repetitions
            small[name] = [[kinds, 1] for kinds, _ in value]
        elif name == "attention_layers" and "attention_types" in options:
            continue  # made from the kinds
        elif name in ("depths", "num_layers_per_stage") and isinstance(value, (list, tuple)):
            small[name] = [1 for _ in value]
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            size = wanted(name, value)
            small[name] = value if size is None else min(size, value)
        elif isinstance(value, dict) and "mrope_section" in value:
            small[name] = value | {"mrope_section": [4, 2, 2]}
        else:
            small[name] = value
    if layers is not None:
        small["num_hidden_layers"] = len(keep)
    if consistent:
        _agree(small, options, [i % layers for i in keep] if layers else [])
    vocabulary = small.get("vocab_size")
    if isinstance(vocabulary, int):
        tokens = [name for name in small if re.fullmatch(r".*_token_(id|index)", name)]
        for spare, name in enumerate(tokens):
            if isinstance(small[name], int) and small[name] >= vocabulary:
                small[name] = vocabulary - 1 - spare % 20
    return small


def _agree(small: dict[str, Any], options: dict[str, Any], keep: list[int]) -> None:
    """Changes options that depend on the layers kept, on heads or on each other.

    Args:
        small: the smaller options, which this changes.
        options: the original options.
        keep: which layers were kept.
    """
    heads = _heads(small)
    for name, value in options.items():
        if re.fullmatch(_KV_HEADS, name) and value in (None, _heads(options)):
            small[name] = heads
        elif name == "per_layer_config" and isinstance(value, dict):
            items = {int(layer): item for layer, item in value.items()}
            small[name] = {i: items[layer] for i, layer in enumerate(keep) if layer in items}
        elif name == "num_kv_shared_layers":
            small[name] = 0
        elif name in ("attn_layer_period", "attn_layer_offset"):
            small[name] = LAYERS if name.endswith("period") else LAYERS - 1
        elif name == "block_types" and isinstance(value, list):  # a pattern that repeats
            small[name] = list(dict.fromkeys(value))
        elif name == "hybrid_layer_ids":
            small[name] = [LAYERS - 1]
        elif name == "kv_source_layers" and value is not None:
            small[name] = list(range(len(keep)))
        elif re.fullmatch(r".*(feature_layers?|feature_layer_indices)", name) and value is not None:
            small[name] = [-1 - i for i in range(len(value))] if isinstance(value, list) else -1
        elif name == "layer_types" and value is None and keep:
            small[name] = ["full_attention"] * len(keep)
        elif value is None and name in _MISSING:
            small[name] = _MISSING[name]
    head_size = small.get("hidden_size", 0) // heads if heads else 0
    if small.get("head_dim", 0) is None and head_size:
        small["head_dim"] = head_size
    rope = small.get("rope_parameters")
    kinds = small.get("layer_types")
    if rope == {} and kinds:
        small["rope_parameters"] = {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in kinds
        }
    elif isinstance(rope, dict) and "rope_type" in rope:
        width = small.get("head_dim") or head_size
        half = int(width * rope.get("partial_rotary_factor", 1.0)) // 2
        sections = [half - 2 * (half // 4), half // 4, half // 4]  # time, height and width
        small["rope_parameters"] = rope | {"mrope_section": sections}
    if {"qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim"} <= small.keys():
        small["qk_head_dim"] = small["qk_nope_head_dim"] + small["qk_rope_head_dim"]
    backbone = small.get("backbone_config")
    if isinstance(backbone, dict) and backbone.get("model_type") == "timm_backbone":
        small["backbone_config"] = {  # the convolutional network in transformers itself
            "model_type": "resnet",
            "embedding_size": 16,
            "hidden_sizes": [16, 24, 32, 48],
            "depths": [1, 1, 1, 1],
            "layer_type": "basic",
            "out_features": [f"stage{i}" for i in (2, 3, 4)],
        }


def configurations(config_class: type, problems: list[str]) -> Iterator[Any]:
    """Yields configurations from small to large; adds the errors of the others to the problems.

    In order: all sizes small; the same with options that agree; fewer heads of their default size;
    only fewer layers; unchanged.
    """
    default = config_class()
    options = default.to_dict()
    for name in ("model_type", "transformers_version", "architectures", "dtype", "torch_dtype"):
        options.pop(name, None)
    for rule, consistent in (
        (lambda part: _size, False),
        (lambda part: _size, True),
        (lambda part: _fewer_heads(part, options), True),
        (lambda part: _fewer_layers, False),
        (lambda part: _fewer_layers, True),
    ):
        try:
            config = config_class(**_small(options, rule, consistent))
        except Exception as error:  # incompatible sizes
            problems.append(f"not built: {line(error)}")
            debug()
        else:
            yield config
    yield default


def build(model_class: type, config: Any, implementation: str) -> Any:
    """Returns the model with random weights, the same for every implementation."""
    config = copy.deepcopy(config)
    config._attn_implementation = implementation
    with contextlib.suppress(AttributeError):
        config._experts_implementation = "eager"  # the others do not support float64
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f} million parameters, at the smallest that was tried")
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in sorted(dict(model.named_parameters()).items()):
            if not weight.is_floating_point():
                continue
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim >= 2:  # spreads attention unevenly, which the default hardly does
                weight.copy_(noise / max(weight[0].numel(), 1) ** 0.5)
            else:
                ones = name.endswith("weight") or ("norm" in name.lower() and "bias" not in name)
                weight.copy_(0.2 * noise + (1.0 if ones else 0.0))
    return model
