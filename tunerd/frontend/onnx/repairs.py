"""Write what ONNX Runtime does not run as it is written, so that there is a reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tunerd.errors import ModelError
from tunerd.frontend.onnx.builder import Builder, Refused, attributes_of, decompose, inputs_of
from tunerd.frontend.onnx.folding import folded
from tunerd.frontend.onnx.graphs import subgraphs
from tunerd.frontend.onnx.inference import infer_shapes
from tunerd.frontend.onnx.suppression import bounded

if TYPE_CHECKING:
    import onnx

_OF_A_TYPE = ("to", "dtype", "stash_type", "output_dtype", "softmax_precision")  # attributes
_RECURRENT = ("LSTM", "GRU", "RNN")
_DIVISIONS = ("Div", "Mod")
_SUPPRESSION = "NonMaxSuppression"


def repaired(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """Return a graph of fixed input shapes that ONNX Runtime can run, and notes on its changes.

    Recurrent nodes with the batch first get transposes. A divisor of integers that is an input of
    the model counts as 1 where it is 0: that would end the process, and random inputs have zeros.
    NonMaxSuppression gives as many rows as it may select, those that it does not of -1.
    """
    given = {value.name for value in proto.graph.input}
    first = [n for n in proto.graph.node if n.op_type in _RECURRENT and _is_batch_first(n)]
    by_input = [n for n in proto.graph.node if n.op_type in _DIVISIONS and n.input[1] in given]
    suppressions = [n for n in proto.graph.node if n.op_type == _SUPPRESSION]
    if not first and not by_input and not suppressions:
        return proto, ()
    copy = folded(proto) if suppressions else infer_shapes(proto)
    divisions = 0

    def guarded(node: onnx.NodeProto, build: Builder) -> Sequence[str] | None:
        nonlocal divisions
        x, by = node.input
        dtype = build.dtype(by)
        if by not in given or dtype.kind not in "iu":
            return None
        divisions += 1
        wide = build.cast(by, np.int64)
        is_zero = build.op("Equal", wide, build.constant(0, np.int64))
        safe = build.cast(build.op("Add", wide, build.cast(is_zero, np.int64)), dtype)
        return [build.op(node.op_type, x, safe, **attributes_of(node))]

    table = dict.fromkeys(_RECURRENT, _batch_last) | dict.fromkeys(_DIVISIONS, guarded)
    try:
        decompose(copy, table | {_SUPPRESSION: bounded})
    except Refused as error:
        raise ModelError(str(error)) from error
    notes = ["integer divisors that are inputs count as 1 where they are 0"] if divisions else []
    notes += [
        f"output '{node.output[0]}' has as many rows as may be selected: unused ones are -1"
        for node in suppressions
    ]
    return copy, tuple(notes)


def widened(proto: onnx.ModelProto) -> tuple[str, ...]:
    """Make bfloat16 float32 in place, inputs and outputs too; notes where there was any.

    ONNX Runtime has no kernels of it on CPUs, and NumPy has no such type. Values stay as they are.
    """
    from onnx import TensorProto, numpy_helper

    found = False

    def widen(tensor: onnx.TensorProto) -> None:
        nonlocal found
        if tensor.data_type == TensorProto.BFLOAT16:
            found = True
            values = numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))

    for graph in subgraphs(proto.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            tensor_type = value.type.tensor_type
            if tensor_type.elem_type == TensorProto.BFLOAT16:
                found = True
                tensor_type.elem_type = TensorProto.FLOAT
        for tensor in graph.initializer:
            widen(tensor)
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.name in _OF_A_TYPE and attribute.i == TensorProto.BFLOAT16:
                    found = True
                    attribute.i = TensorProto.FLOAT
                if attribute.HasField("t"):
                    widen(attribute.t)
    note = "bfloat16 of the file is computed as float32; --precision bf16 stores it in 16 bits"
    return (note,) if found else ()


def _is_batch_first(node: onnx.NodeProto) -> bool:
    return bool(attributes_of(node).get("layout", 0))


def _batch_last(node: onnx.NodeProto, build: Builder) -> Sequence[str] | None:
    """Return a recurrent node's outputs with the batch first, of one that has the steps first."""
    if not _is_batch_first(node):
        return None
    inputs = inputs_of(node, 8 if node.op_type == "LSTM" else 6)
    for place in (0, 5, 6):  # the inputs, and the initial states
        if place < len(inputs) and inputs[place]:
            inputs[place] = build.transpose(inputs[place], 1, 0, 2)
    while inputs and not inputs[-1]:
        inputs.pop()
    others = {name: v for name, v in attributes_of(node).items() if name != "layout"}
    y, *states = build.ops(node.op_type, 3 if node.op_type == "LSTM" else 2, *inputs, **others)
    return [build.transpose(y, 2, 0, 1, 3), *(build.transpose(s, 1, 0, 2) for s in states)]
