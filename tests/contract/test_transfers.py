"""What other runs measured, in the searches of this one: proposed first, or taught."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.lib.artifact_fixtures import CUDA
from tests.lib.build_fixtures import conv_task, matmul_task
from tunerd.candidates import registry
from tunerd.candidates.base import BATCH, Search, SearchSettings
from tunerd.candidates.metaschedule.knobs import Choices, Location, Option, Tile
from tunerd.candidates.metaschedule.search import Searcher
from tunerd.candidates.metaschedule.space import DesignSpace, design_space
from tunerd.vocabulary import (
    TRITON,
    Candidate,
    Result,
    TargetSpec,
    Task,
    TransferredResults,
)

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
