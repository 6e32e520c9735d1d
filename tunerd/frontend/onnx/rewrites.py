"""Rewrite ONNX patterns that TVM's importer would turn into needless work.

Each rewrite keeps the meaning of the graph; `simplify` checks the result with ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tunerd.frontend.onnx.graphs import replace_nodes, uses
from tunerd.frontend.onnx.weights import values_of

if TYPE_CHECKING:
    import onnx


def rewrite_graph(proto: onnx.ModelProto) -> None:
    """Rewrite sums, batch norms and chains of constant factors and terms, in place.

    - Sum of several tensors becomes Add: the importer would broadcast, stack and reduce them.
    - An inference BatchNormalization that no convolution absorbed becomes Mul and Add: the
      importer's decomposition takes four operators.
    - A chain of Mul and Add by constants becomes at most one of each.
    - A constant of shape (C, 1, 1) beside an image of rank 4 gets rank 4: a change of layout would
      transpose the image instead of the constant.
    - An output that is the shape of a value becomes a constant: the importer would return what is
      no tensor.
    """
    _fold_returned_shapes(proto.graph)
    _split_sums(proto.graph)
    _merge_affine_chains(proto.graph)
    _pad_ranks(proto.graph)
    _drop_unused(proto.graph)


def _split_sums(graph: onnx.GraphProto) -> None:
    from onnx import helper

    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type != "Sum" or len(node.input) < 2:
            nodes.append(node)
            continue
        total = node.input[0]
        for i, term in enumerate(node.input[1:], start=2):
            out = node.output[0] if i == len(node.input) else f"{node.output[0]}/sum{i}"
            nodes.append(helper.make_node("Add", [total, term], [out], name=f"{node.name}/sum{i}"))
            total = out
    replace_nodes(graph, nodes)


def _fold_returned_shapes(graph: onnx.GraphProto) -> None:
    from onnx import numpy_helper

    shapes = {
        v.name: [int(d.dim_value) for d in v.type.tensor_type.shape.dim]
        for v in _of_known_rank(graph)
    }
    returned = {o.name for o in graph.output}
    nodes = []
    for node in graph.node:
        shape = shapes.get(node.input[0]) if node.op_type == "Shape" else None
        if shape is None or 0 in shape or node.output[0] not in returned:
            nodes.append(node)
            continue
        ends = {a.name: a.i for a in node.attribute}
        constant = np.array(shape[ends.get("start", 0) : ends.get("end")], np.int64)
        graph.initializer.append(numpy_helper.from_array(constant, node.output[0]))
    replace_nodes(graph, nodes)


@dataclass
class _Affine:
    """y = scale * x + shift with NumPy's broadcasting; either may be absent."""

    scale: np.ndarray | None
    shift: np.ndarray | None

    def then(self, after: _Affine) -> _Affine:
        scale = self.scale
        shift = self.shift
        if after.scale is not None:
            scale = after.scale if scale is None else scale * after.scale
            shift = None if shift is None else shift * after.scale
        if after.shift is not None:
            shift = after.shift if shift is None else shift + after.shift
        return _Affine(scale, shift)

    @property
    def size(self) -> int:
        return max(0 if a is None else a.size for a in (self.scale, self.shift))

    @property
    def operators(self) -> int:
        return (self.scale is not None) + (self.shift is not None)


@dataclass
class _Chain:
    source: str
    affine: _Affine
    nodes: list[onnx.NodeProto]
    dtype: np.dtype

    @property
    def output(self) -> str:
        return str(self.nodes[-1].output[0])

    def pays(self) -> bool:
        is_norm = any(n.op_type == "BatchNormalization" for n in self.nodes)
        return is_norm or self.affine.operators < len(self.nodes)


def _merge_affine_chains(graph: onnx.GraphProto) -> None:
    tensors = {i.name: i for i in graph.initializer}
    ranks = _ranks(graph)
    count = uses(graph)
    chains: dict[str, _Chain] = {}  # by output of their last node
    for node in graph.node:
        found = _affine_of(node, tensors, ranks)
        if found is None:
            continue
        source, affine, dtype = found
        before = chains.get(source)
        if before is not None and count[source] == 1 and before.dtype == dtype:
            joined = before.affine.then(affine)
            # An outer product of two constants would cost more memory than it saves time.
            if joined.size <= max(before.affine.size, affine.size):
                del chains[source]
                nodes = [*before.nodes, node]
                chains[node.output[0]] = _Chain(before.source, joined, nodes, dtype)
                continue
        chains[node.output[0]] = _Chain(source, affine, [node], dtype)

    ends = {c.output: c for c in chains.values() if c.pays()}
    inner = {n.output[0] for c in ends.values() for n in c.nodes[:-1]}
    nodes = []
    for node in graph.node:
        output = node.output[0] if node.output else ""
        if output in ends:
            nodes.extend(_affine_nodes(ends[output], graph))
        elif output not in inner:
            nodes.append(node)
    replace_nodes(graph, nodes)


def _drop_unused(graph: onnx.GraphProto) -> None:
    count = uses(graph)
    for index in reversed(range(len(graph.initializer))):
        if not count[graph.initializer[index].name]:
            del graph.initializer[index]


_BROADCASTING = ("Add", "Sub", "Mul", "Div")


def _pad_ranks(graph: onnx.GraphProto) -> None:
    import onnx

    tensors = {i.name: i for i in graph.initializer}
    ranks = _ranks(graph)
    padded: dict[str, str] = {}
    for node in graph.node:
        known = {ranks.get(name) for name in (*node.input, *node.output)}
        if node.op_type not in _BROADCASTING or 4 not in known:
            continue
        for i, name in enumerate(node.input):
            if name not in tensors or not 1 < len(tensors[name].dims) < 4:
                continue
            if name not in padded:
                copy = onnx.TensorProto()
                copy.CopyFrom(tensors[name])
                copy.name = padded[name] = f"{name}/rank4"
                del copy.dims[:]
                copy.dims.extend([*[1] * (4 - len(tensors[name].dims)), *tensors[name].dims])
                graph.initializer.append(copy)
            node.input[i] = padded[name]


def _ranks(graph: onnx.GraphProto) -> dict[str, int]:
    """Return the rank of every value that shape inference knows."""
    return {v.name: len(v.type.tensor_type.shape.dim) for v in _of_known_rank(graph)}


def _of_known_rank(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    for value in (*graph.input, *graph.value_info, *graph.output):
        if value.type.tensor_type.HasField("shape"):
            yield value


def _affine_of(
    node: onnx.NodeProto, tensors: dict[str, onnx.TensorProto], ranks: dict[str, int]
) -> tuple[str, _Affine, np.dtype] | None:
    """Return the operand of an affine node, what the node does to it, and the type of constants."""
    if node.op_type == "BatchNormalization":
        return _batch_norm(node, tensors, ranks)
    if node.op_type not in ("Mul", "Add"):
        return None
    a, b = node.input
    if (a in tensors) == (b in tensors):
        return None
    x, constant = (b, a) if a in tensors else (a, b)
    if tensors[constant].data_type not in _float_types():
        return None
    # A constant that broadcasts the operand to a higher rank is no factor of each element.
    if x not in ranks or len(tensors[constant].dims) > ranks[x]:
        return None
    values = values_of(tensors[constant])
    wide = values.astype(np.float64)
    affine = _Affine(wide, None) if node.op_type == "Mul" else _Affine(None, wide)
    return x, affine, values.dtype


def _batch_norm(
    node: onnx.NodeProto, tensors: dict[str, onnx.TensorProto], ranks: dict[str, int]
) -> tuple[str, _Affine, np.dtype] | None:
    """Return y = scale (x - mean) / sqrt(var + epsilon) + bias as one affine map."""
    from onnx import numpy_helper

    attributes = {a.name: a for a in node.attribute}
    training = "training_mode" in attributes and attributes["training_mode"].i
    x, *names = node.input
    if training or any(node.output[1:]) or x not in ranks or ranks[x] < 2:
        return None
    if any(n not in tensors or tensors[n].data_type not in _float_types() for n in names):
        return None
    epsilon = attributes["epsilon"].f if "epsilon" in attributes else 1e-5
    dtype = numpy_helper.to_array(tensors[names[0]]).dtype
    shape = (-1, *[1] * (ranks[x] - 2))
    scale, bias, mean, var = (
        numpy_helper.to_array(tensors[n]).astype(np.float64).reshape(shape) for n in names
    )
    factor = scale / np.sqrt(var + epsilon)
    return x, _Affine(factor, bias - mean * factor), dtype


def _float_types() -> tuple[int, ...]:
    from onnx import TensorProto

    return (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)


def _affine_nodes(chain: _Chain, graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    from onnx import helper, numpy_helper

    x, end = chain.source, chain.output
    steps = [("Mul", chain.affine.scale), ("Add", chain.affine.shift)]
    steps = [(op, values) for op, values in steps if values is not None]
    for i, (op, values) in enumerate(steps, start=1):
        assert values is not None
        out = end if i == len(steps) else f"{end}/scaled"
        constant = f"{out}/{op.lower()}"
        array = np.asarray(values, chain.dtype, order="C")
        graph.initializer.append(numpy_helper.from_array(array, constant))
        yield helper.make_node(op, [x, constant], [out], name=out)
        x = out
