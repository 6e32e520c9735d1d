"""What an MPS server writes about a fault: that there is one, and whose kernel caused it.

Every client of the GPU gets the same error, some of them before its cause does, so that who reports
a fault first need not have caused it. The server's log may name the client. Lines of driver 580,
without their times:

    Client {PID: 1059, Context: 1} encountered a fatal GPU error.
    Server is handling a fatal GPU error.
    Client {PID: 1059, Context ID: 1} on device 0 to be torn down
    Client {PID: 1116, Context ID: 1} on device 0 to be torn down

A trap leaves the first line out, and nobody is named: the order in which clients are torn down says
nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

LOG_NAME = "server.log"
EXTERNAL_LOG_FOLDER = Path("/var/log/nvidia-mps")  # the default of CUDA_MPS_LOG_DIRECTORY
_FAULT = re.compile(
    r"Client \{PID: (?P<pid>\d+)[^}]*\} "
    r"(?:(?P<cause>encountered a fatal GPU error)|on device \d+ to be torn down)"
)


@dataclass(frozen=True)
class ServerFault:
    """A fault as the log tells of it."""

    pid: int | None  # of the client that caused it; None where none is named, or several are
    lines: tuple[str, ...]


class ServerLog:
    """Follows the log of a daemon's servers. What stood there before is of no interest."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._from = 0  # bytes: what was written before belongs to faults that are over
        self.forget()

    def fault(self, ended: Set[int] = frozenset()) -> ServerFault | None:
        """Return what is written of faults since `forget`, or None.

        Faults of the pids in `ended` are over: a log that comes back tells of them again.
        """
        try:
            with self._path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._from:  # written anew
                    self._from = 0
                file.seek(self._from)
                written = file.read().decode(errors="replace")
        except OSError:  # no daemon has written yet, or it is not ours to read
            return None
        told = [line for line in _FAULT.finditer(written) if int(line["pid"]) not in ended]
        causes = {int(line["pid"]) for line in told if line["cause"]}
        pid = next(iter(causes)) if len(causes) == 1 else None
        return ServerFault(pid, tuple(line[0] for line in told)) if told else None

    @property
    def is_readable(self) -> bool:
        return os.access(self._path, os.R_OK)

    def forget(self) -> None:
        """Take what is written so far as told."""
        try:
            self._from = self._path.stat().st_size
        except OSError:
            self._from = 0


def external_log_folder() -> Path:
    """Return where a daemon that is not ours writes its logs."""
    return Path(os.environ.get("CUDA_MPS_LOG_DIRECTORY") or EXTERNAL_LOG_FOLDER)
