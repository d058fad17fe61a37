"""Models of transformers with BERT's code, which run in few steps around their encoder.

transformers wraps a model's ``forward`` in functions that look up options in the configuration,
and makes its mask through several others. With one short sentence these take as long as the
computation of a layer. A call that requests only the result of the model needs none of them. A
model is recognised if its ``forward``, and the method that makes its masks, have the statements of
BERT's, in the installed version of transformers.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from trifuse._transformers import NAME
from trifuse.nn.linear import is_intercepted
from trifuse.ops import _modes
from trifuse.recipes import code, layers, sublayers


class Direct(nn.Module):
    """The first base of every class of such models; the second is its source."""

    _trifuse_replaces: tuple[Any, Any]  # the methods that a plain call skips, as they were read

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """As the source's own."""
        if _is_plain(self, input_ids, attention_mask, args, kwargs):
            return _run(self, input_ids, attention_mask, token_type_ids, position_ids)
        return super().forward(
            input_ids, attention_mask, token_type_ids, position_ids, *args, **kwargs
        )


def _is_plain(
    model: Any, words: Any, mask: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether a call in inference has words, at most a mask of padding, and no further requests."""
    if not isinstance(words, Tensor) or words.dim() != 2 or torch.compiler.is_compiling():
        return False
    if model.training:
        return False
    if mask is not None and not (isinstance(mask, Tensor) and mask.shape == words.shape):
        return False
    for value in args:
        if value is not None:
            return False
    for name, value in kwargs.items():
        if not (value is None or value is (name == "return_dict")):
            return False
    cls = type(model)
    if cls._trifuse_replaces != (super(Direct, cls).forward, getattr(cls, _MASKS, None)):
        return False
    # Read as a dictionary, because each access of a configuration's attribute runs Python code.
    config = model.config.__dict__
    for name, expected in _CONFIG:
        if config.get(name, expected) is not expected:
            return False
    return config.get("_attn_implementation_internal") == NAME and "is_causal" not in config


# A model with this configuration returns only its last hidden state and pooled output.
_CONFIG = (
    ("is_decoder", False),
    ("output_hidden_states", False),
    ("_output_attentions", False),
    ("return_dict", True),
)


def _run(model: Any, words: Any, padding: Any, types: Any, positions: Any) -> Any:
    mask = None if padding is None else _mask(padding, words.device)
    embedded = model.embeddings(input_ids=words, token_type_ids=types, position_ids=positions)
    # The encoder would wrap its result in an object.
    encoder = model.encoder
    hidden = None if is_intercepted(encoder) else layers.run_all(encoder, embedded, mask)
    if hidden is None:
        hidden = encoder(embedded, attention_mask=mask).last_hidden_state
    pooled = None if model.pooler is None else model.pooler(hidden)
    return _output(model._trifuse_result, last_hidden_state=hidden, pooler_output=pooled)


def _mask(padding: Tensor, device: torch.device) -> Tensor | None:
    """Return what :func:`trifuse.huggingface.attention_mask` returns for the padding of a model."""
    padding = padding.to(device)
    return None if _modes.is_known_nonzero(padding) else padding.bool()[:, None, None, :]


def _output(cls: Any, **values: Tensor | None) -> Any:
    """Return ``cls(**values)``, a ModelOutput, without its checks of each field.

    The first object of a class is made by ``cls`` itself, and decides whether the quick way gives
    an equal one.
    """
    fields = _fields.get(cls)
    if fields is None:
        made = cls(**values)
        names = tuple(vars(made))
        quick = _made_quickly(cls, names, values)
        same = _are_same(vars(quick), vars(made)) and _are_same(dict(quick), dict(made))
        _fields[cls] = names if same else ()
        return made
    return _made_quickly(cls, fields, values) if fields else cls(**values)


# By class, the names of all its fields; none if its objects must be made by the class.
_fields: dict[type, tuple[str, ...]] = {}


def _are_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two dictionaries have the same keys, in one order, and hold the same objects."""
    return list(one) == list(other) and all(one[name] is other[name] for name in one)


def _made_quickly(cls: Any, fields: tuple[str, ...], values: dict[str, Tensor | None]) -> Any:
    out = cls.__new__(cls)
    attributes = vars(out)
    for name in fields:
        value = attributes[name] = values.get(name)
        if value is not None:
            OrderedDict.__setitem__(out, name, value)
    return out


def is_berts(model: nn.Module) -> bool:
    """Whether a model has BERT's code, and layers that run in one call."""
    cls: Any = sublayers.original(type(model))
    return isinstance(getattr(model, "encoder", None), layers.OneCall) and _has_berts_code(cls)


def _has_berts_code(cls: Any) -> bool:
    if not sublayers.is_of_transformers(cls) or not hasattr(cls, _MASKS):
        return False
    berts = code.modeling("bert").BertModel
    # In versions whose `forward` takes these options, it reads them itself.
    options = inspect.signature(inspect.unwrap(berts.forward)).parameters
    if not hasattr(berts, _MASKS) or "output_hidden_states" in options:
        return False
    if list(inspect.signature(inspect.unwrap(cls.forward)).parameters)[:5] != _ARGUMENTS:
        return False
    return code.same_methods(cls, berts, "forward", _MASKS)


_ARGUMENTS = ["self", "input_ids", "attention_mask", "token_type_ids", "position_ids"]


_MASKS = "_create_attention_masks"


def direct_class(source: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of a model's class that serves plain calls in few steps."""
    if source not in _classes:
        origin = sublayers.origin_of(source, (direct_class, (source,)))
        forward: Any = source.forward
        members = {
            "_trifuse_result": code.returned_class(forward),
            "_trifuse_replaces": (forward, getattr(source, _MASKS, None)),
        }
        _classes[source] = sublayers.subclass(Direct, origin, members)
    return _classes[source]


_classes: dict[type[nn.Module], type[nn.Module]] = {}
