"""What a database says is wrong with a store, as a sentence that says what to do."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from sqlalchemy.exc import DatabaseError, DBAPIError, OperationalError

from tunerd.errors import DiskError, FolderError, StoreError, TunerdError

# Of a disk, not of the file or of a statement (https://sqlite.org/rescode.html).
_OF_A_DISK = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR}
_HELD = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_OF_THE_FILE = {
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
}


class StoreLost(StoreError):
    """A server cannot be reached, or ended what was under way: it may be back in a moment."""


def problem_of(
    name: Path | str, error: DBAPIError | sqlite3.Error, *, is_snapshot: bool = False
) -> TunerdError | None:
    """Say what is wrong with a store; None where it can be said in general only."""
    if isinstance(error, DBAPIError) and not isinstance(error.orig, sqlite3.Error):
        return problem_of_a_server(str(name), error)
    return None if is_snapshot else _problem_of_a_file(Path(name), error)


def problem_of_a_server(name: str, error: DBAPIError) -> StoreError:
    """Say what is wrong with a store on a server; StoreLost where trying again may help."""
    reason = one_line(error.orig)
    if isinstance(error, OperationalError) or error.connection_invalidated:
        # A refusal at the door is final, but for a server that starts or ends. libpq gives no
        # SQLSTATE for it (https://www.postgresql.org/docs/current/libpq-status.html).
        is_refused = "FATAL" in reason or "no password supplied" in reason
        passes = ("the database system is", "terminating connection", "too many", "remaining conn")
        if not is_refused or any(words in reason for words in passes):
            return StoreLost(f"the store {name} cannot be reached: {reason}")
        return StoreError(
            f"the store {name} refuses: {reason}; check user, database and password, which may "
            "come with --store, in PGPASSWORD or in ~/.pgpass"
        )
    return StoreError(
        f"the store {name} cannot be used: {reason}; tunerd needs the right to create tables "
        "there once, and to read and write them"
    )


def one_line(error: object) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _problem_of_a_file(path: Path, error: DBAPIError | sqlite3.Error) -> FolderError | None:
    reason = error.orig if isinstance(error, DBAPIError) else error
    code = _code(error)
    if code in _OF_A_DISK:
        return DiskError(
            f"{path} cannot be written: {reason}; make room or mend the disk, then run the same "
            "command: it goes on with what was stored"
        )
    if code in _HELD:
        return FolderError(
            f"another program keeps {path} locked: {reason}; end it (a shell or a backup of the "
            "file), then run the same command: it goes on with what was stored"
        )
    if code in _OF_THE_FILE:
        return FolderError(
            f"{path} cannot be used: {reason}; check that it is writable and whole, or choose "
            "another folder"
        )
    return None


def unusable(path: Path, error: Exception) -> FolderError:
    """Say what is wrong with a store that cannot be opened, whatever it is."""
    if isinstance(error, DatabaseError | sqlite3.Error) and _code(error) in _OF_A_DISK | _HELD:
        found = _problem_of_a_file(path, error)
        assert found is not None
        return found
    reason = getattr(error, "orig", None) or error
    return FolderError(
        f"{path} cannot be opened as a store: {reason}; check that the folder is writable and the "
        "file whole, or choose another folder"
    )


def _code(error: DBAPIError | sqlite3.Error) -> int:
    """Return the primary result code; an extended one has it in its low byte."""
    reason = error.orig if isinstance(error, DBAPIError) else error
    return getattr(reason, "sqlite_errorcode", -1) & 0xFF
