#!/usr/bin/env python3
"""Compare levels of LLVM's optimization: how long kernels take to build, and how long to run.

    scripts/lab/compile/llvm_levels.py RUN RUN --cpu-pct 50 --levels 3,2,1 --out levels.json

The best candidates of each task of runs on a CPU, some from all over their ranking, and the default
schedule are built at every level and measured in one quiet slice, in turns. Where a search would
have ended at another level this does not say: its own best may be others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import made_by, table, write
from tunerd.builder.build import build_candidate
from tunerd.cluster.layout import local_layout
from tunerd.records import Store
from tunerd.runner.profiles import final_profile
from tunerd.settings import TuneSettings
from tunerd.slices import member
from tunerd.vocabulary import Build, Candidate, Measurement, Task, default_candidate

FEWEST = 50  # candidates of a task that is compared
TITLES: tuple[str, ...] = (
    "task",
    "level",
    "a build",
    "its best",
    "over the first level: the best",
    "the others",
)
TITLES += ("the default",)
Row = dict[str, Any]


def at_level(task: Task, level: int) -> Task:
    description = json.loads(task.target.json) | {"opt-level": level}
    return replace(task, target=replace(task.target, json=json.dumps(description)))


def ranked(runs: Sequence[Path]) -> Iterator[tuple[Task, list[Candidate]]]:
    """Yield the tasks of the runs with their candidates, the fastest first."""
    tasks: dict[str, Task] = {}
    secs: dict[Candidate, float] = {}
    for run in runs:
        with Store.read(run) as store:
            tasks |= {task.task_id: task for task in store.tasks()}
            for record in store.records():
                if not record.candidate.is_default and isinstance(record.result, Measurement):
                    secs[record.candidate] = record.result.median_secs
    for task_id, task in tasks.items():
        own = sorted((c for c in secs if c.task_id == task_id), key=secs.__getitem__)
        if len(own) >= FEWEST:
            yield task, own


def chosen(candidates: Sequence[Candidate], best: int, others: int) -> list[Candidate]:
    rest = candidates[best:]
    return [*candidates[:best], *rest[:: max(1, len(rest) // others)][:others]]


def measured(
    task: Task, candidates: Sequence[Candidate], levels: Sequence[int], quiet: Any
) -> list[Row]:
    """Return a row for each candidate that builds at all levels, with its samples by level."""
    rows = []
    for candidate in candidates:
        tried = [build_candidate(at_level(task, level), candidate) for level in levels]
        builds = [build for build in tried if isinstance(build, Build)]
        if len(builds) < len(levels):
            continue
        results = quiet.compare(builds, final_profile("model"))
        rows.append(
            {
                "task": task.name,
                "candidate_id": candidate.candidate_id,
                "build_secs": {str(k): b.build_secs for k, b in zip(levels, builds, strict=True)},
                "run_secs": {
                    str(k): list(r.run_secs)
                    for k, r in zip(levels, results, strict=True)
                    if isinstance(r, Measurement)
                },
            }
        )
    return rows


def lines_of(name: str, rows: Sequence[Row], levels: Sequence[int], best: int) -> Iterator[Row]:
    """Yield the figures of a task by level, ratios to the first one's; its default comes last."""
    secs = {
        level: [statistics.median(row["run_secs"][str(level)]) for row in rows] for level in levels
    }
    *rows, _ = rows
    for level in levels:
        *over, default = (a / b for a, b in zip(secs[level], secs[levels[0]], strict=True))
        builds = [row["build_secs"][str(level)] for row in rows]
        yield {
            "task": name,
            "level": level,
            "build_ms": 1e3 * statistics.mean(builds),
            "best_ms": 1e3 * min(secs[level]),
            "default_over": default,
            "best_over": [min(over[:best]), statistics.median(over[:best]), max(over[:best])],
            "others_over": [min(over[best:]), statistics.median(over[best:]), max(over[best:])],
        }


def cells(line: Row) -> Sequence[str]:
    spans = (
        f"{mid:.3f} ({low:.3f} to {high:.3f})"
        for low, mid, high in (line["best_over"], line["others_over"])
    )
    figures = f"{line['build_ms']:.0f} ms", f"{line['best_ms']:.3f} ms"
    return line["task"], str(line["level"]), *figures, *spans, f"{line['default_over']:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--cpu-pct", type=int, default=50)
    parser.add_argument("--levels", default="3,2,1")
    parser.add_argument("--best", type=int, default=16)
    parser.add_argument("--others", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    levels = [int(level) for level in options.levels.split(",")]
    settings = TuneSettings(
        model=options.runs[0], out=options.out, cpu_pct=options.cpu_pct, slice_kind="cpu"
    )
    spec = local_layout(settings).slices[0][0]
    rows: list[Row] = []
    lines: list[Row] = []
    with member(spec.kind)(spec) as quiet:
        for task, candidates in ranked(options.runs):
            picked = [*chosen(candidates, options.best, options.others), default_candidate(task)]
            own = measured(task, picked, levels, quiet.launch())
            rows += own
            lines += lines_of(task.name, own, levels, options.best)
    print(table(TITLES, map(cells, lines)))
    found = {**made_by(), "lines": lines}
    write(options.out, found | {"candidates": rows})


if __name__ == "__main__":
    main()
