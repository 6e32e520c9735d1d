"""Sessions of one run under seeded faults: each a forked process, which a crash ends by SIGKILL.

    python tests/chaos_driver.py FOLDER SEED INTENSITY

Coordinator, session, store, run folder, cluster, slices and the choice of the winners are tunerd's
own; Ray is `simulated_ray`, the slices are the simulated ones, and the tuners propose from a fixed
list. Every fault is written to FOLDER.log before it strikes, and what came of it afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import random
import shutil
import signal
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from coordinator_world import candidate, task
from simulated_ray import Actor, SimulatedRay

from tunerd import actors, host, preparation, session
from tunerd.compare import compare
from tunerd.errors import FolderError, TunerdError
from tunerd.finals import Ending
from tunerd.model import FixedModel
from tunerd.nodes import TunerSpec
from tunerd.progress import QuietProgress
from tunerd.records import Store, schema
from tunerd.run_folder import Paths, RunFolder
from tunerd.search import Proposal, Told, default_candidate
from tunerd.settings import TuneSettings
from tunerd.slices.simulated import FAULTS_VARIABLE, SimulatedSlice, number_of
from tunerd.stop import Stop
from tunerd.vocabulary import (
    Build,
    Candidate,
    Correctness,
    Failure,
    Kind,
    Latency,
    Measurement,
    Model,
    Outcome,
    Profile,
    Stage,
    Task,
    Verification,
)
from tunerd.winners import QuietSlice, choose_winners

TASKS = [task(f"t{i}", weight=i + 1) for i in range(6)]
SPACE = 40  # candidates of each task
TRIALS = SPACE * len(TASKS)
MOST_SESSIONS = 2000
_SPARED = 2  # losses of a trial, or of a task's search, in one session: the third is its own fault
_NODES = ({"simulated-0-0", "simulated-0-1", "tuner-0"}, {"simulated-0-2", "simulated-0-3"})
_FIXED = "crash:7,timeout:11"  # of the list: these candidates fail in every run
_NEVER_BUILT = 13

# Faults and how likely each is where it may strike, at intensity 1.
AT_A_CALL = {"worker lost before its work": 0.03, "worker lost after its work": 0.03, "node": 0.01}
AT_A_RESULT = {"collateral": 0.01}
AT_A_STATEMENT = {"driver killed in a transaction": 0.004}
AT_A_COMMIT = {"driver killed": 0.006, "torn write": 0.01}
AT_A_TRANSACTION = {"store full": 0.004, "store locked": 0.005, "store locked briefly": 0.02}
AT_A_WAIT = {
    "SIGTERM": 0.004,
    "SIGTERM, then SIGKILL": 0.004,
    "clock forwards": 0.01,
    "clock backwards": 0.01,
    "second tunerd": 0.01,
}
AT_A_FILE = {"folder full": 0.02}


class Chaos:
    """Decides which fault strikes where, and keeps the log."""

    def __init__(self, folder: Path, seed: str, intensity: float) -> None:
        self.random = random.Random(seed)
        self._folder = folder
        self._intensity = intensity
        self._log = os.open(f"{folder}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._losses: Counter[str] = Counter()
        self._left_to_live: int | None = None  # commits
        self.is_armed = True  # until a fault that ends the session has struck

    def note(self, what: str, fault: str, **more: Any) -> None:
        line = json.dumps({"what": what, "fault": fault, "pid": os.getpid()} | more)
        os.write(self._log, f"{line}\n".encode())

    def draw(self, faults: Mapping[str, float]) -> str:
        """Return the fault that strikes here, or nothing."""
        if self.is_armed:
            for fault, rate in faults.items():
                if self.random.random() < rate * self._intensity:
                    return fault
        return ""

    def spare(self, victims: Sequence[str]) -> bool:
        """Whether one of these was lost so often that the next loss would be taken for its own."""
        return any(self._losses[v] >= _SPARED for v in victims)

    def lose(self, victims: Sequence[str]) -> None:
        self._losses.update(victims)

    def kill(self, fault: str) -> None:
        self.note("injected", fault)
        os.kill(os.getpid(), signal.SIGKILL)

    def give_seconds_to_live(self) -> None:
        self._left_to_live = self.random.randint(1, 20)

    def live_on(self) -> None:
        """Pass a moment of a life that may be counted."""
        if self._left_to_live is not None:
            self._left_to_live -= 1
            if self._left_to_live <= 0:
                self.kill("SIGKILL after SIGTERM")


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


class ListTuner:
    """Proposes the candidates of a fixed list in order, and builds nothing."""

    def __init__(self, *_: Any) -> None:
        self._told: set[str] = set()

    def prepare(self, target: Any) -> None:
        pass

    def warm_up(self, *_: Any) -> float:
        return 0.0

    def propose(
        self, task_id: str, count: int, told: Sequence[Told], exclude: Sequence[str]
    ) -> Proposal:
        (of,) = (t for t in TASKS if t.task_id == task_id)
        self._told |= {t.candidate.candidate_id for t in told} | set(exclude)
        fresh = [c for n in range(SPACE) if (c := candidate(of, n)).candidate_id not in self._told]
        self._told |= {c.candidate_id for c in fresh[:count]}
        return Proposal(tuple(fresh[:count]), not fresh, "", 0.0)

    def build(self, candidates: Sequence[Candidate]) -> Any:
        return actors_timed([_built(c) for c in candidates])


def actors_timed(value: Any) -> Any:
    from tunerd.workers import Timed

    return Timed(value, 0.0, 0.0)


def _built(of: Candidate) -> Build | Failure:
    if of.trace_json and not number_of(of.candidate_id) % _NEVER_BUILT:
        return Failure(Stage.BUILD, Kind.COMPILE, "it does not compile, in no run")
    return Build(of, b"", "ab" * 32, 0.1, (), (), "llvm")


class FaultySlice(SimulatedSlice):
    """A simulated slice whose neighbours' faults end some of its measurements."""

    chaos: Chaos

    def measure(self, builds: Sequence[Build], profile: Profile) -> list[Measurement | Failure]:
        results = super().measure(builds, profile)
        for i, build in enumerate(builds):
            victim = [build.candidate.candidate_id]
            if (fault := self.chaos.draw(AT_A_RESULT)) and not self.chaos.spare(victim):
                self.chaos.lose(victim)
                self.chaos.note("injected", fault, victim=victim[0])
                results[i] = Failure(Stage.RUN, Kind.COLLATERAL, f"chaos {victim[0]}")
        return results


def striker(chaos: Chaos, ray: list[SimulatedRay]) -> Any:
    """Return what decides over the lives of actors."""

    def strike(actor: Actor, method: str, arguments: tuple[Any, ...]) -> str:
        fault = chaos.draw(AT_A_CALL)
        if not fault:
            return ""
        doomed = [actor]
        if fault == "node":
            doomed += [
                a for a in ray[0].actors if a is not actor and not a.death and a.name == actor.name
            ]
        lost = victims(method, arguments) + [v for a in doomed for v in victims_of(a)]
        if chaos.spare(lost):
            return ""
        chaos.lose(lost)
        if fault.endswith("after its work") and actor.instance is not None:
            with contextlib.suppress(Exception):
                getattr(actor.instance, method)(*arguments)
        name = f"chaos {os.getpid()}-{chaos.random.getrandbits(40):010x}"
        role = actor.name.removesuffix("Actor").lower()
        chaos.note("injected", fault, name=name, at=f"{role} {method}")
        for other in doomed[1:]:
            other.die(f"{name} with its node")
        return name

    return strike


class Evidence(logging.Handler):
    """Notes what tunerd says of the faults that it meets."""

    def __init__(self, chaos: Chaos) -> None:
        super().__init__()
        self._chaos = chaos

    def emit(self, record: logging.LogRecord) -> None:
        self._chaos.note("said", record.getMessage())


# --- the driver, its store and its folder ------------------------------------------------------


def watch_store(chaos: Chaos, folder: Path) -> None:
    """Let faults strike at every transaction, statement and commit of the store."""
    original = Store._transaction

    def statement(*_: Any) -> None:
        if chaos.draw(AT_A_STATEMENT):
            chaos.kill("driver killed in a transaction")

    @contextlib.contextmanager
    def transaction(store: Store) -> Iterator[Any]:
        connection = store._connection
        if store._is_snapshot:
            with original(store) as reading:
                yield reading
            return
        if not sa.event.contains(connection, "before_cursor_execute", statement):
            sa.event.listen(connection, "before_cursor_execute", statement)
        fault = chaos.draw(AT_A_TRANSACTION)
        locks = lock(chaos, folder, fault) if "locked" in fault else contextlib.nullcontext()
        if fault == "store full":
            fill_up(chaos, store)
        before = _files(folder)
        with locks, original(store) as opened:
            yield opened
        committed(chaos, folder, before)

    Store._transaction = transaction  # type: ignore[method-assign]


def committed(chaos: Chaos, folder: Path, before: dict[str, bytes]) -> None:
    """Pass the moment after a commit, of which nobody knows yet."""
    chaos.live_on()
    match chaos.draw(AT_A_COMMIT):
        case "driver killed":
            chaos.kill("driver killed")
        case "torn write":
            after = _files(folder)
            old, new = before["store.sqlite-wal"], after["store.sqlite-wal"]
            if old == new or before["store.sqlite"] != after["store.sqlite"]:
                return  # nothing was written, or the log was moved into the store
            first = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b),
                         len(old))  # fmt: skip
            cut = chaos.random.randint(first, max(first, len(new) - 1))
            (folder / "store.sqlite-wal").write_bytes(new[:cut] + old[cut:])
            chaos.kill("torn write")


def _files(folder: Path) -> dict[str, bytes]:
    return {
        name: path.read_bytes() if (path := folder / name).exists() else b""
        for name in ("store.sqlite", "store.sqlite-wal")
    }


def fill_up(chaos: Chaos, store: Store) -> None:
    """Leave the store no page more than it has."""
    chaos.is_armed = False
    raw: sqlite3.Connection = store._connection.connection.driver_connection  # type: ignore[assignment]
    (pages,) = raw.execute("PRAGMA page_count").fetchone()
    raw.execute(f"PRAGMA max_page_count = {pages}")
    chaos.note("injected", "store full")


@contextlib.contextmanager
def lock(chaos: Chaos, folder: Path, fault: str) -> Iterator[None]:
    """Have another program lock the store, for good or for a moment."""
    other = sqlite3.connect(folder / "store.sqlite", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    chaos.note("injected", fault)
    try:
        if fault == "store locked":
            chaos.is_armed = False
            yield
        else:
            import threading

            release = threading.Timer(0.005, other.rollback)
            release.start()
            yield
            release.join()
            chaos.note("seen", fault)
    finally:
        other.close()


def watch_files(chaos: Chaos, folder: Path) -> None:
    """Let the disk be full for files of the run folder."""

    def faulty(original: Any) -> Any:
        def write(path: Path, *arguments: Any, **named: Any) -> Any:
            if folder in path.parents and (fault := chaos.draw(AT_A_FILE)):
                chaos.is_armed = False
                chaos.note("injected", fault, at=path.name.partition("-")[0])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return original(path, *arguments, **named)

        return write

    for method in ("write_text", "write_bytes", "touch"):
        setattr(Path, method, faulty(getattr(Path, method)))


class Clock:
    """A clock that somebody sets."""

    def __init__(self, chaos: Chaos, offset_secs: float) -> None:
        self._chaos = chaos
        self._real = time.time
        self._offset_secs = offset_secs
        self._unseen: list[str] = []
        time.time = self.time

    def time(self) -> float:
        while self._unseen:
            self._chaos.note("seen", self._unseen.pop())
        return self._real() + self._offset_secs

    def jump(self, fault: str) -> None:
        hours = self._chaos.random.uniform(1, 48)
        self._offset_secs += 3600 * (hours if fault.endswith("forwards") else -hours)
        self._chaos.note("injected", fault)
        self._unseen.append(fault)
        time.time()


def at_wait(chaos: Chaos, clock: Clock, folder: Path) -> None:
    match fault := chaos.draw(AT_A_WAIT):
        case "clock forwards" | "clock backwards":
            clock.jump(fault)
        case "second tunerd":
            chaos.note("injected", fault)
            try:
                RunFolder.open(folder, facts=None)  # type: ignore[arg-type]
            except FolderError as error:
                assert "is in use by the tunerd with pid" in str(error)
                chaos.note("seen", fault)
        case "SIGTERM" | "SIGTERM, then SIGKILL":
            chaos.is_armed = False
            chaos.note("injected", fault)
            os.kill(os.getpid(), signal.SIGTERM)
            if fault != "SIGTERM":
                chaos.give_seconds_to_live()


def watch_stop(chaos: Chaos) -> None:
    original = Stop._note

    def note(stop: Stop, number: int, frame: Any) -> None:
        chaos.note("seen", "SIGTERM")
        original(stop, number, frame)

    Stop._note = note  # type: ignore[method-assign]


# --- a session ---------------------------------------------------------------------------------


def layout() -> preparation.Layout:
    plan = SimulatedSlice.plan(25)
    slices = tuple(
        (dataclasses.replace(s, environment=((FAULTS_VARIABLE, _FIXED),)), None)
        for s in plan.slices
    )
    tuners = tuple(TunerSpec(f"tuner-{i}", 1) for i in range(3))
    here = frozenset(s.slice_id for s, _ in slices)
    return preparation.Layout(plan.target, "simulated device", slices, tuners, (), here)


def settings_of(folder: Path) -> TuneSettings:
    return TuneSettings(
        model=Path("net.onnx"), out=folder, cpu_pct=25, slice_kind="simulated", trials=TRIALS
    )


def finish(ending: Ending) -> Outcome:
    """End a run with its winners, without a model."""
    quiet = QuietSlice(ending.cluster, ending.quiet_slice)
    outcomes = choose_winners(
        TASKS, ending.folder.store, quiet, say=ending.say, unsearched=ending.unsearched
    )
    times = (1e-3, 1.1e-3, 0.9e-3)
    outcome = Outcome(
        model=ending.model,
        target=ending.layout.target,
        tasks=outcomes,
        verification=Verification(Correctness.RIGHT, 1, 1e-3, 1e-3, 0.0, ""),
        latencies=(Latency("default", times), Latency("tuned", times)),
        end_to_end=compare(times, times),
        artifact=str(ending.folder.paths.artifact),
        proofs=ending.proofs,
    )
    ending.folder.store.save_outcome(outcome)
    return outcome


def run_session(folder: Path, seed: str, intensity: float, planned: preparation.Layout) -> None:
    """Run one session to whatever end, and leave the process."""
    chaos = Chaos(folder, seed, intensity)
    clock = Clock(chaos, chaos.random.uniform(-1e6, 1e6) * intensity)
    ray: list[SimulatedRay] = []
    ray.append(SimulatedRay(seed, striker(chaos, ray), lambda: at_wait(chaos, clock, folder)))
    ray[0].install()
    FaultySlice.chaos = chaos
    model = Model("net", "d" * 64, (), (), proto=None)
    fixed = FixedModel("net", "d" * 64, (), proto=None)
    tasks: tuple[Task, ...] = tuple(TASKS)
    kernels = preparation.Kernels(model, None, tasks)  # type: ignore[arg-type]
    schema.BUSY_TIMEOUT_SECS = 0.05
    preparation.local_layout = lambda _: planned
    preparation.read = lambda _: fixed
    preparation.kernels_of = lambda *_: kernels
    actors.leashed = contextlib.nullcontext  # type: ignore[assignment]
    actors.TunerActor = ListTuner  # type: ignore[misc,assignment]
    slices = sys.modules["tunerd.slices"]
    slices.member = lambda _: FaultySlice  # type: ignore[attr-defined]
    session.finish = finish
    watch_stop(chaos)
    watch_files(chaos, folder)
    watch_store(chaos, folder)
    logging.getLogger("tunerd").addHandler(Evidence(chaos))
    try:
        session.tune(settings_of(folder), QuietProgress())
    except TunerdError as error:
        chaos.note("ended", str(error), kind=type(error).__name__, code=int(error.exit_code))
        os._exit(int(error.exit_code))
    except BaseException as error:
        import traceback

        chaos.note("ended", "".join(traceback.format_exception(error)), kind="bug", code=70)
        os._exit(70)
    chaos.note("ended", "finished", kind="", code=0)
    os._exit(0)


def main(folder: Path, seed: str, intensity: float) -> None:
    """Repeat the same command until it finishes; print a line of JSON for each session."""
    planned = layout()
    host.facts()
    default_candidate(TASKS[0])
    shutil.rmtree(folder, ignore_errors=True)
    for number in range(MOST_SESSIONS):
        pid = os.fork()
        if not pid:
            run_session(folder, f"{seed}-{number}", intensity, planned)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        print(json.dumps({"pid": pid, "code": code} | state_of(folder)), flush=True)
        if code in (0, 70):
            return


def state_of(folder: Path) -> dict[str, Any]:
    """Return every trial that has ended, as the store has it between two sessions."""
    if not Paths(folder).store.exists():
        return {"ended": {}}
    try:
        with Store.read(folder) as store:
            rows = [dict(row) for row in store.trial_rows()]
    except FolderError as error:
        return {"ended": {}, "unreadable": str(error)}
    ended = {r["candidate_id"]: r for r in rows if r["state"] in ("measured", "failed")}
    return {"ended": {name: [r[c] for c in sorted(r)] for name, r in ended.items()}}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
