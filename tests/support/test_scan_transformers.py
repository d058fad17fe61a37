"""Tests of the configurations, inputs and comparisons of scan_transformers.py."""

from __future__ import annotations

import pytest
import torch

import trifuse

transformers = pytest.importorskip("transformers")

import model_inputs  # noqa: E402
import scan_transformers  # noqa: E402
import small_models  # noqa: E402


def small(options: dict, **given: bool) -> dict:
    return small_models._small(options, lambda part: small_models._size, given.get("agree", True))


def test_equal_numbers_of_heads_stay_equal_and_others_stay_grouped() -> None:
    equal = small({"num_attention_heads": 32, "num_key_value_heads": 32})
    grouped = small({"num_attention_heads": 32, "num_key_value_heads": 8})
    assert equal["num_attention_heads"] == equal["num_key_value_heads"] == small_models.HEADS
    assert grouped["num_key_value_heads"] == small_models.KV_HEADS


def test_options_of_layers_follow_the_layers_that_are_kept() -> None:
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    options = {
        "num_hidden_layers": 6,
        "layer_types": kinds,
        "per_layer_config": {"5": {"head_dim": 512}},
        "num_kv_shared_layers": 2,
    }
    got = small(options)
    assert got["layer_types"] == ["sliding_attention", "full_attention"]
    assert got["per_layer_config"] == {1: {"head_dim": 512}}
    assert got["num_hidden_layers"] == 2
    assert got["num_kv_shared_layers"] == 0


def test_fewer_heads_keep_their_size_and_widths_of_parts_stay_equal() -> None:
    text = {"num_attention_heads": 32, "hidden_size": 4096, "head_dim": 128}
    vision = {"num_heads": 16, "hidden_size": 1280, "out_hidden_size": 4096}
    options = {"text_config": text, "vision_config": vision}
    got = small_models._small(options, lambda part: small_models._fewer_heads(part, options), True)
    assert got["text_config"]["hidden_size"] == 4 * 128
    assert got["text_config"]["head_dim"] == 128
    assert got["vision_config"]["hidden_size"] == 4 * 80
    assert got["vision_config"]["out_hidden_size"] == got["text_config"]["hidden_size"]


def test_sections_of_a_rotary_embedding_fill_half_a_head() -> None:
    got = small(
        {
            "num_attention_heads": 32,
            "hidden_size": 4096,
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5},
        }
    )
    head = got["hidden_size"] // got["num_attention_heads"]
    assert sum(got["rope_parameters"]["mrope_section"]) == head * 0.5 / 2


@pytest.mark.parametrize("config_class", ["BertConfig", "T5Config", "ViTConfig"])
def test_a_model_runs_with_the_first_inputs_that_fit(config_class: str) -> None:
    config_class = getattr(transformers, config_class)
    config = next(small_models.configurations(config_class, []))
    model_class = transformers.MODEL_MAPPING[config_class]
    model = small_models.build(model_class, config, "eager")
    given = next(model_inputs.inputs(model))
    run = scan_transformers.Run("whole", given)
    assert all(x.isfinite().all() for x in scan_transformers.call(model, run, torch.float32))


def test_in_double_replaces_float32_where_code_names_it() -> None:
    with scan_transformers.InDouble():
        assert torch.ones(2, dtype=torch.float32).dtype == torch.float64
        assert torch.ones(2, dtype=torch.float16).float().dtype == torch.float64
        assert torch.ones(2, dtype=torch.float16).dtype == torch.float16


def test_a_wrong_attention_is_reported() -> None:
    from trifuse import huggingface

    config_class, model_class = transformers.BertConfig, transformers.BertModel
    forward = huggingface.attention_forward

    def wrong(*args, **kwargs):
        out, weights = forward(*args, **kwargs)
        return out * 1.01, weights

    huggingface.register()
    try:
        huggingface.attention_forward = wrong
        got = scan_transformers.examine("bert", config_class, model_class)
    finally:
        huggingface.attention_forward = forward
        huggingface.register()
    assert got.outcome == "WRONG"


def test_a_wrong_gradient_of_a_fused_model_is_reported(monkeypatch) -> None:
    fuse = trifuse.fuse

    def wrong(model, unpad):
        fuse(model, unpad=unpad)
        next(model.parameters()).register_hook(lambda grad: grad * 1.01)

    monkeypatch.setattr(trifuse, "fuse", wrong)
    config_class, model_class = transformers.BertConfig, transformers.BertModel
    got = scan_transformers.examine("bert", config_class, model_class, fused=True)
    assert got.outcome == "WRONG"
    assert got.detail.startswith("gradients, whole")
