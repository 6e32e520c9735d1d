"""The private Ray cluster: who can reach it, what it writes, and what is left of it."""

from __future__ import annotations

import contextlib
import http.client
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import psutil
import pytest

from tests.lib.models import conv_net
from tests.lib.ray_processes import (
    DRIVER,
    Child,
    child,
    clean_environment,
    connections,
    living,
    short_folder,
)
from tunerd.cluster import ray_cluster
from tunerd.cluster.actor_bodies import WorkerReply
from tunerd.cluster.connection import gpu_ids
from tunerd.cluster.nodes import TunerSpec, survey_here
from tunerd.cluster.ray_cluster import Cluster
from tunerd.cluster.ray_environment import Environment, RayFolder, sentence
from tunerd.coordinator.events import BuildThem
from tunerd.errors import ExitCode, HostError, InfrastructureError
from tunerd.frontend.kernels import kernels_of
from tunerd.frontend.model import read_model
from tunerd.records import Store
from tunerd.system.signals import Stop
from tunerd.vocabulary import (
    Build,
    SliceRequest,
    SliceSpec,
    TrialState,
    default_candidate,
)

SIMULATED = SliceSpec("simulated-0-0", "simulated", 50)


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def driver(home: Path) -> Iterator[Child]:
    """A driver with a private cluster, a tuner and CPU slices, at an empty home."""
    with (
        short_folder() as runtime,
        child(DRIVER, HOME=str(home), TUNERD_RUNTIME_FOLDER=str(runtime)) as found,
    ):
        yield found


@dataclass(frozen=True)
class Closed:
    """A driver that has ended by itself, and what it had and left."""

    said: dict[str, Any]
    names: set[str]
    exit_code: int
    living: list[str]
    files: list[Path]


@pytest.fixture(scope="module")
def closed() -> Closed:
    """A driver without a home, which is told of a cluster that is not there."""
    elsewhere = {"HOME": "/proc/nowhere", "RAY_ADDRESS": "127.0.0.1:1"}
    with short_folder() as runtime:
        with child(DRIVER, TUNERD_RUNTIME_FOLDER=str(runtime), **elsewhere) as found:
            family = found.family()
            names = {p.name() for p in family}
        left = living(family)
        return Closed(found.said, names, found.process.returncode, left, [*runtime.iterdir()])


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with short_folder() as folder:
        monkeypatch.setenv("TUNERD_RUNTIME_FOLDER", str(folder))
        yield folder


# --- who can reach it --------------------------------------------------------------------------


def test_every_socket_of_every_process_is_on_loopback(driver: Child) -> None:
    open_sockets = [
        connection
        for process in driver.family()
        for connection in connections(process)
        if connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM
    ]
    addresses = {c.laddr.ip.removeprefix("::ffff:") for c in open_sockets if c.laddr}
    assert len(open_sockets) >= 5  # of the GCS, the raylet, the driver and the workers
    assert addresses == {"127.0.0.1"}


def test_the_token_is_in_no_file_and_on_no_command_line(driver: Child, home: Path) -> None:
    token = driver.said["token"].encode()
    assert len(token) == 64
    files = [p for p in Path(driver.said["folder"]).rglob("*") if p.is_file()]
    assert any(p.name.startswith("raylet") for p in files)
    assert [p for p in files if token in p.read_bytes()] == []
    assert [p for p in driver.family() if token.decode() in " ".join(p.cmdline())] == []


def test_no_dashboard_answers_and_no_usage_is_reported(driver: Child) -> None:
    # With the packages of the job server installed an agent listens, and asks for the token.
    for port in {
        c.laddr.port
        for p in driver.family()
        for c in connections(p)
        if c.status == psutil.CONN_LISTEN
    }:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/api/version",
            headers={"Authorization": f"Bearer {driver.said['token']}"},
        )
        with contextlib.suppress(OSError, http.client.HTTPException):
            said = urllib.request.urlopen(request, timeout=5).read()
            assert b"ray_version" not in said
    raylet = next(p for p in driver.family() if p.name() == "raylet")
    assert raylet.environ()["RAY_USAGE_STATS_ENABLED"] == "0"


def test_the_object_store_is_small(driver: Child) -> None:
    raylet = next(p for p in driver.family() if p.name() == "raylet")
    (size,) = {a for a in raylet.cmdline() if a.startswith("--object_store_memory=")}
    assert int(size.partition("=")[2]) <= 256 << 20


# --- what it writes ----------------------------------------------------------------------------


def test_nothing_is_written_to_the_home(driver: Child, home: Path) -> None:
    assert list(home.iterdir()) == []


def test_it_starts_where_the_home_cannot_be_written(closed: Closed) -> None:
    assert closed.said["token"]


def test_ray_s_address_in_the_environment_is_not_followed(closed: Closed) -> None:
    assert "gcs_server" in closed.names


def test_a_runtime_folder_too_long_for_sockets_is_refused_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * 60)
    monkeypatch.setenv("TUNERD_RUNTIME_FOLDER", str(folder))
    with pytest.raises(HostError, match="too long for the paths of Ray's sockets"):
        RayFolder()


# --- what is left ------------------------------------------------------------------------------


def test_close_leaves_no_process_and_no_folder(closed: Closed) -> None:
    assert "raylet" in closed.names
    assert closed.exit_code == 0
    assert closed.living == []
    assert closed.files == []


def test_a_killed_driver_leaves_no_process_and_its_folder_goes_with_the_next_start(
    runtime: Path,
) -> None:
    with child(DRIVER, TUNERD_RUNTIME_FOLDER=str(runtime)) as driver:
        family = driver.family()
        driver.process.send_signal(signal.SIGKILL)
        assert living(family) == []
    (dead,) = runtime.iterdir()
    RayFolder().close()
    assert not dead.exists()


def test_a_living_driver_keeps_its_folder_when_another_one_starts(runtime: Path) -> None:
    first = RayFolder()
    code = "from tunerd.cluster.ray_environment import RayFolder; RayFolder().close()"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert first.path.exists()
    first.close()
    assert list(runtime.iterdir()) == []


def test_a_folder_that_its_driver_had_no_time_to_lock_goes_once_it_is_old(runtime: Path) -> None:
    old, new = runtime / "new-old", runtime / "new-new"
    old.mkdir()
    new.mkdir()
    os.utime(old, (0, 0))
    RayFolder().close()
    assert list(runtime.iterdir()) == [new]


# --- signals; of Ctrl-C, test_session.py -------------------------------------------------------


@pytest.mark.nightly
def test_a_signal_to_stop_drains_the_run_and_the_same_command_goes_on(
    runtime: Path, tmp_path: Path
) -> None:
    model, out = tmp_path / "tiny.onnx", tmp_path / "run"
    onnx.save(conv_net(), model)
    command = [sys.executable, "-m", "tunerd", "tune", str(model), "--out", str(out)]
    command += ["--cpu-pct", "50", "--slice", "simulated"]
    environment = clean_environment() | {"TUNERD_RUNTIME_FOLDER": str(runtime)}
    run = subprocess.Popen(
        [*command, "--budget", "1h"], env=environment, start_new_session=True, stderr=-1, text=True
    )
    while not ended(out):
        assert run.poll() is None
        time.sleep(0.1)
    family = psutil.Process(run.pid).children(recursive=True)
    run.terminate()
    _, said = run.communicate(timeout=300)
    assert run.returncode == ExitCode.INTERRUPTED, said
    assert "the same command goes on" in said
    assert "lost" not in said
    assert living(family) == []
    with Store.read(out) as store:
        states = {r.state for r in store.records()}
        before = len([r for r in store.records() if r.state is TrialState.MEASURED])
    assert TrialState.RUNNING not in states
    again = subprocess.run(
        [*command, "--trials", "1"], env=environment, capture_output=True, text=True, timeout=300
    )
    assert again.returncode < 10, again.stderr
    with Store.read(out) as store:
        after = [r for r in store.records() if r.state is TrialState.MEASURED]
    assert len(after) >= before


def test_a_signal_before_anything_has_started_ends_a_run_as_any_other(
    runtime: Path, tmp_path: Path
) -> None:
    model = tmp_path / "tiny.onnx"
    onnx.save(conv_net(), model)
    # The signal comes as soon as the program can take it: before the model is read.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, tunerd.system.signals as stop\n"
        "class Early(stop.Stop):\n"
        "    def __enter__(self):\n"
        "        entered = super().__enter__()\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        return entered\n"
        "stop.Stop = Early\n"
    )
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    out = tmp_path / "run"
    command = [sys.executable, "-m", "tunerd", "tune", str(model), "--out", str(out)]
    done = subprocess.run(
        [*command, "--cpu-pct", "50", "--slice", "simulated"],
        env=clean_environment() | {"TUNERD_RUNTIME_FOLDER": str(runtime), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == ExitCode.INTERRUPTED, done.stderr
    assert list(runtime.iterdir()) == []


def ended(out: Path) -> int:
    """Return how many search trials of a run have ended, 0 while there is no store."""
    if not (out / "store.sqlite").exists():
        return 0
    try:
        with Store.read(out) as store:
            return sum(r.result is not None and not r.candidate.is_default for r in store.records())
    except Exception:  # half made
        return 0


def test_the_first_signal_is_noted_and_the_second_interrupts() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Stop() as stop:
        assert not stop.requested
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_first_signal_is_answered_at_once_and_from_another_thread() -> None:
    said: queue.Queue[int] = queue.Queue()
    with Stop(lambda: said.put(threading.get_ident())):
        signal.raise_signal(signal.SIGINT)
        assert said.get(timeout=30) != threading.get_ident()


# --- workers -----------------------------------------------------------------------------------


def test_ray_does_not_take_the_signal_handlers_of_the_run(runtime: Path) -> None:
    with Stop() as stop, Cluster(address=None, run="test", cpus=1, gpus=0):
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested


def test_a_signal_to_stop_is_noted_after_ray_has_ended(runtime: Path) -> None:
    with Stop() as stop:
        with Cluster(address=None, run="test", cpus=1, gpus=0):
            pass
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested


def test_a_tuner_without_a_free_cpu_is_an_error_that_says_what_is_free(runtime: Path) -> None:
    target = survey_here(SliceRequest("simulated", 50)).plan.target
    with Cluster(address=None, run="test", cpus=1, gpus=0, ready_secs=0.0) as cluster:
        cluster.start_tuners([TunerSpec("tuner-0", 1), TunerSpec("tuner-1", 1)], target, 0)
        cluster.give_tasks(())
        answers = {a.worker_id: a for a in cluster.answers(0)}
    assert "not ready after" in answers["tuner-1"].error
    assert "of 1 CPUs" in answers["tuner-1"].error


def test_a_slice_without_a_free_gpu_is_an_error_that_says_what_is_free(runtime: Path) -> None:
    spec = SliceSpec("mps-0-0", "mps", 40, gpu_uuid="GPU-none")
    with (
        Cluster(address=None, run="test", cpus=1, gpus=0, place_secs=1.0) as cluster,
        pytest.raises(
            InfrastructureError,
            match=r"mps-0-0: not ready after 1 s; free .* 0 of 0 GPUs",
        ),
    ):
        cluster.start_slices([(spec, None)])


def test_slices_are_placed_on_the_gpus_that_they_were_planned_on(runtime: Path) -> None:
    # Ray fills one GPU before it opens the next; one slice of each is asked for at a time.
    first, second = (
        [
            (SliceSpec(f"mps-{i}-{n}", "simulated", 40, device_index=i, gpu_uuid=f"GPU-{i}"), None)
            for i in (1, 0)
        ]
        for n in range(2)
    )
    with Cluster(address=None, run="test", cpus=1, gpus=2) as cluster:
        proofs = cluster.start_slices(first)
        proofs += cluster.start_slices(second)  # there is room: nothing else is held
        assert [p.slice_id for p in proofs] == ["mps-1-0", "mps-0-0", "mps-1-1", "mps-0-1"]
        # Started again at once, each is where it was.
        for spec, _ in (*first, *second):
            cluster.drop(spec.slice_id)
        for spec, _ in (*first, *second):
            cluster.restart(spec.slice_id)
        again: set[str] = set()
        while len(again) < 4:
            again |= {a.value.slice_id for a in cluster.answers(60)}
        given = {
            spec.slice_id: cluster.call(spec.slice_id, "__ray_call__", gpu_ids)
            for spec, _ in (*first, *second)
        }
    assert given == {"mps-0-0": ("0",), "mps-0-1": ("0",), "mps-1-0": ("1",), "mps-1-1": ("1",)}


def test_a_lost_worker_is_answered_with_why_and_its_logs_are_kept(
    runtime: Path, tmp_path: Path
) -> None:
    target = survey_here(SliceRequest("simulated", 50)).plan.target
    logs = tmp_path / "logs" / "ray"
    with Cluster(address=None, run="test", cpus=1, gpus=0, logs=logs) as cluster:
        cluster.start_tuners([TunerSpec("tuner-0", 1)], target, 0)
        pid = cluster._ray.get(
            cluster._tuners["tuner-0"].__ray_call__.remote(lambda _: os.getpid())
        )
        psutil.Process(pid).suspend()  # so that the call is under way when it is killed
        cluster.give_tasks(())
        psutil.Process(pid).kill()
        (answer,) = cluster.answers(60)
        cluster.drop(answer.worker_id)
    assert answer.error
    assert "\n" not in answer.error
    assert any(f"-{pid}." in path.name for path in logs.iterdir())


def test_a_tuner_that_hangs_is_lost_when_it_is_hurried_and_can_be_started_again(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "HURRY_SECS", 0.0)
    target = survey_here(SliceRequest("simulated", 50)).plan.target
    with Cluster(address=None, run="test", cpus=1, gpus=0) as cluster:
        cluster.start_tuners([TunerSpec("tuner-0", 1)], target, 0)
        cluster.give_tasks(())
        (ready,) = cluster.answers(60)
        hung = suspended(cluster._tuners["tuner-0"], cluster)
        cluster.submit(BuildThem("tuner-0", ()))
        cluster.hurry_tuners()
        answer = first_answer(cluster)
        assert answer.error.startswith("it has not ended build after")
        cluster.drop("tuner-0")
        cluster.restart("tuner-0")  # the cluster has one CPU: the hung one must be gone
        again = first_answer(cluster)
        assert not ready.error
        assert (again.method, again.error) == ("warm_up", "")
        assert not psutil.pid_exists(hung.pid)


def test_what_is_lost_with_a_tuner_is_built_by_another_one(runtime: Path, tmp_path: Path) -> None:
    target = survey_here(SliceRequest("simulated", 50)).plan.target
    onnx.save(conv_net(), tmp_path / "tiny.onnx")
    tasks = kernels_of(read_model(tmp_path / "tiny.onnx"), target).tasks
    wanted = [default_candidate(t) for t in tasks]
    specs = [TunerSpec(f"tuner-{i}", 1) for i in range(2)]
    with Cluster(address=None, run="test", cpus=2, gpus=0) as cluster:
        cluster.start_tuners(specs, target, 0)
        cluster.give_tasks(tasks)
        while cluster._calls.of("warm_up"):
            assert not any(a.error for a in cluster.answers(0.5))
        hung = suspended(cluster._tuners["tuner-0"], cluster)

        def kill_once() -> None:
            if hung.is_running():
                hung.kill()
                hung.wait()

        cluster.on_wait = kill_once  # when its part is under way
        built = cluster.build_all(wanted)
        assert cluster.tuner_ids == {"tuner-0", "tuner-1"}
    assert [b.candidate for b in built if isinstance(b, Build)] == wanted


def suspended(actor: Any, cluster: Cluster) -> psutil.Process:
    """Return the process of an actor, which hangs from now on."""
    process = psutil.Process(cluster._ray.get(actor.__ray_call__.remote(lambda _: os.getpid())))
    process.suspend()
    return process


def first_answer(cluster: Cluster) -> WorkerReply:
    while True:
        if answers := cluster.answers(0.5):
            return answers[0]


def test_logs_that_cannot_be_kept_hide_no_problem_and_leave_no_cluster(
    runtime: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(InfrastructureError, match="the problem itself"),
        Cluster(address=None, run="test", cpus=1, gpus=0, logs=tmp_path / "file" / "ray"),
    ):
        raise InfrastructureError("the problem itself")
    assert list(runtime.iterdir()) == []


def test_an_error_for_people_in_a_worker_arrives_as_it_is(runtime: Path) -> None:
    cut = survey_here(SliceRequest("cpu", 50)).plan.slices[0]
    cores = (max(os.sched_getaffinity(0)) + 1,)  # there is none
    spec = SliceSpec(cut.slice_id, "cpu", 50, cores=cores)
    with (
        Cluster(address=None, run="test", cpus=1, gpus=0) as cluster,
        pytest.raises((HostError, InfrastructureError), match=cut.slice_id),
    ):
        cluster.start_slices([(spec, None)])


def test_the_run_folder_must_be_seen_by_a_slice(runtime: Path, tmp_path: Path) -> None:
    with Cluster(address=None, run="test", cpus=1, gpus=0) as cluster:
        cluster.start_slices([(SIMULATED, None)])
        assert cluster.reader_of(tmp_path, [SIMULATED.slice_id]) == SIMULATED.slice_id
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(InfrastructureError, match="put --out on a file system that the nodes"):
            cluster.reader_of(tmp_path, [])


# --- its environment ---------------------------------------------------------------------------


def test_the_environment_is_as_it_was_after_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNERD_A", "before")
    monkeypatch.delenv("TUNERD_B", raising=False)
    environment = Environment({"TUNERD_A": "during", "TUNERD_B": "during"})
    assert os.environ["TUNERD_A"] == os.environ["TUNERD_B"] == "during"
    environment.undo()
    environment.undo()
    assert os.environ["TUNERD_A"] == "before"
    assert "TUNERD_B" not in os.environ


def test_an_error_of_ray_becomes_one_line() -> None:
    assert sentence(RuntimeError("Version mismatch:\n  Ray: 1\n\n  Python: 2\n")) == (
        "Version mismatch: Ray: 1 Python: 2"
    )
