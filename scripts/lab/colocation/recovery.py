"""What tenants notice when one of them faults: parts of latency.py.

A tenant looks up rows of a table; a row far outside of it is read where nothing is mapped, which
ends what the GPU does for every client of MPS, and in one process the process.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

CULPRIT = "culprit"
FAULTS = 3
_EACH_SECS = 12.0  # of load around a fault
_BEFORE_SECS = 2.0
_ANSWER_SECS = 60.0
_REACHED_SECS = 1.0  # after which a fault has reached everybody
_ROWS, _FAR = 4, 1 << 32


def lookup(folder: Path) -> Path:
    """Return the artifact of the tenant that faults, made with default schedules."""
    if (folder / "manifest.json").exists():
        return folder
    from onnx import TensorProto, helper, numpy_helper

    from tunerd.artifacts.compile import compile_artifact
    from tunerd.frontend.onnx.onnx_graph import OnnxGraph
    from tunerd.frontend.relax.lowering import lower
    from tunerd.frontend.tasks import extract_tasks
    from tunerd.slices import plan
    from tunerd.vocabulary import Model, SliceRequest, TensorSpec

    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "row"], ["found"])],
        "lookup",
        [helper.make_tensor_value_info("row", TensorProto.INT64, (_ROWS,))],
        [helper.make_tensor_value_info("found", TensorProto.FLOAT, (_ROWS, 64))],
        [numpy_helper.from_array(np.eye(8, 64, dtype="float32"), "table")],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    row, found = TensorSpec("row", (_ROWS,), "int64"), TensorSpec("found", (_ROWS, 64), "float32")
    model = Model("lookup", "lookup", (row,), (found,), OnnxGraph(proto))
    target = plan(SliceRequest("whole", 100)).target
    lowered = lower(model, target)
    tasks = extract_tasks(lowered, target)
    return compile_artifact(lowered, tasks, {}, target, folder, model=model, pct=100)


def faults(folders: Sequence[Path], culprit: Path) -> dict[str, Any]:
    """Load tenants into clients of MPS, have one fault under a load of the others, in rounds."""
    from tunerd.colocation import Engine, Plan, artifacts

    members = {f"m{i}": folder for i, folder in enumerate(folders)} | {CULPRIT: culprit}
    with Engine(Plan.model_validate(_plan(members))) as engine:
        inputs = {name: artifacts.sample_inputs(path) for name, path in members.items()}
        inputs[CULPRIT] = {"row": np.zeros(_ROWS, "int64")}
        rounds = [_round(engine, inputs) for _ in range(FAULTS)]
        reports = [
            {"member": f.member, "retried": f.retried, "recovered_secs": f.recovered_secs}
            for f in engine.stats().faults
        ]
    return {
        "rounds": rounds,
        "reports": reports,
        "restart_secs": restarted(members),
        "problems": {},
    }


def silent_secs(ends: Mapping[str, Sequence[tuple[float, str]]], at: float) -> float | None:
    """Return for how long a fault left a tenant without answers, at most; None: for ever.

    ends: of each tenant, moments of answers with "" or what went wrong. Pauses count that begin
    before a second has passed: some are answered before the fault has reached them.

    >>> silent_secs({"a": [(1.9, ""), (2.1, ""), (3.5, "")], "b": [(2.0, ""), (3.0, "")]}, 2.0)
    1.4
    """
    longest = []
    for found in ends.values():
        moments = [moment for moment, wrong in found if not wrong]
        pauses = [
            after - before
            for before, after in itertools.pairwise(moments)
            if before < at + _REACHED_SECS and after > at
        ]
        if not pauses:
            return None
        longest.append(max(pauses))
    return max(longest)


def _round(engine: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Keep all busy, send what faults, and return when the others were answered."""
    ends: dict[str, list[tuple[float, str]]] = {name: [] for name in inputs if name != CULPRIT}
    began_at = time.monotonic()

    def client(name: str) -> None:
        while time.monotonic() - began_at < _EACH_SECS:
            wrong = _outcome(engine.submit(name, inputs[name]))
            ends[name].append((time.monotonic() - began_at, wrong))

    threads = [threading.Thread(target=client, args=(name,)) for name in ends]
    for thread in threads:
        thread.start()
    time.sleep(_BEFORE_SECS)
    at = time.monotonic() - began_at
    said = _outcome(engine.submit(CULPRIT, {"row": np.full(_ROWS, _FAR, "int64")}))
    for thread in threads:
        thread.join()
    return {
        "fault_at": at,
        "culprit": said,
        "secs": silent_secs(ends, at),
        "failed": sum(bool(wrong) for found in ends.values() for _, wrong in found),
        "answered": {
            name: [round(moment, 4) for moment, _ in found] for name, found in ends.items()
        },
        "wrong": sorted({wrong for found in ends.values() for _, wrong in found if wrong}),
        "culprit_serves": _outcome(engine.submit(CULPRIT, inputs[CULPRIT])) == "",
    }


def _outcome(future: Any) -> str:
    error = future.exception(_ANSWER_SECS)
    return "" if error is None else f"{type(error).__name__}: {error}"[:200]


def restarted(members: Mapping[str, Path]) -> float:
    """Return how long a new process takes from its start until each member has answered."""
    import yaml

    plan = _plan(members) | {"place": "in-process"}
    for member in plan["members"]:
        member["artifact"] = str(member["artifact"])
    since = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "lab.colocation.recovery"], input=yaml.safe_dump(plan), text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-400:])
    return time.monotonic() - since


def _plan(members: Mapping[str, Path]) -> dict[str, Any]:
    listed = [{"name": name, "artifact": path} for name, path in members.items()]
    return {"device": "cuda", "place": "mps", "policy": {"kind": "streams"}, "members": listed}


def main() -> None:
    """Be a process that serves each member of the plan on stdin once."""
    import yaml

    from tunerd.colocation import Engine, Plan, artifacts

    plan = Plan.model_validate(yaml.safe_load(sys.stdin))
    with Engine(plan) as engine:
        given = {
            m.name: {"row": np.zeros(_ROWS, "int64")}
            if m.name == CULPRIT
            else artifacts.sample_inputs(m.artifact)
            for m in plan.members
        }
        for future in [engine.submit(name, inputs) for name, inputs in given.items()]:
            future.result(_ANSWER_SECS)


if __name__ == "__main__":
    main()
