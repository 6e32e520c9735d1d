"""The GPU guard with a fake MPS daemon and fake runners: who shares it, and how it ends."""
# ruff: noqa: F811  fixtures are arguments

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lib import ROOT
from tests.lib.fake_mps import left
from tests.lib.guard_bench import GONE_SECS, UUID, Bench, bench, identity, spec_for  # noqa: F401  fixtures
from tunerd.errors import HostError
from tunerd.slices.mps import guard_client as lease_module
from tunerd.slices.mps.gpu_runner import runner_environment
from tunerd.system.processes import with_children


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
from tests.lib.guard_bench import connect, spec_for
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
