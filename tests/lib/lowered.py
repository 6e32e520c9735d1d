"""Lower models in tests, and run them with TVM's own lowering."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx

from tests.lib.models import example_models, load_model
from tunerd.frontend.onnx.reference import Reference, agree
from tunerd.frontend.relax.lowering import Lowered, lower, make_target
from tunerd.system.arrays import random_inputs
from tunerd.vocabulary import Model, TargetSpec

if TYPE_CHECKING:
    from tvm.ir import IRModule

LLVM = TargetSpec("llvm", json.dumps({"kind": "llvm", "num-cores": 2}))
CUDA = TargetSpec(
    "cuda",
    json.dumps(
        {
            "kind": "cuda",
            "arch": "sm_90",
            "max_threads_per_block": 1024,
            "max_shared_memory_per_block": 49152,
            "thread_warp_size": 32,
            "registers_per_block": 65536,
        }
    ),
)
EXAMPLES = example_models()


def load(tmp_path: Path, proto: onnx.ModelProto, **options: object) -> Model:
    path = tmp_path / "net.onnx"
    onnx.save(proto, path)
    return load_model(path, **options)  # type: ignore[arg-type]


def innermost_output_loop(mod: IRModule) -> IRModule:
    """Return `mod` with reductions outside of the last loop of their output.

    As they are, large convolutions step through their weights column by column: VGG-19 would take
    minutes.
    """
    from tvm.s_tir import Schedule
    from tvm.tirx import IterVar, PrimFunc

    changed = mod.clone()
    for var, func in mod.functions_items():
        if not isinstance(func, PrimFunc):
            continue
        schedule = Schedule(func)
        for block in schedule.get_child_blocks(schedule.get_sblock("root")):
            loops, iters = schedule.get_loops(block), schedule.get(block).iter_vars
            reduced = [i.iter_type == IterVar.CommReduce for i in iters]
            if len(loops) == len(iters) and any(reduced) and not all(reduced):
                spatial = [
                    x for x, is_reduced in zip(loops, reduced, strict=True) if not is_reduced
                ]
                inner = [x for x, is_reduced in zip(loops, reduced, strict=True) if is_reduced]
                schedule.reorder(*spatial[:-1], *inner, spatial[-1])
        changed.update_func(var, schedule.mod["main"].without_attr("global_symbol"))
    return changed


def compiled(lowered: Lowered) -> Callable[[dict[str, np.ndarray]], list[np.ndarray]]:
    """Compile with TVM's own lowering; the result runs on this machine, for any inputs.

    LLVM optimizes nothing: that is most of what a compilation takes, and no kernel runs often.
    """
    import tvm
    from tvm import relax
    from tvm.relax.backend.cpu_generic import pipeline

    target = make_target(replace(LLVM, json=json.dumps(json.loads(LLVM.json) | {"opt-level": 0})))
    with target:
        passes = pipeline.get_default_pipeline(target)
        mod = innermost_output_loop(lowered.mod)
        executable = relax.build(mod, target, relax_pipeline=passes)
    machine = relax.VirtualMachine(executable, tvm.cpu())

    def run(feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        arrays = [*feed.values(), *lowered.weights.values()]
        result = machine["main"](*[tvm.runtime.tensor(np.asarray(a, order="C")) for a in arrays])
        return [r.numpy() for r in ([result] if hasattr(result, "numpy") else list(result))]

    return run


def run(lowered: Lowered, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Compile and run once."""
    return compiled(lowered)(feed)


def check(loaded: Model, *, reference: onnx.ModelProto | None = None) -> Lowered:
    """Assert that the lowered model agrees with ONNX Runtime, and that its input matters."""
    lowered = lower(loaded, LLVM)
    session = Reference(reference or loaded.graph.proto)
    feeds = [random_inputs(loaded.inputs, seed) for seed in (0, 1)]
    expected = [session.run(feed) for feed in feeds]
    for spec, got in zip(loaded.outputs, run(lowered, feeds[0]), strict=True):
        assert got.shape == spec.shape
        assert agree(got, expected[0][spec.name], rtol=1e-3)
        assert not agree(expected[1][spec.name], expected[0][spec.name], rtol=0.005)
    return lowered


def operators(lowered: Lowered) -> set[str]:
    """Return the names of the kernels that `main` calls, without TVM's numbers."""
    names = [v.name_hint for v, f in lowered.mod.functions_items() if v.name_hint != "main"]
    return {n.rstrip("0123456789") for n in names}
