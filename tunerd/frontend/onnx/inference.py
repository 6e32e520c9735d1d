"""The shapes of a graph's values, as far as they can be known without running it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from tunerd.errors import ModelError
from tunerd.frontend.onnx.graphs import uses
from tunerd.frontend.onnx.reference import last_line

if TYPE_CHECKING:
    import onnx

_SMALL_CONSTANT = 4096  # elements: more are no shape, which inference would need the values of

# Operators that read a weight as it is, and which of their inputs that is.
_OPERANDS = {"MatMul": 1, "Gemm": 1, "Conv": 1, "ConvTranspose": 1, "Gather": 0}


def infer_shapes(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy with the shapes of all intermediate values, as far as they can be known.

    Raises ModelError where the graph is too odd for that.
    """
    import onnx

    inferred = shapes_without_weights(proto).graph
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for field in ("node", "output", "value_info"):  # subgraphs are in nodes
        copy.graph.ClearField(field)
    copy.graph.node.extend(inferred.node)
    copy.graph.output.extend(inferred.output)
    copy.graph.value_info.extend(inferred.value_info)
    return copy


def shapes_without_weights(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy with the shapes of all values, in which large constants are inputs.

    Inference copies what it is given, again and again, and asks for small constants only: shapes,
    axes, sizes. Raises ModelError where the graph is too odd for that.
    """
    from onnx import shape_inference

    large = [t for t in proto.graph.initializer if math.prod(t.dims) > _SMALL_CONSTANT]
    light = with_inputs_for(proto, {tensor.name: tensor for tensor in large})
    light.graph.ClearField("value_info")  # which is to be inferred
    try:
        return shape_inference.infer_shapes(light, data_prop=True)
    except Exception as error:  # of onnx's native code, which raises many kinds
        raise ModelError(
            f"the model's shapes cannot be inferred: {last_line(error)}; export it again"
        ) from error


def weights_aside(
    proto: onnx.ModelProto,
) -> tuple[onnx.ModelProto, dict[str, onnx.TensorProto]]:
    """Return a copy in which large weights are inputs, and these weights by name.

    What rewrites a graph copies all that it holds, again and again. Weights that products and
    lookups read as they are, and that nothing after them can be folded into, it need not see.
    `weights_back` puts them back.
    """
    graph = proto.graph
    known = {v.name for v in graph.input} | {o.name for o in graph.output}
    constants = {t.name for t in graph.initializer}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    counts = uses(graph)  # subgraphs' too

    def is_read_as_it_is(name: str) -> bool:
        of = readers.get(name, [])
        return counts[name] == len(of) and all(
            _OPERANDS.get(node.op_type) == list(node.input).index(name)
            and not any(_folds(after, constants) for after in readers.get(node.output[0], ()))
            for node in of
        )

    def is_aside(tensor: onnx.TensorProto) -> bool:
        is_large = math.prod(tensor.dims) > _SMALL_CONSTANT and tensor.name not in known
        return is_large and is_read_as_it_is(tensor.name)

    aside = {t.name: t for t in graph.initializer if is_aside(t)}
    return with_inputs_for(proto, aside), aside


def with_inputs_for(
    proto: onnx.ModelProto, weights: Mapping[str, onnx.TensorProto]
) -> onnx.ModelProto:
    """Return a copy in which some weights are inputs; nothing of their values is copied."""
    import onnx
    from onnx import helper

    graph, light = proto.graph, onnx.ModelProto(ir_version=proto.ir_version)
    light.opset_import.extend(proto.opset_import)
    light.functions.extend(proto.functions)
    for field in ("node", "input", "output", "value_info", "sparse_initializer"):
        getattr(light.graph, field).extend(getattr(graph, field))
    light.graph.name = graph.name
    light.graph.initializer.extend(t for t in graph.initializer if t.name not in weights)
    known = {value.name for value in graph.input}
    light.graph.input.extend(
        helper.make_tensor_value_info(t.name, t.data_type, t.dims)
        for t in weights.values()
        if t.name not in known
    )
    return light


def _folds(node: onnx.NodeProto, constants: Collection[str]) -> bool:
    """Whether a node after a product may become a part of its weights."""
    if node.op_type in ("BatchNormalization", "Pad"):
        return True
    return node.op_type in ("Mul", "Div") and any(n in constants for n in node.input)


def weights_back(proto: onnx.ModelProto, aside: Mapping[str, onnx.TensorProto]) -> None:
    """Put weights that `weights_aside` took back where they are still read, in place."""
    graph = proto.graph
    inputs = [v for v in graph.input if v.name not in aside]
    del graph.input[:]
    graph.input.extend(inputs)
    counts = uses(graph)
    graph.initializer.extend(t for name, t in aside.items() if counts[name])
