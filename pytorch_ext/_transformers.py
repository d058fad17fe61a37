"""transformers knows the name "trifuse" wherever trifuse is imported too, in either order.

A model that was fused in another process and unpickled in this one says "trifuse" in its
configuration, and so may one that someone loads after ``import trifuse`` alone. ``import trifuse``
imports no transformers: it waits for whoever does. What is registered then imports
:mod:`trifuse.huggingface` when it is first called, and nothing of transformers is changed.
"""

from __future__ import annotations

import contextlib
from typing import Any

from trifuse._imports import when_imported

NAME = "trifuse"


def register_when_imported() -> None:
    """Make ``NAME`` known to transformers, now or as soon as it is imported."""
    when_imported("transformers.modeling_utils", _register)


def _register() -> None:
    with contextlib.suppress(ImportError):  # a version from before there were interfaces
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
