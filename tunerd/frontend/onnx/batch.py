"""Give a model another batch size than the one that it was exported with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from tunerd.errors import InputError, ModelError
from tunerd.frontend.onnx.graphs import uses
from tunerd.frontend.onnx.memory import require_memory
from tunerd.frontend.onnx.reference import Reference, agree, last_line
from tunerd.frontend.onnx.shapes import Declared, Shape, fix_shapes
from tunerd.system.arrays import random_inputs
from tunerd.vocabulary import Arrays, TensorSpec

if TYPE_CHECKING:
    import onnx

_ORT_NODE = re.compile(r"[Nn]ode[^']*?\.?\s*Name:\s*'([^']*)'|Node \(([^)]*)\)")


def exported_batch(inputs: tuple[Declared, ...]) -> int | str | None:
    """Return what all inputs have as their leading dimension: a number, a name or None (open).

    Raises ModelError where they differ: then nothing says which of them is the batch.
    """
    leading = {d.dims[0] if d.dims else None for d in inputs if d.dims is None or d.dims}
    if not leading:
        raise ModelError("no input has a dimension that could be the batch; leave out --batch")
    if len(leading) > 1:
        raise ModelError(
            f"the inputs differ in their leading dimension ({'; '.join(map(str, inputs))}), so "
            "--batch does not say which to change; fix open ones with --dim or --shape"
        )
    return leading.pop()


def with_batch(
    proto: onnx.ModelProto, shapes: Mapping[str, Shape], batch: int
) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """Return `proto` with its inputs' leading dimension set to `batch`, and notes.

    `shapes` are the inputs' shapes as exported. Reshape targets that hold the exported batch are
    rewritten; then the outputs are compared with those of the exported batch, run repeatedly.
    Raises ModelError, naming the node where that is known, when they differ.
    """
    import onnx

    exported = next(s[0] for s in shapes.values() if s)
    reference = onnx.ModelProto()
    reference.CopyFrom(proto)
    fix_shapes(reference, shapes)
    wanted = {n: (batch, *s[1:]) if s else s for n, s in shapes.items()}
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    fix_shapes(result, wanted)
    require_memory(result)
    count = _rewrite_reshapes(result.graph, exported, batch)
    differs = _check(result, reference, wanted=wanted, exported=exported)
    note = f"batch {batch}: agrees with {_times(exported, batch)} in ONNX Runtime"
    if count:
        targets = "1 Reshape target" if count == 1 else f"{count} Reshape targets"
        note += f"; {targets} held batch {exported}"
    if not differs:
        note += "; but the outputs are the same for every input, so this proves little"
    return result, (note,)


def _times(exported: int, batch: int) -> str:
    return f"{-(-batch // exported)} runs at batch {exported}"


def _rewrite_reshapes(graph: onnx.GraphProto, exported: int, batch: int) -> int:
    """Replace a leading `exported` in constant targets of Reshape nodes that depend on an input."""
    from onnx import numpy_helper

    targets = {i.name: numpy_helper.to_array(i) for i in graph.initializer if len(i.dims) == 1}
    for node in graph.node:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.name == "value" and len(attribute.t.dims) == 1:
                targets[node.output[0]] = numpy_helper.to_array(attribute.t)
    depends = {i.name for i in graph.input}
    count = 0
    for node in graph.node:
        if not depends.intersection(node.input):
            continue
        depends.update(node.output)
        if node.op_type != "Reshape" or len(node.input) < 2 or node.input[1] not in targets:
            continue
        target = targets[node.input[1]]
        if not target.size or target[0] != exported:
            continue
        name = f"{node.output[0]}/batch{batch}"
        changed = np.array([batch, *target[1:]], np.int64)
        graph.initializer.append(numpy_helper.from_array(changed, name))
        node.input[1] = name
        count += 1
    used = uses(graph)
    for index in reversed(range(len(graph.initializer))):
        if not used[graph.initializer[index].name]:
            del graph.initializer[index]
    return count


def _check(
    result: onnx.ModelProto,
    reference: onnx.ModelProto,
    *,
    wanted: Mapping[str, Shape],
    exported: int,
) -> bool:
    """Compare a run of `result` with runs of `reference` on the same rows.

    Returns whether the rows' outputs differ from one another: if not, mixed rows look right, too.
    """
    batch = next(s[0] for s in wanted.values() if s)
    runs = -(-batch // exported)
    specs = []
    for value in result.graph.input:
        shape = wanted[value.name]
        specs.append(
            TensorSpec(value.name, (runs * exported, *shape[1:]) if shape else shape, _dtype(value))
        )
    rows = random_inputs(specs, seed=0)
    feed = {n: v[:batch] if v.ndim else v for n, v in rows.items()}
    refused = f"the model, exported with batch {exported}, cannot be given batch {batch}"
    try:
        got = Reference(result).run(feed)
    except Exception as error:  # ONNX Runtime's exceptions have no public base class
        node = _ORT_NODE.search(str(error))
        at = f" at node '{node[1] or node[2]}'" if node else ""
        raise ModelError(f"{refused}: it fails{at} ({last_line(error)})") from error
    try:
        expected = _run_repeatedly(reference, rows, runs=runs, exported=exported)
    except Exception as error:
        raise ModelError(
            f"ONNX Runtime cannot run the model with its own batch {exported}: {last_line(error)}; "
            "leave out --batch, or export the model again"
        ) from error
    for name, values in expected.items():
        if not agree(got[name], values[:batch]):
            node_name = _first_difference(result, reference, feed, rows, runs=runs)
            raise ModelError(
                f"{refused}: output '{name}' differs from that of {_times(exported, batch)}, "
                f"first after node '{node_name}'"
            )
    return any(v.ndim and not agree(v, np.broadcast_to(v[:1], v.shape)) for v in expected.values())


def _run_repeatedly(
    reference: onnx.ModelProto, rows: Arrays, *, runs: int, exported: int
) -> Arrays:
    """Run `reference` on each group of rows and join the outputs along their first axis."""
    session = Reference(reference)
    results = []
    for i in range(runs):
        part = slice(i * exported, (i + 1) * exported)
        results.append(session.run({n: v[part] if v.ndim else v for n, v in rows.items()}))
    return {
        n: np.concatenate([r[n] for r in results]) if results[0][n].ndim else results[0][n]
        for n in session.output_names
    }


def _first_difference(
    result: onnx.ModelProto,
    reference: onnx.ModelProto,
    feed: Arrays,
    rows: Arrays,
    *,
    runs: int,
) -> str:
    """Return the first node whose output is not that of the repeated runs."""
    batch = next(v.shape[0] for v in feed.values() if v.ndim)
    exported = next(v.shape[0] for v in rows.values() if v.ndim) // runs
    for proto in (result, reference):
        _expose_all(proto)
    got = Reference(result).run(feed)
    expected = _run_repeatedly(reference, rows, runs=runs, exported=exported)
    for node in result.graph.node:
        for out in node.output:
            if out not in expected or not expected[out].ndim or not got[out].ndim:
                continue
            # Shapes may differ where the batch is not in front; values at equal shapes may not.
            same_shape = got[out].shape == expected[out][:batch].shape
            if same_shape and not agree(got[out], expected[out][:batch]):
                return node_name(node)
    return node_name(result.graph.node[-1])


def _expose_all(proto: onnx.ModelProto) -> None:
    from onnx import ValueInfoProto

    known = {o.name for o in proto.graph.output}
    names = [o for n in proto.graph.node for o in n.output if o and o not in known]
    proto.graph.output.extend(ValueInfoProto(name=n) for n in names)


def node_name(node: onnx.NodeProto) -> str:
    """Return a node's name, or that of its first output where the exporter gave none."""
    return str(node.name or f"{node.op_type} of {node.output[0]}")


def _dtype(value: onnx.ValueInfoProto) -> str:
    from onnx import helper

    return str(helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))


def open_batch_shapes(
    inputs: tuple[Declared, ...], leading: int | str | None, dims: Mapping[str, int]
) -> tuple[Declared, ...]:
    """Return the inputs with an open leading dimension closed to 1, to serve as the reference."""
    if isinstance(leading, int):
        return inputs
    if isinstance(leading, str) and leading in dims:
        raise InputError(f"give either --batch or --dim {leading}=..., not both")
    closed = []
    for declared in inputs:
        if not declared.dims:
            closed.append(declared)
            continue
        dims_ = tuple(1 if d == leading and isinstance(d, str) else d for d in declared.dims)
        closed.append(Declared(declared.name, (1, *dims_[1:])))
    return tuple(closed)
