"""What lies where, what can be run, and what the linter reads."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.lib import ROOT
from tests.lib.repository import text_of, tracked

TOP_LEVEL = {
    "LICENSE",
    "README.md",
    "pyproject.toml",
    "recipes",
    "results",
    "scripts",
    "tests",
    "tunerd",
}


def test_the_top_level_holds_what_it_should() -> None:
    top = {path.relative_to(ROOT).parts[0] for path in tracked()}
    assert {name for name in top if not name.startswith(".")} <= TOP_LEVEL


def test_a_clone_without_history_is_small() -> None:
    assert sum(path.stat().st_size for path in tracked()) < 15e6


@pytest.mark.parametrize("folder", ["models", "runs", "profiles", "nightly"])
def test_what_commands_leave_in_a_checkout_is_not_versioned(folder: str) -> None:
    tracked()  # skips where this is no checkout
    command = ["git", "-C", str(ROOT), "check-ignore", "--quiet", f"{folder}/anything"]
    assert subprocess.run(command).returncode == 0


def test_scripts_can_be_run() -> None:
    recipes = (p for p in (ROOT / "recipes").iterdir() if p.suffix in ("", ".sh"))
    scripts = [path for path in tracked() if path.is_relative_to(ROOT / "scripts")]
    plain = [path for path in scripts if not path.suffix]
    modules = [path for path in scripts if text_of(path).startswith("#!") and path.suffix]
    for path in (ROOT / ".ci" / "run", *filter(Path.is_file, recipes), *plain, *modules):
        assert path.read_text().startswith("#!/usr/bin/env "), path.name
        assert os.access(path, os.X_OK), path.name
    top = {path.name for path in plain if path.parent.name == "scripts"}
    assert top == {"make-models", "quickstart", "reproduce", "test", "test-gpu"}


def test_the_linter_reads_every_python_script() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["extend-include"]
    scripts = [path for path in tracked() if path.is_relative_to(ROOT / "scripts")]
    plain = [path for path in scripts if not path.suffix]
    python = {path for path in plain if "python3" in path.read_text().split("\n")[0]}
    assert {str(path.relative_to(ROOT)) for path in python} == set(extra)


def test_the_linter_sorts_imports_alike_whatever_folders_runs_have_left(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    ignored = shutil.ignore_patterns("data", "__pycache__")
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=ignored)
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select", "I", "."]
    for folder in ("models", "runs", "profiles", "nightly"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "resnet50.onnx").touch()
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_scripts_import_what_there_is() -> None:
    # They are not type-checked as the package is, and some import late.
    scripts = [path for path in tracked() if path.is_relative_to(ROOT / "scripts")]
    python = [p for p in scripts if p.suffix == ".py" or "python3" in text_of(p).split("\n")[0]]
    imports = {
        (node.module, name.name, script)
        for script in python
        for node in ast.walk(ast.parse(script.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("tunerd", "lab."))
        for name in node.names
    }
    assert len(imports) > 100
    missing = [
        (script, module, name)
        for module, name, script in imports
        if not hasattr(importlib.import_module(module), name)
        and importlib.util.find_spec(f"{module}.{name}") is None
    ]
    assert missing == []


def test_files_speak_of_the_project_alone() -> None:
    # Put together here, so that this file holds none of them.
    foreign = ("/".join(("", "work", "")), "/".join(("", "tmp", "bash_jobs")), "design" + ".md")
    foreign += ("facts" + ".md", "." + "library/", "gpu" + "_bundle", "sub" + "agent")
    for path in tracked():
        content = text_of(path)
        found = [word for word in foreign if word in content]
        assert not found, f"{path.relative_to(ROOT)} holds {found}"


def test_nothing_is_left_unfinished() -> None:
    marks = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")) + r")\b")
    for path in tracked():
        assert not marks.search(text_of(path)), path.relative_to(ROOT)
