#!/usr/bin/env python3
"""Does NVML name a process on GPUs that it does not use?

    scripts/lab/scaling/seen_elsewhere.py --out seen.json

Starts processes one after the other that see the first GPU alone (CUDA_VISIBLE_DEVICES), make a
context there, keep it for --secs and end. Meanwhile the lists of all GPUs are read every few
milliseconds. Says of each GPU how long each process was in its lists, and which memory NVML said it
had there. A run on one of several GPUs takes whoever is in its GPU's list for a neighbour. Runs
where two NVIDIA GPUs are.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import made_by, table, write
from tunerd.system import gpus, host

_LISTS = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses")
_CHILD = """
import sys, time
from cuda.bindings import driver
driver.cuInit(0)
error, device = driver.cuDeviceGet(0)
error, context = driver.cuDevicePrimaryCtxRetain(device)
time.sleep(float(sys.argv[1]))
"""


def watched(child: subprocess.Popen[bytes], uuids: list[str]) -> list[dict[str, Any]]:
    """Return each time that a list names the child: when, on which GPU, and the bytes there."""
    seen, began = [], time.monotonic()
    while child.poll() is None:
        for number, uuid in enumerate(uuids):
            for name in _LISTS:
                for process in gpus.ask_gpu(uuid, name) or ():
                    if process.pid == child.pid:
                        at = time.monotonic() - began
                        seen.append({"gpu": number, "list": name, "at": round(at, 4),
                                     "bytes": process.usedGpuMemory})  # fmt: skip
        time.sleep(0.002)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument("--secs", type=float, default=0.5, help="that each keeps its context")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    uuids = [gpu.uuid for gpu in host.facts().gpus]
    if len(uuids) < 2:
        sys.exit("two GPUs are needed: this machine has or shows fewer")
    document: dict[str, Any] = {**made_by(), "processes": []}
    for _ in range(options.processes):
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(options.secs)],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": uuids[0]},
        )
        document["processes"].append(watched(child, uuids))
    write(options.out, document, indent=None)
    rows = []
    for number in range(len(uuids)):
        mine = [[s for s in seen if s["gpu"] == number] for seen in document["processes"]]
        named = [each for each in mine if each]
        longest = max((each[-1]["at"] - each[0]["at"] for each in named), default=0.0)
        sizes = sorted({str(s["bytes"]) for each in named for s in each})
        rows.append([str(number), f"{len(named)} of {len(mine)}", f"{1e3 * longest:.0f} ms",
                     ", ".join(sizes[:6])])  # fmt: skip
    print(table(("GPU", "processes named", "for, at most", "bytes"), rows, numbers=range(3)))


if __name__ == "__main__":
    main()
