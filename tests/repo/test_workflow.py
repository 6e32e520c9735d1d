"""The GitHub Actions workflow: its syntax, its rights, and each tunerd command in it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from typing import Any

import pytest
import typer
import yaml

from tests.lib import ROOT
from tests.lib.readme_commands import parsed
from tunerd.cli.app import app
from tunerd.errors import ExitCode

PATH = ROOT / "recipes" / "github-actions-nightly.yml"
SCRIPT = ROOT / "recipes" / "nightly.sh"
# YAML 1.1 reads the key `on` as true.
WORKFLOW: dict[Any, Any] = yaml.safe_load(PATH.read_text())
STEPS = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]


def commands() -> list[list[str]]:
    """Return the arguments of each `tunerd` in the workflow and in the script that it runs."""
    texts = [step.get("run", "") for step in STEPS] + [SCRIPT.read_text()]
    lines = [line for text in texts for line in text.replace("\\\n", " ").splitlines()]
    found = []
    for line in lines:
        if match := re.match(r"\s*(tunerd .*?)(?: *>| \|\||$)", line):
            argv = shlex.split(match[1])[1:]
            found.append([word for word in argv if word != "$@"])
    return found


def test_the_workflow_fits_the_schema_of_workflows() -> None:
    """That of SchemaStore, which check-jsonschema carries."""
    checker = [sys.executable, "-m", "check_jsonschema"]
    done = subprocess.run(
        [*checker, "--builtin-schema", "vendor.github-workflows", str(PATH)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_commands_are_found() -> None:
    assert {argv[0] for argv in commands()} == {"preflight", "run", "report"}


@pytest.mark.parametrize("argv", commands(), ids=" ".join)
def test_a_command_of_the_workflow_is_one_that_the_program_takes(argv: list[str]) -> None:
    parsed(typer.main.get_command(app), ["tunerd", *argv])


def test_the_scripts_and_recipes_of_the_workflow_exist() -> None:
    text = PATH.read_text()
    names = set(re.findall(r"\b(?:scripts|recipes)/[\w./-]+\w", text))
    assert {"recipes/nightly.sh", "recipes/nightly.yaml", "scripts/dev/setup"} <= names
    for name in names:
        assert (ROOT / name).exists(), name


def test_shell_is_valid() -> None:
    for text in (step["run"] for step in STEPS if "run" in step):
        plain = re.sub(r"\$\{\{.*?\}\}", "x", text)
        done = subprocess.run(["bash", "-n"], input=plain, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr


def test_actions_are_pinned_by_version() -> None:
    used = [step["uses"] for step in STEPS if "uses" in step]
    assert used
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+\.\d+\.\d+", name) for name in used)


def test_the_job_on_the_own_machine_may_read_and_no_more() -> None:
    assert WORKFLOW["permissions"] == {}
    jobs = WORKFLOW["jobs"]
    assert jobs["tune"]["permissions"] == {"contents": "read"}
    assert "self-hosted" not in jobs["comment"]["runs-on"]
    assert set(WORKFLOW[True]) == {"schedule", "workflow_dispatch"}  # no pull requests of others


def test_the_comment_is_for_a_regression() -> None:
    assert (
        f"needs.tune.outputs.code == '{ExitCode.REGRESSION}'" in WORKFLOW["jobs"]["comment"]["if"]
    )
    told = PATH.read_text().split("name: nightly")[0]
    for code in (ExitCode.REGRESSION, ExitCode.NOT_COMPARABLE, ExitCode.NOT_QUIET):
        assert re.search(rf"\b{int(code)} ", told), code
