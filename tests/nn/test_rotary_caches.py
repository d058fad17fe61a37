"""Caches of transformers to which frozen layers of Llama's kind append in place."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from rotary_models import (
    CACHE,
    GENERATOR,
    REPLACED,
    build,
    call,
    config,
    empty,
    kept,
    only_parts,
    start,
    words,
)
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import trifuse
from trifuse.ops._linear_choice import is_available
from trifuse.recipes import caches, known_layers

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.skipif(not is_available(torch.float32), reason="no C++ extension")


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
        return known_layers._run(layer, x, mask, rotary, past)

    with torch.no_grad():
        assert run(wide) is None
        assert run(rotary=half) is None
        with Passing():
            assert run() is None
        assert served == [False] * 2  # the other rotation is declined before
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
    assert served
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
