#!/usr/bin/env python3
"""Say how near the search comes to the best in so many trials, on a model of what was measured.

    scripts/lab/search/simulate.py MODEL.onnx --records records.parquet --out FILE.json
    scripts/lab/search/simulate.py MODEL.onnx --records a.parquet --records b.parquet --seeds 16 \
        --out F

The tasks with the most measured trials are searched, each by itself, from many seeds; no candidate
is applied, built or measured. Its time comes from boosted trees that were trained on the logarithms
of the times in the records. They are wrong where nothing was measured, so that figures are good for
comparing one state of the search with another in the same records, and for nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pandas

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import made_by, write
from tunerd.candidates.base import BATCH
from tunerd.candidates.metaschedule import search
from tunerd.candidates.metaschedule.design import Sketch
from tunerd.candidates.metaschedule.knobs import UNDECIDED, Choices
from tunerd.candidates.metaschedule.space import design_space
from tunerd.frontend.kernels import kernels_of
from tunerd.frontend.model import read_model
from tunerd.slices import plan
from tunerd.system import targets
from tunerd.vocabulary import (
    Result,
    SliceRequest,
    Task,
)

CAPABILITY = "9.0"  # of the GPUs that results/ has records of
LAG = 1  # batches under way while the next one is proposed
TREES = {"objective": "reg:squarederror", "max_depth": 10, "eta": 0.08, "subsample": 0.8, "seed": 0}
ROUNDS = 500
Row = dict[str, Any]


class Surrogate:
    """The times of a task's choices, learnt from its records."""

    def __init__(self, task: Task, measured: pandas.DataFrame, sms: int | None) -> None:
        import xgboost

        self.task, self.sms = task, sms
        self._design = design_space(task, sms=sms).design
        self.seen: dict[int, list[Choices]] = {}  # by sketch
        features, secs = [], []
        for trace_json, run_secs in zip(measured.trace_json, measured.median_secs, strict=True):
            translated = self._design.translate(json.loads(trace_json))
            if translated is None:
                continue
            sketch, row = translated
            self.seen.setdefault(sketch.index, []).append(row)
            features.append(seen_by_trees(sketch, row))
            secs.append(float(run_secs))
        self.measured = len(secs)
        data = xgboost.DMatrix(np.array(features), np.log(secs), missing=np.nan)
        self._trees = xgboost.train({**TREES, "nthread": 1}, data, ROUNDS)
        self.best_secs = float(np.exp(self._trees.predict(data).min()))

    def secs(self, trace_json: str) -> float:
        trace = json.loads(trace_json)
        sketch = self._design.find(trace)
        assert sketch is not None
        features = seen_by_trees(sketch, sketch.encode(trace))[None]
        return float(np.exp(self._trees.inplace_predict(features, missing=np.nan)[0]))

    def applied(self, island: Any, choice: Any) -> tuple[str, None] | None:
        """Stand in for the application of a trace; what TVM would decide is as once measured."""
        sketch = island.design.sketches[choice.sketch]
        row = choice.row.copy()
        if UNDECIDED in row:
            rows = self.seen.get(choice.sketch)
            if not rows:
                return None
            open_ = row == UNDECIDED
            row[open_] = rows[int(island.random.integers(len(rows)))][open_]
        return json.dumps(sketch.decode(row), separators=(",", ":"), sort_keys=True), None


def seen_by_trees(sketch: Sketch, row: Choices) -> npt.NDArray[np.float64]:
    """Return a cost model's features of a choice, then its numbers as they are."""
    raw = np.full(64, np.nan)
    raw[: len(row)] = np.log2(row.clip(1))[:64]
    return np.hstack([sketch.features(row[None])[0], raw])


def searched(truth: Surrogate, seed: int, trials: int) -> list[float]:
    """Return the best time after each trial of one search."""
    searcher = search.Searcher(seed=seed, threads=1, sms=truth.sms)
    under_way: list[list[Result]] = []
    best: list[float] = []
    with mock.patch.object(search, "_apply", truth.applied):
        while len(best) < trials:
            told = under_way.pop(0) if len(under_way) > LAG else []
            proposal = searcher.propose(truth.task, BATCH, results=told)
            if proposal.exhausted:
                break
            batch = [Result(c, truth.secs(c.recipe)) for c in proposal.candidates]
            under_way.append(batch)
            for result in batch:
                assert result.run_secs is not None
                best.append(min(result.run_secs, best[-1] if best else np.inf))
    return best[:trials]


def surrogates_of(model: Path, frame: pandas.DataFrame, count: int) -> list[Surrogate]:
    """Return those of the tasks with the most measured trials."""
    is_cuda = frame.target.iloc[0] == "cuda"
    spec = targets.cuda_target(CAPABILITY) if is_cuda else plan(SliceRequest("cpu", 100)).target
    tasks = {t.task_id: t for t in kernels_of(read_model(model), spec).tasks}
    measured = frame[(frame.origin == "search") & (frame.state == "measured")]
    measured = measured[measured.task_id.isin(tasks)]
    often = measured.task_id.value_counts().index[:count]
    sms = int(frame.sm_count.iloc[0]) if is_cuda else None
    return [Surrogate(tasks[i], measured[measured.task_id == i], sms) for i in often]


def summary(truth: Surrogate, curves: Sequence[Sequence[float]]) -> Row:
    """Return how many times the surrogate's best is reached after half and all trials."""

    def over_best(share: float) -> list[float]:
        return [c[max(0, round(share * len(c)) - 1)] / truth.best_secs for c in curves]

    return {
        "task_id": truth.task.task_id,
        "name": truth.task.name,
        "measured": truth.measured,
        "half": round(float(np.exp(np.log(over_best(0.5)).mean())), 3),
        "end": round(float(np.exp(np.log(over_best(1.0)).mean())), 3),
        "worst": round(max(over_best(1.0)), 3),
        "ends": [round(ratio, 3) for ratio in over_best(1.0)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--records", type=Path, action="append", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--trials", type=int, default=128)
    options = parser.parse_args()
    frame = pandas.concat([pandas.read_parquet(path) for path in options.records])
    found: Row = {
        **made_by(),
        "tasks": [],
    }
    print("task: times of the surrogate's best after half, all trials; the worst seed")
    for truth in surrogates_of(options.model, frame, options.tasks):
        curves = [searched(truth, seed, options.trials) for seed in range(options.seeds)]
        row = summary(truth, curves)
        found["tasks"].append(row)
        print(f"{row['name']}: {row['half']}, {row['end']}; {row['worst']}", flush=True)
    ends = [row["end"] for row in found["tasks"]]
    found["end"] = round(float(np.exp(np.log(ends).mean())), 3)
    print(f"all: {found['end']}")
    write(options.out, found)


if __name__ == "__main__":
    main()
