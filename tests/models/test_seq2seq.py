"""models/seq2seq.py: what its attention and its models compute, and how they decode."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

import trifuse
from trifuse.models import seq2seq
from trifuse.models.decoding import Decoded, beam_search, greedy_search
from trifuse.models.seq2seq import (
    AdditiveAttention,
    Attention,
    DotAttention,
    MultiplicativeAttention,
    Seq2Seq,
    Seq2SeqConfig,
    additive_scores,
)
from trifuse.models.transformer import token_loss

VOCABULARY = 7
TINY = Seq2SeqConfig(
    source_vocab_size=11,
    target_vocab_size=VOCABULARY,
    embedding_dim=6,
    hidden_size=8,
    num_layers=2,
    dropout=0.0,
)
BOS, EOS = 1, 2
LENGTHS = (7, 3, 1, 5)


def seq2seq_model(**changes: Any) -> Seq2Seq:
    """A float64 model, perturbed so that biases matter and logits are far from uniform."""
    torch.manual_seed(0)
    model = Seq2Seq(dataclasses.replace(TINY, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5)
    return model.double().eval()


def attention_of(name: str, hidden_size: int = 8) -> Attention:
    return seq2seq_model(attention=name, hidden_size=hidden_size).attention


def tokens(*shape: int, vocabulary: int = VOCABULARY, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, shape, generator=generator)


def ragged(*lengths: int) -> tuple[Tensor, Tensor]:
    """A padded source and its mask."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return tokens(*mask.shape, vocabulary=11).masked_fill(~mask, 0), mask


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def assert_close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


ATTENTIONS = ("dot", "scaled_dot", "additive", "multiplicative")
attentions = pytest.mark.parametrize("name", ATTENTIONS)
models = pytest.mark.parametrize(
    "changes",
    [
        {"cell": "lstm", "attention": "dot"},
        {"cell": "lstm", "attention": "multiplicative", "bidirectional": True, "bias": True},
        {
            "cell": "lstm",
            "attention": "additive",
            "attention_order": "luong",
            "bidirectional": True,
            "input_feeding": True,
        },
        {"cell": "gru", "attention": "scaled_dot", "bidirectional": True},
        {"cell": "gru", "attention": "additive", "attention_order": "luong"},
        {"cell": "gru", "attention": "multiplicative", "input_feeding": True},
        {"cell": "gru", "attention": "additive", "bidirectional": True},
        {"cell": "lstm", "attention": "additive", "bidirectional": True, "bias": True},
        {"cell": "lstm", "attention": "dot", "attention_order": "bahdanau"},
        {"cell": "rnn", "attention": "multiplicative"},
        {"cell": "rnn", "attention": "additive", "bidirectional": True},
        {"cell": "gru", "attention": "none", "bidirectional": True, "bias": True},
        {"cell": "lstm", "attention": "none"},
    ],
    ids=lambda changes: " ".join(
        str(value if value is not True else key) for key, value in changes.items()
    ),
)


# Attention --------------------------------------------------------------------------------------


def formula(attention: Attention, query: Tensor, memory: Tensor) -> Tensor:
    """The score of one query (H,) and one encoder state (H,), as published."""
    if isinstance(attention, AdditiveAttention):
        inner = attention.query.weight @ query + attention.key.weight @ memory
        return attention.score.weight[0] @ inner.tanh()
    if isinstance(attention, MultiplicativeAttention):
        return query @ attention.key.weight @ memory
    assert isinstance(attention, DotAttention)
    return query @ memory * attention.scale


@attentions
def test_attention_is_its_formula(name):
    attention = attention_of(name)
    assert getattr(attention, "scale", 1) == (8**-0.5 if name == "scaled_dot" else 1)
    torch.manual_seed(1)
    query, memory = random(3, 4, 8), random(3, 5, 8)
    lengths = (5, 1, 3)
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    keys = attention.project(memory)
    contexts, none = attention(query, keys, memory, mask)
    again, weights = attention(query, keys, memory, mask, need_weights=True)
    assert none is None
    assert_close(contexts, again)
    for row, place in itertools.product(range(3), range(4)):
        real = memory[row, : lengths[row]]
        scores = torch.stack([formula(attention, query[row, place], state) for state in real])
        wanted = scores.exp() / scores.exp().sum()
        assert_close(weights[row, place, : lengths[row]], wanted)
        assert weights[row, place, lengths[row] :].count_nonzero() == 0
        assert_close(contexts[row, place], wanted @ real)
    everything = torch.ones_like(mask)
    for need_weights in (False, True):
        full = attention(query, keys, memory, None, need_weights)[0]
        assert_close(full, attention(query, keys, memory, everything, need_weights)[0])


@pytest.mark.parametrize("need_weights", [False, True])
@attentions
def test_attention_has_gradients(name, need_weights):
    attention = attention_of(name, hidden_size=4)
    torch.manual_seed(1)
    given = [random(2, 3, 4).requires_grad_(), random(2, 3, 4).requires_grad_()]
    parameters = [parameter.detach().requires_grad_() for parameter in attention.parameters()]
    mask = torch.tensor([[True, True, True], [True, False, False]])
    names = [key for key, _ in attention.named_parameters()]

    def attend(query: Tensor, memory: Tensor, *weights: Tensor) -> Tensor:
        def compute(module: nn.Module) -> Tensor:
            return module(query, module.project(memory), memory, mask, need_weights)[0]

        holder = _Calling(attention, compute)
        held = {f"module.{key}": weight for key, weight in zip(names, weights, strict=True)}
        return torch.func.functional_call(holder, held, ())

    assert torch.autograd.gradcheck(attend, (*given, *parameters))
    with sdpa_kernel(SDPBackend.MATH):  # torch's only backend with second derivatives
        assert torch.autograd.gradgradcheck(attend, (*given, *parameters))


class _Calling(nn.Module):
    """Lets ``functional_call`` reach more than a module's forward."""

    def __init__(self, module: nn.Module, compute: Callable[[nn.Module], Tensor]) -> None:
        super().__init__()
        self.module = module
        self.compute = compute

    def forward(self) -> Tensor:
        return self.compute(self.module)


@pytest.fixture(params=[1, 24, 1 << 20], ids=["1 query", "2 queries", "whole"])
def block(request, monkeypatch) -> int:
    """Elements in a block of additive scores; in the tests below, a query has 12."""
    monkeypatch.setattr(seq2seq, "_BLOCK", request.param)
    return request.param


def plain_scores(query: Tensor, key: Tensor, vector: Tensor) -> Tensor:
    return (query[:, :, None] + key[:, None]).tanh() @ vector


def additive_inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    given = random(2, 5, 2), random(2, 3, 2), random(2)
    return tuple(x.requires_grad_() for x in given)


def test_blocks_of_additive_scores_are_the_whole(block):
    given = additive_inputs()
    got, wanted = additive_scores(*given), plain_scores(*given)
    assert_close(got, wanted)
    grad = random(*got.shape)
    for ours, theirs in zip(
        torch.autograd.grad(got, given, grad), torch.autograd.grad(wanted, given, grad), strict=True
    ):
        assert_close(ours, theirs)
    assert torch.autograd.gradcheck(additive_scores, given)
    assert torch.autograd.gradgradcheck(additive_scores, given)
    assert additive_scores(given[0][:, :0], *given[1:]).shape == (2, 0, 3)


def test_no_block_of_additive_scores_is_larger_than_asked(monkeypatch):
    """Except that a block holds at least one query with all its keys."""
    made = []

    def watch(query: Tensor, key: Tensor) -> Tensor:
        made.append(query.shape[1])
        return (query[:, :, None] + key[:, None]).tanh()

    monkeypatch.setattr(seq2seq, "_tanh", watch)
    for size, wanted in ((1, [1] * 5), (35, [2, 2, 1]), (1 << 20, [5])):
        made.clear()
        monkeypatch.setattr(seq2seq, "_BLOCK", size)
        scores = additive_scores(*additive_inputs())
        assert made == wanted
        scores.sum().backward()
        assert made == 2 * wanted


TRANSFORMS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Any]]] = {
    "grad": lambda f: torch.func.grad(lambda *x: f(*x).square().sum(), (0, 1, 2)),
    "vjp": lambda f: lambda *x: torch.func.vjp(f, *x)[1](torch.ones(2, 5, 3).double()),
    "jacrev": lambda f: torch.func.jacrev(f, (0, 1, 2)),
    "hessian": lambda f: torch.func.jacrev(TRANSFORMS["grad"](f), (0, 1, 2)),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_additive_scores_under_function_transforms(transform, block):
    given = [x.detach() for x in additive_inputs()]
    for got, wanted in zip(
        tree_leaves(transform(additive_scores)(*given)),
        tree_leaves(transform(plain_scores)(*given)),
        strict=True,
    ):
        assert_close(got, wanted)


def test_additive_scores_refuse_forward_mode():
    given = tuple(x.detach() for x in additive_inputs())
    with pytest.raises(RuntimeError, match="jvp"):
        torch.func.jvp(additive_scores, given, given)


@pytest.mark.parametrize("dims", [(0, None, None), (None, 1, None), (None, None, 0), (1, 0, 1)])
def test_additive_scores_of_many(dims, block):
    """vmap over any of the arguments, of scores and of gradients."""
    given = [
        x.detach() if dim is None else torch.stack((x, -x, 2 * x), dim).detach()
        for x, dim in zip(additive_inputs(), dims, strict=True)
    ]
    for transform in (lambda f: f, TRANSFORMS["grad"]):
        for got, wanted in zip(
            tree_leaves(torch.vmap(transform(additive_scores), dims)(*given)),
            tree_leaves(torch.vmap(transform(plain_scores), dims)(*given)),
            strict=True,
        ):
            assert_close(got, wanted)


@attentions
def test_attention_under_function_transforms(name):
    """Per-sample gradients, as gradient clipping per sample needs."""
    attention = attention_of(name)
    torch.manual_seed(1)
    queries, memories = random(3, 4, 8), random(3, 5, 8)

    def loss(parameters: dict[str, Tensor], query: Tensor, memory: Tensor) -> Tensor:
        def compute(module: nn.Module) -> Tensor:
            args = query[None], module.project(memory[None]), memory[None]
            return module(*args, need_weights=True)[0].square().sum()

        return torch.func.functional_call(_Calling(attention, compute), parameters, ())

    parameters = {f"module.{key}": x.detach() for key, x in attention.named_parameters()}
    over = torch.func.grad(loss, (0, 1, 2))
    each = torch.vmap(over, (None, 0, 0))(parameters, queries, memories)
    for row, sample in enumerate(zip(queries, memories, strict=True)):
        wanted = tree_leaves(over(parameters, *sample))
        for got, alone in zip(tree_leaves(each), wanted, strict=True):
            assert_close(got[row], alone)


def bytes_kept(compute: Callable[[], Tensor]) -> list[int]:
    """Returns the sizes of the storages saved for the backward of a result, then runs it."""
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = compute()
    out.sum().backward()
    return list(kept.values())


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@attentions
def test_no_attention_keeps_queries_times_keys_times_width(name, compiled):
    """Tensors saved for the backward have at most two of these dimensions."""
    B, T, S, H = 2, 40, 50, 64
    attention = attention_of(name, hidden_size=H)
    query, memory = random(B, T, H).requires_grad_(), random(B, S, H).requires_grad_()

    def attend() -> Tensor:
        return attention(query, attention.project(memory), memory, need_weights=True)[0]

    torch.compiler.reset()
    compute = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    kept = bytes_kept(compute)
    assert max(kept) <= 8 * max(B * T * H, B * S * H, B * T * S, H * H)
    assert sum(kept) <= 4 * 8 * (B * T * H + B * S * H + B * T * S + H * H)
    assert max(bytes_kept(lambda: plain_scores(query, memory, memory[0, 0]))) == 8 * B * T * S * H


@attentions
def test_attention_traces_without_a_break(name):
    attention = attention_of(name)
    torch.manual_seed(1)
    query, memory = random(2, 3, 8).requires_grad_(), random(2, 4, 8).requires_grad_()
    mask = torch.tensor([[True] * 4, [True, False, False, False]])

    def attend(query: Tensor, memory: Tensor) -> Tensor:
        return attention(query, attention.project(memory), memory, mask)[0]

    torch.compiler.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    got, wanted = compiled(query, memory), attend(query, memory)
    assert_close(got, wanted)
    for ours, theirs in zip(
        torch.autograd.grad(got.square().sum(), (query, memory)),
        torch.autograd.grad(wanted.square().sum(), (query, memory)),
        strict=True,
    ):
        assert_close(ours, theirs)


@attentions
def test_attention_runs_under_autocast(name):
    attention = attention_of(name).float()
    query, memory = torch.randn(2, 3, 8, requires_grad=True), torch.randn(2, 4, 8)
    wanted, _ = attention(query, attention.project(memory), memory)
    with torch.autocast("cpu", torch.bfloat16):
        got, _ = attention(query, attention.project(memory), memory)
    torch.testing.assert_close(got.float(), wanted, rtol=0.05, atol=0.1)
    got.float().sum().backward()
    assert query.grad.isfinite().all()


# The model --------------------------------------------------------------------------------------


def cell(
    rnn: nn.LSTM | nn.GRU | nn.RNN, suffix: str, x: Tensor, hidden: list[Tensor]
) -> list[Tensor]:
    """Computes one step of a layer and direction from its gates; returns h, and c for an LSTM."""
    names = (f"{kind}_{end}_{suffix}" for kind in ("weight", "bias") for end in ("ih", "hh"))
    w_ih, w_hh, b_ih, b_hh = (getattr(rnn, name) for name in names)
    read, kept = w_ih @ x + b_ih, w_hh @ hidden[0] + b_hh
    if isinstance(rnn, nn.LSTM):
        i, f, g, o = (read + kept).chunk(4)
        c = f.sigmoid() * hidden[1] + i.sigmoid() * g.tanh()
        return [o.sigmoid() * c.tanh(), c]
    if isinstance(rnn, nn.RNN):
        return [(read + kept).tanh()]
    (r, z, n), (kept_r, kept_z, kept_n) = read.chunk(3), kept.chunk(3)
    gate = (z + kept_z).sigmoid()
    new = (n + (r + kept_r).sigmoid() * kept_n).tanh()
    return [(1 - gate) * new + gate * hidden[0]]


def by_hand(model: Seq2Seq, source: list[int], target: list[int]) -> tuple[Tensor, Tensor]:
    """Computes logits (T, V) and weights (T, S) of one pair from cells, scores and sums."""
    config = model.config
    E, H, scale = config.embedding_dim, config.hidden_size, math.sqrt(config.embedding_dim)
    states = 2 if config.cell == "lstm" else 1
    directions = ("", "_reverse") if config.bidirectional else ("",)
    x = [model.source_embedding.weight[token] * scale for token in source]
    first = []
    for layer in range(config.num_layers):
        out, finals = {}, []
        for direction in directions:
            hidden = [random(H // len(directions)).zero_() for _ in range(states)]
            order = range(len(x)) if direction == "" else reversed(range(len(x)))
            for place in order:
                hidden = cell(model.encoder, f"l{layer}{direction}", x[place], hidden)
                out[direction, place] = hidden[0]
            finals.append(hidden)
        x = [torch.cat([out[each, place] for each in directions]) for place in range(len(x))]
        joined = [torch.cat(parts) for parts in zip(*finals, strict=True)]
        if model.bridge is not None:
            given = finals[1] if config.attends_first else joined  # the backward direction's
            joined = [model.bridge.hidden[layer](given[0]).tanh()]
            if states == 2:
                joined.append(model.bridge.cell[layer](given[1]))
        first.append(joined)
    memory, hidden, fed = x, first, random(H).zero_()
    logits, weights = [], []
    weight_of = dict(model.named_parameters())

    def bias(name: str) -> Tensor | float:
        return weight_of[name] if config.bias else 0.0

    def attend(query: Tensor) -> Tensor:
        scores = torch.stack([formula(model.attention, query, state) for state in memory])
        weights.append(scores.exp() / scores.exp().sum())
        return weights[-1] @ torch.stack(memory)

    for token in target:
        embedded = model.target_embedding.weight[token] * scale
        assert len(embedded) == E
        y, before = embedded, hidden[-1][0]
        if config.attends_first:
            context = attend(before)
            y = torch.cat((embedded, context))
        elif config.input_feeding:
            y = torch.cat((embedded, fed))
        for layer in range(config.num_layers):
            hidden[layer] = cell(model.decoder, f"l{layer}", y, hidden[layer])
            y = hidden[layer][0]
        if config.attends_first:
            U, V, C = weight_of["readout.linear.weight"].split((H, E, H), 1)
            t = U @ before + V @ embedded + C @ context + bias("readout.linear.bias")
            fed = torch.maximum(t[0::2], t[1::2])
        elif config.attention == "none":
            fed = y
        else:
            W_a, W_s = weight_of["combine.weight"].split((H, H), 1)
            fed = (W_a @ attend(y) + W_s @ y + bias("combine.bias")).tanh()
        logits.append(weight_of["output.weight"] @ fed + bias("output.bias"))
    return torch.stack(logits), torch.stack(weights) if weights else torch.empty(0)


@models
@torch.no_grad()
def test_model_is_its_formulas(changes):
    model = seq2seq_model(**changes)
    source, mask = ragged(*LENGTHS)
    target = tokens(4, 6, seed=1)
    logits = model(source, target, mask)
    by_themselves = [
        by_hand(model, source[row, :length].tolist(), target[row].tolist())
        for row, length in enumerate(LENGTHS)
    ]
    for row, wanted in enumerate(by_themselves):
        assert_close(logits[row], wanted[0])
    if model.attention is None:
        with pytest.raises(ValueError, match="align: expected a model with attention"):
            model.align(source, target, mask)
        return
    weights = model.align(source, target, mask)
    for row, (length, wanted) in enumerate(zip(LENGTHS, by_themselves, strict=True)):
        assert_close(weights[row, :, :length], wanted[1])
        assert weights[row, :, length:].count_nonzero() == 0


@models
def test_padding_and_company_change_nothing(changes):
    """A pair has the same logits and gradients alone and in a batch with arbitrary padding."""
    model = seq2seq_model(**changes)
    source, mask = ragged(*LENGTHS)
    source[~mask] = 9
    lengths = (4, 6, 2, 5)
    target = tokens(4, 6, seed=1)
    together = model(source, target, mask)
    for row, (S, T) in enumerate(zip(LENGTHS, lengths, strict=True)):
        one = source[row : row + 1, :S], target[row : row + 1, :T]
        alone = model(*one)
        assert_close(together[row : row + 1, :T], alone)
        assert_close(model(*one, torch.ones(1, S, dtype=torch.bool)), alone)
        model.zero_grad()
        together[row, :T].square().sum().backward(retain_graph=True)
        shared = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        alone.square().sum().backward()
        for got, parameter in zip(shared, model.parameters(), strict=True):
            assert_close(got, parameter.grad)


@models
def test_no_rows(changes):
    model, source, target = seq2seq_model(**changes), tokens(0, 4), tokens(0, 2)
    mask = torch.ones(0, 4, dtype=torch.bool)
    assert model(source, target, mask).shape == (0, 2, VOCABULARY)
    if model.attention is not None:
        assert model.align(source, target).shape == (0, 2, 4)
    assert _greedy(model, source).tokens.shape == (0, 8)
    assert _search(model, source, mask).tokens.shape == (0, 4, 8)


@models
def test_every_parameter_learns(changes):
    model = seq2seq_model(**changes).train()
    source, mask = ragged(*LENGTHS)
    model(source, tokens(4, 6, seed=1), mask).logsumexp(-1).sum().backward()
    idle = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert idle == []


def test_second_derivatives_exist_where_torchs_layers_have_them():
    """A gradient penalty, through attention and through the recurrent layers."""
    model = seq2seq_model(attention="additive", bidirectional=True)
    source, mask = ragged(*LENGTHS)
    parameters = list(model.parameters())

    def penalty() -> Tensor:
        loss = model(source, tokens(4, 3, seed=1), mask).logsumexp(-1).mean()
        grads = torch.autograd.grad(loss, parameters, create_graph=True)
        return sum(grad.square().sum() for grad in grads)

    weight = model.attention.query.weight
    (slope,) = torch.autograd.grad(penalty(), weight)
    step = 1e-4 * torch.randn_like(weight)
    with torch.no_grad():
        weight.add_(step)
    above = penalty()
    with torch.no_grad():
        weight.sub_(2 * step)
    difference = (above - penalty()) / 2
    assert difference.item() == pytest.approx((slope * step).sum().item(), rel=1e-5)


def test_embeddings_are_shared_where_asked():
    apart = seq2seq_model()
    assert apart.source_embedding is not apart.target_embedding
    assert apart.output.weight is not apart.target_embedding.weight
    one = seq2seq_model(target_vocab_size=11, embedding_dim=8, share_embedding=True)
    assert one.source_embedding is one.target_embedding
    assert one.output.weight is not one.target_embedding.weight
    all_three = seq2seq_model(
        target_vocab_size=11, embedding_dim=8, share_embedding=True, tie_output=True
    )
    assert all_three.output.weight is all_three.source_embedding.weight
    half = seq2seq_model(embedding_dim=4, attention="additive", tie_output=True)
    assert half.output.weight is half.target_embedding.weight
    tied = seq2seq_model(embedding_dim=8, tie_output=True)
    assert tied.output.weight is tied.target_embedding.weight
    assert tied(tokens(1, 3), tokens(1, 2)).shape == (1, 2, VOCABULARY)


def test_dropout_is_for_training():
    model = seq2seq_model(dropout=0.5)
    given = tokens(2, 5), tokens(2, 4)
    assert torch.equal(model(*given), model(*given))
    model.train()
    assert not torch.equal(model(*given), model(*given))


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn"])
def test_fresh_weights_are_as_said(cell):
    torch.manual_seed(0)
    sizes = {"embedding_dim": 64, "hidden_size": 96, "target_vocab_size": 2000, "num_layers": 2}
    model = Seq2Seq(dataclasses.replace(TINY, cell=cell, bidirectional=True, bias=True, **sizes))
    gates = {"lstm": 4, "gru": 3, "rnn": 1}[cell]
    recurrent = model.encoder.weight_hh_l1_reverse
    for gate in recurrent.unflatten(0, (gates, -1)):
        torch.testing.assert_close(gate @ gate.T, torch.eye(48), rtol=0, atol=1e-5)
    for gate in model.decoder.weight_ih_l0.unflatten(0, (gates, -1)):
        bound = math.sqrt(6 / (64 + 96))
        assert 0.98 * bound < gate.abs().max().item() <= bound
    for name, bias in model.named_parameters():
        if "bias" in name:
            forget = cell == "lstm" and "bias_ih" in name
            wanted = torch.zeros_like(bias)
            if forget:
                wanted.unflatten(0, (4, -1))[1] = 1.0
            assert torch.equal(bias, wanted), name
    assert model.target_embedding.weight.std().item() == pytest.approx(1 / 8, rel=0.02)
    source, target = tokens(8, 20, vocabulary=11), tokens(8, 21, vocabulary=2000)
    loss = token_loss(model(source, target[:, :-1]), target[:, 1:])
    assert loss.item() == pytest.approx(math.log(2000), abs=0.1)


RECURRENT = [
    f"{stack}.{kind}_{end}_l{layer}"
    for stack in ("encoder", "decoder")
    for layer in range(2)
    for kind in ("weight", "bias")
    for end in ("ih", "hh")
]


@pytest.mark.parametrize(
    ("changes", "weights", "biases"),
    [
        ({"attention": "none"}, ["output"], ["output"]),
        ({"attention": "dot"}, ["combine", "output"], ["combine", "output"]),
        (
            {"attention": "multiplicative"},
            ["attention.key", "combine", "output"],
            ["combine", "output"],
        ),
        (
            {"attention": "additive"},
            ["attention.query", "attention.key", "attention.score", "readout.linear", "output"],
            ["readout.linear", "output"],
        ),
    ],
    ids=["none", "dot", "multiplicative", "additive"],
)
def test_names_of_saved_weights(changes, weights, biases):
    """A saved model loads as long as these stay; biases come on top of them."""
    without = {f"{layer}.weight" for layer in (*weights, "source_embedding", "target_embedding")}
    without |= set(RECURRENT)
    assert seq2seq_model(**changes).state_dict().keys() == without
    added = {f"{layer}.bias" for layer in biases}
    assert seq2seq_model(**changes, bias=True).state_dict().keys() == without | added


@models
def test_state_dict_goes_round(changes, tmp_path):
    model = seq2seq_model(**changes)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    other = Seq2Seq(model.config).double().eval()
    other.load_state_dict(torch.load(tmp_path / "weights.pt"))
    given = tokens(2, 5), tokens(2, 4)
    assert torch.equal(other(*given), model(*given))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cell": "LSTM"}, "cell: expected one of lstm, gru, rnn; got 'LSTM'"),
        (
            {"attention_order": "dot"},
            "attention_order: expected one of luong, bahdanau; got 'dot'",
        ),
        (
            {"attention": "none", "attention_order": "luong"},
            "attention_order: expected None without attention; got 'luong'",
        ),
        (
            {"attention": "none", "input_feeding": True},
            "input_feeding: expected False without attention; got True",
        ),
        (
            {"attention": "additive", "input_feeding": True},
            "input_feeding: expected attention_order='luong'",
        ),
        (
            {"attention": "additive", "hidden_size": 7},
            "hidden_size: expected an even number with Bahdanau's order; got 7",
        ),
        (
            {"attention": "general"},
            "attention: expected one of none, .*multiplicative; got 'general'",
        ),
        (
            {"hidden_size": 7, "bidirectional": True},
            "hidden_size: expected an even number with bidirectional; got 7",
        ),
        (
            {"share_embedding": True},
            "source_vocab_size: expected target_vocab_size=7 with share_embedding; got 11",
        ),
        ({"tie_output": True}, "embedding_dim: expected hidden_size=8 with tie_output; got 6"),
        (
            {"attention": "additive", "tie_output": True},
            "embedding_dim: expected hidden_size / 2=4 with tie_output; got 6",
        ),
    ],
)
def test_bad_choices_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **changes)


def test_bad_arguments_are_named():
    model = seq2seq_model()
    source, target = tokens(3, 4), tokens(3, 2)
    mask = torch.ones(3, 4, dtype=torch.bool)
    for given, message in (
        ((source[:, :0], target), r"source: expected .* at least one .*got shape \(3, 0\)"),
        ((source, target[:, :0]), r"target: expected .* at least one .*got shape \(3, 0\)"),
        ((source[0], target), r"source: expected integers \(batch, length\).*got shape \(4,\)"),
        ((source, target[:2]), r"target: expected 3 rows, .*; got 2"),
        ((source, target, mask.float()), r"source_mask: expected torch.bool of shape \(3, 4\)"),
        ((source, target, mask[:, :3]), r"source_mask: .*got torch.bool of shape \(3, 3\)"),
    ):
        with pytest.raises(ValueError, match=message):
            model(*given)
    empty, left = mask.clone(), mask.clone()
    empty[1] = False
    left[2, 0] = False
    with pytest.raises(ValueError, match=r"at least one real token in each row; not so in row 1"):
        model(source, target, empty)
    with pytest.raises(ValueError, match=r"real tokens before its padding; not so in row 2"):
        model.align(source, target, left)
    with pytest.raises(ValueError, match=r"target: expected 3 rows, .*; got 4"):
        model.step(tokens(4, 2), model.start(source))


# Decoding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [(1,) * 7, (7,), (4, 1, 2)])
@models
def test_teacher_forcing_is_step_by_step(changes, chunks):
    model = seq2seq_model(**changes)
    source, mask = ragged(3, 6)
    target = tokens(2, 7, seed=1)
    state = model.start(source, mask)
    got = [model.step(chunk, state) for chunk in target.split(chunks, 1)]
    assert_close(torch.cat(got, 1), model(source, target, mask))


@models
def test_reordered_beams_go_on_as_if_they_had_always_been(changes):
    """Three beams for each of two ragged sources; each then continues from another's state."""
    model = seq2seq_model(**changes)
    source, mask = ragged(3, 6)
    begun, going_on = tokens(6, 4, seed=1), tokens(6, 2, seed=2)
    state = model.start(source, mask)
    model.step(begun, state)
    rows = torch.tensor([2, 2, 0, 4, 3, 5])
    state.reorder(rows)
    got = model.step(going_on, state)
    whole = torch.cat((begun[rows], going_on), 1)
    repeated = (x.repeat_interleave(3, 0) for x in (source, mask))
    source_, mask_ = repeated
    assert_close(got, model(source_, whole, mask_)[:, 4:])


def _search(model: Seq2Seq, *source: Tensor, max_length: int = 8, **options: float) -> Decoded:
    return beam_search(model, *source, bos_id=BOS, eos_id=EOS, max_length=max_length, **options)


def _greedy(model: Seq2Seq, *source: Tensor, max_length: int = 8) -> Decoded:
    return greedy_search(model, *source, bos_id=BOS, eos_id=EOS, max_length=max_length)


def _log_prob(model: Seq2Seq, source: Tensor, hypothesis: list[int]) -> float:
    target = torch.tensor([[BOS, *hypothesis]])
    log_probs = model(source, target[:, :-1]).log_softmax(-1)
    return log_probs.gather(-1, target[:, 1:, None]).sum().item()


@pytest.mark.parametrize("length_penalty", [0.0, 0.6])
@models
@torch.no_grad()
def test_wide_enough_beams_find_everything(changes, length_penalty):
    """Beams find all sequences of a vocabulary of 4 that end within 3 tokens or are cut there."""
    model = seq2seq_model(target_vocab_size=4, **changes)
    sources, mask = ragged(5, 2)
    going_on = [token for token in range(4) if token != EOS]
    everything = [
        [*begun, EOS] for n in range(3) for begun in itertools.product(going_on, repeat=n)
    ]
    everything += [list(cut) for cut in itertools.product(going_on, repeat=3)]
    width = len(everything) + 1
    options = {"beam_width": width, "length_penalty": length_penalty}
    found = _search(model, sources, mask, max_length=3, **options)
    for row, length in enumerate((5, 2)):
        one = sources[row : row + 1, :length]
        wanted = sorted(
            (
                (_log_prob(model, one, each) / ((5 + len(each)) / 6) ** length_penalty, each)
                for each in everything
            ),
            reverse=True,
        )
        hypotheses = [
            sequence[:size]
            for sequence, size in zip(
                found.tokens[row].tolist(), found.lengths[row].tolist(), strict=True
            )
        ]
        assert hypotheses == [each for _, each in wanted] + [[]]
        scores = [score for score, _ in wanted] + [-math.inf]
        assert found.scores[row].tolist() == pytest.approx(scores)


PHRASES = {
    "안녕하세요": "hello",
    "감사합니다": "thank you",
    "미안합니다": "i am sorry",
    "좋은 아침입니다": "good morning",
    "잘 자요": "good night",
    "네": "yes",
    "아니요": "no",
    "이름이 뭐예요": "what is your name",
    "저는 학생입니다": "i am a student",
    "어디에 살아요": "where do you live",
    "물 주세요": "water please",
    "얼마예요": "how much is it",
    "도와주세요": "please help me",
    "몰라요": "i do not know",
    "또 만나요": "see you again",
    "사랑해요": "i love you",
}


def encoded(phrases: Collection[str]) -> tuple[Tensor, int]:
    """Returns phrases as characters, each ended and padded by EOS, and the alphabet's size."""
    alphabet = {letter: n for n, letter in enumerate(sorted(set("".join(phrases))), EOS + 1)}
    rows = [torch.tensor([*map(alphabet.__getitem__, phrase), EOS]) for phrase in phrases]
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=EOS)
    return padded, EOS + 1 + len(alphabet)


def test_beams_recite_what_was_learnt():
    """A model that knows its phrases by heart finds each of them at every width."""
    (source, letters), (target, target_letters) = map(encoded, (PHRASES, PHRASES.values()))
    torch.manual_seed(0)
    model = Seq2Seq(Seq2SeqConfig(letters, target_letters, 32, 64, 1, dropout=0.0, attention="dot"))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    begun = F.pad(target[:, :-1], (1, 0), value=BOS)
    for _ in range(200):
        loss = F.cross_entropy(model(source, begun).flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.01
    model.eval()
    greedy = _greedy(model, source, max_length=24)
    assert torch.equal(greedy.tokens[:, : target.shape[1]], target)
    for width in (2, 3, 4, 8):
        found = _search(model, source, max_length=24, beam_width=width)
        assert torch.equal(found.tokens[:, 0], greedy.tokens), width


@models
def test_one_beam_is_greedy(changes):
    model = seq2seq_model(**changes)
    source, mask = ragged(*range(1, 13))
    greedy, found = _greedy(model, source, mask), _search(model, source, mask, beam_width=1)
    assert torch.equal(found.tokens[:, 0], greedy.tokens)
    assert torch.equal(found.lengths[:, 0], greedy.lengths)
    assert_close(found.scores[:, 0], greedy.scores / ((5 + greedy.lengths.double()) / 6) ** 0.6)


def test_searches_mind_no_company():
    model = seq2seq_model(bidirectional=True, attention="additive")
    lengths = range(1, 9)
    source, mask = ragged(*lengths)
    for search in (_greedy, _search):
        together = search(model, source, mask)
        for row, length in enumerate(lengths):
            alone = search(model, source[row : row + 1, :length])
            assert torch.equal(alone.tokens[0], together.tokens[row])
            assert_close(alone.scores[0], together.scores[row])


def test_searches_need_evaluation_mode_and_a_length():
    model, source = seq2seq_model(), tokens(1, 4)
    for search in (_greedy, _search):
        with pytest.raises(ValueError, match="max_length: expected at least 1; got 0"):
            search(model, source, max_length=0)
    model.train()
    with pytest.raises(ValueError, match=r"after model\.eval\(\)"):
        _greedy(model, source)


# Fused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
@models
def test_fused_model_computes_the_same(changes, training, calls):
    model = seq2seq_model(**changes).train(training)
    fused = copy.deepcopy(model)
    report = trifuse.fuse(fused)
    source, mask = ragged(*LENGTHS)
    target = tokens(4, 6, seed=1)
    logits, wanted = fused(source, target, mask), model(source, target, mask)
    config = model.config
    expected = 6 if config.input_feeding or config.attends_first else 1
    if config.attention in ("none", "additive"):
        expected = 0
    assert len(calls) == expected
    assert_close(logits, wanted)
    for each in (logits, wanted):
        token_loss(each, target).backward()
    for ours, theirs in zip(fused.parameters(), model.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad)
    fused.eval()
    for search in (_greedy, _search):
        got, expected = search(fused, source, mask), search(model.eval(), source, mask)
        assert torch.equal(got.tokens, expected.tokens)
        assert_close(got.scores, expected.scores)
    report.revert()
    assert torch.equal(fused(source, target, mask), model(source, target, mask))
