#!/usr/bin/env python3
"""Say how far the search's own times could be trusted in runs of `tunerd tune --fidelity N`.

    scripts/reproduce recipes/shares.yaml
    scripts/lab/search/fidelity.py runs/fidelity/light_resnet50-gpu40 --out FOLDER

Writes FOLDER/benchmark.json: over the tasks Kendall's tau-b, of all candidates and of those close
to the fastest, the recall of the best three, and how much slower what is chosen is than the
fastest, by samples that did not choose it. Beside it FOLDER/fidelity.txt has a table with each
task's, and FOLDER/RUN.json every sample. Such a file may stand for its run, to compute the figures
again:

    tar xJf results/h200-fidelity/runs.tar.xz
    scripts/lab/search/fidelity.py light_resnet50-gpu40.json light_resnet50-gpu25.json --out FOLDER
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import write
from tunerd.errors import InputError, TunerdError
from tunerd.records import typed
from tunerd.records.rows import with_sources
from tunerd.report.fidelity_section import fidelity_json
from tunerd.vocabulary import DEFAULT_SOURCE, Candidate
from tunerd.vocabulary.outcome import TaskOutcome

AIM_TAU, AIM_EXCESS = 0.95, 0.01
_KEPT_OF_TASK = ("task_id", "name", "weight", "trials", "failed", "default_secs", "best_secs")


def raw(run: Path) -> dict[str, Any]:
    """Return what is kept of a run, all samples of its finals, and its figures."""
    if run.suffix != ".json":
        return of_folder(run)
    kept: dict[str, Any] = json.loads(run.read_text())
    return kept | {"fidelity": fidelity_json(outcome(task) for task in kept["tasks"])}


def outcome(task: dict[str, Any]) -> TaskOutcome:
    """Return a kept task as a value, without its winner, which its finalists tell."""
    unknown = {"winner": Candidate(task["task_id"], "", DEFAULT_SOURCE), "comparison": None}
    return typed.of_kind(TaskOutcome, with_sources(task | {"winner": {}}) | unknown | {"note": ""})


def of_folder(run: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tunerd", "report", str(run), "--json", "--to", "-"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if ended.returncode:
        raise InputError(f"tunerd report {run} ended with {ended.returncode}")
    document = json.loads(ended.stdout)
    finals = any(task["candidates"] for task in document["fidelity"]["tasks"])
    if document["result"] is None or not finals:
        raise InputError(f"{run} has no finals to judge its search by; tune with --fidelity 12")
    return {
        "name": run.name,
        "settings": document["settings"],
        "host": document["host"],
        "proofs": document["result"]["proofs"],
        "fidelity": document["fidelity"],
        "drift": document["drift"],
        "phase_secs": document["time_use"]["phase_secs"],
        "slices_busy": document["time_use"]["busy"].get("slice"),
        "tasks": [
            {key: task[key] for key in (*_KEPT_OF_TASK, "measured_as", "finalists")}
            for task in document["tasks"]
        ],
    }


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of one share."""
    fidelity = found["fidelity"]
    known = [t for t in fidelity["tasks"] if t["excess"] is not None]
    by_id = {t["task_id"]: t for t in found["tasks"]}
    chosen = fastest = 0.0
    for task in known:
        secs = by_id[task["task_id"]]["weight"] * by_id[task["task_id"]]["best_secs"]
        chosen, fastest = chosen + secs, fastest + secs / (1 + task["excess"])
    within = sum(t["excess"] <= AIM_EXCESS for t in known)
    tau = fidelity["median_tau"]
    busy = found.get("slices_busy")  # older files have none: it stands in the run's own log
    return {
        "name": found["name"],
        "slices": len(found["proofs"]),
        "sm_count": found["proofs"][0]["sm_count"],
        "measured_as": next((t["measured_as"] for t in found["tasks"]), ""),
        "tasks": len(fidelity["tasks"]),
        "tasks_told": fidelity["told"],
        "candidates_median": fidelity["median_candidates"],
        "tau_median": tau,
        "span_median": fidelity["median_span"],
        "tasks_told_near": fidelity["told_near"],
        "tau_near_median": fidelity["median_tau_near"],
        "recall_median": fidelity["median_recall"],
        "recall_mean": fidelity["mean_recall"],
        "tasks_with_full_recall": fidelity["full_recall"],
        "tasks_within_pct": 100 * within / len(known) if known else None,
        "excess_worst_pct": None if not known else 100 * fidelity["worst_excess"],
        "excess_of_model_pct": 100 * (chosen / fastest - 1) if fastest else None,
        "reaches_tau": None if tau is None else tau >= AIM_TAU,
        "reaches_excess": chosen / fastest - 1 <= AIM_EXCESS if fastest else None,
        "slices_busy_pct": None if busy is None else 100 * busy,
        "slices_that_drifted": sum(s["warns"] for s in found["drift"]["slices"]),
        "finalists_secs": found["phase_secs"].get("finalists"),
    }


def shown(rows: Sequence[dict[str, Any]]) -> str:
    """Return a line per share for people."""
    return "\n".join(
        f"{row['slices']} slices of {row['name']}: median tau {text(row['tau_median'], 3)} over "
        f"{row['tasks_told']} tasks of {text(row['candidates_median'], 0)} candidates, "
        f"{text(row['span_median'], 1)} times apart; {text(row['tau_near_median'], 3)} over "
        f"{row['tasks_told_near']} tasks with candidates near the fastest; mean recall "
        f"{text(row['recall_mean'], 2)}, 1 in {row['tasks_with_full_recall']} tasks; chosen within "
        f"{text(row['excess_of_model_pct'], 2)}% of the fastest over the model, worst task "
        f"{text(row['excess_worst_pct'], 2)}%"
        for row in rows
    )


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return each task's figures in each run, the tasks that take longest by default first."""
    of_run = "tau | slowest over fastest | near the fastest | their tau | best 3 | chosen"
    heads = [f"{of_run}, over the fastest ({each['name']})" for each in found]
    lines = [f"| task | {' | '.join(heads)} |", f"|---|{'--:|' * 6 * len(found)}"]
    told = [{t["task_id"]: t for t in each["fidelity"]["tasks"]} for each in found]
    first = sorted(found[0]["tasks"], key=lambda t: -t["weight"] * (t["default_secs"] or 0))
    for task in first:
        of_runs = [of.get(task["task_id"], {}) for of in told]
        if any(of.get("tau") is not None for of in of_runs):
            cells = [
                f"{text(of.get('tau'), 3)} | {text(of.get('span'), 2)} | {of.get('near', 0)} | "
                f"{text(of.get('tau_near'), 3)} | {text(of.get('recall'), 2)} | "
                + ("unknown" if of.get("excess") is None else f"{100 * of['excess']:.2f}%")
                for of in of_runs
            ]
            lines.append(f"| {task['name']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def text(value: float | None, digits: int) -> str:
    return "unknown" if value is None else f"{value:.{digits}f}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a folder or RUN.json")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    try:
        found = [raw(run) for run in options.runs]
    except TunerdError as error:
        print(f"fidelity: {error}", file=sys.stderr)
        return int(error.exit_code)
    rows = [summary(f) for f in found]
    options.out.mkdir(parents=True, exist_ok=True)
    for each in (f for f, run in zip(found, options.runs, strict=True) if run.is_dir()):
        write(options.out / f"{each['name']}.json", each, indent=None)
    document = {
        "aim": {"tau_median": AIM_TAU, "excess_of_model_pct": 100 * AIM_EXCESS},
        "summary": rows,
        "hosts": [f["host"] for f in found],
    }
    write(options.out / "benchmark.json", document)
    (options.out / "fidelity.txt").write_text(table(found) + "\n")
    print(shown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
