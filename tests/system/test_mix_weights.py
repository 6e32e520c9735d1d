"""A mix whose members' weights have less memory than all of them take: planned, and served so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lib.colocation_plans import colocate
from tests.lib.super_models import CONVNET, artifact_of, super_artifact, tenant
from tunerd import api
from tunerd.api.mix_artifacts import Steps
from tunerd.api.mix_weights import MixWeights
from tunerd.colocation import Plan
from tunerd.colocation.artifacts import weights_bytes_of
from tunerd.colocation.planning import bringing
from tunerd.colocation.planning.bringing import BRINGS, read_brings
from tunerd.colocation.planning.lacking import Lacking
from tunerd.colocation.planning.mix import Mix
from tunerd.colocation.planning.placement import Subject
from tunerd.errors import ExitCode, InputError

GIB = 1 << 30

pytestmark = pytest.mark.filterwarnings("ignore::tunerd.MismatchWarning")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an artifact for several tenants, and three others' for one model."""
    root = tmp_path_factory.mktemp("weights")
    models = [tenant(CONVNET, seed, root) for seed in range(4)]
    super_artifact(models[0], root / "0", counts=(1, 2))
    for seed in (1, 2, 3):
        artifact_of(models[seed], root / str(seed))
    return root


def written(folder: Path, made: Path, **said: Any) -> Path:
    """Write a mix of two members that are often asked, and two that are not."""
    points = [{"of": of, "share": 100, "secs": [0.002]} for of in ("hot", "cold")]
    (folder / "points.json").write_text(json.dumps(points))
    members = [
        {"name": "hot", "artifacts": [f"{made}/0", f"{made}/1"], "rate": 40, "slo_ms": 4000},
        {"name": "cold", "artifacts": [f"{made}/2", f"{made}/3"], "rate": 4, "slo_ms": 4000},
    ]
    mix = {
        "members": members,
        "search": {"shares": [100], "together": [1], "pairs": "none"},
        "curves": ["points.json"],
        "load": {"duration": "1s"},
    }
    path = folder / "mix.yaml"
    path.write_text(yaml.safe_dump(mix | said))
    return path


def gib(made: Path, count: float) -> float:
    """Return what the weights of so many members take, and a byte."""
    return (1 + count * weights_bytes_of(made / "0")) / GIB


def test_a_mix_that_fits_with_room_for_some_weights_only_is_planned_and_served_so(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    whole = api.colocate_plan(written(tmp_path, made), out=out, dry_run=True).answer.chosen
    assert whole is not None
    needed = sum(each.memory_bytes for each in whole.expected)
    room = {"memory_gib": needed / GIB - gib(made, 0.5)}
    assert colocate("plan", written(tmp_path, made, **room), "--out", out, "--dry-run") in (
        ExitCode.NO_GAIN, ExitCode.CANNOT_TELL
    )  # fmt: skip
    assert "memory: they need" in capsys.readouterr().out

    mix = written(tmp_path, made, weights_gib=gib(made, 3), **room)
    found = api.colocate_plan(mix, out=out)
    plan = Plan.read(out / "plan.yaml")
    assert plan.weights_gib == found.mix.weights_gib == gib(made, 3)
    chosen = found.answer.chosen
    assert chosen is not None
    assert needed - sum(each.memory_bytes for each in chosen.expected) == pytest.approx(
        weights_bytes_of(made / "0"), abs=8
    )
    cold = {each.member: each.cold.part for each in chosen.expected}
    assert cold["hot-0"] == 0
    assert 0 < cold["hot-1"] < cold["cold-0"] == pytest.approx(cold["cold-1"])
    assert found.proof is not None
    assert all(each.answered for each in found.proof.members)
    document = json.loads((out / "answer.json").read_text())
    colds = [each["cold"] for each in document["chosen"]["expected"]]
    assert colds[0] is None
    assert {each["secs_are"] for each in colds[1:]} == {"measured"}
    (line,) = (out / BRINGS).read_text().splitlines()
    assert {each["secs"] for each in colds[1:]} == {json.loads(line)["secs"]}
    again = api.colocate_plan(mix, out=out, dry_run=True)
    assert not any("bringing" in what for what in again.answer.to_measure)


def test_a_dry_run_estimates_what_bringing_weights_takes_and_says_that_it_is_not_measured(
    made: Path, tmp_path: Path
) -> None:
    mix = written(tmp_path, made, weights_gib=gib(made, 3))
    found = api.colocate_plan(mix, out=tmp_path / "out", dry_run=True)
    assert "measure what bringing weights of hot-0+3 takes" in found.answer.to_measure
    assert found.answer.chosen is not None
    cold = {each.member: each.cold for each in found.answer.chosen.expected}
    assert cold["cold-0"].secs == pytest.approx(weights_bytes_of(made / "0") / 8.5e9)
    assert not cold["cold-0"].is_measured
    assert not (tmp_path / "out").exists()


def test_a_file_of_brings_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / BRINGS).write_text('{"digest": 1}\n')
    with pytest.raises(InputError, match="holds a line that is none"):
        read_brings(tmp_path / BRINGS, "abc", "a device")


def test_a_plan_says_nothing_of_weights_that_all_fit(made: Path, tmp_path: Path) -> None:
    mix = written(tmp_path, made, weights_gib=gib(made, 4))
    found = api.colocate_plan(mix, out=tmp_path / "out", prove_it=False)
    assert found.plan is not None
    assert found.plan.weights_gib is None
    assert "weights_gib" not in (tmp_path / "out" / "plan.yaml").read_text()


def test_too_little_for_what_may_run_at_once_is_said(made: Path, tmp_path: Path) -> None:
    mix = written(tmp_path, made, weights_gib=gib(made, 1))
    with pytest.raises(InputError, match=r"hot-0\+3 has .* up to 2 of its members .* give more"):
        api.colocate_plan(mix, out=tmp_path / "out", dry_run=True)


def test_where_no_member_is_in_a_group_room_for_weights_changes_nothing(
    made: Path, tmp_path: Path
) -> None:
    members = [{"name": "hot", "artifact": f"{made}/1", "rate": 4}]
    points = tmp_path / "points.json"
    mix = written(tmp_path, made, members=members, weights_gib=1e-9)
    points.write_text(json.dumps([{"of": "hot", "share": 100, "secs": [0.002]}]))
    found = api.colocate_plan(mix, out=tmp_path / "out", prove_it=False)
    assert found.plan is not None
    assert found.plan.weights_gib is None


def test_on_a_gpu_lanes_have_weights_in_common_and_bringing_them_is_measured_with_enough_members(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Path, int]] = []

    def measure(kernels: Path, others: Sequence[Path], *, like: Plan) -> float:
        assert like.device == "cuda"
        asked.append((kernels, len(others)))
        return 0.006

    monkeypatch.setattr(bringing, "measure", measure)
    mix = Mix.read(written(tmp_path, made, device="cuda", weights_gib=gib(made, 3)))
    subjects = [
        Subject(name, name[:-2], 1.0, architecture="a", artifact=made / str(nth))
        for nth, name in enumerate(("hot-0", "hot-1", "cold-0", "cold-1"))
    ]
    subjects.append(Subject("later", "later", 1.0))  # is not tuned yet

    def limited() -> list[Subject]:
        steps = Steps(lambda _: None)
        of = MixWeights(mix, tmp_path, "a GPU", steps, Lacking(), is_dry=False)
        return of.limited(subjects)

    *group, later = limited()
    assert later.residency is None
    (residency,) = {each.residency for each in group}
    assert residency is not None
    assert (residency.is_shared, residency.depth, residency.pieces) == (True, 2, 3)
    assert (residency.own, residency.together) == (frozenset(["hot-0"]), 2)
    assert residency.bring_secs == 0.006
    assert limited() == [*group, later]
    assert asked == [(made / "0", 3)]  # two launches are under way at a time; kept
    less = mix.model_copy(update={"weights_gib": gib(made, 2)})
    with pytest.raises(InputError, match="up to 3 of its members may run at once"):
        MixWeights(less, tmp_path, "a GPU", Steps(lambda _: None), Lacking(), is_dry=False).limited(
            subjects
        )
