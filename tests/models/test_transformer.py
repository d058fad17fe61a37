"""models/transformer.py: what the models compute, how they learn, and how they decode."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformer_formulas import attended, fed_forward, normalised, relu, with_residual

import trifuse
from trifuse.benchmarks import text
from trifuse.models.transformer import (
    Decoded,
    KeyValueCache,
    LanguageModel,
    LanguageModelConfig,
    SinusoidalPositions,
    Transformer,
    TransformerConfig,
    beam_search,
    greedy_search,
    sample,
    token_loss,
    warmup_inverse_sqrt,
)

VOCABULARY = 11
TINY = TransformerConfig(
    vocab_size=VOCABULARY,
    d_model=16,
    nhead=2,
    num_encoder_layers=2,
    num_decoder_layers=2,
    dim_feedforward=24,
    dropout=0.0,
    max_length=20,
)
TINY_LANGUAGE = LanguageModelConfig(
    vocab_size=VOCABULARY,
    d_model=16,
    nhead=2,
    num_layers=2,
    dim_feedforward=24,
    dropout=0.0,
    max_length=20,
)
BOS, EOS = 1, 2


def transformer(norm_first: bool = False, **sizes: float) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(dataclasses.replace(TINY, norm_first=norm_first, **sizes))
    return _perturbed(model).double().eval()


def language_model(**sizes: float) -> LanguageModel:
    torch.manual_seed(0)
    config = dataclasses.replace(TINY_LANGUAGE, **sizes)
    return _perturbed(LanguageModel(config)).double().eval()


@torch.no_grad()
def _perturbed(model: nn.Module) -> nn.Module:
    """Perturbs a model so that biases and norms matter and logits are far from uniform."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def tokens(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, shape, generator=generator)


def ragged(*lengths: int) -> tuple[Tensor, Tensor]:
    """A padded source and its mask."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return tokens(*mask.shape).masked_fill(~mask, 0), mask


def assert_close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


norms = pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])


# The models -------------------------------------------------------------------------------------


def test_sinusoids_are_the_papers():
    positions = SinusoidalPositions(50, 8).double()
    got = positions(torch.zeros(1, 7, 8, dtype=torch.float64), start=40)[0]
    for place, i in itertools.product(range(7), range(4)):
        angle = (40 + place) / 10000 ** (2 * i / 8)
        assert got[place, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
        assert got[place, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_gpt2_has_as_many_parameters_as_published():
    with torch.device("meta"):
        model = LanguageModel(LanguageModelConfig())
    assert sum(p.numel() for p in model.parameters()) == 124_439_808


def test_base_model_has_the_papers_parameters():
    """One embedding, and the paper's count for each attention and feed-forward network."""
    with torch.device("meta"):
        model = Transformer(TransformerConfig())
    d, inner, vocabulary = 512, 2048, 37000
    attention = 4 * (d * d + d)
    feed_forward = 2 * d * inner + inner + d
    encoder, decoder = attention + feed_forward + 4 * d, 2 * attention + feed_forward + 6 * d
    assert sum(p.numel() for p in model.parameters()) == vocabulary * d + 6 * (encoder + decoder)


@norms
def test_output_is_the_embedding(norm_first):
    model = transformer(norm_first)
    assert model.output.weight is model.embedding.weight
    language = language_model()
    assert language.output.weight is language.embedding.weight
    source, target = tokens(2, 5), tokens(2, 6, seed=1)
    logits = model(source, target)
    assert logits.shape == (2, 6, VOCABULARY)
    logits.logsumexp(-1).sum().backward()
    unused = [name for name, p in model.named_parameters() if p.grad is None]
    assert unused == []


def test_embeddings_are_scaled_and_positioned():
    model = transformer()
    source = tokens(1, 5)
    wanted = model.embedding.weight[source[0]] * 4 + model.positions.table[:5]
    assert_close(model._embed("source", source)[0], wanted)


def positioned(model: Transformer, text: list[int]) -> Tensor:
    """√d times the embeddings, with sinusoids, (L, d)."""
    d = model.config.d_model
    rows = []
    for place, token in enumerate(text):
        angles = [place / 10000 ** (2 * i / d) for i in range(d // 2)]
        waves = [wave(angle) for angle in angles for wave in (math.sin, math.cos)]
        # The model was made in float32, and so was its table.
        sinusoids = torch.tensor(waves, dtype=torch.float32).double()
        rows.append(model.embedding.weight[token] * math.sqrt(d) + sinusoids)
    return torch.stack(rows)


def by_hand(model: Transformer, source: list[int], target: list[int]) -> Tensor:
    """Computes the logits (T, V) of one pair by the paper's section 3, or with the norms first."""
    first = model.config.norm_first
    x = positioned(model, source)
    for layer in model.encoder.layers:
        attend = functools.partial(_attend_to_itself, layer.self_attn)
        x = with_residual(attend, x, layer.norm1, first)
        feed = functools.partial(fed_forward, layer, activation=relu)
        x = with_residual(feed, x, layer.norm2, first)
    memory = normalised(x, model.encoder.norm) if first else x
    x = positioned(model, target)
    for layer in model.decoder.layers:
        attend = functools.partial(_attend_to_itself, layer.self_attn, causal=True)
        x = with_residual(attend, x, layer.norm1, first)
        attend = functools.partial(attended, layer.multihead_attn, memory=memory)
        x = with_residual(attend, x, layer.norm2, first)
        feed = functools.partial(fed_forward, layer, activation=relu)
        x = with_residual(feed, x, layer.norm3, first)
    x = normalised(x, model.decoder.norm) if first else x
    return x @ model.embedding.weight.T


def _attend_to_itself(attention: nn.MultiheadAttention, x: Tensor, causal: bool = False) -> Tensor:
    return attended(attention, x, x, causal)


@pytest.mark.parametrize("fused", [False, True])
@norms
@torch.no_grad()
def test_logits_are_the_papers_formulas(norm_first, fused):
    model = transformer(norm_first)
    sources, targets = (7, 1, 4), (5, 6, 2)
    source, source_mask = ragged(*sources)
    target, target_mask = ragged(*targets)
    source[~source_mask], target[~target_mask] = 9, 8
    expected = [
        by_hand(model, source[row, :S].tolist(), target[row, :T].tolist())
        for row, (S, T) in enumerate(zip(sources, targets, strict=True))
    ]
    if fused:
        trifuse.fuse(model, unpad=True)
    logits = model(source, target, source_mask, target_mask)
    for row, wanted in enumerate(expected):
        assert_close(logits[row, : len(wanted)], wanted)


@pytest.mark.parametrize("fused", [False, True])
@norms
def test_attentions_are_the_softmax_of_what_each_layer_reads(norm_first, fused):
    model = transformer(norm_first)
    source, mask = ragged(7, 4)
    target = tokens(2, 5)
    read = []

    def record(module: nn.MultiheadAttention, args, kwargs) -> None:
        read.append((module, args[0].detach().clone(), args[1].detach().clone()))

    parts = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    hooks = [m.register_forward_pre_hook(record, with_kwargs=True) for m in parts]
    with torch.no_grad():
        wanted_logits = model.train()(source, target, mask)  # TINY has no dropout
    for hook in hooks:
        hook.remove()
    expected = []
    for module, query, key in read:
        q_weight, k_weight, _ = module.in_proj_weight.detach().chunk(3)
        q_bias, k_bias, _ = module.in_proj_bias.detach().chunk(3)
        q, k = query @ q_weight.T + q_bias, key @ k_weight.T + k_bias
        q, k = (x.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for x in (q, k))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if key.shape[1] == source.shape[1]:
            scores = scores.masked_fill(~mask[:, None, None], -math.inf)
        else:
            scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
        expected.append(scores.softmax(-1))
    with pytest.raises(ValueError, match="evaluation mode"):
        model.attentions(source, target)
    model.eval()
    if fused:
        trifuse.fuse(model)
    got = model.attentions(source, target, mask)
    decoder = itertools.chain.from_iterable(zip(got.decoder, got.cross, strict=True))
    in_order = [*got.encoder, *decoder]
    assert len(in_order) == len(expected) == 6
    for number, (ours, theirs) in enumerate(zip(in_order, expected, strict=True)):
        rows = mask[:, None, :, None] if number < 2 else torch.tensor(True)
        assert_close(ours.where(rows, 0), theirs.where(rows, 0))
    assert_close(model(source, target, mask), wanted_logits)


@norms
def test_padding_changes_nothing(norm_first):
    """A sentence has the same logits alone and in a batch with arbitrary padding."""
    model = transformer(norm_first)
    source, source_mask = ragged(7, 3, 5)
    target, target_mask = ragged(4, 6, 2)
    source[~source_mask], target[~target_mask] = 9, 8
    together = model(source, target, source_mask, target_mask)
    without_target_mask = model(source, target, source_mask)
    for row, (S, T) in enumerate(zip((7, 3, 5), (4, 6, 2), strict=True)):
        alone = model(source[row : row + 1, :S], target[row : row + 1, :T])[0]
        assert_close(together[row, :T], alone)
        assert_close(without_target_mask[row, :T], alone)


def test_padding_changes_nothing_in_a_language_model():
    model = language_model()
    text_, mask = ragged(4, 7)
    alone = model(text_[:1, :4])[0]
    for given in (mask, None):
        assert_close(model(text_, given)[0, :4], alone)


@norms
def test_no_position_sees_the_next(norm_first):
    model, source = transformer(norm_first), tokens(1, 4)
    _assert_causal(lambda target: model(source.expand(len(target), -1), target))


def test_no_position_of_a_language_model_sees_the_next():
    _assert_causal(language_model())


def _assert_causal(model: Callable[[Tensor], Tensor]) -> None:
    """Changing token j changes the logits from j on, and none before."""
    given = tokens(1, 6)
    changed = given.repeat(6, 1)
    changed += torch.eye(6, dtype=torch.long)
    changed %= VOCABULARY
    difference = (model(changed) - model(given)).abs().amax(-1)  # (token changed, position)
    assert torch.equal(difference > 1e-12, torch.ones(6, 6, dtype=torch.bool).triu())


@pytest.mark.parametrize("make", [transformer, language_model])
def test_state_dict_goes_round(make, tmp_path):
    model = make()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    other = type(model)(model.config).double().eval()
    other.load_state_dict(torch.load(tmp_path / "weights.pt"))
    given = (tokens(2, 5),) * (2 if make is transformer else 1)
    assert torch.equal(other(*given), model(*given))
    assert other.output.weight is other.embedding.weight
    assert not any("table" in name or "attention" in name for name in model.state_dict())


@pytest.mark.parametrize("make", [transformer, language_model])
def test_traces_without_a_break(make):
    model = make()
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    given = (tokens(2, 5),) * (2 if make is transformer else 1)
    assert_close(compiled(*given), model(*given))


@pytest.mark.parametrize("strict", [False, True])
def test_exports_with_any_batch(strict):
    model = transformer()
    tokens = torch.randint(3, VOCABULARY, (3, 5)), torch.randint(3, VOCABULARY, (3, 4))
    batch = torch.export.Dim("batch")
    program = torch.export.export(
        model, tokens, dynamic_shapes=({0: batch}, {0: batch}), strict=strict
    )
    more = tuple(t.repeat(2, 1) for t in tokens)
    torch.testing.assert_close(program.module()(*more), model(*more))


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="d_model: expected a multiple of nhead=3; got 16"):
        TransformerConfig(d_model=16, nhead=3)
    with pytest.raises(ValueError, match="d_model: expected an even number; got 15"):
        TransformerConfig(d_model=15, nhead=3)
    for config, name in (
        (TransformerConfig, "nhead"),
        (TransformerConfig, "num_encoder_layers"),
        (TransformerConfig, "num_decoder_layers"),
        (LanguageModelConfig, "nhead"),
        (LanguageModelConfig, "num_layers"),
    ):
        with pytest.raises(ValueError, match=f"{name}: expected at least 1; got 0"):
            config(**{name: 0})
    with pytest.raises(ValueError, match="d_model: expected a multiple of nhead=12; got 16"):
        LanguageModelConfig(d_model=16)
    model, language = transformer(), language_model()
    with pytest.raises(ValueError, match=r"target: expected at most max_length=20 .*; got 21"):
        model(tokens(1, 4), tokens(1, 21))
    with pytest.raises(ValueError, match=r"source: expected at most max_length=20 .*; got 21"):
        model(tokens(1, 21), tokens(1, 4))
    with pytest.raises(ValueError, match=r"tokens: expected at most max_length=20 .*; got 21"):
        language(tokens(1, 21))
    with pytest.raises(ValueError, match=r"source_mask: expected torch.bool of shape \(1, 4\)"):
        model(tokens(1, 4), tokens(1, 3), torch.ones(1, 4))
    with pytest.raises(ValueError, match=r"target_mask: .*got torch.bool of shape \(1, 4\)"):
        model(tokens(1, 4), tokens(1, 3), None, torch.ones(1, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"mask: expected torch.bool of shape \(1, 3\)"):
        language(tokens(1, 3), torch.ones(1, 3))


@pytest.mark.parametrize("fused", [False, True])
def test_shapes_of_tokens_are_checked(fused):
    models = transformer().eval(), language_model()
    if fused:
        for each in models:
            trifuse.fuse(each, unpad=True)
    (model, language), none = models, KeyValueCache()
    row, mask = tokens(1, 4)[0], torch.ones(4, dtype=torch.bool)
    for call, message in (
        (lambda: model(row, row), r"source: expected \(batch, length\); got \(4,\)"),
        (lambda: model(row, row, mask, mask), r"source: expected \(batch, length\); got \(4,\)"),
        (lambda: model(tokens(1, 4), row), r"target: expected \(batch, length\); got \(4,\)"),
        (lambda: model(tokens(2, 4), tokens(3, 5)), "target: expected 2 rows, as source; got 3"),
        (lambda: model.attentions(tokens(2, 4), tokens(3, 5)), "expected 2 rows, as source; got 3"),
        (lambda: model.encode(row), r"source: expected \(batch, length\); got \(4,\)"),
        (lambda: language(row), r"tokens: expected \(batch, length\); got \(4,\)"),
        (lambda: language(row, mask), r"tokens: expected \(batch, length\); got \(4,\)"),
        (lambda: language.features(row), r"tokens: expected \(batch, length\); got \(4,\)"),
        (lambda: language.step(row, none), r"tokens: expected \(batch, length\); got \(4,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


# Training ---------------------------------------------------------------------------------------


def test_schedule_is_the_papers():
    """Equation 3 with d_model = 512, through LambdaLR."""
    d_model, warmup = 512, 40
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=(d_model * warmup) ** -0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_inverse_sqrt(warmup))
    rates = []
    for _ in range(200):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    paper = [
        d_model**-0.5 * min(step**-0.5, step * warmup**-1.5) for step in range(1, len(rates) + 1)
    ]
    assert rates == pytest.approx(paper, rel=1e-12)
    assert max(rates) == rates[warmup - 1]
    with pytest.raises(ValueError, match="warmup_steps: expected at least 1; got 0"):
        warmup_inverse_sqrt(0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_is_the_mean_over_real_tokens_with_labels_smoothed(smoothing):
    logits = torch.randn(2, 5, VOCABULARY, dtype=torch.float64)
    targets, mask = ragged(5, 2)
    wanted = []
    for row, place in mask.nonzero().tolist():
        log_probs = logits[row, place].log_softmax(-1)
        target = log_probs[targets[row, place]]
        wanted.append(-(1 - smoothing) * target - smoothing * log_probs.mean())
    got = token_loss(logits, targets, mask, smoothing)
    assert_close(got, torch.stack(wanted).mean())
    for dtype in (torch.uint8, torch.int32):
        assert torch.equal(token_loss(logits, targets.to(dtype), mask, smoothing), got)
    everything = token_loss(logits, targets, None, smoothing)
    assert_close(everything, token_loss(logits, targets, torch.ones_like(mask), smoothing))


def test_fresh_language_model_knows_nothing():
    torch.manual_seed(0)
    config = LanguageModelConfig(256, d_model=128, nhead=4, num_layers=4, dim_feedforward=512)
    given = torch.randint(256, (8, 33))
    loss = token_loss(LanguageModel(config)(given[:, :-1]), given[:, 1:])
    assert loss.item() == pytest.approx(math.log(256), abs=0.05)


def test_fresh_transformer_knows_nothing():
    """Logits of variance 1 cost half a nat beyond a uniform guess (the mean of a log-normal)."""
    torch.manual_seed(0)
    config = dataclasses.replace(TINY, vocab_size=1000, d_model=64, nhead=4, max_length=32)
    source, target = torch.randint(1000, (2, 16, 20))
    loss = token_loss(Transformer(config)(source, target[:, :-1]), target[:, 1:])
    assert loss.item() == pytest.approx(math.log(1000) + 0.5, abs=0.2)


def test_residual_weights_begin_smaller_with_depth():
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(64, 128, 4, num_layers=8, dim_feedforward=512))
    layer = model.decoder.layers[3]
    for weight, std in (
        (layer.self_attn.in_proj_weight, 0.02),
        (layer.linear1.weight, 0.02),
        (layer.self_attn.out_proj.weight, 0.02 / 4),
        (layer.linear2.weight, 0.02 / 4),
        (model.embedding.weight, 0.02),
    ):
        assert weight.std().item() == pytest.approx(std, rel=0.05)
    assert not torch.equal(layer.linear1.weight, model.decoder.layers[4].linear1.weight)


def test_matrices_begin_xavier_uniform():
    torch.manual_seed(0)
    model = Transformer(dataclasses.replace(TINY, d_model=64, dim_feedforward=256))
    layer = model.decoder.layers[1]
    for weight in (layer.multihead_attn.in_proj_weight, layer.linear1.weight):
        bound = math.sqrt(6 / sum(weight.shape))
        assert 0.99 * bound < weight.abs().max().item() <= bound
    assert layer.linear1.bias.count_nonzero() == 0
    assert model.embedding.weight.std().item() == pytest.approx(1 / 8, rel=0.1)


@functools.cache
@torch.enable_grad()
def reverser(norm_first: bool) -> Transformer:
    """A model trained for seconds to reverse up to 6 of 8 symbols. Copy it before changing it."""
    torch.manual_seed(0)
    config = TransformerConfig(
        text.SYMBOLS + 8, 64, 4, 2, 2, 128, dropout=0.0, norm_first=norm_first, max_length=16
    )
    model = Transformer(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_inverse_sqrt(40))
    generator = torch.Generator().manual_seed(0)
    for _ in range(350):
        loss = _pairs_loss(model, text.pairs("reversal", 32, generator, symbols=8, max_length=6))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.double().eval()


def sources(*lengths: int) -> tuple[Tensor, Tensor]:
    """Sources for the reverser, symbols and EOS, padded; and their mask."""
    source, mask = ragged(*(length + 1 for length in lengths))
    source = (source % 8 + text.SYMBOLS).masked_fill(~mask, text.PAD)
    return source.scatter(1, torch.tensor(lengths)[:, None], text.EOS), mask


@norms
@torch.no_grad()
def test_learns_to_reverse(norm_first):
    model = reverser(norm_first)
    generator = torch.Generator().manual_seed(1)
    held_out = text.pairs("reversal", 64, generator, symbols=8, max_length=6)
    assert _pairs_loss(model, held_out).item() < 0.15
    wanted, mask = held_out.target[:, 1:], held_out.target_mask[:, 1:]
    for search in (_greedy, _search):
        found = search(model, held_out.source, held_out.source_mask).tokens
        found = found[:, 0] if search is _search else found
        right = ((found[:, : wanted.shape[1]] == wanted) | ~mask).all(-1)
        assert right.double().mean() >= 0.9


def _pairs_loss(model: nn.Module, batch: text.Pairs) -> Tensor:
    logits = model(batch.source, batch.target[:, :-1], batch.source_mask)
    return token_loss(logits, batch.target[:, 1:], batch.target_mask[:, 1:])


# Decoding ---------------------------------------------------------------------------------------

CHUNKS = [(1,) * 7, (7,), (4, 1, 2)]


@pytest.mark.parametrize("chunks", CHUNKS)
@norms
def test_cache_changes_nothing(norm_first, chunks):
    model = transformer(norm_first)
    source, mask = ragged(3, 6)
    target = tokens(2, 7, seed=1)
    state = model.start(source, mask)
    got = [model.step(chunk, state) for chunk in target.split(chunks, 1)]
    assert_close(torch.cat(got, 1), model(source, target, mask))
    assert state.past.length == 7


@pytest.mark.parametrize("chunks", CHUNKS)
def test_cache_of_a_language_model_changes_nothing(chunks):
    model, given, past = language_model(), tokens(2, 7), KeyValueCache()
    got = [model.step(chunk, past) for chunk in given.split(chunks, 1)]
    assert_close(torch.cat(got, 1), model(given))


def test_steps_drop_nothing():
    """Not even while the model is in training mode."""
    model, language, given = transformer(dropout=0.5), language_model(dropout=0.5), tokens(2, 3)
    results = []
    for training in (False, True):
        state = model.eval().start(tokens(2, 5))
        first = model.train(training).step(given, state)
        results.append((first, language.train(training).step(given, KeyValueCache())))
    assert_close(*results)


def test_reordered_beams_go_on_as_if_they_had_always_been():
    """Three beams for each of two ragged sources; each then continues from another's past."""
    model = transformer()
    source, mask = ragged(3, 6)
    begun, going_on = tokens(6, 4, seed=1), tokens(6, 2, seed=2)
    state = model.start(source, mask)
    model.step(begun, state)
    rows = torch.tensor([2, 2, 0, 4, 3, 5])
    state.past.reorder(rows)
    got = model.step(going_on, state)
    repeated = (x.repeat_interleave(3, 0) for x in (source, mask))
    whole = torch.cat((begun[rows], going_on), 1)
    source_, mask_ = repeated
    assert_close(got, model(source_, whole, mask_)[:, 4:])


def _search(model: Transformer, *source: Tensor, max_length: int = 8, **options: float) -> Decoded:
    return beam_search(model, *source, bos_id=BOS, eos_id=EOS, max_length=max_length, **options)


def _greedy(model: Transformer, *source: Tensor, max_length: int = 8) -> Decoded:
    return greedy_search(model, *source, bos_id=BOS, eos_id=EOS, max_length=max_length)


def _log_prob(model: Transformer, source: Tensor, hypothesis: list[int]) -> float:
    """Computes a log-probability from the whole target, without a cache."""
    target = torch.tensor([[BOS, *hypothesis]])
    log_probs = model(source, target[:, :-1]).log_softmax(-1)
    return log_probs.gather(-1, target[:, 1:, None]).sum().item()


def _hypotheses(found: Decoded, row: int) -> list[tuple[list[int], float]]:
    return [
        (sequence[:length], score)
        for sequence, length, score in zip(*(x[row].tolist() for x in found), strict=True)
    ]


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 2.0])
@norms
@torch.no_grad()
def test_wide_enough_beams_find_everything(norm_first, length_penalty):
    """Beams find all sequences of a vocabulary of 4 that end within 4 tokens or are cut there."""
    model = transformer(norm_first, vocab_size=4)
    source = torch.tensor([[3, 0, 2, 1, 2]])
    going_on = [token for token in range(4) if token != EOS]
    everything = [
        [*begun, EOS] for n in range(4) for begun in itertools.product(going_on, repeat=n)
    ]
    everything += [list(cut) for cut in itertools.product(going_on, repeat=4)]
    wanted = sorted(
        (
            (_log_prob(model, source, each) / ((5 + len(each)) / 6) ** length_penalty, each)
            for each in everything
        ),
        reverse=True,
    )
    width = len(everything) + 3
    options = {"beam_width": width, "length_penalty": length_penalty}
    found = _hypotheses(_search(model, source, max_length=4, **options), 0)
    assert [hypothesis for hypothesis, _ in found[:-3]] == [each for _, each in wanted]
    assert [score for _, score in found[:-3]] == pytest.approx([score for score, _ in wanted])
    assert found[-3:] == [([], -math.inf)] * 3


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_one_beam_is_greedy(length_penalty):
    model = reverser(False)
    source, mask = sources(*range(1, 13))
    greedy = _greedy(model, source, mask)
    found = _search(model, source, mask, beam_width=1, length_penalty=length_penalty)
    assert torch.equal(found.tokens[:, 0], greedy.tokens)
    assert torch.equal(found.lengths[:, 0], greedy.lengths)
    penalty = ((5 + greedy.lengths.double()) / 6) ** length_penalty
    assert_close(found.scores[:, 0], greedy.scores / penalty)
    assert greedy.lengths.unique().numel() > 2  # some end early, some late


@torch.no_grad()
def test_searches_score_what_they_find():
    model = reverser(False)
    source, mask = sources(1, 4, 8, 3)
    greedy, found = _greedy(model, source, mask), _search(model, source, mask, length_penalty=0.6)
    for row, length in enumerate((2, 5, 9, 4)):
        one = source[row : row + 1, :length]
        hypotheses = _hypotheses(found, row)
        for hypothesis, score in hypotheses:
            assert EOS not in hypothesis[:-1]
            assert hypothesis[-1] == EOS or len(hypothesis) == 8
            penalty = ((5 + len(hypothesis)) / 6) ** 0.6
            assert score == pytest.approx(_log_prob(model, one, hypothesis) / penalty)
        assert len({tuple(hypothesis) for hypothesis, _ in hypotheses}) == 4
        assert found.scores[row].tolist() == sorted(found.scores[row].tolist(), reverse=True)
        sequence = greedy.tokens[row, : greedy.lengths[row]].tolist()
        assert greedy.scores[row].item() == pytest.approx(_log_prob(model, one, sequence))


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.6])
def test_search_minds_no_company(length_penalty):
    """A source's hypotheses don't depend on the other sources, for which the search may go on."""
    model = transformer(vocab_size=4)
    # Keeps a token from being its own likeliest successor, so that some hypotheses end.
    model.output.weight = nn.Parameter(model.embedding.weight.detach().roll(1, 0))
    lengths = range(1, 13)
    source, mask = ragged(*lengths)
    source %= 4
    options = {"beam_width": 2, "length_penalty": length_penalty}
    together = _search(model, source, mask, **options)
    for row, length in enumerate(lengths):
        alone = _search(model, source[row : row + 1, :length], **options)
        assert torch.equal(alone.tokens[0], together.tokens[row])
        assert_close(alone.scores[0], together.scores[row])
    assert (together.lengths.amax(1) < 8).any()
    assert (together.lengths.amax(1) == 8).any()


@pytest.mark.parametrize("fused", [False, True])
def test_no_sources_may_have_a_mask(fused):
    model = transformer()
    if fused:
        trifuse.fuse(model, unpad=True)
    source, target = tokens(0, 4), tokens(0, 3)
    masks = torch.ones(0, 4, dtype=torch.bool), torch.ones(0, 3, dtype=torch.bool)
    for training in (False, True):
        assert model.train(training)(source, target, *masks).shape == (0, 3, VOCABULARY)


def test_no_sources():
    model = transformer().eval()
    none = tokens(0, 4)
    found = greedy_search(model, none, bos_id=0, eos_id=1, max_length=5)
    assert (found.tokens.shape, found.lengths.shape) == ((0, 5), (0,))
    found = beam_search(model, none, bos_id=0, eos_id=1, max_length=5, beam_width=3)
    assert (found.tokens.shape, found.scores.shape) == ((0, 3, 5), (0, 3))


def test_greedy_takes_the_likeliest_each_time():
    model = reverser(False)
    source, mask = sources(2, 9)
    found = _greedy(model, source, mask)
    target = torch.cat((torch.full((2, 1), BOS), found.tokens), 1)
    likeliest = model(source, target[:, :-1], mask).argmax(-1)
    for row, length in enumerate(found.lengths.tolist()):
        assert torch.equal(found.tokens[row, :length], likeliest[row, :length])
        assert (found.tokens[row, length:] == EOS).all()


def test_samples_follow_the_distribution():
    model = language_model()
    prompt = tokens(1, 3).expand(20_000, -1)
    for temperature, top_k in ((1.0, None), (0.5, None), (2.0, 4)):
        generator = torch.Generator().manual_seed(0)
        drawn = sample(model, prompt, 1, temperature=temperature, top_k=top_k, generator=generator)
        assert torch.equal(drawn[:, :3], prompt)
        logits = model(prompt[:1])[0, -1] / temperature
        if top_k is not None:
            logits[logits.argsort()[:-top_k]] = -math.inf
        counts = drawn[:, 3].bincount(minlength=VOCABULARY)
        expected = logits.softmax(-1) * len(prompt)
        assert counts[expected == 0].sum() == 0
        deviation = (counts - expected).abs() / expected.clamp(min=1).sqrt()
        assert deviation.max() < 4


def test_samples_are_the_generators():
    model, prompt = language_model(), tokens(3, 4)
    draws = [
        sample(model, prompt, 10, generator=torch.Generator().manual_seed(seed))
        for seed in (5, 5, 6)
    ]
    assert draws[0].shape == (3, 14)
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_top_1_is_the_likeliest():
    model, prompt = language_model(), tokens(3, 4)
    drawn = sample(model, prompt, 10, top_k=1)
    assert torch.equal(drawn[:, 4:], model(drawn)[:, 3:-1].argmax(-1))


def test_bad_arguments_of_searches_are_named():
    model, language, source = transformer(), language_model(), tokens(1, 4)
    for max_length in (0, 21):
        with pytest.raises(ValueError, match=f"from 1 to the model's 20; got {max_length}"):
            _greedy(model, source, max_length=max_length)
    with pytest.raises(ValueError, match="beam_width: expected at least 1; got 0"):
        _search(model, source, beam_width=0)
    with pytest.raises(ValueError, match="length_penalty: expected a finite number; got nan"):
        _search(model, source, length_penalty=math.nan)
    with pytest.raises(ValueError, match=r"prompt: expected .* got \(1, 0\)"):
        sample(language, source[:, :0], 3)
    with pytest.raises(ValueError, match="temperature: expected a number above 0; got 0"):
        sample(language, source, 3, temperature=0)
    with pytest.raises(ValueError, match="new_tokens: expected at least 0; got -1"):
        sample(language, source, -1)
    with pytest.raises(ValueError, match="top_k: expected at least 1; got 0"):
        sample(language, source, 3, top_k=0)
    with pytest.raises(ValueError, match=r"new_tokens: expected at most 16 .*; got 17"):
        sample(language, source, 17)
    for search in (_greedy, _search):
        with pytest.raises(ValueError, match=r"after model\.eval\(\)"):
            search(model.train(), source)
    with pytest.raises(ValueError, match=r"after model\.eval\(\)"):
        sample(language.train(), source, 3)


# Fused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
@norms
def test_fused_transformer_computes_the_same(norm_first, training, calls):
    model = transformer(norm_first).train(training)
    fused = copy.deepcopy(model)
    trifuse.fuse(fused)
    source, source_mask = ragged(7, 3, 5)
    target, target_mask = ragged(4, 6, 2)
    given = (source, target, source_mask, target_mask)
    logits, wanted = fused(*given), model(*given)
    assert len(calls) == 6
    assert_close(logits[target_mask], wanted[target_mask])
    for each in (logits, wanted):
        token_loss(each, target, target_mask).backward()
    for ours, theirs in zip(fused.parameters(), model.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad)


def test_fused_language_model_computes_the_same(calls):
    model = language_model().train()
    fused = copy.deepcopy(model)
    trifuse.fuse(fused)
    given, mask = ragged(7, 3, 5)
    logits, wanted = fused(given, mask), model(given, mask)
    assert len(calls) == 2
    assert_close(logits[mask], wanted[mask])
    for each in (logits, wanted):
        token_loss(each, given, mask).backward()
    for ours, theirs in zip(fused.parameters(), model.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad)


def test_fused_models_decode_the_same():
    model, language = reverser(False), language_model()
    fused, fused_language = copy.deepcopy(model), copy.deepcopy(language)
    for each in (fused, fused_language):
        report = trifuse.fuse(each)
        assert "add_norm" in {swapped.path for swapped in report.swapped}
    source, mask = sources(1, 4, 8, 3)
    for search in (_greedy, _search):
        got, wanted = search(fused, source, mask), search(model, source, mask)
        assert torch.equal(got.tokens, wanted.tokens)
        assert_close(got.scores, wanted.scores)
    drawn = [
        sample(each, tokens(3, 4), 8, generator=torch.Generator().manual_seed(0))
        for each in (fused_language, language)
    ]
    assert torch.equal(*drawn)


# Training data ----------------------------------------------------------------------------------


def test_reference_is_split_without_overlap():
    train, validation = text.reference()
    assert len(validation) > 20_000
    assert 7 < len(train) / len(validation) < 11
    paragraphs = text.decode(train).split("\n\n"), text.decode(validation).split("\n\n")
    assert not set(paragraphs[0]) & set(paragraphs[1])
    assert torch.equal(text.encode(text.decode(train)), train)


def test_windows_are_cut_from_the_text():
    train = text.encode("".join(chr(i) for i in range(100)))
    cut = text.windows(train, 500, 30, torch.Generator().manual_seed(0))
    assert torch.equal(cut - cut[:, :1], torch.arange(30).expand(500, -1))
    assert (cut.min(), cut.max()) == (0, 99)


def test_windows_cover_the_text():
    validation = text.encode("".join(chr(i) for i in range(100)))
    cut = text.cover(validation, 12)
    assert torch.equal(cut[:, 1:].flatten(), torch.arange(1, 100))
    assert torch.equal(cut[:, 0], torch.arange(0, 99, 11))


@pytest.mark.parametrize("puzzle", ["reversal", "sorting"])
def test_puzzles_have_their_answers(puzzle):
    generator = torch.Generator().manual_seed(0)
    batch = text.pairs(puzzle, 200, generator, symbols=5, min_length=2, max_length=7)
    lengths = set()
    for row in range(200):
        source = batch.source[row][batch.source_mask[row]].tolist()
        target = batch.target[row][batch.target_mask[row]].tolist()
        assert source[-1] == target[-1] == text.EOS
        assert target[0] == text.BOS
        symbols, answer = source[:-1], target[1:-1]
        assert answer == (symbols[::-1] if puzzle == "reversal" else sorted(symbols))
        assert all(text.SYMBOLS <= symbol < text.SYMBOLS + 5 for symbol in symbols)
        lengths.add(len(symbols))
    assert lengths == set(range(2, 8))
    for tokens_, mask in ((batch.source, batch.source_mask), (batch.target, batch.target_mask)):
        assert torch.equal(tokens_ != text.PAD, mask)
