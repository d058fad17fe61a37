"""Embeddings with the code of BERT's, RoBERTa's or RemBERT's, which run in one call in inference.

On a GPU their lookups are one call, in training too.

Words, kinds of segments and positions are looked up, added and normalised. RoBERTa's positions
begin after the id of padding and leave padding out. transformers copies both into other families,
such as ELECTRA, CamemBERT and XLM-R. RemBERT has no buffer of segment ids, and makes zeros instead.
Embeddings are recognised if their methods have the statements of one of the three, in the installed
version of transformers, and if these end as below. In 4.57 BERT's and RoBERTa's end otherwise.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from trifuse.nn import embeddings, plans, post_norm
from trifuse.ops.encoder_model import Ids
from trifuse.recipes import code, sublayers

_STATEMENTS = """
if inputs_embeds is None:
    inputs_embeds = self.word_embeddings(input_ids)
token_type_embeddings = self.token_type_embeddings(token_type_ids)
embeddings = inputs_embeds + token_type_embeddings
position_embeddings = self.position_embeddings(position_ids)
embeddings = embeddings + position_embeddings
embeddings = self.LayerNorm(embeddings)
embeddings = self.dropout(embeddings)
return embeddings
"""
_SUM = "embeddings = embeddings + position_embeddings"
_END = code.normal(_STATEMENTS)
_END_IN_PLACE = code.normal(_STATEMENTS.replace(_SUM, "embeddings += position_embeddings"))


class OneEmbedding(nn.Module):
    """Mixin for fused classes of such embeddings, before the original class in their bases."""

    _trifuse_counts_words: bool  # whether positions are counted as in RoBERTa
    _trifuse_makes_types: bool  # whether omitted segment ids are zeros made in each call

    def forward(
        self,
        input_ids: Any = None,
        token_type_ids: Any = None,
        position_ids: Any = None,
        inputs_embeds: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Same signature as the original class's forward."""
        if inputs_embeds is None and isinstance(input_ids, Tensor) and kwargs.keys() <= _PAST:
            given = (input_ids, token_type_ids, position_ids, next(iter(kwargs.values()), 0))
            on_gpu = input_ids.device.type in post_norm.DEVICES
            run = embeddings.run_on_gpu if on_gpu else embeddings.run
            out = run(self, lambda: _parts(self), lambda: _ids(self, *given))
            if out is not None:
                return out
        return super().forward(input_ids, token_type_ids, position_ids, inputs_embeds, **kwargs)


# The names, in the versions of transformers, for the number of earlier tokens.
_PAST = {"cache_length", "past_key_values_length"}


def _parts(module: Any) -> embeddings.Parts | None:
    names = *(f"{kind}_embeddings" for kind in ("word", "token_type", "position")), *_ENDS
    *tables, norm, dropout = found = [module._modules.get(name) for name in names]
    if any(each is None for each in found):
        return None
    taken_in = "LayerNorm" in type(module)._trifuse_origin.norms
    return embeddings.Parts(tuple(tables), norm, dropout, taken_in)


_ENDS = "LayerNorm", "dropout"


class Fixed(NamedTuple):
    """Embeddings that read the same tensors in every call."""

    plan: embeddings.Plan
    ids: Ids
    values: tuple[plans.PlannedValue, ...]  # from which the ids were read


def fixed(module: Any) -> Fixed | None:
    """Return embeddings in evaluation mode, on a CPU; None if they must be called."""
    if not isinstance(module, OneEmbedding):
        return None
    plan = embeddings.planned(module, lambda: _parts(module))
    cls: Any = sublayers.original(type(module))
    # A method that counts positions may have been replaced.
    if plan is None or counts_words(cls) is not module._trifuse_counts_words:
        return None
    if getattr(type(module), _COUNTS, None) is not getattr(cls, _COUNTS, None):
        return None
    names = "position_ids", "token_type_ids"
    read: list[Any] = [(module._buffers, name) for name in names]
    positions: Tensor | None = module._buffers.get(names[0])
    padding: Any = 0
    if module._trifuse_counts_words:
        if _COUNTS in vars(module):
            return None
        positions, padding = None, module.padding_idx
        read += [(vars(module), "padding_idx"), (vars(module), _COUNTS), (type(module), _COUNTS)]
    elif positions is None:
        return None
    zero = only_zero(module)
    buffer, version = (None, 0) if zero is None else (module._buffers[names[1]], zero._version)
    ids = Ids(zero, buffer, version, positions, padding)
    return Fixed(plan, ids, plans.present_values(read))


def _ids(
    module: Any, words: Tensor, types: Any, positions: Any, past: int
) -> tuple[Tensor, ...] | None:
    """Return the ids of words, kinds of segments and positions, including omitted ones.

    Args:
        past: the number of earlier tokens.

    Returns:
        None if they aren't ids of a batch of tokens.
    """
    if words.dim() != 2:
        return None
    if types is None:
        made = module._trifuse_makes_types
        types = words.new_zeros((1, 1)) if made else only_zero(module)
        if types is None:
            return None
    if positions is None:
        if module._trifuse_counts_words:
            positions = module.create_position_ids_from_input_ids(words, module.padding_idx, past)
        else:
            positions = module._buffers["position_ids"][:, past : past + words.shape[1]]
    if isinstance(types, Tensor) and isinstance(positions, Tensor):
        return words, types, positions
    return None


# For each module: the buffer of segment ids, its version when it was read, and a (1, 1) view of it.
_zeros: WeakKeyDictionary[nn.Module, tuple[Tensor, int, Tensor]] = WeakKeyDictionary()


def only_zero(module: Any) -> Tensor | None:
    """Return the segment id of all tokens, (1, 1), from a buffer; None if it isn't 0."""
    buffer = module._buffers.get("token_type_ids")
    if type(buffer) is not Tensor or buffer.is_inference():
        return None
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return None  # torch.func batches the buffer, so that it can't be read
    known = _zeros.get(module)
    if (
        known is None
        or known[0] is not buffer
        or known[1] != buffer._version
        or known[2].data_ptr() != buffer.data_ptr()
    ):
        if buffer.device.type not in ("cpu", *post_norm.DEVICES) or buffer.numel() == 0:
            return None
        if buffer.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        if buffer.any():  # waits for a GPU, once for each change of the buffer
            return None
        # A view of the buffer itself would hold it, so that torch could not swap it.
        known = _zeros[module] = (buffer, buffer._version, buffer.detach()[:1, :1])
    return known[2]


def is_berts(module: nn.Module) -> bool:
    """Whether a module has the code of BERT's, RoBERTa's or RemBERT's embeddings."""
    cls: Any = sublayers.original(type(module))
    return counts_words(cls) is not None or makes_types(cls)


def counts_words(cls: type) -> bool | None:
    """Return whether positions are counted from the words as in RoBERTa; None if unknown."""
    if not _ends_with(cls, _END):
        return None
    berts, robertas = (
        getattr(code.modeling(name.lower()), f"{name}Embeddings") for name in ("Bert", "Roberta")
    )
    if code.same_methods(cls, berts, "forward"):
        return False
    return True if code.same_methods(cls, robertas, "forward", _COUNTS) else None


def makes_types(cls: type) -> bool:
    """Return whether a class has the code of RemBERT's embeddings."""
    if not _ends_with(cls, _END_IN_PLACE):
        return False
    return code.same_methods(cls, code.modeling("rembert").RemBertEmbeddings, "forward")


def _ends_with(cls: type, statements: str) -> bool:
    if not cls.__name__.endswith("Embeddings") or not sublayers.is_of_transformers(cls):
        return False
    forward: Any = getattr(cls, "forward", None)
    return (code.body(forward) or "").endswith(statements)


_COUNTS = "create_position_ids_from_input_ids"


def one_embedding_class(source: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of a class of embeddings that can run in one call."""
    if source not in _classes:
        origin = sublayers.origin_of(source, (one_embedding_class, (source,)))
        cls: Any = sublayers.original(source)
        members = {
            "_trifuse_counts_words": bool(counts_words(cls)),
            "_trifuse_makes_types": makes_types(cls),
        }
        _classes[source] = sublayers.subclass(OneEmbedding, origin, members)
    return _classes[source]


_classes: dict[type[nn.Module], type[nn.Module]] = {}
