"""What a member got beside the others over what it got alone, from rounds in turns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tunerd.colocation.load.generator import DONE, Observed
from tunerd.stats.interval import CONFIDENCE, Floats, percentiles
from tunerd.stats.tail import samples_needed
from tunerd.vocabulary.verdict import Interval

_REDRAWS = 500  # of rounds; each sorts all latencies again


@dataclass(frozen=True)
class AgainstAlone:
    """Ratios beside / alone, of one member, or those of a lane, under the same load in their lanes.

    None where there are too few answers for a percentile, or none. The intervals are by redrawing
    rounds: with one round they have no width.
    """

    member: str  # or lane
    p50: Interval | None
    p99: Interval | None
    per_sec: Interval | None


def against_alone(
    name: str,
    beside: Sequence[Observed],
    alone: Sequence[Observed],
    *,
    members: Collection[str] = (),
    seed: int = 0,
) -> AgainstAlone:
    """Compare the rounds of a member beside all others with as many in which it was alone.

    members: of the lane that is so called; without any, the member itself.
    """
    of = set(members) or {name}
    rows = np.random.default_rng(seed).integers(0, len(beside), (_REDRAWS, len(beside)))
    latencies = [[_latencies(o, of) for o in rounds] for rounds in (beside, alone)]
    rates = [
        [
            len(found) / (o.window[1] - o.window[0])
            for found, o in zip(found_in, rounds, strict=True)
        ]
        for found_in, rounds in zip(latencies, (beside, alone), strict=True)
    ]

    def tail(percentile: int) -> Interval | None:
        if any(sum(map(len, each)) < samples_needed(percentile) for each in latencies):
            return None
        if any(len(found) == 0 for each in latencies for found in each):
            return None  # a redraw may have rounds like that alone

        def ratio(chosen: Sequence[int]) -> float:
            above, below = (np.concatenate([each[i] for i in chosen]) for each in latencies)
            return float(np.percentile(above, percentile) / np.percentile(below, percentile))

        return _interval(ratio, rows)

    def throughput(chosen: Sequence[int]) -> float:
        above, below = (sum(each[i] for i in chosen) for each in rates)
        return above / below

    is_served = all(min(each) > 0 for each in rates)
    return AgainstAlone(
        name, tail(50), tail(99), _interval(throughput, rows) if is_served else None
    )


def _interval(ratio: Callable[[Sequence[int]], float], rows: npt.NDArray[np.int64]) -> Interval:
    value = ratio(range(rows.shape[1]))
    low, high = percentiles(np.array([ratio(row) for row in rows]), CONFIDENCE)
    return Interval(value, low, high)


def _latencies(observed: Observed, members: Collection[str]) -> Floats:
    return np.array(
        [s.latency_secs for s in observed.counted if s.member in members and s.end == DONE]
    )
