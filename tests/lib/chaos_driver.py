"""Sessions of one run under seeded faults: each a forked process, which a crash ends by SIGKILL.

    python -m tests.lib.chaos_driver FOLDER SEED INTENSITY private|joined

Coordinator, session, store, run folder, cluster, membership and the choice of winners are tunerd's
own; Ray is `simulated_ray`, the slices are those of `chaos_slices`, and the tuners propose from a
fixed list. The cluster is private, or one that nodes join and leave. Every fault is written to
FOLDER.log before it strikes, and what came of it afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import shutil
import signal
import sqlite3
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.lib.chaos import (
    AT_A_CALL,
    AT_A_START,
    AT_A_WAIT,
    OF_NODES,
    Chaos,
    Listener,
)
from tests.lib.chaos_disk import near_blame, watch_files, watch_store
from tests.lib.chaos_slices import FaultySlice
from tests.lib.coordinator_world import candidate, task
from tests.lib.simulated_ray import Actor, SimulatedRay
from tunerd.cluster import connection, membership, ray_cluster
from tunerd.cluster.actor_bodies import Timed
from tunerd.cluster.layout import Layout
from tunerd.cluster.nodes import Survey, TunerSpec
from tunerd.errors import ExitCode, FolderError, TunerdError
from tunerd.frontend.kernels import Kernels
from tunerd.frontend.model import FixedModel
from tunerd.records import Store, sqlite
from tunerd.records.paths import Paths
from tunerd.runs import plan as preparation
from tunerd.runs import run, shared
from tunerd.runs.finals.finals import Ending
from tunerd.runs.finals.selection import QuietSlice, choose_winners
from tunerd.runs.folder import RunFolder
from tunerd.settings import TuneSettings
from tunerd.slices.base import Plan
from tunerd.slices.simulated import SimulatedSlice, number_of
from tunerd.stats.paired import compare
from tunerd.system import clock, host
from tunerd.system.signals import Stop
from tunerd.telemetry.progress import QuietProgress
from tunerd.vocabulary import (
    METASCHEDULE,
    Build,
    Candidate,
    Failure,
    Kind,
    Model,
    Proposal,
    Result,
    SliceRequest,
    Stage,
)
from tunerd.vocabulary.outcome import Latency, Outcome, Verification
from tunerd.vocabulary.verdict import Verdict

TASKS = [task(f"t{i}", weight=i + 1) for i in range(6)]
SPACE = 66  # candidates of each task
TRIALS = SPACE * len(TASKS)
MOST_SESSIONS = 500
DRIVERS_SLICES, OTHERS_SLICES = 4, 1  # of the driver's node, and of each other one
# After these ends the same command goes on. By SIGTERM: before tunerd listens.
GOES_ON = {
    -signal.SIGKILL,
    -signal.SIGTERM,
    ExitCode.BAD_FOLDER,
    ExitCode.INFRASTRUCTURE,
    ExitCode.INTERRUPTED,
    ExitCode.DISK_FULL,
}
_NEVER_BUILT = 13  # of the list: the candidates whose number this divides


# --- workers -----------------------------------------------------------------------------------


def victims_of(actor: Actor) -> list[str]:
    """Name what would be lost with an actor: trials, and tasks of which it proposes."""
    found: list[str] = []
    for method, arguments, _ in actor.calls:
        found += victims(method, arguments)
    return found


def victims(method: str, arguments: tuple[Any, ...]) -> list[str]:
    match method, arguments:
        case "propose", (task_id, *_):
            return [task_id]
        case "build", (candidates,):
            return [c.candidate_id for c in candidates]
        case "measure", (builds, *_):
            return [b.candidate.candidate_id for b in builds]
    return []


class NoLowering:
    """Tasks of no model, at once."""

    def __init__(self, *_: Any, lowerer: None) -> None:
        model = Model("net", "d" * 64, (), (), graph=None)
        lowered: Any = SimpleNamespace(mod=None)
        self.kernels = Kernels(tuple(TASKS), 0, model, lowered)
        self.problem = None

    def extracted(self) -> Kernels:
        return self.kernels

    def result(self) -> Kernels:
        return self.kernels

    def close(self) -> None:
        pass


class ListTuner:
    """Proposes the candidates of a fixed list in order, and builds nothing."""

    def __init__(self, *_: Any) -> None:
        self._told: set[str] = set()

    def prepare(self, target: Any) -> None:
        pass

    def warm_up(self, *_: Any) -> float:
        return 0.0

    def propose(
        self,
        task_id: str,
        source: str,
        count: int,
        told: Sequence[Result],
        exclude: Sequence[str],
        _: Any,
    ) -> Proposal:
        if source != METASCHEDULE:
            return Proposal((), True, "", 0.0)
        (of,) = (t for t in TASKS if t.task_id == task_id)
        self._told |= {t.candidate.candidate_id for t in told} | set(exclude)
        fresh = [c for n in range(SPACE) if (c := candidate(of, n)).candidate_id not in self._told]
        self._told |= {c.candidate_id for c in fresh[:count]}
        return Proposal(tuple(fresh[:count]), not fresh, "", 0.0)

    def build(self, candidates: Sequence[Candidate]) -> Any:
        return Timed([_built(c) for c in candidates], 0.0, 0.0)


def _built(of: Candidate) -> Build | Failure:
    if of.recipe and not number_of(of.candidate_id) % _NEVER_BUILT:
        return Failure(Stage.BUILD, Kind.COMPILE, "it does not compile, in no run")
    return Build(of, b"", "ab" * 32, 0.1, (), (), "llvm")


WORK = {"propose", "build", "measure", "compare", "agree"}


def striker(chaos: Chaos, ray: list[SimulatedRay]) -> Any:
    """Return what decides over the lives of actors."""

    def strike(actor: Actor, method: str, arguments: tuple[Any, ...]) -> str:
        if method == "close":  # the run has ended: nobody looks
            return ""
        fault = chaos.draw(AT_A_CALL if method in WORK else AT_A_START)
        if not fault:
            return ""
        others = [a for a in ray[0].actors if a.name == actor.name and a is not actor]
        doomed = [a for a in others if a.calls] if fault == "workers lost at once" else []
        lost = victims(method, arguments) + [v for a in (actor, *doomed) for v in victims_of(a)]
        if not chaos.may_lose(lost):
            return ""
        if fault.endswith("after its work") and actor.instance is not None:
            with contextlib.suppress(Exception):
                getattr(actor.instance, method)(*arguments)
        name = chaos.inject(fault, at=f"{actor.name} {method}")
        for other in doomed:
            other.die(f"{name}, with others")
        return name

    return strike


# --- the driver and its nodes ------------------------------------------------------------------


class Clock:
    """A clock that somebody sets. Each time what tunerd takes for the time must stay the same."""

    def __init__(self, chaos: Chaos, offset_secs: float) -> None:
        self._chaos = chaos
        self._real = time.time
        self._offset_secs = offset_secs
        time.time = self.time

    def time(self) -> float:
        return self._real() + self._offset_secs

    def set(self, fault: str) -> None:
        hours = self._chaos.random.uniform(1, 48)
        before = clock.now()
        self._offset_secs += 3600 * (hours if fault.endswith("forwards") else -hours)
        name = self._chaos.inject(fault, hours=round(hours, 1))
        assert abs(clock.now() - before) < 60
        self._chaos.see(name)


def at_wait(chaos: Chaos, set_clock: Clock, folder: Path) -> None:
    match fault := chaos.draw(AT_A_WAIT):
        case "clock set forwards" | "clock set back":
            set_clock.set(fault)
        case "second tunerd":
            name = chaos.inject(fault)
            with contextlib.suppress(FolderError):
                RunFolder.open(folder, facts=None)  # type: ignore[arg-type]
                raise AssertionError("a second tunerd was let in")
            chaos.see(name)
        case "SIGTERM" | "SIGTERM, with seconds to live":
            chaos.inject(fault, shows_as="SIGTERM", ends=True)
            if fault != "SIGTERM":
                chaos.give_seconds_to_live()
            os.kill(os.getpid(), signal.SIGTERM)


MOST_NODES = 3


def join_clusters(chaos: Chaos, ray: SimulatedRay) -> None:
    """Have a run find a cluster of two nodes, and look at its nodes whenever it can."""
    ray.join_node()
    original = membership.Membership.look

    def look(of: membership.Membership) -> tuple[str, ...]:
        at_a_look(chaos, ray)
        return original(of)

    membership.Membership.look = look  # type: ignore[method-assign]
    membership.LOOK_SECS = 0.0
    connection.raylet_at = lambda _: ()  # type: ignore[assignment]
    ray_cluster.survey_here = lambda *_: surveyed(
        ray.here, DRIVERS_SLICES if ray.here == ray.node_ids[0] else OTHERS_SLICES
    )


def at_a_look(chaos: Chaos, ray: SimulatedRay) -> None:
    """Let nodes leave and join. The driver's stays."""
    fault = chaos.draw(OF_NODES)
    if fault == "node joins" and len(ray.node_ids) < MOST_NODES:
        chaos.inject(fault, shows_as=f"node {ray.join_node()} joined")
    others = {a.node_id for a in ray.actors if a.name == "SliceActor" and not a.death}
    others -= {ray.node_ids[0]}
    if fault == "node leaves" and others:
        node_id = chaos.random.choice(sorted(others))
        lost = [v for a in ray.actors if a.node_id == node_id for v in victims_of(a)]
        if chaos.may_lose(lost):
            chaos.inject(fault, shows_as=f"node {node_id} left")
            ray.leave_node(node_id, "its node has left")


def watch_close(chaos: Chaos) -> None:
    """Let no other fault strike once the folder is closed: a cluster of others is left after it."""
    original = RunFolder.close

    def close(folder: RunFolder) -> None:
        original(folder)
        chaos.end()

    RunFolder.close = close  # type: ignore[method-assign]


def watch_stop(chaos: Chaos) -> None:
    original = Stop._note

    def note(stop: Stop, number: int, frame: Any) -> None:
        chaos.see(signal.Signals(number).name)
        original(stop, number, frame)

    Stop._note = note  # type: ignore[method-assign]


# --- a session ---------------------------------------------------------------------------------


@functools.cache
def planned_once(slices: int) -> Plan:
    """Plan so many slices; the first time takes seconds, of TVM."""
    return SimulatedSlice.plan(SliceRequest("simulated", 25, per_device=slices))


def surveyed(node_id: str, slices: int) -> Survey:
    """Return what a node of the simulated cluster says of itself: a device, and its slices."""
    plan = planned_once(slices)
    cut = [dataclasses.replace(s, gpu_uuid=f"GPU-{node_id}") for s in plan.slices]
    plan = dataclasses.replace(plan, slices=tuple(cut))
    return Survey(node_id, node_id, (slices + 1) // 2, "simulated device", plan)


def layout() -> Layout:
    """Plan a private cluster."""
    here = surveyed("here", DRIVERS_SLICES)
    tuners = tuple(TunerSpec(f"tuner-{i}", 1) for i in range(3))
    return Layout(
        here.plan.target,
        here.device,
        tuple((s, None) for s in here.plan.slices),
        tuners,
        (),
        nodes=(),
        is_lockstep=False,
    )


def settings_of(folder: Path, *, is_joined: bool) -> TuneSettings:
    return TuneSettings(
        model=Path("net.onnx"),
        out=folder,
        cpu_pct=25,
        slice_kind="simulated",
        trials=TRIALS,
        address="auto" if is_joined else None,
    )


def finish(ending: Ending) -> Outcome:
    """End a run with its winners, without a model."""
    quiet = QuietSlice(ending.quiet.cluster, ending.quiet.slice_id, revive=ending.quiet.revive)
    outcomes = choose_winners(
        TASKS,
        ending.folder.store,
        quiet,
        say=ending.say,
        unsearched=ending.unsearched,
        built=ending.built,
    )
    times = (1e-3, 1.1e-3, 0.9e-3)
    outcome = Outcome(
        model=ending.model,
        target=ending.plan.layout.target,
        tasks=outcomes,
        verification=Verification(Verdict.RIGHT, 1, 1e-3, 1e-3, 0.0, ""),
        latencies=(Latency("default", times), Latency("tuned", times)),
        end_to_end=compare(times, times),
        artifact=str(ending.folder.paths.artifact),
        proofs=ending.proofs,
    )
    ending.folder.store.save_outcome(outcome)
    return outcome


def run_session(
    folder: Path,
    seed: str,
    intensity: float,
    planned: Layout | None,
) -> None:
    """Run one session to whatever end, and leave the process."""
    chaos = Chaos(Path(f"{folder}.log"), seed, intensity)
    chaos.protected = near_blame(folder)
    set_clock = Clock(chaos, chaos.random.uniform(-1e6, 1e6) * intensity)
    ray: list[SimulatedRay] = []
    ray.append(SimulatedRay(seed, striker(chaos, ray), lambda: at_wait(chaos, set_clock, folder)))
    ray[0].install()
    if planned is None:
        join_clusters(chaos, ray[0])
    else:
        preparation.local_layout = lambda *_: planned
    FaultySlice.chaos = chaos
    fixed = FixedModel("net", "d" * 64, (), graph=None)
    sqlite.BUSY_TIMEOUT_SECS = 0.05
    preparation.read = run.read = lambda _: fixed
    run.Lowerer = contextlib.nullcontext  # type: ignore[misc,assignment]
    shared.Lowering = NoLowering  # type: ignore[misc,assignment]
    connection.reaping = lambda: contextlib.nullcontext(tuple)  # type: ignore[assignment]
    ray_cluster.TunerActor = ListTuner  # type: ignore[misc,assignment]
    slices = sys.modules["tunerd.slices"]
    slices.member = lambda _: FaultySlice  # type: ignore[attr-defined]
    run.finish = finish
    watch_stop(chaos)
    watch_close(chaos)
    watch_files(chaos, folder)
    watch_store(chaos, folder)
    logging.getLogger("tunerd").addHandler(Listener(chaos))
    logging.getLogger("tunerd").setLevel(logging.INFO)
    code, said = 0, "finished"
    try:
        run.tune(settings_of(folder, is_joined=planned is None), QuietProgress())
    except TunerdError as error:
        code, said = int(error.exit_code), str(error)
    except BaseException as error:
        code, said = int(ExitCode.BUG), "".join(traceback.format_exception(error))
    chaos.see(said)
    chaos.overtake()
    chaos.note("ended", said, code=code)
    os._exit(code)


def main(folder: Path, seed: str, intensity: float, cluster: str) -> None:
    """Repeat the same command until it finishes; print a line of JSON for each session."""
    planned = layout() if cluster == "private" else None
    for slices in DRIVERS_SLICES, OTHERS_SLICES:
        planned_once(slices)  # not in each session
    host.facts()
    shutil.rmtree(folder, ignore_errors=True)
    for number in range(MOST_SESSIONS):
        pid = os.fork()
        if not pid:
            run_session(folder, f"{seed}-{number}", intensity, planned)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        print(json.dumps({"pid": pid, "code": code} | state_of(folder)), flush=True)
        if code not in GOES_ON:
            return


def state_of(folder: Path) -> dict[str, Any]:
    """Return what the store holds between two sessions: trials that ended, others, winners."""
    if not Paths(folder).store.exists():
        return {"ended": {}, "open": 0, "winners": {}}
    with contextlib.closing(
        sqlite3.connect(f"file:{Paths(folder).store}?mode=ro", uri=True)
    ) as raw:
        whole = raw.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    try:
        with Store.read(folder) as store:
            rows = [dict(row) for row in store.trial_rows()]
            winners = {o.task_id: o.winner.candidate_id for o in store.task_outcomes()}
    except FolderError as error:  # killed before it was made
        return {"ended": {}, "open": 0, "winners": {}, "unreadable": str(error)}
    ended = {r["candidate_id"]: r for r in rows if r["state"] in ("measured", "failed")}
    return {
        "is_whole": whole,
        "ended": ended,
        "open": len(rows) - len(ended),
        "winners": winners,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4])
