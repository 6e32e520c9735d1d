"""Points and pairs that were measured before, kept in the folder of the run that left an artifact.

`tunerd bench` and `tunerd profile` of an artifact, and every mix that it was in, add to its points.
They are of the very artifact, by the sha256 of its manifest, and of the device on which they were
measured. `tunerd bench --beside`, `tunerd colocate bench` and mixes add pairs to the folders of
both sides. These hold the features of both, so that they tell of other artifacts, too, and they
count on the device on which they were measured, with as many SMs or cores. An artifact that lies in
no run folder has neither.
"""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tunerd.artifacts.manifest import MANIFEST, sha256_of
from tunerd.colocation.planning.curves import Origin, Point, point_json, point_of
from tunerd.colocation.planning.pairs import PAIRS, Pair, pair_of
from tunerd.errors import InputError
from tunerd.records.paths import Paths
from tunerd.records.points import MachineKind
from tunerd.system import clock
from tunerd.system.jsonl import Journal

POINTS = "points.jsonl"


def keep(artifact: Path, device: str, points: Iterable[Point]) -> None:
    """Add points; where the run folder cannot be written they are measured again one day."""
    journal = _journal(artifact, POINTS)
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
    journal = _journal(artifact, POINTS)
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


def keep_pairs(artifacts: Iterable[Path], pairs: Iterable[Pair], on: MachineKind | str) -> None:
    """Add pairs to the run folder of each artifact that lies in one and may be written.

    on: the machine; where it cannot be told which kind that is, nothing is kept.
    """
    if isinstance(on, str):
        return
    facts = {"on": asdict(on), "host": platform.node(), "measured_at": clock.now()}
    lines = [json.dumps(asdict(pair) | facts) for pair in pairs]
    for artifact in dict.fromkeys(path.absolute() for path in artifacts):
        journal = _journal(artifact, PAIRS)
        if journal is None:
            continue
        with contextlib.suppress(OSError):
            for line in lines:
                journal.append(line)


def kept_pairs(artifacts: Iterable[Path], on: MachineKind | str) -> list[Pair]:
    """Return what was kept in the run folders of artifacts, each pair once and the latest last.

    on: the machine; none is of another device, or of one with more or fewer SMs or cores. Raises
    InputError where a line is no pair.
    """
    if isinstance(on, str):
        return []
    found: dict[bytes, tuple[float, Pair]] = {}
    for artifact in dict.fromkeys(path.absolute() for path in artifacts):
        journal = _journal(artifact, PAIRS)
        if journal is None:
            continue
        try:
            for text in journal.read().splitlines():
                line, pair = json.loads(text), pair_of(text)
                there = line["on"]["device"], line["on"]["unit_count"]
                if there == (on.device, on.unit_count):
                    origin = _origin(journal, line)
                    at = origin.measured_at or 0.0
                    found.setdefault(text, (at, replace(pair, origin=origin)))
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(
                f"{journal.path} holds a line that is no pair: {error}; remove it"
            ) from None
    return [pair for _, pair in sorted(found.values(), key=lambda each: each[0])]


def _origin(journal: Journal, line: Mapping[str, Any]) -> Origin:
    at = line.get("measured_at")  # older lines have neither
    return Origin(str(journal.path), str(line.get("host", "")), None if at is None else float(at))


def _journal(artifact: Path, name: str) -> Journal | None:
    run = artifact.absolute().parent
    if Paths(run).artifact != artifact.absolute() or not Paths(run).store.is_file():
        return None
    return Journal(run / name)
