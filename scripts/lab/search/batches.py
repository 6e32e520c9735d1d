#!/usr/bin/env python3
"""Measure what the search costs on CUDA tasks, beside MetaSchedule's own; needs no GPU.

    scripts/lab/search/batches.py MODEL.onnx --out FILE.json [--records records.parquet] \
        [--batches 3]

For the heaviest convolutions of a model: how many random choices pass TVM's checks, as they are
and when screened by their numbers; core-seconds for batches of 16 candidates by tunerd's search and
by MetaSchedule's evolutionary search with a population of 64 (its default of 512 takes minutes
each). With the records of a run: how well the cost model ranks a task's kernels that it was not
told, after 24 and 48 others of that task and everything of the other tasks.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import made_by, write
from tunerd.candidates.cost_model import CostModel
from tunerd.candidates.metaschedule import search
from tunerd.candidates.metaschedule.space import design_space
from tunerd.frontend.kernels import kernels_of
from tunerd.frontend.model import read_model
from tunerd.vocabulary import Result, TargetSpec, Task

H200 = json.loads((Path(__file__).parents[1] / "data" / "h200_target.json").read_text())
BATCH = 16
CHECKED = 40  # choices of a sketch that TVM checks
Row = dict[str, Any]


def pass_rates(task: Task) -> Row:
    """Apply random choices with all of TVM's checks, as drawn and screened."""
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import Trace

    island = search.Searcher(seed=0, threads=1)._open(task)

    def passing(sketch: Any, rows: Any) -> int:
        good = 0
        for row in rows:
            schedule = Schedule(island.mod, seed=1, error_render_level="fast")
            Trace.apply_json_to_schedule(sketch.decode(row), schedule)
            schedule.enter_postproc()
            good += all(postproc.apply(schedule) for postproc in island.postprocs)
        return good

    counts = {"drawn": 0, "drawn_passed": 0, "screened": 0, "screened_passed": 0}
    for sketch in island.design.sketches:
        rows = sketch.sample(20000, island.random)
        fitting = rows[sketch.fits(rows, island.limits)][:CHECKED]
        counts["drawn"] += CHECKED
        counts["drawn_passed"] += passing(sketch, rows[:CHECKED])
        counts["screened"] += len(fitting)
        counts["screened_passed"] += passing(sketch, fitting)
    return counts


def made_up_secs(name: str) -> float:
    return 1e-3 * random.Random(name).lognormvariate(0, 1)


def tunerd_batches(task: Task, batches: int) -> list[Row]:
    searcher = search.Searcher(seed=0, threads=1)
    told: list[Result] = []
    rows = []
    for _ in range(batches):
        cpu, wall = time.process_time(), time.perf_counter()
        proposal = searcher.propose(task, BATCH, results=told)
        rows.append(row(len(proposal.candidates), cpu, wall))
        told = [Result(c, made_up_secs(c.candidate_id)) for c in proposal.candidates]
    return rows


def metaschedule_batches(task: Task, batches: int) -> list[Row]:
    import tvm
    from tvm.s_tir import meta_schedule as ms

    mod = tvm.ir.load_json(task.mod_json)
    context = ms.TuneContext(
        mod,
        target=tvm.target.Target(task.target.json),
        space_generator=ms.space_generator.PostOrderApply(
            sch_rules="cuda", postprocs="cuda", mutator_probs="cuda"
        ),
        search_strategy=ms.search_strategy.EvolutionarySearch(
            population_size=64, init_min_unmeasured=8, max_fail_count=50
        ),
        num_threads=1,
        rand_state=1,
    )
    database = ms.database.MemoryDatabase()
    workload = database.commit_workload(mod)
    model = ms.cost_model.XGBModel(num_warmup_samples=BATCH, num_tuning_cores=1)
    context.pre_tuning(1 << 20, BATCH, None, database, model)
    rows = []
    for _ in range(batches):
        cpu, wall = time.process_time(), time.perf_counter()
        found = list(context.generate_measure_candidates() or [])
        results = [ms.runner.RunnerResult([made_up_secs(str(c.sch.trace))], None) for c in found]
        if found:
            context.notify_runner_results(found, results)
            model.update(context, found, results)
        for candidate, result in zip(found, results, strict=True):
            database.commit_tuning_record(
                ms.database.TuningRecord(
                    candidate.sch.trace, workload, result.run_secs, context.target
                )
            )
        rows.append(row(len(found), cpu, wall))
    return rows


def row(candidates: int, cpu: float, wall: float) -> Row:
    return {
        "candidates": candidates,
        "cpu_secs": round(time.process_time() - cpu, 4),
        "wall_secs": round(time.perf_counter() - wall, 4),
    }


def ranking(tasks: Sequence[Task], records: Path) -> list[Row]:
    """Rank what the model was not told of a task, in an order of the records drawn by seed."""
    import pandas
    from scipy.stats import spearmanr

    frame = pandas.read_parquet(records)
    frame = frame[(frame.origin == "search") & (frame.state == "measured")]
    known: dict[str, tuple[Any, Any]] = {}
    estimated: dict[str, float] = {}
    for task in tasks:
        own = frame[frame.task_id == task.task_id]
        if len(own) < 80:
            continue
        design = design_space(task, sms=int(own.sm_count.iloc[0])).design
        features, secs, estimates = [], [], []
        for trace_json, run_secs in zip(own.trace_json, own.median_secs, strict=True):
            translated = design.translate(json.loads(trace_json))
            if translated is not None:
                sketch, choice = translated
                features.append(sketch.features(choice[None])[0])
                estimates.append(sketch.estimated_secs(choice[None])[0])
                secs.append(float(run_secs))
        known[task.task_id] = np.array(features), np.array(secs)
        estimated[task.task_id] = float(spearmanr(estimates, secs, nan_policy="omit")[0])
    rows = []
    for task_id, (features, secs) in known.items():
        order = np.random.default_rng(0).permutation(len(secs))
        for told in (0, 24, 48):
            model = CostModel(seed=0, threads=1)
            for other, (x, y) in known.items():
                own_rows = order[:told] if other == task_id else range(len(y))
                for i in own_rows:
                    model.tell(other, f"{other} {i}", x[i], float(y[i]))
            rest = order[told:]
            scores = model.predict(features[rest])
            best_8 = secs[rest][np.argsort(-scores)[:8]].min()
            rows.append(
                {
                    "task_id": task_id,
                    "told": told,
                    "spearman_of_estimate": estimated[task_id],
                    "unseen": len(rest),
                    "spearman": float(spearmanr(scores, -secs[rest])[0]),
                    "best_over_best_of_8": float(secs[rest].min() / best_8),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--records", type=Path)
    parser.add_argument("--tasks", type=int, default=6)
    parser.add_argument("--batches", type=int, default=3)
    options = parser.parse_args()
    target = TargetSpec("cuda", json.dumps(H200))
    tasks = kernels_of(read_model(options.model), target).tasks
    heaviest = sorted((t for t in tasks if "conv2d" in t.name), key=lambda t: -t.weight * t.flops)[
        : options.tasks
    ]
    found: Row = {
        **made_by(),
        "target": H200,
        "tasks": [],
    }
    for task in heaviest:
        print(task.name, file=sys.stderr, flush=True)
        found["tasks"].append(
            {
                "task_id": task.task_id,
                "name": task.name,
                "pass_rates": pass_rates(task),
                "tunerd": tunerd_batches(task, options.batches),
                "metaschedule": metaschedule_batches(task, options.batches),
            }
        )
    if options.records:
        found["ranking"] = ranking(tasks, options.records)
    found["summary"] = summary(found)
    write(options.out, found)
    print(json.dumps(found["summary"], indent=1))


def summary(found: Row) -> Row:
    rates = [t["pass_rates"] for t in found["tasks"]]

    def share(kind: str) -> float:
        total = sum(r[kind] for r in rates)
        return float(round(100 * sum(r[f"{kind}_passed"] for r in rates) / total, 1))

    def cpu(kind: str) -> float:
        each = [b["cpu_secs"] for t in found["tasks"] for b in t[kind] if b["candidates"]]
        return float(np.median(each))

    said: Row = {
        "drawn_passing_pct": share("drawn"),
        "screened_passing_pct": share("screened"),
        "screened_choices": sum(r["screened"] for r in rates),
        "tunerd_cpu_secs_per_batch": round(cpu("tunerd"), 2),
        "metaschedule_cpu_secs_per_batch": round(cpu("metaschedule"), 2),
        "ratio": round(cpu("metaschedule") / cpu("tunerd"), 1),
    }
    for told in (0, 24, 48) if "ranking" in found else ():
        own = [r for r in found["ranking"] if r["told"] == told]
        said[f"spearman_after_{told}"] = round(float(np.median([r["spearman"] for r in own])), 3)
        of_8 = [r["best_over_best_of_8"] for r in own]
        said[f"best_over_best_of_8_after_{told}"] = round(float(np.mean(of_8)), 3)
    if "ranking" in found:
        by_task = {r["task_id"]: r["spearman_of_estimate"] for r in found["ranking"]}
        said["tasks_ranked"] = len(by_task)
        said["spearman_of_estimate"] = round(float(np.median(list(by_task.values()))), 3)
    return said


if __name__ == "__main__":
    main()
