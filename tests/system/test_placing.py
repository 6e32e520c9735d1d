"""`tunerd colocate place`: jobs placed and started, tried again, and ended in order."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
import yaml

from tests.lib import PYTHON_PATH
from tests.lib.colocation_plans import CORES, artifact, colocate
from tests.lib.fake_nvml import FakeNvml
from tests.lib.models import conv_net
from tests.lib.waiting import until
from tunerd.colocation.artifacts import needed_memory
from tunerd.colocation.placement import host as hosts
from tunerd.colocation.placement import placing
from tunerd.colocation.placement.fleet import Fleet, here
from tunerd.colocation.placement.host import Found, Host, devices_here
from tunerd.colocation.placement.job_file import (
    CONTEXT_BYTES,
    GIB,
    TUNING_BYTES,
    CoresChoice,
    JobFile,
    SimulatedChoice,
)
from tunerd.colocation.placement.policies.round_robin import RoundRobin
from tunerd.colocation.placement.values import Device
from tunerd.errors import ExitCode, HostError, InfrastructureError, InputError
from tunerd.system import gpus, mig

Captured = pytest.CaptureFixture[str]
WAIT_SECS = 60.0
TWO = {"simulated": 2, "memory_gib": 10, "units": 100}
# Runs out of memory while another job of this folder runs beside it, and says who it is.
GREEDY = "test -e quiet || { echo 'CUDA error: out of memory'; exit 1; }"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "LOOK_SECS", 0.01)


def shell(name: str, script: str, **said: Any) -> dict[str, Any]:
    return {"name": name, "command": ["sh", "-c", script], "memory_gib": 4} | said


def written(folder: Path, jobs: Sequence[dict[str, Any]], **said: Any) -> Path:
    path = folder / "jobs.yaml"
    path.write_text(yaml.safe_dump({"devices": TWO, "grace": 0, "jobs": list(jobs)} | said))
    return path


def place(path: Path, capsys: Captured, *flags: str) -> tuple[int, dict[str, Any]]:
    code = colocate("place", path, "--json", "--out", path.parent / "out", *flags)
    return code, json.loads(capsys.readouterr().out)


def test_jobs_take_turns_on_devices_and_what_ended_is_not_run_again(
    tmp_path: Path, capsys: Captured
) -> None:
    path = written(tmp_path, [shell(n, f"echo {n} >> ran") for n in ("a", "b", "c", "d")])
    code, said = place(path, capsys, "--policy", "round-robin")
    assert code == ExitCode.BETTER
    by_job = {each["job"]: each for each in said["tries"]}
    assert [by_job[n]["device"] for n in ("a", "b", "c", "d")] == [
        "simulated-0", "simulated-1", "simulated-0", "simulated-1",
    ]  # fmt: skip
    assert {each["what"] for each in said["tries"]} == {"ended"}
    code, said = place(path, capsys)
    assert (code, said["tries"], said["before"]) == (0, [], ["a", "b", "c", "d"])
    path = written(tmp_path, [shell("a", "echo again >> ran")])  # which is another job
    assert place(path, capsys)[1]["before"] == []
    assert sorted((tmp_path / "ran").read_text().split()) == ["a", "again", "b", "c", "d"]


def test_who_runs_out_of_memory_is_tried_again_alone_and_recovers(
    tmp_path: Path, capsys: Captured
) -> None:
    one = {"simulated": 1, "memory_gib": 10}
    other = shell("other", "while ! test -e quiet; do sleep 0.01; done")
    # It was beside one job, so that the second try is alone: once the other has ended.
    greedy = shell("greedy", f"{GREEDY}; echo fits", after="100ms")
    path = written(tmp_path, [other, greedy], devices=one)
    watcher = subprocess.Popen(
        ["sh", "-c", "until grep -q greedy out/tries.jsonl; do sleep 0.01; done; touch quiet"],
        cwd=tmp_path, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    code, said = place(path, capsys, "--policy", "most-free-memory")
    watcher.wait(WAIT_SECS)
    assert code == ExitCode.BETTER
    tries = [(each["job"], each["what"]) for each in said["tries"]]
    assert tries == [("greedy", "out of memory"), ("other", "ended"), ("greedy", "ended")]
    assert (tmp_path / "out/jobs/greedy/try-2.log").read_text() == "fits\n"


def test_what_fails_is_said_by_name_with_its_last_words(tmp_path: Path, capsys: Captured) -> None:
    jobs = [
        shell("wrong", "echo no such model; exit 3"),
        shell("large", "true", memory_gib=11),
        shell("alone", "echo MemoryError; exit 1"),
        shell("absent", "true") | {"command": ["no-such-program"]},
        shell("well", "true"),
    ]
    code, said = place(written(tmp_path, jobs), capsys)
    assert code == ExitCode.NO_GAIN
    assert said["failed"]["wrong"] == "exit status 3: no such model"
    assert "it needs" in said["failed"]["large"]
    assert "it ran out of memory alone" in said["failed"]["alone"]
    assert "no-such-program does not start" in said["failed"]["absent"]
    assert "well" not in said["failed"]


def test_a_dry_run_says_where_each_would_start_and_starts_none(
    tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "net.onnx").touch()
    artifact(tmp_path, 0)
    jobs = [
        {"name": "tuning", "tune": "net.onnx", "with": {"gpu-pct": 40}},
        {"name": "serving", "command": ["serve"], "artifact": "artifact-0", "after": "5s"},
        shell("third", "touch ran", memory_gib=9),
        shell("fourth", "touch ran", memory_gib=9),
    ]
    path = written(tmp_path, jobs, grace="30s")
    assert colocate("place", path, "--dry-run", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert [(each["job"], each["device"], each["after_secs"]) for each in said["placed"]] == [
        ("tuning", "simulated-0", 0.0),
        ("third", "simulated-1", 0.0),
        ("serving", "simulated-0", 30.0),  # once the grace of the first is over
    ]
    assert said["waiting"] == ["fourth"]
    needed = needed_memory(tmp_path / "artifact-0")
    assert said["memory_bytes"]["serving"] == (
        needed.shared_bytes + needed.each_bytes + CONTEXT_BYTES
    )
    assert colocate("place", path, "--dry-run", "--policy", "exclusive") == 0
    assert "until others have ended" in capsys.readouterr().out
    assert not (tmp_path / "ran").exists()


def test_without_measured_pairs_the_estimated_policy_says_what_it_goes_by(
    tmp_path: Path, capsys: Captured
) -> None:
    jobs = [shell(name, "true", memory_gib=2) for name in ("a", "b", "c")]
    path = written(tmp_path, jobs)
    assert colocate("place", path, "--dry-run", "--json") == 0
    said = json.loads(capsys.readouterr().out)["placed"]
    assert said[-1]["note"] == "by free memory: a has no features"


@pytest.mark.skipif(len(CORES) < 2, reason="two parts take two cores")
def test_a_tuning_run_has_the_cores_of_its_device(tmp_path: Path, capsys: Captured) -> None:
    onnx.save(conv_net(), tmp_path / "net.onnx")
    flags = {"cpu-pct": 50, "slice": "simulated", "trials": 2, "dry-run": True}
    tell = "import os; print(sorted(os.sched_getaffinity(0)))"
    jobs = [
        {"name": "net", "tune": "net.onnx", "with": flags, "memory_gib": 0.1},
        shell("tell", "true", memory_gib=0.1) | {"command": [sys.executable, "-c", tell]},
    ]
    code, said = place(written(tmp_path, jobs, devices={"cores": 2}), capsys)
    log = (tmp_path / "out/jobs/net/try-1.log").read_text()
    assert code == ExitCode.BETTER, log
    assert "5 tasks, tuned until 2 trials" in log
    cores = {one.device.name: one.cores for one in devices_here(CoresChoice(cores=2))}
    assert sorted(core for part in cores.values() for core in part) == CORES
    at = {each["job"]: each["device"] for each in said["tries"]}
    assert set(at.values()) == set(cores)
    told = json.loads((tmp_path / "out/jobs/tell/try-1.log").read_text())
    assert told == sorted(cores[at["tell"]])


def test_a_tuning_run_needs_what_the_same_run_was_seen_to_hold(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "READ_SECS", 0.05)
    onnx.save(conv_net(), tmp_path / "net.onnx")
    flags = {"cpu-pct": 50, "slice": "simulated", "trials": 2, "dry-run": True}
    job = {"name": "net", "tune": "net.onnx", "with": flags}

    def needed(*jobs: dict[str, Any], **said: Any) -> dict[str, int]:
        path = written(tmp_path, jobs, devices={"cores": 1}, **said)
        assert colocate("place", path, "--dry-run", "--json") == 0
        found: dict[str, int] = json.loads(capsys.readouterr().out)["memory_bytes"]
        return found

    assert needed(job) == {"net": TUNING_BYTES}
    code, said = place(written(tmp_path, [job], devices={"cores": 1}), capsys)
    assert code == ExitCode.BETTER
    (tried,) = said["tries"]
    assert 30 << 20 < tried["peak_bytes"] < TUNING_BYTES
    others = {**job, "name": "other", "with": flags | {"trials": 3}}
    with_room = {**job, "name": "with-room", "memory_gib": 2}
    found = needed({**job, "name": "again"}, others, with_room, measured=["out/tries.jsonl"])
    assert found == {
        "again": int(1.1 * tried["peak_bytes"]),
        "other": TUNING_BYTES,
        "with-room": 2 * GIB,
    }


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_what_runs_ends_with_the_placement_however_that_ends(number: int, tmp_path: Path) -> None:
    # It needs a moment to end, for which the command waits, as for a tuning run that saves.
    script = "trap 'sleep 1; exit' TERM; sleep 1000 & echo $$ $! > pid; wait"
    path = written(tmp_path, [shell("endless", script)])
    argv = [sys.executable, "-m", "tunerd", "colocate", "place", str(path)]
    process = subprocess.Popen(
        [*argv, "--out", str(tmp_path / "out")],
        env=os.environ | {"PYTHONPATH": PYTHON_PATH},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    told = tmp_path / "pid"
    until(lambda: told.exists() and told.read_text().endswith("\n"))
    pids = [int(pid) for pid in told.read_text().split()]
    # Ctrl-C reaches all that a terminal has started.
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    code = process.wait(WAIT_SECS)
    assert code == (-signal.SIGKILL if number == signal.SIGKILL else ExitCode.INTERRUPTED)
    if number != signal.SIGKILL:
        assert ended(pids[0])
    until(lambda: all(map(ended, pids)))


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_each_machine_is_closed_although_another_one_is_lost() -> None:
    closed = []

    def machine(name: str, method: str) -> tuple[str, tuple[Found, ...]]:
        if method == "close":
            closed.append(name)
            raise InfrastructureError(f"{name} does not answer")
        return name, devices_here(SimulatedChoice(simulated=1))

    fleet = Fleet({name: functools.partial(machine, name) for name in ("one", "two")})
    with pytest.raises(InfrastructureError):
        fleet.close()
    assert sorted(closed) == ["one", "two"]


# --- devices -----------------------------------------------------------------------------------


class MigNvml(FakeNvml):
    """Two GPUs: the second is in MIG mode and has two instances, numbers 0 and 2 of three."""

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"GPU-{index}"

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        return [int(handle == "GPU-1")] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        return 3

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, number: int) -> str:
        if number == 1:
            raise self.NVMLError("Not Found")
        return f"MIG-{number}"

    def nvmlDeviceGetName(self, handle: str) -> str:
        return "an instance"

    def nvmlDeviceGetMemoryInfo(self, _: str, version: int | None = None) -> SimpleNamespace:
        return SimpleNamespace(total=10 * GIB, free=9 * GIB, used=GIB)

    def nvmlDeviceGetAttributes_v2(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(multiprocessorCount=16)


@pytest.fixture
def instances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mig, "nvml_library", lambda: (MigNvml(), ""))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, ["MIG-0", "MIG-2"]),
        ("1", ["MIG-0", "MIG-2"]),
        ("GPU-1", ["MIG-0", "MIG-2"]),
        ("MIG-2", ["MIG-2"]),
        ("0", []),
    ],
)
def test_instances_of_mig_are_those_that_are_visible(
    visible: str | None, found: list[str], instances: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [one.uuid for one in mig.mig_instances()] == found


def test_an_instance_is_a_device_by_its_uuid_and_tuning_runs_take_whole_gpus(
    instances: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "visible_gpus", lambda: ((), "none"))
    host = Host("gpus")
    fleet = Fleet(here(host))
    assert fleet.devices == {
        f"mig-{n}": Found(Device(f"mig-{n}", 9 * GIB, 16), "an instance", uuid, is_instance=True)
        for n, uuid in enumerate(("MIG-0", "MIG-2"))
    }
    tuning = {"name": "tuning", "tune": "net.onnx", "memory_gib": 1}
    tell = shell("tell", "echo $CUDA_VISIBLE_DEVICES")
    file = JobFile.read(written(tmp_path, [tuning, tell], devices="gpus"))
    placed = placing.Placing(
        file, fleet, RoundRobin(), folder=tmp_path, out=tmp_path / "out", say=lambda _: None
    ).run()
    fleet.close()
    assert placed.failed == {"tuning": "there is no device that can run it"}
    assert (tmp_path / "out/jobs/tell/try-1.log").read_text() == "MIG-0\n"


def test_what_a_job_holds_of_a_gpu_is_told_by_its_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimpleNamespace(
        index=0, mem_free_bytes=9 * GIB, sm_count=100, name="a GPU", uuid="GPU-0", mig=False
    )
    monkeypatch.setattr(gpus, "visible_gpus", lambda: ((gpu,), ""))
    monkeypatch.setattr(hosts, "mig_instances", lambda: ())
    monkeypatch.setattr(gpus, "busy_pct", lambda uuid: 30)
    told = tmp_path / "pid"

    def ask(uuid: str, function: str) -> list[SimpleNamespace]:
        if "MPS" in function:
            return []
        pids = (os.getpid(), int(told.read_text()))  # a stranger's, and the job's
        return [SimpleNamespace(pid=pid, usedGpuMemory=3 * GIB) for pid in pids]

    monkeypatch.setattr(gpus, "ask_gpu", ask)
    host = Host("gpus")
    host.start("job", ["sh", "-c", "echo $$ > pid; exec sleep 1000"], "gpu-0", tmp_path,
               tmp_path / "log")  # fmt: skip
    until(lambda: told.exists() and told.read_text().endswith("\n"))
    (seen,) = host.seen().values()
    host.close()
    assert (seen.memory_bytes, seen.units) == (3 * GIB, 30)


def test_a_machine_without_a_gpu_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "visible_gpus", lambda: ((), "none"))
    monkeypatch.setattr(hosts, "mig_instances", lambda: ())
    with pytest.raises(HostError, match="there is no GPU to place jobs on"):
        Fleet(here(Host("gpus")))


# --- the file ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "problem"),
    [
        ({"name": "a"}, "a needs one of `tune` and `command`"),
        ({"name": "a", "command": ["x"]}, "a needs `memory_gib`, or the `artifact`"),
        ({"name": "a", "tune": "x", "with": {"out": "y"}}, "a sets out, which the placement says"),
        (shell("a", "true", **{"with": {"trials": 1}}), "a has flags `with`"),
        (shell("a", "true", busy="0%"), "busy"),
        (
            shell("a", "true", withs={}),
            r"jobs\[0\].withs: .*did you mean with\? Allowed are name, ",
        ),
    ],
)
def test_a_mistake_in_a_job_is_named(job: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=problem):
        JobFile.read(written(tmp_path, [job]))


def test_flags_of_a_tuning_are_written_as_people_do(tmp_path: Path) -> None:
    flags = {"cpu_pct": 50, "no-wait": True, "verbose": False, "dim": ["n=1", "m=2"]}
    (entry,) = JobFile.read(
        written(tmp_path, [{"name": "a", "tune": "net.onnx", "with": flags}])
    ).jobs
    assert entry.words(Path("/out")) == (
        "tunerd", "tune", str(tmp_path / "net.onnx"), "--out", "/out/run", "--cpu-pct", "50",
        "--dim", "n=1", "--dim", "m=2", "--no-wait", "--no-verbose",
    )  # fmt: skip
