"""How far a run is, in a few queries that look at no trace: cheap while the run is alive."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import sqlalchemy as sa
from pydantic import Field
from sqlalchemy.engine import Connection

from tunerd.records import typed
from tunerd.records.schema import of_default, of_search, proofs, sessions, slices, tasks, trials
from tunerd.vocabulary import TrialState

_RECENT = 4096  # trials, by their ids, among which those are that ended lately
_FAILURES = 5
_Secs = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class TaskTally:
    """One task: its search trials by state, and medians of the search."""

    task_id: str
    name: str
    weight: int
    proposed: int
    running: int
    measured: int
    failed: int
    default_secs: _Secs | None
    best_secs: _Secs | None  # of all, the default among them


@dataclass(frozen=True)
class FailedTrial:
    trial_id: int
    task: str
    stage: str
    kind: str
    message: str
    ended_at: float


@dataclass(frozen=True)
class Disturbed:
    """How many of a run's measured trials were disturbed, defaults among them."""

    trials: int = 0
    of: int = 0
    mostly: str = ""  # what disturbed most of them, in the words of Conditions


@dataclass(frozen=True)
class Tally:
    """A run at one moment. Trials are those of the search; defaults count in no number."""

    session: int  # the last one's number, 0 before the first
    opened_at: float | None
    pid: int | None
    tasks: tuple[TaskTally, ...]
    ended_lately: int  # in the last session, since the time that was asked for
    slices: int  # planned
    slices_busy: int
    proofs: int
    disturbed: Disturbed
    failures: tuple[FailedTrial, ...]  # the last ones, newest first


def tally(connection: Connection, run_id: int, *, since: float) -> Tally:
    """Count what is there; `since` is in seconds since the epoch.

    Raises ValueError where a store holds there what no run has written.
    """
    session = connection.execute(
        sa.select(sessions.c.number, sessions.c.opened_at, sessions.c.pid)
        .where(sessions.c.run_id == run_id)
        .order_by(sessions.c.number.desc())
        .limit(1)
    ).one_or_none()
    number, opened_at, pid = session or (0, None, None)
    running = trials.c.state == TrialState.RUNNING.value
    busy = sa.select(sa.func.count(sa.distinct(trials.c.slice_id))).where(
        running, trials.c.run_id == run_id
    )
    found = Tally(
        session=number,
        opened_at=opened_at,
        pid=pid,
        tasks=_tasks(connection, run_id),
        ended_lately=_ended_since(connection, run_id, max(since, opened_at or since)),
        slices=_count(connection, run_id, slices),
        slices_busy=connection.execute(busy).scalar_one(),
        proofs=_count(connection, run_id, proofs),
        disturbed=disturbed(connection, run_id),
        failures=_failures(connection, run_id),
    )
    return typed.of_kind(Tally, asdict(found))


def disturbed(connection: Connection, run_id: int) -> Disturbed:
    """Count the trials that were measured beside others, or with clocks held down."""
    # By indexes that have all of it: no row is looked at.
    count = sa.func.count()
    by_cause = (
        sa.select(trials.c.disturbed_by, count)
        .where(trials.c.run_id == run_id, trials.c.disturbed_by > "")
        .group_by(trials.c.disturbed_by)
        .order_by(count.desc(), trials.c.disturbed_by)
    )
    causes = [(cause, number) for cause, number in connection.execute(by_cause)]
    measured = sa.select(count).where(
        trials.c.run_id == run_id, trials.c.state == TrialState.MEASURED.value
    )
    return Disturbed(
        trials=sum(number for _, number in causes),
        of=connection.execute(measured).scalar_one(),
        mostly=causes[0][0] if causes else "",
    )


def _tasks(connection: Connection, run_id: int) -> tuple[TaskTally, ...]:
    # By an index that has all three: no row is looked at.
    by_state = (
        sa.select(
            trials.c.task_id, trials.c.state, sa.func.count(), sa.func.min(trials.c.median_secs)
        )
        .where(trials.c.run_id == run_id)
        .group_by(trials.c.task_id, trials.c.state)
    )  # fmt: skip
    counts: dict[tuple[str, str], int] = {}
    best: dict[str, float] = {}
    for task_id, state, count, secs in connection.execute(by_state):
        counts[task_id, state] = count
        if state == TrialState.MEASURED.value and secs is not None:
            best[task_id] = secs
    defaults: dict[str, float | None] = {}
    wanted = sa.select(trials.c.task_id, trials.c.state, trials.c.median_secs)
    for task_id, state, secs in connection.execute(
        wanted.where(trials.c.run_id == run_id, of_default)
    ):
        counts[task_id, state] -= 1
        defaults[task_id] = secs
    listed = (
        sa.select(tasks.c.task_id, tasks.c.name, tasks.c.weight)
        .where(tasks.c.run_id == run_id)
        .order_by(tasks.c.position)
    )
    return tuple(
        TaskTally(
            task_id=task_id,
            name=name,
            weight=weight,
            **{state.value: counts.get((task_id, state.value), 0) for state in TrialState},
            default_secs=defaults.get(task_id),
            best_secs=best.get(task_id),
        )
        for task_id, name, weight in connection.execute(listed)
    )


def _ended_since(connection: Connection, run_id: int, since: float) -> int:
    of_run = trials.c.run_id == run_id
    last = connection.execute(sa.select(sa.func.max(trials.c.trial_id)).where(of_run)).scalar() or 0
    wanted = sa.select(sa.func.count()).where(
        of_run,
        trials.c.trial_id > last - _RECENT,
        of_search,
        trials.c.ended_at > since,
    )
    return connection.execute(wanted).scalar_one()


def _failures(connection: Connection, run_id: int) -> tuple[FailedTrial, ...]:
    t = trials.c
    wanted = (
        sa.select(t.trial_id, tasks.c.name, t.stage, t.kind, t.message, t.ended_at)
        .join(tasks, sa.and_(tasks.c.run_id == t.run_id, tasks.c.task_id == t.task_id))
        .where(t.run_id == run_id, t.state == TrialState.FAILED.value)
        .order_by(t.trial_id.desc())
        .limit(_FAILURES)
    )
    return tuple(FailedTrial(*row) for row in connection.execute(wanted))


def _count(connection: Connection, run_id: int, table: sa.Table) -> int:
    wanted = sa.select(sa.func.count()).select_from(table).where(table.c.run_id == run_id)
    return connection.execute(wanted).scalar_one()
