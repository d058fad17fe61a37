"""models/classification.py: language models that classify texts."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trifuse
from trifuse.models.classification import (
    ClassifierOutput,
    LanguageModelForSequenceClassification,
    classification_loss,
)
from trifuse.models.recurrent import RecurrentLanguageModel, RecurrentLanguageModelConfig
from trifuse.models.transformer import LanguageModel, LanguageModelConfig, log_likelihood

V, LABELS = 11, 3
LENGTHS = (5, 1, 7, 4)
TRANSFORMER = LanguageModelConfig(V, 8, 2, 2, 16, dropout=0.0, max_length=10)
RECURRENT = RecurrentLanguageModelConfig(V, 6, 10, dropout=0.0)


def classifier(kind: str, dropout: float = 0.0) -> LanguageModelForSequenceClassification:
    torch.manual_seed(0)
    model: LanguageModel | RecurrentLanguageModel
    if kind in ("pre-norm", "post-norm"):
        model = LanguageModel(dataclasses.replace(TRANSFORMER, norm_first=kind == "pre-norm"))
    else:
        model = RecurrentLanguageModel(
            dataclasses.replace(RECURRENT, cell=kind.split()[0], tie_weights="tied" in kind)
        )
    out = LanguageModelForSequenceClassification(model, LABELS, dropout).double().eval()
    with torch.no_grad():
        for parameter in out.parameters():  # so that biases and norms matter
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return out


kinds = pytest.mark.parametrize("kind", ["pre-norm", "post-norm", "lstm tied", "gru", "rnn"])


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    tokens = torch.randint(V, mask.shape, generator=generator)
    return tokens, mask, torch.randint(LABELS, (len(LENGTHS),), generator=generator)


def lm_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    out = model.language_model(tokens)
    return out[0] if isinstance(out, tuple) else out


def assert_close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


@kinds
def test_the_last_real_token_decides(kind):
    """The hidden state is that of transformers' naming, from the language model alone."""
    model, (tokens, mask, _) = classifier(kind), batch()
    output = model(tokens, mask, output_lm_logits=True)
    assert isinstance(output, ClassifierOutput)
    assert torch.equal(model(tokens, mask), output.logits)
    for row, length in enumerate(LENGTHS):
        alone = tokens[row : row + 1, :length]
        states = model.language_model(alone, output_hidden_states=True).hidden_states
        wanted = states[-1][0, -1] @ model.classifier.weight.T + model.classifier.bias
        assert_close(output.logits[row], wanted)
        assert_close(model(alone)[0], wanted)
        assert_close(output.lm_logits[row, :length], lm_logits(model, alone)[0])


@kinds
@pytest.mark.parametrize("lm_weight", [0.0, 0.5])
def test_loss_is_the_sum_of_both(kind, lm_weight):
    model, (tokens, mask, labels) = classifier(kind), batch()
    got = classification_loss(model, tokens, labels, mask, lm_weight)
    log_probs = model(tokens, mask).log_softmax(-1)
    wanted = -sum(log_probs[row, label] for row, label in enumerate(labels.tolist())) / len(labels)
    texts = log_likelihood(lm_logits(model, tokens), tokens, mask).sum()
    assert_close(got, wanted - lm_weight * texts / (sum(LENGTHS) - len(LENGTHS)))

    for dtype in (torch.uint8, torch.int32):
        narrow = classification_loss(model, tokens.int(), labels.to(dtype), mask, lm_weight)
        assert_close(narrow, got)


@kinds
@pytest.mark.parametrize("masked", [False, True])
def test_texts_of_one_token_add_no_loss(kind, masked):
    model, (tokens, mask, labels) = classifier(kind), batch()
    if masked:
        mask = torch.arange(tokens.shape[1]) < torch.ones(len(tokens), 1)
    else:
        tokens, mask = tokens[:, :1], None
    got, wanted = (
        classification_loss(model, tokens, labels, mask, weight) for weight in (0.5, 0.0)
    )
    assert_close(got, wanted)
    leaves = [*model.classifier.parameters(), model.language_model.embedding.weight]
    grads = (torch.autograd.grad(loss, leaves) for loss in (got, wanted))
    for ours, theirs in zip(*grads, strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("unpad", [False, True])
@kinds
def test_fused_classifier_trains_alike(kind, unpad):
    tokens, mask, labels = batch()
    model = classifier(kind).train()
    fused = copy.deepcopy(model)
    report = trifuse.fuse(fused, unpad=unpad)
    assert any("language_model" in swapped.path for swapped in report.swapped)
    losses = [
        classification_loss(each, tokens, labels, mask, lm_weight=0.5) for each in (fused, model)
    ]
    assert_close(*losses)
    for loss in losses:
        loss.backward()
    for ours, theirs in zip(fused.parameters(), model.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad)


def test_hugging_face_takes_the_same_token():
    """GPT-2's classifier, whose linear layer has no bias."""
    transformers = pytest.importorskip("transformers")
    tokens, mask, _ = batch()
    tokens = tokens % (V - 1)
    padded = tokens.masked_fill(~mask, V - 1)
    config = transformers.GPT2Config(
        vocab_size=V,
        n_positions=10,
        n_embd=8,
        n_layer=0,
        n_head=2,
        num_labels=LABELS,
        pad_token_id=V - 1,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    theirs = transformers.GPT2ForSequenceClassification(config).double().eval()
    model = LanguageModelForSequenceClassification(
        LanguageModel(dataclasses.replace(TRANSFORMER, num_layers=1)), LABELS
    )
    model = model.double().eval()
    with torch.no_grad():
        # A layer that adds nothing to its residual.
        for name, parameter in model.named_parameters():
            if "out_proj" in name or "linear2" in name:
                parameter.zero_()
        theirs.transformer.wte.weight.copy_(model.language_model.embedding.weight)
        theirs.transformer.wpe.weight.copy_(model.language_model.positions.weight)
        theirs.score.weight.copy_(model.classifier.weight)
        wanted = theirs(input_ids=padded, attention_mask=mask.long()).logits
    assert_close(model(padded, mask), wanted)


def test_parts_begin_as_documented():
    torch.manual_seed(0)
    language_model = LanguageModel(LanguageModelConfig(V, 256, 4, 1, 16)).to(torch.bfloat16)
    model = LanguageModelForSequenceClassification(language_model, 100)
    assert model.language_model is language_model
    assert model.dropout.p == 0.1
    assert model.classifier.weight.dtype == torch.bfloat16
    assert model.classifier.weight.float().std().item() == pytest.approx(0.02, rel=0.05)
    assert model.classifier.bias.count_nonzero() == 0
    untied = RecurrentLanguageModel(dataclasses.replace(RECURRENT, tie_weights=False))
    assert LanguageModelForSequenceClassification(untied).classifier.weight.shape == (2, 10)


def test_dropout_drops_what_the_classifier_reads():
    model, (tokens, mask, _) = classifier("pre-norm", dropout=0.5), batch()
    kept = model(tokens, mask)
    assert torch.equal(model(tokens, mask), kept)
    model.train()
    assert not torch.equal(model(tokens, mask), model(tokens, mask))


@kinds
def test_state_dict_goes_round(kind):
    model, (tokens, mask, _) = classifier(kind), batch()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(tokens, mask), model(tokens, mask))
    pretrained = {
        f"language_model.{name}": value for name, value in model.language_model.state_dict().items()
    }
    missing = other.load_state_dict(pretrained, strict=False)
    assert missing.missing_keys == ["classifier.weight", "classifier.bias"]
    assert missing.unexpected_keys == []


def test_traces_without_a_break():
    model, (tokens, mask, _) = classifier("pre-norm"), batch()
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_close(compiled(tokens, mask), model(tokens, mask))


@kinds
def test_learns_labels(kind):
    """Whether a text holds a certain token more often than another."""
    torch.manual_seed(0)
    model = classifier(kind).float().train()
    trifuse.fuse(model)
    tokens = torch.randint(V, (64, 9))
    labels = ((tokens == 1).sum(1) > (tokens == 2).sum(1)).long()
    mask = torch.ones_like(tokens, dtype=torch.bool)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        classification_loss(model, tokens, labels, mask).backward()
        optimizer.step()
    assert (model.eval()(tokens, mask).argmax(1) == labels).double().mean() > 0.9


@kinds
def test_bad_arguments_are_named(kind):
    model, (tokens, mask, labels) = classifier(kind), batch()
    with pytest.raises(ValueError, match="num_labels: expected at least 1; got 0"):
        LanguageModelForSequenceClassification(model.language_model, 0)
    with pytest.raises(ValueError, match=r"tokens: expected \(B, L\) .* got \(4, 0\)"):
        model(tokens[:, :0])
    with pytest.raises(ValueError, match=r"mask: expected torch.bool of shape \(4, 7\)"):
        model(tokens, mask.long())
    with pytest.raises(ValueError, match="mask: expected each row's real tokens before"):
        model(tokens, mask.flip(1))
    with pytest.raises(ValueError, match="mask: expected at least one real token"):
        model(tokens, mask & (tokens < 0))
    with pytest.raises(ValueError, match="lm_weight: expected at least 0; got -1"):
        classification_loss(model, tokens, labels, mask, -1)
    assert F.cross_entropy(model(tokens[:2]), labels[:2]).isfinite()
