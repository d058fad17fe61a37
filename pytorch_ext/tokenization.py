"""WordPiece vocabularies for BERT, made by the ``tokenizers`` library (``pip install tokenizers``).

A published vocabulary is loaded by that library itself:
``tokenizers.BertWordPieceTokenizer("vocab.txt")``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["train_wordpiece"]


def train_wordpiece(
    texts: Iterable[str],
    vocab_size: int = 30522,
    *,
    lowercase: bool = False,
    min_frequency: int = 2,
) -> Any:
    """Learn a vocabulary of word pieces from texts in any language.

    Schuster and Nakajima, "Japanese and Korean Voice Search" (2012); as BERT uses it, Devlin et al.
    (2018), section 3. Accents stay, even with ``lowercase``, because removing them would take
    Hangul syllables apart.

    Args:
        texts: the texts; each is read once.
        vocab_size: the most pieces, including [PAD], [UNK], [CLS], [SEP] and [MASK], which come
            first in this order.
        lowercase: turn the texts into lower case, here and when they are encoded.
        min_frequency: how often two pieces must occur next to each other to become one.

    Returns:
        A ``tokenizers.BertWordPieceTokenizer``. ``encode(one, two)`` frames texts as
        [CLS] one [SEP] two [SEP]; ``save_model(folder)`` writes vocab.txt.

    Raises:
        ImportError: the library is not installed.
        ValueError: ``vocab_size`` has no room for more than the special tokens.
    """
    from tokenizers import BertWordPieceTokenizer
    from tokenizers.processors import BertProcessing

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    if vocab_size <= len(special):
        raise ValueError(f"vocab_size: expected more than {len(special)}; got {vocab_size}")
    tokenizer = BertWordPieceTokenizer(lowercase=lowercase, strip_accents=False)
    tokenizer.train_from_iterator(
        texts,
        vocab_size,
        min_frequency,
        special_tokens=special,
        show_progress=False,
    )
    frame = ((token, tokenizer.token_to_id(token)) for token in ("[SEP]", "[CLS]"))
    tokenizer.post_processor = BertProcessing(*frame)
    return tokenizer
