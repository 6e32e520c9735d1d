"""The one place that turns exceptions into a sentence on stderr and an exit code.

Notes of an exception, as where logs are kept, end the sentence.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import typer

from tunerd.errors import ExitCode, TunerdError
from tunerd.system.text import one_line

# What a shell reports for a program that SIGPIPE ended: 128 + 13. Python ignores the signal.
READER_GONE = 141
_MAX_CHARS = 2000
_INTERRUPTED = "interrupted; the same command goes on from what it has stored, or begins anew"


def run(app: typer.Typer, argv: Sequence[str]) -> int:
    """Run the command line `argv`, without the program's name, and return its exit code.

    Typer's own entry point is passed by: it turns Ctrl-C into 130, a closed pipe into 1 and a bad
    flag into 2, which here mean other things. A command returns its exit code, or None for 0.
    """
    command = typer.main.get_command(app)
    if "_TUNERD_COMPLETE" in os.environ:  # a shell asks for completions
        command.main(args=list(argv), prog_name="tunerd")
    result: object = None
    try:
        with (
            reported(debug="--debug" in argv, as_json="--json" in argv),
            command.make_context("tunerd", list(argv)) as context,
        ):
            result = command.invoke(context)
    except SystemExit as end:
        result = end.code
    return int(result) if isinstance(result, int) else int(ExitCode.BUG if result else 0)


@contextmanager
def reported(*, debug: bool = False, as_json: bool = False) -> Iterator[None]:
    """Report what the body raises, and raise SystemExit with its code instead.

    With `debug`, tracebacks as well. With `as_json`, stdout gets
    `{"error": {"kind", "message", "exit_code"}}`, which is then its one document.
    """
    end: SystemExit | None = None
    try:
        try:
            yield
        except typer.Exit as asked:
            end = SystemExit(asked.exit_code)
        except SystemExit as asked:
            # rich makes 1 of a pipe that nobody reads.
            is_unread = isinstance(asked.__context__, BrokenPipeError)
            end = SystemExit(READER_GONE) if is_unread else asked
        # A closed pipe or a full disk shows here, and not in the interpreter's last moments.
        sys.stdout.flush()
    except BaseException as error:
        from tunerd.system.pipes import discard_output, reader_is_gone

        if isinstance(error, BrokenPipeError) and reader_is_gone(sys.stdout):
            discard_output(sys.stdout)
            raise SystemExit(READER_GONE) from None
        if isinstance(error, GeneratorExit):
            raise
        code, message = _described(error, debug)
        message = "; ".join([message, *getattr(error, "__notes__", ())])
        if debug:
            with suppress(OSError):
                traceback.print_exception(error, file=sys.stderr)
        _say(code, message, as_json)
        raise SystemExit(int(code)) from None
    if end is not None:
        raise end


def _described(error: BaseException, debug: bool) -> tuple[ExitCode, str]:
    from tunerd.system.files import ERRNOS, disk_error

    if isinstance(error, TunerdError):
        return error.exit_code, str(error) or type(error).__name__
    if isinstance(error, OSError) and error.errno in ERRNOS:
        # What is printed has no file's name, nor need a file that is written have one.
        return ExitCode.DISK_FULL, str(disk_error(Path("stdout or a file"), error))
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return ExitCode.INTERRUPTED, _INTERRUPTED
    usage = _usage(error)
    if usage is not None:
        return ExitCode.BAD_INPUT, usage
    last = traceback.format_exception_only(error)[-1]
    hint = "the traceback is above" if debug else "run it with --debug for the traceback"
    return ExitCode.BUG, f"this is a bug in tunerd: {one_line(last).rstrip('.')}; {hint}"


def _usage(error: BaseException) -> str | None:
    """Return the sentence of a bad flag or argument, None for any other exception.

    Recent releases of typer carry a private copy of click, older ones import click: the class
    has no name that works for both, its method has.
    """
    describe: Any = getattr(error, "format_message", None)
    if describe is None:
        return None
    from pydantic import ValidationError

    from tunerd.settings.problems import said_of

    if isinstance(error.__cause__, ValidationError):  # which typer quotes as pydantic says it
        error.message = said_of(error.__cause__.errors()[0])  # type: ignore[attr-defined]
    context: Any = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "tunerd"
    if type(error).__name__ == "NoArgsIsHelpError":
        return f"a command is missing; `{path} --help` lists them"
    return f"{str(describe()).rstrip('.')}; `{path} --help` lists what is allowed"


def _say(code: ExitCode, message: str, as_json: bool) -> None:
    from tunerd.system import logs
    from tunerd.system.pipes import discard_output

    sentence = _shortened(one_line(message))
    with suppress(OSError):
        if logs.is_json():
            logging.getLogger("tunerd").error("%s", sentence)
        else:
            print(f"tunerd: {sentence}", file=sys.stderr, flush=True)
    kind = code.name.lower().replace("_", "-")
    document = {"error": {"kind": kind, "message": sentence, "exit_code": int(code)}}
    try:
        if as_json:
            print(json.dumps(document, ensure_ascii=False))
        sys.stdout.flush()
    except OSError:
        discard_output(sys.stdout)


def _shortened(sentence: str) -> str:
    """Cut out the middle of what is too long to be read: names in files may be of any length."""
    if len(sentence) <= _MAX_CHARS:
        return sentence
    half = _MAX_CHARS // 2
    return f"{sentence[:half]} ... {sentence[-half:]}"
