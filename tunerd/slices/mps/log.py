"""What an MPS server writes about a fault: that there is one.

Clients may learn of a fault seconds later than its server. Lines of driver 580, without their
times:

    Client {PID: 1059, Context: 1} encountered a fatal GPU error.
    Server is handling a fatal GPU error.
    Client {PID: 1059, Context ID: 1} on device 0 to be torn down
    Client {PID: 1116, Context ID: 1} on device 0 to be torn down

Whose kernel caused it stands nowhere. The first line names a client that met the error, which all
of them do: with three busy clients it was another than the cause (results, "Faults on an H200"). A
trap leaves that line out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Set
from pathlib import Path

LOG_NAME = "server.log"
EXTERNAL_LOG_FOLDER = Path("/var/log/nvidia-mps")  # the default of CUDA_MPS_LOG_DIRECTORY
_FAULT = re.compile(
    r"Client \{PID: (\d+)[^}]*\} "
    r"(?:encountered a fatal GPU error|on device \d+ to be torn down)"
)


class ServerLog:
    """Follows the log of a daemon's servers. What stood there before is of no interest."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._from = 0  # bytes: what was written before belongs to faults that are over
        self.forget()

    def fault(self, ended: Set[int] = frozenset()) -> tuple[str, ...]:
        """Return what is written of a fault since `forget`, line by line; none where there is none.

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
            return ()
        return tuple(line[0] for line in _FAULT.finditer(written) if int(line[1]) not in ended)

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
    return Path(os.environ.get("CUDA_MPS_LOG_DIRECTORY") or EXTERNAL_LOG_FOLDER).absolute()
