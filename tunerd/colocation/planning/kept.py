"""Points of an artifact that were measured before, kept in the folder of the run that left it.

`tunerd bench` and `tunerd profile` of an artifact, and every mix that it was in, add to them. They
are of the very artifact, by the sha256 of its manifest, and of the device on which they were
measured. An artifact that lies in no run folder has none.
"""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunerd.artifacts.manifest import MANIFEST, sha256_of
from tunerd.colocation.planning.curves import Origin, Point, point_json, point_of
from tunerd.errors import InputError
from tunerd.records.paths import Paths
from tunerd.system import clock
from tunerd.system.jsonl import Journal

POINTS = "points.jsonl"


def keep(artifact: Path, device: str, points: Iterable[Point]) -> None:
    """Add points; where the run folder cannot be written they are measured again one day."""
    journal = _journal(artifact)
    if journal is None:
        return
    own = {
        "digest": sha256_of(artifact / MANIFEST),
        "device": device,
        "host": platform.node(),
        "measured_at": clock.now(),
    }
    with contextlib.suppress(OSError):
        for point in points:
            journal.append(json.dumps(own | point_json(point)))


def kept(artifact: Path, device: str, of: str) -> list[Point]:
    """Return what was kept of an artifact on a device, as of an entry of a mix.

    Of two of one kind the later comes last. Raises InputError where a line is none.
    """
    journal = _journal(artifact)
    if journal is None:
        return []
    own = sha256_of(artifact / MANIFEST), device
    try:
        lines = [json.loads(line) for line in journal.read().splitlines()]
        return [
            replace(point_of(line), of=of, origin=_origin(journal, line))
            for line in lines
            if (line.get("digest"), line.get("device")) == own
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(
            f"{journal.path} holds a line that is no point: {error}; remove it"
        ) from None


def _origin(journal: Journal, line: Mapping[str, Any]) -> Origin:
    at = line.get("measured_at")  # older lines have neither
    return Origin(str(journal.path), str(line.get("host", "")), None if at is None else float(at))


def _journal(artifact: Path) -> Journal | None:
    run = artifact.absolute().parent
    if Paths(run).artifact != artifact.absolute() or not Paths(run).store.is_file():
        return None
    return Journal(run / POINTS)
