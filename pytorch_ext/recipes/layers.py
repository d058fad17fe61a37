"""Encoder layers of transformers whose code is BERT's, which run as one op in inference.

So do all layers of an encoder, one after another, in one call; on a GPU also in training
(:mod:`trifuse.nn.post_norm`).

transformers copies BERT's layer under other names into many families: RoBERTa, XLM-R, ELECTRA,
CamemBERT, ERNIE. It copies LayoutLM's layer, which is BERT's without the parts for decoders, into
others. A layer is recognised if the methods of its modules have the statements of one of the two,
in the installed version of transformers.
"""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trifuse._transformers import NAME
from trifuse.nn import encoder_layer, plans, post_norm
from trifuse.recipes import arguments, code, sublayers


class OneOp(nn.Module):
    """Mixin for fused classes of such layers, before the original class in their bases.

    Decoders, cross attention, caches, and arguments that BERT's encoder doesn't pass to its layers
    run as in transformers.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Same signature as the original class's forward."""
        if not torch.compiler.is_compiling():
            given = arguments.by_name(self, args, kwargs) or {}
            x, mask = given.pop(arguments.HIDDEN_STATES, None), given.pop(arguments.MASK, None)
            own = _CHUNK in vars(self)
            if isinstance(x, Tensor) and not own and arguments.are_plain((), given):
                out = encoder_layer.run(self, x, mask, _parts)
                if out is not None:
                    return out
        forward: Any = super().forward
        return forward(*args, **kwargs)


class OneCall(nn.Module):
    """Mixin for fused classes of encoders whose layers run in one call."""

    _trifuse_source_forward: Any  # the original class's forward, when its code was compared

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Same signature as the original class's forward."""
        cls: Any = type(self)
        out = run_all(self, hidden_states, attention_mask, *args, **kwargs)
        if out is not None:
            return cls._trifuse_result(last_hidden_state=out)
        return super().forward(hidden_states, attention_mask, *args, **kwargs)


def run_all(
    encoder: Any, hidden_states: Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any
) -> Tensor | None:
    """Return the result of an encoder's layers for the arguments of the first; None if unsupported.

    Args:
        encoder: a module with BERT's layers as its ``layer``.
        hidden_states, attention_mask, args, kwargs: as its layers take them.
    """
    if not arguments.are_plain(args, kwargs) or not _only_runs_layers(encoder):
        return None
    return encoder_layer.run_all(encoder._modules["layer"], hidden_states, attention_mask, _parts)


def _only_runs_layers(encoder: Any) -> bool:
    """Whether neither an encoder's class nor a layer has got other code since they were read."""
    cls = type(encoder)
    if issubclass(cls, OneCall) and super(OneCall, cls).forward is not cls._trifuse_source_forward:
        return False
    return not any(_CHUNK in vars(layer) for layer in encoder._modules["layer"]._modules.values())


_CHUNK = "feed_forward_chunk"


class Fixed(NamedTuple):
    """The layers of an encoder, for which :func:`run_all` passes the same tensors in every call."""

    layers: encoder_layer.Fixed
    values: tuple[plans.PlannedValue, ...]  # that must hold beside those of the layers


def fixed(encoder: Any) -> Fixed | None:
    """Return the layers of an encoder in evaluation mode; None if their tensors may change."""
    if not isinstance(encoder, nn.Module) or "layer" not in encoder._modules:
        return None
    cls: Any = sublayers.original(type(encoder))
    runs_layers = isinstance(encoder, OneCall) or _has_berts_loop(cls, cls.forward)
    if not runs_layers or not _only_runs_layers(encoder):
        return None
    layers: Any = encoder._modules["layer"]
    found = encoder_layer.fixed(layers, _parts)
    if found is None:
        return None
    absent = [(vars(layer), _CHUNK) for layer in layers._modules.values()]
    return Fixed(found, plans.present_values(absent))


def run_post_norm(
    encoder: Any, hidden_states: Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any
) -> Tensor | None:
    """As :func:`run_all`, on a GPU, in training too.

    Args:
        encoder: any stack.
        hidden_states, attention_mask, args, kwargs: as its layers take them.
    """
    layers = _post_norm_layers(encoder)
    if layers is None or not arguments.are_plain(args, kwargs):
        return None
    return post_norm.run_all(layers, hidden_states, attention_mask, _parts)


def may_run_post_norm(encoder: Any, device: torch.device) -> bool:
    """Whether :func:`run_post_norm` serves plain calls on a device, including packed tokens."""
    layers = _post_norm_layers(encoder)
    return layers is not None and post_norm.may_run_all(layers, device, _parts)


def _post_norm_layers(encoder: Any) -> nn.ModuleList | None:
    """The layers of an encoder whose loop over them is BERT's, or None."""
    if torch.compiler.is_compiling():
        return None
    layers = encoder._modules.get("layer")
    cls: Any = sublayers.original(type(encoder))
    if not isinstance(layers, nn.ModuleList) or not _has_berts_loop(cls, cls.forward):
        return None
    return None if vars(encoder).get("gradient_checkpointing") else layers


def _attention(layer: nn.Module) -> Any:
    """The self-attention; None if the module that held it has been replaced."""
    holder = layer._modules.get("attention")
    return None if holder is None else holder._modules.get("self")


def _chosen(attention: nn.Module | None) -> Any:
    """The name of the attention, without the code that transformers runs on each config access."""
    config = getattr(attention, "__dict__", {}).get("config")
    chosen = getattr(config, "__dict__", {}).get("_attn_implementation_internal")
    return getattr(config, "_attn_implementation", None) if chosen is None else chosen


# The modules of a layer by their paths: the endings of their class names, and the methods that
# define what they compute.
_STRUCTURE = {
    "": ("Layer", ("forward", _CHUNK)),
    "attention": ("Attention", ("forward",)),
    "attention.self": ("SelfAttention", ("forward",)),
    "attention.output": ("SelfOutput", ("forward",)),
    "intermediate": ("Intermediate", ("forward",)),
    "output": ("Output", ("forward",)),
}
_MODELS = ("bert", "layoutlm")


def why_not(layer: nn.Module) -> str | None:
    """Return why a layer with BERT's code can't run as one op; None if it can."""
    return encoder_layer.why_not(layer, _parts)


def is_berts(layer: nn.Module) -> bool:
    """Whether the code of a layer and of the modules in it is that of BERT or LayoutLM."""
    if not hasattr(layer, _CHUNK) or not _takes_mask_second(layer):
        return False
    if not sublayers.is_of_transformers(sublayers.original(type(layer))):
        return False
    try:
        parts = {path: _source(type(layer.get_submodule(path))) for path in _STRUCTURE}
    except AttributeError:
        return False
    return any(_is_like(parts, model) for model in _MODELS)


def _is_like(parts: dict[str, type], model: str) -> bool:
    """Whether the parts of a layer have the code of a given model."""
    modeling = code.modeling(model)
    layer = next(name for name in vars(modeling) if name.lower() == f"{model}layer")
    prefix = layer.removesuffix("Layer")
    for path, (name, methods) in _STRUCTURE.items():
        like = getattr(modeling, prefix + name)
        if not code.same_methods(parts[path], like, *methods):
            return False
    # Older versions of transformers return a tuple.
    body = code.body(vars(parts[""])["forward"])
    return body is not None and re.search(r"return \w+$", body) is not None


def is_berts_encoder(encoder: nn.Module) -> bool:
    """Whether the code of an encoder is BERT's or LayoutLM's, and its layers run as one op."""
    layers = encoder._modules.get("layer")
    if not isinstance(layers, nn.ModuleList) or not all(isinstance(each, OneOp) for each in layers):
        return False
    cls: Any = sublayers.original(type(encoder))
    return _has_berts_loop(cls, cls.forward) and _takes_mask_second(encoder)


def _takes_mask_second(module: nn.Module) -> bool:
    """Whether the first two arguments of a module are those of BERT's layers and encoder."""
    return arguments.of(module).positional[:2] == [arguments.HIDDEN_STATES, arguments.MASK]


@functools.cache
def _has_berts_loop(cls: type, forward: Any) -> bool:
    """Whether an encoder's class only calls its layers one after another.

    Args:
        cls: the class.
        forward: its method, which may be replaced later.
    """
    if not sublayers.is_of_transformers(cls):
        return False
    return any(code.same_methods(cls, _encoder(model), "forward") for model in _MODELS)


def _encoder(model: str) -> type:
    modeling = code.modeling(model)
    name = next(name for name in vars(modeling) if name.lower() == f"{model}encoder")
    found: type = getattr(modeling, name)
    return found


def one_call_class(source: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of an encoder's class whose layers can run in one call."""
    if source not in _classes:
        origin = sublayers.Origin(source, (one_call_class, (source,)))
        forward: Any = source.forward
        members = {
            "_trifuse_result": code.returned_class(forward),
            "_trifuse_source_forward": forward,
        }
        _classes[source] = sublayers.subclass(OneCall, origin, members)
    return _classes[source]


def one_op_class(source: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of a layer's class that can run as one op."""
    if source not in _classes:
        origin = sublayers.Origin(source, (one_op_class, (source,)))
        _classes[source] = sublayers.subclass(OneOp, origin, {})
    return _classes[source]


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _parts(layer: Any) -> encoder_layer.Parts | None:
    attention = _attention(layer)
    if (
        attention is None
        or not is_berts(layer)  # its code may have been replaced since it was swapped
        or _chosen(attention) != NAME
        or getattr(layer, "is_decoder", False)
        or layer.chunk_size_feed_forward
    ):
        return None
    activation = sublayers.name_of(layer.intermediate.intermediate_act_fn)
    chunking = sublayers.chunking_of(_source(type(layer)))
    if activation is None or chunking is None:
        return None
    ends = layer.attention.output, layer.output
    owned = (
        (attention.config, "_attn_implementation_internal"),
        (attention, "is_causal"),
        (attention, "scaling"),
        (attention, "num_attention_heads"),
        (layer, "is_decoder"),
        (layer, "chunk_size_feed_forward"),
    )
    return encoder_layer.Parts(
        (attention.query, attention.key, attention.value),
        ends[0].dense,
        layer.intermediate.dense,
        ends[1].dense,
        (ends[0].LayerNorm, ends[1].LayerNorm),
        (ends[0].dropout, ends[1].dropout),
        attention.num_attention_heads,
        attention.scaling,
        activation,
        # Without an attribute `is_causal`, an attention is causal if it gets no mask.
        needs_mask=getattr(attention, "is_causal", True),
        attributes=(
            (type(layer), _CHUNK),
            *chunking,
            *((owner, name) for owner, name in owned if name in vars(owner)),
        ),
        attention_dropout=(attention, attention.dropout, "p"),
    )


def _source(cls: type) -> type:
    """The class of transformers that a fused class serves."""
    cls = sublayers.original(cls)
    return cls.__mro__[1] if cls.__module__ == "trifuse.huggingface" else cls
