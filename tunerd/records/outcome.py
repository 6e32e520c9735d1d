"""The end of a run as the store keeps it, back as the value that it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from tunerd.records import typed
from tunerd.records.rows import with_sources
from tunerd.vocabulary import CapProof, Graph, Model, TargetSpec, TensorSpec
from tunerd.vocabulary.outcome import Comparison, Latency, Outcome, TaskOutcome, Verification


def outcome_from_json(value: Mapping[str, Any]) -> Outcome:
    """Read what to_json wrote of an Outcome; its model has no graph, and its winners no recipe.

    Raises ValueError or LookupError for anything else.
    """
    return Outcome(
        model=_model(typed.of_kind(dict[str, Any], value["model"])),
        target=typed.of_kind(TargetSpec, value["target"]),
        tasks=task_outcomes_from_json(value["tasks"]),
        verification=typed.of_kind(Verification, value["verification"]),
        latencies=typed.of_kind(tuple[Latency, ...], value["latencies"]),
        end_to_end=typed.of_kind(Comparison, value["end_to_end"]),
        artifact=typed.of_kind(str, value["artifact"]),
        proofs=typed.of_kind(tuple[CapProof, ...], value["proofs"]),
        disturbed_by=typed.of_kind(str, value.get("disturbed_by", "")),
        remarks=typed.of_kind(tuple[str, ...], value.get("remarks", [])),
    )


def task_outcomes_from_json(value: Any) -> tuple[TaskOutcome, ...]:
    """Read the tasks of an outcome, also those of older tunerds; raises as `outcome_from_json`."""
    tasks = typed.of_kind(tuple[dict[str, Any], ...], value)
    return tuple(typed.of_kind(TaskOutcome, with_sources(task)) for task in tasks)


def _model(value: Mapping[str, Any]) -> Model:
    return Model(
        name=typed.of_kind(str, value["name"]),
        digest=typed.of_kind(str, value["digest"]),
        inputs=typed.of_kind(tuple[TensorSpec, ...], value["inputs"]),
        outputs=typed.of_kind(tuple[TensorSpec, ...], value["outputs"]),
        graph=cast(Graph, None),  # a store has none
        notes=typed.of_kind(tuple[str, ...], value["notes"]),
        precision=typed.of_kind(str, value.get("precision", "")),
    )
