"""Bad arguments raise before a kernel runs. Messages give the argument, expectation and value."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import CausalVariant, causal_lower_right
from torch_checks import Kernels

import trifuse
from trifuse import backends

B, H, Lq, Lk, E = 2, 4, 5, 7, 8


def x(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def lengths(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def index(*shape: int) -> Tensor:
    return torch.zeros(shape or (Lq, Lk), dtype=torch.int64)


def refused(function: Any, arguments: dict[str, Any], error: type, message: str) -> None:
    with Kernels() as kernels, pytest.raises(error, match=message) as caught:
        function(**arguments)
    assert type(caught.value) in (error, trifuse.ArgumentError)
    assert kernels.ran == []


DEFAULT = {"query": x(B, H, Lq, E), "key": x(B, H, Lk, E), "value": x(B, H, Lk, E)}

ARGUMENTS: list[tuple[str, dict[str, Any], type, str]] = [
    # Not tensors, or tensors of a kind that is not supported.
    ("query a list", {"query": [[1.0]]}, TypeError, r"query: expected a Tensor; got list"),
    ("key None", {"key": None}, TypeError, r"key: expected a Tensor; got NoneType"),
    ("value a number", {"value": 1.0}, TypeError, r"value: expected a Tensor; got float"),
    ("mask a bool", {"attn_mask": True}, TypeError, r"attn_mask: expected a Tensor; got bool"),
    (
        "query nested",
        {"query": torch.nested.nested_tensor([x(H, 3, E), x(H, 5, E)], layout=torch.jagged)},
        ValueError,
        r"query: expected a dense tensor \(use varlen_attention.*\); got nested",
    ),
    (
        "key sparse",
        {"key": x(B, H, Lk, E).to_sparse()},
        ValueError,
        r"key: expected a dense tensor; got torch.sparse_coo",
    ),
    # Dtypes.
    (
        "query of integers",
        {"query": x(B, H, Lq, E, dtype=torch.int64)},
        TypeError,
        r"query: expected float32, bfloat16, float16 or float64; got torch.int64",
    ),
    (
        "all complex",
        {name: t.to(torch.complex64) for name, t in DEFAULT.items()},
        TypeError,
        r"query: expected float32, .*; got torch.complex64",
    ),
    (
        "key of another dtype",
        {"key": x(B, H, Lk, E, dtype=torch.bfloat16)},
        TypeError,
        r"key: expected torch.float32, as query; got torch.bfloat16",
    ),
    (
        "value of another dtype",
        {"value": x(B, H, Lk, E, dtype=torch.float64)},
        TypeError,
        r"value: expected torch.float32, as query; got torch.float64",
    ),
    # Devices.
    (
        "key on another device",
        {"key": x(B, H, Lk, E, device="meta")},
        ValueError,
        r"key: expected a tensor on cpu, as query; got meta",
    ),
    (
        "value on another device",
        {"value": x(B, H, Lk, E, device="meta")},
        ValueError,
        r"value: expected a tensor on cpu, as query; got meta",
    ),
    (
        "mask on another device",
        {"attn_mask": x(Lq, Lk, device="meta")},
        ValueError,
        r"attn_mask: expected a tensor on cpu, as query; got meta",
    ),
    (
        "lengths on another device",
        {"key_lengths": lengths(3, 3).to("meta")},
        ValueError,
        r"key_lengths: expected a tensor on cpu, as query; got meta",
    ),
    # Shapes.
    ("query 1-D", {"query": x(E)}, ValueError, r"query: expected at least 2 dim.*; got \(8,\)"),
    ("value 0-D", {"value": x()}, ValueError, r"value: expected at least 2 dim.*; got \(\)"),
    ("head_dim", {"key": x(B, H, Lk, 9)}, ValueError, r"key: expected head_dim 8, as query; got 9"),
    (
        "value's length",
        {"value": x(B, H, 6, E)},
        ValueError,
        r"value: expected length 7, as key; got 6",
    ),
    (
        "batch",
        {"key": x(3, H, Lk, E), "value": x(3, H, Lk, E)},
        ValueError,
        r"query, key, value: expected leading dimensions that broadcast; got \(2,\), \(3,\) and",
    ),
    (
        "batch of 3-D tensors",
        {"query": x(2, Lq, E), "key": x(3, Lk, E), "value": x(3, Lk, E)},
        ValueError,
        r"query, key, value: expected leading dimensions that broadcast; got \(2,\), \(3,\) and",
    ),
    (
        "batch of 5-D tensors",
        {"query": x(2, 3, H, Lq, E), "key": x(2, 2, H, Lk, E), "value": x(2, 3, H, Lk, E)},
        ValueError,
        r"query, key, value: expected leading dimensions that broadcast; got \(2, 3\), \(2, 2\)",
    ),
    (
        "heads",
        {"key": x(B, 2, Lk, E), "value": x(B, 2, Lk, E)},
        ValueError,
        r"key: expected 4 heads, as query \(or enable_gqa=True\); got 2",
    ),
    (
        "value's heads",
        {"value": x(B, 2, Lk, E), "enable_gqa": True},
        ValueError,
        r"value: expected 4 heads, as key; got 2",
    ),
    (
        "groups",
        {"key": x(B, 3, Lk, E), "value": x(B, 3, Lk, E), "enable_gqa": True},
        ValueError,
        r"key: expected a number of heads that divides query's 4; got 3",
    ),
    (
        "no key heads",
        {"key": x(B, 0, Lk, E), "value": x(B, 0, Lk, E), "enable_gqa": True},
        ValueError,
        r"key: expected a number of heads that divides query's 4; got 0",
    ),
    # Masks.
    (
        "mask of integers",
        {"attn_mask": x(Lq, Lk, dtype=torch.int64)},
        TypeError,
        r"attn_mask: expected torch.bool, torch.float32 or .*\(torch.float32\); got torch.int64",
    ),
    (
        "mask wider than the query",
        {"attn_mask": x(Lq, Lk, dtype=torch.float64)},
        TypeError,
        r"attn_mask: expected torch.bool, torch.float32 or .*; got torch.float64",
    ),
    (
        "mask of another 16 bits",
        {name: t.bfloat16() for name, t in DEFAULT.items()} | {"attn_mask": x(Lq, Lk).half()},
        TypeError,
        r"attn_mask: expected torch.bool, torch.float32 or .*\(torch.bfloat16\); got torch.float16",
    ),
    (
        "mask transposed",
        {"attn_mask": x(Lk, Lq)},
        ValueError,
        r"attn_mask: expected a shape broadcastable to \(2, 4, 5, 7\); got \(7, 5\)",
    ),
    (
        "mask of too many heads",
        {"attn_mask": x(1, 8, Lq, Lk)},
        ValueError,
        r"attn_mask: expected a shape broadcastable to \(2, 4, 5, 7\); got \(1, 8, 5, 7\)",
    ),
    (
        "mask of too many dimensions",
        {"attn_mask": x(1, B, H, Lq, Lk)},
        ValueError,
        r"attn_mask: expected a shape broadcastable to \(2, 4, 5, 7\); got \(1, 2, 4, 5, 7\)",
    ),
    (
        "mask of another 5-D batch",
        {name: t[:, None] for name, t in DEFAULT.items()} | {"attn_mask": x(2, 3, H, Lq, Lk)},
        ValueError,
        r"attn_mask: expected a shape broadcastable to \(2, 1, 4, 5, 7\); got \(2, 3, 4, 5, 7\)",
    ),
    (
        "causal bias of other lengths",
        {"attn_mask": causal_lower_right(5, 8)},
        ValueError,
        r"attn_mask: expected a causal bias for lengths \(5, 7\); got \(5, 8\)",
    ),
    ("is_causal a number", {"is_causal": 1}, TypeError, r"is_causal: .*a bool or a .*; got 1"),
    ("is_causal None", {"is_causal": None}, TypeError, r"is_causal: .*a bool or a .*; got None"),
    # Types and shapes of lengths.
    (
        "lengths a list",
        {"key_lengths": [3, 3]},
        TypeError,
        r"key_lengths: expected a Tensor; got list",
    ),
    (
        "lengths of floats",
        {"key_lengths": x(B)},
        TypeError,
        r"key_lengths: expected int32 or int64; got torch.float32",
    ),
    (
        "lengths of another batch",
        {"key_lengths": lengths(1, 2, 3)},
        ValueError,
        r"key_lengths: expected shape \(B,\); got \(3,\)",
    ),
    (
        "lengths 2-D",
        {"key_lengths": lengths(1, 2)[:, None]},
        ValueError,
        r"key_lengths: expected shape \(B,\); got \(2, 1\)",
    ),
    # Numbers.
    *(
        (f"dropout {p}", {"dropout_p": p}, ValueError, rf"dropout_p: .*\[0, 1\]; got {p}")
        for p in (-0.1, 1.01, 1.5, float("nan"), float("inf"))
    ),
    ("dropout text", {"dropout_p": "0.1"}, TypeError, r"dropout_p: expected a number; got str"),
    ("dropout None", {"dropout_p": None}, TypeError, r"dropout_p: expected a number; got NoneT"),
    ("scale text", {"scale": "1"}, TypeError, r"scale: expected a number; got str"),
    ("scale a tensor", {"scale": x()}, TypeError, r"scale: expected a number; got Tensor"),
    ("scale a flag", {"scale": True}, TypeError, r"scale: expected a number; got bool"),
    ("dropout a flag", {"dropout_p": True}, TypeError, r"dropout_p: expected a number; got bool"),
    *(
        (f"softcap {c}", {"softcap": c}, ValueError, rf"softcap: expected a number in .*; got {c}")
        for c in (0.0, -50.0, 1e-40, float("inf"), float("nan"))
    ),
    ("softcap text", {"softcap": "50"}, TypeError, r"softcap: expected a number; got str"),
    (
        "diagonal a float",
        {"diagonal": 1.0},
        TypeError,
        r"diagonal: expected an int or a Tensor; got float",
    ),
    ("diagonal a bool", {"diagonal": True}, TypeError, r"diagonal: expected an int.*; got bool"),
    (
        "diagonals of another shape",
        {"diagonal": lengths(1)},
        ValueError,
        r"diagonal: expected shape \(B,\), one a sequence; got \(1,\)",
    ),
    (
        "diagonals of floats",
        {"diagonal": x(B)},
        TypeError,
        r"diagonal: expected int32 or int64; got torch.float32",
    ),
    (
        "diagonals on another device",
        {"diagonal": lengths(1, 2).to("meta")},
        ValueError,
        r"diagonal: expected a tensor on cpu, as query; got meta",
    ),
    (
        "a diagonal beside the lower right one",
        {"diagonal": 1, "is_causal": CausalVariant.LOWER_RIGHT},
        ValueError,
        r"diagonal: expected None beside a lower right diagonal; got 1",
    ),
    (
        "a diagonal beside a causal bias",
        {"diagonal": 1, "attn_mask": causal_lower_right(Lq, Lk)},
        ValueError,
        r"diagonal: expected None beside a causal bias, which has its own; got 1",
    ),
    (
        "a table shared by sequences with diagonals of their own",
        {"diagonal": lengths(1, 2), "relative_bias": x(1, H, Lq + Lk - 1)},
        ValueError,
        r"relative_bias: expected shape \(2, 4 or 1, 11\) if each sequence has a diagonal of its "
        r"own; got \(1, 4, 11\)",
    ),
    ("sinks a number", {"sinks": 0.0}, TypeError, r"sinks: expected a Tensor; got float"),
    *(
        (
            f"sinks of shape {shape}",
            {"sinks": x(*shape)},
            ValueError,
            rf"sinks: expected shape \(4,\), .*; got {re.escape(str(shape))}",
        )
        for shape in ((1,), (5,), (), (2, 4), (4, 1))
    ),
    *(
        (
            f"sinks of {dtype}",
            {"sinks": x(H, dtype=dtype)},
            TypeError,
            rf"sinks: expected torch.float32, as query; got {dtype}",
        )
        for dtype in (torch.float64, torch.bfloat16, torch.int64)
    ),
    (
        "sinks in float64 with 16 bits",
        {name: t.bfloat16() for name, t in DEFAULT.items()} | {"sinks": x(H, dtype=torch.float64)},
        TypeError,
        r"sinks: expected torch.bfloat16, as query, or torch.float32; got torch.float64",
    ),
    (
        "sinks on another device",
        {"sinks": x(H, device="meta")},
        ValueError,
        r"sinks: expected a tensor on cpu, as query; got meta",
    ),
    *(
        (f"{name} {bad}", {name: bad}, TypeError, rf"{name}: expected a Tensor; got {kind}")
        for name in ("relative_bias", "alibi_slopes")
        for bad, kind in ((0.0, "float"), ([1.0], "list"))
    ),
    *(
        (
            f"relative bias of shape {shape}",
            {"relative_bias": x(*shape)},
            ValueError,
            r"relative_bias: expected shape \(2 or 1, 4 or 1, 11\), or its last dimensions; got "
            + re.escape(str(shape)),
        )
        for shape in ((), (1,), (12,), (3, 11), (11, 4), (4, 2, 11), (1, 2, 4, 11), (H, Lq, Lk))
    ),
    *(
        (
            f"slopes of shape {shape}",
            {"alibi_slopes": x(*shape)},
            ValueError,
            rf"alibi_slopes: expected shape \(4,\) or \(2, 4\); got {re.escape(str(shape))}",
        )
        for shape in ((), (1,), (2,), (1, 4), (2, 4, 1))
    ),
    *(
        (
            f"{name} of {dtype}",
            {name: x(*shape, dtype=dtype)},
            TypeError,
            rf"{name}: expected torch.float32, as query; got {dtype}",
        )
        for name, shape in (("relative_bias", (H, Lq + Lk - 1)), ("alibi_slopes", (H,)))
        for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.bool)
    ),
    *(
        (
            f"{name} on another device",
            {name: x(*shape, device="meta")},
            ValueError,
            rf"{name}: expected a tensor on cpu, as query; got meta",
        )
        for name, shape in (("relative_bias", (H, Lq + Lk - 1)), ("alibi_slopes", (H,)))
    ),
    *(
        (
            f"{name} without an index",
            {name: x(2, H, L, 5)},
            ValueError,
            rf"{name}: expected None without relative_index; got a tensor",
        )
        for name, L in (("query_bias", Lq), ("key_bias", Lk))
    ),
    (
        "an index without a table",
        {"relative_index": index()},
        ValueError,
        r"relative_index: expected None without relative_bias, query_bias and key_bias; got a",
    ),
    (
        "slopes beside an index",
        {"relative_index": index(), "relative_bias": x(5), "alibi_slopes": x(H)},
        ValueError,
        r"alibi_slopes: expected None beside relative_index; got a tensor",
    ),
    *(
        (f"index {bad}", {"relative_index": bad, "relative_bias": x(5)}, TypeError, message)
        for bad, message in (
            (3, r"relative_index: expected a Tensor; got int"),
            (x(Lq, Lk), r"relative_index: expected int32 or int64; got torch.float32"),
        )
    ),
    *(
        (
            f"index of shape {shape}",
            {"relative_index": index(*shape), "relative_bias": x(5)},
            ValueError,
            r"relative_index: expected shape \(5, 7\) or, by distance, \(11,\); got "
            + re.escape(str(shape)),
        )
        for shape in ((7, 5), (12,), (1, 5, 7), (1,))
    ),
    (
        "index on another device",
        {"relative_index": index().to("meta"), "relative_bias": x(5)},
        ValueError,
        r"relative_index: expected a tensor on cpu, as query; got meta",
    ),
    *(
        (
            f"table of shape {shape}",
            {"relative_index": index(), "relative_bias": x(*shape)},
            ValueError,
            r"relative_bias: expected shape \(2 or 1, 4 or 1, n\), or its last dimensions; got "
            + re.escape(str(shape)),
        )
        for shape in ((), (3, 5), (4, 2, 5), (1, 2, 4, 5))
    ),
    *(
        (
            f"{name} of shape {shape}",
            {"relative_index": index(), name: x(*shape)},
            ValueError,
            rf"{name}: expected shape \(2, 4, {L}, n\); got " + re.escape(str(shape)),
        )
        for name, L in (("query_bias", Lq), ("key_bias", Lk))
        for shape in ((L, 5), (1, 4, L, 5), (2, 4, L + 1, 5), (2, 4, L))
    ),
    (
        "a table without a column",
        {"relative_index": index(), "relative_bias": x(H, 0)},
        ValueError,
        r"relative_bias: expected a column at least; got \(1, 4, 0\)",
    ),
    (
        "tables of different numbers of columns",
        {"relative_index": index(), "relative_bias": x(5), "key_bias": x(2, H, Lk, 6)},
        ValueError,
        r"key_bias: expected 5 columns, as relative_bias; got 6",
    ),
    (
        "a table in another dtype",
        {"relative_index": index(), "query_bias": x(2, H, Lq, 5, dtype=torch.float64)},
        TypeError,
        r"query_bias: expected torch.float32, as query; got torch.float64",
    ),
    ("scale too large", {"scale": 2**1100}, ValueError, r"scale: expected a number that a float"),
    *(
        (f"enable_gqa {value}", {"enable_gqa": value}, TypeError, rf"enable_gqa: .*; got {kind}")
        for value, kind in (("x", "str"), (1, "int"), (None, "NoneType"), (2**80, "int"))
    ),
    *(
        (f"window {w}", {"window": w}, ValueError, rf"window: expected .*; got {re.escape(str(w))}")
        for w in (-1, 1.5, "3", True, (1,), (1, 2, 3), (None, -2), (2.0, 3))
    ),
]


@pytest.mark.parametrize(
    ("arguments", "error", "message"), [a[1:] for a in ARGUMENTS], ids=[a[0] for a in ARGUMENTS]
)
def test_arguments(backend, arguments, error, message):
    call = DEFAULT | arguments
    refused(trifuse.scaled_dot_product_attention, call, error, message)
    with pytest.raises(error, match=message):
        trifuse.explain(trifuse.scaled_dot_product_attention, **call)


@pytest.mark.parametrize("values", [(3, 8), (-1, 7)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_values_of_lengths(backend, values, dtype):
    message = rf"key_lengths: expected lengths in \[0, 7\]; got \[{values[0]}, {values[1]}\]"
    arguments = DEFAULT | {"key_lengths": lengths(*values, dtype=dtype)}
    refused(trifuse.scaled_dot_product_attention, arguments, ValueError, message)


def test_a_boolean_mask_cannot_require_a_gradient():
    """torch already refuses it, so trifuse has no check."""
    with pytest.raises(RuntimeError, match="floating point"):
        torch.ones(Lq, Lk, dtype=torch.bool).requires_grad_()


def test_argument_errors_are_torch_s_too():
    """Code that catches errors of F.scaled_dot_product_attention catches trifuse's too."""
    assert issubclass(trifuse.ArgumentError, ValueError)
    assert issubclass(trifuse.ArgumentError, RuntimeError)


# Packed sequences -------------------------------------------------------------------------------

PACKED = {"query": x(9, H, E), "key": x(9, H, E), "value": x(9, H, E)}
PACKED |= {"cu_seqlens_q": lengths(0, 4, 9)}

PACKED_ARGUMENTS: list[tuple[str, dict[str, Any], type, str]] = [
    (
        "query 4-D",
        {"query": x(1, 9, H, E)},
        ValueError,
        r"query: expected shape \(total, heads, head_dim\); got \(1, 9, 4, 8\)",
    ),
    ("key 2-D", {"key": x(9, E)}, ValueError, r"key: expected shape \(total,.*; got \(9, 8\)"),
    ("value 4-D", {"value": x(9, H, E, 1)}, ValueError, r"value: expected shape \(total,.*; got"),
    ("boundaries a list", {"cu_seqlens_q": [0, 9]}, TypeError, r"cu_seqlens_q: .*Tensor; got list"),
    ("boundaries None", {"cu_seqlens_q": None}, TypeError, r"cu_seqlens_q: .*; got NoneType"),
    ("boundaries of floats", {"cu_seqlens_q": x(3)}, TypeError, r"cu_seqlens_q: .*torch.float32"),
    (
        "boundaries 2-D",
        {"cu_seqlens_q": lengths(0, 9)[None]},
        ValueError,
        r"cu_seqlens_q: expected shape \(sequences \+ 1,\); got \(1, 2\)",
    ),
    (
        "no boundary",
        {"cu_seqlens_q": lengths()},
        ValueError,
        r"cu_seqlens_q: expected at least one boundary; got an empty tensor",
    ),
    (
        "other number of key boundaries",
        {"cu_seqlens_k": lengths(0, 9)},
        ValueError,
        r"cu_seqlens_k: expected shape of cu_seqlens_q; got \(2,\)",
    ),
    (
        "boundaries on another device",
        {"cu_seqlens_k": lengths(0, 4, 9).to("meta")},
        ValueError,
        r"cu_seqlens_k: expected a tensor on cpu, as query; got meta",
    ),
    *(
        (f"{name} {bad}", {name: bad}, ValueError, rf"{name}: expected an int ≥ 0; got {bad}")
        for name in ("max_seqlen_q", "max_seqlen_k")
        for bad in (-1, 2.0, True)
    ),
    (
        "causal bias",
        {"attn_mask": causal_lower_right(9, 9)},
        ValueError,
        r"attn_mask: expected a tensor \(is_causal takes a CausalVariant\); got a CausalBias",
    ),
    (
        "mask of the packed length",
        {"attn_mask": x(9, 9), "max_seqlen_q": 5, "max_seqlen_k": 5},
        ValueError,
        r"attn_mask: expected a shape broadcastable to \(2, 4, 5, 5\); got \(9, 9\)",
    ),
    (
        "heads",
        {"key": x(9, 2, E), "value": x(9, 2, E)},
        ValueError,
        r"key: expected 4 heads, as query \(or enable_gqa=True\); got 2",
    ),
    ("head_dim", {"key": x(9, H, 9)}, ValueError, r"key: expected head_dim 8, as query; got 9"),
    ("tokens", {"value": x(8, H, E)}, ValueError, r"value: expected length 9, as key; got 8"),
    ("dropout", {"dropout_p": 2}, ValueError, r"dropout_p: expected a probability.*; got 2"),
    ("flag", {"enable_gqa": "x"}, TypeError, r"enable_gqa: expected True or False; got str"),
    ("softcap", {"softcap": -1}, ValueError, r"softcap: expected a number in .*; got -1"),
    (
        "diagonals",
        {"diagonal": lengths(1, 2, 3)},
        ValueError,
        r"diagonal: expected shape \(B,\), one a sequence; got \(3,\)",
    ),
    ("sinks", {"sinks": x(9)}, ValueError, r"sinks: expected shape \(4,\), .*; got \(9,\)"),
    (
        "relative bias of other bounds",
        {"relative_bias": x(17), "max_seqlen_q": 5, "max_seqlen_k": 5},
        ValueError,
        r"relative_bias: expected shape \(2 or 1, 4 or 1, 9\), or its last .*; got \(17,\)",
    ),
    (
        "relative bias of another number of sequences",
        {"relative_bias": x(3, 1, 17)},
        ValueError,
        r"relative_bias: expected shape \(2 or 1, 4 or 1, 17\), or its .*; got \(3, 1, 17\)",
    ),
    (
        "index of other bounds",
        {"relative_index": index(5, 5), "relative_bias": x(3), "max_seqlen_q": 5},
        ValueError,
        r"relative_index: expected shape \(5, 9\) or, by distance, \(13,\); got \(5, 5\)",
    ),
    (
        "table of queries that are not packed",
        {"relative_index": index(9, 9), "query_bias": x(2, H, 9, 5)},
        ValueError,
        r"query_bias: expected shape \(9, 4, n\); got \(2, 4, 9, 5\)",
    ),
    (
        "slopes of other sequences",
        {"alibi_slopes": x(3, 4)},
        ValueError,
        r"alibi_slopes: expected shape \(4,\) or \(2, 4\); got \(3, 4\)",
    ),
    ("window", {"window": -3}, ValueError, r"window: expected .*; got -3"),
    ("scale", {"scale": [1]}, TypeError, r"scale: expected a number; got list"),
]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [a[1:] for a in PACKED_ARGUMENTS],
    ids=[a[0] for a in PACKED_ARGUMENTS],
)
def test_packed_arguments(backend, arguments, error, message):
    call = PACKED | arguments
    refused(trifuse.varlen_attention, call, error, message)
    with pytest.raises(error, match=message):
        trifuse.explain(trifuse.varlen_attention, **call)


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("values", [(1, 4, 9), (0, 5, 4), (0, 4, 10), (0, -1, 9), (-2, 0, 9)])
def test_values_of_boundaries(backend, name, values, dtype):
    """The first is not 0, one decreases, or one is past the last token."""
    message = (
        rf"{name}: expected 0 first, no decrease, no step over 9, the last at most 9; "
        rf"got {re.escape(str(list(values)))}"
    )
    arguments = PACKED | {name: lengths(*values, dtype=dtype)}
    if name == "cu_seqlens_q":
        arguments["cu_seqlens_k"] = lengths(0, 4, 9)
    refused(trifuse.varlen_attention, arguments, ValueError, message)


@pytest.mark.parametrize("side", ["q", "k"])
def test_longest_sequence_is_checked(backend, side):
    message = rf"cu_seqlens_{side}: expected .*no step over 4, .*; got \[0, 4, 9\]"
    arguments = PACKED | {f"max_seqlen_{side}": 4}
    refused(trifuse.varlen_attention, arguments, ValueError, message)


# Backends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("cuda", {}, r"no CUDA kernels|tensors are on cpu"),
        ("cpp", {"device": "meta"}, r"tensors are on meta"),
        ("triton", {"device": "meta"}, r"tensors are on meta|triton is not installed"),
        ("triton", {"dtype": torch.float64}, r"no kernel for torch.float64|not installed|on cpu"),
    ],
)
def test_a_backend_that_cannot_serve_the_call(name, arguments, why):
    if name == "cpp" and backends._C is None:
        why = "the C\\+\\+ extension is missing"
    inputs = [x(1, 1, 2, 3, **arguments)] * 3
    message = rf"attention: backend '{name}' can't serve this call: .*({why})"
    with trifuse.backend(name), pytest.raises(RuntimeError, match=message):
        trifuse.scaled_dot_product_attention(*inputs)


@pytest.mark.parametrize("value", ["x", 1, None])
def test_return_lse_is_a_flag(value):
    with pytest.raises(TypeError, match="return_lse: expected True or False; got"):
        trifuse.scaled_dot_product_attention(**DEFAULT, return_lse=value)
