"""The disk of a chaos run: the store and the files of its folder, where seeded faults strike."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tests.lib.chaos import AT_A_COMMIT, AT_A_FILE, AT_A_STATEMENT, AT_A_TRANSACTION, Chaos
from tunerd.records import Store, trials


def watch_store(chaos: Chaos, folder: Path) -> None:
    """Let faults strike at every transaction, statement and commit of the store."""
    original = Store._transaction

    def statement(*_: Any) -> None:
        if chaos.draw(AT_A_STATEMENT):
            chaos.kill("driver killed in a transaction")

    @contextlib.contextmanager
    def transaction(store: Store) -> Iterator[Any]:
        connection = store._connection
        if store._is_snapshot:
            with original(store) as reading:
                yield reading
            return
        if not sa.event.contains(connection, "before_cursor_execute", statement):
            sa.event.listen(connection, "before_cursor_execute", statement)
        fault = chaos.draw(AT_A_TRANSACTION)
        locks = lock(chaos, folder, fault) if "locked" in fault else contextlib.nullcontext()
        if fault == "store full":
            fill_up(chaos, store)
        then = chaos.draw(AT_A_COMMIT)
        before = _files(folder) if then == "torn write" else {}
        with locks, original(store) as opened:
            yield opened
        committed(chaos, folder, then, before)

    Store._transaction = transaction  # type: ignore[method-assign]


def committed(chaos: Chaos, folder: Path, fault: str, before: dict[str, bytes]) -> None:
    """Pass the moment after a commit, of which nobody knows yet."""
    if chaos.protected:
        chaos.protected = open_among(folder, chaos.protected)
    chaos.live_on()
    match "" if chaos.ends_anyway else fault:
        case "driver killed":
            chaos.kill("driver killed")
        case "torn write":
            after = _files(folder)
            old, new = before["store.sqlite-wal"], after["store.sqlite-wal"]
            if old == new or before["store.sqlite"] != after["store.sqlite"]:
                return  # nothing was written, or the log was moved into the store
            first = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b),
                         len(old))  # fmt: skip
            cut = chaos.random.randint(first, max(first, len(new) - 1))
            (folder / "store.sqlite-wal").write_bytes(new[:cut] + old[cut:])
            chaos.kill("torn write")


def open_among(folder: Path, candidate_ids: Iterable[str]) -> set[str]:
    """Return the candidates whose trials have not ended."""
    with contextlib.closing(
        sqlite3.connect(f"file:{folder}/store.sqlite?mode=ro", uri=True)
    ) as raw:
        rows = raw.execute("SELECT candidate_id FROM trials WHERE state IN ('proposed', 'running')")
        return set(candidate_ids) & {candidate_id for (candidate_id,) in rows}


def near_blame(folder: Path) -> set[str]:
    """Return the candidates that the next end of a session may make one that ends sessions."""
    path = folder / "store.sqlite"
    if not path.exists():
        return set()
    ends = Counter[str]()
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as raw:
        try:
            running = raw.execute("SELECT candidate_id FROM trials WHERE state = 'running'")
            of_one = [candidate_id for (candidate_id,) in running]
            ends.update(of_one if len(of_one) == 1 else ())
            ends.update(
                candidate_id
                for (candidate_id,) in raw.execute(
                    "SELECT candidate_id FROM setbacks JOIN trials USING (trial_id) "
                    "WHERE setbacks.message = ? AND state IN ('proposed', 'running')",
                    [trials._ENDED_BESIDE_NONE.message],
                )
            )
        except sqlite3.OperationalError:  # killed before the tables were made
            return set()
    return {candidate_id for candidate_id, n in ends.items() if n >= trials.MAX_SESSIONS - 1}


def _files(folder: Path) -> dict[str, bytes]:
    return {
        name: path.read_bytes() if (path := folder / name).exists() else b""
        for name in ("store.sqlite", "store.sqlite-wal")
    }


def fill_up(chaos: Chaos, store: Store) -> None:
    """Leave the store no page more than it has."""
    raw: sqlite3.Connection = store._connection.connection.driver_connection  # type: ignore[assignment]
    (pages,) = raw.execute("PRAGMA page_count").fetchone()
    raw.execute(f"PRAGMA max_page_count = {pages}")
    chaos.inject("store full", shows_as="database or disk is full", ends=True)


@contextlib.contextmanager
def lock(chaos: Chaos, folder: Path, fault: str) -> Iterator[None]:
    """Have another program lock the store, for good or for a moment."""
    other = sqlite3.connect(folder / "store.sqlite", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    try:
        if fault == "store locked":
            chaos.inject(fault, shows_as="database is locked", ends=True)
            yield
            return
        name = chaos.inject(fault)
        release = threading.Timer(0.005, other.rollback)
        release.start()
        yield
        release.join()
        chaos.see(name)
    finally:
        other.close()


def watch_files(chaos: Chaos, folder: Path) -> None:
    """Let the disk be full for files of the run folder."""

    def faulty(original: Any) -> Any:
        def write(path: Path, *arguments: Any, **named: Any) -> Any:
            for text in arguments:
                chaos.see(str(text))  # of a failed trial
            if folder in path.parents and (fault := chaos.draw(AT_A_FILE)):
                said = f"{path} cannot be written: No space left on device"
                # What others watch may be late: a run goes on without.
                chaos.inject(fault, shows_as=said, ends=not path.name.startswith("status.json"))
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return original(path, *arguments, **named)

        return write

    for method in ("write_text", "write_bytes", "touch"):
        setattr(Path, method, faulty(getattr(Path, method)))
