"""Compute once what does not depend on a model's inputs: constants, and shapes that are known."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import numpy as np

from tunerd.frontend.onnx.graphs import STANDARD_DOMAINS, replace_nodes, subgraphs
from tunerd.frontend.onnx.inference import infer_shapes
from tunerd.frontend.onnx.reference import Reference

if TYPE_CHECKING:
    import onnx

log = logging.getLogger(__name__)

_MAX_ROUNDS = 64  # each knows shapes that the one before computed
_MAX_ELEMENTS = 1 << 20  # of a value: what is larger is a weight, which stays as it is
# Their results are random, no tensors, or what later passes look for.
_KEPT = {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform"}
_KEPT |= {"RandomUniformLike", "QuantizeLinear", "DequantizeLinear"}
_KEPT |= {"SequenceConstruct", "SequenceEmpty", "SplitToSequence", "Optional"}


def folded(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy, its shapes inferred, in which nodes that compute constants are constants.

    Exporters write shapes as graphs of thousands of nodes, and a simplifier walks all of them again
    for each that it folds. One run of ONNX Runtime computes them together. Where that fails, the
    copy has its shapes inferred and no more.
    """
    proto = infer_shapes(proto)
    for _ in range(_MAX_ROUNDS):
        try:
            if not _fold(proto):
                break
            proto = infer_shapes(proto)
        except Exception:  # ONNX Runtime's exceptions have no public base class
            log.info("constants not folded", exc_info=True)
            break
    return proto


def _fold(proto: onnx.ModelProto) -> bool:
    """Fold what is known now, in place; say whether anything was."""
    from onnx import numpy_helper

    graph = proto.graph
    shapes = _fixed_shapes(graph)
    inputs = {value.name for value in graph.input}
    known = {t.name for t in graph.initializer} - inputs
    outputs = {value.name for value in graph.output}
    values: dict[str, np.ndarray] = {}  # of shapes
    folding: list[onnx.NodeProto] = []
    left: list[onnx.NodeProto] = []
    for node in graph.node:
        if (value := _known_shape(node, shapes)) is not None and node.output[0] not in outputs:
            values[node.output[0]] = value
        elif _is_folded(node, known, shapes) and not outputs & set(node.output):
            folding.append(node)
        else:
            left.append(node)
            continue
        known |= set(node.output)
    if not values and not any(node.op_type != "Constant" for node in folding):
        return False
    read = {name for node in left for name in _read_by(node)}
    wanted = [n for node in folding for n in node.output if n in read]
    found = {name: value for name, value in values.items() if name in read}
    if wanted:
        found |= _computed(proto, folding, values, wanted)
    replace_nodes(graph, left)
    graph.initializer.extend(numpy_helper.from_array(v, name) for name, v in found.items())
    return True


def _is_folded(node: onnx.NodeProto, known: set[str], shapes: dict[str, tuple[int, ...]]) -> bool:
    if node.domain not in STANDARD_DOMAINS or node.op_type in _KEPT:
        return False
    if any(a.HasField("g") or a.graphs for a in node.attribute):
        return False
    large = (math.prod(shapes.get(name, ())) > _MAX_ELEMENTS for name in node.output)
    return all(name in known for name in node.input if name) and not any(large)


def _known_shape(node: onnx.NodeProto, shapes: dict[str, tuple[int, ...]]) -> np.ndarray | None:
    if node.op_type not in ("Shape", "Size") or node.domain not in STANDARD_DOMAINS:
        return None
    shape = shapes.get(node.input[0])
    if shape is None:
        return None
    if node.op_type == "Size":
        return np.array(math.prod(shape), np.int64)
    given = {a.name: a.i for a in node.attribute}
    return np.array(shape[given.get("start", 0) : given.get("end", len(shape))], np.int64)


def _fixed_shapes(graph: onnx.GraphProto) -> dict[str, tuple[int, ...]]:
    found = {t.name: tuple(t.dims) for t in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        tensor = value.type.tensor_type
        if tensor.HasField("shape") and all(d.HasField("dim_value") for d in tensor.shape.dim):
            found[value.name] = tuple(int(d.dim_value) for d in tensor.shape.dim)
    return found


def _read_by(node: onnx.NodeProto) -> set[str]:
    """Name what a node reads, and what the graphs inside of it do."""
    found = set(node.input)
    for attribute in node.attribute:
        for graph in ([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs):
            for part in subgraphs(graph):
                found |= {name for inner in part.node for name in inner.input}
                found |= {output.name for output in part.output}
    return found


def _computed(
    proto: onnx.ModelProto,
    nodes: list[onnx.NodeProto],
    values: dict[str, np.ndarray],
    wanted: list[str],
) -> dict[str, np.ndarray]:
    import onnx
    from onnx import helper, numpy_helper

    read = {name for node in nodes for name in node.input}
    tensors = [t for t in proto.graph.initializer if t.name in read]
    tensors += [numpy_helper.from_array(v, name) for name, v in values.items() if name in read]
    # ONNX Runtime finds the types of outputs by itself.
    outputs = [onnx.ValueInfoProto(name=name) for name in wanted]
    graph = helper.make_graph(nodes, "constants", [], outputs, tensors)
    part = helper.make_model(graph, opset_imports=proto.opset_import, ir_version=proto.ir_version)
    return Reference(part).run({})
