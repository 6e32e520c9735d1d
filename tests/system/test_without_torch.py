"""Processes of tunerd import no PyTorch, where it is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import onnx
import pytest
from onnx import helper

from tests.lib import PYTHON_PATH
from tests.lib.models import model
from tunerd.errors import ExitCode

TORCH = """
import os

with open(os.environ["TORCH_IMPORTS"], "a") as imports:
    imports.write(f"{os.getpid()}\\n")
raise ImportError("a PyTorch that does not load")
"""


# Whether TVM asks its library in vain, and what it has of operators and functions afterwards.
IMPORTED = """
import json, sys
if "kept" in sys.argv:
    from tunerd.system.without_torch import keep_torch_from_tvm
    keep_torch_from_tvm()
import tvm
from tvm.ir import Op
ops = {str(name): Op.get(name).get_attr("TScriptPrinterName") for name in Op.list_op_names()}
try:
    Op.get("no.operator")
except AttributeError as error:
    ops["no.operator"] = type(error).__name__
functions = sorted(map(str, tvm.ir._ffi_api.__dict__))
print(json.dumps([Op.get.__module__, ops, functions]))
"""


class Machine:
    """An environment with a PyTorch that tells of each import."""

    def __init__(self, folder: Path) -> None:
        package = folder / "installed" / "torch"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(TORCH)
        self._imports = folder / "imports"
        path = os.pathsep.join((str(package.parent), PYTHON_PATH))
        self._environment = {
            **os.environ,
            "PYTHONPATH": path,
            "TORCH_IMPORTS": str(self._imports),
        }

    def python(self, *arguments: str, may_end_with: Collection[int] = (0,)) -> str:
        command = [sys.executable, *arguments]
        ended = subprocess.run(command, env=self._environment, capture_output=True, text=True)
        assert ended.returncode in may_end_with, ended.stderr
        return ended.stdout

    def imports(self) -> int:
        return len(self._imports.read_text().splitlines()) if self._imports.exists() else 0


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_tvm_by_itself_imports_torch(machine: Machine) -> None:
    machine.python("-c", "import tvm")
    assert machine.imports()  # where it does not any more, tunerd.system.without_torch can go


def test_tvm_finds_no_torch_and_others_do(machine: Machine) -> None:
    keep = "from tunerd.system.without_torch import keep_torch_from_tvm as keep; keep(); keep()"
    machine.python("-c", f"{keep}; import tvm, tvm.relax; assert tvm.runtime.disco is None")
    assert not machine.imports()
    machine.python("-c", f"{keep}\ntry: import torch\nexcept ImportError: pass")
    assert machine.imports() == 1


def test_who_imports_disco_by_itself_gets_it(machine: Machine) -> None:
    keep = "from tunerd.system.without_torch import keep_torch_from_tvm as keep; keep()"
    machine.python(
        "-c",
        f"{keep}; import sys, tvm; assert not any('disco' in name for name in sys.modules); "
        "import tvm.runtime.disco as disco; assert disco.ProcessSession",
    )


def test_tvm_that_asks_for_nothing_in_vain_has_all_that_it_had(machine: Machine) -> None:
    (by, *found), (by_tvm, *expected) = (
        json.loads(machine.python("-c", IMPORTED, kept)) for kept in ("kept", "")
    )
    assert (by, by_tvm) == ("tunerd.system.without_torch", "tvm.ir.op")  # else it can go
    assert found == expected


def test_nothing_of_a_run_imports_torch(machine: Machine, tmp_path: Path) -> None:
    relu = model(
        [helper.make_node("Relu", ["x"], ["y"])], inputs={"x": (64, 64)}, outputs={"y": (64, 64)}
    )
    onnx.save(relu, tmp_path / "relu.onnx")
    options = ("--cpu-pct", "50", "--trials", "2", "--tuners", "1", "--slices", "1")
    options += ("--out", str(tmp_path / "run"))
    command = ("-m", "tunerd", "tune", str(tmp_path / "relu.onnx"), *options)
    ended = (ExitCode.BETTER, ExitCode.NO_GAIN, ExitCode.CANNOT_TELL)
    machine.python(*command, may_end_with=ended)
    assert not machine.imports()


def test_who_loads_an_artifact_keeps_its_torch(machine: Machine) -> None:
    machine.python("-c", "import tunerd; tunerd.load; import tvm")
    assert machine.imports()
