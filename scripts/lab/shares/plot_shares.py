#!/usr/bin/env python3
"""Draw what matrices have measured, and say what they cost.

    scripts/lab/shares/plot_shares.py results/h200-shares --out shares.svg

Reads matrix-result.json and done.jsonl, packed or not, of each folder below the given one, in
order, and prints tables of the paper's three claims and of what tuning at all shares cost over one
level; without --out the latter alone. `Costs` in tunerd/studies/matrix/result.py says what counts.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import load, table
from tunerd.report.heat_plot import HeatMap, heat_svg
from tunerd.report.matrix_text import times_text
from tunerd.studies.matrix.changes import Change
from tunerd.studies.matrix.folder import read
from tunerd.studies.matrix.records import ContestDone
from tunerd.studies.matrix.result import Times, changes_of, costs_of
from tunerd.system.text import ratio_texts
from tunerd.vocabulary.verdict import Interval, Verdict

CLAIMS = (
    "",
    "best at its own share",
    "tuned at full, poor when cut",
    "tuned at the middle, robust",
    "tasks whose best changes",
)
COSTS = ("core time", "time on slices", "wall")


def heat_map(path: Path) -> HeatMap:
    found = load(path)
    cells = {
        (c["tuned_at"], c["run_at"]): (c["secs"], c["loss"]["value"])
        for c in found["findings"]["cells"]
    }
    return HeatMap(path.parent.name, cells)


def claims_row(path: Path) -> Sequence[str]:
    found = load(path)
    cells = [path.parent.name]
    for claim in found["findings"]["claims"]:
        ratio = claim["ratio"]
        value, interval = ratio_texts(Interval(**ratio))
        cells.append(f"{claim['answer']}: {value} ({interval})")
    chosen = [c for c in changes(path.parent) if c.candidates != 1]
    counts = Counter(c.answer for c in chosen)
    unsure = f", {n} cannot be told" if (n := counts[Verdict.CANNOT_TELL]) else ""
    cells.append(f"{counts[Verdict.YES]} of {len(chosen)}{unsure}")
    return cells


def changes(folder: Path) -> tuple[Change, ...]:
    """Return whether each task's best kernel changes with the share, by the samples."""
    return changes_of(read(folder).of(ContestDone))


def costs_row(name: str, over: Mapping[str, Times]) -> Sequence[str]:
    return name, *(times_text(over[what]) for what in ("cpu", "slice", "wall"))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--title", default="Tuned at one share, run at another")
    parser.add_argument("--out", type=Path, help="the picture")
    options = parser.parse_args()
    folders = sorted({p.parent for p in options.folder.glob("*/done.jsonl*")})
    if not folders:
        parser.error(f"{options.folder} has no folder with a done.jsonl")
    if options.out is not None:
        paths = [next(folder.glob("matrix-result.json*")) for folder in folders]
        options.out.write_text(heat_svg(options.title, [heat_map(p) for p in paths]))
        print(table(CLAIMS, map(claims_row, paths)), end="\n\n")
    costs = {folder.name: costs_of(read(folder)) for folder in folders}
    kernels = (costs_row(name, of.kernels_over_one) for name, of in costs.items())
    print(table(("search and finalists, over one level", *COSTS), kernels), end="\n\n")
    artifacts = (costs_row(name, of.artifacts_over_one) for name, of in costs.items())
    print(table(("with the artifacts, over one level", *COSTS), artifacts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
