#!/usr/bin/env python3
"""Say by how much longer other artifacts take at a share than the one that was tuned there.

    scripts/lab/shares/worth_of_shares.py results/h200-claims-fp16
    scripts/lab/shares/worth_of_shares.py results/h200-shares --shares 10,40,100

Reads matrix-result.json, packed or not, of each folder below the given one, in order, and prints a
line for each share: the artifact tuned elsewhere that is the fastest there, and the slowest.
Intervals are those of the matrix (tunerd/studies/matrix/claims.py), each of one ratio; the fastest
and the slowest are chosen by the same samples.

--shares: as if the matrix had these alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import load, table
from tunerd.studies.matrix.claims import DEFAULT
from tunerd.system.text import secs_text

HEADS = ("", "run at", "tuned there", "the best tuned elsewhere", "", "the worst", "")

Cell = Mapping[str, Any]


def rows(path: Path, shares: Collection[int]) -> Iterator[Sequence[str]]:
    found = load(path)["findings"]
    of = {(c["tuned_at"], c["run_at"]): c for c in found["cells"]}
    at = [share for share in found["shares"] if share in shares or not shares]
    for run_at in at:
        others = [of[a, run_at] for a in at if a not in (run_at, DEFAULT)]
        others.sort(key=lambda cell: float(cell["secs"]))
        own = secs_text(of[run_at, run_at]["secs"])
        ends = [text for cell in (others[0], others[-1]) for text in texts(cell)]
        yield path.parent.name, f"{run_at}%", own, *ends


def texts(cell: Cell) -> tuple[str, str]:
    value, low, high = (100 * (cell["beside_own"][k] - 1) for k in ("value", "low", "high"))
    return f"tuned at {cell['tuned_at']}%", f"{value:.1f}% ({low:.1f} to {high:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shares", default="", help="percentages, separated by commas")
    options = parser.parse_args()
    shares = {int(share) for share in options.shares.split(",") if share}
    paths = sorted(options.folder.glob("*/matrix-result.json*"))
    if not paths:
        parser.error(f"{options.folder} has no folder with a matrix-result.json")
    print(table(HEADS, [row for path in paths for row in rows(path, shares)]))


if __name__ == "__main__":
    main()
