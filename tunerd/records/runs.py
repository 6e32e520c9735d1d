"""The runs of a store and their sessions, as statements inside a transaction of the caller's."""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from tunerd.records import typed
from tunerd.records.facts import RunFacts, refuse_other_run
from tunerd.records.schema import runs, sessions


@dataclass(frozen=True)
class RunRow:
    """One run: its number in this store, and what it is known by in all."""

    run_id: int
    identity: str


NO_RUN = RunRow(0, "")


def find(connection: Connection, identity: str | None) -> RunRow:
    """Return a run, the first where no identity is given; NO_RUN where there is none."""
    wanted = sa.select(runs.c.run_id, runs.c.identity).order_by(runs.c.run_id).limit(1)
    if identity is not None:
        wanted = wanted.where(runs.c.identity == identity)
    row = connection.execute(wanted).one_or_none()
    if row is None:
        return NO_RUN
    return RunRow(typed.of_kind(int, row.run_id), typed.of_kind(str, row.identity))


def find_or_create(connection: Connection, identity: str | None, *, at: float) -> RunRow:
    """Return a run for writing, and hold it until the transaction ends."""
    found = find(connection, identity)
    if found == NO_RUN:
        known = identity or uuid.uuid4().hex
        connection.execute(
            put(connection, runs).on_conflict_do_nothing(), {"identity": known, "created_at": at}
        )
        found = find(connection, known)
    # Copies of a run folder have one identity: on a server they come one by one.
    held = sa.select(runs.c.run_id).where(runs.c.run_id == found.run_id).with_for_update()
    connection.execute(held)
    return found


def begin_session(
    connection: Connection, run_id: int, facts: RunFacts, *, place: Path | str, at: float
) -> int:
    """Note a session and return its number; FolderError where the run is another one.

    Raises ValueError or LookupError where the run's first session cannot be read.
    """
    first = first_facts(connection, run_id)
    if first is not None:
        refuse_other_run(first, facts, place)
    last = sa.select(sa.func.max(sessions.c.number)).where(sessions.c.run_id == run_id)
    number = 1 + int(connection.execute(last).scalar() or 0)
    row = {"opened_at": at, "pid": os.getpid(), "facts": json.dumps(facts.to_json())}
    connection.execute(sessions.insert(), row | {"run_id": run_id, "number": number})
    return number


def first_facts(connection: Connection, run_id: int) -> RunFacts | None:
    wanted = _facts_of(run_id).limit(1)
    row = connection.execute(wanted).one_or_none()
    return None if row is None else _facts_from(row.facts)


def all_sessions(connection: Connection, run_id: int) -> list[tuple[float, RunFacts]]:
    found = connection.execute(_facts_of(run_id)).all()
    return [(typed.of_kind(float, row.opened_at), _facts_from(row.facts)) for row in found]


def put(connection: Connection, table: sa.Table) -> sqlite.Insert | postgresql.Insert:
    """Return an insert that can say what happens to a row that is there; both write it alike."""
    if connection.dialect.name == "postgresql":
        return postgresql.insert(table)
    return sqlite.insert(table)


def _facts_of(run_id: int) -> sa.Select[Any]:
    return (
        sa.select(sessions.c.opened_at, sessions.c.facts)
        .where(sessions.c.run_id == run_id)
        .order_by(sessions.c.number)
    )


def _facts_from(text: str) -> RunFacts:
    return RunFacts.from_json(typed.from_json(dict[str, Any], text))
