"""The ops on DTensors: results and gradients are those of whole tensors in one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import check
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

import trifuse
from trifuse.ops._linear_product import product

R, S = Replicate(), Shard


def close(actual: Tensor, expected: Tensor, what: str = "") -> None:
    torch.testing.assert_close(
        actual, expected, rtol=1e-9, atol=1e-11, msg=lambda text: f"{what}: {text}"
    )


def compare(
    function: Callable[..., Any],
    tensors: Mapping[str, Tensor],
    placements: Mapping[str, Placement],
    out: Placement | None = None,
    **options: Any,
) -> list[Any]:
    """Compares a call on DTensors, forward and backward, with the call on whole tensors.

    Args:
        out: the placement that the first result must have.

    Returns:
        The DTensors' gradients, by the order of ``tensors``.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = {n: t.clone().requires_grad_(t.is_floating_point()) for n, t in tensors.items()}
    parts = {
        n: distribute_tensor(t, mesh, [placements.get(n, R)]).requires_grad_(t.is_floating_point())
        for n, t in tensors.items()
    }
    expected, actual = function(**whole, **options), function(**parts, **options)
    expected, actual = (x if isinstance(x, tuple) else (x,) for x in (expected, actual))
    if out is not None:
        assert actual[0].placements == (out,), actual[0].placements
    weights = [torch.randn(x.shape, dtype=x.dtype) for x in expected]
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert isinstance(a, DTensor)
        assert a.shape == e.shape
        close(a.full_tensor(), e, f"result {i}")
    sum((x * w).sum() for x, w in zip(expected, weights, strict=True)).backward()
    spread = [
        distribute_tensor(w, mesh, a.placements) for w, a in zip(weights, actual, strict=True)
    ]
    loss = sum((x * w).sum() for x, w in zip(actual, spread, strict=True))
    loss.full_tensor().backward() if isinstance(loss, DTensor) else loss.backward()
    grads = []
    for name in tensors:
        if whole[name].grad is not None:
            close(parts[name].grad.full_tensor(), whole[name].grad, f"gradient of {name}")
            grads.append(parts[name].grad)
    return grads


def attention(lse: bool = True, **options: Any) -> Callable[..., Any]:
    return lambda **tensors: trifuse.scaled_dot_product_attention(
        **tensors, return_lse=lse, **options
    )


def qkv(B: int, H: int, Hkv: int, Lq: int = 5, Lk: int = 6, E: int = 8) -> dict[str, Tensor]:
    shapes = {"query": (B, H, Lq, E), "key": (B, Hkv, Lk, E), "value": (B, Hkv, Lk, E)}
    return {n: torch.randn(s, dtype=torch.float64) for n, s in shapes.items()}


BACKENDS = [name for name in ("eager", "cpp") if name == "eager" or trifuse.backends._C is not None]


@check
def attention_by_batch_and_heads() -> None:
    for backend, dim in itertools.product(BACKENDS, (0, 1)):
        with trifuse.backend(backend):
            for B, H, Hkv in ((4, 4, 4), (3, 5, 5), (4, 8, 4), (4, 4, 1)):
                where = dict.fromkeys(("query", "key", "value"), S(dim))
                if Hkv == 1 and dim == 1:
                    where = {"query": S(1)}
                compare(attention(enable_gqa=True), qkv(B, H, Hkv), where, out=S(dim))


@check
def attention_of_one_sharded_tensor_shards_the_others() -> None:
    for name in ("query", "key", "value"):
        compare(attention(), qkv(4, 4, 4), {name: S(1)}, out=S(1))


@check
def attention_gathers_groups_that_do_not_divide_and_sharded_lengths() -> None:
    H = 3 * dist.get_world_size()
    compare(attention(enable_gqa=True), qkv(2, H, 3), {"query": S(1), "key": S(1)}, out=R)
    compare(attention(), qkv(2, 4, 4), {"query": S(2), "key": S(2), "value": S(3)}, out=R)


@check
def attention_with_masks_lengths_and_options() -> None:
    B, H, Lq, Lk = 4, 4, 5, 6
    lengths, diagonals = torch.tensor([6, 3, 0, 1]), torch.tensor([1, -2, 0, 3])
    for shape in ((B, H, Lq, Lk), (B, 1, 1, Lk), (1, H, Lq, Lk), (1, 1, Lq, Lk), (Lq, Lk)):
        bias = torch.randn(shape, dtype=torch.float64)
        for dim in (0, 1):
            where = dict.fromkeys(("query", "key", "value"), S(dim))
            if len(shape) == 4 and shape[dim] > 1:
                where["attn_mask"] = S(dim)
            if dim == 0:
                where["key_lengths"] = where["diagonal"] = S(0)
            options = {"is_causal": True, "softcap": 3.0, "window": 4}
            tensors = {**qkv(B, H, H), "attn_mask": bias, "key_lengths": lengths}
            tensors["diagonal"] = diagonals
            compare(attention(**options), tensors, where, out=S(dim))
            tensors["attn_mask"] = bias > 0
            compare(attention(False, **options), tensors, where, out=S(dim))


@check
def attention_with_a_relative_bias() -> None:
    B, H, Lq, Lk = 4, 4, 5, 6
    for shape in ((B, H), (B, 1), (1, H), (1, 1)):
        table = torch.randn(*shape, Lq + Lk - 1, dtype=torch.float64)
        for dim in (0, 1):
            where = dict.fromkeys(("query", "key", "value"), S(dim))
            if shape[dim] > 1:
                where["relative_bias"] = S(dim)
            tensors = {**qkv(B, H, H), "relative_bias": table}
            compare(attention(is_causal=True), tensors, where, out=S(dim))


@check
def attention_with_tables() -> None:
    """All processes have the index."""
    B, H, Lq, Lk = 4, 4, 5, 6
    for shape, dim in itertools.product(((B, H), (1, H), (1, 1)), (0, 1)):
        where = dict.fromkeys(("query", "key", "value", "query_bias", "key_bias"), S(dim))
        if shape[dim] > 1:
            where["relative_bias"] = S(dim)
        tables = {"relative_bias": shape, "query_bias": (B, H, Lq), "key_bias": (B, H, Lk)}
        tensors = {n: torch.randn(*s, 3, dtype=torch.float64) for n, s in tables.items()}
        index = {"relative_index": torch.arange(Lq)[:, None] * torch.arange(Lk) % 3}
        compare(attention(), {**qkv(B, H, H), **tensors, **index}, where, out=S(dim))


@check
def attention_with_slopes() -> None:
    B, H = 4, 4
    for shape, dim in itertools.product(((H,), (B, H)), (0, 1)):
        slopes = torch.rand(shape, dtype=torch.float64)
        where = dict.fromkeys(("query", "key", "value"), S(dim))
        sharded = {S(dim - 2 + len(shape))} if dim - 2 + len(shape) >= 0 else set()
        for placement in (R, *sharded):
            where["alibi_slopes"] = placement
            tensors = {**qkv(B, H, H), "alibi_slopes": slopes}
            compare(attention(is_causal=True), tensors, where, out=S(dim))


@check
def attention_with_sinks() -> None:
    for dim in (0, 1):
        where = dict.fromkeys(("query", "key", "value"), S(dim))
        tensors = {**qkv(4, 4, 4), "sinks": torch.randn(4, dtype=torch.float64)}
        compare(attention(is_causal=True), tensors, where, out=S(dim))


@check
def attention_on_a_mesh_of_two_dimensions() -> None:
    if dist.get_world_size() != 4:
        return
    mesh = init_device_mesh("cpu", (2, 2))
    tensors = qkv(4, 8, 4)
    expected = trifuse.scaled_dot_product_attention(**tensors, enable_gqa=True)
    for where in ([S(0), S(1)], [S(1), S(1)], [R, S(1)], [S(0), R]):
        parts = {n: distribute_tensor(t, mesh, where) for n, t in tensors.items()}
        actual = trifuse.scaled_dot_product_attention(**parts, enable_gqa=True)
        assert actual.placements == tuple(where)
        close(actual.full_tensor(), expected)
    # Six key heads, halved twice, would split the groups: the second half is not taken.
    tensors = qkv(2, 12, 6)
    parts = {n: distribute_tensor(t, mesh, [S(1), S(1)]) for n, t in tensors.items()}
    actual = trifuse.scaled_dot_product_attention(**parts, enable_gqa=True)
    assert actual.placements == (S(1), R)
    close(actual.full_tensor(), trifuse.scaled_dot_product_attention(**tensors, enable_gqa=True))


@check
def packed_attention_and_mixed_tensors_are_refused() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    packed = distribute_tensor(torch.randn(8, 4, 8), mesh, [S(1)])
    cu = distribute_tensor(torch.tensor([0, 3, 8]), mesh, [R])
    with pytest.raises(NotImplementedError, match="varlen_attention takes no DTensors"):
        trifuse.varlen_attention(packed, packed, packed, cu)
    tensors = qkv(2, 4, 4)
    query = distribute_tensor(tensors.pop("query"), mesh, [S(1)])
    with pytest.raises(TypeError, match="key: expected a DTensor"):
        trifuse.scaled_dot_product_attention(query, **tensors)


@check
def norm_by_batch_and_tokens() -> None:
    tensors = {
        "x": torch.randn(4, 5, 16, dtype=torch.float64),
        "residual": torch.randn(4, 5, 16, dtype=torch.float64),
        **{n: torch.randn(16, dtype=torch.float64) for n in ("weight", "bias", "x_bias")},
    }
    for backend, dim in itertools.product(BACKENDS, (0, 1)):
        with trifuse.backend(backend):
            for prenorm, rms_norm in itertools.product((False, True), repeat=2):
                grads = compare(
                    trifuse.dropout_add_layer_norm,
                    tensors,
                    {"x": S(dim), "residual": S(dim)},
                    out=S(dim),
                    prenorm=prenorm,
                    rms_norm=rms_norm,
                )
                assert grads[0].placements == (S(dim),)
    # A dimension that is normalised is gathered; a tensor that is replicated is cut.
    compare(trifuse.dropout_add_layer_norm, tensors, {"x": S(2), "residual": S(2)}, out=R)
    compare(trifuse.dropout_add_layer_norm, tensors, {"x": S(1)}, out=S(1))
    compare(trifuse.dropout_add_layer_norm, {"x": tensors["x"]}, {"x": S(1)}, out=S(1))


@check
def norm_of_a_partial_sum_and_partial_gradients_of_weights() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x, weight = torch.randn(4, 16, dtype=torch.float64), torch.randn(16, dtype=torch.float64)
    every = [torch.empty_like(x) for _ in range(mesh.size())]
    mine = x * (dist.get_rank() + 1)
    dist.all_gather(every, mine)
    partial = DTensor.from_local(mine, mesh, [Partial()])
    w = distribute_tensor(weight, mesh, [R])
    actual = trifuse.dropout_add_layer_norm(partial, None, w)
    close(actual.full_tensor(), trifuse.dropout_add_layer_norm(sum(every), None, weight))
    backward = torch.ops.trifuse.dropout_add_layer_norm_backward.eager
    sharded = distribute_tensor(x, mesh, [S(0)])
    mean, rstd = (distribute_tensor(torch.rand(4, dtype=x.dtype), mesh, [S(0)]) for _ in range(2))
    wanted = [True, False, True, False, False]
    options = (0.0, 1e-5, False, False, torch.float64)
    dx, _, dw, *_ = backward(
        sharded, None, sharded, None, w, None, None, None, mean, rstd, *options, wanted
    )
    assert dx.placements == (S(0),)
    assert dw.placements == (Partial(),)


@check
def recurrent_layers_by_batch() -> None:
    T, B, N, H = 3, 4, 5, 6
    for name, gates in (("lstm", 4), ("gru", 3), ("rnn", 1)):
        shapes = {"input": (T, B, N), "w_ih": (gates * H, N), "w_hh": (gates * H, H)}
        shapes |= {"b_ih": (gates * H,), "h0": (B, H)}
        tensors = {n: torch.randn(s, dtype=torch.float64) for n, s in shapes.items()}
        if name == "lstm":
            tensors["c0"] = torch.randn(B, H, dtype=torch.float64)
        tensors["lengths"] = torch.tensor([3, 1, 0, 2])

        def call(input, w_ih, w_hh, b_ih, h0, lengths, c0=None, name=name):
            hx = h0 if c0 is None else (h0, c0)
            found = getattr(trifuse, name)(input, hx, w_ih, w_hh, b_ih, lengths=lengths)
            out, states = found
            return (out, *states) if isinstance(states, tuple) else (out, states)

        for backend in BACKENDS:
            with trifuse.backend(backend):
                where = {"input": S(1), "h0": S(0), "c0": S(0), "lengths": S(0)}
                compare(call, tensors, where, out=S(1))
                compare(call, tensors, {"input": S(1)}, out=S(1))
                compare(call, tensors, {"input": S(0)}, out=R)


@check
def recurrent_cells_by_batch() -> None:
    B, N, H = 4, 5, 6
    for name, gates in (("lstm_cell", 4), ("gru_cell", 3), ("rnn_cell", 1)):
        shapes = {"input": (B, N), "w_ih": (gates * H, N), "w_hh": (gates * H, H)}
        shapes |= {"b_ih": (gates * H,), "h0": (B, H)}
        if name == "lstm_cell":
            shapes["c0"] = (B, H)
        tensors = {n: torch.randn(s, dtype=torch.float64) for n, s in shapes.items()}

        def call(input, w_ih, w_hh, b_ih, h0, c0=None, name=name):
            hx = h0 if c0 is None else (h0, c0)
            return getattr(trifuse, name)(input, hx, w_ih, w_hh, b_ih)

        for backend in BACKENDS:
            with trifuse.backend(backend):
                compare(call, tensors, {"input": S(0), "h0": S(0), "c0": S(0)}, out=S(0))
                compare(call, tensors, {"input": S(0)}, out=S(0))


@check
def lstm_module_with_replicated_weights() -> None:
    from torch.distributed.tensor import distribute_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = trifuse.nn.LSTM(5, 6, num_layers=2, bidirectional=True, dtype=torch.float64)
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    expected, _ = module(x)
    expected.square().sum().backward()
    grads = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    distribute_module(module, mesh)
    actual, _ = module(distribute_tensor(x, mesh, [S(1)]))
    close(actual.full_tensor(), expected)
    actual.square().sum().full_tensor().backward()
    for p, grad in zip(module.parameters(), grads, strict=True):
        close(p.grad.full_tensor(), grad)


@check
def linear_op_by_rows_columns_and_terms() -> None:
    x, weight = torch.randn(6, 4, dtype=torch.float32), torch.randn(8, 4, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    expected = torch.nn.functional.linear(x, weight)
    for places, out in (((S(0), R), S(0)), ((R, S(0)), S(1)), ((S(1), S(1)), Partial())):
        parts = [distribute_tensor(t, mesh, [p]) for t, p in zip((x, weight), places, strict=True)]
        for t in parts:
            t.requires_grad_()
        actual = product(*parts)
        assert actual.placements == (out,), actual.placements
        torch.testing.assert_close(actual.full_tensor(), expected)
        actual.full_tensor().square().sum().backward()
        torch.testing.assert_close(parts[0].grad.full_tensor(), 2 * expected @ weight)
        torch.testing.assert_close(parts[1].grad.full_tensor(), 2 * expected.t() @ x)


@check
def sequence_parallel_norm() -> None:
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    from trifuse import distributed

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x, residual = (torch.randn(2, 4, 16, dtype=torch.float64) for _ in range(2))
    spread = [distribute_tensor(t, mesh, [S(1)]) for t in (x, residual)]
    local = [t.to_local() for t in spread]
    alone = trifuse.nn.DropoutAddLayerNorm(16, dtype=torch.float64)
    torch.nn.init.normal_(alone.weight)
    expected = alone(x, residual)
    expected.square().sum().backward()
    # torch's style drops positional arguments after the first.
    calls = (
        (SequenceParallel(), lambda norm: norm(spread[0], residual=spread[1])),
        (distributed.SequenceParallel(), lambda norm: norm(*spread)),
        (distributed.SequenceParallel(), lambda norm: norm(*local)),
        (distributed.SequenceParallel(), lambda norm: norm(local[0], residual=spread[1])),
    )
    for style, call in calls:
        norm = trifuse.nn.DropoutAddLayerNorm(16, dtype=torch.float64)
        norm.load_state_dict(alone.state_dict())
        parallelize_module(norm, mesh, style)
        actual = call(norm)
        assert actual.placements == (S(1),)
        close(actual.full_tensor(), expected)
        actual.square().sum().full_tensor().backward()
        for name in ("weight", "bias"):
            close(getattr(norm, name).grad.full_tensor(), getattr(alone, name).grad)
    style = distributed.SequenceParallel(use_local_output=True)
    norm = trifuse.nn.DropoutAddLayerNorm(16, dtype=torch.float64, prenorm=True)
    parallelize_module(norm, mesh, style)
    out, total = norm(*local)
    assert type(out) is type(total) is Tensor
    close(total, sum(local))
    norm = trifuse.nn.DropoutAddLayerNorm(16, dtype=torch.float64)
    parallelize_module(norm, mesh, SequenceParallel())
    close(norm(local[0]).full_tensor(), trifuse.dropout_add_layer_norm(x))
    with pytest.raises((TypeError, ValueError), match="residual: expected a"):
        norm(local[0], residual=local[1])


@check
def fast_paths_decline_dtensors() -> None:
    from trifuse.ops.encoder_layer import is_plain

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = distribute_tensor(torch.randn(2, 4, 4, 8), mesh, [S(1)])
    assert not is_plain(x, x, x)


@check
def calls_on_dtensors_compile() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = distribute_tensor(torch.randn(2, 4, 5, 8), mesh, [S(1)]).requires_grad_()

    def call(x: Tensor) -> Tensor:
        return trifuse.scaled_dot_product_attention(x, x, x, is_causal=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found = []
    for function in (call, compiled):
        out = function(x)
        assert out.placements == (S(1),)
        found.append((out.full_tensor(), *torch.autograd.grad(out.sum().full_tensor(), x)))
    (out, grad), (compiled_out, compiled_grad) = found
    torch.testing.assert_close(compiled_out, out)
    torch.testing.assert_close(compiled_grad.full_tensor(), grad.full_tensor())


@check
def second_derivatives_of_dtensors_raise() -> None:
    x = torch.randn(2, 4, 5, 8)
    weights = [torch.randn(16, 8), torch.randn(16, 4)]

    calls = (
        ("attention", lambda x: trifuse.scaled_dot_product_attention(x, x, x), [x]),
        ("dropout_add_layer_norm", trifuse.dropout_add_layer_norm, [x]),
        ("lstm", lambda x, *w: trifuse.lstm(x, None, *w)[0], [x[0], *weights]),
        ("gru", lambda x, *w: trifuse.gru(x, None, *w)[0], [x[0], *(w[:12] for w in weights)]),
        ("rnn", lambda x, *w: trifuse.rnn(x, None, *w)[0], [x[0], *(w[:4] for w in weights)]),
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, call, (first, *others) in calls:
        given = distribute_tensor(first, mesh, [S(1)]).requires_grad_()
        out = call(given, *(distribute_tensor(t, mesh, [R]) for t in others))
        loss = out.square().sum().full_tensor()
        (grad,) = torch.autograd.grad(loss, given, create_graph=True)
        with pytest.raises(NotImplementedError, match=f"{name}: no second derivatives of DTensors"):
            torch.autograd.grad(grad.square().sum().full_tensor(), given)
