"""Events in, instructions out: who waits, who runs where, what memory is promised. No clock.

What holds under every policy:

- memory is promised once: what a job needs is free where it is placed, and a job that is seen to
  hold more than it needs has that promised instead;
- after each placement a device that is shared gets no further job for a window of grace: what has
  just been placed has not shown its memory and its load yet;
- jobs are looked at in the order of arrival. A later one may pass an earlier one that fits nowhere
  now, but only so often: then all wait for the earlier one, so that nobody waits for ever;
- a job that ran out of memory is tried again with half of the neighbours that it had, and with none
  in the end. Who ran out of memory alone goes to a larger device, and fails by name where none is.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tunerd.colocation.placement.policies.base import Policy
from tunerd.colocation.placement.values import (
    Device,
    Fail,
    Instruction,
    Job,
    Place,
    Reading,
    State,
    View,
)

GRACE_SECS = 60.0  # a tuning run or a training job has its memory within a minute
MOST_PASSED = 8  # how often a job that waits is passed by later ones


@dataclass
class _Entry:
    """A job from its arrival to its end.

    most_beside: how many neighbours it may have. beside: how many it had at most in this try.
    """

    number: int  # in the order of arrival
    job: Job
    most_beside: float = math.inf
    passed: int = 0
    beside: int = 0
    since: float = 0.0  # of this try
    seen: Reading | None = None

    @property
    def promised_bytes(self) -> int:
        return max(self.job.memory_bytes, self.seen.memory_bytes if self.seen else 0)


@dataclass
class _Holder:
    device: Device
    entries: list[_Entry] = field(default_factory=list)

    def grace_end(self, grace_secs: float) -> float:
        return max((entry.since + grace_secs for entry in self.entries), default=-math.inf)

    def state(self, grace_secs: float, now: float) -> State:
        return State(
            self.device,
            tuple(entry.job for entry in self.entries),
            sum(entry.promised_bytes for entry in self.entries),
            sum(
                entry.seen.units
                if entry.seen and now >= entry.since + grace_secs
                else entry.job.units
                for entry in self.entries
            ),
        )

    def admits(self, entry: _Entry) -> bool:
        """Whether it and those that are there may have so many neighbours."""
        return all(len(self.entries) <= each.most_beside for each in (entry, *self.entries))


class Placer:
    """Every method that returns instructions is told the moment, in seconds of any one clock.

    `look_at` is the moment to `tick` although nothing has happened, infinite where none is.
    """

    def __init__(
        self, devices: Sequence[Device], policy: Policy, *, grace_secs: float = GRACE_SECS
    ) -> None:
        """Raises ValueError where there is no device, or two have one name."""
        self._holders = {device.name: _Holder(device) for device in devices}
        if not devices or len(self._holders) < len(devices):
            raise ValueError("devices need names, each its own, and there must be one")
        self._policy = policy
        self._grace_secs = grace_secs
        self._waiting: list[_Entry] = []
        self._names: set[str] = set()
        self._last: str | None = None
        self._now = -math.inf

    @property
    def waiting(self) -> tuple[Job, ...]:
        """In the order of arrival."""
        return tuple(entry.job for entry in self._waiting)

    @property
    def look_at(self) -> float:
        ends = (holder.grace_end(self._grace_secs) for holder in self._holders.values())
        return min((end for end in ends if end > self._now and self._waiting), default=math.inf)

    def states(self, now: float) -> tuple[State, ...]:
        return tuple(holder.state(self._grace_secs, now) for holder in self._holders.values())

    def arrive(self, job: Job, now: float) -> tuple[Instruction, ...]:
        """Raises ValueError where a job of this name has come before."""
        if job.name in self._names:
            raise ValueError(f"a job of the name {job.name} has come before")
        entry = _Entry(len(self._names), job)
        self._names.add(job.name)
        largest = self._largest_for(job)
        if not largest:
            return (Fail(job.name, "there is no device that can run it"),)
        if job.memory_bytes > largest:
            return (Fail(job.name, f"it needs {job.memory_bytes:,} bytes of {largest:,}"),)
        self._wait(entry)
        return self._place(now)

    def ended(self, name: str, now: float) -> tuple[Instruction, ...]:
        """Raises ValueError where no such job runs."""
        self._take(name)
        return self._place(now)

    def out_of_memory(
        self, name: str, now: float, *, held_bytes: int = 0
    ) -> tuple[Instruction, ...]:
        """Say that a job ended so. Raises ValueError where no such job runs.

        held_bytes: what it held then and wanted more, 0 where nobody knows.
        """
        device, entry = self._take(name)
        needs = min(max(entry.promised_bytes, held_bytes), device.memory_bytes)
        if not entry.beside:
            needs = device.memory_bytes + 1
            if needs > self._largest_for(entry.job):
                reason = (
                    f"it ran out of memory alone on {device.name}, which has "
                    f"{device.memory_bytes:,} bytes; no device has more"
                )
                return (Fail(name, reason), *self._place(now))
        entry.most_beside = entry.beside // 2
        entry.job = replace(entry.job, memory_bytes=needs)
        self._wait(entry)
        return self._place(now)

    def tick(
        self, now: float, readings: Mapping[str, Reading] | None = None
    ) -> tuple[Instruction, ...]:
        """Look again, with what is seen of jobs by name, if it is; of others that is no news."""
        for holder in self._holders.values():
            for entry in holder.entries:
                entry.seen = (readings or {}).get(entry.job.name, entry.seen)
        return self._place(now)

    def _largest_for(self, job: Job) -> int:
        """Return the memory of the largest device that a job can run on, 0 where there is none."""
        devices = (holder.device for holder in self._holders.values())
        return max((d.memory_bytes for d in devices if d.name not in job.not_on), default=0)

    def _wait(self, entry: _Entry) -> None:
        entry.beside, entry.seen = 0, None
        insort(self._waiting, entry, key=lambda each: each.number)

    def _take(self, name: str) -> tuple[Device, _Entry]:
        for holder in self._holders.values():
            for entry in holder.entries:
                if entry.job.name == name:
                    holder.entries.remove(entry)
                    return holder.device, entry
        raise ValueError(f"no job of the name {name} runs")

    def _place(self, now: float) -> tuple[Instruction, ...]:
        self._now = now
        found = []
        while (place := self._next(now)) is not None:
            found.append(place)
        return tuple(found)

    def _next(self, now: float) -> Place | None:
        for nth, entry in enumerate(self._waiting):
            place = self._choose(entry, now)
            if place is not None:
                for earlier in self._waiting[:nth]:
                    earlier.passed += 1
                del self._waiting[nth]
                self._start(entry, place.device, now)
                return place
            if entry.passed >= MOST_PASSED:
                return None
        return None

    def _choose(self, entry: _Entry, now: float) -> Place | None:
        open_ones = [
            holder.state(self._grace_secs, now)
            for holder in self._holders.values()
            if holder.device.name not in entry.job.not_on
            and now >= holder.grace_end(self._grace_secs)
            and holder.admits(entry)
        ]
        states = [state for state in open_ones if state.free_bytes >= entry.job.memory_bytes]
        if not states:
            return None
        choice = self._policy.choose(entry.job, View(states, tuple(self._holders), self._last))
        return None if choice is None else Place(entry.job.name, choice.device, choice.note)

    def _start(self, entry: _Entry, name: str, now: float) -> None:
        holder = self._holders[name]
        entry.since = now
        holder.entries.append(entry)
        for each in holder.entries:
            each.beside = max(each.beside, len(holder.entries) - 1)
        self._last = name
