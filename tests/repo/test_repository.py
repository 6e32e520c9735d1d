"""The repository keeps its rules: who imports whom, what the README promises, what lies where."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import lzma
import math
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import tunerd
from lab.cpu import models_in_processes
from lab.scaling import gpus
from lab.start import first_trial, lowering
from tests.lib import ROOT, models
from tests.lib.readme_commands import DOCUMENTS, README, shown_commands
from tunerd.cli.app import app
from tunerd.errors import ExitCode
from tunerd.studies.matrix.folder import read as read_matrix
from tunerd.studies.matrix.result import result_from, result_json
from tunerd.system.text import TIMES

PACKAGE = ROOT / "tunerd"
RESULTS = ROOT / "results"
LAB = ROOT / "scripts" / "lab"
EXPERIMENTS = sorted(path for path in RESULTS.iterdir() if path.is_dir())

ON_TWO_CORES = "cpu-light_squeezenet-against-stock"
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
# Flags of other programs that the README shows.
FOREIGN_FLAGS = {
    "--compile-bytecode",
    "--for",
    "--keep",
    "--head",
    "--metrics-export-port",
    "--no-deps",
    "--quick",
    "--runtime-env-json",
    "--unit",
    "--working-dir",
}
TVM_MODULES = {
    "artifacts.captured",
    "artifacts.compile",
    "artifacts.loading",
    "artifacts.scheduling",
    "artifacts.super_model",
    "artifacts.weights",
    "builder.build",
    "builder.library",
    "builder.lowering",
    "builder.tenants",
    "candidates.base",
    "candidates.default",
    "candidates.host_code",
    "candidates.libraries.source",
    "libraries.calls",
    "candidates.metaschedule.source",
    "candidates.nests.blocks",
    "candidates.nests.nest",
    "candidates.triton.source",
    "artifacts.device_kernels",
    "artifacts.tenants",
    "frontend.relax.precision",
    "system.targets",
    "testing.kernels",
    "runner.cuda_device",
    "studies.bench.bandwidth_load",
    "runner.sampling",
    "runner.tvm_runtime",
    "frontend.relax.attention",
    "frontend.relax.attention_kernel",
    "frontend.relax.channels",
    "frontend.relax.constants",
    "frontend.relax.converters",
    "frontend.relax.corrections",
    "frontend.relax.fast_math",
    "frontend.given",
    "frontend.relax.hoisting",
    "frontend.relax.importing",
    "frontend.relax.relax_graph",
    "frontend.relax.widening",
    "frontend.relax.lowering",
    "frontend.relax.movement",
    "frontend.relax.integers",
    "frontend.relax.norms",
    "frontend.relax.quantizers",
    "frontend.relax.permutes",
    "frontend.relax.powers",
    "records.tvm_database",
    "candidates.metaschedule.search",
    "candidates.metaschedule.access",
    "candidates.metaschedule.space",
    "candidates.metaschedule.tensor_cores",
    "candidates.vnni.dots",
    "candidates.vnni.intrinsic",
    "candidates.vnni.source",
    "frontend.tasks",
}


def tracked() -> list[Path]:
    """Return the files under version control that are there."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file()]


def text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


# --- imports -----------------------------------------------------------------------------------


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, *, at_top: bool = False) -> set[str]:
    """Return what a module imports, in full names; `at_top`: only when it is imported itself."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    for node in tree.body if at_top else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def users_of(package: str) -> set[str]:
    """Return the modules that import a package, those inside of it left out."""
    return {
        module_of(path)
        for path in PACKAGE.rglob("*.py")
        if not f"tunerd.{module_of(path)}.".startswith(f"{package}.")
        and any(f"{name}.".startswith(f"{package}.") for name in imports(path))
    }


def test_two_modules_import_ray() -> None:
    # A run connects to it; metrics of a cluster that a run has joined go through it.
    assert users_of("ray") == {"cluster.connection", "cluster.metrics"}


def test_few_modules_import_tvm() -> None:
    assert users_of("tvm") | users_of("tvm_ffi") == TVM_MODULES


def test_nothing_is_unpickled() -> None:
    # A pickle runs what it says. Ray has its own, between processes of one user, behind a token.
    unsafe = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
    for path in PACKAGE.rglob("*.py"):
        assert not {name.split(".")[0] for name in imports(path)} & unsafe, path.name
        assert "allow_pickle" not in path.read_text(), path.name


def test_the_coordinator_has_no_clock_no_files_and_no_ray() -> None:
    pure = {"array", "bisect", "collections", "dataclasses", "heapq", "itertools", "math"}
    for path in (PACKAGE / "coordinator").glob("*.py"):
        used = {m.split(".")[0] for m in imports(path)}
        assert used <= pure | {"__future__", "tunerd"}


def test_the_command_line_imports_what_is_heavy_inside_functions() -> None:
    # A command's parameters are made of its settings; its module is imported when it is asked for.
    light = {"cli", "errors", "report", "settings", "vocabulary", "__version__"}
    words = ("tunerd.system.text", "tunerd.system.version", "tunerd.system.without_torch")
    for path in (PACKAGE / "cli").glob("*.py"):
        for name in imports(path, at_top=True):
            if name.startswith("tunerd.") and not name.startswith(words):
                assert name.split(".")[1] in light or name in ("tunerd.system",), (
                    f"{path.name} imports {name}"
                )


# --- names -------------------------------------------------------------------------------------


def test_the_public_names_are_these() -> None:
    assert set(tunerd.__all__) == {
        "Artifact",
        "LoadError",
        "LoadedModel",
        "Matrix",
        "MismatchWarning",
        "Plan",
        "ProfileResult",
        "Run",
        "SizedModel",
        "SizedRun",
        "SuperModel",
        "TunerdError",
        "__version__",
        "bench",
        "compare",
        "load",
        "matrix",
        "open_run",
        "plan",
        "profile",
        "tune",
        "tune_sizes",
    }
    for name in tunerd.__all__:
        assert getattr(tunerd, name) is not None
        assert name in dir(tunerd)


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'train'"):
        _ = tunerd.train


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert tunerd.__version__ == project["version"]


# --- the README --------------------------------------------------------------------------------


def parsed(command: Any, argv: list[str], parent: Any = None) -> Any:
    """Parse a command line as the program would, without carrying it out."""
    with command.make_context(argv[0], list(argv[1:]), parent=parent) as context:
        if not hasattr(command, "commands"):
            return context
        name, inner, rest = command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        return parsed(inner, [name, *rest], context)


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


# --- figures -----------------------------------------------------------------------------------

UNITS = {"s": 1.0, "ms": 1e3, "µs": 1e6, "min": 1 / 60}
_FIGURE = re.compile(
    rf"(?<![A-Za-z\d])(\d[\d,]*(?:\.\d+)?)\s?(ms|µs|s|min|SMs|trials|%|{TIMES}|times)(?![\w/])"
)


def figures(text: str) -> set[tuple[str, str]]:
    """Return each number of a text that has a unit, without thousands separators, and the unit."""
    return {(number.replace(",", ""), unit) for number, unit in _FIGURE.findall(text)}


def untraceable(text: str, *folders: Path) -> set[tuple[str, str]]:
    """Return the figures of `text` that no file below the folders has.

    A file has a figure where the number and its unit stand in it; a JSON document also where a
    value of an object in it rounds to the number, durations in seconds. Markdown is a summary.
    """
    left = figures(text)
    for path in (path for folder in folders for path in sorted(folder.rglob("*"))):
        if left and path.is_file() and path.suffix != ".md":
            content = content_of(path)
            left -= figures(content)
            if path.name.endswith((".json", ".json.xz")):
                values = list(scalars(json.loads(content)))
                left = {f for f in left if not any(rounds_to(v, *f) for v in values)}
    return left


def content_of(path: Path) -> str:
    """Return a file's text, unpacked where it is packed; samples and archives count for nothing."""
    if path.suffix != ".xz":
        return text_of(path)
    if path.name.endswith((".jsonl.xz", ".tar.xz")):
        return ""
    return lzma.decompress(path.read_bytes()).decode()


def scalars(document: Any) -> Iterator[float]:
    """Yield the numbers that are values of objects: what lists hold are raw samples."""
    if isinstance(document, dict):
        for value in document.values():
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield value
            yield from scalars(value)
    elif isinstance(document, list):
        for value in document:
            yield from scalars(value)


def rounds_to(value: float, number: str, unit: str) -> bool:
    decimals = len(number.partition(".")[2])
    return f"{value * UNITS.get(unit, 1.0):.{decimals}f}" == number


def section(text: str, title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def test_every_figure_among_the_results_is_in_a_file_of_results() -> None:
    assert untraceable(section(DOCUMENTS[0].read_text(), "Results"), ROOT / "results") == set()


# What `results/figures.yaml` says of figures that are in no file as they stand.
EXPLAINED: dict[str, dict[str, str]] = yaml.safe_load((RESULTS / "figures.yaml").read_text())


def links_of(text: str) -> list[str]:
    return re.findall(r"\]\((?!https?://|#)([^)#]+)\)", text)


def test_every_figure_of_the_index_of_results_is_in_a_file_below_it() -> None:
    assert untraceable((RESULTS / "README.md").read_text(), RESULTS) == set()


@pytest.mark.parametrize("folder", EXPERIMENTS, ids=lambda folder: folder.name)
def test_every_figure_of_an_experiment_is_in_a_file_of_its_own_or_of_one_it_names(
    folder: Path,
) -> None:
    text = (folder / "README.md").read_text()
    links = [(folder / link).resolve() for link in links_of(text)]
    assert all(link.exists() for link in links)
    named = [link for link in links if link.is_dir() and link != folder]
    explained = {tuple(figure.rsplit(" ", 1)) for figure in EXPLAINED.get(folder.name, {})}
    assert untraceable(text, folder, *named) == explained


@pytest.mark.parametrize(
    ("figure", "said"),
    [pair for folder in EXPLAINED.values() for pair in folder.items()],
)
def test_a_figure_that_is_computed_is_what_comes_out(figure: str, said: str) -> None:
    number, _ = figure.rsplit(" ", 1)
    if re.fullmatch(r"[-+*/(). 0-9]+", said):
        assert rounds_to(eval(said), number, "")


def test_the_index_of_results_has_a_line_for_each_experiment() -> None:
    index = (RESULTS / "README.md").read_text()
    assert len(index.splitlines()) <= 60
    listed = re.findall(r"^\| \[[^]]+\]\(([^)]+)\) \|", index, re.MULTILINE)
    assert sorted(listed) == [folder.name for folder in EXPERIMENTS]


def test_a_figure_without_a_source_is_found(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"tuned": {"p50_secs": 0.0026184}, "raw": [0.5]}')
    (tmp_path / "run.log").write_text("attached, 52 of 132 SMs obtained")
    (tmp_path / "README.md").write_text("3.1 ms")
    text = f"2.62 ms on 132\N{NO-BREAK SPACE}SMs, not 3.1 ms, nor 500 ms, nor 7.3{TIMES}"
    assert untraceable(text, tmp_path) == {("3.1", "ms"), ("500", "ms"), ("7.3", TIMES)}


# --- files -------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("script", "folder", "table", "picture", "title"),
    [
        ("shares/plot_shares.py", "h200-shares", "tables.txt", "shares.svg", "tuned at one share"),
        (
            "shares/plot_shares.py",
            "h200-claims",
            "tables.txt",
            "claims.svg",
            "as if it were the only one",
        ),
        (
            "shares/plot_profiles.py",
            "h200-profiles",
            "table.txt",
            "profiles.svg",
            "default schedules over",
        ),
        (
            "shares/plot_profiles.py",
            "h200-profile-tuned",
            "table.txt",
            "profiles.svg",
            "tuned at 40%, over",
        ),
    ],
)
def test_tables_and_pictures_are_what_their_scripts_make_of_the_samples(
    script: str, folder: str, table: str, picture: str, title: str, tmp_path: Path
) -> None:
    kept = ROOT / "results" / folder
    (label,) = re.findall(r'aria-label="([^"]*)"', (kept / picture).read_text())
    assert title in label
    command = [sys.executable, LAB / script, kept, "--title", label]
    command += ["--out", tmp_path / picture]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == (kept / table).read_text()
    assert (tmp_path / picture).read_text() == (kept / picture).read_text()


def is_same(one: Any, other: Any) -> bool:
    """Whether two documents say the same; the last digits of a logarithm are the CPU's."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(v, other[k]) for k, v in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-12)
    return bool(one == other)


@pytest.mark.parametrize(
    "path",
    sorted((ROOT / "results").rglob("matrix-result.json")),
    ids=lambda p: "/".join(p.parts[-3:-1]),
)
def test_a_matrix_says_what_its_samples_say(path: Path) -> None:
    said = json.loads(path.read_bytes())
    asked = {"shares": said["findings"]["shares"], "model": {"name": ""}, "unit": said["unit"]}
    made = result_json(result_from(read_matrix(path.parent), {}, asked))
    assert is_same(json.loads(json.dumps(made["findings"])), said["findings"])
    assert f"{said['rounds']} rounds" in (path.parent / "report.md").read_text()


@pytest.mark.parametrize(
    ("script", "folders", "text"),
    [
        ("shares/kernels_in_models.py", ["h200-shares"], "kernels.txt"),
        ("shares/kernels_in_processes.py", ["h200-shares"], "processes.txt"),
        ("shares/trace_model.py table", ["h200-trace"], "table.txt"),
        ("stock/compare_searches.py", [f"{ON_TWO_CORES}/searches.json.xz"], "searches.txt"),
        (
            "stock/compare_searches.py --chance",
            [f"{ON_TWO_CORES}/{name}.json.xz" for name in ("more-searches", "searches")],
            "more-searches.txt",
        ),
    ],
)
def test_a_table_is_what_its_script_makes_of_what_was_kept(
    script: str, folders: list[str], text: str
) -> None:
    kept = [ROOT / "results" / folder for folder in folders]
    name, *subcommand = script.split()
    command = [sys.executable, LAB / name, *subcommand, *kept]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    folder = kept[-1] if kept[-1].is_dir() else kept[-1].parent
    assert done.stdout == (folder / text).read_text()


@pytest.mark.parametrize("part", ["", "every-batch", "seven-minutes", "h100"])
def test_the_comparison_with_stock_is_what_its_runs_say(part: str, tmp_path: Path) -> None:
    kept = ROOT / "results" / "h200-light_resnet50-against-stock" / part
    with tarfile.open(kept / "runs.tar.xz") as runs:
        runs.extractall(tmp_path, filter="data")
    for name in {"comparison.json", "remeasured.json"} & set(os.listdir(kept)):
        shutil.copy(kept / name, tmp_path)
    command = [sys.executable, LAB / "stock" / "summary.py", tmp_path]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == (kept / "benchmark.txt").read_text()
    said, found = (json.loads((at / "summary.json").read_bytes()) for at in (kept, tmp_path))
    assert is_same(found, said)


@pytest.mark.parametrize(
    "name",
    ["first-trial", "h200-first-trial", "h100-bytecode", "lowering-early-1", "lowering-early-2"],
)
def test_the_steps_of_a_start_are_what_was_measured(name: str) -> None:
    kept = ROOT / "results" / "start"
    starts = json.loads((kept / f"{name}.json").read_bytes())["starts"]
    table = first_trial.shown(starts)
    assert (kept / f"{name}.txt").read_text() == f"{table}\n"
    assert all(row in (kept / "README.md").read_text() for row in table.split("\n"))


def test_the_table_of_lowering_is_what_was_measured() -> None:
    kept = ROOT / "results" / "start"
    lowered = json.loads((kept / "lowering.json").read_bytes())["lowered"]
    table = lowering.shown(lowered)
    assert (kept / "lowering.txt").read_text() == f"{table}\n"
    assert table in (kept / "README.md").read_text()


@pytest.mark.parametrize("name", ["1", "2"])
def test_the_table_of_processes_is_what_was_measured(name: str) -> None:
    kept = ROOT / "results" / "cpu-processes"
    rounds = json.loads((kept / f"{name}.json").read_bytes())["rounds"]
    table = models_in_processes.shown(rounds)
    assert (kept / f"{name}.txt").read_text() == f"{table}\n"
    assert table in (kept / "README.md").read_text()


@pytest.mark.parametrize("name", ["h100", "h100-apart"])
def test_the_table_of_gpus_is_what_was_measured(name: str) -> None:
    kept = ROOT / "results" / "h200-scaling"
    table = gpus.shown(json.loads((kept / f"{name}.json").read_bytes())["runs"])
    assert (kept / f"{name}.txt").read_text() == f"{table}\n"
    assert table in (kept / "README.md").read_text()


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
