"""Graphs of either kind: from what a program gives, to a file named by its content, and back."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tunerd.errors import InputError
from tunerd.frontend.onnx.onnx_graph import OnnxGraph
from tunerd.frontend.relax.relax_graph import RelaxGraph
from tunerd.system.files import write_whole
from tunerd.vocabulary import Graph, Packed

if TYPE_CHECKING:
    import onnx
    from tvm.ir import IRModule

    Given: TypeAlias = str | os.PathLike[str] | onnx.ModelProto | IRModule

_KINDS: dict[str, Any] = {kind.kind: kind for kind in (OnnxGraph, RelaxGraph)}


def path_or_graph(given: Given) -> Path | Graph:
    """Return where a model is, or the graph of one that a program holds.

    Raises InputError for what is neither, and ModelError for a Relax module that cannot be tuned.
    """
    if isinstance(given, str | os.PathLike):
        return Path(given)
    if _is_a(given, "onnx", "ModelProto"):
        return OnnxGraph(given)
    if _is_a(given, "tvm.ir", "IRModule"):
        return RelaxGraph.of(given)
    raise InputError(
        f"the model is of type {type(given).__name__}; give the path of a file, an "
        "onnx.ModelProto, or a tvm.IRModule of Relax"
    )


def _is_a(given: Any, module: str, name: str) -> bool:
    """Say whether a value is of a library's class; nothing is where nobody imported that."""
    return module in sys.modules and isinstance(given, getattr(sys.modules[module], name))


def graph_from(kind: str, packed: Packed) -> Graph:
    """Return the graph of a kind, of what its `packed` returned."""
    graph: Graph = _KINDS[kind].from_packed(packed)
    return graph


def save_in(folder: Path, graph: Graph) -> Path:
    """Write a graph into a private folder, which is made, and return its path.

    Raises ModelError for an ONNX model beyond the 2 GiB that a message of protobuf may have.
    """
    path = folder / graph.file_name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.is_file():
        write_whole(path, graph.to_bytes())
    return path
