"""The section of the page that says where the time went."""

from __future__ import annotations

from tunerd.report import svg
from tunerd.report.components import section
from tunerd.report.markup import Markup, element
from tunerd.report.time_table import cores_text, phases_text
from tunerd.system.text import count_text, duration_text, percent_text
from tunerd.telemetry.time_use import TimeUse, WorkerTime
from tunerd.vocabulary import Activity

SHOWN_WORKERS = 64  # timelines on the page; of more the rest is counted


def where_time_went_section(use: TimeUse | None) -> Markup | None:
    if use is None:
        return None
    workers = [w for of in use.roles.values() for w in of]
    rest = len(workers) - SHOWN_WORKERS
    lead = f"{phases_text(use).capitalize()}. {_roles_text(use)}."
    return section(
        "Where the time went",
        element(
            "table",
            element("thead", element("tr", *_heads())),
            element("tbody", *map(_row, workers[:SHOWN_WORKERS])),
            class_="spans",
        ),
        element("p", f"And {count_text(rest, 'more worker')}.", class_="caption")
        if rest > 0
        else None,
        element(
            "p",
            "Each worker's search from left to right. A slice is idle when no build is ready for "
            "it, or while its cores build; waiting is a worker's own start, and the way to it and "
            "back.",
            class_="caption",
        ),
        lead=lead,
    )


def _roles_text(use: TimeUse) -> str:
    parts = [
        f"{count_text(len(of), role)} busy {percent_text(use.busy(role))} of the search"
        for role, of in use.roles.items()
    ]
    if use.cores:
        parts.append(cores_text(use))
    return "; ".join(parts)


def _heads() -> list[Markup]:
    return [
        element("th", "Worker", scope="col"),
        element("td"),
        element("th", "busy", scope="col"),
        *(
            element("th", element("i", class_=f"key {a.value}"), a.value, scope="col")
            for a in Activity
        ),
    ]


def _row(worker: WorkerTime) -> Markup:
    cells = [
        element("td", duration_text(secs) if secs else "", data_label=activity.value)
        for activity, secs in worker.secs.items()
    ]
    return element(
        "tr",
        element("th", element("bdi", worker.worker), scope="row"),
        element("td", svg.timeline(worker.timeline, _label(worker)), class_="drawn"),
        element("td", percent_text(worker.busy), data_label="busy"),
        *cells,
    )


def _label(worker: WorkerTime) -> str:
    return ", ".join(f"{a.value} {duration_text(secs)}" for a, secs in worker.secs.items())
