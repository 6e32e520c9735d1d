"""Where most memory is free."""

from __future__ import annotations

from tunerd.colocation.placement.policies.base import Choice, Policy
from tunerd.colocation.placement.values import Job, View


class MostFreeMemory(Policy):
    kind = "most-free-memory"
    about = "the device with most memory that nobody has been promised"

    def choose(self, job: Job, view: View) -> Choice | None:
        return Choice(max(view.states, key=lambda state: state.free_bytes).device.name)
