#!/usr/bin/env python3
"""Time the coordinator alone: no Ray, no store, workers that answer after made-up times.

A heap of ends stands in for all workers: the earliest is handed to the coordinator as an event, and
what comes back is put on the heap. Latencies, failures, losses and search spaces are drawn from a
seed. A trial event is the end of a search trial. Prints and writes, at every so many of them, the
rate since the last row (the driver's own time included, and of `handle` alone) and the memory of
this process, most of which are traces that are kept to be told to tuners: at most ten of a task
where there are 10,000 tasks.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import heapq
import os
import platform
import random
import resource
import shlex
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import write
from tunerd.coordinator import events as ev
from tunerd.coordinator.budget import Limits
from tunerd.coordinator.coordinator import Coordinator
from tunerd.system.version import __version__
from tunerd.vocabulary import (
    METASCHEDULE,
    Build,
    Candidate,
    Failure,
    Kind,
    Measurement,
    Stage,
    TargetSpec,
    Task,
    TensorSpec,
    candidate_id,
    default_candidate,
)

TICK_SECS = 0.5  # as the session's
# Seconds on the made-up clock, uniform between these. 200 tuners and 1,000 slices then limit each
# other about equally.
PROPOSE_SECS = (0.2, 0.6)
BUILD_SECS = (0.02, 0.03)  # of a candidate
MEASURE_SECS = (0.03, 0.07)  # of a candidate
RESTART_SECS = 5.0
FAILED_BUILDS, FAILED_RUNS, COLLATERAL = 0.02, 0.03, 0.002  # parts of the trials

_FEATURES = bytes(4 * 96)  # of a candidate
_ARGS = (TensorSpec("x", (1, 64, 56, 56), "float32"),)
_FAILED_BUILD = Failure(Stage.BUILD, Kind.COMPILE, "made up")
_FAILED_RUN = Failure(Stage.RUN, Kind.CRASH, "made up")
_COLLATERAL = Failure(Stage.RUN, Kind.COLLATERAL, "made up")


def made_up_tasks(count: int, rng: random.Random) -> list[Task]:
    target = TargetSpec("cuda", "{}")
    return [
        Task(
            task_id=hashlib.sha256(str(number).encode()).hexdigest()[:12],
            name=f"task-{number}",
            weight=rng.randint(1, 12),
            flops=10 ** rng.uniform(6, 9.5),
            args=_ARGS,
            weight_args=(),
            target=target,
            mod_json="",
        )
        for number in range(count)
    ]


class Workers:
    """All workers on a made-up clock: who ends what, and when."""

    def __init__(self, coordinator: Coordinator, options: argparse.Namespace) -> None:
        self.coordinator = coordinator
        self.now_secs = 0.0
        self.events: Counter[str] = Counter()
        self.handle_secs = 0.0
        self.trial_ends = 0
        self.told = 0
        self._rng = random.Random(options.seed)
        self._trace_bytes = options.trace_bytes
        self._loss_every = options.loss_every
        self._ends: list[tuple[float, int, ev.Instruction | ev.Event]] = []
        self._number = 0
        self._lost: set[str] = set()
        self._proposed: Counter[str] = Counter()  # by task
        # Some tasks have little to offer, as a small dense layer has.
        self._spaces = {t: int(10 ** self._rng.uniform(1.5, 6)) for t in coordinator.tasks}

    def handle(self, event: ev.Event) -> None:
        started = time.perf_counter()
        instructions = self.coordinator.handle(event)
        self.handle_secs += time.perf_counter() - started
        self.events[type(event).__name__] += 1
        for instruction in instructions:
            self._take(instruction)

    def step(self) -> None:
        """Let the next thing happen."""
        self.now_secs, _, what = heapq.heappop(self._ends)
        match what:
            case ev.Tick():
                self.handle(ev.Tick(self.now_secs))
                self._later(TICK_SECS, what)
            case ev.WorkerJoined(worker_id):
                self._lost.discard(worker_id)
                self.handle(what)
            case (
                ev.Propose(worker_id)
                | ev.BuildThem(worker_id)
                | ev.Measure(worker_id)
                | ev.CheckBaseline(worker_id)
            ):
                if self._loss_every and self._number % self._loss_every == 0:
                    role = "tuner" if worker_id.startswith("tuner") else "slice"
                    self._later(RESTART_SECS, ev.WorkerJoined(worker_id, role))
                    self.handle(ev.WorkerLost(worker_id, "made up"))
                else:
                    self.handle(self._end_of(what))

    def begin(self) -> None:
        self._later(0.0, ev.Tick(0.0))

    def _later(self, secs: float, what: ev.Instruction | ev.Event) -> None:
        self._number += 1
        heapq.heappush(self._ends, (self.now_secs + secs, self._number, what))

    def _take(self, instruction: ev.Instruction) -> None:
        uniform = self._rng.uniform
        match instruction:
            case ev.Propose(results=told):
                self.told += len(told)
                self._later(uniform(*PROPOSE_SECS), instruction)
            case ev.BuildThem(candidates=candidates):
                self._later(len(candidates) * uniform(*BUILD_SECS), instruction)
            case ev.Measure(builds=builds):
                self._later(len(builds) * uniform(*MEASURE_SECS), instruction)
            case ev.CheckBaseline():
                self._later(uniform(*MEASURE_SECS), instruction)
            case ev.StoreEnded(results):
                self.trial_ends += sum(
                    not c.is_default and not (isinstance(r, Failure) and not r.kind.ends_trial)
                    for c, r in results
                )

    def _end_of(self, work: ev.Instruction) -> ev.Event:
        match work:
            case ev.Propose(worker_id, task, count):
                return self._proposal(worker_id, task.task_id, count)
            case ev.BuildThem(worker_id, candidates):
                return ev.BuildsEnded(worker_id, tuple((c, self._build(c)) for c in candidates))
            case ev.Measure(worker_id, builds):
                return ev.MeasurementsEnded(
                    worker_id, tuple((b.candidate, self._run(b.candidate)) for b in builds)
                )
            case ev.CheckBaseline(worker_id, build):
                return ev.BaselineChecked(worker_id, self._run(build.candidate), MEASURE_SECS[0])
        raise ValueError(work)

    def _proposal(self, worker_id: str, task_id: str, count: int) -> ev.Proposed:
        first = self._proposed[task_id]
        # Now and then islands find the same.
        first = max(0, first - (self._rng.random() < 0.1))
        last = min(first + count, self._spaces[task_id])
        self._proposed[task_id] = last
        found = tuple(self._candidate(task_id, number) for number in range(first, last))
        is_last = last == self._spaces[task_id]
        return ev.Proposed(worker_id, task_id, found, is_last, "", (_FEATURES,) * len(found))

    def _candidate(self, task_id: str, number: int) -> Candidate:
        trace = str(number).ljust(self._trace_bytes)
        return Candidate(task_id, candidate_id(task_id, trace), METASCHEDULE, trace)

    def _build(self, candidate: Candidate) -> Build | Failure:
        if self._rng.random() < FAILED_BUILDS:
            return _FAILED_BUILD
        return Build(candidate, b"", "", 0.025, _ARGS, (), "nvrtc")

    def _run(self, candidate: Candidate) -> Measurement | Failure:
        draw = self._rng.random()
        if draw < COLLATERAL:
            return _COLLATERAL
        if draw < COLLATERAL + FAILED_RUNS:
            return _FAILED_RUN
        secs = self.coordinator.tasks[candidate.task_id].task.flops / 10 ** self._rng.uniform(
            11, 13
        )
        return Measurement((secs, secs * 1.01, secs * 1.02), 1, "search-v1", "made-up", 52)


def host_facts() -> dict[str, Any]:
    cpus = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return {
        "cpu": next((c.split(":", 1)[1].strip() for c in cpus if "model name" in c), "unknown"),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "tunerd": __version__,
        "load_average": os.getloadavg(),
    }


def rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize()


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    tasks = made_up_tasks(options.tasks, random.Random(options.seed))
    coordinator = Coordinator(tasks, Limits(trials=options.events))
    coordinator.restore([], [])
    coordinator.start([default_candidate(t) for t in tasks])
    workers = Workers(coordinator, options)
    for number in range(options.slices):
        workers.handle(ev.WorkerJoined(f"slice-{number}", "slice"))
    for number in range(options.tuners):
        workers.handle(ev.WorkerJoined(f"tuner-{number}", "tuner"))
    workers.begin()
    gc.collect()
    rows = [_row(workers, 0.0, None)]
    print(_text(rows[-1]), flush=True)
    started = time.perf_counter()
    while not coordinator.finished:
        workers.step()
        if workers.trial_ends >= len(rows) * options.every or coordinator.finished:
            rows.append(_row(workers, time.perf_counter() - started, rows[-1]))
            print(_text(rows[-1]), flush=True)
    return rows


def _row(workers: Workers, wall_secs: float, last: dict[str, Any] | None) -> dict[str, Any]:
    coordinator = workers.coordinator
    sources = [s for t in coordinator.tasks.values() for s in t.sources.values()]
    row = {
        "trial_events": workers.trial_ends,
        "events": sum(workers.events.values()),
        "events_by_kind": dict(workers.events),
        "wall_secs": wall_secs,
        "handle_secs": workers.handle_secs,
        "simulated_secs": workers.now_secs,
        "rss_bytes": rss_bytes(),
        "told": workers.told,
        "results_kept": sum(len(s.results) for s in sources),
        "kept_trace_bytes": sum(
            len(t.candidate.recipe) for s in sources for t in s.results.since(0)
        ),
        "islands": sum(len(w.islands) for w in coordinator.workers.values()),
        "slices_busy": coordinator.busy("slice"),
        "tuners_busy": coordinator.busy("tuner"),
        "tasks_exhausted": sum(s.exhausted for s in coordinator.tasks.values()),
    }
    if last is not None:
        trials = row["trial_events"] - last["trial_events"]
        row["trial_events_per_sec"] = trials / (wall_secs - last["wall_secs"])
        row["handled_per_sec"] = trials / (row["handle_secs"] - last["handle_secs"])
    return row


def _text(row: dict[str, Any]) -> str:
    return (
        f"{row['trial_events']:>9,} trials {row['events']:>9,} events {row['wall_secs']:7.1f} s "
        f"{row.get('trial_events_per_sec', 0):>7,.0f} trials/s "
        f"{row.get('handled_per_sec', 0):>7,.0f}/s in handle {row['rss_bytes'] / 2**20:7.0f} MiB "
        f"{row['results_kept']:>8,} results kept "
        f"({row['kept_trace_bytes'] / 2**20:.0f} MiB of traces) {row['slices_busy']:>5} slices busy"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000, help="trials that end")
    parser.add_argument("--every", type=int, default=100_000, help="trial events per row")
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--slices", type=int, default=1_000)
    parser.add_argument("--tuners", type=int, default=200)
    parser.add_argument(
        "--trace-bytes", type=int, default=3_000, help="of a candidate; real: 3,000"
    )
    parser.add_argument("--loss-every", type=int, default=20_011, help="pieces of work; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", type=Path, help="where to write what cProfile saw")
    parser.add_argument("--out", type=Path, help="where to write every row, as JSON")
    options = parser.parse_args()
    facts = host_facts()
    if options.profile:
        import cProfile

        profile = cProfile.Profile()
        rows = profile.runcall(run, options)
        profile.dump_stats(options.profile)
    else:
        rows = run(options)
    if options.out:
        report = {
            "command": shlex.join(["scripts/lab/search/coordinator.py", *sys.argv[1:]]),
            "host": facts,
            "rows": rows,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write(options.out, report)


if __name__ == "__main__":
    main()
