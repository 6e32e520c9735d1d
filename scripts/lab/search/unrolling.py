#!/usr/bin/env python3
"""Compare who unrolls the loops of a CUDA kernel: TVM, or NVRTC.

    scripts/lab/search/unrolling.py MODEL.onnx --gpu-pct 40 --run FOLDER --out unrolling.json

Takes the best candidates of a run's heaviest tasks and as many others, as they are (NVRTC unrolls)
and with TVM unrolling. Builds both in one process, and measures both in one quiet slice, in turns.
Ratios are TVM's over NVRTC's: above 1 says that leaving it to NVRTC is better.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import made_by, write
from tunerd.builder.build import build_candidate, preload
from tunerd.cluster.layout import local_layout
from tunerd.frontend.kernels import kernels_of
from tunerd.records import Store
from tunerd.runner.profiles import final_profile
from tunerd.runs import plan
from tunerd.settings import TuneSettings
from tunerd.slices import member
from tunerd.vocabulary import (
    Build,
    Candidate,
    Measurement,
    Record,
    Task,
    candidate_id,
    default_candidate,
    to_json,
)

PRAGMA = re.compile(r'(\["Annotate",\["l\d+",)0(\],\["pragma_unroll_explicit"\])')
VERSIONS = ("nvrtc", "tvm")


def unrolled_by_tvm(candidate: Candidate) -> Candidate:
    trace = PRAGMA.sub(r"\g<1>1\2", candidate.recipe)
    return replace(candidate, recipe=trace, candidate_id=candidate_id(candidate.task_id, trace))


def chosen(records: Sequence[Record], tasks: Sequence[Task], each: int) -> list[Candidate]:
    """Return the best of each task and as many at random, where the versions differ."""
    shuffled = random.Random(0)
    found = []
    for task in tasks:
        measured = [
            (r.result.median_secs, r.candidate)
            for r in records
            if r.candidate.task_id == task.task_id
            and not r.candidate.is_default
            and isinstance(r.result, Measurement)
            and PRAGMA.search(r.candidate.recipe)
        ]
        measured.sort(key=lambda pair: pair[0])
        best, rest = measured[:each], measured[each:]
        found += [c for _, c in best + shuffled.sample(rest, min(each, len(rest)))]
    return found


def build_both(task: Task, candidate: Candidate) -> list[tuple[Any, float]]:
    """Return what came of each version, and the core-seconds that it took."""
    os.environ["CUDA_CACHE_DISABLE"] = "1"  # NVRTC remembers on disk what the run has compiled
    preload(task.target)
    build_candidate(task, default_candidate(task))  # what a process pays once
    built = []
    for version in (candidate, unrolled_by_tvm(candidate)):
        started = time.process_time()
        built.append((build_candidate(task, version), time.process_time() - started))
    return built


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--gpu-pct", type=int, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--each", type=int, default=4, help="best, and others, of each task")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    settings = TuneSettings(
        model=options.model, out=options.run, gpu_pct=options.gpu_pct, slice_kind="mps"
    )
    layout = local_layout(settings)
    kernels = kernels_of(plan.read(settings), layout.target)
    tasks = sorted(kernels.tasks, key=lambda t: -t.weight * t.flops)[: options.tasks]
    by_id = {t.task_id: t for t in tasks}
    with Store.read(options.run) as store:
        candidates = chosen(list(store.records()), tasks, options.each)
    workers = max(1, (os.cpu_count() or 1) // 2)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        owners = [by_id[c.task_id] for c in candidates]
        built = list(pool.map(build_both, owners, candidates))
    rows = []
    with member(layout.slices[0][0].kind)(layout.slices[0][0]) as quiet:
        proof = quiet.prove()
        for candidate, versions in zip(candidates, built, strict=True):
            row: dict[str, Any] = {
                "task": by_id[candidate.task_id].name,
                "candidate_id": candidate.candidate_id,
                "pipelined": "software_pipeline_stage" in candidate.recipe,
            }
            builds = [build for build, _ in versions]
            if all(isinstance(b, Build) for b in builds):
                results = quiet.launch().compare(builds, final_profile("cold"))
                for name, (_, secs), result in zip(VERSIONS, versions, results, strict=True):
                    row[name] = {"core_secs": secs, "result": to_json(result)}
                measured = [r.median_secs for r in results if isinstance(r, Measurement)]
                if len(measured) == len(VERSIONS):
                    row["kernel_ratio"] = measured[1] / measured[0]
                    row["build_ratio"] = row["tvm"]["core_secs"] / row["nvrtc"]["core_secs"]
            else:
                row["failed"] = [b.message[-300:] for b in builds if not isinstance(b, Build)]
            rows.append(row)
    compared = [r for r in rows if "kernel_ratio" in r]
    summary = {
        "candidates": len(rows),
        "compared": len(compared),
        "core_secs": {v: sum(r[v]["core_secs"] for r in compared) for v in VERSIONS},
        "kernel_ratio": quantiles([r["kernel_ratio"] for r in compared]),
        "kernel_ratio_plain": quantiles(
            [r["kernel_ratio"] for r in compared if not r["pipelined"]]
        ),
        "kernel_ratio_pipelined": quantiles(
            [r["kernel_ratio"] for r in compared if r["pipelined"]]
        ),
        "build_ratio": quantiles([r["build_ratio"] for r in compared]),
    }
    document = {
        **made_by(),
        "proof": to_json(proof),
        "summary": summary,
        "rows": rows,
    }
    write(options.out, document)
    print(json.dumps(summary, indent=1))


def quantiles(values: Sequence[float]) -> dict[str, float]:
    if len(values) < 2:
        return {}
    cut = statistics.quantiles(values, n=20, method="inclusive")
    return {"p5": cut[0], "p25": cut[4], "median": cut[9], "p75": cut[14], "p95": cut[18]}


if __name__ == "__main__":
    main()
