"""Which of several policies met a plan's objectives best, by what came of the same requests.

An objective is a member's SLO, and its measure the part of all requests that were answered within
it: what was refused was not. Requests of one burst fare alike, so that they are no independent
draws: the window is cut into stretches of one burst each, and a difference between two policies is
that of their stretches, which had the same arrivals, with Student's t over stretches. Each policy
runs once, one after another: a machine that changes meanwhile is not in the interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tunerd.colocation.load.arrivals import BURST_PERIOD_SECS
from tunerd.colocation.load.generator import DONE, Observed, Sample
from tunerd.colocation.load.result import LoadResult
from tunerd.colocation.plan import Member
from tunerd.stats.interval import Floats
from tunerd.stats.rounds import difference_over_rounds

_LEAST = 4  # stretches, of which a difference is told


@dataclass(frozen=True)
class Best:
    """The policies that met the objectives best, and those behind them; best first.

    foremost: several where they cannot be told apart from the first.
    is_short: there were too few stretches to tell anything.
    """

    foremost: tuple[LoadResult, ...]
    behind: tuple[LoadResult, ...]
    is_short: bool


def best_of(
    results: Sequence[LoadResult],
    rounds: Sequence[Sequence[Observed]],
    members: Sequence[Member],
) -> Best | None:
    """Return which of the results are best; None for fewer than two, or without an objective.

    Args:
        rounds: all requests of each result.
    """
    slo_secs = {m.name: m.slo_ms / 1e3 for m in members if m.slo_ms is not None}
    if len(results) < 2 or not slo_secs:
        return None
    met = [_met(each, slo_secs) for each in rounds]
    order = sorted(range(len(results)), key=lambda i: -(results[i].attainment or 0.0))
    first, *others = order
    is_short = len(met[first]) < _LEAST

    def is_behind(other: int) -> bool:
        differences = met[first] - met[other]
        return difference_over_rounds(differences, family=len(others)).low > 0

    behind = [] if is_short else [i for i in others if is_behind(i)]
    return Best(
        tuple(results[i] for i in order if i not in behind),
        tuple(results[i] for i in behind),
        is_short,
    )


def _met(rounds: Sequence[Observed], slo_secs: dict[str, float]) -> Floats:
    """Return for each stretch what was met in it, so that the mean is the attainment of all."""
    stretches: list[int] = []
    asked = 0
    for observed in rounds:
        first, last = observed.window
        found = [0] * max(1, int((last - first) / BURST_PERIOD_SECS + 1e-9))
        for sample in observed.counted:
            if sample.member in slo_secs:
                asked += 1
                at = int((sample.meant_at - first) / BURST_PERIOD_SECS)
                found[min(at, len(found) - 1)] += _is_met(sample, slo_secs[sample.member])
        stretches += found
    return np.array(stretches) * (len(stretches) / max(1, asked))


def _is_met(sample: Sample, slo_secs: float) -> bool:
    return sample.end == DONE and sample.latency_secs <= slo_secs
