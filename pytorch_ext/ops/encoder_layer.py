"""A whole layer of a Transformer as one op, for inference on a CPU.

The layer is that of an encoder, or that of a decoder, with or without cross attention.

For a short sentence a layer computes for a hundred microseconds, which is as long as Python takes
to call its parts. The op runs the same kernels, and its results have the same bits. It has no
derivative. The caller falls back to the parts if a gradient is needed, or under a mode, a transform
or a compiler.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple, get_type_hints

from torch import Tensor

from trifuse import backends
from trifuse.ops import _fast_path, _op
from trifuse.ops._attention_arguments import refuse_context_parallel
from trifuse.ops.activations import Activation


class Options(NamedTuple):
    """The options that select what a layer computes from its tensors.

    csrc/encoder_layer_options.h lists the same names in the same order. :mod:`trifuse.nn` replaces
    the first and the last two in each call.
    """

    # The epsilon of each norm, in the op's order. -1 stands for a norm that the layer lacks.
    eps: tuple[float, ...]
    num_heads: int
    num_key_heads: int  # divides num_heads; query heads are shared evenly among them
    head_dim: int
    intermediate_size: int
    scale: float  # multiplies q·k
    result_scale: float  # multiplies the result of each sublayer before it is added
    softcap: float | None  # as in trifuse.scaled_dot_product_attention
    activation: Activation | None
    norm_first: bool  # h = x + sublayer(norm(x)) instead of norm(x + sublayer(x))
    rms_norm: bool
    norms_from_one: bool  # whether 1 is added to the weights of norms
    # Whether both sublayers get x, and their results are added before x. Only with norm_first.
    # Without a norm of its own, the network gets that of the attention.
    parallel: bool
    # With parallel, whether x comes first: (x + attended) + network.
    residual_first: bool
    # Whether one weight for query, key and value holds all three of a head, then of the next.
    by_head: bool
    # Whether the norm of queries, and that of keys, is over all heads of a token at once.
    heads_normed_together: bool
    rotary_in_float32: bool  # whether rotated heads are rounded once; if not, each product is too
    rotary_interleaved: bool  # as in :class:`Rotary`
    rotary_per_pair: bool
    window_left: int  # -1: no bound
    window_right: int


class Cache(NamedTuple):
    """The keys and values of the tokens before x, with room for more, while decoding."""

    key: Tensor  # (B, num_key_heads, S, head_dim)
    value: Tensor
    past: int  # the number of earlier tokens; those of x follow. S is at least past + L


class Rotary(NamedTuple):
    """The rotation of query and key heads by their positions (Su et al., "RoFormer", 2021).

    The first E' features x of a head, E' even, become x * cos + rotated(x) * sin; the others stay.
    rotated(x) is the second half, negated, before the first half; interleaved, each pair of
    neighbours (a, b) becomes (-b, a). Per pair, there is one cosine and one sine for both features.
    """

    # (1 or B, tokens, E', or E'/2 per pair), of x's dtype, or both float32. They are those of the
    # last tokens of L; of all of them if sequences are packed.
    cos: Tensor
    sin: Tensor


class Memory(NamedTuple):
    """The keys and values of another sequence, such as an encoder's output, to attend to."""

    key: Tensor  # (B, num_key_heads, S, head_dim)
    value: Tensor
    mask: Tensor | None  # as attn_mask


_NO_CACHE = (None, None, 0)
_NO_ROTARY = (None, None)
_NO_MEMORY = (None, None, None)


def encoder_layer(
    x: Tensor,
    attn_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor | None, ...],
    norms: tuple[Tensor | None, ...],
    options: tuple[Any, ...],
    cache: Cache | None = None,
    rotary: Rotary | None = None,
    relative_bias: Tensor | None = None,
    memory: Memory | None = None,
) -> Tensor | None:
    """Computes attention and feed-forward network, each with its residual and its norms.

    Args:
        x: (B, L, features), contiguous.
        attn_mask: as in :func:`trifuse.scaled_dot_product_attention`, with 4 dimensions.
        cu_seqlens: int32 (N + 1,), where N sequences begin among the L tokens; then B is 1.
        max_seqlen: the length of the longest of these.
        weights: those of query, key and value, or one for all three; that of the attention's
            output; with a memory, those of query and output of the attention to it; those of the
            two products of the feed-forward network. If the activation is multiplied by another
            linear layer of the network's input, its weight comes between these two. All are packed
            by ``torch.ops.trifuse.pack_linear``, or all are (out_features, in_features) with
            contiguous rows or, without the additional layer, contiguous columns. That is nearly as
            fast for few tokens.
        biases: one for each of these. Two further vectors, if given, multiply the results of the
            attention and of the network before they are added (Touvron et al., "Going deeper with
            Image Transformers", 2021). Either may be None, and is if that result has a norm.
        norms: weight and bias of each norm: that of the attention, of the feed-forward network, of
            the attention to a memory; the norms of query and of key heads; and the norms of the
            results of the attention and of the network, before they are added. Those after the last
            norm of a layer may be left out.
        options: the values of :class:`Options`.
        cache: keys and values of earlier tokens, to which those of x are appended. Queries attend
            to the first past + L keys, or to as many as ``attn_mask`` has if these are more. The
            bounds of the window align the last query with the last of these keys.
        rotary: rotates queries and keys, after their norms.
        relative_bias: as in :func:`trifuse.scaled_dot_product_attention`, with 3 dimensions.
        memory: keys and values that a sublayer between the two attends to.

    Returns:
        (B, L, features); None if the call isn't plain (csrc/fast_path/), needs a gradient, or
        isn't valid.
    """
    fast = _fast_path.extension()
    if fast is None:
        return None
    refuse_context_parallel()
    out: Tensor | None = fast.encoder_layer(
        x, attn_mask, cu_seqlens, max_seqlen, weights, biases, norms, options,
        *(cache or _NO_CACHE), *(rotary or _NO_ROTARY), relative_bias, *(memory or _NO_MEMORY),
    )  # fmt: skip
    return out


def is_plain(*tensors: Tensor | None) -> bool:
    """Returns whether these tensors are plain, and neither a mode nor a transform is active."""
    fast = _fast_path.extension()
    return fast is not None and fast.plain_call(*tensors)


def encoder_layers(
    x: Tensor,
    attn_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    layers: tuple[tuple[Any, ...], ...],
) -> Tensor | None:
    """Computes layers one after another, all with the same mask, as :func:`encoder_layer` does.

    Args:
        x, attn_mask, cu_seqlens, max_seqlen: as there.
        layers: weights, biases, norms and options of each layer, as there.

    Returns:
        As there.
    """
    fast = _fast_path.extension()
    if fast is None:
        return None
    refuse_context_parallel()
    out: Tensor | None = fast.encoder_layers(x, attn_mask, cu_seqlens, max_seqlen, layers)
    return out


def _check_order(names: tuple[str, ...]) -> None:
    """Raises unless the options have these names, which are those of C++, in this order."""
    for place, (ours, theirs) in enumerate(itertools.zip_longest(Options._fields, names)):
        if ours != theirs:
            raise ImportError(
                f"option {place} of encoder_layer is {ours!r} in trifuse.ops.encoder_layer.Options "
                f"but {theirs!r} in the C++ extension (csrc/encoder_layer_options.h)"
            )


if backends._C is not None:
    _check_order(backends._C.encoder_layer_options)

_TYPES: dict[Any, str] = {
    int: "int",
    float: "float",
    bool: "bool",
    tuple[float, ...]: "float[]",
    float | None: "float?",
    Activation | None: "str?",
}
_options = [f"{_TYPES[hint]} {name}" for name, hint in get_type_hints(Options).items()]
_op.library.define(
    "encoder_layer(Tensor x, Tensor? attn_mask, Tensor? cu_seqlens, int max_seqlen, "
    f"Tensor[] weights, Tensor?[] biases, Tensor?[] norms, {', '.join(_options)}, "
    "Tensor(a!)? key_cache=None, Tensor(b!)? value_cache=None, int past=0, Tensor? cos=None, "
    "Tensor? sin=None, Tensor? relative_bias=None, Tensor? memory_key=None, "
    "Tensor? memory_value=None, Tensor? memory_mask=None) -> Tensor"
)
