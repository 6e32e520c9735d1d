"""Logs: JSON on stderr and in the run folder, with what each line is about."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tunerd.cli.app import app
from tunerd.cli.errors import run
from tunerd.errors import ExitCode
from tunerd.system import logs
from tunerd.telemetry.progress import LoggedProgress, ProgressState, open_progress

Captured = pytest.CaptureFixture[str]
log = logging.getLogger("tunerd.test")


@pytest.fixture(autouse=True)
def root_as_before() -> Iterator[None]:
    root, own = logging.getLogger(), logging.getLogger("tunerd")
    handlers, level = list(root.handlers), own.level
    yield
    root.handlers[:] = handlers
    own.setLevel(level)
    logging.captureWarnings(False)


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def kept(folder: Path) -> list[dict[str, Any]]:
    return lines((folder / logs.LOG_NAME).read_text())


# --- what a line says --------------------------------------------------------------------------


def test_a_line_says_when_how_grave_by_whom_and_what_about(capsys: Captured) -> None:
    logs.set_up(verbose=False, as_json=True)
    log.info("a %s", "word", extra={"task": "conv", "trial": 7, "slice": "mps-0-0"})
    (line,) = lines(capsys.readouterr().err)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "logger": "tunerd.test",
        "message": "a word",
        "task": "conv",
        "trial": 7,
        "slice": "mps-0-0",
    }


def test_whatever_a_message_holds_is_one_line_that_no_terminal_obeys(capsys: Captured) -> None:
    logs.set_up(verbose=False, as_json=True)
    log.error("two\nlines \x1b[2J \udcff", extra={"task": Path("a path")})
    said = capsys.readouterr().err
    assert "\x1b" not in said
    (line,) = lines(said)
    assert line["message"] == "two\nlines \x1b[2J \udcff"
    assert line["task"] == "a path"


def test_an_exception_is_in_its_line(capsys: Captured) -> None:
    logs.set_up(verbose=False, as_json=True)
    try:
        raise ValueError("the reason")
    except ValueError:
        log.exception("it failed")
    (line,) = lines(capsys.readouterr().err)
    assert "ValueError: the reason" in line["exception"]


def test_python_s_warnings_are_lines_too(capsys: Captured) -> None:
    logs.set_up(verbose=False, as_json=True)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logs.set_up(verbose=False, as_json=True)
        warnings.showwarning("old", DeprecationWarning, "a.py", 1)
    (line,) = lines(capsys.readouterr().err)
    assert (line["level"], "old" in line["message"]) == ("warning", True)


# --- the command line --------------------------------------------------------------------------


def test_an_error_of_a_command_is_a_line_of_json(capsys: Captured, tmp_path: Path) -> None:
    argv = ["--log-format", "json", "records", "show", str(tmp_path / "none")]
    assert run(app, argv) == ExitCode.BAD_FOLDER
    (line,) = lines(capsys.readouterr().err)
    assert line["level"] == "error"
    assert "is not a run folder" in line["message"]


def test_the_format_may_come_from_the_environment(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNERD_LOG_FORMAT", "json")
    assert run(app, ["records", "show", str(tmp_path)]) == ExitCode.BAD_FOLDER
    assert lines(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("argv", "shown"),
    [([], ["an error"]), (["--verbose"], ["an error", "what is done"])],
)
def test_text_holds_errors_and_with_verbose_what_is_done(
    argv: list[str], shown: list[str], capsys: Captured, tmp_path: Path
) -> None:
    run(app, [*argv, "records", "show", str(tmp_path)])
    capsys.readouterr()
    log.error("an error")
    log.info("what is done")
    logging.getLogger("another").info("another's")
    said = capsys.readouterr().err.splitlines()
    assert [s.rpartition("ERROR ")[2].rpartition("INFO ")[2] for s in said] == shown


def test_progress_is_logged_where_stderr_is_json(capsys: Captured) -> None:
    logs.set_up(verbose=False, as_json=True)
    state = ProgressState(1.0, None, 3, 0, None, 1, 2, 1, 2, (), "tuning", "")
    with open_progress(quiet=True) as progress:
        assert isinstance(progress, LoggedProgress)
        progress.update(state)
    (line,) = lines(capsys.readouterr().err)
    assert line["message"].startswith("tuning 1 s, 3 trials")


def test_the_library_configures_no_logging() -> None:
    package = Path(logs.__file__).parents[1]
    users = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if "addHandler" in path.read_text() or "logs.set_up" in path.read_text()
    }
    # The API gives the library a NullHandler, as the logging HOWTO asks of libraries; the
    # program of a recipe's run sets up what the command line does.
    assert users == {"api/__init__.py", "system/logs.py", "cli/app.py", "cli/child.py"}


# --- the run folder ----------------------------------------------------------------------------


def test_a_run_keeps_its_lines_and_those_of_its_start(tmp_path: Path) -> None:
    logs.set_up(verbose=False, as_json=False)
    log.info("before")
    with logs.run_logged("runs/a", tmp_path):
        log.info("during")
    log.info("after")
    found = [(x["message"], x.get("run")) for x in kept(tmp_path)]
    assert found == [
        ("before", "runs/a"),
        ("the run begins", "runs/a"),
        ("during", "runs/a"),
        ("the run ends", "runs/a"),
    ]


def test_a_run_s_log_says_what_ended_it(tmp_path: Path) -> None:
    logs.set_up(verbose=False, as_json=False)
    with pytest.raises(ValueError, match="the reason"), logs.run_logged("a", tmp_path):
        raise ValueError("the reason")
    assert kept(tmp_path)[-1]["message"] == "the run ends with ValueError: the reason"


def test_two_runs_of_one_process_keep_their_own_lines(tmp_path: Path) -> None:
    logs.set_up(verbose=False, as_json=False)
    for name in ("a", "b", "a"):
        (tmp_path / name).mkdir(exist_ok=True)
        with logs.run_logged(name, tmp_path / name):
            log.info("of %s", name)
    assert [x["message"] for x in kept(tmp_path / "a") if x["message"][:2] == "of"] == ["of a"] * 2
    assert [x["message"] for x in kept(tmp_path / "b") if x["message"][:2] == "of"] == ["of b"]


def test_a_log_is_bounded(tmp_path: Path) -> None:
    handler = logs.RunLogHandler(max_bytes=10_000)
    record: Callable[[int], logging.LogRecord] = lambda i: logging.LogRecord(  # noqa: E731
        "tunerd", logging.INFO, "", 0, "line %d", (i,), None
    )
    with logs.run_logged("a", tmp_path):
        for i in range(2000):
            handler.handle(record(i))
    handler.close()
    files = list(tmp_path.iterdir())
    assert sum(f.stat().st_size for f in files) <= 20_000
    assert kept(tmp_path)[-1]["message"] == "line 1999"


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path: Path, capsys: Captured) -> None:
    logs.set_up(verbose=False, as_json=False)
    with logs.run_logged("a", tmp_path / "nowhere"):
        log.info("a line")
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_a_full_disk_costs_lines_and_nothing_else(tmp_path: Path, capsys: Captured) -> None:
    logs.set_up(verbose=False, as_json=False)
    (tmp_path / logs.LOG_NAME).symlink_to("/dev/full")
    with logs.run_logged("a", tmp_path):
        log.info("a line")
    assert capsys.readouterr().err == ""
