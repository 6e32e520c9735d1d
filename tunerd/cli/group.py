"""Groups of commands: each command is imported when it is asked for, and not before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, ClassVar, Final

import typer
from typer.core import TyperCommand, TyperGroup

MARKUP: Final = "markdown"  # of help; in rich's own, "[default: ...]" is markup and left out


class _PlainHelp:
    """Leaves out `<bool>`, which typer writes behind a flag as behind one that takes a value.

    Arguments are in capitals, also in the usage line: `MODEL`, `[RECIPE]`, `RUN...`.
    """

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
            elif param.param_type_name == "argument" and param.metavar is None:
                param.metavar = str(param.name).upper()
        return params

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        shown = {
            piece: _in_usage(param)
            for param in self.get_params(ctx)
            if param.param_type_name == "argument"
            for piece in param.get_usage_pieces(ctx)
        }
        pieces = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        return [shown.get(piece, piece) for piece in pieces]


def _in_usage(argument: Any) -> str:
    name = str(argument.metavar).removesuffix("...")
    shown = name if argument.required else f"[{name}]"
    return shown if argument.nargs == 1 else f"{shown}..."


class Command(_PlainHelp, TyperCommand):
    pass


class Group(_PlainHelp, TyperGroup):
    pass


class Commands(Mapping[str, Any]):
    """Commands by name, made of modules of this package when they are looked up.

    Args:
        about: for each name what the list of commands says of it.
    """

    def __init__(self, about: Mapping[str, str]) -> None:
        self.about = about
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self.about:
            raise KeyError(name)
        if name not in self._made:
            self._made[name] = _made(name)
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self.about

    def __iter__(self) -> Iterator[str]:
        return iter(self.about)

    def __len__(self) -> int:
        return len(self.about)


def _made(name: str) -> Any:
    from tunerd.cli.options import epilog_of, with_settings

    module = import_module(f"tunerd.cli.{name}")
    if isinstance(getattr(module, "app", None), typer.Typer):  # a group of its own
        group = typer.main.get_command(module.app)
        group.name = name
        return group
    app = typer.Typer(add_completion=False, rich_markup_mode=MARKUP)
    command = getattr(module, name)
    app.command(name, cls=Command, epilog=epilog_of(command))(with_settings(command))
    return typer.main.get_command(app)


class LazyGroup(Group):
    """The program. Its list of commands is said without any of them, and without rich."""

    table: ClassVar[Mapping[str, str]]

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = Commands(self.table)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super(TyperGroup, self).format_help(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(self.table.items()))
