"""Send a load to an engine and note what came of each request.

Open loads (Poisson, bursts, traces) do not wait for answers, and a latency counts from the moment
at which the request was meant to come: what an overloaded engine or a late sender delays is not
left out (coordinated omission). A closed load sends when it has its answer, from all clients at one
moment, and so do members with clients of their own beside an open load. What came first and last
is cut off: the engine was filling or emptying then. Inputs lie where the device reads them, as a
server receives them there: who sends has nothing to copy.
"""

from __future__ import annotations

import functools
import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from tunerd.colocation.buffers import InputBuffers
from tunerd.colocation.engine import Engine
from tunerd.colocation.load.arrivals import Arrival, arrivals_of
from tunerd.colocation.places.completions import sleep_exactly
from tunerd.colocation.plan import LoadChoice, Member
from tunerd.colocation.work import MemberError, RefusedError
from tunerd.vocabulary import Arrays

TRIM = 0.1  # of the duration, at either end
_LEAD_SECS = 0.1  # before the first request, for every thread to be ready
_AWAKE_SECS = 2e-4  # a sleep may take so much longer
_LOOK_SECS = 1e-3  # whether the last answers are there

DONE, REFUSED, DROPPED, FAILED = "done", "refused", "dropped", "failed"


@dataclass(frozen=True)
class Sample:
    """One request. Moments are seconds after the start of the load."""

    member: str
    tenant: str
    meant_at: float
    sent_at: float
    ended_at: float
    end: str  # done, refused (at once), dropped (after it had waited), failed

    @property
    def latency_secs(self) -> float:
        return self.ended_at - self.meant_at


@dataclass(frozen=True)
class Observed:
    """All requests of a load, and the window of those that count, by when they were meant.

    called_at: when what was to be done during the load was done.
    """

    samples: tuple[Sample, ...]
    window: tuple[float, float]
    called_at: float | None = None

    @property
    def counted(self) -> list[Sample]:
        first, last = self.window
        return [s for s in self.samples if first <= s.meant_at < last]


class _Log:
    """Sends requests and notes what comes of them, from any thread."""

    def __init__(self, members: Sequence[Member], inputs: Mapping[str, InputBuffers]) -> None:
        # Tuples of plain values, of which the collector keeps none in mind.
        self._ends: list[tuple[str, str, float, float, float, str]] = []
        self._sent = itertools.count()
        self._slo_secs = {m.name: m.slo_ms / 1e3 if m.slo_ms else None for m in members}
        self._inputs = inputs
        self.start_at = time.monotonic() + _LEAD_SECS

    def send(
        self, engine: Engine, arrival: Arrival, then: Callable[[], None] = lambda: None
    ) -> None:
        sent_at = time.monotonic() - self.start_at
        member, tenant, at_secs = arrival.member, arrival.tenant, arrival.at_secs
        slo_secs = self._slo_secs[member]
        left_secs = None if slo_secs is None else slo_secs - (sent_at - at_secs)
        future = engine.submit(member, self._inputs[member], deadline_secs=left_secs, tenant=tenant)

        def ended(answered: Future[Arrays]) -> None:  # in the engine's thread: as little as can be
            ended_at = time.monotonic() - self.start_at
            self._ends.append((member, tenant, at_secs, sent_at, ended_at, _end_of(answered)))
            then()

        next(self._sent)
        future.add_done_callback(ended)

    def samples(self) -> tuple[Sample, ...]:
        """Wait for the answers of all that was sent, and return what came of each."""
        sent = next(self._sent)
        while len(self._ends) < sent:
            time.sleep(_LOOK_SECS)
        return tuple(Sample(*end) for end in self._ends)


def run_load(
    engine: Engine,
    load: LoadChoice,
    inputs: Mapping[str, Arrays],
    *,
    members: Sequence[Member] | None = None,
    on_start: Callable[[], None] = lambda: None,
    on_end: Callable[[], None] = lambda: None,
    during: tuple[float, Callable[[], None]] | None = None,
) -> Observed:
    """Send a load to an engine that has started, and wait for all answers.

    Args:
        inputs: of each member, by its name.
        members: who is sent something; all members of the engine's plan if not given.
        on_start, on_end: called where the window of what counts begins and ends.
        during: something else to call, so many seconds after the start.

    Raises InputError where the plan lacks what the load needs. Whatever is raised, an interruption
    too, ends the load: nothing more is sent, and clients wait for one more answer at most.
    """
    members = engine.plan.members if members is None else members
    trim_secs = TRIM * load.duration
    window = (trim_secs, load.duration - trim_secs)
    is_closed = load.kind == "closed"
    arrivals = [] if is_closed else arrivals_of(members, load)
    log = _Log(members, {m.name: _buffered(engine, m.name, inputs[m.name]) for m in members})
    calls = list(zip(window, (on_start, on_end), strict=True))
    called_at: list[float] = []
    if during is not None:
        after_secs, call = during

        def called() -> None:
            call()
            called_at.append(time.monotonic() - log.start_at)

        calls.append((after_secs, called))
    timers = [threading.Timer(_LEAD_SECS + at, call) for at, call in calls]
    clients = [
        (member.name, tenant)
        for member in members
        for tenant in member.tenants
        for _ in range(member.clients or (load.clients if is_closed else 0))
    ]
    ended = threading.Event()
    try:
        for timer in timers:
            timer.start()
        with ThreadPoolExecutor(1, thread_name_prefix="tunerd-clients") as executor:
            closed = executor.submit(_send_closed, engine, clients, load.duration, log, ended)
            closed.add_done_callback(lambda sent: ended.set() if sent.exception() else None)
            try:
                _send_open(engine, arrivals, log, ended)
                closed.result()
            finally:
                ended.set()
        samples = log.samples()
    except BaseException:
        for timer in timers:  # the process would wait for them
            timer.cancel()
        raise
    for timer in timers:
        timer.join()
    return Observed(samples, window, called_at[0] if called_at else None)


def _buffered(engine: Engine, member: str, inputs: Arrays) -> InputBuffers:
    buffers = engine.input_buffers(member)
    for name, buffer in buffers.items():
        buffer[...] = inputs[name]
    return buffers


def _send_open(
    engine: Engine, arrivals: Sequence[Arrival], log: _Log, ended: threading.Event
) -> None:
    sleep_exactly()
    for arrival in arrivals:
        _wait_until(log.start_at + arrival.at_secs)
        if ended.is_set():
            return
        log.send(engine, arrival)


def _send_closed(
    engine: Engine,
    clients: Sequence[tuple[str, str]],
    duration_secs: float,
    log: _Log,
    ended: threading.Event,
) -> None:
    """Send for all clients from one thread, until the load is over or was ended.

    Threads that wait for each other's turn in the interpreter would be what is measured.
    """
    sleep_exactly()
    free: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    for client in clients:
        free.put(client)
    _wait_until(log.start_at)
    left = len(clients)
    while left:
        client = free.get()
        if ended.is_set():
            return
        if (now := time.monotonic() - log.start_at) >= duration_secs:
            left -= 1
        else:
            log.send(engine, Arrival(now, *client), functools.partial(free.put, client))


def _wait_until(at: float) -> None:
    """Sleep, and let others have their turn without sleeping for the last of it."""
    while (wait_secs := at - time.monotonic()) > 0:
        time.sleep(max(0.0, wait_secs - _AWAKE_SECS))


def _end_of(answered: Future[Arrays]) -> str:
    error = answered.exception()
    if error is None:
        return DONE
    if isinstance(error, RefusedError):
        return DROPPED if error.was_admitted else REFUSED
    assert isinstance(error, MemberError)
    return FAILED
