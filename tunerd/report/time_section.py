"""Where a run's time went: on the page, on the terminal and in the JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from tunerd.report import svg
from tunerd.report.terminal import table
from tunerd.report.view import Cell, Grid, Section, caption, left_out
from tunerd.system.text import count_text, duration_text, percent_text
from tunerd.telemetry.time_use import MOST_FINALS_SHARE, WORK, TimeUse, WorkerTime
from tunerd.vocabulary import Activity, Phase

_TIMELINES = 64  # on the page; of more the rest is counted
SHOWN_WORKERS = 8  # of a role on the terminal; of more the busiest and the idlest are shown


def time_section(use: TimeUse | None) -> Section | None:
    if use is None:
        return None
    workers = [w for of in use.roles.values() for w in of]
    activities = [a.value for a in Activity]
    grid = Grid(
        ("Worker", "", "busy", *activities),
        [_row(worker) for worker in workers[:_TIMELINES]],
        class_="spans",
        styles={"": "drawn"},
        keys={name: name for name in activities},
        named=True,
    )
    about = (
        "Each worker's search from left to right. A slice is idle when no build is ready for it, "
        "or while its cores build; waiting is a worker's own start, and the way to it and back."
    )
    return Section(
        "Where the time went",
        (grid, left_out(len(workers) - _TIMELINES, "worker"), caption(about)),
        f"{phases_text(use).capitalize()}. {_roles_text(use)}.",
    )


def _roles_text(use: TimeUse) -> str:
    parts = [
        f"{count_text(len(of), role)} busy {percent_text(use.busy(role))} of the search"
        for role, of in use.roles.items()
    ]
    if use.cores:
        parts.append(cores_text(use))
    return "; ".join(parts)


def _row(worker: WorkerTime) -> tuple[str | Cell, ...]:
    spent = ", ".join(f"{a.value} {duration_text(secs)}" for a, secs in worker.secs.items())
    return (
        worker.worker,
        Cell(drawn=svg.timeline(worker.timeline, spent)),
        percent_text(worker.busy),
        *(duration_text(secs) if secs else "" for secs in worker.secs.values()),
    )


def time_table(use: TimeUse) -> RenderableType:
    """Return the phases, each role's and each worker's time in the search, and the cores."""
    lines: list[RenderableType] = [Text(phases_text(use)), _worker_table(use)]
    if use.cores:
        lines.append(Text(cores_text(use)))
    return Group(*lines)


def phases_text(use: TimeUse) -> str:
    """Return `start-up 9 s (first trial after 12 s), search 60 s, ...; finals 20.0% of it`."""
    parts = []
    for phase in Phase:
        if phase not in use.phases:
            continue
        text = f"{phase} {duration_text(use.phases[phase])}"
        if phase is Phase.START and use.first_trial_secs is not None:
            text += f" (first trial after {duration_text(use.first_trial_secs)})"
        parts.append(text)
    of = f" of {use.sessions} sessions" if use.sessions > 1 else ""
    return f"time{of}: {', '.join(parts)}{_finals_text(use.finals_share)}"


def _finals_text(share: float | None) -> str:
    if share is None:
        return ""
    over = ", more than their third" if share > MOST_FINALS_SHARE else ""
    return f"; finals {percent_text(share)} of it{over}"


def cores_text(use: TimeUse) -> str:
    """Return how busy this machine's cores were in the search, whoever used them."""
    busy = list(use.cores.values())
    text = f"{count_text(len(busy), 'core')} {percent_text(fmean(busy))} busy in the search"
    if len(busy) > 1:
        text += f", from {percent_text(min(busy))} to {percent_text(max(busy))}"
    return text


def _worker_table(use: TimeUse) -> RenderableType:
    heads = ("of the search", "busy", *(a.value for a in Activity), "candidates")
    rows = []
    for role, workers in use.roles.items():
        if len(workers) > 1:
            rows.append(_time_cells(f"{count_text(len(workers), role)}, mean", workers))
        rows += [_time_cells(worker.worker, [worker]) for worker in _shown(workers)]
    return table(Grid(heads, rows, range(1, len(heads))), least_width=10)


def _shown(workers: Sequence[WorkerTime]) -> Sequence[WorkerTime]:
    if len(workers) <= SHOWN_WORKERS:
        return workers
    by_busy = sorted(workers, key=lambda w: w.busy)
    return [by_busy[-1], by_busy[0]]


def _time_cells(name: str, workers: Sequence[WorkerTime]) -> tuple[str, ...]:
    return (
        name,
        percent_text(fmean(w.busy for w in workers)),
        *(duration_text(fmean(w.secs[a] for w in workers)) for a in Activity),
        f"{sum(_candidates(w) for w in workers):,}",
    )


def _candidates(worker: WorkerTime) -> int:
    """Return what a worker finished: builds of a tuner, measurements of a slice."""
    done = Activity.MEASURE if worker.role == "slice" else Activity.BUILD
    return worker.items[done]


def time_json(use: TimeUse) -> dict[str, Any]:
    """Return the same for json.dumps, less the timelines."""
    return {
        "sessions": use.sessions,
        "phase_secs": {phase.value: secs for phase, secs in use.phases.items()},
        "first_trial_secs": use.first_trial_secs,
        "search_secs": use.search_secs,
        "finals_share": use.finals_share,
        "busy": {role: use.busy(role) for role in use.roles},
        "workers": [
            {
                "worker": worker.worker,
                "role": worker.role,
                "of_secs": worker.of_secs,
                "busy": worker.busy,
                "secs": {a.value: secs for a, secs in worker.secs.items()},
                "candidates": {a.value: worker.items[a] for a in WORK},
                "cpu_secs": worker.cpu_secs,
            }
            for worker in use.workers
        ],
        "core_busy": {str(core): busy for core, busy in use.cores.items()},
    }
