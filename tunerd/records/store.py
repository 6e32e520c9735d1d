"""The store: every trial's start before it runs and its end when it ends, in SQLite."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.engine import Connection, RowMapping
from sqlalchemy.exc import DatabaseError, IntegrityError, NoResultFound, ProgrammingError

from tunerd import clock
from tunerd.drift import SpotCheck
from tunerd.errors import FolderError
from tunerd.records import rows, schema, trials, typed
from tunerd.records.facts import RunFacts, refuse_other_run
from tunerd.records.problems import problem_of
from tunerd.vocabulary import (
    Build,
    Candidate,
    CapProof,
    Failure,
    Measurement,
    Origin,
    Outcome,
    PhaseTime,
    Record,
    SliceSpec,
    Span,
    Task,
    TaskOutcome,
    TrialState,
    to_json,
)

_PAGE = 500  # rows held at once while iterating; a trace is some 10 KB


class Store:
    """Trials of one run. One process writes; any number reads, while it writes too.

    Each call is one transaction: when it returns, what it wrote survives `kill -9`. Calls may come
    from any thread. `now` is seconds since the epoch, the clock's where it is not given.
    """

    def __init__(self, path: Path, connection: Connection, *, is_snapshot: bool) -> None:
        self._path = path
        self._connection = connection
        self._is_snapshot = is_snapshot
        self.session = 0  # the number of the session that writes, from 1
        self._lock = threading.Lock()

    @classmethod
    def create_or_open(cls, folder: Path, *, facts: RunFacts, now: float | None = None) -> Self:
        """Open the store of a run folder for writing, and note this session in it.

        Raises FolderError where it holds a run of another model, device or share, was written by
        a newer tunerd, or cannot be written. RunFolder's lock sees to it that one process writes.
        """
        path = folder / schema.STORE_NAME
        connection = schema.open_writer(path)
        store = cls(path, connection, is_snapshot=False)
        try:
            with store._transaction():
                first = connection.execute(_first_session()).scalar()
                if first is not None:
                    with store._decoding():
                        refuse_other_run(_facts_from(first), facts, folder)
                connection.execute(
                    schema.sessions.insert(),
                    {"opened_at": _at(now), "pid": os.getpid(), "facts": _dump(facts.to_json())},
                )
                last = sa.select(sa.func.max(schema.sessions.c.session_id))
                store.session = connection.execute(last).scalar_one()
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Open a run folder's store as it is at this moment; FolderError where there is none."""
        path = folder / schema.STORE_NAME
        return cls(path, schema.open_reader(path), is_snapshot=True)

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        except (DatabaseError, UnicodeDecodeError) as error:
            if isinstance(error, IntegrityError | ProgrammingError):
                raise
            problem = None
            if isinstance(error, DatabaseError) and not self._is_snapshot:
                problem = problem_of(self._path, error)
            reason = getattr(error, "orig", None) or error
            raise problem or FolderError(
                f"{self._path} cannot be used: {reason}; copy the run folder again, or name "
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

    def damaged(self, found: str) -> FolderError:
        """Return the error of a store that holds what no run can have put there."""
        return FolderError(
            f"{self._path} holds what is no record of a run ({found}); it is damaged, or another "
            "program wrote to it: copy the run folder again, or name another one"
        )

    # --- what the run is ---------------------------------------------------------------------

    def facts(self) -> RunFacts:
        """Return the facts of the run's first session; FolderError where none has begun."""
        with self._reading() as connection:
            text = connection.execute(_first_session()).scalar()
            if text is not None:
                return _facts_from(text)
        raise FolderError(
            f"{self._path.parent} holds a run that was killed before it began, and no trial; "
            "run its command again, or give another folder"
        )

    def sessions(self) -> list[tuple[float, RunFacts]]:
        """Return when each session began and its facts, in order."""
        table = schema.sessions
        wanted = sa.select(table.c.opened_at, table.c.facts).order_by(table.c.session_id)
        with self._reading() as connection:
            found = connection.execute(wanted).all()
            return [(typed.of_kind(float, at), _facts_from(facts)) for at, facts in found]

    def register_tasks(self, tasks: Sequence[Task]) -> None:
        """Keep the tasks, in order; those that are known stay as they are."""
        self._insert(insert(schema.tasks).on_conflict_do_nothing(), map(rows.task_to_row, tasks))

    def tasks(self) -> list[Task]:
        wanted = sa.select(schema.tasks).order_by(schema.tasks.c.position)
        with self._reading() as connection:
            return [rows.task_from_row(row) for row in connection.execute(wanted).mappings()]

    def save_slices(self, specs: Sequence[SliceSpec]) -> None:
        """Keep the slices as planned; a later session's plan replaces slices of the same id."""
        put = insert(schema.slices)
        self._insert(
            put.on_conflict_do_update(
                index_elements=["slice_id"], set_={"spec": put.excluded.spec}
            ),
            ({"slice_id": spec.slice_id, "spec": _dump(spec)} for spec in specs),
        )

    def save_proof(self, proof: CapProof, *, now: float | None = None) -> None:
        row = {"slice_id": proof.slice_id, "proved_at": _at(now), "proof": _dump(proof)}
        self._insert(schema.proofs.insert(), [row])

    def proofs(self) -> list[CapProof]:
        """Return all proofs, oldest first; a slice that was started again has several."""
        wanted = sa.select(schema.proofs.c.proof).order_by(schema.proofs.c.proof_id)
        with self._reading() as connection:
            found = connection.execute(wanted).scalars()
            return [typed.from_json(CapProof, text) for text in found]

    # --- the life of a trial -----------------------------------------------------------------

    def propose(self, candidates: Sequence[Candidate], *, now: float | None = None) -> list[int]:
        """Return a trial id per candidate, in order.

        A candidate that is known, from an earlier session or from this very list, gets no second
        trial: its id is returned, in whatever state that trial is.
        """
        with self._transaction() as connection:
            return trials.propose(connection, candidates, at=_at(now))

    def built(self, trial_id: int, build: Build) -> None:
        """Note how a trial that has not ended was compiled."""
        with self._transaction() as connection:
            trials.built(connection, trial_id, build)

    def start(self, trial_ids: Sequence[int], slice_id: str, *, now: float | None = None) -> None:
        """Store that proposed trials are about to run in a slice."""
        with self._transaction() as connection:
            trials.start(connection, trial_ids, slice_id, at=_at(now))

    def finish(
        self, trial_id: int, result: Measurement | Failure, *, now: float | None = None
    ) -> None:
        """Store how a trial ended; see finish_all."""
        self.finish_all({trial_id: result}, now=now)

    def finish_all(
        self, results: Mapping[int, Measurement | Failure], *, now: float | None = None
    ) -> None:
        """Store how trials ended: all of them or, where one cannot end, none.

        A failure of a kind that ends no trial puts it back to proposed and stays in its story.
        Raises ValueError with the story of a trial that ended before, or that has a measurement
        and was not started.
        """
        with self._transaction() as connection:
            trials.finish(connection, results, at=_at(now))

    def requeue_unfinished(self, *, now: float | None = None) -> list[Record]:
        """Put running trials back to proposed, and return all trials that are proposed.

        For a session that goes on after another one was killed.
        """
        with self._transaction() as connection:
            trials.requeue_running(connection, at=_at(now))
        return list(self.records(state=TrialState.PROPOSED))

    def adopt(self, trial_rows: Iterable[Mapping[str, Any]]) -> None:
        """Insert trials of another run, as trial_rows yields them less their ids; all or none."""
        trial_rows = iter(trial_rows)
        with self._transaction() as connection:
            while page := list(islice(trial_rows, _PAGE)):
                connection.execute(schema.trials.insert(), page)

    # --- reading trials ----------------------------------------------------------------------

    def records(
        self, task_id: str | None = None, state: TrialState | None = None
    ) -> Iterator[Record]:
        """Yield trials in the order of their ids, read a page at a time."""
        for row in self._rows(task_id, state):
            with self._decoding():
                record = rows.record_from_row(row)
            yield record

    def trial_rows(
        self, task_id: str | None = None, state: TrialState | None = None
    ) -> Iterator[RowMapping]:
        """Yield the rows behind `records`; their columns are schema.trials."""
        for row in self._rows(task_id, state):
            with self._decoding():
                rows.record_from_row(row)
            yield row

    def _rows(self, task_id: str | None, state: TrialState | None) -> Iterator[RowMapping]:
        last = 0
        while True:
            with self._transaction() as connection:
                page = trials.page(
                    connection, after=last, limit=_PAGE, task_id=task_id, state=state
                )
            yield from page
            if len(page) < _PAGE:
                return
            last = page[-1]["trial_id"]

    def record(self, trial_id: int) -> Record:
        """Return one trial; raises KeyError where there is none of this id."""
        with self._transaction() as connection:
            row = trials.row(connection, trial_id)
        with self._decoding():
            return rows.record_from_row(row)

    def counts(self, task_id: str | None = None) -> dict[TrialState, int]:
        """Return how many trials are in each state, of one task or of all."""
        with self._transaction() as connection:
            return trials.counts(connection, task_id)

    def best(self, task_id: str, origin: Origin | None = None) -> Record | None:
        """Return the measured trial of least median, the earliest of equals."""
        with self._reading() as connection:
            return trials.best(connection, task_id, origin)

    def ranked(self, task_id: str) -> list[tuple[int, float | None]]:
        """Return the ids and medians of a task's ended search trials: fastest first, failed last.

        Of equals the earliest is first.
        """
        with self._reading() as connection:
            return trials.ranked(connection, task_id)

    def traces(self, trial_ids: Sequence[int]) -> list[str]:
        """Return the trials' traces, in order; KeyError where there is no such trial."""
        with self._reading() as connection:
            found = trials.traces(connection, trial_ids)
        return [found[i] for i in trial_ids]

    def story(self, trial_id: int) -> str:
        """Tell what happened to a trial, a line per event; KeyError where there is none."""
        with self._transaction() as connection:
            return trials.story(connection, trial_id)

    # --- the result, and where time went -----------------------------------------------------

    def save_task_outcome(self, outcome: TaskOutcome, *, now: float | None = None) -> None:
        """Keep what a task ends with, so that a killed session need not measure it again.

        The winner must have been proposed: its trace is kept in its trial.
        """
        put = insert(schema.task_outcomes)
        row = {"task_id": outcome.task_id, "saved_at": _at(now), "outcome": _dump(outcome)}
        self._insert(
            put.on_conflict_do_update(
                index_elements=["task_id"],
                set_={"saved_at": put.excluded.saved_at, "outcome": put.excluded.outcome},
            ),
            [row],
        )

    def task_outcomes(self) -> list[TaskOutcome]:
        """Return the outcomes in the order of the tasks."""
        table = schema.task_outcomes
        wanted = sa.select(table.c.outcome).join(schema.tasks).order_by(schema.tasks.c.position)
        found = []
        with self._reading() as connection:
            for text in connection.execute(wanted).scalars().all():
                value = typed.from_json(dict[str, Any], text)
                winner = trials.by_candidate(connection, value["winner"]["candidate_id"])
                found.append(rows.task_outcome_from_json(value, rows.candidate_from_row(winner)))
        return found

    def save_outcome(self, outcome: Outcome, *, now: float | None = None) -> None:
        """Keep how a session ended; earlier ones stay."""
        self._insert(schema.outcomes.insert(), [{"saved_at": _at(now), "outcome": _dump(outcome)}])

    def outcome(self) -> dict[str, Any] | None:
        """Return the last outcome as to_json wrote it, or None while there is none."""
        table = schema.outcomes
        wanted = sa.select(table.c.outcome).order_by(table.c.outcome_id.desc()).limit(1)
        with self._reading() as connection:
            text = connection.execute(wanted).scalar()
            return None if text is None else typed.from_json(dict[str, Any], text)

    def add_spans(self, spans: Iterable[Span]) -> None:
        self._insert(schema.spans.insert(), map(rows.span_to_row, spans))

    def spans(self) -> list[Span]:
        """Return where the workers' time went, in the order in which it was told."""
        wanted = sa.select(schema.spans).order_by(schema.spans.c.span_id)
        with self._reading() as connection:
            return [rows.span_from_row(row) for row in connection.execute(wanted).mappings()]

    def add_phase(self, phase: PhaseTime) -> None:
        self._insert(schema.phases.insert(), [rows.phase_to_row(phase)])

    def phases(self) -> list[PhaseTime]:
        """Return the phases that ended; one that was killed in is not there."""
        wanted = sa.select(schema.phases).order_by(schema.phases.c.row_id)
        with self._reading() as connection:
            return [rows.phase_from_row(row) for row in connection.execute(wanted).mappings()]

    def add_spot_check(
        self, task_id: str, measurement: Measurement, busy_secs: float, *, now: float | None = None
    ) -> None:
        """Keep a run of the sentinel, the default of `task_id`, in the measurement's slice."""
        check = SpotCheck(_at(now), self.session, task_id, busy_secs, measurement)
        self._insert(schema.spot_checks.insert(), [rows.spot_check_to_row(check)])

    def spot_checks(self) -> list[SpotCheck]:
        """Return all runs of sentinels, in order."""
        wanted = sa.select(schema.spot_checks).order_by(schema.spot_checks.c.check_id)
        with self._reading() as connection:
            return [rows.spot_check_from_row(row) for row in connection.execute(wanted).mappings()]

    def _insert(self, statement: sa.Insert, values: Iterable[Mapping[str, Any]]) -> None:
        values = list(values)
        if values:
            with self._transaction() as connection:
                connection.execute(statement, values)


def _first_session() -> sa.Select[Any]:
    table = schema.sessions
    return sa.select(table.c.facts).order_by(table.c.session_id).limit(1)


def _facts_from(text: str) -> RunFacts:
    return RunFacts.from_json(typed.from_json(dict[str, Any], text))


def _at(now: float | None) -> float:
    return clock.now() if now is None else now


def _dump(value: Any) -> str:
    return json.dumps(to_json(value))
