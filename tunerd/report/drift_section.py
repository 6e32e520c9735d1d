"""What the spot checks found: on the page, on the terminal and in the JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tunerd.report.view import Grid, Section, Words, caption, left_out
from tunerd.stats.drift import WARN_ABOVE, SliceDrift
from tunerd.system.text import (
    EN_DASH,
    UNKNOWN,
    count_text,
    duration_text,
    one_line,
    percent_text,
    secs_text,
)
from tunerd.vocabulary import to_json

_HEADS = ("Slice", "Checks", "Over", "First", "Median ratio", "Last ratio", "Range")
_SHOWN_SLICES = 64


def drift_section(drifts: Sequence[SliceDrift]) -> Section | None:
    """Return a line per slice: its sentinel's first time, and ratios to that."""
    if not drifts:
        return None
    checks = sum(len(d.ratios) for d in drifts)
    about = (
        "The costliest default schedule, run in each slice now and then during the search. Ratios "
        "are to the slice\N{RIGHT SINGLE QUOTATION MARK}s first check, above 1 slower; the last is "
        "the median of the last third."
    )
    return Section(
        "Drift of the slices",
        (
            *(Words(text, "lead") for text in drift_warnings(drifts)),
            Grid(_HEADS, [_row(d) for d in drifts[:_SHOWN_SLICES]], named=True),
            left_out(len(drifts) - _SHOWN_SLICES, "slice"),
            caption(about),
        ),
        f"{count_text(checks, 'spot check')} in {count_text(len(drifts), 'slice')}, "
        f"{duration_text(sum(d.busy_secs for d in drifts))} of their time.",
    )


def drift_warnings(drifts: Sequence[SliceDrift]) -> list[str]:
    """Return a sentence for each slice that drifted by more than WARN_ABOVE."""
    return [
        f"{one_line(d.slice_id)} drifted by more than {percent_text(WARN_ABOVE)}: its sentinel "
        f"took {_ratio(d.median_ratio)} times its first time at the median, {_ratio(d.late_ratio)} "
        "times at the end; the search compared across that, the finals did not"
        for d in drifts
        if d.warns
    ]


def drift_json(drifts: Sequence[SliceDrift]) -> dict[str, Any]:
    """Return the same for json.dumps, with every ratio."""
    slices = [to_json(d) | {"checks": len(d.ratios)} for d in drifts]
    return {"warn_above": WARN_ABOVE, "slices": slices}


def _row(drift: SliceDrift) -> tuple[str, ...]:
    return (
        drift.slice_id,
        str(len(drift.ratios)),
        duration_text(drift.ratios[-1][0]),
        secs_text(drift.first_secs),
        _ratio(drift.median_ratio),
        _ratio(drift.late_ratio),
        f"{_ratio(drift.lowest)}{EN_DASH}{_ratio(drift.highest)}",
    )


def _ratio(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3f}"
