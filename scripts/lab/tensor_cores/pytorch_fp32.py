#!/usr/bin/env python3
"""Time an artifact of ResNet-50 beside PyTorch's cuDNN at the same share of a GPU.

Both run in one process, the one MPS client of the GPU, in turns; PyTorch is one CUDA graph. A
sample is the mean of CALLS inferences in a row by the host's clock. PyTorch gets the better of its
two memory layouts, and cuDNN's own autotuner. Needs torch and torchvision.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CALLS = 100
SAMPLES = 40


def torch_model(precision: str, channels_last: bool) -> Callable[[], None]:
    import torch
    import torchvision

    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.manual_seed(0)
    model = torchvision.models.resnet50(weights=None).eval().cuda()
    example = torch.rand(1, 3, 224, 224, device="cuda")
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
        example = example.contiguous(memory_format=torch.channels_last)
    if precision == "fp16":
        model, example = model.half(), example.half()
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(5):
            model(example)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            model(example)

    def run() -> None:
        for _ in range(CALLS):
            graph.replay()
        torch.cuda.synchronize()

    run.keep = (model, example)  # type: ignore[attr-defined]  # the graph reads their memory
    return run


def artifact_model(folder: Path) -> Callable[[], None]:
    import numpy as np

    import tunerd

    model = tunerd.load(folder)
    rng = np.random.default_rng(0)
    inputs = {s.name: rng.random(s.shape, np.float32) for s in model.inputs}
    model.timed_calls(inputs, 3)
    return lambda: (model.timed_calls(inputs, CALLS), None)[1]


def measure(artifact: Path) -> dict[str, Any]:
    import torch

    runs = {"tunerd": artifact_model(artifact)}
    for precision in ("fp32", "tf32", "fp16"):
        for channels_last in (False, True):
            name = f"cudnn {precision} {'NHWC' if channels_last else 'NCHW'}"
            runs[name] = torch_model(precision, channels_last)
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(SAMPLES + 2):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            if number >= 2:
                samples[name].append((time.perf_counter() - started) / CALLS)
    return {
        "sm_count": torch.cuda.get_device_properties(0).multi_processor_count,
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "run_secs": samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--gpu-pct", type=int, default=40)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        args.out.write_text(json.dumps(measure(args.artifact)))
        return
    from tunerd.slices.mps.control import MpsControl, client_environment
    from tunerd.stats.paired import compare
    from tunerd.system import host
    from tunerd.vocabulary import to_json

    gpu = host.facts().gpus[0]
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        control = MpsControl(Path(folder, "pipe"), Path(folder, "log"), gpu.uuid)
        control.start()
        try:
            client = client_environment(control.pipe_folder, gpu.uuid, args.gpu_pct)
            environment = os.environ | client
            command = [sys.executable, __file__, str(args.artifact), "--out", str(args.out)]
            subprocess.run([*command, "--inside"], env=environment, check=True)
        finally:
            control.quit()
    found = json.loads(args.out.read_text())
    found |= {"gpu_pct": args.gpu_pct, "calls_per_sample": CALLS, "command": host.shown(sys.argv)}
    found["host"] = to_json(host.facts())
    found["comparisons"] = {}
    ours = found["run_secs"]["tunerd"]
    print(f"{found['sm_count']} SMs of {found['device']}; medians of {SAMPLES} samples")
    for name, secs in sorted(found["run_secs"].items()):
        against = compare(secs, ours)
        found["comparisons"][name] = to_json(against)
        median = sorted(secs)[len(secs) // 2] * 1e3
        print(f"  {name:18s} {median:7.3f} ms   tunerd is {against.ratio:5.2f}x: {against.verdict}")
    args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
