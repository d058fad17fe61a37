"""Names and interfaces that differ between transformers 4.57 and the versions from 5 on.

This module checks what the installed version has, never its number. No other module does that.
"""

from __future__ import annotations

import inspect
from typing import Any

import transformers.configuration_utils
from transformers import cache_utils, masking_utils

# 4.57 has only PretrainedConfig; in later versions that is an alias of PreTrainedConfig.
PreTrainedConfig = transformers.configuration_utils.PretrainedConfig


def _every_pair(batch_idx: int, head_idx: int, q_idx: int, kv_idx: int) -> bool:
    """The mask function of a bidirectional layer. In 4.57 the models make such masks themselves."""
    return q_idx >= 0


bidirectional_mask_function = getattr(masking_utils, "bidirectional_mask_function", _every_pair)

# Whether masks are made from the positions of the queries, or from their number and the first.
MASKS_BY_POSITIONS = "cache_position" in inspect.signature(masking_utils.sdpa_mask).parameters


def initialize_cache_layer(layer: Any, states: Any) -> None:
    """Prepare a layer of a cache for keys and values of the sizes and type of ``states``."""
    if _LAYERS_TAKE_BOTH:
        layer.lazy_initialization(states, states)
    else:
        layer.lazy_initialization(states)


# 4.57's layers are initialised with the keys only.
_LAYERS_TAKE_BOTH = (
    "value_states" in inspect.signature(cache_utils.CacheLayerMixin.lazy_initialization).parameters
)
