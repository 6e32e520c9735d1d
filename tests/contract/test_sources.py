"""Candidate sources: what each member of the family promises, and how a run splits its trials."""

from __future__ import annotations

import hashlib
import inspect
import random
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import pytest

from tests.lib.build_fixtures import WITH_VNNI, conv_task, quantized_task
from tests.lib.coordinator_world import measured, task
from tests.lib.on_a_gpu import in_own_process
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
from tunerd.libraries import naming, packages
from tunerd.libraries.cudnn_graphs import Configuration
from tunerd.slices import plan
from tunerd.system.targets import cpu_target_json, cuda_target
from tunerd.testing import SourceContract
from tunerd.testing.kernels import built, matmul_task
from tunerd.testing.sources import for_gpu, proposed
from tunerd.vocabulary import (
    CUDNN,
    DEFAULT_SOURCE,
    FMA,
    LIBRARIES,
    METASCHEDULE,
    VNNI,
    Build,
    Candidate,
    Failure,
    Measurement,
    Proposal,
    Result,
    SliceRequest,
    TargetSpec,
    Task,
    TrainingRow,
    TransferredResults,
    candidate_id,
    default_candidate,
)

MEMBERS = tuple(registry.SOURCES)


@pytest.fixture(scope="module")
def on_cpu() -> Task:
    load_tvm()
    return matmul_task()


def convolution() -> Task:
    """Return a convolution whose filters and bias are weights."""
    return replace(conv_task(), weight_args=(1, 2))


def disagreements(name: str, target: TargetSpec) -> list[str]:
    """Say how candidates of a source differ from the default on this process's GPU."""
    from tunerd.runner.agreement import disagreement
    from tunerd.runner.cuda_device import CudaDevice

    load_tvm()
    task = for_gpu(convolution() if name == CUDNN else matmul_task(), target)
    builds = [build_candidate(task, c) for c in proposed(registry.SOURCES[name], task)]
    reference = built(build_candidate(task, default_candidate(task)))
    device = CudaDevice()
    found = [disagreement(device, reference, built(build)) for build in builds]
    return [failure.message for failure in found if failure is not None]


class TestSources(SourceContract):
    @pytest.fixture(params=MEMBERS)
    def source(self, request: pytest.FixtureRequest) -> CandidateSource:
        return registry.SOURCES[request.param]

    @pytest.fixture(autouse=True)
    def plans(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have plans of cuDNN where it is not installed."""
        found = [Configuration(engine, ((2, 8),), 256) for engine in range(8)]
        monkeypatch.setattr(naming, "named", lambda call, device: found)

    @pytest.fixture
    def task(self, source: CandidateSource, on_cpu: Task) -> Task:
        """Return a task that the source takes: of this machine's CPU, another one or a GPU."""
        if source.name == CUDNN:
            return for_gpu(convolution(), cuda_target("9.0"))
        known = (
            on_cpu,
            matmul_task(cpu_target_json(2)),
            quantized_task(),
            for_gpu(on_cpu, cuda_target("9.0")),
        )
        return next((t for t in known if source.takes(t) is None), known[-1])

    @pytest.fixture
    def runs_here(self, task: Task) -> bool:
        return not task.target.is_cuda and task.target != WITH_VNNI


@pytest.mark.gpu
@pytest.mark.parametrize("name", MEMBERS)
def test_candidates_compute_on_a_gpu_what_the_default_computes(name: str) -> None:
    if name in LIBRARIES and (lacking := packages.missing(name)):
        pytest.skip(lacking)
    if name in (FMA, VNNI):
        pytest.skip("its instructions are a CPU's")
    target = plan(SliceRequest("whole", 100)).target
    assert in_own_process(disagreements, name, target) == []


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
        found = tuple(Candidate.of_recipe(task.task_id, n, source="numbers") for n in numbers)
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
                found = [Candidate.of_recipe(of.task_id, r, source=name) for r in recipes]
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
    from tvm.script.parser.core.entry import parse
    from tvm.tirx.script.parser import entry

    register = TensorIntrin.register
    load_tensor_intrinsics()

    for name in ("wmma_load_16x16x16_f16_a_shared", "wmma_sync_16x16x16_s8s8s32", "dot_16x4_vnni"):
        assert TensorIntrin.get(name, allow_missing=True) is not None
    assert TensorIntrin.get("rocm_sdot4", allow_missing=True) is None
    assert entry.inspect is inspect
    assert entry.parse is parse
    assert TensorIntrin.register is register


@pytest.mark.parametrize("dtype", ["float16", "int8"])
@pytest.mark.parametrize("transposed", [False, True])
def test_all_intrinsics_are_registered_that_dlight_asks_for(dtype: str, transposed: bool) -> None:
    from tvm.s_tir import TensorIntrin
    from tvm.s_tir.tensor_intrin.cuda import get_wmma_intrin_group

    load_tensor_intrinsics()

    for summed in ("float16", "float32") if dtype == "float16" else ("int32",):
        for store in ("shared.dyn", "global"):
            asked = get_wmma_intrin_group(
                load_scope="shared.dyn",
                store_scope=store,
                in_dtype=dtype,
                out_dtype=summed,
                trans_b=transposed,
            )
            lacking = {n for n in asked.values() if TensorIntrin.get(n, allow_missing=True) is None}
            assert not lacking
