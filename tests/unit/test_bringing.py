"""Large inputs in parts, on a GPU that copies in the order of queueing, when a test says so."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tests.lib.queued_gpu import (
    BRING,
    LARGE,
    LARGE_PARTS,
    PART_BYTES,
    SMALL,
    World,
    given,
    world,
)
from tests.lib.waiting import until
from tunerd.artifacts import parts
from tunerd.artifacts.staging import PinnedArrays
from tunerd.colocation.places.base import Done, Fault
from tunerd.colocation.places.completions import Completions, Entry

__all__ = ["world"]

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


def test_copies_are_cut_into_parts_of_the_same_bytes(world: World) -> None:
    made = parts.Parts(world.gpu, world.gpu.short).of(
        [(100, 200, 3), (300, 400, 17), (500, 600, 2)]
    )
    assert [part.copies for part in made] == [
        [(100, 200, 3), (300, 400, 5)],
        [(305, 405, 8)],
        [(313, 413, 4), (500, 600, 2)],
    ]
    assert made[0].event == made[2].event != made[1].event
    assert [parts.go_in_parts(size) for size in (2 * PART_BYTES, 2 * PART_BYTES + 1)] == [
        False,
        True,
    ]


def test_two_parts_are_in_flight_and_the_graph_is_queued_with_the_last(world: World) -> None:
    seat, _ = world.seat("large", world.track(), LARGE)
    world.start("large", seat, LARGE, 3)
    for ended in range(LARGE_PARTS):
        left = LARGE_PARTS - ended
        assert len(world.gpu.copies) == min(left, 2)
        assert bool(world.gpu.launched) == (left <= 2)
        assert world.look() is not None
        assert len(world.gpu.copies) == min(left, 2)
        assert not world.told
        assert world.gpu.end_copy().stream == BRING
        assert world.look() is not None or left == 1
    world.finish()
    assert world.answers() == [("large", 6)]
    assert len(world.gpu.launched) == 1


def test_a_copy_of_another_lane_goes_before_the_rest_of_the_parts(world: World) -> None:
    large, _ = world.seat("large", world.track(), LARGE)
    small, _ = world.seat("small", world.track(), SMALL)
    world.start("large", large, LARGE, 3)
    world.start("small", small, SMALL, 4)
    streams = []
    while world.look() is not None:
        if world.gpu.copies:
            streams.append(world.gpu.end_copy().stream)
    assert streams == [BRING, BRING, 2, BRING, BRING, BRING]
    assert world.answers() == [("small", 8), ("large", 6)]


def test_launches_of_a_lane_stay_in_order_whoever_they_are_of(world: World) -> None:
    track = world.track()
    large, _ = world.seat("large", track, LARGE)
    small, _ = world.seat("small", track, SMALL)
    for number, (name, seat, floats) in enumerate(
        [("large", large, LARGE), ("small", small, SMALL), ("large", large, LARGE)], 1
    ):
        world.start(name, seat, floats, number)
    assert not world.gpu.launched
    assert {copy.stream for copy in world.gpu.copies} == {BRING}
    world.start("small", small, SMALL, 4)
    world.finish()
    assert world.answers() == [("large", 2), ("small", 4), ("large", 6), ("small", 8)]
    assert not track.waiting
    assert not track.under_way


def test_a_launch_is_brought_beside_the_one_that_runs(world: World) -> None:
    track = world.track()
    seat, _ = world.seat("large", track, LARGE)
    world.gpu.holds_graphs = True
    world.start("first", seat, LARGE, 1)
    world.start("second", seat, LARGE, 2)
    while world.gpu.copies:
        world.gpu.end_copy()
        world.look()
    assert len(world.gpu.launched) == 2
    world.gpu.holds_graphs = False
    world.gpu.go_on()
    world.finish()
    assert world.answers() == [("first", 2), ("second", 4)]


def test_inputs_in_no_pinned_memory_are_written_there_by_a_thread_while_others_go_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, usual, threads = threading.Event(), PinnedArrays.write, list[str]()

    def write(arrays: PinnedArrays, given: Any) -> None:
        if arrays["x"].size == LARGE:
            threads.append(threading.current_thread().name)
            may_write.wait()
        usual(arrays, given)

    track = world.track()
    large, _ = world.seat("large", track, LARGE)
    small, _ = world.seat("small", world.track(), SMALL)
    monkeypatch.setattr(PinnedArrays, "write", write)
    world.start("first", large, LARGE, 1)
    while not world.gpu.launched:
        world.gpu.end_copy()
        world.look()
    assert not threads
    # While the last parts of the one before are in flight.
    world.start_with("large", large, given(LARGE, 3))
    while world.gpu.copies:
        world.gpu.end_copy()
        world.look()
    until(lambda: bool(threads))
    world.start("small", small, SMALL, 4)
    world.finish_until("small")
    assert ("small", 8) in world.answers()
    assert not world.gpu.copies
    may_write.set()
    world.finish_until("large")
    assert world.answers()[-1] == ("large", 6)
    assert threading.current_thread().name not in threads


def test_small_inputs_are_queued_as_they_were(world: World) -> None:
    track = world.track()
    seat, model = world.seat("small", track, SMALL)
    world.seat("large", track, LARGE)
    lines = len(world.completions._lines)
    for value in (1, 2):
        world.start("small", seat, SMALL, value)
    each = [("record", 1), ("copy", 1), ("launch", 1), ("record", 1)]
    assert world.gpu.calls == each * 2
    assert len(world.completions._lines) == lines
    assert [made()._parts for made in model.made] == [None, None]
    world.finish()
    assert world.answers() == [("small", 2), ("small", 4)]


def test_the_time_of_a_launch_begins_when_it_has_its_lane(world: World) -> None:
    track = world.track()
    seat, _ = world.seat("large", track, LARGE)
    world.start("alone", seat, LARGE, 1)
    assert world.gpu.calls[:2] == [("record", track.stream), ("copy", BRING)]
    world.gpu.holds_graphs = True
    world.start("behind", seat, LARGE, 2)
    while world.gpu.copies:
        world.gpu.end_copy()
        world.look()
    world.gpu.holds_graphs = False
    world.gpu.go_on()
    world.finish()
    secs = [answer.secs for _, answer in world.told if isinstance(answer, Done)]
    assert secs[0] > secs[1] > 0  # the copies are in the first one alone
    begins = [call for call in world.gpu.calls if call in (("wait", 1), ("record", 1))]
    assert begins == [("record", 1), ("wait", 1), ("record", 1), ("wait", 1)] + [("record", 1)] * 2


def test_what_is_expected_of_a_launch_begins_when_it_is_queued(world: World) -> None:
    track = world.track()
    seat, _ = world.seat("large", track, LARGE)
    vars(seat)["_secs"] = 1000.0
    world.start("alone", seat, LARGE, 1)
    assert not track.line.entries
    while not track.line.entries:
        world.gpu.end_copy()
        world.look()
    (entry,) = track.line.entries
    assert 0 < entry.secs < 1000  # the copies have gone by
    vars(seat)["_secs"] = 1000.0
    world.start("behind", seat, LARGE, 1)
    while len(track.line.entries) < 2:
        world.gpu.end_copy()
        world.look()
    assert track.line.entries[1].secs == 1000


def test_where_the_driver_refuses_a_part_the_request_alone_is_told_once(world: World) -> None:
    track = world.track()
    seat, model = world.seat("large", track, LARGE)
    world.gpu.refused_copies = {world.gpu._copies_queued + 3}
    world.start("large", seat, LARGE, 1)
    world.start("next", seat, LARGE, 2)
    world.gpu.end_copy()
    world.look()
    ((name, fault),) = world.told
    assert (name, isinstance(fault, Fault)) == ("large", True)
    gc.collect()
    assert all(made() is not None for made in model.made)  # a part of it may still be written
    world.told.clear()
    world.finish()
    assert world.answers() == [("next", 4)]
    assert len(world.gpu.launched) == 1
    assert len(vars(seat)["_free"]) == 1


def test_what_a_part_has_met_is_told_once_and_no_graph_follows(world: World) -> None:
    track = world.track()
    seat, model = world.seat("large", track, LARGE)
    world.start("large", seat, LARGE, 1)
    world.gpu.bad_events = {int(event) for event in model.made[0]()._parts._events}
    world.gpu.end_copy()
    world.finish()
    ((_, fault),) = world.told
    assert isinstance(fault, Fault)
    assert "ILLEGAL_ADDRESS" in fault.reason
    assert not world.gpu.launched
    assert len(vars(seat)["_free"]) == 1


def test_a_launch_that_is_queued_tells_by_itself_what_its_parts_have_met(world: World) -> None:
    track = world.track()
    seat, model = world.seat("large", track, LARGE)
    world.start("large", seat, LARGE, 1)
    while not world.gpu.launched:
        world.gpu.end_copy()
        world.look()
    staged = model.made[0]()
    world.gpu.bad_events = {*map(int, staged._parts._events), staged._marked._last}
    world.finish()
    assert [type(answer) for _, answer in world.told] == [Fault]


@pytest.mark.parametrize("ended_parts", [0, 1, 2])
def test_nothing_follows_on_a_lane_that_was_left(world: World, ended_parts: int) -> None:
    track = world.track()
    large, model = world.seat("large", track, LARGE)
    small, _ = world.seat("small", track, SMALL)
    idle, _ = world.seat("idle", track, SMALL)
    world.start("large", large, LARGE, 1)
    world.start("small", small, SMALL, 2)
    for _ in range(ended_parts):
        world.gpu.end_copy()
        world.look()
    queued = list(world.gpu.calls)
    assert {*large.leave()} == {large, small}
    assert not idle.is_lost
    again = large.anew()
    del large, small
    gc.collect()
    assert model.made[0]() is not None  # what is in flight writes there
    assert world.look() is not None
    assert world.gpu.calls == queued
    world.finish()
    assert world.gpu.calls == queued
    assert not world.told
    gc.collect()
    assert model.made[0]() is None
    again.load()
    world.start("again", again, LARGE, 3)
    world.start("idle", idle, SMALL, 4)
    world.finish()
    assert world.answers() == [("again", 6), ("idle", 8)]


def test_who_closes_waits_for_what_is_brought(world: World) -> None:
    seat, _ = world.seat("large", world.track(), LARGE)
    assert world.look() is None
    world.start("large", seat, LARGE, 1)
    while not world.told:
        assert world.look() is not None or world.told
        if world.gpu.copies:
            world.gpu.end_copy()
    world.finish()
    assert world.look() is None


def test_lanes_that_bring_at_once_have_two_parts_in_flight_each(world: World) -> None:
    seats = [world.seat(name, world.track(), LARGE)[0] for name in "ab"]
    for value, seat in enumerate(seats, 1):
        world.start("ab"[value - 1], seat, LARGE, value)
    assert len(world.gpu.copies) == 4
    world.gpu.end_copy()
    world.look()
    assert len(world.gpu.copies) == 4
    world.finish()
    assert sorted(world.answers()) == [("a", 2), ("b", 4)]


def test_a_member_in_segments_has_its_inputs_brought_before_the_first(world: World) -> None:
    track = world.track()
    seat, _ = world.seat("large", track, LARGE, in_segments=True)
    small, _ = world.seat("small", track, SMALL, in_segments=True)
    for value in (1, 2):
        world.told.clear()
        world.start("large", seat, LARGE, value)
        world.start("small", small, SMALL, 5)
        assert not world.gpu.launched
        assert len(world.gpu.copies) == 2
        world.finish()
        assert sorted(world.answers()) == [("large", 2 * value), ("small", 10)]
        assert len(world.gpu.launched) == 4
        world.gpu.launched.clear()


def test_a_segment_that_follows_goes_behind_what_is_being_brought(world: World) -> None:
    track = world.track()
    large, _ = world.seat("large", track, LARGE)
    pieces, _ = world.seat("pieces", track, SMALL, in_segments=True)
    world.gpu.holds_graphs = True
    world.start("pieces", pieces, SMALL, 5)
    world.start("large", large, LARGE, 1)
    world.gpu.holds_graphs = False
    while len(world.gpu.copies) > 2:
        world.gpu.end_copy()
    world.gpu.end_copy()  # of the first segment, which ends
    world.look()
    assert len(world.gpu.launched) == 1
    assert len(track.waiting) == 2
    world.finish()
    assert world.answers() == [("large", 2), ("pieces", 10)]


def test_work_that_an_end_adds_to_a_line_that_was_looked_at_is_not_forgotten() -> None:
    completions = Completions()
    first, second = completions.line(), completions.line()
    done = SimpleNamespace(is_done=lambda: True)
    more = Entry(done, 0.0, lambda error: None)
    completions.add(second, Entry(done, 0.0, lambda error: completions.add(first, more)))
    assert completions.look() == 0.0
    assert completions.look() is None
