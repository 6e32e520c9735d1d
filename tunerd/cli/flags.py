"""The commands of the program as recipes see them: their flags, read from their parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

import typer

from tunerd.errors import InputError

if TYPE_CHECKING:
    from tunerd.settings import TuneSettings
    from tunerd.studies.recipes import Command, Commands, Key

_KINDS = {bool: "boolean", int: "integer", float: "number", Path: "path"}


def recipe_commands(app: typer.Typer, main: str = "tune") -> Commands:
    """Return the commands that a recipe speaks of: `main` makes its runs.

    Flags that `tunerd run` has itself, such as --json, are said there and are no keys.
    """
    from tunerd.cli.compare import fraction_of
    from tunerd.cli.preflight import wait_secs_of
    from tunerd.studies.recipes import Commands

    program = typer.main.get_command(app)
    own = {param.name for param in _commands(program)["run"].params}
    return Commands(
        tune=_command(program, main, own, check=_CHECKS.get(main, lambda *_: None)),
        preflight=_command(program, "preflight", own, check=lambda _, given: wait_secs_of(given)),
        # A recipe's gate is read by `tunerd run`, so its form is no matter of the recipe.
        gate=_command(
            program,
            "compare",
            own | {"format"},
            check=lambda _, given: fraction_of(given["fail_above"]),
        ),
    )


def tune_settings(app: typer.Typer, argv: Sequence[str]) -> TuneSettings:
    """Return the settings of a run's command line, which was checked before."""
    from tunerd.cli.tune import settings_of

    command = _commands(typer.main.get_command(app))["tune"]
    with command.make_context("tune", list(argv[1:])) as context:
        return settings_of(context.params)


def _without_password(argv: Sequence[str], given: dict[str, Any]) -> None:
    """Refuse what `tunerd tune` would, and a password: command lines are seen by everybody."""
    from tunerd.cli.tune import settings_of

    settings = settings_of(given)
    if "--store" in argv and settings.store_password is not None:
        raise InputError(
            "--store: it holds a password, which a recipe must not; leave it out, and set "
            "PGPASSWORD or ~/.pgpass where the recipe runs"
        )


def _shares(argv: Sequence[str], given: dict[str, Any]) -> None:
    from tunerd.cli.matrix import shares_of

    shares_of(given["shares"])


def _profile_values(argv: Sequence[str], given: dict[str, Any]) -> None:
    from tunerd.cli.profile import values_of

    values_of(given)


# What a command would refuse before it looks at any file.
_CHECKS = {"tune": _without_password, "matrix": _shares, "profile": _profile_values}


def _commands(program: Any) -> dict[str, Any]:
    return dict(program.commands)


def _command(
    program: Any,
    name: str,
    own: set[str],
    *,
    check: Callable[[Sequence[str], dict[str, Any]], object],
) -> Command:
    from tunerd.studies.recipes import Command

    command = _commands(program)[name]
    # The callback has typer's annotations; `params` has the flags' names, in any release of typer.
    hints = get_type_hints(inspect.unwrap(command.callback), include_extras=True)
    keys = tuple(_key(p, hints[p.name]) for p in command.params if p.name not in own)

    def parse(argv: Sequence[str]) -> None:
        try:
            with command.make_context(name, list(argv[1:])) as context:
                check(argv, context.params)
        except InputError:
            raise
        except Exception as error:
            describe = getattr(error, "format_message", None)  # see cli/errors.py
            if describe is None:
                raise
            raise InputError(str(describe()).rstrip(".")) from None

    return Command(name, keys, parse)


def _key(param: Any, hint: Any) -> Key:
    from tunerd.cli.tune import AUTO, share_of
    from tunerd.studies.recipes import Key

    annotation, info = get_args(hint)[0], get_args(hint)[-1]
    is_list = False
    for kind in get_args(annotation) or (annotation,):
        if kind is not NoneType:
            is_list = get_origin(kind) is list or get_origin(annotation) is list
            annotation = get_args(kind)[0] if get_origin(kind) is list else kind
    is_argument = param.param_type_name == "argument"
    flag = "" if is_argument else next(o for o in param.opts if o.startswith("--"))
    is_enum = isinstance(annotation, type) and issubclass(annotation, Enum)
    return Key(
        name=flag.removeprefix("--") or param.name,
        flag=flag,
        # What a command takes without a flag is a file or a folder.
        kind="path" if is_argument else _KINDS.get(annotation, "text"),  # type: ignore[arg-type]
        help=info.help or "",
        is_repeatable=is_list,
        minimum=info.min,
        maximum=info.max,
        words_too=(AUTO,) if info.parser is share_of else (),
        choices=tuple(str(member.value) for member in annotation) if is_enum else (),
    )
