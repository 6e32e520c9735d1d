"""`tunerd colocate plan`: from a mix to a plan that the engine serves, and to a proof."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
import yaml

from tests.lib import PYTHON_PATH, ROOT
from tests.lib.colocation_plans import CORES, colocate, with_two_members
from tests.lib.models import conv_net
from tests.lib.waiting import until
from tunerd import api
from tunerd.api.mix_sources import shares_of
from tunerd.artifacts.manifest import MANIFEST
from tunerd.colocation import Plan
from tunerd.colocation.planning import launched
from tunerd.colocation.planning.curves import Point
from tunerd.colocation.planning.engine_cost import EngineCost, Served, key_of
from tunerd.colocation.planning.features import features_of
from tunerd.colocation.planning.kept import kept
from tunerd.colocation.planning.mix import Mix
from tunerd.colocation.planning.pairs import Pair, Side, append
from tunerd.colocation.planning.placement import Forecast
from tunerd.errors import ExitCode, InputError, ModelError
from tunerd.records.paths import Paths
from tunerd.records.points import MachineKind
from tunerd.report.mix import mix_json, mix_page
from tunerd.system import host
from tunerd.vocabulary.verdict import Interval

Captured = pytest.CaptureFixture[str]

MIX: dict[str, Any] = {
    "members": [
        {
            "name": "one",
            "artifact": "artifact-0",
            "rate": 100,
            "slo_ms": 4000,
            "tenants": ["a", "b"],
        },
        {"name": "two", "artifact": "artifact-1", "rate": 50, "slo_ms": 4000},
    ],
    "search": {"shares": [50], "rounds": 2, "visit": "100ms"},
    "load": {"duration": "300ms"},
    # The whole device is told to be slow, so that halves are what is chosen.
    "curves": ["points.json"],
}
POINTS = [{"of": name, "share": 100, "secs": [1.0], "source": "told"} for name in ("one", "two")]

needs_two_cores = pytest.mark.skipif(len(CORES) < 2, reason="two shares take two cores")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_two_members(tmp_path_factory.mktemp("members"))


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    (tmp_path / "points.json").write_text(json.dumps(POINTS))
    return tmp_path


def written(folder: Path, **said: Any) -> Path:
    path = folder / "mix.yaml"
    path.write_text(yaml.safe_dump(MIX | said))
    return path


def with_cores(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    cores = tuple(range(count))
    found = dataclasses.replace(
        host.facts(), cores=cores, core_siblings=tuple((core,) for core in cores), core_quota=None
    )
    monkeypatch.setattr(host, "facts", lambda: found)


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@needs_two_cores
def test_a_mix_is_planned_served_and_proved(
    folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # no cell is wrapped
    mix, out = written(folder), folder / "out"
    assert colocate("plan", mix, "--out", out, "--dry-run") == ExitCode.CANNOT_TELL
    said = capsys.readouterr().out
    assert "measure one at 50%" in said
    assert not out.exists()

    assert colocate(mix, "--out", out) in (ExitCode.BETTER, ExitCode.REGRESSION)
    printed = capsys.readouterr()
    assert "A plan: 50%: one; 50%: two" in printed.out
    assert "Proof, 0.3 s of poisson load" in printed.out
    assert "; the sender was late by " in " ".join(printed.out.split())
    assert "measuring one: round 1 of 2" in printed.err
    plan = Plan.read(out / "plan.yaml")
    assert [(m.name, m.share, m.rate, m.tenants) for m in plan.members] == [
        ("one", 50, 100, ("a", "b")),
        ("two", 50, 50, ("default",)),
    ]
    document = json.loads((out / "answer.json").read_text())
    assert document["answer"] == "plan"
    assert {e["slowdown"]["how"] for e in document["chosen"]["expected"]} == {"measured"}
    assert len(document["pairs"]) == 2
    for member in document["proof"]["members"]:
        assert member["answered"] > 0
        assert member["measured"]["p50_secs"] > 0
        assert member["expected"]["p50_secs"] > 0
    assert "Expected and measured" in (out / "report.html").read_text()
    assert colocate("check", out / "plan.yaml") == 0
    capsys.readouterr()

    before = files_in(out)
    assert colocate("plan", mix, "--out", out, "--dry-run") == 0
    page = capsys.readouterr().out
    assert "one after another" in page  # which was rejected, with the reason
    assert "one: its lane at 100% would be busy" in page
    assert "measured for 2 members" in page
    assert "Waiting times: M/G/1" in page
    assert len(page.splitlines()) < 50
    assert files_in(out) == before


def test_a_first_dry_run_says_what_lacks_what_comes_next_and_how_long_that_takes(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with_cores(monkeypatch, 2)
    onnx.save(conv_net(), tmp_path / "net.onnx")
    member = {"model": "net.onnx", "rate": 1}
    mix = written(
        tmp_path,
        curves=[],
        members=[{"name": name} | member for name in ("one", "two")],
        search={"shares": [25, 50, 75], "budget": "30s", "pairs": "none"},
    )
    assert colocate(mix, "--dry-run", "--no-proof") == ExitCode.CANNOT_TELL
    said = capsys.readouterr().out
    assert "25% is left out: 25% of 2 core(s) is less than one core" in said
    assert "75% is left out: it is 1 core here, as 50% is" in said
    assert said.count("tune one at") == 2
    assert "tune one at 50%: 30 s of search" in said
    assert "measure two at 50%, 100%" in said
    # Four runs of 30 s and a minute beside the search, a few visits, and the engine.
    assert "next      the same command without --dry-run, about 7 min in all" in said


def test_models_are_looked_at_before_any_is_tuned_in_a_dry_run_too(tmp_path: Path) -> None:
    onnx.save(conv_net(), tmp_path / "net.onnx")
    names = ("net", "nope")
    members = [{"name": name, "model": f"{name}.onnx", "rate": 1} for name in names]
    mix = written(tmp_path, curves=[], members=members)
    for dry_run in (True, False):
        with pytest.raises(ModelError, match=r"nope\.onnx does not exist"):
            api.colocate_plan(mix, out=tmp_path / "out", dry_run=dry_run)
    assert not (tmp_path / "out" / "tuned").exists()


@pytest.mark.parametrize(("cores", "tried"), [(1, (100,)), (2, (50, 100)), (4, (25, 50, 75, 100))])
def test_of_shares_that_are_as_many_cores_the_smallest_is_tried(
    cores: int, tried: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_cores(monkeypatch, cores)
    member = {"name": "a", "artifact": "a", "rate": 1}
    shares, left_out = shares_of(Mix.model_validate({"members": [member]}))
    assert shares == tried
    assert sorted((*shares, *(pct for pct, _ in left_out))) == [25, 50, 75, 100]


def test_one_after_another_is_said_and_is_a_plan_too(folder: Path, capsys: Captured) -> None:
    search = MIX["search"] | {"shares": [100]}
    mix = written(folder, curves=[], search=search)
    assert colocate("plan", mix, "--out", folder / "out", "--no-proof", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["answer"] == "one after another"
    assert document["plan"]["policy"] == {"kind": "time"}
    assert Plan.read(folder / "out" / "plan.yaml").policy.kind == "time"
    assert "proof" not in document


def test_what_does_not_fit_is_no_plan(folder: Path, capsys: Captured) -> None:
    out = folder / "out"
    search = MIX["search"] | {"shares": [100], "pairs": "none"}
    mix = written(folder, search=search)
    assert colocate(mix, "--out", out, "--no-proof") == ExitCode.NO_GAIN
    said = capsys.readouterr().out
    assert "They do not fit" in said
    assert "one: its lane at 100% would be busy 15000.0% of the time, and 80.0% may be" in said
    assert not (out / "plan.yaml").exists()
    assert json.loads((out / "answer.json").read_text())["plan"] is None
    fast = [point | {"secs": [0.001]} for point in POINTS]
    (folder / "points.json").write_text(json.dumps(fast))
    mix = written(folder, memory_gib=1e-6, search=search)
    assert colocate(mix, "--out", out, "--no-proof") == ExitCode.NO_GAIN
    assert "memory: they need" in capsys.readouterr().out


@needs_two_cores
def test_pairs_that_nobody_measured_are_estimated_from_those_of_others(folder: Path) -> None:
    here = features_of(folder / "artifact-0").named()
    sides = [
        Side(f"m{nth}", f"m{nth}", 50, {name: value * scale for name, value in here.items()})
        for nth, scale in enumerate((0.4, 0.6, 0.9, 1.3, 2.0, 3.0))
    ]
    others = [
        Pair(of, beside, host.facts().cpu_model, Interval(1.2, 1.2, 1.2), "told")
        for of, beside in itertools.permutations(sides, 2)
    ]
    append(folder / "others.jsonl", others)
    points = [{"of": n, "share": 50, "secs": [0.001]} for n in ("one", "two")]
    (folder / "points.json").write_text(json.dumps(POINTS + points))
    mix = written(folder, pairs=["others.jsonl"], search=MIX["search"] | {"pairs": "estimate"})
    found = api.colocate_plan(mix, out=folder / "out", dry_run=True)
    assert found.plan is not None
    assert found.answer.chosen is not None
    for expected in found.answer.chosen.expected:
        assert expected.slowdown.how == "estimated"
        assert expected.slowdown.interval.high == pytest.approx(1 + 0.2 * 0.1, abs=0.02)
    drawn = mix_page(found)
    assert "Slowdowns: estimated and measured" in drawn
    assert drawn.count('class="found"') == len(others)
    assert mix_json(found)["calibration"]["pairs"] == len(others)


def test_a_launch_is_timed_under_load_and_kept(folder: Path) -> None:
    artifacts = [folder / f"artifact-{seed}" for seed in (0, 1)]
    assert launched.lanes_of(artifacts) is None
    like = Plan.model_validate({"members": [{"name": "a", "artifact": artifacts[0]}]})
    found = launched.measure(
        "m", artifacts, 100, count=2, like=like, rounds=1, round_secs=1.0, say=lambda _: None
    )
    assert (found.of, found.share, found.together) == ("m", 100, 2)
    assert 0 < found.secs.value <= found.tail_secs
    path = folder / launched.LAUNCHES
    launched.append(path, "abc", found)
    assert launched.read_launches(path, "abc") == [found]
    assert launched.read_launches(path, "another") == []


def test_what_was_measured_of_a_runs_artifact_is_not_measured_again(
    folder: Path,
) -> None:
    run = folder / "run"
    shutil.copytree(folder / "artifact-0", Paths(run).artifact)
    Paths(run).store.touch()
    search = {"shares": [100], "rounds": 2, "visit": "100ms", "pairs": "none"}
    member = MIX["members"][0] | {"artifact": "run"}
    mix = written(folder, curves=[], search=search, members=[member])

    def to_measure(out: str) -> str:
        found = api.colocate_plan(mix, out=folder / out, dry_run=True)
        return " ".join(found.answer.to_measure)

    assert "measure one at 100%" in to_measure("first")
    api.bench(Paths(run).artifact, cpu_pct=100, duration_secs=1)
    assert "measure one at 100%" not in to_measure("first")
    (point,) = kept(Paths(run).artifact, host.facts().cpu_model, "one")
    assert (point.of, point.share, point.together, point.source) == ("one", 100, 1, "tunerd bench")
    assert 0 < point.secs.value <= point.tail_secs

    (run / "points.jsonl").unlink()
    api.colocate_plan(mix, out=folder / "first", prove_it=False)
    assert "measure" not in to_measure("second")  # by another mix's profile
    assert kept(Paths(run).artifact, "another machine", "one") == []
    (Paths(run).artifact / MANIFEST).write_text(
        (Paths(run).artifact / MANIFEST).read_text() + " "
    )  # another artifact
    assert kept(Paths(run).artifact, host.facts().cpu_model, "one") == []
    (run / "points.jsonl").write_text("[]\n")
    with pytest.raises(InputError, match="holds a line that is no point"):
        kept(Paths(run).artifact, host.facts().cpu_model, "one")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have mixes measured by a law, without a device; return what was, in order."""
    done: list[str] = []

    def profile(_: Any, *, shares: list[int], out: Path, **__: Any) -> Any:
        done.append(f"{out.name[:3]} at {shares}")
        return SimpleNamespace(profile=shares)

    def points_of(shares: list[int], of: str, source: str) -> list[Point]:
        return [
            Point(of, share, 1, 1, Interval(secs, secs, secs), secs, source)
            for share in shares
            for secs in [1.0 if share == 100 else 0.001]  # so that halves are chosen
        ]

    def pair(one: Any, two: Any, *, device: str, **_: Any) -> tuple[Pair, Pair]:
        done.append("a pair")
        slower = Interval(1.1, 1.1, 1.1)
        return tuple(
            Pair(of, beside, device, slower, "a law")
            for of, beside in itertools.permutations((one[0], two[0]))
        )

    def cost(models: Sequence[Served], *, device: str, **_: Any) -> dict[str, EngineCost]:
        done.append("the engine")
        return costs(models, device, 1e-5)

    def rehearse(
        _: Plan, found: Forecast, models: Sequence[Served], *, device: str, **__: Any
    ) -> dict[str, EngineCost]:
        done.append("a rehearsal")
        return costs(models, device, 3e-5, lanes=len(found.placement.lanes))

    def costs(
        models: Sequence[Served], device: str, secs: float, *, lanes: int = 0
    ) -> dict[str, EngineCost]:
        return {
            each.name: EngineCost(architecture, on, rate, secs, 2 * secs, all_rate, lanes=lanes)
            for each in models
            for architecture, on, rate, all_rate, _ in [key_of(each, models, device)]
        }

    monkeypatch.setattr("tunerd.api.studies.profile", profile)
    monkeypatch.setattr("tunerd.api.mixes.points_of", points_of)
    monkeypatch.setattr("tunerd.colocation.planning.pairs.measure", pair)
    monkeypatch.setattr("tunerd.colocation.planning.engine_cost.measure", cost)
    monkeypatch.setattr("tunerd.colocation.planning.engine_cost.rehearse", rehearse)
    return done


@needs_two_cores
def test_what_one_plan_measured_the_next_takes_from_the_teams_store(
    folder: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mix = written(folder, curves=[], store="sqlite:///team.sqlite")
    first = api.colocate_plan(mix, out=folder / "first", prove_it=False)
    curves = ["one at [50, 100]", "two at [50, 100]"]
    assert measured == [*curves, "the engine", "a pair", "a rehearsal"]
    assert {point.origin for point in first.curves} == {None}
    assert first.answer.chosen is not None
    assert {e.engine.p50_secs for e in first.answer.chosen.expected if e.engine} == {3e-5}
    again = api.colocate_plan(mix, out=folder / "first", dry_run=True)
    assert {pair.origin for pair in again.pairs.measured} == {None}  # its own, not the team's
    measured.clear()
    foreseen = api.colocate_plan(mix, out=folder / "second", dry_run=True)
    assert foreseen.answer.to_measure == ()
    assert not (folder / "second").exists()

    found = api.colocate_plan(mix, out=folder / "second", prove_it=False)
    assert measured == []
    assert found.plan == first.plan
    assert found.answer.chosen is not None
    assert {e.slowdown.how for e in found.answer.chosen.expected} == {"measured"}
    store = f"sqlite:///{folder / 'team.sqlite'}"
    for each in (*found.curves, *found.pairs.measured):
        assert each.origin is not None
        assert (each.origin.where, each.origin.host) == (store, host.facts().hostname)
    assert all(said["origin"]["measured_at"] for said in mix_json(found)["curves"])
    assert mix_page(found).count(f"taken from {store}, measured 20") >= 5

    kind = MachineKind("CPU of another kind", 2, "", "")
    monkeypatch.setattr("tunerd.api.mixes.kind_of_machine", lambda *_: kind)
    api.colocate_plan(mix, out=folder / "third", prove_it=False)
    assert len(measured) == 5


@needs_two_cores
def test_a_store_that_is_away_is_a_note_and_gets_later_what_it_missed(
    folder: Path, measured: list[str], capsys: Captured
) -> None:
    mix, out, store = written(folder, curves=[]), folder / "out", f"sqlite:///{folder}/team"
    (folder / "team").mkdir()  # where a file should be
    assert colocate(mix, "--out", out, "--no-proof", "--json", "--store", store) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert [note.split(":")[0] for note in notes] == [
        "no point was taken",
        "no point was written, and the same command does it later",
    ]
    measured.clear()
    (folder / "team").rmdir()
    assert colocate(mix, "--out", out, "--no-proof", "--store", store) == 0
    capsys.readouterr()
    measured.clear()
    assert colocate(mix, "--out", folder / "other", "--no-proof", "--store", store) == 0
    assert measured == []
    assert "5 taken from sqlite:" in " ".join(capsys.readouterr().out.split())


def test_measuring_goes_on_after_a_kill(folder: Path) -> None:
    search = {"shares": [100], "rounds": 3, "visit": "300ms", "pairs": "none"}
    alone = MIX["members"][:1]
    mix, out = written(folder, curves=[], search=search, members=alone), folder / "out"
    argv = [sys.executable, "-m", "tunerd", "colocate", "plan", mix, "--out", out, "--no-proof"]
    environment = os.environ | {"PYTHONPATH": PYTHON_PATH}
    process = subprocess.Popen(
        argv, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    until(lambda: visits(out), every=0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    first = visits(out)
    found = api.colocate_plan(mix, out=out, prove_it=False)
    assert found.answer.said == "one after another"
    again = visits(out)
    assert again[: len(first)] == first
    assert sum('"visit"' in line for line in again) == 3


def visits(out: Path) -> list[str]:
    """Return the lines that are whole, the folders of members in order."""
    found = []
    for path in sorted(out.glob("curves/*/samples.jsonl")):
        text = path.read_text()
        found += text[: text.rfind("\n") + 1].splitlines()
    return found


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"members": [{"name": "a", "rate": 1}]}, "a needs one of `model`, `artifact` and"),
        ({"members": [{"name": "a", "artifact": "x"}]}, r"members\[0\].rate: is missing"),
        ({"members": [{"name": "a", "artifact": "x", "rate": 1}] * 2}, "two members are called a"),
        (
            {"members": [{"name": "a", "artifact": "x", "rate": 1, "precision": "fp16"}]},
            "a has a precision, which is of a `model`",
        ),
        (
            {"search": {"share": [50]}},
            r"search.share: is no key here; did you mean shares\? Allowed are shares, ",
        ),
        ({"search": {"shares": [0]}}, r"search.shares\[0\]"),
        ({"store": "mysql://u:secret@h/d"}, r"store: (?!.*secret).*no store that tunerd knows"),
    ],
)
def test_a_mistake_in_a_mix_is_named(said: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=problem):
        Mix.read(written(tmp_path, **said))


def test_points_of_an_entry_that_is_none_are_refused(folder: Path) -> None:
    (folder / "points.json").write_text('[{"of": "three", "share": 50, "secs": [0.1]}]')
    with pytest.raises(InputError, match="there is no entry 'three' in the mix"):
        api.colocate_plan(written(folder), out=folder / "out", dry_run=True)
    (folder / "points.json").write_text('[{"of": "one", "share": 50, "secs": [0]}]')
    with pytest.raises(InputError, match="holds no times; give measured points"):
        api.colocate_plan(written(folder), out=folder / "out", dry_run=True)


def test_the_mix_of_the_recipes_is_one() -> None:
    mix = Mix.read(ROOT / "recipes" / "colocation" / "mixes" / "cpu.yaml")
    assert [entry.model.parent for entry in mix.members if entry.model] == [ROOT / "models"] * 2
