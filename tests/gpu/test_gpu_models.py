"""Models with their default schedules on a real GPU: their numbers are those of ONNX Runtime."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from tests.lib import ROOT
from tests.lib.artifact_fixtures import model_of, tiny_convnet
from tunerd.artifacts.compile import compile_artifact
from tunerd.frontend.relax.lowering import lower
from tunerd.frontend.tasks import extract_tasks
from tunerd.runner.base import Runner
from tunerd.runs.finals.verify import verify
from tunerd.slices.base import Plan
from tunerd.slices.whole import WholeSlice
from tunerd.vocabulary import Model, TargetSpec
from tunerd.vocabulary.verdict import Verdict

pytestmark = pytest.mark.gpu

SHAPE = (2, 4, 6, 6)


@pytest.fixture(scope="module")
def whole(whole_gpu: Plan) -> Iterator[tuple[Runner, TargetSpec]]:
    """A runner on the first GPU, and the target to compile for."""
    with WholeSlice(whole_gpu.slices[0]) as measured:
        yield measured.launch(), whole_gpu.target


def chain(*operators: tuple[str, dict[str, Any]], **constants: Any) -> Model:
    """Return a model of operators one after the other; a constant named so is the second input."""
    nodes, source = [], "x"
    for i, (operator, attributes) in enumerate(operators):
        output = "y" if i == len(operators) - 1 else f"v{i}"
        second = [operator] if operator in constants else []
        nodes.append(helper.make_node(operator, [source, *second], [output], **attributes))
        source = output
    weights = {name: np.asarray(value) for name, value in constants.items()}
    return model_of(nodes, weights, inputs={"x": SHAPE}, outputs={"y": SHAPE})


RNG = np.random.default_rng(0)


def joining() -> Model:
    """Return convolutions that write into one tensor, and read what is part of it there."""
    nodes, joined, weights = [], "x", {}
    for i in range(2):
        channels = SHAPE[1] + 8 * i
        weights |= {f"w{i}": RNG.normal(size=(4, channels, 3, 3)) / 8}
        weights |= {f"p{i}": RNG.normal(size=(4 if i else 8, channels, 1, 1)) / 4}
        nodes += [
            helper.make_node("Conv", [joined, f"p{i}"], [f"a{i}"]),
            helper.make_node("Conv", [joined, f"w{i}"], [f"b{i}"], pads=[1] * 4),
            helper.make_node("Concat", [*([joined] * i), f"a{i}", f"b{i}"], [f"j{i}"], axis=1),
        ]
        joined = f"j{i}"
    weights["last"] = RNG.normal(size=(SHAPE[1], 20, 1, 1)) / 4
    nodes.append(helper.make_node("Conv", [joined, "last"], ["y"]))
    return model_of(nodes, weights, inputs={"x": SHAPE}, outputs={"y": SHAPE})


MODELS = {
    "several kernels": tiny_convnet(),
    "square of what is below zero": chain(("Pow", {}), Pow=2.0),
    "cube of what is below zero": chain(("Pow", {}), Pow=3.0),
    "negative power": chain(("Pow", {}), Pow=-3.0),
    "tanh": chain(("Tanh", {})),
    "sine": chain(("Mul", {}), ("Sin", {}), Mul=100.0),
    "erf": chain(("Erf", {})),
    "softmax": chain(("Softmax", {"axis": -1})),
    "exponential": chain(("Exp", {}), ("Log", {}), ("Sigmoid", {})),
    "grouped 1x1 convolution": chain(("Conv", {"group": 2}), Conv=RNG.normal(size=(4, 2, 1, 1))),
    "depthwise convolution": chain(
        ("Conv", {"group": 4, "pads": [1, 1, 1, 1]}), Conv=RNG.normal(size=(4, 1, 3, 3))
    ),
    "joined in place": joining(),
    "nothing": chain(("Identity", {})),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_default_schedules_agree_with_onnx_runtime(
    whole: tuple[Runner, TargetSpec], tmp_path: Path, name: str
) -> None:
    measured, target = whole
    model = MODELS[name]
    lowered = lower(model, target)
    folder = compile_artifact(
        lowered, extract_tasks(lowered, target), {}, target, tmp_path / "a", model=model, pct=100
    )
    found = verify(lambda inputs: measured.run_model(str(folder), inputs), model)
    assert found.verdict is Verdict.RIGHT, found.message


@pytest.mark.parametrize("name", ["several kernels", "joined in place"])
def test_a_model_gives_the_same_on_streams_and_captured(
    whole: tuple[Runner, TargetSpec], tmp_path: Path, name: str
) -> None:
    _, target = whole
    model = MODELS[name]
    lowered = lower(model, target)
    tasks = extract_tasks(lowered, target)
    compile_artifact(lowered, tasks, {}, target, tmp_path / "a", model=model, pct=100)
    command = [sys.executable, "-m", "tests.lib.captured_models", tmp_path / "a"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "all the same\n", done.stderr
