"""The wheel and the source distribution: what is in them, and that they run elsewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import onnx
import pytest
from packaging.specifiers import SpecifierSet
from typer.testing import CliRunner

from tests.lib import ROOT
from tests.lib.models import conv_net
from tunerd.cli.app import app

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WIDE = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
MAX_BYTES = 3 << 20  # of either: neither has the results


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source distribution of this checkout, and a wheel that is made of it alone."""
    folder = tmp_path_factory.mktemp("dist")
    checkout = folder / "checkout"
    for name in ("tunerd", "recipes"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), "."]
    subprocess.run(build, cwd=checkout, check=True, capture_output=True, timeout=300)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel, and the packages that it needs."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    command = [sys.executable, "-m", "venv", "--without-pip", folder]
    subprocess.run(command, check=True, timeout=300)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", python, "install", "-q"]
    command += ["--no-deps", "--no-index", built[1]]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    (own,) = (folder / "lib").glob("python*/site-packages")
    # What it needs is taken from this environment, behind its own; .pth files of it are not read.
    (own / "needs.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return python


def is_in_tests(path: str) -> bool:
    return Path(path).is_relative_to(ROOT / "tests" / "lib")


def run(python: Path, folder: Path, *arguments: str, most: int = 0) -> str:
    # Of our path there is what shortens timings, and no package.
    path = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if is_in_tests(p)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run(
        [python, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=500
    )
    assert done.returncode <= most, done.stderr[-2000:]
    return done.stdout


def test_a_wheel_has_the_package_alone(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        names = wheel.namelist()
    info = f"tunerd-{PROJECT['version']}.dist-info/"
    assert {name.split("/")[0] for name in names} == {"tunerd", info.rstrip("/")}
    assert {"tunerd/py.typed", f"{info}licenses/LICENSE", f"{info}entry_points.txt"} <= {*names}
    here = {str(p.relative_to(ROOT)) for p in (ROOT / "tunerd").rglob("*.py")}
    assert here == {name for name in names if name.endswith(".py")}
    assert built[1].stat().st_size < MAX_BYTES


def test_a_source_distribution_has_the_recipes_and_no_results(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as sdist:
        names = {name.split("/")[1] for name in sdist.getnames() if "/" in name}
    assert names - {".gitignore"} == {
        *("LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "recipes", "tunerd"),
    }
    assert built[0].stat().st_size < MAX_BYTES


def test_what_is_installed_is_run_from_anywhere(installed: Path, tmp_path: Path) -> None:
    where = run(installed, tmp_path, "-c", "import tunerd; print(tunerd.__file__)").strip()
    assert Path(where).is_relative_to(installed.parent.parent)
    command = [str(installed.parent / "tunerd"), "--version"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert PROJECT["version"] in said.stdout


@pytest.mark.slow
def test_what_is_installed_tunes_a_model(installed: Path, tmp_path: Path) -> None:
    onnx.save(conv_net(), tmp_path / "model.onnx")
    flags = ["--cpu-pct", "50", "--trials", "4", "--no-wait", "--json", "--out", "run"]
    flags += ["--tuners", "1", "--slices", "1"]
    # Up to 2 there is an artifact: so few trials need not be faster than the default.
    said = run(installed, tmp_path, "-m", "tunerd", "tune", "model.onnx", *flags, most=2)
    assert json.loads(said)["artifact"]
    program = """
import numpy as np, tunerd
model = tunerd.load("run/artifact")
given = {s.name: np.zeros(s.shape, s.dtype) for s in model.inputs}
print({name: array.shape for name, array in model(given).items()})
"""
    assert run(installed, tmp_path, "-c", program).startswith("{")


# --- containers ---------------------------------------------------------------------------------

CONTAINERS = sorted((ROOT / "recipes" / "containers").iterdir())


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return the steps of a Containerfile: what each is, and its arguments."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    steps = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(kind, rest) for kind, _, rest in (step.partition(" ") for step in steps if step)]


@pytest.mark.parametrize("path", CONTAINERS, ids=lambda path: path.name)
def test_a_container_is_made_of_what_a_checkout_and_the_package_have(path: Path) -> None:
    steps = instructions(path)
    told = dict(steps)
    copied = [source for kind, rest in steps if kind == "COPY" for source in rest.split()[:-1]]
    assert set(copied) == {"pyproject.toml", "README.md", "LICENSE", "tunerd"}
    commands = [rest for kind, rest in steps if kind == "RUN"]
    for command in commands:
        subprocess.run(["sh", "-n", "-c", command], check=True)
    (extras,) = re.findall(r"pip install .*'\.\[(.*)\]'$", "\n".join(commands))
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    assert ("triton" in extras) == ("cuda" in path.suffix)
    (version,) = re.findall(r"^docker\.io/library/python:(3\.\d+)-slim$", told["FROM"])
    assert SpecifierSet(PROJECT["requires-python"]).contains(f"{version}.0")
    assert json.loads(told["ENTRYPOINT"]) == [*PROJECT["scripts"]]
    assert json.loads(told["CMD"]) == ["doctor"]


@pytest.mark.parametrize("path", CONTAINERS, ids=lambda path: path.name)
def test_what_a_container_file_says_to_type_names_itself_and_real_flags(path: Path) -> None:
    text = path.read_text()
    assert f"-f recipes/containers/{path.name} " in text
    (command,) = re.findall(r"(tune model\.onnx --[a-z-]+) \d+", text)
    assert command.split()[-1] in CliRunner().invoke(app, ["tune", "--help"], env=WIDE).output
