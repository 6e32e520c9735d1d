"""MPS daemons that fell, that were left behind, or that are somebody else's, and the guard."""
# ruff: noqa: F811  fixtures are arguments

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess

import pytest

from tests.lib.fake_mps import left
from tests.lib.guard_bench import GONE_SECS, UUID, Bench, bench, identity, wait_for_epoch  # noqa: F401  fixtures
from tunerd.errors import HostError, InfrastructureError
from tunerd.slices.mps import control
from tunerd.slices.mps import guard_client as lease_module
from tunerd.slices.mps.control import MpsControl
from tunerd.slices.mps.gpu import UNNAMED, clean_orphan
from tunerd.system.processes import ProcessId


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


def hanging(times: int) -> MpsControl:
    """Return a daemon of no guard, which hangs so many times before it begins."""
    folder = lease_module.private_folder() / "external"
    folder.mkdir()
    (folder / "hangs").write_bytes(b"x" * times)
    return MpsControl(folder, folder, UUID)


def test_a_daemon_that_hangs_when_it_begins_is_begun_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_TRY_SECS", (0.5, GONE_SECS))
    outside = hanging(1)
    outside.start()
    try:
        assert outside.answers()
    finally:
        outside.quit()


def test_a_daemon_that_always_hangs_is_an_error_and_leaves_no_process(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_TRY_SECS", (0.5, 0.5))
    outside = hanging(2)
    with pytest.raises(InfrastructureError, match="hung 2 times, for 1 s in all"):
        outside.start()
    assert not outside.processes()


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
