from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from tests.lib import ROOT
from tests.lib.record_samples import COLLATERAL, FACTS, LLVM, TASK, candidate, measurement
from tests.lib.store_places import proposed
from tunerd.cli.records import app
from tunerd.errors import FolderError, InputError
from tunerd.records import Store
from tunerd.records.export import COLUMNS
from tunerd.runs.folder import RunFolder
from tunerd.vocabulary import (
    DEFAULT_SOURCE,
    METASCHEDULE,
    Candidate,
    CapProof,
    Failure,
    Kind,
    Stage,
    Task,
    TensorSpec,
    TrialState,
)

PROOF = CapProof("cpu-0-0", "CPU X", 1, 2, "affinity", True)
SLOW = Failure(Stage.RUN, Kind.TIMEOUT, "over 5 s, twice\nand a line")


def tunerd(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def good(*arguments: object) -> Result:
    result = tunerd(*arguments)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result


@pytest.fixture
def run(tmp_path: Path):
    """Yield a live run: a default and a search trial measured, one failed, one running."""
    with RunFolder.open(tmp_path / "run", facts=FACTS) as live:
        live.store.register_tasks([TASK])
        live.store.save_proof(PROOF)
        ids = proposed(
            live.store,
            [candidate(0, source=DEFAULT_SOURCE), *(candidate(i) for i in (1, 2, 3))],
            now=1.5,
        )
        live.store.start(ids, "cpu-0-0", now=2.5)
        live.store.finish(ids[0], measurement(4e-3), now=3.5)
        live.store.finish(ids[1], measurement(1e-3, 3e-3, 2e-3), now=3.5)
        live.store.finish(ids[2], SLOW, now=3.5)
        yield live


def read_json(content: bytes) -> pd.DataFrame:
    return pd.DataFrame([json.loads(line) for line in content.splitlines()])


def read_csv(content: bytes) -> pd.DataFrame:
    table = pd.read_csv(io.BytesIO(content))
    table["run_secs"] = table["run_secs"].map(json.loads, na_action="ignore")
    return table


def read_parquet(content: bytes) -> pd.DataFrame:
    return pd.read_parquet(io.BytesIO(content))


@pytest.mark.parametrize(
    ("format", "read"), [("json", read_json), ("csv", read_csv), ("parquet", read_parquet)]
)
@pytest.mark.parametrize("to_file", [True, False])
def test_a_live_run_exports_a_line_per_trial(
    run: RunFolder,
    tmp_path: Path,
    format: str,
    read: Callable[[bytes], pd.DataFrame],
    to_file: bool,
) -> None:
    arguments = ["export", "--format", format, run.paths.root]
    if to_file:
        assert good(*arguments, "--to", tmp_path / "out").stdout == ""
        table = read((tmp_path / "out").read_bytes())
    else:
        table = read(good(*arguments).stdout_bytes)
    left_out = {"trace_json"} if format == "csv" else set()
    assert list(table.columns) == [c for c in COLUMNS if c not in left_out]
    assert list(table["state"]) == ["measured", "measured", "failed", "running"]
    assert list(table["run_secs"][1]) == [1e-3, 3e-3, 2e-3]
    assert table["median_secs"][1] == 2e-3
    assert list(table["median_secs"].isna()) == [False, False, True, True]
    assert table["message"][2] == SLOW.message
    assert table["mechanism"][0] == "affinity"
    assert set(table["task"]) == {"conv"}


def test_the_types_of_a_parquet_export_do_not_depend_on_its_trials(
    run: RunFolder, tmp_path: Path
) -> None:
    import pyarrow.parquet as pq

    with RunFolder.open(tmp_path / "empty", facts=FACTS):
        pass
    for name in ("run", "empty"):
        good("export", "--format", "parquet", tmp_path / name, "--to", tmp_path / f"{name}.pq")
    full, empty = (pq.read_schema(tmp_path / f"{n}.pq") for n in ("run", "empty"))
    assert full.equals(empty)


def test_an_export_that_cannot_be_written_says_so_and_leaves_nothing(
    run: RunFolder, tmp_path: Path
) -> None:
    result = tunerd(
        "export", "--format", "csv", run.paths.root, "--to", tmp_path / "nowhere" / "out"
    )
    assert isinstance(result.exception, FolderError)
    assert "cannot be written" in str(result.exception)
    (tmp_path / "folder").mkdir()
    result = tunerd("export", "--format", "csv", run.paths.root, "--to", tmp_path / "folder")
    assert isinstance(result.exception, FolderError)
    assert {p.name for p in tmp_path.iterdir()} == {"run", "folder"}


def test_flags_that_do_not_go_together_are_refused(run: RunFolder) -> None:
    for arguments in (["--format", "tvm"], ["--format", "csv", "--json"]):
        result = tunerd("export", run.paths.root, *arguments)
        assert isinstance(result.exception, InputError)
        assert "--to" in str(result.exception)


@pytest.mark.parametrize("format", ["json", "csv", "parquet"])
def test_an_export_counts_what_ended_what_is_open_and_default_schedules_apart(
    run: RunFolder, tmp_path: Path, format: str
) -> None:
    export = ["export", "--format", format, run.paths.root, "--to", tmp_path / "out"]
    said = f"format {format}, trials 2, open 1, default schedules 1\n"
    assert good(*export).stderr.endswith(said)
    told = json.loads(good(*export, "--json").stdout)
    assert (told["trials"], told["open"], told["default_schedules"]) == (2, 1, 1)


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    for arguments in (["show"], ["export", "--format", "csv"]):
        result = tunerd(*arguments, tmp_path)
        assert isinstance(result.exception, FolderError)
        assert str(tmp_path) in str(result.exception)


def test_a_run_is_shown_by_task(run: RunFolder) -> None:
    text = good("show", run.paths.root).stdout
    assert "net: 50% of CPU X" in text
    assert "conv" in text
    assert "trials: 1 running, 1 measured, 1 failed\ndefault schedules: 1 measured\n" in text
    value = json.loads(good("show", "--json", run.paths.root).stdout)
    assert value["trials"] == {"proposed": 0, "running": 1, "measured": 1, "failed": 1}
    assert value["default_schedules"] == {"proposed": 0, "running": 0, "measured": 1, "failed": 0}
    (task,) = value["tasks"]
    assert (task["open"], task["measured"], task["failed"]) == (1, 1, 1)
    assert (task["default_secs"], task["best_secs"]) == (4e-3, 2e-3)


def test_a_run_packs_and_unpacks(run: RunFolder, tmp_path: Path) -> None:
    good("pack", run.paths.root, tmp_path / "file")
    packed = json.loads(good("unpack", tmp_path / "file", tmp_path / "there", "--json").stdout)
    assert packed == {"run": str(tmp_path / "there")}
    with Store.read(tmp_path / "there") as there:
        assert there.counts() == run.store.counts()


def test_the_command_imports_nothing_heavy_until_it_runs() -> None:
    code = (
        "import sys, tunerd.cli.records; heavy = {'sqlalchemy', 'pandas', 'tvm', 'pyarrow'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    root = ROOT
    assert subprocess.check_output([sys.executable, "-c", code], cwd=root, text=True) == "[]\n"


# --- merging -----------------------------------------------------------------------------------


def test_merged_runs_have_each_candidate_once_and_the_best_kept(
    run: RunFolder, tmp_path: Path
) -> None:
    other_task = dataclasses.replace(TASK, task_id="t1", name="dense")
    with RunFolder.open(tmp_path / "b", facts=FACTS) as b:
        b.store.register_tasks([other_task, TASK])
        b.store.save_proof(dataclasses.replace(PROOF, driver="590"))
        new = candidate(9, "t1")
        ids = proposed(b.store, [candidate(1), candidate(2), candidate(3), new, candidate(5)])
        b.store.start(ids[:-1], "cpu-0-0")
        b.store.finish_all({ids[0]: measurement(9.0), ids[1]: measurement(8.0), ids[3]: SLOW})
        b.store.finish(ids[2], COLLATERAL)
    merged = good("merge", run.paths.root, tmp_path / "b", "--to", tmp_path / "c", "--json").stdout
    counts = {"trials": 3, "open": 2, "default_schedules": 1, "duplicates": 3}
    assert json.loads(merged) == {"run": str(tmp_path / "c")} | counts
    with RunFolder.open(tmp_path / "c", facts=FACTS) as c:
        found = {r.candidate.candidate_id[-1]: r for r in c.store.records()}
        assert [t.name for t in c.store.tasks()] == ["conv", "dense"]
        assert [(p.slice_id, p.driver) for p in c.store.proofs()] == [
            ("cpu-0-0", ""),
            ("cpu-0-0@2", "590"),
        ]
        assert len(c.store.requeue_unfinished()) == 2
    assert sorted(found) == ["0", "1", "2", "3", "5", "9"]
    assert found["1"].run_secs == 2e-3  # of the first run
    assert found["2"].run_secs == 8.0  # failed in the first run
    assert found["2"].slice_id == "cpu-0-0@2"
    assert found["9"].result == SLOW
    assert {found[k].state for k in "35"} == {TrialState.PROPOSED}


def test_runs_of_other_models_and_existing_folders_are_not_merged(
    run: RunFolder, tmp_path: Path
) -> None:
    other = dataclasses.replace(FACTS, model_name="mine", model_digest="e" * 64)
    RunFolder.open(tmp_path / "b", facts=other).close()
    result = tunerd("merge", run.paths.root, tmp_path / "b", "--to", tmp_path / "c")
    assert isinstance(result.exception, FolderError)
    assert "'net'" in str(result.exception)
    assert "'mine'" in str(result.exception)
    result = tunerd("merge", run.paths.root, "--to", tmp_path / "b")
    assert "exists" in str(result.exception)
    assert {p.name for p in tmp_path.iterdir()} == {"run", "b"}


# --- TVM's database ----------------------------------------------------------------------------


def matmul(size: int) -> tuple[Any, Task]:
    import tvm
    from tvm import te

    a, b = te.placeholder((size, size), name="A"), te.placeholder((size, size), name="B")
    k = te.reduce_axis((0, size), "k")
    c = te.compute((size, size), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="C")
    func = te.create_prim_func([a, b, c]).with_attr("global_symbol", "main")
    mod = tvm.IRModule({"main": func})
    args = tuple(TensorSpec(name, (size, size), "float32") for name in "ABC")
    target = dataclasses.replace(LLVM, json='{"kind":"llvm","num-cores":1,"mcpu":"x86-64"}')
    return mod, Task(f"m{size}", "matmul", 1, 0.0, args, (), target, tvm.ir.save_json(mod))


def tiled(mod: Any, task: Task, outer: int, size: int) -> Candidate:
    from tvm import s_tir

    schedule = s_tir.Schedule(mod)
    i, j, _ = schedule.get_loops(schedule.get_sblock("C"))
    tiles = schedule.sample_perfect_tile(i, n=2, decision=[outer, size // outer])
    inner = schedule.split(i, tiles)[1]
    schedule.reorder(j, inner)
    schedule.annotate(j, "note", True)
    trace = json.dumps(schedule.trace.as_json(), default=lambda v: v.value, separators=(",", ":"))
    return Candidate(task.task_id, f"{size:08x}{outer:08x}", METASCHEDULE, recipe=trace)


def test_tvm_reloads_the_measured_trials_and_applies_the_best(tmp_path: Path) -> None:
    import tvm
    from tvm.s_tir import meta_schedule as ms

    (small, small_task), (large, large_task) = matmul(16), matmul(32)
    same_task = dataclasses.replace(small_task, task_id="again", name="matmul2")
    with RunFolder.open(tmp_path / "run", facts=FACTS) as run:
        run.store.register_tasks([TASK, small_task, large_task, same_task])
        candidates = [
            *(tiled(small, small_task, outer, 16) for outer in (2, 4, 8)),
            tiled(large, large_task, 4, 32),
            tiled(small, same_task, 16, 16),
            Candidate(small_task.task_id, "0" * 16, DEFAULT_SOURCE),
        ]
        ids = proposed(run.store, candidates)
        run.store.start(ids, "cpu-0-0")
        run.store.finish(ids[0], measurement(3e-3, 4e-3))
        run.store.finish(ids[1], measurement(1e-3, 2e-3))
        run.store.finish(ids[2], SLOW)
        run.store.finish(ids[3], measurement(5e-3))
        run.store.finish(ids[4], measurement(9e-3))
        run.store.finish(ids[5], measurement(1e-9))
        to = tmp_path / "db"
        arguments = ["export", "--format", "tvm", run.paths.root, "--to", to, "--json"]
        assert json.loads(good(*arguments).stdout)["trials"] == 4
    assert {p.name for p in to.iterdir()} == {
        "database_workload.json",
        "database_tuning_record.json",
    }
    database = ms.database.JSONDatabase(work_dir=str(to), allow_missing=False)
    assert len(database) == 4
    assert len((to / "database_workload.json").read_text().splitlines()) == 2
    target = tvm.target.Target(json.loads(small_task.target.json))
    best = database.query_tuning_record(small, target, "main")
    assert [float(s) for s in best.run_secs] == [1e-3, 2e-3]
    assert str(best.target) == str(target)
    again = json.loads(json.dumps(best.trace.as_json(), default=lambda v: v.value))
    assert again == json.loads(candidates[1].recipe)
    built = tvm.tirx.build(database.query_ir_module(small, target, "main"), target=target)
    a = np.arange(256, dtype="float32").reshape(16, 16) / 256
    tensors = [tvm.runtime.tensor(x) for x in (a, a.T.copy(), np.zeros_like(a))]
    built["main"](*tensors)
    np.testing.assert_allclose(tensors[2].numpy(), a @ a.T, rtol=1e-5)
    assert [float(s) for s in database.query_tuning_record(large, target, "main").run_secs] == [
        5e-3
    ]
    refused = tunerd("export", "--format", "tvm", tmp_path / "run", "--to", to)
    assert isinstance(refused.exception, FolderError)


def test_a_run_without_measurements_is_an_empty_tvm_database(tmp_path: Path) -> None:
    from tvm.s_tir import meta_schedule as ms

    RunFolder.open(tmp_path / "run", facts=FACTS).close()
    good("export", "--format", "tvm", tmp_path / "run", "--to", tmp_path / "db")
    database = ms.database.JSONDatabase(work_dir=str(tmp_path / "db"), allow_missing=False)
    assert len(database) == 0
