"""`--cpu-pct auto`: a share is chosen once, kept, and looked at again after the tuning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest

from tests.lib.models import conv_net
from tests.system.test_profile import knee_at_40  # noqa: F401
from tests.unit.test_share_curve import exact
from tunerd.cli.app import app
from tunerd.cli.errors import run
from tunerd.errors import ExitCode, FolderError
from tunerd.frontend.model import read_model
from tunerd.records import RunFacts
from tunerd.report.choice_text import aftermath_sentences, choice_sentence
from tunerd.runs.archive import pack, unpack
from tunerd.runs.folder import RunFolder
from tunerd.settings import TuneSettings
from tunerd.settings.option import checked
from tunerd.studies.profile import auto
from tunerd.studies.profile.auto import aftermath, choose, resolve_share
from tunerd.studies.profile.curve import knee, share_for
from tunerd.studies.profile.measuring import Effort
from tunerd.studies.profile.profile import Profile
from tunerd.studies.recipes import read_recipe
from tunerd.system.targets import cpu_target_json
from tunerd.vocabulary.verdict import Verdict

Captured = pytest.CaptureFixture[str]
DEFAULT = {10: 10e-3, 25: 4e-3, 40: 2.15e-3, 50: 2.05e-3, 100: 2e-3}


@pytest.fixture
def net(tmp_path: Path) -> Path:
    path = tmp_path / "models" / "net.onnx"
    path.parent.mkdir()
    onnx.save(conv_net(), path)
    return path


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "EFFORT", Effort(rounds=2, duration_secs=0.05))
    monkeypatch.setattr(auto, "SHARES", (20, 40, 100))


def asked(net: Path, out: Path, **changes: Any) -> TuneSettings:
    values = {"model": net, "out": out, "cpu_pct": 100, "slice_kind": "simulated"}
    return TuneSettings(**(values | {"share_from": "auto"} | changes))


def profiled(latencies: dict[int, float], slo_secs: float | None) -> Profile:
    curve = exact(latencies)
    return Profile(
        name="net",
        schedules="default schedules",
        kind="simulated",
        rounds=5,
        loss=0.1,
        slo_secs=slo_secs,
        curves=(curve,),
        knees=(knee(curve, 0.1),),
        for_slo=(share_for(curve, slo_secs),) if slo_secs else (),
        proofs=(),
        left_out=(),
    )


# --- the choice --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slo_ms", "pct", "said"),
    [
        (None, 40, "the knee of the default model, within 10% of the whole device's latency"),
        (5.0, 25, "the default model meets 5.00"),
        (1.0, 100, "at no share"),
        (30.0, 10, "no smaller share was measured"),
    ],
)
def test_the_share_is_the_knee_or_the_smallest_that_meets_a_latency(
    slo_ms: float | None, pct: int, said: str, tmp_path: Path
) -> None:
    settings = asked(tmp_path / "net.onnx", tmp_path, slo_ms=slo_ms)
    choice = choose(profiled(DEFAULT, settings.slo_secs), settings, "digest")
    assert choice.pct == pct
    assert said in choice_sentence(choice)


@pytest.mark.parametrize(
    ("slo_ms", "faster", "meets", "better", "said"),
    [
        (5.0, 1.0, Verdict.YES, None, "no smaller share is known to do"),
        (5.0, 4.0, Verdict.YES, 10, "the smaller share 10% is known to meet it"),
        (5.0, 0.5, Verdict.NO, 40, "misses 5.00"),
        (1.0, 1.0, Verdict.NO, None, "no share is known to meet"),
    ],
)
def test_the_tuned_model_says_whether_the_choice_was_right(
    slo_ms: float, faster: float, meets: Verdict, better: int | None, said: str, tmp_path: Path
) -> None:
    settings = asked(tmp_path / "net.onnx", tmp_path, slo_ms=slo_ms)
    choice = choose(profiled(DEFAULT, settings.slo_secs), settings, "digest")
    tuned = {pct: secs / faster for pct, secs in DEFAULT.items()}
    after = aftermath(choice, profiled(tuned, settings.slo_secs))
    assert (after.meets, after.better_pct) == (meets, better)
    assert said in " ".join(aftermath_sentences(after))


@pytest.mark.usefixtures("knee_at_40")
def test_a_choice_is_kept_for_sessions_to_come(net: Path, tmp_path: Path) -> None:
    said: list[str] = []
    first, choice, found = resolve_share(asked(net, tmp_path / "run"), said.append)
    assert (first.cpu_pct, choice.found) == (40, "found")
    assert found is not None
    assert said
    said.clear()
    again, kept, measured = resolve_share(asked(net, tmp_path / "run"), said.append)
    assert (again, kept, measured, said) == (first, choice, None, [])
    with pytest.raises(FolderError, match="was chosen for another model, --slice or --slo-ms"):
        resolve_share(asked(net, tmp_path / "run", slo_ms=3.0), said.append)


@pytest.mark.usefixtures("knee_at_40")
def test_a_packed_run_keeps_its_choice(net: Path, tmp_path: Path) -> None:
    settings, choice, _ = resolve_share(asked(net, tmp_path / "run"), lambda what: None)
    facts = RunFacts.of(
        settings, read_model(net), target=cpu_target_json(1), device="simulated", host={}
    )
    RunFolder.open(tmp_path / "run", facts=facts).close()
    unpack(pack(tmp_path / "run", tmp_path / "file"), tmp_path / "there")
    _, there, measured = resolve_share(asked(net, tmp_path / "there"), lambda what: None)
    assert (there, measured) == (choice, None)
    assert (tmp_path / "there" / "shares" / "default" / "samples.jsonl").is_file()


def test_a_run_of_a_given_share_gets_no_other(net: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "store.sqlite").touch()
    with pytest.raises(FolderError, match="was given as a number"):
        resolve_share(asked(net, tmp_path / "run"), lambda what: None)


def test_a_folder_that_no_run_may_use_is_refused_before_it_is_measured_for(
    net: Path, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").touch()
    with pytest.raises(FolderError, match=r"holds 'thesis.tex'"):
        resolve_share(asked(net, tmp_path / "run"), lambda what: None)


# --- the command -------------------------------------------------------------------------------


@pytest.mark.usefixtures("knee_at_40")
@pytest.mark.nightly
def test_a_run_with_an_automatic_share_is_tuned_at_it_and_says_how_right_it_was(
    net: Path, tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / "run"
    argv = ["tune", str(net), "--cpu-pct", "auto", "--slo-ms", "8", "--slice", "simulated"]
    argv += ["--trials", "12", "--tuners", "1", "--out", str(out), "--json"]
    assert run(app, argv) in (0, 1, 2)
    document = json.loads(capsys.readouterr().out)
    assert document["share"]["pct"] == 40
    assert document["share"]["tuned_meets"] == "yes"
    assert Path(document["share"]["report"]).is_file()
    settings = json.loads((out / "settings.json").read_text())["settings"]
    assert (settings["cpu_pct"], settings["share_from"], settings["slo_ms"]) == (40, "auto", 8.0)
    assert "40% of the CPU cores, chosen by tunerd" in (out / "report.html").read_text()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--gpu-pct", "half"), "'half' is neither a whole number from 1 to 100 nor auto"),
        (("--gpu-pct", "0"), "'0' is neither"),
        (("--cpu-pct", "101"), "'101' is neither"),
        (("--cpu-pct", "50", "--slo-ms", "3"), "--slo-ms chooses the share"),
        (("--cpu-pct", "auto", "--gpu-pct", "40"), "give one share"),
        (("--gpu-pct", "auto", "--slice", "whole"), "--slice whole has one share"),
        (("--cpu-pct", "auto", "--address", "10.0.0.1:6379"), "--address tunes on a cluster"),
        (("--cpu-pct", "auto", "--dry-run"), "--dry-run measures nothing"),
        (("--cpu-pct", "auto", "--slo-ms", "0"), "--slo-ms"),
    ],
)
def test_shares_that_cannot_be_chosen_are_refused(
    flags: tuple[str, ...], said: str, net: Path, capsys: Captured
) -> None:
    assert run(app, ["tune", str(net), *flags]) == ExitCode.BAD_INPUT
    out, err = capsys.readouterr()
    assert (out, said in err) == ("", True), err


def test_a_recipe_may_leave_the_share_to_tunerd(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("model: net.onnx\ncpu-pct: auto\nslo-ms: 3\n")
    (planned,) = read_recipe(path).runs
    argv = planned.command.argv
    assert argv[argv.index("--cpu-pct") :][:2] == ("--cpu-pct", "auto")


def test_the_default_folder_names_no_share_that_is_not_known(tmp_path: Path) -> None:
    settings = checked(TuneSettings, {"model": tmp_path / "net.onnx", "gpu_pct": "auto"})
    assert settings.out == Path("runs/net-gpuauto")
    assert (settings.gpu_pct, settings.share_from) == (100, "auto")
