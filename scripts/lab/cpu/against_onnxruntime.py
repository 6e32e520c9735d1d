#!/usr/bin/env python3
"""Say, kernel by kernel, where a model tuned for a CPU loses to ONNX Runtime.

    scripts/lab/cpu/against_onnxruntime.py model.onnx --run RUN --out FOLDER

RUN is that of `tunerd tune model.onnx --cpu-pct P`. Runs ONNX Runtime on as many threads, pinned to
as many cores, with its profiler on, and then the tuned artifact in turns with ONNX Runtime without
it. Convolutions and products with weights are paired by their sizes, which one of the two may have
filled up to whole vectors; what ONNX Runtime fused into one is counted to it. All else, as
convolutions in groups, stands in one row. Writes against.json with the facts of the host, and
against.txt.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import made_by, ratio, table, write

# Height, width, channels in and out, kernel height and width; or rows, depth and columns.
Size = tuple[int, ...]
Row = dict[str, Any]

FILLED = 63  # channels more than there are, at most: four vectors of 16 are one panel
PROFILED, ROUNDS, CALLS = 60, 30, 4
REST_SECS = 0.2


def session(model: Path, threads: int, profile: str = "") -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    if profile:
        options.enable_profiling = True
        options.profile_file_prefix = profile
    return ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])


def theirs(model: Path, threads: int, inputs: dict[str, Any]) -> dict[Size | None, list[float]]:
    """Return seconds of each call of ONNX Runtime by convolution; None: everything else."""
    with tempfile.TemporaryDirectory() as folder:
        running = session(model, threads, str(Path(folder, "profile")))
        for _ in range(PROFILED):
            running.run(None, inputs)
        events = json.loads(Path(running.end_profiling()).read_text())
    nodes = [e for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")]
    per_call = len(nodes) // PROFILED
    calls = [nodes[i : i + per_call] for i in range(0, len(nodes), per_call)][PROFILED // 4 :]
    found: dict[Size | None, list[float]] = defaultdict(list)
    for call in calls:
        secs: dict[Size | None, float] = defaultdict(float)
        for node in call:
            secs[size_of_node(node["args"])] += 1e-6 * node["dur"]
        for size, sum_secs in secs.items():
            found[size].append(sum_secs)
    return found


def size_of_node(args: dict[str, Any]) -> Size | None:
    shapes = [next(iter(each.values())) for each in args["input_type_shape"]]
    if args.get("op_name") in ("Conv", "FusedConv"):
        (_, channels, height, width), (out, of_in, *kernel) = shapes[:2]
        return (height, width, of_in, out, *kernel) if of_in == channels else None
    is_product = args.get("op_name") in ("FusedGemm", "FusedMatMul", "Gemm", "MatMul")
    if not is_product or any(len(shape) > 2 for shape in shapes[1:]):
        return None
    *rows, depth = shapes[0]  # a weight that is packed has no shape any more
    columns = next(iter(args["output_type_shape"][0].values()))[-1]
    return (math.prod(rows), depth, columns)


def ours(run: Path) -> dict[Size | None, float]:
    """Return seconds of an inference by convolution, of the kernels that were chosen."""
    from tunerd.records import Store

    with Store.read(run) as store:
        tasks = {task.task_id: task for task in store.tasks()}
        outcomes = store.task_outcomes()
    found: dict[Size | None, float] = defaultdict(float)
    for outcome in outcomes:
        size = size_of_task([spec.shape for spec in tasks[outcome.task_id].args])
        found[size] += outcome.weight * (outcome.best_secs or 0.0)
    return found


def size_of_task(shapes: list[tuple[int, ...]]) -> Size | None:
    """Return what `size_of_node` does; a convolution is in NHWC here, with weights in HWIO."""
    if len(shapes) < 3:
        return None
    given, weight, *_, result = shapes
    if len(given) == len(weight) == 4 and given[:2] != weight[:2]:  # not by batch and head
        (_, height, width, channels), (down, across, of_in, out) = given, weight
        return (height, width, of_in, out, down, across) if of_in == channels else None
    if len(weight) == 2 and given[-1] in weight:
        size = (math.prod(given[:-1]), given[-1], math.prod(weight) // given[-1])
        return size if math.prod(result) <= size[0] * size[2] else None
    return None


def paired(mine: Mapping[Size | None, float], other: Mapping[Size | None, float]) -> list[Row]:
    """Return rows of what has the same size, which one of the two may have filled up."""
    rows = {size: (mine.get(size, 0.0), other.get(size, 0.0)) for size in {**mine, **other}}
    for size in [s for s in mine if s not in other]:
        for filled in [s for s in other if s not in mine and s in rows]:
            if size and filled and is_filled(size, filled):
                rows[size] = mine[size], rows.pop(filled)[1]
                break
    return [
        {
            "what": " ".join(map(str, size)) if size else "all else",
            "ours_secs": ours_secs,
            "theirs_secs": theirs_secs,
        }
        for size, (ours_secs, theirs_secs) in rows.items()
    ]


def is_filled(a: Size, b: Size) -> bool:
    """Whether two are the same but for channels that fill vectors."""
    channels = {6: (2, 3), 3: (2,)}.get(len(a), ())
    return len(a) == len(b) and all(
        abs(one - other) <= (FILLED if place in channels else 0)
        for place, (one, other) in enumerate(zip(a, b, strict=True))
    )


def in_turns(
    tuned: Any, other: Any, inputs: dict[str, Any], threads: int
) -> dict[str, list[float]]:
    """Return samples of a tuned model and a session, in turns."""

    def rest() -> None:
        if threads > 1:  # threads of both spin behind a call, on the other's cores
            time.sleep(REST_SECS)

    secs: dict[str, list[float]] = {"tunerd": [], "ONNX Runtime": []}
    for _ in range(ROUNDS):
        tuned.timed_calls(inputs, 1)
        secs["tunerd"].append(tuned.timed_calls(inputs, CALLS) / CALLS)
        rest()
        other.run(None, inputs)
        since = time.perf_counter()
        for _ in range(CALLS):
            other.run(None, inputs)
        secs["ONNX Runtime"].append((time.perf_counter() - since) / CALLS)
        rest()
    return secs


def shown(document: dict[str, Any]) -> str:
    heads = (
        "height, width, in, out, kernel; or rows, depth, columns",
        "tunerd us",
        "ONNX Runtime us",
        "lost us",
    )
    lines = []
    rows = sorted(document["rows"], key=lambda row: row["theirs_secs"] - row["ours_secs"])
    for row in rows:
        mine, other = 1e6 * row["ours_secs"], 1e6 * row["theirs_secs"]
        lines.append([row["what"], f"{mine:.0f}", f"{other:.0f}", f"{mine - other:.0f}"])
    mine, other = (statistics.median(document["secs"][w]) for w in ("tunerd", "ONNX Runtime"))
    times = ratio(document["secs"]["ONNX Runtime"], document["secs"]["tunerd"])
    return table(heads, lines, numbers=range(1, 4)) + (
        f"\n\nWhole model: tunerd {1e3 * mine:.3f} ms, ONNX Runtime {1e3 * other:.3f} ms, "
        f"{times.replace(' (', ' times as fast (')}.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    import numpy as np

    import tunerd
    from tunerd.artifacts.manifest import read_manifest

    threads = min(read_manifest(options.run / "artifact")["share"]["sm_counts"])
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    tuned, random = tunerd.load(options.run / "artifact"), np.random.default_rng(0)
    inputs = {s.name: random.standard_normal(s.shape).astype(s.dtype) for s in tuned.inputs}
    mine, other = ours(options.run), theirs(options.model, threads, inputs)
    median = {size: statistics.median(secs) for size, secs in other.items()}
    document = {
        **made_by(),
        "threads": threads,
        "rows": paired(mine, median),
        "secs": in_turns(tuned, session(options.model, threads), inputs, threads),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    write(options.out / "against.json", document, indent=None)
    (options.out / "against.txt").write_text(shown(document))
    print(shown(document), end="")


if __name__ == "__main__":
    main()
