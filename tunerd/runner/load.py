"""What a runner repeats between two moments, beside which others measure, and how that went."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunerd.runner.arguments import timed_inputs
from tunerd.runner.profiles import LOAD
from tunerd.runner.sampling import Device
from tunerd.vocabulary import Build

_SPIN_SECS = 0.002  # before the start: a sleep may end this much too late


@dataclass(frozen=True)
class Load:
    """A whole model or one kernel, to be run again and again. Exactly one of the two is set."""

    artifact: str = ""  # path of a folder
    build: Build | None = None  # a kernel; several calls of it are one repeat

    def __post_init__(self) -> None:
        if bool(self.artifact) == (self.build is not None):
            raise ValueError("a load is either an artifact or a build")


@dataclass(frozen=True)
class Repeats:
    """Every repeat of a load: when it began and ended, in seconds of CLOCK_MONOTONIC.

    That clock is one for all processes of a machine, so that slices can be told when to begin, and
    their repeats can be laid side by side.
    """

    slice_id: str
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    calls: int = 1  # in a repeat

    def __post_init__(self) -> None:
        if len(self.starts) != len(self.ends):
            raise ValueError(f"{len(self.starts)} repeats began and {len(self.ends)} ended")

    @property
    def secs(self) -> tuple[float, ...]:
        """How long each call took, the mean of a repeat's calls."""
        pairs = zip(self.starts, self.ends, strict=True)
        return tuple((end - start) / self.calls for start, end in pairs)


# --- in the runner's process -------------------------------------------------------------------


@dataclass
class Repeated:
    """A load that has run; `repeat` runs it once and waits for its end."""

    repeat: Callable[[], object]
    calls: int  # of a repeat
    once_secs: float  # that a repeat took
    starts: array[float] = field(default_factory=lambda: array("d"))
    ends: array[float] = field(default_factory=lambda: array("d"))

    def run(self, start_at: float, stop_at: float, is_told_to_stop: Callable[[], bool]) -> None:
        """Repeat from `start_at` until `stop_at`, of time.monotonic(), noting every repeat.

        A repeat that is under way then is finished and counts.
        """
        self.starts, self.ends = array("d"), array("d")
        clock, repeat = time.monotonic, self.repeat
        while (left := start_at - clock()) > _SPIN_SECS:
            if is_told_to_stop():
                return
            time.sleep(min(left - _SPIN_SECS, 0.05))
        while clock() < start_at:
            pass
        begun = clock()
        while begun < stop_at and not is_told_to_stop():
            repeat()
            ended = clock()
            self.starts.append(begun)
            self.ends.append(ended)
            begun = clock()


def repeated_model(device: Device, model: Any) -> Repeated:
    """Make an inference of a loaded artifact the load: its inputs are on the device."""
    inputs = {name: device.tensor(array) for name, array in timed_inputs(model).items()}

    def repeat() -> float:
        secs: float = model.timed_calls(inputs, 1)
        return secs

    for _ in range(2):  # the second call replays what the first one captured
        repeat()
    return Repeated(repeat, 1, repeat())


def repeated_kernel(device: Device, build: Build, folder: Path) -> Repeated:
    """Make a burst of calls of a kernel the load."""
    path = folder / "kernel.so"
    path.write_bytes(build.library)
    timed = device.prepare(build, path, LOAD)
    return Repeated(timed.sample, timed.calls, timed.sample() * timed.calls)
