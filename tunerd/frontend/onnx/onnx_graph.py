"""What an ONNX file computes: ONNX Runtime runs it, and TVM imports it."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from tunerd.errors import ModelError
from tunerd.frontend.onnx.graphs import subgraphs
from tunerd.frontend.onnx.inference import shapes_without_weights, weights_aside
from tunerd.frontend.onnx.reference import Reference
from tunerd.frontend.onnx.simplify import simplify
from tunerd.frontend.onnx.uncertainty import ways_of
from tunerd.frontend.onnx.weights import WeightFile, changed, set_apart, values_of, whole
from tunerd.frontend.tensors import require_usable
from tunerd.system.arrays import MODEL_TOLERANCES, Array, rounded
from tunerd.vocabulary import Arrays, Behind, Packed, TensorSpec, Ways
from tunerd.vocabulary.outcome import ONNX_RUNTIME

if TYPE_CHECKING:
    import onnx

_MAX_NAME_CHARS = 60


@dataclass(frozen=True)
class OnnxGraph:
    """An ONNX model of fixed shapes."""

    proto: onnx.ModelProto
    weights: WeightFile | None = field(default=None, repr=False, compare=False)  # of its large ones

    kind: ClassVar[str] = "onnx"
    reference: ClassVar[str] = ONNX_RUNTIME

    @classmethod
    def from_packed(cls, packed: Packed) -> Self:
        import onnx

        apart = None if packed.fd is None else WeightFile(packed.fd, packed.key)
        return cls(onnx.ModelProto.FromString(packed.content), apart)

    def packed(self) -> Packed:
        if self.weights is None:
            return Packed(self.to_bytes())
        return Packed(self.proto.SerializeToString(), self.weights.key, self.weights.fd)

    def with_weights_apart(self) -> Self:
        """Return it with its large weights in a file that is mapped."""
        if self.weights is not None:  # it was read so
            return self
        light, weights = set_apart(self.proto, weights_aside(self.proto)[1])
        return replace(self, proto=light, weights=weights)

    @property
    def file_name(self) -> str:
        name = re.sub(r"[^\w.-]+", "_", str(self.proto.graph.name))[:_MAX_NAME_CHARS].strip("._-")
        return f"{name or 'model'}-{hashlib.sha256(self.to_bytes()).hexdigest()[:8]}.onnx"

    def to_bytes(self) -> bytes:
        try:
            return bytes(whole(self.proto).SerializeToString(deterministic=True))
        except ValueError as error:
            raise ModelError(
                f"the model cannot be written as one message ({error}); save it with its weights "
                "in files of their own, and give the path"
            ) from None

    def weight_bytes(self) -> int:
        from onnx.helper import tensor_dtype_to_np_dtype

        weights = self.proto.graph.initializer
        return sum(
            math.prod(w.dims) * int(tensor_dtype_to_np_dtype(w.data_type).itemsize) for w in weights
        )

    def outputs(self) -> tuple[TensorSpec, ...]:
        return tuple(spec_of(o, "output") for o in self.proto.graph.output)

    def simplified(self, inputs: tuple[TensorSpec, ...]) -> tuple[Self, tuple[str, ...]]:
        simple, notes = simplify(self.proto, inputs)
        return replace(self, proto=simple), notes

    def to_relax(self, model: str) -> Any:
        from tunerd.frontend.relax.importing import import_onnx

        return import_onnx(self.proto, model)

    def with_rounded_weights(self, precision: str) -> Self:
        import onnx

        def of(tensor: onnx.TensorProto) -> Array | None:
            is_wide = tensor.data_type == onnx.TensorProto.FLOAT
            return rounded(values_of(tensor), precision) if is_wide else None

        proto, weights = changed(self.proto, of)
        return replace(self, proto=proto, weights=weights)

    def behind(self, outputs: Sequence[TensorSpec]) -> Mapping[str, Behind]:
        graph = shapes_without_weights(self.proto).graph
        sources, types = _sources(graph), _float_types(graph)
        given = {value.name for value in graph.input}
        found = {}
        for spec in outputs:
            names = _behind(spec.name, sources)
            dtypes = {spec.dtype} | {types[name] for name in names & types.keys()}
            found[spec.name] = Behind(frozenset(dtypes), bool(names & given))
        return found

    def ways(self, inputs: Sequence[Arrays]) -> Ways | None:
        return ways_of(self.proto, inputs)

    def run(self, inputs: Sequence[Arrays]) -> list[Arrays]:
        reference = Reference(self.proto)
        return [reference.run(given) for given in inputs]


def spec_of(value: onnx.ValueInfoProto, role: str) -> TensorSpec:
    from onnx import helper

    tensor = value.type.tensor_type
    try:
        dtype = str(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    except (KeyError, TypeError):
        dtype = "unknown"
    shape = tuple(int(d.dim_value) for d in tensor.shape.dim)
    require_usable(f"{role} '{value.name}'", dtype=dtype, rank=len(shape))
    if not tensor.HasField("shape") or any(d < 1 for d in shape):
        raise ModelError(
            f"the shape of {role} '{value.name}' depends on the values of the inputs, or is empty; "
            "only models of fixed shapes can be tuned"
        )
    return TensorSpec(value.name, shape, dtype)


def _sources(graph: onnx.GraphProto) -> dict[str, list[str]]:
    """Return what each value of a graph and of its subgraphs is computed from, by name."""
    sources: dict[str, list[str]] = {}
    for part in subgraphs(graph):
        for node in part.node:
            inner = [out.name for attribute in node.attribute for out in attribute.g.output]
            sources |= {name: [*node.input, *inner] for name in node.output}
    return sources


def _float_types(graph: onnx.GraphProto) -> dict[str, str]:
    """Return by name the values that have MODEL_TOLERANCES, and their types."""
    from onnx import helper

    known = {helper.np_dtype_to_tensor_dtype(np.dtype(dtype)): dtype for dtype in MODEL_TOLERANCES}
    types = {}
    for part in subgraphs(graph):
        for value in (*part.input, *part.value_info, *part.output):
            types[value.name] = value.type.tensor_type.elem_type
        types |= {tensor.name: tensor.data_type for tensor in part.initializer}
    return {name: known[kind] for name, kind in types.items() if kind in known}


def _behind(output: str, sources: Mapping[str, Sequence[str]]) -> set[str]:
    """Return the names of all values that an output is computed from, and its own."""
    found: set[str] = set()
    left = [output]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += sources.get(name, ())
    return found
