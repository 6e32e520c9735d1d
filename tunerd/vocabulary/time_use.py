"""What workers do with their time, and a session with its own."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Activity(StrEnum):
    """What a worker does with its time."""

    SEARCH = "search"
    BUILD = "build"
    MEASURE = "measure"
    WAIT = "wait"  # it has work to do and lacks something: a core, a build
    IDLE = "idle"


@dataclass(frozen=True)
class Span:
    """A stretch of one worker's time, as the driver saw it. Seconds since the epoch."""

    worker: str  # "tuner-0-0", or a slice's id
    activity: Activity
    start: float
    end: float
    role: str = ""  # "tuner" or "slice"
    session: int = 1  # of the run, from 1
    items: int = 0  # candidates proposed, built or measured
    task_id: str = ""  # of a search
    busy_secs: float | None = None  # in the worker; the rest is Ray's way there and back
    cpu_secs: float | None = None  # of the worker's process, all its threads


class Phase(StrEnum):
    """What a session does, one after the other."""

    START = "start-up"  # until the search begins; the tuners may still be importing
    SEARCH = "search"
    FINALS = "finalists"
    MODEL = "whole model"  # compile, verify and time it


@dataclass(frozen=True)
class PhaseTime:
    """How long a session's phase took. Seconds since the epoch."""

    phase: Phase
    start: float
    end: float
    session: int = 1
    # Of all processes, by core that the driver may use; empty where the kernel does not tell.
    core_busy_secs: tuple[tuple[int, float], ...] = ()
