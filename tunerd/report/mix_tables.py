"""The tables of a planned mix that people read: members that are alike have one row."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from tunerd.colocation.planning.placement import Expected, Forecast
from tunerd.colocation.planning.planned import PlannedMix
from tunerd.colocation.planning.proof import Proof, Proven
from tunerd.report.alike import (
    grouped,
    names_text,
    places_of,
    problems_text,
    row_name,
    span,
    spread,
)
from tunerd.report.view import Grid
from tunerd.system.text import UNKNOWN, percent_text, ratio_texts, secs_text, significant
from tunerd.vocabulary import unit_name

_GAINS = ("member", "share", "lane", "rate", "busy", "lane busy", "p50", "tail", "SLO", "slowdown",
          "memory")  # fmt: skip
_COLD = "cold starts"  # where there are any
_PROOFS = ("member", "asked", "answered", "p50 expected", "p50", "tail expected", "tail", "off",
           "within SLO", "promised")  # fmt: skip


def short_names(found: PlannedMix) -> Callable[[Sequence[str]], str]:
    """Return what names members to people, those of one entry in short."""
    places = places_of(found.mix)
    return lambda names: names_text(names, places)


def reasons_of(found: PlannedMix) -> list[str]:
    return problems_text(found.answer.reasons, places_of(found.mix))


def _alike(found: PlannedMix, forecast: Forecast) -> Callable[[Expected], Hashable]:
    """Return what members have in common that are one row: entry, share, lane, promise, rate."""
    places = places_of(found.mix)
    lanes = _lanes(forecast)
    return lambda each: (
        places[each.member][0], each.share, each.units, lanes[each.member], each.rate,
        each.slo_secs, each.part, each.slowdown.how,
    )  # fmt: skip


def has_alike(found: PlannedMix) -> bool:
    """Whether a row stands for several members."""
    chosen = found.answer.chosen
    if chosen is None:
        return False
    return len(grouped(chosen.expected, _alike(found, chosen))) < len(chosen.expected)


def _lanes(forecast: Forecast) -> dict[str, str]:
    """Return for each member in which lane it is served."""
    placement = forecast.placement
    found: dict[str, str] = {}
    for nth, lane in enumerate(placement.lanes):
        said = f"any of {len(placement.lanes)}" if placement.kind == "space-time" else str(nth)
        if placement.kind == "space-time" or lane.together > 1:
            said += f", {lane.together} in a launch"
        found |= dict.fromkeys(lane.members, said)
    return found


def gains_grid(forecast: Forecast, found: PlannedMix) -> Grid:
    kind = "cuda" if found.mix.device == "cuda" else "llvm"
    named, lanes = short_names(found), _lanes(forecast)
    rows = []
    for alike in grouped(forecast.expected, _alike(found, forecast)):
        names = [each.member for each in alike]
        row = (row_name(names, named(names)), *_gain(alike, lanes[names[0]], kind))
        rows.append((*row, _cold(alike)) if forecast.has_colds else row)
    columns = (*_GAINS, _COLD) if forecast.has_colds else _GAINS
    return Grid(columns, rows, numbers=range(3, len(columns)))


def _gain(alike: Sequence[Expected], lane: str, kind: str) -> tuple[str, ...]:
    first = alike[0]
    units = f" ({first.units} {unit_name(kind, first.units)})" if first.units else ""
    tails = spread((each.tail_secs for each in alike), secs_text)
    return (
        f"{first.share}%{units}", lane, f"{first.rate:g}/s",
        spread((each.busy for each in alike), percent_text),
        spread((each.lane_busy for each in alike), percent_text),
        spread((each.p50_secs for each in alike), secs_text),
        f"p{100 * first.part:g} {tails}", secs_text(first.slo_secs), _slowdown(alike),
        spread((each.memory_bytes for each in alike), _mib),
    )  # fmt: skip


def _cold(alike: Sequence[Expected]) -> str:
    """Return the part of requests that wait for weights; the time of that is in a sentence."""
    parts = [each.cold.part for each in alike]
    return f"{spread(parts, percent_text)} estimated" if any(parts) else UNKNOWN


def _slowdown(alike: Sequence[Expected]) -> str:
    how = alike[0].slowdown.how
    if how == "alone":
        return UNKNOWN
    found = sorted((each.slowdown.interval for each in alike), key=lambda each: each.value)
    return f"{span(*(ratio_texts(each)[0] for each in (found[0], found[-1])))} {how}"


def _mib(size: float | None) -> str:
    return UNKNOWN if size is None else f"{significant(size / (1 << 20))} MiB"


def rejected_grid(found: PlannedMix) -> Grid | None:
    if not found.answer.alternatives:
        return None
    named = short_names(found)
    rows = [
        (
            each.name,
            each.forecast.placement.text(named),
            percent_text(each.forecast.score),
            each.why,
        )
        for each in found.answer.alternatives
    ]
    return Grid(("rejected", "placement", "of allowed", "why"), rows)


def proof_grid(proof: Proof, found: PlannedMix) -> Grid:
    assert found.answer.chosen is not None
    of, named = _alike(found, found.answer.chosen), short_names(found)
    rows = []
    for alike in grouped(proof.members, lambda each: (of(each.expected), *_known(each))):
        names = [each.expected.member for each in alike]
        # Who broke a promise is named, however many they are.
        said = ", ".join(names) if alike[0].is_kept is False else named(names)
        rows.append((row_name(names, said), *_proven(alike)))
    return Grid(_PROOFS, rows, numbers=range(1, 9))


def _known(each: Proven) -> tuple[bool | None, bool, bool]:
    return each.is_kept, each.p50_secs is None, each.tail_secs is None


def _proven(alike: Sequence[Proven]) -> tuple[str, ...]:
    """Return the cells of members that are alike: sums, ranges, and the worst that is in time."""
    promised = {True: "kept", False: "not kept", None: "cannot tell"}[alike[0].is_kept]
    within = [each.within for each in alike if each.within is not None]
    return (
        f"{sum(each.asked for each in alike):,}", f"{sum(each.answered for each in alike):,}",
        spread((each.expected.p50_secs for each in alike), secs_text),
        spread((each.p50_secs for each in alike), secs_text),
        spread((each.expected.tail_secs for each in alike), secs_text),
        spread((each.tail_secs for each in alike), secs_text),
        spread((each.off("tail") for each in alike), _off),
        percent_text(min(within, default=None)), promised,
    )  # fmt: skip


def _off(part: float | None) -> str:
    return UNKNOWN if part is None else f"{part:+.0%}"
