"""The store of a run folder: one SQLite file, how it is opened, copied and checked."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DatabaseError

from tunerd.errors import FolderError
from tunerd.records import upgrades
from tunerd.records.problems import unusable
from tunerd.records.schema import METADATA, VERSION, found_version, missing_part, version

TVM_RECORDS = "database_tuning_record.json"  # of a database of TVM's

BUSY_TIMEOUT_SECS = 30.0
_RETRY_SECS = 0.02


def open_writer(path: Path) -> Connection:
    """Open the store for its one writer, creating the tables where it is new."""
    with _opening(path, "rwc") as connection, connection.begin():
        found = _version(connection, path, empty_is_fine=True)
        if found is None:
            METADATA.create_all(connection)
            connection.execute(version.insert(), {"version": VERSION})
        else:
            if found < VERSION:
                upgrades.upgrade(connection, found)
                connection.execute(version.update(), {"version": VERSION})
            _require_tables(connection, path)
    return connection


def open_reader(path: Path) -> Connection:
    """Open a snapshot of an existing store; raises FolderError where there is none.

    One of an older version stays as it is and is read as if it were of this one.
    """
    _require_file(path)
    with _opening(path, "ro") as connection:
        connection.begin()  # stays open: all reads of this connection see one moment
        found = _version(connection, path, empty_is_fine=False)
        if found is not None and found < VERSION:
            upgrades.show_as_current(connection, found)
        else:
            _require_tables(connection, path)
    return connection


@contextmanager
def _opening(path: Path, mode: str) -> Iterator[Connection]:
    """Yield a connection that stays open, unless the body raises."""
    connection = None
    try:
        connection = _engine(path, mode).connect()
        yield connection
    except BaseException as error:
        if connection is not None:
            connection.close()
        # SQLite's own messages hold names of the file, which need not be text.
        if isinstance(error, DatabaseError | sqlite3.Error | UnicodeDecodeError):
            raise unusable(path, error) from error
        raise


def _require_file(path: Path) -> None:
    try:
        is_file = path.is_file()
    except OSError as error:
        raise FolderError(
            f"{path} cannot be read: {error.strerror}; give the folder that `tunerd tune` wrote "
            "with --out"
        ) from error
    if not is_file:
        what = "not a run folder"
        if (path.parent / TVM_RECORDS).exists():
            # Its failed trials are times of 1e10 s, and it tells no share that they were taken at.
            what = "a database of TVM's, which tells no share, and no run folder"
        if runs := sorted(path.parent.glob(f"sizes/*/{path.name}")):
            raise FolderError(
                f"{path.parent} has a run for each of several sizes; give the folder of one: "
                f"{', '.join(str(run.parent) for run in runs)}"
            )
        lacks = f"has no {path.name}" if path.parent.is_dir() else "does not exist"
        raise FolderError(
            f"{path.parent} is {what}: it {lacks}; give the folder that `tunerd tune` wrote with "
            "--out"
        )


def _write_ahead(connection: sqlite3.Connection) -> str:
    """Ask for write-ahead logging and return the journal mode that is obtained.

    Where several open a new file at once SQLite refuses some, without the wait that all else has:
    one that holds a shared lock would wait for one that waits for it.
    """
    deadline = time.monotonic() + BUSY_TIMEOUT_SECS
    while True:
        try:
            (obtained,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_SECS)
        else:
            return str(obtained)


def _engine(path: Path, mode: str) -> Engine:
    engine = sa.create_engine(
        "sqlite://",
        creator=lambda: sqlite3.connect(
            _uri(path, mode),
            uri=True,
            timeout=BUSY_TIMEOUT_SECS,
            check_same_thread=False,
            isolation_level=None,  # the events below begin transactions, reads included
        ),
        poolclass=sa.NullPool,
    )

    @sa.event.listens_for(engine, "connect")
    def _set_up(connection: sqlite3.Connection, _record: object) -> None:
        connection.execute("PRAGMA foreign_keys = ON")
        # A store that came in a packed run is data: its schema may call no functions.
        connection.execute("PRAGMA trusted_schema = OFF")
        if mode == "ro":
            connection.execute("PRAGMA query_only = ON")
            return
        # In WAL mode readers never wait for the writer. With NORMAL a commit is in the kernel's
        # page cache when it returns: it survives `kill -9`, and the file stays consistent through
        # a power cut, which may cost the last trials (https://sqlite.org/pragma.html#pragma_synchronous).
        # FULL would wait for the disk at every trial to save those.
        obtained = _write_ahead(connection)
        if obtained != "wal":
            raise FolderError(
                f"{path.parent} is on a file system where SQLite offers '{obtained}' instead of "
                "write-ahead logging, so the store could not be read while a run is alive; put "
                "the run folder on a local disk"
            )
        connection.execute("PRAGMA synchronous = NORMAL")

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # IMMEDIATE takes the write lock at once: a second writer waits here for its turn instead
        # of failing in the middle.
        connection.exec_driver_sql("BEGIN" if mode == "ro" else "BEGIN IMMEDIATE")

    return engine


def _uri(path: Path, mode: str) -> str:
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    wal = path.with_name(path.name + "-wal")
    if mode == "ro" and not wal.exists() and not os.access(path.parent, os.W_OK):
        # A reader makes -shm beside the store, which it cannot here; and nobody writes it either.
        uri += "&immutable=1"
    return uri


def _version(connection: Connection, path: Path, *, empty_is_fine: bool) -> int | None:
    """Return the store's version, None where it is new; FolderError where it is none of ours."""
    names = sa.inspect(connection).get_table_names()
    if version.name not in names:
        if empty_is_fine and not names:
            return None
        raise FolderError(
            f"{path} is no store of tunerd: it has no table {version.name}; choose another folder"
        )
    made = "SELECT type, name FROM sqlite_master WHERE type IN ('view', 'trigger')"
    for kind, name in connection.exec_driver_sql(made):
        # They are programs: reading a view, or writing where a trigger is, may never end.
        raise FolderError(
            f"{path} holds the {kind} '{name}', which tunerd makes none of; choose another folder"
        )
    found = found_version(connection)
    if not isinstance(found, int) or not 1 <= found <= VERSION:
        raise FolderError(
            f"{path} has schema version {found}, and this tunerd reads those up to version "
            f"{VERSION}; use the tunerd that wrote it, or a newer one, or choose another folder"
        )
    return found


def _require_tables(connection: Connection, path: Path) -> None:
    """Raise FolderError unless all tables of this version are there with all their columns."""
    if missing := missing_part(connection):
        raise FolderError(
            f"{path} has schema version {VERSION} and no {missing}; it is damaged: copy the run "
            "folder again, or choose another folder"
        )


def copy_snapshot(source: Path, to: Path) -> None:
    """Copy a store into one file, as it is at this moment, also while its run is alive."""
    _require_file(source)
    try:
        origin = sqlite3.connect(_uri(source, "ro"), uri=True, timeout=BUSY_TIMEOUT_SECS)
        copy = sqlite3.connect(to)
        try:
            origin.backup(copy)
            # Else the copy would need its -wal and -shm files beside it.
            copy.execute("PRAGMA journal_mode = DELETE")
        finally:
            copy.close()
            origin.close()
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise unusable(source, error) from error


def check_integrity(path: Path) -> None:
    """Raise FolderError where a store is damaged or is none of this version."""
    with open_reader(path) as connection:
        try:
            found = connection.exec_driver_sql("PRAGMA integrity_check").scalar()
        except (DatabaseError, UnicodeDecodeError) as error:
            raise unusable(path, error) from error
        if found != "ok":
            raise unusable(path, ValueError(str(found)))
