"""The inputs of BERT and the tasks that pre-train it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trifuse.models.bert_inputs import join_segments, mask_tokens, next_sentence_pairs

CLS, SEP, MASK, PAD = 1, 2, 3, 0
WORDS = range(4, 40)

segments = st.lists(st.integers(WORDS.start, WORDS.stop - 1), max_size=6)


@given(st.lists(st.lists(segments, min_size=1, max_size=2), min_size=1, max_size=4))
def test_segments_are_joined_as_the_tokenizers_library_does(rows):
    tokenizers = pytest.importorskip("tokenizers")
    processing = tokenizers.processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    vocabulary = {str(n): n for n in range(WORDS.stop)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = processing
    got = join_segments(
        [[torch.tensor(s, dtype=torch.long) for s in row] for row in rows],
        cls_id=CLS,
        sep_id=SEP,
        pad_id=PAD,
    )
    for number, row in enumerate(rows):
        expected = tokenizer.encode(*(" ".join(map(str, segment)) for segment in row))
        length = len(expected.ids)
        assert got.input_ids[number, :length].tolist() == expected.ids
        assert got.token_type_ids[number, :length].tolist() == expected.type_ids
        assert got.attention_mask[number].sum() == length
        assert got.attention_mask[number, :length].all()
        assert (got.input_ids[number, length:] == PAD).all()
    assert got.input_ids.shape[1] == got.attention_mask.sum(1).max()


def test_joining_nothing_raises():
    for rows in ([], [[]]):
        with pytest.raises(ValueError, match="rows: expected"):
            join_segments(rows, cls_id=CLS, sep_id=SEP)


def test_masked_tokens_have_devlins_shares():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, WORDS.stop, (400, 500), generator=generator)
    hidden, labels = mask_tokens(ids, mask_id=MASK, words=WORDS, generator=generator)
    drawn, is_word = labels != -100, ids >= WORDS.start
    assert torch.equal(labels[drawn], ids[drawn])
    assert torch.equal(hidden[~drawn], ids[~drawn])
    assert not drawn[~is_word].any()
    share = lambda part, whole: (part.sum() / whole.sum()).item()  # noqa: E731
    assert share(drawn, is_word) == pytest.approx(0.15, abs=0.005)
    assert share(drawn & (hidden == MASK), drawn) == pytest.approx(0.8, abs=0.01)
    random = drawn & (hidden != MASK) & (hidden != ids)
    assert share(random, drawn) == pytest.approx(0.1 * (1 - 1 / len(WORDS)), abs=0.01)
    assert share(drawn & (hidden == ids), drawn) == pytest.approx(0.1, abs=0.01)
    assert set(hidden[random].tolist()) == set(WORDS)


def test_special_tokens_are_those_given():
    ids = torch.arange(WORDS.stop).expand(50, -1)
    special = ids % 2 == 0
    options = {"mask_id": MASK, "words": WORDS, "mlm_probability": 1.0}
    _, labels = mask_tokens(ids, special_tokens_mask=special, **options)
    assert torch.equal(labels == -100, special)
    hidden, labels = mask_tokens(ids, **{**options, "mlm_probability": 0.0})
    assert torch.equal(hidden, ids)
    assert (labels == -100).all()
    for wrong in ({"words": range(5, 5)}, {"words": range(0, 9, 2)}, {"mlm_probability": 1.5}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected"):
            mask_tokens(ids, **{**options, **wrong})


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_narrow_tokens_are_masked_alike(dtype):
    ids = torch.randint(*(WORDS.start, WORDS.stop), (9, 30))
    for words in (WORDS, range(1000, 1010)):  # uint8 can't hold the last ones
        got, wanted = (
            mask_tokens(
                given,
                mask_id=MASK,
                words=words,
                special_tokens_mask=torch.zeros_like(ids, dtype=torch.bool),
                generator=torch.Generator().manual_seed(0),
            )
            for given in (ids.to(dtype), ids)
        )
        assert all(map(torch.equal, got, wanted))


def test_a_seed_decides_the_draws():
    ids = torch.randint(*(WORDS.start, WORDS.stop), (9, 30))

    def draw(seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return list(mask_tokens(ids, mask_id=MASK, words=WORDS, generator=generator))

    assert all(map(torch.equal, draw(1), draw(1)))
    assert not torch.equal(draw(1)[0], draw(2)[0])


@given(
    st.lists(st.integers(0, 5), min_size=2, max_size=6).filter(
        lambda lengths: max(lengths) > 1 and sum(n > 0 for n in lengths) > 1
    ),
    st.integers(0, 99),
)
def test_a_second_sentence_follows_or_is_of_another_document(lengths, seed):
    documents = [[(d, s) for s in range(n)] for d, n in enumerate(lengths)]
    generator = torch.Generator().manual_seed(seed)
    for first, second, is_random in next_sentence_pairs(documents, 40, generator):
        assert first[1] + 1 < lengths[first[0]]
        if is_random:
            assert second[0] != first[0]
            assert second in documents[second[0]]
        else:
            assert second == (first[0], first[1] + 1)


def test_pairs_are_drawn_evenly():
    documents = [["a0", "a1", "a2"], [], ["b0"], ["c0", "c1"]]
    pairs = next_sentence_pairs(documents, 12_000, torch.Generator().manual_seed(0))
    assert sum(p.is_random for p in pairs) / len(pairs) == pytest.approx(0.5, abs=0.02)
    firsts = Counter(p.first for p in pairs)
    assert firsts.keys() == {"a0", "a1", "c0"}
    assert all(n / len(pairs) == pytest.approx(1 / 3, abs=0.02) for n in firsts.values())
    random = Counter(p.second for p in pairs if p.is_random and p.first == "c0")
    assert random.keys() == {"a0", "a1", "a2", "b0"}
    assert all(n / random.total() == pytest.approx(1 / 4, abs=0.05) for n in random.values())


@pytest.mark.parametrize("documents", [[], [["a", "b"]], [["a"], ["b"]], [["a", "b"], []]])
def test_documents_that_have_no_pairs_raise(documents):
    with pytest.raises(ValueError, match="documents: expected"):
        next_sentence_pairs(documents, 3)
