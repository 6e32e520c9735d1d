"""A line per trial, for people's own tools: parquet, CSV, JSON lines."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from tunerd.errors import FolderError
from tunerd.records.store import Store
from tunerd.system.files import written_whole
from tunerd.system.text import reason_of
from tunerd.vocabulary import DEFAULT_SOURCE, TrialState, origin_of

if TYPE_CHECKING:
    import pandas as pd

# Names and pandas types in the order of the export. What a trial has not is empty, never a number.
COLUMNS = {
    "trial_id": "Int64",
    "task_id": "string",
    "task": "string",
    "weight": "Int64",
    "precision": "string",
    "tenants": "Int64",
    "candidate_id": "string",
    "origin": "string",
    "source": "string",
    "state": "string",
    "median_secs": "Float64",
    "run_secs": "object",
    "calls_per_sample": "Int64",
    "stage": "string",
    "kind": "string",
    "message": "string",
    "proposed_at": "Float64",
    "started_at": "Float64",
    "ended_at": "Float64",
    "attempts": "Int64",
    "build_secs": "Float64",
    "compiler": "string",
    "library_sha256": "string",
    "profile": "string",
    "slice_id": "string",
    "sm_count": "Int64",
    "device": "string",
    "device_sm_count": "Int64",
    "mechanism": "string",
    "driver": "string",
    "pct": "Int64",
    "model": "string",
    "model_digest": "string",
    "target": "string",
    "tvm_version": "string",
    "sm_clock_mhz": "Int64",
    "temperature_c": "Int64",
    "power_w": "Float64",
    "neighbours": "Int64",
    "strangers": "Int64",
    "disturbed_by": "string",
    "trace_json": "string",  # the recipe, which is a trace where MetaSchedule is the source
}


_ENDED = (TrialState.MEASURED.value, TrialState.FAILED.value)


@dataclass(frozen=True)
class Written:
    """How many lines an export has."""

    trials: int  # of the search, that ended
    open: int  # of the search, proposed or running
    default_schedules: int

    @classmethod
    def of(cls, kinds: Iterable[tuple[str, str]]) -> Self:
        """Count trials by their sources and states."""
        found = list(kinds)
        ended = [state in _ENDED for source, state in found if source != DEFAULT_SOURCE]
        return cls(sum(ended), len(ended) - sum(ended), len(found) - len(ended))


Write = Callable[[Store, IO[bytes]], Written]


def export_rows(store: Store) -> Iterator[dict[str, Any]]:
    """Yield each trial with what it was measured on, its keys those of COLUMNS in order.

    Mechanism and driver are those of the slice's last proof.
    """
    facts = store.facts()
    tasks = {task.task_id: task for task in store.tasks()}
    proofs = {proof.slice_id: proof for proof in store.proofs()}
    run = {
        "device": facts.device,
        "pct": facts.pct,
        "model": facts.model_name,
        "model_digest": facts.model_digest,
        "target": facts.target.kind,
        "tvm_version": facts.tvm_version,
    }
    for trial in store.trial_rows():
        task = tasks.get(trial["task_id"])
        if task is None:
            raise store.damaged(f"trial {trial['trial_id']} is of a task that it has not")
        row = dict(trial) | run
        row |= {"origin": origin_of(trial["source"]), "trace_json": trial["recipe"]}
        row |= {"task": task.name, "weight": task.weight}
        row |= {"precision": task.precision, "tenants": task.tenants}
        if row["run_secs"] is not None:
            row["run_secs"] = json.loads(row["run_secs"])
        if (proof := proofs.get(trial["slice_id"])) is not None:
            row |= {
                "device": proof.device,
                "device_sm_count": proof.device_sm_count,
                "mechanism": proof.mechanism,
                "driver": proof.driver,
            }
        yield {name: row.get(name) for name in COLUMNS}


def write_json(store: Store, stream: IO[bytes]) -> Written:
    """Write one JSON object per line and trial; return how many."""
    kinds = []
    for row in export_rows(store):
        stream.write(json.dumps(row).encode() + b"\n")
        kinds.append((row["source"], row["state"]))
    return Written.of(kinds)


def write_csv(store: Store, stream: IO[bytes]) -> Written:
    """Write a line per trial and return how many.

    The samples are a JSON list in one field; traces, of some 10 KB each, are left out.
    """
    table = trials_table(store)
    table["run_secs"] = table["run_secs"].map(json.dumps, na_action="ignore")
    stream.write(table.drop(columns="trace_json").to_csv(index=False).encode())
    return Written.of(zip(table["source"], table["state"], strict=True))


def write_parquet(store: Store, stream: IO[bytes]) -> Written:
    """Write a row per trial, the samples as a list, and return how many."""
    table = trials_table(store)
    table.to_parquet(
        stream, engine="pyarrow", index=False, compression="zstd", schema=_arrow_schema()
    )
    return Written.of(zip(table["source"], table["state"], strict=True))


WRITERS: dict[str, Write] = {"parquet": write_parquet, "csv": write_csv, "json": write_json}


def write_file(store: Store, file: Path, write: Write) -> Written:
    """Write a file that appears under its name when it is whole; FolderError where it cannot be."""
    try:
        if not file.name:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with written_whole(file, sync=False) as stream:
            return write(store, stream)
    except OSError as error:
        raise FolderError(
            f"{file} cannot be written: {reason_of(error)}; choose another file with --to"
        ) from error


def trials_table(store: Store) -> pd.DataFrame:
    """Return a row per trial with COLUMNS; what a trial has not is <NA>, and None in run_secs."""
    import pandas as pd

    rows = list(export_rows(store))
    columns = {
        name: pd.Series([row[name] for row in rows], dtype=kind) for name, kind in COLUMNS.items()
    }
    return pd.DataFrame(columns)


def _arrow_schema() -> Any:
    # Written out, so that files of runs without a failure, or without a trial, agree in types.
    import pyarrow as pa

    types = {
        "Int64": pa.int64(),
        "Float64": pa.float64(),
        "string": pa.string(),
        "object": pa.list_(pa.float64()),
    }
    return pa.schema([(name, types[kind]) for name, kind in COLUMNS.items()])
