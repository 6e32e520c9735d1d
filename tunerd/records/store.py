"""The store: every trial's start before it runs and its end when it ends."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import RowMapping

from tunerd.errors import FolderError
from tunerd.records import rows, runs, schema, trials, typed
from tunerd.records import task_outcomes as outcome_rows
from tunerd.records.conditions_key import Obtained
from tunerd.records.facts import RunFacts
from tunerd.records.opening import OpenStore, at
from tunerd.records.tally import Disturbed, Tally, disturbed, tally
from tunerd.stats.drift import BaselineCheck
from tunerd.vocabulary import (
    Build,
    Candidate,
    CapProof,
    Failure,
    Measurement,
    PhaseTime,
    Record,
    SliceSpec,
    Span,
    Task,
    TrialState,
    to_json,
)
from tunerd.vocabulary.outcome import Outcome, TaskOutcome

_PAGE = 500  # rows held at once while iterating; a trace is some 10 KB


class Store(OpenStore):
    """Trials of one run, in its folder or among other runs in a team's store.

    Of each run one process writes; any number reads, while it writes too. Each call is one
    transaction: when it returns, what it wrote survives `kill -9`. Calls may come from any thread.
    `now` is seconds since the epoch, the clock's where it is not given.
    """

    # --- what the run is ---------------------------------------------------------------------

    def facts(self) -> RunFacts:
        """Return the facts of the run's first session; FolderError where none has begun."""
        with self._reading() as connection:
            found = runs.first_facts(connection, self._run_id)
        if found is not None:
            return found
        raise FolderError(
            f"{self._name} holds a run that was killed before it began, and no trial; "
            "run its command again, or give another folder"
        )

    def sessions(self) -> list[tuple[float, RunFacts]]:
        """Return when each session began and its facts, in order."""
        with self._reading() as connection:
            return runs.all_sessions(connection, self._run_id)

    def register_tasks(self, tasks: Sequence[Task]) -> None:
        """Keep the tasks, in order; those that are known stay as they are."""
        self._insert(
            runs.put(self._connection, schema.tasks).on_conflict_do_nothing(),
            map(rows.task_to_row, tasks),
        )

    def tasks(self) -> list[Task]:
        wanted = self._all(schema.tasks).order_by(schema.tasks.c.position)
        with self._reading() as connection:
            return [rows.task_from_row(row) for row in connection.execute(wanted).mappings()]

    def save_slices(self, specs: Sequence[SliceSpec]) -> None:
        """Keep the slices as planned; a later session's plan replaces slices of the same id."""
        put = runs.put(self._connection, schema.slices)
        latest = {spec.slice_id: _dump(spec) for spec in specs}
        self._insert(
            put.on_conflict_do_update(
                index_elements=["run_id", "slice_id"], set_={"spec": put.excluded.spec}
            ),
            ({"slice_id": slice_id, "spec": spec} for slice_id, spec in latest.items()),
        )

    def slices(self) -> list[SliceSpec]:
        """Return the slices that any session planned, in the order of their ids."""
        wanted = self._all(schema.slices).order_by(schema.slices.c.slice_id)
        with self._reading() as connection:
            found = connection.execute(wanted).mappings()
            return [typed.from_json(SliceSpec, row["spec"]) for row in found]

    def save_proof(self, proof: CapProof, *, now: float | None = None) -> None:
        row = {"slice_id": proof.slice_id, "proved_at": at(now), "proof": _dump(proof)}
        self._insert(schema.proofs.insert(), [row])

    def proofs(self) -> list[CapProof]:
        """Return all proofs, oldest first; a slice that was started again has several."""
        table = schema.proofs
        wanted = (
            sa.select(table.c.proof)
            .where(table.c.run_id == self._run_id)
            .order_by(table.c.proof_id)
        )
        with self._reading() as connection:
            found = connection.execute(wanted).scalars()
            return [typed.from_json(CapProof, text) for text in found]

    # --- the life of a trial -----------------------------------------------------------------

    def propose(self, candidates: Sequence[Candidate], *, now: float | None = None) -> None:
        """Store a trial of each candidate.

        A candidate that is known, from an earlier session or from this very list, gets no second
        one: what follows names a trial by its candidate's id.
        """
        with self._transaction() as connection:
            trials.propose(connection, self._run_id, candidates, at=at(now))

    def built(self, builds: Sequence[Build]) -> None:
        """Note how trials that have not ended were compiled."""
        with self._transaction() as connection:
            trials.built(connection, self._run_id, builds)

    def start(
        self, candidate_ids: Sequence[str], slice_id: str, *, now: float | None = None
    ) -> None:
        """Store that proposed trials are about to run in a slice."""
        with self._transaction() as connection:
            trials.start(connection, self._run_id, candidate_ids, slice_id, at=at(now))

    def finish(
        self, candidate_id: str, result: Measurement | Failure, *, now: float | None = None
    ) -> None:
        """Store how a trial ended; see finish_all."""
        self.finish_all({candidate_id: result}, now=now)

    def finish_all(
        self, results: Mapping[str, Measurement | Failure], *, now: float | None = None
    ) -> None:
        """Store how trials ended: all of them or, where one cannot end, none.

        A failure of a kind that ends no trial puts it back to proposed and stays in its history.
        Raises ValueError with the history of a trial that ended before, or that has a measurement
        and was not started.
        """
        with self._transaction() as connection:
            trials.finish(connection, self._run_id, results, at=at(now))

    def interrupt(self, *, now: float | None = None) -> None:
        """Put running trials back to proposed, for a session that ends in order before they do.

        A session that is killed cannot; what the next one finds running may have ended it.
        """
        with self._transaction() as connection:
            trials.interrupt(connection, self._run_id, at=at(now))

    def requeue_unfinished(self, *, now: float | None = None) -> list[Record]:
        """Put running trials back to proposed, and return all trials that are proposed.

        For a session that goes on after another one was killed.
        """
        with self._transaction() as connection:
            trials.requeue_running(connection, self._run_id, at=at(now))
        return list(self.records(state=TrialState.PROPOSED))

    def lost(self) -> set[str]:
        """Return the ids of candidates whose open trial was lost with its slice or session."""
        with self._reading() as connection:
            return trials.lost(connection, self._run_id)

    def adopt(self, trial_rows: Iterable[Mapping[str, Any]]) -> None:
        """Insert trials of another run, as trial_rows yields them less their ids; all or none."""
        trial_rows = iter(trial_rows)
        with self._transaction() as connection:
            while page := list(islice(trial_rows, _PAGE)):
                found = [dict(row) | {"run_id": self._run_id} for row in page]
                connection.execute(schema.trials.insert(), found)

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
                    connection, self._run_id, after=last, limit=_PAGE, task_id=task_id, state=state
                )
            yield from page
            if len(page) < _PAGE:
                return
            last = page[-1]["trial_id"]

    def record(self, candidate_id: str) -> Record:
        """Return the trial of a candidate; raises KeyError where there is none."""
        with self._transaction() as connection:
            row = trials.row(connection, self._run_id, candidate_id)
        with self._decoding():
            return rows.record_from_row(row)

    def trial_ids(self, candidate_ids: Collection[str]) -> dict[str, int]:
        """Return the number of each candidate's trial, which names its log."""
        with self._reading() as connection:
            return trials.numbers(connection, self._run_id, candidate_ids)

    def counts(
        self, task_id: str | None = None, is_default: bool | None = None
    ) -> dict[TrialState, int]:
        """Return how many trials are in each state; `is_default` leaves out defaults or others."""
        with self._transaction() as connection:
            return trials.counts(connection, self._run_id, task_id, is_default)

    def tally(self, *, since: float) -> Tally:
        """Return how far the run is, with what ended `since` a time, seconds since the epoch."""
        with self._reading() as connection:
            return tally(connection, self._run_id, since=since)

    def best(self, task_id: str, is_default: bool | None = None) -> Record | None:
        """Return the measured trial of least median, the earliest of equals."""
        with self._reading() as connection:
            return trials.best(connection, self._run_id, task_id, is_default)

    def ranked(self, task_id: str) -> list[tuple[int, float | None]]:
        """Return the ids and medians of a task's ended search trials: fastest first, failed last.

        Of equals the earliest is first. Raises FolderError where a median is not that of its
        trial's samples, or those are no times.
        """
        with self._reading() as connection:
            return trials.ranked(connection, self._run_id, task_id)

    def disturbed(self) -> Disturbed:
        """Count the trials that were measured beside others, or with clocks held down."""
        with self._reading() as connection:
            return disturbed(connection, self._run_id)

    def recipes(self, trial_ids: Sequence[int]) -> list[tuple[str, str]]:
        """Return the trials' sources and recipes, in order; KeyError where there is no such trial.

        Raises FolderError where one is damaged.
        """
        with self._reading() as connection:
            found = trials.recipes(connection, self._run_id, trial_ids)
        return [found[i] for i in trial_ids]

    def history(self, candidate_id: str) -> str:
        """Tell what happened to a candidate's trial, a line per event; KeyError without one."""
        with self._transaction() as connection:
            return trials.history(connection, self._run_id, candidate_id)

    # --- the result, and where time went -----------------------------------------------------

    def save_task_outcome(
        self, outcome: TaskOutcome, *, on: Obtained | None = None, now: float | None = None
    ) -> None:
        """Keep what a task ends with, so that a killed session need not measure it again.

        `on` is what it was measured on, `obtained` where it is not given; without either, no other
        run takes it.
        """
        self.save_task_outcomes([(outcome, on or self.obtained)], now=now)

    def save_task_outcomes(
        self,
        measured_outcomes: Sequence[tuple[TaskOutcome, Obtained | None]],
        *,
        now: float | None = None,
    ) -> None:
        """Keep outcomes, each with what it was measured on: all of them or none."""
        with self._transaction() as connection:
            outcome_rows.save(connection, self._run_id, measured_outcomes, at=at(now))

    def task_outcomes(self) -> list[TaskOutcome]:
        """Return the outcomes in the order of the tasks."""
        return [outcome for outcome, _ in self.measured_outcomes()]

    def measured_outcomes(self) -> list[tuple[TaskOutcome, Obtained | None]]:
        """Return the outcomes in the order of the tasks, with what each was measured on."""
        with self._reading() as connection:
            return outcome_rows.of_run(connection, self._run_id)

    def measured_on(self, on: Obtained, task_ids: Sequence[str]) -> dict[str, list[TaskOutcome]]:
        """Return what other runs of this store measured of tasks on the same, the newest first."""
        with self._reading() as connection:
            return outcome_rows.measured_on(connection, on, task_ids, except_run=self.identity)

    def save_outcome(self, outcome: Outcome, *, now: float | None = None) -> None:
        """Keep how a session ended; earlier ones stay."""
        self._insert(schema.outcomes.insert(), [{"saved_at": at(now), "outcome": _dump(outcome)}])

    def outcome(self) -> dict[str, Any] | None:
        """Return the last outcome as to_json wrote it, or None while there is none."""
        table = schema.outcomes
        wanted = (
            sa.select(table.c.outcome)
            .where(table.c.run_id == self._run_id)
            .order_by(table.c.outcome_id.desc())
            .limit(1)
        )
        with self._reading() as connection:
            text = connection.execute(wanted).scalar()
            return None if text is None else typed.from_json(dict[str, Any], text)

    def outcome_saved_at(self) -> float | None:
        """Return when the last outcome was kept, or None while there is none."""
        table = schema.outcomes
        wanted = sa.select(sa.func.max(table.c.saved_at)).where(table.c.run_id == self._run_id)
        with self._reading() as connection:
            found = connection.execute(wanted).scalar()
            return None if found is None else typed.of_kind(float, found)

    def add_spans(self, spans: Iterable[Span]) -> None:
        self._insert(schema.spans.insert(), map(rows.span_to_row, spans))

    def spans(self) -> list[Span]:
        """Return where the workers' time went, in the order in which it was told."""
        wanted = self._all(schema.spans).order_by(schema.spans.c.span_id)
        with self._reading() as connection:
            return [rows.span_from_row(row) for row in connection.execute(wanted).mappings()]

    def add_phase(self, phase: PhaseTime) -> None:
        self._insert(schema.phases.insert(), [rows.phase_to_row(phase)])

    def phases(self) -> list[PhaseTime]:
        """Return the phases that ended; one that was killed in is not there."""
        wanted = self._all(schema.phases).order_by(schema.phases.c.row_id)
        with self._reading() as connection:
            return [rows.phase_from_row(row) for row in connection.execute(wanted).mappings()]

    def add_baseline_check(
        self, task_id: str, measurement: Measurement, busy_secs: float, *, now: float | None = None
    ) -> None:
        """Keep a run of the baseline, the default of `task_id`, in the measurement's slice."""
        check = BaselineCheck(at(now), self.session, task_id, busy_secs, measurement)
        self._insert(schema.spot_checks.insert(), [rows.baseline_check_to_row(check)])

    def baseline_checks(self) -> list[BaselineCheck]:
        """Return all runs of baselines, in order."""
        wanted = self._all(schema.spot_checks).order_by(schema.spot_checks.c.check_id)
        with self._reading() as connection:
            return [
                rows.baseline_check_from_row(row) for row in connection.execute(wanted).mappings()
            ]


def _dump(value: Any) -> str:
    return json.dumps(to_json(value))
