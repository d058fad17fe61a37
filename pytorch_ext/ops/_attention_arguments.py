"""The arguments of attention are checked here, and make up a call of the operator."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.nn import functional

from trifuse import backends
from trifuse.ops import _checks, _modes
from trifuse.ops._alibi import alibi_bias
from trifuse.ops._checks import fail
from trifuse.reference import attention as reference

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias, CausalVariant


class Tensors(NamedTuple):
    """See :func:`trifuse.reference.attention.attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    relative_bias: Tensor | None = None
    query_bias: Tensor | None = None
    key_bias: Tensor | None = None
    relative_index: Tensor | None = None
    key_lengths: Tensor | None = None
    diagonal: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seed: Tensor | None = None


# The number of tensors that have gradients. They come first.
DIFFERENTIABLE = Tensors._fields.index("relative_index")


class Options(NamedTuple):
    max_seqlen_q: int
    max_seqlen_k: int
    scale: float | None
    softcap: float | None
    window_left: int | None
    window_right: int | None
    lower_right: bool
    dropout_p: float


class CheckedAttention(NamedTuple):
    """A checked call of the forward op, without the seed."""

    tensors: Tensors
    options: Options
    choice: backends.Choice
    batch_shape: tuple[int, ...] | None  # the caller's leading dimensions, if not (B, H)
    sinks: Tensor | None


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool | CausalVariant,
    scale: float | None,
    enable_gqa: bool,
    key_lengths: Tensor | None,
    window: int | tuple[int | None, int | None] | None,
    diagonal: int | Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    relative_bias: Tensor | None,
    query_bias: Tensor | None,
    key_bias: Tensor | None,
    relative_index: Tensor | None,
    alibi_slopes: Tensor | None,
    choice: backends.Choice | None = None,
) -> CheckedAttention:
    """Checks the arguments of :func:`scaled_dot_product_attention`.

    Args:
        choice: the backend, if it has been chosen before.
    """
    query, key, value, attn_mask = check_tensors(query, key, value, attn_mask)
    _checks.flag("enable_gqa", enable_gqa)
    batch_shape = None
    if not query.dim() == key.dim() == value.dim() == 4:
        query, key, value, attn_mask, batch_shape = _to_4d(query, key, value, attn_mask, enable_gqa)
    if not query.shape[:2] == key.shape[:2] == value.shape[:2]:
        query, key, value = _broadcast_batch(query, key, value, enable_gqa)
    check_sizes(query, key, value, enable_gqa)
    B, H, Lq, Lk = *query.shape[:3], key.shape[2]
    if diagonal is not None and _is_causal_bias(attn_mask):
        raise fail("diagonal", "None beside a causal bias, which has its own", diagonal)
    variant = is_causal  # distances are counted from its diagonal
    offset, offsets = _diagonal(diagonal, is_causal, B, query)
    if _is_causal_bias(attn_mask):
        if (attn_mask.seq_len_q, attn_mask.seq_len_kv) != (Lq, Lk):
            got = (attn_mask.seq_len_q, attn_mask.seq_len_kv)
            raise fail("attn_mask", f"a causal bias for lengths ({Lq}, {Lk})", got)
        variant = attn_mask.variant if is_causal is False else is_causal
        band, attn_mask = _band_with_bias(is_causal, window, attn_mask.variant, query, Lk - Lq)
    else:
        band = _moved(band_of(is_causal, window), offset)
    if attn_mask is not None:
        attn_mask = mask_to_4d(attn_mask, query, (B, H, Lq, Lk))
    if key_lengths is not None:
        key_lengths = _checks.integers("key_lengths", key_lengths, "(B,)", B, query)
    zero = _zero_distance(Lq, Lk, variant) + offset
    tables = Tables(relative_bias, query_bias, key_bias, relative_index)
    if are_indexed(tables, alibi_slopes):
        rows = (B, H) if batch_shape is None else batch_shape
        tables = indexed(tables, query, B, (Lq, Lk), (*rows, Lq), (*rows, Lk))
        tables = tables.map_rows(lambda table: table.reshape(B, H, *table.shape[-2:]))
    else:
        by_distance = _by_distance(relative_bias, alibi_slopes, query, B, Lq, Lk, zero, offsets)
        tables = Tables(relative_bias=by_distance)
    dropout_p = _checks.probability("dropout_p", dropout_p)
    return CheckedAttention(
        Tensors(query, key, value, attn_mask, *tables, key_lengths, offsets),
        Options(Lq, Lk, check_scale(scale), check_softcap(softcap), *band, dropout_p),
        choice or choose(query, value, _masked(attn_mask, tables)),
        batch_shape,
        check_sinks(sinks, query),
    )


def prepare_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool | CausalVariant,
    scale: float | None,
    enable_gqa: bool,
    window: int | tuple[int | None, int | None] | None,
    diagonal: int | Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    relative_bias: Tensor | None,
    query_bias: Tensor | None,
    key_bias: Tensor | None,
    relative_index: Tensor | None,
    alibi_slopes: Tensor | None,
    choice: backends.Choice | None = None,
) -> CheckedAttention:
    """Checks the arguments of :func:`varlen_attention`.

    Args:
        choice: the backend, if it has been chosen before.
    """
    query, key, value, attn_mask = check_tensors(query, key, value, attn_mask)
    _checks.flag("enable_gqa", enable_gqa)
    for name, packed in (("query", query), ("key", key), ("value", value)):
        if packed.dim() != 3:
            raise fail(name, "shape (total, heads, head_dim)", tuple(packed.shape))
    shape = "(sequences + 1,)"
    cu_seqlens_q = _checks.integers("cu_seqlens_q", cu_seqlens_q, shape, None, query)
    if cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
    cu_seqlens_k = _checks.integers(
        "cu_seqlens_k", cu_seqlens_k, "of cu_seqlens_q", cu_seqlens_q.shape[0], query
    )
    if cu_seqlens_q.shape[0] == 0:
        raise fail("cu_seqlens_q", "at least one boundary", "an empty tensor")
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    check_sizes(query, key, value, enable_gqa)
    max_seqlen_q = check_max_seqlen("max_seqlen_q", max_seqlen_q, query)
    max_seqlen_k = check_max_seqlen("max_seqlen_k", max_seqlen_k, key)
    N, lengths = cu_seqlens_q.shape[0] - 1, (max_seqlen_q, max_seqlen_k)
    offset, offsets = _diagonal(diagonal, is_causal, N, query)
    band = _moved(band_of(is_causal, window), offset)
    if attn_mask is not None:
        if _is_causal_bias(attn_mask):
            raise fail("attn_mask", "a tensor (is_causal takes a CausalVariant)", "a CausalBias")
        attn_mask = mask_to_4d(attn_mask, query, (N, query.shape[1], *lengths))
    zero = _zero_distance(*lengths, is_causal) + offset
    tables = Tables(relative_bias, query_bias, key_bias, relative_index)
    if are_indexed(tables, alibi_slopes):
        rows = ((x.shape[2], query.shape[1]) for x in (query, key))
        tables = indexed(tables, query, N, lengths, *rows)
        tables = tables.map_rows(lambda table: table.transpose(0, 1).unsqueeze(0))
    else:
        by_distance = _by_distance(relative_bias, alibi_slopes, query, N, *lengths, zero, offsets)
        tables = Tables(relative_bias=by_distance)
    dropout_p = _checks.probability("dropout_p", dropout_p)
    return CheckedAttention(
        Tensors(query, key, value, attn_mask, *tables, None, offsets, cu_seqlens_q, cu_seqlens_k),
        Options(
            max_seqlen_q, max_seqlen_k, check_scale(scale), check_softcap(softcap), *band, dropout_p
        ),
        choice or choose(query, value, _masked(attn_mask, tables)),
        None,
        check_sinks(sinks, query),
    )


def check_tensors(
    query: Any, key: Any, value: Any, attn_mask: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Checks types, dtypes and devices; returns the tensors after autocast."""
    query = _checks.tensor("query", query)
    key = _checks.tensor("key", key)
    value = _checks.tensor("value", value)
    if attn_mask is not None and not _is_causal_bias(attn_mask):
        attn_mask = _checks.tensor("attn_mask", attn_mask)
    dtype = _modes.autocast_dtype(query)
    if dtype is not None:
        query, key, value = (_autocast(x, dtype) for x in (query, key, value))
        # A float32 mask stays float32; rounding it would only lose accuracy.
        if attn_mask is not None and attn_mask.dtype != torch.float32:
            attn_mask = _autocast(attn_mask, dtype)
    _checks.floating("query", query)
    dtype = query.dtype
    for name, other in (("key", key), ("value", value)):
        if other.dtype != dtype:
            raise TypeError(f"{name}: expected {dtype}, as query; got {other.dtype}")
        _checks.same_device(name, other, "query", query)
    return query, key, value, attn_mask


def _autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts as autocast does: float64 and non-floating tensors stay as they are."""
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x


def _to_4d(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, tuple[int, ...]]:
    """Reshapes (..., H, L, E) to (B, H, L, E); also returns the result's leading dimensions.

    As in torch, 3-D tensors are batches of one head, unless ``enable_gqa`` is set.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2:
            raise fail(name, "at least 2 dimensions", tuple(tensor.shape))
    dims = (query.dim(), key.dim(), value.dim())
    if max(dims) <= 3 and not (enable_gqa and min(dims) == 3):
        batch_shape = _broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
        if isinstance(attn_mask, Tensor) and not _is_causal_bias(attn_mask):
            # (N, Lq, Lk) lacks the head dimension between the batch and Lq.
            attn_mask = attn_mask.unsqueeze(-3) if attn_mask.dim() == 3 else attn_mask
        N = math.prod(batch_shape)
        query, key, value = (
            x.expand(*batch_shape, *x.shape[-2:]).reshape(N, 1, *x.shape[-2:])
            for x in (query, key, value)
        )
        return query, key, value, attn_mask, batch_shape
    # Heads may differ between query and key; everything before them must broadcast.
    batch = _broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    if isinstance(attn_mask, Tensor) and not _is_causal_bias(attn_mask) and attn_mask.dim() > 3:
        wanted = torch.Size((*batch, *attn_mask.shape[-3:]))
        attn_mask = _expand("attn_mask", attn_mask, wanted).flatten(0, -4)
    B = math.prod(batch)
    with_heads = (x.unsqueeze(-3) if x.dim() == 2 else x for x in (query, key, value))
    query, key, value = (
        x.expand(*batch, *x.shape[-3:]).reshape(B, *x.shape[-3:]) for x in with_heads
    )
    query, key, value = _broadcast_batch(query, key, value, enable_gqa)
    return query, key, value, attn_mask, (*batch, query.shape[1])


def _is_causal_bias(attn_mask: object) -> TypeGuard[CausalBias]:
    """Finds the class in sys.modules, because importing its module would load torch.compile."""
    bias = sys.modules.get("torch.nn.attention.bias")
    return bias is not None and isinstance(attn_mask, bias.CausalBias)


def _broadcast_shapes(query: torch.Size, key: torch.Size, value: torch.Size) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_shapes(query, key, value))
    except RuntimeError:
        got = f"{tuple(query)}, {tuple(key)} and {tuple(value)}"
        raise fail("query, key, value", "leading dimensions that broadcast", got) from None


def _broadcast_batch(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Expands to one batch size and, without ``enable_gqa``, to one number of heads."""
    (B,) = _broadcast_shapes(query.shape[:1], key.shape[:1], value.shape[:1])
    query, key, value = (x.expand(B, -1, -1, -1) for x in (query, key, value))
    if not enable_gqa:
        H = next((x.shape[1] for x in (query, key, value) if x.shape[1] != 1), 1)
        query, key, value = (
            x.expand(-1, H, -1, -1) if x.shape[1] == 1 else x for x in (query, key, value)
        )
    return query, key, value


def check_sizes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    H, Hkv = query.shape[1], key.shape[1]
    if key.shape[3] != query.shape[3]:
        raise fail("key", f"head_dim {query.shape[3]}, as query", key.shape[3])
    if value.shape[2] != key.shape[2]:
        raise fail("value", f"length {key.shape[2]}, as key", value.shape[2])
    if value.shape[1] != Hkv:
        raise fail("value", f"{Hkv} heads, as key", value.shape[1])
    if Hkv != H:
        if not enable_gqa:
            raise fail("key", f"{H} heads, as query (or enable_gqa=True)", Hkv)
        if Hkv == 0 or H % Hkv:
            raise fail("key", f"a number of heads that divides query's {H}", Hkv)


def mask_to_4d(attn_mask: Tensor, query: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """Views the caller's mask with four dimensions, each full or 1."""
    dtype = attn_mask.dtype
    if dtype not in (torch.bool, torch.float32, query.dtype):
        expected = "torch.bool, torch.float32 or the query's dtype"
        raise TypeError(f"attn_mask: expected {expected} ({query.dtype}); got {dtype}")
    _checks.same_device("attn_mask", attn_mask, "query", query)
    got = attn_mask.shape
    if len(got) < 4:
        attn_mask = attn_mask[(None,) * (4 - len(got))]
    if attn_mask.dim() > 4 or any(
        size not in (1, full) for size, full in zip(attn_mask.shape, shape, strict=True)
    ):
        raise fail("attn_mask", f"a shape broadcastable to {shape}", tuple(got))
    return attn_mask


def _expand(argument: str, tensor: Tensor, shape: torch.Size) -> Tensor:
    try:
        return tensor.expand(shape)
    except RuntimeError:
        raise fail(
            argument, f"a shape broadcastable to {tuple(shape)}", tuple(tensor.shape)
        ) from None


def check_scale(scale: float | None) -> float | None:
    return None if scale is None else _checks.number("scale", scale)


def check_softcap(softcap: float | None) -> float | None:
    if softcap is None:
        return None
    softcap = _checks.number("softcap", softcap)
    if not is_softcap(softcap):
        raise fail("softcap", "a number in [2⁻¹²⁶, 2¹²⁶]", softcap)
    return softcap


def is_softcap(number: Any) -> bool:
    """Whether a number can bound scores: it and its inverse are normal in float32."""
    return isinstance(number, (int, float)) and 2.0**-126 <= number <= 2.0**126


def check_sinks(sinks: Tensor | None, query: Tensor) -> Tensor | None:
    """Checks the sinks of a call; ``query`` is (B, H, L, E), after autocast."""
    if sinks is None:
        return None
    sinks = _beside_query("sinks", sinks, query)
    if sinks.shape != query.shape[1:2]:
        raise fail("sinks", f"shape ({query.shape[1]},), a number a head", tuple(sinks.shape))
    return sinks


def _diagonal(
    diagonal: int | Tensor | None, is_causal: bool | CausalVariant, B: int, query: Tensor
) -> tuple[int, Tensor | None]:
    """Checks the offset of a call's diagonal; returns one number, or 0 and a tensor of offsets."""
    if diagonal is None:
        return 0, None
    if _is_lower_right(is_causal):
        raise fail("diagonal", "None beside a lower right diagonal", diagonal)
    if isinstance(diagonal, Tensor):
        return 0, _checks.integers("diagonal", diagonal, "(B,), one a sequence", B, query)
    return _checks.offset("diagonal", diagonal), None


def _is_lower_right(is_causal: bool | CausalVariant) -> bool:
    return getattr(is_causal, "name", None) == "LOWER_RIGHT"


def _zero_distance(Lq: int, Lk: int, is_causal: bool | CausalVariant) -> int:
    """Returns the place of distance 0 in the biases by distance of a call without an offset."""
    return (Lk if _is_lower_right(is_causal) else Lq) - 1


def _by_distance(
    relative_bias: Tensor | None,
    alibi_slopes: Tensor | None,
    query: Tensor,
    B: int,
    Lq: int,
    Lk: int,
    zero: int,
    offsets: Tensor | None,
) -> Tensor | None:
    """Checks the biases by distance of a call, and returns their sum: (B, H, Lq + Lk - 1).

    ``query`` is (B, H, L, E), after autocast, ``B`` the number of sequences, and ``zero`` the place
    of distance 0, which ``offsets`` (B,) move for each sequence.
    """
    if relative_bias is None and alibi_slopes is None:
        return None
    length = max(Lq + Lk - 1, 0)
    if relative_bias is not None:
        relative_bias = relative_bias_to_3d(relative_bias, query, B, length)
        if offsets is not None and relative_bias.shape[0] != B:
            shape = f"shape ({B}, {query.shape[1]} or 1, {length})"
            expected = f"{shape} if each sequence has a diagonal of its own"
            raise fail("relative_bias", expected, tuple(relative_bias.shape))
    if alibi_slopes is None:
        return relative_bias
    slopes = slopes_to_2d(alibi_slopes, query, B)
    if offsets is None:
        alibi = alibi_bias(slopes, length, zero)
    else:
        farthest = reference.FARTHEST
        zeros = zero + offsets.long().clamp(-farthest, farthest)
        alibi = alibi_bias(slopes.expand(B, -1), length, zeros)
    return alibi if relative_bias is None else relative_bias + alibi


def relative_bias_to_3d(relative_bias: Tensor, query: Tensor, B: int, length: int | None) -> Tensor:
    """Checks a table of ``length`` biases by distance, and views it with three dimensions.

    Args:
        length: None for a table with an index, of any length.
    """
    relative_bias = _beside_query("relative_bias", relative_bias, query)
    got, H = tuple(relative_bias.shape), query.shape[1]
    *leading, n = got or (0,)
    sizes = zip(reversed(leading), (H, B), strict=False)
    fits = length in (None, n) and all(size in (1, full) for size, full in sizes)
    if not fits or not 1 <= len(got) <= 3:
        last = "n" if length is None else length
        expected = f"shape ({B} or 1, {H} or 1, {last}), or its last dimensions"
        raise fail("relative_bias", expected, got)
    return relative_bias[(None,) * (3 - len(got))]


class Tables(NamedTuple):
    """Biases as tables, from a call's arguments or from those of the op."""

    relative_bias: Tensor | None = None
    query_bias: Tensor | None = None
    key_bias: Tensor | None = None
    relative_index: Tensor | None = None

    def map_rows(self, view: Callable[[Tensor], Tensor]) -> Tables:
        """Returns the tables with those of every query and every key viewed by ``view``."""
        query, key = (None if t is None else view(t) for t in (self.query_bias, self.key_bias))
        return self._replace(query_bias=query, key_bias=key)


def are_indexed(tables: Tables, alibi_slopes: Tensor | None) -> bool:
    """Returns whether an index selects the column of the tables that a pair reads."""
    if tables.relative_index is None:
        for name in ("query_bias", "key_bias"):
            if getattr(tables, name) is not None:
                raise fail(name, "None without relative_index", "a tensor")
        return False
    if all(table is None for table in tables[:3]):
        expected = "None without relative_bias, query_bias and key_bias"
        raise fail("relative_index", expected, "a tensor")
    if alibi_slopes is not None:
        raise fail("alibi_slopes", "None beside relative_index", "a tensor")
    return True


def indexed(
    tables: Tables,
    query: Tensor,
    B: int,
    lengths: tuple[int, int],
    queries: tuple[int, ...],
    keys: tuple[int, ...],
) -> Tables:
    """Checks tables that are read by an index, and views ``relative_bias`` as (B, H, n).

    Args:
        query: (B, H, L, E), after autocast.
        lengths: Lq and Lk; those of the longest sequences if they are packed.
        queries, keys: the shapes of ``query_bias`` and ``key_bias`` without the last dimension.
    """
    relative_bias, query_bias, key_bias, index = tables
    Lq, Lk = lengths
    index = _checks.tensor("relative_index", index)
    if index.dtype not in _checks.INTEGER:
        raise TypeError(f"relative_index: expected int32 or int64; got {index.dtype}")
    _checks.same_device("relative_index", index, "query", query)
    if tuple(index.shape) not in ((Lq, Lk), (max(Lq + Lk - 1, 0),)):
        expected = f"shape ({Lq}, {Lk}) or, by distance, ({max(Lq + Lk - 1, 0)},)"
        raise fail("relative_index", expected, tuple(index.shape))
    if relative_bias is not None:
        relative_bias = relative_bias_to_3d(relative_bias, query, B, None)
    if query_bias is not None:
        query_bias = _table_of_rows("query_bias", query_bias, query, queries)
    if key_bias is not None:
        key_bias = _table_of_rows("key_bias", key_bias, query, keys)
    checked = Tables(relative_bias, query_bias, key_bias, index)
    given = {name: t.shape[-1] for name, t in checked._asdict().items() if t is not None}
    (first, n), *others = list(given.items())[:-1]
    if n == 0:
        raise fail(first, "a column at least", tuple(getattr(checked, first).shape))
    for name, columns in others:
        if columns != n:
            raise fail(name, f"{n} columns, as {first}", columns)
    return checked


def _table_of_rows(name: str, table: Any, query: Tensor, rows: tuple[int, ...]) -> Tensor:
    """Checks a table of every query or key, ``rows``."""
    table = _beside_query(name, table, query)
    if tuple(table.shape[:-1]) != rows or table.dim() != len(rows) + 1:
        raise fail(name, f"shape ({', '.join(map(str, rows))}, n)", tuple(table.shape))
    return table


def _masked(attn_mask: Tensor | None, tables: Tables) -> bool:
    """Returns whether a call has a mask or a table."""
    return attn_mask is not None or any(table is not None for table in tables)


def slopes_to_2d(alibi_slopes: Tensor, query: Tensor, B: int) -> Tensor:
    """Checks ALiBi's slopes, and views them with two dimensions, the first full or 1."""
    alibi_slopes = _beside_query("alibi_slopes", alibi_slopes, query)
    got, H = tuple(alibi_slopes.shape), query.shape[1]
    if got not in ((H,), (B, H)):
        raise fail("alibi_slopes", f"shape ({H},) or ({B}, {H})", got)
    return alibi_slopes if len(got) == 2 else alibi_slopes[None]


def _beside_query(name: str, bias: Any, query: Tensor) -> Tensor:
    """Checks a bias in the query's dtype, or in float32, which stays float32 as for a mask."""
    bias = _checks.tensor(name, bias)
    dtype = _modes.autocast_dtype(query)
    if dtype is not None and bias.dtype != torch.float32:
        bias = _autocast(bias, dtype)
    return _checks.matching(name, bias, "query", query)


Band = tuple[int | None, int | None, bool]


def band_of(
    is_causal: bool | CausalVariant, window: int | tuple[int | None, int | None] | None
) -> Band:
    """Returns (left, right, lower_right), bounds around the diagonal; None means no bound."""
    left = right = None
    if window is not None:
        pair = window if isinstance(window, (tuple, list)) else (window, window)
        sides = [None if side is None else _checks.whole_number(side) for side in pair]
        wrong = any(n is None and side is not None for n, side in zip(sides, pair, strict=True))
        if len(sides) != 2 or wrong:
            expected = "a number ≥ 0 or a pair (left, right) of them or None"
            raise fail("window", expected, window)
        left, right = (None if n is None or n >= _checks.MAX_DISTANCE else n for n in sides)
    if is_causal is False:
        return left, right, False
    if is_causal is True:
        return left, 0, False
    from torch.nn.attention.bias import CausalVariant  # late: loads torch.compile

    if not isinstance(is_causal, CausalVariant):
        raise TypeError(f"is_causal: expected a bool or a CausalVariant; got {is_causal!r}")
    return left, 0, is_causal is CausalVariant.LOWER_RIGHT


def _moved(band: Band, offset: int) -> Band:
    """Returns bounds around key i that include the same pairs as a band around key i + ``offset``.

    One of them may be negative: then key i is outside.
    """
    left, right, lower_right = band
    return (
        None if left is None else _checks.within_distance(left - offset),
        None if right is None else _checks.within_distance(right + offset),
        lower_right,
    )


def _band_with_bias(
    is_causal: bool | CausalVariant,
    window: int | tuple[int | None, int | None] | None,
    bias: CausalVariant,
    query: Tensor,
    shift: int,
) -> tuple[Band, Tensor | None]:
    """Returns the band of a call whose mask is a causal bias, and a mask if the band needs one.

    ``shift`` is Lk - Lq, the offset of the lower-right diagonal from the upper-left diagonal.
    """
    if is_causal is False:
        return band_of(bias, window), None
    left, right, lower_right = band_of(is_causal, window)
    bias_lower_right = bias.name == "LOWER_RIGHT"
    before = shift * (lower_right - bias_lower_right)  # our diagonal's offset from the bias's
    if before <= 0:
        return (left, right, lower_right), None  # ours is the tighter bound
    # Around the bias's diagonal the right bound is 0, and the left bound shrinks by ``before``.
    if left is None or left >= before:
        return (None if left is None else left - before, 0, bias_lower_right), None
    return (None, None, False), query.new_zeros((1, 1, 1, 1), dtype=torch.bool)  # no pair is left


def check_max_seqlen(argument: str, value: int | None, packed: Tensor) -> int:
    if value is None:
        return packed.shape[2]
    checked = _checks.whole_number(value)
    if checked is None:
        raise fail(argument, "an int ≥ 0", repr(value))
    return checked


def refuse_context_parallel() -> None:
    """Raises where torch's context parallelism has split every sequence between ranks.

    It exchanges keys by replacing ``F.scaled_dot_product_attention`` or by a handler in DTensor's
    dispatcher. A trifuse call bypasses both and would attend to its own rank's part alone. Context
    parallelism is in use only if its module, which torch has moved once, is loaded.
    """
    for name in _CONTEXT_PARALLEL:
        if name in sys.modules:
            dtensor = getattr(sys.modules[name], "DTensor", None)
            dispatcher = getattr(dtensor, "_op_dispatcher", None)
            handlers = getattr(dispatcher, "_custom_op_handlers", ())
            replaced = getattr(functional.scaled_dot_product_attention, "__module__", None) == name
            if replaced or _FLASH_ATTENTION in handlers:
                raise RuntimeError(
                    "trifuse's attention does not support torch's context parallelism, under which "
                    "each rank would attend to its own part of the sequence alone: leave "
                    "context_parallel, split the inputs by trifuse.distributed.shard_sequence and "
                    "call trifuse.distributed.ring_attention; or take "
                    "torch.nn.functional.scaled_dot_product_attention in this model (of "
                    "trifuse.fuse, FuseReport.revert() restores it)"
                )


_FLASH_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention.default
_CONTEXT_PARALLEL = (
    "torch.distributed.tensor.experimental._context_parallel._attention",
    "torch.distributed.tensor.experimental._attention",
)


def choose(query: Tensor, value: Tensor, masked: bool = False) -> backends.Choice:
    """Chooses the backend of a call.

    Args:
        masked: whether it has a mask, a relative bias or tables.
    """
    refuse_context_parallel()
    return backends.choose(_call(query, value, masked))


def _call(query: Tensor, value: Tensor, masked: bool) -> backends.Call:
    head_dim = max(query.shape[3], value.shape[3])
    return backends.Call("attention", query.device.type, query.dtype, head_dim, masked)


def call_on_gpu(query: Any, value: Any, attn_mask: Any) -> backends.Call | None:
    """Returns the properties that decide the backend, if the tensors are on an NVIDIA GPU and have
    four dimensions, as the fast path takes them."""
    if not getattr(query, "is_cuda", False) or not isinstance(value, Tensor):
        return None
    if query.dim() != 4 or value.dim() != 4:
        return None
    return _call(query, value, attn_mask is not None)


# Values of integer tensors ----------------------------------------------------------------------


def check_values(tensors: Tensors, options: Options) -> None:
    """Checks the contents of ``key_lengths``, ``cu_seqlens`` and ``relative_index``; runs inside
    the ops.

    On a CPU it raises. Elsewhere reading them would wait for the device, so the device asserts.
    """
    Lq, Lk, key_lengths = tensors.query.shape[2], tensors.key.shape[2], tensors.key_lengths
    if tensors.cu_seqlens_q is not None:
        if key_lengths is not None:
            raise fail("key_lengths", "None beside cu_seqlens_q", "a tensor")
        if tensors.query.shape[0] != 1:
            raise fail("query", "batch size 1 beside cu_seqlens_q", tensors.query.shape[0])
    if key_lengths is not None:
        ok = (key_lengths >= 0) & (key_lengths <= Lk)
        _require(ok.all(), "key_lengths", f"lengths in [0, {Lk}]", key_lengths)
    for name, cu, total, longest in (
        ("cu_seqlens_q", tensors.cu_seqlens_q, Lq, options.max_seqlen_q),
        ("cu_seqlens_k", tensors.cu_seqlens_k, Lk, options.max_seqlen_k),
    ):
        if cu is not None:
            steps = cu.diff()
            ok = (cu[0] == 0) & (cu[-1] <= total) & (steps >= 0).all() & (steps <= longest).all()
            expected = f"0 first, no decrease, no step over {longest}, the last at most {total}"
            _require(ok, name, expected, cu)
    if tensors.relative_index is not None:
        tables = (tensors.relative_bias, tensors.query_bias, tensors.key_bias)
        check_index(tensors.relative_index, tables)


def check_index(index: Tensor, tables: Sequence[Tensor | None]) -> None:
    """Checks the numbers of a ``relative_index``; the first table has the number of columns."""
    if index.numel() > 0:
        n = next(table.shape[-1] for table in tables if table is not None)
        least, greatest = index.aminmax()
        ok, expected = (least >= 0) & (greatest < n), f"least and greatest number in [0, {n - 1}]"
        _require(ok, "relative_index", expected, torch.stack((least, greatest)))


def _require(ok: Tensor, argument: str, expected: str, got: Tensor) -> None:
    if ok.device.type == "cpu":
        if not ok:
            raise fail(argument, expected, got.tolist())
    else:
        torch._assert_async(ok, f"{argument}: expected {expected}")
