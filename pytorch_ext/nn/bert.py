"""Fused counterparts of :mod:`trifuse.models.bert`."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from trifuse.models import bert
from trifuse.nn import embeddings, encoder_layer, packing, post_norm, walks
from trifuse.nn.attention import SoftmaxAttention
from trifuse.nn.dropout_add_layer_norm import add_norm, norm_alone
from trifuse.nn.linear import activation_name, is_intercepted, linear_activation
from trifuse.nn.packing import Obstacle, PackedSequences


class BertModel(bert.BertModel):
    """The model; with fused attention it embeds and encodes real tokens only.

    If the mask is (B, L), the real tokens of the batch are packed into one row, and hidden states
    are 0 at padded positions.
    """

    unpad = True

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> bert.BertModelOutput:
        """As :meth:`trifuse.models.bert.BertModel.forward`."""
        packed = None
        limit = self.embeddings.position_embeddings.num_embeddings
        if (
            attention_mask is not None
            and attention_mask.shape == input_ids.shape
            and input_ids.dim() == 2
            and input_ids.shape[1] <= limit
        ):
            packed = _pack(self, attention_mask.bool())
        if packed is None:  # the encoder may still pack, and warns if it doesn't
            return super().forward(
                input_ids,
                attention_mask,
                token_type_ids,
                position_ids,
                output_hidden_states=output_hidden_states,
                output_attentions=output_attentions,
            )
        embedded = embed_packed(self.embeddings, packed, input_ids, token_type_ids, position_ids)
        shape = torch.Size((*input_ids.shape, embedded.shape[-1]))
        outputs = [embedded] if output_hidden_states or output_attentions else None
        last = packing.scatter(self.encoder(embedded, packed, outputs), packed, shape)
        if outputs is not None:
            outputs = [*(packing.scatter(x, packed, shape) for x in outputs[:-1]), last]
        mask = None if attention_mask is None else attention_mask.bool()
        return self._output(last, mask, outputs, output_hidden_states, output_attentions)

    def why_padded(self) -> Obstacle | str | None:
        """Returns why padding is computed whatever the batch, or None if it is skipped."""
        return _why_padded(self)


class BertEncoder(bert.BertEncoder):
    """The stack of layers; with fused attention it computes on real tokens only.

    If the mask is boolean (B, L), the layers run on the real tokens of the batch packed into one
    row, and the result is 0 at padded positions.
    """

    unpad = True

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | PackedSequences | None = None,
        outputs: list[Tensor] | None = None,
    ) -> Tensor:
        """As :meth:`trifuse.models.bert.BertEncoder.forward`; also takes packed tokens."""
        packed = None
        if isinstance(mask, Tensor):
            if mask.dim() == 2 and mask.dtype == torch.bool:
                packed = _pack(self, mask)
            else:
                packing.warn_padded(self, "its mask isn't boolean and (B, L)")
        if packed is None:
            return self._run(hidden_states, mask, outputs)
        rows: list[Tensor] | None = None if outputs is None else []
        last = self._run(packing.gather(hidden_states, packed), packed, rows)
        if outputs is not None and rows is not None:
            outputs += (packing.scatter(row, packed, hidden_states.shape) for row in rows)
        return packing.scatter(last, packed, hidden_states.shape)

    def _run(
        self,
        hidden_states: Tensor,
        mask: Tensor | PackedSequences | None,
        outputs: list[Tensor] | None,
    ) -> Tensor:
        """Runs the layers, in one call if that is supported and only the last output is needed."""
        if outputs is None:
            rows = hidden_states, _over_heads(mask)
            out = post_norm.run_all(self.layer, *rows, _parts_of_any)
            if out is None:
                out = encoder_layer.run_all(self.layer, *rows, _parts)
            if out is not None:
                return out
        # The layers take packed tokens, with fused attention.
        return cast(Any, super()).forward(hidden_states, mask, outputs)

    def why_padded(self) -> Obstacle | str | None:
        """Returns why padding is computed whatever the batch, or None if it is skipped."""
        return _why_padded(self)


class BertEmbeddings(bert.BertEmbeddings):
    """The embeddings, in one call in inference on a CPU (trifuse.nn.embeddings)."""

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """As :meth:`trifuse.models.bert.BertEmbeddings.forward`."""
        out = embeddings.run(
            self, self._parts, lambda: self._ids(input_ids, token_type_ids, position_ids)
        )
        if out is not None:
            return out
        return super().forward(input_ids, token_type_ids, position_ids)

    def _parts(self) -> embeddings.Parts:
        tables = self.word_embeddings, self.token_type_embeddings, self.position_embeddings
        return embeddings.Parts(tables, self.LayerNorm, self.dropout)

    def _ids(
        self, words: Tensor, types: Tensor | None, positions: Tensor | None
    ) -> tuple[Tensor, ...] | None:
        if words.dim() != 2 or words.shape[1] > self.position_embeddings.num_embeddings:
            return None
        if types is None:
            types = words.new_zeros(1, 1)
        if positions is None:
            positions = torch.arange(words.shape[1], device=words.device)
        return words, types, positions if positions.dim() > 1 else positions[None]

    def _normalised(self, x: Tensor) -> Tensor:
        return norm_alone(x, self.LayerNorm)


class BertLayer(bert.BertLayer):
    """The layer; it can be one op in inference (trifuse.nn.encoder_layer)."""

    def forward(
        self, hidden_states: Tensor, mask: Tensor | PackedSequences | None = None
    ) -> Tensor:
        """As :meth:`trifuse.models.bert.BertLayer.forward`; also takes packed tokens."""
        out = encoder_layer.run(self, hidden_states, _over_heads(mask), _parts)
        return cast(Any, super()).forward(hidden_states, mask) if out is None else out


def _over_heads(mask: Tensor | PackedSequences | None) -> Tensor | PackedSequences | None:
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return mask[:, None, None, :]
    return mask


def _parts(layer: nn.Module) -> encoder_layer.Parts | None:
    return _parts_of_any(layer) if type(layer) is BertLayer else None


def _parts_of_any(layer: Any) -> encoder_layer.Parts | None:
    """Returns the parts of a layer, whether or not its weights are frozen."""
    if type(layer) not in (BertLayer, bert.BertLayer):
        return None
    attention, up = layer.attention.self, layer.intermediate
    ends = layer.attention.output, layer.output
    fused = (SoftmaxAttention, BertIntermediate, BertSelfOutput, BertSelfOutput)
    if tuple(map(type, (attention.attention, up, *ends))) != fused:
        return None
    activation = activation_name(up.intermediate_act_fn)
    if activation is None:
        return None
    return encoder_layer.Parts(
        (attention.query, attention.key, attention.value),
        ends[0].dense,
        up.dense,
        ends[1].dense,
        (ends[0].LayerNorm, ends[1].LayerNorm),
        (ends[0].dropout, ends[1].dropout),
        attention.num_attention_heads,
        None,
        activation,
        attributes=((attention, "num_attention_heads"),),
        attention_dropout=(attention.attention, attention.attention, "dropout_p"),
    )


class BertIntermediate(bert.BertIntermediate):
    """The widening half of the feed-forward network, with GELU fused into the product."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """As :meth:`trifuse.models.bert.BertIntermediate.forward`."""
        name = activation_name(self.intermediate_act_fn)
        if name is not None and not is_intercepted(self.intermediate_act_fn):
            return linear_activation(self.dense, hidden_states, name)
        return super().forward(hidden_states)


class BertSelfOutput(bert.BertSelfOutput):
    """Projects, then drops, adds the residual and normalises in one operator."""

    def forward(self, hidden_states: Tensor, residual: Tensor) -> Tensor:
        """As :meth:`trifuse.models.bert.BertSelfOutput.forward`."""
        return add_norm(self.dense(hidden_states), residual, self.dropout, self.LayerNorm)


def embed_packed(
    embeddings: nn.Module,
    packed: PackedSequences,
    input_ids: Tensor,
    token_type_ids: Tensor | None,
    position_ids: Tensor | None,
) -> Tensor:
    """Applies a BERT's embeddings to the real tokens; returns (1, T, hidden_size).

    ``input_ids`` and ``token_type_ids`` are (B, L); ``position_ids`` broadcasts to (B, L). The
    embeddings get T sequences of one token, which never exceed their maximum length.
    """
    ids, types, positions = (
        None if x is None else packing.gather(x.expand(input_ids.shape), packed).mT
        for x in (input_ids, token_type_ids, position_ids)
    )
    if positions is None:
        positions = (packed.indices % input_ids.shape[1])[:, None]
    tokens = embeddings(input_ids=ids, token_type_ids=types, position_ids=positions)
    return tokens.transpose(0, 1)


def _pack(module: nn.Module, keep: Tensor) -> PackedSequences | None:
    if (obstacle := _unfused_attention(module)) is not None:
        packing.warn_padded(module, obstacle)
        return None
    return packing.pack(module, keep, *_KNOWN)


def _why_padded(module: nn.Module) -> Obstacle | None:
    return _unfused_attention(module) or packing.find_obstacle(module, _KNOWN)


def _unfused_attention(module: nn.Module) -> Obstacle | None:
    if not torch.compiler.is_compiling() and walks.lacks(module, bert.SoftmaxAttention):
        return None
    for path, part in module.named_modules():
        if isinstance(part, bert.SoftmaxAttention):
            return Obstacle(path, part, "isn't fused")
    return None


_KNOWN = (bert.__name__, __name__, SoftmaxAttention.__module__)
