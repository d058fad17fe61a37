"""Greedy and beam search, for every model that reads a source and writes a target token by token.

In the shapes below B is the number of sources, S the length of the longest, W the beams for each
source, N the targets being written, and V the vocabulary.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "Decoded",
    "HasMode",
    "Model",
    "Reorderable",
    "beam_search",
    "check_evaluating",
    "greedy_search",
]


class Reorderable(Protocol):
    """The state from which a model continues decoding."""

    def reorder(self, rows: Tensor) -> None:
        """Keep the targets with these indices, in this order; an index may repeat.

        A target's new row belongs to the same source as its old one.
        """


State = TypeVar("State", bound=Reorderable)


class HasMode(Protocol):
    """Any ``torch.nn.Module``."""

    training: bool


class Model(HasMode, Protocol[State]):
    """The interface of a model that a search can run."""

    @property
    def max_target_length(self) -> int | None:
        """The most target tokens that the model can read; None if there is no limit."""

    def start(self, source: Tensor, source_mask: Tensor | None = None) -> State:
        """Read integers (B, S); the bool mask (B, S) is True where a token is real."""

    def step(self, tokens: Tensor, state: State) -> Tensor:
        """Add n further tokens (N, n) to the state; return the logits (N, n, V) after each.

        N is a multiple of B; the targets of one source are adjacent.
        """


class Decoded(NamedTuple):
    """The best W hypotheses that a search found for each of B sources.

    Greedy search has no dimension W.
    """

    tokens: Tensor  # integers (B, W, max_length), without ``bos_id``; all places after the
    # hypothesis hold ``eos_id``
    lengths: Tensor  # integers (B, W), including the ``eos_id`` if it came within max_length
    scores: Tensor  # (B, W), log P, in beam search divided by the length penalty; best first


@torch.no_grad()
def greedy_search(
    model: Model[State],
    source: Tensor,
    source_mask: Tensor | None = None,
    *,
    bos_id: int,
    eos_id: int,
    max_length: int,
) -> Decoded:
    """Take the likeliest token at each step, until ``eos_id``.

    Args:
        model: in evaluation mode.
        source: integers (B, S).
        source_mask: bool (B, S), True where a token is real.
        bos_id: the token that begins every target.
        eos_id: the token that ends it.
        max_length: the most tokens to return, ``eos_id`` included.

    Raises:
        ValueError: the model is in training mode, or ``max_length`` is below 1 or above the
            model's, if that has a limit.
    """
    state = _start(model, source, source_mask, max_length)
    B = source.shape[0]
    tokens = source.new_full((B, max_length), eos_id)
    lengths = source.new_zeros(B)
    running = torch.ones(B, dtype=torch.bool, device=source.device)
    last = source.new_full((B, 1), bos_id)
    log_probs = None
    for place in range(max_length):
        best = _next_log_probs(model, last, state).max(-1)
        values = best.values * running
        log_probs = values if log_probs is None else log_probs + values
        tokens[:, place] = best.indices.where(running, tokens[:, place])
        lengths += running
        running = running & (best.indices != eos_id)
        if not running.any():
            break
        last = best.indices[:, None]
    assert log_probs is not None
    return Decoded(tokens, lengths, log_probs)


@torch.no_grad()
def beam_search(
    model: Model[State],
    source: Tensor,
    source_mask: Tensor | None = None,
    *,
    bos_id: int,
    eos_id: int,
    max_length: int,
    beam_width: int = 4,
    length_penalty: float = 0.6,
) -> Decoded:
    """Find the likeliest targets by a search of limited width.

    Each step extends every beam by every token. Those of the W best extensions that end become
    hypotheses, and the W best that do not end become the next beams. The W best hypotheses are
    kept. A source is done when neither a beam nor the greedy target could still become better than
    the worst of these. At ``max_length`` both become hypotheses too. The greedy target is followed
    beside the beams, so the best hypothesis is, up to rounding, never worse than greedy search's;
    the state therefore holds W + 1 targets of each source. With W = 1 this is greedy search.

    Hypotheses are ranked by ``log P(Y | X) / lp(Y)``, ``lp(Y) = ((5 + |Y|) / 6)^α`` (Wu et al.,
    "Google's Neural Machine Translation System", 2016, eq. 14 without its coverage penalty);
    ``|Y|`` is the length with ``eos_id``. If fewer than W are found, the others have length 0 and
    score −inf.

    Args:
        model, source, source_mask, bos_id, eos_id, max_length: as in :func:`greedy_search`.
        beam_width: W.
        length_penalty: α. 0 ranks by probability, which prefers short hypotheses.

    Raises:
        ValueError: as :func:`greedy_search`; or ``beam_width`` is below 1, or ``length_penalty``
            is not finite.
    """
    if beam_width < 1:
        raise ValueError(f"beam_width: expected at least 1; got {beam_width}")
    if not math.isfinite(length_penalty):
        raise ValueError(f"length_penalty: expected a finite number; got {length_penalty}")

    def penalty(length: int | Tensor) -> float | Tensor:
        return ((5 + length) / 6) ** length_penalty

    if beam_width == 1:
        tokens, lengths, scores = greedy_search(
            model, source, source_mask, bos_id=bos_id, eos_id=eos_id, max_length=max_length
        )
        scores = scores / penalty(lengths.to(scores.dtype))
        return Decoded(tokens.long()[:, None], lengths.long()[:, None], scores[:, None])

    state = _start(model, source, source_mask, max_length)
    B, W, device = source.shape[0], beam_width, source.device
    batch = torch.arange(B, device=device)[:, None]
    rows = W + 1  # the state holds these for each source: its beams, then its greedy target
    last = source.new_full((B * rows, 1), bos_id)
    beams = source.new_empty((B, W, 0))
    # The W beams are all alike at the beginning, so only the first may be extended.
    first = torch.arange(W, device=device).expand(B, W) == 0
    log_probs = torch.zeros(B, W, device=device).masked_fill(~first, -math.inf)
    greedy = source.new_empty((B, 1, 0))
    greedy_log_prob = torch.zeros(B, 1, device=device)
    greedy_runs = torch.ones(B, 1, dtype=torch.bool, device=device)
    found = Decoded(
        source.new_full((B, W, max_length), eos_id),
        source.new_zeros((B, W)),
        torch.full((B, W), -math.inf, device=device),
    )
    searching = torch.ones(B, 1, dtype=torch.bool, device=device)
    for length in range(1, max_length + 1):
        next_log_probs = _next_log_probs(model, last, state).unflatten(0, (B, rows))
        extended = log_probs[..., None] + next_log_probs[:, :W]
        V = extended.shape[-1]
        # At most W of the 2 W best end, one for each beam, so at least W do not.
        totals, places = extended.flatten(1).topk(2 * W)
        origins, words = places // V, places % V
        candidates = torch.cat((beams[batch, origins], words[..., None]), dim=-1)
        ends = words == eos_id
        new = ends & searching & (torch.arange(2 * W, device=device) < W)
        found = _merge(found, candidates, totals / penalty(length), new, eos_id)
        log_probs, kept = totals.masked_fill(ends, -math.inf).topk(W)
        beams = candidates[batch, kept]

        greedy_word = next_log_probs[:, W:].max(-1)
        greedy = torch.cat((greedy, greedy_word.indices[..., None]), dim=-1)
        greedy_log_prob = greedy_log_prob + greedy_word.values
        greedy_ends = greedy_runs & (greedy_word.indices == eos_id)
        if length == max_length:
            found = _merge(found, beams, log_probs / penalty(length), searching, eos_id)
            greedy_ends = greedy_runs
        new = greedy_ends & searching & ~_contains(found, greedy)
        found = _merge(found, greedy, greedy_log_prob / penalty(length), new, eos_id)
        greedy_runs = greedy_runs & ~greedy_ends
        if length == max_length:
            break

        # No score can exceed this one: log P only falls, and lp grows or falls with the length.
        running = greedy_log_prob.masked_fill(~greedy_runs, -math.inf)
        best = torch.cat((log_probs, running), 1).amax(1, keepdim=True)
        bound = best / penalty(max_length if length_penalty > 0 else length + 1)
        searching = searching & (bound > found.scores[:, -1:])
        if not searching.any():
            break
        last = torch.cat((words.gather(1, kept), greedy_word.indices), 1).view(B * rows, 1)
        from_rows = torch.cat((origins.gather(1, kept), torch.full_like(batch, W)), 1)
        state.reorder((batch * rows + from_rows).flatten())
    return found


def _merge(
    found: Decoded, candidates: Tensor, scores: Tensor, eligible: Tensor, eos_id: int
) -> Decoded:
    """Return the best W among those found and the eligible candidates (B, n, length)."""
    length, max_length = candidates.shape[-1], found.tokens.shape[-1]
    scores = scores.masked_fill(~(eligible & scores.isfinite()), -math.inf)
    best, kept = torch.cat((found.scores, scores), 1).topk(found.scores.shape[1])
    candidates = candidates.masked_fill(~scores.isfinite()[..., None], eos_id)
    candidates = F.pad(candidates, (0, max_length - length), value=eos_id)
    batch = torch.arange(len(kept), device=kept.device)[:, None]
    tokens = torch.cat((found.tokens, candidates), 1)[batch, kept]
    lengths = torch.cat((found.lengths, scores.isfinite() * length), 1).gather(1, kept)
    return Decoded(tokens, lengths, best)


def _contains(found: Decoded, sequence: Tensor) -> Tensor:
    """Return whether the sequence (B, 1, length) is among a source's hypotheses: (B, 1)."""
    length = sequence.shape[-1]
    same = (found.tokens[..., :length] == sequence).all(-1) & (found.lengths == length)
    return same.any(1, keepdim=True)


def _start(
    model: Model[State], source: Tensor, source_mask: Tensor | None, max_length: int
) -> State:
    check_evaluating(model)
    limit = model.max_target_length
    if max_length < 1 or (limit is not None and max_length > limit):
        wanted = "at least 1" if limit is None else f"from 1 to the model's {limit}"
        raise ValueError(f"max_length: expected {wanted}; got {max_length}")
    return model.start(source, source_mask)


def check_evaluating(model: HasMode) -> None:
    """Raise a ValueError where the model is in training mode."""
    if model.training:
        raise ValueError("model: expected one in evaluation mode, after model.eval()")


def _next_log_probs(model: Model[State], last: Tensor, state: State) -> Tensor:
    """log P (N, V) of the token after the newest ones (N, 1), in float32 or wider."""
    logits = model.step(last, state)[:, -1]
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
