"""trifuse's attention as an ``attn_implementation`` of Hugging Face transformers.

    import trifuse.huggingface

    trifuse.huggingface.register()
    model = AutoModel.from_pretrained(name, attn_implementation="trifuse")

``trifuse.fuse(model)`` does the same to a model that exists already, fuses more of BERT than its
attention, and with ``unpad=True`` makes it compute on real tokens only. This module imports
transformers; ``import trifuse`` does not.

transformers builds the mask once per forward (``AttentionMaskInterface``) and hands it to every
layer's attention (``AttentionInterface``). Both ends are here, and between them travels one of

- None: every key takes part, or the causal ones where the layer says that it is causal;
- a boolean or floating mask, complete in itself: what transformers' own builder makes, what the
  caller passed, or the padding of a bidirectional layer as a (B, 1, 1, S) view of the 2-D mask;
- a uint8 mask: the padding, (B, 1, 1, S), of a layer that is causal besides, its last query beside
  its last key. The dtype carries the causality, so that it survives whatever a model does to the
  tensor on the way, and no (B, 1, L, S) mask has to be built;
- from a :class:`BertModel` to its layers: where the sequences lie in the packed batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import CausalVariant
from transformers import AttentionInterface, AttentionMaskInterface, modeling_utils
from transformers.activations import GELUActivation, GELUTanh
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions
from transformers.models.bert import modeling_bert

from trifuse.nn import bert, packing
from trifuse.nn.dropout_add_layer_norm import add_norm
from trifuse.nn.linear import is_watched, linear_activation
from trifuse.nn.packing import Obstacle, PackedSequences
from trifuse.ops.attention import scaled_dot_product_attention
from trifuse.ops.linear import Activation

NAME = "trifuse"


def register() -> None:
    """Make ``attn_implementation="trifuse"`` known to transformers; again is harmless."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | PackedSequences | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer, as transformers' ``AttentionInterface`` calls it.

    Args:
        module: the layer; ``module.is_causal`` holds where ``is_causal`` is None.
        query: (B, H, Lq, E).
        key: (B, Hkv, Lk, E), H a multiple of Hkv.
        value: (B, Hkv, Lk, Ev).
        attention_mask: one of those in this module's docstring.
        dropout: probability of dropping a weight.
        scaling: multiplies q·k. Default: 1/√E.
        is_causal: whether the layer is causal, where the mask doesn't say.
        position_bias: (1 or B, H, Lq, Lk), added to the scores.
        **kwargs: what else models pass. ``sliding_window`` is in the mask already.

    Returns:
        (B, Lq, H, Ev), and None for the weights, which are never formed.

    Raises:
        ValueError: the layer wants something that changes the result and is not supported.
    """
    for name in ("softcap", "s_aux", "cache", "output_attentions"):
        if not (kwargs.get(name) is None or kwargs[name] is False):
            raise ValueError(
                f'attn_implementation="{NAME}" does not support {name}; '
                f"use another for {type(module).__name__}"
            )
    if isinstance(attention_mask, PackedSequences):
        out = packing.attend(query, key, value, attention_mask, dropout, scale=scaling)
        return out.transpose(1, 2), None
    causal: bool | CausalVariant
    if attention_mask is None:
        # Queries that stand at the end of the keys, as in decoding, are one at a time here: where
        # there are more, the mask function says so through the mask.
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        causal = causal and query.shape[2] > 1
    elif attention_mask.dtype == torch.uint8:
        causal = CausalVariant.LOWER_RIGHT
        attention_mask = attention_mask.view(torch.bool)
    else:
        causal = False
    if position_bias is not None:
        attention_mask = _biased(position_bias, attention_mask)
    out = scaled_dot_product_attention(
        query,
        key,
        value,
        attention_mask,
        dropout,
        causal,
        scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    return out.transpose(1, 2), None


def _biased(position_bias: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return position_bias
    if mask.dtype == torch.bool:
        return torch.where(mask, position_bias, float("-inf"))
    return position_bias + mask


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """The mask of all layers, as transformers' ``AttentionMaskInterface`` calls it.

    What padding with full or causal attention can say is said with the padding alone. Everything
    else (sliding windows, chunks, packed sequences, static caches, the caller's own functions) is
    left to transformers' ``sdpa_mask``.

    Args:
        batch_size, q_length, kv_length: the sizes of the mask.
        q_offset, kv_offset: the position of the first query and the first key.
        mask_function: says which query positions see which key positions, padding aside.
        attention_mask: bool (B, positions), True where a token is real, or None.
        allow_is_causal_skip, allow_is_bidirectional_skip: whether less than the whole mask will do.
        **kwargs: as ``sdpa_mask`` takes them.

    Returns:
        One of those in this module's docstring.
    """
    if mask_function is bidirectional_mask_function and allow_is_bidirectional_skip:
        padding = _padding(attention_mask, kv_length, kv_offset)
        return None if padding is None else padding[:, None, None, :]
    if (
        mask_function is causal_mask_function
        and allow_is_causal_skip
        and isinstance(q_offset, int)
        and q_offset + q_length == kv_offset + kv_length
    ):
        padding = _padding(attention_mask, kv_length, kv_offset)
        if padding is not None:
            return padding[:, None, None, :].view(torch.uint8)
        if q_length == 1 or q_length == kv_length:
            return None
        device = kwargs.get("device", "cpu")
        return torch.ones((1, 1, 1, kv_length), dtype=torch.uint8, device=device)
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        **kwargs,
    )


def _padding(attention_mask: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    """The padding of the keys, (B, kv_length), or None where nothing is padded.

    Whether it is all True is only asked where the answer costs no wait for a device.
    """
    if attention_mask is None:
        return None
    padding = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    if padding.shape[1] < kv_length:
        padding = nn.functional.pad(padding, (0, kv_length - padding.shape[1]))
    readable = padding.device.type == "cpu" and not torch.compiler.is_compiling()
    return None if readable and bool(padding.all()) else padding


# BERT -------------------------------------------------------------------------------------------


class BertModel(modeling_bert.BertModel):
    """transformers' BERT, which embeds and encodes real tokens only.

    Where the batch is padded, its real tokens are packed into one row, and the padding of the last
    hidden state comes back as 0. Decoders, cross attention, other attention implementations and
    calls that ask for more than the last hidden state and the pooled output run as they would
    without this.
    """

    unpad = True

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As transformers' own."""
        if (
            input_ids is None
            or attention_mask is None
            or attention_mask.shape != input_ids.shape
            or self.config.is_decoder
            or self.config.output_hidden_states
            or self.config._attn_implementation != NAME
            or any(value for name, value in kwargs.items() if name != "return_dict")
            or (packed := _pack(self, attention_mask.bool())) is None
        ):
            # The encoder may still pack what it is given, and says why where it doesn't.
            return super().forward(
                input_ids, attention_mask, token_type_ids, position_ids, **kwargs
            )
        tokens = bert.embed_packed(self.embeddings, packed, input_ids, token_type_ids, position_ids)
        tokens = self.encoder(tokens, attention_mask=packed).last_hidden_state
        shape = torch.Size((*input_ids.shape, tokens.shape[-1]))
        hidden_states = packing.scatter(tokens, packed, shape)
        pooled = None if self.pooler is None else self.pooler(hidden_states)
        out = BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=hidden_states, pooler_output=pooled
        )
        as_dict = kwargs.get("return_dict", getattr(self.config, "return_dict", True))
        return out.to_tuple() if as_dict is False else out

    def why_padded(self) -> Obstacle | str | None:
        """Why it computes padding too, whatever the batch; None where it does not."""
        if self.config.output_hidden_states:
            return "its configuration asks for hidden states"
        return _why_padded(self)


# transformers looks up by class what of a model can be returned besides its outputs.
dict.__setitem__(modeling_utils._CAN_RECORD_REGISTRY, str(BertModel), BertModel._can_record_outputs)


class BertEncoder(modeling_bert.BertEncoder):
    """transformers' BERT encoder, which computes on real tokens only.

    Where the batch is padded, the layers see its real tokens packed into one row, and the padding
    comes back as 0. Decoders, cross attention, other attention implementations and models whose
    layers are watched (``output_hidden_states=True``) run as they would without this.
    """

    unpad = True

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """As transformers' own."""
        packed = None
        if attention_mask is not None and not isinstance(attention_mask, PackedSequences):
            if why := self._why_not_packed(hidden_states, attention_mask, args, kwargs):
                packing.say(self, why)
            else:
                packed = _pack(self, attention_mask[:, 0, 0])
        if packed is None:
            return super().forward(hidden_states, attention_mask, *args, **kwargs)
        out = super().forward(packing.gather(hidden_states, packed), packed, **kwargs)
        shape = hidden_states.shape
        out.last_hidden_state = packing.scatter(out.last_hidden_state, packed, shape)
        return out

    def _why_not_packed(
        self, hidden_states: Tensor, mask: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str | None:
        """What of a call's arguments is in the way."""
        if why := _why_other_attention(self):
            return why
        B, L = hidden_states.shape[:2]
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != (B, 1, 1, L):
            return "its mask isn't that of padding alone"
        if args or kwargs.get("encoder_hidden_states") is not None:
            return "it attends to another model's states"
        if kwargs.get("past_key_values") is not None:
            return "it keeps a cache of keys"
        return None

    def why_padded(self) -> Obstacle | str | None:
        """Why it computes padding too, whatever the batch; None where it does not."""
        return _why_padded(self)


def _pack(module: nn.Module, keep: Tensor) -> PackedSequences | None:
    return packing.pack(module, keep, *_KNOWN)


def _why_padded(module: BertModel | BertEncoder) -> Obstacle | str | None:
    if why := _why_other_attention(module):
        return why
    if module.config.is_decoder:
        return "it is a decoder"
    return packing.find_obstacle(module, _KNOWN)


def _why_other_attention(module: BertModel | BertEncoder) -> str | None:
    chosen = module.config._attn_implementation
    return None if chosen == NAME else f'its attention runs by attn_implementation="{chosen}"'


_KNOWN = (modeling_bert.__name__, "transformers.activations", __name__)


class BertIntermediate(modeling_bert.BertIntermediate):
    """The widening half of the feed-forward network, its GELU part of the product."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """As transformers' own."""
        activation = _activation(self.intermediate_act_fn)
        if activation is None:
            return super().forward(hidden_states)
        return linear_activation(self.dense, hidden_states, activation)


class BertSelfOutput(modeling_bert.BertSelfOutput):
    """Project, drop, add the residual, normalise; all but the first in one operator."""

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        """As transformers' own."""
        return add_norm(self.dense(hidden_states), input_tensor, self.dropout, self.LayerNorm)


class BertOutput(modeling_bert.BertOutput):
    """As :class:`BertSelfOutput`, after the feed-forward network."""

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        """As transformers' own."""
        return add_norm(self.dense(hidden_states), input_tensor, self.dropout, self.LayerNorm)


def _activation(activation: nn.Module) -> Activation | None:
    """What a module of transformers computes, or None if our product knows nothing of it."""
    if is_watched(activation):
        return None
    if type(activation) is GELUActivation and activation.act is nn.functional.gelu:
        return "gelu"
    if type(activation) is GELUTanh and isinstance(activation.act, functools.partial):
        return "gelu_tanh"
    if type(activation) is nn.ReLU:
        return "relu"
    return None
