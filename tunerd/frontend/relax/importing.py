"""An ONNX graph -> a Relax module, by TVM's importer and the converters that replace some of it."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections import Counter
from typing import TYPE_CHECKING

from tunerd.errors import ModelError
from tunerd.frontend.onnx.file import counted
from tunerd.frontend.onnx.graphs import subgraphs
from tunerd.frontend.onnx.reference import last_line

if TYPE_CHECKING:
    import onnx
    from tvm.ir import IRModule

log = logging.getLogger(__name__)


def import_onnx(proto: onnx.ModelProto, name: str) -> IRModule:
    """Import the graph of the model `name`; ModelError that names what TVM cannot take."""
    from tvm.relax.frontend.onnx import from_onnx

    from tunerd.frontend.relax.constants import name_inputs
    from tunerd.frontend.relax.converters import own_converters

    with own_converters():
        _require_known_operators(proto, name)
    # The importer prints what it fails on, and warns of each input that it renames.
    with contextlib.redirect_stdout(io.StringIO()) as printed, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with own_converters():
                return name_inputs(from_onnx(proto))
        except Exception as error:  # any kind: the importer is a thousand converters
            about = printed.getvalue().partition(", with inputs")[0].strip()
            log.info("import failed: %s", about, exc_info=True)
            if branches := sum(node.op_type == "If" for node in proto.graph.node):
                raise branching(branches) from error  # whose results have no shape
            opset = max(o.version for o in proto.opset_import)
            raise ModelError(
                f"TVM cannot import {name}: {about or 'the graph'} of opset {opset}: "
                f"{last_line(error)}; export the model without this operator"
            ) from error


# What to do about operators whose kernels depend on the values of inputs.
WITHOUT_CHOICE = (
    "give an input that chooses between them and always has one value with --constant "
    "NAME=NUMBER, or export it without them"
)


def branching(count: int) -> ModelError:
    """Return what is said of a model in which branches are left."""
    return ModelError(
        f"{count} of the model's If operators depend on the values of the inputs, with results of "
        "other shapes; only models that always run the same kernels can be tuned, so "
        f"{WITHOUT_CHOICE}"
    )


def _require_known_operators(proto: onnx.ModelProto, name: str) -> None:
    from tvm.relax.frontend.onnx import onnx_frontend

    # Its converter of Attention is of another vendor's operator of that name.
    known = {*onnx_frontend._get_convert_map(), "If", "Constant"} - {"Attention"}
    unknown = Counter(
        str(node.op_type)
        for graph in subgraphs(proto.graph)
        for node in graph.node
        if node.op_type not in known
    )
    if unknown:
        is_choice = any(node.op_type == "If" for node in proto.graph.node)
        raise ModelError(
            f"TVM cannot import these operators of {name}: {counted(unknown)}; "
            f"{WITHOUT_CHOICE if is_choice else 'export the model without them'}"
        )
