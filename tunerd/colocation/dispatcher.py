"""The one thread that decides, and the loader's beside it: events to the scheduler, and its
instructions to the place and to the callers' futures.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from tunerd.colocation.places.base import Done, Fault, Loaded, Place
from tunerd.colocation.scheduler import Scheduler
from tunerd.colocation.stats import Counters
from tunerd.colocation.work import (
    Complete,
    Evict,
    Fail,
    Instruction,
    MemberError,
    Pause,
    Refuse,
    RefusedError,
    Reload,
    Request,
    Seat,
    Start,
)
from tunerd.errors import TunerdError
from tunerd.vocabulary import Arrays

log = logging.getLogger(__name__)

_RELOADS = 3  # of a seat in a row, before it is given up
_TICK_SECS = 0.05  # how late an eviction may be noticed

Event = Callable[[Scheduler, float], Sequence[Instruction]]


@dataclass
class _Asked:
    """A request that has no answer yet."""

    request: Request
    inputs: Arrays
    future: Future[Arrays]
    outputs: Arrays | None = None
    is_cancelled: bool = False

    def is_wanted(self) -> bool:
        """Say whether the caller still waits; from then on it cannot cancel any more."""
        if not self.is_cancelled and not self.future.running():
            self.is_cancelled = not self.future.set_running_or_notify_cancel()
        return not self.is_cancelled


class Dispatcher:
    """Carries out what a scheduler says, from its own thread, until it is closed.

    Args:
        on_failure: called where the thread ends by an error, before the last answers are given.
    """

    def __init__(
        self, scheduler: Scheduler, place: Place, *, on_failure: Callable[[], None]
    ) -> None:
        self.counters = {name: Counters() for name in scheduler.members}
        self._scheduler, self._place, self._on_failure = scheduler, place, on_failure
        self._inbox: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._asked: dict[int, _Asked] = {}
        self._answered = threading.Condition()
        self._reloads: dict[Seat, int] = {}
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="tunerd-loader")
        self._thread = threading.Thread(target=self._work, name="tunerd-dispatcher", daemon=True)
        self._thread.start()

    def take(self, request: Request, inputs: Arrays, future: Future[Arrays]) -> None:
        """Take a request; requests are to be taken in the order of their numbers."""
        self._asked[request.request_id] = _Asked(request, inputs, future)
        self._inbox.put(lambda scheduler, at: scheduler.arrive(request, at))

    def wait(self, timeout_secs: float | None) -> bool:
        """Wait until everything that was taken has its answer; return whether it has."""
        with self._answered:
            return self._answered.wait_for(lambda: not self._asked, timeout_secs)

    def close(self) -> None:
        """End both threads, and refuse what has no answer."""
        self._inbox.put(None)
        self._thread.join()
        self._loader.shutdown(wait=True, cancel_futures=True)
        self._refuse_all("the engine was closed")

    # --- in the dispatcher's thread ------------------------------------------------------------

    def _work(self) -> None:
        try:
            while (event := self._next_event()) is not None:
                for instruction in event(self._scheduler, time.monotonic()):
                    self._carry_out(instruction)
        except Exception as error:  # a bug, as of a policy, must not leave callers waiting
            log.exception("the dispatcher has failed")
            self._on_failure()
            self._refuse_all(f"the engine failed: {error!r}")

    def _next_event(self) -> Event | None:
        due_at = self._scheduler.next_tick()
        timeout = None if math.isinf(due_at) else max(_TICK_SECS, due_at - time.monotonic())
        try:
            return self._inbox.get(timeout=timeout)
        except queue.Empty:
            return lambda scheduler, at: scheduler.tick(at)

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Start(request_id=request_id):
                self._start(instruction, self._asked[request_id])
            case Pause(seat=seat):
                self._place.pause(seat)
            case Complete(request_id=request_id):
                asked = self._asked[request_id]
                self._answer(asked, outputs=asked.outputs)
            case Refuse(request_id, reason, was_admitted):
                refused = RefusedError(reason, was_admitted=was_admitted)
                self._answer(self._asked[request_id], error=refused)
            case Fail(request_id=request_id, reason=reason):
                asked = self._asked[request_id]
                failed = MemberError(f"{asked.request.member} failed: {reason}")
                self._answer(asked, error=failed)
            case Evict(seat=seat, reason=reason):
                also = [lost for lost in self._place.evict(seat) if lost != seat]
                self._inbox.put(lambda s, at: s.lost(also, at, culprit=seat.member, reason=reason))
            case Reload(seat=seat):
                self._loader.submit(self._reload, seat)

    def _start(self, start: Start, asked: _Asked) -> None:
        seat, start_id = start.seat, start.start_id
        if not asked.is_wanted():
            self._inbox.put(lambda s, at: s.withdrawn(start_id, seat, at))
            return

        def told(answer: Done | Fault) -> None:
            if isinstance(answer, Done):
                self._inbox.put(lambda s, at: self._done(s, start, asked, answer, at))
            else:
                self._inbox.put(lambda s, at: self._faulted(s, start, answer, at))

        self._place.start(seat, start.segment, asked.inputs, told)

    def _done(
        self, scheduler: Scheduler, start: Start, asked: _Asked, done: Done, at: float
    ) -> Sequence[Instruction]:
        asked.outputs = done.outputs
        return scheduler.ended(start.start_id, start.seat, done.secs, at, segments=done.segments)

    def _faulted(
        self, scheduler: Scheduler, start: Start, fault: Fault, at: float
    ) -> Sequence[Instruction]:
        if all(running.start_id != start.start_id for running in scheduler.running):
            return ()  # evicted meanwhile
        culprit = start.seat.member if fault.is_own else ""
        return scheduler.lost(fault.lost, at, culprit=culprit, reason=fault.reason)

    def _not_reloaded(
        self, scheduler: Scheduler, seat: Seat, reason: str, at: float
    ) -> Sequence[Instruction]:
        self._reloads[seat] = tries = self._reloads.get(seat, 0) + 1
        log.warning("%s cannot be loaded into %s: %s", seat.member, seat.lane, reason)
        return (Reload(seat),) if tries < _RELOADS else scheduler.given_up(seat, reason, at)

    def _reloaded(
        self, scheduler: Scheduler, seat: Seat, loaded: Loaded, at: float
    ) -> Sequence[Instruction]:
        self._reloads.pop(seat, None)
        return scheduler.ready(seat, at, segments=len(loaded.segment_secs))

    def _refuse_all(self, reason: str) -> None:
        for asked in list(self._asked.values()):
            self._answer(asked, error=RefusedError(reason))

    def _answer(
        self, asked: _Asked, *, outputs: Arrays | None = None, error: Exception | None = None
    ) -> None:
        counters = self.counters[asked.request.member]
        is_wanted = asked.is_wanted()
        if not is_wanted:
            counters.cancelled += 1
        elif error is None:
            counters.ended(time.monotonic() - asked.request.arrived_at)
        else:
            counters.failed += isinstance(error, MemberError)
            counters.refused += isinstance(error, RefusedError)
        if is_wanted and error is None:
            asked.future.set_result(outputs or {})
        elif is_wanted:
            asked.future.set_exception(error)
        with self._answered:
            self._asked.pop(asked.request.request_id, None)
            self._answered.notify_all()

    # --- in the loader's thread ----------------------------------------------------------------

    def _reload(self, seat: Seat) -> None:
        try:
            loaded = self._place.reload(seat)
        except Exception as error:
            reason = str(error) if isinstance(error, TunerdError) else repr(error)
            self._inbox.put(lambda s, at: self._not_reloaded(s, seat, reason, at))
        else:
            self._inbox.put(lambda s, at: self._reloaded(s, seat, loaded, at))
