"""Plans of tiny artifacts, and models that do as a test tells them."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from tests.lib.artifact_fixtures import tiny_artifact, tiny_convnet
from tunerd import slices
from tunerd.artifacts.compile import compile_artifact
from tunerd.artifacts.loading import load
from tunerd.cli.app import app
from tunerd.cli.errors import run
from tunerd.colocation.plan import Plan
from tunerd.frontend.onnx.onnx_graph import OnnxGraph
from tunerd.frontend.relax.lowering import lower
from tunerd.frontend.tasks import extract_tasks
from tunerd.vocabulary import Arrays, Model, SliceRequest, TensorSpec

CORES = sorted(os.sched_getaffinity(0))


@functools.cache
def artifact(root: Path, seed: int) -> Path:
    """Return a compiled tiny model with weights of its own, made once for each seed."""
    folder = root / f"artifact-{seed}"
    tiny_artifact(folder, seed=seed)
    return folder


@functools.cache
def cuda_artifact(root: Path, seed: int) -> Path:
    """Return the same for the first GPU."""
    return compiled_for_the_gpu(tiny_convnet(seed), root / f"cuda-{seed}")


def compiled_for_the_gpu(model: Model, folder: Path) -> Path:
    return compiled(model, folder, "whole")


def compiled(model: Model, folder: Path, kind: Literal["whole", "cpu"]) -> Path:
    """Compile a model with default schedules for all of a device."""
    target = slices.plan(SliceRequest(kind, 100)).target
    lowered = lower(model, target)
    tasks = extract_tasks(lowered, target)
    compile_artifact(lowered, tasks, {}, target, folder, model=model, pct=100)
    return folder


def lookup() -> Model:
    """Rows of a table by their number: one that is far outside is read where nothing is mapped."""
    table = numpy_helper.from_array(np.eye(8, 64, dtype="float32"), "table")
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "row"], ["found"])],
        "lookup",
        [helper.make_tensor_value_info("row", TensorProto.INT64, (4,))],
        [helper.make_tensor_value_info("found", TensorProto.FLOAT, (4, 64))],
        [table],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    ins, outs = (TensorSpec("row", (4,), "int64"),), (TensorSpec("found", (4, 64), "float32"),)
    return Model("lookup", "lookup", ins, outs, OnnxGraph(proto))


def with_two_members(root: Path) -> Path:
    """Have artifact-0 and artifact-1 in a folder."""
    for seed in (0, 1):
        artifact(root, seed)
    return root


def colocate(*argv: object) -> int:
    """Call `tunerd colocate` in this process, and return its exit code."""
    return int(run(app, ["colocate", *map(str, argv)]))


def plan_of(
    root: Path, names: Mapping[str, Mapping[str, Any]], *, kind: str = "time", **said: Any
) -> Plan:
    """Return a plan whose members are tiny models, each with weights of its own."""
    members = [
        {"name": name, "artifact": artifact(root, seed)} | dict(more)
        for seed, (name, more) in enumerate(names.items())
    ]
    policy = {"kind": kind} | dict(said.pop("policy", {}))
    return Plan.model_validate({"members": members, "policy": policy} | said)


def inputs(seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((2, 3, 8, 8)).astype("float32"),
        "offset": rng.standard_normal((2, 10)).astype("float32"),
    }


class Script:
    """What models are to do, by the name of their artifact's folder; they do it in turn."""

    def __init__(self) -> None:
        self.faults: dict[str, list[str]] = {}  # the next calls raise these
        self.gates: dict[str, threading.Event] = {}  # calls wait for these
        self.entered: dict[str, threading.Event] = {}  # set once a call waits
        self.calls: list[str] = []
        self.loads: list[str] = []
        self.refuse_loading: set[str] = set()

    def open_model(self, path: Path) -> ScriptedModel:
        if path.name in self.refuse_loading:
            raise RuntimeError(f"{path.name} is not to be loaded")
        self.loads.append(path.name)
        return ScriptedModel(self, path)

    def hold(self, path: Path) -> tuple[threading.Event, threading.Event]:
        """Have calls wait; return what lets them go on, and what is set once one waits."""
        gate = self.gates[path.name] = threading.Event()
        entered = self.entered[path.name] = threading.Event()
        return gate, entered


class ScriptedModel:
    """A loaded artifact that faults and waits as the script says."""

    def __init__(self, script: Script, path: Path) -> None:
        self._script, self._name, self._model = script, path.name, load(path)

    def instrument(self, seen: Callable[..., None] | None) -> None:
        self._model.instrument(seen)

    def __call__(self, *given: Mapping[str, object]) -> Arrays:
        self._script.calls.append(self._name)
        if self._name in self._script.gates:
            self._script.entered[self._name].set()
            assert self._script.gates[self._name].wait(60)
        if faults := self._script.faults.get(self._name):
            raise RuntimeError(faults.pop(0))
        return self._model(*given)
