"""How long the finals of a run may take, and what they leave out to keep to it.

The finals are all that follows the search: finalists, and the whole model. They may take a third of
a run's time, which is half of what the start and the search took. Of that some part is for
finalists, and what they leave is for timing the whole model.

Where it is too little for all that finalists would be measured, each task has first what it takes
to compare its best one with its default in a few turns. What is left beyond that is shared out by
what the tasks still lack: more turns, and more finalists. Where it is too little even for that, the
tasks that weigh least in the model's time are left out: their times are the search's. What a run
waits for a quiet device is no part of it, where the clock that it is given leaves that out.

Some work is done whatever it takes: the tasks that make most of the model's time have their few
turns, and so have all where a team's store is to have the records of all; a winner is compared with
what the default computes, and the whole model is compiled, verified, and timed beside its default
and what else it is compared with. So a short run may spend more than a third of its time so, and
says it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from tunerd.runner.sampling import expected_secs
from tunerd.system.text import count_text, duration_text
from tunerd.telemetry.time_use import FINALS, MOST_FINALS_SHARE, TimeUse
from tunerd.vocabulary import Profile

FEW_TURNS = 8  # so few tell a kernel that is faster in each of them from chance
FEW_MODEL_TURNS = 10
FINALISTS_PART = 1 / 3  # of the finals' time; the rest is the whole model's
ALWAYS_MEASURED = 0.9  # of the model's time, by what its tasks weigh in it
_MODEL_PART = 0.85  # of what is left for timing models; the rest is for loading them
_LOAD_SECS = 0.02  # of a build, about: its way to the runner, and its weights


class Allowance:
    """What is left of the time that finals may take.

    Args:
        secs: how much there is of it from now on; may be negative.
        leaves_out: whether tasks may be left out, those that weigh least in the model's time.
        now: tells the time in seconds, from any beginning.
    """

    def __init__(
        self,
        secs: float = math.inf,
        *,
        leaves_out: bool = True,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.leaves_out = leaves_out
        self._now = now
        self._ends_at = now() + secs
        self._cuts: list[str] = []

    @classmethod
    def after(
        cls,
        use: TimeUse | None,
        *,
        leaves_out: bool = True,
        now: Callable[[], float] = time.monotonic,
    ) -> Self:
        """Return what the finals may take of a run that has spent its time so; None: all."""
        if use is None:
            return cls(now=now)
        finals = sum(use.phases.get(phase, 0.0) for phase in FINALS)
        before = sum(use.phases.values()) - finals
        secs = before * MOST_FINALS_SHARE / (1 - MOST_FINALS_SHARE) - finals
        return cls(secs, leaves_out=leaves_out, now=now)

    @property
    def left_secs(self) -> float:
        """Seconds that are left; negative where more was spent."""
        return self._ends_at - self._now()

    def part(self, share: float) -> Allowance:
        """Return so much of what is left as an allowance of its own."""
        return Allowance(
            max(0.0, self.left_secs) * share, leaves_out=self.leaves_out, now=self._now
        )

    def cut(self, what: str) -> None:
        """Note what is left out, or done less often, to keep to the allowance; "": nothing is."""
        if what and what not in self._cuts:
            self._cuts.append(what)

    def for_models(self, profile: Profile, models: int, *, part: float = 1.0) -> Profile:
        """Return how to time whole models in turns within a part of what is left."""
        secs = max(0.0, self.left_secs) * part * _MODEL_PART / models
        if secs >= profile.max_total_secs:
            return profile
        self.cut("the whole model was timed in fewer turns")
        turns = min(profile.min_samples, FEW_MODEL_TURNS)
        return replace(profile, min_samples=turns, max_total_secs=secs)

    def remarks(self) -> tuple[str, ...]:
        """Say what was cut, and by how much the finals took too long all the same."""
        said = []
        if self._cuts:
            said.append(f"to keep the finals to a third of the run's time {'; '.join(self._cuts)}")
        if self.left_secs < 0:
            said.append(
                f"the finals took {duration_text(-self.left_secs)} more than a third of the run's "
                "time: what they never leave out took so long"
            )
        return tuple(said)


@dataclass(frozen=True)
class Contest:
    """What a task's finals would be like. Times are the search's."""

    task_id: str
    weight: int  # how often the model calls it
    call_secs: tuple[float, ...]  # of the default, then of its rivals, the best first

    @property
    def model_secs(self) -> float:
        """What it takes of the model's time where its default stays; 0 without a rival."""
        return self.weight * self.call_secs[0] if len(self.call_secs) > 1 else 0.0


@dataclass(frozen=True)
class Share:
    """What of a task's finals there is time for."""

    finalists: int  # the best ones
    turns: int  # at most


class Shares:
    """Shares an allowance out among the finals of tasks.

    Args:
        profile: how they are measured where there is time for it.
        at_once: how many contests are measured at once.
        decided_secs: of the model's time, by its defaults, that tasks have which are decided.
    """

    def __init__(
        self,
        contests: Sequence[Contest],
        allowance: Allowance,
        *,
        profile: Profile,
        at_once: int = 1,
        decided_secs: float = 0.0,
    ) -> None:
        self._allowance, self._profile, self._at_once = allowance, profile, at_once
        self._todo = {
            c.task_id: c for c in sorted(contests, key=lambda c: c.model_secs, reverse=True)
        }
        self.order = tuple(self._todo)  # what weighs most in the model's time is first
        self._few_turns = min(FEW_TURNS, profile.min_samples)
        self._full = {c.task_id: self._secs(c.call_secs, profile) for c in contests}
        self._least = {
            c.task_id: self._secs(c.call_secs[:2], in_turns(profile, self._few_turns))
            for c in contests
        }
        self._always = frozenset(self._todo)
        if allowance.leaves_out:
            self._always = _heaviest(tuple(self._todo.values()), ALWAYS_MEASURED, decided_secs)
        self._of = sum(c.model_secs > 0 for c in contests)
        self._shortened = self._left_out = 0

    @property
    def is_spent(self) -> bool:
        return self._allowance.left_secs <= 0

    def take(self, task_ids: Sequence[str]) -> dict[str, Share]:
        """Return the shares of tasks that are measured next; those that it lacks are left out."""
        left_secs = self._allowance.left_secs * self._at_once
        least_secs = sum(self._least[task_id] for task_id in self._todo)
        lacking_secs = sum(self._full[t] - self._least[t] for t in self._todo)
        more_secs = min(max(0.0, left_secs - least_secs), lacking_secs)
        more = more_secs / lacking_secs if lacking_secs else 1.0
        found = {}
        for task_id in task_ids:
            contest = self._todo.pop(task_id)
            least, full = self._least[task_id], self._full[task_id]
            if least > left_secs and task_id not in self._always:
                self._left_out += contest.model_secs > 0
                continue
            secs = full if more >= 1.0 else least + more * (full - least)
            found[task_id] = self._share(contest, secs)
            left_secs -= secs
        return found

    def said(self) -> str:
        """Say what was cut so far, or nothing."""
        cuts = []
        if self._shortened:
            cuts.append(f"{self._shortened} had fewer finalists or turns")
        if self._left_out:
            cuts.append(f"{self._left_out} had the search's times alone")
        return f"of {count_text(self._of, 'task')} {' and '.join(cuts)}" if cuts else ""

    def _share(self, contest: Contest, secs: float) -> Share:
        """Return the most finalists, and of these the most turns, that take so long."""
        rivals, profile = len(contest.call_secs) - 1, self._profile
        if secs >= self._full[contest.task_id]:
            return Share(rivals, profile.max_samples)
        self._shortened += rivals > 0
        for finalists in range(rivals, 0, -1):
            for turns in range(profile.max_samples, profile.min_samples - 1, -1):
                if self._fits(contest, finalists, turns, secs):
                    return Share(finalists, turns)
        few = min(1, rivals)
        for turns in range(profile.min_samples - 1, self._few_turns, -1):
            if self._fits(contest, few, turns, secs):
                return Share(few, turns)
        return Share(few, self._few_turns)

    def _fits(self, contest: Contest, finalists: int, turns: int, secs: float) -> bool:
        calls = contest.call_secs[: finalists + 1]
        return self._secs(calls, in_turns(self._profile, turns)) <= secs

    def _secs(self, call_secs: Sequence[float], profile: Profile) -> float:
        return expected_secs(call_secs, profile) + _LOAD_SECS * len(call_secs)


def in_turns(profile: Profile, turns: int) -> Profile:
    """Return a profile with so many samples at most. Its times stay comparable: it keeps its name.

    >>> in_turns(Profile("any", min_samples=20, max_samples=40), 8).min_samples
    8
    """
    return replace(
        profile,
        min_samples=min(profile.min_samples, turns),
        max_samples=min(profile.max_samples, turns),
    )


def _heaviest(contests: Sequence[Contest], share: float, others_secs: float) -> frozenset[str]:
    """Return the first tasks that have, with others, such a share of the model's time in sum."""
    wanted_secs = share * (others_secs + sum(c.model_secs for c in contests)) - others_secs
    found: set[str] = set()
    for contest in contests:
        if wanted_secs <= 0:
            break
        found.add(contest.task_id)
        wanted_secs -= contest.model_secs
    return frozenset(found)
