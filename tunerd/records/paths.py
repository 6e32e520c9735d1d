"""Where things are in a run folder, and who works in it. `runs.folder` makes and locks one."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tunerd.records.schema import STORE_NAME


@dataclass(frozen=True)
class Paths:
    """Where things are in a run folder, whoever looks."""

    root: Path

    @property
    def settings(self) -> Path:
        return self.root / "settings.json"

    @property
    def host(self) -> Path:
        return self.root / "host.json"

    @property
    def store(self) -> Path:
        return self.root / STORE_NAME

    @property
    def model(self) -> Path:
        """Where a model is kept that a program gave, and no file."""
        return self.root / "model"

    @property
    def artifact(self) -> Path:
        return self.root / "artifact"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def status(self) -> Path:
        return self.root / "status.json"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def shares(self) -> Path:
        return self.root / "shares"

    @property
    def sizes(self) -> Path:
        """The runs of a model of several sizes, a folder for each."""
        return self.root / "sizes"

    @property
    def lock(self) -> Path:
        return self.root / "tunerd.lock"

    def log(self, trial_id: int) -> Path:
        return self.logs / f"trial-{trial_id}.log"


def holder(paths: Paths) -> int | None:
    """Return the pid of the tunerd that works in a folder, as seen from here; None where none does.

    Looks at who has the lock open. To try the lock itself would keep a tunerd out that starts.
    """
    try:
        lock = paths.lock.stat()
        pid = int(paths.lock.read_bytes()[:32])
        handles = list(Path(f"/proc/{pid}/fd").iterdir())
    except (OSError, ValueError):
        return None
    for handle in handles:
        with suppress(OSError):
            found = handle.stat()
            if (found.st_dev, found.st_ino) == (lock.st_dev, lock.st_ino):
                return pid
    return None
