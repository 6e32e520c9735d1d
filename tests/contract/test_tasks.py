"""Task extraction: every kernel once, with an identity that lasts."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

from onnx import helper

from tests.lib import ROOT
from tests.lib.lowered import CUDA, EXAMPLES, LLVM, load
from tests.lib.models import conv_net, ints, model
from tunerd.frontend.relax.lowering import lower
from tunerd.frontend.tasks import extract_tasks


def test_tasks_cover_every_call_and_come_in_the_order_of_the_model(tmp_path: Path) -> None:
    lowered = lower(load(tmp_path, EXAMPLES.transformer_encoder(layers=2)), LLVM)
    tasks = extract_tasks(lowered, LLVM)
    calls = [
        b.value.args[0].name_hint
        for block in lowered.mod["main"].body.blocks
        for b in block.bindings
        if getattr(getattr(b.value, "op", None), "name", "") == "relax.call_tir"
    ]
    assert sum(t.weight for t in tasks) == len(calls)
    positions = [calls.index(t.name) for t in tasks]
    assert positions == sorted(positions)
    assert len({t.task_id for t in tasks}) == len(tasks) == 11
    assert all(t.flops > 0 for t in tasks if "matmul" in t.name)


def test_a_reshape_is_no_task(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("Softmax", ["r"], ["s"], axis=-1),
        helper.make_node("Reshape", ["s", "target"], ["out"]),
    ]
    weights = {"target": ints(8, 4)}
    proto = model(nodes, inputs={"x": (2, 16)}, outputs={"out": (8, 4)}, weights=weights)
    names = [t.name for t in extract_tasks(lower(load(tmp_path, proto), LLVM), LLVM)]
    assert "reshape" not in names
    assert names


def test_the_same_kernel_has_the_same_id_in_another_model(tmp_path: Path) -> None:
    short, long = (
        {
            t.task_id
            for t in extract_tasks(
                lower(load(tmp_path, EXAMPLES.transformer_encoder(layers=n)), LLVM), LLVM
            )
        }
        for n in (1, 3)
    )
    assert short == long


def test_task_ids_and_modules_are_the_same_in_another_process(tmp_path: Path) -> None:
    tasks = extract_tasks(lower(load(tmp_path, conv_net()), LLVM), LLVM)
    code = f"""
import hashlib, json, sys
from pathlib import Path
from tunerd.frontend.relax.lowering import lower
from tunerd.frontend.model import read_model, simplified
from tunerd.frontend.tasks import extract_tasks
from tunerd.vocabulary import TargetSpec
target = TargetSpec("llvm", {LLVM.json!r})
tasks = extract_tasks(lower(simplified(read_model(Path(sys.argv[1]))), target), target)
mods = [hashlib.sha256(t.mod_json.encode()).hexdigest() for t in tasks]
print(json.dumps([[t.task_id for t in tasks], mods, "tvm.s_tir.tensor_intrin" in sys.modules]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "net.onnx")],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "11"},
    )
    ids, mods, slow_import = json.loads(done.stdout.splitlines()[-1])
    assert ids == [t.task_id for t in tasks]
    assert mods == [hashlib.sha256(t.mod_json.encode()).hexdigest() for t in tasks]
    assert not slow_import  # it takes 22 s and only tensor cores need it


def test_a_tasks_module_loads_as_the_function_that_the_model_calls(tmp_path: Path) -> None:
    import tvm
    import tvm_ffi

    lowered = lower(load(tmp_path, conv_net()), LLVM)
    normalize = tvm.get_global_func("tvm.s_tir.meta_schedule.normalize_mod")
    for task in extract_tasks(lowered, LLVM):
        mod = tvm.ir.load_json(task.mod_json)
        assert [v.name_hint for v in mod.get_global_vars()] == ["main"]
        assert tvm_ffi.structural_equal(mod, normalize(lowered.mod[task.name]))


def test_cuda_tasks_are_extracted_without_a_gpu(tmp_path: Path) -> None:
    lowered = lower(load(tmp_path, conv_net()), CUDA)
    tasks = extract_tasks(lowered, CUDA)
    assert sum("conv2d" in t.name for t in tasks) == 2
    assert all(t.target is CUDA for t in tasks)


def test_weight_arguments_are_the_hoisted_ones(tmp_path: Path) -> None:
    tasks = extract_tasks(lower(load(tmp_path, conv_net()), LLVM), LLVM)
    first = next(t for t in tasks if "conv2d" in t.name)
    assert [first.args[i].shape for i in first.weight_args] == [(3, 3, 3, 8), (1, 1, 1, 8)]
    assert first.args[-1].shape == (1, 16, 16, 8)
    assert len(first.args) - 1 not in first.weight_args
