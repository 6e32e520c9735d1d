"""What tables of bad input are made of: a place to make one in, and what must be said of it."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from tests.lib.record_samples import FACTS, TASK, candidate, measurement
from tests.lib.store_places import proposed
from tunerd.cli.app import app
from tunerd.cli.errors import run
from tunerd.errors import ExitCode
from tunerd.records import RunFacts
from tunerd.runs.folder import RunFolder

FLOAT = TensorProto.FLOAT


@dataclass
class Place:
    """Where one bad input is made, and what it is made of."""

    folder: Path
    artifact_of: Callable[[], Path]
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def saved(self, content: onnx.ModelProto | bytes, name: str = "net.onnx") -> str:
        path = self.folder / "models" / name
        path.parent.mkdir(exist_ok=True)
        data = content if isinstance(content, bytes) else content.SerializeToString()
        path.write_bytes(data)
        return str(path)

    def artifact(self) -> Path:
        """Return a copy of a good artifact."""
        return Path(shutil.copytree(self.artifact_of(), self.folder / "artifact"))

    def run(self, name: str = "run", facts: RunFacts = FACTS) -> Path:
        """Return a run with a measured trial."""
        folder = self.folder / name
        with RunFolder.open(folder, facts=facts) as made:
            made.store.register_tasks([TASK])
            (trial,) = proposed(made.store, [candidate(1)])
            made.store.start([trial], "cpu-0-0")
            made.store.finish(trial, measurement(1e-3))
        return folder


Make = Callable[[Place], Sequence[object]]


@dataclass(frozen=True)
class Bad:
    what: str
    make: Make  # returns the command line
    code: ExitCode
    said: str  # a regular expression


def entries(place: Place) -> dict[Path, int]:
    """Return what is in a place and its size, less what SQLite needs to read a store."""
    found = (p for p in place.folder.rglob("*") if not p.name.endswith(("-wal", "-shm")))
    return {p: p.lstat().st_size for p in found}


def check(bad: Bad, place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [str(argument) for argument in bad.make(place)]
    before = entries(place)
    capsys.readouterr()
    assert run(app, argv) == bad.code, capsys.readouterr().err
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith("tunerd: ")
    assert "Traceback" not in err
    assert out == ""
    assert re.search(bad.said, line), line
    assert entries(place) == before, "something was written"


def tensor(name: str, dims: Sequence[int | str | None] = (1, 4), kind: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, dims)


def net(
    *nodes: onnx.NodeProto,
    inputs: Sequence[Any] = (tensor("x"),),
    outputs: Sequence[Any] = (tensor("y"),),
    constants: Sequence[onnx.TensorProto] = (),
    opset: int = 17,
    functions: Sequence[onnx.FunctionProto] = (),
) -> onnx.ModelProto:
    graph = helper.make_graph(list(nodes), "g", list(inputs), list(outputs), list(constants))
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, functions=functions)


def relu(source: str = "x", target: str = "y") -> onnx.NodeProto:
    return helper.make_node("Relu", [source], [target])


def of_dims(*dims: int | str | None) -> onnx.ModelProto:
    return net(relu(), inputs=[tensor("x", dims)], outputs=[tensor("y", dims)])


def tune(model_path: object, *flags: object) -> list[object]:
    return ["tune", model_path, "--cpu-pct", 100, "--dry-run", *flags]
