"""Registers the name "trifuse" with transformers once both are imported, in either order.

A model that was fused in another process has "trifuse" in its configuration when it is unpickled
here, and a model may be loaded under that name after ``import trifuse`` alone. ``import trifuse``
does not import transformers: it registers the name when something else does. The registered
functions import :mod:`trifuse.huggingface` when first called, and transformers is not patched.
"""

from __future__ import annotations

import contextlib
from typing import Any

from trifuse._imports import when_imported

NAME = "trifuse"


def register_when_imported() -> None:
    """Register ``NAME`` with transformers, now or as soon as transformers is imported."""
    when_imported("transformers.modeling_utils", _register)


def _register() -> None:
    with contextlib.suppress(ImportError):  # a version older than the attention interfaces
        from transformers.masking_utils import AttentionMaskInterface
        from transformers.modeling_utils import AttentionInterface

        if NAME not in AttentionInterface._global_mapping:
            AttentionInterface.register(NAME, _attention_forward)
            AttentionMaskInterface.register(NAME, _attention_mask)


def _attention_forward(*args: Any, **kwargs: Any) -> Any:
    from trifuse import huggingface

    return huggingface.attention_forward(*args, **kwargs)


def _attention_mask(*args: Any, **kwargs: Any) -> Any:
    from trifuse import huggingface

    return huggingface.attention_mask(*args, **kwargs)
