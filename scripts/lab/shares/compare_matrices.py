#!/usr/bin/env python3
"""Ask two searches of the same matrices two of the claims, and print a table.

    scripts/lab/shares/compare_matrices.py FIRST SECOND
    scripts/lab/shares/compare_matrices.py FIRST SECOND --models models \
        --weights SECOND/weights.json

A search that has chosen its kernels and run no whole model can still be asked: what an artifact
takes is then the sum of its kernels' times in the contests, each times the calls of it, sample by
sample, at the share that it was tuned at and at all others. Definitions and intervals are those of
tunerd/studies/matrix/claims.py, with each sample as a round, which leaves out by how much one
process differs from another; whether each share's artifact is the best there cannot be asked so,
since kernels are chosen by these very times. A task that a later tunerd held no contest for, having
its default schedule alone, counts with the first search's time of that.

--models: lower these ONNX files, named as the matrices are, for an H200, and write how often each
task is called; that takes minutes, and no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import write
from tunerd.frontend.kernels import kernels_of
from tunerd.frontend.model import read_model
from tunerd.studies.matrix.claims import Claim, findings
from tunerd.studies.matrix.folder import MatrixFolder, read
from tunerd.studies.matrix.records import ContestDone, LevelDone
from tunerd.studies.matrix.result import result_from, whole_rounds
from tunerd.system.text import ratio_texts
from tunerd.vocabulary import TargetSpec

HEADS: tuple[str, ...] = ("claim", "whole models, first search", "kernels, first search")
HEADS += ("kernels, second search", "whole models, second search")
CLAIMS = {"cut": "tuned at full, poor when cut", "middle": "tuned at the middle, robust"}
H200 = json.loads((Path(__file__).parents[1] / "data" / "h200_target.json").read_text())

Samples = npt.NDArray[np.float64]
Contests = dict[str, dict[int, tuple[str, dict[str, Samples]]]]  # task, share: winner, times


def contests_of(kept: MatrixFolder) -> Contests:
    found: Contests = {}
    for line in kept.of(ContestDone):
        times = {c: np.array(secs) for c, secs in line.times.items()}
        found.setdefault(line.task_id, {})[line.run_at] = (line.winner, times)
    return found


def with_defaults(contests: Contests, kept: MatrixFolder) -> Contests:
    """Return the contests, and of tasks without one their default's times in another matrix."""
    defaults = {line.task_id: line.default for line in kept.of(ContestDone)}
    missing = {
        task_id: {
            share: (defaults[task_id], {defaults[task_id]: times[defaults[task_id]]})
            for share, (_, times) in at.items()
        }
        for task_id, at in contests_of(kept).items()
        if task_id not in contests
    }
    return contests | missing


def claims_of(contests: Contests, weights: Mapping[str, int]) -> dict[str, Claim]:
    """Return the claims by the sums of kernels."""
    shares = sorted({share for at in contests.values() for share in at})
    sums = {}
    for tuned_at in shares:
        for run_at in shares:
            times = [
                weights[task_id] * at[run_at][1][at[tuned_at][0]]
                for task_id, at in contests.items()
            ]
            length = min(map(len, times))  # what is far slower than its rivals has fewer
            sums[tuned_at, run_at] = np.sum([t[:length] for t in times], axis=0)
    least = min(map(len, sums.values()))
    rounds = {cell: [[x] for x in of[:least]] for cell, of in sums.items()}
    return {claim.name: claim for claim in findings(rounds).claims}


def whole_models(folder: Path, kept: MatrixFolder) -> dict[str, Claim]:
    """Return the claims by whole models; none where no round is whole."""
    shares = sorted({line.pct for line in kept.of(LevelDone)})
    asked = {"shares": shares, "model": {"name": folder.name}, "unit": "gpu"}
    if not whole_rounds(kept, set(shares)):
        return {}
    return {c.name: c for c in result_from(kept, {}, asked).findings.claims}


def said(claim: Claim | None) -> str:
    if claim is None or claim.ratio is None:
        return "not run"
    value, interval = ratio_texts(claim.ratio)
    return f"{claim.answer}: {value} ({interval})"


def rows(first: Path, second: Path, weights: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    for folder in sorted(path.parent for path in second.glob("*/done.jsonl.xz")):
        name = folder.name
        one, two = read(first / name), read(folder)
        answers = (
            whole_models(first / name, one),
            claims_of(contests_of(one), weights[name]),
            claims_of(with_defaults(contests_of(two), one), weights[name]),
            whole_models(folder, two),
        )
        for claim, text in CLAIMS.items():
            yield " | ".join((f"| {name}", text, *(said(of.get(claim)) for of in answers))) + " |"


def weights_of(models: Path, names: list[str]) -> dict[str, dict[str, int]]:
    """Return how often each task is called, by matrix: MODEL-batchN."""
    target, found = TargetSpec("cuda", json.dumps(H200)), {}
    for name in names:
        model, _, batch = name.rpartition("-batch")
        fixed = read_model(models / f"{model}.onnx", batch=int(batch))
        found[name] = {task.task_id: task.weight for task in kernels_of(fixed, target).tasks}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--weights", type=Path, help="calls of each task; SECOND/weights.json")
    parser.add_argument("--models", type=Path, help="a folder of ONNX files, to write these from")
    options = parser.parse_args()
    path = options.weights or options.second / "weights.json"
    if options.models is not None:
        names = sorted(p.parent.name for p in options.second.glob("*/done.jsonl.xz"))
        write(path, weights_of(options.models, names))
    print(f"| matrix | {' | '.join(HEADS)} |\n|{'---|' * (len(HEADS) + 1)}")
    print("\n".join(rows(options.first, options.second, json.loads(path.read_text()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
