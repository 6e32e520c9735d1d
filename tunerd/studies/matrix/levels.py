"""The shares in the order in which they are tuned, what each may cost, and what it has cost.

The first level is a whole `tunerd tune`; it is what one level costs. Each later one only searches,
with a part of the trials: it starts from what the nearest levels have found, whose best kernels
are proposed and measured first, and every level's finalists are measured at its share afterwards
anyway. Independent levels learn nothing from one another, and have all trials each.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from tunerd.records import Store
from tunerd.runs.finals.selection import faults_of
from tunerd.settings import TuneSettings
from tunerd.studies.matrix.claims import middle_of
from tunerd.vocabulary import Activity, Candidate, Phase

LATER = 0.15  # of the first level's trials or time: five later levels add three quarters
_SLICES = 2  # of a GPU: few trials do not pay for the start of ten, and 16 cores fill no more
_NEIGHBOURS = 2  # levels that a later one learns from
_MOST, _LEAST = 2, 1  # finalists of a level, of a task that matters and of one that does not
_MATTERS = 0.01  # of the model's time


@dataclass(frozen=True)
class Cost:
    """What work has taken. None: cannot be told.

    cpu_secs: of all processes on the cores that tunerd may use. slice_work_secs: of the calls in
    which slices measured, compared outputs or ran models, the sum over slices that worked at once;
    neither their start nor what a slice that is there waits for, such as a compiler.
    """

    wall_secs: float | None
    cpu_secs: float | None
    slice_work_secs: float | None = None  # older tunerds have kept none

    def __add__(self, other: Cost) -> Cost:
        return self._with(other, operator.add)

    def __sub__(self, other: Cost) -> Cost:
        return self._with(other, operator.sub)

    def part(self, of: float) -> Cost:
        return Cost(*(None if secs is None else of * secs for secs in astuple(self)))

    def _with(self, other: Cost, of: Callable[[float, float], float]) -> Cost:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Cost(*(None if a is None or b is None else of(a, b) for a, b in pairs))


NOTHING = Cost(0.0, 0.0, 0.0)
UNKNOWN = Cost(None, None, None)


@dataclass(frozen=True)
class Level:
    """One share to tune at. Without levels to learn from it is the first, or independent."""

    pct: int
    learns_from: tuple[int, ...]


def levels_of(shares: Sequence[int], *, independent: bool = False) -> tuple[Level, ...]:
    """Return the levels in order: the middle first, then whatever is nearest to it.

    Near is meant in ratios: 10% is as far from 20% as 50% is from 100%.

    >>> [(x.pct, x.learns_from) for x in levels_of([10, 40, 50, 100])]
    [(40, ()), (50, (40,)), (100, (50, 40)), (10, (40, 50))]
    """
    most = 0 if independent else _NEIGHBOURS
    middle = middle_of(shares)

    def distance(a: int, b: int) -> tuple[float, int]:
        return abs(math.log(a / b)), a

    order = sorted(set(shares), key=lambda s: distance(s, middle))
    return tuple(
        Level(pct, tuple(sorted(order[:i], key=lambda s, pct=pct: distance(s, pct))[:most]))  # type: ignore[misc]
        for i, pct in enumerate(order)
    )


def settings_of(
    base: TuneSettings, level: Level, folders: Sequence[Path], out: Path
) -> TuneSettings:
    """Return what a level is tuned with. `folders` are those of the levels that it learns from."""
    changes: dict[str, object] = {
        f"{base.share.unit}_pct": level.pct,
        "out": out,
        "warm_start": tuple(folders),
    }
    if level.learns_from:
        if base.trials is not None:
            changes["trials"] = max(1, math.ceil(base.trials * LATER))
        if base.budget_secs is not None:
            changes["budget_secs"] = base.budget_secs * LATER
        if base.slice_kind == "mps":
            changes["slices"] = min(_SLICES, 100 // level.pct)
    return base.model_copy(update=changes)


def cost_of(store: Store, of: Collection[Phase] = tuple(Phase)) -> Cost:
    """Sum up what some phases of a level's sessions took, by these and the spans in them."""
    phases = [p for p in store.phases() if p.phase in of]
    cores = [secs for p in phases for _, secs in p.core_busy_secs]
    worked = sum(
        s.busy_secs if s.busy_secs is not None else s.end - s.start
        for s in store.spans()
        if s.activity is Activity.MEASURE and any(p.start <= s.start < p.end for p in phases)
    )
    return Cost(
        wall_secs=sum(p.end - p.start for p in phases),
        cpu_secs=sum(cores) if cores or not phases else None,
        slice_work_secs=worked,
    )


def finalists_of(store: Store) -> dict[str, list[Candidate]]:
    """Return a level's best candidates by task, the best first; the search measured them.

    None of them faulted in the level's own finals.
    """
    faulted = faults_of(store.task_outcomes())
    measured: dict[str, list[tuple[float, Candidate]]] = {}
    for record in store.records():
        secs = record.run_secs
        of_search = not record.candidate.is_default
        if secs is not None and of_search and record.candidate.candidate_id not in faulted:
            measured.setdefault(record.candidate.task_id, []).append((secs, record.candidate))
    weights = {t.task_id: t.weight for t in store.tasks()}
    best = {task_id: sorted(of, key=lambda m: m[0]) for task_id, of in measured.items()}
    parts = {task_id: of[0][0] * weights.get(task_id, 1) for task_id, of in best.items()}
    total = sum(parts.values())
    return {
        task_id: [c for _, c in of[: _MOST if parts[task_id] >= _MATTERS * total else _LEAST]]
        for task_id, of in best.items()
    }
