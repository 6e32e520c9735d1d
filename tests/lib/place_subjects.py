"""Places to be tested, each with what spoils a seat of it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.lib import ROOT
from tests.lib.colocation_plans import Script, artifact, cuda_artifact
from tests.lib.fake_gpu import fake_cuda_place
from tests.lib.fake_mps import FakeMps
from tunerd.artifacts.loading import load
from tunerd.colocation.places.base import Done, Fault, Place
from tunerd.colocation.places.in_process import InProcessPlace
from tunerd.colocation.places.mps import MpsPlace
from tunerd.colocation.places.processes import ProcessesPlace, RunnersPlace
from tunerd.colocation.plan import Member
from tunerd.colocation.work import Lane, Seat
from tunerd.slices.cpu import CpuSlice
from tunerd.slices.mps import mps_slice
from tunerd.slices.mps.guard_client import Lease
from tunerd.system.gpus import GpuFacts
from tunerd.system.processes import ProcessId
from tunerd.vocabulary import Arrays, SliceSpec

WAIT_SECS = 120


@dataclass
class Subject:
    """A place, and how to spoil what a seat of it is to do next."""

    place: Place
    root: Path
    fault: Callable[[Seat], None]  # the next run of the seat faults
    hang: Callable[[Seat], None]  # the next run of the seat does not end
    heal: Callable[[], None]
    undo: Callable[[], None] = lambda: None  # when the place is closed
    journal: Callable[[], list[str]] = list  # of the MPS daemon
    root_of_mps: Path = Path()
    compiled: Callable[[Path, int], Path] = artifact

    def member(self, seed: int) -> Member:
        return Member(name=f"m{seed}", artifact=self.compiled(self.root, seed))

    def expected(self, seed: int, given: Arrays) -> Arrays:
        return load(self.compiled(self.root, seed))(given)

    def load(self, seed: int, lane: Lane) -> Seat:
        self.place.load(self.member(seed), lane, cut=None)
        return Seat(f"m{seed}", lane.name)

    def load_in_segments(self, seed: int, lane: Lane) -> tuple[Seat, int]:
        """Load a member in segments of a kernel each; return how many they are, too."""
        loaded = self.place.load(self.member(seed), lane, cut=1e-9)
        return Seat(f"m{seed}", lane.name), len(loaded.segment_secs)

    def run(self, seat: Seat, given: Arrays, *, segment: int = 0) -> Done | Fault:
        told: queue.SimpleQueue[Done | Fault] = queue.SimpleQueue()
        self.place.start(seat, segment, given, told.put)
        return self.next_of(told)

    def run_to_a_pause(self, seat: Seat, given: Arrays) -> Done | Fault:
        told: queue.SimpleQueue[Done | Fault] = queue.SimpleQueue()
        self.hang(seat)
        self.place.start(seat, 0, given, told.put)
        self.place.pause(seat)
        self.heal()
        return self.next_of(told)

    def next_of(self, told: queue.SimpleQueue[Done | Fault]) -> Done | Fault:
        """Wait for what a place tells, as a dispatcher does."""
        give_up_at = time.monotonic() + WAIT_SECS
        while time.monotonic() < give_up_at:
            secs, bell = self.place.poll(), self.place.bell
            if bell is not None:
                if told.empty():
                    bell.wait(secs)
                    continue
                secs = 0.0
            with contextlib.suppress(queue.Empty):
                return told.get(timeout=WAIT_SECS if secs is None else secs)
        raise TimeoutError


def in_process(root: Path, script: Script | None = None) -> Subject:
    script = script or Script()

    def heal() -> None:
        for gate in script.gates.values():
            gate.set()
        script.gates.clear()

    return Subject(
        InProcessPlace(script.open_model),
        root,
        fault=lambda seat: script.faults.update({_folder(seat): ["illegal address"]}),
        hang=lambda seat: void(script.hold(Path(_folder(seat)))),
        heal=heal,
    )


def runners_of(subject: Subject) -> list[Any]:
    """Return the seats of a place of processes, in the order in which they were loaded."""
    assert isinstance(subject.place, RunnersPlace)
    return list(subject.place._seats.values())


def void(_: object) -> None:
    pass


def _folder(seat: Seat) -> str:
    return f"artifact-{seat.member.removeprefix('m')}"


def processes(root: Path) -> Subject:
    return of_runners(ProcessesPlace(), root)


def of_runners(place: RunnersPlace, root: Path) -> Subject:
    stopped: list[int] = []

    def hang(seat: Seat) -> None:
        stopped.append(place._seats[seat].pid)
        os.kill(stopped[-1], signal.SIGSTOP)

    def heal() -> None:
        while stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stopped.pop(), signal.SIGCONT)

    def fault(seat: Seat) -> None:
        process = place._seats[seat].process
        os.kill(place._seats[seat].pid, signal.SIGSEGV)
        # Any of its threads may have taken the signal, and says where: the others go on meanwhile.
        assert process is None or process.wait(WAIT_SECS)

    return Subject(place, root, fault=fault, hang=hang, heal=heal)


GPU = GpuFacts(
    0,
    "GPU-11111111-2222-3333-4444-555555555555",
    "a GPU",
    80 << 30,
    80 << 30,
    "9.0",
    132,
    False,
    "default",
)


def end_guard(folder: Path) -> None:
    """End the guard of a GPU that stays some seconds longer, and its daemon; remove what it had."""
    for state in folder.glob("r/gpu-*/state.json"):
        said = json.loads(state.read_text())["guard"]
        guard = ProcessId(said["pid"], said["start_ticks"])
        guard.signal(signal.SIGTERM)
        assert guard.wait(WAIT_SECS)
    shutil.rmtree(folder)


def mps(root: Path) -> Subject:
    """The place of a GPU without one: a fake daemon, a real guard, runners on these cores."""
    folder = Path(tempfile.mkdtemp(prefix="tunerd-test-", dir="/tmp"))  # short, for socket paths
    fake = FakeMps(folder)
    patch = pytest.MonkeyPatch()
    command = (sys.executable, str(ROOT / "tests" / "lib" / "mps_runner.py"))
    patch.setenv("PATH", fake.path)
    patch.setenv("TUNERD_RUNTIME_FOLDER", str(folder / "r"))
    acquire = functools.partial(Lease.acquire, runner_command=command)
    patch.setattr(mps_slice.Lease, "acquire", acquire)
    early = functools.partial(mps_slice.guarded_early, runner_command=command)
    patch.setattr(mps_slice, "guarded_early", early)

    def undo() -> None:
        patch.undo()
        end_guard(folder)

    apart = SliceSpec("apart", "cpu", 100, cores=tuple(sorted(os.sched_getaffinity(0))))
    patch.setattr(MpsPlace, "_slice_apart", lambda place, seat: CpuSlice(apart, place._forks))
    made = of_runners(MpsPlace(GPU), root)
    made.undo, made.journal, made.root_of_mps = undo, fake.journal, folder
    return made


def mps_on_a_gpu(root: Path) -> Subject:
    made = of_runners(MpsPlace(), root)
    made.compiled = cuda_artifact
    return made


def cuda_streams(root: Path) -> Subject:
    script = Script()
    made = in_process(root, script)
    made.place = fake_cuda_place(script)
    return made


def cuda_streams_in_parts(root: Path) -> Subject:
    """The same, where the inputs of each launch are brought in parts."""
    script = Script()
    made = in_process(root, script)
    made.place = fake_cuda_place(script, goes_in_parts=True)
    return made


@contextlib.contextmanager
def opened(make: Callable[[Path], Subject], root: Path) -> Iterator[Subject]:
    made = make(root)
    try:
        yield made
    finally:
        made.heal()
        made.place.close()
        made.place.close()
        made.undo()


def same(one: Arrays | None, other: Arrays) -> bool:
    return one is not None and all(np.array_equal(one[k], other[k]) for k in other)
