"""A tuning for several models at once: what is asked for, and what a run of it leaves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import tunerd
from tests.lib.models import conv_net, floats
from tunerd.cli.app import app
from tunerd.cli.errors import run
from tunerd.errors import ExitCode, FolderError, InputError
from tunerd.frontend.onnx.reference import Reference, agree
from tunerd.records import Store
from tunerd.records.facts import refuse_other_run
from tunerd.records.paths import Paths
from tunerd.runs.warm_start import read_warm_starts
from tunerd.settings import TuneSettings
from tunerd.settings.option import checked
from tunerd.studies.sizes import runs_of

Captured = pytest.CaptureFixture[str]
SEVERAL = ({"tenants": 1}, {"tenants": 2}, {"tenants": 4})


def settings(**values: Any) -> TuneSettings:
    return checked(TuneSettings, {"model": Path("net.onnx"), "cpu_pct": 50, **values})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    onnx.save(conv_net((1, 3, 8, 8)), tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


def test_a_model_alone_is_what_is_tuned_if_nothing_is_said() -> None:
    assert settings().tenants == ()
    assert settings().lanes is None


@pytest.mark.parametrize("given", ["8", 8, (8,), [8]])
def test_one_number_of_tenants_is_one_run(given: Any) -> None:
    asked = settings(tenants=given)
    assert (asked.tenants, asked.lanes, asked.sizes) == ((8,), 8, ())
    assert asked.out == Path("runs/net-tenants8-cpu50")


@pytest.mark.parametrize("given", ["4,1,2", (1, 2, 4), [2, 4, 1, 1]])
def test_several_numbers_are_a_run_each_that_learns_from_those_before_it(
    given: Any, tmp_path: Path
) -> None:
    asked = settings(tenants=given, batch=3, out=tmp_path)
    assert asked.sizes == SEVERAL
    for each in runs_of(asked)[:2]:
        Paths(each.settings.out).store.parent.mkdir(parents=True)
        Paths(each.settings.out).store.touch()
    runs = [each.settings for each in runs_of(asked)]
    assert [(one.lanes, one.batch, one.sizes) for one in runs] == [
        (1, 3, ()),
        (2, 3, ()),
        (4, 3, ()),
    ]
    assert runs[2].warm_start == (runs[0].out, runs[1].out)
    assert runs[2].out == Paths(tmp_path).sizes / "tenants4"
    assert settings(tenants=given).out == Path("runs/net-tenants1x2x4-cpu50")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tenants": "0"}, "whole numbers from 1 to 256"),
        ({"tenants": "1,x"}, "whole numbers from 1 to 256"),
        ({"tenants": (1, 1000)}, "256"),
        ({"tenants": 2, "batch": (1, 4)}, "tune each size on its own"),
        ({"tenants": (2, 4), "dims": ["batch=1,4"]}, "tune each size on its own"),
        ({"tenants": 2, "cpu_pct": "auto"}, "chosen for one model"),
        ({"tenants": 2, "precision": "auto"}, "chosen for one model"),
        ({"tenants": 2, "cpu_pct": None, "gpu_pct": 50, "libraries": "cublaslt"}, "of one model"),
    ],
)
def test_what_does_not_go_with_tenants_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        settings(**given)


def test_several_numbers_are_asked_for_apart(path: Path) -> None:
    with pytest.raises(InputError, match="tune_sizes"):
        tunerd.tune(path, cpu_pct=50, tenants=(1, 2))


def test_a_dry_run_says_how_many_models_a_launch_serves(path: Path, capsys: Captured) -> None:
    flags = ["--gpu-pct", "50", "--slice", "simulated", "--trials", "2", "--dry-run"]
    assert run(app, ["tune", str(path), *flags, "--tenants", "1,4", "--json"]) == 0
    one, four = json.loads(capsys.readouterr().out)["sizes"]
    assert (one["tenants"], four["tenants"]) == (1, 4)
    assert [t["flops"] * 4 for t in one["tasks"]] == [t["flops"] for t in four["tasks"]]
    assert not {t["task_id"] for t in one["tasks"]} & {t["task_id"] for t in four["tasks"]}
    plan = tunerd.plan(path, gpu_pct=50, slice_kind="simulated", trials=2, tenants=4)
    assert "4 models in a launch" in " ".join(str(plan).split())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::tunerd.MismatchWarning")
@pytest.mark.usefixtures("kept_cluster")
def test_a_run_for_tenants_leaves_an_artifact_that_serves_them(
    path: Path, tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / "run"
    flags = ["--cpu-pct", "50", "--trials", "8", "--tuners", "1", "--slices", "1"]
    flags += ["--out", str(out), "--no-wait"]
    code = run(app, ["tune", str(path), *flags, "--tenants", "1,2", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert code in (ExitCode.BETTER, ExitCode.NO_GAIN, ExitCode.CANNOT_TELL)
    assert [each["sizes"] for each in document["sizes"]] == [{"tenants": 1}, {"tenants": 2}]
    assert all(each["verification"]["verdict"] == "right" for each in document["sizes"])

    folders = [Paths(out).sizes / name for name in ("tenants1", "tenants2")]
    with Store.read(folders[0]) as first, Store.read(folders[1]) as second:
        one, two = first.tasks(), second.tasks()
        facts = second.facts()
    assert facts.tenants == 2
    with pytest.raises(FolderError, match="with tenants 2, and this one has tenants none"):
        refuse_other_run(facts, replace(facts, settings={**facts.settings, "tenants": []}), out)
    assert [task.for_tenants(2).task_id for task in one] == [task.task_id for task in two]
    (learnt,) = read_warm_starts(
        folders[:1], out=out, target=facts.target, slice_kind="cpu", tenants=2
    )
    assert learnt.shared([task.task_id for task in two])

    model = tunerd.load(out / "artifact")
    assert model.counts == (1, 2)  # type: ignore[attr-defined]
    other = onnx.load(path)
    feeds = [{"images": floats(1, 3, 8, 8, seed=seed)} for seed in (1, 2)]
    found = model.run([(model.own, feed) for feed in feeds])  # type: ignore[attr-defined]
    for feed, outputs in zip(feeds, found, strict=True):
        expected = Reference(other).run(feed)
        assert agree(np.asarray(outputs["scores"]), expected["scores"], rtol=1e-3)
