#!/usr/bin/env python3
"""Compare what models take with the sums of their kernels.

    scripts/lab/shares/kernels_in_models.py results/h200-shares

For each matrix in a folder, and each artifact and share: what the model took in the rounds, less
the sum of its kernels' times in the contests, each times the calls of it (weights.json). A contest
calls one kernel again and again; in a model each call finds in the caches what others have left.
`trace_model` tells what becomes of each kernel. The second table has the share where artifacts
differ most in how much longer than its kernels in sum a model takes, and by how much, as a part of
that sum. Kernels that had no contest, as most of DenseNet's, are in the models alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import table
from tunerd.studies.matrix.folder import read
from tunerd.studies.matrix.records import CellDone, ContestDone

TITLES = ("matrix", "share", "tuned at", "kernels in sum", "model", "more")
SPREADS = ("matrix", "share", "its artifacts differ by")

Weights = Mapping[str, int]  # calls of a kernel in a model, by task


@dataclass(frozen=True)
class Sum:
    """What an artifact takes at a share, as a model and by its kernels."""

    run_at: int
    tuned_at: int
    kernel_secs: float
    model_secs: float

    @property
    def longer(self) -> float:
        return self.model_secs / self.kernel_secs - 1


def sums_of(folder: Path, weights: Weights) -> Iterator[Sum]:
    """Yield those of a matrix by share and artifact; of its kernels those that had a contest."""
    kept = read(folder)
    contests = {(line.task_id, line.run_at): line for line in kept.of(ContestDone)}
    samples: dict[tuple[int, int], list[float]] = {}
    for line in kept.of(CellDone):
        for result in line.results:
            samples.setdefault((line.run_at, result.tuned_at), []).extend(result.run_secs)
    shares = sorted({run_at for _, run_at in contests})
    tasks = sorted({task_id for task_id, _ in contests})
    for run_at in shares:
        for tuned_at in shares:
            winners = {t: contests[t, tuned_at].winner for t in tasks}
            kernels = sum(weights[t] * median(contests[t, run_at].times[winners[t]]) for t in tasks)
            yield Sum(run_at, tuned_at, kernels, median(samples[run_at, tuned_at]))


def row(name: str, of: Sum) -> Sequence[str]:
    secs = (of.kernel_secs, of.model_secs, of.model_secs - of.kernel_secs)
    return name, f"{of.run_at}%", f"{of.tuned_at}%", *(f"{x * 1e6:.0f} µs" for x in secs)


def row_of_spread(name: str, sums: Sequence[Sum]) -> Sequence[str]:
    longer: dict[int, list[float]] = {}
    for each in sums:
        longer.setdefault(each.run_at, []).append(each.longer)
    spread, share = max((max(of) - min(of), share) for share, of in longer.items())
    return name, f"{share}%", f"{100 * spread:.1f}%"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    weights = json.loads((options.folder / "weights.json").read_text())
    matrices = sorted(path.parent for path in options.folder.glob("*/done.jsonl.xz"))
    sums = {m.name: list(sums_of(m, weights[m.name])) for m in matrices}
    print(table(TITLES, (row(name, each) for name, of in sums.items() for each in of)))
    print()
    print(table(SPREADS, (row_of_spread(name, of) for name, of in sums.items())))


if __name__ == "__main__":
    main()
