"""What becomes of finals in which a slice is lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from tunerd.cluster.ray_cluster import Cluster
from tunerd.errors import InfrastructureError
from tunerd.runner.base import ALONE
from tunerd.runner.load import Repeats
from tunerd.runs.finals.quiet_slice import RESTARTS, Finals, QuietSlice
from tunerd.slices.neighbors import BUSY
from tunerd.vocabulary import (
    METASCHEDULE,
    MODEL,
    Build,
    Candidate,
    Conditions,
    Failure,
    Kind,
    Measurement,
    Stage,
)

BUILD = Build(Candidate("t" * 16, "c" * 16, METASCHEDULE, "[]"), b"", "", 0.1, (), (), "llvm")


def measured(neighbours: int) -> Measurement:
    return Measurement((1e-3,) * 5, 1, "any", "quiet", 1, Conditions(neighbours=neighbours))


MEASURED = measured(0)
KILLED = Failure(Stage.RUN, Kind.COLLATERAL, "killed from outside")


@dataclass
class LosingCluster:
    """Loses a slice in calls of one method, or has its runner killed, some times."""

    method: str
    losses: int = 0
    killed_runners: int = 0
    asked: list[tuple[str, str]] = field(default_factory=list)
    revived: list[tuple[str, ...]] = field(default_factory=list)

    def call(self, slice_id: str, method: str, *arguments: Any) -> Any:
        return self.call_all([(slice_id, method, arguments)])[0]

    def call_all(self, asked: list[tuple[str, str, tuple[Any, ...]]]) -> list[Any]:
        self.asked += [(slice_id, method) for slice_id, method, _ in asked]
        if any(method == self.method for _, method, _ in asked) and self.losses:
            self.losses -= 1
            raise InfrastructureError("the actor died")
        return [self._answer(method, *arguments) for _, method, arguments in asked]

    def _answer(self, method: str, *arguments: Any) -> Any:
        if method in ("compare", "compare_models"):
            self.killed_runners -= 1
            (company,) = arguments[2:] or (ALONE,)
            found = MEASURED if company.neighbours is None else measured(company.neighbours)
            return [KILLED if self.killed_runners >= 0 else found] * len(arguments[0])
        return {
            "agree": None,
            "load": 1e-3,
            "repeat": None,
            "stop": Repeats("near", (), (), 0),
            "run_model": {"y": 1},
        }[method]

    def revive(self, slice_ids: Any, message: str) -> None:
        assert "the actor died" in message
        self.revived.append(tuple(slice_ids))


def quiet_in(cluster: LosingCluster, *others: str) -> QuietSlice:
    finals = Finals(neighbours=BUSY) if others else Finals()
    return QuietSlice(cast(Cluster, cluster), "quiet", others, finals=finals, revive=cluster.revive)


WORK = {
    "compare": (lambda quiet: quiet.compare([[BUILD, BUILD]]), [[MEASURED, MEASURED]]),
    "compare_models": (
        lambda quiet: quiet.compare_models(("a", "b"), MODEL),
        [MEASURED, MEASURED],
    ),
    "agree": (lambda quiet: quiet.agree(BUILD, BUILD), None),
    "run_model": (lambda quiet: quiet.run_model("a", {}), {"y": 1}),
}


@pytest.mark.parametrize("method", WORK)
def test_work_in_which_a_slice_is_lost_is_done_again_when_it_was_started_again(
    method: str,
) -> None:
    work, expected = WORK[method]
    cluster = LosingCluster(method, losses=RESTARTS)
    assert work(quiet_in(cluster)) == expected
    assert cluster.revived == [("quiet",)] * RESTARTS


@pytest.mark.parametrize("method", WORK)
def test_a_slice_that_is_lost_again_and_again_ends_the_run(method: str) -> None:
    cluster = LosingCluster(method, losses=RESTARTS + 1)
    with pytest.raises(InfrastructureError, match="the actor died"):
        WORK[method][0](quiet_in(cluster))
    assert cluster.asked == [("quiet", method)] * (RESTARTS + 1)


@pytest.mark.parametrize("method", ["compare", "compare_models"])
def test_a_runner_that_is_killed_from_outside_is_nobody_s_fault(method: str) -> None:
    work, expected = WORK[method]
    assert work(quiet_in(LosingCluster("", killed_runners=2))) == expected


@pytest.mark.parametrize("method", ["load", "repeat", "compare", "stop"])
def test_where_neighbours_are_lost_they_all_begin_again(method: str) -> None:
    cluster = LosingCluster(method, losses=1)
    assert quiet_in(cluster, "near").compare([[BUILD]]) == [[measured(1)]]
    assert cluster.revived == [("quiet", "near")]
    assert [m for s, m in cluster.asked if s == "near"][-3:] == ["load", "repeat", "stop"]
