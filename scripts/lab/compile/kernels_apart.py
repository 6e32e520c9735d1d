#!/usr/bin/env python3
"""Time the compilation of a model for CPUs: in one module, and each kernel by itself in threads.

    PYTHONPATH=.:scripts python3 -m lab.compile.kernels_apart RUN MODEL.onnx --out FOLDER

Compiles what a run ends with, the model with its winners and the one with default schedules, at
once, in both ways in turns. The tuned models must give outputs that are equal in all bits; they are
timed in turns, too, on as many cores as the run had. Writes NAME.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from lab.colocation.figures import ratio, ratio_text
from lab.compile.of_run import OfRun, of_run
from lab.lab import made_by, spread, write

TURNS, CALLS = 30, 10
IN_ONE, APART = "in one module", "each by itself"


def compiled(run: OfRun, way: str, folder: Path) -> tuple[float, float]:
    """Compile both models as a run does; return the seconds, and those of all cores."""
    from tunerd.artifacts import compile as module
    from tunerd.builder.objects import Objects

    usual = module._first_kernel_alone
    cut = usual if way == APART else lambda mod: (mod, [])
    since, cpu_since = time.monotonic(), time.process_time()
    with (
        mock.patch.object(module, "_first_kernel_alone", cut),
        ThreadPoolExecutor() as pool,
        Objects() as objects,
    ):
        other = pool.submit(run.compile, folder / f"{way} default", tuned=False, objects=objects)
        run.compile(folder / way, objects=objects)
        other.result()
    return time.monotonic() - since, time.process_time() - cpu_since


def medians(took: dict[str, list[tuple[float, float]]]) -> dict[str, dict[str, float]]:
    """Return of each way the seconds that a compilation took, and those of all cores."""
    return {
        way: {
            "secs": statistics.median(wall for wall, _ in each),
            "cpu_secs": statistics.median(cpu for _, cpu in each),
        }
        for way, each in took.items()
    }


def in_turns(models: dict[str, Any], inputs: Any) -> dict[str, list[float]]:
    secs: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(TURNS):
        for name in list(models)[:: 1 if turn % 2 else -1]:
            models[name].timed_calls(inputs, 1)
            secs[name].append(models[name].timed_calls(inputs, CALLS) / CALLS)
    return secs


def main(argv: Sequence[str] | None = None) -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("onnx", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    import tunerd
    from tunerd.system.arrays import random_inputs

    document = made_by()  # before this process has fewer cores
    run = of_run(options.run, options.onnx)
    cores = sorted(os.sched_getaffinity(0))
    folder = options.out / f"{options.onnx.stem}-artifacts"
    folder.mkdir(parents=True, exist_ok=True)
    took: dict[str, list[tuple[float, float]]] = {IN_ONE: [], APART: []}
    for _ in range(options.repeats):
        for way, each in took.items():
            each.append(compiled(run, way, folder))
    models = {way: tunerd.load(folder / way) for way in took}
    os.sched_setaffinity(0, cores[: max(p.sm_count for p in run.proofs)])
    inputs = random_inputs(models[APART].inputs, 0)
    one, other = (model(inputs) for model in models.values())
    if not all(np.array_equal(one[name], other[name]) for name in one):
        raise SystemExit("the two artifacts give different outputs")
    secs = in_turns(models, inputs)
    faster = ratio(secs[IN_ONE], secs[APART])
    for way, each in took.items():
        print(
            f"{way:15} {spread([wall for wall, _ in each], '{:.1f}')} s of {len(cores)} core(s), "
            f"{spread([cpu for _, cpu in each], '{:.1f}')} s of CPU time, "
            f"{1e3 * statistics.median(secs[way]):.2f} ms an inference"
        )
    print(f"compiled by itself each, the model is {ratio_text(faster)} times as fast")
    document |= {"cores": len(cores), "took_secs": took, "secs": secs}
    document |= {"tasks": len(run.kernels.tasks), "tuned": len(run.winners)}
    document["medians"] = medians(took)
    document["times_as_fast"] = [faster.value, faster.low, faster.high]
    write(options.out / f"{options.onnx.stem}.json", document, indent=None)


if __name__ == "__main__":
    main()
