"""The slowdown of one model beside another, from features of both: boosted trees over pairs.

What was done with memory in CARMA (Yousefzadeh-Asl-Miandoab et al., arXiv 2508.19073) is needed for
the slowdown here: an artifact's memory is known from its manifest. Intervals are cross-conformal
(CV+ of Barber et al., Ann. Statist. 49, 2021): each pair of models is left out of one of the
forests, and what that forest says of it tells how far it may be off. They hold for pairs like those
seen; a feature outside of what was seen is refused, by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tunerd.colocation.planning.pairs import Pair, Side
from tunerd.vocabulary.verdict import Interval

LEVEL = 0.9  # of the intervals
LEAST_PAIRS = 20  # measured, and
LEAST_MODELS = 5  # pairs of models: with fewer nothing can be left out
_FOLDS = 20  # at most; of fewer pairs of models each is left out alone
_MARGIN = 0.02  # of a feature's range, in logarithms, that still counts as seen
_ROUNDS = 150
_PARAMETERS = {
    "objective": "reg:squarederror",
    "tree_method": "hist",
    "max_depth": 4,
    "eta": 0.1,
    "min_child_weight": 1,
    "subsample": 0.8,
    "colsample_bynode": 0.8,
    "nthread": 1,
    "seed": 0,
}
Row = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Checked:
    """A measured pair, and what was said of it without its models' pairs."""

    pair: Pair
    estimate: Interval

    @property
    def error(self) -> float:
        """Return how far the estimate is off, as a fraction of what was measured."""
        return abs(self.estimate.value / self.pair.slowdown.value - 1)

    @property
    def is_covered(self) -> bool:
        return self.estimate.low <= self.pair.slowdown.value <= self.estimate.high


@dataclass(frozen=True)
class Calibration:
    """How good estimates are for models that were not seen together: each pair left out once."""

    checked: tuple[Checked, ...]

    @property
    def median_error(self) -> float:
        return float(np.median([each.error for each in self.checked]))

    @property
    def median_error_of_constant(self) -> float:
        """Return the error where each is said to be the median of other models' pairs.

        Estimates that are not below it have learned nothing.
        """
        found = [each.pair for each in self.checked]
        said = {
            models: np.median([pair.slowdown.value for pair in found if pair.models != models])
            for models in {pair.models for pair in found}
        }
        errors = [abs(said[pair.models] / pair.slowdown.value - 1) for pair in found]
        return float(np.median(errors))

    @property
    def coverage(self) -> float:
        return sum(each.is_covered for each in self.checked) / len(self.checked)


class SlowdownModel:
    """Learns from measured pairs of one device when it is made."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        """Raises ValueError where the pairs are too few, or of several devices."""
        models = sorted({pair.models for pair in pairs})
        if len(pairs) < LEAST_PAIRS or len(models) < LEAST_MODELS:
            raise ValueError(
                f"{len(pairs)} measured pairs of {len(models)} pairs of models are too few to "
                f"learn from; it takes {LEAST_PAIRS} of {LEAST_MODELS}"
            )
        if len({pair.device for pair in pairs}) > 1:
            raise ValueError("the pairs are of several devices")
        # Those that all pairs have: older ones lack what manifests say since.
        sides = [side.features for pair in pairs for side in (pair.of, pair.beside)]
        self._names = sorted(set(sides[0]).intersection(*sides))
        rows = np.array([self._row(pair.of, pair.beside) for pair in pairs], dtype=np.float32)
        logs = np.log([pair.slowdown.value for pair in pairs])
        fold_of = {model: nth % _FOLDS for nth, model in enumerate(models)}
        folds = np.array([fold_of[pair.models] for pair in pairs])
        self._low, self._high = rows.min(axis=0), rows.max(axis=0)
        self._forests = {
            int(fold): _trained(rows[folds != fold], logs[folds != fold])
            for fold in np.unique(folds)
        }
        said = np.array([
            self._forests[int(fold)].inplace_predict(row[None])[0]
            for fold, row in zip(folds, rows, strict=True)
        ])  # fmt: skip
        self._folds, self._off = folds, np.abs(logs - said)
        self.calibration = Calibration(
            tuple(
                Checked(pair, _interval(value, self._off[folds != fold]))
                for pair, value, fold in zip(pairs, said, folds, strict=True)
            )
        )

    def estimate(self, of: Side, beside: Side) -> Interval | str:
        """Return a slowdown with its interval, or why none is said."""
        if not of.features.keys() & beside.features.keys() >= set(self._names):
            return "its features are not those of the measured pairs"
        row = np.array(self._row(of, beside), dtype=np.float32)
        slack = _MARGIN * (self._high - self._low) + 1e-6
        outside = np.flatnonzero((row < self._low - slack) | (row > self._high + slack))
        if len(outside):
            return f"{self._labels()[int(outside[0])]} lies outside of what was measured"
        said = {fold: float(f.inplace_predict(row[None])[0]) for fold, f in self._forests.items()}
        each = np.array([said[int(fold)] for fold in self._folds])
        low, high = _quantiles(each - self._off, each + self._off)
        value = float(np.mean(list(said.values())))
        return Interval(*(math.exp(x) for x in (value, min(low, value), max(high, value))))

    def _row(self, of: Side, beside: Side) -> list[float]:
        return [
            *(math.log1p(of.features[name]) for name in self._names),
            *(math.log1p(beside.features[name]) for name in self._names),
            math.log(of.share),
            math.log(beside.share),
            math.log(of.together),
            math.log(beside.together),
        ]

    def _labels(self) -> list[str]:
        names = [name.replace("_", " ") for name in self._names]
        return [
            *(f"its own {name}" for name in names),
            *(f"its neighbour's {name}" for name in names),
            "its share",
            "its neighbour's share",
            "the size of its launches",
            "the size of its neighbour's launches",
        ]


def model_of(pairs: Sequence[Pair]) -> tuple[SlowdownModel | None, str]:
    """Return a model, or None and why there is none."""
    try:
        return SlowdownModel(pairs), ""
    except ValueError as error:
        return None, str(error)


def _trained(rows: Row, logs: npt.NDArray[np.float64]) -> Any:
    import xgboost

    return xgboost.train(_PARAMETERS, xgboost.DMatrix(rows, label=logs), _ROUNDS)


def _interval(value: float, off: npt.NDArray[np.float64]) -> Interval:
    low, high = _quantiles(value - off, value + off)
    return Interval(math.exp(value), math.exp(min(low, value)), math.exp(max(high, value)))


def _quantiles(
    lows: npt.NDArray[np.float64], highs: npt.NDArray[np.float64]
) -> tuple[float, float]:
    """Return the ends of CV+: the order statistics at (1 - level)(n + 1) and level (n + 1)."""
    count = len(lows)
    rank = math.ceil(LEVEL * (count + 1))
    if rank > count:
        return float(lows.min()), float(highs.max())
    return float(np.sort(lows)[count - rank]), float(np.sort(highs)[rank - 1])
