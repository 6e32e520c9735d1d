"""The report of a matrix, its recipe, and whole small ones that are killed."""

from __future__ import annotations

import dataclasses
import html
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
from rich.console import Console

from tests.lib import PYTHON_PATH, ROOT
from tests.lib.matrix_samples import OFF, SHARES, Cells, losses, noisy, samples_of
from tests.lib.models import conv_net, script
from tunerd.artifacts.manifest import SAMPLE
from tunerd.cli.app import app
from tunerd.cli.errors import run
from tunerd.errors import ExitCode, InputError
from tunerd.records import Store
from tunerd.report.matrix_page import matrix_markdown, matrix_page, matrix_plot, matrix_table
from tunerd.report.matrix_text import changed_text, facts_text, limits_text
from tunerd.studies.matrix.changes import change
from tunerd.studies.matrix.claims import DEFAULT, findings
from tunerd.studies.matrix.folder import read
from tunerd.studies.matrix.levels import Cost, finalists_of
from tunerd.studies.matrix.records import CellDone, ContestDone, LevelDone
from tunerd.studies.matrix.result import Costs, MatrixResult, result_json
from tunerd.system import host
from tunerd.system.text import TIMES, UNKNOWN
from tunerd.vocabulary import DEFAULT_SOURCE


def result_of_samples(cells: Cells, model: str) -> MatrixResult:
    cost = Cost(60.0, 100.0, 20.0)
    costs = Costs(
        one=cost,
        one_artifact=Cost(20.0, 20.0, 5.0),
        later=cost,
        finalists=cost,
        artifacts=Cost(10.0, None, 5.0),
        rounds=cost + cost + cost,
        round_count=3,
    )
    times = {10: {"a": noisy(1), "b": noisy(2)}, 100: {"a": noisy(2), "b": noisy(1)}}
    return MatrixResult(
        model=model,
        device="NVIDIA H200",
        unit="gpu",
        sms={10: 12, 40: 52, 100: 132},
        rounds=3,
        trials={10: 75, 40: 500, 100: 75},
        learns_from={40: [], 10: [40], 100: [40]},
        findings=findings(cells),
        changes=(change("t", times),),
        names={"t": "conv2d<b>", "u": "pool"},
        costs=costs,
        verified={DEFAULT: "right", 10: "cannot tell"},
        clocks_mhz=(1700, 1980),
    )


def test_a_matrix_of_one_round_says_that_its_intervals_are_unknown() -> None:
    cells = {cell: rounds[:1] for cell, rounds in samples_of(losses(OFF)).items()}
    result = dataclasses.replace(result_of_samples(cells, "net"), rounds=1)
    document = json.loads(json.dumps(result_json(result), allow_nan=False))
    assert all(gain["ratio"]["high"] is None for gain in document["findings"]["gains"])
    for text in (matrix_markdown(result), matrix_page(result)):
        assert f"1.20{TIMES} ({UNKNOWN})" in text
        assert "--rounds" in text
    ElementTree.fromstring(matrix_plot(result))


def test_a_page_shows_each_cell_with_its_interval_and_reads_names_as_text() -> None:
    cells = samples_of(losses(OFF | {(10, 100): 2.5}) | {(DEFAULT, b): 9.0 for b in SHARES})
    result = result_of_samples(cells, "<script>net")
    page = matrix_page(result)
    assert page.count('data-label="run at ') == 12
    assert "tuned at 10%, run at 100%: 2.50\N{NO-BREAK SPACE}ms; over the best 2.5" in page
    assert page.count("heat-0 own") == 3
    assert "&lt;script&gt;net" in page
    assert "conv2d&lt;b&gt;" in page
    assert "Whether these are right cannot be told: tuned at 10%" in page
    plot = ElementTree.fromstring(matrix_plot(result))
    drawn = [e.get("class") for e in plot.iter("{http://www.w3.org/2000/svg}rect")]
    assert Counter(drawn) == {"page": 1, "best": 3, "cell": 9, "own": 3}
    assert "<script>net" in (plot.get("aria-label") or "")
    text = matrix_markdown(result)
    assert "| tuned at 40% |" in text
    assert "cannot be told |" in text  # core time with artifacts
    assert "40% was tuned first, with 500 trials, each other share with 75" in text
    assert "changes with the share for 1 of 1 task, does not for 0" in text
    assert "100%. 1 task more had the default schedule alone." in text
    alone = dataclasses.replace(result, learns_from={10: [], 40: [], 100: []})
    said = matrix_markdown(alone)
    assert "tuned as if it were the only one, with 75 to 500 trials" in said
    assert "of all levels, and need not" not in said
    changed = json.loads(json.dumps(result_json(result)))["changed_tasks"]
    assert (changed["yes"], changed["default_alone"]) == (1, 1)


def printed(result: MatrixResult, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(matrix_table(result))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_shows_the_words_of_the_markdown_and_none_of_its_markup() -> None:
    result = result_of_samples(samples_of(losses(OFF)), "light_[red]net\x1b[2J")
    text = printed(result, 1000)
    assert text.startswith("light_[red]net\N{REPLACEMENT CHARACTER}[2J: Best at its own share: ")
    assert not re.search(r"\*\*|&#|\||---|\x1b", text)
    said = html.unescape(matrix_markdown(result))
    for sentence in (facts_text(result), limits_text(result), changed_text(result)):
        assert sentence in said
        assert f"\n{sentence}\n\n" in text
    assert re.search(r"\ntuned at 40% +1\.\d+", text)
    assert max(map(len, printed(result, 60).splitlines())) <= 60


def test_the_tasks_whose_best_changes_are_counted_without_a_range_that_is_none() -> None:
    result = result_of_samples(samples_of(losses(OFF)), "net")
    changes = "The best candidate changes with the share for "
    more = "1 task more had the default schedule alone."
    all_of_it = f"{changes}1 of 1 task, does not for 0, and cannot be told for 0: 100%. {more}"
    assert changed_text(result) == all_of_it
    same = {10: {"a": noisy(1), "b": noisy(2)}, 100: {"a": noisy(1), "b": noisy(2)}}
    unchanged = dataclasses.replace(result, changes=(change("t", same),))
    assert changed_text(unchanged) == f"{changes}none of 1 task. {more}"


def test_one_core_is_one_core_in_each_form() -> None:
    found = result_of_samples(samples_of(losses(OFF)), "net")
    result = dataclasses.replace(found, unit="cpu", sms={10: 1, 40: 2, 100: 4})
    for said in (matrix_markdown(result), printed(result, 1000)):
        assert "10% (1 core)" in said
        assert "40% (2 cores)" in said
    assert "10% (1 core)<" in matrix_page(result)


# --- recipes -----------------------------------------------------------------------------------


def test_the_recipe_of_shares_makes_matrices_profiles_and_runs_to_judge_the_search_by() -> None:
    recipes = script("reproduce").recipes_in(ROOT / "recipes" / "shares.yaml")
    runs = [run for recipe in recipes for run in recipe.runs]
    assert [run.command.argv[0] for run in runs] == ["matrix"] * 8 + ["profile"] * 4 + ["tune"] * 2
    assert {"light_densenet121-batch8", "encoder12-batch1"} <= {run.name for run in runs}
    assert len({run.out for run in runs}) == 14


@pytest.mark.parametrize(("name", "count"), [("claims", 18), ("claims-fp16", 6)])
def test_the_recipe_of_claims_makes_independent_matrices_of_three_searches(
    name: str, count: int
) -> None:
    (recipe,) = script("reproduce").recipes_in(ROOT / "recipes" / f"{name}.yaml")
    assert len({run.out for run in recipe.runs}) == count
    assert all("--independent" in run.command.argv for run in recipe.runs)


def test_what_a_recipe_says_wrong_is_refused_with_its_line(tmp_path: Path) -> None:
    reproduce = script("reproduce")
    path = tmp_path / "r.yaml"
    for text, problem in [
        ("matrix:\n  model: a.onnx\n  shares: 10,200\n", "r.yaml:3.*--?shares"),
        ("matrix:\n  model: a.onnx\n  shares: 10,20\n  gpu-pct: 5\n", "r.yaml:4.*gpu-pct"),
        ("matrix: {}\nmodel: a.onnx\n", "beside matrix"),
        ("profile:\n  model: a.onnx\n  duration: short\n", "r.yaml:3.*'short' is not a dur"),
    ]:
        path.write_text(text)
        with pytest.raises(InputError, match=problem):
            reproduce.recipes_in(path)


def test_a_recipe_begins_nothing_that_has_ended_and_notes_nothing_that_has_failed(
    tmp_path: Path,
) -> None:
    reproduce = script("reproduce")
    path = tmp_path / "r.yaml"
    path.write_text("matrix:\n  model: none.onnx\n  shares: 10,20\n  out: m\n")
    (recipe,) = reproduce.recipes_in(path)
    code, is_through = reproduce.reproduce(recipe, recipe.runs)
    assert code == ExitCode.BAD_MODEL
    assert is_through
    assert not reproduce.has_ended(recipe.runs[0])
    reproduce.marker_of(recipe.runs[0]).write_text(
        json.dumps({"argv": recipe.runs[0].command.argv})
    )
    assert reproduce.reproduce(recipe, recipe.runs) == (0, True)


def test_a_run_goes_on_from_its_archive_on_a_machine_that_has_nothing(tmp_path: Path) -> None:
    reproduce = script("reproduce")
    path = tmp_path / "r.yaml"
    path.write_text("matrix:\n  model: none.onnx\n  shares: 10,20\n  out: runs/{name}\n")
    (recipe,) = reproduce.recipes_in(path)
    (run,) = recipe.runs
    kept, compiled = run.out / "levels" / "gpu10" / "store.sqlite", run.out / "artifacts" / "gpu10"
    for folder in (kept.parent, compiled):
        folder.mkdir(parents=True)
    kept.write_bytes(b"a store")
    (compiled / "weights.bin").write_bytes(bytes(1000))
    archives = tmp_path / "archives"
    assert reproduce.reproduce(recipe, [run], archives) == (ExitCode.BAD_MODEL, True)
    shutil.rmtree(run.out.parent)
    assert reproduce.reproduce(recipe, [run], archives)[0] == ExitCode.BAD_MODEL
    assert kept.read_bytes() == b"a store"
    assert not compiled.parent.exists()

    reproduce.marker_of(run).write_text(json.dumps({"argv": run.command.argv}))
    reproduce.pack(run, archives)
    shutil.rmtree(run.out.parent)
    assert reproduce.reproduce(recipe, [run], archives) == (0, True)  # it has ended there
    assert kept.exists()


# --- whole ones --------------------------------------------------------------------------------

needs_two_cores = pytest.mark.skipif(
    host.facts().usable_cores < 2, reason="a level uses two slices of a core each"
)


def command(model: Path, out: Path, *flags: str) -> list[str]:
    given = [str(model), "--out", str(out), "--tuners", "1", *flags]
    return [sys.executable, "-m", "tunerd", "matrix", *given]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": PYTHON_PATH}


@pytest.mark.slow
@needs_two_cores
@pytest.mark.nightly
def test_a_matrix_that_is_interrupted_goes_on_and_measures_nothing_twice(tmp_path: Path) -> None:
    model, out = tmp_path / "net.onnx", tmp_path / "m"
    onnx.save(conv_net(), model)
    flags = ("--shares", "50,100", "--trials", "16", "--rounds", "2", "--slice", "simulated")
    first = subprocess.Popen(
        command(model, out, *flags), stderr=subprocess.PIPE, text=True, env=environment()
    )
    assert first.stderr is not None
    for line in first.stderr:  # until there is something to lose
        if "finalists of all levels" in line:
            first.send_signal(signal.SIGKILL)
            break
    first.communicate()
    levels = list(read(out).of(LevelDone))
    assert [level.pct for level in levels] == [50, 100]
    ended = subprocess.run(
        [*command(model, out, *flags), "--json"], capture_output=True, text=True, env=environment()
    )
    assert ended.returncode == 0, ended.stderr
    kept = read(out)
    assert list(kept.of(LevelDone)) == levels
    contests = [(x.run_at, x.task_id) for x in kept.of(ContestDone)]
    assert len(contests) == len(set(contests))
    document = json.loads(ended.stdout)
    # A simulated candidate takes as long at any share: all that differs is nothing.
    assert {c["answer"] for c in document["findings"]["claims"]} <= {"no", "cannot tell"}
    assert document["changed_tasks"]["yes"] == 0
    page = (out / "report.html").read_text()
    assert "run at 50%" in page
    assert "default schedules" in page
    many = command(model, out, *flags[:-4], "--rounds", "90", *flags[-2:])
    stopped = subprocess.Popen(many, stderr=subprocess.PIPE, text=True, env=environment())
    assert stopped.stderr is not None
    for line in stopped.stderr:
        if "round 4 of 90" in line:
            stopped.send_signal(signal.SIGTERM)
            break
    _, said = stopped.communicate()
    assert stopped.returncode == ExitCode.INTERRUPTED, said
    found = json.loads((out / "matrix-result.json").read_bytes())["rounds"]
    assert 3 <= found < 90
    assert f"{found} of 90 rounds are in {out / 'report.html'}" in said


@pytest.mark.slow
@pytest.mark.usefixtures("kept_cluster")
def test_a_level_builds_nothing_that_an_earlier_one_keeps_for_the_same_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tmp_path / "net.onnx", tmp_path / "m"
    onnx.save(conv_net(), model)
    flags = ("--shares", "50,100", "--trials", "20", "--rounds", "1", "--slice", "simulated")
    assert run(app, command(model, out, *flags)[3:]) == 0, capsys.readouterr().err
    first, later = (_build_secs(out / "levels" / f"gpu{pct}") for pct in (50, 100))
    defaults = {i for i, (source, _) in later.items() if source == DEFAULT_SOURCE}
    assert defaults
    assert all(later[i] == first[i] for i in defaults)  # to the last digit: it is one build
    assert any(later[i] == first[i] for i in (later.keys() & first.keys()) - defaults)


def _build_secs(level: Path) -> dict[str, tuple[str, float | None]]:
    with Store.read(level) as store:
        found = [(r.candidate, r.build_secs) for r in store.records()]
    return {c.candidate_id: (c.source, secs) for c, secs in found}


@pytest.mark.slow
@needs_two_cores
@pytest.mark.usefixtures("kept_cluster")
@pytest.mark.nightly
def test_independent_shares_have_all_trials_and_their_own_kernels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tmp_path / "net.onnx", tmp_path / "m"
    onnx.save(conv_net(), model)
    flags = ("--shares", "50,100", "--trials", "8", "--rounds", "1", "--slice", "simulated")
    for more, code in ((["--independent"], 0), ([], ExitCode.BAD_FOLDER)):
        ended = run(app, command(model, out, *flags, *more)[3:])
        said = capsys.readouterr().err
        assert ended == code, said
    assert "independent: True there" in said
    kept = read(out)
    own = {}
    for level in kept.of(LevelDone):
        with Store.read(kept.level(f"gpu{level.pct}")) as store:
            searched = [r for r in store.records() if not r.candidate.is_default]
            own[level.pct] = {c.candidate_id for of in finalists_of(store).values() for c in of}
        assert len(searched) == level.trials == 8
        assert level.learns_from == ()
    for contest in kept.of(ContestDone):
        assert contest.winner in own[contest.run_at] | {contest.default}


@pytest.mark.slow
@needs_two_cores
def test_a_matrix_of_cores_has_real_artifacts_at_each_share(tmp_path: Path) -> None:
    model, out = tmp_path / "net.onnx", tmp_path / "m"
    onnx.save(conv_net(), model)
    images = np.random.default_rng(0).normal(size=(3, 1, 3, 16, 16))
    np.savez(tmp_path / "samples.npz", images=images.astype(np.float32))
    flags = ("--shares", "50,100", "--trials", "8", "--rounds", "1", "--slice", "cpu", "--json")
    flags += ("--inputs", str(tmp_path / "samples.npz"))
    ended = subprocess.run(  # in a folder that is named from where the command is given
        command(model, Path("m"), *flags),
        capture_output=True,
        text=True,
        env=environment(),
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    document = json.loads(ended.stdout)
    assert document["sms"]["50"] < document["sms"]["100"]
    assert set(document["verified"].values()) == {"right"}
    for over in document["costs"]["over_one_level"].values():
        assert all(over[what]["value"] > 1 for what in ("cpu", "slice", "wall"))
        assert not any(each["is_least"] for each in over.values())
    for part in document["costs"].values():  # none is left out, and none counts what it only holds
        assert "slice_work_secs" not in part or 0 <= part["slice_work_secs"] < part["wall_secs"]
    cells = {(c["tuned_at"], c["run_at"]) for c in document["findings"]["cells"]}
    assert cells == {(a, b) for a in (DEFAULT, 50, 100) for b in (50, 100)}
    measured = list(read(out).of(CellDone))
    assert len(measured) == 2
    assert list(out.rglob(SAMPLE))
    for cell in measured:
        assert cell.proof.sm_count == document["sms"][str(cell.run_at)]
        assert all(len(r.run_secs) == 10 for r in cell.results)

    for compiled in script("reproduce").COMPILED:  # as on another machine, from an archive
        for folder in tmp_path.rglob(compiled):
            shutil.rmtree(folder)
    contests = list(read(out).of(ContestDone))
    more = subprocess.run(
        command(model, out, *flags, "--rounds", "2"),
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert more.returncode == 0, more.stderr
    assert "finalists" not in more.stderr
    kept = read(out)
    assert list(kept.of(ContestDone)) == contests
    assert len(list(kept.of(CellDone))) == 4
