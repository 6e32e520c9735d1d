"""The loops of a convolution in the three stages of Winograd's algorithm."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tunerd.candidates.nests.blocks import reduced_of, spatial_of
from tunerd.candidates.registers.prefetching import asked, steps_ahead
from tunerd.candidates.registers.rewriting import Rewriting, with_loops
from tunerd.candidates.registers.writing import Writing, block, buffer, zero
from tunerd.vocabulary.winograd import TAPS, TRANSFORMS, Matrix

if TYPE_CHECKING:
    from tvm.ir import IRModule

    from tunerd.candidates.registers.winograd import Winograd, WinogradCut

_TYPE = "float32"


def with_stages(mod: IRModule, of: Winograd, stored: str, cut: WinogradCut) -> IRModule:
    """Return a module in which the stages take the place of the sums.

    stored: as `with_loops` has it.
    """
    from tvm import ir, tirx

    ((number, layout),) = of.layouts(cut)
    (name,) = mod.get_global_vars()
    params = list(mod[name].params)
    params[number] = buffer(str(params[number].name), *layout.shape)
    made = with_loops(
        mod,
        of.sums.sums,
        stored,
        lambda sums, behind: _Stages(of, cut, sums, behind, params[number]).written(),
    )
    old = made[name]
    return ir.IRModule({name: tirx.PrimFunc(params, old.body, old.ret_type, old.attrs)})


class _Stages:
    """Writes the stages of one cut. Buffers: vectors and what lies between the stages."""

    def __init__(
        self, of: Winograd, cut: WinogradCut, sums: Any, stored: Any, filters: Any
    ) -> None:
        self._of, self._cut = of.sums, cut
        self._sums, self._stored, self._filters = sums, stored, filters
        self.lanes = of.sums.unit.lanes
        self._spatial = [v.var for v in spatial_of(sums)]
        self._reduced = [v.var for v in reduced_of(sums)]
        self._write = Writing(str(self._spatial[-1].ty.dtype))
        self._size = cut.outputs + TAPS - 1
        self._high, self._wide = of.tiles_of(cut.outputs)
        self._tiles = cut.high * self._wide  # of a block
        self._transforms = TRANSFORMS[cut.outputs]

    def written(self) -> Any:
        cut, of = self._cut, self._of
        padded = math.ceil(self._tiles / cut.rows) * cut.rows
        self._images = buffer("images", self._size**2, padded, of.depth)
        self._products = buffer("products", self._size**2, padded, of.columns)
        kept = [self._images, self._products]
        counts = [of.rows[0], self._high // cut.high]
        number = self._write.var("block")
        self._batch, self._first = self._write.unfused(number, counts)
        # Blocks are spread over the cores, and where they are too few, what is in each of them.
        is_outside = of.cores > 1 and math.prod(counts) >= of.cores
        self._is_inside = of.cores > 1 and not is_outside
        stages = [self._of_images(), self._of_products(), self._of_outputs()]
        body = block("stages", stages, kept)
        return self._write.loop(number, math.prod(counts), body, is_parallel=is_outside)

    # --- stages --------------------------------------------------------------------------------

    def _of_images(self) -> Any:
        number = self._write.var("tile")
        vectors = self._of.depth // self.lanes
        row, column, vector = self._write.unfused(number, [self._cut.high, self._wide, vectors])
        matrix = self._transforms.inputs
        channel = vector * self._write.index(self.lanes)
        half = _Half(self, matrix, functools.partial(self._image, row, column, channel))
        for a, b in itertools.product(range(self._size), range(self._size)):
            place = [self._write.index(a * self._size + b), self._tile(row, column)]
            half.statements.append(
                self._stored_at(self._images, place, channel, matrix[b], half.rows[a])
            )
        return self._spread(number, self._cut.high * self._wide * vectors, half.block("image"))

    def _of_products(self) -> Any:
        from tvm import tirx

        cut, of, write = self._cut, self._of, self._write
        number, rows = write.var("panel"), write.var("rows")
        panels = of.vectors // cut.vectors
        element, panel = write.unfused(number, [self._size**2, panels])
        width = cut.vectors * self.lanes
        first = rows * write.index(cut.rows)
        places = list(itertools.product(range(cut.rows), range(cut.vectors)))
        kept = [buffer(f"sums_{i}", self.lanes) for i in range(len(places))]
        depth = write.var("depth")

        def added(row: int, vector: int, to: Any, lane: Any) -> Any:
            image = tirx.BufferLoad(self._images, [element, first + write.index(row), depth])
            at = [element, panel, depth, write.index(vector * self.lanes) + lane]
            product = image * tirx.BufferLoad(self._filters, at)
            return tirx.BufferStore(to, tirx.BufferLoad(to, [lane]) + product, [lane])

        def stored(row: int, vector: int, kept: Any, lane: Any) -> Any:
            column = panel * write.index(width) + write.index(vector * self.lanes) + lane
            at = [element, first + write.index(row), column]
            return tirx.BufferStore(self._products, tirx.BufferLoad(kept, [lane]), at)

        ahead = write.index(steps_ahead(width * of.unit.value_bytes))
        prefetches = [
            asked(self._filters, [element, panel, depth + ahead, write.index(vector * self.lanes)])
            for vector in range(cut.vectors)
        ]
        products = [
            self.vector(functools.partial(added, *place, to))
            for place, to in zip(places, kept, strict=True)
        ]
        statements = [
            *(self.vector(functools.partial(zero, to)) for to in kept),
            write.loop(depth, of.depth, tirx.stmt_seq(*prefetches, *products)),
            *(
                self.vector(functools.partial(stored, *place, own))
                for place, own in zip(places, kept, strict=True)
            ),
        ]
        body = block("product", statements, kept)
        body = write.loop(rows, math.ceil(self._tiles / cut.rows), body)
        return self._spread(number, self._size**2 * panels, body)

    def _of_outputs(self) -> Any:
        from tvm import tirx

        number, own = self._write.var("tile"), self._cut.outputs
        row, column, vector = self._write.unfused(
            number, [self._cut.high, self._wide, self._of.vectors]
        )
        matrix = self._transforms.outputs
        channel = vector * self._write.index(self.lanes)
        half = _Half(self, matrix, functools.partial(self._product, row, column, channel))
        for i, j in itertools.product(range(own), range(own)):
            made = half.buffer(f"made_{i}_{j}")
            store = functools.partial(self._output, row, column, channel, i, j, made)
            body = tirx.stmt_seq(self.sum(made, matrix[j], half.rows[i]), self.vector(store))
            half.statements.append(self._where_there(row, column, i, j, body))
        count = self._cut.high * self._wide * self._of.vectors
        return self._spread(number, count, half.block("output"))

    # --- values --------------------------------------------------------------------------------

    def _image(self, row: Any, column: Any, channel: Any, i: int, j: int, lane: Any) -> Any:
        """Return what the sums read at an element of a tile; zero where that is none of theirs."""
        from tvm import tirx

        spatial = [self._batch, *self._corner(row, column), self._write.index(0)]
        reduced = [self._write.index(i), self._write.index(j), channel + lane]
        values = dict(zip((*self._spatial, *self._reduced), (*spatial, *reduced), strict=True))
        value = Rewriting(values).value_of(self._sums.body.value.b.a)
        if (there := self._bounds(row, column, i, j, TAPS - 1)) is None:
            return value
        return tirx.if_then_else(there, value, tirx.const(0.0, _TYPE))

    def _product(self, row: Any, column: Any, channel: Any, a: int, b: int, lane: Any) -> Any:
        from tvm import tirx

        place = [self._write.index(a * self._size + b), self._tile(row, column)]
        return tirx.BufferLoad(self._products, [*place, channel + lane])

    def _output(
        self, row: Any, column: Any, channel: Any, i: int, j: int, made: Any, lane: Any
    ) -> Any:
        """Return what stores an output, or what is made of it."""
        from tvm import tirx

        y, x = self._corner(row, column)
        at = [self._batch, y + self._write.index(i), x + self._write.index(j), channel + lane]
        spatial = (v.var for v in spatial_of(self._stored))
        rewriting = Rewriting(dict(zip(spatial, at, strict=True)))
        return rewriting.stored(self._stored, self._sums, tirx.BufferLoad(made, [lane]))

    def _where_there(self, row: Any, column: Any, i: int, j: int, body: Any) -> Any:
        from tvm import tirx

        there = self._bounds(row, column, i, j, 0)
        return body if there is None else tirx.IfThenElse(there, body, None)

    def _bounds(self, row: Any, column: Any, i: int, j: int, beyond: int) -> Any:
        """Return whether an element of a tile is one of the image; None where each is.

        beyond: by how much what is read is larger than what is written.
        """
        from tvm import tirx

        _, *extents = self._of.rows
        found = None
        ends = (self._high, self._wide)
        for first, at, extent, tiles in zip(
            self._corner(row, column), (i, j), extents, ends, strict=True
        ):
            if (tiles - 1) * self._cut.outputs + at < extent + beyond:
                continue  # so is the last tile's
            own = first + self._write.index(at) < self._write.index(extent + beyond)
            found = own if found is None else tirx.all(found, own)
        return found

    # --- places --------------------------------------------------------------------------------

    def _corner(self, row: Any, column: Any) -> tuple[Any, Any]:
        """Return the first output of a tile, of which the row is within its block."""
        write, outputs = self._write, self._write.index(self._cut.outputs)
        first = self._first * write.index(self._cut.high) + row
        return first * outputs, column * outputs

    def _tile(self, row: Any, column: Any) -> Any:
        return row * self._write.index(self._wide) + column

    # --- statements ----------------------------------------------------------------------------

    def set(self, to: Any, value: Callable[[Any], Any]) -> Any:
        """Return what sets a vector. value: of a lane, given its number."""
        from tvm import tirx

        return self.vector(lambda lane: tirx.BufferStore(to, value(lane), [lane]))

    def sum(self, to: Any, factors: Sequence[float], of: Sequence[Any]) -> Any:
        """Return what sets a vector to the sum of others, each times its factor."""
        return self.set(to, lambda lane: _weighted(factors, of, lane))

    def _stored_at(
        self, to: Any, place: Sequence[Any], channel: Any, factors: Sequence[float], of: Any
    ) -> Any:
        from tvm import tirx

        return self.vector(
            lambda lane: tirx.BufferStore(
                to, _weighted(factors, of, lane), [*place, channel + lane]
            )
        )

    def vector(self, store: Callable[[Any], Any]) -> Any:
        return self._write.vector(self.lanes, store)

    def _spread(self, number: Any, count: int, body: Any) -> Any:
        """Return a stage's loop, which is over the cores where no loop around it is."""
        return self._write.loop(number, count, body, is_parallel=self._is_inside)


class _Half:
    """The statements that read a tile and apply a matrix to its columns.

    rows: what they make, vectors in the order of the matrix's rows, and of the tile's columns.
    """

    def __init__(self, of: _Stages, matrix: Matrix, value: Callable[[int, int, Any], Any]) -> None:
        """value: of an element of the tile, by its row, its column and the lane."""
        self._of, self._buffers = of, list[Any]()
        self.statements: list[Any] = []
        size = range(len(matrix[0]))
        self.rows = [[self.buffer(f"half_{a}_{j}") for j in size] for a in range(len(matrix))]
        for j in size:
            read = [self.buffer(f"read_{i}_{j}") for i in size]
            for i, to in enumerate(read):
                self.statements.append(of.set(to, functools.partial(value, i, j)))
            for row, factors in zip(self.rows, matrix, strict=True):
                self.statements.append(of.sum(row[j], factors, read))

    def buffer(self, name: str) -> Any:
        """Return one more vector."""
        self._buffers.append(buffer(name, self._of.lanes))
        return self._buffers[-1]

    def block(self, name: str) -> Any:
        return block(name, self.statements, self._buffers)


def _weighted(factors: Sequence[float], of: Sequence[Any], lane: Any) -> Any:
    """Return the sum of vectors, each times its factor."""
    from tvm import tirx

    used = [(factor, each) for factor, each in zip(factors, of, strict=True) if factor]
    found = None
    for factor, each in sorted(used, key=lambda pair: pair[0] < 0):  # the first is positive
        value = tirx.BufferLoad(each, [lane])
        size = value if abs(factor) == 1 else value * tirx.const(abs(factor), _TYPE)
        found = size if found is None else found + size if factor > 0 else found - size
    return found
