"""Registers the name "trifuse" with transformers once both are imported, in either order.

A model that was fused in another process has "trifuse" in its configuration when it is unpickled
here, and a model may be loaded under that name after ``import trifuse`` alone. ``import trifuse``
does not import transformers: it registers the name when something else does. The registered
functions import :mod:`trifuse.huggingface` when first called.

transformers accepts a registered name for any model. So the method that checks the name is wrapped.
For the name "trifuse" only, a model that computes its attention itself raises an error that says
what to do, and a model that looks up its attention in a table of classes gets our class there.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from trifuse._imports import when_imported

NAME = "trifuse"


def register_when_imported() -> None:
    """Register ``NAME`` with transformers, now or as soon as transformers is imported."""
    when_imported("transformers.modeling_utils", _register)


def _register() -> None:
    with contextlib.suppress(ImportError):  # a version older than the attention interfaces
        from transformers.masking_utils import AttentionMaskInterface
        from transformers.modeling_utils import AttentionInterface, PreTrainedModel

        if NAME not in AttentionInterface._global_mapping:
            AttentionInterface.register(NAME, _attention_forward)
            AttentionMaskInterface.register(NAME, _attention_mask)
        guard(PreTrainedModel)


def guard(base: Any) -> None:
    """Make the base class of all models check at construction if a model can use the name."""
    checked = getattr(base, "get_correct_attn_implementation", None)
    if checked is None or hasattr(checked, "__wrapped__"):
        return  # this version has no check at construction, or it is wrapped already

    @functools.wraps(checked)
    def get_correct_attn_implementation(
        self: Any, requested_attention: str | None, *args: Any, **kwargs: Any
    ) -> str:
        if requested_attention == NAME:
            from trifuse.recipes.attention_interface import why_not

            if (reason := why_not(type(self))) is not None:
                raise ValueError(reason)
        chosen: str = checked(self, requested_attention, *args, **kwargs)
        return chosen

    base.get_correct_attn_implementation = get_correct_attn_implementation


def _attention_forward(*args: Any, **kwargs: Any) -> Any:
    from trifuse import huggingface

    return huggingface.attention_forward(*args, **kwargs)


def _attention_mask(*args: Any, **kwargs: Any) -> Any:
    from trifuse import huggingface

    return huggingface.attention_mask(*args, **kwargs)
