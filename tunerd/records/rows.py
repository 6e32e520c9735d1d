"""The values of the vocabulary as rows of the store, and back."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from statistics import median
from typing import Any

from tunerd.records import schema, typed
from tunerd.records.conditions_key import Obtained
from tunerd.stats.drift import BaselineCheck
from tunerd.vocabulary import (
    Activity,
    Candidate,
    Conditions,
    Failure,
    Kind,
    Measurement,
    Phase,
    PhaseTime,
    Record,
    Span,
    Stage,
    TargetSpec,
    Task,
    TensorSpec,
    TrialState,
    source_of,
    to_json,
)
from tunerd.vocabulary.outcome import TaskOutcome

_NO_TIME_SECS = 1e9  # TVM's databases hold 1e10 for a candidate that failed
Row = Mapping[Any, Any]
_Args = tuple[tuple[str, tuple[int, ...], str], ...]


def task_to_row(task: Task) -> dict[str, Any]:
    return {
        "task_id": task.task_id,
        "name": task.name,
        "weight": task.weight,
        "flops": task.flops,
        "args": json.dumps([[a.name, list(a.shape), a.dtype] for a in task.args]),
        "weight_args": json.dumps(list(task.weight_args)),
        "target_kind": task.target.kind,
        "target_json": task.target.json,
        "mod_json": task.mod_json,
        "precision": task.precision,
        "tenants": task.tenants,
    }


def task_from_row(row: Row) -> Task:
    """Return a task; this and what follows raise ValueError for a row that cannot be ours."""
    typed.check_row(row, schema.tasks)
    if row["tenants"] < 1:
        raise ValueError(f"a task of {row['tenants']} models")
    args = typed.from_json(_Args, row["args"])
    return Task(
        task_id=row["task_id"],
        name=row["name"],
        weight=row["weight"],
        flops=row["flops"],
        args=tuple(TensorSpec(*arg) for arg in args),
        weight_args=typed.from_json(tuple[int, ...], row["weight_args"]),
        target=TargetSpec(row["target_kind"], row["target_json"]),
        mod_json=row["mod_json"],
        precision=row["precision"],
        tenants=row["tenants"],
    )


def candidate_to_row(candidate: Candidate, *, now: float) -> dict[str, Any]:
    return {
        "task_id": candidate.task_id,
        "candidate_id": candidate.candidate_id,
        "source": candidate.source,
        "recipe": candidate.recipe,
        "state": TrialState.PROPOSED.value,
        "proposed_at": now,
    }


def measurement_to_columns(measurement: Measurement) -> dict[str, Any]:
    """Return the columns of a measured trial; raises ValueError where the samples are no times."""
    _require_times(measurement.run_secs)
    conditions = measurement.conditions
    return {
        "state": TrialState.MEASURED.value,
        "run_secs": json.dumps(list(measurement.run_secs)),
        "median_secs": measurement.median_secs,
        "calls_per_sample": measurement.calls_per_sample,
        "profile": measurement.profile,
        "slice_id": measurement.slice_id,
        "sm_count": measurement.sm_count,
        "sm_clock_mhz": conditions.sm_clock_mhz,
        "temperature_c": conditions.temperature_c,
        "power_w": conditions.power_w,
        "neighbours": conditions.neighbours,
        "strangers": conditions.strangers,
        "disturbed_by": conditions.disturbed_by,
    }


def _require_times(run_secs: tuple[float, ...]) -> None:
    if not run_secs or not all(0 <= s < _NO_TIME_SECS for s in run_secs):
        raise ValueError(
            f"a measurement has finite samples, at least one; found {run_secs}: what has no "
            "number is a Failure"
        )


def secs_of_ended(row: Row) -> float | None:
    """Return the median of a trial that has ended, None of one that failed.

    The store ranks by it. Raises ValueError where it is not that of the trial's samples.
    """
    found = row["median_secs"]
    if TrialState(row["state"]) is TrialState.FAILED:
        if found is not None:
            raise ValueError(f"a trial that failed took {str(found)[:40]!r} seconds")
        return None
    _require(row, "run_secs")
    run_secs = typed.from_json(tuple[float, ...], row["run_secs"])
    _require_times(run_secs)
    _require_median(found, run_secs)
    return float(found)


def _require_median(found: Any, run_secs: tuple[float, ...]) -> None:
    expected = median(run_secs)
    if not isinstance(found, int | float) or not math.isclose(found, expected, rel_tol=1e-6):
        raise ValueError(f"the median of {run_secs} is {expected}, not {str(found)[:40]!r}")


def failure_to_columns(failure: Failure) -> dict[str, Any]:
    """Return the columns of a failed trial."""
    return setback_to_columns(failure) | {"state": TrialState.FAILED.value}


def setback_to_columns(failure: Failure) -> dict[str, Any]:
    """Return the columns of a failure that ended an attempt, not the trial."""
    # A compiler's output may hold bytes that are no text, which SQLite would refuse to store.
    message = failure.message.encode("utf-8", "replace").decode("utf-8")
    return {"stage": failure.stage.value, "kind": failure.kind.value, "message": message}


def record_from_row(row: Row) -> Record:
    typed.check_row(row, schema.trials)
    state = TrialState(row["state"])
    result: Measurement | Failure | None = None
    if state is TrialState.MEASURED:
        _require(row, "run_secs", "calls_per_sample", "profile", "slice_id", "sm_count")
        run_secs = typed.from_json(tuple[float, ...], row["run_secs"])
        _require_times(run_secs)
        _require_median(row["median_secs"], run_secs)
        result = Measurement(
            run_secs=run_secs,
            calls_per_sample=row["calls_per_sample"],
            profile=row["profile"],
            slice_id=row["slice_id"],
            sm_count=row["sm_count"],
            conditions=Conditions(
                sm_clock_mhz=row["sm_clock_mhz"],
                temperature_c=row["temperature_c"],
                power_w=row["power_w"],
                neighbours=row["neighbours"],
                strangers=row["strangers"],
                disturbed_by=row["disturbed_by"] or "",
            ),
        )
    elif state is TrialState.FAILED:
        _require(row, "stage", "kind", "message")
        result = Failure(Stage(row["stage"]), Kind(row["kind"]), row["message"])
    return Record(
        trial_id=row["trial_id"],
        candidate=candidate_from_row(row),
        state=state,
        result=result,
        proposed_at=row["proposed_at"],
        started_at=row["started_at"],
        ended_at=row["ended_at"],
        slice_id=row["slice_id"],
        build_secs=row["build_secs"],
        library_sha256=row["library_sha256"],
        attempts=row["attempts"],
    )


def _require(row: Row, *names: str) -> None:
    for name in names:
        if row[name] is None:
            raise ValueError(f"a trial that is {row['state']} has no {name}")


def candidate_from_row(row: Row) -> Candidate:
    return Candidate(row["task_id"], row["candidate_id"], row["source"], recipe=row["recipe"])


def span_to_row(span: Span) -> dict[str, Any]:
    return {
        "worker": span.worker,
        "activity": span.activity.value,
        "start": span.start,
        "end": span.end,
        "role": span.role,
        "session_id": span.session,
        "items": span.items,
        "task_id": span.task_id,
        "busy_secs": span.busy_secs,
        "cpu_secs": span.cpu_secs,
    }


def span_from_row(row: Row) -> Span:
    typed.check_row(row, schema.spans)
    return Span(
        worker=row["worker"],
        activity=Activity(row["activity"]),
        start=row["start"],
        end=row["end"],
        role=row["role"],
        session=row["session_id"],
        items=row["items"],
        task_id=row["task_id"],
        busy_secs=row["busy_secs"],
        cpu_secs=row["cpu_secs"],
    )


def phase_to_row(phase: PhaseTime) -> dict[str, Any]:
    return {
        "session_id": phase.session,
        "phase": phase.phase.value,
        "start": phase.start,
        "end": phase.end,
        "core_busy_secs": json.dumps(phase.core_busy_secs),
    }


def phase_from_row(row: Row) -> PhaseTime:
    typed.check_row(row, schema.phases)
    return PhaseTime(
        phase=Phase(row["phase"]),
        start=row["start"],
        end=row["end"],
        session=row["session_id"],
        core_busy_secs=typed.from_json(tuple[tuple[int, float], ...], row["core_busy_secs"]),
    )


def winner_of(row: Row) -> dict[str, Any]:
    """Return what a row of task_outcomes says of the winner, which lacks its recipe."""
    value = with_sources(typed.from_json(dict[str, Any], row["outcome"]))
    return typed.of_kind(dict[str, Any], value["winner"])


def with_sources(outcome: dict[str, Any]) -> dict[str, Any]:
    """Return what to_json said of a task's outcome with sources; old ones have origins alone."""

    def named(entry: dict[str, Any]) -> dict[str, Any]:
        return {"source": source_of(entry["origin"]), **entry} if "origin" in entry else entry

    finalists = [named(entry) for entry in outcome.get("finalists", ())]
    return {**outcome, "winner": named(outcome["winner"]), "finalists": finalists}


def task_outcome_from_row(
    row: Row, winner: Candidate | None
) -> tuple[TaskOutcome, Obtained | None]:
    """Read an outcome, and what it was measured on where that was noted.

    `winner` is given where the row has not its recipe.
    """
    typed.check_row(row, schema.task_outcomes)
    value = with_sources(typed.from_json(dict[str, Any], row["outcome"]))
    if winner is None:
        winner = typed.of_kind(Candidate, {**value["winner"], "recipe": row["winner_recipe"]})
    outcome = typed.of_kind(TaskOutcome, {**value, "winner": winner})
    names = [f.name for f in dataclasses.fields(Obtained)]
    is_noted = row["device"] is not None
    return outcome, Obtained(**{n: row[n] for n in names}) if is_noted else None


def baseline_check_to_row(check: BaselineCheck) -> dict[str, Any]:
    _require_times(check.measurement.run_secs)
    return {
        "session_id": check.session,
        "at": check.at,
        "task_id": check.task_id,
        "busy_secs": check.busy_secs,
        "measurement": json.dumps(to_json(check.measurement)),
    }


def baseline_check_from_row(row: Row) -> BaselineCheck:
    typed.check_row(row, schema.spot_checks)
    measurement = typed.from_json(Measurement, row["measurement"])
    _require_times(measurement.run_secs)
    if measurement.median_secs <= 0:
        raise ValueError("a spot check took no time")
    return BaselineCheck(
        row["at"], row["session_id"], row["task_id"], row["busy_secs"], measurement
    )
