"""Read an ONNX file that nobody vouches for: parse it, check it, gather what it keeps elsewhere."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]

from tunerd.errors import ModelError
from tunerd.frontend.onnx.builder import Refused
from tunerd.frontend.onnx.contrib import use_standard_operators
from tunerd.frontend.onnx.graphs import STANDARD_DOMAINS, subgraphs
from tunerd.frontend.onnx.inference import infer_shapes, weights_aside, with_inputs_for
from tunerd.frontend.onnx.loops import MAX_ROUNDS, unbounded_loops
from tunerd.frontend.onnx.memory import require_memory_to_lower
from tunerd.frontend.onnx.reference import last_line
from tunerd.frontend.onnx.shapes import MAX_RANK
from tunerd.frontend.onnx.weights import (
    MESSAGE_BYTES,
    WeightFile,
    copied_apart,
    is_apart,
    is_plain,
    tensors_apart,
)

if TYPE_CHECKING:
    import onnx

_MAX_INLINED_NODES = 1_000_000
_MAX_CALL_DEPTH = 100  # of functions that call each other


def read_proto(path: Path) -> tuple[onnx.ModelProto, WeightFile | None]:
    """Return the model in a file, valid, in itself, and of standard operators only.

    Weights that it keeps in other files are read, functions inlined. Where they are more than a
    message of protobuf holds, the large ones of products and lookups are in the file that comes
    with it. Raises ModelError.
    """
    from onnx import inliner

    proto = _parse(path)
    if (text := _no_text(proto)) is not None:
        raise ModelError(
            f"the model {path} holds the name {text[:40]!r}, which is not UTF-8; export or "
            "download it again"
        )
    if not proto.opset_import or not proto.graph.node:
        raise ModelError(f"the model {path} holds no ONNX graph; export or download it again")
    weights = _load_external_data(proto, path.parent)
    if proto.ByteSize() > MESSAGE_BYTES:
        raise _too_large(path, proto.ByteSize())
    _require_small_functions(proto)
    try:
        if proto.functions:
            proto = inliner.inline_local_functions(proto)
        use_standard_operators(proto)
        _check_operators(proto)
        _check_tensors(proto)
        if not all(o.type.tensor_type.HasField("shape") for o in proto.graph.output):
            proto = infer_shapes(proto)  # ONNX allows outputs without a shape, its checker does not
        _check_valid(proto)
    except ModelError:
        raise
    except Refused as error:
        raise ModelError(str(error)) from error
    except Exception as error:  # of onnx's native code, which raises many kinds
        raise ModelError(
            f"the model {path} is not valid ONNX: {_first_paragraph(error)}; export it again"
        ) from error
    return proto, weights


def _check_valid(proto: onnx.ModelProto) -> None:
    """Run ONNX's checker, which demands shapes of outputs where inference knows none."""
    import onnx

    tensors = [o.type.tensor_type for o in proto.graph.output if o.type.HasField("tensor_type")]
    shapeless = [t for t in tensors if not t.HasField("shape")]
    for tensor in shapeless:
        tensor.shape.SetInParent()
    apart = {tensor.name: tensor for tensor in tensors_apart(proto)}
    onnx.checker.check_model(with_inputs_for(proto, apart) if apart else proto)
    for tensor in shapeless:
        tensor.ClearField("shape")


def counted(names: Mapping[str, int]) -> str:
    """Return "LSTM (2), Foo (1)": names with their counts, in order of name."""
    return ", ".join(f"{name} ({count})" for name, count in sorted(names.items()))


def _parse(path: Path) -> onnx.ModelProto:
    import onnx

    proto = onnx.ModelProto()
    try:
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "is no file" if path.exists() else None
            raise ModelError(
                f"the model {path} {what or 'does not exist'}; give the path of an .onnx file"
            )
        if (size := path.stat().st_size) > MESSAGE_BYTES:
            raise _too_large(path, size)
        require_memory_to_lower(f"the model {path}", size)
        proto.ParseFromString(path.read_bytes())
    except OSError as error:
        raise ModelError(
            f"the model {path} cannot be read: {error.strerror}; give the path of an .onnx file"
        ) from error
    except DecodeError as error:
        raise ModelError(
            f"the model {path} is not ONNX, or was cut short; export or download it again"
        ) from error
    return proto


def _no_text(message: Any) -> bytes | None:
    """Return a string in `message` that is not UTF-8: protobuf hands those out as bytes."""
    for field, value in message.ListFields():
        if field.type not in (field.TYPE_MESSAGE, field.TYPE_STRING):
            continue
        for one in (value,) if isinstance(value, str | bytes | Message) else value:
            if isinstance(one, bytes):
                return one
            if isinstance(one, Message) and (found := _no_text(one)) is not None:
                return found
    return None


def _too_large(what: Path, size: int) -> ModelError:
    return ModelError(
        f"the model in {what} takes {size / 2**30:.1f} GiB with its weights; at most 2 GiB can "
        "be in one file, and of weights beside it that products and lookups do not read as they "
        "are; export it with its weights in files of their own, with smaller types, or in parts"
    )


def _first_paragraph(error: Exception) -> str:
    """Return what a checker says, less the context that it adds to it."""
    text = str(error).partition("==> Context:")[0]
    return " ".join(text.split()).rstrip(".") or type(error).__name__


# --- external data -----------------------------------------------------------------------------


def _nodes(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    for graph in subgraphs(proto.graph):
        yield from graph.node
    for function in proto.functions:
        yield from function.node


def _tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    for graph in subgraphs(proto.graph):
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
    for node in _nodes(proto):
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors


def _load_external_data(proto: onnx.ModelProto, folder: Path) -> WeightFile | None:
    """Read the tensors that the model keeps in other files; each must lie inside `folder`.

    Where they do not fit into one message, what may be apart is, in the file that is returned.
    """
    from onnx import TensorProto

    places = [
        (tensor, *_place(tensor, folder))
        for tensor in _tensors(proto)
        if tensor.data_location == TensorProto.EXTERNAL
    ]
    # Told before anything is read: any number of tensors may lie on the same bytes.
    total = sum(length for _, _, _, length in places)
    require_memory_to_lower(f"the model in {folder} with its weights", total)
    apart: list[tuple[onnx.TensorProto, Path, int, int]] = []
    if total > MESSAGE_BYTES:
        aside = weights_aside(proto)[1]
        apart = [p for p in places if p[0].name in aside and is_plain(p[0], p[3])]
        kept = {p[0].name for p in apart}
        places = [p for p in places if p[0].name not in kept]
        if (rest := sum(length for _, _, _, length in places)) > MESSAGE_BYTES:
            raise _too_large(folder, rest)
    for tensor, path, offset, length in places:
        with path.open("rb") as file:
            file.seek(offset)
            tensor.raw_data = file.read(length)
        del tensor.external_data[:]
        tensor.data_location = TensorProto.DEFAULT
    try:
        return copied_apart(apart) if apart else None
    except OSError as error:
        raise ModelError(
            f"the weights of the model in {folder} cannot be copied: {error.strerror}; download "
            "its files again, and see that the folder of temporary files has room for them"
        ) from error


def _place(tensor: onnx.TensorProto, folder: Path) -> tuple[Path, int, int]:
    """Return the file of a tensor, and the first byte and the number of bytes that it takes."""
    entries = {e.key: e.value for e in tensor.external_data}
    try:
        path = _inside(folder, entries.get("location", ""), tensor.name)
        size = path.stat().st_size
        offset = int(entries.get("offset", 0))
        length = int(entries.get("length", size - offset))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"the external data of tensor '{tensor.name}' cannot be read: {error}; export or "
            "download the model again"
        ) from error
    if offset < 0 or length < 0 or offset + length > size:
        raise ModelError(
            f"tensor '{tensor.name}' takes bytes {offset} to {offset + length} of {path.name}, "
            f"which has {size}; download the model's files again"
        )
    return path, offset, length


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


# --- operators, functions, tensors -------------------------------------------------------------


def _check_operators(proto: onnx.ModelProto) -> None:
    from onnx import defs

    newest = defs.onnx_opset_version()
    for opset in proto.opset_import:
        if opset.domain in STANDARD_DOMAINS and opset.version > newest:
            raise ModelError(
                f"the model uses ONNX opset {opset.version}; up to {newest} is known here; "
                "export it with an older opset"
            )
    nodes = tuple(_nodes(proto))
    unknown = Counter(
        f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        for node in nodes
        if node.domain not in STANDARD_DOMAINS or not defs.has(node.op_type)
    )
    if unknown:
        is_classic = any(name.startswith("ai.onnx.ml.") for name in unknown)
        advice = "the package onnxruntime runs it as it is" if is_classic else ""
        raise ModelError(
            f"the model uses operators that standard ONNX does not have: {counted(unknown)}; "
            f"{advice or 'export it without them'}"
        )
    if endless := Counter(unbounded_loops(proto.graph)):
        raise ModelError(
            f"the number of rounds of these operators is not known, or above {MAX_ROUNDS}: "
            f"{counted(endless)}; export the model with them unrolled"
        )


def _require_small_functions(proto: onnx.ModelProto) -> None:
    """Raise ModelError where the model's own functions, inlined, would explode."""
    bodies = {(f.domain, f.name): f for f in proto.functions}
    sizes: dict[tuple[str, str], float] = {}  # of a body with all that it calls; inf while open

    def size_of(nodes: Iterator[onnx.NodeProto], depth: int) -> float:
        total = 0.0
        for node in nodes:
            key = (node.domain, node.op_type)
            if key not in bodies:
                total += 1
                continue
            if key not in sizes:
                sizes[key] = math.inf
                deep = depth >= _MAX_CALL_DEPTH
                sizes[key] = math.inf if deep else size_of(iter(bodies[key].node), depth + 1)
            total += sizes[key]
        return total

    calls = (node for graph in subgraphs(proto.graph) for node in graph.node)
    if size_of(calls, 0) > _MAX_INLINED_NODES:
        raise ModelError(
            "the model's functions call themselves, or make more than "
            f"{_MAX_INLINED_NODES:,} nodes; export it without local functions"
        )


def _check_tensors(proto: onnx.ModelProto) -> None:
    """Refuse constants that NumPy cannot hold, by their type, their rank or their bytes."""
    from onnx import helper, numpy_helper

    known = set(helper.get_all_tensor_dtypes())
    for tensor in _tensors(proto):
        if is_apart(tensor):
            continue
        if tensor.data_type not in known or len(tensor.dims) > MAX_RANK:
            raise ModelError(
                f"constant '{tensor.name}' has type number {tensor.data_type} and "
                f"{len(tensor.dims)} dimensions; ONNX's types and up to {MAX_RANK} dimensions "
                "are allowed; export the model again"
            )
        try:
            numpy_helper.to_array(tensor)
        except UnicodeDecodeError:
            continue  # text, of which nothing is computed
        except Exception as error:  # of several kinds
            raise ModelError(
                f"constant '{tensor.name}' does not hold what its shape and type say: "
                f"{last_line(error)}; export the model again"
            ) from error
