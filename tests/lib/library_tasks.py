"""Tasks that libraries take, and where their calls go on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tunerd
from tests.contract.test_sources import for_gpu
from tests.contract.test_triton import kernels
from tests.lib.build_fixtures import LLVM, task_of
from tests.lib.fake_cublaslt import FakeCublasLt
from tunerd.artifacts.compile import compile_artifact
from tunerd.artifacts.loading import LoadedModel
from tunerd.builder.library import load_tvm
from tunerd.candidates import registry
from tunerd.frontend.kernels import Kernels
from tunerd.libraries import calls, packages
from tunerd.system.targets import cuda_target
from tunerd.vocabulary import CUBLASLT, FP16, FP32, Candidate, TargetSpec, Task

SOURCE = registry.SOURCES[CUBLASLT]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCublasLt:
    made = FakeCublasLt()
    monkeypatch.setattr(packages, "load", lambda name: made)
    return made


def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have calls go where there is no GPU."""

    class Runtime:
        def cudaSetDevice(self, device: int) -> int:
            return 0

        def cudaGetDevice(self, place: Any) -> int:
            place._obj.value = 0
            return 0

    monkeypatch.setattr(calls, "_cudart", Runtime)
    monkeypatch.setattr(calls, "_handles", {})
    monkeypatch.setattr(calls, "_plans", {})


def default_and_tuned(
    found: Kernels,
    winners: Mapping[str, Candidate],
    *,
    folder: Path,
    target: TargetSpec = LLVM,
    pct: int = 40,
) -> Iterator[LoadedModel]:
    """Compile a model in two folders, `default` and `tuned`, and yield each when it is loaded."""
    for name, chosen in (("default", {}), ("tuned", winners)):
        made = compile_artifact(
            found.lowered,
            found.tasks,
            chosen,
            target,
            folder / name,
            model=found.model,
            pct=pct,
        )
        yield tunerd.load(made)


def product(left: Any, right: Any, transposed: str = "NN") -> Any:
    from tvm import topi

    return topi.nn.matmul(
        left, right, transpose_a=transposed[0] == "T", transpose_b=transposed[1] == "T"
    )


def tensors(name: str) -> list[Any]:
    """Return the tensors of a kernel, its result last."""
    load_tvm()
    from tvm import te, topi

    def place(*shape: int, name: str) -> Any:
        return te.placeholder(shape, name=name)

    x, w = place(6, 16, name="x"), place(16, 10, name="w")
    bias, residual = place(10, name="bias"), place(6, 10, name="residual")
    if name == "plain":
        return [x, w, product(x, w)]
    if name == "of columns that lie together":
        w = place(10, 16, name="w")
        return [x, w, product(x, w, "NT")]
    if name == "of rows that lie together":
        x = place(16, 6, name="x")
        return [x, w, product(x, w, "TN")]
    if name == "with a bias":
        return [x, w, bias, topi.add(product(x, w), bias)]
    if name == "with a bias and ReLU":
        return [x, w, bias, topi.nn.relu(topi.add(product(x, w), bias))]
    if name == "with a residual":
        return [x, w, residual, topi.add(residual, product(x, w))]
    if name == "with bias, residual and ReLU":
        summed = topi.add(topi.add(product(x, w), bias), residual)
        return [x, w, bias, residual, topi.nn.relu(summed)]
    if name == "scaled":
        return [x, w, topi.multiply(product(x, w), te.const(0.25, "float32"))]
    if name == "with GELU by tanh":
        return [x, w, bias, gelu(topi.add(product(x, w), bias))]
    if name == "with GELU by tanh, and no bias":
        return [x, w, gelu(product(x, w))]
    if name == "in batches":
        x, z = place(3, 6, 16, name="x"), place(3, 16, 10, name="z")
        return [x, z, topi.nn.batch_matmul(x, z, transpose_a=False, transpose_b=False)]
    if name == "in batches of one weight":
        x = place(3, 5, 16, name="x")
        k = te.reduce_axis((0, 16), "k")
        out = te.compute((3, 5, 10), lambda b, i, j: te.sum(x[b, i, k] * w[k, j], axis=k))
        return [x, w, out]
    if name == "of heads that lie beside each other":
        x, z = place(5, 3, 16, name="x"), place(7, 3, 16, name="z")
        k = te.reduce_axis((0, 16), "k")
        out = te.compute((3, 5, 7), lambda h, i, j: te.sum(x[i, h, k] * z[j, h, k], axis=k))
        return [x, z, out]
    if name == "as a convolution of one tap":
        data, weight = place(1, 5, 7, 16, name="data"), place(1, 1, 16, 10, name="weight")
        made = topi.nn.conv2d_nhwc(data, weight, 1, 0, 1)
        return [data, weight, bias, topi.nn.relu(topi.add(made, bias))]
    if name == "with a vector":
        x = place(1, 16, name="x")
        return [x, w, bias, topi.add(product(x, w), bias)]
    raise AssertionError(name)


def gelu(x: Any) -> Any:
    from tvm import te

    def of(value: Any) -> Any:
        inner = value + te.const(0.044715, "float32") * value * value * value
        return 0.5 * value * (1.0 + te.tanh(te.const(0.7978845608028654, "float32") * inner))

    return te.compute(x.shape, lambda *at: of(x(*at)))


MATCHED = (
    "plain",
    "of columns that lie together",
    "of rows that lie together",
    "with a bias",
    "with a bias and ReLU",
    "with a residual",
    "with bias, residual and ReLU",
    "scaled",
    "with GELU by tanh",
    "with GELU by tanh, and no bias",
    "in batches",
    "in batches of one weight",
    "of heads that lie beside each other",
    "as a convolution of one tap",
    "with a vector",
)


def gpu_task(made: list[Any], precision: str = FP32) -> Task:
    return replace(for_gpu(task_of(made), cuda_target("9.0")), precision=precision)


def pointwise() -> Kernels:
    """Lower two convolutions of one tap in fp16, the second with a residual, for a GPU."""
    nodes: list[Any] = [
        ("Conv", ["x", "w1", "b1"], "a", {"pads": [1, 1, 1, 1]}),
        ("Relu", ["a"], "b", {}),
        ("Conv", ["b", "w2", "b2"], "c", {}),
        ("Relu", ["c"], "d", {}),
        ("Conv", ["d", "w3", "b3"], "e", {}),
        ("Add", ["e", "b"], "f", {}),
        ("Relu", ["f"], "g", {}),
        ("Conv", ["g", "w4", "b1"], "y", {"pads": [1, 1, 1, 1]}),
    ]
    weights = {
        "w1": (64, 3, 3, 3),
        "b1": (64,),
        "w2": (32, 64, 1, 1),
        "b2": (32,),
        "w3": (64, 32, 1, 1),
        "b3": (64,),
        "w4": (64, 64, 3, 3),
    }
    return kernels(nodes, {"x": (1, 3, 14, 14)}, weights, precision=FP16)
