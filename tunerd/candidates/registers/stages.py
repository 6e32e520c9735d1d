"""The loops of a convolution in the three stages of Winograd's algorithm."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tunerd.candidates.nests.blocks import REDUCE
from tunerd.candidates.registers.prefetching import asked, steps_ahead
from tunerd.candidates.registers.rewriting import Rewriting, with_loops
from tunerd.candidates.registers.writing import Writing, zero
from tunerd.vocabulary.winograd import TAPS, TRANSFORMS

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
    params[number] = tirx.decl_buffer(layout.shape, _TYPE, name=str(params[number].name))
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
        self._lanes = of.sums.unit.lanes
        self._spatial = [v.var for v in sums.iter_vars if int(v.iter_type) != REDUCE]
        self._reduced = [v.var for v in sums.iter_vars if int(v.iter_type) == REDUCE]
        self._write = Writing(str(self._spatial[-1].ty.dtype))
        self._size = cut.outputs + TAPS - 1
        self._high, self._wide = of.tiles_of(cut.outputs)
        self._tiles = cut.high * self._wide  # of a block
        self._transforms = TRANSFORMS[cut.outputs]

    def written(self) -> Any:
        from tvm import tirx

        cut, of = self._cut, self._of
        padded = math.ceil(self._tiles / cut.rows) * cut.rows
        self._images = self._buffer("images", [self._size**2, padded, of.depth])
        self._products = self._buffer("products", [self._size**2, padded, of.columns])
        kept = [self._images, self._products]
        counts = [of.rows[0], self._high // cut.high]
        block = self._write.var("block")
        self._batch, self._first = self._write.unfused(block, counts)
        # Blocks are spread over the cores, and where they are too few, what is in each of them.
        is_outside = of.cores > 1 and math.prod(counts) >= of.cores
        self._inside = self._kind(of.cores > 1 and not is_outside)
        stages = [self._of_images(), self._of_products(), self._of_outputs()]
        body = self._block("stages", stages, kept)
        if math.prod(counts) == 1:
            return tirx.stmt_seq(body)  # of which `block` is the only value
        return self._write.loop(block, math.prod(counts), self._kind(is_outside), body)

    # --- stages --------------------------------------------------------------------------------

    def _of_images(self) -> Any:
        number = self._write.var("tile")
        vectors = self._of.depth // self._lanes
        row, column, vector = self._write.unfused(number, [self._cut.high, self._wide, vectors])
        size = range(self._size)
        read = [self._buffer(f"read_{i}", [self._lanes]) for i in range(self._size**2)]
        half = [self._buffer(f"half_{i}", [self._lanes]) for i in range(self._size**2)]
        matrix = self._transforms.inputs
        channel = vector * self._write.index(self._lanes)
        statements = []
        for j in size:
            for i in size:
                load = functools.partial(self._image, row, column, channel, i, j)
                statements.append(self._set(read[i * self._size + j], load))
            column_of = [read[i * self._size + j] for i in size]
            statements += [self._sum(half[a * self._size + j], matrix[a], column_of) for a in size]
        for a, b in itertools.product(size, size):
            row_of = half[a * self._size : (a + 1) * self._size]
            place = [self._write.index(a * self._size + b), self._tile(row, column)]
            statements.append(self._stored_at(self._images, place, channel, matrix[b], row_of))
        body = self._block("image", statements, [*read, *half])
        return self._write.loop(number, self._cut.high * self._wide * vectors, self._inside, body)

    def _of_products(self) -> Any:
        from tvm import tirx

        cut, of, write = self._cut, self._of, self._write
        number, rows = write.var("panel"), write.var("rows")
        panels = of.vectors // cut.vectors
        element, panel = write.unfused(number, [self._size**2, panels])
        width = cut.vectors * self._lanes
        first = rows * write.index(cut.rows)
        places = list(itertools.product(range(cut.rows), range(cut.vectors)))
        kept = [self._buffer(f"sums_{i}", [self._lanes]) for i in range(len(places))]
        depth = write.var("depth")

        def added(row: int, vector: int, to: Any, lane: Any) -> Any:
            image = tirx.BufferLoad(self._images, [element, first + write.index(row), depth])
            at = [element, panel, depth, write.index(vector * self._lanes) + lane]
            product = image * tirx.BufferLoad(self._filters, at)
            return tirx.BufferStore(to, tirx.BufferLoad(to, [lane]) + product, [lane])

        def stored(row: int, vector: int, kept: Any, lane: Any) -> Any:
            column = panel * write.index(width) + write.index(vector * self._lanes) + lane
            at = [element, first + write.index(row), column]
            return tirx.BufferStore(self._products, tirx.BufferLoad(kept, [lane]), at)

        ahead = write.index(steps_ahead(width * of.unit.value_bytes))
        prefetches = [
            asked(self._filters, [element, panel, depth + ahead, write.index(vector * self._lanes)])
            for vector in range(cut.vectors)
        ]
        products = [
            self._vector(functools.partial(added, *place, to))
            for place, to in zip(places, kept, strict=True)
        ]
        statements = [
            *(self._vector(functools.partial(zero, to)) for to in kept),
            self._serial(depth, of.depth, tirx.stmt_seq(*prefetches, *products)),
            *(
                self._vector(functools.partial(stored, *place, own))
                for place, own in zip(places, kept, strict=True)
            ),
        ]
        block = self._block("product", statements, kept)
        body = self._serial(rows, math.ceil(self._tiles / cut.rows), block)
        return write.loop(number, self._size**2 * panels, self._inside, body)

    def _of_outputs(self) -> Any:
        from tvm import tirx

        number, own = self._write.var("tile"), self._cut.outputs
        row, column, vector = self._write.unfused(
            number, [self._cut.high, self._wide, self._of.vectors]
        )
        size = range(self._size)
        read = [self._buffer(f"read_{i}", [self._lanes]) for i in range(self._size**2)]
        half = [self._buffer(f"half_{i}", [self._lanes]) for i in range(own * self._size)]
        made = [self._buffer(f"made_{i}", [self._lanes]) for i in range(own**2)]
        matrix = self._transforms.outputs
        channel = vector * self._write.index(self._lanes)
        statements = []
        for b in size:
            for a in size:
                place = [self._write.index(a * self._size + b), self._tile(row, column)]
                load = functools.partial(self._product, place, channel)
                statements.append(self._set(read[a * self._size + b], load))
            column_of = [read[a * self._size + b] for a in size]
            statements += [
                self._sum(half[i * self._size + b], matrix[i], column_of) for i in range(own)
            ]
        for i, j in itertools.product(range(own), range(own)):
            row_of = half[i * self._size : (i + 1) * self._size]
            to = made[i * own + j]
            store = functools.partial(self._output, row, column, channel, i, j, to)
            body = tirx.stmt_seq(self._sum(to, matrix[j], row_of), self._vector(store))
            statements.append(self._where_there(row, column, i, j, body))
        block = self._block("output", statements, [*read, *half, *made])
        count = self._cut.high * self._wide * self._of.vectors
        return self._write.loop(number, count, self._inside, block)

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

    def _product(self, place: Sequence[Any], channel: Any, lane: Any) -> Any:
        from tvm import tirx

        return tirx.BufferLoad(self._products, [*place, channel + lane])

    def _output(
        self, row: Any, column: Any, channel: Any, i: int, j: int, made: Any, lane: Any
    ) -> Any:
        """Return what stores an output, or what is made of it."""
        from tvm import tirx

        stored, value = self._stored, tirx.BufferLoad(made, [lane])
        spatial = [v.var for v in stored.iter_vars if int(v.iter_type) != REDUCE]
        y, x = self._corner(row, column)
        at = [self._batch, y + self._write.index(i), x + self._write.index(j), channel + lane]
        rewriting = Rewriting(dict(zip(spatial, at, strict=True)))
        if not stored.same_as(self._sums):
            rewriting.sums = self._sums.writes[0].source, value
            value = rewriting.value_of(stored.body.value)
        places = rewriting.values_of(stored.body.indices)
        return tirx.BufferStore(stored.body.buffer, value, places)

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

    def _set(self, to: Any, value: Callable[[Any], Any]) -> Any:
        from tvm import tirx

        return self._vector(lambda lane: tirx.BufferStore(to, value(lane), [lane]))

    def _sum(self, to: Any, factors: Sequence[float], of: Sequence[Any]) -> Any:
        return self._set(to, lambda lane: _weighted(factors, of, lane))

    def _stored_at(
        self, to: Any, place: Sequence[Any], channel: Any, factors: Sequence[float], of: Any
    ) -> Any:
        from tvm import tirx

        return self._vector(
            lambda lane: tirx.BufferStore(
                to, _weighted(factors, of, lane), [*place, channel + lane]
            )
        )

    def _vector(self, store: Callable[[Any], Any]) -> Any:
        return self._write.vector(self._lanes, store)

    def _serial(self, number: Any, count: int, body: Any) -> Any:
        return self._write.loop(number, count, self._kind(False), body)

    def _kind(self, is_parallel: bool) -> Any:
        from tvm import tirx

        return tirx.ForKind.PARALLEL if is_parallel else tirx.ForKind.SERIAL

    def _buffer(self, name: str, shape: Sequence[int]) -> Any:
        from tvm import tirx

        return tirx.decl_buffer(shape, _TYPE, name=name)

    def _block(self, name: str, statements: Sequence[Any], buffers: Sequence[Any]) -> Any:
        from tvm import tirx
        from tvm.s_tir import SBlock, SBlockRealize

        block = SBlock([], [], [], name, tirx.stmt_seq(*statements), None, buffers)
        return SBlockRealize([], tirx.const(True, "bool"), block)


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
