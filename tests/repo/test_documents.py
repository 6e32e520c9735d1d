"""What the READMEs promise: commands, flags, exit codes and links."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.lib import ROOT, models
from tests.lib.readme_commands import DOCUMENTS, README, parsed, shown_commands
from tests.lib.repository import PACKAGE, links_of
from tunerd.cli.app import app
from tunerd.errors import ExitCode

# Flags of other programs that the README shows.
FOREIGN_FLAGS = {
    "--compile-bytecode",
    "--for",
    "--keep",
    "--head",
    "--metrics-export-port",
    "--no-deps",
    "--nightly",
    "--quick",
    "--runtime-env-json",
    "--unit",
    "--working-dir",
}


@pytest.mark.parametrize("argv", shown_commands(), ids=" ".join)
def test_a_command_in_the_readme_is_one_that_the_program_takes(argv: list[str]) -> None:
    argv = [arg for arg in argv if arg != "..."]
    command = typer.main.get_command(app)
    named = ("tune", "bench", "profile", "compare", "records", "status")
    if argv[-1] in named or argv[:2] == ["--verbose", "tune"]:
        assert argv[-1] in command.commands  # named in a sentence, without its arguments
    else:
        parsed(command, ["tunerd", *argv])


def test_the_readme_shows_each_command() -> None:
    shown = {argv[0] for argv in shown_commands()}
    wanted = {"tune", "bench", "status", "compare", "pack", "report", "doctor", "records", "run"}
    assert wanted | {"matrix", "preflight", "profile"} <= shown


def options_of(command: Any) -> set[str]:
    given = [flag for p in command.params for flag in (*p.opts, *p.secondary_opts)]
    own = {flag for flag in given if flag.startswith("--")}
    inner = getattr(command, "commands", {}).values()
    return own.union(*(options_of(each) for each in inner))


def test_the_readme_names_every_flag_of_tune_and_none_that_is_unknown() -> None:
    command = typer.main.get_command(app)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", README))
    assert named - options_of(command) - FOREIGN_FLAGS - {"--help"} == set()
    assert options_of(command.commands["tune"]) - named == set()


def test_the_list_of_all_commands_is_what_they_say_of_themselves() -> None:
    """`scripts/dev/command_reference` makes it so."""
    text = (PACKAGE / "cli" / "README.md").read_text()
    assert text == models.script("dev/command_reference").written(text)


def test_the_readme_lists_every_exit_code() -> None:
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", README, re.MULTILINE)}
    assert listed == {int(code) for code in ExitCode}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_readme_links_to_is_there(path: Path) -> None:
    for link in re.findall(r"\]\((?!https?://)([^)]+)\)", path.read_text()):
        name, _, anchor = link.partition("#")
        to = (path.parent / name).resolve() if name else path
        assert to.exists(), link
        if anchor:
            to = to / "README.md" if to.is_dir() else to
            headings = re.findall(r"^#+ (.*)$", to.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in slugs, link


def test_the_first_page_is_short_and_leads_to_all_others() -> None:
    first = DOCUMENTS[0].read_text()
    assert len(first.splitlines()) <= 250
    led_to = {(ROOT / link).resolve() for link in links_of(first)}
    assert {p for p in DOCUMENTS[1:] if p not in led_to and p.parent not in led_to} == set()


def test_scripts_that_the_readme_names_exist() -> None:
    names = set(re.findall(r"\b(?:scripts|recipes)/[\w./-]+\w", README))
    assert names
    for name in names:
        assert (ROOT / name).exists(), name
