"""Families of transformers: the table in the docs, images and speech, and the report's reasons."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from model_gradients import weighted_gradients
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

import families
import transformers
import transformers_versions
from model_sizes import PADDED_SIZES

import trifuse
from trifuse import huggingface

pytestmark = pytest.mark.usefixtures("torch_multiplies")

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
KEEPS = families.KEEP, families.KEEP.flip(1)  # padded right, padded left


def test_the_table_in_the_docs_has_all_families():
    section = PAGE.read_text().split(families.BEGIN)[1].split(families.END)[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert [row.split()[1] for row in rows] == list(families.FAMILIES)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_the_table_in_the_docs_is_true(name):
    assert families.row(name) in PAGE.read_text().splitlines()


def run(model: nn.Module, keep: Tensor) -> Tensor:
    """The results at real tokens, or at real frames of a sound."""
    given = families.inputs(model, keep)
    out = model(**given)[0]
    if model.main_input_name == "input_values":
        out = out[model._get_feature_vector_attention_mask(out.shape[1], given["attention_mask"])]
    elif model.main_input_name == "input_ids" and not model.config.is_encoder_decoder:
        out = out[keep]
    return out


def gradients(model: nn.Module, keep: Tensor) -> Tensor:
    return weighted_gradients(model, run(model, keep))


@pytest.mark.parametrize("unpad", [False, True], ids=["padded", "unpad"])
@pytest.mark.parametrize("name", families.FAMILIES)
def test_results_and_gradients(name, unpad):
    """They are torch's, with padding on either side, and after the way back to the bit."""
    model = families.build(name)
    wanted = [(run(model, keep), gradients(model, keep)) for keep in KEEPS]
    report = trifuse.fuse(model, unpad=unpad)
    without = {each.path for each in report.swapped if each.after.endswith("without padding")}
    assert without <= set(report.unpadded)
    for keep, (out, grads) in zip(KEEPS, wanted, strict=True):
        torch.testing.assert_close(run(model, keep), out, rtol=1e-5, atol=5e-6)
        torch.testing.assert_close(gradients(model, keep), grads, rtol=1e-5, atol=5e-6)
    report.revert()
    for keep, (out, _) in zip(KEEPS, wanted, strict=True):
        assert torch.equal(run(model, keep), out)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_attention_by_name(name):
    """A model made with our attention computes what others do, or says that it can't have it."""
    huggingface.register()
    wanted, options = families.build(name), dict(families.FAMILIES[name])
    try:
        model = families.build(name, options | {"attn_implementation": "trifuse"})
    except ValueError as refused:
        assert "can't serve it" in str(refused)  # noqa: PT017
        return
    for keep in KEEPS:
        torch.testing.assert_close(run(model, keep), run(wanted, keep), rtol=1e-5, atol=5e-6)


ELSEWHERE = "only a layer's last sum is joined with a norm in another module"
AROUND = "and the layers may be called without it"
LAST = "the sum at its end, because no norm was found that takes it"
# The sums that stay torch's, as the report has them: how many, where, and why.
SUMS = {
    "Pegasus": [
        (
            1,
            "PegasusEncoder",
            f"the sum before PegasusEncoderLayer.self_attn_layer_norm, because {ELSEWHERE}",
        ),
        (
            1,
            "PegasusDecoder",
            f"the sum before PegasusDecoderLayer.self_attn_layer_norm, because {ELSEWHERE}",
        ),
    ],
    "GPT2": [(1, "GPT2Model", f"the sum before GPT2Block.ln_1, because {ELSEWHERE}")],
    "OPT": [
        (
            1,
            "OPTDecoder",
            f"the sum before OPTDecoderLayer.self_attn_layer_norm, because {ELSEWHERE}",
        )
    ],
    "GPTNeoX": [
        (
            2,
            "GPTNeoXLayer",
            "the sum at its end, because the code of GPTNeoXLayer ends with "
            "`if self.use_parallel_residual`",
        )
    ],
    "StableLm": [
        (
            2,
            "StableLmDecoderLayer",
            "the sum at its end, because the code of StableLmDecoderLayer ends with "
            "`if self.use_parallel_residual`",
        )
    ],
    "GPTBigCode": [
        (1, "GPTBigCodeModel", f"the sum before GPTBigCodeBlock.ln_1, because {ELSEWHERE}")
    ],
    "Gemma4Text": [
        (
            2,
            "Gemma4TextDecoderLayer",
            "the sum at its end, because the code of Gemma4TextDecoderLayer ends with "
            "`hidden_states *= self.layer_scalar`",
        )
    ],
    "ViT": [(1, "ViTEmbeddings", f"the sum before ViTLayer.layernorm_before, because {ELSEWHERE}")],
    "DeiT": [
        (1, "DeiTEmbeddings", f"the sum before DeiTLayer.layernorm_before, because {ELSEWHERE}")
    ],
    "Dinov2": [
        (
            1,
            "Dinov2Layer",
            f"with gradients, the sum at its end, because the next norm is Dinov2Model's, {AROUND}",
        ),
        (1, "Dinov2Embeddings", f"the sum before Dinov2Layer.norm1, because {ELSEWHERE}"),
    ],
    "DINOv3ViT": [
        (
            1,
            "DINOv3ViTLayer",
            "with gradients, the sum at its end, because the next norm is DINOv3ViTModel's, "
            f"{AROUND}",
        ),
    ],
    "Swin": [
        (
            1,
            "SwinLayer",
            f"with gradients, the sum at its end, because the next norm is SwinModel's, {AROUND}",
        )
    ],
    "Swinv2": [
        (
            1,
            "Swinv2Layer",
            f"with gradients, the sum at its end, because the next norm is Swinv2Model's, {AROUND}",
        ),
        (1, "Swinv2Layer", LAST),
    ],
    "Beit": [(1, "BeitLayer", LAST)],
    "Data2VecVision": [(1, "Data2VecVisionLayer", LAST)],
    "SiglipVision": [
        (
            1,
            "SiglipEncoderLayer",
            "with gradients, the sum at its end, because the next norm is SiglipVisionModel's, "
            f"{AROUND}",
        ),
        (
            1,
            "SiglipVisionEmbeddings",
            f"the sum before SiglipEncoderLayer.layer_norm1, because {ELSEWHERE}",
        ),
    ],
    "SiglipText": [
        (
            1,
            "SiglipEncoderLayer",
            "with gradients, the sum at its end, because the next norm is SiglipTextModel's, "
            f"{AROUND}",
        ),
        (
            1,
            "SiglipTextEmbeddings",
            f"the sum before SiglipEncoderLayer.layer_norm1, because {ELSEWHERE}",
        ),
    ],
    "CLIPVision": [
        (1, "CLIPEncoderLayer", LAST),
        (
            1,
            "CLIPVisionEmbeddings",
            f"the sum before CLIPVisionModel.pre_layrnorm, because {ELSEWHERE}",
        ),
    ],
    "CLIPText": [
        (
            1,
            "CLIPEncoderLayer",
            "with gradients, the sum at its end, because the next norm is CLIPTextModel's, "
            f"{AROUND}",
        ),
        (
            1,
            "CLIPTextEmbeddings",
            f"the sum before CLIPEncoderLayer.layer_norm1, because {ELSEWHERE}",
        ),
    ],
    "Whisper": [
        (
            1,
            "WhisperEncoder",
            f"the sum before WhisperEncoderLayer.self_attn_layer_norm, because {ELSEWHERE}",
        ),
        (
            1,
            "WhisperDecoder",
            f"the sum before WhisperDecoderLayer.self_attn_layer_norm, because {ELSEWHERE}",
        ),
    ],
    "Hubert": [
        (
            1,
            "HubertEncoderStableLayerNorm",
            f"the sum before HubertEncoderLayerStableLayerNorm.layer_norm, because {ELSEWHERE}",
        )
    ],
    "MegatronBert": [
        (
            1,
            "MegatronBertEmbeddings",
            f"the sum before MegatronBertAttention.ln, because {ELSEWHERE}",
        )
    ],
    "RemBert": [
        (
            1,
            "RemBertEmbeddings",
            "except in inference on a CPU, the sum before its LayerNorm, because its code adds in "
            "place",
        )
    ],
    "DebertaV2": [
        (
            1,
            "DebertaV2Embeddings",
            "the sum before its LayerNorm, because its code adds under a condition",
        )
    ],
}
# In GPT-NeoX's model two norms take the sum of the first layer, in parallel.
TWICE = {"GPTNeoX": 1}


@pytest.mark.parametrize("name", families.FAMILIES)
def test_no_norm_and_no_sum_of_a_layer_stay_torchs(name):
    """But for sums that the report has, with the cause."""
    model = families.build(name)
    report = trifuse.fuse(model)
    assert not report.norms
    counts = families.count(model)
    assert counts["torch's norms"] == 0
    if transformers_versions.is_4():  # its code differs, in BERT's embeddings too
        return
    found = Counter((each.module, each.reason) for each in report.sums)
    assert [(alike, *each) for each, alike in found.items()] == SUMS.get(name, [])
    taken = [each for each in report.sums if each.reason != LAST and "with grad" not in each.reason]
    assert counts["torch's sums"] == len(taken) + TWICE.get(name, 0)


def test_rows_of_sums():
    text = str(trifuse.fuse(families.build("OPT"))).splitlines()
    assert [" ".join(line.split()) for line in text if "sum" in line] == [
        "(1 sum) OPTDecoder as before: the sum before OPTDecoderLayer.self_attn_layer_norm, "
        "because only a layer's last sum is joined with a norm in another module"
    ]
    text = str(trifuse.fuse(families.build("StableLm"))).splitlines()
    assert [" ".join(line.split()) for line in text if "sum" in line] == [
        "(2 sums) StableLmDecoderLayer as before: the sum at its end, because the code of "
        "StableLmDecoderLayer ends with `if self.use_parallel_residual`"
    ]


NORMS = {"CLIPText": "layer_norm2", "Dinov2": "norm2", "SiglipVision": "layer_norm2"}


@pytest.mark.parametrize("name", NORMS)
def test_the_last_sum_is_reported_if_it_stays(name):
    """The norm after it belongs to the model that holds the stack."""
    model = families.build(name)
    *_, last = (each for each in model.modules() if type(each).__name__.endswith("Layer"))
    last.forward = last.forward
    report = trifuse.fuse(model)
    kind = type(last).__name__
    found = [(model.get_submodule(left.path), left.reason) for left in report.sums]
    assert [(layer, reason) for layer, reason in found if layer is last] == [
        (last, f"the sum at its end, because the forward of this {kind} was replaced"),
        (last, f"the sum before its {NORMS[name]}, because its forward was replaced"),
    ]
    assert len(found) == families.count(model)["torch's sums"] == 3  # that of embeddings too


def test_sums_of_layers_that_are_left_are_reported():
    model = families.build("ViT")
    model.layers[0].forward = model.layers[0].forward
    report = trifuse.fuse(model)
    assert [(left.path, left.module, left.reason) for left in report.sums] == [
        (
            "layers.0",
            "ViTLayer",
            "the sum at its end, because the forward of this ViTLayer was replaced",
        ),
        (
            "embeddings",
            "ViTEmbeddings",
            "the sum before ViTLayer.layernorm_before, because only a layer's last sum is joined "
            "with a norm in another module",
        ),
        (
            "layers.0",
            "ViTLayer",
            "the sum before its layernorm_after, because its forward was replaced",
        ),
    ]
    assert families.count(model)["torch's sums"] == 3


class Torchs(TorchDispatchMode):
    """Counts torch's norms, softmaxes and dropouts, by what their operations are called."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts["norm"] += families.is_of_norm(str(func), args)
        for name in ("_softmax", "native_dropout", "bernoulli"):
            self.counts[name] += str(func).startswith(f"aten.{name}")
        return func(*args, **(kwargs or {}))


# The head of SigLIP's images asks torch's module of attention for its weights, and takes no notice
# of them. Routers have a softmax over their experts, in each layer with experts.
EXPERTS = ("Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "GraniteMoe", "GptOss", "Ernie4_5_Moe")
SOFTMAXES = {"SiglipVision": 1, "DeepseekV2": 1, "Mistral4": 1, "Phimoe": 4} | dict.fromkeys(
    EXPERTS, 2
)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_what_stays_torchs_in_training(name):
    """With the padding and, where it can be left out, without."""
    model = families.build(name).train()
    given = families.inputs(model)
    with Torchs() as before:
        model(**given)
    assert before.counts["norm"] > 0
    for unpad in (False, True):
        if not trifuse.fuse(model, unpad=unpad).unpadded and unpad:
            continue
        with Torchs() as torchs:
            model(**given)
        assert +torchs.counts == +Counter(_softmax=SOFTMAXES.get(name, 0))


def test_norms_that_stay_are_reported_with_the_reason():
    model = families.build("ViT")
    for layer in model.layers:
        layer.layernorm_before.forward = layer.layernorm_before.forward
    replaced = "its forward was replaced on the instance"
    report = trifuse.fuse(model)
    assert [(norm.path, norm.module, norm.reason) for norm in report.norms] == [
        ("layers.0.layernorm_before", "ViTLayer.layernorm_before", replaced),
        ("layers.1.layernorm_before", "ViTLayer.layernorm_before", replaced),
    ]
    (line,) = (line for line in str(report).splitlines() if "norms)" in line)
    before = ["(2", "norms)", "ViTLayer.layernorm_before", "as", "before:"]
    assert line.split() == [*before, *replaced.split()]


def test_each_stack_that_computes_padding_is_reported_with_the_reason(warned):
    """The encoder leaves it out, the decoder can't."""
    halves = [
        transformers.RobertaConfig(**PADDED_SIZES, is_decoder=decoder, add_cross_attention=decoder)
        for decoder in (False, True)
    ]
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*halves)
    report = trifuse.fuse(transformers.EncoderDecoderModel(config), unpad=True)
    assert report.unpadded == ["encoder", "encoder.encoder"]
    (padded,) = report.padded
    assert padded == ("decoder.roberta.encoder", "RobertaEncoder", "its attention is causal")
    assert warned == ["RobertaEncoder computes padding too, because its attention is causal"]
    assert "computes padding too: its attention is causal" in str(report)


def test_an_attention_whose_code_mixes_tokens_is_the_reason():
    """ConvBERT's attention has a convolution over the tokens beside its softmax."""
    convbert = families.build("ConvBert", PADDED_SIZES | {"embedding_size": 32})
    (padded,) = trifuse.fuse(convbert, unpad=True).padded
    assert padded.path == "encoder"
    assert padded.reason.endswith(
        "ConvBertSelfAttention, which isn't known to treat tokens one by one: it uses "
        "hidden_states.transpose"
    )


@pytest.mark.parametrize("name", ["GraniteMoe", "Mixtral"])
def test_recorded_weights_of_experts(name):
    """A stack that records them computes padding too, as transformers does."""
    model = families.build(name)
    given = families.inputs(model) | {"output_router_logits": True}
    wanted = model(**given)
    trifuse.fuse(model, unpad=True)
    out = model(**given)
    keep = families.KEEP
    torch.testing.assert_close(out[0][keep], wanted[0][keep], rtol=1e-4, atol=1e-4)
    for a, e in zip(out.router_logits, wanted.router_logits, strict=True):
        kept = keep.flatten()
        a, e = (t.reshape(-1, t.shape[-1])[kept] for t in (a, e))
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)
