"""Spans and phases of a run -> where its time went.

Of a search's time each worker spends its part on work (a search, a build, a measurement), on
waiting (its own start, and Ray's way there and back) and on nothing: a slice is idle when no build
is ready for it or its cores are building, a tuner when its cores measure or nothing is wanted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

from tunerd.vocabulary import Activity, Phase, PhaseTime, Span

FINALS = (Phase.FINALS, Phase.MODEL)  # what follows the search
MOST_FINALS_SHARE = 1 / 3  # of a run's time, unless what they never leave out takes longer
WORK = (Activity.SEARCH, Activity.BUILD, Activity.MEASURE)
_BINS = 240  # of a timeline; a page is some 1,000 pixels wide


@dataclass(frozen=True)
class Stretch:
    """A part of a timeline, in fractions of it, named by what took most of the time there."""

    activity: Activity
    start: float
    end: float


@dataclass(frozen=True)
class WorkerTime:
    """One worker's part in the searches of a run. `secs` has every activity and sums to `of`."""

    worker: str
    role: str  # "tuner" or "slice"
    of_secs: float  # of the searches in which it took part
    secs: Mapping[Activity, float]
    items: Mapping[Activity, int]  # candidates
    cpu_secs: float | None
    timeline: tuple[Stretch, ...]  # over all searches of the run, one after the other

    @property
    def busy(self) -> float:
        """The fraction of its time in which it worked."""
        return sum(self.secs[a] for a in WORK) / self.of_secs if self.of_secs else 0.0


@dataclass(frozen=True)
class TimeUse:
    """Where a run's time went, all its sessions together."""

    sessions: int
    phases: Mapping[Phase, float]  # seconds
    first_trial_secs: float | None  # of the last session: from its start to its first measurement
    search_secs: float
    workers: tuple[WorkerTime, ...]
    cores: Mapping[int, float]  # fraction of the searches in which a core of the driver's worked

    @property
    def finals_share(self) -> float | None:
        """The fraction of the run's time that its finals took; None: it did not come to them."""
        finals = [self.phases[phase] for phase in FINALS if phase in self.phases]
        total = sum(self.phases.values())
        return sum(finals) / total if finals and total else None

    @property
    def roles(self) -> dict[str, tuple[WorkerTime, ...]]:
        found: dict[str, list[WorkerTime]] = {}
        for worker in self.workers:
            found.setdefault(worker.role, []).append(worker)
        return {role: tuple(of) for role, of in sorted(found.items(), reverse=True)}

    def busy(self, role: str) -> float:
        """Return the mean fraction of the time in which workers of a role worked."""
        return fmean(w.busy for w in self.roles[role])


@dataclass(frozen=True)
class _Search:
    """The search of one session, and where it begins on the axis of all searches."""

    start: float
    end: float
    offset: float


def time_use(spans: Sequence[Span], phases: Sequence[PhaseTime]) -> TimeUse | None:
    """Sum up a run; None where nothing was noted."""
    searches = _searches(spans, phases)
    if not searches:
        return None
    total = sum(s.end - s.start for s in searches.values())
    by_worker: defaultdict[str, list[Span]] = defaultdict(list)
    for span in spans:
        by_worker[span.worker].append(span)
    secs_of: dict[Phase, float] = {}
    for phase in phases:
        secs_of[phase.phase] = secs_of.get(phase.phase, 0.0) + phase.end - phase.start
    return TimeUse(
        sessions=len(searches),
        phases=secs_of | {Phase.SEARCH: total},
        first_trial_secs=_first_trial_secs(spans, phases),
        search_secs=total,
        workers=tuple(_worker_time(of, searches, total) for of in by_worker.values()),
        cores=_cores(phases),
    )


def _searches(spans: Sequence[Span], phases: Sequence[PhaseTime]) -> dict[int, _Search]:
    """Return each session's search: its phase or, where it was killed in it, its spans' extent."""
    noted = {p.session: (p.start, p.end) for p in phases if p.phase is Phase.SEARCH}
    for session, group in groupby(sorted(spans, key=lambda s: s.session), lambda s: s.session):
        if session not in noted:
            of = list(group)
            noted[session] = (min(s.start for s in of), max(s.end for s in of))
    found: dict[int, _Search] = {}
    offset = 0.0
    for session, (start, end) in sorted(noted.items()):
        found[session] = _Search(start, end, offset)
        offset += end - start
    return found


def _worker_time(
    spans: Sequence[Span], searches: Mapping[int, _Search], total: float
) -> WorkerTime:
    secs = dict.fromkeys(Activity, 0.0)
    items = dict.fromkeys(WORK, 0)
    cpu = [s.cpu_secs for s in spans if s.cpu_secs is not None]
    bins: list[dict[Activity, float]] = [{} for _ in range(_BINS)]
    for span in spans:
        search = searches[span.session]
        start, end = max(span.start, search.start), min(span.end, search.end)
        if end <= start or span.activity is Activity.IDLE:
            continue
        busy = end - start if span.busy_secs is None else min(span.busy_secs, end - start)
        secs[span.activity] += busy
        secs[Activity.WAIT] += end - start - busy
        if span.activity in items:
            items[span.activity] += span.items
        offset = search.offset - search.start
        _fill(bins, span.activity, (start + offset) / total, (end + offset) / total)
    taken_part = {s.session for s in spans}
    of_secs = sum(searches[n].end - searches[n].start for n in taken_part)
    secs[Activity.IDLE] = max(0.0, of_secs - sum(secs.values()))
    return WorkerTime(
        worker=spans[0].worker,
        role=spans[0].role,
        of_secs=of_secs,
        secs=secs,
        items=items,
        cpu_secs=sum(cpu) if cpu else None,
        timeline=_timeline(bins),
    )


def _fill(bins: list[dict[Activity, float]], activity: Activity, start: float, end: float) -> None:
    """Add a stretch, in fractions of the whole, to the bins that it touches, in parts of a bin."""
    first, last = start * _BINS, end * _BINS
    for number in range(int(first), min(_BINS, int(last) + 1)):
        part = min(last, number + 1) - max(first, number)
        if part > 0:
            bins[number][activity] = bins[number].get(activity, 0.0) + part


def _timeline(bins: Sequence[Mapping[Activity, float]]) -> tuple[Stretch, ...]:
    most = []
    for parts in bins:
        with_idle = {**parts, Activity.IDLE: 1.0 - sum(parts.values())}
        most.append(max(with_idle, key=with_idle.__getitem__))
    stretches, at = [], 0
    for activity, group in groupby(most):
        until = at + len(list(group))
        stretches.append(Stretch(activity, at / _BINS, until / _BINS))
        at = until
    return tuple(stretches)


def _first_trial_secs(spans: Sequence[Span], phases: Sequence[PhaseTime]) -> float | None:
    last = max((s.session for s in spans), default=0)
    starts = [p.start for p in phases if p.session == last and p.phase is Phase.START]
    mine = (s for s in spans if s.session == last and s.activity is Activity.MEASURE)
    ends = [s.end for s in mine if s.items]  # the finals' work has none
    return min(ends) - starts[0] if starts and ends else None


def _cores(phases: Sequence[PhaseTime]) -> dict[int, float]:
    """Return the busy fraction of each core in the searches for which the kernel told it."""
    busy: dict[int, float] = {}
    known: dict[int, float] = {}
    for phase in phases:
        if phase.phase is not Phase.SEARCH:
            continue
        for core, secs in phase.core_busy_secs:
            busy[core] = busy.get(core, 0.0) + secs
            known[core] = known.get(core, 0.0) + phase.end - phase.start
    return {c: min(1.0, busy[c] / known[c]) for c in sorted(busy) if known[c] > 0}
