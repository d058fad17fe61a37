"""Models of transformers around their frozen encoder: the results of transformers' own forward."""

from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
import functools
import gc
import inspect
import pickle
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import trifuse

transformers = pytest.importorskip("transformers")

from transformers.modeling_outputs import (  # noqa: E402
    BaseModelOutputWithPastAndCrossAttentions,
)

from trifuse.ops import encoder_model  # noqa: E402
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
    dtype = options.pop("dtype", torch.float32)
    return getattr(transformers, f"{family}{kind}")(config, **options).eval().to(dtype)


def frozen(*args: Any, unpad: bool = False, **options: Any) -> Any:
    model = build(*args, **options)
    trifuse.fuse(model, freeze=True, unpad=unpad)
    return model


def ids() -> Tensor:
    return torch.randint(2, WORDS, (B, L), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def ran(monkeypatch) -> list[type]:
    """The classes of the models that ran directly, in one call or in few steps."""
    found: list[type] = []

    def watch(name: str) -> None:
        run = getattr(models, name)

        def watched(model: nn.Module, *args: Any) -> Any:
            out = run(model, *args)
            if out is not None:
                found.append(type(model).__mro__[2])
            return out

        monkeypatch.setattr(models, name, watched)

    watch("_run")
    watch("in_one_call")
    return found


@pytest.fixture
def served(monkeypatch) -> list[bool]:
    """For each call of a model that has a plan, whether it ran in one call."""
    found: list[bool] = []
    call = encoder_model.encoder_model

    def watched(*args: Any) -> Any:
        out = call(*args)
        found.append(out is not None)
        return out

    monkeypatch.setattr(models, "encoder_model", watched)
    return found


def by_transformers(function: Callable[[], Any]) -> Any:
    """Returns the result of a call that goes through transformers' own forward."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "_is_plain", lambda *args: False)
        patch.setattr(models, "in_one_call", lambda *args: None)
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
    segments = torch.zeros(B, L, dtype=torch.long)
    positions = torch.arange(L)[None] + 3
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((ids(),), {}),
        ((ids(), torch.ones(B, L)), {}),
        ((ids(), KEEP, segments, positions), {}),
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


# One call ----------------------------------------------------------------------------------------


def planned(family: str = "Bert", freeze: bool = True, unpad: bool = False, **options: Any) -> Any:
    """A fused model that has made its plan, in inference."""
    model = build(family, **options)
    trifuse.fuse(model, freeze=freeze, unpad=unpad)
    with torch.no_grad():
        model(ids())
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_call_has_the_bits_of_the_parts(served, our_product, family, freeze, dtype):
    model = planned(family, freeze, dtype=dtype)
    words = torch.where(KEEP, ids(), 1)
    segments = torch.zeros(1, 1, dtype=torch.long)
    positions = torch.arange(L).flip(0)[None] + 3
    calls: list[tuple[Any, ...]] = [
        (words,),
        (words, KEEP),
        (words, KEEP.long(), segments),
        (words.t().contiguous().t(), KEEP.float(), segments.expand(B, L), positions),
        (words[:1, :1], torch.ones(1, 1, dtype=torch.long)),
        (words[:, :4], KEEP[:, :4]),
        (words, KEEP),
    ]
    with torch.no_grad():
        for args in calls:
            actual = model(*args)
            assert actual.pooler_output.shape == (len(args[0]), 64)
            same(actual, by_transformers(lambda a=args: model(*a)))
    with torch.inference_mode():
        same(model(words, KEEP), by_transformers(lambda: model(words, KEEP)))
    assert served == [True] * (len(calls) + 1)


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_that_leave_padding_out_run_in_one_call_without_it(served, family, freeze):
    model, words = planned(family, freeze, unpad=True), ids()
    with torch.no_grad():
        for mask in (None, torch.ones(B, L), KEEP, torch.ones(B, L, dtype=torch.bool)):
            actual = model(words, mask)
            same(actual, by_transformers(lambda m=mask: model(words, m)))
            if mask is KEEP:
                assert (actual.last_hidden_state[~KEEP] == 0).all()
    assert served == [True, True, False, True]


def test_tokens_with_a_nan_or_other_masks(served):
    """A mask of another dtype is read by the parts, and NaN counts as a token."""
    model = planned()
    keep = torch.where(KEEP, torch.nan, 0.0)
    with torch.no_grad():
        for mask in (keep, KEEP.int(), KEEP.half()):
            same(model(ids(), mask), by_transformers(lambda m=mask: model(ids(), m)))
    assert served == [True, False, False]


@pytest.mark.parametrize(
    "given",
    [
        {"input_ids": torch.full((B, L), WORDS)},  # no such word
        {"input_ids": torch.full((1, 41), 5)},  # more than there are positions
        {"input_ids": torch.ones(B, L, dtype=torch.int32)},
        {"input_ids": torch.ones(0, L, dtype=torch.long)},
        {"input_ids": torch.full((B, L), 5), "position_ids": torch.zeros(B, 3, dtype=torch.long)},
        {"input_ids": torch.full((B, L), 5), "token_type_ids": torch.full((B, L), 2)},
    ],
)
@pytest.mark.parametrize("family", ["Bert", "Roberta"])
def test_errors_and_other_types_are_transformers(served, family, given):
    model = planned(family)

    def result() -> Any:
        try:
            with torch.no_grad():
                return model(**given).last_hidden_state
        except (IndexError, RuntimeError) as error:
            return type(error)

    actual, wanted = result(), by_transformers(result)
    assert served[0] is False
    assert torch.equal(actual, wanted) if isinstance(wanted, Tensor) else actual is wanted


def appends_a_layer(model: Any) -> None:
    model.encoder.layer.append(copy.deepcopy(model.encoder.layer[0]))


def adds_a_named_layer(model: Any) -> None:
    model.encoder.layer.add_module("last", copy.deepcopy(model.encoder.layer[0]))


def drops_a_layer(model: Any) -> None:
    del model.encoder.layer[1]


def has_another_bias(model: Any) -> None:
    bias = nn.Parameter(torch.randn(64))
    model.encoder.layer[1].attention.output.dense.bias = bias


def changes_a_bias(model: Any) -> None:
    with torch.no_grad():
        model.encoder.layer[0].output.LayerNorm.bias.add_(1)


def assigns_data(model: Any) -> None:
    table = model.embeddings.word_embeddings.weight
    table.data = table.data.flip(0).contiguous()


def has_other_positions(model: Any) -> None:
    model.embeddings.position_ids.copy_(model.embeddings.position_ids.flip(1))


def has_a_new_buffer_of_positions(model: Any) -> None:
    buffer = model.embeddings.position_ids
    model.embeddings.position_ids = buffer.flip(1).contiguous()


def assigns_data_of_positions(model: Any) -> None:
    buffer = model.embeddings.position_ids
    buffer.data = buffer.flip(1).contiguous()


def shifts_data_of_positions(model: Any) -> None:
    buffer = model.embeddings.position_ids
    buffer.data = buffer[:, 2:]


def has_positions_for_each_sequence(model: Any) -> None:
    buffer = model.embeddings.position_ids
    model.embeddings.position_ids = buffer.flip(1).repeat(B, 1)


def has_segments(model: Any) -> None:
    model.embeddings.token_type_ids.fill_(1)


def has_no_module_as_dropout(model: Any) -> None:
    del model.embeddings.dropout
    model.embeddings.dropout = lambda x: x + 1


def has_a_new_list_of_layers(model: Any) -> None:
    layers = model.encoder.layer
    del layers[len(layers) :]
    layers[0] = copy.deepcopy(layers[1])


def has_another_pooler(model: Any) -> None:
    model.pooler = nn.Sequential(nn.Flatten(), nn.Linear(L * 64, 3))


def has_no_pooler(model: Any) -> None:
    model.pooler = None


def has_another_activation(model: Any) -> None:
    model.pooler.activation = nn.ReLU()


def has_a_function_as_activation(model: Any) -> None:
    del model.pooler.activation
    model.pooler.activation = torch.relu


def scales(model: Any) -> None:
    model.encoder.layer[0].attention.self.scaling = 1.0


def has_another_eps(model: Any) -> None:
    model.embeddings.LayerNorm.eps = 1.0


def has_a_hook(model: Any) -> None:
    model.encoder.layer[0].register_forward_hook(lambda module, args, out: out + 1)


def has_a_forward(model: Any) -> None:
    model.embeddings.forward = lambda input_ids, **_: torch.ones(*input_ids.shape, 64)


def has_a_chunk(model: Any) -> None:
    model.encoder.layer[1].feed_forward_chunk = lambda x: x


CHANGES = [
    appends_a_layer,
    adds_a_named_layer,
    drops_a_layer,
    has_another_bias,
    changes_a_bias,
    assigns_data,
    has_other_positions,
    has_a_new_buffer_of_positions,
    assigns_data_of_positions,
    shifts_data_of_positions,
    has_positions_for_each_sequence,
    has_segments,
    has_no_module_as_dropout,
    has_a_new_list_of_layers,
    has_another_pooler,
    has_no_pooler,
    has_another_activation,
    has_a_function_as_activation,
    scales,
    has_another_eps,
    has_a_hook,
    has_a_forward,
    has_a_chunk,
]


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("unpad", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_any_change_is_noticed(change, unpad, freeze):
    model = planned(freeze=freeze, unpad=unpad)
    mask = None if unpad else KEEP
    with torch.no_grad():
        before = model(ids(), mask)
        torch.manual_seed(1)
        change(model)
        for _ in range(3):
            after = model(ids(), mask)
            same(after, by_transformers(lambda: model(ids(), mask)))
    assert any(
        after.get(name) is None or not torch.equal(before[name], after[name]) for name in before
    )


@pytest.mark.parametrize("unpad", [False, True])
def test_another_configuration_is_noticed(unpad):
    model = planned(unpad=unpad)
    model.config = copy.deepcopy(model.config)
    model.config.output_hidden_states = True
    with torch.no_grad():
        for _ in range(3):
            assert len(model(ids()).hidden_states) == 3


@pytest.mark.parametrize("of_class", [False, True])
def test_another_way_to_count_positions_is_noticed(monkeypatch, of_class):
    model = planned("Roberta")
    owner = type(model.embeddings)._trifuse_origin.source if of_class else model.embeddings
    count = lambda words, *args, **options: torch.zeros_like(words) + 5  # noqa: E731
    name = "create_position_ids_from_input_ids"
    monkeypatch.setattr(owner, name, staticmethod(count) if of_class else count)
    with torch.no_grad():
        wanted = model(ids(), position_ids=torch.full((B, L), 5))
        for _ in range(3):
            same(model(ids()), wanted)


@pytest.mark.parametrize("unpad", [False, True])
@pytest.mark.parametrize("of_class", [False, True])
def test_another_way_to_make_masks_is_noticed(monkeypatch, unpad, of_class):
    model, seen = planned(unpad=unpad), []
    make = model._create_attention_masks

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(True)
        return make(*args[int(of_class) :], **kwargs)

    monkeypatch.setattr(type(model) if of_class else model, "_create_attention_masks", watched)
    with torch.no_grad():
        for _ in range(3):
            model(ids())
    assert len(seen) == 3


def test_training_and_evaluating_again(served):
    model = planned()
    with torch.no_grad():
        expected = model(ids(), KEEP)
        model.train()
        assert not torch.equal(model(ids(), KEEP)[0], expected[0])  # drops
        model.eval()
        same(model(ids(), KEEP), expected)
        model.encoder.layer[0].attention.output.dropout.train()
        assert not torch.equal(model(ids(), KEEP)[0], expected[0])
        model.encoder.layer[0].attention.output.dropout.eval()
        same(model(ids(), KEEP), expected)
    assert served[-1]


def test_gradients_are_needed_in_one_parameter(served):
    model = planned().requires_grad_(False)
    assert model(ids(), KEEP).last_hidden_state.grad_fn is None
    assert served == [True]
    for path in (
        "pooler.dense.bias",
        "embeddings.LayerNorm.weight",
        "embeddings.word_embeddings.weight",
        "encoder.layer.1.output.dense.bias",
        "encoder.layer.0.output.LayerNorm.bias",
    ):
        parameter = model.get_parameter(path).requires_grad_()
        model(ids(), KEEP).pooler_output.sum().backward()
        assert parameter.grad is not None
        parameter.requires_grad_(False)
    assert served == [True] + [False] * 5


@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_another_dtype(served, our_product, dtype, swaps):
    """Whether torch moves new data into parameters or swaps tensors, which no one may hold then."""
    model = planned(freeze=False)
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    try:
        model.to(dtype)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    with torch.no_grad():
        for _ in range(2):
            same(model(ids(), KEEP), by_transformers(lambda: model(ids(), KEEP)))
    assert served[-1] is (dtype is torch.bfloat16)


def test_a_first_call_with_gradients(served):
    model = build()
    trifuse.fuse(model, freeze=True)
    model(ids())
    with torch.no_grad():
        model(ids())
    assert served == [True]


@pytest.mark.parametrize("unpad", [False, True])
def test_hidden_states_were_requested_before(served, unpad):
    """transformers keeps the hooks that record them."""
    model = planned(unpad=unpad)
    with torch.no_grad():
        model(ids(), output_hidden_states=True)
        for _ in range(3):
            model(ids())
    assert served == [False, True, True]


def test_segments_that_were_changed_and_are_zero_again(served):
    model = planned()
    with torch.no_grad():
        for value in (1, 0):
            model.embeddings.token_type_ids.fill_(value)
            for _ in range(6):  # attempts to plan become rare
                same(model(ids()), by_transformers(lambda: model(ids())))
    assert served[-1]


def test_new_data_of_the_segments_is_read():
    model, plain = planned(), build()
    with torch.no_grad():
        for each in (model, plain):
            buffer = each.embeddings.token_type_ids
            buffer.data = torch.ones_like(buffer)
        for _ in range(3):
            wanted = plain(ids(), KEEP).last_hidden_state
            torch.testing.assert_close(model(ids(), KEEP).last_hidden_state[KEEP], wanted[KEEP])


def test_reverting_frees_packed_weights():
    model = build()
    report = trifuse.fuse(model, freeze=True)
    with torch.no_grad():
        model(ids())
    packed = weakref.ref(model.pooler.dense._frozen)
    report.revert()
    gc.collect()
    assert packed() is None


def test_attempts_to_plan_become_rare(monkeypatch):
    model = planned()
    made = []
    monkeypatch.setattr(models, "_make_plan", lambda model: made.append(model))
    with torch.no_grad():
        for _ in range(50):
            model.embeddings.LayerNorm.eps += 1e-3
            model(ids())
    assert 1 < len(made) < 8


def test_weights_packed_for_another_instruction_set_are_not_read(served):
    from trifuse import backends

    model = planned()
    before = backends._C.set_cpu_capability("DEFAULT")
    try:
        with torch.no_grad():
            same(model(ids(), KEEP), by_transformers(lambda: model(ids(), KEEP)))
        assert served == [False]
    finally:
        backends._C.set_cpu_capability(before)


def test_threads_share_a_plan(served):
    """Calls of other sizes at the same time."""
    model = planned("Bert")
    words = ids()
    with torch.no_grad():
        wanted = {n: model(words[:, :n], KEEP[:, :n]) for n in range(1, L + 1)}

    def read(n: int) -> None:
        with torch.no_grad():
            for _ in range(20):
                same(model(words[:, :n], KEEP[:, :n]), wanted[n])

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(read, wanted))
    assert all(served)


def test_transforms_and_modes_are_the_parts(served):
    model = planned(freeze=False)
    words = ids()
    with torch.no_grad():
        wanted = model(words, KEEP)[0]
        rows = torch.func.vmap(lambda w: model(w[None], KEEP[:1])[0][0])(words)
        torch.testing.assert_close(rows[0], wanted[0], rtol=1e-4, atol=1e-5)
        served.clear()
        with torch.autocast("cpu"):
            assert not torch.equal(model(words, KEEP)[0], wanted)
        with FlopCounterMode(display=False) as counter:
            model(words, KEEP)
    assert served == [False, False]
    assert counter.get_total_flops() > 0


def test_a_plan_does_not_keep_its_model_alive():
    model = planned()
    model.encode = types.MethodType(lambda self: self, model)  # refers to the model
    with torch.no_grad():
        model(ids())
    assert model in models._plans
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
