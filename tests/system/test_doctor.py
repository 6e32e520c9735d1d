"""What doctor says."""
# ruff: noqa: F811  fixtures are arguments

from __future__ import annotations

import dataclasses
import json
import re
import socket
import sys
import tomllib
from pathlib import Path

import pytest

from tests.lib import ROOT
from tests.lib.gpu_hosts import gpu_host, runtime_folder, with_gpu  # noqa: F401  fixtures
from tunerd.cli.doctor import doctor
from tunerd.doctor import checks
from tunerd.errors import ExitCode
from tunerd.system import host
from tunerd.system.host import HostFacts


def test_doctor_reports_this_machine_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code = doctor(json=True)
    report = json.loads(capsys.readouterr().out)
    failed = [f for f in report["findings"] if f["status"] == "fail"]
    assert code == (ExitCode.HOST_NOT_CAPABLE if failed else 0)
    assert report["cpu_tuning"], failed
    assert all(f["fix"] for f in failed)
    assert {"cores", "packages", "TVM", "Ray"} <= {f["name"] for f in report["findings"]}


def test_doctor_knows_the_versions_that_the_project_pins() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pinned = dict(
        match.groups()
        for requirement in project["project"]["dependencies"]
        if (match := re.fullmatch(r"([\w-]+)(==\S+|>=\S+)", requirement))
        and match[1] in checks.PINS
    )
    assert pinned == checks.PINS


def test_doctor_says_that_the_runtime_folder_cannot_be_used(
    gpu_host: HostFacts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TUNERD_RUNTIME_FOLDER", str(tmp_path / "missing" / "r"))
    (finding,) = checks._attach(with_gpu(gpu_host))
    assert finding.status is checks.Status.FAIL
    assert "TUNERD_RUNTIME_FOLDER" in finding.fact


def test_doctor_says_that_every_process_compiles_modules_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (finding,) = checks._bytecode(dataclasses.replace(host.facts(), not_compiled=()))
    assert finding.status is checks.Status.OK
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "none"))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert host.facts().not_compiled == ()  # the first process that imports them keeps it
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    facts = host.facts()
    assert {"ray", "tvm", "tunerd"} <= set(facts.not_compiled)
    (finding,) = checks._bytecode(facts)
    assert finding.status is checks.Status.WARN
    assert "PYTHONDONTWRITEBYTECODE" in finding.fact
    assert f"{', '.join(facts.not_compiled)} have none, and" in finding.fact
    assert "compiles them again" in finding.fact
    assert "-m compileall -q " in finding.fix


def test_doctor_says_of_one_module_that_it_has_no_bytecode_and_compiles_no_whole_checkout() -> None:
    (finding,) = checks._bytecode(dataclasses.replace(host.facts(), not_compiled=("tunerd",)))
    assert finding.fact.startswith("tunerd has none, and")
    assert "compiles it again" in finding.fact
    command, _, _ = finding.fix.partition(", or")
    assert command.split()[-2:] == ["-q", str(Path(host.__file__).parents[1])]


def test_of_what_is_installed_the_folder_of_all_packages_is_compiled() -> None:
    installed = Path("/v/lib/python3.12/site-packages")
    assert checks._compiled_with(installed / "ray" / "__init__.py") == str(installed)


def test_an_extra_is_installed_from_the_checkout_where_there_is_one(tmp_path: Path) -> None:
    assert host.install_command("cuda", tmp_path) == "pip install 'tunerd[cuda]'"
    (tmp_path / "pyproject.toml").touch()
    assert host.install_command("cuda", tmp_path) == "pip install '.[cuda]'"


def test_doctor_says_once_how_cuda_libraries_are_installed(
    gpu_host: HostFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tunerd.builder.nvrtc.missing_for_builds", lambda: "Builds for CUDA need nvrtc"
    )
    for facts in (with_gpu(gpu_host), dataclasses.replace(gpu_host, gpus=())):
        (finding,) = checks._cuda_libraries(facts)
        assert f"{finding.fact}; {finding.fix}".count("pip install") == 1


def test_doctor_says_which_libraries_are_there_and_how_to_get_them(
    gpu_host: HostFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "missing", lambda name: "pip install it")
    for finding in checks._kernel_libraries(with_gpu(gpu_host)):
        assert (finding.status, finding.fix) == (checks.Status.WARN, "pip install it")
        assert "only for --libraries" in finding.fact
    monkeypatch.setattr(checks, "missing", lambda name: None)
    monkeypatch.setattr(checks, "wheel_version", lambda name: "13.1.0.3")
    facts = {f.fact for f in checks._kernel_libraries(gpu_host)}
    assert facts == {"13.1.0.3"}


def test_doctor_warns_of_nothing_that_only_gpus_need_where_there_is_none(
    gpu_host: HostFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tunerd.builder.nvrtc.missing_for_builds", lambda: "nvrtc is missing")
    monkeypatch.setattr(checks, "missing", lambda name: "pip install it")
    without = dataclasses.replace(gpu_host, gpus=(), failed_gpus=(), no_gpu="no driver")
    for check in (checks._gpus, checks._cuda_libraries, checks._kernel_libraries):
        assert {finding.status for finding in check(without)} == {checks.Status.UNUSED}


def test_doctor_finds_who_listens_on_a_port() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        addresses = checks.listening(listener.getsockname()[1])
    assert addresses == ["127.0.0.1"]
