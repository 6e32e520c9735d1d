"""When requests come: Poisson, in bursts, or as somebody recorded them. Nothing waits here."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tunerd.colocation.plan import LoadChoice, Member
from tunerd.errors import InputError
from tunerd.system.text import reason_of

# Of bursts: one in each period. The mean rate is the plan's, whatever `burst_times` is.
BURST_PERIOD_SECS, BURST_SECS = 2.0, 0.2
_MAX_ARRIVALS = 5_000_000


@dataclass(frozen=True, order=True)
class Arrival:
    """A request that is meant to come so many seconds after the start."""

    at_secs: float
    member: str
    tenant: str


def arrivals_of(members: Sequence[Member], load: LoadChoice) -> list[Arrival]:
    """Return all arrivals of a load in order; the same for the same seed.

    Members with `clients` have none: they send when they have their answers. Raises InputError
    where a member has no rate, or a trace cannot be read.
    """
    if load.kind == "trace":
        assert load.trace is not None
        return [a for a in read_trace(load.trace, members) if a.at_secs < load.duration]
    found: list[Arrival] = []
    for member in members:
        if member.clients is not None:
            continue
        if member.rate is None:
            raise InputError(
                f"{member.name} has no `rate`, which a load of kind {load.kind} needs: give it the "
                "requests per second, or choose the kind closed"
            )
        for tenant in member.tenants:
            rng = random.Random(f"{load.seed}/{member.name}/{tenant}")
            rate = member.rate / len(member.tenants)
            times = load.burst_times if load.kind == "bursts" else 1.0
            found += [
                Arrival(at, member.name, tenant) for at in _moments(rng, rate, times, load.duration)
            ]
    return sorted(found)


def read_trace(path: Path, members: Sequence[Member]) -> list[Arrival]:
    """Read a CSV file with the columns secs, member and, if it has it, tenant."""
    known = {member.name: member for member in members}
    found: list[Arrival] = []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.DictReader(file)
            if missing := {"secs", "member"} - set(rows.fieldnames or ()):
                raise InputError(f"{path} has no column {sorted(missing)[0]}; its first line names")
            for row in rows:
                found.append(_recorded(row, known, f"{path}, line {rows.line_num}"))
                if len(found) > _MAX_ARRIVALS:
                    raise InputError(f"{path} has more than {_MAX_ARRIVALS:,} arrivals")
    except (OSError, ValueError, csv.Error) as error:
        reason = reason_of(error)
        raise InputError(f"{path} cannot be read: {reason}; give a CSV file") from None
    return sorted(found)


def _recorded(row: dict[str, str], known: dict[str, Member], where: str) -> Arrival:
    try:
        at_secs = float(row["secs"])
    except (TypeError, ValueError):
        at_secs = math.nan
    if not (math.isfinite(at_secs) and at_secs >= 0):
        raise InputError(f"{where}: '{row['secs']}' is no number of seconds from 0 on")
    member = known.get(row["member"])
    if member is None:
        raise InputError(f"{where}: there is no member '{row['member']}' in the plan")
    tenant = row.get("tenant") or member.tenants[0]
    if tenant not in member.tenants:
        raise InputError(f"{where}: {member.name} has no tenant '{tenant}'")
    return Arrival(at_secs, member.name, tenant)


def _moments(
    rng: random.Random, rate: float, burst_times: float, duration_secs: float
) -> Iterator[float]:
    """Yield moments of a Poisson process whose rate is `burst_times` higher within bursts.

    By thinning (Lewis and Shedler, 1979): drawn at the highest rate, kept with the ratio.
    """
    part = BURST_SECS / BURST_PERIOD_SECS
    base = rate / (1 - part + part * burst_times)
    highest = base * burst_times
    at = 0.0
    while (at := at + rng.expovariate(highest)) < duration_secs:
        is_burst = at % BURST_PERIOD_SECS < BURST_SECS
        if is_burst or rng.random() < 1 / burst_times:
            yield at
