#!/usr/bin/env python3
"""Measure the trials a second of checkouts, several searches at once on cores of their own.

    scripts/lab/checkouts/at_once.py MODEL.onnx --tree BEFORE --tree . --rounds 8 --out FOLDER

Each search has two cores, `--cpu-pct 50` and a fixed seed. As many run at once as there are pairs
of cores, so that what disturbs the machine disturbs all, and each batch begins at other cores.
Writes at-once.json with every search, and at-once.txt with the median, the mean and the range.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import table, write


def begin(tree: Path, model: Path, trials: int, cores: str, out: Path) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))
    command = ["taskset", "-c", cores, sys.executable, "-m", "tunerd", "tune", str(model)]
    command += ["--cpu-pct", "50", "--trials", str(trials), "--seed", "0", "--out", str(out)]
    return subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def read(out: Path) -> dict[str, Any]:
    """Return how many trials ended, and how long the search took."""
    store = sqlite3.connect(out / "store.sqlite")
    ((ended,),) = store.execute("SELECT COUNT(*) FROM trials WHERE ended_at > 0")
    ((start, end),) = store.execute(
        'SELECT MIN("start"), MAX("end") FROM phases WHERE phase = ?', ["search"]
    )
    store.close()
    return {"trials": ended, "secs": end - start, "trials_per_sec": ended / (end - start)}


def shown(found: list[dict[str, Any]]) -> str:
    heads = ("checkout", "searches", "median", "mean", "least to most")
    lines = []
    for name in dict.fromkeys(each["checkout"] for each in found):
        rates = sorted(e["trials_per_sec"] for e in found if e["checkout"] == name)
        middle, mean = statistics.median(rates), statistics.mean(rates)
        span = f"{rates[0]:.2f} to {rates[-1]:.2f}"
        lines.append([name, str(len(rates)), f"{middle:.2f}", f"{mean:.2f}", span])
    return table(heads, lines, numbers=range(1, 5)) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tree", type=Path, action="append", required=True, dest="trees")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--trials", type=int, default=120)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    cores = sorted(os.sched_getaffinity(0))
    slots = len(cores) // 2
    trees = [tree.resolve() for tree in options.trees]
    labels = ["before", "now"] if len(trees) == 2 else [tree.name for tree in trees]
    names = dict(zip(labels, trees, strict=True))
    work = [(number, name) for number in range(options.rounds) for name in names]
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="at-once-") as scratch:
        for first in range(0, len(work), slots):
            running = []
            for i, (number, name) in enumerate(work[first : first + slots]):
                slot = (i + 3 * (first // slots)) % slots
                own = f"{cores[2 * slot]},{cores[2 * slot + 1]}"
                out = Path(scratch, f"{name}-{number}")
                child = begin(names[name], options.model.resolve(), options.trials, own, out)
                running.append((name, number, slot, out, child))
            for name, number, slot, out, child in running:
                child.wait()
                own_facts = {"checkout": name, "round": number, "slot": slot}
                found.append(own_facts | read(out))
    write(options.out / "at-once.json", found)
    (options.out / "at-once.txt").write_text(shown(found))
    print(shown(found), end="")


if __name__ == "__main__":
    main()
