"""trifuse.fuse: what it swaps, and what it must leave unchanged."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from model_sizes import BERT_SIZES
from onnx_runs import run_as_onnx
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import trifuse
from trifuse.models.bert import BertConfig, BertForPreTraining, BertModel, SoftmaxAttention


def bert(model: type = BertModel) -> nn.Module:
    torch.manual_seed(0)
    return model(BertConfig(**BERT_SIZES)).double().eval()


def transformer(batch_first: bool = True) -> nn.Transformer:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "enable_nested_tensor is True")
        return nn.Transformer(
            16, 4, 2, 2, 24, 0.0, batch_first=batch_first, dtype=torch.float64
        ).eval()


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(1, 97, (3, 11), generator=torch.Generator().manual_seed(1))
    return ids, torch.arange(11) < torch.tensor([11, 6, 1])[:, None]


def but_for_dropout(report: trifuse.FuseReport) -> list[Any]:
    """Returns the swaps without those of dropouts, which are many."""
    return [swapped for swapped in report.swapped if swapped.after != "trifuse.nn.Dropout"]


def snapshot(model: nn.Module) -> dict[str, object]:
    """The state that neither fuse nor revert may change."""
    return {
        "modules": {name: id(module) for name, module in model.named_modules()},
        "parameters": {
            name: id(parameter)
            for name, parameter in model.named_parameters(remove_duplicate=False)
        },
        "state_dict": [(name, x.data_ptr()) for name, x in model.state_dict().items()],
        "training": [module.training for module in model.modules()],
    }


def types(model: nn.Module) -> list[tuple[type, dict[str, object]]]:
    """Classes and plain attributes, which fuse changes and revert restores."""
    plain = (bool, int, float, str)
    return [
        (type(m), {name: value for name, value in vars(m).items() if isinstance(value, plain)})
        for m in model.modules()
    ]


@pytest.mark.parametrize("unpad", [False, True])
def test_bert(unpad, calls):
    model = bert(BertForPreTraining)
    ids, mask = batch()
    wanted = model(ids, mask)
    kept, before = snapshot(model), types(model)

    report = trifuse.fuse(model, unpad=unpad)
    assert snapshot(model) == kept
    parts = ("attention.self.attention", "attention.output", "intermediate", "output")
    assert [swapped.path for swapped in but_for_dropout(report)] == [
        *(["bert"] if unpad else []),
        "bert.embeddings",
        *(["bert.encoder"] if unpad else []),
        *(f"bert.encoder.layer.{i}.{part}" for i in range(2) for part in parts),
    ]
    assert not report.left
    got = model(ids, mask)
    assert len(calls) == 2
    torch.testing.assert_close(got[0][mask], wanted[0][mask])
    torch.testing.assert_close(got[1], wanted[1])
    tied = model.cls.predictions.decoder.weight
    assert tied is model.bert.embeddings.word_embeddings.weight

    report.revert()
    assert snapshot(model) == kept
    assert types(model) == before
    assert all(map(torch.equal, model(ids, mask), wanted))
    assert len(calls) == 2


@pytest.mark.parametrize("unpad", [False, True])
def test_gradients_are_the_same(unpad):
    ids, mask = batch()
    plain, fused = bert(), bert()
    trifuse.fuse(fused, unpad=unpad)
    for model in (plain, fused):
        model.train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if hasattr(module, "dropout_p"):
                module.dropout_p = 0.0
        model(ids, mask).last_hidden_state[mask].square().sum().backward()
    for mine, their in zip(fused.parameters(), plain.parameters(), strict=True):
        if their.grad is None:
            assert mine.grad is None
        else:
            torch.testing.assert_close(mine.grad, their.grad)


def test_training_flag_and_dropout_rate_are_kept():
    model = bert().train()
    trifuse.fuse(model)
    swapped = model.encoder.layer[0].attention.self.attention
    assert swapped.training
    assert swapped.dropout_p == 0.1
    ids, _ = batch()
    assert not torch.equal(model(ids)[0], model(ids)[0])
    model.eval()
    assert torch.equal(model(ids)[0], model(ids)[0])


def test_unpad_can_be_added():
    """fuse(unpad=True) works after fuse, and reverts alone."""
    model = nn.ModuleDict({"bert": bert(), "encoder": transformer().encoder})
    first = trifuse.fuse(model)
    before = types(model)
    second = trifuse.fuse(model, unpad=True)
    assert [(swapped.path, swapped.after) for swapped in second.swapped] == [
        ("bert", "trifuse.nn.BertModel"),
        ("bert.encoder", "trifuse.nn.BertEncoder"),
        ("encoder", "the same, without padding"),
    ]
    assert not trifuse.fuse(model, unpad=True).swapped
    second.revert()
    assert types(model) == before
    first.revert()
    assert types(model["encoder"]) == types(transformer().encoder)


def test_sublayer_ends_that_are_watched_run_as_they_are():
    model = bert()
    trifuse.fuse(model)
    ids, mask = batch()
    wanted = model(ids, mask)
    seen = []
    for name in ("LayerNorm", "dropout"):
        part = model.encoder.layer[0].output.get_submodule(name)
        part.register_forward_hook(lambda module, *_: seen.append(type(module)))
    torch.testing.assert_close(model(ids, mask), wanted)
    assert seen == [trifuse.nn.Dropout, nn.LayerNorm]


def test_twice_is_once():
    model = transformer()
    first = trifuse.fuse(model)
    after = types(model)
    second = trifuse.fuse(model)
    assert first.swapped
    assert not second.swapped
    assert not second.left
    second.revert()
    assert types(model) == after
    first.revert()
    assert types(model) == types(transformer())
    first.revert()
    assert types(model) == types(transformer())
    third = trifuse.fuse(model)
    assert third.swapped == first.swapped


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_transformer(training, batch_first, calls):
    """Unfused, the encoder of nn.Transformer uses NestedTensors and a kernel of torch's."""
    model = transformer(batch_first).train(training)
    torch.manual_seed(1)
    source, target = torch.randn(3, 7, 16).double(), torch.randn(3, 5, 16).double()
    if not batch_first:
        source, target = source.transpose(0, 1), target.transpose(0, 1)
    padding = torch.arange(7) >= torch.tensor([7, 4, 2])[:, None]
    arguments = {
        "tgt_mask": torch.ones(5, 5, dtype=torch.bool).triu(1),
        "src_key_padding_mask": padding,
        "memory_key_padding_mask": padding,
    }
    kept, before = snapshot(model), types(model)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
        wanted = model(source, target, **arguments)
        report = trifuse.fuse(model)
        got = model(source, target, **arguments)
    assert len(calls) == 6  # two encoder layers, two decoder layers that attend twice
    assert snapshot(model) == kept
    torch.testing.assert_close(got, wanted)
    assert {swapped.after for swapped in report.swapped} == {
        "trifuse.nn.MultiheadAttention",
        "trifuse.nn.TransformerDecoder",
        "trifuse.nn.TransformerDecoderLayer",
        "trifuse.nn.TransformerEncoder",
        "trifuse.nn.TransformerEncoderLayer",
    }
    report.revert()
    assert types(model) == before
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
        assert torch.equal(model(source, target, **arguments), wanted)
    assert len(calls) == 6


def test_a_lone_module(calls):
    attention = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    report = trifuse.fuse(attention)
    assert type(attention) is trifuse.nn.MultiheadAttention
    x = torch.randn(2, 5, 16)
    attention(x, x, x, need_weights=False)
    assert len(calls) == 1
    report.revert()
    assert type(attention) is nn.MultiheadAttention
    attention(x, x, x, need_weights=False)
    assert len(calls) == 1


def test_hooks_stay():
    model = bert()
    module = model.encoder.layer[1].attention.self.attention
    seen = []
    module.register_forward_pre_hook(lambda module, args: seen.append("before"))
    module.register_forward_hook(lambda module, args, output: seen.append("after"))
    module.register_full_backward_hook(lambda module, *gradients: seen.append("backward"))
    report = trifuse.fuse(model)
    ids, mask = batch()
    model(ids, mask).last_hidden_state.sum().backward()
    assert seen == ["before", "after", "backward"]
    report.revert()
    model(ids, mask).last_hidden_state.sum().backward()
    assert seen == ["before", "after", "backward"] * 2


def test_a_module_used_twice_is_swapped_once():
    shared = nn.MultiheadAttention(16, 4)
    model = nn.ModuleDict({"a": shared, "b": shared})
    assert [swapped.path for swapped in trifuse.fuse(model).swapped] == ["a"]
    assert type(model["b"]) is trifuse.nn.MultiheadAttention


def test_copies_and_state_dicts():
    model = transformer()
    trifuse.fuse(model)
    fresh = transformer()
    fresh.load_state_dict(model.state_dict(), strict=True)
    twin = copy.deepcopy(model)
    x = torch.randn(2, 5, 16).double()
    torch.testing.assert_close(twin(x, x), model(x, x))
    assert type(twin.encoder) is trifuse.nn.TransformerEncoder
    assert not trifuse.fuse(twin).swapped


class Attention(nn.MultiheadAttention):
    """A user's subclass."""


class Layer(nn.TransformerEncoderLayer):
    """A user's subclass, which requires a floating-point mask."""

    def forward(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False):
        assert src_key_padding_mask.is_floating_point()
        return super().forward(src, src_mask, src_key_padding_mask, is_causal)


def test_what_is_not_known_is_left_and_reported():
    replaced = nn.MultiheadAttention(16, 4)
    replaced.forward = replaced.forward
    model = nn.ModuleDict({"own": Attention(16, 4), "replaced": replaced, "norm": nn.LayerNorm(4)})
    report = trifuse.fuse(model)
    assert not report.swapped
    assert [(left.path, left.module) for left in report.left] == [
        ("own", "Attention"),
        ("replaced", "MultiheadAttention"),
    ]
    text = str(report)
    assert "0 swapped, 2 left" in text
    assert "a subclass of MultiheadAttention" in text
    assert "its forward was replaced on the instance" in text


@pytest.mark.parametrize("own_encoder", [True, False])
def test_encoders_with_unknown_parts_still_run(own_encoder, calls):
    """Their attention is fused, so their encoder must no longer make NestedTensors."""

    class Encoder(nn.TransformerEncoder):
        pass

    torch.manual_seed(0)
    layer = (nn.TransformerEncoderLayer if own_encoder else Layer)(
        16, 4, 24, 0.0, batch_first=True, dtype=torch.float64
    )
    model = (Encoder if own_encoder else nn.TransformerEncoder)(layer, 2).eval()
    x = torch.randn(3, 7, 16).double()
    padding = torch.arange(7) >= torch.tensor([7, 4, 2])[:, None]
    wanted = model(x, src_key_padding_mask=padding)
    before = types(model)
    report = trifuse.fuse(model)
    assert report.swapped[0] == ("", report.swapped[0].before, "the same, without NestedTensors")
    with torch.no_grad():
        got = model(x, src_key_padding_mask=padding)
    assert len(calls) == 2
    torch.testing.assert_close(got, wanted)
    report.revert()
    assert types(model) == before


def test_revert_leaves_later_changes_alone():
    attention = nn.MultiheadAttention(16, 4)
    report = trifuse.fuse(attention)
    attention.__class__ = Attention
    report.revert()
    assert type(attention) is Attention


@pytest.mark.usefixtures("torch_multiplies")
def test_report_reads_well():
    model = nn.ModuleDict({"x": SoftmaxAttention(), "longer": nn.MultiheadAttention(16, 4)})
    assert str(trifuse.fuse(model)).splitlines() == [
        "2 swapped, 0 left",
        "  x       trifuse.models.bert.SoftmaxAttention  trifuse.nn.SoftmaxAttention",
        "  longer  torch.nn.MultiheadAttention           trifuse.nn.MultiheadAttention; by softmax "
        "where weights are asked for, torch's default",
    ]
    assert str(trifuse.fuse(nn.Identity())) == "0 swapped, 0 left"
    assert str(trifuse.fuse(nn.Linear(2, 2))) == (
        "0 swapped, 0 left\n  linear layers: torch; TRIFUSE_LINEAR=torch"
    )
    lone = trifuse.fuse(nn.MultiheadAttention(16, 4))
    assert "(the model)  torch.nn.MultiheadAttention" in str(lone)


def test_only_modules():
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module; got dict"):
        trifuse.fuse({})


def test_dropout():
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.0), nn.Dropout1d(0.5))
    report = trifuse.fuse(model)
    assert [(s.path, s.after) for s in report.swapped] == [("0", "trifuse.nn.Dropout")]
    x = torch.ones(64, 64)
    out = model[0](x)
    assert set(out.unique().tolist()) == {0.0, 2.0}
    assert 0.45 < (out == 0).float().mean() < 0.55
    model.eval()
    assert model[0](x) is x
    report.revert()
    assert type(model[0]) is nn.Dropout


# ONNX -------------------------------------------------------------------------------------------


def encoder_layer() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 24, 0.0, batch_first=True).eval()
    return layer, (torch.randn(2, 5, 16),)


def small_bert() -> tuple[nn.Module, tuple[Tensor, ...]]:
    ids, mask = batch()
    return bert().float(), (ids, mask.long())


@pytest.mark.parametrize(
    ("make", "backend"), [(encoder_layer, "auto"), (encoder_layer, "eager"), (small_bert, "auto")]
)
def test_a_fused_model_runs_as_an_onnx_program(make, backend):
    model, inputs = make()
    expected = [t for t in tree_leaves(model(*inputs)) if isinstance(t, Tensor)]
    assert trifuse.fuse(model).swapped
    with trifuse.backend(backend):
        found = run_as_onnx(model, *inputs)
    real = inputs[1].bool() if len(inputs) > 1 else ...
    for actual, wanted in zip(found, expected, strict=True):
        rows = real if wanted.dim() == 3 else ...
        torch.testing.assert_close(actual[rows], wanted[rows].detach(), rtol=1e-4, atol=1e-5)
