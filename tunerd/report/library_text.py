"""What libraries took where they were tried: a bar to beat, or the winner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tunerd.libraries.packages import PACKAGES
from tunerd.system.text import count_text, is_known, secs_text
from tunerd.vocabulary import LIBRARIES, Measurement
from tunerd.vocabulary.outcome import TaskOutcome


@dataclass(frozen=True)
class LibraryTime:
    """What a library's best took for a task."""

    secs: float  # the median
    is_searched: bool  # in the search alone: the finals did not come to it


@dataclass(frozen=True)
class LibraryBar:
    """A library over the tasks that it computes: seconds of one inference, by calls."""

    name: str
    secs: float
    shipped_secs: float  # of the same tasks
    tasks: int
    won: int  # of them
    searched: int = 0  # of them, in how many `secs` has the search's time

    @property
    def title(self) -> str:
        return PACKAGES[self.name].title

    @property
    def text(self) -> str:
        of = count_text(self.tasks, "task")
        if self.won == self.tasks:
            how = f" ({self._measured})" if self.searched else ""
            return f"{self.title} computes {of}, in {secs_text(self.secs)}{how}, and ships in each"
        ships = f"; it ships in {self.won} of them" if self.won else ""
        return (
            f"{self.title} would take {secs_text(self.secs)} for the {of} that it computes "
            f"({self._measured}), which take {secs_text(self.shipped_secs)} as shipped{ships}"
        )

    @property
    def _measured(self) -> str:
        """Say where its times are from."""
        if not self.searched:
            return "in finals"
        in_finals = self.tasks - self.searched
        first = f"{in_finals:,} in finals, {self.searched:,} " if in_finals else ""
        return f"{first}as the search measured {'it' if self.searched == 1 else 'them'}"


def library_times(task: TaskOutcome) -> dict[str, LibraryTime]:
    """Return the best of each library for a task: in its finals or, if left out, in the search."""
    found: dict[str, LibraryTime] = {}
    for finalist in task.finalists:
        result = finalist.measurement
        if finalist.source not in LIBRARIES:
            continue
        if isinstance(result, Measurement):
            time = LibraryTime(result.median_secs, is_searched=False)
        elif not result.kind.ends_trial and (secs := finalist.search_secs) is not None:
            time = LibraryTime(secs, is_searched=True)
        else:
            continue
        known = found.get(finalist.source, time)
        found[finalist.source] = min(known, time, key=lambda t: (t.is_searched, t.secs))
    return found


def library_bars(tasks: Sequence[TaskOutcome]) -> tuple[LibraryBar, ...]:
    """Return each library that was measured, over all tasks."""
    bars = []
    for name in LIBRARIES:
        own = [(t, time) for t in tasks if (time := library_times(t).get(name)) is not None]
        shipped = [b * t.weight for t, _ in own if is_known(b := t.best_secs) and b is not None]
        if own and len(shipped) == len(own):
            bars.append(
                LibraryBar(
                    name,
                    secs=sum(time.secs * t.weight for t, time in own),
                    shipped_secs=sum(shipped),
                    tasks=len(own),
                    won=sum(t.winner.source == name for t, _ in own),
                    searched=sum(time.is_searched for _, time in own),
                )
            )
    return tuple(bars)


def library_text(task: TaskOutcome) -> str:
    """Say what libraries would take for a task, or that one of them ships; or nothing."""
    return "; ".join(
        f"by {PACKAGES[name].title}"
        if task.winner.source == name
        else f"{PACKAGES[name].title} would take {secs_text(time.secs)}"
        f"{', as the search measured it' if time.is_searched else ''}"
        for name, time in library_times(task).items()
    )
