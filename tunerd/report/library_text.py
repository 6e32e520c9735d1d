"""What libraries took where they were tried: a bar to beat, or the winner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tunerd.libraries.packages import PACKAGES
from tunerd.system.text import count_text, is_known, secs_text
from tunerd.vocabulary import LIBRARIES, Measurement
from tunerd.vocabulary.outcome import TaskOutcome


@dataclass(frozen=True)
class LibraryBar:
    """A library over the tasks that it computes: seconds of one inference, by calls."""

    name: str
    secs: float
    shipped_secs: float  # of the same tasks
    tasks: int
    won: int  # of them

    @property
    def title(self) -> str:
        return PACKAGES[self.name].title

    @property
    def text(self) -> str:
        of = count_text(self.tasks, "task")
        if self.won == self.tasks:
            return f"{self.title} computes {of}, in {secs_text(self.secs)}, and ships in each"
        ships = f"; it ships in {self.won} of them" if self.won else ""
        return (
            f"{self.title} would take {secs_text(self.secs)} for the {of} that it computes, which "
            f"take {secs_text(self.shipped_secs)} as shipped{ships}"
        )


def library_secs(task: TaskOutcome) -> dict[str, float]:
    """Return the best median of each library among a task's finalists, in seconds."""
    found: dict[str, float] = {}
    for finalist in task.finalists:
        result = finalist.measurement
        if finalist.source in LIBRARIES and isinstance(result, Measurement):
            known = found.get(finalist.source, result.median_secs)
            found[finalist.source] = min(known, result.median_secs)
    return found


def library_bars(tasks: Sequence[TaskOutcome]) -> tuple[LibraryBar, ...]:
    """Return each library that was measured, over all tasks."""
    bars = []
    for name in LIBRARIES:
        own = [(t, secs) for t in tasks if (secs := library_secs(t).get(name)) is not None]
        shipped = [b * t.weight for t, _ in own if is_known(b := t.best_secs) and b is not None]
        if own and len(shipped) == len(own):
            won = sum(t.winner.source == name for t, _ in own)
            secs = sum(secs * t.weight for t, secs in own)
            bars.append(LibraryBar(name, secs, sum(shipped), len(own), won))
    return tuple(bars)


def library_text(task: TaskOutcome) -> str:
    """Say what libraries would take for a task, or that one of them ships; or nothing."""
    return "; ".join(
        f"by {PACKAGES[name].title}"
        if task.winner.source == name
        else f"{PACKAGES[name].title} would take {secs_text(secs)}"
        for name, secs in library_secs(task).items()
    )
