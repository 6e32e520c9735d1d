"""Whether a machine is quiet enough to measure on, from what NVML and the kernel say."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.lib.fake_nvml import MIB, FakeNvml
from tests.lib.gpu_hosts import H200
from tunerd.cli.app import app
from tunerd.cli.errors import run
from tunerd.doctor import preflight
from tunerd.doctor.checks import Finding, Status
from tunerd.doctor.preflight import Limits, look, of_load, of_mps
from tunerd.errors import ExitCode
from tunerd.system import gpus

GONE = 2**22 + 1  # above any pid that Linux gives
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """A quiet machine with one H200 and no load."""
    fake = FakeNvml()
    monkeypatch.setattr(gpus, "nvml_library", lambda: (fake, ""))
    monkeypatch.setattr(gpus, "visible_gpus", lambda: ((H200,), ""))
    monkeypatch.setattr(preflight, "mps_processes", list)
    monkeypatch.setattr(gpus, "SAMPLE_SECS", 0.0)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    return fake


def found(status: Status, limits: Limits | None = None) -> list[Finding]:
    findings = look(limits or Limits(), with_gpus=True)
    return [finding for finding in findings if finding.status is status]


def said(status: Status, limits: Limits | None = None) -> str:
    """Return what the one finding of a status says."""
    (finding,) = found(status, limits)
    return f"{finding.name}: {finding.fact}; {finding.fix}"


def test_a_quiet_gpu_has_nothing_to_find(nvml: FakeNvml) -> None:
    assert found(Status.FAIL) == found(Status.WARN) == []
    assert {f.name for f in found(Status.OK)} >= {"load", "MPS", "GPU 0 memory", "GPU 0 clocks"}


@pytest.mark.parametrize("kind", ["compute", "through_mps"])
def test_a_process_of_somebody_is_found(kind: str, nvml: FakeNvml) -> None:
    setattr(nvml, kind, [os.getpid()])
    assert f"GPU 0 processes: compute processes {os.getpid()}; end them" in said(Status.FAIL)


def test_a_process_of_another_container_is_said_to_be_one(nvml: FakeNvml) -> None:
    nvml.compute = [os.getpid(), GONE]
    assert f"of which {GONE} of another container or of its host" in said(Status.FAIL)


@pytest.mark.parametrize("listed", [(), None])
def test_memory_decides_where_processes_are_hidden(
    listed: Sequence[int] | None, nvml: FakeNvml
) -> None:
    nvml.compute = nvml.through_mps = listed
    nvml.used_bytes = 9000 * MIB
    assert "GPU 0 memory: 9,000 MiB in use, 6.3% of 139 GiB, over 2%" in said(Status.FAIL)
    assert found(Status.FAIL, Limits(mem_pct=10)) == []


def test_an_empty_list_in_a_container_is_said_to_prove_nothing(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert any("in a container it may hide others" in f.fact for f in found(Status.OK))


def test_a_gpu_that_tells_nothing_of_processes_is_judged_by_the_rest(nvml: FakeNvml) -> None:
    nvml.compute = nvml.through_mps = None
    assert "memory and utilisation decide" in said(Status.WARN)


def test_work_that_comes_and_goes_is_found_among_the_samples(nvml: FakeNvml) -> None:
    nvml.busy = [0, 0, 73, 0]
    assert "GPU 0 utilisation: 73%, over 5%" in said(Status.FAIL)


def test_a_gpu_without_utilisation_is_said_to_have_none(nvml: FakeNvml) -> None:
    nvml.busy = None
    assert "GPU 0 utilisation: NVML does not tell" in said(Status.WARN)


@pytest.mark.parametrize(
    ("reasons", "status", "words"),
    [
        (0x08, Status.FAIL, "hardware slowdown"),
        (0x40, Status.FAIL, "hot: hardware thermal slowdown"),
        (0x20 | 0x80, Status.FAIL, "hot: software thermal slowdown, power brake"),
        (0x04, Status.WARN, "held down by the power limit"),
    ],
)
@pytest.mark.parametrize("has_event_reasons", [True, False])
def test_clocks_that_are_held_down_are_found(
    reasons: int, status: Status, words: str, has_event_reasons: bool, nvml: FakeNvml
) -> None:
    nvml.reasons, nvml.has_event_reasons = reasons, has_event_reasons
    assert f"GPU 0 clocks: {words}" in said(status)


def test_what_may_disturb_is_a_warning(nvml: FakeNvml) -> None:
    nvml.persistent, nvml.graphics = 0, [7]
    names = {f.name for f in found(Status.WARN)}
    assert names == {"GPU 0 persistence", "GPU 0 display"}
    assert found(Status.FAIL) == []


def test_an_old_driver_without_the_reserved_memory_is_asked_for_the_rest(nvml: FakeNvml) -> None:
    nvml.has_memory_v2 = False
    assert any("500 MiB in use" in f.fact for f in found(Status.OK))


# --- MPS and load ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("nvidia-cuda-mps-server", Status.FAIL, "an MPS server has clients"),
        ("nvidia-cuda-mps-control", Status.WARN, "a daemon without clients"),
    ],
)
def test_an_mps_server_is_somebody_and_an_idle_daemon_is_not(
    name: str, status: Status, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "program_of", lambda pid: name)
    finding = of_mps([(4242, 1000)], Limits())
    assert (finding.status, f"{words}: pid 4242 of uid 1000" in finding.fact) == (status, True)


def test_a_daemon_that_is_wanted_must_be_there() -> None:
    wanted = Limits(is_mps_external=True)
    assert of_mps([(4242, 1000)], wanted).status is Status.OK
    assert of_mps([], wanted).status is Status.FAIL


@pytest.mark.parametrize(
    ("load", "cores", "status"),
    [(0.9, 2, Status.OK), (1.1, 2, Status.FAIL), (7.0, 16, Status.OK), (9.0, 16, Status.FAIL)],
)
def test_load_is_judged_by_the_cores_that_carry_it(load: float, cores: int, status: Status) -> None:
    assert of_load(load, cores, Limits()).status is status


@pytest.mark.parametrize(
    ("load", "cores", "allowed", "fact"),
    [
        (0.06, 2, 1e-4, "0.06 on 2 cores in the last minute, over 0.0002"),
        (1.5, 1, 0.5, "1.50 on 1 core in the last minute, over 0.5"),
        (999.0, 192, 0.1, "999.00 on 192 cores in the last minute, over 19.2"),
    ],
)
def test_the_load_that_is_allowed_has_the_digits_that_it_was_given_with(
    load: float, cores: int, allowed: float, fact: str
) -> None:
    assert of_load(load, cores, Limits(load_per_core=allowed)).fact == fact


# --- the command -------------------------------------------------------------------------------


def answered(capsys: Captured, *flags: str) -> tuple[int, Any]:
    code = run(app, ["preflight", *flags, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_machine_that_is_not_quiet_has_an_exit_code_of_its_own(
    nvml: FakeNvml, capsys: Captured
) -> None:
    assert answered(capsys)[0] == 0
    nvml.used_bytes = 90_000 * MIB
    code, document = answered(capsys)
    assert code == document["exit_code"] == ExitCode.NOT_QUIET
    assert not document["quiet"]
    assert answered(capsys, "--max-mem-pct", "100")[0] == 0
    assert answered(capsys, "--cpu-only")[0] == 0
    assert run(app, ["preflight"]) == ExitCode.NOT_QUIET
    assert "This machine is not quiet." in capsys.readouterr().out


def test_a_busy_machine_is_waited_for(
    nvml: FakeNvml, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.compute = [os.getpid()]

    slept = []

    def leave(secs: float) -> None:
        if secs:  # not between samples
            slept.append(secs)
            nvml.compute = ()

    monkeypatch.setattr(preflight.time, "sleep", leave)
    code, document = answered(capsys, "--wait", "10m")
    assert (code, document["quiet"], slept) == (0, True, [preflight.POLL_SECS])


def test_what_is_waited_for_is_told_when_waiting_begins_and_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    passed = [0.0]
    clock = SimpleNamespace(monotonic=lambda: sum(passed), sleep=passed.append)
    monkeypatch.setattr(preflight, "time", clock)
    monkeypatch.setattr(gpus, "visible_gpus", lambda: ((), "no GPU"))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (3.0 if sum(passed) < 60 else 0.0, 0.0, 0.0))
    assert run(app, ["preflight", "--wait", "10m"]) == 0
    why = "load: 3.00 on 2 cores in the last minute, over 1"
    assert capsys.readouterr().err.splitlines() == [
        f"tunerd preflight: waiting for quiet, {left} at most: {why}"
        for left in ("10 min", "9 min 30 s")
    ]


def test_another_reason_to_wait_is_told_when_it_comes(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = [90_000 * MIB, 90_000 * MIB, 0]
    told: list[list[str]] = []

    def sleep(secs: float) -> None:
        nvml.used_bytes = used.pop(0)
        nvml.compute = [os.getpid()] if used else ()

    nvml.compute = [os.getpid()]
    monkeypatch.setattr(preflight, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=sleep))
    preflight.preflight(
        Limits(), wait_secs=600, tell=lambda busy, _: told.append([f.name for f in busy])
    )
    assert told == [["GPU 0 processes"], ["GPU 0 processes", "GPU 0 memory"]]


def test_a_machine_without_a_gpu_is_judged_by_its_cores(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(gpus, "visible_gpus", lambda: ((), "no GPU"))
    monkeypatch.setattr(os, "getloadavg", lambda: (1e6, 0.0, 0.0))
    code, document = answered(capsys)
    assert code == ExitCode.NOT_QUIET
    assert [f["name"] for f in document["findings"]] == ["load", "GPUs"]
