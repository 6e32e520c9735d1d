"""Asks ahead for the weights of a cut that lie in the order in which they are read.

A model's weights come from memory, and a CPU that fetches ahead by itself stops at the end of each
page. What is asked for beyond the last weight is nothing, and does no harm.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunerd.candidates.registers.overlapping import Rewriting
from tunerd.candidates.registers.units import operands

if TYPE_CHECKING:
    from tvm.ir import IRModule

    from tunerd.candidates.registers.sums import Cut, Sums

MARK = "tunerd.ahead"  # on the loop over the depth
_AHEAD_BYTES = 8 << 10  # of the weights: two pages
_READ, _KEPT, _DATA = 0, 3, 1  # as LLVM's prefetch has them


def with_prefetches(mod: IRModule, sums: Sums, cut: Cut) -> IRModule:
    """Return a module in which the marked loop asks for what it reads some steps later."""
    from tvm import ir, tirx
    from tvm.s_tir import SBlock, SBlockRealize

    (name,) = mod.get_global_vars()
    function = mod[name]
    root = function.body.block
    steps = _AHEAD_BYTES // (cut.vectors * sums.unit.vector_bytes)
    ahead = functools.partial(_ahead, steps=steps, lanes=sums.unit.lanes, vectors=cut.vectors)

    def written(node: Any) -> Any:
        if isinstance(node, tirx.SeqStmt):
            return tirx.SeqStmt([written(each) for each in node])
        if not isinstance(node, tirx.For):
            return node
        is_marked = MARK in node.annotations
        body = tirx.SeqStmt([*ahead(node), node.body]) if is_marked else written(node.body)
        marks = {key: value for key, value in node.annotations.items() if key != MARK}
        return tirx.For(
            node.loop_var, node.min, node.extent, node.kind, body, node.thread_binding, marks
        )

    block = SBlock(
        [],
        root.reads,
        root.writes,
        root.name_hint,
        written(root.body),
        None,
        root.alloc_buffers,
        None,
        root.annotations,
    )
    realized = SBlockRealize([], tirx.const(True, "bool"), block)
    return ir.IRModule({name: function.with_body(realized)})


def _ahead(loop: Any, *, steps: int, lanes: int, vectors: int) -> Sequence[Any]:
    """Return what asks for the weights of a step of this loop, so many steps before."""
    from tvm import tirx
    from tvm.s_tir import SBlockRealize

    dtype = str(loop.loop_var.ty.dtype)
    inside = {loop.loop_var: loop.loop_var + tirx.IntImm(dtype, steps)}
    node = loop.body
    while not isinstance(node, SBlockRealize):
        inside[node.loop_var] = tirx.IntImm(str(node.loop_var.ty.dtype), 0)
        node = node.body
    block = node.block
    at = Rewriting(inside).values_of(node.iter_values)
    loops = [each.var for each in block.iter_vars]
    weights = operands(block)[1]
    *before, last = Rewriting(dict(zip(loops, at, strict=True))).values_of(weights.indices)
    asked = []
    for vector in range(vectors):
        indices = [*before, last + tirx.IntImm(dtype, vector * lanes)]
        address = tirx.address_of(tirx.BufferLoad(weights.source, indices))
        call = tirx.call_intrin("void", "tirx.prefetch", address, _READ, _KEPT, _DATA)
        asked.append(tirx.Evaluate(call))
    return asked
