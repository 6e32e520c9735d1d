"""Unroll loops whose number of rounds is known, and choose the branch where a condition is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tunerd.frontend.onnx.builder import Builder, attributes_of, decompose, inputs_of
from tunerd.frontend.onnx.graphs import subgraphs
from tunerd.frontend.onnx.inference import infer_shapes

if TYPE_CHECKING:
    import onnx

MAX_ROUNDS = 512
_MAX_NODES = 20_000  # that one loop becomes
_MAX_DEPTH = 4  # of loops in loops


def unrolled_loops(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return `proto` without Loop and Scan, and without If where its condition is a constant.

    Raises Refused where a number of rounds is not known, or is too large.
    """
    for _ in range(_MAX_DEPTH):
        if not any(node.op_type in _TABLE for node in proto.graph.node):
            break
        proto = infer_shapes(proto)
        if not decompose(proto, _TABLE):
            break
    return proto


def both_branches(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return `proto` with both branches of each If, and the results chosen by its condition.

    Those whose branches give tensors of other shapes stay, and those within branches.
    """
    if not any(node.op_type == "If" for node in proto.graph.node):
        return proto
    proto = infer_shapes(proto)
    decompose(proto, {"If": _both})
    return proto


def unbounded_loops(graph: onnx.GraphProto) -> list[str]:
    """Return the operators of loops that nothing in the file bounds: ONNX Runtime must not run
    them."""
    from onnx import numpy_helper

    found = []
    for part in subgraphs(graph):
        tensors = {t.name: t for t in part.initializer}
        for node in part.node:
            if node.op_type == "Constant" and node.attribute[0].HasField("t"):
                tensors[node.output[0]] = node.attribute[0].t
        for node in part.node:
            if node.op_type != "Loop":
                continue
            limit = tensors.get(node.input[0])
            if limit is None or numpy_helper.to_array(limit).max(initial=0) > MAX_ROUNDS:
                found.append("Loop")
    return found


def _loop(node: onnx.NodeProto, build: Builder) -> Sequence[str]:
    body = attributes_of(node)["body"]
    limit, start, *states = inputs_of(node, 2)
    if not limit:
        raise ValueError("only a condition ends it; export it with a number of rounds")
    rounds = int(build.constant_of(limit, "number of rounds").item())
    begins = build.value(start) if start else np.array(True)
    if begins is None or not _goes_on(body):
        raise ValueError("a condition may end it early; export it with a number of rounds alone")
    rounds = rounds if begins.all() else 0
    _require_small(rounds, body)
    count = len(states)
    if rounds == 0 and len(body.output) > count + 1:
        raise ValueError("it has no rounds, and its outputs no elements; export it without it")
    stacks: list[list[str]] = [[] for _ in body.output[count + 1 :]]
    for t in range(rounds):
        given = [build.constant(t, np.int64), build.constant(True, bool), *states]
        _, *made = _copied(build, body, given)
        states = made[:count]
        for stack, value in zip(stacks, made[count:], strict=True):
            stack.append(build.unsqueeze(value, 0))
    return [*states, *(build.op("Concat", *stack, axis=0) for stack in stacks)]


def _scan(node: onnx.NodeProto, build: Builder) -> Sequence[str]:
    given = attributes_of(node)
    if build.opset < 9:
        raise ValueError("of opset 8 it is not known; export it with opset 9 or later")
    body, scanned = given["body"], given["num_scan_inputs"]
    count = len(node.input) - scanned
    states, sequences = list(node.input[:count]), node.input[count:]
    stacked = len(body.output) - count
    axes = given.get("scan_input_axes", [0] * scanned)
    backward = given.get("scan_input_directions", [0] * scanned)
    rounds = build.shape(sequences[0])[axes[0]]
    _require_small(rounds, body)
    columns = []
    for name, axis, is_backward in zip(sequences, axes, backward, strict=True):
        at = axis % len(build.shape(name))
        parts = [build.squeeze(part, at) for part in build.split(name, [1] * rounds, at)]
        columns.append(parts[::-1] if is_backward else parts)
    stacks: list[list[str]] = [[] for _ in range(stacked)]
    out_axes = given.get("scan_output_axes", [0] * stacked)
    for t in range(rounds):
        made = _copied(build, body, [*states, *(column[t] for column in columns)])
        states = made[:count]
        for stack, axis, value in zip(stacks, out_axes, made[count:], strict=True):
            stack.append(build.unsqueeze(value, axis))
    directions = given.get("scan_output_directions", [0] * stacked)
    return [
        *states,
        *(
            build.op("Concat", *(stack[::-1] if back else stack), axis=axis)
            for stack, axis, back in zip(stacks, out_axes, directions, strict=True)
        ),
    ]


def _if(node: onnx.NodeProto, build: Builder) -> Sequence[str] | None:
    condition = build.value(node.input[0])
    if condition is None:
        return None
    branches = attributes_of(node)
    return _copied(build, branches["then_branch" if condition.any() else "else_branch"], [])


def _both(node: onnx.NodeProto, build: Builder) -> Sequence[str] | None:
    branches = attributes_of(node)
    bodies = branches["then_branch"], branches["else_branch"]
    ends = [[_tensor_of(value) for value in body.output] for body in bodies]
    if ends[0] != ends[1] or None in ends[0] or sum(len(b.node) for b in bodies) > _MAX_NODES:
        return None
    condition = build.reshape(node.input[0])  # a number
    pairs = zip(*(_copied(build, body, []) for body in bodies), strict=True)
    return [build.op("Where", condition, *pair) for pair in pairs]


def _tensor_of(value: onnx.ValueInfoProto) -> tuple[int, tuple[int, ...]] | None:
    """Return the type and the shape of a tensor; None where they are not known."""
    tensor = value.type.tensor_type
    dims = tensor.shape.dim
    if not tensor.HasField("shape") or not all(d.HasField("dim_value") for d in dims):
        return None
    return tensor.elem_type, tuple(int(d.dim_value) for d in dims)


_TABLE = {"If": _if, "Loop": _loop, "Scan": _scan}


def _require_small(rounds: int, body: onnx.GraphProto) -> None:
    if rounds > MAX_ROUNDS or rounds * len(body.node) > _MAX_NODES:
        raise ValueError(
            f"it has {rounds:,} rounds of {len(body.node)} operators, and up to {MAX_ROUNDS} "
            f"rounds or {_MAX_NODES:,} operators are unrolled; export it with fewer"
        )


def _goes_on(body: onnx.GraphProto) -> bool:
    """Say whether a loop's condition stays true: it is passed on, or a constant."""
    from onnx import numpy_helper

    makers = {output: node for node in body.node for output in node.output}
    tensors = {t.name: t for t in body.initializer}
    name = body.output[0].name
    while (node := makers.get(name)) is not None:
        if node.op_type == "Constant" and node.attribute[0].HasField("t"):
            return bool(numpy_helper.to_array(node.attribute[0].t).all())
        if node.op_type not in ("Identity", "Cast"):
            return False
        name = node.input[0]
    if name in tensors:
        return bool(numpy_helper.to_array(tensors[name]).all())
    return bool(name == body.input[1].name)


def _copied(build: Builder, body: onnx.GraphProto, given: Sequence[str]) -> list[str]:
    """Write the nodes of a body once more, of these inputs, and return the names of its outputs."""
    from onnx import numpy_helper

    names = {value.name: name for value, name in zip(body.input, given, strict=True)}
    for tensor in body.initializer:
        names[tensor.name] = build.constant(numpy_helper.to_array(tensor))
    for node in body.node:
        build.copy(node, names)
    return [names.get(value.name, value.name) for value in body.output]
