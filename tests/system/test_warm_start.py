"""Starting from other runs: their best are measured first, and all that they measured teaches."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest

from tests.lib import DATA
from tests.lib.artifact_fixtures import CUDA
from tests.lib.models import conv_net
from tests.lib.store_places import proposed
from tunerd.cli.app import app
from tunerd.cli.errors import run
from tunerd.cluster.layout import local_layout
from tunerd.errors import ExitCode, FolderError, InputError
from tunerd.frontend.kernels import Selection, kernels_of
from tunerd.records import RunFacts, Store
from tunerd.records.schema import STORE_NAME
from tunerd.records.sqlite import open_writer
from tunerd.runs import plan
from tunerd.runs.run import search
from tunerd.runs.warm_start import chosen, read_warm_starts
from tunerd.settings import TuneSettings
from tunerd.slices.simulated import simulated_secs
from tunerd.system import host
from tunerd.telemetry.progress import Progress, ProgressState
from tunerd.vocabulary import (
    DEFAULT_SOURCE,
    METASCHEDULE,
    TRITON,
    Candidate,
    Failure,
    Kind,
    Measurement,
    Record,
    Stage,
    TargetSpec,
    Task,
)

Captured = pytest.CaptureFixture[str]
ONE_CORE = TargetSpec("llvm", json.dumps({"kind": "llvm", "num-cores": 1}))
TWO_CORES = TargetSpec("llvm", json.dumps({"kind": "llvm", "num-cores": 2}))


# --- reading other runs ------------------------------------------------------------------------

FACTS = RunFacts("net", "d" * 64, ONE_CORE, "CPU X", "cpu", 50, "0.27.0")
WRONG = Failure(Stage.RUN, Kind.WRONG_ANSWER, "off by one")


def write_run(
    folder: Path,
    trials: int,
    *,
    tasks: int = 1,
    facts: RunFacts = FACTS,
    sources: Sequence[str] = (METASCHEDULE,),
) -> Path:
    """Write a run: trial i of each task takes i + 1 ms, every 4th fails, sources take turns; then
    one of a default and one that has not ended.
    """
    folder.mkdir()
    with Store.create_or_open(folder, facts=facts) as store:
        for number in range(tasks):
            task_id = f"{number:012x}"
            store.register_tasks([Task(task_id, "conv", 1, 1e9, (), (), facts.target, "{}")])
            turns = [sources[i % len(sources)] for i in range(trials)]
            origins = [*turns, DEFAULT_SOURCE, METASCHEDULE]
            candidates = [
                Candidate(task_id, f"{number:04x}{i:012x}", origin, f"[[{i}],[]]")
                for i, origin in enumerate(origins)
            ]
            ended = proposed(store, candidates)[:-1]
            store.start(ended, "cpu-0-0")
            secs = [1e-3 * (i + 1) for i in range(len(ended))]
            measured = [Measurement((s,), 1, "search-v1", "cpu-0-0", 1) for s in secs]
            results = [WRONG if i % 4 == 3 else m for i, m in enumerate(measured)]
            store.finish_all(dict(zip(ended, results, strict=True)))
    return folder


def read(folder: Path, *more: Path, **changes: Any) -> Any:
    asked = {"out": Path("elsewhere"), "target": TWO_CORES, "slice_kind": "cpu"} | changes
    return read_warm_starts([folder, *more], **asked)


def test_a_run_teaches_the_search_trials_that_ended_fastest_first(tmp_path: Path) -> None:
    (found,) = read(write_run(tmp_path / "run", 8))
    (only,) = found.transferred
    assert only.key == f"{0:012x}@1"
    assert [secs for _, secs in only.results] == [1e-3, 2e-3, 3e-3, 5e-3, 6e-3, 7e-3, None, None]
    assert found.results == 8
    assert found.sentence([only.task.task_id]) == (
        f"8 results of 1 task from {tmp_path / 'run'}, 1 of them of this model"
    )


def test_each_source_is_taught_what_it_proposed(tmp_path: Path) -> None:
    (found,) = read(write_run(tmp_path / "run", 8, tasks=2, sources=(METASCHEDULE, TRITON)))
    assert [(x.task.task_id[-1], x.source) for x in found.transferred] == [
        ("0", METASCHEDULE), ("0", TRITON), ("1", METASCHEDULE), ("1", TRITON)
    ]  # fmt: skip
    for each in found.transferred:
        even = each.source == METASCHEDULE
        assert [r for r, _ in each.results] == [
            f"[[{i}],[]]" for i in ((0, 2, 4, 6) if even else (1, 5, 3, 7))
        ]
    assert found.results == 16
    assert found.sentence([]).startswith("16 results of 2 tasks from ")


def test_trials_that_took_no_time_are_no_transfers(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 4)
    with sqlite3.connect(folder / STORE_NAME) as connection:
        connection.execute(
            "UPDATE trials SET median_secs = 0, run_secs = '[0.0]' WHERE trial_id = 2"
        )
    (found,) = read(folder)
    assert [secs for _, secs in found.transferred[0].results] == [1e-3, 3e-3, None]


def test_runs_are_told_apart_and_one_that_is_named_twice_is_read_once(tmp_path: Path) -> None:
    first, second = write_run(tmp_path / "a", 2), write_run(tmp_path / "b", 2)
    found = read(first, second, tmp_path / "b" / ".." / "a")
    assert [x.transferred[0].run for x in found] == [1, 2]


@pytest.mark.parametrize(("tasks", "most"), [(1, 512), (8, 256), (300, 8)])
def test_what_is_read_is_bounded_with_the_best_and_others_of_each_task(
    tmp_path: Path, tasks: int, most: int
) -> None:
    trials = 600 if tasks < 100 else 12
    (found,) = read(write_run(tmp_path / "run", trials, tasks=tasks))
    assert len(found.transferred) == tasks
    for each in found.transferred:
        assert len(each.results) == most
        assert each.results[0][1] == 1e-3


def test_the_others_are_spread_over_what_is_not_among_the_best() -> None:
    assert chosen(range(100), 8) == [0, 1, 2, 3, 4, 28, 52, 76]
    assert chosen(range(6), 8) == [0, 1, 2, 3, 4, 5]
    assert chosen(range(3), 8) == [0, 1, 2]
    assert chosen([], 8) == []


def test_a_run_of_an_older_version_teaches(tmp_path: Path) -> None:
    script = (DATA / "store-v1.sql").read_text()
    with sqlite3.connect(tmp_path / STORE_NAME) as connection:
        connection.executescript(script)
    before = (tmp_path / STORE_NAME).read_bytes()
    (found,) = read(tmp_path)
    assert found.results > 0
    assert (tmp_path / STORE_NAME).read_bytes() == before


CUDA_FACTS = dataclasses.replace(FACTS, target=CUDA, slice_kind="mps")
SIMULATED = dataclasses.replace(FACTS, slice_kind="simulated")


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (CUDA_FACTS, "a run for cuda, and this one is for llvm.*; give a run for llvm"),
        (SIMULATED, "simulated slices, which measure nothing; give a run that was measured"),
    ],
)
def test_a_run_that_cannot_teach_is_refused(tmp_path: Path, facts: RunFacts, message: str) -> None:
    folder = write_run(tmp_path / "run", 1, facts=facts)
    with pytest.raises(InputError, match=message):
        read(folder)


def test_a_run_does_not_start_from_itself(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 1)
    with pytest.raises(InputError, match="is the folder of this run"):
        read(folder, out=tmp_path / "x" / ".." / "run")


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="is not a run folder"):
        read(tmp_path)


def test_a_run_that_was_killed_before_it_began_is_refused(tmp_path: Path) -> None:
    open_writer(tmp_path / STORE_NAME).close()
    with pytest.raises(FolderError, match="killed before it began"):
        read(tmp_path)


# --- sessions ----------------------------------------------------------------------------------

needs_two_cores = pytest.mark.skipif(
    host.facts().usable_cores < 2, reason="slices of half the cores need two"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "net.onnx"
    onnx.save(conv_net(), path)
    return path


class Heard(Progress):
    """Remembers what was shown."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def update(self, state: ProgressState) -> None:
        self.said.append(state.message)

    def warn(self, sentence: str) -> None:
        self.said.append(sentence)

    def close(self) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class Tuned:
    folder: Path
    said: list[str]

    def trials(self) -> list[Record]:
        """Return the search's, in the order in which they were proposed."""
        with Store.read(self.folder) as store:
            return [r for r in store.records() if not r.candidate.is_default]


@pytest.fixture(scope="module")
def tuned(
    model: Path, tmp_path_factory: pytest.TempPathFactory, kept_cluster: None
) -> Callable[..., Tuned]:
    def tune(trials: int, **options: Any) -> Tuned:
        folder = options.pop("folder", None) or tmp_path_factory.mktemp("runs") / "run"
        settings = TuneSettings(
            **{"model": model, "out": folder, "tuners": 1, "slices": 1} | options
        )
        layout = local_layout(settings)
        tasks = kernels_of(plan.read(settings), layout.target).tasks
        heaviest = max(tasks, key=lambda t: t.flops)
        heard = Heard()
        search(settings, heard, Selection((heaviest.task_id,), trials))
        return Tuned(folder, heard.said)

    return tune


@pytest.fixture(scope="module")
def measured(tuned: Callable[..., Tuned]) -> Tuned:
    """A run that measured on half of the cores."""
    return tuned(12, cpu_pct=50, slice_kind="cpu")


@pytest.fixture(scope="module")
def warm(tuned: Callable[..., Tuned], measured: Tuned) -> Tuned:
    """One that starts from it at a quarter of a simulated device."""
    return tuned(6, cpu_pct=25, slice_kind="simulated", warm_start=(measured.folder,))


@needs_two_cores
@pytest.mark.nightly
def test_a_run_measures_first_what_was_best_at_another_share(measured: Tuned, warm: Tuned) -> None:
    ranked = sorted(measured.trials(), key=lambda r: r.run_secs or 1.0)
    assert warm.trials()[0].candidate.recipe == ranked[0].candidate.recipe
    first = {r.candidate.recipe for r in warm.trials()[:3]}
    assert first <= {r.candidate.recipe for r in ranked}


@needs_two_cores
def test_no_latency_of_the_other_run_becomes_one_of_this_run(measured: Tuned, warm: Tuned) -> None:
    assert len(warm.trials()) == 6
    for record in warm.trials():
        assert isinstance(record.result, Measurement)
        assert record.result.sm_count == 25
        assert record.result.run_secs[0] == simulated_secs(record.candidate)
        assert record.attempts == 1
    theirs = {secs for r in measured.trials() for secs in getattr(r.result, "run_secs", ())}
    ours = {secs for r in warm.trials() for secs in getattr(r.result, "run_secs", ())}
    assert not theirs & ours


@needs_two_cores
def test_a_run_says_what_it_starts_from(measured: Tuned, warm: Tuned) -> None:
    expected = f"warm start: 12 results of 1 task from {measured.folder}, 1 of them of this model"
    assert expected in warm.said


@needs_two_cores
@pytest.mark.nightly
def test_a_run_that_goes_on_does_not_measure_again_what_it_started_from(
    tuned: Callable[..., Tuned], measured: Tuned, warm: Tuned
) -> None:
    before = warm.trials()
    after = tuned(
        12,
        cpu_pct=25,
        slice_kind="simulated",
        warm_start=(measured.folder,),
        folder=warm.folder,
    ).trials()
    assert after[: len(before)] == before
    assert len({r.candidate.recipe for r in after}) == len(after) == 12


def command(model: Path, *options: str) -> ExitCode | int:
    return run(app, ["tune", str(model), *options])


def test_a_dry_run_names_what_it_would_start_from(
    model: Path, tmp_path: Path, capsys: Captured
) -> None:
    folder = write_run(tmp_path / "other", 8)
    options = ("--cpu-pct", "100", "--out", str(tmp_path / "run"), "--warm-start", str(folder))
    assert command(model, *options, "--dry-run", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)["warm_start"]
    assert found["folder"] == str(folder)
    assert (found["results"], found["tasks"], found["shared_tasks"]) == (8, 1, 0)
    assert command(model, *options, "--dry-run") == 0
    assert "8 results of 1 task" in " ".join(capsys.readouterr().out.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("facts", "code"), [(None, ExitCode.BAD_FOLDER), (CUDA_FACTS, ExitCode.BAD_INPUT)]
)
def test_a_wrong_folder_ends_the_command_before_there_is_a_run(
    model: Path, tmp_path: Path, facts: RunFacts | None, code: ExitCode, capsys: Captured
) -> None:
    folder = tmp_path / "other"
    if facts is not None:
        write_run(folder, 1, facts=facts)
    out = tmp_path / "run"
    options = ("--cpu-pct", "100", "--out", str(out), "--warm-start", str(folder))
    assert command(model, *options) == code
    said = capsys.readouterr().err
    assert len(said.strip().splitlines()) == 1
    assert str(folder) in said
    assert not out.exists()
