"""`tunerd compare` on runs: what it prints in each form, and what CI sees."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lib.artifact_fixtures import CORES, tiny_artifact
from tests.lib.bad_input import Bad, Place, check
from tests.lib.gate_runs import MODEL, PROOF, on, outcome, run_of
from tunerd.cli.app import app
from tunerd.cli.errors import run
from tunerd.errors import ExitCode
from tunerd.records.schema import STORE_NAME
from tunerd.vocabulary import CapProof
from tunerd.vocabulary.outcome import Latency, Outcome
from tunerd.vocabulary.verdict import Verdict

Captured = pytest.CaptureFixture[str]
HOSTILE = "a`|<b>@all [x](y)\x1b[31m"

MakeRun = Callable[..., str]


@pytest.fixture
def make(tmp_path: Path) -> MakeRun:
    """Return what writes a run that ended so, and names its folder."""

    def made(name: str, ended: Outcome | None, **of_run: str) -> str:
        return str(run_of(tmp_path / name, ended, **of_run))

    return made


def document(capsys: Captured, *argv: str, code: ExitCode) -> Any:
    assert run(app, ["compare", *argv, "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert found["exit_code"] == code
    return found


def test_a_run_whose_candidates_have_origins_and_no_sources_is_compared(
    make: MakeRun, capsys: Captured
) -> None:
    base, new = make("base", outcome(1)), make("new", outcome(2, slower=1.2))
    now = document(capsys, base, new, code=ExitCode.REGRESSION)
    with contextlib.closing(sqlite3.connect(Path(base) / STORE_NAME)) as store, store:
        ((text,),) = store.execute("SELECT outcome FROM outcomes")
        value = json.loads(text)
        for task in value["tasks"]:
            for entry in (task["winner"], *task["finalists"]):
                assert entry.pop("source")
                assert entry["origin"]
        store.execute("UPDATE outcomes SET outcome = ?", (json.dumps(value),))
    assert document(capsys, base, new, code=ExitCode.REGRESSION) == now


# --- what CI sees ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slower", "verdict", "code"),
    [
        (1.0, "same", ExitCode.BETTER),
        (0.8, "better", ExitCode.BETTER),
        (1.2, "worse", ExitCode.REGRESSION),
        (1.05, "cannot tell", ExitCode.CANNOT_TELL),
    ],
)
def test_each_verdict_has_its_exit_code(
    make: MakeRun, capsys: Captured, slower: float, verdict: str, code: ExitCode
) -> None:
    base, new = make("base", outcome(1)), make("new", outcome(2, slower=slower))
    found = document(capsys, base, new, code=code)
    assert found["verdict"] == found["end_to_end"]["verdict"] == verdict
    change = found["end_to_end"]["change"]
    assert change["low"] < slower < change["high"]
    assert found["headline"].startswith(verdict)


def test_who_cannot_tell_may_pass(make: MakeRun, capsys: Captured) -> None:
    base, new = make("base", outcome(1)), make("new", outcome(2, slower=1.05))
    argv = (base, new, "--cannot-tell", "pass")
    assert document(capsys, *argv, code=ExitCode.BETTER)["verdict"] == "cannot tell"


def test_what_is_allowed_decides(make: MakeRun, capsys: Captured) -> None:
    base, new = make("base", outcome(1)), make("new", outcome(2, slower=1.2))
    found = document(capsys, base, new, "--fail-above", "40%", code=ExitCode.BETTER)
    assert (found["verdict"], found["fail_above"]) == ("same", 0.4)


def test_a_slower_machine_is_not_a_slower_model(make: MakeRun, capsys: Captured) -> None:
    base, new = make("base", outcome(1)), make("new", outcome(2, drift=1.15))
    found = document(capsys, base, new, code=ExitCode.CANNOT_TELL)
    assert found["end_to_end"]["control"]["low"] > 1.05
    assert "the machine was not the same" in found["headline"]


def test_slow_tasks_come_first_and_do_not_decide(make: MakeRun, capsys: Captured) -> None:
    base, new = make("base", outcome(1)), make("new", outcome(2, slow_tasks=[2, 5]))
    found = document(capsys, base, new, code=ExitCode.BETTER)
    assert [t["name"] for t in found["tasks"][:2]] == ["conv5", "conv2"]
    verdicts = [t["judgement"]["verdict"] for t in found["tasks"]]
    assert verdicts[:2] == ["worse", "worse"]
    assert "worse" not in verdicts[2:]
    assert all(t["same_kernel"] for t in found["tasks"])
    assert found["tasks"][0]["added_secs"] > found["tasks"][1]["added_secs"] > 0


def test_tasks_of_one_side_are_counted(make: MakeRun, capsys: Captured) -> None:
    base, new = make("base", outcome(1, tasks=9)), make("new", outcome(2, tasks=8))
    found = document(capsys, base, new, code=ExitCode.BETTER)
    assert len(found["tasks"]) == 8
    assert "1 task only BASE measured" in found["notes"]


def test_runs_without_a_control_are_compared_with_a_note(make: MakeRun, capsys: Captured) -> None:
    ended = outcome(2)
    tuned = tuple(latency for latency in ended.latencies if latency.name == "tuned")
    base = make("base", outcome(1))
    new = make("new", dataclasses.replace(ended, latencies=tuned))
    found = document(capsys, base, new, code=ExitCode.BETTER)
    assert found["end_to_end"]["control"] is None
    assert any("there is no control" in note for note in found["notes"])


# --- what cannot be compared -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("proof", "said"),
    [
        (dataclasses.replace(PROOF, device="NVIDIA H100"), "device: NVIDIA H200 and NVIDIA H100"),
        (dataclasses.replace(PROOF, sm_count=66), "SMs: 52 and 66"),
        (dataclasses.replace(PROOF, driver="590.1"), "driver: 580.159.04 and 590.1"),
        (dataclasses.replace(PROOF, mechanism="none"), "kind of slice: mps and none"),
    ],
)
def test_another_place_is_not_comparable(
    make: MakeRun, capsys: Captured, proof: CapProof, said: str
) -> None:
    base, new = make("base", outcome(1)), make("new", on(proof, outcome(2)))
    found = document(capsys, base, new, code=ExitCode.NOT_COMPARABLE)
    assert found["differences"] == [said]
    assert (found["verdict"], found["end_to_end"]) == ("not comparable", None)


def test_another_model_or_other_inputs_are_not_comparable(make: MakeRun, capsys: Captured) -> None:
    inputs = (dataclasses.replace(MODEL.inputs[0], shape=(8, 3, 224, 224)),)
    other = dataclasses.replace(MODEL, digest="f" * 64, inputs=inputs)
    base = make("base", outcome(1))
    new = make("new", dataclasses.replace(outcome(2), model=other))
    found = document(capsys, base, new, code=ExitCode.NOT_COMPARABLE)
    assert [text.split(":")[0] for text in found["differences"]] == ["model", "inputs"]


@pytest.mark.parametrize(
    ("precisions", "said"),
    [
        ({"base": "fp32", "new": "fp16"}, "precision: fp32 and fp16"),
        ({"new": "tf32"}, "precision: as exported and tf32"),
    ],
)
def test_runs_in_two_precisions_are_not_comparable(
    make: MakeRun, capsys: Captured, precisions: dict[str, str], said: str
) -> None:
    made = [
        make(name, outcome(seed), **({"precision": precisions[name]} if name in precisions else {}))
        for seed, name in enumerate(("base", "new"))
    ]
    found = document(capsys, *made, code=ExitCode.NOT_COMPARABLE)
    assert found["differences"] == [said]
    assert found["headline"] == f"not comparable: {said}"


def test_runs_in_one_precision_are_compared(make: MakeRun, capsys: Captured) -> None:
    base = make("base", outcome(1), precision="fp16")
    new = make("new", outcome(2), precision="fp16")
    assert document(capsys, base, new, code=ExitCode.BETTER)["new"]["precision"] == "fp16"


def test_artifacts_in_two_precisions_are_not_measured(tmp_path: Path, capsys: Captured) -> None:
    tiny_artifact(tmp_path / "base", tuned=False)
    tiny_artifact(tmp_path / "new", tuned=False, precision="fp16")
    argv = (str(tmp_path / "base"), str(tmp_path / "new"))
    found = document(capsys, *argv, code=ExitCode.NOT_COMPARABLE)
    assert found["differences"] == ["precision: as exported and fp16"]


def test_artifacts_for_other_shares_need_one_to_measure_at(
    tmp_path: Path, capsys: Captured
) -> None:
    for cores, pct in ((1, 25), (2, 50)):
        proof = dataclasses.replace(CORES, sm_count=cores)
        tiny_artifact(tmp_path / str(pct), proof=proof, pct=pct)
    argv = (str(tmp_path / "25"), str(tmp_path / "50"))
    found = document(capsys, *argv, code=ExitCode.NOT_COMPARABLE)
    (said,) = found["differences"]
    assert "is for 25%" in said
    assert said.endswith("name the one to measure both at with --cpu-pct")


def test_simulated_artifacts_are_measured_in_simulated_slices(
    tmp_path: Path, capsys: Captured
) -> None:
    proof = dataclasses.replace(CORES, mechanism="simulated", sm_count=50)
    for name in ("base", "new"):
        tiny_artifact(tmp_path / name, proof=proof)
    argv = (str(tmp_path / "base"), str(tmp_path / "new"))
    found = document(capsys, *argv, code=ExitCode.BETTER)
    assert found["verdict"] == "same"
    assert found["measured"]["proof"]["mechanism"] == "simulated"


# --- the forms ---------------------------------------------------------------------------------


def test_the_table_ends_with_the_verdict(make: MakeRun, capsys: Captured) -> None:
    base, new = make("base", outcome(1)), make("new", outcome(2, slower=1.2))
    assert run(app, ["compare", base, new]) == ExitCode.REGRESSION
    out = capsys.readouterr().out
    assert "net at 40% of NVIDIA H200 (52 SMs)" in out
    assert out.rstrip().endswith("worse: NEW is slower than BASE by more than 5%")


def test_markdown_is_a_table_that_names_from_files_cannot_break(
    make: MakeRun, capsys: Captured
) -> None:
    def named(ended: Outcome) -> Outcome:
        task = dataclasses.replace(ended.tasks[0], name=HOSTILE)
        model = dataclasses.replace(ended.model, name=HOSTILE)
        return dataclasses.replace(ended, model=model, tasks=(task, *ended.tasks[1:]))

    base, new = make("base", named(outcome(1))), make("new", named(outcome(2)))
    assert run(app, ["compare", base, new, "--format", "markdown"]) == ExitCode.BETTER
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 4 + 2 + 8
    assert {row.count("|") for row in rows} == {7}
    assert "\x1b" not in out
    outside = "".join(part for i, part in enumerate(out.replace("\\`", "").split("`")) if not i % 2)
    assert "<b>" not in outside
    assert "@all" not in outside
    assert "][" not in outside.replace("\\[", "").replace("\\]", "")
    assert out.startswith("### same: NEW is not slower than BASE by more than 5%\n")


def test_github_action_benchmark_gets_the_new_latency_alone(
    make: MakeRun, capsys: Captured
) -> None:
    base, new = make("base", outcome(1)), make("new", outcome(2, slower=1.2))
    argv = ["compare", base, new, "--format", "github-action-benchmark"]
    assert run(app, argv) == ExitCode.REGRESSION
    (entry,) = json.loads(capsys.readouterr().out)
    assert set(entry) == {"name", "unit", "value", "range", "extra"}
    assert (entry["name"], entry["unit"]) == ("net at 40% of NVIDIA H200 (52 SMs)", "ms")
    assert entry["value"] == pytest.approx(1.2 * 5.87, rel=0.02)
    assert entry["range"].startswith("± ")
    assert entry["extra"].startswith("worse: ")


def test_a_run_beside_itself_is_the_same_in_every_form(make: MakeRun, capsys: Captured) -> None:
    base = make("base", outcome(1))
    for form in ("table", "json", "markdown", "html", "github-action-benchmark"):
        assert run(app, ["compare", base, base, "--format", form]) == ExitCode.BETTER
        assert "same" in capsys.readouterr().out.lower()


def test_two_forms_at_once_are_refused(make: MakeRun, capsys: Captured) -> None:
    base = make("base", outcome(1))
    argv = ["compare", base, base, "--json", "--format", "markdown"]
    assert run(app, argv) == ExitCode.BAD_INPUT
    assert "ask for two things" in json.loads(capsys.readouterr().out)["error"]["message"]


# --- what is refused ---------------------------------------------------------------------------


def of_runs(*flags: object, base: Outcome | None = None, new: Outcome | None = None):  # type: ignore[no-untyped-def]
    """Return what makes two runs in a place and the command line that compares them."""

    def made(place: Place) -> list[object]:
        folders = [
            run_of(place.folder / name, ended or outcome(1))
            for name, ended in (("base", base), ("new", new))
        ]
        return ["compare", *folders, *flags]

    return made


def unfinished(place: Place) -> list[object]:
    return ["compare", place.run("base"), place.run("new")]


def nowhere(place: Place) -> list[object]:
    return ["compare", place.folder, place.folder / "nothing"]


WRONG = dataclasses.replace(
    outcome(1),
    verification=dataclasses.replace(outcome(1).verification, verdict=Verdict.WRONG),
)
NO_TIMES = dataclasses.replace(outcome(1), latencies=(Latency("tuned", (0.0,) * 9),))
NOT_TIMED = dataclasses.replace(outcome(1), latencies=())

BAD = [
    Bad("a percentage", of_runs("--fail-above", "lots"), ExitCode.BAD_INPUT, "'lots' is no perc"),
    Bad("a negative one", of_runs("--fail-above", "-5%"), ExitCode.BAD_INPUT, "'-5%' is no perc"),
    Bad("a share of the past", of_runs("--gpu-pct", 40), ExitCode.BAD_INPUT, "add --measure"),
    Bad("no run", nowhere, ExitCode.BAD_INPUT, "is no run folder and no artifact"),
    Bad("an unfinished run", unfinished, ExitCode.BAD_FOLDER, "has not ended"),
    Bad("a wrong model", of_runs(new=WRONG), ExitCode.WRONG_RESULT, "disagrees with ONNX"),
    Bad("no times", of_runs(new=NO_TIMES), ExitCode.BAD_FOLDER, "can be no time of a call"),
    Bad("no samples", of_runs(base=NOT_TIMED), ExitCode.BAD_FOLDER, "it is damaged"),
    Bad("no artifact to measure", of_runs("--measure"), ExitCode.BAD_INPUT, "no folder .*artifact"),
    Bad("cores for a GPU", of_runs("--measure", "--cpu-pct", 9), ExitCode.BAD_INPUT, "--gpu-pct"),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.what)
def test_what_cannot_be_compared_is_refused_in_a_sentence(
    bad: Bad, place: Place, capsys: Captured
) -> None:
    check(bad, place, capsys)
