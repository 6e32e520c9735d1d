"""`tunerd colocate place --address`: jobs on the devices of a real cluster of two raylets."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.lib.colocation_plans import CORES, colocate
from tests.lib.ray_processes import TOKEN, Child, clean_environment, two_nodes
from tests.lib.waiting import until
from tunerd.colocation.placement.host import devices_here
from tunerd.colocation.placement.job_file import CoresChoice
from tunerd.errors import ExitCode
from tunerd.system import host
from tunerd.system.processes import ProcessId

WAIT_SECS = 120.0
Captured = pytest.CaptureFixture[str]
KEEPERS = 2  # processes between an actor and a job
# Prints who has started it, and what it was given.
TELL = """
import json, os, psutil, signal
blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
parents = [process.pid for process in psutil.Process().parents()]
cores = sorted(os.sched_getaffinity(0))
found = {"blocked": blocked, "parents": parents, "cores": cores}
print(json.dumps(found | {"environment": dict(os.environ)}))
"""
# Starts a program in the background, and says who both are.
ENDLESS = "sleep 1000 & echo $$ $! > {name}.pids; wait"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Child]:
    with two_nodes() as found:
        yield found


@pytest.fixture(autouse=True)
def no_actor_stays(cluster: Child) -> Iterator[None]:
    yield
    until(lambda: not any(is_actor(process) for process in cluster.family()))


def is_actor(process: psutil.Process) -> bool:
    try:
        return any(word.startswith("ray::_Holder") for word in process.cmdline())
    except psutil.Error:  # it has ended
        return False


def raylets(cluster: Child) -> set[int]:
    return {process.pid for process in cluster.family() if process.name() == "raylet"}


def job(name: str, *words: str, memory_gib: float = 0.1) -> dict[str, Any]:
    return {"name": name, "command": list(words), "memory_gib": memory_gib}


def tell(name: str) -> dict[str, Any]:
    return job(name, sys.executable, "-c", TELL)


def shell(name: str, script: str) -> dict[str, Any]:
    return job(name, "sh", "-c", script)


def written(folder: Path, devices: dict[str, Any], jobs: Sequence[dict[str, Any]]) -> Path:
    path = folder / "jobs.yaml"
    path.write_text(json.dumps({"devices": devices, "grace": "0s", "jobs": jobs}))  # YAML, too
    return path


def start(cluster: Child, path: Path, *flags: str) -> subprocess.Popen[str]:
    """Start the command as a person would who is let into the cluster."""
    words = ["colocate", "place", str(path), "--address", cluster.said["address"], "--json"]
    words += ["--policy", "round-robin", "--out", str(path.parent / "out"), *flags]
    return subprocess.Popen(
        [sys.executable, "-m", "tunerd", *words],
        env=clean_environment() | {"RAY_AUTH_TOKEN": TOKEN},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def told(path: Path, name: str) -> Any:
    return json.loads((path.parent / "out" / "jobs" / name / "try-1.log").read_text())


def test_jobs_run_under_an_actor_of_the_node_that_has_their_device(
    cluster: Child, tmp_path: Path
) -> None:
    names = ("a", "b", "c", "d")
    path = written(tmp_path, {"simulated": 1}, [tell(name) for name in names])
    command = start(cluster, path)
    stdout, stderr = command.communicate(timeout=WAIT_SECS)
    assert command.returncode == ExitCode.BETTER, stderr
    tries = json.loads(stdout)["tries"]
    assert {each["what"] for each in tries} == {"ended"}
    first = host.facts().hostname
    at = {each["job"]: each["device"] for each in tries}
    assert [at[name] for name in names] == [f"{first}/simulated-0", f"{first}-2/simulated-0"] * 2
    nodes: dict[str, set[int]] = {}
    actors: dict[str, int] = {}
    for name in names:
        actors[name], node, *others = told(path, name)["parents"][KEEPERS:]
        assert command.pid not in others
        nodes.setdefault(at[name], set()).add(node)
    assert set.union(*nodes.values()) == raylets(cluster)
    assert {len(found) for found in nodes.values()} == {1}
    assert actors["a"] == actors["c"]
    assert actors["b"] == actors["d"] != actors["a"]


@pytest.mark.skipif(len(CORES) < 2, reason="two parts take two cores")
def test_on_a_node_jobs_have_what_they_have_without_a_cluster_and_fail_as_there(
    cluster: Child, tmp_path: Path, capsys: Captured
) -> None:
    jobs = [
        tell("a"),
        tell("b"),
        shell("wrong", "echo no such model; exit 3"),
        shell("alone", "echo MemoryError; exit 1"),
        job("absent", "no-such-program"),
        job("large", "true", memory_gib=1 << 20),
    ]
    path = written(tmp_path, {"cores": 2}, jobs)
    command = start(cluster, path)
    stdout, stderr = command.communicate(timeout=WAIT_SECS)
    assert command.returncode == ExitCode.NO_GAIN, stderr
    said = json.loads(stdout)

    parts = {one.device.name: list(one.cores) for one in devices_here(CoresChoice(cores=2))}
    at = {each["job"]: each["device"] for each in said["tries"]}
    prefix = f"{host.facts().hostname}/"  # the second node has the same cores: they are cut once
    assert set(at.values()) == {prefix + name for name in parts}
    for name in ("a", "b"):
        assert told(path, name)["cores"] == parts[at[name].removeprefix(prefix)]
        assert told(path, name)["blocked"] == []  # as signals are for actors
        given = told(path, name)["environment"]
        assert not [variable for variable in given if variable.startswith("RAY_")]
        own = clean_environment().get("OMP_NUM_THREADS")
        assert given.get("OMP_NUM_THREADS") == own  # Ray gives its actors one thread

    assert colocate("place", path, "--out", tmp_path / "here", "--json") == ExitCode.NO_GAIN
    here = json.loads(capsys.readouterr().out)
    assert set(said["failed"]) == {"wrong", "alone", "absent", "large"}
    assert outcome(said) == outcome(here)


def outcome(said: dict[str, Any]) -> tuple[dict[str, str], set[tuple[Any, ...]]]:
    """Return what a placement says of failures and of tries, wherever they were and how often."""
    why = {name: re.sub(r"\S*cores-\d", "DEVICE", text) for name, text in said["failed"].items()}
    return why, {(each["job"], each["what"], each["status"]) for each in said["tries"]}


def test_devices_that_no_node_can_have_are_refused_as_without_a_cluster(
    cluster: Child, tmp_path: Path, capsys: Captured
) -> None:
    path = written(tmp_path, {"cores": 1000}, [job("a", "true")])
    command = start(cluster, path, "--dry-run")
    _, stderr = command.communicate(timeout=WAIT_SECS)
    assert colocate("place", path, "--dry-run") == command.returncode == ExitCode.HOST_NOT_CAPABLE
    assert stderr.split() == capsys.readouterr().err.split()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_runs_on_the_nodes_ends_with_the_command_however_that_ends(
    number: int, cluster: Child, tmp_path: Path
) -> None:
    names = ("a", "b")
    jobs = [shell(name, ENDLESS.format(name=name)) for name in names]
    command = start(cluster, written(tmp_path, {"simulated": 1}, jobs))
    files = [tmp_path / f"{name}.pids" for name in names]
    until(lambda: all(file.exists() and file.read_text().endswith("\n") for file in files))
    started = [psutil.Process(int(pid)) for file in files for pid in file.read_text().split()]
    above = [one for shell in started[::2] for one in shell.parents()[: KEEPERS + 1]]
    assert [is_actor(process) for process in above] == [*[False] * KEEPERS, True] * len(names)
    family = [ProcessId.of(process.pid) for process in (*started, *above)]
    assert all(family)
    command.send_signal(number)
    command.communicate(timeout=WAIT_SECS)
    assert command.returncode == (
        ExitCode.INTERRUPTED if number == signal.SIGTERM else -signal.SIGKILL
    )
    until(lambda: not any(process and process.alive for process in family))
