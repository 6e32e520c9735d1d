#!/usr/bin/env python3
"""Say what results of other tasks are worth to the first two batches of a task; needs no GPU.

    scripts/lab/search/examples.py features RUN [RUN ...] --out features.parquet
    scripts/lab/search/examples.py replay features.parquet --out replay.json

`features` takes what run folders have measured, as cost models see it. `replay` chooses a batch of
each task from the candidates that its own search measured, and then another one, and takes the
times that these had: by the rough estimate alone, by a cost model that knows three other tasks, or
by one that knows the first two batches of all of them. In both of the latter a fifth is drawn by
the estimate, as in a search. A search chooses among all candidates and not among the measured; so
that figures say which knowledge ranks better, not how good a search becomes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import made_by, table, write
from tunerd.candidates.base import BATCH
from tunerd.candidates.cost_model import CostModel
from tunerd.candidates.metaschedule.design import FEATURES
from tunerd.candidates.metaschedule.space import design_space
from tunerd.records import Store

ESTIMATE = 2  # the column of features with the rough estimate
HOPE, EXPLORED = (
    32.0,
    0.2,
)  # of tunerd/candidates/metaschedule/search.py, while little is known of a task
LEAST = 3 * BATCH  # measured candidates of a task that is asked
REPEATS = 6
MOST_REGRET = 3.0  # its logarithm
WAYS = ("estimate", "three others", "all others")
Rows = npt.NDArray[np.float32]
Task = tuple[Rows, npt.NDArray[np.float64]]  # features, seconds, in the order of the search


def features_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield what a run has measured, and what failed, task by task in the order of the search."""
    with Store.read(folder) as store:
        proofs = store.proofs()
        sms = proofs[0].sm_count if store.facts().target.is_cuda else None
        for task in store.tasks():
            design = None
            for record in store.records(task.task_id):
                if record.candidate.is_default:
                    continue
                design = design or design_space(task, sms=sms).design
                trace = json.loads(record.candidate.recipe)
                if (sketch := design.find(trace)) is None:
                    continue
                (seen,) = sketch.features(sketch.encode(trace)[None]).astype(np.float32)
                yield {
                    "task_id": task.task_id,
                    "name": task.name,
                    "features": seen.tobytes(),
                    "run_secs": record.run_secs,
                }


def replay(tasks: dict[str, Task], random: np.random.Generator) -> Iterator[dict[str, Any]]:
    """Yield by how much the best of one and two batches misses the best of all, as logarithms."""
    for task_id, (rows, secs) in tasks.items():
        if len(secs) < LEAST:
            continue
        others = {t: of for t, of in tasks.items() if t != task_id}
        often = [t for t, (_, of) in others.items() if len(of) >= BATCH]
        few = random.choice(often, min(3, len(often)), replace=False)
        known = {
            "three others": [(t, others[t], LEAST) for t in few],
            "all others": [(t, of, 2 * BATCH) for t, of in others.items()],
        }
        for _ in range(REPEATS):
            by_estimate = by_chance(rows, random)
            for way in WAYS:
                told = known.get(way, [])
                model = taught(told)
                ranked = by_estimate if way == "estimate" else ranking(model, rows)
                first = drawn(ranked, by_estimate, [], random)
                own = (task_id, (rows[first], secs[first]), len(first))
                model = taught([*(told or known["three others"]), own])
                both = first + drawn(ranking(model, rows), by_estimate, first, random)
                best = secs.min()
                yield {
                    "task_id": task_id,
                    "way": way,
                    "one": min(MOST_REGRET, float(np.log(secs[first].min() / best))),
                    "two": min(MOST_REGRET, float(np.log(secs[both].min() / best))),
                }


def taught(told: Sequence[tuple[str, Task, int]]) -> CostModel:
    model = CostModel(seed=1, threads=2)
    for task_id, (rows, secs), most in told:
        for i in range(min(most, len(secs))):
            run_secs = float(secs[i]) if np.isfinite(secs[i]) else None
            model.tell(task_id, f"{task_id} {i}", rows[i], run_secs)
    return model


def ranking(model: CostModel, rows: Rows) -> list[int]:
    return [int(i) for i in np.argsort(-model.predict(rows.astype(np.float64)), kind="stable")]


def by_chance(rows: Rows, random: np.random.Generator) -> list[int]:
    """Draw all by their estimates, as a search draws what it explores."""
    estimates = np.nan_to_num(rows[:, ESTIMATE])
    ranks = np.argsort(np.argsort(estimates, kind="stable"), kind="stable") / len(estimates)
    return [int(i) for i in np.argsort(HOPE * ranks - random.gumbel(size=len(ranks)))]


def drawn(
    ranked: Sequence[int], chance: Sequence[int], taken: Sequence[int], random: np.random.Generator
) -> list[int]:
    """Choose a batch of what is not taken."""
    found: list[int] = []
    while len(found) < BATCH:
        order = chance if random.random() < EXPLORED else ranked
        found.append(next(i for i in order if i not in found and i not in taken))
    return found


def tasks_of(frame: pandas.DataFrame) -> dict[str, Task]:
    return {
        str(task_id): (
            np.stack([np.frombuffer(f, np.float32) for f in own.features]).reshape(-1, FEATURES),
            own.run_secs.fillna(np.inf).to_numpy(np.float64),
        )
        for task_id, own in frame.groupby("task_id", sort=False)
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    steps = parser.add_subparsers(dest="step", required=True)
    take = steps.add_parser("features")
    take.add_argument("runs", type=Path, nargs="+")
    take.add_argument("--out", type=Path, required=True)
    again = steps.add_parser("replay")
    again.add_argument("features", type=Path)
    again.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.step == "features":
        found = [{"search": f.name, **row} for f in options.runs for row in features_of(f)]
        pandas.DataFrame(found).to_parquet(options.out, compression="zstd")
        return
    random = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for search, frame in pandas.read_parquet(options.features).groupby("search", sort=False):
        rows += [{"search": search, **row} for row in replay(tasks_of(frame), random)]
    errors = pandas.DataFrame(rows)
    by = errors.groupby(["search", "way"])[["one", "two"]].mean()
    said = {**made_by(), "rows": rows}
    write(options.out, said, indent=None)
    lines = []
    for search in [*dict.fromkeys(errors.search), "all"]:
        own = errors.groupby("way")[["one", "two"]].mean() if search == "all" else by.loc[search]
        logs = own.to_numpy()
        cells = [
            f"{100 * np.expm1(logs[own.index.get_loc(w), i]):.1f}%" for i in (0, 1) for w in WAYS
        ]
        lines.append([search, *cells])
    print(table(["search", *(f"{w}, {n}" for n in ("one batch", "two") for w in WAYS)], lines))


if __name__ == "__main__":
    main()
