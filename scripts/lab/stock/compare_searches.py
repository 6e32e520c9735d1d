#!/usr/bin/env python3
"""Put searches of the same tasks side by side: how fast trials come, and how soon they are good.

    scripts/lab/stock/compare_searches.py before after --out searches.json
    scripts/lab/stock/compare_searches.py searches.json [MORE.json ...] [--chance]

Each FOLDER has searches of `lab/stock/benchmark.py --only tunerd`, one for each seed, with the
same comparison. The weighted latency is that of each task's best so far, times its calls, as the
searches measured it. Prints medians over the seeds; --out keeps the time of each trial, and when
it ended. Files of --out are joined by the names in them. --chance says how likely latencies as
unlike those of the first kind are where nothing differs (Mann-Whitney, two-sided).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import load, table, write
from tunerd.system import host
from tunerd.vocabulary import to_json

TRIALS = (16, 32, 64, 128)  # of each task
Trial = tuple[float, str, float | None]  # seconds from the start, the task, seconds of a call


def searches_of(folder: Path) -> dict[str, Any]:
    """Return a folder's searches by their seeds, and how often a model calls each task."""
    comparison = json.loads((folder / "comparison.json").read_text())
    searches = {}
    for path in sorted(folder.glob("tunerd-*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        searches[path.stem.removeprefix("tunerd-")] = [
            (
                round(x["at_secs"], 3),
                x["task_id"],
                float(f"{statistics.median(x['run_secs']):.6g}") if x["run_secs"] else None,
            )
            for x in lines
            if "at_secs" in x
        ]
    weights = {task["task_id"]: task["weight"] for task in comparison["tasks"]}
    return {"name": folder.name, "weights": weights, "searches": searches}


def weighted_secs(trials: Sequence[Trial], weights: dict[str, int], first: int) -> float:
    """Return the weighted latency after the first so many trials of each task."""
    failed = float("inf")
    return sum(
        weight * min([failed if s is None else s for _, t, s in trials if t == task][:first])
        for task, weight in weights.items()
    )


def row(kept: dict[str, Any]) -> list[str]:
    searches = list(kept["searches"].values())
    rates = [len(trials) / trials[-1][0] for trials in searches]
    latencies = (
        statistics.median(weighted_secs(trials, kept["weights"], first) for trials in searches)
        for first in TRIALS
    )
    rate = f"{statistics.median(rates):.2f} ({min(rates):.2f} to {max(rates):.2f})"
    return [kept["name"], str(len(searches)), rate, *(f"{1e3 * x:.2f} ms" for x in latencies)]


def joined(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return what files of --out have, the searches of one name together."""
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        for kept in load(path)["found"]:
            one = found.setdefault(kept["name"], {**kept, "searches": {}})
            one["searches"] |= kept["searches"]
    return list(found.values())


def chance(first: dict[str, Any], other: dict[str, Any]) -> list[str]:
    from scipy.stats import mannwhitneyu

    cells = []
    for count in TRIALS:
        pair = [
            [weighted_secs(trials, kept["weights"], count) for trials in kept["searches"].values()]
            for kept in (first, other)
        ]
        cells.append(f"p {mannwhitneyu(*pair).pvalue:.2g}")
    return [f"{other['name']} against {first['name']}", "", "", *cells]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="+", type=Path, help="or files of --out")
    parser.add_argument("--chance", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.folder[0].is_file():
        found = joined(options.folder)
    else:
        found = [searches_of(folder) for folder in options.folder]
    titles = ("searches", "seeds", "trials a second", *(f"after {n} a task" for n in TRIALS))
    rows = [row(kept) for kept in found]
    if options.chance:
        rows += [chance(found[0], kept) for kept in found[1:]]
    print(table(titles, rows))
    if options.out is not None:
        facts = {"host": to_json(host.facts()), "found": found}
        write(options.out, facts, indent=None)


if __name__ == "__main__":
    main()
