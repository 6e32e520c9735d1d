"""The ways in which saturation.py runs the tenants: rows of its table, by the processes of each.

The order is that of importance: who has not the time for all has the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

TENANTS = 8
BATCHES = (8, 32)
STREAMS = (8, 4, 2)
POLICIES: Mapping[str, dict[str, Any]] = {
    "streams": {"kind": "streams"},
    "space": {"kind": "space"},
    "time": {"kind": "time"},
    # With lanes that others may use each member has a seat in each of them: two for half as many.
    "ordered": {"kind": "ordered", "borrow": False},
    "regulated": {"kind": "regulated", "lanes": 4},
    "mps": {"kind": "space"},  # whose runners take a while to start
}
PLACES = {"mps": "mps"}  # of policies, where it is not in-process


@dataclass(frozen=True)
class Ways:
    """What one process, or one process a tenant, runs.

    kind: "inside" one process, "process" of each tenant, or "engine".
    labels: one for each row.
    shares, points: for which artifacts are needed: tuned at 25%, and "8@25".
    mps: None: without; else the share of each client in percent, 100 for no limit.
    policy: of an engine.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    shares: tuple[int, ...] = ()
    points: tuple[str, ...] = ()
    mps: int | None = None
    policy: str = ""

    @property
    def count(self) -> int:
        return TENANTS if self.kind == "process" else 1


def split(point: str) -> tuple[int, int]:
    """Return of "8@25" how many are in a launch, and the share."""
    by, pct = point.split("@")
    return int(by), int(pct)


def engine_label(policy: str, pct: int) -> str:
    where = f" in {PLACES[policy]}" if policy in PLACES else ""
    return f"engine, {POLICIES[policy]['kind']}{where}, tuned at {pct}%"


def together_label(point: str) -> str:
    by, pct = split(point)
    return f"{by} together, tuned at {pct}%"


def all_ways(
    model: str,
    shares: Sequence[int],
    points: Sequence[str],
    policies: Sequence[str],
    *,
    compile: bool,
) -> Iterator[Ways]:
    """Yield all there are, the most important first."""
    for pct in sorted(shares, reverse=True):
        at = f"tuned at {pct}%"
        labels = [f"{at}, one after another", *(f"{at}, {n} streams" for n in STREAMS[:2])]
        if (count := min(TENANTS, 100 // pct)) > 1:
            labels.append(f"{at}, {count} green contexts")
        yield Ways(at, "inside", tuple(labels), (pct,))
    streams = tuple(f"PyTorch, {count} streams" for count in STREAMS)
    yield Ways("PyTorch", "inside", ("PyTorch, one after another", *streams))
    for limit in (100, 100 // TENANTS, 200 // TENANTS):
        what = f"{limit}% each" if limit < 100 else "without a limit"
        yield _processes(f"{TENANTS} processes in MPS, {what}", shares, limit)
    for point in points:
        label = f"engine, space-time, {together_label(point)}"
        yield Ways(label, "engine", (label,), points=(point,))
    for point in points:
        label, (by, pct) = together_label(point), split(point)
        launches = -(-TENANTS // by)
        labels = [f"{label}, one after another"]
        labels += [f"{label}, {launches} streams"] if launches > 1 else []
        parts = min(launches, 100 // pct)
        labels += [f"{label}, {parts} green contexts"] if parts > 1 else []
        yield Ways(label, "inside", tuple(labels), points=(point,))
    for policy in policies if shares else ():
        # Who has the whole GPU gets what was tuned for most of it, and who has a part, least.
        pct = (max if policy == "time" else min)(shares)
        label = engine_label(policy, pct)
        yield Ways(label, "engine", (label,), (pct,), policy=policy)
    yield Ways("batches", "inside", tuple(f"PyTorch, batch {b} of one model" for b in BATCHES))
    alone = [f"PyTorch, vmap of {TENANTS}"]
    two = ("one after another", f"{STREAMS[0]} streams")
    if model != "encoder":
        labels = [f"PyTorch, batch norms folded, {way}" for way in two]
        yield Ways("folded", "inside", tuple(labels))
        alone.append(f"PyTorch, grouped convolutions of {TENANTS}")
    if compile:
        labels = [f"PyTorch compiled, {way}" for way in two]
        yield Ways("compiled", "inside", tuple(labels))
    alone += [f"PyTorch, {count} green contexts" for count in (8, 4)]
    for label in alone:  # a failure in a context is one of all that is in it
        yield Ways(label, "inside", (label,))
    yield _processes(f"{TENANTS} processes without MPS", shares, None)


def _processes(where: str, shares: Sequence[int], limit: int | None) -> Ways:
    """Return a process of each tenant; its artifact is the one for the nearest share."""
    nearest = sorted(shares, key=lambda share: abs(share - (limit or 100)))[:1]
    labels = [*(f"tuned at {pct}%, {where}" for pct in nearest), f"PyTorch, {where}"]
    return Ways(where, "process", tuple(labels), tuple(nearest), mps=limit)


def chosen(ways: Iterator[Ways], only: Sequence[str]) -> list[Ways]:
    """Return the ways whose labels contain one of some texts, in any case; all of them for none."""
    found = []
    for each in ways:
        labels = tuple(x for x in each.labels if any(o.lower() in x.lower() for o in only))
        if not only:
            found.append(each)
        elif labels:
            found.append(replace(each, labels=labels))
    return found
