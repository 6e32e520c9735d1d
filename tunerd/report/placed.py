"""What `tunerd colocate place` did, or would do: on the terminal, and as JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from tunerd.colocation.placement.placing import Foreseen, Placed
from tunerd.colocation.placement.values import Fail, Place
from tunerd.report.terminal import table
from tunerd.report.view import Grid
from tunerd.system.text import count_text, duration_text, significant
from tunerd.vocabulary import to_json

_TRIES = ("job", "device", "after", "took", "what came of it", "note")
_FORESEEN = ("job", "memory", "device", "after", "note")


def placed_table(placed: Placed) -> RenderableType:
    """Return a row for each try, and what failed for good."""
    rows = [
        [each.job, each.device, duration_text(each.start), duration_text(each.end - each.start),
         each.what, each.note]
        for each in placed.tries
    ]  # fmt: skip
    parts: list[RenderableType] = [table(Grid(_TRIES, rows))] if rows else []
    if placed.before:
        names = ", ".join(placed.before)
        parts.append(Text(f"ended before, and not run again: {names}"))
    parts += [Text(f"{job} failed: {why}", style="bold") for job, why in placed.failed.items()]
    return Group(*parts)


def placed_json(placed: Placed) -> dict[str, Any]:
    return {
        "tries": [to_json(each) for each in placed.tries],
        "failed": dict(placed.failed),
        "before": list(placed.before),
    }


def foreseen_table(found: Foreseen) -> RenderableType:
    """Return where each job would start if none came to its end."""
    memory = {job.name: _gib_text(job.memory_bytes) for job in found.jobs}
    rows: list[list[str]] = []
    for after, each in found.placed:
        where, why = (each.device, each.note) if isinstance(each, Place) else ("none", each.reason)
        rows.append([each.job, memory[each.job], where, duration_text(after), why])
    rows += [[n, memory[n], "waits", "", "until others have ended"] for n in found.waiting]
    devices = ", ".join(
        f"{device.name} ({_gib_text(device.memory_bytes)})" for device in found.devices
    )
    head = f"{count_text(len(found.devices), 'device')}: {devices}"
    return Group(Text(head), Text("If none came to its end:"), table(Grid(_FORESEEN, rows)))


def foreseen_json(found: Foreseen) -> dict[str, Any]:
    return {
        "devices": [to_json(device) for device in found.devices],
        "placed": [
            {"job": each.job, "after_secs": after}
            | (
                {"device": None, "reason": each.reason}
                if isinstance(each, Fail)
                else {"device": each.device, "note": each.note}
            )
            for after, each in found.placed
        ],
        "waiting": list(found.waiting),
        "memory_bytes": {job.name: job.memory_bytes for job in found.jobs},
    }


def _gib_text(size: int) -> str:
    return f"{significant(size / (1 << 30))} GiB"
