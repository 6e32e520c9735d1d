#!/usr/bin/env python3
"""Time each kernel of a CPU's artifact in the model and alone, and print a table.

    scripts/lab/cpu/time_in_model.py runs/encoder12/artifact

In the model: by hooks of TVM's virtual machine around each call. Alone: 100 calls in a row with the
arguments that the kernel has in the model, always the same, and with copies of its weights in
turns, together over twice the last-level cache. Medians, on one core of the artifact's.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import table
from tunerd.artifacts.loading import LoadedModel, load
from tunerd.runner.arguments import MAX_COPY_BYTES, copies_of
from tunerd.system import cores
from tunerd.system.arrays import timing_values

INFERENCES, CALLS = 6, 100
HEADS = ("kernel", "calls", "in the model", "alone", "alone, other weights each call")


class Watched:
    """What the calls of one kernel took in the model, and the arguments of one of them."""

    def __init__(self, function: Any, arguments: tuple[Any, ...], weights: set[int]) -> None:
        self.function = function
        self.is_weight = [a.data_ptr() in weights for a in arguments]
        self.arguments = [a.copyto(a.device) for a in arguments]
        self.secs: list[float] = []


def watch(model: LoadedModel) -> dict[str, Watched]:
    """Run inferences and note each call of a kernel."""
    inputs = {s.name: timing_values(s, seed=i) for i, s in enumerate(model.inputs)}
    model.timed_calls(inputs, 2)
    weights = {tensor.data_ptr() for tensor in model._weights}
    found: dict[str, Watched] = {}
    begun = 0.0

    def hook(function: Any, name: str, is_before: bool, _: Any, *arguments: Any) -> int:
        nonlocal begun
        if name.startswith("vm."):
            return 0
        if not is_before:
            ended = time.perf_counter()
            found[name].secs.append(ended - begun)
        elif name not in found:
            found[name] = Watched(function, arguments, weights)
        if is_before:
            begun = time.perf_counter()
        return 0

    model._machine.set_instrument(hook)
    arguments = (*model._placed((inputs,)), *model._weights)
    for _ in range(INFERENCES):
        model._main(*arguments)
    return found


def alone(watched: Watched, sets: Iterable[list[Any]]) -> float:
    in_turn = itertools.cycle(sets)

    def once() -> float:
        arguments = next(in_turn)
        begun = time.perf_counter()
        watched.function(*arguments)
        return time.perf_counter() - begun

    once()
    return statistics.median(once() for _ in range(CALLS))


def with_other_weights(watched: Watched, range_bytes: int) -> list[list[Any]]:
    def size(tensor: Any) -> int:
        return int(np.prod(tensor.shape)) * np.dtype(str(tensor.dtype)).itemsize

    pairs = list(zip(watched.arguments, watched.is_weight, strict=True))
    copies = copies_of(sum(size(a) for a, is_weight in pairs if is_weight), range_bytes)
    return [[a.copyto(a.device) if of else a for a, of in pairs] for _ in range(copies)]


def rows(found: dict[str, Watched], range_bytes: int) -> Iterable[tuple[str, ...]]:
    def text(secs: float) -> str:
        return f"{secs * 1e6:.0f} µs"

    total = [0.0, 0.0, 0.0]
    by_time = sorted(found.items(), key=lambda item: -sum(item[1].secs))
    for name, watched in by_time:
        calls = len(watched.secs) // INFERENCES
        times = (
            statistics.median(watched.secs),
            alone(watched, [watched.arguments]),
            alone(watched, with_other_weights(watched, range_bytes)),
        )
        total = [t + calls * secs for t, secs in zip(total, times, strict=True)]
        yield name, str(calls), *map(text, times)
    yield "all calls", "", *map(text, total)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path)
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    range_bytes = min(2 * (cores.last_level_cache_bytes() or 1 << 25), MAX_COPY_BYTES)
    print(table(HEADS, list(rows(watch(load(options.artifact)), range_bytes))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
