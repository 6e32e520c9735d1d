"""Load a model's file: check it, fix its shapes, simplify it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from tunerd.errors import InputError, ModelError
from tunerd.frontend.onnx.batch import exported_batch, open_batch_shapes, with_batch
from tunerd.frontend.onnx.constants import fix_inputs
from tunerd.frontend.onnx.file import read_proto
from tunerd.frontend.onnx.io_types import with_io_precision
from tunerd.frontend.onnx.memory import require_memory
from tunerd.frontend.onnx.onnx_graph import OnnxGraph, spec_of
from tunerd.frontend.onnx.repairs import repaired, widened
from tunerd.frontend.onnx.shapes import Shape, declared_inputs, fix_shapes, resolve_shapes
from tunerd.frontend.onnx.weights import give_memory_back, values_of
from tunerd.frontend.relax.relax_graph import SUFFIX, RelaxGraph
from tunerd.vocabulary import Graph, Model, TensorSpec

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True)
class FixedModel:
    """A model as its file has it, checked, with every shape fixed."""

    name: str
    digest: str  # sha256 of the weights and the graph, hex
    inputs: tuple[TensorSpec, ...]
    graph: Graph = field(repr=False, compare=False)
    notes: tuple[str, ...] = ()  # what fixing had to change
    precision: str = ""  # that kernels are to compute in; "": as exported
    # Models of its architecture that a kernel is to serve at once; None: it serves one alone.
    tenants: int | None = None


def read_model(
    path: Path,
    *,
    shapes: Mapping[str, Shape] = MappingProxyType({}),
    dims: Mapping[str, int] = MappingProxyType({}),
    batch: int | None = None,
    precision: str = "",
    io_precision: str = "",
    constants: Mapping[str, float] = MappingProxyType({}),
    tenants: int | None = None,
) -> FixedModel:
    """Read an ONNX file, check it and fix every shape; or a Relax module, which has its own.

    shapes: full shapes by input name, for inputs with open dimensions.
    dims: sizes by the name of an open dimension.
    batch: the leading dimension of every input, where it is open or other than the exported one.
    precision: fp32, tf32, fp16 or bf16, that kernels are to compute in; "": as exported.
    io_precision: fp32 or fp16, that inputs and outputs of floating point have; "": the file's.
    constants: numbers by input name, of inputs that always have them.
    tenants: how many models of its architecture a kernel is to serve at once, in lanes.

    Raises ModelError where the file cannot be used or leaves dimensions open, and InputError where
    `shapes`, `dims` or `constants` do not fit it.
    """
    if path.suffix == SUFFIX:
        if shapes or dims or constants or batch is not None:
            raise InputError(
                f"--shape, --dim, --batch and --constant are of ONNX files, and {path} is a Relax "
                "module of fixed sizes; leave them out"
            )
        if io_precision:
            raise InputError(
                f"--io-precision is of ONNX files, and {path} is a Relax module, with types of "
                "its own; leave it out"
            )
        module = RelaxGraph.read(path)
        inputs = module.inputs()
        return FixedModel(path.stem, module.digest, inputs, module, (), precision, tenants)
    proto, weights = read_proto(path)
    fixed = fix_inputs(proto, constants)
    widening = widened(proto)
    if io_precision:
        widening += with_io_precision(proto, io_precision)
    declared = declared_inputs(proto.graph)
    notes: tuple[str, ...] = ()
    if batch is None:
        fix_shapes(proto, resolve_shapes(declared, shapes=shapes, dims=dims))
    else:
        leading = exported_batch(declared)
        declared = open_batch_shapes(declared, leading, dims)
        exported = resolve_shapes(declared, shapes=shapes, dims=dims)
        if batch == next(s[0] for s in exported.values() if s):
            fix_shapes(proto, exported)
        else:
            proto, notes = with_batch(proto, exported, batch)
    if not proto.graph.input or not proto.graph.output:
        lacks = "outputs" if proto.graph.input else "inputs"
        raise ModelError(
            f"the model has no {lacks}, and one of each is needed at least; export it again"
        )
    inputs = tuple(spec_of(i, "input") for i in proto.graph.input)
    require_memory(proto)
    digest = model_digest(proto)
    proto, repairs = repaired(proto)
    graph = OnnxGraph(proto, weights).with_weights_apart()
    del proto
    give_memory_back()
    notes = (*fixed, *widening, *notes, *repairs)
    return FixedModel(path.stem, digest, inputs, graph, notes, precision, tenants)


def simplified(model: FixedModel) -> Model:
    """Simplify a model, which takes seconds; ModelError where its reference cannot run it."""
    graph, notes = model.graph.simplified(model.inputs)
    return Model(
        name=model.name,
        digest=model.digest,
        inputs=model.inputs,
        outputs=graph.outputs(),
        graph=graph,
        notes=model.notes + notes,
        precision=model.precision,
    )


def model_digest(proto: onnx.ModelProto) -> str:
    """Return the sha256 of the graph and the weights, in hex.

    It does not depend on where weights are kept, on producer, comments or the order in which
    initializers and attributes are listed.
    """
    digest = hashlib.sha256()
    for opset in sorted((o.domain, o.version) for o in proto.opset_import):
        digest.update(repr(opset).encode())
    _digest_graph(proto.graph, digest)
    return digest.hexdigest()


def _digest_graph(graph: onnx.GraphProto, digest: hashlib._Hash) -> None:
    for value in (*graph.input, *graph.output):
        digest.update(_serialized(value))
    for tensor in sorted(graph.initializer, key=lambda t: str(t.name)):
        digest.update(f"{tensor.name}\n".encode())
        _digest_tensor(tensor, digest)
    for sparse in graph.sparse_initializer:
        digest.update(_serialized(sparse))
    for node in graph.node:
        ends = (node.domain, node.op_type, tuple(node.input), tuple(node.output))
        digest.update(repr(ends).encode())
        for attribute in sorted(node.attribute, key=lambda a: str(a.name)):
            digest.update(f"{attribute.name}\n".encode())
            if attribute.HasField("g"):
                _digest_graph(attribute.g, digest)
            elif attribute.HasField("t"):
                _digest_tensor(attribute.t, digest)
            else:
                digest.update(_serialized(attribute))


def _digest_tensor(tensor: onnx.TensorProto, digest: hashlib._Hash) -> None:
    import onnx

    if tensor.data_type == onnx.TensorProto.STRING:  # whose bytes need not be text
        digest.update(f"{tensor.data_type} {tuple(tensor.dims)}\n".encode())
        digest.update(repr(list(tensor.string_data)).encode())
        return
    values = values_of(tensor)
    digest.update(f"{tensor.data_type} {values.shape}\n".encode())
    digest.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


def _serialized(
    message: onnx.ValueInfoProto | onnx.AttributeProto | onnx.SparseTensorProto,
) -> bytes:
    copy = type(message)()
    copy.CopyFrom(message)
    for name in ("doc_string", "metadata_props"):
        if name in message.DESCRIPTOR.fields_by_name:
            copy.ClearField(name)
    return bytes(copy.SerializeToString(deterministic=True))
