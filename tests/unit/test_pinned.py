"""Copies to a GPU through pinned memory, where the driver is a stand-in that works on the host."""

from __future__ import annotations

import ctypes
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.lib.fake_driver import OK, Answer, Driver
from tunerd.artifacts.pinned import PinnedCopies, pinned_copies

PART = 64


class Late(Driver):
    """Copies are made as late as a GPU may: when somebody waits for the stream, or for an event."""

    def __init__(self) -> None:
        super().__init__()
        self.queued: list[tuple[int, int, int]] = []
        self.marks: dict[int, int] = {}  # by event: how many copies are before it
        self.destroyed: list[object] = []
        self.fails_after = sys.maxsize
        self.has_memory = True

    def cuCtxGetCurrent(self) -> Answer:
        return OK, "primary"

    def cuStreamCreate(self, flags: int) -> Answer:
        assert flags == 1  # it waits for no default stream
        return OK, "own"

    def cuStreamDestroy(self, stream: str) -> Answer:
        self.destroyed.append(stream)
        return (OK,)

    def cuMemHostAlloc(self, size: int, flags: int) -> Answer:
        if not self.has_memory:
            return (SimpleNamespace(name="CUDA_ERROR_OUT_OF_MEMORY"), 0)
        return super().cuMemHostAlloc(size, flags)

    def cuMemcpyHtoDAsync(self, there: int, here: int, size: int, stream: Any) -> Answer:
        assert stream == "own"
        assert self.capture_mode == "relaxed"  # another thread may capture in the global mode
        if not self.fails_after:
            return (SimpleNamespace(name="CUDA_ERROR_ILLEGAL_ADDRESS"),)
        self.fails_after -= 1
        self.queued.append((there, here, size))
        return (OK,)

    def cuEventRecord(self, event: int, stream: Any) -> Answer:
        self.marks[event] = len(self.queued)
        return (OK,)

    def cuEventSynchronize(self, event: int) -> Answer:
        return self._made(self.marks[event])

    def cuStreamSynchronize(self, stream: Any) -> Answer:
        return self._made(len(self.queued))

    def _made(self, count: int) -> Answer:
        for there, here, size in self.queued[:count]:
            ctypes.memmove(there, here, size)
        del self.queued[:count]
        self.marks = {event: max(0, at - count) for event, at in self.marks.items()}
        return (OK,)


def some(size: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@pytest.mark.parametrize("size", [0, 1, PART, PART + 1, 5 * PART, 5 * PART - 1])
def test_all_bytes_are_there_when_a_copy_returns(size: int) -> None:
    driver = Late()
    copies, data, there = PinnedCopies(driver, PART), some(size), np.zeros(size + 8, np.uint8)
    copies.copy(there.ctypes.data, data)
    assert np.array_equal(there[:size], data)
    assert not there[size:].any()
    assert not driver.queued
    assert (driver.current, driver.capture_mode) == (["primary"], "global")


def test_copies_of_several_threads_take_turns() -> None:
    copies = PinnedCopies(Late(), PART)
    given = [some(7 * PART, seed) for seed in range(6)]
    there = [np.zeros(7 * PART, np.uint8) for _ in given]
    threads = [
        threading.Thread(target=copies.copy, args=(to.ctypes.data, data))
        for to, data in zip(there, given, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(*pair) for pair in zip(there, given, strict=True))


def test_an_error_is_said_and_the_next_copy_is_right() -> None:
    driver = Late()
    copies, data, there = PinnedCopies(driver, PART), some(4 * PART), np.zeros(4 * PART, np.uint8)
    driver.fails_after = 2
    with pytest.raises(RuntimeError, match="ILLEGAL_ADDRESS"):
        copies.copy(there.ctypes.data, data)
    assert (driver.current, driver.capture_mode) == (["primary"], "global")
    assert not driver.queued  # nothing is on its way any more
    driver.fails_after = sys.maxsize
    copies.copy(there.ctypes.data, data)
    assert np.array_equal(there, data)


def test_what_it_has_is_given_back() -> None:
    driver = Late()
    copies = PinnedCopies(driver, PART)
    del copies
    assert driver.destroyed == ["own"]
    assert len(driver.freed) == 4  # two buffers, two events


def test_without_pinned_memory_there_are_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Late()
    bindings = ModuleType("cuda.bindings")
    bindings.driver = driver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    assert isinstance(pinned_copies(), PinnedCopies)
    driver.has_memory = False
    assert pinned_copies() is None
    assert "CUDA_ERROR_OUT_OF_MEMORY" in caplog.text
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert pinned_copies() is None
