"""Scripts that people start where something that they need is missing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("code", "end", "said"),
    [
        (0, 0, "exit code 0: faster, by the verdict above."),
        (2, 0, "exit code 2: it cannot be told"),
        (16, 16, "exit code 16: stopped on request; scripts/quickstart goes on from there."),
        (13, 13, "exit code 13: failed; see the message above."),
    ],
)
def test_the_quickstart_says_how_its_run_ended(
    code: int, end: int, said: str, tmp_path: Path
) -> None:
    for name, text in (
        ("scripts/quickstart", (ROOT / "scripts" / "quickstart").read_text()),
        ("scripts/dev/setup", f"#!/bin/sh\necho {tmp_path}/bin\n"),
        ("bin/python", "#!/bin/sh\n"),
        ("bin/tunerd", f"#!/bin/sh\nexit {code}\n"),
    ):
        program = tmp_path / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)
    done = subprocess.run([tmp_path / "scripts" / "quickstart"], capture_output=True, text=True)
    assert done.returncode == end
    assert said in done.stdout


def test_an_installation_tells_of_large_files_while_it_goes_on() -> None:
    text = (ROOT / "scripts" / "dev" / "setup").read_text()
    functions = text[text.index("say()") : text.index("# Installs Debian")]
    pip = (
        "Collecting ray\n  Downloading ray.whl.metadata (1.0 MB)\n  Downloading ray.whl (73.1 MB)\n"
        "  Downloading attrs.whl (67 kB)\nInstalling collected packages: attrs, ray\n"
    )
    done = subprocess.run(
        ["/bin/bash", "-c", f"{functions}\ntold"], input=pip, capture_output=True, text=True
    )
    assert done.stdout == ""
    assert done.stderr == "Downloading ray.whl (73.1 MB)\nUnpacking all of them: a minute or so\n"


ABORTING = """
import os

def test_of_a_gpu():
    assert 1 == 2, "the answer of another tenant"

def pytest_runtest_makereport(call):
    if call.excinfo:
        os.abort()
"""


def test_what_failed_on_a_gpu_is_known_where_its_process_aborts(tmp_path: Path) -> None:
    (tmp_path / "test_aborting.py").write_text(ABORTING)
    plugins = ["-p", "tests.gpu.conftest", "-p", "test_aborting", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "-c", "/dev/null", "test_aborting.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGABRT
    begun, failed = done.stderr.index("test_of_a_gpu"), done.stderr.index("fails in its call")
    assert begun < failed < done.stderr.index("AssertionError: the answer of another tenant")


def test_each_file_of_gpu_tests_has_a_process_and_a_failure_is_not_lost(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\necho "$*"\ncase "$*" in *gpu_lanes*) exit 134;; esac; exit 5\n')
    python.chmod(0o755)
    files = {path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")}

    def run(*argv: str) -> tuple[int, list[str]]:
        command = [str(ROOT / "scripts" / "test-gpu"), *argv]
        env = os.environ | {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        return done.returncode, done.stdout.splitlines()

    code, processes = run("-k", "words")
    assert code == 1
    assert len(processes) == len(files) + 1
    assert all(any(name in line for line in processes) for name in files)
    assert processes[-1].endswith("tests --ignore tests/gpu -k words")
    code, processes = run("-x", "tests/gpu/test_gpu_models.py")
    assert (code, len(processes)) == (5, 1)
