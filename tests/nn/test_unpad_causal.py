"""Decoders of transformers without the padding of their texts: in training, and for a prompt."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from model_sizes import (
    DEEPSEEK_SIZES,
    ERNIE_EXPERTS,
    EXPERTS,
    GEMMA4_SIZES,
    GPT_SIZES,
    GROUPED_QUERIES,
    GROWING_SCORES,
    LONGCAT_EXPERTS,
    PADDED_SIZES,
    SECTIONS,
    SIZES,
)
from torch import Tensor, nn

import trifuse

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("torch_multiplies")

B, L, LAYERS = 3, 10, 2
TEXT = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
GROUPED = SIZES | GROUPED_QUERIES | TEXT
FAMILIES: dict[str, dict[str, Any]] = {
    "GPT2": GPT_SIZES | {"n_layer": 2, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0},
    "Llama": GROUPED,
    "Mistral": GROUPED | {"sliding_window": 4},
    "Qwen2": GROUPED,
    "Qwen3": GROUPED | {"head_dim": 8},
    "Phi3": GROUPED,
    "Cohere": GROUPED,
    "Gemma2": GROUPED | {"head_dim": 8, "sliding_window": 4},
    "Gemma3Text": GROUPED | {"head_dim": 8, "sliding_window": 4},
    "Glm4": GROUPED | {"head_dim": 8},
    "GPTNeoX": PADDED_SIZES,
    "StableLm": GROUPED,
    "Olmo": GROUPED | {"clip_qkv": 0.5},
    "Nemotron": GROUPED,
    "Persimmon": PADDED_SIZES,
    "DiffLlama": GROUPED,
    "GPTBigCode": GPT_SIZES | TEXT | {"n_layer": 2},
    "Mixtral": GROUPED | EXPERTS,
    "Qwen2Moe": GROUPED | EXPERTS | {"shared_expert_intermediate_size": 16},
    "Olmoe": GROUPED | EXPERTS,
    "GptOss": GROUPED | EXPERTS | {"head_dim": 8, "sliding_window": 4},
    "DeepseekV2": DEEPSEEK_SIZES | TEXT | {"topk_method": "group_limited_greedy"},
    "DeepseekV3": DEEPSEEK_SIZES | TEXT,
    "Phimoe": GROUPED | EXPERTS,
    "Ernie4_5_Moe": GROUPED | ERNIE_EXPERTS,
    "LongcatFlash": DEEPSEEK_SIZES | TEXT | LONGCAT_EXPERTS,
    "Mistral4": DEEPSEEK_SIZES | TEXT | GROWING_SCORES,
    "Glm4vText": GROUPED | SECTIONS,
}
RIGHT = torch.arange(L) < torch.tensor([L, 6, 3])[:, None]
LEFT = RIGHT.flip(1)
TOKENS = int(RIGHT.sum())


def build(name: str, kind: str = "Model") -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**FAMILIES[name])
    names = {"GPT2ForCausalLM": "GPT2LMHeadModel", "Gemma3TextForCausalLM": "Gemma3ForCausalLM"}
    model = getattr(transformers, names.get(name + kind, name + kind))(config).eval()
    for module in model.modules():
        if "Norm" in type(module).__name__ and getattr(module, "weight", None) is not None:
            module.weight.data.uniform_(0.5, 1.5)  # whose default may hide the weight
    return model


def attentions(name: str) -> int:
    return LAYERS * (2 if name == "DiffLlama" else 1)


def ids(length: int = L) -> Tensor:
    return torch.randint(5, 97, (B, length), generator=torch.Generator().manual_seed(1))


def run(model: nn.Module, keep: Tensor, **options: Any) -> Any:
    return model(input_ids=ids(), attention_mask=keep.long(), **{"use_cache": False} | options)


def gradients(model: nn.Module, keep: Tensor) -> Tensor:
    """Gradients by the real tokens; weighted, since a norm's sum has almost no gradient."""
    model.zero_grad()
    out = run(model, keep).last_hidden_state[keep]
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return grads / grads.abs().max()


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("keep", [RIGHT, LEFT], ids=["right", "left"])
@pytest.mark.parametrize("name", FAMILIES)
def test_results_and_gradients(name, keep, packed, warned):
    model = build(name)
    wanted, grads = run(model, keep).last_hidden_state, gradients(model, keep)
    report = trifuse.fuse(model, unpad=True)
    assert report.unpadded == trifuse.explain(model).unpadded == [""]
    assert not report.padded
    out = run(model, keep).last_hidden_state
    assert packed == [TOKENS] * attentions(name)
    close(out[keep], wanted[keep])
    assert out[~keep].eq(0).all()
    close(gradients(model, keep), grads)
    whole = torch.ones_like(keep)
    packed.clear()
    run(model, whole)
    assert not packed
    assert not warned
    report.revert()
    assert torch.equal(run(model, keep).last_hidden_state, wanted)


@pytest.mark.parametrize("keep", [RIGHT, LEFT], ids=["right", "left"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_fills_the_cache(name, keep, packed, warned):
    """Its keys and values are in the places of the padded batch; the next step finds them."""
    model = build(name)

    def read_and_step() -> list[Tensor]:
        first = run(model, keep, use_cache=True)
        cache = getattr(first, "cache", None) or first.past_key_values
        held = [part for layer in cache.layers for part in (layer.keys, layer.values)]
        at = [keep[:, -part.shape[2] :] for part in held]  # a window's cache keeps the last ones
        kept = [x.transpose(1, 2)[real] for x, real in zip(held, at, strict=True)]
        mask = torch.cat([keep, torch.ones(B, 1, dtype=torch.bool)], 1).long()
        options = {argument_of_cache(model): cache}
        step = model(ids(1), attention_mask=mask, use_cache=True, **options).last_hidden_state
        return [first.last_hidden_state[keep], step, *kept]

    with torch.no_grad():
        wanted = read_and_step()
        trifuse.fuse(model, unpad=True)
        got = read_and_step()
    assert packed == [TOKENS] * attentions(name)
    assert not warned
    for ours, theirs in zip(got, wanted, strict=True):
        close(ours, theirs)


def argument_of_cache(model: nn.Module) -> str:
    """The name of the argument, which differs between versions of transformers."""
    names = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in names else "past_key_values"


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize(
    "name", ["GPT2", "Llama", "Mistral", "Gemma3Text", "Olmo", "GptOss", "DeepseekV3"]
)
def test_generation(name, beams, packed, warned):
    model = build(name, "ForCausalLM")
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": beams}
    given = {"input_ids": ids(), "attention_mask": LEFT.long()}
    wanted = model.generate(**given, **options)
    trifuse.fuse(model, unpad=True)
    assert torch.equal(model.generate(**given, **options), wanted)
    assert packed == [TOKENS * (beams if packed[0] > TOKENS else 1)] * LAYERS
    assert not warned


@pytest.mark.parametrize("keep", [RIGHT, LEFT], ids=["right", "left"])
def test_features_of_images_between_layers(keep, packed, warned):
    """Qwen3-VL adds them to the hidden states of an image's tokens after each of its layers."""
    torch.manual_seed(0)
    config = transformers.Qwen3VLTextConfig(**GROUPED, **SECTIONS, head_dim=8)
    model = transformers.Qwen3VLTextModel(config).eval()
    image = keep & keep.roll(2, 1)
    features = [torch.randn(int(image.sum()), 32, requires_grad=True) for _ in range(LAYERS)]
    options = {"visual_pos_masks": image, "deepstack_visual_embeds": features}
    weights = torch.randn(TOKENS, 32)

    def results() -> list[Tensor]:
        out = run(model, keep, **options).last_hidden_state[keep]
        inputs = [*features, *model.parameters()]
        return [out, *torch.autograd.grad(out, inputs, weights)]

    wanted = results()
    assert trifuse.fuse(model, unpad=True).unpadded == [""]
    for mine, theirs in zip(results(), wanted, strict=True):
        close(mine / theirs.abs().max(), theirs / theirs.abs().max())
    assert packed == [TOKENS] * LAYERS
    assert not warned


@pytest.mark.parametrize("unpad", [False, True])
def test_layers_that_read_the_keys_of_others(unpad, packed, warned):
    """Gemma 4's last layers, which compute only the queries whose logits are asked for."""
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"] * 2
    options = {"layer_types": kinds, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
    config = transformers.Gemma4TextConfig(**GROUPED | GEMMA4_SIZES | options)
    model = transformers.Gemma4ForCausalLM(config).eval()
    masks = {"whole": None, "right": RIGHT, "left": LEFT}

    def results(kind: str, logits: int) -> list[Tensor]:
        mask = None if masks[kind] is None else masks[kind].long()
        out = model(ids(), mask, logits_to_keep=logits).logits
        keep = torch.ones(B, L, dtype=torch.bool) if masks[kind] is None else masks[kind]
        out = out[keep[:, -out.shape[1] :]]
        grads = torch.autograd.grad(out.sin().sum(), list(model.parameters()))
        flat = torch.cat([grad.flatten() for grad in grads])
        return [out, flat / flat.abs().max()]

    calls = [(kind, logits) for kind in masks for logits in (0, 1, 2)]
    wanted = [results(*call) for call in calls]
    report = trifuse.fuse(model, unpad=unpad)
    assert report.unpadded == (["model"] if unpad else [])
    for (kind, logits), theirs in zip(calls, wanted, strict=True):
        packed.clear()
        for mine, each in zip(results(kind, logits), theirs, strict=True):
            close(mine, each)
        layers = 0 if kind == "whole" or not unpad else 2 if logits else 4
        assert packed == [TOKENS] * layers
    assert not warned


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_experts(experts, packed, warned):
    """Each way to compute them is packed, and logits of routers have rows for padding too."""
    model = build("Mixtral", "ForCausalLM")
    model.set_experts_implementation(experts)
    labels = ids().masked_fill(~RIGHT, -100)

    def losses(**options: Any) -> list[Tensor]:
        model.zero_grad()
        out = run(model, RIGHT, labels=labels, **options)
        out.loss.backward()
        gates = [layer.mlp.gate.weight.grad for layer in model.model.layers]
        return [out.loss, *gates, *filter(None, [out.aux_loss])]

    kinds: list[dict[str, Any]] = [{}, {"output_router_logits": True}, {}]
    wanted = [losses(**options) for options in kinds]
    trifuse.fuse(model, unpad=True)
    for options, theirs in zip(kinds, wanted, strict=True):
        packed.clear()
        for mine, each in zip(losses(**options), theirs, strict=True):
            close(mine, each)
        assert packed == ([] if options else [TOKENS] * LAYERS)
    assert len(warned) == 1


def test_experts_of_another_library_compute_padding(packed, warned, monkeypatch):
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward

    def others(*args: Any) -> Tensor:
        return batched_mm_experts_forward(*args)

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._local_mapping, "others", others)
    model = build("Mixtral")
    model.set_experts_implementation("others")
    (padded,) = trifuse.fuse(model, unpad=True).padded
    assert padded.reason.endswith('it uses experts_implementation="others"')
    run(model, RIGHT)
    assert not packed
    assert len(warned) == 1


def test_a_static_cache_computes_padding(packed, warned):
    model = build("Llama", "ForCausalLM")
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    options["disable_compile"] = True
    given = {"input_ids": ids(), "attention_mask": LEFT.long()}
    wanted = model.generate(**given, **options)
    trifuse.fuse(model, unpad=True)
    assert torch.equal(model.generate(**given, **options), wanted)
    assert not packed
    assert len(warned) == 1


def test_a_cache_that_holds_tokens_computes_padding(packed, warned):
    """A text that is read in two pieces."""
    model = build("Llama")
    keep = torch.cat([torch.ones(B, L, dtype=torch.bool), RIGHT], 1)

    def second() -> Tensor:
        whole = torch.ones(B, L, dtype=torch.long)
        first = model(ids(), attention_mask=whole, use_cache=True)
        cache = getattr(first, "cache", None) or first.past_key_values
        options = {argument_of_cache(model): cache}
        out = model(ids(), attention_mask=keep.long(), use_cache=True, **options)
        return out.last_hidden_state[RIGHT]

    with torch.no_grad():
        wanted = second()
        trifuse.fuse(model, unpad=True)
        close(second(), wanted)
    assert not packed
    (warning,) = warned
    assert warning.endswith("its layers get a cache, which use_cache=False would spare them")


def test_training_with_a_cache_and_checkpoints(packed):
    """A configuration asks for a cache unless told otherwise; checkpoints do without."""
    model = build("Llama").train()
    wanted = gradients(model, RIGHT)
    trifuse.fuse(model, unpad=True)
    model.gradient_checkpointing_enable()
    model.zero_grad()
    close(gradients(model, RIGHT), wanted)
    assert packed[:LAYERS] == [TOKENS] * LAYERS


def test_a_model_that_writes_its_attention_out_computes_padding(warned, packed):
    """BLOOM adds a mask of all pairs to its scores."""
    torch.manual_seed(0)
    config = transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=1, n_head=4)
    model = transformers.BloomModel(config).eval()
    wanted = run(model, RIGHT).last_hidden_state
    (padded,) = trifuse.fuse(model, unpad=True).padded
    assert padded.reason == "its attention is causal"
    close(run(model, RIGHT).last_hidden_state[RIGHT], wanted[RIGHT])
    assert not packed
    assert len(warned) == 1


def test_texts_of_images_are_packed(packed):
    """CLIP's text encoder is causal, and takes its result at the end of each text."""
    torch.manual_seed(0)
    config = transformers.CLIPTextConfig(**PADDED_SIZES, eos_token_id=2)
    model = transformers.CLIPTextModel(config).eval()
    wanted = model(input_ids=ids(), attention_mask=RIGHT.long()).last_hidden_state
    report = trifuse.fuse(model, unpad=True)
    assert not report.padded
    got = model(input_ids=ids(), attention_mask=RIGHT.long()).last_hidden_state
    close(got[RIGHT], wanted[RIGHT])
    assert packed == [TOKENS] * LAYERS


def test_a_state_space_model_keeps_its_padding(warned):
    """Its cache has no length, and its mixers don't treat tokens one by one."""
    torch.manual_seed(0)
    config = transformers.Mamba2Config(
        vocab_size=97, hidden_size=16, state_size=4, num_hidden_layers=1, num_heads=4, head_dim=8,
        n_groups=1, chunk_size=8,
    )  # fmt: skip
    model = transformers.Mamba2Model(config).eval()
    wanted = run(model, RIGHT, use_cache=True).last_hidden_state
    report = trifuse.fuse(model, unpad=True)
    assert "Mamba2Mixer" in report.padded[0].reason
    torch.testing.assert_close(run(model, RIGHT, use_cache=True).last_hidden_state, wanted)
    assert warned
    assert all("Mamba2Mixer" in said for said in warned)
