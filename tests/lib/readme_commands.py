"""What the READMEs say, and the commands that they show, in their order."""

from __future__ import annotations

import re
import shlex
from typing import Any

from tests.lib import ROOT

DOCUMENTS = (
    ROOT / "README.md",
    *sorted((ROOT / "tunerd").rglob("README.md")),
    ROOT / "recipes" / "README.md",
    *sorted((ROOT / ".github").glob("*.md")),
)
README = "\n".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)  # of all of them


def shown_commands() -> list[list[str]]:
    """Return every `tunerd ...` line of the READMEs' shell blocks, and those within its text.

    Less the word `tunerd` itself, and less where the output goes.
    """
    inline = map(shlex.split, re.findall(r"`(tunerd [^`]+)`", README))
    return [*in_blocks(), *(argv[1:] for argv in inline)]


def in_blocks() -> list[list[str]]:
    """Return the different commands of the shell blocks."""
    blocks = re.findall(r"^```sh\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines = [line.rpartition(" -- ")[2].strip() for line in lines]  # what a Ray job runs
    argvs = [tuple(shlex.split(line.split(" > ")[0], comments=True)) for line in lines]
    return [list(argv[1:]) for argv in dict.fromkeys(argvs) if argv[:1] == ("tunerd",)]


def parsed(command: Any, argv: list[str], parent: Any = None) -> Any:
    """Parse a command line as the program would, without carrying it out."""
    with command.make_context(argv[0], list(argv[1:]), parent=parent) as context:
        if not hasattr(command, "commands"):
            return context
        name, inner, rest = command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        return parsed(inner, [name, *rest], context)
