"""The place of runner processes on these cores: their memory, and their ends."""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import signal
import subprocess
from pathlib import Path

import pytest

from tests.lib.colocation_plans import inputs
from tests.lib.place_subjects import opened, processes, runners_of, same
from tunerd.artifacts.loading import load
from tunerd.artifacts.staging import bytes_of
from tunerd.colocation.artifacts import inputs_of, needed_memory, outputs_of
from tunerd.colocation.places import processes as processes_module
from tunerd.colocation.places.base import (
    PROCESS_BYTES,
    Done,
    Fault,
    Loaded,
    seat_bytes,
    slots_ahead,
)
from tunerd.colocation.places.process_seat import Held
from tunerd.colocation.work import Lane


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("members")


def test_what_is_large_is_copied_in_other_threads_and_mixes_no_answers(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes_module, "_LARGE_BYTES", 0)
    with opened(processes, root) as subject:
        (lane,) = subject.place.cut([Lane("whole", 100, ("m0", "m1"))])
        seats = [subject.load(seed, lane) for seed in (0, 1)]
        for nth in range(6):  # two at a time, of one seat and of both
            both: list[tuple[int, int, queue.SimpleQueue[Done | Fault]]] = []
            for started in (nth, nth + 1):
                seed, of_it = nth % 2 * (started % 2), queue.SimpleQueue[Done | Fault]()
                subject.place.start(seats[seed], 0, inputs(started), of_it.put)
                both.append((seed, started, of_it))
            for seed, started, of_it in both:  # which are told in any order
                done = subject.next_of(of_it)
                assert isinstance(done, Done)
                assert same(done.outputs, subject.expected(seed, inputs(started)))
        told: queue.SimpleQueue[Done | Fault] = queue.SimpleQueue()
        subject.place.start(seats[0], 0, {"y": inputs()["x"]}, told.put)  # there is no such input
        assert isinstance(subject.next_of(told), Fault)
        assert isinstance(subject.place.reload(seats[0]), Loaded)
        assert isinstance(subject.run(seats[0], inputs()), Done)


def test_what_waits_lies_where_its_process_reads_it_and_goes_with_the_process(root: Path) -> None:
    with opened(processes, root) as subject:
        place = subject.place
        (lane,) = place.cut([Lane("whole", 100, ("m0",))])
        seat = subject.load(0, lane)
        held = [place.holding("m0", inputs(seed)) for seed in range(6)]
        ahead = [each for each in held if isinstance(each, Held)]
        assert len(ahead) == slots_ahead(needed_memory(subject.member(0).artifact).request_bytes)
        assert 0 < len(ahead) < len(held)
        for _ in range(2):
            for seed, given in enumerate(held):
                done = subject.run(seat, given)
                assert isinstance(done, Done)
                assert same(done.outputs, subject.expected(0, inputs(seed)))
            place.reload(seat)  # what was held is not there, and is copied again
        for given in held:
            place.give_back("m0", given)
        again = [place.holding("m0", inputs(seed)) for seed in range(6)]
        assert sum(isinstance(each, Held) for each in again) == len(ahead)
        place.give_back("m0", again[0])
        assert isinstance(place.holding("m0", inputs()), Held)


def test_a_seat_that_is_loaded_again_leaves_no_shared_memory_behind(root: Path) -> None:
    with opened(processes, root) as subject:
        (lane,) = subject.place.cut([Lane("whole", 100, ("m0",))])
        seat = subject.load(0, lane)
        gc.collect()  # what other tests have left
        before = shared_memories()
        assert before > 0
        gc.freeze()  # as while an engine is open
        try:
            for _ in range(2):
                subject.fault(seat)
                assert isinstance(subject.run(seat, inputs()), Fault)
                subject.place.reload(seat)
            assert isinstance(subject.run(seat, inputs()), Done)
            assert shared_memories() == before
        finally:
            gc.unfreeze()


def test_a_process_maps_what_was_lent_when_it_comes_again_and_as_long_as_it_is_held(
    root: Path,
) -> None:
    with opened(processes, root) as subject:
        place = subject.place
        (lane,) = place.cut([Lane("whole", 100, ("m0",))])
        seat, expected = subject.load(0, lane), load(subject.member(0).artifact)
        (held,) = runners_of(subject)
        before = shared_memories(), shared_memories(held.pid)
        lent = [place.lent(inputs_of(subject.member(0).artifact)) for _ in range(2)]
        for seed, mapped in enumerate([0, 1, 1, 2]):
            arrays = lent[seed == 3]
            for name, array in inputs(seed).items():
                arrays[name][...] = array
            given = place.holding("m0", arrays)
            assert isinstance(given, Held) == (seed in (0, 3))  # copied the first time
            if seed == 3:
                given = arrays
            done = subject.run(seat, given)
            assert isinstance(done, Done)
            assert same(done.outputs, expected(inputs(seed)))
            assert shared_memories(held.pid) == before[1] + mapped
        subject.fault(seat)
        assert isinstance(subject.run(seat, lent[1]), Fault)
        place.reload(seat)
        done = subject.run(seat, lent[1])  # the new process has no memory of that number
        assert isinstance(done, Done)
        assert same(done.outputs, expected(inputs(3)))
        (held,) = runners_of(subject)
        given, arrays = {}, {}
        lent.clear()
        assert shared_memories() == before[0]
        for _ in range(2):  # the first of them is told
            assert isinstance(subject.run(seat, inputs()), Done)
        assert shared_memories(held.pid) == before[1]


def shared_memories(pid: int | str = "self") -> int:
    """Return how many pieces of memory without a name a process has open, this one if not named."""
    links = []
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # that of the folder itself is closed by now
            links.append(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return sum(link.startswith("/memfd:tunerd") for link in links)


def test_a_process_is_planned_with_memory_for_each_request_that_it_takes(root: Path) -> None:
    with opened(processes, root) as subject:
        member, depth = subject.member(0), subject.place.depth
        specs = (*inputs_of(member.artifact), *outputs_of(member.artifact))
        request_bytes = sum(map(bytes_of, specs))
        needed = needed_memory(member.artifact)
        one = needed.alone_bytes + PROCESS_BYTES["processes"] + request_bytes
        assert subject.place.needed_bytes(member, 3, cut=1e-3) == 3 * one
        slots = depth + slots_ahead(request_bytes)
        whole = 3 * (one + (slots - 1) * request_bytes)
        assert slots > depth > 1
        assert subject.place.needed_bytes(member, 3, cut=None) == whole
        assert whole == 3 * (needed.shared_bytes + seat_bytes(needed, "processes", "cpu"))


def test_a_process_that_somebody_kills_is_no_fault_of_its_member(root: Path) -> None:
    subject = processes(root)
    with subject.place:
        (lane,) = subject.place.cut([Lane("whole", 100, ("m0",))])
        seat = subject.load(0, lane)
        assert all(size > 0 for size in subject.place.memory_bytes().values())
        os.kill(subject.place._seats[seat].pid, signal.SIGKILL)
        fault = subject.run(seat, inputs())
        assert isinstance(fault, Fault)
        assert not fault.is_own
        subject.place.reload(seat)
        assert isinstance(subject.run(seat, inputs()), Done)


def test_to_kill_a_member_reaches_no_stranger_that_has_its_pid_by_now(root: Path) -> None:
    with opened(processes, root) as subject, subprocess.Popen(["sleep", "60"]) as stranger:
        try:
            (lane,) = subject.place.cut([Lane("whole", 100, ("m0",))])
            seat = subject.load(0, lane)
            (held,) = runners_of(subject)
            held.pid, own = stranger.pid, held.pid  # as where its own has ended
            subject.place.kill("m0")
            held.pid = own
            assert isinstance(subject.run(seat, inputs()), Fault)
            assert stranger.poll() is None
        finally:
            stranger.kill()
