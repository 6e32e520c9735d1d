"""The slices in which finalists are measured: one that decides, and what its neighbours do.

What is measured while others use the device, or while its clocks are held down, is measured again
when it is quiet. A run waits for that so long and no longer; what it measured then counts, marked.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from tunerd.cluster.ray_cluster import Cluster
from tunerd.coordinator.isolation import MAX_ATTEMPTS
from tunerd.errors import InfrastructureError
from tunerd.runner.base import ALONE, Company, TorchModule
from tunerd.runner.load import Load
from tunerd.runner.profiles import final_profile, within
from tunerd.runs.finals.allowance import in_turns
from tunerd.runs.finals.faults import Results, is_final, without_cause
from tunerd.settings import TuneSettings
from tunerd.slices.neighbors import AS_TUNED, NONE
from tunerd.vocabulary import (
    Arrays,
    Build,
    Conditions,
    Failure,
    Kind,
    Measurement,
    Profile,
    Stage,
)
from tunerd.vocabulary.outcome import TaskOutcome

WAIT_SECS = 60.0  # for a quiet device, in all of a run, unless it is told not to
STEP_SECS = 1.0  # between two looks at it: who comes may go at once
RESTARTS = 2  # of slices that are lost in one piece of work

log = logging.getLogger(__name__)
_T = TypeVar("_T")
# Starts again the slices that do not answer of some, by their ids, and is told what happened.
Revive = Callable[[Sequence[str], str], None]


def leave_lost(slice_ids: Sequence[str], message: str) -> None:
    """Start no slice again."""
    raise InfrastructureError(message)


@dataclass(frozen=True)
class Finals:
    """How finalists are measured."""

    l2: str = "model"  # "cold" or "warm": `profiles` says what they mean
    neighbours: str = NONE  # `neighbours` says what that means
    fidelity: int = 0  # candidates of each task that judge the search's ranking, and never win
    model_bytes: int = 0  # that an inference touches
    turns: int | None = None  # at most, where there is no time for more

    @property
    def profile(self) -> Profile:
        profile = within(final_profile(self.l2), self.model_bytes)
        return profile if self.turns is None else in_turns(profile, self.turns)

    @classmethod
    def of(cls, settings: TuneSettings, model_bytes: int) -> Self:
        return cls(settings.l2, settings.neighbours, settings.fidelity, model_bytes)

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
        """Say whether an outcome was measured so; another run's need not judge the ranking.

        One of this run that was disturbed is not accepted: it is measured again.
        """
        if outcome.taken is not None:
            return outcome.measured_as.startswith(self.conditions)
        return outcome.measured_as == self.measured_as and not outcome.disturbed_by


class Patience:
    """What is left of the time that a run waits for a quiet device.

    Args:
        say: is told what is waited for, and may raise to stop there.
        secs: how much there is of it.
    """

    def __init__(
        self,
        say: Callable[[str], None] = lambda message: None,
        *,
        secs: float = WAIT_SECS,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._say, self._sleep = say, sleep
        self._left_secs = secs
        self.waited_secs = 0.0

    def wait(self, slice_id: str, disturbed_by: str) -> bool:
        """Wait a step for a slice's device; False, at once, where no patience is left."""
        if self._left_secs <= 0:
            return False
        self._say(
            f"waiting for the device of {slice_id} to be quiet (--no-wait goes on): {disturbed_by}"
        )
        self._sleep(STEP_SECS)
        self._left_secs -= STEP_SECS
        self.waited_secs += STEP_SECS
        return True

    def now(self) -> float:
        """Return the time in seconds of a clock that stands while a device is waited for."""
        return time.monotonic() - self.waited_secs


@dataclass(frozen=True)
class QuietSlice:
    """The slice in which everything is decided, while nothing but its neighbours runs."""

    cluster: Cluster
    slice_id: str
    others: tuple[str, ...] = ()  # of its device; idle unless the finals have neighbours
    finals: Finals = Finals()
    patience: Patience = field(default_factory=Patience)
    revive: Revive = leave_lost

    @property
    def at_once(self) -> int:
        """How many contests are measured at once, each in a slice."""
        return 1 + len(self.others) if self.finals.neighbours == AS_TUNED else 1

    def compare(self, contests: Sequence[Sequence[Build]]) -> list[Results]:
        """Measure the builds of each contest in turns, as many contests at once as `at_once`.

        Again where somebody else's fault came between, or where others disturbed it, and without
        those builds that fail alone where one of them may have failed the others. Contests hold a
        build each, at least.
        """
        return self._undisturbed(contests, self._settled)

    def compare_models(self, artifacts: Sequence[str], profile: Profile) -> Results:
        """Time whole models in turns, again where others disturbed it."""

        def measure(contests: Sequence[Sequence[str]]) -> list[Results]:
            return [
                self.cluster.call(self.slice_id, "compare_models", tuple(of), profile)
                for of in contests
            ]

        return self._undisturbed([artifacts], lambda of: self._attempted(of, measure))[0]

    def prepare_pytorch(
        self, way: str, module: TorchModule, *, anew: bool, limit_secs: float
    ) -> str | Failure:
        """Make a way to run a PyTorch module ready, as `Runner.prepare_pytorch` does."""
        made: str | Failure = self.cluster.call(
            self.slice_id, "prepare_pytorch", way, module, anew, limit_secs
        )
        return made

    def compare_with_pytorch(
        self, artifact: str, ways: tuple[str, ...], profile: Profile
    ) -> Results:
        """Time a model and the ways that are ready in turns, again where others disturbed it."""

        def measure(contests: Sequence[tuple[str, ...]]) -> list[Results]:
            method = "compare_with_pytorch"
            return [
                self.cluster.call(self.slice_id, method, artifact, w, profile) for w in contests
            ]

        return self._undisturbed([ways], measure)[0]

    def run_model(self, artifact: str, inputs: Arrays, *, alone: str = "") -> Arrays:
        """Run a model on inputs, by their names, and return its outputs.

        alone: as `Runner.run_model` takes it.
        """
        more = (alone,) if alone else ()
        outputs: Arrays = self._call("run_model", artifact, inputs, *more)
        return outputs

    def _undisturbed(
        self, contests: Sequence[_T], measure: Callable[[Sequence[_T]], list[Results]]
    ) -> list[Results]:
        """Measure contests; those that were disturbed again, while there is patience for it."""
        results = measure(contests)
        while again := [i for i, found in enumerate(results) if disturbed_by(found)]:
            cause = disturbed_by(results[again[0]])
            if not self._is_quiet_after_waiting(cause):
                log.warning("the finals go on beside what disturbs them: %s", cause)
                break
            for i, found in zip(again, measure([contests[i] for i in again]), strict=True):
                if all(map(is_final, found)):  # a fault of somebody else's leaves what there was
                    results[i] = found
        return results

    def _is_quiet_after_waiting(self, cause: str) -> bool:
        while cause and self.patience.wait(self.slice_id, cause):
            seen: Conditions = self._call("conditions")
            cause = seen.disturbed_by
        return not cause

    def _settled(self, contests: Sequence[Sequence[Build]]) -> list[Results]:
        """Measure contests, and once more without what a fault was of."""
        results = self._attempted(contests, self._once)
        return [
            without_cause(contest, found, alone=self._alone, together=self._together)
            for contest, found in zip(contests, results, strict=True)
        ]

    def _alone(self, build: Build) -> Measurement | Failure:
        """Measure a build beside idle neighbours, whatever they do in these finals."""
        ((result,),) = self._attempted(
            [[build]], lambda contests: self._measured((self.slice_id,), contests, 0)
        )
        return result

    def _together(self, builds: Sequence[Build]) -> Results:
        return self._attempted([builds], self._once)[0]

    def _attempted(
        self,
        contests: Sequence[_T],
        measure: Callable[[Sequence[_T]], list[Results]],
    ) -> list[Results]:
        """Measure contests, again while a fault that is nobody's came between."""
        results: list[Results] = [[] for _ in contests]
        left = list(range(len(contests)))
        for _ in range(MAX_ATTEMPTS):
            todo = [contests[i] for i in left]
            measured = self._despite_losses(functools.partial(measure, todo))
            for number, found in zip(left, measured, strict=True):
                results[number] = found
            left = [i for i in left if not all(map(is_final, results[i]))]
            if not left:
                break
        return results

    def agree(self, reference: Build, build: Build) -> Failure | None:
        """Say how the results of a build differ from those of its task's default.

        No other slice of the device works meanwhile.
        """
        for _ in range(MAX_ATTEMPTS):
            failure: Failure | None = self._call("agree", reference, build, ALONE)
            if failure is None or failure.kind.ends_trial:
                break
        return failure

    def _call(self, method: str, *arguments: object) -> Any:
        return self._despite_losses(lambda: self.cluster.call(self.slice_id, method, *arguments))

    def _despite_losses(self, work: Callable[[], _T]) -> _T:
        """Do work; where a slice is lost in it, it is started again and all of the work is done."""
        for _ in range(RESTARTS):
            try:
                return work()
            except InfrastructureError as error:
                self.revive((self.slice_id, *self.others), str(error))
        return work()

    def _once(self, contests: Sequence[Sequence[Build]]) -> list[Results]:
        places = (self.slice_id, *self.others)
        measuring, idle = places[: len(contests)], places[len(contests) :]
        loaded = idle if self.finals.neighbours != NONE else ()
        if not loaded:
            return self._measured(measuring, contests, len(contests) - 1)
        # The default: the same load for all of its rivals.
        once = self._ask(loaded, "load", Load(build=contests[0][0]))
        if failures := [r for r in once if isinstance(r, Failure)]:
            return _spoiled(contests, failures[0])
        try:
            self._ask(loaded, "repeat", 0.0, None)
            results = self._measured(measuring, contests, len(places) - 1)
        finally:
            ended = self._ask(loaded, "stop")
        if failures := [r for r in ended if isinstance(r, Failure)]:
            return _spoiled(contests, failures[0])
        return results

    def _measured(
        self, places: Sequence[str], contests: Sequence[Sequence[Build]], neighbours: int
    ) -> list[Results]:
        profile = self.finals.profile
        # Where it is alone, a fault is of one of the builds.
        company = Company(neighbours, is_alone=neighbours == 0)
        asked = [
            (place, "compare", (tuple(contest), profile, company))
            for place, contest in zip(places, contests, strict=True)
        ]
        answers: list[Results] = self.cluster.call_all(asked)
        return answers

    def _ask(self, places: Sequence[str], method: str, *arguments: object) -> list[object]:
        return list(self.cluster.call_all([(p, method, arguments) for p in places]))


def disturbed_by(results: Sequence[Measurement | Failure]) -> str:
    """Return what disturbed the first of the results that something did, or ""."""
    causes = (r.conditions.disturbed_by for r in results if isinstance(r, Measurement))
    return next(filter(None, causes), "")


def _spoiled(contests: Sequence[Sequence[Build]], failure: Failure) -> list[Results]:
    """Return results of contests that lacked a neighbour: nobody's fault among them."""
    message = f"a neighbour's load failed: {failure.message}"
    found = Failure(Stage.RUN, Kind.COLLATERAL, message)
    return [[found] * len(contest) for contest in contests]
