"""Shares of cores: what a plan cuts of machines with and without hardware threads."""

from __future__ import annotations

import dataclasses

import pytest

from tunerd.slices import plan
from tunerd.studies.timing import slices_of_a_device
from tunerd.system import host, targets
from tunerd.vocabulary import SliceRequest, TargetSpec

FACTS = host.facts()  # of this machine; each test sets its cores

LAYOUTS = {
    "one core": ((0,),),
    "five cores": tuple((i,) for i in range(5)),
    "one core of two threads": ((0, 1),),
    "two cores of two threads": ((0, 2), (1, 3)),
    "four cores of two threads": tuple((i, i + 4) for i in range(4)),
    "eight cores of two threads": tuple((2 * i, 2 * i + 1) for i in range(8)),
    "sixteen cores of two threads": tuple((i, i + 16) for i in range(16)),
    "three cores of four threads": tuple(tuple(range(4 * i, 4 * i + 4)) for i in range(3)),
    "two cores of two threads and four of one": ((0, 1), (2, 3), (4,), (5,), (6,), (7,)),
    "seventy cores of two threads": tuple((i, i + 70) for i in range(70)),
}
Groups = tuple[tuple[int, ...], ...]


@pytest.fixture(autouse=True)
def without_tvm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "cpu_target_json", lambda cores: TargetSpec("llvm", f"{cores}"))


def machine(monkeypatch: pytest.MonkeyPatch, groups: Groups, quota: float | None = None) -> None:
    cores = tuple(sorted(core for group in groups for core in group))
    facts = dataclasses.replace(FACTS, cores=cores, core_siblings=groups, core_quota=quota)
    monkeypatch.setattr(host, "facts", lambda: facts)


def cut(pct: int) -> list[tuple[int, ...]]:
    return [spec.cores for spec in plan(SliceRequest("cpu", pct)).slices]


@pytest.mark.parametrize("quota", [None, 3.5])
@pytest.mark.parametrize("groups", LAYOUTS.values(), ids=LAYOUTS)
def test_each_share_of_a_thread_or_more_is_cut_and_no_two_slices_share_a_core(
    groups: Groups, quota: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, groups, quota)
    core_of = {thread: number for number, group in enumerate(groups) for thread in group}
    usable = host.facts().usable_cores
    for pct in range(1, 101):
        planned = plan(SliceRequest("cpu", pct))
        threads = usable * pct // 100
        if threads == 0:
            assert planned.slices == ()
            continue
        assert planned.problem == ""
        assert {len(spec.cores) for spec in planned.slices} == {threads}, pct
        assert 1 <= len(planned.slices) <= 100 // pct
        taken = [{core_of[thread] for thread in spec.cores} for spec in planned.slices]
        assert sum(map(len, taken)) == len(set().union(*taken)), pct
        assert planned.target.json == str(threads)


@pytest.mark.parametrize("groups", LAYOUTS.values(), ids=LAYOUTS)
def test_a_share_of_less_than_a_thread_names_the_least_that_works(
    groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, groups)
    for pct in range(1, 101):
        planned = plan(SliceRequest("cpu", pct))
        if planned.slices:
            break
        least = int(planned.problem.rpartition("give at least ")[2].removesuffix("%"))
        assert plan(SliceRequest("cpu", least)).slices
        assert plan(SliceRequest("cpu", least - 1)).slices == ()


def test_a_last_core_whose_second_thread_is_not_needed_is_no_other_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(monkeypatch, LAYOUTS["four cores of two threads"])
    assert cut(40) == [(0, 1, 4), (2, 3, 6)]
    assert cut(90) == [(0, 1, 2, 3, 4, 5, 6)]
    assert cut(12) == []
    assert cut(13) == [(0,), (1,), (2,), (3,)]


def test_where_cores_differ_those_of_one_thread_fill_up_what_whole_ones_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(monkeypatch, ((0, 1), (2, 3), (4,), (5,)))
    assert cut(50) == [(0, 1, 4), (2, 3, 5)]


def test_fewer_slices_than_the_percentage_allows_are_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(monkeypatch, LAYOUTS["four cores of two threads"])
    assert (
        plan(SliceRequest("cpu", 13)).bound == "4 slice(s) of 1 core(s) fit without sharing a core"
    )


def test_the_first_device_has_slices_of_a_share_that_ends_within_a_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(monkeypatch, LAYOUTS["two cores of two threads"])
    _, specs = slices_of_a_device("cpu", 75)
    assert [spec.cores for spec in specs] == [(0, 1, 2)]
