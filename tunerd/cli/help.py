"""Commands whose help shows flags without a value as what they are."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


class _PlainFlags:
    """Leaves out `<bool>`, which typer writes behind a flag as behind one that takes a value."""

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(_PlainFlags, TyperCommand):
    pass


class Group(_PlainFlags, TyperGroup):
    pass
