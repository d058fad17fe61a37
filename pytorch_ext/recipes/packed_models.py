"""Models of transformers with BERT's code, which embed only real tokens.

Their encoder leaves padding out by itself (:mod:`trifuse.recipes.stacks`). In such a model the ids
are packed instead, before the embeddings, and hidden states are unpacked once, before the pooler.
A model is recognised if its ``forward`` has the statements of BERT's, and its embeddings those of
BERT's or RoBERTa's, in the installed version of transformers. RoBERTa's positions skip padding, so
they are counted before the padding is removed.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn

from trifuse.nn import bert, packing
from trifuse.nn.linear import has_global_hooks, is_intercepted
from trifuse.nn.packing import Obstacle, PackedSequences
from trifuse.recipes import code, embeddings, layers, models, stacks, sublayers


class EmbedsRealTokens(nn.Module):
    """Mixin for fused classes of such models, before the original class in their bases.

    If the batch is padded, its real tokens are packed into one row, and the last hidden state is 0
    at padded positions. Decoders, cross attention, other attention implementations and calls that
    request more than the last hidden state and the pooled output run as in transformers.
    """

    unpad = True

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Same signature as the original class's forward."""
        given = input_ids, attention_mask, token_type_ids, position_ids
        if models.may_skip_forward(args, kwargs):
            out = models.in_one_call(self, *given)  # without padding
            if out is not None:
                return out
        requests = (value for name, value in kwargs.items() if name != "return_dict")
        if (
            input_ids is None
            or attention_mask is None
            or attention_mask.shape != input_ids.shape
            or any(value is not None for value in args)
            or any(value is not None and value is not False for value in requests)
            or _own_reason(self) is not None
            or (packed := _pack(self, attention_mask)) is None
        ):
            if models.may_skip_forward(args, kwargs):
                models.prepare(self, input_ids)  # for the next call
            # The encoder may still pack its input; if it doesn't, it logs why.
            return super().forward(*given, *args, **kwargs)
        model: Any = self
        embedding = model.embeddings
        if position_ids is None and _counts_words(sublayers.original(type(embedding))):
            position_ids = _count(embedding, input_ids)
        tokens = bert.embed_packed(embedding, packed, input_ids, token_type_ids, position_ids)
        encoded = None
        if not is_intercepted(model.encoder):
            encoded = layers.run_post_norm(model.encoder, tokens, packed)
        if encoded is None:
            encoded = model.encoder(tokens, attention_mask=packed).last_hidden_state
        tokens = encoded
        shape = torch.Size((*input_ids.shape, tokens.shape[-1]))
        hidden_states = packing.scatter(tokens, packed, shape)
        pooled = None if model.pooler is None else model.pooler(hidden_states)
        out = model._trifuse_result(last_hidden_state=hidden_states, pooler_output=pooled)
        as_dict = kwargs.get("return_dict")
        if as_dict is None:
            as_dict = getattr(model.config, "return_dict", True)
        return out if as_dict else out.to_tuple()

    def why_padded(self) -> Obstacle | str | None:
        """Return why the model computes padding in any batch; None if it can leave padding out."""
        return _own_reason(self) or _obstacle(self)


def _own_reason(model: Any) -> str | None:
    """Return why a model's configuration does not let it pack tokens, or None if it does."""
    if model.config.output_hidden_states:
        return "its configuration requests hidden states"
    return "it is a decoder" if model.config.is_decoder else None


def _obstacle(model: Any, encoder_is_known: bool = False) -> Obstacle | str | None:
    """Return why the embeddings or the encoder can't get packed tokens; None if they can.

    Args:
        model: the model.
        encoder_is_known: whether it is known that the encoder can.
    """
    inside = model.embeddings.named_modules(prefix="embeddings")
    for path, module in (*inside, ("encoder", model.encoder)):
        if why := _why_intercepted(module):
            packs = encoder_is_known or model.encoder.why_padded() is None
            return Obstacle(path, module, f"has {why}{_ENCODER_PACKS if packs else ''}")
    if encoder_is_known:
        return None
    why = model.encoder.why_padded()
    return why._replace(path=f"encoder.{why.path}") if isinstance(why, Obstacle) else why


_ENCODER_PACKS = "; its encoder leaves it out"


def _why_intercepted(module: nn.Module) -> str | None:
    """As :func:`packing.why_intercepted`; hooks that do the same to packed tokens don't count."""
    why = packing.why_intercepted(module, packing.SHARDING)
    if why is None or has_global_hooks() or "forward" in vars(module):
        return why
    hooks = (
        *module._forward_hooks.values(),
        *module._forward_pre_hooks.values(),
        *module._backward_hooks.values(),
        *module._backward_pre_hooks.values(),
    )
    others = [hook for hook in hooks if not _is_harmless(hook)]
    if not others:
        return None
    if _OF_GRADIENTS in why:  # which names the first hook
        why = f"a hook ({getattr(others[0], '__qualname__', type(others[0]).__qualname__)})"
    return why


_OF_GRADIENTS = "make_inputs_require_grad"  # peft's name for the hook; transformers' ends in s


def _is_harmless(hook: Any) -> bool:
    """Whether a hook is FSDP2's, or makes embeddings require gradients.

    transformers and peft add the latter for checkpoints, so that the gradients of adapters reach
    the first layer although the embeddings are frozen.
    """
    module = getattr(hook, "__module__", None) or ""
    if module.startswith(packing.SHARDING):
        return True
    name = getattr(hook, "__name__", "").removesuffix("s")
    return name == _OF_GRADIENTS and module.split(".")[0] in ("peft", "transformers")


def _pack(model: Any, mask: Tensor) -> PackedSequences | None:
    """Find the real tokens, unless that would gain nothing or they can't be packed."""
    if torch.compiler.is_compiling() or packing.why_unreadable(mask) is not None:
        return None
    if (why := _obstacle(model, layers.may_run_post_norm(model.encoder, mask.device))) is not None:
        if isinstance(why, Obstacle):  # an obstacle in the encoder; the encoder doesn't warn again
            packing.warn_padded(model, why)
        return None
    packed = packing.find(mask.bool())
    return None if packed.indices.shape[0] in (0, mask.numel()) else packed


def is_known(model: nn.Module) -> bool:
    """Whether a model and its embeddings have the code of BERT's, and its encoder can pack."""
    cls: Any = sublayers.original(type(model))
    embedding = getattr(model, "embeddings", None)
    if not isinstance(getattr(model, "encoder", None), stacks.Unpadded) or embedding is None:
        return False
    known = _has_berts_code(cls, cls.forward)
    return known and _counts_words(sublayers.original(type(embedding))) is not None


@functools.cache
def _has_berts_code(cls: type, forward: Any) -> bool:
    """Whether a class's ``forward``, which may be replaced later, is BERT's."""
    of_transformers = sublayers.is_of_transformers(cls)
    return of_transformers and code.same_methods(cls, code.modeling("bert").BertModel, "forward")


def _counts_words(cls: Any) -> bool | None:
    """Return whether embeddings count positions as RoBERTa's do; None if they aren't known."""
    return _read_embeddings(cls, cls.forward, getattr(cls, _COUNTS, None))


@functools.cache
def _read_embeddings(cls: Any, *methods: Any) -> bool | None:
    """Return the result of :func:`_counts_words`, which is valid for these methods of the class."""
    forward = inspect.unwrap(cls.forward)
    if code.body(cls.forward) is None or forward.__globals__["__name__"] != cls.__module__:
        return None  # it was replaced
    if cls is code.modeling("bert").BertEmbeddings:
        return False
    if code.same_methods(cls, code.modeling("roberta").RobertaEmbeddings, "forward"):
        return True
    return embeddings.counts_words(cls)


def _count(embedding: Any, input_ids: Tensor) -> Tensor:
    """Return RoBERTa's positions: a method counts them, or in 4.57 a function beside the class."""
    beside = sys.modules[sublayers.original(type(embedding)).__module__]
    holder = embedding if hasattr(embedding, _COUNTS) else beside
    positions: Tensor = getattr(holder, _COUNTS)(input_ids, embedding.padding_idx)
    return positions


_COUNTS = "create_position_ids_from_input_ids"


def packed_class(source: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of a model's class that embeds real tokens only."""
    forward: Any = source.forward
    if (source, forward) not in _classes:
        origin = sublayers.origin_of(source, (packed_class, (source,)))
        members = {
            "_trifuse_result": code.returned_class(forward),
            "_trifuse_replaces": models.replaced_by_calls(source),
        }
        _classes[source, forward] = sublayers.subclass(EmbedsRealTokens, origin, members)
    return _classes[source, forward]


_classes: dict[tuple[type[nn.Module], Any], type[nn.Module]] = {}
