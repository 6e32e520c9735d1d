#!/usr/bin/env python3
"""Compare models quantized to int8 with themselves in fp16, at a share of a GPU.

    scripts/lab/tensor_cores/int8.py MODEL.onnx ... --runs RUNS --out FOLDER [--gpu-pct 40]

Quantizes each model as scripts/lab/cpu/int8.py does: QDQ nodes, weights of int8 by channel, values
of uint8. Tunes both at the share with `tunerd tune --precision fp16`, in RUNS, where the same
command goes on, and then times both artifacts in turns in one process under the same cap. Writes
int8.json, with the host and the command, and int8.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.cpu.int8 import quantized
from lab.lab import made_by, ratio, spread, table, write
from lab.tensor_cores.compare_with_pytorch import mps

ROOT = Path(__file__).resolve().parents[3]
ROUNDS = 30
ROUND_SECS = 0.01  # of calls of each
KINDS = ("int8", "fp16")
HEADS = ("model", "int8, ms", "fp16, ms", "int8 as fast as fp16", "launches", "tuning")


def tuned(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Tune at the share; return the artifact's folder and what the run says of itself."""
    run = options.runs.resolve() / f"{model.stem}-gpu{options.gpu_pct}"
    command = [
        sys.executable,
        "-m",
        "tunerd",
        "tune",
        str(model),
        "--gpu-pct",
        f"{options.gpu_pct}",
    ]
    command += ["--precision", "fp16", "--budget", options.budget, "--out", str(run)]
    since = time.monotonic()
    ended = subprocess.run([*command, "--no-wait", "--json"], cwd=ROOT, capture_output=True)
    secs = time.monotonic() - since
    if not (run / "artifact").exists():
        sys.exit(f"{model.name}: no artifact (exit {ended.returncode}): {ended.stderr[-500:]!r}")
    said = json.loads(ended.stdout)
    kept = ("name", "weight", "trials", "best_secs")
    return {
        "artifact": str(run / "artifact"),
        "secs": secs,
        "exit_code": ended.returncode,
        "verification": said["verification"],
        "tasks": [{k: t[k] for k in kept} for t in said["tasks"]],
    }


def in_turns(artifacts: dict[str, str]) -> dict[str, list[float]]:
    """Return seconds of a call of each artifact, by rounds; in a process under the cap."""
    import numpy as np

    import tunerd

    runs = {}
    for kind, folder in artifacts.items():
        model = tunerd.load(Path(folder))
        random = np.random.default_rng(1)
        inputs = {s.name: random.standard_normal(s.shape).astype(s.dtype) for s in model.inputs}
        model.timed_calls(inputs, 20)
        count = max(3, round(ROUND_SECS / (model.timed_calls(inputs, 20) / 20)))
        runs[kind] = (model, inputs, count)
    secs: dict[str, list[float]] = {kind: [] for kind in runs}
    for turn in range(ROUNDS):
        for kind in list(runs)[:: 1 if turn % 2 else -1]:
            model, inputs, count = runs[kind]
            secs[kind].append(model.timed_calls(inputs, count) / count)
    return secs


def shown(models: dict[str, Any]) -> str:
    lines = []
    for name, each in models.items():
        ms = [spread([1e3 * s for s in each["secs"][k]], "{:.3f}").split(" ")[0] for k in KINDS]
        runs = [each["runs"][k] for k in KINDS]
        launches = " / ".join(str(sum(t["weight"] for t in run["tasks"])) for run in runs)
        took = " / ".join(f"{run['secs']:.0f} s" for run in runs)
        lines.append([name, *ms, ratio(each["secs"]["fp16"], each["secs"]["int8"]), launches, took])
    return table(HEADS, lines, numbers=range(1, len(HEADS)))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, nargs="*")
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpu-pct", type=int, default=40)
    parser.add_argument("--budget", default="40s", help="of each search")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        print(json.dumps(in_turns(json.loads(options.inside))))
        return
    document: dict[str, Any] = {**made_by(), "gpu_pct": options.gpu_pct, "models": {}}
    for model in options.models:
        narrow = quantized(model, options.runs / "models", is_dynamic=False)
        runs = {"int8": tuned(narrow, options), "fp16": tuned(model, options)}
        inside = json.dumps({kind: run["artifact"] for kind, run in runs.items()})
        with mps(options.gpu_pct) as env:
            done = subprocess.run(
                [sys.executable, __file__, "--runs", ".", "--out", ".", "--inside", inside],
                env={**os.environ, **env},
                capture_output=True,
                text=True,
                check=False,
            )
        if done.returncode:
            sys.exit(f"{model.stem}: {done.stderr[-1000:]}")
        secs = json.loads(done.stdout.splitlines()[-1])
        medians = {kind: statistics.median(each) for kind, each in secs.items()}
        document["models"][model.stem] = {"runs": runs, "median_secs": medians, "secs": secs}
        print(shown(document["models"]), flush=True)
        write(options.out / "int8.json", document, indent=None)
        (options.out / "int8.txt").write_text(shown(document["models"]))


if __name__ == "__main__":
    main()
