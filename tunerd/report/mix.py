"""What `tunerd colocate plan` found: on the terminal, as JSON and as a page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from tunerd.colocation.planning.answer import Answer
from tunerd.colocation.planning.estimates import LEVEL, Calibration
from tunerd.colocation.planning.mix import names_of
from tunerd.colocation.planning.placement import Expected, Forecast
from tunerd.colocation.planning.planned import PLAN, PlannedMix
from tunerd.colocation.planning.proof import Proof, Proven
from tunerd.colocation.planning.residency import BROUGHT_BYTES_PER_SEC, Cold
from tunerd.colocation.planning.search import Searched
from tunerd.report import html
from tunerd.report.calibration import calibration_plot
from tunerd.report.colocation import bench_json, lateness
from tunerd.report.mix_tables import (
    gains_grid,
    has_alike,
    proof_grid,
    reasons_of,
    rejected_grid,
    short_names,
)
from tunerd.report.origins import origin_text, origins_text, points_grid
from tunerd.report.terminal import shown, table
from tunerd.report.view import Items, Plot, Section, View, caption
from tunerd.system.text import (
    count_text,
    duration_text,
    percent_text,
    secs_text,
    significant,
)
from tunerd.vocabulary import to_json

_TITLE = "A mix of models on one device"
_ALIKE = (
    "Members that are alike have one row: what each gets, from the least to the most, and of a "
    "proof the sums of what was asked and answered."
)
_WAITING = (
    "Waiting times: M/G/1 by its exponential tail (Asmussen, Applied Probability and Queues, "
    "XIII.5); launches of several tenants: a queue with bulk service (Bailey, 1954), run."
)


def mix_table(found: PlannedMix, *, is_dry: bool = False) -> RenderableType:
    """Return one page of text: the answer, what each gets, what is known, what was rejected."""
    answer, proof = found.answer, found.proof
    parts: list[RenderableType] = [
        Text(answer_text(answer, short_names(found)), style="bold"),
        *(Text(f"  {reason}") for reason in reasons_of(found)),
    ]
    if answer.chosen is not None:
        parts += ["", table(gains_grid(answer.chosen, found)), ""]
    parts.append(shown([Items(_sentences(found))]))
    if rejected := rejected_grid(found):
        parts += ["", table(rejected)]
    if answer.to_measure:
        parts += ["", Text("Not measured yet:", style="bold")]
        parts += [Text(f"  {what}") for what in answer.to_measure]
    if is_dry and answer.to_measure:
        takes = duration_text(60 * math.ceil(found.lacking_secs / 60))
        parts.append(Text(f"next      the same command without --dry-run, about {takes} in all"))
    if proof is not None:
        parts += ["", Text(proof_text(proof), style="bold"), table(proof_grid(proof, found))]
    if found.plan is not None and not is_dry:
        parts += ["", Text(f"plan      {found.folder / PLAN}")]
    return Group(*parts)


def mix_json(found: PlannedMix) -> dict[str, Any]:
    """Return what was found, for json.dumps."""
    answer = found.answer
    document: dict[str, Any] = {
        "answer": answer.said,
        "text": answer_text(answer),
        "reasons": list(answer.reasons),
        "chosen": _forecast_json(answer.chosen),
        "alternatives": [
            {"name": each.name, "why": each.why} | (_forecast_json(each.forecast) or {})
            for each in answer.alternatives
        ],
        "times_the_rates": _number(answer.times),
        "to_measure": list(answer.to_measure),
        "plan": None if found.plan is None else found.plan.model_dump(mode="json"),
        "curves": found.curves.json(),
        "pairs": [to_json(pair) for pair in found.pairs.measured],
        "no_estimate": found.no_estimate,
        "notes": list(found.notes),
        "left_out": list(found.left_out),
        "lacking_secs": found.lacking_secs,
    }
    if answer.searched is not None:
        searched = answer.searched
        document["search"] = _gap_json(searched) | {"greedy_gap": _number(searched.greedy_gap)}
    if answer.beside is not None:
        document["search_of_launches_beside_lanes"] = _gap_json(answer.beside)
    if (model := found.pairs.model) is not None:
        document["calibration"] = {
            "median_error": model.calibration.median_error,
            "median_error_of_constant": model.calibration.median_error_of_constant,
            "coverage": model.calibration.coverage,
            "level": LEVEL,
            "pairs": len(model.calibration.checked),
        }
    if found.proof is not None:
        document["proof"] = {
            "is_kept": found.proof.is_kept,
            "members": [_proven_json(each) for each in found.proof.members],
            "bench": bench_json(found.proof.benched),
        }
    return document


def mix_page(found: PlannedMix) -> str:
    answer, proof, model = found.answer, found.proof, found.pairs.model
    rejected = rejected_grid(found)
    sections: list[Section | None] = [
        Section(
            "What each gets",
            (
                gains_grid(answer.chosen, found) if answer.chosen is not None else None,
                Items([*reasons_of(found), *_sentences(found)]),
            ),
        ),
        Section("Expected and measured", [proof_grid(proof, found)], proof_text(proof))
        if proof
        else None,
        Section("What was rejected", [rejected]) if rejected else None,
        Section("What was measured", [points_grid(found)]) if [*found.curves] else None,
        Section("Not measured yet", [Items(answer.to_measure)]) if answer.to_measure else None,
    ]
    if model is not None:
        about = caption(_calibration_text(model.calibration))
        drawn = Plot(calibration_plot(model.calibration))
        sections.append(Section("Slowdowns: estimated and measured", (drawn, about)))
    return html.page(View(answer_text(answer, short_names(found)), sections, title=_TITLE))


def answer_text(answer: Answer, who: Callable[[Sequence[str]], str] = ", ".join) -> str:
    """Return the answer in a sentence; `who` names members of a lane."""
    match answer.said:
        case "unknown":
            return "Not enough was measured to plan"
        case "one after another":
            return "One after another is best: each request has the whole device"
        case "unfit":
            return "They do not fit" + (
                f"; at {percent_text(answer.times)} of these rates they would"
                if 0 < answer.times < 1
                else ""
            )
    assert answer.chosen is not None
    return f"A plan: {answer.chosen.placement.text(who)}"


def proof_text(proof: Proof) -> str:
    load = proof.benched.plan.load
    kept = "every member had what it was promised" if proof.is_kept else "a promise was not kept"
    missed = [each.expected.member for each in proof.members if each.is_kept is False]
    names = f": {', '.join(missed)}" if missed else ""
    said = [f"Proof, {load.duration:g} s of {load.kind} load at the mix's rates: {kept}{names}"]
    return "; ".join([*said, *lateness(proof.benched)])


def _sentences(found: PlannedMix) -> list[str]:
    """Return what is measured, estimated and assumed, and how it was searched."""
    answer = found.answer
    said = [_ALIKE] if has_alike(found) else []
    points = Counter(point.of for point in found.curves)
    if points:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(points.items()))
        said.append(f"Measured: {count_text(sum(points.values()), 'point')} of curves ({counts}).")
        known = [*found.curves, *found.pairs.measured]
        said.append(origins_text(point.origin for point in known))
    said += [f"{each}." for each in found.left_out]
    said += [f"The team's store: {note}." for note in found.notes]
    chosen = answer.chosen
    if chosen is not None:
        hows = Counter(each.slowdown.how for each in chosen.expected)
        if len(chosen.placement.lanes) > 1:
            by_how = "; ".join(
                f"{how} for {count_text(count, 'member')}" for how, count in sorted(hows.items())
            )
            said.append(
                f"Slowdown by neighbours: {by_how}. Several neighbours are taken to add up."
            )
            notes = {each.slowdown.note for each in chosen.expected if each.slowdown.note}
            said += [f"Assumed to be none where so said: {note}." for note in sorted(notes)]
        if chosen.placement.kind == "space" and chosen.placement.together > 1:
            said.append(_launches_text(chosen))
        if found.no_estimate and "assumed" in hows:
            said.append(f"No estimate: {found.no_estimate}.")
        said.append(_WAITING)
        said.append(_engine_text(chosen))
        if answer.is_fit and answer.times >= 1:
            said.append(
                f"It would hold {significant(answer.times, 2)} times these rates, by the same sums."
            )
        needed = sum(each.memory_bytes for each in chosen.expected)
        said.append(
            f"Memory: {significant(needed / (1 << 20))} MiB: weights and storage by the manifests, "
            "and what a process takes."
        )
        if found.mix.weights_gib is not None:
            said.append(_weights_text(found, chosen))
    tenants = any(len(names_of(entry)) > 1 for entry in found.mix.members)
    if tenants and all(point.together == 1 for point in found.curves):
        said.append(
            "Launches of several tenants were not considered: there is no point of one; "
            "`curves` takes them."
        )
    if found.pairs.model is not None:
        said.append(_calibration_text(found.pairs.model.calibration))
    if (searched := answer.searched) is not None and searched.best is not None:
        said.append(
            f"Search: the best in lanes is within {_gap_text(searched)}; greedy alone was "
            f"{percent_text(searched.greedy_gap)} above it."
        )
    if answer.beside is not None:
        said.append(
            f"Launches beside lanes: the best is within {_gap_text(answer.beside)}. A group in "
            "several slices beside a lane is not considered."
        )
    return said


def _gap_text(searched: Searched) -> str:
    how = "all placements" if searched.is_exact else "a bound, not all placements"
    return f"{percent_text(searched.gap)} of the least by {how}"


def _launches_text(forecast: Forecast) -> str:
    """Return which groups have launches in slices of their own, and which policy serves that."""
    lanes, said = forecast.placement.lanes, []
    for lane in (lane for lane in lanes if lane.together > 1):
        (first, *others) = lane.members
        several = f"{count_text(len(lane.members), 'model')} of one architecture"
        who = several if others else f"batches of {first}"
        said.append(f"{who} in the slice of {lane.share}%, up to {lane.together} in a launch")
    singles = sum(lane.together == 1 for lane in lanes)
    beside = f", beside {count_text(singles, 'lane')} of others" if singles else ""
    return (
        f"Launches: {'; '.join(said)}{beside}. To their neighbours all launches are taken to be "
        "full. The policy space-time serves this with `slices: lanes`."
    )


def _weights_text(found: PlannedMix, forecast: Forecast) -> str:
    """Return what the weights of groups have, and what cold starts are taken for."""
    of = f"Weights: {found.mix.weights_gib:g} GiB for those of groups"
    if not forecast.has_colds:
        all_fit = found.plan is not None and found.plan.weights_gib is None
        why = ", where all fit; the plan does not say `weights_gib`" if all_fit else ""
        return f"{of}{why}. No request waits for weights from the host."
    colds = [each.cold for each in forecast.expected if each.cold.part]
    takes = secs_text(max(cold.secs for cold in colds))
    how = f"is measured: {takes}"
    if not all(cold.is_measured for cold in colds):
        bandwidth = f"{BROUGHT_BYTES_PER_SEC / 1e9:g} GB/s"
        how = f"too: {takes}, by {bandwidth}, which was measured on an H200 and not here"
    return (
        f"{of}, the least recently used first to go: who is asked without them waits for them "
        "from the host. How many do is estimated (LRU by Che's approximation, 2002), and for how "
        f"long {how}."
    )


def _engine_text(forecast: Forecast) -> str:
    """Return what the engine itself takes of each member's times."""
    known = {
        each.point.of: f"{each.point.of} {secs_text(each.engine.p50_secs)}, in tails "
        f"{secs_text(each.engine.tail_secs)}"
        + (f" ({origin_text(each.engine.origin)})" if each.engine.origin else "")
        for each in forecast.expected
        if each.engine is not None
    }
    if not known:
        return "What the engine itself takes was not measured, and is taken for none."
    lanes = {each.engine.lanes for each in forecast.expected if each.engine is not None}
    how = "when all were served so" if any(lanes) else "one after another"
    return f"Of these times the engine's own, measured {how}: {'; '.join(known.values())}."


def _calibration_text(calibration: Calibration) -> str:
    return (
        f"Estimated slowdowns, each pair of models left out once: median error "
        f"{percent_text(calibration.median_error)} (always the median of the others: "
        f"{percent_text(calibration.median_error_of_constant)}), "
        f"{percent_text(calibration.coverage)} of "
        f"{count_text(len(calibration.checked), 'pair')} within the {LEVEL:.0%} interval."
    )


def _forecast_json(forecast: Forecast | None) -> dict[str, Any] | None:
    if forecast is None:
        return None
    return {
        "kind": forecast.placement.kind,
        "placement": forecast.placement.text(),
        "together": forecast.placement.together,
        "lanes": [to_json(lane) for lane in forecast.placement.lanes],
        "score": _number(forecast.score),
        "problems": list(forecast.problems),
        "expected": [_expected_json(each) for each in forecast.expected],
    }


def _expected_json(each: Expected) -> dict[str, Any]:
    return {
        "member": each.member,
        "share": each.share,
        "units": each.units,
        "together": each.point.together,
        "launch_secs": _number(each.secs),
        "p50_secs": _number(each.p50_secs),
        "tail_secs": _number(each.tail_secs),
        "part": each.part,
        "slo_secs": each.slo_secs,
        "rate": each.rate,
        "busy": each.busy,
        "lane_busy": each.lane_busy,
        "slowdown": to_json(each.slowdown),
        "memory_bytes": each.memory_bytes,
        "engine": None
        if each.engine is None
        else {
            "p50_secs": each.engine.p50_secs,
            "tail_secs": each.engine.tail_secs,
            "lanes": each.engine.lanes,
        },
        "cold": _cold_json(each.cold),
        "source": each.point.source,
    }


def _cold_json(cold: Cold) -> dict[str, Any] | None:
    """Return the part of the requests, always estimated, and what each takes; None without any."""
    if not cold.part:
        return None
    how = "measured" if cold.is_measured else "estimated"
    return {"part": cold.part, "secs": cold.secs, "secs_are": how}


def _gap_json(searched: Searched) -> dict[str, Any]:
    return {
        "is_exact": searched.is_exact,
        "bound": _number(searched.bound),
        "gap": _number(searched.gap),
    }


def _proven_json(each: Proven) -> dict[str, Any]:
    return {
        "member": each.expected.member,
        "asked": each.asked,
        "answered": each.answered,
        "per_sec": each.per_sec,
        "expected": {"p50_secs": each.expected.p50_secs, "tail_secs": each.expected.tail_secs},
        "measured": {"p50_secs": each.p50_secs, "tail_secs": each.tail_secs},
        "within": each.within,
        "is_kept": each.is_kept,
    }


def _number(value: float) -> float | None:
    """Return a number that JSON has; None for one that it has not."""
    return value if abs(value) < float("inf") else None
