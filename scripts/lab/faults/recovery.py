#!/usr/bin/env python3
"""Break one slice in every way there is, beside busy neighbours, and time until all measure again.

    scripts/lab/faults/recovery.py --gpu-pct 25 --out FOLDER
    scripts/lab/faults/recovery.py --cpu-pct 50 --out FOLDER    # what a slice of cores can suffer

For each fault slices are started anew. The neighbours measure one kernel without a pause; then the
first slice gets what faults, and goes on with that kernel. Writes FOLDER/faults.json, with every
measurement that failed, FOLDER/faults.txt, the table, and FOLDER/logs, what the guard, the runners
and the MPS daemon wrote. What is finished there is not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import made_by, table, write
from tunerd.builder import build
from tunerd.runner.base import UNKNOWN, Company
from tunerd.slices import member, plan
from tunerd.slices.base import Slice
from tunerd.vocabulary import (
    Build,
    CapProof,
    Failure,
    Measurement,
    Profile,
    SliceRequest,
    SliceSpec,
    TargetSpec,
    to_json,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from tests.lib.build_fixtures import (
    FAULTS,
    doubling,
    endless,
    faulty_compiler,
    named,
    new_schedule,
    suicide,
)
from tests.lib.stranger import stranger_on
from tunerd.testing.kernels import task_of

NEIGHBOURS = 2
BUSY_SECS = 2.0  # before a fault, and after all measure again
BACK_SECS = 180.0  # after which a slice counts as lost
QUICK = Profile("fault-v1", max_samples=3, max_total_secs=0.02)
Row = dict[str, Any]
Make = Callable[[TargetSpec, str], Build]  # of a candidate's name

BODIES = {**FAULTS, "a kernel that does not end": "while (clock64() != -1) { }"}
UNLOGGED = "misaligned access, not in the log"
ALONE = ", repeated alone"  # while the neighbours are idle


# --- kernels -----------------------------------------------------------------------------------


def with_body(target: TargetSpec, name: str) -> Build:
    with faulty_compiler(BODIES[name]):
        return doubling(target, name)


def greedy(target: TargetSpec, name: str) -> Build:
    """Build a kernel whose arguments, 1 GiB each, take more than a slice of 30% of an H200 may."""
    from tvm import te

    many = [te.placeholder((1 << 30,), "uint8", name=f"data{i}") for i in range(48)]
    total = te.compute((64,), lambda i: sum((d[i] for d in many[1:]), many[0][i]), name="total")
    return named(task_of([*many, total], target), name)


def too_wide(target: TargetSpec, name: str) -> Build:
    """Build a kernel with twice the threads that a block may have."""
    from tvm import te

    data = te.placeholder((1 << 16,), name="data")
    twice = te.compute(data.shape, lambda i: data[i] * 2.0, name="twice")
    task = task_of([data, twice], target)
    schedule = new_schedule(task)
    (loop,) = schedule.get_loops(schedule.get_sblock("twice"))
    outer, inner = schedule.split(loop, [None, 2048])
    schedule.bind(outer, "blockIdx.x")
    schedule.bind(inner, "threadIdx.x")
    return named(task, name, schedule.mod)


def crash(target: TargetSpec, _: str) -> Build:
    return suicide(target, signal.SIGSEGV)


# --- faults ------------------------------------------------------------------------------------

# Given the slice, its proof, and the best time of the task so far in seconds.
Inject = Callable[[Slice, CapProof, float], "Measurement | Failure | None"]


def a_candidate(made: Build, task_id: str, company: Company = UNKNOWN) -> Inject:
    """Return what measures a build as a candidate of a task, whose best limits its time."""
    candidate = dataclasses.replace(made.candidate, task_id=task_id)
    rival = dataclasses.replace(made, candidate=candidate)
    return lambda one, _, best_secs: one.launch().measure(
        [rival], QUICK, best_secs=[best_secs], company=company
    )[0]


def a_signal(number: signal.Signals) -> Inject:
    def send(_: Slice, proof: CapProof, __: float) -> None:
        os.kill(proof.runner_pid, number)

    return send


def mps_processes(spec: SliceSpec) -> list[Any]:
    """Return the control daemon of a GPU, then its server."""
    from tunerd.slices.mps.control import MpsControl
    from tunerd.slices.mps.guard_client import gpu_folder

    folder = gpu_folder(spec.gpu_uuid or "")
    return MpsControl(folder / "pipe", folder / "log", spec.gpu_uuid or "").processes()


def a_killed_daemon(which: int) -> Inject:
    def kill(one: Slice, _: CapProof, __: float) -> None:
        mps_processes(one.spec)[which].signal(signal.SIGKILL)

    return kill


def a_lost_pipe(one: Slice, _: CapProof, __: float) -> None:
    shutil.rmtree(dict(one.spec.environment)["CUDA_MPS_PIPE_DIRECTORY"])


def a_runner_without_pipe(one: Slice, proof: CapProof, best_secs: float) -> None:
    a_lost_pipe(one, proof, best_secs)
    os.kill(proof.runner_pid, signal.SIGKILL)


def a_tenant(kernel: Build) -> Inject:
    """Return what brings a process of somebody else, until a measurement is marked for it."""

    def come(one: Slice, _: CapProof, best_secs: float) -> Measurement | Failure:
        with stranger_on(one.spec.gpu_uuid or ""):
            deadline = time.monotonic() + BACK_SECS
            while time.monotonic() < deadline:
                (result,) = one.launch().measure([kernel], QUICK, best_secs=[best_secs])
                if isinstance(result, Failure) or result.conditions.is_disturbed:
                    return result
        raise RuntimeError(f"nothing was marked within {BACK_SECS:g} s")

    return come


def faults_of(target: TargetSpec, kernel: Build) -> dict[str, Callable[[], Inject]]:
    """Return what to inject by its name; it is built only when it is its turn.

    kernel: what the neighbours measure; candidates that fault are of its task.
    """
    task_id = kernel.candidate.task_id
    outside = {
        "runner killed from outside": lambda: a_signal(signal.SIGKILL),
        "runner stopped (hangs)": lambda: a_signal(signal.SIGSTOP),
    }
    if target.is_cuda:
        kernels = dict[str, Make](dict.fromkeys(BODIES, with_body))
        kernels |= {"out of memory": greedy, "too many threads": too_wide}
        mps: dict[str, Callable[[], Inject]] = {
            "MPS control daemon killed": lambda: a_killed_daemon(0),
            "MPS server killed": lambda: a_killed_daemon(-1),
            "MPS pipe folder deleted": lambda: a_lost_pipe,
            "MPS pipe folder deleted, runner killed": lambda: a_runner_without_pipe,
            "somebody else's process": lambda: a_tenant(kernel),
        }
    else:
        kernels, mps = {"crash": crash, "a kernel that does not end": lambda t, _: endless(t)}, {}
    candidates = {
        name: lambda name=name, make=make: a_candidate(make(target, name), task_id)
        for name, make in kernels.items()
    }
    if target.is_cuda:
        mps[UNLOGGED] = an_unlogged(candidates["misaligned access"])
        # Of an error that all clients get nobody is blamed, until it comes again alone.
        shared = ("illegal address", "misaligned access", "trap")
        mps |= {
            name + ALONE: lambda name=name: a_candidate(  # type: ignore[misc]
                with_body(target, name), task_id, Company(is_alone=True)
            )
            for name in shared
        }
    return {**candidates, **outside, **mps}


def an_unlogged(fault: Callable[[], Inject]) -> Callable[[], Inject]:
    """Return a fault of which the MPS server's log says nothing where tunerd looks for it.

    The server goes on writing into the file that it has open.
    """

    def inject(one: Slice, proof: CapProof, best_secs: float) -> Measurement | Failure | None:
        from tunerd.slices.mps.guard_client import gpu_folder
        from tunerd.slices.mps.log import LOG_NAME

        log = gpu_folder(one.spec.gpu_uuid or "") / "log" / LOG_NAME
        aside = log.with_suffix(".aside")
        log.rename(aside)
        try:
            return fault()(one, proof, best_secs)
        finally:
            if not log.exists():  # a new server has made its own
                aside.rename(log)

    return lambda: inject


# --- one fault ---------------------------------------------------------------------------------


class Busy(threading.Thread):
    """Measures one kernel in a slice without a pause, and notes how each measurement ended."""

    def __init__(self, one: Slice, kernel: Build, best_secs: float) -> None:
        super().__init__(name=one.spec.slice_id, daemon=True)
        self._runner, self._kernel, self._best_secs = one.launch(), kernel, best_secs
        self._stop_asked = threading.Event()
        self.ends: list[tuple[float, float, Measurement | Failure | Exception]] = []

    def run(self) -> None:
        while not self._stop_asked.is_set():
            began = time.monotonic()
            try:
                result: Measurement | Failure | Exception = self._runner.measure(
                    [self._kernel], QUICK, best_secs=[self._best_secs]
                )[0]
            except Exception as error:
                result = error
                time.sleep(0.1)
            self.ends.append((began, time.monotonic(), result))

    def stop(self) -> None:
        self._stop_asked.set()

    def measured_since(self, moment: float) -> bool:
        """Say whether there is a good measurement that began after a moment and every other."""
        ends = list(self.ends)
        after = max([moment, *(ended for _, ended, r in ends if not is_good(r))])
        return any(began >= after and is_good(r) for began, _, r in ends)

    def story(self, moment: float) -> Row:
        """Return how long this slice was without a measurement, and what failed meanwhile."""
        since = [e for e in self.ends if e[1] >= moment]
        failed = [(b, t, r) for b, t, r in since if not isinstance(r, Measurement)]
        back = max([moment, *(t for _, t, r in since if not is_good(r))])
        first = min((t for b, t, r in since if b >= back and is_good(r)), default=None)
        ends = [moment, *(t for _, t, r in since if isinstance(r, Measurement))]
        return {
            "slice": self.name,
            "back_secs": None if first is None else first - moment,
            "marked": sum(isinstance(r, Measurement) and not is_good(r) for _, _, r in since),
            "longest_gap_secs": max((b - a for a, b in itertools.pairwise(ends)), default=None),
            "failed": [
                {
                    "at_secs": t - moment,
                    **(to_json(r) if isinstance(r, Failure) else {"error": str(r)}),
                }
                for _, t, r in failed
            ],
        }


def is_good(result: Measurement | Failure | Exception) -> bool:
    return isinstance(result, Measurement) and not result.conditions.is_disturbed


def suffer(
    specs: Sequence[SliceSpec], inject: Inject, kernel: Build, *, is_alone: bool = False
) -> Row:
    """Start slices, let the first one suffer a fault, and wait until all measure again."""
    slices = [member(spec.kind)(spec) for spec in specs]
    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(len(slices)) as pool:
            proofs = list(pool.map(lambda one: stack.enter_context(one).prove(), slices))
        firsts = [one.launch().measure([kernel], QUICK)[0] for one in slices]
        best_secs = min(m.median_secs for m in firsts if isinstance(m, Measurement))
        neighbours = [Busy(one, kernel, best_secs) for one in slices[1:]]
        early = [] if is_alone else neighbours
        for neighbour in early:
            neighbour.start()
        time.sleep(BUSY_SECS)
        moment = time.monotonic()
        result = inject(slices[0], proofs[0], best_secs)
        answered = time.monotonic()
        everybody = [Busy(slices[0], kernel, best_secs), *neighbours]
        for each in everybody:
            if each not in early:
                each.start()
        while time.monotonic() < answered + BACK_SECS:
            if all(each.measured_since(answered) for each in everybody):
                break
            time.sleep(0.05)
        time.sleep(BUSY_SECS)
        for each in everybody:
            each.stop()
        for each in everybody:
            each.join(BACK_SECS)
    stories = [each.story(moment) for each in everybody]
    backs = [story["back_secs"] for story in stories]
    return {
        "result": to_json(result),
        "answered_secs": answered - moment,
        "all_back_secs": None if None in backs else max(backs),
        "slices": stories,
    }


def keep_logs(spec: SliceSpec, folder: Path) -> None:
    """Copy what the guard of a slice's GPU, its runners and its MPS daemon have written."""
    from tunerd.slices.mps.guard_client import gpu_folder

    if spec.gpu_uuid is None:
        return
    written = gpu_folder(spec.gpu_uuid)
    folder.mkdir(exist_ok=True)
    for log in (*written.glob("*.log"), *written.glob("log/*")):
        if log.is_file():
            shutil.copy(log, folder / log.name)


# --- all of them -------------------------------------------------------------------------------


def line_of(name: str, row: Row) -> tuple[str, ...]:
    result = row["result"]
    blamed = "-"
    if result:
        is_failure = "kind" in result
        blamed = f"{result['kind']} in {result['stage']}" if is_failure else "measured, marked"
    failed = sum(len(s["failed"]) for s in row["slices"][1:])
    back = "lost" if row["all_back_secs"] is None else f"{row['all_back_secs']:.1f} s"
    answered = f"{row['answered_secs']:.1f} s"
    return name, blamed, answered, str(failed), back


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    share = parser.add_mutually_exclusive_group(required=True)
    share.add_argument("--gpu-pct", type=int)
    share.add_argument("--cpu-pct", type=int)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", action="append", metavar="FAULT")
    options = parser.parse_args()
    kind, pct = ("cpu", options.cpu_pct) if options.gpu_pct is None else ("mps", options.gpu_pct)
    planned = plan(SliceRequest(kind, pct))
    if planned.problem:
        parser.exit(13, f"{planned.problem}\n")
    specs = [s for s in planned.slices if s.device_index == planned.slices[0].device_index]
    specs = specs[: 1 + NEIGHBOURS]
    if len(specs) < 2:
        parser.exit(13, f"{pct}% leaves no room for a neighbour; ask for less\n")
    build.preload(planned.target)
    kernel = doubling(planned.target)
    faults = faults_of(planned.target, kernel)
    if unknown := set(options.only or ()) - set(faults):
        parser.exit(10, f"there is no fault {', '.join(unknown)}; there are {', '.join(faults)}\n")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "faults.json"
    found: Row = json.loads(path.read_text()) if path.exists() else {"faults": {}}
    found |= {
        **made_by(),
        "slices": [s.slice_id for s in specs],
        "pct": pct,
    }
    for name, make in faults.items():
        if name in found["faults"] or (options.only and name not in options.only):
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        found["faults"][name] = suffer(specs, make(), kernel, is_alone=name.endswith(ALONE))
        write(path, found)
        keep_logs(specs[0], options.out / "logs")
    heads = ("fault", "the trial", "answered after", "lost beside it", "all measure again after")
    shown = table(
        heads,
        (line_of(name, row) for name, row in found["faults"].items()),
        numbers=range(2, 5),
    )
    print(shown)
    (options.out / "faults.txt").write_text(f"{shown}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
