#!/usr/bin/env python3
"""Measure what the wait for company and members' objectives cost in launches of several requests.

    PYTHONPATH=.:scripts python3 -m lab.colocation.company PLAN.yaml --out FOLDER
    PYTHONPATH=.:scripts python3 -m lab.colocation.company --simulated-us 564 --out FOLDER

Takes a plan of the policy `space-time` and sends its Poisson load in turns: requests wait for
company for each time of --window-ms at most, with the members' objectives and without. With
--simulated-us there are eight members in two slices instead, whose graphs of up to eight requests
end after so long without doing anything: then the engine and its host are measured alone, and the
files say "simulated".

Written after each turn: company.json, with the facts of the host and all turns, and company.txt, a
table.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lab.colocation.simulated import Calls, make_artifact, simulated_places
from lab.lab import made_by, spread, table, write
from tunerd.colocation import Engine, Plan
from tunerd.colocation.bench import sample_inputs
from tunerd.colocation.load.energy import EnergyMeter
from tunerd.colocation.load.generator import DONE, run_load
from tunerd.colocation.places.base import Place
from tunerd.colocation.plan import LoadChoice
from tunerd.errors import InputError

MEMBERS, TOGETHER, SLICES, SIDE = 8, 8, (50, 50), 32  # of what is simulated
SLO_MS = 20.0


@dataclass(frozen=True)
class Way:
    """How requests are served. window_ms: for which they may wait for company."""

    window_ms: float
    has_objectives: bool


@dataclass(frozen=True)
class Turn:
    """What came of a load. joules: of each inference; None where nothing tells."""

    way: Way
    p50_ms: float
    p99_ms: float
    answered: int
    asked: int
    per_launch: float
    joules: float | None


def as_served(plan: Plan, way: Way) -> Plan:
    """Return a plan whose requests are served so; raises InputError for another policy."""
    if plan.policy.kind != "space-time":
        raise InputError(f"the plan has the policy {plan.policy.kind}; give one of space-time")
    policy = plan.policy.model_copy(update={"window_ms": way.window_ms})
    members = [
        member if way.has_objectives else member.model_copy(update={"slo_ms": None})
        for member in plan.members
    ]
    return plan.model_copy(update={"policy": policy, "members": tuple(members)})


def turn(plan: Plan, way: Way, load: LoadChoice, place: Place | None = None) -> Turn:
    """Send a load to a plan that is served so."""
    with Engine(as_served(plan, way), place=place) as engine:
        meter = EnergyMeter(engine.gpu_uuid)
        inputs = sample_inputs(engine.plan)
        observed = run_load(engine, load, inputs, on_start=meter.start, on_end=meter.stop)
        groups = engine.stats().groups.values()
    done = [1e3 * s.latency_secs for s in observed.counted if s.end == DONE]
    p50, p99 = (float(np.quantile(done, part)) if done else math.nan for part in (0.5, 0.99))
    per_launch = statistics.fmean([g.per_launch for g in groups if g.per_launch] or [1.0])
    joules = None if meter.joules is None or not done else meter.joules / len(done)
    return Turn(way, p50, p99, len(done), len(observed.counted), per_launch, joules)


def simulated(folder: Path, rate: float) -> Plan:
    """Return a plan of members with an artifact that is made in a folder."""
    made = str(make_artifact(folder / "made", SIDE, TOGETHER))
    members = [
        {"name": f"m{nth}", "artifact": made, "rate": rate, "slo_ms": SLO_MS}
        for nth in range(MEMBERS)
    ]
    policy = {"kind": "space-time", "slices": SLICES, "together": TOGETHER}
    return Plan.model_validate({"device": "cpu", "policy": policy, "members": members})


def shown(turns: Sequence[Turn]) -> str:
    """Return a row for each way: the median of its turns, the least and the most."""
    rows = []
    for way in dict.fromkeys(each.way for each in turns):
        of = [each for each in turns if each.way == way]
        lost = sum(each.asked - each.answered for each in of)
        rows.append(
            [
                f"{way.window_ms:g} ms",
                "yes" if way.has_objectives else "no",
                *(_spread([getattr(e, name) for e in of], " ms") for name in ("p50_ms", "p99_ms")),
                _spread([each.per_launch for each in of]),
                _spread([each.joules for each in of if each.joules is not None], " J"),
                f"{lost:,} of {sum(each.asked for each in of):,}",
            ]
        )
    heads = ("window", "objectives", "p50", "p99", "in a launch", "each", "refused")
    return table(heads, rows, numbers=range(len(heads)))


def _spread(values: Sequence[float], unit: str = "") -> str:
    return spread(values, "{:.3g}" + unit) if values else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan", type=Path, nargs="?", help="of the policy space-time")
    parser.add_argument("--simulated-us", type=float, help="of a graph, instead of a plan")
    parser.add_argument("--rate", type=float, default=600.0, help="of a simulated member, 1/s")
    parser.add_argument("--window-ms", type=float, nargs="+", default=[0.0, 0.3, 1.0])
    parser.add_argument("--secs", type=float, default=6.0, help="of a turn")
    parser.add_argument("--turns", type=int, default=3, help="of each way")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if (options.plan is None) == (options.simulated_us is None):
        parser.error("give a plan, or --simulated-us")
    warnings.simplefilter("ignore")
    ways = [Way(ms, has) for ms in options.window_ms for has in (True, False)]
    load = LoadChoice(kind="poisson", duration=options.secs)
    turns: list[Turn] = []
    with tempfile.TemporaryDirectory() as scratch:
        plan = Plan.read(options.plan) if options.plan else simulated(Path(scratch), options.rate)
        device = plan.device if options.plan else "simulated"
        document: dict[str, Any] = made_by() | {"device": device}
        for _ in range(options.turns):
            for way in ways:
                turns.append(turn(plan, way, load, _place(options)))
                print(turns[-1], flush=True)
                write(options.out / "company.json", document | {"turns": [*map(asdict, turns)]})
                (options.out / "company.txt").write_text(shown(turns) + "\n")
    print(shown(turns))


def _place(options: argparse.Namespace) -> Place | None:
    if options.plan:
        return None
    places = simulated_places(options.simulated_us, TOGETHER, calls=Calls(0.0, 0.0, 0.0))
    made: Place = places["graphs"]()
    return made


if __name__ == "__main__":
    main()
