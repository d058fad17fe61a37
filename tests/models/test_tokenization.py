"""Word pieces trained on Korean and English, and models that learn from both scripts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import trifuse
from trifuse.models.bert import BertConfig, BertForMaskedLM
from trifuse.models.bert_inputs import mask_tokens
from trifuse.models.decoding import greedy_search
from trifuse.models.elmo import BiLMForPreTraining, ElmoConfig, batch_to_char_ids
from trifuse.models.transformer import LanguageModel, LanguageModelConfig, token_loss
from trifuse.tokenization import train_wordpiece

TEXTS = [
    "봄이 오면 강물이 녹고 새들이 돌아온다.",
    "When spring comes the river thaws and the birds return.",
    "여름에는 비가 많이 내려 강물이 불어난다.",
    "In summer it rains a lot and the river rises.",
    "가을이면 논이 누렇게 익고 하늘이 높다.",
    "In autumn the fields turn yellow and the sky is high.",
    "겨울에는 눈이 내려 산과 들이 하얗다.",
    "In winter snow falls and the fields are white.",
]


@pytest.fixture(scope="module")
def tokenizer():
    pytest.importorskip("tokenizers")
    return train_wordpiece(TEXTS, 400, min_frequency=1)


def test_trained_pieces_read_every_text_whole(tokenizer):
    for text in TEXTS:
        encoding = tokenizer.encode(text)
        assert "[UNK]" not in encoding.tokens
        assert (encoding.tokens[0], encoding.tokens[-1]) == ("[CLS]", "[SEP]")
        assert tokenizer.decode(encoding.ids).replace(" ", "") == text.replace(" ", "")
    assert any(
        len(piece.removeprefix("##")) > 1 and "가" <= piece[-1] <= "힣"
        for piece in tokenizer.get_vocab()
    )
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert [tokenizer.id_to_token(n) for n in range(5)] == special
    pair = tokenizer.encode("봄이", "spring")
    assert pair.tokens.count("[SEP]") == 2
    assert pair.type_ids[-1] == 1


def test_saved_vocabulary_loads(tokenizer, tmp_path):
    from tokenizers import BertWordPieceTokenizer

    [path] = tokenizer.save_model(str(tmp_path))
    loaded = BertWordPieceTokenizer(path, lowercase=False, strip_accents=False)
    for text in TEXTS:
        assert loaded.encode(text).ids == tokenizer.encode(text).ids


def test_lower_case_keeps_syllables_and_accents():
    pytest.importorskip("tokenizers")
    tokenizer = train_wordpiece(["Été 한글 ÉTÉ"] * 2, 100, lowercase=True)
    assert tokenizer.decode(tokenizer.encode("ÉTÉ 한글").ids) == "été 한글"


def test_vocabulary_has_room():
    pytest.importorskip("tokenizers")
    with pytest.raises(ValueError, match="vocab_size: expected more than 5; got 5"):
        train_wordpiece(TEXTS, 5)


def test_bert_learns_both_scripts(tokenizer):
    torch.manual_seed(0)
    tokenizer_size = tokenizer.get_vocab_size()
    rows = [torch.tensor(tokenizer.encode(text).ids) for text in TEXTS]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(
        tokenizer_size, intermediate_size=128, initializer_range=0.1, **sizes, **rates
    )
    model = BertForMaskedLM(config)
    trifuse.fuse(model, unpad=True)
    generator = torch.Generator().manual_seed(0)
    hidden, labels = mask_tokens(
        ids, mask_id=4, words=range(5, tokenizer_size), mlm_probability=0.3, generator=generator
    )
    korean = torch.tensor([[n % 2 == 0] for n in range(len(TEXTS))])
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        logits = model(hidden, ids > 0)
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
    right = model(hidden, ids > 0).argmax(-1) == labels
    for script in (korean, ~korean):
        asked = (labels != -100) & script
        assert right[asked].double().mean() > 0.9


def test_a_model_of_bytes_writes_korean():
    """A syllable is three bytes, and what a search returns is whole text again."""
    torch.manual_seed(0)
    rows = [torch.tensor(list(text.encode())) for text in TEXTS]
    end = 0  # no byte of a text
    text = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=end)
    text = F.pad(text, (0, 1), value=end)
    real = torch.arange(text.shape[1]) <= torch.tensor([[len(row)] for row in rows])
    model = LanguageModel(LanguageModelConfig(256, 64, 4, 2, 128, 0.0, max_length=text.shape[1]))
    trifuse.fuse(model)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(120):
        optimizer.zero_grad()
        loss = token_loss(model(text[:, :-1]), text[:, 1:], real[:, 1:])
        loss.backward()
        optimizer.step()
    prompt = text[:, : len("봄이".encode())]
    length = text.shape[1] - prompt.shape[1]
    found = greedy_search(model.eval(), prompt, eos_id=end, max_length=length)
    for given, row, whole in zip(prompt.tolist(), found.tokens.tolist(), TEXTS, strict=True):
        assert bytes(given + row).rstrip(b"\0").decode() == whole


def test_elmo_learns_both_scripts():
    """ELMo reads bytes, so that a word in any script has characters."""
    torch.manual_seed(0)
    sentences = [text.rstrip(".").split() for text in TEXTS]
    vocabulary = {word: 2 + n for n, word in enumerate(sorted({w for s in sentences for w in s}))}
    config = ElmoConfig(
        char_embedding_dim=8,
        filters=((1, 8), (3, 24)),
        n_highway=1,
        lstm_dim=64,
        projection_dim=32,
        dropout=0.0,
    )
    chars = batch_to_char_ids(sentences, config.max_characters_per_token)
    words = {tuple(row.tolist()) for row in chars.flatten(0, 1) if row.any()}
    assert len(words) == len(vocabulary)  # each word has characters of its own
    model = BiLMForPreTraining(config, 2 + len(vocabulary), begin_id=0, end_id=1)
    trifuse.fuse(model)
    targets = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor([vocabulary[w] for w in s]) for s in sentences], batch_first=True
    )
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        loss = model(chars, targets).loss
        loss.backward()
        optimizer.step()
    assert loss.item() < 1.8  # nats a word; guessing by frequency would leave 3.7
