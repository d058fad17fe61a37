"""Biases of relative positions as tables by distance: T5's, UMT5's, MPNet's, ALiBi."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from typing import Any

import pytest
import torch
from model_sizes import PADDED_SIZES, T5_SIZES
from numerics import FACTOR
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import trifuse
from trifuse import written_out
from trifuse.recipes.own_biases import DistanceBiased
from trifuse.written_out import DistanceBias, MaskedKeyBias, one_call
from trifuse.written_out.key_biases import fits_a_feature
from trifuse.written_out.parts import Form

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("torch_multiplies")

EXPERTS = {"num_sparse_encoder_layers": 0, "num_sparse_decoder_layers": 0}
GPT_LIKE = {"vocab_size": 97, "hidden_size": 32, "hidden_dropout": 0.0}
BLOOM_SIZES = GPT_LIKE | {"n_layer": 2, "n_head": 4}
MPT_SIZES = {"vocab_size": 97, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    "T5": T5_SIZES,
    "MT5": T5_SIZES,
    "UMT5": T5_SIZES,
    "LongT5": T5_SIZES | {"local_radius": 3},  # its encoder sees windows, by a bias of their own
    "SwitchTransformers": T5_SIZES | EXPERTS,  # it needs a matrix: its attention isn't ours
    "Bloom": BLOOM_SIZES,
    "Mpt": MPT_SIZES,
    "Falcon": GPT_LIKE | {"num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True},
    "MPNet": PADDED_SIZES | {"max_position_embeddings": 80},
}
L = 70  # of which the square is more than any tensor of the models has numbers
LENGTHS = torch.tensor([L, 40, 9])[:, None]
RIGHT = torch.arange(L) < LENGTHS
MASKS = {"padded right": RIGHT, "padded left": RIGHT.flip(1)}


def build(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**FAMILIES[name], **options)
    model = getattr(transformers, f"{name}Model")(config).eval()
    for part, weight in model.named_parameters():
        if "relative_attention_bias" in part:
            weight.data.normal_()  # so that it matters
    return model


def run(model: Any, keep: Tensor) -> Tensor:
    ids = torch.randint(5, 97, keep.shape, generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids, "attention_mask": keep.long()}
    if model.config.is_encoder_decoder:
        given |= {"decoder_input_ids": ids, "decoder_attention_mask": keep.long()}
        given |= {"use_cache": False}
    return model(**given)[0][keep]


def gradients(model: nn.Module, keep: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    out = run(model, keep)
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    for name, grad in wanted.items():
        size = float(grad.abs().max()) if "relative" in name else largest
        assert size > 0
        torch.testing.assert_close(got[name], grad, rtol=1e-5, atol=1e-5 * size, msg=name)


@pytest.mark.parametrize("unpad", [False, True], ids=["padded", "unpad"])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.covering
def test_results_and_gradients(name, kind, unpad):
    model, keep = build(name), MASKS[kind]
    wanted, grads = run(model, keep), gradients(model, keep)
    report = trifuse.fuse(model, unpad=unpad)
    torch.testing.assert_close(run(model, keep), wanted, rtol=1e-5, atol=1e-5)
    compare(gradients(model, keep), grads)
    report.revert()
    assert torch.equal(run(model, keep), wanted)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.device.type != "meta"]
        sizes = [each.untyped_storage().nbytes() // 4 for each in made]
        self.numel = max([self.numel, *sizes])
        return out


MASKED = ["MPNet", "Bloom", "Mpt", "Falcon"]
LIKE_T5 = ["T5", "MT5", "UMT5"]
if int(transformers.__version__.split(".")[0]) < 5:
    MASKED += LIKE_T5


@pytest.mark.parametrize("unpad", [False, True], ids=["padded", "unpad"])
@pytest.mark.parametrize("name", dict.fromkeys([*LIKE_T5, *MASKED]))
def test_no_matrix_is_made(name, unpad):
    """Forward and backward."""
    model = build(name)
    keep = torch.arange(L)[None] < L - 2
    ids = {name: p.untyped_storage().nbytes() // 4 for name, p in model.named_parameters()}
    assert max(ids.values()) < L * L
    with Largest() as before:
        gradients(model, keep)
    assert before.numel >= 4 * L * L  # heads
    trifuse.fuse(model, unpad=unpad)
    with Largest() as after:
        gradients(model, keep)
    # Some models make masks of all pairs, without heads; T5's decoder does in 4.57.
    assert after.numel < L * L or (name in MASKED and after.numel < 3 * L * L)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["T5", "UMT5"])
def test_checkpoints(name, reentrant):
    model = build(name, dropout_rate=0.0).train()
    wanted = gradients(model, RIGHT)
    trifuse.fuse(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    compare(gradients(model, RIGHT), wanted)


class Checkpointed(nn.Module):
    """A block in a reentrant checkpoint, a custom function that gets and returns the bias."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **options: Any) -> Any:
        block = functools.partial(self.block, **options)
        return checkpoint(block, *args, use_reentrant=True)


@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)], ids=str)
def test_checkpoints_around_blocks(which):
    models = [build("T5", dropout_rate=0.0).train() for _ in range(2)]
    trifuse.fuse(models[0])
    for model in models:
        for stack in (model.encoder, model.decoder):
            for at in which:
                stack.block[at] = Checkpointed(stack.block[at])
    ours, theirs = (gradients(model, RIGHT) for model in models)
    compare(ours, theirs)


@pytest.mark.parametrize("unpad", [False, True], ids=["padded", "unpad"])
@pytest.mark.usefixtures("one_process")
def test_fsdp2(unpad):
    """Each block is sharded by itself, and what it gets goes through a custom function."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = build("T5")
    wanted = gradients(model, RIGHT)
    trifuse.fuse(model, unpad=unpad)
    mesh = init_device_mesh("cpu", (1,))
    for stack in (model.encoder, model.decoder):
        for block in stack.block:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    compare({name: g.full_tensor() for name, g in gradients(model, RIGHT).items()}, wanted)


def test_double_backward_of_the_matrix():
    """The graph of a custom function's gradient can be differentiated again."""
    table = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, bias):
            return bias * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    def through(table: Tensor) -> Tensor:
        return Doubled.apply(DistanceBias.of(table, 4, 5, 2))

    assert torch.autograd.gradcheck(through, table)
    assert torch.autograd.gradgradcheck(through, table)


@pytest.mark.parametrize("name", ["T5", "UMT5", "MPNet"])
def test_other_uses_get_the_matrix(name):
    """The model's own code computes the same from a bias as before."""
    model = build(name)
    kinds = [type(module) for module in model.modules()]
    trifuse.fuse(model)
    twin = build(name)
    for ours, theirs in zip(model.modules(), twin.modules(), strict=True):
        if not isinstance(ours, DistanceBiased):
            continue
        if name == "MPNet":
            made, wanted = (
                each.compute_position_bias(torch.ones(2, 7, 3)) for each in (ours, theirs)
            )
        elif ours.has_relative_attention_bias:
            # The positions of the queries, as 4.57 passes them, or the first of them.
            positions = "cache_position" in inspect.signature(theirs.compute_bias).parameters
            past = {"cache_position": torch.arange(3, 7)} if positions else {"past_seen_tokens": 3}
            made, wanted = (each.compute_bias(4, 7, **past) for each in (ours, theirs))
        else:
            continue
        assert isinstance(made, DistanceBias)
        assert made.shape == wanted.shape
        assert torch.equal(made.cut(2, 7) + 0, wanted[:, :, :2])
        assert made.is_usable
        assert torch.equal(made * 1, wanted)
        assert torch.equal(made.exp(), wanted.exp())
        grads = []
        for each in (made * 1, wanted):
            twin.zero_grad()
            model.zero_grad()
            (each * torch.arange(each.numel()).view_as(each)).sum().backward()
            module = ours if each is not wanted else theirs
            grads.append(module.relative_attention_bias.weight.grad)
        torch.testing.assert_close(*grads)
        break
    else:
        pytest.fail("no module makes a table")
    assert kinds == [type(module) for module in twin.modules()]


def test_an_attention_replaced_in_a_class_that_was_read_before(monkeypatch):
    trifuse.fuse(build("T5"))
    model = build("T5")
    before = run(model, RIGHT)
    cls = type(model.encoder.block[0].layer[0].SelfAttention)
    forward = cls.forward

    @functools.wraps(forward)
    def doubled(*args: Any, **kwargs: Any) -> Any:
        out, *others = forward(*args, **kwargs)
        return (out * 2, *others)

    monkeypatch.setattr(cls, "forward", doubled)
    wanted = run(model, RIGHT)
    assert not torch.allclose(before, wanted, rtol=1e-2)
    trifuse.fuse(model)
    torch.testing.assert_close(run(model, RIGHT), wanted, rtol=1e-5, atol=1e-5)


def test_alibi_of_many_keys():
    """Falcon rounds it to bfloat16, so that it doesn't grow evenly over more than 256 keys."""
    model, keep = build("Falcon"), torch.arange(300)[None] >= torch.tensor([0, 20])[:, None]
    wanted, grads = run(model, keep), gradients(model, keep)
    trifuse.fuse(model)
    torch.testing.assert_close(run(model, keep), wanted, rtol=1e-5, atol=1e-5)
    with Largest() as largest:
        compare(gradients(model, keep), grads)
    assert largest.numel < 3 * 300 * 300  # a mask of all pairs for each sequence, without heads


@pytest.mark.parametrize("name", ["Falcon", "Bloom"])
def test_attention_weights_and_hidden_states_beside_alibi(name):
    model, keep = build(name, attn_implementation="eager"), RIGHT
    ids = torch.randint(5, 97, keep.shape, generator=torch.Generator().manual_seed(1))
    options = {"output_attentions": True, "output_hidden_states": True}
    wanted = model(ids, attention_mask=keep.long(), **options)
    trifuse.fuse(model)
    got = model(ids, attention_mask=keep.long(), **options)
    for kind in ("attentions", "hidden_states"):
        assert len(got[kind]) >= 2
        for mine, theirs in zip(got[kind], wanted[kind], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_layers_that_get_alibi_in_their_mask(reentrant):
    model = build("Falcon", attention_dropout=0.0).train()
    wanted = gradients(model, RIGHT)
    trifuse.fuse(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    compare(gradients(model, RIGHT), wanted)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *itertools.product(("even", "uneven", "with gradients"), (torch.float32, torch.bfloat16)),
        ("uneven beside a constant", torch.bfloat16),
        ("with gradients, filled", torch.float32),
    ],
)
def test_biases_of_keys(kind, dtype, monkeypatch):
    """A bias that grows evenly over the keys seen becomes a table, any other a feature of the keys.

    Neither makes a matrix for each head. A fill replaces biases, which then have no gradient: it
    takes a matrix.
    """
    L = 40
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, L, 8, generator=generator) for _ in range(3))
    slopes = torch.tensor([0.5, 0.25, -0.125])[:, None, None]
    bias = (slopes * torch.arange(L)).to(dtype).expand(2, 3, 1, L).clone()
    mask = torch.ones(2, 1, L, L, dtype=torch.bool).tril()
    mask[1, :, :, :4] = False
    bias[1, :, :, :4] = 7  # which nobody sees
    if kind == "uneven":
        bias[0, 0, 0, 5] += 2
    if kind == "uneven beside a constant":
        rises = torch.tensor([0, 2, 0, 1, 2.5, 0, 2, 0]).repeat(L // 8)
        bias = (100 + rises).to(dtype).expand(2, 3, 1, L)
    bias.requires_grad_(kind.startswith("with gradients"))
    term = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)

    def attend() -> Tensor:
        scores = query @ key.mT + bias
        if kind == "with gradients":
            return (scores + term).softmax(-1) @ value
        return scores.masked_fill(~mask, torch.finfo(torch.float32).min).softmax(-1) @ value

    tables: list[Tensor] = []
    served = one_call.scaled_dot_product_attention

    def spy(*args: Any, relative_bias: Tensor | None, **options: Any) -> Tensor:
        if relative_bias is not None:
            tables.append(relative_bias)
        return served(*args, relative_bias=relative_bias, **options)

    monkeypatch.setattr(one_call, "scaled_dot_product_attention", spy)
    wanted = attend()
    with trifuse.attention(), Largest() as largest:
        got = attend()
    torch.testing.assert_close(
        got, wanted, rtol=1e-4, atol=1e-4 if dtype == torch.float32 else 2e-2
    )
    assert (largest.numel < 2 * 3 * L * L) == ("filled" not in kind)
    assert len(tables) == (kind == "even")
    if bias.requires_grad:
        ours, theirs = (torch.autograd.grad(out.square().sum(), bias)[0] for out in (got, wanted))
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("offset", [-1e2, 1e3, 1e4])
@pytest.mark.parametrize("scale", [1 / 8, 1 / math.sqrt(80)], ids=["8", "sqrt80"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_biases_of_keys_obey_the_numerics_rule(offset, scale, dtype):
    """Large biases of keys, as a feature of theirs, cost scores no more bits than eagerly."""
    L, E = 128, 64
    lowest = torch.finfo(dtype).min
    term = torch.zeros(L, L, dtype=dtype).masked_fill(~torch.ones(L, L).tril().bool(), lowest)

    def attend(*args: Tensor) -> list[Tensor]:
        query, key, value, bias, grad_out = args
        scores = query @ key.mT * scale + bias + term.to(query.dtype)
        out = scores.softmax(-1) @ value
        return [out.detach(), *torch.autograd.grad(out, (query, key, value), grad_out)]

    errors: dict[str, Tensor] = {}
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        *inputs, grad_out = (torch.randn(1, 2, L, E, generator=generator).to(dtype) for _ in "qkvg")
        bias = (offset + torch.randn(1, 2, 1, L, generator=generator)).to(dtype)
        args = (*(x.requires_grad_() for x in inputs), bias, grad_out)
        exact = attend(*(x.detach().double().requires_grad_(x.requires_grad) for x in args))
        eager = attend(*args)
        with trifuse.attention(), Largest() as largest:
            ours = attend(*args)
        if dtype == torch.float32:
            assert largest.numel < 2 * L * L  # there was no matrix of every head
        for name, results in (("ours", ours), ("eager", eager)):
            off = [x.double() - y for x, y in zip(results, exact, strict=True)]
            each = [[x.abs().max(), x.square().mean().sqrt()] for x in off]
            errors[name] = errors.get(name, torch.zeros(4, 2)) + torch.tensor(each)
    assert (errors["ours"] <= FACTOR * errors["eager"]).all(), errors


def test_low_biases_of_keys_leave_them_out():
    """Biases so low that they leave keys out do so beside any others, and all alike if all are."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 2, 9, 8, generator=generator) for _ in "qkv")
    bias = torch.randn(2, 2, 1, 9, generator=generator) - 100
    bias[0, :, :, :4] = torch.finfo(torch.float32).min
    bias[1] = torch.finfo(torch.float32).min
    bias.requires_grad_()  # so that it becomes no table
    term = torch.zeros(9, 9)

    def attend() -> Tensor:
        return (query @ key.mT + bias + term).softmax(-1) @ value

    wanted = attend()
    with trifuse.attention():
        torch.testing.assert_close(attend(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("sizes", [(2, 5, 0), (2, 0, 5), (0, 5, 5)])
def test_no_biases_of_keys(sizes, gradient):
    """Attention runs without keys, queries or sequences too."""
    B, Lq, Lk = sizes
    query, key = torch.randn(B, 3, Lq, 8), torch.randn(B, 3, Lk, 8)
    bias = torch.randn(B, 3, 1, Lk, requires_grad=gradient)

    def attend() -> Tensor:
        return (query @ key.mT + bias + torch.zeros(Lq, Lk)).softmax(-1) @ key

    wanted = attend()
    with trifuse.attention():
        assert torch.equal(attend(), wanted)


@pytest.mark.parametrize("queries", [1, 24], ids=["a step", "whole"])
@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize("even", [True, False])
def test_shared_key_heads_are_not_copied(queries, shared, even):
    """Falcon's mask with biases of the keys serves fewer heads of keys than of queries."""
    B, H, Lk, E = 2, 4, 24, 40
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(B, H, queries, E, generator=generator)
    key, value = (torch.randn(B, shared, Lk, E, generator=generator) for _ in "kv")
    by_key = (torch.tensor([0.5, 0.25, -0.125, 1])[:, None, None] * torch.arange(Lk))[None]
    if not even:
        by_key = by_key + torch.randn(by_key.shape, generator=generator)
    by_key = by_key.expand(B, -1, -1, -1)
    least = torch.finfo(torch.float32).min
    mask = torch.zeros(B, 1, queries, Lk)
    mask.masked_fill_(torch.ones(queries, Lk).tril(Lk - queries) == 0, least)
    wanted = nn.functional.scaled_dot_product_attention(
        query, key, value, mask + by_key, enable_gqa=True
    )
    with Largest() as largest:
        deferred = MaskedKeyBias.of(by_key, mask, least)
        got = written_out.attend(query, key, value, deferred, enable_gqa=True)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    if queries == 1 or even:  # only a feature needs keys of each head
        assert largest.numel <= max(key.numel(), query.numel())


@pytest.mark.parametrize(
    ("E", "fits"), [(56, True), (64, False), (80, True), (128, False), (248, True), (256, False)]
)
def test_a_feature_that_widens_tiles_of_a_gpu(E, fits):
    with FakeTensorMode():
        shapes = (2, 3, 20, E), (2, 3, 20, E), (2, 3, 1, 20), (20, 20)
        query, key, by_key, mask = (torch.empty(shape, device="cuda") for shape in shapes)
        assert fits_a_feature(by_key, Form(query, key, 0.1, mask)) == fits
