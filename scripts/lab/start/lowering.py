#!/usr/bin/env python3
"""Time a model's lowering, in the process of its own, until its tasks and its kernels are there.

    scripts/lab/start/lowering.py MODEL.onnx --tree BEFORE --tree . --out lowering.json

Each repeat starts a fresh process of the tunerd of every checkout (`--tree`), in turns, which reads
the model and has it lowered for a GPU; none is needed. Writes every time, and prints medians and
ranges, in seconds from the start of the process.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import made_by, spread, table, write
from tunerd.system import targets

STEPS = ("model is read", "tasks are there", "kernels are there")


def lowered_inside(options: argparse.Namespace) -> dict[str, float]:
    """Lower once, in a process of its own; an older tunerd has no process to start early."""
    from tunerd.frontend import process
    from tunerd.frontend.model import read_model

    arguments = {}
    if "lowerer" in inspect.signature(process.Lowering).parameters:
        arguments = {"lowerer": process.Lowerer()}
    model = read_model(options.model)
    at = [time.time()]
    lowering = process.Lowering(model, targets.cuda_target("9.0"), **arguments)
    getattr(lowering, "extracted", lowering.result)()
    at.append(time.time())
    lowering.result()
    at.append(time.time())
    lowering.close()
    return {step: secs - options.started_at for step, secs in zip(STEPS, at, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tree", type=Path, action="append", required=True, dest="trees")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--started-at", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.model = options.model.resolve()
    if options.started_at:
        print(json.dumps(lowered_inside(options)))
        return
    found: dict[str, list[dict[str, float]]] = {tree.resolve().name: [] for tree in options.trees}
    for _ in range(options.repeats):
        for tree in options.trees:
            path = os.pathsep.join(filter(None, (str(tree.resolve()), os.getenv("PYTHONPATH"))))
            command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]]
            done = subprocess.run(
                [*command, "--started-at", str(time.time())],
                env=os.environ | {"PYTHONPATH": path},
                stdout=subprocess.PIPE,
                check=True,
            )
            found[tree.resolve().name].append(json.loads(done.stdout))
    document = {**made_by(), "lowered": found}
    write(options.out, document)
    print(shown(found))


def shown(found: dict[str, list[dict[str, float]]]) -> str:
    rows = []
    for name, times in found.items():
        secs = [[each[step] for each in times] for step in STEPS]
        cells = [spread(s, "{:.2f}") for s in secs]
        rows.append([name, *cells])
    return table(["", *STEPS], rows)


if __name__ == "__main__":
    main()
