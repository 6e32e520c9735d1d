"""The thread that decides: events to the scheduler, and its instructions to the place, the loader
and the callers' futures.

Everything comes in batches. Arrivals and ends of segments are put into one inbox, which wakes the
thread only if it sleeps: where the place has a bell, by that, so that it hears connections, too.
At each turn the thread takes all that is there, the scheduler decides
once, what starts is started first, and only then are callers answered, those of one event loop
together. So the busier the engine is, the less a request costs, and the device does not wait for
callers. Where a policy refuses some of what comes, which takes it a while, what has ended is
decided about first, and some arrivals after that: the others have their turn when the thread has
looked at the device again.

To wake a thread takes longer than a decision. So where requests are rare and the dispatcher's
sleeps, who sends one decides about it, in their own thread, and it is told afterwards. Where they
are not, senders would wait for each other's launches, and the dispatcher for the interpreter: of
simulated graphs with a driver's calls an engine serves 8% fewer so (results/colocation).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from tunerd.colocation.inbox import Inbox
from tunerd.colocation.loader import Loader, Suspect
from tunerd.colocation.places.base import Done, Fault, Place
from tunerd.colocation.scheduler import Event, Scheduler
from tunerd.colocation.stats import Counters, Launches
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
    Reshared,
    Seat,
    Start,
    TryApart,
)
from tunerd.vocabulary import Arrays

log = logging.getLogger(__name__)

_TICK_SECS = 0.05  # how late an eviction may be noticed
_ARRIVALS = 16  # of a turn, where some may be refused
_COMPANY_SECS = 2e-4  # between two requests of which the second is not alone
_RARE_SECS = 4e-4  # between two requests, on average of late, where they are rare
_LONGEST_SECS, _PART = 10 * _RARE_SECS, 1 / 8  # that counts, and of the last one in the average

Answer = Arrays | Exception
AnyFuture = Future[Arrays] | asyncio.Future[Arrays]


@dataclass(eq=False, slots=True)
class _Asked:
    """A request that has no answer yet. loop: of its future, where that is asyncio's."""

    request: Request
    inputs: Arrays
    future: AnyFuture
    loop: asyncio.AbstractEventLoop | None
    outputs: Arrays | None = None
    is_wanted: bool | None = None  # None: nobody has asked yet

    def still_wanted(self) -> bool:
        """Say whether the caller still waits; a future of threads cannot be cancelled after."""
        if isinstance(self.future, asyncio.Future):
            return not self.future.cancelled()
        if self.is_wanted is None:
            self.is_wanted = self.future.set_running_or_notify_cancel()
        return self.is_wanted


class Dispatcher:
    """Carries out what a scheduler says, from its own thread, until it is closed.

    Args:
        on_failure: called where the thread ends by an error, before the last answers are given.
    """

    def __init__(
        self, scheduler: Scheduler, place: Place, *, on_failure: Callable[[], None]
    ) -> None:
        self._counters = {name: Counters() for name in scheduler.members}
        self._refused_at_once = dict.fromkeys(scheduler.members, 0)  # beside those that it counts
        self._counting = threading.Lock()  # held while that changes
        self.launches: dict[str, Launches] = {}  # of groups
        self._scheduler, self._place, self._on_failure = scheduler, place, on_failure
        self._inbox: Inbox[Event | Request | None] = Inbox(place.bell)
        self._arrived: deque[Request] = deque()  # of whom the scheduler has not heard
        self._next_id = 0  # of the next request that it is to hear of
        self._events: list[Event] = []  # of which it has not
        self._asked: dict[int, _Asked] = {}
        self._answered = threading.Condition()
        self._answers: list[tuple[_Asked, Answer]] = []  # of this turn
        self._reshares: list[Future[float]] = []  # of which the scheduler has heard
        self._unanswered: set[Future[float]] = set()  # all of them
        self._ticked_at = 0.0
        self._is_ending = False
        self._took_at = -math.inf  # the last request
        self._gap_secs = _LONGEST_SECS  # between requests, on average of late
        self._deciding = threading.Lock()  # held by who tells the scheduler or the place something
        self._loader = Loader(place, self._inbox.put)
        self._thread = threading.Thread(target=self._work, name="tunerd-dispatcher", daemon=True)
        self._thread.start()

    def take(self, request: Request, inputs: Arrays, future: AnyFuture) -> None:
        """Take a request; requests are to be taken one after the other, by their numbers.

        It is decided about here where requests are rare, none came shortly before, and the
        dispatcher's thread sleeps.
        """
        gap_secs = min(request.arrived_at - self._took_at, _LONGEST_SECS)
        self._took_at = request.arrived_at
        self._gap_secs += _PART * (gap_secs - self._gap_secs)
        is_alone = gap_secs >= _COMPANY_SECS and self._gap_secs >= _RARE_SECS
        loop = future.get_loop() if isinstance(future, asyncio.Future) else None
        self._asked[request.request_id] = _Asked(request, inputs, future, loop)
        if not (is_alone and self._inbox.is_awaited and self._is_decided(request)):
            self._inbox.put(request)

    def _is_decided(self, request: Request) -> bool:
        """Decide about a request, if nothing else is to be decided and nobody does so."""
        if not self._deciding.acquire(blocking=False):
            return False
        try:
            # It may have woken meanwhile, with what came before in its hands.
            inbox = self._inbox
            if not inbox.is_awaited or request.request_id != self._next_id or inbox.size():
                return False
            self._arrived.append(request)
            with self._place.borrowed():
                self._take_arrivals(time.monotonic())
        except Exception as error:  # a bug: the future says so
            self._fail(error)
        except BaseException as error:  # as of a signal's handler
            self._fail(error)
            raise
        finally:
            self._deciding.release()
        self._inbox.put(_nothing)  # to look at the device when that is due now
        return True

    def refuses(self, member: str, deadline_at: float, now: float, future: AnyFuture) -> bool:
        """Refuse what nobody needs to look at to know that it cannot be met; say whether it was."""
        if math.isinf(deadline_at):
            return False
        if not (reason := self._scheduler.hopeless(member, deadline_at, now)):
            return False
        with self._counting:
            self._refused_at_once[member] += 1
        _settle(future, RefusedError(reason))
        return True

    def counted(self, member: str) -> Counters:
        """Return what became of a member's requests so far."""
        counters = self._counters[member]
        return replace(counters, refused=counters.refused + self._refused_at_once[member])

    def reshare(self, layout: int) -> Future[float]:
        """Ask for another layout of lanes; the result is after how many seconds it was there."""
        future: Future[float] = Future()

        def event(scheduler: Scheduler, at: float) -> Sequence[Instruction]:
            self._reshares.append(future)
            return scheduler.reshare(layout, at)

        self._unanswered.add(future)
        self._inbox.put(event)
        return future

    def wait(self, timeout_secs: float | None) -> bool:
        """Wait until everything that was taken has its answer; return whether it has."""
        self.refuse_own_thread()
        with self._answered:
            return self._answered.wait_for(lambda: not self._asked, timeout_secs)

    def close(self) -> None:
        """End both threads, and refuse what has no answer."""
        self.refuse_own_thread()
        self._inbox.put(None)
        self._thread.join()
        self._place.end_apart()
        self._loader.close()
        self._refuse_all("the engine was closed")

    def refuse_own_thread(self) -> None:
        """Raise RuntimeError in a future's callback, where the engine would wait for itself."""
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "a future's callback cannot drain or close the engine, which waits for it; do that "
                "in another thread"
            )

    # --- in the dispatcher's thread ------------------------------------------------------------

    def _work(self) -> None:
        try:
            while not self._is_ending:
                secs = self._look()
                self._take_what_came(secs)
                with self._deciding:
                    now = time.monotonic()
                    events, self._events = self._events, []
                    if now >= self._ticked_at + _TICK_SECS:
                        self._ticked_at = now
                        events.append(Scheduler.tick)
                    takes_all = self._scheduler.takes_all
                    arrived = self._arrivals(len(self._arrived)) if takes_all else []
                    if events or arrived or now >= self._scheduler.look_at:
                        self._take_turn(events, now, arrived)
                    if self._arrived:
                        self._take_arrivals(now)
        except BaseException as error:  # a bug, as of a policy, must not leave callers waiting
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        log.error("the dispatcher has failed", exc_info=error)
        self._is_ending = True
        self._on_failure()
        self._refuse_all(f"the engine failed: {error!r}")

    def _take_turn(self, events: Sequence[Event], now: float, arrived: Sequence[Request]) -> None:
        for instruction in self._scheduler.turn(events, now, arrived):
            self._carry_out(instruction)
        self._answer()

    def _take_arrivals(self, now: float) -> None:
        self._take_turn((), now, self._arrivals(_ARRIVALS))

    def _arrivals(self, count: int) -> list[Request]:
        """Take so many of those who have arrived."""
        taken = [self._arrived.popleft() for _ in range(min(count, len(self._arrived)))]
        if taken:
            self._next_id = taken[-1].request_id + 1
        return taken

    def _look(self) -> float | None:
        """Look at the place: what it tells is in the inbox then. Return when to do so again."""
        with self._deciding:
            return self._place.poll()

    def _take_what_came(self, secs: float | None) -> None:
        """Take all that is in the inbox; wait for it so long at most where nothing is to be done.

        Events are in `_events` then, and requests in `_arrived`.
        """
        inbox = self._inbox
        if secs == 0.0 and not inbox.size():
            time.sleep(0)  # callers have the interpreter meanwhile
        if not inbox.size() and not self._arrived:
            for found in inbox.wait(self._limited(secs)):
                self._sort(found)
            if self._place.bell is not None:
                self._look()
        with contextlib.suppress(queue.Empty):
            while inbox.size():
                self._sort(inbox.take())

    def _sort(self, found: Event | Request | None) -> None:
        if isinstance(found, Request):
            self._arrived.append(found)
        elif found is None:
            self._is_ending = True
        elif found is not _nothing:
            self._events.append(found)

    def _limited(self, secs: float | None) -> float | None:
        """Return how long to wait at most, where the place wants to be asked after so long."""
        if secs is None and not math.isinf(due_at := self._scheduler.next_tick()):
            secs = max(_TICK_SECS, due_at - time.monotonic())
        if not math.isinf(look_at := self._scheduler.look_at):
            left_secs = max(0.0, look_at - time.monotonic())
            secs = left_secs if secs is None else min(secs, left_secs)
        return secs

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Start():
                self._start(instruction)
            case Complete(request_id=request_id):
                asked = self._asked[request_id]
                self._answers.append((asked, asked.outputs or {}))
            case Pause(seat=seat):
                self._place.pause(seat)
            case Refuse(request_id, reason, was_admitted):
                refused = RefusedError(reason, was_admitted=was_admitted)
                self._answers.append((self._asked[request_id], refused))
            case Fail(request_id=request_id, reason=reason):
                asked = self._asked[request_id]
                failed = MemberError(f"{asked.request.member} failed: {reason}")
                self._answers.append((asked, failed))
            case Reshared(secs=secs):
                asked_for, self._reshares = self._reshares, []
                for future in asked_for:
                    self._unanswered.discard(future)
                    future.set_result(secs)
            case Evict(seat=seat, reason=reason):
                also = [lost for lost in self._evicted(seat) if lost != seat]
                self._inbox.put(lambda s, at: s.lost(also, at, culprit=seat.member, reason=reason))
            case Reload(seat=seat):
                self._loader.reload(seat)
            case TryApart(suspects=suspects):
                self._try_apart(suspects)

    def _start(self, start: Start) -> None:
        seat, start_id = start.seat, start.start_id
        asked: list[_Asked] = []
        given_up: list[_Asked] = []
        for request_id in start.request_ids:
            each = self._asked[request_id]
            # What has begun goes on to its end: its seat waits for that.
            is_wanted = start.segment > 0 or each.still_wanted()
            (asked if is_wanted else given_up).append(each)
        if given_up:
            ids = [each.request.request_id for each in given_up]
            self._inbox.put(lambda s, at: s.withdrawn(start_id, seat, at, request_ids=ids))
        if not asked:
            return

        def told(answer: Done | Fault) -> None:
            if isinstance(answer, Done):
                self._inbox.put(lambda s, at: self._done(s, start, asked, answer, at))
            else:
                self._inbox.put(lambda s, at: self._faulted(s, start, answer, at))

        first = asked[0]
        try:
            if seat.member == first.request.member:
                self._place.start(seat, start.segment, first.inputs, told)
            else:
                requests = [(each.request.member, each.inputs) for each in asked]
                self._place.start_together(seat, requests, told)
        except Exception as error:  # of this seat: others serve on
            log.exception("%s cannot be started in %s", seat.member, seat.lane)
            told(Fault(f"{type(error).__name__}: {error}", (seat,)))

    def _try_apart(self, suspects: Sequence[tuple[int, Seat]]) -> None:
        tried: list[Suspect] = []
        given_up: list[int] = []
        for request_id, seat in suspects:
            asked = self._asked[request_id]
            if asked.still_wanted():
                take = functools.partial(setattr, asked, "outputs")
                tried.append(Suspect(request_id, seat, asked.inputs, take))
            else:
                given_up.append(request_id)
        if given_up:
            self._inbox.put(lambda s, at: [x for i in given_up for x in s.tried_apart(i, at)])
        self._loader.try_apart(tried)

    def _evicted(self, seat: Seat) -> Sequence[Seat]:
        try:
            return self._place.evict(seat)
        except Exception:  # what it holds is loaded again, or given up, by itself
            log.exception("%s cannot be evicted from %s", seat.member, seat.lane)
            return (seat,)

    def _done(
        self, scheduler: Scheduler, start: Start, asked: Sequence[_Asked], done: Done, at: float
    ) -> Sequence[Instruction]:
        for each, outputs in zip(asked, done.each or (done.outputs,), strict=True):
            each.outputs = outputs
        if done.each:
            self.launches.setdefault(start.seat.member, Launches()).add(len(asked))
        return scheduler.ended(start.start_id, start.seat, done.secs, at, segments=done.segments)

    def _faulted(
        self, scheduler: Scheduler, start: Start, fault: Fault, at: float
    ) -> Sequence[Instruction]:
        running = next((r for r in scheduler.running if r.start_id == start.start_id), None)
        if running is None:
            return ()  # evicted meanwhile
        culprit = running.culprit if fault.is_own else ""
        return scheduler.lost(fault.lost, at, culprit=culprit, reason=fault.reason)

    def _refuse_all(self, reason: str) -> None:
        while self._unanswered:
            self._unanswered.pop().set_exception(RefusedError(reason))
        self._answers += [(asked, RefusedError(reason)) for asked in [*self._asked.values()]]
        self._answer()

    def _answer(self) -> None:
        """Give the answers of this turn."""
        answers, self._answers = self._answers, []
        of_loops: dict[asyncio.AbstractEventLoop, list[tuple[AnyFuture, Answer]]] = {}
        now = time.monotonic()
        for asked, answer in answers:
            if self._asked.pop(asked.request.request_id, None) is None:
                continue  # it was refused with all others
            self._place.give_back(asked.request.member, asked.inputs)
            is_wanted = asked.still_wanted()
            self._counters[asked.request.member].add(
                answer if is_wanted else None, now - asked.request.arrived_at
            )
            if is_wanted and asked.loop is None:
                _settle(asked.future, answer)
            elif asked.loop is not None:
                of_loops.setdefault(asked.loop, []).append((asked.future, answer))
        for loop, settled in of_loops.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there
                loop.call_soon_threadsafe(_settle_each, settled)
        if answers and not self._asked:
            with self._answered:
                self._answered.notify_all()


def _nothing(_: Scheduler, __: float) -> Sequence[Instruction]:
    """Wakes the dispatcher."""
    return ()


def _settle(future: AnyFuture, answer: Answer) -> None:
    try:
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
    except BaseException:  # of a caller's callback, as SystemExit; it has its answer
        log.exception("a callback of a future has failed")


def _settle_each(answers: Sequence[tuple[AnyFuture, Answer]]) -> None:
    for future, answer in answers:
        if not future.done():  # it may have been cancelled meanwhile
            _settle(future, answer)
