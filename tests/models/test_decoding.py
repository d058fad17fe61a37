"""models/decoding.py on random Markov chains of order 2, small enough to try every target."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from trifuse.models.decoding import Decoded, beam_search, greedy_search, sample

EOS, V, MAX_LENGTH = 0, 4, 5
PENALTIES = [-1.0, 0.0, 0.6, 2.0]


class MarkovState:
    def __init__(self, chains: Tensor) -> None:
        self.chains = chains  # of each target's source
        self.previous = torch.full_like(chains, V)  # each target's last token but one
        self.reorders = 0

    def reorder(self, rows: Tensor) -> None:
        assert torch.equal(self.chains, self.chains[rows])
        self.previous = self.previous[rows]
        self.reorders += 1


class MarkovChains:
    """A model whose source is the number of a chain; a token depends on the last two."""

    training = False
    max_target_length = None

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        logits = 1.5 * torch.randn(count, V + 1, V + 1, V, generator=generator, dtype=torch.float64)
        self.log_probs = logits.log_softmax(-1)
        self.sources = torch.arange(count)[:, None]

    def start(self, source: Tensor, source_mask: Tensor | None = None) -> MarkovState:
        self.state = MarkovState(source[:, 0])
        return self.state

    def step(self, tokens: Tensor, state: MarkovState) -> Tensor:
        targets = tokens.shape[0] // state.chains.shape[0]
        state.chains = state.chains.repeat_interleave(targets)
        state.previous = state.previous.repeat_interleave(targets)
        result = self.log_probs[state.chains[:, None], state.previous[:, None], tokens]
        state.previous = tokens[:, 0]
        return result


def search(chains: MarkovChains, width: int, length_penalty: float) -> Decoded:
    return beam_search(
        chains,
        chains.sources,
        bos_id=V,
        eos_id=EOS,
        max_length=MAX_LENGTH,
        beam_width=width,
        length_penalty=length_penalty,
    )


def score(log_prob: Tensor, lengths: Tensor, length_penalty: float) -> Tensor:
    return log_prob / ((5 + lengths.double()) / 6) ** length_penalty


@pytest.mark.parametrize("length_penalty", PENALTIES)
def test_beams_are_never_worse_than_greedy(length_penalty):
    """Beams prune the greedy target's prefix in some chains, and in some it ends after theirs."""
    chains = MarkovChains(2000)
    greedy = greedy_search(chains, chains.sources, bos_id=V, eos_id=EOS, max_length=MAX_LENGTH)
    bar = score(greedy.scores, greedy.lengths, length_penalty)
    for width in (1, 2, 3, 4):
        best = search(chains, width, length_penalty).scores[:, 0]
        assert (best >= bar - 1e-12).all()
        better = (best > bar + 1e-12).sum()
        assert better > 200 if width > 1 else better == 0


def search_to_the_end(
    log_probs: list[Any], width: int, length_penalty: float
) -> list[tuple[float, tuple[int, ...]]]:
    """Returns the best targets of one chain with their scores, by a search that never stops early.

    Args:
        log_probs: of each token after the last two, (V + 1, V + 1, V), as lists.
    """

    def extended(target: tuple[int, ...]) -> list[tuple[float, tuple[int, ...]]]:
        last_two = (V, V, *target)[-2:]
        return [
            (log_prob, (*target, token))
            for token, log_prob in enumerate(log_probs[last_two[0]][last_two[1]])
        ]

    found: dict[tuple[int, ...], float] = {}
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    greedy: tuple[float, tuple[int, ...]] | None = (0.0, ())
    for length in range(1, MAX_LENGTH + 1):
        last = length == MAX_LENGTH
        extensions = sorted(
            ((total + more, target) for total, begun in beams for more, target in extended(begun)),
            reverse=True,
        )
        beams = [each for each in extensions if each[1][-1] != EOS][:width]
        ended = [each for each in extensions[:width] if each[1][-1] == EOS]
        if greedy is not None:
            more, target = max(extended(greedy[1]))
            greedy = greedy[0] + more, target
            if last or target[-1] == EOS:
                ended.append(greedy)
                greedy = None
        penalty = ((5 + length) / 6) ** length_penalty
        for total, target in ended + (beams if last else []):
            found[target] = total / penalty
    return sorted(((score, target) for target, score in found.items()), reverse=True)[:width]


@pytest.mark.parametrize("length_penalty", PENALTIES)
def test_beams_stop_only_where_nothing_better_can_come(length_penalty):
    chains = MarkovChains(500)
    each = chains.log_probs.tolist()
    for width in (2, 3, 4):
        found = search(chains, width, length_penalty)
        wanted = [search_to_the_end(chain, width, length_penalty) for chain in each]
        scores = torch.tensor([[x for x, _ in best] for best in wanted], dtype=torch.float64)
        torch.testing.assert_close(found.scores, scores)
        for row, best in enumerate(wanted):
            targets = zip(found.tokens[row].tolist(), found.lengths[row].tolist(), strict=True)
            assert [tuple(tokens[:length]) for tokens, length in targets] == [x for _, x in best]


def everything() -> list[tuple[int, ...]]:
    """Returns all targets that end within MAX_LENGTH or are cut there."""
    going_on = [token for token in range(V) if token != EOS]
    ended = [
        (*begun, EOS) for n in range(MAX_LENGTH) for begun in itertools.product(going_on, repeat=n)
    ]
    return ended + list(itertools.product(going_on, repeat=MAX_LENGTH))


@pytest.mark.parametrize("length_penalty", PENALTIES)
def test_a_width_that_prunes_nothing_finds_the_best(length_penalty):
    """Such a width keeps every prefix; it may drop ends of low rank."""
    chains, targets = MarkovChains(100), everything()
    log_probs = [
        sum(
            chains.log_probs[:, a, b, c]
            for a, b, c in zip((V, V, *target), (V, *target), target, strict=False)
        )
        for target in targets
    ]
    lengths = torch.tensor([len(target) for target in targets])
    scores = score(torch.stack(log_probs, 1), lengths, length_penalty)
    prefixes = (V - 1) ** (MAX_LENGTH - 1)
    for width in (prefixes, prefixes + 1, len(targets)):
        found = search(chains, width, length_penalty)
        best = scores.max(1)
        torch.testing.assert_close(found.scores[:, 0], best.values)
        for tokens, length, place in zip(
            found.tokens[:, 0].tolist(), found.lengths[:, 0], best.indices, strict=True
        ):
            assert tuple(tokens[:length]) == targets[place]
    found = search(chains, len(targets), length_penalty)
    torch.testing.assert_close(found.scores, scores.sort(1, descending=True).values)


@pytest.mark.parametrize("width", [8, 400])
def test_places_after_a_hypothesis_hold_eos(width):
    """Places of hypotheses that were not found hold it as well."""
    chains = MarkovChains(50)
    chains.log_probs[..., 1:3] = -math.inf
    found = search(chains, width, 0.6)
    after = torch.arange(MAX_LENGTH) >= found.lengths[..., None]
    assert found.tokens[after].eq(EOS).all()
    assert found.lengths.eq(0).any()  # there are only six targets


def test_a_search_reorders_only_between_steps():
    chains = MarkovChains(20)
    search(chains, 3, 2.0)
    assert chains.state.reorders <= MAX_LENGTH - 1


def test_narrow_beams_prune():
    """Otherwise the tests above would pass without a search."""
    chains = MarkovChains(500)
    widths = (2, len(everything()))
    narrow, wide = (search(chains, width, 0.6).scores[:, 0] for width in widths)
    assert (wide >= narrow).all()
    assert (wide > narrow).sum() > 5
    assert not math.isinf(narrow.min())


class OneToken:
    """A model with a vocabulary of one token."""

    training = False
    max_target_length = None

    def start(self, source: Tensor, source_mask: Tensor | None = None) -> OneToken:
        return self

    def reorder(self, rows: Tensor) -> None:
        pass

    def step(self, tokens: Tensor, state: OneToken) -> Tensor:
        return torch.zeros(*tokens.shape, 1, dtype=torch.float64)


@pytest.mark.parametrize(("eos_id", "length"), [(0, 1), (None, MAX_LENGTH)])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_vocabulary_of_one_token_has_one_target(width, eos_id, length):
    source = torch.zeros(3, 1, dtype=torch.long)
    found = beam_search(
        OneToken(), source, bos_id=0, eos_id=eos_id, max_length=MAX_LENGTH, beam_width=width
    )
    assert found.lengths.tolist() == [[length] + [0] * (width - 1)] * 3
    assert (found.tokens[:, 0, :length] == 0).all()
    assert not found.scores[:, 0].any()
    assert found.scores[:, 1:].eq(-math.inf).all()


class Urn:
    """A language model with the same logits after every token."""

    training = False
    max_target_length = None

    def __init__(self, logits: list[float], dtype: torch.dtype = torch.float32) -> None:
        self.of_one = torch.tensor(logits, dtype=dtype)

    def start(self, source: Tensor, source_mask: Tensor | None = None) -> Urn:
        self.logits = self.of_one.expand(len(source), -1)
        return self

    def reorder(self, rows: Tensor) -> None:
        self.logits = self.logits[rows]

    def step(self, tokens: Tensor, state: Urn) -> Tensor:
        return self.of_one.expand(*tokens.shape, -1)


@pytest.mark.parametrize("top_k", [1, 2, 3, 9])
def test_no_more_tokens_are_drawn_than_asked_for(top_k):
    """This holds for equally likely tokens, too."""
    drawn = sample(
        Urn([1.0, 1.0, 0.0, 1.0]), torch.zeros(1000, 1, dtype=torch.long), 2, top_k=top_k
    )
    counts = drawn[:, 1:].flatten().bincount(minlength=4)
    assert counts.count_nonzero() == min(top_k, 4)
    assert top_k > 3 or counts[2] == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_low_temperature_takes_no_logits_to_infinity(dtype):
    drawn = sample(
        Urn([1.0, 3.0, 2.0], dtype), torch.zeros(9, 1, dtype=torch.long), 2, temperature=1e-5
    )
    assert (drawn[:, 1:] == 1).all()
