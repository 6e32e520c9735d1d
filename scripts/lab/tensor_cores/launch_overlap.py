#!/usr/bin/env python3
"""Measure what programmatic dependent launches bring to chains of tensor-core kernels.

    scripts/lab/tensor_cores/launch_overlap.py --out FOLDER [--shares 40,100] [--batches 1,8]

A kernel of a model waits until the one before it has ended, and then begins to read its weights,
which no other kernel writes. With a programmatic dependent launch (CUDA programming guide,
"Programmatic Dependent Launch and Synchronization") its blocks start while the one before still
runs, do what needs none of its results, and wait for it then.

The chains are ResNet-50's 53 convolutions with their residuals and the max pooling, and the 48
GEMMs of BERT-base (128 tokens; attention and norms are left out), fp16 with fp32 accumulation, by
one Triton template with fused epilogues and split-K, each operation at the fastest of some
configurations, measured alone with cold weights. Each chain is one CUDA graph, launched in turns:

    serial    ordinary launches
    early     programmatic launches: a kernel lets the next one start at once, and waits for the one
              before it before it reads anything
    late      the same, but lets the next one start only after its own main loop
    prefetch  as early, and before it waits, it fetches its weights into the L2 cache

All must give the same bits. Needs one NVIDIA GPU of compute capability 9.0 or more, with MPS,
PyTorch and Triton. Writes overlap.json with every sample and overlap.txt.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.tensor_cores.overlap_bench import Bench, compile_all, measure_chain, tune
from lab.tensor_cores.overlap_chains import CHAINS
from lab.tensor_cores.overlap_kernel import MODES


def inside(options: argparse.Namespace) -> None:
    """Be the process of one share."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    found: dict[str, Any] = {}
    for batch in options.batches:
        bench = Bench(torch, batch)
        for name in CHAINS:
            ops = list(dict.fromkeys(op for op, *_ in CHAINS[name]()))
            told = {op: tune(bench, op, options.configs, options.limit) for op in ops}
            configs = {op: config for op, (config, _) in told.items()}
            compiling = compile_all([(op, configs[op], m) for op in ops for m in MODES[1:]])
            found[f"{name}, batch {batch}"] = {
                "sms": bench.sms,
                "device": torch.cuda.get_device_name(),
                "tuned": [t for _, t in told.values()],
                "compiling": compiling,
                **measure_chain(bench, name, configs, options.rounds),
            }
            Path(options.inside).write_text(json.dumps(found))


# --- shares ------------------------------------------------------------------------------------


@contextlib.contextmanager
def mps() -> Iterator[dict[str, str]]:
    """Yield the environment of an MPS daemon of our own."""
    with tempfile.TemporaryDirectory(prefix="overlap-mps-") as folder:
        for part in ("pipe", "log"):
            Path(folder, part).mkdir()
        env = os.environ | {
            "CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe",
            "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log",
        }
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=env, check=True)
        try:
            yield env
        finally:
            quit_ = ["nvidia-cuda-mps-control"]
            subprocess.run(quit_, input="quit\n", text=True, env=env, timeout=30)


def table(document: dict[str, Any]) -> str:
    lines = [
        f"| chain | share | SMs | {' | '.join(MODES)} | {' is | '.join(MODES[1:])} is |",
        f"|---|{'--:|' * (2 * len(MODES) + 1)}",
    ]
    for share, chains in document["shares"].items():
        for name, chain in chains.items():
            medians = {m: statistics.median(chain["secs"][m]) * 1e6 for m in MODES}
            cells = [f"{medians[m]:.1f} µs" for m in MODES]
            cells += [_ratio(chain["secs"], mode) for mode in MODES[1:]]
            lines.append(f"| {name} | {share}% | {chain['sms']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _ratio(secs: dict[str, list[float]], mode: str) -> str:
    """Return how many times faster a mode is than serial, and the middle 90% of the rounds."""
    ratios = sorted(a / b for a, b in zip(secs["serial"], secs[mode], strict=True))
    low, high = ratios[len(ratios) // 20], ratios[-1 - len(ratios) // 20]
    return f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shares", type=_numbers, default=[40, 100])
    parser.add_argument("--batches", type=_numbers, default=[1, 8])
    parser.add_argument("--configs", type=int, default=24, help="of each operation")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--limit", type=float, default=3.0, help="seconds to tune an operation")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside(options)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {"command": shlex.join(sys.argv), "triton": triton.__version__}
    sms = {40: 52, 100: 132, 10: 12}
    jobs = {
        (op, config, "serial"): None
        for build in CHAINS.values()
        for op in dict.fromkeys(op for op, *_ in build())
        for share in options.shares
        for batch in options.batches
        for config in op.candidates(sms.get(share, 132 * share // 100), batch, options.configs)
    }
    document["compiling"] = compile_all(list(jobs))
    print(document["compiling"], file=sys.stderr, flush=True)
    document["shares"] = {}
    with mps() as env:
        for share in options.shares:
            part = options.out / f".{share}.json"
            command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]]
            subprocess.run(
                [*command, "--inside", str(part)],
                env=env | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share)},
            )
            if part.exists():
                document["shares"][str(share)] = json.loads(part.read_text())
                part.unlink()
            (options.out / "overlap.json").write_text(json.dumps(document) + "\n")
            (options.out / "overlap.txt").write_text(table(document))
    print(table(document))


if __name__ == "__main__":
    main()
