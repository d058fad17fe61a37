"""Layers of decoders that attend to an encoder's output as one op, while a model generates."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from rotary_models import DTYPES, keep, kept, only_parts, words
from test_known_layers import FAMILIES, T5_SIZES, TRANSLATION, build
from torch import Tensor, nn

import trifuse
from trifuse.ops._linear_choice import is_available

transformers = pytest.importorskip("transformers", minversion="5")

pytestmark = [
    pytest.mark.skipif(not is_available(torch.float32), reason="no C++ extension"),
    pytest.mark.usefixtures("our_product"),
]

FREEZE = pytest.mark.parametrize("freeze", [False, True])
LAYERS = 2
# By the name of a model, the arguments of its configuration.
PAIRS: dict[str, dict[str, Any]] = {
    "Bart": TRANSLATION,
    "Marian": TRANSLATION,
    "PLBart": TRANSLATION,
    "BlenderbotSmall": TRANSLATION,
    "MBart": TRANSLATION,
    "Pegasus": TRANSLATION,
    "Blenderbot": TRANSLATION,
    "M2M100": TRANSLATION,
    "Whisper": FAMILIES["Whisper, encoder"],
    "Speech2Text": FAMILIES["Speech2Text, encoder"],
    "T5": T5_SIZES,
    "T5, gated": T5_SIZES | {"feed_forward_proj": "gated-gelu"},
    "MT5": T5_SIZES,
}


def pair(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(0)
    family = name.split(",")[0]
    config = getattr(transformers, f"{family}Config")(**PAIRS[name] | options)
    model = getattr(transformers, f"{family}Model")(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.to(dtype)


def source(name: str, dtype: torch.dtype, padded: bool) -> dict[str, Any]:
    """Returns the encoder's input of three sequences: words, or a sound."""
    generator = torch.Generator().manual_seed(1)
    if name == "Whisper":
        return {"input_features": torch.randn(3, 8, 20, generator=generator).to(dtype)}
    if name == "Speech2Text":
        spectra = torch.randn(3, 36, 8, generator=generator).to(dtype)
        mask = keep(3, 36).flip(1) if padded else None
        return {"input_features": spectra, "attention_mask": mask}
    return {"input_ids": words(3, 9), "attention_mask": keep(3, 9).flip(1) if padded else None}


def decode(model: Any, given: dict[str, Any], past: Any, steps: list[int]) -> list[Tensor]:
    """Returns the decoder's output of a prompt and of further steps, and checks the cache."""
    ids = words(3, sum(steps)).flip(1)
    memory = model.get_encoder()(**given)
    mask = given.get("attention_mask")
    found, end = [], 0
    for length in steps:
        end += length
        out = model(
            encoder_outputs=memory,
            attention_mask=mask,
            decoder_input_ids=ids[:, end - length : end],
            past_key_values=past,
            use_cache=True,
        )
        found.append(out.last_hidden_state)
    assert past.get_seq_length() == end
    return found


def caches(model: Any, static: bool = False) -> Any:
    config = model.config
    options = {"max_cache_len": 40} if static else {}
    kind = transformers.StaticCache if static else transformers.DynamicCache
    own, other = (kind(config=config, **options) for _ in range(2))
    if static:  # the encoder's output is not longer
        other = transformers.DynamicCache(config=config)
    return transformers.EncoderDecoderCache(own, other)


@FREEZE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.covering
def test_has_the_bits_of_its_parts(cpp_kernel, served, name, dtype, padded, static, freeze):
    model = pair(name, dtype)
    plain = copy.deepcopy(model)
    trifuse.fuse(model, freeze=freeze)
    given, steps = source(name, dtype, padded), [4, 1, 1, 3, 1, 9, 1]
    found, pasts = [], []
    with torch.no_grad():
        for part in (False, True):
            past = caches(model, static)
            if part:
                with only_parts():
                    found.append(decode(model, given, past, steps))
            else:
                found.append(decode(model, given, past, steps))
            pasts.append(past)
        expected = decode(plain, given, caches(plain, static), steps)
    for ours, parts, theirs in zip(*found, expected, strict=True):
        assert ours.isfinite().all()
        assert torch.equal(ours, parts)
        if dtype == torch.float32:
            torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)
    for side in ("self_attention_cache", "cross_attention_cache"):
        for ours, parts in zip(*(kept(getattr(past, side)) for past in pasts), strict=True):
            assert torch.equal(ours, parts)
    # Each layer of the encoder, and of the decoder after the prompt, whose parts fill the cache.
    assert served == [True] * (LAYERS + (len(steps) - 1) * LAYERS)


def step(model: Any, memory: Tensor, mask: Tensor | None, past: Any, ids: Tensor) -> Tensor:
    """Returns the output of GPT-2 for further words, while it attends to a memory."""
    out: Tensor = model(
        ids,
        encoder_hidden_states=memory,
        encoder_attention_mask=mask,
        past_key_values=past,
        use_cache=True,
    ).last_hidden_state
    return out


@FREEZE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.covering
def test_gpt2_has_the_bits_of_its_parts(cpp_kernel, served, dtype, padded, static, freeze):
    model = build("GPT2", dtype, add_cross_attention=True)
    plain = copy.deepcopy(model)
    trifuse.fuse(model, freeze=freeze)
    memory, ids = torch.randn(3, 9, 32).to(dtype), words(3, 18)
    mask = keep(3, 9).flip(1) if padded else None
    ends = [4, 5, 6, 9, 18]

    def decode(model: Any) -> tuple[list[Tensor], Any]:
        past = caches(model, static)
        starts = zip([0, *ends], ends, strict=False)
        return [step(model, memory, mask, past, ids[:, i:j]) for i, j in starts], past

    with torch.no_grad():
        ours, past = decode(model)
        assert served == [True] * LAYERS * 4  # the parts fill the cache
        with only_parts():
            parts, its_past = decode(model)
        theirs, _ = decode(plain)
    assert all(map(torch.equal, ours, parts))
    if dtype == torch.float32:
        for actual, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-3)
    for side in ("self_attention_cache", "cross_attention_cache"):
        assert all(map(torch.equal, kept(getattr(past, side)), kept(getattr(its_past, side))))


@FREEZE
@pytest.mark.parametrize("change", ["scale", "dropout", "none"])
def test_a_changed_attention_to_the_memory_of_gpt2(served, change, freeze):
    model = build("GPT2", add_cross_attention=True)
    trifuse.fuse(model, freeze=freeze)
    memory, ids, past = torch.randn(3, 9, 32), words(3, 5), caches(model)
    with torch.no_grad():
        step(model, memory, None, past, ids[:, :4])
        other = copy.deepcopy(past)
        assert not served
        attention = model.h[1].crossattention
        if change == "scale":
            attention.scaling *= 2
        elif change == "dropout":
            attention.resid_dropout = nn.Tanh()
        actual = step(model, memory, None, past, ids[:, 4:])
        assert served == [True, change == "none"]
        with only_parts():
            assert torch.equal(actual, step(model, memory, None, other, ids[:, 4:]))


@pytest.mark.parametrize("argument", [None, True, False])
@pytest.mark.parametrize("name", ["GPT2", "Bart", "T5"])
def test_an_attention_to_the_memory_marked_as_causal(served, name, argument):
    """GPT-2's layer, unlike others, passes ``is_causal`` to its own attention alone."""
    model = build("GPT2", add_cross_attention=True) if name == "GPT2" else pair(name)
    plain = copy.deepcopy(model)
    trifuse.fuse(model)
    ids, memory, found = words(3, 7), torch.randn(3, 9, 32), []
    options = {} if argument is None else {"is_causal": argument}

    def step(model: Any, past: Any, ids: Tensor, **options: Any) -> Tensor:
        options |= {"past_key_values": past, "use_cache": True}
        if name == "GPT2":
            out = model(ids, encoder_hidden_states=memory, **options)
        else:
            out = model(decoder_input_ids=ids, encoder_outputs=(memory,), **options)
        states: Tensor = out.last_hidden_state
        return states

    for each in (*model.modules(), *plain.modules()):
        for attention in ("crossattention", "encoder_attn", "EncDecAttention"):
            if attention in each._modules:
                each._modules[attention].is_causal = True
    with torch.no_grad():
        for each, parts in ((model, False), (model, True), (plain, False)):
            past = caches(each)
            step(each, past, ids[:, :4])
            with only_parts() if parts else contextlib.nullcontext():
                found.append(step(each, past, ids[:, 4:], **options))
    actual, by_parts, expected = found
    assert torch.equal(actual, by_parts)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert served == ([True] * LAYERS if argument is False and name != "GPT2" else [])


def test_gpt2_generates_the_same_text(served):
    """An encoder of BERT's kind, and GPT-2 as its decoder."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    encoder = transformers.BertConfig(**sizes, intermediate_size=48)
    decoder = transformers.GPT2Config(**FAMILIES["GPT2"])
    pair = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    model = transformers.EncoderDecoderModel(pair).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options |= {"attention_mask": keep(3, 9).flip(1), "decoder_start_token_id": 2}
    wanted = model.generate(words(3, 9), **options)
    trifuse.fuse(model, freeze=True)
    assert torch.equal(model.generate(words(3, 9), **options), wanted)
    assert served[-LAYERS * 11 :] == [True] * LAYERS * 11


@pytest.mark.parametrize("name", ["Marian", "Whisper", "T5"])
@pytest.mark.parametrize("beams", [1, 3])
@FREEZE
def test_generates_the_same_text(served, name, beams, freeze):
    torch.manual_seed(0)
    family = getattr(transformers, f"{name}Config")(**PAIRS[name] | {"decoder_start_token_id": 2})
    kind = {"Marian": "MarianMTModel"}.get(name, f"{name}ForConditionalGeneration")
    model = getattr(transformers, kind)(family).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    plain = copy.deepcopy(model)
    trifuse.fuse(model, freeze=freeze)
    given = source(name, torch.float32, padded=True)
    options = {"max_new_tokens": 12, "num_beams": beams, "do_sample": False}
    text = model.generate(**given, **options)
    assert torch.equal(text, plain.generate(**given, **options))
    assert served == [True] * (LAYERS + LAYERS * 11)


def test_a_memory_that_is_not_cached_yet(served):
    model = pair("Bart")
    trifuse.fuse(model)
    with torch.no_grad():
        model(**source("Bart", torch.float32, False), decoder_input_ids=words(3, 4))
        assert served == [True] * LAYERS  # the encoder's
        memory = torch.randn(3, 5, 32)
        model.decoder(words(3, 4), encoder_hidden_states=memory, use_cache=False)
    assert served == [True] * LAYERS


def test_a_decoder_without_an_encoder(served):
    """Its layers have an attention to a memory, and their cache may be one of a pair."""
    model = build("Bart, decoder")
    trifuse.fuse(model)
    ids = words(2, 6)
    with torch.no_grad():
        whole = model(ids).last_hidden_state
        assert served == [True] * 2
        past = caches(model)
        for cache in (past, past.self_attention_cache):
            cache.reset() if cache is not past else None
        parts = [model(ids[:, i : i + 1], past_key_values=past) for i in range(6)]
    actual = torch.cat([part.last_hidden_state for part in parts], 1)
    torch.testing.assert_close(actual, whole, rtol=1e-4, atol=1e-4)
    assert served == [True] * 2 * 7


@pytest.mark.parametrize("change", ["scale", "class", "hook", "heads"])
def test_a_changed_attention_to_the_memory(served, change):
    model = pair("Bart")
    trifuse.fuse(model)
    attention = model.decoder.layers[1].encoder_attn
    given, steps = source("Bart", torch.float32, True), [3, 1]
    with torch.no_grad():
        before = decode(model, given, caches(model), steps)[-1]
        del served[:]
        if change == "scale":
            attention.scaling *= 2
        elif change == "class":
            source_class = type(attention)
            attention.__class__ = type("Changed", (source_class,), {"forward": doubled})
        elif change == "hook":
            attention.register_forward_hook(lambda module, args, out: (2 * out[0], None))
        else:
            attention.head_dim = 4
        after = decode(model, given, caches(model), steps)[-1]
        with only_parts():
            assert torch.equal(after, decode(model, given, caches(model), steps)[-1])
    assert not torch.equal(before, after)
    assert served[: LAYERS + 2][-1] is False


def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
    out, weights = super(type(self), self).forward(*args, **kwargs)
    return 2 * out, weights


def test_a_bias_for_the_memory_calls_the_parts(served):
    model = pair("T5")
    plain = copy.deepcopy(model)
    trifuse.fuse(model)
    x, found = torch.randn(3, 1, 32), []
    with torch.no_grad():
        for each in (model, plain):
            past = caches(each)
            decode(each, source("T5", torch.float32, False), past, [3, 1])
            del served[:]
            memory, bias = torch.randn(3, 9, 32), torch.zeros(1, 4, 1, 9)
            bias[..., 0] = 3
            out = each.decoder.block[0](
                x,
                None,
                None,
                memory,
                None,
                encoder_decoder_position_bias=bias,
                past_key_values=past,
            )
            found.append(out[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert not any(served)


def test_a_layer_of_t5_returns_the_bias_for_the_memory(served):
    model = pair("T5")
    plain = copy.deepcopy(model)
    trifuse.fuse(model)
    x, memory, found = torch.randn(3, 1, 32), torch.randn(3, 9, 32), []
    with torch.no_grad():
        for each in (model, plain):
            past = caches(each)
            decode(each, source("T5", torch.float32, False), past, [3, 1])
            block, following = each.decoder.block
            first = block(x, None, None, memory, None, past_key_values=past)
            second = following(first[0], None, first[1], memory, None, first[2], past)
            found.append((*first, *second))
    assert served[-2:] == [True, True]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours + 0, theirs + 0, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Bart", "MBart", "T5"])
def test_causal_attention_to_the_memory_calls_the_parts(served, name):
    """A model passes ``is_causal`` to both attentions."""
    model = pair(name)
    trifuse.fuse(model)
    ids, found = words(3, 9), []
    with torch.no_grad():
        memory = model.get_encoder()(words(3, 9))
        for parts in (False, True):
            past, given = caches(model), {"encoder_outputs": memory, "is_causal": True}
            model(decoder_input_ids=ids[:, :4], past_key_values=past, **given)
            del served[:]
            with only_parts() if parts else contextlib.nullcontext():
                out = model(decoder_input_ids=ids[:, 4:7], past_key_values=past, **given)
            found.append(out.last_hidden_state)
            assert not any(served)
    assert torch.equal(*found)


def test_a_window_in_the_mask_of_a_memory_calls_the_parts(served):
    model = pair("Bart")
    trifuse.fuse(model)
    with torch.no_grad():
        past = caches(model)
        decode(model, source("Bart", torch.float32, False), past, [3, 1])
        del served[:]
        layer, x, memory = model.decoder.layers[0], torch.randn(3, 1, 32), torch.randn(3, 9, 32)
        mask = torch.ones(3, 1, 1, 9, dtype=torch.uint8)  # a causal one
        with only_parts():
            expected = layer(x, None, memory, mask, copy.deepcopy(past))
        assert torch.equal(layer(x, None, memory, mask, past), expected)
    assert not any(served)


def test_gradients(served):
    model = pair("T5")
    plain = copy.deepcopy(model)
    trifuse.fuse(model)
    for each in (model, plain):
        out = decode(each, source("T5", torch.float32, True), caches(each), [3, 1])
        sum(t.square().mean() for t in out).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3)
    assert not any(served)
