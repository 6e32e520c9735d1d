"""Samples of every artifact at every share -> what the share of tuning is worth. No I/O.

The claims are those of Dhakal et al., "Spatial Sharing of GPU for Autotuning DNN models" (arXiv
2008.03602): a model performs best at the share that it was tuned at; one tuned with the full GPU is
poor when the GPU is cut; one tuned with a middle share is robust. In what follows T(a, b) is the
time of the artifact tuned at a, run at b; loss(a, b) is T(a, b) over the least T(x, b) of any
artifact x.

    own     the least T(a, b) / T(b, b) over all a other than b and all b: above one where the
            artifact of each share is the fastest there
    cut     the geometric mean of T(full, b) / T(b, b) over all shares b below the largest
    middle  the worst loss of the least share's or the largest's artifact, whichever is less, over
            the worst loss of the middle share's. The middle is fixed before anything is measured,
            so that it is no choice of the luckiest.

Each answer is yes where the 95% interval lies above 1 + MARGIN, no where it lies below, and cannot
tell otherwise: a difference within 1% is none. The nulls are answers, too.

A round is one value: the median of its samples, of which sample i of all artifacts at a share was
taken in turns. Times are the geometric means of rounds, and intervals are Student's t over rounds
(tunerd/stats/rounds.py); one round alone has none. Of an extreme a yes says that all ratios lie
above, a no that one surely does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tunerd.stats.interval import Floats
from tunerd.stats.rounds import (
    largest_over_rounds,
    least_over_rounds,
    least_quotient,
    mean_over_rounds,
)
from tunerd.vocabulary.verdict import Answer, Interval, Verdict

MARGIN = 0.01
DEFAULT = 0  # the share of an artifact that was not tuned

Rounds = Sequence[Sequence[float]]  # samples in seconds, by round
Samples = Mapping[tuple[int, int], Rounds]  # by (tuned at, run at); DEFAULT: not tuned


@dataclass(frozen=True)
class Claim:
    """One claim of the paper, and what the matrix says of it. No ratio: it was not asked."""

    name: str  # "own", "cut", "middle"
    text: str
    answer: Answer
    ratio: Interval | None
    why: str = ""


@dataclass(frozen=True)
class Cell:
    """One artifact at one share."""

    tuned_at: int
    run_at: int
    secs: float  # median
    loss: Interval  # over the best artifact at that share
    beside_own: Interval | None  # over the artifact tuned there; None for that one itself
    samples: int


@dataclass(frozen=True)
class Robustness:
    """How one artifact does over all shares: 1.1 is 10% over the best one at a share."""

    tuned_at: int
    worst: Interval
    worst_at: int
    mean: Interval  # geometric


@dataclass(frozen=True)
class Gain:
    """What tuning at a share gains over tuning at the largest: above one is faster."""

    run_at: int
    ratio: Interval


@dataclass(frozen=True)
class Findings:
    """All that a matrix says. `robust` is None where no artifact's worst loss is surely least."""

    shares: tuple[int, ...]
    middle: int
    cells: tuple[Cell, ...]
    gains: tuple[Gain, ...]
    robustness: tuple[Robustness, ...]  # the least worst loss first
    robust: int | None
    robust_ratio: (
        Interval | None
    )  # the least worst loss of any other artifact over that of the first
    claims: tuple[Claim, ...]


def middle_of(shares: Sequence[int]) -> int:
    """Return the middle one of the shares, the smaller of two.

    >>> middle_of([10, 25, 40, 50, 75, 100])
    40
    """
    ordered = sorted(shares)
    return ordered[(len(ordered) - 1) // 2]


def findings(samples: Samples) -> Findings:
    """Say what a whole matrix says: each tuned share run at each, and DEFAULT where it was run.

    Raises ValueError where a cell is missing or holds a time that is not positive and finite.
    """
    shares = tuple(sorted({run_at for _, run_at in samples}))
    if not shares:
        raise ValueError("the matrix is empty; it takes samples of an artifact at a share")
    tuned = tuple(sorted({a for a, _ in samples} - {DEFAULT}))
    if tuned != shares:
        raise ValueError(f"tuned at {tuned} and run at {shares}; a matrix has both alike")
    rows = (*((DEFAULT,) if (DEFAULT, shares[0]) in samples else ()), *shares)
    cells = [(a, b) for a in rows for b in shares]
    if missing := [cell for cell in cells if cell not in samples]:
        raise ValueError(f"the matrix lacks the cells (tuned at, run at) {missing}")
    if len({len(samples[cell]) for cell in cells}) != 1:
        raise ValueError("the cells of the matrix were not measured in the same rounds")
    log = {cell: np.array([_log_median(of, cell) for of in samples[cell]]) for cell in cells}
    return _findings(_Times(shares, middle_of(shares), log), samples, rows)


def _log_median(round_secs: Sequence[float], cell: tuple[int, int]) -> float:
    if not round_secs or not all(0 < x < math.inf for x in round_secs):
        tuned_at, run_at = cell
        raise ValueError(
            f"a round of the model {said_of(tuned_at)}, run at {run_at}%, holds no times, or one "
            "that is none"
        )
    return float(np.log(np.median(round_secs)))


@dataclass(frozen=True)
class _Times:
    """Logarithms of medians by cell, each of shape (rounds,)."""

    shares: tuple[int, ...]
    middle: int
    log: Mapping[tuple[int, int], Floats]

    def over(self, a: int, x: int, b: int) -> Floats:
        """Return T(a, b) / T(x, b)."""
        return np.asarray(self.log[a, b] - self.log[x, b], dtype=np.float64)

    def over_best(self, a: int, places: Sequence[int], family: int = 1) -> Interval:
        """Return the largest loss(a, b) of some shares b; `family`: of so many intervals at once.

        A loss is the largest ratio over any artifact, over itself as well, which is one.
        """
        ratios = [self.over(a, x, b) for b in places for x in self.shares if x != a]
        return largest_over_rounds(ratios, family=family)

    def mean_loss(self, a: int) -> Floats:
        """Return the mean of its ratios over what is best at each share by all rounds."""
        losses = [self.over(a, self.best_at(b), b) for b in self.shares]
        return np.asarray(np.mean(losses, axis=0), dtype=np.float64)

    def best_at(self, b: int) -> int:
        return min(self.shares, key=lambda x: float(self.log[x, b].mean()))


def _findings(times: _Times, samples: Samples, rows: Sequence[int]) -> Findings:
    shares, full = times.shares, times.shares[-1]
    cells = tuple(
        Cell(
            tuned_at=a,
            run_at=b,
            secs=math.exp(times.log[a, b].mean()),
            loss=times.over_best(a, [b]),
            beside_own=None if a == b else mean_over_rounds(times.over(a, b, b)),
            samples=sum(map(len, samples[a, b])),
        )
        for a in rows
        for b in shares
    )
    ranked = sorted((_robustness(times, a) for a in shares), key=lambda r: r.worst.value)
    robust_ratio = None
    if len(ranked) > 1:
        first, *others = (times.over_best(r.tuned_at, shares, len(shares)) for r in ranked)
        robust_ratio = least_quotient(others, first)
    is_sure = robust_ratio is not None and robust_ratio.is_above(1 + MARGIN) is Verdict.YES
    return Findings(
        shares=shares,
        middle=times.middle,
        cells=cells,
        gains=tuple(Gain(b, mean_over_rounds(times.over(full, b, b))) for b in shares if b != full),
        robustness=tuple(ranked),
        robust=ranked[0].tuned_at if is_sure else None,
        robust_ratio=robust_ratio,
        claims=(_own(times), _cut(times), _middle(times)),
    )


def _robustness(times: _Times, a: int) -> Robustness:
    return Robustness(
        tuned_at=a,
        worst=times.over_best(a, times.shares),
        worst_at=max(times.shares, key=lambda b: times.over_best(a, [b]).value),
        mean=mean_over_rounds(times.mean_loss(a)),
    )


def _own(times: _Times) -> Claim:
    text = "A model performs best at the share that it was tuned at."
    pairs = [times.over(a, b, b) for a in times.shares for b in times.shares if a != b]
    if not pairs:
        return Claim("own", text, Verdict.CANNOT_TELL, None, "there is one share only")
    ratio = least_over_rounds(pairs)
    return _claim("own", text, ratio)


def _cut(times: _Times) -> Claim:
    text = "Tuned with the full device, it is poor when the device is cut."
    *cut, full = times.shares
    if not cut:
        return Claim("cut", text, Verdict.CANNOT_TELL, None, "there is one share only")
    if full != 100:
        why = f"the largest share is {full}%, which is not the full device"
        return Claim("cut", text, Verdict.CANNOT_TELL, None, why)
    ratio = mean_over_rounds(np.mean([times.over(full, b, b) for b in cut], axis=0))
    return _claim("cut", text, ratio)


def _middle(times: _Times) -> Claim:
    text = "Tuned at a middle share, it is robust: it loses least where it does worst."
    if len(times.shares) < 3:
        why = "there is no share between the least and the largest"
        return Claim("middle", text, Verdict.CANNOT_TELL, None, why)
    least, middle, largest = (
        times.over_best(a, times.shares, 3)
        for a in (times.shares[0], times.middle, times.shares[-1])
    )
    ratio = least_quotient([least, largest], middle)
    return _claim("middle", text, ratio)


def _claim(name: str, text: str, ratio: Interval) -> Claim:
    return Claim(name, text, ratio.is_above(1 + MARGIN), ratio)


def said_of(pct: int) -> str:
    """Say of an artifact where it was tuned, as in "the model tuned at 40%"."""
    return "with default schedules" if pct == DEFAULT else f"tuned at {pct}%"
