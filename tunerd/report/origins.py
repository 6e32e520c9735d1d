"""Which points of a plan it measured itself, and which it took, from when and where."""

from __future__ import annotations

from collections.abc import Iterable

from tunerd.colocation.planning.curves import Origin
from tunerd.colocation.planning.planned import PlannedMix
from tunerd.report.view import Grid
from tunerd.system.text import moment_text, ratio_texts, secs_text

_HEADS = ("of", "share", "in a launch", "takes", "measured")


def origin_text(origin: Origin | None) -> str:
    if origin is None:
        return "by this plan"
    return f"taken from {origin.where}{_when(origin, origin)}"


def origins_text(origins: Iterable[Origin | None]) -> str:
    """Return a sentence on all points: how many are from where, the oldest to the newest."""
    by_place: dict[tuple[str, str], list[Origin]] = {}
    own = 0
    for origin in origins:
        if origin is None:
            own += 1
        else:
            by_place.setdefault((origin.where, origin.host), []).append(origin)
    said = [f"{own} measured by this plan"] if own else []
    for (where, _), found in by_place.items():
        found.sort(key=lambda each: each.measured_at or 0.0)
        said.append(f"{len(found)} taken from {where}{_when(found[0], found[-1])}")
    return f"Points and pairs: {'; '.join(said)}."


def points_grid(found: PlannedMix) -> Grid:
    """Return each point, and each pair that was measured for this mix or one like it."""
    rows = [
        (p.of, f"{p.share}%", str(p.together), secs_text(p.secs.value), origin_text(p.origin))
        for p in found.curves
    ]
    for pair in found.pairs.measured:
        of, beside = pair.of, pair.beside
        if pair.origin is None or pair.origin.measured_at is not None:  # else a file's
            slowdown, _ = ratio_texts(pair.slowdown)
            counts = of.together, beside.together
            launch = "1" if max(counts) == 1 else ", ".join(map(str, counts))
            rows.append(
                (f"{of.name} beside {beside.name}", f"{of.share}%, {beside.share}%", launch,
                 slowdown, origin_text(pair.origin))
            )  # fmt: skip
    return Grid(_HEADS, rows, numbers=range(2, 4))


def _when(first: Origin, last: Origin) -> str:
    if last.measured_at is None:
        return ""
    times = [moment_text(each.measured_at) for each in (first, last) if each.measured_at]
    return f", measured {' to '.join(dict.fromkeys(times))} on {last.host or 'some machine'}"
