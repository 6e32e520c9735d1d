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
from tests.lib.build_fixtures import conv_task, matmul_task
from tests.lib.models import conv_net
from tests.lib.store_places import proposed
from tunerd.candidates import registry
from tunerd.candidates.base import Search, SearchSettings
from tunerd.candidates.metaschedule.knobs import Choices, Location, Option, Tile
from tunerd.candidates.metaschedule.search import BATCH, Searcher
from tunerd.candidates.metaschedule.space import DesignSpace, design_space
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
    Result,
    Stage,
    TargetSpec,
    Task,
    TransferredResults,
)

Captured = pytest.CaptureFixture[str]
ONE_CORE = TargetSpec("llvm", json.dumps({"kind": "llvm", "num-cores": 1}))
TWO_CORES = TargetSpec("llvm", json.dumps({"kind": "llvm", "num-cores": 2}))


def searcher() -> Searcher:
    return Searcher(seed=0, threads=1, island_number=0)


def searched(task: Task) -> tuple[Candidate, ...]:
    """Return what the search of another run proposed."""
    return Searcher(seed=5, threads=1).propose(task, BATCH).candidates


def transfer(task: Task, candidates: Sequence[Candidate], source: int = 1) -> TransferredResults:
    """Let each candidate be slower than the one before, and the last one fail."""
    times = [1e-3 * (i + 1) for i in range(len(candidates) - 1)]
    return TransferredResults(
        source, task, tuple(zip((c.recipe for c in candidates), [*times, None], strict=True))
    )


def choice(space: DesignSpace, trace_json: str) -> tuple[int, tuple[int, ...]]:
    translated = space.design.translate(json.loads(trace_json))
    assert translated is not None
    return translated[0].index, tuple(translated[1].tolist())


def tiles(space: DesignSpace, trace_json: str) -> tuple[int, tuple[int, ...]]:
    sketch, row = choice(space, trace_json)
    return sketch, tuple(space.design.sketches[sketch].tiles_of(as_row(row)).tolist())


def as_row(values: Sequence[int]) -> Choices:
    import numpy as np

    return np.array(values, dtype=np.int64)


# --- the search --------------------------------------------------------------------------------


def learned(task: Task, *transfers: TransferredResults) -> Searcher:
    search = searcher()
    search.learn(transfers, {task.task_id: task})
    return search


@pytest.fixture(scope="module")
def other() -> Task:
    """A task as a run on one core had it."""
    return conv_task(ONE_CORE)


@pytest.fixture(scope="module")
def known(other: Task) -> tuple[Candidate, ...]:
    return searched(other)


def test_the_best_of_another_share_are_proposed_first(
    other: Task, known: tuple[Candidate, ...]
) -> None:
    task = dataclasses.replace(other, target=TWO_CORES)
    space = design_space(task)
    proposed = learned(task, transfer(other, known)).propose(task, BATCH).candidates
    best: list[str] = []
    for candidate in known[:-1]:
        if tiles(space, candidate.recipe) not in [tiles(space, b) for b in best]:
            best.append(candidate.recipe)
    assert [choice(space, c.recipe) for c in proposed[:4]] == [choice(space, b) for b in best][:4]
    # They are candidates of this share: TVM splits the work over two cores.
    assert '["b4",32],["meta_schedule.parallel"]' in proposed[0].recipe
    assert all(not c.is_default and c.task_id == task.task_id for c in proposed)
    assert not {c.candidate_id for c in proposed} & {c.candidate_id for c in known}


def test_a_proposal_of_one_candidate_leaves_the_others_for_the_next(
    other: Task, known: tuple[Candidate, ...]
) -> None:
    at_once = learned(other, transfer(other, known)).propose(other, 3).candidates
    search = learned(other, transfer(other, known))
    one_by_one = [search.propose(other, 1).candidates[0] for _ in at_once]
    assert tuple(one_by_one) == at_once


def test_what_an_earlier_session_measured_of_a_transfer_is_not_proposed_again(
    other: Task, known: tuple[Candidate, ...]
) -> None:
    first = learned(other, transfer(other, known)).propose(other, 4).candidates
    resumed = learned(other, transfer(other, known))
    told = [Result(c, 1e-3) for c in first]
    again = resumed.propose(other, BATCH, results=told).candidates
    assert again
    assert not {c.candidate_id for c in again} & {c.candidate_id for c in first}


def test_results_of_transfers_are_kept_apart_from_those_of_the_run(
    other: Task, known: tuple[Candidate, ...]
) -> None:
    search = learned(other, transfer(other, known), transfer(other, known, source=2))
    island = search._open(other)
    model = search._cost_model
    assert model.told(other.task_id) == 0
    assert model.told(f"{other.task_id}@1") == model.told(f"{other.task_id}@2") == len(known)
    assert island.measured == []
    assert island.known == set()


def test_transfers_of_another_kernel_only_teach(other: Task, known: tuple[Candidate, ...]) -> None:
    task = matmul_task(ONE_CORE)
    search = learned(task, transfer(other, known))
    assert search.propose(task, 4).candidates
    assert search._cost_model.told() == len(known)
    assert search._islands[task.task_id].borrowed == []


def test_what_breaks_a_limit_of_this_gpu_is_not_proposed_where_it_was_read_before(
    on_cuda: Task,
) -> None:
    small = json.loads(CUDA.json) | {"max_threads_per_block": 64}
    target = TargetSpec("cuda", json.dumps(small))
    task = dataclasses.replace(on_cuda, target=target)
    first = matmul_task(target)
    known = searched(on_cuda)
    search = searcher()
    search.learn([transfer(on_cuda, known)], {t.task_id: t for t in (task, first)})
    assert search.propose(first, 1).candidates
    assert search._cost_model.told() == len(known)
    space = design_space(task)
    for each in search._open(task).borrowed:
        assert space.allows(space.design.sketches[each.sketch], each.row)


def test_a_search_that_can_learn_much_makes_one_tasks_sketches_with_each_proposal(
    other: Task, known: tuple[Candidate, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def noted(task: Task, **options: Any) -> DesignSpace:
        made.append(task.task_id)
        return design_space(task, **options)

    monkeypatch.setattr("tunerd.candidates.metaschedule.search.design_space", noted)
    task = matmul_task(ONE_CORE)
    past = [dataclasses.replace(other, task_id=f"{n:012x}") for n in range(4)]
    search = learned(task, *(transfer(each, known) for each in past))
    assert made == []
    for nth in range(1, 5):
        search.propose(task, 1)
        assert made == [task.task_id, *(each.task_id for each in past[:nth])]
        assert search._cost_model.told() == nth * len(known)
    search.propose(task, 1)
    assert len(made) == 5


# --- templates ---------------------------------------------------------------------------------


def triton_search() -> Search:
    return registry.SOURCES[TRITON].search(SearchSettings(seed=0, threads=1, sms=52))


def recipes(search: Search, task: Task, count: int = BATCH) -> list[str]:
    return [c.recipe for c in search.propose(task, count).candidates]


def of_triton(task: Task, chosen: Sequence[str], *, run: int = 1) -> TransferredResults:
    times = [1e-3 * (i + 1) for i in range(len(chosen) - 1)]
    return TransferredResults(
        run, task, tuple(zip(chosen, [*times, None], strict=True)), 13, TRITON
    )


@pytest.fixture(scope="module")
def product() -> Task:
    return dataclasses.replace(matmul_task(CUDA), precision="tf32")


def test_the_best_cuts_of_another_run_are_proposed_first(product: Task) -> None:
    search = triton_search()
    unlikely = [recipes(search, product) for _ in range(4)][-1]
    told = triton_search()
    told.learn([of_triton(product, unlikely)], {product.task_id: product})
    proposed = recipes(told, product)
    assert proposed[0] == unlikely[0]
    assert len(set(proposed[:4]) & set(unlikely[:-1])) == len(set(proposed) & set(unlikely)) > 1
    assert unlikely[-1] not in proposed
    again = recipes(told, product)
    assert not set(again) & set(proposed)


def test_the_best_cuts_of_several_runs_take_turns(product: Task) -> None:
    search = triton_search()
    batches = [recipes(search, product) for _ in range(4)]
    told = triton_search()
    past = [of_triton(product, batches[2]), of_triton(product, batches[3], run=2)]
    told.learn(past, {product.task_id: product})
    assert recipes(told, product, 2) == [batches[2][0], batches[3][0]]


def test_cuts_of_another_kernel_only_teach(product: Task) -> None:
    other = dataclasses.replace(product, task_id="0" * 12)
    told = triton_search()
    told.learn([of_triton(other, recipes(triton_search(), other))], {product.task_id: product})
    assert recipes(told, product) == recipes(triton_search(), product)


def test_transfers_take_turns(other: Task, known: tuple[Candidate, ...]) -> None:
    space = design_space(other)
    mine = transfer(other, known[: BATCH // 2])
    others = transfer(other, known[BATCH // 2 :], source=2)
    proposed = learned(other, mine, others).propose(other, 2).candidates
    expected = [known[0].recipe, known[BATCH // 2].recipe]
    assert [choice(space, c.recipe) for c in proposed] == [choice(space, t) for t in expected]


def test_the_same_transfers_and_seed_propose_the_same(
    other: Task, known: tuple[Candidate, ...]
) -> None:
    batches = [learned(other, transfer(other, known)).propose(other, BATCH) for _ in range(2)]
    assert batches[0].candidates == batches[1].candidates


@pytest.mark.parametrize(
    "trace_json",
    ["[[],[]]", "{}", "not JSON", '[[["Unknown",[],[],[]]],[]]'],
)
def test_a_trace_that_says_nothing_here_is_passed_over(other: Task, trace_json: str) -> None:
    search = learned(other, TransferredResults(1, other, ((trace_json, 1e-3),)))
    assert search._cost_model.told() == 0
    assert search.propose(other, 4).candidates


def test_a_transfer_of_a_task_that_cannot_be_read_teaches_nothing(other: Task) -> None:
    broken = dataclasses.replace(other, task_id="f" * 12, mod_json="{}")
    search = learned(other, TransferredResults(1, broken, (("[[],[]]", 1e-3),)))
    assert search.propose(other, 4).candidates


# --- traces of other targets and rules ---------------------------------------------------------


@pytest.fixture(scope="module")
def on_cuda() -> Task:
    return conv_task(CUDA)


def test_decisions_of_traces_that_tvm_unrolled_are_taken_over(on_cuda: Task) -> None:
    space = design_space(on_cuda)
    candidate = next(c for c in searched(on_cuda) if "unroll_implicit" in c.recipe)
    old = candidate.recipe.replace("unroll_implicit", "unroll_explicit")
    assert space.design.find(json.loads(old)) is None
    assert choice(space, old) == choice(space, candidate.recipe)


def test_what_breaks_a_limit_of_this_gpu_teaches_and_is_not_proposed(on_cuda: Task) -> None:
    small = json.loads(CUDA.json) | {"max_threads_per_block": 64}
    task = dataclasses.replace(on_cuda, target=TargetSpec("cuda", json.dumps(small)))
    space = design_space(task)
    known = searched(on_cuda)
    search = learned(task, transfer(on_cuda, known))
    borrowed = search._open(task).borrowed
    assert search._cost_model.told() == len(known)
    assert len(borrowed) < len(known)
    for each in borrowed:
        assert space.allows(space.design.sketches[each.sketch], each.row)


def test_an_option_is_taken_over_by_its_value() -> None:
    knob = Option(3, (0, 16, 64, 512))
    assert knob.translate(1, [[0, 64], [0.5, 0.5]]) == [2]
    assert knob.translate(1, [[0, 128], [0.5, 0.5]]) is None
    assert knob.translate(7, [[0, 64], [0.5, 0.5]]) is None


@pytest.mark.parametrize("split", [[2, 2], [2, 2, 3], [1, 1, 16], [0, 1, 16], [2, 2, 4, 1], None])
def test_a_split_of_another_loop_is_not_taken_over(split: list[int] | None) -> None:
    assert Tile(0, 16, 3, 8).translate(split, [3, 64]) is None


def test_a_split_of_the_same_loop_and_a_place_are_taken_over() -> None:
    assert Tile(0, 16, 3, 8).translate([2, 2, 4], [3, 64]) == [2, 2, 4]
    assert Location(0).translate(-1, []) == [-1]
    assert Location(0).translate(None, []) is None


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
