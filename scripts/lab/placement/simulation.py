"""Jobs on simulated devices under a placer: who ran where and when, and what that took.

The law of it, which no measurement stands behind but where one is named:

- *Speed.* Alone a job keeps a part of the units and a part of the bandwidth busy. Where jobs of a
  device want more than there is of either, all get the same part of what they want; and each loses
  `CONTENTION` times the bandwidth that its neighbours want, for caches and memory.
- *Memory.* A job holds `FIRST_PART` of its memory when it starts and all of it some time later.
  Who then finds no room is out of memory, and what it has done is lost.
- *Power.* A device takes `IDLE_WATTS`, `HELD_WATTS` more while it holds a job, and up to
  `BUSY_WATTS` more by the part of its units that works.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tunerd.colocation.placement.placer import Placer
from tunerd.colocation.placement.policies.base import Policy
from tunerd.colocation.placement.values import Device, Fail, Instruction, Job, Reading

CONTENTION = 0.12  # beside a stream through memory a model took 1.121 times as long (h200-bench)
FIRST_PART = 0.3
IDLE_WATTS, HELD_WATTS, BUSY_WATTS = 70.0, 50.0, 580.0  # together the 700 W of an H100
TICK_SECS = 30.0
_EVENTS = 1_000_000  # that no trace comes near


@dataclass(frozen=True)
class Truth:
    """A job as it is; `job` is what the placer is told of it.

    compute, bandwidth: the parts of a device that it keeps busy alone.
    """

    job: Job
    arrives: float
    work_secs: float  # alone on a device
    memory_bytes: int
    shows_secs: float  # until it holds all of that
    compute: float
    bandwidth: float


@dataclass
class Try:
    """A job on a device, from its start to its end."""

    truth: Truth
    device: Device
    start: float
    note: str
    left_secs: float
    has_shown: bool = False
    end: float = math.inf
    is_out_of_memory: bool = False

    @property
    def held_bytes(self) -> int:
        part = 1.0 if self.has_shown else FIRST_PART
        return int(self.truth.memory_bytes * part)

    @property
    def shows_at(self) -> float:
        return math.inf if self.has_shown else self.start + self.truth.shows_secs


@dataclass
class Outcome:
    """What came of a trace. busy_secs: of a whole device's units, over all devices."""

    trace: Sequence[Truth]
    devices: int
    tries: list[Try] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    joules: float = 0.0
    busy_secs: float = 0.0
    makespan_secs: float = 0.0

    @property
    def ended(self) -> list[Try]:
        return [each for each in self.tries if not each.is_out_of_memory]

    @property
    def waits(self) -> list[float]:
        """Seconds of each job from its arrival to the start of the try that ended."""
        return [each.start - each.truth.arrives for each in self.ended]

    @property
    def turnarounds(self) -> list[float]:
        """Seconds of each job from its arrival to its end."""
        return [each.end - each.truth.arrives for each in self.ended]

    @property
    def recovered(self) -> int:
        """Tries that ran out of memory, of jobs that ended later."""
        return sum(each.is_out_of_memory for each in self.tries if each.truth.job.name in self.done)

    @property
    def done(self) -> set[str]:
        return {each.truth.job.name for each in self.ended}

    @property
    def utilisation(self) -> float:
        return self.busy_secs / (self.devices * self.makespan_secs)


def slowdown(of: Truth, beside: Sequence[Truth]) -> float:
    """Return by how much a job is slower beside others on one device."""
    compute = of.compute + sum(each.compute for each in beside)
    bandwidth = of.bandwidth + sum(each.bandwidth for each in beside)
    contention = 1 + CONTENTION * sum(each.bandwidth for each in beside)
    return max(1.0, compute, bandwidth) * contention


class Simulation:
    """Runs once, when it is made; `outcome` is what came of it."""

    def __init__(self, trace: Sequence[Truth], devices: Sequence[Device], policy: Policy) -> None:
        self._placer = Placer(devices, policy)
        self._devices = {device.name: device for device in devices}
        self._coming = sorted(trace, key=lambda truth: truth.arrives, reverse=True)
        self._truths = {truth.job.name: truth for truth in trace}
        self._running: dict[str, list[Try]] = {device.name: [] for device in devices}
        self._now = 0.0
        self._next_tick = TICK_SECS
        self.outcome = Outcome(tuple(trace), len(devices))
        for _ in range(_EVENTS):
            if not (self._coming or self._placer.waiting or any(self._running.values())):
                break
            self._advance()
        else:
            raise RuntimeError(f"{policy.kind} does not come to an end")
        self.outcome.makespan_secs = self._now

    def _advance(self) -> None:
        """Go on to the next moment at which something happens, and let one thing happen."""
        tries = list(self._tries())
        ends = [(self._now + each.left_secs * pace, each) for each, pace in tries]
        end_at, ending = min(ends, key=lambda pair: pair[0], default=(math.inf, None))
        shows = min((each for each, _ in tries), key=lambda each: each.shows_at, default=None)
        shows_at = shows.shows_at if shows else math.inf
        arrives_at = self._coming[-1].arrives if self._coming else math.inf
        look_at = min(self._next_tick, self._placer.look_at)
        at = max(self._now, min(end_at, shows_at, arrives_at, look_at))
        self._spend(at)
        if ending and at >= end_at:
            self._end(ending)
            self._follow(self._placer.ended(ending.truth.job.name, at))
        elif shows and at >= shows_at:
            self._show(shows)
        elif at >= arrives_at:
            self._follow(self._placer.arrive(self._coming.pop().job, at))
        else:
            self._next_tick = at + TICK_SECS
            readings = {
                each.truth.job.name: Reading(
                    each.held_bytes, each.truth.compute / pace * each.device.units
                )
                for each, pace in self._tries()
            }
            self._follow(self._placer.tick(at, readings))

    def _tries(self) -> Iterator[tuple[Try, float]]:
        """Yield what runs, each with its slowdown."""
        for tries in self._running.values():
            for each in tries:
                beside = [other.truth for other in tries if other is not each]
                yield each, slowdown(each.truth, beside)

    def _spend(self, until: float) -> None:
        secs, self._now = until - self._now, until
        watts = 0.0
        for each, pace in self._tries():
            each.left_secs -= secs / pace
            busy = each.truth.compute / pace
            self.outcome.busy_secs += secs * busy
            watts += BUSY_WATTS * busy
        for tries in self._running.values():
            watts += IDLE_WATTS + (HELD_WATTS if tries else 0.0)
        self.outcome.joules += secs * watts

    def _show(self, grown: Try) -> None:
        grown.has_shown = True
        device = grown.device
        held = sum(each.held_bytes for each in self._running[device.name])
        if held > device.memory_bytes:
            grown.is_out_of_memory = True
            self._end(grown)
            room = device.memory_bytes - (held - grown.held_bytes)
            name = grown.truth.job.name
            self._follow(self._placer.out_of_memory(name, self._now, held_bytes=room))

    def _end(self, ended: Try) -> None:
        ended.end = self._now
        self._running[ended.device.name].remove(ended)

    def _follow(self, instructions: Sequence[Instruction]) -> None:
        for each in instructions:
            if isinstance(each, Fail):
                self.outcome.failed[each.job] = each.reason
                continue
            truth, device = self._truths[each.job], self._devices[each.device]
            started = Try(truth, device, self._now, each.note, truth.work_secs)
            self._running[device.name].append(started)
            self.outcome.tries.append(started)
