"""Samples of a load -> what each member got. No clock, no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tunerd.colocation.load.alone import AgainstAlone
from tunerd.colocation.load.generator import DONE, FAILED, REFUSED, Observed, Sample
from tunerd.colocation.load.outage import Outage
from tunerd.colocation.load.resharing import Changes
from tunerd.colocation.plan import Member
from tunerd.stats.tail import percentiles_of


@dataclass(frozen=True)
class TenantResult:
    """What the requests of one member's tenant got, in the window.

    attainment: the part of all requests that were answered within the SLO; of_admitted: of those
    that were not refused at once. None without an SLO, or without requests. Latencies are of those
    that were answered.
    """

    member: str
    tenant: str
    asked: int
    done: int
    refused: int
    dropped: int
    failed: int
    p50_secs: float | None
    p95_secs: float | None
    p99_secs: float | None
    per_sec: float
    slo_secs: float | None
    attainment: float | None
    of_admitted: float | None


@dataclass(frozen=True)
class LoadResult:
    """One load under one policy.

    joules_per_inference: of the whole GPU, idle power included; None where NVML tells no energy.
    late_secs: how late the sender was, in 99 of 100 requests at most; None with few requests.
    faults: how many there were, by what they said.
    """

    policy: str
    place: str
    tenants: tuple[TenantResult, ...]
    window_secs: float
    per_sec: float
    attainment: float | None
    of_admitted: float | None
    joules_per_inference: float | None
    late_secs: float | None
    planned_bytes: Mapping[str, int]  # of memory, by member
    resident_bytes: Mapping[str, int]  # that was found, where the place can tell
    mismatches: tuple[str, ...] = ()  # whose share is not that of its tuning
    faults: Mapping[str, int] = field(default_factory=dict)
    recovered_secs: float | None = None  # the longest time until all served again
    per_launch: Mapping[str, float | None] = field(default_factory=dict)  # requests, by group
    # Launches by group, and by how many requests were in them.
    launches: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    brought: Mapping[str, int] = field(default_factory=dict)  # weights that had gone, by group
    against_alone: tuple[AgainstAlone, ...] = ()  # of each member, where the plan's load says so
    changes: Changes | None = None  # of shares, where the plan's load has some
    outage: Outage | None = None  # of the member that the plan's load says

    @property
    def spread(self) -> float | None:
        """Return by how much the slowest tenant's median is over the fastest's; 0.1 is 10%."""
        known = [t.p50_secs for t in self.tenants if t.p50_secs is not None]
        if len(known) < max(2, len(self.tenants)):
            return None
        return max(known) / min(known) - 1

    @property
    def worst_p99_secs(self) -> float | None:
        """Return the p99 of the slowest tenant; None where one has none."""
        known = [t.p99_secs for t in self.tenants if t.p99_secs is not None]
        return max(known) if known and len(known) == len(self.tenants) else None


def tenants_of(rounds: Sequence[Observed], members: Sequence[Member]) -> tuple[TenantResult, ...]:
    """Return a result for each member's tenant over all rounds, in the plan's order."""
    counted = [sample for observed in rounds for sample in observed.counted]
    window_secs = window_secs_of(rounds)
    return tuple(
        _tenant(
            member,
            tenant,
            [s for s in counted if (s.member, s.tenant) == (member.name, tenant)],
            window_secs,
        )
        for member in members
        for tenant in member.tenants
    )


def window_secs_of(rounds: Sequence[Observed]) -> float:
    """Return how long the windows of what counts are in all."""
    return sum(observed.window[1] - observed.window[0] for observed in rounds)


def attained(tenants: Sequence[TenantResult]) -> tuple[float | None, float | None]:
    """Return the attainment of all tenants that have an SLO: of all, and of what was admitted."""
    bound = [t for t in tenants if t.attainment is not None]
    asked = sum(t.asked for t in bound)
    admitted = sum(t.asked - t.refused for t in bound)
    met = sum(round((t.attainment or 0.0) * t.asked) for t in bound)
    return (met / asked if asked else None, met / admitted if admitted else None)


def late_secs(rounds: Sequence[Observed]) -> float | None:
    """Return how late the sender was, at most, in 99 of 100 requests."""
    late = [s.sent_at - s.meant_at for observed in rounds for s in observed.counted]
    return float(np.percentile(late, 99)) if late else None


def _tenant(
    member: Member, tenant: str, samples: Sequence[Sample], window_secs: float
) -> TenantResult:
    done = [s for s in samples if s.end == DONE]
    counts = {end: sum(s.end == end for s in samples) for end in (REFUSED, FAILED)}
    p50, p95, p99 = percentiles_of([s.latency_secs for s in done])
    slo_secs = member.slo_ms / 1e3 if member.slo_ms else None
    met = None if slo_secs is None else sum(s.latency_secs <= slo_secs for s in done)
    admitted = len(samples) - counts[REFUSED]
    return TenantResult(
        member=member.name,
        tenant=tenant,
        asked=len(samples),
        done=len(done),
        refused=counts[REFUSED],
        dropped=len(samples) - len(done) - counts[REFUSED] - counts[FAILED],
        failed=counts[FAILED],
        p50_secs=p50,
        p95_secs=p95,
        p99_secs=p99,
        per_sec=len(done) / window_secs,
        slo_secs=slo_secs,
        attainment=met / len(samples) if met is not None and samples else None,
        of_admitted=met / admitted if met is not None and admitted else None,
    )
