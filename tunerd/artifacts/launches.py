"""The launches of a model on a GPU: how many blocks of how many threads each of its kernels has."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvm.ir import IRModule


def launches_of(mod: IRModule, symbols: Collection[str]) -> list[dict[str, int]]:
    """Return the launches of one inference: equal ones once, with how often they come as `calls`.

    Args:
        mod: a model whose kernels are scheduled for a GPU.
        symbols: of kernels that TVM did not make, which host code calls.
    """
    from tvm import relax, tirx

    from tunerd.artifacts.device_kernels import CALLS

    calls: Counter[Any] = Counter()

    def visit(node: Any) -> None:
        if isinstance(node, relax.Call) and getattr(node.op, "name", "") in CALLS:
            calls[node.args[0]] += 1

    relax.analysis.post_order_visit(mod["main"], visit)
    found: Counter[tuple[int, int]] = Counter()
    for variable, count in calls.items():
        function = mod[variable]
        if isinstance(function, tirx.PrimFunc):
            for launch in _launches(function, symbols):
                found[launch] += count
    return [
        {"blocks": blocks, "threads": threads, "calls": count}
        for (blocks, threads), count in sorted(found.items())
    ]


def _launches(function: Any, symbols: Collection[str]) -> Iterator[tuple[int, int]]:
    """Yield the blocks and the threads of a block, of each kernel that a function becomes."""
    from tvm import ir, s_tir, tirx
    from tvm_ffi import structural_walk

    if isinstance(function.body, s_tir.SBlockRealize):
        body = function.body.block.body
        for nest in body.seq if isinstance(body, tirx.SeqStmt) else (body,):
            extents = _extents(nest)
            of = {
                kind: math.prod(n for axis, n in extents.items() if axis.startswith(kind))
                for kind in ("blockIdx", "threadIdx")
            }
            if extents:
                yield of["blockIdx"], of["threadIdx"]
        return
    made: list[tuple[int, int]] = []

    def visit(node: Any) -> None:
        # `candidates.base.DeviceKernel`: the grid, the threads, and the shared memory come last.
        name = node.args[0] if len(node.args) else None
        if isinstance(name, ir.StringImm) and name.value in symbols:
            *grid, threads, _ = node.args[-5:]
            made.append((math.prod(map(int, grid)), int(threads)))

    structural_walk(function.body, (ir.Call, visit))
    yield from made


def _extents(nest: Any) -> dict[str, int]:
    """Return how long a nest is along each axis of blocks and threads."""
    from tvm import tirx
    from tvm_ffi import structural_walk

    found: dict[str, int] = {}

    def visit(node: Any) -> None:
        if isinstance(node, tirx.For):
            axis = "" if node.thread_binding is None else str(node.thread_binding.thread_tag)
            extent = node.extent
        else:
            axis = str(node.node.thread_tag) if node.attr_key == "thread_extent" else ""
            extent = node.value
        if axis and isinstance(extent, tirx.IntImm):
            found[axis] = max(found.get(axis, 1), int(extent))

    structural_walk(nest, ((tirx.For, tirx.AttrStmt), visit))
    return found
