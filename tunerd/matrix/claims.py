"""Samples of every artifact at every share -> what the share of tuning is worth. No I/O.

The claims are those of Dhakal et al., "Spatial Sharing of GPU for Autotuning DNN models" (arXiv
2008.03602): a model performs best at the share that it was tuned at; one tuned with the full GPU is
poor when the GPU is cut; one tuned with a middle share is robust. In what follows T(a, b) is the
median time of the artifact tuned at a, run at b; loss(a, b) is T(a, b) over the least T(x, b) of
any artifact x.

    own     the least T(a, b) / T(b, b) over all a other than b and all b: above one where the
            artifact of each share is the fastest there
    cut     the geometric mean of T(full, b) / T(b, b) over all shares b below the largest
    middle  the worst loss of the least share's or the largest's artifact, whichever is less, over
            the worst loss of the middle share's. The middle is fixed before anything is measured,
            so that it is no choice of the luckiest.

Each answer is yes where the 95% interval lies above 1 + MARGIN, no where it lies below, and cannot
tell otherwise: a difference within 1% is none. The nulls are answers, too.

Intervals are the percentile bootstrap's, in two stages (Davison and Hinkley, 1997, section 3.8):
rounds are drawn, and samples within each. Sample i of all artifacts in one round at one share was
taken in turns, so these are drawn together.

A minimum or maximum over noisy times leans to its side, and the bootstrap of it twice as much. The
interval of such an extreme is therefore made of those of the ratios that it is taken over: of a
minimum over n ratios the least of their lower ends, and the least of their upper ends at n times
the confidence (Bonferroni); of a maximum likewise. It covers the true extreme in 95% of cases or
more, whichever ratio that is: a yes says that all ratios lie above, a no that one surely does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

MARGIN = 0.01
RESAMPLES = 4000
DEFAULT = 0  # the share of an artifact that was not tuned

Rounds = Sequence[Sequence[float]]  # samples in seconds, by round
Samples = Mapping[tuple[int, int], Rounds]  # by (tuned at, run at); DEFAULT: not tuned
_Floats = npt.NDArray[np.float64]


class Answer(StrEnum):
    YES = "yes"
    NO = "no"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True)
class Ratio:
    """A statistic and its 95% interval."""

    value: float
    low: float
    high: float

    @property
    def answer(self) -> Answer:
        """Say whether it lies above one by more than MARGIN."""
        if self.low > 1 + MARGIN:
            return Answer.YES
        if self.high < 1 + MARGIN:
            return Answer.NO
        return Answer.CANNOT_TELL


@dataclass(frozen=True)
class Claim:
    """One claim of the paper, and what the matrix says of it. No ratio: it was not asked."""

    name: str  # "own", "cut", "middle"
    text: str
    answer: Answer
    ratio: Ratio | None
    why: str = ""


@dataclass(frozen=True)
class Cell:
    """One artifact at one share."""

    tuned_at: int
    run_at: int
    secs: float  # median
    loss: Ratio  # over the best artifact at that share
    beside_own: Ratio | None  # over the artifact tuned there; None for that one itself
    samples: int


@dataclass(frozen=True)
class Robustness:
    """How one artifact does over all shares: 1.1 is 10% over the best one at a share."""

    tuned_at: int
    worst: Ratio
    worst_at: int
    mean: Ratio  # geometric


@dataclass(frozen=True)
class Gain:
    """What tuning at a share gains over tuning at the largest: above one is faster."""

    run_at: int
    ratio: Ratio


@dataclass(frozen=True)
class Findings:
    """All that a matrix says. `robust` is None where no artifact's worst loss is surely least."""

    shares: tuple[int, ...]
    middle: int
    cells: tuple[Cell, ...]
    gains: tuple[Gain, ...]
    robustness: tuple[Robustness, ...]  # the least worst loss first
    robust: int | None
    robust_ratio: Ratio | None  # the least worst loss of any other artifact over that of the first
    claims: tuple[Claim, ...]


def middle_of(shares: Sequence[int]) -> int:
    """Return the middle one of the shares, the smaller of two.

    >>> middle_of([10, 25, 40, 50, 75, 100])
    40
    """
    ordered = sorted(shares)
    return ordered[(len(ordered) - 1) // 2]


def findings(samples: Samples, *, seed: int = 0, resamples: int = RESAMPLES) -> Findings:
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
    missing = [(a, b) for a in rows for b in shares if (a, b) not in samples]
    if missing:
        raise ValueError(f"the matrix lacks the cells (tuned at, run at) {missing}")
    log = _log_medians(samples, rows, shares, seed, resamples)
    times = _Times(shares, middle_of(shares), log)
    return _findings(times, samples, rows)


@dataclass(frozen=True)
class _Times:
    """Logarithms of medians by cell: the first is what was measured, the others resampled."""

    shares: tuple[int, ...]
    middle: int
    log: Mapping[tuple[int, int], _Floats]

    def over(self, a: int, x: int, b: int) -> _Floats:
        """Return T(a, b) / T(x, b)."""
        return np.asarray(self.log[a, b] - self.log[x, b], dtype=np.float64)

    def over_best(self, a: int, places: Sequence[int], family: int = 1) -> Ratio:
        """Return the largest loss(a, b) of some shares b; `family`: of so many intervals at once.

        A loss is the largest ratio over any artifact, over itself as well, which is one.
        """
        return _highest([self.over(a, x, b) for b in places for x in self.shares if x != a], family)

    def mean_loss(self, a: int) -> _Floats:
        losses = [np.maximum.reduce([self.over(a, x, b) for x in self.shares]) for b in self.shares]
        return np.asarray(np.mean(losses, axis=0), dtype=np.float64)


def _findings(times: _Times, samples: Samples, rows: Sequence[int]) -> Findings:
    shares, full = times.shares, times.shares[-1]
    cells = tuple(
        Cell(
            tuned_at=a,
            run_at=b,
            secs=math.exp(times.log[a, b][0]),
            loss=times.over_best(a, [b]),
            beside_own=None if a == b else _ratio(times.over(a, b, b)),
            samples=sum(map(len, samples[a, b])),
        )
        for a in rows
        for b in shares
    )
    ranked = sorted((_robustness(times, a) for a in shares), key=lambda r: r.worst.value)
    robust_ratio = None
    if len(ranked) > 1:
        first, *others = (times.over_best(r.tuned_at, shares, len(shares)) for r in ranked)
        robust_ratio = _least_over(others, first)
    is_sure = robust_ratio is not None and robust_ratio.answer is Answer.YES
    return Findings(
        shares=shares,
        middle=times.middle,
        cells=cells,
        gains=tuple(Gain(b, _ratio(times.over(full, b, b))) for b in shares if b != full),
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
        mean=_ratio(times.mean_loss(a)),
    )


def _own(times: _Times) -> Claim:
    text = "A model performs best at the share that it was tuned at."
    pairs = [times.over(a, b, b) for a in times.shares for b in times.shares if a != b]
    if not pairs:
        return Claim("own", text, Answer.CANNOT_TELL, None, "there is one share only")
    ratio = _lowest(pairs)
    return Claim("own", text, ratio.answer, ratio)


def _cut(times: _Times) -> Claim:
    text = "Tuned with the full device, it is poor when the device is cut."
    *cut, full = times.shares
    if not cut:
        return Claim("cut", text, Answer.CANNOT_TELL, None, "there is one share only")
    if full != 100:
        why = f"the largest share is {full}%, which is not the full device"
        return Claim("cut", text, Answer.CANNOT_TELL, None, why)
    ratio = _ratio(np.mean([times.over(full, b, b) for b in cut], axis=0))
    return Claim("cut", text, ratio.answer, ratio)


def _middle(times: _Times) -> Claim:
    text = "Tuned at a middle share, it is robust: it loses least where it does worst."
    if len(times.shares) < 3:
        why = "there is no share between the least and the largest"
        return Claim("middle", text, Answer.CANNOT_TELL, None, why)
    least, middle, largest = (
        times.over_best(a, times.shares, 3)
        for a in (times.shares[0], times.middle, times.shares[-1])
    )
    ratio = _least_over([least, largest], middle)
    return Claim("middle", text, ratio.answer, ratio)


def _ratio(logs: _Floats) -> Ratio:
    """Return the measured value and the interval of the resampled ones."""
    low, high = np.percentile(logs[1:], [2.5, 97.5])
    return Ratio(math.exp(logs[0]), math.exp(low), math.exp(high))


def _lowest(logs: Sequence[_Floats]) -> Ratio:
    """Return the least of some ratios."""
    tail = 2.5 / len(logs)
    return Ratio(
        math.exp(min(x[0] for x in logs)),
        math.exp(min(np.percentile(x[1:], 2.5) for x in logs)),
        math.exp(min(np.percentile(x[1:], 100 - tail) for x in logs)),
    )


def _highest(logs: Sequence[_Floats], family: int) -> Ratio:
    """Return the largest of one and some ratios."""
    tail = 2.5 / family
    return Ratio(
        math.exp(max(0.0, 0.0, *(x[0] for x in logs))),
        math.exp(max(0.0, 0.0, *(np.percentile(x[1:], tail / len(logs)) for x in logs))),
        math.exp(max(0.0, 0.0, *(np.percentile(x[1:], 100 - tail) for x in logs))),
    )


def _least_over(ratios: Sequence[Ratio], one: Ratio) -> Ratio:
    """Return the least of some ratios over one; all are intervals of one family."""
    return Ratio(
        min(r.value for r in ratios) / one.value,
        min(r.low for r in ratios) / one.high,
        min(r.high for r in ratios) / one.low,
    )


def _log_medians(
    samples: Samples, rows: Sequence[int], shares: Sequence[int], seed: int, resamples: int
) -> dict[tuple[int, int], _Floats]:
    logs = {}
    for b in shares:
        for a, column in zip(rows, _column(samples, rows, b, seed, resamples), strict=True):
            logs[a, b] = column
    return logs


def _column(
    samples: Samples, rows: Sequence[int], b: int, seed: int, resamples: int
) -> list[_Floats]:
    """Return for each artifact at share b the logarithm of its median, and of resampled ones."""
    counts = {len(samples[a, b]) for a in rows}
    if len(counts) != 1 or not min(counts):
        raise ValueError(f"at {b}% the artifacts were not run in the same rounds")
    (rounds,) = counts
    sizes = [min(len(samples[a, b][r]) for a in rows) for r in range(rounds)]
    if not min(sizes):
        raise ValueError(f"at {b}% a round holds no samples of an artifact")
    whole = [np.array([samples[a, b][r][: sizes[r]] for a in rows]) for r in range(rounds)]
    if not all(np.all(np.isfinite(w)) and np.all(w > 0) for w in whole):
        raise ValueError(f"at {b}% a time is not positive and finite")
    rng = np.random.default_rng([seed, b, rounds])
    least = min(sizes)  # of each round that is drawn, so that all rounds count alike
    drawn = rng.integers(0, rounds, size=(resamples, rounds))
    picked = rng.random(size=(resamples, rounds, least))
    medians = np.empty((len(rows), resamples))
    for number in range(resamples):
        parts = [
            whole[r][:, (picked[number, i] * sizes[r]).astype(np.int64)]
            for i, r in enumerate(drawn[number])
        ]
        medians[:, number] = np.median(np.concatenate(parts, axis=1), axis=1)
    measured = np.median(np.concatenate(whole, axis=1), axis=1)
    return [np.log(np.concatenate([[measured[i]], medians[i]])) for i in range(len(rows))]


def said_of(pct: int) -> str:
    """Say of an artifact where it was tuned, as in "the model tuned at 40%"."""
    return "with default schedules" if pct == DEFAULT else f"tuned at {pct}%"
