"""Whatever is raised ends as one sentence on stderr and one exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Annotated

import pytest
import typer

from tunerd.cli.errors import READER_GONE, reported, run
from tunerd.errors import (
    DeviceError,
    ExitCode,
    FolderError,
    HostError,
    InfrastructureError,
    InputError,
    Interrupted,
    ModelError,
    TunerdError,
    WrongResultError,
)

Captured = pytest.CaptureFixture[str]


def ended(error: BaseException, *, debug: bool = False, as_json: bool = False) -> int:
    """Raise `error` where it is reported and return the exit code."""
    with pytest.raises(SystemExit) as end, reported(debug=debug, as_json=as_json):
        raise error
    assert isinstance(end.value.code, int)
    return end.value.code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("x"), ExitCode.BAD_INPUT),
        (ModelError("x"), ExitCode.BAD_MODEL),
        (FolderError("x"), ExitCode.BAD_FOLDER),
        (HostError("x"), ExitCode.HOST_NOT_CAPABLE),
        (WrongResultError("x"), ExitCode.WRONG_RESULT),
        (InfrastructureError("x"), ExitCode.INFRASTRUCTURE),
        (DeviceError("x"), ExitCode.FAULTY_DEVICE),
        (Interrupted("x"), ExitCode.INTERRUPTED),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED),
        (ZeroDivisionError("x"), ExitCode.BUG),
    ],
)
def test_each_class_of_errors_has_its_exit_code(error: BaseException, code: ExitCode) -> None:
    assert ended(error) == code


def test_an_error_for_people_is_one_sentence(capsys: Captured) -> None:
    ended(ModelError("no file 'a.onnx';\n  give an ONNX file"))
    assert capsys.readouterr() == ("", "tunerd: no file 'a.onnx'; give an ONNX file\n")


def test_notes_of_an_error_end_its_sentence(capsys: Captured) -> None:
    error = InputError("a share of 0")
    error.add_note("the logs are in runs/a")
    ended(error)
    assert capsys.readouterr().err == "tunerd: a share of 0; the logs are in runs/a\n"


def test_an_error_without_words_is_not_silent(capsys: Captured) -> None:
    ended(HostError())
    assert capsys.readouterr().err == "tunerd: HostError\n"


def test_names_from_files_cannot_command_the_terminal(capsys: Captured) -> None:
    ended(ModelError("operator '\x1b]0;owned\x07' is not supported"))
    assert "\x1b" not in capsys.readouterr().err


def test_an_interruption_says_how_to_go_on(capsys: Captured) -> None:
    ended(KeyboardInterrupt())
    assert capsys.readouterr().err == (
        "tunerd: interrupted; the same command goes on from what it has stored, or begins anew\n"
    )


def test_anything_else_is_a_bug_in_tunerd(capsys: Captured) -> None:
    assert ended(KeyError("weight")) == 70
    assert capsys.readouterr().err == (
        "tunerd: this is a bug in tunerd: KeyError: 'weight'; "
        "run it with --debug for the traceback\n"
    )


@pytest.mark.parametrize("error", [KeyError("weight"), InputError("a share of 0")])
def test_the_traceback_is_there_on_request(capsys: Captured, error: Exception) -> None:
    ended(error)
    assert "Traceback" not in capsys.readouterr().err
    ended(error, debug=True)
    assert "Traceback" in capsys.readouterr().err


def test_json_has_the_error_as_its_one_document(capsys: Captured) -> None:
    ended(HostError("no GPU; use --cpu-pct"), as_json=True)
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {
        "error": {
            "kind": "host-not-capable",
            "message": "no GPU; use --cpu-pct",
            "exit_code": 13,
        }
    }
    assert captured.err == "tunerd: no GPU; use --cpu-pct\n"


def test_an_exit_code_of_a_command_goes_through(capsys: Captured) -> None:
    assert ended(SystemExit(2)) == 2
    assert ended(typer.Exit(1)) == 1
    assert capsys.readouterr() == ("", "")


def test_nothing_is_said_where_nothing_fails(capsys: Captured) -> None:
    with reported():
        pass
    assert capsys.readouterr() == ("", "")


# --- the command line --------------------------------------------------------------------------


def small_app() -> typer.Typer:
    app = typer.Typer(add_completion=False)

    @app.command()
    def tune(gpu_pct: Annotated[int, typer.Option(min=1, max=100)], debug: bool = False) -> int:
        if gpu_pct == 13:
            raise KeyboardInterrupt
        if gpu_pct == 14:
            raise TunerdError("fourteen")
        return gpu_pct

    @app.command()
    def doctor() -> None:
        raise EOFError("closed")

    return app


def test_a_command_returns_its_exit_code() -> None:
    assert run(small_app(), ["tune", "--gpu-pct", "2"]) == 2


def test_help_is_no_error(capsys: Captured) -> None:
    assert run(small_app(), ["--help"]) == 0
    assert "tune" in capsys.readouterr().out


@pytest.mark.parametrize("share", ["0", "101", "33.3", "forty"])
def test_a_bad_share_is_bad_input_and_never_cannot_tell(share: str, capsys: Captured) -> None:
    assert run(small_app(), ["tune", "--gpu-pct", share]) == ExitCode.BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert "'--gpu-pct'" in line
    assert "`tunerd tune --help`" in line


@pytest.mark.parametrize("argv", [[], ["tunes"], ["tune"], ["tune", "--gpu-pct"], ["--colour"]])
def test_a_bad_command_line_is_one_sentence(argv: list[str], capsys: Captured) -> None:
    assert run(small_app(), argv) == ExitCode.BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tunerd: ")


def test_a_command_line_that_wants_json_gets_its_errors_in_json(capsys: Captured) -> None:
    assert run(small_app(), ["tune", "--json"]) == ExitCode.BAD_INPUT
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "bad-input"


def test_ctrl_c_in_a_command_is_an_interruption() -> None:
    assert run(small_app(), ["tune", "--gpu-pct", "13"]) == ExitCode.INTERRUPTED


def test_debug_anywhere_on_the_command_line_shows_the_traceback(capsys: Captured) -> None:
    run(small_app(), ["tune", "--gpu-pct", "14", "--debug"])
    assert "Traceback" in capsys.readouterr().err


def test_the_end_of_an_input_is_no_interruption() -> None:
    assert run(small_app(), ["doctor"]) == ExitCode.BUG


# --- pipes -------------------------------------------------------------------------------------


def ended_in_a_process(body: str, *, stdout: int) -> tuple[int, str]:
    """Run `body` in a process with this stdout; return its code and what it wrote to stderr."""
    program = f"""
from tunerd.cli.errors import reported
from tunerd.errors import InputError
with reported(as_json=True):
    {body}
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": ""},
    )
    return done.returncode, done.stderr


def piped(body: str, *, reader: bool) -> tuple[int, str]:
    """Run `body` in a process whose stdout is a pipe, with or without a reader; code and stderr."""
    read, write = os.pipe()
    if not reader:
        os.close(read)
    ended = ended_in_a_process(body, stdout=write)
    os.close(write)
    if reader:
        os.close(read)
    return ended


@pytest.mark.parametrize("body", ["print('row')", "[print('row' * 99) for _ in range(9999)]"])
def test_a_reader_that_has_seen_enough_is_no_error(body: str) -> None:
    assert piped(body, reader=False) == (READER_GONE, "")


def test_a_pipe_that_broke_elsewhere_is_not_hidden() -> None:
    code, said = piped("raise BrokenPipeError('a runner is gone')", reader=True)
    assert code == ExitCode.BUG
    assert "a runner is gone" in said


def test_an_error_keeps_its_code_when_nobody_reads() -> None:
    code, said = piped("print('row'); raise InputError('a share of 0')", reader=False)
    assert (code, said) == (ExitCode.BAD_INPUT, "tunerd: a share of 0\n")


@pytest.mark.parametrize(
    "argv", [["--version"], ["--help"], ["run", "--schema"], ["status", "no-such-folder", "--json"]]
)
def test_a_full_disk_behind_stdout_is_a_disk_error_and_a_reader_that_left_is_none(
    argv: list[str],
) -> None:
    command = [sys.executable, "-m", "tunerd", *argv]
    fails = argv[0] == "status"
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == (ExitCode.BAD_FOLDER if fails else ExitCode.DISK_FULL)
    (line,) = done.stderr.splitlines()
    assert line.startswith("tunerd: ")
    assert fails or "stdout or a file cannot be written: No space left on device" in line
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == (ExitCode.BAD_FOLDER if fails else READER_GONE)
    assert len(done.stderr.splitlines()) == fails


@pytest.mark.parametrize("body", ["print('row')", "[print('row' * 99) for _ in range(9999)]"])
def test_what_does_not_fit_on_the_disk_behind_stdout_is_a_disk_error(body: str) -> None:
    with open("/dev/full", "w") as full:
        code, said = ended_in_a_process(body, stdout=full.fileno())
    assert code == ExitCode.DISK_FULL
    (line,) = said.splitlines()
    assert line.startswith("tunerd: stdout or a file cannot be written: No space left on device")


def test_a_disk_that_is_full_elsewhere_is_named() -> None:
    error = "raise OSError(28, 'No space left on device', '/data/x')"
    code, said = ended_in_a_process(error, stdout=subprocess.DEVNULL)
    assert code == ExitCode.DISK_FULL
    assert said.startswith("tunerd: /data/x cannot be written: No space left on device")
