#!/usr/bin/env python3
"""What tenants of one GPU lose by each other: tails, attainment, spread, memory.

    PYTHONPATH=.:scripts python3 -m lab.colocation.latency --parts beside,mixed --out FOLDER

    beside     p99 of a tenant beside three copies that are always busy, over that alone
    mixed      a model of 0.19 ms beside one of 2.1 ms (H200): p99 of one, throughput of the other
    bursts     attainment at 80% of the capacity, with bursts of six times as much
    replicas   the slowest of ten replicas over the fastest
    density    how many replicas one process serves, and the memory of one more
    reshare    how long a change of shares takes while both members serve
    faults     how long ten tenants in clients of MPS are without answers when one of them faults,
               and what they get before and after

Each of the first four is a plan of recipes/colocation under several policies, as `tunerd colocate
bench` runs it; `reshare` and `faults` (fault-mps.yaml) are one each under its own. What is missing
in runs/colocation is made first (lab/colocation/tenants.py); --prepare-only does no more. A policy,
or a number of replicas, is measured within --secs in a process of its own; --only chooses some, and
one that is there is not measured again. Written after each: PART.json with every latency, the
seconds of each step and what failed why, and latency.txt. Runs where PyTorch and one NVIDIA GPU
are.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.colocation import latency_table, recovery, tenants
from lab.colocation.steps import Steps, say, since_start
from lab.colocation.tenants import RUNS, Kind
from lab.colocation.workers import found_by

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "recipes" / "colocation"
QUARTER, TENTH = Kind("resnet50", 25), Kind("resnet50", 10)
SHORT, LONG = Kind("mobilenet_v2", 25), Kind("encoder", 75, batch=64)
REPLICAS = (10, 30, 60, 120)
_DENSITY_STREAMS = 8


@dataclass(frozen=True)
class Part:
    """What is measured by one recipe. kinds: of which so many tenants are needed."""

    recipe: str
    kinds: tuple[tuple[Kind, int], ...]
    policies: tuple[str, ...]


BENCHES: Mapping[str, Part] = {
    "beside": Part(
        "beside-copies", ((QUARTER, 4),), ("streams", "space", "ordered", "regulated")
    ),
    "mixed": Part(
        "short-beside-long", ((SHORT, 1), (LONG, 1)), ("streams", "space", "ordered", "regulated")
    ),
    "bursts": Part("bursts", ((QUARTER, 4),), ("time", "streams", "space", "ordered")),
    "replicas": Part("ten-replicas", ((TENTH, 10),), ("time", "streams", "space")),
}  # fmt: skip
KINDS: Mapping[str, tuple[tuple[Kind, int], ...]] = {
    name: part.kinds for name, part in BENCHES.items()
} | {"reshare": ((QUARTER, 2),), "density": ((TENTH, 10),), "faults": ((TENTH, 9),)}


# What is measured of each part by itself, the most important first.
CONFIGURATIONS: Mapping[str, tuple[str, ...]] = {
    name: part.policies for name, part in BENCHES.items()
} | {
    "reshare": ("reshare",),
    "density": tuple(f"{count} replicas" for count in REPLICAS),
    "faults": ("faults",),
}


def bench(part: Part, place: str, policy: str, rates: Mapping[str, float]) -> dict[str, Any]:
    """Bench a recipe under one policy.

    rates: of members, a part of the capacity that was measured before; it is, where there are none.
    """
    from tunerd import api
    from tunerd.colocation import Plan
    from tunerd.colocation.bench import rated
    from tunerd.report.colocation import bench_json

    plan = Plan.read(RECIPES / f"{part.recipe}.yaml")
    members = tuple(
        m.model_copy(update={"rate": rates[m.name]}) if m.name in rates else m for m in plan.members
    )
    plan, capacity = rated(plan.model_copy(update={"place": place, "members": members}), say)
    benched = api.colocate_bench(plan, policies=[policy], on_step=say)
    document = bench_json(benched)
    (rounds,) = benched.rounds
    found = {
        "plan": document["plan"],
        "result": document["results"][0],
        "together": [_compact(observed) for observed in rounds.together],
        "alone": {
            name: [_compact(observed) for observed in each] for name, each in rounds.alone.items()
        },
    }
    measured = {"capacity": capacity} if capacity is not None else {}
    new = {m.name: m.rate for m in plan.members if m.rate} if capacity is not None else rates
    return {"policies": {policy: found}, "rates": new} | measured


def reshares() -> dict[str, Any]:
    """Bench the recipe whose shares change; return each change's seconds, and all requests."""
    from tunerd import api

    benched = api.colocate_bench(RECIPES / "reshare.yaml", on_step=say)
    (result,), (rounds,) = benched.results, benched.rounds
    assert result.changes is not None
    samples = [sample for observed in rounds.together for sample in observed.samples]
    return {
        "change_secs": list(result.changes.secs),
        "is_under_load": True,
        "ends": dict(Counter(sample.end for sample in samples)),
        "latencies_us": [round(sample.latency_secs * 1e6) for sample in samples],
        "problems": {},
    }


def _compact(observed: Any) -> dict[str, Any]:
    """Return by member the sorted microseconds of what was answered, and how all ended."""
    found: dict[str, Any] = {}
    for sample in observed.counted:
        mine = found.setdefault(sample.member, {"latencies_us": [], "ends": {}})
        mine["ends"][sample.end] = mine["ends"].get(sample.end, 0) + 1
        if sample.end == "done":
            mine["latencies_us"].append(round(sample.latency_secs * 1e6))
    for mine in found.values():
        mine["latencies_us"].sort()  # a fifth of the bytes, when it is compressed
    return {"window_secs": observed.window[1] - observed.window[0], "members": found}


def density(count: int, folders: Sequence[Path]) -> dict[str, Any]:
    """Load so many replicas into one process, and serve them."""
    from tunerd.colocation import Engine, Plan
    from tunerd.colocation.bench import sample_inputs
    from tunerd.colocation.load.generator import run_load
    from tunerd.colocation.plan import LoadChoice

    members = [
        {"name": f"m{i}", "artifact": folders[i % len(folders)]} for i in range(count)
    ]  # fmt: skip
    policy = {"kind": "streams", "streams": _DENSITY_STREAMS}
    plan = Plan.model_validate({"device": "cuda", "policy": policy, "members": members})
    since = time.monotonic()
    with Engine(plan) as engine:
        load_secs = time.monotonic() - since
        inputs = sample_inputs(plan)
        observed = run_load(engine, LoadChoice(duration=3.0), inputs)
        resident = engine.memory_bytes()
        planned = {name: m.planned_bytes for name, m in engine.stats().members.items()}
    found = {
        "count": count,
        "load_secs": load_secs,
        "resident_bytes": [resident.get(m.name, 0) for m in plan.members],
        "planned_bytes": [planned[m.name] for m in plan.members],
        "observed": _compact(observed),
    }
    return {"replicas": [found], "weights_bytes": (folders[0] / "weights.bin").stat().st_size}


def inside(options: argparse.Namespace) -> None:
    """Measure one configuration in this process, and write what was found."""
    part, _, configuration = options.inside.partition(":")
    if part == "density":
        folders = [TENTH.run(RUNS.resolve()) / f"tenant-{i}" for i in range(10)]
        found = density(int(configuration.partition(" ")[0]), folders)
    elif part == "reshare":
        found = reshares()
    elif part == "faults":
        found = recovery.faults(RECIPES / "fault-mps.yaml")
    else:
        found = bench(BENCHES[part], options.place, configuration, json.loads(options.rates))
    options.result.write_text(json.dumps(found))


def measured(options: argparse.Namespace, part: str) -> None:
    """Make what a part needs, and measure its configurations in a process each."""
    wanted = [c for c in CONFIGURATIONS[part] if not options.only or c in options.only]
    document = _document(options, part)
    steps = Steps(document, lambda: _write(options, part, document), options.until)
    left = [each for each in wanted if each not in document["done"]]
    for kind, count in KINDS[part] if left else ():
        with steps.step(f"{part}: {count} of {kind.stem}, tuned at {kind.pct}%"):
            steps.left_secs(0.0)
            tenants.made(kind, count, RUNS.resolve(), budget=options.budget)
    if part == "faults" and left:
        with steps.step("faults: the model that faults"):
            recovery.made(RUNS.resolve() / "lookup")
    for each in left if not options.prepare_only else ():
        with steps.step(f"{part}, {each}: {options.secs:g} s at most", each):
            found = found_by(
                "latency", "--inside", f"{part}:{each}", "--place", options.place,
                "--rates", json.dumps(document.get("rates", {})), "--out", options.out,
                log=options.out / "logs" / f"{part}-{each.replace(' ', '-')}.txt",
                secs=steps.left_secs(options.secs),
            )  # fmt: skip
            add(document, found)
            document["done"].append(each)
            document["problems"].pop(each, None)


def add(document: dict[str, Any], found: Mapping[str, Any]) -> None:
    """Add what was found of one configuration to what others have."""
    for key, value in found.items():
        if isinstance(value, dict):
            document[key] = document.get(key, {}) | value
        elif key == "replicas":
            document[key] = sorted([*document.get(key, []), *value], key=lambda each: each["count"])
        else:
            document[key] = value


def _document(options: argparse.Namespace, part: str) -> dict[str, Any]:
    """Return what a part has in the folder, or the beginning of it."""
    from tunerd.system import gpus, host
    from tunerd.vocabulary import to_json

    if (path := _file(options, part)).exists():
        return dict(json.loads(path.read_text()))
    facts = host.facts()
    return {
        "part": part,
        "place": options.place,
        "host": to_json(facts),
        "clock": to_json(gpus.conditions(facts.gpus[0].uuid)) if facts.gpus else None,
        "done": [],
        "problems": {},
    }


def _write(options: argparse.Namespace, part: str, document: dict[str, Any]) -> None:
    from tunerd.system.files import write_whole

    document["secs"] = sum(document["took_secs"].values())
    write_whole(_file(options, part), json.dumps(document) + "\n", sync=False)
    write_whole(options.out / "latency.txt", latency_table.tables(options.out), sync=False)


def _file(options: argparse.Namespace, part: str) -> Path:
    suffix = "" if options.place == "in-process" else f"-{options.place}"
    return Path(options.out) / f"{part}{suffix}.json"


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(KINDS), help="several with commas")
    parser.add_argument("--only", action="append", help="a policy, or '10 replicas'")
    parser.add_argument("--prepare-only", action="store_true", help="make what the parts need")
    parser.add_argument("--place", default="in-process", help="or mps: of those benched")
    parser.add_argument("--budget", default="30s", help="of each search")
    parser.add_argument("--secs", type=float, default=120.0, help="of a policy, at most")
    parser.add_argument("--until", type=float, default=float("inf"),
                        help="seconds, after which nothing is begun")  # fmt: skip
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--rates", default="{}", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out.resolve()
    if options.inside:
        inside(options)
        return
    since_start()
    options.out.mkdir(parents=True, exist_ok=True)
    for part in options.parts.split(","):
        if part not in KINDS:
            parser.error(f"there is no part '{part}'; there are {', '.join(KINDS)}")
    for part in options.parts.split(","):
        measured(options, part)
    print(latency_table.tables(options.out), end="")


if __name__ == "__main__":
    main()
