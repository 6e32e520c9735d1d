"""What SQLite says is wrong with a store, as a sentence that says what to do."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from sqlalchemy.exc import DatabaseError

from tunerd.errors import DiskError, FolderError

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


def problem_of(path: Path, error: DatabaseError | sqlite3.Error) -> FolderError | None:
    """Say what is wrong with a store; None where a statement is, and not the store."""
    reason = error.orig if isinstance(error, DatabaseError) else error
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
        found = problem_of(path, error)
        assert found is not None
        return found
    reason = getattr(error, "orig", None) or error
    return FolderError(
        f"{path} cannot be opened as a store: {reason}; check that the folder is writable and the "
        "file whole, or choose another folder"
    )


def _code(error: DatabaseError | sqlite3.Error) -> int:
    """Return the primary result code; an extended one has it in its low byte."""
    reason = error.orig if isinstance(error, DatabaseError) else error
    return getattr(reason, "sqlite_errorcode", -1) & 0xFF
