#!/usr/bin/env python3
"""Time a search's start: until each of its steps, and until its first trial has ended.

    scripts/lab/start/first_trial.py MODEL.onnx --gpu-pct 40 --tree BEFORE --tree . --out first.json

Each repeat starts a search of a few trials in a fresh process by the tunerd of every checkout
(`--tree`), in turns; with `--without-bytecode` also where every process compiles its modules anew,
as it does where uv has installed them and their folder is read-only. Writes every time, and prints
medians and ranges, in seconds from the start of the process.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import made_by, search, spread, table, write
from tunerd.records import Store
from tunerd.settings import TuneSettings
from tunerd.system.text import UNKNOWN

# What a session logs; of the tuners the last.
STEPS = {
    "Ray is there": r"Ray is there",
    "slices have their shares": r"the slices have their shares",
    "model is lowered": r"the model is lowered",
    "tuners are ready": r"tuner-\S+ is ready",
}
FIRST, LAST = "first trial", "last trial"
TRIALS = 4


def search_inside(options: argparse.Namespace) -> None:
    """Be one search, in a process of its own."""
    from tunerd.system.logs import set_up

    set_up(verbose=False, as_json=False)
    settings = TuneSettings(
        model=options.model,
        out=options.out,
        gpu_pct=options.gpu_pct,
        cpu_pct=options.cpu_pct,
        slice_kind="cpu" if options.gpu_pct is None else "mps",
        trials=TRIALS,
    )
    search(settings)


def start_of(tree: Path, *, has_bytecode: bool = True) -> dict[str, float]:
    """Run a search by a tree's tunerd; return when its steps were done, in seconds."""
    path = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))
    changes = {"PYTHONPATH": path}
    with tempfile.TemporaryDirectory(prefix="first-trial-") as out:
        folder = Path(out) / "run"
        command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--inside"]
        if not has_bytecode:
            changes |= {"PYTHONPYCACHEPREFIX": str(Path(out, "none"))}
            changes |= {"PYTHONDONTWRITEBYTECODE": "1"}
        started_at = time.time()
        subprocess.run([*command, "--out", str(folder)], check=True, env=os.environ | changes)
        said = [json.loads(line) for line in (folder / "logs" / "tunerd.jsonl").open()]
        with Store.read(folder) as store:
            ends = [r.ended_at - started_at for r in store.records() if r.ended_at is not None]
            began_at = min(phase.start for phase in store.phases())
    steps = {FIRST: min(ends), LAST: max(ends)}
    for line in said:
        found = re.fullmatch(r"(.*) after ([0-9.]+) s", line["message"])
        for name, pattern in STEPS.items():
            if found and re.fullmatch(pattern, found[1]):
                steps[name] = float(found[2]) + began_at - started_at
    return steps


def shown(found: dict[str, list[dict[str, float]]]) -> str:
    columns = [*STEPS, FIRST, LAST]
    rows = []
    for name, starts in found.items():
        row = [name]
        for column in columns:
            secs = [start[column] for start in starts if column in start]
            row.append(spread(secs, "{:.1f}") if secs else UNKNOWN)
        rows.append(row)
    return table(["", *columns], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    shares = parser.add_mutually_exclusive_group(required=True)
    shares.add_argument("--cpu-pct", type=int)
    shares.add_argument("--gpu-pct", type=int)
    parser.add_argument("--tree", type=Path, action="append", required=True, dest="trees")
    parser.add_argument("--without-bytecode", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.model = options.model.resolve()
    if options.inside:
        search_inside(options)
        return
    trees = [tree.resolve() for tree in options.trees]
    ways = {tree.name: (tree, True) for tree in trees}
    if options.without_bytecode:
        ways |= {f"{tree.name}, without bytecode": (tree, False) for tree in trees}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    for _ in range(options.repeats):
        for name, (tree, has_bytecode) in ways.items():
            found[name].append(start_of(tree, has_bytecode=has_bytecode))
            document = {
                **made_by(),
                "starts": found,
            }
            write(options.out, document)
    print(shown(found))


if __name__ == "__main__":
    main()
