"""Scripts that people start where something that they need is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.lib import ROOT
from tunerd.errors import ExitCode


def night(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run recipes/nightly.sh where there are the system's programs, and no tunerd."""
    command = ["/bin/bash", str(ROOT / "recipes" / "nightly.sh"), *argv]
    system = os.environ | {"PATH": "/usr/bin:/bin"}
    return subprocess.run(command, cwd=folder, env=system, capture_output=True, text=True)


def test_a_night_without_a_recipe_says_how_it_is_called(tmp_path: Path) -> None:
    done = night(tmp_path)
    assert done.returncode == ExitCode.BAD_INPUT
    assert done.stderr == "usage: recipes/nightly.sh RECIPE [FLAG OF tunerd run]...\n"


def test_a_night_without_tunerd_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    done = night(tmp_path, "recipe.yaml")
    assert done.returncode == ExitCode.HOST_NOT_CAPABLE
    (line,) = done.stderr.splitlines()
    assert "tunerd is not on the PATH" in line
    assert list(tmp_path.iterdir()) == []


def test_models_are_not_made_without_onnx_and_one_sentence_says_how_to_get_it() -> None:
    bare = [sys.executable, "-S", ROOT / "scripts" / "make-models"]  # without installed packages
    done = subprocess.run(bare, env={}, capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "run scripts/dev/setup" in line
