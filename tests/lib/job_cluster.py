"""A Ray cluster of two nodes with a job server, as `ray start` makes one, and jobs in it.

Its dashboard is on 127.0.0.1; it asks for a token and lives in a folder of its own. All its
processes have that token in their environment, and whatever has it is killed at the end, whoever
its parent is.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.lib import PYTHON_PATH
from tests.lib.ray_processes import GONE_SECS, child, clean_environment, short_folder

RAY = (sys.executable, "-m", "ray.scripts.scripts")
LOOPBACK = "127.0.0.1"
START_SECS = 120.0
END_SECS = 240.0  # of a job
TRIES = 3  # a port that was free a moment ago may be taken
# What each node gives a driver and its actors. A tuner holds a CPU: each node gets one.
NODE = ("--num-cpus=1", "--num-gpus=0", f"--object-store-memory={80 << 20}", "--block")
_LOG = "nodes.log"
_SERVE = "from tests.lib import job_cluster; job_cluster.serve()"


@dataclass(frozen=True)
class JobCluster:
    """A cluster that is up. `url` is its job server's, `address` is for drivers."""

    url: str
    address: str
    token: str
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """What a client of this cluster needs."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}

    def job(
        self, command: str, *arguments: str, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run `ray job ...` as a person would."""
        return subprocess.run(
            [*RAY, "job", command, f"--address={self.url}", *arguments],
            env=clean_environment() | self.environment | environment,
            capture_output=True,
            text=True,
            timeout=END_SECS,
        )

    def submit(self, entrypoint: str, runtime_env: Mapping[str, Any] | None = None) -> Job:
        """Submit a job to the server, without Ray's client, and do not wait for it."""
        return Job(
            self,
            str(
                self.get("/api/jobs/", entrypoint=entrypoint, runtime_env=runtime_env or {})[
                    "submission_id"
                ]
            ),
        )

    def get(self, path: str, **body: Any) -> Any:
        """Return what the server answers, to a POST where there is a body."""
        request = urllib.request.Request(
            f"{self.url}{path}",
            data=json.dumps(body).encode() if body else None,
            headers={"Authorization": f"Bearer {self.token}"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)


@dataclass(frozen=True)
class Job:
    """A job that was submitted."""

    cluster: JobCluster
    job_id: str

    @property
    def details(self) -> dict[str, Any]:
        found: dict[str, Any] = self.cluster.get(f"/api/jobs/{self.job_id}")
        return found

    @property
    def log(self) -> str:
        return str(self.cluster.get(f"/api/jobs/{self.job_id}/logs")["logs"])

    @property
    def ended(self) -> bool:
        return self.details["status"] in ("SUCCEEDED", "FAILED", "STOPPED")

    def end(self) -> dict[str, Any]:
        """Wait for the end, and return the job's details."""
        deadline = time.monotonic() + END_SECS
        while not self.ended:
            assert time.monotonic() < deadline, self.log
            time.sleep(0.2)
        return self.details

    def driver(self) -> psutil.Process:
        """Return the process that runs `tunerd`, and not its shell."""
        for process in _with_token(self.cluster.token):
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                is_ours = self.job_id in process.environ().get("RAY_JOB_CONFIG_JSON_ENV_VAR", "")
                if is_ours and words[1:4] == ["-m", "tunerd", "tune"]:
                    return process
        raise AssertionError(f"{self.job_id} has no driver")


@contextlib.contextmanager
def job_cluster() -> Iterator[JobCluster]:
    """Start a cluster, and leave nothing of it."""
    token = secrets.token_hex(32)
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": PYTHON_PATH,
    }
    with short_folder() as folder:
        try:
            with child(_SERVE, str(folder), **environment) as cluster:
                yield JobCluster(token=token, folder=folder, **cluster.said)
        finally:
            kill_all(token)


def serve() -> None:
    """Start the nodes, say where they are, and end them when stdin ends."""
    folder, token = Path(sys.argv[1]), os.environ["RAY_AUTH_TOKEN"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        for left in reversed(range(TRIES)):
            try:
                print(json.dumps(_started(folder / f"{left}")), flush=True)
                break
            except RuntimeError:
                kill_all(token, but=os.getpid())
                if not left:
                    raise
        sys.stdin.read()
    finally:
        kill_all(token, but=os.getpid())


def _started(folder: Path) -> dict[str, str]:
    gcs, dashboard, client = free_port(), free_port(), free_port()
    address, url = f"{LOOPBACK}:{gcs}", f"http://{LOOPBACK}:{dashboard}"
    head = ("--head", f"--port={gcs}", f"--dashboard-port={dashboard}", f"--temp-dir={folder}")
    head += (f"--dashboard-host={LOOPBACK}", f"--ray-client-server-port={client}")
    nodes = [_node(folder, *head)]
    _wait(nodes, folder / _LOG, lambda: _nodes_alive(url) == 1)
    nodes.append(_node(folder, f"--address={address}"))
    _wait(nodes, folder / _LOG, lambda: _nodes_alive(url) == 2)
    return {"url": url, "address": address}


def _node(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    own = (f"--node-ip-address={LOOPBACK}", f"--dashboard-agent-listen-port={free_port()}")
    folder.mkdir(exist_ok=True)
    with (folder / _LOG).open("ab") as log:
        return subprocess.Popen([*RAY, "start", *options, *own, *NODE], stdout=log, stderr=log)


def _wait(nodes: list[subprocess.Popen[bytes]], log: Path, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_SECS
    while True:
        with contextlib.suppress(OSError, KeyError, ValueError):  # not up yet
            if condition():
                return
        if any(n.poll() is not None for n in nodes) or time.monotonic() > deadline:
            raise RuntimeError(f"a node did not start: {log.read_text()[-2000:]}")
        time.sleep(0.1)


def _nodes_alive(url: str) -> int:
    cluster = JobCluster(url, "", os.environ["RAY_AUTH_TOKEN"], Path())
    nodes = cluster.get("/nodes?view=summary")["data"]["summary"]
    return sum(n["raylet"]["state"] == "ALIVE" for n in nodes)


def free_port() -> int:
    with socket.socket() as one:
        one.bind((LOOPBACK, 0))
        return int(one.getsockname()[1])


# --- what is left ------------------------------------------------------------------------------


def kill_all(token: str, but: int = 0) -> None:
    """Kill whatever has a cluster's token in its environment, until nothing is left."""
    deadline = time.monotonic() + GONE_SECS
    while left := [p for p in _with_token(token) if p.pid not in (but, os.getpid())]:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=5)
        assert time.monotonic() < deadline, left


def _with_token(token: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # ended meanwhile, or another user's
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and process.environ().get("RAY_AUTH_TOKEN") == token:
                found.append(process)
    return found
