#!/usr/bin/env python3
"""Time convolutions of 3x3 by Winograd's algorithm and with each product, in turns, on one core.

    scripts/lab/cpu/winograd.py --out FOLDER

The sizes are ResNet's. For each, the default schedule, which computes each product, and the cuts of
tiles of 2 x 2 and of 4 x 4 outputs that the estimate puts first. Filters come from memory: each
call has others, of 64 MiB in all. Writes winograd.json with all samples and the facts of the host,
and winograd.txt.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import made_by, ratio, table, write
from tunerd.builder.build import build_candidate
from tunerd.builder.library import load_tvm
from tunerd.candidates.registers.source import WINOGRAD, FmaSource, Recipe
from tunerd.candidates.registers.winograd import Winograd
from tunerd.slices import plan
from tunerd.testing.kernels import task_of
from tunerd.vocabulary import (
    FMA,
    Build,
    Candidate,
    SliceRequest,
    Task,
    default_candidate,
)

SIZES = ((56, 64), (28, 128), (14, 256), (7, 512))  # height and width, channels
ROUNDS, CALLS = 30, 3
FILTERS_BYTES = 64 << 20
DEFAULT = "each product"


def convolution(size: int, channels: int) -> Task:
    load_tvm()
    from tvm import te, topi

    data = te.placeholder((1, size, size, channels), name="data")
    weight = te.placeholder((3, 3, channels, channels), name="weight")
    bias = te.placeholder((channels,), name="bias")
    sums = topi.nn.conv2d_nhwc(data, weight, 1, 1, 1)
    tensors = [data, weight, bias, topi.nn.relu(topi.add(sums, bias))]
    target = plan(SliceRequest("cpu", 100)).target
    return replace(task_of(tensors, target), weight_args=(1, 2))


def builds(task: Task) -> dict[str, Build]:
    """Return the default, and of each size of tiles the cut that the estimate puts first."""
    templates = FmaSource().templates_of(task)
    if isinstance(templates, str):
        raise SystemExit(templates)
    of = templates[WINOGRAD]
    assert isinstance(of, Winograd)
    chosen = {DEFAULT: default_candidate(task)}
    for outputs in (2, 4):
        cuts = (cut for cut in of.tiles() if cut.outputs == outputs)
        recipe = Recipe(WINOGRAD, min(cuts, key=lambda cut: of.estimated_secs(cut, 0.0))).text
        chosen[f"F({outputs}, 3)"] = Candidate.of_recipe(task.task_id, recipe, source=FMA)
    made = {name: build_candidate(task, candidate) for name, candidate in chosen.items()}
    failed = [build for build in made.values() if not isinstance(build, Build)]
    if failed:
        raise SystemExit(str(failed[0]))
    return {name: build for name, build in made.items() if isinstance(build, Build)}


def call_of(build: Build, folder: Path) -> Callable[[], None]:
    """Return what calls a kernel with other filters each time."""
    tvm, random = load_tvm(), np.random.default_rng(0)
    path = folder / f"{build.candidate.candidate_id}.so"
    path.write_bytes(build.library)
    main = tvm.runtime.load_module(str(path))["main"]
    arrays = [random.standard_normal(spec.shape).astype(spec.dtype) for spec in build.args]
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    copies = max(2, FILTERS_BYTES // arrays[1].nbytes)
    filters = itertools.cycle([tvm.runtime.tensor(arrays[1]) for _ in range(copies)])
    return lambda: main(tensors[0], next(filters), *tensors[2:])


def samples(calls: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    """Return seconds of one call, of each kernel in turn."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            call()
            since = time.perf_counter()
            for _ in range(CALLS):
                call()
            found[name].append((time.perf_counter() - since) / CALLS)
    return found


def shown(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        secs = row["secs"]
        default = secs[DEFAULT]
        others = [ratio(default, secs[name]) for name in secs if name != DEFAULT]
        what = f"{row['size']}x{row['size']}, {row['channels']} channels"
        lines.append([what, f"{1e3 * statistics.median(default):.3f}", *others])
    heads = ("image", "each product, ms", "F(2, 3), times as fast", "F(4, 3), times as fast")
    return table(heads, lines, numbers=range(1, 4)) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
    rows = []
    for size, channels in SIZES:
        made = builds(convolution(size, channels))
        with tempfile.TemporaryDirectory() as folder:
            calls = {name: call_of(build, Path(folder)) for name, build in made.items()}
            cuts = {name: build.candidate.recipe for name, build in made.items()}
            rows.append({"size": size, "channels": channels, "cuts": cuts, "secs": samples(calls)})
    write(options.out / "winograd.json", {**made_by(), "rows": rows}, indent=None)
    (options.out / "winograd.txt").write_text(shown(rows))
    print(shown(rows), end="")


if __name__ == "__main__":
    main()
