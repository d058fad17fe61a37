"""Attention that a model writes out, as two products and a softmax, run as one call.

    scores = query @ key.transpose(-1, -2) / math.sqrt(head_dim) + mask
    weights = F.dropout(scores.softmax(-1), p)
    out = weights @ value

Inside ``with trifuse.attention()`` the first product is deferred: its result is a :class:`Deferred`
tensor, which holds the factors instead of numbers. A step that keeps the form of an attention
returns another deferred tensor. Such steps are a factor, a term, a mask, the softmax, dropout, a
change of dtype, and a split of the batch into batch and heads. The last product is then one call of
:func:`trifuse.scaled_dot_product_attention`.

Every other use of a deferred tensor computes it first, with the functions that the model called. So
code of any form has the same results as before, and only the recognised forms run fused.

The same code serves packed tokens, queries of (1, H, T, E): a :class:`PackedTerm` in place of the
mask makes the last product a call of :func:`trifuse.varlen_attention`.

- ``parts`` has the form of an attention and the tensors that hold it;
- ``biases`` has the terms that recipes pass to models in place of a bias or a mask;
- ``first_product`` begins an attention;
- ``steps`` has a rule for each step between the products;
- ``unit_vectors`` divides vectors by their lengths, as cosine attention does queries and keys;
- ``one_call`` has the last product, and ``key_biases`` finds biases that need no matrix for it.
"""

from trifuse.written_out import steps  # noqa: F401  (registers its rules)
from trifuse.written_out.biases import (
    DistanceBias,
    IndexedBias,
    MaskedKeyBias,
    PackedTerm,
    split,
    split_mask,
)
from trifuse.written_out.first_product import begin
from trifuse.written_out.one_call import attend, attended, is_result, without_biases_of_keys
from trifuse.written_out.parts import Form, Packed, fitting, is_plain
from trifuse.written_out.unit_vectors import normalize

__all__ = [
    "DistanceBias",
    "Form",
    "IndexedBias",
    "MaskedKeyBias",
    "Packed",
    "PackedTerm",
    "attend",
    "attended",
    "begin",
    "fitting",
    "is_plain",
    "is_result",
    "normalize",
    "split",
    "split_mask",
    "without_biases_of_keys",
]
