"""The slices in which finalists are measured: one that decides, and what its neighbours do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from tunerd.cluster.actors import Cluster
from tunerd.coordination.coordinator import MAX_ATTEMPTS
from tunerd.deciding.neighbours import AS_TUNED, NONE
from tunerd.measuring.profiles import final_profile, usual_l2
from tunerd.measuring.work import Work
from tunerd.settings import TuneSettings
from tunerd.vocabulary import (
    Build,
    Failure,
    Kind,
    Measurement,
    Profile,
    Stage,
    TargetSpec,
    TaskOutcome,
)

Results = list[Measurement | Failure]


@dataclass(frozen=True)
class Finals:
    """How finalists are measured."""

    l2: str = "warm"  # or "cold": `profiles` says what that means
    neighbours: str = NONE  # `neighbours` says what that means
    fidelity: int = 0  # candidates of each task that judge the search's ranking, and never win

    @property
    def profile(self) -> Profile:
        return final_profile(self.l2)

    @classmethod
    def of(cls, settings: TuneSettings, target: TargetSpec) -> Self:
        return cls(settings.l2 or usual_l2(target), settings.neighbours, settings.fidelity)

    @property
    def conditions(self) -> str:
        """Name how times are taken: those of equal ones may be compared."""
        return f"{self.profile.name}, neighbours {self.neighbours}"

    @property
    def measured_as(self) -> str:
        """Name what an outcome of this run must share with these finals to stand."""
        spread = f", {self.fidelity} more for the ranking" if self.fidelity else ""
        return f"{self.conditions}{spread}"

    def accept(self, outcome: TaskOutcome) -> bool:
        """Say whether an outcome was measured so; another run's need not judge the ranking."""
        if outcome.taken is not None:
            return outcome.measured_as.startswith(self.conditions)
        return outcome.measured_as == self.measured_as


@dataclass(frozen=True)
class QuietSlice:
    """The slice in which everything is decided, while nothing but its neighbours runs."""

    cluster: Cluster
    slice_id: str
    others: tuple[str, ...] = ()  # of its device; idle unless the finals have neighbours
    finals: Finals = Finals()

    @property
    def at_once(self) -> int:
        """How many contests are measured at once, each in a slice."""
        return 1 + len(self.others) if self.finals.neighbours == AS_TUNED else 1

    def compare(self, contests: Sequence[Sequence[Build]]) -> list[Results]:
        """Measure the builds of each contest in turns, as many contests at once as `at_once`.

        Again where somebody else's fault came between. Contests hold a build each, at least.
        """
        results: list[Results] = [[] for _ in contests]
        left = list(range(len(contests)))
        for _ in range(MAX_ATTEMPTS):
            for number, found in zip(left, self._once([contests[i] for i in left]), strict=True):
                results[number] = found
            left = [i for i in left if not _are_final(results[i])]
            if not left:
                break
        return results

    def agree(self, reference: Build, build: Build) -> Failure | None:
        """Say how the results of a build differ from those of its task's default."""
        for _ in range(MAX_ATTEMPTS):
            failure: Failure | None = self.cluster.call(self.slice_id, "agree", reference, build)
            if failure is None or failure.kind.ends_trial:
                break
        return failure

    def _once(self, contests: Sequence[Sequence[Build]]) -> list[Results]:
        places = (self.slice_id, *self.others)
        measuring, idle = places[: len(contests)], places[len(contests) :]
        loaded = idle if self.finals.neighbours != NONE else ()
        if not loaded:
            return self._measured(measuring, contests, len(contests) - 1)
        # The default: the same load for all of its rivals.
        ready = self._ask(loaded, "ready", Work(build=contests[0][0]))
        if failures := [r for r in ready if isinstance(r, Failure)]:
            return _spoiled(contests, failures[0])
        self._ask(loaded, "begin", 0.0, None)
        try:
            results = self._measured(measuring, contests, len(places) - 1)
        finally:
            ended = self._ask(loaded, "end")
        if failures := [r for r in ended if isinstance(r, Failure)]:
            return _spoiled(contests, failures[0])
        return results

    def _measured(
        self, places: Sequence[str], contests: Sequence[Sequence[Build]], neighbours: int
    ) -> list[Results]:
        profile = self.finals.profile
        asked = [(p, "compare", (tuple(c), profile)) for p, c in zip(places, contests, strict=True)]
        answers: list[Results] = self.cluster.call_all(asked)
        return [[_beside(r, neighbours) for r in results] for results in answers]

    def _ask(self, places: Sequence[str], method: str, *arguments: object) -> list[object]:
        return list(self.cluster.call_all([(p, method, arguments) for p in places]))


def _are_final(results: Results) -> bool:
    return all(isinstance(r, Measurement) or r.kind.ends_trial for r in results)


def _beside(result: Measurement | Failure, neighbours: int) -> Measurement | Failure:
    """Say how many neighbours worked; a slice counts those that live."""
    if isinstance(result, Failure):
        return result
    return replace(result, conditions=replace(result.conditions, neighbours=neighbours))


def _spoiled(contests: Sequence[Sequence[Build]], failure: Failure) -> list[Results]:
    """Return results of contests that lacked a neighbour: nobody's fault among them."""
    message = f"a neighbour's load failed: {failure.message}"
    found = Failure(Stage.RUN, Kind.COLLATERAL, message)
    return [[found] * len(contest) for contest in contests]
