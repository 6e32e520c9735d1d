"""Write ONNX nodes in place of others, in the opset of their model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tunerd.frontend.onnx.graphs import STANDARD_DOMAINS, names_made, rename_inputs, replace_nodes
from tunerd.frontend.onnx.weights import values_of

if TYPE_CHECKING:
    import onnx

# Writes nodes and returns the names of what replaces the outputs of one; None leaves it as it is.
Decomposition = Callable[["onnx.NodeProto", "Builder"], Sequence[str] | None]


class Refused(Exception):
    """An operator that cannot be taken; its text says which, why, and what to do."""


class Builder:
    """What is known of a graph whose shapes are inferred, and the nodes that are written into it.

    Nodes may be written for all opsets from 7 on: what moved from attributes to inputs has a
    method of its own.
    """

    def __init__(self, proto: onnx.ModelProto) -> None:
        self.graph = proto.graph
        self.opset = next(o.version for o in proto.opset_import if o.domain in STANDARD_DOMAINS)
        self.nodes: list[onnx.NodeProto] = []
        values = (*self.graph.input, *self.graph.value_info, *self.graph.output)
        self._types = {v.name: v.type.tensor_type for v in values}
        self._tensors = {t.name: t for t in self.graph.initializer}
        for node in self.graph.node:
            if node.op_type == "Constant" and node.attribute[0].HasField("t"):
                self._tensors[node.output[0]] = node.attribute[0].t
        self._made: dict[str, np.ndarray] = {}  # constants that were written
        self._taken = {*self._types, *self._tensors, *names_made(self.graph)}

    # --- what is known

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a value's shape; raises ValueError where inference does not know it."""
        if name in self._made:
            return self._made[name].shape
        if name in self._tensors:
            return tuple(self._tensors[name].dims)
        tensor = self._types.get(name)
        if tensor is None or not tensor.HasField("shape"):
            raise ValueError(f"the shape of '{name}' is not known")
        if not all(d.HasField("dim_value") for d in tensor.shape.dim):
            raise ValueError(f"the shape of '{name}' is not fixed")
        return tuple(int(d.dim_value) for d in tensor.shape.dim)

    def dtype(self, name: str) -> np.dtype[Any]:
        from onnx import helper

        if name in self._made:
            return self._made[name].dtype
        if name in self._tensors:
            number = self._tensors[name].data_type
        elif name in self._types:
            number = self._types[name].elem_type
        else:
            raise ValueError(f"the type of '{name}' is not known")
        found: np.dtype[Any] = np.dtype(helper.tensor_dtype_to_np_dtype(number))
        return found

    def type_proto(self, name: str) -> onnx.TypeProto:
        """Return a tensor's type and shape, as far as they are known; nothing of "" at all."""
        from onnx import TypeProto, helper

        if name in self._tensors:
            tensor = self._tensors[name]
            return helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
        return TypeProto(tensor_type=self._types[name]) if name in self._types else TypeProto()

    def value(self, name: str) -> np.ndarray | None:
        """Return the values of a constant, None of anything else."""
        if name in self._tensors and name not in self._made:
            self._made[name] = values_of(self._tensors[name])
        return self._made.get(name)

    def constant_of(self, name: str, what: str) -> np.ndarray:
        """Return the values of a constant; raises ValueError where it is none."""
        value = self.value(name)
        if value is None:
            raise ValueError(f"its {what} is no constant; export the model with a fixed one")
        return value

    # --- what is written

    def constant(self, values: Any, dtype: Any = None) -> str:
        from onnx import numpy_helper

        name = self._fresh("constant")
        array = self._made[name] = np.asarray(values, dtype, order="C")
        self.graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        return self.ops(kind, 1, *inputs, **attributes)[0]

    def ops(self, kind: str, count: int, *inputs: str, **attributes: Any) -> list[str]:
        """Write a node of `count` outputs and return their names."""
        from onnx import helper

        names = [self._fresh(kind) for _ in range(count)]
        self.nodes.append(helper.make_node(kind, inputs, names, **attributes))
        return names

    def cast(self, x: str, dtype: Any) -> str:
        from onnx import helper

        return self.op("Cast", x, to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    def reshape(self, x: str, *shape: int) -> str:
        if (known := self.value(x)) is not None:
            return self.constant(known.reshape(shape))
        return self.op("Reshape", x, self.constant(shape, np.int64))

    def transpose(self, x: str, *perm: int) -> str:
        if (known := self.value(x)) is not None:
            return self.constant(known.transpose(perm))
        return self.op("Transpose", x, perm=list(perm))

    def split(self, x: str, sizes: Sequence[int], axis: int) -> list[str]:
        if len(sizes) == 1:
            return [x]
        if (known := self.value(x)) is not None:
            parts = np.split(known, np.cumsum(sizes)[:-1], axis)
            return [self.constant(part) for part in parts]
        if self.opset < 13:
            return self.ops("Split", len(sizes), x, axis=axis, split=list(sizes))
        return self.ops("Split", len(sizes), x, self.constant(sizes, np.int64), axis=axis)

    def unsqueeze(self, x: str, axis: int) -> str:
        if self.opset < 13:
            return self.op("Unsqueeze", x, axes=[axis])
        return self.op("Unsqueeze", x, self.constant([axis], np.int64))

    def squeeze(self, x: str, axis: int) -> str:
        if self.opset < 13:
            return self.op("Squeeze", x, axes=[axis])
        return self.op("Squeeze", x, self.constant([axis], np.int64))

    def copy(self, node: onnx.NodeProto, names: dict[str, str]) -> None:
        """Write a node of another graph, whose values have other `names` here; its own get some."""
        new = type(node)()
        new.CopyFrom(node)
        rename_inputs(new, names)
        for i, output in enumerate(node.output):
            if output:
                new.output[i] = names[output] = self._fresh(output)
        self.nodes.append(new)

    def slice(self, x: str, start: int, end: int, axis: int, *, step: int = 1) -> str:
        if self.opset < 10:
            if step != 1:
                raise ValueError(f"opset {self.opset} cannot step back; export it with opset 10")
            return self.op("Slice", x, starts=[start], ends=[end], axes=[axis])
        numbers = [self.constant([n], np.int64) for n in (start, end, axis, step)]
        return self.op("Slice", x, *numbers)

    def reduce(self, kind: str, x: str, axes: Sequence[int], *, keepdims: bool = True) -> str:
        kept = int(keepdims)
        if self.opset >= (13 if kind == "ReduceSum" else 18):
            return self.op(kind, x, self.constant(axes, np.int64), keepdims=kept)
        return self.op(kind, x, axes=list(axes), keepdims=kept)

    def _fresh(self, kind: str) -> str:
        name = f"{kind.lower()}/{len(self._taken)}"
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name


def decompose(
    proto: onnx.ModelProto,
    table: Mapping[str, Decomposition],
    domains: Collection[str] = STANDARD_DOMAINS,
) -> bool:
    """Replace the nodes that `table` has entries for, in place; say whether there was one.

    The shapes in `proto` must be inferred, as far as entries ask for them. Raises Refused where an
    entry raises ValueError.
    """
    from onnx import helper

    if not any(node.op_type in table for node in proto.graph.node):
        return False
    builder = Builder(proto)
    found = False
    for node in proto.graph.node:
        names = None
        if node.op_type in table and node.domain in domains:
            before = len(builder.nodes)
            try:
                names = table[node.op_type](node, builder)
            except ValueError as error:
                named = f" '{node.name}'" if node.name else ""
                raise Refused(f"the model's {node.op_type}{named}: {error}") from error
            assert names is not None or before == len(builder.nodes)
        if names is None:
            builder.nodes.append(node)
            continue
        found = True
        for name, output in zip(names, node.output, strict=False):
            if output:
                builder.nodes.append(helper.make_node("Identity", [name], [output]))
    replace_nodes(proto.graph, builder.nodes)
    return found


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """Return the values of a node's attributes, strings as text."""
    from onnx import helper

    found = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    return {k: _text(v) for k, v in found.items()}


def _text(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, list):
        return [_text(v) for v in value]
    return value


def inputs_of(node: onnx.NodeProto, count: int) -> list[str]:
    """Return the names of a node's inputs, "" for those that it does not have."""
    return [*node.input, *[""] * (count - len(node.input))]
