"""Parameters of commands: options that they share, and those that settings make."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pydantic import BaseModel, SecretStr

    from tunerd.settings.option import Key

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


def hidden_password() -> SecretStr | None:
    """Return the password of the team's store that --store came with, which nobody else sees.

    Runs this program again where it is in the command line. Raises InputError where it has been
    shown already.
    """
    import os

    from tunerd.errors import InputError
    from tunerd.system.store_address import hide_password, password_from

    try:
        hide_password()
    except ValueError as error:
        raise InputError(f"--store cannot be used: {error}") from None
    os.environ.pop("TUNERD_STORE", None)  # processes would have it, and its password
    return password_from(os.environ)


def with_settings(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command whose parameters are the keys of the settings that it takes, and its own.

    The settings are its first parameter, and a pydantic model; a command without any stays.
    """
    from tunerd.settings.option import checked, keys_of

    model = _settings_of(command)
    if model is None:
        return command
    own = list(inspect.signature(command, eval_str=True).parameters.values())
    keys = keys_of(model)

    def filled(**given: Any) -> Any:
        values = {key.field: given.pop(key.field) for key in keys}
        settings = checked(
            model,
            {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in values.items()
                if value is not None
            },
        )
        return command(settings, **given)

    parameters = [*map(_parameter, keys), *own[1:]]
    filled.__name__, filled.__doc__ = command.__name__, command.__doc__
    filled.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    )
    filled.__annotations__ = {p.name: p.annotation for p in parameters}
    return filled


def epilog_of(command: Callable[..., Any]) -> str | None:
    """Return what the end of a command's help says, None where that is nothing."""
    from tunerd.settings.option import keys_of

    model = _settings_of(command)
    said = [key.option.research for key in keys_of(model)] if model else []
    return "\n\n".join(f"Research: {text}" for text in said if text) or None


def _settings_of(command: Callable[..., Any]) -> type[BaseModel] | None:
    """Return the type of a command's first parameter where that is settings."""
    from pydantic import BaseModel

    parameters = inspect.signature(command, eval_str=True).parameters.values()
    first = next((p.annotation for p in parameters), None)
    return first if isinstance(first, type) and issubclass(first, BaseModel) else None


def _parameter(key: Key) -> inspect.Parameter:
    default = inspect.Parameter.empty if key.is_required else key.default
    kind = str if key.option.parser else key.takes
    if key.option.is_repeatable:
        kind = list[kind]  # type: ignore[valid-type]
    if default is None:
        kind = kind | None
    return inspect.Parameter(
        key.field,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, _info(key)],
    )


def _info(key: Key) -> Any:
    from tunerd.settings.texts import MAX_COUNT, MAX_SECS

    option = key.option
    shared: dict[str, Any] = {"help": option.help, "metavar": option.metavar}
    if option.is_argument:
        return typer.Argument(show_default=False, **shared)
    limits = {}
    for constraint in key.constraints:
        for name, word in (("ge", "min"), ("le", "max")):
            limit = getattr(constraint, name, None)
            if limit is not None and limit not in (MAX_COUNT, MAX_SECS):  # which are no news
                limits[word] = limit
    return typer.Option(
        key.flag,
        envvar=option.variable,
        parser=_parser(option.parser) if option.parser else None,
        rich_help_panel=option.panel,
        show_default=not key.is_required,
        **limits,
        **shared,
    )


def _parser(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parsed
