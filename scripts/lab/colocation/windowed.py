"""Slots of one process among several that run at the same time."""

from __future__ import annotations

import time
from typing import Any

from lab.colocation.figures import within
from lab.colocation.queues import Slot
from lab.colocation.workers import wait_until

_BURST_SECS = 0.01  # of one process's work between two waits, when its queue is not to run empty
_EDGE = 0.1  # of a sample at either end, when not all processes run


class Windowed:
    """A worker's body that samples from one moment on, by the middle of the time."""

    def __init__(self) -> None:
        self._slots: dict[str, Slot] = {}
        self._bursts: dict[str, int] = {}  # launches between two waits, by the sample before

    def sample(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return what it did in the middle of the time, when all processes ran."""
        label, secs, at = asked["label"], asked["secs"], asked["at"]
        slot, burst = self._slots[label], self._bursts.get(label, 1)
        is_closed = asked["mode"] == "closed"
        ends, latencies, done = [(0.0, 0)], [], 0
        wait_until(at)
        while ends[-1][0] < secs:
            count = 1 if is_closed else burst
            self._run(slot, count)
            done += count * slot.inferences
            ends.append((time.monotonic() - at, done))
            took = ends[-1][0] - ends[-2][0]
            latencies.append(round(took * 1e6))
            burst = max(1, min(2 * burst, round(count * _BURST_SECS / took)))
        if not is_closed:
            self._bursts[label] = burst
        per_sec = within(ends, _EDGE * secs, (1 - _EDGE) * secs)
        return {"per_sec": per_sec} | ({"latencies_us": latencies} if is_closed else {})

    def _run(self, slot: Slot, count: int) -> None:
        from cuda.bindings import driver

        from tunerd.system.cuda_driver import checked

        for _ in range(count):
            slot.launch()
        checked(driver.cuStreamSynchronize(slot.stream))
