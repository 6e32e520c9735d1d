"""MPS slices and whole GPUs on a real GPU, with the real daemon and the real runner."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from tests.lib.build_fixtures import (
    built,
    conv_task,
    default_of,
    doubling,
    faulty_compiler,
    matmul_task,
)
from tests.lib.stranger import stranger_on
from tunerd.builder.build import build_candidate
from tunerd.cluster.actor_bodies import SliceActor
from tunerd.cluster.ray_cluster import Cluster
from tunerd.doctor.checks import Status, check
from tunerd.errors import HostError, InfrastructureError
from tunerd.runner.sampling import DEAD
from tunerd.runs.finals.quiet_slice import Finals, QuietSlice
from tunerd.slices import plan
from tunerd.slices.mps.control import MpsControl, clean_environment
from tunerd.slices.mps.gpu_runner import runner_environment
from tunerd.slices.mps.guard_client import gpu_folder
from tunerd.slices.mps.mps_slice import MpsSlice, expected_sms, run_name
from tunerd.slices.whole import WholeSlice
from tunerd.system import gpus
from tunerd.system.gpus import GpuFacts
from tunerd.system.host import MPS_CONTROL
from tunerd.system.processes import ProcessId
from tunerd.vocabulary import (
    SEARCH,
    Build,
    Conditions,
    Failure,
    Kind,
    Measurement,
    SliceRequest,
    SliceSpec,
    Stage,
)

pytestmark = pytest.mark.gpu

GONE_SECS = 60.0
PROMISED_SECS = 15.0  # after which nothing is left, README
NOBODY = 65534


@pytest.fixture
def gpu(mps_gpu: GpuFacts) -> Iterator[GpuFacts]:
    """The first GPU; afterwards nothing of ours may be left on it."""
    yield mps_gpu
    folder = gpu_folder(mps_gpu.uuid)
    assert gone(MpsControl(folder / "pipe", folder / "log", mps_gpu.uuid).processes())
    assert list(folder.glob("mps-*.sock*")) == []


def gone(processes: list[ProcessId]) -> bool:
    return all(process.wait(PROMISED_SECS) for process in processes)


def specs(gpu: GpuFacts, pct: int, count: int) -> list[SliceSpec]:
    plan = MpsSlice.plan(SliceRequest("mps", pct, per_device=count))
    assert plan.problem == ""
    return [spec for spec in plan.slices if spec.gpu_uuid == gpu.uuid]


def guard_of(measured: MpsSlice) -> ProcessId:
    assert measured._lease is not None
    guard = ProcessId.of(measured._lease.guard_pid)
    assert guard is not None
    return guard


def test_cuda_tells_the_sizes_that_are_known(gpu: GpuFacts) -> None:
    assert gpus.sms_and_l2(gpu.uuid) == (gpu.sm_count, gpu.l2_bytes)


@pytest.mark.parametrize(("pct", "count"), [(40, 2), (10, 1)])
def test_each_slice_obtains_its_share_side_by_side(gpu: GpuFacts, pct: int, count: int) -> None:
    slices = [MpsSlice(spec) for spec in specs(gpu, pct, count)]
    try:
        proofs = [measured.prove() for measured in slices]
        guard = guard_of(slices[0])
    finally:
        for measured in slices:
            measured.close()
    assert gpu.sm_count is not None
    for proof in proofs:
        assert proof.sm_count == expected_sms(gpu.sm_count, pct)
        assert proof.device_sm_count == gpu.sm_count
        assert proof.attached
    assert gone([guard])


def test_slices_that_were_begun_early_obtain_their_shares(gpu: GpuFacts) -> None:
    planned = specs(gpu, 40, 2)
    deadline = time.monotonic() + GONE_SECS
    with contextlib.ExitStack() as stack:
        stack.enter_context(MpsSlice.early(planned, run_name()))
        while not (gpu_folder(gpu.uuid) / "guard.sock").exists():  # or they would start another
            assert time.monotonic() < deadline, "no guard was started early"
            time.sleep(0.1)
        slices = [stack.enter_context(MpsSlice(spec)) for spec in planned]
        proofs = [measured.prove() for measured in slices]
        guard = guard_of(slices[0])
    assert gpu.sm_count is not None
    assert {proof.sm_count for proof in proofs} == {expected_sms(gpu.sm_count, 40)}
    assert gone([guard])


def test_the_server_lists_the_runner_as_its_client(gpu: GpuFacts) -> None:
    (spec,) = specs(gpu, 40, 1)
    with MpsSlice(spec) as measured:
        proof = measured.prove()
        guard = guard_of(measured)
        assert measured._lease is not None
        answer = measured._lease.request("attached", pid=proof.runner_pid)
        # null would do for the proof, but this driver and pid namespace must be able to tell.
        assert answer == {"attached": True}
    assert gone([guard])


def test_conditions_are_read_from_the_gpu(gpu: GpuFacts) -> None:
    conditions = gpus.conditions(gpu.uuid)
    assert conditions.sm_clock_mhz
    assert conditions.temperature_c
    assert conditions.power_w


def test_a_slice_goes_on_after_its_neighbour_was_fenced_alone(gpu: GpuFacts) -> None:
    first, second = (MpsSlice(spec) for spec in specs(gpu, 40, 2))
    with first, second:
        first.prove()
        neighbour = ProcessId.of(second.prove().runner_pid)
        first.launch()._lose("timed out")
        assert neighbour is not None
        assert neighbour.alive
        assert first.prove().attached
        guard = guard_of(first)
    assert gone([guard])


def test_new_clients_attach_after_the_gpu_was_fenced(gpu: GpuFacts) -> None:
    first, second = (MpsSlice(spec) for spec in specs(gpu, 40, 2))
    with first, second:
        first.prove()
        fallen = ProcessId.of(second.prove().runner_pid)
        # Its neighbour works on nothing.
        first.launch()._lose(f"CUDA_ERROR_ILLEGAL_ADDRESS{DEAD}", is_alone=True)
        assert fallen is None or not fallen.alive
        blame = second.launch()._lose("the runner ended")
        assert blame.culprit == first.spec.slice_id
        assert first.prove().attached
        assert second.prove().attached
        guard = guard_of(first)
    assert gone([guard])


class Actors:
    """Two slices as the finals call them, without Ray between."""

    def __init__(self, planned: list[SliceSpec]) -> None:
        self.of = {spec.slice_id: SliceActor(None) for spec in planned}
        for spec in planned:
            self.of[spec.slice_id].start(spec)

    def call(self, slice_id: str, method: str, *arguments: Any) -> Any:
        return getattr(self.of[slice_id], method)(*arguments)

    def call_all(self, asked: list[tuple[str, str, tuple[Any, ...]]]) -> list[Any]:
        return [self.call(slice_id, method, *arguments) for slice_id, method, arguments in asked]

    def close(self) -> None:
        for slice_id in self.of:
            self.call(slice_id, "close")


@pytest.mark.parametrize("neighbours", ["none", "busy"])
def test_a_finalist_that_faults_is_named_and_costs_the_others_nothing(
    gpu: GpuFacts, neighbours: str
) -> None:
    planned = specs(gpu, 25, 3)
    default, sound = (
        doubling(plan(SliceRequest("mps", 25)).target),
        doubling(plan(SliceRequest("mps", 25)).target, "sound"),
    )
    with faulty_compiler('asm volatile("trap;");'):
        trap = doubling(plan(SliceRequest("mps", 25)).target, "trap")
    actors = Actors(planned)
    try:
        first, *others = (spec.slice_id for spec in planned)
        finals = Finals(neighbours=neighbours)
        quiet = QuietSlice(cast(Cluster, actors), first, tuple(others), finals)
        ((one, fault, other),) = quiet.compare([[default, trap, sound]])
        failure = quiet.agree(default, trap)
    finally:
        actors.close()
    assert isinstance(one, Measurement), one
    assert isinstance(other, Measurement), other
    assert isinstance(fault, Failure)
    assert fault.kind is Kind.CRASH
    assert failure is not None
    assert failure.kind is Kind.CRASH


def test_a_finalist_that_computes_something_else_is_refused(gpu: GpuFacts) -> None:
    target = plan(SliceRequest("mps", 40)).target
    right, wrong = (
        built(build_candidate(task, default_of(task)))
        for task in (matmul_task(target), matmul_task(target, after="negative"))
    )
    (spec,) = specs(gpu, 40, 1)
    with MpsSlice(spec) as measured:
        assert measured.launch().agree(right, right) is None
        failure = measured.launch().agree(right, wrong)
        (after,) = measured.launch().measure([right], SEARCH)
    assert failure is not None
    assert (failure.stage, failure.kind) == (Stage.VERIFY, Kind.WRONG_ANSWER)
    assert isinstance(after, Measurement)


def conditions_of(measured: MpsSlice, kernel: Build) -> Conditions:
    (result,) = measured.launch().measure([kernel], SEARCH)
    assert isinstance(result, Measurement), result
    return result.conditions


def test_a_stranger_is_seen_while_it_is_on_the_gpu(gpu: GpuFacts) -> None:
    if gpu.compute_mode != "default":
        pytest.skip(f"GPU {gpu.index} is {gpu.compute_mode}: no stranger can come beside MPS")
    task = conv_task(MpsSlice.plan(SliceRequest("mps", 40, per_device=1)).target)
    kernel = built(build_candidate(task, default_of(task)))
    (spec,) = specs(gpu, 40, 1)
    with MpsSlice(spec) as measured:
        measured.prove()
        guard = guard_of(measured)
        before = conditions_of(measured, kernel)
        with stranger_on(gpu.uuid):
            beside = conditions_of(measured, kernel)
        after = conditions_of(measured, kernel)
    assert gone([guard])
    assert (before.disturbed_by, before.strangers or 0) == ("", 0)
    assert "of others" in beside.disturbed_by or "held by others" in beside.disturbed_by
    assert (beside.strangers is None) == (before.strangers is None)  # the list told both or none
    assert (after.disturbed_by, after.strangers or 0) == ("", 0)


_HOLDER = """
import json, sys, time
from tunerd.slices.mps.mps_slice import MpsSlice
from tunerd.vocabulary import SliceSpec
slices, pids = [], []
for fields in json.loads(sys.argv[1]):
    slices.append(MpsSlice(SliceSpec.from_json(fields)))
    pids.append(slices[-1].prove().runner_pid)
print(json.dumps([slices[0]._lease.guard_pid, *pids]), flush=True)
time.sleep(600)
"""


def test_killing_the_process_that_holds_the_slices_leaves_nothing(gpu: GpuFacts) -> None:
    fields = [dataclasses.asdict(spec) for spec in specs(gpu, 40, 2)]
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, json.dumps(fields)],
        env=runner_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    processes = [ProcessId.of(pid) for pid in json.loads(holder.stdout.readline())]
    folder = gpu_folder(gpu.uuid)
    daemons = MpsControl(folder / "pipe", folder / "log", gpu.uuid).processes()
    assert len(daemons) == 2  # control and server
    holder.kill()
    holder.wait()
    assert gone([process for process in processes if process is not None])
    assert gone(daemons)


def test_the_next_slice_cleans_up_after_a_killed_guard(gpu: GpuFacts) -> None:
    (spec,) = specs(gpu, 40, 1)
    with MpsSlice(spec) as measured:
        orphan = ProcessId.of(measured.prove().runner_pid)
        killed = guard_of(measured)
        killed.signal(signal.SIGKILL)
        assert gone([killed])
        with MpsSlice(spec) as successor:
            assert successor.prove().attached
            guard = guard_of(successor)
            assert orphan is not None
            assert not orphan.alive
    assert gone([guard])


def test_an_external_daemon_is_used_and_stays(
    gpu: GpuFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = MpsControl(tmp_path / "pipe", tmp_path / "log", gpu.uuid)
    daemon.start()
    try:
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(daemon.pipe_folder))
        (spec,) = MpsSlice.plan(SliceRequest("mps", 40, per_device=1, mps="external")).slices
        with MpsSlice(spec) as measured:
            proof = measured.prove()
            guard = guard_of(measured)
        assert gone([guard])
        assert gpu.sm_count is not None
        assert proof.attached
        assert proof.sm_count == expected_sms(gpu.sm_count, 40)
        assert daemon.answers()
    finally:
        daemon.quit()


def daemon_that_gives_less(folder: Path, gpu: GpuFacts) -> MpsControl:
    """Start a daemon that is told to give each client 10% of the GPU."""
    daemon = MpsControl(folder / "pipe", folder / "log", gpu.uuid)
    daemon.start()
    daemon._run("set_default_active_thread_percentage 10")
    return daemon


def daemon_of_another_user(folder: Path, gpu: GpuFacts) -> MpsControl:
    if os.geteuid() != 0:
        pytest.skip("only root can start a daemon as somebody else")
    daemon = MpsControl(folder / "pipe", folder / "log", gpu.uuid)
    for inside in (daemon.pipe_folder, daemon.log_folder):
        inside.mkdir()
        os.chown(inside, NOBODY, NOBODY)
    environment = clean_environment() | {
        "CUDA_MPS_PIPE_DIRECTORY": str(daemon.pipe_folder),
        "CUDA_MPS_LOG_DIRECTORY": str(daemon.log_folder),
    }
    command = [MPS_CONTROL, "-d"]
    ids = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    subprocess.run(command, env=environment, cwd="/", check=True, timeout=GONE_SECS, **ids)  # type: ignore[call-overload]
    return daemon


@pytest.mark.parametrize("begin", [daemon_that_gives_less, daemon_of_another_user])
def test_under_a_strange_daemon_a_slice_is_refused(
    gpu: GpuFacts, monkeypatch: pytest.MonkeyPatch, begin: Callable[[Path, GpuFacts], MpsControl]
) -> None:
    assert gpu.sm_count is not None
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # which others may enter
        Path(folder).chmod(0o755)
        daemon = begin(Path(folder), gpu)
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(daemon.pipe_folder))
        try:
            (spec,) = MpsSlice.plan(SliceRequest("mps", 40, per_device=1, mps="external")).slices
            with (
                MpsSlice(spec) as measured,
                pytest.raises((HostError, InfrastructureError)) as refused,
            ):
                measured.prove()
            print(f"refused: {refused.value}")
        finally:
            daemon.quit()


def test_without_the_external_daemon_nothing_starts(
    gpu: GpuFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    (spec,) = MpsSlice.plan(SliceRequest("mps", 40, per_device=1, mps="external")).slices
    with MpsSlice(spec) as measured, pytest.raises(HostError, match="no MPS daemon answers"):
        measured.prove()


def test_a_whole_slice_sees_every_sm_and_no_daemon(gpu: GpuFacts) -> None:
    plan = WholeSlice.plan(SliceRequest("whole", 100))
    with WholeSlice(plan.slices[0]) as measured:
        proof = measured.prove()
    assert proof.sm_count == proof.device_sm_count == gpu.sm_count
    assert proof.mechanism == "none"


def test_doctor_shows_the_cap_at_work(gpu: GpuFacts) -> None:
    (slice_finding,) = [f for f in check() if f.name == f"slice of 40% of GPU {gpu.index}"]
    assert gpu.sm_count is not None
    assert slice_finding.status is Status.OK
    assert f"{expected_sms(gpu.sm_count, 40)} of {gpu.sm_count} SMs" in slice_finding.fact
