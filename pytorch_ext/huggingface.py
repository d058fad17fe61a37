"""trifuse's attention as an ``attn_implementation`` of Hugging Face transformers.

    import trifuse.huggingface

    trifuse.huggingface.register()
    model = AutoModel.from_pretrained(name, attn_implementation="trifuse")

``trifuse.fuse(model)`` does the same to an existing model, fuses more of it than its attention, and
with ``unpad=True`` makes it compute only on real tokens. This module imports transformers;
``import trifuse`` does not.

transformers builds the mask once per forward (``AttentionMaskInterface``) and hands it to every
layer's attention (``AttentionInterface``). This module implements both. The mask is one of

- None: every key takes part, or in a causal layer every key up to the query's position;
- a complete boolean or floating mask: built by transformers, passed by the caller, or the padding
  of a bidirectional layer as a (B, 1, 1, S) view of the 2-D mask;
- a uint8 mask: the padding, (B, 1, 1, S), of a causal layer, whose last query is aligned with its
  last key. The dtype marks the causality, so it survives whatever the model does to the tensor on
  the way, and no (B, 1, L, S) mask has to be built;
- a mask of a sliding window, (B, 1, reach + 2, S): the padding, repeated without a copy. It is
  uint8 in a causal layer, as above. It is int8 where a query attends to keys within the reach on
  both sides of its own position. Because the reach is a size, it is known without waiting for a
  device;
- a :class:`PackedSequences`, which a stack that computes only on real tokens passes to its layers.
  It holds where each sequence lies in the packed batch, and how far its tokens attend. For cross
  attention, a :class:`CrossSequences`.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import CausalVariant
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Cache,
    PreTrainedModel,
    masking_utils,
)
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

from trifuse._transformers import NAME, guard
from trifuse._transformers_versions import MASKS_BY_POSITIONS, bidirectional_mask_function
from trifuse.nn import packing
from trifuse.nn.packing import CrossSequences, PackedSequences
from trifuse.ops import _modes
from trifuse.ops.attention import scaled_dot_product_attention
from trifuse.recipes import arguments
from trifuse.recipes.attention_interface import (
    has_eager_masks,
    ignores_causality,
    mentioned,
    names_in,
    why_not_by_config,
)
from trifuse.written_out import split, split_mask


def register() -> None:
    """Register ``attn_implementation="trifuse"`` with transformers; a second call is harmless.

    From then on, a model that computes its attention itself cannot be constructed with this name
    (:func:`trifuse.recipes.attention_interface.why_not`). ``import trifuse`` does the same, as soon
    as transformers is imported too.
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
    guard(PreTrainedModel)


class Registration:
    """Registers the name when unpickled; a fused model holds one beside each configuration."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Pickle the class alone: unpickling it imports this module, which registers the name."""
        return Registration, ()


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | PackedSequences | CrossSequences | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer, as transformers' ``AttentionInterface`` calls it.

    Args:
        module: the layer; ``module.is_causal`` applies where ``is_causal`` is None.
        query: (B, H, Lq, E).
        key: (B, Hkv, Lk, E), H a multiple of Hkv.
        value: (B, Hkv, Lk, Ev).
        attention_mask: one of the masks in this module's docstring.
        dropout: probability of dropping a weight.
        scaling: multiplies q·k. Default: 1/√E.
        is_causal: whether the layer is causal; used only if ``attention_mask`` is None.
        position_bias: (1 or B, H, Lq, Lk), added to the scores; it may be a
            :class:`trifuse.written_out.DistanceBias`. For packed tokens, Lq and Lk are the lengths
            of the longest sequences.
        softcap: caps the scaled scores, before anything is added to them.
        s_aux: (H,), attention sinks, transformers' name for the argument ``sinks``.
        sliding_window: how many keys a query of a causal layer attends to, itself included. It is
            in the mask already, and read only in layers that read the keys of others: such a layer
            may get the last queries alone, and as many rows of the mask.
        **kwargs: other arguments that models pass. Those that are in the mask already, and those
            that do not concern the attention are ignored.

    Returns:
        (B, Lq, H, Ev), and None for the weights, which are never formed.

    Raises:
        ValueError: the layer needs a feature that changes the result and is not supported, or
            passes an argument that may be one.
    """
    wanted = _unsupported(module, s_aux, kwargs, attention_mask)
    if wanted is not None:
        raise ValueError(
            f'attn_implementation="{NAME}" does not support {wanted}; '
            f'use another, as "eager", for {type(module).__name__}'
        )
    causal: bool | CausalVariant
    position_bias, table = split(position_bias, query.dtype)
    attention_mask, indexed = split_mask(attention_mask, query.dtype)
    tables: dict[str, Any] = {"relative_bias": table, **indexed}
    if isinstance(attention_mask, (PackedSequences, CrossSequences)):
        causal = getattr(attention_mask, "causal", False)
        out = packing.attend(
            query,
            key,
            value,
            attention_mask,
            dropout,
            is_causal=is_causal_unmasked(module, is_causal) if causal is None else causal,
            scale=scaling,
            softcap=softcap,
            sinks=_sinks(s_aux, query),
            attn_mask=position_bias,
            relative_bias=table,
        )
        return out.transpose(1, 2), None
    if attention_mask is None and indexed:
        causal, window = False, None  # the biases are a complete mask
    elif attention_mask is None:
        # Under None, a causal layer has as many queries as keys, or a single query at their end, as
        # in decoding: otherwise the mask function returns a mask.
        causal, window = query.shape[2] > 1 and is_causal_unmasked(module, is_causal), None
    else:
        cuts_queries = getattr(module, "is_kv_shared_layer", False)
        attention_mask, causal, window = read_mask(
            attention_mask, sliding_window if cuts_queries else None
        )
    if position_bias is not None:
        attention_mask = _add_bias(position_bias, attention_mask)
    out = scaled_dot_product_attention(
        query,
        key,
        value,
        attention_mask,
        dropout,
        causal,
        scaling,
        enable_gqa=key.shape[1] != query.shape[1],
        window=window,
        softcap=softcap,
        sinks=_sinks(s_aux, query),
        **tables,
    )
    return out.transpose(1, 2), None


class ReadMask(NamedTuple):
    """A mask of this module's docstring, as attention takes it."""

    attn_mask: Tensor
    is_causal: CausalVariant | Literal[False]
    window: int | None


def read_mask(mask: Tensor, sliding_window: int | None = None) -> ReadMask:
    """Return what a mask means. Packed sequences have a separate class.

    Args:
        mask: one of the tensors in this module's docstring.
        sliding_window: the window of a layer whose mask may have lost the rows of its first
            queries; otherwise None.
    """
    if mask.dtype not in (torch.uint8, torch.int8):
        return ReadMask(mask, False, None)
    rows = mask.shape[2]
    window = rows - 2 if rows > 1 else None
    if sliding_window is not None and rows <= sliding_window:
        window = sliding_window - 1
    keys = _in_bytes(mask[:, :, :1], torch.bool)
    return ReadMask(keys, CausalVariant.LOWER_RIGHT if mask.dtype == torch.uint8 else False, window)


def _in_bytes(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask in another dtype of one byte.

    It is a copy where it is traced: ONNX has no view in another dtype.
    """
    return mask.to(dtype) if torch.compiler.is_compiling() else mask.view(dtype)


def is_causal_unmasked(module: nn.Module, is_causal: bool | None = None) -> bool:
    """Whether a layer that gets no mask is causal, by itself or by its argument."""
    causal: bool = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if causal and (config := getattr(module, "config", None)) is not None:
        causal = not ignores_causality(type(config), is_causal is not None)
    return causal


def _sinks(s_aux: Tensor | None, query: Tensor) -> Tensor | None:
    """The sinks in a dtype that the attention accepts; models may keep them in another dtype."""
    if s_aux is None or s_aux.dtype == query.dtype:
        return s_aux
    return s_aux.to(torch.float64 if query.dtype == torch.float64 else torch.float32)


# Models pass these to every attention, and "sdpa" and "eager" ignore them too: they are in the mask
# already, or they concern the model around the attention. A Cache under any name is harmless too.
_HARMLESS = arguments.OF_MODELS | {
    "block_indices",
    "cache_params",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "cu_seqlens",
    "deterministic",
    "encoder_attention_mask",
    "encoder_hidden_states",
    "indices",
    "is_causal",
    "layer_idx",
    "max_length_k",
    "max_length_q",
    "max_seqlen",
    "padding_mask",
    "past_key_value",
    "past_key_values",
    "position_embeddings",
    "seq_idx",
}
_NEVER_SERVED = {"cache", "output_attentions"}


def _unsupported(
    module: nn.Module,
    s_aux: Tensor | None,
    kwargs: dict[str, Any],
    mask: Tensor | PackedSequences | CrossSequences | None,
) -> str | None:
    """The name of an argument that changes the result and isn't served, or None."""
    formula = _formula(type(module))
    for name, parameter in module._parameters.items():
        if parameter is None or (s_aux is not None and name == "sinks"):
            continue
        if formula is not None and name in formula.refers_to:
            return name  # "eager" reads it from the layer, and it was not passed as an argument
    for name, value in kwargs.items():
        if name in _HARMLESS or value is None or value is False or isinstance(value, Cache):
            continue
        if formula is None or name in formula.takes or name in _NEVER_SERVED:
            return name
    lengths = kwargs.get("cu_seq_lens_q")
    if mask is None and isinstance(lengths, Tensor) and lengths.numel() > 2:
        return "cu_seq_lens_q without position_ids or a mask that keep the sequences apart"
    return None


class _Formula(NamedTuple):
    """The names that the "eager" attention of a layer uses."""

    takes: frozenset[str]  # its arguments, and the names that it refers to
    refers_to: frozenset[str]  # attributes of the layer, and names of functions


@torch.compiler.assume_constant_result
def _formula(layer: type[nn.Module]) -> _Formula | None:
    """Looks up the function that a layer's code names for "eager"; None if it names none."""
    key = layer, layer.forward
    if key not in _formulas:
        takes: set[str] = set()
        refers_to: set[str] = set()
        for _, value in mentioned(layer):
            if isinstance(value, types.FunctionType) and "eager" in value.__name__:
                takes.update(inspect.signature(value).parameters)
                refers_to.update(name for name, _ in names_in(value))
        found = _Formula(frozenset(takes | refers_to), frozenset(refers_to))
        _formulas[key] = found if takes else None
    return _formulas[key]


# By the class and its method, which may be replaced.
_formulas: dict[tuple[type, Any], _Formula | None] = {}


def _add_bias(position_bias: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return position_bias
    if mask.dtype == torch.bool:
        return torch.where(mask, position_bias, float("-inf"))
    return position_bias + mask


def attention_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    cache_position: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask of all layers, as transformers' ``AttentionMaskInterface`` calls it.

    A model gets the additive masks of "eager" if some of its layers compute their attention
    themselves, if it adds a bias to them, or if it doesn't declare support for "sdpa": its layers
    may then be marked causal without being so. For other models, padding under full, causal or
    windowed attention is returned as the padding alone. Everything else (chunks, packed sequences,
    static caches, the caller's own functions, windows under ``torch.compile``) is left to
    transformers' ``sdpa_mask``.

    Args:
        batch_size, q_length, kv_length: the sizes of the mask.
        q_offset, kv_offset: the position of the first query and the first key.
        cache_position: (q_length,), the positions of the queries. Older versions of transformers
            pass it instead of ``q_length`` and ``q_offset``.
        mask_function: which query positions attend to which key positions, padding aside.
        attention_mask: bool (B, positions), True where a token is real, or None.
        allow_is_causal_skip, allow_is_bidirectional_skip: whether less than the whole mask may be
            returned.
        **kwargs: further arguments of ``sdpa_mask``.

    Returns:
        One of the masks in this module's docstring.

    Raises:
        ValueError: the model adds the mask to scores itself.
    """
    if cache_position is not None:
        q_length = cache_position.shape[0]
        q_offset = _first(cache_position, kv_offset, kv_length)
        kwargs.setdefault("device", cache_position.device)
    assert q_length is not None
    others = kwargs | {
        "batch_size": batch_size,
        "kv_length": kv_length,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "allow_is_causal_skip": allow_is_causal_skip,
        "allow_is_bidirectional_skip": allow_is_bidirectional_skip,
    }
    if MASKS_BY_POSITIONS:
        others["cache_position"] = cache_position
    else:
        others |= {"q_length": q_length, "q_offset": q_offset}
    config = kwargs.get("config")
    if config is not None:
        if (reason := why_not_by_config(type(config))) is not None:
            raise ValueError(reason)
        if has_eager_masks(type(config)):
            return eager_mask(**others)
    # A layer that reads the keys of others may get the last queries alone. None would not say then
    # which keys they attend to.
    cuts_queries = q_length > 1 and bool(getattr(config, "num_kv_shared_layers", 0))
    others["allow_is_causal_skip"] = allow_is_causal_skip and not cuts_queries
    pattern = _pattern(mask_function)
    if pattern is None:
        return sdpa_mask(**others)
    causal, reach = pattern
    if reach is not None and reach >= max(q_length, kv_length) - 1:
        reach = None  # the window holds every key
    padding = _padding(attention_mask, kv_length, kv_offset)
    starts_together = isinstance(q_offset, int) and q_offset == kv_offset
    ends_together = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if not causal and allow_is_bidirectional_skip and reach is None:
        return None if padding is None else padding[:, None, None, :]
    if causal and allow_is_causal_skip and ends_together:
        # With None, a layer that can be bidirectional may or may not be causal.
        known = not (cuts_queries or getattr(config, "use_bidirectional_attention", False))
        if reach is padding is None and (q_length == 1 or (q_length == kv_length and known)):
            return None
    elif causal or not allow_is_bidirectional_skip or not starts_together:
        return sdpa_mask(**others)
    if padding is None:
        device = kwargs.get("device", "cpu")
        padding = torch.ones((1, kv_length), dtype=torch.bool, device=device)
    marked = _in_bytes(padding[:, None, None, :], torch.uint8 if causal else torch.int8)
    return marked if reach is None else marked.expand(-1, -1, reach + 2, -1)


class _Pattern(NamedTuple):
    """The pairs of a query and a key that a mask lets through, padding aside."""

    causal: bool
    reach: int | None = None  # how far a query attends (both sides unless causal); None: no limit


def _pattern(mask_function: Callable[..., Any]) -> _Pattern | None:
    """Recognise a mask function of transformers; return None for others.

    A window is held in the variables of a nested function. ``torch.compile`` can't read these.
    """
    if mask_function is bidirectional_mask_function:
        return _Pattern(causal=False)
    if mask_function is causal_mask_function:
        return _Pattern(causal=True)
    if torch.compiler.is_compiling() or not _has_code_of(mask_function, masking_utils.and_masks):
        return None
    parts = inspect.getclosurevars(mask_function).nonlocals["mask_functions"]
    for causal, name, base in _WINDOWS:
        make = getattr(masking_utils, name, None)  # older versions lack one
        known = make is not None and len(parts) == 2 and parts[1] is base
        if known and _has_code_of(parts[0], make):
            window = inspect.getclosurevars(parts[0]).nonlocals["sliding_window"]
            return _Pattern(causal, window - 1 if causal else window)
    return None


# Whether a window is causal, the function that makes it, and the one that it is intersected with.
_WINDOWS = (
    (True, "sliding_window_overlay", causal_mask_function),
    (False, "sliding_window_bidirectional_overlay", bidirectional_mask_function),
)


def _has_code_of(function: Any, maker: Any) -> bool:
    """Whether a function is one of those that ``maker`` defines and returns."""
    block = getattr(function, "__code__", None)
    return block is not None and block in maker.__code__.co_consts


def _first(positions: Tensor, kv_offset: int, kv_length: int) -> int | Tensor:
    """The first position: an int where reading it does not wait for a device."""
    if positions.shape[0] == kv_length:  # as many queries as keys
        return kv_offset
    return int(positions[0]) if _modes.is_readable(positions) else positions[0]


def _padding(attention_mask: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    """The padding of the keys, (B, kv_length), or None where nothing is padded.

    A mask that is all True is recognised only where it can be read.
    """
    if attention_mask is None:
        return None
    padding = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    if padding.shape[1] < kv_length:
        padding = nn.functional.pad(padding, (0, kv_length - padding.shape[1]))
    return None if _modes.is_known_nonzero(padding) else padding


# Importing this module, if only by unpickling, registers the name.
AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, attention_mask)
