"""`ray job submit -- tunerd tune ...` on a real cluster of two nodes, with a job server."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import pytest

from tests.lib.job_cluster import Job, JobCluster, job_cluster
from tests.lib.models import conv_net
from tests.lib.ray_processes import clean_environment
from tunerd.errors import ExitCode, FolderError
from tunerd.records import Store
from tunerd.vocabulary import Record, TrialState

pytestmark = pytest.mark.slow

MANY = 400  # trials that outlast what is done to a job
FEW = 4
WAIT_SECS = 240.0
# Ray asks a stopped job to end by SIGTERM, and after 3 s it kills: a run needs longer to drain.
PATIENT = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "120"}}
# Ray does not keep the exit code of a job that it stopped: this writes it into the log.
SHELL = 'trap : TERM\n"$@"\necho "exit code $?"\n'


@pytest.fixture(scope="module")
def cluster() -> Iterator[JobCluster]:
    with job_cluster() as found:
        onnx.save(conv_net(), found.folder / "net.onnx")
        (found.folder / "say-code.sh").write_text(SHELL)
        yield found


def tune(cluster: JobCluster, trials: int, *, model: str | None = None) -> str:
    """Return an entry point that tunes on simulated slices, with a run folder on shared storage."""
    given = model or str(cluster.folder / "net.onnx")
    words = [sys.executable, "-m", "tunerd", "tune", given, "--cpu-pct", "50"]
    words += [
        "--slice",
        "simulated",
        "--out",
        str(cluster.folder / "life"),
        "--trials",
        str(trials),
    ]
    return shlex.join(words)


def records(folder: Path) -> dict[int, Record]:
    """Return the search trials so far, by number."""
    try:
        with Store.read(folder) as store:
            found = [r for r in store.records() if not r.candidate.is_default]
    except FolderError:
        return {}
    return {r.trial_id: r for r in found}


def ended(folder: Path) -> dict[int, Record]:
    return {number: r for number, r in records(folder).items() if r.result is not None}


def wait_for(job: Job, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECS
    while not condition():
        assert not job.ended, job.log
        assert time.monotonic() < deadline, job.log
        time.sleep(0.2)


# --- one run of several jobs ---------------------------------------------------------------------


@dataclass
class Life:
    """One run folder, and the jobs that worked in it."""

    details: dict[str, dict[str, Any]] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)
    ended: dict[str, dict[int, Record]] = field(default_factory=dict)  # after each job
    states: dict[str, set[TrialState]] = field(default_factory=dict)
    waited: subprocess.CompletedProcess[str] | None = None  # `ray job submit` of the last one

    def note(self, name: str, job: Job, folder: Path) -> None:
        self.details[name], self.logs[name] = job.end(), job.log
        self.ended[name] = ended(folder)
        self.states[name] = {r.state for r in records(folder).values()}


@pytest.fixture(scope="module")
def life(cluster: JobCluster, tmp_path_factory: pytest.TempPathFactory) -> Life:
    found, out = Life(), cluster.folder / "life"
    command = tune(cluster, MANY)
    first = cluster.submit(command)
    wait_for(first, lambda: len(ended(out)) >= 4)
    found.note("second", cluster.submit(command), out)
    first.driver().kill()
    found.note("crashed", first, out)

    again = cluster.submit(f"sh {cluster.folder}/say-code.sh {command}", PATIENT)
    before = len(found.ended["crashed"])
    wait_for(again, lambda: len(ended(out)) >= before + 4)
    done = cluster.job("stop", again.job_id)
    assert done.returncode == 0, done.stdout + done.stderr
    found.note("stopped", again, out)

    # The last one brings the model in its working directory, and somebody waits for it.
    package = tmp_path_factory.mktemp("package")
    onnx.save(conv_net(), package / "net.onnx")
    last = tune(cluster, len(found.ended["stopped"]) + FEW, model="net.onnx")
    words = (f"--working-dir={package}", "--submission-id=last", "--")
    found.waited = cluster.job("submit", *words, "sh", "-c", f"{last} || test $? -le 2")
    found.note("finished", Job(cluster, "last"), out)
    return found


@pytest.mark.nightly
def test_a_second_job_in_the_same_run_folder_is_refused(life: Life) -> None:
    last = life.logs["second"].splitlines()[-1]
    assert "life is in use by the tunerd with pid" in last
    assert "wait until it ends" in last


@pytest.mark.nightly
def test_the_exit_code_of_tunerd_is_in_the_job_s_status(life: Life) -> None:
    details = life.details["second"]
    assert (details["status"], details["driver_exit_code"]) == ("FAILED", ExitCode.BAD_FOLDER)
    assert f"exit code {int(ExitCode.BAD_FOLDER)}" in details["message"]


@pytest.mark.nightly
def test_the_job_of_a_driver_that_was_killed_has_failed(life: Life) -> None:
    assert life.details["crashed"]["status"] == "FAILED"


@pytest.mark.nightly
def test_a_job_that_is_stopped_drains_and_ends_with_16(life: Life) -> None:
    assert life.details["stopped"]["status"] == "STOPPED"
    assert "stopped on request; what was measured is stored" in life.logs["stopped"]
    assert f"exit code {int(ExitCode.INTERRUPTED)}" in life.logs["stopped"]
    assert TrialState.RUNNING not in life.states["stopped"]


@pytest.mark.nightly
def test_a_job_that_is_submitted_again_goes_on_and_pays_nothing_twice(life: Life) -> None:
    last = life.ended["finished"]
    for name in ("crashed", "stopped"):
        earlier = life.ended[name]
        assert {number: last[number] for number in earlier} == earlier
    assert len({r.candidate.candidate_id for r in last.values()}) == len(last)
    assert len(last) >= len(life.ended["stopped"]) + FEW


@pytest.mark.nightly
def test_a_job_with_an_artifact_succeeds_if_its_shell_says_so(life: Life) -> None:
    assert life.details["finished"]["status"] == "SUCCEEDED", life.logs["finished"]
    assert life.waited is not None
    assert life.waited.returncode == 0


@pytest.mark.nightly
def test_a_job_tunes_on_all_nodes_of_its_own_cluster(cluster: JobCluster, life: Life) -> None:
    assert (cluster.folder / "life" / "artifact" / "manifest.json").exists(), life.logs
    with Store.read(cluster.folder / "life") as store:
        tuners = {s.worker for s in store.spans() if s.role == "tuner"}
    assert tuners == {"tuner-0-0", "tuner-1-0"}  # one on each node


@pytest.mark.nightly
def test_a_job_s_log_has_lines_and_no_live_display(life: Life) -> None:
    lines = life.logs["finished"].splitlines()
    said = [line for line in lines if line.startswith("tunerd: ")]
    assert any(line.startswith("tunerd: tuning ") for line in said)
    assert any(line.startswith("tunerd: finishing ") for line in said)
    assert not any("\x1b" in line or "\r" in line for line in lines)  # nothing is redrawn
    assert any(line.startswith("artifact  ") for line in lines)
    assert life.waited is not None
    assert set(said) <= set(life.waited.stdout.splitlines())


@pytest.mark.nightly
def test_the_token_is_in_no_log_and_no_file(cluster: JobCluster, life: Life) -> None:
    assert cluster.token not in "".join(life.logs.values())
    for path in (cluster.folder / "life").rglob("*"):
        assert path.is_dir() or cluster.token.encode() not in path.read_bytes(), path


# --- a plan --------------------------------------------------------------------------------------


def test_a_dry_run_plans_the_nodes_of_a_cluster(cluster: JobCluster, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tunerd", "tune", str(cluster.folder / "net.onnx")]
    words += ["--cpu-pct", "50", "--slice", "simulated", "--out", str(tmp_path / "none")]
    done = subprocess.run(
        [*words, "--address", cluster.address, "--dry-run", "--json"],
        env=clean_environment() | {"RAY_AUTH_TOKEN": cluster.token},
        capture_output=True,
        text=True,
        timeout=WAIT_SECS,
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert len({t["node_id"] for t in plan["tuners"]}) == 2
    assert {s["node_id"] for s in plan["slices"]} < {t["node_id"] for t in plan["tuners"]}
    assert not (tmp_path / "none").exists()
