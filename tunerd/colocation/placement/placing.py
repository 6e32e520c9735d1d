"""Places jobs as they come, starts them, and tells the placer what becomes of them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from tunerd.colocation.placement.fleet import Fleet
from tunerd.colocation.placement.host import Ended
from tunerd.colocation.placement.job_file import JobEntry, JobFile, Work, work_of
from tunerd.colocation.placement.placer import Placer
from tunerd.colocation.placement.policies.base import Policy
from tunerd.colocation.placement.values import Device, Fail, Instruction, Job, Place, Reading
from tunerd.errors import InputError
from tunerd.system.jsonl import Journal

TRIES = "tries.jsonl"
LOOK_SECS = 0.2  # between looks at what has ended
READ_SECS = 5.0  # between looks at what jobs hold
_ANSWERS = (0, 1, 2)  # with which `tunerd tune` has an artifact
_KILLED = 137  # by the kernel, for want of memory; nobody here sends SIGKILL to a job that runs
_OUT_OF_MEMORY = re.compile(r"out.of.memory|OutOfMemory|MemoryError|bad_alloc", re.IGNORECASE)

What = Literal["ended", "out of memory", "failed"]


@dataclass(frozen=True)
class Try:
    """A job on a device, from its start to its end, in seconds since the placement began."""

    job: str
    device: str
    start: float
    end: float
    what: What
    status: int
    note: str  # of the policy
    words: tuple[str, ...]
    peak_bytes: int = 0  # the most that it was seen to hold of its device; 0: nobody could tell


@dataclass(frozen=True)
class Placed:
    """What came of the jobs. failed: why, by name. before: what an earlier placement had done."""

    tries: tuple[Try, ...]
    failed: Mapping[str, str]
    before: tuple[str, ...]


@dataclass(frozen=True)
class Foreseen:
    """What would happen if nothing came to its end.

    placed: each instruction with the second at which it is given. waiting: who is left.
    """

    devices: tuple[Device, ...]
    jobs: tuple[Job, ...]
    placed: tuple[tuple[float, Instruction], ...]
    waiting: tuple[str, ...]

    @property
    def is_fit(self) -> bool:
        """Whether every job gets a device, now or once others have ended."""
        return not any(isinstance(each, Fail) for _, each in self.placed)


def jobs_of(file: JobFile, fleet: Fleet, out: Path | None = None) -> dict[str, Job]:
    """Return the jobs of a file as the placer takes them; raises LoadError as artifacts do.

    out: of an earlier placement, whose tries say what was held; as the file's `measured` do.
    """
    devices = fleet.devices
    peaks: dict[Work, int] = {}
    for path in (*file.measured, *([out / TRIES] if out is not None else [])):
        for one in read_tries(path):
            if one.what == "ended":
                work = work_of(one.words)
                peaks[work] = max(peaks.get(work, 0), one.peak_bytes)
    units = max(one.device.units for one in devices.values())
    instances = [name for name, one in devices.items() if one.is_instance]
    return {entry.name: entry.job(units, instances, peaks) for entry in file.jobs}


def foresee(file: JobFile, fleet: Fleet, policy: Policy) -> Foreseen:
    """Place the jobs of a file and start none."""
    devices = _devices(fleet)
    placer = Placer(devices, policy, grace_secs=file.grace)
    jobs = jobs_of(file, fleet)
    found: list[tuple[float, Instruction]] = []
    coming = sorted(file.jobs, key=lambda entry: entry.after)
    now = 0.0
    while True:
        arrives_at = coming[0].after if coming else float("inf")
        now = min(arrives_at, placer.look_at)
        if now == float("inf"):
            break
        if now == arrives_at:
            given = placer.arrive(jobs[coming.pop(0).name], now)
        else:
            given = placer.tick(now)
        found += ((now, each) for each in given)
    waiting = tuple(job.name for job in placer.waiting)
    return Foreseen(devices, tuple(jobs.values()), tuple(found), waiting)


class Placing:
    """Runs once. Jobs that had ended in an earlier placement of the same folder are left out.

    Args:
        folder: in which commands run.
        out: gets TRIES and a folder for each job, with a log of each try.
    """

    def __init__(
        self,
        file: JobFile,
        fleet: Fleet,
        policy: Policy,
        *,
        folder: Path,
        out: Path,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._fleet, self._folder, self._out = fleet, folder, out
        self._say, self._clock, self._sleep = say, clock, sleep
        self._placer = Placer(_devices(fleet), policy, grace_secs=file.grace)
        self._entries = {entry.name: entry for entry in file.jobs}
        self._jobs = jobs_of(file, fleet, out)
        self._peaks: dict[str, int] = {}  # of jobs that run
        self._journal = Journal(out / TRIES)
        self._running: dict[str, Try] = {}
        self._tries: list[Try] = []
        self._failed: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        done = {(t.job, t.words) for t in read_tries(out / TRIES) if t.what == "ended"}
        self._before = tuple(n for n, e in self._entries.items() if (n, self._words(e)) in done)
        coming = (entry for entry in file.jobs if entry.name not in self._before)
        self._coming = sorted(coming, key=lambda entry: entry.after)[::-1]  # the next is the last
        self._seen: dict[str, Reading] = {}

    def run(self) -> Placed:
        """Return once every job has come to its end; raises what the fleet does."""
        began = self._clock()
        read_at = began + READ_SECS
        while self._coming or self._running or self._placer.waiting:
            now = self._clock() - began
            while self._coming and self._coming[-1].after <= now:
                entry = self._coming.pop()
                self._follow(self._placer.arrive(self._jobs[entry.name], now), now)
            for ended in self._fleet.ended():
                self._follow(self._end(ended, now), now)
            if began + now >= read_at:
                read_at = began + now + READ_SECS
                self._read()
                self._follow(self._placer.tick(now, self._seen), now)
            elif now >= self._placer.look_at:
                self._follow(self._placer.tick(now), now)
            self._say(self._state())
            self._sleep(LOOK_SECS)
        return Placed(tuple(self._tries), dict(self._failed), self._before)

    def _state(self) -> str:
        return (
            f"{len(self._running)} run, {len(self._placer.waiting)} wait, "
            f"{len(self._coming)} come later, {len(self._failed)} failed"
        )

    def _words(self, entry: JobEntry) -> tuple[str, ...]:
        return entry.words(self._out / "jobs" / entry.name)

    def _follow(self, instructions: Sequence[Instruction], now: float) -> None:
        for each in instructions:
            if isinstance(each, Fail):
                self._failed[each.job] = each.reason
                self._say(f"{each.job} failed: {each.reason}")
            else:
                self._start(each, now)

    def _start(self, place: Place, now: float) -> None:
        name = place.job
        words = self._words(self._entries[name])
        number = self._counts[name] = self._counts.get(name, 0) + 1
        log = self._out / "jobs" / name / f"try-{number}.log"
        self._say(f"{name} starts on {place.device}" + (f" ({place.note})" if place.note else ""))
        self._fleet.start(name, words, place.device, self._folder, log)
        self._running[name] = Try(name, place.device, now, now, "ended", 0, place.note, words)

    def _end(self, ended: Ended, now: float) -> Sequence[Instruction]:
        name, status = ended.job, ended.status
        entry = self._entries[name]
        is_well = status in _ANSWERS if entry.tune is not None else not status
        what: What = "ended" if is_well else "failed"
        if not is_well and (status == _KILLED or _OUT_OF_MEMORY.search(ended.tail)):
            what = "out of memory"
        peak_bytes = self._peaks.pop(name, 0)
        this = replace(
            self._running.pop(name), end=now, what=what, status=status, peak_bytes=peak_bytes
        )
        self._tries.append(this)
        self._journal.append(json.dumps(asdict(this)))
        held = self._seen.pop(name, None)
        if what == "out of memory":
            self._say(f"{name} ran out of memory on {this.device}")
            held_bytes = held.memory_bytes if held else 0
            return self._placer.out_of_memory(name, now, held_bytes=held_bytes)
        if what == "failed":
            last = next((x for x in reversed(ended.tail.splitlines()) if x.strip()), "no word")
            self._failed[name] = f"exit status {status}: {last.strip()}"
        self._say(f"{name} {what} on {this.device} after {now - this.start:.1f} s")
        return self._placer.ended(name, now)

    def _read(self) -> None:
        self._seen = {
            name: Reading(
                seen.memory_bytes or 0,
                self._jobs[name].units if seen.units is None else seen.units,
            )
            for name, seen in self._fleet.seen().items()
            if name in self._running
        }
        for name, reading in self._seen.items():
            self._peaks[name] = max(self._peaks.get(name, 0), reading.memory_bytes)


def _devices(fleet: Fleet) -> tuple[Device, ...]:
    return tuple(replace(one.device, name=name) for name, one in fleet.devices.items())


_TRY = TypeAdapter(Try)


def read_tries(path: Path) -> list[Try]:
    """Read what earlier placements did, none where there is none; InputError for what is none."""
    try:
        return [_TRY.validate_json(line) for line in Journal(path).read().splitlines()]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InputError(f"{path} holds a line that is none: {first['msg']}; remove it") from None
