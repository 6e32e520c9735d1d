"""Send a load to an engine and note what came of each request.

Open loads (Poisson, bursts, traces) do not wait for answers, and a latency counts from the moment
at which the request was meant to come: what an overloaded engine or a late sender delays is not
left out (coordinated omission). A closed load sends when it has its answer, from all clients at one
moment, and so do members with clients of their own beside an open load. What came first and last
is cut off: the engine was filling or emptying then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from tunerd.colocation.engine import Engine
from tunerd.colocation.load.arrivals import Arrival, arrivals_of
from tunerd.colocation.plan import LoadChoice, Member
from tunerd.colocation.work import MemberError, RefusedError
from tunerd.vocabulary import Arrays

TRIM = 0.1  # of the duration, at either end
_LEAD_SECS = 0.1  # before the first request, for every thread to be ready

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
    """All requests of a load, and the window of those that count, by when they were meant."""

    samples: tuple[Sample, ...]
    window: tuple[float, float]

    @property
    def counted(self) -> list[Sample]:
        first, last = self.window
        return [s for s in self.samples if first <= s.meant_at < last]


class _Log:
    """Collects samples from many threads."""

    def __init__(self, members: Sequence[Member], inputs: Mapping[str, Arrays]) -> None:
        self.samples: list[Sample] = []
        self._sent = 0
        self._changed = threading.Condition()
        self._slo_secs = {m.name: m.slo_ms / 1e3 if m.slo_ms else None for m in members}
        self._inputs = inputs
        self.start_at = time.monotonic() + _LEAD_SECS

    def send(self, engine: Engine, arrival: Arrival) -> Future[Arrays]:
        sent_at = time.monotonic() - self.start_at
        slo_secs = self._slo_secs[arrival.member]
        left_secs = None if slo_secs is None else slo_secs - (sent_at - arrival.at_secs)
        with self._changed:
            self._sent += 1
        future = engine.submit(
            arrival.member,
            self._inputs[arrival.member],
            deadline_secs=left_secs,
            tenant=arrival.tenant,
        )

        def ended(answered: Future[Arrays]) -> None:
            ended_at = time.monotonic() - self.start_at
            end = _end_of(answered.exception())
            sample = Sample(arrival.member, arrival.tenant, arrival.at_secs, sent_at, ended_at, end)
            with self._changed:
                self.samples.append(sample)
                self._changed.notify_all()

        future.add_done_callback(ended)
        return future

    def wait(self) -> None:
        """Wait for the sample of each request that was sent: it comes after the answer."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.samples) == self._sent)


def run_load(
    engine: Engine,
    load: LoadChoice,
    inputs: Mapping[str, Arrays],
    *,
    members: Sequence[Member] | None = None,
    on_start: Callable[[], None] = lambda: None,
    on_end: Callable[[], None] = lambda: None,
) -> Observed:
    """Send a load to an engine that has started, and wait for all answers.

    Args:
        inputs: of each member, by its name.
        members: who is sent something; all members of the engine's plan if not given.
        on_start, on_end: called where the window of what counts begins and ends.

    Raises InputError where the plan lacks what the load needs.
    """
    members = engine.plan.members if members is None else members
    trim_secs = TRIM * load.duration
    window = (trim_secs, load.duration - trim_secs)
    is_closed = load.kind == "closed"
    arrivals = [] if is_closed else arrivals_of(members, load)
    log = _Log(members, inputs)
    timers = [
        threading.Timer(_LEAD_SECS + at, call)
        for at, call in zip(window, (on_start, on_end), strict=True)
    ]
    clients = [
        threading.Thread(
            target=_send_closed, args=(engine, member.name, tenant, load.duration, log), daemon=True
        )
        for member in members
        for tenant in member.tenants
        for _ in range(member.clients or (load.clients if is_closed else 0))
    ]
    for thread in (*timers, *clients):
        thread.start()
    _send_open(engine, arrivals, log)
    for client in clients:
        client.join()
    log.wait()
    for timer in timers:
        timer.join()
    return Observed(tuple(log.samples), window)


def _send_open(engine: Engine, arrivals: Sequence[Arrival], log: _Log) -> None:
    for arrival in arrivals:
        if (wait_secs := log.start_at + arrival.at_secs - time.monotonic()) > 0:
            time.sleep(wait_secs)
        log.send(engine, arrival)


def _send_closed(engine: Engine, member: str, tenant: str, duration_secs: float, log: _Log) -> None:
    time.sleep(max(0.0, log.start_at - time.monotonic()))
    while (now := time.monotonic() - log.start_at) < duration_secs:
        log.send(engine, Arrival(max(0.0, now), member, tenant)).exception()


def _end_of(error: BaseException | None) -> str:
    if error is None:
        return DONE
    if isinstance(error, RefusedError):
        return DROPPED if error.was_admitted else REFUSED
    assert isinstance(error, MemberError)
    return FAILED
