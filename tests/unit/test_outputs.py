"""Outputs that callers have where a launch has left them."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from typing import Any

import numpy as np
import pytest

from tests.lib.fake_gpu import HostMemory
from tests.lib.waiting import until
from tunerd.artifacts import outputs
from tunerd.artifacts.outputs import Outputs
from tunerd.vocabulary import TensorSpec

SPECS = (TensorSpec("y", (2, 3), "float16"), TensorSpec("z", (2,), "int64"))


class Memory(HostMemory):
    """Notes what was freed, and in which context."""

    def __init__(self) -> None:
        super().__init__()
        self.contexts, self.freed_in = [1], list[int]()

    def cuCtxPushCurrent(self, context: int) -> tuple[Any]:
        self.contexts.append(context)
        return super().cuCtxPushCurrent(context)

    def cuCtxPopCurrent(self) -> tuple[Any, int]:
        self.contexts.pop()
        return super().cuCtxPopCurrent()

    def cuMemFreeHost(self, address: int) -> tuple[Any]:
        self.freed_in.append(self.contexts[-1])
        return super().cuMemFreeHost(address)


def left(made: Outputs, value: int) -> None:
    """Do what a launch does."""
    for (address, size), dtype in zip(made.places.values(), ("float16", "int64"), strict=True):
        filled = np.full(size // np.dtype(dtype).itemsize, value, dtype)
        ctypes.memmove(address, filled.ctypes.data, size)


def test_each_result_stays_where_it_was_left_until_nobody_has_it() -> None:
    made = Outputs(HostMemory(), SPECS, gives_away=True)
    seen = set()
    for value in range(3 * outputs._BLOCKS):
        place = made.places["y"]
        left(made, value)
        (result,) = made.read()
        assert made.places["y"] != place
        assert result["y"].ctypes.data == place[0]
        assert (result["y"] == value).all()
        assert result["z"].tolist() == [value, value]
        seen.add(place)
    assert len(seen) <= outputs._BLOCKS


def test_who_keeps_all_of_it_gets_copies_and_who_lets_go_none() -> None:
    made = Outputs(HostMemory(), SPECS, gives_away=True)
    kept = []
    for value in range(2 * outputs._BLOCKS):
        left(made, value)
        kept += made.read()
    assert [int(each["z"][0]) for each in kept] == list(range(2 * outputs._BLOCKS))
    place, first = made.places["y"], kept[0]["y"][1:]  # a view of it is enough
    del kept[0]
    left(made, 7)
    made.read()
    assert made.places["y"] == place
    assert (first == 0).all()
    del first
    made.read()
    assert made.places["y"] != place


def test_large_ones_that_nobody_gives_back_are_copied_by_a_thread_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual, threads = Outputs._large_copies, list[str]()

    def copies(made: Outputs, count: int) -> Any:
        threads.append(threading.current_thread().name)
        return usual(made, count)

    monkeypatch.setattr(Outputs, "_large_copies", copies)
    made = Outputs(HostMemory(), SPECS, gives_away=True)
    kept = []
    for value in range(2 * outputs._BLOCKS):
        left(made, value)
        until(made.is_ready, every=0)
        kept += made.read()
    assert len(threads) == outputs._BLOCKS + 1
    assert threading.current_thread().name not in threads
    assert [int(each["z"][0]) for each in kept] == list(range(2 * outputs._BLOCKS))
    small = Outputs(HostMemory(), SPECS)
    assert small.is_ready()  # which to copy takes no longer than to ask a thread


def test_copies_of_large_ones_are_the_callers_and_their_memory_is_used_again() -> None:
    made = Outputs(HostMemory(), SPECS, by_row=True, gives_away=True)
    blocks = [made.read(2) for _ in range(outputs._BLOCKS - 1)]
    left(made, 5)
    (one, two), places = made.read(2), {}
    for name, row in (("one", one), ("two", two)):
        places[name] = row["y"].ctypes.data
    left(made, 6)
    (other, _) = made.read(2)
    assert one["y"].tolist() == [5, 5, 5]
    assert (other["y"] == 6).all()
    del one, row  # its other row is held
    left(made, 7)
    (third, _) = made.read(2)
    assert two["y"].tolist() == [5, 5, 5]
    assert third["y"].ctypes.data not in places.values()
    del two
    left(made, 8)
    (fourth, _) = made.read(2)
    assert fourth["y"].ctypes.data == places["one"]
    assert (third["y"] == 7).all()
    assert len(blocks) == outputs._BLOCKS - 1


def test_of_very_large_ones_a_caller_may_keep_one_and_read_the_next_without_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outputs, "_BLOCKS_BYTES", 1)
    made = Outputs(HostMemory(), SPECS, gives_away=True)
    kept: deque[Any] = deque(maxlen=1)
    for value in range(8):
        place = made.places["y"]
        left(made, value)
        assert made.is_ready()
        kept += made.read()
        assert kept[-1]["y"].ctypes.data == place[0]


def test_each_row_is_a_result_of_its_own() -> None:
    made = Outputs(HostMemory(), SPECS, by_row=True, gives_away=True)
    left(made, 5)
    place = made.places["y"]
    one, two = made.read(2)
    assert one["y"].shape == (3,)
    assert one["z"].shape == ()
    one["y"][...] = 9
    assert two["y"].tolist() == [5, 5, 5]
    assert one["y"].nbytes == np.asarray(memoryview(one["y"].base)).nbytes  # nothing of another's
    del one
    for _ in range(outputs._BLOCKS):  # its other row is held
        assert made.places["y"] != place
        left(made, 6)
        made.read(1)
    assert two["y"].tolist() == [5, 5, 5]


def test_small_ones_are_copied_and_stay_in_one_place() -> None:
    made = Outputs(HostMemory(), SPECS)
    left(made, 5)
    place = made.places["y"]
    (result,) = made.read()
    assert made.places["y"] == place
    left(made, 6)
    assert (result["y"] == 5).all()


def test_what_does_not_fit_often_is_there_at_least_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "_BLOCKS_BYTES", 1)
    made = Outputs(HostMemory(), SPECS, gives_away=True)
    left(made, 5)
    assert (made.read()[0]["y"] == 5).all()


def test_memory_is_freed_in_its_context_when_the_last_array_is_gone() -> None:
    driver = Memory()
    made = Outputs(driver, SPECS, gives_away=True)
    driver.contexts = [0]  # that of who drops it
    left(made, 5)
    (result,) = made.read()
    del made
    assert not driver.freed_in
    assert (result["y"] == 5).all()
    del result
    assert driver.freed_in == [1]
