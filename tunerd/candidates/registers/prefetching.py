"""Asks ahead for what a cut reads: weights in the order of its steps, and what is added behind.

A model's weights come from memory, and a CPU that fetches ahead by itself stops at the end of each
page. What is asked for beyond the last weight is nothing, and does no harm. What a tile's sums are
added to, as in a residual block, is as large as they are, and lies in many pages: it is asked for
when the tile begins.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunerd.candidates.registers.rewriting import at_loops, loops_of, root_of, with_body
from tunerd.candidates.registers.units import operands

if TYPE_CHECKING:
    from tvm.ir import IRModule

    from tunerd.candidates.registers.sums import Cut, Sums

DEPTH, TILES = "tunerd.depth", "tunerd.tiles"  # marks of loops
_MARKS = (DEPTH, TILES)
_AHEAD_BYTES = 8 << 10  # of the weights: two pages
_READ, _KEPT, _DATA = 0, 3, 1  # as LLVM's prefetch has them


def with_prefetches(mod: IRModule, sums: Sums, cut: Cut) -> IRModule:
    """Return a module whose marked loops ask ahead.

    DEPTH: what a loop over the depth reads some steps later. TILES: what the last nest in a loop
    over tiles reads beside the sums.
    """
    from tvm import tirx

    (name,) = mod.get_global_vars()
    steps = steps_ahead(cut.vectors * sums.unit.vector_bytes)
    ahead = functools.partial(_ahead, steps=steps, lanes=sums.unit.lanes, vectors=cut.vectors)

    def written(node: Any) -> Any:
        if isinstance(node, tirx.SeqStmt):
            return tirx.SeqStmt([written(each) for each in node])
        if not isinstance(node, tirx.For):
            return node
        ahead_of: Sequence[Any] = ()
        with contextlib.suppress(ValueError):  # it is read all the same
            if DEPTH in node.annotations:
                ahead_of = ahead(node)
            elif TILES in node.annotations:
                ahead_of = _behind(node.body[-1], mod[name].params)
        body = tirx.stmt_seq(*ahead_of, written(node.body))
        marks = {key: value for key, value in node.annotations.items() if key not in _MARKS}
        return tirx.For(
            node.loop_var, node.min, node.extent, node.kind, body, node.thread_binding, marks
        )

    return with_body(mod, written(root_of(mod).body))


def steps_ahead(step_bytes: int) -> int:
    """Return how many steps before its use a weight is asked for, of which a step reads so many."""
    return _AHEAD_BYTES // step_bytes


def _ahead(loop: Any, *, steps: int, lanes: int, vectors: int) -> Sequence[Any]:
    """Return what asks for the weights of a step of this loop, so many steps before."""
    from tvm import tirx

    loops, realized = loops_of(loop.body)
    dtype = str(loop.loop_var.ty.dtype)
    values = {each.loop_var: each.min for each in loops}
    values[loop.loop_var] = loop.loop_var + tirx.IntImm(dtype, steps)
    weights = operands(realized.block)[1]
    *before, last = at_loops(realized, values).values_of(weights.indices)
    return [
        asked(weights.source, [*before, last + tirx.IntImm(dtype, vector * lanes)])
        for vector in range(vectors)
    ]


def _behind(nest: Any, params: Sequence[Any]) -> Sequence[Any]:
    """Return what asks for all that a nest reads of parameters as large as what it writes.

    The last of its loops is over the lanes of a vector.
    """
    from tvm import tirx

    (*loops, lanes), realized = loops_of(nest)
    block = realized.block
    shape = _shape_of(block.writes[0])
    large = [
        region
        for region in block.reads
        if any(region.source.same_as(each) for each in params) and _shape_of(region) == shape
    ]
    new = {each.loop_var: tirx.Var("ahead", each.loop_var.ty) for each in loops}
    places = at_loops(realized, new | {lanes.loop_var: lanes.min})
    found = []
    for region in large:
        body = asked(region.source, places.values_of([each.min for each in region.region]))
        for each in reversed(loops):
            body = tirx.For(new[each.loop_var], each.min, each.extent, each.kind, body)
        found.append(body)
    return found


def _shape_of(region: Any) -> list[int]:
    return [int(extent) for extent in region.source.ty.shape]


def asked(source: Any, indices: Sequence[Any]) -> Any:
    """Return what asks for the cache line in which an element lies."""
    from tvm import tirx

    address = tirx.address_of(tirx.BufferLoad(source, indices))
    call = tirx.call_intrin("void", "tirx.prefetch", address, _READ, _KEPT, _DATA)
    return tirx.Evaluate(call)
