"""Which cluster `tunerd` works in, and where a Ray job may put its run."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from tests.lib.models import conv_net
from tunerd.cli.app import app
from tunerd.cli.errors import run
from tunerd.cluster.job import cluster_address, require_kept
from tunerd.errors import ExitCode, InputError

HEAD = "10.0.0.7:6379"


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture
def job(outside: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """What Ray sets for the entry point of a job."""
    outside.setenv("RAY_ADDRESS", HEAD)
    outside.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    return outside


def test_a_job_works_in_its_own_cluster(job: pytest.MonkeyPatch) -> None:
    assert cluster_address(None) == HEAD
    assert cluster_address("auto") == HEAD


def test_elsewhere_a_cluster_is_joined_only_if_asked_for(outside: pytest.MonkeyPatch) -> None:
    outside.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")  # for `ray job submit`
    assert cluster_address(None) is None


def test_auto_is_the_cluster_of_this_machine(outside: pytest.MonkeyPatch) -> None:
    assert cluster_address("auto") == "auto"


def test_local_is_a_private_cluster_also_in_a_job(job: pytest.MonkeyPatch) -> None:
    assert cluster_address("local") is None


def test_another_address_is_what_it_says(job: pytest.MonkeyPatch) -> None:
    assert cluster_address("10.0.0.8:6379") == "10.0.0.8:6379"


def test_the_run_folder_of_a_job_must_outlive_it(job: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_0123abcd"
    for lost in (Path("runs/net-gpu40"), package / "runs" / "net-gpu40"):
        with pytest.raises(InputError, match="give an absolute path on a file system that the"):
            require_kept(lost)
    require_kept(tmp_path / "runs")


def test_elsewhere_a_run_folder_may_be_relative(outside: pytest.MonkeyPatch) -> None:
    require_kept(Path("runs/net-gpu40"))


def test_a_job_without_a_run_folder_is_one_sentence(
    job: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx.save(conv_net(), tmp_path / "net.onnx")
    code = run(app, ["tune", str(tmp_path / "net.onnx"), "--gpu-pct", "40", "--json"])
    assert code == ExitCode.BAD_INPUT
    said = json.loads(capsys.readouterr().out)["error"]["message"]
    assert "--out runs/net-gpu40" in said
