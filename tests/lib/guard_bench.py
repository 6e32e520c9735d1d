"""A GPU guard with a fake MPS daemon and fake runners, as real processes."""

from __future__ import annotations

import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lib.fake_mps import FakeMps
from tunerd.slices.mps import guard_client as lease_module
from tunerd.slices.mps.control import MpsControl, client_environment
from tunerd.slices.mps.guard_client import Lease
from tunerd.system import wire
from tunerd.system.processes import ProcessId
from tunerd.vocabulary import SliceSpec, to_json

UUID = "GPU-11111111-2222-3333-4444-555555555555"
GONE_SECS = 60.0  # a bound for the tests' patience, no statement about speed


class Bench:
    """What a test needs: leases, runners, and the processes behind them."""

    def __init__(self, folder: Path) -> None:
        self.mps = FakeMps(folder)
        self._leases: list[Lease] = []
        self._connections: list[socket.socket] = []  # a runner ends with its connection
        self.seen: list[ProcessId] = []

    def lease(self, run: str = "run", *, external: Path | None = None) -> Lease:
        command = self.mps.runner_command
        lease = Lease.acquire(UUID, run, external=external, runner_command=command)
        self._leases.append(lease)
        self.seen.append(identity(lease.guard_pid))
        return lease

    def runner(
        self, lease: Lease, slice_id: str = "mps-0-0", *, pct: int = 40, mode: str = ""
    ) -> tuple[ProcessId, socket.socket, dict[str, str]]:
        """Start a runner and connect to it, as a slice does; returns what it has as environment."""
        answer = lease.request("start_runner", spec=spec_for(lease, slice_id, pct=pct, mode=mode))
        connection = connect(lease, answer["socket"], slice_id)
        environment, _ = wire.receive(connection)
        process = identity(answer["pid"])
        self.seen.append(process)
        self._connections.append(connection)
        return process, connection, environment

    def daemons(self) -> list[ProcessId]:
        folder = lease_module.gpu_folder(UUID)
        return MpsControl(folder / "pipe", folder / "log", UUID).processes()

    def close(self) -> None:
        for held in (*self._connections, *self._leases):
            held.close()
        for process in self.seen:
            process.signal(signal.SIGTERM)
            process.wait(GONE_SECS)
        for process in self.daemons():
            process.signal(signal.SIGKILL)


def spec_for(lease: Lease, slice_id: str, *, pct: int = 40, mode: str = "") -> dict[str, Any]:
    """Return a slice as planned for the daemon of a lease, and how its fake runner behaves."""
    pipe_folder = Path(lease.request("state")["pipe_folder"])
    environment = client_environment(pipe_folder, UUID, pct) | {"FAKE_MODE": mode}
    spec = SliceSpec(slice_id, "mps", pct, environment=tuple(environment.items()))
    document: dict[str, Any] = to_json(spec)
    return document


def identity(pid: int) -> ProcessId:
    process = ProcessId.of(pid)
    assert process is not None, f"pid {pid} has ended"
    return process


def connect(lease: Lease, path: str, slice_id: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(GONE_SECS)
    while True:
        try:
            connection.connect(path)
            return connection
        except OSError:
            assert lease.request("runner", slice_id=slice_id)["exit_status"] is None


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    folder = Path(tempfile.mkdtemp(prefix="tunerd-test-", dir="/tmp"))  # short, for socket paths
    bench = Bench(folder)
    monkeypatch.setenv("PATH", bench.mps.path)
    monkeypatch.setenv("TUNERD_RUNTIME_FOLDER", str(folder / "r"))
    yield bench
    bench.close()
    shutil.rmtree(folder)


def wait_for_epoch(lease: Lease, epoch: int) -> None:
    deadline = time.monotonic() + GONE_SECS
    while lease.request("state")["epoch"] < epoch:
        assert time.monotonic() < deadline, "the guard did not fence the GPU"
        time.sleep(0.05)
