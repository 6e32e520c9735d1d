"""A store that is open: one run of it, its transactions, and what its errors say."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import (
    DatabaseError,
    IntegrityError,
    InterfaceError,
    NoResultFound,
    ProgrammingError,
)

from tunerd.errors import FolderError, InputError, StoreError, TunerdError
from tunerd.records import finding, runs, schema, server, sqlite
from tunerd.records.conditions_key import Obtained
from tunerd.records.facts import RunFacts
from tunerd.records.finding import RunQuery
from tunerd.records.problems import problem_of
from tunerd.system import clock
from tunerd.system.store_address import StoreAddress


class OpenStore:
    """One run of a store. Calls may come from any thread; each is one transaction."""

    def __init__(self, name: Path | str, connection: Connection, *, is_snapshot: bool) -> None:
        self._name = name  # for people: the file, or a team's store without its password
        self._connection = connection
        self._run = runs.NO_RUN
        self._is_snapshot = is_snapshot
        self.obtained: Obtained | None = None  # what outcomes that are saved are measured on
        self.session = 0  # the number of the session that writes, from 1
        self._lock = threading.Lock()

    @classmethod
    def create_or_open(cls, folder: Path, *, facts: RunFacts, now: float | None = None) -> Self:
        """Open the store of a run folder for writing, and note this session in it.

        Raises FolderError where it holds a run of another model, device or share, was written by
        a newer tunerd, or cannot be written. RunFolder's lock sees to it that one process writes.
        """
        path = folder / schema.STORE_NAME
        return cls._write(path, sqlite.open_writer(path), folder, None, facts, at(now))

    @classmethod
    def join(
        cls,
        address: StoreAddress,
        identity: str,
        *,
        facts: RunFacts,
        now: float | None = None,
    ) -> Self:
        """Open a run in a team's store for writing, creating it where it is new.

        `identity` is that of the run's own store. Raises StoreError where the store cannot be
        reached or used, and FolderError where it holds another run under that identity.
        """
        name = address.shown
        return cls._write(name, server.open_writer(address), name, identity, facts, at(now))

    @classmethod
    def _write(
        cls,
        name: Path | str,
        connection: Connection,
        place: Path | str,
        identity: str | None,
        facts: RunFacts,
        now: float,
    ) -> Self:
        """Open a store's run, or its only one where no identity is given."""
        store = cls(name, connection, is_snapshot=False)
        try:
            with store._transaction(), store._decoding():
                store._run = runs.find_or_create(connection, identity, at=now)
                store.session = runs.begin_session(
                    connection, store._run_id, facts, place=place, at=now
                )
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Open a run folder's store as it is at this moment; FolderError where there is none."""
        path = folder / schema.STORE_NAME
        return cls._read(path, sqlite.open_reader(path), None)

    @classmethod
    def _read(cls, name: Path | str, connection: Connection, identity: str | None) -> Self:
        store = cls(name, connection, is_snapshot=True)
        try:
            with store._reading():
                store._run = runs.find(connection, identity)
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def find_shared(cls, address: StoreAddress, wanted: RunQuery) -> Self:
        """Open the newest run of a team's store that has ended and is asked for.

        Raises InputError, saying what is there, where there is none.
        """
        store = cls(address.shown, server.open_reader(address), is_snapshot=True)
        try:
            with store._reading() as connection:
                found = finding.ended_runs(connection)
            fitting = [run for run in found if wanted.fits(run)]
            if not fitting:
                raise InputError(finding.none_fits(address.shown, wanted, found))
            store._run = fitting[0].row
        except BaseException:
            store.close()
            raise
        return store

    @property
    def identity(self) -> str:
        """What the run is known by in every store; random, and it goes with the run folder."""
        return self._run.identity

    @property
    def _run_id(self) -> int:
        return self._run.run_id

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        try:
            with self._lock:
                if self._is_snapshot:
                    yield self._connection  # inside the one transaction that open_reader began
                    return
                with self._connection.begin():
                    yield self._connection
        except (DatabaseError, InterfaceError, UnicodeDecodeError) as error:
            is_file = isinstance(self._name, Path)
            if isinstance(error, IntegrityError) or (
                isinstance(error, ProgrammingError) and is_file
            ):
                raise
            problem = None
            if not isinstance(error, UnicodeDecodeError):
                problem = problem_of(self._name, error, is_snapshot=self._is_snapshot)
            reason = getattr(error, "orig", None) or error
            raise problem or FolderError(
                f"{self._name} cannot be used: {reason}; copy the run folder again, or name "
                "another one"
            ) from error

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with self._transaction() as connection, self._decoding():
            yield connection

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        """Turn what a row that tunerd cannot have written raises into FolderError."""
        try:
            yield
        except (ValueError, TypeError, LookupError, NoResultFound) as error:
            raise self.damaged(str(error)) from error

    def damaged(self, found: str) -> TunerdError:
        """Return the error of a store that holds what no run can have put there."""
        if isinstance(self._name, str):
            return StoreError(
                f"the store {self._name} holds what is no record of a run ({found}); another "
                "program wrote to it, or it is damaged"
            )
        return FolderError(
            f"{self._name} holds what is no record of a run ({found}); it is damaged, or another "
            "program wrote to it: copy the run folder again, or name another one"
        )

    def _insert(self, statement: sa.Insert, values: Iterable[Mapping[str, Any]]) -> None:
        values = [{"run_id": self._run_id, **value} for value in values]
        if values:
            with self._transaction() as connection:
                connection.execute(statement, values)

    def _all(self, table: sa.Table) -> sa.Select[Any]:
        return sa.select(table).where(table.c.run_id == self._run_id)


def at(now: float | None) -> float:
    """Return a time that was given, or the clock's."""
    return clock.now() if now is None else now
