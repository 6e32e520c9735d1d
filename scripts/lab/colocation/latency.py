#!/usr/bin/env python3
"""What tenants of one GPU lose by each other: tails, attainment, spread, memory.

    PYTHONPATH=.:scripts python3 -m lab.colocation.latency --parts beside,mixed --out FOLDER

    beside     p99 of a tenant beside three copies that are always busy, over that alone
    mixed      a model of some 0.3 ms beside one of some 10 ms: p99 of one, throughput of the other
    bursts     attainment at 80% of the capacity, with bursts of six times as much
    replicas   the slowest of ten replicas over the fastest
    density    how many replicas one process serves, and the memory of one more
    reshare    how long a change of shares takes while both members serve
    faults     how long ten tenants in clients of MPS are without answers when one of them faults

Each of the first four is a plan of recipes/colocation under several policies, as `tunerd colocate
bench` runs it. Artifacts that are missing in runs/colocation are made first (lab/colocation/
tenants.py). A part that is in the folder is not run again. Writes PART.json with every latency, and
latency.txt. Runs where PyTorch and one NVIDIA GPU are.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.colocation import latency_table, recovery, tenants
from lab.colocation.resharing import reshares
from lab.colocation.tenants import RUNS, Kind

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "recipes" / "colocation"
QUARTER, TENTH = Kind("resnet50", 25), Kind("resnet50", 10)
SHORT, LONG = Kind("mobilenet_v2", 25), Kind("resnet50", 75, batch=64)
REPLICAS = (10, 30, 60, 120)
_DENSITY_STREAMS = 8
_LIMIT_SECS = 500.0  # of one part


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
} | {"reshare": ((QUARTER, 2),), "density": ((TENTH, 10),), "faults": ((TENTH, 10),)}


def bench(part: Part, place: str) -> dict[str, Any]:
    """Bench a recipe under each policy; a policy that cannot be had here is named a problem."""
    from tunerd import api
    from tunerd.colocation import Plan
    from tunerd.colocation.bench import rated
    from tunerd.report.colocation import bench_json

    plan = Plan.read(RECIPES / f"{part.recipe}.yaml").model_copy(update={"place": place})
    plan, capacity = rated(plan, _say)  # once, for all policies
    found: dict[str, Any] = {"capacity": capacity, "policies": {}, "problems": {}}
    for policy in part.policies:
        try:
            benched = api.colocate_bench(plan, policies=[policy], on_step=_say)
        except Exception as error:
            found["problems"][policy] = f"{type(error).__name__}: {error}"[:600]
            continue
        document = bench_json(benched)
        (rounds,) = benched.rounds
        found["policies"][policy] = {
            "plan": document["plan"],
            "result": document["results"][0],
            "together": [_compact(observed) for observed in rounds.together],
            "alone": {
                name: [_compact(observed) for observed in each]
                for name, each in rounds.alone.items()
            },
        }
    return found


def _compact(observed: Any) -> dict[str, Any]:
    """Return by member the microseconds of what was answered, and how everything ended."""
    found: dict[str, Any] = {}
    for sample in observed.counted:
        mine = found.setdefault(sample.member, {"latencies_us": [], "ends": {}})
        mine["ends"][sample.end] = mine["ends"].get(sample.end, 0) + 1
        if sample.end == "done":
            mine["latencies_us"].append(round(sample.latency_secs * 1e6))
    return {"window_secs": observed.window[1] - observed.window[0], "members": found}


def density(folders: Sequence[Path]) -> dict[str, Any]:
    """Load more and more replicas into one process, until no more fit or all numbers are done."""
    found: dict[str, Any] = {"replicas": [], "problems": {}}
    for count in REPLICAS:
        try:
            found["replicas"].append(_replicas(count, folders))
        except Exception as error:
            found["problems"][f"{count} replicas"] = f"{type(error).__name__}: {error}"[:600]
            break
    found["weights_bytes"] = (folders[0] / "weights.bin").stat().st_size
    return found


def _replicas(count: int, folders: Sequence[Path]) -> dict[str, Any]:
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
    return {
        "count": count,
        "load_secs": load_secs,
        "resident_bytes": [resident.get(m.name, 0) for m in plan.members],
        "planned_bytes": [planned[m.name] for m in plan.members],
        "observed": _compact(observed),
    }


def inside(options: argparse.Namespace) -> None:
    """Measure one part in this process, and write it."""
    from tunerd.system import gpus, host
    from tunerd.system.files import write_whole
    from tunerd.vocabulary import to_json

    facts = host.facts()
    document: dict[str, Any] = {
        "part": options.inside,
        "place": options.place,
        "host": to_json(facts),
        "clock": to_json(gpus.conditions(facts.gpus[0].uuid)) if facts.gpus else None,
    }
    since = time.monotonic()
    folders = [TENTH.run(RUNS.resolve()) / f"tenant-{i}" for i in range(10)]
    if options.inside == "density":
        document |= density(folders)
    elif options.inside == "reshare":
        document |= reshares(RECIPES / "reshare.yaml")
    elif options.inside == "faults":
        culprit = recovery.lookup(RUNS.resolve() / "lookup")
        document |= recovery.faults(folders[:9], culprit)
    else:
        document |= bench(BENCHES[options.inside], options.place)
    document["secs"] = time.monotonic() - since
    write_whole(_file(options, options.inside), json.dumps(document) + "\n", sync=False)


def measured(options: argparse.Namespace, part: str) -> None:
    """Make what a part needs, and measure it in a process of its own."""
    if _file(options, part).exists():
        return
    for kind, count in KINDS[part]:
        _say(f"{part}: {count} of {kind.stem}, tuned at {kind.pct}%")
        tenants.made(kind, count, RUNS.resolve(), budget=options.budget)
    command = [sys.executable, "-m", "lab.colocation.latency", "--inside", part]
    command += ["--place", options.place, "--out", str(options.out)]
    try:
        done = subprocess.run(command, check=False, timeout=_LIMIT_SECS)
        if done.returncode:
            _say(f"{part} ended with {done.returncode}")
    except subprocess.TimeoutExpired:
        _say(f"{part} took longer than {_LIMIT_SECS:g} s")


def _file(options: argparse.Namespace, part: str) -> Path:
    suffix = "" if options.place == "in-process" else f"-{options.place}"
    return Path(options.out) / f"{part}{suffix}.json"


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(KINDS), help="several with commas")
    parser.add_argument("--place", default="in-process", help="or mps: of those benched")
    parser.add_argument("--budget", default="30s", help="of each search")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out.resolve()
    if options.inside:
        inside(options)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    for part in options.parts.split(","):
        if part not in KINDS:
            parser.error(f"there is no part '{part}'; there are {', '.join(KINDS)}")
    for part in options.parts.split(","):
        measured(options, part)
        text = latency_table.tables(options.out)
        (options.out / "latency.txt").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
