"""The thread of one seat: it does one thing after the other, pauses, and can be left behind."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from tunerd.artifacts.segments import Pauses
from tunerd.colocation.places.base import Done, Fault, Told
from tunerd.vocabulary import Arrays

_T = TypeVar("_T")


class Left(Exception):
    """Ends a run that nobody waits for any more, where it would pause."""


class SeatRun(Pauses):
    """One request in its seat: what runs it asks whether to pause, and waits here where it does."""

    def __init__(self, segments: int, told: Told) -> None:
        self.is_left = False
        self.is_wanted = False
        self._segments, self._told = segments, told
        self._first, self._since = 0, time.monotonic()
        self._resumed: queue.SimpleQueue[Told | None] = queue.SimpleQueue()

    def resume(self, told: Told) -> None:
        self.is_wanted = False
        self._resumed.put(told)

    def leave(self) -> None:
        self.is_left = self.is_wanted = True
        self._resumed.put(None)

    # --- in the seat's thread ------------------------------------------------------------------

    def wanted(self) -> bool:
        return self.is_wanted

    def pause(self, segment: int) -> None:
        if not self.is_left:
            self._told(Done(self._secs(), None, segment - self._first))
        told = self._resumed.get()
        if told is None:
            raise Left
        self._told, self._first, self._since = told, segment, time.monotonic()

    def end(self, outputs: Arrays | tuple[Arrays, ...]) -> None:
        segments = self._segments - self._first
        if isinstance(outputs, tuple):
            self.tell(Done(self._secs(), None, segments, outputs))
        else:
            self.tell(Done(self._secs(), outputs, segments))

    def tell(self, answer: Done | Fault) -> None:
        if not self.is_left:
            self._told(answer)

    def _secs(self) -> float:
        return time.monotonic() - self._since


class SeatThread:
    """Runs what it is given, in order, in a thread of its own.

    A thread cannot be ended from outside. One that is left behind tells nobody what it finds, and
    ends when what it does has come to a segment's end.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._run: SeatRun | None = None  # the last one that was started
        self._is_left = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def loaded(self, load: Callable[[], _T]) -> _T:
        """Call what the thread is for; where that fails, end the thread."""
        try:
            return self.call(load)
        except BaseException:
            self.leave()
            raise

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

    def start(
        self,
        segment: int,
        segments: int,
        model: Callable[[SeatRun], Arrays | tuple[Arrays, ...]],
        fault_of: Callable[[BaseException], Fault],
        told: Told,
    ) -> None:
        """Start a model there, or go on with it at a segment, and do not wait.

        What comes of it is told, unless the thread was left: a pause, the end, or a fault. A model
        of several requests returns a tuple.
        """
        if segment:
            assert self._run is not None
            self._run.resume(told)
            return
        self._run = run = SeatRun(segments, told)

        def job() -> None:
            try:
                outputs = model(run)
            except BaseException as error:  # else nobody would hear of it, and the thread would end
                if not run.is_left:
                    run.tell(fault_of(error))
            else:
                run.end(outputs)

        self._jobs.put(job)

    def pause(self) -> None:
        """Have what runs there pause after its segment."""
        if self._run is not None:
            self._run.is_wanted = True

    def leave(self) -> None:
        """Have it end after the segment that it runs now, without a word of that."""
        self._is_left = True
        if self._run is not None:
            self._run.leave()
        self._jobs.put(None)

    def close(self, timeout_secs: float) -> None:
        """Have it end, and wait for that so long."""
        self.leave()
        self._thread.join(timeout_secs)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None and not self._is_left:
            job()
