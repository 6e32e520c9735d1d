"""Inputs that always have one value, as a sampling rate, as constants of the graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from tunerd.errors import InputError

if TYPE_CHECKING:
    import onnx


def fix_inputs(proto: onnx.ModelProto, constants: Mapping[str, float]) -> tuple[str, ...]:
    """Make inputs of a graph constants, in place; return what was done, in words.

    constants: numbers by input name, which all elements of the input have. Open dimensions of such
    an input are 1.

    Raises InputError for a name that is no input's, and a number that its type does not hold.
    """
    from onnx import TensorProto, helper, numpy_helper

    given = {i.name for i in proto.graph.initializer}
    inputs = {i.name: i for i in proto.graph.input if i.name not in given}
    notes = []
    for name, number in constants.items():
        value = inputs.get(name)
        if value is None:
            raise InputError(f"--constant names no input '{name}', only {', '.join(inputs)}")
        tensor = value.type.tensor_type
        if tensor.elem_type in (TensorProto.UNDEFINED, TensorProto.STRING):
            raise InputError(f"--constant {name}: the input is no tensor of numbers")
        dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        filled = np.full([max(d.dim_value, 1) for d in tensor.shape.dim], number).astype(dtype)
        if dtype.kind in "biu" and filled.size and filled.flat[0] != number:
            raise InputError(f"--constant {name}={number:g}: the input is of {dtype}")
        proto.graph.initializer.append(numpy_helper.from_array(filled, name))
        proto.graph.input.remove(value)
        notes.append(f"input '{name}' is the constant {number:g}")
    return tuple(notes)
