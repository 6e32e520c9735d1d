"""`status.json` of a run folder: what a run that is alive tells others, and how it ended.

Trials are in the store. This holds what the store does not: the phase, who works, and the end.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from tunerd.errors import Interrupted, TunerdError
from tunerd.records import typed
from tunerd.records.paths import Paths
from tunerd.system import clock
from tunerd.system.files import write_whole
from tunerd.telemetry.progress import ProgressState

log = logging.getLogger(__name__)

EVERY_SECS = 1.0
MAX_BYTES = 1 << 20
_FORMAT = 1
_MAX_MESSAGE_CHARS = 500


class End(StrEnum):
    """How a session ended."""

    FINISHED = "finished"
    STOPPED = "stopped"  # on request; the same command goes on
    FAILED = "failed"


@dataclass(frozen=True)
class Place:
    """Where a process is: a pid means something in one namespace of one machine only."""

    hostname: str
    boot_id: str
    pid_namespace: str

    @classmethod
    def here(cls) -> Self:
        boot_id = pid_namespace = ""
        with suppress(OSError):
            boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            pid_namespace = os.readlink("/proc/self/ns/pid")
        return cls(socket.gethostname(), boot_id, pid_namespace)


@dataclass(frozen=True)
class LastReport:
    """What a session told last. Times are seconds since the epoch."""

    pid: int
    place: Place
    at: float
    elapsed_secs: float
    phase: str
    message: str
    slices: int
    slices_busy: int
    tuners: int
    tuners_busy: int
    search_began_secs: float = 0.0  # of `elapsed_secs`
    end: End | None = None
    end_message: str = ""


class StatusFile:
    """Writes what a session tells. A file that cannot be written ends no run."""

    def __init__(self, paths: Paths) -> None:
        self._path = paths.status
        self._place = Place.here()
        self._told: LastReport | None = None

    def tell(self, state: ProgressState) -> None:
        """Write a state: at once where a phase or a message is new, else once a second."""
        before, now = self._told, clock.now()
        told = LastReport(
            pid=os.getpid(),
            place=self._place,
            at=now,
            elapsed_secs=state.elapsed_secs,
            phase=state.phase,
            message=state.message[:_MAX_MESSAGE_CHARS],
            slices=state.slices,
            slices_busy=state.slices_busy,
            tuners=state.tuners,
            tuners_busy=state.tuners_busy,
            search_began_secs=state.search_began_secs,
        )
        is_news = before is None or (before.phase, before.message) != (told.phase, told.message)
        if before is None or is_news or now - before.at >= EVERY_SECS:
            self._write(told)

    def end(self, error: BaseException | None) -> None:
        """Write how the session ended."""
        if self._told is None:
            return
        how, message = End.FINISHED, ""
        if error is not None:
            stopped = isinstance(error, Interrupted | KeyboardInterrupt)
            how = End.STOPPED if stopped else End.FAILED
            is_bug = not isinstance(error, TunerdError | KeyboardInterrupt)
            message = f"{type(error).__name__}: {error}" if is_bug else str(error)
        idle = dataclasses.replace(self._told, slices_busy=0, tuners_busy=0)
        elapsed_secs = self._told.elapsed_secs + clock.now() - self._told.at
        self._write(
            dataclasses.replace(
                idle,
                at=clock.now(),
                elapsed_secs=elapsed_secs,
                end=how,
                end_message=message[:_MAX_MESSAGE_CHARS],
            )
        )

    def _write(self, told: LastReport) -> None:
        self._told = told
        text = json.dumps({"format": _FORMAT, **dataclasses.asdict(told)})
        try:
            write_whole(self._path, text, sync=False)
        except OSError as error:  # where a disk is full the store ends the run, and says so
            log.warning("%s cannot be written: %s", self._path, error.strerror)


def read_status(paths: Paths) -> LastReport | None:
    """Return what a run told last; None where it told nothing that this tunerd reads."""
    try:
        with paths.status.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        value = typed.from_json(dict[str, Any], content.decode())
        if len(content) > MAX_BYTES or value.pop("format", None) != _FORMAT:
            return None
        return typed.of_kind(LastReport, value)
    except (OSError, ValueError, TypeError, LookupError):
        return None
