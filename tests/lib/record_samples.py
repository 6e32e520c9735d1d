"""Tasks, candidates and results for stores, and a store in every place that one can be in."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.lib.store_places import KINDS, StorePlace, proposed
from tunerd.records import RunFacts, Store
from tunerd.vocabulary import (
    DEFAULT_SOURCE,
    METASCHEDULE,
    Activity,
    Candidate,
    CapProof,
    Conditions,
    Failure,
    Kind,
    Measurement,
    Phase,
    PhaseTime,
    Record,
    SliceSpec,
    Span,
    Stage,
    TargetSpec,
    Task,
    TensorSpec,
)
from tunerd.vocabulary.outcome import Comparison, Finalist, TaskOutcome
from tunerd.vocabulary.verdict import Verdict

LLVM = TargetSpec("llvm", '{"kind":"llvm","mcpu":"znver3"}')
FACTS = RunFacts("net", "d" * 64, LLVM, "CPU X", "cpu", 50, "0.27.0")
TASK = Task("t0", "conv", 3, 1e9, (TensorSpec("a", (1, 2), "float32"),), (0,), LLVM, "{}")
OTHER_TASK = dataclasses.replace(TASK, task_id="t1", name="dense", weight_args=())
WRONG = Failure(Stage.RUN, Kind.WRONG_ANSWER, "off by one")
COLLATERAL = Failure(Stage.RUN, Kind.COLLATERAL, "its GPU died")


def candidate(number: int, task_id: str = "t0", source: str = METASCHEDULE) -> Candidate:
    return Candidate(task_id, f"{number:016x}", source, recipe=f"[[{number}],[]]")


def measurement(*run_secs: float) -> Measurement:
    return Measurement(run_secs, 10, "search-v1", "cpu-0-0", 1, Conditions(1980, 41, 350.5, 1))


def disturbed(secs: float, by: str = "1 process of others: pid 4242") -> Measurement:
    seen = Conditions(1980, 41, 350.5, 1, strangers=1, disturbed_by=by)
    return dataclasses.replace(measurement(secs), conditions=seen)


def ids_of(records: Iterable[Record]) -> list[str]:
    """Return the ids of the trials' candidates."""
    return [r.candidate.candidate_id for r in records]


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> StorePlace:
    """Return the place of a run; in a team's store another run has the same tasks and trials."""
    if request.param == "run folder":
        return StorePlace(folder=str(tmp_path))
    if request.param == "team's file":
        address = f"sqlite:///{tmp_path / 'team.sqlite'}"
    else:
        address = request.getfixturevalue("postgres").new_database()
    place = StorePlace(address=address, identity="ours")
    with place.fresh().open(FACTS, now=0.5) as neighbour:
        fill(neighbour)
    return place


def fill(store: Store) -> None:
    """Give a run some of everything that the tests put into theirs."""
    store.register_tasks([OTHER_TASK, TASK])
    ids = proposed(store, [candidate(i, f"t{i % 2}") for i in range(1, 9)], now=1.0)
    store.start(ids[:5], "cpu-0-0", now=2.0)
    store.finish_all({ids[0]: measurement(1e-9), ids[1]: measurement(1e-9), ids[2]: COLLATERAL})
    store.save_slices([SliceSpec("mps-0-0", "mps", 10)])
    store.save_proof(CapProof("mps-0-0", "another", 1, 2, "mps", True))
    store.add_spans([Span("tuner-9", Activity.IDLE, 0.0, 1.0)])
    store.add_phase(PhaseTime(Phase.SEARCH, 0.0, 1.0))
    store.save_task_outcome(outcome_of(candidate(1), note="of another run"))


def outcome_of(winner: Candidate, note: str = "") -> TaskOutcome:
    return TaskOutcome(
        task_id="t0",
        name="conv",
        weight=3,
        trials=2,
        failed=1,
        default_secs=2.0,
        best_secs=1.0,
        winner=winner,
        comparison=Comparison(Verdict.FASTER, 2.0, 1.0, 2.0, 1.9, 2.1),
        note=note,
        finalists=(
            Finalist(winner.candidate_id, METASCHEDULE, 1.1, measurement(1.0, 1.1)),
            Finalist("f" * 16, DEFAULT_SOURCE, None, WRONG),
        ),
    )


@pytest.fixture
def store(place: StorePlace):
    with place.open(FACTS, now=1.0) as opened:
        opened.register_tasks([TASK, OTHER_TASK])
        yield opened
