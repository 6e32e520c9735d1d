"""Where jobs cost each other least, by estimates of what each costs another one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunerd.colocation.placement.policies.base import Choice, Policy
from tunerd.colocation.placement.policies.most_free_memory import MostFreeMemory
from tunerd.colocation.placement.values import Job, View

if TYPE_CHECKING:
    from tunerd.colocation.planning.pairs import Pairs

# By how much the first is slower beside the second, 1 and above; or why nobody can say.
Estimate = Callable[[Job, Job], float | str]


def unknown(of: Job, beside: Job) -> float | str:
    return "nothing was measured to estimate from"


def estimate_from(pairs: Pairs) -> Estimate:
    """Return what measured pairs say, and the model that learned from them, if there is one."""

    def estimate(of: Job, beside: Job) -> float | str:
        if of.side is None or beside.side is None:
            return f"{(of if of.side is None else beside).name} has no features"
        found = pairs.slowdown(of.side, beside.side)
        return found.note if found.how == "assumed" else found.interval.value

    return estimate


class _Unknown(Exception):
    """A slowdown that cannot be estimated, with the reason."""


@dataclass(frozen=True)
class Estimated(Policy):
    """Several neighbours cost the product of what each costs.

    It waits where a further job would slow the others down by more than it gets done itself. Where
    an estimate is refused, it goes by free memory, and says so.
    """

    slowdown: Estimate = unknown

    kind = "estimated"
    about = "the device on which the estimated slowdowns grow least"

    def choose(self, job: Job, view: View) -> Choice | None:
        idle = next((state for state in view.states if not state.jobs), None)
        if idle is not None:
            return Choice(idle.device.name)
        try:
            before = [self._all(state.jobs) for state in view.states]
            after = [self._all((*state.jobs, job)) for state in view.states]
        except _Unknown as reason:
            choice = MostFreeMemory().choose(job, view)
            return choice and Choice(choice.device, f"by free memory: {reason}")
        costs = {
            state.device.name: sum(new) - sum(old)
            for state, old, new in zip(view.states, before, after, strict=True)
            if sum(1 / each for each in new) > sum(1 / each for each in old)
        }
        return Choice(min(costs, key=costs.__getitem__)) if costs else None

    def _all(self, jobs: Sequence[Job]) -> list[float]:
        """Return the slowdown of each of some jobs beside the others."""
        return [
            math.prod(self._one(of, beside) for beside in jobs if beside is not of) for of in jobs
        ]

    def _one(self, of: Job, beside: Job) -> float:
        found = self.slowdown(of, beside)
        if isinstance(found, str):
            raise _Unknown(found)
        return found
