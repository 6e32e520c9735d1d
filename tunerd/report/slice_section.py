"""What a run asked for and what it obtained, with the proof of each slice."""

from __future__ import annotations

from typing import Any

from tunerd.report.figures import limits_asked, obtained_texts, share_asked, unit
from tunerd.report.precision_text import precision_asked
from tunerd.report.run_view import RunView, SliceView
from tunerd.report.view import Cell, Grid, Pairs, Section, left_out
from tunerd.system.text import TIMES, UNKNOWN, count_text, duration_text, percent_text

_SHOWN_SLICES = 32


def slice_section(view: RunView) -> Section:
    """Return what the settings ask for beside what was obtained, and the slices' proofs."""
    title = "Asked and obtained"
    summary = Pairs(_asked_and_obtained(view))
    if not view.slices:
        return Section(title, [summary], "The run ended before its slices were planned.")
    unproved = sum(s.proof is None for s in view.slices)
    lead = "Each slice read inside its own process what it obtained, before it measured anything."
    if unproved == len(view.slices):
        lead = "No slice has proved its cap, so nothing was measured."
    elif unproved:
        lead += f" {count_text(unproved, 'slice')} proved nothing, and measured nothing."
    shown = view.slices[:_SHOWN_SLICES]
    heads = ("Slice", "Runs on", "Obtained", "Mechanism", "Proved", "Trials measured", "Driver")
    unproved_rows = [i for i, each in enumerate(shown) if each.proof is None]
    rows = [_slice_row(each, view) for each in shown]
    grid = Grid(heads, rows, class_="proofs", muted=unproved_rows)
    return Section(title, (summary, grid, left_out(len(view.slices) - len(shown), "slice")), lead)


def _asked_and_obtained(view: RunView) -> list[tuple[str, str]]:
    settings = view.settings
    by = f", by the last of {view.sessions} sessions" if view.sessions > 1 else ""
    rows = [
        ("Share asked", share_asked(settings)),
        ("Share obtained", "; ".join(obtained_texts(view)) or "none was proved"),
        ("Precision asked", precision_asked(settings)),
        ("Search asked", limits_asked(settings) + by),  # of the last session, whose are known
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


def _obtained_search(view: RunView) -> str:
    parts = [count_text(view.trials, "trial") + (f", {view.failed:,} failed" * bool(view.failed))]
    if view.tuning_secs is not None:
        parts.append(f"{duration_text(view.tuning_secs)} with all else")
    if view.sessions > 1:
        parts.append(f"in {view.sessions} sessions")
    if view.repeated:
        parts.append(f"{count_text(view.repeated, 'attempt')} repeated without blame")
    return ", ".join(parts)


def _slice_row(each: SliceView, view: RunView) -> tuple[str | Cell, ...]:
    proof, spec = each.proof, each.spec
    name, trials, where = Cell(each.slice_id, is_code=True), f"{each.trials:,}", ""
    if spec is not None and spec.gpu_uuid:
        where = spec.gpu_uuid
    elif spec is not None and spec.cores:
        word = "core" if len(spec.cores) == 1 else "cores"
        where = f"{word} {', '.join(map(str, spec.cores))}"
    if proof is None:
        return (name, Cell(UNKNOWN, where), UNKNOWN, UNKNOWN, "not proved", trials, UNKNOWN)
    whole = proof.device_sm_count
    part = f" ({percent_text(proof.sm_count / whole)})" if whole else ""
    again = f"{each.proofs}{TIMES}" if each.proofs > 1 else "once"
    return (
        name,
        Cell(proof.device or UNKNOWN, where),
        f"{proof.sm_count} of {whole} {unit(view)}{part}",
        proof.mechanism,
        again if proof.attached else f"{again}, not attached",
        trials,
        proof.driver or UNKNOWN,
    )
