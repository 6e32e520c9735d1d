#!/usr/bin/env python3
"""Find out what kernels on a GPU find cold in a model, and whether to choose them by that.

    tunerd tune MODEL.onnx --gpu-pct 100 --out FOLDER
    scripts/lab/shares/cold_code.py MODEL.onnx --run FOLDER --out cold.json

A kernel that is called again and again finds in the caches what it does not find in a model, where
it comes after others. Takes the default and the best candidates of each task of a run, and measures
each on the whole GPU in turns with the others of its task, in several ways:

    warm, model, cold   with weights as `tunerd tune --l2` measures them
    code                as model, and with code from the next of several copies, together over twice
                        the 128 KiB that an SM of Volta caches (Jia et al., arXiv 1804.06826; of
                        later ones nothing is known here)

Then compiles the model with the winners of each way, and times these models in turns. A ratio above
1 means that choosing in this way makes a faster model than choosing as in a model.

Run it with the GPU to itself: there is no slice, and no MPS.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.compile.cubins import code_bytes
from lab.lab import made_by, write
from tunerd.artifacts.compile import compile_artifact
from tunerd.artifacts.loading import load
from tunerd.builder.build import build_candidate, preload
from tunerd.cluster.layout import local_layout
from tunerd.frontend.kernels import kernels_of
from tunerd.records import Store
from tunerd.runner.cuda_device import CudaDevice
from tunerd.runner.profiles import within
from tunerd.runner.sampling import Timed, TimedModel, interleaved
from tunerd.runs import plan
from tunerd.settings import TuneSettings
from tunerd.stats.paired import compare
from tunerd.studies.matrix.profiles import contest_profile
from tunerd.vocabulary import (
    Build,
    Candidate,
    Measurement,
    Profile,
    Record,
    Task,
    default_candidate,
    to_json,
)

CACHED_BYTES = 128 << 10
MAX_COPIES = 64
WAYS = ("warm", "model", "cold", "code")
USUAL = "model"
MODELS = Profile(
    "models-v1", min_samples=40, max_samples=40, min_sample_secs=0.02, max_total_secs=60.0
)


class ColdDevice(CudaDevice):
    """Calls the next of several copies of a library each time."""

    copies = 1  # of the next kernel's library

    def prepare_in(self, way: str, build: Build, path: Path, profile: Profile) -> Timed:
        self.copies = copies_of(code_bytes(build.library)) if way == "code" else 1
        weights = USUAL if way == "code" else way
        return self.prepare(build, path, replace(profile, weights=weights))

    def _kernel(self, path: Path) -> Any:
        paths = [path.with_name(f"{i}-{path.name}") for i in range(self.copies)]
        for each in paths:
            shutil.copyfile(path, each)
        kernels = [super(ColdDevice, self)._kernel(each) for each in paths]
        turns = itertools.chain([kernels], ([kernel] for kernel in itertools.cycle(kernels)))

        def call(*arguments: Any) -> None:
            for kernel in next(turns):  # at first all: what is loaded later is loaded in a capture
                kernel(*arguments)

        return call


def copies_of(size: int) -> int:
    """Return how many copies of code are together over twice the caches."""
    return min(MAX_COPIES, math.ceil(2 * CACHED_BYTES / max(size, 1)) + 1)


@dataclass(frozen=True)
class Sampled:
    """A candidate of a task, and its samples in seconds by the way of measuring."""

    candidate: Candidate
    bytes: int  # of its machine code
    secs: Mapping[str, Sequence[float]]

    def median(self, way: str) -> float:
        return median(self.secs[way])


def chosen(records: Sequence[Record], task: Task, each: int) -> list[Candidate]:
    """Return the default of a task and its best candidates by the search."""
    measured = [
        (r.result.median_secs, r.candidate)
        for r in records
        if r.candidate.task_id == task.task_id
        and not r.candidate.is_default
        and isinstance(r.result, Measurement)
    ]
    best = [c for _, c in sorted(measured, key=lambda m: m[0])[:each]]
    return [default_candidate(task), *best]


def built(task: Task, candidates: Sequence[Candidate]) -> list[Any]:
    preload(task.target)
    return [build_candidate(task, candidate) for candidate in candidates]


def sampled(device: ColdDevice, builds: Sequence[Build], model_bytes: int) -> Iterator[Sampled]:
    """Measure the builds of a task in every way, all in turns."""
    profile = within(contest_profile(USUAL), model_bytes)
    with tempfile.TemporaryDirectory(prefix="cold-") as folder:
        ready: list[Timed] = []
        for number, build in enumerate(builds):
            for way in WAYS:
                path = Path(folder, f"{number}-{way}", "kernel.so")
                path.parent.mkdir()
                path.write_bytes(build.library)
                ready.append(device.prepare_in(way, build, path, profile))
        results = iter(interleaved(device, ready, profile=profile, goes_on=lambda: None))
    for build in builds:
        taken = dict(zip(WAYS, results, strict=False))
        secs = {way: of[1] for way, of in taken.items() if isinstance(of, tuple)}
        if len(secs) == len(WAYS):
            yield Sampled(build.candidate, code_bytes(build.library), secs)


def models_in_turns(folders: Sequence[Path], device: ColdDevice) -> list[list[float]]:
    """Return the samples of artifacts, in seconds of an inference."""
    ready = [TimedModel(load(folder), MODELS) for folder in folders]
    results = interleaved(device, ready, profile=MODELS, goes_on=lambda: None)
    assert all(isinstance(of, tuple) for of in results), results
    return [of[1] for of in results if isinstance(of, tuple)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--each", type=int, default=6, help="best candidates of each task")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    settings = TuneSettings(
        model=options.model,
        out=options.run,
        gpu_pct=100,
        slice_kind="whole",
        batch=options.batch,
    )
    target = local_layout(settings).target
    kernels = kernels_of(plan.read(settings), target)
    with Store.read(options.run) as store:
        records = list(store.records())
    wanted = {task.task_id: chosen(records, task, options.each) for task in kernels.tasks}
    tasks = [task for task in kernels.tasks if len(wanted[task.task_id]) > 1]
    workers = max(1, (os.cpu_count() or 1) - 1)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        builds = list(pool.map(built, tasks, (wanted[t.task_id] for t in tasks)))
    device = ColdDevice()
    found: dict[str, list[Sampled]] = {}
    for task, of in zip(tasks, builds, strict=True):
        found[task.task_id] = list(
            sampled(device, [b for b in of if isinstance(b, Build)], kernels.touched_bytes)
        )
        print(f"{task.name}: {len(found[task.task_id])} candidates", file=sys.stderr)
    winners = {
        way: {
            task_id: min(of, key=lambda s, way=way: s.median(way)).candidate  # type: ignore[misc]
            for task_id, of in found.items()
            if of
        }
        for way in WAYS
    }
    with tempfile.TemporaryDirectory(prefix="cold-") as name:
        folders = [Path(name, way) for way in WAYS]
        for way, folder in zip(WAYS, folders, strict=True):
            compile_artifact(
                kernels.lowered,
                kernels.tasks,
                winners[way],
                target,
                folder,
                model=kernels.model,
                pct=100,
            )
        models = dict(zip(WAYS, models_in_turns(folders, device), strict=True))
    pairs = [s for of in found.values() for s in of]
    line = stats.linregress(
        [s.bytes / 1024 for s in pairs],
        [1e6 * (s.median("code") - s.median(USUAL)) for s in pairs],
    )
    weights = {task.task_id: task.weight for task in tasks}
    by_id = {(t, s.candidate.candidate_id): s for t, of in found.items() for s in of}
    sums = {
        f"winners by {chose}, {way}": sum(
            weights[t] * by_id[t, winner.candidate_id].median(way)
            for t, winner in winners[chose].items()
        )
        for chose in WAYS
        for way in WAYS
    }
    summary = {
        "candidates": len(pairs),
        "tasks": len(found),
        "tasks_with_another_winner": {
            way: sum(of[t].candidate_id != winners[USUAL][t].candidate_id for t in of)
            for way, of in winners.items()
        },
        "us_more_for_a_kib_of_cold_code": line.slope,
        "correlation": line.rvalue,
        "sums_of_kernels_us": {name: 1e6 * secs for name, secs in sums.items()},
        "models_us": {way: 1e6 * median(secs) for way, secs in models.items()},
        "choosing_by": {
            way: to_json(compare(models[USUAL], models[way])) for way in WAYS if way != USUAL
        },
    }
    document = {
        **made_by(),
        "summary": summary,
        "models": models,
        "tasks": {
            task.name: [
                {"candidate_id": s.candidate.candidate_id, "bytes": s.bytes, **s.secs}
                for s in found[task.task_id]
            ]
            for task in tasks
        },
    }
    write(options.out, document)
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
