"""The loops of a cut, tile by tile, with each vector of sums in memory of its own: a register.

In one piece of memory they would stay there, where several cores have a part of the loops each:
nothing tells the compiler then that what is asked for ahead lies elsewhere.

Where columns fill no vectors, the last one overlaps the one before it. 68 columns are vectors of 16
from column 0, 16, 32, 48 and 52. What two vectors have in common is computed twice, to the same
values, and stored twice. So each group of columns, which has inputs of its own, is cut like the
only one. Schedules of TVM cannot say that; the loops are written here, and the expressions in them
are those of the task's blocks.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunerd.candidates.nests.blocks import reduced_of, spatial_of
from tunerd.candidates.registers.prefetching import asked, steps_ahead
from tunerd.candidates.registers.rewriting import Rewriting, with_loops
from tunerd.candidates.registers.units import operands, uses
from tunerd.candidates.registers.writing import Writing, block, buffer, zero

if TYPE_CHECKING:
    from tvm.ir import IRModule

    from tunerd.candidates.registers.sums import Cut, Sums


def with_tiles(mod: IRModule, sums: Sums, stored: str, cut: Cut) -> IRModule:
    """Return a module with the loops of a cut in place of those of its sums.

    stored: as `with_loops` has it.
    """
    (name,) = mod.get_global_vars()
    params = mod[name].params
    return with_loops(
        mod, sums.sums, stored, lambda own, behind: _Loops(sums, cut, own, behind, params).written()
    )


@dataclass(frozen=True)
class _Place:
    """Where a vector is: of which row of a tile, and its first column in its group."""

    rows: tuple[Any, ...]
    group: Any
    first: Any


class _Loops:
    """Writes the loops over the tiles of one cut."""

    def __init__(self, of: Sums, cut: Cut, sums: Any, stored: Any, params: Sequence[Any]) -> None:
        self._of, self._cut, self._params = of, cut, params
        self._sums, self._stored = sums, stored
        self._lanes = of.unit.lanes
        self._write = Writing(str(spatial_of(sums)[-1].var.ty.dtype))

    def written(self) -> Any:
        of, cut = self._of, self._cut
        rank = len(of.rows)
        tile = cut.tile(rank)
        around = [rows // own for rows, own in zip(of.rows, tile, strict=True)]
        panels = [of.groups, of.vectors // cut.vectors]
        counts = [*panels, *around] if cut.columns_outside else [*around, *panels]
        number = self._write.var("tile")
        at = self._write.unfused(number, counts)
        (group, panel), outer = (at[:2], at[2:]) if cut.columns_outside else (at[-2:], at[:-2])
        places = [
            [_Place(rows, group, self._first(panel, vector)) for vector in range(cut.vectors)]
            for rows in self._rows(outer, tile)
        ]
        flat = [place for row in places for place in row]
        dtype = str(self._sums.writes[0].source.ty.dtype)
        kept = [buffer(f"sums_{i}", self._lanes, dtype=dtype) for i in range(len(flat))]
        statements = [
            *(each for place in flat for each in self._asked_behind(place)),
            *(self._write.vector(self._lanes, functools.partial(zero, to)) for to in kept),
            self._added(flat, kept),
            *(self._store(place, at) for place, at in zip(flat, kept, strict=True)),
        ]
        body = block("tile", statements, kept)
        return self._write.loop(number, math.prod(counts), body, is_parallel=of.cores > 1)

    # --- places --------------------------------------------------------------------------------

    def _rows(self, outer: Sequence[Any], tile: Sequence[int]) -> Iterator[tuple[Any, ...]]:
        for own in itertools.product(*map(range, tile)):
            yield tuple(
                at * self._write.index(size) + self._write.index(row)
                for at, size, row in zip(outer, tile, own, strict=True)
            )

    def _first(self, panel: Any, vector: int) -> Any:
        """Return the column of a group with which a vector of a panel begins."""
        from tvm import tirx

        last = self._of.columns - self._lanes
        if self._of.vectors == self._cut.vectors:
            return self._write.index(min(vector * self._lanes, last))
        size = self._cut.vectors * self._lanes
        first = panel * self._write.index(size) + self._write.index(vector * self._lanes)
        may_overlap = vector == self._cut.vectors - 1 and self._of.columns % self._lanes
        return tirx.min(first, self._write.index(last)) if may_overlap else first

    # --- statements ----------------------------------------------------------------------------

    def _added(self, places: Sequence[_Place], kept: Sequence[Any]) -> Any:
        """Return the loops over the depth, in which each vector of a tile is added to."""
        from tvm import tirx

        reduced = reduced_of(self._sums)
        loops = [self._write.var(str(v.var.name)) for v in reduced]
        own = dict(zip((v.var for v in reduced), loops, strict=True))
        if (group := self._of.unit.group) > 1:
            own[reduced[-1].var] *= self._write.index(group)
        product = self._sums.body.value.b

        def added(place: _Place, to: Any) -> Any:
            if self._of.unit.instruction is not None:
                return self._instruction(self._at(place, None, self._sums, own), to)

            def store(lane: Any) -> Any:
                value = self._at(place, lane, self._sums, own).value_of(product)
                return tirx.BufferStore(to, tirx.BufferLoad(to, [lane]) + value, [lane])

            return self._write.vector(self._lanes, store)

        ahead = self._asked_ahead(places[: self._cut.vectors], own)
        body = tirx.stmt_seq(*ahead, *map(added, places, kept))
        *taps, depth = [int(v.dom.extent) for v in reduced]
        for loop, count in zip(reversed(loops), (depth // group, *reversed(taps)), strict=True):
            body = self._write.loop(loop, count, body)
        return body

    def _instruction(self, at: Rewriting, to: Any) -> Any:
        """Return what adds a group of products to a vector of sums by one instruction.

        The weights of a vector and a group lie together, and so do the values of a group.
        """
        from tvm import tirx

        unit = self._of.unit
        assert unit.instruction is not None

        def together(source: Any, indices: Sequence[Any], count: int) -> Any:
            *before, first = indices
            return tirx.BufferLoad(source, [*before, tirx.Ramp(first, 1, count)])

        rows, weights = operands(self._sums)
        depth = reduced_of(self._sums)[-1].var
        *before, last = rows.indices
        if not last.same_as(depth) or any(uses(index, depth) for index in before):
            raise ValueError("what an instruction takes of a row does not lie together")
        sums = together(to, [self._write.index(0)], unit.lanes)
        values = together(rows.source, at.values_of(rows.indices), unit.group)
        all_weights = together(
            weights.source, at.values_of(weights.indices), unit.lanes * unit.group
        )
        made = unit.instruction(sums, values, all_weights)
        return tirx.BufferStore(to, made, [tirx.Ramp(self._write.index(0), 1, unit.lanes)])

    def _asked_ahead(self, row: Sequence[_Place], reduced: Mapping[Any, Any]) -> list[Any]:
        """Return what asks for the weights of a later step, of all vectors of a row."""
        of = self._of
        if not of.reads_in_order:
            return []
        weights = operands(self._sums)[1]
        *_, depth = reduced
        steps = steps_ahead(self._cut.vectors * of.unit.vector_bytes)
        later = {**reduced, depth: reduced[depth] + self._write.index(steps)}
        return [
            asked(
                weights.source, self._at(place, None, self._sums, later).values_of(weights.indices)
            )
            for place in row
        ]

    def _asked_behind(self, place: _Place) -> list[Any]:
        """Return what asks for a vector of each parameter that is as large as what is stored."""
        stored = self._stored
        if stored.same_as(self._sums):
            return []
        shape = _shape_of(stored.writes[0])
        at = self._at(place, None, stored, {})
        return [
            asked(region.source, at.values_of([each.min for each in region.region]))
            for region in stored.reads
            if any(region.source.same_as(each) for each in self._params)
            and _shape_of(region) == shape
        ]

    def _store(self, place: _Place, kept: Any) -> Any:
        """Return what stores a vector of sums, or what is made of it."""
        from tvm import tirx

        def store(lane: Any) -> Any:
            at = self._at(place, lane, self._stored, {})
            return at.stored(self._stored, self._sums, tirx.BufferLoad(kept, [lane]))

        return self._write.vector(self._lanes, store)

    def _at(self, place: _Place, lane: Any, of: Any, reduced: Mapping[Any, Any]) -> Rewriting:
        """Return what a block's expressions are at a lane of a vector, by default the first."""
        spatial = [v.var for v in spatial_of(of)]
        within = place.first if lane is None else place.first + lane
        column = place.group * self._write.index(self._of.columns) + within
        values = {**dict(zip(spatial, [*place.rows, column], strict=True)), **reduced}
        return Rewriting(values, (spatial[-1], self._of.columns, place.group))


def _shape_of(region: Any) -> list[int]:
    return [int(extent) for extent in region.source.ty.shape]
