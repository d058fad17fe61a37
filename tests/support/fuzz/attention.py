"""``trifuse.scaled_dot_product_attention`` and ``varlen_attention``."""

from __future__ import annotations

import dataclasses
import math
import sys
import warnings
from collections.abc import Mapping
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from . import philox
from .call import Call, Tensors, draw_modes
from .draws import Draws
from .rounding import Rounding, tanh
from .tensors import INF, NAN, Values, draw_layout

LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33)
LONG = (48, 63, 64, 65, 100, 127, 129, 200, 257, 300, 520)
HEAD_DIMS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 20, 32, 33)
WIDE = (40, 64, 65, 72, 80, 96, 128, 130, 257)
# Dropout probabilities. With some of them 0, 65,535 or all of the 65,536 values drop an element.
PROBABILITIES = (0.5, 0.1, 0.9, 1 / 65536, 2.5 / 65536, 3.5 / 65536, 1e-9, 1 - 1e-9, 1.0)


# Calls ------------------------------------------------------------------------------------------


class _Heads(NamedTuple):
    H: int
    Hkv: int
    E: int
    Ev: int


class _Shapes(NamedTuple):
    """The shapes on which later decisions depend."""

    longest: tuple[int, int]  # numbers of queries and keys of the longest sequence
    mask: tuple[int, ...]  # (B, H, Lq, Lk), to which a mask is broadcast
    rows: tuple[tuple[int, ...], tuple[int, ...]]  # of tables of queries and keys: all but n
    results: dict[str, tuple[int, ...]]


@dataclasses.dataclass
class _Given:
    """Collects the tensors and options of a call as they are drawn."""

    d: Draws
    dtype: str
    tensors: dict[str, Values] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def make(self, name: str, *shape: int, dtype: str = "", **rest: Any) -> None:
        seed = self.d.integer(0, 255)
        layout = draw_layout(self.d, shape)
        self.tensors[name] = Values(shape, dtype or self.dtype, seed, layout=layout, **rest)


def draw(d: Draws, kernel: str, dtype: str) -> Call:
    varlen = d.flag(40)
    slow = not kernel.startswith(("cpp", "eager"))
    H = d.choice((1, 2, 3, 4))
    Hkv = d.choice([n for n in range(H, 0, -1) if H % n == 0]) if d.flag(40) else H
    heads = _Heads(H, Hkv, *(_head_dim(d, kernel) for _ in range(2)))
    room = (4_000 if slow else 12_000) // (H * max(heads.E, heads.Ev, 1))  # pairs per head
    B = d.choice((1, 2, 3, 0)) if d.flag(60) else 1
    sizes = [(_length(d, room), _length(d, room)) for _ in range(B if varlen else 1)]
    sizes = [(Lq, min(Lk, max(1, room // max(1, Lq)))) for Lq, Lk in sizes]
    given = _Given(d, dtype)
    # Scores range from nearly equal to so far apart that one key takes all of the weight.
    spread = d.choice((1.0, 1.0, 0.1, 6.0))
    if varlen:
        shapes = _draw_packed(given, heads, sizes, spread)
    else:
        shapes = _draw_padded(given, heads, B, sizes[0] if sizes else (1, 1), spread)
    tensors, options = given.tensors, given.options
    if Hkv != H or d.flag(5):
        options["enable_gqa"] = True
    if d.flag(40) and math.prod(shapes.mask) < 40_000:
        _draw_mask(given, shapes.mask)
    wide = "float64" if dtype == "float64" else "float32"
    if d.flag(20):
        given.make("sinks", H, dtype=d.choice((dtype, wide)), scale=d.choice((1.0, 6.0)))
    if d.flag(15):
        _draw_tables(given, shapes, wide)
    else:
        _draw_biases_by_distance(given, shapes.mask, wide)
    _draw_options(given, varlen, max(shapes.longest))
    _draw_diagonal(given, shapes.mask[0], max(shapes.longest))
    call = Call("attention", kernel, dtype, tensors, options, "varlen" if varlen else "padded")
    floating = [n for n, v in tensors.items() if v.dtype in ("float32", dtype)]
    results = shapes.results
    upstream = {"out": Values(results["out"], dtype)}
    if "return_lse" in options:
        upstream["lse"] = Values(results["lse"], wide)
    call = draw_modes(d, call, floating, upstream)
    if options.get("softcap") == 1e37:
        # In torch, c times the gradient of c · tanh(s / c) overflows.
        call = dataclasses.replace(call, second=False)
    if d.flag(12):
        call = dataclasses.replace(call, poison=d.choice((NAN, INF)))
    elif d.flag(6) and "sinks" not in tensors:  # a sink saves no row whose scores are all -inf
        call = _plant(d, call)
    elif not varlen and "dropout_p" not in options and not call.same_bits and d.flag(5):
        call = _sampled(d, call)
    return dataclasses.replace(call, seed=d.integer(0, 255))


def _draw_packed(
    given: _Given, heads: _Heads, sizes: list[tuple[int, int]], spread: float
) -> _Shapes:
    """Draws tensors of packed sequences, sometimes with tokens past the last sequence."""
    d, options = given.d, given.options
    extra_q, extra_k = (d.choice((0, 0, 1, 5)) for _ in range(2))
    same = d.flag(25)
    if same:
        sizes, extra_k = [(Lq, Lq) for Lq, _ in sizes], extra_q
    longest_q, longest_k = (max((s[i] for s in sizes), default=0) for i in range(2))
    total_q, total_k = sum(s[0] for s in sizes) + extra_q, sum(s[1] for s in sizes) + extra_k
    given.make("query", total_q, heads.H, heads.E, scale=spread)
    given.make("key", total_k, heads.Hkv, heads.E)
    given.make("value", total_k, heads.Hkv, heads.Ev)
    for i, name in enumerate(("cu_seqlens_q", "cu_seqlens_k")[: 1 if same else 2]):
        bounds = (0, *np.cumsum([s[i] for s in sizes]).tolist())
        given.tensors[name] = _integers(d, bounds)
    if d.flag(30):
        options["max_seqlen_q"] = longest_q + d.choice((0, 1, 40))
    if d.flag(30):
        options["max_seqlen_k"] = longest_k + d.choice((0, 1, 40))
    longest = (options.get("max_seqlen_q", total_q), options.get("max_seqlen_k", total_k))
    return _Shapes(
        (longest_q, longest_k),
        (len(sizes), heads.H, *longest),
        ((total_q, heads.H), (total_k, heads.H)),
        {"out": (total_q, heads.H, heads.Ev), "lse": (total_q, heads.H)},
    )


def _draw_padded(
    given: _Given, heads: _Heads, B: int, lengths: tuple[int, int], spread: float
) -> _Shapes:
    """Draws tensors of sequences of these numbers of queries and keys, and key lengths."""
    d, (Lq, Lk) = given.d, lengths
    given.make("query", B, heads.H, Lq, heads.E, scale=spread)
    given.make("key", B, heads.Hkv, Lk, heads.E)
    given.make("value", B, heads.Hkv, Lk, heads.Ev)
    if d.flag(35):
        given.tensors["key_lengths"] = _integers(d, tuple(d.integer(0, Lk) for _ in range(B)))
    return _Shapes(
        lengths,
        (B, heads.H, Lq, Lk),
        ((B, heads.H, Lq), (B, heads.H, Lk)),
        {"out": (B, heads.H, Lq, heads.Ev), "lse": (B, heads.H, Lq)},
    )


def _draw_mask(given: _Given, whole: tuple[int, ...]) -> None:
    """Draws a mask of some of the dimensions of (B, H, Lq, Lk)."""
    d, dtype = given.d, given.dtype
    kind = d.choice(("bool", "dtype", "float32"))
    if kind == "float32" and dtype == "float64":
        kind = "dtype"
    shape = tuple(1 if d.flag(35) else n for n in whole)
    given.make(
        "attn_mask",
        *shape,
        dtype={"dtype": dtype}.get(kind, kind),
        scale=d.choice((1.0, 5.0)),
        left_out=d.choice((0.1, 0.5, 0.9, *([] if kind == "bool" else [0.0]))),
    )


def _draw_biases_by_distance(given: _Given, whole: tuple[int, ...], wide: str) -> None:
    """Draws a relative bias and slopes for (B, H, Lq, Lk), with and without leading dimensions."""
    d, (B, H, Lq, Lk) = given.d, whole
    if d.flag(15):
        shape = (d.choice((1, B)), d.choice((1, H)), max(Lq + Lk - 1, 0))
        given.make(
            "relative_bias",
            *shape[d.choice((0, 0, *([1] if shape[0] == 1 else []))) :],
            dtype=d.choice((given.dtype, wide)),
            scale=d.choice((1.0, 5.0)),
            left_out=d.choice((0.0, 0.1, 0.5)),
        )
    if d.flag(8):
        shape = (B, H) if d.flag(40) else (H,)
        given.make("alibi_slopes", *shape, dtype=d.choice((given.dtype, wide)))


def _draw_tables(given: _Given, shapes: _Shapes, wide: str) -> None:
    """Draws an index, and some of the tables that it reads."""
    d, (B, H, Lq, Lk) = given.d, shapes.mask
    n = d.choice((1, 2, 5, 30))
    leading = {
        "relative_bias": (d.choice((1, B)), d.choice((1, H))),
        "query_bias": shapes.rows[0],
        "key_bias": shapes.rows[1],
    }
    names = [name for name in leading if d.flag(50)] or ["query_bias"]
    for name in names:
        given.make(
            name,
            *leading[name],
            n,
            dtype=d.choice((given.dtype, wide)),
            scale=d.choice((1.0, 5.0)),
            left_out=d.choice((0.0, 0.0, 0.1)),
        )
    shape = (Lq, Lk)
    if d.flag(40) or Lq * Lk > 2_000:
        shape = (max(Lq + Lk - 1, 0),)  # type: ignore[assignment]
    random = Random(d.integer(0, 255))
    numbers = tuple(random.randrange(n) for _ in range(math.prod(shape)))
    layout = draw_layout(d, shape, repeat=False)
    integers = d.choice(("int32", "int64"))
    given.tensors["relative_index"] = Values(shape, integers, numbers=numbers, layout=layout)


def _draw_options(given: _Given, varlen: bool, longest: int) -> None:
    d, options = given.d, given.options
    causal = d.choice((False, False, True, CausalVariant.UPPER_LEFT, CausalVariant.LOWER_RIGHT))
    if causal is not False:
        options["is_causal"] = causal
    if not varlen and "attn_mask" not in given.tensors and d.flag(10):
        options["attn_mask"] = d.choice((CausalVariant.UPPER_LEFT, CausalVariant.LOWER_RIGHT))
    if d.flag(30):
        side = (0, 1, 2, longest // 2, longest, longest + 9, 2**31, sys.maxsize)
        sides = tuple(d.choice(side) for _ in range(2))
        options["window"] = d.choice((sides[0], sides, (sides[0], None), (None, sides[1])))
    if d.flag(25):
        options["scale"] = d.choice((0.5, 0.0, -0.3, 3.0, 1e-6, 1, 1e-300))
    if d.flag(20):
        options["softcap"] = d.choice((50.0, 2, 0.3, 1e-6, 1e6, 1e37))
    if d.flag(25):
        options["dropout_p"] = d.choice(PROBABILITIES)
    if d.flag(85):
        options["return_lse"] = True


def _draw_diagonal(given: _Given, B: int, longest: int) -> None:
    """Draws an offset of the diagonal, or one for each of B sequences."""
    d, tensors, options = given.d, given.tensors, given.options
    lower_right = options.get("is_causal") is CausalVariant.LOWER_RIGHT
    if lower_right or "attn_mask" in options or not d.flag(25):
        return
    offsets = (0, 1, -1, 5, -7, longest // 2, -(longest // 2), longest, -longest - 9)
    if "alibi_slopes" not in tensors:  # such large distances would leave no other digits of a score
        offsets += (2**31, -(2**31), sys.maxsize, -sys.maxsize - 1)
    table = tensors.get("relative_bias")
    of_each = (
        table is None
        or "relative_index" in tensors
        or (len(table.shape) == 3 and table.shape[0] == B)
    )
    if of_each and d.flag(60):
        numbers = tuple(d.choice(offsets) for _ in range(B))
        tensors["diagonal"] = _integers(d, numbers)
        if any(abs(n) > 2**30 for n in numbers):
            tensors["diagonal"] = dataclasses.replace(tensors["diagonal"], dtype="int64")
    else:
        options["diagonal"] = d.choice((*offsets, 2**70, -(2**70)))


def _head_dim(d: Draws, kernel: str) -> int:
    widths = WIDE if d.flag(15) else HEAD_DIMS
    width = d.choice(widths)
    return min(width, 256) if kernel in ("triton", "cuda") else width


def _length(d: Draws, room: int) -> int:
    if d.flag(4):
        return 0
    if d.flag(70):
        return d.integer(1, 12)
    return min(room, d.choice(LONG if d.flag(30) else LENGTHS))


def _integers(d: Draws, numbers: tuple[int, ...]) -> Values:
    layout = draw_layout(d, (len(numbers),), repeat=False)
    return Values((len(numbers),), d.choice(("int32", "int64")), numbers=numbers, layout=layout)


def _plant(d: Draws, call: Call) -> Call:
    """Returns the call with a few special values in one tensor. They may or may not take part."""
    name = d.choice(("value", "key", "query", "attn_mask"))
    values = call.tensors.get(name)
    count = math.prod(values.shape) if values else 0
    if values is None or count == 0 or values.dtype == "bool":
        return call
    kinds = (NAN, 0.0, -0.0, 1e-40, 3e-8, 1e4, INF, -INF)
    planted = tuple((d.integer(0, count - 1), d.choice(kinds)) for _ in range(d.integer(1, 3)))
    tensors = {**call.tensors, name: dataclasses.replace(values, planted=planted)}
    return dataclasses.replace(call, tensors=tensors, overflow=True, second=False)


def _sampled(d: Draws, call: Call) -> Call:
    """Returns the call under vmap: some of its tensors hold two samples."""
    own = ("query", "attn_mask", "key_lengths", "diagonal")
    names = [n for n in call.tensors if n in own or d.flag(50)]
    shared = ("sinks", "alibi_slopes", "relative_index")  # by all samples
    names = [n for n in names if n not in shared]
    if ("key" in names) != ("value" in names):
        names = [n for n in names if n not in ("key", "value")]
    samples = {n: d.integer(0, len(call.tensors[n].shape)) for n in names}
    samples["query"] = d.integer(0, 4)

    def sampled(name: str, values: Values) -> Values:
        if name not in samples:
            return values
        shape = list(values.shape)
        shape.insert(samples[name], 2)
        numbers = values.numbers
        if numbers is not None:  # a 1-D tensor
            pairs = (numbers, numbers[::-1])
            columns = zip(*pairs, strict=True)
            numbers = sum(pairs if samples[name] == 0 else columns, ())
        layout = draw_layout(d, tuple(shape), repeat=numbers is None)
        return dataclasses.replace(values, shape=tuple(shape), numbers=numbers, layout=layout)

    tensors = {name: sampled(name, values) for name, values in call.tensors.items()}
    upstream = {
        name: dataclasses.replace(v, shape=(2, *v.shape), layout=draw_layout(d, (2, *v.shape)))
        for name, v in call.upstream.items()
    }
    return dataclasses.replace(
        call, tensors=tensors, upstream=upstream, samples=samples, second=False
    )


# Construction -----------------------------------------------------------------------------------


def arguments(call: Call, tensors: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    padded = call.entry_point == "padded"
    name = "scaled_dot_product_attention" if padded else "varlen_attention"
    options = dict(call.options)
    if "attn_mask" in options:
        options["attn_mask"] = _causal_bias(options["attn_mask"], tensors["query"], tensors["key"])
    return f"trifuse.{name}", {**tensors, **options}


def _causal_bias(variant: CausalVariant, query: Tensor, key: Tensor) -> CausalBias:
    Lq, Lk = query.shape[-2], key.shape[-2]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # NaN in rows without keys: ours are 0
        bias = CausalBias(variant, Lq, Lk)
    module = "torch.nn.attention.bias"
    bias.made_by = f"{module}.CausalBias({module}.CausalVariant.{variant.name}, {Lq}, {Lk})"
    return bias


def outputs(call: Call, result: Any) -> Tensors:
    if "return_lse" in call.options:
        return {"out": result[0], "lse": result[1]}
    return {"out": result}


# Expected results -------------------------------------------------------------------------------


class Pairs(NamedTuple):
    """The pairs of a query and a key that take part, over all heads. No other pair exists."""

    query: Tensor  # row among all queries of all heads
    key: Tensor  # row among all keys of all key heads
    mask: Tensor  # index in the flattened mask
    distance: Tensor  # from the query's place on the diagonal
    bias: Tensor  # index in the flattened relative bias
    query_bias: Tensor  # index in the flattened tables of queries
    key_bias: Tensor
    slope: Tensor  # index in the flattened slopes
    plane: Tensor  # plane of the dropout generator: batch · H + head
    i: Tensor
    j: Tensor


class Sizes(NamedTuple):
    B: int
    H: int
    Hkv: int
    lengths: list[tuple[int, int]]  # queries and keys of each sequence
    starts: list[tuple[int, int]]  # first query and first key of each sequence
    total: tuple[int, int]  # numbers of queries and keys


def _sizes(call: Call, query: Tensor, key: Tensor, tensors: Tensors) -> Sizes:
    """Returns the sizes of query and key, (..., B, H, L, E) or (..., total, H, E)."""
    if call.entry_point == "padded":
        (B, H, Lq), (_, Hkv, Lk) = query.shape[-4:-1], key.shape[-4:-1]
        starts = [(b * Lq, b * Lk) for b in range(B)]
        return Sizes(B, H, Hkv, [(Lq, Lk)] * B, starts, (B * Lq, B * Lk))
    cu_q = tensors["cu_seqlens_q"].tolist()
    cu_k = tensors["cu_seqlens_k"].tolist() if "cu_seqlens_k" in tensors else cu_q
    B = len(cu_q) - 1
    lengths = [(cu_q[b + 1] - cu_q[b], cu_k[b + 1] - cu_k[b]) for b in range(B)]
    starts = list(zip(cu_q, cu_k, strict=True))[:B]
    total = (query.shape[-3], key.shape[-3])
    return Sizes(B, query.shape[-2], key.shape[-2], lengths, starts, total)


def _bounds(call: Call, sizes: Sizes, tensors: Tensors) -> tuple[int, int]:
    """Returns the lengths for which the distances of a relative bias are counted."""
    if call.entry_point == "padded":
        return tensors["query"].shape[-2], tensors["key"].shape[-2]
    given = (call.options.get("max_seqlen_q"), call.options.get("max_seqlen_k"))
    return tuple(t if m is None else m for t, m in zip(sizes.total, given, strict=True))  # type: ignore[return-value]


def _pairs(call: Call, sizes: Sizes, tensors: Tensors) -> Pairs:
    options = call.options
    window = options.get("window")
    far = 2**60  # no bound; offsets over twice this act alike, and sums with them overflow
    left, right = (
        None if side is None or side >= far else side
        for side in (window if isinstance(window, tuple) else (window, window))
    )
    causal, bias = options.get("is_causal", False), options.get("attn_mask")
    mask = tensors.get("attn_mask")
    if mask is not None:
        # A float mask comes in replicas. The first one decides where it is -inf.
        allowed = mask if mask.dtype == torch.bool else mask[0] != -INF
        allowed = allowed[(None,) * (4 - allowed.dim())].detach()
        places = torch.arange(allowed.numel()).view(allowed.shape)
    table, index = tensors.get("relative_bias"), tensors.get("relative_index")
    bounds = _bounds(call, sizes, tensors)
    if table is not None:
        table = table[0].detach()
        table = table[(None,) * (3 - table.dim())]
        of_table = torch.arange(table.numel()).view(table.shape)
    columns: list[list[Tensor]] = [[] for _ in Pairs._fields]
    heads = torch.arange(sizes.H)[:, None, None]
    for b in range(sizes.B):
        (Lq, Lk), (start_q, start_k) = sizes.lengths[b], sizes.starts[b]
        i, j = torch.arange(Lq)[:, None], torch.arange(Lk)
        offset = options.get("diagonal", 0)
        offset = int(tensors["diagonal"][b]) if "diagonal" in tensors else offset
        offset = max(-2 * far, min(offset, 2 * far))
        upper_left = i + offset
        diagonals = {
            CausalVariant.UPPER_LEFT: upper_left,
            CausalVariant.LOWER_RIGHT: i + Lk - Lq,
            True: upper_left,
        }
        takes_part = torch.ones(sizes.H, Lq, Lk, dtype=torch.bool)
        for variant in (bias, causal):
            if variant in diagonals:
                takes_part &= j <= diagonals[variant]
        # A window moves with the diagonal of is_causal or, without it, of a causal bias.
        diagonal = diagonals.get(causal, diagonals.get(bias, upper_left))
        if left is not None:
            takes_part &= j >= diagonal - left
        if right is not None:
            takes_part &= j <= diagonal + right
        if "key_lengths" in tensors:
            takes_part &= j < tensors["key_lengths"][b]
        distance = (j - diagonal).expand(takes_part.shape)
        place = of_bias = torch.zeros((), dtype=torch.int64)
        zero = bounds[diagonal is diagonals[CausalVariant.LOWER_RIGHT]] - 1
        column = distance[0] + zero + offset
        if index is not None:
            index = index.long()
            column = index[:Lq, :Lk] if index.dim() == 2 else index[column]
        if table is not None:
            of_bias = of_table[b if len(table) > 1 else 0][:, column]
            takes_part &= table.flatten()[of_bias] != -INF
        of_rows = {}
        for name, row, start, length in (
            ("query_bias", i, start_q, Lq),
            ("key_bias", j, start_k, Lk),
        ):
            of_rows[name] = torch.zeros((), dtype=torch.int64)
            if name in tensors:
                rows_table = tensors[name][0].detach()
                if call.entry_point == "padded":
                    row_number = (b * sizes.H + heads) * length + row
                else:
                    row_number = (start + row) * sizes.H + heads
                of_rows[name] = row_number * rows_table.shape[-1] + column
                takes_part &= rows_table.flatten()[of_rows[name]] != -INF
        if mask is not None:
            own = tuple(
                slice(None) if size == 1 else s
                for size, s in zip(
                    allowed.shape, (slice(b, b + 1), slice(None), slice(Lq), slice(Lk)), strict=True
                )
            )
            takes_part &= allowed[own][0]
            place = places[own][0]
        place = place.expand(takes_part.shape)
        slopes = tensors.get("alibi_slopes")
        of_slope = heads + (sizes.H * b if slopes is not None and slopes.dim() == 3 else 0)
        kv_head = heads * sizes.Hkv // sizes.H
        rows = (
            heads * sizes.total[0] + start_q + i,
            kv_head * sizes.total[1] + start_k + j,
            place,
            distance,
            of_bias,
            *of_rows.values(),
            of_slope,
            b * sizes.H + heads,
            i,
            j,
        )
        for column, row in zip(columns, rows, strict=True):
            column.append(row.expand(takes_part.shape)[takes_part])
    nothing = [torch.zeros(0, dtype=torch.int64)]
    return Pairs(*(torch.cat(column or nothing) for column in columns))


def formula(call: Call, tensors: Tensors, r: Rounding) -> Tensors:
    query, key, value = (tensors[name] for name in ("query", "key", "value"))
    sizes = _sizes(call, query, key, tensors)
    pairs = _pairs(call, sizes, tensors)
    packed = call.entry_point == "varlen"

    def by_head(x: Tensor) -> Tensor:
        """Reshapes to (1 + replicas, heads · tokens, ...)."""
        return (x.transpose(1, 2) if packed else x.transpose(1, 2).flatten(2, 3)).flatten(1, 2)

    q, k, v = map(by_head, (query, key, value))
    scale = call.options.get("scale", None)
    scale = max(q.shape[-1], 1) ** -0.5 if scale is None else scale
    if call.dtype != "float64":  # kernels round the scale to float32, so 1e-300 is 0
        scale = torch.tensor(scale, dtype=torch.float32).item()
    rows = sizes.H * sizes.total[0]

    # One score per pair; one logsumexp and one output row per query.
    keys = r(k.index_select(1, pairs.key))
    s = r(r((r(q.index_select(1, pairs.query)) * keys).sum(-1)) * scale)
    if (softcap := call.options.get("softcap")) is not None:
        s = r(softcap * tanh(r(s / softcap), r))
    if "attn_mask" in tensors and tensors["attn_mask"].dtype != torch.bool:
        s = r(s + tensors["attn_mask"].flatten(1).index_select(1, pairs.mask))
    for name, of_table in (
        ("relative_bias", pairs.bias),
        ("query_bias", pairs.query_bias),
        ("key_bias", pairs.key_bias),
    ):
        if name in tensors:
            s = r(s + tensors[name].flatten(1).index_select(1, of_table))
    if "alibi_slopes" in tensors:
        slopes = tensors["alibi_slopes"].flatten(1).index_select(1, pairs.slope)
        s = r(s - r(slopes * pairs.distance.abs()))
    highest = s.new_full((len(s), rows), -INF).scatter_reduce(
        1, pairs.query.expand_as(s), s.detach(), "amax"
    )

    def exponentials() -> Tensor:
        return r(torch.exp(r(s) - highest.index_select(1, pairs.query)))

    def total_of(weights: Tensor) -> Tensor:
        return s.new_zeros(len(s), rows).index_add(1, pairs.query, weights)

    # Evaluated twice, because a kernel may compute the scores of numerator and denominator
    # separately.
    e, summed = exponentials(), exponentials()
    total = total_of(summed)
    has_pairs = torch.zeros(rows, dtype=torch.bool).index_fill(0, pairs.query, True)
    some = has_pairs.nonzero()[:, 0]
    sinks = None
    if "sinks" in tensors:  # (replicas, H), a score in each row, without a value
        sinks = tensors["sinks"].repeat_interleave(sizes.total[0], 1)
        # A sink scales the output that attention has without it.
        lse_of_keys = r(total.index_select(1, some).log() + highest[:, some])
        sink = sinks.index_select(1, some)
        largest = torch.maximum(lse_of_keys, sink).detach()
        of_keys, of_sink = (r(torch.exp(x - largest)) for x in (lse_of_keys, sink))
        share = r(of_keys / r(of_keys + of_sink))
        highest = torch.maximum(highest, sinks.detach())
        summed = exponentials()
    # In the gradient of lse a weight is exp(score - lse), whose two terms err independently.
    apart = torch.exp((r(s) - s).nan_to_num()).detach()
    summed = summed * apart - (summed * (apart - 1)).detach()
    total_of_lse = total_of(summed)
    with_lse = some
    if sinks is not None:
        total_of_lse = r(total_of_lse + r(torch.exp(r(sinks - highest))))
        with_lse = torch.arange(rows)
    lse = s.new_full((len(s), rows), -INF)
    logs = total_of_lse.index_select(1, with_lse).log() + highest[:, with_lse]
    lse = lse.index_copy(1, with_lse, r(logs))
    p = call.options.get("dropout_p", 0.0)
    weight, kept = e, None
    if p > 0:
        seed = philox.drawn_seed(call.seed)
        kept = philox.keep(seed, p, *(x.numpy() for x in (pairs.plane, pairs.i, pairs.j)))
        weight = r(torch.where(kept, e * philox.scale(p), 0.0))
    # The division comes last, per feature, so that the gradient's two parts err independently.
    values = r(v.index_select(1, pairs.key))
    if kept is not None:  # dropped weights pass no gradient to values, even in a NaN row
        values = torch.where(kept[:, None], values, values.detach())
    # A backward computes each weight again, as exp(score - lse) with lse rounded.
    of_lse = torch.exp((lse - r(lse)).nan_to_num()).detach().index_select(1, pairs.query)
    terms = r(_Product.apply(weight, weight * of_lse, values))
    sums = v.new_zeros(len(v), rows, v.shape[-1]).index_add(1, pairs.query, terms)
    sums = r(sums.index_select(1, some))
    sums = sums + 0 * sums  # infinite sums become NaN
    quotients = r(sums / r(total.index_select(1, some)[..., None].expand_as(sums)))
    if sinks is not None:
        quotients = r(quotients * r(share[..., None].expand_as(sums)))
    out = v.new_zeros(len(v), rows, v.shape[-1]).index_copy(1, some, quotients)

    length = query.shape[-2]
    results = {"out": out} | ({"lse": lse} if "return_lse" in call.options else {})
    return {name: _by_token(x, sizes, packed, length) for name, x in results.items()}


def _by_token(x: Tensor, sizes: Sizes, packed: bool, length: int) -> Tensor:
    """Reshapes from (1 + replicas, heads · tokens, ...) to the operator's result."""
    tokens = sizes.total[0]
    x = x.unflatten(1, (sizes.H, -1) if sizes.H * tokens else (sizes.H, tokens))
    if packed:
        return x.transpose(1, 2)
    shape = (sizes.B, tokens // max(1, sizes.B)) if sizes.B else (0, length)
    return x.unflatten(2, shape).transpose(1, 2)


class _Product(torch.autograd.Function):
    """weight · value, with a separate weight for the gradient of the value."""

    @staticmethod
    def forward(ctx, weight, weight_anew, value):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(weight_anew, value)
        return weight[..., None] * value

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        weight_anew, value = ctx.saved_tensors
        return (grad * value).sum(-1), None, grad * weight_anew[..., None]


def poison(call: Call, tensors: Tensors, value: float) -> None:
    """Overwrites queries without a key, and keys and values without a query."""
    replicated = ("attn_mask", "relative_bias", "query_bias", "key_bias", "alibi_slopes")
    sizes = _sizes(call, tensors["query"], tensors["key"], tensors)
    masks = {
        n: t[None] if n in replicated and t.dtype != torch.bool else t for n, t in tensors.items()
    }
    pairs = _pairs(call, sizes, masks)
    for name, used in (("query", pairs.query), ("key", pairs.key), ("value", pairs.key)):
        values = call.tensors[name]
        if values.layout.repeated:
            continue
        x = tensors[name]
        heads, count = (sizes.H, sizes.total[0]) if name == "query" else (sizes.Hkv, sizes.total[1])
        unused = torch.ones(heads * count, dtype=torch.bool).index_fill(0, used, False)
        unused = unused.view(heads, count)
        if call.entry_point == "varlen":
            x.masked_fill_(unused.t()[..., None], value)
        elif x.numel():
            x.masked_fill_(unused.view(heads, len(x), -1).transpose(0, 1)[..., None], value)


def first(call: Call, tensors: Tensors) -> tuple[Tensors, Mapping[str, Any]] | None:
    if call.entry_point != "padded" or len(tensors["query"]) < 2:
        return None
    one = slice(0, 1)
    dims = {"attn_mask": 4, "relative_bias": 3, "alibi_slopes": 2}
    whole = {n for n, t in tensors.items() if n in dims and (t.dim() < dims[n] or len(t) == 1)}
    whole |= {"sinks", "relative_index"}
    given = {n: t if n in whole else t[one] for n, t in tensors.items()}
    names = ("out", "lse", "grad_query", "grad_key", "grad_value")
    return given, dict.fromkeys(names, one)
