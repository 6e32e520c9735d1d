"""What benches leave of one model beside another, and who reads it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lib.colocation_plans import CORES, with_two_members
from tunerd import api
from tunerd.api.mix_pairs import pairs_of_colocation
from tunerd.api.mix_sources import kind_of_machine
from tunerd.colocation import Plan
from tunerd.colocation.planning.features import architecture_of
from tunerd.colocation.planning.kept import keep_pairs, kept_pairs
from tunerd.colocation.planning.pairs import PAIRS, read_pairs
from tunerd.errors import InputError
from tunerd.records.paths import Paths
from tunerd.system import host

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="two shares take two cores")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_two_members(tmp_path_factory.mktemp("members"))


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Two run folders, each with an artifact."""
    found = tmp_path / "one", tmp_path / "two"
    for nth, run in enumerate(found):
        shutil.copytree(made / f"artifact-{nth}", Paths(run).artifact)
        Paths(run).store.touch()
    return found


def plan(runs: tuple[Path, Path], **said: Any) -> Plan:
    members = [
        {"name": run.name, "artifact": Paths(run).artifact, "share": 50} | said.pop(run.name, {})
        for run in runs
    ]
    load = {"duration": "300ms", "rounds": 2, "alone": ["one", "two"]} | said.pop("load", {})
    return Plan.model_validate({"members": members, "load": load} | said)


def here() -> Any:
    return kind_of_machine("cpu", host.facts())


def test_a_colocated_bench_of_two_in_slices_leaves_pairs_with_both(
    runs: tuple[Path, Path],
) -> None:
    api.colocate_bench(plan(runs))
    artifacts = [Paths(run).artifact for run in runs]
    pairs = kept_pairs(artifacts, here())
    assert [(pair.of.name, pair.beside.name) for pair in pairs] == [("one", "two"), ("two", "one")]
    for run in runs:
        assert [p.slowdown for p in read_pairs(run / PAIRS)] == [p.slowdown for p in pairs]
    of = pairs[0].of
    assert (of.share, of.architecture) == (50, architecture_of(artifacts[0]))
    assert of.features["weight_bytes"] > 0
    assert pairs[0].device == host.facts().cpu_model
    assert pairs[0].slowdown.value > 0
    assert pairs[0].origin is not None
    assert pairs[0].origin.host == host.facts().hostname
    assert pairs[0].origin.measured_at is not None
    smaller = dataclasses.replace(here(), unit_count=here().unit_count + 1)
    assert kept_pairs(artifacts, smaller) == []
    assert kept_pairs(artifacts, "nobody can tell") == []
    (runs[0] / PAIRS).write_text("{}\n")
    with pytest.raises(InputError, match="no pair"):
        kept_pairs(artifacts, here())


@pytest.mark.parametrize(
    "said",
    [
        {"policy": {"kind": "time"}},
        {"policy": {"kind": "ordered"}},  # idle shares are lent
        {"load": {"alone": ["one"]}},
        {"load": {"rounds": 1}},
        {"load": {"kind": "poisson"}, "one": {"rate": 50}, "two": {"rate": 50}},
        {"one": {"lane": "both"}, "two": {"lane": "both"}},
    ],
)
def test_a_bench_of_anything_else_leaves_none(
    runs: tuple[Path, Path], said: dict[str, Any]
) -> None:
    assert pairs_of_colocation(api.colocate_bench(plan(runs, **said))) == ()
    assert not (runs[0] / PAIRS).exists()


@pytest.mark.skipif(len(CORES) != 2, reason="two slices are all of the device")
def test_a_bench_beside_another_leaves_pairs_and_a_plan_takes_them(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    one, two = (Paths(run).artifact for run in runs)
    api.bench(one, cpu_pct=50, duration_secs=1)
    assert kept_pairs([one, two], here()) == []
    api.bench(one, cpu_pct=50, beside=two, duration_secs=1)
    pairs = kept_pairs([one, two], here())
    assert len(pairs) == 2
    assert {pair.source for pair in pairs} == {"tunerd bench, cpu slices"}
    api.bench(one, cpu_pct=50, beside="copies", duration_secs=1)
    assert len(kept_pairs([one], here())) == 3

    secs = {50: 0.001, 100: 1.0}
    points = [{"of": n, "share": s, "secs": [t]} for n in ("one", "two") for s, t in secs.items()]
    (tmp_path / "points.json").write_text(json.dumps(points))
    members = [{"name": run.name, "artifact": run.name, "rate": 100} for run in runs]
    mix = {"members": members, "curves": ["points.json"], "search": {"shares": [50]}}
    (tmp_path / "mix.yaml").write_text(yaml.safe_dump(mix))
    found = api.colocate_plan(tmp_path / "mix.yaml", out=tmp_path / "out", dry_run=True)
    assert found.answer.chosen is not None
    assert [each.slowdown.how for each in found.answer.chosen.expected] == ["measured"] * 2


def test_who_cannot_write_a_run_folder_keeps_none(runs: tuple[Path, Path]) -> None:
    pairs = pairs_of_colocation(api.colocate_bench(plan(runs)))
    before = (runs[0] / PAIRS).read_bytes()
    keep_pairs([Paths(runs[0]).artifact], pairs, "nobody can tell")
    keep_pairs([runs[0].parent], pairs, here())  # in no run folder
    assert (runs[0] / PAIRS).read_bytes() == before
