#!/usr/bin/env python3
"""Measure what the engine costs the host for a request, and how many requests it takes a second.

    scripts/lab/colocation/engine_overhead.py                         # simulated places
    scripts/lab/colocation/engine_overhead.py --artifact FOLDER ...   # on the first GPU

Without an artifact the places are simulated and named so: one whose segments end when they are
started, so that the engine alone is measured, and one with streams of a GPU whose graphs end after
`--segment-us` without doing anything. With artifacts each is a member, and repeated in turn where
there are fewer than members. Requests come from one thread, from one event loop, or from the load
generator, which tells latencies, by how much members differ in rate and median, and how long the
collector of garbage stopped the process; as many at a time as `--window` says for each member; or
in bursts, of which each has --slo-ms, and what was in time is told, of all and of the admitted. CPU
time is that of the whole process, so it has the client's part in it: making the request and taking
the answer.

Prints a table, and with --json every number.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.colocation.simulated import Calls, make_artifact, simulated_places
from lab.lab import made_by, write
from tunerd.colocation import Engine, Plan, artifacts
from tunerd.colocation.buffers import InputBuffers
from tunerd.colocation.load.generator import run_load
from tunerd.colocation.plan import LoadChoice
from tunerd.vocabulary import Arrays

TOLD = (
    "p99_ms", "longest_ms", "longest_pause_ms", "rates_differ_pct", "medians_differ_pct",
    "in_time_pct", "of_admitted_pct",
)  # fmt: skip
Given = tuple[str, Any]  # a member, and inputs

WARM = 0.2  # of the time, before what is counted


# --- clients -----------------------------------------------------------------------------------


class Meter:
    """Counts answers and CPU time from the moment at which the engine is warm."""

    def __init__(self, secs: float) -> None:
        now = time.monotonic()
        self._begin_at, self.end_at = now + WARM * secs, now + secs
        self._since: tuple[float, float] | None = None
        self._done = 0

    def answered(self) -> bool:
        """Count one; return whether to go on."""
        now = time.monotonic()
        if self._since is not None:
            self._done += 1
        elif now >= self._begin_at:
            self._since = now, time.process_time()
        return now < self.end_at

    def found(self) -> dict[str, float]:
        assert self._since is not None
        wall_secs = time.monotonic() - self._since[0]
        cpu_secs = time.process_time() - self._since[1]
        return {"per_sec": self._done / wall_secs, "cpu_us": 1e6 * cpu_secs / max(self._done, 1)}


def from_thread(engine: Engine, given: Sequence[Given], window: int, secs: float) -> Any:
    meter, under_way, nth = Meter(secs), deque[Any](), 0
    while True:
        name, inputs = given[nth % len(given)]
        nth += 1
        under_way.append(engine.submit(name, inputs))
        if len(under_way) >= window * len(given):
            under_way.popleft().result()
            if not meter.answered():
                break
    found = meter.found()
    for future in under_way:
        future.result()
    return found


def from_loop(engine: Engine, given: list[Given], window: int, secs: float) -> Any:
    async def client(name: str, inputs: Any, meter: Meter) -> None:
        while True:
            await engine.asubmit(name, inputs)
            if not meter.answered():
                return

    async def all_clients() -> Any:
        meter = Meter(secs)
        clients = [asyncio.create_task(client(*each, meter)) for each in given * window]
        await asyncio.wait(clients, return_when=asyncio.FIRST_COMPLETED)
        found = meter.found()
        await asyncio.gather(*clients)
        return found

    return asyncio.run(all_clients())


class Pauses:
    """How long the collector of garbage stops the process, in this block."""

    def __enter__(self) -> Pauses:
        self.secs: list[float] = []
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, _: object) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.secs.append(time.perf_counter() - self._began)


def from_generator(
    engine: Engine, given: Sequence[Given], window: int, secs: float
) -> dict[str, float]:
    load = LoadChoice(kind="closed", duration=secs, clients=window)
    cpu_secs = time.process_time()
    with Pauses() as pauses:
        observed = run_load(engine, load, {name: dict(inputs) for name, inputs in given})
    cpu_secs = time.process_time() - cpu_secs
    first, last = observed.window
    took = sorted(sample.latency_secs for sample in observed.counted)
    of: dict[str, list[float]] = {}
    for sample in observed.counted:
        of.setdefault(sample.member, []).append(sample.latency_secs)
    return {
        "per_sec": len(took) / (last - first),
        "cpu_us": 1e6 * cpu_secs / len(observed.samples),
        "p99_ms": 1e3 * took[int(0.99 * len(took))],
        "longest_ms": 1e3 * took[-1],
        "rates_differ_pct": _differ_pct([len(each) for each in of.values()]),
        "medians_differ_pct": _differ_pct([statistics.median(each) for each in of.values()]),
        "longest_pause_ms": 1e3 * max(pauses.secs, default=0.0),
        "pauses_secs": sum(pauses.secs),
    }


def _differ_pct(values: Sequence[float]) -> float:
    return 100 * (max(values) / min(values) - 1)


def in_bursts(engine: Engine, given: Sequence[Given], window: int, secs: float) -> dict[str, float]:
    """Send bursts at the rates of the plan, and say what was answered in time."""
    load = LoadChoice(kind="bursts", duration=secs)
    cpu_secs = time.process_time()
    observed = run_load(engine, load, {name: dict(inputs) for name, inputs in given})
    cpu_secs = time.process_time() - cpu_secs
    (slo_ms,) = {member.slo_ms for member in engine.plan.members}
    assert slo_ms is not None, "--slo-ms is missing"
    done = [s.latency_secs for s in observed.counted if s.end == "done"]
    admitted = len(done) + sum(s.end == "dropped" for s in observed.counted)
    in_time, (first, last) = sum(1e3 * secs <= slo_ms for secs in done), observed.window
    return {
        "per_sec": len(done) / (last - first),
        "cpu_us": 1e6 * cpu_secs / len(observed.samples),
        "p99_ms": 1e3 * sorted(done)[int(0.99 * len(done))],
        "in_time_pct": 100 * in_time / len(observed.counted),
        "of_admitted_pct": 100 * in_time / admitted,
    }


CLIENTS = {
    "thread": from_thread,
    "asyncio": from_loop,
    "generator": from_generator,
    "bursts": in_bursts,
}


# --- the table ---------------------------------------------------------------------------------


def measure(options: argparse.Namespace, folders: Sequence[Path]) -> list[dict[str, Any]]:
    places: dict[str, Any] = {"gpu": lambda: None}
    if not options.artifact:
        places = simulated_places(
            options.segment_us,
            options.together,
            calls=Calls(*options.call_us),
            copies_outputs=options.copy_outputs,
        )
    found = []
    for place, make in places.items():
        if options.place and place not in options.place:
            continue
        for count in options.members:
            document = {
                "device": "cuda" if options.artifact else "cpu",
                "policy": {"kind": options.policy} | _together(options),
                "members": [
                    {"name": f"m{i}", "artifact": str(folders[i % len(folders)].resolve())}
                    | _asked(options, count)
                    for i in range(count)
                ],
            }
            plan = Plan.model_validate(document)
            given: list[Given] = [
                (m.name, artifacts.sample_inputs(m.artifact)) for m in plan.members
            ]
            with Engine(plan, place=make()) as engine:
                if options.buffers:
                    given = [(name, _buffered(engine, name, inputs)) for name, inputs in given]
                for client in options.client:
                    row = {"place": engine.stats().place, "members": count, "client": client}
                    row |= CLIENTS[client](engine, given, options.window, options.secs)
                    found.append(row)
                    print(
                        f"{row['place']:32} {count:3} members  {client:8} "
                        f"{row['per_sec']:9.0f}/s {row['cpu_us']:7.1f} us CPU a request"
                        + "".join(f", {n} {row[n]:.1f}" for n in TOLD if n in row),
                        flush=True,
                    )
    return found


def _asked(options: argparse.Namespace, count: int) -> dict[str, float]:
    """Say what is asked of each of so many members with a share each, where bursts are sent."""
    if options.slo_ms is None:
        return {}
    per_sec = 0.8 * 1e6 / options.segment_us  # what a simulated lane does
    return {"slo_ms": options.slo_ms, "rate": per_sec, "share": 100 // count}


def _together(options: argparse.Namespace) -> dict[str, int]:
    return {"together": options.together} if options.together > 1 else {}


def _buffered(engine: Engine, name: str, inputs: Arrays) -> InputBuffers:
    buffers = engine.input_buffers(name)
    for each, array in buffers.items():
        array[...] = inputs[each]
    return buffers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--artifact", type=Path, nargs="+", help="of a GPU")
    parser.add_argument("--members", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--client", nargs="+", choices=CLIENTS, default=list(CLIENTS)[:3])
    parser.add_argument("--place", nargs="+", choices=["free", "graphs"], help="simulated ones")
    parser.add_argument("--policy", default="streams")
    parser.add_argument("--segment-us", type=float, default=500.0, help="of a simulated graph")
    parser.add_argument("--call-us", type=float, nargs=3, default=(0.0, 0.0, 0.0),
                        metavar=("LAUNCH", "QUEUE", "QUERY"),
                        help="of a launch of a simulated graph, what is queued for each request, "
                        "and a look")  # fmt: skip
    parser.add_argument("--together", type=int, default=1,
                        help="requests of a simulated launch, for --policy space-time")  # fmt: skip
    parser.add_argument("--side", type=int, default=32, help="of a simulated member's image")
    parser.add_argument("--window", type=int, default=4, help="requests of a member at a time")
    parser.add_argument("--slo-ms", type=float, help="of bursts, at 80%% of what the graphs do")
    parser.add_argument("--buffers", action="store_true", help="inputs are where the device reads")
    parser.add_argument("--secs", type=float, default=3.0, help="of each row")
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    parser.add_argument("--copy-outputs", action="store_true", help="of simulated graphs")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as scratch:
        folders = options.artifact or [
            make_artifact(Path(scratch) / "made", options.side, options.together)
        ]
        found = measure(options, folders)
    if options.json:
        write(options.json, {**made_by(), "rows": found})


if __name__ == "__main__":
    main()
