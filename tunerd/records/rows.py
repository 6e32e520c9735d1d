"""The values of the vocabulary as rows of the store, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from tunerd.vocabulary import (
    Activity,
    Candidate,
    Comparison,
    Conditions,
    Failure,
    Finalist,
    Kind,
    Measurement,
    Origin,
    Phase,
    PhaseTime,
    Record,
    Span,
    Stage,
    TargetSpec,
    Task,
    TaskOutcome,
    TensorSpec,
    TrialState,
    Verdict,
)

Row = Mapping[Any, Any]


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
    }


def task_from_row(row: Row) -> Task:
    return Task(
        task_id=row["task_id"],
        name=row["name"],
        weight=row["weight"],
        flops=row["flops"],
        args=tuple(
            TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in json.loads(row["args"])
        ),
        weight_args=tuple(json.loads(row["weight_args"])),
        target=TargetSpec(row["target_kind"], row["target_json"]),
        mod_json=row["mod_json"],
    )


def candidate_to_row(candidate: Candidate, *, now: float) -> dict[str, Any]:
    return {
        "task_id": candidate.task_id,
        "candidate_id": candidate.candidate_id,
        "origin": candidate.origin.value,
        "trace_json": candidate.trace_json,
        "state": TrialState.PROPOSED.value,
        "proposed_at": now,
    }


def measurement_to_columns(measurement: Measurement) -> dict[str, Any]:
    """Return the columns of a measured trial; raises ValueError where the samples are no times."""
    if not measurement.run_secs or not all(math.isfinite(s) for s in measurement.run_secs):
        raise ValueError(
            f"a measurement has finite samples, at least one; found {measurement.run_secs}: what "
            "has no number is a Failure"
        )
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
    }


def failure_to_columns(failure: Failure) -> dict[str, Any]:
    """Return the columns of a failed trial."""
    return setback_to_columns(failure) | {"state": TrialState.FAILED.value}


def setback_to_columns(failure: Failure) -> dict[str, Any]:
    """Return the columns of a failure that ended an attempt, not the trial."""
    # A compiler's output may hold bytes that are no text, which SQLite would refuse to store.
    message = failure.message.encode("utf-8", "replace").decode("utf-8")
    return {"stage": failure.stage.value, "kind": failure.kind.value, "message": message}


def record_from_row(row: Row) -> Record:
    state = TrialState(row["state"])
    result: Measurement | Failure | None = None
    if state is TrialState.MEASURED:
        result = Measurement(
            run_secs=tuple(json.loads(row["run_secs"])),
            calls_per_sample=row["calls_per_sample"],
            profile=row["profile"],
            slice_id=row["slice_id"],
            sm_count=row["sm_count"],
            conditions=Conditions(
                row["sm_clock_mhz"], row["temperature_c"], row["power_w"], row["neighbours"]
            ),
        )
    elif state is TrialState.FAILED:
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


def candidate_from_row(row: Row) -> Candidate:
    return Candidate(
        row["task_id"], row["candidate_id"], Origin(row["origin"]), trace_json=row["trace_json"]
    )


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
    return PhaseTime(
        phase=Phase(row["phase"]),
        start=row["start"],
        end=row["end"],
        session=row["session_id"],
        core_busy_secs=tuple((core, secs) for core, secs in json.loads(row["core_busy_secs"])),
    )


def task_outcome_from_json(value: Mapping[str, Any], winner: Candidate) -> TaskOutcome:
    """Read what to_json wrote of a TaskOutcome; the winner's trace is in its trial."""
    comparison = value["comparison"]
    return TaskOutcome(
        task_id=value["task_id"],
        name=value["name"],
        weight=value["weight"],
        trials=value["trials"],
        failed=value["failed"],
        default_secs=value["default_secs"],
        best_secs=value["best_secs"],
        winner=winner,
        comparison=None
        if comparison is None
        else Comparison(**{**comparison, "verdict": Verdict(comparison["verdict"])}),
        note=value["note"],
        finalists=tuple(_finalist_from_json(f) for f in value["finalists"]),
    )


def _finalist_from_json(value: Mapping[str, Any]) -> Finalist:
    return Finalist(
        candidate_id=value["candidate_id"],
        origin=Origin(value["origin"]),
        search_secs=value["search_secs"],
        measurement=_result_from_json(value["measurement"]),
    )


def _result_from_json(value: Mapping[str, Any]) -> Measurement | Failure:
    if "kind" in value:
        return Failure(Stage(value["stage"]), Kind(value["kind"]), value["message"])
    return Measurement(
        **{
            **value,
            "run_secs": tuple(value["run_secs"]),
            "conditions": Conditions(**value["conditions"]),
        }
    )
