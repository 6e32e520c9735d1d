"""A run that suffers every fault ends as a quiet one, and nothing is lost or paid twice.

The faults here are of one process: Ray is simulated, workers and runners are lost, nodes leave and
join, and drivers are killed where a seed says. Real processes are killed in test_kills.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.lib import IS_NIGHTLY, PYTHON_PATH
from tests.lib.chaos import DEADLY, KINDS, OF_NODES, OWN
from tests.lib.chaos_driver import GOES_ON
from tests.lib.ray_processes import short_folder
from tunerd.errors import ExitCode

QUIET = "0"
pytestmark = pytest.mark.nightly

SEEDS = ("1", "2") if IS_NIGHTLY else ("1",)
LEAST_FAULTS = 500  # of each run
# What may differ between two runs: when, where, and after how many losses.
_OF_THE_WAY = {
    "trial_id",
    "proposed_at",
    "started_at",
    "ended_at",
    "attempts",
    "slice_id",
    "neighbours",
}


@dataclass(frozen=True)
class Run:
    """All sessions of a run, one after the other, and the log of what struck them."""

    sessions: list[dict[str, Any]]
    log: list[dict[str, Any]]

    def faults(self, what: str) -> Counter[str]:
        return Counter(line["fault"] for line in self.log if line["what"] == what)

    @property
    def seen(self) -> Counter[str]:
        """The faults that somebody saw; that of a driver that is killed, whoever waits for it."""
        injected = self.faults("injected")
        return self.faults("seen") + Counter({fault: injected[fault] for fault in DEADLY})

    @property
    def trials(self) -> dict[str, dict[str, Any]]:
        """What the last session left of each trial, less what may differ."""
        return {
            name: {k: v for k, v in row.items() if k not in _OF_THE_WAY}
            for name, row in self.sessions[-1]["ended"].items()
        }


def cluster_of(seed: str) -> str:
    """Return a private cluster, or for odd seeds one that nodes join and leave."""
    return "joined" if int(seed) % 2 else "private"


def started(folder: Path, seed: str, intensity: float) -> subprocess.Popen[str]:
    """Start a run whose command is repeated until it finishes."""
    driver = (sys.executable, "-m", "tests.lib.chaos_driver")
    return subprocess.Popen(
        [*driver, str(folder), seed, str(intensity), cluster_of(seed)],
        env=os.environ | {"PYTHONPATH": PYTHON_PATH, "TUNERD_RUNTIME_FOLDER": str(folder.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str], folder: Path) -> Run:
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    log = Path(f"{folder}.log").read_text().splitlines()
    return Run([json.loads(line) for line in out.splitlines()], [json.loads(line) for line in log])


@pytest.fixture(scope="module")
def every() -> Iterator[dict[str, Run]]:
    """A quiet run, and one of each seed."""
    with contextlib.ExitStack() as stack:
        folders = {s: stack.enter_context(short_folder()) / "run" for s in (QUIET, *SEEDS)}
        processes = {s: started(f, s, 0.0 if s == QUIET else 1.0) for s, f in folders.items()}
        yield {s: ended(process, folders[s]) for s, process in processes.items()}


@pytest.fixture(scope="module")
def quiet(every: dict[str, Run]) -> Run:
    return every[QUIET]


@pytest.fixture(scope="module")
def runs(every: dict[str, Run]) -> dict[str, Run]:
    return {seed: every[seed] for seed in SEEDS}


def test_a_quiet_run_takes_one_session_and_meets_no_fault(quiet: Run) -> None:
    assert [s["code"] for s in quiet.sessions] == [ExitCode.BETTER]
    assert quiet.faults("injected") == Counter()
    states = Counter(row["state"] for row in quiet.trials.values())
    assert states["measured"] > 100
    assert states["failed"] > 20  # a part of the list fails in every run


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_that_suffers_every_fault_ends_as_a_quiet_one(
    runs: dict[str, Run], quiet: Run, seed: str
) -> None:
    assert runs[seed].sessions[-1]["code"] == ExitCode.BETTER
    assert runs[seed].trials == quiet.trials
    assert runs[seed].sessions[-1]["winners"] == quiet.sessions[-1]["winners"]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_trial_ends_in_one_state(runs: dict[str, Run], seed: str) -> None:
    last = runs[seed].sessions[-1]
    assert last["open"] == 0
    for row in last["ended"].values():
        is_measured = row["state"] == "measured"
        assert is_measured == (row["run_secs"] is not None) == (row["kind"] is None)
    numbers = [row["trial_id"] for row in last["ended"].values()]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_ended_is_never_lost_and_never_paid_again(runs: dict[str, Run], seed: str) -> None:
    before: dict[str, Any] = {}
    for session in runs[seed].sessions:
        now = session["ended"]
        assert {name: now.get(name) for name in before} == before
        before = now


@pytest.mark.parametrize("seed", SEEDS)
def test_the_store_is_whole_after_every_session(runs: dict[str, Run], seed: str) -> None:
    assert all(s.get("is_whole", True) for s in runs[seed].sessions)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_session_ends_with_a_sentence_or_is_killed(runs: dict[str, Run], seed: str) -> None:
    said = [line for line in runs[seed].log if line["what"] == "ended"]
    assert {s["code"] for s in runs[seed].sessions} <= {*GOES_ON, ExitCode.BETTER}, said[-1]
    assert all("\n" not in line["fault"] for line in said)
    codes = {line["pid"]: line["code"] for line in said}
    assert codes == {s["pid"]: s["code"] for s in runs[seed].sessions if s["code"] >= 0}


@pytest.mark.parametrize("seed", SEEDS)
def test_one_run_suffers_hundreds_of_faults_of_every_kind_and_each_is_seen(
    runs: dict[str, Run], seed: str
) -> None:
    run = runs[seed]
    injected, left, seen = run.faults("injected"), run.faults("overtaken"), run.seen
    assert +(injected - left) == +seen
    assert sum(s["code"] == -signal.SIGKILL for s in run.sessions) == sum(
        injected[f] for f in DEADLY
    )
    assert left.total() < injected.total() / 25
    assert seen.total() >= LEAST_FAULTS
    assert set(seen) == KINDS | (set(OF_NODES) if cluster_of(seed) == "joined" else set())


def test_candidates_that_fault_or_hang_are_among_those_of_every_run(
    runs: dict[str, Run], quiet: Run
) -> None:
    for run in (quiet, *runs.values()):
        assert set(run.faults("own")) == OWN
        kinds = {row["kind"] for row in run.trials.values()}
        assert {"compile", "crash", "timeout", "out-of-memory", "refused"} <= kinds


def test_a_full_disk_and_a_locked_store_have_exit_codes_of_their_own(runs: dict[str, Run]) -> None:
    for run in runs.values():
        for line in run.log:
            if line["what"] == "ended" and "run the same command" in line["fault"]:
                is_locked = "locked" in line["fault"]
                assert line["code"] == (ExitCode.BAD_FOLDER if is_locked else ExitCode.DISK_FULL)
