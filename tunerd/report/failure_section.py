"""The section of the page about trials that ended without a number."""

from __future__ import annotations

from tunerd.report.components import row, section, table
from tunerd.report.markup import Markup, element, join
from tunerd.report.run_view import RunView
from tunerd.system.text import UNKNOWN, count_text, percent_text
from tunerd.telemetry.history import FailureKind

_HEADS = ("Kind", "Trials", "Last message")
_LAST_LINES = 6  # of a message; the whole is in the run folder's log


def failure_section(view: RunView) -> Markup:
    """Return how often trials failed in which way, and the last lines of the last of each."""
    title = "Failed trials"
    again = (
        f" {count_text(view.repeated, 'attempt')} ended through no fault of the candidate, and "
        + ("was" if view.repeated == 1 else "were")
        + " repeated."
        if view.repeated
        else ""
    )
    if not view.failures:
        return section(title, lead=f"None.{again}")
    rows = [row(_HEADS, (kind.name, f"{kind.trials:,}", _message(kind))) for kind in view.failures]
    failed = sum(kind.trials for kind in view.failures)
    of = f" ({percent_text(view.failed / view.trials)} of the search)" if view.trials else ""
    lead = f"{count_text(failed, 'trial')} ended without a number{of}.{again}"
    return section(title, table(_HEADS, rows, "failures"), lead=lead)


def _message(kind: FailureKind) -> Markup:
    log = element("small", "logs/", element("wbr"), f"trial-{kind.trial_id}.log")
    return join((element("pre", last_lines(kind.message) or UNKNOWN), log))


def last_lines(message: str, most: int = _LAST_LINES) -> str:
    """Return the last lines of a message that say anything."""
    return "\n".join([line for line in message.splitlines() if line.strip()][-most:])
