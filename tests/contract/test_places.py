"""The contract of places, kept by every one of them."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.lib import ROOT
from tests.lib.colocation_plans import CORES, Script, artifact, cuda_artifact, inputs, plan_of
from tests.lib.fake_gpu import FakeContexts, FakeCudaModel, FakeGpu, FakeStaged, fake_cuda_place
from tests.lib.fake_mps import FakeMps, left
from tunerd.artifacts.loading import LoadError, load
from tunerd.colocation.engine import Engine
from tunerd.colocation.places.base import Done, Fault, Loaded, Place
from tunerd.colocation.places.cuda_streams import CudaStreamsPlace
from tunerd.colocation.places.green_contexts import units_of
from tunerd.colocation.places.in_process import InProcessPlace
from tunerd.colocation.places.mps import MpsPlace
from tunerd.colocation.places.processes import ProcessesPlace, RunnersPlace
from tunerd.colocation.plan import Member, Plan
from tunerd.colocation.work import Lane, RefusedError, Seat
from tunerd.errors import HostError, InfrastructureError
from tunerd.slices.mps import mps_slice
from tunerd.slices.mps.guard_client import Lease
from tunerd.slices.mps.mps_slice import MpsSlice
from tunerd.system.gpus import GpuFacts
from tunerd.system.processes import ProcessId
from tunerd.vocabulary import Arrays

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
            secs = self.place.poll()
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
        os.kill(place._seats[seat].pid, signal.SIGSEGV)

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

    made = of_runners(MpsPlace(GPU), root)
    made.undo, made.journal, made.root_of_mps = undo, fake.journal, folder
    return made


def cuda_streams(root: Path) -> Subject:
    script = Script()
    made = in_process(root, script)
    made.place = fake_cuda_place(script)
    return made


ON_CORES = {"in-process": in_process, "processes": processes}


def mps_on_a_gpu(root: Path) -> Subject:
    made = of_runners(MpsPlace(), root)
    made.compiled = cuda_artifact
    return made


PLACES = ON_CORES | {"cuda-streams": cuda_streams, "mps": mps}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("members")


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


@pytest.fixture(params=[*PLACES, pytest.param("mps-on-a-gpu", marks=pytest.mark.gpu)])
def subject(request: pytest.FixtureRequest, root: Path) -> Iterator[Subject]:
    makes = PLACES | {"mps-on-a-gpu": mps_on_a_gpu}
    if request.param == "mps-on-a-gpu" and not (usable := MpsSlice.usability()).ok:
        pytest.skip(usable.why)
    with opened(makes[request.param], root) as made:
        yield made


@pytest.fixture(params=ON_CORES)
def on_cores(request: pytest.FixtureRequest, root: Path) -> Iterator[Subject]:
    with opened(ON_CORES[request.param], root) as made:
        yield made


@pytest.fixture
def lane(subject: Subject) -> Lane:
    (lane,) = subject.place.cut([Lane("whole", 100, ("m0", "m1"))])
    return lane


def same(one: Arrays | None, other: Arrays) -> bool:
    return one is not None and all(np.array_equal(one[k], other[k]) for k in other)


def test_whole_lanes_overlap_and_parts_do_not(on_cores: Subject) -> None:
    whole = [Lane("a", 100, ()), Lane("b", 100, ())]
    assert [lane.cores for lane in on_cores.place.cut(whole)] == [tuple(CORES)] * 2
    if len(CORES) >= 2:
        halves = on_cores.place.cut([Lane("a", 50, ()), Lane("b", 50, ())])
        assert not set(halves[0].cores) & set(halves[1].cores)


def test_lanes_that_do_not_fit_are_refused_by_name(on_cores: Subject) -> None:
    with pytest.raises(HostError, match="for tiny is less than one core"):
        on_cores.place.cut([Lane("tiny", 1, ())] if len(CORES) < 100 else [Lane("tiny", 0, ())])
    with pytest.raises(HostError, match="a is to have core 9999"):
        on_cores.place.cut([Lane("a", 50, (), cores=(9999,))])


def test_a_seat_proves_what_it_has(on_cores: Subject) -> None:
    (lane,) = on_cores.place.cut([Lane("one", 100, ("m0",), cores=(CORES[-1],))])
    loaded = on_cores.place.load(on_cores.member(0), lane, cut=None)
    assert (loaded.proof.lane, loaded.proof.units) == ("one", 1)
    assert loaded.proof.mechanism == "affinity"
    assert all(secs > 0 for secs in loaded.segment_secs)


def test_each_seat_gives_the_answers_of_its_own_model(subject: Subject, lane: Lane) -> None:
    seats = [subject.load(seed, lane) for seed in (0, 1)]
    for seed, seat in enumerate(seats):
        for nth in range(2):
            done = subject.run(seat, inputs(nth))
            assert isinstance(done, Done)
            assert done.secs > 0
            assert same(done.outputs, subject.expected(seed, inputs(nth)))


def test_an_answer_stays_when_the_seat_runs_again(subject: Subject, lane: Lane) -> None:
    seat = subject.load(0, lane)
    first = subject.run(seat, inputs(0))
    subject.run(seat, inputs(1))
    assert isinstance(first, Done)
    assert same(first.outputs, subject.expected(0, inputs(0)))


def test_a_lane_takes_as_many_segments_as_its_depth_and_runs_them_in_order(
    subject: Subject, lane: Lane
) -> None:
    seats = [subject.load(seed, lane) for seed in (0, 1)]
    told: queue.SimpleQueue[Done | Fault] = queue.SimpleQueue()
    names: list[str] = []
    for turn in range(3):
        for nth in range(subject.place.depth):
            seat = seats[(turn + nth) % 2]
            subject.place.start(seat, 0, inputs(nth), told.put)
            names.append(seat.member)
        for nth in range(subject.place.depth):
            done = subject.next_of(told)
            assert isinstance(done, Done)
            model = load(subject.compiled(subject.root, int(names.pop(0)[1:])))
            assert same(done.outputs, model(inputs(nth)))


def test_a_seat_takes_its_depth_at_once_and_mixes_no_answers(subject: Subject, lane: Lane) -> None:
    seat = subject.load(0, lane)
    model = load(subject.compiled(subject.root, 0))
    told: queue.SimpleQueue[Done | Fault] = queue.SimpleQueue()
    started = 0
    answers = []
    while len(answers) < 10:
        while started < 10 and started - len(answers) < subject.place.depth:
            subject.place.start(seat, 0, inputs(started), told.put)
            started += 1
        answers.append(subject.next_of(told))
    for nth, done in enumerate(answers):
        assert isinstance(done, Done)
        assert same(done.outputs, model(inputs(nth)))


def test_a_fault_is_told_with_the_seats_that_it_took(subject: Subject, lane: Lane) -> None:
    seats = [subject.load(seed, lane) for seed in (0, 1)]
    subject.fault(seats[0])
    fault = subject.run(seats[0], inputs())
    assert isinstance(fault, Fault)
    assert fault.is_own
    assert fault.reason
    assert seats[0] in fault.lost
    if seats[1] not in fault.lost:
        assert isinstance(subject.run(seats[1], inputs()), Done)
    for seat in fault.lost:
        subject.place.reload(seat)
    for seat in seats:
        assert isinstance(subject.run(seat, inputs()), Done)


def test_what_hangs_can_be_evicted_and_the_seat_serves_again(subject: Subject, lane: Lane) -> None:
    seat = subject.load(0, lane)
    other = subject.load(1, lane)
    told: queue.SimpleQueue[Done | Fault] = queue.SimpleQueue()
    subject.hang(seat)
    subject.place.start(seat, 0, inputs(), told.put)
    assert seat in subject.place.evict(seat)
    subject.heal()
    subject.place.reload(seat)
    assert isinstance(subject.run(seat, inputs()), Done)
    assert isinstance(subject.run(other, inputs()), Done)
    assert told.empty()


def test_a_seat_in_segments_pauses_lets_another_run_and_goes_on(
    subject: Subject, lane: Lane
) -> None:
    seat, segments = subject.load_in_segments(0, lane)
    other = subject.load(1, lane)
    assert segments > 2
    paused = subject.run_to_a_pause(seat, inputs(0))
    assert isinstance(paused, Done)
    assert (paused.outputs, paused.segments) == (None, 1)
    between = subject.run(other, inputs(1))
    assert isinstance(between, Done)
    assert same(between.outputs, subject.expected(1, inputs(1)))
    done = subject.run(seat, inputs(0), segment=1)
    assert isinstance(done, Done)
    assert same(done.outputs, subject.expected(0, inputs(0)))
    assert done.segments == segments - 1
    whole = subject.run(seat, inputs(2))
    assert isinstance(whole, Done)
    assert same(whole.outputs, subject.expected(0, inputs(2)))
    assert whole.segments == segments


def test_a_seat_that_pauses_can_be_evicted_and_serves_again(subject: Subject, lane: Lane) -> None:
    seat, _ = subject.load_in_segments(0, lane)
    assert isinstance(subject.run_to_a_pause(seat, inputs(0)), Done)
    assert seat in subject.place.evict(seat)
    assert len(subject.place.reload(seat).segment_secs) > 1
    done = subject.run(seat, inputs(1))
    assert isinstance(done, Done)
    assert same(done.outputs, subject.expected(0, inputs(1)))


def test_what_exceeds_its_time_is_evicted_in_every_place_and_nobody_else_is(
    subject: Subject,
) -> None:
    members = [subject.member(seed) for seed in (0, 1)]
    members[0] = members[0].model_copy(update={"limit_ms": 300})
    is_on_a_gpu = subject.compiled is cuda_artifact
    plan = Plan.model_validate(
        {
            "members": [member.model_dump() for member in members],
            "policy": {"kind": "streams"},
            "device": "cuda" if is_on_a_gpu else "cpu",
        }
    )
    with Engine(plan, place=subject.place) as engine:
        neighbour = runners_of(subject)[1].pid if isinstance(subject.place, RunnersPlace) else 0
        subject.hang(Seat("m0", "stream-0"))
        endless = engine.submit("m0", inputs(1))
        others = [engine.submit("m1", inputs(seed)) for seed in range(4)]
        assert "exceeded its time of 0.3 s" in str(endless.exception(WAIT_SECS))
        subject.heal()
        for seed, other in enumerate(others):
            assert same(other.result(WAIT_SECS), subject.expected(1, inputs(seed)))
        assert same(
            engine.submit("m0", inputs(2)).result(WAIT_SECS), subject.expected(0, inputs(2))
        )
        (fault,) = engine.stats().faults
        if neighbour:
            assert runners_of(subject)[1].pid == neighbour
    assert fault.lost == {Seat("m0", "stream-0")}
    assert fault.recovered_secs is not None


def test_in_every_place_a_caller_may_write_where_the_device_reads(subject: Subject) -> None:
    members = [subject.member(seed).model_dump() for seed in (0, 1)]
    device = "cuda" if subject.compiled is cuda_artifact else "cpu"
    plan = Plan.model_validate(
        {"members": members, "policy": {"kind": "streams"}, "device": device}
    )
    with Engine(plan, place=subject.place) as engine:
        buffers = engine.input_buffers("m0")
        assert all(not array.any() for array in buffers.values())
        for seed in range(3):
            for name, array in inputs(seed).items():
                buffers[name][...] = array
            asked = [(n, engine.submit(f"m{n}", buffers)) for n in (0, 1, 0)]
            for number, future in asked:
                assert same(future.result(WAIT_SECS), subject.expected(number, inputs(seed)))
        again = [engine.submit("m0", inputs(seed)) for seed in range(3)]  # not from the buffers
        for seed, future in enumerate(again):
            assert same(future.result(WAIT_SECS), subject.expected(0, inputs(seed)))
    with pytest.raises(RefusedError):
        engine.input_buffers("m0")


def test_whom_an_eviction_keeps_waiting_for_longer_than_its_limit_is_not_evicted(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_loading, may_load = threading.Event(), threading.Event()
    named = {f"m{seed}": {"limit_ms": 300} for seed in (0, 1)}
    with opened(in_process, root) as subject:
        reload = subject.place.reload

        def slowly(seat: Seat) -> Loaded:
            is_loading.set()
            may_load.wait(WAIT_SECS)
            return reload(seat)

        monkeypatch.setattr(subject.place, "reload", slowly)
        with Engine(plan_of(root, named, kind="streams"), place=subject.place) as engine:
            try:
                subject.hang(Seat("m0", "stream-0"))
                endless = engine.submit("m0", inputs())
                assert "exceeded its time" in str(endless.exception(WAIT_SECS))
                assert is_loading.wait(WAIT_SECS)
                subject.hang(Seat("m1", "stream-1"))  # as if the device stood still for all
                neighbour = engine.submit("m1", inputs())
                with pytest.raises(TimeoutError):
                    neighbour.result(0.6)
                subject.heal()
                assert same(neighbour.result(WAIT_SECS), subject.expected(1, inputs()))
            finally:
                may_load.set()
            (fault,) = engine.stats().faults
    assert fault.lost == {Seat("m0", "stream-0")}


def test_what_is_no_artifact_is_not_loaded(subject: Subject, lane: Lane, tmp_path: Path) -> None:
    member = Member(name="none", artifact=tmp_path)
    with pytest.raises((LoadError, InfrastructureError)):
        subject.place.load(member, lane, cut=None)


def test_memory_is_known_before_loading(subject: Subject) -> None:
    needed = subject.place.needed_bytes(subject.member(0), 1)
    weights = subject.member(0).artifact / "weights.bin"
    assert weights.stat().st_size < needed < subject.place.capacity_bytes()


def test_seats_keep_the_thread_that_asks_on_its_cores(on_cores: Subject) -> None:
    (lane,) = on_cores.place.cut([Lane("whole", 100, ("m0",))])
    os.sched_setaffinity(0, CORES)
    on_cores.run(on_cores.load(0, lane), inputs())
    assert sorted(os.sched_getaffinity(0)) == CORES


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


def test_clients_of_mps_have_the_shares_of_their_lanes_and_this_process_is_none(root: Path) -> None:
    with opened(mps, root) as subject:
        lanes = subject.place.cut([Lane("half", 50, ("m0",)), Lane("rest", 40, ("m1",))])
        proofs = [
            subject.place.load(subject.member(seed), lane, cut=None).proof
            for seed, lane in enumerate(lanes)
        ]
        assert [(p.lane, p.units, p.mechanism) for p in proofs] == [
            ("half", 66, "mps"),
            ("rest", 52, "mps"),
        ]
        pids = {held.pid for held in runners_of(subject)}
        pipes = subject.root_of_mps.glob("**/pipe/client-*")
        assert {int(path.name.removeprefix("client-")) for path in pipes} == pids
        assert os.getpid() not in pids


def test_a_client_of_mps_is_evicted_by_the_daemon_and_its_neighbours_go_on(root: Path) -> None:
    with opened(mps, root) as subject:
        (lane,) = subject.place.cut([Lane("whole", 100, ("m0", "m1"))])
        seat, other = (subject.load(seed, lane) for seed in (0, 1))
        evicted, neighbour = (held.pid for held in runners_of(subject))
        subject.hang(seat)
        subject.place.start(seat, 0, inputs(), void)
        assert subject.place.evict(seat) == (seat,)
        subject.place.reload(seat)
        told = subject.journal()
        assert f"terminate {evicted}" in told
        assert f"terminate {neighbour}" not in told
        assert told.count("daemon start") == 1
        for each in (seat, other):
            assert isinstance(subject.run(each, inputs()), Done)
        assert runners_of(subject)[1].pid == neighbour


def test_the_end_of_one_client_of_mps_is_the_end_of_all_and_all_serve_again(root: Path) -> None:
    with opened(mps, root) as subject:
        plan = plan_of(root, {"one": {}, "two": {}, "three": {}}, kind="streams")
        with Engine(plan, place=subject.place) as engine:
            expected = engine.submit("one", inputs()).result(WAIT_SECS)
            os.kill(runners_of(subject)[0].pid, signal.SIGKILL)
            futures = [engine.submit(name, inputs()) for name in ("one", "two", "three") * 2]
            answers = [future.result(WAIT_SECS) for future in futures]
            for name in ("one", "two", "three"):  # there may have been an answer before the fault
                engine.submit(name, inputs()).result(WAIT_SECS)
            faults = engine.stats().faults
        assert same(answers[0], expected)
        assert all(fault.recovered_secs is not None for fault in faults)
        assert len(frozenset().union(*(fault.lost for fault in faults))) == 3


_SERVER = """
import sys
from pathlib import Path
from tests.contract import test_places as t
subject = t.mps(Path(sys.argv[1]))
engine = t.Engine(t.plan_of(subject.root, {"one": {}, "two": {}}), place=subject.place).start()
engine.submit("one", t.inputs()).result(60)
print(subject.root_of_mps, *(held.pid for held in t.runners_of(subject)), flush=True)
sys.stdin.read()
"""


def test_a_server_that_is_killed_leaves_no_client_of_mps_and_signals_none(root: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER, root],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as server:
        assert server.stdout is not None
        folder, *pids = server.stdout.readline().split()
        clients = [ProcessId.of(int(pid)) for pid in pids]
        server.kill()
    assert len(clients) == 2
    assert left(client for client in clients if client is not None) == []
    assert "signal" not in (Path(folder) / "journal").read_text()
    end_guard(Path(folder))


def test_a_dead_context_takes_every_seat_and_a_new_process_is_asked_for(root: Path) -> None:
    with opened(cuda_streams, root) as subject:
        (lane,) = subject.place.cut([Lane("stream-0", 100, ("m0", "m1"))])
        seats = [subject.load(seed, lane) for seed in (0, 1)]
        subject.fault(seats[0])
        vars(subject.place)["_gpu"].dead = True
        fault = subject.run(seats[0], inputs())
        assert isinstance(fault, Fault)
        assert fault.is_own
        assert set(fault.lost) == set(seats)
        with pytest.raises(InfrastructureError, match="start the process again"):
            subject.place.reload(seats[1])


def test_what_waits_on_the_stream_of_what_hangs_is_lost_with_it(root: Path) -> None:
    with opened(cuda_streams, root) as subject:
        lanes = subject.place.cut([Lane("a", 100, ("m0", "m1", "m2")), Lane("b", 100, ("m3",))])
        seats = [subject.load(seed, lanes[0]) for seed in (0, 1, 2)] + [subject.load(3, lanes[1])]
        told: queue.SimpleQueue[Done | Fault] = queue.SimpleQueue()
        subject.hang(seats[0])
        for seat in seats[:2]:
            subject.place.start(seat, 0, inputs(), told.put)
        assert set(subject.place.evict(seats[0])) == set(seats[:2])
        early = subject.run(seats[1], inputs())  # as was decided before the eviction was known
        assert isinstance(early, Fault)
        assert early.lost == (seats[1],)
        assert not early.is_own
        for seat in seats[2:]:
            assert isinstance(subject.run(seat, inputs()), Done)
        subject.heal()
        for seat in seats[:2]:
            subject.place.reload(seat)
            assert isinstance(subject.run(seat, inputs()), Done)
        assert told.empty()


def test_a_part_of_a_gpu_is_a_green_context_and_its_seats_are_captured_there(root: Path) -> None:
    contexts, captured_on = FakeContexts(), []

    class Noting(FakeCudaModel):
        def staged(self, stream: Any, count: int = 1) -> tuple[FakeStaged, ...]:
            captured_on.append(stream)
            return super().staged(stream, count)

    script = Script()
    made = in_process(root, script)
    made.place = CudaStreamsPlace(
        FakeGpu(), lambda path: Noting(script.open_model(path)), lambda: contexts
    )
    with made.place:
        subject = made
        half, rest, whole = subject.place.cut(
            [Lane("half", 50, ("m0",)), Lane("rest", 40, ("m1",)), Lane("whole", 100, ("m2",))]
        )
        loaded = [
            subject.place.load(subject.member(seed), lane, cut=None).proof
            for seed, lane in enumerate((half, rest, whole))
        ]
        assert [(p.units, p.mechanism) for p in loaded] == [
            (66, "green context"),
            (52, "green context"),
            (132, "stream"),
        ]
        subject.place.reload(Seat("m1", "rest"))
    names = [contexts.of_stream[s].context if s else None for s in captured_on]
    assert names == ["half", "rest", None, "rest"]
    assert contexts.is_closed


def test_graphs_are_captured_where_nothing_is_launched_meanwhile(root: Path) -> None:
    contexts, made = FakeContexts(), []

    class Noting(FakeCudaModel):
        def staged(self, stream: Any, count: int = 1) -> tuple[FakeStaged, ...]:
            made.extend(found := super().staged(stream, count))
            return found

    script = Script()
    subject = in_process(root, script)
    subject.place = CudaStreamsPlace(
        FakeGpu(), lambda path: Noting(script.open_model(path)), lambda: contexts
    )
    with subject.place:
        (lane,) = subject.place.cut([Lane("half", 50, ("m0", "m1"))])
        seats = [subject.load(seed, lane) for seed in (0, 1)]
        subject.place.reload(seats[1])
        for seat in seats:
            assert isinstance(subject.run(seat, inputs()), Done)
    launched_on = set[Any]().union(*(each.launched_on for each in made))
    assert launched_on
    assert launched_on.isdisjoint(each.captured_on for each in made)


def test_a_part_of_less_than_the_sms_that_come_together_is_refused(root: Path) -> None:
    with pytest.raises(HostError, match=r"1% of 60 SMs for little is less than the 2 .* least 4%"):
        units_of([("little", 1)], sms=60, unit=2)


def test_shares_of_a_gpu_fit_when_they_are_at_most_the_whole() -> None:
    for pcts in ((50, 50), (40, 40, 20), (25,) * 4, (10,) * 10, (7,) * 14, (90, 10)):
        assert sum(units_of([("a", pct) for pct in pcts], sms=132, unit=2)) <= 66


def test_equal_shares_are_equal_sets_and_the_nearest_where_all_fit() -> None:
    for count, sets in ((8, 8), (4, 16), (3, 22), (2, 33)):
        equal = [("a", 100 // count)] * count
        assert units_of(equal, sms=132, unit=2) == (sets,) * count


def test_weights_of_a_member_are_planned_once_for_all_its_streams(root: Path) -> None:
    with opened(cuda_streams, root) as subject:
        once, twice = (subject.place.needed_bytes(subject.member(0), n) for n in (1, 2))
    weights = (artifact(root, 0) / "weights.bin").stat().st_size
    assert weights < once < twice < 2 * once - weights
