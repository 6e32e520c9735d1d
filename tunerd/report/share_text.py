"""A profile over shares: in sentences, on the terminal, as Markdown and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from tunerd.report.markdown_text import text as plain
from tunerd.report.markdown_text import written
from tunerd.report.terminal import shown
from tunerd.report.view import Grid, Items
from tunerd.system.text import (
    EN_DASH,
    TIMES,
    count_text,
    one_line,
    percent_text,
    ratio_texts,
    secs_range_text,
    secs_text,
    significant,
)

if TYPE_CHECKING:
    from tunerd.studies.profile.curve import Curve, Point, SmallestShare
    from tunerd.studies.profile.profile import Profile
    from tunerd.vocabulary.verdict import Interval

_HEADS = ("Share", "Obtained", "Median", "95% interval", "p95", "Inputs/s", f"{TIMES} whole")


def title_text(profile: Profile) -> str:
    return f"{profile.name}, {profile.schedules}, over shares of {profile.whole.device}"


def share_text(point: Point) -> str:
    """Return the shares that obtain these SMs: `50%`, or a range of them."""
    first, last = point.pcts[0], point.pcts[-1]
    return f"{first}%" if first == last else f"{first}{EN_DASH}{last}%"


def mark_text(profile: Profile, curve: Curve, point: Point) -> str:
    """Return what a point is: the knee, the smallest share for the latency, both, or nothing."""
    number = profile.curves.index(curve)
    answers = [("knee", profile.knees[number])]
    if profile.for_slo:
        answers.append(("SLO", profile.for_slo[number]))
    return ", ".join(what for what, answer in answers if answer.safe == point and _is_told(answer))


def _is_told(answer: SmallestShare) -> bool:
    return answer.found in ("found", "at most")


def _row_texts(point: Point) -> tuple[str, ...]:
    """Return a point's cells, in the order of _HEADS."""
    return (
        share_text(point),
        f"{point.sm_count}",
        secs_text(point.latency.value),
        _interval_text(point.latency),
        secs_text(point.tail.value),
        significant(point.per_sec),
        _ratio_text(point.slowdown),
    )


def sentences(profile: Profile) -> list[str]:
    """Return what the curves allow to say, batch by batch, and what they leave open."""
    said = []
    for number, (curve, answer) in enumerate(zip(profile.curves, profile.knees, strict=True)):
        said.append(f"batch {curve.batch}: {_knee_sentence(profile, curve, answer)}")
        if profile.for_slo:
            sentence = slo_sentence(profile, profile.for_slo[number])
            said.append(f"batch {curve.batch}: {sentence}")
    said += notes(profile)
    return said


def notes(profile: Profile) -> Iterator[str]:
    """Yield what was measured once for several shares, and what could not be."""
    first = profile.curves[0]
    for point in first.points:
        if len(point.pcts) > 1:
            pcts = " and ".join(filter(None, (", ".join(_pcts(point)[:-1]), _pcts(point)[-1])))
            yield (
                f"{pcts} obtain the same {count_text(point.sm_count, profile.unit[:-1])} and were "
                "measured once"
            )
    if profile.left_out:
        pcts = ", ".join(f"{pct}%" for pct, _ in profile.left_out)
        yield f"not to be had here: {pcts} ({profile.left_out[-1][1]})"
    if profile.rounds < 2:
        yield "one round has no intervals: nothing can be told; give more --rounds"


def slo_sentence(profile: Profile, answer: SmallestShare) -> str:
    """Say which share meets the latency that was asked for."""
    limit = secs_text(profile.slo_secs)
    match answer.found:
        case "none":
            return f"no share meets {limit}, not even the whole device"
        case "found" if answer.safe is not None:
            return f"{_at(profile, answer.safe)} is the smallest share that meets {limit}"
        case "at most" if answer.safe is not None:
            return f"{limit} is met at {_at(profile, answer.safe)}, the smallest share measured"
    return f"cannot tell which share is the smallest that meets {limit}: {_between(answer)}"


def _knee_sentence(profile: Profile, curve: Curve, answer: SmallestShare) -> str:
    loss = f"within {percent_text(profile.loss).replace('.0%', '%')} of the whole device's latency"
    if answer.safe is not None and answer.found == "found":
        return f"the knee is {_at(profile, answer.safe)}, the smallest share {loss}"
    if answer.safe is not None and answer.found == "at most":
        if len(curve.points) == 1:
            return "no knee: one share alone was measured"
        return f"the knee is at {_at(profile, answer.safe)} or below it: all shares are {loss}"
    return f"cannot tell the knee, the smallest share {loss}: {_between(answer)}"


def _between(answer: SmallestShare) -> str:
    least = f"it may be {answer.least.pct}%" if answer.least else "none may be"
    safe = f"{answer.safe.pct}% is sure" if answer.safe else "none is sure"
    return f"{least}, and {safe}; more --rounds or a longer --duration narrow it"


def _at(profile: Profile, point: Point) -> str:
    return f"{point.pct}% ({count_text(point.sm_count, profile.unit[:-1])})"


def _pcts(point: Point) -> list[str]:
    return [f"{pct}%" for pct in point.pcts]


def _interval_text(value: Interval) -> str:
    return secs_range_text(value.low, value.high) if math.isfinite(value.high) else "unknown"


def _ratio_text(value: Interval) -> str:
    ratio, interval = ratio_texts(value)
    return "1" if value.low == value.high == 1 else f"{ratio} ({interval})"


# --- the terminal and Markdown ------------------------------------------------------------------


def curve_grid(profile: Profile, curve: Curve) -> Grid:
    """Return a row for each share of a batch, with what the share is."""
    heads = (_HEADS[0], profile.unit, *_HEADS[2:], "")
    rows = [(*_row_texts(point), mark_text(profile, curve, point)) for point in curve.points]
    return Grid(heads, rows, range(1, len(_HEADS)), class_="kernels")


def _grid(profile: Profile) -> Grid:
    """Return a row for each batch and share."""
    rows = [
        (str(curve.batch), *_row_texts(point)) for curve in profile.curves for point in curve.points
    ]
    heads = ("Batch", _HEADS[0], profile.unit, *_HEADS[2:])
    return Grid(heads, rows, range(len(heads)))


def share_table(profile: Profile) -> RenderableType:
    """Return a line for each batch and share, and what they say, for rich to print."""
    grid = _grid(profile)
    heads = [head for head in grid.heads if head != "95% interval"]  # what 80 columns hold
    title = Text(one_line(title_text(profile)), style="bold")
    return Group(title, shown((grid.only(*heads), Items(sentences(profile)))))


def share_markdown(profile: Profile) -> str:
    """Return a heading, a table and what it says."""
    said = written((_grid(profile), Items(sentences(profile))))
    return f"### {plain(title_text(profile))}\n\n{said}\n"


# --- JSON --------------------------------------------------------------------------------------


def profile_json(profile: Profile) -> dict[str, Any]:
    """Return the document of --json; what is unbounded is null."""
    from tunerd.vocabulary import finite, to_json

    return {
        "model": profile.name,
        "schedules": profile.schedules,
        "slice_kind": profile.kind,
        "device": profile.whole.device,
        "device_sm_count": profile.whole.device_sm_count,
        "rounds": profile.rounds,
        "loss": profile.loss,
        "slo_secs": profile.slo_secs,
        "batches": [
            {
                "batch": curve.batch,
                "knee": answer_json(profile.knees[number]),
                "slo": answer_json(profile.for_slo[number]) if profile.for_slo else None,
                "points": [finite(to_json(point)) for point in curve.points],
            }
            for number, curve in enumerate(profile.curves)
        ],
        "proofs": [{"pct": pct, **to_json(proof)} for pct, proof in profile.proofs],
        "left_out": [{"pct": pct, "why": why} for pct, why in profile.left_out],
        "sentences": sentences(profile),
    }


def answer_json(answer: SmallestShare) -> dict[str, Any]:
    return {
        "found": str(answer.found),
        "pct": answer.safe.pct if answer.safe else None,
        "sm_count": answer.safe.sm_count if answer.safe else None,
        "least_pct": answer.least.pct if answer.least else None,
    }
