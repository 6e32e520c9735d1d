"""The loops of a cut for AMX: sums in its tiles, and what follows them by vectors.

AMX has no instructions but for products: sums go through memory, which stays in the L1 cache, to
what follows them. Each core has tiles from the begin of its part of the loops to the end.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunerd.candidates.nests.blocks import reduced_of, spatial_of
from tunerd.candidates.registers import intrinsic
from tunerd.candidates.registers.rewriting import Rewriting, with_loops
from tunerd.candidates.registers.units import operands
from tunerd.candidates.registers.writing import Writing, block, buffer

if TYPE_CHECKING:
    from tvm.ir import IRModule

    from tunerd.candidates.registers.amx import Amx, AmxCut

_TILE_ROW = 64  # bytes of a row of a tile of sums, or of weights


def with_amx(mod: IRModule, of: Amx, stored: str, cut: AmxCut) -> IRModule:
    """Return a module with the loops of a cut in place of those of its sums.

    stored: as `with_loops` has it.
    """
    (name,) = mod.get_global_vars()
    params = mod[name].params
    return with_loops(
        mod,
        of.sums.sums,
        stored,
        lambda own, behind: _Loops(of, cut, own, behind, params).written(),
    )


@dataclass(frozen=True)
class _Place:
    """Where sums are computed: the rows before those of the line, a place of it, and a column."""

    before: tuple[Any, ...]
    row: Any
    column: Any


class _Loops:
    """Writes the loops over the tiles of one cut. Tiles: of sums, then of rows, then of weights."""

    def __init__(self, of: Amx, cut: AmxCut, sums: Any, stored: Any, params: Sequence[Any]) -> None:
        self._of, self._cut, self._params = of, cut, params
        self._sums, self._stored = sums, stored
        self._line = of.line(cut.merged)
        self._rows = self._line.rows(cut.height)  # of a tile
        self._lanes = of.sums.unit.lanes
        self._write = Writing(str(spatial_of(sums)[-1].var.ty.dtype))
        # Of the type of sums, which TVM may put into the same memory.
        self._config = buffer("config", 16, dtype="int32")
        size = (cut.height * self._rows, cut.vectors * self._lanes)
        self._kept = buffer("sums", *size, dtype="int32")

    def written(self) -> Any:
        """Return the loops, over the cores where there are several."""
        from tvm import tirx

        cut, sums, write = self._cut, self._of.sums, self._write
        around = [*sums.rows[: len(sums.rows) - cut.merged], self._line.steps(cut.height)]
        panels = [sums.vectors // cut.vectors]
        counts = [*panels, *around] if cut.columns_outside else [*around, *panels]
        number = write.var("tile")
        at = write.unfused(number, counts)
        (panel,), outer = (at[:1], at[1:]) if cut.columns_outside else (at[-1:], at[:-1])
        body = self._tile(self._first(panel, outer))
        count, cores = math.prod(counts), min(sums.cores, math.prod(counts))
        if cores == 1:
            return self._with_tiles(write.loop(number, count, body))

        def begin(core: Any) -> Any:
            return tirx.floordiv(core * write.index(count), write.index(cores))

        core = write.var("core")
        low, high = begin(core), begin(core + write.index(1))
        part = tirx.For(number, low, high - low, tirx.ForKind.SERIAL, body)
        return write.loop(core, cores, self._with_tiles(part), is_parallel=True)

    def _with_tiles(self, loops: Any) -> Any:
        """Return loops that one core carries out, with its tiles and its memory."""
        from tvm import tirx

        shapes = dict.fromkeys(
            map(self._tile_of_sums, *zip(*self._pairs, strict=True)), (self._rows, _TILE_ROW)
        )
        depth = self._of.depth
        shapes |= {self._tile_of_rows(i): (self._rows, depth) for i in range(self._cut.height)}
        shapes |= {
            self._tile_of_weights(j): (depth // 4, _TILE_ROW) for j in range(self._cut.vectors)
        }
        config = [
            tirx.BufferStore(self._config, tirx.IntImm("int32", value), [self._write.index(i)])
            for i, value in enumerate(intrinsic.tile_config(shapes))
        ]
        begin = intrinsic.begin_tiles(self._address(self._config, [self._write.index(0)]))
        statements = [*config, begin, loops, intrinsic.end_tiles()]
        return block("tiles", statements, [self._config, self._kept])

    # --- places --------------------------------------------------------------------------------

    @property
    def _pairs(self) -> list[tuple[int, int]]:
        """The tiles of sums: weights of each are used for all rows, one after the other."""
        by_columns = itertools.product(range(self._cut.vectors), range(self._cut.height))
        return [(i, j) for j, i in by_columns]

    def _tile_of_sums(self, i: int, j: int) -> int:
        return i * self._cut.vectors + j

    def _tile_of_rows(self, i: int) -> int:
        return self._cut.height * self._cut.vectors + i

    def _tile_of_weights(self, j: int) -> int:
        return self._tile_of_rows(self._cut.height) + j

    def _first(self, panel: Any, outer: Sequence[Any]) -> _Place:
        """Return where the sums of a step begin; the last ones of a line overlap those before."""
        from tvm import tirx

        *before, step = outer
        size = self._rows * self._cut.height
        row = step * self._write.index(size)
        if self._line.length % size:
            row = tirx.min(row, self._write.index(self._line.length - size))
        return _Place(
            tuple(before), row, panel * self._write.index(self._cut.vectors * self._lanes)
        )

    def _moved(self, place: _Place, rows: Any, columns: Any) -> _Place:
        return _Place(place.before, place.row + rows, place.column + columns)

    def _address(self, of: Any, indices: Sequence[Any]) -> Any:
        from tvm import tirx

        if any(of.same_as(param) for param in self._params):
            return tirx.address_of(tirx.BufferLoad(of, indices))
        # TVM cuts memory of its own to the elements that it sees used.
        (offset,) = of.offset_of(indices)
        return of.access_ptr("rw", offset=offset)

    # --- statements ----------------------------------------------------------------------------

    def _tile(self, first: _Place) -> Any:
        """Return what computes the sums of a step, and what is made of them."""
        from tvm import tirx

        zeros = [intrinsic.zero_tile(self._tile_of_sums(i, j)) for i, j in self._pairs]
        kept = [
            intrinsic.store_tile(
                self._tile_of_sums(i, j),
                self._address(
                    self._kept,
                    [self._write.index(i * self._rows), self._write.index(j * self._lanes)],
                ),
                _TILE_ROW * self._cut.vectors,
            )
            for i, j in self._pairs
        ]
        return tirx.stmt_seq(*zeros, self._added(first), *kept, self._store(first))

    def _added(self, first: _Place) -> Any:
        """Return the loops over taps and depth, in which products of tiles are added to sums."""
        from tvm import tirx

        write, together = self._write, self._of.together
        reduced = reduced_of(self._sums)
        *outer, _ = loops = [
            *(write.var(str(v.var.name)) for v in reduced[:-together]),
            write.var("depth"),
        ]
        extents = [int(v.dom.extent) for v in reduced]
        within = write.unfused(loops[-1] * write.index(self._of.depth), extents[-together:])
        own = dict(zip((v.var for v in reduced), [*outer, *within], strict=True))
        rows, weights = operands(self._sums)
        statements = []
        for i, j in self._pairs:
            place = self._moved(first, write.index(i * self._rows), write.index(j * self._lanes))
            at = self._at(place, self._sums, own)
            if i == 0:
                address = self._address(weights.source, at.values_of(weights.indices))
                statements.append(intrinsic.load_tile(self._tile_of_weights(j), address, _TILE_ROW))
            if j == 0:
                address = self._address(rows.source, at.values_of(rows.indices))
                statements.append(
                    intrinsic.load_tile(self._tile_of_rows(i), address, self._line.row_bytes)
                )
            tiles = self._tile_of_sums(i, j), self._tile_of_rows(i), self._tile_of_weights(j)
            statements.append(intrinsic.add_products(*tiles))
        body = tirx.stmt_seq(*statements)
        steps = math.prod(extents[-together:]) // self._of.depth
        for loop, count in zip(reversed(loops), (steps, *extents[:-together][::-1]), strict=True):
            body = write.loop(loop, count, body)
        return body

    def _store(self, first: _Place) -> Any:
        """Return what stores sums, or what is made of them, row by row."""
        from tvm import tirx

        write = self._write
        row = write.var("row")

        def store(vector: int, lane: Any) -> Any:
            column = write.index(vector * self._lanes) + lane
            at = self._at(self._moved(first, row, column), self._stored, {})
            return at.stored(self._stored, self._sums, tirx.BufferLoad(self._kept, [row, column]))

        vectors = range(self._cut.vectors)
        body = tirx.stmt_seq(
            *(write.vector(self._lanes, functools.partial(store, v)) for v in vectors)
        )
        line = self._line
        digits = write.unfused(first.row + row, line.padded)
        for digit, extent, padded in zip(digits, line.extents, line.padded, strict=True):
            if extent < padded:
                body = tirx.IfThenElse(digit < write.index(extent), body, None)
        return write.loop(row, self._cut.height * self._rows, body)

    def _at(self, place: _Place, of: Any, reduced: Mapping[Any, Any]) -> Rewriting:
        """Return what a block's expressions are at a place."""
        digits = self._write.unfused(place.row, self._line.padded)
        spatial = (v.var for v in spatial_of(of))
        values = zip(spatial, [*place.before, *digits, place.column], strict=True)
        return Rewriting({**dict(values), **reduced})
