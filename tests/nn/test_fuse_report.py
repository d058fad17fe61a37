"""Reports of trifuse.fuse: plain data, copied with the model, that describes what runs."""

from __future__ import annotations

import copy
import io
import itertools
import pickle

import pytest
import torch
import transformers
from model_sizes import BERT_SIZES
from torch import nn

import trifuse
from trifuse.models.bert import BertConfig, BertModel
from trifuse.ops import _linear_choice


def transformer() -> nn.Module:
    return nn.Transformer(16, 4, 1, 1, 24, batch_first=True)


def recurrent() -> nn.Module:
    return nn.ModuleDict({"lstm": nn.LSTM(4, 4), "gru": nn.GRUCell(4, 4), "drop": nn.Dropout(0.5)})


def our_bert() -> nn.Module:
    return BertModel(BertConfig(**BERT_SIZES))


def their_bert() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**BERT_SIZES))


MODELS = [transformer, recurrent, our_bert, their_bert]


def state(model: nn.Module) -> list[object]:
    """Each module's class, plain attributes, and attention implementation in transformers."""
    return [
        (
            type(module),
            {k: v for k, v in vars(module).items() if isinstance(v, (bool, int, float, str))},
            getattr(getattr(module, "config", None), "_attn_implementation", None),
        )
        for module in model.modules()
    ]


def pickled(pair: tuple[object, object]) -> tuple[object, object]:
    return pickle.loads(pickle.dumps(pair))


def saved(pair: tuple[object, object]) -> tuple[object, object]:
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("report_first", [False, True])
@pytest.mark.parametrize("copying", [copy.deepcopy, pickled, saved])
@pytest.mark.parametrize("make", MODELS)
def test_copied_with_its_model(make, copying, report_first):
    """The copy of the report reverts the copy of the model, and nothing else."""
    model = make()
    before = state(model)
    report = trifuse.fuse(model, unpad=True)
    fused = state(model)
    assert fused != before
    order = -1 if report_first else 1
    twin, again = copying((model, report)[::order])[::order]
    assert state(twin) == fused
    assert str(again) == str(report)
    again.revert()
    assert state(twin) == before
    assert state(model) == fused
    report.revert()
    assert state(model) == before


@pytest.mark.parametrize("make", MODELS)
def test_copied_alone(make):
    model = make()
    report = trifuse.fuse(model)
    fused = state(model)
    again = copy.deepcopy(report)
    assert (again.swapped, again.left) == (report.swapped, report.left)
    again.revert()
    assert state(model) == fused


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("make", MODELS)
def test_reverted_in_any_order(make, order):
    """Reports of a part, of the whole, and of a second fuse with unpad=True."""
    model = nn.ModuleDict({"part": make(), "other": make()})
    before = state(model)
    reports = [trifuse.fuse(model["part"]), trifuse.fuse(model), trifuse.fuse(model, unpad=True)]
    for k in order:
        reports[k].revert()
    assert state(model) == before
    assert trifuse.fuse(model, unpad=True).swapped


def test_nested_models_of_transformers_in_any_order():
    """Each report swaps the configuration of the inner model for a copy of its own."""
    for order in itertools.permutations(range(2)):
        model = transformers.BertForMaskedLM(transformers.BertConfig(**BERT_SIZES))
        reports = [trifuse.fuse(model.bert), trifuse.fuse(model)]
        for k in order:
            reports[k].revert()
        assert model.config._attn_implementation == "sdpa"
        assert model.bert.config._attn_implementation == "sdpa"
        assert all(
            module.config._attn_implementation == "sdpa"
            for module in model.modules()
            if hasattr(module, "config")
        )


@pytest.mark.parametrize("options", [{}, {"unpad": True}, {"freeze": True}], ids=str)
@pytest.mark.parametrize("make", [transformer, our_bert, their_bert])
def test_an_error_changes_nothing(monkeypatch, make, options):
    monkeypatch.setattr(_linear_choice, "_made", {})
    monkeypatch.setenv("TRIFUSE_LINEAR", "mkl")
    model = make()
    before, configuration = state(model), getattr(model, "config", None)
    with pytest.raises(ValueError, match="TRIFUSE_LINEAR"):
        trifuse.fuse(model, **options)
    assert state(model) == before
    assert getattr(model, "config", None) is configuration


def test_attention_with_weights():
    """MultiheadAttention returns weights by default, and no operator of ours does."""
    attention = nn.MultiheadAttention(16, 4)
    report = trifuse.fuse(attention)
    assert report.notes == [("", "by softmax where weights are asked for, torch's default")]
    assert "trifuse.nn.MultiheadAttention; by softmax where weights" in str(report)
    assert not trifuse.fuse(transformer()).notes  # these layers never request weights


@pytest.mark.parametrize("family", ["DebertaV2", "Roberta", "MPNet"])
def test_a_module_that_several_recipes_change_is_one_row(family):
    config = getattr(transformers, f"{family}Config")(**BERT_SIZES, relative_attention=True)
    model = getattr(transformers, f"{family}Model")(config)
    report = trifuse.fuse(model, unpad=True)
    paths = [swapped.path for swapped in report.swapped if swapped.path]
    assert len(paths) == len(set(paths))
    rows = {swapped.path: (swapped.before, swapped.after) for swapped in report.swapped}
    source = f"transformers.models.{family.lower()}.modeling_{family.lower()}.{family}Encoder"
    if family == "DebertaV2":
        source = source.replace("debertav2", "deberta_v2")
        _, attention = rows["encoder.layer.0.attention.self"]
        assert attention == "trifuse.recipes.DisentangledSelfAttention, which takes packed tokens"
    assert rows["encoder"] == (source, f"trifuse.recipes.{family}Encoder, without padding")
    report.revert()
    assert not any(type(each).__module__.startswith("trifuse") for each in model.modules())


def test_ends_that_stay_apart():
    model = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)
    model.norm2 = nn.Identity()
    report = trifuse.fuse(model)
    assert report.notes == [("", "dropout, sum and norm one by one")]


@pytest.mark.parametrize("options", [{"p": 0.5, "inplace": True}, {"p": 1.0}, {"p": 0.0}])
def test_dropouts_that_would_run_as_torchs(options):
    assert not trifuse.fuse(nn.Dropout(**options)).swapped


def sam() -> nn.Module:
    vision = transformers.SamVisionConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
        output_channels=16,
        mlp_dim=16,
        global_attn_indexes=[0],
        num_pos_feats=8,
    )
    prompt = transformers.SamPromptEncoderConfig(
        hidden_size=16, image_size=32, patch_size=8, image_embedding_size=4
    )
    decoder = transformers.SamMaskDecoderConfig(
        hidden_size=16,
        mlp_dim=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        iou_head_hidden_dim=16,
    )
    return transformers.SamModel(
        transformers.SamConfig(
            vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder
        )
    ).eval()


def test_sam():
    """The vision tower fixes its attention class when built; the decoder selects one per call."""
    torch.manual_seed(0)
    model = sam()
    images, points = torch.randn(1, 3, 32, 32), torch.tensor([[[[4.0, 4.0]]]])
    with torch.no_grad():
        wanted = model(pixel_values=images, input_points=points).pred_masks
        report = trifuse.fuse(model)
        got = model(pixel_values=images, input_points=points).pred_masks
    torch.testing.assert_close(got, wanted)
    own = [(left.path, left.module) for left in report.left]
    if "" in [swapped.path for swapped in report.swapped]:
        assert own == []  # its table of classes has ours
        said = {row.path: row.runs for row in trifuse.explain(model).modules}
        assert said["vision_encoder.layers.0.attn"] == "fused"
    else:
        assert ("", "SamModel") in own


def test_detr():
    """The convolutional backbone is also a transformers model, but has no attention to select."""
    torch.manual_seed(0)
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], out_features=["stage2"]
    )
    config = transformers.DetrConfig(
        backbone_config=backbone,
        use_timm_backbone=False,
        backbone=None,
        use_pretrained_backbone=False,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        num_queries=4,
    )
    model = transformers.DetrModel(config).eval()
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        wanted = model(images).last_hidden_state
        report = trifuse.fuse(model)
        got = model(images).last_hidden_state
    assert not report.left
    assert report.swapped[0].path == ""
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
