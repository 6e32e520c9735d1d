"""A member that a kill or a fault takes out while a load runs: for how long, and what others lost.

The plan's load says who is taken out: `kill` ends the processes of a member, `fault` sends it one
request whose inputs make its artifact fault. Where members share more than a machine, as clients of
an MPS daemon do, a fault takes others along: all are loaded again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from tunerd.colocation import artifacts
from tunerd.colocation.engine import Engine
from tunerd.colocation.load.generator import DONE, Observed, Sample
from tunerd.colocation.load.lost import lost_of
from tunerd.colocation.plan import Fault, Member, Plan
from tunerd.colocation.work import RefusedError
from tunerd.errors import InputError
from tunerd.stats.tail import samples_needed
from tunerd.system import npz
from tunerd.vocabulary import Arrays

Cause = Literal["killed", "faulted"]


class Moments(NamedTuple):
    """Of an outage, in seconds after the start of the load.

    at_secs: of the kill, or when the request that faults was sent.
    known_secs: from when on an answer to what is sent is one of a member that was loaded again, or
        that was not taken out: of the kill, or when the engine noticed the fault.
    """

    at_secs: float
    known_secs: float


@dataclass(frozen=True)
class Taken:
    """One outage of a member, in one round. Seconds.

    at_secs: after the start of the load, when the member was killed, or sent what faults.
    out_secs: from then on, until the member had answered a request that was sent since the engine
        knew of it; None where it has answered none.
    served_again_secs: the same of the last of all members.
    lost: requests that `lost_of` returns, of the other members; lost_own: of this one, without the
        request that faults.
    """

    at_secs: float
    out_secs: float | None
    served_again_secs: float | None
    lost: int
    lost_own: int


@dataclass(frozen=True)
class Stretch:
    """What a member got in one part of all rounds.

    secs: of the part, in all rounds.
    per_sec: answers that were given in it, per second; None where it has no seconds.
    p99_secs, longest_secs: latencies of the requests that were meant to come in it and were
        answered, whenever that was; None where they are too few.
    """

    secs: float
    per_sec: float | None
    p99_secs: float | None
    longest_secs: float | None


@dataclass(frozen=True)
class Neighbour:
    """What another member got before the outages, during them, and after all served again."""

    member: str
    before: Stretch
    during: Stretch
    after: Stretch


@dataclass(frozen=True)
class Outage:
    """A member that was taken out once in each round.

    rounds: those in which it was.
    missed: rounds in which it was not, because the request that was to fault was refused.
    neighbours: all other members, in the plan's order.
    """

    IN_JSON: ClassVar = ("lost", "lost_own")

    member: str
    cause: Cause
    rounds: tuple[Taken, ...]
    missed: int
    neighbours: tuple[Neighbour, ...]

    @property
    def lost(self) -> int:
        return sum(each.lost for each in self.rounds)

    @property
    def lost_own(self) -> int:
        return sum(each.lost_own for each in self.rounds)


def faulting_inputs(plan: Plan) -> Arrays | None:
    """Return the inputs that are to make a member fault, by name; None where none is to fault.

    Raises InputError for a file that cannot be read or does not fit the member's inputs, and
    LoadError where its artifact cannot be read.
    """
    if (fault := plan.load.fault) is None:
        return None
    (path,) = (m.artifact for m in plan.members if m.name == fault.member)
    specs = artifacts.inputs_of(path)
    try:
        given = npz.read_inputs(fault.inputs, [spec.name for spec in specs])
        return artifacts.checked_inputs(fault.member, specs, given)
    except InputError as error:
        raise InputError(f"load.fault: {error}") from None
    except (TypeError, ValueError) as error:
        raise InputError(f"load.fault: {fault.inputs} does not fit: {error}") from None


class Breaker:
    """Takes a member out in one round, as the load of an engine's plan says.

    during: what `run_load` is to call, and after how many seconds; None where nobody is to be out.

    Args:
        inputs: that `faulting_inputs` returns.
    """

    def __init__(self, engine: Engine, inputs: Arrays | None) -> None:
        self._engine, self._inputs = engine, inputs
        self._choice = engine.plan.load.outage
        self._known = 0  # faults before
        self._acted_at = 0.0
        self._answer: Future[Arrays] | None = None
        self.during: tuple[float, Callable[[], None]] | None = None
        if self._choice is not None:
            self.during = self._choice.after, self._act

    def moments(self, observed: Observed) -> Moments | None:
        """Return when the outage of a load that has ended began.

        Waits for the answer of the request that was to fault. Returns None where there was no
        outage: nobody was to be out, or that request was refused. Raises InputError where it was
        answered.
        """
        at = observed.called_at
        if at is None:
            return None
        if self._answer is None:
            return Moments(at, at)
        error = self._answer.exception()
        if isinstance(error, RefusedError):
            return None
        faults = self._engine.stats().faults[self._known :]
        if error is None or not faults:
            assert isinstance(self._choice, Fault)
            raise InputError(
                f"load.fault: {self._choice.member} answered {self._choice.inputs} without a "
                "fault; give inputs that make its artifact fault"
            )
        return Moments(at, at + max(0.0, faults[0].at - self._acted_at))

    def _act(self) -> None:
        assert self._choice is not None
        self._known = len(self._engine.stats().faults)
        self._acted_at = time.monotonic()
        if self._inputs is None:
            self._engine.kill(self._choice.member)
        else:
            self._answer = self._engine.submit(self._choice.member, self._inputs)


def outage_of(
    member: str,
    cause: Cause,
    rounds: Sequence[Observed],
    moments: Sequence[Moments | None],
    members: Sequence[Member],
) -> Outage:
    """Return what the outages of a member have cost, by all requests of the rounds.

    moments: of each round what `Breaker.moments` returned.
    """
    pairs = [(o, when) for o, when in zip(rounds, moments, strict=True) if when is not None]
    taken = [_taken(member, observed, when, members) for observed, when in pairs]
    hit = [observed for observed, _ in pairs]
    spans = [_spans(observed, each) for observed, each in zip(hit, taken, strict=True)]
    neighbours = [
        Neighbour(
            other.name,
            *(_stretch(other.name, hit, [part[nth] for part in spans]) for nth in range(3)),
        )
        for other in members
        if other.name != member
    ]
    return Outage(member, cause, tuple(taken), len(rounds) - len(hit), tuple(neighbours))


def _taken(member: str, observed: Observed, when: Moments, members: Sequence[Member]) -> Taken:
    lost = [sample.member for sample in lost_of(observed.samples, members)]
    firsts = {m.name: _first_answer(m.name, observed.samples, when) for m in members}
    known = [secs for secs in firsts.values() if secs is not None]
    return Taken(
        at_secs=when.at_secs,
        out_secs=firsts[member],
        served_again_secs=max(known) if len(known) == len(firsts) else None,
        lost=len(lost) - lost.count(member),
        lost_own=lost.count(member),
    )


def _first_answer(member: str, samples: Sequence[Sample], when: Moments) -> float | None:
    """Return after how long a member had answered something that was sent since all was known."""
    ends = [
        s.ended_at - when.at_secs
        for s in samples
        if s.member == member and s.end == DONE and s.sent_at >= when.known_secs
    ]
    return min(ends, default=None)


def _spans(observed: Observed, taken: Taken) -> tuple[tuple[float, float], ...]:
    """Return the window of a round in parts: before the outage, during it, after it."""
    first, last = observed.window
    secs = taken.served_again_secs
    begin = min(max(first, taken.at_secs), last)
    end = last if secs is None else min(max(begin, taken.at_secs + secs), last)
    return (first, begin), (begin, end), (end, last)


def _stretch(
    member: str, rounds: Sequence[Observed], spans: Sequence[tuple[float, float]]
) -> Stretch:
    secs = sum(end - begin for begin, end in spans)
    count, latencies = 0, list[float]()
    for observed, (begin, end) in zip(rounds, spans, strict=True):
        done = [s for s in observed.samples if s.member == member and s.end == DONE]
        count += sum(begin <= s.ended_at < end for s in done)
        latencies += [s.latency_secs for s in done if begin <= s.meant_at < end]
    is_told = len(latencies) >= samples_needed(99)
    return Stretch(
        secs=secs,
        per_sec=count / secs if secs else None,
        p99_secs=float(np.percentile(latencies, 99)) if is_told else None,
        longest_secs=max(latencies, default=None),
    )
