"""``torch.nn``'s Transformer layers with fused attention and fused ends of sublayers.

torch's ``TransformerEncoder`` and ``TransformerEncoderLayer`` turn boolean masks into floats and,
in evaluation, pass their parameters to one native kernel (through a NestedTensor if there is
padding). In training and in evaluation, the classes here call their submodules, keep masks boolean,
and skip padding with :mod:`trifuse.nn.packing`.

Dropout, residual and LayerNorm at the end of a sublayer are one operator
(:func:`trifuse.dropout_add_layer_norm`). In pre-norm layers the LayerNorm is that of the next
sublayer. A stack of such layers passes each layer's last sum on without computing it (``_Sum``).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trifuse.models import transformer
from trifuse.nn import (
    attention,
    dropout_add_layer_norm,
    encoder_layer,
    linear,
    packing,
    sizes,
    walks,
)
from trifuse.nn.attention import MultiheadAttention, is_ours
from trifuse.nn.dropout_add_layer_norm import add_norm, add_then_norm, norm_alone
from trifuse.nn.linear import is_intercepted, linear_activation
from trifuse.nn.packing import CrossSequences, Obstacle, PackedSequences
from trifuse.ops.activations import Activation


class _Sum(NamedTuple):
    """residual + dropout(update), not yet computed; just the residual if there is no update."""

    residual: Tensor
    update: Tensor | None = None
    dropout: nn.Module | None = None

    def norm(self, norm: nn.Module) -> tuple[Tensor, Tensor]:
        """Returns the normalised sum and the sum."""
        if self.update is None:
            return norm_alone(self.residual, norm), self.residual
        assert self.dropout is not None
        return add_then_norm(self.update, self.residual, self.dropout, norm)

    def last_norm(self, norm: nn.Module) -> Tensor:
        """Returns the normalised sum only."""
        if self.update is None:
            return norm_alone(self.residual, norm)
        assert self.dropout is not None
        return add_norm(self.update, self.residual, self.dropout, norm)

    def total(self) -> Tensor:
        if self.update is None:
            return self.residual
        assert self.dropout is not None
        return self.residual + self.dropout(self.update)


@sizes.checked("d_model", "dim_feedforward")
class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """``torch.nn.TransformerEncoderLayer`` on trifuse's operators.

    The constructor, the parameters and their initialisation are torch's own. If a subclass, or an
    instance, has a ``_sa_block`` or ``_ff_block`` of its own, torch's ``forward`` calls them.

    Raises:
        ValueError: a size is above 2^60.
    """

    @functools.wraps(nn.TransformerEncoderLayer.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.self_attn.__class__ = MultiheadAttention

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | PackedSequences | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Attends and feeds forward; as ``torch.nn.TransformerEncoderLayer.forward``.

        Args:
            src: (L, B, d_model), or (B, L, d_model) with ``batch_first``, or (L, d_model).
            src_mask: as ``attn_mask`` of :meth:`MultiheadAttention.forward`.
            src_key_padding_mask: as ``key_padding_mask`` there.
            is_causal: as there.

        Returns:
            As ``src``.

        Raises:
            RuntimeError, ValueError, TypeError: as :meth:`MultiheadAttention.forward` does.
        """
        if _has_own_blocks(self):  # no stack packs tokens for such a layer
            forward: Any = super().forward
            return forward(src, src_mask, src_key_padding_mask, is_causal)
        if may_be_one_op(self, src):
            out = self._as_one_op(src, src_mask, src_key_padding_mask, is_causal)
            if out is not None:
                return out
        if self.norm_first:
            return self._norm_first(_Sum(src), src_mask, src_key_padding_mask, is_causal).total()
        x = _attend(self.self_attn, src, src, src_mask, src_key_padding_mask, is_causal)
        src = add_norm(x, src, self.dropout1, self.norm1)
        return add_norm(feed_forward(self, src), src, self.dropout2, self.norm2)

    def _as_one_op(
        self,
        src: Tensor,
        src_mask: Tensor | None,
        src_key_padding_mask: Tensor | PackedSequences | None,
        is_causal: bool,
    ) -> Tensor | None:
        """Runs as one op (trifuse.ops.encoder_layer); None if the layer must call its parts."""
        given = _mask_of_op(self, src, src_mask, src_key_padding_mask, is_causal)
        if given is None:
            return None
        return encoder_layer.run(self, src, given.mask, parts, is_causal)

    def _norm_first(
        self,
        src: _Sum,
        src_mask: Tensor | None,
        src_key_padding_mask: Tensor | PackedSequences | None,
        is_causal: bool,
    ) -> _Sum:
        x, residual = src.norm(self.norm1)
        x = _attend(self.self_attn, x, x, src_mask, src_key_padding_mask, is_causal)
        x, residual = _Sum(residual, x, self.dropout1).norm(self.norm2)
        return _Sum(residual, feed_forward(self, x), self.dropout2)


class _MaskOfOp(NamedTuple):
    mask: Tensor | PackedSequences | None


def _mask_of_op(
    layer: Any,
    src: Tensor,
    src_mask: Tensor | None,
    padding: Tensor | PackedSequences | None,
    is_causal: bool,
) -> _MaskOfOp | None:
    """Returns an encoder layer's masks as its op takes them; None if it doesn't take them."""
    if isinstance(padding, PackedSequences):
        return _MaskOfOp(padding)
    L = src.shape[-2]
    if (
        src.dim() != 3
        or not layer.self_attn.batch_first
        or (src_mask is None and is_causal)
        or (src_mask is not None and src_mask.shape != (L, L))
        or (padding is not None and padding.shape != src.shape[:2])
    ):
        return None
    mask = attention.combine(padding, None if is_causal else src_mask, 1)
    return _MaskOfOp(mask[None, None] if mask is not None and mask.dim() == 2 else mask)


def parts(layer: TransformerEncoderLayer) -> encoder_layer.Parts | None:
    attention = layer.self_attn
    activation = _ACTIVATIONS.get(layer.activation)
    if (
        not is_ours(attention)
        or not attention._qkv_same_embed_dim  # a frozen in_proj_weight would be unpacked
        or attention.bias_k is not None
        or attention.add_zero_attn
        or activation is None
    ):
        return None
    owned: list[tuple[nn.Module, str]] = [(layer, "activation"), (layer, "norm_first")]
    owned += [(attention, name) for name in ("num_heads", "embed_dim", "add_zero_attn", "bias_k")]
    return encoder_layer.Parts(
        (attention,),
        attention.out_proj,
        layer.linear1,
        layer.linear2,
        (layer.norm1, layer.norm2),
        (layer.dropout, layer.dropout1, layer.dropout2),
        attention.num_heads,
        None,
        activation,
        layer.norm_first,
        attributes=tuple((owner, name) for owner, name in owned if name in vars(owner)),
    )


_ACTIVATIONS: dict[Any, Activation] = {
    nn.functional.relu: "relu",
    nn.functional.gelu: "gelu",
}


@sizes.checked("d_model", "dim_feedforward")
class TransformerDecoderLayer(nn.TransformerDecoderLayer):
    """``torch.nn.TransformerDecoderLayer`` on trifuse's operators.

    The constructor, the parameters and their initialisation are torch's own. If a subclass, or an
    instance, has a ``_sa_block``, ``_mha_block`` or ``_ff_block`` of its own, torch's ``forward``
    calls them.

    Raises:
        ValueError: a size is above 2^60.
    """

    @functools.wraps(nn.TransformerDecoderLayer.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.self_attn.__class__ = MultiheadAttention
        self.multihead_attn.__class__ = MultiheadAttention

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | PackedSequences | None = None,
        memory_key_padding_mask: Tensor | CrossSequences | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Attends to the target, attends to the memory, feeds forward; as
        ``torch.nn.TransformerDecoderLayer.forward``.

        Args:
            tgt: (L, B, d_model), or (B, L, d_model) with ``batch_first``, or (L, d_model).
            memory: the encoder's output, likewise.
            tgt_mask, memory_mask: as ``attn_mask`` of :meth:`MultiheadAttention.forward`.
            tgt_key_padding_mask, memory_key_padding_mask: as ``key_padding_mask`` there.
            tgt_is_causal, memory_is_causal: as ``is_causal`` there.

        Returns:
            As ``tgt``.

        Raises:
            RuntimeError, ValueError, TypeError: as :meth:`MultiheadAttention.forward` does.
        """
        masks = tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask
        causal = tgt_is_causal, memory_is_causal
        if _has_own_blocks(self):  # no stack packs tokens for such a layer
            forward: Any = super().forward
            return forward(tgt, memory, *masks, *causal)
        if self.norm_first:
            return self._norm_first(_Sum(tgt), memory, *masks, *causal).total()
        x = _attend(self.self_attn, tgt, tgt, tgt_mask, tgt_key_padding_mask, tgt_is_causal)
        tgt = add_norm(x, tgt, self.dropout1, self.norm1)
        x = _attend(
            self.multihead_attn, tgt, memory, memory_mask, memory_key_padding_mask, memory_is_causal
        )
        tgt = add_norm(x, tgt, self.dropout2, self.norm2)
        return add_norm(feed_forward(self, tgt), tgt, self.dropout3, self.norm3)

    def _norm_first(
        self,
        tgt: _Sum,
        memory: Tensor,
        tgt_mask: Tensor | None,
        memory_mask: Tensor | None,
        tgt_key_padding_mask: Tensor | PackedSequences | None,
        memory_key_padding_mask: Tensor | CrossSequences | None,
        tgt_is_causal: bool,
        memory_is_causal: bool,
    ) -> _Sum:
        x, residual = tgt.norm(self.norm1)
        x = _attend(self.self_attn, x, x, tgt_mask, tgt_key_padding_mask, tgt_is_causal)
        x, residual = _Sum(residual, x, self.dropout1).norm(self.norm2)
        x = _attend(
            self.multihead_attn, x, memory, memory_mask, memory_key_padding_mask, memory_is_causal
        )
        x, residual = _Sum(residual, x, self.dropout2).norm(self.norm3)
        return _Sum(residual, feed_forward(self, x), self.dropout3)


def _attend(
    module: nn.MultiheadAttention,
    query: Tensor,
    memory: Tensor,
    mask: Tensor | None,
    key_padding_mask: Any,
    is_causal: bool,
) -> Tensor:
    out: Tensor = module(
        query,
        memory,
        memory,
        attn_mask=mask,
        key_padding_mask=key_padding_mask,
        is_causal=is_causal,
        need_weights=False,
    )[0]
    return out


def feed_forward(
    layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer, x: Tensor, dropout: bool = True
) -> Tensor:
    """Computes a layer's feed-forward network, without the dropout at the end of the sublayer."""
    if (activation := _ACTIVATIONS.get(layer.activation)) is not None:
        hidden = linear_activation(layer.linear1, x, activation)
    else:
        hidden = layer.activation(layer.linear1(x))
    out: Tensor = layer.linear2(layer.dropout(hidden) if dropout else hidden)
    return out


class TransformerEncoder(nn.TransformerEncoder):
    """``torch.nn.TransformerEncoder`` that can skip padding.

    It does so if its attribute ``unpad`` is True, which ``trifuse.fuse(model, unpad=True)`` sets.

    With ``unpad``, a boolean ``src_key_padding_mask``, and a ``mask`` that is None or causal, the
    layers run on the real tokens of the batch packed into one row, and give 0 at the padded
    positions (before ``norm``), as torch's fast path does. Otherwise the layers compute the padded
    positions too. If ``is_causal`` is None, ``mask`` is read to detect a causal mask, as in torch;
    while compiling it is not read and counts as not causal.

    Args:
        encoder_layer: copied ``num_layers`` times.
        num_layers: the number of layers.
        norm: applied to the last layer's output.
        enable_nested_tensor, mask_check: as in torch, but no NestedTensor is ever made.
    """

    unpad = False

    def __init__(
        self,
        encoder_layer: nn.TransformerEncoderLayer,
        num_layers: int,
        norm: nn.Module | None = None,
        enable_nested_tensor: bool = True,
        mask_check: bool = True,
    ) -> None:
        super().__init__(encoder_layer, num_layers, norm, False, mask_check)

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """Passes ``src`` through the layers; as ``torch.nn.TransformerEncoder.forward``.

        Args:
            src, mask, src_key_padding_mask, is_causal: as ``src``, ``src_mask``,
                ``src_key_padding_mask`` and ``is_causal`` of
                :meth:`TransformerEncoderLayer.forward`.

        Returns:
            As ``src``.

        Raises:
            RuntimeError, ValueError, TypeError: as the layers do.
        """
        if is_causal is None:
            is_causal = mask is not None and _is_causal_mask(mask)
        packed = None
        if self.unpad and src_key_padding_mask is not None:
            packed = self._pack(src, mask, src_key_padding_mask, is_causal)
        if packed is None:
            return end_of(self._run(src, mask, src_key_padding_mask, is_causal), self.norm)
        tokens = self._run_packed(_gather(self, src, packed), packed, is_causal).total()
        src = _scatter(self, tokens, packed, src.shape)
        return src if self.norm is None else self.norm(src)

    def _run_packed(self, tokens: Tensor, packed: PackedSequences, is_causal: bool) -> _Sum:
        """Runs the layers on packed tokens, (1, T, d_model)."""
        return self._run(tokens, None, packed, is_causal)

    def _run(
        self,
        src: Tensor,
        mask: Tensor | None,
        padding: Tensor | PackedSequences | None,
        is_causal: bool,
    ) -> _Sum:
        """Runs the layers, in one call if they run as one op each."""
        layers = self.layers
        if len(layers) and all(
            type(layer) is TransformerEncoderLayer
            and may_be_one_op(layer, src)
            and layer.self_attn.batch_first == layers[0].self_attn.batch_first
            for layer in layers
        ):
            given = _mask_of_op(layers[0], src, mask, padding, is_causal)
            if given is not None:
                out = encoder_layer.run_all(layers, src, given.mask, parts, is_causal)
                if out is not None:
                    return _Sum(out)
        return _run_layers(
            layers, src, src_mask=mask, src_key_padding_mask=padding, is_causal=is_causal
        )

    def _pack(
        self, src: Tensor, mask: Tensor | None, src_key_padding_mask: Tensor, is_causal: bool
    ) -> PackedSequences | None:
        if src.dim() != 3 or (is_causal and mask is None):
            return None  # unbatched, so not padded; or is_causal without mask: the layers raise
        why = None
        if mask is not None and not is_causal:
            why = "mask is neither None nor causal"
        elif src_key_padding_mask.dtype != torch.bool:
            why = "src_key_padding_mask isn't boolean"
        else:
            why = why_never_packed(self)
        if why is not None:
            packing.warn_padded(self, why)
            return None
        return packing.pack(self, ~src_key_padding_mask, *KNOWN)

    def why_padded(self) -> Obstacle | str | None:
        """Returns why padding is computed whatever the batch, or None if it is skipped."""
        return _why_padded(self)


class TransformerDecoder(nn.TransformerDecoder):
    """``torch.nn.TransformerDecoder`` that can skip padding.

    It does so if its attribute ``unpad`` is True, which ``trifuse.fuse(model, unpad=True)`` sets.

    With ``unpad``, boolean padding masks, a ``tgt_mask`` that is None or causal, and no
    ``memory_mask``, the real tokens of target and memory are packed into one row each, and the
    layers give 0 at padded positions of the target (before ``norm``). If ``tgt_is_causal`` is None,
    ``tgt_mask`` is read to detect a causal mask, as in torch; while compiling it is not read and
    counts as not causal.

    Args:
        decoder_layer: copied ``num_layers`` times.
        num_layers: the number of layers.
        norm: applied to the last layer's output.
    """

    unpad = False

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Passes ``tgt`` through the layers; as ``torch.nn.TransformerDecoder.forward``.

        Args:
            tgt, memory: as in :meth:`TransformerDecoderLayer.forward`.
            tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask: as there.
            tgt_is_causal, memory_is_causal: as there.

        Returns:
            As ``tgt``.

        Raises:
            RuntimeError, ValueError, TypeError: as the layers do.
        """
        if tgt_is_causal is None:
            tgt_is_causal = tgt_mask is not None and _is_causal_mask(tgt_mask)
        packed = None
        if self.unpad and not (tgt_key_padding_mask is None and memory_key_padding_mask is None):
            packed = self._pack(
                tgt,
                memory,
                tgt_mask,
                memory_mask,
                tgt_key_padding_mask,
                memory_key_padding_mask,
                tgt_is_causal,
                memory_is_causal,
            )
        if packed is None:
            x = _run_layers(
                self.layers,
                tgt,
                memory,
                tgt_mask=tgt_mask,
                memory_mask=memory_mask,
                tgt_key_padding_mask=tgt_key_padding_mask,
                memory_key_padding_mask=memory_key_padding_mask,
                tgt_is_causal=tgt_is_causal,
                memory_is_causal=memory_is_causal,
            )
            return end_of(x, self.norm)
        tokens, memory = _gather(self, tgt, packed.queries), _gather(self, memory, packed.keys)
        tokens = self._run_packed(tokens, memory, packed, tgt_is_causal).total()
        tgt = _scatter(self, tokens, packed.queries, tgt.shape)
        return tgt if self.norm is None else self.norm(tgt)

    def _run_packed(
        self, tokens: Tensor, memory: Tensor, packed: CrossSequences, is_causal: bool
    ) -> _Sum:
        """Runs the layers on packed tokens of the target, (1, T, d_model), and of the memory."""
        return _run_layers(
            self.layers,
            tokens,
            memory,
            tgt_mask=None,
            memory_mask=None,
            tgt_key_padding_mask=packed.queries,
            memory_key_padding_mask=packed,
            tgt_is_causal=is_causal,
            memory_is_causal=False,
        )

    def _pack(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None,
        memory_mask: Tensor | None,
        tgt_padding: Tensor | None,
        memory_padding: Tensor | None,
        tgt_is_causal: bool,
        memory_is_causal: bool,
    ) -> CrossSequences | None:
        if tgt.dim() != 3 or memory.dim() != 3:
            return None  # unbatched, so not padded
        if (tgt_is_causal and tgt_mask is None) or (memory_is_causal and memory_mask is None):
            return None  # is_causal without its mask: the layers raise
        why = None
        if tgt_mask is not None and not tgt_is_causal:
            why = "tgt_mask is neither None nor causal"
        elif memory_mask is not None:
            why = "memory_mask isn't None"
        elif any(p is not None and p.dtype != torch.bool for p in (tgt_padding, memory_padding)):
            why = "a key_padding_mask isn't boolean"
        else:
            why = why_never_packed(self)
        if why is not None:
            packing.warn_padded(self, why)
            return None
        queries, keys = _batch_first(self, tgt), _batch_first(self, memory)
        keep_queries = None if tgt_padding is None else ~tgt_padding
        keep_keys = None if memory_padding is None else ~memory_padding
        return packing.pack_cross(self, queries, keys, keep_queries, keep_keys, *KNOWN)

    def why_padded(self) -> Obstacle | str | None:
        """Returns why padding is computed whatever the batch, or None if it is skipped."""
        return _why_padded(self)


def _why_padded(stack: nn.Module) -> Obstacle | str | None:
    return why_never_packed(stack) or packing.find_obstacle(stack, KNOWN)


# Modules whose classes treat tokens one by one, take PackedSequences, or never get packed tokens.
KNOWN = (
    *(m.__name__ for m in (attention, dropout_add_layer_norm, linear, transformer)),
    __name__,
)


def why_never_packed(stack: nn.Module) -> str | None:
    """Returns why a part of a stack takes no packed tokens whatever its class, or None."""
    traced = torch.compiler.is_compiling()
    if not traced and walks.holds(stack, "parts"):
        return None
    attentions = [module for module in stack.modules() if isinstance(module, nn.MultiheadAttention)]
    if not all(map(_appends_nothing, attentions)):  # packed sequences have no room for the keys
        return "an attention in it appends keys (add_bias_kv, add_zero_attn)"
    kinds = nn.TransformerEncoderLayer, nn.TransformerDecoderLayer
    layers = [module for module in stack.modules() if isinstance(module, kinds)]
    if not all(map(_has_torchs_blocks, layers)):
        return "a layer in it has a block of its own (_sa_block, _mha_block, _ff_block)"
    if not traced:
        grounds = walks.Grounds()
        grounds.conditions.update(dict.fromkeys(attentions, _appends_nothing))
        grounds.conditions.update(dict.fromkeys(layers, _has_torchs_blocks))
        walks.keep(stack, "parts", grounds, inside=())
    return None


def _has_torchs_blocks(layer: nn.Module) -> bool:
    return not _has_own_blocks(layer)


def _appends_nothing(attention: Any) -> bool:
    return attention.bias_k is None and not attention.add_zero_attn


def _batch_first(stack: Any, x: Tensor) -> Tensor:
    """Returns x as (B, L, d_model), whatever ``batch_first`` the stack's layers have."""
    return x if stack.layers[0].self_attn.batch_first else x.transpose(0, 1)


def _gather(stack: Any, x: Tensor, packed: PackedSequences) -> Tensor:
    """Gathers the real tokens into (1, T, d_model)."""
    return packing.gather(_batch_first(stack, x), packed)


def _scatter(stack: Any, tokens: Tensor, packed: PackedSequences, shape: torch.Size) -> Tensor:
    if stack.layers[0].self_attn.batch_first:
        return packing.scatter(tokens, packed, shape)
    swapped = torch.Size((shape[1], shape[0], shape[2]))
    return packing.scatter(tokens, packed, swapped).transpose(0, 1)


def may_be_one_op(layer: nn.Module, x: Tensor) -> bool:
    """Returns whether a layer may run as one op for x."""
    return (
        isinstance(layer, TransformerEncoderLayer)
        and encoder_layer.may_serve(layer, x)
        and is_ours(layer.self_attn)
        and (encoder_layer.has_few_rows(x) or is_frozen(layer))
        and not _has_own_blocks(layer)
    )


def is_frozen(layer: nn.Module) -> bool:
    """Returns whether a layer always runs as one op in inference, which includes its last sum."""
    return (
        isinstance(layer, TransformerEncoderLayer)
        and getattr(layer.self_attn, "frozen", False)
        and not _has_own_blocks(layer)
    )


# torch's own blocks, which no longer are those of its classes if another library replaces them.
_ENCODER_BLOCKS = {
    "_sa_block": nn.TransformerEncoderLayer._sa_block,
    "_ff_block": nn.TransformerEncoderLayer._ff_block,
}
_DECODER_BLOCKS = {
    "_sa_block": nn.TransformerDecoderLayer._sa_block,
    "_mha_block": nn.TransformerDecoderLayer._mha_block,
    "_ff_block": nn.TransformerDecoderLayer._ff_block,
}


def _has_own_blocks(layer: nn.Module) -> bool:
    """Returns whether a block of torch's layer was replaced, in a subclass or on the instance.

    torch's ``forward``, which calls the blocks, must then run.
    """
    is_encoder = isinstance(layer, nn.TransformerEncoderLayer)
    cls, own = type(layer), vars(layer)
    for name, block in (_ENCODER_BLOCKS if is_encoder else _DECODER_BLOCKS).items():
        if name in own or getattr(cls, name) is not block:
            return True
    return False


def _run_layers(layers: nn.ModuleList, x: Tensor, *memory: Tensor, **masks: Any) -> _Sum:
    """Runs all layers of a stack on x. Pre-norm layers leave their last sums uncomputed."""
    chained = all(
        type(layer) in (TransformerEncoderLayer, TransformerDecoderLayer)
        and layer.norm_first
        and not _has_own_blocks(layer)
        and not is_intercepted(layer)
        and not is_frozen(layer)
        for layer in layers
    )
    result = _Sum(x)
    for layer in layers:
        if chained:
            result = layer._norm_first(result, *memory, **masks)  # type: ignore[operator]
        else:
            result = _Sum(layer(result.residual, *memory, **masks))
    return result


def end_of(x: _Sum, norm: nn.Module | None) -> Tensor:
    """Returns the last sum of a stack, normalised if the stack has a norm."""
    return x.total() if norm is None else x.last_norm(norm)


def _is_causal_mask(mask: Tensor) -> bool:
    """Returns whether an (L, L) mask, in torch.nn's convention, masks exactly the later keys."""
    if mask.dim() != 2 or mask.shape[0] != mask.shape[1] or torch.compiler.is_compiling():
        return False
    future = torch.ones_like(mask, dtype=torch.bool).triu(1)
    if mask.dtype == torch.bool:
        return torch.equal(mask, future)
    return torch.equal(mask, torch.zeros_like(mask).masked_fill_(future, float("-inf")))
