"""Encoders of transformers without their padding, found by their code."""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import importlib.util
import inspect
import pickle
import sys
from typing import Any

import pytest
import torch
from model_sizes import (
    DISENTANGLED,
    DISTILBERT_SIZES,
    GROUPED_QUERIES,
    PADDED_SIZES,
    SPECIAL_TOKENS,
    T5_SIZES,
    TRANSLATION_SIZES,
    VIT_SIZES,
)
from torch import Tensor, nn

import trifuse
from trifuse.nn import packing
from trifuse.recipes import packed_models, passes, stacks, sublayers, tokenwise

transformers = pytest.importorskip("transformers")

import families  # noqa: E402
import transformers_versions  # noqa: E402

pytestmark = pytest.mark.usefixtures("torch_multiplies")

B, L, LAYERS = 3, 10, 2
EMBEDDED = PADDED_SIZES | {"embedding_size": 32}

ROTARY_ESM = {"mask_token_id": 4, "position_embedding_type": "rotary", "token_dropout": True}

ONE_PROJECTION = {"share_att_key": True, "norm_rel_ebd": "layer_norm"}

LANGUAGES = {"languages": ["en_XX", "de_DE"], "default_language": "de_DE"}

# By model: its configuration, and what leaves padding out.
FAMILIES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "Roberta": (PADDED_SIZES, ["", "encoder"]),
    "XLMRoberta": (PADDED_SIZES, ["", "encoder"]),
    "Camembert": (PADDED_SIZES, ["", "encoder"]),
    "Electra": (EMBEDDED | {"embedding_size": 16}, ["encoder"]),
    "Ernie": (PADDED_SIZES, ["encoder"]),
    "Data2VecText": (PADDED_SIZES, ["", "encoder"]),
    "RobertaPreLayerNorm": (PADDED_SIZES, ["encoder"]),
    "LayoutLM": (PADDED_SIZES, ["encoder"]),  # its own mask, 0 and the least number
    "DistilBert": (DISTILBERT_SIZES, ["transformer"]),
    "Albert": (EMBEDDED, ["encoder", "encoder.albert_layer_groups.0"]),
    "MobileBert": (EMBEDDED | {"intra_bottleneck_size": 32}, ["encoder"]),
    "ModernBert": (
        PADDED_SIZES | SPECIAL_TOKENS | {"local_attention": 4},
        [""],
    ),  # layer 1 has a window
    "NomicBert": (PADDED_SIZES, [""]),
    "EuroBert": (PADDED_SIZES | GROUPED_QUERIES | SPECIAL_TOKENS, [""]),
    "Bart": (TRANSLATION_SIZES, ["encoder", "decoder"]),
    "Esm": (PADDED_SIZES | {"mask_token_id": 4}, ["encoder"]),
    "Esm rotary": (PADDED_SIZES | ROTARY_ESM, ["encoder"]),
    "T5Encoder": (T5_SIZES, ["encoder"]),
    "MPNet": (PADDED_SIZES, ["encoder"]),  # its attention is written out
    "Tapas": (PADDED_SIZES, ["encoder"]),
    "VisualBert": (PADDED_SIZES, ["encoder"]),
    "RemBert": (PADDED_SIZES | {"input_embedding_size": 16}, ["encoder"]),
    "MegatronBert": (PADDED_SIZES, ["encoder"]),
    "RoFormer": (EMBEDDED, ["encoder"]),
    "Xmod": (PADDED_SIZES | LANGUAGES, ["encoder"]),
    "RoFormer values": (EMBEDDED | {"rotary_value": True}, ["encoder"]),
    "DebertaV2": (PADDED_SIZES | DISENTANGLED, ["encoder"]),
    "DebertaV2 shared": (PADDED_SIZES | DISENTANGLED | ONE_PROJECTION, ["encoder"]),
    "DebertaV2 convolution": (PADDED_SIZES | DISENTANGLED | {"conv_kernel_size": 3}, ["encoder"]),
    "DebertaV2 without positions": (PADDED_SIZES, ["encoder"]),
    "Lilt": (PADDED_SIZES | {"hidden_size": 48}, ["encoder"]),
}
ATTENTIONS = {"Lilt": 2}  # of each layer, if not one: those of the texts and of their layout
LENGTHS = torch.tensor([L, 6, 3])[:, None]
RIGHT = torch.arange(L) < LENGTHS
MASKS = {"padded right": RIGHT, "padded left": RIGHT.flip(1)}


def build(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes, family = FAMILIES[name][0], name.split()[0]
    config = getattr(transformers, f"{family.removesuffix('Encoder')}Config")(**sizes, **options)
    return getattr(transformers, f"{family}Model")(config).eval()


def run(model: nn.Module, keep: Tensor, **options: Any) -> Any:
    ids = torch.randint(5, 97, (B, L), generator=torch.Generator().manual_seed(1))
    encoder = model.encoder if hasattr(model, "decoder") else model
    if hasattr(model, "layout_embeddings"):
        corners = torch.randint(0, 1000, (B, L, 2, 2), generator=torch.Generator().manual_seed(3))
        options["bbox"] = corners.sort(2).values.flatten(2)
    return encoder(input_ids=ids, attention_mask=keep.long(), **options)


def gradients(model: nn.Module, keep: Tensor) -> Tensor:
    """Gradients by the real tokens; weighted, since a norm's sum has almost no gradient."""
    model.zero_grad()
    out = run(model, keep)[0][keep]
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return grads / grads.abs().max()


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=5e-6)


@pytest.fixture
def packed(monkeypatch) -> list[tuple[int, int | None]]:
    """The tokens and the window of each attention that ran packed."""
    seen: list[tuple[int, int | None]] = []
    attend = packing.attend

    def spy(query, key, value, where, *args, **kwargs):
        seen.append((query.shape[2], where.window))
        return attend(query, key, value, where, *args, **kwargs)

    monkeypatch.setattr(packing, "attend", spy)
    return seen


@pytest.mark.parametrize("name", FAMILIES)
def test_family(name, packed, warned):
    """Results, gradients, reports, copies and the way back."""
    model, (_, unpadded), attentions = build(name), FAMILIES[name], LAYERS * ATTENTIONS.get(name, 1)
    classes = [type(module) for module in model.modules()]
    wanted = {kind: (run(model, keep)[0], gradients(model, keep)) for kind, keep in MASKS.items()}
    report = trifuse.fuse(model, unpad=True)
    assert report.unpadded == trifuse.explain(model).unpadded == unpadded
    assert not report.padded
    for kind, keep in MASKS.items():
        packed.clear()
        out = run(model, keep)[0]
        assert [tokens for tokens, _ in packed] == [int(keep.sum())] * attentions
        assert out[~keep].eq(0).all()
        close(out[keep], wanted[kind][0][keep])
        close(gradients(model, keep), wanted[kind][1])
    assert not trifuse.fuse(model, unpad=True).swapped
    assert not warned
    packed.clear()
    run(model, torch.ones_like(RIGHT))
    assert not packed  # nothing is padded

    twin, its_report = pickle.loads(pickle.dumps((model, report)))
    for each, its in ((twin, its_report), copy.deepcopy((model, report)), (model, report)):
        packed.clear()
        close(run(each, RIGHT)[0][RIGHT], wanted["padded right"][0][RIGHT])
        assert len(packed) == attentions
        its.revert()
        assert [type(module) for module in each.modules()] == classes
        assert torch.equal(run(each, RIGHT)[0], wanted["padded right"][0])


LAYER = transformers.models.modernbert.modeling_modernbert.ModernBertEncoderLayer
GIVES_BOTH_MASKS = "sliding_window_mask" in inspect.signature(LAYER.forward).parameters


def test_windows(packed, warned):
    model = build("ModernBert")
    holes = RIGHT & (torch.arange(L) != 1)
    wanted = {True: run(model, RIGHT)[0], False: run(model, holes)[0]}
    trifuse.fuse(model, unpad=True)
    close(run(model, RIGHT)[0][RIGHT], wanted[True][RIGHT])
    assert packed == [(int(RIGHT.sum()), None), (int(RIGHT.sum()), 2)]
    packed.clear()
    close(run(model, holes)[0][holes], wanted[False][holes])
    # The first layer has no window. In 4.57 it gets the window's mask too.
    assert packed == ([] if GIVES_BOTH_MASKS else [(int(holes.sum()), None)])
    (said,) = warned
    assert said.endswith("its window reaches over padding inside a sequence")


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_window_in_a_mask_of_all_pairs(dtype):
    """It is found by its values, all of which must be those of a window."""
    places = torch.arange(L)
    sees = ((places[:, None] - places).abs() <= 2) & RIGHT[:, None]

    def seen(sees: Tensor) -> Any:
        mask = sees[:, None]
        if dtype != torch.bool:
            mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(dtype).min)
        return passes._seen(mask, torch.Size((B, L, 32)))

    found = seen(sees)
    assert torch.equal(found.keep, RIGHT)
    assert (found.causal, found.reach) == (False, 2)
    for row, column in ((0, 5), (4, 3), (5, 5)):
        other = sees.clone()
        other[0, row, column] ^= True
        assert seen(other) is None


def test_rotations_that_depend_on_the_batch(packed):
    model = build("ModernBert")
    rotary = getattr(model.layers[0].attn, "rotary_emb", None)
    if rotary is None:
        pytest.skip("the model makes the rotations of all layers")
    rotary.rope_type = "dynamic"
    (padded,) = trifuse.fuse(model, unpad=True).padded
    assert padded.reason.endswith("finds its frequencies by the largest position of the batch")
    run(model, RIGHT)
    assert not packed


def test_unpad_can_be_added(packed):
    model = build("Roberta")
    first = trifuse.fuse(model)
    wanted = run(model, RIGHT)[0]
    assert not packed
    second = trifuse.fuse(model, unpad=True)
    assert [swapped.path for swapped in second.swapped] == ["encoder", ""]
    close(run(model, RIGHT)[0][RIGHT], wanted[RIGHT])
    assert len(packed) == LAYERS
    second.revert()
    assert torch.equal(run(model, RIGHT)[0], wanted)
    first.revert()


TRAINED = ["DistilBert", "ModernBert", "Bart", "MegatronBert", "RoFormer", "DebertaV2", "Lilt"]


@pytest.mark.parametrize("name", TRAINED)
def test_training(name, packed):
    """Dropout depends on the seed alone; checkpointing changes no gradient."""
    model = build(name).train()
    trifuse.fuse(model, unpad=True)
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(gradients(model, RIGHT))
    assert torch.equal(draws[0], draws[1])
    if name != "ModernBert":  # which drops nothing by default
        assert not torch.equal(draws[0], draws[2])
    model.gradient_checkpointing_enable({"use_reentrant": False})
    packed.clear()
    torch.manual_seed(1)
    close(gradients(model, RIGHT), draws[0])
    attentions = LAYERS * ATTENTIONS.get(name, 1)
    assert len(packed) == 2 * attentions  # once more in the backward


def test_layers_dropped_in_training(packed):
    model = build("Bart", encoder_layerdrop=0.5, dropout=0.0).train()
    trifuse.fuse(model, unpad=True)
    counts = set()
    for seed in range(8):
        torch.manual_seed(seed)
        packed.clear()
        run(model, RIGHT)
        counts.add(len(packed))
    assert counts == {0, 1, 2}


OTHER_CODE_IN_4 = (
    "Data2VecText",
    "Esm rotary",
    "EuroBert",
    "Lilt",
    "MobileBert",
    "NomicBert",
    "Xmod",
)


@pytest.mark.parametrize("name", FAMILIES)
def test_stays_on_with_adapters_hidden_states_and_checkpoints(name, packed, warned):
    """Each on the model that has what came before it, too."""
    peft = pytest.importorskip("peft")
    if transformers_versions.is_4() and name in OTHER_CODE_IN_4:
        pytest.skip("4.57 lacks the model, or its code isn't known to keep tokens apart")
    linear = [n for n, each in build(name).named_modules() if type(each) is nn.Linear]
    half = linear[: len(linear) // 2]  # in one of the layers
    options = peft.LoraConfig(target_modules=half, r=2, lora_dropout=0.0)
    model = peft.get_peft_model(build(name), options).eval()
    generator = torch.Generator().manual_seed(4)
    for path, weight in model.named_parameters():
        if "lora_B" in path:  # zeros at first
            weight.data.normal_(std=0.1, generator=generator)
    inner = model.get_base_model()
    wanted = gradients(inner, RIGHT)
    trifuse.fuse(model, unpad=True)
    run(inner, RIGHT, output_hidden_states=True)
    warned.clear()  # whether it packs depends on who records the states
    packed.clear()
    close(gradients(inner, RIGHT), wanted)
    attentions = LAYERS * ATTENTIONS.get(name, 1)
    assert len(packed) == attentions
    if not inner.supports_gradient_checkpointing:
        return
    families.drop_nothing(model)
    inner.train()
    inner.gradient_checkpointing_enable({"use_reentrant": False})
    packed.clear()
    close(gradients(inner, RIGHT), wanted)
    assert len(packed) == 2 * attentions  # once more in the backward
    assert not warned


@pytest.mark.parametrize("name", ["Roberta", "ModernBert", "Bart"])
def test_hidden_states(name, packed, warned):
    model = build(name)
    wanted = run(model, RIGHT, output_hidden_states=True).hidden_states
    trifuse.fuse(model, unpad=True)
    run(model, RIGHT)
    assert len(packed) == LAYERS
    packed.clear()
    got = run(model, RIGHT, output_hidden_states=True).hidden_states
    assert not packed
    assert "a hook that records its output" in warned[0]
    assert len(got) == len(wanted)
    for mine, theirs in zip(got, wanted, strict=True):
        close(mine[RIGHT], theirs[RIGHT])
    run(model, RIGHT)
    assert len(packed) == LAYERS  # the hooks that stay record nothing


KEEPING = ["DebertaV2", "DebertaV2 convolution", "Lilt", "Tapas"]
if int(transformers.__version__.split(".")[0]) < 5:  # which keeps them by hooks
    KEEPING += ["Roberta", "Bart"]


@pytest.mark.parametrize("name", KEEPING)
def test_hidden_states_that_the_code_keeps(name, packed, warned):
    """They are unpacked one by one; DeBERTa's encoder keeps them in all of its calls."""
    model = build(name)
    wanted = run(model, RIGHT, output_hidden_states=True)
    trifuse.fuse(model, unpad=True)
    got = run(model, RIGHT, output_hidden_states=True)
    assert len(packed) == LAYERS * ATTENTIONS.get(name, 1)
    assert len(got.hidden_states) == len(wanted.hidden_states) == LAYERS + 1
    for mine, theirs in zip(got.hidden_states, wanted.hidden_states, strict=True):
        close(mine[RIGHT], theirs[RIGHT])
    assert not warned


@pytest.mark.parametrize("name", ["DebertaV2", "Lilt", "Tapas"])
def test_attention_weights_that_the_code_keeps(name, packed, warned):
    model = build(name)
    trifuse.fuse(model, unpad=True)
    weights = run(model, RIGHT, output_attentions=True).attentions
    assert not packed
    assert len(weights) == LAYERS
    (said,) = warned
    assert said.endswith("because the weights of its attention are requested")


def test_an_unknown_module_between_layers(packed):
    model = build("DebertaV2 convolution")
    model.encoder.conv = type("Other", (nn.Module,), {"forward": lambda self, x, y, mask: x + y})()
    report = trifuse.fuse(model, unpad=True)
    (padded,) = report.padded
    assert padded.reason == "its code uses the hidden states between its layers"
    run(model, RIGHT)
    assert not packed


def doubled(function: Any) -> Any:
    """A function in whose place another is put, which passes for it and returns twice as much."""

    @functools.wraps(function)
    def double(*args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        if isinstance(out, transformers.utils.ModelOutput):
            return type(out)(out[0] * 2)
        return (out[0] * 2, *out[1:]) if isinstance(out, tuple) else out * 2

    return double


def replace_in_class(attention: Any, name: str, patch: pytest.MonkeyPatch) -> None:
    cls = sublayers.original(type(attention))
    patch.setattr(cls, name, doubled(getattr(cls, name)))


def replace_in_instance(attention: Any, name: str, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attention, name, doubled(getattr(attention, name)))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", ["forward", "transpose_for_scores"])
@pytest.mark.parametrize("replace", [replace_in_class, replace_in_instance])
def test_methods_replaced_in_disentangled_attention(packed, monkeypatch, replace, name, after):
    """They run, with the padding, whether they were replaced before or after fusing."""
    model, plain = build("DebertaV2"), build("DebertaV2")
    if after:
        trifuse.fuse(model, unpad=True)
        run(model, RIGHT)
        packed.clear()
    before = run(plain, RIGHT)[0]
    for each in (model, plain) if replace is replace_in_instance else (plain,):
        replace(each.encoder.layer[0].attention.self, name, monkeypatch)
    wanted = run(plain, RIGHT)[0]
    report = trifuse.fuse(model, unpad=True)
    close(run(model, RIGHT)[0][RIGHT], wanted[RIGHT])
    assert not torch.allclose(wanted[RIGHT], before[RIGHT], rtol=1e-2)
    assert not packed
    assert "encoder" not in report.unpadded
    (padded,) = report.padded
    assert "attention.self" in padded.reason
    monkeypatch.undo()


@pytest.mark.parametrize("unpad", [False, True])
@pytest.mark.parametrize("name", ["layer", "output", "attention", "encoder", "embeddings", "model"])
def test_methods_replaced_in_classes_that_were_read_before(packed, monkeypatch, name, unpad):
    model, plain = build("Roberta"), build("Roberta")
    trifuse.fuse(model, unpad=unpad)
    before = run(model, RIGHT)[0]
    modules = dict(plain.named_modules()) | dict(plain.encoder.layer[0].named_modules())
    modules |= {"layer": plain.encoder.layer[0], "model": plain}
    replace_in_class(modules[name], "forward", monkeypatch)
    wanted = run(plain, RIGHT)[0]
    assert not torch.allclose(before[RIGHT], wanted[RIGHT], rtol=1e-2)
    trifuse.fuse(plain, unpad=unpad)
    packed.clear()
    close(run(plain, RIGHT)[0][RIGHT], wanted[RIGHT])
    keeps_packing = unpad and name in ("embeddings", "model")
    assert len(packed) == (LAYERS if keeps_packing else 0)


def test_another_module_in_the_place_of_disentangled_attentions_dropout(packed, warned):
    model, plain = build("DebertaV2"), build("DebertaV2")
    trifuse.fuse(model, unpad=True)
    for each in (model, plain):
        each.encoder.layer[0].attention.self.dropout = nn.Identity()
    close(run(model, RIGHT)[0][RIGHT], run(plain, RIGHT)[0][RIGHT])
    assert not packed
    (said,) = warned
    assert "torch.nn.modules.linear.Identity for its weights" in said


def test_distances_over_padding_inside_a_sequence(packed, warned):
    """DeBERTa's distances are those of the padded sequence."""
    model = build("DebertaV2")
    holes = RIGHT & (torch.arange(L) != 1)
    wanted = run(model, holes)[0]
    trifuse.fuse(model, unpad=True)
    close(run(model, holes)[0][holes], wanted[holes])
    assert not packed
    (said,) = warned
    assert said.endswith("its layers make a bias that reaches over padding inside a sequence")


def test_distances_of_the_callers_own(packed, warned):
    model = build("DebertaV2")
    x, keep = torch.randn(B, L, 32), RIGHT.flip(1)
    ranks = torch.arange(L) ** 2
    buckets = (ranks[:, None] - ranks).clamp(-3, 3)[None]
    wanted = model.encoder(x, keep.long(), relative_pos=buckets)[0]
    trifuse.fuse(model, unpad=True)
    close(model.encoder(x, keep.long(), relative_pos=buckets)[0][keep], wanted[keep])
    assert not packed
    (said,) = warned
    assert said.endswith("its layers get relative_pos that aren't those of distances")
    queries = torch.randn(B, L, 32)
    model.encoder(x, keep.long(), query_states=queries)
    assert not packed
    assert warned[-1].endswith("its layers get query_states")


def test_what_a_layer_returns_is_unpacked_with_its_hidden_states(packed, monkeypatch):
    """LiLT's second layer gets two tensors of packed tokens, and can't have them."""
    model = build("Lilt")
    wanted = run(model, RIGHT)[0]
    trifuse.fuse(model, unpad=True)
    missing = passes.Pass._missing

    def refuse(self, layer, given):
        if layer is model.encoder.layer[1]:
            raise passes._Unpackable("it is the second")
        return missing(self, layer, given)

    monkeypatch.setattr(passes.Pass, "_missing", refuse)
    close(run(model, RIGHT)[0][RIGHT], wanted[RIGHT])
    assert len(packed) == ATTENTIONS["Lilt"]


LOOP = """
def forward(self, hidden_states, attention_mask, others):
    for layer in self.layers:
        {line}
    return {returned}
"""


@pytest.mark.parametrize(
    ("line", "returned", "why"),
    [
        ("hidden_states, others = layer(hidden_states, attention_mask)", "hidden_states", None),
        (
            "hidden_states, others = layer(hidden_states, attention_mask)",
            "hidden_states, others",
            "its code uses more of what its layers return than hidden states",
        ),
        (
            "hidden_states = self.mix(others, layer(hidden_states, attention_mask))",
            "hidden_states",
            "its code doesn't pass hidden states from layer to layer",
        ),
        (
            "out = layer(hidden_states, attention_mask); hidden_states = out[0]; others = out[1]",
            "others",
            "its code uses more of what its layers return than hidden states",
        ),
    ],
)
def test_loops(line, returned, why):
    tree = ast.parse(LOOP.format(line=line, returned=returned)).body[0]
    loop = stacks._find_loop(tree)
    assert getattr(loop, "why", None) == why


def test_obstacles(packed, warned):
    """Whatever could notice the packing: a hook, another class, another attention, a mask."""
    model = build("Roberta")
    trifuse.fuse(model, unpad=True)
    stack, layer = model.encoder, model.encoder.layer[1]
    hook = layer.output.register_forward_hook(lambda module, args, out: None)
    assert "layer.1.output has a hook" in str(stack.why_padded())
    run(model, RIGHT)
    hook.remove()
    dense, layer.output.dense = layer.output.dense, nn.Sequential(layer.output.dense)
    assert "layer.1.output.dense is a torch.nn.modules.container" in str(stack.why_padded())
    run(model, RIGHT)
    layer.output.dense = dense
    layer.chunk_size_feed_forward = 5
    assert "chunks the tokens" in str(stack.why_padded())
    run(model, RIGHT)
    layer.chunk_size_feed_forward = 0
    model.set_attn_implementation("sdpa")
    run(model, RIGHT)
    model.set_attn_implementation("trifuse")
    assert not packed
    assert len(warned) == 4
    wanted = run(model, RIGHT)[0]
    packed.clear()
    x, pairs = torch.randn(B, L, 32), torch.ones(L, L, dtype=torch.bool)
    stack(x, pairs.triu() & RIGHT[:, None, None])
    assert not packed
    assert warned[-1].endswith("its mask isn't that of padding alone")
    assert torch.equal(run(model, RIGHT)[0], wanted)
    assert len(packed) == LAYERS


@pytest.mark.parametrize("kind", MASKS)
def test_a_causal_mask_of_all_pairs(kind, packed):
    """Boolean, or added to the scores."""
    keep = MASKS[kind]
    model, x = build("Roberta"), torch.randn(B, L, 32)
    mask = torch.ones(L, L, dtype=torch.bool).tril() & keep[:, None, None]
    wanted = model.encoder(x, mask)[0]
    trifuse.fuse(model, unpad=True)
    added = torch.zeros(B, 1, L, L).masked_fill(~mask, torch.finfo(torch.float32).min)
    for each in (mask, added):
        packed.clear()
        close(model.encoder(x, each)[0][keep], wanted[keep])
        assert [tokens for tokens, _ in packed] == [int(keep.sum())] * LAYERS
    packed.clear()
    mask[0, 0, L // 2, 0] = False
    model.encoder(x, mask)
    assert not packed


@pytest.mark.parametrize("name", ["Roberta", "Data2VecText"])
def test_a_model_embeds_real_tokens_only(name, packed, monkeypatch):
    """With the positions of the padded batch, counted or passed; a hook gets padded tokens."""
    counts = []
    embed = packed_models.bert.embed_packed

    def counted(*args):
        out = embed(*args)
        counts.append(out.shape[1])
        return out

    monkeypatch.setattr(packed_models.bert, "embed_packed", counted)
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[0, 5:] = keep[1, :2] = False
    ids = torch.randint(3, PADDED_SIZES["vocab_size"], keep.shape)
    ids[~keep] = 1  # RoBERTa's padding, which its positions leave out
    positions = torch.randint(0, 9, keep.shape)
    model = build(name)
    given = [{}, {"position_ids": positions}, {"token_type_ids": torch.zeros_like(ids)}]
    with torch.no_grad():
        wanted = [model(ids, keep, **each) for each in given]
        trifuse.fuse(model, unpad=True)
        for each, want in zip(given, wanted, strict=True):
            got = model(ids, keep, **each)
            close(got.last_hidden_state[keep], want.last_hidden_state[keep])
            close(got.pooler_output[0], want.pooler_output[0])  # the other's token is padding
            (tupled, _) = model(ids, keep, **each, return_dict=False)
            assert torch.equal(tupled, got.last_hidden_state)
        assert counts == [int(keep.sum())] * 6
        shapes = []
        hook = model.embeddings.word_embeddings.register_forward_hook(
            lambda module, args, out: shapes.append(out.shape[:2])
        )
        close(model(ids, keep).last_hidden_state[keep], wanted[0].last_hidden_state[keep])
        assert shapes == [ids.shape]
        hook.remove()
    assert len(counts) == 6


@pytest.mark.parametrize("name", ["Roberta", "Camembert"])
def test_hooks_on_the_embeddings(name, packed, warned):
    """A hook that makes embeddings require gradients, for checkpoints, doesn't stop packing."""
    model = build(name).train()
    trifuse.fuse(model, unpad=True)
    model.requires_grad_(False)
    model.encoder.requires_grad_(True)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    assert model.why_padded() is None
    gradients(model, RIGHT)
    assert len(packed) == 2 * LAYERS
    assert model.encoder.layer[0].output.dense.weight.grad is not None
    assert not warned

    def watch(module: nn.Module, args: Any, out: Tensor) -> None:
        assert out.shape[:2] == RIGHT.shape

    model.embeddings.word_embeddings.register_forward_hook(watch)
    packed.clear()
    gradients(model, RIGHT)
    assert len(packed) == 2 * LAYERS
    (said,) = warned
    why = "embeddings.word_embeddings has a hook (test_hooks_on_the_embeddings.<locals>.watch)"
    assert said.endswith(f"because {why}; its encoder leaves it out")


@pytest.mark.parametrize("cached", [False, True])
def test_an_encoder_as_a_decoder(packed, cached):
    model = build("Roberta", is_decoder=True)
    wanted = run(model, RIGHT)[0]
    assert trifuse.fuse(model, unpad=True).unpadded == ["encoder"]
    close(run(model, RIGHT, use_cache=cached)[0][RIGHT], wanted[RIGHT])
    assert len(packed) == LAYERS


def test_layers_whose_second_argument_is_no_mask(packed):
    """It is a memory. They compute padding, as the report says."""
    torch.manual_seed(0)
    modeling = importlib.import_module("transformers.models.blip.modeling_blip_text")
    sizes = PADDED_SIZES | SPECIAL_TOKENS | {"sep_token_id": 2, "encoder_hidden_size": 32}
    model = modeling.BlipTextModel(transformers.BlipTextConfig(**sizes)).eval()
    wanted = run(model, RIGHT)[0]
    assert not trifuse.fuse(model, unpad=True).unpadded
    close(run(model, RIGHT)[0][RIGHT], wanted[RIGHT])
    assert not packed


_TEXT = PADDED_SIZES | {"projection_size": 32}
CLASSIFIER = T5_SIZES | {"num_labels": 3, "eos_token_id": 1, "use_cache": False}
POOLED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "SiglipTextModel": (_TEXT, []),
    "SiglipModel": ({"text_config": _TEXT, "vision_config": VIT_SIZES}, ["vision_model.encoder"]),
    "ElectraForMultipleChoice first": (EMBEDDED, ["electra.encoder"]),
    "ElectraForMultipleChoice last": (EMBEDDED, []),
    "ElectraForMultipleChoice mean": (EMBEDDED, []),
    "T5ForSequenceClassification": (CLASSIFIER, ["transformer.encoder", "transformer.decoder"]),
}


@pytest.mark.parametrize("name", POOLED)
def test_models_that_read_fixed_positions(name, warned):
    """A position that may be padding keeps it; the first one doesn't, nor does one of a token."""
    (sizes, unpadded), (kind, *summary) = POOLED[name], name.split()
    torch.manual_seed(0)
    family = kind.partition("For")[0].removesuffix("Model")
    options = {"summary_type": summary[0]} if summary else {}
    config = getattr(transformers, f"{family}Config")(**sizes, **options)
    model = getattr(transformers, kind)(config).eval()
    ids = torch.randint(5, 97, (B, L), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "attention_mask": RIGHT.long()}
    if "T5" in kind:
        ids[:, 2] = 1  # the token whose hidden states are classified
    if "Choice" in kind:
        inputs = {name: each[None] for name, each in inputs.items()}
    if kind == "SiglipModel":
        inputs["pixel_values"] = torch.randn(B, 3, 16, 16)
    read = {"SiglipTextModel": "pooler_output", "SiglipModel": "text_embeds"}.get(kind, "logits")
    wanted = model(**inputs)[read]
    report = trifuse.fuse(model, unpad=True)
    assert report.unpadded == unpadded
    reads = "Siglip" in kind or summary in (["last"], ["mean"])
    assert [each.reason for each in report.padded] == [stacks._POOLED] * reads
    close(model(**inputs)[read], wanted)
    assert len(warned) == reads


def test_a_decoder_with_cross_attention_of_another_model(packed):
    model = build("Roberta", is_decoder=True, add_cross_attention=True)
    report = trifuse.fuse(model, unpad=True)
    assert report.padded == [("", "RobertaModel", "its attention is causal")]
    run(model, RIGHT, use_cache=False)
    assert not packed


@pytest.mark.parametrize("norms", [{}, {"pre_norm": True}, {"ln_before_adapter": False}])
def test_a_language_for_each_text(packed, norms):
    """X-MOD's adapters: each token goes through that of its text."""
    model = build("Xmod", **norms)
    languages = torch.tensor([1, 0, 1])
    wanted = run(model, RIGHT, lang_ids=languages)[0]
    assert not torch.allclose(wanted, run(model, RIGHT)[0], atol=1e-4)
    trifuse.fuse(model, unpad=True)
    close(run(model, RIGHT, lang_ids=languages)[0][RIGHT], wanted[RIGHT])
    assert len(packed) == LAYERS


def test_a_bias_in_each_layer(packed, warned):
    """UMT5's layers make a bias each, by the lengths of the longest sequence."""
    model = transformers.UMT5EncoderModel(transformers.UMT5Config(**T5_SIZES)).eval()
    holes = RIGHT.clone()
    holes[0, 4] = False
    masks = (RIGHT, RIGHT.flip(1), holes)
    wanted = [run(model, keep)[0] for keep in masks]
    report = trifuse.fuse(model, unpad=True)
    assert report.unpadded == ["encoder"]
    for keep, expected in zip(masks, wanted, strict=True):
        packed.clear()
        close(run(model, keep)[0][keep], expected[keep])
        assert len(packed) == (0 if keep is holes else LAYERS)
    (warning,) = warned
    assert warning.endswith("its layers make a bias that reaches over padding inside a sequence")
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(run(twin, RIGHT)[0], run(model, RIGHT)[0])
    report.revert()
    assert torch.equal(run(model, RIGHT)[0], wanted[0])


@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize("name", ["Wav2Vec2", "Hubert"])
def test_speech(name, stable, packed, warned):
    """Frames of sound, after a convolution over those with their padding."""
    options = {"conv_dim": (32, 32), "conv_kernel": (3, 3), "conv_stride": (2, 2)}
    options |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    sizes = {name: size for name, size in PADDED_SIZES.items() if "position" not in name}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        **sizes | options, feat_extract_norm="layer", do_stable_layer_norm=stable
    )
    model = getattr(transformers, f"{name}Model")(config).eval()
    sound = torch.randn(B, 64)
    keep = (torch.arange(64) < torch.tensor([64, 40, 20])[:, None]).long()
    wanted = model(sound, attention_mask=keep)[0]
    real = model._get_feature_vector_attention_mask(wanted.shape[1], keep).bool()
    assert trifuse.fuse(model, unpad=True).unpadded == ["encoder"]
    out = model(sound, attention_mask=keep)[0]
    close(out[real], wanted[real])
    assert out[~real].eq(0).all()
    assert [tokens for tokens, _ in packed] == [int(real.sum())] * LAYERS
    assert not warned


@pytest.mark.parametrize("name", ["Roberta", "ModernBert", "DebertaV2"])
def test_compiled(name, packed, warned, fresh_dynamo):
    model = build(name)
    wanted = run(model, RIGHT)[0]
    trifuse.fuse(model, unpad=True)
    with torch.no_grad():
        got = run(torch.compile(model, backend="eager", fullgraph=True), RIGHT)[0]
    close(got[RIGHT], wanted[RIGHT])
    assert not packed
    assert any("because torch.compile can't read its mask" in said for said in warned)


# Code that keeps tokens apart ---------------------------------------------------------------------


class Mixer(nn.Module):
    """Modules below take the place of a class of transformers."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.dense = nn.Linear(size, size)
        self.bias = nn.Parameter(torch.zeros(size))
        self.table = nn.Parameter(torch.zeros(L, size))


class Scaled(Mixer):
    def forward(self, hidden_states):
        return nn.functional.gelu(self.dense(hidden_states)) * self.bias + 1


class Transposed(Mixer):
    def forward(self, hidden_states):
        return self.dense(hidden_states.transpose(1, 2)).transpose(1, 2)


class Shifted(Mixer):
    def forward(self, hidden_states):
        return hidden_states + self.table


class Counted(Mixer):
    def forward(self, hidden_states):
        return hidden_states / hidden_states.shape[1]


class LongOnly(Mixer):
    def forward(self, hidden_states):
        if hidden_states.size(1) > 5:
            hidden_states = self.dense(hidden_states)
        return hidden_states


class Averaged(Mixer):
    def forward(self, hidden_states):
        return hidden_states - hidden_states.mean(1, keepdim=True)


class First(Mixer):
    def forward(self, hidden_states):
        return hidden_states + hidden_states[:, :1]


class Merged(Mixer):
    def forward(self, hidden_states):
        batch, length, _ = hidden_states.shape
        return self.dense(hidden_states.view(batch * length // 2, -1)).view(batch, length, -1)


class Masked(Mixer):
    def forward(self, hidden_states, attention_mask=None):
        return hidden_states * attention_mask


class Renamed(Mixer):
    def forward(self, hidden_states, attention_mask=None):
        return self.dense(hidden_states, mask=attention_mask)


class Forgetful(Mixer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Renamed()

    def forward(self, hidden_states, attention_mask=None):
        return self.inner(hidden_states)


class Halved(Mixer):
    parts = 2

    def forward(self, hidden_states):
        first, second = hidden_states.chunk(self.parts, dim=-1)
        return first * second


class Gated(Mixer):
    def forward(self, hidden_states):
        first, second = hidden_states.chunk(2, dim=-1)
        return first * second if self.training else second


class Either(Mixer):
    def forward(self, hidden_states):
        if self.training:
            hidden_states = hidden_states.view(*hidden_states.shape[:-1], 2, -1).transpose(1, 2)
        return self.dense(hidden_states)


class Helped(Mixer):
    def forward(self, hidden_states):
        return self.scale(hidden_states, by=hidden_states.shape[1])

    def scale(self, hidden_states, by=1):
        return hidden_states * by


class Routed(Mixer):
    """Rows of tokens, scores in groups of features, and back."""

    groups = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 8))

    def forward(self, hidden_states):
        batch, length, width = hidden_states.shape
        with torch.autocast("cpu", enabled=False):
            rows = hidden_states.view(-1, width).float()
            scores = nn.functional.linear(rows, self.weight.float()).softmax(-1)
        best = scores.view(-1, self.groups, 4 // self.groups).max(dim=-1).values
        chosen = torch.topk(best, k=1, dim=-1)[1]
        mask = torch.zeros_like(best).scatter_(1, chosen, 1.0)
        mask = mask.unsqueeze(-1).expand(-1, self.groups, 4 // self.groups).reshape(-1, 4)
        scores = scores.masked_fill(~mask.bool(), 0.0)
        scores = scores / scores.sum(dim=-1, keepdim=True)
        weights = scores.gather(1, torch.topk(scores, 1, dim=-1).indices)
        return (self.dense(rows) * weights[..., :1]).view(batch, length, width)


class Paired(Mixer):
    def forward(self, hidden_states):
        batch, length, width = hidden_states.shape
        return hidden_states.view(-1, 2 * width).view(batch, length, width)


class Balanced(Mixer):
    def forward(self, hidden_states):
        rows = hidden_states.view(-1, hidden_states.shape[-1])
        return (rows - rows.mean(0)).view(*hidden_states.shape)


class Crowded(Mixer):
    def forward(self, hidden_states):
        rows = hidden_states.flatten(0, 1)
        return rows.topk(1, dim=0)[0].view(*hidden_states.shape)


class Swapped(Mixer):
    def forward(self, hidden_states):
        heads = hidden_states.view(*hidden_states.shape[:-1], 2, -1).transpose(1, 2)
        return heads.reshape(*hidden_states.shape[:-1], -1)


class Single(Mixer):
    def forward(self, hidden_states):
        batch, length, width = hidden_states.shape
        head = hidden_states.view(batch, 1, length, width)
        return self.dense(head).view(batch, length, -1, 4)[..., 0, :]


@pytest.mark.parametrize(
    ("kind", "uses"),
    [
        (Scaled, None),
        (Routed, None),
        (Single, None),
        (Paired, "hidden_states.view(-1, 2 * width)"),
        (Balanced, "rows.mean"),
        (Crowded, "rows.topk"),
        (Swapped, "heads.reshape(*hidden_states.shape[:-1], -1)"),
        (Gated, None),
        (Halved, "hidden_states.chunk"),
        (Either, "one of two hidden_states"),
        (Transposed, "hidden_states.transpose"),
        (Shifted, "self.table"),
        (Counted, "hidden_states / hidden_states.shape[1]"),
        (LongOnly, "hidden_states.size(1) > 5"),
        (Averaged, "hidden_states.mean"),
        (First, "hidden_states[:, :1]"),
        (Merged, "hidden_states.view(batch * length // 2, -1)"),
        (Masked, "hidden_states * attention_mask"),
        (Renamed, "doesn't pass its mask to dense, or under another name"),
        (Forgetful, "doesn't pass its mask to inner, or under another name"),
        (Helped, "hidden_states * by"),
    ],
)
def test_code_that_keeps_tokens_apart(kind, uses, monkeypatch):
    torch.manual_seed(0)
    module = kind()
    assert "isn't known" in tokenwise.why_not(module)
    monkeypatch.setattr(kind, "__module__", "transformers_modules.remote")
    why = tokenwise.why_not(module)
    assert why is None if uses is None else why.endswith(uses)


def load(source, line, other, tmp_path, monkeypatch):
    """The module of remote code with this source, of which a line is replaced."""
    name = f"transformers_modules.own_{tmp_path.name}"
    (tmp_path / "own.py").write_text(source.replace(line, other) if line else source)
    spec = importlib.util.spec_from_file_location(name, tmp_path / "own.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


# Attention that is written out, of which a test changes some lines.
ATTENTION = """
import math, torch
from torch import nn

class OwnAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.dropout = nn.Dropout(0.1)
        self.temperatures = nn.Parameter(torch.ones(2, 1, 1))

    def forward(self, hidden_states, attention_mask=None, position_bias=None):
        shape = (*hidden_states.shape[:-1], -1, 4)
        q = self.q(hidden_states).view(shape).transpose(1, 2)
        k = self.k(hidden_states).view(shape).transpose(1, 2)
        v = self.v(hidden_states).view(shape).transpose(1, 2)
        scores = torch.matmul(q, k.transpose(-1, -2))
        scores = scores / math.sqrt(4)
        if attention_mask is not None:
            scores = scores + attention_mask
        probs = nn.functional.softmax(scores, dim=-1)
        probs = self.dropout(probs)
        context = torch.matmul(probs, v)
        return self.out(context.transpose(1, 2).flatten(2)), probs
"""


@pytest.mark.parametrize(
    ("line", "other", "uses"),
    [
        ("", "", None),
        ("torch.matmul(q, k.transpose(-1, -2))", "0.5 * (q @ k.mT)", None),
        ("torch.matmul(q, k.transpose(-1, -2))", "q.matmul(k.permute(0, 1, 3, 2))", None),
        ("nn.functional.softmax(scores, dim=-1)", "scores.float().softmax(-1).type_as(q)", None),
        ("nn.functional.softmax(scores, dim=-1)", "nn.Softmax(dim=-1)(scores)", None),
        ("nn.functional.softmax(scores, dim=-1)", "nn.Softmax(-2)(scores)", "nn.Softmax(-2)"),
        ("self.dropout(probs)", "nn.functional.dropout(probs, 0.1, self.training)", None),
        ("scores / math.sqrt(4)", "attention_mask + scores", None),
        ("k.transpose(-1, -2)", "v.transpose(-1, -2).contiguous()", None),
        ("k.transpose(-1, -2)", "k.transpose(1, 2)", "torch.matmul"),
        ("k.transpose(-1, -2)", "k", "torch.matmul"),
        ("scores / math", "scores * self.temperatures + math", "self.temperatures"),
        ("scores / math.sqrt(4)", "torch.tanh(scores / 3) * 3", None),
        ("scores / math.sqrt(4)", "scores.sigmoid()", "scores.sigmoid"),
        ("scores / math.sqrt(4)", "scores[:, :, :4]", "scores[:, :, :4]"),
        ("scores + attention_mask", "scores - attention_mask", "scores - attention_mask"),
        ("scores + attention_mask", "scores", "nn.functional.softmax"),
        ("dim=-1", "dim=-2", "nn.functional.softmax"),
        ("self.dropout(probs)", "self.out(probs)", "it calls out on the weights of attention"),
        ("self.dropout(probs)", "probs * 2", "probs * 2"),
        ("matmul(probs, v)", "matmul(scores, v)", "torch.matmul"),
        ("matmul(probs, v)", "matmul(v, probs)", "torch.matmul"),
    ],
)
def test_attention_that_is_written_out(line, other, uses, tmp_path, monkeypatch):
    attention = load(ATTENTION, line, other, tmp_path, monkeypatch).OwnAttention()
    assert tokenwise.why_not(attention) is not None  # its parts would run by themselves
    trifuse.fuse(attention)
    why = tokenwise.why_not(attention)
    assert why is None if uses is None else why.endswith(uses)


# A loop over experts, of which a test changes some lines.
EXPERTS = """
import torch
from torch import nn

class Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weights):
        ctx.save_for_backward(x, weights)
        return x * weights

    @staticmethod
    def backward(ctx, grad):
        x, weights = ctx.saved_tensors
        return grad * weights, (grad * x).sum(-1, keepdim=True)

class OwnExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(1, 4))

    def forward(self, hidden_states):
        batch, length, width = hidden_states.shape
        rows = hidden_states.view(-1, width)
        weights, chosen = self.gate(rows).softmax(-1).topk(2, dim=-1)
        if hasattr(self, "scale"):
            weights = weights * self.scale.squeeze()[0]
        out = torch.zeros((batch * length, width))
        mask = nn.functional.one_hot(chosen, num_classes=len(self.experts)).permute(2, 1, 0)
        for expert in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            slots, picks = torch.where(mask[expert].squeeze(0))
            if picks.numel() == 0:
                continue
            result = self.experts[expert](rows[picks])
            out.index_add_(0, picks, Weighted.apply(result, weights[picks, slots, None]))
        return out.view(batch, length, width)
"""


@pytest.mark.parametrize(
    ("line", "other", "uses"),
    [
        ("", "", None),
        ("torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()", "range(4)", None),
        ("permute(2, 1, 0)", "permute(2, 0, 1)", "rows[picks]"),
        ("rows[picks]", "rows[slots]", "rows[slots]"),
        ("rows[picks]", "rows[picks.sort()[0]]", "picks.sort"),
        ("(0, picks, ", "(0, slots, ", "out.index_add_"),
        ("(result, ", "(result * picks.numel(), ", "result * picks.numel()"),
        ("(result, ", "(result - result.mean(0), ", "result.mean"),
        ("numel() == 0", "numel() == 2", "picks.numel() == 2"),
        ("batch * length", "2 * length", "torch.zeros"),
        ("batch * length", "length * length", "torch.zeros"),
        ("self.scale.squeeze()[0]", "chosen.sum(0)", "chosen.sum"),
        (
            "slots, picks =",
            "chosen = mask[expert]; slots, picks =",
            "sum(dim=(-1, -2)), 0).nonzero()",
        ),
        ("(grad * x).sum(-1", "(grad * x).sum(0", "(grad * x).sum"),
        ("return grad * weights", "return grad.sum(-1)", "Weighted.apply"),
    ],
)
def test_experts_in_a_loop(line, other, uses, tmp_path, monkeypatch):
    why = tokenwise.why_not(load(EXPERTS, line, other, tmp_path, monkeypatch).OwnExperts())
    assert why is None if uses is None else why.endswith(uses)


def test_a_forward_that_cannot_be_compiled_again(monkeypatch):
    monkeypatch.setattr(stacks.code, "compile_like", lambda tree, function: None)
    for module in (stacks, sublayers):  # the classes made here are no other test's
        monkeypatch.setattr(module, "_classes", {})
    model = build("Roberta")
    report = trifuse.fuse(model, unpad=True)
    (padded,) = report.padded
    assert padded.reason == "its forward can't be compiled again, which leaving padding out takes"
    assert any(left.path == "encoder" for left in report.left)
