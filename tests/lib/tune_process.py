"""`tunerd tune` as a process that can be killed, and what it leaves."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tunerd.errors import FolderError
from tunerd.records import Store
from tunerd.vocabulary import Measurement, Record

GONE_SECS = 60.0


@dataclass
class Run:
    """One run folder, and the command that works in it."""

    folder: Path
    model: Path
    options: tuple[str, ...]
    process: subprocess.Popen[str] | None = None
    started: list[psutil.Process] = field(default_factory=list)

    @property
    def command(self) -> list[str]:
        given = [str(self.model), "--cpu-pct", "50", "--out", str(self.folder), "--json"]
        return [sys.executable, "-m", "tunerd", "tune", *given, *self.options]

    def start(self) -> None:
        """Start the command at the head of a process group, as a shell does."""
        self.process = subprocess.Popen(
            self.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def end(self, within_secs: float = 300) -> tuple[int, str, str]:
        """Wait for the end of the command; TimeoutExpired where it comes too late."""
        assert self.process is not None
        out, err = self.process.communicate(timeout=within_secs)
        return self.process.returncode, out, err

    def kill(self) -> list[psutil.Process]:
        """SIGKILL the driver; return those of its processes that outlive it for long."""
        assert self.process is not None
        started = self.processes()
        self.process.kill()
        self.end()
        return still_there(started)

    def processes(self) -> list[psutil.Process]:
        assert self.process is not None
        return psutil.Process(self.process.pid).children(recursive=True)

    def actors(self, name: str) -> list[psutil.Process]:
        """Return the living processes of a Ray actor of this run."""
        found = []
        for process in self.processes():
            try:
                title = "".join(process.cmdline()[:1])  # empty for the moment in which Ray sets it
                if title.startswith(f"ray::{name}"):
                    found.append(process)
            except psutil.Error:  # it has just ended
                continue
        return found

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds; a run that ends before it fails the test."""
        assert self.process is not None
        while not condition():
            assert self.process.poll() is None, self.end()[2][-2000:]
            time.sleep(0.1)  # most conditions read the whole store, on a core that the run needs

    def records(self) -> list[Record]:
        """Return the search trials so far."""
        try:
            with Store.read(self.folder) as store:
                return [r for r in store.records() if not r.candidate.is_default]
        except FolderError:
            return []

    def measured(self) -> int:
        return sum(isinstance(r.result, Measurement) for r in self.records())

    def outcomes(self) -> int:
        with Store.read(self.folder) as store:
            return len(store.task_outcomes())


def still_there(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Wait for the end of processes; return those that live on."""
    deadline = time.monotonic() + GONE_SECS
    while (living := [p for p in processes if is_alive(p)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return living


def started_with(variable: str, value: str) -> list[psutil.Process]:
    """Return the living processes, but this one, with that in their environment.

    What a run has started is among them, also when it has lost its parent.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(variable) == value:
                found.append(process)
    return [p for p in found if p.pid != os.getpid() and is_alive(p)]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
