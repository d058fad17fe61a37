"""Models of transformers around their frozen encoder: the results of transformers' own forward."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trifuse

transformers = pytest.importorskip("transformers")

from transformers.modeling_outputs import (  # noqa: E402
    BaseModelOutputWithPastAndCrossAttentions,
)

from trifuse.ops._linear_choice import is_available  # noqa: E402
from trifuse.recipes import models  # noqa: E402

pytestmark = pytest.mark.skipif(not is_available(torch.float32), reason="no C++ extension")

FAMILIES = ["Bert", "Roberta", "XLMRoberta", "Camembert", "Data2VecText"]
B, L, WORDS = 3, 10, 97
KEEP = torch.arange(L) < torch.tensor([L, 6, 3])[:, None]


def build(family: str = "Bert", kind: str = "Model", **options: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=40,
        pad_token_id=1,
    )
    return getattr(transformers, f"{family}{kind}")(config, **options).eval()


def frozen(*args: Any, unpad: bool = False, **options: Any) -> Any:
    model = build(*args, **options)
    trifuse.fuse(model, freeze=True, unpad=unpad)
    return model


def ids() -> Tensor:
    return torch.randint(2, WORDS, (B, L), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def ran(monkeypatch) -> list[type]:
    """The classes of the models that ran directly."""
    found: list[type] = []
    run = models._run

    def watched(model: nn.Module, *args: Any) -> Any:
        found.append(type(model).__mro__[2])
        return run(model, *args)

    monkeypatch.setattr(models, "_run", watched)
    return found


def by_transformers(function: Callable[[], Any]) -> Any:
    """Returns the result of a call that goes through transformers' own forward."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "_is_plain", lambda *args: False)
        return function()


def same(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    assert actual.keys() == expected.keys()
    for name in expected:
        assert torch.equal(actual[name], expected[name])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pooler", [True, False])
def test_has_the_results_of_transformers(ran, family, pooler):
    model = frozen(family, add_pooling_layer=pooler)
    types = torch.zeros(B, L, dtype=torch.long)
    positions = torch.arange(L)[None] + 3
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((ids(),), {}),
        ((ids(), torch.ones(B, L)), {}),
        ((ids(), KEEP, types, positions), {}),
        ((), {"input_ids": ids(), "attention_mask": KEEP.long(), "return_dict": True}),
        ((ids(), KEEP.float(), None, positions, None), {"output_hidden_states": False}),
        ((ids()[:, :1],), {"use_cache": None}),
    ]
    with torch.no_grad():
        for args, kwargs in calls:
            actual = model(*args, **kwargs)
            same(actual, by_transformers(lambda a=args, k=kwargs: model(*a, **k)))
    assert len(ran) == len(calls)


def test_results_are_objects_of_transformers(ran):
    """Also from the second call on, which makes them without the class's own checks."""
    model = frozen()
    for _ in range(3):
        with torch.no_grad():
            made = model(ids())
            wanted = by_transformers(lambda: model(ids()))
        assert type(made) is type(wanted)
        assert list(vars(made)) == list(vars(wanted))
        assert list(made) == list(wanted) == ["last_hidden_state", "pooler_output"]
        assert made.hidden_states is None
        assert torch.equal(made.to_tuple()[1], wanted[1])
        for each in (made, wanted):
            each.hidden_states = (each[0],)
        assert list(made) == list(wanted)
        assert len(made.hidden_states) == 1


def test_a_class_that_makes_its_objects_in_another_way_makes_them():
    @dataclasses.dataclass
    class Numbered(transformers.modeling_outputs.BaseModelOutputWithPooling):
        def __post_init__(self) -> None:
            super().__post_init__()
            self.number = len(made)

    made: list[Any] = []
    for _ in range(3):
        made.append(models._output(Numbered, last_hidden_state=torch.ones(2), pooler_output=None))
    assert [each.number for each in made] == [0, 1, 2]
    assert [list(each) for each in made] == [["last_hidden_state"]] * 3


def requests_a_tuple(model: Any) -> dict[str, Any]:
    return {"return_dict": False}


def is_set_to_return_tuples(model: Any) -> dict[str, Any]:
    model.config.return_dict = False
    return {}


def requests_hidden_states(model: Any) -> dict[str, Any]:
    return {"output_hidden_states": True}


def is_set_to_return_hidden_states(model: Any) -> dict[str, Any]:
    model.config.output_hidden_states = True
    return {}


def brings_a_mask_of_pairs(model: Any) -> dict[str, Any]:
    return {"attention_mask": KEEP[:, None, None].expand(B, 1, L, L)}


def brings_embeddings(model: Any) -> dict[str, Any]:
    embedded = torch.randn(B, L, 64, generator=torch.Generator().manual_seed(1))
    return {"input_ids": None, "inputs_embeds": embedded}


def has_another_attention(model: Any) -> dict[str, Any]:
    model.set_attn_implementation("sdpa")
    return {}


@pytest.mark.parametrize(
    "change",
    [
        requests_a_tuple,
        is_set_to_return_tuples,
        requests_hidden_states,
        is_set_to_return_hidden_states,
        brings_a_mask_of_pairs,
        brings_embeddings,
        has_another_attention,
    ],
)
def test_any_other_call_is_transformers(ran, change):
    model = frozen()
    given = {"input_ids": ids(), "attention_mask": KEEP} | change(model)
    with torch.no_grad():
        actual = model(**given)
        expected = by_transformers(lambda: model(**given))
    assert not ran
    flat = [tuple(x.values()) if isinstance(x, dict) else x for x in (actual, expected)]
    tensors = [[t for t in x if isinstance(t, Tensor)] for x in flat]
    assert all(map(torch.equal, *tensors))
    assert type(actual) is type(expected)


def test_hooks_run(ran):
    model, seen = frozen(), []
    for path in ("", "embeddings", "encoder", "encoder.layer.1", "pooler"):
        module = model.get_submodule(path)
        module.register_forward_hook(lambda *args, path=path: seen.append(path))
    with torch.no_grad():
        model(ids(), KEEP)
    assert seen == ["embeddings", "encoder.layer.1", "encoder", "pooler", ""]
    assert ran == [transformers.BertModel]


@pytest.mark.parametrize("keep_name", [False, True])
@pytest.mark.parametrize(
    ("cls", "name"),
    [
        ("BertModel", "forward"),
        ("BertModel", "_create_attention_masks"),
        ("BertEncoder", "forward"),
        ("BertSelfAttention", "forward"),
        ("BertSelfOutput", "forward"),
        ("BertLayer", "feed_forward_chunk"),
        ("BertPooler", "forward"),
    ],
)
def test_methods_replaced_in_a_class_run(ran, monkeypatch, cls, name, keep_name):
    from transformers.models.bert import modeling_bert

    model = build()
    report = trifuse.fuse(model, freeze=True)
    source = getattr(modeling_bert, cls)
    if not hasattr(source, name):
        pytest.skip("another version of transformers")
    method, seen = getattr(source, name), []

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(name)
        return method(*args, **kwargs)

    watched.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
    with torch.no_grad():
        expected = model(ids(), KEEP)
        assert ran
        with monkeypatch.context() as patch:
            patch.setattr(source, name, functools.wraps(method)(watched) if keep_name else watched)
            torch.testing.assert_close(model(ids(), KEEP)[0], expected[0], rtol=1e-4, atol=1e-5)
            fused = len(seen)
            report.revert()
            model(ids(), KEEP)
    # Fusing has compiled the end of a sublayer again; that doesn't run the class's own.
    alone = len(seen) - fused
    assert alone
    assert fused == (0 if cls == "BertSelfOutput" else alone)


def test_gradients_flow(ran):
    model = frozen()
    model(ids(), KEEP).last_hidden_state.sum().backward()
    assert model.embeddings.word_embeddings.weight.grad is not None
    assert ran == [transformers.BertModel]


@pytest.mark.parametrize("family", ["Bert", "Roberta"])
def test_inside_a_model_with_a_head(ran, family):
    model = frozen(family, "ForTokenClassification")
    with torch.no_grad():
        actual = model(ids(), KEEP).logits
        assert torch.equal(actual, by_transformers(lambda: model(ids(), KEEP)).logits)
        hidden = model(ids(), KEEP, output_hidden_states=True).hidden_states
    assert len(ran) == 1
    assert len(hidden) == 3


def test_without_padding_the_model_does_more(ran):
    model = frozen(unpad=True)
    with torch.no_grad():
        out = model(ids(), KEEP).last_hidden_state
    assert (out[~KEEP] == 0).all()
    assert not ran


def test_copies_pickles_compiles_and_reverts(ran):
    model = build()
    report = trifuse.fuse(model, freeze=True)
    with torch.no_grad():
        expected = model(ids(), KEEP).last_hidden_state
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(ids(), KEEP).last_hidden_state, expected)
        assert len(ran) == 3
        compiled = torch.compile(model, backend="eager")
        torch.testing.assert_close(compiled(ids(), KEEP).last_hidden_state, expected)
        report.revert()
        assert type(model) is transformers.BertModel
        torch.testing.assert_close(model(ids(), KEEP).last_hidden_state, expected)
    assert len(ran) == 3


def first_layer_only(self: Any, hidden_states: Tensor, attention_mask: Any = None, **_: Any) -> Any:
    for layer in self.layer[:1]:
        out = layer(hidden_states, attention_mask)
        hidden_states = out[0] if isinstance(out, tuple) else out
    return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden_states)


@pytest.mark.parametrize("unpad", [False, True])
def test_another_loop_in_a_class_that_was_read_before(unpad, monkeypatch):
    """Frozen layers run in one call, all of them, only as long as that is what the class does."""
    model, plain = frozen(unpad=unpad), build()
    cls = type(plain.encoder)
    with torch.no_grad():
        before = model(ids(), attention_mask=KEEP.long())[0]
        monkeypatch.setattr(cls, "forward", first_layer_only)
        wanted = plain(ids(), attention_mask=KEEP.long())[0]
        trifuse.fuse(plain, unpad=unpad, freeze=True)
        got = plain(ids(), attention_mask=KEEP.long())[0]
    torch.testing.assert_close(got[KEEP], wanted[KEEP], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(before[KEEP], wanted[KEEP], rtol=1e-2)
