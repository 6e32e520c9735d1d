"""Which run of a team's store is meant, of those that have ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from tunerd.records import runs, schema, typed
from tunerd.records.runs import RunRow
from tunerd.vocabulary import Share

_SHOWN = 8


@dataclass(frozen=True)
class EndedRun:
    """A run with a result; `share` is as in "gpu40"."""

    row: RunRow
    model: str
    share: str
    precision: str  # as RunFacts.precision_text
    saved_at: float  # of the result


@dataclass(frozen=True)
class RunQuery:
    """What a run must be; "" for anything."""

    model: str = ""
    share: str = ""
    precision: str = ""
    run: str = ""  # the identity, or how it begins
    except_run: str = ""  # an identity

    def fits(self, found: EndedRun) -> bool:
        return (
            self.model in ("", found.model)
            and self.share in ("", found.share)
            and self.precision in ("", found.precision)
            and found.row.identity.startswith(self.run)
            and found.row.identity != self.except_run
        )

    @property
    def text(self) -> str:
        asked = {
            "model": self.model,
            "share": self.share,
            "precision": self.precision,
            "run": self.run,
        }
        return ",".join(f"{key}={value}" for key, value in asked.items() if value)


def ended_runs(connection: Connection) -> list[EndedRun]:
    """Return the runs that have a result, the newest first.

    Raises ValueError or LookupError for a row that cannot be ours.
    """
    table, last = schema.outcomes, sa.func.max(schema.outcomes.c.saved_at)
    wanted = (
        sa.select(schema.runs.c.run_id, schema.runs.c.identity, last.label("saved_at"))
        .join(table, table.c.run_id == schema.runs.c.run_id)
        .group_by(schema.runs.c.run_id, schema.runs.c.identity)
        .order_by(last.desc(), schema.runs.c.run_id.desc())
    )
    found = []
    for run_id, identity, saved_at in connection.execute(wanted).all():
        facts = runs.first_facts(connection, typed.of_kind(int, run_id))
        if facts is None:
            raise ValueError(f"run {run_id} has a result and no session")
        share = Share("cpu" if facts.settings.get("gpu_pct") is None else "gpu", facts.pct).label
        row = RunRow(run_id, typed.of_kind(str, identity))
        found.append(
            EndedRun(
                row=row,
                model=facts.model_name,
                share=share,
                precision=facts.precision_text,
                saved_at=typed.of_kind(float, saved_at),
            )
        )
    return found


def none_fits(shown: str, wanted: RunQuery, found: Sequence[EndedRun]) -> str:
    """Say what is in a store instead of what was asked for."""
    others = [r for r in found if r.row.identity != wanted.except_run]
    if not others:
        return f"the store {shown} holds no other run that has ended; tune with --store first"
    texts = (f"model={r.model},share={r.share},precision={r.precision}" for r in others)
    there = list(dict.fromkeys(texts))
    more = f" and {len(there) - _SHOWN} more" if len(there) > _SHOWN else ""
    return (
        f"the store {shown} holds no run that has ended with {wanted.text}; it has "
        f"{'; '.join(there[:_SHOWN])}{more}"
    )
