"""How a run is, from its folder alone: whether it lives, how far it is, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from tunerd.errors import FolderError
from tunerd.records import Store
from tunerd.records.paths import Paths, holder
from tunerd.records.tally import Tally, TaskTally
from tunerd.telemetry.progress import RATE_WINDOW_SECS, ProgressState, TaskProgress
from tunerd.telemetry.status_file import LastReport, Place, read_status

_MOMENT_SECS = 0.1


class Life(StrEnum):
    """Whether somebody works in a run folder."""

    STARTING = "starting"
    ALIVE = "alive"
    FINISHED = "finished"
    STOPPED = "stopped"  # on request
    FAILED = "failed"
    KILLED = "killed"  # its process is gone and said nothing of an end
    ELSEWHERE = "elsewhere"  # on another machine or in another container: it cannot be seen
    IDLE = "idle"  # nobody works here, and how it ended is not known: it was copied

    @property
    def may_change(self) -> bool:
        return self in (Life.STARTING, Life.ALIVE, Life.ELSEWHERE)


@dataclass(frozen=True)
class RunStatus:
    """A run at one moment, seconds since the epoch."""

    folder: Path
    at: float
    life: Life
    pid: int | None
    told: LastReport | None  # of the session that is the last one
    tally: Tally | None  # None while there is no store yet
    settings: Mapping[str, Any]  # of the last session
    outcome: Mapping[str, Any] | None  # as the store keeps it

    @property
    def elapsed_secs(self) -> float:
        """Of the last session, until now or to its end."""
        if self.told is not None:
            since = max(0.0, self.at - self.told.at) if self.life is Life.ALIVE else 0.0
            return self.told.elapsed_secs + since
        opened_at = self.tally.opened_at if self.tally else None
        return max(0.0, self.at - opened_at) if opened_at and self.life.may_change else 0.0

    @property
    def tasks(self) -> tuple[TaskTally, ...]:
        return self.tally.tasks if self.tally else ()

    @property
    def waiting(self) -> int:
        """The search trials that are proposed or running."""
        return sum(t.proposed + t.running for t in self.tasks)

    @property
    def trials_per_sec(self) -> float | None:
        """Of the last minute, or of this session's search where it is younger."""
        if self.tally is None or self.told is None or self.life is not Life.ALIVE:
            return None
        if not self.progress.is_searching or not self.tally.ended_lately:
            return None
        searched_secs = self.elapsed_secs - self.told.search_began_secs
        window_secs = min(RATE_WINDOW_SECS, searched_secs)
        return self.tally.ended_lately / window_secs if window_secs > 0 else None

    @property
    def progress(self) -> ProgressState:
        """What the run's own display shows, or would."""
        told, tally = self.told, self.tally
        lives = self.life in (Life.ALIVE, Life.ELSEWHERE)
        return ProgressState(
            elapsed_secs=self.elapsed_secs,
            budget_secs=self.settings.get("budget_secs"),
            trials_done=sum(t.measured + t.failed for t in self.tasks),
            trials_failed=sum(t.failed for t in self.tasks),
            trials_budget=self.settings.get("trials"),
            slices_busy=tally.slices_busy if tally and lives else 0,
            slices=told.slices if told and told.slices else tally.slices if tally else 0,
            tuners_busy=told.tuners_busy if told and lives else 0,
            tuners=told.tuners if told else 0,
            tasks=_progress_of(self.tasks),
            phase=told.phase if told and lives else str(self.life),
            message=told.message if told and lives else "",
            search_began_secs=told.search_began_secs if told else 0.0,
        )


def status_of(folder: Path, *, now: float | None = None) -> RunStatus:
    """Look at a run folder, also while it is being made; FolderError where it is none.

    Reads in one short transaction, and takes no lock: the run notices nothing.
    """
    now = time.time() if now is None else now
    paths = Paths(folder)
    _require_folder(paths)
    pid = holder(paths)
    told = read_status(paths)
    seen = _seen(paths, now, may_be_half_made=pid is not None and told is None)
    if seen is None:
        if pid is None and (pid := _just_taken(paths)) is None:
            raise FolderError(
                f"{folder} holds a run that was killed before it began; run its command again, or "
                "give another folder"
            )
        return RunStatus(folder, now, Life.STARTING, pid, None, None, {}, None)
    tally, settings, outcome = seen
    if told is not None and (told.pid != tally.pid or told.at < (tally.opened_at or 0.0)):
        told = None  # of the session before the last
    life = _life(pid, told, has_outcome=outcome is not None)
    return RunStatus(folder, now, life, pid, told, tally, settings, outcome)


def _seen(
    paths: Paths, now: float, *, may_be_half_made: bool
) -> tuple[Tally, Mapping[str, Any], Mapping[str, Any] | None] | None:
    """Return what the store holds; None where there is none, or no session in it."""
    if not paths.store.exists():
        return None
    try:
        with Store.read(paths.root) as store:
            tally, sessions = store.tally(since=now - RATE_WINDOW_SECS), store.sessions()
            return (tally, sessions[-1][1].settings, store.outcome()) if sessions else None
    except FolderError:  # for a moment it has no tables
        if may_be_half_made:
            return None
        raise


def _just_taken(paths: Paths) -> int | None:
    """Look again: who takes the lock writes its pid a moment later."""
    time.sleep(_MOMENT_SECS)
    return holder(paths)


def _life(pid: int | None, told: LastReport | None, *, has_outcome: bool) -> Life:
    if told is not None and told.end is not None:
        return Life(told.end.value) if pid in (None, told.pid) else Life.STARTING
    if pid is not None:
        return Life.STARTING if told is None else Life.ALIVE
    if told is not None:
        here = Place.here()
        is_here = (told.place.boot_id, told.place.pid_namespace) == (
            here.boot_id,
            here.pid_namespace,
        )
        # After a restart of the machine it is gone as well.
        rebooted = told.place.hostname == here.hostname and told.place.boot_id != here.boot_id
        return Life.KILLED if is_here or rebooted else Life.ELSEWHERE
    return Life.FINISHED if has_outcome else Life.IDLE


def _progress_of(tasks: tuple[TaskTally, ...]) -> tuple[TaskProgress, ...]:
    secs = [t.weight * (t.best_secs or 0.0) for t in tasks]
    total = sum(secs)
    return tuple(
        TaskProgress(
            name=t.name,
            weight=t.weight,
            default_secs=t.default_secs,
            best_secs=t.best_secs,
            trials=t.measured + t.failed,
            share=part / total if total else 0.0,
        )
        for t, part in zip(tasks, secs, strict=True)
    )


def _require_folder(paths: Paths) -> None:
    """Raise FolderError, saying what is there, where it is no run."""
    root = paths.root
    give = "give the folder that `tunerd tune` wrote with --out"
    try:
        if not root.exists():
            raise FolderError(f"there is no folder {root}; {give}")
        if not root.is_dir():
            what = "a packed run: unpack it with `tunerd records unpack`" * root.name.endswith(
                ".tar.gz"
            )
            raise FolderError(f"{root} is a file and no run folder; {what or give}")
        names = {p.name for p in root.iterdir()}
    except OSError as error:
        raise FolderError(f"{root} cannot be read: {error.strerror}; {give}") from error
    if names & {paths.store.name, paths.lock.name}:
        return
    if "manifest.json" in names:
        raise FolderError(
            f"{root} is an artifact, which a run left; give the run's folder, {root.parent} if it "
            "is still there"
        )
    runs = sorted(p.parent.name for p in root.glob(f"*/{paths.store.name}"))
    if runs:
        raise FolderError(f"{root} is a folder of runs; give one of them, such as {root / runs[0]}")
    found = f"holds {len(names)} other files" if names else "is empty"
    raise FolderError(f"{root} {found} and is no run; {give}")
