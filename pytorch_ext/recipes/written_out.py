"""Attentions of transformers that compute their own softmax, recognised by names in their code.

BLOOM, MPT, Falcon, GPT-Neo, XGLM, MPNet, DeBERTa and RemBERT, for example, don't choose their
attention by ``attn_implementation``. A subclass of each runs the same ``forward`` inside
``trifuse.attention()``, where the written-out attention becomes one call. With packed tokens it
gets a :class:`trifuse.written_out.PackedTerm` as its mask, which represents the mask of all their
pairs.
"""

from __future__ import annotations

import re
import sys
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from trifuse.attention_mode import attention
from trifuse.recipes import arguments, code, sublayers
from trifuse.recipes.arguments import BIAS
from trifuse.written_out import Packed, PackedTerm, attended


class WrittenOut(nn.Module):
    """Mixin for fused classes of such attentions, before the original class in their bases."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Takes the original forward's arguments. Runs unfused if the weights are requested."""
        if torch.compiler.is_compiling() or _wants_weights(self, args, kwargs):
            return super().forward(*args, **kwargs)
        args, kwargs = _with_terms(self, args, kwargs)
        before = attended()
        with attention():
            out = super().forward(*args, **kwargs)
        _served[self] = attended() > before
        return tuple(map(_bias_of, out)) if type(out) is tuple else out


# Whether the last call of an attention ran as one call of the operator.
_served: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def has_served(module: nn.Module) -> None:
    """Note that the last call of an attention ran as one call of the operator."""
    _served[module] = True


def _with_terms(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with terms of the scores in place of packed sequences and a bias."""
    names = arguments.of(module).positional[: len(args)]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    packed = [value for value in given.values() if isinstance(value, Packed)]
    if not packed or len(names) < len(args):
        return args, kwargs
    tokens = next(value for value in given.values() if isinstance(value, Tensor))
    for name, value in given.items():
        if isinstance(value, Packed):
            given[name] = PackedTerm.of(value, None, tokens.dtype, tokens.device)
        elif name == BIAS and isinstance(value, Tensor):
            given[name] = PackedTerm.of(packed[0], value, value.dtype, value.device)
    return tuple(given.pop(name) for name in names), given


def _bias_of(returned: Any) -> Any:
    """Return an attention's bias from its result, if it was passed as a term of the scores."""
    return returned.bias if isinstance(returned, PackedTerm) else returned


def note(module: nn.Module) -> str | None:
    """Return what may not run fused in such an attention; None if its last call ran fused."""
    if not isinstance(module, WrittenOut):
        return None
    if module not in _served:
        return "as far as its products and softmax are recognised when they run"
    return None if _served[module] else "its last call computed the softmax by its own code"


def _wants_weights(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the attention weights are results: by an argument, or by hooks that record them."""
    if kwargs.get("output_attentions"):
        return True
    if any(arg is True for arg in args):
        names = arguments.of(module).positional
        wishes = [name for name, arg in zip(names, args, strict=False) if arg is True]
        if len(args) > len(names) or any(name not in _OTHER_WISHES for name in wishes):
            return True
    capturing = sys.modules.get("transformers.utils.output_capturing")
    active = getattr(capturing, "_active_collector", None)
    return active is not None and "attentions" in (active.get() or {})


_OTHER_WISHES = {"interpolate_pos_encoding", "use_cache"}


def writes_out(module: nn.Module) -> bool:
    """Whether a module of transformers is an attention that computes its softmax itself."""
    cls = sublayers.original(type(module))
    return sublayers.is_of_transformers(cls) and computes_softmax(cls)


def computes_softmax(cls: type) -> bool:
    """Whether a class is an attention that computes its softmax itself."""
    return computed_by(cls) == SOFTMAX


def all_written_out(model: nn.Module) -> bool:
    """Whether a model has attentions, and all of them compute their softmax themselves."""
    kinds = {computed_by(sublayers.original(type(module))) for module in model.modules()} - {None}
    return kinds == {SOFTMAX}


def computed_by(cls: type) -> str | None:
    """Return how an attention computes: by ``INTERFACE``, ``SOFTMAX`` or ``FUNCTION``.

    None if the code of its class uses none of these, or if its name isn't that of an attention.
    """
    key = cls, getattr(cls, "forward", None)
    if key not in _computed_by:
        names = _names_used(cls) if names_attention(cls) else frozenset()
        kinds = (kind for name, kind in _KINDS.items() if name in names)
        _computed_by[key] = next(kinds, None)
    return _computed_by[key]


# Keyed by the class and its method, which may be replaced.
_computed_by: dict[tuple[type, Any], str | None] = {}


def _names_used(cls: type) -> frozenset[str]:
    """Return the names that a class uses, including those in the functions of its own table.

    ModernBERT has such a table in transformers 4.57.
    """
    names = code.names_used(cls)
    held = vars(sys.modules[cls.__module__]) if cls.__module__ in sys.modules else {}
    for name in names:
        table = held.get(name)
        if isinstance(table, dict) and isinstance(function := table.get("eager"), FunctionType):
            names = names | set(function.__code__.co_names)
    return names


INTERFACE = "transformers' table of attentions"
SOFTMAX = "a softmax of its own"
FUNCTION = "a function that computes all of it"
_KINDS = {
    "ALL_ATTENTION_FUNCTIONS": INTERFACE,
    "softmax": SOFTMAX,
    "Softmax": SOFTMAX,
    "scaled_dot_product_attention": FUNCTION,
    "eager_attention_forward": FUNCTION,
}


def names_attention(cls: type) -> bool:
    """Whether a class's name is that of an attention."""
    return re.search("atten|attn", cls.__name__, re.IGNORECASE) is not None


def written_out_class(source: Any) -> type[nn.Module]:
    """Return the subclass of an attention's class that runs inside ``trifuse.attention()``."""
    if source not in _classes:
        origin = sublayers.origin_of(source, (written_out_class, (source,)))
        _classes[source] = sublayers.subclass(WrittenOut, origin, {})
    return _classes[source]


_classes: dict[type[nn.Module], type[nn.Module]] = {}
