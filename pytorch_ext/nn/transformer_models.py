"""The models of :mod:`trifuse.models.transformer` on real tokens only, and their fused parts."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from trifuse.models import transformer
from trifuse.models._tokens import check_mask, check_pair, check_tokens
from trifuse.nn import encoder_layer, packing
from trifuse.nn.attention import is_ours
from trifuse.nn.dropout_add_layer_norm import add_then_norm, norm_alone
from trifuse.nn.packing import Obstacle, PackedSequences
from trifuse.nn.transformer import (
    KNOWN,
    TransformerDecoder,
    TransformerEncoder,
    end_of,
    feed_forward,
    may_be_one_op,
    parts,
    why_never_packed,
)

_KNOWN = (*KNOWN, __name__)


class UnpaddedLanguageModel(transformer.LanguageModel):
    """The model; it embeds a padded batch and computes everything else on its real tokens only.

    It does so if its mask marks padding; logits and hidden states at padded positions are then 0.
    """

    unpad = True

    def forward(
        self, tokens: Tensor, mask: Tensor | None = None, *, output_hidden_states: bool = False
    ) -> Any:
        """As :meth:`trifuse.models.transformer.LanguageModel.forward`."""
        packed = self._pack(tokens, mask)
        if packed is None:
            return super().forward(tokens, mask, output_hidden_states=output_hidden_states)
        if not output_hidden_states:
            return _unpacked(self.output(self._decode_packed(tokens, packed)), packed, tokens)
        x = packing.gather(self.dropout(self._embed(tokens)), packed)
        rows = [x, *transformer.layer_by_layer(self.decoder, x, None, packed)]
        states = tuple(_unpacked(row, packed, tokens) for row in rows)
        logits = _unpacked(self.output(rows[-1]), packed, tokens)
        return transformer.LanguageModelOutput(logits, states)

    def features(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """As :meth:`trifuse.models.transformer.LanguageModel.features`."""
        packed = self._pack(tokens, mask)
        if packed is None:
            return super().features(tokens, mask)
        return _unpacked(self._decode_packed(tokens, packed), packed, tokens)

    def _pack(self, tokens: Tensor, mask: Tensor | None) -> PackedSequences | None:
        check_tokens("tokens", tokens)
        check_mask("mask", mask, tokens)
        if mask is None:
            return None
        if why := _why_stack_cannot(self.decoder):
            packing.warn_padded(self, why)
            return None
        return packing.pack(self, mask, *_KNOWN)

    def _decode_packed(self, tokens: Tensor, packed: PackedSequences) -> Tensor:
        assert isinstance(self.decoder, TransformerEncoder)
        x = packing.gather(self.dropout(self._embed(tokens)), packed)
        return end_of(self.decoder._run_packed(x, packed, is_causal=True), self.decoder.norm)

    def why_padded(self) -> Obstacle | str | None:
        """Returns why padding is computed whatever the batch, or None if it is skipped."""
        return _why_stack_cannot(self.decoder) or packing.find_obstacle(self, _KNOWN)


class UnpaddedTransformer(transformer.Transformer):
    """The model; it embeds padded batches and computes everything else on real tokens only.

    It does so if a mask marks padding; the logits at padded positions of the target are then 0.
    """

    unpad = True

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
    ) -> Tensor:
        """As :meth:`trifuse.models.transformer.Transformer.forward`."""
        check_pair(source, target)
        check_mask("source_mask", source_mask, source)
        check_mask("target_mask", target_mask, target)
        packed = None
        if source_mask is not None or target_mask is not None:
            if why := self._why_stacks_cannot():
                packing.warn_padded(self, why)
            else:
                packed = packing.pack_cross(self, target, source, target_mask, source_mask, *_KNOWN)
        if packed is None:
            return super().forward(source, target, source_mask, target_mask)
        assert isinstance(self.encoder, TransformerEncoder)
        assert isinstance(self.decoder, TransformerDecoder)
        memory = packing.gather(self.dropout(self._embed("source", source)), packed.keys)
        encoded = self.encoder._run_packed(memory, packed.keys, is_causal=False)
        memory = end_of(encoded, self.encoder.norm)
        x = packing.gather(self.dropout(self._embed("target", target)), packed.queries)
        decoded = self.decoder._run_packed(x, memory, packed, is_causal=True)
        logits = self.output(end_of(decoded, self.decoder.norm))
        return _unpacked(logits, packed.queries, target)

    def _why_stacks_cannot(self) -> str | None:
        return _why_stack_cannot(self.encoder) or _why_stack_cannot(self.decoder)

    def why_padded(self) -> Obstacle | str | None:
        """Returns why padding is computed whatever the batch, or None if it is skipped."""
        return self._why_stacks_cannot() or packing.find_obstacle(self, _KNOWN)


def _why_stack_cannot(stack: nn.Module) -> str | None:
    """Returns why a stack can't take packed tokens from the model around it, or None."""
    if not isinstance(stack, (TransformerEncoder, TransformerDecoder)):
        return f"its stack is a {type(stack).__module__}.{type(stack).__qualname__}"
    return why_never_packed(stack)


def _unpacked(x: Tensor, packed: PackedSequences, tokens: Tensor) -> Tensor:
    """Puts packed tokens (1, T, D) in their places among (B, L) tokens: (B, L, D)."""
    return packing.scatter(x, packed, torch.Size((*tokens.shape, x.shape[-1])))


class Products(transformer.Products):
    """The products of a fused layer while decoding.

    An attention of another class than trifuse's own is projected by torch.
    """

    def project(
        self, attention: nn.MultiheadAttention, x: Tensor, which: Literal["qkv", "kv", "q"]
    ) -> tuple[Tensor, ...]:
        """As :meth:`trifuse.models.transformer.Products.project`."""
        if not is_ours(attention):
            return super().project(attention, x, which)
        return attention.split_heads(attention.project_in(x, which), batch_first=True)

    def project_out(self, attention: nn.MultiheadAttention, heads: Tensor) -> Tensor:
        """As :meth:`trifuse.models.transformer.Products.project_out`."""
        if not is_ours(attention):
            return super().project_out(attention, heads)
        return attention.project_out(heads, batch_first=True)

    def feed_forward(
        self, layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer, x: Tensor
    ) -> Tensor:
        """As :meth:`trifuse.models.transformer.Products.feed_forward`."""
        return feed_forward(layer, x, dropout=False)

    def run_stack(
        self, stack: nn.TransformerEncoder, x: Tensor, past: transformer.KeyValueCache
    ) -> Tensor | None:
        """As :meth:`trifuse.models.transformer.Products.run_stack`.

        Serves layers that may run as one op each.
        """
        layers = stack.layers
        if not all(may_be_one_op(layer, x) and layer.self_attn.batch_first for layer in layers):
            return None
        new, end = x.shape[1], past.length + x.shape[1]
        mask = past.keys_taking_part(end)
        mask = None if mask is None else mask[:, None, None]
        for index, layer in enumerate(layers):
            heads = x.unflatten(-1, (layer.self_attn.num_heads, -1)).transpose(1, 2)
            room = past.reserve(index, heads)
            if room is None:
                return None
            cache = encoder_layer.Cache(*room)
            out = encoder_layer.run(layer, x, mask, parts, is_causal=new > 1, cache=cache)
            if out is None:
                return None
            x = out
        for index in range(len(layers)):
            past.advance(index, new)
        return x if stack.norm is None else norm_alone(x, stack.norm)


class AddNorm(transformer.AddNorm):
    """The end of a sublayer while decoding, in one operator."""

    def forward(self, x: Tensor, residual: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
        """As :meth:`trifuse.models.transformer.AddNorm.forward`."""
        return add_then_norm(x, residual, _NO_DROPOUT, norm)


_NO_DROPOUT = nn.Dropout(0.0)
