"""Faults of a GPU: which runners the guard stops and starts again, and who is blamed."""
# ruff: noqa: F811  fixtures are arguments

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tests.lib.fake_mps import left
from tests.lib.guard_bench import GONE_SECS, UUID, Bench, bench, identity, wait_for_epoch  # noqa: F401  fixtures
from tests.lib.waiting import until
from tunerd.slices.mps import guard_client as lease_module
from tunerd.slices.mps.gpu import UNNAMED
from tunerd.slices.mps.log import LOG_NAME


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


def test_the_server_of_each_daemon_is_started_before_a_client_comes(bench: Bench) -> None:
    lease = bench.lease()
    mark = Path(lease.request("state")["pipe_folder"]) / f"server-of-{os.getuid()}"
    seen = set()
    for epoch in range(2):
        (daemon,) = bench.daemons()
        until(lambda pid=daemon.pid: mark.exists() and mark.read_text() == str(pid))
        seen.add(daemon.pid)
        lease.request("fence", slice_id="mps-0-0", scope="gpu", reason="it ended", epoch=epoch)
    assert len(seen) == 2


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
