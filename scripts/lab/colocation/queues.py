"""CUDA graphs that are queued on streams of this process: how many a second, and how long each."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tunerd.system.cuda_driver import NO_TIMES, checked

_WARM_ROUNDS = 3


@dataclass(frozen=True)
class Slot:
    """One model that can be queued. launch: queues it once on the stream, a handle of CUDA."""

    launch: Callable[[], None]
    stream: int
    inferences: int = 1  # that one launch makes: its batch


class Sampler:
    """Runs slots, all of them equally often. The device's context must be current."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._round_secs: dict[str, float] = {}  # of each label, by the sample before

    def saturated(self, label: str, slots: Sequence[Slot], secs: float) -> float:
        """Return inferences per second of a queue that never runs empty.

        As many rounds over all slots are queued as fill the time, by the sample before.
        """
        if label not in self._round_secs:
            self._run(slots, 1)  # warm
            self._round_secs[label] = self._run(slots, _WARM_ROUNDS) / _WARM_ROUNDS
        rounds = max(_WARM_ROUNDS, round(secs / self._round_secs[label]))
        took = self._run(slots, rounds)
        self._round_secs[label] = took / rounds
        return rounds * sum(slot.inferences for slot in slots) / took

    def closed(self, slots: Sequence[Slot], secs: float) -> tuple[float, list[int]]:
        """Return inferences per second, and microseconds of each, with one of each slot in flight.

        A slot is queued again when the one before has ended; one thread looks after all.
        """
        shared = {stream for stream, n in Counter(s.stream for s in slots).items() if n > 1}
        waits = [_Launch(self._driver, slot, slot.stream in shared) for slot in slots]
        latencies: list[int] = []
        since = time.perf_counter()
        for each in waits:
            each.launch()
        while (now := time.perf_counter()) - since < secs:
            for each in waits:
                if each.is_done():
                    latencies.append(round((time.perf_counter() - each.since) * 1e6))
                    each.launch()
        took = now - since
        self._wait(slots)
        for each in waits:
            each.close()
        return len(latencies) * slots[0].inferences / took, latencies

    def _run(self, slots: Sequence[Slot], rounds: int) -> float:
        since = time.perf_counter()
        for _ in range(rounds):
            for slot in slots:
                slot.launch()
        self._wait(slots)
        return time.perf_counter() - since

    def _wait(self, slots: Sequence[Slot]) -> None:
        for stream in {slot.stream for slot in slots}:
            checked(self._driver.cuStreamSynchronize(stream))


class _Launch:
    """One slot in flight: on a stream of its own the stream says when it ended, or an event."""

    def __init__(self, driver: Any, slot: Slot, is_shared: bool) -> None:
        self._driver, self._slot = driver, slot
        self._event = checked(driver.cuEventCreate(NO_TIMES)) if is_shared else None
        self._success = driver.CUresult.CUDA_SUCCESS
        self._not_ready = driver.CUresult.CUDA_ERROR_NOT_READY
        self.since = 0.0

    def launch(self) -> None:
        self.since = time.perf_counter()
        self._slot.launch()
        if self._event is not None:
            checked(self._driver.cuEventRecord(self._event, self._slot.stream))

    def is_done(self) -> bool:
        if self._event is None:
            (status,) = self._driver.cuStreamQuery(self._slot.stream)
        else:
            (status,) = self._driver.cuEventQuery(self._event)
        if status not in (self._success, self._not_ready):
            raise RuntimeError(f"CUDA: {status.name}")
        return bool(status == self._success)

    def close(self) -> None:
        if self._event is not None:
            checked(self._driver.cuEventDestroy(self._event))
