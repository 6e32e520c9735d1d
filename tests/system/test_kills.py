"""Real processes of a run, killed with SIGKILL at moments that a seed draws; nightly, two of each.

Or asked to end by SIGTERM, with seconds to live. What every fault does to a fixed list of
candidates is in test_chaos.py.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import psutil
import pytest

from tests.lib import IS_NIGHTLY
from tests.lib.models import conv_net
from tests.lib.ray_processes import child, short_folder
from tests.lib.tune_process import Run, is_alive, started_with
from tunerd.errors import ExitCode
from tunerd.records import Store
from tunerd.records.paths import Paths
from tunerd.system import host
from tunerd.telemetry.status_file import read_status
from tunerd.vocabulary import Record

EACH = 2 if IS_NIGHTLY else 1
TRIALS = 32 * EACH
SEED = 20
GONE_SECS = 15.0
TO_LIVE_SECS = 30.0  # from SIGTERM to SIGKILL, where a scheduler takes a machine back
FINISHED = {ExitCode.BETTER, ExitCode.NO_GAIN, ExitCode.CANNOT_TELL}
# A trial that is lost a third time is taken for the cause.
MOST_LOSSES = 2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        host.facts().usable_cores < 2, reason="these runs use two slices of a core each"
    ),
]


@dataclass
class Killed:
    """A run of which processes were killed, and how it ended."""

    run: Run
    kills: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    ends: list[tuple[str, int, str]] = field(default_factory=list)  # of sessions cut off
    left: list[list[str]] = field(default_factory=list)  # what outlived each of those
    ended: list[dict[int, Record]] = field(default_factory=list)  # after each of those
    last: tuple[int, str, str] = (-1, "", "")


@pytest.fixture(scope="module")
def run_in() -> Iterator[tuple[Path, Path]]:
    """A model, and a folder that every process of a run has in its environment."""
    with short_folder() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNERD_RUNTIME_FOLDER", str(folder))
        onnx.save(conv_net(), folder / "net.onnx")
        yield folder / "net.onnx", folder
        for process in of_the_run(folder):
            process.kill()


def of_the_run(folder: Path) -> list[psutil.Process]:
    """Return whatever the run in a folder has started, also what has lost its parent."""
    return started_with("TUNERD_RUNTIME_FOLDER", str(folder))


def outlived(folder: Path) -> list[str]:
    """Return what of a run lives on for long after a kill."""
    deadline = time.monotonic() + GONE_SECS
    while (left := of_the_run(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [f"{p.pid} {p.name()}" for p in left if is_alive(p)]


def called(processes: list[psutil.Process], word: str) -> list[psutil.Process]:
    """Return the living ones of a name: of a program, a module, or an actor."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            words = [process.name(), *process.cmdline()]
            if word in words or any(w.startswith(f"ray::{word}") for w in words):
                found.append(process)
    return [p for p in found if is_alive(p)]


WORKERS = {"runner": "tunerd.runner.process", "slice actor": "SliceActor", "tuner": "TunerActor"}


def most_losses(folder: Path) -> int:
    """Return how often any trial that has not ended was lost."""
    store = f"file:{folder / 'store.sqlite'}?mode=ro"
    with contextlib.closing(sqlite3.connect(store, uri=True)) as raw:
        query = """SELECT count(*) FROM setbacks JOIN trials USING (trial_id)
                   WHERE state IN ('proposed', 'running') GROUP BY trial_id ORDER BY 1 DESC"""
        return int((raw.execute(query).fetchone() or [0])[0])


# --- workers -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def robbed(run_in: tuple[Path, Path]) -> Killed:
    """A run whose runners, slice actors and tuners are killed while it searches."""
    model, folder = run_in
    found = Killed(Run(folder / "robbed", model, ("--budget", "1h")))
    run, rng = found.run, random.Random(SEED)
    order = [kind for kind in WORKERS for _ in range(EACH)]
    rng.shuffle(order)
    run.start()
    run.wait_for(lambda: run.measured() >= 4)
    for kind in order:
        at_least = run.measured() + rng.randint(1, 3)
        run.wait_for(lambda least=at_least: run.measured() >= least)  # type: ignore[misc]
        run.wait_for(lambda: most_losses(run.folder) < MOST_LOSSES)
        run.wait_for(lambda kind=kind: bool(called(run.processes(), WORKERS[kind])))  # type: ignore[misc]
        before = called(run.processes(), WORKERS[kind])
        # The oldest, so that workers take turns: one that does nothing in between is given up.
        min(before, key=psutil.Process.create_time).kill()
        found.kills[kind] += 1

        def replaced(kind: str = kind, before: list[psutil.Process] = before) -> bool:
            return any(p not in before for p in called(run.processes(), WORKERS[kind]))

        run.wait_for(replaced)
        found.seen[kind] += 1
    assert run.process is not None
    run.process.terminate()
    found.ends.append(("stopped", *run.end()[::2]))
    run.options = ("--trials", str(len(run.records())))
    run.start()
    found.last = run.end()
    return found


def test_a_run_whose_workers_are_killed_finishes(robbed: Killed) -> None:
    ((_, stopped, said),) = robbed.ends
    assert stopped == ExitCode.INTERRUPTED, said
    code, _, err = robbed.last
    assert code in FINISHED, err
    assert robbed.kills == robbed.seen == dict.fromkeys(WORKERS, EACH)


def test_every_trial_of_a_robbed_run_ends_once_and_none_is_blamed(robbed: Killed) -> None:
    records = robbed.run.records()
    assert len({r.candidate.candidate_id for r in records}) == len(records) > 3 * EACH
    assert all(r.result is not None for r in records)
    assert not [r for r in records if "lost" in getattr(r.result, "message", "")]


# --- SIGTERM -----------------------------------------------------------------------------------

MOMENTS: tuple[str, ...] = ("starting", "tuning", "finishing")
if not IS_NIGHTLY:  # test_actors.py has one that tunes
    MOMENTS = ("starting", "finishing")
STOPPED_TRIALS = 32


@pytest.fixture(scope="module")
def stopped(run_in: tuple[Path, Path]) -> Killed:
    """A run that gets SIGTERM in each session, with seconds to live, and is then left alone."""
    model, folder = run_in
    found = Killed(
        Run(
            folder / "stopped",
            model,
            ("--tuners", "1", "--slices", "1", "--trials", str(STOPPED_TRIALS)),
        )
    )
    run = found.run
    for moment in MOMENTS:
        run.start()
        run.wait_for(lambda moment=moment: is_in(run, moment))  # type: ignore[misc]
        if moment == "starting":
            run.wait_for(lambda: bool(called(run.processes(), "raylet")))
        if moment == "tuning":
            at_least = run.measured() + 8
            run.wait_for(lambda least=at_least: run.measured() >= least)  # type: ignore[misc]
        before = ended_in(run)
        assert run.process is not None
        run.process.terminate()
        code, out, err = run.end(within_secs=TO_LIVE_SECS)
        found.ends.append((moment, code, out + err))
        found.left.append(outlived(folder))
        found.ended += [before, ended_in(run)]
    run.start()
    found.last = run.end()
    return found


def is_in(run: Run, phase: str) -> bool:
    told = read_status(Paths(run.folder))
    return (
        told is not None
        and run.process is not None
        and (told.pid, told.phase, told.end)
        == (
            run.process.pid,
            phase,
            None,
        )
    )


def ended_in(run: Run) -> dict[int, Record]:
    return {r.trial_id: r for r in run.records() if r.result is not None}


def test_a_run_that_gets_sigterm_ends_by_itself_before_it_is_killed(stopped: Killed) -> None:
    assert [moment for moment, _, _ in stopped.ends] == list(MOMENTS)
    for moment, code, said in stopped.ends:
        assert code == ExitCode.INTERRUPTED, f"{moment}: {said}"
        assert "the same command goes on" in said
    assert stopped.left == [[]] * len(MOMENTS)


def test_no_trial_is_lost_or_paid_twice_over_sigterms_and_the_last_command_finishes(
    stopped: Killed,
) -> None:
    code, out, err = stopped.last
    assert code in FINISHED, err
    assert json.loads(out)["exit_code"] == code
    assert len(stopped.ended[-1]) == STOPPED_TRIALS  # it was stopped in its finals
    for earlier, later in itertools.pairwise([*stopped.ended, ended_in(stopped.run)]):
        assert {number: later.get(number) for number in earlier} == earlier
    records = stopped.run.records()
    assert len({r.candidate.candidate_id for r in records}) == len(records) == STOPPED_TRIALS
    assert not [r for r in records if "lost" in getattr(r.result, "message", "")]


# --- nodes -------------------------------------------------------------------------------------

# Two nodes, of which the second leaves and another one joins when a line comes.
_NODES = """
import os, sys
from ray.cluster_utils import Cluster
os.makedirs(os.environ["RAY_TMPDIR"] + "/ray")
node = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 100 << 20}
head = Cluster(initialize_head=True, head_node_args=node)
second = head.add_node(**node)
print('{"address": "%s"}' % head.address, flush=True)
sys.stdin.readline()
head.remove_node(second, allow_graceful=False)
head.add_node(**node)
sys.stdin.read()
head.shutdown()
"""


def workers(run: Run) -> set[str]:
    """Return who has worked in a run."""
    with Store.read(run.folder) as store:
        return {s.worker for s in store.spans() if s.items}


@pytest.mark.nightly
def test_a_run_goes_on_without_a_node_that_left_and_with_one_that_joined(
    run_in: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = run_in
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "7" * 64, "RAY_USAGE_STATS_ENABLED": "0"}
    for name, value in token.items():
        monkeypatch.setenv(name, value)
    soon = {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "3"}
    with short_folder() as ray, child(_NODES, RAY_TMPDIR=str(ray), **token, **soon) as cluster:
        options = ("--slice", "simulated", "--address", cluster.said["address"])
        run = Run(folder / "nodes", model, (*options, "--budget", "1h"))
        run.start()
        run.wait_for(lambda: run.measured() >= 8 and "tuner-1-0" in workers(run))
        assert cluster.process.stdin is not None
        cluster.process.stdin.write("\n")
        cluster.process.stdin.flush()
        run.wait_for(lambda: "tuner-2-0" in workers(run))
        assert run.process is not None
        run.process.terminate()
        code, _, err = run.end()
        assert code == ExitCode.INTERRUPTED, err
        assert "ERROR lost tuner-1-0" in err
        run.options = (*options, "--trials", str(len(run.records())))
        run.start()
        code, _, err = run.end()
    assert code in FINISHED, err
    assert all(r.result is not None for r in run.records())


# --- driver and raylet -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cut_off(run_in: tuple[Path, Path]) -> Killed:
    """A run whose driver or raylet is killed in each session: at the start, or while it tunes.

    Of a driver the start comes first, of a raylet the tuning.
    """
    model, folder = run_in
    found = Killed(Run(folder / "cut", model, ("--tuners", "1", "--trials", str(TRIALS))))
    run, rng = found.run, random.Random(SEED)
    order = [kind for kind in ("driver", "raylet") for _ in range(EACH)]
    rng.shuffle(order)
    for kind in order:
        sessions = sessions_with_ray(run)
        run.start()
        assert run.process is not None
        driver = psutil.Process(run.process.pid)
        # Ray itself aborts a driver that loses its raylet in the middle of ray.init.
        if kind == "driver":
            run.wait_for(lambda: bool(called(run.processes(), "raylet")))
        else:
            run.wait_for(lambda sessions=sessions: sessions_with_ray(run) > sessions)  # type: ignore[misc]
        if found.kills[kind] % 2 == (kind == "raylet"):
            time.sleep(rng.uniform(0.0, 3.0))  # any moment of the start
        else:
            at_least = run.measured() + rng.randint(1, 8)
            run.wait_for(lambda least=at_least: run.measured() >= least)  # type: ignore[misc]
        (victim,) = [driver] if kind == "driver" else called(run.processes(), "raylet")
        victim.kill()
        found.kills[kind] += 1
        if kind == "driver":
            run.process.wait()
        found.left.append(outlived(folder))
        code, _, err = run.end()
        found.ends.append((kind, code, err))
        found.ended.append(ended_in(run))
    run.start()
    found.last = run.end()
    return found


def sessions_with_ray(run: Run) -> int:
    """Return how many sessions of a run have had their cluster."""
    log = Paths(run.folder).logs / "tunerd.jsonl"
    return log.read_text().count("Ray is there") if log.exists() else 0


def test_a_driver_that_is_killed_while_ray_starts_leaves_nothing(
    run_in: tuple[Path, Path],
) -> None:
    model, folder = run_in
    run = Run(
        folder / "starting",
        model,
        ("--slice", "simulated", "--tuners", "1", "--slices", "1", "--trials", "4"),
    )
    run.start()
    run.wait_for(lambda: bool(called(run.processes(), "raylet")))
    assert run.process is not None
    run.process.kill()
    run.end()
    assert sessions_with_ray(run) == 0
    assert outlived(folder) == []


@pytest.mark.nightly
def test_nothing_is_left_15_s_after_a_driver_or_a_raylet_was_killed(cut_off: Killed) -> None:
    assert cut_off.kills == {"driver": EACH, "raylet": EACH}
    assert cut_off.left == [[]] * len(cut_off.left)


@pytest.mark.nightly
def test_a_run_without_its_raylet_says_so_and_has_its_exit_code(cut_off: Killed) -> None:
    for kind, code, err in cut_off.ends:
        if kind == "raylet":
            assert code == ExitCode.INFRASTRUCTURE, err
            assert "Ray's raylet on this machine ended" in err.splitlines()[-1]


@pytest.mark.nightly
def test_no_trial_is_lost_or_paid_twice_over_these_kills(cut_off: Killed) -> None:
    code, out, err = cut_off.last
    assert code in FINISHED, err
    assert json.loads(out)["exit_code"] == code
    last = {r.trial_id: r for r in cut_off.run.records()}
    for ended in cut_off.ended:
        assert {number: last[number] for number in ended} == ended
    assert len(last) == TRIALS
    assert len({r.candidate.candidate_id for r in last.values()}) == TRIALS
    assert all(r.result is not None for r in last.values())
