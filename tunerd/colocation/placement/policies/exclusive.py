"""A device for each job: what sharing is compared with."""

from __future__ import annotations

from tunerd.colocation.placement.policies.base import Choice, Policy
from tunerd.colocation.placement.values import Job, View


class Exclusive(Policy):
    kind = "exclusive"
    about = "the first device on which nothing runs"

    def choose(self, job: Job, view: View) -> Choice | None:
        return next((Choice(s.device.name) for s in view.states if not s.jobs), None)
