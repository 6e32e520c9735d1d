"""A fault among clients of MPS: its model, and what the others lose by it, for latency.py.

    PYTHONPATH=.:scripts python3 -m lab.colocation.recovery --make runs/colocation/lookup

writes what recipes/colocation/fault-mps.yaml names beside its tenants: FOLDER/artifact, a model
that looks up rows of a table, and FOLDER/far.npz, the number of a row that is far outside of it.
That is read where nothing is mapped, which ends what the GPU does for every client of MPS, and in
one process the process. Runs where one NVIDIA GPU is.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lab.colocation.steps import say

_ANSWER_SECS = 60.0
_ROWS, _FAR = 4, 1 << 32


def made(folder: Path, kind: Literal["whole", "cpu"] = "whole") -> None:
    """Write the model that faults, with default schedules, and the inputs by which it does.

    kind: of the device for which it is compiled, all of it.
    """
    np.savez(_existing(folder) / "far.npz", row=np.full(_ROWS, _FAR, "int64"))
    if (folder / "artifact" / "manifest.json").exists():
        return
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
    target = plan(SliceRequest(kind, 100)).target
    lowered = lower(model, target)
    tasks = extract_tasks(lowered, target)
    compile_artifact(lowered, tasks, {}, target, folder / "artifact", model=model, pct=100)


def _existing(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def faults(recipe: Path) -> dict[str, Any]:
    """Bench a recipe whose load has a member fault; return a document for latency_table.

    Its seconds are those from the request that faults until each member had answered one that was
    sent since the engine knew of the fault.
    """
    from tunerd import api

    benched = api.colocate_bench(recipe, on_step=say)
    (result,), (ran,) = benched.results, benched.rounds
    assert result.outage is not None
    hit = [o for o, when in zip(ran.together, ran.outages, strict=True) if when is not None]
    rounds = [
        {
            "fault_at": taken.at_secs,
            "secs": taken.served_again_secs,
            "culprit_secs": taken.out_secs,
            "failed": taken.lost,
            "culprit_serves": taken.out_secs is not None,
            "answered": {
                member.name: [
                    round(s.ended_at, 4)
                    for s in observed.samples
                    if (s.member, s.end) == (member.name, "done")
                ]
                for member in benched.plan.members
            },
        }
        for taken, observed in zip(result.outage.rounds, hit, strict=True)
    ]
    return {"rounds": rounds, "restart_secs": restarted(recipe), "problems": {}}


def restarted(recipe: Path) -> float:
    """Return how long a new process takes from its start until each member has answered."""
    since = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "lab.colocation.recovery", "--serve", recipe],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},  # it finds what this one does
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-400:])
    return time.monotonic() - since


def _serve_once(recipe: Path) -> None:
    """Load the members of a recipe into this process, and have each answer once."""
    from tunerd.colocation import Engine, Plan
    from tunerd.colocation.bench import sample_inputs

    plan = Plan.read(recipe).model_copy(update={"place": "in-process"})
    with Engine(plan) as engine:
        given = sample_inputs(plan)
        for future in [engine.submit(name, inputs) for name, inputs in given.items()]:
            future.result(_ANSWER_SECS)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--make", type=Path, metavar="FOLDER", help="write the model and its inputs")
    which.add_argument("--serve", type=Path, metavar="RECIPE", help="have each member answer once")
    options = parser.parse_args()
    if options.make is not None:
        made(options.make)
    else:
        _serve_once(options.serve)


if __name__ == "__main__":
    main()
