"""Greedy and beam search and sampling, for every model that writes a text token by token.

An encoder-decoder reads a source and writes a target that begins with a special token. A language
model continues its source, the prompt.

In the shapes below B is the number of sources, S the length of the longest, W the beams for each
source, N the targets being written, and V the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "Decoded",
    "HasMode",
    "Model",
    "PromptState",
    "Reorderable",
    "beam_search",
    "check_evaluating",
    "greedy_search",
    "sample",
]


class Reorderable(Protocol):
    """The state from which a model continues decoding."""

    def reorder(self, rows: Tensor) -> None:
        """Keep the targets with these indices, in this order; an index may repeat.

        A target's new row belongs to the same source as its old one.
        """


State = TypeVar("State", bound=Reorderable)


@runtime_checkable
class PromptState(Reorderable, Protocol):
    """The state of a language model that has read a prompt."""

    logits: Tensor  # (B, V), for the token after each prompt
    max_target_length: int | None  # the most tokens that may follow; None if there is no limit


class HasMode(Protocol):
    """Any ``torch.nn.Module``."""

    training: bool


class Model(HasMode, Protocol[State]):
    """The interface of a model that a search can run."""

    @property
    def max_target_length(self) -> int | None:
        """The most target tokens that the model can read; None if there is no limit."""

    def start(self, source: Tensor, source_mask: Tensor | None = None) -> State:
        """Read integers (B, S); the bool mask (B, S) is True where a token is real.

        A language model returns a :class:`PromptState`.
        """

    def step(self, tokens: Tensor, state: State) -> Tensor:
        """Add n further tokens (N, n) to the state; return the logits (N, n, V) after each.

        N is a multiple of B; the targets of one source are adjacent.
        """


class Decoded(NamedTuple):
    """The best W hypotheses that a search found for each of B sources.

    Greedy search has no dimension W.
    """

    tokens: Tensor  # integers (B, W, max_length), without ``bos_id`` or the prompt; all places
    # after the hypothesis hold ``eos_id``, or −1 if that is None
    lengths: Tensor  # integers (B, W), including the ``eos_id`` if it came within max_length
    scores: Tensor  # (B, W), log P, in beam search divided by the length penalty; best first


@torch.no_grad()
def greedy_search(
    model: Model[State],
    source: Tensor,
    source_mask: Tensor | None = None,
    *,
    bos_id: int | None = None,
    eos_id: int | None = None,
    max_length: int,
) -> Decoded:
    """Take the likeliest token at each step, until ``eos_id``.

    Args:
        model: in evaluation mode.
        source: integers (B, S); a language model's prompts.
        source_mask: bool (B, S), True where a token is real.
        bos_id: the token that begins every target. None: a target follows its source directly,
            which only language models can do.
        eos_id: the token that ends it. None: it ends only at ``max_length``.
        max_length: the most tokens to return, ``eos_id`` included.

    Raises:
        ValueError: the model is in training mode; ``max_length`` is below 1 or above the model's,
            if that has a limit; or ``bos_id`` is None and the model is no language model.
    """
    state, next_log_probs = _start(model, source, source_mask, bos_id, max_length)
    B, end = source.shape[0], _NONE if eos_id is None else eos_id
    tokens = source.new_full((B, max_length), end)
    lengths = source.new_zeros(B)
    running = torch.ones(B, dtype=torch.bool, device=source.device)
    log_probs = None
    for place in range(max_length):
        best = next_log_probs.max(-1)
        values = best.values * running
        log_probs = values if log_probs is None else log_probs + values
        tokens[:, place] = best.indices.where(running, tokens[:, place])
        lengths += running
        running = running & (best.indices != end)
        if place + 1 == max_length or not running.any():
            break
        next_log_probs = _next_log_probs(model, best.indices[:, None], state)
    assert log_probs is not None
    return Decoded(tokens, lengths, log_probs)


@torch.no_grad()
def beam_search(
    model: Model[State],
    source: Tensor,
    source_mask: Tensor | None = None,
    *,
    bos_id: int | None = None,
    eos_id: int | None = None,
    max_length: int,
    beam_width: int = 4,
    length_penalty: float = 0.6,
) -> Decoded:
    """Find the likeliest targets by a search of limited width.

    Each step extends every beam by every token. Among the W best extensions, those that end become
    hypotheses. The W best extensions that do not end become the next beams. The W best hypotheses
    are kept. A source is done when neither a beam nor the greedy target could still become better
    than the worst of these. At ``max_length`` both become hypotheses too. The greedy target is
    continued beside the beams, so the best hypothesis is never worse than that of greedy search, up
    to rounding. The state therefore holds W + 1 targets for each source. With W = 1 this is greedy
    search.

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

    B, rows = source.shape[0], beam_width + 1
    state, next_log_probs = _start(model, source, source_mask, bos_id, max_length, rows)
    end = _NONE if eos_id is None else eos_id
    search = _BeamSearch(source, beam_width, max_length, penalty, end)
    for length in range(1, max_length + 1):
        next_log_probs = next_log_probs.unflatten(0, (B, rows))
        search.extend_beams(next_log_probs[:, :beam_width], length)
        search.extend_greedy(next_log_probs[:, beam_width:], length)
        # log P only falls, and lp grows or falls with the length.
        if not search.goes_on(max_length if length_penalty > 0 else length + 1):
            break
        state.reorder(search.origins())
        next_log_probs = _next_log_probs(model, search.last_tokens(), state)
    return search.found


_NONE = -1  # in the place of an ``eos_id`` that is None; no token equals it


class _BeamSearch:
    """The targets of a beam search as they grow: W beams of each source and its greedy target.

    ``found`` holds the best W hypotheses so far. ``searching`` (B, 1) is True for the sources whose
    hypotheses could still become better.
    """

    def __init__(
        self,
        source: Tensor,
        beam_width: int,
        max_length: int,
        penalty: Callable[[int], float | Tensor],
        end: int,
    ) -> None:
        B, W, device = source.shape[0], beam_width, source.device
        self.max_length, self.penalty, self.end = max_length, penalty, end
        self.batch = torch.arange(B, device=device)[:, None]
        self.beams = source.new_empty((B, W, 0))
        # All W beams are identical at the beginning, so only the first may be extended.
        first = torch.arange(W, device=device).expand(B, W) == 0
        self.log_probs = torch.zeros(B, W, device=device).masked_fill(~first, -math.inf)
        self.parents = source.new_zeros((B, W))  # the previous beam that each beam extends
        self.greedy = source.new_empty((B, 1, 0))
        self.greedy_log_prob = torch.zeros(B, 1, device=device)
        self.greedy_runs = torch.ones(B, 1, dtype=torch.bool, device=device)
        self.searching = torch.ones(B, 1, dtype=torch.bool, device=device)
        self.found = Decoded(
            source.new_full((B, W, max_length), end),
            source.new_zeros((B, W)),
            torch.full((B, W), -math.inf, device=device),
        )

    def extend_beams(self, next_log_probs: Tensor, length: int) -> None:
        """Replace the beams by their W best extensions that do not end."""
        W, V = next_log_probs.shape[1:]
        extended = self.log_probs[..., None] + next_log_probs
        # At most W of the 2 W best end, one for each beam, so at least W do not. With a vocabulary
        # of one token there are only W.
        totals, places = extended.flatten(1).topk(W * min(2, V))
        parents, words = places // V, places % V
        candidates = torch.cat((self.beams[self.batch, parents], words[..., None]), dim=-1)
        ends = words == self.end
        among_best = torch.arange(totals.shape[1], device=totals.device) < W
        self._add(candidates, totals, length, ends & among_best)
        self.log_probs, best = totals.masked_fill(ends, -math.inf).topk(W)
        self.beams, self.parents = candidates[self.batch, best], parents.gather(1, best)
        if length == self.max_length:
            self._add(self.beams, self.log_probs, length, torch.ones_like(self.searching))

    def extend_greedy(self, next_log_probs: Tensor, length: int) -> None:
        """Extend the greedy target by its likeliest token."""
        best = next_log_probs.max(-1)
        self.greedy = torch.cat((self.greedy, best.indices[..., None]), dim=-1)
        self.greedy_log_prob = self.greedy_log_prob + best.values
        ends = self.greedy_runs
        if length < self.max_length:
            ends = ends & (best.indices == self.end)
        self._add(
            self.greedy, self.greedy_log_prob, length, ends & ~_contains(self.found, self.greedy)
        )
        self.greedy_runs = self.greedy_runs & ~ends

    def goes_on(self, length: int) -> bool:
        """Return whether a target could still become better than a hypothesis that was found.

        Args:
            length: the length at which a target of these log probabilities would score best.
        """
        if self.beams.shape[-1] == self.max_length:
            return False
        running = self.greedy_log_prob.masked_fill(~self.greedy_runs, -math.inf)
        best = torch.cat((self.log_probs, running), 1).amax(1, keepdim=True)
        bound = best / self.penalty(length)
        self.searching = self.searching & (bound > self.found.scores[:, -1:])
        return bool(self.searching.any())

    def origins(self) -> Tensor:
        """Return the row of the state, of all B (W + 1), that each target extends."""
        W = self.beams.shape[1]
        greedy = torch.full_like(self.batch, W)
        return (self.batch * (W + 1) + torch.cat((self.parents, greedy), 1)).flatten()

    def last_tokens(self) -> Tensor:
        """Return the last token of each target, (B (W + 1), 1)."""
        return torch.cat((self.beams[..., -1], self.greedy[..., -1]), 1).view(-1, 1)

    def _add(self, candidates: Tensor, log_probs: Tensor, length: int, eligible: Tensor) -> None:
        scores = log_probs / self.penalty(length)
        self.found = _merge(self.found, candidates, scores, eligible & self.searching, self.end)


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
    model: Model[State],
    source: Tensor,
    source_mask: Tensor | None,
    bos_id: int | None,
    max_length: int,
    rows: int = 1,
) -> tuple[State, Tensor]:
    """The state for ``rows`` targets of each source, and log P (B · rows, V) of their first tokens.

    The targets of one source are adjacent.
    """
    check_evaluating(model)
    _check_max_length(max_length, model.max_target_length, "the model's ")
    state = model.start(source, source_mask)
    logits = None
    if isinstance(state, PromptState):
        _check_max_length(max_length, state.max_target_length, "what the prompt leaves, ")
        logits = state.logits
    if bos_id is not None:
        first = source.new_full((len(source) * rows, 1), bos_id)
        return state, _next_log_probs(model, first, state)
    if logits is None:
        raise ValueError("bos_id: expected a token, as the model is no language model; got None")
    if rows > 1:
        state.reorder(torch.arange(len(source), device=source.device).repeat_interleave(rows))
    return state, _log_softmax(logits).repeat_interleave(rows, 0)


def _check_max_length(max_length: int, limit: int | None, whose: str) -> None:
    if max_length < 1 or (limit is not None and max_length > limit):
        wanted = "at least 1" if limit is None else f"from 1 to {whose}{limit}"
        raise ValueError(f"max_length: expected {wanted}; got {max_length}")


def check_evaluating(model: HasMode) -> None:
    """Raise a ValueError where the model is in training mode."""
    if model.training:
        raise ValueError("model: expected one in evaluation mode, after model.eval()")


def _next_log_probs(model: Model[State], last: Tensor, state: State) -> Tensor:
    """log P (N, V) of the token after the newest ones (N, 1), in float32 or wider."""
    return _log_softmax(model.step(last, state)[:, -1])


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


@torch.no_grad()
def sample(
    model: Model[State],
    prompt: Tensor,
    new_tokens: int,
    *,
    prompt_mask: Tensor | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    eos_id: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue texts by drawing from a language model's predictions.

    Args:
        model: in evaluation mode.
        prompt: integers (B, L), at least one token in each row.
        new_tokens: how many to append; 0 returns the prompt.
        prompt_mask: bool (B, L), True where a token is real; padding comes after a row's tokens.
        temperature: the logits are divided by it; below 1 likely tokens become likelier.
        top_k: draw among the k likeliest tokens only; which of equal ones is torch's choice.
        eos_id: a text ends with this token; all places after it hold it too.
        generator: the random generator. Default: torch's own.

    Returns:
        Integers (B, L + new_tokens): the prompt with its padding, then the new tokens.

    Raises:
        ValueError: the model is in training mode, or no language model; the prompt is empty, or the
            mask is not as above; ``new_tokens`` is below 0 or more than the model can append,
            ``temperature`` not above 0 or ``top_k`` below 1.
    """
    check_evaluating(model)
    if new_tokens < 0:
        raise ValueError(f"new_tokens: expected at least 0; got {new_tokens}")
    if not temperature > 0:
        raise ValueError(f"temperature: expected a number above 0; got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k: expected at least 1; got {top_k}")
    state = model.start(prompt, prompt_mask)
    if not isinstance(state, PromptState):
        raise ValueError(f"model: expected a language model; got {type(model).__name__}")
    limit = state.max_target_length
    if limit is not None and new_tokens > limit:
        raise ValueError(f"new_tokens: expected at most {limit} after the prompt; got {new_tokens}")
    text, logits = prompt, state.logits
    running = torch.ones(len(prompt), 1, dtype=torch.bool, device=prompt.device)
    for place in range(new_tokens):
        # In float32, because a low temperature takes 16-bit logits to infinity.
        scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        if top_k is not None:
            values, likeliest = scaled.topk(min(top_k, scaled.shape[-1]))
            scaled = torch.full_like(scaled, -math.inf).scatter_(-1, likeliest, values)
        newest = torch.multinomial(scaled.softmax(-1), 1, generator=generator)
        if eos_id is not None:
            newest = newest.masked_fill(~running, eos_id)
            running = running & (newest != eos_id)
        text = torch.cat((text, newest), 1)
        if eos_id is not None and not running.any():
            return F.pad(text, (0, new_tokens - place - 1), value=eos_id)
        if place + 1 < new_tokens:
            logits = model.step(newest, state)[:, -1]
    return text
