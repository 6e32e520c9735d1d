#!/usr/bin/env python3
"""Time the compilation of a model's CUDA kernels: in one source, and each by itself.

    scripts/lab/compile/whole_model.py MODEL.onnx --records records.parquet --out compile.json

The models have the default schedules and, with the records of a CUDA run, the fastest candidate of
each task. NVRTC has their sources in one thread and in as many as there are cores: the whole source
(in several threads with --split-compile) and kernel by kernel, in turns; whether these are the same
machine code is said. Then both models are compiled at once, as at the end of a run, with TVM's
lowering and the linking. Needs no GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.compile.cubins import machine_code
from lab.lab import made_by, write
from tunerd.artifacts import compile
from tunerd.artifacts.scheduling import Scheduled, schedule
from tunerd.builder import build, nvrtc
from tunerd.builder.cuda_source import kernel_sources
from tunerd.builder.nvrtc import compile_kernels
from tunerd.builder.objects import Objects
from tunerd.frontend.kernels import kernels_of
from tunerd.frontend.model import read_model
from tunerd.system import targets
from tunerd.vocabulary import METASCHEDULE, Candidate, TargetSpec

Compile = Callable[..., dict[str, nvrtc.Cubin]]
T = TypeVar("T")


def fastest(path: Path) -> dict[str, Candidate]:
    """Return the fastest measured candidate of each task, by task_id."""
    records = pd.read_parquet(path)
    records = records[(records.state == "measured") & (records.origin == "search")]
    best = records.loc[records.groupby("task_id").median_secs.idxmin()]
    return {
        task_id: Candidate(task_id, candidate_id, METASCHEDULE, trace)
        for task_id, candidate_id, trace in zip(
            best.task_id, best.candidate_id, best.trace_json, strict=True
        )
    }


def in_one(source: str, arch: str, *, threads: int = 1) -> dict[str, nvrtc.Cubin]:
    """Do what `cuda.compile_kernels` does, with all kernels in one source."""
    split = (f"--split-compile={threads}",) if threads > 1 else ()
    with mock.patch.object(nvrtc, "_OPTIONS", (*nvrtc._OPTIONS, *split)):
        code = nvrtc.run_nvrtc(source, arch, headers=nvrtc.STAND_INS)
    return dict.fromkeys(kernel_sources(source), nvrtc.Cubin(code, "nvrtc"))


def by_kernel(source: str, arch: str, *, threads: int = 1) -> dict[str, nvrtc.Cubin]:
    return compile_kernels(source, arch, threads=threads)


WAYS: dict[str, Compile] = {"in one source": in_one, "kernel by kernel": by_kernel}


def source_of(scheduled: Scheduled, target: TargetSpec) -> str:
    """Return the CUDA source of a whole model."""
    with mock.patch.object(nvrtc, "compile_kernels", mock.Mock(side_effect=in_one)) as seen:
        export(scheduled, target)
    (call,) = seen.call_args_list
    return str(call.args[0])


def export(scheduled: Scheduled, target: TargetSpec) -> None:
    with tempfile.TemporaryDirectory() as folder, Objects() as objects:
        compile._compile_library(scheduled, target, Path(folder, "model.so"), objects)


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Run in a process that has compiled nothing, as far as its memory of kernels goes."""
    nvrtc._cubins.clear()
    began = time.perf_counter()
    value = work()
    return time.perf_counter() - began, value


def compare(source: str, arch: str, most: int, repeats: int) -> dict[str, Any]:
    """Compile one source in each way with one thread and with `most`, in turns.

    Each way's kernels are compared with the first way's: all in one source, in one thread.
    """
    ways = {
        f"{way}, threads: {threads}": functools.partial(compile_, source, arch, threads=threads)
        for way, compile_ in WAYS.items()
        for threads in sorted({1, most})
    }
    secs: dict[str, list[float]] = {way: [] for way in ways}
    code: dict[str, dict[str, bytes]] = {}
    for _ in range(repeats):
        for way, work in ways.items():
            taken, cubins = timed(work)
            secs[way].append(taken)
            code[way] = {
                name: text
                for cubin in cubins.values()
                for name, text in machine_code(cubin.code).items()
            }
    first = next(iter(code.values()))
    return {
        "kernels": len(first),
        "source_chars": len(source),
        "secs": secs,
        "other_machine_code": {
            way: [name for name, text in first.items() if made.get(name) != text]
            for way, made in code.items()
        },
    }


def at_once(mods: Mapping[str, Scheduled], target: TargetSpec, repeats: int) -> dict[str, Any]:
    """Compile all models at once, as runs do, in each way in turns."""
    secs: dict[str, list[float]] = {}

    def work() -> None:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda mod: export(mod, target), mods.values()))

    for _ in range(repeats):
        for way, compile_ in WAYS.items():
            with mock.patch.object(nvrtc, "compile_kernels", compile_):
                taken, _none = timed(work)
            secs.setdefault(way, []).append(taken)
    return {"models": list(mods), "secs": secs}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--records", type=Path)
    parser.add_argument("--capability", default="9.0", help="of the GPU to compile for")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    target = targets.cuda_target(options.capability)
    if problem := build.build_problem(target):
        parser.exit(13, f"{problem}\n")
    arch = json.loads(target.json)["arch"]
    kernels = kernels_of(read_model(options.model), target)
    chosen = {"default": {}, **({"tuned": fastest(options.records)} if options.records else {})}
    mods = {
        name: schedule(kernels.lowered.mod, kernels.tasks, winners, target)
        for name, winners in chosen.items()
    }
    most = len(os.sched_getaffinity(0))
    rows = {}
    for name, mod in mods.items():
        rows[name] = row = compare(source_of(mod, target), arch, most, options.repeats)
        print(f"{name}: {row['kernels']} kernels")
        show(row["secs"])
        for way, names in row["other_machine_code"].items():
            if names:
                print(f"  {way}: other machine code for {len(names)}")
    together = at_once(mods, target, options.repeats)
    print(f"{' and '.join(mods)} at once, with lowering and linking")
    show(together["secs"])
    document = {
        **made_by(),
        "models": rows,
        "at_once": together,
    }
    write(options.out, document)
    return 0


def show(secs: Mapping[str, Sequence[float]]) -> None:
    for way, taken in secs.items():
        print(f"  {way}: {statistics.median(taken):.2f} s ({min(taken):.2f} to {max(taken):.2f})")


if __name__ == "__main__":
    sys.exit(main())
