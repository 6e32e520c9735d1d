"""Several runs side by side: which may be compared, and what else differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tunerd.report.figures import by_share, not_in_turns, obtained_texts, timing
from tunerd.report.run_view import RunView
from tunerd.vocabulary.outcome import Comparison, TaskOutcome


@dataclass(frozen=True)
class NamedRun:
    """A run, and what it is called among the others: its folder."""

    label: str
    folder: Path
    view: RunView


@dataclass(frozen=True)
class AgainstFirst:
    """A run beside the first one.

    `obstacles` say why their latencies cannot be compared; there is then no comparison. What is in
    `remarks` differs, too, and is what a comparison may be about.
    """

    run: NamedRun
    comparison: Comparison | None
    obstacles: tuple[str, ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class TaskRow:
    """One kernel in each run, in the order of the runs; None where a run has no such task."""

    task_id: str
    name: str
    tasks: tuple[TaskOutcome | None, ...]


def named(folders: Sequence[Path], views: Sequence[RunView]) -> tuple[NamedRun, ...]:
    """Return the runs by the names of their folders, in full where two have one name."""
    names = [folder.resolve().name or str(folder) for folder in folders]
    twice = {name for name, count in Counter(names).items() if count > 1}
    return tuple(
        NamedRun(str(folder) if name in twice else name, folder, view)
        for folder, name, view in zip(folders, names, views, strict=True)
    )


def against_first(runs: Sequence[NamedRun]) -> tuple[AgainstFirst, ...]:
    """Return each run but the first beside the first."""
    first, *others = runs
    found = []
    for other in others:
        obstacles = _obstacles(first.view, other.view)
        compared = None if obstacles else _compared(first.view, other.view)
        if not obstacles and compared is None:
            obstacles = ["one of the two has no end-to-end latency"]
        remarks = _remarks(first.view, other.view)
        found.append(AgainstFirst(other, compared, tuple(obstacles), tuple(remarks)))
    return tuple(found)


def task_rows(runs: Sequence[NamedRun]) -> tuple[TaskRow, ...]:
    """Return the kernels of all runs: the first run's by their time, then what others add."""
    names: dict[str, str] = {}
    for run in runs:
        for share in by_share(run.view.tasks):
            names.setdefault(share.task.task_id, share.task.name)
    by_run = [{t.task_id: t for t in run.view.tasks} for run in runs]
    return tuple(
        TaskRow(task_id, name, tuple(of.get(task_id) for of in by_run))
        for task_id, name in names.items()
    )


def _obstacles(first: RunView, other: RunView) -> list[str]:
    """Return what makes two latencies answers to different questions."""
    pairs = {
        "model": (_model(first), _model(other)),
        "precision": (first.facts.precision_text, other.facts.precision_text),
        "device": (first.facts.device, other.facts.device),
        "share obtained": (_obtained(first), _obtained(other)),
        "slices": (first.facts.slice_kind, other.facts.slice_kind),
        "driver": (_drivers(first), _drivers(other)),
    }
    return _different(pairs)


def _remarks(first: RunView, other: RunView) -> list[str]:
    pairs = {
        "share asked": (f"{first.facts.pct}%", f"{other.facts.pct}%"),
        "tunerd": (first.facts.tunerd_version, other.facts.tunerd_version),
        "TVM": (first.facts.tvm_version, other.facts.tvm_version),
        "host": (str(first.host.get("hostname")), str(other.host.get("hostname"))),
        "trials": (f"{first.trials:,}", f"{other.trials:,}"),
        "seed": (str(first.settings.get("seed")), str(other.settings.get("seed"))),
    }
    return _different(pairs)


def _different(pairs: dict[str, tuple[str, str]]) -> list[str]:
    return [f"{what} {b} (the first: {a})" for what, (a, b) in pairs.items() if a != b]


def _model(view: RunView) -> str:
    return f"{view.name} (sha256 {view.facts.model_digest[:12]})"


def _obtained(view: RunView) -> str:
    return "; ".join(t.partition(",")[0] for t in obtained_texts(view)) or "none proved"


def _drivers(view: RunView) -> str:
    return ", ".join(sorted({p.driver for p in view.proofs if p.driver})) or "none"


def _compared(first: RunView, other: RunView) -> Comparison | None:
    """Compare the tuned models."""
    return not_in_turns(timing(first.outcome, "tuned"), timing(other.outcome, "tuned"))
