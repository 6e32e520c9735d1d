"""A plan's load, run: for each member what was expected against what came."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tunerd.colocation.bench import Benched, bench
from tunerd.colocation.load.generator import DONE
from tunerd.colocation.plan import Plan
from tunerd.colocation.planning.placement import Expected, Forecast
from tunerd.stats.tail import samples_needed


@dataclass(frozen=True)
class Proven:
    """One member. Latencies count from the moment at which a request was meant to come."""

    expected: Expected
    asked: int
    answered: int
    p50_secs: float | None  # None: too few answers to tell
    tail_secs: float | None
    per_sec: float
    within: float | None  # the part of all requests that was answered within the objective

    @property
    def is_kept(self) -> bool | None:
        """Whether it has what it was promised; None where it cannot be told."""
        if self.expected.slo_secs is None:
            return self.answered == self.asked if self.asked else None
        return None if self.within is None else self.within >= self.expected.part

    def off(self, which: str) -> float | None:
        """Return by how much `p50` or `tail` is over what was expected: 0.1 is 10%."""
        came = self.p50_secs if which == "p50" else self.tail_secs
        meant = self.expected.p50_secs if which == "p50" else self.expected.tail_secs
        return None if came is None else came / meant - 1


@dataclass(frozen=True)
class Proof:
    members: tuple[Proven, ...]
    benched: Benched

    @property
    def is_kept(self) -> bool:
        return all(each.is_kept is not False for each in self.members)


def prove(plan: Plan, forecast: Forecast, say: Callable[[str], None]) -> Proof:
    """Run a plan with its load; raises as Engine.start does."""
    benched = bench(plan, (), say)
    (rounds,) = benched.rounds
    window_secs = benched.results[0].window_secs
    found = []
    for expected in forecast.expected:
        samples = [s for o in rounds.together for s in o.counted if s.member == expected.member]
        latencies = [s.latency_secs for s in samples if s.end == DONE]
        slo_secs = expected.slo_secs
        met = None if slo_secs is None else sum(secs <= slo_secs for secs in latencies)
        found.append(
            Proven(
                expected=expected,
                asked=len(samples),
                answered=len(latencies),
                p50_secs=_quantile(latencies, 0.5),
                tail_secs=_quantile(latencies, expected.part),
                per_sec=len(latencies) / window_secs,
                within=met / len(samples) if met is not None and samples else None,
            )
        )
    return Proof(tuple(found), benched)


def _quantile(latencies: Sequence[float], part: float) -> float | None:
    """Return a quantile, None where too few samples lie beyond it."""
    if len(latencies) < samples_needed(100 * part):
        return None
    return float(np.quantile(latencies, part))
