"""What tasks ended with, as statements inside a transaction of the caller's."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from tunerd.records import rows, runs, schema, trials
from tunerd.records.conditions_key import Obtained
from tunerd.vocabulary import to_json
from tunerd.vocabulary.outcome import Taken, TaskOutcome

_KEYS = ("run_id", "task_id")
_NAMES = tuple(f.name for f in dataclasses.fields(Obtained))
_CHUNK = 500  # tasks asked for in one statement


def save(
    connection: Connection,
    run_id: int,
    measured_outcomes: Sequence[tuple[TaskOutcome, Obtained | None]],
    *,
    at: float,
) -> None:
    """Keep outcomes and what each was measured on; later ones of a task replace it."""
    table = schema.task_outcomes
    insert = runs.put(connection, table)
    changed = {c.name: insert.excluded[c.name] for c in table.columns if c.name not in _KEYS}
    found = [
        {
            "run_id": run_id,
            "task_id": outcome.task_id,
            "saved_at": at,
            "outcome": json.dumps(to_json(outcome)),
            "winner_recipe": outcome.winner.recipe,
            **(dataclasses.asdict(on) if on else dict.fromkeys(_NAMES)),
        }
        for outcome, on in measured_outcomes
    ]
    if found:
        put = insert.on_conflict_do_update(index_elements=_KEYS, set_=changed)
        connection.execute(put, found)


def of_run(connection: Connection, run_id: int) -> list[tuple[TaskOutcome, Obtained | None]]:
    """Return a run's outcomes in the order of its tasks, with what each was measured on."""
    table = schema.task_outcomes
    wanted = (
        sa.select(table)
        .join(schema.tasks)
        .where(table.c.run_id == run_id)
        .order_by(schema.tasks.c.position)
    )
    found = []
    for row in connection.execute(wanted).mappings().all():
        winner = None
        if row["winner_recipe"] is None:  # as versions before 3 left it
            candidate_id = rows.winner_of(row)["candidate_id"]
            trial = trials.row(connection, run_id, candidate_id)
            winner = rows.candidate_from_row(trial)
        found.append(rows.task_outcome_from_row(row, winner))
    return found


def measured_on(
    connection: Connection, on: Obtained, task_ids: Sequence[str], *, except_run: str
) -> dict[str, list[TaskOutcome]]:
    """Return what other runs measured of tasks on the same, by task, the newest first.

    Raises ValueError or LookupError for a row that cannot be ours.
    """
    table = schema.task_outcomes
    found: dict[str, list[TaskOutcome]] = {}
    for start in range(0, len(task_ids), _CHUNK):
        wanted: sa.Select[Any] = (
            sa.select(table, schema.runs.c.identity)
            .join(schema.runs, schema.runs.c.run_id == table.c.run_id)
            .where(
                table.c.task_id.in_(task_ids[start : start + _CHUNK]),
                table.c.winner_recipe.is_not(None),
                schema.runs.c.identity != except_run,
                *(table.c[name] == getattr(on, name) for name in _NAMES),
            )
            .order_by(table.c.saved_at.desc(), table.c.run_id.desc())
        )
        for row in connection.execute(wanted).mappings():
            outcome, _ = rows.task_outcome_from_row(row, None)
            taken = Taken(run=row["identity"], saved_at=row["saved_at"])
            found.setdefault(row["task_id"], []).append(dataclasses.replace(outcome, taken=taken))
    return found
