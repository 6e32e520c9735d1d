#!/usr/bin/env python3
"""Compare the memory that a plan says its members need with what a GPU gives them.

    PYTHONPATH=.:scripts python3 -m lab.colocation.memory_by_plan PLAN... --out FOLDER \
        [--policy streams --policy space]

Each plan, as `tunerd colocate bench` takes it, is loaded under each policy in a process of its own
that has no other CUDA. Each member is asked some requests, all at once, so that what is allocated
at the first use is there. Then:

- planned: what the engine planned for its members before the first was loaded, and what a member
  is refused by
- loaded: what the GPU's free memory fell by while the members were loaded
- process: what NVML says that the process holds after the requests, the CUDA context and its code
  included, which no plan of a member has

The order is that of the plan, and a model that several members share counts once. Writes
memory.json and memory.txt. Runs where one NVIDIA GPU is.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.colocation.steps import Steps, since_start
from lab.colocation.workers import found_by
from lab.lab import made_by, table, write

REQUESTS = 16  # of each member, at once
_SECS = 120.0  # that a plan may take
_MIB = 1 << 20


def inside(path: Path, policy: str | None, result: Path) -> None:
    """Load a plan in this process and write what was planned and what came."""
    from tunerd.colocation import Engine, Plan, artifacts
    from tunerd.system import gpus

    plan = Plan.read(path)
    if policy is not None:
        plan = plan.model_copy(update={"policy": type(plan.policy)(kind=policy)})
    with Engine(plan) as engine:
        loaded = engine.memory_bytes()
        asked = [
            engine.submit(member.name, artifacts.sample_inputs(member.artifact))
            for member in plan.members
            for _ in range(REQUESTS)
        ]
        for request in asked:
            request.result(60.0)
        stats = engine.stats()
        found = {
            "policy": stats.policy,
            "lanes": len(stats.lanes),
            "planned_bytes": {name: of.planned_bytes for name, of in stats.members.items()},
            "loaded_bytes": loaded,
            "process_bytes": gpus.process_bytes(engine.gpu_uuid or "").get(os.getpid()),
        }
    result.write_text(json.dumps(found))


def tables(document: dict[str, Any]) -> str:
    rows = []
    for label, found in document["found"].items():
        planned, loaded = (sum(found[of].values()) for of in ("planned_bytes", "loaded_bytes"))
        process = found["process_bytes"]
        rows.append([
            label, str(len(found["planned_bytes"])), str(found["lanes"]), f"{planned / _MIB:,.0f}",
            f"{loaded / _MIB:,.0f}", f"{loaded / planned:.2f}",
            "-" if process is None else f"{process / _MIB:,.0f}",
        ])  # fmt: skip
    heads = ("plan", "members", "lanes", "planned, MiB", "loaded, MiB", "loaded over planned",
             "process, MiB")  # fmt: skip
    problems = [f"- {what}: {said}" for what, said in document["problems"].items()]
    return "\n".join([table(heads, rows, numbers=range(1, len(heads))), *problems]) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("plans", type=Path, nargs="+", metavar="PLAN")
    parser.add_argument("--policy", action="append", default=[], help="in place of the plan's")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inside", metavar="POLICY", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.result:
        inside(options.plans[0], options.inside, options.result)
        return
    if options.out is None:
        parser.error("--out is needed")
    since_start()
    document: dict[str, Any] = {**made_by(), "found": {}}

    def save() -> None:
        write(options.out / "memory.json", document)
        (options.out / "memory.txt").write_text(tables(document))

    steps = Steps(document, save)
    for plan in options.plans:
        for policy in options.policy or [None]:
            label = plan.parent.name if plan.stem == "plan" else plan.stem
            label += f", {policy}" if policy else ""
            with steps.step(f"{label}: loading", label):
                document["found"][label] = found_by(
                    "memory_by_plan", plan, *(["--inside", policy] if policy else []),
                    log=options.out / "logs" / f"{label.replace(', ', '-')}.txt", secs=_SECS,
                )  # fmt: skip
    print(tables(document), end="")


if __name__ == "__main__":
    main()
