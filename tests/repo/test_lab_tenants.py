"""Tenants that the lab makes for its plans, and the artifacts that recipes of them name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import tunerd
from lab.colocation import latency, tenants
from lab.colocation.contenders import engine_plan
from lab.colocation.latency import BENCHES, RECIPES
from lab.colocation.tenants import RUNS, Kind
from lab.colocation.ways import all_ways
from tests.lib.super_models import ENCODER, artifact_of, tenant
from tunerd.artifacts.manifest import read_all_variants
from tunerd.artifacts.packing import pack_tenants
from tunerd.artifacts.super_model import SuperModel
from tunerd.colocation import Plan
from tunerd.system.arrays import random_inputs


def test_recipes_have_the_artifacts_that_are_made_for_them() -> None:
    for part in BENCHES.values():
        plan = Plan.read(RECIPES / f"{part.recipe}.yaml")
        wanted = {member.artifact.parts[-2:] for member in plan.members}
        made = {
            (kind.run(RUNS).name, f"tenant-{seed}")
            for kind, count in part.kinds
            for seed in range(count)
        }
        assert wanted == made


@pytest.mark.parametrize(
    ("recipe", "kinds"),
    [
        ("ten-replicas-mps", ((latency.TENTH, 10),)),
        ("short-beside-longer", ((latency.SHORT, 1), (Kind("encoder", 75, batch=160), 1))),
    ],
)
def test_recipes_outside_of_the_parts_have_the_artifacts_that_their_commands_make(
    recipe: str, kinds: tuple[tuple[Kind, int], ...]
) -> None:
    plan = Plan.read(RECIPES / f"{recipe}.yaml")
    wanted = [member.artifact.parts[-2:] for member in plan.members]
    assert wanted == [
        (kind.run(RUNS).name, f"tenant-{seed}") for kind, count in kinds for seed in range(count)
    ]


def test_recipes_of_saturated_models_have_the_artifacts_that_their_commands_make() -> None:
    def wanted(recipe: str) -> list[tuple[str, ...]]:
        return [m.artifact.parts[-2:] for m in Plan.read(RECIPES / recipe).members]

    alone = [(Kind("resnet50", 12).run(RUNS).name, f"tenant-{seed}") for seed in range(8)]
    together = (Kind("resnet50", 100, by=(8,)).run(RUNS).name, "artifact")
    assert wanted("saturated.yaml") == alone
    assert wanted("saturated-together.yaml") == [together, *alone[1:]]
    few = (Kind("resnet50", 100, by=(1, 8)).run(RUNS).name, "artifact")
    assert wanted("more-than-fit.yaml") == [few, *alone[1:]]
    ways = all_ways("resnet50", (12,), ("8@100",), (), compile=False)
    way = next(each for each in ways if each.kind == "engine")
    policy = Plan.read(RECIPES / "saturated-together.yaml").policy
    assert {"kind": policy.kind} | policy.parameters == engine_plan(way, "cuda")["policy"]


def test_the_recipe_of_a_fault_has_the_artifacts_that_its_commands_make() -> None:
    plan = Plan.read(RECIPES / "fault-mps.yaml")
    ((kind, count),) = latency.KINDS["faults"]
    *tenants, culprit = plan.members
    made = [(kind.run(RUNS).name, f"tenant-{seed}") for seed in range(count)]
    assert [member.artifact.parts[-2:] for member in tenants] == made
    assert plan.load.fault is not None
    assert plan.load.fault.member == culprit.name
    assert plan.load.fault.inputs.parent == culprit.artifact.parent


def test_other_weights_are_the_same_values_in_another_order(tmp_path: Path) -> None:
    values = np.linspace(0.5, 1.5, 12, dtype=np.float16).reshape(3, 4)
    shape = numpy_helper.from_array(np.array([2, 6]), "shape")
    graph = helper.make_graph(
        [helper.make_node("Reshape", ["variance", "shape"], ["y"])],
        "g",
        [],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, (2, 6))],
        [numpy_helper.from_array(values, "variance"), shape],
    )
    onnx.save(helper.make_model(graph), str(tmp_path / "0.onnx"))
    tenants.redraw(tmp_path / "0.onnx", 1, tmp_path / "1.onnx")
    drawn = onnx.load(str(tmp_path / "1.onnx")).graph.initializer
    other = numpy_helper.to_array(drawn[0])
    assert (drawn[0].name, other.shape, other.dtype) == ("variance", (3, 4), np.float16)
    assert sorted(other.ravel()) == sorted(values.ravel())
    assert (other != values).any()
    assert drawn[1] == shape


def test_tenants_of_one_launch_are_tuned_by_the_flag_that_users_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def ran(argv: list[str], **_: Any) -> None:
        asked.append(argv)
        (Path(argv[argv.index("--out") + 1]) / "artifact").mkdir(parents=True)

    monkeypatch.setattr(tenants.subprocess, "run", ran)
    for text, name in (("1", "a-fp16-25"), ("8", "a-fp16-25-by-8"), ("1,4", "a-fp16-25-by-1x4")):
        kind = Kind("a", 25, by=tenants.numbers(text))
        run = kind.run(tmp_path)
        assert run.name == name
        tenants.tuned(Path("a.onnx"), run, pct=25, precision="fp16", budget="1s", by=kind.by)
    assert [argv[-2:] for argv in asked[1:]] == [["--tenants", "8"], ["--tenants", "1,4"]]
    assert "--tenants" not in asked[0]


@pytest.mark.filterwarnings("ignore::tunerd.MismatchWarning")
@pytest.mark.parametrize("by", [(), (4,), (1, 4)])
def test_kernels_that_were_kept_are_the_same_artifact_elsewhere(
    tmp_path: Path, by: tuple[int, ...]
) -> None:
    model, kind = tenant(ENCODER, 0, tmp_path), Kind("encoder", 50, by=by)
    there, here = kind.run(tmp_path / "there"), kind.run(tmp_path / "here")
    if len(by) > 1:  # as `tunerd tune` leaves them
        sizes = [there / "sizes" / f"tenants{count}" / "artifact" for count in by]
        for count, artifact in zip(by, sizes, strict=True):
            artifact_of(model, artifact, tenants=count)
        pack_tenants(sizes, there / "artifact")
    else:
        artifact_of(model, there / "artifact", tenants=by[0] if by else None)
    kept = tmp_path / "here" / tenants.KERNELS / there.name
    tenants.keep(there, kept)
    assert all(each.stat().st_size < 1000 for each in kept.rglob("weights.bin"))
    tenants.tuned(tmp_path / "encoder-0.onnx", here, pct=50, precision="", budget="1s", by=kind.by)
    answers = []
    for run in (there, here):
        loaded = tunerd.load(run / "artifact")
        given = random_inputs(loaded.inputs, 3)
        if isinstance(loaded, SuperModel):
            answers += loaded.run([(loaded.own, given)])
        else:
            answers.append(loaded(given))
        assert [v.get("tenants") for v in read_all_variants(run / "artifact")] == (
            list(by) or [None]
        )
    assert all(np.array_equal(answers[0][name], answers[1][name]) for name in answers[0])
