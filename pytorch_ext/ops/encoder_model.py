"""A whole encoder with BERT's code as one call, from ids to hidden states, for inference on a CPU.

The call runs the kernels of :mod:`trifuse.ops.embeddings`, :mod:`trifuse.ops.encoder_layer` and
:mod:`trifuse.ops.linear`, and its results have the same bits. For one sentence, Python and torch
would otherwise take as long around the layers as one or two of the layers: by the next call, the
weights have pushed everything that they read out of the caches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from trifuse.ops import _fast_path
from trifuse.ops._attention_arguments import refuse_context_parallel


class Embeddings(NamedTuple):
    """Embeddings, as :func:`trifuse.ops.embeddings.embed` takes them."""

    tables: tuple[Tensor, ...]  # of words, kinds of segments and positions
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    last_is_residual: bool


class Ids(NamedTuple):
    """The ids that a call may leave out."""

    token_type: Tensor | None  # int64 (1, 1), of all tokens; None: a call must give its own
    buffer: Tensor | None  # the tensor from which token_type was read, at its beginning
    version: int  # of the buffer at that time
    positions: Tensor | None  # int64 (1, most tokens); None: they are counted from the words
    padding: int  # where positions are counted: the id of padding, which is its position too


class Pooler(NamedTuple):
    """A linear layer of the first token and tanh."""

    weight: Tensor  # (features, features), or packed
    bias: Tensor | None
    features: int
    sequences: int  # an unpacked weight serves fewer than this; 0: it is packed


class Parts(NamedTuple):
    """The parts of a model, which all its calls share."""

    planned: Any  # what must hold before a call: trifuse.nn.plans.Checks.compiled
    embeddings: Embeddings
    ids: Ids
    layers: tuple[tuple[Any, ...], ...]  # as trifuse.ops.encoder_layer.encoder_layers takes them
    pooler: Pooler | None
    tokens: int  # calls of fewer are served; 0: any number
    masks: bool  # whether padding is computed and masked; otherwise padded calls aren't served
    capabilities: tuple[str, ...]  # the instruction sets for which weights are packed

    def as_tuple(self) -> tuple[Any, ...]:
        """Returns the parts as :func:`encoder_model` takes them."""
        return tuple(tuple(each) if isinstance(each, tuple) else each for each in self)


def encoder_model(
    parts: tuple[Any, ...],
    idle: dict[str, Any] | None,
    input_ids: Any,
    attention_mask: Any = None,
    token_type_ids: Any = None,
    position_ids: Any = None,
) -> tuple[Tensor, Tensor | None] | None:
    """Computes the last hidden states (B, L, features) and the pooled output (B, features).

    Args:
        parts: of a model: :meth:`Parts.as_tuple`.
        idle: the globals of forward hooks that do nothing now.
        input_ids: int64 (B, L).
        attention_mask: (B, L), 0 or false at padding.
        token_type_ids, position_ids: int64, (B or 1, L or 1).

    Returns:
        None if the model isn't as it was planned, or the call isn't plain (csrc/fast_path/), needs
        a gradient, or isn't valid.
    """
    fast = _fast_path.extension()
    if fast is None:
        return None
    refuse_context_parallel()
    out: tuple[Tensor, Tensor | None] | None = fast.encoder_model(
        parts, idle, input_ids, attention_mask, token_type_ids, position_ids
    )
    return out
