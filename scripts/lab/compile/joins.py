#!/usr/bin/env python3
"""Time an artifact whose kernels write into what they are joined to, and one that has them joined.

    PYTHONPATH=.:scripts python3 -m lab.compile.joins RUN MODEL.onnx --out FOLDER

Compiles the winners of a run on CPUs twice, with concatenations left out and with a kernel for
each, as it was tuned where the run tuned it. Both are timed in turns on as many cores as the run
had, in this process; a turn takes the least of some calls of each, in an order that is turned round
each time. Their outputs must be equal in all bits. Writes joins.json.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from lab.colocation.figures import ratio, ratio_text
from lab.compile.of_run import of_run
from lab.lab import made_by, write

TURNS, CALLS = 60, 15


def compiled(run: Path, onnx: Path, folder: Path, *, joins: bool) -> dict[str, Any]:
    """Write the artifact; return how many kernels it has, and how many are tuned."""
    from tunerd.frontend.relax.joins import Joins, joins_of

    chosen = joins_of if joins else lambda *_: Joins({}, frozenset())
    with (
        mock.patch("tunerd.frontend.relax.joins.joins_of", chosen),
        mock.patch("tunerd.artifacts.scheduling.joins_of", chosen),
    ):
        of = of_run(run, onnx)
        of.compile(folder)
    tasks = of.kernels.tasks
    calls = sum(task.weight for task in tasks)
    return {"kernels": calls, "tasks": len(tasks), "tuned": len(of.winners)}


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("onnx", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    import tunerd
    from tunerd.artifacts.manifest import read_manifest
    from tunerd.system.arrays import random_inputs

    cores = max(read_manifest(options.run / "artifact")["share"]["sm_counts"])
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    options.out.mkdir(parents=True, exist_ok=True)
    ways = {"joined": False, "in place": True}
    found: dict[str, Any] = {}
    models = {}
    for name, joins in ways.items():
        folder = options.out / f"artifact-{name.replace(' ', '-')}"
        found[name] = compiled(options.run, options.onnx, folder, joins=joins)
        models[name] = tunerd.load(folder)
    inputs = random_inputs(models["joined"].inputs, 0)
    one, other = (model(inputs) for model in models.values())
    if not all(np.array_equal(one[name], other[name]) for name in one):
        raise SystemExit("the two artifacts give different outputs")
    secs: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(TURNS):
        for name in list(ways)[:: 1 if turn % 2 else -1]:
            least = float("inf")
            for _ in range(CALLS):
                since = time.perf_counter()
                models[name](inputs)
                least = min(least, time.perf_counter() - since)
            secs[name].append(least)
    faster = ratio(secs["joined"], secs["in place"])
    for name, each in found.items():
        each["median_secs"] = float(np.median(secs[name]))
        print(f"{name:10} {each['kernels']} kernels, {1e3 * each['median_secs']:.3f} ms")
    print(f"in place it is {ratio_text(faster)} times as fast on {cores} core(s)")
    document = {**made_by(), "cores": cores, "ways": found, "secs": secs}
    document["times_as_fast"] = [faster.value, faster.low, faster.high]
    write(options.out / "joins.json", document)


if __name__ == "__main__":
    main()
