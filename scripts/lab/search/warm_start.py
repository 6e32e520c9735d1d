#!/usr/bin/env python3
"""Compare a search that starts from other runs with one that starts from nothing.

    scripts/lab/search/warm_start.py MODEL.onnx --gpu-pct 40 --from RUN --out FOLDER
    scripts/lab/search/warm_start.py MODEL.onnx --cpu-pct 50 --from RUN --from ANOTHER --out FOLDER

For each seed both search the same tasks with the same trials for each task, in turn, each in a
fresh process. Prints how many trials and seconds each needs until the model's weighted latency is
what the cold search ends with, by the medians of the search. Writes FOLDER/benchmark.json with all
trials; what is finished there is not run again. lab/data/benchmark_tasks.json has the tasks.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import made_by, search, write
from lab.stock import benchmark as stock
from tunerd.errors import InputError, TunerdError
from tunerd.frontend.kernels import Selection, kernels_of
from tunerd.runs import plan
from tunerd.system import host

HERE = Path(__file__).resolve().parent
STARTS = ("cold", "warm")
Run = dict[str, Any]


# --- a run of either start ---------------------------------------------------------------------


def run(options: argparse.Namespace, task_ids: Sequence[str], start: str, seed: int) -> Run:
    folder = options.out / f"{start}-{seed}"
    done = folder.with_suffix(".json")
    command = [sys.executable, str(Path(__file__).resolve()), *stock.share_of(options)]
    command += ["--tasks", ",".join(task_ids), "--seeds", str(seed), "--inside"]
    command += ["--trials-per-task", str(options.trials_per_task), "--out", str(folder)]
    if start == "warm":
        command += [part for other in options.others for part in ("--from", str(other))]
    if done.exists():
        found: Run = json.loads(done.read_text())
        if found["command"] != host.shown(command):
            raise InputError(f"{done} is of another comparison; choose another folder with --out")
        return found
    shutil.rmtree(folder, ignore_errors=True)
    print(f"running {start}, seed {seed}", file=sys.stderr, flush=True)
    started_at = time.time()
    if code := subprocess.run(command, check=False).returncode:
        raise InputError(f"the search ended with {code}; {folder} keeps its logs")
    found = {
        "start": start,
        "seed": seed,
        "command": host.shown(command),
        "secs": time.time() - started_at,
        "trials": list(trials_of(folder, started_at)),
    }
    write(done, found, indent=None)
    return found


def search_inside(options: argparse.Namespace) -> None:
    """Search, in a process of its own."""
    selection = Selection(tuple(options.tasks.split(",")), options.trials_per_task)
    (seed,) = stock.seeds_of(options)
    settings = stock.settings_of(options, options.out, seed)
    settings = settings.model_copy(update={"warm_start": tuple(options.others)})
    search(settings, selection)


def trials_of(folder: Path, started_at: float) -> Iterator[dict[str, Any]]:
    """Yield what was measured, in the order in which it ended."""
    from tunerd.records import Store

    with Store.read(folder) as store:
        ended = [r for r in store.records() if r.ended_at is not None]
    for record in sorted(ended, key=lambda r: (r.ended_at, r.trial_id)):
        assert record.ended_at is not None
        yield {
            "at_secs": record.ended_at - started_at,
            "task_id": record.candidate.task_id,
            "candidate_id": record.candidate.candidate_id,
            "default": record.candidate.is_default,
            "run_secs": record.run_secs,
        }


# --- what is said of them ----------------------------------------------------------------------


def curve(run: Run, weights: Mapping[str, int]) -> list[tuple[int, float, float]]:
    """Return trials, seconds and weighted latency at each improvement, once all tasks have one."""
    best: dict[str, float] = {}
    points: list[tuple[int, float, float]] = []
    trials = 0
    for trial in run["trials"]:
        trials += not trial["default"]
        secs, task_id = trial["run_secs"], trial["task_id"]
        if secs is None or secs >= best.get(task_id, float("inf")):
            continue
        best[task_id] = secs
        if len(best) == len(weights):
            total = sum(weights[t] * s for t, s in best.items())
            points.append((trials, trial["at_secs"], total))
    return points


def reached(
    points: Sequence[tuple[int, float, float]], latency: float
) -> tuple[int, float] | tuple[None, None]:
    """Return the trials and seconds until a latency was reached, or nothing."""
    return next(((n, at) for n, at, secs in points if secs <= latency), (None, None))


def summary(runs: Sequence[Run], weights: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return for each seed what either start ends with, and when it had the cold one's end."""
    rows = []
    for seed in sorted({r["seed"] for r in runs}):
        curves = {r["start"]: curve(r, weights) for r in runs if r["seed"] == seed}
        if not all(curves.get(start) for start in STARTS):
            continue
        goal = curves["cold"][-1][2]
        row: dict[str, Any] = {"seed": seed}
        for start in STARTS:
            trials, secs = reached(curves[start], goal)
            row[start] = {
                "final_secs": curves[start][-1][2],
                "trials_to_goal": trials,
                "secs_to_goal": secs,
            }
        rows.append(row)
    return rows


def shown(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"{'seed':>6} {'start':>6} {'final ms':>10} {'trials to goal':>15} {'seconds':>9}"]
    for row in rows:
        for start in STARTS:
            r = row[start]
            trials = "not reached" if r["trials_to_goal"] is None else r["trials_to_goal"]
            secs = "" if r["secs_to_goal"] is None else f"{r['secs_to_goal']:.1f}"
            final = f"{1e3 * r['final_secs']:.4g}"
            lines.append(f"{row['seed']:>6} {start:>6} {final:>10} {trials:>15} {secs:>9}")
    ratios = [
        r["cold"]["trials_to_goal"] / max(1, r["warm"]["trials_to_goal"])
        for r in rows
        if r["warm"]["trials_to_goal"] is not None
    ]
    if ratios:
        lines.append(
            f"the cold search's end with {statistics.median(ratios):.1f} times fewer trials "
            f"(median of {len(ratios)} of {len(rows)} seeds)"
        )
    return "\n".join(lines)


# --- the command -------------------------------------------------------------------------------


def compare(options: argparse.Namespace) -> None:
    settings = stock.settings_of(options, options.out)
    settings = settings.model_copy(update={"warm_start": tuple(options.others)})
    planned = plan.plan_run(settings)
    layout, earlier = planned.layout, planned.warm_starts
    kernels = kernels_of(planned.model, layout.target)
    listed = stock.lists_of(options.model.stem, layout.target.kind)
    tasks = stock.chosen(options.tasks, listed, kernels.tasks)
    task_ids = [t.task_id for t in tasks]
    options.out.mkdir(parents=True, exist_ok=True)
    facts = {
        **made_by(),
        "model": options.model.stem,
        "share": stock.share_of(options)[1:],
        "trials_per_task": options.trials_per_task,
        "tasks": [{"task_id": t.task_id, "name": t.name, "weight": t.weight} for t in tasks],
        "from": [
            {"run": x.folder.name, "results": x.results, "shared_tasks": x.shared(task_ids)}
            for x in earlier
        ],
    }
    runs = [
        run(options, task_ids, start, seed)
        for seed in stock.seeds_of(options)
        for start in (STARTS if seed % 2 == 0 else reversed(STARTS))
    ]
    rows = summary(runs, {t.task_id: t.weight for t in tasks})
    document = {**facts, "summary": rows, "runs": runs}
    write(options.out / "benchmark.json", document)
    print(shown(rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    shares = parser.add_mutually_exclusive_group(required=True)
    shares.add_argument("--cpu-pct", type=int)
    shares.add_argument("--gpu-pct", type=int)
    parser.add_argument("--from", dest="others", type=Path, action="append", default=[])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", help="how many of the list, or ids with commas between them")
    parser.add_argument("--trials-per-task", type=int, default=128)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.model, options.out = options.model.resolve(), options.out.resolve()
    options.others = [other.resolve() for other in options.others]
    if not options.others and not options.inside:
        parser.error("give the run to start from with --from")
    try:
        (search_inside if options.inside else compare)(options)
    except TunerdError as error:
        sys.exit(f"{parser.prog}: {error}")


if __name__ == "__main__":
    main()
