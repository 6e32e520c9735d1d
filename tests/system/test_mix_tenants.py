"""Several ONNX files of one architecture in a mix: one artifact's kernels serve them all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from onnx import numpy_helper

from tests.lib.artifact_fixtures import CORES, tiny_artifact
from tests.lib.colocation_plans import colocate
from tests.lib.models import conv_net, floats
from tests.lib.waiting import until
from tunerd import api
from tunerd.api.mix_artifacts import MixArtifacts, Steps
from tunerd.artifacts.manifest import pcts_of, read_variants
from tunerd.colocation import Engine, Plan
from tunerd.colocation.planning.lacking import Lacking
from tunerd.colocation.planning.mix import Mix, names_of
from tunerd.errors import ExitCode, InputError
from tunerd.frontend.onnx.reference import Reference, agree

NAMES = ("net-0", "net-1")
# One request in a launch is told to be so slow that two have to go together, however slow a launch
# of two is measured to be on a host with much else to do.
RATE = 4
POINTS = [{"of": "net", "share": 100, "secs": [0.15]}]
MIX: dict[str, Any] = {
    "members": [{"name": "net", "models": ["a.onnx", "b.onnx"], "rate": RATE, "slo_ms": 4000}],
    "search": {"shares": [100], "together": [1, 2, 4], "budget": "1s", "rounds": 1, "visit": "1s"},
    "curves": ["points.json"],
    "load": {"duration": "2s"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, factor in (("a", 1.0), ("b", 3.0)):
        proto = conv_net((1, 3, 8, 8))
        for weight in proto.graph.initializer:
            values = factor * numpy_helper.to_array(weight)
            weight.CopyFrom(numpy_helper.from_array(values.astype("float32"), weight.name))
        onnx.save(proto, tmp_path / f"{name}.onnx")
    (tmp_path / "points.json").write_text(json.dumps(POINTS))
    (tmp_path / "mix.yaml").write_text(yaml.safe_dump(MIX))
    return tmp_path


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::tunerd.MismatchWarning")
@pytest.mark.usefixtures("kept_cluster")
def test_models_of_one_architecture_are_tuned_planned_proved_and_served_in_one_launch(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mix, out = folder / "mix.yaml", folder / "out"
    assert colocate("plan", mix, "--out", out, "--dry-run") == ExitCode.CANNOT_TELL
    said = " ".join(capsys.readouterr().out.split())
    assert "tune net at 100%, for 1, 2 models in a launch: 1 s of search each" in said

    assert colocate(mix, "--out", out) in (ExitCode.BETTER, ExitCode.REGRESSION)
    capsys.readouterr()
    plan = Plan.read(out / "plan.yaml")
    assert [(m.name, m.rate) for m in plan.members] == [(name, RATE) for name in NAMES]
    assert (plan.policy.kind, plan.policy.parameters["together"]) == ("space-time", 2)
    document = json.loads((out / "answer.json").read_text())
    assert document["answer"] == "plan"
    assert all(member["answered"] for member in document["proof"]["members"])

    feeds = [{"images": floats(1, 3, 8, 8, seed=seed)} for seed in range(10)]
    expected = {
        name: [Reference(onnx.load(folder / path)).run(feed)["scores"] for feed in feeds]
        for name, path in zip(NAMES, ("a.onnx", "b.onnx"), strict=True)
    }
    asked = 0
    with Engine(plan) as engine:

        def has_launched_two_together() -> bool:
            nonlocal asked
            futures = {name: [engine.submit(name, feed) for feed in feeds] for name in NAMES}
            asked += len(feeds) * len(NAMES)
            for name in NAMES:
                for future, scores in zip(futures[name], expected[name], strict=True):
                    assert agree(np.asarray(future.result(60)["scores"]), scores, rtol=1e-3)
            (launches,) = engine.stats().groups.values()
            assert launches.requests == asked
            return launches.launches < asked

        # A host that launches faster than it asks gives a request no company at first.
        until(has_launched_two_together)

    # All of it is kept: the same mix is planned without tuning or measuring again.
    again = api.colocate_plan(mix, out=out, dry_run=True)
    assert again.answer.to_measure == ()
    assert again.plan == plan


def test_several_models_of_an_entry_are_members_of_one_architecture(folder: Path) -> None:
    (entry,) = Mix.read(folder / "mix.yaml").members
    assert names_of(entry) == NAMES
    assert entry.models == (folder / "a.onnx", folder / "b.onnx")


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"models": ["a.onnx"]}, "one of `models`; call it `model`"),
        (
            {"models": ["a.onnx", "b.onnx"], "model": "a.onnx"},
            "needs one of `model`, `artifact` and",
        ),
    ],
)
def test_a_mistake_in_models_is_named(said: dict[str, Any], problem: str, tmp_path: Path) -> None:
    path = tmp_path / "mix.yaml"
    path.write_text(yaml.safe_dump({"members": [{"name": "net", "rate": 1} | said]}))
    with pytest.raises(InputError, match=problem):
        Mix.read(path)


def test_a_place_that_has_no_launches_of_several_is_refused(folder: Path) -> None:
    (folder / "mix.yaml").write_text(yaml.safe_dump(MIX | {"place": "processes"}))
    with pytest.raises(InputError, match="the place in-process alone has"):
        Mix.read(folder / "mix.yaml")


def test_a_model_of_its_own_is_tuned_at_each_share_and_has_no_tenants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def tune(model: Path, *, cpu_pct: int, **_: Any) -> Any:
        asked.append(cpu_pct)
        folder = tmp_path / f"run-{cpu_pct}" / "artifact"
        tiny_artifact(folder, pct=cpu_pct, proof=replace(CORES, sm_count=cpu_pct // 50))
        return SimpleNamespace(artifact=SimpleNamespace(path=folder))

    monkeypatch.setattr("tunerd.api.tuning.tune", tune)
    mix = Mix.model_validate({
        "members": [{"name": "one", "model": "one.onnx", "rate": 1}], "search": {"shares": [50]}
    })  # fmt: skip
    makes = MixArtifacts(
        mix, tmp_path / "out", (50, 100), Steps(lambda _: None), Lacking(), is_dry=False
    )
    (artifact,) = makes.of(mix.members[0])
    assert asked == [50, 100]
    assert pcts_of(read_variants(artifact)) == (50, 100)
