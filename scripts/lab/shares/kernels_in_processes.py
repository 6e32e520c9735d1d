#!/usr/bin/env python3
"""Say how much kernels' times differ from one process to another, beyond what samples tell.

    scripts/lab/shares/kernels_in_processes.py results/h200-shares

In a matrix the finalists of its first level are measured twice at that share, quietly and in turns:
at the end of that level's own tuning, and in the contests, in another process. For each finalist,
over the one that was the fastest of its task the first time: by how much its ratio to that differs
the second time, beside what the noise of the samples explains (the standard error of four medians).
Whether a task's best kernel changes with the share is judged within one process at each share, and
a difference within 1% is none (tunerd/studies/matrix/changes.py). The second table says for how
many tasks it changes by more than twice what processes differ by near the fastest.

FOLDER has folders that `tunerd matrix` worked in, or what is left of them: done.jsonl.xz, and
finalists.json.xz, which this script writes where it finds the store of the first level.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import table
from tunerd.records import Store
from tunerd.studies.matrix.folder import MatrixFolder, read
from tunerd.studies.matrix.records import ContestDone, LevelDone
from tunerd.studies.matrix.result import changes_of
from tunerd.system.text import UNKNOWN
from tunerd.vocabulary import Measurement

NEAR = 1.25  # times the fastest
TITLES = ("matrix", "candidates", "differ by", "samples explain", "half of them within", "largest")
CHANGES = ("matrix", "tasks with a choice", "whose best changes", "by more than", "of these")
Times = dict[str, Sequence[float]]  # samples of a task's candidates, by id


@dataclass(frozen=True)
class Pair:
    """A candidate beside the fastest of its task, in two processes."""

    ratio: float  # to the fastest, the first time
    change: float  # of the logarithm of that ratio
    error: float  # the standard error of `change` by the samples


def pairs(first: Times, second: Times) -> Iterator[Pair]:
    known = sorted(first.keys() & second.keys())
    if not known:
        return
    fastest = min(known, key=lambda c: float(np.median(first[c])))
    for candidate in (c for c in known if c != fastest):
        once, again = (
            np.log(np.median(times[candidate]) / np.median(times[fastest]))
            for times in (first, second)
        )
        four = [times[c] for times in (first, second) for c in (candidate, fastest)]
        yield Pair(math.exp(once), again - once, math.hypot(*map(error_of_median, four)))


def error_of_median(samples: Sequence[float]) -> float:
    """Return the standard error of the median's logarithm where noise is normal."""
    logs = np.log(samples)
    return math.sqrt(math.pi / 2) * float(logs.std(ddof=1)) / math.sqrt(len(logs))


def pairs_of(matrix: Path, kept: MatrixFolder) -> list[Pair]:
    pct = next(kept.of(LevelDone)).pct
    finals: dict[str, Times]
    packed = matrix / "finalists.json.xz"
    if packed.exists():
        finals = json.loads(lzma.decompress(packed.read_bytes()))
    else:
        unit = json.loads((matrix / "matrix.json").read_bytes())["unit"]
        with Store.read(matrix / "levels" / f"{unit}{pct}") as store:
            finals = {
                outcome.task_id: {
                    f.candidate_id: f.measurement.run_secs
                    for f in outcome.finalists
                    if isinstance(f.measurement, Measurement)
                }
                for outcome in store.task_outcomes()
            }
        packed.write_bytes(lzma.compress(json.dumps(finals).encode()))
    contests = [c for c in kept.of(ContestDone) if c.run_at == pct]
    return [p for c in contests for p in pairs(finals.get(c.task_id, {}), dict(c.times))]


def row(name: str, found: Sequence[Pair]) -> Sequence[str]:
    if not found:
        return name, "0", *[UNKNOWN] * 4
    changes = np.array([abs(p.change) for p in found])
    errors = np.array([p.error for p in found])
    figures = (rms(changes), rms(errors), float(np.median(changes)), float(changes.max()))
    return name, str(len(found)), *(f"{100 * x:.2f}%" for x in figures)


def row_of_changes(name: str, kept: MatrixFolder, near: Sequence[Pair]) -> Sequence[str]:
    differ_by = rms(np.array([p.change for p in near]))
    contests = [c for c in changes_of(kept.of(ContestDone)) if c.candidates > 1]
    gains = [c.comparison.ratio_low for c in contests if c.comparison is not None]
    beyond = sum(gain > 1 + 2 * differ_by for gain in gains)
    return name, str(len(contests)), str(len(gains)), f"{200 * differ_by:.2f}%", str(beyond)


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    lines, changes = [], []
    finals = parser.parse_args().folder.glob("*/finalists.json.xz")
    stores = parser.parse_args().folder.glob("*/matrix.json")
    for matrix in sorted({path.parent for path in (*finals, *stores)}):
        kept = read(matrix)
        found = pairs_of(matrix, kept)
        near = [p for p in found if p.ratio < NEAR]
        lines.append(row(matrix.name, found))
        lines.append(row(f"{matrix.name}, within 25% of the fastest", near))
        if near:
            changes.append(row_of_changes(matrix.name, kept, near))
    print(table(TITLES, lines))
    print()
    print(table(CHANGES, changes))


if __name__ == "__main__":
    main()
