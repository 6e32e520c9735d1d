"""Walk and change ONNX graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

STANDARD_DOMAINS = ("", "ai.onnx")


def subgraphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield `graph` and every graph inside its nodes (the branches of If, the body of Loop)."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            nested = [attribute.g] if attribute.HasField("g") else []
            for sub in (*nested, *attribute.graphs):
                yield from subgraphs(sub)


def uses(graph: onnx.GraphProto) -> Counter[str]:
    """Count the readers of each name: nodes, also those of subgraphs, and graph outputs."""
    count: Counter[str] = Counter()
    for sub in subgraphs(graph):
        count.update(i for node in sub.node for i in node.input if i)
        count.update(o.name for o in sub.output)
    return count


def replace_nodes(graph: onnx.GraphProto, nodes: list[onnx.NodeProto]) -> None:
    """Put `nodes` in the place of all nodes of `graph`."""
    del graph.node[:]
    graph.node.extend(nodes)
