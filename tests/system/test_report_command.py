"""`tunerd report` tells of any run folder: finished, killed, several side by side."""

# ruff: noqa: RUF001  the multiplication sign and the en dash are what people read

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import cmarkgfm
import pytest
from cmarkgfm.cmark import Options

from tests.lib.report_runs import HOSTILE, cpu_outcome, finished_run, run_facts, searched_run, view
from tunerd.cli.app import app
from tunerd.cli.errors import run
from tunerd.errors import ExitCode
from tunerd.records import Store
from tunerd.report.comparison import against_first, named
from tunerd.report.markdown import run_markdown
from tunerd.report.markdown_text import code, text
from tunerd.report.page import report_page
from tunerd.report.run_view import RunView, run_view_of
from tunerd.vocabulary.verdict import Verdict


def told(folder: Path) -> RunView:
    with Store.read(folder) as store:
        return run_view_of(store)


def report(*argv: object) -> int:
    return run(app, ["report", *map(str, argv)])


class Words(HTMLParser):
    """What a reader sees of HTML, and the elements that make it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.pieces: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.pieces.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.pieces).split())


def rendered(markdown: str) -> Words:
    """Render as GitHub does, with its own parser."""
    return Words(cmarkgfm.github_flavored_markdown_to_html(markdown, Options.CMARK_OPT_UNSAFE))


# --- what a folder tells -----------------------------------------------------------------------


def test_a_finished_run_is_read_back_as_it_ended(tmp_path: Path) -> None:
    found = told(finished_run(tmp_path / "run"))
    assert found.outcome is not None
    assert found.outcome.end_to_end.verdict is Verdict.FASTER
    assert found.outcome.tasks == found.tasks
    assert not found.is_unfinished
    assert not found.undecided
    assert found.sessions == 2
    assert [p.trials for p in found.history][-1] == 5


def test_a_run_killed_in_its_search_is_told_as_far_as_it_got(tmp_path: Path) -> None:
    found = told(searched_run(tmp_path / "run"))
    assert found.outcome is None
    assert found.is_unfinished
    assert found.undecided == {t.task_id for t in found.tasks}
    assert [(t.trials, t.failed) for t in found.tasks] == [(3, 0), (2, 1)]
    assert found.tasks[0].default_secs == 1e-3
    assert found.tasks[0].best_secs == pytest.approx(1e-3 / 7)
    assert found.open_trials == 1
    assert [(f.name, f.trials, f.trial_id) for f in found.failures] == [("build: compile", 1, 6)]
    page = report_page(found)
    assert "No result yet" in page
    assert "undecided" in page


def test_a_slice_that_proved_nothing_is_named(tmp_path: Path) -> None:
    found = told(searched_run(tmp_path / "run"))
    assert [(s.slice_id, s.proofs, s.trials) for s in found.slices] == [
        ("cpu-0-0", 1, 6),
        ("cpu-0-1", 0, 0),
    ]
    assert "1 slice proved nothing" in report_page(found)


def test_a_result_is_called_old_while_a_later_session_has_none(tmp_path: Path) -> None:
    folder = finished_run(tmp_path / "run")
    with Store.create_or_open(folder, facts=run_facts(), now=2000.0):
        pass
    found = told(folder)
    assert found.is_stale
    assert found.outcome is not None
    assert "a later session has gone on from there" in report_page(found)


def test_a_run_before_its_first_trial_has_a_page(tmp_path: Path) -> None:
    with Store.create_or_open(tmp_path, facts=run_facts()):
        pass
    page = report_page(told(tmp_path))
    assert "The run ended before the model was cut into tasks." in page
    assert "The run ended before its slices were planned." in page
    assert "No trial was measured." in page


def test_cpu_slices_say_that_they_have_no_clocks(tmp_path: Path) -> None:
    page = report_page(told(finished_run(tmp_path / "run")))
    assert "slices of kind cpu record no clocks, power or temperature" in page
    assert "<figure>" not in page


def test_the_last_lines_of_a_failure_are_shown(tmp_path: Path) -> None:
    page = report_page(told(searched_run(tmp_path / "run")))
    assert "<pre>one\ntwo</pre>" in page
    assert "trial-6.log" in page


# --- the command -------------------------------------------------------------------------------


def test_the_page_of_a_run_is_written_into_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finished_run(tmp_path / "run")
    assert report(folder) == 0
    assert capsys.readouterr().out == f"report    {folder / 'report.html'}\n"
    assert (folder / "report.html").read_text() == report_page(told(folder))


def test_a_page_can_go_to_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = searched_run(tmp_path / "run")
    assert report(folder, "--to", "-") == 0
    assert capsys.readouterr().out == report_page(told(folder))
    assert not (folder / "report.html").exists()


def test_the_document_has_the_result_and_the_tasks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(finished_run(tmp_path / "run"), "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["is_finished"] is True
    assert document["result"]["verdict"] == "faster"
    assert [t["is_tuned"] for t in document["tasks"]] == [True, False]
    assert document["slices"][0]["proof"]["sm_count"] == 1
    assert [t["candidates"] for t in document["fidelity"]["tasks"]] == [0, 0]  # no finals here
    assert document["drift"]["slices"] == []
    assert report(searched_run(tmp_path / "killed"), "--format", "json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["is_finished"] is False
    assert document["result"] is None
    assert [t["is_decided"] for t in document["tasks"]] == [False, False]


def test_several_runs_need_a_file_for_their_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [finished_run(tmp_path / name) for name in ("a", "b")]
    assert report(*runs) == ExitCode.BAD_INPUT
    assert "add --to FILE" in capsys.readouterr().err
    assert report(*runs, "--to", tmp_path / "both.html") == 0
    assert "2 runs of net" in (tmp_path / "both.html").read_text()


@pytest.mark.parametrize("place", ["", "missing/report.html"])
def test_a_place_that_cannot_be_written_is_named(
    tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = searched_run(tmp_path / "run")
    assert report(folder, "--to", tmp_path / place) == ExitCode.BAD_FOLDER
    assert "cannot be written" in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(tmp_path) == ExitCode.BAD_FOLDER
    assert "is not a run folder" in capsys.readouterr().err


def test_two_formats_at_once_are_refused(tmp_path: Path) -> None:
    assert report(tmp_path, "--json", "--format", "html") == ExitCode.BAD_INPUT


def test_an_outcome_that_no_run_wrote_is_a_damaged_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import sqlite3

    folder = finished_run(tmp_path / "run")
    with sqlite3.connect(folder / "store.sqlite") as database:
        database.execute("""UPDATE outcomes SET outcome = '{"model": 3}'""")
    assert report(folder) == ExitCode.BAD_FOLDER
    assert "it is damaged" in capsys.readouterr().err


# --- several runs ------------------------------------------------------------------------------


def test_runs_of_one_kind_are_compared_by_an_interval(tmp_path: Path) -> None:
    folders = [
        finished_run(tmp_path / "monday", tuned_secs=2e-3),
        finished_run(tmp_path / "tuesday", tuned_secs=1e-3),
    ]
    (other,) = against_first(named(folders, [told(f) for f in folders]))
    assert other.obstacles == ()
    assert other.comparison is not None
    assert other.comparison.verdict is Verdict.FASTER
    assert other.comparison.ratio == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device": "NVIDIA H200"}, "device NVIDIA H200 (the first: AMD EPYC 9354)"),
        ({"model_digest": "cd" * 32}, "sha256 cdcdcdcdcdcd"),
        ({"slice_kind": "simulated"}, "slices simulated (the first: cpu)"),
        ({"settings": {"precision": "fp16"}}, "precision fp16 (the first: as exported)"),
    ],
)
def test_what_cannot_be_compared_is_said_and_refused_nowhere(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    folders = [
        finished_run(tmp_path / "a"),
        finished_run(tmp_path / "b", run_facts(**change)),
    ]
    (other,) = against_first(named(folders, [told(f) for f in folders]))
    assert other.comparison is None
    assert words in "; ".join(other.obstacles)
    page = tmp_path / "both.html"
    assert report(*folders, "--to", page) == 0
    assert words in page.read_text()
    assert "not comparable" in page.read_text()


def test_runs_in_folders_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    for folder in folders:
        folder.parent.mkdir()
        searched_run(folder)
    runs = named(folders, [told(f) for f in folders])
    assert [run.label for run in runs] == [str(f) for f in folders]


def test_a_run_without_a_result_stands_beside_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [finished_run(tmp_path / "done"), searched_run(tmp_path / "killed")]
    assert report(*folders, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    (other,) = document["against_first"]
    assert other["is_comparable"] is False
    assert other["obstacles"] == ["one of the two has no end-to-end latency"]
    assert [len(t["best_secs"]) for t in document["tasks"]] == [2, 2]


# --- Markdown ----------------------------------------------------------------------------------


def test_markdown_begins_with_the_verdict_and_folds_the_tasks_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(finished_run(tmp_path / "run"), "--format", "markdown") == 0
    markdown = capsys.readouterr().out
    assert markdown.startswith("**`net` at 50% of the CPU cores: 2.00× faster than the default")
    page = rendered(markdown)
    assert page.tags.count("table") == 2
    assert page.tags.count("details") == 1
    assert "1 of 2 tasks use a tuned schedule" in page.text
    assert "default (the best candidate against the default: slower)" in page.text


def test_markdown_of_several_runs_says_what_is_not_comparable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [
        finished_run(tmp_path / "a"),
        finished_run(tmp_path / "b", run_facts(device="NVIDIA H200")),
    ]
    assert report(*folders, "--format", "markdown") == 0
    page = rendered(capsys.readouterr().out)
    assert "not comparable, device NVIDIA H200 (the first: AMD EPYC 9354)" in page.text
    assert page.tags.count("table") == 2


ODD_NAMES = [
    HOSTILE,
    "a|b\\|c`d``e```",
    "`<b>x</b>`",
    "**bold** _it_ ~~no~~ [x](http://e.org) ![i](j) <!-- c -->",
    "@someone #12 :tada: www.example.org https://example.org/x mail@example.org GH-3",
    "&lt;b&gt; &amp; &#60;",
    "# heading",
    "שלום \N{PILE OF POO} ünïcode",
    "]]> <![CDATA[ </details></code>",
]


@pytest.mark.parametrize("name", ODD_NAMES)
@pytest.mark.parametrize("write", [code, text])
def test_markdown_shows_odd_names_as_text(name: str, write: object) -> None:
    assert callable(write)
    written = write(name)
    page = rendered(f"| Name | Next |\n|---|---|\n| {written} | here |\n\n- {written}\n")
    assert set(page.tags) <= {
        "table", "thead", "tbody", "tr", "th", "td", "ul", "li", "code",
    }  # fmt: skip
    assert page.tags.count("td") == 2
    shown = " ".join(re.sub("[\x1b\u202e]", "\N{REPLACEMENT CHARACTER}", name).split())
    assert page.text.count(shown) == 2


def test_a_name_that_never_ends_is_cut() -> None:
    assert len(code("x" * 100_000)) < 300


def test_markdown_of_a_large_model_fits_into_a_comment() -> None:
    outcome = cpu_outcome()
    many = tuple(task for _ in range(40) for task in outcome.tasks)
    told = view(outcome, tasks=many)
    assert len(many) > 700
    assert len(run_markdown(told)) < 65_536
