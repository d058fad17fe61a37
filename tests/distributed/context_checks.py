"""Context parallelism: ring_attention against attention over whole sequences."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attention_cases import Case, Results, judge
from dtensor_checks import close
from numerics import Accuracy
from processes import check, thinned
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import trifuse
from trifuse.distributed import ring_attention, shard_sequence, unshard_sequence

METHODS = ("ring", "all_gather", "all_to_all")
PIECE = 3


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def inputs(H: int = 4, Hkv: int = 4, B: int = 2, dtype: Any = torch.float64) -> list[Tensor]:
    torch.manual_seed(1)
    L = 2 * PIECE * dist.get_world_size()
    return [torch.randn(B, h, L, 8, dtype=dtype) for h in (H, Hkv, Hkv)]


def compare(
    tensors: list[Tensor],
    method: str,
    balanced: bool,
    mask: Tensor | None = None,
    shared: dict[str, Tensor] | None = None,
    of_rows: dict[str, Tensor] | None = None,
    index: Tensor | None = None,
    **options: Any,
) -> None:
    """Compares outputs, logsumexp and gradients with the call on whole sequences.

    Args:
        tensors: query, key and value; of packed sequences with ``cu_seqlens`` among the options.
        shared: arguments that all processes have, whose gradients add up.
        of_rows: tables of queries and keys, split as these are.
        index: ``relative_index`` of the whole sequence; one of pairs is split by its rows.
    """
    mesh = line()
    packed = "cu_seqlens" in options
    dim = 0 if packed else 2
    given = [t.clone().requires_grad_() for t in tensors]
    parts = [shard_sequence(t, mesh, dim, balanced).requires_grad_() for t in tensors]
    whole_shared, part_shared = (
        {name: t.clone().requires_grad_() for name, t in (shared or {}).items()} for _ in range(2)
    )
    whole_shared |= {name: t.clone().requires_grad_() for name, t in (of_rows or {}).items()}
    rows = {
        name: shard_sequence(t, mesh, dim, balanced).requires_grad_()
        for name, t in (of_rows or {}).items()
    }
    if index is not None:
        whole_shared["relative_index"] = rows["relative_index"] = index
        if index.dim() == 2 and not packed:
            rows["relative_index"] = shard_sequence(index, mesh, 0, balanced)
    if packed:
        most = options.get("max_seqlen")
        whole_options = {k: v for k, v in options.items() if k not in ("cu_seqlens", "max_seqlen")}
        bounds = options["cu_seqlens"]
        expected = trifuse.varlen_attention(
            *given, bounds, bounds, most, most, return_lse=True, **whole_options, **whole_shared
        )
    else:
        whole_mask = part_mask = None
        if mask is not None:
            whole_mask, part_mask = mask.clone(), mask.clone()
            if mask.shape[-2] > 1:
                part_mask = shard_sequence(mask, mesh, -2, balanced)
            if mask.is_floating_point():
                whole_mask.requires_grad_()
                part_mask.requires_grad_()
            options["attn_mask"] = part_mask
        whole_options = {**options, "attn_mask": whole_mask}
        expected = trifuse.scaled_dot_product_attention(
            *given, return_lse=True, **whole_options, **whole_shared
        )
    actual = ring_attention(
        *parts,
        mesh=mesh,
        method=method,
        balanced=balanced,
        return_lse=True,
        **options,
        **part_shared,
        **rows,
    )
    empty = expected[1] == -torch.inf
    weights = [torch.randn_like(e) for e in expected]
    weights[1][empty] = 0
    for a, e, what in zip(actual, expected, ("output", "logsumexp"), strict=True):
        close(a, shard_sequence(e, mesh, dim, balanced), what)
        close(unshard_sequence(a.detach(), mesh, dim, balanced), e, what)
    torch.autograd.backward(expected, weights)
    torch.autograd.backward(actual, [shard_sequence(w, mesh, dim, balanced) for w in weights])
    for part, whole, what in zip(parts, given, ("query", "key", "value"), strict=True):
        close(part.grad, shard_sequence(whole.grad, mesh, dim, balanced), f"gradient of {what}")
    for name, t in part_shared.items():
        dist.all_reduce(t.grad)
        close(t.grad, whole_shared[name].grad, f"gradient of {name}")
    for name in of_rows or {}:
        wanted = shard_sequence(whole_shared[name].grad, mesh, dim, balanced)
        close(rows[name].grad, wanted, f"gradient of {name}")
    if mask is not None and mask.is_floating_point():
        grad = part_mask.grad
        if mask.shape[-2] > 1:
            grad = unshard_sequence(grad, mesh, -2, balanced)
        else:
            dist.all_reduce(grad)
        close(grad, whole_mask.grad, "gradient of the mask")


@check
def ring_attention_causal_and_full() -> None:
    for method, balanced, is_causal in itertools.product(METHODS, (False, True), (False, True)):
        compare(inputs(), method, balanced, is_causal=is_causal)
        compare(inputs(8, 4), method, balanced, is_causal=is_causal, enable_gqa=True)


@check
def ring_attention_lengths_softcap_scale() -> None:
    L = inputs()[0].shape[2]
    for method, balanced, is_causal in itertools.product(METHODS, (False, True), (False, True)):
        for lengths in ((L, 1), (PIECE + 1, 0)):
            compare(
                inputs(),
                method,
                balanced,
                is_causal=is_causal,
                softcap=2.0,
                scale=0.5,
                key_lengths=torch.tensor(lengths),
            )


@check
def ring_attention_sinks() -> None:
    """They enter each row once; the processes' gradients add up to one process's."""
    mesh = line()
    for method, balanced in itertools.product(METHODS, (False, True)):
        whole = [t.requires_grad_() for t in inputs()]
        parts = [shard_sequence(t.detach(), mesh, 2, balanced).requires_grad_() for t in whole]
        sinks = [torch.randn(4, dtype=torch.float64).requires_grad_() for _ in range(2)]
        sinks[1].data.copy_(sinks[0])
        expected = trifuse.scaled_dot_product_attention(*whole, is_causal=True, sinks=sinks[0])
        expected.square().sum().backward()
        out = ring_attention(
            *parts, mesh=mesh, method=method, balanced=balanced, is_causal=True, sinks=sinks[1]
        )
        out.square().sum().backward()
        dist.all_reduce(sinks[1].grad)
        close(out, shard_sequence(expected, mesh, 2, balanced), method)
        close(sinks[1].grad, sinks[0].grad, f"{method}, gradient of the sinks")
        for part, t in zip(parts, whole, strict=True):
            close(part.grad, shard_sequence(t.grad, mesh, 2, balanced), method)


@check
def ring_attention_windows() -> None:
    windows = (0, 2, 5, (1, None), (None, 2), (7, 0), (4, 9), 1000)
    for method, balanced, window in itertools.product(METHODS, (False, True), windows):
        compare(inputs(), method, balanced, window=window)
        if window in (0, 5, (None, 2), (4, 9)):
            compare(inputs(), method, balanced, window=window, is_causal=True)


@check
def ring_attention_biases_and_masks() -> None:
    L = inputs()[0].shape[2]
    for method, balanced in itertools.product(METHODS, (False, True)):
        for shape in ((2, 4, L, L), (1, 4, 1, L), (L, L), (2, 1, L, 1)):
            torch.manual_seed(3)
            bias = torch.randn(shape, dtype=torch.float64)
            compare(inputs(), method, balanced, bias, is_causal=True)
            compare(inputs(), method, balanced, bias > 0.5, window=4)


@check
def ring_attention_biases_by_distance() -> None:
    """Tables and slopes, at the distances of whole sequences, and their gradients."""
    L = inputs()[0].shape[2]
    tables = [(2 * L - 1,), (4, 2 * L - 1), (2, 4, 2 * L - 1), (2, 1, 2 * L - 1)]
    masks = ({}, {"is_causal": True}, {"window": (5, 2)})
    calls = itertools.product(METHODS, (False, True), zip(tables, itertools.cycle(masks)))
    for method, balanced, (shape, options) in calls:
        table = torch.randn(shape, dtype=torch.float64)
        compare(inputs(), method, balanced, shared={"relative_bias": table}, **options)
    for method, balanced, options in itertools.product(METHODS, (False, True), masks):
        slopes = torch.rand(4, dtype=torch.float64)
        compare(inputs(), method, balanced, shared={"alibi_slopes": slopes}, **options)
    for method, balanced in itertools.product(METHODS, (False, True)):
        mask = torch.randn(2, 1, L, L, dtype=torch.float64)
        shared = {
            "relative_bias": torch.randn(4, 2 * L - 1, dtype=torch.float64),
            "alibi_slopes": torch.rand(2, 4, dtype=torch.float64),
        }
        lengths = torch.tensor([L - 1, 2])
        options = {"softcap": 3.0, "is_causal": True, "key_lengths": lengths}
        compare(inputs(), method, balanced, mask, shared, **options)
        compare(
            inputs(8, 4),
            method,
            balanced,
            shared={"alibi_slopes": torch.rand(8, dtype=torch.float64)},
            enable_gqa=True,
        )


def tables(
    tensors: list[Tensor], columns: int = 5, batch: int = 2
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns tables that all processes have, and those of queries and keys."""
    shape = tensors[0].shape[:-1]  # of queries' heads
    of_rows = {
        name: torch.randn(*shape, columns, dtype=torch.float64)
        for name in ("query_bias", "key_bias")
    }
    return {"relative_bias": torch.randn(batch, 4, columns, dtype=torch.float64)}, of_rows


@check
def ring_attention_biases_by_an_index() -> None:
    """Tables of heads, queries and keys, read by distance and by an index of pairs."""
    L = inputs()[0].shape[2]
    by_distance, of_pairs = torch.randint(5, (2 * L - 1,)), torch.randint(5, (L, L)).int()
    masks = ({}, {"is_causal": True}, {"window": (5, 2)}, {"key_lengths": torch.tensor([L - 1, 2])})
    indices = (by_distance, of_pairs)
    for method, balanced, options, index in thinned(METHODS, (False, True), masks, indices):
        shared, of_rows = tables(inputs())
        compare(inputs(), method, balanced, None, shared, of_rows, index, **options)
    for method, balanced in itertools.product(METHODS, (False, True)):
        shared, of_rows = tables(inputs())
        mask = torch.randn(L, L, dtype=torch.float64)
        one = {"key_bias": of_rows["key_bias"]}
        compare(inputs(4, 4), method, balanced, mask, None, one, of_pairs, softcap=2.0)
        shared = {"relative_bias": shared["relative_bias"][0]}
        compare(inputs(), method, balanced, None, shared, None, of_pairs)
        key_heads = 4 if method == "all_to_all" else 2
        one = {"query_bias": of_rows["query_bias"]}
        grouped = inputs(4, key_heads)
        compare(grouped, method, balanced, None, None, one, by_distance, enable_gqa=True)


@check
def ring_attention_biases_by_an_index_in_packed_sequences() -> None:
    calls = itertools.product(METHODS, (False, True), packings()[:4])
    for method, balanced, bounds in calls:
        most = max(after - before for before, after in itertools.pairwise(bounds)) + 1
        shared, of_rows = tables(packed_inputs(), batch=len(bounds) - 1)
        options = {"cu_seqlens": torch.tensor(bounds), "max_seqlen": most, "is_causal": balanced}
        for index in (torch.randint(5, (2 * most - 1,)), torch.randint(5, (most, most))):
            compare(packed_inputs(), method, balanced, None, shared, of_rows, index, **options)


def packings() -> list[tuple[int, ...]]:
    """Returns boundaries: in pieces, across them, with an empty sequence, with tokens left over."""
    L = 2 * PIECE * dist.get_world_size()
    return [
        (0, L),
        (0, 1, 2, 4, 4, 6, L),
        (0, L - 4),
        (0, L // 2, L // 2, L - 1),
        (0, L - 2, L - 2, L - 2),
        (0, 2, L - 2, L),
        (0, 0, PIECE, 2 * PIECE, L),
        (0,),
    ]


def packed_inputs(H: int = 4, Hkv: int = 4) -> list[Tensor]:
    return [t[0].transpose(0, 1).contiguous() for t in inputs(H, Hkv, 1)]


@check
def ring_attention_in_packed_sequences() -> None:
    masks = ({}, {"is_causal": True}, {"window": (2, 1)}, {"window": (4, 0), "softcap": 2.0})
    for method, balanced, bounds, options in thinned(METHODS, (False, True), packings(), masks):
        compare(packed_inputs(), method, balanced, cu_seqlens=torch.tensor(bounds), **options)
    for method, balanced in itertools.product(METHODS, (False, True)):
        options = {"cu_seqlens": torch.tensor(packings()[1]).int(), "is_causal": True}
        compare(packed_inputs(8, 4), method, balanced, enable_gqa=True, scale=0.3, **options)


@check
def ring_attention_biases_by_distance_in_packed_sequences() -> None:
    L = inputs()[0].shape[2]
    for method, balanced, bounds in itertools.product(METHODS, (False, True), packings()[:4]):
        N = len(bounds) - 1
        shared = {
            "relative_bias": torch.randn(N, 4, 2 * L - 1, dtype=torch.float64),
            "alibi_slopes": torch.rand(N, 4, dtype=torch.float64),
        }
        bounds = torch.tensor(bounds)
        options = {"cu_seqlens": bounds, "is_causal": True}
        compare(packed_inputs(), method, balanced, shared=shared, **options)
        most = int(bounds.diff().max()) + 1
        shared = {"relative_bias": torch.randn(4, 2 * most - 1, dtype=torch.float64)}
        options["max_seqlen"] = most
        compare(packed_inputs(), method, balanced, shared=shared, **options)


@check
def ring_attention_sinks_in_packed_sequences() -> None:
    for method, balanced in itertools.product(METHODS, (False, True)):
        shared = {"sinks": torch.randn(4, dtype=torch.float64)}
        bounds = torch.tensor(packings()[1])
        compare(packed_inputs(), method, balanced, shared=shared, cu_seqlens=bounds)


@check
def ring_attention_gradients_on_each_backend() -> None:
    """The formula's backward normalises weights itself; the kernels' takes the logsumexp."""
    from dtensor_checks import BACKENDS

    L = inputs()[0].shape[2]
    for backend, method in itertools.product(BACKENDS, ("ring", "all_gather")):
        with trifuse.backend(backend):
            bias = torch.randn(2, 4, L, L, dtype=torch.float64)
            slopes = {"alibi_slopes": torch.rand(4, dtype=torch.float64)}
            lengths = torch.tensor([L, PIECE + 1])
            compare(inputs(), method, True, bias, slopes, is_causal=True, key_lengths=lengths)
            compare(inputs(8, 4), method, True, bias[..., :1].repeat(1, 2, 1, 1), enable_gqa=True)
            bounds = torch.tensor(packings()[1])
            compare(packed_inputs(), method, True, shared=slopes, cu_seqlens=bounds)
            indexed = (*tables(inputs()), torch.randint(5, (2 * L - 1,)))
            compare(inputs(), method, True, None, *indexed, is_causal=True)


@check
def ring_attention_masks_in_pieces_of_one_key() -> None:
    """The kernels take the gradient of a mask with one column from the logsumexp's."""
    L = 2 * dist.get_world_size()
    for method, balanced in itertools.product(METHODS, (False, True)):
        bias = torch.randn(2, 1, L, L, dtype=torch.float64)
        compare([t[:, :, :L] for t in inputs()], method, balanced, bias, is_causal=True)


@check
def ring_attention_beside_large_masks() -> None:
    """A logsumexp in the thousands has too few digits for the kernels, which sum weights again."""
    L = inputs()[0].shape[2]
    for lowest in (-9e3, -1e5, torch.finfo(torch.float64).min):
        bias = torch.randn(L, L, dtype=torch.float64)
        bias[0] = bias[L // 2] = lowest  # whole rows
        bias[1, ::2] = lowest
        bias[2, L // 3 :] = -torch.inf
        for method, balanced in itertools.product(METHODS, (False, True)):
            compare(inputs(), method, balanced, bias)
            if lowest > -1e6:
                compare(inputs(), method, balanced, bias, is_causal=True)


@check
def ring_attention_computes_seven_products() -> None:
    """The kernels' backward computes five and runs no forward, as in one process."""
    from dtensor_checks import BACKENDS
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    class Calls(TorchDispatchMode):
        names: tuple[str, ...] = ()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == "trifuse":
                self.names += (function._schema.name.removeprefix("trifuse::attention_"),)
            return function(*args, **(kwargs or {}))

    if "cpp" not in BACKENDS:
        return  # the formula's backward is another
    mesh, n = line(), dist.get_world_size()
    whole = inputs()
    products = whole[0].shape[:3].numel() * whole[0].shape[2] * 2 * whole[0].shape[3]
    for method, balanced in itertools.product(METHODS, (False, True)):
        parts = [shard_sequence(t, mesh, 2, balanced).requires_grad_() for t in whole]
        for passes, count in (("forward", 2), ("backward", 5)):
            counted = FlopCounterMode(display=False)
            with trifuse.backend("cpp"), Calls() as calls, counted as flops:
                if passes == "forward":
                    out = ring_attention(*parts, mesh=mesh, method=method, balanced=balanced)
                else:
                    out.sum().backward()
            assert set(calls.names) == {passes}, calls.names
            assert flops.get_total_flops() == count * products // n, (method, passes)


@check
def ring_attention_on_each_backend_and_dtype() -> None:
    from dtensor_checks import BACKENDS

    mesh = line()
    for backend, dtype in itertools.product(BACKENDS, (torch.float32, torch.bfloat16)):
        with trifuse.backend(backend):
            tensors = inputs(dtype=dtype)
            expected = trifuse.scaled_dot_product_attention(
                *[t.double() for t in tensors], is_causal=True
            )
            parts = [shard_sequence(t, mesh, 2, True) for t in tensors]
            actual = ring_attention(*parts, mesh=mesh, balanced=True, is_causal=True)
            assert actual.dtype == dtype
            error = (actual - shard_sequence(expected, mesh, 2, True)).abs().max()
            assert error < 8 * torch.finfo(dtype).eps, error


@check
def ring_attention_holds_no_whole_sequence() -> None:
    """The largest allocation is O(L / n), whatever n is, except with all_gather."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for t in tree_leaves(out):
                if isinstance(t, Tensor):
                    self.elements = max(self.elements, t.numel())
            return out

    mesh = line()
    parts = [shard_sequence(t, mesh, 2, True).requires_grad_() for t in inputs()]
    slopes = torch.rand(4, dtype=torch.float64)
    with Largest() as largest:
        ring_attention(
            *parts, mesh=mesh, balanced=True, is_causal=True, alibi_slopes=slopes
        ).sum().backward()
    assert 0 < largest.elements <= parts[0].numel(), (largest.elements, parts[0].shape)
    parts = [shard_sequence(t, mesh, 0, True).requires_grad_() for t in packed_inputs()]
    with Largest() as largest:
        ring_attention(
            *parts, mesh=mesh, balanced=True, cu_seqlens=torch.tensor(packings()[1])
        ).sum().backward()
    assert 0 < largest.elements <= parts[0].numel(), (largest.elements, parts[0].shape)


@check
def ring_attention_sends_while_it_computes() -> None:
    """It computes on keys while it sends them, and sends a part's gradients with the next part.

    Each tensor goes n - 1 times: keys and values in both passes, and their gradients.
    """
    from unittest import mock

    from trifuse import _attention_blocks, _ring_attention

    n, mesh = dist.get_world_size(), line()
    events: list[str] = []

    class Travel(_ring_attention.Travel):
        def __init__(self, layout, tensors):
            super().__init__(layout, tensors)
            assert len(tensors) == 2
            events.append("send")

        def wait(self):
            events.append("wait")
            return super().wait()

    def computing(blocks):
        def record(*args):
            events.append("compute")
            return blocks(*args)

        return record

    parts = [shard_sequence(t, mesh, 2, True).requires_grad_() for t in inputs()]
    with (
        mock.patch.object(_ring_attention, "Travel", Travel),
        mock.patch.object(_attention_blocks, "blocks", computing(_attention_blocks.blocks)),
    ):
        out = ring_attention(*parts, mesh=mesh, balanced=True, is_causal=True)
        assert events == ["send", "compute", "wait"] * (n - 1) + ["compute"]
        events.clear()
        out.sum().backward()
    expected = ["send", "compute", "wait"]
    for step in range(1, n):
        last = step == n - 1
        sums_of_before = ["wait"] * (step > 1)
        expected += ["send"] * (not last) + ["compute", *sums_of_before, "send"]
        expected += ["wait"] * (not last)
    assert events == [*expected, "wait"], events
    assert events.count("send") == 2 * (n - 1)


@check
def balanced_parts_have_equal_work() -> None:
    from trifuse import _attention_blocks, _sequence_parts, backends

    mesh, size = line(), dist.get_world_size()
    L = 2 * PIECE * size
    for balanced in (False, True):
        layout = _sequence_parts.Layout(mesh, balanced)
        choice = backends.Choice("cpp", ())
        call = _attention_blocks.Call(layout, 1.0, False, None, None, 0, (0, L), L, False, choice)
        pairs = torch.zeros(1)
        for owner in range(size):
            for block in _attention_blocks.blocks(call, owner, 2 * PIECE):
                n = block.rows.stop - block.rows.start
                pairs += n * (n + 1) / 2 if block.first_query == block.first_key else n * n
        every = [torch.zeros(1) for _ in range(size)]
        dist.all_gather(every, pairs)
        assert (len({float(p) for p in every}) == 1) == balanced, every


@check
def sequences_split_and_join() -> None:
    mesh, size = line(), dist.get_world_size()
    whole = torch.arange(2.0 * size * 3).view(1, -1, 1)
    for balanced in (False, True):
        part = shard_sequence(whole, mesh, 1, balanced).requires_grad_()
        joined = unshard_sequence(part, mesh, 1, balanced)
        assert torch.equal(joined, whole)
        (joined * whole).sum().backward()
        assert torch.equal(part.grad, size * part.detach())
    with pytest.raises(ValueError, match="divides"):
        shard_sequence(torch.zeros(2 * size + 1), mesh, 0, True)


@check
def ring_attention_meets_the_numerics_rule() -> None:
    """Results and gradients of parts are rounded to the query's dtype, and joined in float32.

    Rows whose scores are all near -10⁴, as masks of some models make them, have a logsumexp without
    the digits of the parts' weights. Their scores lack these digits too, in one process as well.
    """
    from dtensor_checks import BACKENDS

    size = dist.get_world_size()
    L = 16 * size
    calls: tuple[dict[str, Any], ...] = (
        {"is_causal": True},
        {},
        {"is_causal": True, "softcap": 2.0},
        {"window": (L // 2, 5)},
        {"key_lengths": torch.tensor([L - 3, L // 2 + 1])},
        {"is_causal": True, "attn_mask": 0.0},
        {"attn_mask": 0.0, "enable_gqa": True},
        {"is_causal": True, "attn_mask": -1e4},
    )
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    results = {
        (dtype, method, backend): [
            joined_results(make_case(dtype, seed, call, method), method, backend)
            for seed, call in enumerate(calls)
        ]
        for dtype, method, backend in thinned(dtypes, METHODS, BACKENDS, strength=2)
    }
    # All processes have the same results now, and each judges those of some dtypes.
    judged = functools.cache(
        lambda dtype, seed, method: judge(make_case(dtype, seed, calls[seed], method))
    )
    for (dtype, method, backend), of_calls in results.items():
        if dtypes.index(dtype) % size != dist.get_rank():
            continue
        accuracy = Accuracy(f"{backend}, {method}, {size} processes")
        same = "all_to_all" if method == "all_to_all" else "ring"  # as far as cases differ
        for seed, found in enumerate(of_calls):
            for name, actual in found.items():
                expected = (getattr(x, name) for x in judged(dtype, seed, same))
                accuracy.record(name, actual, *expected)
        accuracy.conclude()


def make_case(dtype: torch.dtype, seed: int, options: dict[str, Any], method: str) -> Case:
    """Returns a call on whole sequences. ``options`` has as ``attn_mask`` the number that some rows
    of the mask are."""
    L = 16 * dist.get_world_size()
    torch.manual_seed(seed)
    options = dict(options)
    mask, low = None, options.pop("attn_mask", None)
    if low is not None:
        mask = torch.randn(2, 4, L, L).to(dtype)
        if low:
            mask[:, :, 5::7] = low
    key_heads = 4 // (1 + options.get("enable_gqa", False) * (method != "all_to_all"))
    tensors = [torch.randn(2, h, L, 32).to(dtype) for h in (4, key_heads, key_heads, 4)]
    return Case(*tensors[:3], mask, tensors[3], torch.randn(2, 4, L), options)


def joined_results(case: Case, method: str, backend: str) -> dict[str, Tensor]:
    """Returns the results and gradients of ring_attention, the parts of all processes joined."""
    mesh = line()
    names = Results._fields[: 5 + (case.attn_mask is not None)]
    given = [
        case.query,
        case.key,
        case.value,
        *([] if case.attn_mask is None else [case.attn_mask]),
    ]
    wanted = [shard_sequence(t, mesh, 2, balanced=True).requires_grad_() for t in given]
    grads = [shard_sequence(t, mesh, 2, balanced=True) for t in (case.grad_out, case.grad_lse)]
    with trifuse.backend(backend):
        found = ring_attention(
            *wanted, mesh=mesh, method=method, balanced=True, return_lse=True, **case.options
        )
        torch.autograd.backward(found, grads)
    parts = [t.detach() for t in found] + [t.grad for t in wanted]
    whole = [unshard_sequence(t, mesh, 2, balanced=True) for t in parts]
    return dict(zip(names, whole, strict=True))


@check
def ring_attention_computes_the_wanted_gradients() -> None:
    """An operator may return gradients that are not wanted without elements."""
    from unittest import mock

    from trifuse import _attention_blocks

    gradients = _attention_blocks.attention_gradients

    def sparing(*args):
        return tuple(
            grad if need else grad.new_empty(0)
            for grad, need in zip(gradients(*args), args[-1], strict=True)
        )

    mesh = line()
    for method, wanted in itertools.product(("ring", "all_gather"), range(3)):
        whole, parts = inputs(), [shard_sequence(t, mesh, 2) for t in inputs()]
        whole[wanted].requires_grad_()
        parts[wanted].requires_grad_()
        trifuse.scaled_dot_product_attention(*whole, is_causal=True).square().sum().backward()
        out = ring_attention(*parts, mesh=mesh, method=method, is_causal=True)
        with mock.patch.object(_attention_blocks, "attention_gradients", sparing):
            out.square().sum().backward()
        close(parts[wanted].grad, shard_sequence(whole[wanted].grad, mesh, 2), method)
        assert [t.grad is None for t in parts] == [i != wanted for i in range(3)]


@check
def ring_attention_refuses_by_name() -> None:
    mesh, size = line(), dist.get_world_size()
    q = torch.randn(1, size, 4, 8)
    with pytest.raises(NotImplementedError, match=r"dropout_p: .* multiples of 8"):
        ring_attention(q, q, q, dropout_p=0.1, mesh=mesh)
    tokens, bounds = torch.randn(4, size, 8), torch.tensor([0, 3, 4 * size])
    with pytest.raises(NotImplementedError, match="attn_mask: not beside cu_seqlens"):
        ring_attention(*[tokens] * 3, torch.zeros(4, 4), mesh=mesh, cu_seqlens=bounds)
    with pytest.raises(NotImplementedError, match="key_lengths: not beside cu_seqlens"):
        ring_attention(*[tokens] * 3, mesh=mesh, cu_seqlens=bounds, key_lengths=bounds)
    with pytest.raises(ValueError, match=r"query: expected shape \(T / n"):
        ring_attention(q, q, q, mesh=mesh, cu_seqlens=bounds)
    for wrong in ([1, 4], [0, 4 * size + 1], [0, 3, 2], []):
        with pytest.raises(ValueError, match="cu_seqlens"):
            ring_attention(*[tokens] * 3, mesh=mesh, cu_seqlens=torch.tensor(wrong).long())
    with pytest.raises(ValueError, match="no step over 3"):
        ring_attention(*[tokens] * 3, mesh=mesh, cu_seqlens=bounds, max_seqlen=3)
    eights, bounds = torch.randn(8, size, 8), torch.tensor([0, 3, 8 * size])
    with pytest.raises(NotImplementedError, match=r"dropout_p: .* 8 in each sequence"):
        ring_attention(*[eights] * 3, dropout_p=0.1, mesh=mesh, cu_seqlens=bounds)
    with pytest.raises(ValueError, match="relative_bias"):
        ring_attention(q, q, q, mesh=mesh, relative_bias=torch.zeros(7))
    with pytest.raises(ValueError, match="alibi_slopes"):
        ring_attention(q, q, q, mesh=mesh, alibi_slopes=torch.zeros(size + 1))
    table, index = torch.randn(size, 3), torch.zeros(4, 4 * size, dtype=torch.long)
    for wrong in (index[:3], index[0], torch.zeros(4 * size, 4 * size, dtype=torch.long)):
        if wrong.shape == index.shape:
            continue
        with pytest.raises(ValueError, match=r"relative_index: expected shape \(4, "):
            ring_attention(q, q, q, mesh=mesh, relative_bias=table, relative_index=wrong)
    with pytest.raises(ValueError, match=r"relative_index: expected .* in \[0, 2\]"):
        ring_attention(q, q, q, mesh=mesh, relative_bias=table, relative_index=index + 3)
    with pytest.raises(ValueError, match="relative_index: expected None without"):
        ring_attention(q, q, q, mesh=mesh, relative_index=index)
    with pytest.raises(ValueError, match="key_bias: expected None without relative_index"):
        ring_attention(q, q, q, mesh=mesh, key_bias=torch.zeros(1, size, 4, 3))
    with pytest.raises(ValueError, match="query_bias: expected shape"):
        ring_attention(
            q, q, q, mesh=mesh, query_bias=torch.zeros(1, size, 3, 3), relative_index=index
        )
    with pytest.raises(ValueError, match="softcap"):
        ring_attention(q, q, q, mesh=mesh, softcap=0.0)
    with pytest.raises(ValueError, match="method"):
        ring_attention(q, q, q, mesh=mesh, method="tree")
    with pytest.raises(ValueError, match="query: expected a number of heads"):
        ring_attention(q[:, :1], q[:, :1], q[:, :1], mesh=mesh, method="all_to_all")
    with pytest.raises(ValueError, match="attn_mask: expected a shape broadcastable"):
        ring_attention(q, q, q, torch.zeros(4, 4), mesh=mesh)
    with pytest.raises(ValueError, match="key_lengths: expected lengths in"):
        ring_attention(q, q, q, mesh=mesh, key_lengths=torch.tensor([4 * size + 1]))
    with pytest.raises(ValueError, match="even length"):
        ring_attention(q[:, :, :3], q[:, :, :3], q[:, :, :3], mesh=mesh, balanced=True)
    with pytest.raises(ValueError, match="window"):
        ring_attention(q, q, q, mesh=mesh, window=-1)
    with pytest.raises(TypeError, match="mesh"):
        ring_attention(q, q, q, mesh=None)
    with pytest.raises(TypeError, match="is_causal"):
        ring_attention(q, q, q, mesh=mesh, is_causal=1)
