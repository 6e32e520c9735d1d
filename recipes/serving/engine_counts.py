"""What an engine counts, under the names by which the servers here tell Prometheus.

`triton_model`, which is copied without this file, has those of members and faults itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tunerd.colocation import Engine

# What a server counts itself: from the arrival of a request to its answer, by model.
SECONDS = "tunerd_request_seconds"
SECONDS_HELP = "From the arrival of a request to its answer."
BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
OUTCOMES = ("completed", "failed", "refused", "cancelled")


@dataclass(frozen=True)
class Count:
    """One metric. values: by the values of its labels."""

    name: str
    help: str
    labels: tuple[str, ...]
    values: Mapping[tuple[str, ...], float]

    @property
    def only_grows(self) -> bool:
        return self.name.endswith("_total")


def counts_of(engine: Engine) -> list[Count]:
    """Return what an engine has counted so far."""
    stats = engine.stats()
    members, groups = stats.members.items(), stats.groups.items()
    return [
        Count(
            "tunerd_requests_total",
            "Requests by how they ended.",
            ("model", "outcome"),
            {(name, how): getattr(member, how) for name, member in members for how in OUTCOMES},
        ),
        Count(
            "tunerd_planned_bytes",
            "Memory that a model was planned to take.",
            ("model",),
            {(name,): member.planned_bytes for name, member in members},
        ),
        Count(
            "tunerd_launches_total",
            "Launches of models that are loaded as one.",
            ("group",),
            {(name,): group.launches for name, group in groups},
        ),
        Count(
            "tunerd_launched_requests_total",
            "Requests that were in them.",
            ("group",),
            {(name,): group.requests for name, group in groups},
        ),
        Count("tunerd_faults_total", "Models that faulted.", (), {(): len(stats.faults)}),
    ]
