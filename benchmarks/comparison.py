"""The rows of a comparison: our figures beside the peers', a ceiling and a target."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trifuse.benchmarks.ceilings import Rate
from trifuse.benchmarks.timing import Timing, percentile


@dataclass(frozen=True)
class Result:
    """One row of a comparison.

    Attributes:
        case, step, shape: what was computed; ``step`` is "forward" or "forward + backward".
        ours: our times.
        peers: times by name of the peers that can serve the case.
        refused: why the other peers can't, by name.
        work: operations, bytes or tokens that the case requires.
        ceiling: the machine's highest rate for that work.
        unit: "FLOP", "B" or "token".
        also: our times with kernels other than those that a call gets, by name.
        against: the peers to compare with, as far as they serve the case; all peers if empty or if
            none of them does.
        at_least: target for the ratio, the fastest peer's time over ours.
        at_least_against: targets for the time of single peers over ours, by name, as far as they
            serve the case.
        at_least_fraction: target for the fraction of the ceiling.
        at_most: limit on our own seconds, beside the other targets.
        at_most_over: limit on our seconds beyond the fastest peer's, for calls so short that only
            their overhead counts; the other targets then don't.
    """

    case: str
    step: str
    shape: str
    ours: Timing
    peers: Mapping[str, Timing]
    refused: Mapping[str, str]
    work: float
    ceiling: Rate
    unit: str = "FLOP"
    at_least: float | None = None
    at_most_over: float | None = None
    at_least_fraction: float | None = None
    at_most: float | None = None
    also: Mapping[str, Timing] = field(default_factory=dict)
    against: Sequence[str] = ()
    at_least_against: Mapping[str, float] = field(default_factory=dict)

    @property
    def fastest_peer(self) -> str:
        names = [name for name in self.peers if name in self.against] or list(self.peers)
        return min(names, key=lambda name: self.peers[name].median)

    @property
    def ratios(self) -> list[float]:
        """The fastest peer's time over ours, round by round."""
        return self.ours.ratios(self.peers[self.fastest_peer])

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def also_ratios(self) -> dict[str, float]:
        """The speed of our other kernels relative to those that a call gets, by name."""
        return {
            name: statistics.median(timing.ratios(self.ours)) for name, timing in self.also.items()
        }

    @property
    def peer_ratios(self) -> dict[str, float]:
        """Each peer's time over ours, by name."""
        return {
            name: statistics.median(self.ours.ratios(timing)) for name, timing in self.peers.items()
        }

    @property
    def met_against(self) -> dict[str, bool]:
        """Whether we meet the target against each single peer that has one, by name."""
        ratios = self.peer_ratios
        return {
            name: ratios[name] >= least
            for name, least in self.at_least_against.items()
            if name in ratios
        }

    @property
    def over(self) -> float:
        """Seconds per call that we take beyond the fastest peer; below 0 if we are faster."""
        return self.ours.over(self.peers[self.fastest_peer])

    @property
    def met_at_most(self) -> bool:
        """Whether our median keeps within the limit on our seconds; True without a limit."""
        return self.at_most is None or self.ours.median <= self.at_most

    @property
    def met_at_least(self) -> bool:
        """Whether the ratio meets its target, or the overhead its limit; True without either."""
        if self.at_most_over is not None:
            return self.over <= self.at_most_over
        return self.at_least is None or self.ratio >= self.at_least

    @property
    def met_fraction(self) -> bool:
        """Whether we reach the target fraction of the ceiling; True without a target."""
        return self.at_least_fraction is None or self.fraction >= self.at_least_fraction

    @property
    def met(self) -> bool:
        if self.at_most_over is not None:
            return self.met_at_least
        return (
            self.met_at_least
            and self.met_fraction
            and all(self.met_against.values())
            and self.met_at_most
        )

    @property
    def achieved(self) -> float:
        return self.work / self.ours.median

    @property
    def fraction(self) -> float:
        return self.achieved / self.ceiling.value

    def record(self) -> dict[str, Any]:
        """The entry for the JSON file, in seconds, bytes, FLOP, and rates per second."""
        return {
            "case": self.case,
            "step": self.step,
            "shape": self.shape,
            "ours": _summary(self.ours),
            "also": {name: _summary(timing) for name, timing in self.also.items()},
            "also_ratios": self.also_ratios,
            "peers": {name: _summary(timing) for name, timing in self.peers.items()},
            "refused": dict(self.refused),
            "fastest_peer": self.fastest_peer,
            "ratio": self.ratio,
            "ratio_p10": percentile(self.ratios, 10),
            "ratio_p90": percentile(self.ratios, 90),
            "peer_ratios": self.peer_ratios,
            "over": self.over,
            "at_least": self.at_least,
            "at_least_against": dict(self.at_least_against),
            "at_most": self.at_most,
            "at_most_over": self.at_most_over,
            "at_least_fraction": self.at_least_fraction,
            "met": self.met,
            "work": self.work,
            "unit": self.unit,
            "achieved": self.achieved,
            "ceiling": self.ceiling.value,
            "ceiling_source": self.ceiling.source,
            "fraction_of_ceiling": self.fraction,
        }


@dataclass(frozen=True)
class MemoryResult:
    """Peak bytes beyond inputs and results: ours, the peers', and the limit for ours."""

    case: str
    step: str
    shape: str
    ours: int
    peers: Mapping[str, int]
    at_most: int

    @property
    def met(self) -> bool:
        return self.ours <= self.at_most

    def record(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "step": self.step,
            "shape": self.shape,
            "ours": self.ours,
            "peers": dict(self.peers),
            "at_most": self.at_most,
            "met": self.met,
        }


def _summary(timing: Timing) -> dict[str, float]:
    return {
        "median": timing.median,
        "p10": timing.percentile(10),
        "p90": timing.percentile(90),
        "rounds": len(timing.seconds),
    }
