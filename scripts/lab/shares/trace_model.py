#!/usr/bin/env python3
"""Find where a model takes longer than its kernels alone, on a GPU.

    scripts/lab/shares/trace_model.py measure MODEL.onnx --matrix FOLDER --runs RUN --tuned-at 50 \
        --swap b3c6c --out trace.json
    scripts/lab/shares/trace_model.py table results/h200-trace

Compiles the artifact of a share of a matrix, whose records are below RUN, and for each --swap the
same with one task's kernel replaced by the candidate whose id begins so. Then, on the whole GPU:

    in turns        what the artifacts take, by the host's clock, as the matrix measures them;
    in the model    each call of an inference by CUPTI's clock, which PyTorch's profiler reads:
                    how long the kernel runs, and how long the GPU had nothing to do before it;
    alone           the kernels of the swapped tasks again and again, with weights from the next of
                    more and more copies.

Run it with the GPU to itself, where PyTorch is installed: there is no slice, and no MPS. `table`
prints what each JSON file of a folder says of the swapped kernels.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import load as load_json
from lab.lab import made_by, table, write
from tunerd.artifacts.compile import compile_artifact
from tunerd.artifacts.loading import load
from tunerd.builder.build import build_candidate
from tunerd.cluster.layout import local_layout
from tunerd.frontend.kernels import kernels_of
from tunerd.records import Store
from tunerd.runner.cuda_device import CudaDevice
from tunerd.runner.sampling import TimedModel, interleaved
from tunerd.runs import plan
from tunerd.settings import TuneSettings
from tunerd.studies.matrix.folder import read
from tunerd.studies.matrix.records import ContestDone
from tunerd.system.arrays import timing_values
from tunerd.vocabulary import Build, Candidate, Profile, Task, default_candidate

MODELS = Profile(
    "models-v1", min_samples=40, max_samples=40, min_sample_secs=0.02, max_total_secs=60.0
)
INFERENCES = 40  # traced
PAUSE_SECS = 0.2  # before them, longer than any between two calls
CALLS, SAMPLES = 64, 15  # at least of a graph; graphs
COPIES = (1, 8, 16, 32, 48, 64, 80, 96, 128, 192, 256, 384)
SHOWN = (1, 16, 32, 64, 96, 128, 192, 384)


def candidates_of(levels: Path, tasks: Sequence[Task]) -> dict[str, Candidate]:
    """Return the candidates of a matrix's levels, and the defaults, by id."""
    found = {c.candidate_id: c for c in map(default_candidate, tasks)}
    for path in sorted(levels.glob("*/store.sqlite")):
        with Store.read(path.parent) as store:
            found |= {r.candidate.candidate_id: r.candidate for r in store.records()}
    return found


def traced(folder: Path) -> list[dict[str, Any]]:
    """Return the calls of an inference in their order: kernel, us of it, us of nothing before."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        model = load(folder)
        inputs = {s.name: timing_values(s, seed=i) for i, s in enumerate(model.inputs)}
        model.timed_calls(inputs, 20)
        time.sleep(2 * PAUSE_SECS)
        for _ in range(INFERENCES):
            model.timed_calls(inputs, 1)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    calls = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"])
    starts = [
        i for i in range(1, len(calls)) if calls[i]["ts"] - calls[i - 1]["ts"] > 1e6 * PAUSE_SECS
    ]
    calls = calls[starts[-1] :]
    each = len(calls) // INFERENCES
    assert each * INFERENCES == len(calls) > 0, f"{len(calls)} calls in {INFERENCES}"
    order = []
    for i in range(each):
        of = calls[i::each]
        assert len({e["name"] for e in of}) == 1, {e["name"] for e in of}
        gaps = [
            e["ts"] - (before["ts"] + before["dur"])
            for before, e in zip(calls[i - 1 :: each], of, strict=False)
            if i
        ]
        order.append(
            {
                "kernel": of[0]["name"],
                "us": median(e["dur"] for e in of),
                "us_before": median(gaps) if gaps else None,
                "grid": of[0]["args"].get("grid"),
                "block": of[0]["args"].get("block"),
                "registers": of[0]["args"].get("registers per thread"),
                "shared_bytes": of[0]["args"].get("shared memory"),
            }
        )
    return order


class Kernels:
    """Kernels on the device, called alone."""

    def __init__(self, folder: Path) -> None:
        self.device = CudaDevice()
        self._folder = folder

    def by_copies(self, build: Build) -> dict[int, float]:
        """Return the us of a call by how many copies of the weights there are."""
        path = self._folder / f"{build.candidate.candidate_id}.so"
        path.write_bytes(build.library)
        kernel = self.device._kernel(path)
        bytes_each = weight_bytes(build)
        return {
            copies: self._in_a_graph(
                kernel,
                self.device._arguments.sets(build, range_bytes=copies * bytes_each),
                max(CALLS, copies),
            )
            for copies in COPIES
        }

    def _in_a_graph(self, kernel: Any, sets: Sequence[tuple[Any, ...]], calls: int) -> float:
        device = self.device
        with device._on_stream():
            kernel(*sets[0])  # loads the cubin
        graph = device._captured(kernel, sets, 0, calls)

        def run() -> None:
            device._checked(device._driver.cuGraphLaunch(graph.executable, device._stream))

        device._time(run)
        return 1e6 * median(device._time(run) / calls for _ in range(SAMPLES))


def weight_bytes(build: Build) -> int:
    specs = (build.args[i] for i in build.weight_args)
    return sum(math.prod(s.shape) * np.dtype(s.dtype).itemsize for s in specs)


def summed(order: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    by_kernel: dict[str, list[float]] = defaultdict(list)
    for call in order:
        by_kernel[call["kernel"]].append(call["us"])
    return {
        "calls": len(order),
        "kernels_us": sum(c["us"] for c in order),
        "nothing_us": sum(c["us_before"] or 0 for c in order),
        "by_kernel": {
            name: {"calls": len(us), "us": median(us), "least": min(us), "most": max(us)}
            for name, us in sorted(by_kernel.items(), key=lambda item: -sum(item[1]))
        },
    }


def measure(options: argparse.Namespace) -> None:
    settings = TuneSettings(
        model=options.model,
        out=options.runs,
        gpu_pct=100,
        slice_kind="whole",
        batch=options.batch,
    )
    target = local_layout(settings).target
    kernels = kernels_of(plan.read(settings), target)
    tasks = {task.task_id: task for task in kernels.tasks}
    known = candidates_of(options.runs / "levels", kernels.tasks)
    base = {
        line.task_id: known[line.winner]
        for line in read(options.matrix).of(ContestDone)
        if line.run_at == options.tuned_at and line.task_id in tasks
    }
    swaps = [next(c for i, c in known.items() if i.startswith(swap)) for swap in options.swap]
    chosen = {"base": base} | {c.candidate_id: base | {c.task_id: c} for c in swaps}
    document: dict[str, Any] = {**made_by()}
    with tempfile.TemporaryDirectory(prefix="trace-model-") as name:
        folders = {which: Path(name, which) for which in chosen}
        for which, winners in chosen.items():
            compile_artifact(
                kernels.lowered,
                kernels.tasks,
                winners,
                target,
                folders[which],
                model=kernels.model,
                pct=100,
            )
        on_gpu = Kernels(Path(name))
        ready = [TimedModel(load(folder), MODELS) for folder in folders.values()]
        results = interleaved(on_gpu.device, ready, profile=MODELS, goes_on=lambda: None)
        samples = {
            w: of[1] for w, of in zip(folders, results, strict=True) if isinstance(of, tuple)
        }
        document["in_turns_us"] = {w: 1e6 * median(secs) for w, secs in samples.items()}
        document["samples_secs"] = samples
        del ready
        document["alone"] = {}
        for candidate in [*(base[c.task_id] for c in swaps), *swaps]:
            build = build_candidate(tasks[candidate.task_id], candidate)
            assert isinstance(build, Build), build
            document["alone"][candidate.candidate_id] = {
                "task": tasks[candidate.task_id].name,
                "weight_bytes": weight_bytes(build),
                "us_by_copies": on_gpu.by_copies(build),
            }
        document["in_model"] = {}
        for which, folder in folders.items():  # at last: the profiler may fail
            write(options.out, document)
            order = traced(folder)
            document["in_model"][which] = {"order": order, "summary": summed(order)}
        write(options.out, document)


def rows(path: Path) -> Iterator[tuple[str, ...]]:
    """Yield what a file says of each kernel that was swapped, and of that which it replaced."""
    document = load_json(path)
    swaps = [which for which in document["in_model"] if which != "base"]
    for candidate_id, alone in document["alone"].items():
        which = next((s for s in swaps if candidate_id.startswith(s)), "base")
        by_copies = {int(n): us for n, us in alone["us_by_copies"].items()}
        called = document["in_model"][which]["summary"]["by_kernel"][f"{alone['task']}_kernel"]
        yield (
            alone["task"],
            candidate_id[:5],
            f"{alone['weight_bytes'] / 1024:,.0f} KiB",
            *(f"{by_copies[copies]:.2f} µs" for copies in SHOWN),
            f"{called['us']:.2f} µs",
            f"{called['calls']}",
            f"{document['in_turns_us'][which]:.0f} µs",
        )


def print_table(options: argparse.Namespace) -> None:
    titles = ("kernel of", "candidate", "weights", *(f"{n} copies" for n in SHOWN))
    titles += ("in the model", "calls", "the model")
    for path in sorted((*options.folder.glob("*.json"), *options.folder.glob("*.json.xz"))):
        print(path.name.removesuffix(".xz"), "", table(titles, rows(path)), "", sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    of_table = commands.add_parser("table")
    of_table.add_argument("folder", type=Path)
    of_table.set_defaults(carry_out=print_table)
    of_measure = commands.add_parser("measure")
    of_measure.add_argument("model", type=Path)
    of_measure.add_argument("--matrix", type=Path, required=True)
    of_measure.add_argument("--runs", type=Path, required=True, help="the matrix' own folder")
    of_measure.add_argument("--tuned-at", type=int, required=True)
    of_measure.add_argument("--swap", action="append", required=True, help="the id of a candidate")
    of_measure.add_argument("--batch", type=int)
    of_measure.add_argument("--out", type=Path, required=True)
    of_measure.set_defaults(carry_out=measure)
    options = parser.parse_args()
    options.carry_out(options)


if __name__ == "__main__":
    main()
