"""`--precision auto`: chosen before the search, kept, and given up where the tuned model is off."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

import tunerd
from tests.system.test_precision import two_convolutions
from tunerd.cli.app import app
from tunerd.cli.errors import run
from tunerd.errors import ExitCode, FolderError
from tunerd.records import Store
from tunerd.runs import run as runs
from tunerd.settings import TuneSettings
from tunerd.settings.option import checked
from tunerd.studies import precision
from tunerd.studies.precision import resolve_precision
from tunerd.studies.recipes import read_recipe
from tunerd.vocabulary.outcome import Accuracy, Outcome, TriedPrecision, Verification
from tunerd.vocabulary.verdict import Verdict

Captured = pytest.CaptureFixture[str]
ORDER = ("fp16", "bf16", "fp32")


@pytest.fixture
def net(tmp_path: Path) -> Path:
    path = tmp_path / "models" / "net.onnx"
    path.parent.mkdir()
    onnx.save(two_convolutions(), path)
    return path


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have CPUs, too, prefer 16 bits: which are only stored here, and rounded all the same."""
    monkeypatch.setitem(precision.ORDER, "llvm", ORDER)


def asked(net: Path, out: Path, **changes: Any) -> TuneSettings:
    values = {"model": net, "out": out, "cpu_pct": 100, "slice_kind": "simulated"}
    return TuneSettings(**(values | {"precision": "auto"} | changes))


def ignore(step: str) -> None:
    pass


# --- the choice --------------------------------------------------------------------------------


def test_on_cpus_it_is_fp32_without_a_look(net: Path, tmp_path: Path) -> None:
    said: list[str] = []
    found = resolve_precision(asked(net, tmp_path / "run"), said.append)
    assert (found.precision, found.precision_from, said) == ("fp32", "auto", [])
    assert found.precision_tried == (TriedPrecision("fp32"),)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("kind", ["simulated", pytest.param("cpu", marks=pytest.mark.slow)])
def test_the_first_that_is_near_enough_is_taken(net: Path, tmp_path: Path, kind: str) -> None:
    said: list[str] = []
    found = resolve_precision(asked(net, tmp_path / "run", slice_kind=kind), said.append)
    (tried,) = found.precision_tried
    assert (found.precision, tried.precision, tried.refused) == ("fp16", "fp16", "")
    assert tried.error is not None
    assert 0 < tried.error < precision.TOLERANCE
    assert said[-1] == "choosing the precision: fp16"


@pytest.mark.usefixtures("as_on_a_gpu")
def test_one_that_is_too_far_off_is_refused_with_its_error(
    net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fp16 = resolve_precision(asked(net, tmp_path / "first"), ignore).precision_tried[0]
    assert fp16.error is not None
    monkeypatch.setattr(precision, "TOLERANCE", fp16.error / 2)
    found = resolve_precision(asked(net, tmp_path / "second"), ignore)
    assert found.precision == "fp32"
    assert [t.precision for t in found.precision_tried] == [*ORDER]
    first, second, last = found.precision_tried
    assert first.error == fp16.error
    assert second.error is not None
    assert second.error > first.error  # bf16 has fewer digits
    assert first.refused.startswith(f"off by {fp16.error:.2g} of an output's largest value")
    assert (last.error, last.refused) == (None, "")


@pytest.mark.usefixtures("as_on_a_gpu")
def test_tf32_is_judged_by_what_rounding_the_weights_does(
    net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(precision.ORDER, "llvm", ("tf32", "fp32"))
    (tried,) = resolve_precision(asked(net, tmp_path / "run"), ignore).precision_tried
    assert tried.error is not None
    assert tried.error > 1e-5  # its default kernels are fp32's, which are nearer


# --- the run -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.usefixtures("kept_cluster")
def test_a_run_says_everywhere_what_was_chosen_and_keeps_to_it(
    net: Path, tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / "run"
    argv = ["tune", str(net), "--cpu-pct", "100", "--slice", "simulated", "--precision", "auto"]
    argv += ["--trials", "8", "--tuners", "1", "--out", str(out)]
    assert run(app, [*argv, "--json"]) in (0, 1, 2)
    document = json.loads(capsys.readouterr().out)["precision"]
    assert (document["precision"], document["from"]) == ("fp16", "auto")
    (tried,) = document["tried"]
    sentence = f"fp16, chosen by tunerd: off by at most {tried['error']:.2g} of an output's"
    assert document["sentences"][0].startswith(sentence)
    manifest = json.loads((out / "artifact" / "manifest.json").read_text())
    assert (manifest["precision"], manifest["precision_tried"]) == ("fp16", document["tried"])
    assert "fp16, chosen by tunerd" in (out / "report.html").read_text()
    assert run(app, argv) in (0, 1, 2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith(f"precision {sentence[:40]}")
    with Store.read(out) as store:
        assert len(store.sessions()) == 2


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.usefixtures("kept_cluster")
def test_a_tuned_model_that_is_too_far_off_gives_way_to_the_next_precision(
    net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune, precisions = runs.tune, []

    def worse(settings: TuneSettings, *rest: Any, **more: Any) -> Outcome:
        precisions.append(settings.precision)
        outcome = tune(settings, *rest, **more)
        if settings.precision != "fp16":
            return outcome
        verification = replace(outcome.verification, accuracy=(Accuracy("y", 0.5),))
        found = replace(outcome, verification=verification)
        with Store.create_or_open(settings.out, facts=_facts(settings.out)) as store:
            store.save_outcome(found)
        return found

    monkeypatch.setattr(runs, "tune", worse)
    warnings: list[str] = []
    found = tunerd.tune(
        net,
        cpu_pct=100,
        slice_kind="simulated",
        trials=8,
        tuners=1,
        precision="auto",
        out=tmp_path / "run",
        on_warning=warnings.append,
    )
    assert precisions == ["fp16", "bf16"]
    refused = next(said for said in warnings if "is not taken" in said)
    assert refused.startswith("fp16 is not taken: tuned, off by 0.5 of an output's largest")
    assert found.outcome.model.precision == "bf16"
    first, second = found.view.settings["precision_tried"]
    assert (first["precision"], first["error"], second["precision"]) == ("fp16", 0.5, "bf16")
    assert "run.wrong-fp16" in first["refused"]
    aside = tunerd.open_run(tmp_path / "run.wrong-fp16")
    assert aside.outcome.model.precision == "fp16"
    # The same call goes on with what was chosen.
    again = resolve_precision(asked(net, tmp_path / "run"), ignore)
    assert (again.precision, len(again.precision_tried)) == ("bf16", 2)


def _facts(out: Path) -> Any:
    with Store.read(out) as store:
        return store.facts()


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.usefixtures("kept_cluster")
@pytest.mark.nightly
def test_what_was_moved_aside_is_not_tried_again(
    net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"cpu_pct": 100, "slice_kind": "simulated", "trials": 8, "precision": "auto"}
    monkeypatch.setattr(precision, "_refusal", lambda verification, error: "")
    tunerd.tune(net, out=tmp_path / "run", **settings)  # type: ignore[arg-type]
    (tmp_path / "run").rename(tmp_path / "run.wrong-fp16")  # and killed before it went on
    monkeypatch.undo()
    monkeypatch.setitem(precision.ORDER, "llvm", ORDER)
    monkeypatch.setattr(precision, "TOLERANCE", 1e-9)
    found = resolve_precision(asked(net, tmp_path / "run"), ignore)
    assert found.precision == "fp32"
    first, second, _ = found.precision_tried
    assert first.refused.startswith("tuned, off by")
    assert second.refused.startswith("off by")


@pytest.mark.usefixtures("kept_cluster")
def test_a_run_of_a_given_precision_gets_no_other(net: Path, tmp_path: Path) -> None:
    settings = {"cpu_pct": 100, "slice_kind": "simulated", "trials": 1}
    tunerd.tune(net, out=tmp_path / "run", **settings)  # type: ignore[arg-type]
    with pytest.raises(FolderError, match="whose precision was given, or was left as exported"):
        resolve_precision(asked(net, tmp_path / "run"), ignore)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--precision", "half"), "'half' is not one of"),
        (("--precision", "auto", "--dry-run"), "--dry-run runs nothing"),
        (("--precision", "auto", "--dim", "n=1,2"), "is chosen for one size"),
        (("--precision", "auto", "--address", "10.0.0.1:6379"), "--address tunes on a cluster"),
    ],
)
def test_precisions_that_cannot_be_chosen_are_refused(
    flags: tuple[str, ...], said: str, net: Path, capsys: Captured
) -> None:
    assert run(app, ["tune", str(net), "--cpu-pct", "50", *flags]) == ExitCode.BAD_INPUT
    out, err = capsys.readouterr()
    assert (out, said in err) == ("", True), err


def test_a_recipe_may_leave_the_precision_to_tunerd(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("model: net.onnx\ncpu-pct: 50\nprecision: [auto, fp32]\n")
    found = [planned.command.argv for planned in read_recipe(path).runs]
    assert [argv[argv.index("--precision") + 1] for argv in found] == ["auto", "fp32"]


def test_the_default_folder_names_what_was_asked_for(tmp_path: Path) -> None:
    given = {"model": tmp_path / "net.onnx", "gpu_pct": 40, "precision": "auto"}
    settings = checked(TuneSettings, given)
    assert settings.out == Path("runs/net-auto-gpu40")
    assert (settings.precision, settings.precision_from) == (None, "auto")


def test_a_verdict_of_wrong_is_a_refusal_too() -> None:
    verification = Verification(
        Verdict.WRONG, 3, 1e-3, 1e-3, 7.0, "output 'y' is 7 times the tolerance away"
    )
    assert precision._refusal(verification, 0.0) == verification.message
