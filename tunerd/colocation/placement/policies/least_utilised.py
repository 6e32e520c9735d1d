"""Where most units are idle."""

from __future__ import annotations

from dataclasses import dataclass

from tunerd.colocation.placement.policies.base import Choice, Policy
from tunerd.colocation.placement.values import Job, View


@dataclass(frozen=True)
class LeastUtilised(Policy):
    """busy: a device that is shared and utilised this much or more takes nothing."""

    busy: float = 0.8

    kind = "least-utilised"
    about = "the device with the smallest busy part, below 80% where it is shared"

    def choose(self, job: Job, view: View) -> Choice | None:
        fit = [state for state in view.states if not state.jobs or state.utilisation < self.busy]
        least = min(fit, key=lambda state: state.utilisation, default=None)
        return None if least is None else Choice(least.device.name)
