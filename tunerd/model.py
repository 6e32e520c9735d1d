"""Load an ONNX file: check it, fix its shapes, simplify it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from tunerd.batch import exported_batch, open_batch_shapes, with_batch
from tunerd.errors import ModelError
from tunerd.rewrites import subgraphs
from tunerd.shapes import Shape, declared_inputs, fix_shapes, resolve_shapes
from tunerd.simplify import infer_shapes, simplify
from tunerd.vocabulary import Model, TensorSpec

if TYPE_CHECKING:
    import onnx

_STANDARD_DOMAINS = ("", "ai.onnx")
_PROTOBUF_LIMIT_BYTES = 2**31 - 1  # of one serialized message
_INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_DTYPES = frozenset({"float16", "float32", "float64", "bool", *_INTEGERS})


@dataclass(frozen=True)
class FixedModel:
    """A model as its file has it, checked, with every shape fixed."""

    name: str
    digest: str  # sha256 of the weights and the graph, hex
    inputs: tuple[TensorSpec, ...]
    proto: onnx.ModelProto = field(repr=False, compare=False)
    notes: tuple[str, ...] = ()  # what fixing had to change


def load_model(
    path: Path,
    *,
    shapes: Mapping[str, Shape] = MappingProxyType({}),
    dims: Mapping[str, int] = MappingProxyType({}),
    batch: int | None = None,
) -> Model:
    """Read an ONNX file and simplify what it holds; arguments and errors are those of both."""
    return simplified(read_model(path, shapes=shapes, dims=dims, batch=batch))


def read_model(
    path: Path,
    *,
    shapes: Mapping[str, Shape] = MappingProxyType({}),
    dims: Mapping[str, int] = MappingProxyType({}),
    batch: int | None = None,
) -> FixedModel:
    """Read an ONNX file, check it and fix every shape.

    shapes: full shapes by input name, for inputs with open dimensions.
    dims: sizes by the name of an open dimension.
    batch: the leading dimension of every input, where it is open or other than the exported one.

    Raises ModelError where the file cannot be used or leaves dimensions open, and InputError where
    `shapes` or `dims` do not fit it.
    """
    proto = _read(path)
    _check_operators(proto)
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
    inputs = tuple(_spec(i, "input") for i in proto.graph.input)
    return FixedModel(path.stem, model_digest(proto), inputs, proto, notes)


def simplified(model: FixedModel) -> Model:
    """Simplify a model, which takes seconds; ModelError where ONNX Runtime cannot run it."""
    simple, notes = simplify(model.proto, model.inputs)
    return Model(
        name=model.name,
        digest=model.digest,
        inputs=model.inputs,
        outputs=tuple(_spec(o, "output") for o in simple.graph.output),
        proto=simple,
        notes=model.notes + notes,
    )


# --- reading -----------------------------------------------------------------------------------


def _read(path: Path) -> onnx.ModelProto:
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ModelError(f"the model {path} {what}; give the path of an .onnx file")
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    except OSError as error:
        raise ModelError(f"the model {path} cannot be read: {error.strerror}") from error
    except DecodeError as error:
        raise ModelError(
            f"the model {path} is not ONNX, or was cut short; export or download it again"
        ) from error
    if not proto.opset_import or not proto.graph.node:
        raise ModelError(f"the model {path} holds no ONNX graph; export or download it again")
    _load_external_data(proto, path.parent)
    if proto.ByteSize() > _PROTOBUF_LIMIT_BYTES:
        raise ModelError(
            f"the model {path} takes {proto.ByteSize() / 2**30:.1f} GiB with its weights; at most "
            "2 GiB can be loaded; export it with smaller types, or in parts"
        )
    if proto.functions:
        from onnx import inliner

        proto = inliner.inline_local_functions(proto)
    if not all(o.type.tensor_type.HasField("shape") for o in proto.graph.output):
        proto = infer_shapes(proto)  # ONNX allows outputs without a shape, its checker does not
    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError as error:
        message = str(error).strip().splitlines()[0]
        raise ModelError(f"the model {path} is not valid ONNX: {message}") from error
    return proto


def _tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    graphs = [g for top in (proto.graph,) for g in subgraphs(top)]
    nodes = [n for g in graphs for n in g.node] + [n for f in proto.functions for n in f.node]
    for graph in graphs:
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors


def _load_external_data(proto: onnx.ModelProto, folder: Path) -> None:
    """Read the tensors that the model keeps in other files; each must lie inside `folder`."""
    from onnx import TensorProto

    for tensor in _tensors(proto):
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        entries = {e.key: e.value for e in tensor.external_data}
        path = _inside(folder, entries.get("location", ""), tensor.name)
        size = path.stat().st_size
        try:
            offset = int(entries.get("offset", 0))
            length = int(entries.get("length", size - offset))
        except ValueError as error:
            raise ModelError(f"the external data of tensor '{tensor.name}': {error}") from error
        if offset < 0 or length < 0 or offset + length > size:
            raise ModelError(
                f"tensor '{tensor.name}' takes bytes {offset} to {offset + length} of {path.name}, "
                f"which has {size}; download the model's files again"
            )
        with path.open("rb") as file:
            file.seek(offset)
            tensor.raw_data = file.read(length)
        del tensor.external_data[:]
        tensor.data_location = TensorProto.DEFAULT


def _inside(folder: Path, location: str, tensor: str) -> Path:
    """Return the file at `location`, if it lies in `folder` also after following links."""
    relative = Path(location)
    path = (folder / relative).resolve()
    outside = relative.is_absolute() or ".." in relative.parts
    if not location or outside or not path.is_relative_to(folder.resolve()):
        raise ModelError(
            f"tensor '{tensor}' keeps its data in '{location}', outside the model's folder; "
            "put the model and its data into one folder"
        )
    if not path.is_file():
        raise ModelError(
            f"tensor '{tensor}' keeps its data in '{location}', which is not in {folder}; "
            "put the file beside the model"
        )
    return path


def _check_operators(proto: onnx.ModelProto) -> None:
    from onnx import defs

    newest = defs.onnx_opset_version()
    for opset in proto.opset_import:
        if opset.domain in _STANDARD_DOMAINS and opset.version > newest:
            raise ModelError(
                f"the model uses ONNX opset {opset.version}; up to {newest} is known here; "
                "export it with an older opset"
            )
    unknown = Counter(
        f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        for graph in subgraphs(proto.graph)
        for node in graph.node
        if node.domain not in _STANDARD_DOMAINS or not defs.has(node.op_type)
    )
    if unknown:
        raise ModelError(
            f"the model uses operators that standard ONNX does not have: {counted(unknown)}; "
            "export it without them"
        )


def counted(names: Mapping[str, int]) -> str:
    """Return "LSTM (2), Foo (1)": names with their counts, in order of name."""
    return ", ".join(f"{name} ({count})" for name, count in sorted(names.items()))


# --- describing --------------------------------------------------------------------------------


def _spec(value: onnx.ValueInfoProto, role: str) -> TensorSpec:
    from onnx import helper

    tensor = value.type.tensor_type
    try:
        dtype = str(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    except (KeyError, TypeError):
        dtype = "unknown"
    if dtype not in _DTYPES:
        raise ModelError(
            f"{role} '{value.name}' has type {dtype}; allowed are {', '.join(sorted(_DTYPES))}"
        )
    shape = tuple(int(d.dim_value) for d in tensor.shape.dim)
    if not tensor.HasField("shape") or any(d < 1 for d in shape):
        raise ModelError(
            f"the shape of {role} '{value.name}' depends on the values of the inputs, or is empty; "
            "only models of fixed shapes can be tuned"
        )
    return TensorSpec(value.name, shape, dtype)


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
    from onnx import numpy_helper

    values = numpy_helper.to_array(tensor)
    digest.update(f"{tensor.data_type} {values.shape}\n".encode())
    if values.dtype == object:
        digest.update(repr(values.tolist()).encode())
    else:
        digest.update(np.ascontiguousarray(values).data)


def _serialized(
    message: onnx.ValueInfoProto | onnx.AttributeProto | onnx.SparseTensorProto,
) -> bytes:
    copy = type(message)()
    copy.CopyFrom(message)
    for name in ("doc_string", "metadata_props"):
        if name in message.DESCRIPTOR.fields_by_name:
            copy.ClearField(name)
    return bytes(copy.SerializeToString(deterministic=True))
