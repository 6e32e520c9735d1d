"""Candidate sources: what each member of the family promises, and how a run splits its trials."""

from __future__ import annotations

import hashlib
import inspect
import multiprocessing
import random
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.lib.build_fixtures import (
    WITH_VNNI,
    built,
    matmul_task,
    quantized_task,
    random_inputs,
)
from tests.lib.coordinator_world import measured, task
from tunerd.builder.build import build_candidate
from tunerd.builder.library import load_tvm
from tunerd.candidates import registry
from tunerd.candidates.base import BATCH, CandidateSource, LoweredKernel, Search, SearchSettings
from tunerd.candidates.tensor_intrinsics import load_tensor_intrinsics
from tunerd.cluster.tuner import Tuner
from tunerd.coordinator.budget import Limits
from tunerd.coordinator.coordinator import Coordinator
from tunerd.coordinator.events import (
    BuildsEnded,
    BuildThem,
    Finish,
    Instruction,
    Measure,
    MeasurementsEnded,
    Propose,
    Proposed,
    StoreEnded,
    WorkerJoined,
)
from tunerd.libraries import packages
from tunerd.slices import plan
from tunerd.system.targets import cuda_target
from tunerd.vocabulary import (
    DEFAULT_SOURCE,
    LIBRARIES,
    METASCHEDULE,
    VNNI,
    Build,
    Candidate,
    Failure,
    Kind,
    Measurement,
    Proposal,
    Result,
    SliceRequest,
    Stage,
    TargetSpec,
    Task,
    TrainingRow,
    TransferredResults,
    candidate_id,
    default_candidate,
)

SETTINGS = SearchSettings(seed=5, threads=1)
MEMBERS = tuple(registry.SOURCES)


@pytest.fixture(params=MEMBERS)
def source(request: pytest.FixtureRequest) -> CandidateSource:
    return registry.SOURCES[request.param]


@pytest.fixture(scope="module")
def on_cpu() -> Task:
    load_tvm()
    return matmul_task()


@pytest.fixture(scope="module")
def of_bytes() -> Task:
    return quantized_task()


@pytest.fixture
def matmul(source: CandidateSource, on_cpu: Task, of_bytes: Task) -> Task:
    """A product that the source takes: of this machine's CPU, or else of another or a GPU."""
    known = (on_cpu, of_bytes, for_gpu(on_cpu, cuda_target("9.0")))
    return next((t for t in known if source.takes(t) is None), known[-1])


def runs_here(task: Task) -> bool:
    return not task.target.is_cuda and task.target != WITH_VNNI


def for_gpu(task: Task, target: TargetSpec) -> Task:
    return replace(task, target=target, precision="tf32")


def proposed(source: CandidateSource, of: Task) -> tuple[Candidate, ...]:
    return source.search(SETTINGS).propose(of, 4).candidates


def ran(build: Build, of: Task, folder: Path) -> np.ndarray:
    """Run a build here; weights go in the layout that it takes."""
    path = folder / "kernel.so"
    path.write_bytes(build.library)
    tvm = load_tvm()
    arrays = list(random_inputs(of).values())
    for argument, axes in build.rewritten:
        shape = build.args[argument].shape
        as_one = arrays[argument].reshape([shape[axis] for axis in axes])
        arrays[argument] = np.ascontiguousarray(as_one.transpose(np.argsort(axes)))
    output = tvm.runtime.empty(of.args[-1].shape, of.args[-1].dtype)
    inputs = map(tvm.runtime.tensor, arrays)
    tvm.runtime.load_module(str(path))["main"](*inputs, output)
    return output.numpy()  # type: ignore[no-any-return]


def test_a_source_is_known_by_its_own_name(source: CandidateSource) -> None:
    assert registry.SOURCES[source.name] is source


def test_a_source_takes_a_task_or_says_why_not(source: CandidateSource, matmul: Task) -> None:
    reason = source.takes(matmul)
    assert reason is None or reason


def test_a_source_proposes_distinct_candidates_of_its_own(
    source: CandidateSource, matmul: Task
) -> None:
    found = proposed(source, matmul)
    assert found
    assert len({c.candidate_id for c in found}) == len({c.recipe for c in found}) == len(found)
    for candidate in found:
        assert (candidate.task_id, candidate.source) == (matmul.task_id, source.name)
        own = candidate_id(matmul.task_id, candidate.recipe, source=source.name)
        assert candidate.candidate_id == own


def test_equal_seeds_propose_the_same(source: CandidateSource, matmul: Task) -> None:
    assert proposed(source, matmul) == proposed(source, matmul)


def test_candidates_build_and_compute_what_the_default_computes(
    source: CandidateSource, matmul: Task, tmp_path: Path
) -> None:
    if not runs_here(matmul):  # it builds here, and a GPU tells the rest
        assert [built(build_candidate(matmul, c)) for c in proposed(source, matmul)[:2]]
        return
    reference = ran(built(build_candidate(matmul, default_candidate(matmul))), matmul, tmp_path)
    for number, candidate in enumerate(proposed(source, matmul)[:2]):
        folder = tmp_path / str(number)
        folder.mkdir()
        output = ran(built(build_candidate(matmul, candidate)), matmul, folder)
        np.testing.assert_allclose(output, reference, rtol=1e-4, atol=1e-4)


def disagreements(name: str, target: TargetSpec) -> list[str]:
    """Say how candidates of a source differ from the default on this process's GPU."""
    from tunerd.runner.agreement import disagreement
    from tunerd.runner.cuda_device import CudaDevice

    load_tvm()
    task = for_gpu(matmul_task(), target)
    builds = [build_candidate(task, c) for c in proposed(registry.SOURCES[name], task)]
    reference = built(build_candidate(task, default_candidate(task)))
    device = CudaDevice()
    found = [disagreement(device, reference, built(build)) for build in builds]
    return [failure.message for failure in found if failure is not None]


@pytest.mark.gpu
def test_candidates_compute_on_a_gpu_what_the_default_computes(source: CandidateSource) -> None:
    if source.name in LIBRARIES and (lacking := packages.missing(source.name)):
        pytest.skip(lacking)
    if source.name == VNNI:
        pytest.skip("its instructions are a CPU's")
    target = plan(SliceRequest("whole", 100)).target
    spawning = multiprocessing.get_context("spawn")  # nothing of ours may stay on a GPU
    with ProcessPoolExecutor(1, spawning) as process:
        assert process.submit(disagreements, source.name, target).result() == []


def test_a_kernel_at_hand_builds_to_what_its_recipe_builds_to(
    source: CandidateSource, matmul: Task
) -> None:
    search = source.search(SETTINGS)
    (candidate,) = search.propose(matmul, 1).candidates
    at_hand = search.lowered(candidate)
    by_recipe = built(build_candidate(matmul, candidate))
    assert built(build_candidate(matmul, candidate, lowered=at_hand)).library == by_recipe.library


def test_a_source_goes_on_after_a_fresh_start_that_is_told_earlier_results(
    source: CandidateSource, matmul: Task
) -> None:
    first = proposed(source, matmul)
    results = [Result(c, 1e-3 / (i + 1)) for i, c in enumerate(first[1:])]
    results.append(Result(first[0], None))
    fresh = source.search(SETTINGS)
    again = fresh.propose(matmul, 4, results=results)
    assert not {c.candidate_id for c in again.candidates} & {c.candidate_id for c in first}
    assert again.candidates or again.exhausted
    assert again.candidates or again.message


def test_candidates_under_way_elsewhere_are_not_proposed(
    source: CandidateSource, matmul: Task
) -> None:
    ids = [c.candidate_id for c in proposed(source, matmul)]
    again = source.search(SETTINGS).propose(matmul, 4, exclude=ids)
    assert not {c.candidate_id for c in again.candidates} & set(ids)


def test_what_other_runs_measured_is_taken_in(source: CandidateSource, matmul: Task) -> None:
    recipes = tuple((c.recipe, 1e-3) for c in proposed(source, matmul))
    search = source.search(SETTINGS)
    odd = TransferredResults(2, matmul, (("{", 1e-3),), source=source.name)
    past = TransferredResults(1, matmul, recipes, source=source.name)
    search.learn([past, odd], {matmul.task_id: matmul})
    assert search.propose(matmul, 2).candidates


@pytest.mark.parametrize("recipe", ["{", "[1]", "of another source", '[["no"],[]]'])
def test_a_foreign_recipe_is_a_failure_of_the_build(
    source: CandidateSource, matmul: Task, recipe: str
) -> None:
    name = candidate_id(matmul.task_id, recipe, source=source.name)
    failure = build_candidate(matmul, Candidate(matmul.task_id, name, source.name, recipe))
    assert isinstance(failure, Failure)
    assert (failure.stage, failure.kind) == (Stage.BUILD, Kind.COMPILE)


def test_a_candidate_of_an_unknown_source_is_a_failure_of_the_build(on_cpu: Task) -> None:
    failure = build_candidate(on_cpu, Candidate(on_cpu.task_id, "1" * 16, "gone", ""))
    assert isinstance(failure, Failure)
    assert f"no candidate source 'gone', only {', '.join(registry.SOURCES)}" in failure.message


def test_ids_of_candidates_say_their_source_and_old_ones_stay() -> None:
    assert candidate_id("t", "[]") == candidate_id("t", "[]", source=METASCHEDULE)
    assert candidate_id("t", "[]") == hashlib.sha256(b"t\n[]").hexdigest()[:16]
    assert candidate_id("t", "[]", source="other") != candidate_id("t", "[]")


# --- a source by one line ----------------------------------------------------------------------


class Numbers(CandidateSource):
    """A source whose recipes are numbers, all of them built as the default is."""

    name = "numbers"

    def takes(self, task: Task) -> str | None:
        return "numbers take no task of that name" if task.name == "refused" else None

    def lower(self, task: Task, recipe: str, lanes: int | None = None) -> LoweredKernel:
        int(recipe)
        return registry.SOURCES[DEFAULT_SOURCE].lower(task, "")

    def search(self, settings: SearchSettings) -> Search:
        return _Counting()


class _Counting(Search):
    def __init__(self) -> None:
        self._next = 0

    def learn(self, transferred: Sequence[TransferredResults], tasks: Mapping[str, Task]) -> None:
        pass

    def propose(
        self,
        task: Task,
        count: int,
        *,
        results: Sequence[Result] = (),
        exclude: Collection[str] = (),
        rows: Sequence[TrainingRow] = (),
    ) -> Proposal:
        numbers = [str(self._next + i) for i in range(count)]
        self._next += count
        found = tuple(
            Candidate(task.task_id, candidate_id(task.task_id, n, source="numbers"), "numbers", n)
            for n in numbers
        )
        return Proposal(found, False, "", 0.0)


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> CandidateSource:
    monkeypatch.setitem(registry.SOURCES, "numbers", Numbers())
    return registry.SOURCES["numbers"]


def run(
    tasks: Sequence[Task], tuner: Tuner, secs: Mapping[str, float], trials: int
) -> Iterator[tuple[Candidate, Measurement | Failure]]:
    """Search with one tuner and one slice, where a source's trials take so long; yield ends."""
    coordinator = Coordinator(tasks, Limits(trials=trials), sources=registry.searched())
    todo: list[Instruction] = coordinator.start([default_candidate(t) for t in tasks])
    todo += coordinator.handle(WorkerJoined("tuner", "tuner"))
    todo += coordinator.handle(WorkerJoined("slice", "slice"))
    while todo:
        instruction = todo.pop(0)
        match instruction:
            case Propose(task=of):
                answer = tuner.propose(
                    of.task_id,
                    instruction.source,
                    instruction.count,
                    instruction.results,
                    instruction.exclude,
                    instruction.rows,
                )
                todo += coordinator.handle(
                    Proposed(
                        "tuner",
                        of.task_id,
                        answer.candidates,
                        answer.exhausted,
                        answer.message,
                        answer.features,
                    )
                )
            case BuildThem(candidates=found):
                ended = zip(found, tuner.build(found), strict=True)
                todo += coordinator.handle(BuildsEnded("tuner", tuple(ended)))
            case Measure(builds=builds):
                times = [measured(secs[b.candidate.source]) for b in builds]
                of_builds = zip((b.candidate for b in builds), times, strict=True)
                todo += coordinator.handle(MeasurementsEnded("slice", tuple(of_builds)))
            case StoreEnded(results=results):
                yield from results
            case Finish():
                return


def tuner_of(*tasks: Task) -> Tuner:
    tuner = Tuner(seed=5, threads=1, island_number=0)
    tuner.warm_up(tasks)
    return tuner


def test_a_source_that_was_added_by_a_line_wins(numbers: CandidateSource, on_cpu: Task) -> None:
    secs = {DEFAULT_SOURCE: 1e-3, METASCHEDULE: 8e-4, "numbers": 1e-4}
    ends = list(run([on_cpu], tuner_of(on_cpu), secs, 6 * BATCH))
    counts = Counter(candidate.source for candidate, _ in ends)
    assert counts == {DEFAULT_SOURCE: 1, METASCHEDULE: BATCH, "numbers": 5 * BATCH}
    best = min((r.median_secs, c.source) for c, r in ends if isinstance(r, Measurement))
    assert best == (1e-4, "numbers")


def test_a_source_that_does_not_take_a_task_leaves_it_to_the_others(
    numbers: CandidateSource, on_cpu: Task
) -> None:
    refused = replace(on_cpu, name="refused")
    secs = {DEFAULT_SOURCE: 1e-3, METASCHEDULE: 8e-4, "numbers": 1e-4}
    ends = list(run([refused], tuner_of(refused), secs, 2 * BATCH))
    counts = Counter(candidate.source for candidate, _ in ends)
    assert counts == {DEFAULT_SOURCE: 1, METASCHEDULE: 2 * BATCH}


# --- how trials are split ----------------------------------------------------------------------


def split(secs: Mapping[str, float], trials: int) -> Counter[str]:
    """Return how many trials the sources of a task get, whose trials take about so long each."""
    of, rng = task("conv"), random.Random(3)
    coordinator = Coordinator([of], Limits(trials=trials), sources=tuple(secs))
    coordinator.restore([(default_candidate(of), measured(1e-3))], [])
    todo = coordinator.handle(WorkerJoined("tuner", "tuner"))
    todo += coordinator.handle(WorkerJoined("slice", "slice"))
    counts: Counter[str] = Counter()
    while todo:
        match todo.pop(0):
            case Propose(source=name, count=count):
                first = counts[name]
                counts[name] += count
                recipes = [str(first + i) for i in range(count)]
                found = [
                    Candidate(of.task_id, candidate_id(of.task_id, r, source=name), name, r)
                    for r in recipes
                ]
                todo += coordinator.handle(Proposed("tuner", of.task_id, tuple(found), False))
            case BuildThem(candidates=found):
                ended = tuple((c, Build(c, b"", "", 0.1, (), (), "llvm")) for c in found)
                todo += coordinator.handle(BuildsEnded("tuner", ended))
            case Measure(builds=builds):
                ends = tuple(
                    (b.candidate, measured(secs[b.candidate.source] * (1 + rng.random())))
                    for b in builds
                )
                todo += coordinator.handle(MeasurementsEnded("slice", ends))
    return counts


def test_each_source_gets_a_batch_and_then_the_better_one_the_rest() -> None:
    assert split({"slow": 5e-4, "fast": 1e-4}, 10 * BATCH) == {"slow": BATCH, "fast": 9 * BATCH}


def test_sources_that_are_as_fast_share_the_trials() -> None:
    counts = split({"one": 1e-4, "other": 1e-4}, 16 * BATCH)
    assert sum(counts.values()) == 16 * BATCH
    assert min(counts.values()) >= 4 * BATCH


def test_metaschedule_waits_where_another_source_has_found_something() -> None:
    secs = {"templates": 5e-4, METASCHEDULE: 1e-4}
    assert split(secs, 4 * BATCH) == {"templates": 4 * BATCH}
    assert split(secs, 40 * BATCH)[METASCHEDULE] >= 20 * BATCH


def test_a_split_repeats() -> None:
    secs = {"one": 1e-4, "other": 1.1e-4, "third": 2e-4}
    assert split(secs, 20 * BATCH) == split(secs, 20 * BATCH)


def test_tensor_intrinsics_are_registered_and_the_parser_is_left_as_it_was() -> None:
    from tvm.s_tir import TensorIntrin
    from tvm.tirx.script.parser import entry

    load_tensor_intrinsics()

    assert TensorIntrin.get("wmma_load_16x16x16_f16_a_shared", allow_missing=True) is not None
    assert entry.inspect is inspect
