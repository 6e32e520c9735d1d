"""Features of choices -> scores: boosted trees over everything that one process was told.

A score is the best known time of the task over the candidate's, 0 where it failed, so that tasks of
any size teach each other (Chen et al., arXiv 1805.08166).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tunerd.sketches.estimate import Columns

# How well these rank what was not told: scripts/benchmark_search --records.
_PARAMETERS = {
    "objective": "reg:squarederror",
    "tree_method": "hist",
    "max_depth": 6,
    "eta": 0.15,
    "subsample": 0.8,
    "colsample_bytree": 0.6,
}
_ROUNDS = 100
_MAX_ROWS = 1000  # of a task, the newest; 2,600 in all are trained in 0.1 s on one core


@dataclass
class _Results:
    """What was told of one task: features, shape [result, feature], and times in seconds."""

    features: list[Columns] = field(default_factory=list)
    secs: list[float] = field(default_factory=list)  # infinite where the trial failed

    def scores(self) -> Columns:
        secs = np.array(self.secs)
        best = secs.min(initial=np.inf)
        return best / secs if np.isfinite(best) else np.zeros(len(secs))


class CostModel:
    """Predicts which choices are fast; knows nothing until it was told something."""

    def __init__(self, *, seed: int, threads: int) -> None:
        self._parameters = {**_PARAMETERS, "seed": seed, "nthread": threads}
        self._tasks: dict[str, _Results] = {}
        self._booster: Any = None
        self._is_stale = False

    def tell(self, task_id: str, features: Columns, run_secs: float | None) -> None:
        """Add a result; `features` has the shape [feature]."""
        results = self._tasks.setdefault(task_id, _Results())
        results.features.append(features)
        results.secs.append(np.inf if run_secs is None else run_secs)
        self._is_stale = True

    def told(self, task_id: str = "") -> int:
        """Return how many results of a task are known, or of all."""
        known = [self._tasks[task_id]] if task_id in self._tasks else []
        return sum(len(r.secs) for r in (known if task_id else self._tasks.values()))

    def predict(self, features: Columns) -> npt.NDArray[np.float32]:
        """Return scores of choices, shape [choice]; the higher, the faster."""
        if self._is_stale:
            self._train()
        if self._booster is None:
            return np.zeros(len(features), dtype=np.float32)
        scores = self._booster.inplace_predict(features, missing=np.nan)
        return np.asarray(scores, dtype=np.float32)

    def _train(self) -> None:
        import xgboost

        rows = np.vstack([r.features[-_MAX_ROWS:] for r in self._tasks.values()])
        scores = np.concatenate([r.scores()[-_MAX_ROWS:] for r in self._tasks.values()])
        data = xgboost.DMatrix(rows, scores, missing=np.nan)
        self._booster = xgboost.train(self._parameters, data, _ROUNDS)
        self._is_stale = False
