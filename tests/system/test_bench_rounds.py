"""Benches: artifacts that slices repeat, alone and beside others, in rounds."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.lib.artifact_fixtures import tiny_artifact
from tunerd import api
from tunerd.cli.app import app
from tunerd.cli.errors import run
from tunerd.errors import ExitCode, InfrastructureError, Interrupted
from tunerd.runner.load import Repeats
from tunerd.slices import plan
from tunerd.slices.simulated import SimulatedRunner, SimulatedSlice
from tunerd.studies.bench.bandwidth_load import memory_hog
from tunerd.studies.bench.replicas import Cast, run_rounds
from tunerd.studies.timing import StartedSlice
from tunerd.system import cores, host
from tunerd.vocabulary import Failure, Kind, SliceRequest, Stage, TargetSpec

Captured = pytest.CaptureFixture[str]
SIMULATED = plan(SliceRequest("simulated", 50)).slices


def pct_of_a_core() -> int:
    return -(-100 // host.facts().usable_cores)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work") / "artifact"
    tiny_artifact(folder)
    return folder


def test_a_memory_hog_streams_over_more_than_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "last_level_cache_bytes", lambda: 256 << 20)
    monkeypatch.setattr(cores, "memory_bytes", lambda: 1 << 40)
    for hogs in (1, 2):
        work, size = memory_hog(TargetSpec("llvm", '{"kind":"llvm"}'), cores=3, hogs=hogs)
        assert work.build is not None
        assert size * hogs >= 2 * (256 << 20) - 3 * hogs * 4096
    monkeypatch.setattr(cores, "memory_bytes", lambda: 1 << 30)
    _, size = memory_hog(TargetSpec("llvm", '{"kind":"llvm"}'), cores=1)
    assert size < (1 << 30) // 4  # where memory is short, less of it


# --- the command -------------------------------------------------------------------------------


def bench(*argv: str) -> int:
    return int(run(app, ["bench", *argv]))


def test_an_artifact_is_measured_and_every_inference_is_kept(
    artifact: Path, tmp_path: Path, capsys: Captured
) -> None:
    raw = tmp_path / "raw.json"
    share = ("--cpu-pct", str(pct_of_a_core()), "--duration", "1s")
    assert bench(str(artifact), *share, "--to", str(raw), "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["raw"] == str(raw)
    kept = json.loads(raw.read_text())
    (alone,) = {r["condition"] for r in kept["rounds"]}
    assert alone == "alone"
    latencies = [s for r in kept["rounds"] for s in r["replicas"][0]["latency_secs"]]
    assert len(latencies) >= document["samples"] > 0
    assert document["p50_secs"] == pytest.approx(float(np.median(latencies)), rel=0.05)
    assert document["slowdown"] is None


def test_a_bench_that_is_stopped_says_so_at_once_and_that_nothing_was_kept(artifact: Path) -> None:
    steps: list[str] = []

    def step(said: str) -> None:
        steps.append(said)
        if said.startswith("round 2"):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted, match="nothing was kept, and the same command begins anew"):
        api.bench(artifact, cpu_pct=pct_of_a_core(), duration_secs=1, on_step=step)
    assert steps[-1] == "stopping: nothing is kept"


@pytest.mark.skipif(host.facts().usable_cores < 2, reason="neighbours take a second core")
@pytest.mark.parametrize("beside", ["copies", "memory-hog", "artifact"])
def test_an_artifact_is_measured_beside_neighbours(
    artifact: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, beside: str
) -> None:
    monkeypatch.setattr(cores, "last_level_cache_bytes", lambda: 32 << 20)
    given = str(artifact) if beside == "artifact" else beside
    share = ("--cpu-pct", str(pct_of_a_core()), "--duration", "1s")
    assert bench(str(artifact), *share, "--beside", given, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    slices = host.facts().usable_cores
    found = document["conditions"]["beside"]
    assert len(found["replicas"]) == (slices if beside == "copies" else 1)
    assert len(found["others"]) == (0 if beside == "copies" else slices - 1)
    assert document["slowdown"]["ratio_low"] <= document["slowdown"]["ratio"]
    assert all(rate > 0 for rate in document["hog_gbps"])
    conditions = {"alone", "beside"}
    if beside == "artifact" and slices == 2:
        conditions.add("neighbour")
        assert len(document["conditions"]["neighbour"]["others"]) == 1
        assert document["neighbour_slowdown"]["ratio"] > 0
    assert {r["condition"] for r in document["rounds"]} == conditions


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--beside", "copies"], "takes two slices at least"),
        (["--beside", "memory-hog"], "none is left for --beside"),
        (["--replicas", "9"], "more than fit"),
        (
            ["--beside", "nowhere"],
            "--beside takes copies, memory-hog or an artifact, but there is no folder nowhere",
        ),
        (["--duration", "0.1s"], "too short"),
        (["--duration", "soon"], "not a duration"),
        (["--gpu-pct", "40"], "give its share by --cpu-pct"),
    ],
)
def test_what_cannot_be_measured_is_said_before_a_slice_starts(
    artifact: Path, capsys: Captured, flags: list[str], said: str
) -> None:
    assert bench(str(artifact), "--cpu-pct", "100", *flags) == ExitCode.BAD_INPUT
    assert said in capsys.readouterr().err


def playing(runners: Sequence[type[SimulatedRunner]]) -> tuple[StartedSlice, ...]:
    """Start simulated slices whose runners are of these types."""
    started = (SimulatedSlice(spec) for spec in SIMULATED)
    pairs = zip(runners, started, strict=False)
    return tuple(StartedSlice(s, runner(s.spec), s.prove()) for runner, s in pairs)


def test_a_round_in_which_slices_miss_each_other_is_run_again_and_longer() -> None:
    asked: list[float] = []

    class Late(SimulatedRunner):
        """Begins too late until a round is long enough."""

        def repeat(self, start_at: float, stop_at: float | None = None) -> None:
            assert stop_at is not None
            asked.append(stop_at - start_at)
            super().repeat(start_at + (0 if asked[-1] > 0.3 else 10), stop_at + 10)

    first, late = playing([SimulatedRunner, Late])
    rounds = run_rounds(
        Cast((first,), (late,)), duration_secs=0.1, slowest_secs=1e-3, say=lambda _: None, rounds=1
    )
    assert [r.problem for r in rounds] == ["", ""]
    assert asked == pytest.approx([0.1, 0.2, 0.4])


def test_slices_that_never_work_at_once_are_an_error() -> None:
    class Never(SimulatedRunner):
        def repeat(self, start_at: float, stop_at: float | None = None) -> None:
            super().repeat(start_at, start_at)

    cast = Cast(playing([SimulatedRunner, Never]))
    with pytest.raises(InfrastructureError, match="did not work in a round"):
        run_rounds(cast, duration_secs=0.1, slowest_secs=1e-3, say=lambda _: None)


def test_a_slice_that_fails_in_a_round_is_an_error() -> None:
    class Failing(SimulatedRunner):
        def stop(self) -> Repeats | Failure:
            return Failure(Stage.RUN, Kind.CRASH, "it fell")

    with pytest.raises(InfrastructureError, match="simulated-0-0 failed in a round: it fell"):
        run_rounds(Cast(playing([Failing])), duration_secs=1, slowest_secs=1, say=lambda _: None)
