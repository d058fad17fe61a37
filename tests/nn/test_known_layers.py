"""Layers without a rotation as one op: the bits of their parts, and when the parts run."""

from __future__ import annotations

import contextlib
import copy
import importlib
import pickle
from typing import Any

import pytest
import torch
from model_sizes import (
    BLOOM_SIZES,
    DISTILBERT_SIZES,
    MPT_SIZES,
    OPT_SIZES,
    SIZES,
    SPEECH_SIZES,
    TRANSLATION_SIZES,
    WHISPER_SIZES,
)
from rotary_models import DTYPES, keep, kept, only_parts, words
from rotary_models import call as run
from torch import Tensor, nn
from torch.nn.utils import prune

import trifuse
from trifuse.ops._linear_choice import is_available
from trifuse.recipes import known_statements

transformers = pytest.importorskip("transformers", minversion="5")

pytestmark = [
    pytest.mark.skipif(not is_available(torch.float32), reason="no C++ extension"),
    pytest.mark.usefixtures("our_product"),
]

FREEZE = pytest.mark.parametrize("freeze", [False, True])
# Heads of 16 features, whose scale is a power of two.
ESM = SIZES | {"num_attention_heads": 2, "position_embedding_type": "rotary", "pad_token_id": 1}
ESM |= {"mask_token_id": 4, "max_position_embeddings": 120}
IMAGES = SIZES | {"image_size": 12, "patch_size": 4, "hidden_act": "gelu"}
TEXTS = SIZES | {"max_position_embeddings": 16, "hidden_act": "gelu", "pad_token_id": 0}
GPT2_SIZES = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 200}
T5_SIZES = {"vocab_size": 97, "d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 48}
LONG = {"max_position_embeddings": 120}
# Two heads have 16 features each, whose scale, 1/4, is a power of two.
TWO_HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
SPEECH = SPEECH_SIZES | {"apply_spec_augment": False}
STABLE = SPEECH | {"do_stable_layer_norm": True}
TRANSLATION = TRANSLATION_SIZES | LONG | {"bos_token_id": 1, "eos_token_id": 2}
WHISPER = WHISPER_SIZES | TWO_HEADS | {"max_target_positions": 120}
OPT = OPT_SIZES | LONG | {"num_attention_heads": 2}
# By the name of a model, the arguments of its configuration.
FAMILIES: dict[str, dict[str, Any]] = {
    "DistilBert": DISTILBERT_SIZES,
    "Albert": TEXTS | {"embedding_size": 16},
    "ViT": IMAGES,
    "DeiT": IMAGES,
    "CLIPVision": IMAGES,
    "CLIPText": TEXTS | {"hidden_act": "quick_gelu", "bos_token_id": 1, "eos_token_id": 2},
    "SiglipVision": IMAGES,
    "SiglipText": TEXTS,
    "GPT2": GPT2_SIZES | {"bos_token_id": 1, "eos_token_id": 2},
    "MPNet": TEXTS,
    "T5Encoder": T5_SIZES,
    "T5Encoder, gated": T5_SIZES | {"feed_forward_proj": "gated-gelu"},
    "MT5Encoder": T5_SIZES,
    "Bart, encoder": TRANSLATION,
    "Bart, decoder": TRANSLATION,
    "Marian, encoder": TRANSLATION,
    "PLBart, decoder": TRANSLATION,
    "BlenderbotSmall, encoder": TRANSLATION,
    "MBart, encoder": TRANSLATION,
    "MBart, decoder": TRANSLATION,
    "Pegasus, encoder": TRANSLATION,
    "Blenderbot, decoder": TRANSLATION,
    "M2M100, encoder": TRANSLATION,
    "BioGpt": TEXTS | LONG,
    "Whisper, encoder": WHISPER,
    "Whisper, decoder": WHISPER,
    "Speech2Text, encoder": TRANSLATION | {"input_feat_per_channel": 8, "conv_channels": 32},
    "OPT": OPT,
    "OPT, norms last": OPT | {"do_layer_norm_before": False},
    "OPT, norms without weights": OPT | {"layer_norm_elementwise_affine": False},
    "Wav2Vec2": SPEECH,
    "Wav2Vec2, norms first": STABLE,
    "Hubert": SPEECH,
    "Hubert, norms first": STABLE,
    "Data2VecAudio": SPEECH,
    "UniSpeech, norms first": STABLE,
    "RemBert": TEXTS | {"input_embedding_size": 16},
    "MegatronBert": TEXTS,
    "RobertaPreLayerNorm": TEXTS,
    "XLMRobertaXL": TEXTS,
    "Esm": ESM,
    "Bloom": BLOOM_SIZES,
    "Mpt": MPT_SIZES | {"max_seq_len": 120},
    "Dinov2": IMAGES,
    "Dinov2, gated": IMAGES | {"use_swiglu_ffn": True, "drop_path_rate": 0.1},
    "Dinov2WithRegisters": IMAGES,
    "DINOv3ViT": IMAGES,
    "DINOv3ViT, gated": IMAGES | {"use_gated_mlp": True, "drop_path_rate": 0.1},
    "Beit": IMAGES,
    "Beit, without factors": IMAGES | {"layer_scale_init_value": 0.0, "drop_path_rate": 0.0},
}
OF_IMAGES = [name for name, sizes in FAMILIES.items() if "image_size" in sizes]
OF_SPEECH = [name for name, sizes in FAMILIES.items() if sizes in (SPEECH, STABLE)]
BERTS = ["RemBert", "MegatronBert", "RobertaPreLayerNorm", "XLMRobertaXL", "Esm"]
DECODERS = ["GPT2", "Bart, decoder", "MBart, decoder", "Whisper, decoder", "BioGpt", "Bloom", "Mpt"]
DECODERS += [name for name in FAMILIES if name.startswith("OPT")]


def build(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(0)
    family, _, part = name.partition(", ")
    config = getattr(transformers, f"{family.removesuffix('Encoder')}Config")
    config = config(**FAMILIES[name] | options)
    if part == "decoder":  # without an encoder
        model = getattr(transformers, f"{family}ForCausalLM")(config).get_decoder()
    else:
        model = getattr(transformers, f"{family}Model")(config)
        model = model.encoder if part == "encoder" else model
    model.eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.to(dtype)


def given(name: str, dtype: torch.dtype = torch.float32, length: int = 9) -> list[dict[str, Any]]:
    """Returns the arguments of calls: an image, or words or sounds with and without padding."""
    if name in OF_IMAGES:
        pixels = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))
        return [{"pixel_values": pixels.to(dtype)}]
    if name == "Whisper, encoder":
        spectra = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(1))
        return [{"input_features": spectra.to(dtype)}]
    if name == "Speech2Text, encoder":
        spectra = torch.randn(3, 4 * length, 8, generator=torch.Generator().manual_seed(1))
        masks = [None, keep(3, 4 * length).flip(1)]
        return [{"input_features": spectra.to(dtype), "attention_mask": mask} for mask in masks]
    if name in OF_SPEECH:
        sound = torch.randn(3, 4 * length, generator=torch.Generator().manual_seed(1)).to(dtype)
        masks = [None, keep(3, 4 * length).flip(1)]
        return [{"input_values": sound, "attention_mask": mask} for mask in masks]
    ids = words(3, length)
    masks = [None, keep(3, length) if name in DECODERS else keep(3, length).flip(1)]
    return [{"input_ids": ids, "attention_mask": mask} for mask in masks]


def call(model: Any, arguments: dict[str, Any]) -> Tensor:
    out: Tensor = model(**arguments).last_hidden_state
    return out


def by_parts(model: Any, arguments: dict[str, Any]) -> Tensor:
    with only_parts():
        return call(model, arguments)


# The same bits ------------------------------------------------------------------------------------


@FREEZE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.covering
def test_has_the_bits_of_its_parts(cpp_kernel, served, name, dtype, freeze):
    model = build(name, dtype)
    plain = copy.deepcopy(model)
    report = trifuse.fuse(model, freeze=freeze)
    with torch.no_grad():
        for arguments in given(name, dtype):
            actual = call(model, arguments)
            assert torch.equal(actual, by_parts(model, arguments))
            if dtype == torch.float32:
                torch.testing.assert_close(actual, call(plain, arguments), rtol=1e-4, atol=1e-4)
    assert served == [True] * 2 * len(given(name))
    report.revert()
    assert [type(module) for module in model.modules()] == [type(each) for each in plain.modules()]


@FREEZE
@pytest.mark.parametrize(
    "name",
    ["DistilBert", "Albert", "GPT2", "MPNet", "T5Encoder", "MBart, encoder", "OPT", *BERTS],
)
def test_without_padding(served, packed, name, freeze):
    model = build(name)
    trifuse.fuse(model, unpad=True, freeze=freeze)
    arguments = given(name)[1] | ({"use_cache": False} if name in DECODERS else {})
    with torch.no_grad():
        assert torch.equal(call(model, arguments), by_parts(model, arguments))
    assert served == [True] * 2
    assert packed == [int(arguments["attention_mask"].sum())] * 2  # the tokens of the parts


@FREEZE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.covering
def test_decodes_into_its_cache(cpp_kernel, served, name, dtype, freeze):
    model = build(name, dtype)
    trifuse.fuse(model, freeze=freeze)
    ids, mask = words(3, 100), keep(3, 100)

    def decode() -> tuple[list[Tensor], Any]:
        past, found, end = transformers.DynamicCache(config=model.config), [], 0
        for length in (7, 1, 1, 3, 70, 1):
            end += length
            found.append(run(model, ids[:, end - length : end], past, mask[:, :end]))
        return found, past

    with torch.inference_mode():
        actual, past = decode()
        with only_parts():
            expected, its_past = decode()
    assert served == [True] * 2 * 6
    assert all(map(torch.equal, actual, expected))
    assert all(map(torch.equal, kept(past), kept(its_past)))


@FREEZE
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(
    "kind",
    ["GPT2LMHeadModel", "BartForCausalLM", "OPTForCausalLM", "BloomForCausalLM", "MptForCausalLM"],
)
def test_generates(served, kind, beams, freeze):
    names = {"GPT2LMHeadModel": "GPT2", "BartForCausalLM": "Bart, decoder"}
    config = build(names.get(kind, kind.removesuffix("ForCausalLM"))).config
    model = getattr(transformers, kind)(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    options = {"num_beams": beams, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(words(2, 7), attention_mask=keep(2, 7), **options)
    trifuse.fuse(model, freeze=freeze)
    actual = model.generate(words(2, 7), attention_mask=keep(2, 7), **options)
    assert torch.equal(actual, wanted)
    assert served
    assert all(served)


@pytest.mark.parametrize("scaled", ["scale_attn_weights", "scale_attn_by_inverse_layer_idx"])
def test_scales_of_gpt2(served, scaled):
    model = build("GPT2", **{scaled: scaled.endswith("idx")})
    plain = copy.deepcopy(model)
    trifuse.fuse(model)
    arguments = given("GPT2")[1]
    with torch.no_grad():
        actual = call(model, arguments)
        assert torch.equal(actual, by_parts(model, arguments))
        torch.testing.assert_close(actual, call(plain, arguments), rtol=1e-4, atol=1e-4)
    assert served == [True] * 2


def first_layer(model: Any) -> Any:
    """Returns the first layer of a model of images."""
    holder = getattr(model, "encoder", model)
    return (holder.layers if hasattr(holder, "layers") else holder.layer)[0]


@pytest.mark.parametrize("name", ["CLIPVision", "ViT", "Dinov2", "Beit"])
def test_the_caller_may_make_an_attention_causal(served, name):
    """As with "sdpa"."""
    model = build(name)
    plain = first_layer(copy.deepcopy(model))
    trifuse.fuse(model)
    layer, x = first_layer(model), torch.randn(1, 5, 32)
    with torch.no_grad():
        for options in ({}, {"is_causal": True}, {"is_causal": False}):
            actual = layer(x, None, **options)
            with only_parts():
                assert torch.equal(actual, layer(x, None, **options))
            torch.testing.assert_close(actual, plain(x, None, **options), rtol=1e-4, atol=1e-4)
        assert not torch.equal(layer(x, None, is_causal=True), layer(x, None))
    assert served == [True] * 5


@pytest.mark.parametrize("name", ["CLIPVision", "SiglipVision", "ViT", "Dinov2", "Beit"])
def test_an_attention_marked_as_causal(served, name):
    """As with "sdpa"."""
    model = build(name)
    plain = first_layer(copy.deepcopy(model))
    trifuse.fuse(model)
    layer, x = first_layer(model), torch.randn(1, 5, 32)
    with torch.no_grad():
        before = layer(x, None)
        for each in (*layer.modules(), *plain.modules()):
            if hasattr(each, "is_causal"):
                each.is_causal = True
        actual = layer(x, None)
        with only_parts():
            assert torch.equal(actual, layer(x, None))
        torch.testing.assert_close(actual, plain(x, None), rtol=1e-4, atol=1e-4)
    assert not torch.equal(before, actual)
    assert served == [True] * 2


def test_an_attention_that_ignores_is_causal(served):
    model = build("SiglipVision")
    trifuse.fuse(model)
    layer, x = model.encoder.layers[0], torch.randn(1, 5, 32)
    with torch.no_grad():
        assert torch.equal(layer(x, None, is_causal=True), layer(x, None))
        with only_parts():
            assert torch.equal(layer(x, None, is_causal=True), layer(x, None))
    assert served == [True] * 2


@FREEZE
@pytest.mark.parametrize("name", ["DistilBert", "GPT2", "MPNet", "T5Encoder"])
def test_fusing_twice_changes_nothing(name, freeze):
    model = build(name)
    trifuse.fuse(model, freeze=freeze)
    kinds = [*map(type, model.modules())]
    assert trifuse.fuse(model, freeze=freeze).swapped == []
    assert [*map(type, model.modules())] == kinds
    if not freeze:
        assert trifuse.fuse(model, unpad=True).unpadded
        with torch.no_grad():
            assert call(model, given(name)[1] | {"use_cache": False}).isfinite().all()


def test_copies_and_pickles():
    for name in ("DistilBert", "GPT2", "MPNet", "T5Encoder", "Bart, encoder", "OPT"):
        model = build(name)
        trifuse.fuse(model)
        arguments = given(name)[1]
        with torch.no_grad():
            expected = call(model, arguments)
            for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                assert [*map(type, twin.modules())] == [*map(type, model.modules())]
                assert torch.equal(call(twin, arguments), expected)


# When the parts run -------------------------------------------------------------------------------


def test_cross_attention_calls_the_parts(served):
    model = build("GPT2", add_cross_attention=True)
    plain = copy.deepcopy(model)
    trifuse.fuse(model)
    arguments = given("GPT2")[1] | {"use_cache": False}
    with torch.no_grad():
        call(model, arguments)
        assert served == [True] * 2
        arguments |= {"encoder_hidden_states": torch.randn(3, 4, 32)}
        actual = call(model, arguments)
        torch.testing.assert_close(actual, call(plain, arguments), rtol=1e-4, atol=1e-4)
    assert served == [True] * 2


@pytest.mark.parametrize(("name", "path"), [("OPT", "layers.0"), ("Whisper, encoder", "layers.0")])
def test_queries_that_are_scaled_by_no_power_of_two(served, name, path):
    heads = {"num_attention_heads": 4, "encoder_attention_heads": 4}
    model = build(name, **heads)
    reasons = {left.path: left.reason for left in trifuse.fuse(model, freeze=True).left}
    path = f"decoder.{path}" if name == "OPT" else path
    assert reasons[path].endswith("multiplied by keys, by no power of two")
    with torch.no_grad():
        assert call(model, given(name)[0]).isfinite().all()
    assert not any(served)


def test_another_order_of_norms_is_noticed(served):
    model = build("OPT")
    trifuse.fuse(model)
    arguments = given("OPT")[1]
    with torch.no_grad():
        before = call(model, arguments)
        model.decoder.layers[1].do_layer_norm_before = False
        after = call(model, arguments)
        assert torch.equal(after, by_parts(model, arguments))
    assert not torch.equal(before, after)
    assert served == [True] * 4


def test_another_scale_of_queries_is_noticed(served):
    model = build("OPT")
    trifuse.fuse(model)
    arguments = given("OPT")[1]
    with torch.no_grad():
        for scale, by_op in ((0.5, True), (0.3, False)):
            model.decoder.layers[1].self_attn.scaling = scale
            actual = call(model, arguments)
            assert served[-2:] == [True, by_op]
            assert torch.equal(actual, by_parts(model, arguments))


@FREEZE
def test_an_adapter_calls_the_parts(served, freeze):
    model = build("Wav2Vec2, norms first", adapter_attn_dim=4)
    report = trifuse.fuse(model, freeze=freeze)
    assert any(left.reason.endswith("it has an adapter") for left in report.left) == freeze
    with torch.no_grad():
        for arguments in given("Wav2Vec2, norms first"):
            assert torch.equal(call(model, arguments), by_parts(model, arguments))
    assert not any(served)


def test_an_adapter_that_a_layer_gets_later_runs(served):
    model = build("Wav2Vec2, norms first")
    trifuse.fuse(model)
    arguments = given("Wav2Vec2, norms first")[0]
    with torch.no_grad():
        before = call(model, arguments)
        model.encoder.layers[1].adapter_layer = nn.Linear(32, 32).eval()
        after = call(model, arguments)
        assert torch.equal(after, by_parts(model, arguments))
    assert not torch.equal(before, after)
    assert served == [True, True, True, False]


@pytest.mark.parametrize("name", ["MPNet", "T5Encoder"])
def test_a_bias_that_is_no_table_calls_the_parts(served, name):
    model = build(name)
    plain = copy.deepcopy(model)
    trifuse.fuse(model)
    layers, its_layers = (
        each.encoder.layer if name == "MPNet" else each.encoder.block for each in (model, plain)
    )
    x, bias = torch.randn(2, 5, 32), torch.randn(1, 4, 5, 5)
    with torch.no_grad():
        actual, *_ = layers[1](x, None, bias)
        expected, *_ = its_layers[1](x, None, bias)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert served == [False]


def test_a_layer_of_t5_alone_has_no_bias(served):
    """Only the first layer has a table of its own."""
    model = build("T5Encoder")
    plain = copy.deepcopy(model)
    trifuse.fuse(model)
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        actual, *_ = model.encoder.block[1](x)
        expected, *_ = plain.encoder.block[1](x)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert served == [False]


def test_the_parts_make_the_bias_once(served):
    model = build("T5Encoder")
    trifuse.fuse(model)
    table, made = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias, []
    table.register_forward_hook(lambda *_: made.append(1))
    with torch.no_grad():
        call(model, {"input_ids": words(1, 5)})
    assert served == [False, True]  # there is a hook in the first layer
    assert len(made) == 1


def test_a_boolean_mask_that_is_added_to_the_scores(served):
    model = build("MPNet")
    plain = copy.deepcopy(model)
    trifuse.fuse(model)
    x, mask = torch.randn(2, 5, 32), torch.tensor([True, True, True, False, False])
    found = []
    with torch.no_grad():
        for each in (model, plain):
            bias = each.encoder.compute_position_bias(x)
            found += each.encoder.layer[0](x, mask.expand(2, 1, 1, 5), bias)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert served == []


def test_weights_of_attention_call_the_parts(served):
    model = build("MPNet", attn_implementation="eager")
    trifuse.fuse(model)
    with torch.no_grad():
        out = model(words(2, 5), output_attentions=True)
        assert served == []
        again = call(model, {"input_ids": words(2, 5)})
    torch.testing.assert_close(again, out.last_hidden_state, rtol=1e-4, atol=1e-4)
    assert served == [True] * 2
    assert [each.shape for each in out.attentions] == [(2, 4, 5, 5)] * 2


def test_arguments_that_are_given_twice_or_unknown():
    model = build("GPT2")
    trifuse.fuse(model)
    x, mask = torch.randn(1, 4, 32), torch.ones(1, 1, 4, 4).bool()
    with torch.no_grad():
        with pytest.raises(TypeError, match="attention_mask"):
            model.h[0](x, None, mask, attention_mask=mask)
        with pytest.raises(TypeError, match="positional"):
            model.h[0](x, None, mask, None, None, False, None)


def test_a_layer_that_ignores_a_cache(served):
    model = build("ViT")
    trifuse.fuse(model)
    layer, x = model.layers[0], torch.randn(1, 5, 32)
    with torch.no_grad():
        expected = layer(x)
        assert torch.equal(layer(x, past_key_values=transformers.DynamicCache()), expected)
    assert served == [True]


def test_the_cache_of_a_pair_without_an_encoder(served):
    model = build("GPT2")
    trifuse.fuse(model)
    pair = [transformers.DynamicCache(config=model.config) for _ in range(2)]
    past = transformers.EncoderDecoderCache(*pair)
    with torch.no_grad():
        whole = call(model, {"input_ids": words(1, 5)})
        del served[:]
        parts = [
            model(words(1, 5)[:, i : i + 1], past_key_values=past, use_cache=True) for i in range(5)
        ]
    found = torch.cat([each.last_hidden_state for each in parts], 1)
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)
    assert served == [True] * 2 * 5


def in_chunks(model: Any) -> Any:
    """Returns the module of the last layer that may run its network on parts of the tokens."""
    if hasattr(model, "transformer"):
        return model.transformer.layer[1].ffn
    return model.encoder.albert_layer_groups[0].albert_layers[0]


# Whether the op serves the two layers if the last one, which ALBERT runs twice, has changed.
CHANGED = pytest.mark.parametrize(
    ("name", "wanted"), [("DistilBert", [True, False]), ("Albert", [False, False])]
)


@CHANGED
def test_a_network_in_chunks_calls_the_parts(served, name, wanted):
    model = build(name)
    trifuse.fuse(model)
    arguments = given(name)[1]
    with torch.no_grad():
        before = call(model, arguments)
        in_chunks(model).chunk_size_feed_forward = 3
        torch.testing.assert_close(call(model, arguments), before, rtol=1e-4, atol=1e-4)
    assert served == [True, True, *wanted]


@pytest.mark.parametrize("name", ["DistilBert", "Albert"])
def test_a_network_with_another_part_calls_it(served, monkeypatch, name):
    model = build(name)
    source = type(in_chunks(model))
    own = source.ff_chunk
    monkeypatch.setattr(source, "ff_chunk", lambda self, x: 2 * own(self, x))
    plain = copy.deepcopy(model)
    trifuse.fuse(model)
    arguments = given(name)[1]
    with torch.no_grad():
        torch.testing.assert_close(
            call(model, arguments), call(plain, arguments), rtol=1e-4, atol=1e-4
        )
    assert served == []


@CHANGED
def test_a_network_with_a_part_of_its_own_calls_it(served, name, wanted):
    model = build(name)
    trifuse.fuse(model)
    arguments = given(name)[1]
    with torch.no_grad():
        before = call(model, arguments)
        network = in_chunks(model)
        own = network.ff_chunk
        network.ff_chunk = lambda x: 2 * own(x)
        after = call(model, arguments)
        assert torch.equal(after, by_parts(model, arguments))
    assert served == [True, True, *filter(None, wanted)]  # the parts run at once
    assert not torch.equal(before, after)


def changed_chunks(layer: Any) -> None:
    layer.chunk_size_feed_forward = 3


def changed_network(layer: Any) -> None:
    own = layer.feed_forward_chunk
    layer.feed_forward_chunk = lambda x: own(x).flip(-1)


def changed_sum(layer: Any) -> None:
    layer.output.register_forward_hook(lambda module, args, out: out.flip(-1))


@pytest.mark.parametrize("change", [changed_chunks, changed_network, changed_sum])
@pytest.mark.parametrize("name", BERTS)
def test_changed_layers_of_berts_kin(served, name, change):
    model = build(name)
    trifuse.fuse(model)
    arguments = given(name)[1]
    with torch.no_grad():
        before = call(model, arguments)
        change(model.encoder.layer[1])
        after = call(model, arguments)
        with only_parts():
            expected = call(model, arguments)
    assert torch.equal(after, expected)
    assert torch.equal(before, after) == (change is changed_chunks)
    assert served[:3] == [True] * 3
    assert not any(served[3:])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"position_embedding_type": "absolute"}, "its position_embedding_type isn't rotary"),
        ({"num_attention_heads": 4}, "multiplied by keys, by no power of two"),
    ],
)
def test_layers_of_esm_that_call_their_parts(served, options, reason):
    model = build("Esm", **options)
    plain = copy.deepcopy(model)
    report = trifuse.fuse(model, freeze=True)
    assert any(left.reason.endswith(reason) for left in report.left)
    arguments = given("Esm")[1]
    with torch.no_grad():
        actual = call(model, arguments)
        torch.testing.assert_close(actual, call(plain, arguments), rtol=1e-4, atol=1e-4)
    assert not any(served)


@pytest.mark.parametrize(("name", "function"), [("Esm", "gelu"), ("Bloom", "bloom_gelu_forward")])
def test_an_activation_that_was_replaced_is_called(served, monkeypatch, name, function):
    model = build(name)
    trifuse.fuse(model)
    modeling = importlib.import_module(
        f"transformers.models.{name.lower()}.modeling_{name.lower()}"
    )
    arguments = given(name)[1]
    with torch.no_grad():
        before = call(model, arguments)
        monkeypatch.setattr(modeling, function, lambda x: x.relu())
        after = call(model, arguments)
        assert torch.equal(after, by_parts(model, arguments))
    assert not torch.equal(before, after)
    assert not any(served[2:])


@pytest.mark.parametrize("name", ["Dinov2", "Beit", "DistilBert", "RemBert"])
def test_an_activation_with_another_function_is_called(served, name):
    model = build(name)
    trifuse.fuse(model)
    arguments = given(name)[0]
    with torch.no_grad():
        before = call(model, arguments)
        activation = next(each for each in model.modules() if "act" in vars(each))
        activation.act = torch.tanh
        after = call(model, arguments)
        assert torch.equal(after, by_parts(model, arguments))
    assert not torch.equal(before, after)
    assert not all(served[2:4])


@pytest.mark.parametrize("name", ["DistilBert", "Albert", "RemBert", "MegatronBert"])
def test_another_function_that_calls_the_network_runs(served, monkeypatch, name):
    model = build(name)
    modeling = importlib.import_module(type(model).__module__)
    trifuse.fuse(model)
    own = modeling.apply_chunking_to_forward
    arguments = given(name)[0]
    with torch.no_grad():
        before = call(model, arguments)
        monkeypatch.setattr(modeling, "apply_chunking_to_forward", lambda *args: 2 * own(*args))
        after = call(model, arguments)
    assert not torch.equal(before, after)
    assert served[:2] == [True] * 2
    assert not any(served[2:])


def test_a_mask_that_broadcasts_over_keys_calls_the_parts(served):
    model = build("Mpt")
    plain = copy.deepcopy(model)
    trifuse.fuse(model)
    x = torch.randn(1, 5, 32)
    mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    alibi = torch.randn(4, 1, 9)
    with torch.no_grad():
        actual, expected = (
            each.blocks[0](x, alibi, attention_mask=mask)[0] for each in (model, plain)
        )
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert not any(served)


def blocks(model: Any) -> Any:
    """Returns the layers of BLOOM or MPT."""
    return model.h if hasattr(model, "h") else model.blocks


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("Bloom", "apply_residual_connection_post_layernorm", True),
        ("Bloom", "self_attention.slow_but_exact", True),
        ("Bloom", "self_attention.beta", 0.5),
        ("Bloom", "self_attention.inv_norm_factor", 0.5),
        ("Mpt", "attn.clip_qkv", 0.5),
        ("Mpt", "attn.softmax_scale", 0.5),
    ],
)
def test_changed_attentions_with_alibi(served, name, path, value):
    model = build(name)
    trifuse.fuse(model)
    arguments = given(name)[1]
    owner, _, attribute = path.rpartition(".")
    with torch.no_grad():
        before = call(model, arguments)
        setattr(blocks(model)[1].get_submodule(owner), attribute, value)
        after = call(model, arguments)
        assert torch.equal(after, by_parts(model, arguments))
    assert served == [True] * 3 + ["scale" in path or "factor" in path]
    assert torch.equal(before, after) == (attribute == "slow_but_exact")


@pytest.mark.parametrize("changed", ["_reshape", "own _reshape", "_merge_heads"])
def test_methods_of_bloom_that_were_replaced_are_called(served, monkeypatch, changed):
    from transformers.models.bloom import modeling_bloom

    model = build("Bloom")
    trifuse.fuse(model)
    arguments = given("Bloom")[1]
    attention: Any = modeling_bloom.BloomAttention
    with torch.no_grad():
        before = call(model, arguments)
        if changed == "_merge_heads":
            own = attention._merge_heads
            monkeypatch.setattr(attention, changed, lambda self, x: own(self, x).flip(-1))
        else:
            one = model.h[1].self_attention
            owner = one if changed == "own _reshape" else attention
            reshape = one._reshape

            def swapped(*args: Any) -> Any:
                query, key, value = reshape(args[-1])
                return key, query, value

            monkeypatch.setattr(owner, "_reshape", swapped)
        del served[:]
        after = call(model, arguments)
        assert torch.equal(after, by_parts(model, arguments))
    assert not torch.equal(before, after)
    assert served == [changed == "own _reshape", False]


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("family", ["bloom", "falcon"])
def test_a_function_that_adds_and_was_replaced_is_called(monkeypatch, family, training, freeze):
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    if family == "bloom":
        model = build("Bloom")
    else:
        sizes = {"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4, "alibi": False}
        torch.manual_seed(0)
        config = transformers.FalconConfig(**sizes, num_hidden_layers=2, parallel_attn=False)
        model = transformers.FalconModel(config)
    plain = copy.deepcopy(model)
    trifuse.fuse(model, freeze=freeze)
    monkeypatch.setattr(modeling, "dropout_add", lambda x, residual, *_, **__: residual - 2 * x)
    ids = words(2, 5)
    with torch.no_grad():
        actual, expected = (each.train(training)(ids).last_hidden_state for each in (model, plain))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    monkeypatch.undo()
    with torch.no_grad():
        before, again = (each.eval()(ids).last_hidden_state for each in (model, plain))
    torch.testing.assert_close(before, again, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(before, actual, rtol=1e-2, atol=1e-2)


def test_another_function_that_adds_is_reported(monkeypatch):
    from transformers.models.bloom import modeling_bloom

    model = build("Bloom")
    monkeypatch.setattr(modeling_bloom, "dropout_add", lambda x, residual, *_: residual - x)
    reasons = {left.path: left.reason for left in trifuse.fuse(model, freeze=True).left}
    assert reasons["h.0"].endswith("the code of the function that adds its results isn't known")


# Each case adds its first number to the biases of key 2, and its second to those of key 1, which
# is masked.
EXTREME = {
    "-inf": (-torch.inf, 0.0),
    "-inf, masked": (0.0, -torch.inf),
    "inf, masked": (0.0, torch.inf),
    "lowest, masked": (0.0, -3e38),
    "NaN, masked": (0.0, torch.nan),
}


@pytest.mark.parametrize("case", EXTREME)
@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("name", ["Bloom", "Mpt"])
def test_biases_of_keys_that_are_infinite_or_nan(served, name, length, case):
    """MPT's mask replaces them, BLOOM's is added. One row has no key that isn't masked."""
    model = build(name)
    plain = copy.deepcopy(model)
    trifuse.fuse(model)
    x = torch.randn(2, length, 32, generator=torch.Generator().manual_seed(3))
    third, first = EXTREME[case]
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]).repeat(2 if name == "Bloom" else 1)
    alibi = slopes[:, None, None] * torch.tensor([-4.0, -3 + first, -2 + third, -1, 0])
    mask: Any = torch.ones(length, 5).tril(5 - length).expand(2, 1, -1, -1) == 0
    mask = mask.clone()
    mask[:, :, :, 1] = True
    mask[0, :, 0] = True
    if name == "Bloom":
        mask = torch.zeros(mask.shape).masked_fill(mask, torch.finfo(torch.float32).min)
    keys = torch.randn(2, 4, 5 - length, 8, generator=torch.Generator().manual_seed(4))

    def run_layer(model: Any) -> Tensor:
        past = transformers.DynamicCache(config=model.config)
        if length < 5:
            past.update(keys, -keys, 0)
        out: Tensor = blocks(model)[0](x, alibi, attention_mask=mask, layer_past=past)[0]
        return out

    with torch.no_grad():
        expected = run_layer(plain)
        for parts in (False, True):
            with only_parts() if parts else contextlib.nullcontext():
                actual = run_layer(model)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert served == [length == 1]
    has_nan = name == "Bloom" and case in ("inf, masked", "NaN, masked")
    assert expected.isnan().any() == has_nan


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("name", ["Bloom", "Mpt"])
def test_biases_of_keys_that_do_not_grow_evenly(served, name, length):
    """For several queries they are no table by distance. For one, a mask holds them."""
    model = build(name)
    plain = copy.deepcopy(model)
    trifuse.fuse(model)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, length, 32, generator=generator)
    alibi = torch.randn(8 if name == "Bloom" else 4, 1, 5, generator=generator)
    low = torch.finfo(torch.float32).min
    mask: Any = torch.zeros(2, 1, length, 5)
    mask[0, :, :, 3] = low
    pasts = []
    keys = torch.randn(2, 4, 5 - length, 8, generator=generator)
    for _ in range(2):
        past = transformers.DynamicCache(config=model.config)
        if length < 5:
            past.update(keys, -keys, 0)
        pasts.append(past)
    mask = mask if name == "Bloom" else mask == low
    with torch.no_grad():
        actual, expected = (
            blocks(each)[0](x, alibi, attention_mask=mask, layer_past=past)[0]
            for each, past in zip((model, plain), pasts, strict=True)
        )
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert served == [length == 1]


@pytest.mark.parametrize("name", ["Bloom", "Mpt"])
def test_alibi_with_a_static_cache(served, name):
    model = build(name)
    plain = copy.deepcopy(model)
    trifuse.fuse(model)
    ids, found = words(2, 12), []
    with torch.no_grad():
        for each in (model, plain):
            past = transformers.StaticCache(config=model.config, max_cache_len=20)
            found.append([run(each, ids[:, :9], past), run(each, ids[:, 9:10], past)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert served == [True] * 4


def test_an_attention_of_roberta_that_reads_another_mask(served):
    model = build("RobertaPreLayerNorm")
    trifuse.fuse(model)
    model.encoder.layer[1].attention.is_cross_attention = True
    arguments = given("RobertaPreLayerNorm")[1]
    with torch.no_grad():
        assert torch.equal(call(model, arguments), by_parts(model, arguments))
    assert served == [True, False]


@pytest.mark.parametrize("name", ["RemBert", "MegatronBert"])
def test_weights_of_an_attention_that_is_written_out(served, name):
    model = build(name)
    trifuse.fuse(model)
    with torch.no_grad():
        out = model(words(2, 5), output_attentions=True)
        assert served == []
        layer, x = model.encoder.layer[0], torch.randn(2, 5, 32)
        states, weights = layer(x)
        again, _ = layer(x, output_attentions=True)
        torch.testing.assert_close(again, states, rtol=1e-4, atol=1e-4)
    assert weights is None
    assert [each.shape for each in out.attentions] == [(2, 4, 5, 5)] * 2
    assert served == [True]


@pytest.mark.parametrize("name", [name for name in BERTS if name != "Esm"])
def test_a_decoder_of_berts_kin_calls_its_parts_with_a_cache(served, name):
    model = build(name, is_decoder=True)
    trifuse.fuse(model)
    ids = words(2, 6)
    with torch.no_grad():
        whole = model(ids, use_cache=False).last_hidden_state
        assert served == [True] * 2
        past = transformers.DynamicCache(config=model.config)
        parts = [model(ids[:, i : i + 2], cache=past) for i in (0, 2, 4)]
    actual = torch.cat([part.last_hidden_state for part in parts], 1)
    torch.testing.assert_close(actual, whole, rtol=1e-4, atol=1e-4)
    assert served == [True] * 2


def test_a_factor_of_another_dtype_calls_the_parts(served):
    model = build("Dinov2", torch.bfloat16)
    trifuse.fuse(model)
    scale = model.encoder.layer[1].layer_scale2
    scale.float()
    arguments = given("Dinov2", torch.bfloat16)[0]
    layer, x = model.encoder.layer[1], torch.randn(2, 5, 32).bfloat16()
    with torch.no_grad():
        assert layer(x).dtype == torch.float32
        del served[:]
        scale.bfloat16()
        assert torch.equal(call(model, arguments), by_parts(model, arguments))
    assert served == [True] * 2


def test_a_factor_of_another_dtype_is_reported():
    model = build("Dinov2", torch.bfloat16)
    model.encoder.layer[1].layer_scale2.float()
    reasons = {left.path: left.reason for left in trifuse.fuse(model, freeze=True).left}
    assert reasons["encoder.layer.1"] == (
        "calls its parts: its results are multiplied by vectors of another dtype than its linear "
        "layers"
    )
    assert "encoder.layer.0" not in reasons


@pytest.mark.parametrize(
    ("name", "path"), [("Dinov2", "layer_scale1.lambda1"), ("Beit", "lambda_1")]
)
def test_another_factor_is_noticed(served, name, path):
    model = build(name)
    trifuse.fuse(model)
    arguments = given(name)[0]
    layer = (model.layers if name == "Beit" else model.encoder.layer)[0]
    owner, _, attribute = path.rpartition(".")
    holder = layer.get_submodule(owner)
    with torch.no_grad():
        before = call(model, arguments)
        setattr(holder, attribute, nn.Parameter(getattr(holder, attribute).flip(0)))
        after = call(model, arguments)
        assert torch.equal(after, by_parts(model, arguments))
    assert not torch.equal(before, after)
    assert served == [True] * 4


def test_a_factor_that_is_a_number(served):
    model = build("Beit, without factors")
    trifuse.fuse(model)
    arguments = given("Beit")[0]
    with torch.no_grad():
        before = call(model, arguments)
        model.layers[0].lambda_1 = 0.5
        after = call(model, arguments)
        assert torch.equal(after, by_parts(model, arguments))
    assert not torch.equal(before, after)
    assert served == [True, True, False, True]


def as_buffer(layer: Any) -> None:
    factor = layer.lambda_1.detach() * 2
    del layer.lambda_1
    layer.register_buffer("lambda_1", factor)


def as_attribute(layer: Any) -> None:
    factor = layer.lambda_1.detach() * 2
    del layer.lambda_1
    layer.lambda_1 = factor


def pruned(layer: Any) -> None:
    prune.l1_unstructured(layer, "lambda_1", 0.5)


@pytest.mark.parametrize("fused_first", [False, True])
@pytest.mark.parametrize("change", [as_buffer, as_attribute, pruned])
def test_a_factor_that_is_no_parameter_calls_the_parts(served, change, fused_first):
    model = build("Beit")
    plain = copy.deepcopy(model)
    change(plain.layers[0])
    arguments = given("Beit")[0]
    with torch.no_grad():
        if fused_first:
            trifuse.fuse(model)
            call(model, arguments)
            change(model.layers[0])
        else:
            change(model.layers[0])
            trifuse.fuse(model)
        served.clear()
        actual = call(model, arguments)
        torch.testing.assert_close(actual, call(plain, arguments), rtol=1e-4, atol=1e-4)
    assert [*filter(None, served)] == [True]  # the other layer


@pytest.mark.parametrize("name", ["Dinov2", "Beit"])
def test_another_module_that_drops_samples_runs(served, name):
    model = build(name)
    trifuse.fuse(model)
    layers = model.layers if name == "Beit" else model.encoder.layer
    layers[0].drop_path = nn.Tanh().eval()
    arguments = given(name)[0]
    with torch.no_grad():
        assert torch.equal(call(model, arguments), by_parts(model, arguments))
    assert served == [False, True]


def test_biases_of_windows_call_the_parts(served):
    model = build("Beit", use_relative_position_bias=True)
    report = trifuse.fuse(model, freeze=True)
    assert any("its relative_position_bias isn't None" in left.reason for left in report.left)
    with torch.no_grad():
        assert call(model, given("Beit")[0]).isfinite().all()
    assert not any(served)


def test_an_activation_that_no_product_has_calls_the_parts(served):
    model = build("CLIPVision", hidden_act="gelu_10")
    report = trifuse.fuse(model, freeze=True)
    reasons = {left.path: left.reason for left in report.left}
    assert reasons["encoder.layers.0"].endswith("no product of ours has its activation")
    with torch.no_grad():
        assert call(model, given("CLIPVision")[0]).isfinite().all()
    assert served == []


@FREEZE
def test_gradients_of_factors_alone(served, freeze):
    model = build("Dinov2")
    plain = copy.deepcopy(model)
    trifuse.fuse(model, freeze=freeze)
    found = []
    for each in (model, plain):
        each.requires_grad_(False)
        factor = each.encoder.layer[1].layer_scale2.lambda1.requires_grad_()
        call(each, given("Dinov2")[0]).square().mean().backward()
        found.append(factor.grad)
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
    assert served == [True, False]


def test_gradients(served):
    names = ["DistilBert", "GPT2", "ViT", "MPNet", "T5Encoder", "Bart, decoder", "OPT"]
    names += ["MegatronBert", "Esm", "Dinov2", "DINOv3ViT", "Beit", "Bloom", "Mpt"]
    for name in names:
        model = build(name)
        plain = copy.deepcopy(model)
        trifuse.fuse(model)
        arguments = given(name)[-1]
        for each in (model, plain):
            call(each, arguments).square().mean().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            if theirs.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3)
    assert not any(served)


# Recognition --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("if encoder_hidden_states is None:\n    f()\nelse:\n    g()", "f()"),
        ("if encoder_hidden_states is not None:\n    f()\ng()", "g()"),
        ("crosses = encoder_hidden_states is not None\nif not crosses:\n    f()", "f()"),
        ("crosses = encoder_hidden_states is not None\nif a and (not crosses):\n    f()",
         "if a:\n    f()"),
        ("crosses = encoder_hidden_states is not None\nif a and crosses or b:\n    f()",
         "if b:\n    f()"),
        # A variable with another value later, or in a branch, is none. Its first value may count.
        ("a = encoder_hidden_states is None\na = g()\nif a:\n    f()",
         "a = True\na = g()\nif a:\n    f()"),
        ("a = False\nif b:\n    a = c\nf(a)", "a = False\nif b:\n    a = c\nf(a)"),
        # Numbers are no conditions.
        ("x = y or 1", "x = y or 1"),
        ("if b:\n    a = encoder_hidden_states is None\nif a:\n    f()",
         "if b:\n    a = True\nif a:\n    f()"),
        ("a = key_value_states if key_value_states is not None else x", "a = x"),
        ("if key_value_states is None:\n    f()\nelse:\n    g()", "f()"),
        # These statements change nothing in evaluation, or in types other than float16.
        ("x = nn.functional.dropout(x, p=p, training=self.training)\nf()", "f()"),
        ("x = nn.functional.dropout(y, p=p, training=self.training)",
         "x = nn.functional.dropout(y, p=p, training=self.training)"),
        ("x = nn.functional.dropout(x, p=p, training=True)",
         "x = nn.functional.dropout(x, p=p, training=True)"),
        ("if hidden_states.dtype == torch.float16 and g():\n    h()\nf()", "f()"),
        ("if hidden_states.dtype == torch.float16:\n    h()\nf()", "f()"),
        ("if hidden_states.dtype == torch.float16 or g():\n    h()",
         "if hidden_states.dtype == torch.float16 or g():\n    h()"),
        ("if hidden_states.dtype == torch.float16:\n    h()\nelse:\n    f()",
         "if hidden_states.dtype == torch.float16:\n    h()\nelse:\n    f()"),
        ("if other is None:\n    f()", "if other is None:\n    f()"),
    ],
)  # fmt: skip
def test_code_without_memory(code, wanted):
    assert known_statements.normal(code) == wanted
