"""MpsSlice with a fake MPS daemon and fake runners, as real processes."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.lib.fake_mps import FakeMps, left
from tests.lib.fake_nvml import FakeNvml
from tests.lib.ray_processes import Child, child
from tests.lib.waiting import until
from tunerd.cluster.actor_bodies import SliceActor
from tunerd.errors import HostError
from tunerd.runner import client
from tunerd.runner.base import ALONE, UNKNOWN
from tunerd.slices.mps import mps_slice
from tunerd.slices.mps.control import MpsControl, client_environment
from tunerd.slices.mps.guard_client import Lease, gpu_folder
from tunerd.slices.mps.log import LOG_NAME
from tunerd.slices.mps.mps_slice import MpsSlice
from tunerd.system import gpus
from tunerd.system.processes import ProcessId
from tunerd.vocabulary import (
    METASCHEDULE,
    SEARCH,
    Build,
    Candidate,
    Failure,
    Kind,
    Measurement,
    SliceSpec,
)

UUID = "GPU-11111111-2222-3333-4444-555555555555"
GONE_SECS = 60.0  # a bound for the tests' patience
NOT_READY = "CUDA_ERROR_MPS_SERVER_NOT_READY"
FACTS = {
    "device": "NVIDIA H200",
    "sm_count": 52,
    "device_sm_count": 132,
    "mps_enabled": True,
    "compute_capability": "9.0",
}

Make = Callable[..., MpsSlice]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMps]:
    folder = Path(tempfile.mkdtemp(prefix="tunerd-test-", dir="/tmp"))  # short, for socket paths
    fake = FakeMps(folder)
    monkeypatch.setenv("PATH", fake.path)
    monkeypatch.setenv("TUNERD_RUNTIME_FOLDER", str(folder / "r"))
    acquire = functools.partial(Lease.acquire, runner_command=fake.runner_command)
    monkeypatch.setattr(mps_slice.Lease, "acquire", acquire)
    early = functools.partial(mps_slice.guarded_early, runner_command=fake.runner_command)
    monkeypatch.setattr(mps_slice, "guarded_early", early)
    monkeypatch.setattr(gpus, "visible_gpus", lambda: ((), "no GPU in this test"))
    yield fake
    shutil.rmtree(folder)


@pytest.fixture
def make(fake: FakeMps) -> Iterator[Make]:
    """Makes slices; afterwards closes them and waits until their guard has ended."""
    made: list[MpsSlice] = []

    def make_slice(position: int = 0, *, refusal: str = NOT_READY, **facts: object) -> MpsSlice:
        environment = environment_of(FACTS | facts) | {"FAKE_REFUSAL": refusal}
        spec = SliceSpec(
            slice_id=f"mps-0-{position}",
            kind="mps",
            pct=40,
            gpu_uuid=UUID,
            environment=tuple(environment.items()),
        )
        made.append(MpsSlice(spec))
        return made[-1]

    yield make_slice
    guards = [ProcessId.of(s._lease.guard_pid) for s in made if s._lease is not None]
    for measured in made:
        measured.close()
    for guard in filter(None, guards):
        guard.signal(signal.SIGTERM)
        assert guard.wait(GONE_SECS)


def environment_of(facts: dict[str, object]) -> dict[str, str]:
    """Return what a runner of the GPU gets, and what its fake tells of itself."""
    return {
        **client_environment(gpu_folder(UUID) / "pipe", UUID, 40),
        "FAKE_MODE": "slice",
        "FAKE_FACTS": json.dumps(facts),
    }


def build(library: bytes = b"fine") -> Build:
    candidate = Candidate("task", "candidate", METASCHEDULE)
    return Build(candidate, library, "", 0.0, (), (), "nvrtc")


def identity(pid: int) -> ProcessId:
    process = ProcessId.of(pid)
    assert process is not None
    return process


def test_a_slice_proves_its_cap_inside_its_client_and_measures(make: Make) -> None:
    measured = make()
    proof = measured.prove()
    assert (proof.sm_count, proof.device_sm_count, proof.attached) == (52, 132, True)
    (result,) = measured.launch().measure([build()], SEARCH)
    assert isinstance(result, Measurement)
    assert (result.sm_count, result.conditions.neighbours) == (52, 0)


def test_a_slice_that_was_begun_early_takes_the_runner_that_waits_for_it(make: Make) -> None:
    early, late = make(0), make(1)
    with MpsSlice.early([early.spec], mps_slice.run_name()):
        lease = waiting_lease()
        (waits,) = lease.request("state")["runners"]
        assert early.prove().runner_pid == waits["pid"]
        assert late.prove().runner_pid != waits["pid"]
    lease.close()
    (result,) = early.launch().measure([build()], SEARCH)  # what it has is its own
    assert isinstance(result, Measurement)


def waiting_lease() -> Lease:
    """Wait until a guard has started the runners that it expects."""
    until((gpu_folder(UUID) / "guard.sock").exists)  # or this would start one itself
    lease = Lease.acquire(UUID, mps_slice.run_name())
    until(lambda: lease.request("state")["runners"], every=0.1)
    return lease


def test_nothing_is_left_of_slices_that_were_begun_early_and_never_started(make: Make) -> None:
    with MpsSlice.early([make().spec], mps_slice.run_name()):
        lease = waiting_lease()
        (waits,) = lease.request("state")["runners"]
        processes = [identity(waits["pid"]), identity(lease.guard_pid)]
        lease.close()
    assert left(processes) == []


def test_a_client_that_runs_without_the_cap_is_refused(make: Make) -> None:
    with pytest.raises(HostError, match="sees 132 SMs"):
        make(sm_count=132).prove()


def test_a_client_that_gets_less_than_its_share_is_refused(make: Make) -> None:
    with pytest.raises(HostError, match=r"its client sees 12 SMs .* where 52 of 132 SMs"):
        make(sm_count=12).prove()


def test_a_second_slice_is_a_neighbour(make: Make) -> None:
    first, second = make(0), make(1)
    first.prove()
    second.prove()
    (result,) = first.launch().measure([build()], SEARCH)
    assert isinstance(result, Measurement)
    assert result.conditions.neighbours == 1


def test_a_process_that_is_not_of_the_run_disturbs_until_it_ends(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, neighbour = make(0), make(1)
    ours = [each.prove().runner_pid for each in (measured, neighbour)]
    nvml = FakeNvml()
    monkeypatch.setattr(gpus, "nvml_library", lambda: (nvml, ""))
    for others in ([], [os.getpid()], []):
        nvml.through_mps = [*ours, *others]
        (result,) = measured.launch().measure([build()], SEARCH)
        assert isinstance(result, Measurement)
        assert result.conditions.strangers == len(others)
        assert result.conditions.is_disturbed == bool(others)


def test_closing_the_last_slice_leaves_no_runner_no_daemon_and_no_guard(make: Make) -> None:
    measured = make()
    runner = identity(measured.prove().runner_pid)
    assert measured._lease is not None
    guard = identity(measured._lease.guard_pid)
    folder = gpu_folder(UUID)
    (daemon,) = MpsControl(folder / "pipe", folder / "log", UUID).processes()
    measured.close()
    measured.close()
    assert not runner.alive
    assert left([guard]) == []
    assert not daemon.alive
    assert [path.name for path in folder.glob("*.sock*")] == ["guard.sock"]


def test_a_hung_kernel_is_a_timeout_and_the_next_build_gets_a_new_runner(
    make: Make, fake: FakeMps, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, neighbour = make(0), make(1)
    hung = identity(measured.prove().runner_pid)
    beside = identity(neighbour.prove().runner_pid)
    monkeypatch.setattr(client, "BUILD_SECS", 2.0)
    failure, result = measured.launch().measure([build(b"hang"), build()], SEARCH)
    assert isinstance(failure, Failure)
    assert failure.kind is Kind.TIMEOUT
    assert isinstance(result, Measurement)
    assert not hung.alive
    assert beside.alive
    journal = fake.journal()
    assert journal.index(f"terminate {hung.pid}") < journal.index(f"signal {hung.pid}")


def test_a_builds_time_begins_when_it_does_and_not_in_the_queue(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "KNOWN_SECS", 2.0)
    measured = make(0)
    measured.prove()
    slow = [build(b"slow")] * 3  # 1 s each
    results = measured.launch().measure(slow, SEARCH, best_secs=[1e-6] * len(slow))
    assert all(isinstance(result, Measurement) for result in results)


def test_a_crash_fences_the_gpu_and_the_neighbours_build_is_collateral(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    culprit, neighbour = make(0), make(1)
    culprit.prove()
    neighbour.prove()
    (failure,) = culprit.launch().measure([build(b"crash")], SEARCH)
    assert isinstance(failure, Failure)
    assert failure.kind is Kind.CRASH
    (collateral,) = neighbour.launch().measure([build()], SEARCH)
    assert isinstance(collateral, Failure)
    assert collateral.kind is Kind.COLLATERAL
    assert "mps-0-0" in collateral.message
    for each in (culprit, neighbour):
        (result,) = each.launch().measure([build()], SEARCH)
        assert isinstance(result, Measurement)


@pytest.mark.parametrize("library", [b"killed", b"terminated", b"no daemon"])
def test_what_somebody_else_did_to_a_runner_is_not_its_builds_fault(
    make: Make, library: bytes
) -> None:
    measured = make()
    failure, result = measured.launch().measure([build(library), build()], SEARCH)
    assert isinstance(failure, Failure)
    assert failure.kind is Kind.COLLATERAL
    assert isinstance(result, Measurement)


def test_a_crash_in_a_fault_that_the_server_tells_of_is_not_its_builds_fault(make: Make) -> None:
    reporter, neighbour = make(0), make(1)
    pid = reporter.prove().runner_pid
    neighbour.prove()
    log = gpu_folder(UUID) / "log" / LOG_NAME
    log.write_text(f"Client {{PID: {pid}, Context: 1}} encountered a fatal GPU error.\n")
    (collateral,) = reporter.launch().measure([build(b"crash")], SEARCH)
    assert isinstance(collateral, Failure)
    assert collateral.kind is Kind.COLLATERAL


def test_an_error_of_all_clients_is_a_builds_own_where_its_slice_works_alone(make: Make) -> None:
    one, other = make(0), make(1)
    for is_alone, kind in ((False, Kind.COLLATERAL), (True, Kind.CRASH)):
        other.launch().measure([build()], SEARCH)  # it lives, and is idle
        company = ALONE if is_alone else UNKNOWN
        (failure,) = one.launch().measure([build(b"misaligned")], SEARCH, company=company)
        assert isinstance(failure, Failure)
        assert failure.kind is kind
        assert ("some client of the GPU" in failure.message) != is_alone


def test_what_an_actor_is_asked_next_is_not_alone(make: Make) -> None:
    actor = SliceActor(None)
    other, asked = make(1), (build(b"misaligned"),)
    actor.start(make(0).spec)
    for company, kind in ((ALONE, Kind.CRASH), (UNKNOWN, Kind.COLLATERAL)):
        other.launch().measure([build(), build()], SEARCH)  # it lives, and is idle
        (failure,) = actor.measure(asked, SEARCH, (), company).value
        assert failure.kind is kind
    actor.close()


def refuse(times: int) -> None:
    (gpu_folder(UUID) / "pipe" / "refused").write_bytes(b"." * times)


def nobody_was_stopped(fake: FakeMps) -> bool:
    """Say whether the daemon lives on, and its clients ended by themselves if they ended."""
    begun, *others = fake.journal()
    return begun == "daemon start" and all(line.startswith("end ") for line in others)


def test_a_slice_waits_for_a_server_that_recovers_and_its_neighbour_lives(
    make: Make, fake: FakeMps
) -> None:
    measured, neighbour = make(0), make(1)
    beside = identity(neighbour.prove().runner_pid)
    refuse(2)
    assert measured.prove().sm_count == 52
    assert beside.alive
    assert nobody_was_stopped(fake)


def test_a_daemon_whose_server_takes_no_clients_any_more_is_replaced(
    make: Make, fake: FakeMps, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, neighbour = make(0, refusal="CUDA_ERROR_NO_DEVICE"), make(1)
    measured.prove()
    neighbour.prove()
    monkeypatch.setattr(client, "RECOVERY_SECS", 4.0)
    (failure,) = measured.launch().measure([build(b"misaligned")], SEARCH)
    assert isinstance(failure, Failure)
    refuse(1000)
    for each in (measured, neighbour):
        result = each.launch().measure([build(), build()], SEARCH)[-1]
        assert isinstance(result, Measurement)
    # At first, for the fault, and for the refusals.
    assert fake.journal().count("daemon start") == 3


def test_a_slice_that_never_had_its_share_is_refused_at_once_and_harms_nobody(
    make: Make, fake: FakeMps
) -> None:
    measured, neighbour = make(0, refusal="CUDA_ERROR_NO_DEVICE"), make(1)
    beside = identity(neighbour.prove().runner_pid)
    refuse(2)
    with pytest.raises(HostError, match="cannot run: RuntimeError: CUDA: CUDA_ERROR_NO_DEVICE"):
        measured.prove()
    with pytest.raises(HostError, match="NO_DEVICE"):  # and not a fault of what it is to measure
        measured.launch().measure([build()], SEARCH)
    (result,) = measured.launch().measure([build()], SEARCH)
    assert isinstance(result, Measurement)
    assert beside.alive
    assert nobody_was_stopped(fake)


def test_a_slice_survives_the_death_of_its_guard(make: Make) -> None:
    measured = make()
    runner = identity(measured.prove().runner_pid)
    assert measured._lease is not None
    guard = identity(measured._lease.guard_pid)
    guard.signal(signal.SIGKILL)
    assert guard.wait(GONE_SECS)
    (failure,) = measured.launch().measure([build(b"crash")], SEARCH)
    assert isinstance(failure, Failure)
    assert failure.kind is Kind.COLLATERAL  # nobody can tell any more what the build did
    (result,) = measured.launch().measure([build()], SEARCH)
    assert isinstance(result, Measurement)
    assert not runner.alive


# --- the pipe folder is deleted ----------------------------------------------------------------


def delete_pipe_folder() -> None:
    shutil.rmtree(gpu_folder(UUID) / "pipe")


@pytest.mark.parametrize("library", [b"crash", b"misaligned", b"killed", b"hang"])
def test_slices_without_their_pipe_folder_go_on_and_a_fault_brings_a_new_daemon(
    make: Make, fake: FakeMps, monkeypatch: pytest.MonkeyPatch, library: bytes
) -> None:
    one, other = make(0), make(1)
    before = {s.prove().runner_pid for s in (one, other)}
    delete_pipe_folder()
    for each in (one, other):
        (result,) = each.launch().measure([build()], SEARCH)
        assert isinstance(result, Measurement)
    monkeypatch.setattr(client, "BUILD_SECS", 2.0)
    monkeypatch.setattr(client, "KNOWN_SECS", 2.0)
    (failure,) = one.launch().measure([build(library)], SEARCH)
    assert isinstance(failure, Failure)
    for each in (one, other):
        # The first may tell of the fault.
        result = each.launch().measure([build(), build()], SEARCH)[-1]
        assert isinstance(result, Measurement)
        assert result.sm_count == FACTS["sm_count"]
        assert each.prove() is not None
        assert each.prove().attached
        assert each.prove().runner_pid not in before
    assert fake.journal().count("daemon start") == 2


def test_a_slice_that_starts_without_the_pipe_folder_has_its_share_under_a_new_daemon(
    make: Make, fake: FakeMps
) -> None:
    one, late = make(0), make(1)
    one.prove()
    delete_pipe_folder()
    assert late.prove().sm_count == FACTS["sm_count"]
    assert fake.journal().count("daemon start") == 2
    first, second = one.launch().measure([build(), build()], SEARCH)
    assert isinstance(first, Failure)
    assert first.kind is Kind.COLLATERAL  # its runner fell with the old daemon
    assert isinstance(second, Measurement)


def test_a_slice_whose_daemon_lost_its_pipes_alone_is_refused(make: Make) -> None:
    one, late = make(0), make(1)
    one.prove()
    (gpu_folder(UUID) / "pipe" / "control").unlink()
    with pytest.raises(HostError, match="did not obtain its 40%: its client runs without MPS"):
        late.prove()
    (result,) = one.launch().measure([build()], SEARCH)
    assert isinstance(result, Measurement)


# --- the actor is killed -----------------------------------------------------------------------

# A cluster with two slices of a GPU, of which the second is in a kernel that does not end. It kills
# the actor that each line names.
_CLUSTER = """
import functools, json, sys
from tunerd.cluster import ray_cluster, slice_actors
from tunerd.cluster.actor_bodies import SliceActor
from tunerd.slices.mps import mps_slice
from tunerd.slices.mps.guard_client import Lease
from tunerd.vocabulary import Build, Candidate, METASCHEDULE, SEARCH, SliceSpec
gpu_uuid, command, environment = (json.loads(argument) for argument in sys.argv[1:])
class OverFakes(SliceActor):
    def start(self, spec):
        mps_slice.Lease.acquire = functools.partial(Lease.acquire, runner_command=tuple(command))
        return super().start(spec)
slice_actors.SliceActor = OverFakes
specs = [
    SliceSpec(f"mps-0-{i}", "mps", 40, gpu_uuid=gpu_uuid, environment=tuple(environment.items()))
    for i in range(2)
]
hang = Build(Candidate("task", "candidate", METASCHEDULE), b"hang", "", 0.0, (), (), "nvrtc")
with ray_cluster.Cluster(address=None, run="test", cpus=1, gpus=1) as cluster:
    proofs = cluster.start_slices([(spec, None) for spec in specs])
    under_way = cluster._slices.actors["mps-0-1"].measure.remote((hang,), SEARCH)
    print(json.dumps({"runners": [p.runner_pid for p in proofs]}), flush=True)
    for line in sys.stdin:
        cluster._ray.kill(cluster._slices.actors[line.strip()])
"""


@contextlib.contextmanager
def cluster_of(fake: FakeMps) -> Iterator[tuple[Child, list[ProcessId]]]:
    """A driver, and its idle runner, the one in a kernel without end, the daemon and the guard."""
    environment = environment_of(FACTS)
    arguments = [json.dumps(argument) for argument in (UUID, fake.runner_command, environment)]
    runtime = os.environ["TUNERD_RUNTIME_FOLDER"]
    with child(_CLUSTER, *arguments, TUNERD_RUNTIME_FOLDER=runtime) as driver:
        idle, hung = (identity(pid) for pid in driver.said["runners"])
        deadline = time.monotonic() + GONE_SECS
        while f"hang {hung.pid}" not in fake.journal():
            assert time.monotonic() < deadline, "the kernel was not started"
            time.sleep(0.1)
        folder = gpu_folder(UUID)
        guard = identity(json.loads((folder / "state.json").read_text())["guard"]["pid"])
        (daemon,) = MpsControl(folder / "pipe", folder / "log", UUID).processes()
        yield driver, [idle, hung, daemon, guard]


def test_no_runner_and_no_daemon_is_left_of_slices_whose_actors_ray_kills(fake: FakeMps) -> None:
    with cluster_of(fake) as (driver, (idle, hung, daemon, guard)):
        kill_actor(driver, "mps-0-0")
        assert left([idle]) == []
        assert all(process.alive for process in (hung, daemon, guard))
        kill_actor(driver, "mps-0-1")
        assert left([hung, daemon, guard]) == []
        assert driver.process.poll() is None
    journal = fake.journal()
    assert f"end {idle.pid}" in journal  # by itself: nothing had to be terminated
    assert journal.index(f"terminate {hung.pid}") < journal.index(f"signal {hung.pid}")


@pytest.mark.parametrize("victim", ["driver", "raylet"])
def test_no_runner_and_no_daemon_is_left_after_a_kill(fake: FakeMps, victim: str) -> None:
    with cluster_of(fake) as (driver, processes):
        process = psutil.Process(driver.process.pid)
        if victim == "raylet":
            (process,) = (p for p in process.children(recursive=True) if p.name() == "raylet")
        process.kill()
        assert left(processes) == []


def kill_actor(driver: Child, slice_id: str) -> None:
    assert driver.process.stdin is not None
    driver.process.stdin.write(f"{slice_id}\n")
    driver.process.stdin.flush()
