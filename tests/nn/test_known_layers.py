"""Layers without a rotation as one op: the bits of their parts, and when the parts run."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from model_sizes import (
    DISTILBERT_SIZES,
    OPT_SIZES,
    SIZES,
    SPEECH_SIZES,
    TRANSLATION_SIZES,
    WHISPER_SIZES,
)
from rotary_models import DTYPES, keep, kept, only_parts, words
from rotary_models import call as run
from torch import Tensor, nn

import trifuse
from trifuse.ops._linear_choice import is_available
from trifuse.recipes import known_statements

transformers = pytest.importorskip("transformers", minversion="5")

pytestmark = [
    pytest.mark.skipif(not is_available(torch.float32), reason="no C++ extension"),
    pytest.mark.usefixtures("our_product"),
]

FREEZE = pytest.mark.parametrize("freeze", [False, True])
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
}
OF_IMAGES = [name for name, sizes in FAMILIES.items() if sizes is IMAGES]
OF_SPEECH = [name for name, sizes in FAMILIES.items() if sizes in (SPEECH, STABLE)]
DECODERS = ["GPT2", "Bart, decoder", "MBart, decoder", "Whisper, decoder", "BioGpt"]
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
    "name", ["DistilBert", "Albert", "GPT2", "MPNet", "T5Encoder", "MBart, encoder", "OPT"]
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
@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "BartForCausalLM", "OPTForCausalLM"])
def test_generates(served, kind, beams, freeze):
    names = {"GPT2LMHeadModel": "GPT2", "BartForCausalLM": "Bart, decoder"}
    config = build(names.get(kind, "OPT")).config
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


def test_the_caller_may_make_an_attention_causal(served):
    model = build("CLIPVision")
    trifuse.fuse(model)
    layer, x = model.encoder.layers[0], torch.randn(1, 5, 32)
    with torch.no_grad():
        for options in ({}, {"is_causal": True}, {"is_causal": False}):
            actual = layer(x, None, **options)
            with only_parts():
                assert torch.equal(actual, layer(x, None, **options))
        assert not torch.equal(layer(x, None, is_causal=True), layer(x, None))
    assert served == [True] * 5


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


def test_a_cache_of_encoder_and_decoder_calls_the_parts(served):
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
    assert not any(served)


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


def test_an_activation_that_no_product_has_calls_the_parts(served):
    model = build("CLIPVision", hidden_act="gelu_10")
    report = trifuse.fuse(model, freeze=True)
    reasons = {left.path: left.reason for left in report.left}
    assert reasons["encoder.layers.0"].endswith("no product of ours has its activation")
    with torch.no_grad():
        assert call(model, given("CLIPVision")[0]).isfinite().all()
    assert served == []


def test_gradients(served):
    for name in ("DistilBert", "GPT2", "ViT", "MPNet", "T5Encoder", "Bart, decoder", "OPT"):
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
