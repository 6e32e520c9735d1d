"""The shapes of a graph's values, as far as they can be known without running it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tunerd.errors import ModelError
from tunerd.frontend.onnx.reference import last_line

if TYPE_CHECKING:
    import onnx

_SMALL_CONSTANT = 4096  # elements: more are no shape, which inference would need the values of


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
    import onnx
    from onnx import helper, shape_inference

    light = onnx.ModelProto(ir_version=proto.ir_version)
    light.opset_import.extend(proto.opset_import)
    light.functions.extend(proto.functions)
    light.graph.name = proto.graph.name
    light.graph.node.extend(proto.graph.node)
    light.graph.input.extend(proto.graph.input)
    light.graph.output.extend(proto.graph.output)
    light.graph.sparse_initializer.extend(proto.graph.sparse_initializer)
    known = {value.name for value in proto.graph.input}
    for tensor in proto.graph.initializer:
        if math.prod(tensor.dims) <= _SMALL_CONSTANT:
            light.graph.initializer.append(tensor)
        elif tensor.name not in known:
            light.graph.input.append(
                helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            )
    try:
        return shape_inference.infer_shapes(light, data_prop=True)
    except Exception as error:  # of onnx's native code, which raises many kinds
        raise ModelError(
            f"the model's shapes cannot be inferred: {last_line(error)}; export it again"
        ) from error
