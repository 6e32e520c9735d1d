"""Tiny ONNX models for tests, and the example models of scripts/make-models."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.lib import ROOT
from tunerd.frontend.model import read_model, simplified
from tunerd.frontend.onnx.shapes import Shape
from tunerd.vocabulary import Model

Dims = Sequence[int | str | None]


def script(name: str) -> ModuleType:
    """Return a Python script of scripts/, whose file has no suffix, as a module."""
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / "scripts" / name))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def load_model(
    path: Path,
    *,
    shapes: Mapping[str, Shape] = MappingProxyType({}),
    dims: Mapping[str, int] = MappingProxyType({}),
    batch: int | None = None,
) -> Model:
    """Read an ONNX file and simplify what it holds, as `read_model` and `simplified` do."""
    return simplified(read_model(path, shapes=shapes, dims=dims, batch=batch))


def example_models() -> ModuleType:
    """Return scripts/make-models as a module: `make(name)`, `transformer_encoder(...)`."""
    return script("make-models")


def model(
    nodes: Sequence[onnx.NodeProto],
    *,
    inputs: Mapping[str, Dims],
    outputs: Mapping[str, Dims | None],
    weights: Mapping[str, np.ndarray] | None = None,
    opset: int = 17,
) -> onnx.ModelProto:
    """Return a model of these nodes; all inputs and outputs are float32."""
    graph = helper.make_graph(
        list(nodes),
        "tiny",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, d) for n, d in inputs.items()],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, d) for n, d in outputs.items()],
        [numpy_helper.from_array(v, n) for n, v in (weights or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def not_imported() -> onnx.ModelProto:
    """Return a model whose operator TVM's importer fails on: it reads a list of a constant."""
    node = helper.make_node(
        "MaxUnpool", ["x", "places", "shape"], ["y"], kernel_shape=[2, 2], strides=[2, 2]
    )
    weights = {
        "places": np.array([[[[5, 7], [13, 15]]]], np.int64),
        "shape": np.array([1, 1, 5, 5], np.int64),
    }
    return model([node], inputs={"x": (1, 1, 2, 2)}, outputs={"y": (1, 1, 5, 5)}, weights=weights)


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, *shape])
    return (rng.standard_normal(shape) / np.sqrt(max(1, np.prod(shape[1:])))).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def conv_net(
    dims: Dims = (1, 3, 16, 16), *, channels: int = 8, classes: int = 5
) -> onnx.ModelProto:
    """Return Conv, Relu, Conv, residual Sum, global pooling, Gemm; works for any batch and size."""
    nodes = [
        helper.make_node("Conv", ["images", "w1", "b1"], ["c1"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2", "b2"], ["c2"], pads=[1, 1, 1, 1]),
        helper.make_node("Sum", ["c2", "r1"], ["s"]),
        helper.make_node("GlobalAveragePool", ["s"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("Gemm", ["flat", "w3", "b3"], ["scores"], transB=1),
    ]
    weights = {
        "w1": floats(channels, 3, 3, 3),
        "b1": floats(channels),
        "w2": floats(channels, channels, 3, 3),
        "b2": floats(channels, seed=1),
        "w3": floats(classes, channels),
        "b3": floats(classes),
    }
    outputs: dict[str, Dims | None] = {"scores": (dims[0], classes)}
    return model(nodes, inputs={"images": dims}, outputs=outputs, weights=weights)


def shape_arithmetic_net(dims: Dims) -> onnx.ModelProto:
    """Return a convolution and Shape, Gather, Concat, Reshape, as exporters write `view(n, -1)`."""
    nodes = [
        helper.make_node("Conv", ["images", "w1"], ["c"], strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("Shape", ["c"], ["shape"]),
        helper.make_node("Gather", ["shape", "zero"], ["n"], axis=0),
        helper.make_node("Unsqueeze", ["n", "axes"], ["n1"]),
        helper.make_node("Concat", ["n1", "rest"], ["target"], axis=0),
        helper.make_node("Reshape", ["c", "target"], ["flat"]),
        helper.make_node("Relu", ["flat"], ["out"]),
    ]
    weights = {
        "w1": floats(4, 3, 3, 3),
        "zero": np.array(0, np.int64),
        "axes": ints(0),
        "rest": ints(-1),
    }
    outputs: dict[str, Dims | None] = {"out": ("n", "f")}
    return model(nodes, inputs={"images": dims}, outputs=outputs, weights=weights)


def flattening_net(*, target: Sequence[int], batch: int = 1) -> onnx.ModelProto:
    """Return a convolution whose output is reshaped to a constant target, and a Gemm after it."""
    nodes = [
        helper.make_node("Conv", ["images", "w1"], ["c"], name="conv"),
        helper.make_node("Reshape", ["c", "target"], ["flat"], name="flatten"),
        helper.make_node("Gemm", ["flat", "w2"], ["out"], name="classify"),
    ]
    weights = {"w1": floats(4, 3, 3, 3), "target": ints(*target), "w2": floats(64, 5)}
    return model(
        nodes, inputs={"images": (batch, 3, 6, 6)}, outputs={"out": (batch, 5)}, weights=weights
    )


def two_products() -> onnx.ModelProto:
    """Return two kernels and no more."""
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["p0"]),
        helper.make_node("Relu", ["p0"], ["r0"]),
        helper.make_node("MatMul", ["r0", "w1"], ["p1"]),
        helper.make_node("Relu", ["p1"], ["y"]),
    ]
    weights = {"w0": floats(256, 384), "w1": floats(384, 256)}
    return model(nodes, inputs={"x": (64, 256)}, outputs={"y": (64, 256)}, weights=weights)
