"""The thread of one seat: it does one thing after the other, and can be left behind."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from tunerd.colocation.places.base import Done, Fault, Told
from tunerd.vocabulary import Arrays

_T = TypeVar("_T")


class SeatThread:
    """Runs what it is given, in order, in a thread of its own.

    A thread cannot be ended from outside. One that is left behind tells nobody what it finds, and
    ends when what it does has ended.
    """

    def __init__(self, name: str) -> None:
        self.is_left = False
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], _T]) -> _T:
        """Run a function there and return what it returns, or raise what it raises."""
        future: Future[_T] = Future()

        def job() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._jobs.put(job)
        return future.result()

    def run(
        self, segment: Callable[[], Arrays], fault_of: Callable[[Exception], Fault], told: Told
    ) -> None:
        """Run a segment there, tell what came of it unless the thread was left, and do not wait."""

        def job() -> None:
            since = time.monotonic()
            answer: Done | Fault
            try:
                outputs = segment()
                answer = Done(time.monotonic() - since, outputs)
            except Exception as error:
                answer = fault_of(error)
            if not self.is_left:
                told(answer)

        self._jobs.put(job)

    def leave(self) -> None:
        """Have it end after what it does now, without a word of that."""
        self.is_left = True
        self._jobs.put(None)

    def close(self, timeout_secs: float) -> None:
        """Have it end, and wait for that so long."""
        self._jobs.put(None)
        self._thread.join(timeout_secs)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None and not self.is_left:
            job()
