"""A store of trials, and a cluster whose slices answer the finals as they were told to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from tests.lib.record_samples import FACTS, TASK
from tests.lib.store_places import proposed
from tunerd.cluster.ray_cluster import Cluster
from tunerd.records import Store
from tunerd.runner.base import Company
from tunerd.runs.finals.quiet_slice import Finals, QuietSlice
from tunerd.runs.finals.selection import choose_winners
from tunerd.vocabulary import (
    METASCHEDULE,
    Build,
    Candidate,
    Conditions,
    Failure,
    Kind,
    Measurement,
    Stage,
    Task,
    default_candidate,
)
from tunerd.vocabulary.outcome import TaskOutcome

OTHER = dataclasses.replace(TASK, task_id="t1", name="dense")
WRONG = Failure(Stage.VERIFY, Kind.WRONG_ANSWER, "out differs from the default schedule's")
CRASH = Failure(Stage.RUN, Kind.CRASH, "the runner ended: SIGSEGV")
COLLATERAL = Failure(Stage.RUN, Kind.COLLATERAL, "a neighbour's fault")


def candidate(number: int, task: Task = TASK) -> Candidate:
    return Candidate(task.task_id, f"{number:016x}", METASCHEDULE, f"[[{number}],[]]")


def samples(secs: float, profile: str = "final-v1") -> Measurement:
    return Measurement(tuple(secs * (1 + 1e-4 * i) for i in range(20)), 1, profile, "quiet", 1)


class FakeCluster:
    """Answers as a slice would: quiet times and disagreements are given by candidate.

    A candidate that has a failure instead of a time fails so, and fails no other.
    """

    def __init__(
        self,
        quiet_secs: Mapping[str, float | Failure],
        wrong: Sequence[str] = (),
        unbuildable: Sequence[str] = (),
        collateral: int = 0,
        faulty: Sequence[str] = (),
    ) -> None:
        self.quiet_secs, self.wrong, self.unbuildable = quiet_secs, wrong, unbuildable
        self.faulty = faulty  # end every comparison in which they are, named if it is alone
        self.collateral = collateral  # how many comparisons a neighbour spoils
        self.disturbed = 0  # how many comparisons and looks somebody disturbs
        self.calls: list[str] = []
        self.turns: list[int] = []  # at most, of each comparison
        self.places: list[tuple[str, str]] = []
        self.answers: dict[str, list[Any]] = {}  # of other methods, one after the other

    def build_all(self, candidates: Sequence[Candidate]) -> list[Build | Failure]:
        self.calls.append("build")
        return [
            Failure(Stage.BUILD, Kind.COMPILE, "no")
            if c.candidate_id in self.unbuildable
            else Build(c, b"", "", 0.1, TASK.args, (0,), "llvm")
            for c in candidates
        ]

    def call_all(self, asked: Sequence[tuple[str, str, tuple[Any, ...]]]) -> list[Any]:
        return [self.call(slice_id, method, *arguments) for slice_id, method, arguments in asked]

    def call(self, slice_id: str, method: str, *arguments: Any) -> Any:
        self.calls.append(method)
        self.places.append((slice_id, method))
        if method in self.answers:
            return self.answers[method].pop(0) if self.answers[method] else None
        if method == "agree":
            return WRONG if arguments[1].candidate.candidate_id in self.wrong else None
        if method in ("compare", "conditions"):
            self.disturbed -= 1
        if method == "conditions":
            return Conditions(disturbed_by="pid 7" if self.disturbed >= 0 else "")
        builds, profile, company = arguments
        self.turns.append(profile.max_samples)
        self.collateral -= 1
        if self.collateral >= 0:
            return [COLLATERAL] * len(builds)
        if any(b.candidate.candidate_id in self.faulty for b in builds):
            return [CRASH if company.is_alone else COLLATERAL] * len(builds)
        found = [self.quiet_secs[b.candidate.candidate_id] for b in builds]
        results = [secs if isinstance(secs, Failure) else samples(secs) for secs in found]
        results = [r if isinstance(r, Failure) else taken_in(r, company) for r in results]
        if self.disturbed < 0:
            return results
        return [r if isinstance(r, Failure) else disturbed(r) for r in results]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create_or_open(tmp_path, facts=FACTS) as opened:
        opened.register_tasks([TASK, OTHER])
        yield opened


def taken_in(result: Measurement, company: Company) -> Measurement:
    return dataclasses.replace(result, conditions=company.seen_in(result.conditions))


def disturbed(result: Measurement, by: str = "pid 7") -> Measurement:
    conditions = dataclasses.replace(result.conditions, strangers=1, disturbed_by=by)
    return dataclasses.replace(result, conditions=conditions)


def searched(
    store: Store, *secs: float, task: Task = TASK, noisy: Sequence[int] = ()
) -> list[Candidate]:
    """Store trials with these medians in the search and return their candidates.

    `noisy` are the places of those that were disturbed.
    """
    candidates = [candidate(i + 1, task) for i in range(len(secs))]
    ids = proposed(store, candidates)
    store.start(ids, "cpu-0-0")
    results = [samples(s, "search-v1") for s in secs]
    results = [disturbed(r) if i in noisy else r for i, r in enumerate(results)]
    store.finish_all(dict(zip(ids, results, strict=True)))
    return candidates


def choose(
    store: Store,
    cluster: FakeCluster,
    tasks: Sequence[Task] = (TASK,),
    **options: Any,
) -> list[TaskOutcome]:
    """Choose the tasks' winners with options of `choose_winners`."""
    quiet = QuietSlice(cast(Cluster, cluster), "quiet")
    chosen = choose_winners(tasks, store, quiet, say=lambda message: None, unsearched={}, **options)
    return list(chosen)


def times(default: float, *of_candidates: float, task: Task = TASK) -> dict[str, float | Failure]:
    named: dict[str, float | Failure] = {default_candidate(task).candidate_id: default}
    return named | {candidate(i + 1).candidate_id: s for i, s in enumerate(of_candidates)}


def with_load(cluster: FakeCluster, *ends: Any) -> FakeCluster:
    """Have the neighbours' load begin, and end in these ways."""
    cluster.answers = {"load": [0.1] * 99, "repeat": [], "stop": list(ends)}
    return cluster


def decided(
    store: Store, cluster: FakeCluster, finals: Finals, tasks: Sequence[Task] = (TASK,)
) -> list[TaskOutcome]:
    quiet = QuietSlice(cast(Cluster, cluster), "quiet", ("near-1", "near-2"), finals)
    return list(choose_winners(tasks, store, quiet, say=lambda message: None, unsearched={}))


def neighbours_of(outcome: TaskOutcome) -> set[int | None]:
    results = [f.measurement for f in outcome.finalists]
    return {r.conditions.neighbours for r in results if isinstance(r, Measurement)}


def finalist_ids(outcome: TaskOutcome) -> list[str]:
    return [f.candidate_id for f in outcome.finalists if not f.is_default]
