"""Walk and change ONNX graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
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


def names_made(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield what the nodes of a graph compute, without those inside of them."""
    for node in graph.node:
        yield from node.output


def rename_inputs(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    """Rename what a node reads, and what its subgraphs read from outside of them."""
    for i, name in enumerate(node.input):
        node.input[i] = names.get(name, name)
    for attribute in node.attribute:
        for graph in ([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs):
            own = {v.name for v in (*graph.input, *graph.initializer)} | set(names_made(graph))
            outer = {k: v for k, v in names.items() if k not in own}
            for inner in graph.node:
                rename_inputs(inner, outer)
            for output in graph.output:
                output.name = outer.get(output.name, output.name)
