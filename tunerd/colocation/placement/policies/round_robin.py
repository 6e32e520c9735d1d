"""One device after the other."""

from __future__ import annotations

from tunerd.colocation.placement.policies.base import Choice, Policy
from tunerd.colocation.placement.values import Job, View


class RoundRobin(Policy):
    kind = "round-robin"
    about = "the device after the one that got a job last"

    def choose(self, job: Job, view: View) -> Choice | None:
        last = -1 if view.last is None else view.devices.index(view.last)
        turns = [*view.devices[last + 1 :], *view.devices[: last + 1]]
        return Choice(min((s.device.name for s in view.states), key=turns.index))
