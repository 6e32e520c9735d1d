"""Relax modules as models: what is refused, what they are compared with, and how a run goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax.frontend import nn
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import tunerd
from tests.lib import ROOT
from tests.lib.lowered import LLVM
from tests.lib.lowered import run as run_lowered
from tests.lib.readme_commands import README
from tunerd.errors import InputError, ModelError
from tunerd.frontend.given import path_or_graph, save_in
from tunerd.frontend.kernels import kernels_of
from tunerd.frontend.model import read_model
from tunerd.frontend.relax.relax_graph import RelaxGraph
from tunerd.runs.finals.verify import verify
from tunerd.telemetry.progress import ProgressState
from tunerd.vocabulary import Arrays, Behind
from tunerd.vocabulary.verdict import Verdict

SHAPE = (64, 256)
WEIGHTS = np.random.default_rng(0).normal(size=(2, 256, 256)).astype(np.float32) / 16
X = np.random.default_rng(1).normal(size=SHAPE).astype(np.float32)
DIE = """
import os, signal, sys, pathlib
from tests.system.test_relax_models import tune
def die(state):
    if state.trials_done >= 3:
        os.kill(os.getpid(), signal.SIGKILL)
tune(pathlib.Path(sys.argv[1]), die)
"""

Emit = Callable[[relax.BlockBuilder, relax.Var], relax.Expr]


def module(emit: Emit, *, name: str = "main", shape: Any = SHAPE) -> tvm.IRModule:
    """Return a module whose function takes x and returns what is emitted."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    with builder.function(name, [x]):
        builder.emit_func_output(builder.emit(emit(builder, x)))
    return builder.get()


def layers(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
    hidden = builder.emit(relax.op.nn.relu(relax.op.matmul(x, relax.const(WEIGHTS[0]))))
    return relax.Tuple([relax.op.matmul(hidden, relax.const(WEIGHTS[1])), hidden])


def by_numpy(x: np.ndarray) -> Arrays:
    hidden = np.maximum(x @ WEIGHTS[0], 0)
    return {"output_0": hidden @ WEIGHTS[1], "output_1": hidden}


def tune(out: Path, on_progress: Callable[[ProgressState], None] | None = None) -> tunerd.Run:
    return tunerd.tune(
        module(layers),
        gpu_pct=40,
        slice_kind="simulated",
        trials=8,
        tuners=1,
        slices=1,
        out=out,
        on_progress=on_progress,
    )


# --- a run -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("kept_cluster")
@pytest.mark.nightly
def test_the_same_call_goes_on_after_a_kill_and_leaves_a_right_artifact(tmp_path: Path) -> None:
    path = f"{ROOT}:{ROOT / 'scripts'}"
    killed = subprocess.run(
        [sys.executable, "-c", DIE, str(tmp_path / "run")], env={**os.environ, "PYTHONPATH": path}
    )
    assert killed.returncode == -signal.SIGKILL
    assert not tunerd.open_run(tmp_path / "run").is_finished

    run = tune(tmp_path / "run")
    assert run.view.sessions == 2
    assert sum(task.trials for task in run.tasks) == 8  # none was repeated
    outputs = run.artifact.load()(X)
    for name, values in by_numpy(X).items():
        np.testing.assert_allclose(outputs[name], values, rtol=1e-3, atol=1e-3)

    assert run.outcome.verification.reference == "unscheduled TVM"
    assert "all outputs agree with unscheduled TVM" in run.outcome.verification.message
    assert {latency.name for latency in run.latencies} == {"tuned", "default"}
    page = run.report(tmp_path / "page.html").read_text()
    assert "verified against unscheduled TVM on 3 seeds" in page
    assert "not compared with ONNX Runtime: the model is a Relax module" in page
    assert "unscheduled TVM" in (run.artifact.path / "manifest.json").read_text()
    assert tunerd.open_run(run.folder).outcome.verification == run.outcome.verification


@pytest.mark.slow
@pytest.mark.usefixtures("kept_cluster")
def test_the_readme_s_module_is_tuned_in_16_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = re.search(r"^```python\n(from tvm\.relax\..*?)^```", README, re.DOTALL | re.MULTILINE)
    assert found is not None
    monkeypatch.chdir(tmp_path)
    shown = 'gpu_pct=40, slice_kind="simulated", precision="fp16"'
    program = found[1].replace("gpu_pct=40", shown).replace("trials=1000", "trials=4")
    given = {"tunerd": tunerd, "weight": WEIGHTS[0], "bias": X[0], "x": X}
    exec(program, given)
    assert given["run"].verdict in Verdict
    expected = np.maximum(X @ WEIGHTS[0].T + X[0], 0)
    np.testing.assert_allclose(given["outputs"], expected, rtol=1e-2, atol=1e-2)


def test_it_is_planned_and_named_by_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    planned = tunerd.plan(module(layers), gpu_pct=40, slice_kind="simulated", trials=8)
    assert planned.settings.out.name == f"{RelaxGraph.of(module(layers)).file_name[:-6]}-gpu40"
    assert "2 tasks, tuned until 8 trials" in str(planned)
    assert list(tmp_path.iterdir()) == []


# --- what it computes --------------------------------------------------------------------------


def read(tmp_path: Path, mod: tvm.IRModule) -> Any:
    graph = path_or_graph(mod)
    assert isinstance(graph, RelaxGraph)
    return read_model(save_in(tmp_path / "model", graph))


def test_a_file_of_it_is_the_same_model(tmp_path: Path) -> None:
    fixed, graph = read(tmp_path, module(layers)), RelaxGraph.of(module(layers))
    assert fixed.digest == graph.digest
    assert fixed.graph == graph
    other = module(lambda _, x: relax.op.matmul(x, relax.const(WEIGHTS[1])))
    assert RelaxGraph.of(other).digest != graph.digest


def test_what_an_output_is_computed_from_is_known() -> None:
    def emit(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        half = builder.emit(relax.op.astype(x, "float16"))
        return relax.Tuple([relax.op.astype(half, "float32"), relax.op.ones((3,), "float32")])

    graph = RelaxGraph.of(module(emit))
    assert graph.behind(graph.outputs()) == {
        "output_0": Behind(frozenset({"float16", "float32"}), True),
        "output_1": Behind(frozenset({"float32"}), False),
    }


@pytest.mark.parametrize("precision", ["", "fp16"])
def test_lowered_it_agrees_with_the_reference_and_a_wrong_one_does_not(
    tmp_path: Path, precision: str
) -> None:
    kernels = kernels_of(replace(read(tmp_path, module(layers)), precision=precision), LLVM)
    assert {task.precision for task in kernels.tasks} == {precision or "fp32"}
    names = [output.name for output in kernels.model.outputs]

    def right(inputs: Arrays) -> Arrays:
        return dict(zip(names, run_lowered(kernels.lowered, inputs), strict=True))

    found = verify(right, kernels.model)
    assert found.verdict is Verdict.RIGHT, found.message
    stored = {str(weight.dtype) for weight in kernels.lowered.weights.values()}
    assert stored == {"float16" if precision else "float32"}
    assert verify(by_numpy_of, kernels.model).verdict is Verdict.RIGHT
    wrong = verify(lambda inputs: by_numpy(inputs["x"] * np.float32(1.1)), kernels.model)
    assert wrong.verdict is Verdict.WRONG
    assert "away from unscheduled TVM" in wrong.message


def by_numpy_of(inputs: Arrays) -> Arrays:
    return by_numpy(inputs["x"])


def test_functions_that_main_calls_become_a_part_of_it(tmp_path: Path) -> None:
    builder = relax.BlockBuilder()
    inner, x = (relax.Var(name, relax.TensorType(SHAPE, "float32")) for name in ("y", "x"))
    with builder.function("layer", [inner]):
        builder.emit_func_output(
            builder.emit(relax.op.nn.relu(relax.op.matmul(inner, relax.const(WEIGHTS[0]))))
        )
    layer = builder.get().get_global_var("layer")
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(layer(builder.emit(layer(x)))))
    (task,) = kernels_of(read(tmp_path, builder.get()), LLVM).tasks
    assert task.weight == 2


# --- what is refused ---------------------------------------------------------------------------


class Linear(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        self.fc = nn.Linear(256, 4)

    def main(self, x: nn.Tensor) -> nn.Tensor:
        return self.fc(x)


def with_open_weights() -> tvm.IRModule:
    return Linear().export_tvm({"main": {"x": nn.spec.Tensor(SHAPE, "float32")}})[0]


def relu(_: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
    return relax.op.nn.relu(x)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (with_open_weights, r"no values: fc\.weight, fc\.bias; bind them .*BindParams"),
        (lambda: module(relu, name="forward"), "no function main, only forward"),
        (
            lambda: module(relu, shape=(tvm.tirx.Var("n", "int64"), 8)),
            r"input 'x' .* of shape \[n, 8\].*BindSymbolicVars",
        ),
        (lambda: module(lambda _, x: relax.op.astype(x, "bfloat16")), "output.* type bfloat16"),
        (lambda: module(lambda _, x: relax.op.unique(x)), "output 'output' .* of unknown shape"),
        (tvm.IRModule, "no function main, only kernels"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_anything_is_written(
    tmp_path: Path, make: Callable[[], tvm.IRModule], problem: str
) -> None:
    with pytest.raises(ModelError, match=problem):
        tunerd.tune(make(), cpu_pct=50, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_bound_weights_are_constants(tmp_path: Path) -> None:
    weights = {"fc.weight": np.ones((4, 256), np.float32), "fc.bias": np.ones(4, np.float32)}
    bound = relax.transform.BindParams("main", weights)(with_open_weights())
    fixed = read(tmp_path, bound)
    assert [spec.name for spec in fixed.inputs] == ["x"]
    (found,) = fixed.graph.run([{"x": X}])
    np.testing.assert_allclose(found["output"], X.sum(1, keepdims=True) + np.ones(4), rtol=1e-3)


def test_sizes_are_the_module_s_own(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a Relax module of fixed sizes"):
        tunerd.plan(module(relu), cpu_pct=50, batch=4, out=tmp_path / "run")


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "net.relax").write_text("[]")
    with pytest.raises(ModelError, match=r"net\.relax is no Relax module"):
        read_model(tmp_path / "net.relax")
    with pytest.raises(ModelError, match="cannot be read"):
        read_model(tmp_path / "other.relax")


def test_other_values_are_no_model() -> None:
    with pytest.raises(InputError, match="is of type int"):
        tunerd.plan(42, cpu_pct=50)  # type: ignore[arg-type]


@I.ir_module
class Narrow:
    @T.prim_func(s_tir=True)
    def double(a: T.Buffer((64, 256), "float32"), b: T.Buffer((64, 256), "float32")) -> None:
        for i, j in T.grid(64, 256):
            with T.sblock("b"):
                vi, vj = T.axis.remap("SS", [i, j])
                b[vi, vj] = a[vi, vj] * T.float32(2)

    @R.function
    def main(x: R.Tensor((64, 256), "float32")) -> R.Tensor((64, 256), "float32"):
        cls = Narrow
        return R.call_tir(cls.double, (x,), out_ty=R.Tensor((64, 256), "float32"))


def test_kernels_of_narrow_sizes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no int64, .*: double; write T\.int64"):
        kernels_of(read(tmp_path, Narrow), LLVM)


def test_packed_functions_are_named(tmp_path: Path) -> None:
    def emit(_: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        return relax.op.call_dps_packed("mine", [x], out_ty=relax.TensorType(SHAPE, "float32"))

    with pytest.raises(ModelError, match="call_dps_packed"):
        kernels_of(read(tmp_path, module(emit)), LLVM)


# --- what is not known, and memory -------------------------------------------------------------


def test_moved_by_their_last_bits_weights_say_how_well_an_output_is_known() -> None:
    ways = RelaxGraph.of(module(layers)).ways([{"x": X}])
    assert ways is not None
    expected = by_numpy(X)
    for name, values in ways.known[0].items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-3, atol=1e-3)
        for (other,) in ways.others:
            assert not np.array_equal(other[name], values)
            np.testing.assert_allclose(other[name], values, rtol=1e-3, atol=1e-4)


def cancelling(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
    """Return what is left of two numbers that are much larger: its digits are rounding's."""
    far = relax.const(np.full(SHAPE, 2e4, np.float32))
    near = builder.emit(relax.op.subtract(builder.emit(relax.op.add(x, far)), far))
    return relax.op.matmul(near, relax.const(WEIGHTS[0]))


@pytest.mark.parametrize(("off", "verdict"), [(0.003, Verdict.RIGHT), (0.5, Verdict.WRONG)])
def test_an_output_that_rounding_moves_may_move_as_far_and_no_further(
    tmp_path: Path, off: float, verdict: Verdict
) -> None:
    model = kernels_of(read_model(save_in(tmp_path, RelaxGraph.of(module(cancelling)))), LLVM).model

    def run(given: Arrays) -> Arrays:
        (found,) = model.graph.run([given])
        moved = found["output"].copy()
        moved[0, 0] += off * np.abs(moved).max()
        return {"output": moved}

    assert verify(run, model).verdict is verdict


def test_a_module_that_does_not_fit_is_refused_before_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = RelaxGraph.of(module(layers))
    path = save_in(tmp_path, graph)
    monkeypatch.setattr("tunerd.frontend.onnx.memory.memory_bytes", lambda: 100 << 10)
    with pytest.raises(ModelError, match=r"to read and lower the model .* takes up to 0\.5 GiB"):
        read_model(path)
    with pytest.raises(ModelError, match="the model's inputs take"):
        RelaxGraph.of(module(layers))
