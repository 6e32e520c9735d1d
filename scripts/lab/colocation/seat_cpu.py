#!/usr/bin/env python3
"""Where the engine's process spends its CPU time when each member has a process of its own.

    PYTHONPATH=.:scripts python3 -m lab.colocation.seat_cpu --members 8 --window 4 --side 224

The place is `processes`, whose seats are those of `mps`: what the engine's process does for a
request is the same, and what its model takes is another process's. The members are one small model,
a mean of an image of --side pixels, which has few outputs as a classifier has. All are busy, with
--window requests each, sent by one thread or by the load generator. Printed of each round: answers
a second, and by thread of the engine's process the CPU time and the times that it went to sleep, of
a request. The rate is the machine's, on which the models run as well: compare the CPU times.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.colocation.engine_overhead import from_generator, from_thread
from lab.colocation.simulated import make_artifact
from lab.lab import made_by, write
from tunerd.colocation import Engine, Plan, artifacts

_CLIENTS: dict[str, Callable[..., Any]] = {"thread": from_thread, "generator": from_generator}


def of_threads() -> dict[int, tuple[str, float, int]]:
    """Return of each thread of this process its name, CPU seconds, and how often it has waited."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found = {}
    for task in Path("/proc/self/task").iterdir():
        cpu_secs = int((task / "schedstat").read_text().split()[0]) / 1e9
        status = (task / "status").read_text()
        waits = int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
        found[int(task.name)] = (names.get(int(task.name), "other"), cpu_secs, waits)
    return found


def measure(plan: Plan, client: str, window: int, secs: float, *, buffers: bool) -> dict[str, Any]:
    inputs = {m.name: artifacts.sample_inputs(m.artifact) for m in plan.members}
    with Engine(plan) as engine:
        given: list[tuple[str, Any]] = []
        for name, arrays in inputs.items():
            lent = engine.input_buffers(name)
            for each, array in lent.items():
                array[...] = arrays[each]
            given.append((name, lent if buffers else arrays))
        _CLIENTS[client](engine, given, window, secs / 4)
        before = of_threads()
        count = sum(m.completed for m in engine.stats().members.values())
        began, cpu_secs = time.monotonic(), time.process_time()
        _CLIENTS[client](engine, given, window, secs)
        cpu_secs, took_secs = time.process_time() - cpu_secs, time.monotonic() - began
        count = sum(m.completed for m in engine.stats().members.values()) - count
        after = of_threads()
    by_thread: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for number, (name, secs_at, waits) in after.items():
        _, secs_before, waits_before = before.get(number, (name, 0.0, 0))
        group = name if "@" not in name else "seats"
        by_thread[group][0] += 1e6 * (secs_at - secs_before) / count
        by_thread[group][1] += (waits - waits_before) / count
    return {
        "per_sec": count / took_secs,
        "cpu_us": 1e6 * cpu_secs / count,
        "by_thread": {n: tuple(v) for n, v in sorted(by_thread.items()) if v[0] >= 0.5},
    }


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--window", type=int, default=4, help="requests of a member at a time")
    parser.add_argument("--side", type=int, default=224, help="of an image")
    parser.add_argument("--policy", default="streams")
    parser.add_argument("--client", choices=_CLIENTS, default="thread")
    parser.add_argument("--buffers", action="store_true", help="inputs are in lent buffers")
    parser.add_argument("--secs", type=float, default=3.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--artifact", type=Path, help="where the model is, or is to be")
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.artifact or Path(scratch) / "made"
        if not (folder / "manifest.json").exists():
            make_artifact(folder, options.side, layer="GlobalAveragePool")
        plan = Plan.model_validate(
            {
                "place": "processes",
                "policy": {"kind": options.policy},
                "members": [
                    {"name": f"m{i}", "artifact": str(folder.resolve())}
                    for i in range(options.members)
                ],
            }
        )
        rows = []
        for _ in range(options.rounds):
            rows.append(
                measure(plan, options.client, options.window, options.secs, buffers=options.buffers)
            )
            shown = (f"{n} {us:.0f} us, {w:.2f}" for n, (us, w) in rows[-1]["by_thread"].items())
            print(
                f"{rows[-1]['per_sec']:6.0f}/s {rows[-1]['cpu_us']:6.1f} us CPU a request; "
                f"by thread, and waits: {'; '.join(shown)}",
                flush=True,
            )
    if options.json:
        write(options.json, {**made_by(), "rows": rows})


if __name__ == "__main__":
    main()
