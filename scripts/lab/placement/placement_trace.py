#!/usr/bin/env python3
"""What placing the jobs of a trace costs under each policy, on simulated devices.

    scripts/lab/placement/placement_trace.py --seed 1 --seed 2 ... [--between 600] --out FOLDER

Each seed is a trace of its own, which every policy places (lab/placement/jobs.py, with the law of
lab/placement/simulation.py). What is less than with exclusive is of the same trace; the floor is
what it would take with a device for each job. Writes placement-trace.json, placement-trace.txt, and
schedules.jsonl.xz: a line for each seed and policy, with [job, device, start, end, what came of it]
of each try, in seconds.
"""

from __future__ import annotations

import argparse
import json
import lzma
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import spread, table, write
from lab.placement import jobs
from lab.placement.simulation import Outcome, Simulation
from tunerd.colocation.placement.policies import POLICIES
from tunerd.colocation.placement.policies.base import Policy
from tunerd.colocation.placement.policies.estimated import (
    Estimated,
    estimate_from,
)
from tunerd.system import host

# What CARMA (arXiv 2508.19073) says of training jobs on four A100s: what was aimed at here.
ANCHORS = {"makespan_less_pct": 35, "energy_less_pct": 15}
# By the key of a figure: what it is called in the table.
_HEADS = {
    "makespan_min": "makespan, min",
    "floor_min": "floor, min",
    "makespan_less_pct": "less, %",
    "energy_kwh": "energy, kWh",
    "energy_less_pct": "less, %",
    "wait_min": "mean wait, min",
    "wait_p95_min": "p95 wait, min",
    "turnaround_min": "mean turnaround, min",
    "utilisation_pct": "utilisation, %",
    "recovered": "out of memory, recovered",
    "failed": "failed",
}


def figures(outcome: Outcome, exclusive: Outcome) -> dict[str, float]:
    """Return what the table says of one trace."""
    waits = sorted(outcome.waits)
    found = {
        "makespan_min": outcome.makespan_secs / 60,
        "floor_min": max(truth.arrives + truth.work_secs for truth in outcome.trace) / 60,
        "makespan_less_pct": 100 * (1 - outcome.makespan_secs / exclusive.makespan_secs),
        "energy_kwh": outcome.joules / 3.6e6,
        "energy_less_pct": 100 * (1 - outcome.joules / exclusive.joules),
        "wait_min": statistics.mean(waits) / 60,
        "wait_p95_min": statistics.quantiles(waits, n=20)[-1] / 60,
        "turnaround_min": statistics.mean(outcome.turnarounds) / 60,
        "utilisation_pct": 100 * outcome.utilisation,
        "recovered": outcome.recovered,
        "failed": len(outcome.failed),
    }
    return {name: round(value, 3) for name, value in found.items()}


def schedule(outcome: Outcome) -> list[list[Any]]:
    return [
        [
            each.truth.job.name,
            each.device.name,
            round(each.start, 1),
            round(each.end, 1),
            "out of memory" if each.is_out_of_memory else each.note or "ended",
        ]
        for each in outcome.tries
    ]


def policies(seed: int) -> dict[str, Policy]:
    estimated = Estimated(estimate_from(jobs.measured(seed)))
    return {**{kind: policy() for kind, policy in POLICIES.items()}, "estimated": estimated}


def shown(rows: dict[str, list[dict[str, float]]]) -> str:
    """Return for each policy the median over traces, and the least and the most."""
    lines = (
        [kind, *(spread([each[name] for each in of]) for name in _HEADS)]
        for kind, of in rows.items()
    )
    return table(["policy", *_HEADS.values()], lines, numbers=range(1, 1 + len(_HEADS))) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, action="append", required=True, dest="seeds")
    parser.add_argument(
        "--between", type=float, default=jobs.BETWEEN_SECS, help="bursts, s in the mean"
    )
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[dict[str, float]]] = {kind: [] for kind in POLICIES}
    schedules, failed = [], {}
    for seed in given.seeds:
        arrived = jobs.trace(seed, between_secs=given.between)
        outcomes = {
            kind: Simulation(arrived, jobs.DEVICES, policy).outcome
            for kind, policy in policies(seed).items()
        }
        for kind, outcome in outcomes.items():
            rows[kind].append(figures(outcome, outcomes["exclusive"]))
            line = {"seed": seed, "policy": kind, "tries": schedule(outcome)}
            schedules.append(json.dumps(line, separators=(",", ":")))
            failed.update({f"{seed} {kind} {job}": why for job, why in outcome.failed.items()})
    facts = host.facts()
    document = {
        "host": {"cpu_model": facts.cpu_model, "cores": len(facts.cores), "python": facts.python},
        "seeds": given.seeds,
        "between_secs": given.between,
        "jobs": jobs.JOBS,
        "devices": len(jobs.DEVICES),
        "medians": {
            kind: {name: statistics.median(each[name] for each in of) for name in _HEADS}
            for kind, of in rows.items()
        },
        "anchors": ANCHORS,
        "traces_that_reach_them": {
            kind: {name: sum(each[name] >= aim for each in of) for name, aim in ANCHORS.items()}
            for kind, of in rows.items()
        },
        "traces_whose_floor_does": sum(
            each["floor_min"] <= each["makespan_min"] * (1 - ANCHORS["makespan_less_pct"] / 100)
            for each in rows["exclusive"]
        ),
        "failed": failed,
        "traces": rows,
    }
    write(given.out / "placement-trace.json", document)
    (given.out / "placement-trace.txt").write_text(shown(rows))
    with lzma.open(given.out / "schedules.jsonl.xz", "wt") as file:
        file.write("\n".join(schedules) + "\n")


if __name__ == "__main__":
    main()
