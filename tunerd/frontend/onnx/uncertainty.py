"""How well ONNX Runtime knows what a model computes: the same in other ways, and how they differ.

Each way is as right as the graph as it is written: optimized; with sigmoids written out; with each
weight and input moved by its last bits. Where they differ, a compiled model may differ, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tunerd.frontend.onnx.graphs import subgraphs
from tunerd.frontend.onnx.inference import shapes_without_weights
from tunerd.frontend.onnx.reference import Reference, agree
from tunerd.frontend.onnx.weights import WeightFile, changed, values_of
from tunerd.system.arrays import Array
from tunerd.vocabulary import Arrays, Ways

if TYPE_CHECKING:
    import onnx

# How far weights and inputs are moved: as far as float32 rounds them. Where values are quantised,
# so far that about one of ten thousand values of 8 bits rounds to its neighbour: sums in another
# order do that to as many.
_ROUNDOFF = 2.0**-23
_TO_QUANTISE = 2.0**-19
NUDGES = 2
_ALLOWED = 4.0  # times what rounding moves
_FLOAT = 1  # of onnx.TensorProto, whose import takes a third of a second

_QUANTISERS = {"QuantizeLinear", "DynamicQuantizeLinear"}
# Operators whose results have shapes by the values of inputs, from which one on.
_SIZED = {"ConstantOfShape": 0, "Range": 0, "Expand": 1, "OneHot": 1, "Pad": 1, "Reshape": 1}
_SIZED |= {"Resize": 1, "Slice": 1, "Tile": 1, "TopK": 1, "Upsample": 1}
_MOVES = {"Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Slice", "Concat"}


def is_quantised(proto: onnx.ModelProto) -> bool:
    """Whether values are rounded to few bits on the way."""
    return any(
        node.op_type in _QUANTISERS or node.op_type.startswith("QLinear")
        for graph in subgraphs(proto.graph)
        for node in graph.node
    )


def ways_of(proto: onnx.ModelProto, inputs: Sequence[Arrays]) -> Ways:
    """Compute a model's outputs in other ways that are as right as the graph is as written.

    ONNX Runtime's Sigmoid is a fraction of polynomials, rounded to multiples of 2^-25: below 1e-5
    it has no digit that means anything. One over one plus an exponential has all of them.
    """
    clear = written_out(proto)
    others = [_run(clear, inputs, optimize=True)]
    by = _TO_QUANTISE if is_quantised(proto) else _ROUNDOFF
    for seed in range(NUDGES):
        rng = np.random.default_rng(seed)
        moved = [{name: nudged(a, by, rng) for name, a in given.items()} for given in inputs]
        other, _weights = _with_nudged_weights(clear, by, rng)  # which live as long as they run
        others.append(_run(other, moved))
    return Ways(tuple(_run(clear, inputs)), tuple(map(tuple, others)), steps(proto))


def differing(
    proto: onnx.ModelProto, simpler: onnx.ModelProto, feed: Arrays, expected: Arrays
) -> str:
    """Name an output in which a simpler model differs from `proto`, which gave `expected`; or "".

    What ONNX Runtime does not know of an output may differ.
    """
    got = Reference(simpler).run(feed)
    if all(agree(got[name], values) for name, values in expected.items()):
        return ""
    ways = ways_of(proto, [feed])
    (known,), (clear,) = ways.known, _run(written_out(simpler), [feed])
    for name, values in known.items():
        slack = _ALLOWED * max(_apart(values, way[0][name]) for way in ways.others)
        slack += ways.steps.get(name, 0.0)
        if not agree(got[name], expected[name]) and not agree(clear[name], values, slack=slack):
            return name
    return ""


def _apart(one: Array, other: Array) -> float:
    is_known = np.isfinite(one) & np.isfinite(other)
    found = np.abs(one[is_known].astype(np.float64) - other[is_known])
    return float(found.max(initial=0.0))


def _run(
    proto: onnx.ModelProto, inputs: Sequence[Arrays], *, optimize: bool = False
) -> list[Arrays]:
    reference = Reference(proto, optimize=optimize)
    return [reference.run(given) for given in inputs]


def written_out(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model whose sigmoids of float32 are made of exponentials."""
    import onnx
    from onnx import helper, numpy_helper

    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    if not any(n.op_type == "Sigmoid" for g in subgraphs(proto.graph) for n in g.node):
        return copy
    one = numpy_helper.from_array(np.ones((), np.float32))
    singles = _singles(proto)
    for graph in subgraphs(copy.graph):
        nodes = list(graph.node)
        graph.ClearField("node")
        for node in nodes:
            if node.op_type != "Sigmoid" or node.domain or node.input[0] not in singles:
                graph.node.append(node)
                continue
            (x,), (y,) = node.input, node.output
            graph.node.extend(
                (
                    helper.make_node("Neg", [x], [f"{y}/negative"]),
                    helper.make_node("Exp", [f"{y}/negative"], [f"{y}/power"]),
                    helper.make_node("Constant", [], [f"{y}/one"], value=one),
                    helper.make_node("Add", [f"{y}/power", f"{y}/one"], [f"{y}/under"]),
                    helper.make_node("Reciprocal", [f"{y}/under"], [y]),
                )
            )
    return copy


def _singles(proto: onnx.ModelProto) -> set[str]:
    """Name the values that are known to be of float32."""
    return {
        value.name
        for graph in subgraphs(shapes_without_weights(proto).graph)
        for value in (*graph.input, *graph.value_info, *graph.output)
        if value.type.tensor_type.elem_type == _FLOAT
    }


def _with_nudged_weights(
    proto: onnx.ModelProto, by: float, rng: np.random.Generator
) -> tuple[onnx.ModelProto, WeightFile | None]:
    import onnx

    sizes = _behind_sizes(proto)

    def of(tensor: onnx.TensorProto) -> Array | None:
        is_wide = tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.dims) > 0
        is_nudged = is_wide and tensor.name not in sizes
        return nudged(values_of(tensor), by, rng) if is_nudged else None

    return changed(proto, of)


def _behind_sizes(proto: onnx.ModelProto) -> set[str]:
    """Name the values that shapes are computed from: moved, they would give others."""
    makers = {name: node for g in subgraphs(proto.graph) for node in g.node for name in node.output}
    left = [
        name
        for graph in subgraphs(proto.graph)
        for node in graph.node
        if node.op_type in _SIZED
        for name in node.input[_SIZED[node.op_type] :]
    ]
    found: set[str] = set()
    while left:
        name = left.pop()
        if name and name not in found:
            found.add(name)
            left += makers[name].input if name in makers else []
    return found


def nudged(array: Array, by: float, rng: np.random.Generator) -> Array:
    """Move each floating value by a share of itself, up or down."""
    if array.dtype.kind != "f":
        return array
    up = rng.integers(0, 2, array.shape, np.int8) * 2 - 1
    return np.asarray(array * (1 + up * array.dtype.type(by)), array.dtype)


def nudged_by_a_bit(array: Array, rng: np.random.Generator) -> Array:
    """Move each floating value by about its last bit, up or down."""
    is_float = array.dtype.kind == "f"
    return nudged(array, float(np.finfo(array.dtype).eps), rng) if is_float else array


def steps(proto: onnx.ModelProto) -> dict[str, float]:
    """Return by name the step of outputs that are values of few bits, moved about at most.

    One for those that are of integers, the scale where they were made floats again.
    """
    known = {t.name: t for t in proto.graph.initializer}
    known |= {
        n.output[0]: n.attribute[0].t
        for n in proto.graph.node
        if n.op_type == "Constant" and n.attribute[0].HasField("t")
    }
    made = {name: node for node in proto.graph.node for name in node.output}
    found = {}
    for output in proto.graph.output:
        name = output.name
        while name in made and made[name].op_type in _MOVES:
            name = made[name].input[0]
        node = made.get(name)
        if node is None:
            continue
        if node.op_type in _QUANTISERS or node.op_type.startswith("QLinear"):
            found[output.name] = 1.0
        elif node.op_type == "DequantizeLinear":
            scale = known.get(node.input[1])
            at_most = 0.0 if scale is None else np.abs(values_of(scale)).max(initial=0.0)
            found[output.name] = float(at_most)
    return found
