"""Encoders and decoders of transformers without their padding, under teacher forcing."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from model_sizes import GROUPED_QUERIES, SIZES, T5_SIZES, TRANSLATION_SIZES, WHISPER_SIZES
from torch import Tensor, nn

import trifuse
from trifuse.nn import packing

transformers = pytest.importorskip("transformers")

import families  # noqa: E402
from transformers.modeling_outputs import BaseModelOutput  # noqa: E402

pytestmark = pytest.mark.usefixtures("torch_multiplies")

B, S, L, LAYERS = 3, 10, 7, 2

HALF = SIZES | GROUPED_QUERIES | {"head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "Bart": TRANSLATION_SIZES,
    "MBart": TRANSLATION_SIZES,
    "Marian": TRANSLATION_SIZES,
    "Pegasus": TRANSLATION_SIZES,
    "M2M100": TRANSLATION_SIZES,
    "PLBart": TRANSLATION_SIZES,
    "Blenderbot": TRANSLATION_SIZES,
    "BlenderbotSmall": TRANSLATION_SIZES,
    "T5": T5_SIZES,
    "MT5": T5_SIZES,
    "UMT5": T5_SIZES,
    "T5Gemma": {"encoder": HALF, "decoder": HALF, "vocab_size": 97, "dropout_rate": 0.0},
}
SOURCE = torch.arange(S) < torch.tensor([S, 6, 3])[:, None]
TARGET = torch.arange(L) < torch.tensor([5, L, 2])[:, None]
WHOLE = torch.ones(B, L, dtype=torch.bool)
# Which source tokens and which target tokens are real; None: the model gets no mask.
MASKS: dict[str, tuple[Tensor | None, Tensor | None]] = {
    "source": (SOURCE, None),
    "both": (SOURCE, TARGET),
    "left": (SOURCE.flip(1), TARGET.flip(1)),
    "target": (None, TARGET),
}


def build(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**FAMILIES[name], **options)
    return getattr(transformers, f"{name}Model")(config).eval()


def run(model: nn.Module, source: Tensor | None, target: Tensor | None, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    return model(
        input_ids=torch.randint(3, 97, (B, S), generator=generator),
        decoder_input_ids=torch.randint(3, 97, (B, L), generator=generator),
        attention_mask=None if source is None else source.long(),
        decoder_attention_mask=None if target is None else target.long(),
        **{"use_cache": False} | options,
    )


def real(target: Tensor | None) -> Tensor:
    return WHOLE if target is None else target


def gradients(model: nn.Module, *masks: Tensor | None) -> Tensor:
    """Gradients by the real tokens; weighted, since a norm's sum has almost no gradient."""
    model.zero_grad()
    out = run(model, *masks).last_hidden_state[real(masks[1])]
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return grads / grads.abs().max()


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=5e-6)


def tokens(mask: Tensor | None, length: int) -> int:
    return B * length if mask is None else int(mask.sum())


@pytest.fixture
def packed(monkeypatch) -> list[tuple[int, int, bool]]:
    """The queries and keys of each attention that ran packed, and whether it was causal."""
    seen: list[tuple[int, int, bool]] = []
    attend = packing.attend

    def spy(query, key, value, where, dropout_p=0.0, is_causal=False, **named):
        seen.append((query.shape[2], key.shape[2], is_causal))
        return attend(query, key, value, where, dropout_p, is_causal, **named)

    monkeypatch.setattr(packing, "attend", spy)
    return seen


@pytest.mark.parametrize("kind", ["both", "left"])
def test_texts_of_speech(kind, packed, warned):
    """Whisper's decoder leaves the padding of its texts out; its spectra have none."""
    _, target = MASKS[kind]
    torch.manual_seed(0)
    model = transformers.WhisperModel(transformers.WhisperConfig(**WHISPER_SIZES)).eval()
    spectra = torch.randn(B, 8, 20)

    def results() -> tuple[Tensor, Tensor]:
        model.zero_grad()
        ids = torch.randint(3, 97, (B, L), generator=torch.Generator().manual_seed(1))
        given = {"decoder_input_ids": ids, "decoder_attention_mask": target.long()}
        out = model(spectra, **given, use_cache=False).last_hidden_state[target]
        out.square().sum(-1).sin().sum().backward()
        grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        return out.detach(), grads / grads.abs().max()

    wanted = results()
    assert "decoder" in trifuse.fuse(model, unpad=True).unpadded
    for mine, theirs in zip(results(), wanted, strict=True):
        close(mine, theirs)
    real_tokens = int(target.sum())
    assert packed == [(real_tokens, real_tokens, True), (real_tokens, B * 10, False)] * LAYERS
    assert not warned


def test_experts_with_a_capacity_get_padding_and_its_mask(packed, warned):
    """NLLB-MoE's, which choose among all tokens of the batch; its attention is ours."""
    torch.manual_seed(0)
    options = {"encoder_sparse_step": 1, "decoder_sparse_step": 1, "num_experts": 4}
    options["moe_eval_capacity_token_fraction"] = 0.4
    model = transformers.NllbMoeModel(transformers.NllbMoeConfig(**TRANSLATION_SIZES, **options))
    model.eval()
    kinds = [MASKS["both"], MASKS["left"]]
    wanted = [run(model, *masks).last_hidden_state[masks[1]] for masks in kinds]
    report = trifuse.fuse(model, unpad=True)
    assert model.config._attn_implementation == "trifuse"
    assert [padded.path for padded in report.padded] == ["encoder", "decoder"]
    assert not report.left
    for masks, theirs in zip(kinds, wanted, strict=True):
        close(run(model, *masks).last_hidden_state[masks[1]], theirs)
    assert not packed
    assert all("NllbMoeTop2Router" in said for said in warned)


@pytest.mark.parametrize("name", FAMILIES)
def test_teacher_forcing(name, packed, warned):
    """Results, gradients, the tokens that attend, reports, copies and the way back."""
    model = build(name)
    classes = [type(module) for module in model.modules()]
    wanted = {
        kind: (run(model, *masks).last_hidden_state, gradients(model, *masks))
        for kind, masks in MASKS.items()
    }
    report = trifuse.fuse(model, unpad=True)
    assert report.unpadded == trifuse.explain(model).unpadded == ["encoder", "decoder"]
    assert not report.padded
    for kind, (source, target) in MASKS.items():
        packed.clear()
        out = run(model, source, target)
        S_real, L_real = tokens(source, S), tokens(target, L)
        encoder = [] if source is None else [(S_real, S_real, False)] * LAYERS
        decoder = [(L_real, L_real, True), (L_real, S_real, False)] * LAYERS
        assert packed == encoder + decoder
        if source is not None:
            assert out.encoder_last_hidden_state[~source].eq(0).all()
        assert out.last_hidden_state[~real(target)].eq(0).all()
        close(out.last_hidden_state[real(target)], wanted[kind][0][real(target)])
        close(gradients(model, source, target), wanted[kind][1])
    assert not trifuse.fuse(model, unpad=True).swapped
    assert not warned
    packed.clear()
    run(model, torch.ones_like(SOURCE), WHOLE)
    assert not packed  # nothing is padded

    both = MASKS["both"]
    twin, its_report = pickle.loads(pickle.dumps((model, report)))
    for each, its in ((twin, its_report), copy.deepcopy((model, report)), (model, report)):
        packed.clear()
        out = run(each, *both).last_hidden_state[TARGET]
        close(out, wanted["both"][0][TARGET])
        assert len(packed) == 3 * LAYERS
        its.revert()
        assert [type(module) for module in each.modules()] == classes
        assert torch.equal(run(each, *both).last_hidden_state, wanted["both"][0])


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["Bart", "T5"])
def test_checkpointing_changes_no_gradient(name, reentrant, packed):
    model = build(name).train()
    trifuse.fuse(model, unpad=True)
    for kind in ("both", "left"):
        model.gradient_checkpointing_disable()
        torch.manual_seed(1)
        wanted = gradients(model, *MASKS[kind])
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        packed.clear()
        torch.manual_seed(1)
        close(gradients(model, *MASKS[kind]), wanted)
        assert len(packed) == 6 * LAYERS  # once more in the backward


def with_head(name: str) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**FAMILIES[name])
    kind = "MTModel" if name == "Marian" else "ForConditionalGeneration"
    return getattr(transformers, f"{name}{kind}")(config).eval()


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_with_labels(name, packed, warned):
    """A model with its head makes the decoder's input from the labels; some keep a cache too."""
    model = with_head(name).train()
    families.drop_nothing(model)
    ids = torch.randint(3, 97, (B, S), generator=torch.Generator().manual_seed(1))
    labels = ids[:, :L].masked_fill(~TARGET, -100)
    arguments = {"input_ids": ids, "attention_mask": SOURCE.long(), "labels": labels}

    def results() -> tuple[Any, Tensor, Tensor]:
        model.zero_grad()
        out = model(**arguments)
        out.loss.backward()
        grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        return out, out.loss.detach(), grads / grads.abs().max()

    wanted, *numbers = results()
    trifuse.fuse(model, unpad=True)
    got, *ours = results()
    for mine, theirs in zip(ours, numbers, strict=True):
        close(mine, theirs)
    # T5Gemma makes a mask of what the labels ignore, which is one token later in the input.
    real_tokens = int((TARGET.sum(1) + 1).clamp(max=L).sum()) if name == "T5Gemma" else B * L
    own, of_source = (real_tokens, real_tokens, True), (real_tokens, int(SOURCE.sum()), False)
    assert packed[LAYERS:] == [own, of_source] * LAYERS
    assert not warned
    assert type(cache_of(got)) is type(cache_of(wanted))


@pytest.mark.parametrize("name", ["Bart", "T5"])
def test_generation_decodes_with_its_cache(name, packed, warned):
    model = with_head(name)
    ids = torch.randint(3, 97, (B, S), generator=torch.Generator().manual_seed(1))
    options = {
        "attention_mask": SOURCE.long(),
        "max_new_tokens": 5,
        "min_new_tokens": 5,
        "do_sample": False,
        "num_beams": 2,
    }
    wanted = model.generate(ids, **options)
    trifuse.fuse(model, unpad=True)
    assert torch.equal(model.generate(ids, **options), wanted)
    assert packed == [(int(SOURCE.sum()), int(SOURCE.sum()), False)] * LAYERS  # the encoder
    assert not warned


def cache_of(out: Any) -> Any:
    """Returns the cache of a result, named ``cache`` or ``past_key_values`` by version."""
    return getattr(out, "cache", None) or getattr(out, "past_key_values", None)


@pytest.mark.parametrize("kind", ["both", "left"])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.covering(1)
def test_a_text_fills_the_caches(name, kind, packed, warned):
    """Its keys and values are in the places of the padded batch, and so are those of the source;
    later tokens find them. Several of these compute padding."""
    source, target = MASKS[kind]
    model = build(name)

    def read_and_step(count: int) -> list[Tensor]:
        first = run(model, source, target, use_cache=True)
        cache = cache_of(first)
        held = []
        for keep, each in (
            (target, cache.self_attention_cache),
            (source, cache.cross_attention_cache),
        ):
            kept = [part for layer in each.layers for part in (layer.keys, layer.values)]
            held += [part.transpose(1, 2)[keep] for part in kept]
        accepted = inspect.signature(type(model).forward).parameters
        step = model(
            encoder_outputs=BaseModelOutput(first.encoder_last_hidden_state),
            attention_mask=source.long(),
            decoder_input_ids=torch.full((B, count), 5),
            decoder_attention_mask=torch.cat([target, WHOLE[:, :count]], 1).long(),
            use_cache=True,
            **{"cache" if "cache" in accepted else "past_key_values": cache},
        )
        return [first.last_hidden_state[target], step.last_hidden_state, *held]

    with torch.no_grad():
        wanted = [read_and_step(count) for count in (1, 2)]
        trifuse.fuse(model, unpad=True)
        got = [read_and_step(1)]
        assert len(packed) == 3 * LAYERS
        assert not warned
        got.append(read_and_step(2))
    for ours, theirs in zip(got, wanted, strict=True):
        for mine, expected in zip(ours, theirs, strict=True):
            close(mine, expected)
    (said,) = warned
    assert said.endswith("because its layers get a cache, which use_cache=False would spare them")


@pytest.mark.parametrize("name", ["Bart", "T5"])
def test_hidden_states_of_the_decoder(name, packed, warned):
    model = build(name)
    wanted = run(model, SOURCE, TARGET, output_hidden_states=True).decoder_hidden_states
    trifuse.fuse(model, unpad=True)
    got = run(model, SOURCE, TARGET, output_hidden_states=True).decoder_hidden_states
    assert not packed
    assert all("a hook that records its output" in said for said in warned)
    for mine, theirs in zip(got, wanted, strict=True):
        close(mine[TARGET], theirs[TARGET])


def test_a_bias_with_padding_inside_sequences(packed):
    holes = SOURCE & (torch.arange(S) != 1)
    model = build("T5")
    wanted = run(model, holes, TARGET).last_hidden_state
    trifuse.fuse(model, unpad=True)
    close(run(model, holes, TARGET).last_hidden_state[TARGET], wanted[TARGET])
    assert len(packed) == 3 * LAYERS


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_bias_that_an_encoder_passes_to_its_layers(checkpoints, packed, warned):
    """UDOP's, of the places on the page, which each layer returns for the next."""
    torch.manual_seed(0)
    model = transformers.UdopEncoderModel(transformers.UdopConfig(**T5_SIZES, dropout_rate=0.0))
    generator = torch.Generator().manual_seed(1)
    arguments = {
        "input_ids": torch.randint(3, 97, (B, S), generator=generator),
        "bbox": torch.rand(B, S, 4, generator=generator).sort(-1).values,
    }
    upstream = torch.randn(int(SOURCE.sum()), 32, generator=generator)

    def results(keep: Tensor) -> list[Tensor]:
        model.zero_grad()
        out = model(**arguments, attention_mask=keep.long()).last_hidden_state[keep]
        (out * upstream).sum().backward()
        return [
            out,
            *(p.grad / p.grad.abs().max() for p in model.parameters() if p.grad is not None),
        ]

    kinds = SOURCE, SOURCE.flip(1)
    wanted = [results(keep) for keep in kinds]
    trifuse.fuse(model, unpad=True)
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    for keep, theirs in zip(kinds, wanted, strict=True):
        packed.clear()
        for mine, each in zip(results(keep), theirs, strict=True):
            close(mine, each)
        assert set(packed) == {(int(keep.sum()), int(keep.sum()), False)}
    assert not warned
