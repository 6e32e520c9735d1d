"""Metrics through Ray, whose agent on each node serves them to Prometheus. Imports `ray`.

Without the extra `cluster` on the nodes there is no such agent, and nothing becomes of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunerd.telemetry.metrics import CATALOG, COMMON_LABELS, Name, Record


def ray_record() -> Record:
    """Return what records in the cluster that this process has joined."""
    from ray.util.metrics import Counter, Gauge

    made: dict[str, Any] = {
        name.name: (Counter if name.only_grows else Gauge)(
            name.name, name.help, (*COMMON_LABELS, *name.labels)
        )
        for name in CATALOG
    }

    def record(name: Name, value: float, labels: Mapping[str, str]) -> None:
        metric = made[name.name]
        if name.only_grows:
            metric.inc(value, dict(labels))
        else:
            metric.set(value, dict(labels))

    return record
