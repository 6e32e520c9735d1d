#!/usr/bin/env python3
"""Time what a run's start waits for: a private Ray cluster, and TVM in a slice's runner.

    scripts/lab/start/starts.py --repeats 10 --out start.json

The cluster as tunerd has it, with Ray's agents, and as Ray comes, TVM's runtime alone, all of TVM
and, where PyTorch is installed, TVM's runtime with what it imports of that; each in a new process,
in turns. The start of a cluster is over when a task has answered. Writes every sample, with the
processes that there are a second later, their memory and the time that they have had of the cores.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import made_by, write
from tunerd.system import host

TICK = os.sysconf("SC_CLK_TCK")
Sample = dict[str, float]


def cluster(is_bare: bool, *, has_agents: bool = False) -> Sample:
    """Start a cluster in this process, and end it."""
    from tunerd.cluster import private_ray
    from tunerd.cluster.ray_cluster import Cluster

    if not is_bare:
        private_ray.bare = contextlib.nullcontext  # type: ignore[assignment]
    if has_agents:
        private_ray._idle_agents = lambda: None
    since = time.monotonic()
    with Cluster(address=None, run="start", cpus=host.facts().usable_cores, gpus=0) as started:
        remote: Any = started._ray.remote(_answer)
        started._ray.get(remote.remote())
        start_secs = time.monotonic() - since
        time.sleep(1.0)
        found = _processes() - {os.getpid()}
        sums = _sums(found)
        since = time.monotonic()
    return {"start_secs": start_secs, "end_secs": time.monotonic() - since, **sums}


def runner(is_runtime: bool, *, has_torch: bool = False) -> Sample:
    """Import TVM as a runner of a slice of cores does."""
    from tunerd.runner import sampling
    from tunerd.runner.tvm_runtime import import_runtime
    from tunerd.system.without_torch import keep_torch_from_tvm

    since = time.monotonic()
    if not has_torch:
        keep_torch_from_tvm()
    if is_runtime:
        import_runtime()
    sampling.CpuDevice((0,))
    return {"start_secs": time.monotonic() - since, "end_secs": 0.0, **_sums({os.getpid()})}


WAYS: dict[str, Callable[[], Sample]] = {
    "cluster, as Ray comes": lambda: cluster(False),
    "cluster, bare, with agents": lambda: cluster(True, has_agents=True),
    "cluster, bare": lambda: cluster(True),
    "runner, all of TVM": lambda: runner(False),
    "runner, its runtime": lambda: runner(True),
}
if importlib.util.find_spec("torch"):
    WAYS["runner, its runtime and PyTorch"] = lambda: runner(True, has_torch=True)


def _answer() -> int:
    return 1


def _processes() -> set[int]:
    """Return this process and all that it has started."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = {os.getpid()}
    while new := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= new
    return found


def _sums(processes: set[int]) -> Sample:
    """Sum up the core seconds (utime and stime of proc(5)) and the resident memory."""
    cpu_secs, pages = 0.0, 0
    for pid in processes:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        cpu_secs += (int(fields[11]) + int(fields[12])) / TICK
        pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    rss_mib = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return {"processes": len(processes), "cpu_secs": cpu_secs, "rss_mib": rss_mib}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(WAYS[options.way]()))
        return 0
    if options.out is None:
        parser.error("--out is missing")
    samples: dict[str, list[Sample]] = {way: [] for way in WAYS}
    for _ in range(options.repeats):
        for way in WAYS:
            command = [sys.executable, __file__, "--way", way]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            samples[way].append(json.loads(done.stdout.splitlines()[-1]))
    for way, of in samples.items():
        medians = {key: statistics.median(s[key] for s in of) for key in of[0]}
        print(
            f"{way}: start {medians['start_secs']:.2f} s, end {medians['end_secs']:.2f} s, core "
            f"time {medians['cpu_secs']:.2f} s, {medians['processes']:.0f} processes, "
            f"{medians['rss_mib']:.0f} MiB"
        )
    document = {
        **made_by(),
        "samples": samples,
    }
    write(options.out, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
