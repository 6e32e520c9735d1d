"""Give a model's inputs and outputs another floating-point type than its file has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tunerd.errors import InputError
from tunerd.frontend.onnx.graphs import subgraphs
from tunerd.vocabulary import FP32

if TYPE_CHECKING:
    import onnx

# NumPy has no bfloat16, and TF32 is no type that is stored.
_TYPES = {FP32: ("float32", "FLOAT"), "fp16": ("float16", "FLOAT16")}


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
    taken = _names(graph)
    is_given = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in is_given]
    if all(v.type.tensor_type.elem_type not in (*others, wanted) for v in (*inputs, *graph.output)):
        raise InputError(
            "--io-precision changes inputs and outputs of float32 and float16, and the model has "
            "none; leave it out"
        )
    before, after, changed = [], [], []
    for value in inputs:
        exported = value.type.tensor_type.elem_type
        if exported in others:
            inner = _fresh(f"{value.name}_as_exported", taken)
            _rename_uses(graph, value.name, inner)
            before.append(helper.make_node("Cast", [value.name], [inner], inner, to=exported))
            value.type.tensor_type.elem_type = wanted
            changed.append(value.name)
    passed_on = {value.name for value in graph.input}
    for value in graph.output:
        if value.type.tensor_type.elem_type not in others:
            continue
        value.type.tensor_type.elem_type = wanted
        changed.append(value.name)
        if value.name in passed_on:  # an input as it is, which has its new type already
            continue
        inner = _fresh(f"{value.name}_as_exported", taken)
        _rename_uses(graph, value.name, inner)
        for node in graph.node:
            _replace(node.output, value.name, inner)
        for tensor in graph.initializer:
            tensor.name = inner if tensor.name == value.name else tensor.name
        after.append(helper.make_node("Cast", [inner], [value.name], inner, to=wanted))
    nodes = [*before, *graph.node, *after]
    del graph.node[:]
    graph.node.extend(nodes)
    return (f"{', '.join(changed)}: of {name}, as --io-precision says",) if changed else ()


def io_precision_of(dtypes: Iterable[str]) -> str:
    """Return the precision of a model's floating-point inputs and outputs; "" if they differ.

    dtypes: NumPy's names of the types of all its inputs and outputs.
    """
    floating = set(dtypes) & dict(_TYPES.values()).keys()
    return next((p for p, (name, _) in _TYPES.items() if floating == {name}), "")


def _names(graph: onnx.GraphProto) -> set[str]:
    found: set[str] = set()
    for each in subgraphs(graph):
        found.update(v.name for v in (*each.input, *each.output, *each.initializer))
        found.update(name for node in each.node for name in (*node.input, *node.output))
    return found


def _fresh(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _rename_uses(graph: onnx.GraphProto, name: str, new: str) -> None:
    for each in subgraphs(graph):
        for node in each.node:
            _replace(node.input, name, new)
        if each is not graph:
            for value in each.output:
                value.name = new if value.name == name else value.name


def _replace(names: Sequence[str], name: str, new: str) -> None:
    for nth, each in enumerate(names):
        if each == name:
            names[nth] = new  # type: ignore[index]  # protobuf's list
