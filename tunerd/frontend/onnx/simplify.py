"""Simplify an ONNX model of fixed shapes, and prove that the result computes the same."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import numpy as np

from tunerd.errors import ModelError
from tunerd.frontend.onnx.reference import Reference, agree
from tunerd.frontend.onnx.rewrites import expanded, rewrite_graph
from tunerd.system.arrays import random_inputs
from tunerd.vocabulary import Arrays, TensorSpec

if TYPE_CHECKING:
    import onnx

log = logging.getLogger(__name__)

_SMALL_CONSTANT = 4096  # elements: more are no shape, which inference would need the values of


def simplify(
    proto: onnx.ModelProto, inputs: tuple[TensorSpec, ...]
) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """Return a simpler model and notes on what could not be done.

    The result has the inputs and outputs of `proto`, the outputs with their shapes, and agrees
    with it in ONNX Runtime on seeded inputs; where it does not, less is done, in the end nothing.
    Raises ModelError where ONNX Runtime cannot run `proto`, or an output has no fixed shape.
    """
    feed = random_inputs(inputs, seed=0)
    expected = reference_outputs(proto, feed)
    notes: list[str] = []
    for name, first_step in (("simplified", _slim), ("cleaned up", infer_shapes)):
        try:
            simpler = infer_shapes(first_step(expanded(proto)))
            rewrite_graph(simpler)
            simpler = infer_shapes(simpler)
            got = Reference(simpler).run(feed)
        except Exception as error:  # onnxslim and ONNX Runtime raise many kinds
            log.info("not %s", name, exc_info=True)
            notes.append(f"not {name}: {last_line(error)}")
            continue
        wrong = [out for out, values in expected.items() if not agree(got[out], values)]
        if not wrong:
            return _with_output_types(simpler, feed, expected), tuple(notes)
        notes.append(f"not {name}: that gave other values for output '{wrong[0]}'")
    return _with_output_types(infer_shapes(proto), feed, expected), tuple(notes)


def reference_outputs(proto: onnx.ModelProto, feed: Arrays) -> Arrays:
    """Run `proto` in ONNX Runtime; raises ModelError where that fails."""
    try:
        return Reference(proto).run(feed)
    except Exception as error:  # ONNX Runtime's exceptions have no public base class
        shapes = ", ".join(f"{n}:{'x'.join(map(str, v.shape))}" for n, v in feed.items())
        raise ModelError(
            f"ONNX Runtime cannot run the model with inputs {shapes}: {last_line(error)}; "
            "check the shapes, or export the model again"
        ) from error


def _with_output_types(proto: onnx.ModelProto, feed: Arrays, expected: Arrays) -> onnx.ModelProto:
    """Write the shapes, and the types, of what `proto` gave for `feed` into it, and return it.

    Inference does not know every operator, and is wrong about some. Raises ModelError where other
    inputs give another shape.
    """
    from onnx import helper

    if any(_shape(o) != expected[o.name].shape for o in proto.graph.output):
        _require_fixed_shapes(proto, feed, expected)
    for value in proto.graph.output:
        values, tensor = expected[value.name], value.type.tensor_type
        if not tensor.elem_type:
            tensor.elem_type = helper.np_dtype_to_tensor_dtype(values.dtype)
        tensor.ClearField("shape")
        tensor.shape.SetInParent()  # a scalar has a shape of nothing
        for size in values.shape:
            tensor.shape.dim.add().dim_value = size
    return proto


def _require_fixed_shapes(proto: onnx.ModelProto, feed: Arrays, expected: Arrays) -> None:
    zeros = reference_outputs(proto, {n: np.zeros_like(v) for n, v in feed.items()})
    for name, values in expected.items():
        if values.shape != zeros[name].shape:
            raise ModelError(
                f"the shape of output '{name}' depends on the values of the inputs: it is "
                f"{list(values.shape)} or {list(zeros[name].shape)}; only models of fixed shapes "
                "can be tuned"
            )


def _shape(value: onnx.ValueInfoProto) -> tuple[int, ...] | None:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    return tuple(int(d.dim_value) for d in tensor.shape.dim)


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


def last_line(error: Exception) -> str:
    """Return the last line of an error's message: libraries put stack traces before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _slim(proto: onnx.ModelProto) -> onnx.ModelProto:
    import onnx
    import onnxslim

    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    # Gemm takes matrices only: around each fused one the importer sees two more Reshapes, which
    # keep it from fusing what follows.
    simpler = onnxslim.slim(copy, skip_fusion_patterns=["FusionGemm"])
    # It drops inputs that nothing reads, and callers pass them all the same.
    for field in ("input", "output"):
        simpler.graph.ClearField(field)
    simpler.graph.input.extend(proto.graph.input)
    simpler.graph.output.extend(proto.graph.output)
    return simpler
