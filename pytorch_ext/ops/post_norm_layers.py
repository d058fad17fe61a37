"""Layers of an encoder, in training and inference. C++ calls their parts one after another.

The products are torch's, and attention and norms are those of :mod:`trifuse.ops`. On a GPU a layer
of moderate size computes in less time than Python and autograd take to call its parts. Here a layer
is one node of the graph, and its results have the same bits as those of its parts. Its gradients
are rounded less often. It draws the seeds of all layers at once. On a GPU these differ from the
seeds that the parts would draw one by one.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trifuse import backends
from trifuse.ops import _fast_path
from trifuse.ops._attention_arguments import refuse_context_parallel


def post_norm_layers(
    x: Tensor,
    attn_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    layers: tuple[tuple[Any, ...], ...],
    dropout_p: tuple[float, ...],
    head_dim: int,
) -> Tensor | None:
    """Computes norm(h + dropout(ffn(h))) with h = norm(x + dropout(attention(x))), layer by layer.

    Args:
        x: (B, L, features), contiguous.
        attn_mask: as in :func:`trifuse.scaled_dot_product_attention`, with 4 dimensions.
        cu_seqlens: int (N + 1,), where N sequences begin among the L tokens; then B is 1.
        max_seqlen: the length of the longest of these.
        layers: for each layer, a tuple of

            - a tuple of 16: the weights of query, key, value, the attention's output, and the two
              products of the feed-forward network; their biases, or None; and each norm's weight
              and bias, or None;
            - the number of heads, the scale of q·k, the name of the activation
              (:data:`trifuse.ops.activations.Activation`), and the eps of each norm.

        dropout_p: for each layer, the probabilities of dropping weights of the attention, and
            features before each norm.
        head_dim: that of all layers.

    Returns:
        (B, L, features); None if the call isn't plain (csrc/fast_path/), isn't valid, or would
        run on kernels other than those of the extension.
    """
    draws = any(dropout_p)
    if x.is_cuda:
        masked = attn_mask is not None
        calls = (
            backends.Call("attention", "cuda", x.dtype, head_dim, masked),
            backends.Call("dropout_add_layer_norm", "cuda", x.dtype),
        )
        fast, other = (_fast_path.extension(draws, call) for call in calls)
        if other is None:
            return None
    else:
        fast = _fast_path.extension(draws)
    if fast is None:
        return None
    refuse_context_parallel()
    out: Tensor | None = fast.post_norm_layers(
        x, attn_mask, cu_seqlens, max_seqlen, layers, dropout_p
    )
    return out
