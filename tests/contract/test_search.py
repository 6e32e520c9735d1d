"""Searching: distinct candidates, learning from results, going on in a fresh process."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.lib import ROOT
from tests.lib.artifact_fixtures import CUDA
from tests.lib.build_fixtures import built, conv_task, default_of, matmul_task
from tunerd.builder.build import build_candidate
from tunerd.candidates.base import BATCH
from tunerd.candidates.metaschedule.search import Searcher
from tunerd.candidates.registry import lower
from tunerd.vocabulary import (
    Candidate,
    Result,
    TargetSpec,
    Task,
    TrainingRow,
    candidate_id,
    default_candidate,
)


def searcher(island: int = 0, seed: int = 0) -> Searcher:
    return Searcher(seed=seed, threads=1, island_number=island)


def told(candidates: Sequence[Candidate]) -> list[Result]:
    """Give each candidate a time, the last one none."""
    times = [Result(c, 1e-3 / (i + 1)) for i, c in enumerate(candidates[:-1])]
    return [*times, Result(candidates[-1], None)]


@pytest.fixture(scope="module")
def task() -> Task:
    return matmul_task()


@pytest.fixture(scope="module")
def first(task: Task) -> tuple[Candidate, ...]:
    """The first batch of a search."""
    return searcher().propose(task, BATCH).candidates


def test_proposed_candidates_are_distinct(first: tuple[Candidate, ...]) -> None:
    assert len(first) > 1
    assert len({c.candidate_id for c in first}) == len(first)
    assert len({c.recipe for c in first}) == len(first)


def test_a_candidate_is_named_by_its_task_and_trace(
    task: Task, first: tuple[Candidate, ...]
) -> None:
    for candidate in first:
        assert candidate.task_id == task.task_id
        assert not candidate.is_default
        assert candidate.candidate_id == candidate_id(task.task_id, candidate.recipe)


def test_no_more_candidates_come_than_were_asked_for(task: Task) -> None:
    assert len(searcher().propose(task, 3).candidates) <= 3


def test_later_batches_repeat_nothing(task: Task) -> None:
    search = searcher()
    seen: set[str] = set()
    results: list[Result] = []
    for _ in range(3):
        batch = search.propose(task, 6, results=results).candidates
        ids = {c.candidate_id for c in batch}
        assert not ids & seen
        seen |= ids
        results = told(batch) if batch else []


def test_what_is_under_way_elsewhere_is_not_proposed(
    task: Task, first: tuple[Candidate, ...]
) -> None:
    ids = [c.candidate_id for c in first]
    again = searcher().propose(task, BATCH, exclude=ids)
    assert not {c.candidate_id for c in again.candidates} & set(ids)


def test_the_same_seed_proposes_the_same(task: Task, first: tuple[Candidate, ...]) -> None:
    assert searcher().propose(task, BATCH).candidates == first


def test_another_island_proposes_others(task: Task, first: tuple[Candidate, ...]) -> None:
    assert searcher(island=1).propose(task, BATCH).candidates != first


def test_results_train_the_cost_model(task: Task) -> None:
    search = searcher()
    batch = search.propose(task, BATCH).candidates
    search.propose(task, BATCH, results=told(batch))
    assert search._cost_model.told(task.task_id) == len(batch)


def test_each_candidate_comes_with_what_a_cost_model_sees_of_it(task: Task) -> None:
    search = searcher()
    proposal = search.propose(task, BATCH)
    design = search._islands[task.task_id].design
    assert len(proposal.features) == len(proposal.candidates)
    for candidate, features in zip(proposal.candidates, proposal.features, strict=True):
        sketch = design.find(trace := json.loads(candidate.recipe))
        assert sketch is not None
        (row,) = sketch.features(sketch.encode(trace)[None]).astype(np.float32)
        np.testing.assert_array_equal(np.frombuffer(features, np.float32), row)


def test_what_other_processes_found_for_other_tasks_trains_the_cost_model(task: Task) -> None:
    elsewhere, here = searcher(island=1), searcher()
    conv = conv_task()
    proposal = elsewhere.propose(conv, BATCH)
    pairs = zip(told(proposal.candidates), proposal.features, strict=True)
    examples = [
        TrainingRow(conv.task_id, t.candidate.candidate_id, features, t.run_secs)
        for t, features in pairs
    ]
    assert here.propose(task, BATCH, rows=examples).candidates
    assert here._cost_model.told(conv.task_id) == len(examples)
    # An island of that task, which comes to know of them as candidates too, learns nothing twice.
    elsewhere.propose(conv, BATCH, results=told(proposal.candidates), rows=examples)
    here.propose(conv, BATCH, results=told(proposal.candidates))
    for search in (elsewhere, here):
        assert search._cost_model.told(conv.task_id) == len(examples)


def test_an_earlier_islands_results_are_learned_and_not_proposed_again(
    task: Task, first: tuple[Candidate, ...]
) -> None:
    fresh = searcher()
    proposal = fresh.propose(task, BATCH, results=told(first))
    assert proposal.candidates
    assert not {c.candidate_id for c in proposal.candidates} & {c.candidate_id for c in first}
    assert fresh._cost_model.told(task.task_id) == len(first)


def test_a_result_of_the_default_is_passed_over(task: Task) -> None:
    proposal = searcher().propose(task, 4, results=[Result(default_candidate(task), 1e-3)])
    assert proposal.candidates


def test_a_task_of_which_nothing_keeps_the_limits_says_so() -> None:
    target = json.loads(CUDA.json) | {"max_shared_memory_per_block": 8}
    task = conv_task(TargetSpec("cuda", json.dumps(target)))
    searcher = Searcher(seed=0, threads=1)
    proposals = [searcher.propose(task, 4) for _ in range(3)]
    assert {p.message for p in proposals} == {"no choice keeps the device's limits"}
    assert [p.exhausted for p in proposals] == [False, False, True]


def test_a_task_without_a_search_space_is_exhausted_with_a_message() -> None:
    broken = dataclasses.replace(matmul_task(), task_id="f" * 12, mod_json="{}")
    proposal = searcher().propose(broken, BATCH)
    assert proposal.candidates == ()
    assert proposal.exhausted
    assert proposal.message


def test_a_small_space_ends_as_exhausted() -> None:
    tiny = single_element()
    search = searcher()
    results: list[Result] = []
    for _ in range(40):
        proposal = search.propose(tiny, BATCH, results=results)
        results = [Result(c, 1e-6) for c in proposal.candidates]
        if proposal.exhausted:
            return
    raise AssertionError("a space of a few candidates was never exhausted")


def single_element() -> Task:
    from tvm import te

    from tests.lib.build_fixtures import task_of

    data = te.placeholder((1,), name="data")
    return task_of([data, te.compute((1,), lambda i: data[i] * 2.0, name="twice")])


_IMPORTS = """
import sys
from tests.lib.build_fixtures import default_of, matmul_task
from tunerd.builder.build import build_candidate
from tunerd.candidates.metaschedule.search import Searcher
from tunerd.vocabulary import Build
task = matmul_task()
(candidate,) = Searcher(seed=0, threads=1).propose(task, 1).candidates
assert isinstance(build_candidate(task, candidate), Build)
assert isinstance(build_candidate(task, default_of(task)), Build)
print([m for m in sys.modules if m.startswith("tvm.s_tir.tensor_intrin")])
"""


def python(code: str, *arguments: str) -> str:
    """Run code in a fresh process, in the tests' folder."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_searching_and_building_fp32_imports_no_tensor_intrinsics() -> None:
    assert python(_IMPORTS) == "[]"


_HASHES = """
import json, sys
import tvm_ffi
from tests.lib.build_fixtures import conv_task, default_of
from tunerd.builder.library import load_tvm
from tunerd.candidates.registry import lower
from tunerd.vocabulary import Candidate, METASCHEDULE, TargetSpec
target, traces, default_first = json.load(open(sys.argv[1]))
load_tvm()
task = conv_task(TargetSpec(*target))
if default_first:
    lower(task, default_of(task))
hashes = []
for trace in traces:
    mod = lower(task, Candidate(task.task_id, "0" * 16, METASCHEDULE, trace)).mod
    hashes.append(str(tvm_ffi.structural_hash(mod)))
print(json.dumps(hashes))
"""


@pytest.mark.parametrize("default_first", [False, True], ids=["alone", "after the default"])
@pytest.mark.parametrize("kind", ["llvm", "cuda"])
def test_another_process_makes_the_same_schedules_of_the_traces(
    kind: str, default_first: bool, tmp_path: Path
) -> None:
    import tvm_ffi

    task = conv_task(CUDA) if kind == "cuda" else conv_task()
    search = searcher()
    batch = search.propose(task, 3).candidates
    assert batch
    originals = [search.lowered(c) for c in batch]
    path = tmp_path / "traces.json"
    target = [task.target.kind, task.target.json]
    path.write_text(json.dumps([target, [c.recipe for c in batch], default_first]))
    assert json.loads(python(_HASHES, str(path))) == [
        str(tvm_ffi.structural_hash(kernel.mod)) for kernel in originals if kernel
    ]


def test_this_process_makes_the_same_schedules_after_the_default_was_built() -> None:
    import tvm_ffi

    task = conv_task(CUDA)
    search = searcher()
    batch = search.propose(task, 3).candidates
    lower(task, default_of(task))
    for candidate in batch:
        original = search.lowered(candidate)
        assert original is not None
        assert tvm_ffi.structural_equal(lower(task, candidate).mod, original.mod)


def test_a_search_gives_up_its_module_once_the_result_is_told(task: Task) -> None:
    search = searcher()
    (candidate,) = search.propose(task, 1).candidates
    assert search.lowered(candidate) is not None
    search.propose(task, 1, results=[Result(candidate, 1e-3)])
    assert search.lowered(candidate) is None


def test_candidates_of_a_search_build(task: Task, first: tuple[Candidate, ...]) -> None:
    assert built(build_candidate(task, first[0])).candidate == first[0]
