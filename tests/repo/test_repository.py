"""The package keeps its rules: who imports whom, and what is public."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest
import yaml

import tunerd
from tests.lib import ROOT
from tests.lib.repository import PACKAGE

TVM_MODULES = {
    "artifacts.captured",
    "artifacts.compile",
    "artifacts.device_kernels",
    "artifacts.in_place",
    "artifacts.launches",
    "artifacts.loading",
    "artifacts.scheduling",
    "artifacts.super_model",
    "artifacts.tenants",
    "artifacts.weights",
    "builder.build",
    "builder.library",
    "builder.lowering",
    "builder.objects",
    "builder.tenants",
    "candidates.base",
    "candidates.default",
    "candidates.host_code",
    "candidates.libraries.source",
    "candidates.metaschedule.access",
    "candidates.metaschedule.search",
    "candidates.metaschedule.source",
    "candidates.metaschedule.space",
    "candidates.metaschedule.tensor_cores",
    "candidates.nests.blocks",
    "candidates.nests.nest",
    "candidates.registers.amx",
    "candidates.registers.amx_loops",
    "candidates.registers.first",
    "candidates.registers.intrinsic",
    "candidates.registers.prefetching",
    "candidates.registers.rewriting",
    "candidates.registers.schedule",
    "candidates.registers.source",
    "candidates.registers.stages",
    "candidates.registers.sums",
    "candidates.registers.tiles",
    "candidates.registers.units",
    "candidates.registers.winograd",
    "candidates.registers.writing",
    "candidates.tensor_intrinsics",
    "candidates.triton.source",
    "frontend.given",
    "frontend.relax.attention",
    "frontend.relax.attention_kernel",
    "frontend.relax.channels",
    "frontend.relax.constants",
    "frontend.relax.converters",
    "frontend.relax.corrections",
    "frontend.relax.cuts",
    "frontend.relax.fast_math",
    "frontend.relax.hoisting",
    "frontend.relax.importing",
    "frontend.relax.integers",
    "frontend.relax.joins",
    "frontend.relax.lowering",
    "frontend.relax.merging",
    "frontend.relax.movement",
    "frontend.relax.norms",
    "frontend.relax.operands",
    "frontend.relax.permutes",
    "frontend.relax.powers",
    "frontend.relax.precision",
    "frontend.relax.quantizers",
    "frontend.relax.quantizing",
    "frontend.relax.relax_graph",
    "frontend.relax.rewriting",
    "frontend.relax.slices",
    "frontend.relax.widening",
    "frontend.tasks",
    "libraries.calls",
    "records.tvm_database",
    "runner.cuda_device",
    "runner.sampling",
    "runner.tvm_runtime",
    "studies.bench.bandwidth_load",
    "system.targets",
    "testing.kernels",
}


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
    cited = yaml.safe_load((ROOT / ".github" / "CITATION.cff").read_text())
    assert cited["version"] == tunerd.__version__
    changes = (ROOT / ".github" / "CHANGELOG.md").read_text()
    assert re.findall(r"^## ([\d.]+)", changes, re.MULTILINE)[0] == tunerd.__version__
