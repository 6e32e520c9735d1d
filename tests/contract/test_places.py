"""The contract of places, kept by every one of them."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lib.colocation_plans import CORES, cuda_artifact, inputs, plan_of
from tests.lib.place_subjects import (
    WAIT_SECS,
    Subject,
    cuda_streams,
    cuda_streams_in_parts,
    in_process,
    mps,
    mps_on_a_gpu,
    opened,
    processes,
    runners_of,
    same,
)
from tunerd.artifacts.loading import LoadError, load
from tunerd.colocation.engine import Engine
from tunerd.colocation.places.base import (
    Done,
    Fault,
    Loaded,
)
from tunerd.colocation.places.processes import RunnersPlace
from tunerd.colocation.plan import Member, Plan
from tunerd.colocation.work import Lane, RefusedError, Seat
from tunerd.errors import HostError, InfrastructureError
from tunerd.slices.mps.mps_slice import MpsSlice

ON_CORES = {"in-process": in_process, "processes": processes}
PLACES = ON_CORES | {
    "cuda-streams": cuda_streams,
    "cuda-streams-in-parts": cuda_streams_in_parts,
    "mps": mps,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("members")


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
    assert loaded.proof.which == str(CORES[-1])
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


def test_a_seat_that_faults_with_all_that_it_takes_serves_again(
    subject: Subject, lane: Lane
) -> None:
    seat = subject.load(0, lane)
    told: queue.SimpleQueue[Done | Fault] = queue.SimpleQueue()
    subject.fault(seat)
    for _ in range(subject.place.depth):
        subject.place.start(seat, 0, inputs(), told.put)
    fault = subject.next_of(told)
    assert isinstance(fault, Fault)
    for lost in fault.lost:
        subject.place.reload(lost)
    for nth in range(3):
        done = subject.run(seat, inputs(nth))
        assert isinstance(done, Done)
        assert same(done.outputs, subject.expected(0, inputs(nth)))


def test_what_hangs_keeps_another_seat_of_its_lane_waiting_until_it_is_evicted(
    subject: Subject, lane: Lane
) -> None:
    if subject.place.depth == 1:
        return  # nothing is started behind it
    hanging, other = (subject.load(seed, lane) for seed in (0, 1))
    told: queue.SimpleQueue[Done | Fault] = queue.SimpleQueue()
    subject.hang(hanging)
    subject.place.start(hanging, 0, inputs(), told.put)
    subject.place.start(other, 0, inputs(1), told.put)
    lost = subject.place.evict(hanging)
    subject.heal()
    if other not in lost:
        done = subject.next_of(told)
        assert isinstance(done, Done)
        assert same(done.outputs, subject.expected(1, inputs(1)))
    for seat in lost:
        subject.place.reload(seat)
    assert isinstance(subject.run(other, inputs()), Done)


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
    needed = subject.place.needed_bytes(subject.member(0), 1, cut=None)
    weights = subject.member(0).artifact / "weights.bin"
    assert weights.stat().st_size < needed < subject.place.capacity_bytes()


def test_seats_keep_the_thread_that_asks_on_its_cores(on_cores: Subject) -> None:
    (lane,) = on_cores.place.cut([Lane("whole", 100, ("m0",))])
    os.sched_setaffinity(0, CORES)
    on_cores.run(on_cores.load(0, lane), inputs())
    assert sorted(os.sched_getaffinity(0)) == CORES
