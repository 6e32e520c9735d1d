"""Features of choices -> scores: boosted trees over everything that one process was told.

A score is the best known time of the task over the candidate's, 0 where it failed, so that tasks of
any size teach each other (Chen et al., arXiv 1805.08166).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Columns = npt.NDArray[np.floating[Any]]  # shape [row, feature]

# How well these rank what was not told: scripts/lab/search/batches.py --records.
_PARAMETERS = {
    "objective": "reg:squarederror",
    "tree_method": "hist",
    "max_bin": 64,
    "max_depth": 6,
    "eta": 0.15,
    "subsample": 0.8,
    "colsample_bytree": 0.6,
}
_ROUNDS = 100
_MAX_ROWS = 4096  # the newest


@dataclass(frozen=True, slots=True)
class _Result:
    task_id: str
    features: npt.NDArray[np.float32]  # shape [feature]
    run_secs: float  # infinite where the trial failed


class CostModel:
    """Predicts which choices are fast; knows nothing until it was told something."""

    def __init__(self, *, seed: int, threads: int) -> None:
        self._parameters = {**_PARAMETERS, "seed": seed, "nthread": threads}
        self._results: OrderedDict[str, _Result] = OrderedDict()  # by name, the newest last
        self._best_secs: dict[str, float] = {}  # of each task, of all that was ever told
        self._told: Counter[str] = Counter()
        self._booster: Any = None
        self._is_stale = False

    def tell(
        self,
        task_id: str,
        name: str,
        features: npt.NDArray[np.floating[Any]],
        run_secs: float | None,
    ) -> None:
        """Add a result, once; `features` has the shape [feature], `name` no other result."""
        if name in self._results:
            return
        secs = np.inf if run_secs is None else run_secs
        self._results[name] = _Result(task_id, np.asarray(features, dtype=np.float32), secs)
        if len(self._results) > _MAX_ROWS:
            self._results.popitem(last=False)
        self._best_secs[task_id] = min(secs, self._best_secs.get(task_id, np.inf))
        self._told[task_id] += 1
        self._is_stale = True

    def told(self, task_id: str = "") -> int:
        """Return how many results of a task are known, or of all."""
        return self._told[task_id] if task_id else self._told.total()

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

        results = self._results.values()
        rows = np.vstack([r.features for r in results])
        best = np.array([self._best_secs[r.task_id] for r in results])
        secs = np.array([r.run_secs for r in results])
        scores = np.divide(best, secs, out=np.zeros(len(secs)), where=np.isfinite(secs))
        data = xgboost.DMatrix(rows, scores, missing=np.nan)
        self._booster = xgboost.train(self._parameters, data, _ROUNDS)
        self._is_stale = False
