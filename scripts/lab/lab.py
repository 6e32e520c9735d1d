"""What experiments share: who made a file and where, JSON, tables, and samples in a cell."""

from __future__ import annotations

import json
import lzma
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunerd.report.markdown_text import table
from tunerd.system import host
from tunerd.vocabulary import to_json

if TYPE_CHECKING:
    from tunerd.frontend.kernels import Selection
    from tunerd.settings import TuneSettings

__all__ = ["made_by", "load", "ratio", "search", "spread", "table", "write"]


def made_by(command: Sequence[str] | None = None) -> dict[str, Any]:
    """Return this process's command, or the one given, and the host, to stand beside samples."""
    shown = host.shown(sys.argv if command is None else command)
    return {"command": shown, "host": to_json(host.facts())}


def write(path: Path, document: Any, *, indent: int | None = 1) -> None:
    """Write JSON, and make the folder for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=indent) + "\n", encoding="utf-8")


def load(path: Path) -> Any:
    """Return a JSON document, unpacked where it is packed (.xz)."""
    content = path.read_bytes()
    return json.loads(lzma.decompress(content) if path.suffix == ".xz" else content)


def spread(values: Sequence[float], form: str = "{:.3g}") -> str:
    """Return the median, and the least and the most of several.

    >>> spread([2.0, 1.0, 4.0], "{:.1f}")
    '2.0 (1.0 to 4.0)'
    """
    shown = form.format(statistics.median(values))
    if len(values) > 1:
        shown += f" ({form.format(min(values))} to {form.format(max(values))})"
    return shown


def ratio(above: Sequence[float], below: Sequence[float], *, digits: int = 2) -> str:
    """Return the median of the rounds' ratios, and the middle 90% of them.

    >>> ratio([2.0, 4.0, 6.0], [1.0, 2.0, 2.0])
    '2.00 (2.00 to 3.00)'
    """
    ratios = sorted(a / b for a, b in zip(above, below, strict=True))
    cut = len(ratios) // 20
    low, high = ratios[cut], ratios[-1 - cut]
    return f"{statistics.median(ratios):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def search(settings: TuneSettings, selection: Selection | None = None) -> None:
    """Search in this process, which shows its progress."""
    from tunerd.runs.run import search as searched
    from tunerd.telemetry.progress import open_progress

    with open_progress() as progress:
        searched(settings, progress, *([] if selection is None else [selection]))
