#!/usr/bin/env python3
"""Print the table of what lab/stock/benchmark.py measured, and write benchmark.json and its plot.

    scripts/lab/stock/summary.py FOLDER

Everything comes from the files in FOLDER: comparison.json, what was compared and where; a file of
each run, a line of JSON for each of its records; remeasured.json, the second look.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import write
from lab.stock.curves import curves_svg
from tunerd.system.text import TIMES, UNKNOWN, duration_text, percent_text, secs_text, significant

TUNERS = {"stock": "TVM's own tuner", "tunerd": "tunerd"}
TARGET_RATIO = {"llvm": 8, "cuda": 10}  # of trials per second
Run = dict[str, Any]


def runs_in(folder: Path) -> list[Run]:
    """Return the runs that are finished, by seed."""
    paths = [path for tuner in TUNERS for path in folder.glob(f"{tuner}-*.jsonl")]
    return sorted(map(load_run, paths), key=lambda run: (run["seed"], run["tuner"]))


def load_run(path: Path) -> Run:
    """Return one run's file: the header's fields, `got`, `records`, `ended` and `secs`."""
    run: Run = {"records": []}
    for line in filter(str.strip, path.read_text().splitlines()):
        try:
            value = json.loads(line)
        except ValueError:  # the line that was being written when the run was cut short
            continue
        if "at_secs" in value:
            run["records"].append(value)
        else:
            run |= value
    run["records"].sort(key=lambda record: record["at_secs"])
    return run


def best_of(run: Run) -> dict[str, dict[str, Any]]:
    """Return each task's fastest record, by what its own tuner measured."""
    best: dict[str, dict[str, Any]] = {}
    for record in run["records"]:
        if record["run_secs"] and seconds(record) < seconds(best.get(record["task_id"])):
            best[record["task_id"]] = record
    return best


def seconds(record: Mapping[str, Any] | None) -> float:
    """Return a record's time; TVM's own tuner takes one sample."""
    if record is None:
        return float("inf")
    return float(statistics.median(record["run_secs"]))


def remeasured_secs(
    found: Mapping[str, Any], name: str, weights: Mapping[str, int]
) -> float | None:
    """Return the weighted latency of one run's best candidates; None where one has no number."""
    total = 0.0
    for task_id, weight in weights.items():
        result = found["tasks"].get(task_id, {}).get(name, {})
        if not result.get("run_secs") or result.get("wrong"):
            return None
        total += weight * statistics.median(result["run_secs"])
    return total


def curve_of(run: Run, weights: Mapping[str, int]) -> list[tuple[float, float]]:
    """Return (seconds, weighted latency of the best so far), from when each task has a number."""
    best: dict[str, float] = {}
    curve: list[tuple[float, float]] = []
    for record in run["records"]:
        task_id = record["task_id"]
        if not record["run_secs"] or seconds(record) >= best.get(task_id, float("inf")):
            continue
        best[task_id] = seconds(record)
        if best.keys() >= weights.keys():
            total = sum(weight * best[t] for t, weight in weights.items())
            if curve and curve[-1][0] == record["at_secs"]:
                curve.pop()
            curve.append((record["at_secs"], total))
    return curve


def name_of(run: Run) -> str:
    return f"{run['tuner']}-{run['seed']}"


def pairs_in(runs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Return the runs of both tuners, stock's first, for each seed that has both."""
    of = {(run["tuner"], run["seed"]): run for run in runs}
    return [
        (run, of["tunerd", seed])
        for (tuner, seed), run in sorted(of.items())
        if tuner == "stock" and ("tunerd", seed) in of
    ]


def cut_equal(pair: tuple[Run, Run]) -> list[Run]:
    """Return two runs with as many trials of each task as both have, their first ones."""
    stock, ours = (Counter(r["task_id"] for r in run["records"]) for run in pair)
    return [run | {"records": _first(run["records"], stock & ours)} for run in pair]


def _first(records: Sequence[Run], most: Mapping[str, int]) -> list[Run]:
    taken: Counter[str] = Counter()
    kept = []
    for record in records:
        taken[record["task_id"]] += 1
        if taken[record["task_id"]] <= most[record["task_id"]]:
            kept.append(record)
    return kept


def bests_in(runs: Sequence[Run]) -> dict[str, dict[str, Run]]:
    """Return each run's best records by its name, and by another one those of equal trials."""
    found = {name_of(run): best_of(run) for run in runs}
    for pair in pairs_in(runs):
        for cut, run in zip(cut_equal(pair), pair, strict=True):
            found[equal_name(cut, run)] = best_of(cut)
    return found


def equal_name(cut: Run, run: Run) -> str:
    """Name the best of a run that was cut: as the run where it has the same."""
    return name_of(run) if best_of(cut) == best_of(run) else f"{name_of(run)}, equal trials"


def weighted_secs(run: Run, weights: Mapping[str, int]) -> float | None:
    """Return the weighted latency of a run's best, as it was searched."""
    best = best_of(run)
    if best.keys() < weights.keys():
        return None
    return sum(weight * seconds(best[t]) for t, weight in weights.items())


def summary_of(run: Run, weights: Mapping[str, int]) -> dict[str, Any]:
    records, curve = run["records"], curve_of(run, weights)
    last = records[-1]["at_secs"] if records else None
    by_task = {t: sum(r["task_id"] == t for r in records) for t in weights}
    return {
        "tuner": run["tuner"],
        "seed": run["seed"],
        "ended": run["ended"],
        "trials": len(records),
        "trials_by_task": by_task,
        "failed": sum(not r["run_secs"] for r in records),
        "first_record_secs": records[0]["at_secs"] if records else None,
        "last_record_secs": last,
        "trials_per_sec": len(records) / last if last else None,
        "search_weighted_secs": curve[-1][1] if curve else None,
        "curve": curve,
    }


def summarize(
    runs: Sequence[Run], weights: Mapping[str, int], found: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return each run's figures, and tunerd's against those of TVM's tuner for each seed."""
    mine = {name_of(run): summary_of(run, weights) for run in runs}
    for name, summary in mine.items():
        summary["remeasured_secs"] = remeasured_secs(found, name, weights) if found else None
    pairs = []
    for pair in pairs_in(runs):
        stock, ours = (mine[name_of(run)] for run in pair)
        goal = stock["search_weighted_secs"]
        cut = cut_equal(pair)
        equal = [weighted_secs(run, weights) for run in cut]
        names = [equal_name(*both) for both in zip(cut, pair, strict=True)]
        again = [remeasured_secs(found, name, weights) if found else None for name in names]
        reached = next((at for at, secs in ours["curve"] if goal and secs <= goal), None)
        pairs.append(
            {
                "seed": stock["seed"],
                "trials_per_sec_ratio": over(ours["trials_per_sec"], stock["trials_per_sec"]),
                "reach_secs": reached,
                "reach_fraction": over(reached, stock["last_record_secs"]),
                "equal_trials": len(cut[0]["records"]),
                "equal_stock_secs": equal[0],
                "equal_tunerd_secs": equal[1],
                "equal_ratio": over(*equal),
                "equal_again_stock_secs": again[0],
                "equal_again_tunerd_secs": again[1],
                "equal_again_ratio": over(*again),
                "latency_ratio": over(stock["remeasured_secs"], ours["remeasured_secs"]),
            }
        )
    default = remeasured_secs(found, "default", weights) if found else None
    return {"runs": list(mine.values()), "pairs": pairs, "default_remeasured_secs": default}


def over(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def spread(values: Sequence[float | None], text: Callable[[Any], str]) -> str:
    """Return the median and the range, and how many have a value where some have none."""
    known = [v for v in values if v is not None]
    if not known:
        return UNKNOWN
    shown = text(statistics.median(known))
    if len(known) > 1:
        shown += f" ({text(min(known))} to {text(max(known))})"
    return shown if len(known) == len(values) else f"{shown}, {len(known)} of {len(values)} seeds"


def table(summary: Mapping[str, Any], target: str) -> str:
    """Return the comparison as Markdown: medians, and the range of the seeds in parentheses."""

    def runs(tuner: str, key: str, text: Callable[[Any], str]) -> str:
        return spread([r[key] for r in summary["runs"] if r["tuner"] == tuner], text)

    def pairs(key: str, text: Callable[[Any], str]) -> str:
        return spread([p[key] for p in summary["pairs"]], text)

    def times(ratio: float) -> str:
        return f"{ratio:.2f}{TIMES}"

    def row(what: str, key: str, text: Callable[[Any], str], ratio: str, goal: str) -> list[str]:
        return [what, runs("stock", key, text), runs("tunerd", key, text), ratio, goal]

    rows = [
        ["", "TVM's own tuner", "tunerd", "tunerd against it", "target"],
        ["---"] * 5,
        row("trials", "trials", str, "", "equal"),
        row("failed trials", "failed", str, "", ""),
        row(
            "trials per second, start-up included", "trials_per_sec", significant,
            pairs("trials_per_sec_ratio", times), f"at least {TARGET_RATIO[target]}{TIMES}",
        ),
        row("from the start to the last record", "last_record_secs", duration_text, "", ""),
        [
            "until the weighted latency at which TVM's tuner ends, both by their own search's "
            "measurements",
            runs("stock", "last_record_secs", duration_text),
            pairs("reach_secs", duration_text), pairs("reach_fraction", percent_text),
            "at most 10%",
        ],
        [
            "weighted kernel latency after equally many trials of each task, both by their own "
            "search's measurements",
            pairs("equal_stock_secs", secs_text), pairs("equal_tunerd_secs", secs_text),
            pairs("equal_ratio", times), "not worse",
        ],
        [
            "the same, measured again", pairs("equal_again_stock_secs", secs_text),
            pairs("equal_again_tunerd_secs", secs_text), pairs("equal_again_ratio", times),
            "not worse",
        ],
        row(
            "final weighted kernel latency, measured again", "remeasured_secs", secs_text,
            pairs("latency_ratio", times), "not worse",
        ),
    ]  # fmt: skip
    lines = ["| " + " | ".join(cells) + " |" for cells in rows]
    default = secs_text(summary["default_remeasured_secs"])
    lines += ["", f"The default schedules, measured beside them: {default}."]
    cut = [r for r in summary["runs"] if r["ended"] != "complete"]
    lines += [
        f"Seed {r['seed']} of {r['tuner']} was {r['ended']}: {r['trials']} trials." for r in cut
    ]
    return "\n".join(lines)


def report(folder: Path) -> str:
    """Write the JSON files and benchmark.svg of what is in the folder, and return the table."""
    comparison = json.loads((folder / "comparison.json").read_text())
    runs = runs_in(folder)
    weights = {task["task_id"]: task["weight"] for task in comparison["tasks"]}
    path = folder / "remeasured.json"
    found = json.loads(path.read_text()) if path.exists() else None
    summary = summarize(runs, weights, found)
    best = bests_in(runs)
    for run in runs:  # traces of the best only: the others are in the runs' own files
        run["records"] = [{k: v for k, v in r.items() if k != "trace"} for r in run["records"]]
    document = {
        "version": 1,
        **comparison,
        "summary": summary,
        "remeasured": found,
        "best": best,
        "runs": runs,
    }
    write(folder / "benchmark.json", document)
    write(folder / "summary.json", summary)  # of the same, without the runs
    series = {
        name: [r["curve"] for r in summary["runs"] if r["tuner"] == tuner]
        for tuner, name in TUNERS.items()
    }
    if any(curve for curves in series.values() for curve in curves):
        title = f"Best weighted kernel latency, {len(weights)} tasks of {comparison['model']}"
        (folder / "benchmark.svg").write_text(curves_svg(title, series), encoding="utf-8")
    return table(summary, comparison["target"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    print(report(parser.parse_args().folder))


if __name__ == "__main__":
    main()
