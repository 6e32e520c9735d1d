"""The candidate sources that there are: one line each."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tunerd.candidates.base import CandidateSource, LoweredKernel, Search, SearchSettings
from tunerd.candidates.default import DefaultSource
from tunerd.candidates.libraries.source import CublasLtSource, CudnnSource
from tunerd.candidates.metaschedule.source import MetaScheduleSource
from tunerd.candidates.registers.source import FmaSource, VnniSource
from tunerd.candidates.triton.source import TritonSource
from tunerd.vocabulary import DEFAULT_SOURCE, LIBRARIES, Candidate, Proposal, Task

# The first that takes a task proposes first.
SOURCES: dict[str, CandidateSource] = {
    source.name: source
    for source in (
        DefaultSource(),
        CublasLtSource(),
        CudnnSource(),
        TritonSource(),
        VnniSource(),
        FmaSource(),
        MetaScheduleSource(),
    )
}


def searched(libraries: Collection[str] = ()) -> tuple[str, ...]:
    """Name the sources that a task's trials are split between: all but its default.

    Of libraries only those that are asked for: what they make needs them where it runs.
    """
    left_out = {DEFAULT_SOURCE, *LIBRARIES} - set(libraries)
    return tuple(name for name in SOURCES if name not in left_out)


def lower(task: Task, candidate: Candidate, lanes: int | None = None) -> LoweredKernel:
    """Return what is compiled for a candidate; raises anything where its recipe says nothing.

    lanes: also of a task of one model, for the kernel that takes what `in_lanes` says.
    """
    source = SOURCES.get(candidate.source)
    if source is None:
        raise ValueError(
            f"this tunerd has no candidate source '{candidate.source}', only {', '.join(SOURCES)}"
        )
    return source.lower(
        task, candidate.recipe, lanes or (task.tenants if task.tenants > 1 else None)
    )


def searches(settings: SearchSettings, names: Iterable[str]) -> dict[str, Search]:
    """Return a search of each of these sources, by its name."""
    return {name: SOURCES[name].search(settings) for name in names}


def not_taken(task: Task, source: str) -> Proposal | None:
    """Return the answer of a source that does not take a task, None where it does."""
    reason = SOURCES[source].takes(task)
    return None if reason is None else Proposal((), True, reason, 0.0)
