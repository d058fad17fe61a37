"""models/tagger.py against its formula in float64, and its use."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trifuse
from trifuse.models.elmo import batch_to_char_ids
from trifuse.models.tagger import Tagger, TaggerConfig

CONFIG = TaggerConfig(
    20,
    5,
    embedding_dim=6,
    char_embedding_dim=4,
    filters=((2, 3), (3, 4)),
    max_characters_per_token=12,
    hidden_size=7,
    dropout=0.0,
    context_sizes={0: 3, 1: 2, 2: 4},
)
SENTENCES = [["The", "river", "rises", "."], ["Rain"], ["It", "falls"]]


def inputs(config: TaggerConfig = CONFIG, dtype: torch.dtype = torch.float32):
    torch.manual_seed(1)
    characters = batch_to_char_ids(SENTENCES, config.max_characters_per_token)
    B, T, _ = characters.shape
    words = torch.randint(config.vocab_size, (B, T))
    contexts = {
        place: torch.randn(B, T, size, dtype=dtype) for place, size in config.context_sizes.items()
    }
    return words, characters, contexts


def model(config: TaggerConfig = CONFIG) -> Tagger:
    torch.manual_seed(0)
    return Tagger(config)


def by_hand(tagger: Tagger, words, characters, contexts):
    """One sentence: each direction of each layer step by step, by torch's cells."""

    def run(x, layer, suffix):
        cell = nn.LSTMCell(layer.input_size, layer.hidden_size, dtype=x.dtype)
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        cell.load_state_dict({name: getattr(layer, f"{name}_l0{suffix}") for name in names})
        h = c = x.new_zeros(layer.hidden_size)
        found = []
        for step in x.flip(0) if suffix else x:
            h, c = cell(step, (h, c))
            found.append(h)
        return torch.stack(found[::-1] if suffix else found)

    x = torch.cat((tagger.embedding(words), tagger.characters(characters[None])[0]), -1)
    for place, layer in enumerate(tagger.layers):
        x = torch.cat((x, contexts[place]), -1)
        x = torch.cat((run(x, layer, ""), run(x, layer, "_reverse")), -1)
    return tagger.output(torch.cat((x, contexts[len(tagger.layers)]), -1))


@torch.no_grad()
def test_each_sentence_is_the_formula_whatever_its_company():
    tagger = model().double().eval()
    words, characters, contexts = inputs(dtype=torch.float64)
    scores = tagger(words, characters, contexts)
    assert scores.shape == (3, 4, 5)
    for b, sentence in enumerate(SENTENCES):
        n = len(sentence)
        own = {place: vectors[b, :n] for place, vectors in contexts.items()}
        expected = by_hand(tagger, words[b, :n], characters[b, :n], own)
        torch.testing.assert_close(scores[b, :n], expected, rtol=1e-12, atol=1e-12)
        assert not scores[b, n:].any()


def test_padding_is_not_read():
    tagger = model()
    words, characters, contexts = inputs()
    before = tagger(words, characters, contexts)
    past = ~(characters != 0).any(-1)
    words[past] = 10**6
    for vectors in contexts.values():
        vectors[past] = float("nan")
        vectors.requires_grad_()
    after = tagger(words, characters, contexts)
    assert torch.equal(after, before)
    after.sum().backward()
    for t in (*tagger.parameters(), *contexts.values()):
        assert t.grad is not None
        assert t.grad.isfinite().all()


def test_no_words_and_no_sentences():
    tagger = model(dataclasses.replace(CONFIG, context_sizes={}))
    for shape in ((0, 3), (2, 0)):
        characters = torch.zeros(*shape, 12, dtype=torch.long)
        assert tagger(torch.zeros(shape, dtype=torch.long), characters).shape == (*shape, 5)
    characters = torch.zeros(2, 3, 12, dtype=torch.long)  # empty sentences
    assert not tagger(torch.zeros(2, 3, dtype=torch.long), characters).any()


def test_fused_is_as_eager():
    results = []
    for fused in (False, True):
        tagger = model()
        if fused:
            assert "LSTM" in str(trifuse.fuse(tagger))
        words, characters, contexts = inputs()
        scores = tagger(words, characters, contexts)
        scores.square().sum().backward()
        results.append([scores.detach(), *(p.grad for p in tagger.parameters())])
    for eager, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, eager, rtol=1e-4, atol=1e-5)


def test_learns_tags_by_heart():
    config = dataclasses.replace(CONFIG, context_sizes={}, hidden_size=16)
    tagger = model(config)
    trifuse.fuse(tagger)
    words, characters, _ = inputs(config)
    real = (characters != 0).any(-1)
    tags = torch.randint(5, words.shape)
    optimizer = torch.optim.Adam(tagger.parameters(), 2e-2)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(tagger(words, characters)[real], tags[real]).backward()
        optimizer.step()
    assert torch.equal(tagger(words, characters).argmax(-1)[real], tags[real])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tags": 0}, "num_tags: expected at least 1; got 0"),
        ({"hidden_size": -1}, "hidden_size: expected at least 1; got -1"),
        ({"context_sizes": {3: 1}}, "expected places from 0 to num_layers=2; got 3"),
        ({"context_sizes": {0: 0}}, "context_sizes: expected at least 1 feature; got 0"),
        ({"filters": ((13, 1),)}, "filter"),
    ],
)
def test_bad_sizes_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_bad_arguments_are_named():
    tagger = model()
    words, characters, contexts = inputs()
    with pytest.raises(ValueError, match=r"char_ids: expected \(B, T, 12\)"):
        tagger(words, characters[..., :5], contexts)
    with pytest.raises(ValueError, match=r"word_ids: expected \(3, 4\); got \(3, 2\)"):
        tagger(words[:, :2], characters, contexts)
    with pytest.raises(ValueError, match=r"vectors at the places \[0, 1, 2\]; got \[\]"):
        tagger(words, characters)
    with pytest.raises(ValueError, match=r"contexts\[1\]: expected \(3, 4, 2\); got \(3, 4, 1\)"):
        tagger(words, characters, contexts | {1: contexts[1][..., :1]})
