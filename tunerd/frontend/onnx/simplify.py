"""Simplify an ONNX model of fixed shapes, and prove that the result computes the same."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from tunerd.errors import ModelError
from tunerd.frontend.onnx.builder import Refused
from tunerd.frontend.onnx.expansion import primitive, written_out
from tunerd.frontend.onnx.folding import folded
from tunerd.frontend.onnx.inference import (
    infer_shapes,
    weights_aside,
    weights_back,
    with_inputs_for,
)
from tunerd.frontend.onnx.loops import both_branches, unrolled_loops
from tunerd.frontend.onnx.reference import Reference, last_line
from tunerd.frontend.onnx.rewrites import rewrite_graph
from tunerd.frontend.onnx.uncertainty import differing
from tunerd.frontend.onnx.weights import tensors_apart
from tunerd.system.arrays import random_inputs
from tunerd.vocabulary import Arrays, TensorSpec

if TYPE_CHECKING:
    import onnx

log = logging.getLogger(__name__)

_MAX_DEPTH = 4  # of branches in branches


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
    apart = {tensor.name: tensor for tensor in tensors_apart(proto)}
    notes: list[str] = []
    for name, first_step in (("simplified", _slim), ("cleaned up", infer_shapes)):
        try:
            light, aside = weights_aside(primitive(with_inputs_for(proto, apart)))
            aside |= apart
            light = _without_branches(folded(light))
            simpler = written_out(infer_shapes(first_step(light)))
            rewrite_graph(simpler)
            simpler = infer_shapes(simpler)
            weights_back(simpler, aside)
            wrong = differing(proto, simpler, feed, expected)
        except Refused as error:
            raise ModelError(str(error)) from error
        except Exception as error:  # onnxslim and ONNX Runtime raise many kinds
            log.info("not %s", name, exc_info=True)
            notes.append(f"not {name}: {last_line(error)}")
            continue
        if not wrong:
            return _with_output_types(simpler, feed, expected), tuple(notes)
        notes.append(f"not {name}: that gave other values for output '{wrong}'")
    return _with_output_types(infer_shapes(proto), feed, expected), tuple(notes)


def _without_branches(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Choose branches by conditions that are constants by now, and take both of others."""
    for _ in range(_MAX_DEPTH):
        if not any(node.op_type in ("If", "Loop", "Scan") for node in proto.graph.node):
            break
        proto = folded(both_branches(folded(unrolled_loops(proto))))
    return proto


def reference_outputs(proto: onnx.ModelProto, feed: Arrays) -> Arrays:
    """Run `proto` in ONNX Runtime; raises ModelError where that fails."""
    try:
        return Reference(proto).run(feed)
    except Exception as error:  # ONNX Runtime's exceptions have no public base class
        shapes = ", ".join(f"{n}:{'x'.join(map(str, v.shape))}" for n, v in feed.items())
        whole = [name for name, values in feed.items() if values.dtype.kind in "iu"]
        numbers = (
            f", and whether {', '.join(whole)} may be 0 or 1: an input that has other values "
            "alone is a constant of the model (--constant NAME=NUMBER)"
        )
        raise ModelError(
            f"ONNX Runtime cannot run the model with inputs {shapes}: {last_line(error)}; "
            f"check the shapes{numbers if whole else ''}, or export the model again"
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
