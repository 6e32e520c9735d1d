"""A run's folder: private to its user, and locked for the one tunerd that works in it.

settings.json      what the last session was asked for, for people; the store keeps every one
host.json          facts of the machine it ran on
store.sqlite       the trials
model/             the ONNX file of a model that a program gave to `tunerd.tune`
artifact/          the compiled model
report.html
logs/trial-N.log   what a failed trial said
logs/tunerd.jsonl  what was done, of the command line's runs
status.json        what the run told last, and how it ended
shares/            how the share was chosen, where that was left to tunerd
tunerd.lock        pid of the tunerd that works here
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from tunerd.errors import FolderError
from tunerd.records import RunFacts, Store
from tunerd.records.facts import refuse_other_run
from tunerd.records.paths import Paths
from tunerd.records.schema import STORE_NAME
from tunerd.system import files
from tunerd.system.files import write_whole
from tunerd.system.text import reason_of
from tunerd.vocabulary import Failure, Measurement


class RunFolder:
    """The folder of a run that this process works in. close() is idempotent."""

    def __init__(self, paths: Paths, store: Store, lock: int) -> None:
        self.paths = paths
        self.store = store
        self._lock: int | None = lock

    @classmethod
    def open(cls, root: Path, *, facts: RunFacts) -> Self:
        """Create a run folder, or go on in the one that is there.

        Raises FolderError where it cannot be written, holds something else or a run of another
        model, device or share, or is in use by another tunerd.
        """
        paths = Paths(root)
        _make_private(paths)
        lock = _take(paths.lock)
        try:
            store = Store.create_or_open(root, facts=facts)
            try:
                _write_facts(paths, facts)
            except BaseException:
                store.close()
                raise
        except OSError as error:
            _release(lock)
            raise _unwritable(root, error) from error
        except BaseException:
            _release(lock)
            raise
        return cls(paths, store, lock)

    def finish(self, results: Mapping[str, Measurement | Failure]) -> dict[str, int]:
        """Store how trials ended, by their candidates' ids, and return their numbers.

        The logs of those that failed come first: a trial that ended is not looked at again.
        """
        trial_ids = self.store.trial_ids(results)
        for candidate_id, result in results.items():
            if isinstance(result, Failure):
                self.write_log(trial_ids[candidate_id], result.message)
        self.store.finish_all(results)
        return trial_ids

    def write_log(self, trial_id: int, text: str) -> Path:
        """Keep what a failed trial said, and return where."""
        path = self.paths.log(trial_id)
        path.write_text(text, encoding="utf-8", errors="replace")
        return path

    def close(self) -> None:
        """Close the store, then let another tunerd in."""
        if self._lock is not None:
            self.store.close()
            _release(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def prepare(root: Path) -> None:
    """Make a run's folder, or see that one is there; FolderError where it holds something else."""
    _make_private(Paths(root))


def require_free(root: Path, facts: RunFacts) -> None:
    """Raise FolderError where a run of these facts may not begin or go on; changes nothing."""
    paths = Paths(root)
    try:
        _refuse_foreign(paths)
        has_run = paths.store.exists()
    except OSError as error:
        raise _unwritable(root, error) from error
    if has_run:
        with Store.read(root) as store:
            for _, found in store.sessions()[:1]:
                refuse_other_run(found, facts, root)


def _make_private(paths: Paths) -> None:
    root = paths.root
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_foreign(paths)
        root.chmod(0o700)
        paths.logs.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise _unwritable(root, error) from error


def _refuse_foreign(paths: Paths) -> None:
    if paths.store.exists():
        return
    known = {STORE_NAME + "-wal", STORE_NAME + "-shm", paths.lock.name}
    own = (paths.settings, paths.host, paths.logs, paths.shares, paths.model)
    known |= {p.name for p in own}
    foreign = sorted(names_in(paths.root) - known)
    if foreign:
        raise FolderError(
            f"{paths.root} holds '{foreign[0]}' and no run of tunerd; a run needs a folder that is "
            "new, empty or its own: choose another one with --out"
        )


def _write_facts(paths: Paths, facts: RunFacts) -> None:
    value = facts.to_json()
    host = value.pop("host")
    for path, content in ((paths.settings, value), (paths.host, host)):
        write_whole(path, json.dumps(content, indent=2) + "\n", sync=False)


def names_in(root: Path) -> set[str]:
    """Return what a folder holds, nothing where there is none; FolderError if it cannot be read."""
    try:
        return set(os.listdir(root))
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise _unwritable(root, error) from error


def _unwritable(root: Path, error: OSError) -> FolderError:
    if error.errno in files.ERRNOS:
        return files.disk_error(root, error)
    if isinstance(error, FileExistsError | NotADirectoryError):
        file = next((each for each in (root, *root.parents) if each.is_file()), root)
        return FolderError(f"{file} is a file, and no folder; choose a folder of yours with --out")
    return FolderError(
        f"the folder {root} cannot be written: {reason_of(error)}; choose a folder of yours "
        "with --out"
    )


# --- the lock ----------------------------------------------------------------------------------

_held: set[int] = set()


@contextmanager
def locked(root: Path, *, name: str = "tunerd.lock") -> Iterator[None]:
    """Make a folder private to its user and to this process; FolderError where that cannot be."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        root.chmod(0o700)
    except OSError as error:
        raise _unwritable(root, error) from error
    lock = _take(root / name)
    try:
        yield
    finally:
        _release(lock)


def _take(path: Path) -> int:
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise _unwritable(path.parent, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError:
        pid = os.pread(lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(lock)
        raise FolderError(
            f"{path.parent} is in use by the tunerd with pid {pid}; wait until it ends, or choose "
            "another folder with --out"
        ) from None
    except OSError as error:
        os.close(lock)
        raise _unwritable(path.parent, error) from error
    _held.add(lock)
    return lock


def _release(lock: int) -> None:
    _held.discard(lock)
    os.close(lock)


def _forget_in_child() -> None:
    # A forked child shares the lock, and would hold it after this process died.
    for lock in _held:
        with suppress(OSError):
            os.close(lock)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)
