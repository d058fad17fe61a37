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


# How many norms take a sum of torch's. The layers of these families end inside a branch of the
# code, for blocks in parallel or not, or Gemma 4's with a product. The report says so.
APART = {"GPTNeoX": 3, "StableLm": 2, "Gemma4Text": 2}
# Here it is the sum of the embeddings, before the first layer, or in place in RemBERT's embeddings.
EMBEDDINGS_APART = ("OPT", "Whisper", "Hubert", "MegatronBert", "RemBert")


@pytest.mark.parametrize("name", families.FAMILIES)
def test_no_norm_and_no_sum_of_a_layer_stay_torchs(name):
    model = families.build(name)
    report = trifuse.fuse(model)
    assert not report.norms
    assert bool(report.sums) == (name in APART)
    counts = families.count(model)
    assert counts["torch's norms"] == 0
    if not transformers_versions.is_4():  # which adds embeddings in place in more families
        assert counts["torch's sums"] == APART.get(name, int(name in EMBEDDINGS_APART))


@pytest.mark.parametrize("name", ["CLIPText", "Dinov2", "SiglipVision"])
def test_the_last_sum_is_reported_if_it_stays(name):
    """The norm after it belongs to the model that holds the stack."""
    model = families.build(name)
    *_, last = (each for each in model.modules() if type(each).__name__.endswith("Layer"))
    last.forward = last.forward
    report = trifuse.fuse(model)
    assert [model.get_submodule(left.path) for left in report.sums] == [last]
    assert families.count(model)["torch's sums"] == 2  # that of its norms too


def test_sums_of_layers_that_are_left_are_reported():
    model = families.build("ViT")
    model.layers[0].forward = model.layers[0].forward
    report = trifuse.fuse(model)
    ((path, layer, reason),) = report.sums
    assert (path, layer) == ("layers.0", "ViTLayer")
    assert reason.startswith("the sum at its end; norms that take in a sum: ")
    assert reason in str(report)


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
    (line,) = (line for line in str(report).splitlines() if "layernorm_before" in line)
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
