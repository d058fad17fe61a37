"""attn_implementation="trifuse" against transformers' own "eager" and "sdpa"."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from model_sizes import GPT_SIZES, GROUPED_QUERIES, SIZES, SPECIAL_TOKENS
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import trifuse

transformers = pytest.importorskip("transformers")

from transformers import masking_utils  # noqa: E402

from trifuse import huggingface  # noqa: E402
from trifuse.nn import packing  # noqa: E402
from trifuse.recipes import code  # noqa: E402

PADDED_SIZES = SIZES | {"pad_token_id": 0}
GROUPED_SIZES = PADDED_SIZES | GROUPED_QUERIES
L = 10

pytestmark = pytest.mark.usefixtures("torch_multiplies")


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(**GPT_SIZES | {"n_layer": 2}, bos_token_id=1, eos_token_id=2)
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED_SIZES))


def mistral() -> nn.Module:
    """A sliding window, shorter than the text, in every layer."""
    config = transformers.MistralConfig(**GROUPED_SIZES, sliding_window=4)
    return transformers.MistralForCausalLM(config)


def gemma3() -> nn.Module:
    """Layers alternate between sliding and full attention, each with its own mask."""
    kinds = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(
        **GROUPED_SIZES, head_dim=8, sliding_window=4, layer_types=kinds
    )
    return transformers.Gemma3ForCausalLM(config)


def modernbert() -> nn.Module:
    """The second layer has a window, to both sides."""
    config = transformers.ModernBertConfig(**PADDED_SIZES | SPECIAL_TOKENS, local_attention=4)
    return transformers.ModernBertModel(config)


def bert(**options) -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**PADDED_SIZES, **options))


def deberta() -> nn.Module:
    sizes = PADDED_SIZES | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    return transformers.DebertaV2Model(transformers.DebertaV2Config(**sizes))


def t5() -> nn.Module:
    """A learnt position bias on the scores, and cross attention."""
    config = transformers.T5Config(
        vocab_size=97,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    return transformers.T5ForConditionalGeneration(config)


def gemma2() -> nn.Module:
    """Capped scores, and layers as in Gemma 3."""
    config = transformers.Gemma2Config(
        **GROUPED_SIZES, head_dim=8, sliding_window=4, attn_logit_softcapping=0.5
    )
    return transformers.Gemma2ForCausalLM(config)


def gpt_oss() -> nn.Module:
    """Attention sinks, far from 0, and layers as in Gemma 3."""
    config = transformers.GptOssConfig(
        **GROUPED_SIZES,
        head_dim=8,
        sliding_window=4,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    model = transformers.GptOssForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_(std=2)
    return model


DECODERS = [gpt2, llama, mistral, gemma3, gemma2, gpt_oss]


def build(make) -> nn.Module:
    torch.manual_seed(0)
    return make().eval()


def ids() -> Tensor:
    return torch.randint(3, 97, (3, L), generator=torch.Generator().manual_seed(1))


LENGTHS = torch.tensor([L, 6, 3])[:, None]
MASKS = {
    "no mask": None,
    "no padding": torch.ones(3, L, dtype=torch.int64),
    "padded right": (torch.arange(L) < LENGTHS).long(),
    "padded left": (torch.arange(L) < LENGTHS).flip(1).long(),
    "with a hole": ((torch.arange(L) < LENGTHS) & (torch.arange(L) != 1)).long(),
}


def implementations(model: nn.Module) -> Iterator[str]:
    """Switches the model to "sdpa" if it can, to "trifuse" by fuse, and to "eager"; yields each."""
    if model._supports_sdpa:
        model.set_attn_implementation("sdpa")
        yield "sdpa"
    report = trifuse.fuse(model)
    assert report.swapped
    assert model.config._attn_implementation == "trifuse"
    yield "trifuse"
    report.revert()
    model.set_attn_implementation("eager")
    yield "eager"


def compare(model: nn.Module, run, real: Tensor | None = None) -> None:
    """Checks that ``run`` gives the same on real tokens under every implementation."""
    results = {name: run(model) for name in implementations(model)}
    for peer in results.keys() - {"trifuse"}:
        got, wanted = results["trifuse"], results[peer]
        if real is not None:
            got, wanted = got[real.bool()], wanted[real.bool()]
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=5e-6)


@pytest.fixture
def masks_seen(monkeypatch) -> list[tuple[object, ...]]:
    """Each call's mask, by shape and dtype, whether it is causal, and its window."""
    seen: list[tuple[object, ...]] = []

    def spy(query, key, value, mask, dropout_p, is_causal, *rest, **named):
        shape = None if mask is None else (tuple(mask.shape), mask.dtype)
        seen.append((shape, bool(is_causal), named["window"]))
        args = (query, key, value, mask, dropout_p, is_causal, *rest)
        return trifuse.scaled_dot_product_attention(*args, **named)

    monkeypatch.setattr(huggingface, "scaled_dot_product_attention", spy)
    return seen


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("make", [bert, modernbert, *DECODERS])
def test_hidden_states(make, mask):
    model = build(make)
    compare(model, lambda m: m(input_ids=ids(), attention_mask=mask)[0], real=mask)


@pytest.mark.parametrize("mask", ["no mask", "padded right", "padded left"])
def test_encoder_decoder(mask):
    """T5: padding with a position bias, in the encoder, the decoder and cross attention."""
    model, mask = build(t5), MASKS[mask]
    compare(model, lambda m: m(input_ids=ids(), attention_mask=mask, decoder_input_ids=ids())[0])


@pytest.mark.parametrize("make", [bert, modernbert, llama, mistral, gemma2, gpt_oss, t5])
def test_gradients(make):
    model, mask = build(make), MASKS["padded right"]
    more = {"decoder_input_ids": ids()} if make is t5 else {}

    def run(model: nn.Module) -> Tensor:
        model.zero_grad()
        out = model(input_ids=ids(), attention_mask=mask, **more)[0]
        out[mask.bool()].square().sum().backward()
        grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        return grads / grads.abs().max()

    compare(model, run)


@pytest.mark.parametrize("mask", ["no padding", "padded left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("make", [*DECODERS, t5])
def test_generate(make, cache, mask):
    """Prefill and decoding, from either kind of cache."""
    options = {} if cache == "dynamic" else {"cache_implementation": "static"}
    compare(
        build(make),
        lambda m: m.generate(
            ids(),
            attention_mask=MASKS[mask],
            max_new_tokens=6,
            min_new_tokens=6,
            do_sample=False,
            disable_compile=True,
            pad_token_id=0,
            **options,
        ),
    )


@pytest.mark.parametrize("mask", ["no mask", "padded left"])
@pytest.mark.parametrize("make", DECODERS)
def test_prefill_in_pieces(make, mask):
    """With fewer queries than keys, the causal diagonal ends in the lower right corner."""
    mask = MASKS[mask]

    @torch.no_grad()
    def run(model: nn.Module) -> Tensor:
        first = None if mask is None else mask[:, :4]
        cache = model(input_ids=ids()[:, :4], attention_mask=first, use_cache=True).past_key_values
        return model(input_ids=ids()[:, 4:], attention_mask=mask, past_key_values=cache).logits

    compare(build(make), run, real=None if mask is None else mask[:, 4:])


@pytest.mark.parametrize("make", [llama, mistral])
def test_packed_sequences(make):
    """Position ids that restart within a row: no sequence attends to another."""
    positions = torch.tensor([[*range(4), *range(6)]]).expand(3, -1)
    compare(build(make), lambda m: m(input_ids=ids(), position_ids=positions)[0])


def test_mask_made_by_the_caller():
    mask = torch.rand(3, 1, L, L, generator=torch.Generator().manual_seed(2)) < 0.5
    mask |= torch.eye(L, dtype=torch.bool)
    model = build(llama)
    model.set_attn_implementation("sdpa")
    wanted = model(input_ids=ids(), attention_mask=mask)[0]
    trifuse.fuse(model)
    additive = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    for form in (mask, additive):
        torch.testing.assert_close(model(input_ids=ids(), attention_mask=form)[0], wanted)


def test_padding_travels_as_it_is(masks_seen):
    """No mask has a row for every query if padding and causality suffice."""
    huggingface.register()
    padded = MASKS["padded right"]
    row = ((3, 1, 1, L), torch.bool)
    one_row = ((1, 1, 1, L), torch.bool)
    for make, mask, wanted in (
        (bert, padded, [(row, False, None)] * 2),
        (bert, MASKS["no padding"], [(None, False, None)] * 2),
        (llama, padded, [(row, True, None)] * 2),
        (llama, MASKS["no padding"], [(None, True, None)] * 2),
        (mistral, padded, [(row, True, 3)] * 2),
        (mistral, None, [(one_row, True, 3)] * 2),
        (gemma3, padded, [(row, True, 3), (row, True, None)]),
        (modernbert, padded, [(row, False, None), (row, False, 2)]),
        (modernbert, MASKS["no padding"], [(None, False, None), (one_row, False, 2)]),
    ):
        model = build(make)
        model.set_attn_implementation("trifuse")
        model(input_ids=ids(), attention_mask=mask)
        assert masks_seen == wanted
        masks_seen.clear()


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("make", [modernbert, mistral, gpt_oss])
def test_windows_have_the_bits_of_dense_masks(make, mask, monkeypatch):
    model = build(make)
    trifuse.fuse(model)
    out = model(input_ids=ids(), attention_mask=mask)[0]
    monkeypatch.setattr(huggingface, "_WINDOWS", ())
    dense = model(input_ids=ids(), attention_mask=mask)[0]
    real = slice(None) if mask is None else mask.bool()
    assert torch.equal(out[real], dense[real])


def test_windows_under_compile():
    """A dense mask takes the place of what a graph can't hold."""
    model = build(modernbert)
    trifuse.fuse(model)
    mask = MASKS["padded left"]
    with torch.no_grad():
        wanted = model(input_ids=ids(), attention_mask=mask)[0]
        got = torch.compile(model, backend="eager")(input_ids=ids(), attention_mask=mask)[0]
    torch.testing.assert_close(got[mask.bool()], wanted[mask.bool()])


def test_padding_is_read_only_where_that_is_free(monkeypatch):
    """While compiling, the mask's values aren't read."""
    mask = torch.ones(2, 5, dtype=torch.bool)
    arguments = {
        "batch_size": 2,
        "q_length": 5,
        "kv_length": 5,
        "mask_function": masking_utils.bidirectional_mask_function,
        "attention_mask": mask,
        "allow_is_bidirectional_skip": True,
    }
    assert huggingface.attention_mask(**arguments) is None
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    kept = huggingface.attention_mask(**arguments)
    assert kept.shape == (2, 1, 1, 5)
    assert kept.data_ptr() == mask.data_ptr()


@pytest.mark.parametrize("make", [bert, gpt2, deberta])
def test_masks_without_values_are_not_read(make):
    """vmap and fake tensors have none."""
    model, tokens, mask = build(make), ids(), MASKS["padded right"]
    trifuse.fuse(model)
    parameters = dict(model.named_parameters())

    def loss(parameters, tokens, mask):
        given = {"attention_mask": mask[None]}
        return torch.func.functional_call(model, parameters, (tokens[None],), given)[0].sin().sum()

    gradients = torch.func.grad(loss)
    together = torch.vmap(gradients, (None, 0, 0))(parameters, tokens, mask)
    for i in range(len(mask)):
        for name, each in gradients(parameters, tokens[i], mask[i]).items():
            torch.testing.assert_close(together[name][i], each, rtol=1e-4, atol=1e-5)
    with FakeTensorMode() as mode:
        fake = make()
        trifuse.fuse(fake)
        out = fake(mode.from_tensor(tokens), attention_mask=mode.from_tensor(mask))[0]
    assert out.shape[:2] == mask.shape


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 8])
@pytest.mark.parametrize("kind", ["causal", "bidirectional"])
@pytest.mark.parametrize(
    ("q_length", "kv_length", "q_offset", "kv_offset", "given"),
    [
        (5, 5, 0, 0, 5),
        (5, 7, 0, 0, 5),  # keys to come, as in a static cache
        (5, 7, 0, 0, 9),
        (3, 8, 5, 0, 8),  # more queries on a cache
        (3, 8, 7, 2, 10),  # a cache without its first keys
        (1, 8, 7, 0, 8),
    ],
)
def test_mask_means_what_transformers_means(
    q_length, kv_length, q_offset, kv_offset, given, kind, window, skip
):
    function = getattr(masking_utils, f"{kind}_mask_function")
    if window is not None:
        function = getattr(masking_utils, f"sliding_window_{kind}_mask_function")(window)
    arguments = {
        "batch_size": 2,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": function,
    }
    generator = torch.Generator().manual_seed(0)
    padding = torch.rand(2, given, generator=generator) < 0.7
    whole = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    wanted = masking_utils.sdpa_mask(**arguments, attention_mask=padding, **whole)
    options = {f"allow_is_{kind}_skip": True} if skip else whole
    options = {"allow_is_causal_skip": False} | options
    mask = huggingface.attention_mask(**arguments, attention_mask=padding, **options)
    if not skip:
        assert (mask.shape, mask.dtype) == (wanted.shape, torch.bool)
    if mask.dtype in (torch.uint8, torch.int8):
        causal = mask.dtype == torch.uint8
        diagonal = torch.arange(q_length)[:, None] + (kv_length - q_length if causal else 0)
        behind = diagonal - torch.arange(kv_length)
        reach = mask.shape[2] - 2 if mask.shape[2] > 1 else kv_length
        mask = mask[:, :, :1].bool() & (behind <= reach) & (behind >= (0 if causal else -reach))
    assert torch.equal(mask.expand_as(wanted), wanted)


def test_attention_of_packed_sequences():
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 5, 8, dtype=torch.float64)
    keep = torch.arange(5) < torch.tensor([5, 2])[:, None]
    packed = packing.pack(nn.Identity(), keep)
    mask = keep[:, None, None]
    wanted, _ = huggingface.attention_forward(nn.Module(), query, key, value, mask, scaling=0.7)
    tokens = [
        packing.gather(x.transpose(1, 2).flatten(2), packed).unflatten(2, (4, 8)).transpose(1, 2)
        for x in (query, key, value)
    ]
    got, _ = huggingface.attention_forward(nn.Module(), *tokens, packed, scaling=0.7)
    torch.testing.assert_close(got[0], wanted[keep])


def test_dropout_is_passed_on():
    config = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.5}
    model = build(lambda: bert(**config))
    trifuse.fuse(model)
    for mask in (MASKS["no padding"], MASKS["padded right"]):

        def run(mask: Tensor = mask) -> Tensor:
            return model(input_ids=ids(), attention_mask=mask)[0][mask.bool()]

        model.eval()
        assert torch.equal(run(), run())
        model.train()
        assert not torch.equal(run(), run())


@pytest.mark.parametrize(
    "argument", [{"cache": object()}, {"sinks": torch.zeros(4)}, {"output_attentions": True}]
)
def test_what_is_not_supported_raises(argument):
    query = torch.zeros(1, 4, 3, 8)
    with pytest.raises(ValueError, match=f"does not support {next(iter(argument))}"):
        huggingface.attention_forward(nn.Module(), query, query, query, None, **argument)


def test_chosen_when_the_model_is_made(tmp_path):
    huggingface.register()
    huggingface.register()
    build(bert).save_pretrained(tmp_path)
    ours = transformers.BertModel.from_pretrained(tmp_path, attn_implementation="trifuse").eval()
    theirs = transformers.BertModel.from_pretrained(tmp_path, attn_implementation="sdpa").eval()
    assert ours.config._attn_implementation == "trifuse"
    mask = MASKS["padded left"]
    got, wanted = (m(input_ids=ids(), attention_mask=mask)[0] for m in (ours, theirs))
    torch.testing.assert_close(got[mask.bool()], wanted[mask.bool()])
    assert "" not in [swapped.path for swapped in trifuse.fuse(ours).swapped]


# fuse -------------------------------------------------------------------------------------------


def test_models_that_share_a_configuration():
    """Fusing one leaves the other as it is, in either order."""
    config = transformers.BertConfig(**PADDED_SIZES, attn_implementation="sdpa")
    a, b = transformers.BertModel(config), transformers.BertModel(config)

    def chosen(model: nn.Module) -> set[str]:
        return {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}

    first = trifuse.fuse(a)
    assert (chosen(a), chosen(b)) == ({"trifuse"}, {"sdpa"})
    assert all(m.config is a.config for m in a.modules() if hasattr(m, "config"))
    second = trifuse.fuse(b)
    first.revert()
    assert (chosen(a), chosen(b)) == ({"sdpa"}, {"trifuse"})
    second.revert()
    assert (chosen(a), chosen(b)) == ({"sdpa"}, {"sdpa"})
    assert all(m.config is config for x in (a, b) for m in x.modules() if hasattr(m, "config"))


class Around(nn.Module):
    """A module of someone's own around models, which keeps their configuration."""

    def __init__(self, config: Any, count: int) -> None:
        super().__init__()
        self.config = config
        self.models = nn.ModuleList(transformers.BertModel(config) for _ in range(count))
        self.attention = code.modeling("bert").BertSelfAttention(config)


@pytest.mark.parametrize("count", [1, 2])
def test_a_configuration_that_a_module_around_models_holds(count):
    """It stays the models' own; an attention outside of models keeps the one that it has."""
    config = transformers.BertConfig(**PADDED_SIZES, attn_implementation="sdpa")
    around = Around(config, count).eval()
    report = trifuse.fuse(around)
    assert all(model.config is around.config for model in around.models)
    assert around.attention.config is config is not around.config
    assert config._attn_implementation == "sdpa"
    assert pickle.loads(pickle.dumps(around)).config._attn_implementation == "trifuse"
    around.config.output_hidden_states = True
    for model in around.models:
        assert model(input_ids=ids()).hidden_states is not None
    report.revert()
    assert all(m.config is config for m in around.modules() if hasattr(m, "config"))
    assert not config.output_hidden_states


class AroundTwo(nn.Module):
    """A module of someone's own around two models, whose configurations its own holds."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.text = transformers.BertModel(config.text_config)
        self.vision = transformers.ViTModel(config.vision_config)


def test_a_configuration_that_holds_those_of_models():
    """The module's own configuration holds the models' ones, the one that it was made from not."""
    sizes = {**PADDED_SIZES, "attn_implementation": "sdpa"}
    text = transformers.BertConfig(**sizes)
    vision = transformers.ViTConfig(**sizes, image_size=8, patch_size=4)
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(vision, text)
    around = AroundTwo(config)
    before = around.text.config, around.vision.config
    report = trifuse.fuse(around)
    assert around.config.text_config is around.text.config
    assert around.config.vision_config is around.vision.config
    assert around.config.text_config._attn_implementation == "trifuse"
    assert (config.text_config, config.vision_config) == before
    assert before[0]._attn_implementation == before[1]._attn_implementation == "sdpa"
    report.revert()
    assert around.config is config
    assert (around.text.config, around.vision.config) == before


def test_a_model_around_one_that_is_fused():
    """The outer model is left alone, as one of its models is; it holds the other's new copy."""
    vision = transformers.ViTConfig(**PADDED_SIZES, image_size=8, patch_size=4)
    vision._attn_implementation = "eager"
    vision.output_attentions = True
    text = transformers.BertConfig(**PADDED_SIZES, is_decoder=True, add_cross_attention=True)
    model = transformers.VisionEncoderDecoderModel(
        encoder=transformers.ViTModel(vision), decoder=transformers.BertLMHeadModel(text)
    )
    before = model.config
    report = trifuse.fuse(model)
    assert [each.path for each in report.left][:2] == ["", "encoder"]
    assert model.decoder.config is model.config.decoder
    assert model.config.decoder._attn_implementation == "trifuse"
    assert model.config._attn_implementation == before._attn_implementation
    assert model.encoder.config is model.config.encoder
    report.revert()
    assert model.config is before
    assert model.decoder.config is before.decoder


def test_fuse_keeps_everything_else():
    model = transformers.BertForPreTraining(transformers.BertConfig(**PADDED_SIZES)).train()
    before = model.state_dict()
    modules = dict(model.named_modules())
    report = trifuse.fuse(model, unpad=True)
    theirs, ours = "transformers.models.bert.modeling_bert", "trifuse.recipes"
    parts = (("attention.output", "BertSelfOutput"), ("intermediate", "BertIntermediate"))
    norms = [s.path for s in report.swapped if s.after == "trifuse.nn.LayerNorm"]
    assert norms == ["cls.predictions.transform.LayerNorm"]
    alone = ("trifuse.nn.Dropout", "trifuse.nn.LayerNorm")
    swapped = [s for s in report.swapped if s.after not in alone]
    assert [(s.path, s.before, s.after) for s in swapped] == [
        ("", 'attn_implementation="sdpa"', '"trifuse"'),
        ("bert.embeddings", f"{theirs}.BertEmbeddings", f"{ours}.BertEmbeddings"),
        (
            "bert.encoder",
            f"{theirs}.BertEncoder",
            f"{ours}.BertEncoder, without padding",
        ),
        *(
            (f"bert.encoder.layer.{i}.{part}", f"{theirs}.{name}", f"{ours}.{name}")
            for i in range(2)
            for part, name in (*parts, ("output", "BertOutput"))
        ),
        *(
            (path, f"{theirs}.{name}", f"{ours}.{name}{more}")
            for path, name, more in (
                ("cls.predictions.transform", "BertPredictionHeadTransform", ""),
                ("bert", "BertModel", ", without padding"),
            )
        ),
    ]
    assert dict(model.named_modules()) == modules
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(after[name].data_ptr() == value.data_ptr() for name, value in before.items())
    assert all(module.training for module in model.modules())
    word = model.bert.embeddings.word_embeddings.weight
    assert model.cls.predictions.decoder.weight is word
    assert not trifuse.fuse(model, unpad=True).swapped
    report.revert()
    assert type(model.bert) is transformers.BertModel
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("unpad", [False, True])
def test_bert_with_hidden_states(unpad):
    """transformers records hidden states by module class, which fuse changes."""
    model, mask = build(bert), MASKS["padded right"]
    arguments = {"input_ids": ids(), "attention_mask": mask, "output_hidden_states": True}
    wanted = model(**arguments).hidden_states
    trifuse.fuse(model, unpad=unpad)
    got = model(**arguments).hidden_states
    assert len(got) == len(wanted)
    for mine, their in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine[mask.bool()], their[mask.bool()], rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("hidden_act", ["gelu", "gelu_pytorch_tanh", "gelu_new", "relu"])
def test_bert_activations(hidden_act):
    model, mask = build(lambda: bert(hidden_act=hidden_act)), MASKS["padded right"]
    compare(model, lambda m: m(input_ids=ids(), attention_mask=mask)[0], real=mask)


def test_nested_in_another_module():
    model = nn.ModuleDict({"encoder": build(bert), "head": nn.MultiheadAttention(32, 4)})
    report = trifuse.fuse(model, unpad=True)
    swapped = [s for s in report.swapped if s.after != "trifuse.nn.Dropout"]
    paths = [s.path for s in swapped if ".layer." not in s.path]
    assert paths == ["encoder", "encoder.embeddings", "encoder.encoder", "head", "encoder"]
    report.revert()
    assert model["encoder"].config._attn_implementation == "sdpa"


def test_models_that_need_something_else_are_left(monkeypatch):
    monkeypatch.setattr(transformers.LlamaPreTrainedModel, "_supports_sdpa", False)
    other = transformers.LlamaForCausalLM._from_config(
        transformers.LlamaConfig(**GROUPED_SIZES), attn_implementation="eager"
    )
    wanting = bert(attn_implementation="eager")
    wanting.config.output_attentions = True
    for model, reason in ((other, "needs more of attention"), (wanting, "returns its attention")):
        before = model.config._attn_implementation
        report = trifuse.fuse(model, unpad=True)
        assert "" not in [s.path for s in report.swapped]
        assert reason in report.left[0].reason
        assert model.config._attn_implementation == before


def test_importing_trifuse_does_not_import_transformers():
    code = "import sys, trifuse; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
