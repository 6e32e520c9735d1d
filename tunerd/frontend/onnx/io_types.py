"""Give a model's inputs and outputs another floating-point type than its file has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tunerd.errors import InputError
from tunerd.frontend.onnx.graphs import names_made, rename_inputs, replace_nodes, subgraphs
from tunerd.vocabulary import FP16, FP32

if TYPE_CHECKING:
    import onnx

# NumPy has no bfloat16, and TF32 is no type that is stored.
_TYPES = {FP32: ("float32", "FLOAT"), FP16: ("float16", "FLOAT16")}


def with_io_precision(proto: onnx.ModelProto, precision: str) -> tuple[str, ...]:
    """Give inputs and outputs of float32 and float16 the type of a precision, in place.

    Each is cast from or into what the file has, so that what is in between stays as it is. Returns
    what was done, in words; InputError where no input and no output is of such a type.

    precision: fp32 or fp16.
    """
    from onnx import TensorProto, helper

    name, wanted = _TYPES[precision][0], getattr(TensorProto, _TYPES[precision][1])
    others = {getattr(TensorProto, each) for _, each in _TYPES.values()} - {wanted}
    graph = proto.graph
    given = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in given]
    if all(v.type.tensor_type.elem_type not in (*others, wanted) for v in (*inputs, *graph.output)):
        raise InputError(
            "--io-precision changes inputs and outputs of float32 and float16, and the model has "
            "none; leave it out"
        )
    taken = {*given, *(v.name for v in graph.input)}
    taken.update(name for each in subgraphs(graph) for name in names_made(each))
    inner: dict[str, str] = {}  # names of what stays as exported
    before, after, changed = [], [], []

    def apart(name: str) -> str:
        inner[name] = f"{name}_as_exported"
        while inner[name] in taken:
            inner[name] += "_"
        taken.add(inner[name])
        return inner[name]

    for value in inputs:
        exported = value.type.tensor_type.elem_type
        if exported in others:
            own = apart(value.name)
            before.append(helper.make_node("Cast", [value.name], [own], own, to=exported))
            value.type.tensor_type.elem_type = wanted
            changed.append(value.name)
    passed_on = {value.name for value in graph.input}
    for value in graph.output:
        if value.type.tensor_type.elem_type in others:
            value.type.tensor_type.elem_type = wanted
            changed.append(value.name)
            if value.name not in passed_on:  # else it has its new type already
                own = apart(value.name)
                after.append(helper.make_node("Cast", [own], [value.name], own, to=wanted))
    for node in graph.node:
        rename_inputs(node, inner)
        node.output[:] = [inner.get(name, name) for name in node.output]
    for held in (*graph.initializer, *graph.value_info):
        held.name = inner.get(held.name, held.name)
    replace_nodes(graph, [*before, *graph.node, *after])
    return (f"{', '.join(changed)}: of {name}, as --io-precision says",) if changed else ()


def io_precision_of(dtypes: Iterable[str]) -> str:
    """Return the precision of a model's floating-point inputs and outputs; "" if they differ.

    dtypes: NumPy's names of the types of all its inputs and outputs.
    """
    floating = set(dtypes) & dict(_TYPES.values()).keys()
    return next((p for p, (name, _) in _TYPES.items() if floating == {name}), "")
