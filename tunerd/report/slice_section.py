"""The section of the page about what was asked for, and what each slice proved that it obtained."""

from __future__ import annotations

from typing import Any

from tunerd.report.components import left_out, pairs, row, section, table
from tunerd.report.figures import limits_asked, share_asked
from tunerd.report.markup import Child, Markup, element
from tunerd.report.run_view import RunView, SliceView
from tunerd.system.text import TIMES, UNKNOWN, count_text, duration_text, percent_text
from tunerd.vocabulary import unit_name

SHOWN_SLICES = 32
_HEADS = ("Slice", "Runs on", "Obtained", "Mechanism", "Proved", "Trials measured", "Driver")


def slice_section(view: RunView) -> Markup:
    """Return what the settings ask for beside what was obtained, and the slices' proofs."""
    title = "Asked and obtained"
    summary = pairs(_asked_and_obtained(view))
    if not view.slices:
        return section(title, summary, lead="The run ended before its slices were planned.")
    unproved = sum(s.proof is None for s in view.slices)
    lead = "Each slice read inside its own process what it obtained, before it measured anything."
    if unproved == len(view.slices):
        lead = "No slice has proved its cap, so nothing was measured."
    elif unproved:
        lead += f" {count_text(unproved, 'slice')} proved nothing, and measured nothing."
    rows = [
        row(_HEADS, _cells(each, view), class_=None if each.proof else "stays")
        for each in view.slices[:SHOWN_SLICES]
    ]
    more = left_out(len(view.slices) - SHOWN_SLICES, "slice")
    return section(title, summary, table(_HEADS, rows, "proofs"), more, lead=lead)


def _asked_and_obtained(view: RunView) -> list[tuple[str, Child]]:
    settings: dict[str, Any] = view.settings
    rows: list[tuple[str, Child]] = [
        ("Share asked", share_asked(settings)),
        ("Share obtained", "; ".join(obtained_texts(view)) or "none was proved"),
        ("Search asked", _asked_search(view)),
        ("Search obtained", _obtained_search(view)),
    ]
    given = [
        *(f"{name} {list(sizes)}" for name, sizes in _items(settings.get("shapes"))),
        *(f"{name} = {size}" for name, size in _items(settings.get("dims"))),
        *([f"batch {settings['batch']}"] if settings.get("batch") else []),
    ]
    if given:
        rows.append(("Shapes asked", ", ".join(given)))
    if settings.get("warm_start"):
        rows.append(("Started from", ", ".join(map(str, settings["warm_start"]))))
    return rows


def _items(value: object) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _asked_search(view: RunView) -> str:
    """Return the limits of the last session, whose settings are the ones that are known."""
    by = f", by the last of {view.sessions} sessions" if view.sessions > 1 else ""
    return limits_asked(view.settings) + by


def _obtained_search(view: RunView) -> str:
    parts = [count_text(view.trials, "trial") + (f", {view.failed:,} failed" * bool(view.failed))]
    if view.tuning_secs is not None:
        parts.append(f"{duration_text(view.tuning_secs)} with all else")
    if view.sessions > 1:
        parts.append(f"in {view.sessions} sessions")
    if view.repeated:
        parts.append(f"{count_text(view.repeated, 'attempt')} repeated without blame")
    return ", ".join(parts)


def unit(view: RunView) -> str:
    return unit_name(view.facts.target.kind)


def obtained_texts(view: RunView) -> list[str]:
    """Return `52 of 132 SMs, NVIDIA H200` for each distinct share and device obtained."""
    return sorted(
        {f"{p.sm_count} of {p.device_sm_count} {unit(view)}, {p.device}" for p in view.proofs}
    )


def _cells(each: SliceView, view: RunView) -> tuple[Child, ...]:
    proof = each.proof
    name = element("code", each.slice_id)
    trials = f"{each.trials:,}"
    if proof is None:
        return (name, _place(each, ""), UNKNOWN, UNKNOWN, "not proved", trials, UNKNOWN)
    whole = proof.device_sm_count
    part = f" ({percent_text(proof.sm_count / whole)})" if whole else ""
    again = f"{each.proofs}{TIMES}" if each.proofs > 1 else "once"
    return (
        name,
        _place(each, proof.device),
        f"{proof.sm_count} of {whole} {unit(view)}{part}",
        proof.mechanism,
        again if proof.attached else f"{again}, not attached",
        trials,
        proof.driver or UNKNOWN,
    )


def _place(each: SliceView, device: str) -> Markup:
    spec = each.spec
    where = None
    if spec is not None and spec.gpu_uuid:
        where = element("small", spec.gpu_uuid)
    elif spec is not None and spec.cores:
        word = "core" if len(spec.cores) == 1 else "cores"
        where = element("small", f"{word} {', '.join(map(str, spec.cores))}")
    return element("div", element("bdi", device or UNKNOWN), where)
