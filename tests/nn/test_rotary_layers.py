"""Layers of Llama's kind as one op: the bits of their parts, and when the parts run."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from rotary_models import (
    DTYPES,
    FAMILIES,
    GROUPED,
    REPLACED,
    build,
    call,
    config,
    family,
    keep,
    kept,
    modern_bert,
    only_parts,
    start,
    words,
)
from torch import Tensor, nn
from torch.nn.utils import prune

import trifuse
from trifuse.nn import encoder_layer
from trifuse.ops._linear_choice import is_available
from trifuse.recipes import known_layers

transformers = pytest.importorskip("transformers")

FREEZE = pytest.mark.parametrize("freeze", [False, True])

pytestmark = [
    pytest.mark.skipif(not is_available(torch.float32), reason="no C++ extension"),
    pytest.mark.usefixtures("our_product"),
]

# The same bits ------------------------------------------------------------------------------------


@FREEZE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.covering
def test_without_a_cache(cpp_kernel, served, name, dtype, batch, freeze):
    model = build(name, dtype, freeze=freeze)
    for length in (1, 2, 5, 12, 70):
        for mask in (None, keep(batch, length)):
            with torch.no_grad():
                actual = call(model, words(batch, length), mask=mask)
                with only_parts():
                    expected = call(model, words(batch, length), mask=mask)
            assert actual.isfinite().all()
            assert torch.equal(actual, expected)
    assert served == [True] * 2 * 5 * 2


@FREEZE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.covering
def test_with_a_dynamic_cache(cpp_kernel, served, name, dtype, batch, padded, freeze):
    model = build(name, dtype, freeze=freeze)
    ids = words(batch, 160)
    mask = keep(batch, 160) if padded else None

    def decode() -> tuple[list[Tensor], Any]:
        past, found, end = transformers.DynamicCache(config=model.config), [], 0
        # A prompt; single tokens and several, within a window and past it; more than a tile.
        for length in (7, 1, 1, 3, 1, 1, 2, 90, 1, 1):
            end += length
            seen = None if mask is None else mask[:, :end]
            found.append(call(model, ids[:, end - length : end], past, seen))
        return found, past

    with torch.inference_mode():
        actual, past = decode()
        with only_parts():
            expected, its_past = decode()
        # First each goes on from its own cache; then the op from that of the parts, and these from
        # that of the op.
        for one, other in ((past, its_past), (its_past, past)):
            assert torch.equal(kept(one)[0], kept(other)[0])
            actual.append(call(model, ids[:, 108:110], one))
            with only_parts():
                expected.append(call(model, ids[:, 108:110], other))
    assert served == [True] * 2 * 12
    assert all(map(torch.equal, actual, expected))
    assert all(map(torch.equal, kept(past), kept(its_past)))
    assert past.get_seq_length() == its_past.get_seq_length() == 112


@FREEZE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Olmo2", "Glm", "Granite"])
@pytest.mark.parametrize("batch", [1, 3])
def test_with_a_static_cache(served, name, dtype, batch, freeze):
    model = build(name, dtype, freeze=freeze)
    ids, mask = words(batch, 30), keep(batch, 30)

    def decode() -> tuple[list[Tensor], Any]:
        past, found, end = transformers.StaticCache(model.config, max_cache_len=25), [], 0
        for length in (7, 1, 1, 3, 12, 1):
            end += length
            found.append(call(model, ids[:, end - length : end], past, mask[:, :end]))
        with pytest.raises((IndexError, RuntimeError)):
            call(model, ids[:, :1], past)
        return found, past

    with torch.no_grad():
        actual, past = decode()
        with only_parts():
            expected, its_past = decode()
    assert served == [True] * 2 * 6 + [False]
    assert all(map(torch.equal, actual, expected))
    assert all(map(torch.equal, kept(past), kept(its_past)))


@FREEZE
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", FAMILIES)
def test_generation(served, name, cache, freeze):
    torch.manual_seed(0)
    kind = getattr(transformers, f"{family(name).removesuffix('Text')}ForCausalLM")
    model = kind(config(name, max_position_embeddings=64)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5 if parameter.dim() == 2 else 1.0)
    ids = words(2, 7)

    def generate() -> Any:
        return model.generate(
            ids,
            attention_mask=keep(2, 7),
            max_new_tokens=12,
            min_new_tokens=12,
            do_sample=False,
            cache_implementation=cache,
            disable_compile=True,
            pad_token_id=0,
        )

    wanted = generate()
    assert len(wanted.unique()) > 8
    report = trifuse.fuse(model, freeze=freeze)
    assert torch.equal(generate(), wanted)
    assert any(served) or (cache == "static" and name == "Mistral")  # that slides
    report.revert()
    assert torch.equal(generate(), wanted)


@FREEZE
def test_beams(served, freeze):
    model = transformers.LlamaForCausalLM(config("Llama")).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5 if parameter.dim() == 2 else 1.0)
    options = {"num_beams": 3, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(words(2, 7), **options)
    trifuse.fuse(model, freeze=freeze)
    assert torch.equal(model.generate(words(2, 7), **options), wanted)
    assert served
    assert all(served)


@FREEZE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Olmo2", "Cohere2", "Glm"])
def test_without_padding(served, packed, name, dtype, freeze):
    model = build(name, dtype, fused=False)
    trifuse.fuse(model, unpad=True, freeze=freeze)
    with torch.no_grad():
        actual = call(model, words(3, 12), mask=keep(3, 12))
        with only_parts():
            expected = call(model, words(3, 12), mask=keep(3, 12))
    assert torch.equal(actual, expected)
    assert served == [True] * 2
    assert packed == [31] * 2  # the tokens of the parts; the op calls no module


@FREEZE
@pytest.mark.parametrize("dtype", DTYPES)
def test_phi3_with_whole_heads_rotated(served, dtype, freeze):
    model = build("Phi3", dtype, freeze=freeze, partial_rotary_factor=1.0)
    with torch.no_grad():
        actual = call(model, words(3, 12), mask=keep(3, 12))
        with only_parts():
            assert torch.equal(actual, call(model, words(3, 12), mask=keep(3, 12)))
    assert served == [True] * 2


@FREEZE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unpad", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_modern_bert(served, dtype, unpad, bias, freeze):
    model = modern_bert(dtype, norm_bias=bias, attention_bias=bias)
    trifuse.fuse(model, unpad=unpad, freeze=freeze)

    def run(length: int, mask: Tensor | None) -> Tensor:
        out: Tensor = model(words(3, length), attention_mask=mask).last_hidden_state
        return out

    for length in (1, 5, 70):
        for mask in (None, keep(3, length)):
            with torch.no_grad():
                actual = run(length, mask)
                with only_parts():
                    assert torch.equal(actual, run(length, mask))
    assert served == [True] * 3 * 3 * 2


@FREEZE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unpad", [False, True])
def test_an_encoder_with_llamas_code(served, dtype, unpad, freeze):
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "mask_token_id": 3}
    made = transformers.EuroBertConfig(**GROUPED | tokens | {"num_key_value_heads": 4})
    torch.manual_seed(0)
    model = transformers.EuroBertModel(made).eval().to(dtype)
    trifuse.fuse(model, unpad=unpad, freeze=freeze)
    for mask in (None, keep(3, 12)):
        with torch.no_grad():
            actual = model(words(3, 12), attention_mask=mask).last_hidden_state
            other = words(3, 12)
            other[:, -1] = 1
            changed = model(other, attention_mask=mask).last_hidden_state
            with only_parts():
                expected = model(words(3, 12), attention_mask=mask).last_hidden_state
        assert torch.equal(actual, expected)
        assert not torch.equal(actual[0, 0], changed[0, 0])  # it sees later tokens
    assert served == [True] * 2 * 2 * 2


# When the parts run -------------------------------------------------------------------------------


def hooked(layer: Any) -> None:
    layer.mlp.register_forward_hook(lambda module, args, out: out + 1)


def replaced(layer: Any) -> None:
    layer.mlp.down_proj = nn.Linear(48, 32)


def replaced_forward(layer: Any) -> None:
    layer.self_attn.o_proj.forward = torch.zeros_like


def replaced_norm(layer: Any) -> None:
    layer.input_layernorm = nn.Sequential(nn.LayerNorm(32), nn.Tanh())


def pruned_norm(layer: Any) -> None:
    prune.l1_unstructured(layer.input_layernorm, "weight", 0.5)


def another_class(layer: Any) -> None:
    class Doubled(type(layer.self_attn)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out, weights = super().forward(*args, **kwargs)
            return 2 * out, weights

    layer.self_attn.__class__ = Doubled


def training(layer: Any) -> None:
    layer.mlp.train()


def no_module(layer: Any) -> None:
    del layer.mlp.act_fn
    layer.mlp.act_fn = torch.tanh


@FREEZE
@pytest.mark.parametrize(
    "change",
    [
        hooked,
        replaced,
        replaced_forward,
        replaced_norm,
        pruned_norm,
        another_class,
        training,
        no_module,
    ],
)
@pytest.mark.parametrize("cached", [False, True])
def test_a_changed_layer_calls_its_parts(served, change, cached, freeze):
    model = build("Llama", freeze=freeze)
    past = lambda: start(model) if cached else None  # noqa: E731
    with torch.no_grad():
        before = call(model, words(1, 4), past())
        change(model.layers[1])
        del served[:]
        after = call(model, words(1, 4), past())
        # The op isn't tried if the attention's code isn't known.
        assert served == ([True] if change is another_class else [True, False]) * (1 + cached)
        with only_parts():
            assert torch.equal(after, call(model, words(1, 4), past()))
    assert change is training or not torch.equal(before, after)


@FREEZE
@pytest.mark.parametrize("cls", ["LlamaAttention", "LlamaMLP", "LlamaDecoderLayer"])
@REPLACED
def test_a_forward_replaced_in_a_class_is_called(served, monkeypatch, cls, disguise, freeze):
    from transformers.models.llama import modeling_llama

    model = build("Llama", freeze=freeze)
    source = getattr(modeling_llama, cls)
    forward = source.forward

    def doubled(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        return (2 * out[0], out[1]) if isinstance(out, tuple) else 2 * out

    with torch.no_grad():
        before = call(model, words(1, 4))
        with monkeypatch.context() as patch:
            patch.setattr(source, "forward", disguise(forward, doubled))
            after = call(model, words(1, 4))
            with only_parts():
                expected = call(model, words(1, 4))
        again = call(model, words(1, 4))
    assert served[:2] == served[-2:] == [True] * 2
    assert not any(served[2:-2])
    assert torch.equal(after, expected)
    # Their own were compiled again, with changes, when they were swapped.
    assert torch.equal(after, before)
    assert torch.equal(again, before)


@FREEZE
def test_changes_of_what_is_not_frozen_are_noticed(served, freeze):
    model = build("Qwen3", freeze=freeze)
    layer = model.layers[0]

    def norm() -> None:
        layer.post_attention_layernorm.weight.data = torch.randn(32)

    def head_norm() -> None:
        layer.self_attn.k_norm.weight = nn.Parameter(torch.randn(12))

    def eps() -> None:
        layer.self_attn.q_norm.variance_epsilon = layer.self_attn.k_norm.variance_epsilon = 0.5

    def scaling() -> None:
        layer.self_attn.scaling = 0.9

    with torch.no_grad():
        last = call(model, words(1, 4))
        for change in (norm, head_norm, eps, scaling):
            change()
            actual = call(model, words(1, 4))
            with only_parts():
                assert torch.equal(actual, call(model, words(1, 4)))
            assert not torch.equal(actual, last)
            last = actual
        assert served
        assert all(served)
        layer.self_attn.k_norm.variance_epsilon = 0.1  # differs from the query's
        actual = call(model, words(1, 4))
        assert served[-2:] == [True, True]
        assert not torch.equal(actual, last)
        with only_parts():
            assert torch.equal(actual, call(model, words(1, 4)))


@pytest.mark.skipif("Gemma2" not in FAMILIES, reason="its code isn't known")
def test_values_that_the_parts_refuse():
    model = build("Gemma2")
    layer = model.layers[0]
    with torch.no_grad():
        call(model, words(1, 4))
        for owner, name, value in (
            (layer.self_attn, "attn_logit_softcapping", 0.0),
            (layer.self_attn, "attn_logit_softcapping", -3.0),
            (layer.pre_feedforward_layernorm, "eps", -1e-9),
        ):
            kept = getattr(owner, name)
            setattr(owner, name, value)
            with pytest.raises(trifuse.ArgumentError):
                call(model, words(1, 4))
            setattr(owner, name, kept)
        call(model, words(1, 4))


@FREEZE
@pytest.mark.skipif("Gemma2" not in FAMILIES, reason="its code isn't known")
def test_float32_norms_of_gemma(served, freeze):
    model = build("Gemma2", torch.bfloat16, freeze=freeze)
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.endswith("norm"):
                module.weight.data = module.weight.data.float() + 1e-4
        actual = call(model, words(1, 4))
        with only_parts():
            assert torch.equal(actual, call(model, words(1, 4)))
    assert served == [True] * 2


@FREEZE
def test_norms_of_another_dtype_are_called(served, freeze):
    model = build("Llama", torch.bfloat16, freeze=freeze)
    with torch.no_grad():
        norm = model.layers[1].post_attention_layernorm
        norm.weight.data = norm.weight.data.float()
        x = torch.randn(1, 4, 32).bfloat16()
        rotary = model.rotary_emb(x, torch.arange(4)[None])
        with pytest.raises(RuntimeError, match=r"dtype|same"):  # the network gets float32
            model.layers[1](x, position_embeddings=rotary)
    assert served == [False]


@FREEZE
def test_an_identity_in_place_of_a_norm(served, freeze):
    model = build("Llama", freeze=freeze)
    with torch.no_grad():
        model.layers[0].input_layernorm = nn.Identity().eval()
        model.layers[1].post_attention_layernorm = nn.Identity().eval()
        actual = call(model, words(1, 4))
        assert served == [True, False]
        with only_parts():
            assert torch.equal(actual, call(model, words(1, 4)))


@FREEZE
@pytest.mark.parametrize("name", ["apply_rotary_pos_emb", "rotate_half"])
@REPLACED
def test_a_rotation_that_was_replaced_is_called(served, monkeypatch, name, disguise, freeze):
    from transformers.models.llama import modeling_llama

    model = build("Llama", freeze=freeze)
    own = getattr(modeling_llama, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        out = own(*args, **kwargs)
        return -out if isinstance(out, Tensor) else (out[0] + 1, out[1])

    with torch.no_grad():
        before = call(model, words(1, 4))
        monkeypatch.setattr(modeling_llama, name, disguise(own, changed))
        after = call(model, words(1, 4))
    assert served == [True] * 2  # the op isn't tried if the rotation isn't known
    assert not torch.equal(before, after)


@FREEZE
@pytest.mark.parametrize("name", ["Llama", "Olmo2", "Ernie4_5", "Cohere"])
def test_float32_cosines_beside_bfloat16(served, name, freeze):
    model = build(name, torch.bfloat16, freeze=freeze)
    x = torch.randn(1, 4, 32).bfloat16()
    cos, sin = (t.float() + 1e-4 for t in model.rotary_emb(x, torch.arange(4)[None]))
    layer = model.layers[0]
    with torch.no_grad():
        if name == "Llama":  # the parts would attend to float32 keys
            with pytest.raises((RuntimeError, TypeError)):
                layer(x, position_embeddings=(cos, sin))
            assert not any(served)
            return
        actual = layer(x, position_embeddings=(cos, sin))
        rounded = layer(x, position_embeddings=(cos.bfloat16(), sin.bfloat16()))
        with only_parts():
            assert torch.equal(actual, layer(x, position_embeddings=(cos, sin)))
    assert not torch.equal(actual, rounded)
    assert served == [True] * 2


def other_rotary_ndims(layer: Any) -> None:
    layer.self_attn.rotary_ndims = 2


def no_norms_of_heads(layer: Any) -> None:
    layer.self_attn.qk_layernorm = False


def parallel(layer: Any) -> None:
    layer.use_parallel_residual = True


def no_rotation(layer: Any) -> None:
    layer.self_attn.use_rope = False


def no_window(layer: Any) -> None:
    layer.self_attn.sliding_window = None


def not_sliding(layer: Any) -> None:
    layer.self_attn.is_sliding = False


def other_multiplier(layer: Any) -> None:
    layer.residual_multiplier = 0.7


def norm_of_all_heads(layer: Any) -> None:
    layer.self_attn.q_norm.weight.data = torch.randn(32)


@FREEZE
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("Phi, norms of heads", no_norms_of_heads),
        ("StableLm", parallel),
        ("SmolLM3", no_rotation),
        ("Cohere2", no_window),
        ("Exaone4", not_sliding),
        ("Olmo2", norm_of_all_heads),
        ("Granite", other_multiplier),
    ],
)
def test_changed_attributes_are_noticed(served, name, change, freeze):
    if name not in FAMILIES:
        pytest.skip("its code isn't known")
    model = build(name, freeze=freeze)
    with torch.no_grad():
        before = call(model, words(1, 4))
        change(model.layers[0])
        after = call(model, words(1, 4))
        assert not torch.equal(before, after)
        with only_parts():
            assert torch.equal(after, call(model, words(1, 4)))
    assert served == [True] * 4


@FREEZE
@pytest.mark.skipif("Granite" not in FAMILIES, reason="its code isn't known")
def test_results_multiplied_by_a_tensor_call_the_parts(served, freeze):
    model = build("Granite", freeze=freeze)
    with torch.no_grad():
        before = call(model, words(1, 4))
        model.layers[1].residual_multiplier = torch.full((32,), 0.22)
        torch.testing.assert_close(call(model, words(1, 4)), before)
    assert served == [True, True, True, False]
    reason = "its results are multiplied by something else than a number"
    assert known_layers.why_not(model.layers[1]) == reason


@FREEZE
@pytest.mark.skipif("Phi" not in FAMILIES, reason="its code isn't known")
def test_a_rotation_of_other_features_is_refused_as_by_the_parts(served, freeze):
    model = build("Phi", freeze=freeze)
    with torch.no_grad():
        other_rotary_ndims(model.layers[1])
        with pytest.raises(RuntimeError, match="size"):
            call(model, words(1, 4))
    assert served == [True]


@pytest.mark.skipif("Phi" not in FAMILIES, reason="its code isn't known")
@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("StableLm", {"qk_layernorm": True}, "its norms aren't all LayerNorms, or RMSNorms"),
        ("Cohere", {"use_qk_norm": True}, "its norms are over several dimensions"),
    ],
)
def test_norms_of_each_head_call_the_parts(served, name, options, problem):
    model = build(name, fused=False, **options)
    wanted = call(model, words(1, 4))
    reasons = {left.path: left.reason for left in trifuse.fuse(model, freeze=True).left}
    assert reasons["layers.1"].startswith(f"calls its parts: {problem}")
    with torch.no_grad():
        torch.testing.assert_close(call(model, words(1, 4)), wanted, rtol=1e-3, atol=1e-3)
    assert not any(served)


@pytest.mark.skipif("StableLm" not in FAMILIES, reason="its code isn't known")
def test_a_serial_layer_without_its_norm_calls_its_parts(served):
    model = build("StableLm")
    model.layers[1].post_attention_layernorm = None
    with torch.no_grad(), pytest.raises((AttributeError, TypeError), match="NoneType"):
        call(model, words(1, 4))
    assert served == [True, False]


def test_a_rotation_of_some_tokens_calls_the_parts(served):
    layer, x = build("Llama").layers[0], torch.randn(1, 4, 32)
    with torch.no_grad():
        cos, sin = torch.randn(2, 1, 3, 8)
        with pytest.raises(RuntimeError, match="size"):
            layer(x, position_embeddings=(cos, sin))
        one = cos[:, :1], sin[:, :1]  # for all tokens
        actual = layer(x, position_embeddings=one)
        assert not any(served)
        repeated = tuple(each.expand(1, 4, 8) for each in one)
        assert torch.equal(layer(x, position_embeddings=repeated), actual)
    assert served[-1] is True


def test_a_rotation_of_parts_of_heads_is_refused_as_by_the_parts(served):
    layer = build("Llama").layers[0]
    cos, sin = torch.randn(2, 1, 4, 4)  # heads have 8 features
    with torch.no_grad(), pytest.raises(RuntimeError, match="size"):
        layer(torch.randn(1, 4, 32), position_embeddings=(cos, sin))
    assert not any(served)


@FREEZE
@pytest.mark.parametrize(
    "options",
    [{"output_attentions": False}, {"output_hidden_states": False}, {"num_items_in_batch": 3}],
    ids=lambda options: next(iter(options)),
)
def test_options_that_change_nothing(served, options, freeze):
    model = build("Llama", freeze=freeze)
    with torch.no_grad():
        actual = model(words(1, 4), **options).last_hidden_state
        assert torch.equal(actual, call(model, words(1, 4)))
    assert served == [True] * 4


@FREEZE
def test_other_ways_to_call(served, freeze):
    model, plain = build("Llama", freeze=freeze), build("Llama", fused=False)
    close = torch.testing.assert_close
    embedded = torch.randn(2, 5, 32, requires_grad=True)
    grads = [
        torch.autograd.grad(each(inputs_embeds=embedded).last_hidden_state.sum(), embedded)[0]
        for each in (model, plain)
    ]
    close(*grads, rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        expected = plain(inputs_embeds=embedded).last_hidden_state
        x = embedded.detach()
        run = lambda **options: model(inputs_embeds=x, **options)  # noqa: E731
        with trifuse.backend("eager"):
            close(run().last_hidden_state, expected, rtol=1e-3, atol=1e-3)
        assert not any(served)
        hidden = run(output_hidden_states=True).hidden_states
        assert len(hidden) == 3
        close(hidden[-1], expected, rtol=1e-3, atol=1e-3)
        del served[:]
        close(run().last_hidden_state, expected, rtol=1e-3, atol=1e-3)
        assert served == [True] * 2  # the hooks that record are still there
        model.set_attn_implementation("eager")
        del served[:]
        close(run().last_hidden_state, expected, rtol=1e-3, atol=1e-3)
        assert not any(served)
        model.set_attn_implementation("trifuse")
        close(run().last_hidden_state, expected, rtol=1e-3, atol=1e-3)
        dense = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
        close(run(attention_mask=dense).last_hidden_state, expected, rtol=1e-3, atol=1e-3)


@FREEZE
def test_compiled(served, freeze):
    model, plain = build("Llama", freeze=freeze), build("Llama", fused=False)
    with torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager")
        actual = call(compiled, words(2, 5))
        torch.testing.assert_close(actual, call(plain, words(2, 5)), rtol=1e-3, atol=1e-3)
    assert not any(served)


@FREEZE
def test_copies_and_pickles(freeze):
    model = build("Llama", freeze=freeze)
    with torch.no_grad():
        expected = call(model, words(1, 4))
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(twin.layers[0]) is type(model.layers[0])
            assert torch.equal(call(twin, words(1, 4)), expected)
            twin.layers[0].input_layernorm.weight.add_(1)
            assert not torch.equal(call(twin, words(1, 4)), expected)
            assert torch.equal(call(model, words(1, 4)), expected)


# Recognition --------------------------------------------------------------------------------------


def test_layers_that_do_not_fit_are_reported():
    model = build("Llama", fused=False, hidden_act="tanh")
    report = trifuse.fuse(model, freeze=True)
    reasons = {left.path: left.reason for left in report.left}
    assert reasons["layers.0"] == "calls its parts: no product of ours has its activation"
    model = build("Llama", fused=False)
    model.layers[1].mlp.up_proj.weight = model.layers[0].mlp.up_proj.weight
    report = trifuse.fuse(model, freeze=True)
    reasons = {left.path: left.reason for left in report.left}
    assert reasons["layers.1"] == f"calls its parts: {encoder_layer.OTHER_LINEARS}"
    with torch.no_grad():
        assert call(model, words(1, 4)).isfinite().all()


def test_halves_that_do_not_fit_are_reported():
    for options, problem in (
        ({"intermediate_size": 48}, "are no multiple of 64 features"),
        ({"mlp_bias": True}, "have a bias"),
    ):
        encoder = modern_bert(torch.float32, **options)
        reasons = {left.path: left.reason for left in trifuse.fuse(encoder, freeze=True).left}
        assert reasons["layers.2"] == f"calls its parts: the halves of its first product {problem}"
        with torch.no_grad():
            assert encoder(words(1, 4)).last_hidden_state.isfinite().all()


def test_norms_that_do_not_fit_are_reported():
    model = build("Llama", torch.bfloat16, fused=False)
    model.layers[1].input_layernorm.float()
    reasons = {left.path: left.reason for left in trifuse.fuse(model, freeze=True).left}
    assert reasons["layers.1"] == (
        "calls its parts: its norms have weights of another dtype than its linear layers"
    )
    assert "layers.0" not in reasons


@pytest.mark.parametrize("name", ["rotate_half", "apply_rotary_pos_emb"])
def test_rotations_of_another_kind_are_reported(monkeypatch, name):
    from transformers.models.llama import modeling_llama
    from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb_vision

    model = build("Llama", fused=False)
    other = {"rotate_half": lambda x: x, "apply_rotary_pos_emb": apply_rotary_pos_emb_vision}
    monkeypatch.setattr(modeling_llama, name, other[name])
    reasons = {left.path: left.reason for left in trifuse.fuse(model, freeze=True).left}
    reason = "calls its parts: the op lacks the rotation of its queries and keys"
    assert reasons["layers.0"] == reason


@FREEZE
def test_fusing_twice_changes_nothing(freeze):
    model = build("Llama", freeze=freeze)
    kind = type(model.layers[0])
    assert issubclass(kind, transformers.models.llama.modeling_llama.LlamaDecoderLayer)
    assert trifuse.fuse(model, freeze=freeze).swapped == []
    assert type(model.layers[0]) is kind
