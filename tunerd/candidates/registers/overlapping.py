"""The loops of a cut whose columns fill no vectors: the last vector overlaps the one before it.

68 columns are vectors of 16 from column 0, 16, 32, 48 and 52. What two vectors have in common is
computed twice, to the same values, and stored twice. So each group of columns, which has inputs of
its own, is cut like the only one. Schedules of TVM cannot say that; the loops are written here, and
the expressions in them are those of the task's blocks.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunerd.candidates.nests.blocks import REDUCE

if TYPE_CHECKING:
    from tvm.ir import IRModule

    from tunerd.candidates.registers.sums import Cut, Sums

_BINARY = frozenset((
    "Add", "Sub", "Mul", "Div", "Mod", "FloorDiv", "FloorMod", "Max", "Min", "EQ", "NE", "LT", "LE",
    "GT", "GE", "And", "Or",
))  # fmt: skip


def with_loops(mod: IRModule, sums: Sums, stored: str, cut: Cut) -> IRModule:
    """Return a module with the loops of a cut in place of those of its sums.

    mod: its blocks are the sums, whatever is computed before or behind them, and `stored`.
    stored: the block that stores what is made of the sums, each at its place; the sums themselves,
        or one that is computed tile by tile.
    """
    from tvm import ir, tirx
    from tvm.s_tir import SBlock, SBlockRealize

    (name,) = mod.get_global_vars()
    function = mod[name]
    root = function.body.block
    nests = [*root.body] if isinstance(root.body, tirx.SeqStmt) else [root.body]
    blocks = {str(block.name_hint): block for block in map(_block_in, nests)}
    loops = _Loops(sums, cut, blocks[sums.sums], blocks[stored]).written()
    gone = blocks[sums.sums].writes[0].source if stored != sums.sums else None
    made = []
    for nest in nests:
        hint = _block_in(nest).name_hint
        if hint == sums.sums:
            made.append(loops)
        elif hint != stored:
            made.append(nest)
    buffers = [each for each in root.alloc_buffers if gone is None or not each.same_as(gone)]
    block = SBlock(
        [],
        root.reads,
        root.writes,
        root.name_hint,
        tirx.stmt_seq(*made),
        None,
        buffers,
        None,
        root.annotations,
    )
    realized = SBlockRealize([], tirx.const(True, "bool"), block)
    return ir.IRModule({name: function.with_body(realized)})


def _block_in(nest: Any) -> Any:
    from tvm.s_tir import SBlockRealize

    while not isinstance(nest, SBlockRealize):
        nest = nest.body
    return nest.block


@dataclass(frozen=True)
class _Place:
    """Where a vector is: of which row of a tile, and its first column in its group."""

    rows: tuple[Any, ...]
    group: Any
    first: Any


class _Loops:
    """Writes the loops over the tiles of one cut."""

    def __init__(self, of: Sums, cut: Cut, sums: Any, stored: Any) -> None:
        self._of, self._cut = of, cut
        self._sums, self._stored = sums, stored
        self._lanes = of.unit.lanes
        self._spatial = [v for v in sums.iter_vars if int(v.iter_type) != REDUCE]
        self._dtype = str(self._spatial[-1].var.ty.dtype)

    def written(self) -> Any:
        from tvm import tirx
        from tvm.s_tir import SBlock, SBlockRealize

        of, cut = self._of, self._cut
        rank = len(of.rows)
        tile = cut.tile(rank)
        around = [rows // own for rows, own in zip(of.rows, tile, strict=True)]
        panels = [of.groups, of.vectors // cut.vectors]
        counts = [*panels, *around] if cut.columns_outside else [*around, *panels]
        number = tirx.Var("tile", self._dtype)
        at = self._unfused(number, counts)
        (group, panel), outer = (at[:2], at[2:]) if cut.columns_outside else (at[-2:], at[:-2])
        places = [
            [_Place(rows, group, self._first(panel, vector)) for vector in range(cut.vectors)]
            for rows in self._rows(outer, tile)
        ]
        flat = [place for row in places for place in row]
        kept = [
            tirx.decl_buffer([self._lanes], "float32", name=f"sums_{i}") for i in range(len(flat))
        ]
        statements = [
            *(self._vector(functools.partial(_zero, to)) for to in kept),
            self._added(flat, kept),
            *(self._store(place, at) for place, at in zip(flat, kept, strict=True)),
        ]
        block = SBlock([], [], [], "tile", tirx.stmt_seq(*statements), None, kept)
        body = SBlockRealize([], tirx.const(True, "bool"), block)
        kind = tirx.ForKind.PARALLEL if of.cores > 1 else tirx.ForKind.SERIAL
        return self._for(number, math.prod(counts), kind, body)

    # --- places --------------------------------------------------------------------------------

    def _unfused(self, number: Any, counts: Sequence[int]) -> list[Any]:
        """Return the indices of loops that are fused into one."""
        from tvm import tirx

        found, rest = [], number
        for count in reversed(counts):
            is_one = count == 1
            found.append(self._int(0) if is_one else tirx.floormod(rest, self._int(count)))
            rest = rest if is_one else tirx.floordiv(rest, self._int(count))
        return found[::-1]

    def _rows(self, outer: Sequence[Any], tile: Sequence[int]) -> Iterator[tuple[Any, ...]]:
        for own in itertools.product(*map(range, tile)):
            yield tuple(
                at * self._int(size) + self._int(row)
                for at, size, row in zip(outer, tile, own, strict=True)
            )

    def _first(self, panel: Any, vector: int) -> Any:
        """Return the column of a group with which a vector of a panel begins."""
        from tvm import tirx

        last = self._of.columns - self._lanes
        if self._of.vectors == self._cut.vectors:
            return self._int(min(vector * self._lanes, last))
        size = self._cut.vectors * self._lanes
        first = panel * self._int(size) + self._int(vector * self._lanes)
        may_overlap = vector == self._cut.vectors - 1 and self._of.columns % self._lanes
        return tirx.min(first, self._int(last)) if may_overlap else first

    # --- statements ----------------------------------------------------------------------------

    def _added(self, places: Sequence[_Place], kept: Sequence[Any]) -> Any:
        """Return the loops over the depth, in which each vector of a tile is added to."""
        from tvm import tirx

        reduced = [v for v in self._sums.iter_vars if int(v.iter_type) == REDUCE]
        own = {v.var: tirx.Var(str(v.var.name), self._dtype) for v in reduced}
        product = self._sums.body.value.b

        def added(place: _Place, to: Any) -> Any:
            def store(lane: Any) -> Any:
                value = self._at(place, lane, self._sums, own).value_of(product)
                return tirx.BufferStore(to, tirx.BufferLoad(to, [lane]) + value, [lane])

            return self._vector(store)

        body = tirx.stmt_seq(*map(added, places, kept))
        for v in reversed(reduced):
            body = self._for(own[v.var], int(v.dom.extent), tirx.ForKind.SERIAL, body)
        return body

    def _store(self, place: _Place, kept: Any) -> Any:
        """Return what stores a vector of sums, or what is made of it."""
        from tvm import tirx

        stored = self._stored

        def store(lane: Any) -> Any:
            value = tirx.BufferLoad(kept, [lane])
            at = self._at(place, lane, stored, {})
            if not stored.same_as(self._sums):
                at.sums = self._sums.writes[0].source, value
                value = at.value_of(stored.body.value)
            return tirx.BufferStore(stored.body.buffer, value, at.values_of(stored.body.indices))

        return self._vector(store)

    def _at(self, place: _Place, lane: Any, block: Any, reduced: Mapping[Any, Any]) -> Rewriting:
        """Return what a block's expressions are at a lane of a vector."""
        spatial = [v.var for v in block.iter_vars if int(v.iter_type) != REDUCE]
        within = place.first + lane
        column = place.group * self._int(self._of.columns) + within
        values = {**dict(zip(spatial, [*place.rows, column], strict=True)), **reduced}
        return Rewriting(values, (spatial[-1], self._of.columns, place.group))

    def _vector(self, store: Callable[[Any], Any]) -> Any:
        from tvm import tirx

        lane = tirx.Var("lane", self._dtype)
        return self._for(lane, self._lanes, tirx.ForKind.VECTORIZED, store(lane))

    def _for(self, number: Any, count: int, kind: Any, body: Any) -> Any:
        from tvm import tirx

        return tirx.For(number, self._int(0), self._int(count), kind, body)

    def _int(self, value: int) -> Any:
        from tvm import tirx

        return tirx.IntImm(self._dtype, value)


def _zero(to: Any, lane: Any) -> Any:
    from tvm import tirx

    return tirx.BufferStore(to, tirx.const(0.0, "float32"), [lane])


class Rewriting:
    """Expressions with other values for a block's loops.

    values: of each loop.
    column: the loop of the columns, how many a group has, and the group, where that is known.
    """

    def __init__(
        self, values: Mapping[Any, Any], column: tuple[Any, int, Any] | None = None
    ) -> None:
        self._values, self._column = values, column
        self.sums: tuple[Any, Any] | None = None  # the buffer of sums, and what is read of it

    def values_of(self, expressions: Sequence[Any]) -> list[Any]:
        return [self.value_of(each) for each in expressions]

    def value_of(self, node: Any) -> Any:
        """Return an expression's value; ValueError for one of a kind that is not known."""
        from tvm import tirx

        kind = type(node).__name__
        if kind == "Var":
            return self._values.get(node, node)
        if kind in ("IntImm", "FloatImm", "StringImm"):
            return node
        if kind in _BINARY:
            if (group := self._group_of(node)) is not None:
                return group
            return type(node)(self.value_of(node.a), self.value_of(node.b))
        if kind == "TensorLoad":
            if self.sums is not None and node.source.same_as(self.sums[0]):
                return self.sums[1]
            return tirx.BufferLoad(node.source, self.values_of(node.indices))
        if kind == "Cast":
            return tirx.Cast(str(node.ty.dtype), self.value_of(node.value))
        if kind == "Not":
            return tirx.Not(self.value_of(node.a))
        if kind == "Select":
            parts = (node.condition, node.true_value, node.false_value)
            return tirx.Select(*self.values_of(parts))
        if kind == "Call":
            return tirx.Call(node.ty, node.op, self.values_of(node.args))
        raise ValueError(f"it has a {kind}")

    def _group_of(self, node: Any) -> Any:
        """Return the group where a node divides the column by a group's columns.

        Then all lanes of a vector read the same, which is not to be found out again.
        """
        if self._column is None:
            return None
        column, size, group = self._column
        is_group = type(node).__name__ == "FloorDiv" and node.a.same_as(column)
        return group if is_group and getattr(node.b, "value", None) == size else None
