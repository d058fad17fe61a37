"""Attention modules: torch's MultiheadAttention, and softmax attention from projected heads."""

from __future__ import annotations

import inspect
import math
from typing import Any, Literal, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trifuse.nn import packing, sizes
from trifuse.nn.linear import (
    ATTENTION_WEIGHTS,
    FROZEN_ATTENTION,
    HoldsFrozen,
    is_frozen,
    project,
)
from trifuse.nn.packing import CrossSequences, PackedSequences
from trifuse.nn.quantization import Unquantizable
from trifuse.ops._linear_weights import PANEL, FrozenWeight, frozen_message
from trifuse.ops.attention import scaled_dot_product_attention
from trifuse.ops.heads import split_heads
from trifuse.ops.linear import linear_frozen


class SoftmaxAttention(nn.Module):
    """dropout(softmax(Q Kᵀ / √E + mask)) V from projected heads, fused. Holds no parameters.

    The counterpart of :class:`trifuse.models.bert.SoftmaxAttention`.

    Args:
        dropout_p: probability of dropping an attention weight while training.
    """

    def __init__(self, dropout_p: float = 0.0) -> None:
        super().__init__()
        self.dropout_p = dropout_p

    def extra_repr(self) -> str:
        return f"dropout_p={self.dropout_p}"

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | PackedSequences | None
    ) -> Tensor:
        """Attends.

        Args:
            query: (B, H, Lq, E).
            key, value: (B, H, Lk, E).
            mask: bool (B, Lk), True where a key takes part; or broadcastable to (B, H, Lq, Lk),
                boolean likewise, or floating and added to the scores. A row with every key masked
                gives 0. An encoder that packs its batch passes :class:`PackedSequences` instead.

        Returns:
            (B, H, Lq, E).
        """
        dropout_p = self.dropout_p if self.training else 0.0
        if isinstance(mask, PackedSequences):
            return packing.attend(query, key, value, mask, dropout_p)
        if mask is not None and mask.dim() == 2:
            mask = mask[:, None, None, :]
        return scaled_dot_product_attention(query, key, value, mask, dropout_p)


@sizes.checked("embed_dim", "kdim", "vdim")
class MultiheadAttention(nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` on the fused operator, unless ``need_weights`` is set.

    The constructor, the parameters and their initialisation are torch's own. ``forward`` takes and
    returns the same things; it differs from torch in that

    - a query whose every key is masked attends to nothing, so that its output is ``out_proj.bias``
      (and its weights 0) where torch gives NaN;
    - boolean masks stay boolean: unless weights are returned, a NaN in a masked value reaches no
      output;
    - masks of different types (one boolean, one float) combine without a warning;
    - NestedTensor inputs are refused: pass padded tensors and ``key_padding_mask``.

    The projections use the same matrix product as :class:`trifuse.nn.Linear`.

    torch's inference fast path never takes over: neither the one in ``nn.MultiheadAttention`` nor
    the one in an ``nn.TransformerEncoderLayer`` that has this module as its ``self_attn``.

    Args:
        embed_dim: features of the query and the output, over all heads.
        num_heads: number of heads; divides ``embed_dim``.
        dropout: probability of dropping an attention weight while training.
        bias: whether the projections have biases.
        add_bias_kv: append a learnt key and value to every sequence.
        add_zero_attn: append a key and value of zeros to every sequence.
        kdim, vdim: features of the key and the value. Default: ``embed_dim``.
        batch_first: whether batched tensors are (B, L, features) instead of (L, B, features).
        device, dtype: of the parameters.

    Raises:
        As ``torch.nn.MultiheadAttention``.
        ValueError: a size is above 2^60.
    """

    qconfig = Unquantizable(nn.MultiheadAttention)
    frozen = False  # whether weights are kept only in their packed form: see trifuse.fuse

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """Whether the projections are packed in ``in_proj_weight``; False for torch's fast path.

        ``nn.TransformerEncoderLayer`` and ``nn.TransformerEncoder`` pass the parameters of their
        ``self_attn`` to a native kernel without calling the module, unless this is False. Other
        readers get the true value, except under torch.compile, where the reader can't be identified
        and the value is False.
        """
        if torch.compiler.is_compiling():
            return False
        frame = inspect.currentframe()
        reader = None if frame is None else frame.f_back
        if reader is not None and reader.f_globals.get("__name__") == nn.Transformer.__module__:
            return False
        packed: bool = vars(self)["_qkv_same_embed_dim"]
        return packed

    @_qkv_same_embed_dim.setter
    def _qkv_same_embed_dim(self, packed: bool) -> None:
        vars(self)["_qkv_same_embed_dim"] = packed

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | PackedSequences | CrossSequences | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attends; arguments and results as in ``torch.nn.MultiheadAttention.forward``.

        Boolean masks follow torch.nn's convention here: True means left out.

        Args:
            query: (L, B, embed_dim), or (B, L, embed_dim) with ``batch_first``, or (L, embed_dim).
            key: the same with S and kdim.
            value: the same with S and vdim.
            key_padding_mask: (B, S), or (S,) unbatched; boolean, or floating and added. A stack
                that packs its batch passes its :class:`PackedSequences` or CrossSequences instead.
            need_weights: also return the weights, which are then computed by the formula, with
                (B, num_heads, L, S) tensors in memory.
            attn_mask: (L, S) or (B · num_heads, L, S); boolean, or floating and added.
            average_attn_weights: return the mean of the heads' weights.
            is_causal: a promise that ``attn_mask`` is the causal mask. It is then not read, unless
                weights are needed or the module appends a key (``add_bias_kv``, ``add_zero_attn``).

        Returns:
            The output, shaped like the query, and the weights ((B, L, S); (B, num_heads, L, S) if
            not averaged; without B if unbatched) or None.

        Raises:
            AssertionError: a tensor's number of dimensions, shape or dtype doesn't fit.
            RuntimeError: ``is_causal`` without ``attn_mask``, or the shape of ``attn_mask``.
        """
        dropout_p = self.dropout if self.training else 0.0
        if isinstance(key_padding_mask, (PackedSequences, CrossSequences)):
            q, k, v = self._heads(query, key, value, batch_first=True)
            out = packing.attend(q, k, v, key_padding_mask, dropout_p, is_causal)
            return self.project_out(out, batch_first=True), None

        is_batched = self._check(query, key, value, key_padding_mask, attn_mask, is_causal)
        batch_first = self.batch_first and is_batched
        if not is_batched:
            query, key, value = _unsqueeze_batch(query, key, value)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]

        q, k, v = self._heads(query, key, value, batch_first)
        k, v, appended = self._append_keys(k, v)
        if appended:
            key_padding_mask = _append_allowed(key_padding_mask, appended)
            attn_mask = _append_allowed(attn_mask, appended)
        is_causal = is_causal and not need_weights and not appended
        mask = combine(key_padding_mask, None if is_causal else attn_mask, self.num_heads)

        weights = None
        if need_weights:
            weights = _attention_weights(q, k, mask, dropout_p)
            out = weights @ v
        else:
            out = scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal)

        out = self.project_out(out, batch_first)
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if not is_batched:
            out = out.squeeze(1)
            weights = None if weights is None else weights.squeeze(0)
        return out, weights

    def _heads(
        self, query: Tensor, key: Tensor, value: Tensor, batch_first: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Projects query, key and value, and views each as (B, H, L, E) without a copy."""
        # Read once, because a parametrization computes them at each reading.
        weight, bias = self.in_proj_weight, self.in_proj_bias
        if weight is not None and query is key and key is value:
            q, k, v = self.split_heads(self._project_in(query, "qkv", weight, bias), batch_first)
        elif weight is not None and key is value:
            (q,) = self.split_heads(self._project_in(query, "q", weight, bias), batch_first)
            k, v = self.split_heads(self._project_in(key, "kv", weight, bias), batch_first)
        else:
            if weight is None:
                weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            else:
                weights = weight.chunk(3)
            biases = (None,) * 3 if bias is None else bias.chunk(3)
            names = ("q", "k", "v")
            inputs = (query, key, value)
            (q,), (k,), (v,) = (
                self.split_heads(project(self, *each), batch_first)
                for each in zip(names, inputs, weights, biases, strict=True)
            )
        return q, k, v

    def project_in(self, x: Tensor, which: Literal["qkv", "kv", "q"]) -> Tensor:
        """Projects (..., embed_dim) to query, key and value side by side, or to those named.

        ``in_proj_weight`` holds the weights of all three.
        """
        return self._project_in(x, which, self.in_proj_weight, self.in_proj_bias)

    def _project_in(
        self, x: Tensor, which: Literal["qkv", "kv", "q"], weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        first, last = {"qkv": (0, 3), "kv": (1, 3), "q": (0, 1)}[which]
        E = self.embed_dim
        if which != "qkv":
            weight = weight[first * E : last * E]
            bias = None if bias is None else bias[first * E : last * E]
        return project(self, which, x, weight, bias)

    def split_heads(self, x: Tensor, batch_first: bool) -> tuple[Tensor, ...]:
        """Views each embed_dim features of (B, L, ...), or (L, B, ...), as heads (B, H, L, E)."""
        return split_heads(x, x.shape[-1] // self.embed_dim, self.num_heads, batch_first)

    def project_out(self, out: Tensor, batch_first: bool) -> Tensor:
        """Joins the heads, (B, H, L, E) to (B, L, H · E) or (L, B, H · E), and projects.

        The operator's output has the query's memory order, so that joining the heads is a view.
        """
        out = out.permute((0, 2, 1, 3) if batch_first else (2, 0, 1, 3)).flatten(-2)
        return project(self, "out", out, self.out_proj.weight, self.out_proj.bias)

    def _append_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
        """Appends the learnt key (``add_bias_kv``) and the zero key; also returns their number."""
        appended = 0
        bias_k, bias_v = self.bias_k, self.bias_v
        if bias_k is not None and bias_v is not None:
            shape = (self.num_heads, 1, self.head_dim)
            k = torch.cat((k, bias_k.to(k.dtype).view(shape).expand(k.shape[0], -1, -1, -1)), 2)
            v = torch.cat((v, bias_v.to(v.dtype).view(shape).expand(v.shape[0], -1, -1, -1)), 2)
            appended += 1
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
            appended += 1
        return k, v, appended

    def _check(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> bool:
        """Raises as torch does for arguments that don't fit; returns whether they are batched."""
        if query.is_nested or key.is_nested or value.is_nested:
            raise AssertionError(
                "query, key, value: expected padded tensors with a key_padding_mask; got a "
                "NestedTensor (a torch.nn.TransformerEncoder makes one unless it was built with "
                "enable_nested_tensor=False; trifuse.fuse and trifuse.nn.TransformerEncoder see "
                "to that)"
            )
        dims = query.dim()
        if dims not in (2, 3):
            raise AssertionError(f"query: expected 2 or 3 dimensions; got {dims}")
        for name, tensor in (("key", key), ("value", value)):
            if tensor.dim() != dims:
                raise AssertionError(f"{name}: expected {dims} dimensions; got {tensor.dim()}")
        for name, tensor, size in (
            ("query", query, "embed_dim"),
            ("key", key, "kdim"),
            ("value", value, "vdim"),
        ):
            features, expected = tensor.shape[-1], getattr(self, size)
            if features != expected:
                raise AssertionError(
                    f"{name}: expected {expected} features ({size}); got {features}"
                )
        length, batch = (1, 0) if self.batch_first and dims == 3 else (0, 1)
        L, S = query.shape[length], key.shape[length]
        B = query.shape[batch] if dims == 3 else 1
        if key.shape[:-1] != value.shape[:-1]:
            raise AssertionError(
                f"value: expected {tuple(key.shape[:-1])} before the features, as key; "
                f"got {tuple(value.shape[:-1])}"
            )
        if dims == 3 and key.shape[batch] != B:
            raise AssertionError(f"key: expected batch {B}, as query; got {key.shape[batch]}")
        for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
                raise AssertionError(f"{name}: expected bool or a floating dtype; got {mask.dtype}")
        if key_padding_mask is not None:
            wanted = (B, S) if dims == 3 else (S,)
            if key_padding_mask.shape != wanted:
                got = tuple(key_padding_mask.shape)
                raise AssertionError(f"key_padding_mask: expected shape {wanted}; got {got}")
        if attn_mask is not None:
            per_head = (B * self.num_heads, L, S)
            if attn_mask.shape not in ((L, S), per_head):
                got = tuple(attn_mask.shape)
                raise RuntimeError(f"attn_mask: expected shape {(L, S)} or {per_head}; got {got}")
        elif is_causal:
            raise RuntimeError(
                "is_causal: expected attn_mask to be given too, since is_causal only says that it "
                "is the causal mask; got None"
            )
        return dims == 3


class _Rows(NamedTuple):
    """Features of a product with some of the rows of a frozen weight.

    The packed form can be cut only between panels of 64 rows. So the weight begins and ends with
    the panels in which the rows do, and the other features of the product are left out.
    """

    weight: FrozenWeight  # shares the memory of the whole
    of_bias: slice | None  # the rows of the weight within the whole; None: all
    of_product: slice | None  # the features within the product; None: all


def _rows(whole: FrozenWeight, first: int, last: int) -> _Rows:
    """Returns the rows of a frozen weight from the first to the one before the last."""
    start, stop = first // PANEL * PANEL, min(-(-last // PANEL) * PANEL, whole.shape[0])
    features = slice(first - start, last - start)
    is_whole = stop - start == whole.shape[0]
    return _Rows(
        whole if is_whole else whole.rows(start, stop),
        None if is_whole else slice(start, stop),
        None if features == slice(0, stop - start) else features,
    )


class FrozenMultiheadAttention(HoldsFrozen, MultiheadAttention):
    """A :class:`MultiheadAttention` whose weights are kept only in their packed form.

    See :class:`trifuse.nn.linear.HoldsFrozen`. The layer ``out_proj`` is frozen too.
    """

    _weights: dict[str, FrozenWeight]  # by the names of the parameters
    _frozen: FrozenWeight | None  # in_proj_weight; None if query, key and value have one each
    _parts: dict[str, _Rows]  # by the names of their results

    @staticmethod
    def weight_names(module: Any) -> tuple[str, ...]:
        """As :meth:`HoldsFrozen.weight_names`."""
        return ATTENTION_WEIGHTS[:1] if module._qkv_same_embed_dim else ATTENTION_WEIGHTS[1:]

    def frozen_weights(self) -> dict[str, FrozenWeight]:
        """As :meth:`HoldsFrozen.frozen_weights`."""
        return self._weights

    def _keep(self, weights: dict[str, FrozenWeight]) -> None:
        """As :meth:`HoldsFrozen._keep`."""
        joint, E = weights.get("in_proj_weight"), self.embed_dim
        if joint is None:
            apart = zip("qkv", weights.values(), strict=True)
            parts = {
                name: _Rows(weight, slice(i * E, (i + 1) * E), None)
                for i, (name, weight) in enumerate(apart)
            }
        else:
            ranges = {"qkv": (0, 3), "kv": (1, 3), "q": (0, 1), "k": (1, 2), "v": (2, 3)}
            parts = {
                name: _rows(joint, first * E, last * E) for name, (first, last) in ranges.items()
            }
        vars(self).update(_weights=weights, _frozen=joint, _parts=parts)

    def _release(self) -> None:
        """As :meth:`HoldsFrozen._release`."""
        for name in ("_weights", "_frozen", "_parts"):
            del vars(self)[name]

    def __getstate__(self) -> dict[str, Any]:
        # A copy cuts its own weights into parts.
        return {k: v for k, v in vars(self).items() if k not in ("_frozen", "_parts")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._keep(self._weights)

    def _read(self, name: str) -> Any:
        weight = self._weights.get(name)
        return self._parameters[name] if weight is None else self._unpacked(name, weight)

    def _refuse(self, value: Any) -> None:
        raise RuntimeError(frozen_message("setting a weight"))

    in_proj_weight = property(lambda self: self._read("in_proj_weight"), _refuse)
    q_proj_weight = property(lambda self: self._read("q_proj_weight"), _refuse)
    k_proj_weight = property(lambda self: self._read("k_proj_weight"), _refuse)
    v_proj_weight = property(lambda self: self._read("v_proj_weight"), _refuse)

    def _heads(
        self, query: Tensor, key: Tensor, value: Tensor, batch_first: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        if "qkv" in self._parts and key is value:
            if query is key:
                q, k, v = self.split_heads(self.project_in(query, "qkv"), batch_first)
                return q, k, v
            (q,) = self.split_heads(self.project_in(query, "q"), batch_first)
            k, v = self.split_heads(self.project_in(key, "kv"), batch_first)
            return q, k, v
        (q,) = self.split_heads(self.project_in(query, "q"), batch_first)
        (k,) = self.split_heads(self.project_in(key, "k"), batch_first)
        (v,) = self.split_heads(self.project_in(value, "v"), batch_first)
        return q, k, v

    def project_in(self, x: Tensor, which: Literal["qkv", "kv", "q", "k", "v"]) -> Tensor:
        """As :meth:`MultiheadAttention.project_in`."""
        weight, of_bias, of_product = self._parts[which]
        bias: Tensor | None = self.in_proj_bias
        if bias is not None and of_bias is not None:
            bias = bias[of_bias]
        out = linear_frozen(x, weight, bias)
        return out if of_product is None else out[..., of_product]

    def project_out(self, out: Tensor, batch_first: bool) -> Tensor:
        """As :meth:`MultiheadAttention.project_out`."""
        if not is_frozen(self.out_proj):  # replaced since
            return super().project_out(out, batch_first)
        out = out.permute((0, 2, 1, 3) if batch_first else (2, 0, 1, 3)).flatten(-2)
        return linear_frozen(out, self.out_proj._frozen, self.out_proj.bias)


FROZEN_ATTENTION[MultiheadAttention] = FrozenMultiheadAttention


def is_ours(module: nn.Module) -> TypeGuard[MultiheadAttention]:
    """Returns whether a module is one of the two classes, and not of a derived class."""
    return type(module) in (MultiheadAttention, FrozenMultiheadAttention)


def _unsqueeze_batch(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(L, E) → (L, 1, E). Identical tensors stay identical, because ``_heads`` compares them."""
    q = query.unsqueeze(1)
    k = q if key is query else key.unsqueeze(1)
    v = k if value is key else value.unsqueeze(1)
    return q, k, v


def _append_allowed(mask: Tensor | None, keys: int) -> Tensor | None:
    """Pads a mask for appended keys; False and 0 both let them take part."""
    return None if mask is None else F.pad(mask, (0, keys))


def combine(
    key_padding_mask: Tensor | None, attn_mask: Tensor | None, num_heads: int
) -> Tensor | None:
    """Combines the masks into one in which True takes part, broadcastable to (B, H, L, S)."""
    padding = None if key_padding_mask is None else key_padding_mask[:, None, None, :]
    if attn_mask is not None:
        attn_mask = attn_mask.unflatten(0, (-1, num_heads)) if attn_mask.dim() == 3 else attn_mask
    if padding is None or attn_mask is None:
        mask = attn_mask if padding is None else padding
        return mask.logical_not() if mask is not None and mask.dtype == torch.bool else mask
    if padding.dtype == torch.bool and attn_mask.dtype == torch.bool:
        return (padding | attn_mask).logical_not_()
    if padding.dtype == torch.bool:
        return attn_mask.masked_fill(padding, float("-inf"))
    if attn_mask.dtype == torch.bool:
        return padding.masked_fill(attn_mask, float("-inf"))
    return padding + attn_mask


def _attention_weights(q: Tensor, k: Tensor, mask: Tensor | None, dropout_p: float) -> Tensor:
    """Returns dropout(softmax(q kᵀ / √E + mask)), (B, H, L, S); 0 where every key is masked.

    The weights have q's dtype, whatever the mask's.
    """
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-1, -2)
    if mask is None:
        weights = scores.softmax(-1).to(q.dtype)
    else:
        if mask.dtype == torch.bool:
            left_out = mask.logical_not()
        else:
            left_out = mask == float("-inf")
            scores = scores + mask
        # The lowest finite number instead of -inf, because a row without keys would otherwise give
        # NaN, which would also appear in its gradient. Its weights are equal until they are zeroed
        # below.
        scores = scores.masked_fill(left_out, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1).to(q.dtype).masked_fill(left_out, 0.0)
    return F.dropout(weights, dropout_p) if dropout_p > 0 else weights
