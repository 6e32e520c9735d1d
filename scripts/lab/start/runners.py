#!/usr/bin/env python3
"""Time by its parts what the start of a GPU slice's runner takes.

    scripts/lab/start/runners.py --gpu-pct 25 --repeats 5 --out runner.json

In new processes, in turns: on the whole GPU, there with what TVM imports of PyTorch where that is
installed, as the first client of an MPS daemon, beside a client that stays, and three at once
beside it. Writes every sample, and what Python's -X importtime says of one more start on the whole
GPU, without PyTorch and with it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import made_by, write
from tunerd.slices import plan
from tunerd.slices.mps.control import MpsControl, client_environment
from tunerd.slices.mps.gpu_runner import runner_environment
from tunerd.vocabulary import SliceRequest

Sample = dict[str, float]


# What `tunerd.runner.process` does; prints when each part had ended, in seconds.
START = """
import json, os, time
ends = {}
def ended(part):
    ends[part] = time.time() - float(os.environ["STARTED_AT"])
ended("Python")
from tunerd.runner import cuda_device, process, tvm_runtime
from tunerd.system.without_torch import keep_torch_from_tvm
if "TORCH" not in os.environ:
    keep_torch_from_tvm()
ended("tunerd's modules")
from tunerd.builder import nvrtc
nvrtc.preload()
ended("cudart and NVRTC")
tvm_runtime.import_runtime()
ended("TVM's runtime")
driver = cuda_device.preload()[2]
ended("the driver's API")
driver.cuInit(0)
ended("cuInit")
cuda_device.CudaDevice()
ended("the context")
print(json.dumps(ends))
"""


def command(*options: str) -> list[str]:
    return [sys.executable, *options, "-c", START]


# --- ways --------------------------------------------------------------------------------------


@contextlib.contextmanager
def daemon(gpu_uuid: str, pct: int) -> Iterator[dict[str, str]]:
    """Start an MPS daemon, and yield what a client of a share has in its environment."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        control = MpsControl(Path(folder, "pipe"), Path(folder, "log"), gpu_uuid)
        control.start()
        try:
            yield client_environment(control.pipe_folder, gpu_uuid, pct)
        finally:
            control.quit()


@contextlib.contextmanager
def client(environment: Mapping[str, str]) -> Iterator[None]:
    """Hold a context beside whatever is timed."""
    code = "from tunerd.runner.cuda_device import CudaDevice as C; C(); print(); input()"
    held = subprocess.Popen(
        [sys.executable, "-c", code],
        env=runner_environment() | dict(environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert held.stdout is not None
    held.stdout.readline()
    try:
        yield
    finally:
        held.communicate("\n")


def starts(count: int, environment: Mapping[str, str]) -> list[Sample]:
    """Start so many at once; return the samples of all."""
    begun = []
    for _ in range(count):
        of = runner_environment() | dict(environment) | {"STARTED_AT": repr(time.time())}
        begun.append(subprocess.Popen(command(), env=of, stdout=subprocess.PIPE, text=True))
    return [json.loads(each.communicate()[0].splitlines()[-1]) for each in begun]


def explained(environment: Mapping[str, str]) -> list[str]:
    """Return the imports of one start that took longest, as Python prints them."""
    of = runner_environment() | dict(environment) | {"STARTED_AT": repr(time.time())}
    done = subprocess.run(command("-X", "importtime"), env=of, capture_output=True, text=True)
    lines = [line for line in done.stderr.splitlines() if line.count("|") == 2]
    return sorted(lines, key=lambda line: -_cumulative(line))[:25]


def _cumulative(line: str) -> int:
    number = line.split("|")[1].strip()
    return int(number) if number.isdigit() else -1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu-pct", type=int, default=25)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    planned = plan(SliceRequest("mps", options.gpu_pct))
    if planned.problem:
        parser.exit(13, f"{planned.problem}\n")
    gpu_uuid = planned.slices[0].gpu_uuid or ""
    whole = {"CUDA_VISIBLE_DEVICES": gpu_uuid}
    samples: dict[str, list[Sample]] = {}
    with_torch = {**whole, "TORCH": "1"}
    for _ in range(options.repeats):
        samples.setdefault("whole GPU", []).extend(starts(1, whole))
        samples.setdefault("whole GPU, PyTorch", []).extend(starts(1, with_torch))
        with daemon(gpu_uuid, options.gpu_pct) as share:
            samples.setdefault("first client", []).extend(starts(1, share))
            with client(share):
                samples.setdefault("beside a client", []).extend(starts(1, share))
                samples.setdefault("three at once", []).extend(starts(3, share))
    for way, of in samples.items():
        medians = {part: statistics.median(s[part] for s in of) for part in of[0]}
        print(f"{way}: " + ", ".join(f"{p} {s:.2f} s" for p, s in medians.items()))
    document = {
        **made_by(),
        "ends_secs": samples,
        "imports": {"whole GPU": explained(whole), "whole GPU, PyTorch": explained(with_torch)},
    }
    write(options.out, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
