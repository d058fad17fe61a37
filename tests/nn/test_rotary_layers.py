"""Frozen layers of Llama's kind as one op: the bits of their parts, caches, and when parts run."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from model_sizes import GROUPED_QUERIES, SIZES
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import trifuse
from trifuse.nn import encoder_layer
from trifuse.ops import linear
from trifuse.recipes import caches, rotary_layers

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.skipif(not linear._available(torch.float32), reason="no C++ extension")

DTYPES = [torch.float32, torch.bfloat16]
GROUPED = SIZES | GROUPED_QUERIES | {"pad_token_id": 0}
# By the name of a family: what its configuration has besides.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True},
    "Mistral": {"sliding_window": 4},
    "Qwen2": {},
    "Qwen3": {"head_dim": 12},
}
GENERATOR = torch.Generator()
CACHE = "past_key_values"  # what the argument was called before it was "cache"


@pytest.fixture
def served(monkeypatch) -> list[bool]:
    """For each call of a layer, whether the op served it."""
    found: list[bool] = []
    run = encoder_layer.run

    def watched(*args: Any, **kwargs: Any) -> Tensor | None:
        out = run(*args, **kwargs)
        found.append(out is not None)
        return out

    monkeypatch.setattr(encoder_layer, "run", watched)
    return found


@contextmanager
def only_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder_layer, "run", lambda *args, **kwargs: None)
        yield


def config(name: str, **options: Any) -> Any:
    return getattr(transformers, f"{name}Config")(**GROUPED | FAMILIES[name] | options)


def build(
    name: str, dtype: torch.dtype = torch.float32, freeze: bool = True, **options: Any
) -> Any:
    """Returns a model without a head, whose output depends on all tokens before."""
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(config(name, **options)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3 if parameter.dim() == 2 else 1.0)
    model.to(dtype)
    if freeze:
        trifuse.fuse(model, freeze=True)
    return model


def words(batch: int, length: int) -> Tensor:
    return torch.randint(3, 97, (batch, length), generator=GENERATOR.manual_seed(length))


def modern_bert(dtype: torch.dtype, **options: Any) -> Any:
    """Returns an encoder of 3 layers, the second with a window of 3 tokens to both sides."""
    torch.manual_seed(0)
    sizes = SIZES | {"num_hidden_layers": 3, "intermediate_size": 64, "pad_token_id": 0}
    sizes |= {"local_attention": 6, "global_attn_every_n_layers": 2, "attention_dropout": 0.1}
    tokens = {"bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
    made = transformers.ModernBertConfig(**sizes | tokens | options)
    model = transformers.ModernBertModel(made).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3 if parameter.dim() == 2 else 1.0)
    return model.to(dtype)


def keep(batch: int, length: int) -> Tensor:
    """Padding on the left, as for generation: none in the first row."""
    padded = torch.tensor([0, 2, 3])[:batch, None].clamp(max=length - 1)
    return (torch.arange(length) >= padded).long()


def call(model: Any, ids: Tensor, past: Any = None, mask: Tensor | None = None) -> Tensor:
    """Returns the hidden states of tokens, after those in a cache."""
    options = {"use_cache": False}
    if past is not None:
        names = inspect.signature(type(model).forward).parameters
        options = {"use_cache": True, "cache" if "cache" in names else CACHE: past}
    out: Tensor = model(ids, attention_mask=mask, **options).last_hidden_state
    return out


def kept(past: Any) -> list[Tensor]:
    return [t for layer in past.layers for t in (layer.keys, layer.values)]


# The same bits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("batch", [1, 3])
def test_without_a_cache(cpp_kernel, served, name, dtype, batch):
    model = build(name, dtype)
    for length in (1, 2, 5, 12, 70):
        for mask in (None, keep(batch, length)):
            with torch.no_grad():
                actual = call(model, words(batch, length), mask=mask)
                with only_parts():
                    expected = call(model, words(batch, length), mask=mask)
            assert actual.isfinite().all()
            assert torch.equal(actual, expected)
    assert served == [True] * 2 * 5 * 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_with_a_dynamic_cache(cpp_kernel, served, name, dtype, batch, padded):
    model = build(name, dtype)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
@pytest.mark.parametrize("batch", [1, 3])
def test_with_a_static_cache(served, name, dtype, batch):
    model = build(name, dtype)
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


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", FAMILIES)
def test_generation(served, name, cache):
    torch.manual_seed(0)
    kind = getattr(transformers, f"{name}ForCausalLM")
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
    report = trifuse.fuse(model, freeze=True)
    assert torch.equal(generate(), wanted)
    assert any(served) or (cache == "static" and name == "Mistral")  # that slides
    report.revert()
    assert torch.equal(generate(), wanted)


def test_beams(served):
    model = transformers.LlamaForCausalLM(config("Llama")).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5 if parameter.dim() == 2 else 1.0)
    options = {"num_beams": 3, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(words(2, 7), **options)
    trifuse.fuse(model, freeze=True)
    assert torch.equal(model.generate(words(2, 7), **options), wanted)
    assert served
    assert all(served)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_without_padding(served, packed, name, dtype):
    model = build(name, dtype, freeze=False)
    trifuse.fuse(model, unpad=True, freeze=True)
    with torch.no_grad():
        actual = call(model, words(3, 12), mask=keep(3, 12))
        with only_parts():
            expected = call(model, words(3, 12), mask=keep(3, 12))
    assert torch.equal(actual, expected)
    assert served == [True] * 2
    assert packed == [31] * 2  # the tokens of the parts; the op calls no module


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unpad", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_modern_bert(served, dtype, unpad, bias):
    model = modern_bert(dtype, norm_bias=bias, attention_bias=bias)
    trifuse.fuse(model, unpad=unpad, freeze=True)

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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unpad", [False, True])
def test_an_encoder_with_llamas_code(served, dtype, unpad):
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "mask_token_id": 3}
    made = transformers.EuroBertConfig(**GROUPED | tokens | {"num_key_value_heads": 4})
    torch.manual_seed(0)
    model = transformers.EuroBertModel(made).eval().to(dtype)
    trifuse.fuse(model, unpad=unpad, freeze=True)
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


# Caches -------------------------------------------------------------------------------------------


def start(model: Any, length: int = 5, kind: str = "Dynamic") -> Any:
    past = empty(model, kind)
    call(model, words(1, length), past)
    return past


def empty(model: Any, kind: str) -> Any:
    options = {"max_cache_len": 20} if kind == "Static" else {}
    return getattr(transformers, f"{kind}Cache")(config=model.config, **options)


def test_a_step_moves_no_key(served):
    model = build("Llama")
    with torch.inference_mode():
        past = start(model)
        prompt = past.layers[0].keys
        assert prompt.untyped_storage().nbytes() == prompt.nbytes
        call(model, words(1, 1), past)
        first = past.layers[0].keys
        for _ in range(20):
            call(model, words(1, 1), past)
        assert past.layers[0].keys.data_ptr() == first.data_ptr()
        assert past.layers[0].keys.shape[2] == 26
        assert first.shape[2] == 6  # views that others hold stay
    assert served
    assert all(served)


def test_a_step_of_a_layer_is_one_op_and_two_views():
    model = build("Llama")

    def calls(layers: int) -> Counter[str]:
        model.config.num_hidden_layers = layers
        past = start(model)
        call(model, words(1, 1), past)
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            call(model, words(1, 1), past)
        ops = [e for e in recorded.events() if "::" in e.name]
        return Counter(e.name for e in ops if e.cpu_parent is None)

    with torch.inference_mode():
        more = calls(2)
        more.subtract(calls(1))
    assert +more == {"trifuse::encoder_layer": 1, "aten::narrow": 2}


def test_a_window_moves_on_in_place():
    model = build("Mistral")
    with torch.inference_mode():
        past = start(model)
        layer = past.layers[0]
        call(model, words(1, 1), past)
        row = layer.keys.stride(2) * layer.keys.element_size()
        before = layer.keys.data_ptr()
        for step in range(1, 20):
            call(model, words(1, 1), past)
            assert layer.keys.shape[2] == 3
            assert layer.keys.data_ptr() == before + step * row
        for _ in range(100):
            call(model, words(1, 1), past)
        assert layer.keys.untyped_storage().nbytes() <= 64 * layer.keys.nbytes


def test_caches_that_share_keys_do_not_share_room():
    model = build("Llama")
    with torch.inference_mode():
        past = start(model)
        other = copy.copy(past)
        other.layers = [copy.copy(layer) for layer in past.layers]
        deep = copy.deepcopy(past)
        alone = [call(model, words(1, n), start(model)) for n in (1, 2, 3)]
        found = [call(model, words(1, n), each) for n, each in ((1, past), (2, other), (3, deep))]
        assert all(map(torch.equal, found, alone))
        assert torch.equal(past.layers[0].keys[:, :, :5], other.layers[0].keys[:, :, :5])
        again = call(model, words(1, 4), past)
        fresh = start(model)
        call(model, words(1, 1), fresh)
        assert torch.equal(again, call(model, words(1, 4), fresh))


def test_a_cache_that_was_changed_from_outside():
    model = build("Llama")
    with torch.inference_mode():
        wanted = call(model, words(1, 2), start(model))
        past = start(model)
        before = [(layer.keys, layer.values) for layer in past.layers]
        call(model, words(1, 3), past)
        guess = past.layers[0].keys
        copied = guess.clone()
        for layer, (keys, values) in zip(past.layers, before, strict=True):
            layer.keys, layer.values = keys, values  # as a rejected guess is undone
        assert torch.equal(call(model, words(1, 2), past), wanted)
        assert torch.equal(guess, copied)
        past = start(model)
        past.reorder_cache(torch.tensor([0, 0]))
        both = call(model, words(1, 2).repeat(2, 1), past)
        assert torch.equal(both, wanted.repeat(2, 1, 1))


def test_a_cache_that_is_reordered_at_each_step_gets_no_room():
    model = build("Llama")
    with torch.inference_mode():
        past = start(model)
        layer = past.layers[0]
        for step in range(1, 4):
            past.reorder_cache(torch.tensor([0]))
            call(model, words(1, 1), past)
            assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes
            assert layer.keys.shape[2] == 5 + step
        call(model, words(1, 1), past)
        assert layer.keys.untyped_storage().nbytes() > layer.keys.nbytes


def test_a_cache_in_inference_mode_and_outside(served):
    model = build("Llama")
    with torch.inference_mode():
        past = start(model)
        inside = call(model, words(1, 1), copy.deepcopy(past))
    with torch.no_grad():
        assert torch.equal(call(model, words(1, 1), past), inside)
    assert served
    assert all(served)


BOOLS = torch.rand(1, 1, 3, 40, generator=GENERATOR.manual_seed(3)) < 0.7


@pytest.mark.parametrize("kind", ["Dynamic", "Static"])
def test_autocast(served, kind):
    model = build("Llama")

    def run() -> tuple[list[Tensor], Any]:
        past = empty(model, kind)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            found = [call(model, words(1, length), past) for length in (5, 1)]
        return found, past

    actual, past = run()
    assert served == [False] * 4
    with only_parts():
        expected, its_past = run()
    assert all(map(torch.equal, actual, expected))
    assert all(map(torch.equal, kept(past), kept(its_past)))


def test_generation_under_autocast(served):
    model = transformers.LlamaForCausalLM(config("Llama")).eval()
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
    trifuse.fuse(model, freeze=True)

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = model.generate(words(1, 5), cache_implementation="static", **options)
        return out

    actual = run()
    assert served
    assert not any(served)
    with only_parts():
        assert torch.equal(actual, run())


class Passing(TorchDispatchMode):
    """A mode that does nothing, and counts the copies that pass it."""

    copies = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.copies += op is torch.ops.aten.copy_.default
        return op(*args, **kwargs or {})


@pytest.mark.parametrize("kind", ["Dynamic", "Static"])
def test_a_call_that_is_declined_leaves_the_cache(served, kind):
    model = build("Llama")
    layer = model.layers[0]
    cos, sin = model.rotary_emb(torch.zeros(1), torch.arange(3)[None])
    past = empty(model, kind)
    before = [dict(vars(each)) for each in past.layers]
    x = torch.zeros(1, 3, 32)
    wide = torch.ones(1, 1, 3, 30, dtype=torch.bool)  # for more keys than there are
    half = cos.bfloat16(), sin.bfloat16()

    def run(mask: Tensor | None = None, rotary: Any = (cos, sin)) -> Tensor | None:
        return rotary_layers._run(layer, x, mask, rotary, past)

    with torch.no_grad():
        assert run(wide) is None
        assert run(rotary=half) is None
        with Passing():
            assert run() is None
        assert served == [False] * 3
        assert [vars(each) for each in past.layers] == before
        assert run() is not None
    assert past.get_seq_length() == 3


def test_declined_steps_copy_nothing(served):
    model = build("Llama")
    with torch.no_grad():
        past = start(model)
        del served[:]
        for _ in range(3):
            with Passing() as mode:
                call(model, words(1, 1), past)
            assert mode.copies == 0
    assert served == [False] * 6


def test_whole_numbers_as_options(served):
    model = build("Llama")
    for layer in model.layers:
        layer.input_layernorm.variance_epsilon = 1
        layer.self_attn.scaling = 2
    with torch.no_grad():
        actual = call(model, words(1, 4))
        assert served == [True] * 2
        with only_parts():
            assert torch.equal(actual, call(model, words(1, 4)))


@pytest.mark.parametrize("change", ["data", "set_", "strides"])
def test_keys_that_got_other_memory(served, change):
    model = build("Llama")
    with torch.no_grad():
        past, other = start(model), start(model)
        for each in (past, other):
            call(model, words(1, 1), each)
        for layer, its in zip(past.layers, other.layers, strict=True):
            new = torch.randn_like(layer.keys)
            its.keys = new
            if change == "data":
                layer.keys.data = new.clone()
            elif change == "set_":
                layer.keys.set_(new.clone())
            else:
                its.keys = layer.keys.transpose(2, 3).reshape(layer.keys.shape)
                layer.keys.as_strided_(layer.keys.shape, (0, 8, 2, 1))
                its.keys = layer.keys.clone()
        assert torch.equal(call(model, words(1, 2), past), call(model, words(1, 2), other))
    assert all(served)
    assert all(map(torch.equal, kept(past), kept(other)))


def test_derivatives_of_keys_after_a_further_step(served):
    model = build("Llama")
    with torch.no_grad():
        past = start(model)
        call(model, words(1, 1), past)
    keys = past.layers[0].keys
    weight = torch.ones_like(keys, requires_grad=True)
    loss = (keys * weight).sum()
    copied = keys.clone()
    with torch.no_grad():
        call(model, words(1, 1), past)
    loss.backward()
    assert torch.equal(weight.grad, copied)
    assert served == [True] * 6


@pytest.mark.parametrize("save", [pickle.dumps, copy.deepcopy], ids=["pickle", "deepcopy"])
def test_saved_caches_hold_no_memory_of_others(monkeypatch, save):
    model = build("Llama")
    empties = []
    new_empty = Tensor.new_empty

    def filled(*args: Any, **kwargs: Any) -> Tensor:
        empties.append(new_empty(*args, **kwargs).fill_(torch.nan))
        return empties[-1]

    monkeypatch.setattr(Tensor, "new_empty", filled)
    with torch.no_grad():
        past = start(model)
        for _ in range(3):
            twin = pickle.loads(save(past)) if save is pickle.dumps else save(past)
            for each in kept(twin):
                everything = each.untyped_storage()
                whole = torch.empty(0).set_(everything, 0, (everything.nbytes() // 4,))
                assert whole.isfinite().all()
            call(model, words(1, 1), past)
    assert empties


@pytest.mark.parametrize("change", ["reset", "crop", "reorder", "parts", "dropped"])
def test_memory_ends_with_the_keys_that_show_it(change):
    model = build("Llama")
    with torch.no_grad():
        past = start(model)
        call(model, words(1, 1), past)
        layer = past.layers[0]
        memory = weakref.ref(caches._rooms[layer].key_memory)
        assert memory() is not None
        if change == "reset":
            past.reset()
            layer.keys = None  # transformers 4.57 fills it with zeros
        elif change == "crop":
            past.crop(-2)
            call(model, words(1, 1), past)  # until then the keys are views of it
        elif change == "reorder":
            past.reorder_cache(torch.tensor([0]))
        elif change == "parts":
            with only_parts():
                call(model, words(1, 1), past)
        else:
            del past, layer
        gc.collect()
        assert memory() is None


def test_a_static_cache_whose_rows_share_memory_is_not_written(served):
    model = build("Llama")
    past = empty(model, "Static")
    with torch.no_grad():
        call(model, words(2, 3), past)
        assert served == [True] * 2
        for layer in past.layers:
            layer.keys = layer.keys[:1].clone().expand(2, -1, -1, -1)
        with pytest.raises(RuntimeError, match="memory location"):
            call(model, words(2, 1), past)
    assert served == [True] * 2 + [False]


@pytest.mark.parametrize(
    ("kind", "length", "mask", "one_op"),
    [
        ("Dynamic", 3, None, False),  # the first query is aligned with the first key
        ("Dynamic", 3, torch.ones(1, 1, 4, 8, dtype=torch.int8), False),  # here too
        ("Dynamic", 3, torch.ones(1, 1, 4, 8, dtype=torch.uint8), True),
        ("Dynamic", 1, None, True),
        ("Dynamic", 3, BOOLS[..., :8], True),
        ("Dynamic", 3, torch.ones(1, 1, 1, 1, dtype=torch.bool), True),
        ("Static", 1, None, False),  # sees what was never written
        ("Static", 1, torch.ones(1, 1, 1, 1, dtype=torch.bool), False),
        ("Static", 3, BOOLS[..., :20], True),
    ],
)
def test_masks_of_a_layer_after_others(served, kind, length, mask, one_op):
    model = build("Llama")
    layer = model.layers[0]
    x = torch.randn(1, 5 + length, 32, generator=GENERATOR.manual_seed(4))
    cos, sin = model.rotary_emb(x, torch.arange(5 + length)[None])
    argument = "cache" if "cache" in inspect.signature(type(model).forward).parameters else CACHE

    def run() -> list[Tensor]:
        past = empty(model, kind)
        outs = []
        for first, last, given in ((0, 5, None), (5, 5 + length, mask)):
            rotary = (cos[:, first:last], sin[:, first:last])
            rest = {argument: past, "position_embeddings": rotary}
            outs.append(layer(x[:, first:last], given, **rest))
        return outs

    with torch.no_grad():
        found = run()
        with only_parts():
            assert all(map(torch.equal, found, run()))
    assert served == [True, one_op]


class Watching(transformers.DynamicCache):
    """A cache that does more than hand over."""

    def update(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = True
        return super().update(*args, **kwargs)


def test_caches_of_other_classes_are_called(served):
    model = build("Llama")
    past = Watching(config=model.config)
    with torch.no_grad():
        out = call(model, words(1, 5), past)
        assert past.seen
        assert not any(served)
        assert torch.equal(out, call(model, words(1, 5), transformers.DynamicCache()))
    assert served[2:] == [True] * 2  # layers that are made when they are first needed


class Slotted:
    """A cache without a dictionary of attributes."""

    __slots__ = ("within",)

    def __init__(self) -> None:
        self.within = transformers.DynamicCache()

    def update(self, *args: Any, **kwargs: Any) -> Any:
        return self.within.update(*args, **kwargs)


def test_caches_with_slots_are_called(served):
    model = build("Llama")
    x = torch.randn(1, 4, 32)
    rotary = model.rotary_emb(x, torch.arange(4)[None])
    argument = "cache" if "cache" in inspect.signature(type(model).forward).parameters else CACHE
    past = Slotted()
    with torch.no_grad():
        model.layers[0](x, position_embeddings=rotary, **{argument: past})
    assert past.within.get_seq_length() == 4
    assert served == [False]


def wrapped(function: Any, watched: Any) -> Any:
    return functools.wraps(function)(watched)


def only_named(function: Any, watched: Any) -> Any:
    return watched


REPLACED = pytest.mark.parametrize("disguise", [only_named, wrapped])


@REPLACED
def test_a_replaced_update_is_called(served, monkeypatch, disguise):
    model = build("Llama")
    with torch.no_grad():
        past = start(model)
        seen = []
        kind = type(past.layers[0])
        update = kind.update

        def watched(*args: Any, **kwargs: Any) -> Any:
            seen.append(args[0])
            return update(*args, **kwargs)

        for owner in (kind, past.layers[1], past):
            with monkeypatch.context() as patch:
                function = disguise(update, watched)
                if owner is not kind:
                    function = functools.partial(function, owner)
                if owner is past:
                    function = functools.partial(type(past).update, past)
                patch.setattr(owner, "update", function)
                call(model, words(1, 1), past)
    assert seen == [*past.layers, past.layers[1]]
    assert served == [True] * 2 + [False] * 2 + [True, False] + [False] * 2
    assert past.get_seq_length() == 8


@REPLACED
def test_a_replaced_update_of_all_caches_is_called(served, monkeypatch, disguise):
    model = build("Llama")
    seen = []
    update = transformers.Cache.update

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(args[0])
        return update(*args, **kwargs)

    monkeypatch.setattr(transformers.Cache, "update", disguise(update, watched))
    with torch.no_grad():
        past = start(model)
    assert seen == [past] * 2
    assert served == [False] * 2


def test_a_cache_dies_alone():
    model = build("Llama")
    with torch.no_grad():
        past = start(model)
    layer = weakref.ref(past.layers[0])
    assert layer() in caches._rooms
    del past
    gc.collect()
    assert layer() is None


# When the parts run -------------------------------------------------------------------------------


def hooked(layer: Any) -> None:
    layer.mlp.register_forward_hook(lambda module, args, out: out + 1)


def replaced(layer: Any) -> None:
    layer.mlp.down_proj = nn.Linear(48, 32)


def replaced_forward(layer: Any) -> None:
    layer.self_attn.o_proj.forward = torch.zeros_like


def replaced_norm(layer: Any) -> None:
    layer.input_layernorm = nn.Sequential(nn.LayerNorm(32), nn.Tanh())


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


@pytest.mark.parametrize(
    "change",
    [hooked, replaced, replaced_forward, replaced_norm, another_class, training, no_module],
)
@pytest.mark.parametrize("cached", [False, True])
def test_a_changed_layer_calls_its_parts(served, change, cached):
    model = build("Llama")
    past = lambda: start(model) if cached else None  # noqa: E731
    with torch.no_grad():
        before = call(model, words(1, 4), past())
        change(model.layers[1])
        del served[:]
        after = call(model, words(1, 4), past())
        assert served == [True, False] * (2 if cached else 1)
        with only_parts():
            assert torch.equal(after, call(model, words(1, 4), past()))
    assert change is training or not torch.equal(before, after)


@pytest.mark.parametrize("cls", ["LlamaAttention", "LlamaMLP", "LlamaDecoderLayer"])
@REPLACED
def test_a_forward_replaced_in_a_class_is_called(served, monkeypatch, cls, disguise):
    from transformers.models.llama import modeling_llama

    model = build("Llama")
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
    assert served == [True] * 2 + [False] * 2 + [True] * 2
    assert torch.equal(after, expected)
    # The others' own were compiled again, with changes, when they were swapped.
    assert torch.equal(after, before) is (cls != "LlamaAttention")
    assert torch.equal(again, before)


def test_changes_of_what_is_not_frozen_are_noticed(served):
    model = build("Qwen3")
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
        assert served[-2:] == [False, True]
        with only_parts():
            assert torch.equal(actual, call(model, words(1, 4)))


def test_norms_of_another_dtype_are_called(served):
    model = build("Llama", torch.bfloat16)
    with torch.no_grad():
        norm = model.layers[1].post_attention_layernorm
        norm.weight.data = norm.weight.data.float()
        x = torch.randn(1, 4, 32).bfloat16()
        rotary = model.rotary_emb(x, torch.arange(4)[None])
        with pytest.raises(RuntimeError, match=r"dtype|same"):  # the network gets float32
            model.layers[1](x, position_embeddings=rotary)
    assert served == [False]


def test_an_identity_in_place_of_a_norm(served):
    model = build("Llama")
    with torch.no_grad():
        model.layers[0].input_layernorm = nn.Identity().eval()
        model.layers[1].post_attention_layernorm = nn.Identity().eval()
        actual = call(model, words(1, 4))
        assert served == [True, False]
        with only_parts():
            assert torch.equal(actual, call(model, words(1, 4)))


@pytest.mark.parametrize("name", ["apply_rotary_pos_emb", "rotate_half"])
@REPLACED
def test_a_rotation_that_was_replaced_is_called(served, monkeypatch, name, disguise):
    from transformers.models.llama import modeling_llama

    model = build("Llama")
    own = getattr(modeling_llama, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        out = own(*args, **kwargs)
        return -out if isinstance(out, Tensor) else (out[0] + 1, out[1])

    with torch.no_grad():
        before = call(model, words(1, 4))
        monkeypatch.setattr(modeling_llama, name, disguise(own, changed))
        after = call(model, words(1, 4))
    assert served == [True] * 2 + [False] * 2
    assert not torch.equal(before, after)


def test_a_rotation_of_parts_of_heads_is_refused_as_by_the_parts(served):
    layer = build("Llama").layers[0]
    cos, sin = torch.randn(2, 1, 4, 4)  # heads have 8 features
    with torch.no_grad(), pytest.raises(RuntimeError, match="size"):
        layer(torch.randn(1, 4, 32), position_embeddings=(cos, sin))
    assert not any(served)


@pytest.mark.parametrize(
    "options",
    [{"output_attentions": False}, {"output_hidden_states": False}, {"num_items_in_batch": 3}],
    ids=lambda options: next(iter(options)),
)
def test_options_that_change_nothing(served, options):
    model = build("Llama")
    with torch.no_grad():
        actual = model(words(1, 4), **options).last_hidden_state
        assert torch.equal(actual, call(model, words(1, 4)))
    assert served == [True] * 4


def test_other_ways_to_call(served):
    model, plain = build("Llama"), build("Llama", freeze=False)
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


def test_compiled(served):
    model, plain = build("Llama"), build("Llama", freeze=False)
    with torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager")
        actual = call(compiled, words(2, 5))
        torch.testing.assert_close(actual, call(plain, words(2, 5)), rtol=1e-3, atol=1e-3)
    assert not any(served)


def test_copies_and_pickles():
    model = build("Llama")
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
    model = build("Llama", freeze=False, hidden_act="tanh")
    report = trifuse.fuse(model, freeze=True)
    reasons = {left.path: left.reason for left in report.left}
    assert reasons["layers.0"] == "calls its parts: no product of ours has its activation"
    model = build("Llama", freeze=False)
    model.layers[1].mlp.up_proj.weight = model.layers[0].mlp.up_proj.weight
    report = trifuse.fuse(model, freeze=True)
    reasons = {left.path: left.reason for left in report.left}
    assert reasons["layers.1"] == "calls its parts: not all of its linear layers are frozen"
    with torch.no_grad():
        assert call(model, words(1, 4)).isfinite().all()


def test_halves_that_do_not_fit_are_reported():
    for options in ({"intermediate_size": 48}, {"mlp_bias": True}):
        encoder = modern_bert(torch.float32, **options)
        reasons = {left.path: left.reason for left in trifuse.fuse(encoder, freeze=True).left}
        assert reasons["layers.2"] == (
            "calls its parts: the halves of its first product have a bias, or no multiple of 64 "
            "features"
        )
        with torch.no_grad():
            assert encoder(words(1, 4)).last_hidden_state.isfinite().all()


def test_norms_that_do_not_fit_are_reported():
    model = build("Llama", torch.bfloat16, freeze=False)
    model.layers[1].input_layernorm.float()
    reasons = {left.path: left.reason for left in trifuse.fuse(model, freeze=True).left}
    assert reasons["layers.1"] == (
        "calls its parts: its RMSNorms have weights of another dtype than its linear layers"
    )
    assert "layers.0" not in reasons


def test_rotations_of_another_kind_are_reported(monkeypatch):
    from transformers.models.llama import modeling_llama

    model = build("Llama", freeze=False)
    monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: x)
    reasons = {left.path: left.reason for left in trifuse.fuse(model, freeze=True).left}
    assert reasons["layers.0"] == "calls its parts: it doesn't rotate the two halves of each head"


def test_fusing_twice_changes_nothing():
    model = build("Llama")
    kind = type(model.layers[0])
    assert issubclass(kind, transformers.models.llama.modeling_llama.LlamaDecoderLayer)
    assert trifuse.fuse(model, freeze=True).swapped == []
    assert type(model.layers[0]) is kind
