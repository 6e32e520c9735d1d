"""The GPU guard with a fake MPS daemon and fake runners, as real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lib import ROOT
from tests.lib.fake_mps import FakeMps, left
from tunerd.errors import HostError, InfrastructureError
from tunerd.slices.mps import guard_client as lease_module
from tunerd.slices.mps.control import MpsControl, client_environment
from tunerd.slices.mps.gpu import UNNAMED, Gpu, clean_orphan
from tunerd.slices.mps.gpu_runner import runner_environment
from tunerd.slices.mps.guard_client import Lease
from tunerd.slices.mps.log import LOG_NAME
from tunerd.system import wire
from tunerd.system.processes import ProcessId, with_children
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


def ancestors(pid: int) -> list[int]:
    found = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        found.append(pid)
    return found


def test_a_guard_is_no_descendant_of_the_process_that_started_it(bench: Bench) -> None:
    guard = bench.lease().guard_pid
    assert os.getpid() not in ancestors(guard)
    assert os.getsid(guard) != os.getsid(0)


def test_a_guard_starts_from_a_folder_whose_modules_have_names_of_pythons(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "types.py").write_text("raise RuntimeError('not the one of Python')\n")
    monkeypatch.chdir(tmp_path)
    assert identity(bench.lease().guard_pid).alive


def test_a_runner_gets_its_share_the_gpu_and_the_private_daemon(bench: Bench) -> None:
    _, _, environment = bench.runner(bench.lease(), pct=40)
    assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "40"
    assert environment["CUDA_VISIBLE_DEVICES"] == UUID
    pipe = str(lease_module.gpu_folder(UUID) / "pipe")
    assert environment["CUDA_MPS_PIPE_DIRECTORY"] == pipe


def test_folders_may_be_named_from_where_the_command_is_given(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = lease_module.private_folder()
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("TUNERD_RUNTIME_FOLDER", folder.name)
    bench.runner(bench.lease())
    assert lease_module.private_folder() == folder


def test_slices_of_one_run_share_a_guard(bench: Bench) -> None:
    assert bench.lease("run").guard_pid == bench.lease("run").guard_pid


def test_a_run_may_have_a_name_that_looks_like_an_option(bench: Bench) -> None:
    assert bench.lease("-x").request("state")["run"] == "-x"


def test_another_live_run_on_the_gpu_is_refused_by_the_pid_of_its_guard(bench: Bench) -> None:
    first = bench.lease("first")
    with pytest.raises(HostError, match=f"first.*guard pid {first.guard_pid}"):
        bench.lease("second")


def test_a_run_that_has_just_ended_is_waited_for(bench: Bench) -> None:
    first = bench.lease("first")
    first.close()
    assert bench.lease("second").guard_pid != first.guard_pid


def test_the_end_of_the_last_connection_ends_runner_daemon_and_guard(bench: Bench) -> None:
    lease = bench.lease()
    runner, connection, _ = bench.runner(lease)
    daemons = bench.daemons()
    assert len(daemons) == 1
    connection.close()
    lease.close()
    assert left([runner, *daemons, *bench.seen]) == []
    assert f"end {runner.pid}" in bench.mps.journal()  # by itself: nothing had to be terminated
    assert bench.mps.journal()[-1] == "quit with 0 clients"


def test_killing_the_process_that_holds_the_slices_leaves_nothing(bench: Bench) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, UUID, json.dumps(bench.mps.runner_command)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=runner_environment(),
    )
    assert holder.stdout is not None
    pids = json.loads(holder.stdout.readline())
    processes = [identity(pid) for pid in pids] + bench.daemons()
    assert len(processes) == 4  # guard, two runners, daemon
    bench.seen += processes
    holder.kill()
    holder.wait()
    assert left(processes) == []


_HOLDER = """
import json, sys, time
from tests.system.test_guard import connect, spec_for
from tunerd.slices.mps.guard_client import Lease
lease = Lease.acquire(sys.argv[1], "run", runner_command=tuple(json.loads(sys.argv[2])))
pids, connections = [lease.guard_pid], []
for slice_id, mode in (("mps-0-0", ""), ("mps-0-1", "hang")):
    answer = lease.request("start_runner", spec=spec_for(lease, slice_id, mode=mode))
    connections.append(connect(lease, answer["socket"], slice_id))
    connections[-1].recv(1)
    pids.append(answer["pid"])
print(json.dumps(pids), flush=True)
time.sleep(600)
"""


def test_a_hung_client_is_terminated_before_it_is_signalled_and_its_neighbour_lives(
    bench: Bench,
) -> None:
    lease = bench.lease()
    hung, _, _ = bench.runner(lease, "mps-0-0", mode="hang")
    neighbour, _, _ = bench.runner(lease, "mps-0-1")
    lease.request("fence", slice_id="mps-0-0", epoch=0, scope="runner", reason="hung")
    assert not hung.alive
    assert bench.mps.journal()[1:] == [f"terminate {hung.pid}", f"signal {hung.pid}"]
    assert neighbour.alive


def test_a_fault_stops_every_runner_of_the_gpu_once_and_names_who_reported_it(
    bench: Bench,
) -> None:
    lease = bench.lease()
    first, _, _ = bench.runner(lease, "mps-0-0")
    second, _, _ = bench.runner(lease, "mps-0-1")
    fault: dict[str, Any] = {"scope": "gpu", "reason": "illegal address", "epoch": 0}
    answer = lease.request("fence", slice_id="mps-0-0", **fault)
    assert answer == {"epoch": 1, "culprit": "mps-0-0", "reason": "illegal address"}
    assert not first.alive
    assert not second.alive
    again, _, _ = bench.runner(lease, "mps-0-0")
    assert lease.request("fence", slice_id="mps-0-1", **fault) == answer  # it fell with the first
    assert again.alive


def test_a_daemon_of_our_own_falls_with_the_clients_of_a_fault_and_is_replaced(
    bench: Bench,
) -> None:
    lease = bench.lease()
    bench.runner(lease, "mps-0-0", mode="hang")
    bench.runner(lease, "mps-0-1", mode="hang")
    (daemon,) = bench.daemons()
    lease.request("fence", slice_id="mps-0-0", scope="gpu", reason="illegal address", epoch=0)
    (successor,) = bench.daemons()
    assert successor != daemon
    # The end of the server is the end of its clients' work: none is terminated, none signalled.
    assert bench.mps.journal() == ["daemon start", "daemon start"]


def test_an_error_that_all_clients_get_blames_nobody_unless_the_server_or_being_alone_does(
    bench: Bench,
) -> None:
    lease = bench.lease()
    bench.runner(lease, "mps-0-0")
    bench.runner(lease, "mps-0-1")
    fault: dict[str, Any] = {"scope": "gpu", "reason": "misaligned", "shared": True}
    culprit = lease.request("fence", slice_id="mps-0-0", epoch=0, **fault)["culprit"]
    assert culprit == UNNAMED
    bench.runner(lease, "mps-0-0")
    culprit = lease.request("fence", slice_id="mps-0-0", epoch=1, **fault)["culprit"]
    assert culprit == "mps-0-0"


def test_who_worked_alone_has_the_fault_unless_somebody_else_ended(bench: Bench) -> None:
    lease = bench.lease()
    fault: dict[str, Any] = {"slice_id": "mps-0-0", "scope": "gpu", "reason": "misaligned"}
    fault |= {"shared": True, "alone": True}
    for epoch, ends, culprit in ((0, False, "mps-0-0"), (1, True, UNNAMED)):
        bench.runner(lease, "mps-0-0")
        neighbour, _, _ = bench.runner(lease, "mps-0-1")
        if ends:
            neighbour.signal(signal.SIGKILL)
            assert neighbour.wait(GONE_SECS)
        assert lease.request("fence", epoch=epoch, **fault)["culprit"] == culprit


def test_a_runner_that_fell_has_a_successor_before_its_slice_asks_for_one(bench: Bench) -> None:
    lease = bench.lease()
    fallen, _, _ = bench.runner(lease, "mps-0-0")
    fault: dict[str, Any] = {"scope": "gpu", "reason": "illegal address", "epoch": 0}
    lease.request("fence", slice_id="mps-0-0", **fault)
    (listed,) = lease.request("state")["runners"]
    successor = identity(listed["pid"])
    assert successor != fallen
    assert bench.runner(lease, "mps-0-0")[0] == successor
    lease.request("fence", slice_id="mps-0-0", **fault | {"epoch": 1})
    (listed,) = lease.request("state")["runners"]
    stale = identity(listed["pid"])
    other, _, _ = bench.runner(lease, "mps-0-0", pct=20)  # not what the successor has
    assert other != stale
    assert stale.wait(GONE_SECS)


def test_a_successor_that_nobody_has_asked_for_is_replaced_with_its_daemon(bench: Bench) -> None:
    lease = bench.lease()
    bench.runner(lease, "mps-0-0")
    bench.runner(lease, "mps-0-1")
    fault: dict[str, Any] = {"scope": "gpu", "reason": "illegal address"}
    lease.request("fence", slice_id="mps-0-0", epoch=0, **fault)
    early = [identity(r["pid"]) for r in lease.request("state")["runners"]]
    bench.runner(lease, "mps-0-0")
    lease.request("fence", slice_id="mps-0-0", epoch=1, **fault)
    later = [identity(r["pid"]) for r in lease.request("state")["runners"]]
    assert len(early) == len(later) == 2
    assert not any(process.alive for process in early)


def test_a_successor_that_nobody_asks_for_ends_with_the_guard(bench: Bench) -> None:
    lease = bench.lease()
    bench.runner(lease, "mps-0-0")
    fault: dict[str, Any] = {"scope": "gpu", "reason": "illegal address", "epoch": 0}
    lease.request("fence", slice_id="mps-0-0", **fault)
    (listed,) = lease.request("state")["runners"]
    successor = identity(listed["pid"])
    lease.close()
    assert left([successor]) == []


def told_by_the_server(pid: int) -> None:
    """Write what an MPS server of driver 580 writes of a fault, as if a client had met it."""
    folder = lease_module.gpu_folder(UUID) / "log"
    with (folder / LOG_NAME).open("a") as log:
        log.write(f"[Server 1] Client {{PID: {pid}, Context: 1}} encountered a fatal GPU error.\n")
        log.write("[Server 1] Server is handling a fatal GPU error.\n")
        log.write(f"[Server 1] Client {{PID: {pid}, Context ID: 1}} on device 0 to be torn down\n")


def wait_for_epoch(lease: Lease, epoch: int) -> None:
    deadline = time.monotonic() + GONE_SECS
    while lease.request("state")["epoch"] < epoch:
        assert time.monotonic() < deadline, "the guard did not fence the GPU"
        time.sleep(0.05)


def test_whose_runner_ends_in_a_fault_of_the_gpu_is_blamed_only_where_nobody_else_worked(
    bench: Bench,
) -> None:
    lease = bench.lease()
    fault: dict[str, Any] = {"slice_id": "mps-0-0", "scope": "gpu", "reason": "the runner ended"}
    for epoch, alone, culprit in ((0, False, UNNAMED), (1, True, "mps-0-0")):
        first, _, _ = bench.runner(lease, "mps-0-0")
        bench.runner(lease, "mps-0-1")
        told_by_the_server(first.pid)
        answer = lease.request("fence", epoch=epoch, alone=alone, **fault)
        assert answer["culprit"] == culprit


def test_a_fault_that_no_slice_reports_is_fenced_by_the_servers_log(bench: Bench) -> None:
    lease = bench.lease()
    culprit, _, _ = bench.runner(lease, "mps-0-0")
    neighbour, _, _ = bench.runner(lease, "mps-0-1")
    told_by_the_server(culprit.pid)
    wait_for_epoch(lease, 1)
    assert culprit.wait(GONE_SECS)
    assert neighbour.wait(GONE_SECS)
    answer = lease.request("fence", slice_id="mps-0-1", epoch=0, scope="gpu", reason="it ended")
    assert answer["culprit"] == UNNAMED
    again, _, _ = bench.runner(lease, "mps-0-0")
    assert again.alive


def test_a_fault_that_only_the_servers_status_tells_of_is_fenced_once(bench: Bench) -> None:
    lease = bench.lease()
    bench.runner(lease, "mps-0-0")
    bench.runner(lease, "mps-0-1")
    (lease_module.gpu_folder(UUID) / "pipe" / "fault").touch()
    wait_for_epoch(lease, 1)
    fault: dict[str, Any] = {"slice_id": "mps-0-0", "scope": "gpu", "reason": "no answer"}
    assert lease.request("fence", epoch=0, **fault)["culprit"] == UNNAMED
    # Whose slice worked alone may say so later.
    answer = lease.request("fence", epoch=0, alone=True, **fault)
    assert (answer["epoch"], answer["culprit"]) == (1, "mps-0-0")


def test_a_fault_that_the_server_tells_of_first_is_the_only_slices_own(bench: Bench) -> None:
    lease = bench.lease()
    bench.runner(lease, "mps-0-0")
    (lease_module.gpu_folder(UUID) / "pipe" / "fault").touch()
    wait_for_epoch(lease, 1)
    fault: dict[str, Any] = {"slice_id": "mps-0-0", "scope": "gpu", "reason": "no answer"}
    assert lease.request("fence", epoch=0, **fault)["culprit"] == "mps-0-0"


def test_a_log_that_comes_back_tells_of_no_fault_again(bench: Bench) -> None:
    log = lease_module.gpu_folder(UUID) / "log" / LOG_NAME
    lease = bench.lease()
    fallen, _, _ = bench.runner(lease, "mps-0-0")
    told_by_the_server(fallen.pid)
    moved = log.rename(log.with_suffix(".aside"))
    lease.request("fence", slice_id="mps-0-0", epoch=0, scope="gpu", reason="misaligned address")
    moved.rename(log)
    bench.runner(lease, "mps-0-0")
    culprit, _, _ = bench.runner(lease, "mps-0-1")
    told_by_the_server(culprit.pid)
    wait_for_epoch(lease, 2)
    answer = lease.request("fence", slice_id="mps-0-0", epoch=1, scope="gpu", reason="it ended")
    assert answer["epoch"] == 2


def test_a_killed_daemon_is_replaced_and_nobody_is_blamed(bench: Bench) -> None:
    lease = bench.lease()
    runner, _, _ = bench.runner(lease, "mps-0-0")
    (daemon,) = bench.daemons()
    daemon.signal(signal.SIGKILL)
    wait_for_epoch(lease, 1)
    assert runner.wait(GONE_SECS)
    answer = lease.request("fence", slice_id="mps-0-0", epoch=0, scope="gpu", reason="it ended")
    assert answer["culprit"] == "the MPS daemon"
    bench.runner(lease, "mps-0-0")
    (successor,) = bench.daemons()
    assert successor != daemon


def test_a_fence_without_the_pipe_folder_starts_the_daemon_and_the_runners_anew(
    bench: Bench,
) -> None:
    lease = bench.lease()
    first, _, _ = bench.runner(lease, "mps-0-0")
    second, _, _ = bench.runner(lease, "mps-0-1")
    (daemon,) = bench.daemons()
    shutil.rmtree(lease_module.gpu_folder(UUID) / "pipe")
    assert first.alive
    assert second.alive
    lease.request("fence", slice_id="mps-0-0", scope="gpu", reason="illegal address", epoch=0)
    assert left([first, second, daemon]) == []
    for slice_id in ("mps-0-0", "mps-0-1"):
        runner, _, _ = bench.runner(lease, slice_id)
        assert lease.request("attached", pid=runner.pid) == {"attached": True}


def test_a_daemon_that_no_new_client_finds_is_replaced_before_the_next_runner(bench: Bench) -> None:
    lease = bench.lease()
    neighbour, _, _ = bench.runner(lease, "mps-0-0")
    (daemon,) = bench.daemons()
    shutil.rmtree(lease_module.gpu_folder(UUID) / "pipe")
    assert neighbour.alive
    runner, _, _ = bench.runner(lease, "mps-0-1")
    assert lease.request("attached", pid=runner.pid) == {"attached": True}
    assert left([neighbour, daemon]) == []
    answer = lease.request("fence", slice_id="mps-0-0", epoch=0, scope="gpu", reason="it ended")
    assert answer["culprit"] == "the MPS daemon"


def test_a_hung_client_that_no_daemon_can_terminate_falls_with_all_of_its_gpu(
    bench: Bench,
) -> None:
    lease = bench.lease()
    hung, _, _ = bench.runner(lease, "mps-0-0", mode="hang")
    neighbour, _, _ = bench.runner(lease, "mps-0-1")
    shutil.rmtree(lease_module.gpu_folder(UUID) / "pipe")
    answer = lease.request("fence", slice_id="mps-0-0", epoch=0, scope="runner", reason="hung")
    assert answer["epoch"] == 1  # it was killed with its work: so were its neighbours
    assert left([hung, neighbour]) == []
    runner, _, _ = bench.runner(lease, "mps-0-0")
    assert lease.request("attached", pid=runner.pid) == {"attached": True}


def test_nothing_is_left_of_a_gpu_whose_pipe_folder_was_deleted(bench: Bench) -> None:
    lease = bench.lease()
    runner, connection, _ = bench.runner(lease)
    daemons = bench.daemons()
    shutil.rmtree(lease_module.gpu_folder(UUID) / "pipe")
    connection.close()
    lease.close()
    assert left([runner, *daemons, *bench.seen]) == []


def test_who_gives_a_daemon_commands_is_no_daemon(bench: Bench) -> None:
    folder = lease_module.private_folder() / "external"
    folder.mkdir()
    outside = MpsControl(folder, folder, UUID)
    outside.start()
    environment = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": str(folder)}
    front_end = subprocess.Popen(
        ["nvidia-cuda-mps-control"], env=environment, stdin=subprocess.PIPE
    )
    try:
        (daemon,) = outside.processes()
        assert daemon.pid != front_end.pid
    finally:
        outside.quit()
        front_end.kill()
        front_end.communicate()


def test_a_process_is_found_with_its_children() -> None:
    command = "sleep 600 & echo $!; wait"
    with subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = identity(int(parent.stdout.readline()))
        found = with_children([identity(parent.pid)])
        assert set(found) == {identity(parent.pid), child}
        for process in found:
            process.signal(signal.SIGKILL)
        assert child.wait(GONE_SECS)
    assert with_children(found) == []


def test_a_slice_that_starts_again_replaces_its_runner(bench: Bench) -> None:
    former = bench.lease()
    old, _, _ = bench.runner(former, mode="hang")
    lease = bench.lease()
    new, _, _ = bench.runner(lease)
    assert not old.alive
    former.close()  # its drain must not take the new runner
    bench.runner(lease, "mps-0-1")
    assert lease.request("state")["leases"] >= 1
    assert new.alive


def test_what_a_killed_guard_left_is_cleaned_up_by_the_next(bench: Bench) -> None:
    lease = bench.lease()
    runner, _, _ = bench.runner(lease, mode="hang")
    (daemon,) = bench.daemons()
    identity(lease.guard_pid).signal(signal.SIGKILL)
    assert identity_or_none_waits(lease.guard_pid)
    assert runner.alive
    assert daemon.alive
    with pytest.raises(InfrastructureError, match="is gone"):
        lease.request("state")
    successor = bench.lease()
    assert successor.guard_pid != lease.guard_pid
    assert not runner.alive
    assert not daemon.alive
    assert bench.mps.journal()[1:3] == [f"terminate {runner.pid}", f"signal {runner.pid}"]
    bench.runner(successor)


def identity_or_none_waits(pid: int) -> bool:
    process = ProcessId.of(pid)
    return process is None or process.wait(GONE_SECS)


def test_a_recycled_pid_in_an_orphans_state_is_left_alone(bench: Bench) -> None:
    folder = lease_module.gpu_folder(UUID)
    bystander = subprocess.Popen(["sleep", "600"])
    state = {
        "epoch": 0,
        "external": False,
        "pipe_folder": str(folder / "pipe"),
        "runners": [{"pid": bystander.pid, "start_ticks": 1}],
    }
    (folder / "state.json").write_text(json.dumps(state))
    clean_orphan(folder, UUID)
    assert bystander.poll() is None
    assert not (folder / "state.json").exists()
    bystander.kill()
    bystander.wait()


def test_a_client_that_the_server_lists_late_is_attached(bench: Bench) -> None:
    lease = bench.lease()
    bench.runner(lease, "mps-0-0")
    late, _, _ = bench.runner(lease, "mps-0-1")
    pipe = lease_module.gpu_folder(UUID) / "pipe"
    (pipe / "late").write_bytes(b"...")
    assert lease.request("attached", pid=late.pid) == {"attached": True}
    assert (pipe / "late").read_bytes() == b""


def test_the_client_list_says_whether_a_runner_is_attached(bench: Bench) -> None:
    lease = bench.lease()
    runner, _, _ = bench.runner(lease)
    assert lease.request("attached", pid=runner.pid) == {"attached": True}
    assert lease.request("attached", pid=1) == {"attached": False}


def test_the_guard_knows_what_is_its_own_also_what_has_ended(bench: Bench) -> None:
    lease = bench.lease()
    first, connection, _ = bench.runner(lease, "mps-0-0")
    second, _, _ = bench.runner(lease, "mps-0-1")
    (daemon,) = bench.daemons()
    own = lease.request("own", slice_id="mps-0-0")
    assert (own["runners"], own["neighbours"]) == (2, 1)
    assert set(own["pids"]) == {first.pid, second.pid, daemon.pid}
    connection.close()
    assert first.wait(GONE_SECS)
    lease.request("stop_runner", slice_id="mps-0-0")
    later = lease.request("own", slice_id="mps-0-1")
    assert (later["runners"], later["neighbours"]) == (1, 0)
    assert first.pid in later["pids"]


def test_pids_of_another_namespace_make_attachment_unknown_rather_than_wrong(
    bench: Bench,
) -> None:
    lease = bench.lease()
    runner, _, _ = bench.runner(lease)
    (lease_module.gpu_folder(UUID) / "pipe" / "other-namespace").touch()
    assert lease.request("attached", pid=runner.pid) == {"attached": None}


def test_a_runner_that_ends_at_once_is_reported_with_what_it_printed(bench: Bench) -> None:
    lease = bench.lease()
    lease.request("start_runner", spec=spec_for(lease, "mps-0-0", mode="crash"))
    while (runner := lease.request("runner", slice_id="mps-0-0"))["exit_status"] is None:
        pass
    assert runner == {"exit_status": 1, "log": "cannot load the CUDA driver"}


def test_an_external_daemon_is_used_and_never_stopped(bench: Bench) -> None:
    folder = lease_module.private_folder() / "external"
    folder.mkdir()
    outside = MpsControl(folder, folder, UUID)
    with pytest.raises(HostError, match="no MPS daemon answers"):
        bench.lease(external=folder)
    outside.start()
    try:
        lease = bench.lease(external=folder)
        with pytest.raises(HostError, match="in use by the run"):  # the same, by another daemon
            bench.lease()
        runner, connection, environment = bench.runner(lease)
        assert environment["CUDA_MPS_PIPE_DIRECTORY"] == str(folder)
        # Other people's clients may have the fault, however alone a slice is among ours.
        fault = {"slice_id": "mps-0-0", "scope": "gpu", "reason": "misaligned", "shared": True}
        assert lease.request("fence", epoch=0, alone=True, **fault)["culprit"] == UNNAMED
        assert f"terminate {runner.pid}" in bench.mps.journal()
        connection.close()
        lease.close()
        assert runner.wait(GONE_SECS)
        assert identity_or_none_waits(lease.guard_pid)
        assert outside.answers()
    finally:
        outside.quit()


def test_a_private_folder_that_others_can_enter_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    monkeypatch.setenv("TUNERD_RUNTIME_FOLDER", str(shared))
    with pytest.raises(HostError, match="only you can enter"):
        lease_module.private_folder()


@pytest.mark.parametrize("place", ["missing/r", "file", "file/r", "dangling"])
def test_a_private_folder_that_cannot_be_made_is_refused_with_the_name_of_its_variable(
    place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    monkeypatch.setenv("TUNERD_RUNTIME_FOLDER", str(tmp_path / place))
    with pytest.raises(HostError, match=f"{place}.*TUNERD_RUNTIME_FOLDER"):
        lease_module.private_folder()


def test_a_file_in_the_place_of_a_gpus_folder_is_named(bench: Bench) -> None:
    folder = lease_module.gpu_folder(UUID)
    folder.rmdir()
    folder.touch()
    with pytest.raises(HostError, match=f"{folder.name}.*TUNERD_RUNTIME_FOLDER"):
        lease_module.gpu_folder(UUID)
    folder.unlink()


def test_a_folder_too_deep_for_a_socket_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("d" * 100)
    monkeypatch.setenv("TUNERD_RUNTIME_FOLDER", str(deep))
    with pytest.raises(HostError, match="too long"):
        lease_module.gpu_folder(UUID)


def test_no_runner_is_started_for_a_name_that_is_a_path(tmp_path: Path) -> None:
    gpu = Gpu(UUID, tmp_path, run="run")
    with pytest.raises(ValueError, match="none that a guard can start"):
        gpu.start_runner(SliceSpec("../x", "mps", 40))


def test_no_runner_is_started_with_another_share_than_its_slices(bench: Bench) -> None:
    lease = bench.lease()
    fields = spec_for(lease, "mps-0-0", pct=50) | {"pct": 40}
    with pytest.raises(InfrastructureError, match="THREAD_PERCENTAGE=50, and its runner needs 40"):
        lease.request("start_runner", spec=fields)
