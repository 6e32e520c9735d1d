"""A run as TVM's own MetaSchedule database: two files that `JSONDatabase(work_dir=...)` reads."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tunerd.errors import FolderError
from tunerd.frontend.onnx.reference import last_line
from tunerd.records.sqlite import TVM_RECORDS
from tunerd.records.store import Store
from tunerd.system.text import reason_of
from tunerd.vocabulary import Measurement, Record, Task, TrialState

WORKLOADS = "database_workload.json"


def export_tvm(store: Store, folder: Path) -> int:
    """Write the measured trials of the search into a folder and return their number.

    Left out are failures, which TVM would keep as 1e10 seconds, and defaults, which have no trace.
    Raises FolderError where the folder has such a database or cannot be written.
    """
    try:
        for name in (WORKLOADS, TVM_RECORDS):
            if (folder / name).exists():
                raise FolderError(
                    f"{folder / name} exists; nothing was written: choose a new folder"
                )
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tvm-", dir=folder) as beside:
            count = _write(store, Path(beside))
            for name in (WORKLOADS, TVM_RECORDS):
                (Path(beside) / name).replace(folder / name)
    except OSError as error:
        raise FolderError(
            f"{folder} cannot be written: {reason_of(error)}; choose another folder"
        ) from error
    return count


def _write(store: Store, folder: Path) -> int:
    # tvm.s_tir.tensor_intrin is not imported: it takes seconds, and is only needed to apply a
    # trace. A record's line is therefore written as TVM writes it (TuningRecord.as_json), without
    # building the TuningRecord, which would apply it.
    from tvm.s_tir import meta_schedule as ms

    database = ms.database.JSONDatabase(
        str(folder / WORKLOADS), str(folder / TVM_RECORDS), allow_missing=True
    )
    count = 0
    committed: list[Any] = []
    with open(folder / TVM_RECORDS, "w", encoding="utf-8") as lines:
        for task in store.tasks():
            common: list[Any] | None = None
            index = 0
            for record in store.records(task.task_id, TrialState.MEASURED):
                if not record.candidate.recipe:
                    continue
                try:
                    if common is None:
                        mod = _module(task)
                        index = _commit(database, mod, committed)
                        common = _target_and_args(task, mod)
                    line = _line(index, record, common)
                except Exception as error:  # TVM raises many kinds
                    raise store.damaged(
                        f"task '{task.name}' or its trial {record.trial_id} cannot be exported: "
                        f"{last_line(error)}"
                    ) from error
                lines.write(line + "\n")
                count += 1
    if not committed:
        (folder / WORKLOADS).touch()
    return count


def _module(task: Task) -> Any:
    import tvm

    mod = tvm.ir.load_json(task.mod_json)
    if not isinstance(mod, tvm.IRModule):
        raise TypeError(f"it is a {type(mod).__name__} and no module of TVM")
    return mod


def _commit(database: Any, mod: Any, committed: list[Any]) -> int:
    """Return the workload's line in its file; tasks that differ in names only share one."""
    workload = database.commit_workload(mod)
    for index, known in enumerate(committed):
        if known.same_as(workload):
            return index
    committed.append(workload)
    return len(committed) - 1


def _target_and_args(task: Task, mod: Any) -> list[Any]:
    import tvm
    from tvm.s_tir.meta_schedule.arg_info import ArgInfo

    text = task.target.json
    target = tvm.target.Target(json.loads(text) if text.lstrip().startswith("{") else text)
    return [json.loads(str(target)), [a.as_json() for a in ArgInfo.from_entry_func(mod)]]


def _line(index: int, record: Record, common: list[Any]) -> str:
    assert isinstance(record.result, Measurement)  # of the state that was asked for
    trace = json.loads(record.candidate.recipe)
    return json.dumps([index, [trace, list(record.result.run_secs), *common]])
