"""Signed weights of eight bits as unsigned ones of the same values, for ONNX Runtime's products.

Where a CPU lacks VNNI, ONNX Runtime multiplies unsigned by signed bytes and adds two such products
in 16 bits, which saturate (onnxruntime.ai/docs/performance/model-optimizations/quantization.html):
what it returns there is not the model's output. It adds products of two unsigned bytes whole. Its
own option for that, session.x64quantprecision, refuses graphs that have signed values as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tunerd.frontend.onnx.weights import values_of

if TYPE_CHECKING:
    import onnx

_MOVED_BY = 128
_UINT8, _INT8 = 2, 3  # of onnx.TensorProto, whose import takes a third of a second


class _Weight(NamedTuple):
    """A weight of a product, where it is read."""

    node: onnx.NodeProto
    at: int  # which input of the node it is
    zero_at: int  # and which its zero point, of the shape of
    scale: str  # its scale, "" for one number
    value: str  # what it is multiplied with
    value_zero: str  # and the zero point of that, "" where it has none


# Of operators on integers: the value, the weight, and their zero points. ConvInteger is not among
# them: it adds in 32 bits on any CPU.
_INTEGER_PRODUCTS = {
    "MatMulInteger": (0, 1, 2, 3),
    "QLinearConv": (0, 3, 2, 5),
    "QLinearMatMul": (0, 3, 2, 5),
}
_FLOAT_PRODUCTS = {"Conv", "Gemm", "MatMul"}  # which become such where their operands were integers


def with_unsigned_weights(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a graph that computes the same without products of unsigned by signed constants.

    It is `proto` itself where there are none.
    """
    import onnx

    if not any(_are_multiplied(proto.graph)):
        return proto
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    weights = {tensor.name: tensor for tensor in copy.graph.initializer}
    for weight in list(_are_multiplied(copy.graph)):
        _move(weight, copy.graph, weights)
    return copy


def _are_multiplied(graph: onnx.GraphProto) -> Iterator[_Weight]:
    """Yield the weights of int8 that values of uint8 are multiplied with."""
    types = _types(graph)
    makers = {name: node for node in graph.node for name in node.output}
    for node in graph.node:
        if (places := _INTEGER_PRODUCTS.get(node.op_type)) is not None:
            value, at, value_zero, zero_at = places
            found = _Weight(node, at, zero_at, "", node.input[value], _input(node, value_zero))
        elif node.op_type in _FLOAT_PRODUCTS:
            left, right = (makers.get(name) for name in node.input[:2])
            if left is None or right is None:
                continue
            if not left.op_type == right.op_type == "DequantizeLinear":
                continue
            found = _Weight(right, 0, 2, right.input[1], left.input[0], _input(left, 2))
        else:
            continue
        value_type = types.get(found.value_zero) or types.get(found.value)
        if value_type == _UINT8 and types.get(found.node.input[found.at]) == _INT8:
            yield found


def _move(weight: _Weight, graph: onnx.GraphProto, constants: dict[str, onnx.TensorProto]) -> None:
    """Have a node read a weight and its zero point with 128 added to both, if both are constant."""
    node, at, zero_at = weight.node, weight.at, weight.zero_at
    name, zero, scale = node.input[at], _input(node, zero_at), weight.scale
    if any(each and each not in constants for each in (name, zero or scale)):
        return
    if zero:
        zeros = values_of(constants[zero])
    else:
        zeros = np.zeros(tuple(constants[scale].dims) if scale else (), np.int8)
    given = [*node.input, *[""] * (zero_at + 1 - len(node.input))]
    given[at] = _moved(name, values_of(constants[name]), graph, constants)
    given[zero_at] = _moved(zero or f"{name}/zero", zeros, graph, constants)
    del node.input[:]
    node.input.extend(given)


def _moved(
    name: str,
    values: np.ndarray[Any, Any],
    graph: onnx.GraphProto,
    constants: dict[str, onnx.TensorProto],
) -> str:
    from onnx import numpy_helper

    unsigned = f"{name}/unsigned"
    if unsigned not in constants:
        moved = (values.astype(np.int16) + _MOVED_BY).astype(np.uint8)
        constants[unsigned] = numpy_helper.from_array(moved, unsigned)
        graph.initializer.append(constants[unsigned])
    return unsigned


def _input(node: onnx.NodeProto, number: int) -> str:
    return str(node.input[number]) if number < len(node.input) else ""


def _types(graph: onnx.GraphProto) -> dict[str, int]:
    """Return types by name, as far as they are written down; numbers of onnx.TensorProto."""
    found = {
        value.name: int(value.type.tensor_type.elem_type)
        for value in (*graph.input, *graph.value_info)
    }
    for node in graph.node:
        if node.op_type == "DynamicQuantizeLinear":
            found |= {node.output[0]: _UINT8, node.output[2]: _UINT8}
    return found | {tensor.name: int(tensor.data_type) for tensor in graph.initializer}
