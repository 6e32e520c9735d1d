"""The end of a run: what becomes the artifact, and what does not."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import pytest

from tests.lib.models import conv_net
from tests.lib.store_places import proposed
from tunerd.artifacts.lane_check import outputs_of
from tunerd.artifacts.loading import load
from tunerd.artifacts.manifest import read_manifest
from tunerd.candidates.metaschedule.search import Searcher
from tunerd.cluster.ray_cluster import Cluster
from tunerd.cluster.tuner import Tuner
from tunerd.errors import InfrastructureError, Interrupted
from tunerd.frontend.kernels import kernels_of
from tunerd.records.outcome import outcome_from_json
from tunerd.runs.finals import finals
from tunerd.runs.finals.allowance import Allowance
from tunerd.runs.finals.finals import Ending, finish
from tunerd.runs.finals.quiet_slice import STEP_SECS, Finals, Patience, QuietSlice
from tunerd.runs.folder import RunFolder
from tunerd.runs.plan import plan_run
from tunerd.settings import TuneSettings
from tunerd.system.targets import cuda_target
from tunerd.vocabulary import (
    Arrays,
    Build,
    Candidate,
    Conditions,
    Failure,
    Kind,
    Measurement,
    Stage,
)
from tunerd.vocabulary.verdict import Verdict


@dataclass
class FakeCluster:
    """Builds and runs for real, and tells the times that a test gives."""

    tuner: Tuner
    tuned_secs: list[float]  # of the whole model, one for each time that it is timed; default: 1
    spoil: bool = False  # the outputs of the model
    mix: bool = False  # the outputs of two lanes
    timed: list[tuple[str, ...]] = field(default_factory=list)
    disturbed: int = 0  # how often the model is timed, or looked at, beside others

    def build_all(self, candidates: Sequence[Candidate]) -> list[Build | Failure]:
        return self.tuner.build(candidates)

    def call_all(self, asked: Sequence[tuple[str, str, tuple[Any, ...]]]) -> list[Any]:
        return [self.call(slice_id, method, *arguments) for slice_id, method, arguments in asked]

    def call(self, slice_id: str, method: str, *arguments: Any) -> Any:
        return getattr(self, method)(*arguments)

    def compare(self, builds: Sequence[Build], *_: Any) -> list[Measurement]:
        return [samples(2.0 if b.candidate.is_default else 1.0) for b in builds]

    def agree(self, reference: Build, build: Build, *_: Any) -> Failure | None:
        return None

    def run_model(self, artifact: str, inputs: Arrays, alone: str = "") -> Arrays:
        if alone:
            made = outputs_of(load(artifact), load(alone), inputs)
            if self.mix:
                lanes = [name for name in made if name.startswith("1 in a lane")]
                made |= {name: made[name.replace("1", "0", 1)] for name in lanes}
            return made
        outputs = load(artifact)(inputs)
        return {n: np.zeros_like(a) for n, a in outputs.items()} if self.spoil else outputs

    def compare_models(self, artifacts: tuple[str, ...], _: Any) -> list[Measurement | Failure]:
        self.timed.append(artifacts)
        if not self.tuned_secs:
            lost = Failure(Stage.RUN, Kind.CRASH, "the runner ended")
            return [lost for _ in artifacts]
        results = [samples(1.0), samples(self.tuned_secs.pop(0))]
        return [replace(r, conditions=self.conditions()) for r in results]

    def conditions(self) -> Conditions:
        self.disturbed -= 1
        return Conditions(disturbed_by="pid 7" if self.disturbed >= 0 else "")


def samples(secs: float) -> Measurement:
    return Measurement(tuple(secs * (1 + 1e-4 * i) for i in range(20)), 1, "any", "quiet", 1)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    folder = tmp_path_factory.mktemp("model")
    onnx.save(conv_net(), folder / "tiny.onnx")
    settings = TuneSettings(
        model=folder / "tiny.onnx", out=folder / "run", cpu_pct=50, slice_kind="simulated"
    )
    planned = plan_run(settings)
    kernels = kernels_of(planned.model, planned.layout.target)
    conv = max(kernels.tasks, key=lambda t: t.flops)
    (candidate,) = Searcher(seed=0, threads=1).propose(conv, 1).candidates
    tuner = Tuner(seed=0, threads=1, island_number=0)
    tuner.warm_up(kernels.tasks)
    return planned, kernels, candidate, tuner


@pytest.fixture
def ending(prepared: tuple[Any, ...], tmp_path: Path) -> Iterator[Ending]:
    """A run with one measured trial, before its finals."""
    planned, kernels, candidate, tuner = prepared
    with RunFolder.open(tmp_path / "run", facts=planned.facts) as folder:
        first = planned.layout.slices[0][0]
        folder.store.register_tasks(kernels.tasks)
        (tried,) = proposed(folder.store, [candidate])
        folder.store.start([tried], "quiet")
        folder.store.finish(tried, samples(1.0))
        yield Ending(
            plan=planned,
            folder=folder,
            kernels=kernels,
            quiet=QuietSlice(
                cast(Cluster, FakeCluster(tuner, [0.5])),
                first.slice_id,
                finals=Finals(model_bytes=kernels.touched_bytes),
            ),
            cores=first.cores,
            proofs=(),
            say=lambda message: None,
            enter=lambda phase: None,
        )


def with_cluster(ending: Ending, **changes: Any) -> tuple[Ending, FakeCluster]:
    cluster = replace(cast(FakeCluster, ending.quiet.cluster), timed=[], **changes)
    quiet = replace(ending.quiet, cluster=cast(Cluster, cluster))
    return replace(ending, quiet=quiet), cluster


def sleeping(ending: Ending, sleep: Callable[[float], None]) -> Ending:
    """Have the finals wait so for a quiet device."""
    return replace(ending, quiet=replace(ending.quiet, patience=Patience(sleep=sleep)))


def left(ending: Ending) -> list[str]:
    root = ending.folder.paths.root
    return sorted(p.name for p in root.iterdir() if p.name.startswith(("artifact", "trials")))


@pytest.mark.parametrize("is_cuda", [False, True])
def test_default_models_of_a_gpu_are_compiled_while_winners_are_chosen(
    ending: Ending, monkeypatch: pytest.MonkeyPatch, is_cuda: bool
) -> None:
    """On CPUs finalists are timed on the cores that compile."""
    compiled, has_compiled = [], threading.Event()

    def note(_: Ending, outcomes: Sequence[Any], folder: Path, **__: Any) -> None:
        compiled.append((folder.name, len(outcomes)))
        has_compiled.set()

    def choose(*_: Any, **__: Any) -> Any:
        if is_cuda:
            assert has_compiled.wait(60)
        raise Interrupted("stopped on request")

    monkeypatch.setattr(finals, "_compile", note)
    monkeypatch.setattr(finals, "choose_winners", choose)
    target = cuda_target("9.0") if is_cuda else ending.plan.layout.target
    plan = replace(ending.plan, layout=replace(ending.plan.layout, target=target))
    with pytest.raises(Interrupted):
        finish(replace(ending, plan=plan))
    assert compiled == ([("default", 0)] if is_cuda else [])


def test_a_model_that_is_right_and_faster_becomes_the_artifact(ending: Ending) -> None:
    outcome = finish(ending)
    assert outcome.end_to_end.verdict is Verdict.FASTER
    assert outcome.verification.verdict is Verdict.RIGHT
    assert left(ending) == ["artifact"]
    manifest = read_manifest(Path(outcome.artifact))
    assert manifest["hit_rate"] == outcome.hit_rate > 0
    assert manifest["verification"]["verdict"] == "right"


def test_a_model_that_is_slower_as_a_whole_ships_its_default_schedules(ending: Ending) -> None:
    ending, cluster = with_cluster(ending, tuned_secs=[1.5, 1.0])
    outcome = finish(ending)
    assert outcome.hit_rate == 0
    assert read_manifest(Path(outcome.artifact))["hit_rate"] == 0
    assert {t.note for t in outcome.tasks} >= {"the whole model is slower with it"}
    # A runner keeps what it has loaded by its path: the second try must not be the first model.
    (default, tuned), (again, untuned) = cluster.timed
    assert default == again
    assert tuned != untuned
    assert left(ending) == ["artifact"]


def test_what_was_found_stays_where_onnxruntime_could_not_be_timed_beside_it(
    ending: Ending,
) -> None:
    ending = replace(ending, cores=(min(os.sched_getaffinity(0)),))
    outcome = finish(ending)
    assert outcome.remarks == (
        "ONNX Runtime was not timed: the tuned model could not be timed: the runner ended",
    )
    assert [latency.name for latency in outcome.latencies] == ["default", "tuned"]
    assert left(ending) == ["artifact"]
    kept = ending.folder.store.outcome()
    assert kept is not None
    assert outcome_from_json(kept).remarks == outcome.remarks


def test_a_run_whose_finals_have_no_time_is_verified_and_compared_and_says_so(
    ending: Ending,
) -> None:
    ending = replace(ending, allowance=Allowance(-1.0, now=lambda: 0.0))
    outcome = finish(ending)
    assert outcome.verification.verdict is Verdict.RIGHT
    assert outcome.end_to_end.verdict is Verdict.FASTER
    assert outcome.hit_rate > 0
    cut, exceeded = outcome.remarks
    assert cut.startswith("to keep the finals to a third of the run's time of 1 task 1 had fewer")
    assert cut.endswith("the whole model was timed in fewer turns")
    assert exceeded.startswith("the finals took 1 s more than a third of the run's time")
    kept = ending.folder.store.outcome()
    assert kept is not None
    assert outcome_from_json(kept).remarks == outcome.remarks


def test_a_wrong_model_is_rejected_and_no_artifact_is_left(ending: Ending) -> None:
    finish(ending)
    spoiled, _ = with_cluster(ending, tuned_secs=[0.5], spoil=True)
    outcome = finish(spoiled)
    assert outcome.verification.verdict is Verdict.WRONG
    assert left(ending) == ["artifact.rejected"]


def test_each_lane_of_a_model_for_tenants_is_compared_with_its_tenant_alone(
    ending: Ending,
) -> None:
    tasks = tuple(task.for_tenants(2) for task in ending.kernels.tasks)
    ending.folder.store.register_tasks(tasks)
    cast(FakeCluster, ending.quiet.cluster).tuner.warm_up((*ending.kernels.tasks, *tasks))
    settings = ending.plan.settings.model_copy(update={"tenants": (2,)})
    ending = replace(
        ending,
        plan=replace(ending.plan, settings=settings),
        kernels=replace(ending.kernels, tasks=tasks),
        unsearched={task.task_id: "" for task in tasks},
    )
    outcome = finish(ending)
    assert outcome.verification.verdict is Verdict.RIGHT
    assert "the kernels for one model, of its tenant's weights" in outcome.verification.message
    assert read_manifest(Path(outcome.artifact))["tenants"] == 2
    assert left(ending) == ["artifact"]
    mixed, _ = with_cluster(ending, tuned_secs=[0.5], mix=True)
    outcome = finish(mixed)
    assert outcome.verification.verdict is Verdict.WRONG
    assert left(ending) == ["artifact.rejected"]


def test_nothing_unverified_is_left_where_the_finals_are_interrupted(ending: Ending) -> None:
    def stop(message: str) -> None:
        if message.startswith("comparing outputs"):
            raise Interrupted("stopped")

    with pytest.raises(Interrupted):
        finish(replace(ending, say=stop))
    assert left(ending) == []


def test_an_artifact_stays_until_the_next_one_is_verified(ending: Ending) -> None:
    finish(ending)
    failing, _ = with_cluster(ending, tuned_secs=[])
    with pytest.raises(InfrastructureError, match="default model could not be timed"):
        finish(failing)
    assert left(ending) == ["artifact"]
    assert read_manifest(ending.folder.paths.artifact)["verification"]["verdict"] == "right"


def test_a_model_that_was_timed_beside_others_is_timed_again(ending: Ending) -> None:
    ending, cluster = with_cluster(ending, tuned_secs=[0.9, 0.5], disturbed=2)
    slept: list[float] = []
    outcome = finish(sleeping(ending, slept.append))
    assert len(cluster.timed) == 2
    assert slept == [STEP_SECS]
    assert outcome.end_to_end.new_secs == pytest.approx(0.5, rel=0.01)
    assert outcome.disturbed_by == ""


def test_a_model_whose_device_does_not_become_quiet_says_so(ending: Ending) -> None:
    ending, cluster = with_cluster(ending, tuned_secs=[0.5], disturbed=10**6)
    outcome = finish(sleeping(ending, lambda secs: None))
    assert len(cluster.timed) == 1
    assert outcome.disturbed_by == "pid 7"
    stored = ending.folder.store.outcome()
    assert stored is not None
    assert outcome_from_json(stored).disturbed_by == "pid 7"
