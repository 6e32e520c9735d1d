"""What a run takes from a team's store before it searches, and gives to it when it is done.

The run's own store stays the truth of the run. Of a team's store it asks once, when its slices
have proved what they obtained, and writes to it once, when the model has been verified: a record of
a model that turned out wrong would spoil the runs of others. Between the two there is no connection
that could be lost. What is written replaces what this same run wrote before, so that trying again,
or running the same command again after a kill, is safe at any moment.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from tunerd.errors import StoreError, StoreMissError
from tunerd.records import Store
from tunerd.records.conditions_key import Obtained
from tunerd.records.problems import StoreLost
from tunerd.settings import TuneSettings
from tunerd.system.store_address import StoreAddress
from tunerd.vocabulary import LIBRARIES, CapProof, Task, candidate_id
from tunerd.vocabulary.outcome import Outcome, TaskOutcome

log = logging.getLogger(__name__)

PAUSES_SECS = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)  # a server that restarts is back within them
_NAMED = 10
_T = TypeVar("_T")


class TeamStore:
    """A team's store as one run meets it. `say` shows a message, or raises to stop."""

    def __init__(
        self,
        address: StoreAddress,
        own: Store,
        *,
        say: Callable[[str], None],
        pause: Callable[[float], None] = time.sleep,
        libraries: Collection[str] = (),
    ) -> None:
        self._refused = set(LIBRARIES) - set(libraries)  # sources whose winners are not taken
        self._address = address
        self._own = own
        self._say = say
        self._pause = pause

    def take(self, tasks: Sequence[Task], on: Obtained, *, require: bool) -> dict[str, TaskOutcome]:
        """Return the tasks, by id, that need no search, and keep in the run's store what was taken.

        A task that this run has decided itself is not taken: the run goes on with it. With
        `require` that counts as found, too, and StoreMissError names the tasks that are not.
        Raises StoreError where the store cannot be reached.
        """
        found = {}
        decided = []
        for outcome, its in self._own.measured_outcomes():
            is_whole = outcome.trials == len(self._own.ranked(outcome.task_id))
            is_refused = outcome.winner.source in self._refused
            if its == on and is_whole and outcome.is_decided and not is_refused:
                if outcome.taken:
                    found[outcome.task_id] = outcome
                else:
                    decided.append(outcome)
        ours = {o.task_id for o in decided}
        wanted = [t for t in tasks if t.task_id not in found | dict.fromkeys(ours)]
        if wanted:
            self._say(f"asking {self._address.shown} for {len(wanted)} tasks")
            known = self._look_up(on, [t.task_id for t in wanted])
            fresh = [self._as_ours(t, known[t.task_id]) for t in wanted if t.task_id in known]
            self._own.save_task_outcomes([(outcome, on) for outcome in fresh])
            found |= {outcome.task_id: outcome for outcome in fresh}
        log.info("%d of %d tasks come from %s", len(found), len(tasks), self._address.shown)
        if require:
            found |= {o.task_id: o for o in decided}
            if missing := [t for t in tasks if t.task_id not in found]:
                raise StoreMissError(_miss(missing, len(tasks), on, self._address.shown))
        return found

    def publish(self, outcome: Outcome | None = None, *, exhausted: Collection[str] = ()) -> int:
        """Give what this run measured to the team, and return the number of tasks.

        The outcome of the whole model goes there, and of the tasks those that were not taken from
        there, were reached and are decided; those without any candidate, by their ids in
        `exhausted`, count as reached. Raises StoreError.
        """
        decided = [
            (task, on)
            for task, on in self._own.measured_outcomes()
            if on
            and not task.taken
            and task.is_decided
            and (task.trials or task.task_id in exhausted)
        ]
        if not decided and outcome is None:
            return 0
        task_ids = {task.task_id for task, _ in decided}
        tasks = [t for t in self._own.tasks() if t.task_id in task_ids]
        _, facts = self._own.sessions()[-1]

        def write() -> None:
            with Store.join(self._address, self._own.identity, facts=facts) as shared:
                shared.register_tasks(tasks)
                shared.save_task_outcomes(decided)
                if outcome is not None:
                    shared.save_outcome(outcome)

        self._say(f"writing the result and {len(decided)} tasks to {self._address.shown}")
        self._insist(
            write,
            "the run itself is complete; when the store is back, the same command writes to it",
        )
        return len(decided)

    def _look_up(self, on: Obtained, task_ids: Sequence[str]) -> dict[str, TaskOutcome]:
        _, facts = self._own.sessions()[-1]

        def read() -> dict[str, list[TaskOutcome]]:
            with Store.join(self._address, self._own.identity, facts=facts) as shared:
                return shared.measured_on(on, task_ids)

        found = self._insist(
            read, "nothing was tuned; run the same command when the store is back, or leave --store"
        )
        chosen = {
            t: [o for o in _usable(outcomes) if o.winner.source not in self._refused]
            for t, outcomes in found.items()
        }
        return {t: max(outcomes, key=_gain) for t, outcomes in chosen.items() if outcomes}

    def _as_ours(self, task: Task, outcome: TaskOutcome) -> TaskOutcome:
        """Return another run's outcome with what this run calls the task and spent on it."""
        trials = self._own.ranked(task.task_id)
        return replace(
            outcome,
            name=task.name,
            weight=task.weight,
            trials=len(trials),
            failed=sum(secs is None for _, secs in trials),
        )

    def _insist(self, do: Callable[[], _T], advice: str) -> _T:
        """Do what may be done twice, and try again for a while where the store is lost."""
        for number, pause_secs in enumerate((*PAUSES_SECS, None), 1):
            try:
                return do()
            except StoreLost as error:
                if pause_secs is None:
                    raise StoreError(
                        f"{error}; {number} times in {sum(PAUSES_SECS):.0f} s: {advice}"
                    ) from error
                log.warning("%s; trying again", error)
                self._say(f"{self._address.shown} is lost; trying again in {pause_secs:g} s")
                self._pause(pause_secs)
        raise AssertionError("the last try returns or raises")


def team_store(settings: TuneSettings, own: Store, say: Callable[[str], None]) -> TeamStore | None:
    """Return the team's store that a run was given, None where it was given none."""
    address = settings.store_address
    if address is None:
        return None
    return TeamStore(address, own, say=say, libraries=settings.libraries)


def obtained_in(slice_id: str, proofs: Sequence[CapProof], own: Store, profile: str) -> Obtained:
    """Return what is obtained in the slice that decides between finalists."""
    proof = next(p for p in reversed(proofs) if p.slice_id == slice_id)
    return Obtained.of(proof, own.sessions()[-1][1], profile)


def _usable(outcomes: Sequence[TaskOutcome]) -> Iterator[TaskOutcome]:
    """Yield the outcomes that are decided and whose winner is what its id says."""
    for outcome in outcomes:
        winner = outcome.winner
        is_of_task = winner.task_id == outcome.task_id
        if not is_of_task or winner.candidate_id != candidate_id(
            winner.task_id, winner.recipe, source=winner.source
        ):
            log.warning("a record of task %s is damaged, and passed over", outcome.task_id)
        elif outcome.is_decided:
            yield outcome


def _gain(outcome: TaskOutcome) -> float:
    """Return how much faster than the default its winner is, both measured in turns.

    Unlike times it does not depend on how warm the device was on that day. 0 where the winner was
    compared with nothing: any other outcome is better known.
    """
    if not outcome.is_tuned:
        return 1.0
    return outcome.comparison.ratio if outcome.comparison else 0.0


def _miss(missing: Sequence[Task], tasks: int, on: Obtained, store: str) -> str:
    names = ", ".join(f"{t.name} ({t.task_id})" for t in missing[:_NAMED])
    if len(missing) > _NAMED:
        names += f" and {len(missing) - _NAMED} more"
    return (
        f"the store {store} lacks {len(missing)} of {tasks} tasks for {on.sm_count} SMs or cores "
        f"of {on.device} ({on.mechanism}, driver {on.driver or 'none'}, {on.code_for}, TVM "
        f"{on.tvm_version}): {names}; tune once with --store and without --require-hit"
    )
