"""Find the ONNX node that TVM fails on, where an error does not say it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tunerd.errors import ModelError
from tunerd.frontend.onnx.builder import Builder
from tunerd.frontend.onnx.inference import infer_shapes
from tunerd.frontend.onnx.onnx_graph import OnnxGraph
from tunerd.vocabulary import Model, TensorSpec

if TYPE_CHECKING:
    import onnx

log = logging.getLogger(__name__)


def guilty_node(model: Model, lower: Callable[[Model], object]) -> str:
    """Return "Pow 'name'", the first node that `lower` fails on alone; "" where there is none.

    Passes of TVM do not know from which node an expression came, so that each is tried as a model
    of its own, as often as it is another one.
    """
    if not isinstance(model.graph, OnnxGraph):
        return ""
    try:
        proto = infer_shapes(model.graph.proto)
    except ModelError:
        return ""
    known = Builder(proto)
    tried: set[bytes] = set()
    for node in proto.graph.node:
        try:
            alone = replace(model, **_alone(node, known, proto))
        except ValueError:  # something of it is not known
            continue
        key = _key(node, known)
        if key in tried:
            continue
        tried.add(key)
        try:
            lower(alone)
        except ModelError:
            continue  # a refusal, which a sentence of its own tells
        except Exception:
            log.info("%s fails alone", node.op_type, exc_info=True)
            return f"{node.op_type} '{node.name or node.output[0]}'"
    return ""


def _key(node: onnx.NodeProto, known: Builder) -> bytes:
    """Return what makes two nodes the same to TVM: what they do, to which types."""
    bare = type(node)()
    bare.CopyFrom(node)
    for field in ("name", "doc_string", "input", "output"):
        bare.ClearField(field)
    parts = [bare.SerializeToString(deterministic=True)]
    for name in node.input:
        constant = known.value(name) if name else None
        parts.append(known.type_proto(name).SerializeToString(deterministic=True))
        parts.append(b"" if constant is None or constant.size > 64 else constant.tobytes())
    return b"|".join(parts)


def _alone(node: onnx.NodeProto, known: Builder, model: onnx.ModelProto) -> dict[str, Any]:
    """Return the graph, the inputs and the outputs of a model of one node."""
    from onnx import helper, numpy_helper

    names = [name for name in dict.fromkeys(node.input) if name]
    constants = {name: known.value(name) for name in names}
    specs = tuple(_spec(n, known) for n in names if constants[n] is None)
    outputs = tuple(_spec(name, known) for name in node.output if name)

    def infos(values: tuple[TensorSpec, ...]) -> list[onnx.ValueInfoProto]:
        return [helper.make_value_info(v.name, known.type_proto(v.name)) for v in values]

    graph = helper.make_graph(
        [node],
        "alone",
        infos(specs),
        infos(outputs),
        [numpy_helper.from_array(v, n) for n, v in constants.items() if v is not None],
    )
    proto = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    return {"graph": OnnxGraph(proto), "inputs": specs, "outputs": outputs}


def _spec(name: str, known: Builder) -> TensorSpec:
    return TensorSpec(name, known.shape(name), str(known.dtype(name)))
