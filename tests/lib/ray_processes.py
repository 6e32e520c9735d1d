"""Drivers and clusters in processes of their own, and what they leave."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

GONE_SECS = 60.0

# A private cluster with a tuner and two slices, open until its stdin ends.
DRIVER = """
import json, os, sys
from tunerd.vocabulary import SliceRequest
from tunerd.cluster.ray_cluster import Cluster
from tunerd.cluster.nodes import TunerSpec, survey_here
with Cluster(address=None, run="test", cpus=2, gpus=0) as cluster:
    plan = survey_here(SliceRequest("cpu", 50)).plan
    cluster.start_tuners([TunerSpec("tuner-0", 1)], plan.target, 0)
    cluster.start_slices([(s, None) for s in plan.slices])
    cluster.give_tasks(())
    assert [a.error for a in cluster.answers(60)] == [""]
    (folder,) = {str(cluster._connection.folder.path)}
    print(json.dumps({"folder": folder, "token": os.environ["RAY_AUTH_TOKEN"]}), flush=True)
    sys.stdin.read()
"""

# A cluster of two nodes, open until its stdin ends.
TWO_NODES = """
import os, sys
from ray.cluster_utils import Cluster
os.makedirs(os.environ["RAY_TMPDIR"] + "/ray")
node = {"num_cpus": 2, "num_gpus": 0, "object_store_memory": 100 << 20}
head = Cluster(initialize_head=True, head_node_args=node)
head.add_node(**node)
print('{"address": "%s"}' % head.address, flush=True)
sys.stdin.read()
head.shutdown()
"""


TOKEN = "7" * 64  # of `two_nodes`


@dataclass(frozen=True)
class Child:
    """A Python process that has printed what it has to say."""

    process: subprocess.Popen[str]
    said: dict[str, Any]

    def family(self) -> list[psutil.Process]:
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]


@contextlib.contextmanager
def child(code: str, *arguments: str, **environment: str) -> Iterator[Child]:
    """Run Python code until the block ends; the code ends when its stdin does."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=clean_environment() | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        said = process.stdout.readline()
        assert said, f"the process ended with {process.wait(GONE_SECS)}"
        yield Child(process, json.loads(said))
    finally:
        process.stdin.close()
        process.wait(GONE_SECS)
        process.stdout.close()


@contextlib.contextmanager
def two_nodes() -> Iterator[Child]:
    """Two raylets on this machine, with a token, as `ray start` would make them."""
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with short_folder() as folder:
        with child(TWO_NODES, RAY_TMPDIR=str(folder), **environment) as found:
            family = found.family()
            yield found
        assert living(family) == []


def clean_environment() -> dict[str, str]:
    """Return our environment without what would tell Ray where to go."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "TUNERD_"))}


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """A folder whose path is short enough for the sockets in it; pytest's are not."""
    with tempfile.TemporaryDirectory(prefix="t-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def connections(process: psutil.Process) -> list[psutil._common.pconn]:
    """Return the sockets of a process; none of one that has just ended."""
    try:
        return list(process.net_connections("inet"))
    except psutil.Error:
        return []


def living(processes: list[psutil.Process]) -> list[str]:
    """Wait for processes to end, and describe those that do not."""
    _, alive = psutil.wait_procs(processes, timeout=GONE_SECS)
    return [f"{p.pid} {p.name()}" for p in alive if p.status() != psutil.STATUS_ZOMBIE]
