"""The tables of `store.sqlite`, and how it is opened."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy import Column, Float, ForeignKey, Index, Integer, Table, Text
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DatabaseError

from tunerd.errors import FolderError
from tunerd.records import upgrades
from tunerd.records.problems import unusable

STORE_NAME = "store.sqlite"
# 2: who worked on what, and how long the phases of a session took. 3: spot checks.
VERSION = 3
BUSY_TIMEOUT_SECS = 30.0

METADATA = sa.MetaData()

version = Table("schema_version", METADATA, Column("version", Integer, nullable=False))

# One row per session: the first says what the run is, the later ones who went on with it.
sessions = Table(
    "sessions",
    METADATA,
    Column("session_id", Integer, primary_key=True),
    Column("opened_at", Float, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("facts", Text, nullable=False),
)

tasks = Table(
    "tasks",
    METADATA,
    Column("position", Integer, primary_key=True),
    Column("task_id", Text, nullable=False, unique=True),
    Column("name", Text, nullable=False),
    Column("weight", Integer, nullable=False),
    Column("flops", Float, nullable=False),
    Column("args", Text, nullable=False),
    Column("weight_args", Text, nullable=False),
    Column("target_kind", Text, nullable=False),
    Column("target_json", Text, nullable=False),
    Column("mod_json", Text, nullable=False),
)

slices = Table(
    "slices",
    METADATA,
    Column("slice_id", Text, primary_key=True),
    Column("spec", Text, nullable=False),
)

proofs = Table(
    "proofs",
    METADATA,
    Column("proof_id", Integer, primary_key=True),
    Column("slice_id", Text, nullable=False, index=True),
    Column("proved_at", Float, nullable=False),
    Column("proof", Text, nullable=False),
)

trials = Table(
    "trials",
    METADATA,
    Column("trial_id", Integer, primary_key=True),
    Column("task_id", Text, ForeignKey("tasks.task_id"), nullable=False),
    Column("candidate_id", Text, nullable=False, unique=True),
    Column("origin", Text, nullable=False),
    Column("trace_json", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("proposed_at", Float, nullable=False),
    Column("started_at", Float),
    Column("ended_at", Float),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("slice_id", Text),
    Column("build_secs", Float),
    Column("compiler", Text),
    Column("library_sha256", Text),
    Column("stage", Text),
    Column("kind", Text),
    Column("message", Text),
    Column("run_secs", Text),  # JSON list of raw samples, seconds of one call each
    Column("median_secs", Float),  # of run_secs, to find a task's best by an index
    Column("calls_per_sample", Integer),
    Column("profile", Text),
    Column("sm_count", Integer),
    Column("sm_clock_mhz", Integer),
    Column("temperature_c", Integer),
    Column("power_w", Float),
    Column("neighbours", Integer),
    Index("trials_by_task", "task_id", "state", "median_secs"),
    Index("trials_by_state", "state"),
    sqlite_autoincrement=True,
)

# Ends of attempts that were no end of the trial: collateral, interrupted.
setbacks = Table(
    "setbacks",
    METADATA,
    Column("setback_id", Integer, primary_key=True),
    Column("trial_id", Integer, ForeignKey("trials.trial_id"), nullable=False, index=True),
    Column("attempt", Integer, nullable=False),
    Column("slice_id", Text),
    Column("at", Float, nullable=False),
    Column("stage", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("message", Text, nullable=False),
)

task_outcomes = Table(
    "task_outcomes",
    METADATA,
    Column("task_id", Text, ForeignKey("tasks.task_id"), primary_key=True),
    Column("saved_at", Float, nullable=False),
    Column("outcome", Text, nullable=False),
)

outcomes = Table(
    "outcomes",
    METADATA,
    Column("outcome_id", Integer, primary_key=True),
    Column("saved_at", Float, nullable=False),
    Column("outcome", Text, nullable=False),
)

spans = Table(
    "spans",
    METADATA,
    Column("span_id", Integer, primary_key=True),
    Column("worker", Text, nullable=False),
    Column("activity", Text, nullable=False),
    Column("start", Float, nullable=False),
    Column("end", Float, nullable=False),
    Column("role", Text, nullable=False, server_default=""),
    Column("session_id", Integer, nullable=False, server_default="1"),
    Column("items", Integer, nullable=False, server_default="0"),
    Column("task_id", Text, nullable=False, server_default=""),
    Column("busy_secs", Float),
    Column("cpu_secs", Float),
)

phases = Table(
    "phases",
    METADATA,
    Column("row_id", Integer, primary_key=True),
    Column("session_id", Integer, nullable=False),
    Column("phase", Text, nullable=False),
    Column("start", Float, nullable=False),
    Column("end", Float, nullable=False),
    Column("core_busy_secs", Text, nullable=False),  # JSON list of pairs: core, seconds
)

# Runs of the sentinel in a slice, which are no trials.
spot_checks = Table(
    "spot_checks",
    METADATA,
    Column("check_id", Integer, primary_key=True),
    Column("session_id", Integer, nullable=False),
    Column("at", Float, nullable=False),
    Column("task_id", Text, nullable=False),
    Column("busy_secs", Float, nullable=False),
    Column("measurement", Text, nullable=False),  # JSON
)


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
                METADATA.create_all(connection)
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
            upgrades.show_as_current(connection, found, METADATA)
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
        raise FolderError(
            f"{path.parent} is not a run folder: it has no {path.name}; give the folder that "
            "`tunerd tune` wrote with --out"
        )


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
        (obtained,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
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
    found: object = connection.execute(sa.select(sa.func.max(version.c.version))).scalar()
    if not isinstance(found, int) or not 1 <= found <= VERSION:
        raise FolderError(
            f"{path} has schema version {found}, and this tunerd reads those up to version "
            f"{VERSION}; use the tunerd that wrote it, or a newer one, or choose another folder"
        )
    return found


def _require_tables(connection: Connection, path: Path) -> None:
    """Raise FolderError unless all tables of this version are there with all their columns."""
    inspector = sa.inspect(connection)
    names = set(inspector.get_table_names())
    for table in METADATA.sorted_tables:
        known = (
            {c["name"] for c in inspector.get_columns(table.name)} if table.name in names else {}
        )
        if missing := [c.name for c in table.columns if c.name not in known]:
            what = f"column {missing[0]} in its table" if known else "table"
            raise FolderError(
                f"{path} has schema version {VERSION} and no {what} {table.name}; it is damaged: "
                "copy the run folder again, or choose another folder"
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
