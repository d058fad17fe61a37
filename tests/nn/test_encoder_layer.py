"""Encoder layers as one op, frozen or not: the bits of their parts, and when the parts run."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fault_cases import ALL, failing, for_each_allocation, in_process, unless_out_of_memory
from model_sizes import PADDED_SIZES
from torch import Tensor, nn
from torch.nn.utils import prune

import trifuse
from trifuse import backends
from trifuse.models import bert
from trifuse.models.transformer import KeyValueCache, LanguageModel, LanguageModelConfig
from trifuse.nn import encoder_layer
from trifuse.ops import _linear_choice
from trifuse.ops import encoder_layer as ops
from trifuse.ops import linear as linear_ops
from trifuse.ops._linear_choice import is_available
from trifuse.recipes import models

pytestmark = [
    pytest.mark.skipif(not is_available(torch.float32), reason="no C++ extension"),
    pytest.mark.usefixtures("our_product"),
]

DTYPES = [torch.float32, torch.bfloat16]
B, L, D = 3, 10, 64
KEEP = torch.arange(L) < torch.tensor([L, 6, 3])[:, None]


FREEZE = pytest.mark.parametrize("freeze", [False, True])


@pytest.fixture
def served(monkeypatch) -> list[bool]:
    """For each call of a layer, alone or with others, whether the op served it.

    Models of transformers don't run in one call: see test_direct_models.py.
    """
    found: list[bool] = []
    run, run_all = encoder_layer.run, encoder_layer.run_all

    def watched(*args: Any, **kwargs: Any) -> Tensor | None:
        out = run(*args, **kwargs)
        found.append(out is not None)
        return out

    def all_watched(layers: nn.ModuleList, *args: Any, **kwargs: Any) -> Tensor | None:
        out = run_all(layers, *args, **kwargs)
        if out is not None:
            found.extend([True] * len(layers))
        return out

    monkeypatch.setattr(encoder_layer, "run", watched)
    monkeypatch.setattr(encoder_layer, "run_all", all_watched)
    monkeypatch.setattr(models, "in_one_call", lambda *args: None)
    return found


def by_parts(function: Callable[[], Tensor]) -> Tensor:
    """Returns the result of a call whose layers call their parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder_layer, "run", lambda *args, **kwargs: None)
        patch.setattr(encoder_layer, "run_all", lambda *args, **kwargs: None)
        patch.setattr(models, "in_one_call", lambda *args: None)
        return function()


def torch_layer(**options: Any) -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    options = {"batch_first": True} | options
    layer = nn.TransformerEncoderLayer(D, 4, 96, **options).eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.2)
    return layer


def our_bert(**options: Any) -> bert.BertModel:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 97,
        "hidden_size": D,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "max_position_embeddings": 64,
    }
    return bert.BertModel(bert.BertConfig(**sizes | options)).eval()


def inputs(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(B, L, D, generator=torch.Generator().manual_seed(1)).to(dtype)


# The same bits ------------------------------------------------------------------------------------


@FREEZE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_of_torchs(cpp_kernel, served, dtype, norm_first, activation, bias, freeze):
    layer = torch_layer(norm_first=norm_first, activation=activation, bias=bias).to(dtype)
    trifuse.fuse(layer, freeze=freeze)
    x = inputs(dtype)
    causal = nn.Transformer.generate_square_subsequent_mask(L).to(dtype)
    additive = torch.randn(L, L).to(dtype)
    for options in (
        {},
        {"src_key_padding_mask": ~KEEP},
        {"src_mask": causal, "is_causal": True},
        {"src_mask": causal == 0, "src_key_padding_mask": ~KEEP},
        {"src_mask": additive, "src_key_padding_mask": ~KEEP},
        {"src_mask": additive, "src_key_padding_mask": torch.zeros(B, L).to(dtype)},
    ):
        with torch.no_grad():
            actual = layer(x, **options)
            expected = by_parts(lambda options=options: layer(x, **options))
        assert torch.equal(actual, expected)
    with torch.no_grad():
        assert torch.equal(layer(x.mT.contiguous().mT), layer(x))
    assert served == [True] * 8


@FREEZE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unpad", [False, True])
@pytest.mark.parametrize("hidden_act", ["gelu", "relu", "gelu_new"])
def test_our_bert(served, dtype, unpad, hidden_act, freeze):
    model = our_bert(hidden_act=hidden_act).to(dtype)
    trifuse.fuse(model, unpad=unpad, freeze=freeze)
    ids = torch.randint(97, (B, L))
    for keep in (None, KEEP, KEEP[:, None, None]):
        with torch.no_grad():
            actual = model(ids, keep).last_hidden_state
            expected = by_parts(lambda keep=keep: model(ids, keep).last_hidden_state)
        assert torch.equal(actual, expected)
    assert served == [True] * 6


@FREEZE
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("unpad", [False, True])
def test_a_stack_of_torchs(served, norm_first, unpad, freeze):
    model = nn.TransformerEncoder(torch_layer(norm_first=norm_first), 2, nn.LayerNorm(D)).eval()
    trifuse.fuse(model, unpad=unpad, freeze=freeze)
    with torch.no_grad():
        actual = model(inputs(), src_key_padding_mask=~KEEP)
        expected = by_parts(lambda: model(inputs(), src_key_padding_mask=~KEEP))
    assert torch.equal(actual, expected)
    assert served == [True] * 2


@FREEZE
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_decoding_with_a_cache(cpp_kernel, served, dtype, norm_first, bias, freeze):
    model = language_model(norm_first=norm_first)
    if not bias:
        for layer in model.decoder.layers:
            layer.self_attn.in_proj_bias = layer.self_attn.out_proj.bias = layer.norm1.bias = None
    trifuse.fuse(model.to(dtype), freeze=freeze)
    lengths = torch.tensor([L, 6, 3])
    words = torch.randint(97, (2 * B, 100), generator=torch.Generator().manual_seed(1))
    past, found = KeyValueCache(), []
    with torch.no_grad():
        prompt = model._step(words[:B, :L], past)
        past.leave_out(lengths)
        # One word, several, two continuations of each text, and more than a tile of 64 keys.
        for first, last, rows in ((0, 1, B), (1, 4, B), (4, 5, 2 * B), (5, 90, 2 * B)):
            found.append(model._step(words[:rows, first:last], past))
    assert served == [True] * 2 * 5  # layers, and steps
    for row in range(2 * B):
        text = row // 2
        real = words[text, : lengths[text]]
        # The first two steps had one row for each text.
        written = torch.cat((words[text, :4], words[row, 4:90]))
        with torch.no_grad():
            whole = model.features(torch.cat((real, written))[None])[0]
        steps = torch.cat([step[row if len(step) == 2 * B else text] for step in found])
        together = torch.cat((prompt[text, : len(real)], steps))
        if len(real) == L:
            assert torch.equal(together, whole)
        else:  # padding in the cache moves the keys after it to other lanes
            tolerance = 0.1 if dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(together, whole, rtol=0, atol=tolerance)


def language_model(**options: Any) -> LanguageModel:
    torch.manual_seed(0)
    config = LanguageModelConfig(97, D, 4, 2, 96, max_length=200, **options)
    return LanguageModel(config).eval()


@FREEZE
def test_a_cache_in_inference_mode_serves_there_alone(served, freeze):
    model = language_model()
    trifuse.fuse(model, freeze=freeze)
    with torch.inference_mode():
        past = model.start(torch.zeros(1, 3, dtype=torch.long))
        inside = model.step(torch.ones(1, 1, dtype=torch.long), copy.deepcopy(past))
    with torch.no_grad():
        outside = model.step(torch.ones(1, 1, dtype=torch.long), past)
    torch.testing.assert_close(inside, outside)
    assert served == [True] * 4  # and what runs outside are the parts


@FREEZE
def test_a_cache_that_gradients_need_stays(served, freeze):
    model = language_model()
    trifuse.fuse(model, freeze=freeze)
    past, word = KeyValueCache(), torch.ones(1, 1, dtype=torch.long)
    first = model.step(word, past)
    second = model.step(word, past)
    assert not any(served)
    (first + second).sum().backward()
    assert model.positions.weight.grad[:2].abs().sum(1).all()


FAMILIES = {
    "Bert": {},
    "Roberta": {},
    "XLMRoberta": {},
    "Camembert": {},
    "Electra": {"embedding_size": 16},
    "Ernie": {},
    "Data2VecText": {},
    "LayoutLM": {},
}


def of_transformers(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers", minversion="5")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**PADDED_SIZES | FAMILIES[name])
    model: nn.Module = getattr(transformers, f"{name}Model")(config).eval()
    return model


@FREEZE
@pytest.mark.parametrize("unpad", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_layers_of_transformers(served, name, unpad, freeze):
    model = of_transformers(name)
    ids = torch.randint(3, 97, (B, L))
    with torch.no_grad():
        wanted = [model(ids, attention_mask=keep).last_hidden_state for keep in (None, KEEP.long())]
        report = trifuse.fuse(model, unpad=unpad, freeze=freeze)
        for keep, plain in zip((None, KEEP.long()), wanted, strict=True):
            run = lambda keep=keep: model(ids, attention_mask=keep).last_hidden_state  # noqa: E731
            actual = run()
            assert torch.equal(actual, by_parts(run))
            real = slice(None) if keep is None else KEEP
            torch.testing.assert_close(actual[real], plain[real], rtol=1e-4, atol=1e-5)
        assert served == [True] * 4
        assert sum(row.after == f"trifuse.recipes.{name}Layer" for row in report.swapped) == 2
        report.revert()
        assert torch.equal(model(ids).last_hidden_state, wanted[0])


@FREEZE
@pytest.mark.parametrize("unpad", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_causal_mask_of_all_pairs(served, monkeypatch, at_once, unpad, freeze):
    """Packed, it is in what the layers get instead of the mask."""
    if not at_once:
        monkeypatch.setattr(encoder_layer, "run_all", lambda *args, **kwargs: None)
    model, ids = of_transformers("Bert"), torch.randint(3, 97, (B, L))
    mask = KEEP[:, None, None] & torch.ones(L, L, dtype=torch.bool).tril()
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask).last_hidden_state
        trifuse.fuse(model, unpad=unpad, freeze=freeze)
        actual = model(ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(actual[KEEP], wanted[KEEP], rtol=1e-4, atol=1e-5)
    assert served == [True] * 2


@FREEZE
def test_threads_do_not_matter(freeze):
    layer = torch_layer()
    trifuse.fuse(layer, freeze=freeze)
    x, threads = inputs().repeat(1, 20, 1), torch.get_num_threads()
    found = []
    with torch.no_grad():
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            found.append(layer(x))
            assert torch.equal(layer(x[:1]), found[-1][:1])
    torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@FREEZE
def test_empty_batches(freeze):
    layer = torch_layer()
    trifuse.fuse(layer, freeze=freeze)
    with torch.no_grad():
        assert layer(torch.randn(0, L, D)).shape == (0, L, D)
        assert layer(torch.randn(B, 0, D)).shape == (B, 0, D)


# When the parts run -------------------------------------------------------------------------------


def hooked(layer: nn.Module) -> None:
    layer.get_submodule("linear2").register_forward_hook(lambda module, args, out: out + 1)


def replaced(layer: Any) -> None:
    layer.linear2 = nn.Linear(96, D)


def replaced_forward(layer: Any) -> None:
    layer.linear1.forward = lambda x: torch.zeros(*x.shape[:-1], 96)


def replaced_activation(layer: Any) -> None:
    layer.norm2 = nn.Sequential(nn.LayerNorm(D), nn.Tanh())


def pruned_bias(layer: Any) -> None:
    prune.l1_unstructured(layer.linear1, "bias", 0.5)


def training(layer: Any) -> None:
    layer.dropout.train()
    layer.dropout.p = 1.0


def pruned_weight(layer: Any) -> None:
    prune.l1_unstructured(layer.linear1, "weight", 0.5)


def weight_with_gaps(layer: Any) -> None:
    layer.self_attn.in_proj_weight.data = torch.randn(3 * D, 2 * D)[:, ::2]


OF_WEIGHTS = [pruned_weight, weight_with_gaps]


@pytest.mark.parametrize(
    ("change", "freeze"),
    [
        *itertools.product(
            [hooked, replaced, replaced_forward, replaced_activation, pruned_bias, training],
            [False, True],
        ),
        *((change, False) for change in OF_WEIGHTS),
    ],
)
def test_a_changed_layer_calls_its_parts(served, change, freeze):
    layer = torch_layer()
    trifuse.fuse(layer, freeze=freeze)
    x = inputs()
    with torch.no_grad():
        before = layer(x)
        change(layer)
        after = layer(x)
        assert torch.equal(after, by_parts(lambda: layer(x)))
    assert served == [True, False]
    assert not torch.equal(before, after)


@FREEZE
def test_changes_of_what_is_not_frozen_are_noticed(served, freeze):
    layer = torch_layer()
    trifuse.fuse(layer, freeze=freeze)
    x = inputs()

    def bias(layer: Any) -> None:
        layer.linear1.bias.data.add_(1)

    def new_bias(layer: Any) -> None:
        layer.linear2.bias = nn.Parameter(torch.randn(D))

    def norm(layer: Any) -> None:
        layer.norm1.weight.data = torch.randn(D)

    def eps(layer: Any) -> None:
        layer.norm2.eps = 0.5

    def activation(layer: Any) -> None:
        layer.activation = nn.functional.gelu

    def norm_first(layer: Any) -> None:
        layer.norm_first = True

    def weight(layer: Any) -> None:
        layer.linear1.weight.data.mul_(2)

    def new_data(layer: Any) -> None:
        layer.self_attn.in_proj_weight.data = torch.randn(3 * D, D)

    def new_weight(layer: Any) -> None:
        layer.linear2.weight = nn.Parameter(torch.randn(D, 96))

    def strided_weight(layer: Any) -> None:
        layer.self_attn.out_proj.weight = nn.Parameter(torch.randn(D, 2 * D)[:, :D])

    def transposed_weight(layer: Any) -> None:
        layer.linear1.weight.data = torch.randn(D, 96).t()

    of_weights = [] if freeze else [weight, new_data, new_weight, strided_weight, transposed_weight]
    with torch.no_grad():
        last = layer(x)
        for change in (bias, new_bias, norm, eps, activation, norm_first, *of_weights):
            change(layer)
            actual = layer(x)
            assert torch.equal(actual, by_parts(lambda: layer(x)))
            assert not torch.equal(actual, last)
            last = actual
    assert served
    assert all(served)


@FREEZE
def test_hooks_for_all_modules(served, freeze):
    layer = torch_layer()
    trifuse.fuse(layer, freeze=freeze)
    names: list[str] = []
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: names.append(type(module).__name__)
    )
    with torch.no_grad():
        layer(inputs())
    hook.remove()
    assert names[-1] == "TransformerEncoderLayer"
    assert ("FrozenLinear" if freeze else "Linear") in names
    assert not any(served)


@FREEZE
def test_other_ways_to_call(served, freeze):
    layer, plain = torch_layer(), torch_layer()
    trifuse.fuse(layer, freeze=freeze)
    x = inputs()
    close = torch.testing.assert_close
    x.requires_grad_()
    grads = [torch.autograd.grad(each(x).square().sum(), x)[0] for each in (layer, plain)]
    close(*grads)
    x.requires_grad_(False)
    with torch.no_grad():
        expected = plain(x)
        assert not any(served)
        close(torch.func.vmap(layer)(x[None])[0], expected)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        close(compiled(x), expected)
        close(layer(x[0]), plain(x[:1])[0])  # unbatched
        with torch.autocast("cpu"):
            close(layer(x), expected, rtol=0.05, atol=0.1, check_dtype=False)
        if freeze:  # its weights are packed for another instruction set
            before = backends._C.set_cpu_capability("DEFAULT")
            try:
                close(layer(x), expected)
            finally:
                backends._C.set_cpu_capability(before)
        with trifuse.backend("eager"):
            close(layer(x), expected)
    assert not any(served)
    with torch.inference_mode():
        close(layer(inputs()), expected)
    assert served[-1]
    with pytest.raises(RuntimeError, match="attn_mask: expected shape"), torch.no_grad():
        layer(x, src_mask=torch.ones(1, 1))
    with pytest.raises(RuntimeError, match="is_causal: expected attn_mask"), torch.no_grad():
        layer(x, is_causal=True)


@FREEZE
def test_what_transformers_asks_of_its_layers(served, freeze):
    model = of_transformers("Bert")
    ids = torch.randint(3, 97, (B, L))
    with torch.no_grad():
        plain = model(ids, output_hidden_states=True)
        trifuse.fuse(model, freeze=freeze)
        actual = model(ids, output_hidden_states=True)
        for ours, theirs in zip(actual.hidden_states, plain.hidden_states, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        del served[:]
        model(ids)  # the hooks that record are still there
        assert served == [True] * len(model.encoder.layer)
        del served[:]
        model.set_attn_implementation("eager")
        seen = model(ids, output_attentions=True).attentions
        assert len(seen) == 2
        assert served == []


@FREEZE
def test_a_replaced_attention_of_transformers_is_called(served, freeze):
    class Twice(nn.Module):
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
            return 2 * hidden_states, None

    model = of_transformers("Bert")
    trifuse.fuse(model, freeze=freeze)
    layer, x = model.encoder.layer[0], torch.randn(B, L, 32)
    layer.attention = Twice()
    with torch.no_grad():
        torch.testing.assert_close(layer(x), layer.feed_forward_chunk(2 * x))
    assert not any(served)


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """The number of layers in each call of several, and 1 for each of one."""
    found: list[int] = []
    one, several = ops.encoder_layer, ops.encoder_layers

    def watched(*args: Any) -> Tensor | None:
        found.append(1)
        return one(*args)

    def all_watched(*args: Any) -> Tensor | None:
        found.append(len(args[-1]))
        return several(*args)

    monkeypatch.setattr(ops, "encoder_layer", watched)
    monkeypatch.setattr(ops, "encoder_layers", all_watched)
    return found


@FREEZE
def test_a_module_in_place_of_a_dropout_runs(served, freeze):
    model = our_bert()
    torch_model = torch_layer()
    trifuse.fuse(nn.ModuleList([model, torch_model]), freeze=freeze)
    model.encoder.layer[0].output.dropout = torch_model.dropout1 = nn.Linear(D, D).eval()
    with torch.no_grad():
        for run in (
            lambda: model(torch.ones(B, L, dtype=torch.long)).last_hidden_state,
            lambda: torch_model(inputs()),
        ):
            assert torch.equal(run(), by_parts(run))
    assert served == [False, True, False]


@FREEZE
@pytest.mark.parametrize("unpad", [False, True])
def test_layers_of_torchs_run_in_one_call(calls, unpad, freeze):
    model = nn.TransformerEncoder(torch_layer(), 3).eval()
    trifuse.fuse(model, unpad=unpad, freeze=freeze)
    with torch.no_grad():
        model(inputs(), src_key_padding_mask=~KEEP)
        assert calls == [3]
        model.layers[1].__class__ = type("Layer", (type(model.layers[1]),), {})
        model(inputs(), src_key_padding_mask=~KEEP)
    assert calls == [3, 1, 1, 1]


@FREEZE
@pytest.mark.parametrize(
    ("name", "unpad"),
    [("Bert", False), ("Bert", True), ("Roberta", True), ("LayoutLM", False), ("ours", True)],
)
def test_layers_run_in_one_call(calls, monkeypatch, name, unpad, freeze):
    monkeypatch.setattr(models, "in_one_call", lambda *args: None)
    model: Any = our_bert() if name == "ours" else of_transformers(name)
    trifuse.fuse(model, unpad=unpad, freeze=freeze)
    encoder, ids = model.encoder, torch.randint(3, 97, (B, L))

    def run() -> Tensor:
        for keep in (None, KEEP if name == "ours" else KEEP.long()):
            out: Tensor = model(ids, attention_mask=keep).last_hidden_state
            assert torch.equal(
                out, by_parts(lambda keep=keep: model(ids, attention_mask=keep).last_hidden_state)
            )
        return out

    def run_in(*expected: int) -> Tensor:
        del calls[:]
        out = run()
        assert calls == list(expected)
        return out

    with torch.no_grad():
        first = run_in(2, 2)
        handle = encoder.layer[1].register_forward_hook(lambda module, args, out: out + 1)
        assert not torch.equal(run_in(1, 1, 1, 1), first)  # a layer's own hook
        handle.remove()
        within = next(each for each in encoder.layer[1].modules() if type(each) is nn.LayerNorm)
        handle = within.register_forward_hook(lambda module, args, out: out + 1)
        assert not torch.equal(run_in(1, 1), first)
        handle.remove()
        norm: Any = within
        kept, norm.eps = norm.eps, 1.0
        assert not torch.equal(run_in(2, 2), first)
        norm.eps = kept
        assert torch.equal(run_in(2, 2), first)
        bias, norm.bias = norm.bias, nn.Parameter(torch.ones_like(norm.bias))
        assert not torch.equal(run_in(2, 2), first)
        norm.bias = bias
        last = encoder.layer[1]
        encoder.layer[1] = encoder.layer[0]
        assert not torch.equal(run_in(2, 2), first)
        encoder.layer[1] = last
        encoder.layer.append(last)
        assert not torch.equal(run_in(3, 3), first)
        del encoder.layer[2]
        assert torch.equal(run_in(2, 2), first)
    assert model(ids).last_hidden_state.requires_grad
    if name != "ours":
        with torch.no_grad():
            model.set_attn_implementation("sdpa")
            model(ids)
            model.set_attn_implementation("trifuse")
            assert torch.equal(run_in(2, 2), first)


def test_an_activation_that_became_a_module_is_called(served):
    layer = torch_layer()
    trifuse.fuse(layer)
    with torch.no_grad():
        before = layer(inputs())
        layer.activation = nn.Tanh()
        after = layer(inputs())
        assert torch.equal(after, by_parts(lambda: layer(inputs())))
    assert served == [True, False]
    assert not torch.equal(before, after)


@pytest.mark.parametrize("name", ["ours", "Bert"])
def test_another_number_of_heads_is_noticed(served, name):
    model: Any = our_bert() if name == "ours" else of_transformers(name)
    trifuse.fuse(model, unpad=name == "ours")
    ids = torch.randint(3, 97, (B, L))
    layers = model.encoder.layer

    def run() -> Tensor:
        out: Tensor = model(ids).last_hidden_state
        return out

    with torch.no_grad():
        before = run()
        for layer in layers:
            attention = layer.attention.self
            attention.num_attention_heads = 2
            attention.attention_head_size = attention.query.out_features // 2
        after = run()
        assert torch.equal(after, by_parts(run))
        if name == "Bert":
            layers[0].attention.self.scaling = 0.1
            assert torch.equal(run(), by_parts(run))
            assert not torch.equal(run(), after)
    assert all(served)
    assert not torch.equal(before, after)


def test_a_feed_forward_of_a_layers_own_is_called(served):
    model = of_transformers("Bert")
    trifuse.fuse(model)
    ids = torch.randint(3, 97, (B, L))
    with torch.no_grad():
        before = model(ids).last_hidden_state
        layer = model.encoder.layer[1]
        own = layer.feed_forward_chunk
        layer.feed_forward_chunk = lambda x: 2 * own(x)
        after = model(ids).last_hidden_state
    torch.testing.assert_close(after, 2 * before)
    assert served == [True, True, True]


def test_another_dtype_is_served_too(served):
    layer = torch_layer()
    trifuse.fuse(layer)
    with torch.no_grad():
        layer(inputs())
        layer.bfloat16()
        x = inputs(torch.bfloat16)
        assert torch.equal(layer(x), by_parts(lambda: layer(x)))
    assert served == [True, True]


def test_nested_tensors_are_refused_as_by_the_parts():
    layer = torch_layer()
    trifuse.fuse(layer)
    nested = torch.nested.nested_tensor([torch.randn(3, D), torch.randn(5, D)])
    with torch.no_grad(), pytest.raises(AssertionError, match="NestedTensor"):
        layer(nested)


def test_an_attention_of_another_class_runs(served):
    class Attention(nn.Module):
        def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
            return 2 * query, None

    layer: Any = torch_layer()
    trifuse.fuse(layer)
    layer.self_attn = Attention().eval()
    with torch.no_grad():
        assert torch.equal(layer(inputs()), by_parts(lambda: layer(inputs())))
    assert served == []


@pytest.mark.parametrize("rows", [511, 512])
def test_many_rows_of_weights_that_are_not_frozen_call_the_parts(served, rows):
    layer = torch_layer()
    trifuse.fuse(layer)
    x = torch.randn(1, rows, D)
    with torch.no_grad():
        for _ in range(3):  # the parts keep a packed weight from the second call on
            assert torch.equal(layer(x)[:, :4], layer(x)[:, :4])
    assert served == ([True] * 6 if rows < linear_ops.ROWS_WORTH_CHECKING else [])


def test_torchs_product_serves_the_parts(served, monkeypatch):
    layer = torch_layer()
    trifuse.fuse(layer)
    monkeypatch.setattr(_linear_choice, "_made", {})
    monkeypatch.setenv("TRIFUSE_LINEAR", "torch")
    _linear_choice.choose(torch.float32)
    with torch.no_grad():
        assert torch.equal(layer(inputs()), by_parts(lambda: layer(inputs())))
    assert served == [False]


def test_layers_that_are_partly_frozen_call_their_parts(served):
    layer = torch_layer()
    layer.linear3 = nn.Linear(D, 96)
    layer.linear3.weight = layer.linear1.weight  # shared, so not frozen
    trifuse.fuse(layer, freeze=True)
    with torch.no_grad():
        assert torch.equal(layer(inputs()), by_parts(lambda: layer(inputs())))
        assert layer in encoder_layer._refused
    assert served == [False]


@FREEZE
def test_copies_plan_anew(freeze):
    layer = torch_layer()
    trifuse.fuse(layer, freeze=freeze)
    x = inputs()
    with torch.no_grad():
        expected = layer(x)
        for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(twin(x), expected)
            twin.linear2.bias.add_(1)
            assert not torch.equal(twin(x), expected)
            assert torch.equal(layer(x), expected)


@FREEZE
def test_a_pickled_layer_of_transformers(freeze):
    model = of_transformers("Roberta")
    trifuse.fuse(model, freeze=freeze)
    twin = pickle.loads(pickle.dumps(model))
    ids = torch.randint(3, 97, (B, L))
    assert type(twin.encoder.layer[0]) is type(model.encoder.layer[0])
    with torch.no_grad():
        assert torch.equal(twin(ids).last_hidden_state, model(ids).last_hidden_state)


@FREEZE
def test_a_plan_keeps_no_layer_alive(freeze):
    layer = torch_layer()
    trifuse.fuse(layer, freeze=freeze)
    with torch.no_grad():
        layer(inputs())
    assert layer in encoder_layer._plans
    gone = weakref.ref(layer)
    del layer
    gc.collect()
    assert gone() is None


# The op -------------------------------------------------------------------------------------------


def arguments() -> dict[str, Any]:
    pack = torch.ops.trifuse.pack_linear
    return {
        "x": inputs(),
        "attn_mask": None,
        "cu_seqlens": None,
        "max_seqlen": 0,
        "weights": [pack(torch.randn(shape)) for shape in SHAPES],
        "biases": [torch.randn(shape[0]) for shape in SHAPES],
        "norms": [torch.randn(D) for _ in range(4)],
        **OPTIONS._asdict(),
    }


SHAPES = [(D, D)] * 4 + [(96, D), (D, 96)]
OPTIONS = ops.Options(
    eps=(1e-5, 1e-5),
    num_heads=4,
    num_key_heads=4,
    head_dim=16,
    intermediate_size=96,
    scale=0.25,
    result_scale=1.0,
    softcap=None,
    activation="gelu",
    norm_first=False,
    rms_norm=False,
    norms_from_one=False,
    parallel=False,
    residual_first=False,
    by_head=False,
    heads_normed_together=False,
    rotary_in_float32=False,
    rotary_interleaved=False,
    rotary_per_pair=False,
    window_left=-1,
    window_right=-1,
)


def test_the_order_of_the_options():
    """A call replaces the first and the last two."""
    fields = ops.Options._fields
    assert (fields[0], *fields[-2:]) == ("eps", "window_left", "window_right")
    ops._check_order(fields)
    exchanged = ("eps", "num_key_heads", "num_heads", *fields[3:])
    with pytest.raises(ImportError, match=r"option 1 .* is 'num_heads' .* but 'num_key_heads' in"):
        ops._check_order(exchanged)
    with pytest.raises(ImportError, match=r"option 20 .* is 'window_right' .* but None in"):
        ops._check_order(fields[:-1])
    with pytest.raises(ImportError, match=r"option 21 .* is None .* but 'another' in"):
        ops._check_order((*fields, "another"))


def test_an_unknown_activation_changes_nothing():
    given = arguments() | cache() | {"activation": "tanh"}
    before = given["key_cache"].clone()
    with pytest.raises(ValueError, match="activation"):
        torch.ops.trifuse.encoder_layer(**given)
    assert torch.equal(given["key_cache"], before)


@pytest.mark.parametrize("name", ["key_cache", "value_cache"])
def test_a_cache_whose_rows_share_memory(name):
    given = arguments() | cache()
    shared = torch.zeros(1, *given[name].shape[1:])
    given[name] = shared.expand(given[name].shape)
    assert given[name].shape[0] > 1
    with pytest.raises(ValueError, match=f"{name}: expected memory of its own"):
        torch.ops.trifuse.encoder_layer(**given)
    assert not shared.any()


def rotary(features: int = 16, **changes: Any) -> dict[str, Any]:
    """Arguments of the op: the rotation of some features of each head."""
    cos, sin = (torch.randn(1, L, features) for _ in range(2))
    return {"cos": cos, "sin": sin} | changes


def normed(*eps: float, **changes: Any) -> dict[str, Any]:
    """Arguments of the op: norms without weights."""
    return {"eps": eps, "norms": [None] * (2 * len(eps))} | changes


def memory(**changes: Any) -> dict[str, Any]:
    """Arguments of the op: a memory of 7 tokens."""
    given = arguments()
    for name in ("weights", "biases"):
        given[name] = [*given[name][:4], *given[name][2:4], *given[name][4:]]
    key, value = (torch.randn(B, 4, 7, 16) for _ in range(2))
    named = {"weights": given["weights"], "biases": given["biases"]}
    return normed(*[1e-5] * 3) | named | {"memory_key": key, "memory_value": value} | changes


def stored(index: int, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Arguments of the op: weights that are not packed, and a change of one of them."""
    weights = [torch.randn(shape) for shape in SHAPES]
    weights[index] = change(weights[index])
    return {"weights": weights}


def cache(**changes: Any) -> dict[str, Any]:
    """Arguments of the op: a cache of 25 tokens, of which 15 are taken."""
    key_cache, value_cache = (torch.zeros(B, 4, 25, 16) for _ in range(2))
    return {"key_cache": key_cache, "value_cache": value_cache, "past": 15} | changes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_first", [False, True])
def test_a_number_that_multiplies_the_results_of_all_sublayers(dtype, norm_first):
    """Twice the results of half the weights and biases have the bits of the whole results."""
    shapes = [*SHAPES[:4], *SHAPES[2:]]
    given = arguments() | memory(norm_first=norm_first) | {"x": inputs(dtype)}
    given["weights"] = [torch.randn(shape).to(dtype) for shape in shapes]
    for name in ("biases", "norms"):
        given[name] = [None if t is None else t.to(dtype) for t in given[name]]
    given |= {name: given[name].to(dtype) for name in ("memory_key", "memory_value")}
    ends = (3, 5, 7)  # the last products of the sublayers
    halves = {
        name: [t / 2 if i in ends else t for i, t in enumerate(given[name])]
        for name in ("weights", "biases")
    }
    expected = torch.ops.trifuse.encoder_layer(**given)
    assert not torch.equal(torch.ops.trifuse.encoder_layer(**given | halves), expected)
    doubled = given | halves | {"result_scale": 2.0}
    assert torch.equal(torch.ops.trifuse.encoder_layer(**doubled), expected)


@pytest.mark.parametrize("past", [0, 15])
def test_a_bias_by_distance(past):
    """It equals a mask that holds the bias of each pair; a cache shifts the distances."""
    given = arguments() | (cache() if past else {})
    keys = past + L
    table = torch.randn(1, 4, L + keys - 1)
    distances = torch.arange(keys) - torch.arange(L)[:, None] - past
    matrix = table[:, :, distances + keys - 1]
    out, expected, without = (
        torch.ops.trifuse.encoder_layer(**given | more)
        for more in ({"relative_bias": table}, {"attn_mask": matrix}, {})
    )
    torch.testing.assert_close(out, expected)
    assert not torch.allclose(out, without)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("last", [0, 1, 7])
def test_rotates_the_last_tokens(cpp_kernel, dtype, last):
    weights = [torch.ops.trifuse.pack_linear(torch.randn(shape).to(dtype)) for shape in SHAPES]
    given = arguments() | {"x": inputs(dtype), "weights": weights, "biases": [None] * 6}
    given |= normed(1e-5, 1e-5)
    cos, sin = (torch.randn(B, last, 16).to(dtype) for _ in range(2))
    # The tokens before them are turned by no angle.
    ones, zeros = (torch.full((B, L - last, 16), value).to(dtype) for value in (1.0, 0.0))
    whole = {"cos": torch.cat((ones, cos), 1), "sin": torch.cat((zeros, sin), 1)}
    expected = torch.ops.trifuse.encoder_layer(**given | whole)
    assert torch.equal(
        torch.ops.trifuse.encoder_layer(**given | {"cos": cos, "sin": sin}), expected
    )


def test_a_cache_is_written_to_where_told():
    given = arguments() | cache()
    given["key_cache"].fill_(torch.nan)  # what isn't read may be anything
    given["key_cache"][:, :, :15] = 0
    versions = [given[name]._version for name in ("key_cache", "value_cache")]
    out = torch.ops.trifuse.encoder_layer(**given)
    assert out.isfinite().all()
    for name, version in zip(("key_cache", "value_cache"), versions, strict=True):
        assert given[name]._version == version + 1
        assert given[name][:, :, 15:].isfinite().all()
        assert (given[name][:, :, :15] == 0).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.randn(L, D)}, "x: expected a contiguous tensor of 3 dimensions"),
        ({"x": torch.randn(B, D, L).mT}, "x: expected a contiguous tensor"),
        ({"x": inputs().double()}, "x: expected float32 or bfloat16"),
        ({"x": torch.randn(B, L, 48)}, "packed: not a weight"),
        ({"num_heads": 8}, "packed: not a weight"),
        ({"intermediate_size": 200}, "packed: not a weight"),
        ({"intermediate_size": 0}, "intermediate_size: expected at least 1"),
        ({"num_heads": -4, "head_dim": -16}, "num_heads, head_dim.*expected at least 1"),
        ({"num_heads": 1 << 40, "head_dim": 1 << 40}, "num_heads, head_dim.*expected fewer"),
        ({"intermediate_size": 1 << 62}, "expected fewer features"),
        ({"weights": []}, "weights: expected 4 to 7"),
        ({"norms": [None] * 3}, "norms: expected a weight and a bias for each of 2 to 7 values"),
        ({"norms": [None] * 6}, "norms: expected a weight and a bias for each of 2 to 7 values"),
        (normed(1e-5), "norms: expected a weight and a bias for each of 2 to 7 values"),
        (normed(*[1e-5] * 8), "norms: expected a weight and a bias for each of 2 to 7 values"),
        (normed(-1, 1e-5), "eps: expected a norm of each sublayer"),
        (normed(1e-5, -1), "eps: expected a norm of each sublayer"),
        (normed(1e-5, 1e-5, -1, -1, -1, 1e-5), "eps: expected no norm of a result"),
        ({"parallel": True}, "parallel: expected False, because the norms come last"),
        (normed(-2, 1e-5), "eps: expected at least 0, or -1; got -2"),
        (normed(math.nan, 1e-5), "eps: expected at least 0, or -1; got nan"),
        ({"softcap": 0.0}, "softcap: expected a number in"),
        ({"softcap": math.nan}, "softcap: expected a number in"),
        (normed(-1, 1e-5, norm_first=True, parallel=True), "parallel: expected a norm"),
        (
            normed(1e-5, 1e-5, -1, 1e-5) | {"norms": [None] * 6 + [torch.randn(15), None]},
            "weight: expected shape",
        ),
        ({"residual_first": True}, "residual_first: expected False without parallel"),
        ({"by_head": True}, "by_head: expected one weight"),
        (
            {"by_head": True, "heads_normed_together": True, "biases": [None] * 4}
            | {"weights": [torch.randn(shape) for shape in ((3 * D, D), *SHAPES[3:])]},
            "heads_normed_together: expected False",
        ),
        (
            normed(1e-5, 1e-5, -1, 1e-5, heads_normed_together=True)
            | {"norms": [None] * 6 + [torch.randn(16), None]},
            "weight: expected shape",
        ),
        (
            normed(1e-5, 1e-5, -1, 1e-5) | {"norms": [None] * 7 + [torch.randn(15)]},
            "bias: expected shape",
        ),
        (memory(memory_value=None), "memory_key: expected a memory_value beside it"),
        (normed(1e-5, 1e-5, 1e-5), "memory_key: expected a memory_value beside it"),
        ({"memory_mask": torch.ones(1, 1, 1, 7).bool()}, "memory_key: expected a memory_value"),
        (
            memory(eps=(1e-5, 1e-5), norms=[None] * 4),
            "memory_key: .* a norm if the norms come last",
        ),
        (memory(norm_first=True, parallel=True), "memory_key: expected neither cu_seqlens nor"),
        (memory(biases=[None] * 7), "weights: expected 6 to 9, and as many biases, or two more"),
        (memory(memory_key=torch.randn(B, 2, 7, 16)), "memory_key: expected shape"),
        (memory(memory_value=torch.randn(B, 4, 7, 16).bfloat16()), "memory_value: expected Float"),
        (memory(memory_value=torch.randn(B, 4, 16, 7).mT), "memory_value: expected contiguous"),
        (memory(memory_mask=torch.ones(1, 1, 1, 6).bool()), "attn_mask: expected a shape"),
        ({"num_key_heads": 3}, "num_key_heads: expected a divisor of 4; got 3"),
        ({"num_key_heads": 0}, "num_key_heads: expected a divisor of 4; got 0"),
        ({"num_key_heads": 2}, "bias: expected shape"),
        (rotary(sin=None), "cos: expected a sin beside it"),
        (rotary(17), "cos: .* an even number from 2 to 16; got shape"),
        (rotary(18), "cos: .* an even number from 2 to 16; got shape"),
        (rotary(0), "cos: .* an even number from 2 to 16; got shape"),
        (rotary(cos=torch.randn(L, 16)), "cos: expected 3 dimensions"),
        (rotary(sin=torch.randn(1, L, 8)), "sin: expected shape"),
        (rotary(cos=torch.randn(2, L, 16)), "cos: expected shape"),
        (rotary(cos=torch.randn(1, L + 1, 16)), "cos: expected shape"),
        (rotary(cos=torch.randn(1, L - 1, 16)), "sin: expected shape"),
        (
            rotary(x=inputs()[:1], cos=torch.randn(1, L - 1, 16), sin=torch.randn(1, L - 1, 16))
            | {"cu_seqlens": torch.tensor([0, 4, L], dtype=torch.int32), "max_seqlen": L},
            "cos: expected shape",
        ),
        ({"biases": [None] * 7}, "as many biases, or two more for the factors; got 6 and 7"),
        ({"biases": [None] * 7 + [torch.randn(D - 1)]}, "factor: expected shape"),
        ({"biases": [None] * 6 + [torch.randn(D).double(), None]}, "factor: expected Float"),
        (
            normed(1e-5, 1e-5, -1, -1, -1, 1e-5, norm_first=True)
            | {"biases": [None] * 6 + [torch.randn(D), None]},
            "factor: expected None for a result that has a norm",
        ),
        (
            normed(1e-5, 1e-5, -1, -1, -1, -1, 1e-5, norm_first=True)
            | {"biases": [None] * 7 + [torch.randn(D)]},
            "factor: expected None for a result that has a norm",
        ),
        (rotary(cos=torch.randn(1, L, 16).bfloat16()), "cos: expected Float"),
        (rotary(cos=torch.randn(1, L, 16).double()), "cos: expected Float"),
        (rotary(sin=torch.randn(1, L, 16).bfloat16()), "sin: expected Float"),
        (rotary(9, rotary_per_pair=True), "cos: .* from 1 to 8 pairs; got shape"),
        (rotary(0, rotary_per_pair=True), "cos: .* from 1 to 8 pairs; got shape"),
        (rotary(cos=torch.randn(1, 16, L).mT), "cos: expected contiguous features"),
        (
            cache(attn_mask=torch.ones(1, 1, 1, 26).bool()),
            "attn_mask: expected no more keys than the cache has room for, 25",
        ),
        ({"biases": [torch.randn(9)] + [None] * 5}, "bias: expected shape"),
        ({"biases": [torch.ones(D, dtype=torch.int32)] + [None] * 5}, "bias: expected"),
        ({"norms": [torch.randn(9), None, None, None]}, "weight: expected shape"),
        (
            {"rms_norm": True, "norms": [torch.randn(D).double(), None, torch.randn(D), None]},
            "weight: expected Float; got Double",
        ),
        ({"activation": "tanh"}, "activation: expected relu"),
        (stored(0, lambda weight: weight[:, :-1]), "weight: expected shape"),
        (stored(4, torch.Tensor.double), "weight: expected Float; got Double"),
        (stored(5, lambda weight: weight.repeat(1, 2)[:, ::2]), "weight: expected contiguous rows"),
        (stored(3, torch.ops.trifuse.pack_linear), "weight: expected Float; got Byte"),
        (stored(0, torch.ops.trifuse.pack_linear), "packed: not a weight"),
        ({"attn_mask": torch.ones(L, L).bool()}, "attn_mask: expected a shape"),
        ({"attn_mask": torch.ones(1, 1, 3, 3).bool()}, "attn_mask: expected a shape"),
        ({"relative_bias": torch.zeros(2 * L - 1)}, "relative_bias: expected shape"),
        ({"relative_bias": torch.zeros(1, 3, 2 * L - 1)}, "relative_bias: expected shape"),
        ({"relative_bias": torch.zeros(1, 4, 2 * L)}, "relative_bias: expected shape"),
        (cache(relative_bias=torch.zeros(1, 4, 2 * L - 1)), "relative_bias: expected shape"),
        ({"relative_bias": torch.zeros(1, 4, 2 * L - 1).double()}, "relative_bias: expected Float"),
        ({"cu_seqlens": torch.tensor([0, 4, L])}, "query: expected batch size 1"),
        (
            {"x": inputs()[:1], "cu_seqlens": torch.tensor([0, 4, L + 1]), "max_seqlen": L},
            "cu_seqlens_q: expected 0 first",
        ),
        (cache(key_cache=None), "key_cache: expected a value_cache beside it"),
        (cache(cu_seqlens=torch.tensor([0, L])), "key_cache: .* no cu_seqlens"),
        (cache(key_cache=torch.zeros(B, 4, 16)), "key_cache: expected shape"),
        (cache(value_cache=torch.zeros(B, 4, 24, 16)), "value_cache: expected shape"),
        (cache(value_cache=torch.zeros(B, 4, 16, 25).mT), "value_cache: expected contiguous"),
        (cache(key_cache=torch.zeros(B, 4, 25, 16).double()), "key_cache: expected"),
        (cache(past=25 - L + 1), "past: expected a cache with room for 10 more tokens after 16"),
        (cache(past=-1), "past: expected"),
    ],
)
def test_arguments_that_do_not_fit(changes, message):
    op, given = torch.ops.trifuse.encoder_layer, arguments()
    op(**given)
    with pytest.raises((ValueError, TypeError), match=message):
        op(**given | changes)


def each_allocation_fails() -> None:
    small, large = arguments(), arguments() | {"x": torch.randn(40, 200, D)}
    run = torch.ops.trifuse.encoder_layer
    expected = run(**small), run(**large)

    def attempt(number: int) -> int:
        with failing(number, ALL):
            result = unless_out_of_memory(lambda: run(**large))
        made: int = backends._C.counted_allocations()
        assert (result is None) == (number <= made)
        assert torch.equal(run(**small), expected[0])
        assert torch.equal(run(**large), expected[1])
        return made

    assert for_each_allocation(attempt) >= 2  # the result and the workspace


def test_each_allocation_fails():
    in_process(each_allocation_fails)


@pytest.mark.parametrize(("rows", "allocations"), [(20, 2), (256, 1)])
def test_workspaces_from_128_kib_on_are_kept(rows, allocations):
    """A call allocates its result, and its workspace if that is small: 43 KiB for 20 rows, 550 KiB
    for 256."""
    given = arguments() | {"x": torch.randn(1, rows, D)}
    torch.ops.trifuse.encoder_layer(**given)
    with failing(ALL, 1):  # it counts allocations, and none fails
        torch.ops.trifuse.encoder_layer(**given)
    assert backends._C.counted_allocations() == allocations


@pytest.mark.covering
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("normed", ["no", "first", "heads", "all"])
@pytest.mark.parametrize("rotated", [0, 6, 16])
@pytest.mark.parametrize("in_float32", [False, True])
@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("from_one", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(
    "sublayers",
    [
        "two",
        "with memory",
        "with norms of results",
        "with factors",
        "parallel",
        "parallel, one norm",
    ],
)
def test_has_the_bits_of_the_operators(
    cpp_kernel, dtype, joint, gated, normed, rotated, in_float32, by_head, from_one, softcap,
    sublayers,
):  # fmt: skip
    """A layer of 4 heads of queries over 2 of keys, or over 4 if they are stored head by head."""
    by_head = by_head and joint
    E, G = 16, 4 if by_head else 2
    sizes = [4 * E, G * E, G * E]
    if joint:
        sizes = [sum(sizes)]
    with_memory, parallel = sublayers == "with memory", sublayers.startswith("parallel")
    shapes = [*((N, D) for N in sizes), *[(D, D)] * (3 if with_memory else 1)]
    shapes += [*[(96, D)] * (1 + gated), (D, 96)]
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    plain = [draw(*shape) / 8 for shape in shapes]
    weights = [torch.ops.trifuse.pack_linear(weight) for weight in plain]
    biases = [draw(N) if i % 2 else None for i, (N, _) in enumerate(shapes)]
    first, of_heads = normed in ("first", "all") or parallel, normed in ("heads", "all")
    present = [
        first,
        sublayers != "parallel, one norm",
        with_memory,
        of_heads,
        of_heads,
        *[sublayers == "with norms of results"] * 2,
    ]
    eps = [10.0**-number if has else -1 for number, has in enumerate(present, 2)]
    norms = [draw(E if number in (3, 4) else D) for number in range(7)]
    factors = [draw(D), draw(D)] if sublayers == "with factors" else []
    key, value = draw(B, G, 7, E), draw(B, G, 7, E)
    unseen = torch.rand(B, 1, 1, 7, generator=generator) < 0.3
    cos, sin = (draw(B, L, rotated), draw(1, L, rotated)) if rotated else (None, None)
    x = inputs(dtype)
    given = (
        arguments()
        | OPTIONS._asdict()
        | {
            "x": x,
            "weights": weights,
            "biases": biases + factors,
            "norms": [each for weight in norms for each in (weight, None)],
            "eps": eps,
            "activation": "silu",
            "norm_first": True,
            "rms_norm": True,
            "window_right": 0,
            "num_key_heads": G,
            "rotary_in_float32": in_float32,
            "by_head": by_head,
            "norms_from_one": from_one,
            "parallel": parallel,
            "softcap": softcap,
            "memory_key": key if with_memory else None,
            "memory_value": value if with_memory else None,
            "memory_mask": ~unseen if with_memory else None,
            "cos": cos,
            "sin": sin,
        }
    )
    out = torch.ops.trifuse.encoder_layer(**given)

    def product(i: int, x: Tensor, *rest: Any) -> Tensor:
        flat = torch.ops.trifuse.linear_packed(
            x.flatten(0, -2), weights[i], shapes[i][0], biases[i], *rest
        )
        return flat.unflatten(0, x.shape[:-1])

    def multiply(x: Tensor, number: int) -> Tensor:
        return x * factors[number] if factors else x

    def norm(number: int, x: Tensor, residual: Tensor | None = None, **options: Any) -> Any:
        if not present[number]:
            return x if residual is None else (x + residual,) * 2
        weight = 1 + norms[number].float() if from_one else norms[number]
        return trifuse.dropout_add_layer_norm(
            x, residual, weight, eps=eps[number], rms_norm=True, **options
        )

    def rotate(x: Tensor) -> Tensor:
        if cos is None or sin is None:
            return x
        x, rest = x.split((rotated, E - rotated), -1)
        x = x.float() if in_float32 else x
        x1, x2 = x.chunk(2, -1)
        turned = x * cos[:, None] + torch.cat((-x2, x1), -1) * sin[:, None]
        return torch.cat((turned.to(dtype), rest), -1)

    h = norm(0, x)
    projected = torch.cat([product(i, h) for i in range(len(sizes))], -1)
    if by_head:
        q, k, v = projected.unflatten(-1, (4, 3, E)).unbind(-2)
    else:
        several = projected.split((4 * E, G * E, G * E), -1)
        q, k, v = (t.unflatten(-1, (-1, E)) for t in several)
    q, k = norm(3, q), norm(4, k)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    options: Any = {"scale": 0.25, "softcap": softcap, "enable_gqa": True}
    attended = trifuse.scaled_dot_product_attention(
        rotate(q), rotate(k), v, is_causal=True, **options
    )
    at = len(sizes)

    def transform(h: Tensor) -> Any:
        first = at + (3 if with_memory else 1)
        gate = (weights[first + 1], biases[first + 1]) if gated else ()
        down = norm(6, product(len(shapes) - 1, product(first, h, "silu", *gate)))
        return multiply(down, 1)

    update = multiply(norm(5, product(at, attended.transpose(1, 2).flatten(-2))), 0)
    if parallel:
        expected = update + transform(norm(1, x) if present[1] else h) + x
    else:
        if with_memory:
            h, x1 = norm(2, update, x, prenorm=True)
            q = product(at + 1, h).unflatten(-1, (4, E)).transpose(1, 2)
            attended = trifuse.scaled_dot_product_attention(q, key, value, ~unseen, **options)
            update = product(at + 2, attended.transpose(1, 2).flatten(-2))
        else:
            x1 = x
        h, total = norm(1, update, x1, prenorm=True)
        expected = total + transform(h)
    assert torch.equal(out, expected)

    op = torch.ops.trifuse.encoder_layer
    with_gaps = [torch.cat((weight, weight), 1)[:, : weight.shape[1]] for weight in plain]
    by_columns = [weight.t().contiguous().t() for weight in plain]
    several = [plain, with_gaps, *([] if gated else [by_columns])]
    for these in several:
        assert torch.equal(op(**given | {"weights": these}), out)
    if cos is not None and sin is not None:
        given |= {"cos": cos[:1, :3], "sin": sin[:, :3]}
    given["x"] = x[:1, :3]  # few rows
    if with_memory:
        given |= {name: given[name][:1] for name in ("memory_key", "memory_value", "memory_mask")}
    few = op(**given)
    assert torch.equal(few, out[:1, :3])
    for these in several:
        assert torch.equal(op(**given | {"weights": these}), few)
    if gated:
        with pytest.raises(ValueError, match="weight: expected contiguous rows"):
            op(**given | {"weights": by_columns})


@pytest.mark.covering
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("per_pair", [False, True])
@pytest.mark.parametrize("rounding", ["each product", "once", "float32 cosines"])
@pytest.mark.parametrize("rotated", [6, 16])
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("rms_norm", [False, True])
@pytest.mark.parametrize("residual_first", [False, True])
def test_rotations_head_norms_and_the_order_of_sums(
    cpp_kernel, dtype, interleaved, per_pair, rounding, rotated, joint, together, rms_norm,
    residual_first,
):  # fmt: skip
    """A parallel layer of 4 heads of queries over 2 of keys."""
    E, G = 16, 2
    sizes = [4 * E, G * E, G * E]
    shapes = [*((N, D) for N in ([sum(sizes)] if joint else sizes)), (D, D), (96, D), (D, 96)]
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    weights = [torch.ops.trifuse.pack_linear(draw(*shape) / 8) for shape in shapes]
    of_heads = sizes[:2] if together else [E, E]
    vectors = [[draw(N), None if rms_norm else draw(N)] for N in (D, D, D, *of_heads)]
    eps = (1e-2, -1, -1, 1e-3, 1e-4)
    cos, sin = draw(B, L, rotated), draw(1, L, rotated)
    if per_pair:
        cos, sin = cos[..., : rotated // 2], sin[..., : rotated // 2]
    if rounding == "float32 cosines":
        cos, sin = cos.float() + 1e-4, sin.float() - 1e-4
    x = inputs(dtype)
    out = torch.ops.trifuse.encoder_layer(
        **arguments()
        | {
            "x": x,
            "weights": weights,
            "biases": [None] * len(weights),
            "norms": [each for pair in vectors for each in pair],
            "eps": eps,
            "norm_first": True,
            "rms_norm": rms_norm,
            "parallel": True,
            "residual_first": residual_first,
            "num_key_heads": G,
            "heads_normed_together": together,
            "rotary_in_float32": rounding == "once",
            "rotary_interleaved": interleaved,
            "rotary_per_pair": per_pair,
            "cos": cos,
            "sin": sin,
        }
    )

    def product(i: int, x: Tensor, *rest: Any) -> Tensor:
        flat = torch.ops.trifuse.linear_packed(
            x.flatten(0, -2), weights[i], shapes[i][0], None, *rest
        )
        return flat.unflatten(0, x.shape[:-1])

    def norm(number: int, x: Tensor) -> Tensor:
        weight, bias = vectors[number]
        return trifuse.dropout_add_layer_norm(
            x, None, weight, bias, eps=eps[number], rms_norm=rms_norm
        )

    def heads(number: int, t: Tensor) -> Tensor:
        t = norm(number, t) if together else norm(number, t.unflatten(-1, (-1, E))).flatten(-2)
        return rotate(t.unflatten(-1, (-1, E)).transpose(1, 2))

    def rotate(x: Tensor) -> Tensor:
        x, rest = x.split((rotated, E - rotated), -1)
        x = x.float() if rounding == "once" else x
        x1, x2 = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        turned = torch.stack((-x2, x1), -1) if interleaved else torch.stack((-x2, x1), -2)
        if per_pair:
            spread = [
                t.repeat_interleave(2, -1) if interleaved else t.repeat(1, 1, 2) for t in (cos, sin)
            ]
        else:
            spread = [cos, sin]
        c, s = (t[:, None] for t in spread)
        return torch.cat(((x * c + turned.flatten(-2) * s).to(dtype), rest), -1)

    h = norm(0, x)
    projected = torch.cat([product(i, h) for i in range(len(sizes[: 1 if joint else 3]))], -1)
    q, k, v = projected.split(sizes, -1)
    v = v.unflatten(-1, (-1, E)).transpose(1, 2)
    attended = trifuse.scaled_dot_product_attention(
        heads(3, q), heads(4, k), v, scale=0.25, enable_gqa=True
    )
    at = len(weights) - 3
    update = product(at, attended.transpose(1, 2).flatten(-2))
    transformed = product(at + 2, product(at + 1, h, "gelu"))
    expected = x + update + transformed if residual_first else update + transformed + x
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_rotate_the_same(dtype):
    length, E = 4000, 16
    shapes = [(D, D)] * 4 + [(96, D), (D, 96)]
    given = (
        arguments()
        | rotary()
        | {
            "x": torch.randn(1, length, D).to(dtype),
            "weights": [
                torch.ops.trifuse.pack_linear(torch.randn(s).to(dtype) / 8) for s in shapes
            ],
            "norms": [
                *[torch.ones(D).to(dtype), None] * 2,
                *[None] * 2,
                *[torch.ones(E).to(dtype), None] * 2,
            ],
            "eps": (1e-5, 1e-5, -1, 1e-5, 1e-5),
            "biases": [None] * 6,
            "norm_first": True,
            "rms_norm": True,
            "window_left": 5,
            "cos": torch.randn(1, length, E).to(dtype),
            "sin": torch.randn(1, length, E).to(dtype),
        }
    )
    found, threads = [], torch.get_num_threads()
    for n in (1, 2, 3):
        torch.set_num_threads(n)
        found.append(torch.ops.trifuse.encoder_layer(**given))
    torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_mask_of_more_keys_than_were_written():
    given = arguments() | cache(past=10)
    for name in ("key_cache", "value_cache"):
        given[name].normal_()
    mask = torch.rand(B, 1, L, 25) < 0.5
    mask[..., 0] = True
    out = torch.ops.trifuse.encoder_layer(**given | {"attn_mask": mask})
    changed = given | {name: given[name].clone() for name in ("key_cache", "value_cache")}
    assert torch.equal(torch.ops.trifuse.encoder_layer(**changed | {"attn_mask": mask}), out)
    changed["value_cache"][:, :, 24] += 1  # the mask has this key, and nothing is written there
    assert not torch.equal(torch.ops.trifuse.encoder_layer(**changed | {"attn_mask": mask}), out)
    short = mask[..., :20].contiguous()
    mask[..., 20:] = False
    out = torch.ops.trifuse.encoder_layer(**given | {"attn_mask": mask})
    assert torch.equal(torch.ops.trifuse.encoder_layer(**given | {"attn_mask": short}), out)


def test_rms_norm():
    """Its error is at most twice that of torch's float32 operations."""
    torch.manual_seed(0)
    given = arguments() | {"norms": [torch.randn(D), None, torch.randn(D), None]}
    given |= {"rms_norm": True, "norm_first": True}
    shapes = [(D, D)] * 4 + [(96, D), (D, 96)]
    unpack, F = torch.ops.trifuse.unpack_linear, nn.functional

    def layer(dtype: torch.dtype) -> Tensor:
        q, k, v, o, up, down = (
            (unpack(packed, *shape, torch.float32).to(dtype), bias.to(dtype))
            for packed, shape, bias in zip(given["weights"], shapes, given["biases"], strict=True)
        )
        x, first, second = (t.to(dtype) for t in (given["x"], given["norms"][0], given["norms"][2]))
        normed = F.rms_norm(x, (D,), first, 1e-5)
        heads = (
            F.linear(normed, *each).unflatten(-1, (4, 16)).transpose(1, 2) for each in (q, k, v)
        )
        attended = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(-2)
        hidden = x + F.linear(attended, *o)
        wide = F.gelu(F.linear(F.rms_norm(hidden, (D,), second, 1e-5), *up))
        return hidden + F.linear(wide, *down)

    exact = layer(torch.float64)
    ours = torch.ops.trifuse.encoder_layer(**given).double() - exact
    theirs = layer(torch.float32).double() - exact
    assert ours.abs().max() <= 2 * theirs.abs().max()
    assert ours.square().mean() <= 4 * theirs.square().mean()
