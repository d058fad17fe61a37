"""Generation by fused models: greedy and with beams, with dynamic and static caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers_versions
from model_sizes import (
    BLOOM_SIZES,
    DEEPSEEK_SIZES,
    ERNIE_EXPERTS,
    EXPERTS,
    GEMMA4_SIZES,
    GPT_SIZES,
    GROUPED_QUERIES,
    GROWING_SCORES,
    MPT_SIZES,
    OPT_SIZES,
    PADDED_SIZES,
    SECTIONS,
    SIZES,
    T5_SIZES,
    TRANSLATION_SIZES,
    WHISPER_SIZES,
)
from torch import Tensor

import trifuse

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("torch_multiplies")

GROUPED = SIZES | GROUPED_QUERIES | {"pad_token_id": 0}
TWO_LAYERS = {"n_layer": 2, "bos_token_id": 1, "eos_token_id": 2}
# The last two layers read the keys of others, and compute the last query of a prompt alone.
SHARED_KEYS = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
ALIBI = "FalconForCausalLM with ALiBi"
IMAGES = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "out_hidden_size": 32,
    "patch_size": 4,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
# By the class of a model: its configuration's class, and the configuration.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("Llama", GROUPED),
    "MistralForCausalLM": ("Mistral", GROUPED | {"sliding_window": 4}),
    "Qwen3ForCausalLM": ("Qwen3", GROUPED | {"head_dim": 8}),
    "Qwen2ForCausalLM": ("Qwen2", GROUPED),
    "Phi3ForCausalLM": ("Phi3", GROUPED),
    "Gemma2ForCausalLM": ("Gemma2", GROUPED | {"head_dim": 8, "sliding_window": 4}),
    "Gemma3ForCausalLM": ("Gemma3Text", GROUPED | {"head_dim": 8, "sliding_window": 4}),
    "Gemma4ForCausalLM": ("Gemma4Text", GROUPED | GEMMA4_SIZES | SHARED_KEYS),
    "Glm4ForCausalLM": ("Glm4", GROUPED | {"head_dim": 8}),
    "GPTNeoXForCausalLM": ("GPTNeoX", PADDED_SIZES),
    "StableLmForCausalLM": ("StableLm", GROUPED),
    "CohereForCausalLM": ("Cohere", GROUPED),
    "OlmoForCausalLM": ("Olmo", GROUPED),
    "NemotronForCausalLM": ("Nemotron", GROUPED),
    "PersimmonForCausalLM": ("Persimmon", PADDED_SIZES),
    "GPTBigCodeForCausalLM": ("GPTBigCode", GPT_SIZES | TWO_LAYERS),
    "MixtralForCausalLM": ("Mixtral", GROUPED | EXPERTS),
    "Qwen2MoeForCausalLM": (
        "Qwen2Moe",
        GROUPED | EXPERTS | {"shared_expert_intermediate_size": 16},
    ),
    "Qwen3MoeForCausalLM": ("Qwen3Moe", GROUPED | EXPERTS | {"head_dim": 8}),
    "OlmoeForCausalLM": ("Olmoe", GROUPED | EXPERTS),
    "GraniteMoeForCausalLM": ("GraniteMoe", GROUPED | EXPERTS),
    "GptOssForCausalLM": ("GptOss", GROUPED | EXPERTS | {"head_dim": 8, "sliding_window": 4}),
    "DeepseekV2ForCausalLM": (
        "DeepseekV2",
        DEEPSEEK_SIZES | {"topk_method": "group_limited_greedy"},
    ),
    "DeepseekV3ForCausalLM": ("DeepseekV3", DEEPSEEK_SIZES),
    "PhimoeForCausalLM": ("Phimoe", GROUPED | EXPERTS),
    "Ernie4_5_MoeForCausalLM": ("Ernie4_5_Moe", GROUPED | ERNIE_EXPERTS),
    "Mistral4ForCausalLM": ("Mistral4", DEEPSEEK_SIZES | GROWING_SCORES),
    "NanoChatForCausalLM": ("NanoChat", GROUPED),
    "Qwen3VLForConditionalGeneration": (
        "Qwen3VL",
        {"text_config": GROUPED | SECTIONS | {"head_dim": 8}, "vision_config": IMAGES},
    ),
    "GPT2LMHeadModel": ("GPT2", GPT_SIZES | TWO_LAYERS),
    "OPTForCausalLM": ("OPT", OPT_SIZES),
    "BloomForCausalLM": ("Bloom", BLOOM_SIZES),
    "MptForCausalLM": ("Mpt", MPT_SIZES),
    "FalconForCausalLM": ("Falcon", SIZES),
    ALIBI: ("Falcon", SIZES | {"alibi": True, "attn_implementation": "eager"}),
    "CodeGenForCausalLM": ("CodeGen", GPT_SIZES | TWO_LAYERS | {"rotary_dim": 4}),
    "GPTJForCausalLM": ("GPTJ", GPT_SIZES | TWO_LAYERS | {"rotary_dim": 4}),
    "BartForConditionalGeneration": ("Bart", TRANSLATION_SIZES),
    "MBartForConditionalGeneration": ("MBart", TRANSLATION_SIZES),
    "MarianMTModel": ("Marian", TRANSLATION_SIZES),
    "PegasusForConditionalGeneration": ("Pegasus", TRANSLATION_SIZES),
    "T5ForConditionalGeneration": ("T5", T5_SIZES),
    "UMT5ForConditionalGeneration": ("UMT5", T5_SIZES),
    "WhisperForConditionalGeneration": ("Whisper", WHISPER_SIZES),
}
CACHES = "dynamic", "static"
CASES = [(name, cache) for name in FAMILIES for cache in CACHES]
CASES.remove((ALIBI, "static"))
if transformers_versions.is_4():  # whose static caches take values as long as their keys
    CASES.remove(("DeepseekV2ForCausalLM", "static"))
    CASES.remove(("DeepseekV3ForCausalLM", "static"))
    CASES.remove(("OlmoeForCausalLM", "static"))  # which raises in transformers
IDS = torch.randint(5, 97, (2, 7), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
MASK[1, :3] = 0
SPECTRA = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(1))


def build(name: str) -> Any:
    torch.manual_seed(0)
    family, options = FAMILIES[name]
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"this version of transformers has no {family}")
    config = getattr(transformers, f"{family}Config")(**options)
    model = getattr(transformers, name.split()[0])(config).eval()
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data.normal_(std=0.5)  # so that tokens depend on those before
    return model


def generate(
    model: Any, beams: int, cache: str, mask: Tensor = MASK, steps: int = 6
) -> tuple[Tensor, Tensor]:
    """Returns the tokens, and the logits of each step."""
    given = {"attention_mask": mask} if model.main_input_name == "input_ids" else {}
    made = model.generate(
        IDS if given else SPECTRA,
        **given,
        max_new_tokens=steps,
        min_new_tokens=steps,
        num_beams=beams,
        do_sample=False,
        cache_implementation=cache,
        disable_compile=True,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return made.sequences, torch.stack(made.logits)


@pytest.mark.parametrize("beams", [1, 3], ids=["greedy", "beams"])
@pytest.mark.parametrize(("name", "cache"), CASES)
@pytest.mark.covering
def test_tokens_and_logits(name, cache, beams):
    model = build(name)
    tokens, logits = generate(model, beams, cache)
    if model.main_input_name == "input_ids":
        _, others = generate(model, beams, cache, torch.ones_like(MASK), steps=1)
        assert (others[0] - logits[0]).abs().max() > 1e-3  # the padding matters
    reports = []
    for unpad in (False, True):
        reports.append(trifuse.fuse(model, unpad=unpad))
        got, its_logits = generate(model, beams, cache)
        assert torch.equal(got, tokens)
        torch.testing.assert_close(its_logits, logits, rtol=1e-4, atol=1e-4)
    for report in reversed(reports):
        report.revert()
    assert torch.equal(generate(model, beams, cache)[1], logits)


@pytest.mark.parametrize("unpad", [None, False, True], ids=["transformers", "fused", "unpad"])
def test_a_static_cache_beside_alibi_raises(unpad):
    """transformers makes no ALiBi of a static cache's mask; a fused model does what it does."""
    model = build(ALIBI)
    if unpad is not None:
        trifuse.fuse(model, unpad=unpad)
    with pytest.raises(ValueError, match="too many values to unpack"):
        generate(model, 1, "static")
