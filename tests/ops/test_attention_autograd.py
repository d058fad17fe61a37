"""Attention under torch's transforms: autograd, torch.func, vmap, compile, export, autocast."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_cases import normal
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalVariant
from torch_checks import (
    assert_same_results,
    check_checkpoint,
    check_compile,
    check_fakes,
    check_forward_mode,
    check_one_graph,
    check_vmap,
    check_vmap_randomness,
    seeded,
)

import trifuse
from trifuse import backends

attention = trifuse.scaled_dot_product_attention

B, H, Lq, Lk, E, Ev = 2, 2, 3, 4, 3, 2
CU_Q, CU_K = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 3, 4, 4])


def inputs(dtype: torch.dtype = torch.float64, Hkv: int = H) -> list[Tensor]:
    shapes = ((B, H, Lq, E), (B, Hkv, Lk, E), (B, Hkv, Lk, Ev))
    return [normal(*s, seed=i, dtype=dtype).requires_grad_() for i, s in enumerate(shapes)]


def packed_inputs() -> list[Tensor]:
    shapes = ((6, H, E), (5, H, E), (5, H, Ev))
    return [normal(*s, seed=i, dtype=torch.float64).requires_grad_() for i, s in enumerate(shapes)]


def float_mask(*shape: int) -> Tensor:
    mask = normal(*shape, seed=8, dtype=torch.float64)
    return mask.masked_fill(mask > 1, float("-inf"))


def with_mask_of(*shape: int) -> tuple[Callable[..., Any], list[Tensor]]:
    """Returns a call and its arguments. The mask's -inf entries are fixed; the others are given."""
    mask = float_mask(*shape)

    def call(query: Tensor, key: Tensor, value: Tensor, finite: Tensor) -> Any:
        bias = finite.masked_fill(mask.isinf(), float("-inf"))
        return attention(query, key, value, bias, return_lse=True)

    return call, [*inputs(), mask.masked_fill(mask.isinf(), 0).requires_grad_()]


def plain(**options: Any) -> tuple[Callable[..., Any], list[Tensor]]:
    Hkv = 1 if options.get("enable_gqa") else H
    return functools.partial(attention, **options), inputs(Hkv=Hkv)


def packed(**options: Any) -> tuple[Callable[..., Any], list[Tensor]]:
    def call(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Any:
        return trifuse.varlen_attention(
            query, key, value, CU_Q, CU_K, return_lse=True, **options, **more
        )

    return call, packed_inputs()


def with_sinks(function: Callable[..., Any], **options: Any) -> Any:
    """Returns a call and its arguments, the sinks last; of either sign, so that both ends occur."""
    call, args = function(**options)
    sinks = (3 * normal(H, seed=9, dtype=torch.float64)).requires_grad_()
    return lambda *a: call(*a[:-1], sinks=a[-1]), [*args, sinks]


def with_table(
    function: Callable[..., Any], *shape: int, **options: Any
) -> tuple[Callable[..., Any], list[Tensor]]:
    """Returns a call and its arguments, a relative bias last, whose -inf entries are fixed."""
    call, args = function(**options)
    table = float_mask(*shape)

    def biased(*a: Tensor) -> Any:
        return call(*a[:-1], relative_bias=a[-1].masked_fill(table.isinf(), float("-inf")))

    return biased, [*args, table.masked_fill(table.isinf(), 0).requires_grad_()]


def with_index(
    function: Callable[..., Any], leading: tuple[int, ...], by_distance: bool, **options: Any
) -> tuple[Callable[..., Any], list[Tensor]]:
    """Returns a call and its arguments, three tables of four columns last.

    Args:
        leading: the first dimensions of the relative bias.
    """
    call, args = function(**options)
    if function is plain:
        lengths, shapes = (Lq, Lk), ((B, H, Lq), (B, H, Lk))
    else:
        lengths, shapes = tuple(x.shape[0] for x in args[:2]), tuple(x.shape[:2] for x in args[:2])
    shape = (sum(lengths) - 1,) if by_distance else lengths
    index = torch.randint(4, shape, generator=torch.Generator().manual_seed(7))
    names = ("relative_bias", "query_bias", "key_bias")
    tables = [
        normal(*lead, 4, seed=8 + i, dtype=torch.float64).requires_grad_()
        for i, lead in enumerate((leading, *shapes))
    ]

    def biased(*a: Tensor) -> Any:
        return call(*a[:-3], **dict(zip(names, a[-3:], strict=True)), relative_index=index)

    return biased, [*args, *tables]


def with_slopes(**options: Any) -> tuple[Callable[..., Any], list[Tensor]]:
    call, args = plain(**options)
    slopes = normal(B, H, seed=9, dtype=torch.float64).abs().requires_grad_()
    return lambda *a: call(*a[:-1], alibi_slopes=a[-1]), [*args, slopes]


def finite_rows(call: Callable[..., Any]) -> Callable[..., Any]:
    """Zeroes the logsumexps of rows without a key: -inf has no derivative to compare."""

    def wrapped(*args: Tensor) -> Any:
        out = call(*args)
        if isinstance(out, Tensor):
            return out
        return out[0], out[1].masked_fill(out[1].isinf(), 0)

    return wrapped


DIFFERENTIABLE: dict[str, Callable[[], tuple[Callable[..., Any], list[Tensor]]]] = {
    "plain": plain,
    "lse": lambda: plain(return_lse=True),
    "causal": lambda: plain(is_causal=True, return_lse=True),
    "lower right": lambda: plain(is_causal=CausalVariant.LOWER_RIGHT, scale=-0.7),
    "window": lambda: plain(window=(1, 0), return_lse=True),
    "window on another diagonal": lambda: plain(window=(1, 0), diagonal=2, return_lse=True),
    "a diagonal each": lambda: plain(
        is_causal=True, diagonal=torch.tensor([1, -1]), enable_gqa=True, return_lse=True
    ),
    "gqa": lambda: plain(enable_gqa=True, return_lse=True),
    "lengths": lambda: plain(key_lengths=torch.tensor([3, 0]), return_lse=True),
    "bool mask": lambda: plain(attn_mask=float_mask(B, 1, Lq, Lk) > 0, return_lse=True),
    "float mask": lambda: with_mask_of(B, H, Lq, Lk),
    "float mask for all": lambda: with_mask_of(1, 1, Lq, Lk),
    "float mask of keys": lambda: with_mask_of(B, 1, 1, Lk),
    "float mask of rows": lambda: with_mask_of(1, H, Lq, 1),
    "dropout": lambda: plain(dropout_p=0.4, return_lse=True),
    "softcap": lambda: plain(softcap=0.8, is_causal=True, return_lse=True),
    "packed": packed,
    "packed causal": lambda: packed(is_causal=True),
    "packed, a diagonal each": lambda: packed(
        window=1, diagonal=torch.tensor([1, 0, -1]), alibi_slopes=torch.tensor([0.5, 0.1]).double()
    ),
    "packed dropout": lambda: packed(dropout_p=0.4, softcap=0.8),
    "sinks": lambda: with_sinks(plain, return_lse=True),
    "sinks, output alone": lambda: with_sinks(plain, enable_gqa=True, is_causal=True),
    "sinks, lengths, dropout": lambda: with_sinks(
        plain, key_lengths=torch.tensor([3, 0]), dropout_p=0.4, return_lse=True
    ),
    "packed sinks": lambda: with_sinks(packed, softcap=0.8, window=1),
    "relative bias": lambda: with_table(plain, B, H, Lq + Lk - 1, return_lse=True),
    "relative bias for all, mask, dropout": lambda: with_table(
        plain, 1, 1, Lq + Lk - 1, attn_mask=float_mask(B, 1, Lq, Lk) > 0, dropout_p=0.4
    ),
    "relative bias, softcap": lambda: with_table(
        plain, 1, H, Lq + Lk - 1, softcap=0.8, is_causal=CausalVariant.LOWER_RIGHT
    ),
    "packed relative bias": lambda: with_table(packed, 1, H, 10),
    "packed relative bias, lower right": lambda: with_table(
        packed, 3, 1, 10, is_causal=CausalVariant.LOWER_RIGHT
    ),
    "tables": lambda: with_index(plain, (1, H), False, return_lse=True),
    "tables by distance, mask, dropout": lambda: with_index(
        plain, (B, 1), True, attn_mask=float_mask(B, 1, Lq, Lk) > 0, dropout_p=0.4
    ),
    "tables, softcap": lambda: with_index(
        plain, (H,), True, softcap=0.8, is_causal=CausalVariant.LOWER_RIGHT
    ),
    "packed tables": lambda: with_index(packed, (3, 1), False, is_causal=True),
    "packed tables by distance": lambda: with_index(
        packed, (1, H), True, is_causal=CausalVariant.LOWER_RIGHT
    ),
    "slopes": lambda: with_slopes(is_causal=True, return_lse=True),
    "slopes, a diagonal each": lambda: with_slopes(diagonal=torch.tensor([1, -2]), window=2),
}


@pytest.mark.parametrize("what", DIFFERENTIABLE)
def test_gradcheck(backend, what):
    call, args = DIFFERENTIABLE[what]()
    # The slow mode checks every element of every derivative, the fast mode random sums of them.
    slow = ("lse", "causal", "float mask", "packed dropout", "sinks", "sinks, lengths, dropout")
    slow = (*slow, "relative bias", "packed relative bias, lower right")
    torch.manual_seed(0)
    torch.autograd.gradcheck(
        finite_rows(seeded(call)), args, check_batched_grad=True, fast_mode=what not in slow
    )


@pytest.mark.parametrize("what", DIFFERENTIABLE)
@pytest.mark.covering(1)
def test_gradgradcheck(backend, what):
    call, args = DIFFERENTIABLE[what]()
    call = finite_rows(seeded(call))
    torch.manual_seed(0)
    torch.autograd.gradgradcheck(call, args, gen_non_contig_grad_outputs=True, fast_mode=True)


@pytest.mark.parametrize("return_lse", [False, True])
def test_double_backward_is_the_math_path_s(backend, return_lse):
    """A gradient penalty, as in training."""

    def penalty(function: Callable[..., Any]) -> tuple[Tensor, ...]:
        args = [*inputs(), float_mask(1, H, Lq, Lk).clamp(-5).requires_grad_()]
        first = torch.autograd.grad(function(*args), args, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), args)

    def ours(*args: Tensor) -> Tensor:
        if not return_lse:
            return attention(*args).sin().sum()
        out, lse = attention(*args, return_lse=True)
        return out.sin().sum() + lse.cos().sum()

    def theirs(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        scores = query @ key.mT / E**0.5 + bias
        out = scores.softmax(-1) @ value
        return out.sin().sum() + (scores.logsumexp(-1).cos().sum() if return_lse else 0)

    for actual, expected in zip(penalty(ours), penalty(theirs), strict=True):
        torch.testing.assert_close(actual, expected)


def test_third_derivatives(backend):
    query, key, value = inputs()

    def third(function: Callable[..., Tensor]) -> Tensor:
        g = function(query, key, value).sin().sum()
        for _ in range(3):
            (g,) = torch.autograd.grad(g.sum(), query, create_graph=True)
        return g

    with sdpa_kernel(SDPBackend.MATH):
        expected = third(F.scaled_dot_product_attention)
    torch.testing.assert_close(third(attention), expected)


def test_backward_keeps_its_backend(backend):
    """The forward's backend runs the backward, even if another one is selected by then."""
    args = inputs()
    out = attention(*args)
    other = "eager" if backend == "cpp" else "auto"
    with trifuse.backend(other), torch.profiler.profile() as profile:
        out.sum().backward()
    ran = {event.key for event in profile.key_averages() if event.key.startswith("trifuse::")}
    assert ran == {"trifuse::attention_backward"}
    assert out.grad_fn is not None


def test_checkpointing_drops_the_same_weights_again(backend):
    check_checkpoint(lambda *args: attention(*args, dropout_p=0.5).sin(), inputs())


def test_inputs_changed_in_place_are_noticed(backend):
    args = inputs()
    query = args[0].clone()
    out = attention(query, *args[1:])
    query.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# torch.func -------------------------------------------------------------------------------------


def test_func_derivatives(backend):
    args = [x.detach() for x in inputs()]
    with sdpa_kernel(SDPBackend.MATH):
        theirs = F.scaled_dot_product_attention
        for transform in (
            lambda f: torch.func.grad(lambda *a: f(*a).sin().sum(), argnums=(0, 1, 2)),
            lambda f: torch.func.jacrev(f, argnums=(0, 1, 2)),
            lambda f: lambda *a: torch.func.vjp(f, *a)[1](torch.ones(B, H, Lq, Ev).double()),
            lambda f: torch.func.jacrev(torch.func.jacrev(f, argnums=1), argnums=2),
        ):
            actual, expected = transform(attention)(*args), transform(theirs)(*args)
            torch.testing.assert_close(actual, expected)


def test_func_derivative_of_the_mask(backend):
    query, key, value = (x.detach() for x in inputs())
    mask = float_mask(1, H, 1, Lk).clamp(-5)

    def loss(function: Callable[..., Tensor], bias: Tensor) -> Tensor:
        return function(query, key, value, bias).sin().sum()

    actual = torch.func.grad(functools.partial(loss, attention))(mask)
    with sdpa_kernel(SDPBackend.MATH):
        theirs = F.scaled_dot_product_attention
        expected = torch.func.grad(functools.partial(loss, theirs))(mask)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("what", DIFFERENTIABLE)
@pytest.mark.covering(1)
def test_forward_mode(backend, what):
    call, args = DIFFERENTIABLE[what]()
    check_forward_mode(finite_rows(seeded(call)), args, draws="dropout" in what)


# vmap -------------------------------------------------------------------------------------------

N = 3


def batched(x: Tensor, dim: int, seed: int = 20) -> Tensor:
    """Returns N different tensors like ``x``, stacked at ``dim``."""
    shape = list(x.shape)
    shape.insert(dim, N)
    return normal(*shape, seed=seed, dtype=x.dtype)


@pytest.mark.parametrize(
    "in_dims",
    [(0, 0, 0), (1, 2, 0), (0, None, None), (None, 0, 0), (None, None, 1), (-1, 0, None)],
    ids=str,
)
@pytest.mark.parametrize("kind", ["no", "bool", "float", "batched float", "batched bool"])
@pytest.mark.covering
def test_vmap(backend, in_dims, kind):
    """Output, logsumexp and every gradient, with each argument batched or shared."""
    args = [
        x.detach() if d is None else batched(x.detach(), d if d >= 0 else x.dim(), seed=20 + i)
        for i, (x, d) in enumerate(zip(inputs(), in_dims, strict=True))
    ]
    mask, mask_dim = None, None
    if kind != "no":
        mask = float_mask(1, H, 1, Lk)
        if kind.startswith("batched"):
            mask, mask_dim = batched(mask, 1), 1
        mask = mask > 0 if kind.endswith("bool") else mask

    def call(*a: Tensor) -> tuple[Tensor, Tensor]:
        return attention(*a, return_lse=True, is_causal=True)

    def gradients(*a: Tensor) -> tuple[Tensor, ...]:
        def loss(*b: Tensor) -> Tensor:
            out, lse = call(*b)
            return out.sin().sum() + lse.masked_fill(lse.isinf(), 0).cos().sum()

        floating = tuple(i for i, x in enumerate(a) if x is not None and x.is_floating_point())
        return torch.func.grad(loss, argnums=floating)(*a)

    arguments, dims = (*args, mask), (*in_dims, mask_dim)
    for function in (call, gradients):
        check_vmap(function, dims, arguments)


def test_vmap_of_lengths_and_packed(backend):
    query, key, value = (batched(x.detach(), 0, seed=i) for i, x in enumerate(inputs()))
    lengths = torch.tensor([[1, 4], [0, 2], [3, 3]])
    actual = torch.vmap(lambda q, k, v, n: attention(q, k, v, key_lengths=n))(
        query, key, value, lengths
    )
    for n in range(N):
        expected = attention(query[n], key[n], value[n], key_lengths=lengths[n])
        torch.testing.assert_close(actual[n], expected)

    args = [batched(x.detach(), 1, seed=i) for i, x in enumerate(packed_inputs())]

    def loss(*a: Tensor) -> Tensor:
        return trifuse.varlen_attention(*a, CU_Q, CU_K).sin().sum()

    grads = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)), in_dims=1)(*args)
    for n in range(N):
        expected = torch.func.grad(loss, argnums=(0, 1, 2))(*(x[:, n] for x in args))
        torch.testing.assert_close(tuple(g[n] for g in grads), expected)


@pytest.mark.parametrize("dims", [(0, 0), (0, None), (None, 1)], ids=str)
def test_vmap_of_diagonals(backend, dims):
    query, key, value = (x.detach() for x in inputs())
    query = query if dims[0] is None else batched(query, dims[0])
    offsets = torch.tensor([[1, -1, 0], [2, 0, 1]])  # (B, N)
    offsets = offsets[:, 0] if dims[1] is None else offsets.movedim(1, dims[1])

    def call(q: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        return attention(q, key, value, is_causal=True, diagonal=n, return_lse=True)

    def gradients(q: Tensor, n: Tensor) -> tuple[Tensor]:
        return torch.func.grad(lambda x: call(x[0], n)[0].sin().sum())((q,))

    for function in (call, gradients):
        check_vmap(function, dims, (query, offsets))


@pytest.mark.parametrize("dims", [(0, 0), (0, None), (None, 1)], ids=str)
def test_vmap_of_sinks(backend, dims):
    query, key, value = (x.detach() for x in inputs())
    query = query if dims[0] is None else batched(query, dims[0])
    sinks = normal(H, seed=9, dtype=torch.float64)
    sinks = sinks if dims[1] is None else batched(sinks, dims[1])

    def call(q: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return attention(q, key, value, is_causal=True, sinks=s, return_lse=True)

    def gradients(q: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        def loss(*a: Tensor) -> Tensor:
            out, lse = call(*a)
            return out.sin().sum() + lse.cos().sum()

        return torch.func.grad(loss, argnums=(0, 1))(q, s)

    for function in (call, gradients):
        check_vmap(function, dims, (query, sinks))


@pytest.mark.parametrize("dims", [(0, 0), (0, None), (None, 1)], ids=str)
@pytest.mark.parametrize("leading", [(1, H), (B, 1)], ids=["shared", "of each sequence"])
def test_vmap_of_a_relative_bias(backend, dims, leading):
    query, key, value = (x.detach() for x in inputs())
    query = query if dims[0] is None else batched(query, dims[0])
    table = float_mask(*leading, Lq + Lk - 1)
    table = table if dims[1] is None else batched(table, dims[1])

    def call(q: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        return attention(q, key, value, is_causal=True, relative_bias=t, return_lse=True)

    def gradients(q: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        def loss(*a: Tensor) -> Tensor:
            out, lse = call(*a)
            return out.sin().sum() + lse.masked_fill(lse.isinf(), 0).cos().sum()

        return torch.func.grad(loss, argnums=(0, 1))(q, t)

    for function in (call, gradients):
        check_vmap(function, dims, (query, table))


@pytest.mark.parametrize("dims", [(0, 0, None), (0, None, None), (0, 1, 0)], ids=str)
def test_vmap_of_tables(backend, dims):
    """An index of each sample's own too."""
    query, key, value = (x.detach() for x in inputs())
    wide = {"dtype": torch.float64}
    given = [query, normal(B, H, Lq, 4, **wide)]
    given = [x if dim is None else batched(x, dim) for x, dim in zip(given, dims[:2], strict=True)]
    given.append(torch.randint(4, (Lq, Lk) if dims[2] is None else (N, Lq, Lk)))
    key_bias, shared = normal(B, H, Lk, 4, seed=3, **wide), normal(H, 4, seed=4, **wide)

    def call(q: Tensor, t: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        tables = {"relative_bias": shared, "query_bias": t, "key_bias": key_bias}
        return attention(q, key, value, relative_index=index, return_lse=True, **tables)

    def gradients(q: Tensor, t: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        return torch.func.grad(lambda *a: call(*a, index)[0].sin().sum(), argnums=(0, 1))(q, t)

    for function in (call, gradients):
        check_vmap(function, dims, given)


def test_vmap_twice(backend):
    query = normal(4, N, B, H, Lq, E)
    key = normal(N, B, H, Lk, E)
    value = normal(4, B, H, Lk, Ev)
    inner = torch.vmap(attention, in_dims=(0, 0, None))
    actual = torch.vmap(inner, in_dims=(0, None, 0))(query, key, value)
    for i in range(4):
        for n in range(N):
            torch.testing.assert_close(actual[i, n], attention(query[i, n], key[n], value[i]))


def test_per_sample_gradients_of_a_model(backend):
    """The purpose of vmap(grad): one gradient of the weights per sample."""
    torch.manual_seed(0)
    project = nn.Linear(E, 3 * E).double()
    weights = dict(project.named_parameters())
    samples = normal(5, Lq, E, seed=30, dtype=torch.float64)

    def loss(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
        q, k, v = torch.func.functional_call(project, parameters, (sample,)).chunk(3, -1)
        return attention(q, k, v, is_causal=True).square().sum()

    actual = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, samples)
    for n, sample in enumerate(samples):
        expected = torch.func.grad(loss)(weights, sample)
        torch.testing.assert_close({k: g[n] for k, g in actual.items()}, expected)


def test_vmap_randomness(backend):
    """Dropout draws as torch's random functions do: one seed for all samples, or one for each."""
    x = torch.ones(1, 1, 16, 4)
    samples = x.expand(N, *x.shape)
    eye = torch.eye(16)[None, None]

    def call(q: Tensor) -> Tensor:
        return attention(q, x, eye, dropout_p=0.5)

    check_vmap_randomness(call, samples)
    # A backward drops what its forward dropped.
    torch.manual_seed(3)
    grad = torch.func.grad(lambda v: attention(x, x, v, dropout_p=0.5).sum())
    grads = torch.vmap(grad, randomness="different")(eye.expand(N, 1, 1, 16, 16))
    torch.manual_seed(3)
    outs = torch.vmap(lambda v: attention(x, x, v, dropout_p=0.5), randomness="different")(
        eye.expand(N, 1, 1, 16, 16)
    )
    torch.testing.assert_close(grads[..., 0], outs.sum(-2))


# The operators themselves -----------------------------------------------------------------------


def op_arguments() -> dict[str, tuple[Any, ...]]:
    """Returns arguments of the forward op by name: 13 tensors, then options."""
    q, k, v = (x.detach().float() for x in inputs())
    pq, pk, pv = (x.detach().float().transpose(0, 1)[None] for x in packed_inputs())
    seed, n = torch.tensor([99]), torch.tensor([3, 0])
    mask, keep = float_mask(1, H, 1, Lk).float(), float_mask(B, 1, Lq, Lk) > 0
    table, packed_table = float_mask(B, H, Lq + Lk - 1).float(), float_mask(1, H, 10).float()
    index, by_distance = torch.randint(3, (Lq, Lk)), torch.randint(3, (Lq + Lk - 1,)).int()
    tables = (*(normal(*lead, 3, seed=4) for lead in ((1, H), (B, H, Lq), (B, H, Lk))), index)
    rows = (normal(1, H, pq.shape[2], 3), normal(1, H, pk.shape[2], 3), torch.randint(3, (6, 5)))
    options = (Lq, Lk, None, None, None, None, False, 0.0)
    banded = (Lq, Lk, 0.3, None, 1, 0, True, 0.0)
    offsets = torch.tensor([1, -2])
    heads_inside = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    return {
        "plain": (q, k, v, *(None,) * 10, *options),
        "transposed": (*heads_inside, *(None,) * 10, *options),
        "mask": (q, k, v, mask, *(None,) * 9, *options),
        "bool mask, lengths": (q, k, v, keep, *(None,) * 4, n, *(None,) * 4, *options),
        "dropout": (q, k, v, *(None,) * 9, seed, *options[:-1], 0.5),
        "band": (q, k, v, *(None,) * 10, *banded),
        "diagonals": (q, k, v, *(None,) * 6, offsets, *(None,) * 3, *banded[:6], False, 0.0),
        "negative bound": (q, k, v, *(None,) * 10, *options[:4], 3, -1, False, 0.0),
        "softcap": (q, k, v, mask, *(None,) * 9, Lq, Lk, None, 2.0, *options[4:]),
        "packed": (pq, pk, pv, *(None,) * 7, CU_Q, CU_K, None, 6, 5, *options[2:]),
        "16 bits": (q.half(), k.half(), v.half(), mask, *(None,) * 9, *options),
        "relative bias": (q, k, v, mask, table[:1], *(None,) * 3, n, *(None,) * 4, *options),
        "tables": (q, k, v, mask, *tables, *(None,) * 5, *options),
        "one table, by distance": (
            *(q, k, v, None, None, tables[1], None, by_distance, n, *(None,) * 4),
            *banded,
        ),
        "packed tables": (
            *(pq, pk, pv, None, tables[0][:1], *rows, None, None, CU_Q, CU_K, None),
            *(6, 5, None, None, None, 0, True, 0.0),
        ),
        "packed relative bias": (
            *(pq, pk, pv, None, packed_table, *(None,) * 5, CU_Q, CU_K, None),
            *(6, 5, None, None, None, 0, True, 0.0),
        ),
        "packed diagonals": (
            *(pq, pk, pv, *(None,) * 6, torch.tensor([1, 0, -1]).int(), CU_Q, CU_K, None),
            *(6, 5, None, None, None, 0, False, 0.0),
        ),
        "relative bias in 16 bits": (
            *(q.half(), k.half(), v.half(), None, table.half(), *(None,) * 8),
            *options,
        ),
    }


@pytest.mark.parametrize("what", op_arguments())
@pytest.mark.covering(1)
def test_opcheck(backend, what):
    args = op_arguments()[what]
    forward = getattr(torch.ops.trifuse.attention_forward, backend)
    backward = getattr(torch.ops.trifuse.attention_backward, backend)
    torch.library.opcheck(forward, args)
    out, lse = forward(*args)
    upstream = (torch.ones_like(out), torch.ones_like(lse))
    for wanted in {(False,) * 4, needs_biases(args)}:
        needs_grad = [True, True, True, *wanted]
        for grad_lse in (None, upstream[1]):
            torch.library.opcheck(
                backward, (upstream[0], grad_lse, *args[:13], out, lse, *args[13:], needs_grad)
            )


def needs_biases(args: Any) -> tuple[bool, ...]:
    """Returns whether the mask and the tables of an op's arguments can have a gradient."""
    return tuple(bias is not None and bias.is_floating_point() for bias in args[3:7])


@pytest.mark.parametrize("what", op_arguments())
@pytest.mark.parametrize("mode", ["fake", "meta"])
def test_fakes_have_the_real_shapes_and_strides(backend, what, mode):
    """Inductor lays out memory by the strides of the fakes."""
    args = op_arguments()[what]
    check_fakes(run_both(backend, args), functools.partial(run_both, backend), args, mode)


def run_both(backend: str, args: Any) -> list[Tensor]:
    out, lse = getattr(torch.ops.trifuse.attention_forward, backend)(*args)
    grads = getattr(torch.ops.trifuse.attention_backward, backend)(
        out, lse, *args[:13], out, lse, *args[13:], [True, True, True, *needs_biases(args)]
    )
    return [out, lse, *grads]


# Tracing ----------------------------------------------------------------------------------------

TRACED: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "lower right": {"is_causal": CausalVariant.LOWER_RIGHT, "window": 2},
    "lengths": {"key_lengths": torch.tensor([3, 0])},
    "diagonal": {"is_causal": True, "diagonal": 1, "window": 1},
    "diagonals": {
        "window": 1,
        "diagonal": torch.tensor([2, -1]),
        "alibi_slopes": normal(H, seed=9),
    },
    "mask": {"attn_mask": float_mask(1, H, Lq, Lk).float()},
    "dropout": {"dropout_p": 0.3},
    "lse": {"return_lse": True},
    "sinks": {"sinks": normal(H, seed=9), "key_lengths": torch.tensor([3, 0])},
    "relative bias": {"relative_bias": float_mask(1, H, Lq + Lk - 1).float(), "is_causal": True},
    "slopes": {"alibi_slopes": normal(B, H, seed=9)},
    "tables": {
        "relative_bias": normal(H, 4, seed=9),
        "query_bias": normal(B, H, Lq, 4, seed=9),
        "key_bias": normal(B, H, Lk, 4, seed=8),
        "relative_index": torch.randint(4, (Lq, Lk)),
    },
}


def model(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Attention between other operations to compile, with heads split and joined as in models."""
    split = [x.unflatten(-1, (H, -1)).transpose(1, 2) for x in (query * 2, key.sin(), value)]
    out = attention(*split, **options)
    if isinstance(out, tuple):
        out = out[0] + out[1].masked_fill(out[1].isinf(), 0)[..., None]
    return out.transpose(1, 2).flatten(2).cos()


def model_inputs(batch: int = B, Lq: int = Lq, Lk: int = Lk) -> list[Tensor]:
    shapes = ((batch, Lq, H * E), (batch, Lk, H * E), (batch, Lk, H * Ev))
    return [normal(*s, seed=i).requires_grad_() for i, s in enumerate(shapes)]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("what", TRACED)
@pytest.mark.covering(1)
def test_compile(backend, what):
    function = functools.partial(model, **TRACED[what])
    check_compile(function, model_inputs)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compile_packed(backend):
    def function(query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
        return trifuse.varlen_attention(query.sin(), key, value, cu_q, cu_k).cos()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    actual, expected = (lambda *args, f=f: f(*args, CU_Q, CU_K) for f in (compiled, function))
    assert_same_results(actual, expected, packed_inputs())


@pytest.mark.usefixtures("fresh_dynamo")
def test_compile_packed_with_lengths_known_when_it_runs(backend):
    """The longest sequence is read from a tensor inside the graph."""

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        longest = [cu.diff().max().item() for cu in (CU_Q, CU_K)]
        options = dict(zip(("max_seqlen_q", "max_seqlen_k"), longest, strict=True))
        return trifuse.varlen_attention(query.sin(), key, value, CU_Q, CU_K, **options).cos()

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        assert_same_results(compiled, function, packed_inputs())


def model_with_sinks(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
    return model(query, key, value, sinks=sinks, is_causal=True, return_lse=True)


def inputs_and_sinks(*sizes: int) -> list[Tensor]:
    return [*model_inputs(*sizes), normal(H, seed=9).requires_grad_()]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.covering(0)
def test_compile_sinks(backend):
    """With their gradient, in one graph for every batch and length."""
    check_compile(model_with_sinks, inputs_and_sinks)
    sizes = ((3, 5, 7), (8, 9, 11), (300, 10, 13))  # at most 1024 rows, and more
    check_one_graph(model_with_sinks, (inputs_and_sinks(*s) for s in sizes))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.covering(0)
def test_compile_dynamic_shapes(backend):
    """One graph serves every batch and length."""
    check_one_graph(model, (model_inputs(*s) for s in ((3, 5, 7), (8, 9, 11), (5, 10, 13))))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a compiler")
@pytest.mark.covering(0)
def test_compile_with_inductor(backend):
    """Forward and backward through generated code, which relies on the fakes' strides."""
    mask = float_mask(1, H, Lq, Lk).float()
    function = functools.partial(model, attn_mask=mask, return_lse=True)
    assert_same_results(torch.compile(function, fullgraph=True), function, model_inputs())


class Module(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
        return model(query, key, value, key_lengths=lengths, is_causal=True)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.covering(1)
def test_export(backend, strict):
    """With a dynamic batch and lengths. The exported program calls the op by name."""
    args = (*(x.detach() for x in model_inputs()), torch.tensor([3, 1]))
    batch, q, k = (torch.export.Dim(name, min=2, max=64) for name in ("batch", "q", "k"))
    shapes = ({0: batch, 1: q}, {0: batch, 1: k}, {0: batch, 1: k}, {0: batch})
    program = torch.export.export(Module(), args, dynamic_shapes=shapes, strict=strict)
    ops = {str(node.target) for node in program.graph.nodes}
    assert f"trifuse.attention_forward.{backend}" in ops
    more = (*(x.detach() for x in model_inputs(5, 8, 9)), torch.tensor([0, 1, 9, 4, 5]))
    for example in (args, more):
        torch.testing.assert_close(program.module()(*example), Module()(*example))


class ModuleWithSinks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(normal(H, seed=9))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
        return model(query, key, value, key_lengths=lengths, sinks=self.sinks)


def test_export_with_sinks(backend):
    module = ModuleWithSinks()
    args = (*(x.detach() for x in model_inputs()), torch.tensor([3, 1]))
    batch, q, k = (torch.export.Dim(name, min=2, max=640) for name in ("batch", "q", "k"))
    shapes = ({0: batch, 1: q}, {0: batch, 1: k}, {0: batch, 1: k}, {0: batch})
    program = torch.export.export(module, args, dynamic_shapes=shapes)
    more = (*(x.detach() for x in model_inputs(200, 8, 9)), torch.arange(200) % 10)
    exported = program.module()
    for example in (args, more):
        actual, expected = exported(*example), module(*example)
        torch.testing.assert_close(actual, expected)
        grads = (
            torch.autograd.grad(out.sum(), each.sinks)
            for out, each in ((actual, exported), (expected, module))
        )
        torch.testing.assert_close(*grads)


# Autocast ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(backend, dtype):
    """Computes in the autocast dtype, as in torch's attention; gradients have the inputs' dtype."""
    args = [x.detach().float().requires_grad_() for x in inputs()]
    mask = float_mask(1, H, Lq, Lk).float().requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        out, lse = attention(*args, mask, return_lse=True)
        assert F.scaled_dot_product_attention(*args).dtype == dtype
        half = attention(*args, mask.detach().half())
    assert (out.dtype, lse.dtype, half.dtype) == (dtype, torch.float32, dtype)
    grads = torch.autograd.grad(out.float().sum() + lse.exp().sum(), [*args, mask])
    assert all(g.dtype == torch.float32 for g in grads)
    narrow = [x.detach().to(dtype).requires_grad_() for x in args]
    expected, expected_lse = attention(*narrow, mask, return_lse=True)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    wanted = torch.autograd.grad(expected.float().sum() + expected_lse.exp().sum(), [*narrow, mask])
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, want.float(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_of_sinks(backend, dtype):
    """Sinks stay in float32, like a mask; in another 16-bit type they are cast."""
    args = [x.detach().float() for x in inputs()]
    narrow = [x.to(dtype) for x in args]
    sinks = normal(H, seed=9).requires_grad_()
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    with torch.autocast("cpu", dtype=dtype):
        out = attention(*args, sinks=sinks)
        cast = attention(*args, sinks=sinks.detach().to(other))
    assert out.dtype == dtype
    expected = attention(*narrow, sinks=sinks)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    wanted = attention(*narrow, sinks=sinks.detach().to(other).to(dtype))
    torch.testing.assert_close(cast, wanted, rtol=0, atol=0)
    grads = [torch.autograd.grad(o.float().sum(), sinks) for o in (out, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_autocast_does_not_reach_second_derivatives(backend):
    """The formula for them computes in float32, inside autocast and outside."""

    def penalty(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda q: torch.func.grad(lambda x: function(x).sum())(q).square().sum()

    query, key, value = (x.detach().bfloat16() for x in inputs())
    twice = torch.func.grad(penalty(lambda q: attention(q, key, value).float()))
    expected = twice(query)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = twice(query)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_autocast_leaves_float64_and_integers_alone(backend):
    with torch.autocast("cpu"):
        assert attention(*inputs()).dtype == torch.float64
        with pytest.raises(TypeError, match=r"query: expected float32.*; got torch.int64"):
            attention(*(x.long() for x in inputs()))


@pytest.mark.skipif(backends._C is None, reason="the C++ extension is not built")
def test_meta_tensors_are_served_by_the_formula():
    meta = [x.detach().to("meta").requires_grad_() for x in inputs()]
    out = attention(*meta)
    assert out.device.type == "meta"
    assert out.shape == (B, H, Lq, Ev)
    grads = torch.autograd.grad(out.sum(), meta)
    assert [g.shape for g in grads] == [x.shape for x in meta]
