"""The life of trials as statements on the store, each inside a transaction of the caller's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

from tunerd.records import rows
from tunerd.records.schema import of_default, of_search, setbacks, trials
from tunerd.vocabulary import (
    Build,
    Candidate,
    Failure,
    Kind,
    Measurement,
    Record,
    Stage,
    TrialState,
)

_CHUNK = 10_000  # ids in one statement; SQLite takes 32,766 (SQLITE_MAX_VARIABLE_NUMBER)
_T = TypeVar("_T")
_OPEN = (TrialState.PROPOSED, TrialState.RUNNING)
_SESSION_ENDED = Failure(Stage.RUN, Kind.INTERRUPTED, "its session ended while it was running")
_ENDED_BESIDE_NONE = Failure(
    Stage.RUN, Kind.INTERRUPTED, "its session ended while it was running, and nothing else"
)
MAX_SESSIONS = 3  # that may end so; then the trial is taken for what ends them


def propose(
    connection: Connection, run_id: int, candidates: Sequence[Candidate], *, at: float
) -> None:
    known = numbers(connection, run_id, [c.candidate_id for c in candidates])
    new = {c.candidate_id: c for c in candidates if c.candidate_id not in known}
    if new:
        connection.execute(
            trials.insert(),
            [rows.candidate_to_row(c, now=at) | {"run_id": run_id} for c in new.values()],
        )


def built(connection: Connection, run_id: int, builds: Sequence[Build]) -> None:
    ids = [b.candidate.candidate_id for b in builds]
    trial_ids = require(connection, run_id, ids, _OPEN, verb="be built")
    _update_each(
        connection,
        {
            trial_ids[build.candidate.candidate_id]: {
                "build_secs": build.build_secs,
                "compiler": build.compiler,
                "library_sha256": build.library_sha256,
            }
            for build in builds
        },
    )


def start(
    connection: Connection, run_id: int, candidate_ids: Sequence[str], slice_id: str, *, at: float
) -> None:
    trial_ids = require(connection, run_id, candidate_ids, (TrialState.PROPOSED,), verb="start")
    for chunk in _chunks(trial_ids.values()):
        connection.execute(
            trials.update()
            .where(trials.c.trial_id.in_(chunk))
            .values(
                state=TrialState.RUNNING.value,
                slice_id=slice_id,
                started_at=at,
                attempts=trials.c.attempts + 1,
            )
        )


def finish(
    connection: Connection, run_id: int, results: Mapping[str, Measurement | Failure], *, at: float
) -> None:
    measured, failed, returned = {}, {}, {}
    for candidate_id, result in results.items():
        if isinstance(result, Measurement):
            measured[candidate_id] = rows.measurement_to_columns(result) | {"ended_at": at}
        elif result.kind.ends_trial:
            failed[candidate_id] = rows.failure_to_columns(result) | {"ended_at": at}
        else:
            returned[candidate_id] = result
    trial_ids = require(connection, run_id, measured, (TrialState.RUNNING,), verb="be measured")
    trial_ids |= require(connection, run_id, [*failed, *returned], _OPEN, verb="fail")
    _update_each(connection, {trial_ids[c]: columns for c, columns in measured.items()})
    _update_each(connection, {trial_ids[c]: columns for c, columns in failed.items()})
    _put_back(connection, {trial_ids[c]: failure for c, failure in returned.items()}, at=at)


def interrupt(connection: Connection, run_id: int, *, at: float) -> None:
    """Put back what runs while its session ends in order."""
    running = _running(connection, run_id)
    _put_back(connection, dict.fromkeys(running, _SESSION_ENDED), at=at)


def requeue_running(connection: Connection, run_id: int, *, at: float) -> None:
    """Put back what ran when a session ended without a word.

    A trial whose sessions end whenever it runs by itself would end all that follow: it fails.
    """
    running = _running(connection, run_id)
    is_alone = len(running) == 1
    sessions = 1 + _ended_beside_none(connection, running[0]) if is_alone else 0
    if sessions >= MAX_SESSIONS:
        message = f"{sessions} sessions ended while it was running, and nothing else"
        failure = Failure(Stage.RUN, Kind.CRASH, message)
        columns = rows.failure_to_columns(failure) | {"ended_at": at}
        _update_each(connection, {running[0]: columns})
        return
    ended = _ENDED_BESIDE_NONE if is_alone else _SESSION_ENDED
    _put_back(connection, dict.fromkeys(running, ended), at=at)


def _running(connection: Connection, run_id: int) -> list[int]:
    wanted = sa.select(trials.c.trial_id).where(
        trials.c.run_id == run_id, trials.c.state == TrialState.RUNNING.value
    )
    return list(connection.execute(wanted).scalars())


def _ended_beside_none(connection: Connection, trial_id: int) -> int:
    """Return how many sessions have ended while nothing but this trial was running."""
    wanted = sa.select(sa.func.count()).where(
        setbacks.c.trial_id == trial_id, setbacks.c.message == _ENDED_BESIDE_NONE.message
    )
    return int(connection.execute(wanted).scalar_one())


def lost(connection: Connection, run_id: int) -> set[str]:
    found = connection.execute(
        sa.select(trials.c.candidate_id)
        .join(setbacks, setbacks.c.trial_id == trials.c.trial_id)
        .where(
            trials.c.run_id == run_id,
            trials.c.state.in_([state.value for state in _OPEN]),
            setbacks.c.kind.in_([Kind.COLLATERAL.value, Kind.INTERRUPTED.value]),
            setbacks.c.stage != Stage.BUILD.value,
        )
    )
    return set(found.scalars())


def page(
    connection: Connection,
    run_id: int,
    *,
    after: int,
    limit: int,
    task_id: str | None,
    state: TrialState | None,
) -> Sequence[RowMapping]:
    wanted = (
        sa.select(trials)
        .where(trials.c.run_id == run_id, trials.c.trial_id > after)
        .order_by(trials.c.trial_id)
        .limit(limit)
    )
    return connection.execute(_only(wanted, task_id, state)).mappings().all()


def counts(
    connection: Connection, run_id: int, task_id: str | None, is_default: bool | None
) -> dict[TrialState, int]:
    wanted = (
        sa.select(trials.c.state, sa.func.count())
        .where(trials.c.run_id == run_id)
        .group_by(trials.c.state)
    )
    if is_default is not None:
        wanted = wanted.where(of_default if is_default else of_search)
    found: dict[str, int] = dict(connection.execute(_only(wanted, task_id, None)).all())
    return {state: found.get(state.value, 0) for state in TrialState}


def best(
    connection: Connection, run_id: int, task_id: str, is_default: bool | None
) -> Record | None:
    wanted = (
        sa.select(trials)
        .where(trials.c.run_id == run_id)
        .order_by(trials.c.median_secs, trials.c.trial_id)
        .limit(1)
    )
    if is_default is not None:
        wanted = wanted.where(of_default if is_default else of_search)
    row = connection.execute(_only(wanted, task_id, TrialState.MEASURED)).mappings().one_or_none()
    return None if row is None else rows.record_from_row(row)


def ranked(connection: Connection, run_id: int, task_id: str) -> list[tuple[int, float | None]]:
    ended = (TrialState.MEASURED.value, TrialState.FAILED.value)
    wanted = (
        sa.select(trials.c.trial_id, trials.c.state, trials.c.run_secs, trials.c.median_secs)
        .where(
            trials.c.run_id == run_id,
            trials.c.task_id == task_id,
            of_search,
            trials.c.state.in_(ended),
        )
        .order_by(trials.c.median_secs.is_(None), trials.c.median_secs, trials.c.trial_id)
    )
    found = connection.execute(wanted).mappings()
    return [(row["trial_id"], rows.secs_of_ended(row)) for row in found]


def recipes(
    connection: Connection, run_id: int, trial_ids: Sequence[int]
) -> dict[int, tuple[str, str]]:
    found: dict[int, tuple[str, str]] = {}
    for chunk in _chunks(trial_ids):
        wanted = sa.select(trials.c.trial_id, trials.c.source, trials.c.recipe).where(
            trials.c.run_id == run_id, trials.c.trial_id.in_(chunk)
        )
        found |= {each.trial_id: (each.source, each.recipe) for each in connection.execute(wanted)}
    for trial_id, texts in found.items():
        for text in texts:
            if not isinstance(text, str):
                raise ValueError(f"trial {trial_id} is made of {str(text)[:40]!r}, no str")
    return found


def row(connection: Connection, run_id: int, candidate_id: str) -> RowMapping:
    found = connection.execute(
        sa.select(trials).where(trials.c.run_id == run_id, trials.c.candidate_id == candidate_id)
    )
    one = found.mappings().one_or_none()
    if one is None:
        raise KeyError(f"the store has no trial of candidate {candidate_id}")
    return one


def history(connection: Connection, run_id: int, candidate_id: str) -> str:
    trial = row(connection, run_id, candidate_id)
    trial_id = trial["trial_id"]
    lines = [
        f"trial {trial_id}: candidate {candidate_id} ({trial['source']}) of task "
        f"{trial['task_id']}, {trial['state']}",
        f"  {_clock(trial['proposed_at'])} proposed",
    ]
    if trial["build_secs"] is not None:
        lines.append(f"  built with {trial['compiler']} in {trial['build_secs']:.3f} s")
    lines += [
        f"  {_clock(s.at)} {s.kind} in {s.stage}, attempt {s.attempt} in {s.slice_id or 'no slice'}"
        for s in connection.execute(
            sa.select(setbacks)
            .where(setbacks.c.trial_id == trial_id)
            .order_by(setbacks.c.setback_id)
        )
    ]
    if trial["started_at"] is not None:
        lines.append(
            f"  {_clock(trial['started_at'])} started in {trial['slice_id']}, "
            f"attempt {trial['attempts']}"
        )
    if trial["state"] == TrialState.MEASURED.value:
        lines.append(f"  {_clock(trial['ended_at'])} measured, median {trial['median_secs']:.6g} s")
    if trial["state"] == TrialState.FAILED.value:
        lines.append(f"  {_clock(trial['ended_at'])} failed in {trial['stage']}: {trial['kind']}")
    return "\n".join(lines)


def require(
    connection: Connection,
    run_id: int,
    candidate_ids: Collection[str],
    allowed: Collection[TrialState],
    *,
    verb: str,
) -> dict[str, int]:
    """Return candidates' trial ids; ValueError with the history of one in no allowed state."""
    states: dict[str, tuple[int, str]] = {}
    for chunk in _chunks(candidate_ids):
        found = connection.execute(
            sa.select(trials.c.candidate_id, trials.c.trial_id, trials.c.state).where(
                trials.c.run_id == run_id, trials.c.candidate_id.in_(chunk)
            )
        )
        states.update({t.candidate_id: (t.trial_id, t.state) for t in found})
    for candidate_id in candidate_ids:
        if candidate_id not in states:
            raise ValueError(f"the store has no trial of {candidate_id}, so it cannot {verb}")
        trial_id, state = states[candidate_id]
        if TrialState(state) not in allowed:
            raise ValueError(
                f"trial {trial_id} is {state} and cannot {verb}:\n"
                + history(connection, run_id, candidate_id)
            )
    return {candidate_id: trial_id for candidate_id, (trial_id, _) in states.items()}


def _put_back(connection: Connection, failures: Mapping[int, Failure], *, at: float) -> None:
    for chunk in _chunks(failures):
        tries = connection.execute(
            sa.select(trials.c.trial_id, trials.c.attempts, trials.c.slice_id).where(
                trials.c.trial_id.in_(chunk)
            )
        )
        connection.execute(
            setbacks.insert(),
            [
                rows.setback_to_columns(failures[t.trial_id])
                | {"trial_id": t.trial_id, "attempt": t.attempts, "slice_id": t.slice_id, "at": at}
                for t in tries
            ],
        )
        connection.execute(
            trials.update()
            .where(trials.c.trial_id.in_(chunk))
            .values(state=TrialState.PROPOSED.value, started_at=None, slice_id=None)
        )


def _update_each(connection: Connection, columns: Mapping[int, Mapping[str, Any]]) -> None:
    if columns:
        names = next(iter(columns.values()))
        connection.execute(
            trials.update()
            .where(trials.c.trial_id == sa.bindparam("of_trial"))
            .values({name: sa.bindparam(f"new_{name}") for name in names}),
            [
                {"of_trial": trial_id} | {f"new_{name}": value for name, value in new.items()}
                for trial_id, new in columns.items()
            ],
        )


def numbers(connection: Connection, run_id: int, candidate_ids: Collection[str]) -> dict[str, int]:
    known: dict[str, int] = {}
    for chunk in _chunks(candidate_ids):
        found = connection.execute(
            sa.select(trials.c.candidate_id, trials.c.trial_id).where(
                trials.c.run_id == run_id, trials.c.candidate_id.in_(chunk)
            )
        )
        known.update(dict(found.all()))
    return known


def _only(wanted: sa.Select[Any], task_id: str | None, state: TrialState | None) -> sa.Select[Any]:
    if task_id is not None:
        wanted = wanted.where(trials.c.task_id == task_id)
    if state is not None:
        wanted = wanted.where(trials.c.state == state.value)
    return wanted


def _chunks(values: Iterable[_T]) -> Iterator[list[_T]]:
    rest = iter(values)
    while chunk := list(islice(rest, _CHUNK)):
        yield chunk


def _clock(secs: float) -> str:
    return datetime.fromtimestamp(secs, UTC).strftime("%Y-%m-%d %H:%M:%S")
