"""Large outputs, on a GPU that copies in the order of queueing, when a test says so."""

from __future__ import annotations

import functools
import gc
import threading
from typing import Any

import pytest

from tests.lib.queued_gpu import LARGE, LARGE_PARTS, SMALL, World, world
from tests.lib.waiting import until
from tunerd.artifacts.outputs import Outputs
from tunerd.colocation.places.base import Done, Fault

__all__ = ["world"]

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


def run_graphs(world: World) -> None:
    """Let all that was started come to the end of its graphs, and have its outputs to fetch."""
    while world.gpu.copies:
        world.gpu.end_copy()
        world.look()
    world.look()


def test_two_parts_of_outputs_are_in_flight(world: World) -> None:
    seat, _ = world.seat("large", world.track(), LARGE)
    world.gpu.holds_fetches = True
    world.start("large", seat, LARGE, 3)
    run_graphs(world)
    for ended in range(LARGE_PARTS):
        assert len(world.gpu.fetches) == min(LARGE_PARTS - ended, 2)
        assert not world.told
        world.gpu.end_fetch()
        assert world.look() is not None or ended + 1 == LARGE_PARTS
    assert world.answers() == [("large", 6)]


def test_outputs_of_another_lane_go_before_the_rest_of_the_parts(world: World) -> None:
    large, _ = world.seat("large", world.track(), LARGE)
    other, _ = world.seat("other", world.track(), LARGE)
    world.gpu.holds_fetches = True
    world.start("large", large, LARGE, 3)
    run_graphs(world)
    world.start("other", other, LARGE, 4)
    run_graphs(world)
    streams = []
    while world.gpu.fetches:
        streams.append(world.gpu.end_fetch().stream)
        world.look()
    first, second = streams[0], streams[2]
    assert first != second
    assert streams[:6] == [first, first, second, second, first, first]
    assert world.answers() == [("large", 6), ("other", 8)]


def test_small_outputs_wait_for_the_parts_that_are_queued_alone(world: World) -> None:
    large, _ = world.seat("large", world.track(), LARGE)
    small, _ = world.seat("small", world.track(), SMALL)
    world.gpu.holds_fetches = True
    world.start("large", large, LARGE, 3)
    run_graphs(world)
    world.start("small", small, SMALL, 4)  # its graph ends with its copy
    run_graphs(world)
    assert world.answers() == [("small", 8)]
    world.finish()
    assert world.answers() == [("small", 8), ("large", 6)]


def test_launches_of_a_lane_are_told_in_order_each_with_its_outputs(world: World) -> None:
    track = world.track()
    large, _ = world.seat("large", track, LARGE)
    small, _ = world.seat("small", track, SMALL)
    world.gpu.holds_fetches = True
    for number in range(1, 7):
        (seat, floats) = (small, SMALL) if number % 3 == 0 else (large, LARGE)
        world.start(str(number), seat, floats, number)
        if number % 2 == 0:
            run_graphs(world)
            assert world.gpu.fetches
            world.finish()
    assert world.answers() == [(str(number), 2 * number) for number in range(1, 7)]
    assert not track.under_way


def test_a_graph_is_launched_while_outputs_are_fetched(world: World) -> None:
    seat, _ = world.seat("large", world.track(), LARGE)
    world.gpu.holds_fetches = True
    world.start("first", seat, LARGE, 1)
    run_graphs(world)
    world.start("second", seat, LARGE, 2)
    run_graphs(world)
    assert len(world.gpu.launched) == 2
    assert len(world.gpu.fetches) == 2  # of the first
    world.finish()
    assert world.answers() == [("first", 2), ("second", 4)]


def test_nobody_waits_for_the_copies_of_who_keeps_all_outputs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have them nevertheless, and as long as they like."""
    large, _ = world.seat("large", world.track(), LARGE)
    small, _ = world.seat("small", world.track(), SMALL)
    may_copy, usual = threading.Event(), Outputs._large_copies
    threads = set[str]()

    def copies(made: Outputs, count: int) -> Any:
        threads.add(threading.current_thread().name)
        may_copy.wait()
        return usual(made, count)

    monkeypatch.setattr(Outputs, "_large_copies", copies)

    def has_gone_on(value: int) -> bool:
        world.look()
        return bool(threads) or len(world.told) == value

    value = 0
    while not threads:  # world.told keeps all of them
        value += 1
        world.start("large", large, LARGE, value)
        run_graphs(world)
        until(functools.partial(has_gone_on, value))
    world.start("small", small, SMALL, 100)
    run_graphs(world)
    assert world.told[-1][0] == "small"
    assert threading.current_thread().name not in threads
    may_copy.set()
    until(lambda: world.look() is None)
    for more in (value + 1, value + 2):
        world.start("large", large, LARGE, more)
        run_graphs(world)
        until(lambda: world.look() is None)
    expected = {2 * number for number in range(1, value + 3)} | {200}
    assert {first for _, first in world.answers()} == expected


def test_where_the_driver_refuses_to_fetch_the_request_is_told_once(world: World) -> None:
    seat, _ = world.seat("large", world.track(), LARGE)
    world.gpu.refuses_fetches = True
    world.start("large", seat, LARGE, 1)
    run_graphs(world)
    world.gpu.refuses_fetches = False
    world.finish()
    ((name, fault),) = world.told
    assert (name, isinstance(fault, Fault)) == ("large", True)
    world.told.clear()
    world.start("next", seat, LARGE, 2)
    world.finish()
    assert world.answers() == [("next", 4)]


@pytest.mark.parametrize("ended_parts", [0, 1, LARGE_PARTS - 1])
def test_nothing_is_fetched_on_a_lane_that_was_left(world: World, ended_parts: int) -> None:
    large, model = world.seat("large", world.track(), LARGE)
    world.gpu.holds_fetches = True
    world.start("large", large, LARGE, 1)
    run_graphs(world)
    for _ in range(ended_parts):
        world.gpu.end_fetch()
        world.look()
    queued = list(world.gpu.calls)
    assert large.leave() == [large]
    again = large.anew()
    del large
    gc.collect()
    assert model.made[0]() is not None  # what is in flight writes its memory
    world.finish()
    assert world.gpu.calls == queued
    assert not world.told
    gc.collect()
    assert model.made[0]() is None
    again.load()
    world.start("again", again, LARGE, 3)
    world.finish()
    assert world.answers() == [("again", 6)]


def test_a_graph_that_ends_on_a_lane_that_was_left_has_nothing_fetched(world: World) -> None:
    large, _ = world.seat("large", world.track(), LARGE)
    world.gpu.holds_graphs = True
    world.start("large", large, LARGE, 1)
    run_graphs(world)
    large.leave()
    queued = list(world.gpu.calls)
    world.gpu.holds_graphs = False
    world.gpu.go_on()
    world.finish()
    assert world.gpu.calls == queued
    assert not world.told


def test_large_outputs_of_a_member_in_segments_are_fetched_after_the_last(world: World) -> None:
    seat, _ = world.seat("large", world.track(), LARGE, in_segments=True)
    world.gpu.holds_fetches = True
    places = set[int]()
    for value in (1, 2, 3):
        world.start("large", seat, LARGE, value)
        while len(world.gpu.launched) < 2 * value:
            assert not world.gpu.fetches
            if world.gpu.copies:
                world.gpu.end_copy()
            world.look()
        world.look()
        assert len(world.gpu.fetches) == 2
        world.finish()
        (_, done) = world.told[-1]
        assert isinstance(done, Done)
        assert done.outputs is not None
        places.add(done.outputs["y"].ctypes.data)
    assert world.answers() == [("large", 2), ("large", 4), ("large", 6)]
    assert len(places) == 3  # each is the caller's
